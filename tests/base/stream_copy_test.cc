#include "forebay/stream_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace forebay {
namespace {

TEST(StreamCopy, CopiesEveryByteAndNoOther) {
  constexpr unsigned kSeed = 1;
  std::mt19937 random(kSeed);
  std::vector<unsigned char> source(600'000);
  for (unsigned char& byte : source) byte = static_cast<unsigned char>(random());
  std::vector<std::size_t> sizes{0,
                                 1,
                                 63,
                                 64,
                                 4096,
                                 kStreamCopyBytes - 1,
                                 kStreamCopyBytes,
                                 kStreamCopyBytes + 1,
                                 8 * 4096 * 3,
                                 8 * 4096 * 3 + 63};
  for (int i = 0; i < 60; ++i) sizes.push_back(random() % 500'000);
  for (const std::size_t bytes : sizes) {
    const std::size_t from = random() % 100;
    const std::size_t to = 64 + random() % 200;
    std::vector<unsigned char> target(to + bytes + 64, 0xEE);
    stream_copy(target.data() + to, source.data() + from, bytes);
    ASSERT_EQ(std::memcmp(target.data() + to, source.data() + from, bytes), 0)
        << bytes << " bytes from " << from << " to " << to << ", seed " << kSeed;
    for (std::size_t i = 0; i < to; ++i) ASSERT_EQ(target[i], 0xEE) << bytes << " bytes, before";
    for (std::size_t i = to + bytes; i < target.size(); ++i)
      ASSERT_EQ(target[i], 0xEE) << bytes << " bytes, after";
  }
}

}  // namespace
}  // namespace forebay
