// Playing an allocation trace against an allocator: what it took from the device for what was asked, what
// each call cost, and the smallest device on which it would have completed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "forebay/backend.h"
#include "runtime/command/replay/counting_backend.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay {

// kArena: forebay's. kBaseline: the caching allocator of baseline_allocator.h.
enum class ReplayTarget : std::uint8_t { kArena, kBaseline };

struct ReplayOptions {
  int passes = 5;     // Times the trace is played; what is live at the end of one is freed before the next.
  bool timed = true;  // Measure every call.
  // Called before each pass, from 1, and every few thousand events with how many of them were played; null:
  // nobody wants to know.
  std::function<void(int pass, std::size_t event_count)> progress;
};

// Nanoseconds per call, the timer's own cost taken off.
struct CallTimes {
  std::uint64_t count = 0;  // Calls measured; without any the rest is 0.
  double p50_ns = 0;
  double p99_ns = 0;
  double p999_ns = 0;
};

struct ReplayTimes {
  CallTimes allocate;  // All calls of all passes.
  CallTimes free;
  CallTimes allocate_off_mapping;  // Those that made no driver call.
  CallTimes free_off_mapping;
};

struct ReplayResult {
  bool completed = false;
  std::string failure;  // What stopped it: the event and the allocator's message.
  std::uint64_t peak_requested_bytes = 0;
  std::uint64_t peak_physical_bytes = 0;       // In the first pass.
  std::uint64_t last_peak_physical_bytes = 0;  // In the last pass.
  DriverCalls first_pass_calls;
  // Per pass, over those after the second; empty where there were none.
  std::optional<double> steady_calls;
  std::optional<double> steady_chunks_moved;  // Chunks mapped.
  std::uint64_t retry_count = 0;  // Requests that were served only after the streams had been synchronized.
  ReplayTimes times;

  // 1 - requested / physical; 0 when nothing was asked for.
  double fragmentation() const;
  double last_fragmentation() const;
};

// Plays the trace on `backend`. Whatever is left of the allocator is given back. Errors: what the backend
// says when a stream or the allocator cannot be made. A trace that does not complete is a result, not an
// error.
Result<ReplayResult> replay_trace(const AllocationTrace& trace, Backend& backend, ReplayTarget target,
                                  const ReplayOptions& options);

// The same calls to the C library's malloc and free, for comparison in the same run; as many passes as leave
// the machine most of its memory. Empty where there would be none, where malloc refuses, and where the
// allocator is a sanitizer's, which would really take the memory.
std::optional<ReplayTimes> replay_malloc(const AllocationTrace& trace, int passes);

// How far the search of a smallest capacity is.
struct CapacityProbe {
  int number = 0;  // Of the capacities tried, from 1.
  std::uint64_t capacity_bytes = 0;
  std::size_t event_count = 0;  // Of the trace's, played so far.
};
// "probe 3, 5.25 GiB: 41 %".
std::string probe_text(const CapacityProbe& probe, const AllocationTrace& trace);

// The smallest capacity of a model device on which one pass completes, in steps of its granularity. It is
// searched from the peak of what was requested upward, doubling the distance, then by halves between the last
// that failed and the first that did not. Whether a trace completes need not be monotone in the capacity: the
// answer is a capacity at which it does complete, and the step below it, or one that was tried, is one at
// which it does not. Empty if it does not complete with eight times the peak requested. `progress` is called
// every few thousand events; null: nobody wants to know.
Result<std::optional<std::uint64_t>> find_minimum_capacity(
    const AllocationTrace& trace, ReplayTarget target,
    const std::function<void(const CapacityProbe& probe)>& progress);

// The length of a core cycle, measured by a loop of multiplications that each need the one before, at three
// cycles each, which is what current x86-64 and most 64-bit ARM cores take.
double measure_cycle_ns();

// What asking the clock for the time costs, which is taken off every measured call.
double measure_timer_ns();

}  // namespace forebay
