#include "runtime/command/page/timeline.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/page/text.h"

namespace forebay {
namespace {

// The drawing's own units. They are stretched to the width of the page.
constexpr double kWidth = 10000;
constexpr double kHeight = 1000;
constexpr std::size_t kSlices = 300;    // Slices of the time, and slices of the events.
constexpr std::size_t kMarksKept = 32;  // Refused requests from either end; thousands would hide all else.
constexpr std::size_t kTimeTicks = 5;
// A limit further above the peak than this is told and not drawn: it would press all else to the ground.
constexpr double kLimitDrawn = 1.5;

// When each point was: nanoseconds, or the number of its event where no times are known. Never falling.
class TimeAxis {
 public:
  explicit TimeAxis(const std::vector<PagePoint>& points, bool counts_events = false)
      : counts_events_(counts_events) {
    times_.reserve(points.size());
    std::uint64_t latest = 0;
    for (const PagePoint& point : points) times_.push_back(latest = std::max(latest, point.time_ns));
    if (latest > 0) return;
    counts_events_ = true;
    for (std::size_t i = 0; i < times_.size(); ++i) times_[i] = i;
  }
  bool counts_events() const { return counts_events_; }
  std::uint64_t at(std::size_t i) const { return times_[i]; }
  std::uint64_t end() const { return std::max<std::uint64_t>(times_.back(), 1); }
  long long x(std::size_t i) const { return std::llround(share(times_[i]) * kWidth); }
  std::size_t slice(std::size_t i) const {
    return std::min(static_cast<std::size_t>(share(times_[i]) * kSlices), kSlices - 1);
  }
  std::string text(double part) const {
    const double value = part * static_cast<double>(end());
    return counts_events_ ? "event " + std::to_string(std::llround(value))
                          : time_text(static_cast<std::uint64_t>(std::llround(value)));
  }

 private:
  double share(std::uint64_t time) const { return static_cast<double>(time) / static_cast<double>(end()); }

  std::vector<std::uint64_t> times_;
  bool counts_events_;
};

std::size_t highest(const std::vector<PagePoint>& points, std::uint64_t PagePoint::*bytes) {
  const auto found = std::max_element(points.begin(), points.end(),
                                      [&](const auto& a, const auto& b) { return a.*bytes < b.*bytes; });
  return static_cast<std::size_t>(found - points.begin());
}

// Keeps the points of [begin, end) without which the slice would look different.
void keep_of_slice(const std::vector<PagePoint>& points, std::size_t begin, std::size_t end,
                   std::vector<std::size_t>* kept) {
  std::size_t high = begin, low = begin, high_reserved = begin;
  for (std::size_t i = begin; i < end; ++i) {
    if (points[i].requested_bytes > points[high].requested_bytes) high = i;
    if (points[i].requested_bytes < points[low].requested_bytes) low = i;
    if (points[i].reserved_bytes > points[high_reserved].reserved_bytes) high_reserved = i;
  }
  kept->insert(kept->end(), {begin, high, low, high_reserved, end - 1});
}

std::vector<std::size_t> refusals_of(const std::vector<PagePoint>& points) {
  std::vector<std::size_t> refusals;
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (points[i].event == PageEvent::kOutOfMemory) refusals.push_back(i);
  }
  if (refusals.size() > 2 * kMarksKept) {
    refusals.erase(refusals.begin() + kMarksKept, refusals.end() - kMarksKept);
  }
  return refusals;
}

std::string numbers(const std::vector<std::uint64_t>& values) {
  std::string text = "[";
  for (const std::uint64_t value : values) text += (text.size() > 1 ? "," : "") + std::to_string(value);
  return text + "]";
}

class Drawing {
 public:
  explicit Drawing(const PageProcess& process)
      : process_(process),
        points_(process.points),
        axis_(process.points, process.counts_events),
        kept_(timeline_sample(process.points)),
        refusals_(refusals_of(process.points)) {
    const PagePoint& top = points_[highest(points_, &PagePoint::reserved_bytes)];
    const std::uint64_t requested = points_[highest(points_, &PagePoint::requested_bytes)].requested_bytes;
    top_bytes_ = std::max({top.reserved_bytes, requested, std::uint64_t{1}});
    const double reach = static_cast<double>(top_bytes_) * kLimitDrawn;
    for (const auto& limit : {process.capacity_bytes, process.baseline_reserved_bytes}) {
      if (limit && static_cast<double>(*limit) <= reach) top_bytes_ = std::max(top_bytes_, *limit);
    }
    // A power of two that leaves four to eight lines.
    while (top_bytes_ / step_bytes_ > 7) step_bytes_ *= 2;
    top_bytes_ = top_bytes_ > UINT64_MAX - step_bytes_ ? UINT64_MAX : round_up(top_bytes_, step_bytes_);
  }

