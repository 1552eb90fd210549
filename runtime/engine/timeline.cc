#include "forebay/timeline.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace forebay {

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

void Timeline::begin(std::string_view track) {
  const std::chrono::nanoseconds time = now_();
  const std::lock_guard lock(mutex_);
  open(track).begun.push_back(time);
}

void Timeline::end(std::string_view track, std::string_view name) {
  const std::chrono::nanoseconds time = now_();
  const std::lock_guard lock(mutex_);
  Open& o = open(track);
  if (o.begun.empty()) return;
  const std::chrono::nanoseconds begin = o.begun.back();
  o.begun.pop_back();
  if (spans_.size() >= span_limit_) {
    ++dropped_count_;
    return;
  }
  spans_.push_back({std::string(track), std::string(name), begin, time});
}

std::vector<Timeline::Span> Timeline::spans() const {
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
