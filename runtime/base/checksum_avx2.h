#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::internal {

// XXH3-64. Requires: the processor has AVX2.
std::uint64_t checksum_by_avx2(const void* data, std::size_t bytes) noexcept;

}  // namespace forebay::internal
