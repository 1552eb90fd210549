// The front end beside other libraries: neighbours in LD_PRELOAD, plugins, early work, children, the end of
// the process; and its answer to each look-up of a driver function.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "allocator/arena/learned.h"
#include "allocator/preload/calls.h"
#include "allocator/preload/learned_file.h"
#include "tests/allocator/preload/preload_run.h"

namespace forebay::testing {
namespace {

std::string preloads(const std::string& first, const std::string& second) {
  return first + ":" + second;
}

// --- dlsym ---

// glibc recognises the caller by the return address.
TEST(PreloadDlsym, NextMeansTheCallersNextLibrary) {
  const std::string neighbour = program("next_library.so");
  const std::vector<std::string> command = {program("neighbour_program"), "getpid"};
  const Finished bare = run_program(command, {{"LD_PRELOAD", neighbour}});
  ASSERT_EQ(bare.exit_code, 0) << bare.output;

  for (const std::string& order :
       {preloads(kPreloadLibrary, neighbour), preloads(neighbour, kPreloadLibrary)}) {
    const PreloadRun run(command, "arena", {{"LD_PRELOAD", order}});

    EXPECT_EQ(run.finished.exit_code, 0) << order << run.finished.output;
    EXPECT_EQ(run.finished.output, bare.output) << order;
  }
}

TEST(PreloadDlsym, AnotherHookOfTheDriverInFrontIsPassedThrough) {
  const std::string neighbour = program("next_cuda_library.so");
  const std::vector<std::string> command = {program("neighbour_program"), "allocate"};

  const PreloadRun behind(command, "arena", {{"LD_PRELOAD", preloads(neighbour, kPreloadLibrary)}});
  const PreloadRun in_front(command, "arena", {{"LD_PRELOAD", preloads(kPreloadLibrary, neighbour)}});

  EXPECT_EQ(behind.finished.exit_code, 0) << behind.finished.output;
  EXPECT_EQ(behind.finished.output, "cuMemAlloc counted 1\n");
  EXPECT_EQ(behind.served(PreloadServer::kArena), 1u);
  EXPECT_EQ(in_front.finished.exit_code, 0) << in_front.finished.output;
  EXPECT_EQ(in_front.finished.output, "cuMemAlloc counted 0\n");
  EXPECT_EQ(in_front.served(PreloadServer::kArena), 1u);
}

TEST(PreloadDlsym, AMissingSymbolGetsTheSameError) {
  const std::vector<std::string> command = {program("neighbour_program"), "errors"};
  const PreloadRun bare(command, "none");
  const PreloadRun run(command);

  EXPECT_EQ(bare.finished.exit_code, 0) << bare.finished.output;
  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, bare.finished.output);
}

// Another hook of dlsym finds the C library's by a symbol version, which cannot be intercepted. Behind the
// preload's it is not called; in front of it, it gets all look-ups.
TEST(PreloadDlsym, AnotherHookOfDlsymInFrontWins) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer looks its functions up by the neighbour, which has it too";
  const std::string neighbour = program("dlsym_library.so");
  const std::vector<std::string> command = {program("access_program"), "dlsym"};

  const PreloadRun behind(command, "arena", {{"LD_PRELOAD", preloads(neighbour, kPreloadLibrary)}});
  const PreloadRun in_front(command, "arena", {{"LD_PRELOAD", preloads(kPreloadLibrary, neighbour)}});

  EXPECT_EQ(behind.finished.exit_code, 0) << behind.finished.output;
  EXPECT_TRUE(behind.records.empty());
  EXPECT_EQ(in_front.finished.exit_code, 0) << in_front.finished.output;
  EXPECT_EQ(in_front.served(PreloadServer::kArena), 3u);
  EXPECT_EQ(in_front.unserved(), 0u);
}

