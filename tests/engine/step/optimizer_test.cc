// Each optimizer gives bit for bit the result of plain loops, whatever the stage, the number of ranks and the
// place of its states, and its bytes are those of the plan. See optimizer.h.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>

#include "tests/engine/toy_cases.h"
#include "tests/offload/memory_store.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

constexpr Optimizer kOptimizers[] = {Optimizer::kAdamW, Optimizer::kAdam, Optimizer::kSgd, Optimizer::kLion};

// An optimizer, and how its states are kept.
struct Rule {
  Optimizer optimizer;
  MomentFormat moments = MomentFormat::kFloat32;
  bool master_weights = true;
  double ema = 0.0;
};
constexpr Rule kRules[] = {{Optimizer::kAdamW},
                           {Optimizer::kAdam},
                           {Optimizer::kSgd},
                           {Optimizer::kLion},
                           {Optimizer::kAdamW, MomentFormat::kBfloat16},
                           {Optimizer::kAdamW, MomentFormat::kBlock8},
                           {Optimizer::kAdam, MomentFormat::kBlock8},
                           {Optimizer::kSgd, MomentFormat::kBfloat16},
                           {Optimizer::kLion, MomentFormat::kBlock8},
                           {Optimizer::kAdamW, MomentFormat::kFloat32, false},
                           {Optimizer::kLion, MomentFormat::kBfloat16, false},
                           {Optimizer::kAdamW, MomentFormat::kBlock8, false},
                           {Optimizer::kAdamW, MomentFormat::kFloat32, true, 0.75},
                           {Optimizer::kLion, MomentFormat::kBlock8, true, 0.9},
                           {Optimizer::kAdam, MomentFormat::kBfloat16, false, 0.9},
                           {Optimizer::kAdafactor},
                           {Optimizer::kAdafactor, MomentFormat::kFloat32, false},
                           {Optimizer::kAdafactor, MomentFormat::kFloat32, true, 0.75},
                           {Optimizer::kMuon},
                           {Optimizer::kMuon, MomentFormat::kFloat32, false},
                           {Optimizer::kMuon, MomentFormat::kFloat32, true, 0.75}};

std::string name_of(const Rule& rule) {
  return std::string(optimizer_name(rule.optimizer)) +
         (rule.moments == MomentFormat::kFloat32 ? "" : std::string("_") + moment_format_name(rule.moments)) +
         (rule.master_weights ? "" : "_no_master") + (rule.ema > 0 ? "_ema" : "");
}

struct Setting {
  Offload offload;
  Tier tier;
};
constexpr Setting kSettings[] = {{Offload::kNone, Tier::kPinned},
                                 {Offload::kOptimizer, Tier::kPinned},
                                 {Offload::kOptimizer, Tier::kFile},
                                 {Offload::kOptimizerAndParameters, Tier::kPinned},
                                 {Offload::kOptimizerAndParameters, Tier::kFile}};

// Matrices for the optimizers that know rows and columns: slices cut rows, one has several bands of rows, and
// one has several matrices.
void declare_shapes(std::vector<ToyUnit>& units) {
  for (ToyUnit& unit : units) {
    for (ToyParameter& parameter : unit.parameters) {
      if (parameter.count == 700) parameter.shape = {35, 20};
      if (parameter.count == 1000) parameter.shape = {2, 20, 25};
      if (parameter.count == 3000) parameter.shape = {600, 5};
      if (parameter.count == 65) parameter.shape = {1, 65};
    }
  }
}

// For Muon: matrices that are wide, tall, a row and cut by slices, two in a unit; and one that is declared to
// be no matrix.
void declare_matrices(std::vector<ToyUnit>& units) {
  declare_shapes(units);
  for (ToyUnit& unit : units) {
    for (ToyParameter& parameter : unit.parameters) {
      if (parameter.count == 64) parameter.shape = {1, 64};
      if (parameter.count == 1000) parameter.shape = {25, 40};
      if (parameter.count == 65) parameter.elementwise = true;
    }
  }
}

