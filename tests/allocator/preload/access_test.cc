// Every way from a program to the driver, under the preload on the fake driver: the arena serves the hooked
// ways, and the others are asserted to be as documented.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/allocator/preload/preload_run.h"

namespace forebay::testing {
namespace {

struct Way {
  std::string name;
  std::vector<std::string> command;
  std::uint64_t allocations;  // Made by the program.
};

void PrintTo(const Way& way, std::ostream* stream) {
  *stream << way.name;
}

class PreloadAccess : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (GetParam().name != "Python") return;
    if (GetParam().command[0].empty()) GTEST_SKIP() << "there is no Python here";
    if (kSanitized) GTEST_SKIP() << "the fake needs a sanitizer's runtime, which Python does not have";
  }
};

TEST_P(PreloadAccess, TheArenaServesEveryAllocation) {
  const PreloadRun bare(GetParam().command, "none");
  PreloadRun run(GetParam().command);

  EXPECT_EQ(bare.finished.exit_code, 0) << bare.finished.output;
  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.served(PreloadServer::kArena), GetParam().allocations);
  EXPECT_EQ(run.unserved(), 0u);
  EXPECT_EQ(run.record().unknown_frees, 0u);
  EXPECT_EQ(run.record().problem, "");
  EXPECT_EQ(run.record().around, "");
  // Only the arena asked the driver for memory; a request of zero bytes is left to the driver to refuse.
  EXPECT_LE(run.fake["calls_cuMemAlloc_v2"], 1u);
  EXPECT_EQ(run.fake["calls_cuMemAllocAsync"], 0u);
  EXPECT_GT(run.fake["calls_cuMemMap"], 0u);
  run.expect_no_hazard();
}

TEST_P(PreloadAccess, ObservingChangesNothing) {
  PreloadRun bare(GetParam().command, "none");
  PreloadRun run(GetParam().command, "observe");

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.served(PreloadServer::kObserved), GetParam().allocations);
  EXPECT_EQ(run.served(PreloadServer::kArena), 0u);
  EXPECT_EQ(run.fake["calls_cuMemMap"], 0u);
  for (const char* calls : {"calls_cuMemAlloc_v2", "calls_cuMemFree_v2", "calls_cuMemAllocAsync",
                            "calls_cuMemFreeAsync", "calls_cuStreamSynchronize", "calls_cuCtxSynchronize"}) {
    EXPECT_EQ(run.fake[calls], bare.fake[calls]) << calls;
  }
  run.expect_no_hazard();
}

TEST_P(PreloadAccess, OffRecordsNothing) {
  PreloadRun run(GetParam().command, "off");

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_TRUE(run.records.empty());
  EXPECT_EQ(run.fake["calls_cuMemMap"], 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Ways, PreloadAccess,
    ::testing::Values(
        Way{"Dlsym", {program("access_program"), "dlsym"}, 3},
        Way{"DlsymByPath", {program("access_program"), "dlsym", kFakeDirectory + "/libcuda.so.1"}, 3},
        Way{"GetProcAddress", {program("access_program"), "query"}, 3},
        Way{"GetProcAddressPerThreadStream", {program("access_program"), "query-thread"}, 3},
        Way{"Linked", {program("linked_program"), "linked"}, 3},
        Way{"LinkedAndDlsymDefault", {program("linked_program"), "default"}, 3},
        Way{"Python", {PYTHON, PYTHON_PROGRAM}, 3},
        Way{"DynamicRuntime", {program("../runtime_program_dynamic")}, 5},
        Way{"StaticRuntime", {program("../runtime_program_static")}, 5}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace forebay::testing
