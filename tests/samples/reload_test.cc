// A state that is saved at any number of ranks, stage, offload setting, type, format of moments and grid is
// loaded at any other: the masters, m and v are the same bit for bit, or rounded to the nearest where the new
// run keeps fewer bits. States that older versions saved are loaded, too.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "forebay/conversions.h"
#include "forebay/error.h"
#include "forebay/saved_state.h"
#include "forebay/sharding_arguments.h"
#include "parallel/parted_state.h"
#include "tests/samples/small_training.h"
#include "tests/support/temporary_directory.h"
#include "trainer/options.h"
#include "trainer/training.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The header of a safetensors file without the words about the file, and the values.
std::pair<nlohmann::json, std::string> tensors_of(const std::string& path) {
  const std::string bytes = bytes_of(path);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  nlohmann::json header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  header.erase("__metadata__");
  return {header, bytes.substr(8 + header_bytes)};
}

// All values of a field, in order of the parameters' names: grids register them in different orders.
std::vector<float> values_of(const std::string& directory, SavedField field) {
  SavedStateReader reader(directory);
  std::vector<SavedParameter> parameters = reader.facts().parameters;
  std::sort(parameters.begin(), parameters.end(),
            [](const SavedParameter& a, const SavedParameter& b) { return a.name < b.name; });
  std::vector<float> values;
  for (const SavedParameter& parameter : parameters) {
    reader.read(parameter, field,
                [&](Span<const float> piece) { values.insert(values.end(), piece.begin(), piece.end()); });
  }
  return values;
}

class Reload : public ::testing::Test {
 protected:
  Reload() {
    directory_ = forebay::testing::make_temporary_directory("reload");
    testing::write_text(path("text"), testing::kTextBytes, testing::kTextSeed);
  }
  ~Reload() override { fs::remove_all(directory_); }

  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  TrainerOptions options() const {
    TrainerOptions o = testing::small_options();
    o.model = {.layers = 3, .hidden = 24, .heads = 6, .sequence = 12};
    o.text = {path("text")};
    o.steps = 2;
    o.bucket_bytes = 8192;
    o.staging_bytes = 8u << 20;
    return o;
  }
  TrainerOptions drawn(Optimizer optimizer, std::mt19937_64& random) const;
  // Saves the state and exports the weights at the end.
  void run(TrainerOptions o, const std::string& name, const std::string& from = "") const {
    o.save_state = path(name);
    o.export_file = path(name + ".safetensors");
    if (!from.empty()) o.load_state = path(from);
    run_training(o);
  }
  // Requires: both runs have the same optimizer.
  void expect_same_state(const TrainerOptions& from, const TrainerOptions& to) const;

  fs::path directory_;
};

TrainerOptions Reload::drawn(Optimizer optimizer, std::mt19937_64& random) const {
  const auto draw = [&](int first, int last) {
    return std::uniform_int_distribution<int>(first, last)(random);
  };
  TrainerOptions o = options();
  do {
    o.tensor_parallel = draw(1, 3);
    o.pipeline_parallel = draw(1, 3);
    o.ranks = o.tensor_parallel * o.pipeline_parallel * draw(1, 4);
  } while (o.ranks > 8);
  o.stage = draw(0, 3);
  o.dtype = static_cast<DataType>(draw(0, 2));
  o.offload = static_cast<Offload>(draw(0, o.stage == 3 ? 2 : 1));
  if (o.offload != Offload::kNone && draw(0, 1) == 1) {
    o.tier = Tier::kFile;
    o.offload_directories = {directory_};
  }
  o.optimizer = optimizer;
  o.moments = static_cast<MomentFormat>(draw(0, 2));
  o.master_weights = o.dtype != DataType::kBfloat16 || draw(0, 1) == 1;
  o.ema = draw(0, 3) == 0 ? 0.9 : 0.0;
  return o;
}

float round_to_bfloat16(float value) {
  return bfloat16_to_float(float_to_bfloat16(value));
}

// The bound of moments.h for a value that is rounded to the nearest code, in a block with a value as great as
// `greatest`.
bool is_code_of(float value, float code, float greatest) {
  return std::abs(value - code) <= std::max(std::abs(value) / 17.0f, greatest * 0x1p-17f);
}

