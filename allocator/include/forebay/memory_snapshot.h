// MemorySnapshot: the blocks and events of an allocator, in the terms of PyTorch's memory snapshots, and the
// writer of the file that PyTorch's memory visualiser (pytorch.org/memory_viz) and readers of
// torch.cuda.memory._snapshot load.
//
// It is not a reader, and not a recorder: the allocator fills the structs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// One level of a call stack, innermost first in a stack.
struct SnapshotFrame {
  std::string name;
  std::string filename;
  std::uint32_t line = 0;
};

// Each call stack is kept once, in MemorySnapshot::stacks, and named by its index.
inline constexpr std::uint32_t kNoSnapshotStack = UINT32_MAX;

enum class SnapshotBlockState : std::uint8_t {
  kActiveAllocated,
  kActivePendingFree,  // Freed, but a stream may still use it.
  kInactive,
};

// The blocks of a segment tile it; readers compute their addresses from their sizes.
struct SnapshotBlock {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint64_t requested_size = 0;
  SnapshotBlockState state = SnapshotBlockState::kInactive;
  std::uint32_t stack = kNoSnapshotStack;
};

enum class SnapshotSegmentType : std::uint8_t { kLarge, kSmall };

struct SnapshotSegment {
  int device = 0;
  std::uint64_t address = 0;
  std::uint64_t total_size = 0;
  std::uint64_t allocated_size = 0;  // The sum of kActiveAllocated blocks.
  std::uint64_t active_size = 0;     // The same with kActivePendingFree blocks.
  std::uint64_t requested_size = 0;
  std::uint64_t stream = 0;  // The value of the handle.
  SnapshotSegmentType segment_type = SnapshotSegmentType::kLarge;
  bool is_expandable = true;  // Made of mapped chunks, not of one allocation.
  std::uint32_t stack = kNoSnapshotStack;
  std::vector<SnapshotBlock> blocks;
};

enum class SnapshotAction : std::uint8_t {
  kAlloc,
  kFreeRequested,
  kFreeCompleted,
  kSegmentAlloc,
  kSegmentFree,
  kSegmentMap,
  kSegmentUnmap,
  kOutOfMemory,
  kSnapshot,
};

struct SnapshotEvent {
  SnapshotAction action = SnapshotAction::kAlloc;
  std::uint64_t address = 0;  // kOutOfMemory: the bytes that were free on the device.
  std::uint64_t size = 0;
  std::uint64_t stream = 0;
  std::uint64_t time_us = 0;  // Since the epoch.
  std::uint32_t stack = kNoSnapshotStack;
};

struct SnapshotSetting {
  std::string name;
  std::variant<bool, std::int64_t, std::string> value;
};

struct MemorySnapshot {
  std::vector<SnapshotSegment> segments;
  std::vector<std::vector<SnapshotEvent>> device_traces;  // One list for each device, oldest first.
  std::vector<SnapshotSetting> allocator_settings;
  std::vector<std::vector<SnapshotFrame>> stacks;
};

// Writes `snapshot` to `file`, which stays open, as a pickle of protocol 2. It holds only dicts, lists,
// strings, integers and truth values, so reading it runs no code. Bytes that are not UTF-8 become '?'.
// Cost:   one pass over the snapshot through a buffer of fixed size. Each stack is written once.
// Errors: kInvalidArgument for a stack index out of range; kIoError with the system's reason, after which
//         part of the file may have been written.
Status write_memory_snapshot(const MemorySnapshot& snapshot, int file);

}  // namespace forebay
