#include "runtime/command/simulate/simulated_drives.h"

#include <algorithm>
#include <unordered_map>

namespace forebay {
namespace {

using std::chrono::nanoseconds;

constexpr unsigned kTransferLimit = 256;

class SimulatedDrives final : public Store {
 public:
  SimulatedDrives(const ClusterTiming& timing, ModelBackend& backend) : timing_(timing), backend_(backend) {}

  Result<StoreRange> create_range(std::string_view, std::uint64_t bytes) override {
    statistics_.range_bytes += bytes;
    return StoreRange{range_count_++};
  }

  Result<StoreTicket> submit(Span<const StoreTransfer> transfers) override {
    if (statistics_.transfers_in_flight + transfers.size() > kTransferLimit) {
      ++statistics_.refused_count;
      return Status(StatusCode::kUnavailable, "the simulated drives have enough to do");
    }
    nanoseconds end{0};
    for (const StoreTransfer& transfer : transfers) {
      const bool reads = transfer.direction == StoreDirection::kRead;
      nanoseconds& free_at = reads ? read_free_at_ : write_free_at_;
      const double seconds = timing_.drive_seconds(reads, transfer.bytes);
      free_at = std::min(std::max(free_at, backend_.now()), kModelTimeEnd) + bounded_nanoseconds(seconds);
      end = std::max(end, free_at);
      (reads ? statistics_.read_bytes : statistics_.written_bytes) += transfer.bytes;
      ++(reads ? statistics_.read_count : statistics_.write_count);
    }
    const StoreTicket ticket{++last_ticket_};
    const auto count = static_cast<unsigned>(transfers.size());
    batches_.emplace(ticket.id, Batch{end, count});
    statistics_.transfers_in_flight += count;
    statistics_.most_transfers_in_flight =
        std::max(statistics_.most_transfers_in_flight, statistics_.transfers_in_flight);
    return ticket;
  }

  Result<bool> poll(StoreTicket ticket) override {
    const auto batch = batches_.find(ticket.id);
    if (batch == batches_.end()) return spent();
    if (batch->second.end > backend_.now()) return false;
    finish(batch);
    return true;
  }

  Status wait(StoreTicket ticket, std::chrono::milliseconds) override {
    const auto batch = batches_.find(ticket.id);
    if (batch == batches_.end()) return spent();
    if (batch->second.end > backend_.now()) backend_.spend_until(batch->second.end, "drives");
    finish(batch);
    return {};
  }

  Status register_memory(std::byte*, std::size_t) override { return {}; }

  StoreFacts facts() const override {
    return {.description = "simulated drives",
            .granule_bytes = 4096,
            .block_bytes = 1 << 20,
            .depth = kTransferLimit,
            .transfer_limit = kTransferLimit};
  }
  StoreStatistics statistics() const override { return statistics_; }

 private:
  struct Batch {
    nanoseconds end;
    unsigned count;
  };

  static Status spent() {
    return Status(StatusCode::kInvalidArgument, "there is no such ticket; each is spent once");
  }
  void finish(std::unordered_map<std::uint64_t, Batch>::iterator batch) {
    statistics_.transfers_in_flight -= batch->second.count;
    batches_.erase(batch);
  }

  const ClusterTiming& timing_;
  ModelBackend& backend_;
  std::uint32_t range_count_ = 0;
  std::uint64_t last_ticket_ = 0;
  nanoseconds read_free_at_{0};
  nanoseconds write_free_at_{0};
  std::unordered_map<std::uint64_t, Batch> batches_;
  StoreStatistics statistics_;
};

}  // namespace

std::unique_ptr<Store> make_simulated_drives(const ClusterTiming& timing, ModelBackend& backend) {
  return std::make_unique<SimulatedDrives>(timing, backend);
}

}  // namespace forebay
