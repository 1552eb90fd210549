// One step: gathers ahead of the trainer, reductions behind it, and the update.

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>

#include "forebay/check.h"
#include "forebay/host_adam.h"
#include "forebay/host_gradients.h"
#include "forebay/log.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {
namespace {

float fp32(double value) {
  return static_cast<float>(value);
}

// What must be the same on every rank, as a whole number that a double holds exactly.
double fingerprint_of(const Hyperparameters& hyperparameters, std::uint64_t values_fingerprint) {
  std::vector<double> words{hyperparameters.clip};
  for (const GroupHyperparameters& group : hyperparameters.groups) {
    words.push_back(group.lr);
    words.push_back(group.weight_decay);
  }
  const std::uint64_t hash =
      XXH3_64bits_withSeed(words.data(), words.size() * sizeof(double), values_fingerprint);
  return static_cast<double>(hash >> 12);
}

}  // namespace

// --- gathers ---

void Engine::Impl::all_gather_section(DevicePtr base, const std::byte* own_slice, std::uint64_t slice_bytes) {
  if (slice_bytes == 0) return;
  AllGatherArguments arguments;
  arguments.source = own_slice;
  arguments.target = base;
  arguments.target_stride_bytes = slice_bytes;
  arguments.bytes = slice_bytes;
  must(sharded().all_gather(arguments, engine_stream));
}

void Engine::Impl::gather(int index) {
  Unit& u = unit(index);
  const int slot = parameter_slot(index);
  int& user = slot_user[static_cast<std::size_t>(slot)];
  if (user >= 0) must(backend.stream_wait(engine_stream, unit(user).released));
  if (!options.overlap && last_leased >= 0)
    must(backend.stream_wait(engine_stream, unit(last_leased).released));
  const std::uint64_t slice = layout(index).trainable_slice(shards()) * element();
  const std::uint64_t frozen_slice = layout(index).frozen_slice(shards()) * element();
  DevicePtr const frozen = u.parameters + layout(index).trainable_count * element();
  const std::byte* mine = u.parameter_shard;
  const std::byte* my_frozen = u.parameter_shard + slice;
  if (u.parameters_away) {
    // Straight to their place among the others'.
    mine = u.parameters + static_cast<std::uint64_t>(shard()) * slice;
    my_frozen = frozen + static_cast<std::uint64_t>(shard()) * frozen_slice;
    fetch_parameters(index, slot);
  } else {
    must(backend.stream_wait(engine_stream, u.updated));
  }
  user = index;
  const MarkedSpan span = marked(engine_stream, "engine", "gather", index);
  all_gather_section(u.parameters, mine, slice);
  all_gather_section(frozen, my_frozen, frozen_slice);
  must(backend.event_record(slot_ready[static_cast<std::size_t>(slot)], engine_stream));
  ++gather_count;
}

// This rank's slices come up when the slot's last user is through with it and the unit's last update has been
// made. They need no place of their own on the device.
void Engine::Impl::fetch_parameters(int index, int slot) {
  Unit& u = unit(index);
  const auto slot_index = static_cast<std::size_t>(slot);
  const std::uint64_t slice = layout(index).trainable_slice(shards()) * element();
  const std::uint64_t frozen_slice = layout(index).frozen_slice(shards()) * element();
  const auto shard_index = static_cast<std::uint64_t>(shard());
  if (const int user = slot_user[slot_index]; user >= 0)
    must(backend.stream_wait(fetch_stream, unit(user).released));
  if (!options.overlap && last_leased >= 0)
    must(backend.stream_wait(fetch_stream, unit(last_leased).released));
  must(backend.stream_wait(fetch_stream, slot_ready[slot_index]));
  must(backend.stream_wait(fetch_stream, u.updated));
  const auto fetch = [&](const Away& away, std::uint64_t bytes, DevicePtr target) {
    if (bytes == 0) return;
    if (away.host != nullptr) {
      must(backend.copy_async(target, away.host, bytes, fetch_stream));
    } else {
      must(mover->fetch({away.range, 0, bytes, away.range_bytes}, target));
    }
  };
  const MarkedSpan span = marked(fetch_stream, "parameters up", "fetch", index);
  fetch(u.trainable_away, slice, u.parameters + shard_index * slice);
  fetch(u.frozen_away, frozen_slice,
        u.parameters + layout(index).trainable_count * element() + shard_index * frozen_slice);
  must(backend.event_record(slot_fetched[slot_index], fetch_stream));
  must(backend.stream_wait(engine_stream, slot_fetched[slot_index]));
}

