// Whole runs of forebay-gpt: repeated, killed and resumed, with other depths and ranks, with wrong options,
// with a peer that never arrives. No run leaves files or processes behind.

#include "trainer/training.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "forebay/error.h"
#include "output/output_file.h"
#include "output/safetensors.h"
#include "tests/support/let_others_run.h"
#include "tests/support/process.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

Words operator+(Words left, const Words& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

const Words kShape = {"--layers", "2",       "--hidden", "48",        "--heads", "3",      "--sequence",
                      "24",       "--batch", "2",        "--threads", "1",       "--quiet"};
const Words kSmallTraining = [] {
  Words words = kShape;
  words.insert(words.end(), {"--steps", "6"});
  return words;
}();

Json read_json(const std::string& path) {
  std::ifstream file(path);
  return Json::parse(file, nullptr, false);
}

// The program, with a private directory for temporary files, so that the test sees files that it leaves.
class Training : public ::testing::Test {
 protected:
  Process::Variables variables(const Process::Variables& more = {}) const {
    Process::Variables all = more;
    all["TMPDIR"] = directory_ / "tmp";
    all["XDG_RUNTIME_DIR"] = directory_ / "tmp";
    return all;
  }
  void SetUp() override { std::filesystem::create_directory(directory_ / "tmp"); }
  void TearDown() override {
    Words left;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_ / "tmp"))
      left.push_back(entry.path());
    EXPECT_TRUE(left.empty()) << "left behind: " << ::testing::PrintToString(left);
  }

  Finished run(const Words& words, const Process::Variables& more = {}) {
    return run_program(Words{FOREBAY_GPT} + words, variables(more));
  }
  void lose_a_rank(const Words& more);
  Json report_of(const Words& words) {
    const std::string path = directory_ / "report.json";
    const Finished finished = run(words + Words{"--report", path});
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
    return read_json(path);
  }
  // In this process, over `local`.
  static gpt::TrainingReport train(const Words& words) {
    const gpt::ParsedCommand parsed = gpt::parse_command(words);
    return gpt::run_training(gpt::resolve_options(*parsed.options));
  }

  TemporaryDirectory directory_;
};

TEST_F(Training, RepeatsItsBits) {
  const Words words = kSmallTraining + Words{"--ranks", "3", "--stage", "3", "--dtype", "bf16"};
  const Json first = report_of(words);
  const Json second = report_of(words);
  EXPECT_EQ(first.at("digest"), second.at("digest"));
  EXPECT_EQ(first.at("loss"), second.at("loss"));
}

TEST_F(Training, GivesTheLossesOfOneRankWithAllTheSamples) {
  const Words rest = {"--layers", "2",       "--hidden", "48",        "--heads", "3",       "--sequence",
                      "24",       "--steps", "20",       "--threads", "1",       "--quiet", "--communicator",
                      "local"};
  const gpt::TrainingReport one = train(rest + Words{"--ranks", "1", "--batch", "12"});
  for (const char* ranks : {"3", "4"}) {
    const std::string batch = std::to_string(12 / std::stoi(ranks));
    const gpt::TrainingReport several =
        train(rest + Words{"--ranks", ranks, "--batch", batch, "--stage", "2"});
    ASSERT_EQ(several.loss.size(), one.loss.size());
    for (std::size_t i = 0; i < one.loss.size(); ++i) {
      EXPECT_NEAR(several.loss[i] / one.loss[i], 1.0, 2e-5) << "step " << i << " with " << ranks << " ranks";
    }
  }
  EXPECT_LT(one.loss.back(), one.loss.front() - 0.5) << "it does not learn";
}

// In the first step the gradients are the same with and without decay.
TEST_F(Training, BiasesAndNormsDoNotDecay) {
  const auto weights = [&](const char* decay) {
    const std::string file = directory_ / (std::string("decay-") + decay + ".safetensors");
    train(kShape + Words{"--quiet", "--communicator", "local", "--ranks", "1", "--steps", "1",
                         "--weight-decay", decay, "--export", file});
    return std::make_unique<gpt::SafetensorsReader>(file);
  };
  const auto without = weights("0");
  const auto with = weights("0.5");
  int decayed = 0;
  for (const auto& [name, tensor] : without->tensors()) {
    const bool is_equal = with->read(name) == without->read(name);
    EXPECT_EQ(is_equal, tensor.shape.size() == 1) << name;
    decayed += is_equal ? 0 : 1;
  }
  EXPECT_GT(decayed, 4);
}

