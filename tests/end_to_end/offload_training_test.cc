// Whole runs of forebay-gpt with offloaded states: killed and resumed, and on drives that are full, missing
// or read-only.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>

#include "tests/end_to_end/small_run.h"
#include "tests/support/process.h"
#include "tests/support/unwrapped.h"

namespace forebay::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const Words kOffloadedModel = {FOREBAY_GPT,  "--layers", "2",       "--hidden", "48",        "--heads", "3",
                               "--sequence", "24",       "--batch", "2",        "--threads", "1"};

unsigned seed_of_test() {
  const char* const given = std::getenv("FOREBAY_SEED");
  const unsigned seed =
      given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
  std::cout << "FOREBAY_SEED=" << seed << "\n";
  return seed;
}

// Lines of the program itself. The library may have notices, such as one about a low `ulimit -l`.
int error_count(const std::string& output) {
  std::istringstream lines(output);
  int count = 0;
  for (std::string line; std::getline(lines, line);) count += line.rfind("forebay: ", 0) == 0 ? 0 : 1;
  return count;
}

Words communicators() {
  return FOREBAY_TEST_GLOO ? Words{"local", "gloo"} : Words{"local"};
}

class OffloadTraining : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"tmp", "drive", "second"}) fs::create_directory(directory_ / name);
  }
  Process::Variables variables() const {
    return {{"TMPDIR", directory_ / "tmp"}, {"XDG_RUNTIME_DIR", directory_ / "tmp"}};
  }
  Finished run(const Words& words) { return run_program(words, variables()); }
  Json report_of(const Words& words) {
    const std::string path = directory_ / "report.json";
    const Finished finished = run(words + Words{"--report", path, "--quiet"});
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
    std::ifstream file(path);
    return Json::parse(file, nullptr, false);
  }
  Words in_files(const std::string& offload) const {
    return {"--offload", offload, "--offload-tier", "nvme:" + drive() + "," + directory_ / "second"};
  }
  std::string drive() const { return directory_ / "drive"; }
  void expect_nothing_left() {
    for (const char* name : {"drive", "second"})
      EXPECT_TRUE(fs::is_empty(directory_ / name)) << name << " is not empty";
  }

  TemporaryDirectory directory_;
};

TEST_F(OffloadTraining, SaysAtTheStartHowItReachesItsFiles) {
  const Words words = kOffloadedModel + Words{"--ranks", "3", "--stage", "3", "--steps", "3"} +
                      in_files("optimizer+parameters");
  for (const std::string& communicator : communicators()) {
    const Words ours = words + Words{"--communicator", communicator};
    const Finished loud = run(ours);
    const Finished quiet = run(ours + Words{"--quiet"});

    ASSERT_EQ(loud.exit_code, 0) << loud.output;
    const std::string text = unwrapped(loud.output);
    const std::string begin = " offload optimizer+parameters to nvme: ";
    const std::size_t at = text.find(begin);
    ASSERT_NE(at, std::string::npos) << loud.output;
    EXPECT_EQ(text.find(begin, at + 1), std::string::npos) << "once is enough: " << loud.output;
    const std::string line = text.substr(at, text.find(" memory ", at) - at);
    for (const std::string& words_in_it :
         {drive(), directory_ / "second", std::string("blocks of "), std::string("depth ")}) {
      EXPECT_NE(line.find(words_in_it), std::string::npos) << line;
      EXPECT_EQ(line.find(words_in_it), line.rfind(words_in_it)) << line;
    }
    EXPECT_EQ(quiet.output.find("forebay-gpt: "), std::string::npos) << quiet.output;
    expect_nothing_left();
  }
}

// Measured bytes per step are a mean, not a whole number.
TEST_F(OffloadTraining, WritesReportsThatForebayReportReads) {
  const Words words = kOffloadedModel + Words{"--ranks", "2", "--stage", "3", "--steps", "4", "--quiet"};
  Words reports;
  for (const Words& more : {Words{}, in_files("optimizer"), in_files("optimizer+parameters")}) {
    reports.push_back(directory_ / ("report-" + std::to_string(reports.size()) + ".json"));
    const Finished finished = run(words + more + Words{"--report", reports.back()});
    ASSERT_EQ(finished.exit_code, 0) << finished.output;
  }
  const Finished report = run_program(Words{FOREBAY_COMMAND, "report"} + reports, variables());
  EXPECT_EQ(report.exit_code, 0) << report.output;
  EXPECT_NE(report.output.find("optimizer+parameters"), std::string::npos) << report.output;
}

// Otherwise the first opened files would get these numbers, and messages would go into them.
TEST_F(OffloadTraining, ClosedStandardStreamsChangeNothing) {
  const Words words = kOffloadedModel + Words{"--steps", "3", "--ranks", "3", "--stage", "2"};
  for (const std::string& communicator : communicators()) {
    for (const Words& more : {Words{}, in_files("optimizer")}) {
      const Words asked = words + more + Words{"--communicator", communicator};
      const Json expected = report_of(asked);
      const std::string path = directory_ / "closed.json";
      Words closed = {"/bin/sh", "-c", "exec \"$@\" <&- >&- 2>&-", "sh"};
      const Finished finished = run(closed + asked + Words{"--report", path});
      ASSERT_EQ(finished.exit_code, 0);
      std::ifstream file(path);
      const Json report = Json::parse(file, nullptr, false);
      EXPECT_EQ(report.value("digest", ""), expected.value("digest", "none")) << communicator;
      EXPECT_EQ(report["loss"], expected["loss"]) << communicator;
    }
  }
}

