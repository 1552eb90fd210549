// What the parts of the preload in the core share: the driver as the program uses it, the mode, and the
// record. Set once, by the start, before any replaced call can come.
#pragma once

#include <atomic>

#include "allocator/preload/calls.h"
#include "forebay/backend.h"
#include "allocator/preload/record.h"

namespace forebay {

struct PreloadState {
  HookedCalls real{};
  UsedCalls used{};
  PreloadMode mode = PreloadMode::kOff;
  std::size_t memory_limit = 0;  // What a device is said to have, at most; 0: what it has.
  const void* hooked_dlsym = nullptr;
  PreloadRecord* record = nullptr;
};

// Of the process; never destroyed.
PreloadState& preload_state();

// A function that the driver lacks stays away.
template <typename Function>
void replace(Function** place, Function* ours) {
  if (*place != nullptr) *place = ours;
}

// Puts ours in place of what is replaced.
void replace_memory_calls(HookedCalls* calls);
void replace_pool_calls(HookedCalls* calls);
void replace_context_calls(HookedCalls* calls);
void replace_sharing_calls(HookedCalls* calls);

inline DevicePtr device_pointer(DriverAddress address) noexcept {
  return reinterpret_cast<DevicePtr>(static_cast<std::uintptr_t>(address));
}
inline DriverAddress driver_address(DevicePtr pointer) noexcept {
  return static_cast<DriverAddress>(reinterpret_cast<std::uintptr_t>(pointer));
}

}  // namespace forebay
