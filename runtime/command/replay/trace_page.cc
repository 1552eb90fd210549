#include "runtime/command/replay/trace_page.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "allocator/preload/events.h"
#include "forebay/units.h"
#include "runtime/command/replay/trace_replay.h"
#include "runtime/command/run/process_history.h"
#include "runtime/command/run/process_report.h"

namespace forebay {
namespace {

// The first stream of a trace is nearly always the default one. The others are numbered as a process's.
std::uint16_t stream_of(std::uint32_t stream) {
  if (stream == 0) return kPreloadLegacyStream;
  return static_cast<std::uint16_t>(
      std::min<std::uint32_t>(kPreloadPerThreadStream + stream, kPreloadStreamLimit - 1));
}

// Writes the events that a process would have written. Times count events.
class EventWriter {
 public:
  EventWriter(const AllocationTrace& trace, std::size_t chunk_bytes) : trace_(trace) {
    figures_.chunk_bytes = chunk_bytes;
  }

  void add(const TraceEvent& event, DevicePtr address, std::uint64_t held_bytes) {
    ++time_;
    const TraceBlock& block = trace_.blocks[event.block];
    if (held_bytes != figures_.arena_bytes) {
      write(PreloadEventKind::kReserved, figures_.arena_bytes, held_bytes, 0);
      figures_.arena_bytes = held_bytes;
      figures_.peak_reserved_bytes = std::max(figures_.peak_reserved_bytes, held_bytes);
    }
    if (block.failed && event.is_free) return;
    PreloadEventKind kind = PreloadEventKind::kAllocation;
    if (block.failed) {
      kind = PreloadEventKind::kRefused;
      ++figures_.refused;
    } else if (event.is_free) {
      kind = PreloadEventKind::kFree;
      ++figures_.frees;
      figures_.requested_bytes -= block.bytes;
    } else {
      ++figures_.allocations;
      figures_.requested_bytes += block.bytes;
      figures_.peak_requested_bytes = std::max(figures_.peak_requested_bytes, figures_.requested_bytes);
      holders_.push_back(block.holder);
    }
    write(kind, reinterpret_cast<std::uintptr_t>(address), block.bytes, stream_of(block.stream));
  }

  PreloadEventLog finish() {
    log_.devices.push_back(figures_);
    return std::move(log_);
  }
  // The holder of the block with that PageBlock::order.
  std::uint32_t holder(std::uint64_t order) const {
    return order == 0 || order > holders_.size() ? 0 : holders_[order - 1];
  }

 private:
  void write(PreloadEventKind kind, std::uint64_t address, std::uint64_t bytes, std::uint16_t stream) {
    log_.events.push_back({.address = address,
                           .bytes = bytes,
                           .time_ns = time_,
                           .stream = stream,
                           .device = 0,
                           .server = PreloadServer::kArena,
                           .kind = kind});
  }

  const AllocationTrace& trace_;
  PreloadEventLog log_;
  PreloadDeviceFigures figures_;
  std::vector<std::uint32_t> holders_;
  std::uint64_t time_ = 0;
};

// By source line, largest first.
std::vector<PageHolder> holders_by_name(const PageMoment& moment) {
  std::map<std::uint32_t, PageHolder> found;
  for (const PageBlock& block : moment.blocks) {
    if (block.state == PageBlockState::kFree) continue;
    PageHolder& holder = found[block.holder];
    holder.bytes += block.bytes;
    ++holder.count;
  }
  std::vector<PageHolder> holders;
  for (auto& [index, holder] : found) {
    holder.name = index == 0 ? "(source line not recorded)" : moment.holders[index];
    holders.push_back(std::move(holder));
  }
  std::stable_sort(holders.begin(), holders.end(),
                   [](const PageHolder& a, const PageHolder& b) { return a.bytes > b.bytes; });
  return holders;
}

}  // namespace

Result<PageProcess> trace_page(const AllocationTrace& trace, Backend& backend,
                               const std::function<void(std::size_t event_count)>& progress) {
  EventWriter writer(trace, backend.capabilities().granularity);
  ReplayOptions options{.passes = 1, .timed = false};
  if (progress) options.progress = [&](int, std::size_t event_count) { progress(event_count); };
  options.watch = [&](const TraceEvent& event, DevicePtr address, std::uint64_t held_bytes) {
    writer.add(event, address, held_bytes);
  };
  FOREBAY_ASSIGN_OR_RETURN(const ReplayResult result,
                           replay_trace(trace, backend, ReplayTarget::kArena, options));
  const std::vector<ProcessHistory> histories = process_histories(writer.finish());
  PageProcess page = history_page(histories.front());
  page.name = trace.name;
  page.mode = "replayed by the arena";
  page.counts_events = true;
  const bool has_names = trace.holders.size() > 1;
  for (PageMoment& moment : page.moments) {
    if (has_names) {
      moment.holders = trace.holders;
      for (PageBlock& block : moment.blocks) block.holder = writer.holder(block.order);
    }
    if (has_names && moment.name == kPeakMoment) page.holders = holders_by_name(moment);
    // The recorded allocator refused, with other memory than is drawn here.
    if (moment.asked_bytes != 0) {
      moment.name += " of the recording (" + format_bytes(moment.asked_bytes) + " asked for)";
      moment.asked_bytes = 0;
    }
    moment.name += ", event " + std::to_string(std::exchange(moment.time_ns, 0));
  }
  page.lines.push_back("Memory and addresses are the arena's, in a replay of the recorded requests.");
  if (!result.completed) page.lines.push_back("The arena did not complete the trace: " + result.failure);
  return page;
}

}  // namespace forebay
