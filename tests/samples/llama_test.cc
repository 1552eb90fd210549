// Llama's blocks: loss and gradients against a double-precision reference, and the promises of the GPT-2
// model (equal bits over stages, offload, recomputation and a resume; every grid) for a second model.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "model/definitions.h"
#include "output/huggingface.h"
#include "tests/samples/llama_reference.h"
#include "tests/samples/plain_model.h"
#include "tests/samples/small_training.h"
#include "tests/support/temporary_directory.h"
#include "trainer/options.h"
#include "trainer/training.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

// Two heads share a key; the MLP is not a multiple of anything.
constexpr GptShape kTiny{.layers = 2,
                         .hidden = 16,
                         .heads = 4,
                         .sequence = 5,
                         .inner = 13,
                         .kind = ModelKind::kLlama,
                         .kv_heads = 2,
                         .rope_theta = 50};

GptShape tied(GptShape shape) {
  shape.tied_head = true;
  return shape;
}

GptShape with_kv_heads(GptShape shape, std::size_t count) {
  shape.kv_heads = count;
  return shape;
}

// --- the arithmetic ---

TEST(LlamaDefinitions, TurnsByTheAngle) {
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const double scale = std::pow(2.0, static_cast<double>(i % 21));
    const auto angle = static_cast<float>(scale * static_cast<double>(draw(3, 0, i) >> 11) * 0x1p-53);
    const definitions::Turn turn = definitions::turn_by(angle);
    ASSERT_NEAR(turn.cosine, std::cos(double{angle}), 1e-7) << angle;
    ASSERT_NEAR(turn.sine, std::sin(double{angle}), 1e-7) << angle;
  }
  EXPECT_EQ(definitions::turn_by(0.0F).cosine, 1.0F);
  EXPECT_EQ(definitions::turn_by(0.0F).sine, 0.0F);
}

TEST(LlamaDefinitions, SiluAndItsSlopeAgreeWithDoubles) {
  for (int i = -400; i <= 400; ++i) {
    const double x = i / 20.0, sigmoid = 1 / (1 + std::exp(-x));
    EXPECT_NEAR(definitions::silu(static_cast<float>(x)), x * sigmoid, 2e-6) << x;
    EXPECT_NEAR(definitions::silu_slope(static_cast<float>(x)), sigmoid * (1 + x * (1 - sigmoid)), 2e-6) << x;
  }
}

// Sampled elements of every parameter's gradient against central differences of the reference's loss.
void expect_gradients_of_the_reference(PlainModel& model, const GptShape& shape, std::uint64_t seed) {
  randomise(model, seed);
  const auto tokens = random_bytes(2 * shape.sequence, seed, 1000);
  const auto targets = random_bytes(2 * shape.sequence, seed, 1001);

  const double loss = model.run(tokens, targets);

  std::map<std::string, Values> values;
  for (const GptUnit& unit : model.units()) {
    for (const GptParameter& parameter : unit.parameters) {
      const std::vector<float> value = model.value(parameter.name);
      values[parameter.name] = Values(value.begin(), value.end());
    }
  }
  LlamaReference reference(shape, std::move(values));
  EXPECT_NEAR(loss, reference.loss(tokens, targets), 2e-6 * loss);
  for (const GptUnit& unit : model.units()) {
    for (const GptParameter& parameter : unit.parameters) {
      const std::vector<float> gradient = model.gradient(parameter.name);
      double largest = 0;
      for (const float g : gradient) largest = std::max(largest, std::abs(double{g}));
      ASSERT_GT(largest, 0) << parameter.name;
      for (std::uint64_t sample = 0; sample < 8; ++sample) {
        std::size_t i = draw(seed, 2000, sample) % gradient.size();
        // Rows that the tokens name matter most.
        if (is_token_embedding(parameter.name) && sample % 2 == 0)
          i = tokens[sample % tokens.size()] * shape.hidden + i % shape.hidden;
        double& value = reference.parameter(parameter.name)[i];
        const double centre = value, step = 1e-4;
        value = centre + step;
        const double above = reference.loss(tokens, targets);
        value = centre - step;
        const double below = reference.loss(tokens, targets);
        value = centre;
        EXPECT_NEAR(gradient[i], (above - below) / (2 * step), 2e-5 * largest + 2e-7)
            << parameter.name << "[" << i << "]";
      }
    }
  }
}

