// `forebay run` as a person uses it, and what it decides about the environment.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "preload/preload_run.h"
#include "runtime/api/run_environment.h"
#include "runtime/api/run_summary.h"

namespace forebay::testing {
namespace {

Process::Variables on_the_fake(Process::Variables more = {}) {
  more.merge(sanitizer_variables());
  more.emplace("LD_LIBRARY_PATH", kFakeDirectory + ":" + kFakeRuntimeDirectory);
  return more;
}

Finished forebay_run(std::vector<std::string> arguments, const Process::Variables& more = {}) {
  arguments.insert(arguments.begin(), {FOREBAY_COMMAND, "run"});
  return run_program(arguments, on_the_fake(more));
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::size_t position(const std::string& text, const std::string& part) {
  return text.find(part);
}

// --- the command ---

TEST(RunCommand, SaysWhatIsInForceFirstAndWhatWasHandledLast) {
  const Finished run = forebay_run({"--", program("access_program"), "query"});
  const std::vector<std::string> lines = lines_of(run.output);

  EXPECT_EQ(run.exit_code, 0);
  ASSERT_GE(lines.size(), 3u) << run.output;
  EXPECT_EQ(
      position(lines[0], "forebay run: the arena serves device memory; PyTorch allocates tensor by tensor"),
      0u)
      << lines[0];
  EXPECT_EQ(lines[1], "all well");
  EXPECT_EQ(lines[2],
            "forebay run: handled 3 of 3 allocations, 6.00 MiB of 6.00 MiB, in 1 process; at most 6.00 MiB "
            "live in one");
}

TEST(RunCommand, TellsWhatWasNotHandledAndWhy) {
  const Finished run = forebay_run({"--", program("memory_program"), "elsewhere"});

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(position(run.output, "handled 1 of 7 allocations, 1.00 MiB of 7.10 MiB"), std::string::npos)
      << run.output;
  EXPECT_NE(position(run.output, "not handled: 1, 1.00 MiB: managed memory"), std::string::npos)
      << run.output;
  EXPECT_NE(position(run.output, "not handled: 2, 2.00 MiB: from a memory pool of the program's own"),
            std::string::npos);
}

TEST(RunCommand, NamesWhoGoesAround) {
  const Finished run =
      forebay_run({"--", program("plugin_program"), program("plugin_library.so"), "deepbind"});

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(position(run.output, "reached the driver past the hook: " + program("plugin_library.so")),
            std::string::npos)
      << run.output;
}

TEST(RunCommand, ObservesWithoutChangingAnything) {
  const Finished run = forebay_run({"--observe", "--", program("access_program"), "dlsym"});
  const std::vector<std::string> lines = lines_of(run.output);

  EXPECT_EQ(run.exit_code, 0);
  ASSERT_GE(lines.size(), 3u) << run.output;
  EXPECT_EQ(position(lines[0], "forebay run: observing: "), 0u) << lines[0];
  EXPECT_EQ(lines[2], "forebay run: observed 3 allocations, 6.00 MiB, in 1 process");
}

TEST(RunCommand, MakesTheDeviceLookSmaller) {
  const Finished run = forebay_run({"--memory", "32MiB", "--", program("memory_program"), "info"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(position(run.output, "total 33554432, device 33554432"), std::string::npos) << run.output;
  EXPECT_NE(position(run.output, "at most 32.00 MiB of each device"), std::string::npos) << run.output;
}

// Also the processes that the command starts in its turn.
TEST(RunCommand, CountsOverAllProcesses) {
  const Finished run = forebay_run({"--", program("process_program"), "workers"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(position(run.output, "handled 3 of 3 allocations, 3.00 MiB of 3.00 MiB, in 3 processes"),
            std::string::npos)
      << run.output;
}

TEST(RunCommand, PassesTheExitCodeThrough) {
  EXPECT_EQ(forebay_run({"--", "/bin/sh", "-c", "exit 0"}).exit_code, 0);
  EXPECT_EQ(forebay_run({"--", "/bin/sh", "-c", "exit 7"}).exit_code, 7);
  EXPECT_EQ(forebay_run({"--", "/bin/sh", "-c", "kill -9 $$"}).exit_code, 128 + 9);
  EXPECT_EQ(forebay_run({"--", "/nowhere/at/all"}).exit_code, 127);
  EXPECT_EQ(forebay_run({"--", "/"}).exit_code, 126);
}

TEST(RunCommand, PassesSignalsOn) {
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    Process process({FOREBAY_COMMAND, "run", "--", program("process_program"), "signals"}, on_the_fake());
    ASSERT_TRUE(process.wait_for_output("ready"));

    process.signal(number);
    const Finished run = process.finish();

    EXPECT_EQ(run.exit_code, 10 + number) << run.output;
    EXPECT_NE(position(run.output, "got signal " + std::to_string(number)), std::string::npos) << run.output;
  }
}

TEST(RunCommand, KeepsWhatWasPreloadedBefore) {
  const std::string neighbour = program("next_library.so");
  // As a file that the command inherits; the command itself is not to be preloaded with it.
  const Finished run = run_program({"/usr/bin/env", "LD_PRELOAD=" + neighbour, FOREBAY_COMMAND, "run", "--",
                                    program("neighbour_program"), "getpid"},
                                   on_the_fake());

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(position(run.output, "getpid counted 1\n"), std::string::npos) << run.output;
  EXPECT_NE(position(run.output, "LD_PRELOAD was '" + neighbour + "', which stays behind ours"),
            std::string::npos);
}

TEST(RunCommand, RunsACommandWithoutCudaAndSaysSo) {
  const Finished run = forebay_run({"--", "/bin/echo", "hello"});

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(position(run.output, "\nhello\n"), std::string::npos) << run.output;
  EXPECT_NE(position(run.output, "handled 0 of 0 allocations: no process of the command has started CUDA"),
            std::string::npos);
}

TEST(RunCommand, AStaticProgramIsOutOfReachAndThatIsSaid) {
  if (!std::filesystem::exists(program("static_program"))) {
    GTEST_SKIP() << "this build has no static C library, or sanitizers, which need a shared one";
  }
  const Finished run = forebay_run({"--", program("static_program")});

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(position(run.output,
                     "is linked statically, and nothing can be preloaded under it; nothing will be handled"),
            std::string::npos)
      << run.output;
  EXPECT_NE(position(run.output, "\npreloaded 0\n"), std::string::npos) << run.output;
}

TEST(RunCommand, ASetUidProgramIsOutOfReachAndThatIsSaid) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a program run with another user's rights";
  const TemporaryDirectory directory;
  const std::string copy = directory / "echo";
  std::filesystem::copy_file("/bin/echo", copy);
  constexpr uid_t kNobody = 65534;
  if (::chown(copy.c_str(), kNobody, kNobody) != 0 || ::chmod(copy.c_str(), 04755) != 0) {
    GTEST_SKIP() << "the file system does not keep owners";
  }

  const Finished run = forebay_run({"--", copy, "hello"});

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(position(run.output, "runs with another user's or group's rights (set-uid)"), std::string::npos)
      << run.output;
}

TEST(RunCommand, KeepsRecordsWhereItIsTold) {
  const TemporaryDirectory directory;
  const std::string records = directory / "records";
  const Finished run = forebay_run({"--records", records, "--", program("access_program"), "dlsym"});
  const Result<std::vector<PreloadReport>> read = read_preload_records(records);
  const Finished again = forebay_run({"--records", records, "--", program("access_program"), "dlsym"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  ASSERT_TRUE(read.ok());
  ASSERT_EQ(read.value().size(), 1u);
  EXPECT_EQ(read.value()[0].program, program("access_program") + " dlsym");
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_NE(position(again.output, "has records of another run; name an empty directory"), std::string::npos);
}

// A process that is killed has told everything up to then.
TEST(RunCommand, LosesNothingWhenTheProcessIsKilled) {
  const Finished run = forebay_run({"--", program("sharing_program"), "kill"});

  EXPECT_EQ(run.exit_code, 128 + 9);
  // The other process may go on and allocate more; what the killed one had is there in any case.
  EXPECT_EQ(position(run.output, "handled 0 of"), std::string::npos) << run.output;
  EXPECT_NE(position(run.output, "in 2 processes; at most 9.00 MiB live in one"), std::string::npos)
      << run.output;
}

TEST(RunCommand, RefusesWhatContradictsItself) {
  EXPECT_EQ(forebay_run({"--observe", "--memory", "1GiB", "--", "/bin/true"}).exit_code, 2);
  EXPECT_EQ(forebay_run({"--observe", "--tensors", "--", "/bin/true"}).exit_code, 2);
  EXPECT_EQ(forebay_run({"--tensors", "--no-tensors", "--", "/bin/true"}).exit_code, 2);
  EXPECT_EQ(forebay_run({"--memory", "much", "--", "/bin/true"}).exit_code, 2);
  EXPECT_EQ(forebay_run({"--memory", "24", "--", "/bin/true"}).exit_code, 2) << "a unit was forgotten";
  EXPECT_EQ(forebay_run({}).exit_code, 2);
}

TEST(RunCommand, HelpListsEveryVariable) {
  const Finished run = forebay_run({"--help"});

  EXPECT_EQ(run.exit_code, 0);
  for (const char* variable :
       {kPreloadModeVariable, kPreloadMemoryVariable, kPreloadRecordsVariable, "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF", "XLA_PYTHON_CLIENT_PREALLOCATE"}) {
    EXPECT_NE(position(run.output, variable), std::string::npos) << variable;
  }
}

// --- the environment ---

RunOptions options(PreloadMode mode = PreloadMode::kArena) {
  RunOptions made;
  made.mode = mode;
  made.preload_library = "/opt/forebay/lib/libforebay-preload.so";
  made.records_directory = "/tmp/records";
  return made;
}

TEST(RunEnvironmentTest, PyTorchAllocatesTensorsUnlessTheUserHasChosen) {
  const RunEnvironment made = run_environment(options(), {}).value();

  EXPECT_EQ(made.set.at("PYTORCH_CUDA_ALLOC_CONF"), "backend:cudaMallocAsync");
  EXPECT_EQ(made.set.at("PYTORCH_ALLOC_CONF"), "backend:cudaMallocAsync");
  EXPECT_EQ(made.set.at("LD_PRELOAD"), "/opt/forebay/lib/libforebay-preload.so");
  EXPECT_EQ(made.set.at("FOREBAY_PRELOAD"), "arena");
  EXPECT_EQ(made.set.at("FOREBAY_PRELOAD_RECORDS"), "/tmp/records");
  EXPECT_EQ(made.set.at("XLA_PYTHON_CLIENT_PREALLOCATE"), "false");
  EXPECT_EQ(made.set.count("FOREBAY_MEMORY"), 0u);
}

// Under either name, and never silently.
TEST(RunEnvironmentTest, TheUsersChoiceIsKeptAndItsConsequenceSaid) {
  for (const char* variable : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    const RunEnvironment made = run_environment(options(), {{variable, "expandable_segments:True"}}).value();

    EXPECT_EQ(made.set.count("PYTORCH_CUDA_ALLOC_CONF"), 0u);
    EXPECT_EQ(made.set.count("PYTORCH_ALLOC_CONF"), 0u);
    EXPECT_NE(position(made.lines.at(0), std::string(variable) +
                                             " is 'expandable_segments:True' (yours, kept): PyTorch "
                                             "maps its memory itself"),
              std::string::npos)
        << made.lines.at(0);
  }
}

TEST(RunEnvironmentTest, TensorsReplacesTheUsersChoiceWhenAskedTo) {
  RunOptions wanted = options();
  wanted.tensors = true;
  const RunEnvironment made =
      run_environment(wanted, {{"PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"}}).value();

  EXPECT_EQ(made.set.at("PYTORCH_CUDA_ALLOC_CONF"), "backend:cudaMallocAsync");
  EXPECT_NE(position(made.lines.at(0), "in place of your PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:64'"),
            std::string::npos)
      << made.lines.at(0);
}

TEST(RunEnvironmentTest, NoTensorsLeavesPyTorchsCache) {
  RunOptions wanted = options();
  wanted.tensors = false;
  const RunEnvironment made = run_environment(wanted, {}).value();

  EXPECT_EQ(made.set.count("PYTORCH_CUDA_ALLOC_CONF"), 0u);
  EXPECT_NE(position(made.lines.at(0), "PyTorch's cache asks for whole segments"), std::string::npos);
}

TEST(RunEnvironmentTest, JaxIsLeftAsTheUserHasIt) {
  const RunEnvironment made = run_environment(options(), {{"XLA_PYTHON_CLIENT_PREALLOCATE", "true"}}).value();

  EXPECT_EQ(made.set.count("XLA_PYTHON_CLIENT_PREALLOCATE"), 0u);
  EXPECT_EQ(position(made.lines.at(0), "JAX"), std::string::npos);
}

TEST(RunEnvironmentTest, TheLimitMayComeFromTheEnvironment) {
  RunOptions wanted = options();
  EXPECT_EQ(run_environment(wanted, {{"FOREBAY_MEMORY", "2GiB"}}).value().set.at("FOREBAY_MEMORY"),
            "2147483648");
  wanted.memory = "1GiB";
  EXPECT_EQ(run_environment(wanted, {{"FOREBAY_MEMORY", "2GiB"}}).value().set.at("FOREBAY_MEMORY"),
            "1073741824");
}

TEST(RunEnvironmentTest, APathThatCannotBePreloadedIsRefused) {
  RunOptions wanted = options();
  wanted.preload_library = "/opt/my programs/libforebay-preload.so";
  EXPECT_EQ(run_environment(wanted, {}).status().code(), StatusCode::kInvalidArgument);
}

TEST(RunEnvironmentTest, ReadsPyTorchsConfiguration) {
  EXPECT_EQ(torch_granularity(""), TorchGranularity::kSegments);
  EXPECT_EQ(torch_granularity("max_split_size_mb:64"), TorchGranularity::kSegments);
  EXPECT_EQ(torch_granularity("backend:native"), TorchGranularity::kSegments);
  EXPECT_EQ(torch_granularity("backend:cudaMallocAsync"), TorchGranularity::kTensors);
  EXPECT_EQ(torch_granularity("max_split_size_mb:64, backend : cudaMallocAsync"), TorchGranularity::kTensors);
  EXPECT_EQ(torch_granularity("expandable_segments:True"), TorchGranularity::kExpandable);
  EXPECT_EQ(torch_granularity("expandable_segments:False"), TorchGranularity::kSegments);
  EXPECT_EQ(torch_granularity("garbage,,:,"), TorchGranularity::kSegments);
}

TEST(RunSummaryTest, SaysOnceWhatSeveralProcessesSay) {
  PreloadReport one;
  one.allocations[0] = 2;
  one.bytes[0] = 2048;
  one.problem = "cannot make an arena";
  one.refused = 3;
  PreloadReport other = one;
  other.allocations[static_cast<std::size_t>(PreloadServer::kUnavailable)] = 1;
  other.bytes[static_cast<std::size_t>(PreloadServer::kUnavailable)] = 1024;
  const std::vector<std::string> lines = run_summary(PreloadMode::kArena, {one, other});

  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0],
            "handled 4 of 5 allocations, 4.00 KiB of 5.00 KiB, in 2 processes; at most 0 B live in one");
  EXPECT_EQ(lines[1], "not handled: 1, 1.00 KiB: where the arena could not serve");
  EXPECT_EQ(lines[2], "refused for want of memory: 6");
  EXPECT_EQ(lines[3], "the arena could not serve: cannot make an arena");
}

}  // namespace
}  // namespace forebay::testing
