// A trainer sees and changes reduced gradients, reads moments, freezes parameters, and learns where a
// gradient is not finite.

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "forebay/conversions.h"
#include "forebay/stream_call.h"
#include "tests/engine/toy_cases.h"
#include "tests/offload/memory_store.h"
#include "tests/support/fake_gpu.h"

namespace forebay::testing {
namespace {

struct Setting {
  int stage;
  Offload offload;
  Tier tier;
};
constexpr Setting kSettings[] = {{0, Offload::kNone, Tier::kPinned},
                                 {1, Offload::kNone, Tier::kPinned},
                                 {2, Offload::kNone, Tier::kPinned},
                                 {3, Offload::kNone, Tier::kPinned},
                                 {0, Offload::kOptimizer, Tier::kPinned},
                                 {2, Offload::kOptimizer, Tier::kPinned},
                                 {3, Offload::kOptimizerAndParameters, Tier::kFile}};

void apply(const Setting& setting, EngineOptions& engine, internal::EngineHooks& hooks) {
  engine.stage = setting.stage;
  engine.offload = setting.offload;
  engine.tier = setting.tier;
  engine.staging_bytes = 8u << 20;
  engine.host_threads = 1;
  hooks.make_store = [](int rank) {
    return make_memory_store({.alignment_bytes = 4096, .order_seed = static_cast<std::uint64_t>(rank) + 1});
  };
}

std::string text_of(const Setting& setting) {
  return "stage " + std::to_string(setting.stage) + ", offload " + offload_name(setting.offload) + " on " +
         tier_name(setting.tier);
}

void halve(const ReducedGradient& gradient) {
  for (std::uint64_t i = 0; i < gradient.count; ++i) {
    if (gradient.type == DataType::kFloat32) {
      static_cast<float*>(gradient.data)[i] *= 0.5f;
    } else {
      auto& bits = static_cast<std::uint16_t*>(gradient.data)[i];
      bits = float_to_bfloat16(0.5f * bfloat16_to_float(bits));
    }
  }
}

// Half of a gradient is exact, so a hook that halves gradients has the effect of a gradient_factor of a half.
TEST(ReducedGradients, MayBeScaledBeforeTheirNorm) {
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
    for (const int micro_steps : {1, 2}) {
      for (const Setting& setting : kSettings) {
        for (const int ranks : {1, 3}) {
          ToyOptions options = options_for(0, type, ranks);
          options.engine.micro_steps = micro_steps;
          apply(setting, options.engine, options.hooks);
          ToyOptions halved = options;
          options.gradient_factor = [](int) { return 0.5; };
          const ToyResult expected = run_toy(options);
          ToyResult actual;
          run_ranks(ranks, {}, [&](Rank& rank) {
            ToyOptions mine = halved;
            std::vector<std::uint64_t> seen(mine.units.size(), 0);
            mine.engine.on_reduced_gradient = [&](const ReducedGradient& gradient) {
              seen[static_cast<std::size_t>(gradient.unit)] += gradient.count;
              if (gradient.stream.handle == nullptr) return halve(gradient);
              throw_if_error(call_on(*rank.backend, gradient.stream, [gradient] { halve(gradient); }));
            };
            ToyTrainer trainer(mine, rank);
            trainer.initialize();
            ToyResult result;
            for (int step = 0; step < mine.steps; ++step) {
              const StepResult outcome = trainer.step(step);
              result.grad_norms.push_back(outcome.grad_norm.value_or(std::nan("")));
              result.metrics.push_back(outcome.metric_sum);
            }
            trainer.collect(result);
            const Plan plan = trainer.engine().plan();
            for (std::size_t u = 0; u < seen.size(); ++u)
              EXPECT_EQ(seen[u], 4 * plan.slice_count(static_cast<int>(u)));
            if (rank.communicator->rank() == 0) actual = result;
          });
          expect_same(actual, expected,
                      text_of(setting) + ", " + std::to_string(ranks) + " ranks, " + data_type_name(type) +
                          ", " + std::to_string(micro_steps) + " micro-steps");
        }
      }
    }
  }
}

TEST(ReducedGradients, AnExceptionFailsTheEngineAndEndsNoProcess) {
  for (const bool on_cuda : {false, true}) {
    for (const int micro_steps : {1, 2}) {
      for (const Setting& setting : kSettings) {
        for (const int ranks : {1, 3}) {
          const bool is_standard = ranks == 1;
          const std::string text = is_standard ? "on_reduced_gradient threw: my text"
                                               : "on_reduced_gradient threw what is no std::exception";
          SCOPED_TRACE(text_of(setting) + ", " + std::to_string(ranks) + " ranks, " +
                       std::to_string(micro_steps) + " micro-steps" + (on_cuda ? ", CUDA" : ""));
          ToyOptions options = options_for(0, DataType::kFloat32, ranks);
          options.engine.micro_steps = micro_steps;
          apply(setting, options.engine, options.hooks);
          FakeGpu gpu;
          WorldOptions world;
          if (on_cuda) world.create_backend = [&](int) { return gpu.create_backend(); };
          std::barrier first_step_ended(ranks);
          run_ranks(ranks, world, [&](Rank& rank) {
            std::atomic<bool> throws = false;
            ToyOptions mine = options;
            mine.engine.on_reduced_gradient = [&](const ReducedGradient&) {
              if (!throws) return;
              if (!is_standard) throw 1;
              throw std::runtime_error("my text");
            };
            ToyTrainer trainer(mine, rank);
            trainer.initialize();
            trainer.step(0);
            const std::string digest = trainer.engine().shard_digest();
            first_step_ended.arrive_and_wait();
            throws = rank.communicator->rank() == ranks - 1;
            try {
              trainer.step(1);
              ADD_FAILURE() << "no error";
            } catch (const Error& error) {
              const std::string thrower = "rank " + std::to_string(ranks - 1) + ": ";
              const Plan plan = trainer.engine().plan();
              const bool on_host = plan.offloads() && plan.adds_on_host();
              EXPECT_NE(std::string(error.what()).find(on_host ? thrower + text : text), std::string::npos)
                  << error.what();
              rank.communicator->abort(error.status());  // As a trainer that ends does.
            }
            EXPECT_EQ(trainer.engine().committed_step(), 1u);
            EXPECT_EQ(trainer.engine().shard_digest(), digest);
            EXPECT_THROW(trainer.engine().step_begin(), Error);
          });
        }
      }
    }
  }
}

// Ranks of several all-reduce groups have the same slices where units are sharded within a group.
TEST(ReducedGradients, NameTheirPlaceInTheUnit) {
  constexpr int kRanks = 4, kGroup = 2;
  for (const bool within : {false, true}) {
    for (const Offload offload : {Offload::kNone, Offload::kOptimizer}) {
      ToyOptions options = options_for(3, DataType::kBfloat16, kRanks);
      options.engine.group = kGroup;
      options.engine.shard_within_group = within;
      options.engine.micro_steps = 2;
      apply({3, offload, Tier::kPinned}, options.engine, options.hooks);
      run_ranks(kRanks, {}, [&](Rank& rank) {
        const int number = rank.communicator->rank();
        const auto shard = static_cast<std::uint64_t>(within ? number % kGroup : number);
        ToyOptions mine = options;
        int calls = 0;
        mine.engine.on_reduced_gradient = [&](const ReducedGradient& gradient) {
          EXPECT_EQ(gradient.first, shard * gradient.count);
          ++calls;
        };
        ToyTrainer trainer(mine, rank);
        trainer.initialize();
        trainer.step(0);
        static_cast<void>(trainer.engine().statistics());  // Waits for the calls.
        EXPECT_GT(calls, 0);
      });
    }
  }
}

TEST(Gradients, OneThatIsNotFiniteIsFound) {
  for (const int stage : {0, 3}) {
    ToyOptions options = options_for(stage, DataType::kBfloat16, 3);
    options.engine.micro_steps = 2;
    options.engine.find_non_finite = true;
    options.disturbance = [](int rank, int step) {
      const bool is_disturbed = (rank > 0 && step == 1) || (rank == 2 && step == 3);
      return is_disturbed ? std::numeric_limits<float>::infinity() : 0.0f;
    };
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      EXPECT_FALSE(trainer.step(0).non_finite);
      const StepResult result = trainer.step(1);
      EXPECT_TRUE(result.skipped);
      ASSERT_TRUE(result.non_finite);
      EXPECT_EQ(result.non_finite->rank, 1);  // The first of two.
      EXPECT_EQ(result.non_finite->micro_step, 0);
      EXPECT_EQ(result.non_finite->parameter, (ParameterId{4, 0}));  // The head comes first.
      EXPECT_EQ(result.non_finite->element, 0u);
      EXPECT_FALSE(trainer.step(2).non_finite);
      const StepResult last = trainer.step(3);
      ASSERT_TRUE(last.non_finite);
      EXPECT_EQ(last.non_finite->rank, 2);  // The finding of the earlier step is forgotten.
    });
  }
}