ToyOptions options_of(const Rule& rule, int stage, DataType type, int ranks, const Setting& setting) {
  ToyOptions options = options_for(stage, rule.master_weights ? type : DataType::kBfloat16, ranks);
  if (rule.optimizer == Optimizer::kAdafactor) declare_shapes(options.units);
  if (rule.optimizer == Optimizer::kMuon) declare_matrices(options.units);
  options.engine.muon_matches_rms = rule.ema > 0.0;
  options.engine.optimizer = rule.optimizer;
  options.engine.moments = rule.moments;
  options.engine.master_weights = rule.master_weights;
  options.engine.ema = rule.ema;
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
  const EngineOptions& engine = options.engine;
  return name_of({engine.optimizer, engine.moments, engine.master_weights, engine.ema}) + ", stage " +
         std::to_string(options.engine.stage) + ", " + std::to_string(options.ranks) + " ranks, " +
         data_type_name(options.engine.dtype) + ", offload " + offload_name(options.engine.offload) + " on " +
         tier_name(options.engine.tier) + ", " + std::to_string(options.engine.micro_steps) + " micro-steps";
}

class OptimizerContract : public ::testing::TestWithParam<Rule> {};

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
        EXPECT_EQ(s.host_bytes, s.planned_host_bytes) << text_of(options);
      }
    }
  }
}

// Saved in the middle by some ranks, also while training goes on, and gone on with by others at another stage
// and place.
TEST_P(OptimizerContract, AResumedRunGivesTheSameBits) {
  const std::string directory = make_temporary_directory("optimizer");
  for (const auto& [save_stage, save_setting, is_async] :
       {std::tuple(1, kSettings[1], false), std::tuple(3, kSettings[4], true),
        std::tuple(2, kSettings[0], true)}) {
    ToyOptions options = options_of(GetParam(), save_stage, DataType::kFloat32, 3, save_setting);
    options.engine.save_async = is_async;
    options.steps = 4;
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
      if (is_async) {
        trainer.engine().save_state_begin(directory, "x");
        static_cast<void>(trainer.step(2));
        trainer.engine().save_state_end();
        const EngineStatistics s = trainer.engine().statistics();
        EXPECT_EQ(s.peak, s.planned) << text_of(options);
        EXPECT_EQ(s.host_bytes, s.planned_host_bytes) << text_of(options);
      } else {
        trainer.engine().save_state(directory, "x");
      }
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
        EXPECT_EQ(result.averages, expected.averages) << text_of(other);
        EXPECT_EQ(
            std::memcmp(result.masters[q].data(), expected.masters[q].data(), 4 * result.masters[q].size()),
            0)
            << text_of(other) << " from " << text_of(options) << ": parameter " << q;
      }
    }
  }
  std::filesystem::remove_all(directory);
}

// A second optimizer over the same weights.
TEST_P(OptimizerContract, AfterAResetItIsThatOfTheFirstStep) {
  for (const auto& [stage, setting] : {std::pair(0, kSettings[0]), std::pair(1, kSettings[1]),
                                       std::pair(2, kSettings[2]), std::pair(3, kSettings[4])}) {
    const ToyOptions options = options_of(GetParam(), stage, DataType::kFloat32, 3, setting);
    run_ranks(3, {}, [&, setting = setting](Rank& rank) {
      ToyTrainer trainer(options, rank), other(options, rank);
      trainer.initialize();
      for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
      trainer.engine().reset_moments();
      EXPECT_EQ(trainer.engine().applied_steps(), 0u);
      EXPECT_EQ(trainer.engine().attempted_steps(), 2u);
      ToyResult result, expected;
      trainer.collect(result);
      other.set(result);
      for (int step = 2; step < 4; ++step) {
        static_cast<void>(trainer.step(step));
        static_cast<void>(other.step(step));
      }
      trainer.collect(result);
      other.collect(expected);
      EXPECT_EQ(result.masters, expected.masters) << text_of(options);
    });
  }
}

TEST(Optimizers, ARankThatAloneResetsItsMomentsIsTold) {
  const ToyOptions options = options_of({Optimizer::kAdamW, MomentFormat::kFloat32, true, 0.0}, 1,
                                        DataType::kFloat32, 3, kSettings[0]);
  run_ranks(3, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    static_cast<void>(trainer.step(0));
    if (rank.communicator->rank() == 1) trainer.engine().reset_moments();
    EXPECT_THROW(static_cast<void>(trainer.step(1)), Error);
    EXPECT_THROW(trainer.engine().reset_moments(), Error);
  });
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerContract, ::testing::ValuesIn(kRules),
                         [](const auto& p) { return name_of(p.param); });

