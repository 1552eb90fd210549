// Properties of allocation that programs rely on, with and without the preload.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "allocator/preload/block_book.h"
#include "allocator/preload/calls.h"
#include "tests/allocator/preload/preload_run.h"

namespace forebay::testing {
namespace {

std::vector<std::string> matter(const std::string& name) {
  return {program("memory_program"), name};
}

// As the driver does, and unlike the fake by itself: a plain free waits.
Process::Variables waiting_frees(Process::Variables more = {}) {
  more.emplace("FAKE_CUDA_FREE_WAITS", "1");
  return more;
}

TEST(PreloadMemory, APlainFreeWaitsAndAnOrderedOneDoesNot) {
  const Process::Variables slow = waiting_frees({{"FAKE_CUDA_LATENCY_NS", "20000000"}});
  const PreloadRun bare(matter("waiting"), "none", slow);
  PreloadRun run(matter("waiting"), "arena", slow);

  EXPECT_EQ(bare.finished.output, "ordered: idle 0\nplain, in order: idle 0\nplain: idle 1\n");
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.finished.exit_code, 0);
  run.expect_no_hazard();
}

TEST(PreloadMemory, UnusedMemoryOfTheArenaCountsAsFree) {
  PreloadRun run(matter("info"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output,
            "total 67108864, device 67108864, before 67108864, less 16777216, after 67108864\n");
  run.expect_no_hazard();
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // They need addresses without end.
TEST(PreloadMemory, AHostWithoutMemoryIsAnErrorAndNoEnd) {
  PreloadRun run(matter("host-memory"));

  EXPECT_EQ(run.finished.output, "2 2 2\n");
  EXPECT_EQ(run.finished.exit_code, 0);
}
#endif

TEST(PreloadMemory, ALimitMakesTheDeviceLookSmaller) {
  const PreloadRun run(matter("info"), "arena", {{"FOREBAY_MEMORY", "32MiB"}});
  const PreloadRun observed(matter("info"), "observe", {{"FOREBAY_MEMORY", "32MiB"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output,
            "total 33554432, device 33554432, before 33554432, less 16777216, after 33554432\n");
  // Observing changes nothing.
  EXPECT_EQ(observed.finished.output.rfind("total 67108864, device 67108864", 0), 0u)
      << observed.finished.output;
}

TEST(PreloadMemory, TheDriversRoomIsNeitherFreeNorAllocated) {
  PreloadRun run(matter("info"), "arena", {{"FOREBAY_DEVICE_ROOM", "4MiB"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  // There is no arena before the first allocation.
  EXPECT_EQ(run.finished.output,
            "total 67108864, device 67108864, before 67108864, less 20971520, after 62914560\n");
  run.expect_no_hazard();
}

TEST(PreloadMemory, ByDefaultAnEighthOfASmallDeviceIsTheDrivers) {
  const PreloadRun run(matter("info"), "arena", {{"FOREBAY_DEVICE_ROOM", ""}});
  EXPECT_NE(run.finished.output.find("after 58720256"), std::string::npos) << run.finished.output;
}

TEST(PreloadMemory, AnInvalidRoomIsReportedAndTheArenaServesNothing) {
  PreloadRun run(matter("info"), "arena", {{"FOREBAY_DEVICE_ROOM", "some"}});
  EXPECT_NE(std::string(run.record().problem).find("FOREBAY_DEVICE_ROOM is 'some'; use bytes"),
            std::string::npos)
      << run.record().problem;
  EXPECT_EQ(run.served(PreloadServer::kArena), 0u);
}

// The last is less than a chunk.
TEST(PreloadMemory, AnInvalidLimitIsReportedAndTheArenaServesNothing) {
  for (const std::string limit : {"plenty", "0", "1MiB"}) {
    const PreloadRun run(matter("info"), "arena", {{"FOREBAY_MEMORY", limit}});
    EXPECT_NE(run.finished.output.find("FOREBAY_MEMORY is '" + limit + "'; use bytes, at least 2MiB"),
              std::string::npos)
        << run.finished.output;
    EXPECT_EQ(run.served(PreloadServer::kArena), 0u) << limit;
  }
}

TEST(PreloadMemory, AFullDeviceReturnsTheDriversErrorAndServesAfterAFree) {
  PreloadRun run(matter("full"), "arena", {{"FAKE_CUDA_LATENCY_NS", "2000000"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "plain: 2\nordered: 2\napart: 0\nnearly all of it\n");
  EXPECT_EQ(run.record().refused, 2u);
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, TheArenaMakesWayForTheDriverAndTellsErrorsOfQueuedWork) {
  PreloadRun run(matter("make-way"), "arena",
                 {{"FAKE_CUDA_LATENCY_NS", "20000000"}, {"FAKE_CUDA_QUIET", "1"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "pitched: 0\nits free: 700\na plain free: 700\n");
  EXPECT_EQ(run.record().live_bytes, 0u);
}

TEST(PreloadMemory, TheDefaultPoolReportsItsAllocations) {
  PreloadRun run(matter("pool"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output,
            "used 5242880, high 5242880\nused 2097152, high 5242880\nhigh after the reset 2097152\n"
            "used 0, kept 1, trimmed 1\nused in the next context 1048576, high 1048576\n");
  run.expect_no_hazard();
}

TEST(PreloadMemory, TheDriverServesRequestsThatTheArenaCannot) {
  const PreloadRun bare(matter("elsewhere"), "none");
  PreloadRun run(matter("elsewhere"));

  EXPECT_EQ(bare.finished.exit_code, 0) << bare.finished.output;
  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.served(PreloadServer::kArena), 1u);
  EXPECT_EQ(run.served(PreloadServer::kPitched), 1u);
  EXPECT_EQ(run.served(PreloadServer::kManaged), 1u);
  EXPECT_EQ(run.served(PreloadServer::kOtherPool), 2u);
  EXPECT_EQ(run.served(PreloadServer::kVirtualMemory), 1u);
  EXPECT_EQ(run.served(PreloadServer::kOtherContext), 1u);
  EXPECT_EQ(run.record().unknown_frees, 0u);
  run.expect_no_hazard();
}

// An arena would bring the device's primary context into being, which takes hundreds of megabytes on a GPU.
TEST(PreloadMemory, AProgramWithItsOwnContextIsLeftAlone) {
  PreloadRun run(matter("own-context"));

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.served(PreloadServer::kOtherContext), 1u);
  EXPECT_EQ(run.fake["calls_cuDevicePrimaryCtxRetain"], 0u);
  EXPECT_EQ(run.fake["calls_cuMemMap"], 0u);
}

TEST(PreloadMemory, ACaptureGetsTheGraphsMemoryAndIsNotDisturbed) {
  PreloadRun run(matter("capture"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "all back 1\n");
  EXPECT_EQ(run.served(PreloadServer::kCaptured), 1u);
  EXPECT_EQ(run.served(PreloadServer::kArena), 4u);
  EXPECT_EQ(run.record().live_bytes, 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, ABlockFreedDuringACaptureIsUsedAgainAfterACallThatWaits) {
  PreloadRun run(matter("late-free"), "arena", {{"FAKE_CUDA_LATENCY_NS", "100000000"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output,
            "next block: idle 0, the same 0, counted as free 1\nafter a plain free: the same 1\n");
  EXPECT_EQ(run.record().live_bytes, 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, ResetAndLastReleaseOfADeviceGiveEverythingBack) {
  const Process::Variables slow = {{"FAKE_CUDA_LATENCY_NS", "1000000"}};
  const PreloadRun bare(matter("reset"), "none", slow);
  PreloadRun run(matter("reset"), "arena", slow);

  EXPECT_EQ(bare.finished.exit_code, 0) << bare.finished.output;
  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.served(PreloadServer::kArena), 9u);
  EXPECT_EQ(run.unserved(), 0u);
  EXPECT_EQ(run.fake["device_bytes"], 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, AContextLivesUntilItsLastRelease) {
  const PreloadRun bare(matter("releases"), "none");
  PreloadRun run(matter("releases"));

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, "after the first of two releases: kept 1\n");
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.served(PreloadServer::kArena), 2u);
  EXPECT_EQ(run.live_handles, std::vector<std::uint64_t>{0}) << "the context is still there";
  run.expect_no_hazard();
}

TEST(PreloadMemory, AStreamThatGoesWithItsContextIsNotDestroyedAgain) {
  PreloadRun run(matter("stream-reset"), "arena", {{"FAKE_CUDA_LATENCY_NS", "20000000"}});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.fake["calls_cuStreamDestroy_v2"], 1u);
  run.expect_no_hazard();
}

void expect_output(const std::string& what, const std::string& output, const Process::Variables& more = {}) {
  PreloadRun run(matter(what), "arena", more);

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, output);
  run.expect_no_hazard();
}

TEST(PreloadMemory, ABusyStreamThatIsDestroyedInACaptureKeepsItsMemory) {
  expect_output("captured-stream-destroyed", "byte 1\nafterwards: idle 1\n");
}

TEST(PreloadMemory, AThreadThatRetainsTheContextDuringItsReleaseKeepsItsMemory) {
  expect_output("retain-beside-release", "failures 0\n");
}

TEST(PreloadMemory, MemoryThatOtherDevicesKnowServesSmallerRequestsWhenThereIsNoOther) {
  expect_output("pinned-sizes", "all served\n");
}

TEST(PreloadMemory, NothingWaitsWhileAnyStreamIsCapturedAndFreesDoAgainAfterwards) {
  PreloadRun run(matter("captures"), "arena", {{"FAKE_CUDA_LATENCY_NS", "20000000"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output,
            "before: idle 1\n"
            "one of two has ended: idle 0\n"
            "trimmed: idle 0\n"
            "refused 2: idle 0\n"
            "both have ended: idle 1\n"
            "its stream has ended: idle 1\n"
            "it was invalid: idle 1\n"
            "its thread was elsewhere: idle 0\n"
            "its context is gone: idle 1\n"
            "its thread has ended: idle 1\n"
            "freed by a graph: 0\n");
  EXPECT_EQ(run.record().live_bytes, 0u);
  run.expect_no_hazard();
}

class PreloadReordered : public ::testing::TestWithParam<int> {};

TEST_P(PreloadReordered, EachThreadHasItsOwnDefaultStream) {
  const Process::Variables reordered = {{"FAKE_CUDA_SEED", std::to_string(GetParam())},
                                        {"FAKE_CUDA_STRICT", "1"}};
  PreloadRun run(matter("thread"), "arena", reordered);

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, "wrong: 0\n");
  EXPECT_EQ(run.served(PreloadServer::kArena), 160u);
  run.expect_no_hazard();
}

INSTANTIATE_TEST_SUITE_P(Seeds, PreloadReordered, ::testing::Range(1, 6));

TEST(PreloadMemory, AFreeWaitsForTheCurrentContextAndForThoseWithAccess) {
  expect_output("frees-beside-peers", "of the user: idle 1\nof the owner, with access: idle 1\n",
                {{"FAKE_CUDA_DEVICES", "2"}, {"FAKE_CUDA_LATENCY_NS", "20000000"}});
}

TEST(PreloadMemory, AFreeWhoseWaitIsRefusedKeepsItsMemory) {
  expect_output("refused-wait", "byte 1\nafterwards: idle 1\n", {{"FAKE_CUDA_LATENCY_NS", "20000000"}});
}

TEST(PreloadMemory, AFreeThatWasPutOffWaitsForTheContextThatWasCurrent) {
  expect_output("put-off-elsewhere", "put off: idle 0\ncompleted: idle 1\n",
                {{"FAKE_CUDA_LATENCY_NS", "20000000"}});
}

TEST(PreloadMemory, ACaptureAndTheFreesOfAnotherThreadDoNotEndEachOther) {
  expect_output("captures-beside-frees", "failures 0\n");
}

TEST(PreloadMemory, AFreeThatWaitsForACaptureEndsWithItsArena) {
  PreloadRun run(matter("capture-reset"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "at the same address 1, given twice 0\n");
  run.expect_no_hazard();
}

TEST(PreloadMemory, AThreadsDefaultStreamUsesItsFreedMemoryAtOnce) {
  PreloadRun run(matter("reuse"), "arena", {{"FAKE_CUDA_LATENCY_NS", "20000000"}});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, "ordered: same address 1\nfrom the pool: same address 1\n");
  EXPECT_EQ(run.served(PreloadServer::kArena), 4u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, MemoryFreedOnAThreadsDefaultStreamWaitsForItsWork) {
  PreloadRun run(matter("thread-free"), "arena", {{"FAKE_CUDA_LATENCY_NS", "100000000"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output,
            "idle 0: on another stream 0, plain 0\n"
            "idle: on another stream 1\n"
            "after the end of its thread, idle 0: on another thread's 0\n");
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, ThreadsBeyondTheLimitOfStreamsWaitWhenTheyFree) {
  const Process::Variables slow = {{"FAKE_CUDA_LATENCY_NS", "5000000"}, {"FAKE_CUDA_MEMORY", "1073741824"}};
  PreloadRun run(matter("many-threads"), "arena", slow);

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "wrong: 0\n");
  run.expect_no_hazard();
}

TEST(PreloadMemory, AResetMakesTheStreamsOfThreadsAvailableAgain) {
  PreloadRun run(matter("thread-resets"), "arena", {{"FAKE_CUDA_LATENCY_NS", "1000000000"}});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, "idle 0\n");
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, AttributesOfAnAddressAreThoseOfItsBlock) {
  const PreloadRun bare(matter("attributes"), "none");
  PreloadRun run(matter("attributes"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.finished.output.find("begin 1, bytes 3145828, pool 0, type 2, device 0"), 0u)
      << run.finished.output;
}

TEST(PreloadMemory, StreamsMayBeDestroyedWhileTheirWorkRuns) {
  PreloadRun run(matter("streams"), "arena", {{"FAKE_CUDA_LATENCY_NS", "200000"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "all free 1\n");
  EXPECT_EQ(run.served(PreloadServer::kArena), 301u);
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

// A wait would never end: the work of the stream waits for the thread that asks.
TEST(PreloadMemory, TrimsAPoolWithoutAWaitForQueuedWork) {
  PreloadRun run(matter("trim-beside-work"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "reserved less 1\n");
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, FreesOnDefaultStreamsOfThreadsDoNotWait) {
  PreloadRun run(matter("frees-of-threads"), "arena", {{"FAKE_CUDA_MEMORY", "1073741824"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "freed while all work waits, failures 0\n");
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, AThreadIsNotCancelledWithinACall) {
  PreloadRun run(matter("cancelled-threads"), "arena");

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "returned 4\n");
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, TheArenaServesAgainWhenTheProgramsPoolHasEnded) {
  PreloadRun run(matter("pool-ended"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.served(PreloadServer::kOtherPool), 1u);
  EXPECT_EQ(run.served(PreloadServer::kArena), 3u);
}

TEST(PreloadMemory, MemoryOfEndedStreamsServesAllOnceTheirWorkHasRun) {
  PreloadRun run(matter("ended-streams"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "idle when it ended: 0\nthe oldest of many: waited for 1\n");
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, FreesAreRoutedByAddressAndInvalidOnesRefused) {
  const PreloadRun bare(matter("frees"), "none");
  PreloadRun run(matter("frees"));

  EXPECT_EQ(bare.finished.exit_code, 0) << bare.finished.output;
  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.record().unknown_frees, 0u);
  run.expect_no_hazard();
}

TEST(PreloadMemory, MemoryKnownOutsideKeepsItsAddress) {
  PreloadRun run(matter("pinned"), "arena", {{"FAKE_CUDA_LATENCY_NS", "5000000"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output,
            "same address 1, same memory 1\non another stream 0\non the same 1\non another stream 1\n"
            "on the same 1\nkept for later 1\non the thread's own 1\n");
  run.expect_no_hazard();
}

TEST(PreloadMemory, ABlockThatIsUsedAgainStaysPinned) {
  PreloadRun run(matter("pinned-again"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "same address 1\nsame address 1\n");
  run.expect_no_hazard();
}

TEST(PreloadMemory, BlocksHaveNumbersAndNoHandlesOfVirtualMemory) {
  for (const auto& [what, expected] :
       {std::pair{"handles", "1\n1\n"},
        std::pair{"buffer-ids", "two blocks: 1\none block: 1\none after another: 1\n"}}) {
    const PreloadRun bare(matter(what), "none", {{"FAKE_CUDA_FREE_WAITS", "1"}});
    PreloadRun run(matter(what));

    EXPECT_EQ(run.finished.exit_code, 0);
    EXPECT_EQ(run.finished.output, expected);
    EXPECT_EQ(run.finished.output, bare.finished.output);
    run.expect_no_hazard();
  }
}

TEST(PreloadMemory, NoThreadMissesTheMemoryThatAnotherOneGivesBack) {
  PreloadRun run(matter("two-in-need"));

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "of the arena: refused in 0 rounds\nof the driver: refused in 0 rounds\n");
  run.expect_no_hazard();
}

TEST(PreloadMemory, ABlockWithADescriptorKeepsItsAddress) {
  PreloadRun run(matter("exported"), "arena", {{"FAKE_CUDA_DMA_BUF", "1"}});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "same address 1, same memory 1\n");
  run.expect_no_hazard();
}

// The driver may give the addresses of a context that is gone to memory that it serves itself.
TEST(PreloadMemory, AddressesOfAContextThatIsGoneAreNotTheArenas) {
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<DevicePtr>(address); };
  const auto book = std::make_unique<BlockBook>();
  book->add(at(0x900000), {.bytes = 0x1000, .device = 0});
  ASSERT_TRUE(book->is_arena_address(at(0x900800)));

  EXPECT_EQ(book->forget_device(0).size(), 1u);
  book->add(at(0x100000), {.bytes = 0x1000, .device = 0});

  EXPECT_TRUE(book->is_arena_address(at(0x100800)));
  EXPECT_FALSE(book->is_arena_address(at(0x900800)));
  EXPECT_FALSE(book->is_arena_address(at(0x500000)));
}

TEST(PreloadMemory, ABlockIsFoundByEachOfItsBytes) {
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<DevicePtr>(address); };
  const auto book = std::make_unique<BlockBook>();
  book->add(at(0x2000), {.bytes = 0x1000, .device = 0});
  book->add(at(0x4000), {.bytes = 0x800, .device = 1});
  book->add(at(0x9000), {.bytes = 0x800, .device = -1});
  DevicePtr begin = nullptr;
  BlockFacts facts;

  for (const auto& [address, expected] : {std::pair{0x1FFF, 0},
                                          {0x2000, 0x2000},
                                          {0x2FFF, 0x2000},
                                          {0x3000, 0},
                                          {0x4000, 0x4000},
                                          {0x47FF, 0x4000},
                                          {0x4800, 0}}) {
    const bool found = book->find(at(address), &begin, &facts);
    EXPECT_EQ(found ? begin : nullptr, at(expected)) << address;
  }
  // The range of a device is that of all its blocks; memory of the driver's has none.
  for (const auto& [address, expected] : {std::pair{0x1FFF, false},
                                          {0x2000, true},
                                          {0x2FFF, true},
                                          {0x3000, false},
                                          {0x4000, true},
                                          {0x4800, false},
                                          {0x9000, false}}) {
    EXPECT_EQ(book->is_arena_address(at(address)), expected) << address;
  }
  book->add(at(0x2000), {.bytes = 0x400, .device = 0});
  ASSERT_TRUE(book->take(at(0x2000), &facts));
  EXPECT_EQ(facts.bytes, 0x400u);
  EXPECT_FALSE(book->take(at(0x2000), &facts));
  EXPECT_EQ(book->forget_device(1).size(), 1u);
  EXPECT_TRUE(book->take(at(0x9000), &facts));
}

// The driver's blocks that ended with their context are not freed, and their addresses come again.
TEST(PreloadMemory, ABlockTakesThePlaceOfThoseThatWereThere) {
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<DevicePtr>(address); };
  const auto book = std::make_unique<BlockBook>();
  for (const std::uintptr_t address : {0x1000, 0x1800, 0x2800, 0x3000})
    book->add(at(address), {.bytes = 0x800, .device = -1});
  book->add(at(0x1C00), {.bytes = 0x1400, .device = 0});

  DevicePtr begin = nullptr;
  BlockFacts facts;
  for (const std::uintptr_t address : {0x1C00, 0x1FFF, 0x2800, 0x2FFF}) {
    ASSERT_TRUE(book->find(at(address), &begin, &facts)) << address;
    EXPECT_EQ(begin, at(0x1C00)) << address;
  }
  EXPECT_TRUE(book->take(at(0x1000), &facts));
  EXPECT_FALSE(book->take(at(0x1800), &facts));
  EXPECT_TRUE(book->take(at(0x3000), &facts));
}

// Blocks of arenas that have a byte in the range.
TEST(PreloadMemory, PinsTheBlocksThatARangeTouches) {
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<DevicePtr>(address); };
  const auto pinned = [&](std::uintptr_t begin, std::size_t bytes) {
    const auto book = std::make_unique<BlockBook>();
    book->add(at(0x1000), {.bytes = 0x1000, .device = 0});
    book->add(at(0x2000), {.bytes = 0x1000, .device = -1});
    book->add(at(0x3000), {.bytes = 0x1000, .device = 0});
    book->pin(at(begin), bytes, KnownOutside::kPinned);
    std::string which;
    for (const std::uintptr_t address : {0x1000, 0x2000, 0x3000}) {
      BlockFacts facts;
      EXPECT_TRUE(book->take(at(address), &facts));
      which += facts.outside == KnownOutside::kPinned ? '1' : '0';
    }
    return which;
  };

  EXPECT_EQ(pinned(0x0800, 0x0800), "000");
  EXPECT_EQ(pinned(0x0800, 0x0801), "100");
  EXPECT_EQ(pinned(0x1FFF, 1), "100");
  EXPECT_EQ(pinned(0x2000, 0x1000), "000") << "the driver's memory";
  EXPECT_EQ(pinned(0x2000, 0x1001), "001");
  EXPECT_EQ(pinned(0x1FFF, 0x1002), "101");
  EXPECT_EQ(pinned(0x4000, 1), "000");
}

TEST(PreloadMemory, AParkedBlockServesItsSizeDeviceAndStream) {
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<DevicePtr>(address); };
  int one = 0;
  int two = 0;
  const Stream first{reinterpret_cast<DriverStream>(&one)};
  const Stream second{reinterpret_cast<DriverStream>(&two)};
  const auto book = std::make_unique<BlockBook>();
  book->park(at(0x1000), {.bytes = 0x1000, .device = 0, .outside = KnownOutside::kPinned}, first);
  book->park(at(0x2000), {.bytes = 0x2000, .device = 1, .outside = KnownOutside::kShared}, Stream());

  KnownOutside outside = KnownOutside::kNo;
  const auto unpark = [&](int device, std::size_t bytes, Stream stream) {
    return book->unpark(device, bytes, stream, &outside);
  };
  EXPECT_EQ(unpark(0, 0x1000, second), nullptr);
  EXPECT_EQ(unpark(0, 0x1000, Stream()), nullptr);
  EXPECT_EQ(unpark(0, 0x0FFF, first), nullptr);
  EXPECT_EQ(unpark(1, 0x1000, first), nullptr);
  EXPECT_EQ(unpark(0, 0x2000, first), nullptr);
  EXPECT_EQ(unpark(1, 0x2000, first), at(0x2000)) << "it is idle";
  EXPECT_EQ(outside, KnownOutside::kShared);
  EXPECT_EQ(unpark(1, 0x2000, first), nullptr);
  EXPECT_EQ(unpark(0, 0x1000, first), at(0x1000));
  EXPECT_EQ(outside, KnownOutside::kPinned);
  book->park(at(0x1000), {.bytes = 0x1000, .device = 0, .outside = KnownOutside::kPinned}, first);
  EXPECT_TRUE(book->forget_device(0).empty());
  EXPECT_EQ(unpark(0, 0x1000, first), nullptr);

  // Default streams of two devices have one handle.
  for (const int device : {0, 1}) {
    book->park(at(device == 0 ? 0x1000 : 0x2000),
               {.bytes = 0x1000, .device = device, .outside = KnownOutside::kPinned}, first);
  }
  book->set_parked_idle(0, first, UINT64_MAX);
  EXPECT_EQ(unpark(1, 0x1000, second), nullptr) << "that of the other device is busy";
  EXPECT_EQ(unpark(0, 0x1000, second), at(0x1000));
  EXPECT_EQ(unpark(1, 0x1000, first), at(0x2000));

  book->park(at(0x1000), {.bytes = 0x1000, .device = 0, .outside = KnownOutside::kPinned}, first);
  book->park(at(0x2000), {.bytes = 0x2000, .device = 0, .outside = KnownOutside::kShared}, first);
  book->park(at(0x4000), {.bytes = 0x4000, .device = 1, .outside = KnownOutside::kShared}, first);
  EXPECT_EQ(book->parked_shared_bytes(0), 0x2000u);
  EXPECT_EQ(book->take_parked_shared(0, true).size(), 0u);
  EXPECT_EQ(book->take_parked_shared(0, false).size(), 1u);
  EXPECT_EQ(book->parked_shared_bytes(0), 0u);
  book->park(at(0x2000), {.bytes = 0x1F01, .device = 0, .outside = KnownOutside::kShared}, Stream());
  EXPECT_EQ(book->parked_shared_bytes(0), 0x2000u);
  EXPECT_EQ(book->take_parked_shared(0, true).size(), 1u);
  EXPECT_EQ(unpark(0, 0x1000, first), at(0x1000)) << "a network card may know it";
}

TEST(PreloadMemory, EveryDeviceHasAnArena) {
  const Process::Variables two = {{"FAKE_CUDA_DEVICES", "2"}};
  const PreloadRun bare(matter("devices"), "none", waiting_frees(two));
  const Process::Variables slow_two = {{"FAKE_CUDA_DEVICES", "2"}, {"FAKE_CUDA_LATENCY_NS", "20000000"}};
  PreloadRun run(matter("devices"), "arena", slow_two);

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "device of the stream 0\ncopied 1\nfreed on its stream: idle 1\n");
  EXPECT_EQ(run.served(PreloadServer::kArena), 3u);
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

// --- failing calls ---

// The driver serves the first block where it has no memory for an arena, and the arena the second.
TEST(PreloadFaults, AnArenaThatFoundNoMemoryIsMadeAtTheNextAllocation) {
  constexpr int kCallsOfMaking = 40;  // About as many calls come before the first block.
  int made_later = 0;
  for (int n = 1; n <= kCallsOfMaking; ++n) {
    PreloadRun run(matter("attributes"), "arena",
                   {{"FAKE_CUDA_FAIL", std::to_string(n)}, {"FAKE_CUDA_FAIL_RESULT", "2"}});
    if (run.finished.exit_code != 0) continue;
    EXPECT_LE(run.unserved(), 1u) << n;
    made_later += run.unserved() == 1 && run.served(PreloadServer::kArena) == 1;
  }
  EXPECT_GT(made_later, kCallsOfMaking / 2);
}

// After any failed call the program ends by itself, reports the error, and nothing is corrupted.
TEST(PreloadFaults, EveryCallMayFailOnce) {
  const std::vector<std::string> command = {program("access_program"), "query"};
  PreloadRun whole(command);
  ASSERT_EQ(whole.finished.exit_code, 0) << whole.finished.output;
  const std::uint64_t calls = whole.fake["calls"];
  ASSERT_GT(calls, 50u);

  int succeeded = 0;
  for (std::uint64_t n = 1; n <= calls; ++n) {
    // Out of memory, and an unknown code.
    const std::string result = n % 2 == 0 ? "2" : "999";
    PreloadRun run(command, "arena",
                   waiting_frees({{"FAKE_CUDA_FAIL", std::to_string(n)}, {"FAKE_CUDA_FAIL_RESULT", result}}));

    EXPECT_LE(run.finished.exit_code, 1) << n << ": " << run.finished.output;
    succeeded += run.finished.exit_code == 0;
    run.expect_no_hazard();
  }
  // If a call that the preload makes for itself fails, the driver serves the program.
  EXPECT_GT(succeeded, static_cast<int>(calls / 2));
  std::printf("%d of %d runs ended well\n", succeeded, static_cast<int>(calls));
}

// --- stress ---

std::vector<std::string> stress(int threads, int rounds, int limit_mib) {
  return {program("stress_program"), std::to_string(threads), std::to_string(rounds),
          std::to_string(limit_mib)};
}

class PreloadStress : public ::testing::TestWithParam<int> {};

TEST_P(PreloadStress, GivesTheSameResultsWithLessMemory) {
  const Process::Variables reordered = waiting_frees({{"FAKE_CUDA_SEED", std::to_string(GetParam())},
                                                      {"FAKE_CUDA_STRICT", "1"},
                                                      {"FAKE_CUDA_MEMORY", "268435456"}});
  const std::vector<std::string> command = stress(4, kSanitized ? 60 : 200, 48);
  PreloadRun bare(command, "none", reordered);
  PreloadRun run(command, "arena", reordered);

  ASSERT_EQ(bare.finished.exit_code, 0) << bare.finished.output;
  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.unserved(), 0u);
  EXPECT_LT(run.fake["peak_device_bytes"], bare.fake["peak_device_bytes"]);
  std::printf("peak %.1f MiB of physical memory, %.1f MiB without the preload, %.1f MiB asked for\n",
              static_cast<double>(run.fake["peak_device_bytes"]) / (1 << 20),
              static_cast<double>(bare.fake["peak_device_bytes"]) / (1 << 20),
              static_cast<double>(run.record().peak_live_bytes) / (1 << 20));
  run.expect_no_hazard();
}

// So little memory that threads run out of it and wait for blocks that they and others have freed.
TEST_P(PreloadStress, ScarceMemoryCausesRetriesAndTheSameResults) {
  const std::vector<std::string> command = stress(4, kSanitized ? 60 : 200, 40);
  const std::string seed = std::to_string(GetParam());
  const PreloadRun bare(command, "none",
                        waiting_frees({{"FAKE_CUDA_SEED", seed}, {"FAKE_CUDA_MEMORY", "268435456"}}));
  PreloadRun run(command, "arena", {{"FAKE_CUDA_SEED", seed}, {"FAKE_CUDA_MEMORY", "46137344"}});

  ASSERT_EQ(bare.finished.exit_code, 0) << bare.finished.output;
  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.unserved(), 0u);
  run.expect_no_hazard();
}

INSTANTIATE_TEST_SUITE_P(Seeds, PreloadStress, ::testing::Range(1, 4));

}  // namespace
}  // namespace forebay::testing