// The masters and moments are those of the state that was loaded, rounded to the nearest where the new run
// keeps fewer bits.
void Reload::expect_same_state(const TrainerOptions& from, const TrainerOptions& to) const {
  const auto expect_values = [&](SavedField field, const std::function<float(float)>& rounded) {
    std::vector<float> values = values_of(path("from"), field);
    EXPECT_GT(values.size(), 20'000U);
    std::transform(values.begin(), values.end(), values.begin(), rounded);
    EXPECT_TRUE(values == values_of(path("to"), field)) << "field " << static_cast<int>(field);
  };
  const auto unchanged = [](float value) { return value; };
  const bool rounds_masters = !to.master_weights && from.master_weights;
  if (from.ema > 0 && to.ema > 0) expect_values(SavedField::kAverage, +unchanged);
  // The averages, where a run has them.
  if (!rounds_masters && from.ema == 0) {
    EXPECT_TRUE(bytes_of(path("from.safetensors")) == bytes_of(path("to.safetensors"))) << "exports";
  }
  expect_values(SavedField::kMaster, rounds_masters ? round_to_bfloat16 : +unchanged);
  for (const SavedField field : {SavedField::kM, SavedField::kV}) {
    if (field == SavedField::kV && !has_second_moment(to.optimizer)) continue;
    const bool has_same_blocks = from.moments == to.moments && from.tensor_parallel == to.tensor_parallel;
    if (to.moments != MomentFormat::kBlock8 || has_same_blocks) {
      const bool rounds = to.moments == MomentFormat::kBfloat16 && from.moments == MomentFormat::kFloat32;
      expect_values(field, rounds ? round_to_bfloat16 : +unchanged);
      continue;
    }
    // Another tensor-parallel grid has other blocks.
    const std::vector<float> values = values_of(path("from"), field), codes = values_of(path("to"), field);
    ASSERT_EQ(values.size(), codes.size());
    float greatest = 0.0f;
    for (const float value : values) greatest = std::max(greatest, std::abs(value));
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_TRUE(is_code_of(values[i], codes[i], greatest)) << values[i] << " became " << codes[i];
  }
}

std::string text_of(const TrainerOptions& o) {
  return "--ranks " + std::to_string(o.ranks) + " --stage " + std::to_string(o.stage) + " --dtype " +
         data_type_name(o.dtype) + " --tensor-parallel " + std::to_string(o.tensor_parallel) +
         " --pipeline-parallel " + std::to_string(o.pipeline_parallel) + " --offload " +
         offload_name(o.offload) + " --offload-tier " + tier_name(o.tier) + " --optimizer " +
         optimizer_name(o.optimizer) + " --moments " + moment_format_name(o.moments) +
         (o.master_weights ? "" : " --no-master-weights") + (o.ema > 0 ? " --ema 0.9" : "");
}

TEST_F(Reload, OfAnyGridByAnyOtherGivesTheSameMasters) {
  const char* const given = std::getenv("FOREBAY_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
  std::printf("seed %llu (FOREBAY_TEST_SEED)\n", static_cast<unsigned long long>(seed));
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int pair = 0; pair < 60; ++pair) {
    const auto optimizer = static_cast<Optimizer>(random() % kOptimizerCount);
    const TrainerOptions from = drawn(optimizer, random);
    const TrainerOptions to = drawn(optimizer, random);
    SCOPED_TRACE("pair " + std::to_string(pair) + ": from " + text_of(from) + " to " + text_of(to));

    run(from, "from");
    run(to, "to", "from");

    expect_same_state(from, to);
    ASSERT_FALSE(HasFailure());
    fs::remove_all(path("from"));
    fs::remove_all(path("to"));
  }
}

// And training goes on: at another stage and offload setting of the same ranks, with the same bits.
TEST_F(Reload, GoesOnWithTheBitsOfARunThatDidNotStop) {
  TrainerOptions o = options();
  o.ranks = 4;
  o.tensor_parallel = 2;
  o.steps = 4;
  const TrainingReport whole = run_training(o);
  o.steps = 2;
  run(o, "from");
  o.steps = 4;
  o.stage = 3;
  o.offload = Offload::kOptimizerAndParameters;
  o.load_state = path("from");
  EXPECT_EQ(run_training(o).digest, whole.digest);
}

TEST_F(Reload, OfAnotherModelIsRefusedOnAllRanks) {
  TrainerOptions o = options();
  o.ranks = 2;
  o.tensor_parallel = 2;
  run(o, "from");
  o.load_state = path("from");
  const auto refused = [&](const GptShape& model, const std::string& part) {
    o.model = model;
    try {
      run_training(o);
      ADD_FAILURE() << "it was loaded";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(error.status().message().find(part), std::string::npos) << error.status().message();
    }
  };
  refused({.layers = 3, .hidden = 30, .heads = 6, .sequence = 12},
          "wte.weight has 6144 elements there and 7680");
  refused({.layers = 4, .hidden = 24, .heads = 6, .sequence = 12},
          "it lacks h.3.ln_1.weight, which has 24 elements here");
  refused({.layers = 2, .hidden = 24, .heads = 6, .sequence = 12},
          "h.2.attn.c_attn.bias is not one of this model");
}

// A state that another tool made has no position in the data: the run keeps its own.
TEST_F(Reload, StatesThatWereImportedBeginAtTheFirstSample) {
  TrainerOptions o = options();
  run(o, "from");
  SavedStateReader from(path("from"));
  const auto import = [&](const std::string& name, bool weights_only) {
    SavedStateFacts facts = from.facts();
    facts.trainer_state = "{}";
    facts.weights_only = weights_only;
    for (SavedParameter& parameter : facts.parameters) {
      parameter.has_m &= !weights_only;
      parameter.has_v &= !weights_only;
    }
    if (weights_only) facts.attempted_steps = facts.applied_steps = 0;
    SavedStateWriter to(path(name), facts);
    for (const SavedParameter& parameter : facts.parameters) {
      const auto copy = [&](SavedField field) {
        from.read(parameter, field, [&](Span<const float> piece) { to.write(piece); });
      };
      copy(SavedField::kMaster);
      if (parameter.has_m) copy(SavedField::kM);
      if (parameter.has_v) copy(SavedField::kV);
    }
    to.finish();
  };
  import("whole", false);
  import("weights", true);
  o.ranks = 2;
  o.stage = 3;
  o.export_file = path("whole.safetensors");
  o.load_state = path("whole");
  EXPECT_EQ(run_training(o).first_step, 2U);
  EXPECT_TRUE(bytes_of(o.export_file) == bytes_of(path("from.safetensors")));
  // The losses are those of a run that begins with these weights.
  o.load_state = path("weights");
  const TrainingReport loaded = run_training(o);
  EXPECT_EQ(loaded.first_step, 0U);
  o.load_state.clear();
  o.initial_file = path("from.safetensors");
  EXPECT_EQ(run_training(o).digest, loaded.digest);
}

// States of format 1: of three ranks at stage 2, and of four ranks in parts, tensor-parallel 2 and
// pipeline-parallel 2. Both are of the training in the folder's README.md.
TEST_F(Reload, StatesOfFormat1AreLoaded) {
  fs::copy(OLD_STATES, directory_ / "old", fs::copy_options::recursive);
  TrainerOptions o = options();
  o.model = {.layers = 2, .hidden = 8, .heads = 2, .sequence = 4};
  o.text = {path("old/text")};
  const auto expect_loaded = [&](const std::string& name) {
    o.export_file = path(name + ".safetensors");
    o.load_state = path("old/" + name);
    const TrainingReport report = run_training(o);
    EXPECT_EQ(report.first_step, 2U);
    EXPECT_TRUE(tensors_of(o.export_file) == tensors_of(path("old/" + name + ".safetensors"))) << name;
  };
  o.ranks = 2;
  o.stage = 3;
  expect_loaded("ranks");
  o.ranks = 8;
  o.tensor_parallel = 2;
  o.pipeline_parallel = 2;
  expect_loaded("ranks");

  expect_loaded("parts");
  o.load_step = 2;
  expect_loaded("parts");
  o.load_step = 1;
  EXPECT_THROW(run_training(o), Error) << "no state of step 1";
  o.load_step = 0;
  EXPECT_TRUE(holds_state(path("old/parts")));
  EXPECT_TRUE(holds_state(path("old/ranks")));
  EXPECT_FALSE(holds_state(path("none")));
  o.save_state = path("old/parts");  // In the form of today, beside the parts.
  o.steps = 3;
  run_training(o);
  EXPECT_TRUE(fs::exists(path("old/parts/step-2/part-0")));
  o.save_state.clear();
  o.tensor_parallel = 1;
  o.pipeline_parallel = 1;
  EXPECT_EQ(run_training(o).first_step, 3U);
  o.load_state = path("old/others");
  fs::copy(fs::path(OLD_STATES) / "parts", path("old/others"), fs::copy_options::recursive);
  EXPECT_THROW(run_training(o), Error) << "other numbers of parts";
}

}  // namespace
}  // namespace forebay::gpt
