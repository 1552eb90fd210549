// How NCCL is found, and the errors for a library that cannot be used.
#include "collectives/nccl/library.h"

#include "tests/collectives/nccl/world.h"

namespace forebay::testing {}

namespace forebay::internal {
namespace {

using testing::FakeNcclLibrary;

TEST(NcclLibrary, TheConfiguredOneIsLoadedAndKnown) {
  const FakeNcclLibrary fake;

  const Result<NcclLibraryFacts> facts = nccl_library();

  ASSERT_TRUE(facts.ok()) << facts.status().to_string();
  EXPECT_EQ(facts.value().version, 22'809);
  EXPECT_EQ(facts.value().path, FOREBAY_FAKE_LIBNCCL);
  EXPECT_TRUE(facts.value().can_register);
  EXPECT_TRUE(facts.value().can_revoke);
}

TEST(NcclLibrary, TheCopyThatTheProcessHasComesFirst) {
  const FakeNcclLibrary fake;  // Opened by the test itself, and under the library's own name.
  ASSERT_TRUE(nccl_library().ok());

  const Result<NcclLibraryFacts> facts = nccl_library("/nowhere/libnccl.so.2");

  ASSERT_TRUE(facts.ok()) << facts.status().to_string();
  EXPECT_EQ(facts.value().path, FOREBAY_FAKE_LIBNCCL);
}

TEST(NcclLibrary, OneThatIsTooOldIsRefused) {
  fake_nccl::FakeNcclOptions options;
  options.version = 21'705;
  const FakeNcclLibrary fake(options);

  const Status status = NcclLibrary::open(FOREBAY_FAKE_LIBNCCL).status();

  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("2.17.5"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("2.18"), std::string::npos) << status.message();
}

TEST(NcclLibrary, TheOldestThatIsNewEnoughIsTaken) {
  fake_nccl::FakeNcclOptions options;
  options.version = 21'800;
  const FakeNcclLibrary fake(options);

  EXPECT_TRUE(NcclLibrary::open(FOREBAY_FAKE_LIBNCCL).ok());
}

TEST(NcclLibrary, EachErrorOfNcclHasItsKindAndName) {
  using nccl::NcclResult;
  const FakeNcclLibrary fake;
  const NcclLibrary library = NcclLibrary::open(FOREBAY_FAKE_LIBNCCL).value();
  const auto expect = [&](NcclResult result, StatusCode code, const std::string& name) {
    const Status status = nccl_failure(library, result, nullptr, "ncclSend", "move bytes");
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_TRUE(status.message().starts_with("cannot move bytes: ncclSend: " + name)) << status.message();
  };
  expect(NcclResult::kUnhandledCudaError, StatusCode::kInternal, "ncclUnhandledCudaError");
  expect(NcclResult::kSystemError, StatusCode::kIoError, "ncclSystemError");
  expect(NcclResult::kInternalError, StatusCode::kInternal, "ncclInternalError");
  expect(NcclResult::kInvalidArgument, StatusCode::kInvalidArgument, "ncclInvalidArgument");
  expect(NcclResult::kInvalidUsage, StatusCode::kInvalidArgument, "ncclInvalidUsage");
  expect(NcclResult::kRemoteError, StatusCode::kPeerLost, "ncclRemoteError");
  expect(static_cast<NcclResult>(99), StatusCode::kInternal, "NCCL's error 99");
}

TEST(NcclLibrary, ALibraryThatIsNotThereOrNotNcclIsNamed) {
  const Status missing = NcclLibrary::open("/nowhere/libnccl.so.2").status();
  EXPECT_EQ(missing.code(), StatusCode::kUnavailable);
  EXPECT_NE(missing.message().find("/nowhere/libnccl.so.2"), std::string::npos) << missing.message();
  EXPECT_NE(missing.message().find("FOREBAY_NCCL_LIBRARY"), std::string::npos) << missing.message();

  const Status other = NcclLibrary::open(FOREBAY_FAKE_LIBCUDA).status();
  EXPECT_EQ(other.code(), StatusCode::kUnsupported);
  EXPECT_NE(other.message().find("it has no ncclGetVersion"), std::string::npos) << other.message();
}

}  // namespace
}  // namespace forebay::internal
