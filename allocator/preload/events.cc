#include "allocator/preload/events.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace forebay {
namespace {

template <typename Entry>
const Entry* entries_at(const PreloadMapping& file, std::uint64_t offset) {
  return reinterpret_cast<const Entry*>(static_cast<const unsigned char*>(file.memory()) + offset);
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
  const PreloadMapping file(path, sizeof(PreloadEventsHeader));
  if (file.error() != 0) {
    return Status(StatusCode::kIoError, "cannot read the events in ", path, ": ", std::strerror(file.error()),
                  "; keep them beside the records");
  }
  const auto* const header = static_cast<const PreloadEventsHeader*>(file.memory());
  if (header == nullptr || !is_sound(*header, file.bytes())) {
    return Status(StatusCode::kCorruption, "cannot read the events in ", path,
                  ": it is not an events file of this build; leave it out");
  }
  PreloadEventLog log;
  log.start_us = header->start_us;
  // The table first: later changes of it are among the events.
  const std::uint64_t block_count = header->block_count.load(std::memory_order_acquire);
  const auto* table_begin = entries_at<PreloadBlock>(file, header->block_offset);
  const std::vector<PreloadBlock> table(table_begin, table_begin + block_count);
  log.untold_blocks = header->untold_blocks.load(std::memory_order_relaxed);
  const std::uint64_t end = header->written.load(std::memory_order_acquire);
  const std::uint64_t capacity = header->event_capacity.load(std::memory_order_acquire);
  const auto* ring = entries_at<PreloadEvent>(file, header->event_offset);
  const std::uint64_t begin = end - std::min(end, capacity);
  log.events.reserve(end - begin);
  for (std::uint64_t i = begin; i < end; ++i) log.events.push_back(ring[i % capacity]);
  // Meanwhile the process may have overwritten the oldest events, or may be overwriting one now, or may have
  // been killed while it was.
  const std::uint64_t later = header->written.load(std::memory_order_acquire) + 1;
  log.first_number = std::clamp(later > capacity ? later - capacity : 0, begin, end);
  log.events.erase(log.events.begin(),
                   log.events.begin() + static_cast<std::ptrdiff_t>(log.first_number - begin));
  if (!std::all_of(log.events.begin(), log.events.end(),
                   [](const PreloadEvent& event) { return is_sound(event); })) {
    return Status(StatusCode::kCorruption, "cannot read the events in ", path,
                  ": one of them is not valid; leave the file out");
  }
  for (int device = 0; device < kPreloadEventDevices; ++device) {
    const PreloadDeviceFigures figures = figures_of(device, header->devices[device]);
    if (figures.allocations != 0 || figures.refused != 0 || figures.arena_bytes != 0) {
      log.devices.push_back(figures);
    }
  }
  log.live_before = blocks_before(table, log.events, log.first_number);
  return log;
}

}  // namespace forebay
