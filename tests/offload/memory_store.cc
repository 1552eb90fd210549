#include "tests/offload/memory_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "forebay/units.h"
#include "offload/transfer_checks.h"

namespace forebay {
namespace {

using Nanoseconds = HostClock::Nanoseconds;

// Zeroed pages of their own: a size that cannot be had is an error here and no exception.
class Pages {
 public:
  explicit Pages(std::size_t size) : size_(size) {
    if (size == 0) return;
    void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    data_ = mapped == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapped);
  }
  Pages(Pages&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Pages& operator=(Pages&& other) = delete;
  ~Pages() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }
  bool ok() const { return data_ != nullptr || size_ == 0; }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_;
};

struct Range {
  std::string name;
  Pages bytes;
  std::vector<bool> torn;  // By granule: a write to it failed half-way.
};

struct Transfer {
  StoreTransfer asked;
  Status fault;
  bool torn = false;
  bool performed = false;
};

struct Batch {
  std::uint64_t ticket = 0;
  std::vector<Transfer> transfers;
  std::size_t left = 0;  // Not performed.
  Nanoseconds end{0};    // When the modelled drive is done with it.
  Status status;
};

class MemoryStore final : public Store {
 public:
  explicit MemoryStore(const MemoryStoreOptions& options)
      : options_(options), faults_(options.faults), random_(options.order_seed) {}

  Result<StoreRange> create_range(std::string_view name, std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const auto refuse = [&](StatusCode code, const std::string& why) {
      return Status(code,
                    "cannot make range '" + std::string(name) + "' of " + format_bytes(bytes) + ": " + why);
    };
    if (name.empty()) return refuse(StatusCode::kInvalidArgument, "a range needs a name");
    for (const Range& range : ranges_) {
      if (range.name == name) return refuse(StatusCode::kInvalidArgument, "the name is taken");
    }
    if (options_.capacity_bytes != 0 && bytes > options_.capacity_bytes - statistics_.range_bytes) {
      return refuse(
          StatusCode::kOutOfMemory,
          format_bytes(options_.capacity_bytes - statistics_.range_bytes) + " free; raise capacity_bytes");
    }
    Range range{std::string(name), Pages(bytes), {}};
    if (!range.bytes.ok()) {
      return refuse(StatusCode::kOutOfMemory, "the system has no memory for it; use the file store");
    }
    range.torn.resize(ceil_div(bytes, options_.granule_bytes));
    ranges_.push_back(std::move(range));
    statistics_.range_bytes += bytes;
    return StoreRange{static_cast<std::uint32_t>(ranges_.size() - 1)};
  }

  Result<StoreTicket> submit(Span<const StoreTransfer> transfers) override {
    const Nanoseconds now = options_.clock != nullptr ? options_.clock->now() : Nanoseconds(0);
    const std::lock_guard lock(mutex_);
    if (Status status =
            internal::check_batch(transfers.size(), statistics_.transfers_in_flight, options_.transfer_limit);
        !status.ok()) {
      if (status.code() == StatusCode::kUnavailable) ++statistics_.refused_count;
      return status;
    }
    for (const StoreTransfer& transfer : transfers) {
      if (transfer.range.index >= ranges_.size())
        return internal::unknown_range(transfer.range, ranges_.size());
      const Range& range = ranges_[transfer.range.index];
      FOREBAY_RETURN_IF_ERROR(
          internal::check_transfer(transfer, range.name, range.bytes.size(), options_.granule_bytes));
    }
    Batch batch;
    batch.ticket = ++last_ticket_;
    for (const StoreTransfer& asked : transfers) {
      Transfer transfer{asked, {}};
      script(transfer);
      drive_free_ = std::max(drive_free_, now) + drive_time(asked);
      batch.transfers.push_back(std::move(transfer));
    }
    batch.left = batch.transfers.size();
    batch.end = std::max(drive_free_, now) + options_.latency;
    statistics_.transfers_in_flight += static_cast<unsigned>(transfers.size());
    statistics_.most_transfers_in_flight =
        std::max(statistics_.most_transfers_in_flight, statistics_.transfers_in_flight);
    batches_.push_back(std::move(batch));
    return StoreTicket{last_ticket_};
  }

