// The last lines of `forebay run`: a summary of the records of the command's processes.
#pragma once

#include <string>
#include <vector>

#include "allocator/preload/record.h"

namespace forebay {

// "handled N of M allocations, X of Y", then lines about allocations that were not handled and why, about
// refusals, and about libraries that bypass the hook.
std::vector<std::string> run_summary(PreloadMode mode, const std::vector<PreloadReport>& records);

}  // namespace forebay