TEST(Gradients, TheElementThatIsNotFiniteIsNamed) {
  for (const OrderOfUnits order : {OrderOfUnits::kStrict, OrderOfUnits::kRecorded}) {
    run_ranks(1, {}, [&](Rank& rank) {
      EngineOptions options;
      options.find_non_finite = true;
      options.micro_steps = 2;
      options.order_of_units = order;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      const UnitId unit = engine.add_unit("u");
      const ParameterId first = engine.add_parameter(unit, "p", 700);
      const ParameterId second = engine.add_parameter(unit, "q", 700);
      engine.commit();
      const Stream stream = value_or_throw(rank.backend->stream_create());
      engine.step_begin();
      for (int k = 0; k < 2; ++k) {
        engine.micro_step_begin(k);
        static_cast<void>(engine.forward(unit, stream));
        Lease lease = engine.backward(unit, stream);
        static_cast<void>(lease.zeroed_gradient(first));
        const Gradient gradient = lease.zeroed_gradient(second);
        if (k == 1) {
          throw_if_error(call_on(*rank.backend, stream, [gradient] {
            for (const int i : {5, 8}) gradient.as<float>()[i] = std::numeric_limits<float>::quiet_NaN();
          }));
        }
      }
      const StepResult result = engine.step({.groups = {{}}});
      ASSERT_TRUE(result.non_finite);
      EXPECT_EQ(result.non_finite->micro_step, 1);
      EXPECT_EQ(result.non_finite->parameter, second);
      EXPECT_EQ(result.non_finite->element, 5u);
      throw_if_error(rank.backend->stream_destroy(stream));
    });
  }
}

