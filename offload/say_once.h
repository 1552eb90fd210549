// Logs a fact about the machine once per process, not for every store.
#pragma once

#include <string>

namespace forebay::internal {

// Logs `message` at info level unless this process has logged the very same already. Threads: any.
void say_once(const std::string& message);

}  // namespace forebay::internal
