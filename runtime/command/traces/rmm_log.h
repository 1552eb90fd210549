// The CSV that RMM's logging adaptor writes: `Thread,Time,Action,Pointer,Size,Stream` and a line per call,
// where the action is `allocate`, `free` or `allocate failure`. Columns are found by name, so that more of
// them, or another order, do no harm.
//
// Source: rapidsai/rmm, logging_resource_adaptor and its replay benchmark.
#pragma once

#include <string>
#include <string_view>

#include "runtime/command/traces/allocation_trace.h"

namespace forebay {

bool is_rmm_log(std::string_view text);

// What is freed without having been allocated was live before the log began: it is warm, in address order.
// What contradicts itself is taken as the log's loss and counted in the notes. Errors: kInvalidArgument with
// the number of the first line that makes no sense.
Result<AllocationTrace> parse_rmm_log(std::string_view text, const std::string& name);

}  // namespace forebay
