// BaselineAllocator: a caching allocator with best fit and coalescing, as deep-learning frameworks have it.
// It takes large segments from the device, splits and joins blocks within a segment, caches everything, and
// gives wholly free segments back when the device has no more memory. It serves only as forebay's yardstick
// for replays: no product path allocates from it, and its figures are not those of any framework.
//
// Source: the sizes and rules are those PyTorch documents for its native allocator.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <unordered_map>

#include "forebay/backend.h"
#include "forebay/units.h"

namespace forebay {

class BaselineAllocator {
 public:
  static constexpr std::size_t kRounding = 512;           // Block sizes are multiples of it.
  static constexpr std::size_t kSmallLimit = 1_MiB;       // Requests up to this share small segments.
  static constexpr std::size_t kSmallSegment = 2_MiB;     // Bytes of those.
  static constexpr std::size_t kMiddleLimit = 10_MiB;     // Requests below this share segments
  static constexpr std::size_t kMiddleSegment = 20_MiB;   // of this size.
  static constexpr std::size_t kSegmentRounding = 2_MiB;  // Larger ones get a segment, rounded.

  // Requires: `backend` outlives it.
  explicit BaselineAllocator(Backend& backend) : backend_(backend) {}
  ~BaselineAllocator();
  BaselineAllocator(const BaselineAllocator&) = delete;
  BaselineAllocator& operator=(const BaselineAllocator&) = delete;

  // Memory freed on one stream is used again by that stream alone. Errors: those of Backend::alloc, after
  // cached segments have been given back.
  Result<DevicePtr> allocate(std::size_t bytes, std::uint32_t stream);
  // Errors: kInvalidArgument if no live block starts at that address.
  Status free(DevicePtr block);

 private:
  struct Block {
    DevicePtr address = nullptr;
    std::size_t bytes = 0;
    std::uint32_t stream = 0;
    bool small = false;
    bool live = false;
    Block* before = nullptr;  // Neighbours within the segment.
    Block* after = nullptr;
  };
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      if (a->stream != b->stream) return a->stream < b->stream;
      if (a->bytes != b->bytes) return a->bytes < b->bytes;
      return a->address < b->address;
    }
  };
  using Pool = std::set<Block*, BySize>;

  Pool& pool_of(const Block& block) { return block.small ? small_ : large_; }
  Result<Block*> take_segment(std::size_t bytes, std::uint32_t stream, bool small);
  // Gives wholly free segments back to the device; true if there were any.
  bool give_back_segments(Pool& pool);
  void split(Block* block, std::size_t bytes);
  void join(Block* block, Block* with);

  Backend& backend_;
  Pool small_;  // Free blocks.
  Pool large_;
  std::unordered_map<DevicePtr, std::unique_ptr<Block>> blocks_;  // All, by address.
};

}  // namespace forebay
