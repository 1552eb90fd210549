// Options that commit() measures: the bucket (bucket_auto) and the offloaded part (offload_auto).
//
// Bucket: a collective over b bytes takes a latency and b over a bandwidth. Two sizes give both. The bucket
// is such that the latency is a twentieth of the whole: larger ones gain little and take memory.
//
// Offload: offloaded units are updated on the host while the others are updated on the device. The step's end
// waits for both, so both are to take as long: with d and h the times of an element on the device and on the
// host, the part d / (d + h) is offloaded. More is offloaded where the budget leaves no room for the rest.

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>

#include "forebay/host_adam.h"
#include "forebay/log.h"
#include "forebay/units.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {
namespace {

constexpr std::uint64_t kBucketBytesMin = 256u << 10;
constexpr std::uint64_t kBucketBytesMax = 64u << 20;
// Large enough for the bandwidth to show, small enough for a moment and for any device.
constexpr std::uint64_t kLargeBytes = 4u << 20;
constexpr double kTransfersPerLatency = 19;
constexpr std::uint64_t kAlignment = 512;
// Elements that are updated for a measurement: enough to be beyond caches, few enough for a moment.
constexpr std::uint64_t kMeasuredCount = 4u << 20;

// Seconds of the fastest of `repetitions`, after a first run that is not counted. `work` returns its
// duration.
template <typename Work>
double fastest(int repetitions, const Work& work) {
  double best = 0;
  for (int i = 0; i <= repetitions; ++i) {
    const double seconds = std::chrono::duration<double>(work()).count();
    if (i == 1 || (i > 1 && seconds < best)) best = seconds;
  }
  return best;
}

}  // namespace

