// The order in which a trainer uses units: recorded in one step, and expected in the next. As a text it goes
// from one run into the plan of another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "forebay/plan.h"

namespace forebay {

// A unit's parameters are needed for a forward or a backward pass, or its gradient is complete and is
// reduced.
struct UnitEvent {
  enum class Kind : std::uint8_t { kForward, kBackward, kReduce };
  int unit = 0;
  Kind kind = Kind::kForward;

  bool reduces() const { return kind == Kind::kReduce; }
  friend bool operator==(UnitEvent a, UnitEvent b) { return a.unit == b.unit && a.kind == b.kind; }
  friend bool operator!=(UnitEvent a, UnitEvent b) { return !(a == b); }
};

using UnitEvents = std::vector<UnitEvent>;
using UnitPairs = std::set<std::pair<int, int>>;  // The smaller unit first.

inline void add_pair(UnitPairs& pairs, int a, int b) {
  if (a != b) pairs.emplace(std::min(a, b), std::max(a, b));
}

struct UnitOrder {
  std::vector<UnitEvents> micro_steps;  // Later micro-steps are as the last of these.
  UnitEvents evaluation;
  // Units that do not share a slot: two that were leased at once, or one that was gathered while the other
  // was leased; and those with gradients at once.
  UnitPairs parameters;
  UnitPairs gradients;

  const UnitEvents& micro_step(int index) const {
    return micro_steps[std::min(static_cast<std::size_t>(index), micro_steps.size() - 1)];
  }
  std::string text() const;
};

// "0.1.1b.1r.0b.0r/0.1/0-1/0-1": micro-steps ("+" between them), evaluation, pairs of parameters and
// gradients.
//
// Errors: kInvalidArgument if `text` is not an order of `unit_count` units.
Result<UnitOrder> parse_unit_order(std::string_view text, int unit_count);

// Forward passes in order of registration, backward passes in the reverse order. A unit is reduced after its
// backward pass; with Accumulate::kLocal all are reduced at the end.
UnitOrder registered_order(const ModelShape& model, Accumulate accumulate);

}  // namespace forebay
