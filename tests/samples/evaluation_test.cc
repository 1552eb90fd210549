// Evaluation and generated text of the sample: the training stays bit for bit the same, the results are the
// same at every stage and offload setting, and the bytes are those of the plan.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "model/random.h"
#include "tests/samples/gpt_reference.h"
#include "tests/samples/small_training.h"
#include "tests/support/temporary_directory.h"
#include "trainer/initial.h"
#include "trainer/options.h"
#include "trainer/training.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

class Evaluations : public ::testing::Test {
 protected:
  Evaluations() {
    directory_ = forebay::testing::make_temporary_directory("evaluation");
    testing::write_text(path("text"), testing::kTextBytes, testing::kTextSeed);
    testing::write_text(path("other"), 230, 6);  // 19 samples of 12 bytes, and some bytes.
  }
  ~Evaluations() override { fs::remove_all(directory_); }

  std::string path(const std::string& name) const { return (directory_ / name).string(); }

  TrainerOptions options(int ranks = 1, int stage = 0) const {
    TrainerOptions o = testing::small_options();
    o.text = {path("text")};
    o.bucket_bytes = 8192;
    o.staging_bytes = 8u << 20;
    o.ranks = ranks;
    o.stage = stage;
    return o;
  }
  TrainerOptions evaluated(TrainerOptions o) const {
    o.evaluation_text = {path("other")};
    o.evaluate_every = 2;
    o.generate = 30;
    o.prompt = "the ";
    return o;
  }
  // The settings of offload at a stage.
  std::vector<TrainerOptions> offloaded(TrainerOptions o) const {
    std::vector<TrainerOptions> all = {o};
    for (const Offload offload : {Offload::kOptimizer, Offload::kOptimizerAndParameters}) {
      if (offload == Offload::kOptimizerAndParameters && o.stage < 3) continue;
      for (const Tier tier : {Tier::kPinned, Tier::kFile}) {
        o.offload = offload;
        o.tier = tier;
        o.offload_directories.assign(tier == Tier::kFile ? 1 : 0, directory_);
        all.push_back(o);
      }
    }
    return all;
  }

  fs::path directory_;
};

void expect_same_training(const TrainingReport& report, const TrainingReport& expected) {
  EXPECT_EQ(report.digest, expected.digest);
  EXPECT_EQ(report.loss, expected.loss);
  EXPECT_EQ(report.grad_norm, expected.grad_norm);
}

void expect_planned(const TrainingReport& report) {
  const auto steps = static_cast<double>(report.steps);
  for (const RankReport& rank : report.ranks) {
    EXPECT_EQ(rank.evaluation_sent_bytes, rank.planned_evaluation_sent_bytes);
    EXPECT_EQ(rank.evaluation_sent_bytes > 0, report.sharding.stage == 3 && report.data_parallel > 1);
    EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
    EXPECT_EQ(rank.reserved_bytes, rank.planned_reserved_bytes);
    // At stage 3 the step after an evaluation finds some units in their slots.
    if (report.sharding.stage < 3) {
      EXPECT_EQ(rank.sent_bytes_per_step * steps,
                static_cast<double>(rank.planned_sent_bytes_per_step) * steps);
    } else {
      EXPECT_LE(rank.sent_bytes_per_step, static_cast<double>(rank.planned_sent_bytes_per_step));
    }
  }
}

TEST_F(Evaluations, ChangesNoBitOfTheTrainingAndMovesThePlannedBytes) {
  for (const int ranks : {1, 3, 4}) {
    const TrainingReport plain = run_training(options(ranks));
    std::optional<TrainingReport> first;
    for (const int stage : {0, 1, 2, 3}) {
      for (const TrainerOptions& o : offloaded(options(ranks, stage))) {
        SCOPED_TRACE(std::to_string(ranks) + " ranks, stage " + std::to_string(stage) + ", " +
                     offload_name(o.offload) + " to " + tier_name(o.tier));

        const TrainingReport report = run_training(evaluated(o));

        expect_same_training(report, plain);
        expect_planned(report);
        ASSERT_EQ(report.evaluations.size(), 2u);
        EXPECT_EQ(report.evaluations[0].step, 2u);
        EXPECT_EQ(report.evaluations[1].step, 4u);
        EXPECT_EQ(report.generated.size(), 34u);
        EXPECT_EQ(report.generated.substr(0, 4), "the ");
        if (!first) first = report;
        EXPECT_EQ(report.evaluations[0].loss, first->evaluations[0].loss);
        EXPECT_EQ(report.evaluations[1].loss, first->evaluations[1].loss);
        EXPECT_EQ(report.generated, first->generated);
        if (HasFailure()) return;
      }
    }
  }
}