// The weights of evaluations are then the average, and the training goes on as if nothing had been.
TEST(Optimizers, TheAverageMayTakeThePlaceOfTheWeightsForAWhile) {
  const std::string directory = make_temporary_directory("optimizer");
  for (const auto& [stage, type, setting] :
       {std::tuple(0, DataType::kFloat32, kSettings[0]), std::tuple(2, DataType::kBfloat16, kSettings[1]),
        std::tuple(3, DataType::kFloat32, kSettings[4]), std::tuple(3, DataType::kBfloat16, kSettings[4])}) {
    ToyOptions options =
        options_of({Optimizer::kAdamW, MomentFormat::kBfloat16, true, 0.75}, stage, type, 3, setting);
    const ToyResult expected = reference_toy(options);
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      ToyResult result;
      for (int step = 0; step < options.steps; ++step) {
        static_cast<void>(trainer.step(step));
        trainer.collect(result);
        const ToyResult before = result;
        trainer.engine().swap_average();
        trainer.evaluate_all();
        EXPECT_THROW(trainer.engine().step_begin(), Error);
        for (const auto& refused : std::initializer_list<std::function<void(Engine&)>>{
                 [&](Engine& engine) { engine.save_state(directory, "x"); },
                 [&](Engine& engine) { engine.save_state_begin(directory, "x"); },
                 [&](Engine& engine) { static_cast<void>(engine.load_state(directory)); }}) {
          try {
            refused(trainer.engine());
            ADD_FAILURE() << "not refused";
          } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find("the weights are their moving average"),
                      std::string::npos)
                << error.what();
          }
        }
        trainer.collect(result);
        EXPECT_EQ(result.masters, before.averages) << text_of(options);
        EXPECT_EQ(result.averages, before.masters) << text_of(options);
        trainer.engine().swap_average();
      }
      trainer.collect(result);
      EXPECT_EQ(result.masters, expected.masters) << text_of(options);
      EXPECT_EQ(result.averages, expected.averages) << text_of(options);
    });
  }
  // The average would be rounded for good.
  const ToyOptions halves = options_of({Optimizer::kAdamW, MomentFormat::kFloat32, false, 0.75}, 1,
                                       DataType::kBfloat16, 1, kSettings[0]);
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(halves, rank);
    trainer.initialize();
    EXPECT_THROW(trainer.engine().swap_average(), Error);
  });
  std::filesystem::remove_all(directory);
}

// A run without an average goes on with one, which begins as its weights.
TEST(Optimizers, AStateWithoutAnAverageGoesOnWithOne) {
  const std::string directory = make_temporary_directory("optimizer");
  for (const double ema : {0.0, 0.5}) {
    const ToyOptions options = options_of({Optimizer::kAdamW, MomentFormat::kFloat32, true, ema}, 2,
                                          DataType::kFloat32, 1, kSettings[0]);
    run_ranks(1, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      if (ema == 0.0) {
        trainer.initialize();
        static_cast<void>(trainer.step(0));
        trainer.engine().save_state(directory, "x");
        return;
      }
      trainer.engine().load_state(directory);
      ToyResult result;
      trainer.collect(result);
      EXPECT_EQ(result.averages, result.masters);
    });
  }
  std::filesystem::remove_all(directory);
}

TEST(Optimizers, ARunWithoutAnAverageSaysThatItDropsTheSavedOne) {
  const std::string directory = make_temporary_directory("optimizer");
  for (const double ema : {0.5, 0.5, 0.0}) {
    const ToyOptions options = options_of({Optimizer::kAdamW, MomentFormat::kFloat32, true, ema}, 2,
                                          DataType::kFloat32, 2, kSettings[0]);
    ::testing::internal::CaptureStderr();
    run_ranks(2, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      if (std::filesystem::exists(directory + "/latest")) {
        trainer.engine().load_state(directory);
      } else {
        trainer.initialize();
        static_cast<void>(trainer.step(0));
        trainer.engine().save_state(directory, "x");
      }
    });
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("has a moving average of the weights") != std::string::npos, ema == 0.0) << said;
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), ema == 0.0 ? 1 : 0) << said;
  }
  std::filesystem::remove_all(directory);
}

