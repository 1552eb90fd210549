// offload_auto: how much of the model is offloaded, from measurements.
//
// Offloaded units are updated on the host while those on the device are updated there. The step's end waits
// for both, so the parts are such that both take as long: with d and h the times of an element on either
// side, the part d / (d + h) is offloaded. More is, where the budget leaves no room for the rest.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "forebay/host_adam.h"
#include "forebay/log.h"
#include "forebay/units.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {
namespace {

// Elements that are updated for a measurement: enough to be beyond caches, few enough for a moment.
constexpr std::uint64_t kMeasuredCount = 4u << 20;
constexpr int kRepetitions = 3;
constexpr std::chrono::minutes kStoreDeadline{10};

}  // namespace

Engine::Impl::UpdateTimes Engine::Impl::measure_update(std::uint64_t count) {
  // The fastest of a few, after one that is not counted.
  const auto seconds_of = [&](const auto& work) {
    double best = 0;
    for (int i = 0; i <= kRepetitions; ++i) {
      const std::chrono::nanoseconds begin = now();
      work();
      const double seconds = std::chrono::duration<double>(now() - begin).count();
      if (i == 1 || (i > 1 && seconds < best)) best = seconds;
    }
    return best / static_cast<double>(count);
  };

  const std::uint64_t size = element();
  const std::uint64_t state_bytes = count * sizeof(float);
  const auto pool = value_or_throw(PinnedPool::create(backend, {.slab_bytes = 1, .huge_pages = false}));
  std::byte* const host = value_or_throw(pool->allocate(3 * state_bytes + count * size));
  std::memset(host, 0, 3 * state_bytes + count * size);
  const DevicePtr device = value_or_throw(backend.alloc(3 * state_bytes + 2 * count * size));
  const Stream stream = value_or_throw(backend.stream_create());
  throw_if_error(backend.fill_async(device, 0, 3 * state_bytes + 2 * count * size, stream));
  throw_if_error(backend.stream_synchronize(stream));

  AdamWArguments adamw = adamw_arguments();
  adamw.gradient_type = options.dtype;
  adamw.factor = 1;
  adamw.c1 = adamw.s2 = 1;
  adamw.count = count;
  const bool has_parameter = options.dtype != DataType::kFloat32;
  const auto with_memory = [&](std::byte* base) {
    AdamWArguments given = adamw;
    given.master = reinterpret_cast<float*>(base);
    given.m = reinterpret_cast<float*>(base + state_bytes);
    given.v = reinterpret_cast<float*>(base + 2 * state_bytes);
    given.gradient = base + 3 * state_bytes;
    return given;
  };
  UpdateTimes times;
  AdamWArguments on_device = with_memory(device);
  if (has_parameter) on_device.parameter = device + 3 * state_bytes + count * size;
  times.device = seconds_of([&] {
    throw_if_error(kernels.adamw(on_device, stream));
    throw_if_error(backend.stream_synchronize(stream));
  });

  const AdamWArguments on_host = with_memory(host);
  const BlockRunner runner(options.host_threads);
  const double update = seconds_of([&] {
    if (hooks.before_host_update) hooks.before_host_update(count);
    HostAdamArguments step{};
    step.update = on_host;
    step.update.parameter = has_parameter ? host + 3 * state_bytes : nullptr;
    step.moments = {MomentFormat::kFloat32, on_host.m, on_host.v, nullptr, nullptr};
    throw_if_error(host_adam(step, runner));
  });
  // Moves are beside the update; the slowest of all counts.
  const double up = options.offload == Offload::kOptimizerAndParameters ? 0 : seconds_of([&] {
    throw_if_error(backend.copy_async(device, host, count * size, stream));
    throw_if_error(backend.stream_synchronize(stream));
  });
  double file = 0;
  if (options.tier == Tier::kFile) {
    FileStoreOptions files;
    files.directories = options.offload_directories;
    const auto drive = value_or_throw(hooks.make_store ? hooks.make_store(rank()) : make_file_store(files));
    const std::uint64_t range_bytes = 3 * state_bytes;
    const StoreRange range = value_or_throw(drive->create_range("measurement", range_bytes));
    file = seconds_of([&] {
      for (const bool reads : {false, true}) {
        const StoreTicket ticket = value_or_throw(reads ? drive->read(range, 0, host, range_bytes)
                                                        : drive->write(range, 0, host, range_bytes));
        throw_if_error(drive->wait(ticket, kStoreDeadline));
      }
    });
  }
  times.offloaded = std::max({update, up, file});
  throw_if_error(backend.stream_destroy(stream));
  throw_if_error(backend.free(device));
  throw_if_error(pool->free(host, {}));
  return times;
}

int Engine::Impl::choose_device_units(const Plan& all_offloaded) {
  std::uint64_t largest = kLeafCount;
  std::uint64_t total = 0;
  for (const UnitLayout& place : all_offloaded.layouts) {
    largest = std::max(largest, options.stage == 0 ? place.trainable_count : place.trainable_slice(shards()));
    total += place.trainable_count;
  }
  // All ranks at once, because they share the host when they work.
  Status measured;
  UpdateTimes times;
  agree(measured);
  try {
    times = measure_update(std::min(largest, kMeasuredCount));
  } catch (const Error& error) {
    measured = error.status();
  }
  agree(measured);
  std::vector<UpdateTimes> all(static_cast<std::size_t>(ranks()));
  must(communicator.exchange(std::as_bytes(std::span(&times, 1)), std::as_writable_bytes(std::span(all))));
  times = all[0];  // Rank 0's, so that every rank chooses the same.
  const double both = times.device + times.offloaded;
  const double offloaded = both > 0 ? times.device / both : 1.0;

  const std::uint64_t budget = device_budget();
  // To the nearest end of a unit.
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
    if (value_or_throw(make_plan(model, candidate)).reserved_bytes <= budget) break;
  }
  // The least of the ranks' budgets decides.
  const double mine = count;
  std::vector<double> counts(static_cast<std::size_t>(ranks()));
  must(communicator.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(counts))));
  count = static_cast<int>(*std::min_element(counts.begin(), counts.end()));
  if (rank() == 0) {
    log(LogLevel::kInfo,
        "offload auto: an element takes %.3f ns on the device and %.3f ns offloaded; %d of %d units stay on "
        "the "
        "device",
        times.device * 1e9, times.offloaded * 1e9, count, unit_count());
  }
  return count;
}

}  // namespace forebay
