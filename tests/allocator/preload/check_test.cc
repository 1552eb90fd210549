// `forebay run --check` with a PyTorch that behaves as the test says, on the fake driver.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/allocator/preload/preload_run.h"

namespace forebay::testing {
namespace {

const std::string kPython = PYTHON;

class RunCheckTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kPython.empty()) GTEST_SKIP() << "no python3 here";
    if (kSanitized) GTEST_SKIP() << "a sanitizer's runtime must be linked, and Python is not";
  }
};

Process::Variables variables(const std::string& orders) {
  return {{"FAKE_TORCH", orders},
          {"FAKE_CUDA_MEMORY", "67108864"},
          {"LD_LIBRARY_PATH", kFakeDirectory},
          {"PYTHONDONTWRITEBYTECODE", "1"},
          {"PYTHONPATH", FAKE_TORCH_DIRECTORY},
          {"PYTHONUNBUFFERED", ""}};  // As where nobody has set it.
}

Finished check(const std::string& orders, std::vector<std::string> options = {},
               const std::vector<std::string>& command = {kPython, "train.py"},
               Process::Variables more = {}) {
  options.insert(options.begin(), {FOREBAY_COMMAND, "run", "--check"});
  options.push_back("--");
  options.insert(options.end(), command.begin(), command.end());
  more.merge(variables(orders));
  return run_program(options, more);
}

// The line about a feature under the n-th mode: 0 --tensors, 1 --no-tensors, 2 forebay_torch_alloc.
std::string answer(const Finished& run, int mode, const std::string& feature) {
  std::istringstream stream(run.output);
  const std::string begin = "  " + feature + "  ";
  for (std::string line; std::getline(stream, line);) {
    if (line.compare(0, begin.size(), begin) != 0 || mode-- != 0) continue;
    return line.substr(line.find_first_not_of(' ', begin.size()));
  }
  return "(no such line)";
}

std::string last_line(const Finished& run) {
  const std::size_t begin = run.output.find_last_of('\n', run.output.size() - 2);
  return run.output.substr(begin + 1, run.output.size() - begin - 2);
}

TEST_F(RunCheckTest, SaysThatEverythingWorks) {
  const Finished run = check("");

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(run.output.find("torch 9.9.0+fake (CUDA 13.0) of " + kPython + ", on the fake device\n"), 0u);
  for (int mode = 0; mode < 3; ++mode) {
    EXPECT_EQ(answer(run, mode, "allocation"), "works; the arena served 4 of 4 allocations") << run.output;
    for (const char* feature :
         {"statistics", "history", "MemPool", "CUDA graphs", "compiled graphs", "IPC", "out of memory"}) {
      EXPECT_EQ(answer(run, mode, feature), "works") << mode << ": " << feature << run.output;
    }
  }
  EXPECT_EQ(last_line(run), "--tensors stays the default: all of this works");
}

TEST_F(RunCheckTest, NamesAModeThatWorksInstead) {
  const Finished run = check(
      "history@tensors=raise:not with this backend;mempool@tensors=none;statistics@pluggable=none;"
      "ipc@tensors=raise:no handles;ipc@pluggable=raise:no handles;compiled=raise:two\\nlines");

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(answer(run, 0, "history"),
            "use instead --no-tensors or forebay run --snapshot FILE: RuntimeError: not with this backend")
      << run.output;
  EXPECT_EQ(answer(run, 0, "MemPool"), "use instead --no-tensors: the tensor is not in the pool");
  EXPECT_EQ(answer(run, 2, "statistics"),
            "use instead --tensors or forebay run --report DIR: memory_stats has 0 of 4194304 bytes");
  EXPECT_EQ(answer(run, 0, "IPC"), "use instead --no-tensors: RuntimeError: no handles");
  EXPECT_EQ(answer(run, 1, "IPC"), "works");
  EXPECT_EQ(answer(run, 1, "compiled graphs"), "fails: RuntimeError: two");
  EXPECT_EQ(last_line(run),
            "--tensors stays the default; it is not for programs that need: history, MemPool, compiled "
            "graphs, IPC");
}

