// `forebay run` as a user starts it, and its decisions about the environment.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <termios.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "allocator/preload/events.h"
#include "runtime/command/run/environment.h"
#include "runtime/command/run/summary.h"
#include "tests/allocator/preload/preload_run.h"
#include "tests/support/let_others_run.h"

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

TEST(RunCommand, PrintsTheModeFirstAndTheCountsLast) {
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

TEST(RunCommand, ListsAllocationsThatWereNotHandledAndWhy) {
  const Finished run = forebay_run({"--", program("memory_program"), "elsewhere"});

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(position(run.output, "handled 1 of 7 allocations, 1.00 MiB of 7.10 MiB"), std::string::npos)
      << run.output;
  EXPECT_NE(position(run.output, "not handled: 1, 1.00 MiB: managed memory"), std::string::npos)
      << run.output;
  EXPECT_NE(position(run.output, "not handled: 2, 2.00 MiB: from a memory pool of the program's own"),
            std::string::npos);
}

TEST(RunCommand, NamesLibrariesThatEscapeTheHook) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's runtime refuses to open a library that way";
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

// The limit of the outer run bounds all processes in it, whatever is set in between.
TEST(RunCommand, InsideAnotherRunTheSmallerLimitHolds) {
  const std::string inner = FOREBAY_COMMAND " run ";
  const std::string work = "-- " + program("memory_program") + " info";
  const auto within = [&](const std::string& limit, const std::string& command) {
    const Finished run = forebay_run({"--memory", limit, "--", "/bin/sh", "-c", command});
    EXPECT_EQ(run.exit_code, 0) << run.output;
    return run.output;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return position(text, part) != std::string::npos;
  };
  const std::string more = within("32MiB", inner + "--memory 48MiB " + work);
  const std::string less = within("48MiB", inner + "--memory 32MiB " + work);
  const std::string none = within("32MiB", inner + work);
  const std::string variable = within("32MiB", "FOREBAY_MEMORY=48MiB " + inner + work);
  const std::string twice = within("32MiB", inner + "--memory 48MiB -- " + inner + "--memory 40MiB " + work);
  const std::string observed = within("32MiB", inner + "--observe " + work);

  for (const std::string& output : {more, less, none, variable, twice}) {
    EXPECT_TRUE(has(output, "total 33554432, device 33554432")) << output;
  }
  EXPECT_TRUE(has(more,
                  "--memory 48MiB is more than the 32.00 MiB that the forebay run around this one allows, "
                  "so the smaller limit holds"))
      << more;
  EXPECT_TRUE(has(variable, "FOREBAY_MEMORY 48MiB is more than the 32.00 MiB")) << variable;
  for (const std::string& output : {less, none}) EXPECT_FALSE(has(output, "is more than")) << output;
  EXPECT_TRUE(has(observed, "the 32.00 MiB that the forebay run around this one allows are not enforced"))
      << observed;
}

// Words of a command may hold control characters for the terminal.
TEST(RunCommand, PrintsControlCharactersSpelledOut) {
  const TemporaryDirectory directory;
  const std::string bell = "\x1b]0;title\x07\n\x9b";
  const Finished missing = forebay_run({"--", "/nowhere/" + bell});
  const Finished option = forebay_run({"--no" + bell, "--", "/bin/true"});
  const Finished chosen = forebay_run({"--", "/bin/true"}, {{"PYTORCH_CUDA_ALLOC_CONF", "a:" + bell}});
  const Finished place = forebay_run({"--trace", directory / (bell + "/trace"), "--", "/bin/true"});
  const Finished from = forebay_run({"--from", directory / bell});
  const Finished word = run_program({FOREBAY_COMMAND, "r" + bell}, {});
  const Finished plan = run_program({FOREBAY_COMMAND, "plan", "--" + bell}, {});
  const Finished explain = run_program({FOREBAY_COMMAND, "explain", directory / bell}, {});
  const Finished replay = run_program({FOREBAY_COMMAND, "replay", directory / bell}, {});

  for (const Finished& run : {missing, option, chosen, place, from, word, plan, explain, replay}) {
    EXPECT_NE(position(run.output, "\\x1b]0;title\\x07\\n\\x9b"), std::string::npos) << run.output;
    for (const char letter : {'\x1b', '\x07', '\x9b'}) {
      EXPECT_EQ(run.output.find(letter), std::string::npos) << run.output;
    }
  }
}

// Everything after the first non-option belongs to the command.
TEST(RunCommand, ArgumentsOfTheCommandAreNotOptions) {
  for (const std::vector<std::string>& words : {std::vector<std::string>{"train.py", "--memory", "8GiB"},
                                                {"--report", "--", "--trace"},
                                                {"[a,b]", "", "--", "--help"},
                                                {"-m", "plan", "run", "--version"}}) {
    for (const bool has_mark : {true, false}) {
      std::vector<std::string> arguments;
      if (has_mark) arguments.push_back("--");
      arguments.insert(arguments.end(), {"/usr/bin/printf", "<%s>"});
      arguments.insert(arguments.end(), words.begin(), words.end());
      std::string expected;
      for (const std::string& word : words) expected += "<" + word + ">";
      const Finished run = forebay_run(arguments);

      EXPECT_EQ(run.exit_code, 0) << run.output;
      EXPECT_NE(position(run.output, expected), std::string::npos) << run.output;
      EXPECT_EQ(position(run.output, "of each device"), std::string::npos) << run.output;
    }
  }
  const Finished mixed = forebay_run({"--memory", "32MiB", "--no-tensors", "/bin/sh", "-c", "exit 7"});
  EXPECT_EQ(mixed.exit_code, 7) << mixed.output;
  EXPECT_NE(position(mixed.output, "at most 32.00 MiB of each device"), std::string::npos) << mixed.output;
}

TEST(RunCommand, AnInvalidOptionOrMissingValueIsRefused) {
  const auto refused = [](const std::vector<std::string>& arguments) {
    const Finished run = forebay_run(arguments);
    EXPECT_EQ(run.exit_code, 2) << run.output;
    EXPECT_EQ(position(run.output, "forebay run: "), 0u) << run.output;
    return run.output;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return position(text, part) != std::string::npos;
  };

  EXPECT_TRUE(has(refused({"--report", "--", "/bin/echo", "it ran"}), "--report needs a directory"));
  EXPECT_TRUE(has(refused({"--trace", "--", "/bin/echo", "it ran"}), "--trace needs a file"));
  EXPECT_TRUE(has(refused({"--memory", "--observe", "/bin/echo", "it ran"}), "--memory needs bytes"));
  EXPECT_TRUE(has(refused({"--pause-signal"}), "--pause-signal needs a signal"));
  EXPECT_TRUE(has(refused({"--reprot", "x", "--", "/bin/echo"}),
                  "there is no option --reprot; did you mean --report?"));
}

// Also processes that the command starts.
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

// A signal that the terminal sends to its foreground group reaches the command once per sending.
TEST(RunCommand, LeavesSignalsOfTheTerminalToTheCommand) {
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    ::signal(SIGINT, SIG_DFL);  // Tests in the background of a shell ignore it.
    for (const auto& [name, value] : on_the_fake()) ::setenv(name.c_str(), value.c_str(), 1);
    ::execl(FOREBAY_COMMAND, FOREBAY_COMMAND, "run", "--", program("process_program").c_str(), "signals",
            static_cast<char*>(nullptr));
    ::_exit(1);
  }
  ASSERT_GT(child, 0);
  // At Ctrl-C a terminal discards pending output, unless told not to.
  termios settings{};
  ASSERT_EQ(::tcgetattr(terminal, &settings), 0);
  settings.c_lflag |= NOFLSH;
  ASSERT_EQ(::tcsetattr(terminal, TCSANOW, &settings), 0);
  std::string text;
  char buffer[4096];
  bool is_sent = false;
  // A terminal ends with an error once nobody has it open.
  for (ssize_t count = 0; (count = ::read(terminal, buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(count));
    if (is_sent || position(text, "ready") == std::string::npos) continue;
    is_sent = ::write(terminal, "\003\003", 2) == 2;  // Ctrl-C, twice.
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(terminal);

  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 10 + SIGINT) << text;
  EXPECT_NE(position(text, "got signal 2"), std::string::npos) << text;
  EXPECT_EQ(position(text, "got signal 2"), text.rfind("got signal 2")) << text;
  EXPECT_NE(position(text, "handled 0 of 0"), std::string::npos) << text;
}

// The kernel tells the leader of the session alone.
TEST(RunCommand, PassesOnThatTheTerminalWasClosed) {
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    ::signal(SIGHUP, SIG_DFL);  // Ignored under nohup.
    ::execl(FOREBAY_COMMAND, FOREBAY_COMMAND, "run", "--", "/bin/sh", "-c",
            "trap 'exit 41' HUP; echo ready; while :; do sleep 0.1; done", static_cast<char*>(nullptr));
    ::_exit(1);
  }
  ASSERT_GT(child, 0);
  std::string text;
  char buffer[4096];
  for (ssize_t count = 0;
       position(text, "ready") == std::string::npos && (count = ::read(terminal, buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(count));
  ::close(terminal);
  int status = 0;
  ::waitpid(child, &status, 0);

  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 41) << text << status;
}

TEST(RunCommand, PassesSignalsOn) {
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF,
                           SIGIO, SIGPWR, SIGSTKFLT, SIGWINCH, SIGRTMIN + 3, SIGRTMAX}) {
    Process process({FOREBAY_COMMAND, "run", "--", program("process_program"), "signals"}, on_the_fake());
    ASSERT_TRUE(process.wait_for_output("ready"));

    process.signal(number);
    const Finished run = process.finish();

    EXPECT_EQ(run.exit_code, 10 + number) << run.output;
    EXPECT_NE(position(run.output, "got signal " + std::to_string(number)), std::string::npos) << run.output;
  }
}

