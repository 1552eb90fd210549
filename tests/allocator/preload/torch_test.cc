// The functions for PyTorch's pluggable allocator, with and without the preload.
#include <gtest/gtest.h>

#include <string>

#include "tests/allocator/preload/preload_run.h"

namespace forebay::testing {
namespace {

class TorchAllocator : public ::testing::TestWithParam<int> {};

TEST_P(TorchAllocator, ServesInTheOrderOfStreamsWithoutThePreload) {
  const Process::Variables reordered = {{"FAKE_CUDA_SEED", std::to_string(GetParam())},
                                        {"FAKE_CUDA_STRICT", "1"},
                                        {"FAKE_CUDA_FREE_WAITS", "1"}};
  PreloadRun run({program("torch_program"), CORE_LIBRARY}, "none", reordered);

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "all well\n");
  EXPECT_GT(run.fake["calls_cuMemMap"], 0u);
  EXPECT_EQ(run.fake["calls_cuMemAlloc_v2"], 1u);  // The program's own.
  run.expect_no_hazard();
}

// One core, so one arena for the requests of PyTorch and those of the program to the driver.
TEST_P(TorchAllocator, SharesTheArenaWithThePreload) {
  const Process::Variables reordered = {{"FAKE_CUDA_SEED", std::to_string(GetParam())},
                                        {"FAKE_CUDA_STRICT", "1"}};
  PreloadRun run({program("torch_program"), CORE_LIBRARY}, "arena", reordered);

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "all well\n");
  EXPECT_EQ(run.served(PreloadServer::kArena), 222u);
  EXPECT_EQ(run.unserved(), 0u);
  EXPECT_EQ(run.record().live_bytes, 0u);
  EXPECT_EQ(run.fake["calls_cuMemAlloc_v2"], 0u);
  // One reservation of addresses for the arena and one for the trial of a chunk.
  EXPECT_EQ(run.fake["calls_cuMemAddressReserve"], 2u);
  run.expect_no_hazard();
}

INSTANTIATE_TEST_SUITE_P(Seeds, TorchAllocator, ::testing::Range(1, 4));

TEST(TorchAllocatorStreams, ABlockThatAnotherStreamUsesIsNotGivenOutAgain) {
  for (const char* mode : {"none", "arena"}) {
    SCOPED_TRACE(mode);
    PreloadRun run({program("torch_program"), CORE_LIBRARY, "record"}, mode,
                   {{"FAKE_CUDA_LATENCY_NS", "100000000"}, {"FAKE_CUDA_FREE_WAITS", "1"}});

    EXPECT_EQ(run.finished.exit_code, 0);
    EXPECT_EQ(run.finished.output, "idle 0: same block 0\n");
    run.expect_no_hazard();
  }
}

// With and without the preload.
void expect_torch_output(const char* use, const std::string& output, const Process::Variables& more) {
  for (const char* mode : {"none", "arena"}) {
    SCOPED_TRACE(std::string(use) + " " + mode);
    PreloadRun run({program("torch_program"), CORE_LIBRARY, use}, mode, more);

    EXPECT_EQ(run.finished.exit_code, 0);
    EXPECT_EQ(run.finished.output, output);
    run.expect_no_hazard();
  }
}

TEST(TorchAllocatorStreams, AStreamThatTheArenaHasNoPlaceForIsWaitedFor) {
  for (const char* use : {"record-many", "record-device", "shared-record"})
    expect_torch_output(use, "read 7\n", {{"FAKE_CUDA_DEVICES", "2"}});
}

TEST(TorchAllocatorPools, MemoryOfGraphsIsGivenBackAndNotWhileTheyRun) {
  // Room for the blocks of two rounds, whose events may be late, and not for those of all.
  expect_torch_output("pool", "all well\n", {{"FAKE_CUDA_MEMORY", std::to_string(100u << 20)}});
}

