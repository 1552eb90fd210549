#include "forebay/file_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <utility>

#include "forebay/checksum.h"
#include "forebay/standard_streams.h"
#include "forebay/stream_copy.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "offload/io_engine.h"
#include "offload/say_once.h"
#include "offload/scratch_file.h"
#include "offload/transfer_checks.h"

namespace forebay {
namespace {

using internal::errno_text;
using internal::IoEngine;
using internal::IoRequest;
using internal::IoResult;
using internal::ScratchFile;
using internal::transfer_text;
using Clock = std::chrono::steady_clock;

// How long a thread waits before it checks again whether its result can still come. Smaller: wake-ups
// for nothing. Larger: the longest that a thread sleeps on when another has seen the last operation fail to
// begin.
constexpr std::chrono::milliseconds kLookAgain{100};

// Times an operation is taken up again without having moved anything. Smaller: a signal or a kernel short of
// memory fails a step. Larger: longer until a drive that never moves on is reported.
constexpr unsigned kRetriesMax = 16;

// Results that are taken at once. Smaller: the lock is taken more often. Larger: a ticket waits for the
// checksums of others.
constexpr std::size_t kReapMax = 8;

constexpr std::size_t kGranuleMin = 4096;
constexpr std::size_t kBlockMax = std::size_t{1} << 30;  // Operations count their bytes in 31 bits.
constexpr unsigned kDepthMax = 4096;
constexpr std::size_t kDirectoriesMax = 64;

constexpr std::uint64_t kNeverWritten = 0;

std::uint64_t kept_checksum_of(const std::byte* memory, std::size_t bytes) {
  const std::uint64_t sum = checksum_of(memory, bytes);
  return sum == kNeverWritten ? 1 : sum;
}

// A drive that has gone bad, in a message.
std::string advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "free space in the directory or name another";
    case ENOMEM:
    case ECANCELED:
      return "the kernel had no memory or no thread left for it; use fewer ranks, or raise ulimit -v and -u";
    case EINVAL:
      return "the file system may want another alignment; try without direct transfers";
    default:
      return "see the system log about the drive, or name another directory";
  }
}

// Where an address of the store lies: the ranges follow each other in one row of addresses, dealt out to the
// files in stripes.
struct Place {
  unsigned file = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes_left = 0;  // In this stripe.
};

struct Stripes {
  std::uint64_t stripe_bytes = 0;
  unsigned file_count = 1;

  Place place_of(std::uint64_t address) const {
    if (file_count == 1) return {0, address, UINT64_MAX - address};
    const std::uint64_t stripe = address / stripe_bytes;
    const std::uint64_t inside = address % stripe_bytes;
    return {static_cast<unsigned>(stripe % file_count), stripe / file_count * stripe_bytes + inside,
            stripe_bytes - inside};
  }
  // The bytes that file `file` needs for the addresses below `end`.
  std::uint64_t file_bytes(unsigned file, std::uint64_t end) const {
    if (file_count == 1) return end;
    const std::uint64_t whole = end / stripe_bytes;
    const std::uint64_t rest = end % stripe_bytes;
    std::uint64_t bytes = whole / file_count * stripe_bytes;
    if (file < whole % file_count) bytes += stripe_bytes;
    if (file == whole % file_count) bytes += rest;
    return bytes;
  }
};

struct Range {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;
  // One a granule. An element belongs to the operation in flight that covers its granule.
  std::vector<std::uint64_t> checksums;
};

struct Transfer {
  StoreDirection direction;
  Range* range;
  std::uint64_t offset;
  std::byte* memory;
  std::uint64_t bytes;
  std::uint64_t begun_bytes = 0;  // Bytes that operations have been made for.
};

// A batch, from submit until its ticket is spent.
struct Batch {
  std::uint64_t ticket = 0;  // 0: the slot is free.
  std::vector<Transfer> transfers;
  std::size_t next_transfer = 0;  // The first that is not all begun.
  unsigned operations = 0;        // In flight.
  bool queued = false;            // In the queue: some is not begun.
  Status status;

  bool done() const { return !queued && operations == 0; }
};

