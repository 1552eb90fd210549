// Leases that name parameters by their ids, and gradients that are left out.

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "forebay/stream_call.h"
#include "tests/engine/toy_cases.h"

namespace forebay::testing {
namespace {

void refused(const char* part, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// An embedding, and a head that ties it and has a frozen parameter.
struct Model {
  explicit Model(Rank& rank, EngineOptions options = {})
      : engine(*rank.backend, *rank.kernels, *rank.communicator, options),
        embedding(engine.add_unit("embedding")),
        head(engine.add_unit("head")),
        wte(engine.add_parameter(embedding, "wte", 12)),
        gain(engine.add_parameter(head, "gain", 5)),
        fixed(engine.add_parameter(head, "fixed", 3, 0, /*frozen=*/true)),
        stream(value_or_throw(rank.backend->stream_create())) {
    engine.tie(head, wte);
    engine.declare_shape(wte, {3, 4});
  }
  void begin() {
    engine.step_begin();
    engine.micro_step_begin(0);
  }
  StepResult step() { return engine.step({.groups = {{}}}); }

  Engine engine;
  const UnitId embedding, head;
  const ParameterId wte, gain, fixed;
  const Stream stream;
};

TEST(Lease, NamesParametersByTheirIds) {
  run_ranks(1, {}, [](Rank& rank) {
    Model m(rank);
    m.engine.commit();
    std::vector<float> values(12);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    m.engine.set_parameter(m.wte, values);
    m.begin();
    {
      Lease lease = m.engine.forward(m.embedding, m.stream);
      Lease& same = lease;
      lease = std::move(same);
      EXPECT_EQ(lease.parameter(m.wte), lease.parameter(0));
      refused("unit embedding has no parameter 1; give 0 to 0",
              [&] { static_cast<void>(lease.parameter(1)); });
      const ParameterView<float> view = lease.view<float>(m.wte);
      throw_if_error(rank.backend->stream_synchronize(m.stream));
      EXPECT_EQ(view.count, 12u);
      EXPECT_EQ((std::vector<std::uint64_t>(view.shape.begin(), view.shape.end())),
                (std::vector<std::uint64_t>{3, 4}));
      for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(view.data[i], values[i]);
      refused("elements of 2 bytes", [&] { static_cast<void>(lease.view<std::uint16_t>(m.wte)); });
      refused("does not use", [&] { static_cast<void>(lease.parameter(m.gain)); });
      refused("was not added", [&] { static_cast<void>(lease.parameter(ParameterId{7, 0})); });
    }
    {
      Lease lease = m.engine.forward(m.head, m.stream);
      EXPECT_EQ(lease.parameter(m.wte), lease.parameter(2));
      EXPECT_EQ(lease.view<float>(m.gain).shape.size(), 1u);
      EXPECT_EQ(lease.view<float>(m.gain).shape[0], 5u);
      refused("belongs to the backward pass", [&] { static_cast<void>(lease.gradient(m.gain)); });
    }
    {
      Lease lease = m.engine.backward(m.head, m.stream);
      EXPECT_EQ(lease.gradient(m.fixed).mode, GradientMode::kNone);
      EXPECT_EQ(lease.gradient(m.fixed).data, nullptr);
      EXPECT_EQ(lease.zeroed_gradient(m.fixed).mode, GradientMode::kNone);
      const Gradient gain = lease.zeroed_gradient(m.gain);
      EXPECT_EQ(gain.mode, GradientMode::kAdd);
      EXPECT_EQ(lease.gradient(m.gain).mode, GradientMode::kAdd);
      EXPECT_EQ(lease.gradient(m.gain).data, gain.data);
      const Gradient wte = lease.gradient(m.wte);
      EXPECT_EQ(wte.mode, GradientMode::kWrite);
      EXPECT_EQ(lease.gradient(m.wte).mode, GradientMode::kWrite);
      throw_if_error(rank.backend->fill_async(wte.data, 0, 12 * 4, m.stream));
      throw_if_error(rank.backend->stream_synchronize(m.stream));
      for (int i = 0; i < 5; ++i) EXPECT_EQ(reinterpret_cast<const float*>(gain.data)[i], 0.0f);
    }
    {
      Lease lease = m.engine.backward(m.embedding, m.stream);
      EXPECT_EQ(lease.gradient(m.wte).mode, GradientMode::kAdd);
      EXPECT_EQ(lease.zeroed_gradient(m.wte).mode, GradientMode::kAdd);  // Nothing is zeroed.
    }
    EXPECT_EQ(m.step().grad_norm, 0.0);
    throw_if_error(rank.backend->stream_destroy(m.stream));
  });
}

void pass(Model& m, bool asks_for_gain) {
  m.begin();
  for (const UnitId unit : {m.embedding, m.head}) static_cast<void>(m.engine.forward(unit, m.stream));
  {
    Lease lease = m.engine.backward(m.head, m.stream);
    static_cast<void>(lease.zeroed_gradient(m.wte));
    if (asks_for_gain) static_cast<void>(lease.zeroed_gradient(m.gain));
  }
  static_cast<void>(m.engine.backward(m.embedding, m.stream));  // wte was asked for in the head.
}

TEST(Lease, AGradientThatIsLeftOutIsRefusedInTheFirstStep) {
  for (const OrderOfUnits order : {OrderOfUnits::kStrict, OrderOfUnits::kRecorded}) {
    run_ranks(1, {}, [&](Rank& rank) {
      EngineOptions options;
      options.order_of_units = order;
      Model m(rank, options);
      m.engine.commit();
      pass(m, false);
      refused("the gradient of parameter gain of unit head", [&] { m.step(); });
      throw_if_error(rank.backend->stream_destroy(m.stream));
    });
    run_ranks(1, {}, [&](Rank& rank) {
      EngineOptions options;
      options.order_of_units = order;
      Model m(rank, options);
      m.engine.commit();
      pass(m, true);
      EXPECT_EQ(m.step().grad_norm, 0.0);
      pass(m, false);  // Later steps may.
      EXPECT_EQ(m.step().grad_norm, 0.0);
      throw_if_error(rank.backend->stream_destroy(m.stream));
    });
  }
}

TEST(Description, EndsWithCommit) {
  run_ranks(1, {}, [](Rank& rank) {
    Model m(rank);
    Engine& engine = m.engine;
    const std::vector<float> values(12);
    const std::function<void()> later[] = {[&] { engine.step_begin(); },
                                           [&] { engine.evaluation_begin(); },
                                           [&] { engine.set_parameter(m.wte, values); },
                                           [&] { static_cast<void>(engine.get_parameter(m.wte)); },
                                           [&] { static_cast<void>(engine.digest()); },
                                           [&] { engine.freeze(m.wte); },
                                           [&] { engine.spill(); },
                                           [&] { engine.fetch(); },
                                           [&] { engine.save_state("/nowhere", "x"); },
                                           [&] { static_cast<void>(engine.load_state("/nowhere")); }};
    for (const std::function<void()>& call : later) refused("needs commit() first", call);
    refused("belongs after commit()", [&] { static_cast<void>(engine.shard_digest()); });

    engine.commit();

    const TensorSplit split{.shape = {24}, .parts = 2};
    const std::function<void()> earlier[] = {
        [&] { engine.add_unit("late"); },
        [&] { engine.add_parameter(m.embedding, "late", 1); },
        [&] { engine.declare_optional(m.wte); },
        [&] { engine.declare_elementwise(m.wte); },
        [&] { engine.declare_shape(m.wte, std::vector<std::uint64_t>{12}); },
        [&] { engine.declare_split(m.wte, split); },
        [&] { engine.tie(m.head, m.wte); },
        [&] { engine.share(m.head, *rank.communicator); },
        [&] { engine.declare_activations(1); },
        [&] { static_cast<void>(engine.activation_room()); }};
    for (const std::function<void()>& call : earlier) refused("belongs before commit()", call);
    throw_if_error(rank.backend->stream_destroy(m.stream));
  });
}

TEST(Values, ThatAnEngineDoesNotKeepAreRefused) {
  run_ranks(1, {}, [](Rank& rank) {
    for (const Optimizer optimizer :
         {Optimizer::kAdamW, Optimizer::kSgd, Optimizer::kLion, Optimizer::kAdafactor, Optimizer::kMuon}) {
      SCOPED_TRACE(optimizer_name(optimizer));
      EngineOptions options;
      options.optimizer = optimizer;
      Model m(rank, options);
      Engine& engine = m.engine;
      engine.commit();
      for (const std::size_t count : {11, 13}) {
        refused("values for 12", [&] { engine.set_parameter(m.wte, std::vector<float>(count)); });
      }
      refused("keeps no average", [&] { engine.swap_average(); });
      refused("keeps none", [&] { static_cast<void>(engine.get_average(m.wte)); });
      refused("is frozen", [&] { static_cast<void>(engine.get_moment(m.fixed, Moment::kFirst)); });
      const auto first = [&] { return engine.get_moment(m.wte, Moment::kFirst); };
      const auto second = [&] { return engine.get_moment(m.wte, Moment::kSecond); };
      const std::vector<float> zeros(12);
      if (optimizer == Optimizer::kAdafactor) {
        refused("its second moment is in factors", [&] { static_cast<void>(first()); });
      } else {
        EXPECT_EQ(first(), zeros);
      }
      if (optimizer == Optimizer::kAdamW) {
        EXPECT_EQ(second(), zeros);
      } else {
        refused("get_moment() of v", [&] { static_cast<void>(second()); });
      }
      // Muon updates a vector as AdamW does.
      if (optimizer == Optimizer::kMuon) {
        EXPECT_EQ(engine.get_moment(m.gain, Moment::kSecond), std::vector<float>(5));
      }
      throw_if_error(rank.backend->stream_destroy(m.stream));
    }
  });
}

TEST(StrictOrder, HasOneLeaseAtATime) {
  run_ranks(1, {}, [](Rank& rank) {
    EngineOptions options;
    options.micro_steps = 2;
    options.forwards_ahead = 1;
    options.optional_gradients = true;
    Model m(rank, options);
    Engine& engine = m.engine;
    engine.commit();
    m.begin();
    {
      const Lease lease = engine.forward(m.embedding, m.stream);
      refused("another lease is alive", [&] { static_cast<void>(engine.forward(m.head, m.stream)); });
      refused("a lease is alive", [&] { engine.skip(m.head); });
    }
    {
      const Lease lease = engine.forward(m.head, m.stream);
      refused("a lease is alive", [&] { engine.micro_step_begin(1); });
      refused("a lease is alive", [&] { m.step(); });
    }
    engine.micro_step_begin(1);
    for (const UnitId unit : {m.embedding, m.head}) static_cast<void>(engine.forward(unit, m.stream));
    for (int k = 0; k < 2; ++k) {
      {
        const Lease lease = engine.backward(m.head, m.stream);
        refused("another lease is alive", [&] { static_cast<void>(engine.backward(m.embedding, m.stream)); });
        refused("a lease is alive", [&] { engine.evaluation_begin(); });
      }
      static_cast<void>(engine.backward(m.embedding, m.stream));
    }
    EXPECT_EQ(m.step().grad_norm, 0.0);
    throw_if_error(rank.backend->stream_destroy(m.stream));
  });
}

TEST(StrictOrder, NeedsAllPassesOfAStep) {
  run_ranks(1, {}, [](Rank& rank) {
    EngineOptions options;
    options.micro_steps = 2;
    options.optional_gradients = true;
    Model m(rank, options);
    Engine& engine = m.engine;
    engine.commit();
    m.begin();
    engine.skip(m.embedding);
    static_cast<void>(engine.forward(m.head, m.stream));
    static_cast<void>(engine.backward(m.head, m.stream));
    refused("of a unit that forward skipped",
            [&] { static_cast<void>(engine.backward(m.embedding, m.stream)); });
    refused("step() after 1 micro-steps; the engine was made for 2", [&] { m.step(); });
    refused("gradient_norm() after 1 micro-steps", [&] { static_cast<void>(engine.gradient_norm()); });
    engine.micro_step_begin(1);
    for (const UnitId unit : {m.embedding, m.head}) static_cast<void>(engine.forward(unit, m.stream));
    for (const UnitId missing : {-1, 2})
      refused("was not added", [&] { static_cast<void>(engine.backward(missing, m.stream)); });
    static_cast<void>(engine.backward(m.head, m.stream));
    refused("unit embedding had a forward and no backward pass in micro-step 1", [&] { m.step(); });
    static_cast<void>(engine.backward(m.embedding, m.stream));
    EXPECT_EQ(engine.gradient_norm(), 0.0);
    EXPECT_EQ(m.step().grad_norm, 0.0);
    throw_if_error(rank.backend->stream_destroy(m.stream));
  });
}

TEST(Description, RefusesAShapeOfAnotherNumberOfElements) {
  run_ranks(1, {}, [](Rank& rank) {
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, {});
    const ParameterId p = engine.add_parameter(engine.add_unit("u"), "p", 12);
    const std::vector<std::vector<std::uint64_t>> shapes = {
        {3, 5}, {11}, {13}, {}, {12, 0}, {std::uint64_t{1} << 62, 4, 12}, {(std::uint64_t{1} << 62) + 3, 4}};
    for (const std::vector<std::uint64_t>& shape : shapes)
      refused("which has 12 elements", [&] { engine.declare_shape(p, shape); });
    engine.declare_shape(p, std::vector<std::uint64_t>{2, 6, 1});
    engine.commit();
  });
}

// An abandoned step has no part in it: neither the gradients that it asked for, nor those that it left out.
TEST(Lease, TheFirstStepThatIsTakenIsCheckedForItself) {
  for (const bool asked_before : {true, false}) {
    run_ranks(1, {}, [&](Rank& rank) {
      EngineOptions options;
      options.order_of_units = OrderOfUnits::kRecorded;
      Model m(rank, options);
      m.engine.commit();
      pass(m, asked_before);
      m.engine.abandon();
      if (asked_before) {
        pass(m, false);
        refused("the gradient of parameter gain of unit head", [&] { m.step(); });
      } else {
        m.begin();
        static_cast<void>(m.engine.forward(m.embedding, m.stream));
        static_cast<void>(m.engine.backward(m.embedding, m.stream).zeroed_gradient(m.wte));
        EXPECT_EQ(m.step().grad_norm, 0.0);  // The head has no backward lease.
      }
      throw_if_error(rank.backend->stream_destroy(m.stream));
    });
  }
}

TEST(Lease, EndsWhereAnotherTakesItsPlace) {
  run_ranks(1, {}, [](Rank& rank) {
    EngineOptions options;
    options.order_of_units = OrderOfUnits::kRecorded;
    Model m(rank, options);
    m.engine.commit();
    m.begin();
    Lease lease = m.engine.forward(m.embedding, m.stream);
    Lease other = m.engine.forward(m.head, m.stream);
    EXPECT_EQ(m.engine.open_leases(), 2u);
    lease = std::move(other);
    EXPECT_EQ(m.engine.open_leases(), 1u);
    EXPECT_NE(lease.parameter(m.gain), nullptr);
    refused("was moved from", [&] { static_cast<void>(other.parameter(0)); });
    lease = Lease(std::move(other));
    EXPECT_EQ(m.engine.open_leases(), 0u);
    throw_if_error(rank.backend->stream_synchronize(m.stream));
    throw_if_error(rank.backend->stream_destroy(m.stream));
  });
}

TEST(Lease, AnOptionalGradientMayBeLeftOut) {
  run_ranks(1, {}, [](Rank& rank) {
    Model m(rank);
    m.engine.declare_optional(m.gain);
    m.engine.commit();
    pass(m, false);
    EXPECT_EQ(m.step().grad_norm, 0.0);
    throw_if_error(rank.backend->stream_destroy(m.stream));
  });
  run_ranks(1, {}, [](Rank& rank) {
    EngineOptions options;
    options.optional_gradients = true;
    Model m(rank, options);
    m.engine.commit();
    pass(m, false);
    EXPECT_EQ(m.step().grad_norm, 0.0);
    throw_if_error(rank.backend->stream_destroy(m.stream));
  });
}

// The trainer's work under a lease whose end cannot be recorded: the engine's memory stays until it is over.
// `fails_before`: another lease made the engine fail.
void expect_the_work_to_end_first(OrderOfUnits order, std::uint64_t failing_calls, bool fails_before) {
  HostClock clock(HostClock::Mode::kVirtual);
  WorldOptions world;
  world.clock = &clock;
  run_ranks(1, world, [&](Rank& rank) {
    EngineOptions options;
    options.order_of_units = order;
    auto model = std::make_unique<Model>(rank, options);
    Engine& engine = model->engine;
    const Stream stream = model->stream;
    engine.commit();
    model->begin();
    const auto fail = [&] {
      for (std::uint64_t nth = 1; nth <= failing_calls; ++nth) {
        rank.host_backend().add_fault(
            {HostCall::kEventRecord, nth, Status(StatusCode::kInternal, "the device is not well")});
      }
    };
    {
      const Lease first = engine.forward(model->embedding, stream);
      const Stream other = value_or_throw(rank.backend->stream_create());
      if (fails_before) {
        const Lease second = engine.forward(model->head, other);
        fail();
      }
      throw_if_error(call_on(*rank.backend, stream, [&clock] { clock.sleep(std::chrono::seconds(7)); }));
      if (!fails_before) fail();
      throw_if_error(rank.backend->stream_destroy(other));
    }
    EXPECT_THROW(static_cast<void>(engine.forward(model->head, stream)), Error);

    model.reset();

    EXPECT_EQ(clock.now(), std::chrono::seconds(7));
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

// Units 0 and 2 have one slot, and 1 and 3 another. Where a slot is in use, the other unit goes to a spare
// one, and counts as gathered until its own slot is gathered into.
TEST(Lease, NoUnitTakesTheSpareSlotOfOneThatCountsAsGathered) {
  run_ranks(2, {}, [](Rank& rank) {
    EngineOptions options;
    options.stage = 3;
    options.order_of_units = OrderOfUnits::kRecorded;
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
    std::vector<ParameterId> weights;
    for (const char* name : {"0", "1", "2", "3"})
      weights.push_back(engine.add_parameter(engine.add_unit(name), name, 1000));
    engine.commit();
    for (const ParameterId id : weights)
      engine.set_parameter(id, std::vector<float>(1000, 1.0f + static_cast<float>(id.unit)));
    const Stream stream = value_or_throw(rank.backend->stream_create());
    const auto lease = [&](int unit) {
      Lease made = engine.forward(unit, stream);
      throw_if_error(rank.backend->stream_synchronize(stream));
      const ParameterView<float> view = made.view<float>(weights[static_cast<std::size_t>(unit)]);
      EXPECT_EQ(view.data[999], 1.0f + static_cast<float>(unit));
      return made;
    };
    engine.evaluation_begin();
    {
      const Lease zero = lease(0);
      lease(2);
      const Lease one = lease(1);
      lease(3);
      lease(2);
    }
    engine.evaluation_end();
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

TEST(Lease, AnEngineWaitsForWorkWhoseEndWasNotRecorded) {
  for (const std::uint64_t failing_calls : {1u, 2u, 100u}) {
    expect_the_work_to_end_first(OrderOfUnits::kStrict, failing_calls, false);
    expect_the_work_to_end_first(OrderOfUnits::kRecorded, failing_calls, false);
    expect_the_work_to_end_first(OrderOfUnits::kRecorded, failing_calls, true);
  }
}

}  // namespace
}  // namespace forebay::testing
