// Reports, traces and snapshots of `forebay run`, however the processes end.
#include "allocator/preload/events.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/preload/event_log.h"
#include "forebay/arena.h"
#include "forebay/descriptor.h"
#include "forebay/host_backend.h"
#include "runtime/command/page/report_page.h"
#include "runtime/command/run/process_history.h"
#include "runtime/command/run/process_report.h"
#include "runtime/command/run/recorder.h"
#include "runtime/command/traces/allocation_trace.h"
#include "tests/allocator/preload/preload_run.h"
#include "tests/support/let_others_run.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMiB = 1u << 20;

Process::Variables on_the_fake(Process::Variables more = {}) {
  more.merge(sanitizer_variables());
  more.emplace("LD_LIBRARY_PATH", kFakeDirectory + ":" + kFakeRuntimeDirectory);
  more.emplace("FAKE_CUDA_MEMORY", "67108864");
  more.emplace("FOREBAY_DEVICE_ROOM", "0");
  return more;
}

std::vector<std::string> forebay(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), FOREBAY_COMMAND);
  return arguments;
}

Finished forebay_run(std::vector<std::string> arguments, const Process::Variables& more = {}) {
  arguments.insert(arguments.begin(), "run");
  return run_program(forebay(arguments), on_the_fake(more));
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

Json read_json(const std::string& path) {
  return Json::parse(read_text(path), nullptr, false);
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The only process of the report, on its only device.
Json only_device(const std::string& report) {
  const Json summary = read_json(report + "/summary.json");
  EXPECT_EQ(summary.at("processes").size(), 1u) << summary.dump(2);
  return summary.at("processes").at(0).at("devices").at(0);
}

Json moment(const Json& device, const std::string& name) {
  for (const Json& one : device.at("moments")) {
    if (one.at("name") == name) return one;
  }
  ADD_FAILURE() << "no moment " << name << " in " << device.dump(2);
  return {};
}

void write_record(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// --- reports ---

TEST(RunReportOfAProcess, TellsAllocationsAndFrees) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--report", report, "--", program("events_program"), "steps"});
  const Json device = only_device(report);

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(device.at("allocations"), 4);
  EXPECT_EQ(device.at("frees"), 4);
  EXPECT_EQ(device.at("out_of_memory"), 0);
  EXPECT_EQ(device.at("peak_requested_bytes"), 13 * kMiB);
  EXPECT_EQ(device.at("peak_requested_bytes_of_kept_events"), 13 * kMiB);
  EXPECT_EQ(device.at("live_requested_bytes"), 0);
  EXPECT_EQ(device.at("capacity_bytes"), 64 * kMiB);
  EXPECT_GE(device.at("peak_reserved_bytes").get<std::uint64_t>(), 13 * kMiB);
  // Blocks of less than 10 MiB come from segments of 20 MiB there.
  EXPECT_EQ(device.at("baseline_reserved_bytes"), 40 * kMiB);
  const Json peak = moment(device, kPeakMoment);
  EXPECT_EQ(peak.at("requested_bytes"), 13 * kMiB);
  ASSERT_EQ(peak.at("holders").size(), 3u) << peak.dump(2);
  EXPECT_EQ(peak.at("holders").at(0).at("bytes"), 8 * kMiB);
  EXPECT_EQ(peak.at("holders").at(0).at("stream_name"), "stream 3");
  EXPECT_EQ(peak.at("holders").at(2).at("bytes"), 2 * kMiB);
  EXPECT_EQ(peak.at("holders").at(2).at("stream_name"), "plain allocations");
  EXPECT_EQ(moment(device, kEndMoment).at("block_count"), 0);
  EXPECT_TRUE(has(read_text(report + "/summary.txt"), "the command has ended with 0"));
  EXPECT_TRUE(has(read_text(report + "/report.html"), "13.00 MiB"));
}

TEST(RunReportOfAProcess, IsCompleteAfterTheProcessWasKilled) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--report", report, "--", program("events_program"), "killed"});
  const Json device = only_device(report);

  EXPECT_EQ(run.exit_code, 128 + 9) << run.output;
  EXPECT_EQ(device.at("allocations"), 4);
  EXPECT_EQ(device.at("frees"), 1);
  EXPECT_EQ(device.at("live_requested_bytes"), 13 * kMiB);
  EXPECT_EQ(moment(device, kEndMoment).at("requested_bytes"), 13 * kMiB);
  EXPECT_EQ(moment(device, kEndMoment).at("block_count"), 3);
}

TEST(RunReportOfAProcess, OutOfMemoryComesWithItsHolders) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--report", report, "--", program("events_program"), "full"});
  const Json device = only_device(report);
  const Json refusal = moment(device, kFirstRefusalMoment);

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(device.at("out_of_memory"), 1);
  EXPECT_EQ(refusal.at("asked_bytes"), 12 * kMiB);
  EXPECT_EQ(refusal.at("requested_bytes"), 60 * kMiB);
  ASSERT_EQ(refusal.at("holders").size(), 1u);
  EXPECT_EQ(refusal.at("holders").at(0).at("block_count"), 5);
  EXPECT_TRUE(has(run.output, "out of memory 1 time")) << run.output;
}

TEST(RunReportOfAProcess, IsWrittenAtOutOfMemoryWhileTheCommandGoesOn) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  Process process(forebay({"run", "--report", report, "--", program("events_program"), "full", "1"}),
                  on_the_fake());
  ASSERT_TRUE(process.wait_for_output("was refused memory (out-of-memory)"));
  ASSERT_TRUE(process.wait_for_output("the report is in "));
  const std::string state = read_json(report + "/summary.json").at("state");
  const Json device = only_device(report);
  ASSERT_TRUE(process.wait_for_output("ready"));
  process.signal(SIGTERM);
  const Finished run = process.finish();

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(state, "written at out-of-memory; the run goes on");
  EXPECT_EQ(moment(device, kFirstRefusalMoment).at("asked_bytes"), 12 * kMiB);
  EXPECT_TRUE(has(read_text(report + "/summary.txt"), "the command has ended with 0"));
}

TEST(RunReportOfAProcess, NamesTheWorstOfSeveral) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const std::string one = program("events_program");
  const Finished run =
      forebay_run({"--report", report, "--", "/bin/sh", "-c",
                   "RANK=0 " + one + " steps & RANK=1 " + one + " full & RANK=2 " + one + " steps & wait"});
  const Json summary = read_json(report + "/summary.json");

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(summary.at("processes").size(), 3u);
  EXPECT_EQ(summary.at("worst").at("rank"), 1);
  EXPECT_TRUE(has(run.output, "the worst: rank 1, process ")) << run.output;
  EXPECT_TRUE(has(read_text(report + "/summary.txt"), "the worst: rank 1, process "));
}

TEST(RunReportOfAProcess, IncludesObservedAllocations) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run =
      forebay_run({"--observe", "--report", report, "--", program("events_program"), "steps"});
  const Json device = only_device(report);

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(device.at("allocations"), 4);
  EXPECT_EQ(device.at("frees"), 4);
  EXPECT_EQ(device.at("peak_requested_bytes"), 13 * kMiB);
  EXPECT_EQ(device.at("peak_reserved_bytes"), 13 * kMiB);
}

TEST(RunReportOfAProcess, CountsTheChunksOfTheProgramsOwn) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--report", report, "--", program("events_program"), "chunk"});
  EXPECT_EQ(run.exit_code, 0) << run.output;
  const Json device = only_device(report);

  EXPECT_EQ(device.at("untracked"), Json({{"count", 1}, {"bytes", 6 * kMiB}})) << device.dump(2);
  EXPECT_EQ(device.at("peak_requested_bytes"), kMiB);
}

// The program still has the block, so it counts at the peak, and once.
TEST(RunReportOfAProcess, ABlockStaysWhereTheDriverRefusesItsFree) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run =
      forebay_run({"--observe", "--report", report, "--", program("events_program"), "refused-free"});
  EXPECT_EQ(run.exit_code, 0) << run.output;
  const Json device = only_device(report);

  EXPECT_EQ(device.at("peak_requested_bytes"), 12 * kMiB);
  EXPECT_EQ(device.at("live_requested_bytes"), 4 * kMiB);
}

// Nobody has freed it, and its address belongs to another one.
TEST(RunReportOfAProcess, ABlockIsGoneWhereAnotherHasItsAddress) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run =
      forebay_run({"--observe", "--report", report, "--", program("events_program"), "lost"});
  EXPECT_EQ(run.exit_code, 0) << run.output;
  const Json device = only_device(report);

  EXPECT_EQ(device.at("peak_requested_bytes"), 8 * kMiB);
  EXPECT_EQ(device.at("peak_requested_bytes_of_kept_events"), 8 * kMiB);
  EXPECT_EQ(device.at("live_requested_bytes"), 4 * kMiB);
}

TEST(RunReportOfAProcess, IsWrittenOnASignalWhileTheCommandGoesOn) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  Process process(forebay({"run", "--report", report, "--", program("events_program"), "listen"}),
                  on_the_fake());
  ASSERT_TRUE(process.wait_for_output("ready"));
  process.signal(SIGUSR1);
  ASSERT_TRUE(process.wait_for_output("the report is in "));
  const Json device = only_device(report);
  const std::string state = read_json(report + "/summary.json").at("state");
  process.signal(SIGTERM);
  const Finished run = process.finish();

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(state, "the run goes on");
  EXPECT_EQ(device.at("live_requested_bytes"), 4 * kMiB);
  EXPECT_EQ(device.at("peak_requested_bytes"), 36 * kMiB);
}

// A device's reset and the last release of its context end blocks without a free.
TEST(RunReportOfAProcess, BlocksEndWithTheirContext) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--report", report, "--", program("memory_program"), "reset"});
  const Json device = only_device(report);

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(device.at("allocations"), 9);
  EXPECT_EQ(device.at("frees"), 9);
  EXPECT_EQ(device.at("peak_requested_bytes"), 40 * kMiB);
  EXPECT_EQ(device.at("held_bytes"), 0);
}

// Without a request for events there is no cost.
TEST(RunReportOfAProcess, NoEventsAreKeptUnlessAskedFor) {
  const TemporaryDirectory directory;
  const std::string records = directory / "records";
  const Finished run = forebay_run({"--records", records, "--", program("events_program"), "steps"});
  const Finished told = forebay_run({"--from", records, "--report", directory / "report"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(records), {}), 1);
  EXPECT_EQ(told.exit_code, 0) << told.output;
  EXPECT_TRUE(has(told.output, "it has kept no events")) << told.output;
}

