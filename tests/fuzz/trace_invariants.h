// The invariants of every trace that a parser accepts, for any input.
#pragma once

#include <cstdint>
#include <vector>

#include "forebay/check.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay::testing {

inline void check_trace(const AllocationTrace& trace) {
  enum class State : std::uint8_t { kUnseen, kLive, kFreed };
  std::vector<State> states(trace.blocks.size(), State::kUnseen);
  std::uint64_t live = 0;
  FOREBAY_CHECK(trace.warm_event_count <= trace.events.size(), "more warm events than events");
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const TraceEvent& event = trace.events[i];
    FOREBAY_CHECK(event.block < trace.blocks.size(), "event %zu is of no block", i);
    const TraceBlock& block = trace.blocks[event.block];
    FOREBAY_CHECK(event.stream < trace.stream_count && block.stream < trace.stream_count,
                  "event %zu is on no stream", i);
    FOREBAY_CHECK(block.holder < trace.holders.size(), "event %zu has no holder", i);
    FOREBAY_CHECK(!event.is_free || i >= trace.warm_event_count, "event %zu frees among the warm", i);
    State& state = states[event.block];
    FOREBAY_CHECK(state == (event.is_free ? State::kLive : State::kUnseen), "event %zu out of order", i);
    state = event.is_free ? State::kFreed : State::kLive;
    live = event.is_free ? live - block.bytes : live + block.bytes;
    FOREBAY_CHECK(live <= kTraceBlockLimit, "event %zu: too much is live", i);
  }
  FOREBAY_CHECK(trace.peak_requested_bytes() <= kTraceBlockLimit, "the peak is too large");
  if (trace.failure) {
    FOREBAY_CHECK(trace.failure->event < trace.events.size(), "the failure is at no event");
    FOREBAY_CHECK(trace.blocks[trace.events[trace.failure->event].block].failed, "the failure did not fail");
  }
  if (trace.state) {
    FOREBAY_CHECK(trace.state->live_bytes <= trace.state->reserved_bytes, "more live than reserved");
    FOREBAY_CHECK(trace.state->largest_free_bytes <= trace.state->reserved_bytes, "more free than reserved");
  }
}

}  // namespace forebay::testing
