// The calls that a collective costs: into NCCL, and into the driver by forebay itself.
#include <latch>

#include "tests/collectives/nccl/world.h"

namespace forebay::testing {
namespace {

constexpr int kRanks = 2;
constexpr std::size_t kOperations = 240;

struct Calls {
  std::uint64_t copies = 0;
  std::uint64_t records = 0;
  std::uint64_t kernels = 0;  // A group of NCCL's calls is one.
  std::uint64_t nccl = 0;     // Into NCCL; the end of a group is one.
  std::uint64_t all = 0;      // Into the driver, with those about contexts and those of the watch.
};

// Runs `operation` kOperations times on each rank, and counts the calls of all ranks.
Calls count_calls(const std::function<Status(Member&, std::byte* source, std::byte* target)>& operation) {
  NcclWorldOptions options;
  options.gpu = gpus(kRanks);
  NcclWorld world(kRanks, std::chrono::seconds(60), options);
  const auto now = [&] {
    const auto count = [&](const char* entry) { return world.gpu().controls().call_count(entry); };
    Calls calls{.copies = count("cuMemcpyAsync"),
                .records = count("cuEventRecord"),
                .kernels = count("cuLaunchKernel"),
                .nccl = world.account().calls};
    for (const char* entry :
         {"cuMemcpyAsync", "cuEventRecord", "cuEventQuery", "cuStreamIsCapturing", "cuLaunchKernel",
          "cuCtxGetCurrent", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"}) {
      calls.all += count(entry);
    }
    return calls;
  };
  std::latch begun(kRanks);
  std::latch counted(1);
  std::latch ended(kRanks);
  std::latch leave(1);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Member member(world.create_backend(rank));
      member.set_communicator(value_or_throw(world.join(rank, member.backend(), member.kernels())));
      std::byte* const source = member.allocate_filled(64 * kRanks, 0);
      std::byte* const target = member.allocate(64 * kRanks);
      begun.count_down();
      counted.wait();
      for (std::size_t i = 0; i < kOperations; ++i) EXPECT_TRUE(operation(member, source, target).ok());
      EXPECT_TRUE(member.finish().ok());
      ended.count_down();
      leave.wait();
    });
  }
  begun.wait();
  const Calls before = now();
  counted.count_down();
  ended.wait();
  const Calls after = now();
  leave.count_down();
  for (std::thread& thread : threads) thread.join();
  return {.copies = after.copies - before.copies,
          .records = after.records - before.records,
          .kernels = after.kernels - before.kernels,
          .nccl = after.nccl - before.nccl,
          .all = after.all - before.all};
}

void show(const char* name, const Calls& calls) {
  const auto each = [](std::uint64_t count) {
    return static_cast<double>(count) / static_cast<double>(kRanks * kOperations);
  };
  std::printf("%-14s copies %.3f  events %.3f  kernels %.3f  NCCL calls %.3f  driver calls %.1f\n", name,
              each(calls.copies), each(calls.records), each(calls.kernels), each(calls.nccl),
              each(calls.all));
}

// The fingerprints travel with every eighth collective.
constexpr std::uint64_t kIssued = kRanks * kOperations;
constexpr std::uint64_t kCarrying = kIssued / 8;

TEST(NcclCalls, OfAnAllGather) {
  const Calls calls = count_calls([](Member& member, std::byte* source, std::byte* target) {
    return member.communicator().all_gather(
        {.source = source, .target = target, .target_stride_bytes = 64, .bytes = 64}, member.stream());
  });
  show("all_gather", calls);
  EXPECT_EQ(calls.copies, 2 * kCarrying);
  EXPECT_EQ(calls.records, 2 * kIssued);
  EXPECT_EQ(calls.kernels, kIssued);
  EXPECT_EQ(calls.nccl, 2 * kIssued + kCarrying);
}

TEST(NcclCalls, OfAReduceScatter) {
  const Calls calls = count_calls([](Member& member, std::byte* source, std::byte* target) {
    return member.communicator().reduce_scatter({.source = source,
                                                 .source_stride_bytes = 64,
                                                 .count = 16,
                                                 .type = DataType::kFloat32,
                                                 .receive = target,
                                                 .target = reinterpret_cast<float*>(target),
                                                 .first = true},
                                                member.stream());
  });
  show("reduce_scatter", calls);
  EXPECT_EQ(calls.copies, 2 * kCarrying);
  EXPECT_EQ(calls.records, 2 * kIssued);
  EXPECT_EQ(calls.kernels, 2 * kIssued);  // The second adds.
  EXPECT_EQ(calls.nccl, 3 * kIssued + 2 * kCarrying);
}

// As every collective did before fingerprints travelled in batches.
TEST(NcclCalls, OfAGatherThatDecides) {
  const Calls calls = count_calls([](Member& member, std::byte* source, std::byte* target) {
    return member.communicator().all_gather(
        {.source = source, .target = target, .target_stride_bytes = 64, .bytes = 64, .decides = true},
        member.stream());
  });
  show("deciding gather", calls);
  EXPECT_EQ(calls.copies, 2 * kIssued);
  EXPECT_EQ(calls.nccl, 3 * kIssued);
}

}  // namespace
}  // namespace forebay::testing
