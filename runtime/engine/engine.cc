// The public calls of Engine: each checks that it is in order, then passes on to the parts of the step.

#include "forebay/engine.h"

#include <algorithm>
#include <cstring>

#include "forebay/grouped_communicator.h"
#include "forebay/log.h"
#include "runtime/engine/engine_impl.h"
#include "runtime/engine/state/background_save.h"
#include "runtime/engine/state/tensor_places.h"

namespace forebay {

Engine::Impl::Impl(Backend& backend_in, Kernels& kernels_in, Communicator& communicator_in,
                   EngineOptions options_in)
    : StepContext(backend_in, kernels_in, communicator_in, std::move(options_in)),
      other_traffic(communicator_in.traffic()) {}

Engine::Impl::~Impl() {
  if (background_save != nullptr && phase == Phase::kFailed) background_save->patience = {};
  background_save.reset();
  // Work that the trainer queued under a lease may still run on memory that is freed here.
  for (const Unit& u : units) {
    if (Event(u.released).handle != nullptr) note(backend.event_synchronize(u.released));
  }
  // Each part waits for its streams. The updater's host stream calls the reducer.
  updater.reset();
  reducer.reset();
  gatherer.reset();
  engine_stream.close(arena.get());
  decision.reset();
  factored.reset();
  matrix_updates.reset();
  units.clear();
  if (options.timeline != nullptr) options.timeline->release(backend);
  if (!closing.ok() && phase != Phase::kFailed)
    log(LogLevel::kWarning, "closing an engine: %s", closing.message().c_str());
}

Engine::Impl::OtherTraffic::OtherTraffic(Impl& impl) : impl_(impl) {
  if (impl_.engine_stream.is_open()) impl_.engine_stream.synchronize();
  before_ = impl_.traffic();
}

Engine::Impl::OtherTraffic::~OtherTraffic() {
  const Traffic after = impl_.traffic();
  impl_.other_traffic.sent_bytes += after.sent_bytes - before_.sent_bytes;
  impl_.other_traffic.received_bytes += after.received_bytes - before_.received_bytes;
}

Traffic Engine::Impl::traffic() const {
  Traffic sum = communicator.traffic();
  const auto add = [&sum](const Communicator& other) {
    const Traffic traffic = other.traffic();
    sum.sent_bytes += traffic.sent_bytes;
    sum.received_bytes += traffic.received_bytes;
  };
  if (grouped != nullptr) add(*grouped);
  if (deciding != nullptr) add(*deciding);
  for (const auto& [unit, stages] : shared_units) add(*stages);
  return sum;
}

void Engine::Impl::misuse(const std::string& message) {
  throw Error(StatusCode::kInvalidArgument, message);
}

void Engine::Impl::check_parameter(ParameterId id, const char* call) {
  if (id.unit >= 0 && id.unit < unit_count() && id.index >= 0 &&
      static_cast<std::size_t>(id.index) < shape(id.unit).parameters.size()) {
    return;
  }
  misuse(std::string(call) + " of parameter " + std::to_string(id.index) + " of unit " +
         std::to_string(id.unit) + ", which was not added; use the id that add_parameter() returned");
}

void Engine::Impl::expect_own_process() {
  if (!is_forked()) return;
  throw Error(StatusCode::kUnsupported, "this engine was made by process " + std::to_string(process) +
                                            ", and a child made by fork() cannot use it; make an engine in "
                                            "the child, or start the child before the engine");
}

void Engine::Impl::expect_fetched(const char* call) {
  if (std::find(spilled.begin(), spilled.end(), true) != spilled.end())
    misuse(std::string(call) + " while states are spilled; fetch() them first");
}

void Engine::Impl::expect_stream(Stream stream, const char* call) {
  if (stream == Stream())
    misuse(std::string(call) +
           " with a stream that is null; give one of Backend::stream_create() or your own");
}

void Engine::Impl::expect(Phase wanted, const char* call) {
  expect_own_process();
  if (wanted == Phase::kIdle && phase == wanted) expect_fetched(call);
  if (phase == wanted) return;
  if (phase == Phase::kFailed) throw Error(failure.with_context("the engine failed earlier"));
  const char* message = "";
  switch (wanted) {
    case Phase::kDescribe:
      message = " belongs before commit()";
      break;
    case Phase::kIdle:
      if (phase != Phase::kDescribe) {
        if (after_evaluation == Phase::kIdle)
          misuse(std::string(call) + " in an evaluation; call evaluation_end() first");
        misuse(std::string(call) + " while step " + std::to_string(attempted_steps + 1) +
               " is open; end it by step() first");
      }
      message = " needs commit() first";
      break;
    case Phase::kStep:
      message = " needs step_begin() first";
      break;
    case Phase::kForward:
      message = " needs micro_step_begin() first";
      break;
    case Phase::kBackward:
      message = " belongs to the backward pass";
      break;
    case Phase::kFailed:
      break;
  }
  misuse(std::string(call) + message);
}

void Engine::Impl::expect_between_passes(const char* call) {
  if (recorded() && phase != Phase::kIdle && phase != Phase::kDescribe && phase != Phase::kFailed) {
    expect_own_process();
    if (after_evaluation) misuse(std::string(call) + " in an evaluation; call evaluation_end() first");
    if (!leases.empty()) misuse(std::string(call) + " while a lease is alive; end it first");
    finish_pass();
  }
  if (!recorded() || phase != Phase::kStep) expect(Phase::kIdle, call);
}

void Engine::Impl::expect_step(const char* call) {
  expect_own_process();
  if (phase == Phase::kFailed || phase == Phase::kDescribe || phase == Phase::kIdle)
    expect(Phase::kStep, call);
  if (!leases.empty()) misuse(std::string(call) + " while a lease is alive; end it first");
}

Engine::Engine(Backend& backend, Kernels& kernels, Communicator& communicator, EngineOptions options)
    : impl_(std::make_unique<Impl>(backend, kernels, communicator, std::move(options))) {
  throw_if_error(impl_->check_scalars());
}

Engine::~Engine() {
  // The parent still uses the device and the files, and waiting for its threads would never end.
  if (impl_ != nullptr && impl_->is_forked()) static_cast<void>(impl_.release());
}

UnitId Engine::add_unit(const std::string& name, bool backward_reads_parameters) {
  impl_->expect(Impl::Phase::kDescribe, "add_unit()");
  return impl_->description.add_unit(name, backward_reads_parameters);
}

ParameterId Engine::add_parameter(UnitId unit, const std::string& name, std::uint64_t count, int group,
                                  bool frozen, bool replicated) {
  impl_->expect(Impl::Phase::kDescribe, "add_parameter()");
  return {unit, impl_->description.add_parameter(unit, {name, count, group, frozen, replicated})};
}

void Engine::declare_optional(ParameterId parameter) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kDescribe, "declare_optional()");
  impl.check_parameter(parameter, "declare_optional()");
  impl.model.units[static_cast<std::size_t>(parameter.unit)]
      .parameters[static_cast<std::size_t>(parameter.index)]
      .optional = true;
}