void Engine::Impl::require(int index) {
  if (options.stage < 3) return;
  for (const int needed : units_read_by(model, index)) {
    if (parameter_slot(needed) == SlotAssignment::kNone) continue;
    if (residency->take(needed, version)) gather(needed);
  }
}

void Engine::Impl::prefetch(int index) {
  if (options.overlap && index >= 0 && index < unit_count()) require(index);
}

void Engine::Impl::wait_for_parameters(int index, Stream stream) {
  for (const int needed : units_read_by(model, index)) {
    if (options.stage < 3) {
      must(backend.stream_wait(stream, unit(needed).parameters_ready));
    } else if (const int slot = parameter_slot(needed); slot != SlotAssignment::kNone) {
      must(backend.stream_wait(stream, slot_ready[static_cast<std::size_t>(slot)]));
    }
  }
}

// --- the order of units ---

bool Engine::Impl::skipped(int end) const {
  const std::size_t place = place_in_flight(micro_step);
  return std::all_of(units.begin(), units.begin() + end, [&](const Unit& u) { return u.skipped[place]; });
}

void Engine::Impl::begin_backward() {
  if (options.accumulate == Accumulate::kShard) {
    for (Unit& u : units) std::fill(u.contributed.begin(), u.contributed.end(), false);
  }
  cursor = unit_count();
  phase = Phase::kBackward;
}

void Engine::Impl::begin_backward_of(int index) {
  if (phase == Phase::kForward && cursor != unit_count()) {
    misuse("backward(" + shape(index).name + ") was called before unit " + shape(cursor).name +
           " had its forward pass; lease it forward or skip it");
  }
  // The backward pass before this one may have ended with the units below.
  if (phase == Phase::kForward || (phase == Phase::kBackward && index >= cursor && skipped(cursor)))
    finish_pass();
  if (phase == Phase::kStep && micro_step < forward_count) {
    if (forward_is_next()) {
      misuse("backward(" + shape(index).name + ") comes after the forward pass of micro-step " +
             std::to_string(forward_count) + ": the engine was made for " +
             std::to_string(options.forwards_ahead) + " forward passes ahead");
    }
    begin_backward();
  }
  if (phase != Phase::kBackward) misuse("backward() needs micro_step_begin() and the forward pass before it");
  const std::size_t place = place_in_flight(micro_step);
  while (cursor - 1 > index && unit(cursor - 1).skipped[place]) pass_skipped(cursor - 1);
  if (cursor - 1 != index)
    misuse("backward(" + shape(index).name + ") is out of order: the next unit is " + shape(cursor - 1).name);
  if (unit(index).skipped[place])
    misuse("backward(" + shape(index).name + ") of a unit that forward skipped");
}

// What backward() and the end of its lease do on the other ranks, with zeros for gradients.
void Engine::Impl::pass_skipped(int index) {
  if (shape(index).backward_reads_parameters) require(index);
  if (index > 0 && shape(index - 1).backward_reads_parameters) prefetch(index - 1);
  cursor = index;
  if (unit(index).away) must(backend.stream_wait(engine_stream, unit(index).left));
  complete_gradients(index, engine_stream);
  reduce(index);
}

void Engine::Impl::finish_backward() {
  const std::size_t place = place_in_flight(micro_step);
  while (cursor > 0) {
    if (!unit(cursor - 1).skipped[place]) {
      misuse("unit " + shape(cursor - 1).name + " had a forward and no backward pass in micro-step " +
             std::to_string(micro_step));
    }
    pass_skipped(cursor - 1);
  }
  phase = Phase::kStep;
  ++micro_step;
}

