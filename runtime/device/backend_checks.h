// Checks that all backends share. Each text is a finding and a remedy, for the end of a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "forebay/backend.h"

namespace forebay {

inline constexpr char kNoStream[] =
    "there is no such stream; give one that stream_create returned and stream_destroy has not had";
inline constexpr char kNoEvent[] =
    "there is no such event; give one that event_create returned and event_destroy has not had";
inline constexpr char kNotRecorded[] = "an event was never recorded; record both first";
inline constexpr char kNotReached[] =
    ": its stream has not reached an event yet; synchronize with both first";
inline constexpr char kNoModule[] = "there is no such module; give one that load_module returned";
inline constexpr char kNoModuleTwice[] = "there is no such module; give one that load_module returned, once";
inline constexpr char kNoKernel[] = "there is no such kernel; give one that get_kernel returned";
inline constexpr char kOverlap[] = "source and target overlap; copy in two steps";

// Handles that are numbers.
inline void* to_handle(std::uint64_t id) noexcept {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(id));
}
inline std::uint64_t to_id(void* handle) noexcept {
  return reinterpret_cast<std::uintptr_t>(handle);
}

inline bool overlap(const void* a, const void* b, std::size_t bytes) noexcept {
  const auto x = reinterpret_cast<std::uintptr_t>(a);
  const auto y = reinterpret_cast<std::uintptr_t>(b);
  return (x > y ? x - y : y - x) < bytes;
}

// Empty for a launch that may be.
inline std::string launch_problem(Dimensions grid, Dimensions block, const void* const* arguments,
                                  const std::size_t* argument_bytes, std::size_t argument_count) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0) {
    return "a dimension is 0; give at least 1";
  }
  if (argument_count > 0 && (arguments == nullptr || argument_bytes == nullptr)) {
    return "its arguments are null; give one pointer and one size for each";
  }
  for (std::size_t i = 0; i < argument_count; ++i) {
    if (arguments[i] != nullptr && argument_bytes[i] != 0) continue;
    return "argument " + std::to_string(i) + " is null or empty; give its value";
  }
  return "";
}

}  // namespace forebay
