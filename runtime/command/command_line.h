// Common to the subcommands of `forebay`.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "forebay/error.h"

namespace forebay {

// Exit statuses.
constexpr int kFailed = 1;
constexpr int kBadUsage = 2;  // Arguments or files that cannot be used.

inline bool given(const CLI::Option* option) {
  return option->count() > 0;
}

inline Status refuse(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

}  // namespace forebay
