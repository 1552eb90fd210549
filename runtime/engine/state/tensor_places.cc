#include "runtime/engine/state/tensor_places.h"

#include <algorithm>
#include <string>

#include "forebay/units.h"

namespace forebay::internal {
namespace {

// More elements than any memory has, and few enough that no product below overflows.
constexpr std::uint64_t kMostElements = std::uint64_t{1} << 56;

bool multiply(std::uint64_t& product, std::uint64_t factor) {
  return !__builtin_mul_overflow(product, factor, &product) && product <= kMostElements;
}

Status refuse(const std::string& finding) {
  return {StatusCode::kInvalidArgument, "a split of a tensor " + finding +
                                            "; give the shape of the whole tensor, one of its dimensions, "
                                            "sections that divide it, and a part below the number of parts"};
}

}  // namespace

Result<TensorPlaces> TensorPlaces::of(const TensorSplit& split) {
  TensorPlaces places;
  if (split.dimension < 0 || static_cast<std::size_t>(split.dimension) >= split.shape.size()) {
    return refuse("has dimension " + std::to_string(split.dimension) + " of " +
                  std::to_string(split.shape.size()));
  }
  const auto divided = static_cast<std::size_t>(split.dimension);
  places.count_ = 1;
  for (std::size_t d = 0; d < split.shape.size(); ++d) {
    if (split.shape[d] == 0 || !multiply(places.count_, split.shape[d]))
      return refuse("has the extent " + std::to_string(split.shape[d]));
    if (d < divided) places.outer_ *= split.shape[d];
    if (d > divided) places.inner_ *= split.shape[d];
  }
  places.extent_ = split.shape[divided];
  if (split.sections == 0 || places.extent_ % split.sections != 0)
    return refuse("has " + std::to_string(split.sections) + " sections of an extent of " +
                  std::to_string(places.extent_));
  if (split.parts == 0 || split.parts > kMostElements || split.part >= split.parts)
    return refuse("has part " + std::to_string(split.part) + " of " + std::to_string(split.parts));
  places.section_ = places.extent_ / split.sections;
  places.parts_ = split.parts;
  places.piece_ = ceil_div(places.section_, split.parts);
  return places;
}

TensorPlaces::InPart TensorPlaces::find(std::uint64_t at) const {
  if (parts_ == 1) return {0, at, count_ - at};
  const std::uint64_t row = at / (extent_ * inner_);
  const std::uint64_t column = at / inner_ % extent_;
  const std::uint64_t in_section = column % section_;
  const std::uint64_t in_piece = in_section % piece_;
  const std::uint64_t sections_before = row * (extent_ / section_) + column / section_;
  const std::uint64_t skipped = at % inner_;
  return {in_section / piece_, (sections_before * piece_ + in_piece) * inner_ + skipped,
          std::min(piece_ - in_piece, section_ - in_section) * inner_ - skipped};
}

TensorPlaces::InWhole TensorPlaces::place(std::uint64_t part, std::uint64_t at) const {
  if (parts_ == 1) return {at, count_ - at};
  const std::uint64_t sections_before = at / (piece_ * inner_);
  const std::uint64_t in_piece = at / inner_ % piece_;
  const std::uint64_t in_section = part * piece_ + in_piece;
  const std::uint64_t skipped = at % inner_;
  if (in_section >= section_) return {std::nullopt, (piece_ - in_piece) * inner_ - skipped};
  // The sections of all rows lie one after the other.
  return {(sections_before * section_ + in_section) * inner_ + skipped,
          std::min(piece_ - in_piece, section_ - in_section) * inner_ - skipped};
}

}  // namespace forebay::internal
