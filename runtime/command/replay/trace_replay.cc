#include "runtime/command/replay/trace_replay.h"

#include <malloc.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "allocator/arena/arena_mappings.h"
#include "forebay/arena.h"
#include "forebay/model_backend.h"
#include "forebay/units.h"
#include "runtime/command/replay/baseline_allocator.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;

std::uint32_t elapsed_ns(Clock::time_point begin, Clock::time_point end) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(ns, 0, UINT32_MAX));
}

// The time at or below which that part of the samples lies. Reorders them.
double percentile(std::vector<std::uint32_t>& samples, double part) {
  const auto index = static_cast<std::ptrdiff_t>(part * static_cast<double>(samples.size() - 1) + 0.5);
  std::nth_element(samples.begin(), samples.begin() + index, samples.end());
  return samples[static_cast<std::size_t>(index)];
}

// The measured calls of one kind.
struct Samples {
  std::vector<std::uint32_t> all;
  std::vector<std::uint32_t> own;  // Without the time in calls of the device.
  std::vector<std::uint32_t> off_mapping;
  std::vector<std::uint32_t> mapping;

  void reserve(std::size_t count) {
    all.reserve(count);
    own.reserve(count);
    off_mapping.reserve(count);
  }
  void add(std::uint32_t ns, std::uint64_t device_ns, bool made_driver_call) {
    all.push_back(ns);
    own.push_back(ns - static_cast<std::uint32_t>(std::min<std::uint64_t>(device_ns, ns)));
    (made_driver_call ? mapping : off_mapping).push_back(ns);
  }
  static CallTimes summary(std::vector<std::uint32_t>& samples, double timer_ns) {
    CallTimes times;
    times.count = samples.size();
    if (samples.empty()) return times;
    times.p50_ns = std::max(0.0, percentile(samples, 0.5) - timer_ns);
    times.p99_ns = std::max(0.0, percentile(samples, 0.99) - timer_ns);
    times.p999_ns = std::max(0.0, percentile(samples, 0.999) - timer_ns);
    times.worst_ns = std::max(0.0, percentile(samples, 1) - timer_ns);
    return times;
  }
};

struct PassSamples {
  Samples allocate;
  Samples free;

  void reserve(const AllocationTrace& trace, int passes) {
    const std::size_t blocks = trace.blocks.size() * static_cast<std::size_t>(passes);
    allocate.reserve(blocks);
    free.reserve(blocks);
  }
  ReplayTimes summary() {
    const double timer_ns = measure_timer_ns();
    return {.allocate = Samples::summary(allocate.all, timer_ns),
            .free = Samples::summary(free.all, timer_ns),
            .allocate_own = Samples::summary(allocate.own, timer_ns),
            .free_own = Samples::summary(free.own, timer_ns),
            .allocate_off_mapping = Samples::summary(allocate.off_mapping, timer_ns),
            .free_off_mapping = Samples::summary(free.off_mapping, timer_ns),
            .allocate_mapping = Samples::summary(allocate.mapping, timer_ns)};
  }
};

// --- players of a trace: allocate(bytes, stream) -> address or null, free, driver_call_count, device_ns ---

class ArenaPlayer {
 public:
  static Result<std::unique_ptr<ArenaPlayer>> create(CountingBackend& backend, std::uint32_t stream_count,
                                                     const ReplayOptions& options) {
    auto player = std::unique_ptr<ArenaPlayer>(new ArenaPlayer(backend));
    for (std::uint32_t i = 0; i < stream_count; ++i) {
      FOREBAY_ASSIGN_OR_RETURN(const Stream stream, backend.stream_create());
      player->streams_.push_back(stream);
    }
    FOREBAY_ASSIGN_OR_RETURN(player->arena_, Arena::create(backend, {.learned = options.learned}));
    limit_mappings(*player->arena_, options.mappings_max);
    return player;
  }
  // Best effort: memory that the backend refuses to take back ends with the backend.
  ~ArenaPlayer() {
    for (const Stream stream : streams_) {
      static_cast<void>(backend_.stream_synchronize(stream));
      if (arena_ != nullptr) static_cast<void>(arena_->stream_retire(stream));
    }
    arena_.reset();
    for (const Stream stream : streams_) static_cast<void>(backend_.stream_destroy(stream));
  }
  ArenaPlayer(const ArenaPlayer&) = delete;
  ArenaPlayer& operator=(const ArenaPlayer&) = delete;

