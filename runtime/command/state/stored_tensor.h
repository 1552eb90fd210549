// A tensor that lies in pieces in several files, read in order with a bounded buffer.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "forebay/data_type.h"
#include "forebay/span.h"
#include "runtime/command/state/input_file.h"

namespace forebay {

// A box of a tensor: elements [offsets, offsets + sizes), in row-major order from `at` on.
struct StoredBox {
  std::size_t file = 0;
  std::uint64_t at = 0;  // Bytes from the start of the file.
  DataType type = DataType::kFloat32;
  std::vector<std::uint64_t> offsets;
  std::vector<std::uint64_t> sizes;
};

// Requires: `shape` and all boxes have the same number of dimensions; the product of `shape` was counted.
struct StoredTensor {
  std::vector<std::uint64_t> shape;
  std::vector<StoredBox> boxes;
};

// Boxes of one tensor. Larger: a damaged file takes more memory and time.
inline constexpr std::size_t kMostBoxes = 1 << 16;

// Sorts the boxes, and checks that each is within the tensor and that all together have as many elements.
// Errors: throws Error(kCorruption), naming `name` and `path`.
void check_boxes(StoredTensor& tensor, const std::string& name, const std::string& path);

// Passes all elements to `visit` in row-major order, widened to fp32, at most `piece_count` at once.
// Errors: throws Error: kIoError, kCorruption where boxes overlap and leave an element out.
// Cost: memory for a piece and for about 32 MiB of values as they are stored; O(log boxes) for each run of
// elements that lie one after another in a box and in the tensor.
void read_boxes(const StoredTensor& tensor, InputFiles& files, std::uint64_t piece_count,
                const std::function<void(Span<const float>)>& visit);

// Widens elements of fp32, bf16 or fp16, all exactly.
void widen_elements(DataType type, const void* elements, std::size_t count, float* target);

}  // namespace forebay
