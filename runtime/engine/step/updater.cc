#include "runtime/engine/step/updater.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "forebay/check.h"
#include "forebay/conversions.h"
#include "forebay/host_adam.h"
#include "forebay/host_muon.h"
#include "forebay/stream_copy.h"
#include "runtime/engine/step/decision.h"
#include "runtime/engine/step/factored_moments.h"
#include "runtime/engine/step/matrix_updates.h"

namespace forebay {
namespace {

// Bytes that one thread copies at once. Smaller: more waiting for each other. Larger: the threads end
// unevenly.
constexpr std::size_t kCopiedBytes = 1u << 20;

float fp32(double value) {
  return static_cast<float>(value);
}

}  // namespace

AdamWArguments adamw_arguments(const EngineOptions& options, const GroupHyperparameters& group) {
  const double beta1 = group.beta1.value_or(options.beta1);
  const double beta2 = group.beta2.value_or(options.beta2);
  AdamWArguments adamw{};
  // Muon updates single elements so.
  adamw.optimizer = options.optimizer == Optimizer::kMuon ? Optimizer::kAdamW : options.optimizer;
  adamw.parameter_type = options.dtype;
  adamw.beta1 = fp32(beta1);
  adamw.beta2 = fp32(beta2);
  adamw.eps = fp32(group.epsilon.value_or(options.epsilon));
  adamw.a1 = fp32(1.0 - beta1);
  adamw.a2 = fp32(1.0 - beta2);
  return adamw;
}

MasterMove move_of(const KeptUpdateArguments& kept) {
  MasterMove move;
  move.decay = -(kept.update.lr * kept.update.weight_decay);
  move.master = kept.update.master;
  move.parameter = kept.update.parameter;
  move.parameter_type = kept.update.parameter_type;
  move.half = kept.half;
  move.average = kept.average;
  move.average_weight = kept.average_weight;
  return move;
}

void round_parameters(DataType type, const float* source, std::uint64_t count, std::byte* target) {
  auto* half = reinterpret_cast<std::uint16_t*>(target);
  for (std::uint64_t i = 0; i < count; ++i) {
    half[i] = type == DataType::kBfloat16 ? float_to_bfloat16(source[i]) : float_to_float16(source[i]);
  }
}

Updater::Updater(StepContext& context, const Decision& decision)
    : StepPart(context),
      decision_(decision),
      updated_on_host_(context.units.size()),
      copied_on_device_(context),
      device_done_(context),
      device_stream_(context),
      host_stream_(context),
      up_stream_(context) {
  device_stream_.open();
  const std::size_t table_bytes = static_cast<std::size_t>(context.group_count) * sizeof(BiasCorrection);
  for (BiasCorrection*& table : corrections_) {
    table = reinterpret_cast<BiasCorrection*>(value_or_throw(context.pinned->allocate(table_bytes)));
  }
  const bool copies_on_host = context.options.save_async && backend_.capabilities().host_accessible;
  if (plan_.offloads() || copies_on_host)
    host_runner_ = create_host_runner(context.host_placement, context.options);
  if (!plan_.offloads()) return;
  has_host_stream_ = true;
  for (std::vector<HostUpdate>& updates : host_updates_) {
    for (int unit = 0; unit < context.unit_count(); ++unit) updates.push_back({this, unit, {}});
  }
  host_stream_.open();
  up_stream_.open();
  host_done_ = EngineEvent(context);
  copied_on_host_ = EngineEvent(context);
  kept_on_host_ = EngineEvent(context);
  for (std::size_t i = 0; i < updated_on_host_.size(); ++i) {
    if (context.units[i].offloaded) updated_on_host_[i] = EngineEvent(context);
  }
  if (plan_.adds_on_host()) rounded_.resize(kRoundedCount * context.element());
  if (context.pass_buffers == nullptr) return;
  pass_ = std::make_unique<StorePass>(*context.store, *context.pass_buffers);
  for (HostPass& pass : host_passes_) pass.updater = this;
  all_parts_.updater = this;
  for (const StorePassPart& part : context.pass_parts) all_parts_.parts.push_back(&part);
}

void Updater::begin(const std::vector<bool>& used, const Hyperparameters& hyperparameters) {
  const std::uint64_t step = context_.applied_steps + 1;
  for (int i = 0; i < context_.group_count; ++i) {
    const GroupHyperparameters& group = hyperparameters.groups[static_cast<std::size_t>(i)];
    bias_corrections(group.beta1.value_or(options_.beta1), group.beta2.value_or(options_.beta2), step,
                     &corrections()[i], 1);
  }
  bias_corrections(options_.beta1, options_.beta2, step, &on_device_, 1);
  if (pass_ != nullptr) {
    // Reading begins while the ranks agree.
    HostPass& pass = host_passes_[context_.attempted_steps % 2];
    pass.parts.clear();
    for (std::size_t index = 0; index < used.size(); ++index) {
      const Unit& u = context_.units[index];
      if (!used[index]) continue;
      for (std::size_t i = 0; i < u.part_count; ++i)
        pass.parts.push_back(&context_.pass_parts[u.first_part + i]);
    }
    host_stream_.call<&HostPass::begin>(pass);
  }
  if (plan_.offloads()) host_stream_.wait(decision_.decided());
  device_stream_.wait(decision_.decided());
}

void Updater::update(int index, const Hyperparameters& hyperparameters) {
  const Unit& u = unit(index);
  if (u.updated_count == 0) return;
  if (u.offloaded) {
    queue_host_update(index, hyperparameters);
  } else {
    update_on_device(index, hyperparameters);
  }
}

void Updater::end() {
  if (pass_ != nullptr) host_stream_.call<&HostPass::finish>(all_parts_);
  device_stream_.record(device_done_);
  if (plan_.offloads()) host_stream_.record(host_done_);
}

void Updater::HostPass::finish() {
  const Status written = updater->pass_->finish();
  if (!written.ok()) {
    updater->fail(written);
  } else {
    updater->pass_->begin(parts);  // The next step most likely begins with them.
  }
}

// The decision on the device has the bias corrections of one group at a time. Until the next decision only
// the updates read it, in the order of their stream.
void Updater::correct_for(int group) {
  static_assert(offsetof(StepState, s2) == offsetof(StepState, c1) + sizeof(float));
  const BiasCorrection& correction = corrections()[group];
  if (std::memcmp(&correction, &on_device_, sizeof(correction)) == 0) return;
  on_device_ = correction;
  device_stream_.copy(&context_.control->state.c1, &correction, sizeof(correction));
}

void Updater::update_on_device(int index, const Hyperparameters& hyperparameters) {
  const Unit& u = unit(index);
  const MarkedSpan span = context_.marked(device_stream_, "updates", "update", index);
  const Piece whole{0, u.updated_count, u.kept, nullptr};
  for (const StepContext::Segment& segment : u.segments) {
    const GroupHyperparameters& group = hyperparameters.groups[static_cast<std::size_t>(segment.group)];
    if (factored_ == nullptr) correct_for(segment.group);
    KeptUpdateArguments kept = update_of(u, whole, segment.begin, segment, group);
    kept.update.gradient = u.updated_gradients + segment.begin * element_bytes(u.gradient_type);
    kept.update.parameter =
        is_own_master(options_) ? nullptr : u.updated_parameters + segment.begin * element();
    kept.update.count = segment.count;
    if (factored_ != nullptr) {
      factored_->queue_update(index, segment, kept, group);
      continue;
    }
    if (segment.matrix != nullptr) {
      must(kernels_.muon_update(
          {matrices_->update_of(index, segment, segment.begin, kept, group), decision_.on_device()},
          device_stream_));
      continue;
    }
    must(context_.states_are_fp32()
             ? kernels_.adamw_controlled({kept.update, decision_.on_device(), nullptr}, device_stream_)
             : kernels_.update_kept({kept, decision_.on_device(), nullptr}, device_stream_));
  }
  if (factored_ != nullptr) factored_->queue_end(index);
  device_stream_.record(u.updated);
}

// The update of the elements from `at` on of a piece, without its gradient, parameter, count and decision.
KeptUpdateArguments Updater::update_of(const Unit& u, const Piece& piece, std::uint64_t at,
                                       const StepContext::Segment& segment,
                                       const GroupHyperparameters& group) const {
  const auto place_of = [&](StateField field) {
    return kept_place(context_.format_of(field), piece.count, at);
  };
  const auto address_of = [&](StateField field, std::uint64_t offset) -> std::byte* {
    std::byte* const state = piece.kept[static_cast<std::size_t>(field)];
    return state == nullptr ? nullptr : state + offset;
  };
  KeptUpdateArguments kept{};
  kept.update = adamw_arguments(options_, group);
  kept.update.gradient_type = u.gradient_type;
  kept.update.lr = fp32(group.lr);
  kept.update.weight_decay = fp32(group.weight_decay);
  std::byte* const master = address_of(StateField::kMaster, place_of(StateField::kMaster).values);
  if (context_.format_of(StateField::kMaster) == MomentFormat::kFloat32) {
    kept.update.master = reinterpret_cast<float*>(master);
  } else {
    kept.half = segment.rounding;
    kept.half.elements = reinterpret_cast<std::uint16_t*>(master);
    kept.half.first += piece.begin + at - segment.begin;
  }
  kept.moments.format = options_.moments;
  kept.moments.m = address_of(StateField::kM, place_of(StateField::kM).values);
  if (matrices_ == nullptr) {
    kept.moments.v = address_of(StateField::kV, place_of(StateField::kV).values);
  } else if (segment.matrix == nullptr) {
    kept.moments.v = u.kept[static_cast<std::size_t>(StateField::kV)] +
                     (segment.v_at + piece.begin + at - segment.begin) * sizeof(float);
  }
  if (options_.moments == MomentFormat::kFloat32) {
    kept.update.m = static_cast<float*>(kept.moments.m);
    kept.update.v = static_cast<float*>(kept.moments.v);
  } else if (options_.moments == MomentFormat::kBlock8) {
    kept.moments.m_exponents =
        reinterpret_cast<std::uint8_t*>(address_of(StateField::kM, place_of(StateField::kM).exponents));
    kept.moments.v_exponents =
        reinterpret_cast<std::uint8_t*>(address_of(StateField::kV, place_of(StateField::kV).exponents));
  }
  kept.average =
      reinterpret_cast<float*>(address_of(StateField::kAverage, place_of(StateField::kAverage).values));
  kept.average_weight = fp32(1.0 - options_.ema);
  return kept;
}

// The update on the host, and its parameters to the device.
void Updater::queue_host_update(int index, const Hyperparameters& hyperparameters) {
  const Unit& u = unit(index);
  HostUpdate& update = host_updates_[context_.attempted_steps % 2][static_cast<std::size_t>(index)];
  update.groups = hyperparameters.groups;
  update.corrections = corrections();
  {
    const MarkedSpan span = context_.marked(host_stream_, "host", "update", index);
    host_stream_.call<&HostUpdate::run>(update);
  }
  if (u.parameters_offloaded) {
    host_stream_.record(u.updated);
    return;
  }
  const EngineEvent& updated = updated_on_host_[static_cast<std::size_t>(index)];
  host_stream_.record(updated);
  up_stream_.wait(updated);
  const std::byte* const master = u.kept[static_cast<std::size_t>(StateField::kMaster)];
  const std::byte* const source = is_own_master(options_) && master != nullptr ? master : u.host_gradients;
  const MarkedSpan span = context_.marked(up_stream_, "parameters up", "up", index);
  up_stream_.copy(u.updated_parameters, source, u.updated_count * element());
  up_stream_.record(u.updated);
}

// Runs in the order of the host's stream, when the decision is on the host; calls nothing of the Backend.
void Updater::update_on_host(const HostUpdate& update) {
  if (failed_.load(std::memory_order_acquire)) return;
  const bool is_factored =
      factored_ != nullptr && !context_.counts_only() && decision_.on_host().outcome == StepOutcome::kApplied;
  if (is_factored) factored_->begin_update(update.unit);
  update_all(update);
  if (is_factored) factored_->end_update(update.unit);
}

void Updater::update_all(const HostUpdate& update) {
  const Unit& u = unit(update.unit);
  if (u.part_count > 0) {
    if (const Status status = update_in_files(update); !status.ok()) fail(status);
    return;
  }
  std::byte* parameters = nullptr;
  if (!is_own_master(options_))
    parameters = u.parameters_offloaded ? u.trainable_slice.host : u.host_gradients;
  const Piece whole{0, u.updated_count, u.kept, parameters};
  if (decision_.on_host().outcome == StepOutcome::kApplied) {
    update_piece(update, whole);
  } else if (parameters != nullptr && !u.parameters_offloaded) {
    // The parameters go up as they were.
    round_parameters(options_.dtype, master_of(whole), u.updated_count, parameters);
  }
}

// The same, piece by piece as they come from the store.
Status Updater::update_in_files(const HostUpdate& update) {
  const Unit& u = unit(update.unit);
  const bool applied = decision_.on_host().outcome == StepOutcome::kApplied;
  for (std::size_t i = 0; i < u.part_count; ++i) {
    const Result<std::byte*> memory = pass_->next();
    if (!memory.ok()) return memory.status();
    update_stored_part(update, i, memory.value(), applied);
    if (Status status = pass_->done(applied); !status.ok()) return status;
  }
  // The next gather reads the parameters that are being written. The next unit is being read meanwhile.
  return u.parameters_offloaded ? pass_->finish() : Status();
}

float* Updater::master_of(const Piece& piece) {
  return reinterpret_cast<float*>(piece.kept[static_cast<std::size_t>(StateField::kMaster)]);
}

void Updater::update_stored_part(const HostUpdate& update, std::size_t part_index, std::byte* memory,
                                 bool applied) {
  const Unit& u = unit(update.unit);
  const StorePassPart& part = context_.pass_parts[u.first_part + part_index];
  const auto field = [&](std::size_t index) { return memory + part.field_offset(index); };
  Piece piece;
  piece.begin = part_index * plan_.piece_count;
  piece.count = std::min(plan_.piece_count, u.updated_count - piece.begin);
  std::size_t state_fields = 0;
  for (const StateField state : context_.state_fields())
    piece.kept[static_cast<std::size_t>(state)] = field(state_fields++);
  if (context_.counts_only()) return update_piece(update, piece);
  // Parameters go up from here.
  std::byte* const ready = u.host_gradients + piece.begin * element();
  if (is_own_master(options_)) {
    if (applied) update_piece(update, piece);
    if (!u.parameters_offloaded) std::memcpy(ready, piece.kept[0], piece.count * element());
  } else if (applied) {
    piece.parameters = u.parameters_offloaded ? field(state_fields) : ready;
    update_piece(update, piece);
  } else if (!u.parameters_offloaded) {
    round_parameters(options_.dtype, master_of(piece), piece.count, ready);
  }
}

void Updater::update_piece(const HostUpdate& update, const Piece& piece) {
  if (context_.hooks.before_host_update) context_.hooks.before_host_update(piece.count);
  if (context_.counts_only()) return;
  const Unit& u = unit(update.unit);
  const bool over_gradients = u.offloaded && piece.parameters != nullptr && !u.parameters_offloaded &&
                              element_bytes(u.gradient_type) != element();
  const std::byte* const gradients = u.offloaded ? u.host_gradients : u.updated_gradients;
  // Parameters that are not updated take their place again.
  std::uint64_t ready = piece.begin;
  const auto keep_until = [&](std::uint64_t end) {
    if (piece.parameters != nullptr && ready < end) {
      const std::uint64_t at = ready - piece.begin;
      round_parameters(options_.dtype, master_of(piece) + at, end - ready, piece.parameters + at * element());
    }
    ready = std::max(ready, end);
  };
  for (const StepContext::Segment& segment : u.segments) {
    const std::uint64_t first = std::max(piece.begin, segment.begin);
    const std::uint64_t end = std::min(piece.begin + piece.count, segment.begin + segment.count);
    if (first >= end) continue;
    keep_until(first);
    ready = end;
    // Parameters that go where gradients of twice their size lie wait until these have been used.
    const std::uint64_t most = over_gradients ? kRoundedCount : end - first;
    for (std::uint64_t done = first; done < end; done += most) {
      const std::uint64_t at = done - piece.begin;
      std::byte* const parameters = piece.parameters == nullptr ? nullptr : piece.parameters + at * element();
      KeptUpdateArguments kept =
          update_of(u, piece, at, segment, update.groups[static_cast<std::size_t>(segment.group)]);
      kept.update.factor = decision_.on_host().factor;
      kept.update.c1 = update.corrections[segment.group].c1;
      kept.update.s2 = update.corrections[segment.group].s2;
      kept.step = decision_.on_host().applied_steps;
      kept.update.gradient = gradients + done * element_bytes(u.gradient_type);
      kept.update.parameter = over_gradients ? rounded_.data() : parameters;
      kept.update.count = std::min(most, end - done);
      update_run(update, segment, kept, done);
      if (over_gradients) std::memcpy(parameters, rounded_.data(), kept.update.count * element());
    }
    if (factored_ != nullptr) {
      factored_->add_squares(update.unit, segment.parameter, first, end,
                             update_of(u, piece, first - piece.begin, segment, {}));
    }
  }
  keep_until(piece.begin + piece.count);
}

// `begin`: of the elements, from the start of the updated range.
void Updater::update_run(const HostUpdate& update, const StepContext::Segment& segment,
                         const KeptUpdateArguments& kept, std::uint64_t begin) {
  if (factored_ != nullptr) {
    return factored_->update({.unit = update.unit,
                              .parameter = segment.parameter,
                              .begin = begin,
                              .count = kept.update.count,
                              .gradient = static_cast<const std::byte*>(kept.update.gradient)},
                             kept, update.groups[static_cast<std::size_t>(segment.group)]);
  }
  if (segment.matrix != nullptr) {
    MuonUpdateArguments matrix = matrices_->update_of(update.unit, segment, begin, kept,
                                                      update.groups[static_cast<std::size_t>(segment.group)]);
    matrix.gradient.factor = kept.update.factor;
    matrix.step_number = kept.step;
    return muon_update(matrix, *host_runner_);
  }
  const Status status = host_adam(kept, *host_runner_);
  FOREBAY_CHECK(status.ok(), "%s", status.to_string().c_str());
}

void Updater::copy(const std::vector<StateCopy>& copies) {
  std::vector<Snapshot::Part> live;
  leased_copies_.clear();
  bool any_leased = false;
  for (const StateCopy& one : copies) {
    if (one.bytes == 0) continue;
    any_leased |= one.is_leased;
    if (const std::byte* const source = live_source(one)) {
      live.push_back({one.target, source, one.bytes});
    } else if (one.device != nullptr && backend_.capabilities().host_accessible) {
      leased_copies_.push_back(&one);
    } else if (one.device != nullptr) {
      device_stream_.copy(one.target, one.device + one.offset, one.bytes);
    }
  }
  if (!live.empty()) {
    snapshot_.begin(std::move(live));
    snapshot_stream().call<&Updater::open_snapshot>(*this);
  }
  if (!leased_copies_.empty()) device_stream_.call<&Updater::copy_leased>(*this);
  device_stream_.record(copied_on_device_);
  if (plan_.offloads()) {
    host_copies_ = {this, &copies};
    host_stream_.call<&HostCopies::run>(host_copies_);
    host_stream_.record(copied_on_host_);
  }
  if (any_leased) must(backend_.event_synchronize(copied_on_device_));
}

// Null: the host cannot read it, or not later.
const std::byte* Updater::live_source(const StateCopy& copy) const {
  if (copy.is_leased) return nullptr;
  if (copy.device != nullptr)
    return backend_.capabilities().host_accessible ? copy.device + copy.offset : nullptr;
  return copy.range.host != nullptr ? copy.range.host + copy.offset : nullptr;
}

// From the store. Runs in the order of the host's stream. A pass over files may be reading ahead meanwhile.
void Updater::copy_on_host(const std::vector<StateCopy>& copies) {
  if (failed_.load(std::memory_order_acquire)) return;
  for (const StateCopy& one : copies) {
    if (one.device != nullptr || one.range.host != nullptr || one.bytes == 0) continue;
    const Status status = context_.read_offloaded(one.range, one.offset, one.target, one.bytes);
    if (!status.ok()) return fail(status);
  }
}

void Updater::keep_copies() {
  if (!snapshot_.is_begun()) return;
  snapshot_stream().call<&Updater::keep_snapshot>(*this);
  if (!plan_.offloads() || !backend_.capabilities().host_accessible) return;
  host_stream_.record(kept_on_host_);
  device_stream_.wait(kept_on_host_);
}

void Updater::keep_snapshot() {
  snapshot_.keep([&](std::byte* target, const std::byte* source, std::uint64_t bytes) {
    copy_by_threads(target, source, bytes);
  });
}

void Updater::copy_leased() {
  for (const StateCopy* const one : leased_copies_)
    copy_by_threads(one->target, one->device + one->offset, one->bytes);
}

void Updater::copy_by_threads(std::byte* target, const std::byte* source, std::uint64_t bytes) const {
  if (host_runner_ == nullptr) return stream_copy(target, source, bytes);
  host_runner_->run(bytes, kCopiedBytes, [&](std::size_t begin, std::size_t end) {
    stream_copy(target + begin, source + begin, end - begin);
  });
}

Status Updater::wait_for_copies() const {
  FOREBAY_RETURN_IF_ERROR(backend_.event_synchronize(copied_on_device_));
  // The plan itself may be replaced meanwhile.
  if (has_host_stream_) FOREBAY_RETURN_IF_ERROR(backend_.event_synchronize(copied_on_host_));
  return failure();
}

void Updater::wait_for_step(const EngineStream& stream) const {
  stream.wait(device_done_);
  if (plan_.offloads()) stream.wait(host_done_);
}

void Updater::synchronize() {
  device_stream_.synchronize();
  if (plan_.offloads()) {
    host_stream_.synchronize();
    up_stream_.synchronize();
  }
  keep_snapshot();
}

void Updater::fail(const Status& status) {
  const std::lock_guard lock(mutex_);
  if (failure_.ok()) failure_ = status.with_context(kStatesFailed);
  failed_.store(true, std::memory_order_release);
}

Status Updater::failure() const {
  if (!failed_.load(std::memory_order_acquire)) return Status();
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace forebay
