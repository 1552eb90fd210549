// The state that the preload's sources in the core share: the driver as the program uses it, the mode, and
// the record. forebay_preload_start sets it once, before any replaced call.
#pragma once

#include <type_traits>

#include "allocator/preload/calls.h"
#include "allocator/preload/record.h"
#include "forebay/backend.h"

namespace forebay {

struct PreloadState {
  HookedCalls real{};
  UsedCalls used{};
  PreloadMode mode = PreloadMode::kOff;
  std::size_t memory_limit = 0;  // The most memory that a device is said to have; 0: no limit.
  const void* hooked_dlsym = nullptr;
  PreloadRecord* record = nullptr;
};

// One for the process; never destroyed.
PreloadState& preload_state();

// Replaces one call, unless the driver lacks it.
template <typename Function>
void replace(Function** call, std::type_identity_t<Function>* ours) {
  if (*call != nullptr) *call = ours;
}

// Each replaces the calls of one source file.
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

// --- escapes.cc ---
// Libraries that reach the driver past the hook: their dlsym, or their calls of the driver, are bound to
// another object than the front end, for example by RTLD_DEEPBIND. Their allocations are not seen; the record
// names them.
// Looks through the loaded libraries. Does nothing after it has found one or has looked kEscapeLooks times.
void look_for_escapes();
inline constexpr int kEscapeLooks = 8;

// Looks at some allocations, by their number.
void look_for_escapes_now_and_then(std::uint64_t count);

}  // namespace forebay
