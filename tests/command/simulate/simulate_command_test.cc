// `forebay simulate` as a person runs it: the program, its output and its exit code.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "runtime/command/simulate/simulation_print.h"
#include "tests/support/process.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

const Words kModel = {"--layers",   "4",   "--hidden",     "512",  "--heads", "8",
                      "--sequence", "256", "--vocabulary", "5000", "--batch", "2"};

Finished run_forebay(Words words) {
  words.insert(words.begin(), {FOREBAY_COMMAND, "simulate"});
  return run_program(words);
}

Finished with_model(Words words) {
  words.insert(words.end(), kModel.begin(), kModel.end());
  return run_forebay(words);
}

TEST(SimulateCommand, PrintsTheStepItsCausesAndItsMemory) {
  const Finished finished = with_model({"--cluster", "dgx-a100", "--ranks", "16", "--stage", "3"});
  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  for (const char* const word : {"tokens/s", "model FLOPs utilisation", "forward", "parameter gathers",
                                 "most time", "would help", "optimizer", "to spare"}) {
    EXPECT_NE(finished.output.find(word), std::string::npos) << word << "\n" << finished.output;
  }
}

TEST(SimulateCommand, PrintsTheSameJsonTwice) {
  const Words words = {"--stage", "2", "--offload", "optimizer", "--json"};
  const Finished first = with_model(words);
  ASSERT_EQ(first.exit_code, 0) << first.output;
  EXPECT_EQ(with_model(words).output, first.output);
  const Json json = Json::parse(first.output);
  EXPECT_EQ(json.at("ranks"), 8);
  EXPECT_GT(json.at("tokens_per_second").get<double>(), 0);
  EXPECT_GT(json.at("changes").size(), 3u);
}

TEST(SimulateCommand, WritesATimeline) {
  const TemporaryDirectory directory;
  const std::string file = directory / "step.json";
  ASSERT_EQ(with_model({"--stage", "3", "--timeline", file, "--no-changes"}).exit_code, 0);
  std::ifstream stream(file);
  EXPECT_GT(Json::parse(stream).at("traceEvents").size(), 100u);

  // A file that is no timeline stays as it is, and is not simulated for.
  const std::string notes = directory / "notes";
  std::ofstream(notes) << "notes";
  const Finished refused = with_model({"--timeline", notes, "--no-changes"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.output.find("--timeline"), std::string::npos) << refused.output;
}

TEST(SimulateCommand, LeavesChangesOutAndTakesATypeThatTheDeviceHas) {
  const Finished finished = with_model({"--cluster", "dgx-2", "--no-changes", "--json"});
  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_FALSE(Json::parse(finished.output).contains("changes"));
}

TEST(SimulateCommand, AnswersBadInput) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "bad.json") << "{\"name\": \"bad\"}";
  struct Case {
    Words words;
    int exit_code;
    const char* answer;
  };
  const Case cases[] = {
      {{"--cluster", "dgx-9"}, 2, "use dgx-2, dgx-a100, dgx-h100"},
      {{"--cluster", directory / "bad.json"}, 2, "bad.json: device is missing"},
      {{"--ranks", "9", "--tensor-parallel", "2"},
       2,
       "which --tensor-parallel 2 times --pipeline-parallel 1 does not divide; use a multiple of 2"},
      {{"--cluster", "dgx-2", "--dtype", "bf16"}, 2, "V100-32 has no products in bf16"},
      {{"--stage", "0", "--layers", "400", "--hidden", "8192"}, 1, "the plan needs"},
      {{"--attention", "quick"}, 2, "use fused or plain"},
      {{"--ranks", "8", "--tensor-parallel", "2", "--pipeline-parallel", "3"}, 2, "use a multiple of 6"},
      {{"--ranks", "8", "--pipeline-parallel", "8"},
       2,
       "pipeline-parallel is 8 and each stage needs a layer"},
      {{"--activations", "auto"}, 2, "use keep, partition, partition+cpu or partition+nvme"},
  };
  for (const Case& one : cases) {
    const Finished finished = one.exit_code == 1 ? run_forebay(one.words) : with_model(one.words);
    EXPECT_EQ(finished.exit_code, one.exit_code) << finished.output;
    EXPECT_NE(finished.output.find(one.answer), std::string::npos) << one.answer << "\n" << finished.output;
  }
}

