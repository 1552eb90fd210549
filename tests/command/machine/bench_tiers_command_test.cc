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

#include "runtime/command/machine/bench_tiers_print.h"
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
    for (int host = 0; host_ranks > 0 && host * host_ranks < ranks; ++host)
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
  EXPECT_EQ(machine.at("links")[0].at("name"), "shm");
  EXPECT_FALSE(machine.at("links")[0].contains("ranks"));
  expect_rate(machine.at("links")[0].at("bytes_per_second"), "value");

  std::vector<std::string> over_tcp = launched.arguments();
  over_tcp.insert(over_tcp.end(), {"--link", "tcp"});
  for (const Finished& one : launched.start(over_tcp)) ASSERT_EQ(one.exit_code, 0) << one.output;
  EXPECT_EQ(launched.description().at("links")[0].at("name"), "tcp");
}

TEST(BenchTiersCommand, RanksOfThisHostMeasureTheirLinkAndLeaveNothing) {
  const LaunchedBench alone(1);
  for (const char* link : {"shm", "tcp"}) {
    const TemporaryDirectory temporary;
    std::vector<std::string> arguments = alone.arguments();
    arguments.insert(arguments.end(), {"--ranks", "3", "--link", link});

    const Finished finished = bench(arguments, {{"TMPDIR", temporary.path()}});

    ASSERT_EQ(finished.exit_code, 0) << finished.output;
    EXPECT_EQ(alone.description().at("host_ranks"), 3);
    EXPECT_EQ(alone.description().at("links")[0].at("name"), link);
    EXPECT_TRUE(std::filesystem::is_empty(temporary.path()));
  }
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

  const LaunchedBench uneven(3, 2);
  for (const Finished& one : uneven.start(uneven.arguments())) {
    EXPECT_NE(one.exit_code, 0) << one.output;
    EXPECT_NE(one.output.find("start the same number on each host"), std::string::npos) << one.output;
  }
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

// No two figures are equal.
forebay::BenchTiersReport printed_bench() {
  using namespace forebay;
  BenchTiersReport report;
  report.device = "cuda:1 NVIDIA H200";
  report.topology_source = "sysfs";
  report.placement = {
      .nodes = {1}, .memory_node = 1, .processors = {4, 5, 6, 7}, .cores = {4, 6}, .reason = "nearest"};
  report.bytes = 3u << 20;
  report.copies = {11.004e9, 12.005e9, 13.006e9};
  report.host = {.thread_count = 6,
                 .node_count = 2,
                 .triad_bytes_per_second = 21.007e9,
                 .adamw_elements_per_second = 1.5e9,
                 .adamw_bytes_per_element = 28};
  FileMeasurement one;
  one.directories.push_back({.path = "/drive/a",
                             .mount_point = "/drive",
                             .file_system = "ext4",
                             .kind = DirectoryKind::kDrive,
                             .drives = {{.name = "nvme0n1", .rotational = false}},
                             .nodes = {0, 1}});
  one.is_direct = true;
  one.free_bytes = 77;
  one.store.points = {
      {256 << 10, 1, 1.11e9, 1.22e9}, {256 << 10, 8, 1.33e9, 1.44e9}, {4 << 20, 8, 1.55e9, 1.66e9}};
  one.store.chosen = one.store.points[1];
  FileMeasurement two;
  two.directories.push_back({.path = "/b", .kind = DirectoryKind::kMemory});
  two.directories.push_back(
      {.path = "/c", .file_system = "nfs", .kind = DirectoryKind::kNetwork, .nodes = {3}});
  two.store.points = {{1 << 20, 2, 2.11e9, 2.22e9}};
  two.store.chosen = two.store.points[0];
  report.files = {one, two};
  report.ranks = RankMeasurement{.ranks = 4,
                                 .host_ranks = 2,
                                 .kernel_bytes_per_second = 31.008e9,
                                 .copy_bytes_per_second = 32.009e9,
                                 .within_host = {33.01e9, 3.4e-6, 35e-12},
                                 .between_hosts = {3.6e9, 37.5e-6, 38e-12},
                                 .control_seconds = 39e-6};
  report.ranks_link = LinkKind::kGloo;
  BenchedModel model;
  model.description = "the model";
  model.parameters = 7'000'001;
  model.options.dtype = DataType::kFloat16;
  model.options.stage = 2;
  model.options.ranks = 8;
  model.options.micro_steps = 5;
  model.limits = {
      .device_bytes = 41u << 20, .host_bytes = 42u << 20, .file_bytes = 43u << 20, .host_ranks = 4};
  model.choice.estimates.push_back(
      {.device_bytes = 50u << 20, .fits = false, .lacks = "9 MiB of device memory"});
  model.choice.estimates.push_back({.offload = Offload::kOptimizer,
                                    .tier = Tier::kFile,
                                    .device_bytes = 51u << 20,
                                    .host_bytes = 52u << 20,
                                    .file_bytes = 53u << 20,
                                    .fits = true,
                                    .down_seconds = 0.0999,
                                    .up_seconds = 0.1,
                                    .both_seconds = 0.055,
                                    .adamw_seconds = 1.25,
                                    .file_seconds = 2.5,
                                    .added_seconds = 2.75,
                                    .bound_by = "files"});
  model.choice.chosen = 1;
  model.choice.reason = "the reason";
  report.model = model;
  return report;
}

TEST(BenchTiersPrint, EachFigureStandsInItsPlace) {
  const std::string text = forebay::bench_tiers_text(printed_bench());
  EXPECT_EQ(text.substr(0, text.find("  how times are estimated:")),
            R"(device cuda:1 NVIDIA H200; topology by sysfs: nearest
  threads on processors 4-7, pinned memory on NUMA node 1

copies of 3.00 MiB (by the device's copy engines)
  to the device       11.00 GB/s
  from the device     12.01 GB/s
  both at once        13.01 GB/s together

host memory: 6 threads on 2 NUMA nodes
  triad               21.01 GB/s  (a = b + s * c in fp64, 24 bytes an element)
  AdamW               42.00 GB/s  (1500 million elements/s, 28 bytes each)

files in /drive/a
  /drive/a: ext4 on nvme0n1 (flash), NUMA nodes 0-1
  past the page cache (O_DIRECT)
  block        depth        read       write
  256.00 KiB       1   1.11 GB/s   1.22 GB/s
  256.00 KiB       8   1.33 GB/s   1.44 GB/s  chosen
  4.00 MiB         8   1.55 GB/s   1.66 GB/s

files in /b + /c
  /b: unknown file system in memory
  /c: nfs on another host, NUMA node 3
  files there are memory: rates are those of copies
  block        depth        read       write
  1.00 MiB         2   2.11 GB/s   2.22 GB/s  chosen

4 ranks at the same time, 2 on each host; for each
  AdamW               31.01 GB/s  (one thread)
  copies              32.01 GB/s
  in a host, tcp         33 GB/s  (collectives; latency 3.4 us)
  between hosts         3.6 GB/s  (collectives; latency 37.5 us)

model: the model
  7000001 parameters, fp16, stage 2, 8 ranks, 4 on this host
  budgets: 41.00 MiB of device memory a rank; on this host 42.00 MiB of memory and 43.00 MiB of files
  per rank              device       host      files      down       up      both    AdamW    files
  none               50.00 MiB        0 B        0 B         0        0         0        0        0
* optimizer on nvme  51.00 MiB  52.00 MiB  53.00 MiB  99.90 ms  0.100 s  55.00 ms  1.250 s  2.500 s

  per rank             added  fits
  none                     0    no
* optimizer on nvme  2.750 s   yes
  chosen: optimizer on nvme. the reason
  options: --offload optimizer --offload-tier nvme:DIR; --offload-fraction auto measures in the run itself and offloads the fastest fraction
  activations are an estimate of a usual transformer's ('forebay plan' tells which); a trainer's may differ
)");
  for (const std::string& line : forebay::offload_formulas())
    EXPECT_NE(text.find("\n    " + line + "\n"), std::string::npos) << text;
}

TEST(BenchTiersPrint, PlacesThatAreNotKnownAreCalledThat) {
  forebay::BenchTiersReport report = printed_bench();
  report.device_in_host = true;
  report.placement.memory_node = -1;
  report.host.node_count = 1;
  report.files.erase(report.files.begin());
  report.files[0].directories.resize(1);
  report.files[0].directories[0].kind = forebay::DirectoryKind::kDrive;
  report.files[0].directories[0].drives = {{.name = "sda", .rotational = true}};
  report.files[0].directories[0].path = "/\x1b[2J";
  report.ranks->ranks = report.ranks->host_ranks = 1;
  report.ranks->within_host = report.ranks->between_hosts = {};
  report.model.reset();
  EXPECT_EQ(forebay::bench_tiers_text(report), R"(device cuda:1 NVIDIA H200; topology by sysfs: nearest
  threads on processors 4-7, pinned memory anywhere

copies of 3.00 MiB (the device is ordinary memory of this host: every copy is a memcpy by a thread)
  to the device       11.00 GB/s
  from the device     12.01 GB/s
  both at once        13.01 GB/s together

host memory: 6 threads on 1 NUMA node
  triad               21.01 GB/s  (a = b + s * c in fp64, 24 bytes an element)
  AdamW               42.00 GB/s  (1500 million elements/s, 28 bytes each)

files in /\x1b[2J
  /\x1b[2J: unknown file system on sda (rotational, according to the kernel)
  through the page cache: the file system has no O_DIRECT, so rates may be those of memory
  block        depth        read       write
  1.00 MiB         2   2.11 GB/s   2.22 GB/s  chosen

1 rank; for each
  AdamW               31.01 GB/s  (one thread)
  copies              32.01 GB/s
)");
}

TEST(BenchTiersPrint, EachFigureHasItsKeyInJson) {
  Json json = Json::parse(forebay::bench_tiers_json(printed_bench()));
  json.at("model").erase("formulas");
  EXPECT_EQ(json, Json::parse(R"(
{"bytes": 3145728,
 "copies": {"both_bytes_per_second": 13006000000.0, "from_device_bytes_per_second": 12005000000.0,
            "how": "by the device's copy engines", "to_device_bytes_per_second": 11004000000.0},
 "device": "cuda:1 NVIDIA H200", "device_in_host": false,
 "files": [{"chosen": {"block_bytes": 262144, "depth": 8, "read_bytes_per_second": 1330000000.0,
                       "write_bytes_per_second": 1440000000.0},
            "direct": true,
            "directories": [{"drives": "nvme0n1", "file_system": "ext4", "kind": "drive",
                             "mount_point": "/drive", "numa_nodes": [0, 1], "path": "/drive/a",
                             "rotational": false}],
            "free_bytes": 77,
            "points": [{"block_bytes": 262144, "depth": 1, "read_bytes_per_second": 1110000000.0,
                        "write_bytes_per_second": 1220000000.0},
                       {"block_bytes": 262144, "depth": 8, "read_bytes_per_second": 1330000000.0,
                        "write_bytes_per_second": 1440000000.0},
                       {"block_bytes": 4194304, "depth": 8, "read_bytes_per_second": 1550000000.0,
                        "write_bytes_per_second": 1660000000.0}]},
           {"chosen": {"block_bytes": 1048576, "depth": 2, "read_bytes_per_second": 2110000000.0,
                       "write_bytes_per_second": 2220000000.0},
            "direct": false,
            "directories": [{"drives": null, "file_system": null, "kind": "memory", "mount_point": null,
                             "numa_nodes": [], "path": "/b", "rotational": null},
                            {"drives": null, "file_system": "nfs", "kind": "network", "mount_point": null,
                             "numa_nodes": [3], "path": "/c", "rotational": null}],
            "free_bytes": 0,
            "points": [{"block_bytes": 1048576, "depth": 2, "read_bytes_per_second": 2110000000.0,
                        "write_bytes_per_second": 2220000000.0}]}],
 "host": {"adamw_bytes_per_element": 28, "adamw_elements_per_second": 1500000000.0, "numa_nodes": 2,
          "threads": 6, "triad_bytes_per_second": 21007000000.0},
 "model": {"chosen": {"adamw_seconds": 1.25, "added_seconds": 2.75, "both_seconds": 0.055, "bound_by": "files",
                      "device_bytes": 53477376, "down_seconds": 0.0999, "file_bytes": 55574528,
                      "file_seconds": 2.5, "fits": true, "host_bytes": 54525952, "lacks": null,
                      "offload": "optimizer", "offload_tier": "nvme", "up_seconds": 0.1},
           "description": "the model", "dtype": "fp16",
           "limits": {"device_bytes": 42991616, "file_bytes": 45088768, "host_bytes": 44040192, "host_ranks": 4},
           "micro_steps": 5, "parameters": 7000001, "ranks": 8, "reason": "the reason",
           "settings": [{"adamw_seconds": 0.0, "added_seconds": 0.0, "both_seconds": 0.0, "bound_by": null,
                         "device_bytes": 52428800, "down_seconds": 0.0, "file_bytes": 0, "file_seconds": 0.0,
                         "fits": false, "host_bytes": 0, "lacks": "9 MiB of device memory", "offload": "none",
                         "offload_tier": null, "up_seconds": 0.0},
                        {"adamw_seconds": 1.25, "added_seconds": 2.75, "both_seconds": 0.055,
                         "bound_by": "files", "device_bytes": 53477376, "down_seconds": 0.0999,
                         "file_bytes": 55574528, "file_seconds": 2.5, "fits": true, "host_bytes": 54525952,
                         "lacks": null, "offload": "optimizer", "offload_tier": "nvme", "up_seconds": 0.1}],
           "stage": 2},
 "placement": {"cores": "4,6", "memory_node": 1, "nodes": [1], "processors": "4-7", "reason": "nearest"},
 "ranks": {"adamw_bytes_per_second": 31008000000.0,
           "between_hosts": {"bytes_per_second": 3600000000.0, "latency_seconds": 3.75e-05,
                             "processor_seconds_per_byte": 3.8e-11},
           "control_seconds": 3.9e-05, "copy_bytes_per_second": 32009000000.0, "host_ranks": 2, "link": "tcp",
           "ranks": 4,
           "within_host": {"bytes_per_second": 33010000000.0, "latency_seconds": 3.4e-06,
                           "processor_seconds_per_byte": 3.5e-11}},
 "topology": "sysfs"})"));
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
      {{here, "--seconds", "1e308"}, 2, "--seconds is 1e+308; use more than 0 and at most 3600"},
      {{here, "--link", "shm"}, 2, "--run and --link describe the machine that --save writes"},
      {{here, "--run", "/dev/zero"}, 2, "--run and --link describe the machine that --save writes"},
      {{here, "--save", "machine.json", "--device", "cuda"}, 2, "--save describes --device host only"},
      {{here, "--save", "machine.json", "--link", "ib", "--run", "/dev/null"},
       2,
       "--link is 'ib'; use shm or tcp"},
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