TEST_F(RunCheckTest, ACrashIsAFailureAndTheNextProbeRuns) {
  const Finished run = check("statistics=crash;history=exit:3;graphs=leave:4;received=exit:5");

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(answer(run, 0, "statistics"),
            "use instead forebay run --report DIR: ended by signal 11 (Segmentation fault)")
      << run.output;
  EXPECT_EQ(answer(run, 0, "history"),
            "use instead forebay run --snapshot FILE: ended with exit code 3: the last words");
  EXPECT_EQ(answer(run, 0, "CUDA graphs"), "fails: answered, and then ended with exit code 4");
  EXPECT_EQ(answer(run, 0, "IPC"), "fails: the process that was given the tensor ended with exit code 5");
  EXPECT_EQ(answer(run, 0, "out of memory"), "works");
}

// If torch.compile cannot capture a graph it continues without one and computes the same.
TEST_F(RunCheckTest, SkippedCompiledGraphsAreAFailure) {
  const Finished run = check("compiled@tensors=none");

  EXPECT_EQ(answer(run, 0, "compiled graphs"), "use instead --no-tensors: torch.compile does without a graph")
      << run.output;
  EXPECT_EQ(answer(run, 1, "compiled graphs"), "works");
}

TEST_F(RunCheckTest, AHangEndsAtTheLimit) {
  const Finished run = check("history@cache=hang", {"--check-limit", "8"});

  EXPECT_EQ(answer(run, 1, "history"),
            "use instead --tensors or forebay run --snapshot FILE: gave no answer within 8 s")
      << run.output;
  EXPECT_EQ(answer(run, 1, "MemPool"), "works");
}

TEST_F(RunCheckTest, AProcessThatAProbeLeftEndsWithIt) {
  const TemporaryDirectory directory;
  const std::string pipe = directory / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);

  const Finished run = check("history@cache=child", {}, {kPython, "train.py"}, {{"FAKE_TORCH_HELD", pipe}});

  EXPECT_EQ(answer(run, 1, "MemPool"), "works") << run.output;
  pollfd held{.fd = reader, .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&held, 1, 10'000), 1) << "it lives";
  ::close(reader);
}

TEST_F(RunCheckTest, TensorsIsNotTheDefaultIfItFails) {
  const Finished run = check("allocation@tensors=raise:no such backend");

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(answer(run, 0, "allocation"), "use instead --no-tensors: RuntimeError: no such backend")
      << run.output;
  EXPECT_EQ(answer(run, 0, "IPC"), "use instead --no-tensors: not tried, since nothing can be allocated");
  EXPECT_EQ(last_line(run), "use --no-tensors with this PyTorch: under --tensors, allocation fails");
}

TEST_F(RunCheckTest, OutOfMemoryWithoutAnExceptionIsAFailure) {
  const Finished run = check("memory@pluggable=none;memory@tensors=raise:what is this");

  EXPECT_EQ(answer(run, 2, "out of memory"),
            "use instead --no-tensors: no exception, and a tensor without memory")
      << run.output;
  EXPECT_EQ(answer(run, 0, "out of memory"),
            "use instead --no-tensors: raises RuntimeError in place of OutOfMemoryError: what is this");
  EXPECT_EQ(last_line(run), "use --no-tensors with this PyTorch: under --tensors, out of memory fails");
}

TEST_F(RunCheckTest, NoWorkingModeHasItsOwnExitCode) {
  const Finished run = check("allocation=raise:nothing");

  EXPECT_EQ(run.exit_code, 1);
  EXPECT_EQ(answer(run, 0, "allocation"), "fails: RuntimeError: nothing") << run.output;
  EXPECT_EQ(last_line(run).find("nothing of the arena serves this PyTorch"), 0u);
}

TEST_F(RunCheckTest, WithoutTorchThereIsNothingToTry) {
  const Finished run = check("import=raise:No module named 'torch'");

  EXPECT_EQ(run.exit_code, 3);
  EXPECT_EQ(run.output,
            "forebay run: --check tries the PyTorch of " + kPython +
                ", and importing it raises ImportError: No module named 'torch'; give the Python that the "
                "training runs with: forebay run --check -- /path/to/python\n");
}

TEST_F(RunCheckTest, AnImportThatCrashesOrHangsIsReported) {
  const Finished crash = check("import=crash");
  const Finished hang = check("import=hang", {"--check-limit", "2"});

  EXPECT_EQ(crash.exit_code, 3);
  EXPECT_NE(crash.output.find("importing it ended by signal 11 (Segmentation fault)"), std::string::npos)
      << crash.output;
  EXPECT_EQ(hang.exit_code, 3);
  EXPECT_NE(hang.output.find("importing it gave no answer within 2 s"), std::string::npos) << hang.output;
}