TEST_F(Training, KeepsBoundedPoolsWhateverTheDepth) {
  for (const char* stage : {"0", "1", "2", "3"}) {
    const Words rest = {"--ranks", "3",       "--stage",    stage, "--hidden", "48",
                        "--heads", "3",       "--sequence", "24",  "--batch",  "2",
                        "--steps", "2",       "--threads",  "1",   "--quiet",  "--communicator",
                        "local",   "--dtype", "bf16"};
    const gpt::TrainingReport shallow = train(rest + Words{"--layers", "2"});
    const gpt::TrainingReport deep = train(rest + Words{"--layers", "8"});
    EXPECT_EQ(shallow.ranks[0].peak_bytes.gathered, deep.ranks[0].peak_bytes.gathered) << "stage " << stage;
    EXPECT_EQ(shallow.ranks[0].peak_bytes.buckets, deep.ranks[0].peak_bytes.buckets) << "stage " << stage;
    EXPECT_GT(deep.ranks[0].peak_bytes.model_states(), 2 * shallow.ranks[0].peak_bytes.model_states());
  }
}

TEST_F(Training, HoldsTheBytesOfTheFormulas) {
  constexpr double kRanks = 4;
  for (const bool half : {false, true}) {
    for (int stage = 0; stage < 4; ++stage) {
      const gpt::TrainingReport report = train({"--ranks",    "4",
                                                "--stage",    std::to_string(stage),
                                                "--dtype",    half ? "bf16" : "fp32",
                                                "--layers",   "2",
                                                "--hidden",   "192",
                                                "--heads",    "3",
                                                "--sequence", "16",
                                                "--batch",    "1",
                                                "--steps",    "2",
                                                "--threads",  "1",
                                                "--quiet",    "--communicator",
                                                "local"});
      const double psi = static_cast<double>(report.parameters);
      const double element = half ? 2 : 4;
      const double optimizer = half ? 12 : 8;
      const double parameters = element * psi / (stage >= 3 ? kRanks : 1);
      const double gradients = element * psi / (stage >= 2 ? kRanks : 1);
      const double states = optimizer * psi / (stage >= 1 ? kRanks : 1);
      const double wire = element * psi * (kRanks - 1) / kRanks;
      for (const gpt::RankReport& rank : report.ranks) {
        EXPECT_NEAR(static_cast<double>(rank.peak_bytes.parameters) / parameters, 1.0, 0.02)
            << "stage " << stage;
        EXPECT_NEAR(static_cast<double>(rank.peak_bytes.gradients) / gradients, 1.0, 0.02)
            << "stage " << stage;
        EXPECT_NEAR(static_cast<double>(rank.peak_bytes.optimizer) / states, 1.0, 0.02) << "stage " << stage;
        for (const double bytes : {rank.sent_bytes_per_step, rank.received_bytes_per_step}) {
          if (stage <= 2) {
            EXPECT_NEAR(bytes / (2 * wire), 1.0, 0.02) << "stage " << stage;
          } else {
            EXPECT_LE(bytes / (3 * wire), 1.02);
          }
        }
      }
    }
  }
}

TEST_F(Training, ResumesAfterAKillAtAnyMomentWithTheSameBits) {
  const char* given = std::getenv("FOREBAY_SEED");
  const unsigned seed =
      given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
  std::cout << "FOREBAY_SEED=" << seed << "\n";
  std::mt19937 random(seed);
  const Words words = {"--ranks", "3",        "--stage", "2",       "--dtype",   "fp16",       "--layers",
                       "2",       "--hidden", "48",      "--heads", "3",         "--sequence", "24",
                       "--batch", "2",        "--steps", "40",      "--threads", "1"};
  const Json whole = report_of(words + Words{"--quiet"});
  const std::string state = directory_ / "state";
  const Words saving =
      words +
      Words{"--save-state", state, "--save-every", "1", "--resume", "--report", directory_ / "report.json"};
  int kills = 0;
  for (int attempt = 0; attempt < 6; ++attempt) {
    Process process(Words{FOREBAY_GPT} + saving, variables());
    // Long enough to save a state; the kill hits any point of it.
    ASSERT_TRUE(process.wait_for_output("step ")) << "no progress line";
    const int microseconds = std::uniform_int_distribution<int>(0, 120'000)(random);
    std::timespec moment{0, microseconds * 1000L};
    ::clock_nanosleep(CLOCK_MONOTONIC, 0, &moment, nullptr);
    process.signal_group(SIGKILL);
    const Finished finished = process.finish();
    if (finished.exit_code == 0) break;
    ++kills;
    // kill -9 of the launcher leaves its rendezvous directory, by design, until the next reboot.
    for (const auto& entry : std::filesystem::directory_iterator(directory_ / "tmp"))
      std::filesystem::remove_all(entry.path());
  }
  const Finished last = run(saving + Words{"--quiet"});
  ASSERT_EQ(last.exit_code, 0) << last.output;
  EXPECT_GE(kills, 1);
  const Json resumed = read_json(directory_ / "report.json");
  EXPECT_EQ(resumed.at("digest"), whole.at("digest"));
  const std::size_t first = resumed.at("first_step");
  for (std::size_t i = first; i < whole.at("loss").size(); ++i)
    EXPECT_EQ(resumed.at("loss")[i - first], whole.at("loss")[i]);
}

TEST_F(Training, EndsCleanlyOnCtrlCOrTerminationAndSavesWhereAsked) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string state = directory_ / ("state-" + std::to_string(signal));
    Process process(
        Words{FOREBAY_GPT, "--ranks",   "3",  "--stage",      "1",  "--steps",    "100000", "--layers",
              "1",         "--hidden",  "48", "--heads",      "3",  "--sequence", "24",     "--batch",
              "2",         "--threads", "1",  "--save-state", state},
        variables());
    ASSERT_TRUE(process.wait_for_output("step "));
    process.signal_group(signal);  // A terminal signals the whole process group.
    const Finished finished = process.finish();
    EXPECT_EQ(finished.exit_code, 128 + signal) << finished.output;
    EXPECT_NE(finished.output.find("state saved in"), std::string::npos) << finished.output;
    EXPECT_TRUE(std::filesystem::exists(state + "/latest"));
    EXPECT_EQ(::kill(-process.id(), 0), -1) << "processes are left";
  }
}

