// TensorPlaces: where the elements of a divided tensor lie in its parts, and the reverse.
#pragma once

#include <cstdint>
#include <optional>

#include "forebay/status.h"
#include "forebay/tensor_split.h"

namespace forebay::internal {

class TensorPlaces {
 public:
  // A tensor in one part.
  explicit TensorPlaces(std::uint64_t count = 0)
      : count_(count), extent_(count), section_(count), piece_(count) {}
  // Errors: kInvalidArgument naming the member that is out of range.
  static Result<TensorPlaces> of(const TensorSplit& split);

  // Elements of the whole tensor, and of each part with its padding.
  std::uint64_t count() const { return count_; }
  std::uint64_t part_count() const {
    return parts_ == 1 ? count_ : outer_ * (extent_ / section_) * piece_ * inner_;
  }
  std::uint64_t parts() const { return parts_; }

  // Elements that lie one after the other both in the tensor and in a part.
  struct InPart {
    std::uint64_t part = 0;
    std::uint64_t at = 0;  // Elements from the start of the part.
    std::uint64_t count = 0;
  };
  // The elements from `at` of the tensor on. Requires: at < count().
  InPart find(std::uint64_t at) const;

  struct InWhole {
    std::optional<std::uint64_t> at;  // Elements from the start of the tensor. None: padding.
    std::uint64_t count = 0;
  };
  // The elements from `at` of a part on. Requires: part < parts(), at < part_count().
  InWhole place(std::uint64_t part, std::uint64_t at) const;

 private:
  std::uint64_t count_ = 0;
  std::uint64_t outer_ = 1;   // The product of the extents before the divided dimension,
  std::uint64_t extent_ = 0;  // its own extent,
  std::uint64_t inner_ = 1;   // and the product of those after it.
  std::uint64_t section_ = 0;
  std::uint64_t piece_ = 0;  // Elements of a section in a part, with padding.
  std::uint64_t parts_ = 1;
};

}  // namespace forebay::internal
