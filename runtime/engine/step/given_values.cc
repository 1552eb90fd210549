#include "runtime/engine/step/given_values.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <sstream>

namespace forebay {
namespace {

// A sum over elements, so that no order of calls changes it: the bits of each times a number of its place.
std::uint64_t hash_of(std::uint64_t first, Span<const float> values, bool rule) {
  constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15u;
  std::uint64_t sum = 0;
  std::uint64_t place = (first + 1) * kStep ^ (rule ? ~std::uint64_t{0} : 0);
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
    return Status(StatusCode::kInvalidArgument,
                  "ranks " + std::to_string(low) + " and " + std::to_string(high) +
                      " of the grid were given different values of a unit that their pipeline stages share; "
                      "give all of these stages the same values");
  }
  return {};
}

void GivenValues::give(const std::string& name, std::uint64_t first, Span<const float> values,
                       std::uint64_t count, bool rule, bool shared) {
  if (values.empty()) return;
  const auto named = [&](std::uint64_t hash) { return XXH3_64bits_withSeed(name.data(), name.size(), hash); };
  std::uint64_t change = 0;
  const auto [entry, is_new] = by_name_.try_emplace(name, 0);
  if (!is_new) change -= named(entry->second);
  if (values.size() == count) entry->second = 0;
  entry->second += hash_of(first, values, rule);
  change += named(entry->second);
  all_ += change;
  if (shared) shared_ += change;
}

void GivenValues::clear() {
  *this = {};
}

std::string GivenValues::text() const {
  std::ostringstream text;
  for (const auto& [name, hash] : by_name_)
    text << "the hash of the values given to parameter " << name << '\t' << std::hex << hash << '\n';
  return text.str();
}

}  // namespace forebay
