// BlockBook: which blocks the process holds, by address: those of its arenas, and those it got from the
// driver by way of the preload. It says whose a free is, whichever call it comes by, and what a block was
// asked to be.
//
// Threads: every function may be called from any thread; no memory is allocated or freed under its mutex.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "forebay/backend.h"
#include "allocator/preload/record.h"

namespace forebay {

// Devices of a process that can have an arena. On one beyond, everything goes to the driver.
inline constexpr int kPreloadDeviceLimit = 64;

// No entry in the table of live blocks.
inline constexpr std::uint32_t kNoEventSlot = UINT32_MAX;

struct BlockFacts {
  std::size_t bytes = 0;  // As asked for.
  int device = -1;        // Whose arena it is of; -1: the driver's.
  // Allocated in the order of a stream. A plain free of such a block does not wait for the device.
  bool is_ordered = false;
  // Somebody outside knows the memory behind it (another process, a network card): its address and memory
  // belong together for good, also after it was freed.
  bool is_pinned = false;
  PreloadServer server = PreloadServer::kArena;
  // For the events, where they are kept: stream and device by number, and the entry of the table.
  std::uint16_t event_stream = 0;
  std::int16_t event_device = -1;
  std::uint32_t event_slot = kNoEventSlot;
};

class BlockBook {
 public:
  using Blocks = std::map<DevicePtr, BlockFacts>;

  // True when there was one at that address, whose free did not come by: `lost` gets what was known of it.
  bool add(DevicePtr address, const BlockFacts& facts, BlockFacts* lost = nullptr);

  // Removes the block that starts there. False when there is none.
  bool take(DevicePtr address, BlockFacts* facts);

  // The block that the address is in.
  bool find(DevicePtr address, DevicePtr* begin, BlockFacts* facts) const;

  // Pins the arenas' blocks that have bytes in the range.
  void pin(DevicePtr begin, std::size_t bytes);

  // Whether the address lies where arenas have had blocks: the driver need not be asked about it.
  bool is_arena_address(DevicePtr address) const noexcept;

  // The device's arena is gone, and all its blocks, which are returned.
  Blocks forget_device(int device);

  // --- pinned blocks that were freed ---
  // Keeps the block for a later request of the same size. `stream`: its last use is queued there; null: it is
  // idle.
  void park(DevicePtr address, const BlockFacts& facts, Stream stream);
  // One of that size that is idle or was last used on the same stream; null when there is none.
  DevicePtr unpark(int device, std::size_t bytes, Stream stream);

 private:
  struct Parked {
    BlockFacts facts;
    Stream stream;
  };
  using ParkedBlocks = std::map<DevicePtr, Parked>;

  // What the arenas' blocks have lain between, by device. Written with mutex_ held.
  struct Range {
    std::atomic<std::uintptr_t> begin{UINTPTR_MAX};
    std::atomic<std::uintptr_t> end{0};
  };
  Range ranges_[kPreloadDeviceLimit];
  std::atomic<int> range_count_{0};  // Those beyond are empty.
  std::atomic<std::size_t> parked_count_{0};

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Blocks blocks_;
  ParkedBlocks parked_;
};

}  // namespace forebay