// Without training, the weights and so the text are the same at any number of ranks.
TEST_F(Evaluations, EveryNumberOfRanksAndStageGeneratesTheSameText) {
  for (const double temperature : {0.0, 0.8}) {
    std::optional<TrainingReport> first;
    for (const int ranks : {1, 3, 4}) {
      for (const int stage : {0, 1, 2, 3}) {
        TrainerOptions o = evaluated(options(ranks, stage));
        o.steps = 0;
        o.temperature = temperature;
        const TrainingReport report = run_training(o);
        if (!first) first = report;
        EXPECT_EQ(report.generated, first->generated) << ranks << " ranks, stage " << stage;
        ASSERT_EQ(report.evaluations.size(), 1u);
        EXPECT_EQ(report.evaluations[0].loss, first->evaluations[0].loss)
            << ranks << " ranks, stage " << stage;
        expect_planned(report);
      }
    }
  }
}

TEST_F(Evaluations, TheLossIsThatOfTheReference) {
  TrainerOptions o = evaluated(options(2, 3));
  o.steps = 0;
  o.dropout = 0.2;  // Not in an evaluation.
  const TrainingReport report = run_training(o);
  o.evaluation_samples = 3;
  const TrainingReport few = run_training(o);

  std::map<std::string, Values> values;
  std::uint64_t stream = 0;
  for (const GptUnit& unit : describe_units(o.model)) {
    for (const GptParameter& parameter : unit.parameters) {
      const std::vector<float> initial = random_values(parameter, stream++, o.seed);
      values[parameter.name] = Values(initial.begin(), initial.end());
    }
  }
  const Text text = Text::read(o.evaluation_text);
  const auto loss_of = [&](std::size_t samples) {
    const auto bytes = text.bytes().begin();
    const auto count = static_cast<std::ptrdiff_t>(samples * o.model.sequence);
    return GptReference(o.model, values)
        .loss(std::vector<std::uint8_t>(bytes, bytes + count),
              std::vector<std::uint8_t>(bytes + 1, bytes + 1 + count));
  };
  EXPECT_NEAR(report.evaluations.at(0).loss, loss_of(19), 1e-6);
  EXPECT_NEAR(few.evaluations.at(0).loss, loss_of(3), 1e-6);
}

// Each rank exchanges 4096 losses at once, so two ranks exchange twice. The second pass has one sample in
// four places.
TEST_F(Evaluations, CountsEverySampleOnceWhereLossesAreExchangedTwice) {
  constexpr std::uint64_t kSamples = 2 * 4096 + 1;
  std::optional<double> alone;
  for (const int ranks : {1, 2}) {
    TrainerOptions o = options(ranks);
    o.model.sequence = 4;
    testing::write_text(path("long"), kSamples * o.model.sequence + 1, 7);
    o.evaluation_text = {path("long")};
    o.evaluate_every = 1;
    o.steps = 0;
    const TrainingReport report = run_training(o);
    ASSERT_EQ(report.evaluations.size(), 1u);
    if (!alone) alone = report.evaluations[0].loss;
    EXPECT_EQ(report.evaluations[0].loss, *alone);
  }
}

// The last token of a text has no target.
TEST_F(Evaluations, ASampleNeedsOneTokenMoreThanItsLength) {
  TrainerOptions o = evaluated(options());
  o.steps = 0;
  o.generate = 0;
  const auto loss_of = [&](std::uint64_t bytes, std::uint64_t samples) {
    testing::write_text(path("part"), bytes, 6);
    o.evaluation_text = {path("part")};
    o.evaluation_samples = samples;
    return run_training(o).evaluations.at(0).loss;
  };
  const double one = loss_of(230, 1);
  EXPECT_EQ(loss_of(24, 0), one);
  EXPECT_EQ(loss_of(25, 0), loss_of(230, 2));
  EXPECT_NE(loss_of(25, 0), one);
}

TEST_F(Evaluations, TheLastStepIsEvaluatedOnce) {
  for (const std::uint64_t steps : {3u, 4u}) {
    TrainerOptions o = evaluated(options());
    o.steps = steps;
    o.generate = 0;
    const TrainingReport report = run_training(o);
    ASSERT_EQ(report.evaluations.size(), 2u);
    EXPECT_EQ(report.evaluations[0].step, 2u);
    EXPECT_EQ(report.evaluations[1].step, steps);
  }
}

// So hot that every byte is as probable as any other.
TEST_F(Evaluations, BytesAreDrawnByTheirPlaceInTheText) {
  TrainerOptions o = evaluated(options());
  o.steps = 0;
  o.temperature = 1e12;
  std::string expected = o.prompt;
  while (expected.size() < o.prompt.size() + o.generate) {
    const std::uint64_t random = draw(o.seed, kGenerationStream, expected.size());
    expected += static_cast<char>(static_cast<double>(random >> 11) * 0x1p-53 * 256);
  }
  EXPECT_EQ(run_training(o).generated, expected);
}