  Result<bool> poll(StoreTicket ticket) override {
    const Nanoseconds now = options_.clock != nullptr ? options_.clock->now() : Nanoseconds(0);
    const std::lock_guard lock(mutex_);
    const auto batch = find(ticket);
    if (batch == batches_.end()) return internal::unknown_ticket(ticket);
    if (options_.clock != nullptr && now < batch->end) return false;
    if (options_.order_seed != 0) {
      perform_drawn();
    } else {
      perform_until(batch);
    }
    if (batch->left > 0) return false;
    FOREBAY_RETURN_IF_ERROR(spend(batch));
    return true;
  }

  Status wait(StoreTicket ticket, std::chrono::milliseconds deadline) override {
    if (options_.clock != nullptr) {
      const Nanoseconds now = options_.clock->now();
      Nanoseconds end{0};
      {
        const std::lock_guard lock(mutex_);
        const auto batch = find(ticket);
        if (batch == batches_.end()) return internal::unknown_ticket(ticket);
        end = batch->end;
      }
      if (end > now) {
        // Compared in milliseconds: the longest deadline is none in nanoseconds.
        const bool late = std::chrono::ceil<std::chrono::milliseconds>(end - now) > deadline;
        options_.clock->sleep(late ? std::max(Nanoseconds(0), Nanoseconds(deadline)) : end - now);
        if (late) return internal::wait_timed_out(deadline.count());
      }
    }
    const std::lock_guard lock(mutex_);
    const auto batch = find(ticket);
    if (batch == batches_.end()) return internal::unknown_ticket(ticket);
    if (options_.order_seed != 0) {
      while (batch->left > 0) perform_drawn();
    } else {
      perform_until(batch);
    }
    return spend(batch);
  }

  Status register_memory(std::byte* memory, std::size_t) override {
    const std::lock_guard lock(mutex_);
    if (memory == nullptr) return {StatusCode::kInvalidArgument, "cannot register null memory; leave it out"};
    if (!batches_.empty()) {
      return {StatusCode::kInvalidArgument,
              "cannot register memory while transfers are in flight; register it before the first"};
    }
    return {};
  }

  StoreFacts facts() const override {
    StoreFacts facts;
    facts.description = "memory";
    facts.granule_bytes = options_.granule_bytes;
    facts.alignment_bytes = options_.alignment_bytes;
    facts.block_bytes = SIZE_MAX;
    facts.depth = options_.transfer_limit;
    facts.transfer_limit = options_.transfer_limit;
    facts.checksums = true;
    return facts;
  }

