#include "forebay/store.h"

namespace forebay {

Result<StoreTicket> Store::read(StoreRange range, std::uint64_t offset, std::byte* memory,
                                std::size_t bytes) {
  const StoreTransfer transfer{StoreDirection::kRead, range, offset, memory, bytes};
  return submit({&transfer, 1});
}

Result<StoreTicket> Store::write(StoreRange range, std::uint64_t offset, const std::byte* memory,
                                 std::size_t bytes) {
  // A write only reads from it.
  const StoreTransfer transfer{StoreDirection::kWrite, range, offset, const_cast<std::byte*>(memory), bytes};
  return submit({&transfer, 1});
}

}  // namespace forebay