// One piece of a transfer that fits a block and a stripe.
struct Operation {
  Batch* batch = nullptr;
  Range* range = nullptr;
  StoreDirection direction = StoreDirection::kRead;
  std::uint64_t offset = 0;     // In the range.
  std::byte* memory = nullptr;  // The caller's.
  std::byte* buffer = nullptr;  // The memory of the operation: the caller's or a bounce buffer.
  std::uint32_t bytes = 0;
  std::uint32_t drive_bytes = 0;  // The same in whole alignment units.
  std::uint32_t done_bytes = 0;
  unsigned file = 0;
  std::uint64_t file_offset = 0;
  unsigned retries = 0;
  int bounce = -1;
  Status status;
  bool again = false;  // Must be submitted once more.
  // The reaping thread sees everything that the submitting thread did: the kernel's queue orders the two, but
  // no tool can see that.
  std::atomic<bool> submitted{false};
};

class FileStore final : public Store {
 public:
  FileStore(const FileStoreOptions& options, std::vector<ScratchFile> files, std::unique_ptr<IoEngine> engine,
            std::size_t alignment_bytes, std::string description)
      : options_(options),
        stripes_{options.stripe_bytes, static_cast<unsigned>(files.size())},
        alignment_bytes_(alignment_bytes),
        description_(std::move(description)),
        files_(std::move(files)),
        engine_(std::move(engine)),
        operations_(std::size_t{2} * options.depth),
        batches_(options.transfer_limit) {
    for (unsigned i = 2 * options.depth; i-- > 0;) free_operations_.push_back(i);
    for (unsigned i = options.transfer_limit; i-- > 0;) free_batches_.push_back(i);
  }

