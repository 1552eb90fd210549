// Reductions: gradients through buckets, averages and norms behind them.
//
// Every collective goes over a bucket: a column range of all slices of one unit, or, of units so small that
// several fit, their slices side by side. Two buckets are in flight: while the sum of one is averaged, the
// next is on the wire. The queue of collectives is engine_stream; what becomes of their sums is in the order
// of average_stream, and `reduced` is recorded there.

#include <algorithm>
#include <optional>

#include "forebay/all_reduce.h"
#include "forebay/check.h"
#include "forebay/host_gradients.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {

// A gradient nobody wrote is zero, and so is the padding of a slot that other units use too.
void Engine::Impl::complete_gradients(int index, Stream stream) {
  Unit& u = unit(index);
  const UnitLayout& place = layout(index);
  for (std::size_t i = 0; i < place.places.size(); ++i) {
    const UnitLayout::Place& p = place.places[i];
    if (p.frozen || u.contributed[i]) continue;
    must(backend.fill_async(u.gradients + p.offset * element(), 0, p.count * element(), stream));
    u.contributed[i] = true;
  }
  if (options.stage < 2) return;  // Persistent buffers: zero since commit.
  for (const auto& [offset, count] : u.gaps) {
    must(backend.fill_async(u.gradients + offset * element(), 0, count * element(), stream));
  }
}

float Engine::Impl::average_factor() const {
  const std::uint64_t passes =
      static_cast<std::uint64_t>(ranks()) * static_cast<std::uint64_t>(options.micro_steps);
  return static_cast<float>(1.0 / static_cast<double>(passes));
}

void Engine::Impl::reduce(int index) {
  Unit& u = unit(index);
  const std::uint64_t slice = layout(index).trainable_slice(shards());
  const bool last = micro_step == options.micro_steps - 1;
  const bool reduces = slice > 0 && (options.accumulate == Accumulate::kShard || last);
  if (!reduces) {
    must(backend.event_record(reduced(index), engine_stream));
  } else if (u.away && adds_on_host()) {
    reduce_on_host(index);
  } else if (plan.fuses(index)) {
    fuse(index);
  } else {
    reduce_alone(index);
  }
  // The backward pass ends with the first unit.
  if (index == 0) reduce_fused();
}

// What is queued on average_stream from here on comes after what engine_stream has now.
void Engine::Impl::average_after_reduction() {
  must(backend.event_record(bucket_reduced, engine_stream));
  must(backend.stream_wait(average_stream, bucket_reduced));
}

// The next bucket's sum, once the one that was there has been averaged.
std::size_t Engine::Impl::next_bucket() {
  const std::size_t place = bucket_count++ % kBucketsInFlight;
  must(backend.stream_wait(engine_stream, bucket_averaged[place]));
  return place;
}

void Engine::Impl::reduce_alone(int index) {
  Unit& u = unit(index);
  const std::uint64_t slice = layout(index).trainable_slice(shards());
  const bool last = micro_step == options.micro_steps - 1;
  if (last && u.away && options.stage >= 2) {
    int& user = transit_user[static_cast<std::size_t>(index) % kTransitCount];
    if (user >= 0) must(backend.stream_wait(engine_stream, unit(user).left));
    user = index;
  }
  std::optional<MarkedSpan> span;
  span.emplace(backend, options.timeline, engine_stream, "engine", "reduce " + shape(index).name);
  if (ranks() == 1 && options.micro_steps == 1) {
    // The sum of one rank times one is the gradient itself.
    if (u.gradient_shard != u.gradients) {
      must(backend.copy_async(u.gradient_shard, u.gradients, slice * element(), engine_stream));
    }
    average_after_reduction();
  } else {
    for (std::uint64_t column = 0; column < slice; column += plan.bucket_columns) {
      const std::uint64_t count = std::min(plan.bucket_columns, slice - column);
      ReduceScatterArguments bucket;
      bucket.source = u.gradients + column * element();
      bucket.source_stride_bytes = slice * element();
      bucket.count = count;
      bucket.type = options.dtype;
      bucket.receive = staging;
      if (u.accumulator != nullptr) {
        bucket.target = u.accumulator + column;
        bucket.first = micro_step == 0;
        must(sharded().reduce_scatter(bucket, engine_stream));
        continue;
      }
      const std::size_t place = next_bucket();
      bucket.target = bucket_sums[place];
      bucket.first = true;
      must(sharded().reduce_scatter(bucket, engine_stream));
      average_after_reduction();
      must(kernels.scale({bucket.target, u.gradient_shard + column * element(), count, average_factor(),
                          options.dtype, options.dtype},
                         average_stream));
      must(backend.event_record(bucket_averaged[place], average_stream));
    }
    if (u.accumulator != nullptr) {
      average_after_reduction();
      if (last) average_accumulator(index);
    }
  }
  span.reset();
  finish_reduction(index);
}