TEST(Optimizers, LargeParametersWithoutAShapeAreNamedOnce) {
  for (const Optimizer optimizer : {Optimizer::kAdafactor, Optimizer::kMuon, Optimizer::kAdamW}) {
    for (const bool declared : {false, true}) {
      ToyOptions options = options_of({optimizer}, 2, DataType::kFloat32, 2, kSettings[0]);
      options.units = {{{{300'000}, {70'000}, {512}}, {}, true}};
      if (declared) {
        options.units[0].parameters[0].shape = {1250, 240};
        options.units[0].parameters[1].shape = {70'000};
      }
      ::testing::internal::CaptureStderr();
      run_ranks(2, {}, [&](Rank& rank) { const ToyTrainer trainer(options, rank); });
      const std::string said = ::testing::internal::GetCapturedStderr();
      const bool warns = !declared && !is_elementwise(optimizer);
      EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), warns ? 1 : 0) << said;
      EXPECT_EQ(said.find("2 large parameters have no declared shape, ") != std::string::npos, warns) << said;
      EXPECT_EQ(said.find("with 300000 elements first") != std::string::npos, warns) << said;
    }
  }
}

// In files, codes of several pieces have their exponents between them, and pieces cut rows of matrices.
TEST(Optimizers, SeveralPiecesOfFilesGiveTheSameBits) {
  const std::string directory = make_temporary_directory("optimizer");
  for (const Rule& rule :
       {Rule{Optimizer::kAdamW, MomentFormat::kBlock8}, Rule{Optimizer::kAdamW, MomentFormat::kBlock8, false},
        Rule{Optimizer::kAdafactor}, Rule{Optimizer::kAdafactor, MomentFormat::kFloat32, false},
        Rule{Optimizer::kMuon}, Rule{Optimizer::kMuon, MomentFormat::kFloat32, false}}) {
    SCOPED_TRACE(name_of(rule));
    ToyOptions options = options_of(rule, 1, DataType::kBfloat16, 1, kSettings[2]);
    options.units = {{{{300'000}, {70'000, 1}}, {}, true}, {{{513}}, {}, true}};
    if (rule.optimizer == Optimizer::kAdafactor) options.units[0].parameters[0].shape = {1250, 240};
    if (rule.optimizer == Optimizer::kMuon) options.units[0].parameters[0].shape = {6, 50'000};
    options.engine.save_async = true;
    options.steps = 3;
    ModelShape model;
    model.units = {{.name = "unit0", .parameters = {{"p0", 300'000}, {"p1", 70'000}}}};
    PlanOptions plan_options;
    static_cast<ShardingOptions&>(plan_options) = options.engine;
    EXPECT_LT(value_or_throw(make_plan(model, plan_options)).piece_count, 370'000u);
    const ToyResult expected = reference_toy(options);
    run_ranks(1, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
      trainer.engine().save_state_begin(directory, "x");
      static_cast<void>(trainer.step(2));
      trainer.engine().save_state_end();
      ToyResult result;
      trainer.collect(result);
      EXPECT_EQ(result.masters, expected.masters);
      EXPECT_EQ(result.statistics.file_bytes, result.statistics.planned_file_bytes);
      EXPECT_EQ(trainer.engine().load_state(directory), "x");
      static_cast<void>(trainer.step(2));
      trainer.collect(result);
      EXPECT_EQ(result.masters, expected.masters) << "resumed";
    });
  }
  std::filesystem::remove_all(directory);
}

// On the virtual clock kernels or the link are slow, so that work that does not wait for them comes too
// early.
TEST(Optimizers, ThoseOfWholeParametersWaitForSlowWork) {
  using std::chrono::milliseconds;
  WorldOptions slow_kernels, slow_decision, slow_link;
  slow_kernels.script.kernel_duration = [](const char*) { return milliseconds(1); };
  slow_decision.script.kernel_duration = [](const char* kernel) {
    return milliseconds(std::string_view(kernel) == "forebay_step_control" ? 100 : 0);
  };
  slow_link.local.latency = milliseconds(1);
  for (WorldOptions* world : {&slow_kernels, &slow_decision, &slow_link}) {
    for (const Optimizer optimizer : {Optimizer::kAdafactor, Optimizer::kMuon}) {
      for (const auto& [stage, setting] :
           {std::pair(0, kSettings[0]), {2, kSettings[0]}, {2, kSettings[1]}}) {
        ToyOptions options = options_of({optimizer}, stage, DataType::kFloat32, 3, setting);
        options.steps = 2;
        HostClock clock(HostClock::Mode::kVirtual);
        world->clock = &clock;
        expect_same(run_toy(options, *world), reference_toy(options), text_of(options));
      }
    }
  }
}

// 4096 elements on two ranks, in bytes: a quarter of fp32's with 8-bit moments and no master.
TEST(Optimizers, NarrowStatesTakeThePlannedBytes) {
  ModelShape model;
  model.units.resize(1);
  model.units[0].name = "u";
  model.units[0].parameters.push_back({"p", 4096});
  PlanOptions options;
  options.ranks = 2;
  options.stage = 2;
  options.dtype = DataType::kBfloat16;
  struct Case {
    MomentFormat moments;
    bool master_weights;
    std::uint64_t on_device, offloaded;
  };
  // 8 of them: up to a line of the caches, on the device up to a granule of the arena.
  constexpr std::uint64_t kExponents = 64, kOnDevice = 512;
  for (const Case& c :
       {Case{MomentFormat::kFloat32, true, 2048 * 12, 2048 * 12},
        Case{MomentFormat::kBfloat16, true, 2048 * 8, 2048 * 8},
        Case{MomentFormat::kBlock8, true, 2048 * 6 + 2 * kOnDevice, 2048 * 6 + 2 * kExponents},
        Case{MomentFormat::kBlock8, false, 2048 * 2 + 2 * kOnDevice, 2048 * 4 + 2 * kExponents},
        Case{MomentFormat::kFloat32, false, 2048 * 8, 2048 * 10}}) {
    options.moments = c.moments;
    options.master_weights = c.master_weights;
    options.offload = Offload::kNone;
    EXPECT_EQ(value_or_throw(make_plan(model, options)).bytes.optimizer, c.on_device);
    options.offload = Offload::kOptimizer;
    EXPECT_EQ(value_or_throw(make_plan(model, options)).host_bytes.optimizer, c.offloaded);
  }
}

// A matrix of 64 rows and 64 columns on two ranks: 128 factors in place of 4096 elements of v, padded to 256.
TEST(Optimizers, AdafactorTakesTheBytesOfItsFactors) {
  ModelShape model;
  model.units.resize(1);
  model.units[0].name = "u";
  model.units[0].parameters.push_back({.name = "p", .count = 4096, .shape = {64, 64}});
  PlanOptions options;
  options.ranks = 2;
  options.stage = 2;
  options.dtype = DataType::kBfloat16;
  const Plan others = value_or_throw(make_plan(model, options));
  options.optimizer = Optimizer::kAdafactor;
  // The sums of squares of three records, and a factor of u, a mean and the leaves of 2048 elements, each
  // rounded up. Offloaded: up to a page.
  constexpr std::uint64_t kFactors = 256 * 4, kSquares = 512, kWork = 512, kHostSquares = 2048;
  const Plan plan = value_or_throw(make_plan(model, options));
  EXPECT_EQ(plan.bytes.optimizer, 2048 * 4 + 2 * kFactors);
  EXPECT_EQ(plan.bytes_of(Role::kFactors), kFactors);
  EXPECT_EQ(plan.bytes_of(Role::kFactorSums), kFactors);
  EXPECT_EQ(plan.bytes_of(Role::kSquares), kSquares);
  EXPECT_EQ(plan.bytes_of(Role::kFactorScalars), kWork);
  EXPECT_EQ(plan.bytes_of(Role::kFactorLeaves), kWork);
  EXPECT_EQ(plan.bytes.buckets, others.bytes.buckets + kSquares + 2 * kWork);
  EXPECT_EQ(plan.host_bytes.total(), 0u);
  // Half of the sums twice, two doubles of the parameter, and the last gather.
  EXPECT_EQ(plan.wire_per_step.sent, others.wire_per_step.sent + kFactors + 16 + 8);
  options.offload = Offload::kOptimizer;
  const Plan offloaded = value_or_throw(make_plan(model, options));
  EXPECT_EQ(offloaded.bytes.optimizer, kFactors);
  EXPECT_EQ(offloaded.bytes.buckets, others.bytes.buckets + kSquares);
  EXPECT_EQ(offloaded.host_bytes.optimizer, 2048 * 4 + 2 * kFactors + kHostSquares);
  EXPECT_EQ(offloaded.host_bytes.total() % 4096, 0u);
  options.tier = Tier::kFile;
  const Plan in_files = value_or_throw(make_plan(model, options));
  EXPECT_EQ(in_files.host_bytes.optimizer, 2 * kFactors + kHostSquares);
  EXPECT_EQ(in_files.file_bytes.optimizer, 2048 * 4u);
  // Without a shape it is a vector, with a factor for each element.
  model.units[0].parameters[0].shape.clear();
  EXPECT_EQ(value_or_throw(make_plan(model, options)).bytes_of(Role::kFactors), 4096 * 4u);
}

// In a matrix of 64 rows and 32 columns, and a vector of 1000, on two ranks: m for all 3072 elements, padded;
// v for the vector alone, which is on the second rank's slice from 1536 to 3072.
TEST(Optimizers, MuonTakesTheBytesOfOneMomentAndOfItsMatrices) {
  ModelShape model;
  model.units.resize(1);
  model.units[0].name = "u";
  model.units[0].parameters.push_back({.name = "p", .count = 2048, .shape = {64, 32}});
  model.units[0].parameters.push_back({.name = "q", .count = 1000, .shape = {1000}});
  PlanOptions options;
  options.ranks = 2;
  options.stage = 2;
  options.dtype = DataType::kBfloat16;
  const Plan others = value_or_throw(make_plan(model, options));
  options.optimizer = Optimizer::kMuon;
  constexpr std::uint64_t kV = 4096, kWork = 4 * (2048 + 2 * 32 * 32);
  const Plan plan = value_or_throw(make_plan(model, options));
  EXPECT_EQ(plan.bytes.optimizer, 1536 * (4 + 4 + 4) + kV);
  EXPECT_EQ(plan.bytes_of(Role::kV), kV);
  EXPECT_EQ(plan.bytes_of(Role::kOrthogonal), 1536 * 4u);
  EXPECT_EQ(plan.bytes_of(Role::kMatrices), 2 * 3072 * 4u);
  EXPECT_EQ(plan.bytes_of(Role::kMatrixWork), kWork);
  EXPECT_EQ(plan.bytes.buckets, others.bytes.buckets + 2 * 3072 * 4 + kWork);
  EXPECT_EQ(plan.host_bytes.total(), 0u);
  // Half of the unit twice, in fp32, and the last gather.
  EXPECT_EQ(plan.wire_per_step.sent, others.wire_per_step.sent + 2 * 1536 * 4 + 8);
  options.offload = Offload::kOptimizer;
  const Plan offloaded = value_or_throw(make_plan(model, options));
  EXPECT_EQ(offloaded.bytes.optimizer, 0u);
  EXPECT_EQ(offloaded.bytes.buckets, plan.bytes.buckets);
  EXPECT_EQ(offloaded.host_bytes.optimizer, 1536 * (4 + 4 + 4) + kV);
  options.tier = Tier::kFile;
  const Plan in_files = value_or_throw(make_plan(model, options));
  EXPECT_EQ(in_files.host_bytes.optimizer, 1536 * 4 + kV);
  EXPECT_EQ(in_files.file_bytes.optimizer, 2 * 8192u);
  // m once more.
  EXPECT_EQ(in_files.file_bytes.read_per_step, 3 * 8192u);
  EXPECT_EQ(in_files.file_bytes.written_per_step, 2 * 8192u);
  // No matrix: AdamW's bytes, and nothing is sent but the last gather.
  options.offload = Offload::kNone;
  options.tier = Tier::kPinned;
  model.units[0].parameters[0].elementwise = true;
  const Plan single = value_or_throw(make_plan(model, options));
  EXPECT_EQ(single.bytes, others.bytes);
  EXPECT_EQ(single.host_bytes.total(), 0u);
  EXPECT_EQ(single.wire_per_step.sent, others.wire_per_step.sent + 8);
}

TEST(Optimizers, ThoseOfWholeParametersSendThePlannedBytes) {
  for (const Optimizer optimizer : {Optimizer::kAdafactor, Optimizer::kMuon}) {
    for (const int ranks : {1, 3, 4}) {
      for (int stage = 0; stage < 4; ++stage) {
        for (const Setting& setting : {kSettings[0], kSettings[1]}) {
          ToyOptions options = options_of({optimizer}, stage, DataType::kBfloat16, ranks, setting);
          options.steps = 3;
          const EngineStatistics s = run_toy(options).statistics;
          EXPECT_EQ(s.traffic.sent, 3 * s.planned_wire_per_step.sent) << text_of(options);
          EXPECT_EQ(s.traffic.received, 3 * s.planned_wire_per_step.received) << text_of(options);
        }
      }
    }
  }
}

// Gradients are added in groups, and the matrices' rows over all ranks.
TEST(Optimizers, MuonInAllReduceGroupsGivesTheBitsOfThePlainLoops) {
  for (int stage = 0; stage <= 3; ++stage) {
    ToyOptions options = options_of({Optimizer::kMuon}, stage, DataType::kBfloat16, 4, kSettings[0]);
    options.engine.group = 2;
    expect_same(run_toy(options), reference_toy(options), text_of(options));
  }
}

// A frozen matrix is not multiplied, and keeps its m until it trains again.
// It lies between parameters of its group.
TEST(Optimizers, AFixedParameterStays) {
  for (const Optimizer optimizer : {Optimizer::kAdamW, Optimizer::kAdafactor}) {
    ToyOptions options = options_of({optimizer}, 1, DataType::kFloat32, 2, kSettings[0]);
    options.units = {{{{100}, {100}, {100}}, {}, true}};
    run_ranks(2, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      std::vector<std::vector<float>> before;
      for (int p = 0; p < 3; ++p) before.push_back(trainer.engine().get_parameter({0, p}));
      trainer.engine().freeze({0, 1}, true);
      trainer.fixed = 1;
      static_cast<void>(trainer.step(0));
      EXPECT_NE(trainer.engine().get_parameter({0, 0}), before[0]);
      EXPECT_EQ(trainer.engine().get_parameter({0, 1}), before[1]) << optimizer_name(optimizer);
      EXPECT_NE(trainer.engine().get_parameter({0, 2}), before[2]);
    });
  }
}