// --- the command's surroundings ---

// Reads a pipe in the file system line by line, and can wait for a line.
class NamedPipe {
 public:
  explicit NamedPipe(std::string path) : path_(std::move(path)) {
    EXPECT_EQ(::mkfifo(path_.c_str(), 0600), 0);
    // For writing too: then opening does not wait, and there is always a reader.
    file_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  }
  NamedPipe(const NamedPipe&) = delete;
  NamedPipe& operator=(const NamedPipe&) = delete;
  ~NamedPipe() { close(); }
  void close() {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
  }
  // So that a writer waits until the pipe is read.
  void fill() {
    const std::string page(4096, '.');
    while (::write(file_, page.data(), page.size()) > 0) {
    }
    while (::write(file_, ".", 1) > 0) {
    }
  }
  bool wait_for(const std::string& text) {
    char buffer[4096];
    while (text_.find(text) == std::string::npos) {
      pollfd waiting{file_, POLLIN, 0};
      if (::poll(&waiting, 1, 60'000) <= 0) return false;
      const ssize_t count = ::read(file_, buffer, sizeof buffer);
      if (count > 0) text_.append(buffer, static_cast<std::size_t>(count));
    }
    return true;
  }
  const std::string& path() const { return path_; }
  const std::string& text() const { return text_; }

 private:
  std::string path_;
  int file_ = -1;
  std::string text_;
};

// Command lines are in reports, and may have secrets in them.
TEST(RunCommand, FilesAreForTheirUserAloneAndHaveNoSecrets) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const std::string trace = directory / "trace";

  const Finished run = forebay_run({"--report", report, "--trace", trace, "--", program("memory_program"),
                                    "info", "--api-key", "hunter2hunter2", "TOKEN=correcthorse"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.path())) {
    if (!entry.is_regular_file()) continue;
    ++files;
    EXPECT_EQ(entry.status().permissions() & std::filesystem::perms::all,
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write)
        << entry.path();
    std::ifstream file(entry.path());
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    EXPECT_EQ(text.find("hunter2"), std::string::npos) << entry.path() << ": " << text;
    EXPECT_EQ(text.find("correcthorse"), std::string::npos) << entry.path() << ": " << text;
  }
  EXPECT_GE(files, 4);
}

// Others may write to the directory of a report.
TEST(RunCommand, APlantedLinkIsNotWrittenThrough) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const std::string other = directory / "other";
  const auto text_of = [](const std::string& path) {
    std::ifstream file(path);
    return std::string((std::istreambuf_iterator<char>(file)), {});
  };
  std::ofstream(other) << "of another program";

