// The engine on cuda backends over the fake driver. The ranks share one GPU; the host crashes if it touches
// device memory, and the CUDA kernels are built for the host.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <limits>

#include "tests/engine/toy.h"
#include "tests/support/fake_gpu.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

ToyOptions cuda_options_for(int stage, DataType type, int ranks) {
  ToyOptions options;
  options.units.push_back({{{700}, {65}}, {}, false});  // An embedding, tied to the head.
  options.units.push_back({{{64, 1}, {64, 1}, {1000, 0, true}, {13, 1}}, {}, true});
  options.units.push_back({{{3000}, {7, 1}}, {}, true});
  options.units.push_back({{{5, 1}}, {{0, 0}}, true});
  options.engine.stage = stage;
  options.engine.dtype = type;
  options.engine.bucket_bytes = 5000;
  options.engine.loss_scale.initial = 1024;
  options.engine.loss_scale.growth_interval = 2;
  options.ranks = ranks;
  return options;
}

WorldOptions world_on(FakeGpu& gpu) {
  return {.create_backend = [&gpu](int) { return gpu.create_backend(); }};
}

void expect_same_bits(const ToyResult& actual, const ToyResult& expected, const std::string& what) {
  EXPECT_TRUE(same_bits(actual, expected)) << what;
}

class EngineOnCuda : public ::testing::TestWithParam<std::tuple<int, DataType>> {};

