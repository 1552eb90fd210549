#include "forebay/status.h"

#include <cstddef>
#include <iterator>

namespace forebay {

const char* status_code_name(StatusCode code) noexcept {
  static constexpr const char* kNames[] = {"kOk",          "kInvalidArgument", "kOutOfMemory", "kUnsupported",
                                           "kUnavailable", "kIoError",         "kTimeout",     "kPeerLost",
                                           "kCorruption",  "kInternal"};
  const auto index = static_cast<std::size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "kUnknown";
}

// Out of line: paths to errors stay short, and tests/text/list_messages.py can interpose it.
Status::Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

std::string Status::to_string() const {
  if (ok()) return "kOk";
  return std::string(status_code_name(code_)) + ": " + message_;
}

Status Status::with_context(const std::string& context) const {
  if (ok()) return *this;
  return Status(code_, context + ": " + message_);
}

}  // namespace forebay
