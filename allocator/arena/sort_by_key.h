// sort_by_key: sorts by a small number. A miss sorts some hundred extents; comparing them takes several times
// as long, because the processor cannot foresee the results.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace forebay::internal {

// Sorts `items` by `key(item)`, a std::uint64_t, and items of equal keys by `less`. Few items should have
// equal keys, or they should be in order already. Requires: `scratch` has the capacity of `items`, and there
// are fewer than 2^32. Allocates no memory.
template <typename Item, typename Key, typename Less>
void sort_by_key(std::vector<Item>& items, std::vector<Item>& scratch, Key key, Less less) {
  constexpr unsigned kDigitBits = 6;
  constexpr std::size_t kDigits = std::size_t{1} << kDigitBits;
  if (items.size() < 2) return;
  // The bits in which the keys differ.
  std::uint64_t differing = 0;
  for (const Item& item : items) differing |= key(item) ^ key(items[0]);
  for (unsigned shift = 0; shift < 64 && differing >> shift != 0; shift += kDigitBits) {
    const auto digit = [&](const Item& item) { return key(item) >> shift & (kDigits - 1); };
    if ((differing >> shift & (kDigits - 1)) == 0) continue;
    std::array<std::uint32_t, kDigits> places{};
    for (const Item& item : items) ++places[digit(item)];
    std::uint32_t sum = 0;
    for (std::uint32_t& place : places) sum += std::exchange(place, sum);
    scratch.resize(items.size());
    for (const Item& item : items) scratch[places[digit(item)]++] = item;
    items.swap(scratch);
  }
  for (auto begin = items.begin(); begin != items.end();) {
    auto end = begin + 1;
    bool ordered = true;
    for (; end != items.end() && key(*end) == key(*begin); ++end)
      ordered = ordered && !less(*end, *(end - 1));
    if (!ordered) std::sort(begin, end, less);
    begin = end;
  }
}

}  // namespace forebay::internal
