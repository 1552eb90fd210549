// The corpus of learned placements has the version that is read now: a refused file teaches the fuzzer
// nothing about the arena.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "allocator/arena/learned.h"
#include "tests/fuzz/learned_input.h"

namespace forebay {
namespace {

TEST(LearnedCorpus, EveryFileIsDecodedAndIsWrittenTheSameAgain) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(FUZZ_CORPUS)) {
    std::ifstream stream(entry.path(), std::ios::binary);
    const std::string input{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    if (input.empty() || (input[0] != 'f' && input[0] != 'n')) continue;  // Choices, not a file.
    const std::string file = testing::learned_file(input);
    const Result<internal::LearnedPlacements> learned = internal::LearnedPlacements::decode(file);
    ASSERT_TRUE(learned.ok()) << entry.path() << ": " << learned.status().to_string();
    EXPECT_EQ(learned.value().encode(), file) << entry.path();
    ++count;
  }
  EXPECT_GT(count, 3);
}

}  // namespace
}  // namespace forebay
