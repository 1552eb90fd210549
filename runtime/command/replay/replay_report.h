// The results of `forebay replay` for each trace, as JSON and as a table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/command/replay/trace_replay.h"

namespace forebay {

// One allocator's figures.
struct ReplayFigures {
  ReplayResult result;
  bool searched_minimum = false;
  std::optional<std::uint64_t> minimum_capacity_bytes;  // Empty after a search: none was found.
};

struct ReplayReport {
  std::string trace;
  std::string format;
  std::uint64_t event_count = 0;
  std::uint64_t warm_count = 0;
  std::uint64_t stream_count = 0;
  std::vector<std::string> notes;
  std::string device;
  std::uint64_t memory_bytes = 0;
  int passes = 0;
  std::size_t mappings_max = 0;
  double cycle_ns = 0;
  ReplayFigures arena;
  std::optional<ReplayFigures> baseline;
  std::optional<ReplayTimes> glibc;  // Empty without that comparison.
};

// A list with an object per trace. Figures that were not requested, or do not exist, are null.
std::string replay_json(const std::vector<ReplayReport>& reports);

// Tables for people: memory, then times, then notes.
std::string replay_text(const std::vector<ReplayReport>& reports);

}  // namespace forebay
