// call_on: runs a closure in stream order on a host thread. Shorter than Backend::call_host
// for arguments that do not fit a plain pointer.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "forebay/backend.h"

namespace forebay {

// Order:    `function` runs after all work queued on `stream` before this call; later work waits for it.
// Requires: `function` neither throws nor calls the Backend.
// Cost:     one heap allocation.
template <typename Function>
Status call_on(Backend& backend, Stream stream, Function function) {
  static_assert(std::is_invocable_v<Function&>);
  auto holder = std::make_unique<Function>(std::move(function));
  const HostFunction trampoline = [](void* argument) {
    const std::unique_ptr<Function> owned(static_cast<Function*>(argument));
    (*owned)();
  };
  Status status = backend.call_host(stream, trampoline, holder.get());
  if (status.ok()) static_cast<void>(holder.release());
  return status;
}

}  // namespace forebay
