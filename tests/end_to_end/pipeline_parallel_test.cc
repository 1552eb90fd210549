// Pipeline stages in forebay-gpt. Within one grid of ranks no other option changes a bit; across grids losses
// agree up to the rounding of sums; and a stage has only as many passes in flight as stages follow, plus one.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "model/shape.h"
#include "tests/end_to_end/parallel_run.h"
#include "tests/support/process.h"
#include "trainer/training.h"

namespace forebay::testing {
namespace {

// Three layers do not divide evenly into two stages. There are more micro-steps than stages, so that every
// kind of pass occurs.
const Words kModel = with(
    kGridModel, {"--layers", "3", "--micro-steps", "4", "--steps", "3", "--dropout", "0.2", "--clip", "0.5"});

std::string files_in(const TemporaryDirectory& directory) {
  return "partition+nvme:" + (directory / "");
}

int stage_of_rank(const GridWords& grid, std::size_t rank) {
  return static_cast<int>(rank) / (grid.ranks / grid.pipeline);
}

void expect_as_planned(const gpt::TrainingReport& report) {
  for (const gpt::RankReport& rank : report.ranks) {
    EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
    EXPECT_EQ(rank.sent_bytes_per_step, static_cast<double>(rank.planned_sent_bytes_per_step));
    EXPECT_EQ(rank.received_bytes_per_step, static_cast<double>(rank.planned_received_bytes_per_step));
    EXPECT_EQ(rank.saved_device_bytes, rank.planned_saved_device_bytes);
    EXPECT_EQ(rank.saved_host_bytes, rank.planned_saved_host_bytes);
    EXPECT_EQ(rank.saved_file_bytes, rank.planned_saved_file_bytes);
    EXPECT_EQ(rank.saved_sent_bytes_per_step, static_cast<double>(rank.planned_saved_sent_bytes_per_step));
  }
}

class PipelineGrids : public ::testing::TestWithParam<GridWords> {
 protected:
  void expect_same_bits_with(const std::vector<Words>& choices, const std::string& type) {
    const Words common = kModel + GetParam().words() + Words{"--dtype", type};
    const gpt::TrainingReport plain = train(common);
    expect_as_planned(plain);
    for (const Words& choice : choices) {
      SCOPED_TRACE(GetParam().text() + ", " + type + ::testing::PrintToString(choice));

      const gpt::TrainingReport report = train(common + choice);

      expect_same_bits(report, plain);
      expect_as_planned(report);
    }
  }

