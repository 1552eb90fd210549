// The fingerprint of an operation, which must be equal on all ranks before bytes move. A mismatch becomes an
// error that names both ranks and their operations; without it, it would be a hang or a buffer overrun.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "forebay/data_type.h"
#include "forebay/status.h"

namespace forebay::internal {

enum class Operation : std::uint32_t {
  kReduceScatter = 1,
  kAllGather,
  kExchange,
  kBarrier,
  kSplit,
  kSend,
  kRecv
};
inline constexpr std::size_t kOperationCount = static_cast<std::size_t>(Operation::kRecv) + 1;

// Travels between processes as it is: fixed-size fields, no padding, and only between machines of one byte
// order.
struct Fingerprint {
  std::uint64_t sequence = 0;  // Counts the operations of a plane of a communicator, from 0.
  std::uint64_t count = 0;     // Elements of one slice for reduce_scatter; bytes otherwise.
  Operation operation{};
  // DataType for reduce_scatter; for all_gather over nccl, 1 if it decides; 0 otherwise.
  std::uint32_t type = 0;

  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};
static_assert(sizeof(Fingerprint) == 24);

// This sequence and the one above it mean connecting, which comes before the first operation.
inline constexpr std::uint64_t kConnectSequence = ~std::uint64_t{0} - 1;

// "reduce_scatter".
const char* operation_name(Operation operation) noexcept;

// "reduce_scatter of 512 bf16 (operation 7)".
std::string describe(const Fingerprint& fingerprint);

// The error of two ranks that issued different operations.
Status mismatch(int rank, const Fingerprint& fingerprint, int other_rank, const Fingerprint& other);

// "rank 3", "ranks 1, 2 and 5".
std::string rank_list(const std::vector<int>& ranks);

// The first failure of a run as text, for the store or the memory that the ranks share.
std::string encode_failure(const Status& cause);

// Never ok: a damaged text is a kPeerLost that says so.
Status decode_failure(const std::string& text);

}  // namespace forebay::internal