// No two figures are equal.
std::pair<SimulationRequest, SimulationResult> printed_simulation() {
  SimulationRequest request;
  request.ranks = 12;
  request.part = {.tensor_parallel = 2, .pipeline_parallel = 3};
  request.cluster.name = "a cluster";
  request.cluster.device.name = "a device";
  request.cluster.links = {{.name = "inner"}, {.name = "outer"}};
  SimulationResult result;
  result.step_seconds = 2;
  result.tokens_per_step = 40'003;
  result.model_flops = 3.1e14;
  result.hardware_flops = 4.2e14;
  result.peak_flops = 9.9e14;
  result.times = {
      {"forward", false, 0.6}, {"gathers", true, 0.0004}, {"backward", false, 1.3}, {"sums", true, 0.0996}};
  result.parameters = 7'000'001;
  result.pipeline_stage = 1;
  result.statistics.peak = {11 << 20, 12 << 20, 13 << 20, 14 << 20, 15 << 20, 16 << 20};
  result.statistics.peak_reserved_bytes = 90 << 20;
  result.statistics.host_bytes = 21 << 20;
  result.statistics.file_bytes = 22 << 20;
  result.sent_bytes_per_step = 23;
  result.device_bytes = 100 << 20;
  result.host_memory_bytes = 24 << 20;
  result.compute_busy = 0.25;
  result.bus_busy = 0.5;
  result.host_busy = 0.75;
  result.link_busy = {0.125, 0.375};
  return {request, result};
}

TEST(SimulationPrint, EachFigureStandsBehindItsName) {
  const auto [request, result] = printed_simulation();
  const std::vector<SimulatedChange> changes = {{"one", 1.0}, {"two", 1.5}, {"three", 1.98}, {"four", 1.98}};
  EXPECT_EQ(simulation_text(request, result, changes, "the model"), R"(the model
12 ranks of a cluster, a device, simulated: figures are the description's, the schedule is the engine's

  step                    2.000 s
  tokens/s                20002, 1667 for each device
  model FLOPs utilisation 15.7 %
  TFLOP/s of a device     210.0, recomputation included, of 990

time of a step, in pipeline stage 1, which needs most memory
  forward                 600.00 ms    30.0 %
  backward                1.300 s      65.0 %
  gathers                 400 us        0.0 %   exposed
  sums                    99.60 ms      5.0 %   exposed
  most time               backward
  would help              one: 1.000 s, 50.0 % less
                          two: 1.500 s, 25.0 % less
                          three: 1.980 s, 1.0 % less

memory of a device
  parameters              11.00 MiB
  gradients               12.00 MiB
  optimizer               13.00 MiB
  gathered                14.00 MiB
  buckets                 15.00 MiB
  activations             16.00 MiB
  = in chunks             90.00 MiB of 100.00 MiB, 10.00 MiB to spare
  pinned, on the host     21.00 MiB of the rank's share of 24.00 MiB
  in files                22.00 MiB
)");
}

TEST(SimulationPrint, OnlyChangesOfAHundredthAreShown) {
  auto [request, result] = printed_simulation();
  const auto text = [&, &result = result, &request = request](const std::vector<SimulatedChange>& changes) {
    return simulation_text(request, result, changes, "the model");
  };
  EXPECT_NE(
      text({{"one", 1.9799}, {"two", 1.9801}}).find("would help              one: 1.980 s, 1.0 % less\n\n"),
      std::string::npos)
      << text({{"one", 1.9799}, {"two", 1.9801}});
  EXPECT_NE(text({{"one", 1.9801}}).find("would help              nothing by more than 1 %\n"),
            std::string::npos);
  EXPECT_EQ(text({}).find("would help"), std::string::npos);
  request.part = {};
  request.ranks = 1;
  result.statistics.host_bytes = result.statistics.file_bytes = 0;
  result.statistics.peak_reserved_bytes = 101 << 20;
  result.tokens_per_step = 2'500'000;
  const std::string plain = text({});
  for (const char* const part : {"1 rank of a cluster, a device, simulated", "\ntime of a step\n",
                                 "101.00 MiB of 100.00 MiB, 0 B to spare\n",
                                 "tokens/s                1.25 M, 1.25 M for each device\n"})
    EXPECT_NE(plain.find(part), std::string::npos) << part << "\n" << plain;
  for (const char* const part : {"pinned", "in files", "pipeline stage"})
    EXPECT_EQ(plain.find(part), std::string::npos) << part << "\n" << plain;
}

