#include "runtime/engine/step/given_values.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <sstream>

namespace forebay {
namespace {

// A sum over elements, so that no order of calls changes it: the bits of each times a number of its place.
std::uint64_t sum_of(std::uint64_t first, Span<const float> values) {
  constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15u;
  std::uint64_t sum = 0;
  std::uint64_t place = (first + 1) * kStep;
  for (const float value : values) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    sum += bits * (place ^ place >> 32);
    place += kStep;
  }
  return sum;
}

}  // namespace

Status check_shared_values(const std::vector<SharingRank>& ranks, const std::vector<std::uint64_t>& given) {
  std::map<std::uint64_t, std::size_t> firsts;  // By units: the first rank that has them.
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].units == 0) continue;
    const std::size_t first = firsts.try_emplace(ranks[i].units, i).first->second;
    if (given[i] == given[first]) continue;
    const auto [low, high] = std::minmax(ranks[i].rank, ranks[first].rank);
    return Status(
        StatusCode::kInvalidArgument,
        "ranks " + std::to_string(low) + " and " + std::to_string(high) +
            " of the grid were given different values of a unit that their pipeline stages share, or one "
            "of them alone called freeze() or reset_moments(); give all of these stages the same");
  }
  return {};
}

std::uint64_t GivenValues::Given::hash() const {
  std::vector<std::uint64_t> words = {older, sum, keeps_equal ? 1u : 0u};
  for (const auto& [begin, end] : covered) words.insert(words.end(), {begin, end});
  return XXH3_64bits(words.data(), words.size() * sizeof(std::uint64_t));
}

// Whether it has an element of the range.
bool GivenValues::Given::covers(std::uint64_t first, std::uint64_t end) const {
  const auto after = covered.lower_bound(end);
  return after != covered.begin() && std::prev(after)->second > first;
}

// Requires: it has no element of the range.
void GivenValues::Given::cover(std::uint64_t first, std::uint64_t end) {
  const auto after = covered.find(end);
  if (after != covered.end()) {
    end = after->second;
    covered.erase(after);
  }
  const auto next = covered.upper_bound(first);
  if (next != covered.begin() && std::prev(next)->second == first) {
    std::prev(next)->second = end;
  } else {
    covered.emplace(first, end);
  }
}

void GivenValues::give(const std::string& name, std::uint64_t first, Span<const float> values,
                       std::uint64_t count, bool keeps_equal, bool shared) {
  if (values.empty()) return;
  Given& given = by_name_[name];
  const std::uint64_t end = first + values.size();
  if (!given.covered.empty() && (given.keeps_equal != keeps_equal || given.covers(first, end)))
    given = {.older = given.hash()};
  given.keeps_equal = keeps_equal;
  given.is_shared = shared;
  given.cover(first, end);
  given.sum += sum_of(first, values);
  // Nothing is left of older values.
  if (!keeps_equal && given.covered.begin()->second - given.covered.begin()->first == count) given.older = 0;
}

std::uint64_t GivenValues::sum_of_hashes(bool only_shared) const {
  std::uint64_t sum = 0;
  for (const auto& [name, given] : by_name_) {
    if (given.is_shared || !only_shared) sum += XXH3_64bits_withSeed(name.data(), name.size(), given.hash());
  }
  return sum;
}

std::uint64_t GivenValues::of(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? 0 : found->second.hash();
}

std::string GivenValues::text() const {
  std::ostringstream text;
  for (const auto& [name, given] : by_name_)
    text << "the hash of the values given to parameter " << name << '\t' << std::hex << given.hash() << '\n';
  return text.str();
}

}  // namespace forebay
