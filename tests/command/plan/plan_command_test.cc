// `forebay plan` as a person runs it: the program, its output and its exit code.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "runtime/command/plan/largest.h"
#include "tests/support/temporary_directory.h"

namespace {

using Json = nlohmann::json;

struct Outcome {
  int exit_code = -1;
  std::string output;  // Standard output and standard error.
};

// Arguments are plain words of this file's own, so the shell has nothing to quote.
Outcome forebay(const std::string& arguments) {
  const std::string command = std::string(FOREBAY_COMMAND) + " " + arguments + " 2>&1";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  Outcome outcome;
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> part;
  for (std::size_t count; (count = std::fread(part.data(), 1, part.size(), pipe)) > 0;) {
    outcome.output.append(part.data(), count);
  }
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

Outcome plan(const std::string& arguments) {
  return forebay("plan " + arguments);
}

std::string data(const std::string& name) {
  return std::string(FOREBAY_TEST_DATA) + "/" + name;
}

constexpr const char* kShape = "--layers 4 --hidden 128 --heads 4 --sequence 64 --vocabulary 256 ";

TEST(PlanCommand, PrintsJsonWithThePromisedKeys) {
  const Outcome outcome = plan(std::string(kShape) + "--ranks 4 --stage 3 --dtype fp32 --batch 2 --json");

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  const Json json = Json::parse(outcome.output);
  EXPECT_EQ(json.at("parameters"), 256 * 128 + 64 * 128 + 4 * (12 * 128 * 128 + 13 * 128) + 2 * 128);
  EXPECT_EQ(json.at("ranks"), 4);
  EXPECT_EQ(json.at("stage"), 3);
  EXPECT_EQ(json.at("dtype"), "fp32");
  EXPECT_EQ(json.at("preset"), "forebay");
  EXPECT_EQ(json.at("exact"), true);
  const Json& bytes = json.at("bytes_per_rank");
  const auto pool = [&](const char* name) { return bytes.at(name).get<std::uint64_t>(); };
  EXPECT_EQ(pool("model_states"), pool("parameters") + pool("gradients") + pool("optimizer"));
  EXPECT_EQ(pool("total"), pool("model_states") + pool("gathered") + pool("buckets") + pool("activations"));
  EXPECT_GE(pool("reserved"), pool("total"));
  EXPECT_GT(json.at("wire_bytes_per_step").at("sent"), 0);
  EXPECT_EQ(json.at("wire_bytes_per_step").at("received"), json.at("wire_bytes_per_step").at("sent"));
}

TEST(PlanCommand, ReproducesTheFirstFigureOfThePaper) {
  const std::uint64_t expected[] = {120'000'000'000, 31'406'250'000, 16'640'625'000, 1'875'000'000};
  for (int stage = 0; stage <= 3; ++stage) {
    const Outcome outcome =
        plan("--parameters 7.5B --ranks 64 --preset paper --json --stage " + std::to_string(stage));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_EQ(Json::parse(outcome.output).at("bytes_per_rank").at("model_states"), expected[stage]);
  }
}

TEST(PlanCommand, SaysNullForWhatACountCannotTell) {
  const Outcome outcome = plan("--parameters 124M --ranks 4 --stage 3 --json");

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  const Json bytes = Json::parse(outcome.output).at("bytes_per_rank");
  for (const char* name : {"gathered", "activations", "reserved", "total"})
    EXPECT_TRUE(bytes.at(name).is_null());
  const std::string text = plan("--parameters 124M --ranks 4 --stage 3").output;
  EXPECT_TRUE(std::regex_search(text, std::regex("\\nactivations +not counted\\n= total +>= \\d"))) << text;
}

TEST(PlanCommand, CountsScoresOnlyOfPlainAttention) {
  const std::string options = std::string(kShape) + "--stage 3 --dtype bf16 --batch 2 --json";
  const auto activations = [&](const std::string& more) {
    const Outcome outcome = plan(options + more);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return Json::parse(outcome.output).at("bytes_per_rank").at("activations").get<std::uint64_t>();
  };
  EXPECT_EQ(activations(" --attention fused"), activations(""));
  // A softmax before and after dropout, and its mask: 5 bytes a score.
  const std::uint64_t scores = activations(" --attention plain") - activations("");
  EXPECT_EQ(scores % 5, 0u);
  EXPECT_GT(scores, 0u);
  const std::uint64_t again =
      activations(" --recompute block --attention plain") - activations(" --recompute block");
  EXPECT_GT(again, 0u);
  EXPECT_LT(again, scores);
  EXPECT_NE(plan(options + " --attention flash").output.find("use fused or plain"), std::string::npos);
}

TEST(PlanCommand, KnowsGroups) {
  const std::string options = std::string(kShape) + "--ranks 8 --stage 3 --dtype bf16 --batch 2 ";
  const Json all = Json::parse(plan(options + "--order group:4 --json").output);
  const Json within = Json::parse(plan(options + "--order group:4 --shard-within group --json").output);
  EXPECT_EQ(all.at("group"), 4);
  EXPECT_EQ(within.at("shard_within_group"), true);
  EXPECT_EQ(within.at("bytes_per_rank").at("model_states"),
            2 * all.at("bytes_per_rank").at("model_states").get<std::uint64_t>());
  EXPECT_NE(plan(options + "--order group:4 --shard-within group").output.find("16Psi/G"), std::string::npos);

  for (const auto& [wrong, words] : std::vector<std::pair<std::string, std::string>>{
           {"--order group:3", "groups of 3 ranks do not divide 8 ranks"},
           {"--order groups", "--order is 'groups'"},
           {"--shard-within group", "add --order group:G"},
           {"--order group:4 --preset paper", "use preset forebay"}}) {
    const Outcome refused = plan(options + wrong);
    EXPECT_NE(refused.exit_code, 0) << wrong;
    EXPECT_NE(refused.output.find(words), std::string::npos) << refused.output;
  }
  EXPECT_NE(plan("--parameters 124M --ranks 4 --order group:2").output.find("needs the shape"),
            std::string::npos);
}

TEST(PlanCommand, SetsAllStagesSideBySideWithoutOne) {
  const Outcome outcome = plan(std::string(kShape) + "--ranks 3");

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* word :
       {"stage 0", "stage 1", "stage 2", "stage 3", "4Psi + 12Psi/N", "parameters", "gradients", "optimizer",
        "gathered", "buckets", "activations", "reserved", "sent", "received", "forebay-gpt"}) {
    EXPECT_NE(outcome.output.find(word), std::string::npos) << word << "\n" << outcome.output;
  }
}

TEST(PlanCommand, SaysWhatLiesBelowTheDevice) {
  const std::string options =
      std::string(kShape) + "--ranks 3 --offload optimizer+parameters --offload-tier nvme:/drive/a,/drive/b ";

  const Outcome table = plan(options);
  const Outcome one = plan(options + "--stage 3 --offload-fraction 0.7 --offload-staging 16MiB --json");

  ASSERT_EQ(table.exit_code, 0) << table.output;
  for (const char* words :
       {"units on the device", "pinned, on the host", "staging", "in files", "read per step",
        "written per step", "stage 3 below the device: pinned 2Psi/N and staging; files",
        "left out: offload optimizer+parameters"}) {
    EXPECT_NE(table.output.find(words), std::string::npos) << words << "\n" << table.output;
  }
  ASSERT_EQ(one.exit_code, 0) << one.output;
  const Json json = Json::parse(one.output);
  EXPECT_EQ(json.at("offload_tier"), "nvme");
  EXPECT_EQ(json.at("offload_fraction"), 0.7);
  EXPECT_EQ(json.at("offload_staging_bytes"), 16 << 20);
  EXPECT_EQ(json.at("units_on_device"), 2);
  const Json& file = json.at("file_bytes_per_rank");
  EXPECT_EQ(file.at("total"),
            file.at("optimizer").get<std::uint64_t>() + file.at("parameters").get<std::uint64_t>());
  EXPECT_GT(file.at("read_per_step"), file.at("optimizer"));
  EXPECT_EQ(file.at("written_per_step"), file.at("total"));
  EXPECT_EQ(json.at("host_bytes_per_rank").at("total"), json.at("bytes_per_rank").at("pinned"));
}

TEST(PlanCommand, LeavesOutTheStagesThatAPresetDoesNotHave) {
  const Outcome outcome = plan("--parameters 1B --ranks 8 --preset deepspeed");

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_NE(outcome.output.find("left out: preset deepspeed at stage 0"), std::string::npos)
      << outcome.output;
  EXPECT_NE(outcome.output.find("18Psi/N"), std::string::npos) << outcome.output;
}

TEST(PlanCommand, ReadsAConfig) {
  const Outcome outcome = plan("--config " + data("llama_3_8b.json") +
                               " --sequence 2048 --ranks 8 --stage 3 --json --host-ranks 0");

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  const Json json = Json::parse(outcome.output);
  EXPECT_EQ(json.at("parameters"), 8'030'261'248);
  EXPECT_FALSE(json.contains("host"));
}

TEST(PlanCommand, SaysWhenTheHostOrTheBudgetCannotHoldIt) {
  const Outcome outcome = plan("--parameters 1000T --stage 0 --memory 1GiB --host-ranks 1");

  ASSERT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_EQ(outcome.output.find("DOES NOT FIT: stage 0 on 1 rank of 1.00 GiB lacks at least "), 0u)
      << outcome.output;
  EXPECT_EQ(
      plan("--parameters 1B --memory 100GiB").output.find("fits: stage 0 on 1 rank of 100.00 GiB with "), 0u);
  EXPECT_EQ(plan("--parameters 1B --memory 1GiB").output.find("free memory"), std::string::npos);
  for (const char* words : {"free memory (MemAvailable)", "--memory 1.00 GiB: DOES NOT HOLD stage 0",
                            "the largest pool is optimizer", "--stage 1"}) {
    EXPECT_NE(outcome.output.find(words), std::string::npos) << words << "\n" << outcome.output;
  }
  const Json json = Json::parse(plan("--parameters 1000T --stage 0 --memory 1GiB --json").output);
  EXPECT_EQ(json.at("fits"), false);
  EXPECT_EQ(json.at("memory").at("fits"), false);
}

TEST(PlanCommand, TakesTheDriversRoomOffTheBudgetWhereItIsGiven) {
  const std::string model = "--parameters 1B --ranks 4 --host-ranks 0 --stage 0 ";
  const Json all = Json::parse(plan(model + "--memory 100GiB --json").output);
  const std::uint64_t needed = all.at("memory").at("needed_bytes");
  const std::string exactly = "--memory " + std::to_string(needed) + " ";
  EXPECT_EQ(plan(model + exactly).exit_code, 0) << "no device is there to take it from";

  const Outcome outcome = plan(model + exactly + "--device-room 384MiB");

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.output.find("less 384.00 MiB for the driver, --device-room): DOES NOT HOLD stage 0"),
            std::string::npos)
      << outcome.output;
  EXPECT_EQ(plan(model + exactly + "--device-room 0").exit_code, 0);
  const std::string with_room = "--memory " + std::to_string(needed + (384 << 20)) + " --device-room 384MiB ";
  const Json json = Json::parse(plan(model + with_room + "--json").output);
  EXPECT_EQ(json.at("memory").at("limit_bytes"), needed);
  EXPECT_EQ(json.at("fits"), true);
}

TEST(PlanCommand, ExitCodeSaysWhetherTheGivenBudgetHoldsAStage) {
  const std::string model = "--parameters 1B --ranks 4 --host-ranks 0 ";
  EXPECT_EQ(plan(model + "--stage 0 --memory 1GiB").exit_code, 1);
  EXPECT_EQ(plan(model + "--stage 0 --memory 100GiB --json").exit_code, 0);
  EXPECT_EQ(plan(model + "--memory 8GiB").exit_code, 0) << "stage 3 fits";
  EXPECT_EQ(plan(model + "--memory 1GiB").exit_code, 1) << "none fits";
  EXPECT_EQ(plan("--parameters 1000T --stage 0").exit_code, 0) << "it is no plan for this host";
  EXPECT_EQ(plan("--parameters 1000T --stage 0 --host-ranks 1").exit_code, 1);
  EXPECT_NE(plan("--help").output.find("Exit code: 0; 1 if"), std::string::npos);
}

struct BadInput {
  std::string arguments;
  const char* says;
};

// The figures of the ZeRO paper and of Korthikanti et al. for 1.5 billion parameters at batch 32.
TEST(PlanCommand, ReproducesTheActivationsOfThePapers) {
  const std::string shape =
      "--layers 48 --hidden 1600 --heads 25 --sequence 1024 --batch 32 --stage 1 --attention plain --json ";
  const auto activations = [&](const std::string& options) {
    const Outcome outcome = plan(shape + options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return Json::parse(outcome.output).at("activations");
  };
  const auto formula = [](const Json& of, const char* name) {
    return of.at("formulas").at(name).get<std::uint64_t>();
  };

  const Json none = activations("--recompute none --tensor-parallel 1");
  EXPECT_EQ(formula(none, "zero_all"), 60'397'977'600u);
  EXPECT_EQ(formula(none, "korthikanti_all"), 286'890'393'600u);
  EXPECT_EQ(formula(none, "korthikanti_selective"), 85'563'801'600u);
  EXPECT_EQ(formula(none, "loss"), 32u * 1024 * 256 * (2 + 4 + 4));
  EXPECT_EQ(none.at("device"), formula(none, "korthikanti_all") + formula(none, "loss"));
  EXPECT_FALSE(none.contains("plan"));

  const Json block = activations("--activations keep");
  EXPECT_EQ(formula(block, "saved") + formula(block, "zero_segment"), 6'291'456'000u);
  EXPECT_EQ(block.at("plan").at("device"), 5'033'164'800u);
  const Json segments = activations("--recompute every:6 --activations keep");
  EXPECT_EQ(formula(segments, "saved") + formula(segments, "zero_segment"), 8'388'608'000u);

  const Json cut = activations("--tensor-parallel 5 --activations partition");
  EXPECT_EQ(cut.at("plan").at("kept"), 5'033'164'800u / 5);
  EXPECT_EQ(formula(cut, "saved_partitioned"), 5'033'164'800u / 5);
  EXPECT_EQ(12 * formula(cut, "partition_wire"), formula(cut, "zero_tensor_parallel_wire"));
  EXPECT_EQ(cut.at("plan").at("wire_received_per_micro_step"), formula(cut, "partition_wire"));

  const Json host = activations("--tensor-parallel 5 --activations partition+cpu");
  EXPECT_EQ(host.at("plan").at("kept"), 0);
  EXPECT_EQ(host.at("plan").at("pinned"), 5'033'164'800u / 5);
  const Json files = activations("--tensor-parallel 5 --activations partition+nvme:/somewhere");
  EXPECT_EQ(files.at("plan").at("files"), 5'033'164'800u / 5);
}

// In forebay-gpt's words: the first block of every K is recomputed, alone, and the others keep everything.
// Measured there: 35,322,880 and 45,333,504 bytes of activations, and --memory 80MiB is refused for every:2.
TEST(PlanCommand, RecomputesOneLayerOfEverySoMany) {
  const std::string shape =
      "--layers 8 --hidden 256 --heads 8 --sequence 128 --batch 4 --dtype fp32 --ranks 2 --tensor-parallel 2 "
      "--stage 2 --activations partition --memory 80MiB --attention plain --recompute ";
  const std::uint64_t sbh = 128 * 4 * 256;
  const std::uint64_t layer = (4 * 4 + 2) * sbh + (12 * 4 * sbh + 9ull * 8 * 128 * 128 * 4) / 2;
  const auto device = [&](const std::string& every) {
    return Json::parse(plan(shape + every + " --json").output)
        .at("activations")
        .at("device")
        .get<std::uint64_t>();
  };
  // Slices of saved inputs, two that are gathered, the layers that keep everything and one computed again.
  EXPECT_EQ(device("every:2"), 4 * sbh * 2 + 2 * sbh * 4 + 4 * layer + layer);
  EXPECT_EQ(device("every:4"), 2 * sbh * 2 + 2 * sbh * 4 + 6 * layer + layer);
  EXPECT_GT(device("every:2"), 35'322'880u);
  EXPECT_GT(device("every:4"), 45'333'504u);
  EXPECT_EQ(device("every:1"), device("block"));

  const Outcome two = plan(shape + "every:2");
  EXPECT_EQ(two.exit_code, 1) << two.output;
  for (const char* words :
       {"DOES NOT HOLD stage 2", "one layer of every 2 recomputed, 4 of 8; the others keep everything",
        "saved, 4 inputs (4 partition)", "kept by the 4 layers that are not recomputed"})
    EXPECT_NE(two.output.find(words), std::string::npos) << words << "\n" << two.output;
  EXPECT_NE(plan("--help").output.find("every:K"), std::string::npos);
}

// forebay-gpt keeps other tensors than the formula counts: measured are 49,028,096 bytes of activations.
TEST(PlanCommand, SaysWhoseEstimateActivationsAre) {
  const std::string shape =
      "--layers 8 --hidden 256 --heads 8 --sequence 128 --batch 4 --dtype fp32 --ranks 2 --tensor-parallel 2 "
      "--stage 2 --attention plain ";
  const char* const estimate = "an estimate by Korthikanti's count of the tensors that layers keep";
  const char* const judged = "activations among them are an estimate";
  const std::string none = plan(shape + "--recompute none --memory 200MiB").output;
  EXPECT_NE(none.find(estimate), std::string::npos) << none;
  EXPECT_NE(none.find(judged), std::string::npos) << none;
  EXPECT_NE(none.find("without scores, masks, as forebay-gpt           41943040 B"), std::string::npos)
      << none;
  EXPECT_EQ(none.find("if nothing were recomputed"), std::string::npos) << none;
  EXPECT_NE(none.find("= on the device                                   63700992 B"), std::string::npos)
      << none;
  const std::string alone = plan(kShape + std::string("--ranks 4 --stage 2 --memory 200MiB")).output;
  EXPECT_NE(alone.find(estimate), std::string::npos) << alone;
  EXPECT_NE(alone.find(judged), std::string::npos) << alone;
  EXPECT_EQ(plan(shape + "--recompute none").output.find(judged), std::string::npos);
  EXPECT_EQ(plan("--parameters 1B --memory 200GiB --host-ranks 0").output.find(judged), std::string::npos);
}

// Layers are numbered over the whole model: 0, 3 and 6 are recomputed, so stage 2, layers 4 and 5, has none.
TEST(PlanCommand, RecomputesTheSameLayersInAPipeline) {
  const Outcome outcome = plan(
      "--layers 8 --hidden 256 --heads 8 --sequence 128 --batch 4 --dtype fp32 --pipeline-parallel 4 --stage "
      "1 "
      "--micro-steps 8 --recompute every:3 --attention plain --json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  const std::uint64_t sbh = 128 * 4 * 256;
  const std::uint64_t input = 4 * sbh;
  const std::uint64_t layer = (16 * 4 + 2) * sbh + 9ull * 8 * 128 * 128 * 4;
  const Json stages = Json::parse(outcome.output).at("pipeline");
  const auto activations = [&](int stage) { return stages.at(stage).at("activations").get<std::uint64_t>(); };
  EXPECT_EQ(activations(0), 4 * input + 4 * layer + layer);
  EXPECT_EQ(activations(1), 3 * input + 3 * layer + layer);
  EXPECT_EQ(activations(2), 2 * 2 * layer);
  EXPECT_EQ(activations(3), input + layer + layer);
}

// forebay-gpt measured 22,026,240 bytes a micro-step with recomputation and 17,831,936 without.
TEST(PlanCommand, TellsTheTensorParallelWireOfWhatIsRecomputed) {
  const std::string shape =
      "--layers 8 --hidden 256 --heads 8 --sequence 128 --batch 4 --dtype fp32 --ranks 2 --tensor-parallel 2 "
      "--stage 2 --host-ranks 0 ";
  const auto wire = [&](const std::string& options) {
    const Outcome outcome = plan(shape + options + " --json");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return Json::parse(outcome.output)
        .at("activations")
        .at("formulas")
        .at("tensor_parallel_wire")
        .get<double>();
  };
  EXPECT_NEAR(wire("--recompute block"), 22'026'240, 0.005 * 22'026'240);
  EXPECT_NEAR(wire("--recompute none"), 17'831'936, 0.005 * 17'831'936);

  const std::string none = plan(shape + "--recompute none").output;
  EXPECT_NE(none.find("4 all-reduces of sbh e a layer, 2 at the ends"), std::string::npos) << none;
  EXPECT_EQ(none.find("Pa adds"), std::string::npos) << none;
  EXPECT_EQ(none.find("a recomputed one"), std::string::npos) << none;
  const std::string block = plan(shape + "--recompute block --activations partition").output;
  EXPECT_NE(block.find("4 all-reduces of sbh e a layer, 1 a recomputed one"), std::string::npos) << block;
  EXPECT_NE(block.find("Pa adds"), std::string::npos) << block;
}

TEST(PlanCommand, LeavesThePapersContradictionsOut) {
  const Outcome outcome = plan(
      "--layers 125 --hidden 8192 --heads 64 --sequence 1024 --batch 32 --stage 1 --ranks 128 "
      "--tensor-parallel 16 --activations partition");

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* part : {"partitioned (Pa)                                4194304000 B", "8.3 %"})
    EXPECT_NE(outcome.output.find(part), std::string::npos) << part << "\n" << outcome.output;
  EXPECT_EQ(outcome.output.find("paper prints"), std::string::npos) << outcome.output;
}

// Sharding helps nobody whose activations alone exceed the budget.
TEST(PlanCommand, AdvisesOnActivationsWhereNothingElseHelps) {
  const std::string shape =
      "--layers 48 --hidden 6144 --heads 48 --sequence 2048 --vocabulary 50257 --ranks 8 --stage 0 --json ";
  const auto advice = [&](const std::string& options) {
    return Json::parse(plan(shape + options).output).at("advice").get<std::string>();
  };
  EXPECT_NE(advice("--memory 100GiB --batch 1").find("optimizer"), std::string::npos);
  EXPECT_NE(advice("--memory 100GiB --batch 8").find("activations"), std::string::npos);
}

TEST(PlanCommand, ChoosesHowActivationsAreKept) {
  const std::string shape =
      "--layers 48 --hidden 1600 --heads 25 --sequence 1024 --batch 4 --stage 1 --ranks 80 --tensor-parallel "
      "5 "
      "--host-ranks 0 --json --activations ";
  const auto plan_with = [&](const std::string& options) {
    const Outcome outcome = plan(shape + options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return Json::parse(outcome.output);
  };
  // The choice with exactly the memory of a placement and two chunks.
  const auto chosen_for = [&](const std::string& placement) {
    const auto bytes = plan_with(placement).at("bytes_per_rank").at("reserved").get<std::uint64_t>();
    const Json json = plan_with("auto --memory " + std::to_string(bytes + (4 << 20)));
    EXPECT_TRUE(json.at("fits").get<bool>());
    return json.at("activations").at("plan").at("placements").get<std::string>();
  };

  EXPECT_EQ(chosen_for("keep"), "48 keep");
  EXPECT_NE(chosen_for("partition").find("partition"), std::string::npos);
  EXPECT_EQ(chosen_for("partition").find("spill"), std::string::npos);
  EXPECT_EQ(chosen_for("partition+cpu"), "48 partition+spill");
}

Json plan_of(const std::string& arguments) {
  const Outcome outcome = plan(arguments + " --host-ranks 0 --json");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  return Json::parse(outcome.output);
}

// kShape's matrices, token embedding and the biases of first matrices are cut, the other parameters are
// whole.
TEST(PlanCommand, TensorParallelismDividesTheModelStates) {
  const int h = 128;
  for (const int t : {1, 2, 4}) {
    const Json json = plan_of(kShape + ("--stage 0 --dtype fp32 --tensor-parallel " + std::to_string(t)));

    const int layer = 12 * h * h / t + (3 * h + 4 * h) / t + 6 * h;
    EXPECT_EQ(json.at("part_parameters"), 256 / t * h + 64 * h + 4 * layer + 2 * h) << t;
    EXPECT_EQ(json.at("parameters"), 256 * h + 64 * h + 4 * (12 * h * h + 13 * h) + 2 * h);
    EXPECT_EQ(json.at("ranks"), t);
    EXPECT_EQ(json.at("data_parallel"), 1);
    const auto states = json.at("bytes_per_rank").at("model_states").get<double>();
    EXPECT_NEAR(states, 16 * json.at("part_parameters").get<double>(), 16 * 6 * 512.0) << t;  // Padding.
  }
}

TEST(PlanCommand, RanksAreAllRanks) {
  const std::string shape = kShape + std::string("--stage 1 --dtype fp32 ");
  const Json alone = plan_of(shape + "--ranks 4");
  const Json both = plan_of(shape + "--ranks 16 --tensor-parallel 2 --pipeline-parallel 2");

  EXPECT_EQ(alone.at("data_parallel"), 4);
  EXPECT_EQ(both.at("ranks"), 16);
  EXPECT_EQ(both.at("data_parallel"), 4);
  EXPECT_EQ(both.at("tensor_parallel"), 2);
  EXPECT_EQ(both.at("pipeline_parallel"), 2);
  // About 4 Psi whole and as much of gradients, and 8 Psi / 4, of a rank's quarter.
  const auto psi = both.at("part_parameters").get<double>();
  EXPECT_NEAR(both.at("bytes_per_rank").at("model_states").get<double>(), (8 + 8.0 / 4) * psi, 0.1 * psi);
  EXPECT_LT(both.at("bytes_per_rank").at("model_states"), alone.at("bytes_per_rank").at("model_states"));

  const Outcome text = plan(shape + "--ranks 16 --tensor-parallel 2 --pipeline-parallel 2");
  EXPECT_NE(text.output.find("16 ranks = 4 data-parallel x 2 tensor-parallel x 2 pipeline stages"),
            std::string::npos)
      << text.output;
}

TEST(PlanCommand, APipelineStageHasItsLayersAndTheMicroBatchesInFlight) {
  const std::string shape =
      "--layers 7 --hidden 64 --heads 4 --sequence 32 --vocabulary 500 --batch 3 --dtype fp32 --stage 0 "
      "--pipeline-parallel 3 --recompute block ";
  const std::uint64_t layer = 12 * 64 * 64 + 13 * 64;
  const std::uint64_t input = 3 * 32 * 64 * 4;
  for (const int micro_steps : {1, 2, 8}) {
    const Json json = plan_of(shape + "--micro-steps " + std::to_string(micro_steps));

    const Json& stages = json.at("pipeline");
    ASSERT_EQ(stages.size(), 3u);
    const std::uint64_t layers[] = {2, 2, 3};
    const std::uint64_t more[] = {500 * 64 + 32 * 64, 0, 500 * 64 + 2 * 64};
    std::uint64_t largest = 0;
    for (int i = 0; i < 3; ++i) {
      SCOPED_TRACE(i);
      const Json& stage = stages.at(i);
      EXPECT_EQ(stage.at("layers"), layers[i]);
      EXPECT_EQ(stage.at("parameters"), layers[i] * layer + more[i]);
      EXPECT_EQ(stage.at("micro_batches"), std::min(3 - i, micro_steps));
      largest = std::max(largest, stage.at("needed").get<std::uint64_t>());
    }
    EXPECT_EQ(json.at("bytes_per_rank").at("reserved"), largest);
    const int shown = json.at("pipeline_stage");
    EXPECT_EQ(stages.at(shown).at("needed"), largest);
    EXPECT_EQ(json.at("activations").at("plan").at("kept"),
              layers[shown] * std::min(3 - shown, micro_steps) * input);
  }

  const Outcome text = plan(shape + "--micro-steps 8");
  EXPECT_NE(text.output.find("pipeline stage"), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("ZeRO stage 0"), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("figures above are those of pipeline stage "), std::string::npos) << text.output;
}

TEST(PlanCommand, ShowsThePipelineStageThatNeedsMost) {
  const Json json =
      plan_of("--config " + data("llama_2_7b.json") +
              " --batch 1 --sequence 16 --stage 0 --pipeline-parallel 2 --activations partition");

  const Json& stages = json.at("pipeline");
  const auto needed = [&](int i) { return stages.at(i).at("needed").get<std::uint64_t>(); };
  EXPECT_EQ(json.at("pipeline_stage"), needed(1) > needed(0) ? 1 : 0);
  EXPECT_EQ(json.at("bytes_per_rank").at("reserved"), std::max(needed(0), needed(1)));
}

TEST(PlanCommand, HoldsTheRanksOfThisHostAgainstIt) {
  const auto needed_by = [&](int ranks) {
    const Outcome outcome = plan(
        kShape + ("--ranks 8 --stage 0 --pipeline-parallel 2 --json --host-ranks " + std::to_string(ranks)));
    const Json json = Json::parse(outcome.output);
    std::vector<std::uint64_t> stages;
    for (const Json& stage : json.at("pipeline")) stages.push_back(stage.at("needed"));
    return std::pair(json.at("host").at("limits").at(0).at("needed_bytes").get<std::uint64_t>(), stages);
  };

  const auto [all, stages] = needed_by(8);
  EXPECT_EQ(all, 4 * stages.at(0) + 4 * stages.at(1));
  EXPECT_EQ(needed_by(4).first, 4 * std::max(stages.at(0), stages.at(1)));
  EXPECT_EQ(needed_by(1).first, std::max(stages.at(0), stages.at(1)));
}

TEST(PlanCommand, HoldsPinnedActivationsAgainstThisHost) {
  const Outcome outcome = plan(std::string(kShape) +
                               "--ranks 2 --tensor-parallel 2 --stage 0 --json --host-ranks 2 --batch 2 "
                               "--recompute block --activations partition+cpu");
  const Json json = Json::parse(outcome.output);

  const auto pinned = json.at("activations").at("plan").at("pinned").get<std::uint64_t>();
  const auto reserved = json.at("bytes_per_rank").at("reserved").get<std::uint64_t>();
  EXPECT_GT(pinned, 0u);
  EXPECT_EQ(json.at("host").at("limits").at(0).at("needed_bytes"), 2 * (reserved + pinned));
}

TEST(PlanCommand, RefusesBadInputWithItsNameAndExitCode2) {
  const std::string shape(kShape);
  const BadInput cases[] = {
      {"--offload-fraction 0.5", "add --offload optimizer"},
      {"--offload-tier nvme", "add --offload optimizer"},
      {shape + "--stage 4", "--stage is 4"},
      {shape + "--stage -1", "--stage is -1"},
      {shape + "--ranks 0", "--ranks is 0"},
      {shape + "--ranks -2", "--ranks is -2"},
      {shape + "--tensor-parallel 2 --optimizer muon",
       "--optimizer muon needs whole matrices, which --tensor-parallel 2 splits"},
      {shape + "--tensor-parallel 2 --optimizer adafactor", "--optimizer adafactor needs whole matrices"},
      {shape + "--ranks x", "--ranks"},
      {shape + "--batch 0", "--batch is 0"},
      {shape + "--micro-steps 0", "--micro-steps is 0"},
      {shape + "--dtype fp8", "--dtype is 'fp8'"},
      {shape + "--accumulate both", "--accumulate is 'both'"},
      {shape + "--stage 2 --accumulate local", "accumulate local"},
      {shape + "--bucket 0", "--bucket is 0;"},
      {shape + "--bucket much", "--bucket is 'much'"},
      {shape + "--memory -1", "--memory"},
      {shape + "--device-room 1GiB", "add --memory"},
      {shape + "--memory 1GiB --device-room 1GiB", "leaves nothing of --memory"},
      {shape + "--chunk 3", "--chunk is 3 bytes; did you mean 3GiB?"},
      {shape + "--chunk 3MiB",
       "--chunk is '3MiB', and devices map powers of two; use one from 4.00 KiB to 1.00 GiB"},
      {shape + "--chunk 2KiB", "--chunk is '2KiB'"},
      {shape + "--chunk 2GiB", "--chunk is '2GiB'"},
      {shape + "--chunk 0", "--chunk is '0'"},
      {shape + "--offload all", "--offload is 'all'"},
      {shape + "--offload optimizer+parameters --stage 2", "use stage 3"},
      {shape + "--offload optimizer --offload-tier disk", "--offload-tier is 'disk'"},
      {shape + "--offload optimizer --offload-fraction auto",
       "--offload-fraction is auto, which is measured"},
      {shape + "--offload optimizer --offload-fraction 2", "offload-fraction is 2"},
      {shape + "--offload optimizer --offload-tier nvme --offload-staging 1MiB", "at least 8 MiB"},
      {"--parameters 1B --offload optimizer --offload-fraction 0.5", "give the shape"},
      {shape + "--activations some", "--activations is 'some'; use keep"},
      {shape + "--activations partition --recompute none", "--recompute none saves none"},
      {shape + "--recompute every:0", "--recompute is 'every:0'"},
      {shape + "--tensor-parallel 3", "which it does not divide"},
      {shape + "--tensor-parallel 0", "--tensor-parallel is 0"},
      {shape + "--pipeline-parallel 0", "--pipeline-parallel is 0"},
      {shape + "--pipeline-parallel 5", "each stage needs a layer; use 1 to the model's layers, 4"},
      {shape + "--ranks 6 --tensor-parallel 2 --pipeline-parallel 2",
       "--ranks is 6, which --tensor-parallel 2 times --pipeline-parallel 2 = 4 does not divide"},
      {shape + "--ranks 1 --tensor-parallel 2", "use a multiple of 2"},
      {shape + "--ranks 4 --tensor-parallel 2 --host-ranks 5", "use 0 to all ranks (4)"},
      {shape + "--ranks 8 --tensor-parallel 2 --order group:8", "do not divide 4 ranks"},
      {"--parameters 1B --pipeline-parallel 2", "need the shape"},
      {shape + "--pipeline-parallel 2 --preset paper --stage 1", "need the shape"},
      {shape + "--activations auto", "add --memory and --stage"},
      {shape + "--activations auto --stage 1 --memory 4KiB", "has nothing to choose"},
      {"--parameters 1B --activations keep", "need the shape"},
      {shape + "--preset nobody", "--preset is 'nobody'"},
      {shape + "--json", "add --stage"},
      {shape + "--host-ranks 2", "--host-ranks is 2"},
      {"--layers 2 --hidden 130 --heads 4", "heads 4 does not divide hidden 130"},
      {"--layers -2", "--layers is -2"},
      {"--layers 99999999999", "layers is 99999999999"},
      {"--parameters 1e30", "parameters is '1e30'"},
      {"--parameters many", "parameters is 'many'"},
      {"--parameters 0", "parameters is '0'"},
      {"--parameters 1B --layers 2", "both given"},
      {"--config " + data("gpt2.json") + " --hidden 64", "both given"},
      {"--config " + data("gpt2.json") + " --sequence 1025", "longer than"},
      {"--config " + data("absent.json"), "cannot read"},
      {"--config " + data("malformed.json"), "not a JSON object"},
      {"--config " + data("bert.json"), "gpt2, llama, mistral"},
      {"--config " + data("gpt2_without_width.json"), "n_embd"},
      {"--config " + data("llama_without_positions.json"), "give the tokens of one sequence with --sequence"},
      {"--parameters 1B --stage 1 --preset deepspeed", "stages 2 and 3 only"},
      {"--parameters 1000T --ranks 4 --stage 3 --micro-steps 1000000 --preset paper",
       "in a step of 1000000 micro-steps are more than 2^64"},
      {shape + "--no-such-option", "--no-such-option"},
  };
  for (const BadInput& bad : cases) {
    const Outcome outcome = plan(bad.arguments);
    EXPECT_EQ(outcome.exit_code, 2) << bad.arguments << "\n" << outcome.output;
    EXPECT_NE(outcome.output.find(bad.says), std::string::npos) << bad.arguments << "\n" << outcome.output;
  }
}

// The last values that are taken, and the first ones that are not.
TEST(PlanCommand, TakesValuesUpToTheirLimits) {
  const std::string shape(kShape);
  for (const char* const taken :
       {"--chunk 4KiB", "--chunk 1GiB", "--ranks 1000000 --stage 0", "--ranks 4 --host-ranks 4",
        "--host-ranks 1", "--pipeline-parallel 4", "--batch 16777216 --stage 0",
        "--micro-steps 1000000 --stage 0", "--memory 1GiB --device-room 1023MiB"}) {
    EXPECT_NE(plan(shape + taken).exit_code, 2) << taken;
  }
  for (const auto& [refused, says] : std::vector<std::pair<std::string, std::string>>{
           {"--chunk 2048", "--chunk is 2048 bytes; did you mean 2048GiB?"},
           {"--chunk 2147483648", "use one from 4.00 KiB to 1.00 GiB, such as 2MiB"},
           {"--ranks 1000001", "--ranks is 1000001; use 1 to 1000000"},
           {"--ranks 4 --host-ranks 5", "--host-ranks is 5; use 0 to all ranks (4)"},
           {"--tensor-parallel 4097", "--tensor-parallel is 4097; use 1 to 4096"},
           {"--bucket auto", "--bucket is auto, which is measured where a model is trained"},
           {"--ranks 4 --memory 1GiB --device-room 1GiB",
            "--device-room 1.00 GiB leaves nothing of --memory 1.00 GiB"},
           {"--ranks 4 --parameters 1B", "--parameters and a shape were both given"}}) {
    const Outcome outcome = plan(shape + refused);
    EXPECT_EQ(outcome.exit_code, 2) << refused;
    EXPECT_NE(outcome.output.find(says), std::string::npos) << refused << "\n" << outcome.output;
  }
}

TEST(PlanCommand, DescribesTheModel) {
  const auto second_line = [](const std::string& arguments) {
    std::istringstream text(plan(arguments + " --host-ranks 0 --stage 0").output);
    std::string line;
    std::getline(text, line);
    std::getline(text, line);
    return line;
  };
  EXPECT_EQ(second_line(kShape),
            "GPT-2 kind: 4 layers, hidden 128, 4 heads, sequence 64, vocabulary 256 (tied), batch 8");
  EXPECT_EQ(second_line("--config " + data("llama_3_8b.json")),
            "Llama kind: 32 layers, hidden 4096, 32 heads (8 for keys and values), sequence 8192, vocabulary "
            "128256 (not tied), batch 1");
  EXPECT_EQ(second_line("--config " + data("llama_3_8b.json") + " --batch 3 --sequence 100"),
            "Llama kind: 32 layers, hidden 4096, 32 heads (8 for keys and values), sequence 100, vocabulary "
            "128256 (not tied), batch 3");
  const forebay::testing::TemporaryDirectory directory;
  const std::string config = directory / "config.json";
  std::ofstream(config) << R"({"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64,
      "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 256,
      "max_position_embeddings": 32, "num_local_experts": 8, "num_experts_per_tok": 2})";
  EXPECT_EQ(second_line("--config " + config),
            "Llama kind: 2 layers, hidden 64, 4 heads, 2 of 8 experts, sequence 32, vocabulary 256 (not "
            "tied), batch 1");
}

TEST(PlanCommand, SaysWhereKeyValueHeadsDoNotDivide) {
  const std::string model = "--config " + data("llama_3_8b.json") + " --stage 1 --host-ranks 0 ";
  const auto says = [&](const std::string& ranks) {
    return plan(model + ranks).output.find("key-value heads do not divide over the tensor-parallel ranks") !=
           std::string::npos;
  };
  EXPECT_FALSE(says("--ranks 8 --tensor-parallel 8"));
  EXPECT_TRUE(says("--ranks 16 --tensor-parallel 16"));
}

TEST(PlanCommand, RefusesAConfigThatIsNoRegularFile) {
  const Outcome outcome = plan("--config /dev/zero");

  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.output.find("/dev/zero: it is not a regular file"), std::string::npos) << outcome.output;
}

TEST(Command, NamesAWordThatIsNoSubcommand) {
  const Outcome outcome = forebay("nonsense");

  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.output.find("'nonsense'"), std::string::npos) << outcome.output;
}

TEST(Command, FailsWhenHelpCannotBeWritten) {
  for (const char* const words : {"--help", "--version", "help plan", "plan --version", "run --help",
                                  "plan --parameters 1M", "plan --parameters 1M --stage 3 --json"}) {
    EXPECT_EQ(forebay(words).exit_code, 0) << words;
    EXPECT_EQ(forebay(std::string(words) + " >/dev/full").exit_code, 1) << words;
  }
}

TEST(ReportCommand, SaysPlainlyWhatItCannotRead) {
  const Outcome outcome = forebay("report " + data("malformed.json"));

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.output.find("forebay report: cannot read report"), 0u) << outcome.output;
  EXPECT_EQ(forebay("report /dev/zero").exit_code, 1);
}

TEST(ReportCommand, ExitCodeSaysWhetherTheRunsAreEqual) {
  const forebay::testing::TemporaryDirectory directory;
  std::ifstream file(data("run_report.json"));
  const Json report = Json::parse(file);
  const auto write = [&](const char* name, const char* key, const Json& value) {
    Json changed = report;
    changed[key] = value;
    std::ofstream(directory / name) << changed;
    return directory / name;
  };
  const std::string one = data("run_report.json") + " ";
  const std::string same = write("same", "stage", 3);
  const std::string loss = write("loss", "loss", {5.25});
  const std::string other = write("other", "steps", 2);
  for (const char* const more : {"", " --json"}) {
    EXPECT_EQ(forebay("report " + one + more).exit_code, 0);
    EXPECT_EQ(forebay("report " + one + same + more).exit_code, 0);
    EXPECT_EQ(forebay("report " + one + loss + more).exit_code, 1);
    EXPECT_EQ(forebay("report " + one + other + more).exit_code, 1);
    EXPECT_EQ(forebay("report " + one + same + " " + loss + more).exit_code, 1);
  }
  EXPECT_EQ(Json::parse(forebay("report " + one + other + " --json").output).at("equal"), false);
  EXPECT_EQ(Json::parse(forebay("report " + one + loss + " --json").output).at("equal"), false);
  EXPECT_EQ(Json::parse(forebay("report " + one + same + " --json").output).at("equal"), true);
}

TEST(ReportCommand, FailsWhenItsOutputCannotBeWritten) {
  EXPECT_EQ(forebay("report " + data("run_report.json")).exit_code, 0);
  EXPECT_EQ(forebay("report " + data("run_report.json") + " >/dev/full").exit_code, 1);
}

TEST(PlanCommand, FindsALargestNumberInFewTrials) {
  constexpr std::uint64_t kMost = 100'000;
  for (const std::uint64_t largest : {0u, 1u, 2u, 3u, 4u, 65'535u, 65'536u, 99'999u, 100'000u, 100'001u}) {
    std::uint64_t trials = 0, tried_most = 0;
    const std::uint64_t found = forebay::largest_number(kMost, [&](std::uint64_t number) {
      ++trials;
      tried_most = std::max(tried_most, number);
      return number <= largest;
    });
    EXPECT_EQ(found, std::min(largest, kMost));
    EXPECT_LE(tried_most, kMost);
    EXPECT_LE(trials, largest >= kMost ? 18u : 35u) << largest;
  }
}

// The next larger model, and the next larger batch, do not fit.
TEST(PlanCommand, FindsTheLargestModelAndBatch) {
  const std::string rest =
      "--hidden 1024 --heads 16 --sequence 256 --vocabulary 50257 --ranks 8 --memory 8GiB --host-ranks 0 ";
  const Outcome largest = plan(rest + "--layers 12 --largest --json");
  ASSERT_EQ(largest.exit_code, 0) << largest.output;
  std::uint64_t before = 0;
  const Json json = Json::parse(largest.output);
  ASSERT_EQ(json.at("stages").size(), 4u);
  for (const Json& one : json.at("stages")) {
    const std::string stage = "--stage " + std::to_string(one.at("stage").get<int>()) + " ";
    const auto layers = one.at("layers").get<std::uint64_t>();
    const auto batch = one.at("batch").get<std::uint64_t>();
    ASSERT_GT(layers, 0u);
    EXPECT_GE(layers, before) << "a later stage holds no less";
    before = layers;
    EXPECT_EQ(plan(rest + stage + "--layers " + std::to_string(layers)).exit_code, 0) << stage;
    EXPECT_EQ(plan(rest + stage + "--layers " + std::to_string(layers + 1)).exit_code, 1) << stage;
    EXPECT_EQ(plan(rest + stage + "--layers 12 --batch " + std::to_string(batch)).exit_code, 0) << stage;
    EXPECT_EQ(plan(rest + stage + "--layers 12 --batch " + std::to_string(batch + 1)).exit_code, 1) << stage;
  }
  const Outcome tiny = plan("--layers 1 --hidden 8 --heads 1 --memory 80GiB --stage 3 --largest");
  EXPECT_EQ(tiny.exit_code, 0);
  EXPECT_NE(tiny.output.find("its layers                    at least 10,000"), std::string::npos)
      << tiny.output;
  const Outcome text = plan(rest + "--layers 12 --largest");
  EXPECT_NE(text.output.find("largest model, parameters"), std::string::npos) << text.output;
  EXPECT_EQ(plan("--parameters 7B --largest --memory 8GiB").exit_code, 2);
  EXPECT_EQ(plan("--layers 4 --largest").exit_code, 2);
}

}  // namespace
