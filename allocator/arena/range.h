// Range: a part of the arena's address range. RangePool holds the descriptors, so that the hot path needs no
// malloc. RangeTable finds the range that begins at an offset.
//
// The ranges of an arena tile its address range. They are linked in the order of addresses; none is empty.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "forebay/arena.h"

namespace forebay::internal {

enum class RangeKind : std::uint8_t {
  kUnmapped,  // Addresses only, called a hole. Begins and ends at chunk boundaries.
  kFree,      // Mapped and owns its memory; in the size bins of its class.
  kShadow,    // Mapped, but owns no memory. Other addresses that show the same memory own it, or none.
  kLive,      // A block.
  kAlias,     // Maps the chunks of a slot.
  kBusy,      // Claimed by the thread that holds growth_mutex_, while it calls the Backend.
  kStranded,  // Mapped, but not usable: the Backend refused to unmap it. Tried again later.
  kPaused,    // Addresses of a paused tag, without memory; see Range::paused_kind.
};

// The members that searches read come first, in one cache line.
struct alignas(64) Range {
  std::size_t offset = 0;
  std::size_t bytes = 0;
  Range* previous = nullptr;  // By address.
  Range* next = nullptr;
  // Bit i: work queued on stream i before `epoch` ended may still use these bytes. A live block keeps the
  // bits of the range it was cut from, since its owner may free it without using it.
  std::uint64_t waits = 0;
  std::uint64_t epoch = 0;
  RangeKind kind = RangeKind::kUnmapped;
  std::uint8_t region = 0;
  std::uint8_t stream = 0xFF;                // Live: the index of the stream it was allocated for.
  RangeKind paused_kind = RangeKind::kFree;  // Paused: its kind before.
  Tag tag = 0;
  Range* bin_next = nullptr;  // Free: in its bin. Unmapped: the next hole.

  Range* bin_previous = nullptr;
  Range* pending_previous = nullptr;  // Free ranges with waits != 0.
  Range* pending_next = nullptr;
  std::uint64_t recorded = 0;       // Live: streams named by record_stream.
  std::size_t slack = 0;            // Live: bytes beyond the requested ones.
  std::uint32_t slot = UINT32_MAX;  // Alias: its slot.
  std::uint32_t stranger = 0;       // Live: its number in Strangers, or 0.

  std::size_t end() const noexcept { return offset + bytes; }
};

// Allocated and not freed, even while its tag is paused.
inline bool is_block(const Range* range) noexcept {
  return range->kind == RangeKind::kLive ||
         (range->kind == RangeKind::kPaused && range->paused_kind == RangeKind::kLive);
}

// Descriptors, in slabs. A slab is allocated without a lock and stays until the pool ends.
class RangePool {
 public:
  struct alignas(64) Slab {
    Slab* next;
    std::size_t count;
    Range* ranges() noexcept { return reinterpret_cast<Range*>(this + 1); }
  };
  static_assert(sizeof(Slab) % alignof(Range) == 0);

  RangePool() noexcept = default;
  RangePool(const RangePool&) = delete;
  RangePool& operator=(const RangePool&) = delete;
  ~RangePool() {
    while (slabs_ != nullptr) {
      Slab* slab = slabs_;
      slabs_ = slab->next;
      std::free(slab);
    }
  }

  // Null when the host has no memory left.
  static Slab* make_slab(std::size_t count) noexcept {
    auto* slab = static_cast<Slab*>(std::aligned_alloc(alignof(Range), sizeof(Slab) + count * sizeof(Range)));
    if (slab == nullptr) return nullptr;
    slab->count = count;
    Range* next = nullptr;
    for (std::size_t i = count; i-- > 0;) {
      Range* range = new (slab->ranges() + i) Range;
      range->next = std::exchange(next, range);
    }
    return slab;
  }
  // Takes as long for any number of descriptors.
  void add(Slab* slab) noexcept {
    slab->next = slabs_;
    slabs_ = slab;
    capacity_ += slab->count;
    available_ += slab->count;
    slab->ranges()[slab->count - 1].next = free_;
    free_ = slab->ranges();
  }