void Engine::declare_elementwise(ParameterId parameter) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kDescribe, "declare_elementwise()");
  impl.check_parameter(parameter, "declare_elementwise()");
  impl.model.units[static_cast<std::size_t>(parameter.unit)]
      .parameters[static_cast<std::size_t>(parameter.index)]
      .elementwise = true;
}

void Engine::declare_shape(ParameterId parameter, Span<const std::uint64_t> shape) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kDescribe, "declare_shape()");
  impl.check_parameter(parameter, "declare_shape()");
  ParameterShape& described = impl.model.units[static_cast<std::size_t>(parameter.unit)]
                                  .parameters[static_cast<std::size_t>(parameter.index)];
  std::uint64_t count = 1;
  bool overflows = false;
  for (const std::uint64_t extent : shape)
    overflows = __builtin_mul_overflow(count, extent, &count) || overflows;
  if (overflows || count != described.count) {
    impl.misuse("declare_shape() of parameter " + described.name + ", which has " +
                std::to_string(described.count) +
                " elements, with dimensions of another product; give those of "
                "its elements");
  }
  described.shape.assign(shape.begin(), shape.end());
}

void Engine::declare_split(ParameterId parameter, const TensorSplit& split) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kDescribe, "declare_split()");
  impl.check_parameter(parameter, "declare_split()");
  ParameterShape& described = impl.model.units[static_cast<std::size_t>(parameter.unit)]
                                  .parameters[static_cast<std::size_t>(parameter.index)];
  const Result<internal::TensorPlaces> places = internal::TensorPlaces::of(split);
  if (!places.ok())
    impl.misuse("declare_split() of parameter " + described.name + ": " + places.status().message());
  if (places.value().part_count() != described.count) {
    impl.misuse("declare_split() of parameter " + described.name + ", which has " +
                std::to_string(described.count) + " elements, with a split into parts of " +
                std::to_string(places.value().part_count()) +
                "; give the parameter the count of its part, with the padding of the last parts");
  }
  described.split = split;
}

