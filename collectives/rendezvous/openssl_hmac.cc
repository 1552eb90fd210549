#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "collectives/rendezvous/authentication.h"
#include "forebay/check.h"

namespace forebay::internal {

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

}  // namespace forebay::internal