TEST(RunReportOfAProcess, ComesFromRecordsOfAnEarlierRun) {
  const TemporaryDirectory directory;
  const PreloadRun alone({program("events_program"), "killed"}, "arena",
                         {{"FOREBAY_PRELOAD_RECORDS", directory.path()}, {"FOREBAY_PRELOAD_EVENTS", "1MiB"}});
  const std::string report = directory / "report";
  const Finished told = forebay_run({"--from", directory.path(), "--report", report});

  EXPECT_EQ(alone.finished.exit_code, 128 + 9);
  EXPECT_EQ(told.exit_code, 0) << told.output;
  EXPECT_EQ(only_device(report).at("live_requested_bytes"), 13 * kMiB);
}

TEST(RunReportOfAProcess, OptionsComeFromTheEnvironmentToo) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--", program("events_program"), "steps"},
                                   {{"FOREBAY_RUN_REPORT", report},
                                    {"FOREBAY_RUN_TRACE", directory / "trace.txt"},
                                    {"FOREBAY_RUN_SNAPSHOT", directory / "snapshot.pickle"},
                                    {"FOREBAY_PRELOAD_EVENTS", "128KiB"}});
  const Finished help = forebay_run({"--help"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  for (const char* file : {"report/summary.txt", "trace.txt", "snapshot.pickle"}) {
    EXPECT_TRUE(std::filesystem::exists(directory / file)) << file;
  }
  for (const char* variable : {"FOREBAY_RUN_REPORT", "FOREBAY_RUN_TRACE", "FOREBAY_RUN_SNAPSHOT",
                               "FOREBAY_RUN_PAUSE_SIGNAL", kPreloadEventsVariable}) {
    EXPECT_TRUE(has(help.output, variable)) << variable;
  }
}

TEST(RunReportOfAProcess, InvalidOptionsAreRefusedBeforeTheCommandStarts) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "old");
  write_record(directory / "old/summary.txt", "of another run");
  const auto refused = [](std::vector<std::string> options) {
    options.insert(options.end(), {"--", "/bin/echo", "it ran"});
    const Finished run = forebay_run(options);
    EXPECT_EQ(run.exit_code, 2) << run.output;
    EXPECT_FALSE(has(run.output, "\nit ran")) << run.output;
    return run.output;
  };

  EXPECT_TRUE(has(refused({"--report", directory / "old"}), "has a report already"));
  EXPECT_TRUE(has(refused({"--trace", directory / "none/trace.txt"}), "none does not exist; make it first"));
  write_record(directory / "mine.txt", "of years");
  for (const char* option : {"--trace", "--snapshot"}) {
    EXPECT_TRUE(has(refused({option, directory / "mine.txt/trace"}), "mine.txt is no directory"));
    EXPECT_TRUE(has(refused({option, directory.path()}), "it is a directory; name a file"));
    EXPECT_TRUE(has(refused({option, directory / "new/"}), "the name is that of a directory"));
    EXPECT_TRUE(has(refused({option, directory / std::string(300, 'x')}), "File name too long"));
    EXPECT_TRUE(has(refused({option, "/proc/none"}), "cannot write "));
    EXPECT_TRUE(has(refused({option, directory / "mine.txt"}), "and is not overwritten"));
    EXPECT_TRUE(has(refused({option, "-"}), "give /dev/stdout"));
  }
  EXPECT_TRUE(has(refused({"--learned", directory / "mine.txt"}), "is none of `forebay replay --learn`"));
  EXPECT_TRUE(has(refused({"--learned", directory / "none"}), "No such file"));
  EXPECT_EQ(read_text(directory / "mine.txt"), "of years");
  EXPECT_TRUE(has(refused({"--trace", directory / "same", "--snapshot", directory / "./same"}),
                  "both name " + (directory / "same")));
  // Nothing stays of a run that was refused.
  EXPECT_TRUE(has(refused({"--report", directory / "fresh", "--trace", directory.path()}), "is a directory"));
  EXPECT_FALSE(std::filesystem::exists(directory / "fresh/summary.txt"));
  for (const char* bound : {"1KiB", "3GiB", "99999999999999999999", "1e300", "-1", "many"}) {
    EXPECT_TRUE(has(refused({std::string("--events=") + bound}), "use 64.00 KiB to 2.00 GiB"));
  }
  EXPECT_TRUE(has(refused({"--pause-signal", "KILL"}), "use SIGUSR1, SIGUSR2 or SIGHUP"));
  EXPECT_TRUE(has(refused({"--pause-signal", "SIGUSR1", "--trace", directory / "trace.txt"}), "cannot be"));
  EXPECT_TRUE(has(refused({"--from", directory.path()}), "leave out the command or --from"));
  for (const std::vector<std::string>& idle : {std::vector<std::string>{"--observe"},
                                               {"--memory", "1GiB"},
                                               {"--check"},
                                               {"--records", directory / "new"}}) {
    std::vector<std::string> options = {"--from", directory.path()};
    options.insert(options.end(), idle.begin(), idle.end());
    const Finished run = forebay_run(options);
    EXPECT_EQ(run.exit_code, 2) << idle[0];
    EXPECT_TRUE(has(run.output, "so " + idle[0] + " has no effect")) << run.output;
  }
}

// --- learned placements ---

TEST(RunLearned, PlacesBlocksAsAReplayHasLearnt) {
  const TemporaryDirectory directory;
  const auto run = [&](const std::string& name, std::vector<std::string> options) {
    options.insert(options.end(), {"--report", directory / name, "--trace", directory / (name + ".txt"), "--",
                                   program("events_program"), "steps"});
    const Finished finished = forebay_run(options);
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
    return finished.output;
  };
  const std::string learned = directory / "steps.learned";
  run("first", {});
  const Finished replay =
      run_program(forebay({"replay", directory / "first.txt", "--learn", learned}), on_the_fake());
  ASSERT_EQ(replay.exit_code, 0) << replay.output;
  const std::string output = run("again", {"--learned", learned});

  EXPECT_TRUE(has(output, "placed as learned")) << output;
  EXPECT_FALSE(has(output, "going on without")) << output;
  // Their first lines name the processes.
  const auto requests = [&](const char* file) {
    const std::string text = read_text(directory / file);
    return text.substr(std::min(text.find('\n'), text.size()));
  };
  EXPECT_EQ(requests("again.txt"), requests("first.txt"));
  EXPECT_TRUE(has(requests("again.txt"), "a 0 8388608")) << "the arena has served it";
  const Finished observed = forebay_run({"--observe", "--learned", learned, "--", "/bin/echo", "it ran"});
  EXPECT_EQ(observed.exit_code, 2);
  EXPECT_TRUE(has(observed.output, "it cannot place blocks by --learned")) << observed.output;
}

// --- traces and snapshots ---

TEST(RunTrace, ReplaysWithTheSamePeak) {
  const TemporaryDirectory directory;
  const std::string trace = directory / "trace.txt";
  const Finished run = forebay_run({"--trace", trace, "--", program("events_program"), "steps"});
  const Finished replay = run_program(forebay({"replay", "--json", "--repeat", "1", trace}), on_the_fake());
  const Result<std::vector<AllocationTrace>> read = read_allocation_traces(trace);

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(replay.exit_code, 0) << replay.output;
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value().at(0).peak_requested_bytes(), 13 * kMiB);
  EXPECT_EQ(read.value().at(0).events.size(), 8u);
  EXPECT_EQ(read.value().at(0).stream_count, 2u);
}

TEST(RunTrace, SeveralProcessesGetAFileEach) {
  const TemporaryDirectory directory;
  const std::string one = program("events_program");
  const Finished run = forebay_run(
      {"--trace", directory / "trace.txt", "--", "/bin/sh", "-c", one + " steps & " + one + " steps & wait"});
  std::size_t count = 0;
  for (const auto& file : std::filesystem::directory_iterator(directory.path())) {
    const std::string name = file.path().filename();
    EXPECT_EQ(name.rfind("trace.process-", 0), 0u) << name;
    EXPECT_EQ(name.substr(name.size() - 4), ".txt");
    ++count;
  }

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(count, 2u);
  EXPECT_EQ(with_middle("a.b/trace", "x"), "a.b/trace.x");
  EXPECT_EQ(with_middle("trace.tar.gz", "x"), "trace.tar.x.gz");
  EXPECT_EQ(with_middle("/a/.hidden", "x"), "/a/.hidden.x");
}

TEST(RunTrace, IsAppendedToAStream) {
  const TemporaryDirectory directory;
  const Finished run = run_program({"/bin/sh", "-c",
                                    "exec " FOREBAY_COMMAND " run --trace /dev/stdout -- " +
                                        program("events_program") + " steps > " + (directory / "out")},
                                   on_the_fake());
  const Finished again = forebay_run({"--trace", "/dev/stdout", "--", program("events_program"), "steps"});
  write_record(directory / "before", "what there was\n");
  const Finished after = run_program({"/bin/sh", "-c",
                                      "exec " FOREBAY_COMMAND " run --trace /dev/stdout -- " +
                                          program("events_program") + " steps >> " + (directory / "before")},
                                     on_the_fake());

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_TRUE(has(read_text(directory / "out"), "# allocations of ")) << run.output;
  EXPECT_TRUE(has(again.output, "# allocations of ")) << again.output;
  EXPECT_EQ(after.exit_code, 0) << after.output;
  EXPECT_EQ(read_text(directory / "before").rfind("what there was\n", 0), 0u);
  EXPECT_TRUE(has(read_text(directory / "before"), "# allocations of "));
}

TEST(RunTrace, SeveralDevicesGetAFileEach) {
  const TemporaryDirectory directory;
  const Finished run =
      forebay_run({"--trace", directory / "trace.txt", "--snapshot", directory / "snapshot.pickle", "--",
                   program("memory_program"), "devices"},
                  {{"FAKE_CUDA_DEVICES", "2"}});
  std::map<std::string, std::uint64_t> peaks;
  for (const auto& file : std::filesystem::directory_iterator(directory.path())) {
    const std::string name = file.path().filename();
    if (name.rfind("trace.", 0) != 0) continue;
    const Result<std::vector<AllocationTrace>> read = read_allocation_traces(file.path());
    ASSERT_TRUE(read.ok()) << read.status().message();
    peaks[name.substr(name.find_last_of('-') + 1)] = read.value().at(0).peak_requested_bytes();
  }
  const Result<std::vector<AllocationTrace>> snapshot = read_allocation_traces(directory / "snapshot.pickle");

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(peaks, (std::map<std::string, std::uint64_t>{{"cuda0.txt", 2 * kMiB}, {"cuda1.txt", kMiB}}));
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  EXPECT_EQ(snapshot.value().size(), 2u);
}