void Engine::Impl::average_accumulator(int index) {
  const Unit& u = unit(index);
  const std::uint64_t slice = layout(index).trainable_slice(shards());
  must(kernels.scale(
      {u.accumulator, u.gradient_shard, slice, average_factor(), options.dtype, u.gradient_type},
      average_stream));
}

// After the last micro-step: g is there, in the order of average_stream.
void Engine::Impl::finish_reduction(int index) {
  const Unit& u = unit(index);
  const bool last = micro_step == options.micro_steps - 1;
  if (last) {
    if (u.stages != nullptr) add_over_stages(index);
    if (options.stage == 0) {
      must(backend.event_record(averaged, average_stream));
      must(backend.stream_wait(engine_stream, averaged));
      all_gather_section(u.gradients, u.gradient_shard, layout(index).trainable_slice(shards()) * element());
      average_after_reduction();
    }
    queue_norm(index);
  }
  // A fused unit's slot was free when its gradients had been copied.
  if (!plan.fuses(index) || options.stage < 2) must(backend.event_record(reduced(index), average_stream));
  if (last && u.away) spill_gradients(index);
}

// This rank's slice of g, with those of the other stages that have the unit. It is rounded to the type of
// parameters once more, whatever it is kept in.
void Engine::Impl::add_over_stages(int index) {
  const Unit& u = unit(index);
  const std::uint64_t count = layout(index).trainable_slice(shards());
  // As for a norm.
  const std::size_t place = bucket_count++ % kBucketsInFlight;
  const std::uint64_t bucket = plan.shared_bucket_count(index, u.stages->size());
  must(all_reduce(*u.stages, backend, kernels,
                  {.data = u.gradient_shard,
                   .count = count,
                   .type = u.gradient_type,
                   .staging = reinterpret_cast<std::byte*>(bucket_sums[place]),
                   .bucket_bytes = bucket * element_bytes(u.gradient_type)},
                  average_stream));
  if (u.gradient_type != options.dtype) {
    must(kernels.scale({reinterpret_cast<float*>(u.gradient_shard), u.gradient_shard, count, 1.0f,
                        options.dtype, u.gradient_type},
                       average_stream));
  }
  must(backend.event_record(bucket_averaged[place], average_stream));
}

// Puts the slices of a small unit beside those of the units before it.
void Engine::Impl::fuse(int index) {
  const Unit& u = unit(index);
  const std::uint64_t slice = layout(index).trainable_slice(shards());
  const std::uint64_t stride = plan.fused_columns * element();
  if (fused_count + slice > plan.fused_columns) reduce_fused();
  const MarkedSpan span = marked(engine_stream, "engine", "fuse", index);
  for (std::uint64_t s = 0; s < static_cast<std::uint64_t>(shards()); ++s) {
    must(backend.copy_async(fused + s * stride + fused_count * element(), u.gradients + s * slice * element(),
                            slice * element(), engine_stream));
  }
  fused_units.push_back({index, fused_count});
  fused_count += slice;
  if (options.stage >= 2) must(backend.event_record(reduced(index), engine_stream));
}

// Reduces the units that have been put together, and averages each.
void Engine::Impl::reduce_fused() {
  if (fused_units.empty()) return;
  const bool last = micro_step == options.micro_steps - 1;
  const std::size_t place = next_bucket();
  float* const sums = bucket_sums[place];
  {
    const MarkedSpan span = marked(engine_stream, "engine", "reduce", fused_units.back().unit);
    must(sharded().reduce_scatter({.source = fused,
                                   .source_stride_bytes = plan.fused_columns * element(),
                                   .count = fused_count,
                                   .type = options.dtype,
                                   .receive = staging,
                                   .target = sums,
                                   .first = true},
                                  engine_stream));
  }
  average_after_reduction();
  for (const FusedUnit& part : fused_units) {
    const Unit& u = unit(part.unit);
    const std::uint64_t slice = layout(part.unit).trainable_slice(shards());
    float* const sum = sums + part.column;
    if (u.accumulator == nullptr) {
      must(kernels.scale({sum, u.gradient_shard, slice, average_factor(), options.dtype, options.dtype},
                         average_stream));
      continue;
    }
    if (micro_step == 0) {
      must(backend.copy_async(u.accumulator, sum, slice * sizeof(float), average_stream));
    } else {
      must(kernels.add({sum, u.accumulator, slice, DataType::kFloat32}, average_stream));
    }
    if (last) average_accumulator(part.unit);
  }
  must(backend.event_record(bucket_averaged[place], average_stream));
  for (const FusedUnit& part : fused_units) finish_reduction(part.unit);
  fused_units.clear();
  fused_count = 0;
}