  const TemporaryDirectory directory_;
};

TEST_P(PipelineGrids, HaveTheSameBitsWhateverElseIsChosen) {
  for (const std::string type : {"fp32", "bf16"}) {
    expect_same_bits_with(
        {
            {"--stage", "1", "--recompute", "block"},
            {"--stage", "2", "--recompute", "every:2"},
            {"--stage", "3"},
            {"--stage", "3", "--recompute", "block", "--activations", "partition"},
            {"--stage", "2", "--recompute", "every:2", "--activations", "partition"},
            {"--stage", "1", "--recompute", "block", "--activations", "partition+cpu"},
            {"--stage", "3", "--recompute", "block", "--activations", files_in(directory_)},
            {"--stage", "2", "--offload", "optimizer"},
            {"--stage", "3", "--offload", "optimizer+parameters", "--recompute", "block"},
            {"--stage", "3", "--no-overlap", "--recompute", "none"},
        },
        type);
  }
}

std::string grid_name(const ::testing::TestParamInfo<GridWords>& info) {
  return "ranks" + std::to_string(info.param.ranks) + "_tensor" + std::to_string(info.param.tensor) +
         "_pipeline" + std::to_string(info.param.pipeline);
}

INSTANTIATE_TEST_SUITE_P(Arrangements, PipelineGrids,
                         ::testing::Values(GridWords{2, 1, 2}, GridWords{3, 1, 3}, GridWords{4, 1, 2},
                                           GridWords{4, 2, 2}, GridWords{8, 2, 2}, GridWords{6, 3, 2}),
                         grid_name);

// Every ZeRO stage with every recomputation and every placement of its inputs.
class SlowPipelineGrids : public PipelineGrids {};

TEST_P(SlowPipelineGrids, HaveTheSameBitsWithEveryChoice) {
  std::vector<Words> choices;
  for (const std::string stage : {"0", "1", "2", "3"}) {
    choices.push_back({"--stage", stage, "--recompute", "none"});
    for (const std::string recompute : {"block", "every:2"}) {
      for (const std::string& place : {std::string("keep"), std::string("partition"),
                                       std::string("partition+cpu"), files_in(directory_)})
        choices.push_back({"--stage", stage, "--recompute", recompute, "--activations", place});
    }
  }
  for (const std::string type : {"fp32", "bf16", "fp16"}) expect_same_bits_with(choices, type);
}

INSTANTIATE_TEST_SUITE_P(Slow, SlowPipelineGrids,
                         ::testing::Values(GridWords{2, 1, 2}, GridWords{3, 1, 3}, GridWords{4, 1, 2},
                                           GridWords{4, 2, 2}, GridWords{8, 2, 2}, GridWords{6, 3, 2},
                                           GridWords{6, 2, 3}, GridWords{6, 1, 3}),
                         grid_name);

// A layer's arithmetic does not depend on its pipeline stage. The order of the norm's sum of squares does,
// and so does the order of contributions to the embedding's gradient.
TEST(PipelineParallel, LosesTheSameOnEveryGridButForRounding) {
  const gpt::TrainingReport one = train(with(kModel, {"--batch", "4"}));
  for (const GridWords& grid :
       {GridWords{2, 1, 2}, {3, 1, 3}, {4, 1, 2}, {4, 2, 2}, {8, 2, 2}, {6, 3, 2}, {6, 2, 3}}) {
    SCOPED_TRACE(grid.text());
    const int replicas = grid.ranks / grid.tensor / grid.pipeline;

    const gpt::TrainingReport report =
        train(with(kModel + grid.words(), {"--batch", std::to_string(4 / replicas), "--stage", "2"}));

    ASSERT_EQ(report.loss.size(), one.loss.size());
    for (std::size_t i = 0; i < one.loss.size(); ++i) {
      EXPECT_NEAR(report.loss[i], one.loss[i], 1e-6 * one.loss[i]) << "step " << i + 1;
      EXPECT_NEAR(*report.grad_norm[i], *one.grad_norm[i], 1e-5 * *one.grad_norm[i]) << "step " << i + 1;
    }
  }
}

TEST(PipelineParallel, HoldsAsManyMicroBatchesAsStagesAreLeft) {
  for (const int micro_steps : {1, 2, 3, 5}) {
    const GridWords grid{3, 1, 3};
    SCOPED_TRACE(std::to_string(micro_steps) + " micro-steps");

    const gpt::TrainingReport report =
        train(with(kModel + grid.words(), {"--micro-steps", std::to_string(micro_steps)}));

    for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
      const int left = grid.pipeline - stage_of_rank(grid, rank);
      EXPECT_EQ(report.ranks[rank].most_passes_in_flight,
                static_cast<std::uint64_t>(std::min(left, micro_steps)));
    }
    expect_as_planned(report);
  }
}

// A stage keeps its layers' activations for each micro-batch in flight, so the bytes grow with their number.
TEST(PipelineParallel, KeepsActivationsForTheMicroBatchesInFlight) {
  const auto activations = [](int stages, int micro_steps, const Words& more) {
    const Words words = with(kModel, {"--layers", "4", "--micro-steps", std::to_string(micro_steps)});
    return train(words + GridWords{stages, 1, stages}.words() + more).ranks[0].peak_bytes.activations;
  };
  const Words saved = {"--recompute", "block", "--activations", "partition+cpu"};
  const double one = static_cast<double>(activations(4, 2, {}) - activations(4, 1, {}));
  const double two = static_cast<double>(activations(4, 3, {}) - activations(4, 2, {}));
  const double rest = static_cast<double>(activations(4, 4, {}) - activations(4, 3, {}));
  EXPECT_GT(one, 0);
  // Offsets are multiples of 512 bytes.
  EXPECT_NEAR(two, one, 1024);
  EXPECT_NEAR(rest, one, 1024);
  EXPECT_EQ(activations(4, 5, {}), activations(4, 4, {})) << "not more than the stages";
  // With offloaded inputs hardly anything but tokens grows.
  EXPECT_LT(static_cast<double>(activations(4, 4, saved) - activations(4, 3, saved)), 0.1 * one);
}

TEST(PipelineParallel, AStageThatRecomputesNothingTakesNoMoreForIt) {
  const Words words = kModel + GridWords{3, 1, 3}.words();
  const gpt::TrainingReport none = train(words);
  const gpt::TrainingReport first = train(words + Words{"--recompute", "every:3"});
  expect_same_bits(first, none);
  EXPECT_LT(first.ranks[0].planned_bytes.activations, none.ranks[0].planned_bytes.activations);
  for (const std::size_t rank : {1u, 2u})
    EXPECT_EQ(first.ranks[rank].planned_bytes, none.ranks[rank].planned_bytes) << "rank " << rank;
}

TEST(PipelineParallel, SendsOneActivationAndOneGradientForEachMicroBatch) {
  const GridWords grid{4, 1, 4};
  const gpt::TrainingReport report =
      train(with(kModel + grid.words(), {"--layers", "4", "--micro-steps", "5", "--stage", "1"}));
  const double message = 2 * 10 * 24 * 4;
  const double sent[] = {5 * message, 2 * 5 * message, 2 * 5 * message, 5 * message};
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(report.ranks[rank].pipeline_sent_bytes_per_step, sent[rank]) << "rank " << rank;
    EXPECT_EQ(report.ranks[rank].pipeline_received_bytes_per_step, sent[rank]) << "rank " << rank;
  }
  // The report's traffic has all of it, by peer.
  const auto to = [&](std::size_t from, const std::string& operation, std::size_t peer) {
    for (const gpt::OperationReport& one : report.traffic[from]) {
      if (one.operation == operation) return static_cast<double>(one.sent_bytes[peer]);
    }
    return 0.0;
  };
  EXPECT_EQ(to(1, "send", 2), 3 * 5 * message);
  EXPECT_EQ(to(1, "send", 0), 3 * 5 * message);
  // The gradient of wte.weight, once per step between the first and the last stage: half of it is sent, half
  // of the sum comes back.
  const double tokens = 256 * 24 * 4;
  EXPECT_EQ(to(0, "reduce_scatter", 3), 3 * tokens / 2);
  EXPECT_EQ(to(3, "reduce_scatter", 0), 3 * tokens / 2);
}

