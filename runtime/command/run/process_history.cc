#include "runtime/command/run/process_history.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "forebay/arena.h"
#include "forebay/model_backend.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/replay/trace_replay.h"

namespace forebay {
namespace {

// Points of a timeline are thinned out to about three times this many.
constexpr std::size_t kPointGroups = 8192;

// Which blocks are live, event by event.
class LiveBlocks {
 public:
  explicit LiveBlocks(const ProcessHistory& history) {
    // The first change of the arena's bytes tells the bytes before it; without a change they are the final
    // ones.
    arena_bytes_ = history.figures.arena_bytes;
    std::uint64_t kept_allocations = 0;
    bool has_changed = false;
    for (const PreloadEvent& event : history.events) {
      kept_allocations += event.kind == PreloadEventKind::kAllocation ? 1 : 0;
      if (event.kind != PreloadEventKind::kReserved || has_changed) continue;
      arena_bytes_ = event.address;
      has_changed = true;
    }
    // They are numbered from the process's first one, kept or not.
    allocation_count_ = std::max(history.figures.allocations, kept_allocations) - kept_allocations;
    for (const PreloadBlock& block : history.live_before) {
      add(block.address,
          {.address = block.address, .bytes = block.bytes, .stream = block.stream, .server = block.server});
    }
  }
  void play(const PreloadEvent& event) {
    switch (event.kind) {
      case PreloadEventKind::kAllocation:
        remove(event.address);  // Given out anew: its free did not come by.
        add(event.address, {.address = event.address,
                            .bytes = event.bytes,
                            .stream = event.stream,
                            .order = ++allocation_count_,
                            .server = event.server});
        break;
      case PreloadEventKind::kFree:
        remove(event.address);
        break;
      case PreloadEventKind::kReserved:
        arena_bytes_ = event.bytes;
        break;
      case PreloadEventKind::kRefused:
      case PreloadEventKind::kUntracked:
        break;
    }
  }
  std::uint64_t requested_bytes() const { return requested_bytes_; }
  std::uint64_t reserved_bytes() const { return arena_bytes_ + elsewhere_bytes_; }
  // By address.
  std::vector<PageBlock> blocks() const {
    std::vector<PageBlock> all;
    all.reserve(blocks_.size());
    for (const auto& entry : blocks_) all.push_back(entry.second);
    std::sort(all.begin(), all.end(),
              [](const PageBlock& a, const PageBlock& b) { return a.address < b.address; });
    return all;
  }

 private:
  void add(std::uint64_t address, const PageBlock& block) {
    blocks_.emplace(address, block);
    requested_bytes_ += block.bytes;
    if (block.server != PreloadServer::kArena) elsewhere_bytes_ += block.bytes;
  }
  void remove(std::uint64_t address) {
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return;
    requested_bytes_ -= found->second.bytes;
    if (found->second.server != PreloadServer::kArena) elsewhere_bytes_ -= found->second.bytes;
    blocks_.erase(found);
  }

  std::unordered_map<std::uint64_t, PageBlock> blocks_;
  std::uint64_t allocation_count_ = 0;
  std::uint64_t arena_bytes_ = 0;
  std::uint64_t requested_bytes_ = 0;
  std::uint64_t elsewhere_bytes_ = 0;
};

// Keeps of every so many points those that matter.
class Timeline {
 public:
  explicit Timeline(std::size_t event_count) : group_((event_count + kPointGroups - 1) / kPointGroups) {}
  void add(const PagePoint& point) {
    const bool is_first = count_++ % std::max<std::size_t>(group_, 1) == 0;
    if (is_first) close();
    if (!has_any_ || point.requested_bytes > requested_.second.requested_bytes) requested_ = {count_, point};
    if (!has_any_ || point.reserved_bytes > reserved_.second.reserved_bytes) reserved_ = {count_, point};
    if (point.event == PageEvent::kOutOfMemory) refused_ = {count_, point};
    last_ = {count_, point};
    has_any_ = true;
  }
  std::vector<PagePoint> finish() {
    close();
    return std::move(points_);
  }

 private:
  using Numbered = std::pair<std::size_t, PagePoint>;
  void close() {
    if (!has_any_) return;
    std::map<std::size_t, PagePoint> kept{requested_, reserved_, last_};
    if (refused_.first != 0) kept.insert(refused_);
    for (const auto& entry : kept) points_.push_back(entry.second);
    has_any_ = false;
    refused_ = {};
  }