// Two units; the gradient of an element is half its value and a number of its own.
struct Model {
  Model(Rank& rank, const EngineOptions& options)
      : backend(*rank.backend), engine(*rank.backend, *rank.kernels, *rank.communicator, options) {
    for (int u = 0; u < 2; ++u) {
      units.push_back(engine.add_unit("u" + std::to_string(u)));
      for (int p = 0; p < 3; ++p) {
        ids.push_back(
            engine.add_parameter(units.back(), "p" + std::to_string(3 * u + p), 700 + 100 * p, p % 2));
      }
    }
    engine.commit();
    stream = value_or_throw(backend.stream_create());
    for (std::size_t n = 0; n < ids.size(); ++n) {
      std::vector<float> values(700 + 100 * (n % 3));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = toy_initial(static_cast<int>(n), i);
      engine.set_parameter(ids[n], values);
    }
  }
  ~Model() { static_cast<void>(backend.stream_destroy(stream)); }

  StepResult step() {
    engine.step_begin();
    engine.micro_step_begin(0);
    for (const UnitId unit : units) static_cast<void>(engine.forward(unit, stream));
    for (const UnitId unit : {units[1], units[0]}) {
      Lease lease = engine.backward(unit, stream);
      for (const ParameterId id : ids) {
        if (id.unit != unit) continue;
        const Gradient gradient = lease.gradient(id);
        const bool is_frozen = std::find(frozen.begin(), frozen.end(), id) != frozen.end();
        EXPECT_EQ(gradient.mode, is_frozen ? GradientMode::kNone : GradientMode::kWrite);
        if (is_frozen) continue;
        throw_if_error(call_on(backend, stream, [id, g = gradient.as<float>(), view = lease.view<float>(id)] {
          for (std::uint64_t i = 0; i < view.count; ++i)
            g[i] = 0.5f * view.data[i] +
                   0.001f * static_cast<float>(i % 7 + static_cast<std::uint64_t>(id.index));
        }));
      }
    }
    throw_if_error(backend.stream_synchronize(stream));
    return engine.step({.groups = {{1e-2, 0.1}, {1e-2, 0.0}}, .clip = 0.5});
  }
  void freeze(ParameterId id, bool on) {
    engine.freeze(id, on);
    if (on) {
      frozen.push_back(id);
    } else {
      frozen.erase(std::find(frozen.begin(), frozen.end(), id));
    }
  }

  Backend& backend;
  Engine engine;
  std::vector<UnitId> units;
  std::vector<ParameterId> ids, frozen;
  Stream stream;
};