TEST(RunSnapshot, IsReadByPyTorchsReaders) {
  const TemporaryDirectory directory;
  const std::string file = directory / "snapshot.pickle";
  const Finished run = forebay_run({"--snapshot", file, "--", program("events_program"), "killed"});
  const Result<std::vector<AllocationTrace>> read = read_allocation_traces(file);

  EXPECT_EQ(run.exit_code, 128 + 9) << run.output;
  ASSERT_TRUE(read.ok()) << read.status().message();
  ASSERT_EQ(read.value().size(), 1u);
  const AllocationTrace& trace = read.value().front();
  EXPECT_EQ(trace.format, "snapshot of forebay run");
  EXPECT_EQ(trace.origin, TraceOrigin::kRun);
  EXPECT_EQ(trace.peak_requested_bytes(), 13 * kMiB);
  EXPECT_EQ(trace.warm_event_count, 0u);
  ASSERT_TRUE(trace.state.has_value());
  EXPECT_EQ(trace.state->requested_bytes, 13 * kMiB);
  EXPECT_EQ(trace.state->live_bytes, 13 * kMiB);
  EXPECT_GE(trace.state->reserved_bytes, 13 * kMiB);
  if (std::system("python3 -c 'import pickle' >/dev/null 2>&1") == 0) {
    const std::string script =
        "python3 -c 'import pickle,sys\n"
        "s=pickle.load(open(sys.argv[1],\"rb\"))\n"
        "assert [e[\"action\"] for e in s[\"device_traces\"][0]].count(\"alloc\") == 4\n"
        "for g in s[\"segments\"]: assert sum(b[\"size\"] for b in g[\"blocks\"]) == g[\"total_size\"], g' ";
    EXPECT_EQ(std::system((script + file).c_str()), 0);
  }
}

// No advice about PyTorch's allocator, which was not used.
TEST(RunSnapshot, IsExplainedWithAdviceAboutForebay) {
  const TemporaryDirectory directory;
  const auto explained = [&](const std::vector<std::string>& options, const std::string& what) {
    const std::string file = directory / "snapshot.pickle";
    std::vector<std::string> arguments = options;
    arguments.insert(arguments.end(), {"--snapshot", file, "--", program("events_program"), what});
    EXPECT_EQ(forebay_run(arguments).exit_code, what == "killed" ? 128 + 9 : 0);
    const Finished run = run_program(forebay({"explain", file}), on_the_fake());
    EXPECT_EQ(run.exit_code, 0) << run.output;
    EXPECT_TRUE(has(run.output, "snapshot.pickle: snapshot of forebay run, ")) << run.output;
    for (const char* of_torch : {"torch", "expandable", "_dump", "PyTorch"}) {
      EXPECT_FALSE(has(run.output, of_torch)) << run.output;
    }
    return run.output;
  };
  const std::string sufficed = explained({}, "killed");
  const std::string full = explained({}, "full");
  const std::string limited = explained({"--memory", "44MiB"}, "full");
  const std::string observed = explained({"--observe"}, "killed");

  EXPECT_TRUE(has(sufficed, "`forebay run --memory 14MiB` would have sufficed")) << sufficed;
  EXPECT_TRUE(
      has(full, "TRUE SHORTAGE: 12.00 MiB failed; all that was free, 4.00 MiB, is 8.00 MiB short of it."))
      << full;
  EXPECT_TRUE(has(full, "there were 64.00 MiB")) << full;
  EXPECT_TRUE(has(full, "or raise --memory, where that was the limit")) << full;
  // Memory of the device beyond the limit is not free.
  EXPECT_TRUE(has(limited, "TRUE SHORTAGE: 12.00 MiB failed; all that was free, 8.00 MiB, is 4.00 MiB short"))
      << limited;
  EXPECT_TRUE(has(observed, "without --observe `forebay run --memory 14MiB` would have sufficed"))
      << observed;
}

// A block at the end of its chunk, one that goes on into the next, and one of the driver's.
TEST(RunSnapshot, FreeRangesAreTheRestOfTheChunks) {
  const PreloadDeviceFigures figures{{.chunk_bytes = 2 * kMiB}};
  const std::vector<PageBlock> blocks = {
      {.address = 101 * kMiB, .bytes = kMiB},
      {.address = 102 * kMiB, .bytes = 3 * kMiB - 100},
      {.address = 200 * kMiB, .bytes = 1000, .server = PreloadServer::kManaged},
  };
  const std::vector<PageBlock> pieces = free_pieces(blocks, figures);

  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].address, 100 * kMiB);
  EXPECT_EQ(pieces[0].bytes, kMiB);
  EXPECT_EQ(pieces[1].address, 105 * kMiB);
  EXPECT_EQ(pieces[1].bytes, kMiB);
}

// --- kept events ---

// The latest events, and the blocks that were live before them.
TEST(PreloadEvents, BeyondTheBoundTheOldestEventsAreReplaced) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const std::string trace = directory / "trace.txt";
  const Finished run = forebay_run({"--events", "64KiB", "--report", report, "--trace", trace, "--",
                                    program("events_program"), "many", "5000"});
  const Json device = only_device(report);
  const Result<std::vector<AllocationTrace>> read = read_allocation_traces(trace);

  EXPECT_EQ(run.exit_code, 0) << run.output;
  // Counts and peaks are of the whole run.
  EXPECT_EQ(device.at("allocations"), 5001);
  EXPECT_EQ(device.at("frees"), 5000);
  EXPECT_EQ(device.at("peak_requested_bytes"), 6 * kMiB);
  EXPECT_EQ(device.at("live_requested_bytes"), 5 * kMiB);
  const std::uint64_t kept = device.at("events").at("kept");
  EXPECT_EQ(kept, 48u * 1024 / sizeof(PreloadEvent) - 1);
  EXPECT_GE(device.at("events").at("dropped_by_process").get<std::uint64_t>(), 10001 - kept);
  // So are the blocks that were live before the first kept event.
  EXPECT_EQ(moment(device, kEndMoment).at("requested_bytes"), 5 * kMiB);
  EXPECT_EQ(moment(device, kPeakMoment).at("requested_bytes"), 6 * kMiB);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value().at(0).peak_requested_bytes(), 6 * kMiB);
  EXPECT_GE(read.value().at(0).warm_event_count, 1u);
  EXPECT_TRUE(has(read_text(report + "/summary.txt"), "the worst"));
  const std::string html = read_text(report + "/report.html");
  EXPECT_TRUE(has(html, "The bound of events was reached")) << html.substr(0, 2000);
}

// The calls of a log in a process of its own, and the file that it leaves.
PreloadEventLog events_of(const std::string& directory, const std::function<void(EventLog&)>& calls) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv(kPreloadEventsVariable, "64KiB", 1);
    ::setenv(kPreloadRecordsVariable, directory.c_str(), 1);
    EventLog::start(preload_record_of_process(PreloadMode::kArena));
    if (EventLog::of_process() == nullptr) ::_exit(1);
    calls(*EventLog::of_process());
    ::_exit(0);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const Result<std::vector<PreloadReport>> records = read_preload_records(directory);
  EXPECT_TRUE(records.ok() && records.value().size() == 1);
  if (!records.ok() || records.value().size() != 1) return {};
  Result<PreloadEventLog> read = read_preload_events(records.value().front().events);
  EXPECT_TRUE(read.ok()) << read.status().message();
  return read.ok() ? std::move(read).value() : PreloadEventLog();
}

DevicePtr at(std::uintptr_t address) {
  return reinterpret_cast<DevicePtr>(address);
}

// The directory of `forebay run` goes at its end, and another user may make it again.
TEST(PreloadEvents, AFileThatAnotherTookThePlaceOfIsNotWritten) {
  for (const bool is_link : {true, false}) {
    const TemporaryDirectory directory;
    const TemporaryDirectory others;
    const std::string victim = others / "victim";
    std::ofstream(victim) << "victim\n";
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv(kPreloadEventsVariable, "8MiB", 1);
      ::setenv(kPreloadRecordsVariable, (directory / ".").c_str(), 1);
      EventLog::start(preload_record_of_process(PreloadMode::kArena));
      EventLog* const log = EventLog::of_process();
      if (log == nullptr) ::_exit(1);
      for (const auto& entry : std::filesystem::directory_iterator(directory / ".")) {
        if (entry.path().extension() != ".events") continue;
        std::filesystem::remove(entry.path());
        if (is_link) {
          std::filesystem::create_symlink(victim, entry.path());
        } else {
          std::filesystem::create_hard_link(victim, entry.path());
        }
      }
      for (std::uintptr_t i = 1; i <= 50'000; ++i) {
        BlockFacts facts;
        log->allocated(at(i << 20), {.bytes = 4096, .device = 0}, nullptr, &facts);
        log->freed(at(i << 20), facts);
      }
      ::_exit(0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(read_text(victim), "victim\n") << is_link;
    const Result<std::vector<PreloadReport>> records = read_preload_records(directory / ".");
    ASSERT_TRUE(records.ok() && records.value().size() == 1);
    EXPECT_TRUE(has(records.value().front().problem, "there is no more room"))
        << records.value().front().problem;
  }
}

// Each live block has an entry of its own, and entries of freed blocks serve again.
TEST(PreloadEvents, TheTableHoldsTheLiveBlocks) {
  const TemporaryDirectory directory;
  PreloadEventLog read = events_of(directory.path(), [](EventLog& log) {
    BlockFacts facts[8];
    const auto allocate = [&](std::size_t i) {
      facts[i] = {.bytes = i + 1};
      log.allocated(at((i + 1) << 20), {.bytes = i + 1, .device = 0}, nullptr, &facts[i]);
    };
    const auto give_back = [&](std::size_t i) { log.freed(at((i + 1) << 20), facts[i]); };
    for (const std::size_t i : {0, 1, 2, 6, 7}) allocate(i);
    for (const std::size_t i : {0, 1, 6, 7}) give_back(i);
    for (const std::size_t i : {3, 4}) allocate(i);
    // The first events are replaced, and there are more blocks in all than the table has entries.
    for (int n = 0; n < 2000; ++n) allocate(5), give_back(5);
  });

  // The short one may have been live when the first kept event came.
  std::erase_if(read.live_before, [](const PreloadBlock& block) { return block.bytes == 6; });
  ASSERT_EQ(read.live_before.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read.live_before[i].address, (i + 3) << 20);
    EXPECT_EQ(read.live_before[i].bytes, i + 3);
  }
  EXPECT_EQ(read.untold_blocks, 0u);
}