class Llama : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Products, Llama, ::testing::ValuesIn(matmul_names()),
                         [](const auto& info) { return info.param; });

TEST_P(Llama, GradientsAgreeWithFiniteDifferencesOfTheReference) {
  for (const GptShape& shape : {kTiny, with_kv_heads(kTiny, 1), with_kv_heads(kTiny, 4), tied(kTiny)}) {
    SCOPED_TRACE(std::to_string(shape.kv_heads) + " heads of keys" + (shape.tied_head ? ", tied head" : ""));
    PlainModel model(shape, 2, DataType::kFloat32, make_matmul(GetParam()));
    expect_gradients_of_the_reference(model, shape, test_seed());
  }
}

TEST_P(Llama, RecomputationWithDropoutChangesNoBit) {
  const std::uint64_t seed = test_seed();
  const auto tokens = random_bytes(10, seed, 1000);
  const auto targets = random_bytes(10, seed, 1001);
  std::optional<std::vector<float>> first;
  for (const std::size_t every : {0, 1, 2}) {
    PlainModel model({.shape = kTiny,
                      .batch = 2,
                      .dtype = DataType::kBfloat16,
                      .recompute_every = every,
                      .dropout = 0.3,
                      .seed = 9},
                     make_matmul(GetParam()));
    model.begin({.step = 4, .micro_step = 1, .first_sample = 6});
    randomise(model, seed);
    model.run(tokens, targets);
    std::vector<float> gradients;
    for (const GptUnit& unit : model.units()) {
      for (const GptParameter& parameter : unit.parameters) {
        const std::vector<float> gradient = model.gradient(parameter.name);
        gradients.insert(gradients.end(), gradient.begin(), gradient.end());
      }
    }
    if (!first) first = gradients;
    EXPECT_EQ(gradients, *first) << every;
  }
}

TEST(LlamaThreads, PlainProductsGiveTheSameBitsAtAnyNumberOfThreads) {
  const std::uint64_t seed = test_seed();
  GptShape shape = kTiny;
  shape.layers = 1;
  shape.hidden = 144;
  shape.heads = 6;
  shape.sequence = 40;
  const auto tokens = random_bytes(3 * 40, seed, 1000);
  const auto targets = random_bytes(3 * 40, seed, 1001);
  std::vector<std::vector<float>> gradients;
  for (const int threads : {1, 2, 3}) {
    set_compute_threads(threads);
    PlainModel model(shape, 3, DataType::kBfloat16, create_plain_matmul(), threads);
    randomise(model, seed);
    model.run(tokens, targets);
    gradients.push_back(model.gradient("model.embed_tokens.weight"));
  }
  set_compute_threads(1);
  EXPECT_EQ(gradients[1], gradients[0]);
  EXPECT_EQ(gradients[2], gradients[0]);
}

// --- the shape ---