TEST(PipelineParallel, DividesTheModelOverItsStages) {
  const gpt::TrainingReport one = train(with(kModel, {"--layers", "4"}));
  const gpt::TrainingReport two = train(with(kModel + GridWords{2, 1, 2}.words(), {"--layers", "4"}));
  const auto states = [](const gpt::TrainingReport& report, std::size_t rank) {
    return static_cast<double>(report.ranks[rank].peak_bytes.model_states());
  };
  for (const std::size_t rank : {0, 1}) {
    EXPECT_LT(states(two, rank), 0.7 * states(one, 0));
    EXPECT_GT(states(two, rank), 0.4 * states(one, 0));
  }
}

TEST(PipelineParallel, RunsAsProcessesWithTheSameBits) {
  const TemporaryDirectory directory;
  const Words common = kModel + GridWords{4, 2, 2}.words();
  const gpt::TrainingReport threads = train(common);
  std::vector<std::string> communicators = {"shm"};
  if (FOREBAY_TEST_GLOO) communicators.emplace_back("gloo");
  for (const std::string& communicator : communicators) {
    SCOPED_TRACE(communicator);
    const std::string path = directory / (communicator + ".json");
    const Finished finished =
        run_program(Words{FOREBAY_GPT} +
                    with(common, {"--communicator", communicator, "--report", path, "--stage", "3"}));
    ASSERT_EQ(finished.exit_code, 0) << finished.output;
    std::ifstream file(path);
    EXPECT_EQ(nlohmann::json::parse(file).at("digest"), threads.digest);
  }
}