  Status map_bounce_buffers() {
    if (options_.bounce_count == 0) return {};
    const std::size_t bytes = options_.bounce_count * options_.block_bytes;
    void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
      return {StatusCode::kOutOfMemory, "cannot map " + format_bytes(bytes) + " of bounce buffers: " +
                                            errno_text(errno) + "; lower bounce_count or block_bytes"};
    }
    bounce_ = static_cast<std::byte*>(mapped);
    for (unsigned i = options_.bounce_count; i-- > 0;) free_bounces_.push_back(static_cast<int>(i));
    return {};
  }

  ~FileStore() override {
    std::unique_lock lock(mutex_);
    for (Batch* batch : queue_) batch->queued = false;
    queue_.clear();
    ending_ = true;
    while (in_flight_ > 0) reap(lock, kLookAgain);
    lock.unlock();
    engine_.reset();
    if (bounce_ != nullptr) ::munmap(bounce_, options_.bounce_count * options_.block_bytes);
  }

  Result<StoreRange> create_range(std::string_view name, std::uint64_t bytes) override {
    const std::lock_guard creating(create_mutex_);
    const auto refuse = [&](StatusCode code, const std::string& why) {
      return Status(code,
                    "cannot make range '" + std::string(name) + "' of " + format_bytes(bytes) + ": " + why);
    };
    if (name.empty()) return refuse(StatusCode::kInvalidArgument, "a range needs a name");
    if (bytes > static_cast<std::uint64_t>(INT64_MAX) - address_end_ - options_.granule_bytes) {
      return refuse(StatusCode::kInvalidArgument, "no file is that large");
    }
    // Only create_range changes the ranges and the files' sizes, and it runs by itself.
    for (const Range& range : ranges_) {
      if (range.name == name) return refuse(StatusCode::kInvalidArgument, "the name is taken");
    }
    const std::uint64_t end = round_up(address_end_ + bytes, options_.granule_bytes);
    for (unsigned i = 0; i < files_.size(); ++i) {
      bool reserved = true;
      if (Status status = files_[i].grow(stripes_.file_bytes(i, end), &reserved); !status.ok()) {
        for (unsigned j = 0; j < i; ++j) files_[j].shrink(stripes_.file_bytes(j, address_end_));
        return refuse(status.code(), status.message());
      }
      if (!reserved) {
        internal::say_once("the file system of '" + files_[i].directory() +
                           "' does not reserve space: a full disk is met when it is written");
      }
    }
    Range made;
    made.name = name;
    made.bytes = bytes;
    made.address = address_end_;
    if (options_.checksums) made.checksums.assign(ceil_div(bytes, options_.granule_bytes), kNeverWritten);
    address_end_ = end;
    const std::lock_guard lock(mutex_);
    ranges_.push_back(std::move(made));
    statistics_.range_bytes += bytes;
    return StoreRange{static_cast<std::uint32_t>(ranges_.size() - 1)};
  }

  Result<StoreTicket> submit(Span<const StoreTransfer> transfers) override {
    std::unique_lock lock(mutex_);
    if (Status status =
            internal::check_batch(transfers.size(), statistics_.transfers_in_flight, options_.transfer_limit);
        !status.ok()) {
      if (status.code() == StatusCode::kUnavailable) ++statistics_.refused_count;
      advance(lock);
      return status;
    }
    for (const StoreTransfer& transfer : transfers) {
      if (transfer.range.index >= ranges_.size())
        return internal::unknown_range(transfer.range, ranges_.size());
      const Range& range = ranges_[transfer.range.index];
      FOREBAY_RETURN_IF_ERROR(
          internal::check_transfer(transfer, range.name, range.bytes, options_.granule_bytes));
    }
    const unsigned slot = free_batches_.back();
    free_batches_.pop_back();
    Batch& batch = batches_[slot];
    batch.ticket = ++generation_ * options_.transfer_limit + slot;
    for (const StoreTransfer& transfer : transfers) {
      batch.transfers.push_back({transfer.direction, &ranges_[transfer.range.index], transfer.offset,
                                 transfer.memory, transfer.bytes});
    }
    statistics_.transfers_in_flight += static_cast<unsigned>(transfers.size());
    statistics_.most_transfers_in_flight =
        std::max(statistics_.most_transfers_in_flight, statistics_.transfers_in_flight);
    const StoreTicket ticket{batch.ticket};
    skip_begun(batch);
    if (batch.next_transfer < batch.transfers.size()) {
      batch.queued = true;
      queue_.push_back(&batch);
    }
    advance(lock);
    return ticket;
  }

  Result<bool> poll(StoreTicket ticket) override {
    std::unique_lock lock(mutex_);
    if (find(ticket) == nullptr) return internal::unknown_ticket(ticket);
    advance(lock);
    Batch* batch = find(ticket);
    if (batch == nullptr) return internal::unknown_ticket(ticket);
    if (!batch->done()) return false;
    FOREBAY_RETURN_IF_ERROR(spend(*batch));
    return true;
  }

  Status wait(StoreTicket ticket, std::chrono::milliseconds deadline) override {
    const Clock::time_point end = deadline_point(deadline);
    std::unique_lock lock(mutex_);
    issue(lock);
    while (true) {
      Batch* batch = find(ticket);
      if (batch == nullptr) return internal::unknown_ticket(ticket);
      if (batch->done()) return spend(*batch);
      const Clock::time_point now = Clock::now();
      if (now >= end) {
        // Results that have come by now count, so a deadline of 0 is a poll.
        advance(lock);
        batch = find(ticket);
        if (batch != nullptr && batch->done()) return spend(*batch);
        return internal::wait_timed_out(deadline.count());
      }
      const auto slice = std::min<Clock::duration>(end - now, kLookAgain);
      if (!reaping_ && at_drive_ > 0) {
        reap(lock, slice);
      } else {
        ++waiting_;
        changed_.wait_for(lock, slice);
        --waiting_;
      }
      issue(lock);
    }
  }

  Status register_memory(std::byte* memory, std::size_t bytes) override {
    const std::unique_lock lock(mutex_);
    if (memory == nullptr) {
      return {StatusCode::kInvalidArgument, "cannot register null memory; leave it out"};
    }
    if (in_flight_ > 0 || !queue_.empty() || issuing_ || reaping_) {
      return {StatusCode::kInvalidArgument,
              "cannot register memory while transfers are in flight; register it before the first"};
    }
    // Nothing is in flight, so this holds nobody up, and the lock keeps it so.
    registered_bytes_ += engine_->register_memory(memory, bytes);
    return {};
  }

  StoreFacts facts() const override {
    const std::lock_guard lock(mutex_);
    StoreFacts facts;
    facts.description = description_;
    facts.granule_bytes = options_.granule_bytes;
    facts.alignment_bytes = alignment_bytes_;
    facts.block_bytes = options_.block_bytes;
    facts.depth = options_.depth;
    facts.transfer_limit = options_.transfer_limit;
    facts.checksums = options_.checksums;
    facts.registered_bytes = registered_bytes_;
    return facts;
  }

  StoreStatistics statistics() const override {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

 private:
  static Clock::time_point deadline_point(std::chrono::milliseconds deadline) {
    const Clock::time_point now = Clock::now();
    const auto longest =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() - now);
    return deadline < longest ? now + deadline : Clock::time_point::max();
  }

  // --- books; mutex_ is held ----------------------------------------

  Batch* find(StoreTicket ticket) {
    if (ticket.id == 0) return nullptr;
    Batch& batch = batches_[ticket.id % options_.transfer_limit];
    return batch.ticket == ticket.id ? &batch : nullptr;
  }

  Status spend(Batch& batch) {
    Status status = std::move(batch.status);
    if (!status.ok()) ++statistics_.failed_count;
    statistics_.transfers_in_flight -= static_cast<unsigned>(batch.transfers.size());
    free_batches_.push_back(static_cast<unsigned>(&batch - batches_.data()));
    batch.ticket = 0;
    batch.transfers.clear();
    batch.next_transfer = 0;
    batch.status = Status();
    return status;
  }

  static void skip_begun(Batch& batch) {
    while (batch.next_transfer < batch.transfers.size() &&
           batch.transfers[batch.next_transfer].begun_bytes == batch.transfers[batch.next_transfer].bytes) {
      ++batch.next_transfer;
    }
  }

  void unqueue(Batch& batch) {
    if (!std::exchange(batch.queued, false)) return;
    queue_.erase(std::find(queue_.begin(), queue_.end(), &batch));
  }

  // The operation to submit next, or null when there is none or no room.
  Operation* next_operation() {
    if (at_drive_ == options_.depth) return nullptr;
    if (!again_.empty()) {
      ++at_drive_;
      Operation* operation = again_.front();
      again_.pop_front();
      return operation;
    }
    if (queue_.empty() || free_operations_.empty()) return nullptr;
    Batch& batch = *queue_.front();
    Transfer& transfer = batch.transfers[batch.next_transfer];
    const std::uint64_t offset = transfer.offset + transfer.begun_bytes;
    const Place place = stripes_.place_of(transfer.range->address + offset);
    const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(
        {transfer.bytes - transfer.begun_bytes, options_.block_bytes, place.bytes_left}));
    std::byte* const memory = transfer.memory + transfer.begun_bytes;
    const bool in_place =
        bytes % alignment_bytes_ == 0 && std::bit_cast<std::uintptr_t>(memory) % alignment_bytes_ == 0;
    if (!in_place && free_bounces_.empty()) return nullptr;

    Operation& operation = operations_[free_operations_.back()];
    free_operations_.pop_back();
    operation.batch = &batch;
    operation.range = transfer.range;
    operation.direction = transfer.direction;
    operation.offset = offset;
    operation.memory = memory;
    operation.buffer = memory;
    operation.bytes = bytes;
    operation.drive_bytes = static_cast<std::uint32_t>(round_up(bytes, alignment_bytes_));
    operation.done_bytes = 0;
    operation.file = place.file;
    operation.file_offset = place.offset;
    operation.retries = 0;
    operation.bounce = -1;
    operation.status = Status();
    operation.submitted.store(false, std::memory_order_relaxed);
    if (!in_place) {
      operation.bounce = free_bounces_.back();
      free_bounces_.pop_back();
      operation.buffer = bounce_ + static_cast<std::size_t>(operation.bounce) * options_.block_bytes;
      statistics_.bounced_bytes += bytes;
    }
    transfer.begun_bytes += bytes;
    ++batch.operations;
    ++in_flight_;
    ++at_drive_;
    skip_begun(batch);
    if (batch.next_transfer == batch.transfers.size()) unqueue(batch);
    return &operation;
  }

  // The operation is over, well or not.
  void finish(Operation& operation) {
    Batch& batch = *operation.batch;
    if (operation.status.ok()) {
      const bool read = operation.direction == StoreDirection::kRead;
      (read ? statistics_.read_bytes : statistics_.written_bytes) += operation.bytes;
      ++(read ? statistics_.read_count : statistics_.write_count);
    } else {
      if (batch.status.ok()) batch.status = std::move(operation.status);
      unqueue(batch);
    }
    if (operation.bounce >= 0) free_bounces_.push_back(operation.bounce);
    free_operations_.push_back(static_cast<unsigned>(&operation - operations_.data()));
    --batch.operations;
    --in_flight_;
  }

  // --- issuing and reaping: at most one thread each, without the lock during slow work -----

  // Passes operations to the engine while there is room, at most `depth` operations: others may make room as
  // fast as this thread fills it, and it has a caller to return to. Returns at once when another thread does.
  void issue(std::unique_lock<std::mutex>& lock) {
    if (issuing_) return;
    issuing_ = true;
    bool failed = false;
    unsigned left = options_.depth;
    while (left > 0) {
      Operation* operation = next_operation();
      if (operation == nullptr) break;
      --left;
      lock.unlock();
      const int error = start(*operation);
      lock.lock();
      if (error != 0) {
        --at_drive_;
        settle(*operation, -error);
        if (operation->again) {
          ++statistics_.continued_count;
          again_.push_back(operation);
        } else {
          finish(*operation);
        }
        failed = true;
      }
    }
    issuing_ = false;
    // With nothing left, those who made room meanwhile found this thread at it and have to go on themselves.
    if ((failed || left == 0) && waiting_ > 0) changed_.notify_all();
  }

  int start(Operation& operation) {
    if (operation.direction == StoreDirection::kWrite && operation.done_bytes == 0 &&
        operation.retries == 0) {
      if (operation.bounce >= 0) {
        stream_copy(operation.buffer, operation.memory, operation.bytes);
        std::memset(operation.buffer + operation.bytes, 0, operation.drive_bytes - operation.bytes);
      }
      // The checksum is of the bytes on their way to the drive, so a reader finds memory that its owner
      // changed meanwhile.
      visit_granules(operation, [](std::uint64_t& checksum, const std::byte* memory, std::size_t bytes) {
        checksum = kept_checksum_of(memory, bytes);
        return true;
      });
    }
    IoRequest request;
    request.write = operation.direction == StoreDirection::kWrite;
    request.file = operation.file;
    request.offset = operation.file_offset + operation.done_bytes;
    request.memory = operation.buffer + operation.done_bytes;
    request.bytes = operation.drive_bytes - operation.done_bytes;
    request.tag = static_cast<std::uint64_t>(&operation - operations_.data());
    operation.submitted.store(true, std::memory_order_release);
    return engine_->submit(request);
  }

  // Takes the results of the engine, waiting `timeout` for the first. Requires: nobody else reaps.
  void reap(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds timeout) {
    reaping_ = true;
    lock.unlock();
    std::array<IoResult, kReapMax> results;
    const std::size_t count = engine_->reap(results, timeout);
    // The drive gets the next ones before these are looked at.
    lock.lock();
    at_drive_ -= static_cast<unsigned>(count);
    issue(lock);
    lock.unlock();
    for (std::size_t i = 0; i < count; ++i) {
      Operation& operation = operations_[results[i].tag];
      static_cast<void>(operation.submitted.load(std::memory_order_acquire));
      settle(operation, results[i].result);
    }
    lock.lock();
    for (std::size_t i = 0; i < count; ++i) {
      Operation& operation = operations_[results[i].tag];
      if (operation.again && ending_) operation.status = Status(StatusCode::kInternal, "the store ended");
      if (operation.again) ++statistics_.continued_count;
      if (operation.again && !ending_) {
        again_.push_back(&operation);
      } else {
        finish(operation);
      }
    }
    reaping_ = false;
    // Also when nothing came: one of those who wait has to reap now.
    if (waiting_ > 0) changed_.notify_all();
  }

  // Without waiting.
  void advance(std::unique_lock<std::mutex>& lock) {
    if (!reaping_ && at_drive_ > 0) reap(lock, std::chrono::nanoseconds(0));
    issue(lock);
  }

  // Handles the result of an operation: over, failed, or to be continued.
  void settle(Operation& operation, std::int32_t result) {
    operation.again = false;
    const auto fail = [&](StatusCode code, const std::string& found) {
      operation.status = Status(code, "cannot " +
                                          transfer_text(operation.direction, operation.bytes,
                                                        operation.offset, operation.range->name) +
                                          ", in '" + files_[operation.file].directory() + "': " + found);
    };
    if (result < 0) {
      const int error = -result;
      // ECANCELED: the thread that submitted it has ended.
      const bool passing = error == EINTR || error == EAGAIN || error == EBUSY || error == ECANCELED;
      if (passing && operation.retries < kRetriesMax) {
        ++operation.retries;
        operation.again = true;
        return;
      }
      return fail(StatusCode::kIoError, errno_text(error) + "; " + advice(error));
    }
    // A short operation continues where direct transfers may begin.
    const std::uint32_t total = operation.done_bytes + static_cast<std::uint32_t>(result);
    if (total < operation.drive_bytes) {
      const auto aligned = static_cast<std::uint32_t>(total / alignment_bytes_ * alignment_bytes_);
      if (aligned == operation.done_bytes && ++operation.retries > kRetriesMax) {
        return fail(StatusCode::kIoError,
                    "the drive stopped after " + std::to_string(total) +
                        " bytes without saying why; see that nobody has shortened the file");
      }
      operation.done_bytes = aligned;
      operation.again = true;
      return;
    }
    if (operation.direction == StoreDirection::kWrite) return;
    std::uint64_t offset = operation.offset;
    const bool intact =
        visit_granules(operation, [&](std::uint64_t& checksum, const std::byte* memory, std::size_t bytes) {
          if (checksum != kNeverWritten && checksum != kept_checksum_of(memory, bytes)) return false;
          offset += bytes;
          return true;
        });
    if (!intact) {
      return fail(StatusCode::kCorruption,
                  "the bytes from " + std::to_string(offset) +
                      " on are not those that were written; the drive or its cable may be failing, or a "
                      "write to this place failed or was changed in memory before it was done");
    }
    if (operation.bounce >= 0) stream_copy(operation.memory, operation.buffer, operation.bytes);
  }

  // visit(checksum, memory, bytes) for each granule of the operation, until it returns false; whether it
  // never did.
  template <typename Visit>
  bool visit_granules(Operation& operation, const Visit& visit) {
    if (!options_.checksums) return true;
    const std::size_t granule = options_.granule_bytes;
    std::size_t index = operation.offset / granule;
    for (std::size_t at = 0; at < operation.bytes; at += granule, ++index) {
      const std::size_t bytes = std::min<std::size_t>(granule, operation.bytes - at);
      if (!visit(operation.range->checksums[index], operation.buffer + at, bytes)) return false;
    }
    return true;
  }

  const FileStoreOptions options_;
  const Stripes stripes_;
  const std::size_t alignment_bytes_;
  const std::string description_;

  std::mutex create_mutex_;  // Taken before mutex_.
  // Guarded by create_mutex_; the descriptors are fixed.
  std::vector<ScratchFile> files_;
  std::uint64_t address_end_ = 0;

  std::unique_ptr<IoEngine> engine_;
  std::byte* bounce_ = nullptr;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_, but for an operation in flight, which is its issuer's and then its reaper's.
  std::deque<Range> ranges_;  // Grows only, while create_mutex_ is held too; elements stay where they are.
  std::vector<Operation> operations_;  // Twice the depth: half at the drive, half being looked at.
  std::vector<Batch> batches_;
  std::vector<unsigned> free_operations_;
  std::vector<unsigned> free_batches_;
  std::vector<int> free_bounces_;
  std::deque<Batch*> queue_;      // Batches that are not all begun, first come first.
  std::deque<Operation*> again_;  // Short or interrupted, to be submitted once more.
  std::uint64_t generation_ = 0;
  unsigned in_flight_ = 0;  // Operations that are not free: at the drive, or their bytes being looked at.
  unsigned at_drive_ = 0;   // At most options_.depth.
  unsigned waiting_ = 0;    // Threads on changed_.
  bool issuing_ = false;
  bool reaping_ = false;
  bool ending_ = false;
  std::uint64_t registered_bytes_ = 0;
  StoreStatistics statistics_;
};