  std::string html() const {
    const std::size_t peak =
        std::find(kept_.begin(), kept_.end(), highest(points_, &PagePoint::requested_bytes)) - kept_.begin();
    std::string text = "<figure class=\"timeline\">\n<figcaption>Memory over time</figcaption>\n";
    text += "<div class=\"frame\"><div class=\"scale\" aria-hidden=\"true\">" + scale() + "</div>\n";
    text +=
        "<div class=\"plot\" tabindex=\"0\" role=\"slider\" aria-label=\"Memory over time. Arrow keys move, "
        "plus and minus zoom, 0 shows all.\" aria-valuemin=\"0\" aria-valuemax=\"" +
        std::to_string(kept_.size() - 1) + "\" aria-valuenow=\"" + std::to_string(peak) + "\">\n";
    text += "<svg viewBox=\"0 0 10000 1000\" preserveAspectRatio=\"none\" aria-hidden=\"true\">" + lines() +
            "<path class=\"reserved\" d=\"" + area(&PagePoint::reserved_bytes) +
            "\"/><path class=\"requested\" d=\"" + area(&PagePoint::requested_bytes) + "\"/>" + limits() +
            marks() + "<path class=\"cursor\" d=\"\"/></svg>\n";
    text +=
        "<svg class=\"frees\" viewBox=\"0 0 10000 100\" preserveAspectRatio=\"none\" "
        "aria-hidden=\"true\"><path d=\"" +
        frees() + "\"/></svg></div></div>\n";
    text += "<div class=\"times\" aria-hidden=\"true\">";
    for (std::size_t i = 0; i < kTimeTicks; ++i) {
      text += "<span>" + axis_.text(static_cast<double>(i) / (kTimeTicks - 1)) + "</span>";
    }
    text += "</div>\n<p class=\"readout\" aria-live=\"off\">" + peak_text() + "</p>\n";
    text +=
        "<p class=\"tools\"><button type=\"button\" data-zoom=\"in\">Zoom in</button> <button "
        "type=\"button\" data-zoom=\"out\">Zoom out</button> <button type=\"button\" "
        "data-zoom=\"all\">All</button></p>\n";
    return text + legend() + data(peak) + "</figure>\n";
  }

 private:
  long long y(std::uint64_t bytes) const {
    return std::llround(kHeight - static_cast<double>(bytes) / static_cast<double>(top_bytes_) * kHeight);
  }

  std::string area(std::uint64_t PagePoint::*bytes) const {
    std::string path = "M" + std::to_string(axis_.x(kept_.front())) + " 1000";
    for (const std::size_t i : kept_) {
      path += "H" + std::to_string(axis_.x(i)) + "V" + std::to_string(y(points_[i].*bytes));
    }
    return path + "H10000V1000Z";
  }

  std::string line_at(const char* kind, std::uint64_t bytes) const {
    return std::string("<path class=\"") + kind + "\" d=\"M0 " + std::to_string(y(bytes)) + "H10000\"/>";
  }

  // 0, and every step up to the top.
  std::vector<std::uint64_t> ticks() const {
    std::vector<std::uint64_t> ticks{0};
    while (top_bytes_ - ticks.back() >= step_bytes_) ticks.push_back(ticks.back() + step_bytes_);
    return ticks;
  }

  std::string lines() const {
    std::string text;
    for (const std::uint64_t bytes : ticks()) text += line_at("line", bytes);
    return text;
  }

  std::string scale() const {
    std::string text;
    for (const std::uint64_t bytes : ticks()) {
      std::string figure = format_bytes(bytes);
      if (const std::size_t end = figure.find(".00"); end != std::string::npos) figure.erase(end, 3);
      text += format_text("<span style=\"top:%.1f%%\">", static_cast<double>(y(bytes)) / kHeight * 100) +
              figure + "</span>";
    }
    return text;
  }

  bool is_drawn(const std::optional<std::uint64_t>& limit) const { return limit && *limit <= top_bytes_; }
  std::string limits() const {
    std::string text;
    if (is_drawn(process_.capacity_bytes)) text += line_at("capacity", *process_.capacity_bytes);
    if (is_drawn(process_.baseline_reserved_bytes)) {
      text += line_at("baseline", *process_.baseline_reserved_bytes);
    }
    return text;
  }

  std::string marks() const {
    std::string path;
    for (const std::size_t i : refusals_) path += "M" + std::to_string(axis_.x(i)) + " 0V1000";
    return path.empty() ? path : "<path class=\"refused\" d=\"" + path + "\"/>";
  }

