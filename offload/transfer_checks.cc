#include "offload/transfer_checks.h"

namespace forebay::internal {

std::string transfer_text(StoreDirection direction, std::uint64_t bytes, std::uint64_t offset,
                          std::string_view range) {
  return std::string(direction == StoreDirection::kRead ? "read " : "write ") + std::to_string(bytes) +
         " bytes at " + std::to_string(offset) + " of range '" + std::string(range) + "'";
}

Status check_transfer(const StoreTransfer& transfer, std::string_view range, std::uint64_t range_bytes,
                      std::size_t granule_bytes) {
  const auto refuse = [&](const std::string& why) {
    return Status(
        StatusCode::kInvalidArgument,
        "cannot " + transfer_text(transfer.direction, transfer.bytes, transfer.offset, range) + ": " + why);
  };
  if (transfer.offset > range_bytes || transfer.bytes > range_bytes - transfer.offset) {
    return refuse("the range has " + std::to_string(range_bytes) + " bytes; stay within them");
  }
  if (transfer.bytes == 0) return {};
  if (transfer.memory == nullptr) return refuse("the memory is null; give an address");
  const std::uint64_t end = transfer.offset + transfer.bytes;
  if (transfer.offset % granule_bytes != 0 || (end % granule_bytes != 0 && end != range_bytes)) {
    return refuse("transfers are of whole granules of " + std::to_string(granule_bytes) +
                  " bytes, or end with the range; change offset or bytes");
  }
  return {};
}

Status unknown_range(StoreRange range, std::size_t range_count) {
  return {StatusCode::kInvalidArgument, "no range has the index " + std::to_string(range.index) +
                                            "; the store has " + std::to_string(range_count) +
                                            ", from create_range"};
}

Status unknown_ticket(StoreTicket ticket) {
  return {StatusCode::kInvalidArgument, "no ticket has the id " + std::to_string(ticket.id) +
                                            "; a ticket is spent when it has been found done or failed"};
}

Status check_batch(std::size_t count, std::size_t in_flight, std::size_t limit) {
  if (count == 0) return {StatusCode::kInvalidArgument, "cannot submit an empty batch; leave it out"};
  if (count > limit) {
    return {StatusCode::kInvalidArgument, "cannot submit " + std::to_string(count) +
                                              " transfers at once: at most " + std::to_string(limit) +
                                              " may be in flight; split the batch or raise transfer_limit"};
  }
  if (count > limit - in_flight) {
    return {StatusCode::kUnavailable, "cannot submit " + std::to_string(count) +
                                          " transfers: " + std::to_string(in_flight) + " of " +
                                          std::to_string(limit) + " are in flight; wait for a ticket first"};
  }
  return {};
}

Status wait_timed_out(std::int64_t deadline_ms) {
  return {StatusCode::kTimeout,
          "a transfer was not done within " + std::to_string(deadline_ms) +
              " ms; wait for its ticket again, and see whether the drive still answers"};
}

}  // namespace forebay::internal