  std::size_t group_;
  std::size_t count_ = 0;
  bool has_any_ = false;
  Numbered requested_, reserved_, refused_, last_;
  std::vector<PagePoint> points_;
};

PageEvent page_event(PreloadEventKind kind) {
  switch (kind) {
    case PreloadEventKind::kAllocation:
      return PageEvent::kAllocation;
    case PreloadEventKind::kFree:
      return PageEvent::kFree;
    case PreloadEventKind::kRefused:
      return PageEvent::kOutOfMemory;
    case PreloadEventKind::kReserved:
    case PreloadEventKind::kUntracked:
      break;
  }
  return PageEvent::kOther;
}

// First the points over time and the indices of the moments, then the blocks at the moments.
void work_out(ProcessHistory* history) {
  constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  const std::vector<PreloadEvent>& events = history->events;
  std::size_t peak = kNone, first_refusal = kNone, last_refusal = kNone;
  Timeline timeline(events.size());
  LiveBlocks live(*history);
  history->peak_requested_bytes = live.requested_bytes();
  for (std::size_t i = 0; i < events.size(); ++i) {
    const PreloadEvent& event = events[i];
    live.play(event);
    if (live.requested_bytes() > history->peak_requested_bytes) {
      history->peak_requested_bytes = live.requested_bytes();
      peak = i;
    }
    if (event.kind == PreloadEventKind::kRefused) {
      if (first_refusal == kNone) first_refusal = i;
      last_refusal = i;
    }
    if (event.kind == PreloadEventKind::kUntracked) {
      ++history->untracked_count;
      history->untracked_bytes += event.bytes;
      continue;
    }
    timeline.add({.time_ns = event.time_ns,
                  .requested_bytes = live.requested_bytes(),
                  .reserved_bytes = live.reserved_bytes(),
                  .bytes = event.bytes,
                  .event = page_event(event.kind)});
  }
  history->points = timeline.finish();
  if (events.empty()) return;

  LiveBlocks again(*history);
  PreloadEvent end;
  end.time_ns = events.front().time_ns;
  const auto take = [&](const char* name, const PreloadEvent& event) {
    history->moments.push_back({.name = name,
                                .time_ns = event.time_ns,
                                .asked_bytes = event.kind == PreloadEventKind::kRefused ? event.bytes : 0,
                                .requested_bytes = again.requested_bytes(),
                                .reserved_bytes = again.reserved_bytes(),
                                .blocks = again.blocks()});
  };
  if (peak == kNone) take(kPeakMoment, end);  // Never more than before the first.
  for (std::size_t i = 0; i < events.size(); ++i) {
    again.play(events[i]);
    if (i == peak) take(kPeakMoment, events[i]);
    if (i == first_refusal) take(kFirstRefusalMoment, events[i]);
    if (i == last_refusal && i != first_refusal) take(kLastRefusalMoment, events[i]);
  }
  end.time_ns = events.back().time_ns;
  take(kEndMoment, end);
}

// Empty: it did not come to its end.
std::optional<std::uint64_t> baseline_bytes(const ProcessHistory& history) {
  const AllocationTrace trace = history_trace(history);
  if (trace.events.empty()) return std::nullopt;
  Result<std::unique_ptr<ModelBackend>> backend = ModelBackend::create({});
  if (!backend.ok()) return std::nullopt;
  const Result<ReplayResult> result = replay_trace(trace, *backend.value(), ReplayTarget::kBaseline,
                                                   ReplayOptions{.passes = 1, .timed = false});
  if (!result.ok() || !result.value().completed) return std::nullopt;
  return result.value().peak_physical_bytes;
}

}  // namespace

std::string holder_text(const HistoryHolder& holder) {
  return (holder.least_bytes == 0
              ? std::string("0 B")
              : format_bytes(holder.least_bytes) + " to " + format_bytes(2 * holder.least_bytes)) +
         " each, " + preload_stream_text(holder.stream) + ", " + preload_server_text(holder.server);
}

std::vector<HistoryHolder> holders_of(const std::vector<PageBlock>& blocks) {
  std::map<std::tuple<std::uint64_t, std::uint64_t, PreloadServer>, HistoryHolder> found;
  for (const PageBlock& block : blocks) {
    const std::uint64_t least = std::bit_floor(block.bytes);
    HistoryHolder& holder = found[{least, block.stream, block.server}];
    holder.least_bytes = least;
    holder.stream = static_cast<std::uint16_t>(block.stream);
    holder.server = block.server;
    holder.bytes += block.bytes;
    ++holder.count;
  }
  std::vector<HistoryHolder> holders;
  for (const auto& entry : found) holders.push_back(entry.second);
  std::stable_sort(holders.begin(), holders.end(),
                   [](const HistoryHolder& a, const HistoryHolder& b) { return a.bytes > b.bytes; });
  return holders;
}

const PageMoment* ProcessHistory::moment(const std::string& name) const {
  const auto found =
      std::find_if(moments.begin(), moments.end(), [&](const PageMoment& one) { return one.name == name; });
  return found == moments.end() ? nullptr : &*found;
}

std::vector<ProcessHistory> process_histories(const PreloadEventLog& log) {
  std::vector<ProcessHistory> histories;
  for (const PreloadDeviceFigures& figures : log.devices) {
    ProcessHistory& history = histories.emplace_back();
    history.figures = figures;
    history.start_us = log.start_us;
    history.dropped_events = log.first_number;
    history.untold_blocks = log.untold_blocks;
    const auto is_here = [&](const auto& one) { return one.device == figures.device; };
    std::copy_if(log.live_before.begin(), log.live_before.end(), std::back_inserter(history.live_before),
                 is_here);
    std::copy_if(log.events.begin(), log.events.end(), std::back_inserter(history.events), is_here);
    work_out(&history);
    history.baseline_reserved_bytes = baseline_bytes(history);
  }
  return histories;
}

AllocationTrace history_trace(const ProcessHistory& history) {
  TraceBuilder builder;
  for (const PreloadBlock& block : history.live_before) {
    (void)builder.allocate(block.address, block.bytes, block.stream);
  }
  builder.end_warm();
  for (const PreloadEvent& event : history.events) {
    if (event.kind == PreloadEventKind::kAllocation) {
      (void)builder.free(event.address);
      (void)builder.allocate(event.address, event.bytes, event.stream);
    } else if (event.kind == PreloadEventKind::kFree) {
      (void)builder.free(event.address);
    }
  }
  return builder.finish();
}

Status write_history_trace(const ProcessHistory& history, const std::string& title, int file) {
  const AllocationTrace trace = history_trace(history);
  const auto failed = [] { return Status(StatusCode::kIoError, std::strerror(errno)); };
  const int copy = ::fcntl(file, F_DUPFD_CLOEXEC, 0);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream(copy < 0 ? nullptr : ::fdopen(copy, "wb"),
                                                               &std::fclose);
  if (stream == nullptr) {
    const Status status = failed();
    if (copy >= 0) ::close(copy);
    return status;
  }
  std::FILE* const out = stream.get();
  std::fprintf(out, "%s%s\n", kHistoryTraceBeginning, shown_text(title).c_str());
  if (history.figures.refused != 0) {
    std::fprintf(out, "# refused for want of memory, and not in here: %" PRIu64 "\n",
                 history.figures.refused);
  }
  if (history.untracked_count != 0) {
    std::fprintf(out, "# mapped by the program itself (cuMemCreate), and not in here: %" PRIu64 "\n",
                 history.untracked_count);
  }
  if (history.dropped_events != 0) {
    std::fprintf(out, "# the %" PRIu64 " oldest events were not kept\n", history.dropped_events);
  }
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const TraceEvent& event = trace.events[i];
    if (event.is_free) {
      std::fprintf(out, "f %" PRIu32 "\n", event.block);
    } else {
      std::fprintf(out, "a %" PRIu32 " %" PRIu64 " %" PRIu32 "\n", event.block,
                   trace.blocks[event.block].bytes, event.stream);
    }
    if (trace.warm_event_count != 0 && i + 1 == trace.warm_event_count) std::fprintf(out, "# warm\n");
  }
  return std::fflush(out) == 0 && std::ferror(out) == 0 ? Status() : failed();
}

