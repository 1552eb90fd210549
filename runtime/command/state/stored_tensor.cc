#include "runtime/command/state/stored_tensor.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

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
  // Requires: the box is not empty.
  BoxStream(const StoredBox& box, const std::vector<std::uint64_t>& shape, std::uint64_t window_bytes)
      : box_(box), shape_(shape), count_(volume(box.sizes)), window_(window_bytes / element_bytes(box.type)) {
    // Rows that the box has whole are one after another.
    for (std::size_t d = shape.size(); d-- > 0;) {
      row_ *= box.sizes[d];
      if (box.sizes[d] != shape[d]) break;
    }
  }

  // The place in the tensor, in row-major order, of the element that take() reads next.
  // Requires: an element is left.
  std::uint64_t place() const {
    std::uint64_t rest = next_;
    std::uint64_t stride = 1;
    std::uint64_t place = 0;
    for (std::size_t d = shape_.size(); d-- > 0;) {
      place += (box_.offsets[d] + rest % box_.sizes[d]) * stride;
      rest /= box_.sizes[d];
      stride *= shape_[d];
    }
    return place;
  }
  // Elements from place() on that lie one after another in the tensor too; 0 at the end.
  std::uint64_t run() const { return next_ == count_ ? 0 : row_ - next_ % row_; }

  // Requires: count <= run().
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

 private:
  void fill(InputFiles& files) {
    const std::uint64_t width = element_bytes(box_.type);
    begin_ = next_;
    end_ = next_ + std::min(window_, count_ - next_);
    buffer_.resize(static_cast<std::size_t>((end_ - begin_) * width));
    files.open(box_.file).read_at(box_.at + begin_ * width, buffer_.data(), buffer_.size());
  }

  const StoredBox& box_;
  const std::vector<std::uint64_t>& shape_;
  const std::uint64_t count_;
  const std::uint64_t window_;  // Elements.
  std::uint64_t row_ = 1;       // Elements that are one after another in both orders.
  std::uint64_t begin_ = 0;     // The buffer begins here.
  std::uint64_t end_ = 0;
  std::uint64_t next_ = 0;
  std::vector<std::byte> buffer_;
};

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
  for (const StoredBox& box : tensor.boxes) {
    if (volume(box.sizes) > 0) streams.emplace_back(box, tensor.shape, window);
  }
  // The streams by the place of their next element.
  using Next = std::pair<std::uint64_t, std::size_t>;
  std::priority_queue<Next, std::vector<Next>, std::greater<>> order;
  for (std::size_t i = 0; i < streams.size(); ++i) order.emplace(streams[i].place(), i);

  const std::uint64_t count = volume(tensor.shape);
  std::vector<float> piece(static_cast<std::size_t>(std::min(count, piece_count)));
  std::size_t filled = 0;
  for (std::uint64_t done = 0; done < count;) {
    if (order.empty() || order.top().first != done) {
      refuse_import(files.path(tensor.boxes.front().file),
                    "parts of a tensor overlap and leave elements out");
    }
    const std::size_t number = order.top().second;
    order.pop();
    BoxStream& box = streams[number];
    const std::uint64_t run = std::min<std::uint64_t>(box.run(), piece.size() - filled);
    box.take(files, run, piece.data() + filled);
    if (box.run() > 0) order.emplace(box.place(), number);
    filled += static_cast<std::size_t>(run);
    done += run;
    if (filled == piece.size() || done == count) {
      visit(Span<const float>(piece.data(), filled));
      filled = 0;
    }
  }
}

}  // namespace forebay