// Device memory and a stream for measurements, given back in the end.
struct Engine::Impl::Probe {
  explicit Probe(Impl& impl_in) : impl(impl_in), stream(impl_in) {}
  // `bytes` of zeros.
  void open(std::uint64_t bytes) {
    stream.open();
    memory = value_or_throw(impl.backend.alloc(bytes));
    throw_if_error(impl.backend.fill_async(memory, 0, bytes, stream));
    throw_if_error(impl.backend.stream_synchronize(stream));
  }
  ~Probe() {
    stream.close();
    if (memory != nullptr) static_cast<void>(impl.backend.free(memory));
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  Impl& impl;
  EngineStream stream;
  DevicePtr memory = nullptr;
};

// Seconds of a reduce-scatter of slices of `count` elements. `receive`: for the peers' bytes.
double Engine::Impl::measure_collective(const Probe& probe, std::uint64_t count, std::byte* receive,
                                        float* target) {
  constexpr int kRepetitions = 5;
  return fastest(kRepetitions, [&] {
    must(communicator.barrier());
    const std::chrono::nanoseconds begin = now();
    must(sharded().reduce_scatter({.source = probe.memory,
                                   .source_stride_bytes = count * element(),
                                   .count = count,
                                   .type = options.dtype,
                                   .receive = receive,
                                   .target = target,
                                   .first = true},
                                  probe.stream));
    probe.stream.synchronize();
    must(communicator.status());
    return now() - begin;
  });
}

std::uint64_t Engine::Impl::choose_bucket_bytes() {
  const std::uint64_t per_column = static_cast<std::uint64_t>(shards()) * element();
  const std::uint64_t small = static_cast<std::uint64_t>(replicas()) * kLeafCount;
  const std::uint64_t large = std::max<std::uint64_t>(kLargeBytes / per_column / small, 2) * small;
  const std::uint64_t bucket = round_up(large * per_column, kAlignment);
  const std::uint64_t received = round_up(sharded().staging_bytes(large, options.dtype), kAlignment);
  Probe probe(*this);
  agree(verdict_of([&] { probe.open(bucket + received + large * sizeof(float)); }));
  std::byte* const receive = probe.memory + bucket;
  auto* const target = reinterpret_cast<float*>(receive + received);
  const double small_seconds = measure_collective(probe, small, receive, target);
  const double large_seconds = measure_collective(probe, large, receive, target);
  WireSpeed mine;
  mine.bytes_per_second =
      static_cast<double>((large - small) * per_column) / std::max(large_seconds - small_seconds, 1e-9);
  mine.latency_seconds =
      std::max(small_seconds - static_cast<double>(small * per_column) / mine.bytes_per_second, 0.0);
  wire_speed = exchange(communicator, mine)[0];  // Rank 0's, so that every rank chooses the same.
  const double wanted = kTransfersPerLatency * wire_speed.latency_seconds * wire_speed.bytes_per_second;
  const auto bytes = static_cast<std::uint64_t>(
      std::clamp(wanted, static_cast<double>(kBucketBytesMin), static_cast<double>(kBucketBytesMax)));
  return std::min(std::bit_ceil(bytes), kBucketBytesMax);
}

// Seconds in which the store writes and reads `bytes`.
double Engine::Impl::measure_store(std::byte* host, std::uint64_t bytes) {
  FileStoreOptions files;
  files.directories = options.offload_directories;
  const auto drive = value_or_throw(hooks.make_store ? hooks.make_store(rank()) : make_file_store(files));
  const StoreRange range = value_or_throw(drive->create_range("measurement", bytes));
  return measure([&] {
    for (const bool reads : {false, true}) {
      const StoreTicket ticket =
          value_or_throw(reads ? drive->read(range, 0, host, bytes) : drive->write(range, 0, host, bytes));
      throw_if_error(drive->wait(ticket, kStoreDeadline));
    }
  });
}

double Engine::Impl::measure(const std::function<void()>& work) const {
  constexpr int kRepetitions = 3;
  return fastest(kRepetitions, [&] {
    const std::chrono::nanoseconds begin = now();
    work();
    return now() - begin;
  });
}

Engine::Impl::UpdateTimes Engine::Impl::measure_update(std::uint64_t count) {
  const std::uint64_t size = element();
  const std::uint64_t state_bytes = count * sizeof(float);
  PinnedPoolOptions pinned_memory = pinned_options();
  pinned_memory.huge_pages = false;
  const auto pool = value_or_throw(PinnedPool::create(backend, pinned_memory));
  // The file has all states of an element, the moving average too, in whole pages.
  const std::uint64_t stored =
      options.tier == Tier::kFile ? round_up(count * forebay::state_bytes(options), kPageBytes) : 0;
  const std::uint64_t host_bytes = std::max(3 * state_bytes + count * size, stored);
  std::byte* const host = value_or_throw(pool->allocate(host_bytes));
  if (!counts_only()) std::memset(host, 0, host_bytes);
  Probe probe(*this);
  probe.open(3 * state_bytes + 2 * count * size);

  const bool has_parameter = !is_own_master(options);
  // Each state has room for fp32.
  const auto with_memory = [&](std::byte* base) {
    const auto codes_end = [&](std::byte* state) { return reinterpret_cast<std::uint8_t*>(state + count); };
    std::byte* const m = base + state_bytes;
    std::byte* const v = has_second_moment(options.optimizer) ? m + state_bytes : nullptr;
    KeptUpdateArguments kept{};
    kept.update = adamw_arguments(options);
    kept.update.gradient_type = options.dtype;
    kept.update.factor = kept.update.c1 = kept.update.s2 = 1;
    kept.update.count = count;
    kept.update.master = reinterpret_cast<float*>(base);
    kept.update.m = reinterpret_cast<float*>(m);
    kept.update.v = reinterpret_cast<float*>(v);
    kept.update.gradient = base + 3 * state_bytes;
    kept.moments = {options.moments, m, v, nullptr, nullptr};
    if (options.moments == MomentFormat::kBlock8) {
      kept.moments.m_exponents = codes_end(m);
      if (v != nullptr) kept.moments.v_exponents = codes_end(v);
    }
    if (format_of(StateField::kMaster) == MomentFormat::kBfloat16)
      kept.half.elements = reinterpret_cast<std::uint16_t*>(base);
    return kept;
  };
  KeptUpdateArguments on_device = with_memory(probe.memory);
  if (has_parameter) on_device.update.parameter = probe.memory + 3 * state_bytes + count * size;
  UpdateTimes times;
  times.device = measure([&] {
    throw_if_error(states_are_fp32() ? kernels.adamw(on_device.update, probe.stream)
                                     : kernels.update_kept({on_device, nullptr, nullptr}, probe.stream));
    throw_if_error(backend.stream_synchronize(probe.stream));
  });
  KeptUpdateArguments on_host = with_memory(host);
  if (has_parameter) on_host.update.parameter = host + 3 * state_bytes;
  const BlockRunner runner(options.host_threads);
  // Copies and files are moved beside the update, so the slowest of the three counts.
  times.offloaded = measure([&] {
    if (hooks.before_host_update) hooks.before_host_update(count);
    if (!counts_only()) throw_if_error(host_adam(on_host, runner));
  });
  if (options.offload != Offload::kOptimizerAndParameters) {
    times.offloaded =
        std::max(times.offloaded, measure([&] {
                   throw_if_error(backend.copy_async(probe.memory, host, count * size, probe.stream));
                   throw_if_error(backend.stream_synchronize(probe.stream));
                 }));
  }
  if (stored != 0) times.offloaded = std::max(times.offloaded, measure_store(host, stored));
  throw_if_error(pool->free(host, {}));
  times.device /= static_cast<double>(count);
  times.offloaded /= static_cast<double>(count);
  return times;
}

int Engine::Impl::choose_device_units(const Plan& all_offloaded) {
  std::uint64_t largest = kLeafCount;
  std::uint64_t total = 0;
  for (const UnitLayout& place : all_offloaded.layouts) {
    largest = std::max(largest, options.stage == 0 ? place.trainable_count : place.trainable_slice(shards()));
    total += place.trainable_count;
  }
  // All ranks measure at once, because they share the host when they train.
  agree({});
  UpdateTimes times;
  agree(verdict_of([&] { times = measure_update(std::min(largest, kMeasuredCount)); }));
  times = exchange(communicator, times)[0];  // Rank 0's, so that every rank chooses the same.
  const double both = times.device + times.offloaded;
  const double offloaded = both > 0 ? times.device / both : 1.0;

  // Units on the device, to the nearest end of a unit.
  int count = 0;
  double on_device = 0;
  const double wanted = (1.0 - offloaded) * static_cast<double>(total);
  for (const UnitLayout& place : all_offloaded.layouts) {
    const auto with_it = on_device + static_cast<double>(place.trainable_count);
    if (std::abs(with_it - wanted) > std::abs(on_device - wanted)) break;
    on_device = with_it;
    ++count;
  }
  PlanOptions candidate = plan_options();
  for (; count > 0; --count) {
    candidate.device_units = count;
    if (value_or_throw(make_plan(model, candidate)).reserved_bytes <= device_budget()) break;
  }
  // The rank with the least room decides.
  const auto counts = exchange<double>(communicator, count);
  count = static_cast<int>(*std::min_element(counts.begin(), counts.end()));
  if (rank() == 0) {
    log(LogLevel::kInfo,
        "offload auto: an element takes %.3f ns on the device and %.3f ns offloaded; %d of %d units stay on "
        "the device",
        times.device * 1e9, times.offloaded * 1e9, count, unit_count());
  }
  return count;
}

}  // namespace forebay
