// CUDA IPC between processes under the preload, on the fake.
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "tests/allocator/preload/preload_run.h"

namespace forebay::testing {
namespace {

// One unmodified binary, with and without.
TEST(PreloadSharing, TwoProcessesUseOneBlock) {
  const PreloadRun bare({program("sharing_program")}, "none", {{"FAKE_CUDA_FREE_WAITS", "1"}});
  PreloadRun run({program("sharing_program")});

  EXPECT_EQ(bare.finished.exit_code, 0) << bare.finished.output;
  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.finished.output, "second: 0\nfirst: all well\n");
  ASSERT_EQ(run.records.size(), 2u);
  std::uint64_t served = 0;
  for (const PreloadReport& record : run.records) {
    served += record.allocations[static_cast<std::size_t>(PreloadServer::kArena)];
    EXPECT_EQ(record.problem, "");
  }
  EXPECT_EQ(served, 40u);
  // The second has closed all that it had opened: its context is left.
  ASSERT_EQ(run.live_handles.size(), 2u);
  EXPECT_EQ(run.live_handles.front(), 1u);
  // No IPC call reached the driver, which does not support it for this memory.
  EXPECT_EQ(run.fake["calls_cuIpcGetMemHandle"], 0u);
  run.expect_no_hazard();
}

TEST(PreloadSharing, ABlockIsClosedAfterTheWorkThatUsesIt) {
  PreloadRun run({program("sharing_program")}, "arena", {{"FAKE_CUDA_LATENCY_NS", "5000000"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "second: 0\nfirst: all well\n");
  run.expect_no_hazard();
}

// Chunks of many sizes, more than one message holds.
TEST(PreloadSharing, ABlockOfManyChunksIsSharedWhole) {
  PreloadRun run({program("sharing_program")}, "arena", {{"FAKE_CUDA_GRANULARITY", "4096"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "second: 0\nfirst: all well\n");
  run.expect_no_hazard();
}

TEST(PreloadSharing, AKilledPeerLeavesTheOpenedBlocksUsable) {
  PreloadRun run({program("sharing_program"), "kill"});

  EXPECT_EQ(run.finished.exit_code, 128 + 9);
  EXPECT_EQ(run.finished.output, "mapped memory holds 1\nopened anew: 1, at once 1\nsurvivor: all well\n");
  // The counts of the killed process are still there.
  ASSERT_EQ(run.records.size(), 2u);
  std::uint64_t served = 0;
  for (const PreloadReport& record : run.records) {
    served += record.allocations[static_cast<std::size_t>(PreloadServer::kArena)];
  }
  EXPECT_EQ(served, 2u);
}

TEST(PreloadSharing, HandlesThatCannotBeOpenedAreRefused) {
  const PreloadRun bare({program("sharing_program"), "refuse"}, "none", {{"FAKE_CUDA_FREE_WAITS", "1"}});
  PreloadRun run({program("sharing_program"), "refuse"});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, bare.finished.output);
}

// The bare fake agrees. Under the preload the later handles named the first block, and its memory stayed.
TEST(PreloadSharing, AResetContextsBlocksAreNotShared) {
  const PreloadRun bare({program("sharing_program"), "reset"}, "none", {{"FAKE_CUDA_FREE_WAITS", "1"}});
  PreloadRun run({program("sharing_program"), "reset"});

  EXPECT_EQ(bare.finished.output, "second: 0\n");
  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, bare.finished.output);
}

TEST(PreloadSharing, FreedBlocksOfManySizesAreGivenBackWhenMemoryIsMissing) {
  PreloadRun run({program("sharing_program"), "sizes"});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "nearly all is free: 1\n");
  run.expect_no_hazard();
}

TEST(PreloadSharing, ABlockThatIsClosedIsUnmappedAfterTheWorkOfItsContext) {
  PreloadRun run({program("sharing_program"), "closer"}, "arena",
                 {{"FAKE_CUDA_DEVICES", "2"}, {"FAKE_CUDA_LATENCY_NS", "20000000"}});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, "second: 0\n");
  run.expect_no_hazard();
}

TEST(PreloadSharing, SignalsDoNotFailAnOpening) {
  PreloadRun run({program("sharing_program"), "signals"});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "second: 0\n");
}

TEST(PreloadSharing, AProcessThatSaysNothingHoldsUpNoOther) {
  PreloadRun run({program("sharing_program"), "held-up"});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "second: 0\n");
}

// If the sharing process has no descriptor left, the peer is served once there is one.
TEST(PreloadSharing, WaitsWithoutSpinningForAFreeDescriptor) {
  for (const char* when : {"crowded", "crowded-later"}) {
    SCOPED_TRACE(when);
    PreloadRun run({program("sharing_program"), when});

    EXPECT_EQ(run.finished.exit_code, 0);
    EXPECT_EQ(run.finished.output, "second: 0\nwaited idly: 1\n");
    run.expect_no_hazard();
  }
}

// The other side is not preloaded: its driver refuses the handle, and both go on.
TEST(PreloadSharing, AProcessWithoutThePreloadIsRefused) {
  PreloadRun run({program("sharing_program"), "stranger"});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "a stranger opens it: 1\nfirst: all well\n");
  EXPECT_EQ(run.records.size(), 1u);
}

// Even with the right handle.
TEST(PreloadSharing, AnotherUsersProcessIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a process of another user";
  PreloadRun run({program("sharing_program"), "foreign"});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_NE(run.finished.output.find("a stranger opens it: 1\nfirst: all well\n"), std::string::npos)
      << run.finished.output;
}

TEST(PreloadSharing, AnotherUserWhoTookTheAddressIsNotAsked) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a process of another user";
  PreloadRun run({program("sharing_program"), "impostor"});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "opened: 0\nasked an impostor: 0\n");
}

}  // namespace
}  // namespace forebay::testing
