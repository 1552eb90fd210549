#include "forebay/status.h"

namespace forebay {

const char* status_code_name(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk:
      return "kOk";
    case StatusCode::kInvalidArgument:
      return "kInvalidArgument";
    case StatusCode::kOutOfMemory:
      return "kOutOfMemory";
    case StatusCode::kUnsupported:
      return "kUnsupported";
    case StatusCode::kUnavailable:
      return "kUnavailable";
    case StatusCode::kIoError:
      return "kIoError";
    case StatusCode::kTimeout:
      return "kTimeout";
    case StatusCode::kPeerLost:
      return "kPeerLost";
    case StatusCode::kCorruption:
      return "kCorruption";
    case StatusCode::kInternal:
      return "kInternal";
  }
  return "kUnknown";
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
