// Guarded ranges of the host backend.
#include "forebay/access_guard.h"

#include <gtest/gtest.h>

#include <vector>

#include "forebay/host_backend.h"
#include "forebay/stream_call.h"

namespace forebay {
namespace {

using Access = AccessGuard::Access;

constexpr std::size_t kGranule = 64 << 10;

// One chunk that is mapped twice: where it is guarded, and where it is not.
struct TwoMappings {
  std::unique_ptr<HostBackend> backend =
      HostBackend::create({.memory_bytes = 4 * kGranule, .granularity = kGranule, .guard = true}).value();
  AccessGuard& guard = *backend->access_guard();
  DevicePtr guarded = backend->reserve(2 * kGranule, 0).value();
  DevicePtr open = guarded + kGranule;
  Chunk chunk = backend->chunk_create(kGranule).value();
  Stream stream = backend->stream_create().value();

  TwoMappings() {
    for (const DevicePtr address : {guarded, open}) {
      EXPECT_TRUE(backend->map(address, chunk).ok());
      EXPECT_TRUE(backend->set_access(address, kGranule).ok());
    }
    EXPECT_TRUE(guard.guard(guarded, kGranule, "parts").ok());
    open[0] = std::byte{7};
  }
  ~TwoMappings() {
    EXPECT_TRUE(backend->stream_destroy(stream).ok());
    EXPECT_TRUE(backend->unmap(guarded, 2 * kGranule).ok());
    EXPECT_TRUE(backend->chunk_destroy(chunk).ok());
    EXPECT_TRUE(backend->release(guarded, 2 * kGranule).ok());
    EXPECT_EQ(backend->live_handle_count(), 0u);
  }
  void wait() const { EXPECT_TRUE(backend->stream_synchronize(stream).ok()); }
};

TEST(AccessGuard, IsThereWhereItWasAskedFor) {
  EXPECT_EQ(HostBackend::create({}).value()->access_guard() != nullptr,
            std::getenv("FOREBAY_HOST_GUARD") != nullptr);
  EXPECT_NE(HostBackend::create({.guard = true}).value()->access_guard(), nullptr);
}

TEST(AccessGuard, OpensInTheOrderOfTheStream) {
  TwoMappings two;
  std::byte found{};

  ASSERT_TRUE(two.guard.open(two.guarded, Access::kWrite, two.stream).ok());
  ASSERT_TRUE(call_on(*two.backend, two.stream, [&] { two.guarded[1] = two.guarded[0]; }).ok());
  ASSERT_TRUE(two.guard.close(two.guarded, Access::kWrite, two.stream).ok());
  ASSERT_TRUE(call_on(*two.backend, two.stream, [&] { found = two.open[1]; }).ok());
  two.wait();

  EXPECT_EQ(found, std::byte{7});
}

TEST(AccessGuard, StaysOpenUntilTheLastClose) {
  TwoMappings two;

  for (int i = 0; i < 2; ++i) ASSERT_TRUE(two.guard.open(two.guarded, Access::kRead, two.stream).ok());
  ASSERT_TRUE(two.guard.close(two.guarded, Access::kRead, two.stream).ok());
  two.wait();

  EXPECT_EQ(two.guarded[0], std::byte{7});
}

TEST(AccessGuard, RefusesARangeWhoseEndIsGuarded) {
  const auto backend =
      HostBackend::create({.memory_bytes = 4 * kGranule, .granularity = kGranule, .guard = true}).value();
  const DevicePtr base = backend->reserve(2 * kGranule, 0).value();
  std::vector<Chunk> chunks;
  for (const DevicePtr address : {base, base + kGranule}) {
    chunks.push_back(backend->chunk_create(kGranule).value());
    ASSERT_TRUE(backend->map(address, chunks.back()).ok());
    ASSERT_TRUE(backend->set_access(address, kGranule).ok());
  }
  ASSERT_TRUE(backend->access_guard()->guard(base + kGranule, kGranule, "end").ok());

  EXPECT_EQ(backend->access_guard()->guard(base, 2 * kGranule, "both").code(), StatusCode::kInvalidArgument);

  ASSERT_TRUE(backend->unmap(base, 2 * kGranule).ok());
  for (const Chunk chunk : chunks) ASSERT_TRUE(backend->chunk_destroy(chunk).ok());
  ASSERT_TRUE(backend->release(base, 2 * kGranule).ok());
}

TEST(AccessGuard, RefusesARangeThatIsGuardedOrNotMapped) {
  TwoMappings two;

  EXPECT_EQ(two.guard.guard(two.guarded, kGranule, "again").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(two.guard.guard(two.guarded, 3 * kGranule, "holes").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(two.guard.open(two.guarded, Access::kRead, {}).code(), StatusCode::kInvalidArgument);
}

TEST(AccessGuard, GuardsRangesBesideEachOther) {
  TwoMappings two;
  const Status beside = two.guard.guard(two.open, kGranule, "others");
  EXPECT_TRUE(beside.ok()) << beside.to_string();
  ASSERT_TRUE(two.backend->unmap(two.guarded, kGranule).ok());
  ASSERT_TRUE(two.backend->map(two.guarded, two.chunk).ok());

  TwoMappings other;
  ASSERT_TRUE(other.backend->unmap(other.guarded, 2 * kGranule).ok());
  const DevicePtr base = other.backend->reserve(2 * kGranule, 0).value();
  for (const DevicePtr address : {base, base + kGranule}) {
    ASSERT_TRUE(other.backend->map(address, other.chunk).ok());
  }
  EXPECT_TRUE(other.guard.guard(base + kGranule, kGranule, "second").ok());
  EXPECT_TRUE(other.guard.guard(base, kGranule, "first").ok());
  EXPECT_EQ(other.guard.guard(base, 2 * kGranule, "both").code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(other.backend->unmap(base, 2 * kGranule).ok());
  ASSERT_TRUE(other.backend->release(base, 2 * kGranule).ok());
  // One that reaches into it.
  const DevicePtr again = other.backend->reserve(2 * kGranule, 0).value();
  for (const DevicePtr address : {again, again + kGranule}) {
    ASSERT_TRUE(other.backend->map(address, other.chunk).ok());
  }
  EXPECT_TRUE(other.guard.guard(again, 2 * kGranule, "both").ok());
  EXPECT_EQ(other.guard.guard(again + kGranule, kGranule, "within").code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(other.backend->unmap(again, 2 * kGranule).ok());
  ASSERT_TRUE(other.backend->release(again, 2 * kGranule).ok());
  for (const DevicePtr address : {other.guarded, other.open}) {
    ASSERT_TRUE(other.backend->map(address, other.chunk).ok());
  }
}

// The addresses of a backend that has ended may be another one's.
TEST(AccessGuard, IsForgottenWithItsBackend) {
  for (int i = 0; i < 5; ++i) {
    const auto backend =
        HostBackend::create({.memory_bytes = 4 * kGranule, .granularity = kGranule, .guard = true}).value();
    const DevicePtr base = backend->reserve(kGranule, 0).value();
    ASSERT_TRUE(backend->map(base, backend->chunk_create(kGranule).value()).ok());
    ASSERT_TRUE(backend->set_access(base, kGranule).ok());

    const Status guarded = backend->access_guard()->guard(base, kGranule, "parts");

    EXPECT_TRUE(guarded.ok()) << guarded.to_string();
  }
}

void read_closed() {
  TwoMappings two;
  static_cast<void>(static_cast<volatile std::byte*>(two.guarded)[3]);
}
void read_closed_again() {
  TwoMappings two;
  EXPECT_TRUE(two.guard.open(two.guarded, Access::kRead, two.stream).ok());
  EXPECT_TRUE(two.guard.close(two.guarded, Access::kRead, two.stream).ok());
  two.wait();
  static_cast<void>(static_cast<volatile std::byte*>(two.guarded)[3]);
}
void write_open_for_reading() {
  TwoMappings two;
  EXPECT_TRUE(two.guard.open(two.guarded, Access::kRead, two.stream).ok());
  two.wait();
  two.guarded[0] = std::byte{1};
}
void read_remapped() {
  TwoMappings two;
  EXPECT_TRUE(two.backend->unmap(two.guarded, kGranule).ok());
  EXPECT_TRUE(two.backend->map(two.guarded, two.chunk).ok());
  EXPECT_TRUE(two.backend->set_access(two.guarded, kGranule).ok());
  static_cast<void>(static_cast<volatile std::byte*>(two.guarded)[3]);
}

TEST(AccessGuardDeathTest, AUseOfAClosedRangeIsReported) {
  const char* const report =
      "forebay: cannot (read|use) 0x[0-9a-f]+: it is byte 3 of the parts on host, which nobody may use";
  EXPECT_DEATH(read_closed(), report);
  EXPECT_DEATH(read_closed_again(), report);
  EXPECT_DEATH(write_open_for_reading(), "it is byte 0 of the parts on host, which nobody may write now");
}

TEST(AccessGuardDeathTest, StaysWhenOtherMemoryIsMapped) {
  EXPECT_DEATH(read_remapped(), "byte 3 of the parts on host");
}

}  // namespace
}  // namespace forebay