// A rank has the end of one vector, the whole of the next, and their v one after another.
TEST(Optimizers, MuonKeepsTheMomentsOfCutVectorsApart) {
  for (const int stage : {0, 1, 3}) {
    ToyOptions options = options_of({Optimizer::kMuon}, stage, DataType::kFloat32, 2, kSettings[0]);
    options.units = {
        {{{5000}, {3000}}, {}, true}, {{{5000}, {3000}}, {}, true}, {{{5000}, {3000}}, {}, true}};
    expect_same(run_toy(options), reference_toy(options), text_of(options));
  }
}

TEST(Optimizers, MuonLeavesAMatrixThatIsFixed) {
  std::vector<ToyResult> results;
  for (const auto& [stage, setting] :
       {std::pair(0, kSettings[0]), std::pair(2, kSettings[1]), std::pair(3, kSettings[4])}) {
    const ToyOptions options = options_of({Optimizer::kMuon}, stage, DataType::kFloat32, 3, setting);
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      static_cast<void>(trainer.step(0));
      const std::vector<float> fixed = trainer.engine().get_parameter({2, 0});
      constexpr int kNumber = 6;  // The parameter's, over all units.
      trainer.engine().freeze({2, 0}, true);
      trainer.fixed = kNumber;
      static_cast<void>(trainer.step(1));
      EXPECT_EQ(trainer.engine().get_parameter({2, 0}), fixed);
      trainer.engine().freeze({2, 0}, false);
      trainer.fixed = -1;
      static_cast<void>(trainer.step(2));
      EXPECT_NE(trainer.engine().get_parameter({2, 0}), fixed);
      ToyResult result;
      trainer.collect(result);
      if (rank.communicator->rank() == 0) results.push_back(result);
    });
  }
  EXPECT_EQ(results[1].masters, results[0].masters);
  EXPECT_EQ(results[2].masters, results[0].masters);
}