// The child of `launcher` that is rank `rank`, or 0.
pid_t find_rank(pid_t launcher, int rank) {
  const std::string wanted = "FOREBAY_RANK=" + std::to_string(rank);
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream stat(entry.path() / "stat");
    std::string text((std::istreambuf_iterator<char>(stat)), {});
    const std::size_t end = text.rfind(')');
    pid_t parent = 0;
    if (end == std::string::npos || std::sscanf(text.c_str() + end + 1, " %*c %d", &parent) != 1 ||
        parent != launcher)
      continue;
    std::ifstream environment(entry.path() / "environ");
    for (std::string variable; std::getline(environment, variable, '\0');) {
      if (variable == wanted) return static_cast<pid_t>(std::stol(name));
    }
  }
  return 0;
}

// The message of the remaining ranks about the killed one, by --communicator.
std::vector<std::pair<std::string, std::string>> words_for_the_killed() {
  std::vector<std::pair<std::string, std::string>> words{{"shm", " died"}};
  if (FOREBAY_TEST_GLOO) words.emplace_back("gloo", " closed the connection");
  return words;
}

TEST_F(Training, EndsEveryRankWhenOneIsKilled) {
  for (const auto& [communicator, fate] : words_for_the_killed()) {
    for (int rank = 0; rank < 3; ++rank) {
      SCOPED_TRACE(communicator + ": rank " + std::to_string(rank) + " is killed");
      Process process(
          Words{FOREBAY_GPT, "--ranks",   "3",  "--stage",    "3",  "--steps",        "100000",    "--layers",
                "1",         "--hidden",  "48", "--heads",    "3",  "--sequence",     "24",        "--batch",
                "2",         "--threads", "1",  "--deadline", "20", "--communicator", communicator},
          variables());
      ASSERT_TRUE(process.wait_for_output("step "));
      const pid_t child = find_rank(process.id(), rank);
      ASSERT_GT(child, 0);

      ::kill(child, SIGKILL);

      const Finished finished = process.finish();
      EXPECT_EQ(finished.exit_code, 128 + SIGKILL);
      EXPECT_EQ(::kill(-process.id(), 0), -1) << "processes are left";
      // One of the remaining ranks prints it, in one line.
      const std::string named = ": rank " + std::to_string(rank) + fate;
      const std::size_t place = finished.output.find(named);
      ASSERT_NE(place, std::string::npos) << finished.output;
      EXPECT_EQ(finished.output.find(fate, place + named.size()), std::string::npos) << finished.output;
      // Another line has the facts that only the launcher knows.
      EXPECT_NE(finished.output.find("rank " + std::to_string(rank) + " (process " + std::to_string(child) +
                                     ") was ended by signal 9"),
                std::string::npos)
          << finished.output;
    }
  }
}