TEST_F(OffloadTraining, ADirectoryWhoseNameIsNoTextStillGetsItsReport) {
  const std::string drive = directory_ / "bad\xff";
  if (::mkdir(drive.c_str(), 0755) != 0) GTEST_SKIP() << "the file system has no such names";
  const Json report = report_of(
      kOffloadedModel + Words{"--steps", "2", "--offload", "optimizer", "--offload-tier", "nvme:" + drive});
  EXPECT_EQ(report.value("offload_tier", ""), "nvme");
}

TEST_F(OffloadTraining, WhereATimelineCannotBeWrittenIsFoundForEveryRankAtTheStart) {
  fs::create_directory(directory_ / "timeline.rank-1.json");
  const Finished finished = run(kOffloadedModel + Words{"--ranks", "2", "--communicator", "local",
                                                        "--timeline", directory_ / "timeline.json"});
  EXPECT_EQ(finished.exit_code, 1);
  EXPECT_NE(finished.output.find("--timeline: cannot write"), std::string::npos) << finished.output;
  EXPECT_EQ(finished.output.find("step 1/"), std::string::npos) << finished.output;
}

TEST_F(OffloadTraining, ATimelineThatDoesNotFitCostsNothingElse) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  const std::string path = directory_ / "report.json";
  const Finished finished =
      run(kOffloadedModel + Words{"--steps", "2", "--quiet", "--timeline", "/dev/full", "--report", path});
  EXPECT_EQ(finished.exit_code, 1);
  EXPECT_NE(finished.output.find("all else is there"), std::string::npos) << finished.output;
  EXPECT_TRUE(fs::exists(path));
}

TEST_F(OffloadTraining, ShowsWhatRanWhen) {
  const std::string path = directory_ / "timeline.json";
  const Words words = kOffloadedModel + Words{"--ranks", "2", "--stage", "3", "--steps", "3", "--quiet"} +
                      in_files("optimizer+parameters");
  const Finished finished = run(words + Words{"--timeline", path});
  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  for (int rank = 0; rank < 2; ++rank) {
    std::ifstream file(rank == 0 ? path : directory_ / "timeline.rank-1.json");
    const Json timeline = Json::parse(file, nullptr, false);
    std::map<std::string, int> count;
    for (const Json& event : timeline.value("traceEvents", Json::array())) {
      EXPECT_EQ(event.value("pid", -1), rank);
      const std::string name = event.value("name", "");
      ++count[name.substr(0, name.find(' '))];
    }
    for (const char* what : {"forward", "backward", "fetch", "gather", "reduce", "gradients", "update"})
      EXPECT_GE(count[what], 3) << what << " of rank " << rank;
  }
  EXPECT_NE(run(words + Words{"--timeline", directory_ / "no/such"}).exit_code, 0);
}

