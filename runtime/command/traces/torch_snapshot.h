// PyTorch's memory snapshots: the pickle that torch.cuda.memory._dump_snapshot writes, with or without the
// history of allocations (device_traces), and the bare list of segments of older versions.
//
// The blocks that are live when the history begins are not recorded. They are inferred from frees without an
// allocation and from the blocks of the segments at the end, and are played first, in address order.
//
// Source: PyTorch, torch/csrc/cuda/memory_snapshot and the format its memory visualiser reads.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/command/traces/allocation_trace.h"

namespace forebay {

bool is_torch_snapshot(std::string_view text);

// One trace per device that has segments or a history. Errors: kInvalidArgument, with the byte offset if the
// pickle itself is damaged, or with the event (counted from 1) that is contradictory.
Result<std::vector<AllocationTrace>> parse_torch_snapshot(std::string_view text, const std::string& name);

}  // namespace forebay
