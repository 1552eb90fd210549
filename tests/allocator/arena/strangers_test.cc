#include "allocator/arena/strangers.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace forebay::internal {
namespace {

// Steps of the same 100 sizes.
void repeat(Strangers& strangers, int step_count) {
  for (int step = 0; step < step_count; ++step) {
    for (std::size_t i = 0; i < 100; ++i) strangers.meet((i + 1) * 4096);
  }
}

TEST(Strangers, AreBlocksOfNewSizesBetweenManyThatComeAgain) {
  Strangers strangers;
  for (std::size_t i = 0; i < 100; ++i) EXPECT_FALSE(strangers.meet((i + 1) * 4096)) << "the first step";
  EXPECT_FALSE(strangers.meet(1'000'448)) << "so far most sizes were new";
  repeat(strangers, 6);
  EXPECT_TRUE(strangers.meet(2'000'896));
  EXPECT_FALSE(strangers.meet(2'000'896)) << "known by now";
}

TEST(Strangers, AreNoneWhereSizesAreDrawnAtRandom) {
  Strangers strangers;
  int count = 0;
  for (std::size_t i = 0; i < 5000; ++i) {
    count += strangers.meet((i % 8 == 0 ? 100'000 + i : i % 8) * 512) ? 1 : 0;
  }
  EXPECT_EQ(count, 0);
}

TEST(Strangers, StayWhenMostOfThemAreOldAndLive) {
  Strangers strangers;
  EXPECT_FALSE(strangers.stay());
  std::vector<std::uint32_t> numbers;
  for (int i = 0; i < 4; ++i) numbers.push_back(strangers.enter());
  EXPECT_FALSE(strangers.stay()) << "none is old";
  repeat(strangers, 3);
  EXPECT_TRUE(strangers.stay());
  strangers.leave(0);
  strangers.leave(numbers[0]);
  strangers.leave(numbers[0]);
  strangers.leave(numbers[1]);
  EXPECT_TRUE(strangers.stay()) << "two of four";
  strangers.leave(numbers[2]);
  EXPECT_FALSE(strangers.stay());
}

TEST(Strangers, OfLongAgoDoNotCount) {
  Strangers strangers;
  std::vector<std::uint32_t> old;
  for (int i = 0; i < 32; ++i) old.push_back(strangers.enter());
  repeat(strangers, 3);
  EXPECT_TRUE(strangers.stay());
  for (int i = 0; i < 32; ++i) strangers.leave(strangers.enter());
  EXPECT_FALSE(strangers.stay());
  for (const std::uint32_t number : old) strangers.leave(number);
  EXPECT_FALSE(strangers.stay());
}

}  // namespace
}  // namespace forebay::internal