TEST(LlamaShape, NamesAndCountsAreThoseOfLlama) {
  // TinyLlama 1.1B.
  const GptShape shape{.layers = 22,
                       .hidden = 2048,
                       .heads = 32,
                       .sequence = 2048,
                       .vocabulary = 32000,
                       .inner = 5632,
                       .kind = ModelKind::kLlama,
                       .kv_heads = 4};
  EXPECT_EQ(parameter_count(shape), 1100048384u);
  const std::vector<GptUnit> units = describe_units(shape);
  ASSERT_EQ(units.size(), 24u);
  EXPECT_EQ(units[1].parameters[llama_block::kKey].name, "model.layers.0.self_attn.k_proj.weight");
  EXPECT_EQ(units[1].parameters[llama_block::kKey].shape, (std::vector<std::size_t>{256, 2048}));
  EXPECT_EQ(units[23].parameters[llama_final_unit::kHead].name, "lm_head.weight");
  EXPECT_EQ(published_name("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(published_name("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ((GptShape{.hidden = 4096, .kind = ModelKind::kLlama}.inner_count()), 10944u);
}

TEST(LlamaShape, StagesOfAnUntiedModelShareNoUnit) {
  for (const bool is_tied : {false, true}) {
    const std::vector<GptUnit> units = describe_units(is_tied ? tied(kTiny) : kTiny);
    const std::vector<GptUnit> first = stage_of(units, {0, 2}), last = stage_of(units, {1, 2});
    EXPECT_EQ(first.front().name, is_tied ? "tokens" : "embedding");
    EXPECT_EQ(last.front().name, is_tied ? "tokens" : "layers.1");
    EXPECT_EQ(last.back().parameters.size(), is_tied ? 1u : 2u);
  }
}

void refused(const std::vector<std::string>& arguments, const std::string& part) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(parse_command(arguments).exit_code, 2);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find(part), std::string::npos) << said;
}

TEST(LlamaOptions, ThatDoNotFitAreRefused) {
  refused({"--model", "mamba"}, "one of gpt2|llama");
  refused({"--kv-heads", "2"}, "--kv-heads is for heads that share keys");
  refused({"--rope-theta", "500"}, "--rope-theta is for rotary position embeddings");
  refused({"--model", "llama", "--kv-heads", "3"}, "--kv-heads 3 does not divide --heads 4");
  refused({"--model", "llama", "--hidden", "36", "--heads", "4"}, "use an even number");
  refused({"--model", "llama", "--hidden", "1032", "--heads", "4"}, "use an even number");
  refused({"--model", "llama", "--heads", "4", "--kv-heads", "2", "--tensor-parallel", "4", "--ranks", "4"},
          "--tensor-parallel 4 does not divide --kv-heads 2");
  const ParsedCommand parsed =
      parse_command({"--model", "llama", "--kv-heads", "2", "--rope-theta", "500000"});
  ASSERT_TRUE(parsed.options);
  EXPECT_TRUE(parsed.options->model.is_llama());
  EXPECT_EQ(parsed.options->model.kv_head_count(), 2u);
  EXPECT_EQ(parsed.options->model.rope_theta, 500000);
}

// --- under the engine ---

class LlamaTraining : public ::testing::Test {
 protected:
  LlamaTraining() {
    directory_ = forebay::testing::make_temporary_directory("llama");
    testing::write_text(path("text"), testing::kTextBytes, testing::kTextSeed);
    testing::write_text(path("other"), 230, 6);
  }
  ~LlamaTraining() override { fs::remove_all(directory_); }

  std::string path(const std::string& name) const { return (directory_ / name).string(); }

  TrainerOptions options(int ranks, int stage) const {
    TrainerOptions o = testing::small_options();
    o.model = kTiny;
    o.model.sequence = 12;
    o.text = {path("text")};
    o.bucket_bytes = 8192;
    o.staging_bytes = 8u << 20;
    o.ranks = ranks;
    o.stage = stage;
    o.micro_steps = 2;
    o.dtype = DataType::kBfloat16;
    return o;
  }

  fs::path directory_;
};

void expect_same(const TrainingReport& report, const TrainingReport& expected) {
  EXPECT_EQ(report.digest, expected.digest);
  EXPECT_EQ(report.loss, expected.loss);
  EXPECT_EQ(report.grad_norm, expected.grad_norm);
}

