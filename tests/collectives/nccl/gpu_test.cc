// The real NCCL on the GPU of this machine: one rank, and two to four ranks as processes that share it. NCCL
// takes them for ranks of as many hosts, by a NCCL_HOSTID each, and moves everything over sockets: that is a
// check of results and never of speed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "forebay/nccl_communicator.h"
#include "forebay/shm_communicator.h"
#include "tests/collectives/communicator_conformance.h"
#include "tests/support/process.h"

namespace forebay::testing {
namespace {

constexpr std::chrono::milliseconds kDeadline{60'000};
constexpr std::chrono::seconds kProcessMax{100};
constexpr std::uint64_t kSeed = 7;

// The facts that a started rank needs.
constexpr const char* kRank = "FOREBAY_TEST_NCCL_RANK";
constexpr const char* kSize = "FOREBAY_TEST_NCCL_SIZE";
constexpr const char* kStore = "FOREBAY_TEST_NCCL_STORE";

// Why there is nothing to check here; empty when there is.
std::string missing() {
  const Result<int> devices = CudaBackend::device_count();
  if (!devices.ok()) return devices.status().to_string();
  if (devices.value() == 0) return "there is a CUDA driver and no device";
  const Result<NcclLibraryFacts> library = nccl_library();
  return library.ok() ? "" : library.status().to_string();
}

TEST(NcclGpu, TheLibraryIsFoundOrSaidToBeMissing) {
  const Result<NcclLibraryFacts> library = nccl_library();
  if (library.ok()) {
    std::printf("NCCL %d from %s\n", library.value().version, library.value().path.c_str());
    EXPECT_GE(library.value().version, 21'800);
  } else {
    std::printf("%s\n", library.status().message().c_str());
    EXPECT_NE(library.status().message().find("FOREBAY_NCCL_LIBRARY"), std::string::npos);
  }
}

class NcclGpu : public ::testing::TestWithParam<int> {};

TEST_P(NcclGpu, RanksHaveTheBitsOfTheDefinition) {
  if (const std::string reason = missing(); !reason.empty()) GTEST_SKIP() << reason;
  const TemporaryDirectory store;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  std::vector<std::unique_ptr<Process>> ranks;
  for (int rank = 0; rank < GetParam(); ++rank) {
    ranks.push_back(std::make_unique<Process>(
        std::vector<std::string>{self, "--gtest_also_run_disabled_tests", "--gtest_filter=NcclRank.*"},
        Process::Variables{{kRank, std::to_string(rank)},
                           {kSize, std::to_string(GetParam())},
                           {kStore, store.path()},
                           {"NCCL_HOSTID", "forebay-rank-" + std::to_string(rank)},
                           {"NCCL_SOCKET_IFNAME", "lo"},
                           {"NCCL_IB_DISABLE", "1"},
                           {"NCCL_RAS_ENABLE", "0"}}));
  }
  for (const auto& rank : ranks) {
    const Finished finished = rank->finish(kProcessMax);
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
  }
}

INSTANTIATE_TEST_SUITE_P(OneGpu, NcclGpu, ::testing::Values(1, 2, 3, 4),
                         [](const auto& instance) { return std::to_string(instance.param) + "_ranks"; });

// --- one rank, in a process of its own ---

void check_sum(Member& member, DataType type, std::size_t count, std::size_t gap_bytes) {
  Communicator& communicator = member.communicator();
  const auto ranks = static_cast<std::size_t>(communicator.size());
  const int rank = communicator.rank();
  const std::size_t element = element_bytes(type);
  const std::size_t stride = count * element + gap_bytes;
  std::vector<std::byte> contribution(stride * ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::size_t i = 0; i < count; ++i)
      store(type, &contribution[r * stride], i, sample(kSeed, rank, r * count + i));
  }
  float* const target = member.allocate<float>(count);
  const Status queued = communicator.reduce_scatter({.source = member.allocate_copy(contribution),
                                                     .source_stride_bytes = stride,
                                                     .count = count,
                                                     .type = type,
                                                     .receive = member.allocate(count * element * ranks),
                                                     .target = target,
                                                     .first = true},
                                                    member.stream());
  ASSERT_TRUE(queued.ok()) << queued.to_string();
  const Status done = member.finish();
  ASSERT_TRUE(done.ok()) << done.to_string();
  const std::vector<float> sums = member.read(target, count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t index = static_cast<std::size_t>(rank) * count + i;
    float expected = round_to(type, sample(kSeed, 0, index));
    for (int r = 1; r < communicator.size(); ++r) expected += round_to(type, sample(kSeed, r, index));
    ASSERT_EQ(float_bits(sums[i]), float_bits(expected)) << data_type_name(type) << " element " << i;
  }
}

void check_gather(Member& member, std::size_t bytes, std::size_t gap_bytes) {
  Communicator& communicator = member.communicator();
  const auto ranks = static_cast<std::size_t>(communicator.size());
  const std::size_t stride = bytes + gap_bytes;
  std::byte* const target = member.allocate_filled(stride * ranks, 0xCB);
  const Status queued =
      communicator.all_gather({.source = member.allocate_filled(bytes, 0x10 + communicator.rank()),
                               .target = target,
                               .target_stride_bytes = stride,
                               .bytes = bytes},
                              member.stream());
  ASSERT_TRUE(queued.ok()) << queued.to_string();
  const Status done = member.finish();
  ASSERT_TRUE(done.ok()) << done.to_string();
  const std::vector<std::byte> actual = member.read(target, stride * ranks);
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const std::byte expected = i % stride < bytes ? std::byte(0x10 + i / stride) : std::byte{0xCB};
    ASSERT_EQ(actual[i], expected) << "byte " << i;
  }
}

void check_ring(Member& member) {
  Communicator& communicator = member.communicator();
  if (communicator.size() == 1) return;
  const int right = (communicator.rank() + 1) % communicator.size();
  const int left = (communicator.rank() + communicator.size() - 1) % communicator.size();
  std::byte* const out = member.allocate_filled(1000, communicator.rank());
  std::byte* const in = member.allocate(1000);
  const auto send = [&] { return communicator.send(out, 1000, right, 5, member.stream()); };
  const auto recv = [&] { return communicator.recv(in, 1000, left, 5, member.stream()); };
  const bool first = communicator.rank() == 0;
  ASSERT_TRUE((first ? send() : recv()).ok());
  ASSERT_TRUE((first ? recv() : send()).ok());
  const Status done = member.finish();
  ASSERT_TRUE(done.ok()) << done.to_string();
  EXPECT_EQ(member.read(in, 1000)[999], std::byte(left));
}

TEST(NcclRank, DISABLED_DoesItsPart) {
  const char* const rank_text = std::getenv(kRank);
  if (rank_text == nullptr) GTEST_SKIP() << "it is a part of another test";
  const int rank = std::atoi(rank_text);
  const int size = std::atoi(std::getenv(kSize));
  const std::unique_ptr<HostBackend> host = create_host_backend(rank);
  std::unique_ptr<Communicator> control = value_or_throw(create_shm_communicator(
      {.rank = rank, .size = size, .store = std::getenv(kStore), .deadline = kDeadline}, *host));
  std::unique_ptr<CudaBackend> backend = value_or_throw(CudaBackend::create({}));
  CudaBackend& device = *backend;
  Member member(std::move(backend));
  member.set_communicator(value_or_throw(
      create_nccl_communicator(std::move(control), device, member.kernels(), {.deadline = kDeadline})));

  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
    check_sum(member, type, 33 * 512, 0);
    check_sum(member, type, 512, 1024);
  }
  check_sum(member, DataType::kBfloat16, 1 << 20, 0);
  check_gather(member, 300'000, 0);
  check_gather(member, 300'000, 192);
  check_gather(member, 1, 0);
  check_ring(member);
  if (HasFailure()) return;

  // A group of the even ranks and one of the odd ones, with an NCCL communicator each.
  Result<std::unique_ptr<Communicator>> part = member.communicator().split(rank % 2, rank);
  ASSERT_TRUE(part.ok()) << part.status().to_string();
  EXPECT_TRUE(part.value()->barrier().ok());
  part.value().reset();

  // A rank that issues another operation is an error on all ranks, and queued work ends.
  if (size == 1) return;
  const std::size_t bytes = rank == size - 1 ? 2048 : 4096;
  static_cast<void>(
      member.communicator().all_gather({.source = member.allocate(bytes),
                                        .target = member.allocate(4096 * static_cast<std::size_t>(size)),
                                        .target_stride_bytes = bytes,
                                        .bytes = bytes},
                                       member.stream()));
  const Status status = member.finish();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
}

}  // namespace
}  // namespace forebay::testing
