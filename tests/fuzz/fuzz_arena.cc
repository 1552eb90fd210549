#include <cstddef>
#include <cstdint>

#include "tests/allocator/arena/operations.h"

// The bytes choose the operations; when they are used up, so is the run.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::size_t used = 0;
  const auto pick = [&](std::uint32_t count) {
    std::uint32_t number = 0;
    // As many bytes as the choice needs, so that a changed byte changes one choice.
    for (std::uint32_t range = count - 1; range > 0 && used < size; range >>= 8)
      number = number << 8 | data[used++];
    return number % count;
  };
  constexpr std::size_t kOperationsMax = 2000;
  forebay::testing::ArenaOperations operations(pick, 1 + size % 16);
  for (std::size_t i = 0; used < size && i < kOperationsMax; ++i) operations.step();
  return 0;
}
