// What the arena says about itself: messages, the report, and snapshots.
#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <ctime>

#include "arena_impl.h"

namespace forebay::internal {

std::string describe(DevicePtr address) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", static_cast<void*>(address));
  return text;
}

std::string ChunkedArena::report() const {
  ArenaStatistics total;
  TagState tags[kTagLimit];
  unsigned tag_count = 0;
  std::size_t free_bytes = 0;
  std::size_t largest_bytes = 0;
  std::size_t pending_bytes = 0;
  std::size_t stranded_bytes = 0;
  std::size_t spare_bytes = 0;
  {
    Lock lock(mutex_);
    total = total_;
    tag_count = tag_count_;
    std::copy(tags_, tags_ + tag_count_, tags);
    spare_bytes = spare_bytes_;
    for (const Range* range = first_; range != nullptr; range = range->next) {
      if (range->kind == RangeKind::kStranded) stranded_bytes += range->bytes;
      if (range->kind != RangeKind::kFree) continue;
      free_bytes += range->bytes;
      largest_bytes = std::max(largest_bytes, range->bytes);
      if (range->waits != 0) pending_bytes += range->bytes;
    }
  }
  std::string text = std::string("arena on ") + backend_.capabilities().name + ": limit " +
                     format_bytes(limit_bytes_) + ", reserved " + format_bytes(total.reserved_bytes) +
                     " (peak " + format_bytes(total.peak_reserved_bytes) + "), live " +
                     format_bytes(total.live_bytes) + " (peak " + format_bytes(total.peak_live_bytes) +
                     ")\n  free " + format_bytes(free_bytes + spare_bytes) + ": largest piece " +
                     format_bytes(largest_bytes) + ", " + format_bytes(pending_bytes) +
                     " waits for events, " + format_bytes(spare_bytes) + " not mapped, " +
                     format_bytes(stranded_bytes) + " lost to failed calls\n";
  char line[160];
  std::snprintf(line, sizeof line, "  %-31s %12s %12s %12s %12s %12s\n", "tag", "live", "peak", "limit",
                "in slots", "allocations");
  text += line;
  for (unsigned i = 0; i < tag_count; ++i) {
    const ArenaStatistics& statistics = tags[i].account;
    std::snprintf(line, sizeof line, "  %-31.31s %12s %12s %12s %12s %12" PRIu64 "\n", tags[i].name,
                  format_bytes(statistics.live_bytes).c_str(),
                  format_bytes(statistics.peak_live_bytes).c_str(),
                  tags[i].limit_bytes == 0 ? "-" : format_bytes(tags[i].limit_bytes).c_str(),
                  format_bytes(statistics.reserved_bytes).c_str(), statistics.allocation_count);
    text += line;
  }
  return text;
}

Status ChunkedArena::out_of_memory(const char* what, std::size_t bytes, Tag tag, const Status& cause) const {
  std::size_t free_bytes = 0;
  std::size_t largest_bytes = 0;
  std::size_t pending_bytes = 0;
  std::size_t untaken_bytes = 0;
  char name[sizeof TagState::name];
  {
    Lock lock(mutex_);
    std::memcpy(name, tags_[tag].name, sizeof name);
    free_bytes = spare_bytes_;
    untaken_bytes = limit_bytes_ - total_.reserved_bytes;
    for (const Range* range = first_; range != nullptr; range = range->next) {
      if (range->kind != RangeKind::kFree) continue;
      free_bytes += range->bytes;
      largest_bytes = std::max(largest_bytes, range->bytes);
      if (range->waits != 0) pending_bytes += range->bytes;
    }
  }
  std::string message = std::string("cannot ") + what + " " + format_bytes(bytes) + " for '" + name +
                        "': " + format_bytes(free_bytes) + " free, the largest piece " +
                        format_bytes(largest_bytes) + ", " + format_bytes(pending_bytes) +
                        " of it waits for events; " + format_bytes(untaken_bytes) + " of the limit of " +
                        format_bytes(limit_bytes_) + " not taken yet";
  if (!cause.message().empty()) message += ", but the device says: " + cause.message();
  message +=
      "; free blocks, synchronize the streams that use freed ones, or raise ArenaOptions::limit_bytes\n";
  return Status(StatusCode::kOutOfMemory, message + report());
}

Status ChunkedArena::over_tag_limit(const char* what, std::size_t bytes, Tag tag) const {
  TagState state;
  {
    Lock lock(mutex_);
    state = tags_[tag];
  }
  return Status(StatusCode::kOutOfMemory,
                std::string("cannot ") + what + " " + format_bytes(bytes) + " for '" + state.name +
                    "': its limit is " + format_bytes(state.limit_bytes) + ", of which " +
                    format_bytes(state.account.live_bytes) +
                    " is live; free some of it or raise the limit of the tag\n" + report());
}