Status check_options(const FileStoreOptions& options) {
  const auto refuse = [](const std::string& why) {
    return Status(StatusCode::kInvalidArgument, "cannot make a file store: " + why);
  };
  if (options.directories.empty() || options.directories.size() > kDirectoriesMax) {
    return refuse("it needs 1 to " + std::to_string(kDirectoriesMax) + " directories and was given " +
                  std::to_string(options.directories.size()));
  }
  if (options.granule_bytes < kGranuleMin || !std::has_single_bit(options.granule_bytes)) {
    return refuse("a granule is a power of two from " + std::to_string(kGranuleMin) + " bytes on, not " +
                  std::to_string(options.granule_bytes));
  }
  if (options.block_bytes == 0 || options.block_bytes > kBlockMax ||
      options.block_bytes % options.granule_bytes != 0) {
    return refuse("a block is a multiple of the granule (" + std::to_string(options.granule_bytes) +
                  " bytes) and at most 1 GiB, not " + std::to_string(options.block_bytes) + " bytes");
  }
  if (options.stripe_bytes % options.granule_bytes != 0) {
    return refuse("a stripe is a multiple of the granule (" + std::to_string(options.granule_bytes) +
                  " bytes), not " + std::to_string(options.stripe_bytes) + " bytes");
  }
  if (options.depth == 0 || options.depth > kDepthMax) {
    return refuse("the depth is 1 to " + std::to_string(kDepthMax) + ", not " +
                  std::to_string(options.depth));
  }
  if (options.thread_count == 0 || options.transfer_limit == 0 || options.bounce_count == 0) {
    return refuse("thread_count, transfer_limit and bounce_count are at least 1");
  }
  return {};
}

