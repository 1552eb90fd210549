// Timeline records the work of a rank as spans on named tracks, for Chrome's and Perfetto's viewers.
//
// With EngineOptions::timeline the engine marks its gathers, reductions, updates and copies, and the
// trainer's leases, in the order of their streams. The end of each span queues a host function, which
// slows the step: record a few steps, and do not measure speed with it.
//
// Threads: any.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/span.h"
#include "forebay/status.h"

namespace forebay {

class Timeline {
 public:
  struct Span {
    std::string track;
    std::string name;
    std::chrono::nanoseconds begin{0};
    std::chrono::nanoseconds end{0};
  };

  // `now`: the clock; null: a steady clock. `span_limit`: further spans are only counted.
  explicit Timeline(std::function<std::chrono::nanoseconds()> now = nullptr,
                    std::size_t span_limit = 1 << 20);

  std::chrono::nanoseconds now() const { return now_(); }
  // Spans of one track are begun and ended one after the other, or inside each other.
  void begin(std::string_view track);
  void end(std::string_view track, std::string_view name);

  std::vector<Span> spans() const;
  std::uint64_t dropped_count() const;

 private:
  struct Open {
    std::string track;
    std::vector<std::chrono::nanoseconds> begun;
  };
  Open& open(std::string_view track);

  const std::function<std::chrono::nanoseconds()> now_;
  const std::size_t span_limit_;
  mutable std::mutex mutex_;
  std::vector<Open> open_;
  std::vector<Span> spans_;
  std::uint64_t dropped_count_ = 0;
};

// The total time of the spans on the tracks `busy`, counted once where they overlap, and the part of it that
// no span on the tracks `cover` overlaps: communication, and the communication that computation did not hide.
struct Exposure {
  std::chrono::nanoseconds busy{0};
  std::chrono::nanoseconds exposed{0};
};
Exposure exposure(Span<const Timeline::Span> spans, std::string_view busy, std::string_view cover);

// One process for each rank, one thread for each track, in the format of chrome://tracing.
std::string timeline_json(Span<const std::vector<Timeline::Span>> by_rank);

}  // namespace forebay
