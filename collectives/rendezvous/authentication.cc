#include "collectives/rendezvous/authentication.h"

#include <sys/random.h>

#include "forebay/check.h"

#if defined(FOREBAY_HAVE_OPENSSL)
#include <openssl/evp.h>
#include <openssl/hmac.h>
#endif

namespace forebay::internal {

#if defined(FOREBAY_HAVE_OPENSSL)
bool authentication_available() noexcept {
  return true;
}

Digest hmac_sha256(std::string_view key, std::string_view data) {
  Digest digest{};
  unsigned length = 0;
  const unsigned char* made =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(data.data()), data.size(), digest.data(), &length);
  FOREBAY_CHECK(made != nullptr && length == digest.size(), "OpenSSL made an HMAC of %u bytes", length);
  return digest;
}
#else
bool authentication_available() noexcept {
  return false;
}

Digest hmac_sha256(std::string_view, std::string_view) {
  FOREBAY_CHECK(false, "this build has no OpenSSL");
  return {};
}
#endif

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
