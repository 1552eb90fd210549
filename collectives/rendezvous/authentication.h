// Proofs that bytes come from a process that knows a secret: HMAC-SHA256, and random numbers for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "forebay/status.h"

namespace forebay::internal {

using Digest = std::array<std::uint8_t, 32>;

Digest hmac_sha256(std::string_view key, std::string_view data);

// Takes a time that does not depend on how much of them is equal.
bool equal_digests(const Digest& a, const Digest& b) noexcept;

// Whether the system gives random numbers. Errors: kUnsupported.
Status check_randomness();
// Cannot be guessed. Requires: check_randomness() was ok.
Digest random_digest();

// 64 hexadecimal digits, for instance for a secret.
std::string hexadecimal(const Digest& digest);

inline std::string_view bytes_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace forebay::internal