TEST_F(OffloadTraining, ResumesAfterAKillAtAnyMomentAndLeavesNothingOnTheDrive) {
  std::mt19937 random(seed_of_test());
  const std::string last = communicators().back();  // Processes, if Gloo is there.
  for (const auto& [communicator, offload] :
       {std::pair<std::string, std::string>("local", "optimizer+parameters"), {last, "optimizer"}}) {
    SCOPED_TRACE(communicator + ", " + offload);
    const Words words =
        kOffloadedModel + Words{"--ranks", "2",  "--stage",        "3",         "--dtype", "bf16",
                                "--steps", "96", "--communicator", communicator};
    const Json whole = report_of(words);
    const std::string state = directory_ / "state";
    fs::remove_all(state);
    const Words saving =
        words + in_files(offload) + Words{"--save-state", state, "--save-every", "6", "--resume"};
    int kills = 0;
    for (int attempt = 0; attempt < 4; ++attempt) {
      Process process(saving, variables());
      // From this line on the files exist; training may have begun.
      ASSERT_TRUE(process.wait_for_output("to nvme: ")) << process.finish().output;
      const int microseconds = std::uniform_int_distribution<int>(0, 150'000)(random);
      const std::timespec moment{0, microseconds * 1000L};
      ::clock_nanosleep(CLOCK_MONOTONIC, 0, &moment, nullptr);
      process.signal_group(SIGKILL);
      const Finished finished = process.finish();
      expect_nothing_left();
      if (finished.exit_code == 0) break;
      ++kills;
      // kill -9 of the launcher leaves its rendezvous directory, by design.
      for (const auto& entry : fs::directory_iterator(directory_ / "tmp")) fs::remove_all(entry.path());
    }
    const Json resumed = report_of(saving);
    EXPECT_GE(kills, 1);
    EXPECT_EQ(resumed.at("digest"), whole.at("digest"));
    const std::size_t first = resumed.at("first_step");
    for (std::size_t i = first; i < whole.at("loss").size(); ++i)
      EXPECT_EQ(resumed.at("loss")[i - first], whole.at("loss")[i]) << "step " << i;
    expect_nothing_left();
  }
}

TEST_F(OffloadTraining, RefusesPlacesItCannotKeepStatesInBeforeItTrains) {
  const std::string file = directory_ / "file";
  std::ofstream(file) << "text";
  // A training of this many steps would not end.
  const Words words = kOffloadedModel + Words{"--quiet", "--steps", "1000000000", "--offload", "optimizer"};
  for (const std::string& place : {directory_ / "missing", file, std::string("/proc")}) {
    for (const std::string ranks : {"1", "2"}) {
      const Finished finished =
          run(words + Words{"--offload-tier", "nvme:" + drive() + "," + place, "--ranks", ranks});
      EXPECT_EQ(finished.exit_code, 1) << finished.output;
      EXPECT_NE(finished.output.find("--offload-tier: cannot write in " + place), std::string::npos)
          << finished.output;
      EXPECT_NE(finished.output.find("give a directory"), std::string::npos) << finished.output;
      EXPECT_EQ(error_count(finished.output), 1) << finished.output;
    }
  }
  expect_nothing_left();
}

// The shell's arguments: a command that sets a limit, and the command to run under it.
Words under(const std::string& command, const Words& words) {
  return Words{"/bin/sh", "-c", command + " && exec \"$@\"", "sh"} + words;
}

// The limit applies to the host device's memory too, so the model needs larger files than that.
TEST_F(OffloadTraining, ALimitOnFilesIsNamedWithItsDirectory) {
  const Words words = {FOREBAY_GPT,
                       "--layers",
                       "24",
                       "--hidden",
                       "96",
                       "--heads",
                       "3",
                       "--sequence",
                       "8",
                       "--batch",
                       "1",
                       "--threads",
                       "1",
                       "--quiet",
                       "--steps",
                       "1000000000",
                       "--stage",
                       "3",
                       "--offload",
                       "optimizer+parameters",
                       "--offload-tier",
                       "nvme:" + drive()};
  const Finished finished = run(under("ulimit -f 49152", words));  // In blocks of 512 bytes.
  EXPECT_EQ(finished.exit_code, 1) << finished.output;
  for (const std::string& said : {drive(), std::string("ulimit -f"), std::string("add a directory")})
    EXPECT_NE(finished.output.find(said), std::string::npos) << finished.output;
  EXPECT_EQ(error_count(finished.output), 1) << finished.output;
  expect_nothing_left();
}

// On drives of any size up to the needed one. Each is a file system in memory, mounted in the run's own
// namespace.
TEST_F(OffloadTraining, ADriveThatIsTooSmallIsNamedAndOneThatIsNotServes) {
  constexpr const char* kUnshare = "/usr/bin/unshare";
  const auto on_drive_of = [&](std::uint64_t bytes, const Words& words) {
    return Words{kUnshare, "--user", "--map-root-user", "--mount"} +
           under("mount -t tmpfs -o size=" + std::to_string(bytes) + " none " + drive(), words);
  };
  if (run(on_drive_of(1 << 20, {"/bin/true"})).exit_code != 0)
    GTEST_SKIP() << "this machine lets no process mount a file system of its own (unshare --user --mount)";
  const Words words = kOffloadedModel + Words{"--ranks",        "2",
                                              "--stage",        "3",
                                              "--dtype",        "bf16",
                                              "--steps",        "4",
                                              "--offload",      "optimizer+parameters",
                                              "--offload-tier", "nvme:" + drive(),
                                              "--communicator", "local"};
  const Json whole = report_of(words);
  std::uint64_t needed = 0;
  for (const Json& rank : whole.at("ranks")) needed += rank.at("file_bytes").get<std::uint64_t>();
  ASSERT_GT(needed, 100'000u);

  std::mt19937_64 random(seed_of_test());
  for (int attempt = 0; attempt < 6; ++attempt) {
    const std::uint64_t bytes = 4096 + random() % (needed - 8192) / 4096 * 4096;
    const Finished finished = run(on_drive_of(bytes, words + Words{"--quiet"}));
    EXPECT_EQ(finished.exit_code, 1) << bytes << " of " << needed << ": " << finished.output;
    for (const std::string& said : {"'" + drive() + "'", std::string("No space left on device"),
                                    std::string("name another directory")}) {
      EXPECT_NE(finished.output.find(said), std::string::npos) << bytes << ": " << finished.output;
    }
  }
  const std::string report = directory_ / "small.json";
  // A file grows by whole granules: 4 units with up to 4 ranges each, on each of 2 ranks.
  const std::uint64_t room = needed + std::uint64_t{4 * 4 * 2} * (64 << 10);
  const Finished enough = run(on_drive_of(room, words + Words{"--quiet", "--report", report}));
  ASSERT_EQ(enough.exit_code, 0) << enough.output;
  std::ifstream file(report);
  EXPECT_EQ(Json::parse(file, nullptr, false).at("digest"), whole.at("digest"));
}

}  // namespace
}  // namespace forebay::testing