  std::byte* allocate(std::uint64_t bytes, std::uint32_t stream) {
    AllocationRequest request;
    request.bytes = bytes;
    request.stream = streams_[stream];
    Result<DevicePtr> block = arena_->allocate(request);
    if (block.ok()) [[likely]]
      return block.value();
    return allocate_again(request, block.status());
  }
  void free(std::byte* block, std::uint32_t stream) {
    const Status status = arena_->free(block, streams_[stream]);
    FOREBAY_CHECK(status.ok(), "the arena refused a block of its own: %s", status.message().c_str());
  }
  std::uint64_t driver_call_count() const { return backend_.call_count(); }
  std::uint64_t device_ns() const { return backend_.call_ns(); }
  ArenaMappings mappings() const { return mappings_of(*arena_); }
  const Status& failure() const { return failure_; }
  std::uint64_t retry_count() const { return retry_count_; }
  Status learn_begin() { return arena_->learn_begin(); }
  Result<std::string> learn_end() { return arena_->learn_end(); }

 private:
  explicit ArenaPlayer(CountingBackend& backend) : backend_(backend) {}

  // The arena never waits for the device; a caller may, and ask again.
  std::byte* allocate_again(const AllocationRequest& request, const Status& first) {
    failure_ = first;
    if (first.code() != StatusCode::kOutOfMemory) return nullptr;
    for (const Stream stream : streams_) {
      if (!backend_.stream_synchronize(stream).ok()) return nullptr;
    }
    Result<DevicePtr> block = arena_->allocate(request);
    if (!block.ok()) {
      failure_ = block.status();
      return nullptr;
    }
    ++retry_count_;
    return block.value();
  }

  CountingBackend& backend_;
  std::vector<Stream> streams_;
  std::unique_ptr<Arena> arena_;
  Status failure_;
  std::uint64_t retry_count_ = 0;
};

class BaselinePlayer {
 public:
  static Result<std::unique_ptr<BaselinePlayer>> create(CountingBackend& backend, std::uint32_t,
                                                        const ReplayOptions&) {
    return std::make_unique<BaselinePlayer>(backend);
  }
  explicit BaselinePlayer(CountingBackend& backend) : backend_(backend), allocator_(backend) {}

  std::byte* allocate(std::uint64_t bytes, std::uint32_t stream) {
    Result<DevicePtr> block = allocator_.allocate(bytes, stream);
    if (block.ok()) [[likely]]
      return block.value();
    failure_ = block.status();
    return nullptr;
  }
  void free(std::byte* block, std::uint32_t) {
    const Status status = allocator_.free(block);
    FOREBAY_CHECK(status.ok(), "the baseline refused a block of its own: %s", status.message().c_str());
  }
  std::uint64_t driver_call_count() const { return backend_.call_count(); }
  std::uint64_t device_ns() const { return backend_.call_ns(); }
  ArenaMappings mappings() const { return {}; }
  const Status& failure() const { return failure_; }
  std::uint64_t retry_count() const { return 0; }
  Status learn_begin() { return Status(); }
  Result<std::string> learn_end() { return std::string(); }

 private:
  CountingBackend& backend_;
  BaselineAllocator allocator_;
  Status failure_;
};

// The C library writes headers next to blocks that nobody else touches; with huge pages each of those would
// take 2 MiB of the machine, so there are none while this lives.
class NoHugePages {
 public:
  NoHugePages() : was_disabled_(::prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1) { set(true); }
  NoHugePages(const NoHugePages&) = delete;
  NoHugePages& operator=(const NoHugePages&) = delete;
  ~NoHugePages() { set(was_disabled_); }

