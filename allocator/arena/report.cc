// Error messages, the report, and snapshots of the arena.
#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <ctime>

#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

std::string describe(DevicePtr address) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", static_cast<void*>(address));
  return text;
}

// The free memory, by the reason why a request cannot have it.
struct ChunkedArena::FreeMemory {
  std::size_t usable_bytes = 0;   // The request can have it at once.
  std::size_t largest_bytes = 0;  // The largest usable range.
  std::size_t waiting_bytes = 0;  // Work queued on other streams may still use it.
  std::size_t kept_bytes = 0;     // It belongs to another pausable tag or capture.
  std::size_t spare_bytes = 0;    // Held, mapped nowhere.
  std::size_t lost_bytes = 0;     // The device refused to unmap it; tried again at each miss.
  std::size_t untaken_bytes = 0;  // Not taken from the device yet, up to the limit.
};

// mutex_ held.
ChunkedArena::FreeMemory ChunkedArena::count_free(const Placement& placement) const {
  FreeMemory found;
  found.spare_bytes = spare_bytes_;
  found.untaken_bytes = limit_bytes_ - total_.reserved_bytes;
  const bool shares = placement.region < kSharedRegionCount;
  for (unsigned i = 0; i < kRegionCount; ++i) {
    const auto region = static_cast<std::uint8_t>(i);
    if (region != placement.region && !(shares && region < kSharedRegionCount)) {
      found.kept_bytes += free_bytes_[region];
      continue;
    }
    found.waiting_bytes += free_bytes_[region];
    const auto count_usable = [&](const SizeBins& bins) {
      found.usable_bytes += bins.bytes;
      found.waiting_bytes -= bins.bytes;
      found.largest_bytes = std::max(found.largest_bytes, bins.largest_bytes());
    };
    count_usable(bins_of(region, 0));
    if (placement.mine != 0) count_usable(bins_of(region, placement.mine));
  }
  const Range* range = stranded_count_ != 0 ? first_ : nullptr;
  for (; range != nullptr; range = range->next) {
    if (range->kind == RangeKind::kStranded) found.lost_bytes += range->bytes;
  }
  return found;
}

