#include "runtime/engine/step/reducer.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <string>

#include "forebay/all_reduce.h"
#include "forebay/check.h"
#include "forebay/error.h"
#include "forebay/host_gradients.h"
#include "runtime/engine/step/updater.h"

namespace forebay {

Reducer::Reducer(StepContext& context, const Updater& updater)
    : StepPart(context),
      updater_(updater),
      micro_steps_(context.options.micro_steps),
      open_(context.units.size(), false),
      copied_down_(context.units.size()),
      bucket_reduced_(context),
      averaged_(context),
      average_stream_(context) {
  average_stream_.open();
  transit_user_.fill(-1);
  for (EngineEvent& event : averaged_bucket_) event = EngineEvent(context);
  slots_changed();
  for (std::size_t i = 0; i < context.units.size(); ++i) {
    unit_reduced_.emplace_back(context);
    if (context.units[i].offloaded) copied_down_[i] = EngineEvent(context);
  }
  if (context.host_sum != nullptr) open_host_sums();
}

void Reducer::open_host_sums() {
  for (EngineEvent& event : sum_ready_) event = EngineEvent(context_);
  for (EngineEvent& event : sum_left_) event = EngineEvent(context_);
  host_norms_ = reinterpret_cast<double*>(
      value_or_throw(context_.pinned->allocate(context_.units.size() * sizeof(double))));
  std::uint64_t leaves = 0;
  std::uint64_t uncounted = 0;
  for (int index = 0; index < context_.unit_count(); ++index) {
    const Unit& u = unit(index);
    HostUnit& host = host_units_.emplace_back(HostUnit{this, index, {}});
    const std::uint64_t slice = trainable_slice(index);
    for (std::uint64_t column = 0; u.offloaded && column < slice; column += plan_.bucket_columns) {
      host.sums.push_back({this, reinterpret_cast<float*>(u.host_gradients) + column,
                           std::min(plan_.bucket_columns, slice - column)});
    }
    leaves = std::max(leaves, leaf_bytes(layout(index).trainable_slice(context_.ranks())) / sizeof(double));
    std::uint64_t elements = 0;
    for (const auto& [begin, run] : u.uncounted) elements += run;
    uncounted = std::max(uncounted, elements);
  }
  norm_scratch_.resize(leaves);
  norm_aside_.resize(uncounted);
}

void Reducer::open(int index) {
  if (is_open(index)) return;
  open_[static_cast<std::size_t>(index)] = true;
  if (context_.slots->slot_of(SlotUse::kGradients, index) == SlotAssignment::kNone) return;
  context_.slots->place(SlotUse::kGradients, index, [&](int slot) {
    for (int other = 0; other < context_.unit_count(); ++other) {
      if (other != index && is_open(other) && context_.slots->slot_of(SlotUse::kGradients, other) == slot)
        return true;
    }
    return false;
  });
  slots_changed();
}

void Reducer::slots_changed() {
  while (slot_reduced_.size() < context_.slots->count()) slot_reduced_.emplace_back(context_);
}

// The padding of a slot that other units use too must be zero again.
void Reducer::complete(int index, Stream stream) {
  Unit& u = unit(index);
  const std::uint64_t size = element();
  const auto zero = [&](std::uint64_t offset, std::uint64_t count) {
    must(backend_.fill_async(u.gradients + offset * size, 0, count * size, stream));
  };
  const std::vector<UnitLayout::Place>& places = layout(index).places;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places[i].frozen || u.contributed[i]) continue;
    zero(places[i].offset, places[i].count);
    u.contributed[i] = true;
  }
  if (options_.stage < 2) return;  // Persistent buffers: zero since commit.
  for (const auto& [offset, count] : u.gaps) zero(offset, count);
}

void Reducer::reduce(int index, int micro_step) {
  micro_step_ = micro_step;
  const Unit& u = unit(index);
  const bool reduces = trainable_slice(index) > 0 && (options_.accumulate == Accumulate::kShard || is_last());
  if (!reduces) {
    engine_stream_.record(reduced(index));
  } else if (u.offloaded && plan_.adds_on_host()) {
    reduce_on_host(index);
  } else if (plan_.fuses(index)) {
    fuse(index);
  } else {
    reduce_alone(index);
  }
  open_[static_cast<std::size_t>(index)] = false;
}

