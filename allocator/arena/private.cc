// Private regions: captures keep their memory and mappings while their graphs live; pausable tags can give
// their memory back to the device.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

// The region's index, or 0 if all are taken. mutex_ held.
std::uint8_t ChunkedArena::take_private_region(PrivateRegion::Use use) {
  for (unsigned i = kSharedRegionCount; i < kRegionCount; ++i) {
    if (private_regions_[i].use != PrivateRegion::Use::kNone) continue;
    private_regions_[i] = PrivateRegion();
    private_regions_[i].use = use;
    return static_cast<std::uint8_t>(i);
  }
  return 0;
}

// --- captures ----------------------------------------------------

Result<Capture> ChunkedArena::capture_begin(Stream stream) {
  if (stream == Stream()) {
    return invalid_argument("cannot begin a capture: the stream is null; pass the one that is captured");
  }
  // When this returns, no thread may be changing mappings.
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  unsigned index = kNoStream;
  settled_.wait(lock, [&] {
    index = add_stream(stream);
    return index == kNoStream || !streams_[index].claimed;
  });
  if (index == kNoStream) {
    return Status(StatusCode::kUnavailable, "cannot begin a capture: ", kStreamLimit,
                  " streams are in use; retire those that ended "
                  "(stream_retire)");
  }
  if (streams_[index].capture_region != 0) {
    return invalid_argument(
        "cannot begin a capture: the stream is being captured already; end that one first");
  }
  const std::uint8_t region = take_private_region(PrivateRegion::Use::kCapturing);
  if (region == 0) return no_private_region("begin a capture");
  private_regions_[region].stream = stream;
  streams_[index].capture_region = region;
  ++capturing_count_;
  return Capture{region};
}

Status ChunkedArena::capture_end(Capture capture) {
  Lock lock(mutex_);
  if (capture.index >= kRegionCount ||
      private_regions_[capture.index].use != PrivateRegion::Use::kCapturing) {
    return invalid_argument("cannot end capture ", capture.index,
                            ": it is not going on; was it ended already?");
  }
  PrivateRegion& region = private_regions_[capture.index];
  for (unsigned i = 0; i < stream_count_; ++i) {
    if (streams_[i].capture_region == capture.index) streams_[i].capture_region = 0;
  }
  region.use = PrivateRegion::Use::kCaptured;
  --capturing_count_;
  return Status();
}

Status ChunkedArena::capture_release(Capture capture) {
  // A thread that is mapping memory for this capture finishes first.
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  if (capture.index >= kRegionCount || private_regions_[capture.index].use != PrivateRegion::Use::kCaptured) {
    return invalid_argument("cannot release capture ", capture.index,
                            ": it was not ended, or was released already; end it first (capture_end)");
  }
  private_regions_[capture.index] = PrivateRegion();
  for (Range* range = first_; range != nullptr;) {
    if (range->region != capture.index) {
      range = range->next;
      continue;
    }
    if (range->kind == RangeKind::kFree) {
      take_free(range);
      range->region = kTransientRegion;
      range->kind = RangeKind::kBusy;
      put_free(range);
      range = first_;  // It may have been joined to its neighbours.
    } else {
      range->region = kTransientRegion;
      range = range->next;
    }
  }
  return Status();
}

// --- pausing -----------------------------------------------------

// Copies the kept blocks from the device to the host (`out`) or back. growth_mutex_ held, mutex_ not.
Status ChunkedArena::copy_blocks(const PrivateRegion& region, bool out) {
  if (region.copy == nullptr) return Status();
  FOREBAY_ASSIGN_OR_RETURN(Stream stream, backend_.stream_create());
  Status status;
  for (const KeptBlock& block : region.kept) {
    std::byte* host = region.copy + block.copy_offset;
    std::byte* device = base_ + block.offset;
    status = backend_.copy_async(out ? host : device, out ? device : host, block.bytes, stream);
    if (!status.ok()) break;
  }
  const Status done = backend_.stream_synchronize(stream);
  (void)backend_.stream_destroy(stream);
  return status.ok() ? done : status;
}

void ChunkedArena::drop_copy(std::uint8_t index) {
  PrivateRegion& region = private_regions_[index];
  if (region.copy == nullptr) return;
  (void)backend_.unpin(region.copy);
  std::free(region.copy);
  region.copy = nullptr;
  region.kept.clear();
}