 private:
  // An older kernel knows nothing of this and refuses, which does no harm.
  static void set(bool disabled) { ::prctl(PR_SET_THP_DISABLE, disabled ? 1UL : 0UL, 0, 0, 0); }

  const bool was_disabled_;
};

// How often the trace may be played with malloc without taking more than a quarter of the memory that is
// free: every allocation writes at most two headers, and the pages of those stay in use.
// Unused where a sanitizer replaces malloc.
[[maybe_unused]] int affordable_passes(const AllocationTrace& trace) {
  constexpr std::uint64_t kHeadersEach = 2;
  constexpr std::uint64_t kPassLimit = 1000;
  const auto page_bytes = static_cast<std::uint64_t>(std::max(::sysconf(_SC_PAGESIZE), 1L));
  const auto free_pages = static_cast<std::uint64_t>(std::max(::sysconf(_SC_AVPHYS_PAGES), 0L));
  const std::uint64_t allowed_bytes = free_pages * page_bytes / 4;
  if (trace.peak_requested_bytes() <= allowed_bytes) return kPassLimit;
  const std::uint64_t pass_bytes =
      std::max<std::uint64_t>(trace.blocks.size() * kHeadersEach * page_bytes, 1);
  return static_cast<int>(std::min(allowed_bytes / pass_bytes, kPassLimit));
}

class MallocPlayer {
 public:
  std::byte* allocate(std::uint64_t bytes, std::uint32_t) {
    void* block = std::malloc(std::max<std::uint64_t>(bytes, 1));
    asm volatile("" : : "g"(block) : "memory");  // So that it is not optimised away with its free.
    return static_cast<std::byte*>(block);
  }
  void free(std::byte* block, std::uint32_t) { std::free(block); }
  std::uint64_t driver_call_count() const { return 0; }
  std::uint64_t device_ns() const { return 0; }
};

// Events between two words about progress: a moment where each of them misses.
constexpr std::size_t kProgressEvents = 4096;

using Watch = std::function<void(const TraceEvent& event, std::byte* address)>;

// One pass. Returns the event at which it stopped, or the number of events. Blocks live at the end are freed.
template <typename Player>
std::size_t play(const AllocationTrace& trace, Player& player, std::vector<std::byte*>& addresses,
                 PassSamples* samples, const std::function<void(std::size_t event_count)>& progress,
                 const Watch& watch = {}) {
  const auto timed = [&](Samples PassSamples::*kind, const auto& call) {
    if (samples == nullptr) return call();
    const std::uint64_t calls = player.driver_call_count();
    const std::uint64_t device_ns = player.device_ns();
    const Clock::time_point begin = Clock::now();
    call();
    const Clock::time_point end = Clock::now();
    (samples->*kind)
        .add(elapsed_ns(begin, end), player.device_ns() - device_ns, player.driver_call_count() != calls);
  };
  std::size_t i = 0;
  for (; i < trace.events.size(); ++i) {
    if (i % kProgressEvents == 0 && progress) progress(i);
    const TraceEvent& event = trace.events[i];
    std::byte*& address = addresses[event.block];
    if (watch && trace.blocks[event.block].failed) {
      watch(event, nullptr);
      continue;
    }
    if (event.is_free) {
      if (watch) watch(event, address);
      timed(&PassSamples::free, [&] { player.free(address, event.stream); });
      address = nullptr;
      continue;
    }
    const std::uint64_t bytes = trace.blocks[event.block].bytes;
    timed(&PassSamples::allocate, [&] { address = player.allocate(bytes, event.stream); });
    if (address == nullptr) break;
    if (watch) watch(event, address);
  }
  for (std::size_t block = 0; block < addresses.size(); ++block) {
    if (addresses[block] == nullptr) continue;
    player.free(addresses[block], trace.blocks[block].stream);
    addresses[block] = nullptr;
  }
  return i;
}