void Reducer::end_early(int micro_steps) {
  micro_steps_ = micro_steps;
  micro_step_ = options_.micro_steps - 1;
  for (int index = context_.unit_count() - 1; index >= 0; --index) {
    if (options_.accumulate == Accumulate::kLocal) {
      complete(index, engine_stream_);
      reduce(index, micro_step_);
    } else if (trainable_slice(index) == 0) {
      continue;
    } else if (unit(index).offloaded && plan_.adds_on_host()) {
      finish_on_host(index);
    } else {
      average_accumulator(index);
      finish(index);
    }
  }
  flush();
}

Event Reducer::reduced(int index) const {
  const auto unit = static_cast<std::size_t>(index);
  const int slot = context_.slots->slot_of(SlotUse::kGradients, index);
  return slot == SlotAssignment::kNone ? unit_reduced_[unit] : slot_reduced_[static_cast<std::size_t>(slot)];
}

void Reducer::wait_for_copy_down(int index, Stream stream) const {
  if (!unit(index).offloaded) return;
  must(backend_.stream_wait(stream, copied_down_[static_cast<std::size_t>(index)]));
}

void Reducer::wait_for_norms() const {
  average_stream_.record(averaged_);
  engine_stream_.wait(averaged_);
  for (const HostUnit& host : host_units_) {
    if (!host.sums.empty()) wait_for_copy_down(host.unit, engine_stream_);
  }
}

float Reducer::average_factor() const {
  const int micro_steps = options_.average == Average::kRanks ? 1 : micro_steps_.load();
  const std::uint64_t passes =
      static_cast<std::uint64_t>(context_.ranks()) * static_cast<std::uint64_t>(micro_steps);
  return static_cast<float>(1.0 / static_cast<double>(passes));
}

// Later work on the average stream comes after the present work on the engine's stream.
void Reducer::average_after_reduction() {
  engine_stream_.record(bucket_reduced_);
  average_stream_.wait(bucket_reduced_);
}

// The place of the next bucket's sum, when the sum before it there has been averaged.
std::size_t Reducer::next_bucket() {
  const std::size_t place = bucket_count_++ % kBucketsInFlight;
  engine_stream_.wait(averaged_bucket_[place]);
  return place;
}

ReduceScatterArguments Reducer::bucket_of(int index, std::uint64_t column, std::uint64_t count) const {
  ReduceScatterArguments bucket;
  bucket.source = unit(index).gradients + column * element();
  bucket.source_stride_bytes = trainable_slice(index) * element();
  bucket.count = count;
  bucket.type = options_.dtype;
  bucket.receive = context_.staging;
  bucket.first = true;
  return bucket;
}

void Reducer::reduce_alone(int index) {
  const Unit& u = unit(index);
  if (is_last() && u.offloaded && options_.stage >= 2) {
    int& user = transit_user_[static_cast<std::size_t>(index) % kTransitCount];
    if (user >= 0) wait_for_copy_down(user, engine_stream_);
    user = index;
  }
  {
    const MarkedSpan span = context_.marked(engine_stream_, "engine", "reduce", index);
    if (context_.ranks() == 1 && options_.micro_steps == 1) {
      // The sum of one rank times one is the gradient itself.
      if (u.gradient_shard != u.gradients) {
        engine_stream_.copy(u.gradient_shard, u.gradients, trainable_slice(index) * element());
      }
      average_after_reduction();
    } else {
      reduce_buckets(index);
    }
  }
  finish(index);
}

