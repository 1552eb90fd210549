// BlockBook: the live blocks of the process by address: those of its arenas, and those that the driver served
// through the preload. It tells who serves a free, and the size that the program asked for.
//
// Threads: every function may be called from any thread. No memory is allocated or freed under its mutex.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "allocator/preload/record.h"
#include "forebay/backend.h"
#include "forebay/host_room.h"

namespace forebay {

// Devices of a process that can have an arena. On further ones every call goes to the driver.
inline constexpr int kPreloadDeviceLimit = 64;

// A block without an entry in the table of live blocks (events.h).
inline constexpr std::uint32_t kNoEventEntry = UINT32_MAX;

// Whether a block's memory is known outside the process. Then its address and memory stay together, and when
// it is freed it is kept.
enum class KnownOutside : std::uint8_t {
  kNo,
  kShared,  // Another process, by cuIpcGetMemHandle. It may not use the block when that was freed.
  kPinned,  // Anything else, such as a network card.
};

// Which streams forebay_torch_record_stream named for a block.
enum class OtherStreams : std::uint8_t {
  kNone,
  kRecorded,    // The arena knows them, but a block that is parked waits for one stream alone.
  kUnrecorded,  // The arena has no place for one. A free of the block waits for the device.
};

struct BlockFacts {
  std::size_t bytes = 0;  // As requested.
  int device = -1;        // The device of its arena; -1: the driver serves it.
  std::uint64_t id = 0;   // Set by BlockBook::add(): no other block of the process has or had it.
  // Allocated in stream order. A plain free of such a block does not wait for the device.
  bool is_ordered = false;
  OtherStreams other_streams = OtherStreams::kNone;
  void* other_context = nullptr;  // One of another device whose stream was named. Null: none was.
  // The capture in which forebay_torch_alloc allocated it, whose graph uses it. 0: none.
  std::uint64_t capture = 0;
  KnownOutside outside = KnownOutside::kNo;
  void* context = nullptr;  // A block of the driver's ends with this context. Null: with none.
  PreloadServer server = PreloadServer::kArena;
  // For the events, if they are kept: numbers of stream and device, and the index in the table.
  std::uint16_t event_stream = 0;
  std::int16_t event_device = -1;
  std::uint32_t event_entry = kNoEventEntry;
};

class BlockBook {
 public:
  using Blocks = std::map<DevicePtr, BlockFacts>;

  // Whether the host has memory for what a call adds here and in the accounts.
  static bool has_room() { return internal::has_host_memory(1024); }
  // Takes the place of blocks there whose free was not seen. Requires: has_room().
  void add(DevicePtr address, const BlockFacts& facts);

  // Removes the block that starts there. False when there is none.
  bool take(DevicePtr address, BlockFacts* facts);

  // Removes and returns the blocks that have bytes in the range.
  Blocks take_within(DevicePtr begin, std::size_t bytes);

  // Finds the block that contains the address.
  bool find(DevicePtr address, DevicePtr* begin, BlockFacts* facts) const;

  // Adds to the streams that use the block which starts there. `context`: null, or one of another device.
  void note_streams(DevicePtr address, OtherStreams streams, void* context = nullptr);

  // Marks the arenas' blocks that have bytes in the range.
  void pin(DevicePtr begin, std::size_t bytes, KnownOutside outside);

  // Whether an arena has this address: it is in a range that was told, or arenas have had blocks around it.
  // The driver need not be asked about it then.
  bool is_arena_address(DevicePtr address) const noexcept;
  void widen_range(int device, DevicePtr begin, std::size_t bytes);

  // Removes and returns all blocks of the device's arena, which is gone.
  Blocks forget_device(int device);
  // The same with the driver's blocks that end with this context.
  Blocks forget_context(void* context);

  // --- blocks that are known outside and were freed ---
  struct Parked {
    BlockFacts facts;
    Stream stream;
    std::uint64_t number = 0;  // Counts the parked ones.
  };
  using ParkedBlocks = std::map<DevicePtr, Parked>;
  // Keeps the block for a later request of the same size. Its last use is queued on `stream`; null: it is
  // idle.
  void park(DevicePtr address, const BlockFacts& facts, Stream stream);
  // Takes a parked block of that size that is idle or was last used on the same stream. Null: there is none.
  DevicePtr unpark(int device, std::size_t bytes, Stream stream, KnownOutside* outside);
  // The same for the smallest that has `bytes` bytes, which become those that it has.
  DevicePtr unpark_larger(int device, std::size_t* bytes, Stream stream, KnownOutside* outside);
  // Streams on which parked blocks of the device were last used; `bytes`: only those of that size; 0: all.
  // Returns how many there are, at most kMostParkedStreams, and in `number` that of the latest parked block.
  static constexpr std::size_t kMostParkedStreams = 16;
  std::size_t parked_streams(int device, std::size_t bytes, Stream (&streams)[kMostParkedStreams],
                             std::uint64_t* number) const;
  // Work of the device's stream that was queued before the block with that number was parked has run.
  // `device`: default streams have the same handle on every device.
  void set_parked_idle(int device, Stream stream, std::uint64_t number);
  // The bytes of the parked blocks of the device's arena that are kShared, in whole granules.
  std::size_t parked_shared_bytes(int device) const;
  // Removes and returns them, or only those that are idle.
  ParkedBlocks take_parked_shared(int device, bool only_idle);

 private:
  template <typename Condition>
  ParkedBlocks take_parked(Condition condition);
  DevicePtr unpark(int device, std::size_t least, std::size_t most, Stream stream, BlockFacts* facts);
  void widen(int device, DevicePtr begin, std::size_t bytes);
  void extract_within(DevicePtr begin, std::size_t bytes, Blocks* gone);

  // The lowest and highest addresses of arena blocks so far, by device. Written with mutex_ held.
  struct Range {
    std::atomic<std::uintptr_t> begin{UINTPTR_MAX};
    std::atomic<std::uintptr_t> end{0};
  };
  Range ranges_[kPreloadDeviceLimit];
  std::atomic<int> range_count_{0};  // Ranges from here on are empty.
  std::atomic<std::size_t> parked_count_{0};

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Blocks blocks_;
  ParkedBlocks parked_;
  std::uint64_t last_parked_ = 0;
  std::uint64_t last_id_ = std::uint64_t{1} << 63;  // The driver counts from below.
};

}  // namespace forebay
