#include "forebay/checksum.h"

#include <xxhash.h>

#if defined(__x86_64__)
#include "runtime/base/checksum_avx2.h"
#endif

namespace forebay {

std::uint64_t checksum_of(const void* data, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return internal::checksum_by_avx2(data, bytes);
#endif
  return XXH3_64bits(data, bytes);
}

}  // namespace forebay