int Engine::tie(UnitId unit, ParameterId parameter) {
  impl_->expect(Impl::Phase::kDescribe, "tie()");
  return impl_->description.tie(unit, {parameter.unit, parameter.index});
}

void Engine::share(UnitId unit, Communicator& stages) {
  impl_->expect(Impl::Phase::kDescribe, "share()");
  if (unit < 0 || unit >= impl_->unit_count())
    impl_->misuse("share() of a unit that was not added; give the number that add_unit() returned");
  if (impl_->options.grid == nullptr)
    impl_->misuse(
        "share() without a grid; set EngineOptions::grid to the communicator of all pipeline stages");
  UnitShape& shape = impl_->model.units[static_cast<std::size_t>(unit)];
  if (shape.shared_by > 1) impl_->misuse("share() of unit " + shape.name + ", which is shared already");
  shape.shared_by = stages.size();
  if (stages.size() > 1) impl_->shared_units.emplace_back(unit, &stages);
}

void Engine::declare_activations(std::uint64_t bytes) {
  impl_->expect(Impl::Phase::kDescribe, "declare_activations()");
  impl_->model.activation_bytes = bytes;
}

const ModelShape& Engine::model() const {
  return impl_->model;
}

Plan Engine::plan() const {
  if (impl_->phase != Impl::Phase::kDescribe) return impl_->plan;
  return value_or_throw(make_plan(impl_->model, impl_->plan_options()));
}

std::uint64_t Engine::activation_room() {
  return impl_->activation_room();
}

void Engine::commit() {
  impl_->commit();
}

DevicePtr Engine::activations() const {
  return impl_->activation_block;
}

void Engine::step_begin() {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "step_begin()");
  impl.expect_own_weights("step_begin()");
  impl.check_peers();
  for (Impl::Unit& unit : impl.units) {
    unit.used = false;
    std::fill(unit.contributed.begin(), unit.contributed.end(), false);
    std::fill(unit.asked.begin(), unit.asked.end(), false);
    unit.leased_backward = false;
  }
  impl.forward_count = 0;
  impl.micro_step = 0;
  impl.norm.reset();
  impl.non_finite = {};
  impl.passes_ended = impl.abandoned = impl.evaluated_in_step = impl.gives_up = false;
  impl.reducer->begin_step();
  impl.phase = Impl::Phase::kStep;
  if (impl.recorded()) {
    impl.prefetch_first(impl.recorder->order().micro_step(0));
  } else {
    impl.gatherer->prefetch(0);
  }
}

void Engine::micro_step_begin(int index) {
  Impl& impl = *impl_;
  if (impl.recorded() && !impl.leases.empty())
    impl.misuse("micro_step_begin() while a lease is alive; end it first");
  impl.finish_pass();
  impl.expect(Impl::Phase::kStep, "micro_step_begin()");
  if (!impl.leases.empty()) impl.misuse("micro_step_begin() while a lease is alive; end it first");
  if (impl.passes_ended || impl.norm) impl.misuse("micro_step_begin() after gradient_norm(); call step()");
  if (impl.micro_step < impl.forward_count && !impl.forward_is_next())
    impl.misuse("micro-step " + std::to_string(impl.micro_step) +
                " has no backward pass; run backward() for all units first");
  if (impl.recorded()) impl.forward_count = impl.micro_step;
  if (index != impl.forward_count || index >= impl.options.micro_steps) {
    impl.misuse("micro_step_begin(" + std::to_string(index) + "): the next of " +
                std::to_string(impl.options.micro_steps) + " micro-steps is " +
                std::to_string(impl.forward_count) + "; begin them in order, and call step() after the last");
  }
  if (impl.recorded()) {
    impl.begin_micro_step(index);
    return;
  }
  for (Impl::Unit& unit : impl.units) unit.skipped[impl.place_in_flight(index)] = false;
  impl.cursor = 0;
  impl.phase = Impl::Phase::kForward;
}

