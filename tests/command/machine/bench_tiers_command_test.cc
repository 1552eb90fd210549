// `forebay bench-tiers` as a user runs it, with few bytes: its output, its choices and refusals, and that it
// leaves no files. Rates are not checked.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/process.h"
#include "tests/support/unwrapped.h"

namespace {

using Json = nlohmann::json;
using forebay::testing::Finished;
using forebay::testing::Process;
using forebay::testing::run_program;
using forebay::testing::TemporaryDirectory;

Finished bench(std::vector<std::string> arguments, const Process::Variables& variables = {}) {
  arguments.insert(arguments.begin(), {FOREBAY_COMMAND, "bench-tiers"});
  return run_program(arguments, variables);
}

// The output has warnings of the machine in front, such as a limit on locked memory.
Json json_of(const Finished& finished) {
  return Json::parse(finished.output.substr(std::min(finished.output.find('{'), finished.output.size())));
}

// Small enough for a test; rates mean nothing then.
std::vector<std::string> small(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--bytes", "4MiB", "--seconds", "0.05"});
  return arguments;
}

const Process::Variables kFakeGpu{
    {"FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA}, {"FAKE_CUDA_DEVICES", "2"}, {"FAKE_CUDA_MEMORY", "67108864"}};

void expect_rate(const Json& object, const char* key) {
  EXPECT_GT(object.at(key).get<double>(), 0) << key;
}

TEST(BenchTiersCommand, RefusesAPlaceOfTheDescriptionBeforeItMeasures) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "mine.json") << "{\"mine\": 1}\n";
  struct Case {
    const char* place;
    const char* answer;
  };
  const std::string other = directory / "mine.json", nowhere = directory / "no/where.json";
  for (const Case& one : {Case{"this", "HOME is not set"}, Case{other.c_str(), "is not overwritten"},
                          Case{nowhere.c_str(), "does not exist; make it first"}}) {
    const Finished finished = bench(small({directory.path(), "--save", one.place}),
                                    {{"HOME", ""}, {"XDG_CACHE_HOME", ""}, {"FOREBAY_MACHINE", ""}});
    EXPECT_EQ(finished.exit_code, 2) << finished.output;
    EXPECT_NE(finished.output.find(one.answer), std::string::npos) << finished.output;
  }
}

// The ranks of a launcher run the command with `arguments`, `host_ranks` of them on each host: a host is told
// by the boot's id, so each gets another one, for which root is needed.
class LaunchedBench {
 public:
  explicit LaunchedBench(int ranks, int host_ranks = 0) : ranks_(ranks), host_ranks_(host_ranks) {
    std::filesystem::create_directory(store());
    std::filesystem::permissions(store(), std::filesystem::perms::owner_all);
    for (int host = 0; host_ranks > 0 && host < ranks / host_ranks; ++host)
      std::ofstream(boot(host)) << "00000000-0000-4000-8000-00000000000" << host << "\n";
    for (const int hidden : {64, 128}) {
      const Json training{{"layers", 2}, {"hidden", hidden}, {"heads", 4}, {"sequence", 64}, {"batch", 4}};
      const Json report{{"training", training},  {"world_size", 1},
                        {"micro_steps", 1},      {"dtype", "fp32"},
                        {"bucket_bytes", 65536}, {"offload", "none"},
                        {"recompute", "none"},   {"ranks", Json::array({{{"step_ms", hidden / 8}}})}};
      std::ofstream(run(hidden)) << report << "\n";
    }
  }