// Ends the pass that is open, and goes through the backward passes that come next and that this rank has no
// part in.
void Engine::Impl::finish_pass() {
  if (phase == Phase::kForward) {
    if (cursor < unit_count()) {
      misuse("unit " + shape(cursor).name + " has no forward pass in micro-step " +
             std::to_string(forward_count) + "; lease it forward or skip it");
    }
    phase = Phase::kStep;
    ++forward_count;
  } else if (phase == Phase::kBackward) {
    finish_backward();
  }
  while (phase == Phase::kStep && micro_step < forward_count && !forward_is_next() && skipped(unit_count())) {
    begin_backward();
    finish_backward();
  }
}

// --- leases ---

Lease::Lease(Engine* engine, UnitId unit, Stream stream, bool backward)
    : engine_(engine), unit_(unit), stream_(stream), backward_(backward) {}

Lease::Lease(Lease&& other) noexcept {
  *this = std::move(other);
}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  if (engine_ != nullptr) engine_->impl_->end_lease(unit_, stream_, backward_);
  engine_ = std::exchange(other.engine_, nullptr);
  unit_ = other.unit_;
  stream_ = other.stream_;
  backward_ = other.backward_;
  return *this;
}

Lease::~Lease() {
  if (engine_ != nullptr) engine_->impl_->end_lease(unit_, stream_, backward_);
}

ParameterId Engine::Impl::resolve(int index_of_unit, int index) {
  const UnitShape& own = shape(index_of_unit);
  const int own_count = static_cast<int>(own.parameters.size());
  if (index >= 0 && index < own_count) return {index_of_unit, index};
  if (index < 0 || index - own_count >= static_cast<int>(own.tied.size())) {
    misuse("unit " + own.name + " has no parameter " + std::to_string(index));
  }
  const UnitShape::Tied& tied = own.tied[static_cast<std::size_t>(index - own_count)];
  return {tied.unit, tied.index};
}

namespace {

void expect_alive(const Engine* engine) {
  if (engine == nullptr)
    throw Error(StatusCode::kInvalidArgument, "this lease was moved from; use the one it went to");
}

}  // namespace

DevicePtr Lease::parameter(int index) const {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  const ParameterId id = impl.resolve(unit_, index);
  if (backward_ && !impl.shape(unit_).backward_reads_parameters) {
    impl.misuse("unit " + impl.shape(unit_).name +
                " was added as one whose backward pass reads no parameters, so none are gathered for it");
  }
  const UnitLayout& layout = impl.layout(id.unit);
  const UnitLayout::Place& place = layout.places[static_cast<std::size_t>(id.index)];
  const std::uint64_t offset = (place.frozen ? layout.trainable_count : 0) + place.offset;
  return impl.unit(id.unit).parameters + offset * impl.element();
}

DevicePtr Lease::gradient(int index, bool* accumulate) {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  if (!backward_) impl.misuse("gradient() belongs to the backward pass of unit " + impl.shape(unit_).name);
  if (accumulate == nullptr)
    impl.misuse("gradient() needs a place to say \"=\" or \"+=\": accumulate is null");
  const ParameterId id = impl.resolve(unit_, index);
  const UnitLayout::Place& place = impl.layout(id.unit).places[static_cast<std::size_t>(id.index)];
  if (place.frozen) return nullptr;
  Engine::Impl::Unit& owner = impl.unit(id.unit);
  int& answer = impl.lease_answer[static_cast<std::size_t>(index)];
  if (answer < 0) {
    answer = owner.contributed[static_cast<std::size_t>(id.index)] ? 1 : 0;
    owner.contributed[static_cast<std::size_t>(id.index)] = true;
  }
  *accumulate = answer == 1;
  return owner.gradients + place.offset * impl.element();
}

void Lease::grad_ready(int index) {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  if (!backward_) impl.misuse("grad_ready() belongs to the backward pass of unit " + impl.shape(unit_).name);
  static_cast<void>(impl.resolve(unit_, index));
}

