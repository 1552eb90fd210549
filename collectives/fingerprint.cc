#include "collectives/fingerprint.h"

#include <cstdlib>

namespace forebay::internal {

const char* operation_name(Operation operation) noexcept {
  static constexpr const char* kNames[] = {
      "an unknown operation", "reduce_scatter", "all_gather", "exchange", "barrier", "split", "send", "recv"};
  const auto index = static_cast<std::size_t>(operation);
  return kNames[index < kOperationCount ? index : 0];
}

std::string describe(const Fingerprint& fingerprint) {
  if (fingerprint.sequence >= kConnectSequence) return "connecting";
  const auto operation = fingerprint.operation;
  std::string text = operation_name(operation);
  if (operation == Operation::kReduceScatter) {
    text += " of " + std::to_string(fingerprint.count) + " " +
            data_type_name(static_cast<DataType>(fingerprint.type));
  } else if (operation != Operation::kBarrier && operation != Operation::kSplit) {
    text += " of " + std::to_string(fingerprint.count) + " bytes";
    if (operation == Operation::kAllGather && fingerprint.type != 0) text += " that decides";
  }
  return text + " (operation " + std::to_string(fingerprint.sequence) + ")";
}

Status mismatch(int rank, const Fingerprint& fingerprint, int other_rank, const Fingerprint& other) {
  if (other_rank < rank) return mismatch(other_rank, other, rank, fingerprint);
  return invalid_argument(
      "ranks disagree about an operation: rank ", rank, " issued ", describe(fingerprint), ", rank ",
      other_rank, " issued ", describe(other),
      "; every rank must issue the same operations in the same order with the same options");
}

std::string rank_list(const std::vector<int>& ranks) {
  constexpr std::size_t kShownMax = 32;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  const std::size_t shown = ranks.size() <= kShownMax ? ranks.size() : kShownMax;
  for (std::size_t i = 0; i < shown; ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return shown == ranks.size() ? text : text + " and " + std::to_string(ranks.size() - shown) + " more";
}

std::string encode_failure(const Status& cause) {
  return std::to_string(static_cast<int>(cause.code())) + "\n" + cause.message();
}

Status decode_failure(const std::string& text) {
  const std::size_t end = text.find('\n');
  const int code = std::atoi(text.c_str());
  const bool known = code > 0 && code <= static_cast<int>(StatusCode::kInternal);
  if (end == std::string::npos || !known) {
    return Status(StatusCode::kPeerLost,
                  "another rank failed, and its message is damaged; see the output of the other ranks");
  }
  return Status(static_cast<StatusCode>(code), text.substr(end + 1));
}

}  // namespace forebay::internal
