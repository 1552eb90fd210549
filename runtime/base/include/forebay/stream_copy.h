// stream_copy: a large copy for a target that this core does not read soon.
#pragma once

#include <cstddef>

#include "forebay/language.h"

namespace forebay {

// Below this the caches hold source and target, and plain copies are faster.
inline constexpr std::size_t kStreamCopyBytes = 64 << 10;

// As memcpy. From kStreamCopyBytes on it writes past the caches, so the target's lines are not read first.
// glibc's memcpy writes past the caches only for copies larger than most of the cache. When it returns, the
// bytes are visible to every thread that sees a later store of the caller.
//
// Order: one line after the other. Turns of eight pages were five times slower on an AMD EPYC, probably
// because its loads wait for stores to the same place in another page.
void stream_copy(void* target, const void* source, std::size_t bytes) noexcept;

}  // namespace forebay
