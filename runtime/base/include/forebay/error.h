// Error: a Status as an exception. Thrown by the engine and the API, caught by their users; the core library
// (base, device, allocator) is built without exceptions and never sees it.
#pragma once

#include <stdexcept>
#include <utility>

#include "forebay/status.h"

namespace forebay {

class Error : public std::runtime_error {
 public:
  explicit Error(Status status) : std::runtime_error(status.to_string()), status_(std::move(status)) {}
  Error(StatusCode code, std::string message) : Error(Status(code, std::move(message))) {}

  const Status& status() const noexcept { return status_; }
  StatusCode code() const noexcept { return status_.code(); }

 private:
  Status status_;
};

inline void throw_if_error(const Status& status) {
  if (!status.ok()) throw Error(status);
}

template <typename T>
T value_or_throw(Result<T> result) {
  throw_if_error(result.status());
  return std::move(result).value();
}

}  // namespace forebay
