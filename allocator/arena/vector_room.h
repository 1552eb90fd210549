// make_vector_room: room in a vector, or false where the host has no memory.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <vector>

namespace forebay::internal {

// Makes room for `count` items in all. False if the host has no memory for them: this layer is built without
// exceptions, and one of the vector's would leave the caller's locks held. So the memory is tried for first.
template <typename Item>
[[nodiscard]] bool make_vector_room(std::vector<Item>& items, std::size_t count) {
  if (items.capacity() >= count) return true;
  void* volatile const room = std::malloc(count * sizeof(Item));  // volatile: the compiler keeps the call.
  if (room == nullptr) return false;
  std::free(room);
  items.reserve(count);
  return true;
}

}  // namespace forebay::internal