// Of this rank's part of its slice. What another rank counts is zero meanwhile.
void Engine::Impl::queue_norm(int index) {
  const Unit& u = unit(index);
  const std::uint64_t count = layout(index).trainable_slice(ranks());
  const std::uint64_t size = element_bytes(u.gradient_type);
  DevicePtr const gradient = u.gradient_shard + static_cast<std::uint64_t>(replica()) * count * size;
  // Sums that were here have been averaged by then; the next one waits.
  const std::size_t place = bucket_count++ % kBucketsInFlight;
  auto* const scratch = reinterpret_cast<std::byte*>(bucket_sums[place]);
  std::byte* aside = scratch + leaf_bytes(count);
  for (const auto& [begin, run] : u.uncounted) {
    must(backend.copy_async(aside, gradient + begin * size, run * size, average_stream));
    must(backend.fill_async(gradient + begin * size, 0, run * size, average_stream));
    aside += run * size;
  }
  must(kernels.norm({gradient, reinterpret_cast<double*>(scratch), norms + index, count, u.gradient_type},
                    average_stream));
  aside = scratch + leaf_bytes(count);
  for (const auto& [begin, run] : u.uncounted) {
    must(backend.copy_async(gradient + begin * size, aside, run * size, average_stream));
    aside += run * size;
  }
  must(backend.event_record(bucket_averaged[place], average_stream));
}

// Each bucket's fp32 sum goes to the host as soon as it is there, and is added up there.
void Engine::Impl::reduce_on_host(int index) {
  Unit& u = unit(index);
  const std::uint64_t slice = layout(index).trainable_slice(shards());
  std::uint64_t column = 0;
  for (HostSum& sum : u.host_sums) {
    const std::size_t place = sum_count++ % kTransitCount;
    must(backend.stream_wait(engine_stream, sum_left[place]));
    ReduceScatterArguments bucket;
    bucket.source = u.gradients + column * element();
    bucket.source_stride_bytes = slice * element();
    bucket.count = sum.count;
    bucket.type = options.dtype;
    bucket.receive = staging;
    bucket.target = reinterpret_cast<float*>(transit[place]);
    bucket.first = true;
    {
      const MarkedSpan span = marked(engine_stream, "engine", "reduce", index);
      must(sharded().reduce_scatter(bucket, engine_stream));
    }
    must(backend.event_record(sum_ready[place], engine_stream));
    must(backend.stream_wait(tier_stream, sum_ready[place]));
    const MarkedSpan span = marked(tier_stream, "host", "gradients down", index);
    const bool first = micro_step == 0;
    must(backend.copy_async(first ? sum.target : host_sum, transit[place], sum.count * sizeof(float),
                            tier_stream));
    must(backend.event_record(sum_left[place], tier_stream));
    if (!first) {
      must(backend.call_host(
          tier_stream,
          [](void* argument) {
            const auto& given = *static_cast<const HostSum*>(argument);
            host_accumulate(given.impl->host_sum, given.target, given.count, false, *given.impl->host_runner);
          },
          &sum));
    }
    column += sum.count;
  }
  must(backend.event_record(reduced(index), engine_stream));
  if (micro_step != options.micro_steps - 1) return;
  must(backend.call_host(
      tier_stream,
      [](void* argument) {
        const auto& given = *static_cast<const HostAverage*>(argument);
        given.impl->average_on_host(given.unit);
      },
      &u.host_average));
  must(backend.copy_async(norms + index, host_norms + index, sizeof(double), tier_stream));
  must(backend.event_record(u.left, tier_stream));
}

// Runs in the order of tier_stream: g and its norm, of the sum over ranks and micro-steps.
void Engine::Impl::average_on_host(int index) {
  Unit& u = unit(index);
  auto* const sum = reinterpret_cast<float*>(u.host_gradients);
  const ScaleArguments average{
      sum, sum, u.updated_count, average_factor(), options.dtype, DataType::kFloat32};
  Status status = host_scale(average, *host_runner);
  FOREBAY_CHECK(status.ok(), "%s", status.to_string().c_str());
  const std::uint64_t count = layout(index).trainable_slice(ranks());
  float* const part = sum + static_cast<std::uint64_t>(replica()) * count;
  float* aside = norm_aside.data();
  for (const auto& [begin, run] : u.uncounted) {
    std::copy_n(part + begin, run, aside);
    std::fill_n(part + begin, run, 0.0f);
    aside += run;
  }
  status =
      host_norm({part, norm_scratch.data(), host_norms + index, count, DataType::kFloat32}, *host_runner);
  FOREBAY_CHECK(status.ok(), "%s", status.to_string().c_str());
  aside = norm_aside.data();
  for (const auto& [begin, run] : u.uncounted) {
    std::copy_n(aside, run, part + begin);
    aside += run;
  }
}

// The updated range of g goes to the host as soon as it is there. What lay in its place on the host was used,
// and the parameters made of it have come up, before this unit's forward pass could begin.
void Engine::Impl::spill_gradients(int index) {
  Unit& u = unit(index);
  must(backend.stream_wait(tier_stream, reduced(index)));
  const MarkedSpan span = marked(tier_stream, "host", "gradients down", index);
  must(backend.copy_async(u.host_gradients, u.updated_gradients,
                          u.updated_count * element_bytes(u.gradient_type), tier_stream));
  must(backend.event_record(u.left, tier_stream));
}

}  // namespace forebay
