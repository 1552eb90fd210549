// Places of elements in the parts of a tensor, against loops over all indices.

#include "runtime/engine/state/tensor_places.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

namespace forebay::internal {
namespace {

// The elements of each part in order: the place in the whole tensor; none for padding.
std::vector<std::vector<std::optional<std::uint64_t>>> parts_by_loops(const TensorSplit& split) {
  std::uint64_t outer = 1, inner = 1;
  const auto divided = static_cast<std::size_t>(split.dimension);
  for (std::size_t d = 0; d < divided; ++d) outer *= split.shape[d];
  for (std::size_t d = divided + 1; d < split.shape.size(); ++d) inner *= split.shape[d];
  const std::uint64_t section = split.shape[divided] / split.sections;
  const std::uint64_t piece = (section + split.parts - 1) / split.parts;
  std::vector<std::vector<std::optional<std::uint64_t>>> parts(split.parts);
  for (std::uint64_t part = 0; part < split.parts; ++part) {
    for (std::uint64_t o = 0; o < outer; ++o) {
      for (std::uint64_t s = 0; s < split.sections; ++s) {
        for (std::uint64_t c = part * piece; c < (part + 1) * piece; ++c) {
          for (std::uint64_t i = 0; i < inner; ++i) {
            std::optional<std::uint64_t> place;
            if (c < section) place = ((o * split.sections + s) * section + c) * inner + i;
            parts[part].push_back(place);
          }
        }
      }
    }
  }
  return parts;
}

TEST(TensorPlaces, AreThoseOfLoopsOverAllIndices) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto draw = [&](std::uint64_t most) {
    return std::uniform_int_distribution<std::uint64_t>(1, most)(random);
  };
  for (int i = 0; i < 300; ++i) {
    TensorSplit split;
    for (std::uint64_t d = draw(4); d > 0; --d) split.shape.push_back(draw(5));
    split.dimension = static_cast<int>(draw(split.shape.size())) - 1;
    split.sections = draw(3);
    split.shape[static_cast<std::size_t>(split.dimension)] *= split.sections;
    split.parts = draw(6);
    const Result<TensorPlaces> made = TensorPlaces::of(split);
    ASSERT_TRUE(made.ok()) << made.status().message();
    const TensorPlaces& places = made.value();
    const auto parts = parts_by_loops(split);

    ASSERT_EQ(places.part_count(), parts[0].size());
    std::uint64_t seen = 0;
    for (std::uint64_t part = 0; part < split.parts; ++part) {
      for (std::uint64_t at = 0; at < parts[part].size(); ++at) {
        const TensorPlaces::InWhole run = places.place(part, at);
        EXPECT_EQ(run.at, parts[part][at]);
        ASSERT_GT(run.count, 0U);
        ASSERT_LE(run.count, parts[part].size() - at);
        for (std::uint64_t k = 0; k < run.count; ++k) {
          EXPECT_EQ(parts[part][at + k], run.at ? std::optional(*run.at + k) : std::nullopt);
        }
        if (!run.at) continue;
        ++seen;
        const TensorPlaces::InPart back = places.find(*run.at);
        EXPECT_EQ(back.part, part);
        EXPECT_EQ(back.at, at);
        EXPECT_EQ(back.count, run.count);
      }
    }
    EXPECT_EQ(seen, places.count());
  }
}

TEST(TensorPlaces, RefuseASplitThatIsNone) {
  const TensorSplit good{.shape = {4, 6}, .dimension = 1, .sections = 3, .part = 1, .parts = 2};
  EXPECT_TRUE(TensorPlaces::of(good).ok());
  const auto refused = [&](const auto& change) {
    TensorSplit split = good;
    change(split);
    EXPECT_EQ(TensorPlaces::of(split).status().code(), StatusCode::kInvalidArgument);
  };
  refused([](TensorSplit& s) { s.shape.clear(); });
  refused([](TensorSplit& s) { s.shape[0] = 0; });
  refused([](TensorSplit& s) { s.shape = {std::uint64_t{1} << 40, std::uint64_t{1} << 40}; });
  refused([](TensorSplit& s) { s.shape = {std::uint64_t{1} << 57, 3}; });
  refused([](TensorSplit& s) { s.dimension = 2; });
  refused([](TensorSplit& s) { s.dimension = -1; });
  refused([](TensorSplit& s) { s.sections = 0; });
  refused([](TensorSplit& s) { s.sections = 4; });
  refused([](TensorSplit& s) { s.parts = 0; });
  refused([](TensorSplit& s) { s.part = 2; });
}

}  // namespace
}  // namespace forebay::internal