  std::vector<std::string> arguments() const {
    return small({directory_.path(), "--save", saved(), "--run", run(64), "--run", run(128)});
  }
  std::vector<Finished> start(const std::vector<std::string>& arguments) const {
    std::vector<std::unique_ptr<Process>> processes;
    for (int rank = 0; rank < ranks_; ++rank) {
      std::vector<std::string> words{FOREBAY_COMMAND, "bench-tiers"};
      words.insert(words.end(), arguments.begin(), arguments.end());
      if (host_ranks_ > 0) {
        const std::string script =
            "mount --bind '" + boot(rank / host_ranks_) + "' /proc/sys/kernel/random/boot_id && exec \"$@\"";
        words.insert(words.begin(), {"/usr/bin/unshare", "-m", "/bin/sh", "-c", script, "sh"});
      }
      processes.push_back(
          std::make_unique<Process>(words, Process::Variables{{"FOREBAY_RANK", std::to_string(rank)},
                                                              {"FOREBAY_SIZE", std::to_string(ranks_)},
                                                              {"FOREBAY_STORE", store()},
                                                              {"FOREBAY_INTERFACE", "127.0.0.1"}}));
    }
    std::vector<Finished> finished;
    for (const auto& process : processes) finished.push_back(process->finish(std::chrono::seconds(120)));
    return finished;
  }
  Json description() const { return Json::parse(std::ifstream(saved())); }
  std::string saved() const { return directory_ / "machine.json"; }

 private:
  std::string store() const { return directory_ / "store"; }
  std::string boot(int host) const { return directory_ / ("boot-" + std::to_string(host)); }
  std::string run(int hidden) const { return directory_ / ("run-" + std::to_string(hidden) + ".json"); }