TEST(PreloadEvents, FiguresAreThoseOfTheArenaAndOfTheDriver) {
  const TemporaryDirectory directory;
  const PreloadEventLog read = events_of(directory.path(), [](EventLog& log) {
    const std::unique_ptr<HostBackend> backend = HostBackend::create({}).value();
    const std::unique_ptr<Arena> arena = Arena::create(*backend).value();
    log.set_capacity(0, 100 * kMiB, 2 * kMiB);
    BlockFacts served{.bytes = 8 * kMiB}, elsewhere{.bytes = 5 * kMiB};
    const DevicePtr block = arena->allocate({.bytes = 8 * kMiB}).value();
    log.allocated(block, {.bytes = 8 * kMiB, .device = 0}, arena.get(), &served);
    log.allocated(at(1), {.bytes = 5 * kMiB, .device = 0, .server = PreloadServer::kPitched}, nullptr,
                  &elsewhere);
    log.refused({.bytes = 90 * kMiB, .device = 0}, 10 * kMiB);
    log.refused({.bytes = 90 * kMiB, .device = 0}, 90 * kMiB);
    // Within one call the arena takes memory and gives it back.
    const DevicePtr large = arena->allocate({.bytes = 64 * kMiB}).value();
    static_cast<void>(arena->free(large, Stream()));
    arena->trim();
    log.look_at(0, arena.get());
    log.freed(at(1), elsewhere);
    log.freed(block, served);
  });

  ASSERT_EQ(read.devices.size(), 1u);
  const PreloadDeviceFigures& figures = read.devices[0];
  EXPECT_EQ(figures.peak_requested_bytes, 13 * kMiB);
  EXPECT_EQ(figures.requested_bytes, 0u);
  EXPECT_EQ(figures.elsewhere_bytes, 0u);
  EXPECT_GE(figures.peak_reserved_bytes, 77 * kMiB);
  EXPECT_LT(figures.arena_bytes, 64 * kMiB);
  std::uint64_t reserved = 0;
  std::vector<std::uint64_t> free_bytes;
  for (const PreloadEvent& event : read.events) {
    if (event.kind == PreloadEventKind::kReserved && reserved == 0) reserved = event.bytes;
    if (event.kind == PreloadEventKind::kRefused) free_bytes.push_back(event.address);
  }
  // The unused part of the arena is free too, but the limit holds for all.
  ASSERT_GE(reserved, 8 * kMiB);
  EXPECT_EQ(free_bytes, (std::vector<std::uint64_t>{10 * kMiB + reserved - 8 * kMiB, 87 * kMiB}));
}

TEST(PreloadEvents, StreamsBeyondTheLimitShareANumber) {
  const TemporaryDirectory directory;
  const PreloadEventLog read = events_of(directory.path(), [](EventLog& log) {
    for (std::uintptr_t i = 1; i <= 300; ++i) {
      BlockFacts facts{.bytes = 1};
      const auto stream = reinterpret_cast<DriverStream>(i << 12);
      log.allocated(at(i), {.bytes = 1, .device = 0, .stream = stream}, nullptr, &facts);
    }
  });

  ASSERT_EQ(read.events.size(), 300u);
  for (std::size_t i = 0; i < 300; ++i)
    EXPECT_EQ(read.events[i].stream, std::min<std::size_t>(i + 3, kPreloadStreamLimit - 1)) << i;
}

// A file of events as a process would leave it, to be damaged.
class EventFile : public ::testing::Test {
 protected:
  EventFile()
      : run_({program("events_program"), "killed"}, "arena",
             {{"FOREBAY_PRELOAD_RECORDS", directory_.path()}, {"FOREBAY_PRELOAD_EVENTS", "64KiB"}}) {
    const Result<std::vector<PreloadReport>> records = read_preload_records(directory_.path());
    EXPECT_TRUE(records.ok() && records.value().size() == 1);
    if (records.ok() && !records.value().empty()) path_ = records.value().front().events;
    bytes_ = read_text(path_);
  }
  PreloadEventsHeader& header() { return *reinterpret_cast<PreloadEventsHeader*>(bytes_.data()); }
  PreloadEvent& event(std::size_t i) {
    return reinterpret_cast<PreloadEvent*>(bytes_.data() + header().event_offset)[i];
  }
  Result<PreloadEventLog> read() {
    write_record(path_, bytes_);
    return read_preload_events(path_);
  }

  TemporaryDirectory directory_;
  PreloadRun run_;
  std::string path_;
  std::string bytes_;
};

TEST_F(EventFile, AnEventThatWasBeingWrittenIsLeftOut) {
  const std::uint64_t written = header().written;
  // Half of it, and it is not counted yet.
  event(written).address = 0x1234;
  event(written).kind = static_cast<PreloadEventKind>(0xEE);
  const Result<PreloadEventLog> log = read();

  ASSERT_TRUE(log.ok()) << log.status().message();
  EXPECT_EQ(log.value().events.size(), written);
  EXPECT_EQ(log.value().first_number, 0u);
}

TEST_F(EventFile, ADeviceThatOnlyRefusedIsRead) {
  header().devices[1].refused = 2;
  const Result<PreloadEventLog> log = read();

  ASSERT_TRUE(log.ok()) << log.status().message();
  ASSERT_EQ(log.value().devices.size(), 2u);
  EXPECT_EQ(log.value().devices[1].device, 1);
  EXPECT_EQ(log.value().devices[1].refused, 2u);
}

// The ring is full, and the process was killed while it wrote over the oldest event.
TEST_F(EventFile, TheOldestEventOfAFullRingMayBeIncomplete) {
  const std::uint64_t written = header().written;
  header().event_capacity = written;
  event(0).kind = static_cast<PreloadEventKind>(0xEE);
  const Result<PreloadEventLog> log = read();

  ASSERT_TRUE(log.ok()) << log.status().message();
  EXPECT_EQ(log.value().first_number, 1u);
  EXPECT_EQ(log.value().events.size(), written - 1);
  // 8, 3 and 2 MiB live in the end, and 4 that the kept events free.
  const std::vector<ProcessHistory> histories = process_histories(log.value());
  ASSERT_EQ(histories.size(), 1u);
  EXPECT_EQ(histories[0].peak_requested_bytes, 13 * kMiB);
}

TEST_F(EventFile, InvalidContentsAreRefused) {
  struct Case {
    const char* what;
    bool is_sound;
    std::function<void()> change;
  };
  const std::uint64_t event_bytes = header().block_offset - header().event_offset;
  const std::uint64_t block_bytes = bytes_.size() - header().block_offset;
  const Case cases[] = {
      {"nothing", true, [] {}},
      {"another magic number", false, [&] { header().magic = 1; }},
      {"another size of the header", false, [&] { header().bytes += 8; }},
      {"events within the header", false,
       [&] {
         header().event_offset = sizeof(PreloadEventsHeader) / 32 * 32;
         header().written = 0;
       }},
      {"events behind the table", false, [&] { header().block_offset = header().event_offset - 32; }},
      {"no event and no room for one", true,
       [&] {
         header().block_offset = header().event_offset;
         header().event_capacity = header().written = header().block_count = 0;
       }},
      {"a table behind the end", false,
       [&] {
         header().block_offset = bytes_.size() + 32;
         header().block_count = 0;
       }},
      {"a table at the end", true,
       [&] {
         header().block_offset = bytes_.size();
         header().block_count = 0;
       }},
      {"events at an odd place", false,
       [&] {
         header().event_offset += 8;
         header().event_capacity -= 1;
         header().written = 0;
       }},
      {"a table at an odd place", false,
       [&] {
         header().block_offset -= 8;
         header().event_capacity -= 1;
       }},
      {"as many events as there is room for", true, [&] { header().event_capacity = event_bytes / 32; }},
      {"one event more", false, [&] { header().event_capacity = event_bytes / 32 + 1; }},
      {"very many events", false, [&] { header().event_capacity = UINT64_MAX / 2; }},
      {"as many blocks as there is room for", true, [&] { header().block_count = block_bytes / 32; }},
      {"one block more", false, [&] { header().block_count = block_bytes / 32 + 1; }},
      {"very many blocks", false, [&] { header().block_count = UINT64_MAX / 2; }},
      {"the file's beginning alone", false, [&] { bytes_.resize(100); }},
      {"no kind of event", false, [&] { event(1).kind = PreloadEventKind{0}; }},
      {"the last kind of event", true, [&] { event(1).kind = PreloadEventKind::kUntracked; }},
      {"a kind of event behind the last", false, [&] { event(1).kind = PreloadEventKind{6}; }},
      {"the last server", true, [&] { event(1).server = PreloadServer{kPreloadServerCount - 1}; }},
      {"a server behind the last", false, [&] { event(1).server = PreloadServer{kPreloadServerCount}; }},
      {"the last stream", true, [&] { event(1).stream = kPreloadStreamLimit - 1; }},
      {"a stream behind the last", false, [&] { event(1).stream = kPreloadStreamLimit; }},
  };
  const std::string sound = bytes_;
  for (const Case& one : cases) {
    SCOPED_TRACE(one.what);
    bytes_ = sound;
    one.change();
    EXPECT_EQ(read().status().code(), one.is_sound ? StatusCode::kOk : StatusCode::kCorruption);
  }
  EXPECT_EQ(read_preload_events(directory_ / "none.events").status().code(), StatusCode::kIoError);
}

// Another user may change a file in a directory that all may write to, at any moment.
TEST_F(EventFile, FilesThatBecomeShorterWhileTheyAreReadEndNoProcess) {
  const std::string record_path = read_preload_records(directory_.path()).value().front().path;
  const std::string record = read_text(record_path);
  write_record(path_, bytes_);
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    const internal::Descriptor events(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
    const internal::Descriptor counts(::open(record_path.c_str(), O_RDWR | O_CLOEXEC));
    const auto write_anew = [](const internal::Descriptor& file, const std::string& text) {
      EXPECT_EQ(::ftruncate(file.number(), 0), 0);
      EXPECT_EQ(::pwrite(file.number(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    };
    while (!is_over) {
      write_anew(events, bytes_);
      write_anew(counts, record);
      testing::let_others_run();
    }
  });
  for (int i = 0; i < 2000; ++i) {
    const Result<PreloadEventLog> log = read_preload_events(path_);
    EXPECT_TRUE(log.ok() || log.status().code() == StatusCode::kCorruption) << log.status().to_string();
    EXPECT_TRUE(read_preload_records(directory_.path()).ok());
    static_cast<void>(request_preload_trim(record_path));
  }
  is_over = true;
  other.join();
  EXPECT_TRUE(read_preload_events(path_).ok());
  EXPECT_EQ(read_preload_records(directory_.path()).value().size(), 1u);
}

TEST_F(EventFile, HasTheTimesOfItsProcess) {
  const Result<PreloadEventLog> log = read();
  ASSERT_TRUE(log.ok()) << log.status().message();
  const auto now_us = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                                     std::chrono::system_clock::now().time_since_epoch())
                                                     .count());
  constexpr std::uint64_t kHourUs = 3'600'000'000;
  EXPECT_LE(log.value().start_us, now_us);
  EXPECT_GT(log.value().start_us + kHourUs, now_us);
  std::uint64_t before = 0;
  for (const PreloadEvent& event : log.value().events) {
    EXPECT_GE(event.time_ns, before);
    before = event.time_ns;
  }
  EXPECT_GT(before, 0u);
  EXPECT_LT(before / 1000, kHourUs);
}