  for (const char* const name : {"summary.txt", "summary.json", "report.html"}) {
    std::filesystem::create_directory(report);
    std::filesystem::create_symlink(other, report + "/" + name);
    const Finished run = forebay_run({"--report", report, "--", program("memory_program"), "info"});
    EXPECT_EQ(run.exit_code, 2) << run.output;
    EXPECT_NE(position(run.output, "has a report already"), std::string::npos) << run.output;
    std::filesystem::remove_all(report);
  }
  const Finished run =
      forebay_run({"--report", report, "--", "/bin/sh", "-c",
                   "cd " + report + "; rm summary.txt; ln -s " + other + " summary.txt; ln -s " + other +
                       " summary.json; mkfifo report.html; mkfifo report.html.partial; echo mine "
                       ">process-$$.json; exec " +
                       program("memory_program") + " info"});

  EXPECT_EQ(text_of(other), "of another program");
  EXPECT_EQ(run.exit_code, 0) << run.output;
  for (const char* const kept :
       {"summary.json: File exists", "report.html: File exists", ".json: File exists"})
    EXPECT_NE(position(run.output, kept), std::string::npos) << kept << "\n" << run.output;
  EXPECT_NE(text_of(report + "/summary.txt").find("memory_program"), std::string::npos) << "its own";
  EXPECT_FALSE(std::filesystem::is_symlink(report + "/summary.txt"));
}

TEST(RunCommand, AUsersSummaryStays) {
  const TemporaryDirectory directory;
  const std::string summary = directory / "summary.json";
  std::ofstream(summary) << "{\"mine\": 1}";

  const Finished run = forebay_run({"--report", directory.path(), "--", program("memory_program"), "info"});

  EXPECT_EQ(run.exit_code, 2) << run.output;
  std::ifstream file(summary);
  EXPECT_EQ(std::string((std::istreambuf_iterator<char>(file)), {}), "{\"mine\": 1}");
}

// Asked for before there is a command, a report is written as soon as there is one.
TEST(RunCommand, ASignalBeforeTheCommandStartsIsNotLost) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  NamedPipe errors(directory / "errors");
  errors.fill();
  // It waits at its first line, which is not read yet.
  Process process({"/bin/sh", "-c",
                   "exec " FOREBAY_COMMAND " run --report " + report + " -- /bin/true 2>" + errors.path()},
                  on_the_fake());
  while (!std::filesystem::exists(report + "/summary.txt")) testing::let_others_run();

  process.signal(SIGUSR1);
  EXPECT_TRUE(errors.wait_for("the report is in ")) << errors.text();
  const Finished run = process.finish();

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_TRUE(errors.wait_for("handled 0 of 0"));
}

