// stream_copy: a copy of much memory that nobody on this core reads soon.
#pragma once

#include <cstddef>

namespace forebay {

// Below this the caches hold source and target, and plain copies are faster.
inline constexpr std::size_t kStreamCopyBytes = 64 << 10;

// As memcpy. From kStreamCopyBytes on it writes past the caches, so the target's lines are not read first,
// and walks several pages at a time, so that the memory's banks and the prefetchers of each page have work.
// glibc's memcpy does the former only for copies larger than most of its cache. When it returns, all threads
// that see anything the caller does afterwards see the bytes.
void stream_copy(void* target, const void* source, std::size_t bytes) noexcept;

}  // namespace forebay