// By another path, which the loader takes for another library.
TEST(PreloadDlsym, ASecondCopyOfTheLibraryChangesNothing) {
  const TemporaryDirectory directory;
  const std::string copy = directory / "libforebay-preload.so";
  std::filesystem::copy_file(kPreloadLibrary, copy);
  for (const char* way : {"dlsym", "query"}) {
    for (const std::string& order : {preloads(kPreloadLibrary, copy), preloads(copy, kPreloadLibrary),
                                     preloads(kPreloadLibrary, kPreloadLibrary)}) {
      PreloadRun run({program("access_program"), way}, "arena", {{"LD_PRELOAD", order}});
      // The copy has no core beside it. If it comes first it says so, and the driver serves.
      const bool has_core = order.rfind(kPreloadLibrary, 0) == 0;

      EXPECT_EQ(run.finished.exit_code, 0) << order << run.finished.output;
      EXPECT_EQ(run.finished.output.find("cannot open libforebay-core") == std::string::npos, has_core)
          << order << run.finished.output;
      EXPECT_EQ(run.records.size(), has_core ? 1u : 0u) << order;
      if (has_core) {
        EXPECT_EQ(run.served(PreloadServer::kArena), 3u) << order;
      }
      run.expect_no_hazard();
    }
  }
}

// --- plugins ---

TEST(PreloadPlugin, AllocationsOfAPluginAreServed) {
  PreloadRun run({program("plugin_program"), program("plugin_library.so"), "plain"});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.served(PreloadServer::kArena), 5u);
  EXPECT_EQ(run.record().unknown_frees, 0u);
  EXPECT_EQ(run.record().around, "");
  run.expect_no_hazard();
}

// Its dlsym is bound to the C library before the preload's is searched. It cannot be hooked; it is named.
TEST(PreloadPlugin, ADeeplyBoundPluginEscapesAndIsNamed) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's runtime refuses to open a library that way";
  PreloadRun run({program("plugin_program"), program("plugin_library.so"), "deepbind"});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.served(PreloadServer::kArena), 1u);
  EXPECT_EQ(run.fake["calls_cuMemAlloc_v2"], 4u);
  EXPECT_EQ(run.record().unknown_frees, 1u);
  EXPECT_EQ(run.record().around, program("plugin_library.so"));
  run.expect_no_hazard();
}

// LD_PRELOAD reaches the first namespace only; a second one has a driver of its own, which is left alone.
TEST(PreloadPlugin, APluginInItsOwnNamespaceHasItsOwnDriver) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's runtime cannot be loaded twice";
  PreloadRun run({program("plugin_program"), program("plugin_library.so"), "namespace"});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.served(PreloadServer::kArena), 1u);
}

TEST(PreloadPlugin, AllocationsBeforeMainAreServed) {
  const std::string early = program("early_library.so");
  for (const std::string& order : {preloads(kPreloadLibrary, early), preloads(early, kPreloadLibrary)}) {
    PreloadRun run({"/bin/true"}, "arena", {{"LD_PRELOAD", order}});
    if (kSanitized && run.finished.exit_code != 0) GTEST_SKIP() << "a sanitizer's runtime must be linked";

    EXPECT_EQ(run.finished.exit_code, 0) << order << run.finished.output;
    EXPECT_EQ(run.finished.output, "") << order;
    EXPECT_EQ(run.served(PreloadServer::kArena), 3u) << order;
    run.expect_no_hazard();
  }
}

// --- processes ---

TEST(PreloadProcess, AForkedChildGetsTheDriversAnswers) {
  const std::vector<std::string> command = {program("process_program"), "fork"};
  const PreloadRun bare(command, "none");
  PreloadRun run(command);

  EXPECT_EQ(bare.finished.output, "child: 3 3 3 3 3 3\nparent: all well\n");
  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.served(PreloadServer::kArena), 1u);
  run.expect_no_hazard();
}

TEST(PreloadProcess, ChildrenForkedBeforeAnyUseHaveTheirOwnArena) {
  const PreloadRun run({program("process_program"), "workers"});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  ASSERT_EQ(run.records.size(), 3u);
  for (const PreloadReport& record : run.records) {
    EXPECT_EQ(record.allocations[static_cast<std::size_t>(PreloadServer::kArena)], 1u);
  }
}

TEST(PreloadProcess, StartedProgramsInheritThePreloadAndPrintNothing) {
  PreloadRun run({program("process_program"), "exec"});

  EXPECT_EQ(run.finished.exit_code, 0);
  EXPECT_EQ(run.finished.output, "child of a shell\n");
  EXPECT_EQ(run.served(PreloadServer::kArena), 1u);  // One record: the children have none.
}

