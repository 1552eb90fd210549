// Addresses and ranges as numbers and in messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "forebay/status.h"
#include "forebay/text.h"
#include "forebay/units.h"

namespace forebay {

inline std::uintptr_t numeric(const void* pointer) noexcept {
  return reinterpret_cast<std::uintptr_t>(pointer);
}
inline std::byte* to_pointer(std::uintptr_t address) noexcept {
  return reinterpret_cast<std::byte*>(address);
}

inline std::string hex(std::uintptr_t address) {
  return format_text("0x%llx", static_cast<unsigned long long>(address));
}

// "2.00 MiB at 0x7f0000000000".
inline std::string range_text(const void* address, std::size_t bytes) {
  return format_bytes(bytes) + " at " + hex(numeric(address));
}

inline Status invalid(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}

}  // namespace forebay
