// Recorded order: programs that lease units in any order get the bits of plain loops, at every stage, and the
// slots that the plan says.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <future>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "forebay/stream_call.h"
#include "tests/engine/toy_cases.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

ToyOptions recorded_options(int stage, DataType type, int ranks) {
  ToyOptions options = options_for(stage, type, ranks);
  options.engine.order_of_units = OrderOfUnits::kRecorded;
  options.engine.micro_steps = 2;
  return options;
}

// Obstacles to a plain schedule. Each runs on awkward_units(), whose head ties the embedding.
struct Program {
  const char* name;
  void (*apply)(ToyOptions& options);
};

std::vector<int> reversed(std::vector<int> order) {
  std::reverse(order.begin(), order.end());
  return order;
}

constexpr Program kPrograms[] = {
    {"a chain with a tied head", [](ToyOptions&) {}},
    {"another order than that of registration",
     [](ToyOptions& o) {
       o.forwards = [](int, int, int) { return std::vector<int>{0, 3, 1, 2, 4}; };
       o.engine.micro_steps = 1;
     }},
    {"a block used three times",
     [](ToyOptions& o) { o.forwards = [](int, int, int) { return std::vector<int>{0, 1, 2, 1, 3, 1, 4}; }; }},
    {"two forward passes before a backward pass",
     [](ToyOptions& o) {
       o.forwards = [](int, int, int) { return std::vector<int>{0, 1, 2, 3, 4, 0, 1, 2, 3, 4}; };
       o.backwards = [](int, int, int) { return std::vector<int>{4, 4, 3, 3, 2, 2, 1, 1, 0, 0}; };
     }},
    {"two forward leases and one backward lease",
     [](ToyOptions& o) {
       o.forwards = [](int, int, int) { return std::vector<int>{0, 1, 2, 3, 4, 0, 1, 2, 3, 4}; };
       o.backwards = [](int, int, int) { return std::vector<int>{4, 3, 2, 1, 0}; };
     }},
    {"a unit that one rank leaves out",
     [](ToyOptions& o) {
       const int last = o.ranks - 1;
       o.skips = [last](int rank, int, int k, int unit) { return rank == last && k == 0 && unit == 2; };
     }},
    {"the owner of a tied parameter, left out on one rank",
     [](ToyOptions& o) {
       const int last = o.ranks - 1;
       o.skips = [last](int rank, int step, int k, int unit) {
         return rank == last && (step > 0 || k == 1) && unit == 0;
       };
     }},
    {"the first uses of a block, left out on one rank",
     [](ToyOptions& o) {
       const int last = o.ranks - 1;
       o.forwards = [last](int rank, int step, int) {
         return step > 0 && rank == last ? std::vector<int>{2, 3, 1, 4}
                                         : std::vector<int>{0, 1, 2, 1, 3, 1, 4};
       };
     }},
    {"a unit that no rank uses, and one without a backward pass",
     [](ToyOptions& o) {
       o.forwards = [](int, int, int) { return std::vector<int>{0, 1, 3, 4}; };
       o.backwards = [](int, int, int) { return std::vector<int>{4, 1, 0}; };
     }},
    {"a forward pass without a backward pass behind one that has one",
     [](ToyOptions& o) {
       const int last = o.ranks - 1;
       o.asks_norm = true;
       o.backwards = [last](int rank, int step, int k) {
         const bool none = k == 1 && (step > 1 || (step == 1 && rank == last));
         return none ? std::vector<int>() : std::vector<int>{4, 3, 2, 1, 0};
       };
     }},
    {"evaluations",
     [](ToyOptions& o) {
       o.evaluates = [](int, int step, int k) {
         return step == 0 ? std::vector<int>()
                : k == 1  ? std::vector<int>{4, 2, 2, 0}
                          : std::vector<int>{0, 1, 2};
       };
     }},
    {"fewer micro-steps than planned",
     [](ToyOptions& o) {
       o.engine.micro_steps = 3;
       o.micro_steps = [](int step) { return 1 + step % 3; };
     }},
    {"another order from step 2 on",
     [](ToyOptions& o) {
       o.steps = 5;
       o.forwards = [](int, int step, int) {
         return step < 2 ? std::vector<int>{0, 1, 2, 3, 4} : std::vector<int>{0, 2, 1, 3, 1, 4};
       };
     }},
    {"leases that overlap", [](ToyOptions& o) { o.overlap_seed = 7; }},
    {"leases of blocks used again that overlap",
     [](ToyOptions& o) {
       o.overlap_seed = 11;
       o.forwards = [](int, int, int) { return std::vector<int>{0, 1, 2, 3, 1, 2, 3, 4}; };
     }},
    {"average over ranks, betas by parameter group, a gradient factor",
     [](ToyOptions& o) {
       o.engine.average = Average::kRanks;
       o.groups[1].beta1 = 0.8;
       o.groups[1].beta2 = 0.99;
       o.groups[0].epsilon = 1e-6;
       o.gradient_factor = [](int step) { return step == 1 ? 0.3 : 1.0; };
     }},
    {"the norm before the step", [](ToyOptions& o) { o.asks_norm = true; }},
    {"an abandoned step on one rank",
     [](ToyOptions& o) {
       o.asks_norm = true;
       o.abandons = [](int rank, int step) { return step == 2 && rank == 0; };
     }},
    {"an abandoned step on all ranks",
     [](ToyOptions& o) { o.abandons = [](int, int step) { return step == 1; }; }},
    {"all ranks abandon the first steps",
     [](ToyOptions& o) { o.abandons = [](int, int step) { return step < 2; }; }},
};