Lease Engine::forward(UnitId unit, Stream stream) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kForward, "forward()");
  impl.expect_stream(stream, "forward()");
  impl.check_peers();
  if (impl.recorded()) {
    if (unit < 0 || unit >= impl.unit_count())
      impl.misuse("forward() of a unit that was not added; give the number that add_unit() returned");
    impl.acquire(unit, false);
    impl.gatherer->wait_for_parameters(unit, stream);
    impl.acquired(unit, false);
    return impl.make_lease(*this, unit, stream, false);
  }
  if (!impl.leases.empty()) impl.misuse("forward() while another lease is alive; end it first");
  if (unit != impl.cursor || unit >= impl.unit_count()) {
    impl.misuse("forward() out of order: the next unit is " +
                (impl.cursor < impl.unit_count() ? impl.shape(impl.cursor).name : std::string("none")) +
                "; lease units in order of registration, and skip() those a micro-step does not use; or set "
                "EngineOptions::order_of_units to recorded");
  }
  impl.gatherer->require(unit);
  impl.gatherer->wait_for_parameters(unit, stream);
  impl.gatherer->prefetch(unit + 1);
  if (!impl.after_evaluation) {
    for (const int needed : units_read_by(impl.model, unit)) impl.unit(needed).used = true;
  }
  ++impl.cursor;
  return impl.make_lease(*this, unit, stream, false);
}

void Engine::skip(UnitId unit) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kForward, "skip()");
  if (impl.recorded()) {
    if (unit < 0 || unit >= impl.unit_count())
      impl.misuse("skip() of a unit that was not added; give the number that add_unit() returned");
    return;
  }
  if (!impl.leases.empty()) impl.misuse("skip() while a lease is alive; end it first");
  if (unit != impl.cursor || unit >= impl.unit_count())
    impl.misuse("skip() out of order: units are leased or skipped in order of registration");
  if (impl.unit(unit).stages != nullptr)
    impl.misuse("skip(" + impl.shape(unit).name + ") of a unit that other stages share; lease it");
  // Other ranks may use the unit, so this rank takes part in its collectives.
  impl.gatherer->require(unit);
  impl.gatherer->prefetch(unit + 1);
  if (!impl.after_evaluation) impl.unit(unit).skipped[impl.place_in_flight(impl.forward_count)] = true;
  ++impl.cursor;
}

Lease Engine::backward(UnitId unit, Stream stream) {
  Impl& impl = *impl_;
  if (impl.phase == Impl::Phase::kFailed) impl.expect(Impl::Phase::kBackward, "backward()");
  impl.expect_stream(stream, "backward()");
  impl.check_peers();
  if (!impl.leases.empty() && !impl.recorded())
    impl.misuse("backward() while another lease is alive; end it first");
  if (unit < 0 || unit >= impl.unit_count())
    impl.misuse("backward() of a unit that was not added; give the number that add_unit() returned");
  if (impl.after_evaluation) impl.misuse("backward() in an evaluation; call evaluation_end() first");
  const std::vector<int> owners = units_read_by(impl.model, unit);
  if (impl.recorded()) {
    impl.expect(Impl::Phase::kForward, "backward()");
    for (const int owner : owners) {
      if (!impl.unit(owner).reduced || impl.unit(owner).backwards == 0) continue;
      impl.misuse(
          "backward(" + impl.shape(unit).name + ") after the gradient of " + impl.shape(owner).name +
          " was complete: it had as many backward as forward leases in this micro-step; begin another "
          "micro-step (EngineOptions::micro_steps is the most in a step), or lease all its forward "
          "passes first");
    }
    impl.acquire(unit, true);
    if (impl.reads(unit, true)) impl.gatherer->wait_for_parameters(unit, stream);
    impl.acquired(unit, true);
  } else {
    impl.begin_backward_of(unit);
    if (impl.shape(unit).backward_reads_parameters) {
      impl.gatherer->require(unit);
      impl.gatherer->wait_for_parameters(unit, stream);
    }
    if (unit > 0 && impl.shape(unit - 1).backward_reads_parameters) impl.gatherer->prefetch(unit - 1);
  }
  // The last reduction out of the gradient buffers must be over before the lease writes them.
  for (const int owner : owners) {
    impl.must(impl.backend.stream_wait(stream, impl.reducer->reduced(owner)));
    impl.reducer->wait_for_copy_down(owner, stream);
    // Gradients of one unit may be added to on several streams, one after the other.
    const Impl::Unit& u = impl.unit(owner);
    if (u.released_on.handle != nullptr && u.released_on != stream)
      impl.must(impl.backend.stream_wait(stream, u.released));
  }
  return impl.make_lease(*this, unit, stream, true);
}