// Each figure is one that no other has.
TEST_F(EventFile, EachFigureIsReadInItsPlace) {
  PreloadDeviceCounts& counts = header().devices[63];
  counts.allocations = 1;
  counts.frees = 2;
  counts.refused = 3;
  counts.requested_bytes = 4;
  counts.peak_requested_bytes = 5;
  counts.elsewhere_bytes = 6;
  counts.arena_bytes = 7;
  counts.peak_reserved_bytes = 8;
  counts.capacity_bytes = 9;
  counts.chunk_bytes = 10;
  header().devices[7].allocations = 1;
  header().devices[8].arena_bytes = 1;
  header().devices[9].frees = 1;
  header().start_us = 11;
  header().untold_blocks = 12;
  const Result<PreloadEventLog> log = read();

  ASSERT_TRUE(log.ok()) << log.status().message();
  std::vector<int> devices;
  for (const PreloadDeviceFigures& one : log.value().devices) devices.push_back(one.device);
  EXPECT_EQ(devices, (std::vector<int>{0, 7, 8, 63}));
  const PreloadDeviceFigures& figures = log.value().devices.back();
  EXPECT_EQ(figures.allocations, 1u);
  EXPECT_EQ(figures.frees, 2u);
  EXPECT_EQ(figures.refused, 3u);
  EXPECT_EQ(figures.requested_bytes, 4u);
  EXPECT_EQ(figures.peak_requested_bytes, 5u);
  EXPECT_EQ(figures.elsewhere_bytes, 6u);
  EXPECT_EQ(figures.arena_bytes, 7u);
  EXPECT_EQ(figures.peak_reserved_bytes, 8u);
  EXPECT_EQ(figures.capacity_bytes, 9u);
  EXPECT_EQ(figures.chunk_bytes, 10u);
  EXPECT_EQ(log.value().start_us, 11u);
  EXPECT_EQ(log.value().untold_blocks, 12u);
}

// The first event of an address decides whether it was live before, and the table decides about the others.
TEST_F(EventFile, TellsWhichBlocksWereLiveBefore) {
  auto* const table = reinterpret_cast<PreloadBlock*>(bytes_.data() + header().block_offset);
  header().event_capacity = 4;
  header().written = 6;
  header().block_count = 6;
  event(3) = {.address = 500,
              .bytes = 50,
              .stream = 5,
              .device = 2,
              .server = PreloadServer::kManaged,
              .kind = PreloadEventKind::kFree};
  event(0) = {.address = 400, .bytes = 1, .device = 0, .kind = PreloadEventKind::kReserved};
  event(1) = {.address = 700, .bytes = 70, .device = 0, .kind = PreloadEventKind::kAllocation};
  table[0] = {.address = 600, .bytes = 60, .number = 2, .device = 0};
  table[1] = {.address = 400, .bytes = 40, .number = 0, .stream = 4, .device = 1};
  table[2] = {.address = 500, .bytes = 1, .number = 0, .device = 0};
  table[3] = {.address = 700, .bytes = 1, .number = 1, .device = 0};
  table[4] = {.address = 300, .bytes = 30, .number = 3, .device = 0};
  table[5] = {.address = 0, .bytes = 20, .number = 0, .device = 0};
  const Result<PreloadEventLog> log = read();

  ASSERT_TRUE(log.ok()) << log.status().message();
  EXPECT_EQ(log.value().first_number, 3u);
  ASSERT_EQ(log.value().events.size(), 3u);
  EXPECT_EQ(log.value().events[0].address, 500u);
  EXPECT_EQ(log.value().events[2].address, 700u);
  const std::vector<PreloadBlock>& live = log.value().live_before;
  ASSERT_EQ(live.size(), 3u);
  EXPECT_EQ(live[0].address, 400u);
  EXPECT_EQ(live[0].bytes, 40u);
  EXPECT_EQ(live[0].stream, 4u);
  EXPECT_EQ(live[1].address, 500u);
  EXPECT_EQ(live[1].bytes, 50u);
  EXPECT_EQ(live[1].stream, 5u);
  EXPECT_EQ(live[1].device, 2);
  EXPECT_EQ(live[1].server, PreloadServer::kManaged);
  EXPECT_EQ(live[2].address, 600u);
}

TEST(PreloadEvents, ABoundThatIsNoneIsReported) {
  const auto problem_of = [](const std::string& bound, bool is_kept) {
    const PreloadRun run({program("process_program"), "threads"}, "arena",
                         {{"FOREBAY_PRELOAD_EVENTS", bound}});
    EXPECT_EQ(!run.record().events.empty(), is_kept) << bound;
    return run.record().problem;
  };
  for (const char* bound : {"65535", "2147483649", "some"}) {
    EXPECT_EQ(problem_of(bound, false), std::string("no events are kept (FOREBAY_PRELOAD_EVENTS): it is '") +
                                            bound +
                                            "'; use 64.00 KiB to 2.00 GiB, such as 256MiB, or 0 for none");
  }
  for (const char* bound : {"65536", "2GiB"}) EXPECT_EQ(problem_of(bound, true), "") << bound;
  for (const char* bound : {"0", ""}) EXPECT_EQ(problem_of(bound, false), "") << bound;
  const PreloadRun run({program("process_program"), "threads"}, "arena",
                       {{"FOREBAY_PRELOAD_EVENTS", "1MiB"}, {"FOREBAY_PRELOAD_RECORDS", ""}});
  EXPECT_TRUE(has(
      run.finished.output,
      "no events are kept (FOREBAY_PRELOAD_EVENTS): FOREBAY_PRELOAD_RECORDS names no directory; set it too"))
      << run.finished.output;
}

TEST(PreloadEvents, StreamsHaveNames) {
  for (const auto& [stream, name] : {std::pair<std::uint16_t, const char*>{0, "plain allocations"},
                                     {1, "the default stream"},
                                     {2, "threads' default streams"},
                                     {3, "stream 3"},
                                     {254, "stream 254"},
                                     {255, "further streams"}}) {
    EXPECT_EQ(preload_stream_text(stream), name);
  }
}

TEST_F(EventFile, AForeignFileIsLeftOutWithAMessage) {
  write_record(path_, "something else");
  write_record(directory_ / "99-abcdef.record", "something else");
  const std::string report = directory_ / "report";
  const Finished told = forebay_run({"--from", directory_.path(), "--report", report});

  EXPECT_EQ(told.exit_code, 0) << told.output;
  EXPECT_TRUE(has(told.output, "it is not an events file of this build")) << told.output;
  EXPECT_TRUE(has(told.output, "99-abcdef.record is left out")) << told.output;
  EXPECT_TRUE(has(read_text(report + "/summary.txt"), "handled 4 of 4 allocations"));
}

TEST_F(EventFile, EachTimeThatMemoryIsGivenBackIsToldWithItsOwnBytes) {
  const std::string path = read_preload_records(directory_.path()).value().front().path;
  RunRecorder recorder({.outputs = {}, .records_directory = directory_.path(), .command = ""});
  const auto told = [&](std::uint32_t trims, std::uint64_t all_bytes) {
    std::string bytes = read_text(path);
    auto& record = *reinterpret_cast<PreloadRecord*>(bytes.data());
    record.trims = trims;
    record.trimmed_bytes = all_bytes;
    write_record(path, bytes);
    const std::vector<std::string> lines = recorder.poll();
    return lines.empty() ? "" : lines.front();
  };

  EXPECT_TRUE(has(told(1, 32 * kMiB), " has given back 32.00 MiB"));
  EXPECT_TRUE(has(told(2, 40 * kMiB), " has given back 8.00 MiB"));
  EXPECT_EQ(told(2, 40 * kMiB), "");
}

// With so many events only some become points.
TEST(ProcessHistory, ARefusalIsOnePointAtItsTime) {
  constexpr std::uint64_t kRefusal = 1000;
  PreloadEventLog log;
  log.devices.emplace_back();
  for (std::uint64_t i = 0; i < 50'000; ++i) {
    const PreloadEventKind kind = i == kRefusal ? PreloadEventKind::kRefused
                                  : i % 2 == 0  ? PreloadEventKind::kAllocation
                                                : PreloadEventKind::kFree;
    log.events.push_back({.address = kMiB, .bytes = kMiB, .time_ns = i, .device = 0, .kind = kind});
  }

  const std::vector<PagePoint> points = process_histories(log).at(0).points;

  std::vector<std::uint64_t> refusals;
  for (const PagePoint& point : points) {
    if (point.event == PageEvent::kOutOfMemory) refusals.push_back(point.time_ns);
  }
  EXPECT_EQ(refusals, (std::vector<std::uint64_t>{kRefusal}));
  EXPECT_TRUE(std::is_sorted(points.begin(), points.end(),
                             [](const PagePoint& a, const PagePoint& b) { return a.time_ns < b.time_ns; }));
}

// One block that lies elsewhere, and one of the arena that is given out twice; the arena grows twice.
PreloadEventLog short_log() {
  PreloadEventLog log;
  log.start_us = 1'000'000;
  log.first_number = 7;
  log.untold_blocks = 2;
  PreloadDeviceFigures& figures = log.devices.emplace_back();
  figures.chunk_bytes = 2 * kMiB;
  figures.allocations = 4;
  PreloadBlock& before = log.live_before.emplace_back();
  before.address = 50 * kMiB;
  before.bytes = kMiB;
  before.stream = 3;
  before.device = 0;
  before.server = PreloadServer::kUnavailable;
  const auto add = [&](std::uint64_t time_ns, PreloadEventKind kind, std::uint64_t address,
                       std::uint64_t bytes) {
    log.events.push_back({.address = address,
                          .bytes = bytes,
                          .time_ns = time_ns,
                          .device = 0,
                          .server = PreloadServer::kArena,
                          .kind = kind});
  };
  add(500, PreloadEventKind::kFree, 7 * kMiB, 0);  // Frees a block that is not known.
  add(1000, PreloadEventKind::kReserved, 2 * kMiB, 4 * kMiB);
  add(2000, PreloadEventKind::kAllocation, 100 * kMiB, 3 * kMiB);
  add(3000, PreloadEventKind::kRefused, 0, 9 * kMiB);
  add(4000, PreloadEventKind::kAllocation, 100 * kMiB, kMiB);
  add(5000, PreloadEventKind::kUntracked, 0, 5);
  add(6000, PreloadEventKind::kReserved, 4 * kMiB, 6 * kMiB);
  add(7000, PreloadEventKind::kRefused, 0, 8 * kMiB);
  add(8000, PreloadEventKind::kFree, 100 * kMiB, kMiB);
  return log;
}

