// The size of the chunks of most arenas in tests.
#pragma once

#include <cstddef>

#include "forebay/units.h"

namespace forebay::testing {

constexpr std::size_t kChunk = 64_KiB;

}  // namespace forebay::testing