// Saved by three ranks in files, and taken up by any number of ranks at any place.
TEST(Optimizers, MuonsMomentsAreThoseOfTheSavedState) {
  const std::string directory = make_temporary_directory("optimizer");
  const ToyOptions options = options_of({Optimizer::kMuon}, 3, DataType::kFloat32, 3, kSettings[4]);
  // m of a matrix, and m and v of single elements.
  const auto moments_of = [](Engine& engine) {
    std::vector<std::vector<float>> moments = {engine.get_moment({2, 0}, Moment::kFirst)};
    for (const ParameterId id : {ParameterId{0, 1}, ParameterId{2, 1}, ParameterId{4, 0}}) {
      moments.push_back(engine.get_moment(id, Moment::kFirst));
      moments.push_back(engine.get_moment(id, Moment::kSecond));
      EXPECT_NE(moments.back(), std::vector<float>(moments.back().size()));
    }
    return moments;
  };
  std::vector<std::vector<float>> saved;
  run_ranks(3, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
    const auto mine = moments_of(trainer.engine());
    if (rank.communicator->rank() == 0) saved = mine;
    EXPECT_THROW(trainer.engine().get_moment({2, 0}, Moment::kSecond), Error);
    trainer.engine().save_state(directory, "x");
  });
  for (const int ranks : {1, 4}) {
    std::vector<ToyResult> results;
    for (const auto& [stage, setting] : {std::pair(0, kSettings[0]), std::pair(1, kSettings[1]),
                                         std::pair(2, kSettings[2]), std::pair(3, kSettings[4])}) {
      const ToyOptions other = options_of({Optimizer::kMuon}, stage, DataType::kFloat32, ranks, setting);
      run_ranks(ranks, {}, [&](Rank& rank) {
        ToyTrainer trainer(other, rank);
        trainer.engine().load_state(directory);
        EXPECT_EQ(moments_of(trainer.engine()), saved) << text_of(other);
        static_cast<void>(trainer.step(2));
        ToyResult result;
        trainer.collect(result);
        if (rank.communicator->rank() == 0) results.push_back(result);
      });
      EXPECT_EQ(results.back().masters, results[0].masters) << text_of(other);
    }
  }
  // A parameter that is a matrix here and was none there, and the other way round.
  for (const bool is_matrix : {true, false}) {
    ToyOptions other = options_of({Optimizer::kMuon}, 2, DataType::kFloat32, 1, kSettings[0]);
    other.units[0].parameters[is_matrix ? 1 : 0].elementwise = !is_matrix;
    run_ranks(1, {}, [&](Rank& rank) {
      ToyTrainer trainer(other, rank);
      try {
        trainer.engine().load_state(directory);
        ADD_FAILURE() << is_matrix;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what())
                      .find(is_matrix ? "p1 was updated by AdamW there" : "p0 was a matrix there"),
                  std::string::npos)
            << error.what();
      }
    });
  }
  std::filesystem::remove_all(directory);
}