// With all-reduce groups, other ranks wait for the ranks that wait for the stopped one.
TEST_F(Training, NamesAStoppedRankThroughTheGroupsThatWaitForIt) {
  const Words grids[] = {{"--stage", "1", "--tensor-parallel", "2"},
                         {"--stage", "3", "--order", "group:2", "--shard-within", "group"}};
  std::size_t grid = 0;
  for (const auto& [communicator, unused] : words_for_the_killed()) {
    for (const int rank : {0, 3}) {
      SCOPED_TRACE(communicator + ": rank " + std::to_string(rank) + " is stopped");
      Process process(Words{FOREBAY_GPT, "--ranks",        "4",         "--steps",   "100000", "--layers",
                            "1",         "--hidden",       "48",        "--heads",   "4",      "--batch",
                            "2",         "--sequence",     "24",        "--threads", "1",      "--deadline",
                            "4",         "--communicator", communicator} +
                          grids[grid++ % 2],
                      variables());
      ASSERT_TRUE(process.wait_for_output("step "));
      const pid_t child = find_rank(process.id(), rank);
      ASSERT_GT(child, 0);

      ::kill(child, SIGSTOP);

      const Finished finished = process.finish();
      EXPECT_EQ(finished.exit_code, 75) << finished.output;
      const bool named =
          finished.output.find(": rank " + std::to_string(rank) + " did not join") != std::string::npos ||
          finished.output.find(": rank " + std::to_string(rank) + " did not finish") != std::string::npos;
      EXPECT_TRUE(named) << finished.output;
    }
  }
}

TEST_F(Training, ARankThatCannotJoinSaysWhyWhicheverItIs) {
  if (!FOREBAY_TEST_GLOO) GTEST_SKIP() << "this forebay was built without Gloo (libgloo-dev)";
  const Finished finished =
      run({"--steps", "1"},
          {{"FOREBAY_RANK", "1"}, {"FOREBAY_SIZE", "2"}, {"FOREBAY_STORE", "tcp://127.0.0.1:1/there"}});
  EXPECT_EQ(finished.exit_code, 1);
  EXPECT_NE(finished.output.find("forebay-gpt: "), std::string::npos) << "it said nothing";
}

TEST_F(Training, ARankThatNothingNumbersDoesNotTrainAlone) {
  const Finished finished = run({"--steps", "1"}, {{"PMI_RANK", "0"}, {"FOREBAY_STORE", directory_.path()}});
  EXPECT_EQ(finished.exit_code, 1) << finished.output;
  EXPECT_NE(finished.output.find("nothing says which rank this process is"), std::string::npos)
      << finished.output;
}

TEST_F(Training, RefusesABudgetOneChunkUnderThePlan) {
  const Words words = {"--ranks", "3",  "--stage",   "1", "--steps", "2",
                       "--batch", "16", "--threads", "1", "--quiet"};
  const std::uint64_t reserved = report_of(words).at("ranks")[0].at("planned_reserved_bytes");
  EXPECT_EQ(run(words + Words{"--memory", std::to_string(reserved)}).exit_code, 0);
  const Finished refused = run(words + Words{"--memory", std::to_string(reserved - (2u << 20))});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_NE(refused.output.find("the largest parts are activations "), std::string::npos) << refused.output;
  EXPECT_NE(refused.output.find("a smaller batch or sequence"), std::string::npos) << refused.output;
  EXPECT_EQ(std::count(refused.output.begin(), refused.output.end(), '\n'), 1) << refused.output;
}

TEST_F(Training, AnswersBadInputWithOneClearLine) {
  std::ofstream(directory_ / "short.txt") << "abc";
  std::ofstream(directory_ / "bad.safetensors") << "garbage that is no header at all";
  std::filesystem::create_directory(directory_ / "empty");
  struct {
    Words words;
    int exit_code;
    std::string named;
  } const cases[] = {
      {{"--text", directory_ / "nothing.txt"}, 1, "nothing.txt"},
      {{"--text", directory_ / "short.txt"}, 1, "--sequence"},
      {{"--batch", "0"}, 2, "--batch"},
      {{"--heads", "5"}, 2, "--heads"},
      {{"--stage", "4"}, 2, "--stage"},
      {{"--ranks", "0"}, 2, "--ranks"},
      {{"--micro-steps", "0"}, 2, "--micro-steps"},
      {{"--dtype", "int8"}, 2, "--dtype"},
      {{"--stage", "2", "--accumulate", "local", "--micro-steps", "2"}, 2, "accumulate"},
      {{"--memory", "12 parsecs"}, 2, "--memory"},
      {{"--bucket", "-1"}, 2, "--bucket"},
      {{"--no-such-option"}, 2, "--no-such-option"},
      {{"--initial", directory_ / "bad.safetensors"}, 1, "bad.safetensors"},
      {{"--initial", directory_ / "none.safetensors"}, 1, "none.safetensors"},
      {{"--load-state", directory_ / "empty"}, 1, "saved state"},
      {{"--report", directory_ / "no/such/place.json"}, 1, "place.json"},
      {{"--export", directory_ / "no/such/place.safetensors"}, 1, "place.safetensors"},
      {{"--device", "gpu"}, 2, "--device"},
      {{"--order", "group:5"}, 2, "--order group:5"},
  };
  for (const auto& c : cases) {
    for (const char* ranks : {"1", "3"}) {
      if (c.words[0] == "--ranks" && std::string(ranks) != "1") continue;
      const Words words = Words{"--steps", "2", "--quiet"} +
                          (c.words[0] == "--ranks" ? Words{} : Words{"--ranks", ranks}) + c.words;
      const Finished finished = run(words);
      EXPECT_EQ(finished.exit_code, c.exit_code) << ::testing::PrintToString(words) << finished.output;
      EXPECT_NE(finished.output.find(c.named), std::string::npos)
          << ::testing::PrintToString(words) << finished.output;
      EXPECT_EQ(std::count(finished.output.begin(), finished.output.end(), '\n'), 1) << finished.output;
    }
  }
}