  // How many frees each slice of the time has, as bars; the square root, so that single ones show.
  std::string frees() const {
    std::array<std::uint64_t, kSlices> counts{};
    for (std::size_t i = 0; i < points_.size(); ++i) {
      if (points_[i].event == PageEvent::kFree) ++counts[axis_.slice(i)];
    }
    const double most = std::sqrt(static_cast<double>(*std::max_element(counts.begin(), counts.end())));
    std::string path;
    for (std::size_t i = 0; i < kSlices; ++i) {
      if (counts[i] == 0) continue;
      const auto height = std::llround(20 + 80 * std::sqrt(static_cast<double>(counts[i])) / most);
      path += "M" + std::to_string(std::llround(static_cast<double>(i) * kWidth / kSlices)) + " 100v-" +
              std::to_string(height) + "h30V100Z";
    }
    return path;
  }

  std::string peak_text() const {
    const std::size_t i = highest(points_, &PagePoint::requested_bytes);
    const std::string when =
        axis_.counts_events() ? "event " + std::to_string(axis_.at(i)) : time_text(axis_.at(i));
    return "Peak of requested memory, at " + when + ": " + format_bytes(points_[i].requested_bytes) +
           " requested, " + format_bytes(points_[i].reserved_bytes) + " reserved.";
  }

  std::string legend() const {
    std::string text =
        "<ul class=\"legend\"><li><i class=\"requested\"></i>requested</li><li><i "
        "class=\"reserved\"></i>reserved</li><li><i class=\"free\"></i>frees, below the axis</li>";
    if (!refusals_.empty()) text += "<li><i class=\"refused\"></i>out of memory</li>";
    if (is_drawn(process_.capacity_bytes)) text += "<li><i class=\"capacity\"></i>memory limit</li>";
    if (is_drawn(process_.baseline_reserved_bytes)) {
      text += "<li><i class=\"baseline\"></i>reserved by a caching allocator</li>";
    }
    text += "</ul>\n";
    if (kept_.size() < points_.size()) {
      text += "<p class=\"note\">" + format_count(kept_.size(), "point") + " of " +
              format_count(points_.size(), "event") + " are drawn; every peak is among them.</p>\n";
    }
    return text;
  }

  std::string data(std::size_t peak) const {
    std::vector<std::uint64_t> times, requested, reserved, bytes;
    std::string events;
    for (const std::size_t i : kept_) {
      times.push_back(axis_.at(i));
      requested.push_back(points_[i].requested_bytes);
      reserved.push_back(points_[i].reserved_bytes);
      bytes.push_back(points_[i].bytes);
      events += "afrx"[static_cast<std::size_t>(points_[i].event)];
    }
    return "<script type=\"application/json\">{\"counts\":" +
           std::string(axis_.counts_events() ? "true" : "false") + ",\"peak\":" + std::to_string(peak) +
           ",\"time\":" + numbers(times) + ",\"requested\":" + numbers(requested) +
           ",\"reserved\":" + numbers(reserved) + ",\"bytes\":" + numbers(bytes) + ",\"events\":\"" + events +
           "\"}</script>\n";
  }

  const PageProcess& process_;
  const std::vector<PagePoint>& points_;
  const TimeAxis axis_;
  const std::vector<std::size_t> kept_;
  const std::vector<std::size_t> refusals_;
  std::uint64_t top_bytes_ = 1;
  std::uint64_t step_bytes_ = 1;
};

}  // namespace

std::vector<std::size_t> timeline_sample(const std::vector<PagePoint>& points) {
  std::vector<std::size_t> kept;
  if (points.size() <= kTimelinePoints) {
    for (std::size_t i = 0; i < points.size(); ++i) kept.push_back(i);
    return kept;
  }
  const TimeAxis axis(points);
  const auto slice = [&](std::size_t i) { return std::pair(axis.slice(i), i * kSlices / points.size()); };
  for (std::size_t begin = 0; begin < points.size();) {
    std::size_t end = begin + 1;
    while (end < points.size() && slice(end) == slice(begin)) ++end;
    keep_of_slice(points, begin, end, &kept);
    begin = end;
  }
  const std::vector<std::size_t> refusals = refusals_of(points);
  kept.insert(kept.end(), refusals.begin(), refusals.end());
  // The first of each, so that the point named as the peak is drawn.
  kept.push_back(highest(points, &PagePoint::requested_bytes));
  kept.push_back(highest(points, &PagePoint::reserved_bytes));
  std::sort(kept.begin(), kept.end());
  kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
  return kept;
}

std::string timeline_html(const PageProcess& process) {
  if (process.points.empty()) return "<p class=\"note\">No events were recorded.</p>\n";
  return Drawing(process).html();
}

}  // namespace forebay