TEST(Optimizers, ThoseOfWholeParametersRefuseSettingsThatDivideThem) {
  for (const Optimizer optimizer : {Optimizer::kAdafactor, Optimizer::kMuon}) {
    const std::string name = std::string("optimizer ") + optimizer_name(optimizer);
    ModelShape model;
    model.units.resize(1);
    model.units[0].name = "u";
    model.units[0].parameters.push_back({.name = "p", .count = 4096, .shape = {64, 64}});
    const auto refusal = [&](const PlanOptions& options) {
      const Result<Plan> plan = make_plan(model, options);
      return plan.ok() ? std::string() : plan.status().message();
    };
    PlanOptions options;
    options.optimizer = optimizer;
    options.ranks = 4;
    EXPECT_EQ(refusal(options), "");
    PlanOptions other = options;
    other.moments = MomentFormat::kBfloat16;
    EXPECT_NE(refusal(other).find("moments is bf16, and " + name), std::string::npos);
    other = options;
    other.group = 2;
    EXPECT_EQ(refusal(other), "");
    other.shard_within_group = true;
    EXPECT_NE(refusal(other).find("shard-within is group, and " + name), std::string::npos);
    other = options;
    other.offload = Offload::kOptimizer;
    other.offload_auto = true;
    EXPECT_NE(refusal(other).find("offload-fraction is auto"), std::string::npos);
    model.units[0].parameters[0].split = TensorSplit{.shape = {128, 64}, .parts = 2};
    EXPECT_NE(refusal(options).find("parameter p is split over tensor-parallel ranks, and " + name),
              std::string::npos);
    // Muon divides single elements.
    model.units[0].parameters[0].elementwise = true;
    EXPECT_EQ(refusal(options).empty(), optimizer == Optimizer::kMuon);
  }
}

// Masters that a step did not write count in the root mean square of the next.
TEST(Optimizers, AdafactorFollowsWeightsThatAreSetBetweenSteps) {
  const ToyOptions options = options_of({Optimizer::kAdafactor}, 2, DataType::kFloat32, 3, kSettings[2]);
  ToyOptions plain = options_of({Optimizer::kAdafactor}, 0, DataType::kFloat32, 3, kSettings[0]);
  std::vector<ToyResult> results;
  for (const ToyOptions& each : {options, plain}) {
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(each, rank);
      trainer.initialize();
      for (int step = 0; step < 4; ++step) {
        if (step == 2) trainer.initialize();
        static_cast<void>(trainer.step(step));
      }
      ToyResult result;
      trainer.collect(result);
      if (rank.communicator->rank() == 0) results.push_back(result);
    });
  }
  EXPECT_EQ(results[0].masters, results[1].masters);
}

TEST(Optimizers, AStateOfAnotherOptimizerIsRefused) {
  const std::string directory = make_temporary_directory("optimizer");
  const auto run = [&](Optimizer optimizer, bool saves) {
    const ToyOptions options = options_of({optimizer}, 2, DataType::kFloat32, 1, kSettings[0]);
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
