// The end of `forebay run`: what the processes of the command have recorded, in lines for a person.
#pragma once

#include <string>
#include <vector>

#include "allocator/preload/record.h"

namespace forebay {

// "handled N of M allocations, X of Y", then a line for whatever was not handled and why, for refusals, and
// for whoever came past the hook.
std::vector<std::string> run_summary(PreloadMode mode, const std::vector<PreloadReport>& records);

}  // namespace forebay
