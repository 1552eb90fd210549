// TensorSplit: how tensor-parallel ranks divide a tensor. Saved state keeps it, so that any grid of ranks
// finds its part in a state of any other grid.
#pragma once

#include <cstdint>
#include <vector>

#include "forebay/language.h"

namespace forebay {

// One rank's part of a tensor in row-major order. One dimension is divided into `sections` of equal length,
// and each section into `parts` pieces of ceil(length / parts); a part has its piece of each section. Where
// the parts do not divide a section, the last ones are padded, and the padding is not saved.
//
//   {.shape = {1600, 4800}, .dimension = 1, .sections = 3, .part = 2, .parts = 4}
//
// is the third of four parts, of shape {1600, 1200}, of a matrix [in, out] that has query, key and value side
// by side.
struct TensorSplit {
  std::vector<std::uint64_t> shape;  // The whole tensor's dimensions.
  int dimension = 0;                 // That is divided.
  std::uint64_t sections = 1;        // Divides that dimension.
  std::uint64_t part = 0;
  std::uint64_t parts = 1;
};

}  // namespace forebay