TEST(ProcessHistory, HasTheBlocksAndBytesOfEachMoment) {
  const ProcessHistory history = process_histories(short_log()).at(0);

  EXPECT_EQ(history.peak_requested_bytes, 4 * kMiB);
  EXPECT_EQ(history.untracked_count, 1u);
  EXPECT_EQ(history.untracked_bytes, 5u);
  EXPECT_EQ(history.dropped_events, 7u);
  EXPECT_EQ(history.untold_blocks, 2u);
  EXPECT_EQ(history.points.at(0).reserved_bytes, 3 * kMiB);
  ASSERT_EQ(history.moments.size(), 4u);
  const PageMoment* const peak = history.moment(kPeakMoment);
  ASSERT_NE(peak, nullptr);
  EXPECT_EQ(peak->time_ns, 2000u);
  EXPECT_EQ(peak->reserved_bytes, 5 * kMiB);
  ASSERT_EQ(peak->blocks.size(), 2u);
  EXPECT_EQ(peak->blocks[1].order, 3u);  // Two of the four allocations were kept.
  const PageMoment* const first = history.moment(kFirstRefusalMoment);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->time_ns, 3000u);
  EXPECT_EQ(first->asked_bytes, 9 * kMiB);
  const PageMoment* const last = history.moment(kLastRefusalMoment);
  ASSERT_NE(last, nullptr);
  EXPECT_EQ(last->asked_bytes, 8 * kMiB);
  EXPECT_EQ(last->requested_bytes, 2 * kMiB);
  EXPECT_EQ(last->reserved_bytes, 7 * kMiB);
  EXPECT_EQ(history.moment(kEndMoment)->requested_bytes, kMiB);
  EXPECT_EQ(history_trace(history).events.size(), 5u);

  // A single refusal is the first alone.
  PreloadEventLog once = short_log();
  std::erase_if(once.events, [](const PreloadEvent& event) { return event.time_ns == 7000; });
  EXPECT_EQ(process_histories(once).at(0).moment(kLastRefusalMoment), nullptr);
}

TEST(ProcessHistory, IsWrittenForPyTorchsViewer) {
  const MemorySnapshot snapshot = history_snapshot(process_histories(short_log()), PreloadMode::kObserve);

  ASSERT_EQ(snapshot.device_traces.size(), 1u);
  const std::vector<SnapshotEvent>& trace = snapshot.device_traces[0];
  ASSERT_EQ(trace.size(), 8u);  // A free is two.
  EXPECT_EQ(trace[2].time_us, 1'000'002u);
  ASSERT_EQ(snapshot.segments.size(), 1u);
  EXPECT_EQ(snapshot.segments[0].requested_size, kMiB);
  EXPECT_EQ(std::get<std::string>(snapshot.allocator_settings.back().value), kSnapshotObserveMode);

  PreloadDeviceFigures figures;
  figures.chunk_bytes = 2 * kMiB;
  const std::vector<PageBlock> blocks = {
      {.address = 101 * kMiB, .bytes = kMiB / 2, .server = PreloadServer::kArena}};
  const std::vector<PageBlock> pieces = free_pieces(blocks, figures);
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].address, 100 * kMiB);
  EXPECT_EQ(pieces[0].bytes, kMiB);
  EXPECT_EQ(pieces[1].address, 101 * kMiB + kMiB / 2);
  EXPECT_EQ(pieces[1].bytes, kMiB / 2);
}

// Blocks at the end of one chunk and in the next, and one beyond a chunk without blocks.
TEST(ProcessHistory, ChunksThatTouchAreOneSegmentOfASnapshot) {
  PreloadEventLog log;
  PreloadDeviceFigures& figures = log.devices.emplace_back();
  figures.chunk_bytes = 2 * kMiB;
  for (const std::uint64_t address : {101 * kMiB, 102 * kMiB, 107 * kMiB}) {
    PreloadBlock& block = log.live_before.emplace_back();
    block.address = address;
    block.bytes = kMiB;
    block.device = 0;
    block.server = PreloadServer::kArena;
  }

  const MemorySnapshot snapshot = history_snapshot(process_histories(log), PreloadMode::kArena);

  ASSERT_EQ(snapshot.segments.size(), 2u);
  EXPECT_EQ(snapshot.segments[0].address, 100 * kMiB);
  EXPECT_EQ(snapshot.segments[0].total_size, 4 * kMiB);
  EXPECT_EQ(snapshot.segments[0].blocks.size(), 4u);  // Free, two live ones, free.
  EXPECT_EQ(snapshot.segments[1].address, 106 * kMiB);
  EXPECT_EQ(snapshot.segments[1].total_size, 2 * kMiB);
}

TEST(ProcessHistory, HoldersAreInClassesLargestFirst) {
  const std::vector<HistoryHolder> holders = holders_of({{.address = 1, .bytes = 1000, .stream = 3},
                                                         {.address = 2, .bytes = 1 << 20, .stream = 3},
                                                         {.address = 3, .bytes = 3 << 19, .stream = 3}});
  ASSERT_EQ(holders.size(), 2u);
  EXPECT_EQ(holders[0].count, 2u);
  EXPECT_EQ(holders[0].bytes, std::uint64_t{5} << 19);
  EXPECT_TRUE(holder_text(holders[0]).starts_with("1.00 MiB to 2.00 MiB each, stream 3, "))
      << holder_text(holders[0]);
}

// If the disk is full or the process's limits forbid files, the program goes on unchanged.
TEST(PreloadEvents, AProgramWithAFileSizeLimitRunsWithoutEvents) {
  const TemporaryDirectory directory;
  const Finished run = forebay_run({"--report", directory / "report", "--", "/bin/sh", "-c",
                                    "ulimit -f 131072; exec " + program("events_program") + " steps"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_TRUE(has(run.output, "may write no file of ")) << run.output;
  EXPECT_TRUE(has(run.output, "handled 4 of 4 allocations")) << run.output;
}

TEST(PreloadEvents, AProgramThatMayWriteNoFileRunsWithoutARecord) {
  // It allocates nothing, and the fake says nothing at its end: those would be files too.
  const std::vector<std::string> command = {"/bin/sh", "-c",
                                            "ulimit -f 0; exec " + program("process_program") + " threads"};
  if (kSanitized && PreloadRun(command, "none", {{"FAKE_CUDA_SUMMARY", ""}}).finished.exit_code != 0) {
    GTEST_SKIP()
        << "without the preload the program ends too: this sanitizer's runtime writes a file at its start";
  }
  const PreloadRun run(command, "arena", {{"FOREBAY_PRELOAD_EVENTS", "1MiB"}, {"FAKE_CUDA_SUMMARY", ""}});

  EXPECT_EQ(run.finished.exit_code, 0) << run.finished.output;
  EXPECT_TRUE(run.records.empty());
  EXPECT_TRUE(has(run.finished.output, "cannot keep a record of this process in ")) << run.finished.output;
  EXPECT_TRUE(has(run.finished.output, "without a context: 201")) << run.finished.output;
}

// Disks with little room or none; the program runs the same on each.
Finished run_on_disk(int kib, const std::string& command) {
  const TemporaryDirectory directory;
  const std::string disk = directory.path();
  const std::string script = "mount -t tmpfs -o size=" + std::to_string(kib + 4) + "k tmpfs " + disk +
                             " || exit 99; df " + disk +
                             " | grep -q tmpfs || exit 99; head -c 4096 /dev/zero > " + disk +
                             "/full; FOREBAY_PRELOAD_RECORDS=" + disk +
                             " FOREBAY_PRELOAD_EVENTS=1MiB LD_PRELOAD=" + kPreloadLibrary + " " + command +
                             "; code=$?; " FOREBAY_COMMAND " run --from " + disk + "; exit $code";
  return run_program({"/usr/bin/unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", script},
                     on_the_fake());
}

TEST(PreloadEvents, AFullDiskKeepsEarlierEventsAndTheProgramGoesOn) {
  if (run_on_disk(4096, "/bin/true").exit_code != 0) {
    GTEST_SKIP() << "this system does not let a test mount a disk of its own";
  }
  // A record is a page, the events' header two, and each piece of them 256 KiB.
  for (const int kib : {0, 4, 8, 12, 16, 40, 268, 280, 560, 700}) {
    SCOPED_TRACE(kib);
    const Finished run = run_on_disk(kib, program("events_program") + " many 20000");

    EXPECT_EQ(run.exit_code, 0) << run.output;
    const bool is_recorded = has(run.output, "handled 20001 of 20001 allocations");
    EXPECT_EQ(has(run.output, "cannot keep a record of this process"), !is_recorded) << run.output;
    EXPECT_EQ(has(run.output, "has no room for them"), kib < 12) << run.output;
    const std::string lack = "are kept: there is no more room for them in /";
    EXPECT_EQ(has(run.output, "no events " + lack), kib >= 12 && kib < 268) << run.output;
    EXPECT_EQ(has(run.output, "only the latest 256.00 KiB of events " + lack), kib >= 268) << run.output;
    EXPECT_EQ(has(run.output, "No space left on device); make room there, or have records elsewhere"),
              kib >= 12)
        << run.output;
  }
}

TEST(PreloadEvents, GoOnWhenTheProgramClosesAllDescriptors) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--report", report, "--", program("events_program"), "closes", "20000"});
  const Json device = only_device(report);

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(device.at("allocations"), 20002);
  EXPECT_EQ(device.at("events").at("dropped_by_process"), 0);
  EXPECT_EQ(device.at("peak_requested_bytes_of_kept_events"), 11 * kMiB);
}

// Killed at a random moment: the files still make a report.
TEST(PreloadEvents, ArePlausibleWheneverTheProcessIsKilled) {
  std::mt19937 random(std::random_device{}());
  for (int i = 0; i < (kSanitized ? 4 : 12); ++i) {
    const int count = std::uniform_int_distribution<int>(1, 30'000)(random);
    SCOPED_TRACE(count);
    const TemporaryDirectory directory;
    const std::string report = directory / "report";
    const Finished run = forebay_run({"--events", "256KiB", "--report", report, "--",
                                      program("events_program"), "killed-at", std::to_string(count)});
    const Json device = only_device(report);

    EXPECT_EQ(run.exit_code, 128 + 9) << run.output;
    EXPECT_GE(device.at("allocations").get<int>(), count);
    EXPECT_LE(device.at("allocations").get<int>() - device.at("frees").get<int>(), 9);
    // Eight blocks of 64 KiB to 512 KiB, one of which may be in between.
    EXPECT_LE(device.at("peak_requested_bytes"), 36 * kMiB / 16);
    EXPECT_LE(moment(device, kEndMoment).at("block_count"), 8);
    EXPECT_FALSE(has(run.output, "is not valid")) << run.output;
  }
}

// The command goes on, and is reported afterwards.
TEST(RunReportOfAProcess, CanBeWrittenAfterForebayRunWasKilled) {
  const TemporaryDirectory directory;
  Process process(
      forebay({"run", "--report", directory / "unfinished", "--", program("events_program"), "listen"}),
      on_the_fake({{"TMPDIR", directory.path()}}));
  ASSERT_TRUE(process.wait_for_output("ready"));
  std::string records;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    if (has(entry.path().filename(), "forebay-run-")) records = entry.path();
  }
  const Result<std::vector<PreloadReport>> before = read_preload_records(records);
  ASSERT_TRUE(before.ok() && before.value().size() == 1) << records;

  process.signal(SIGKILL);
  ASSERT_EQ(::kill(before.value().front().process, SIGHUP), 0);
  ASSERT_EQ(::kill(before.value().front().process, SIGTERM), 0);
  const Finished run = process.finish();
  const std::string report = directory / "report";
  const Finished told = forebay_run({"--from", records, "--report", report});

  EXPECT_EQ(run.exit_code, 128 + 9);
  EXPECT_EQ(told.exit_code, 0) << told.output;
  EXPECT_EQ(only_device(report).at("peak_requested_bytes"), 36 * kMiB);
}

TEST(RunReportOfAProcess, IsWrittenWhereItsDirectoryHasVanished) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--report", report, "--", "/bin/sh", "-c",
                                    "rm -r " + report + "; exec " + program("events_program") + " steps"});
  const Finished file = forebay_run(
      {"--report", report + "2", "--", "/bin/sh", "-c", "rm -r " + report + "2; : > " + report + "2"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(only_device(report).at("allocations"), 4);
  EXPECT_EQ(file.exit_code, 0);
  EXPECT_TRUE(has(file.output, "cannot write " + report + "2/summary.json")) << file.output;
  EXPECT_FALSE(has(file.output, "the report is in")) << file.output;
}

// Records are removed only after all requested files have been written.
TEST(RunReportOfAProcess, RecordsStayIfTheReportCannotBeWritten) {
  const TemporaryDirectory directory;
  for (const std::string& blocked : {std::string("trace"), std::string("snapshot"), std::string("report")}) {
    SCOPED_TRACE(blocked);
    const std::string out = directory / blocked;
    // A directory is in the way of the file.
    const std::string place = blocked == "report" ? out + "/report.html" : out + "/file";
    std::filesystem::create_directory(out);
    const Finished run =
        forebay_run({"--" + blocked, blocked == "report" ? out : place, "--", "/bin/sh", "-c",
                     "mkdir -p " + place + "/full; exec " + program("events_program") + " steps"},
                    {{"TMPDIR", directory.path()}});
    const std::string word = "the records are kept in ";
    const std::size_t begin = run.output.find(word);

    EXPECT_EQ(run.exit_code, 0) << run.output;
    ASSERT_NE(begin, std::string::npos) << run.output;
    const std::string records =
        run.output.substr(begin + word.size(), run.output.find(';', begin) - begin - word.size());
    EXPECT_TRUE(has(run.output, "forebay run --from " + records + " --" + blocked + " ELSEWHERE"))
        << run.output;
    const Finished told = forebay_run({"--from", records, "--trace", directory / (blocked + ".txt")});
    EXPECT_EQ(told.exit_code, 0) << told.output;
    EXPECT_TRUE(has(read_text(directory / (blocked + ".txt")), "# allocations of ")) << told.output;
    const Finished again = forebay_run({"--from", records, "--report", directory / (blocked + "2")});
    EXPECT_EQ(again.exit_code, 0) << again.output;
  }
  const std::string summary = read_text(directory / "report/summary.txt");
  EXPECT_TRUE(has(summary, "the command has ended with 0, and not all of this report could be written"))
      << summary;
  EXPECT_TRUE(has(summary, "cannot write " + (directory / "report/report.html") + ": File exists"))
      << summary;
  EXPECT_FALSE(has(summary, "the run goes on")) << summary;
}

// A file that cannot be written takes none of the others with it.
TEST(RunReportOfAProcess, IsCompleteExceptForAFileThatCannotBeWritten) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report", one = program("events_program");
  const Finished run = forebay_run({"--report", report, "--", "/bin/sh", "-c",
                                    "RANK=1 " + one + " full; mkdir -p " + report +
                                        "/rank-0-process-$$.txt/full; RANK=0 exec " + one + " steps"},
                                   {{"TMPDIR", directory.path()}});
  const std::string summary = read_text(report + "/summary.txt");
  int texts = 0, jsons = 0;
  for (const auto& file : std::filesystem::directory_iterator(report)) {
    const std::string name = file.path().filename();
    texts += file.is_regular_file() && has(name, "-process-") && has(name, ".txt") ? 1 : 0;
    jsons += has(name, "-process-") && has(name, ".json") ? 1 : 0;
  }

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(texts, 1);
  EXPECT_EQ(jsons, 2);
  EXPECT_EQ(read_json(report + "/summary.json").at("processes").size(), 2u);
  EXPECT_TRUE(has(read_text(report + "/report.html"), "</html>"));
  for (const std::string& text : {summary, run.output}) {
    EXPECT_TRUE(has(text, "cannot write " + report + "/rank-0-process-")) << text;
    EXPECT_TRUE(has(text, ".txt: File exists; name another, or remove it")) << text;
    EXPECT_TRUE(has(text, "the worst: rank 1, process ")) << text;
  }
  EXPECT_TRUE(has(summary, "\n  rank 0, process ")) << summary;
  EXPECT_TRUE(has(run.output, "the report is in " + report)) << run.output;
  EXPECT_TRUE(has(run.output, "the records are kept in ")) << run.output;
}

