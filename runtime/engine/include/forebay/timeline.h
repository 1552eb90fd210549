// Timeline records the work of a rank as spans on named tracks, for Chrome's and Perfetto's viewers.
//
// With EngineOptions::timeline the engine marks its gathers, reductions, updates and copies, and the
// trainer's leases, in the order of their streams. A span of a stream is two events, which the device notes
// with their times; nothing waits for them.
//
// Threads: any.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/backend.h"
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
  // The same, as points of a stream. A point that the backend refuses drops its span.
  void begin(std::string_view track, Backend& backend, Stream stream);
  void end(std::string_view track, std::string_view name, Backend& backend, Stream stream);
  // Gives the events of `backend` back; spans that its streams have not reached are dropped. Call this before
  // the backend ends.
  void release(Backend& backend);

  // The spans that have ended so far.
  std::vector<Span> spans() const;
  std::uint64_t dropped_count() const;

 private:
  // A point of a backend of which the time is known.
  struct Anchor {
    Event event;
    std::chrono::nanoseconds time{0};
  };
  // A time, or a point of a stream.
  struct Mark {
    std::chrono::nanoseconds time{0};
    Backend* backend = nullptr;
    Event event;
    std::shared_ptr<const Anchor> anchor;  // From before `event`. Shared with other marks.
  };
  struct Open {
    std::string track;
    std::vector<Mark> begun;
  };
  // A span whose times are not known yet.
  struct Pending {
    Span span;
    Mark begin;
    Mark end;
  };
  struct Device {
    Backend* backend = nullptr;
    std::vector<Event> idle;
    std::vector<std::shared_ptr<const Anchor>> anchors;  // The last one is in use.
  };
  // These three with mutex_ held.
  Open& open(std::string_view track);
  Device& device(Backend& backend) const;
  void give_back(Mark& mark) const;
  // No mutex is held during calls of a Backend.
  void push_end(std::string_view track, std::string_view name, Mark end);
  Mark record(Backend& backend, Stream stream);
  std::shared_ptr<const Anchor> make_anchor(Backend& backend);
  Event take_event(Backend& backend);
  void collect() const;

  const std::function<std::chrono::nanoseconds()> now_;
  const std::size_t span_limit_;
  mutable std::mutex mutex_;
  std::vector<Open> open_;
  mutable std::vector<Device> devices_;
  mutable std::vector<Pending> pending_;
  mutable std::size_t collect_at_ = 0;  // The number of pending spans at which their events are asked.
  mutable std::vector<Span> spans_;
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
