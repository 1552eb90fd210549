// This file alone is compiled for AVX2; xxHash then uses it. All that it includes is static or C, so no
// function of it serves other files.
#include "runtime/base/checksum_avx2.h"

#if defined(__x86_64__)
#include <xxhash.h>

namespace forebay::internal {

std::uint64_t checksum_by_avx2(const void* data, std::size_t bytes) noexcept {
  return XXH3_64bits(data, bytes);
}

}  // namespace forebay::internal
#endif