  const TemporaryDirectory directory_;
  const int ranks_, host_ranks_;
};

TEST(BenchTiersCommand, RanksOfALauncherMeasureTheirLink) {
  const LaunchedBench launched(3);

  const std::vector<Finished> finished = launched.start(launched.arguments());

  for (const Finished& one : finished) ASSERT_EQ(one.exit_code, 0) << one.output;
  EXPECT_NE(finished[0].output.find("3 ranks at the same time"), std::string::npos) << finished[0].output;
  EXPECT_EQ(finished[1].output.find("copies"), std::string::npos) << finished[1].output;
  const Json machine = launched.description();
  EXPECT_EQ(machine.at("host_ranks"), 3);
  ASSERT_EQ(machine.at("links").size(), 1u);
  EXPECT_FALSE(machine.at("links")[0].contains("ranks"));
  expect_rate(machine.at("links")[0].at("bytes_per_second"), "value");
}

TEST(BenchTiersCommand, RanksOnTwoHostsMeasureBothLinks) {
  const Finished tried = run_program(
      {"/usr/bin/unshare", "-m", "/bin/sh", "-c", "mount --bind /dev/null /proc/sys/kernel/random/boot_id"});
  if (tried.exit_code != 0) GTEST_SKIP() << "this process cannot give another boot id: " << tried.output;
  const LaunchedBench launched(4, 2);

  const std::vector<Finished> finished = launched.start(launched.arguments());

  for (const Finished& one : finished) ASSERT_EQ(one.exit_code, 0) << one.output;
  const Json machine = launched.description();
  EXPECT_EQ(machine.at("host_ranks"), 2);
  ASSERT_EQ(machine.at("links").size(), 2u);
  EXPECT_EQ(machine.at("links")[0].at("ranks"), 2);
  EXPECT_EQ(machine.at("links")[1].at("name"), "network");
  EXPECT_FALSE(machine.at("links")[1].contains("ranks"));
  const Finished simulated = run_program({FOREBAY_COMMAND, "simulate", "--layers", "2", "--hidden", "64",
                                          "--heads", "4", "--sequence", "64", "--vocabulary", "256",
                                          "--dtype", "fp32", "--cluster", launched.saved(), "--ranks", "6"});
  EXPECT_EQ(simulated.exit_code, 0) << simulated.output;
}

TEST(BenchTiersCommand, RanksOfALauncherEndIfTheFirstRefuses) {
  const LaunchedBench launched(2);
  std::vector<std::string> without_runs = launched.arguments();
  for (int run = 0; run < 2; ++run) {
    const auto at = std::find(without_runs.begin(), without_runs.end(), "--run");
    without_runs.erase(at, at + 2);
  }

  std::vector<Finished> finished = launched.start(without_runs);

  EXPECT_EQ(finished[0].exit_code, 2) << finished[0].output;
  EXPECT_NE(finished[0].output.find("no --run was given"), std::string::npos) << finished[0].output;
  EXPECT_EQ(finished[1].exit_code, 1) << finished[1].output;
  EXPECT_NE(finished[1].output.find("rank 0 measures nothing"), std::string::npos) << finished[1].output;

  std::vector<std::string> other_ranks = launched.arguments();
  other_ranks.insert(other_ranks.end(), {"--ranks", "3"});
  finished = launched.start(other_ranks);
  for (const Finished& one : finished) {
    EXPECT_EQ(one.exit_code, 2) << one.output;
    EXPECT_NE(one.output.find("the launcher started 2 ranks"), std::string::npos) << one.output;
  }
}

TEST(BenchTiersCommand, MeasuresEachTierAndLeavesNothing) {
  const TemporaryDirectory directory;

  const Finished finished = bench(small({directory.path(), "--json"}));

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  const Json json = json_of(finished);
  EXPECT_EQ(json.at("device"), "host");
  EXPECT_EQ(json.at("device_in_host"), true);
  EXPECT_EQ(json.at("bytes"), 4 << 20);
  EXPECT_NE(json.at("copies").at("how").get<std::string>().find("memcpy"), std::string::npos);
  expect_rate(json.at("copies"), "to_device_bytes_per_second");
  expect_rate(json.at("copies"), "from_device_bytes_per_second");
  expect_rate(json.at("copies"), "both_bytes_per_second");
  EXPECT_GE(json.at("host").at("threads"), 1);
  EXPECT_EQ(json.at("host").at("adamw_bytes_per_element"), 28);
  expect_rate(json.at("host"), "triad_bytes_per_second");
  expect_rate(json.at("host"), "adamw_elements_per_second");
  ASSERT_EQ(json.at("files").size(), 1u);
  const Json& files = json.at("files").at(0);
  EXPECT_EQ(files.at("directories").at(0).at("path"), directory.path());
  EXPECT_TRUE(files.at("direct").is_boolean());
  EXPECT_GT(files.at("free_bytes"), 0);
  // 4 MiB have 16 blocks of 256 KiB, four of 1 MiB and one of 4 MiB.
  EXPECT_GE(files.at("points").size(), 3u);
  EXPECT_LE(files.at("points").size(), 5u + 3u + 1u);
  for (const Json& point : files.at("points")) {
    EXPECT_LE(point.at("block_bytes").get<int>() * point.at("depth").get<int>(), 4 << 20);
    expect_rate(point, "read_bytes_per_second");
    expect_rate(point, "write_bytes_per_second");
  }
  expect_rate(files.at("chosen"), "read_bytes_per_second");
  EXPECT_TRUE(json.at("model").is_null());
  EXPECT_TRUE(json.at("placement").at("processors").is_string());
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(BenchTiersCommand, MeasuresSeveralDirectoriesAndAllOfThemStriped) {
  const TemporaryDirectory one;
  const TemporaryDirectory two;

  const Finished finished = bench(small({one.path(), two.path(), "--json"}));

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  const Json files = json_of(finished).at("files");
  ASSERT_EQ(files.size(), 3u);
  EXPECT_EQ(files.at(1).at("directories").at(0).at("path"), two.path());
  ASSERT_EQ(files.at(2).at("directories").size(), 2u);
  EXPECT_EQ(files.at(2).at("directories").at(0).at("path"), one.path());
}

TEST(BenchTiersCommand, ChoosesASettingForAModel) {
  const TemporaryDirectory directory;
  // 6.4 million parameters: 66 MiB a rank with the optimizer on the device, 24 without.
  const std::vector<std::string> model = {"--layers",     "8",   "--hidden", "256", "--heads",    "4",
                                          "--vocabulary", "256", "--batch",  "1",   "--sequence", "16",
                                          "--ranks",      "2",   "--stage",  "2"};
  auto wide = small({directory.path(), "--json", "--memory", "1GiB"});
  auto narrow = small({directory.path(), "--json", "--device-budget", "48MiB"});
  wide.insert(wide.end(), model.begin(), model.end());
  narrow.insert(narrow.end(), model.begin(), model.end());

  const Finished fits = bench(wide);
  const Finished offloads = bench(narrow);

  ASSERT_EQ(fits.exit_code, 0) << fits.output;
  const Json without = json_of(fits).at("model");
  EXPECT_EQ(without.at("chosen").at("offload"), "none");
  EXPECT_TRUE(without.at("chosen").at("offload_tier").is_null());
  EXPECT_EQ(without.at("settings").size(), 3u);
  EXPECT_EQ(without.at("limits").at("device_bytes"), 1 << 30);
  EXPECT_EQ(without.at("limits").at("host_ranks"), 2);
  EXPECT_FALSE(without.at("formulas").empty());
  ASSERT_EQ(offloads.exit_code, 0) << offloads.output;
  const Json with = json_of(offloads).at("model");
  EXPECT_EQ(with.at("settings").at(0).at("fits"), false);
  EXPECT_EQ(with.at("chosen").at("offload"), "optimizer");
  EXPECT_GT(with.at("chosen").at("added_seconds"), 0);
  EXPECT_FALSE(with.at("chosen").at("bound_by").is_null());
}

TEST(BenchTiersCommand, PrintsTheSameForPeople) {
  const TemporaryDirectory directory;

  const Finished finished =
      bench(small({directory.path(), "--layers", "2", "--batch", "1", "--stage", "3", "--memory", "1GiB"}));

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  for (const char* words :
       {"device host; topology by ", "every copy is a memcpy", "to the device", "both at once",
        "host memory: ", "triad", "AdamW", "files in ", "  chosen\n", "model: GPT-2 kind", "* none",
        "optimizer+parameters on nvme", "chosen: none. none fits and adds nothing",
        "how times are estimated:", "R * 12 * P / N"}) {
    EXPECT_NE(finished.output.find(words), std::string::npos) << words << "\n" << finished.output;
  }
  // Nobody watches: no line that is written over.
  EXPECT_EQ(finished.output.find('\r'), std::string::npos);
}

TEST(BenchTiersCommand, MeasuresADeviceOfTheCudaDriver) {
  const TemporaryDirectory directory;

  const Finished finished = bench(small({directory.path(), "--json", "--device", "cuda:1", "--layers", "2",
                                         "--hidden", "64", "--batch", "1", "--stage", "1"}),
                                  kFakeGpu);

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  const Json json = json_of(finished);
  EXPECT_EQ(json.at("device").get<std::string>().find("cuda:1"), 0u) << json.at("device");
  EXPECT_EQ(json.at("device_in_host"), false);
  expect_rate(json.at("copies"), "both_bytes_per_second");
  // The device's memory is the budget.
  EXPECT_EQ(json.at("model").at("limits").at("device_bytes"),
            67108864 / 8 * 7);  // The driver's room is left out.
}

struct BadInput {
  std::vector<std::string> arguments;
  int exit_code;
  const char* says;
};

TEST(BenchTiersCommand, RefusesWhatCannotBeBeforeMeasuring) {
  const TemporaryDirectory directory;
  const std::string here = directory.path();
  const std::vector<BadInput> cases = {
      {{}, 2, "DIR"},
      {{directory / "absent"}, 2, "absent' is not a directory; make it"},
      {{here, "/dev/null"}, 2, "/dev/null' is not a directory"},
      {{"/proc"}, 1, "/proc"},
      {{here, "--bytes", "8EiB"}, 2, "--bytes is '8EiB'"},
      {{here, "--bytes", "8000TiB"}, 1, "too little room in"},
      {{here, "--bytes", "1MiB"}, 2, "--bytes is 1.00 MiB; use at least 4.00 MiB"},
      {{here, "--bytes", "much"}, 2, "--bytes is 'much'"},
      {{here, "--seconds", "0"}, 2, "--seconds is 0"},
      {{here, "--seconds", "nan"}, 2, "--seconds"},
      {{here, "--device", "tpu"}, 2, "--device is 'tpu'; use host, cuda or cuda:N"},
      {{here, "--device", "cuda:x"}, 2, "--device is 'cuda:x'"},
      {{here, "--device", "cuda:7"}, 2, "7"},
      {{here, "--stage", "2"}, 2, "--stage says how a model would run, and none was given"},
      {{here, "--memory", "1GiB"}, 2, "add its shape"},
      {{here, "--layers", "2"}, 2, "--memory was not given"},
      {{here, "--layers", "2", "--memory", "none"}, 2, "--memory is 'none'"},
      {{here, "--layers", "-2", "--memory", "1GiB"}, 2, "--layers is -2"},
      {{here, "--layers", "2", "--memory", "1GiB", "--stage", "4"}, 2, "--stage is 4"},
      {{here, "--layers", "2", "--memory", "1GiB", "--ranks", "0"}, 2, "--ranks is 0"},
      {{here, "--layers", "2", "--memory", "1GiB", "--host-ranks", "2"}, 2, "--host-ranks is 2"},
      {{here, "--layers", "2", "--memory", "1GiB", "--dtype", "fp8"}, 2, "--dtype is 'fp8'"},
      {{here, "--layers", "2", "--memory", "64KiB"}, 1, "no offload setting fits: "},
      {{here, "--config", "/absent.json", "--memory", "1GiB"}, 1, "/absent.json"},
  };
  for (const BadInput& bad : cases) {
    const Finished finished = bench(bad.arguments, kFakeGpu);
    std::string line;
    for (const std::string& word : bad.arguments) line += word + " ";
    EXPECT_EQ(finished.exit_code, bad.exit_code) << line << "\n" << finished.output;
    EXPECT_NE(finished.output.find(bad.says), std::string::npos) << line << "\n" << finished.output;
  }
  EXPECT_TRUE(std::filesystem::is_empty(here));
}

TEST(BenchTiersCommand, FailsWithoutADriver) {
  const TemporaryDirectory directory;

  const Finished finished =
      bench({directory.path(), "--device", "cuda"}, {{"FOREBAY_LIBCUDA", "/nowhere/libcuda.so.1"}});

  EXPECT_EQ(finished.exit_code, 1) << finished.output;
  EXPECT_NE(finished.output.find("cannot open the CUDA driver"), std::string::npos) << finished.output;
}

TEST(BenchTiersCommand, FailsWhenItsOutputCannotBeWritten) {
  const TemporaryDirectory directory;
  const Finished finished = run_program({"/bin/sh", "-c",
                                         std::string(FOREBAY_COMMAND) + " bench-tiers " + directory.path() +
                                             " --bytes 4MiB --seconds 0.05 >/dev/full"});

  EXPECT_EQ(finished.exit_code, 1) << finished.output;
}

TEST(BenchTiersCommand, ExplainsItsUnitsAndDefaults) {
  const Finished finished = bench({"--help"});

  EXPECT_EQ(finished.exit_code, 0);
  for (const char* words : {"[default: 256MiB]", "[default: 12]", "[default: host]", "64KiB", "GB/s",
                            "--memory BYTES", "--device-budget BYTES"}) {
    EXPECT_NE(forebay::testing::unwrapped(finished.output).find(words), std::string::npos) << words << "\n"
                                                                                           << finished.output;
  }
}

}  // namespace