TEST(PreloadProcess, AThreadWithoutAContextIsRefusedByTheDriver) {
  const std::vector<std::string> command = {program("process_program"), "threads"};
  const PreloadRun bare(command, "none");
  const PreloadRun run(command);

  EXPECT_EQ(bare.finished.output, "without a context: 201\n");
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.finished.exit_code, 0);
}

// Destructors that run after the driver's own end: nothing breaks, and nothing is reported.
TEST(PreloadProcess, MemoryMayBeFreedAfterTheDriverHasEnded) {
  const std::vector<std::string> command = {program("process_program"), "exit"};
  const PreloadRun bare(command, "none");
  const PreloadRun run(command);

  EXPECT_EQ(bare.finished.output, "after main: 4 4\n");
  EXPECT_EQ(run.finished.output, bare.finished.output);
  EXPECT_EQ(run.finished.exit_code, 0);
}

// A thread that is in a call then gets the driver's answer, and nothing breaks.
TEST(PreloadProcess, ThreadsMayAllocateWhileTheProcessEnds) {
  for (int i = 0; i < (kSanitized ? 5 : 20); ++i) {
    PreloadRun run({program("process_program"), "exit-threads"}, "arena",
                   {{"FOREBAY_PRELOAD_EVENTS", "1MiB"}});

    ASSERT_EQ(run.finished.exit_code, 0) << run.finished.output;
    ASSERT_EQ(run.finished.output, "");
    ASSERT_EQ(run.record().problem, "");
    run.expect_no_hazard();
  }
}

// For example, a program that only checked whether there is a driver.
TEST(PreloadProcess, AClosedDriverIsNotCalledAgain) {
  const std::string closed = program("closed_driver.so");
  if (!std::filesystem::exists(closed)) GTEST_SKIP() << "a sanitizer's runtime keeps libraries open";
  PreloadRun run({program("process_program"), "reopen", closed}, "arena",
                 {{"FOREBAY_PRELOAD_EVENTS", "1MiB"}});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_EQ(run.finished.output, "reopened\n");
  EXPECT_EQ(run.served(PreloadServer::kArena), 1u);
  EXPECT_EQ(run.record().refused, 1u);
  run.expect_no_hazard();
}

// A record is made only for a process that starts CUDA.
TEST(PreloadProcess, ARecordIdentifiesItsProcess) {
  const PreloadRun run({program("access_program"), "dlsym"});

  EXPECT_EQ(run.record().program, program("access_program") + " dlsym");
  EXPECT_EQ(run.record().mode, PreloadMode::kArena);
  EXPECT_GT(run.record().process, 0);
  EXPECT_EQ(run.record().peak_live_bytes, (std::uint64_t{6} << 20) + 1000);
  // `forebay run` may read it as another user.
  EXPECT_EQ(std::filesystem::status(run.record().path).permissions(), std::filesystem::perms{0644});
}

// The variables of launchers, the first valid one of which counts.
TEST(PreloadProcess, ARecordHasTheRankThatTheLauncherSet) {
  const std::pair<Process::Variables, int> cases[] = {
      {{{"RANK", ""},
        {"OMPI_COMM_WORLD_RANK", ""},
        {"MV2_COMM_WORLD_RANK", ""},
        {"JSM_NAMESPACE_RANK", ""},
        {"FLUX_TASK_RANK", ""},
        {"PMI_RANK", ""},
        {"SLURM_PROCID", ""}},
       -1},
      {{{"RANK", "3"}, {"OMPI_COMM_WORLD_RANK", "4"}}, 3},
      {{{"RANK", ""}, {"OMPI_COMM_WORLD_RANK", "4"}, {"MV2_COMM_WORLD_RANK", "5"}}, 4},
      {{{"RANK", "x"}, {"MV2_COMM_WORLD_RANK", "5"}, {"JSM_NAMESPACE_RANK", "6"}}, 5},
      {{{"RANK", "-1"}, {"JSM_NAMESPACE_RANK", "6"}, {"FLUX_TASK_RANK", "7"}}, 6},
      {{{"RANK", "3x"}, {"FLUX_TASK_RANK", "7"}, {"PMI_RANK", "8"}}, 7},
      {{{"RANK", "2147483648"}, {"PMI_RANK", "8"}, {"SLURM_PROCID", "9"}}, 8},
      {{{"SLURM_PROCID", "0"}}, 0},
      {{{"RANK", "2147483647"}}, INT32_MAX},
  };
  for (const auto& [variables, rank] : cases) {
    const PreloadRun run({program("process_program"), "threads"}, "arena", variables);
    EXPECT_EQ(run.record().rank, rank);
    EXPECT_EQ(run.record().parent, ::getpid());
  }
}

