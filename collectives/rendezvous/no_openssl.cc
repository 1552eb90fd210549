// Stands in for openssl_hmac.cc in a build without OpenSSL.
#include "collectives/rendezvous/authentication.h"
#include "forebay/check.h"

namespace forebay::internal {

bool authentication_available() noexcept {
  return false;
}

Digest hmac_sha256(std::string_view, std::string_view) {
  FOREBAY_CHECK(false, "this build has no OpenSSL");
  return {};
}

}  // namespace forebay::internal