// One of three processes has lost its record, and another one its events.
TEST(RunReportOfAProcess, CoversTheOtherProcessesIfFilesOfOneAreDamaged) {
  const TemporaryDirectory directory;
  const std::string records = directory / "records", report = directory / "report";
  const std::string one = program("events_program") + " steps";
  ASSERT_EQ(forebay_run({"--records", records, "--events", "64KiB", "--", "/bin/sh", "-c",
                         "RANK=0 " + one + "; RANK=1 " + one + "; RANK=2 " + one})
                .exit_code,
            0);
  std::map<int, PreloadReport> ranks;
  const Result<std::vector<PreloadReport>> sound = read_preload_records(records);
  ASSERT_TRUE(sound.ok()) << sound.status().message();
  for (const PreloadReport& record : sound.value()) ranks[record.rank] = record;
  ASSERT_EQ(ranks.size(), 3u);
  write_record(ranks[0].path, read_text(ranks[0].path).substr(0, 100));
  write_record(ranks[1].events, "something else");
  ASSERT_EQ(::symlink("nowhere", (records + "/1-abcdef.record").c_str()), 0);
  const Finished told = forebay_run({"--from", records, "--report", report});
  const Finished counted = forebay_run({"--from", records});
  const std::string summary = read_text(report + "/summary.txt");

  EXPECT_EQ(told.exit_code, 0) << told.output;
  for (const std::string& text : {told.output, summary}) {
    EXPECT_TRUE(has(text, "handled 8 of 8 allocations")) << text;
    EXPECT_TRUE(has(text, ranks[0].path + " is left out: it is not a record of this build: it has 100 bytes"))
        << text;
    EXPECT_TRUE(has(text, "1-abcdef.record is left out: it cannot be read: No such file or directory"))
        << text;
    EXPECT_TRUE(has(text, "rank 1, process " + std::to_string(ranks[1].process) +
                              ": cannot read the events in " + ranks[1].events))
        << text;
    EXPECT_TRUE(has(text, "the worst: rank 2, process ")) << text;
  }
  EXPECT_TRUE(
      has(summary, "  rank 2, process " + std::to_string(ranks[2].process) + ", cuda:0: requested 13.00 MiB"))
      << summary;
  EXPECT_TRUE(has(summary, "  rank 1, process " + std::to_string(ranks[1].process) +
                               ": 4 allocations; nothing more is known of them"))
      << summary;
  EXPECT_TRUE(has(counted.output, ranks[0].path + " is left out: ")) << counted.output;
}

TEST(RunReportOfAProcess, PrintsManyEqualMessagesAsOneLine) {
  const TemporaryDirectory directory;
  const std::string records = directory / "records";
  const std::string all = "for i in 1 2 3 4 5 6 7 8; do " + program("events_program") + " steps & done; wait";
  const Finished run = forebay_run({"--events", "64KiB", "--trace", directory / "trace.txt", "--snapshot",
                                    directory / "s.pickle", "--", "/bin/sh", "-c", all});
  ASSERT_EQ(forebay_run({"--records", records, "--", "/bin/sh", "-c", all}).exit_code, 0);
  const Finished told = forebay_run({"--from", records, "--report", directory / "report"});
  const std::string summary = read_text(directory / "report/summary.txt");

  EXPECT_TRUE(has(run.output, "trace: " + (directory / "trace.process-*.txt") + " (8 of these)\n"))
      << run.output;
  EXPECT_TRUE(has(run.output, "snapshot: " + (directory / "s.process-*.pickle") + " (8 of these)\n"))
      << run.output;
  EXPECT_LE(std::count(run.output.begin(), run.output.end(), '\n'), 5) << run.output;
  for (const std::string& text : {told.output, summary}) {
    EXPECT_TRUE(has(text, "process *: it has kept no events, so only its counts are known (8 of these)"))
        << text;
  }
  EXPECT_LE(std::count(told.output.begin(), told.output.end(), '\n'), 5) << told.output;
  // Each of them is named there.
  EXPECT_EQ(std::count(summary.begin(), summary.end(), '\n'), 14) << summary;
}

TEST(RunReportOfAProcess, PrintsControlCharactersOfTheCommandSpelledOut) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--report", report, "--trace", directory / "trace.txt", "--",
                                    program("events_program"), "steps", "\x1b]0;title\x07\nthe worst: none"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  std::vector<std::string> files = {directory / "trace.txt"};
  for (const auto& file : std::filesystem::directory_iterator(report)) files.push_back(file.path());
  EXPECT_EQ(files.size(), 6u);
  for (const std::string& file : files) {
    const std::string text = read_text(file);
    EXPECT_EQ(text.find('\x1b'), std::string::npos) << file;
    EXPECT_EQ(text.find('\x07'), std::string::npos) << file;
    EXPECT_FALSE(has(text, "\nthe worst: none")) << file;
    // JSON has a spelling of its own.
    const bool is_json = file.rfind(".json") == file.size() - 5;
    EXPECT_TRUE(has(text, is_json ? "\\u001b]0;title\\u0007\\n" : "\\x1b]0;title\\x07\\nthe worst")) << file;
  }
}