TEST(PreloadProcess, AMessageIsCutToItsRoomAndTheFirstOneStays) {
  const auto text = std::make_unique<PreloadText>();
  set_preload_text(*text, std::string(2000, 'x'));
  set_preload_text(*text, "another");
  EXPECT_EQ(text->state, 2u);
  EXPECT_EQ(std::string(text->text, ::strnlen(text->text, sizeof text->text)), std::string(1019, 'x'));
}

TEST(PreloadProcess, ForeignRecordsAreLeftOutAndTheOthersSorted) {
  const TemporaryDirectory directory;
  const auto write = [&](const std::string& name, const std::string& bytes) {
    std::ofstream(directory / name, std::ios::binary) << bytes;
  };
  const auto record_of = [](std::int32_t process, std::uint64_t magic, std::uint32_t bytes) {
    std::string text(sizeof(PreloadRecord), '\0');
    auto& record = *reinterpret_cast<PreloadRecord*>(text.data());
    record.magic = magic;
    record.bytes = bytes;
    record.process = process;
    return text;
  };
  const auto size = static_cast<std::uint32_t>(sizeof(PreloadRecord));
  write("b.record", record_of(20, kPreloadRecordMagic, size));
  write("a.record", record_of(30, kPreloadRecordMagic, size));
  write("c.record", record_of(20, kPreloadRecordMagic, size));
  write("1.record", record_of(1, kPreloadRecordMagic + 1, size));
  write("2.record", record_of(2, kPreloadRecordMagic, size - 8));
  write("3.record", std::string(size + 1, '\0'));
  write(".record", "no record, only the end of a name");
  write("4.recorded", "another end");
  std::vector<PreloadLeftOut> left_out;
  const auto read = read_preload_records(directory.path(), &left_out);

  ASSERT_TRUE(read.ok()) << read.status().message();
  std::string order;
  for (const PreloadReport& report : read.value()) order += report.path.substr(report.path.size() - 8, 1);
  EXPECT_EQ(order, "bca");
  std::map<std::string, std::string> reasons;
  for (const PreloadLeftOut& one : left_out) reasons[one.path.substr(one.path.size() - 8)] = one.why;
  const std::string no_record = "it is not a record of this build";
  EXPECT_EQ(reasons, (std::map<std::string, std::string>{
                         {"1.record", no_record},
                         {"2.record", no_record},
                         {"3.record", no_record + ": it has " + std::to_string(size + 1) + " bytes, not " +
                                          std::to_string(size)}}));
  const std::string missing = directory / "none";
  EXPECT_EQ(read_preload_records(missing).status().message(),
            "cannot read the records in " + missing +
                ": No such file or directory; name the directory that FOREBAY_PRELOAD_RECORDS had");
  // Only a record is asked for memory.
  EXPECT_TRUE(request_preload_trim(directory / "a.record").ok());
  std::ifstream file(directory / "a.record", std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(reinterpret_cast<PreloadRecord*>(bytes.data())->trim_requests, 1u);
  EXPECT_EQ(request_preload_trim(directory / "1.record").message(),
            "cannot ask the process of " + (directory / "1.record") +
                " to give memory back: it is not a record of this build; use the account that the process "
                "runs under");
  EXPECT_EQ(
      request_preload_trim(missing).message(),
      "cannot ask the process of " + missing +
          " to give memory back: No such file or directory; use the account that the process runs under");
}

TEST(PreloadProcess, AFileOfLearnedPlacementsIsReadWhole) {
  const TemporaryDirectory directory;
  const std::string path = directory / "learned";
  const auto message_of = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    const auto read = read_learned_file(path);
    EXPECT_TRUE(!read.ok() || read.value() == bytes);
    return read.ok() ? "read" : read.status().message();
  };
  internal::LearnedPlacements learned;
  learned.granule_bytes = 2u << 20;
  learned.reserve_bytes = std::size_t{64} << 20;
  learned.placements.assign(30'000, {512, 0, 0, 0});
  EXPECT_EQ(message_of(learned.encode()), "read") << "in several parts";

  EXPECT_EQ(
      message_of("a 0 1024 0\n"),
      path +
          ": cannot use learned placements: the file is none of `forebay replay --learn`; name one that it "
          "wrote");
  // As much as the limit is read, and more is not.
  EXPECT_EQ(message_of(std::string(kLearnedFileLimit, 'x')).find(path + ": cannot use learned placements: "),
            0u);
  EXPECT_EQ(message_of(std::string(kLearnedFileLimit + 1, 'x')),
            "cannot read the learned placements in " + path +
                ": it has more than 64.00 MiB; name a file that `forebay replay --learn` wrote");
  EXPECT_EQ(read_learned_file(directory / "none").status().message(),
            "cannot read the learned placements in " + (directory / "none") +
                ": No such file or directory; name a file that `forebay replay --learn` wrote");
}

// --- resolution ---

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// The expected answer: the same symbol as without the preload, in the preload's library if it is hooked.
std::string with_hooks(std::string line) {
  static const std::set<std::string> hooked = {
#define FOREBAY_PRELOAD_ROW(name, symbol, version, NULL_STREAM, parameters, arguments) #symbol,
      FOREBAY_PRELOAD_HOOKED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW
  };
  static const std::string kDriver = "libcuda.so.1 ";
  for (std::size_t at = line.find(kDriver); at != std::string::npos; at = line.find(kDriver, at + 1)) {
    const std::size_t begin = at + kDriver.size();
    const std::size_t end = std::min(line.find_first_of("; \n", begin), line.size());
    if (hooked.count(line.substr(begin, end - begin)) == 0) continue;
    line.replace(at, kDriver.size(), "libforebay-preload.so ");
  }
  return line;
}

// Each name in each version with each kind of null stream: exactly the requested interface.
TEST(PreloadResolution, EveryAnswerIsTheDriversFunctionOrTheHookOfThatSymbol) {
  const PreloadRun bare({program("resolution_program")}, "none");
  const PreloadRun run({program("resolution_program")});
  const std::vector<std::string> expected = lines_of(bare.finished.output);
  const std::vector<std::string> lines = lines_of(run.finished.output);

  ASSERT_EQ(bare.finished.exit_code, 0);
  ASSERT_EQ(run.finished.exit_code, 0);
  ASSERT_EQ(lines.size(), expected.size());
  std::size_t ours = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(lines[i], with_hooks(expected[i]));
    ours += lines[i].find("libforebay-preload.so") != std::string::npos;
  }
  EXPECT_GT(lines.size(), 5000u);
  EXPECT_GT(ours, 1000u);
}

// A program of a later toolkit asks for later versions. If the function is still the same it is hooked.
TEST(PreloadResolution, AnUnknownVersionIsHookedIfTheFunctionIsTheSame) {
  const Process::Variables later = {{"FAKE_CUDA_DRIVER_VERSION", "14000"}};
  const std::vector<std::string> command = {program("resolution_program"), "13050"};
  const PreloadRun bare(command, "none", later);
  const PreloadRun run(command, "arena", later);

  ASSERT_EQ(run.finished.exit_code, 0);
  const std::vector<std::string> expected = lines_of(bare.finished.output);
  const std::vector<std::string> lines = lines_of(run.finished.output);
  ASSERT_EQ(lines.size(), expected.size());
  for (std::size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i], with_hooks(expected[i]));
  EXPECT_NE(run.finished.output.find("cuMemAlloc 13050 0: 0 0 libforebay-preload.so cuMemAlloc_v2"),
            std::string::npos);
}

}  // namespace
}  // namespace forebay::testing
