#include "runtime/command/traces/explanation.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "forebay/status.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/replay/trace_replay.h"
#include "runtime/command/text_table.h"

namespace forebay {
namespace {

constexpr std::size_t kHoldingsShown = 4;
constexpr std::size_t kLabelWidth = 9;  // "Holders: "

// Sums of the blocks live after the events [0, end), those that failed left out.
struct Moment {
  std::uint64_t live_bytes = 0;
  std::uint64_t peak_bytes = 0;  // The most of live_bytes until then.
  std::vector<bool> is_live;     // By block.
};

Moment at(const AllocationTrace& trace, std::size_t end) {
  Moment moment;
  moment.is_live.resize(trace.blocks.size());
  for (std::size_t i = 0; i < end; ++i) {
    const TraceEvent& event = trace.events[i];
    const TraceBlock& block = trace.blocks[event.block];
    if (block.failed) continue;
    moment.is_live[event.block] = !event.is_free;
    moment.live_bytes = event.is_free ? moment.live_bytes - block.bytes : moment.live_bytes + block.bytes;
    moment.peak_bytes = std::max(moment.peak_bytes, moment.live_bytes);
  }
  return moment;
}

// By source line where the trace knows any, else by size: equal sizes are often one kind of tensor.
std::vector<Holding> find_holdings(const AllocationTrace& trace, const Moment& moment, bool by_name) {
  std::unordered_map<std::uint64_t, Holding> found;
  for (std::size_t i = 0; i < trace.blocks.size(); ++i) {
    if (!moment.is_live[i]) continue;
    const TraceBlock& block = trace.blocks[i];
    Holding& holding = found[by_name ? block.holder : block.bytes];
    holding.bytes += block.bytes;
    ++holding.count;
    if (holding.count > 1) continue;
    if (!by_name) {
      holding.name = "of " + format_bytes(block.bytes);
    } else if (block.holder == 0) {
      holding.name = "(source line not recorded)";
    } else {
      holding.name = trace.holders[block.holder];
    }
  }
  std::vector<Holding> holdings;
  for (auto& [key, holding] : found) holdings.push_back(std::move(holding));
  std::sort(holdings.begin(), holdings.end(), [](const Holding& a, const Holding& b) {
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.name < b.name;
  });
  return holdings;
}

// Nothing was recorded after the failure, or there was none.
bool is_last(const AllocationTrace& trace, const std::optional<RecordedFailure>& failure) {
  return !failure || failure->event + 2 >= trace.events.size();
}

bool is_of_run(const AllocationTrace& trace) {
  return trace.origin == TraceOrigin::kRun || trace.origin == TraceOrigin::kRunObserved;
}

void judge(const AllocationTrace& trace, const Moment& moment, Explanation* explanation) {
  const std::optional<RecordedFailure>& failure = trace.failure;
  // forebay run tells all that was free at that moment, the arena's own pieces included.
  if (is_of_run(trace) && failure && failure->device_free_bytes) {
    explanation->free_bytes = *failure->device_free_bytes;
    explanation->capacity_bytes = moment.live_bytes + explanation->free_bytes;
    const bool was_there = explanation->free_bytes >= failure->bytes;
    explanation->verdict = was_there ? Verdict::kFragmentation : Verdict::kShortage;
    if (!was_there) explanation->short_bytes = failure->bytes - explanation->free_bytes;
    return;
  }
  if (trace.state) {
    const std::uint64_t reserved_bytes = trace.state->reserved_bytes;
    // The state is that of the end. If the process went on after the failure (an exception frees tensors),
    // the live bytes at the failure count.
    const std::uint64_t held_bytes =
        is_last(trace, failure) ? trace.state->live_bytes : std::min(moment.live_bytes, reserved_bytes);
    explanation->free_bytes = reserved_bytes - held_bytes;
    if (failure && failure->device_free_bytes) {
      explanation->free_bytes += *failure->device_free_bytes;
      explanation->capacity_bytes = trace.state->reserved_bytes + *failure->device_free_bytes;
    }
  }
  if (!failure) return;
  // More was live once than this request would have needed: so the memory was there.
  if (moment.peak_bytes >= moment.live_bytes + failure->bytes) {
    explanation->verdict = Verdict::kFragmentation;
    if (!trace.state) explanation->free_bytes = moment.peak_bytes - moment.live_bytes;
    return;
  }
  if (!trace.state) {
    explanation->verdict = Verdict::kUnclear;
    return;
  }
  if (explanation->free_bytes >= failure->bytes) {
    explanation->verdict = Verdict::kFragmentation;
    return;
  }
  explanation->verdict = Verdict::kShortage;
  explanation->short_bytes = failure->bytes - explanation->free_bytes;
}

std::string percent_over(std::uint64_t bytes, std::uint64_t base) {
  return format_text("%+.1f %%",
                     base == 0 ? 0 : 100 * (static_cast<double>(bytes) / static_cast<double>(base) - 1));
}

std::string capacity_text(const std::optional<std::uint64_t>& capacity, std::uint64_t peak) {
  if (!capacity) return "none found";
  return format_bytes(*capacity) + " (" + percent_over(*capacity, peak) + ")";
}

std::string verdict_text(const AllocationTrace& trace, const Explanation& explanation) {
  const std::string asked = trace.failure ? format_bytes(trace.failure->bytes) : "";
  switch (explanation.verdict) {
    case Verdict::kFragmentation:
      return "FRAGMENTATION: " + asked + " failed although " + format_bytes(explanation.free_bytes) +
             " were free, in pieces.";
    case Verdict::kShortage:
      return "TRUE SHORTAGE: " + asked + " failed; all that was free, " +
             format_bytes(explanation.free_bytes) + ", is " + format_bytes(explanation.short_bytes) +
             " short of it.";
    case Verdict::kUnclear:
      return "UNCLEAR: " + asked + " failed with " + format_bytes(explanation.live_bytes) +
             " live; the file does not say how much there was. It was fragmentation if that exceeds " +
             format_bytes(explanation.live_bytes + (trace.failure ? trace.failure->bytes : 0)) + ".";
    case Verdict::kNoFailure:
      break;
  }
  return "NO FAILURE was recorded; the moment shown is the peak.";
}

std::string state_text(const AllocationTrace& trace) {
  if (!trace.state && is_of_run(trace)) return "at the end of the recording nothing was live";
  if (!trace.state) return "not recorded: how much the allocator held, and how large its free pieces were";
  const RecordedState& state = *trace.state;
  const bool is_at_failure = trace.failure && is_last(trace, trace.failure);
  std::string text = std::string(is_at_failure ? "" : "at the end of the recording: ") +
                     format_bytes(state.reserved_bytes) + " reserved, " + format_bytes(state.live_bytes) +
                     " in blocks (" + format_bytes(state.requested_bytes) + " asked for)";
  if (state.pending_bytes > 0)
    text += ", " + format_bytes(state.pending_bytes) + " of it waiting for streams";
  text += ", " + format_bytes(state.reserved_bytes - state.live_bytes) + " free in pieces of at most " +
          format_bytes(state.largest_free_bytes);
  if (!is_of_run(trace) && trace.failure && trace.failure->device_free_bytes) {
    text += "; the device had " + format_bytes(*trace.failure->device_free_bytes) + " left";
  }
  return text;
}

std::string needs_text(const Explanation& explanation) {
  const std::uint64_t peak = explanation.peak_requested_bytes;
  return format_bytes(peak) + " at the peak; the smallest capacity is " +
         capacity_text(explanation.arena_capacity_bytes, peak) + " under forebay's arena, " +
         capacity_text(explanation.baseline_capacity_bytes, peak) + " under a caching baseline of ours" +
         (explanation.capacity_bytes ? "; there were " + format_bytes(*explanation.capacity_bytes) : "");
}

constexpr char kAskForLess[] =
    "smaller batches, activation checkpointing, a higher ZeRO stage or an offloaded optimizer (`forebay "
    "plan` shows the bytes that each saves); begin with the first holder";

bool fits(const Explanation& explanation) {
  const std::optional<std::uint64_t>& need = explanation.arena_capacity_bytes;
  const std::optional<std::uint64_t>& have = explanation.capacity_bytes;
  return need && (!have || *need <= *have);
}

// "ask for 2.00 GiB less: ...".
std::string less_text(const Explanation& explanation) {
  const std::optional<std::uint64_t>& need = explanation.arena_capacity_bytes;
  const std::optional<std::uint64_t>& have = explanation.capacity_bytes;
  const std::string how_much = need && have && *need > *have ? format_bytes(*need - *have) + " " : "";
  return "ask for " + how_much + "less: " + kAskForLess;
}

// The arena had these requests already, or the driver under our eyes: advice about another allocator would be
// none.
std::string run_advice_text(const AllocationTrace& trace, const Explanation& explanation) {
  const bool is_observed = trace.origin == TraceOrigin::kRunObserved;
  const std::optional<std::uint64_t>& need = explanation.arena_capacity_bytes;
  if (explanation.verdict == Verdict::kNoFailure) {
    if (!need) return "`forebay run --report DIR` shows the holders of memory over time";
    return std::string(is_observed ? "without --observe " : "") + "`forebay run --memory " +
           std::to_string(*need >> 20) +
           "MiB` would have sufficed; --report DIR shows the holders of memory over time";
  }
  if (explanation.verdict == Verdict::kShortage || !fits(explanation)) {
    return less_text(explanation) + "; or raise --memory, where that was the limit" +
           (is_observed ? "; without --observe the arena wastes less" : "");
  }
  if (is_observed)
    return "leave out --observe: the same requests fit under the arena in " + format_bytes(*need);
  return "the arena alone serves these requests in " + format_bytes(*need) +
         ": it was prevented by requests that it did not serve (\"not handled\" at the end of forebay run), "
         "by other programs on the device, or by frees that waited for their stream; `forebay run --report "
         "DIR` shows the blocks at that moment";
}

std::string advice_text(const AllocationTrace& trace, const Explanation& explanation) {
  const bool is_torch = trace.origin == TraceOrigin::kPyTorch;
  if (is_of_run(trace)) return run_advice_text(trace, explanation);
  if (explanation.verdict == Verdict::kNoFailure) {
    return is_torch ? "record the failure: torch.cuda.memory._record_memory_history(), and "
                      "_dump_snapshot(FILE) when it runs out"
                    : "set the smallest capacities above against the device's; `forebay replay` shows more";
  }
  if (explanation.verdict == Verdict::kUnclear && explanation.arena_capacity_bytes) {
    return "forebay's arena serves these requests in " + format_bytes(*explanation.arena_capacity_bytes) +
           "; with less memory, use less: `forebay plan` shows the bytes that a higher ZeRO stage saves";
  }
  if (explanation.verdict == Verdict::kShortage || !fits(explanation)) return less_text(explanation);
  return join_text(
      "the same requests fit under forebay's arena (`forebay run -- COMMAND`)",
      is_torch ? "; within PyTorch alone, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True comes nearest"
               : "");
}

}  // namespace

Result<Explanation> explain(const AllocationTrace& trace, const ExplainProgress& progress) {
  Explanation explanation;
  const std::size_t end = trace.failure ? trace.failure->event : trace.peak_event() + 1;
  const Moment moment = at(trace, std::min(end, trace.events.size()));
  explanation.live_bytes = moment.live_bytes;
  explanation.has_names = trace.holders.size() > 1;
  explanation.holdings = find_holdings(trace, moment, explanation.has_names);
  explanation.peak_requested_bytes = trace.peak_requested_bytes();
  judge(trace, moment, &explanation);
  const auto search = [&](ReplayTarget target, const char* name) {
    return find_minimum_capacity(trace, target, [&](const CapacityProbe& probe) {
      if (progress) progress(name, probe);
    });
  };
  FOREBAY_ASSIGN_OR_RETURN(explanation.arena_capacity_bytes, search(ReplayTarget::kArena, "arena"));
  FOREBAY_ASSIGN_OR_RETURN(explanation.baseline_capacity_bytes, search(ReplayTarget::kBaseline, "baseline"));
  return explanation;
}

std::vector<std::string> explanation_lines(const AllocationTrace& trace, const Explanation& explanation) {
  return {verdict_text(trace, explanation), "State: " + state_text(trace),
          "Needs: " + needs_text(explanation), "Try: " + advice_text(trace, explanation)};
}

std::string explanation_text(const AllocationTrace& trace, const Explanation& explanation) {
  std::string text = shown_text(trace.name) + ": " + trace.format + ", " +
                     format_count(trace.events.size() - trace.warm_event_count, "event") + ", " +
                     format_count(trace.warm_event_count, "block") + " live before\n";
  text += verdict_text(trace, explanation) + "\n";
  const auto labelled = [&text](const std::string& label, const std::string& words) {
    text += label + std::string(kLabelWidth - label.size(), ' ') +
            wrap_text(words, kTableWidth, kLabelWidth) + "\n";
  };
  labelled("State:", state_text(trace));
  const bool at_failure = trace.failure.has_value();
  labelled("Holders:", format_bytes(explanation.live_bytes) + " asked for and live at the " +
                           (at_failure ? "failure" : "peak") +
                           (explanation.has_names ? "" : "; no source lines recorded, so by size"));
  std::uint64_t rest_bytes = 0;
  std::uint64_t rest_count = 0;
  for (std::size_t i = 0; i < explanation.holdings.size(); ++i) {
    const Holding& holding = explanation.holdings[i];
    if (i >= kHoldingsShown) {
      rest_bytes += holding.bytes;
      rest_count += holding.count;
      continue;
    }
    text += "  " + format_bytes(holding.bytes) + " in " + format_count(holding.count, "block") + " " +
            holding.name + "\n";
  }
  if (rest_count > 0) {
    text += "  " + format_bytes(rest_bytes) + " in " + format_count(rest_count, "other") + "\n";
  }
  labelled("Needs:", needs_text(explanation));
  labelled("Try:", advice_text(trace, explanation));
  return text;
}

}  // namespace forebay
