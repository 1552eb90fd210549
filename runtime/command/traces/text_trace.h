// forebay's own allocation traces. A line is `a ID BYTES STREAM` or `f ID`; `# warm` ends the blocks that
// were live before the recording began; other lines that begin with '#' and empty ones say nothing.
#pragma once

#include <string>
#include <string_view>

#include "runtime/command/traces/allocation_trace.h"

namespace forebay {

bool is_text_trace(std::string_view text);

// Errors: kInvalidArgument with the number of the first line that makes no sense.
Result<AllocationTrace> parse_text_trace(std::string_view text, const std::string& name);

}  // namespace forebay
