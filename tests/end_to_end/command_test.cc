// forebay-gpt as a program: its handling of the environment, of odd options, of output paths and of signals.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/end_to_end/small_run.h"
#include "tests/support/process.h"

namespace forebay::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const Words kTrainedModel = {FOREBAY_GPT, "--layers", "1", "--hidden",   "16", "--heads",
                             "2",         "--batch",  "2", "--sequence", "12"};
const Words kQuiet = kTrainedModel + Words{"--quiet"};
const Words kTiny = kQuiet + Words{"--steps", "2"};

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::ptrdiff_t line_count(const std::string& text) {
  return std::count(text.begin(), text.end(), '\n');
}

class Command : public ::testing::Test {
 protected:
  Json report_of(const Words& words, const Process::Variables& variables = {}) {
    const std::string path = directory_ / "report.json";
    const Finished finished = run_program(kTiny + words + Words{"--report", path}, variables);
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
    return Json::parse(read_text(path), nullptr, false);
  }

  TemporaryDirectory directory_;
};

TEST_F(Command, OpensWithItsPlanAndClosesWithItsResultInLinesOf100Columns) {
  const Words words =
      kTrainedModel + Words{"--steps", "2", "--ranks", "2", "--stage", "3", "--offload", "optimizer"};
  const std::string report = directory_ / "report.json";
  const Finished loud = run_program(words + Words{"--report", report});
  const Finished quiet = run_program(words + Words{"--quiet"});

  EXPECT_EQ(loud.exit_code, 0) << loud.output;
  for (const char* label : {"model", "data", "ranks", "device", "sharding", "offload", "memory", "measured",
                            "planned", "digest", "files"}) {
    EXPECT_NE(loud.output.find("\n  " + std::string(label) + " "), std::string::npos) << label << loud.output;
  }
  EXPECT_LT(loud.output.find("\n  memory"), loud.output.find("step ")) << "scripts wait for \"step \"";
  EXPECT_NE(loud.output.find(std::string(Json::parse(read_text(report))["digest"])), std::string::npos);
  std::istringstream lines(loud.output);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_EQ(quiet.output, "");
}

#if defined(_OPENMP)
TEST_F(Command, RefusesFewerThreadsThanWereAskedFor) {
  for (const char* ranks : {"1", "2"}) {
    const Finished finished =
        run_program(kTiny + Words{"--threads", "2", "--ranks", ranks}, {{"OMP_THREAD_LIMIT", "1"}});
    EXPECT_EQ(finished.exit_code, 1) << finished.output;
    EXPECT_NE(finished.output.find("2 compute threads were asked for and OpenMP gives 1"), std::string::npos)
        << finished.output;
    EXPECT_NE(finished.output.find("--threads 1"), std::string::npos) << finished.output;
    EXPECT_EQ(line_count(finished.output), 1) << finished.output;
  }
}

TEST_F(Command, ChoosesNoMoreThreadsThanThereAre) {
  EXPECT_EQ(report_of({}, {{"OMP_THREAD_LIMIT", "1"}}).at("compute_threads"), 1);
}

TEST_F(Command, TrainsToTheSameBitsWhereOpenMpMayLowerTheThreads) {
  const Words words = {"--threads", "3"};
  const Json fixed = report_of(words, {{"OMP_DYNAMIC", "false"}});
  const Json dynamic = report_of(words, {{"OMP_DYNAMIC", "true"}});
  EXPECT_EQ(dynamic.at("digest"), fixed.at("digest"));
}
#endif

TEST_F(Command, ReplacesWhatALinkNamesAndNotTheLink) {
  const std::string target = directory_ / "target.json";
  const std::string link = directory_ / "link.json";
  fs::create_symlink("target.json", link);

  for (const char* found : {"nothing", "a file"}) {
    SCOPED_TRACE(found);
    const Finished finished =
        run_program(kTiny + Words{"--report", link, "--export", directory_ / "weights"});

    EXPECT_EQ(finished.exit_code, 0) << finished.output;
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_EQ(Json::parse(read_text(target)).at("steps"), 2);
  }
  for (const auto& entry : fs::directory_iterator(directory_.path()))
    EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
}

