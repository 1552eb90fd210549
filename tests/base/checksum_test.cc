#include "forebay/checksum.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace forebay {
namespace {

// Lengths at which XXH3 takes another way, and one more and one less.
TEST(Checksum, IsXxh3OfEveryLengthAndPlace) {
  std::vector<unsigned char> bytes((std::size_t{1} << 20) + 64);
  std::uint32_t value = 1;
  for (unsigned char& byte : bytes)
    byte = static_cast<unsigned char>((value = value * 1664525 + 1013904223) >> 24);
  for (const std::size_t length : {0,   1,   3,   4,    8,    9,    16,   17,     128,    129,
                                   240, 241, 256, 1023, 1024, 1025, 4096, 65'535, 65'536, 1'048'576}) {
    for (const std::size_t begin : {0, 1, 31, 63})
      EXPECT_EQ(checksum_of(&bytes[begin], length), XXH3_64bits(&bytes[begin], length))
          << length << " at " << begin;
  }
}

TEST(Checksum, SeesOneBit) {
  std::vector<unsigned char> bytes(100'000, 7);
  const std::uint64_t before = checksum_of(bytes.data(), bytes.size());
  for (std::size_t at = 0; at < bytes.size(); at += 997) {
    bytes[at] ^= 1;
    EXPECT_NE(checksum_of(bytes.data(), bytes.size()), before) << "byte " << at;
    bytes[at] ^= 1;
  }
}

}  // namespace
}  // namespace forebay
