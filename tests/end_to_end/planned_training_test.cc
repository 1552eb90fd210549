// `forebay plan` gives the bytes that a run of forebay-gpt holds and sends on every rank of a grid, and
// `forebay report` shows these figures beside the formulas.

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/end_to_end/parallel_run.h"
#include "tests/support/process.h"
#include "trainer/training.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;

// Sizes that divide little, and 256 tokens that three ranks do not share evenly.
const Words kShape = {"--layers", "5", "--hidden", "36",   "--heads",       "6", "--sequence", "14",
                      "--batch",  "3", "--dtype",  "fp32", "--micro-steps", "2", "--bucket",   "40KiB"};
const Words kRun = {"--threads",      "1",     "--steps", "1", "--matmul", "plain",
                    "--communicator", "local", "--quiet"};

Json plan_of(const Words& words, const Words& shape = kShape) {
  const Finished finished =
      run_program(Words{FOREBAY_COMMAND, "plan", "--json", "--host-ranks", "0"} + shape + words);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  return Json::parse(finished.output);
}

// The ranks of one pipeline stage.
struct StagePlan {
  std::uint64_t parameters = 0;
  std::uint64_t model_states = 0;
  std::uint64_t gathered = 0;
  std::uint64_t buckets = 0;
  std::uint64_t sent = 0;
};

StagePlan of_stage(const Json& plan, int stage) {
  if (plan.contains("pipeline")) {
    const Json& of = plan.at("pipeline").at(static_cast<std::size_t>(stage));
    return {of.at("parameters"), of.at("model_states"), of.at("gathered"), of.at("buckets"),
            of.at("sent_per_step")};
  }
  const Json& bytes = plan.at("bytes_per_rank");
  return {plan.at("part_parameters"), bytes.at("model_states"), bytes.at("gathered"), bytes.at("buckets"),
          plan.at("wire_bytes_per_step").at("sent")};
}

// The promise is half a percent. Figures without padding are exact.
void expect_planned(std::uint64_t measured, const Json& planned) {
  EXPECT_NEAR(static_cast<double>(measured), planned.get<double>(), 0.005 * planned.get<double>());
}

TEST(PlannedTraining, HoldsAndSendsWhatThePlanOfItsGridSays) {
  for (const GridWords& grid : {GridWords{1, 1}, {4, 2}, {6, 3}, {4, 1, 2}, {6, 2, 3}}) {
    for (const std::string stage : {"0", "1", "2", "3"}) {
      SCOPED_TRACE(grid.text() + ", stage " + stage);
      const Words words = grid.words() + Words{"--stage", stage};

      const gpt::TrainingReport run = train(kShape + kRun + words);
      const Json plan = plan_of(words);

      for (std::size_t r = 0; r < run.ranks.size(); ++r) {
        const gpt::RankReport& rank = run.ranks[r];
        const StagePlan stage_plan = of_stage(plan, static_cast<int>(r) * grid.pipeline / grid.ranks);
        EXPECT_EQ(rank.parameters, stage_plan.parameters);
        EXPECT_EQ(rank.peak_bytes.model_states(), stage_plan.model_states);
        EXPECT_EQ(rank.peak_bytes.gathered, stage_plan.gathered);
        EXPECT_EQ(rank.peak_bytes.buckets, stage_plan.buckets);
        EXPECT_EQ(rank.sent_bytes_per_step, static_cast<double>(stage_plan.sent));
      }
    }
  }
}

// keep: all inputs whole. partition: divided by t, plus buffers to gather into. partition+cpu: only staging
// on the device, the rest in pinned memory.
TEST(PlannedTraining, KeepsActivationsInTheBytesOfThePlan) {
  const std::uint64_t input = 3 * 14 * 36 * 4;
  const std::uint64_t inputs = 5 * input;
  for (const GridWords& grid : {GridWords{2, 2}, {3, 3}}) {
    const auto t = static_cast<std::uint64_t>(grid.tensor);
    const auto saved = [&](const std::string& place) {
      SCOPED_TRACE(grid.text() + ", " + place);
      const Words words =
          grid.words() + Words{"--stage", "1", "--recompute", "block", "--activations", place};
      const gpt::RankReport run = train(kShape + kRun + words).ranks[grid.tensor - 1];
      const Json plan = plan_of(words).at("activations").at("plan");
      if (place != "keep") {
        expect_planned(run.saved_device_bytes, plan.at("device"));
        expect_planned(run.saved_host_bytes, plan.at("pinned"));
        EXPECT_EQ(run.saved_sent_bytes_per_step, 2 * plan.at("wire_sent_per_micro_step").get<double>());
      }
      return std::pair(run, plan);
    };

    const auto [keep, keep_plan] = saved("keep");
    const auto [cut, cut_plan] = saved("partition");
    const auto [spilled, spilled_plan] = saved("partition+cpu");

    // The model's own memory for inputs, which goes away except for one buffer that they pass through.
    expect_planned(
        keep.peak_bytes.activations - (cut.peak_bytes.activations - cut.saved_device_bytes) + input,
        keep_plan.at("kept"));
    EXPECT_NEAR(keep_plan.at("kept").get<double>(), static_cast<double>(inputs),
                0.05 * static_cast<double>(inputs));
    EXPECT_NEAR(cut_plan.at("kept").get<double>(), static_cast<double>(inputs / t), 5 * 512.0);
    EXPECT_EQ(spilled_plan.at("kept"), 0);
    EXPECT_EQ(spilled.saved_device_bytes, spilled_plan.at("staging").get<std::uint64_t>() +
                                              spilled_plan.at("gathered").get<std::uint64_t>());
    EXPECT_NEAR(static_cast<double>(spilled.saved_host_bytes), static_cast<double>(inputs / t), 5 * 512.0);
  }
}

