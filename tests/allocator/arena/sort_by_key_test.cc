#include "allocator/arena/sort_by_key.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace forebay {
namespace {

using Item = std::pair<std::uint64_t, int>;

TEST(SortByKey, GivesTheOrderOfAComparisonSort) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t most = std::uint64_t{1} << random() % 41;
    const std::uint64_t base = random() % 2 == 0 ? 0 : random() >> 8;
    std::vector<Item> items(random() % 600);
    for (Item& item : items) item = {base + random() % most, static_cast<int>(random() % 50)};
    std::vector<Item> expected = items;
    std::sort(expected.begin(), expected.end());
    std::vector<Item> scratch;
    scratch.reserve(items.size());
    const auto key = [](const Item& item) { return item.first; };
    const auto less = [](const Item& a, const Item& b) { return a.second < b.second; };

    internal::sort_by_key(items, scratch, key, less);

    EXPECT_EQ(items, expected) << "round " << round;
  }
}

}  // namespace
}  // namespace forebay
