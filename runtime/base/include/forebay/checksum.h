// checksum_of: the checksum of data in files.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/language.h"

namespace forebay {

// XXH3-64 with seed 0, by the widest vectors of the processor up to 256 bits: memory gives less than those
// take. The same value on every processor.
std::uint64_t checksum_of(const void* data, std::size_t bytes) noexcept;

}  // namespace forebay
