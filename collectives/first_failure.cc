#include "collectives/first_failure.h"

#include <cstdlib>

namespace forebay::internal {

std::string encode_failure(const Status& cause) {
  return std::to_string(static_cast<int>(cause.code())) + "\n" + cause.message();
}

Status decode_failure(const std::string& text) {
  const std::size_t end = text.find('\n');
  const int code = std::atoi(text.c_str());
  const bool known = code > 0 && code <= static_cast<int>(StatusCode::kInternal);
  if (end == std::string::npos || !known) {
    return Status(StatusCode::kPeerLost, "another rank failed, and its message is damaged");
  }
  return Status(static_cast<StatusCode>(code), text.substr(end + 1));
}

}  // namespace forebay::internal