TEST_F(Command, WritesIntoAPipeAndDoesNotReplaceIt) {
  const std::string pipe = directory_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  Process writer(kTiny + Words{"--report", pipe});

  const Json report = Json::parse(read_text(pipe));

  EXPECT_EQ(writer.finish().exit_code, 0);
  EXPECT_EQ(report.at("steps"), 2);
  EXPECT_TRUE(fs::is_fifo(pipe));
}

TEST_F(Command, ANumberBeyond64BitsIsNamedAsItWasGiven) {
  const Finished finished = run_program({FOREBAY_COMMAND, "plan", "--layers", "99999999999999999999"});
  EXPECT_EQ(finished.exit_code, 2) << finished.output;
  EXPECT_NE(finished.output.find("99999999999999999999 is no number of 64 bits"), std::string::npos)
      << finished.output;
}

TEST_F(Command, FailsWhenStandardOutputCannotBeWritten) {
  for (const char* words : {"--help", "--version",
                            "--layers 1 --hidden 16 --heads 2 --sequence 12 --steps 1 "
                            "--quiet --generate 5 --ranks 2"}) {
    const Finished finished =
        run_program({"/bin/sh", "-c", "exec " FOREBAY_GPT " " + std::string(words) + " >/dev/full"});
    EXPECT_EQ(finished.exit_code, 1) << words << finished.output;
    EXPECT_NE(finished.output.find("cannot write to standard output"), std::string::npos) << finished.output;
  }
  const Finished closed =
      run_program({"/bin/sh", "-c", "exec " FOREBAY_GPT " --steps 1000000000 --generate 5 >&-"});
  EXPECT_EQ(closed.exit_code, 1) << closed.output;
  EXPECT_NE(closed.output.find("--generate writes to standard output, which is closed"), std::string::npos)
      << closed.output;
  for (const char* words : {"plan --layers 1 --hidden 16", "--version"}) {
    for (const char* output : {">/dev/full", ">&-"}) {
      const Finished finished =
          run_program({"/bin/sh", "-c", "exec " FOREBAY_COMMAND " " + std::string(words) + " " + output});
      EXPECT_EQ(finished.exit_code, 1) << words << output << finished.output;
      EXPECT_NE(finished.output.find("cannot write to standard output; is it closed"), std::string::npos)
          << finished.output;
    }
  }
}

TEST_F(Command, APipeThatNobodyReadsIsAnError) {
  const std::string pipe = directory_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const Finished finished = run_program(kTiny + Words{"--report", pipe});
  EXPECT_EQ(finished.exit_code, 1);
  EXPECT_NE(finished.output.find("no process reads from it"), std::string::npos) << finished.output;
}

TEST_F(Command, ADamagedLatestHidesNoStateFromARunThatWouldReplaceIt) {
  const std::string state = directory_ / "state";
  ASSERT_EQ(run_program(kTiny + Words{"--save-state", state}).exit_code, 0);
  fs::remove(state + "/latest");
  for (const bool has_loop : {false, true}) {
    if (has_loop) fs::create_symlink("latest", state + "/latest");
    const Finished finished = run_program(kTiny + Words{"--save-state", state});
    EXPECT_EQ(finished.exit_code, 1);
    EXPECT_NE(finished.output.find("holds a saved state already"), std::string::npos) << finished.output;
  }
  const Finished resumed = run_program(kQuiet + Words{"--save-state", state, "--resume", "--steps", "3"});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_FALSE(fs::is_symlink(state + "/latest"));
}

