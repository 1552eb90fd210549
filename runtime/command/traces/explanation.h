// What an allocation trace says about why memory ran out: fragmentation or a true shortage, who held what,
// and how little would have done.
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
  kFragmentation,  // A request failed although as many bytes were free, in pieces.
  kShortage,       // A request failed, and all that was free would not have sufficed.
  kUnclear,        // A request failed, and the file does not say how much was free.
  kNoFailure,      // No request failed in what was recorded.
};

struct Holding {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;  // Blocks.
};

struct Explanation {
  Verdict verdict = Verdict::kNoFailure;
  std::uint64_t free_bytes = 0;   // Within what was reserved, and on the device where that is known.
  std::uint64_t short_bytes = 0;  // kShortage: what was missing.
  std::optional<std::uint64_t>
      capacity_bytes;             // What the process could have had: reserved, and free on the device.
  std::uint64_t live_bytes = 0;   // Requested bytes at the moment that is explained.
  bool has_names = false;         // Holdings are by source line; otherwise by size.
  std::vector<Holding> holdings;  // At that moment, largest first.
  std::uint64_t peak_requested_bytes = 0;
  std::optional<std::uint64_t> arena_capacity_bytes;  // The smallest that would do.
  std::optional<std::uint64_t> baseline_capacity_bytes;
};

// Told of the replays that search the smallest capacities, whose allocator has that name; null: nobody wants
// to know.
using ExplainProgress = std::function<void(const char* allocator, const CapacityProbe& probe)>;

// The moment explained is that of the last failed request, else the peak. Errors: those of
// find_minimum_capacity.
Result<Explanation> explain(const AllocationTrace& trace, const ExplainProgress& progress);

// About ten lines for a person.
std::string explanation_text(const AllocationTrace& trace, const Explanation& explanation);

}  // namespace forebay