Status ChunkedArena::bad_block(DevicePtr block, const char* verb) const {
  const char* found = "the arena does not own that address; free it where it was allocated";
  const auto offset = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(block) -
                                               reinterpret_cast<std::uintptr_t>(base_));
  if (offset < reserve_bytes_) {
    Lock lock(mutex_);
    const Range* range = first_;
    while (range->end() <= offset) range = range->next;
    if (range->kind == RangeKind::kAlias) {
      found = "it belongs to an alias of a slot; use alias_destroy";
    } else if (range->kind == RangeKind::kLive) {
      found = "it lies inside a live block; pass the address that allocate returned";
    } else {
      found = "no live block is there; was it freed already?";
    }
  }
  return Status(StatusCode::kInvalidArgument,
                std::string("cannot ") + verb + " " + describe(block) + ": " + found);
}

Status ChunkedArena::no_such_tag(const char* what, Tag tag) const {
  return Status(StatusCode::kInvalidArgument, std::string("cannot ") + what + " for tag " +
                                                  std::to_string(tag) +
                                                  ": there is no such tag; make it with tag_create");
}

Status ChunkedArena::no_books() const {
  return Status(StatusCode::kOutOfMemory,
                "cannot keep the arena's books: the host has no memory left; free host memory");
}

Status ChunkedArena::no_private_region(const std::string& what) const {
  return Status(StatusCode::kUnavailable, "cannot " + what + ": " + std::to_string(kPrivateRegionLimit) +
                                              " pausable tags and captures exist; release captures whose "
                                              "graphs are gone");
}

// --- snapshots ---------------------------------------------------

void ChunkedArena::note(SnapshotAction action, std::size_t offset, std::size_t bytes, Stream stream) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  SnapshotEvent& event = history_[history_end_++ % history_limit_];
  event.action = action;
  event.address =
      action == SnapshotAction::kOutOfMemory ? offset : reinterpret_cast<std::uintptr_t>(base_) + offset;
  event.size = bytes;
  event.stream = reinterpret_cast<std::uintptr_t>(stream.handle);
  event.time_us =
      static_cast<std::uint64_t>(now.tv_sec) * 1'000'000 + static_cast<std::uint64_t>(now.tv_nsec) / 1000;
  event.stack = kNoSnapshotStack;
}

MemorySnapshot ChunkedArena::snapshot() const {
  MemorySnapshot result;
  struct Part {
    std::size_t offset;
    std::size_t bytes;
    std::size_t asked_bytes;
    RangeKind kind;
    bool pending;
    Stream stream;
  };
  // Copied under the lock into room made without it: as often as it takes.
  std::vector<Part> parts;
  std::vector<SnapshotEvent> events;
  for (std::size_t room = 1024;; room *= 2) {
    parts.clear();
    parts.reserve(room);
    events.clear();
    events.reserve(history_limit_);
    Lock lock(mutex_);
    const Range* range = first_;
    for (; range != nullptr && parts.size() < room; range = range->next) {
      if (range->kind == RangeKind::kUnmapped) continue;
      const bool live = range->kind == RangeKind::kLive;
      const Stream stream = live && range->stream < kStreamLimit ? streams_[range->stream].stream : Stream();
      parts.push_back({range->offset, range->bytes, live ? range->bytes - range->slack : 0, range->kind,
                       range->waits != 0, stream});
    }
    if (range != nullptr) continue;
    const std::uint64_t count = std::min<std::uint64_t>(history_end_, history_limit_);
    for (std::uint64_t i = history_end_ - count; i < history_end_; ++i) {
      events.push_back(history_[i % history_limit_]);
    }
    break;
  }
  const auto base = reinterpret_cast<std::uintptr_t>(base_);
  std::size_t end = SIZE_MAX;
  for (const Part& part : parts) {
    // A segment is what owns its memory without a gap; shadows would count it twice.
    if (part.kind != RangeKind::kLive && part.kind != RangeKind::kFree) continue;
    if (part.offset != end) {
      result.segments.emplace_back();
      result.segments.back().address = base + part.offset;
      result.segments.back().stream = reinterpret_cast<std::uintptr_t>(part.stream.handle);
    }
    end = part.offset + part.bytes;
    SnapshotSegment& segment = result.segments.back();
    SnapshotBlock block;
    block.address = base + part.offset;
    block.size = part.bytes;
    block.requested_size = part.asked_bytes;
    segment.total_size += part.bytes;
    if (part.kind == RangeKind::kLive) {
      block.state = SnapshotBlockState::kActiveAllocated;
      segment.allocated_size += part.bytes;
      segment.active_size += part.bytes;
      segment.requested_size += part.asked_bytes;
    } else if (part.pending) {
      block.state = SnapshotBlockState::kActivePendingFree;
      segment.active_size += part.bytes;
    }
    segment.blocks.push_back(block);
  }
  result.device_traces.push_back(std::move(events));
  result.allocator_settings.push_back({"allocator", std::string("forebay")});
  result.allocator_settings.push_back({"limit_bytes", static_cast<std::int64_t>(limit_bytes_)});
  result.allocator_settings.push_back({"chunk_bytes", static_cast<std::int64_t>(chunk_bytes_)});
  return result;
}

}  // namespace forebay::internal
