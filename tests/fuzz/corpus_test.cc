// The entry of a fuzz target over its corpus, as an ordinary test: every file, each of its beginnings, and
// each file with single bytes changed.

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void run(const std::string& text) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
}

TEST(FuzzCorpus, EveryFileCutOffAnywhereOrChangedIsSurvived) {
  constexpr std::uint64_t kSeed = 1;
  SCOPED_TRACE(std::string(FUZZ_NAME) + " seed " + std::to_string(kSeed));
  std::mt19937_64 random(kSeed);
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator(FUZZ_CORPUS)) {
    std::ifstream stream(file.path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    for (std::size_t length = 0; length <= text.size(); ++length) run(text.substr(0, length));
    for (int i = 0; i < FUZZ_CHANGES && !text.empty(); ++i) {
      std::string changed = text;
      changed[random() % changed.size()] = static_cast<char>(random());
      run(changed);
    }
    ++count;
  }
  EXPECT_GT(count, 2);
}

}  // namespace
