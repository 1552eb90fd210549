#include "forebay/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace forebay {

#if defined(__x86_64__)
namespace {

constexpr std::size_t kLineBytes = 64;
// How far ahead of its use a line is fetched. Prefetching past the end of the source is harmless.
constexpr std::size_t kAheadBytes = 1024;

// Requires: target on a line.
void copy_line(std::byte* target, const std::byte* source) noexcept {
  _mm_prefetch(reinterpret_cast<const char*>(source) + kAheadBytes, _MM_HINT_T0);
  const auto* from = reinterpret_cast<const __m128i*>(source);
  auto* to = reinterpret_cast<__m128i*>(target);
  const __m128i a = _mm_loadu_si128(from);
  const __m128i b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2);
  const __m128i d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

}  // namespace

void stream_copy(void* target, const void* source, std::size_t bytes) noexcept {
  if (bytes < kStreamCopyBytes) {
    std::memcpy(target, source, bytes);
    return;
  }
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLineBytes;
  std::memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= kLineBytes; bytes -= kLineBytes, to += kLineBytes, from += kLineBytes) copy_line(to, from);
  std::memcpy(to, from, bytes);
  _mm_sfence();
}

#else

void stream_copy(void* target, const void* source, std::size_t bytes) noexcept {
  std::memcpy(target, source, bytes);
}

#endif

}  // namespace forebay