TEST(Freeze, KeepsAParameterAndItsMomentsFromStepToStep) {
  std::string digest;
  for (const Setting& setting : kSettings) {
    SCOPED_TRACE(text_of(setting));
    internal::EngineHooks hooks;
    EngineOptions options;
    options.hooks = &hooks;
    apply(setting, options, hooks);
    run_ranks(3, {}, [&](Rank& rank) {
      Model m(rank, options);
      Engine& engine = m.engine;
      const ParameterId first = m.ids[0], middle = m.ids[4];
      m.step();
      const std::vector<float> value = engine.get_parameter(middle), other = engine.get_parameter(first);
      const std::vector<float> m1 = engine.get_moment(middle, Moment::kFirst);
      const std::vector<float> m2 = engine.get_moment(middle, Moment::kSecond);
      EXPECT_NE(m1, std::vector<float>(m1.size(), 0.0f));
      EXPECT_NE(m2, std::vector<float>(m2.size(), 0.0f));
      m.freeze(middle, true);
      m.step();
      EXPECT_EQ(engine.get_parameter(middle), value);
      EXPECT_EQ(engine.get_moment(middle, Moment::kFirst), m1);
      EXPECT_EQ(engine.get_moment(middle, Moment::kSecond), m2);
      EXPECT_NE(engine.get_parameter(first), other);
      for (const ParameterId id : {m.ids[3], m.ids[5]}) m.freeze(id, true);  // The whole unit.
      m.step();
      EXPECT_EQ(engine.get_parameter(middle), value);
      for (const ParameterId id : {m.ids[3], m.ids[4], m.ids[5]}) m.freeze(id, false);
      m.step();
      EXPECT_NE(engine.get_parameter(middle), value);
      const std::string mine = engine.digest();
      if (rank.communicator->rank() != 0) return;
      if (digest.empty()) digest = mine;
      EXPECT_EQ(mine, digest);
    });
  }
}

// The 2-byte parameters on the device stay those of their masters, also where they come up from the host.
TEST(Freeze, LeavesTwoByteParametersInTheirPlaces) {
  for (const Setting& setting : kSettings) {
    for (const int micro_steps : {1, 2}) {
      SCOPED_TRACE(text_of(setting) + ", " + std::to_string(micro_steps) + " micro-steps");
      internal::EngineHooks hooks;
      EngineOptions options;
      options.hooks = &hooks;
      options.dtype = DataType::kBfloat16;
      options.micro_steps = micro_steps;
      apply(setting, options, hooks);
      run_ranks(2, {}, [&](Rank& rank) {
        Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
        const UnitId unit = engine.add_unit("u");
        std::vector<ParameterId> ids;
        for (int p = 0; p < 3; ++p) ids.push_back(engine.add_parameter(unit, "p" + std::to_string(p), 900));
        engine.commit();
        for (const ParameterId id : ids) engine.set_parameter(id, std::vector<float>(900, 1.0f + id.index));
        const Stream stream = value_or_throw(rank.backend->stream_create());
        engine.freeze(ids[1]);
        const auto step = [&](bool checks) {
          engine.step_begin();
          for (int k = 0; k < micro_steps; ++k) {
            engine.micro_step_begin(k);
            {
              const Lease lease = engine.forward(unit, stream);
              throw_if_error(rank.backend->stream_synchronize(stream));
              for (const ParameterId id : ids) {
                const ParameterView<std::uint16_t> view = lease.view<std::uint16_t>(id);
                for (std::uint64_t i = 0; i < view.count && checks; ++i) {
                  const float value = bfloat16_to_float(view.data[i]);
                  if (id == ids[1]) {
                    ASSERT_EQ(value, 2.0f) << i;
                  } else {
                    ASSERT_NE(value, 1.0f + static_cast<float>(id.index)) << i;
                  }
                }
              }
            }
            Lease lease = engine.backward(unit, stream);
            for (const ParameterId id : {ids[0], ids[2]}) {
              const Gradient g = lease.zeroed_gradient(id);
              throw_if_error(call_on(*rank.backend, stream, [g] {
                for (int i = 0; i < 900; ++i) g.as<std::uint16_t>()[i] = float_to_bfloat16(0.25f);
              }));
            }
          }
          static_cast<void>(engine.step({.groups = {{.lr = 0.1}}}));
        };
        step(false);
        step(true);
        throw_if_error(rank.backend->stream_destroy(stream));
      });
    }
  }
}

TEST(Freeze, IsRefusedForAParameterWithoutStates) {
  run_ranks(1, {}, [](Rank& rank) {
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, {});
    const UnitId unit = engine.add_unit("u");
    const ParameterId fixed = engine.add_parameter(unit, "fixed", 5, 0, /*frozen=*/true);
    engine.add_parameter(unit, "p", 5);
    engine.commit();
    EXPECT_THROW(engine.freeze(fixed), Error);
    EXPECT_THROW(engine.get_moment(fixed, Moment::kFirst), Error);
    EXPECT_THROW(engine.freeze({3, 0}), Error);
  });
}

}  // namespace
}  // namespace forebay::testing
