#include "allocator/preload/events.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace forebay {
namespace {

// `count` entries of the table or ring at `offset`, from the entry `first` on. False if they cannot be read.
template <typename Entry>
bool read_entries(const PreloadFile& file, std::uint64_t offset, std::uint64_t first, std::uint64_t count,
                  std::vector<Entry>* entries) {
  const std::size_t before = entries->size();
  entries->resize(before + count);
  return file.read(offset + first * sizeof(Entry), entries->data() + before, count * sizeof(Entry));
}

bool is_sound(const PreloadEventsHeader& header, std::uint64_t file_bytes) {
  const std::uint64_t capacity = header.event_capacity.load(std::memory_order_acquire);
  const std::uint64_t blocks = header.block_count.load(std::memory_order_acquire);
  return header.magic.load(std::memory_order_acquire) == kPreloadEventsMagic &&
         header.bytes == sizeof(PreloadEventsHeader) && header.event_offset >= sizeof(PreloadEventsHeader) &&
         header.event_offset <= header.block_offset && header.block_offset <= file_bytes &&
         header.event_offset % sizeof(PreloadEvent) == 0 && header.block_offset % sizeof(PreloadBlock) == 0 &&
         capacity <= (header.block_offset - header.event_offset) / sizeof(PreloadEvent) &&
         blocks <= (file_bytes - header.block_offset) / sizeof(PreloadBlock);
}

bool is_sound(const PreloadEvent& event) {
  return event.kind >= PreloadEventKind::kAllocation && event.kind <= PreloadEventKind::kUntracked &&
         static_cast<std::size_t>(event.server) < kPreloadServerCount && event.stream < kPreloadStreamLimit;
}

PreloadDeviceFigures figures_of(int device, const PreloadDeviceCounts& counts) {
  return {{counts.allocations, counts.frees, counts.refused, counts.requested_bytes,
           counts.peak_requested_bytes, counts.elsewhere_bytes, counts.arena_bytes,
           counts.peak_reserved_bytes, counts.capacity_bytes, counts.chunk_bytes},
          device};
}

// The blocks that were live before the first kept event. The first event of an address decides: a free means
// that it was live, an allocation that it was not. Without an event the table's entry is still valid.
std::vector<PreloadBlock> blocks_before(const std::vector<PreloadBlock>& table,
                                        const std::vector<PreloadEvent>& events, std::uint64_t first_number) {
  std::unordered_map<std::uint64_t, bool> is_known;
  std::vector<PreloadBlock> blocks;
  for (const PreloadEvent& event : events) {
    const bool is_free = event.kind == PreloadEventKind::kFree;
    if ((!is_free && event.kind != PreloadEventKind::kAllocation) ||
        !is_known.emplace(event.address, true).second || !is_free) {
      continue;
    }
    blocks.push_back({.address = event.address,
                      .bytes = event.bytes,
                      .stream = event.stream,
                      .device = event.device,
                      .server = event.server});
  }
  for (const PreloadBlock& block : table) {
    if (block.address != 0 && block.number < first_number && is_known.emplace(block.address, true).second) {
      blocks.push_back(block);
    }
  }
  std::sort(blocks.begin(), blocks.end(),
            [](const PreloadBlock& a, const PreloadBlock& b) { return a.address < b.address; });
  return blocks;
}

}  // namespace

std::string preload_stream_text(std::uint16_t stream) {
  switch (stream) {
    case kPreloadPlainStream:
      return "plain allocations";
    case kPreloadLegacyStream:
      return "the default stream";
    case kPreloadPerThreadStream:
      return "threads' default streams";
    case kPreloadStreamLimit - 1:
      return "further streams";
    default:
      return "stream " + std::to_string(stream);
  }
}

Result<PreloadEventLog> read_preload_events(const std::string& path) {
  const PreloadFile file(path);
  if (file.error() != 0) {
    return Status(StatusCode::kIoError, "cannot read the events in ", path, ": ", std::strerror(file.error()),
                  "; keep them beside the records");
  }
  const Status damaged(StatusCode::kCorruption, "cannot read the events in ", path,
                       ": it is not an events file of this build; leave it out");
  alignas(PreloadEventsHeader) unsigned char memory[sizeof(PreloadEventsHeader)];
  const auto& header = *reinterpret_cast<const PreloadEventsHeader*>(memory);
  // Each copy is checked anew: the process, or another user, may have changed the file.
  const auto copy_header = [&] {
    return file.read(0, memory, sizeof memory) && is_sound(header, file.bytes());
  };
  if (!copy_header()) return damaged;
  PreloadEventLog log;
  log.start_us = header.start_us;
  // The table first: later changes of it are among the events.
  std::vector<PreloadBlock> table;
  if (!read_entries(file, header.block_offset, 0, header.block_count, &table) || !copy_header())
    return damaged;
  log.untold_blocks = header.untold_blocks;
  const std::uint64_t end = header.written;
  const std::uint64_t capacity = header.event_capacity;
  const std::uint64_t offset = header.event_offset;
  const std::uint64_t begin = end - std::min(end, capacity);
  for (std::uint64_t i = begin; i < end;) {
    const std::uint64_t count = std::min(end - i, capacity - i % capacity);
    if (!read_entries(file, offset, i % capacity, count, &log.events)) return damaged;
    i += count;
  }
  if (!copy_header()) return damaged;
  // Meanwhile the process may have overwritten the oldest events, or may be overwriting one now, or may have
  // been killed while it was.
  const std::uint64_t later = header.written + 1;
  log.first_number = std::clamp(later > capacity ? later - capacity : 0, begin, end);
  log.events.erase(log.events.begin(),
                   log.events.begin() + static_cast<std::ptrdiff_t>(log.first_number - begin));
  if (!std::all_of(log.events.begin(), log.events.end(),
                   [](const PreloadEvent& event) { return is_sound(event); })) {
    return Status(StatusCode::kCorruption, "cannot read the events in ", path,
                  ": one of them is not valid; leave the file out");
  }
  for (int device = 0; device < kPreloadEventDevices; ++device) {
    const PreloadDeviceFigures figures = figures_of(device, header.devices[device]);
    if (figures.allocations != 0 || figures.refused != 0 || figures.arena_bytes != 0) {
      log.devices.push_back(figures);
    }
  }
  log.live_before = blocks_before(table, log.events, log.first_number);
  return log;
}

}  // namespace forebay