TEST(TorchAllocatorForks, AChildChangesNothingOfItsParents) {
  for (const char* mode : {"none", "arena"}) {
    SCOPED_TRACE(mode);
    const PreloadRun run({program("torch_program"), CORE_LIBRARY, "fork"}, mode);

    EXPECT_EQ(run.finished.exit_code, 0);
    EXPECT_EQ(run.finished.output, "all well\n");
    if (mode == std::string("arena")) {
      EXPECT_EQ(run.record().live_bytes, 8u << 20);
    }
  }
}

TEST(TorchAllocatorStreams, ABlockThatAThreadsDefaultStreamUsesIsNotGivenOutAgain) {
  for (const char* use : {"record-thread", "shared-thread"}) {
    SCOPED_TRACE(use);
    PreloadRun run({program("torch_program"), CORE_LIBRARY, use}, "arena",
                   {{"FAKE_CUDA_LATENCY_NS", "100000000"}, {"FAKE_CUDA_FREE_WAITS", "1"}});

    EXPECT_EQ(run.finished.exit_code, 0);
    EXPECT_EQ(run.finished.output, "idle 0: same block 0\n");
    run.expect_no_hazard();
  }
}

TEST(TorchAllocatorStreams, ACapturedStreamGetsNoMemoryThatItsOwnWorkMayStillUse) {
  for (const char* mode : {"none", "arena"}) {
    SCOPED_TRACE(mode);
    PreloadRun run({program("torch_program"), CORE_LIBRARY, "capture"}, mode,
                   {{"FAKE_CUDA_LATENCY_NS", "100000000"}, {"FAKE_CUDA_FREE_WAITS", "1"}});

    EXPECT_EQ(run.finished.exit_code, 0);
    EXPECT_TRUE(run.finished.output.ends_with("idle 0: same block 0\n")) << run.finished.output;
    run.expect_no_hazard();
  }
}

TEST(TorchAllocatorStreams, NothingGetsTheMemoryThatAGraphWrites) {
  for (const char* mode : {"none", "arena"}) {
    SCOPED_TRACE(mode);
    PreloadRun run({program("torch_program"), CORE_LIBRARY, "graph-memory"}, mode,
                   {{"FAKE_CUDA_FREE_WAITS", "1"}});

    EXPECT_EQ(run.finished.exit_code, 0);
    EXPECT_NE(run.finished.output.find("within the capture: same block 1; overwritten 0\n"),
              std::string::npos)
        << run.finished.output;
    EXPECT_NE(run.finished.output.find("forebay.memory_pool()"), std::string::npos) << run.finished.output;
    run.expect_no_hazard();
  }
}

TEST(TorchAllocatorLimits, AFullDeviceIsReportedAndServesAgain) {
  PreloadRun run({program("torch_program"), CORE_LIBRARY, "full"}, "none", {{"FAKE_CUDA_FREE_WAITS", "1"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_NE(run.finished.output.find("forebay: cannot allocate 4.00 MiB"), std::string::npos)
      << run.finished.output;
  EXPECT_NE(run.finished.output.find("16 blocks of 4 MiB\nall well\n"), std::string::npos)
      << run.finished.output;

  const PreloadRun counted({program("torch_program"), CORE_LIBRARY, "full"});
  EXPECT_EQ(counted.finished.exit_code, 0);
  EXPECT_EQ(counted.record().refused, 1u);
}

TEST(TorchAllocatorSharing, ABlockThatIsKnownOutsideKeepsItsMemory) {
  PreloadRun run({program("torch_program"), CORE_LIBRARY, "pinned"});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "same block 1\n");
  run.expect_no_hazard();
}

TEST(TorchAllocatorSharing, ABlockOfTheDriversIsLeftAlone) {
  PreloadRun run({program("torch_program"), CORE_LIBRARY, "strange"}, "observe");

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_NE(run.finished.output.find("was not allocated by forebay_torch_alloc; it is left alone"),
            std::string::npos)
      << run.finished.output;
  EXPECT_EQ(run.record().unknown_frees, 0u);
  EXPECT_EQ(run.record().live_bytes, 0u);
  EXPECT_EQ(run.fake["calls_cuMemFree_v2"], 1u);
}

}  // namespace
}  // namespace forebay::testing