void Engine::Impl::end_lease(int index, Stream stream, bool backward) noexcept {
  lease_alive = false;
  if (phase == Phase::kFailed) {
    static_cast<void>(backend.event_record(unit(index).released, stream));  // The engine's end waits for it.
    return;
  }
  try {
    if (options.timeline != nullptr) {
      end_span(backend, options.timeline, stream, "trainer",
               (backward ? "backward " : "forward ") + shape(index).name);
    }
    if (backward) complete_gradients(index, stream);
    must(backend.event_record(unit(index).released, stream));
    last_leased = index;
    if (!backward) return;
    must(backend.stream_wait(engine_stream, unit(index).released));
    cursor = index;
    reduce(index);
    if (!options.overlap) {
      must(backend.stream_wait(stream, reduced(index)));
    }
  } catch (const Error& error) {
    // A destructor has nobody to tell; the next call on the engine throws this.
    phase = Phase::kFailed;
    failure = error.status();
  }
}

// --- the update ---

// What the ranks tell each other as hosts: metrics, who wants to stop, and whether all were given the same.
// Returns which units some rank used.
std::vector<bool> Engine::Impl::agree_on_step(const Hyperparameters& hyperparameters, StepResult& result) {
  const std::size_t count = units.size();
  constexpr std::size_t kUsed = kStepFacts;
  std::vector<double> mine(kUsed + count);
  mine[0] = hyperparameters.metric;
  mine[1] = hyperparameters.stop ? 1.0 : 0.0;
  mine[2] = fingerprint_of(hyperparameters, values_fingerprint);
  for (std::size_t i = 0; i < count; ++i) mine[kUsed + i] = units[i].used ? 1.0 : 0.0;
  std::vector<double> all(mine.size() * static_cast<std::size_t>(ranks()));
  must(communicator.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));

  std::vector<bool> used(count, false);
  for (std::size_t r = 0; r < static_cast<std::size_t>(ranks()); ++r) {
    const double* theirs = &all[r * mine.size()];
    result.metric_sum += theirs[0];
    result.stop = result.stop || theirs[1] != 0.0;
    if (theirs[2] != all[2]) {
      must(Status(StatusCode::kInvalidArgument,
                  "rank " + std::to_string(r) +
                      " gave other values to step() or set_parameter() than rank 0 by step " +
                      std::to_string(attempted_steps + 1) +
                      "; learning rates, weight decay, clip and initial " +
                      "weights must be the same on every rank"));
    }
    for (std::size_t i = 0; i < count; ++i) used[i] = used[i] || theirs[kUsed + i] != 0.0;
  }
  if (options.grid != nullptr) agree_over_grid(hyperparameters, result);
  return used;
}