std::string ChunkedArena::report() const {
  ArenaStatistics total;
  TagState tags[kTagLimit];
  unsigned tag_count = 0;
  FreeMemory found;
  {
    Lock lock(mutex_);
    total = total_;
    tag_count = tag_count_;
    std::copy(tags_, tags_ + tag_count_, tags);
    found = count_free(Placement());
  }
  std::string text = join_text(
      "arena on ", backend_.capabilities().name, ": limit ", format_bytes(limit_bytes_), ", reserved ",
      format_bytes(total.reserved_bytes), " (peak ", format_bytes(total.peak_reserved_bytes), "), live ",
      format_bytes(total.live_bytes), " (peak ", format_bytes(total.peak_live_bytes), ")\n  free ",
      format_bytes(found.usable_bytes), " in pieces of at most ", format_bytes(found.largest_bytes), ", ",
      format_bytes(found.waiting_bytes), " waiting for streams, ", format_bytes(found.kept_bytes),
      " of pausable tags and captures, ", format_bytes(found.spare_bytes), " not mapped, ",
      format_bytes(found.lost_bytes), " lost to failed calls\n");
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

// Why no amount of freeing can serve so many bytes, and a way out. Empty if it can.
std::string ChunkedArena::never_fits(std::size_t bytes) const {
  const Capabilities& device = backend_.capabilities();
  if (bytes > device.memory_bytes) {
    return join_text("that can never fit: ", device.name, " has ", format_bytes(device.memory_bytes),
                     " in all; ask for less at a time, or spread it over several devices");
  }
  if (bytes > limit_bytes_) {
    return "that can never fit: the arena may take " + format_bytes(limit_bytes_) + " of the " +
           format_bytes(device.memory_bytes) + " of " + device.name +
           "; raise its limit (ArenaOptions::limit_bytes) or ask for less at a time";
  }
  if (bytes > reserve_bytes_) {
    return "that can never fit: the arena has addresses for " + format_bytes(reserve_bytes_) +
           "; reserve more (ArenaOptions::reserve_bytes) or ask for less at a time";
  }
  return "";
}

Status ChunkedArena::out_of_memory(const char* what, std::size_t bytes, Tag tag, const Placement& placement,
                                   const Status& cause) const {
  if (!has_text_room()) return no_books();
  FreeMemory found;
  std::size_t live_bytes = 0;
  bool capturing = false;
  char name[sizeof TagState::name];
  {
    Lock lock(mutex_);
    std::memcpy(name, tags_[tag].name, sizeof name);
    live_bytes = total_.live_bytes;
    capturing = capturing_count_ != 0;
    found = count_free(placement);
  }
  std::string message = std::string("cannot ") + what + " " + format_bytes(bytes) + " for '" + name + "': ";
  if (const std::string never = never_fits(bytes); !never.empty()) {
    return Status(StatusCode::kOutOfMemory, message, never, "\n", report());
  }
  message += "of the limit of " + format_bytes(limit_bytes_) + ", " + format_bytes(live_bytes) +
             " are live, " + format_bytes(found.usable_bytes) + " free now";
  if (found.usable_bytes != 0) message += " in pieces of at most " + format_bytes(found.largest_bytes);
  message += ", " + format_bytes(found.waiting_bytes) + " waiting for other streams, " +
             format_bytes(found.spare_bytes) + " held but not mapped, " + format_bytes(found.untaken_bytes) +
             " not taken yet";
  if (found.kept_bytes != 0) {
    message += ", " + format_bytes(found.kept_bytes) + " kept for other pausable tags and captures";
  }
  if (found.lost_bytes != 0) message += ", " + format_bytes(found.lost_bytes) + " lost to failed calls";
  if (!cause.message().empty()) message += "; the device says: " + cause.message();
  message += "; ";
  if (found.waiting_bytes != 0) message += "synchronize the streams that use freed blocks and ask again, ";
  if (capturing) message += "end the capture, during which nothing is mapped anew, ";
  const bool enough = found.usable_bytes + found.spare_bytes + found.untaken_bytes >= bytes;
  message += enough && cause.message().empty() && !capturing
                 ? "free the blocks that share chunks with free memory"
                 : "free blocks";
  if (!cause.message().empty()) {
    message += ", or end other programs that use the device's memory";
  } else if (limit_bytes_ + chunk_bytes_ <= backend_.capabilities().memory_bytes) {
    message += ", or raise the limit (ArenaOptions::limit_bytes; the device has " +
               format_bytes(backend_.capabilities().memory_bytes) + ")";
  }
  return Status(StatusCode::kOutOfMemory, message, "\n", report());
}

Status ChunkedArena::over_tag_limit(const char* what, std::size_t bytes, Tag tag) const {
  if (!has_text_room()) return no_books();
  TagState state;
  {
    Lock lock(mutex_);
    state = tags_[tag];
  }
  return Status(StatusCode::kOutOfMemory, "cannot ", what, " ", format_bytes(bytes), " for '", state.name,
                "': its limit is ", format_bytes(state.limit_bytes),
                bytes > state.limit_bytes
                    ? ", so that can never fit; ask for less at a time or raise the limit of the tag\n"
                    : ", of which " + format_bytes(state.account.live_bytes) +
                          " is live; free some of it or raise the limit of the tag\n",
                report());
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
  return invalid_argument("cannot ", verb, " ", describe(block), ": ", found);
}

Status ChunkedArena::malformed(const AllocationRequest& request) const {
  if (!std::has_single_bit(request.alignment) || request.alignment > chunk_bytes_) {
    return invalid_argument("cannot allocate with alignment ", request.alignment,
                            ": it is not a power of two up to the chunk size ", chunk_bytes_,
                            "; ask for less, or for larger chunks (ArenaOptions::chunk_bytes)");
  }
  return invalid_argument("cannot allocate in region ", static_cast<int>(request.region),
                          ": there is no such region; give Region::kPersistent or Region::kTransient");
}

Status ChunkedArena::paused(std::size_t bytes, Tag tag) const {
  return Status(StatusCode::kUnavailable, "cannot allocate ", format_bytes(bytes), " for tag ", tag,
                ": the tag is paused; resume it first");
}

Status ChunkedArena::no_such_tag(const char* what, Tag tag) const {
  return invalid_argument("cannot ", what, " for tag ", tag,
                          ": there is no such tag; make it with tag_create");
}

Status ChunkedArena::no_books() const {
  if (!has_text_room()) return Status(StatusCode::kOutOfMemory, kNoHostMemory);
  return Status(StatusCode::kOutOfMemory,
                "cannot keep the arena's books: the host has no memory left; free host memory");
}

Status ChunkedArena::no_private_region(const std::string& what) const {
  return Status(StatusCode::kUnavailable, "cannot ", what, ": ", kPrivateRegionLimit,
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
  // Room is made without the lock, and doubled until all ranges fit.
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
    // A segment is a run of ranges that own their memory. Shadows would count it twice.
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
