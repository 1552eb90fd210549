// Store: named byte ranges outside the caller's memory, usually in files, read and written asynchronously. In
// prose it is called a file store, because a rendezvous store is another thing.
//
// It is not durable (its files are anonymous and end with it), it is not a cache, and it does not move device
// memory. It moves bytes between a range and host memory; bytes for a device pass through a StagingBuffer.
//
// Ranges. A range is made once, with a name and a size, and stays until the store ends. Its disk space is
// taken when it is made, so a full disk shows then and not in the middle of a step. Bytes that were never
// written read as zeros.
//
// Granules. A range is a row of granules of `facts().granule_bytes`; the last one may be shorter. A transfer
// has to begin at the start of a granule and to end at the end of a granule or of the range. With checksums,
// each granule has one in host memory: it is made when the granule is written and compared whenever it is
// read.
//
// Alignment. Memory at a multiple of `facts().alignment_bytes` is read and written in place.
// Other memory, and the end of a range of an odd size, goes through one of a few bounce buffers, which costs
// a copy and is counted.
//
// Order. Transfers that are in flight at the same time have no order, also within one batch. To order two
// transfers, submit the second when the ticket of the first is done. A write that overlaps a transfer in
// flight leaves undefined bytes, or kCorruption for the reader.
//
// Progress. The store has no thread of its own: submit, poll and wait pass queued transfers to the drive. The
// transfers beyond the drive's queue (`facts().depth` blocks) advance only during such calls. The calling
// thread computes the checksums.
//
// Failure. A ticket carries the first failure of its transfers: the range, the place, the system's error and
// advice. The rest of its batch is dropped, other batches are not touched, and the store goes on. The bytes
// under a failed write are old, new or torn; with checksums, reading torn bytes gives kCorruption.
//
// Threads: every function may be called from any thread; one thread at a time polls or waits for a ticket. No
// lock is held during a system call that moves bytes, a copy or a checksum.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "forebay/span.h"
#include "forebay/status.h"

namespace forebay {

// A range of one store. Valid until the store ends.
struct StoreRange {
  std::uint32_t index = UINT32_MAX;
};

// A batch that is in flight, or is done and was not asked for yet. Ids are not used again.
struct StoreTicket {
  std::uint64_t id = 0;  // 0: none.
};

enum class StoreDirection : std::uint8_t { kRead, kWrite };

// A part of a range, and the caller's memory to read it into or to write it from.
struct StoreTransfer {
  StoreDirection direction = StoreDirection::kRead;
  StoreRange range;
  std::uint64_t offset = 0;     // Bytes from the start of the range; a multiple of the granule.
  std::byte* memory = nullptr;  // A write does not change it.
  std::size_t bytes = 0;        // Zero is allowed and moves nothing.
};

// Facts of a store. They are fixed when it is made, except registered_bytes.
struct StoreFacts {
  std::string description;             // One line for people: engine, directories, refused features.
  std::size_t granule_bytes = 0;       // Transfers begin and end at its multiples; each has one checksum.
  std::size_t alignment_bytes = 1;     // Memory at a multiple of it is read and written in place.
  std::size_t block_bytes = 0;         // The most that one operation of the drive moves.
  unsigned depth = 0;                  // The most operations that the drive has at the same time.
  unsigned transfer_limit = 0;         // The most transfers with tickets that are not spent.
  bool checksums = false;              // Whether bytes read are compared with bytes written.
  std::uint64_t registered_bytes = 0;  // Memory that the kernel keeps mapped for this store.
};

struct StoreStatistics {
  std::uint64_t read_bytes = 0;     // Moved into callers' memory.
  std::uint64_t written_bytes = 0;  // Moved out of callers' memory.
  std::uint64_t read_count = 0;  // Operations of the drive that succeeded; a transfer is one for each block.
  std::uint64_t write_count = 0;
  std::uint64_t bounced_bytes = 0;  // Bytes of both that went through a bounce buffer.
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
  // Drops queued transfers and waits for those that the drive has, because they use the callers' memory.
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Makes a range of `bytes` (zero is allowed). `name` is for messages and must be new.
  // Cost: on the file tier, taking the disk blocks; milliseconds where the file system can reserve them.
  // Errors: kInvalidArgument for a name that is taken or empty; kOutOfMemory without room, and nothing is
  // taken then; kIoError.
  virtual Result<StoreRange> create_range(std::string_view name, std::uint64_t bytes) = 0;

  // Begins all transfers of a batch, or none, and gives one ticket for all of them. Never waits. The store
  // uses the memory until the ticket is done. Errors: kUnavailable when facts().transfer_limit would be
  // exceeded (nothing was begun: wait for a ticket and submit again); kInvalidArgument for an empty batch, a
  // batch larger than the limit, a range of another store, a part outside the range or not of whole granules,
  // or null memory.
  virtual Result<StoreTicket> submit(Span<const StoreTransfer> transfers) = 0;

  // Whether the batch is done. True and a failure of the batch spend the ticket; false leaves it. Never
  // waits. Errors: those of the batch; kInvalidArgument for a ticket that is spent or never existed.
  virtual Result<bool> poll(StoreTicket ticket) = 0;

  // Waits until the batch is done and spends the ticket.
  // Errors: those of the batch; kTimeout when `deadline` (from now on) passes first: the ticket stays, and
  // the store still uses the memory; kInvalidArgument as poll.
  virtual Status wait(StoreTicket ticket, std::chrono::milliseconds deadline) = 0;

  // Announces memory that transfers will use, so that the kernel can keep it mapped. Never needed. Where the
  // memory that a process may lock is limited, a part may be refused: the log says so once, and facts() has
  // the registered bytes. Requires: the memory outlives the store. Errors: kInvalidArgument for null memory
  // and while transfers are in flight.
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
