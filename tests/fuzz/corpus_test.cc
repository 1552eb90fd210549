// The entry of a fuzz target over its corpus, as an ordinary test: every file, each of its beginnings, and
// each file with single bytes changed. The slow test changes the files at random for a minute, as a fuzzer
// without a view of the program does.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void run(const std::string& text) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
}

std::vector<std::string> corpus() {
  std::vector<std::filesystem::path> paths;
  for (const auto& file : std::filesystem::directory_iterator(FUZZ_CORPUS)) paths.push_back(file.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> texts;
  for (const std::filesystem::path& path : paths) {
    std::ifstream stream(path, std::ios::binary);
    texts.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  return texts;
}

// One to eight changes: a byte, a number, a piece left out, repeated, or taken from another file.
std::string changed(const std::vector<std::string>& texts, std::mt19937_64& random) {
  constexpr std::size_t kMostBytes = 1u << 16;
  static constexpr unsigned char kOdd[] = {0, 1, 0x7f, 0x80, 0xff, '"', '[', '-'};
  std::string text = texts[random() % texts.size()];
  for (std::uint64_t i = 0, changes = 1 + random() % 8; i < changes; ++i) {
    if (text.empty()) text = "\n";
    const std::size_t at = random() % text.size();
    const std::size_t count = 1 + random() % std::min<std::size_t>(32, text.size() - at);
    switch (random() % 6) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ 1 << random() % 8);
        break;
      case 1:
        text[at] = static_cast<char>(kOdd[random() % std::size(kOdd)]);
        break;
      case 2:
        text.replace(at, count, std::to_string(random() >> random() % 64));
        break;
      case 3:
        text.erase(at, count);
        break;
      case 4:
        text.insert(at, text.substr(at, count));
        break;
      default: {
        const std::string& other = texts[random() % texts.size()];
        if (!other.empty()) text.replace(at, count, other.substr(random() % other.size(), count));
      }
    }
  }
  text.resize(std::min(text.size(), kMostBytes));
  return text;
}

TEST(SlowFuzz, AMinuteOfRandomChangesIsSurvived) {
  const char* const given = std::getenv("FOREBAY_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::cout << FUZZ_NAME << " FOREBAY_SEED=" << seed << std::endl;
  std::mt19937_64 random(seed);
  const std::vector<std::string> texts = corpus();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::uint64_t count = 0;
  for (; std::chrono::steady_clock::now() < end; ++count) run(changed(texts, random));
  std::cout << count << " inputs" << std::endl;
}

TEST(FuzzCorpus, EveryFileCutOffAnywhereOrChangedIsSurvived) {
  constexpr std::uint64_t kSeed = 1;
  SCOPED_TRACE(std::string(FUZZ_NAME) + " seed " + std::to_string(kSeed));
  std::mt19937_64 random(kSeed);
  int count = 0;
  for (const std::string& text : corpus()) {
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