  StoreStatistics statistics() const override {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

 private:
  using Batches = std::deque<Batch>;

  Batches::iterator find(StoreTicket ticket) {
    return std::find_if(batches_.begin(), batches_.end(),
                        [&](const Batch& batch) { return batch.ticket == ticket.id; });
  }

  Nanoseconds drive_time(const StoreTransfer& transfer) const {
    const std::uint64_t rate = transfer.direction == StoreDirection::kRead ? options_.read_bytes_per_second
                                                                           : options_.write_bytes_per_second;
    if (rate == 0) return Nanoseconds(0);
    return Nanoseconds(
        static_cast<std::int64_t>(static_cast<double>(transfer.bytes) * 1e9 / static_cast<double>(rate)));
  }

  void script(Transfer& transfer) {
    const std::uint64_t nth = ++submitted_count_[static_cast<std::size_t>(transfer.asked.direction)];
    const auto fault = std::find_if(faults_.begin(), faults_.end(), [&](const StoreFault& candidate) {
      return candidate.direction == transfer.asked.direction && candidate.nth == nth;
    });
    if (fault == faults_.end()) return;
    transfer.fault = fault->status;
    transfer.torn = fault->torn;
  }

  void perform_until(const Batches::iterator& last) {
    for (auto batch = batches_.begin(); batch <= last; ++batch) {
      for (Transfer& transfer : batch->transfers) perform(*batch, transfer);
    }
  }

  // One of all that are in flight.
  void perform_drawn() {
    std::size_t count = 0;
    for (const Batch& batch : batches_) count += batch.left;
    if (count == 0) return;
    std::size_t nth = random_() % count;
    for (Batch& batch : batches_) {
      for (Transfer& transfer : batch.transfers) {
        if (!transfer.performed && nth-- == 0) return perform(batch, transfer);
      }
    }
  }

  void perform(Batch& batch, Transfer& transfer) {
    if (std::exchange(transfer.performed, true)) return;
    --batch.left;
    if (!batch.status.ok()) return;  // The rest of a failed batch is dropped.
    batch.status = move_bytes(transfer);
  }

  Status move_bytes(const Transfer& transfer) {
    const StoreTransfer& asked = transfer.asked;
    Range& range = ranges_[asked.range.index];
    const auto fail = [&](const Status& status) {
      return status.with_context(
          "cannot " + internal::transfer_text(asked.direction, asked.bytes, asked.offset, range.name));
    };
    if (asked.bytes == 0) return transfer.fault.ok() ? Status() : fail(transfer.fault);
    const std::size_t first = asked.offset / options_.granule_bytes;
    const std::size_t end = ceil_div(asked.offset + asked.bytes, options_.granule_bytes);
    std::byte* const place = range.bytes.data() + asked.offset;
    if (std::bit_cast<std::uintptr_t>(asked.memory) % options_.alignment_bytes != 0 ||
        asked.bytes % options_.alignment_bytes != 0) {
      statistics_.bounced_bytes += asked.bytes;
    }
    if (asked.direction == StoreDirection::kWrite) {
      const bool tears = !transfer.fault.ok() && transfer.torn;
      if (tears) std::memcpy(place, asked.memory, asked.bytes / 2);
      if (tears || transfer.fault.ok())
        std::fill_n(range.torn.begin() + static_cast<std::ptrdiff_t>(first), end - first, tears);
      if (!transfer.fault.ok()) return fail(transfer.fault);
      std::memcpy(place, asked.memory, asked.bytes);
      statistics_.written_bytes += asked.bytes;
      ++statistics_.write_count;
      return {};
    }
    if (!transfer.fault.ok()) return fail(transfer.fault);
    for (std::size_t i = first; i < end; ++i) {
      if (range.torn[i]) {
        return fail(Status(StatusCode::kCorruption,
                           "the bytes from " + std::to_string(i * options_.granule_bytes) +
                               " on are not those that were written; a write to this place failed"));
      }
    }
    std::memcpy(asked.memory, place, asked.bytes);
    statistics_.read_bytes += asked.bytes;
    ++statistics_.read_count;
    return {};
  }

  Status spend(const Batches::iterator& batch) {
    Status status = std::move(batch->status);
    if (!status.ok()) ++statistics_.failed_count;
    statistics_.transfers_in_flight -= static_cast<unsigned>(batch->transfers.size());
    batches_.erase(batch);
    return status;
  }

  const MemoryStoreOptions options_;
  const std::vector<StoreFault> faults_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::deque<Range> ranges_;
  Batches batches_;  // In the order of submission; no more than transfer_limit.
  std::uint64_t last_ticket_ = 0;
  std::uint64_t submitted_count_[2] = {};
  std::mt19937_64 random_;
  Nanoseconds drive_free_{0};
  StoreStatistics statistics_;
};

}  // namespace

Result<std::unique_ptr<Store>> make_memory_store(const MemoryStoreOptions& options) {
  const auto refuse = [](const std::string& why) {
    return Status(StatusCode::kInvalidArgument, "cannot make a memory store: " + why);
  };
  if (options.granule_bytes == 0 || options.alignment_bytes == 0 || options.transfer_limit == 0) {
    return refuse("granule_bytes, alignment_bytes and transfer_limit are at least 1");
  }
  const bool timed = options.read_bytes_per_second != 0 || options.write_bytes_per_second != 0 ||
                     options.latency.count() != 0;
  if (timed && options.clock == nullptr) return refuse("rates and latency need a clock to pass on");
  if (options.clock != nullptr && options.order_seed != 0)
    return refuse("a clock gives the order; leave the seed out");
  for (const StoreFault& fault : options.faults) {
    if (fault.nth == 0 || fault.status.ok())
      return refuse("a fault needs nth from 1 on and a status that is not ok");
  }
  return std::unique_ptr<Store>(std::make_unique<MemoryStore>(options));
}

}  // namespace forebay
