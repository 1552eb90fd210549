// The CPU's stand-in for a block of CUDA threads: its results, and the defects it catches.
#include "tests/kernels/simt.h"

#include <gtest/gtest.h>

#include <vector>

namespace forebay::simt {
namespace {

std::string run(unsigned grid_size, unsigned block_size, std::size_t shared_bytes, BlockBody body,
                const void* launch) {
  Dimensions grid, block;
  grid.x = grid_size, block.x = block_size;
  return run_blocks(grid, block, shared_bytes, body, launch);
}

TEST(Simt, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> counts(3 * 70);

  const std::string failure = run(
      3, 70, 0,
      [](const BlockContext& c, void*, const void* launch) {
        auto& counts = *static_cast<std::vector<int>*>(const_cast<void*>(launch));
        counts[c.block() * c.block_size() + c.thread()] += static_cast<int>(c.grid_size());
      },
      &counts);

  EXPECT_EQ(failure, "");
  EXPECT_EQ(counts, std::vector<int>(3 * 70, 3));
}

// Thread i reads the value that thread i + 1 wrote before the barrier, in a ring: no order of whole threads
// allows it.
TEST(Simt, WhatIsWrittenBeforeABarrierIsReadAfterIt) {
  std::vector<unsigned> got(100);

  const std::string failure = run(
      2, 100, 100 * sizeof(unsigned),
      [](const BlockContext& c, void* shared, const void* launch) {
        auto* values = static_cast<unsigned*>(shared);
        for (unsigned round = 0; round < 3; ++round) {
          values[c.thread()] = 1000 * round + c.thread();
          c.barrier();
          const unsigned next = values[(c.thread() + 1) % c.block_size()];
          if (round == 2)
            (*static_cast<std::vector<unsigned>*>(const_cast<void*>(launch)))[c.thread()] = next;
          c.barrier();
        }
      },
      &got);

  EXPECT_EQ(failure, "");
  for (unsigned i = 0; i < 100; ++i) EXPECT_EQ(got[i], 2000 + (i + 1) % 100);
}

// Every thread reads the value of the thread before it, which is there in one order of threads only.
TEST(Simt, AMissingBarrierShowsInOneOfTwoBlocks) {
  std::vector<unsigned> stale(2);

  const std::string failure = run(
      2, 64, 64,
      [](const BlockContext& c, void* shared, const void* launch) {
        auto* bytes = static_cast<unsigned char*>(shared);
        bytes[c.thread()] = 1;
        if (c.thread() > 0 && bytes[c.thread() - 1] == kSharedPoison) {
          ++(*static_cast<std::vector<unsigned>*>(const_cast<void*>(launch)))[c.block()];
        }
      },
      &stale);

  EXPECT_EQ(failure, "");
  EXPECT_EQ(stale, (std::vector<unsigned>{0, 63}));
}

TEST(Simt, ShuffleDownStaysInTheWarpAndWarpsDoNotWaitForEachOther) {
  std::vector<double> got(80);

  const std::string failure = run(
      1, 80, 0,
      [](const BlockContext& c, void*, const void* launch) {
        double value = c.thread();
        // The second warp shuffles twice.
        const int times = c.thread() / 32 == 1 ? 2 : 1;
        for (int i = 0; i < times; ++i) value = c.shuffle_down(value, 3);
        (*static_cast<std::vector<double>*>(const_cast<void*>(launch)))[c.thread()] = value;
      },
      &got);

  EXPECT_EQ(failure, "");
  const auto from = [](unsigned i, unsigned end) { return i + 3 < end ? i + 3 : i; };
  for (unsigned i = 0; i < 32; ++i) EXPECT_EQ(got[i], from(i, 32));
  for (unsigned i = 32; i < 64; ++i) EXPECT_EQ(got[i], from(from(i, 64), 64));
  for (unsigned i = 64; i < 80; ++i) EXPECT_EQ(got[i], from(i, 80));
}

TEST(Simt, SharedMemoryBeginsPoisonedInEveryBlock) {
  std::vector<unsigned> poisoned(2);

  const std::string failure = run(
      2, 1, 64,
      [](const BlockContext& c, void* shared, const void* launch) {
        auto* bytes = static_cast<unsigned char*>(shared);
        auto& count = (*static_cast<std::vector<unsigned>*>(const_cast<void*>(launch)))[c.block()];
        for (int i = 0; i < 64; ++i) count += bytes[i] == kSharedPoison;
        for (int i = 0; i < 64; ++i) bytes[i] = 0;
      },
      &poisoned);

  EXPECT_EQ(failure, "");
  EXPECT_EQ(poisoned, (std::vector<unsigned>{64, 64}));
}

TEST(Simt, ABarrierThatSomeThreadsNeverReachIsReported) {
  const std::string failure = run(
      1, 64, 0,
      [](const BlockContext& c, void*, const void*) {
        if (c.thread() != 40) c.barrier();
      },
      nullptr);

  EXPECT_NE(failure.find("divergent barrier in block 0: thread 0 waits at the barrier of simt_test.cc:"),
            std::string::npos)
      << failure;
  EXPECT_NE(failure.find("thread 40 has ended"), std::string::npos) << failure;
}

TEST(Simt, TwoBarriersInDifferentBranchesAreNotOne) {
  const std::string failure = run(
      1, 64, 0,
      [](const BlockContext& c, void*, const void*) {
        if (c.thread() < 32) {
          c.barrier();
        } else {
          c.barrier();
        }
      },
      nullptr);

  EXPECT_NE(failure.find("divergent barrier"), std::string::npos) << failure;
  EXPECT_NE(failure.find("thread 32 waits at the barrier"), std::string::npos) << failure;
}

TEST(Simt, AShuffleWithoutTheWholeWarpIsReported) {
  const std::string failure = run(
      1, 32, 0,
      [](const BlockContext& c, void*, const void*) {
        if (c.thread() % 2 == 0) static_cast<void>(c.shuffle_down(1.0, 1));
        c.barrier();
      },
      nullptr);

  EXPECT_NE(failure.find("divergent shuffle in block 0: thread 0"), std::string::npos) << failure;
  EXPECT_NE(failure.find("thread 1 waits at the barrier"), std::string::npos) << failure;
}

}  // namespace
}  // namespace forebay::simt
