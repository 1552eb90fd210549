#include "forebay/span.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace forebay {
namespace {

int sum(Span<const int> values) {
  return std::accumulate(values.begin(), values.end(), 0);
}

TEST(Span, TakesArraysContainersListsAndStandardSpans) {
  std::vector<int> vector{1, 2, 3};
  const std::array<int, 2> array{4, 5};
  int plain[] = {6, 7};

  EXPECT_EQ(sum(vector), 6);
  EXPECT_EQ(sum(array), 9);
  EXPECT_EQ(sum(plain), 13);
  EXPECT_EQ(sum({plain, 1}), 6);
  EXPECT_EQ(sum({8, 9, 10}), 27);
  EXPECT_EQ(sum({}), 0);
  EXPECT_EQ(sum(std::span<int>(vector).first(2)), 3);
  EXPECT_EQ(sum(Span<int>(vector)), 6);
  EXPECT_EQ(sum(std::vector<int>{11, 12}), 23);
}

TEST(Span, IsTakenByStandardSpans) {
  std::vector<int> vector{1, 2, 3};
  const auto last = [](std::span<int> values) { return values.back(); };

  EXPECT_EQ(last(Span<int>(vector)), 3);
  EXPECT_EQ(std::span<const int>(Span<const int>(vector)).size(), 3u);
}

TEST(Span, RefusesToWriteThroughWhatMayNotBeWritten) {
  static_assert(std::is_convertible_v<std::vector<int>&, Span<int>>);
  static_assert(!std::is_convertible_v<const std::vector<int>&, Span<int>>);
  static_assert(!std::is_convertible_v<std::vector<int>, Span<int>>, "its elements would be gone");
  static_assert(!std::is_convertible_v<Span<const int>, Span<int>>);
  static_assert(!std::is_convertible_v<std::initializer_list<int>, Span<int>>);
  static_assert(!std::is_convertible_v<std::vector<short>&, Span<const int>>);
  static_assert(!std::is_convertible_v<int, Span<const int>>);
  static_assert(std::is_trivially_copyable_v<Span<int>>);
}

TEST(Span, PartsAndBytesLieInTheWhole) {
  std::array<std::uint32_t, 4> values{1, 2, 3, 4};
  const Span whole = values;

  EXPECT_EQ(whole.first(1).back(), 1u);
  EXPECT_EQ(whole.last(1).front(), 4u);
  EXPECT_EQ(whole.subspan(1).size(), 3u);
  EXPECT_EQ(whole.subspan(1, 2)[1], 3u);
  EXPECT_TRUE(whole.subspan(4).empty());
  EXPECT_EQ(as_bytes(whole).size(), whole.size_bytes());
  EXPECT_EQ(as_writable_bytes(whole).data(), reinterpret_cast<std::byte*>(values.data()));
}

}  // namespace
}  // namespace forebay