TEST_F(LlamaTraining, StagesOffloadAndRecomputationChangeNoBit) {
  for (const int ranks : {1, 3}) {
    const TrainingReport plain = run_training(options(ranks, 0));
    EXPECT_LT(plain.loss.back(), plain.loss.front());
    for (const int stage : {0, 1, 2, 3}) {
      for (const Offload offload : {Offload::kNone, Offload::kOptimizer, Offload::kOptimizerAndParameters}) {
        if (offload == Offload::kOptimizerAndParameters && stage < 3) continue;
        for (const std::size_t recompute : {0, 1}) {
          TrainerOptions o = options(ranks, stage);
          o.offload = offload;
          o.recompute_every = recompute;
          SCOPED_TRACE(std::to_string(ranks) + " ranks, stage " + std::to_string(stage) + ", " +
                       offload_name(offload) + ", recompute " + std::to_string(recompute));
          const TrainingReport report = run_training(o);
          expect_same(report, plain);
          for (const RankReport& rank : report.ranks) EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
        }
      }
    }
  }
}

TEST_F(LlamaTraining, FilesAndInputsInFilesChangeNoBit) {
  const TrainingReport plain = run_training(options(2, 3));
  TrainerOptions o = options(2, 3);
  o.offload = Offload::kOptimizerAndParameters;
  o.tier = Tier::kFile;
  o.offload_directories = {directory_.string()};
  o.recompute_every = 1;
  o.activations = ActivationPlacement::kPartition;
  o.activation_tier = Tier::kFile;
  o.activation_directories = {directory_.string()};
  expect_same(run_training(o), plain);
}

TEST_F(LlamaTraining, AResumedRunIsTheSameAsOneThatDidNotStop) {
  const TrainingReport whole = run_training(options(2, 2));
  TrainerOptions first_half = options(2, 2);
  first_half.steps = 2;
  first_half.save_state = path("state");
  run_training(first_half);
  TrainerOptions second_half = options(2, 3);
  second_half.load_state = path("state");
  EXPECT_EQ(run_training(second_half).digest, whole.digest);
}

TEST_F(LlamaTraining, AStateOfTheOtherModelIsRefused) {
  TrainerOptions o = options(1, 0);
  o.save_state = path("state");
  run_training(o);
  TrainerOptions other = options(1, 0);
  other.model = {.layers = 2, .hidden = 16, .heads = 4, .sequence = 12};
  other.load_state = path("state");
  EXPECT_THROW(run_training(other), Error);
}

// Neither shows in the sizes of the parameters.
TEST_F(LlamaTraining, AStateOfOtherRotationsOrNormsIsRefused) {
  TrainerOptions o = options(1, 0);
  o.save_state = path("state");
  run_training(o);
  const auto refused = [&](GptShape model, const std::string& part) {
    TrainerOptions other = options(1, 0);
    other.model = model;
    other.load_state = path("state");
    try {
      run_training(other);
      ADD_FAILURE() << "it is taken: " << part;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  GptShape model = o.model;
  model.rope_theta *= 2;
  refused(model, "saved with another --rope-theta");
  model = o.model;
  model.norm_epsilon *= 2;
  refused(model, "saved with another rms_norm_eps");
}

TEST_F(LlamaTraining, EveryGridHasTheSameLossAndGeneratesTheSameText) {
  for (const bool is_tied : {false, true}) {
    std::optional<TrainingReport> first;
    for (const int tensor : {1, 2}) {
      for (const int pipeline : {1, 2}) {
        SCOPED_TRACE(std::to_string(tensor) + " tensor-parallel, " + std::to_string(pipeline) + " pipeline");
        TrainerOptions o = options(2 * tensor * pipeline, 3);
        o.model.tied_head = is_tied;
        o.dtype = DataType::kFloat32;
        o.tensor_parallel = tensor;
        o.pipeline_parallel = pipeline;
        o.evaluation_text = {path("other")};
        o.generate = 20;
        o.temperature = 0;
        const TrainingReport report = run_training(o);
        if (!first) first = report;
        for (std::size_t i = 0; i < report.loss.size(); ++i)
          EXPECT_NEAR(report.loss[i], first->loss[i], 1e-5 * first->loss[i]);
        EXPECT_NEAR(report.evaluations.back().loss, first->evaluations.back().loss, 1e-5);
        EXPECT_EQ(report.generated, first->generated);
        for (const RankReport& rank : report.ranks) EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
      }
    }
  }
}

}  // namespace
}  // namespace forebay::gpt