TEST(SimulationPrint, EachFigureHasItsKeyInJson) {
  const auto [request, result] = printed_simulation();
  EXPECT_EQ(Json::parse(simulation_json(request, result, {{"one", 1.5}})), Json::parse(R"(
{"cluster": "a cluster", "device": "a device", "ranks": 12, "tensor_parallel": 2, "pipeline_parallel": 3,
 "pipeline_stage": 1, "parameters": 7000001, "step_seconds": 2.0, "tokens_per_step": 40003,
 "tokens_per_second": 20001.5, "tokens_per_second_and_device": 1666.7916666666667,
 "model_flops_utilisation": 0.15656565656565657, "tflops_per_device": 210.0,
 "seconds": [{"cause": "forward", "exposed": false, "seconds": 0.6},
             {"cause": "gathers", "exposed": true, "seconds": 0.0004},
             {"cause": "backward", "exposed": false, "seconds": 1.3},
             {"cause": "sums", "exposed": true, "seconds": 0.0996}],
 "bottleneck": "backward", "changes": [{"change": "one", "step_seconds": 1.5}],
 "memory": {"parameters": 11534336, "gradients": 12582912, "optimizer": 13631488, "gathered": 14680064,
            "buckets": 15728640, "activations": 16777216, "reserved": 94371840, "device": 104857600,
            "host": 22020096, "host_share": 25165824, "files": 23068672},
 "sent_bytes_per_step": 23,
 "busy": {"compute": 0.25, "bus": 0.5, "host_memory": 0.75, "link inner": 0.125, "link outer": 0.375}})"));
}

TEST(CompareCommand, RefusesPricesThatAreNoNumbers) {
  for (const char* const price : {"nan", "-5", "inf", "1e308"}) {
    const Finished finished = run_program({FOREBAY_COMMAND, "compare", "--price", price, "--limit", "1",
                                           "--layers", "2", "--hidden", "256", "--heads", "4"});
    EXPECT_EQ(finished.exit_code, 2) << price << finished.output;
    EXPECT_NE(finished.output.find("--price"), std::string::npos) << finished.output;
  }
}

TEST(CompareCommand, RefusesMicroBatchesThatNoStepHas) {
  for (const char* const batch : {"0", "2305843009213693952", "18446744073709551615"}) {
    const Finished finished = run_program({FOREBAY_COMMAND, "compare", "--micro-batch", batch, "--ranks", "8",
                                           "--layers", "2", "--hidden", "256", "--heads", "4"});
    EXPECT_EQ(finished.exit_code, 2) << batch << finished.output;
    EXPECT_NE(finished.output.find("; use "), std::string::npos) << finished.output;
  }
}

TEST(CompareCommand, RefusesFilesThatItWouldSpoil) {
  const TemporaryDirectory directory;
  const std::string file = directory / "table", link = directory / "link";
  std::filesystem::create_symlink(directory / "nothing", link);
  const auto compare = [](const Words& files) {
    Words words = {FOREBAY_COMMAND, "compare", "--limit",  "2",   "--ranks", "2",
                   "--layers",      "2",       "--hidden", "256", "--heads", "4"};
    words.insert(words.end(), files.begin(), files.end());
    return run_program(words);
  };
  const Finished same = compare({"--csv", file, "--html", directory / "." + "/table"});
  EXPECT_EQ(same.exit_code, 2) << same.output;
  EXPECT_NE(same.output.find("--csv and --html both name " + file), std::string::npos) << same.output;
  EXPECT_FALSE(std::filesystem::exists(file));
  const Finished beside = run_program(
      {"/bin/sh", "-c",
       "cd '" + directory.path() +
           "' && exec '" FOREBAY_COMMAND
           "' compare --layers 2 --hidden 256 --heads 4 --ranks 2 --limit 2 --csv new --html ./new"});
  EXPECT_EQ(beside.exit_code, 2) << beside.output;
  EXPECT_NE(beside.output.find("--csv and --html both name new"), std::string::npos) << beside.output;
  EXPECT_FALSE(std::filesystem::exists(directory / "new"));
  const Finished linked = compare({"--csv", link});
  EXPECT_EQ(linked.exit_code, 2) << linked.output;
  EXPECT_NE(linked.output.find("link to a file that does not exist"), std::string::npos) << linked.output;
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  // Anyone who may write to the directory could have laid it there.
  std::filesystem::create_symlink(directory / "nothing", file + ".partial");
  const Finished not_led_astray = compare({"--csv", file});
  EXPECT_EQ(not_led_astray.exit_code, 0) << not_led_astray.output;
  EXPECT_FALSE(std::filesystem::exists(directory / "nothing"));
}

TEST(CompareCommand, APipeThatNobodyReadsIsAnError) {
  const TemporaryDirectory directory;
  const std::string pipe = directory / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const Words words = {FOREBAY_COMMAND, "compare", "--csv",    pipe,  "--limit", "1", "--ranks", "2",
                       "--layers",      "2",       "--hidden", "256", "--heads", "4"};
  const Finished finished = Process(words).finish(std::chrono::seconds(30));
  EXPECT_EQ(finished.exit_code, 1) << finished.output;
  EXPECT_NE(finished.output.find("no process reads from it; start the reader first"), std::string::npos)
      << finished.output;
}

TEST(CompareCommand, PrintsTheComparisonThoughAFileCannotBeWritten) {
  const Finished finished =
      run_program({FOREBAY_COMMAND, "compare", "--csv", "/dev/full", "--html", "/dev/full", "--limit", "2",
                   "--ranks", "2", "--layers", "2", "--hidden", "256", "--heads", "4"});
  EXPECT_EQ(finished.exit_code, 1) << finished.output;
  EXPECT_NE(finished.output.find("cannot write /dev/full"), std::string::npos) << finished.output;
  EXPECT_NE(finished.output.find("options: --stage"), std::string::npos) << finished.output;
}

}  // namespace
}  // namespace forebay::testing