  std::size_t capacity() const noexcept { return capacity_; }
  std::size_t available() const noexcept { return available_; }

  Range* take() noexcept {
    FOREBAY_CHECK(free_ != nullptr, "a range was split without reserving descriptors");
    Range* range = free_;
    free_ = range->next;
    --available_;
    return new (range) Range;
  }
  void give(Range* range) noexcept {
    range->next = free_;
    free_ = range;
    ++available_;
  }

 private:
  Slab* slabs_ = nullptr;
  Range* free_ = nullptr;
  std::size_t capacity_ = 0;
  std::size_t available_ = 0;
};

// Open addressing with linear probing; erasing shifts back, so there are no tombstones. Never more than half
// full, because the arena makes it twice as large as the pool.
class RangeTable {
 public:
  RangeTable() noexcept = default;
  RangeTable(const RangeTable&) = delete;
  RangeTable& operator=(const RangeTable&) = delete;
  ~RangeTable() { std::free(cells_); }

  // Touches all of it: insert would touch a new page nearly every time, with the lock held.
  static Range** make_cells(std::size_t capacity) noexcept {
    auto* cells = static_cast<Range**>(std::aligned_alloc(alignof(Range), capacity * sizeof(Range*)));
    if (cells != nullptr) std::fill_n(cells, capacity, nullptr);
    return cells;
  }
  std::size_t capacity() const noexcept { return capacity_; }

  // Moves into `cells`, whose count is a power of two, and returns the old cells for the caller to free.
  Range** adopt(Range** cells, std::size_t capacity) noexcept {
    Range** old_cells = cells_;
    const std::size_t old_capacity = capacity_;
    cells_ = cells;
    capacity_ = capacity;
    for (std::size_t i = 0; i < old_capacity; ++i) {
      if (old_cells[i] != nullptr) insert(old_cells[i]);
    }
    return old_cells;
  }

  void insert(Range* range) noexcept {
    std::size_t i = home(range->offset);
    while (cells_[i] != nullptr) i = (i + 1) & (capacity_ - 1);
    cells_[i] = range;
  }
  Range* find(std::size_t offset) const noexcept {
    for (std::size_t i = home(offset); cells_[i] != nullptr; i = (i + 1) & (capacity_ - 1)) {
      if (cells_[i]->offset == offset) return cells_[i];
    }
    return nullptr;
  }
  // `other` begins where `range`, which the table has, begins, and takes its place.
  void replace(const Range* range, Range* other) noexcept {
    std::size_t i = home(range->offset);
    while (cells_[i] != range) i = (i + 1) & (capacity_ - 1);
    cells_[i] = other;
  }
  void erase(const Range* range) noexcept {
    std::size_t hole = home(range->offset);
    while (cells_[hole] != range) hole = (hole + 1) & (capacity_ - 1);
    for (std::size_t i = (hole + 1) & (capacity_ - 1); cells_[i] != nullptr; i = (i + 1) & (capacity_ - 1)) {
      // The cell may move back only if its home does not lie between the hole and the cell.
      const std::size_t distance_from_home = (i - home(cells_[i]->offset)) & (capacity_ - 1);
      const std::size_t distance_from_hole = (i - hole) & (capacity_ - 1);
      if (distance_from_home >= distance_from_hole) {
        cells_[hole] = cells_[i];
        hole = i;
      }
    }
    cells_[hole] = nullptr;
  }

 private:
  std::size_t home(std::size_t offset) const noexcept {
    // Fibonacci hashing of the granule index: neighbours spread.
    return static_cast<std::size_t>((offset / kBlockGranule * 0x9E3779B97F4A7C15ull) >>
                                    (64 - std::countr_zero(capacity_)));
  }

  Range** cells_ = nullptr;
  std::size_t capacity_ = 0;
};

}  // namespace forebay::internal