Result<std::unique_ptr<IoEngine>> choose_engine(const FileStoreOptions& options,
                                                const std::vector<int>& files) {
  if (options.engine != FileEngine::kThreads) {
    auto engine = internal::make_io_uring_engine(files, options.depth, options.registered);
    if (engine.ok() || options.engine == FileEngine::kIoUring) return engine;
    internal::say_once(engine.status().message());
  }
  try {
    return internal::make_thread_engine(files, options.depth, options.thread_count);
  } catch (const std::system_error& error) {
    return Status(StatusCode::kUnavailable, "cannot start the threads of a file store: ", error.what(),
                  "; raise ulimit -u (processes) or -v (addresses)");
  }
}

}  // namespace

namespace internal {

Result<std::unique_ptr<Store>> make_file_store(const FileStoreOptions& wanted, const EngineWrap& wrap) {
  FOREBAY_RETURN_IF_ERROR(check_options(wanted));
  keep_standard_streams();
  FileStoreOptions options = wanted;
  if (options.stripe_bytes == 0) options.stripe_bytes = options.block_bytes;

  std::vector<ScratchFile> files;
  std::vector<int> descriptors;
  std::size_t alignment_bytes = 1;
  std::string buffered;
  for (const std::string& directory : options.directories) {
    FOREBAY_ASSIGN_OR_RETURN(auto file, ScratchFile::create(directory, {.direct = options.direct}));
    alignment_bytes = std::max(alignment_bytes, file.alignment_bytes());
    if (!file.direct()) buffered += (buffered.empty() ? "'" : ", '") + shown_path(directory) + "'";
    descriptors.push_back(file.descriptor());
    files.push_back(std::move(file));
  }
  if (options.granule_bytes % alignment_bytes != 0) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot make a file store: direct transfers there are aligned to " +
                      std::to_string(alignment_bytes) +
                      " bytes, of which the granule must be a multiple; it is " +
                      std::to_string(options.granule_bytes));
  }
  if (options.direct && !buffered.empty()) {
    internal::say_once("the file system of " + buffered +
                       " has no direct transfers: its data is kept in the page cache too");
  }
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<IoEngine> used, choose_engine(options, descriptors));
  if (wrap) used = wrap(std::move(used));

  std::string description =
      used->description() + (buffered.empty() && options.direct ? ", direct" : ", page cache");
  description +=
      ", blocks of " + format_bytes(options.block_bytes) + ", depth " + std::to_string(options.depth);
  description += options.checksums ? ", checksums" : ", no checksums";
  for (std::size_t i = 0; i < options.directories.size(); ++i) {
    description += (i == 0 ? ", in " : " and ") + options.directories[i];
  }
  auto store = std::make_unique<FileStore>(options, std::move(files), std::move(used), alignment_bytes,
                                           std::move(description));
  FOREBAY_RETURN_IF_ERROR(store->map_bounce_buffers());
  return std::unique_ptr<Store>(std::move(store));
}

}  // namespace internal

Result<std::unique_ptr<Store>> make_file_store(const FileStoreOptions& options) {
  return internal::make_file_store(options, {});
}

}  // namespace forebay
