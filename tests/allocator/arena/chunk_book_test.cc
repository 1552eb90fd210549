#include "allocator/arena/chunk_book.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>
#include <vector>

namespace forebay::internal {
namespace {

TEST(ChunkSet, VisitsItsChunksInTheOrderOfTheirIndices) {
  constexpr std::uint32_t kChunkCount = 300;
  std::mt19937_64 random(1);
  ChunkSet chunks;
  chunks.reserve(kChunkCount);
  std::set<std::uint32_t> expected;

  for (int i = 0; i < 2000; ++i) {
    const auto chunk = static_cast<std::uint32_t>(random() % kChunkCount);
    if (random() % 3 == 0) {
      chunks.remove(chunk);
      expected.erase(chunk);
    } else {
      chunks.add(chunk);
      expected.insert(chunk);
    }
    ASSERT_EQ(chunks.has(chunk), expected.contains(chunk)) << "step " << i;
  }
  std::vector<std::uint32_t> visited;
  chunks.for_each([&](std::uint32_t chunk) { visited.push_back(chunk); });

  EXPECT_EQ(visited, std::vector<std::uint32_t>(expected.begin(), expected.end()));
}

TEST(ChunkSet, IsEmptyAfterClear) {
  ChunkSet chunks;
  chunks.reserve(130);
  chunks.add(0);
  chunks.add(129);

  chunks.clear();

  chunks.for_each([](std::uint32_t chunk) { ADD_FAILURE() << "chunk " << chunk; });
}

TEST(EntryPool, GivesFreshEntries) {
  EntryPool<PhysicalChunk> pool;
  PhysicalChunk* leaf = pool.make_leaf();
  ASSERT_NE(leaf, nullptr);
  pool.add(leaf);
  const std::uint32_t first = pool.take();
  pool[first].bytes = 7;
  pool[first].learned = 7;
  pool.give(first);

  for (const bool used_before : {true, false}) {
    const PhysicalChunk& entry = pool[pool.take()];

    EXPECT_EQ(entry.bytes, 0u) << used_before;
    EXPECT_EQ(entry.learned, kNone) << used_before;
    EXPECT_EQ(entry.first_mapping, kNone) << used_before;
  }
}

}  // namespace
}  // namespace forebay::internal