// A second Ctrl-C, or a batch system that sends another signal.
TEST(RunCommand, FilesAtTheEndAreCompleteDespiteSignals) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report", snapshot = directory / "snapshot";
  NamedPipe trace(directory / "trace");
  trace.fill();
  Process process({FOREBAY_COMMAND, "run", "--report", report, "--trace", trace.path(), "--snapshot",
                   snapshot, "--", program("events_program"), "listen"},
                  on_the_fake());
  ASSERT_TRUE(process.wait_for_output("ready"));

  process.signal(SIGTERM);
  // It waits at the trace, which is not read yet, after the report and before the snapshot.
  while (!std::filesystem::exists(report + "/report.html")) testing::let_others_run();
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1}) process.signal(number);
  EXPECT_FALSE(std::filesystem::exists(snapshot));
  EXPECT_TRUE(trace.wait_for("# allocations of "));
  const Finished run = process.finish();

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(position(run.output, "the report is in "), std::string::npos) << run.output;
  EXPECT_TRUE(std::filesystem::exists(snapshot)) << run.output;
}

TEST(RunCommand, TheReaderOfItsOutputMayEnd) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const std::string words = directory / "words";
  ASSERT_EQ(::mkfifo(words.c_str(), 0600), 0);
  Process process({"/bin/sh", "-c",
                   "exec " FOREBAY_COMMAND " run --report " + report + " -- " + program("events_program") +
                       " listen 2>" + words},
                  on_the_fake());
  { const std::ifstream reads_nothing(words); }
  ASSERT_TRUE(process.wait_for_output("ready"));

  process.signal(SIGTERM);
  const Finished run = process.finish();

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_TRUE(std::filesystem::exists(report + "/report.html"));
}

TEST(RunCommand, MayBeStartedWithoutStandardStreams) {
  const TemporaryDirectory directory;
  const std::string report = directory / "report";
  const Finished run = run_program({"/bin/sh", "-c",
                                    "exec " FOREBAY_COMMAND " run --report " + report + " -- " +
                                        program("events_program") + " steps <&- >&- 2>&-"},
                                   on_the_fake());
  std::ifstream file(report + "/summary.txt");
  const std::string text{std::istreambuf_iterator<char>(file), {}};

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(run.output, "");
  EXPECT_NE(position(text, "handled 4 of 4 allocations"), std::string::npos) << text;
}

// A process that ignores SIGCHLD passes that on to the programs it starts.
TEST(RunCommand, MayBeStartedWithSigchldIgnored) {
  const std::string env = "/usr/bin/env";
  if (run_program({env, "--ignore-signal=CHLD", "/bin/true"}).exit_code != 0) {
    GTEST_SKIP() << env << " cannot ignore signals here";
  }
  Process process({env, "--ignore-signal=CHLD", FOREBAY_COMMAND, "run", "--", "/bin/sh", "-c", "exit 7"},
                  on_the_fake());
  EXPECT_EQ(process.finish(std::chrono::seconds(30)).exit_code, 7);
}

TEST(RunCommand, WorksInAnEmptyEnvironmentAndReportsHiddenVariables) {
  std::vector<std::string> empty = {"/usr/bin/env", "-i", "LD_LIBRARY_PATH=" + kFakeDirectory};
  for (const auto& [name, value] : sanitizer_variables()) empty.push_back(name + "=" + value);
  const auto with = [](std::vector<std::string> words, const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const std::vector<std::string> work = {program("access_program"), "query"};
  const Finished outside = run_program(with(with(empty, {FOREBAY_COMMAND, "run", "--"}), work));
  const Finished inside = forebay_run(with(with({"--"}, empty), work));

  EXPECT_EQ(outside.exit_code, 0) << outside.output;
  EXPECT_NE(position(outside.output, "handled 3 of 3 allocations"), std::string::npos) << outside.output;
  EXPECT_EQ(inside.exit_code, 0) << inside.output;
  EXPECT_NE(position(inside.output, "programs without LD_PRELOAD"), std::string::npos) << inside.output;
}

TEST(RunCommand, MayBeRunUnderItself) {
  const Finished run = forebay_run({"--", FOREBAY_COMMAND, "run", "--", program("access_program"), "query"});

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(position(run.output, "handled 3 of 3 allocations"), std::string::npos) << run.output;
  EXPECT_NE(position(run.output, "handled 0 of 0 allocations"), std::string::npos) << run.output;
}

TEST(RunCommand, ReportsThatRecordsHaveNoDirectory) {
  for (const char* place : {"/nowhere/at/all", "/proc"}) {
    const Finished run = forebay_run({"--", "/bin/echo", "it ran"}, {{"TMPDIR", place}});

    EXPECT_EQ(run.exit_code, 2) << run.output;
    EXPECT_NE(position(run.output, std::string("cannot make a directory for records in ") + place),
              std::string::npos)
        << run.output;
    EXPECT_EQ(position(run.output, "\nit ran"), std::string::npos);
  }
}

TEST(RunCommand, AnEmptyTmpdirIsNone) {
  const Finished run = forebay_run({"--", "/bin/echo", "it ran"}, {{"TMPDIR", ""}});
  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(position(run.output, "it ran"), std::string::npos) << run.output;
}

TEST(RunCommand, KeepsEarlierPreloads) {
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
  EXPECT_NE(position(run.output, "handled 0 of 0 allocations: no process of the command has used CUDA"),
            std::string::npos);
}

TEST(RunCommand, SaysThatThereIsNoDriver) {
  if (void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY)) {
    ::dlclose(driver);
    GTEST_SKIP() << "there is a driver here";
  }
  const Finished run = run_program({FOREBAY_COMMAND, "run", "--", "/bin/true"}, sanitizer_variables());

  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(position(run.output, "handled 0 of 0 allocations: no CUDA driver is found from here"),
            std::string::npos)
      << run.output;
  EXPECT_NE(position(run.output, "(libcuda.so.1: cannot open shared object file"), std::string::npos)
      << run.output;
}

