// The refusals of every store, in the same words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "forebay/store.h"

namespace forebay::internal {

// "read 4096 bytes at 65536 of range 'w'".
std::string transfer_text(StoreDirection direction, std::uint64_t bytes, std::uint64_t offset,
                          std::string_view range);

// Whether the part may be transferred. The range is known to be the store's.
Status check_transfer(const StoreTransfer& transfer, std::string_view range, std::uint64_t range_bytes,
                      std::size_t granule_bytes);

Status unknown_range(StoreRange range, std::size_t range_count);
Status unknown_ticket(StoreTicket ticket);
// Whether `count` more transfers may be in flight beside `in_flight`.
Status check_batch(std::size_t count, std::size_t in_flight, std::size_t limit);
Status wait_timed_out(std::int64_t deadline_ms);

}  // namespace forebay::internal