template <typename Player>
Result<ReplayResult> replay_with(const AllocationTrace& trace, Backend& backend,
                                 const ReplayOptions& options) {
  CountingBackend counting(backend);
  FOREBAY_ASSIGN_OR_RETURN(const std::unique_ptr<Player> made,
                           Player::create(counting, std::max(trace.stream_count, 1u), options));
  Player& player = *made;
  ReplayResult result;
  result.peak_requested_bytes = trace.peak_requested_bytes();
  std::vector<std::byte*> addresses(trace.blocks.size());
  PassSamples samples;
  if (options.timed) {
    samples.reserve(trace, options.passes);
    counting.measure_time();
  }

  DriverCalls after_second;
  int pass = 1;
  for (; pass <= options.passes; ++pass) {
    counting.reset_peak();
    const std::uint64_t calls_before = counting.call_count();
    const std::uint64_t dropped_before = player.mappings().dropped_count;
    std::function<void(std::size_t)> progress;
    if (options.progress) progress = [&](std::size_t event_count) { options.progress(pass, event_count); };
    Watch watch;
    if (options.watch && pass == 1) {
      watch = [&](const TraceEvent& event, std::byte* address) {
        options.watch(event, address, counting.held_bytes());
      };
    }
    const bool learns = options.learn != nullptr && pass == options.passes;
    if (learns) FOREBAY_RETURN_IF_ERROR(player.learn_begin());
    const std::size_t stopped =
        play(trace, player, addresses, options.timed ? &samples : nullptr, progress, watch);
    result.pass_calls.push_back(counting.call_count() - calls_before);
    if (learns && stopped == trace.events.size()) {
      FOREBAY_ASSIGN_OR_RETURN(*options.learn, player.learn_end());
    }
    result.last_peak_physical_bytes = counting.peak_held_bytes();
    const ArenaMappings mappings = player.mappings();
    result.last_dropped_mappings = mappings.dropped_count - dropped_before;
    result.enough_mappings = mappings.count + result.last_dropped_mappings;
    if (pass == 1) {
      result.peak_physical_bytes = counting.peak_held_bytes();
      result.first_pass_calls = counting.calls();
    }
    if (pass == 2) after_second = counting.calls();
    if (stopped < trace.events.size()) {
      const TraceEvent& event = trace.events[stopped];
      result.failure = "event " + std::to_string(stopped + 1) + " of " + std::to_string(trace.events.size()) +
                       (pass > 1 ? " in pass " + std::to_string(pass) : std::string()) + ", " +
                       format_bytes(trace.blocks[event.block].bytes) + ": " + player.failure().message();
      break;
    }
  }
  result.completed = pass > options.passes;
  if (result.completed && options.passes > 2) {
    const DriverCalls steady = counting.calls() - after_second;
    const double count = options.passes - 2;
    result.steady_calls = static_cast<double>(steady.total()) / count;
    result.steady_chunks_moved = static_cast<double>(steady.map) / count;
  }
  result.retry_count = player.retry_count();
  if (options.timed) result.times = samples.summary();
  return result;
}

double share_lost(std::uint64_t requested, std::uint64_t physical) {
  return physical == 0 ? 0 : 1 - static_cast<double>(requested) / static_cast<double>(physical);
}

}  // namespace

double ReplayResult::fragmentation() const {
  return share_lost(peak_requested_bytes, peak_physical_bytes);
}

double ReplayResult::last_fragmentation() const {
  return share_lost(peak_requested_bytes, last_peak_physical_bytes);
}

Result<ReplayResult> replay_trace(const AllocationTrace& trace, Backend& backend, ReplayTarget target,
                                  const ReplayOptions& options) {
  return target == ReplayTarget::kArena ? replay_with<ArenaPlayer>(trace, backend, options)
                                        : replay_with<BaselinePlayer>(trace, backend, options);
}

std::optional<ReplayTimes> replay_malloc(const AllocationTrace& trace, int passes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static_cast<void>(trace);
  static_cast<void>(passes);
  return std::nullopt;
#else
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
  if (passes > 0) return std::nullopt;
#endif
#endif
  passes = std::min(passes, affordable_passes(trace));
  if (passes == 0) return std::nullopt;
  const NoHugePages no_huge_pages;
  MallocPlayer player;
  PassSamples samples;
  samples.reserve(trace, passes);
  std::vector<std::byte*> addresses(trace.blocks.size());
  bool completed = true;
  for (int pass = 0; pass < passes && completed; ++pass) {
    completed = play(trace, player, addresses, &samples, {}) == trace.events.size();
  }
#ifdef __GLIBC__
  ::malloc_trim(0);  // Gives back the pages of malloc's headers.
#endif
  if (!completed) return std::nullopt;
  return samples.summary();
#endif
}

