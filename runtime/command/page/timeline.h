// The timeline of a report's page: requested and reserved memory of one process over time, as a drawing that
// stands without a script and data from which the script answers the pointer and the keyboard.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/command/page/report_page.h"

namespace forebay {

// The most points that are drawn. With fewer, spikes between them are drawn too broad; with more, pages of
// many processes get slow to open.
inline constexpr std::size_t kTimelinePoints = 4096;

// Which points are drawn, in order: all, or as many as are seen. Of every slice of the time and of the events
// the first, the last, the highest and the lowest stay, so that no peak is lost; so do the first and the last
// refused requests.
std::vector<std::size_t> timeline_sample(const std::vector<PagePoint>& points);

// Empty points: a sentence that says so.
std::string timeline_html(const PageProcess& process);

}  // namespace forebay
