// Each optimizer gives bit for bit the result of plain loops, whatever the stage, the number of ranks and the
// place of its states, and its bytes are those of the plan. See optimizer.h.

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>

#include "tests/engine/toy_cases.h"
#include "tests/offload/memory_store.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

constexpr Optimizer kOptimizers[] = {Optimizer::kAdamW, Optimizer::kAdam, Optimizer::kSgd, Optimizer::kLion};

struct Setting {
  Offload offload;
  Tier tier;
};
constexpr Setting kSettings[] = {{Offload::kNone, Tier::kPinned},
                                 {Offload::kOptimizer, Tier::kPinned},
                                 {Offload::kOptimizer, Tier::kFile},
                                 {Offload::kOptimizerAndParameters, Tier::kPinned},
                                 {Offload::kOptimizerAndParameters, Tier::kFile}};

ToyOptions options_of(Optimizer optimizer, int stage, DataType type, int ranks, const Setting& setting) {
  ToyOptions options = options_for(stage, type, ranks);
  options.engine.optimizer = optimizer;
  options.engine.offload = setting.offload;
  options.engine.tier = setting.tier;
  options.engine.staging_bytes = 8u << 20;
  options.engine.host_threads = 2;
  options.hooks.make_store = [](int rank) {
    return make_memory_store({.alignment_bytes = 4096, .order_seed = static_cast<std::uint64_t>(rank) + 1});
  };
  options.groups[1].beta1 = 0.8;
  options.groups[1].beta2 = 0.99;
  return options;
}

std::string text_of(const ToyOptions& options) {
  return std::string(optimizer_name(options.engine.optimizer)) + ", stage " +
         std::to_string(options.engine.stage) + ", " + std::to_string(options.ranks) + " ranks, " +
         data_type_name(options.engine.dtype) + ", offload " + offload_name(options.engine.offload) + " on " +
         tier_name(options.engine.tier) + ", " + std::to_string(options.engine.micro_steps) + " micro-steps";
}

class OptimizerContract : public ::testing::TestWithParam<Optimizer> {};

TEST_P(OptimizerContract, EveryStageAndPlaceGivesTheBitsOfThePlainLoops) {
  struct Case {
    int ranks;
    DataType type;
    int micro_steps;
  };
  for (const Case& c : {Case{1, DataType::kFloat32, 1}, Case{3, DataType::kBfloat16, 2},
                        Case{4, DataType::kFloat32, 2}, Case{3, DataType::kFloat16, 1}}) {
    ToyOptions plain = options_of(GetParam(), 0, c.type, c.ranks, kSettings[0]);
    plain.engine.micro_steps = c.micro_steps;
    // One step is skipped.
    const auto disturbance = [](int rank, int step) {
      return rank == 0 && step == 2 ? std::numeric_limits<float>::infinity() : 0.0f;
    };
    plain.disturbance = disturbance;
    const ToyResult expected = reference_toy(plain);
    for (int stage = 0; stage <= 3; ++stage) {
      for (const Setting& setting : kSettings) {
        if (setting.offload == Offload::kOptimizerAndParameters && stage < 3) continue;
        ToyOptions options = options_of(GetParam(), stage, c.type, c.ranks, setting);
        options.engine.micro_steps = c.micro_steps;
        options.disturbance = disturbance;
        const ToyResult actual = run_toy(options);
        expect_same(actual, expected, text_of(options));
        const EngineStatistics& s = actual.statistics;
        EXPECT_EQ(s.peak, s.planned) << text_of(options);
        EXPECT_EQ(s.file_bytes, s.planned_file_bytes) << text_of(options);
        EXPECT_GE(s.host_bytes, s.planned_host_bytes) << text_of(options);
        EXPECT_LE(s.host_bytes, s.planned_host_bytes + 4096) << text_of(options);
      }
    }
  }
}

// Saved in the middle by some ranks, and gone on with by others at another stage and place.
TEST_P(OptimizerContract, AResumedRunGivesTheSameBits) {
  const std::string directory = make_temporary_directory("optimizer");
  ToyOptions options = options_of(GetParam(), 1, DataType::kFloat32, 3, kSettings[1]);
  options.steps = 4;
  run_ranks(3, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
    trainer.engine().save_state(directory, "x");
  });
  const ToyResult expected = reference_toy(options);
  for (const auto& [stage, setting] :
       {std::pair(0, kSettings[0]), std::pair(2, kSettings[2]), std::pair(3, kSettings[4])}) {
    const ToyOptions other = options_of(GetParam(), stage, DataType::kFloat32, 3, setting);
    ToyResult result;
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(other, rank);
      EXPECT_EQ(trainer.engine().load_state(directory), "x");
      for (int step = 2; step < 4; ++step) static_cast<void>(trainer.step(step));
      ToyResult mine;
      trainer.collect(mine);
      if (rank.communicator->rank() == 0) result = mine;
    });
    for (std::size_t q = 0; q < expected.masters.size(); ++q) {
      ASSERT_EQ(result.masters[q].size(), expected.masters[q].size());
      EXPECT_EQ(
          std::memcmp(result.masters[q].data(), expected.masters[q].data(), 4 * result.masters[q].size()), 0)
          << text_of(other) << ": parameter " << q;
    }
  }
  std::filesystem::remove_all(directory);
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerContract, ::testing::ValuesIn(kOptimizers),
                         [](const auto& p) { return std::string(optimizer_name(p.param)); });

TEST(Optimizers, AStateOfAnotherOptimizerIsRefused) {
  const std::string directory = make_temporary_directory("optimizer");
  const auto run = [&](Optimizer optimizer, bool saves) {
    const ToyOptions options = options_of(optimizer, 2, DataType::kFloat32, 1, kSettings[0]);
    run_ranks(1, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      static_cast<void>(trainer.step(0));
      if (saves)
        trainer.engine().save_state(directory, "x");
      else
        trainer.engine().load_state(directory);
    });
  };
  run(Optimizer::kLion, true);
  run(Optimizer::kLion, false);
  for (const Optimizer other : {Optimizer::kAdamW, Optimizer::kSgd}) {
    try {
      run(other, false);
      ADD_FAILURE() << optimizer_name(other);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("is of the optimizer lion"), std::string::npos)
          << error.what();
    }
  }
  std::filesystem::remove_all(directory);
}

// 1024 elements on two ranks, in bytes.
TEST(Optimizers, WithoutASecondMomentTakeAThirdLess) {
  ModelShape model;
  model.units.resize(1);
  model.units[0].name = "u";
  model.units[0].parameters.push_back({"p", 1024});
  PlanOptions options;
  options.ranks = 2;
  options.stage = 2;
  options.dtype = DataType::kBfloat16;
  for (const Optimizer optimizer : kOptimizers) {
    options.optimizer = optimizer;
    options.offload = Offload::kNone;
    const std::uint64_t width = has_second_moment(optimizer) ? 12 : 8;
    EXPECT_EQ(value_or_throw(make_plan(model, options)).bytes.optimizer, 512 * width);
    options.offload = Offload::kOptimizer;
    EXPECT_EQ(value_or_throw(make_plan(model, options)).host_bytes.optimizer, 512 * width);
    options.tier = Tier::kFile;
    const Plan plan = value_or_throw(make_plan(model, options));
    EXPECT_EQ(plan.file_bytes.optimizer, width / 4 * 4096);
    EXPECT_EQ(plan.file_bytes.read_per_step, plan.file_bytes.optimizer);
    options.tier = Tier::kPinned;
  }
}

}  // namespace
}  // namespace forebay::testing