void Reducer::reduce_buckets(int index) {
  const Unit& u = unit(index);
  const std::uint64_t slice = trainable_slice(index);
  const DataType type = options_.dtype;
  for (std::uint64_t column = 0; column < slice; column += plan_.bucket_columns) {
    const std::uint64_t count = std::min(plan_.bucket_columns, slice - column);
    ReduceScatterArguments bucket = bucket_of(index, column, count);
    if (u.accumulator != nullptr) {
      bucket.target = u.accumulator + column;
      bucket.first = micro_step_ == 0;
      must(context_.sharded().reduce_scatter(bucket, engine_stream_));
      continue;
    }
    const std::size_t place = next_bucket();
    bucket.target = context_.bucket_sums[place];
    must(context_.sharded().reduce_scatter(bucket, engine_stream_));
    average_after_reduction();
    must(kernels_.scale(
        {bucket.target, u.gradient_shard + column * element(), count, average_factor(), type, type},
        average_stream_));
    average_stream_.record(averaged_bucket_[place]);
  }
  if (u.accumulator != nullptr) {
    average_after_reduction();
    if (is_last()) average_accumulator(index);
  }
}

void Reducer::average_accumulator(int index) {
  const Unit& u = unit(index);
  must(kernels_.scale({u.accumulator, u.gradient_shard, trainable_slice(index), average_factor(),
                       options_.dtype, u.gradient_type},
                      average_stream_));
}

// After the last micro-step g is there, in the order of the average stream.
void Reducer::finish(int index) {
  const Unit& u = unit(index);
  if (is_last()) {
    if (u.stages != nullptr) add_over_stages(index);
    must(offer(index, u.gradient_shard, average_stream_));
    if (options_.stage == 0) {
      average_stream_.record(averaged_);
      engine_stream_.wait(averaged_);
      must(context_.all_gather_section(u.gradients, u.gradient_shard, trainable_slice(index) * element()));
      average_after_reduction();
    }
    queue_norm(index);
  }
  // A fused unit's slot was free when its gradients had been copied.
  if (!plan_.fuses(index) || options_.stage < 2) average_stream_.record(reduced(index));
  if (is_last() && u.offloaded) copy_down(index);
}

Status Reducer::offer(int index, void* gradient, Stream stream) const {
  if (!options_.on_reduced_gradient) return {};
  const std::uint64_t slice = trainable_slice(index);
  try {
    options_.on_reduced_gradient({index, gradient, unit(index).gradient_type,
                                  static_cast<std::uint64_t>(context_.shard()) * slice, slice, stream});
  } catch (const Error& error) {
    return error.status();
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, std::string("on_reduced_gradient threw: ") + error.what());
  } catch (...) {
    return Status(StatusCode::kInternal, "on_reduced_gradient threw what is no std::exception");
  }
  return {};
}

// Adds this rank's slice of g to those of the other pipeline stages that have the unit. The sum is rounded to
// the type of parameters once more, whatever type it is kept in.
void Reducer::add_over_stages(int index) {
  const Unit& u = unit(index);
  const std::uint64_t count = trainable_slice(index);
  // As for a norm.
  const std::size_t place = bucket_count_++ % kBucketsInFlight;
  const std::uint64_t bucket = plan_.shared_bucket_count(index, u.stages->size());
  must(all_reduce(*u.stages, backend_, kernels_,
                  {.data = u.gradient_shard,
                   .count = count,
                   .type = u.gradient_type,
                   .staging = reinterpret_cast<std::byte*>(context_.bucket_sums[place]),
                   .bucket_bytes = bucket * element_bytes(u.gradient_type)},
                  average_stream_));
  if (u.gradient_type != options_.dtype) {
    must(kernels_.scale({reinterpret_cast<float*>(u.gradient_shard), u.gradient_shard, count, 1.0f,
                         options_.dtype, u.gradient_type},
                        average_stream_));
  }
  average_stream_.record(averaged_bucket_[place]);
}