TEST(RunCommand, PrintsNoCountsForACommandThatWasNeverStarted) {
  for (const char* command : {"/nowhere/at/all", "/"}) {
    const Finished run = forebay_run({"--", command});

    EXPECT_NE(position(run.output, std::string("cannot run ") + command), std::string::npos) << run.output;
    EXPECT_EQ(position(run.output, "handled 0 of 0"), std::string::npos) << run.output;
  }
  // One that gives the same exit codes itself.
  const Finished run = forebay_run({"--", "/bin/sh", "-c", "exit 127"});
  EXPECT_NE(position(run.output, "handled 0 of 0"), std::string::npos) << run.output;
}

TEST(RunCommand, AStaticProgramIsReportedAsOutOfReach) {
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

TEST(RunCommand, AScriptOfAStaticProgramIsReportedAsOutOfReach) {
  if (!std::filesystem::exists(program("static_program"))) {
    GTEST_SKIP() << "this build has no static C library, or sanitizers, which need a shared one";
  }
  const TemporaryDirectory directory;
  const auto script = [&](const std::string& name, const std::string& interpreter) {
    const std::string path = directory / name;
    std::ofstream(path) << "#! " << interpreter << " an argument\n";
    EXPECT_EQ(::chmod(path.c_str(), 0755), 0);
    return path;
  };
  const std::string inner = script("inner", program("static_program"));
  const Finished run = forebay_run({"--", script("outer", inner)});
  const Finished usual = forebay_run({"--", script("usual", "/bin/echo")});
  const Finished missing = forebay_run({"--", script("missing", "/nowhere/at/all")});

  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(position(run.output, program("static_program") + " is linked statically"), std::string::npos)
      << run.output;
  EXPECT_EQ(usual.exit_code, 0);
  EXPECT_EQ(position(usual.output, "nothing will be handled"), std::string::npos) << usual.output;
  EXPECT_EQ(missing.exit_code, 127);
  EXPECT_NE(position(missing.output, "cannot run "), std::string::npos) << missing.output;
}

// A directory of its name is no program, and an empty entry of PATH is the current directory.
TEST(RunCommand, AStaticProgramIsFoundWhereTheSystemFindsIt) {
  if (!std::filesystem::exists(program("static_program"))) {
    GTEST_SKIP() << "this build has no static C library, or sanitizers, which need a shared one";
  }
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "static_program");
  const std::string run = "'" FOREBAY_COMMAND "' run -- static_program";

  for (const std::string& path : {directory.path() + ":" + kProgramDirectory, directory.path() + ":",
                                  ":" + directory.path(), std::string()}) {
    const Finished finished =
        run_program({"/bin/sh", "-c", "cd '" + kProgramDirectory + "' && PATH='" + path + "' exec " + run},
                    on_the_fake());

    EXPECT_EQ(finished.exit_code, 0) << path << "\n" << finished.output;
    EXPECT_NE(position(finished.output, "static_program is linked statically"), std::string::npos)
        << path << "\n"
        << finished.output;
  }
}

TEST(RunCommand, ASetUidProgramIsReportedAsOutOfReach) {
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

TEST(RunCommand, AProgramWithCapabilitiesIsReportedAsOutOfReach) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file capabilities";
  const TemporaryDirectory directory;
  ASSERT_EQ(::chmod(directory.path().c_str(), 0755), 0);
  const std::string copy = directory / "echo";
  std::filesystem::copy_file("/bin/echo", copy);
  // Revision 2, effective: CAP_NET_BIND_SERVICE.
  const std::uint32_t capabilities[5] = {0x02000001, 1 << 10, 0, 0, 0};
  if (::setxattr(copy.c_str(), "security.capability", capabilities, sizeof capabilities, 0) != 0)
    GTEST_SKIP() << "the file system keeps no capabilities";

  const auto run_as = [&](const std::string& user, const std::vector<std::string>& command) {
    std::vector<std::string> words = {"/usr/bin/env", "setpriv", "--reuid", user, "--clear-groups"};
    words.insert(words.end(), command.begin(), command.end());
    return run_program(words, on_the_fake());
  };
  if (run_as("65534", {FOREBAY_COMMAND, "--version"}).exit_code != 0)
    GTEST_SKIP() << "there is no setpriv (package util-linux), or another user cannot reach "
                 << FOREBAY_COMMAND;
  const std::vector<std::string> command = {FOREBAY_COMMAND, "run", "--", copy, "hello"};
  EXPECT_NE(position(run_as("65534", command).output, "has capabilities of its own"), std::string::npos);
  EXPECT_EQ(position(run_as("0", command).output, "has capabilities of its own"), std::string::npos);
}