TEST_F(Training, AFileAtItsLimitIsAnError) {
  // The host's device memory is a file too.
  const std::string command = "ulimit -f 64; exec " + std::string(FOREBAY_GPT) + " --steps 1 --quiet";
  const Finished finished = testing::run_program({"/bin/sh", "-c", command}, variables());
  EXPECT_EQ(finished.exit_code, 1) << finished.output;
  EXPECT_NE(finished.output.find("File too large"), std::string::npos) << finished.output;
  EXPECT_NE(finished.output.find("ulimit -f"), std::string::npos) << finished.output;
}

TEST_F(Training, AnOutputAtItsLimitIsAnErrorThatNamesIt) {
  const std::string path = directory_ / "report.json";
  struct rlimit before {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = before;
  small.rlim_cur = 65536;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message = "no error";
  try {
    gpt::write_file(path, std::string(1 << 20, 'x'));
  } catch (const Error& error) {
    message = error.status().message();
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find(path), std::string::npos) << message;
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_NE(message.find("ulimit -f"), std::string::npos) << message;
}

TEST_F(Training, CtrlCBeforeTheFirstStepEndsAtOnce) {
  const std::string store = directory_ / "store";
  std::filesystem::create_directory(store);
  std::filesystem::permissions(store, std::filesystem::perms::owner_all);
  for (const int signal : {SIGINT, SIGTERM}) {
    // Its peer never arrives.
    Process process(Words{FOREBAY_GPT} + kSmallTraining,
                    variables({{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "2"}, {"FOREBAY_STORE", store}}));
    ASSERT_TRUE(process.wait_for_output("rank 1 did not join yet")) << "no word of whom it waits for";
    process.signal(signal);
    EXPECT_EQ(process.finish().exit_code, 128 + signal);
  }
}

void await_state(const std::string& directory) {
  const auto has_saved = [&] { return std::filesystem::exists(directory + "/latest"); };
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (!has_saved() && std::chrono::steady_clock::now() < limit) testing::let_others_run();
  ASSERT_TRUE(has_saved());
}

// The same losses and weights as a run of three ranks to the saved step and of two ranks from there.
// With --save-async, the rank may be lost while a state is being written.
void Training::lose_a_rank(const Words& more) {
  const Words words =
      kShape + Words{"--matmul", "plain", "--stage", "3", "--dtype", "bf16", "--communicator", "shm"};
  const std::string state = directory_ / "state";
  // More steps than it makes before the kill, fewer than take long.
  const Words steps = {"--steps", "400"};
  const Words elastic = words + steps + more +
                        Words{"--ranks", "3",        "--save-state", state,      "--save-every",
                              "20",      "--resume", "--elastic",    "--report", directory_ / "elastic.json"};
  Process process(Words{FOREBAY_GPT} + elastic, variables());
  await_state(state);
  const pid_t child = find_rank(process.id(), 1);
  ASSERT_GT(child, 0);

  ::kill(child, SIGKILL);

  const Finished finished = process.finish();
  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(finished.output.find("--elastic: this run goes on with 2 ranks from the last state in "),
            std::string::npos)
      << finished.output;
  const Json report = read_json(directory_ / "elastic.json");
  EXPECT_EQ(report.at("world_size"), 2);
  const std::size_t first = report.at("first_step");
  EXPECT_GT(first, 0u);
  EXPECT_EQ(first % 20, 0u);
  EXPECT_EQ(report.at("steps"), 400);

  const std::string before = directory_ / "before";
  const Finished three =
      run(words + Words{"--ranks", "3", "--steps", std::to_string(first), "--save-state", before});
  ASSERT_EQ(three.exit_code, 0) << three.output;
  const Json two = report_of(words + steps + Words{"--ranks", "2", "--load-state", before});
  EXPECT_EQ(report.at("digest"), two.at("digest"));
  EXPECT_EQ(report.at("loss"), two.at("loss"));
}

TEST_F(Training, ElasticRanksThatAreLeftGoOnFromTheLastState) {
  lose_a_rank({});
}

TEST_F(Training, ElasticRanksGoOnFromAStateThatWasSavedInTheBackground) {
  lose_a_rank({"--save-async"});
}

TEST_F(Training, ElasticRanksThatAreLeftBeginAgainWhereNoStateIsSaved) {
  Process process(
      Words{FOREBAY_GPT} + kShape +
          Words{"--matmul", "plain", "--ranks", "3", "--steps", "400", "--save-state", directory_ / "state",
                "--resume", "--elastic", "--report", directory_ / "elastic.json"},
      variables());
  pid_t child = 0;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while ((child = find_rank(process.id(), 2)) == 0 && std::chrono::steady_clock::now() < limit)
    testing::let_others_run();
  ASSERT_GT(child, 0);

  ::kill(child, SIGKILL);

  const Finished finished = process.finish();
  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(
      finished.output.find("--elastic: this run begins again with 2 ranks, for no state is saved yet in "),
      std::string::npos)
      << finished.output;
  const Json report = read_json(directory_ / "elastic.json");
  EXPECT_EQ(report.at("world_size"), 2);
  EXPECT_EQ(report.at("first_step"), 0);
}

// The others end at the deadline, and the rank that was late ends by itself.
void stop_until_others_end(const Process& process) {
  const pid_t late = find_rank(process.id(), 1);
  ASSERT_GT(late, 0);
  const pid_t other = find_rank(process.id(), 0);
  ::kill(late, SIGSTOP);
  while (other > 0 && ::kill(other, 0) == 0) testing::let_others_run();
  ::kill(late, SIGCONT);
}

TEST_F(Training, ElasticRanksGoOnAllWhereOneWasLate) {
  const std::string state = directory_ / "state";
  Process process(Words{FOREBAY_GPT} + kShape +
                      Words{"--matmul",       "plain", "--stage",      "3",
                            "--communicator", "shm",   "--ranks",      "3",
                            "--steps",        "400",   "--save-state", state,
                            "--save-every",   "20",    "--resume",     "--elastic",
                            "--deadline",     "2",     "--report",     directory_ / "elastic.json"},
                  variables());
  await_state(state);

  stop_until_others_end(process);

  const Finished finished = process.finish();
  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(finished.output.find("--elastic: this run goes on with 3 ranks from the last state in "),
            std::string::npos)
      << finished.output;
  EXPECT_EQ(read_json(directory_ / "elastic.json").at("world_size"), 3);
}

// A rank that is asked to end is not lost, and the run ends with it.
TEST_F(Training, ElasticRanksEndWhereOneIsAskedTo) {
  const std::string state = directory_ / "state";
  Process process(Words{FOREBAY_GPT} + kShape +
                      Words{"--matmul", "plain", "--communicator", "shm", "--ranks", "3", "--steps", "100000",
                            "--save-state", state, "--save-every", "20", "--resume", "--elastic"},
                  variables());
  await_state(state);
  const pid_t child = find_rank(process.id(), 1);
  ASSERT_GT(child, 0);

  ::kill(child, SIGTERM);

  const Finished finished = process.finish();
  EXPECT_EQ(finished.exit_code, 128 + SIGTERM) << finished.output;
  EXPECT_EQ(finished.output.find("--elastic"), std::string::npos) << finished.output;
}

// The ranks that are left are too few for the model's parts, so the run ends with the code of the loss.
TEST_F(Training, ElasticRanksThatCannotBeArrangedEnd) {
  const std::string state = directory_ / "state";
  Process process(Words{FOREBAY_GPT} + kShape +
                      Words{"--matmul", "plain", "--ranks", "3", "--tensor-parallel", "3", "--steps",
                            "100000", "--save-state", state, "--resume", "--elastic"},
                  variables());
  pid_t child = 0;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while ((child = find_rank(process.id(), 2)) == 0 && std::chrono::steady_clock::now() < limit)
    testing::let_others_run();
  ASSERT_GT(child, 0);

  ::kill(child, SIGKILL);

  const Finished finished = process.finish();
  EXPECT_EQ(finished.exit_code, 128 + SIGKILL) << finished.output;
  EXPECT_NE(finished.output.find("--elastic: of 3 ranks, 2 are left, and cannot be arranged: "),
            std::string::npos)
      << finished.output;
}

TEST_F(Training, ElasticNeedsAStateAndProcesses) {
  const std::string state = directory_ / "state";
  const Finished stateless = run(kSmallTraining + Words{"--ranks", "2", "--elastic"});
  EXPECT_EQ(stateless.exit_code, 2);
  EXPECT_NE(stateless.output.find("add --resume"), std::string::npos) << stateless.output;
  const Finished threads = run(kSmallTraining + Words{"--ranks", "2", "--communicator", "local",
                                                      "--save-state", state, "--resume", "--elastic"});
  EXPECT_EQ(threads.exit_code, 1);
  EXPECT_NE(threads.output.find("threads of one"), std::string::npos) << threads.output;
}

TEST_F(Training, RanksEndWithALauncherThatIsKilled) {
  const std::string store = directory_ / "store";
  // A shell starts them, as mpirun does.
  std::string command;
  for (const char* rank : {"0", "1"}) {
    command += "OMPI_COMM_WORLD_RANK=" + std::string(rank) +
               " OMPI_COMM_WORLD_SIZE=2 FOREBAY_STORE=" + store + " " + FOREBAY_GPT +
               " --steps 100000 --layers 1 --hidden 48 --heads 3 --sequence 24 --batch 2 --threads 1 & ";
  }
  Process process({"/bin/sh", "-c", command + "wait"}, variables());
  ASSERT_TRUE(process.wait_for_output("step "));

  process.signal(SIGKILL);

  const Finished finished = process.finish();
  EXPECT_EQ(finished.exit_code, 128 + SIGKILL);
  EXPECT_NE(finished.output.find("stopped after step"), std::string::npos) << finished.output;
}

TEST_F(Training, ExportsWhatItInitialises) {
  const std::string initial = directory_ / "initial.safetensors";
  const std::string again = directory_ / "again.safetensors";
  ASSERT_EQ(run(kShape + Words{"--steps", "0", "--export", initial}).exit_code, 0);
  ASSERT_EQ(run(kShape + Words{"--steps", "0", "--seed", "5", "--initial", initial, "--export", again,
                               "--ranks", "3", "--stage", "3"})
                .exit_code,
            0);
  const auto bytes_of = [](const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  EXPECT_EQ(bytes_of(initial), bytes_of(again));
  // Every truncated file is refused.
  const std::string whole = bytes_of(initial);
  for (const std::size_t length :
       {std::size_t{0}, std::size_t{7}, std::size_t{100}, whole.size() / 2, whole.size() - 1}) {
    std::ofstream(again, std::ios::binary) << whole.substr(0, length);
    const Finished finished = run(kSmallTraining + Words{"--initial", again});
    EXPECT_EQ(finished.exit_code, 1) << length;
    EXPECT_NE(finished.output.find("again.safetensors"), std::string::npos) << finished.output;
  }
}

#if FOREBAY_TEST_GLOO
TEST_F(Training, NamesTheOptionInWhichRanksDiffer) {
  const std::string store = directory_ / "store";
  const auto start = [&](int rank, const Words& more) {
    return std::make_unique<Process>(
        Words{FOREBAY_GPT} + kSmallTraining + more,
        variables({{"FOREBAY_RANK", std::to_string(rank)}, {"FOREBAY_SIZE", "3"}, {"FOREBAY_STORE", store}}));
  };
  std::filesystem::create_directory(store);
  std::filesystem::permissions(store, std::filesystem::perms::owner_all);
  std::vector<std::unique_ptr<Process>> ranks;
  ranks.push_back(start(0, {}));
  ranks.push_back(start(1, {"--lr", "0.5"}));
  ranks.push_back(start(2, {}));
  std::string all;
  for (const auto& rank : ranks) {
    const Finished finished = rank->finish();
    EXPECT_EQ(finished.exit_code, 1) << finished.output;
    all += finished.output;
  }
  EXPECT_NE(all.find("--lr"), std::string::npos) << all;
  EXPECT_NE(all.find("rank 1"), std::string::npos) << all;
  EXPECT_NE(all.find("ranks 0, 2"), std::string::npos) << all;
}

TEST_F(Training, GivesUpOnAPeerThatNeverComes) {
  const std::string store = directory_ / "store";
  std::filesystem::create_directory(store);
  std::filesystem::permissions(store, std::filesystem::perms::owner_all);
  const Finished finished = run(kSmallTraining + Words{"--deadline", "2"},
                                {{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "2"}, {"FOREBAY_STORE", store}});
  EXPECT_EQ(finished.exit_code, 75) << "a launcher may try again";
  EXPECT_NE(finished.output.find("rank 1"), std::string::npos) << finished.output;
}

// One of the remaining ranks prints the message, for any numbers in the store's address.
TEST_F(Training, ARankWhoseStoreDoesNotAnswerSaysSo) {
  if (!FOREBAY_TEST_GLOO) GTEST_SKIP() << "this forebay was built without Gloo (libgloo-dev)";
  const int reserved = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(reserved, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  socklen_t length = sizeof(address);
  ASSERT_EQ(::getsockname(reserved, reinterpret_cast<sockaddr*>(&address), &length), 0);
  ::close(reserved);
  std::vector<std::unique_ptr<Process>> ranks;
  for (const std::string rank : {"0", "1"}) {
    ranks.push_back(std::make_unique<Process>(
        Words{FOREBAY_GPT} + kSmallTraining + Words{"--deadline", "4", "--join-deadline", "60"},
        variables({{"FOREBAY_RANK", rank},
                   {"FOREBAY_SIZE", "3"},
                   {"FOREBAY_SECRET", std::string(64, 's')},
                   {"FOREBAY_STORE", "tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port)) + "/1"}})));
  }
  ASSERT_TRUE(ranks[0]->wait_for_output("rank 2 did not join yet"));
  ranks[0]->signal(SIGSTOP);

  const Finished finished = ranks[1]->finish();
  ranks[0]->signal(SIGKILL);
  EXPECT_EQ(finished.exit_code, 75);
  EXPECT_NE(finished.output.find("rank 0, which serves the store"), std::string::npos) << finished.output;
}

// For any lost ranks, and for any of them that the others have noticed.
TEST_F(Training, RanksThatAreLeftSayWhyWhenSeveralAreKilled) {
  for (const std::string communicator : {"shm", "gloo"}) {
    if (communicator == "gloo" && !FOREBAY_TEST_GLOO) continue;
    for (const std::set<std::size_t>& lost :
         {std::set<std::size_t>{0, 1}, std::set<std::size_t>{0, 1, 2}, std::set<std::size_t>{1, 3}}) {
      SCOPED_TRACE(communicator);
      const TemporaryDirectory store;
      std::vector<std::unique_ptr<Process>> ranks;
      for (int rank = 0; rank < 4; ++rank) {
        ranks.push_back(std::make_unique<Process>(
            Words{FOREBAY_GPT, "--layers", "1", "--hidden", "48", "--heads", "3", "--batch", "2", "--threads",
                  "1", "--steps", "1000000", "--communicator", communicator},
            variables({{"FOREBAY_RANK", std::to_string(rank)},
                       {"FOREBAY_SIZE", "4"},
                       {"FOREBAY_STORE", store / "store"}})));
      }
      ASSERT_TRUE(ranks[0]->wait_for_output("step "));
      for (const std::size_t rank : lost) ranks[rank]->signal(SIGKILL);
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        const Finished finished = ranks[rank]->finish();
        if (lost.contains(rank)) continue;
        EXPECT_EQ(finished.exit_code, 75) << finished.output;
        const bool names_one = std::any_of(lost.begin(), lost.end(), [&](std::size_t gone) {
          return finished.output.find("rank " + std::to_string(gone)) != std::string::npos ||
                 finished.output.find("ranks " + std::to_string(gone)) != std::string::npos;
        });
        EXPECT_TRUE(names_one) << "rank " << rank << " says: " << finished.output;
      }
    }
  }
}

// torchrun's port belongs to its own agent. Nothing here binds it, so it may be taken.
TEST_F(Training, RunsUnderTorchrunsVariablesWithTheMasterPortTaken) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(listener, 1), 0);
  socklen_t length = sizeof(address);
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  std::vector<std::unique_ptr<Process>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    const std::string number = std::to_string(rank);
    ranks.push_back(
        std::make_unique<Process>(Words{FOREBAY_GPT} + kSmallTraining + Words{"--stage", "2"} +
                                      (rank == 0 ? Words{"--report", directory_ / "torchrun.json"} : Words{}),
                                  variables({{"RANK", number},
                                             {"LOCAL_RANK", number},
                                             {"WORLD_SIZE", "3"},
                                             {"LOCAL_WORLD_SIZE", "3"},
                                             {"MASTER_ADDR", "127.0.0.1"},
                                             {"MASTER_PORT", std::to_string(ntohs(address.sin_port))},
                                             {"TORCHELASTIC_RUN_ID", "test"},
                                             {"TORCHELASTIC_RESTART_COUNT", "0"}})));
  }
  for (const auto& rank : ranks) {
    const Finished finished = rank->finish();
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
  }
  ::close(listener);
  const Json own = report_of(kSmallTraining + Words{"--stage", "2", "--ranks", "3"});
  EXPECT_EQ(read_json(directory_ / "torchrun.json").at("digest"), own.at("digest"));
}
#endif

}  // namespace
}  // namespace forebay::testing
