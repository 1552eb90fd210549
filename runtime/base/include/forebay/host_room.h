// For layers without exceptions, where one of a vector or a text would leave the caller's locks held: the
// memory is tried for first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include "forebay/language.h"

namespace forebay::internal {

// Whether the host has so much memory now.
inline bool has_host_memory(std::size_t bytes) {
  void* volatile const room = std::malloc(bytes);  // volatile: the compiler keeps the call.
  std::free(room);
  return room != nullptr;
}

// Makes room for `count` items in all. False if the host has no memory for them.
template <typename Item>
[[nodiscard]] bool make_vector_room(std::vector<Item>& items, std::size_t count) {
  if (items.capacity() >= count) return true;
  if (!has_host_memory(count * sizeof(Item))) return false;
  items.reserve(count);
  return true;
}

// The same for one more item beside those that other threads add meanwhile. Grows by doubling.
template <typename Item>
[[nodiscard]] bool make_vector_room(std::vector<Item>& items) {
  constexpr std::size_t kOthers = 64;
  const std::size_t count = items.size() + kOthers;
  return items.capacity() >= count || make_vector_room(items, std::max(count, 2 * items.size()));
}

// The text of an error where there is no room for another: std::string has it within itself.
inline constexpr const char* kNoHostMemory = "no host memory";

// Whether the host has memory for the text of an error. Such a text takes at most 15 bytes where it has none.
inline bool has_text_room() {
  return has_host_memory(16 << 10);
}

}  // namespace forebay::internal
