// What people should hear of the machine they run on, but not from every store that is made.
#pragma once

#include <string>

namespace forebay::internal {

// Logs `message` at info level unless this process has logged the very same already. Threads: any.
void say_once(const std::string& message);

}  // namespace forebay::internal
