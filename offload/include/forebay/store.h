// Store: keyed byte ranges that live somewhere else than in the caller's memory, usually in files. Parts of
// them are read and written asynchronously.
//
// What it is not: durable (a file store's files have no name and end with it), a cache, or a mover of device
// memory. It moves bytes between a range and host memory; what goes on to a device passes through a
// StagingBuffer.
//
// Ranges. A range is made once, with a name and a size, and stays until the store ends. Its room is taken
// when it is made, so that a full disk is met then and not in the middle of a step. What has never been
// written reads as zeros.
//
// Granules. A range is a row of granules of `facts().granule_bytes`; the last one may be shorter. A transfer
// begins at a granule's begin and ends at a granule's end or at the range's; another is refused. Where
// checksums are on, there is one for each granule, in host memory, made when it is written and compared
// whenever it is read.
//
// Alignment. Memory whose address is a multiple of `facts().alignment_bytes` is read and written in place.
// Other memory, and the end of a range of an odd size, goes through one of a few bounce buffers, which costs
// a copy and is counted.
//
// Order. Transfers in flight at the same time have no order among each other, also those of one batch. Who
// needs one after another submits it when the other's ticket is done. A write that overlaps anything in
// flight leaves undefined bytes, or kCorruption for the reader.
//
// Progress. The store has no thread that watches over it: submit, poll and wait hand on what is queued, so
// what exceeds the drive's queue (`facts().depth` blocks) moves on only while somebody calls them. Checksums
// are computed by the thread that calls.
//
// Failure. A ticket carries the first failure of its transfers: the range, the place, what the system said
// and what to try. The rest of its batch is dropped, nothing else is touched, and the store goes on. What a
// failed write covered is old, new or torn; a reader of what is torn gets kCorruption where checksums are on.
//
// Threads: every function may be called from any thread; a ticket is polled or waited for by one thread at a
// time. No lock is held over a system call that moves bytes, nor over a copy or a checksum.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "forebay/status.h"

namespace forebay {

// A range of one store. Valid as long as the store is.
struct StoreRange {
  std::uint32_t index = UINT32_MAX;
};

// A batch in flight, or one that is done and has not been asked for. Ids are not used again.
struct StoreTicket {
  std::uint64_t id = 0;  // 0: none.
};

enum class StoreDirection : std::uint8_t { kRead, kWrite };

// A part of a range, and the caller's memory that it is read into or written from.
struct StoreTransfer {
  StoreDirection direction = StoreDirection::kRead;
  StoreRange range;
  std::uint64_t offset = 0;     // Bytes from the range's begin; a multiple of the granule.
  std::byte* memory = nullptr;  // Left as it is by a write.
  std::size_t bytes = 0;        // Zero is allowed and moves nothing.
};

// What a store is, fixed when it was made (registered_bytes excepted).
struct StoreFacts {
  std::string description;             // One line for people: engine, directories, what was refused.
  std::size_t granule_bytes = 0;       // Where transfers may begin and end; what one checksum covers.
  std::size_t alignment_bytes = 1;     // Of memory that is read and written in place.
  std::size_t block_bytes = 0;         // The most that one operation of the drive moves.
  unsigned depth = 0;                  // Operations that the drive has at the same time, at most.
  unsigned transfer_limit = 0;         // Transfers that are submitted and not yet asked for, at most.
  bool checksums = false;              // Whether what is read is compared with what was written.
  std::uint64_t registered_bytes = 0;  // Memory that the kernel keeps mapped for this store.
};

struct StoreStatistics {
  std::uint64_t read_bytes = 0;     // Moved into callers' memory.
  std::uint64_t written_bytes = 0;  // Moved out of it.
  std::uint64_t read_count = 0;  // Operations of the drive that succeeded; a transfer is one for each block.
  std::uint64_t write_count = 0;
  std::uint64_t bounced_bytes = 0;  // Of both: what went through a bounce buffer.
  std::uint64_t continued_count =
      0;                            // Operations that came back short or interrupted and were taken up again.
  std::uint64_t failed_count = 0;   // Batches that failed.
  std::uint64_t refused_count = 0;  // Batches refused because too much was in flight.
  std::uint64_t range_bytes = 0;    // Sizes of all ranges.
  unsigned transfers_in_flight = 0;       // Submitted, their tickets not yet spent.
  unsigned most_transfers_in_flight = 0;  // The most there have been.
};

class Store {
 public:
  // Drops what is queued and waits until the drive is done with what it has, because that is the callers'
  // memory.
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Makes a range of `bytes` (zero is allowed). `name` is for messages and must be new. Cost: on the file
  // tier, the taking of disk blocks; milliseconds, where the file system can reserve them. Errors:
  // kInvalidArgument for a name that is taken or empty; kOutOfMemory where there is no room, and nothing is
  // taken then; kIoError.
  virtual Result<StoreRange> create_range(std::string_view name, std::uint64_t bytes) = 0;

  // Begins the transfers of a batch and gives one ticket for all of them; all or none. Never waits. The
  // memory is the store's until the ticket is done. Errors: kUnavailable when facts().transfer_limit would be
  // exceeded (nothing was begun: wait for a ticket, then submit again); kInvalidArgument for an empty batch,
  // one that is larger than the limit, a range that is not the store's, a part that is not in it or not of
  // whole granules, or null memory.
  virtual Result<StoreTicket> submit(std::span<const StoreTransfer> transfers) = 0;

  // Whether the batch is done. True and a failure of the batch spend the ticket; false leaves it. Never
  // waits. Errors: the batch's; kInvalidArgument for a ticket that is spent or never was.
  virtual Result<bool> poll(StoreTicket ticket) = 0;

  // Waits until the batch is done and spends the ticket. Errors: the batch's; kTimeout when `deadline` (from
  // now on) passes first: the ticket stays and the memory is still the store's; kInvalidArgument as poll.
  virtual Status wait(StoreTicket ticket, std::chrono::milliseconds deadline) = 0;

  // Says that transfers will use this memory, so that the kernel can keep it mapped. Never needed. Part of it
  // may be refused where the memory that a process may lock is limited: said once, in the log, and seen in
  // facts(). Owns: the memory stays the caller's and must outlive the store. Errors: kInvalidArgument for
  // null memory and while transfers are in flight.
  virtual Status register_memory(std::byte* memory, std::size_t bytes) = 0;

  virtual StoreFacts facts() const = 0;
  virtual StoreStatistics statistics() const = 0;

  // A batch of one.
  Result<StoreTicket> read(StoreRange range, std::uint64_t offset, std::byte* memory, std::size_t bytes);
  Result<StoreTicket> write(StoreRange range, std::uint64_t offset, const std::byte* memory,
                            std::size_t bytes);

 protected:
  Store() = default;
};

}  // namespace forebay
