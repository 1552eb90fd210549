// Notices the end of the process that started this one. A launcher that is killed cannot end its ranks;
// without this they would go on training.
#pragma once

#include <thread>

namespace forebay::gpt {

// Until the thread is stopped, it sends this process SIGTERM once the parent has ended. Requires: the parent
// is a launcher, which does not end first. Errors: throws std::system_error if no thread can be started.
std::jthread watch_launcher();

}  // namespace forebay::gpt