TEST(PipelineParallel, ResumesWithTheSameBits) {
  const TemporaryDirectory directory;
  for (const GridWords& grid : {GridWords{2, 1, 2}, {8, 2, 2}}) {
    SCOPED_TRACE(grid.text());
    const std::string state = directory / std::to_string(grid.ranks);
    const Words words = kModel + grid.words() + Words{"--stage", "2"};
    const gpt::TrainingReport whole = train(words);
    train(with(words, {"--steps", "1", "--save-state", state}));

    const gpt::TrainingReport resumed = train(words + Words{"--load-state", state});

    EXPECT_EQ(resumed.first_step, 1u);
    EXPECT_EQ(resumed.digest, whole.digest);
    EXPECT_EQ(resumed.loss, std::vector<double>(whole.loss.begin() + 1, whole.loss.end()));
  }
}

TEST(PipelineParallel, AStateOfOtherStagesIsLoaded) {
  const TemporaryDirectory directory;
  const std::string two = directory / "two";
  const std::string whole = directory / "whole";
  const Words words = with(kModel, {"--steps", "1"});
  train(words + GridWords{2, 1, 2}.words() + Words{"--save-state", two});
  const std::string digest = train(words + Words{"--save-state", whole}).digest;

  EXPECT_EQ(train(words + GridWords{3, 1, 3}.words() + Words{"--load-state", two}).first_step, 1u);
  const Words loaded = words + GridWords{2, 1, 2}.words() + Words{"--load-state", whole};
  train(loaded + Words{"--save-state", directory / "again"});
  EXPECT_EQ(train(words + Words{"--load-state", directory / "again"}).digest, digest);
}

TEST(PipelineParallel, AStateOfAnotherModelIsRefused) {
  const TemporaryDirectory directory;
  const std::string state = directory / "state";
  const Words words = with(kModel, {"--steps", "1"}) + GridWords{4, 2, 2}.words();
  train(words + Words{"--save-state", state});
  const std::string heads = error_of(with(words + Words{"--load-state", state}, {"--heads", "2"}));
  EXPECT_NE(heads.find("was saved with another --heads"), std::string::npos) << heads;
}