TEST(RunCommand, KeepsRecordsInTheGivenDirectory) {
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

// The record of a killed process is complete up to that moment.
TEST(RunCommand, LosesNothingWhenTheProcessIsKilled) {
  const Finished run = forebay_run({"--", program("sharing_program"), "kill"});

  EXPECT_EQ(run.exit_code, 128 + 9);
  // The other process may go on and allocate more; the killed one's counts are there in any case.
  EXPECT_EQ(position(run.output, "handled 0 of"), std::string::npos) << run.output;
  EXPECT_NE(position(run.output, "in 2 processes; at most 9.00 MiB live in one"), std::string::npos)
      << run.output;
}

TEST(RunCommand, ObeysTheVariablesOfThePreload) {
  const TemporaryDirectory directory;
  const std::vector<std::string> work = {program("access_program"), "query"};
  const Finished off = forebay_run(work, {{"FOREBAY_PRELOAD", "off"}});
  const Finished observed = forebay_run(work, {{"FOREBAY_PRELOAD", "observe"}});
  const Finished kept = forebay_run(work, {{"FOREBAY_PRELOAD_RECORDS", directory / "records"}});
  const Result<std::vector<PreloadReport>> read = read_preload_records(directory / "records");
  const Finished contradicted =
      forebay_run({"--memory", "1GiB", "/bin/echo"}, {{"FOREBAY_PRELOAD", "observe"}});

  EXPECT_EQ(off.exit_code, 0) << off.output;
  EXPECT_EQ(position(off.output, "forebay run: FOREBAY_PRELOAD=off: the command runs as it is"), 0u)
      << off.output;
  EXPECT_EQ(position(off.output, "handled"), std::string::npos) << off.output;
  EXPECT_EQ(position(observed.output, "forebay run: observing (FOREBAY_PRELOAD=observe): "), 0u)
      << observed.output;
  EXPECT_NE(position(observed.output, "observed 3 allocations"), std::string::npos) << observed.output;
  EXPECT_EQ(kept.exit_code, 0) << kept.output;
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value().size(), 1u);
  EXPECT_EQ(contradicted.exit_code, 2) << contradicted.output;

  const Finished unknown = forebay_run({"/bin/echo", "ran"}, {{"FOREBAY_PRELOAD", "foo"}});
  EXPECT_EQ(unknown.exit_code, 2) << unknown.output;
  EXPECT_NE(position(unknown.output, "FOREBAY_PRELOAD is 'foo'; use arena, observe or off"),
            std::string::npos)
      << unknown.output;
  EXPECT_EQ(position(unknown.output, "ran\n"), std::string::npos) << unknown.output;
}

TEST(RunCommand, CreatesOnlyTheLastPartOfAReportsPath) {
  const TemporaryDirectory directory;
  const Finished made = forebay_run({"--report", directory / "a", "/bin/true"});
  const Finished refused = forebay_run({"--report", directory / "b/c", "/bin/true"});

  EXPECT_EQ(made.exit_code, 0) << made.output;
  EXPECT_TRUE(std::filesystem::exists(directory / "a/summary.txt"));
  EXPECT_EQ(refused.exit_code, 2) << refused.output;
  EXPECT_NE(position(refused.output, "name a directory in one that exists"), std::string::npos)
      << refused.output;
  EXPECT_FALSE(std::filesystem::exists(directory / "b"));
}

TEST(RunCommand, ADirectoryWithoutRecordsHasNothingToReport) {
  const TemporaryDirectory directory;
  const Finished empty = forebay_run({"--from", directory.path()});
  std::ofstream(directory / "summary.txt") << "of a run";
  const Finished report = forebay_run({"--from", directory.path()});

  EXPECT_EQ(empty.exit_code, 2);
  EXPECT_NE(position(empty.output, "there is no record in --from " + directory.path()), std::string::npos)
      << empty.output;
  EXPECT_EQ(report.exit_code, 2);
  EXPECT_NE(position(report.output, "which seems to be a report"), std::string::npos) << report.output;
}