void Engine::Impl::agree_over_grid(const Hyperparameters& hyperparameters, StepResult& result) {
  const std::array<double, kStepFacts> mine = {hyperparameters.metric, hyperparameters.stop ? 1.0 : 0.0,
                                               fingerprint_of(hyperparameters, 0)};
  std::vector<std::array<double, kStepFacts>> all(static_cast<std::size_t>(deciders().size()));
  must(deciders().exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
  result.metric_sum = 0.0;
  for (const std::array<double, kStepFacts>& theirs : all) {
    result.metric_sum += theirs[0];
    result.stop = result.stop || theirs[1] != 0.0;
    if (theirs[2] != all[0][2]) {
      must(Status(StatusCode::kInvalidArgument,
                  "the ranks of the grid gave different values to step() for step " +
                      std::to_string(attempted_steps + 1) +
                      "; learning rates, weight decay and clip must be the same on every rank"));
    }
  }
}

// The commit point: after this gather every rank's device knows the same norm and takes the same decision,
// and when it fails on some of them, what settle_decision() finds.
void Engine::Impl::queue_decision(double clip) {
  // The updates of the last step still read what it decided.
  must(backend.stream_wait(engine_stream, updates_done));
  if (offloads()) must(backend.stream_wait(engine_stream, tier_done));
  uploaded->state = {.attempted_steps = attempted_steps,
                     .applied_steps = applied_steps,
                     .loss_scale = loss_scale,
                     .growth_counter = growth_counter};
  bias_corrections(options.beta1, options.beta2, applied_steps + 1, &uploaded->correction, 1);
  must(backend.copy_async(control, uploaded, sizeof(StepControl), engine_stream));
  // A gather that fails does nothing. What it leaves here is not a number, so the step is skipped.
  const auto norm_count = static_cast<std::size_t>(std::max<std::uint64_t>(units.size(), deciding_units));
  const std::uint64_t norm_bytes = norm_count * sizeof(double);
  const int deciding_ranks = deciders().size();
  must(backend.fill_async(staging, 0xFF, norm_bytes * static_cast<std::uint64_t>(deciding_ranks),
                          engine_stream));
  must(backend.event_record(averaged, average_stream));
  must(backend.stream_wait(engine_stream, averaged));
  if (offloads() && adds_on_host()) {
    for (const Unit& u : units) {
      if (!u.host_sums.empty()) must(backend.stream_wait(engine_stream, u.left));
    }
  }
  must(deciders().all_gather({.source = reinterpret_cast<const std::byte*>(norms),
                              .target = staging,
                              .target_stride_bytes = norm_bytes,
                              .bytes = norm_bytes},
                             engine_stream));
  StepControlArguments arguments{};
  arguments.state = &control->state;
  arguments.squares = reinterpret_cast<const double*>(staging);
  arguments.scratch =
      reinterpret_cast<double*>(staging) + norm_count * static_cast<std::size_t>(deciding_ranks);
  arguments.rank_stride = norm_count;
  arguments.unit_count = norm_count;
  arguments.rank_count = deciding_ranks;
  arguments.clip = clip;
  arguments.corrections = &control->correction;
  arguments.first_step = applied_steps + 1;
  arguments.correction_count = 1;
  arguments.dynamic_loss_scale = options.dtype == DataType::kFloat16;
  arguments.growth_interval = options.loss_scale.growth_interval;
  arguments.minimum_loss_scale = options.loss_scale.minimum;
  must(kernels.step_control(arguments, engine_stream));
  must(backend.copy_async(decided, &control->state, sizeof(StepState), engine_stream));
  committed = true;
  if (deciding_ranks > 1) {
    must(backend.call_host(
        engine_stream, [](void* argument) { static_cast<Impl*>(argument)->settle_decision(); }, this));
    must(backend.copy_async(&control->state, decided, sizeof(StepState), engine_stream));
  }
  must(backend.event_record(step_decided, engine_stream));
}

// Runs in the order of engine_stream. A rank that has seen the norms of all says so before it acts on them;
// one for which the gather failed takes the decision of any that has, and otherwise none.
void Engine::Impl::settle_decision() {
  const std::uint64_t step = attempted_steps + 1;
  committed = deciders().vote(step, std::as_bytes(std::span(decided, 1))).ok();
  if (committed) return;
  const std::optional<std::vector<std::byte>> vote = deciders().survivors_vote(step);
  committed = vote && vote->size() == sizeof(StepState);
  if (committed) {
    std::memcpy(decided, vote->data(), sizeof(StepState));
  } else {
    decided->outcome = StepOutcome::kSkipped;
  }
}

void Engine::Impl::queue_update(const Hyperparameters& hyperparameters, const std::vector<bool>& used) {
  ControlledAdamWArguments controlled{};
  controlled.state = &control->state;
  AdamWArguments& adamw = controlled.update;
  adamw = adamw_arguments();
  if (offloads_to_files()) {
    // Reading begins while the ranks agree.
    HostPass& host_pass = host_passes[attempted_steps % 2];
    host_pass.parts.clear();
    for (int index = 0; index < unit_count(); ++index) {
      const Unit& u = unit(index);
      if (!used[static_cast<std::size_t>(index)]) continue;
      for (std::size_t i = 0; i < u.part_count; ++i) host_pass.parts.push_back(&pass_parts[u.first_part + i]);
    }
    must(backend.call_host(
        tier_stream,
        [](void* argument) {
          const auto& given = *static_cast<const HostPass*>(argument);
          given.impl->pass->begin(given.parts);
        },
        &host_pass));
  }
  if (offloads()) must(backend.stream_wait(tier_stream, step_decided));
  must(backend.stream_wait(update_stream, step_decided));
  for (int index = 0; index < unit_count(); ++index) {
    Unit& u = unit(index);
    if (u.away) {
      if (used[static_cast<std::size_t>(index)]) queue_host_update(index, hyperparameters);
    } else if (u.updated_count > 0 && used[static_cast<std::size_t>(index)]) {
      const MarkedSpan span = marked(update_stream, "updates", "update", index);
      adamw.gradient_type = u.gradient_type;
      for (const Segment& segment : u.segments) {
        const GroupHyperparameters& group = hyperparameters.groups[static_cast<std::size_t>(segment.group)];
        adamw.lr = fp32(group.lr);
        adamw.weight_decay = fp32(group.weight_decay);
        adamw.gradient = u.updated_gradients + segment.begin * element_bytes(u.gradient_type);
        adamw.master = u.master + segment.begin;
        adamw.m = u.m + segment.begin;
        adamw.v = u.v + segment.begin;
        adamw.parameter = options.dtype == DataType::kFloat32
                              ? nullptr
                              : static_cast<void*>(u.updated_parameters + segment.begin * element());
        adamw.count = segment.count;
        must(kernels.adamw_controlled(controlled, update_stream));
      }
      must(backend.event_record(u.updated, update_stream));
    }
    // At stage 3 the next gather waits for it.
    if (options.stage < 3) must(backend.stream_wait(engine_stream, u.updated));
    if (u.updated_count > 0 && used[static_cast<std::size_t>(index)] &&
        (options.stage == 1 || options.stage == 2)) {
      gather_updated(u);
    }
    must(backend.event_record(u.parameters_ready, engine_stream));
  }
  if (offloads_to_files()) {
    must(backend.call_host(
        tier_stream,
        [](void* argument) {
          const auto& given = *static_cast<const HostPass*>(argument);
          Impl& impl = *given.impl;
          const Status written = impl.pass->finish();
          if (!written.ok()) {
            impl.fail_tier(written);
          } else {
            impl.pass->begin(given.parts);  // Most likely what the next step begins with.
          }
        },
        &all_parts));
  }
  must(backend.event_record(updates_done, update_stream));
  if (offloads()) must(backend.event_record(tier_done, tier_stream));
}

// A step that is committed is finished on every rank that is left, whether or not the ranks still reach each
// other: a failure is told once all is queued.
void Engine::Impl::gather_updated(const Unit& u) {
  const std::uint64_t bytes = u.updated_count * element();
  static_cast<void>(sharded().all_gather(
      {.source = u.updated_parameters, .target = u.parameters, .target_stride_bytes = bytes, .bytes = bytes},
      engine_stream));
}

AdamWArguments Engine::Impl::adamw_arguments() const {
  AdamWArguments adamw{};
  adamw.parameter_type = options.dtype;
  adamw.beta1 = fp32(options.beta1);
  adamw.beta2 = fp32(options.beta2);
  adamw.eps = fp32(options.epsilon);
  adamw.a1 = fp32(1.0 - options.beta1);
  adamw.a2 = fp32(1.0 - options.beta2);
  return adamw;
}

// The update on the host, and its parameters to the device. Whoever reads them waits for `updated`.
void Engine::Impl::queue_host_update(int index, const Hyperparameters& hyperparameters) {
  Unit& u = unit(index);
  if (u.updated_count == 0) return;
  HostUpdate& update = host_updates[attempted_steps % 2][static_cast<std::size_t>(index)];
  update.groups = hyperparameters.groups;
  {
    const MarkedSpan span = marked(tier_stream, "host", "update", index);
    must(backend.call_host(
        tier_stream,
        [](void* argument) {
          const auto& given = *static_cast<const HostUpdate*>(argument);
          given.impl->update_on_host(given);
        },
        &update));
  }
  if (u.parameters_away) {
    must(backend.event_record(u.updated, tier_stream));
  } else {
    must(backend.event_record(u.host_done, tier_stream));
    must(backend.stream_wait(up_stream, u.host_done));
    const bool is_master = options.dtype == DataType::kFloat32 && u.master != nullptr;
    const void* const source =
        is_master ? static_cast<const void*>(u.master) : static_cast<const void*>(u.host_gradients);
    const MarkedSpan span = marked(up_stream, "parameters up", "up", index);
    must(backend.copy_async(u.updated_parameters, source, u.updated_count * element(), up_stream));
    must(backend.event_record(u.updated, up_stream));
  }
}

// Runs in the order of tier_stream, after `decided` has come down; calls nothing of the Backend.
void Engine::Impl::update_on_host(const HostUpdate& update) {
  if (tier_failed.load(std::memory_order_acquire)) return;
  Unit& u = unit(update.unit);
  if (u.part_count > 0) {
    update_in_files(update);
    return;
  }
  std::byte* parameters = nullptr;
  if (options.dtype != DataType::kFloat32)
    parameters = u.parameters_away ? u.trainable_away.host : u.host_gradients;
  if (decided->outcome == StepOutcome::kApplied) {
    update_part(update, 0, u.updated_count, u.master, u.m, u.v, parameters);
  } else if (parameters != nullptr && !u.parameters_away) {
    // What goes up are the parameters as they were.
    round_parameters(options.dtype, u.master, u.updated_count, parameters);
  }
}

// The same, piece by piece as they come from the store.
void Engine::Impl::update_in_files(const HostUpdate& update) {
  Unit& u = unit(update.unit);
  const bool applied = decided->outcome == StepOutcome::kApplied;
  for (std::size_t i = 0; i < u.part_count; ++i) {
    const StorePassPart& part = pass_parts[u.first_part + i];
    const std::uint64_t begin = i * plan.piece_count;
    const std::uint64_t count = std::min(plan.piece_count, u.updated_count - begin);
    const Result<std::byte*> memory = pass->next();
    if (!memory.ok()) {
      fail_tier(memory.status());
      return;
    }
    const auto field = [&](std::size_t index) { return memory.value() + part.field_offset(index); };
    auto* const master = reinterpret_cast<float*>(field(0));
    std::byte* const ready = u.host_gradients + begin * element();  // Where parameters go up from.
    if (options.dtype == DataType::kFloat32) {
      if (applied) {
        update_part(update, begin, count, master, reinterpret_cast<float*>(field(1)),
                    reinterpret_cast<float*>(field(2)), nullptr);
      }
      if (!u.parameters_away) std::memcpy(ready, master, count * sizeof(float));
    } else if (applied) {
      update_part(update, begin, count, master, reinterpret_cast<float*>(field(1)),
                  reinterpret_cast<float*>(field(2)), u.parameters_away ? field(kStateFieldCount) : ready);
    } else if (!u.parameters_away) {
      round_parameters(options.dtype, master, count, ready);
    }
    if (const Status status = pass->done(applied); !status.ok()) {
      fail_tier(status);
      return;
    }
  }
  // The next gather reads what is being written. The next unit is being read meanwhile.
  if (!u.parameters_away) return;
  if (const Status status = pass->finish(); !status.ok()) fail_tier(status);
}

// Updates elements [begin, begin + count) of a unit's updated range. The four addresses are those of the
// first.
void Engine::Impl::update_part(const HostUpdate& given, std::uint64_t begin, std::uint64_t count,
                               float* master, float* m, float* v, std::byte* parameters) {
  if (hooks.before_host_update) hooks.before_host_update(count);
  const Unit& u = unit(given.unit);
  AdamWArguments adamw = adamw_arguments();
  adamw.gradient_type = u.gradient_type;
  adamw.factor = decided->factor;
  adamw.c1 = decided->c1;
  adamw.s2 = decided->s2;
  const auto update = [this](const AdamWArguments& arguments, float* its_m, float* its_v) {
    HostAdamArguments step{};
    step.update = arguments;
    step.moments = {MomentFormat::kFloat32, its_m, its_v, nullptr, nullptr};
    const Status status = host_adam(step, *host_runner);
    FOREBAY_CHECK(status.ok(), "%s", status.to_string().c_str());
  };
  for (const Segment& segment : u.segments) {
    const std::uint64_t first = std::max(begin, segment.begin);
    const std::uint64_t end = std::min(begin + count, segment.begin + segment.count);
    if (first >= end) continue;
    const std::uint64_t at = first - begin;
    const GroupHyperparameters& group = given.groups[static_cast<std::size_t>(segment.group)];
    adamw.lr = fp32(group.lr);
    adamw.weight_decay = fp32(group.weight_decay);
    adamw.gradient = u.host_gradients + first * element_bytes(u.gradient_type);
    adamw.master = master + at;
    adamw.parameter = parameters == nullptr ? nullptr : parameters + at * element();
    adamw.count = end - first;
    if (parameters == nullptr || u.parameters_away || element_bytes(u.gradient_type) == element()) {
      update(adamw, m + at, v + at);
      continue;
    }
    // The parameters take the place of gradients twice their size: of those that have been used.
    for (std::uint64_t done = 0; done < end - first; done += kRoundedCount) {
      AdamWArguments some = adamw;
      some.gradient = static_cast<const float*>(adamw.gradient) + done;
      some.master = adamw.master + done;
      some.parameter = rounded.data();
      some.count = std::min(kRoundedCount, end - first - done);
      update(some, m + at + done, v + at + done);
      std::memcpy(parameters + (at + done) * element(), rounded.data(), some.count * element());
    }
  }
}

void Engine::Impl::fail_tier(const Status& status) {
  const std::lock_guard lock(tier_mutex);
  if (tier_failure.ok()) tier_failure = status.with_context("the offloaded states failed");
  tier_failed.store(true, std::memory_order_release);
}

Status Engine::Impl::tier_status() const {
  const std::lock_guard lock(tier_mutex);
  return tier_failure;
}

StepResult Engine::Impl::step(const Hyperparameters& hyperparameters) {
  finish_pass();
  if (micro_step < forward_count)
    misuse("micro-step " + std::to_string(micro_step) + " has no backward pass");
  if (phase != Phase::kStep || micro_step != options.micro_steps) {
    misuse("step() after " + std::to_string(micro_step) + " micro-steps; the engine was made for " +
           std::to_string(options.micro_steps));
  }
  if (static_cast<int>(hyperparameters.groups.size()) < group_count) {
    misuse("step() was given hyperparameters for " + std::to_string(hyperparameters.groups.size()) +
           " groups; the model has " + std::to_string(group_count));
  }
  for (const GroupHyperparameters& group : hyperparameters.groups) {
    if (!std::isfinite(group.lr) || !std::isfinite(group.weight_decay)) {
      misuse("step() was given lr " + std::to_string(group.lr) + " and weight decay " +
             std::to_string(group.weight_decay) + "; both must be finite");
    }
  }
  if (!(hyperparameters.clip >= 0.0)) {
    misuse("step() was given clip " + std::to_string(hyperparameters.clip) + "; use 0 for none, or more");
  }
  check_peers();
  StepResult result;
  result.loss_scale = loss_scale;
  const std::vector<bool> used = agree_on_step(hyperparameters, result);
  // The whole step is queued before the host waits to learn what became of it, so the device does not wait
  // for the host between its last reduction and the update.
  queue_decision(hyperparameters.clip);
  queue_update(hyperparameters, used);
  must(backend.event_synchronize(step_decided));
  if (!committed) {
    check_peers();
    must(Status(StatusCode::kInternal, "step " + std::to_string(attempted_steps + 1) +
                                           " was not committed though no rank failed, which is a defect of "
                                           "forebay; please report it"));
  }

  ++attempted_steps;
  loss_scale = decided->loss_scale;
  growth_counter = decided->growth_counter;
  switch (decided->outcome) {
    case StepOutcome::kApplied:
      result.grad_norm = decided->grad_norm;
      ++applied_steps;
      if (options.stage >= 3) ++version;
      break;
    case StepOutcome::kSkipped:
      result.skipped = true;
      break;
    case StepOutcome::kNone:
    case StepOutcome::kNoCorrection:
      must(Status(StatusCode::kInternal, "the device took no decision about step " +
                                             std::to_string(attempted_steps) +
                                             ", which is a defect of forebay; please report it"));
  }
  check_peers();
  if (!options.overlap) {
    must(backend.stream_synchronize(engine_stream));
    must(backend.stream_synchronize(average_stream));
    must(backend.stream_synchronize(update_stream));
    check_peers();
  }
  phase = Phase::kIdle;
  return result;
}

}  // namespace forebay
