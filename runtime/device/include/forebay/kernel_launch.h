// launch_with: launches a kernel whose one argument is a structure.
#pragma once

#include <cstddef>
#include <type_traits>

#include "forebay/backend.h"

namespace forebay {

// As Backend::launch. The argument's padding is zero where the compiler can clear it (GCC 11 and later), so
// the device gets the same bytes in every run, and none that happen to look like an address.
template <typename Argument>
Status launch_with(Backend& backend, Kernel kernel, Dimensions grid, Dimensions block, Argument argument,
                   Stream stream) {
  static_assert(std::is_trivially_copyable_v<Argument>);
#if __has_builtin(__builtin_clear_padding)
  __builtin_clear_padding(&argument);
#endif
  const void* const arguments[] = {&argument};
  const std::size_t bytes[] = {sizeof argument};
  return backend.launch(kernel, grid, block, arguments, bytes, 1, stream);
}

}  // namespace forebay
