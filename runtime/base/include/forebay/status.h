// Status and Result: how an operating error travels through forebay.
//
// A Status is a code and a message of three parts: the request, the finding and the advice ("cannot X: Y; do
// Z"). The layers below the engine return it; the engine and the API throw it as an Error (error.h). An ok
// Status owns no memory.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "forebay/check.h"

namespace forebay {

enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument,  // The caller asked for something that can never work.
  kOutOfMemory,      // Less memory than requested; retry after freeing some.
  kUnsupported,      // This build or this device cannot do it.
  kUnavailable,      // Could work, but something it needs is missing now (a driver, a peer).
  kIoError,          // A file or a socket failed.
  kTimeout,          // A deadline passed.
  kPeerLost,         // Another rank failed or left.
  kCorruption,       // Bytes are wrong (checksum, truncation).
  kInternal,         // A defect in forebay or in the functions and kernels it runs.
};

// The texts and numbers, one after the other.
template <typename... Parts>
std::string join_text(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += std::string_view(part);
    }
  };
  (append(parts), ...);
  return text;
}

// The enumerator's name, e.g. "kOutOfMemory".
const char* status_code_name(StatusCode code) noexcept;

class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(StatusCode code, std::string message);
  // The message is join_text() of the parts.
  template <typename First, typename Second, typename... Rest>
  Status(StatusCode code, const First& first, const Second& second, const Rest&... rest)
      : Status(code, join_text(first, second, rest...)) {}

  bool ok() const noexcept { return code_ == StatusCode::kOk; }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

  // "kOutOfMemory: cannot reserve ...", or "kOk".
  std::string to_string() const;

  // The same code with `context` and ": " in front of the message.
  Status with_context(const std::string& context) const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

template <typename... Parts>
Status invalid_argument(const Parts&... parts) {
  return Status(StatusCode::kInvalidArgument, join_text(parts...));
}

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  // The constructors are implicit on purpose. NOLINTBEGIN
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  // A unique_ptr or Result of a derived class, for instance.
  template <typename U, typename = std::enable_if_t<std::is_class_v<U> && std::is_convertible_v<U, T>>>
  Result(U value) : Result(static_cast<T>(std::move(value))) {}
  template <typename U, typename = std::enable_if_t<std::is_convertible_v<U, T>>>
  Result(Result<U> other) : Result(other.ok() ? Result(std::move(other).value()) : Result(other.status())) {}
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {
    FOREBAY_CHECK(!std::get_if<1>(&state_)->ok(), "a Result needs a value or an error");
  }
  // NOLINTEND

  bool ok() const noexcept { return state_.index() == 0; }
  Status status() const { return ok() ? Status() : *std::get_if<1>(&state_); }

  T& value() & {
    FOREBAY_CHECK(ok(), "value() of a failed Result");
    return *std::get_if<0>(&state_);
  }
  const T& value() const& {
    FOREBAY_CHECK(ok(), "value() of a failed Result");
    return *std::get_if<0>(&state_);
  }
  T&& value() && {
    FOREBAY_CHECK(ok(), "value() of a failed Result");
    return std::move(*std::get_if<0>(&state_));
  }

 private:
  std::variant<T, Status> state_;
};

}  // namespace forebay

// Returns the Status of `expression` unless it is ok.
#define FOREBAY_RETURN_IF_ERROR(expression)                                                              \
  do {                                                                                                   \
    if (::forebay::Status forebay_status_ = (expression); !forebay_status_.ok()) return forebay_status_; \
  } while (false)

// Gives `target` (a declaration or a variable) the value of a Result, or returns its Status:
// FOREBAY_ASSIGN_OR_RETURN(const Plan plan, make_plan(shape, options));
#define FOREBAY_ASSIGN_OR_RETURN(target, ...) \
  FOREBAY_ASSIGN_OR_RETURN_BY_(FOREBAY_JOIN_(forebay_result_, __LINE__), target, __VA_ARGS__)
#define FOREBAY_ASSIGN_OR_RETURN_BY_(result, target, ...) \
  auto result = (__VA_ARGS__);                            \
  if (!result.ok()) return result.status();               \
  target = std::move(result).value()
#define FOREBAY_JOIN_(a, b) FOREBAY_JOIN_NOW_(a, b)
#define FOREBAY_JOIN_NOW_(a, b) a##b