TEST(PipelineParallel, ExportsAndTakesTheWeightsOfTheWholeModel) {
  const TemporaryDirectory directory;
  const auto exported = [&](const Words& words, const std::string& name) {
    train(words + Words{"--export", directory / name});
    std::ifstream file(directory / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const Words none = with(kModel, {"--steps", "0"});
  const std::string alone = exported(none, "alone");
  EXPECT_FALSE(alone.empty());
  EXPECT_EQ(exported(none + GridWords{2, 1, 2}.words(), "two"), alone);
  EXPECT_EQ(exported(none + GridWords{3, 1, 3}.words(), "three"), alone);
  EXPECT_EQ(exported(none + GridWords{8, 2, 2}.words(), "eight"), alone);

  // Weights that were trained in one grid go on in another.
  const Words two = kModel + GridWords{4, 2, 2}.words();
  const std::string trained = exported(two, "trained");
  EXPECT_NE(trained, alone);
  EXPECT_EQ(exported(none + GridWords{3, 1, 3}.words() + Words{"--initial", directory / "trained"}, "again"),
            trained);
}

TEST(PipelineParallel, StagesStopAfterTheSameStepAndSave) {
  const TemporaryDirectory directory;
  const std::string state = directory / "state";
  const Words words = with(kModel + GridWords{4, 1, 2}.words(), {"--steps", "100000"});
  gpt::request_stop();  // The first step sees it.

  const gpt::TrainingReport report = train(words + Words{"--save-state", state});

  gpt::clear_stop();
  EXPECT_TRUE(report.interrupted);
  EXPECT_EQ(report.steps, 1u);
  EXPECT_EQ(train(with(words, {"--steps", "1", "--load-state", state})).digest, report.digest);
}

TEST(PipelineParallel, StagesSkipAStepThatOverflowsTogether) {
  const Words words =
      with(kModel + GridWords{4, 2, 2}.words(), {"--dtype", "fp16", "--loss-scale", "1e30", "--steps", "4"});
  const gpt::TrainingReport report = train(words);
  EXPECT_FALSE(report.grad_norm[0].has_value());
  expect_same_bits(train(words + Words{"--stage", "3", "--recompute", "block"}), report);
}

TEST(PipelineStages, HaveAllLayersOnceAndAsEvenlyAsMayBe) {
  for (std::size_t layers = 1; layers <= 9; ++layers) {
    for (std::size_t count = 1; count <= layers; ++count) {
      std::size_t next = 0;
      for (std::size_t index = 0; index < count; ++index) {
        const gpt::LayerRange range = gpt::layers_of({.layers = layers}, {index, count});
        EXPECT_EQ(range.begin, next);
        EXPECT_GE(range.count(), layers / count);
        EXPECT_LE(range.count(), (layers + count - 1) / count);
        next = range.end;
      }
      EXPECT_EQ(next, layers);
    }
  }
}

TEST(PipelineParallel, RefusesWhatCannotBe) {
  const struct {
    Words words;
    std::string named;
  } cases[] = {
      {{"--ranks", "4", "--pipeline-parallel", "3"}, "--pipeline-parallel: the pipeline-parallel size 3"},
      {{"--ranks", "4", "--tensor-parallel", "2", "--pipeline-parallel", "4"},
       "does not divide the number of tensor-parallel groups"},
      {{"--ranks", "2", "--pipeline-parallel", "0"},
       "--pipeline-parallel: '0' was given; use a whole number from 1"},
      {{"--ranks", "2", "--pipeline-parallel", "-1"}, "--pipeline-parallel"},
      {{"--ranks", "6", "--pipeline-parallel", "6", "--layers", "5"},
       "--pipeline-parallel 6 is more than --layers 5"},
  };
  for (const auto& [words, named] : cases)
    expect_usage_error(with({FOREBAY_GPT, "--quiet", "--steps", "1"}, words), named);
}

// Every rank has another part of the model, so none has a data-parallel peer.
TEST(PipelineParallel, RanksOfOneGridWithOtherOptionsAreNamed) {
  const TemporaryDirectory directory;
  const std::string text = directory / "text";
  std::ofstream(text) << std::string(5000, 'x');
  const std::vector<std::pair<Words, std::string>> odd = {{{"--seed", "9"}, "--seed"},
                                                          {{"--text", text}, "--text"},
                                                          {{"--heads", "2"}, "--heads"},
                                                          {{"--steps", "5"}, "--steps"},
                                                          {{"--stage", "1"}, "stage"},
                                                          {{"--matmul", "library"}, "--matmul"},
                                                          {{"--export", directory / "weights"}, "--export"}};
  for (const GridWords& grid : {GridWords{2, 1, 2}, {2, 2, 1}, {4, 2, 2}}) {
    for (const auto& [words, named] : odd) {
      SCOPED_TRACE(grid.text() + " " + named);
      const Words common = kModel + grid.words();
      std::vector<gpt::TrainerOptions> by_rank(static_cast<std::size_t>(grid.ranks),
                                               gpt::resolve_options(*gpt::parse_command(common).options));
      by_rank.back() = gpt::resolve_options(*gpt::parse_command(with(common, words)).options);
      try {
        gpt::run_training(by_rank);
        ADD_FAILURE() << "the run did not fail";
      } catch (const Error& error) {
        const std::string message = error.status().message();
        EXPECT_NE(message.find(named + " is"), std::string::npos) << message;
        EXPECT_NE(message.find("on rank " + std::to_string(grid.ranks - 1)), std::string::npos) << message;
      }
    }
  }
}

TEST(PipelineParallel, RanksOfDifferentGridsAreNamed) {
  const Words words = kModel + Words{"--ranks", "2"};
  std::vector<gpt::TrainerOptions> by_rank(2, gpt::resolve_options(*gpt::parse_command(words).options));
  by_rank[1].pipeline_parallel = 2;
  try {
    gpt::run_training(by_rank);
    FAIL() << "the run did not fail";
  } catch (const Error& error) {
    EXPECT_NE(error.status().message().find("--pipeline-parallel"), std::string::npos)
        << error.status().message();
  }
}

}  // namespace
}  // namespace forebay::testing
