// A state that is saved at any number of ranks, stage, offload setting, type and grid is loaded at any other:
// the masters, m and v are the same bit for bit. So are states that older versions saved.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/saved_state.h"
#include "forebay/sharding_arguments.h"
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
  TrainerOptions drawn(std::mt19937_64& random) const;
  // Saves the state and exports the weights at the end.
  void run(TrainerOptions o, const std::string& name, const std::string& from = "") const {
    o.save_state = path(name);
    o.export_file = path(name + ".safetensors");
    if (!from.empty()) o.load_state = path(from);
    run_training(o);
  }
  void expect_same_state(const std::string& a, const std::string& b) const {
    EXPECT_TRUE(bytes_of(path(a + ".safetensors")) == bytes_of(path(b + ".safetensors"))) << "masters";
    for (const SavedField field : {SavedField::kMaster, SavedField::kM, SavedField::kV}) {
      const std::vector<float> values = values_of(path(a), field);
      EXPECT_GT(values.size(), 20'000U);
      EXPECT_TRUE(values == values_of(path(b), field)) << "field " << static_cast<int>(field);
    }
  }

  fs::path directory_;
};

TrainerOptions Reload::drawn(std::mt19937_64& random) const {
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
  return o;
}

std::string text_of(const TrainerOptions& o) {
  return "--ranks " + std::to_string(o.ranks) + " --stage " + std::to_string(o.stage) + " --dtype " +
         data_type_name(o.dtype) + " --tensor-parallel " + std::to_string(o.tensor_parallel) +
         " --pipeline-parallel " + std::to_string(o.pipeline_parallel) + " --offload " +
         offload_name(o.offload) + " --offload-tier " + tier_name(o.tier);
}

TEST_F(Reload, OfAnyGridByAnyOtherGivesTheSameMasters) {
  const char* const given = std::getenv("FOREBAY_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
  std::printf("seed %llu (FOREBAY_TEST_SEED)\n", static_cast<unsigned long long>(seed));
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int pair = 0; pair < 60; ++pair) {
    const TrainerOptions from = drawn(random);
    const TrainerOptions to = drawn(random);
    SCOPED_TRACE("pair " + std::to_string(pair) + ": from " + text_of(from) + " to " + text_of(to));

    run(from, "from");
    run(to, "to", "from");

    expect_same_state("from", "to");
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
  refused({.layers = 4, .hidden = 24, .heads = 6, .sequence = 12}, "h.3.ln_1.weight has 0 elements there");
  refused({.layers = 2, .hidden = 24, .heads = 6, .sequence = 12},
          "h.2.attn.c_attn.bias is not one of this model");
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
    EXPECT_TRUE(bytes_of(o.export_file) == bytes_of(path("old/" + name + ".safetensors"))) << name;
  };
  o.ranks = 2;
  o.stage = 3;
  expect_loaded("ranks");
  o.ranks = 8;
  o.tensor_parallel = 2;
  o.pipeline_parallel = 2;
  expect_loaded("ranks");

  expect_loaded("parts");
  o.save_state = path("old/parts");  // In the form of today, in place of the parts.
  o.steps = 3;
  run_training(o);
  EXPECT_FALSE(fs::exists(path("old/parts/parts")));
  EXPECT_FALSE(fs::exists(path("old/parts/step-2")));
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