double Engine::loss_scale() const {
  return impl_->loss_scale;
}

StepResult Engine::step(const Hyperparameters& hyperparameters) {
  Impl& impl = *impl_;
  impl.expect_step("step()");
  return impl.step(hyperparameters);
}

void Engine::evaluation_begin() {
  Impl& impl = *impl_;
  impl.expect_own_process();
  if (!impl.leases.empty()) impl.misuse("evaluation_begin() while a lease is alive; end it first");
  impl.begin_evaluation();
}

void Engine::evaluation_end() {
  Impl& impl = *impl_;
  if (impl.phase == Impl::Phase::kFailed) impl.expect(Impl::Phase::kForward, "evaluation_end()");
  if (!impl.after_evaluation) impl.misuse("evaluation_end() needs evaluation_begin() first");
  if (!impl.leases.empty()) impl.misuse("evaluation_end() while a lease is alive; end it first");
  impl.end_evaluation();
}

double Engine::gradient_norm() {
  Impl& impl = *impl_;
  impl.expect_step("gradient_norm()");
  return impl.gradient_norm();
}

void Engine::abandon(int micro_steps) {
  impl_->expect_own_process();
  impl_->abandon(micro_steps);
}

std::string Engine::recorded_order() const {
  const Recorder* const recorder = impl_->recorder.get();
  return recorder != nullptr && recorder->known() ? recorder->order().text() : "";
}

void Engine::spill(const SpillOptions& states) {
  Impl& impl = *impl_;
  impl.expect_own_process();
  // More states may be spilled while some are.
  if (impl.phase != Impl::Phase::kIdle) impl.expect(Impl::Phase::kIdle, "spill()");
  impl.spill(states);
}

void Engine::fetch() {
  Impl& impl = *impl_;
  impl.expect_own_process();
  if (impl.phase != Impl::Phase::kIdle) impl.expect(Impl::Phase::kIdle, "fetch()");
  impl.fetch();
}

void Engine::lock_state(const std::string& directory) {
  impl_->expect(Impl::Phase::kIdle, "lock_state()");
  const Impl::OtherTraffic other(*impl_);
  impl_->lock_state(directory);
}

void Engine::save_state(const std::string& directory, const std::string& trainer_state, int keep) {
  impl_->expect_between_passes("save_state()");
  impl_->expect_own_weights("save_state()");
  if (keep < 1) impl_->misuse("save_state() with keep " + std::to_string(keep) + "; keep 1 state or more");
  const Impl::OtherTraffic other(*impl_);
  impl_->save_state(directory, trainer_state, keep);
}

void Engine::save_state_begin(const std::string& directory, const std::string& trainer_state, int keep) {
  impl_->expect_between_passes("save_state_begin()");
  impl_->expect_own_weights("save_state_begin()");
  if (keep < 1)
    impl_->misuse("save_state_begin() with keep " + std::to_string(keep) + "; keep 1 state or more");
  const Impl::OtherTraffic other(*impl_);
  impl_->begin_save(directory, trainer_state, keep);
}

void Engine::save_state_end() {
  impl_->expect_own_process();
  if (impl_->phase != Impl::Phase::kIdle) impl_->expect_between_passes("save_state_end()");
  const Impl::OtherTraffic other(*impl_);
  impl_->end_save();
}

std::string Engine::load_state(const std::string& directory, std::optional<std::uint64_t> step) {
  impl_->expect(Impl::Phase::kIdle, "load_state()");
  impl_->expect_own_weights("load_state()");
  const Impl::OtherTraffic other(*impl_);
  return impl_->load_state(directory, step);
}