std::uint64_t ample_memory(const AllocationTrace& trace) {
  return std::max<std::uint64_t>(128_GiB, round_up(2 * trace.peak_requested_bytes(), 2_MiB));
}

std::string share_text(const AllocationTrace& trace, std::size_t event_count) {
  return std::to_string(100 * event_count / std::max<std::size_t>(trace.events.size(), 1)) + " %";
}

std::string probe_text(const CapacityProbe& probe, const AllocationTrace& trace) {
  return "probe " + std::to_string(probe.number) + ", " + format_bytes(probe.capacity_bytes) + ": " +
         share_text(trace, probe.event_count);
}

Result<std::optional<std::uint64_t>> find_minimum_capacity(
    const AllocationTrace& trace, ReplayTarget target,
    const std::function<void(const CapacityProbe& probe)>& progress) {
  using Answer = std::optional<std::uint64_t>;
  const std::uint64_t step = ModelBackendOptions().granularity;
  CapacityProbe probe;
  Status broken;
  const auto completes = [&](std::uint64_t steps) {
    ModelBackendOptions options;
    options.memory_bytes = steps * step;
    ++probe.number;
    probe.capacity_bytes = options.memory_bytes;
    ReplayOptions replay_options{.passes = 1, .timed = false};
    if (progress) {
      replay_options.progress = [&](int, std::size_t event_count) {
        probe.event_count = event_count;
        progress(probe);
      };
    }
    Result<std::unique_ptr<ModelBackend>> backend = ModelBackend::create(std::move(options));
    if (!backend.ok()) {
      broken = backend.status();
      return false;
    }
    const Result<ReplayResult> result = replay_trace(trace, *backend.value(), target, replay_options);
    if (!result.ok()) broken = result.status();
    return result.ok() && result.value().completed;
  };

  const std::uint64_t least = std::max<std::uint64_t>(ceil_div(trace.peak_requested_bytes(), step), 1);
  if (completes(least)) return Answer(least * step);
  std::uint64_t failed = least;
  std::uint64_t done = 0;
  for (std::uint64_t distance = 1; done == 0; distance *= 2) {
    if (!broken.ok() && broken.code() != StatusCode::kOutOfMemory) return broken;
    if (distance > 8 * least + 8) return Answer();
    if (completes(least + distance)) {
      done = least + distance;
    } else {
      failed = least + distance;
    }
  }
  while (done - failed > 1) {
    const std::uint64_t middle = failed + (done - failed) / 2;
    (completes(middle) ? done : failed) = middle;
  }
  return Answer(done * step);
}

double measure_cycle_ns() {
  constexpr int kRounds = 20;
  constexpr int kMultiplications = 20000;
  constexpr double kCyclesEach = 3;
  double best_ns = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::uint64_t value = 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(round);
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kMultiplications; ++i) {
      value *= 0xD1342543DE82EF95u;
      asm volatile("" : "+r"(value));  // Each result is needed, one after another.
    }
    const Clock::time_point end = Clock::now();
    const double ns = static_cast<double>(elapsed_ns(begin, end)) / kMultiplications;
    if (round == 0 || ns < best_ns) best_ns = ns;  // The fewest interruptions.
  }
  return best_ns / kCyclesEach;
}

double measure_timer_ns() {
  constexpr std::size_t kCount = 2001;
  std::vector<std::uint32_t> samples;
  samples.reserve(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const Clock::time_point begin = Clock::now();
    const Clock::time_point end = Clock::now();
    samples.push_back(elapsed_ns(begin, end));
  }
  return percentile(samples, 0.5);
}

}  // namespace forebay