namespace {

// Whole chunks that blocks lie in, and a segment for each block of the driver's. `blocks` by address.
void add_segments(const std::vector<PageBlock>& blocks, const PreloadDeviceFigures& figures,
                  MemorySnapshot* snapshot) {
  const std::uint64_t chunk = std::max<std::uint64_t>(figures.chunk_bytes, kBlockGranule);
  std::uint64_t used_end = 0;  // End of the last segment's blocks.
  SnapshotSegment* segment = nullptr;
  const auto fill_up = [&](std::uint64_t end) {
    if (segment == nullptr || end <= used_end) return;
    segment->blocks.push_back({.address = used_end, .size = end - used_end});
    used_end = end;
  };
  for (const PageBlock& block : blocks) {
    const bool is_ours = block.server == PreloadServer::kArena;
    const std::uint64_t size = align_up(std::max<std::uint64_t>(block.bytes, 1), kBlockGranule);
    const std::uint64_t begin = is_ours ? block.address / chunk * chunk : block.address;
    const std::uint64_t end = is_ours ? align_up(block.address + size, chunk) : block.address + size;
    const bool continues = segment != nullptr && is_ours && segment->is_expandable &&
                           begin <= segment->address + segment->total_size;
    if (!continues) {
      if (segment != nullptr) fill_up(segment->address + segment->total_size);
      segment = &snapshot->segments.emplace_back();
      segment->device = figures.device;
      segment->address = begin;
      segment->stream = block.stream;
      segment->is_expandable = is_ours;
      used_end = begin;
    }
    fill_up(block.address);
    segment->total_size = std::max(segment->total_size, end - segment->address);
    segment->blocks.push_back({.address = block.address,
                               .size = size,
                               .requested_size = block.bytes,
                               .state = SnapshotBlockState::kActiveAllocated});
    used_end = block.address + size;
    segment->allocated_size += size;
    segment->active_size += size;
    segment->requested_size += block.bytes;
  }
  if (segment != nullptr) fill_up(segment->address + segment->total_size);
}

}  // namespace

