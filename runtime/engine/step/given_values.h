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

// Hashes of the values given to parameters since the ranks agreed about them last: equal where the values are
// equal, whatever the calls and their order. Where only a part of a parameter was given again, its older
// values count too.
class GivenValues {
 public:
  // `values` from element `first` on, of `count` in all. `keeps_equal`: they change only what differs from
  // them. `shared`: by pipeline stages.
  void give(const std::string& name, std::uint64_t first, Span<const float> values, std::uint64_t count,
            bool keeps_equal, bool shared);
  void clear() { *this = {}; }

  std::uint64_t all() const { return sum_of_hashes(false); }
  std::uint64_t shared() const { return sum_of_hashes(true); }
  std::uint64_t of(const std::string& name) const;
  // A line for each parameter, for agree_on_text().
  std::string text() const;

 private:
  // The last values of a parameter, which cover each element once at most, and those before them.
  struct Given {
    std::uint64_t older = 0;  // In order.
    std::uint64_t sum = 0;
    std::map<std::uint64_t, std::uint64_t> covered;  // Ends of ranges by their begins, none next to another.
    bool keeps_equal = false;
    bool is_shared = false;

    std::uint64_t hash() const;
    bool covers(std::uint64_t first, std::uint64_t end) const;
    void cover(std::uint64_t first, std::uint64_t end);
  };
  std::uint64_t sum_of_hashes(bool only_shared) const;

  std::map<std::string, Given> by_name_;
};

}  // namespace forebay