TEST_P(EngineOnCuda, EveryStageGivesTheBitsOfThePlainLoops) {
  const auto [ranks, type] = GetParam();
  for (const int micro_steps : {1, 2}) {
    ToyOptions options = cuda_options_for(0, type, ranks);
    options.engine.micro_steps = micro_steps;
    // One step that overflows.
    options.steps = 5;
    options.disturbance = [](int rank, int step) {
      return rank == 0 && step == 2 ? std::numeric_limits<float>::infinity() : 0.0f;
    };
    const ToyResult expected = reference_toy(options);
    for (int stage = 0; stage < 4; ++stage) {
      for (const bool overlap : {true, false}) {
        if (!overlap && micro_steps > 1) continue;
        options.engine.stage = stage;
        options.engine.overlap = overlap;
        FakeGpu gpu;
        const ToyResult actual = run_toy(options, world_on(gpu));
        const std::string what = "stage " + std::to_string(stage) + ", " + std::to_string(micro_steps) +
                                 " micro-steps, overlap " + (overlap ? "on" : "off");
        expect_same_bits(actual, expected, what);
        EXPECT_EQ(actual.statistics.peak, actual.statistics.planned) << what;
        EXPECT_EQ(actual.statistics.peak_reserved_bytes, actual.statistics.planned_reserved_bytes) << what;
        EXPECT_EQ(actual.statistics.applied_steps, 4u) << what;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Toy, EngineOnCuda,
                         ::testing::Combine(::testing::Values(1, 3),
                                            ::testing::Values(DataType::kFloat32, DataType::kBfloat16,
                                                              DataType::kFloat16)),
                         [](const auto& info) {
                           return "N" + std::to_string(std::get<0>(info.param)) + "_" +
                                  data_type_name(std::get<1>(info.param));
                         });

TEST(EngineOnCuda, GivesTheSameBitsHoweverStreamsOvertakeEachOther) {
  for (const int ranks : {1, 3}) {
    for (int stage = 0; stage < 4; ++stage) {
      const ToyOptions options = cuda_options_for(stage, DataType::kBfloat16, ranks);
      const ToyResult expected = reference_toy(options);
      for (const std::uint64_t seed : {1u, 2u}) {
        fake_cuda::FakeOptions reordering = strict_gpu();
        reordering.seed = seed;
        FakeGpu gpu(reordering);
        expect_same_bits(run_toy(options, world_on(gpu)), expected,
                         std::to_string(ranks) + " ranks, stage " + std::to_string(stage) + ", seed " +
                             std::to_string(seed));
      }
    }
  }
}

// Wide and tall matrices that slices cut, and single elements.
ToyOptions options_of_matrices(Optimizer optimizer, DataType type, int ranks) {
  ToyOptions options = cuda_options_for(0, type, ranks);
  options.engine.optimizer = optimizer;
  options.units[0].parameters[0].shape = {35, 20};
  options.units[1].parameters[0].shape = {1, 64};
  options.units[2].parameters[0].shape = {20, 150};
  if (optimizer == Optimizer::kAdafactor) options.units[2].parameters[0].shape = {600, 5};  // Three bands.
  options.groups[1].beta1 = 0.8;
  options.steps = 4;
  options.disturbance = [](int rank, int step) {
    return rank == 0 && step == 2 ? std::numeric_limits<float>::infinity() : 0.0f;
  };
  return options;
}

class WholeParametersOnCuda : public ::testing::TestWithParam<Optimizer> {};

// No unit, some and all are offloaded.
TEST_P(WholeParametersOnCuda, GiveTheBitsOfThePlainLoopsAtEveryPlace) {
  struct Case {
    int ranks;
    DataType type;
    bool master_weights;
    double ema;
  };
  for (const Case& c : {Case{1, DataType::kFloat32, true, 0.0}, Case{3, DataType::kBfloat16, true, 0.75},
                        Case{4, DataType::kBfloat16, false, 0.0}, Case{3, DataType::kFloat16, true, 0.0}}) {
    ToyOptions options = options_of_matrices(GetParam(), c.type, c.ranks);
    options.engine.master_weights = c.master_weights;
    options.engine.ema = c.ema;
    options.engine.muon_matches_rms = c.ema > 0.0;
    const ToyResult expected = reference_toy(options);
    for (int stage = 0; stage < 4; ++stage) {
      for (const double fraction : {0.0, 0.5, 1.0}) {
        ToyOptions here = options;
        here.engine.stage = stage;
        here.engine.offload = fraction == 0.0 ? Offload::kNone
                              : stage == 3    ? Offload::kOptimizerAndParameters
                                              : Offload::kOptimizer;
        here.engine.offload_fraction = fraction == 0.0 ? 1.0 : fraction;
        here.engine.host_threads = 1;
        FakeGpu gpu;
        const ToyResult actual = run_toy(here, world_on(gpu));
        const std::string what = std::to_string(c.ranks) + " ranks, " + data_type_name(c.type) + ", stage " +
                                 std::to_string(stage) + ", offloaded " + std::to_string(fraction);
        expect_same_bits(actual, expected, what);
        EXPECT_EQ(actual.statistics.peak, actual.statistics.planned) << what;
        EXPECT_EQ(actual.statistics.peak_reserved_bytes, actual.statistics.planned_reserved_bytes) << what;
        EXPECT_EQ(actual.statistics.host_bytes, actual.statistics.planned_host_bytes) << what;
        EXPECT_EQ(actual.statistics.applied_steps, 3u) << what;
      }
    }
  }
}

TEST_P(WholeParametersOnCuda, GiveTheSameBitsHoweverStreamsOvertakeEachOther) {
  for (const int stage : {0, 2, 3}) {
    ToyOptions options = options_of_matrices(GetParam(), DataType::kBfloat16, 3);
    options.engine.stage = stage;
    options.engine.offload = stage == 2 ? Offload::kOptimizer : Offload::kNone;
    options.engine.offload_fraction = stage == 2 ? 0.5 : 1.0;
    options.engine.host_threads = 1;
    const ToyResult expected = reference_toy(options);
    for (const std::uint64_t seed : {1u, 2u, 3u}) {
      fake_cuda::FakeOptions reordering = strict_gpu();
      reordering.seed = seed;
      FakeGpu gpu(reordering);
      expect_same_bits(run_toy(options, world_on(gpu)), expected,
                       "stage " + std::to_string(stage) + ", seed " + std::to_string(seed));
    }
  }
}

// Saved by three ranks that offload nothing, and loaded by four that offload half.
TEST_P(WholeParametersOnCuda, ResumeWithOtherRanksAndPlaces) {
  const std::string directory = make_temporary_directory("engine-cuda");
  ToyOptions options = options_of_matrices(GetParam(), DataType::kBfloat16, 3);
  options.disturbance = [](int, int) { return 0.0f; };
  const auto run = [&](int ranks, int stage, double fraction) {
    ToyOptions here = options;
    here.ranks = ranks;
    here.engine.stage = stage;
    here.engine.offload = fraction == 0.0 ? Offload::kNone : Offload::kOptimizer;
    here.engine.offload_fraction = fraction == 0.0 ? 1.0 : fraction;
    here.engine.host_threads = 1;
    FakeGpu gpu;
    ToyResult result;
    run_ranks(ranks, world_on(gpu), [&](Rank& rank) {
      ToyTrainer trainer(here, rank);
      trainer.engine().load_state(directory);
      for (int step = 2; step < 4; ++step) static_cast<void>(trainer.step(step));
      ToyResult mine;
      trainer.collect(mine);
      if (rank.communicator->rank() == 0) result = mine;
    });
    return result;
  };
  {
    FakeGpu gpu;
    run_ranks(3, world_on(gpu), [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
      trainer.engine().save_state(directory, "two");
    });
  }
  const ToyResult whole = reference_toy(options);
  EXPECT_EQ(run(3, 3, 0.0).masters, whole.masters);
  EXPECT_EQ(run(3, 1, 0.5).masters, whole.masters);
  EXPECT_EQ(run(4, 2, 0.5).masters, run(4, 0, 0.0).masters);
  std::filesystem::remove_all(directory);
}

INSTANTIATE_TEST_SUITE_P(Toy, WholeParametersOnCuda,
                         ::testing::Values(Optimizer::kAdafactor, Optimizer::kMuon),
                         [](const auto& info) { return optimizer_name(info.param); });

// Aliases move while nothing is queued that uses them; the fake driver would notice.
TEST(EngineOnCuda, RecordedOrderGivesTheSameBits) {
  for (const int ranks : {1, 3}) {
    for (int stage = 0; stage < 4; ++stage) {
      for (const bool overlaps : {false, true}) {
        ToyOptions options = cuda_options_for(stage, DataType::kBfloat16, ranks);
        options.engine.order_of_units = OrderOfUnits::kRecorded;
        options.engine.micro_steps = 2;
        options.overlap_seed = overlaps ? 5 : 0;
        options.groups[1].beta2 = 0.99;
        options.asks_norm = true;
        options.forwards = [](int, int step, int) {
          return step < 2 ? std::vector<int>{0, 2, 1, 2, 3} : std::vector<int>{0, 1, 2, 1, 3};
        };
        const ToyResult expected = reference_toy(options);
        for (const std::uint64_t seed : {0u, 1u}) {
          fake_cuda::FakeOptions reordering = strict_gpu();
          reordering.seed = seed;
          FakeGpu gpu(reordering);
          expect_same_bits(run_toy(options, world_on(gpu)), expected,
                           std::to_string(ranks) + " ranks, stage " + std::to_string(stage) + ", seed " +
                               std::to_string(seed));
        }
      }
    }
  }
}

TEST(EngineOnCuda, UpdatesOnTheHostWithTheSameBits) {
  for (const int ranks : {1, 3}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
      for (int stage = 0; stage < 4; ++stage) {
        ToyOptions options = cuda_options_for(stage, type, ranks);
        options.engine.offload = Offload::kOptimizer;
        options.engine.host_threads = 1;
        options.engine.micro_steps = 1 + stage % 2;
        options.steps = 5;
        options.disturbance = [](int rank, int step) {
          return rank == 0 && step == 2 ? std::numeric_limits<float>::infinity() : 0.0f;
        };
        const ToyResult expected = reference_toy(options);
        for (const std::uint64_t seed : {0u, 1u, 2u}) {
          fake_cuda::FakeOptions reordering = strict_gpu();
          reordering.seed = seed;
          FakeGpu gpu(reordering);
          const ToyResult actual = run_toy(options, world_on(gpu));
          const std::string what = std::to_string(ranks) + " ranks, stage " + std::to_string(stage) +
                                   ", seed " + std::to_string(seed);
          expect_same_bits(actual, expected, what);
          EXPECT_EQ(actual.statistics.peak, actual.statistics.planned) << what;
          EXPECT_EQ(actual.statistics.peak.optimizer, 0u) << what;
        }
      }
    }
  }
}

TEST(EngineOnCuda, AllocatesNothingFromTheDriverAfterTheFirstStep) {
  for (int stage = 0; stage < 4; ++stage) {
    FakeGpu gpu;
    const ToyOptions options = cuda_options_for(stage, DataType::kBfloat16, 1);
    run_ranks(1, world_on(gpu), [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      static_cast<void>(trainer.step(0));
      const char* const calls[] = {
          "cuMemAddressReserve", "cuMemCreate",       "cuMemMap",        "cuMemUnmap",     "cuMemAlloc",
          "cuMemSetAccess",      "cuMemHostRegister", "cuMemAllocAsync", "cuStreamCreate", "cuEventCreate"};
      std::vector<std::uint64_t> before;
      for (const char* call : calls) before.push_back(gpu.controls().call_count(call));
      EXPECT_GT(before[1], 0u) << "the fake counts under another name";
      for (int step = 1; step < 4; ++step) static_cast<void>(trainer.step(step));
      for (std::size_t i = 0; i < before.size(); ++i)
        EXPECT_EQ(gpu.controls().call_count(calls[i]), before[i]) << calls[i] << " at stage " << stage;
    });
  }
}

// Goes on from the state after two steps and has the bits of a run of four.
void resume_at_two(const ToyOptions& options, Rank& rank, const std::string& directory,
                   const ToyResult& whole, const std::string& what) {
  ToyTrainer trainer(options, rank);
  EXPECT_EQ(trainer.engine().load_state(directory), "two");
  for (int step = 2; step < 4; ++step) static_cast<void>(trainer.step(step));
  ToyResult resumed;
  trainer.collect(resumed);
  resumed.grad_norms = whole.grad_norms;  // The resumed run has only half of them.
  resumed.metrics = whole.metrics;
  expect_same_bits(resumed, whole, what);
  EXPECT_EQ(trainer.engine().applied_steps(), 4u);
}

TEST(EngineOnCuda, ResumesFromSavedStateWithTheSameBits) {
  const std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("forebay-engine-cuda-" + std::to_string(::getpid()));
  for (const DataType type : {DataType::kBfloat16, DataType::kFloat16}) {
    for (int stage = 0; stage < 4; ++stage) {
      ToyOptions options = cuda_options_for(stage, type, 3);
      options.steps = 4;
      const ToyResult whole = reference_toy(options);
      FakeGpu gpu;
      run_ranks(3, world_on(gpu), [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
        trainer.engine().save_state(directory, "two");
      });
      options.engine.stage = 3 - stage;
      run_ranks(3, world_on(gpu), [&](Rank& rank) {
        resume_at_two(options, rank, directory, whole, "saved at stage " + std::to_string(stage));
      });
      std::filesystem::remove_all(directory);
    }
  }
}

// The host cannot read the device's memory in place, as it does that of offloaded states.
TEST(EngineOnCuda, ResumesFromAStateThatWasSavedInTheBackground) {
  const std::string directory = make_temporary_directory("cuda-background");
  for (const int stage : {1, 3}) {
    for (const double fraction : {0.0, 0.5, 1.0}) {
      ToyOptions options = cuda_options_for(stage, DataType::kFloat32, 3);
      options.steps = 4;
      const ToyResult whole = reference_toy(options);
      options.engine.offload = fraction > 0 ? Offload::kOptimizer : Offload::kNone;
      options.engine.offload_fraction = fraction;
      options.engine.save_async = true;
      FakeGpu gpu;
      run_ranks(3, world_on(gpu), [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
        trainer.engine().save_state_begin(directory, "two");
        static_cast<void>(trainer.step(2));
        trainer.engine().save_state_end();
      });
      run_ranks(3, world_on(gpu), [&](Rank& rank) {
        resume_at_two(options, rank, directory, whole,
                      "stage " + std::to_string(stage) + ", offloaded " + std::to_string(fraction));
      });
      std::filesystem::remove_all(directory);
    }
  }
}

}  // namespace
}  // namespace forebay::testing