// Copies the region's blocks to pinned host memory. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::keep_copy(Lock& lock, std::uint8_t index) {
  PrivateRegion& region = private_regions_[index];
  std::size_t bytes = 0;
  std::size_t count = 0;
  const auto kept = [&](const Range* range) {
    return range->region == index && range->kind == RangeKind::kLive;
  };
  for (const Range* range = first_; range != nullptr; range = range->next) {
    if (!kept(range)) continue;
    bytes += range->bytes;
    ++count;
  }
  if (count == 0) return Status();
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  lock.unlock();
  region.kept.clear();
  if (!make_vector_room(region.kept, count)) {
    lock.lock();
    return no_books();
  }
  auto* copy = static_cast<std::byte*>(std::aligned_alloc(page_bytes, round_up(bytes, page_bytes)));
  Status status;
  if (copy == nullptr) {
    status = !has_text_room() ? no_books()
                              : Status(StatusCode::kOutOfMemory, "the host has no ", format_bytes(bytes),
                                       " for a copy; free host memory, or pause without keeping");
  } else {
    status = backend_.pin(copy, round_up(bytes, page_bytes));
  }
  if (!status.ok()) {
    std::free(copy);
    lock.lock();
    return status;
  }
  region.copy = copy;
  lock.lock();
  // The tag allocates nothing meanwhile, so there are no more blocks than were counted.
  std::size_t offset = 0;
  for (const Range* range = first_; range != nullptr; range = range->next) {
    if (!kept(range)) continue;
    region.kept.push_back({range->offset, range->bytes, offset});
    offset += range->bytes;
  }
  lock.unlock();
  status = copy_blocks(region, true);
  lock.lock();
  if (!status.ok()) drop_copy(index);
  return status;
}

// Unmaps the region's chunks and destroys them. On failure some are unmapped, but none has lost its bytes;
// remake maps them again. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::unmake(Lock& lock, std::uint8_t index) {
  for (const std::uint32_t id : private_regions_[index].chunks) {
    const std::size_t bytes = chunks_[id].bytes;
    for (std::uint32_t i = chunks_[id].first_mapping; i != kNone; i = mappings_[i].next) {
      const std::size_t offset = mappings_[i].offset;
      const Status status = unmap_unlocked(lock, offset, bytes);
      if (!status.ok()) return status;
      mappings_[i].made = false;
    }
  }
  bool given_back = false;
  for (const std::uint32_t id : private_regions_[index].chunks) {
    const Chunk handle = chunks_[id].handle;
    const Status status = call_unlocked(lock, [&] { return backend_.chunk_destroy(handle); });
    if (!status.ok()) {
      // The bytes of other chunks are gone already. A chunk that the device refuses stays until resume.
      if (given_back) continue;
      return status;
    }
    given_back = true;
    chunks_[id].paused = true;
    total_.reserved_bytes -= chunks_[id].bytes;
  }
  return Status();
}

// Undoes unmake: creates the chunks and maps them. After a failure it can be called again and continues.
// growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::remake(Lock& lock, std::uint8_t index) {
  std::size_t missing_bytes = 0;
  for (const std::uint32_t id : private_regions_[index].chunks) {
    if (chunks_[id].paused) missing_bytes += chunks_[id].bytes;
  }
  if (!make_room(lock, missing_bytes)) {
    return Status(StatusCode::kOutOfMemory, format_bytes(missing_bytes), " are needed and ",
                  format_bytes(limit_bytes_ - total_.reserved_bytes), " of the limit of ",
                  format_bytes(limit_bytes_), " are free; free blocks or pause other tags");
  }
  for (const std::uint32_t id : private_regions_[index].chunks) {
    const std::size_t bytes = chunks_[id].bytes;
    if (chunks_[id].paused) {
      Result<Chunk> created = call_unlocked(lock, [&] { return backend_.chunk_create(bytes); });
      FOREBAY_RETURN_IF_ERROR(created.status());
      chunks_[id].handle = created.value();
      chunks_[id].paused = false;
      add_reserved(bytes);
    }
    const Chunk handle = chunks_[id].handle;
    for (std::uint32_t i = chunks_[id].first_mapping; i != kNone; i = mappings_[i].next) {
      const std::size_t offset = mappings_[i].offset;
      if (!mappings_[i].made)
        FOREBAY_RETURN_IF_ERROR(call_unlocked(lock, [&] { return backend_.map(base_ + offset, handle); }));
      mappings_[i].made = true;
      FOREBAY_RETURN_IF_ERROR(
          call_unlocked(lock, [&] { return backend_.set_access(base_ + offset, bytes); }));
    }
  }
  return Status();
}

namespace {

// Ranges of these kinds become paused ones.
bool pausable(RangeKind kind) {
  return kind == RangeKind::kFree || kind == RangeKind::kLive || kind == RangeKind::kShadow;
}

}  // namespace

// Waits for the queued work that may still use freed memory of a region, except on captured streams. Called
// without a lock.
void ChunkedArena::wait_for_freed(std::uint8_t index) {
  settle();
  Event events[kStreamLimit];
  unsigned count = 0;
  {
    Lock lock(mutex_);
    std::uint64_t waits = 0;
    for (const Range* range = first_; range != nullptr; range = range->next) {
      if (range->region == index && (range->kind == RangeKind::kFree || range->kind == RangeKind::kShadow)) {
        waits |= unfinished(range->waits, range->epoch);
      }
    }
    for (; waits != 0; waits &= waits - 1) {
      const StreamState& state = streams_[std::countr_zero(waits)];
      if (state.capture_region == 0 && state.event != Event()) events[count++] = state.event;
    }
  }
  if (count == 0) return;
  // Events live as long as the arena. If one fails its stream failed, and memory freed on it stays unused.
  for (unsigned i = 0; i < count; ++i) (void)backend_.event_synchronize(events[i]);
  settle();
}

