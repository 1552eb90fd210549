#include "forebay/timeline.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

namespace forebay {
namespace {

// How long an anchor serves. Longer: the device's clock and the host's drift apart.
constexpr std::chrono::seconds kAnchorLife{1};
// Pending spans at which their events are asked, at least.
constexpr std::size_t kCollectMin = 64;

}  // namespace

Timeline::Timeline(std::function<std::chrono::nanoseconds()> now, std::size_t span_limit)
    : now_(
          now ? std::move(now)
              : [] { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()); }),
      span_limit_(span_limit) {}

Timeline::Open& Timeline::open(std::string_view track) {
  const auto found =
      std::find_if(open_.begin(), open_.end(), [&](const Open& o) { return o.track == track; });
  if (found != open_.end()) return *found;
  return open_.emplace_back(Open{std::string(track), {}});
}

Timeline::Device& Timeline::device(Backend& backend) const {
  const auto found =
      std::find_if(devices_.begin(), devices_.end(), [&](const Device& d) { return d.backend == &backend; });
  if (found != devices_.end()) return *found;
  return devices_.emplace_back(Device{&backend, {}, {}});
}

void Timeline::begin(std::string_view track) {
  const std::chrono::nanoseconds time = now_();
  const std::lock_guard lock(mutex_);
  open(track).begun.push_back({.time = time});
}

void Timeline::begin(std::string_view track, Backend& backend, Stream stream) {
  Mark mark = record(backend, stream);
  const std::lock_guard lock(mutex_);
  open(track).begun.push_back(std::move(mark));
}

void Timeline::end(std::string_view track, std::string_view name) {
  push_end(track, name, {.time = now_()});
}

void Timeline::end(std::string_view track, std::string_view name, Backend& backend, Stream stream) {
  push_end(track, name, record(backend, stream));
  bool is_many = false;
  {
    const std::lock_guard lock(mutex_);
    is_many = pending_.size() >= collect_at_;
  }
  if (is_many) collect();
}

void Timeline::push_end(std::string_view track, std::string_view name, Mark end) {
  const std::lock_guard lock(mutex_);
  Open& o = open(track);
  if (o.begun.empty()) return give_back(end);
  Mark begin = std::move(o.begun.back());
  o.begun.pop_back();
  if (spans_.size() + pending_.size() >= span_limit_) {
    ++dropped_count_;
    give_back(begin);
    return give_back(end);
  }
  Span span{std::string(track), std::string(name), begin.time, end.time};
  if (begin.backend == nullptr && end.backend == nullptr) {
    spans_.push_back(std::move(span));
  } else {
    // With one anchor the span's length is exact.
    if (begin.anchor != nullptr) end.anchor = begin.anchor;
    pending_.push_back({std::move(span), std::move(begin), std::move(end)});
  }
}

Event Timeline::take_event(Backend& backend) {
  {
    const std::lock_guard lock(mutex_);
    std::vector<Event>& idle = device(backend).idle;
    if (!idle.empty()) {
      const Event event = idle.back();
      idle.pop_back();
      return event;
    }
  }
  const Result<Event> made = backend.timed_event_create();
  return made.ok() ? made.value() : Event();
}

void Timeline::give_back(Mark& mark) const {
  if (mark.event != Event()) device(*mark.backend).idle.push_back(std::exchange(mark.event, Event()));
  mark.anchor.reset();
}

// Null if the backend refuses. On a stream of its own, which has nothing else to do.
std::shared_ptr<const Timeline::Anchor> Timeline::make_anchor(Backend& backend) {
  const Result<Stream> stream = backend.stream_create();
  if (!stream.ok()) return nullptr;
  auto anchor = std::make_shared<Anchor>();
  anchor->event = take_event(backend);
  const bool is_reached = anchor->event != Event() &&
                          backend.event_record(anchor->event, stream.value()).ok() &&
                          backend.event_synchronize(anchor->event).ok();
  anchor->time = now_();
  static_cast<void>(backend.stream_destroy(stream.value()));
  const std::lock_guard lock(mutex_);
  if (!is_reached) {
    Mark unused{.backend = &backend, .event = anchor->event};
    give_back(unused);
    return nullptr;
  }
  device(backend).anchors.push_back(anchor);
  return anchor;
}

// Without an event if the backend refuses.
Timeline::Mark Timeline::record(Backend& backend, Stream stream) {
  Mark mark{.backend = &backend};
  const std::chrono::nanoseconds now = now_();
  {
    const std::lock_guard lock(mutex_);
    const Device& known = device(backend);
    if (!known.anchors.empty()) mark.anchor = known.anchors.back();
  }
  if (mark.anchor == nullptr || now - mark.anchor->time > kAnchorLife) mark.anchor = make_anchor(backend);
  if (mark.anchor == nullptr) return mark;
  mark.event = take_event(backend);
  if (mark.event == Event() || backend.event_record(mark.event, stream).ok()) return mark;
  const std::lock_guard lock(mutex_);
  give_back(mark);
  return mark;
}