void check(const Program& program, ToyOptions options) {
  program.apply(options);
  const std::string what = std::string(program.name) + ", stage " + std::to_string(options.engine.stage) +
                           ", " + std::to_string(options.ranks) + " ranks, " +
                           data_type_name(options.engine.dtype) + ", " + offload_name(options.engine.offload);
  SCOPED_TRACE(what);
  const ToyResult first = run_toy(options);
  expect_same(first, reference_toy(options), what);
  if (::testing::Test::HasFatalFailure()) return;
  // A second run with the order of the first: the plan is exact.
  options.engine.recorded_order = first.order;
  const ToyResult second = run_toy(options);
  expect_same(second, first, what + ", with the order given");
  EXPECT_EQ(second.statistics.peak, second.statistics.planned);
  EXPECT_EQ(first.statistics.planned.gathered, second.statistics.planned.gathered);
}

class FreeOrder : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, FreeOrder, ::testing::Range(0, 4));

TEST_P(FreeOrder, ProgramsHaveTheBitsOfPlainLoops) {
  for (const Program& program : kPrograms) {
    for (const int ranks : {1, 3, 4}) {
      ToyOptions options = recorded_options(GetParam(), DataType::kFloat32, ranks);
      options.engine.overlap = ranks != 4;
      if (ranks == 4) options.engine.group = 2;
      check(program, options);
      if (HasFatalFailure()) return;
    }
    for (const DataType type : {DataType::kBfloat16, DataType::kFloat16}) {
      check(program, recorded_options(GetParam(), type, type == DataType::kFloat16 ? 2 : 3));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(FreeOrder, ProgramsHaveTheBitsOfPlainLoopsWithOffload) {
  for (const Program& program : kPrograms) {
    for (const Offload offload : {Offload::kOptimizer, Offload::kOptimizerAndParameters}) {
      if (offload == Offload::kOptimizerAndParameters && GetParam() < 3) continue;
      for (const int ranks : {1, 3}) {
        ToyOptions options =
            recorded_options(GetParam(), ranks == 1 ? DataType::kFloat32 : DataType::kBfloat16, ranks);
        options.engine.offload = offload;
        check(program, options);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(FreeOrder, LocalAccumulationGoesOn) {
  if (GetParam() >= 2) return;
  for (const Program& program : kPrograms) {
    ToyOptions options = recorded_options(GetParam(), DataType::kFloat32, 3);
    options.engine.accumulate = Accumulate::kLocal;
    check(program, options);
    if (HasFatalFailure()) return;
  }
}

TEST_P(FreeOrder, PlannedSpareSlotsAreThere) {
  ToyOptions options = recorded_options(GetParam(), DataType::kFloat32, 2);
  options.engine.units_at_once = 3;
  const ToyResult result = run_toy(options);
  expect_same(result, reference_toy(options), "three units at once");
}

// Random programs: units in any order and number, leases that overlap, steps of any length, evaluations.
TEST_P(FreeOrder, RandomProgramsHaveTheBitsOfPlainLoops) {
  const std::uint64_t first_seed = std::random_device()();
  for (std::uint64_t seed = first_seed; seed < first_seed + 12; ++seed) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    const int ranks = 1 + static_cast<int>(seed % 3);
    ToyOptions options = recorded_options(GetParam(), DataType::kFloat32, ranks);
    options.engine.micro_steps = 3;
    if (GetParam() < 2 && seed % 2 == 0) options.engine.accumulate = Accumulate::kLocal;
    options.steps = 5;
    options.overlap_seed = seed | 1;
    options.micro_steps = [seed](int step) {
      return 1 + static_cast<int>(mix(seed + 91 * static_cast<std::uint64_t>(step)) % 3);
    };
    // The order changes every other step.
    options.forwards = [seed](int, int step, int k) {
      std::mt19937_64 random(seed * 1000 + static_cast<std::uint64_t>(step / 2 * 10 + k));
      std::vector<int> order;
      for (std::uint64_t i = 0, count = 2 + random() % 9; i < count; ++i)
        order.push_back(static_cast<int>(random() % 5));
      return order;
    };
    options.backwards = [forwards = options.forwards](int rank, int step, int k) {
      return reversed(forwards(rank, step, k));
    };
    options.evaluates = [seed](int, int step, int k) {
      std::mt19937_64 random(seed * 77 + static_cast<std::uint64_t>(step * 10 + k));
      std::vector<int> order;
      for (std::uint64_t i = 0, count = random() % 4; i < count; ++i)
        order.push_back(static_cast<int>(random() % 5));
      return order;
    };
    const ToyResult actual = run_toy(options);
    expect_same(actual, reference_toy(options), "seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
  }
}

// From the second step on each rank but rank 0 leaves out uses of its own.
TEST_P(FreeOrder, RandomUsesLeftOutHaveTheBitsOfPlainLoops) {
  const std::uint64_t first_seed = std::random_device()();
  for (std::uint64_t seed = first_seed; seed < first_seed + 12; ++seed) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    ToyOptions options = recorded_options(GetParam(), DataType::kFloat32, 3 + static_cast<int>(seed % 2));
    options.forwards = [seed](int rank, int step, int k) {
      std::mt19937_64 random(seed * 1000 + static_cast<std::uint64_t>(k));
      std::mt19937_64 left_out(seed * 1000 + static_cast<std::uint64_t>(rank * 100 + step * 10 + k));
      std::vector<int> order;
      for (std::uint64_t i = 0, count = 4 + random() % 7; i < count; ++i) {
        const int unit = static_cast<int>(random() % 5);
        if (rank == 0 || step == 0 || left_out() % 4 != 0) order.push_back(unit);
      }
      return order;
    };
    const ToyResult actual = run_toy(options);
    expect_same(actual, reference_toy(options), "seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
  }
}

// Strict and recorded order agree wherever both can run: steps, norms, and the gathers after the first step.
TEST_P(FreeOrder, AgreesWithStrictOrder) {
  for (const int ranks : {1, 3}) {
    ToyOptions options = recorded_options(GetParam(), DataType::kBfloat16, ranks);
    options.asks_norm = true;
    options.groups[0].beta1 = 0.5;
    options.gradient_factor = [](int step) { return step == 2 ? 0.25 : 1.0; };
    const ToyResult recorded = run_toy(options);
    options.engine.order_of_units = OrderOfUnits::kStrict;
    const ToyResult strict = run_toy(options);
    expect_same(recorded, strict, "recorded order beside strict order");
    expect_same(strict, reference_toy(options), "strict order");
    EXPECT_EQ(recorded.digest, strict.digest);
    EXPECT_EQ(recorded.order.find('+'), std::string::npos) << "micro-steps that are alike are told once";
    EXPECT_EQ(recorded.statistics.planned, strict.statistics.planned);
    EXPECT_EQ(recorded.statistics.peak, strict.statistics.peak);
    EXPECT_EQ(recorded.statistics.traffic.sent, strict.statistics.traffic.sent);
  }
}

TEST(FreeOrderFiles, ProgramsHaveTheBitsOfPlainLoops) {
  for (const Program& program : kPrograms) {
    ToyOptions options = recorded_options(3, DataType::kBfloat16, 3);
    options.engine.offload = Offload::kOptimizerAndParameters;
    options.engine.tier = Tier::kFile;
    options.engine.offload_directories = {::testing::TempDir()};
    options.engine.staging_bytes = 8u << 20;
    check(program, options);
    if (HasFatalFailure()) return;
  }
}

// In the last step, between two micro-steps.
TEST_P(FreeOrder, AStateSavedWithinAStepIsThatOfTheStepBefore) {
  for (const Offload offload : {Offload::kNone, Offload::kOptimizer, Offload::kOptimizerAndParameters}) {
    if (offload == Offload::kOptimizerAndParameters && GetParam() < 3) continue;
    for (const bool in_background : {false, true}) {
      SCOPED_TRACE(std::string(offload_name(offload)) +
                   (in_background ? ", in the background" : ", at once"));
      const TemporaryDirectory directory;
      ToyOptions options = recorded_options(GetParam(), DataType::kBfloat16, 3);
      options.engine.offload = offload;
      options.engine.save_async = in_background;
      options.evaluates = [](int, int, int k) {
        return k == 1 ? std::vector<int>{0, 2} : std::vector<int>();
      };
      ToyOptions shorter = options;
      --shorter.steps;
      const ToyResult before = run_toy(shorter);
      const ToyResult undisturbed = run_toy(options);
      options.between_micro_steps = [&](Engine& engine, int step, int) {
        if (step != options.steps - 1) return;
        if (in_background) {
          engine.save_state_begin(directory.path(), "cursor");
          engine.save_state_end();
          engine.save_state_begin(directory.path(), "cursor");
        } else {
          engine.save_state(directory.path(), "cursor");
        }
      };
      expect_same(run_toy(options), undisturbed, "a state is saved within the last step");
      run_ranks(options.ranks, {}, [&](Rank& rank) {
        ToyTrainer trainer(shorter, rank);
        EXPECT_EQ(trainer.engine().load_state(directory.path()), "cursor");
        EXPECT_EQ(trainer.engine().attempted_steps(), static_cast<std::uint64_t>(shorter.steps));
        EXPECT_EQ(trainer.engine().digest(), before.digest);
        // The moments, too: the step that was open is made anew.
        trainer.step(shorter.steps);
        EXPECT_EQ(trainer.engine().digest(), undisturbed.digest);
      });
      if (HasFailure()) return;
    }
  }
}

std::string error_of(ToyOptions options, const WorldOptions& world = {}) {
  try {
    static_cast<void>(run_toy(options, world));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_P(FreeOrder, RanksThatDifferAreNamedWithTheUsualCause) {
  WorldOptions world;
  ToyOptions options = recorded_options(GetParam(), DataType::kFloat32, 3);
  options.forwards = [](int rank, int step, int) {
    return rank == 1 && step == 2 ? std::vector<int>{0, 1, 3, 2, 4} : std::vector<int>{0, 1, 2, 3, 4};
  };
  options.backwards = [](int, int, int) { return std::vector<int>{4, 3, 2, 1, 0}; };
  std::string message = error_of(options);
  EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
  EXPECT_NE(message.find("uneven numbers of forward passes"), std::string::npos) << message;
  // One forward pass more.
  options.forwards = [](int rank, int step, int) {
    return rank == 1 && step == 2 ? std::vector<int>{0, 1, 2, 3, 4, 3, 4} : std::vector<int>{0, 1, 2, 3, 4};
  };
  options.backwards = {};
  message = error_of(options);
  EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
  EXPECT_NE(message.find("uneven numbers of forward passes"), std::string::npos) << message;
}

TEST_P(FreeOrder, ARankThatAloneAsksForTheNormIsNamed) {
  for (const int ranks : {2, 3}) {
    for (const int alone : {0, ranks - 1}) {
      const ToyOptions options = recorded_options(GetParam(), DataType::kFloat32, ranks);
      std::atomic<int> told{0};
      run_ranks(ranks, {}, [&](Rank& rank) {
        const bool asks = rank.communicator->rank() == alone;
        ToyOptions mine = options;
        mine.asks_norm = asks;
        ToyTrainer trainer(mine, rank);
        trainer.initialize();
        try {
          static_cast<void>(trainer.step(0));
        } catch (const Error& error) {
          const std::string expected = "rank " + std::to_string(alone) + " called gradient_norm() and rank " +
                                       (alone == 0 ? "1" : "0") + " step() for step 1";
          EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
          EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
          ++told;
        }
      });
      EXPECT_EQ(told, ranks);
    }
  }
}

// A unit leased over the whole pass, as the root of a model.
TEST(FreeOrderSlots, AUnitLeasedOverAPassHasASlotOfItsOwn) {
  run_ranks(1, {}, [](Rank& rank) {
    EngineOptions options;
    options.stage = 3;
    options.order_of_units = OrderOfUnits::kRecorded;
    options.optional_gradients = true;
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
    std::vector<UnitId> units;
    for (int u = 0; u < 6; ++u) {
      units.push_back(engine.add_unit("u" + std::to_string(u)));
      engine.add_parameter(units.back(), "p" + std::to_string(u), 2048);
    }
    engine.commit();
    const DevicePtr address = engine.address({4, 0});
    const Stream stream = value_or_throw(rank.backend->stream_create());
    std::uint64_t gathered[3] = {};
    for (int step = 0; step < 3; ++step) {
      engine.step_begin();
      engine.micro_step_begin(0);
      {
        const Lease root = engine.forward(0, stream);
        for (int u = 1; u < 6; ++u) {
          const Lease block = engine.forward(units[static_cast<std::size_t>(u)], stream);
          const Lease again = engine.forward(units[static_cast<std::size_t>(u)], stream);
          EXPECT_EQ(block.parameter(0), engine.address({u, 0}));
          EXPECT_EQ(again.parameter(0), block.parameter(0));
        }
      }
      for (int u = 5; u >= 0; --u)
        static_cast<void>(engine.backward(units[static_cast<std::size_t>(u)], stream));
      static_cast<void>(engine.step({.groups = {{}}}));
      gathered[step] = engine.statistics().gather_count;
      EXPECT_EQ(engine.address({4, 0}), address);
    }
    // Two in turn, and the root; gradients wait for the end of the micro-step, because of the second forward
    // lease.
    EXPECT_EQ(engine.plan().bytes.gathered, (3 + 6) * 2048 * sizeof(float));
    EXPECT_EQ(gathered[2] - gathered[1],
              6u + 3u);  // The root and the last two blocks stay for the backward pass.
    PlanOptions planned = engine.plan().options;
    EXPECT_EQ(value_or_throw(make_plan(engine.model(), planned)).bytes, engine.plan().bytes);
    planned.recorded_order.clear();
    planned.units_at_once = 3;
    EXPECT_EQ(value_or_throw(make_plan(engine.model(), planned)).bytes.gathered,
              (4 + 4) * 2048 * sizeof(float));
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

// A promise that a stream keeps and another waits for, though not for ever.
struct Kept {
  std::promise<void> promise;
  static void keep(void* kept) { static_cast<Kept*>(kept)->promise.set_value(); }
  static void await(void* kept) {
    static_cast<void>(
        static_cast<Kept*>(kept)->promise.get_future().wait_for(std::chrono::milliseconds(200)));
  }
};

constexpr std::size_t kUnitElements = 2048;

// Four units of one parameter each, whose elements are 1 to 4, and two streams.
struct FourUnits {
  explicit FourUnits(Rank& rank)
      : engine(*rank.backend, *rank.kernels, *rank.communicator, stage3()),
        slow(value_or_throw(rank.backend->stream_create())),
        fast(value_or_throw(rank.backend->stream_create())) {
    for (int u = 0; u < 4; ++u)
      engine.add_parameter(engine.add_unit("u" + std::to_string(u)), "p" + std::to_string(u), kUnitElements);
    engine.commit();
    for (int u = 0; u < 4; ++u)
      engine.set_parameter({u, 0}, std::vector<float>(kUnitElements, static_cast<float>(u + 1)));
  }
  static EngineOptions stage3() {
    EngineOptions options;
    options.stage = 3;
    options.order_of_units = OrderOfUnits::kRecorded;
    options.optional_gradients = true;
    return options;
  }

  Engine engine;
  const Stream slow, fast;
};

TEST(FreeOrderSlots, ASlotIsFreeWhenTheWorkOnEveryStreamOfItsUnitHasEnded) {
  run_ranks(2, {}, [](Rank& rank) {
    FourUnits four(rank);
    auto& [engine, slow, fast] = four;
    Kept gathered;
    std::vector<float> read(kUnitElements, -1.0f);
    engine.step_begin();
    engine.micro_step_begin(0);

    {
      const Lease lease = engine.forward(0, slow);
      throw_if_error(rank.backend->call_host(slow, &Kept::await, &gathered));
      throw_if_error(
          rank.backend->copy_async(read.data(), lease.parameter(0), kUnitElements * sizeof(float), slow));
    }
    for (int u = 0; u < 4; ++u) static_cast<void>(engine.forward(u, fast));
    throw_if_error(rank.backend->call_host(fast, &Kept::keep, &gathered));
    for (int u = 3; u >= 0; --u) static_cast<void>(engine.backward(u, fast));
    static_cast<void>(engine.step({.groups = {{}}}));

    for (const Stream stream : {slow, fast}) throw_if_error(rank.backend->stream_synchronize(stream));
    EXPECT_EQ(read, std::vector<float>(kUnitElements, 1.0f));
    for (const Stream stream : {slow, fast}) throw_if_error(rank.backend->stream_destroy(stream));
  });
}

// On the virtual clock the first of two backward passes of a unit is late, and the second adds to its
// gradient.
TEST(FreeOrderGradients, AreAddedToOnASecondStreamWhenTheFirstHasWritten) {
  for (const int stage : {0, 3}) {
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    run_ranks(1, world, [&](Rank& rank) {
      EngineOptions options = FourUnits::stage3();
      options.stage = stage;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      const UnitId unit = engine.add_unit("u");
      const ParameterId weight = engine.add_parameter(unit, "p", 1);
      engine.commit();
      const Stream late = value_or_throw(rank.backend->stream_create());
      const Stream early = value_or_throw(rank.backend->stream_create());
      engine.step_begin();
      engine.micro_step_begin(0);
      for (const Stream stream : {late, early}) static_cast<void>(engine.forward(unit, stream));
      throw_if_error(call_on(*rank.backend, late, [&clock] { clock.sleep(std::chrono::seconds(1)); }));
      for (const Stream stream : {late, early}) {
        Lease lease = engine.backward(unit, stream);
        const Gradient gradient = lease.gradient(weight);
        EXPECT_EQ(gradient.mode, stream == late ? GradientMode::kWrite : GradientMode::kAdd);
        throw_if_error(call_on(*rank.backend, stream, [gradient] {
          float& value = gradient.as<float>()[0];
          value = gradient.mode == GradientMode::kAdd ? value + 2.0f : 1.0f;
        }));
      }
      EXPECT_EQ(engine.step({.groups = {{}}}).grad_norm, 3.0) << "stage " << stage;
      for (const Stream stream : {late, early}) throw_if_error(rank.backend->stream_destroy(stream));
    });
  }
}

// Rank 1 keeps the gather into the planned slot from its end until rank 0 has read, so that a read of the
// moved alias would find the values of unit 0.
TEST(FreeOrderSlots, AUnitLeavesItsSpareSlotWhenTheWorkOnItHasEnded) {
  std::promise<void> has_read;
  run_ranks(2, {}, [&](Rank& rank) {
    FourUnits four(rank);
    auto& [engine, slow, fast] = four;
    Kept moved;
    std::vector<float> read(kUnitElements, -1.0f);
    engine.step_begin();
    engine.micro_step_begin(0);

    {
      // Units 0 and 2 have one planned slot.
      const Lease holder = engine.forward(0, fast);
      const Lease lease = engine.forward(2, slow);
      if (rank.communicator->rank() == 0) throw_if_error(rank.backend->call_host(slow, &Kept::await, &moved));
      throw_if_error(
          rank.backend->copy_async(read.data(), lease.parameter(0), kUnitElements * sizeof(float), slow));
    }
    static_cast<void>(engine.forward(0, fast));
    if (rank.communicator->rank() == 1) has_read.get_future().wait();
    static_cast<void>(engine.forward(2, fast));
    Kept::keep(&moved);
    throw_if_error(rank.backend->stream_synchronize(slow));
    if (rank.communicator->rank() == 0) has_read.set_value();
    EXPECT_EQ(read, std::vector<float>(kUnitElements, 3.0f));

    for (int u = 3; u >= 0; --u) static_cast<void>(engine.backward(u, fast));
    static_cast<void>(engine.step({.groups = {{}}}));
    for (const Stream stream : {slow, fast}) {
      throw_if_error(rank.backend->stream_synchronize(stream));
      throw_if_error(rank.backend->stream_destroy(stream));
    }
  });
}

// Units 0 and 2 have one planned slot. Unit 2 is leased in a spare one, and unit 0 takes the planned one, so
// that unit 2 is gathered again ahead of its backward pass. Rank 1 keeps that gather from its end until rank
// 0 has read the half that comes from rank 1.
TEST(FreeOrderSlots, AUnitStaysInItsSpareSlotWhileItIsLeased) {
  std::promise<void> has_read;
  run_ranks(2, {}, [&](Rank& rank) {
    FourUnits four(rank);
    auto& [engine, slow, fast] = four;
    const auto read = [&, &stream = slow](const Lease& lease) {
      std::vector<float> half(kUnitElements / 2, -1.0f);
      throw_if_error(rank.backend->copy_async(half.data(), lease.parameter(0) + half.size() * sizeof(float),
                                              half.size() * sizeof(float), stream));
      throw_if_error(rank.backend->stream_synchronize(stream));
      return half;
    };
    const auto end_step = [&, &stream = fast](int last) {
      for (int u = last; u >= 0; --u) static_cast<void>(engine.backward(u, stream));
      static_cast<void>(engine.step({.groups = {{}}}));
    };
    engine.step_begin();
    engine.micro_step_begin(0);
    for (int u = 0; u < 4; ++u) static_cast<void>(engine.forward(u, fast));
    end_step(3);

    engine.step_begin();
    engine.micro_step_begin(0);
    {
      std::optional<Lease> holder = engine.forward(0, fast);
      const Lease lease = engine.forward(2, slow);
      holder.reset();
      static_cast<void>(engine.forward(0, fast));
      static_cast<void>(engine.forward(3, fast));
      const std::vector<float> values = read(lease);
      if (rank.communicator->rank() == 1) has_read.get_future().wait();
      static_cast<void>(engine.backward(3, fast));
      if (rank.communicator->rank() == 0) {
        EXPECT_EQ(read(lease), values);
        has_read.set_value();
      }
    }
    end_step(2);
    for (const Stream stream : {slow, fast}) {
      throw_if_error(rank.backend->stream_synchronize(stream));
      throw_if_error(rank.backend->stream_destroy(stream));
    }
  });
}

TEST(FreeOrderSlots, NamesTheUnitsThatTheBudgetHasNoRoomFor) {
  run_ranks(1, {}, [](Rank& rank) {
    EngineOptions options;
    options.stage = 3;
    options.order_of_units = OrderOfUnits::kRecorded;
    const auto describe = [](Engine& engine) {
      for (int u = 0; u < 6; ++u) {
        const UnitId unit = engine.add_unit("u" + std::to_string(u));
        engine.add_parameter(unit, "p" + std::to_string(u), 64 << 10);
      }
    };
    {
      Engine planner(*rank.backend, *rank.kernels, *rank.communicator, options);
      describe(planner);
      options.memory_bytes = planner.plan().reserved_bytes;
    }
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
    describe(engine);
    engine.commit();
    const Stream stream = value_or_throw(rank.backend->stream_create());
    engine.step_begin();
    engine.micro_step_begin(0);
    {
      const Lease first = engine.forward(0, stream);
      const Lease second = engine.forward(1, stream);
      try {
        static_cast<void>(engine.forward(2, stream));
        ADD_FAILURE() << "there was room";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::kOutOfMemory);
        const std::string message = error.what();
        EXPECT_NE(message.find("the parameters of unit u2 need"), std::string::npos) << message;
        EXPECT_NE(message.find("u0, u1"), std::string::npos) << message;
        EXPECT_NE(message.find("EngineOptions::memory_bytes"), std::string::npos) << message;
      }
    }
    throw_if_error(rank.backend->stream_synchronize(stream));
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

// Evaluations before the step are over on all ranks.
TEST(FreeOrderCalls, AllRanksMayAbandonBeforeAnOrderIsKnown) {
  ToyOptions options = recorded_options(2, DataType::kFloat32, 2);
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    trainer.engine().step_begin();
    trainer.engine().abandon();
    trainer.evaluate_all();
    trainer.engine().step_begin();
    trainer.engine().abandon();
    EXPECT_EQ(trainer.engine().attempted_steps(), 0u);
  });
}

TEST(FreeOrderCalls, TheNormOfAnAbandonedStepIsForgotten) {
  const auto digest = [](bool asks) {
    const ToyOptions options = recorded_options(0, DataType::kFloat32, 1);
    std::string result;
    run_ranks(1, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      static_cast<void>(trainer.step(0));
      trainer.engine().step_begin();
      trainer.run_recorded_passes(1);
      if (asks) static_cast<void>(trainer.engine().gradient_norm());
      trainer.engine().abandon();
      static_cast<void>(trainer.step(2));
      result = trainer.engine().digest();
    });
    return result;
  };
  EXPECT_EQ(digest(true), digest(false));
}

// A rank cannot follow an order that it does not know.
TEST(FreeOrderCalls, ARankAloneCannotAbandonBeforeAnOrderIsKnown) {
  WorldOptions world;
  world.local.deadline = std::chrono::seconds(1);
  for (const int ranks : {2, 3, 4}) {
    for (const int alone : {0, ranks - 1}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, rank " + std::to_string(alone) + " alone");
      ToyOptions options = recorded_options(2, DataType::kFloat32, ranks);
      options.abandons = [alone](int rank, int step) { return step == 0 && rank == alone; };
      const auto began = std::chrono::steady_clock::now();
      const std::string message = error_of(options, world);
      EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
      for (int rank = 0; rank < ranks; ++rank) {
        const std::string place =
            "rank " + std::to_string(rank) + (rank == alone ? " in exchange" : " in reduce_scatter");
        EXPECT_NE(message.find(place), std::string::npos) << place << " is not in: " << message;
      }
    }
  }
}

TEST(FreeOrderCalls, OutOfTurnChangeNothing) {
  run_ranks(1, {}, [](Rank& rank) {
    EngineOptions options;
    options.order_of_units = OrderOfUnits::kRecorded;
    options.optional_gradients = true;
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
    engine.add_parameter(engine.add_unit("u"), "p", 100);
    EXPECT_THROW(static_cast<void>(engine.address({0, 0})), Error);
    engine.commit();
    EXPECT_EQ(engine.recorded_order(), "");
    const Stream stream = value_or_throw(rank.backend->stream_create());
    const auto refused = [](const char* part, auto call) {
      try {
        call();
        ADD_FAILURE() << "not refused: " << part;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      }
    };
    refused("address()", [&] { static_cast<void>(engine.address({0, 1})); });
    refused("evaluation_end()", [&] { engine.evaluation_end(); });
    refused("abandon()", [&] { engine.abandon(); });
    refused("gradient_norm()", [&] { static_cast<void>(engine.gradient_norm()); });
    engine.evaluation_begin();
    refused("evaluation_begin()", [&] { engine.evaluation_begin(); });
    refused("backward()", [&] { static_cast<void>(engine.backward(0, stream)); });
    refused("step_begin()", [&] { engine.step_begin(); });
    static_cast<void>(engine.forward(0, stream));
    engine.evaluation_end();
    engine.step_begin();
    refused("step()", [&] { static_cast<void>(engine.step({.groups = {{}}})); });
    engine.micro_step_begin(0);
    refused("abandon(2) after 1 micro-steps", [&] { engine.abandon(2); });
    refused("abandon(-1) after 1 micro-steps", [&] { engine.abandon(-1); });
    for (const UnitId missing : {-1, 1}) {
      refused("was not added", [&] { static_cast<void>(engine.forward(missing, stream)); });
      refused("was not added", [&] { static_cast<void>(engine.backward(missing, stream)); });
      refused("was not added", [&] { engine.skip(missing); });
    }
    {
      const Lease lease = engine.forward(0, stream);
      refused("alive", [&] { static_cast<void>(engine.step({.groups = {{}}})); });
      refused("alive", [&] { engine.micro_step_begin(1); });
      refused("alive", [&] { engine.evaluation_begin(); });
      refused("alive", [&] { engine.save_state(::testing::TempDir(), ""); });
    }
    static_cast<void>(engine.backward(0, stream));
    refused("was complete", [&] { static_cast<void>(engine.backward(0, stream)); });
    refused("the next of 1 micro-steps is 1", [&] { engine.micro_step_begin(1); });
    refused("clip", [&] { static_cast<void>(engine.step({.groups = {{}}, .clip = -1.0})); });
    refused("beta2", [&] { static_cast<void>(engine.step({.groups = {{.beta2 = 1.0}}})); });
    refused("gradient_factor",
            [&] { static_cast<void>(engine.step({.groups = {{}}, .gradient_factor = -1.0})); });
    EXPECT_EQ(engine.gradient_norm(), 0.0);
    refused("gradient_norm()", [&] { engine.micro_step_begin(0); });
    EXPECT_EQ(engine.step({.groups = {{}}}).grad_norm, 0.0);
    EXPECT_EQ(engine.applied_steps(), 1u);
    EXPECT_NE(engine.recorded_order(), "");
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

TEST(FreeOrderCalls, StrictOrderCannotAbandonAStep) {
  run_ranks(1, {}, [](Rank& rank) {
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, {});
    engine.add_parameter(engine.add_unit("u"), "p", 100);
    engine.commit();
    EXPECT_THROW(engine.abandon(), Error);
    EXPECT_EQ(engine.recorded_order(), "");
  });
}

}  // namespace
}  // namespace forebay::testing