// Whether queued work may still use freed memory of a region. mutex_ held.
bool ChunkedArena::freed_memory_in_use(std::uint8_t index) const {
  for (const Range* range = first_; range != nullptr; range = range->next) {
    const bool freed = range->kind == RangeKind::kFree || range->kind == RangeKind::kShadow;
    if (range->region == index && freed && unfinished(range->waits, range->epoch) != 0) return true;
  }
  return false;
}

// Lists the chunks of a region and makes its ranges paused ones. growth_mutex_ and mutex_ held; room for the
// list has been made.
void ChunkedArena::mark_paused(std::uint8_t index) {
  ++stamp_;
  for (Range* range = first_; range != nullptr; range = range->next) {
    if (range->region != index || !pausable(range->kind)) continue;
    for (std::size_t offset = range->offset; offset < range->end();) {
      const Mapping& here = mappings_[granules_.at(offset).mapping];
      PhysicalChunk& chunk = chunks_[here.chunk];
      if (chunk.stamp != stamp_) private_regions_[index].chunks.push_back(here.chunk);
      chunk.stamp = stamp_;
      offset = here.offset + chunk.bytes;
    }
    range->paused_kind = range->kind;
    if (range->kind == RangeKind::kFree) {
      take_free(range);
      range->waits = 0;
    }
    range->kind = RangeKind::kPaused;
  }
}

Status ChunkedArena::pause(Tag tag, bool keep) {
  std::uint8_t freed_region = 0;
  {
    Lock lock(mutex_);
    if (tag < tag_count_) freed_region = tags_[tag].region;
  }
  if (freed_region != 0) wait_for_freed(freed_region);
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  if (tag >= tag_count_) return no_such_tag("pause", tag);
  const std::uint8_t index = tags_[tag].region;
  PrivateRegion& region = private_regions_[index];
  if (index == 0 || region.use != PrivateRegion::Use::kPausable) {
    const bool paused = index != 0;
    return invalid_argument("cannot pause tag ", tag,
                            paused ? ": it is paused already; resume it first"
                                   : ": it is not pausable; create it so (TagOptions::pausable)");
  }
  region.use = PrivateRegion::Use::kPaused;
  region.chunks.clear();
  const auto give_up = [&](Status status) {
    drop_copy(index);
    region.use = PrivateRegion::Use::kPausable;
    lock.unlock();
    return has_text_room() ? status.with_context("cannot pause tag " + std::to_string(tag)) : status;
  };
  recover_stranded(lock);
  drop_stale_mappings(lock);
  if (keep) {
    Status kept = keep_copy(lock, index);
    if (!kept.ok()) return give_up(std::move(kept));
  }
  const std::size_t chunk_count = chunk_count_;
  lock.unlock();
  const bool room = make_vector_room(region.chunks, chunk_count);
  lock.lock();
  if (!room) return give_up(no_books());
  if (freed_memory_in_use(index)) {
    return give_up(Status(StatusCode::kUnavailable,
                          "queued work may still use blocks of it that were freed; end the capture of the "
                          "stream that used them, or synchronize it, and try again"));
  }
  mark_paused(index);
  Status status = unmake(lock, index);
  if (status.ok()) return status;
  // Undo it. If even that fails the tag is paused, and resume can be tried again.
  Status undone = remake(lock, index);
  if (!undone.ok()) {
    lock.unlock();
    return status.with_context("paused tag " + std::to_string(tag) +
                               " in part only, resume it to get its memory back");
  }
  wake(index);
  return give_up(std::move(status));
}

// Gives the paused ranges of a region their former kind. mutex_ held.
void ChunkedArena::wake(std::uint8_t index) {
  for (Range* range = first_; range != nullptr;) {
    if (range->kind != RangeKind::kPaused || range->region != index) {
      range = range->next;
      continue;
    }
    if (range->paused_kind != RangeKind::kFree) {
      range->kind = range->paused_kind;
      range = range->next;
      continue;
    }
    range->waits = 0;
    range->kind = RangeKind::kBusy;
    put_free(range);
    range = first_;  // It may have been joined to its neighbours.
  }
}

Status ChunkedArena::resume(Tag tag) {
  settle();
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  recover_stranded(lock);
  if (tag >= tag_count_) return no_such_tag("resume", tag);
  const std::uint8_t index = tags_[tag].region;
  PrivateRegion& region = private_regions_[index];
  if (index == 0 || region.use != PrivateRegion::Use::kPaused) {
    return invalid_argument("cannot resume tag ", tag, ": it is not paused; pause it first");
  }
  Status status = remake(lock, index);
  if (status.ok()) {
    lock.unlock();
    status = copy_blocks(region, false);
    lock.lock();
  }
  if (!status.ok()) {
    lock.unlock();
    return status.with_context("cannot resume tag " + std::to_string(tag));
  }
  wake(index);
  drop_copy(index);
  region.use = PrivateRegion::Use::kPausable;
  return status;
}

}  // namespace forebay::internal
