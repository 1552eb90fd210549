// Plays an allocation trace against an allocator. It measures the bytes taken from the device beside the
// bytes requested, the time of each call, and the smallest device on which the trace completes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/arena/arena_mappings.h"
#include "forebay/backend.h"
#include "runtime/command/replay/counting_backend.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay {

// kArena: forebay's. kBaseline: the caching allocator of baseline_allocator.h.
enum class ReplayTarget : std::uint8_t { kArena, kBaseline };

struct ReplayOptions {
  int passes = 5;     // Times the trace is played; blocks live at the end of one are freed before the next.
  bool timed = true;  // Measure every call.
  // Called before each pass (numbered from 1) and after every few thousand events with the number of events
  // played; null: no progress is reported.
  std::function<void(int pass, std::size_t event_count)> progress{};
  // The arena: placements to follow (ArenaOptions::learned), and the string that receives those of the last
  // pass; null: they are not learnt.
  std::string_view learned{};
  std::string* learn = nullptr;
  std::size_t mappings_max = ArenaMappings().most;  // The arena keeps at most this many.
  // Called after each allocation and before each free of the first pass with the block's address and the
  // bytes taken from the device. Requests that failed when they were recorded are not made then, and their
  // address is null.
  std::function<void(const TraceEvent& event, DevicePtr address, std::uint64_t held_bytes)> watch{};
};

// Nanoseconds per call, without the timer's own cost.
struct CallTimes {
  std::uint64_t count = 0;  // Calls measured; if 0, the other members are 0.
  double p50_ns = 0;
  double p99_ns = 0;
  double p999_ns = 0;
  double worst_ns = 0;
};

struct ReplayTimes {
  CallTimes allocate;  // All calls of all passes.
  CallTimes free;
  CallTimes allocate_own;  // The same calls without the time in calls of the device.
  CallTimes free_own;
  CallTimes allocate_off_mapping;  // Calls that made no driver call.
  CallTimes free_off_mapping;
  CallTimes allocate_mapping;  // Calls that made one: misses.
};

struct ReplayResult {
  bool completed = false;
  std::string failure;  // The event that stopped it and the allocator's message.
  std::uint64_t peak_requested_bytes = 0;
  std::uint64_t peak_physical_bytes = 0;       // In the first pass.
  std::uint64_t last_peak_physical_bytes = 0;  // In the last pass.
  DriverCalls first_pass_calls;
  // Per pass, over the passes after the second; empty without such passes.
  std::optional<double> steady_calls;
  std::optional<double> steady_chunks_moved;  // Chunks mapped.
  std::uint64_t retry_count = 0;  // Requests that were served only after the streams were synchronized.
  std::vector<std::uint64_t> pass_calls;  // Driver calls of each pass.
  // Mappings that the arena gave up in the last pass because there were too many, and a number that it would
  // not have exceeded.
  std::uint64_t last_dropped_mappings = 0;
  std::uint64_t enough_mappings = 0;
  ReplayTimes times;

  // 1 - requested / physical; 0 if nothing was requested.
  double fragmentation() const;
  double last_fragmentation() const;
};

// Plays the trace on `backend` and gives all memory back. A trace that does not complete is a result, not an
// error. Errors: those of the backend if a stream or the allocator cannot be made.
Result<ReplayResult> replay_trace(const AllocationTrace& trace, Backend& backend, ReplayTarget target,
                                  const ReplayOptions& options);

// Plays the same calls on the C library's malloc and free, for comparison in the same run, in as many passes
// as leave the machine most of its memory. Empty if that is no pass, if malloc refuses, and if the allocator
// is a sanitizer's, which would really take the memory.
std::optional<ReplayTimes> replay_malloc(const AllocationTrace& trace, int passes);

// The memory of a device that is not under pressure: 128 GiB, with which the published figures of other
// allocators were measured, or twice the requested peak if that is more.
std::uint64_t ample_memory(const AllocationTrace& trace);

// "41 %" of the trace's events.
std::string share_text(const AllocationTrace& trace, std::size_t event_count);

// The progress of a search for the smallest capacity.
struct CapacityProbe {
  int number = 0;  // Index of the capacity, from 1.
  std::uint64_t capacity_bytes = 0;
  std::size_t event_count = 0;  // Events of the trace played so far.
};
// "probe 3, 5.25 GiB: 41 %".
std::string probe_text(const CapacityProbe& probe, const AllocationTrace& trace);

// The smallest capacity of a model device on which one pass completes, in steps of its granularity. The
// search goes upward from the peak of the requested bytes, doubling the distance, and then halves the
// interval between the last failure and the first success. Success need not be monotone in the capacity: the
// trace completes with the returned capacity, and fails with some smaller capacity that was tried. Empty if
// the trace does not complete with eight times the requested peak. `progress` is called every few thousand
// events; may be null.
Result<std::optional<std::uint64_t>> find_minimum_capacity(
    const AllocationTrace& trace, ReplayTarget target,
    const std::function<void(const CapacityProbe& probe)>& progress);

// The length of a core cycle. It is measured by a loop of multiplications that each need the previous one,
// and take three cycles each on current x86-64 and most 64-bit ARM cores.
double measure_cycle_ns();

// The cost of reading the clock, which is subtracted from every measured call.
double measure_timer_ns();

}  // namespace forebay
