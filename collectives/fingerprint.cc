#include "collectives/fingerprint.h"

namespace forebay::internal {

const char* operation_name(Operation operation) noexcept {
  switch (operation) {
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kExchange:
      return "exchange";
    case Operation::kBarrier:
      return "barrier";
    case Operation::kSplit:
      return "split";
    case Operation::kSend:
      return "send";
    case Operation::kRecv:
      return "recv";
  }
  return "an unknown operation";
}

std::string describe(const Fingerprint& fingerprint) {
  if (fingerprint.sequence == kConnectSequence) return "connecting";
  const auto operation = static_cast<Operation>(fingerprint.operation);
  std::string text = operation_name(operation);
  if (operation == Operation::kReduceScatter) {
    text += " of " + std::to_string(fingerprint.count) + " " +
            data_type_name(static_cast<DataType>(fingerprint.type));
  } else if (operation != Operation::kBarrier && operation != Operation::kSplit) {
    text += " of " + std::to_string(fingerprint.count) + " bytes";
  }
  return text + " (operation " + std::to_string(fingerprint.sequence) + ")";
}

Status mismatch(int rank, const Fingerprint& fingerprint, int other_rank, const Fingerprint& other) {
  const bool swap = other_rank < rank;
  const int first = swap ? other_rank : rank;
  const int second = swap ? rank : other_rank;
  const Fingerprint& first_issued = swap ? other : fingerprint;
  const Fingerprint& second_issued = swap ? fingerprint : other;
  return Status(StatusCode::kInvalidArgument,
                "ranks disagree about an operation: rank " + std::to_string(first) + " issued " +
                    describe(first_issued) + ", rank " + std::to_string(second) + " issued " +
                    describe(second_issued) +
                    "; every rank must issue the same operations in the same order with the same options");
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace forebay::internal
