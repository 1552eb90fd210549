// Explains from an allocation trace why memory ran out: fragmentation or a true shortage, the holders of
// memory, and the smallest capacity that suffices.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/command/replay/trace_replay.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay {

enum class Verdict : std::uint8_t {
  kFragmentation,  // A request failed although enough bytes were free, in pieces.
  kShortage,       // A request failed, and all free bytes together would not have sufficed.
  kUnclear,        // A request failed, and the file does not contain the free bytes.
  kNoFailure,      // No recorded request failed.
};

struct Holding {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;  // Blocks.
};

struct Explanation {
  Verdict verdict = Verdict::kNoFailure;
  std::uint64_t free_bytes = 0;   // In the reserved memory, and on the device if that is known.
  std::uint64_t short_bytes = 0;  // kShortage: the missing bytes.
  // Most memory that the process could have: reserved, and free on the device.
  std::optional<std::uint64_t> capacity_bytes;
  std::uint64_t live_bytes = 0;   // Requested bytes at the moment that is explained.
  bool has_names = false;         // Holdings are by source line; otherwise by size.
  std::vector<Holding> holdings;  // At that moment, largest first.
  std::uint64_t peak_requested_bytes = 0;
  std::optional<std::uint64_t> arena_capacity_bytes;  // The smallest that suffices.
  std::optional<std::uint64_t> baseline_capacity_bytes;
};

// Called during the replays that search the smallest capacities. `allocator`: the name of the replayed one.
using ExplainProgress = std::function<void(const char* allocator, const CapacityProbe& probe)>;

// Explains the moment of the last failed request, or else the peak. `progress` may be null. Errors: those of
// find_minimum_capacity.
Result<Explanation> explain(const AllocationTrace& trace, const ExplainProgress& progress);

// The verdict, and the lines about the state, the needs and the remedy.
std::vector<std::string> explanation_lines(const AllocationTrace& trace, const Explanation& explanation);

// About ten lines for a person: the same, with the largest holders.
std::string explanation_text(const AllocationTrace& trace, const Explanation& explanation);

}  // namespace forebay