// Puts the slices of a small unit beside those of the units before it.
void Reducer::fuse(int index) {
  const Unit& u = unit(index);
  const std::uint64_t slice = trainable_slice(index);
  const std::uint64_t size = element();
  const std::uint64_t stride = plan_.fused_columns * size;
  if (fused_count_ + slice > plan_.fused_columns) reduce_fused();
  const MarkedSpan span = context_.marked(engine_stream_, "engine", "fuse", index);
  for (std::uint64_t s = 0; s < static_cast<std::uint64_t>(context_.shards()); ++s) {
    engine_stream_.copy(context_.fused + s * stride + fused_count_ * size, u.gradients + s * slice * size,
                        slice * size);
  }
  fused_units_.push_back({index, fused_count_});
  fused_count_ += slice;
  if (options_.stage >= 2) engine_stream_.record(reduced(index));
}

// Reduces the units in the bucket of small units, and averages each.
void Reducer::reduce_fused() {
  if (fused_units_.empty()) return;
  const std::size_t place = next_bucket();
  float* const sums = context_.bucket_sums[place];
  {
    const MarkedSpan span = context_.marked(engine_stream_, "engine", "reduce", fused_units_.back().unit);
    must(context_.sharded().reduce_scatter({.source = context_.fused,
                                            .source_stride_bytes = plan_.fused_columns * element(),
                                            .count = fused_count_,
                                            .type = options_.dtype,
                                            .receive = context_.staging,
                                            .target = sums,
                                            .first = true},
                                           engine_stream_));
  }
  average_after_reduction();
  for (const FusedUnit& part : fused_units_) average_fused(part, sums);
  average_stream_.record(averaged_bucket_[place]);
  for (const FusedUnit& part : fused_units_) finish(part.unit);
  fused_units_.clear();
  fused_count_ = 0;
}

void Reducer::average_fused(const FusedUnit& part, const float* sums) {
  const Unit& u = unit(part.unit);
  const std::uint64_t slice = trainable_slice(part.unit);
  const DataType type = options_.dtype;
  const float* const sum = sums + part.column;
  if (u.accumulator == nullptr) {
    must(kernels_.scale({sum, u.gradient_shard, slice, average_factor(), type, type}, average_stream_));
    return;
  }
  if (micro_step_ == 0) {
    average_stream_.copy(u.accumulator, sum, slice * sizeof(float));
  } else {
    must(kernels_.add({sum, u.accumulator, slice, DataType::kFloat32}, average_stream_));
  }
  if (is_last()) average_accumulator(part.unit);
}

// The norm of this rank's part of its slice. Elements that another rank counts are zero meanwhile.
void Reducer::queue_norm(int index) {
  const Unit& u = unit(index);
  const std::uint64_t count = layout(index).trainable_slice(context_.ranks());
  const std::uint64_t size = element_bytes(u.gradient_type);
  DevicePtr const gradient = u.gradient_shard + static_cast<std::uint64_t>(context_.replica()) * count * size;
  // The sum that was here has been averaged by then; the next one waits.
  const std::size_t place = bucket_count_++ % kBucketsInFlight;
  auto* const scratch = reinterpret_cast<std::byte*>(context_.bucket_sums[place]);
  std::byte* aside = scratch + leaf_bytes(count);
  for (const auto& [begin, run] : u.uncounted) {
    average_stream_.copy(aside, gradient + begin * size, run * size);
    average_stream_.fill(gradient + begin * size, 0, run * size);
    aside += run * size;
  }
  must(kernels_.norm(
      {gradient, reinterpret_cast<double*>(scratch), context_.norms + index, count, u.gradient_type},
      average_stream_));
  aside = scratch + leaf_bytes(count);
  for (const auto& [begin, run] : u.uncounted) {
    average_stream_.copy(gradient + begin * size, aside, run * size);
    aside += run * size;
  }
  average_stream_.record(averaged_bucket_[place]);
}

// The updated range of g goes to the host as soon as it is there. Its place on the host is free: the bytes
// there were used, and the parameters made of them came up, before this unit's forward pass could begin.
void Reducer::copy_down(int index) {
  const Unit& u = unit(index);
  const EngineStream& host = updater_.host_stream();
  host.wait(reduced(index));
  const MarkedSpan span = context_.marked(host, "host", "gradients down", index);
  host.copy(u.host_gradients, u.updated_gradients, u.updated_count * element_bytes(u.gradient_type));
  host.record(copied_down_[static_cast<std::size_t>(index)]);
}

