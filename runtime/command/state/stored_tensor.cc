#include "runtime/command/state/stored_tensor.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "forebay/conversions.h"
#include "forebay/text.h"

namespace forebay {
namespace {

// For all boxes that are under way. Smaller: columns of a tensor are read in small pieces. Larger: more
// memory.
constexpr std::uint64_t kBufferBytes = 32u << 20;
constexpr std::uint64_t kMostWindowBytes = 1u << 20;
constexpr std::uint64_t kLeastWindowBytes = 512;

std::uint64_t volume(const std::vector<std::uint64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{1}, std::multiplies<>());
}

// The elements of a box in order. Reading a tensor in row-major order reads each of its boxes so.
class BoxStream {
 public:
  BoxStream(const StoredBox& box, std::uint64_t window_bytes)
      : box_(box), count_(volume(box.sizes)), window_(window_bytes / element_bytes(box.type)) {}

  // Requires: the box has so many more.
  void take(InputFiles& files, std::uint64_t count, float* target) {
    const std::uint64_t width = element_bytes(box_.type);
    while (count > 0) {
      if (next_ == end_) fill(files);
      const std::uint64_t part = std::min(count, end_ - next_);
      const std::size_t from = static_cast<std::size_t>((next_ - begin_) * width);
      widen_elements(box_.type, buffer_.data() + from, static_cast<std::size_t>(part), target);
      next_ += part;
      target += part;
      count -= part;
    }
    if (next_ == count_) buffer_ = {};
  }
  std::uint64_t left() const { return count_ - next_; }

 private:
  void fill(InputFiles& files) {
    const std::uint64_t width = element_bytes(box_.type);
    begin_ = next_;
    end_ = next_ + std::min(window_, count_ - next_);
    buffer_.resize(static_cast<std::size_t>((end_ - begin_) * width));
    files.open(box_.file).read_at(box_.at + begin_ * width, buffer_.data(), buffer_.size());
  }

  const StoredBox& box_;
  const std::uint64_t count_;
  const std::uint64_t window_;  // Elements.
  std::uint64_t begin_ = 0;     // The buffer begins here.
  std::uint64_t end_ = 0;
  std::uint64_t next_ = 0;
  std::vector<std::byte> buffer_;
};

// Elements from `place` on that lie in the box one after another in both orders; 0 if it is not in the box.
std::uint64_t run_in(const StoredBox& box, const std::vector<std::uint64_t>& shape,
                     const std::vector<std::uint64_t>& place) {
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (place[d] < box.offsets[d] || place[d] - box.offsets[d] >= box.sizes[d]) return 0;
  }
  // Rows that the box has whole are one after another.
  std::uint64_t run = 1;
  std::uint64_t passed = 0;  // Elements of the row before `place`.
  for (std::size_t d = shape.size(); d-- > 0;) {
    passed += (place[d] - box.offsets[d]) * run;
    run *= box.sizes[d];
    if (box.sizes[d] != shape[d]) break;
  }
  return run - passed;
}

void advance(std::vector<std::uint64_t>& place, const std::vector<std::uint64_t>& shape,
             std::uint64_t count) {
  for (std::size_t d = shape.size(); d-- > 0 && count > 0;) {
    const std::uint64_t sum = place[d] + count;
    place[d] = sum % shape[d];
    count = sum / shape[d];
  }
}

}  // namespace

void widen_elements(DataType type, const void* elements, std::size_t count, float* target) {
  if (type == DataType::kFloat32) {
    std::memcpy(target, elements, count * sizeof(float));
    return;
  }
  const auto* at = static_cast<const std::byte*>(elements);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t half = 0;
    std::memcpy(&half, at + i * sizeof half, sizeof half);
    target[i] = type == DataType::kBfloat16 ? bfloat16_to_float(half) : float16_to_float(half);
  }
}

void check_boxes(StoredTensor& tensor, const std::string& name, const std::string& path) {
  const auto refuse = [&] {
    refuse_import(path, "the parts of " + shown_value(name) + " do not make the whole tensor");
  };
  const std::vector<std::uint64_t>& shape = tensor.shape;
  if (tensor.boxes.empty() || tensor.boxes.size() > kMostBoxes) refuse();
  std::uint64_t sum = 0;
  for (const StoredBox& box : tensor.boxes) {
    if (box.offsets.size() != shape.size() || box.sizes.size() != shape.size()) refuse();
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (box.offsets[d] > shape[d] || box.sizes[d] > shape[d] - box.offsets[d]) refuse();
    }
    if (__builtin_add_overflow(sum, volume(box.sizes), &sum)) refuse();
  }
  if (sum != volume(shape)) refuse();
  std::sort(tensor.boxes.begin(), tensor.boxes.end(),
            [](const StoredBox& a, const StoredBox& b) { return a.offsets < b.offsets; });
}

void read_boxes(const StoredTensor& tensor, InputFiles& files, std::uint64_t piece_count,
                const std::function<void(Span<const float>)>& visit) {
  const std::uint64_t window = std::clamp(kBufferBytes / std::max<std::uint64_t>(tensor.boxes.size(), 1),
                                          kLeastWindowBytes, kMostWindowBytes);
  std::vector<BoxStream> streams;
  streams.reserve(tensor.boxes.size());
  for (const StoredBox& box : tensor.boxes) streams.emplace_back(box, window);
  const std::uint64_t count = volume(tensor.shape);
  std::vector<float> piece(static_cast<std::size_t>(std::min(count, piece_count)));
  std::vector<std::uint64_t> place(tensor.shape.size(), 0);
  std::size_t box = 0;
  std::size_t filled = 0;
  for (std::uint64_t done = 0; done < count;) {
    std::uint64_t run = 0;
    // In order of their offsets, the box that follows is the next one as a rule.
    for (std::size_t tried = 0; tried < streams.size() && run == 0; ++tried) {
      if (tried > 0 || streams[box].left() == 0) box = (box + 1) % streams.size();
      run = std::min(run_in(tensor.boxes[box], tensor.shape, place), streams[box].left());
    }
    if (run == 0) {
      refuse_import(files.path(tensor.boxes.front().file),
                    "parts of a tensor overlap and leave elements out");
    }
    run = std::min<std::uint64_t>(run, piece.size() - filled);
    streams[box].take(files, run, piece.data() + filled);
    advance(place, tensor.shape, run);
    filled += static_cast<std::size_t>(run);
    done += run;
    if (filled == piece.size() || done == count) {
      visit(Span<const float>(piece.data(), filled));
      filled = 0;
    }
  }
}

}  // namespace forebay
