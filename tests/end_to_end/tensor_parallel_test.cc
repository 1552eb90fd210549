// Tensor-parallel ranks in forebay-gpt. Within one grid of ranks no other option changes a bit; across grids
// losses agree up to fp32 rounding.
//
// `./dev test` runs a few of the grids and options; the label slow runs all.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "forebay/error.h"
#include "model/shape.h"
#include "tests/end_to_end/parallel_run.h"
#include "tests/support/process.h"
#include "trainer/training.h"

namespace forebay::testing {
namespace {

const Words kDropout = {"--dropout", "0.2"};
const Words kClip = {"--clip", "0.5"};  // Less than the norms below, so that clipping happens.

struct Choices {
  std::vector<GridWords> grids;
  std::vector<std::string> stages, recomputes, types;
};
const Choices kSome = {.grids = {{2, 2}, {3, 3}, {4, 2}},
                       .stages = {"1", "3"},
                       .recomputes = {"block", "every:2"},
                       .types = {"bf16"}};
const Choices kAll = {.grids = {{1, 1}, {2, 2}, {3, 3}, {4, 2}, {6, 3}, {6, 6}},
                      .stages = {"0", "1", "2", "3"},
                      .recomputes = {"none", "block", "every:2"},
                      .types = {"fp32", "bf16", "fp16"}};

void expect_the_same_bits_within_a_grid(const Choices& choices) {
  for (const GridWords& grid : choices.grids) {
    for (const std::string& type : choices.types) {
      const Words common = kGridModel + grid.words() + kDropout + kClip + Words{"--dtype", type};
      const gpt::TrainingReport plain = train(common + Words{"--stage", "0"});
      for (const std::string& stage : choices.stages) {
        for (const std::string& recompute : choices.recomputes) {
          SCOPED_TRACE(grid.text() + ", " + type + ", stage " + stage + ", recompute " + recompute);

          const gpt::TrainingReport report =
              train(common + Words{"--stage", stage, "--recompute", recompute});

          expect_same_bits(report, plain);
          for (const gpt::RankReport& rank : report.ranks) {
            EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
            // After a skipped step the weights are not gathered again.
            const auto planned = static_cast<double>(rank.planned_sent_bytes_per_step);
            EXPECT_LE(rank.sent_bytes_per_step, planned);
            if (skips_none(report)) {
              EXPECT_EQ(rank.sent_bytes_per_step, planned);
            }
          }
        }
      }
    }
  }
}

TEST(TensorParallel, GivesTheSameBitsForEveryStageAndRecomputationWithinAGrid) {
  expect_the_same_bits_within_a_grid(kSome);
}

TEST(SlowTensorParallel, GivesTheSameBitsForEveryStageAndRecomputationWithinAGrid) {
  expect_the_same_bits_within_a_grid(kAll);
}

TEST(TensorParallel, GivesTheSameBitsWhateverElseIsChosen) {
  const Words common = kGridModel + GridWords{4, 2}.words() + kDropout + kClip;
  const gpt::TrainingReport plain = train(common);

  expect_same_bits(train(common + Words{"--stage", "3", "--offload", "optimizer+parameters"}), plain);
  expect_same_bits(train(common + Words{"--stage", "2", "--no-overlap", "--shard-within", "all"}), plain);
  expect_same_bits(train(with(common, {"--bucket", "64", "--stage", "1"})), plain);
  // Ranks as processes, over shared memory.
  const TemporaryDirectory directory;
  const std::string path = directory / "report.json";
  const Finished finished =
      run_program(Words{FOREBAY_GPT} + with(common, {"--communicator", "shm", "--report", path}));
  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  std::ifstream file(path);
  EXPECT_EQ(nlohmann::json::parse(file).at("digest"), plain.digest);
}

// Activations are added in pieces of at least 64 KiB, however small the bucket of the gradients is.
TEST(TensorParallel, SumsOfActivationsHaveALeastPiece) {
  const Words common = kGridModel + GridWords{2, 2}.words();
  const auto count = [](const gpt::TrainingReport& report) {
    std::uint64_t operations = 0;
    for (const gpt::OperationReport& one : report.traffic.at(0)) operations += one.count;
    return operations;
  };
  const gpt::TrainingReport usual = train(common);

  const gpt::TrainingReport small = train(with(common, {"--bucket", "1"}));

  EXPECT_GT(count(usual), 0u);
  EXPECT_EQ(count(small), count(usual));
  expect_same_bits(small, usual);
}

TEST(TensorParallel, RanksOfAllPartsStopAfterTheSameStepAndSave) {
  const TemporaryDirectory directory;
  const std::string state = directory / "state";
  const Words words = with(kGridModel + GridWords{4, 2}.words(), {"--steps", "100000"});
  gpt::request_stop();  // The first step sees it.

  const gpt::TrainingReport report = train(words + Words{"--save-state", state});

  gpt::clear_stop();
  EXPECT_TRUE(report.interrupted);
  EXPECT_EQ(report.steps, 1u);
  EXPECT_EQ(train(with(words, {"--steps", "1", "--load-state", state})).digest, report.digest);
}

// A kill leaves files of a step that not all ranks have saved.
TEST(TensorParallel, GoesOnFromTheLastStepThatAllRanksHaveSaved) {
  const TemporaryDirectory directory;
  const std::string state = directory / "state";
  const Words words = kGridModel + GridWords{2, 2}.words();
  const gpt::TrainingReport whole = train(words);
  train(with(words, {"--steps", "1", "--save-state", state}));
  std::filesystem::create_directory(state + "/.saving-step-000000000002");
  std::ofstream(state + "/.saving-step-000000000002/rank-0-of-2.safetensors") << "nothing that is whole";

  const gpt::TrainingReport resumed = train(words + Words{"--load-state", state, "--save-state", state});

  EXPECT_EQ(resumed.digest, whole.digest);
  EXPECT_FALSE(std::filesystem::exists(state + "/.saving-step-000000000002"));
  EXPECT_FALSE(std::filesystem::exists(state + "/step-000000000001"));
}

// The sums over the columns of a matrix are made in parts, so the last bits of activations differ. AdamW
// divides a gradient by its own size. If a gradient is only a rounding error, its update differs by up to
// --lr, in elements that hardly matter. Measured: losses differ by 4e-8 of themselves, norms by 8e-7; a
// dropout mask that depended on the grid would change a loss by more than 1e-4, and a missing part would
// change a norm by more.
TEST(TensorParallel, LosesTheSameOnEveryGridButForRounding) {
  for (const Words& dropout : {Words{}, kDropout}) {
    // The same samples: one data-parallel rank of 4, or two of 2.
    const gpt::TrainingReport one = train(with(kGridModel + dropout + kClip, {"--batch", "4"}));
    for (const GridWords& grid : {GridWords{2, 1}, {2, 2}, {3, 3}, {4, 2}, {6, 6}}) {
      SCOPED_TRACE(grid.text());
      const std::string batch = grid.ranks == grid.tensor ? "4" : "2";

      const gpt::TrainingReport report =
          train(with(kGridModel + grid.words() + dropout + kClip, {"--batch", batch}));

      ASSERT_EQ(report.loss.size(), one.loss.size());
      for (std::size_t i = 0; i < one.loss.size(); ++i) {
        EXPECT_NEAR(report.loss[i], one.loss[i], 1e-6 * one.loss[i]) << "step " << i + 1;
        EXPECT_NEAR(*report.grad_norm[i], *one.grad_norm[i], 1e-5 * *one.grad_norm[i]) << "step " << i + 1;
      }
    }
  }
}

TEST(TensorParallel, DropoutChangesTheLossAndRepeats) {
  const gpt::TrainingReport with = train(kGridModel + kDropout);

  EXPECT_GT(std::abs(with.loss[0] - train(kGridModel).loss[0]), 1e-4);
  expect_same_bits(train(kGridModel + kDropout), with);
  EXPECT_NE(train(kGridModel + kDropout + Words{"--seed", "2"}).loss[0], with.loss[0]);
}

TEST(TensorParallel, AResumedRunDropsWhatOneThatDidNotStopDrops) {
  const TemporaryDirectory directory;
  const std::string state = directory / "state";
  for (const GridWords& grid : {GridWords{1, 1}, {4, 2}}) {
    SCOPED_TRACE(grid.text());
    const std::string here = state + std::to_string(grid.ranks);
    const Words words = kGridModel + grid.words() + kDropout + Words{"--stage", "2"};
    const gpt::TrainingReport whole = train(words);
    train(with(words, {"--steps", "2", "--save-state", here, "--save-every", "1"}));

    const gpt::TrainingReport resumed = train(words + Words{"--load-state", here});

    EXPECT_EQ(resumed.first_step, 2u);
    EXPECT_EQ(resumed.digest, whole.digest);
    EXPECT_EQ(resumed.loss, std::vector<double>(whole.loss.begin() + 2, whole.loss.end()));
  }
}

void expect_the_same_bits_wherever_they_wait(const std::vector<std::string>& stages) {
  const TemporaryDirectory directory;
  const std::string files = "partition+nvme:" + (directory / "");
  for (const GridWords& grid : {GridWords{1, 1}, {3, 3}, {4, 2}}) {
    const Words common = kGridModel + grid.words() + kDropout + kClip + Words{"--dtype", "bf16"};
    const gpt::TrainingReport plain = train(common);
    for (const std::string& stage : stages) {
      for (const std::string recompute : {"block", "every:2"}) {
        for (const std::string& place :
             {std::string("keep"), std::string("partition"), std::string("partition+cpu"), files}) {
          SCOPED_TRACE(grid.text() + ", stage " + stage + ", recompute " + recompute + ", " + place);

          const gpt::TrainingReport report =
              train(common + Words{"--stage", stage, "--recompute", recompute, "--activations", place});

          expect_same_bits(report, plain);
          for (const gpt::RankReport& rank : report.ranks) {
            EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
            EXPECT_EQ(rank.saved_device_bytes, rank.planned_saved_device_bytes);
            EXPECT_EQ(rank.saved_host_bytes, rank.planned_saved_host_bytes);
            EXPECT_EQ(rank.saved_file_bytes, rank.planned_saved_file_bytes);
            EXPECT_EQ(rank.saved_host_bytes > 0, place.find('+') != std::string::npos);
            EXPECT_EQ(rank.saved_file_bytes > 0, place == files);
            EXPECT_EQ(rank.saved_sent_bytes_per_step,
                      static_cast<double>(rank.planned_saved_sent_bytes_per_step));
            EXPECT_EQ(rank.saved_sent_bytes_per_step > 0, place != "keep" && grid.tensor > 1);
            EXPECT_LE(rank.saved_sent_bytes_per_step, 0.1 * rank.tensor_sent_bytes_per_step);
          }
        }
      }
    }
  }
}

TEST(SavedActivations, GiveTheSameBitsWhereverTheyWait) {
  expect_the_same_bits_wherever_they_wait({"2"});
}

TEST(SlowSavedActivations, GiveTheSameBitsWhereverTheyWait) {
  expect_the_same_bits_wherever_they_wait(kAll.stages);
}

// With 12 blocks, the kept inputs need more memory than the buffers to fetch and gather ahead.
TEST(SavedActivations, TakeAPartOfTheDeviceOrNothingButStaging) {
  const Words words = with(kGridModel + GridWords{2, 2}.words(), {"--layers", "12", "--steps", "1"}) +
                      Words{"--recompute", "block"};
  const std::uint64_t input = 2 * 10 * 24 * 4;

  const gpt::RankReport keep = train(words).ranks[0];
  const gpt::RankReport cut = train(words + Words{"--activations", "partition"}).ranks[0];
  const gpt::RankReport spilled = train(words + Words{"--activations", "partition+cpu"}).ranks[0];

  EXPECT_GE(cut.saved_device_bytes, 12 * input / 2);
  EXPECT_LT(cut.peak_bytes.activations, keep.peak_bytes.activations);
  EXPECT_LT(spilled.peak_bytes.activations, cut.peak_bytes.activations);
  EXPECT_GE(spilled.saved_host_bytes, 12 * input / 2);
  EXPECT_LT(spilled.saved_device_bytes, 6 * input);
}

// Tensor-parallel ranks alone, whose sums and gathered inputs are all the payload.
TEST(SavedActivations, AreInTheTrafficOfTheReport) {
  const gpt::TrainingReport report =
      train(with(kGridModel + GridWords{2, 2}.words(), {"--layers", "12", "--steps", "1"}) +
            Words{"--recompute", "block", "--activations", "partition"});
  for (const gpt::RankReport& rank : report.ranks) {
    std::uint64_t sent = 0;
    for (const gpt::OperationReport& one :
         report.traffic[static_cast<std::size_t>(&rank - report.ranks.data())]) {
      if (one.operation != "reduce_scatter" && one.operation != "all_gather") continue;
      for (const std::uint64_t bytes : one.sent_bytes) sent += bytes;
    }
    EXPECT_GT(rank.saved_sent_bytes_per_step, 0);
    EXPECT_EQ(static_cast<double>(sent), rank.tensor_sent_bytes_per_step + rank.saved_sent_bytes_per_step);
  }
}

TEST(TensorParallel, AStateOfOtherPartsIsLoaded) {
  const TemporaryDirectory directory;
  const std::string parts = directory / "parts";
  const std::string whole = directory / "whole";
  const Words words = with(kGridModel, {"--steps", "1"});
  train(words + GridWords{2, 2}.words() + Words{"--save-state", parts});
  train(words + Words{"--save-state", whole});

  EXPECT_EQ(train(words + GridWords{3, 3}.words() + Words{"--load-state", parts}).first_step, 1u);
  EXPECT_EQ(train(words + Words{"--load-state", parts}).first_step, 1u);
  EXPECT_EQ(train(words + GridWords{2, 2}.words() + Words{"--load-state", whole}).first_step, 1u);
}

TEST(TensorParallel, ExportsTheWeightsOfTheWholeModel) {
  const TemporaryDirectory directory;
  const auto initial = [&](const GridWords& grid, const std::string& name) {
    train(with(kGridModel + grid.words(), {"--steps", "0", "--export", directory / name}));
    std::ifstream file(directory / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };

  const std::string alone = initial({1, 1}, "alone");

  EXPECT_FALSE(alone.empty());
  EXPECT_EQ(initial({2, 2}, "two"), alone);
  EXPECT_EQ(initial({6, 3}, "six"), alone);
}

TEST(TensorParallel, DividesParametersAndActivationsAndCountsWhatItSends) {
  const gpt::TrainingReport one = train(kGridModel);
  const gpt::TrainingReport two = train(kGridModel + GridWords{2, 2}.words());
  const gpt::TrainingReport recomputed =
      train(kGridModel + GridWords{2, 2}.words() + Words{"--recompute", "block"});

  EXPECT_LT(two.ranks[0].peak_bytes.parameters,
            0.6 * static_cast<double>(one.ranks[0].peak_bytes.parameters));
  EXPECT_LT(two.ranks[0].peak_bytes.activations, one.ranks[0].peak_bytes.activations);
  EXPECT_LT(recomputed.ranks[0].peak_bytes.activations, two.ranks[0].peak_bytes.activations);
  // Each of 2 blocks makes 2 sums of [rows, hidden] forward and 2 backward; the embedding and the head make 1
  // each; the parts of the loss have 12 bytes per row. Each sum sends 2 (t - 1) / t of its bytes.
  const double rows = 2 * 10;
  const double sums = 2 * 4 + 2;
  EXPECT_EQ(two.ranks[0].tensor_sent_bytes_per_step, 2 * (sums * rows * 24 * 4 + rows * 12));
  // Recomputation repeats the sum after attention.
  EXPECT_EQ(recomputed.ranks[0].tensor_sent_bytes_per_step, 2 * ((sums + 2) * rows * 24 * 4 + rows * 12));
  // The report's traffic has all of it, by peer.
  std::uint64_t sent = 0;
  for (const gpt::OperationReport& one_kind : two.traffic[0]) {
    if (one_kind.operation == "reduce_scatter" || one_kind.operation == "all_gather")
      sent += one_kind.sent_bytes[1];
  }
  EXPECT_EQ(static_cast<double>(sent), 4 * two.ranks[0].tensor_sent_bytes_per_step);
}

TEST(TensorParallel, PartsOfParametersPutTogetherAreTheWhole) {
  const gpt::GptShape shape{.layers = 1, .hidden = 24, .heads = 6, .sequence = 10};
  for (const gpt::GptUnit& unit : gpt::describe_units(shape)) {
    for (const gpt::GptParameter& parameter : unit.parameters) {
      std::vector<float> values(parameter.count());
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
      for (const std::size_t size : {1, 2, 3, 6}) {
        SCOPED_TRACE(parameter.name + " over " + std::to_string(size));
        std::vector<float> whole(values.size());
        std::size_t count = 0;
        for (std::size_t rank = 0; rank < size; ++rank) {
          const std::vector<float> part = gpt::take_part(parameter, {rank, size}, values);
          EXPECT_EQ(part.size(), gpt::part_of(parameter, {rank, size}).count());
          gpt::put_part(parameter, {rank, size}, part, whole);
          count += static_cast<std::size_t>(
              std::count_if(part.begin(), part.end(), [](float v) { return v != 0; }));
        }
        EXPECT_EQ(whole, values);
        EXPECT_EQ(count, parameter.cut == gpt::Cut::kWhole ? size * values.size() : values.size());
      }
    }
  }
}

TEST(TensorParallel, RefusesWhatCannotBe) {
  const struct {
    Words words;
    std::string named;
  } cases[] = {
      {{"--ranks", "4", "--tensor-parallel", "4", "--heads", "6", "--hidden", "24"},
       "--tensor-parallel 4 does not divide --heads 6"},
      {{"--ranks", "3", "--tensor-parallel", "2"}, "does not divide the number of ranks, 3"},
      {{"--ranks", "2", "--tensor-parallel", "0"},
       "--tensor-parallel: '0' was given; use a whole number from 1"},
      {{"--dropout", "1"}, "--dropout: '1' was given; use"},
      {{"--dropout", "-0.1"}, "--dropout: '-0.1' was given; use"},
      {{"--recompute", "every:0"}, "--recompute is 'every:0'; use none"},
      {{"--activations", "partition"}, "--activations partition needs recomputation"},
      {{"--recompute", "block", "--activations", "cpu"}, "--activations is cpu; use keep"},
      {{"--recompute", "block", "--activations", "partition+disk"},
       "--activations is partition+disk; use keep"},
      {{"--recompute", "block", "--activations", "partition+nvme:"},
       "--activations is partition+nvme:; use keep"},
      {{"--recompute", "all"}, "--recompute is 'all'; use none"},
  };
  for (const auto& [words, named] : cases)
    expect_usage_error(with({FOREBAY_GPT, "--quiet", "--steps", "1"}, words), named);
}

TEST(TensorParallel, GroupsThatDoNotDivideTheDataParallelRanksAreRefused) {
  const Finished finished = testing::run_program(
      Words{FOREBAY_GPT, "--ranks", "4", "--tensor-parallel", "2", "--heads", "4", "--order", "group:4"});
  EXPECT_EQ(finished.exit_code, 2) << finished.output;
  EXPECT_NE(
      finished.output.find("--order group:4: groups of 4 do not divide the 2 data-parallel ranks that 4 "
                           "ranks make; use one of group:1, group:2"),
      std::string::npos)
      << finished.output;
}

TEST(TensorParallel, RanksOfDifferentGridsAreNamed) {
  const Words words = kGridModel + Words{"--ranks", "2"};
  std::vector<gpt::TrainerOptions> by_rank(2, gpt::resolve_options(*gpt::parse_command(words).options));
  by_rank[0].tensor_parallel = 2;
  by_rank[1].tensor_parallel = 3;
  try {
    gpt::run_training(by_rank);
    FAIL() << "the run did not fail";
  } catch (const Error& error) {
    EXPECT_NE(error.status().message().find("--tensor-parallel is 2 on rank 0 and 3 on rank 1"),
              std::string::npos)
        << error.status().message();
  }
}

}  // namespace
}  // namespace forebay::testing
