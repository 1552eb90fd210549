#include "collectives/rendezvous/authentication.h"

#include <fcntl.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "forebay/check.h"
#include "forebay/descriptor.h"

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

namespace {

// Up to 256 bytes come at once, or not at all before the system has gathered enough randomness. Where a
// sandbox refuses the call, the device may be there.
bool fill(Digest& digest) {
  const auto wanted = static_cast<ssize_t>(digest.size());
  ssize_t count = 0;
  do {
    count = getrandom(digest.data(), digest.size(), 0);
  } while (count < 0 && errno == EINTR);
  if (count == wanted) return true;
  const Descriptor device(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  return device.valid() && read(device.number(), digest.data(), digest.size()) == wanted;
}

}  // namespace

Status check_randomness() {
  Digest digest{};
  if (fill(digest)) return {};
  return Status(StatusCode::kUnsupported, "cannot get random numbers from the system: getrandom() and ",
                "/dev/urandom: ", std::strerror(errno), "; allow one of them in the sandbox or container");
}

Digest random_digest() {
  Digest digest{};
  FOREBAY_CHECK(fill(digest), "the system gives no random numbers any more: errno %d", errno);
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