std::vector<PageBlock> free_pieces(const std::vector<PageBlock>& blocks,
                                   const PreloadDeviceFigures& figures) {
  MemorySnapshot snapshot;
  add_segments(blocks, figures, &snapshot);
  std::vector<PageBlock> pieces;
  for (const SnapshotSegment& segment : snapshot.segments) {
    for (const SnapshotBlock& block : segment.blocks) {
      if (block.state != SnapshotBlockState::kInactive) continue;
      pieces.push_back({.address = block.address, .bytes = block.size, .state = PageBlockState::kFree});
    }
  }
  return pieces;
}

MemorySnapshot history_snapshot(const std::vector<ProcessHistory>& histories, PreloadMode mode) {
  MemorySnapshot snapshot;
  for (const ProcessHistory& history : histories) {
    const auto device = static_cast<std::size_t>(history.figures.device);
    if (snapshot.device_traces.size() <= device) snapshot.device_traces.resize(device + 1);
    LiveBlocks live(history);
    std::vector<SnapshotEvent>& trace = snapshot.device_traces[device];
    for (const PreloadEvent& event : history.events) {
      live.play(event);
      SnapshotEvent told{.address = event.address,
                         .size = event.bytes,
                         .stream = event.stream,
                         .time_us = history.start_us + event.time_ns / 1000};
      if (event.kind == PreloadEventKind::kAllocation) {
        told.action = SnapshotAction::kAlloc;
      } else if (event.kind == PreloadEventKind::kFree) {
        told.action = SnapshotAction::kFreeRequested;
        trace.push_back(told);
        told.action = SnapshotAction::kFreeCompleted;
      } else if (event.kind == PreloadEventKind::kRefused) {
        told.action = SnapshotAction::kOutOfMemory;
      } else {
        continue;
      }
      trace.push_back(told);
    }
    add_segments(live.blocks(), history.figures, &snapshot);
  }
  snapshot.allocator_settings.push_back({kSnapshotAllocatorSetting, std::string(kSnapshotRunAllocator)});
  snapshot.allocator_settings.push_back(
      {kSnapshotModeSetting, std::string(mode == PreloadMode::kObserve ? kSnapshotObserveMode : "arena")});
  return snapshot;
}

}  // namespace forebay
