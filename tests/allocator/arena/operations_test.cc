// The arena under random operations of every kind over a device that touches no bytes, compared with books of
// the memory that each address shows: see tests/allocator/arena/operations.h. FOREBAY_SEED repeats a run,
// FOREBAY_OPERATIONS sets how many operations there are.
#include "tests/allocator/arena/operations.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

namespace forebay {
namespace {

std::uint64_t number_from(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

void run_operations(std::uint64_t default_count) {
  const std::uint64_t first_seed = number_from("FOREBAY_SEED", std::random_device{}());
  const std::uint64_t operation_count = number_from("FOREBAY_OPERATIONS", default_count);
  constexpr std::uint64_t kOperationsPerSeed = 20'000;
  std::uint64_t recalled = 0, moved = 0, refused = 0, paused = 0, captured = 0, refined = 0;
  for (std::uint64_t i = 0; i * kOperationsPerSeed < operation_count; ++i) {
    const std::uint64_t seed = first_seed + i;
    std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);  // A failed check ends the process.
    std::mt19937_64 random(seed);
    testing::ArenaOperations operations(
        [&random](std::uint32_t count) { return static_cast<std::uint32_t>(random() % count); }, seed);
    for (std::uint64_t j = 0; j < kOperationsPerSeed; ++j) operations.step();
    recalled += operations.recalled_count();
    moved += operations.moved_chunk_count();
    refused += operations.refused_count();
    paused += operations.paused_count();
    captured += operations.captured_count();
    refined += operations.refinement_count();
  }
  std::printf(
      "%llu operations: %llu blocks recalled, %llu chunks moved, %llu refused, %llu pauses, %llu captures, "
      "%llu refinements\n",
      static_cast<unsigned long long>(operation_count), static_cast<unsigned long long>(recalled),
      static_cast<unsigned long long>(moved), static_cast<unsigned long long>(refused),
      static_cast<unsigned long long>(paused), static_cast<unsigned long long>(captured),
      static_cast<unsigned long long>(refined));
  for (const std::uint64_t count : {recalled, moved, refused, paused, captured, refined})
    EXPECT_GT(count, 0u);
}

TEST(ArenaOperations, HoldTheInvariantsInAnyOrder) {
  run_operations(100'000);
}

TEST(SlowArenaOperations, HoldTheInvariantsInAnyOrder) {
  run_operations(10'000'000);
}

}  // namespace
}  // namespace forebay
