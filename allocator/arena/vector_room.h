// make_vector_room: room in a vector, or false where the host has no memory. Before a text: has_text_room.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <vector>

namespace forebay::internal {

// Whether the host has so much memory now. This layer is built without exceptions, and one of a vector or a
// text would leave the caller's locks held, so the memory is tried for first.
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

// Whether the host has memory for the text of an error. Such a text takes at most 15 bytes where it has none.
inline bool has_text_room() {
  return has_host_memory(16 << 10);
}

}  // namespace forebay::internal
