// The timeline of a report's page: requested and reserved memory of one process over time, as a drawing that
// stands without a script and data from which the script answers the pointer and the keyboard.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/command/page/report_page.h"

namespace forebay {

// The largest number of points that are drawn. With fewer, spikes between them are drawn too broad; with
// more, pages of many processes get slow to open.
inline constexpr std::size_t kTimelinePoints = 4096;

// The indices of the points to draw, in order: all, or a sample. The sample keeps the first, last, highest
// and lowest point of every slice of the time and of the events, so that no peak is lost, and the first and
// the last refused requests.
std::vector<std::size_t> timeline_sample(const std::vector<PagePoint>& points);

// Without points: a sentence that says so.
std::string timeline_html(const PageProcess& process);

}  // namespace forebay
