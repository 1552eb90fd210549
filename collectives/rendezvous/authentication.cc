#include "collectives/rendezvous/authentication.h"

#include <sys/random.h>

namespace forebay::internal {

bool equal_digests(const Digest& a, const Digest& b) noexcept {
  // Volatile, so that the compiler does not leave the loop at the first difference.
  volatile unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference = difference | (unsigned{a[i]} ^ unsigned{b[i]});
  return difference == 0;
}

Digest random_digest() {
  Digest digest{};
  // Up to 256 bytes come at once, or not at all before the system has gathered enough randomness.
  while (getrandom(digest.data(), digest.size(), 0) != static_cast<ssize_t>(digest.size())) {
  }
  return digest;
}

std::string hexadecimal(const Digest& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace forebay::internal