// The spans whose ends are reached get their times.
void Timeline::collect() const {
  std::vector<Pending> work;
  {
    const std::lock_guard lock(mutex_);
    work.swap(pending_);
  }
  std::vector<Pending> left;
  std::vector<Span> known;
  std::vector<Mark> done;
  std::vector<std::string> waiting;  // Tracks of spans that are left: those behind stay, too, to keep order.
  for (Pending& pending : work) {
    const Mark& begin = pending.begin;
    const Mark& end = pending.end;
    if (std::find(waiting.begin(), waiting.end(), pending.span.track) != waiting.end()) {
      left.push_back(std::move(pending));
      continue;
    }
    if (begin.backend == end.backend && begin.event != Event() && end.event != Event()) {
      const Result<bool> reached = end.backend->event_query(end.event);
      if (reached.ok() && !reached.value()) {
        waiting.push_back(pending.span.track);
        left.push_back(std::move(pending));
        continue;
      }
      const Result<std::chrono::nanoseconds> first = begin.backend->elapsed(begin.anchor->event, begin.event);
      const Result<std::chrono::nanoseconds> last = end.backend->elapsed(end.anchor->event, end.event);
      if (first.ok() && last.ok()) {
        pending.span.begin = begin.anchor->time + first.value();
        pending.span.end = end.anchor->time + last.value();
        known.push_back(std::move(pending.span));
      }
    }
    done.push_back(std::move(pending.begin));
    done.push_back(std::move(pending.end));
  }
  const std::lock_guard lock(mutex_);
  for (Mark& mark : done) give_back(mark);
  spans_.insert(spans_.end(), std::make_move_iterator(known.begin()), std::make_move_iterator(known.end()));
  pending_.insert(pending_.begin(), std::make_move_iterator(left.begin()),
                  std::make_move_iterator(left.end()));
  collect_at_ = std::max(kCollectMin, 2 * pending_.size());
  for (Device& each : devices_) {
    while (each.anchors.size() > 1 && each.anchors.front().use_count() == 1) {
      each.idle.push_back(each.anchors.front()->event);
      each.anchors.erase(each.anchors.begin());
    }
  }
}

void Timeline::release(Backend& backend) {
  collect();
  std::vector<Event> events;
  {
    const std::lock_guard lock(mutex_);
    events = std::move(device(backend).idle);
    for (const std::shared_ptr<const Anchor>& anchor : device(backend).anchors)
      events.push_back(anchor->event);
    std::erase_if(devices_, [&](const Device& known) { return known.backend == &backend; });
    // The events of spans that have not ended go too.
    const auto take = [&](const Mark& mark) {
      if (mark.backend == &backend && mark.event != Event()) events.push_back(mark.event);
    };
    for (const Pending& pending : pending_) {
      take(pending.begin);
      take(pending.end);
    }
    const auto is_gone = [&](const Mark& mark) { return mark.backend == &backend; };
    std::erase_if(pending_, [&](const Pending& p) { return is_gone(p.begin) || is_gone(p.end); });
    for (Open& o : open_) {
      for (const Mark& mark : o.begun) take(mark);
      std::erase_if(o.begun, is_gone);
    }
  }
  for (const Event event : events) static_cast<void>(backend.event_destroy(event));
}

std::vector<Timeline::Span> Timeline::spans() const {
  collect();
  const std::lock_guard lock(mutex_);
  return spans_;
}

std::uint64_t Timeline::dropped_count() const {
  const std::lock_guard lock(mutex_);
  return dropped_count_;
}

namespace {

using Interval = std::pair<std::chrono::nanoseconds, std::chrono::nanoseconds>;

// The spans of `track`, in order, with overlapping ones joined.
std::vector<Interval> intervals(Span<const Timeline::Span> spans, std::string_view track) {
  std::vector<Interval> all;
  for (const Timeline::Span& span : spans) {
    if (span.track == track) all.emplace_back(span.begin, span.end);
  }
  std::sort(all.begin(), all.end());
  std::vector<Interval> merged;
  for (const Interval& next : all) {
    if (merged.empty() || next.first > merged.back().second) {
      merged.push_back(next);
    } else {
      merged.back().second = std::max(merged.back().second, next.second);
    }
  }
  return merged;
}

}  // namespace

Exposure exposure(Span<const Timeline::Span> spans, std::string_view busy, std::string_view cover) {
  const std::vector<Interval> covers = intervals(spans, cover);
  Exposure result;
  auto next = covers.begin();
  for (const auto& [begin, end] : intervals(spans, busy)) {
    std::chrono::nanoseconds hidden{0};
    while (next != covers.end() && next->second <= begin) ++next;
    for (auto i = next; i != covers.end() && i->first < end; ++i)
      hidden += std::min(end, i->second) - std::max(begin, i->first);
    result.busy += end - begin;
    result.exposed += end - begin - hidden;
  }
  return result;
}

std::string timeline_json(Span<const std::vector<Timeline::Span>> by_rank) {
  using Json = nlohmann::json;
  Json events = Json::array();
  std::chrono::nanoseconds first = std::chrono::nanoseconds::max();
  for (const auto& spans : by_rank) {
    for (const Timeline::Span& span : spans) first = std::min(first, span.begin);
  }
  const auto microseconds = [](std::chrono::nanoseconds time) {
    return static_cast<double>(time.count()) / 1000;
  };
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].empty()) continue;
    std::vector<std::string> tracks;
    const auto number = [&](const std::string& track) {
      const auto found = std::find(tracks.begin(), tracks.end(), track);
      if (found != tracks.end()) return static_cast<std::size_t>(found - tracks.begin());
      tracks.push_back(track);
      return tracks.size() - 1;
    };
    for (const Timeline::Span& span : by_rank[rank]) {
      events.push_back({{"name", span.name},
                        {"ph", "X"},
                        {"pid", rank},
                        {"tid", number(span.track)},
                        {"ts", microseconds(span.begin - first)},
                        {"dur", microseconds(span.end - span.begin)}});
    }
    events.push_back({{"name", "process_name"},
                      {"ph", "M"},
                      {"pid", rank},
                      {"args", {{"name", "rank " + std::to_string(rank)}}}});
    for (std::size_t i = 0; i < tracks.size(); ++i) {
      events.push_back(
          {{"name", "thread_name"}, {"ph", "M"}, {"pid", rank}, {"tid", i}, {"args", {{"name", tracks[i]}}}});
    }
  }
  const Json document = {{"traceEvents", events}, {"displayTimeUnit", "ms"}};
  return document.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace forebay
