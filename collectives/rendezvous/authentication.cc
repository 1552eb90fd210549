#include "collectives/rendezvous/authentication.h"

#include <fcntl.h>
#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "forebay/check.h"
#include "forebay/descriptor.h"

namespace forebay::internal {
namespace {

// SHA-256 as in FIPS 180-4: the fractional parts of the roots of the first primes.
constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
constexpr std::array<std::uint32_t, 8> kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr std::size_t kBlockBytes = 64;

void add_block(std::array<std::uint32_t, 8>& hash, const char* block) noexcept {
  std::array<std::uint32_t, 64> words{};
  for (std::size_t i = 0; i < kBlockBytes; ++i) {
    words[i / 4] = words[i / 4] << 8 | static_cast<unsigned char>(block[i]);
  }
  for (std::size_t i = 16; i < words.size(); ++i) {
    const std::uint32_t a = words[i - 15], b = words[i - 2];
    words[i] = words[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + words[i - 7] +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = hash;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                ((e & f) ^ (~e & g)) + kRounds[i] + words[i];
    const std::uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const std::array<std::uint32_t, 8> changed = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < hash.size(); ++i) hash[i] += changed[i];
}

Digest sha256(std::string message) {
  const std::uint64_t bits = std::uint64_t{message.size()} * 8;
  message += '\x80';
  message.append((2 * kBlockBytes - 8 - message.size() % kBlockBytes) % kBlockBytes, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) message += static_cast<char>(bits >> shift & 0xff);
  std::array<std::uint32_t, 8> hash = kStart;
  for (std::size_t at = 0; at < message.size(); at += kBlockBytes) add_block(hash, message.data() + at);
  Digest digest{};
  for (std::size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<std::uint8_t>(hash[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

}  // namespace

// RFC 2104.
Digest hmac_sha256(std::string_view key, std::string_view data) {
  std::string inner(key.size() > kBlockBytes ? bytes_of(sha256(std::string(key))) : key);
  inner.resize(kBlockBytes);
  std::string outer = inner;
  for (char& byte : inner) byte = static_cast<char>(byte ^ 0x36);
  for (char& byte : outer) byte = static_cast<char>(byte ^ 0x5c);
  return sha256(outer.append(bytes_of(sha256(inner.append(data)))));
}

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