// The message says that access is denied, not that there are no records.
TEST(RunReportOfAProcess, AnUnreadableDirectoryIsNotReportedAsMissing) {
  const TemporaryDirectory directory;
  const TemporaryDirectory open;
  std::filesystem::create_directory(directory / "sub");
  std::filesystem::create_directory(open / "records");
  write_record(open / "file.txt", kHistoryTraceBeginning);
  std::vector<std::string> as_somebody;
  if (::geteuid() == 0) {
    as_somebody = {"/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"};
  }
  const auto run_as = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> command = as_somebody;
    for (const std::string& word : forebay(arguments)) command.push_back(word);
    return run_program(command, on_the_fake());
  };
  if (run_as({"--version"}).exit_code != 0) GTEST_SKIP() << "the build cannot be reached as another user";
  const std::string temporary = std::filesystem::path(open.path()).parent_path();
  std::vector<std::string> writes = as_somebody;
  for (const std::string& word : {std::string("/usr/bin/test"), std::string("-w"), temporary})
    writes.push_back(word);
  if (run_program(writes).exit_code != 0) GTEST_SKIP() << "another user cannot write in " << temporary;
  ASSERT_EQ(::chmod(open.path().c_str(), 0755), 0);
  for (const std::string& closed : {directory.path(), open / "records", open / "file.txt"}) {
    ASSERT_EQ(::chmod(closed.c_str(), 0), 0);
  }
  const auto refused = [&](const char* option, const std::string& place) {
    const Finished run = run_as({"run", option, place, "--", "/bin/echo", "it ran"});
    EXPECT_EQ(run.exit_code, 2) << run.output;
    return run.output;
  };
  const std::string report = refused("--report", directory / "report");
  const std::string records = refused("--records", directory / "records");
  const std::string from = run_as({"run", "--from", open / "records"}).output;
  std::vector<std::string> files;
  for (const char* option : {"--trace", "--snapshot"}) {
    for (const std::string& place : {directory / "sub/file", directory / "file", open / "file.txt"}) {
      files.push_back(refused(option, place));
    }
  }
  ASSERT_EQ(::chmod(directory.path().c_str(), 0700), 0);
  ASSERT_EQ(::chmod((open / "records").c_str(), 0700), 0);

  for (const std::string& text : {report, records, from})
    EXPECT_TRUE(has(text, "Permission denied; ")) << text;
  for (const std::string& text : files) {
    EXPECT_TRUE(has(text, "Permission denied; name ")) << text;
    EXPECT_FALSE(has(text, "make it first")) << text;
    EXPECT_FALSE(has(text, "no --")) << text;
  }
}

TEST(RunTrace, AnEarlierFileStaysUntilTheNewOneIsComplete) {
  const TemporaryDirectory directory;
  const std::string place = directory / "place", moved = directory / "moved", link = directory / "link.txt";
  const std::string trace = place + "/trace.txt";
  std::filesystem::create_directory(place);
  ASSERT_EQ(forebay_run({"--trace", trace, "--", program("events_program"), "steps"}).exit_code, 0);
  const std::string before = read_text(trace);
  ASSERT_EQ(::symlink(trace.c_str(), link.c_str()), 0);
  const Finished failed =
      forebay_run({"--trace", trace, "--", "/bin/sh", "-c",
                   "mv " + place + " " + moved + "; exec " + program("events_program") + " full"},
                  {{"TMPDIR", directory.path()}});
  std::filesystem::rename(moved, place);
  const std::string after = read_text(trace);
  const Finished run = forebay_run({"--trace", link, "--", program("events_program"), "full"});

  EXPECT_TRUE(has(failed.output, "cannot write --trace " + trace)) << failed.output;
  EXPECT_EQ(after, before);
  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_NE(read_text(trace), before);
}

// `ulimit -f` also bounds the files of forebay run, by a signal that ends a process unless it is handled.
TEST(RunReportOfAProcess, AFileBeyondTheSizeLimitCannotBeWritten) {
  const TemporaryDirectory directory;
  const Finished run =
      run_program({"/bin/bash", "-c",
                   "ulimit -f 8; exec " FOREBAY_COMMAND " run --events 64KiB --report " +
                       (directory / "report") + " -- /bin/bash -c '" + program("events_program") +
                       " steps; head -c 100000 /dev/zero > " + (directory / "large") + "'"},
                  on_the_fake({{"TMPDIR", directory.path()}}));

  EXPECT_EQ(run.exit_code, 128 + SIGXFSZ) << run.output;
  EXPECT_TRUE(has(run.output, "File too large")) << run.output;
  EXPECT_TRUE(has(run.output, "the records are kept in ")) << run.output;
  for (const auto& entry : std::filesystem::directory_iterator(directory / "report"))
    EXPECT_NE(entry.path().extension(), ".partial") << entry.path();
}

TEST(RunReportOfAProcess, ReportsThatTheRecordsWereRemoved) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = forebay_run({"--report", report, "--", "/bin/sh", "-c",
                                    program("events_program") + " steps; rm -r $FOREBAY_PRELOAD_RECORDS"});
  const std::string summary = read_text(report + "/summary.txt");

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_TRUE(has(run.output, "were removed while the command ran")) << run.output;
  EXPECT_FALSE(has(run.output, "are kept in")) << run.output;
  EXPECT_TRUE(has(summary, "the command has ended with 0, and the records were deleted before")) << summary;
  EXPECT_FALSE(has(summary, "the run goes on")) << summary;
}

TEST(PreloadEvents, AMissingDirectoryForRecordsIsReported) {
  const TemporaryDirectory directory;
  const Process::Variables variables = {{"LD_PRELOAD", kPreloadLibrary},
                                        {"FOREBAY_PRELOAD_RECORDS", directory / "missing"}};
  const Finished run = run_program({program("events_program"), "steps"}, on_the_fake(variables));

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_TRUE(has(run.output, "cannot keep a record of this process in " + (directory / "missing")))
      << run.output;
}

// Dozens of short processes, as a test suite under `forebay run` has them.
TEST(RunReportOfAProcess, CoversEachOfManyShortProcesses) {
  const int count = kSanitized ? 20 : 80;
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run =
      forebay_run({"--events", "64KiB", "--report", report, "--", "/bin/sh", "-c",
                   "for i in $(seq " + std::to_string(count / 4) + "); do for j in 1 2 3 4; do " +
                       program("events_program") + " steps & done; wait; done"});
  const Json summary = read_json(report + "/summary.json");

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(summary.at("processes").size(), static_cast<std::size_t>(count));
  EXPECT_TRUE(has(run.output, "handled " + std::to_string(4 * count) + " of " + std::to_string(4 * count) +
                                  " allocations"))
      << run.output;
}

// Random bytes overwrite parts of a record and its events: the files are refused with a message, or reported.
TEST_F(EventFile, RandomDamageIsRefusedOrReported) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random() % bound); };
  const std::string record_path = read_preload_records(directory_.path()).value().front().path;
  const std::string sound_events = bytes_, sound_record = read_text(record_path);
  const std::size_t event_begin = header().event_offset, block_begin = header().block_offset;
  const std::uint64_t values[] = {0,         1, 2, 31, 32, 255, 4096, UINT32_MAX, UINT64_MAX, UINT64_MAX / 32,
                                  1ull << 63};
  int told = 0;
  for (int i = 0; i < (kSanitized ? 150 : 400); ++i) {
    std::string events = sound_events, record = sound_record;
    for (std::size_t n = 1 + below(8); n > 0; --n) {
      // Most of the contents lie at these offsets.
      const std::size_t begins[] = {0, 0, event_begin, event_begin, block_begin};
      const std::size_t at = begins[below(5)] + 8 * below(24);
      const std::uint64_t value = below(3) == 0 ? random() : values[below(std::size(values))];
      std::memcpy(events.data() + at, &value, 1 + below(8));
      if (below(8) == 0) record[below(record.size())] = static_cast<char>(random());
    }
    if (below(10) == 0) events.resize(below(events.size()));
    write_record(path_, events);
    write_record(record_path, record);
    const Result<std::vector<PreloadReport>> records = read_preload_records(directory_.path());
    ASSERT_TRUE(records.ok());
    RunStory story{.command = "it", .state = "then"};
    for (const PreloadReport& one : records.value()) story.processes.push_back(read_process(one));
    for (const ProcessReport& process : story.processes) {
      EXPECT_FALSE(process_text(process).empty());
      EXPECT_FALSE(Json::parse(process_json(process), nullptr, false).is_discarded());
      for (const ProcessHistory& history : process.histories) (void)history_trace(history);
      if (!process.histories.empty()) (void)history_snapshot(process.histories, process.record.mode);
      EXPECT_NE(process.histories.empty(), process.events_problem.empty());
      told += process.histories.empty() ? 0 : 1;
    }
    EXPECT_TRUE(has(report_page(story_page(story)), "</html>"));
    EXPECT_FALSE(story_text(story).empty());
  }
  std::printf("%d were told of\n", told);
  EXPECT_GT(told, 20);
}

// --- giving back on a signal ---

TEST(RunPauseSignal, MakesTheArenaGiveMemoryBackAtTheNextCall) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  Process process(forebay({"run", "--report", report, "--pause-signal", "USR2", "--",
                           program("events_program"), "listen"}),
                  on_the_fake());
  ASSERT_TRUE(process.wait_for_output("ready"));
  process.signal(SIGUSR2);
  ASSERT_TRUE(process.wait_for_output("asked 1 process to give back"));
  // Nothing happens in the program until it asks for memory.
  process.signal(SIGHUP);
  ASSERT_TRUE(process.wait_for_output(" has given back "));
  process.signal(SIGUSR1);
  ASSERT_TRUE(process.wait_for_output("the report is in "));
  const Json device = only_device(report);
  process.signal(SIGTERM);
  const Finished run = process.finish();

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_TRUE(has(run.output, "has given back 32.00 MiB")) << run.output;
  EXPECT_EQ(device.at("peak_reserved_bytes"), 36 * kMiB);
  EXPECT_LT(device.at("held_bytes").get<std::uint64_t>(), 8 * kMiB);
}

// Unmapping and waiting would spoil the capture. Its block takes a chunk of 2 MiB.
TEST(RunPauseSignal, WaitsUntilNoStreamIsCaptured) {
  const TemporaryDirectory directory;
  Process process(forebay({"run", "--report", directory / "report", "--pause-signal", "USR2", "--",
                           program("events_program"), "listen", "1"}),
                  on_the_fake());
  ASSERT_TRUE(process.wait_for_output("ready"));
  process.signal(SIGUSR2);
  ASSERT_TRUE(process.wait_for_output("asked 1 process to give back"));
  process.signal(SIGHUP);
  ASSERT_TRUE(process.wait_for_output("captured"));
  EXPECT_FALSE(process.wait_for_output(" has given back ", std::chrono::seconds(1)));
  process.signal(SIGHUP);
  ASSERT_TRUE(process.wait_for_output(" has given back "));
  process.signal(SIGTERM);
  const Finished run = process.finish();
  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_TRUE(has(run.output, "has given back 30.00 MiB")) << run.output;
}

}  // namespace
}  // namespace forebay::testing