TEST_F(RunCheckTest, WithoutADeviceThereIsNothingToTry) {
  const Finished run = check("device=raise:Found no NVIDIA driver on your system.\\nMore of it.");

  EXPECT_EQ(run.exit_code, 4);
  EXPECT_EQ(run.output,
            "forebay run: --check tries PyTorch on a device, and torch 9.9.0+fake of " + kPython +
                " finds none: Found no NVIDIA driver on your system; run it where `nvidia-smi` lists one\n");
}

TEST_F(RunCheckTest, ACommandThatIsNoPythonIsRefused) {
  for (const char* command : {"/bin/sh", "nowhere-at-all", "/usr/bin/pythonista"}) {
    const Finished run = check("", {}, {command, "-c", "exit 0"});
    EXPECT_EQ(run.exit_code, 2) << command;
    EXPECT_NE(run.output.find(std::string("--check was asked for '") + command + "', which is no Python"),
              std::string::npos)
        << run.output;
  }
}

// torchrun, accelerate and similar scripts.
TEST_F(RunCheckTest, AScriptNamesItsPython) {
  const TemporaryDirectory directory;
  const std::string script = directory / "torchrun";
  std::ofstream(script) << "#!" << kPython << " -u\nimport torch\n";
  ASSERT_EQ(::chmod(script.c_str(), 0755), 0);

  const Finished run = check("import=raise:seen", {}, {script, "train.py"});

  EXPECT_EQ(run.exit_code, 3);
  EXPECT_NE(run.output.find("the PyTorch of " + kPython), std::string::npos) << run.output;
}

TEST_F(RunCheckTest, TheUsersConfigurationDoesNotDecideTheModes) {
  const Finished run = check("history@tensors=raise:asynchronous", {}, {kPython},
                             {{"PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"}});

  EXPECT_NE(run.output.find("without your PYTORCH_CUDA_ALLOC_CONF='backend:cudaMallocAsync'"),
            std::string::npos)
      << run.output;
  EXPECT_EQ(answer(run, 1, "history"), "works");
}

TEST_F(RunCheckTest, ContradictionsAreRefused) {
  EXPECT_NE(check("", {"--observe"}).exit_code, 0);
  EXPECT_NE(check("", {"--no-tensors"}).exit_code, 0);
  EXPECT_NE(run_program({FOREBAY_COMMAND, "run", "--check-limit", "3", "--", kPython}).exit_code, 0);
  const Finished inherited =
      check("import=raise:it came so far", {}, {kPython}, {{"FOREBAY_RUN_TRACE", "/nowhere"}});
  EXPECT_EQ(inherited.exit_code, 3);
  EXPECT_EQ(inherited.output.find("forebay run: FOREBAY_RUN_TRACE is ignored: --check runs nothing"), 0u)
      << inherited.output;
  for (const char* option :
       {"--report", "--trace", "--snapshot", "--events", "--records", "--pause-signal"}) {
    const Finished run = check("", {option, "/nowhere"});
    EXPECT_EQ(run.exit_code, 2) << option;
    EXPECT_NE(run.output.find(std::string("so ") + option + " has no effect"), std::string::npos)
        << run.output;
  }
}

// The probes leave no files behind.
TEST_F(RunCheckTest, AnInterruptEndsTheProbesAndLeavesNoFiles) {
  for (const char* probe : {"import=hang", "statistics@tensors=hang"}) {
    const TemporaryDirectory directory, other;
    const std::string pipe = other / "pipe";
    ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
    Process::Variables all = variables(probe);
    all["TMPDIR"] = directory.path();
    all["FAKE_TORCH_HANGS"] = pipe;
    Process process({FOREBAY_COMMAND, "run", "--check", "--", kPython}, all);
    { const std::ifstream opened_when_the_probe_hangs(pipe); }
    EXPECT_FALSE(std::filesystem::is_empty(directory.path()));

    process.signal(SIGINT);
    const Finished run = process.finish(std::chrono::seconds(30));

    EXPECT_EQ(run.exit_code, 128 + SIGINT) << probe << ": " << run.output;
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  }
}

TEST_F(RunCheckTest, ProbesHaveTheLimitOfTheCommand) {
  const Finished run = check("", {"--memory", "8MiB"});

  EXPECT_NE(answer(run, 1, "allocation").find("OutOfMemoryError"), std::string::npos) << run.output;
  EXPECT_NE(run.exit_code, 0);
}

}  // namespace
}  // namespace forebay::testing
