// The web page of a recorded trace (`forebay explain --report`, `forebay replay --report`): the trace is
// played once by the arena, and drawn as `forebay run --report` draws a process.
#pragma once

#include <cstddef>
#include <functional>

#include "forebay/backend.h"
#include "forebay/status.h"
#include "runtime/command/page/report_page.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay {

// Plays the trace on `backend`, and once more with the baseline allocator. The holders of blocks are source
// lines where the trace knows any. `progress`: called every few thousand events; may be null. Errors: those
// of replay_trace. A trace that does not complete is drawn up to that event, and a line says so.
Result<PageProcess> trace_page(const AllocationTrace& trace, Backend& backend,
                               const std::function<void(std::size_t event_count)>& progress);

}  // namespace forebay