EngineStatistics Engine::statistics() {
  Impl& impl = *impl_;
  EngineStatistics result;
  result.planned = impl.plan.bytes;
  result.planned_reserved_bytes = impl.plan.reserved_bytes;
  result.planned_host_bytes = impl.plan.host_bytes.total();
  result.planned_file_bytes = impl.plan.file_bytes.total();
  result.planned_wire_per_step = impl.plan.wire_per_step;
  result.attempted_steps = impl.attempted_steps;
  result.applied_steps = impl.applied_steps;
  result.wire_speed = impl.wire_speed;
  if (impl.arena == nullptr) return result;
  if (impl.gatherer != nullptr) {
    result.gather_count = impl.gatherer->gather_count();
    if (impl.phase != Impl::Phase::kFailed) {
      impl.engine_stream.synchronize();
      impl.settle_updates();
      impl.updater->wait_for_read_ahead();
    }
  }
  const Traffic traffic = impl.traffic();
  result.traffic = {traffic.sent_bytes - impl.other_traffic.sent_bytes,
                    traffic.received_bytes - impl.other_traffic.received_bytes};
  result.evaluation_traffic = {impl.evaluation_traffic.sent_bytes, impl.evaluation_traffic.received_bytes};
  const auto peak = [&](Pool pool) {
    return static_cast<std::uint64_t>(
        impl.arena->statistics(impl.tags[static_cast<std::size_t>(pool)]).peak_live_bytes);
  };
  result.peak.parameters = peak(Pool::kParameters);
  result.peak.gradients = peak(Pool::kGradients);
  result.peak.optimizer = peak(Pool::kOptimizer);
  result.peak.gathered = peak(Pool::kGathered);
  result.peak.buckets = peak(Pool::kBuckets);
  result.peak.activations = peak(Pool::kActivations);
  result.peak_reserved_bytes = impl.arena->statistics().peak_reserved_bytes;
  result.host_placement = impl.host_placement.text;
  if (const auto host = impl.memory(Pool::kHost); !host.empty())
    result.host_bytes = impl.pinned->block_bytes(host.data());
  for (const auto* buffers : {impl.pass_buffers.get(), impl.mover_buffers.get()}) {
    if (buffers != nullptr) result.host_bytes += buffers->memory().size();
  }
  if (impl.store != nullptr) {
    const StoreStatistics moved = impl.store->statistics();
    result.file_bytes = moved.range_bytes;
    result.file_read_bytes = moved.read_bytes;
    result.file_written_bytes = moved.written_bytes;
    result.store_description = impl.store_description;
  }
  return result;
}

std::vector<OperationTraffic> Engine::operation_traffic() const {
  const Impl& impl = *impl_;
  std::vector<OperationTraffic> sum = impl.communicator.operation_traffic();
  if (impl.grouped != nullptr) {
    add_operation_traffic(sum, impl.grouped->operation_traffic(), impl.ranks(),
                          [](int peer) { return peer; });
  }
  // The deciding ranks are in the order of their parts.
  if (impl.deciding != nullptr && impl.options.grid == nullptr) {
    add_operation_traffic(sum, impl.deciding->operation_traffic(), impl.ranks(), [&](int part) {
      return part % impl.replicas() * impl.shards() + part / impl.replicas();
    });
  }
  return sum;
}

const EngineOptions& Engine::options() const {
  return impl_->options;
}
std::uint64_t Engine::attempted_steps() const {
  return impl_->attempted_steps;
}
std::uint64_t Engine::applied_steps() const {
  return impl_->applied_steps;
}
std::uint64_t Engine::open_steps() const {
  switch (impl_->phase) {
    case Impl::Phase::kStep:
    case Impl::Phase::kBackward:
      return 1;
    case Impl::Phase::kForward:
      return impl_->after_evaluation == Impl::Phase::kIdle ? 0 : 1;
    default:
      return 0;
  }
}
std::uint64_t Engine::begun_micro_steps() const {
  if (open_steps() == 0) return 0;
  const bool in_forward = impl_->phase == Impl::Phase::kForward && !impl_->after_evaluation;
  return static_cast<std::uint64_t>((impl_->recorded() ? impl_->micro_step : impl_->forward_count) +
                                    (in_forward ? 1 : 0));
}
std::uint64_t Engine::open_evaluations() const {
  return impl_->after_evaluation && impl_->phase == Impl::Phase::kForward ? 1 : 0;
}
std::uint64_t Engine::open_leases() const {
  return impl_->leases.size();
}
std::uint64_t Engine::committed_step() const {
  return impl_->attempted_steps;
}

}  // namespace forebay
