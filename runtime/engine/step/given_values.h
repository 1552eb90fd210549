#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/span.h"

namespace forebay {

// A rank that decides about steps, and the units that it shares with other pipeline stages.
struct SharingRank {
  std::uint64_t units = 0;  // A hash that all stages with these units have; 0: it shares none.
  std::uint64_t rank = 0;   // In the grid.
};

// `given`: what GivenValues::shared() is on each of `ranks`.
// Errors: kInvalidArgument naming two ranks of the same units that were given different values.
Status check_shared_values(const std::vector<SharingRank>& ranks, const std::vector<std::uint64_t>& given);

// Hashes of the values given to parameters. They are the same for equal values, whatever the calls and their
// order, unless a part was given twice and the whole never after it.
class GivenValues {
 public:
  // `values` from element `first` on, of `count` in all. `rule`: what else the call must have in common.
  // `shared`: by pipeline stages.
  void give(const std::string& name, std::uint64_t first, Span<const float> values, std::uint64_t count,
            bool rule, bool shared);
  void clear();

  std::uint64_t all() const { return all_; }
  std::uint64_t shared() const { return shared_; }
  // A line for each parameter, for agree_on_text().
  std::string text() const;

 private:
  std::map<std::string, std::uint64_t> by_name_;
  std::uint64_t all_ = 0;
  std::uint64_t shared_ = 0;
};

}  // namespace forebay