TEST_F(Command, RefusesPlacesItCannotWriteToBeforeItTrains) {
  const std::string file = directory_ / "file";
  const std::string pipe = directory_ / "pipe";
  const std::string state = directory_ / "state";
  const std::string loop = directory_ / "loop";
  const std::string long_path = directory_ / std::string(5000, 'x');
  fs::create_symlink(loop, loop);
  const std::string model = directory_ / "model";
  fs::create_directory(model);
  std::ofstream(model + "/config.json") << "{}";
  std::ofstream(file) << "a text of the user";
  const std::string huge = directory_ / "huge";
  std::ofstream(huge).close();
  fs::resize_file(huge, std::uintmax_t{1} << 42);  // Without blocks.
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  ASSERT_EQ(run_program(kTiny + Words{"--save-state", state}).exit_code, 0);
  const struct {
    Words words;
    std::string named;
  } cases[] = {
      {{"--report", directory_.path()}, "is a directory"},
      {{"--export", model}, "holds a model already"},
      {{"--export", file + "/"}, "cannot make or read the directory"},
      {{"--export", loop + "/"}, "cannot make or read the directory"},
      {{"--export", long_path + "/"}, "xxx..."},
      {{"--export", pipe}, "is not a regular file"},
      {{"--export", "/dev/null"}, "is not a regular file"},
      {{"--export", loop}, "--export: cannot write"},
      {{"--export", file}, "the file was not written by this option, and is not overwritten"},
      {{"--report", file}, "the file was not written by this option, and is not overwritten"},
      {{"--timeline", file}, "the file was not written by this option, and is not overwritten"},
      {{"--report", loop}, "--report: cannot write"},
      {{"--timeline", loop}, "--timeline: cannot write"},
      {{"--export", long_path}, "xxx..."},
      {{"--report", long_path}, "xxx..."},
      {{"--timeline", long_path}, "xxx..."},
      {{"--initial", long_path}, "xxx..."},
      {{"--text", long_path}, "xxx..."},
      {{"--save-state", long_path}, "xxx..."},
      {{"--load-state", long_path}, "xxx..."},
      {{"--report", "/proc/forebay.json"}, "--report: cannot write /proc/forebay.json"},
      {{"--export", "/proc/forebay.safetensors"}, "--export: cannot write /proc/forebay"},
      {{"--save-state", file}, "--save-state"},
      {{"--save-state", "/proc/forebay-state"}, "--save-state"},
      {{"--save-state", directory_ / "no/such/place"}, "--save-state"},
      {{"--save-state", state}, "--resume"},
      {{"--text", pipe}, "is not a regular file"},
      {{"--text", huge}, "has 4.00 TiB, and each rank holds it in the host's memory"},
      {{"--text", "/dev/zero"}, "is not a regular file"},
      {{"--text", "/proc/self/mem"}, "Input/output error"},
      {{"--initial", pipe}, "is not a regular file"},
  };
  for (const auto& c : cases) {
    // A training of this many steps would not end.
    const Finished finished = run_program(kQuiet + Words{"--steps", "1000000000"} + c.words);
    EXPECT_EQ(finished.exit_code, 1) << ::testing::PrintToString(c.words) << finished.output;
    EXPECT_NE(finished.output.find(c.named), std::string::npos) << finished.output;
    EXPECT_EQ(line_count(finished.output), 1) << finished.output;
  }
}

TEST_F(Command, SaysWhenNothingIsLeftToDo) {
  const std::string state = directory_ / "state";
  ASSERT_EQ(run_program(kTiny + Words{"--save-state", state}).exit_code, 0);

  const Finished finished = run_program(kTiny + Words{"--save-state", state, "--load-state", state});

  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(finished.output.find("nothing is left to do"), std::string::npos) << finished.output;
}

TEST_F(Command, WarnsWhenTheLossIsLostAndReportsItAsNull) {
  const std::string path = directory_ / "report.json";

  const Finished finished = run_program(kTiny + Words{"--lr", "1e30", "--clip", "0", "--report", path});

  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(finished.output.find("the loss is not finite since step 2; try a smaller --lr"),
            std::string::npos)
      << finished.output;
  const Json report = Json::parse(read_text(path));
  EXPECT_TRUE(report.at("loss")[0].is_number());
  EXPECT_TRUE(report.at("loss")[1].is_null());
}