TEST(RunCommand, RefusesContradictoryOptions) {
  EXPECT_EQ(forebay_run({"--observe", "--memory", "1GiB", "--", "/bin/true"}).exit_code, 2);
  EXPECT_EQ(forebay_run({"--observe", "--tensors", "--", "/bin/true"}).exit_code, 2);
  EXPECT_EQ(forebay_run({"--tensors", "--no-tensors", "--", "/bin/true"}).exit_code, 2);
  EXPECT_EQ(forebay_run({"--memory", "much", "--", "/bin/true"}).exit_code, 2);
  EXPECT_NE(
      position(forebay_run({"--memory", "24", "--", "/bin/true"}).output, "24 bytes; did you mean 24GiB?"),
      std::string::npos);
  for (const char* nonsense : {"-5GiB", "0", "1e30", "99999999999TiB", "nan", "24GiBs", "0x", " "}) {
    const Finished run = forebay_run({std::string("--memory=") + nonsense, "--", "/bin/echo", "it ran"});
    EXPECT_EQ(run.exit_code, 2) << nonsense;
    EXPECT_NE(position(run.output, "use bytes, such as 24GiB"), std::string::npos) << run.output;
  }
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

// The loader ends a path at a colon or a space.
TEST(RunEnvironmentTest, OurLibraryIsOnceInTheListOfPreloads) {
  const RunOptions wanted = options();
  for (const char* separator : {":", " "}) {
    const std::string list = "/lib/a.so" + (separator + wanted.preload_library) + separator + "/lib/b.so";
    const RunEnvironment made = run_environment(wanted, {{"LD_PRELOAD", list}}).value();

    EXPECT_EQ(made.set.at("LD_PRELOAD"), wanted.preload_library + ":/lib/a.so:/lib/b.so") << list;
  }
}

// Under either name, and never silently.
TEST(RunEnvironmentTest, TheUsersChoiceIsKeptAndItsConsequenceReported) {
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

TEST(RunEnvironmentTest, UcxAsksTheDriverForTheTypeOfMemory) {
  EXPECT_EQ(run_environment(options(), {}).value().set.at("UCX_MEMTYPE_CACHE"), "n");
  const Environment mine = {{"UCX_MEMTYPE_CACHE", "y"}};
  EXPECT_EQ(run_environment(options(), mine).value().set.count("UCX_MEMTYPE_CACHE"), 0u);
}

TEST(RunEnvironmentTest, TheLimitMayComeFromTheEnvironment) {
  RunOptions wanted = options();
  EXPECT_EQ(run_environment(wanted, {{"FOREBAY_MEMORY", "2GiB"}}).value().set.at("FOREBAY_MEMORY"),
            "2147483648");
  wanted.memory = "1GiB";
  EXPECT_EQ(run_environment(wanted, {{"FOREBAY_MEMORY", "2GiB"}}).value().set.at("FOREBAY_MEMORY"),
            "1073741824");
  // The option replaces the user's variable, with a message if it allows more.
  wanted.memory = "4GiB";
  const RunEnvironment more = run_environment(wanted, {{"FOREBAY_MEMORY", "2GiB"}}).value();
  EXPECT_EQ(more.set.at("FOREBAY_MEMORY"), "4294967296");
  EXPECT_EQ(more.lines.at(1), "--memory 4GiB is more than FOREBAY_MEMORY=2GiB, and replaces it");
}

TEST(RunEnvironmentTest, RecognisesAnOuterRun) {
  RunOptions wanted = options();
  Environment around =
      run_environment(wanted, {{"LD_PRELOAD", "/lib/other.so"}, {"FOREBAY_MEMORY", "2GiB"}}).value().set;
  wanted.memory = "4GiB";
  const RunEnvironment made = run_environment(wanted, around).value();
  std::string said;
  for (const std::string& line : made.lines) said += line + "\n";

  EXPECT_EQ(made.set.at("LD_PRELOAD"), "/opt/forebay/lib/libforebay-preload.so:/lib/other.so");
  EXPECT_EQ(position(said, "yours"), std::string::npos) << said;
  EXPECT_NE(position(said, "of the forebay run around this one"), std::string::npos) << said;
  EXPECT_NE(
      position(said, "--memory 4GiB is more than the 2.00 GiB that the forebay run around this one allows"),
      std::string::npos)
      << said;
  EXPECT_EQ(made.set.at("FOREBAY_MEMORY"), "2147483648");
  EXPECT_EQ(inherited_records(around), "");
}

TEST(RunEnvironmentTest, APathThatCannotBePreloadedIsRefused) {
  RunOptions wanted = options();
  for (const char* const path :
       {"/opt/my programs/libforebay-preload.so", "/opt/a:b/libforebay-preload.so"}) {
    wanted.preload_library = path;
    EXPECT_EQ(run_environment(wanted, {}).status().code(), StatusCode::kInvalidArgument) << path;
  }
}

TEST(RunEnvironmentTest, SaysWhoseChoiceItKeepsAndWhetherTensorsWouldReplaceIt) {
  const auto first_line = [](const RunOptions& wanted, const Environment& inherited) {
    return run_environment(wanted, inherited).value().lines.at(0);
  };
  const std::string replaced = "; --tensors replaces it";
  const std::string expandable = first_line(
      options(), {{"PYTORCH_ALLOC_CONF", "expandable_segments:True"}, {kRunWithinVariable, "/tmp/outer"}});
  EXPECT_NE(position(expandable, "(yours, kept)"), std::string::npos) << expandable;
  EXPECT_NE(position(expandable, replaced), std::string::npos) << expandable;
  const Environment tensors = {{"PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync"}};
  const std::string kept = first_line(options(), tensors);
  EXPECT_NE(position(kept, "(yours, kept)"), std::string::npos) << kept;
  EXPECT_EQ(position(kept, replaced), std::string::npos) << kept;
  RunOptions wanted = options();
  wanted.tensors = true;
  EXPECT_EQ(position(first_line(wanted, tensors), "in place of"), std::string::npos);
}

TEST(RunEnvironmentTest, LimitsAreRefusedOnlyOutOfTheirRange) {
  RunOptions wanted = options();
  wanted.memory = "2MiB";
  EXPECT_EQ(run_environment(wanted, {{"FOREBAY_MEMORY", "2MiB"}}).value().lines.size(), 1u);
  wanted.memory = "2097151";
  EXPECT_EQ(run_environment(wanted, {}).status().code(), StatusCode::kInvalidArgument);
  // The limit of the outer run alone is nothing to remark.
  const RunEnvironment within =
      run_environment(options(), {{kRunWithinMemoryVariable, "2147483648"}}).value();
  EXPECT_EQ(within.set.at("FOREBAY_MEMORY"), "2147483648");
  EXPECT_EQ(within.lines.size(), 1u);

  wanted = options();
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{kPreloadEventsLeastBytes}, std::uint64_t{kPreloadEventsMostBytes}}) {
    wanted.events = std::to_string(bytes);
    EXPECT_TRUE(run_environment(wanted, {}).ok()) << bytes;
  }
  for (const std::uint64_t bytes :
       {std::uint64_t{kPreloadEventsLeastBytes} - 1, std::uint64_t{kPreloadEventsMostBytes} + 1}) {
    wanted.events = std::to_string(bytes);
    EXPECT_FALSE(run_environment(wanted, {}).ok()) << bytes;
  }
}

