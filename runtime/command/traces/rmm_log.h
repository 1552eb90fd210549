// The CSV that RMM's logging adaptor writes: `Thread,Time,Action,Pointer,Size,Stream` and a line per call,
// where the action is `allocate`, `free` or `allocate failure`. Columns are found by name: more of them, or
// another order, are fine.
//
// Source: rapidsai/rmm, logging_resource_adaptor and its replay benchmark.
#pragma once

#include <string>
#include <string_view>

#include "runtime/command/traces/allocation_trace.h"

namespace forebay {

bool is_rmm_log(std::string_view text);

// A block that is freed without an allocation was live before the log began: it is warm, in address order.
// Contradictory lines are taken as losses of the log and counted in the notes. Errors: kInvalidArgument with
// the number of the first line that cannot be read.
Result<AllocationTrace> parse_rmm_log(std::string_view text, const std::string& name);

}  // namespace forebay
