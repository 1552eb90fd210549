// What proves that bytes come from someone who knows a secret: HMAC-SHA256, and random numbers for it. By
// OpenSSL's libcrypto, in builds that have it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace forebay::internal {

using Digest = std::array<std::uint8_t, 32>;

// False in a build without OpenSSL, whose hmac_sha256 must not be called.
bool authentication_available() noexcept;

Digest hmac_sha256(std::string_view key, std::string_view data);

// In a time that does not tell how much of them is equal.
bool equal_digests(const Digest& a, const Digest& b) noexcept;

// Not to be guessed by anybody.
Digest random_digest();

// 64 hexadecimal digits, such as a secret.
std::string hexadecimal(const Digest& digest);

inline std::string_view bytes_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace forebay::internal