// Each bucket's fp32 sum goes to the host as soon as it is there, and is added up there.
void Reducer::reduce_on_host(int index) {
  HostUnit& host = host_units_[static_cast<std::size_t>(index)];
  std::uint64_t column = 0;
  for (HostSum& sum : host.sums) {
    const std::size_t place = sum_count_++ % kTransitCount;
    engine_stream_.wait(sum_left_[place]);
    ReduceScatterArguments bucket = bucket_of(index, column, sum.count);
    bucket.target = reinterpret_cast<float*>(context_.transit[place]);
    {
      const MarkedSpan span = context_.marked(engine_stream_, "engine", "reduce", index);
      must(context_.sharded().reduce_scatter(bucket, engine_stream_));
    }
    engine_stream_.record(sum_ready_[place]);
    take_down(index, sum, place);
    column += sum.count;
  }
  engine_stream_.record(reduced(index));
  if (is_last()) finish_on_host(index);
}

void Reducer::finish_on_host(int index) {
  HostUnit& host = host_units_[static_cast<std::size_t>(index)];
  const EngineStream& host_stream = updater_.host_stream();
  host_stream.call<&HostUnit::average>(host);
  host_stream.copy(context_.norms + index, host_norms_ + index, sizeof(double));
  host_stream.record(copied_down_[static_cast<std::size_t>(index)]);
}

void Reducer::take_down(int index, HostSum& sum, std::size_t place) {
  const EngineStream& host = updater_.host_stream();
  host.wait(sum_ready_[place]);
  const MarkedSpan span = context_.marked(host, "host", "gradients down", index);
  const bool first = micro_step_ == 0;
  host.copy(first ? sum.target : context_.host_sum, context_.transit[place], sum.count * sizeof(float));
  host.record(sum_left_[place]);
  if (!first) host.call<&HostSum::add>(sum);
}

bool Reducer::passes_over_host(std::uint64_t bytes) const {
  if (context_.hooks.before_host_sum) context_.hooks.before_host_sum(bytes);
  return !context_.counts_only();
}

void Reducer::HostSum::add() const {
  if (!reducer->passes_over_host(3 * count * sizeof(float))) return;
  host_accumulate(reducer->context_.host_sum, target, count, false, reducer->updater_.host_runner());
}

// Runs in the order of the host's stream: g and its norm, from the sum over ranks and micro-steps. If the
// hook fails, no rank may vote for the step: the norms are gathered after this.
void Reducer::average_on_host(int index) {
  const Unit& u = unit(index);
  if (!passes_over_host(3 * u.updated_count * sizeof(float))) return;
  const BlockRunner& runner = updater_.host_runner();
  auto* const sum = reinterpret_cast<float*>(u.host_gradients);
  Status status =
      host_scale({sum, sum, u.updated_count, average_factor(), options_.dtype, DataType::kFloat32}, runner);
  FOREBAY_CHECK(status.ok(), "%s", status.to_string().c_str());
  if (status = offer(index, sum, {}); !status.ok()) {
    return context_.communicator.abort(
        status.with_context("rank " + std::to_string(context_.everyone().rank())));
  }
  const std::uint64_t count = layout(index).trainable_slice(context_.ranks());
  float* const part = sum + static_cast<std::uint64_t>(context_.replica()) * count;
  float* aside = norm_aside_.data();
  for (const auto& [begin, run] : u.uncounted) {
    std::copy_n(part + begin, run, aside);
    std::fill_n(part + begin, run, 0.0f);
    aside += run;
  }
  status = host_norm({part, norm_scratch_.data(), host_norms_ + index, count, DataType::kFloat32}, runner);
  FOREBAY_CHECK(status.ok(), "%s", status.to_string().c_str());
  aside = norm_aside_.data();
  for (const auto& [begin, run] : u.uncounted) {
    std::copy_n(aside, run, part + begin);
    aside += run;
  }
}

}  // namespace forebay