TEST_F(Evaluations, TheLastBytesOfALongPromptDecideTheNext) {
  TrainerOptions o = evaluated(options());
  o.steps = 0;
  o.temperature = 0;
  const auto continued = [&](const std::string& prompt) {
    o.prompt = prompt;
    return run_training(o).generated.substr(prompt.size());
  };
  const std::string text = continued("of the basin");
  EXPECT_EQ(continued("turbine of the basin"), text);
  EXPECT_EQ(continued("a head of the basin"), text);
}

TEST_F(Evaluations, TheMovingAverageIsEvaluatedGeneratesAndIsExported) {
  TrainerOptions o = evaluated(options(2, 2));
  o.evaluate_every = 0;
  const TrainingReport plain = run_training(o);
  o.ema = 0.9;
  o.export_file = path("average.safetensors");
  const TrainingReport averaged = run_training(o);
  EXPECT_EQ(averaged.loss, plain.loss);
  EXPECT_NE(averaged.evaluations.at(0).loss, plain.evaluations.at(0).loss);

  TrainerOptions loaded = evaluated(options());
  loaded.steps = 0;
  loaded.initial_file = o.export_file;
  const TrainingReport report = run_training(loaded);
  EXPECT_EQ(report.evaluations.at(0).loss, averaged.evaluations.at(0).loss);
  EXPECT_EQ(report.generated, averaged.generated);
}

TEST_F(Evaluations, WorksWithDropoutRecomputationAndMicroSteps) {
  for (const int ranks : {1, 2}) {
    TrainerOptions o = options(ranks, 3);
    o.dropout = 0.1;
    o.recompute_every = 1;
    o.micro_steps = 3;
    o.dtype = DataType::kBfloat16;
    const TrainingReport plain = run_training(o);
    const TrainingReport report = run_training(evaluated(o));
    expect_same_training(report, plain);
    expect_planned(report);
  }
}

TEST_F(Evaluations, WorksOnEveryGrid) {
  TrainerOptions single = evaluated(options(1, 0));
  single.batch = 4;
  single.steps = 0;
  const TrainingReport whole = run_training(single);
  for (const int tensor : {1, 2}) {
    for (const int pipeline : {1, 2}) {
      SCOPED_TRACE(std::to_string(tensor) + " tensor-parallel, " + std::to_string(pipeline) + " pipeline");
      TrainerOptions o = options(2 * tensor * pipeline, 3);
      o.model.heads = 4;
      o.tensor_parallel = tensor;
      o.pipeline_parallel = pipeline;
      o.micro_steps = 2;
      o.recompute_every = 1;
      if (tensor > 1) o.activations = ActivationPlacement::kPartition;
      const TrainingReport plain = run_training(o);

      const TrainingReport report = run_training(evaluated(o));

      expect_same_training(report, plain);
      expect_planned(report);
      for (std::size_t rank = 0; rank < plain.ranks.size(); ++rank) {
        EXPECT_EQ(report.ranks[rank].tensor_sent_bytes_per_step,
                  plain.ranks[rank].tensor_sent_bytes_per_step);
        EXPECT_EQ(report.ranks[rank].pipeline_sent_bytes_per_step,
                  plain.ranks[rank].pipeline_sent_bytes_per_step);
      }
      TrainerOptions untrained = evaluated(o);
      untrained.model.heads = 3;
      if (tensor > 1) continue;
      untrained.steps = 0;
      EXPECT_NEAR(run_training(untrained).evaluations.at(0).loss, whole.evaluations.at(0).loss, 1e-6);
    }
  }
}

TEST_F(Evaluations, AShortTextIsRefusedByItsOption) {
  testing::write_text(path("short"), 12, 1);
  TrainerOptions o = evaluated(options());
  o.evaluation_text = {path("short")};
  try {
    run_training(o);
    ADD_FAILURE() << "it ran";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what())
                  .find("12 bytes, too few for --sequence 12; give more with --evaluation-text"),
              std::string::npos)
        << error.what();
  }
}

TEST_F(Evaluations, TheReportHasTheLossesAndTheText) {
  const auto json = nlohmann::json::parse(report_json(run_training(evaluated(options()))));
  EXPECT_EQ(json["evaluations"].size(), 2u);
  EXPECT_EQ(json["evaluations"][1]["step"], 4);
  EXPECT_GT(json["evaluations"][1]["loss"].get<double>(), 0.0);
  EXPECT_EQ(json["generated"].get<std::string>().substr(0, 4), "the ");
}

TEST(EvaluationOptions, ThatNeedOthersAreRefused) {
  const auto refused = [](const std::vector<std::string>& arguments, const std::string& part) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(parse_command(arguments).exit_code, 2);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find(part), std::string::npos) << said;
  };
  refused({"--evaluate-every", "3"}, "add --evaluation-text FILE");
  refused({"--evaluation-samples", "3"}, "add --evaluation-text FILE");
  refused({"--prompt", "x"}, "add --generate N");
  refused({"--temperature", "1"}, "add --generate N");
  refused({"--generate", "9", "--temperature", "-1"}, "--temperature");
}

}  // namespace
}  // namespace forebay::gpt