TEST(RunEnvironmentTest, ObservesWithoutAnOptionThatChangesSomething) {
  RunOptions wanted = options();
  wanted.mode = PreloadMode::kObserve;
  const RunEnvironment made = run_environment(wanted, {{kRunWithinMemoryVariable, "2147483648"}}).value();
  EXPECT_EQ(made.set.at("FOREBAY_PRELOAD"), "observe");
  EXPECT_EQ(made.set.count("PYTORCH_ALLOC_CONF"), 0u);
  EXPECT_NE(position(made.lines.back(),
                     "the 2.00 GiB that the forebay run around this one allows are not enforced"),
            std::string::npos);
  const auto refused = [](const RunOptions& given, const std::string& text) {
    const Status status = run_environment(given, {}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(position(status.message(), text), std::string::npos) << status.message();
  };
  RunOptions changed = wanted;
  changed.memory = "2GiB";
  refused(changed, "--observe changes nothing, so it cannot keep to --memory 2GiB");
  changed = wanted;
  changed.learned = "file";
  refused(changed, "place blocks by --learned file");
  changed = wanted;
  changed.tensors = true;
  refused(changed, "have PyTorch allocate by --tensors");

  wanted.mode = PreloadMode::kOff;
  EXPECT_EQ(run_environment(wanted, {}).value().lines.size(), 1u);
  EXPECT_EQ(run_environment(wanted, {{kRunWithinMemoryVariable, "2147483648"}}).value().lines.size(), 2u);
}

TEST(RunEnvironmentTest, ReadsTheModeOfTheEnvironment) {
  EXPECT_EQ(inherited_mode({}), PreloadMode::kArena);
  EXPECT_EQ(inherited_mode({{"FOREBAY_PRELOAD", "arena"}}), PreloadMode::kArena);
  EXPECT_EQ(inherited_mode({{"FOREBAY_PRELOAD", "observe"}}), PreloadMode::kObserve);
  EXPECT_EQ(inherited_mode({{"FOREBAY_PRELOAD", "off"}}), PreloadMode::kOff);
  for (const char* const mode : {"arena", "observe", "off"})
    EXPECT_TRUE(run_environment(options(), {{"FOREBAY_PRELOAD", mode}}).ok()) << mode;
  EXPECT_FALSE(run_environment(options(), {{"FOREBAY_PRELOAD", "sometimes"}}).ok());
}

TEST(RunEnvironmentTest, ReadsPyTorchsConfiguration) {
  EXPECT_EQ(torch_granularity(""), TorchGranularity::kSegments);
  EXPECT_EQ(torch_granularity("max_split_size_mb:64"), TorchGranularity::kSegments);
  EXPECT_EQ(torch_granularity("backend:native"), TorchGranularity::kSegments);
  EXPECT_EQ(torch_granularity("backend:cudaMallocAsync"), TorchGranularity::kTensors);
  EXPECT_EQ(torch_granularity("max_split_size_mb:64, backend : cudaMallocAsync"), TorchGranularity::kTensors);
  EXPECT_EQ(torch_granularity("expandable_segments:True"), TorchGranularity::kExpandable);
  EXPECT_EQ(torch_granularity("expandable_segments:true"), TorchGranularity::kExpandable);
  EXPECT_EQ(torch_granularity("expandable_segments:False"), TorchGranularity::kSegments);
  EXPECT_EQ(torch_granularity("garbage,,:,"), TorchGranularity::kSegments);
}

TEST(RunSummaryTest, PrintsEqualMessagesOfSeveralProcessesOnce) {
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
  EXPECT_EQ(lines[2], "refused because memory ran out: 6");
  EXPECT_EQ(lines[3], "problem in a process: cannot make an arena");
}

}  // namespace
}  // namespace forebay::testing
