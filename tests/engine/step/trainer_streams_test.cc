// Work that the trainer queued under leases and that has not run yet: nothing that it reads or writes changes
// before it has run, whichever streams it is on. The virtual clock moves on only while all threads wait.

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "forebay/engine.h"
#include "forebay/stream_call.h"
#include "tests/support/local_world.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

constexpr std::size_t kCount = 100;

using Body = std::function<void(Rank& rank, HostClock& clock, Engine& engine, Stream first, Stream second)>;

// One rank, with two units of kCount elements each; the second one has the parameter of the first, too.
void run_engine(EngineOptions options, const Body& body) {
  HostClock clock(HostClock::Mode::kVirtual);
  WorldOptions world;
  world.clock = &clock;
  run_ranks(1, world, [&](Rank& rank) {
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
    const UnitId unit = engine.add_unit("u");
    engine.add_parameter(unit, "p", kCount);
    const UnitId head = engine.add_unit("head");
    engine.add_parameter(head, "h", kCount);
    engine.tie(head, {unit, 0});
    engine.commit();
    const Stream first = value_or_throw(rank.backend->stream_create());
    const Stream second = value_or_throw(rank.backend->stream_create());
    body(rank, clock, engine, first, second);
    for (const Stream stream : {first, second}) {
      throw_if_error(rank.backend->stream_synchronize(stream));
      throw_if_error(rank.backend->stream_destroy(stream));
    }
  });
}

// Queues work that takes 1 ms and then calls `function`.
void queue_late(Rank& rank, HostClock& clock, Stream stream, std::function<void()> function) {
  throw_if_error(call_on(*rank.backend, stream, [&clock, function] {
    clock.sleep(std::chrono::milliseconds(1));
    function();
  }));
}

// Adds `value` to the gradient of the leased unit's parameter at `index`, or sets it.
void add_late(Rank& rank, HostClock& clock, Lease& lease, int index, Stream stream, float value) {
  bool adds = false;
  auto* const gradient = reinterpret_cast<float*>(lease.gradient(index, &adds));
  queue_late(rank, clock, stream, [gradient, adds, value] {
    for (std::size_t i = 0; i < kCount; ++i) gradient[i] = (adds ? gradient[i] : 0.0f) + value;
  });
}

// A step in which the tied gradient is written on the first stream and then added to on the second one.
StepResult step(Rank& rank, HostClock& clock, Engine& engine, Stream first, Stream second) {
  engine.step_begin();
  engine.micro_step_begin(0);
  for (const UnitId unit : {0, 1}) static_cast<void>(engine.forward(unit, first));
  {
    Lease lease = engine.backward(1, first);
    add_late(rank, clock, lease, 0, first, 0.0f);
    add_late(rank, clock, lease, 1, first, 30.0f);
  }
  {
    Lease lease = engine.backward(0, second);
    add_late(rank, clock, lease, 0, second, 5.0f);
  }
  return engine.step({.groups = {{}}});
}

constexpr OrderOfUnits kOrders[] = {OrderOfUnits::kStrict, OrderOfUnits::kRecorded};

TEST(TrainerStreams, ATiedGradientMayBeAddedToOnAnotherStream) {
  for (const OrderOfUnits order : kOrders) {
    for (const int stage : {0, 1, 2, 3}) {
      EngineOptions options;
      options.order_of_units = order;
      options.stage = stage;
      run_engine(options, [&](Rank& rank, HostClock& clock, Engine& engine, Stream first, Stream second) {
        EXPECT_EQ(step(rank, clock, engine, first, second).grad_norm, 35.0 * std::sqrt(double{kCount}))
            << "stage " << stage << ", order " << static_cast<int>(order);
      });
    }
  }
}

TEST(TrainerStreams, ReadsOfAnEvaluationSeeTheWeightsFromBeforeALaterChange) {
  const TemporaryDirectory directory;
  const std::vector<float> ones(kCount, 1.0f);
  const std::vector<float> twos(kCount, 2.0f);
  struct Change {
    const char* name;
    std::function<void(Engine&)> call;
  };
  // The average is another than the weights only until these are set.
  const Change changes[] = {
      {"swap_average()", [](Engine& engine) { engine.swap_average(); }},
      {"swap_average() back", [](Engine& engine) { engine.swap_average(); }},
      {"set_parameter()",
       [&](Engine& engine) {
         engine.set_parameter({0, 0}, ones);
       }},
      {"set_parameter() again",
       [&](Engine& engine) {
         engine.set_parameter({0, 0}, twos);
       }},
      {"load_state()", [&](Engine& engine) { engine.load_state(directory.path()); }},
  };
  for (const OrderOfUnits order : kOrders) {
    for (const int stage : {0, 1, 3}) {
      EngineOptions options;
      options.order_of_units = order;
      options.stage = stage;
      options.ema = 0.5;
      run_engine(options, [&](Rank& rank, HostClock& clock, Engine& engine, Stream first, Stream second) {
        engine.set_parameter({0, 0}, ones);
        engine.save_state(directory.path(), "");
        engine.set_parameter({0, 0}, twos);
        static_cast<void>(step(rank, clock, engine, first, second));
        for (const Change& change : changes) {
          const std::vector<float> before = engine.get_parameter({0, 0});
          std::vector<float> seen(kCount);
          engine.evaluation_begin();
          for (const UnitId unit : {0, 1}) {
            const Lease lease = engine.forward(unit, second);
            const auto* const read = reinterpret_cast<const float*>(lease.parameter(0));
            if (unit == 0)
              queue_late(rank, clock, second, [&seen, read] { seen.assign(read, read + kCount); });
          }
          engine.evaluation_end();
          change.call(engine);
          throw_if_error(rank.backend->stream_synchronize(second));
          EXPECT_TRUE(seen == before)
              << change.name << ", stage " << stage << ", order " << static_cast<int>(order);
          EXPECT_FALSE(engine.get_parameter({0, 0}) == before) << change.name;
        }
      });
    }
  }
}

// The norms of its gradients may still be computed.
TEST(TrainerStreams, SpillAfterAnAbandonedStepWaitsForItsReductions) {
  for (const int stage : {0, 2}) {
    run_ranks(1, {}, [&](Rank& rank) {
      EngineOptions options;
      options.order_of_units = OrderOfUnits::kRecorded;
      options.stage = stage;
      options.spillable = true;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      engine.add_parameter(engine.add_unit("u"), "p", 20'000'000);
      engine.commit();
      const Stream stream = value_or_throw(rank.backend->stream_create());
      engine.step_begin();
      engine.micro_step_begin(0);
      static_cast<void>(engine.forward(0, stream));
      {
        Lease lease = engine.backward(0, stream);
        static_cast<void>(lease.zeroed_gradient({0, 0}));
      }
      engine.abandon();
      // The others would take longer to spill than the norms take.
      engine.spill({.parameters = false, .optimizer = false});
      engine.fetch();
      engine.step_begin();
      engine.abandon();
      throw_if_error(rank.backend->stream_destroy(stream));
    });
  }
}

}  // namespace
}  // namespace forebay::testing