TEST_F(Command, WarnsOnceOfABucketThatIsFarTooSmall) {
  const Words words = {FOREBAY_GPT, "--layers",   "2", "--hidden", "256", "--heads", "2", "--batch", "1",
                       "--quiet",   "--sequence", "8", "--ranks",  "2",   "--stage", "2", "--steps", "1"};
  const std::string warning = "EngineOptions::bucket_bytes is 8, so the gradients of a micro-step take ";

  const Finished small = run_program(words + Words{"--bucket", "8"});
  const Finished usual = run_program(words);

  EXPECT_EQ(small.exit_code, 0) << small.output;
  const std::size_t place = small.output.find(warning);
  ASSERT_NE(place, std::string::npos) << small.output;
  EXPECT_EQ(small.output.find(warning, place + 1), std::string::npos) << small.output;
  EXPECT_EQ(usual.output.find("bucket"), std::string::npos) << usual.output;
}

TEST_F(Command, ReportsHowItAccumulates) {
  const Json report = report_of({"--micro-steps", "3", "--accumulate", "local", "--stage", "1"});
  EXPECT_EQ(report.at("micro_steps"), 3);
  EXPECT_EQ(report.at("accumulate"), "local");
}

bool catches(pid_t process, int signal) {
  const std::string status = read_text("/proc/" + std::to_string(process) + "/status");
  const std::string label = "SigCgt:";
  const std::size_t place = status.find(label);
  if (place == std::string::npos) return false;
  return (std::strtoull(status.c_str() + place + label.size(), nullptr, 16) >> (signal - 1) & 1) != 0;
}

// Processor time of the process so far, over all its threads.
double processor_seconds(pid_t process) {
  const std::string stat = read_text("/proc/" + std::to_string(process) + "/stat");
  std::istringstream fields(stat.substr(std::min(stat.size(), stat.rfind(')') + 1)));
  std::string skipped;
  for (int i = 0; i < 11; ++i) fields >> skipped;
  double user = 0;
  double system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// As a script does it: one sender needs no pause.
TEST_F(Command, EndsAtOnceOnTwoSignalsOfOneSender) {
  for (const Words& ranks : {Words{}, Words{"--ranks", "2", "--communicator", "shm"}}) {
    Process process(kTrainedModel + ranks + Words{"--micro-steps", "1000000"});
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    // The launcher takes signals by waiting for them.
    while (ranks.empty() && !catches(process.id(), SIGTERM))
      ASSERT_LT(std::chrono::steady_clock::now(), limit);
    ASSERT_TRUE(process.wait_for_output("bytes of text"));
    std::this_thread::sleep_for(std::chrono::seconds(1));
    process.signal(SIGTERM);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const auto second = std::chrono::steady_clock::now();
    process.signal(SIGTERM);
    EXPECT_EQ(process.finish(std::chrono::seconds(20)).exit_code, 128 + SIGTERM);
    EXPECT_LT(std::chrono::steady_clock::now() - second, std::chrono::seconds(4))
        << "the launcher had to kill it";
  }
}

// A step with this many micro-steps does not end, so only the second signal ends the run. Before the first
// step one signal is enough; the step begins within this much processor time.
TEST_F(Command, EndsAtOnceOnASecondSignal) {
  for (const int number : {SIGINT, SIGTERM}) {
    Process process(kTrainedModel + Words{"--micro-steps", "1000000"});
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!catches(process.id(), number) || processor_seconds(process.id()) < 1) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    process.signal(number);
    // Two signals at once would count as one.
    EXPECT_FALSE(process.wait_for_output("step 1/", std::chrono::seconds(1)));
    EXPECT_TRUE(catches(process.id(), number)) << "one signal was enough";
    process.signal(number);

    EXPECT_EQ(process.finish(std::chrono::seconds(20)).exit_code, 128 + number);
  }
}

}  // namespace
}  // namespace forebay::testing