// The same blocks are recomputed, and tensor parallelism sends the planned bytes. Hidden is so wide that the
// parts of the loss, which the plan leaves out, do not matter.
TEST(PlannedTraining, RecomputesTheBlocksOfThePlan) {
  const Words wide = with(kShape, {"--hidden", "120"});
  for (const GridWords& grid : {GridWords{2, 2}, {3, 3}, {4, 2, 2}}) {
    for (const std::string recompute : {"none", "block", "every:3"}) {
      SCOPED_TRACE(grid.text() + ", " + recompute);
      Words words = grid.words() + Words{"--stage", "1", "--recompute", recompute};
      if (recompute != "none") words = words + Words{"--activations", "partition"};

      const gpt::TrainingReport run = train(wide + kRun + words);
      const Json plan = plan_of(words, wide);

      const int stage = plan.at("pipeline_stage");
      const auto rank = run.ranks[static_cast<std::size_t>(stage * grid.ranks / grid.pipeline)];
      const Json& activations = plan.at("activations");
      const Json& sums = activations.at("formulas").at("tensor_parallel_wire");
      EXPECT_NEAR(rank.tensor_received_bytes_per_step, 2 * sums.get<double>(),
                  0.005 * 2 * sums.get<double>());
      if (recompute == "none") continue;
      EXPECT_EQ(rank.saved_device_bytes, activations.at("plan").at("device").get<std::uint64_t>());
      EXPECT_EQ(rank.saved_sent_bytes_per_step,
                2 * activations.at("plan").at("wire_sent_per_micro_step").get<double>());
    }
  }
}

TEST(PlannedTraining, ReportsSetFormulasOfTheGridBeside) {
  const TemporaryDirectory directory;
  const auto report = [&](const std::string& name, const Words& words) {
    const gpt::TrainingReport run =
        train(with(kShape, {"--hidden", "120"}) + kRun + GridWords{4, 2}.words() + words);
    std::ofstream(directory / name) << gpt::report_json(run);
    return directory / name;
  };
  const Words recomputed = {"--stage", "1", "--recompute", "every:2", "--activations", "partition"};
  const Finished same = run_program(
      {FOREBAY_COMMAND, "report", "--json", report("a", recomputed), report("b", {"--stage", "2"})});
  ASSERT_EQ(same.exit_code, 0) << same.output;
  const Json runs = Json::parse(same.output).at("runs");
  for (const Json& run : runs) {
    // The formulas leave out padding and the parts of the loss.
    const Json& states = run.at("model_state_bytes");
    EXPECT_NEAR(states.at("measured").get<double>() / states.at("formula").get<double>(), 1, 0.05);
    const Json& wire = run.at("wire_bytes_per_step");
    EXPECT_NEAR(wire.at("sent").get<double>() / wire.at("theory").get<double>(), 1, 0.05);
    const Json& tensor = run.at("tensor_bytes_per_step");
    EXPECT_NEAR(tensor.at("sent").get<double>() / tensor.at("theory").get<double>(), 1, 0.01);
  }
  EXPECT_EQ(runs.at(0).at("saved_bytes").at("sent_per_step").at("measured"),
            runs.at(0).at("saved_bytes").at("sent_per_step").at("planned"));
  EXPECT_GT(runs.at(0).at("saved_bytes").at("device").at("measured"), 0);

  const Finished other = run_program({FOREBAY_COMMAND, "report", directory / "b",
                                      report("c", {"--stage", "2", "--seed", "2", "--dropout", "0.5"})});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_NE(other.output.find("not the same training (seed 1 / 2, dropout 0 / 0.5)"), std::string::npos)
      << other.output;
}

}  // namespace
}  // namespace forebay::testing
