// The physical chunks that the arena holds, and the addresses at which each is mapped.
//
// A chunk may be mapped at several addresses. The Ranges (range.h) say which of them owns which of its bytes:
// each byte is owned by at most one address, through a Range that is free or live. The other addresses that
// show it are shadows.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "allocator/arena/range.h"
#include "forebay/backend.h"
#include "forebay/check.h"
#include "forebay/host_room.h"

namespace forebay::internal {

inline constexpr std::uint32_t kNone = UINT32_MAX;

// Addresses of one chunk that a miss looks at, the latest first. More: misses take longer in a job of many
// different steps. Fewer: more blocks are stitched.
inline constexpr std::size_t kViewsMax = 4;

struct PhysicalChunk {
  Chunk handle;
  std::size_t bytes = 0;
  std::uint32_t first_mapping = kNone;  // kNone: mapped nowhere; the chunk is a spare.
  // Its latest addresses, in granules: those of first_mapping and the ones behind it. kNone: no further one.
  std::uint32_t views[kViewsMax] = {kNone, kNone, kNone, kNone};
  std::uint32_t next = kNone;      // The next spare, or the next unused entry.
  std::uint32_t previous = kNone;  // The previous spare.
  std::uint32_t owner = kNone;     // A hint: the mapping that owned its memory last. May be outdated.
  std::uint32_t learned = kNone;   // The learnt chunk that it stands for.
  std::uint32_t stamp = 0;         // Scratch of a search.
  std::uint32_t part = kNone;      // Scratch of gather: the first of its parts.
  std::int8_t breakable = -1;      // Scratch of StitchSearch: not known, no, yes.
  bool held = false;               // The entry is in use.
  bool paused = false;             // Destroyed until resume makes it, and its mappings, again.
};

struct Mapping {
  std::size_t offset = 0;  // In the arena's address range.
  std::uint32_t chunk = kNone;
  std::uint32_t next = kNone;  // The next of the same chunk, or the next unused entry.
  bool made = true;            // False while its tag is paused.
};

// A set of chunks, by index. reserve makes room; nothing else allocates memory. clear and for_each take time
// for the chunks in the set, and little for the others.
class ChunkSet {
 public:
  std::size_t room() const noexcept { return words_.size() * kWordBits; }
  // False if the host has no memory.
  bool reserve(std::size_t chunk_count) {
    if (room() >= chunk_count) return true;
    const std::size_t word_count = (chunk_count + kWordBits - 1) / kWordBits;
    const std::size_t used_count = (word_count + kWordBits - 1) / kWordBits;
    if (!make_vector_room(words_, word_count) || !make_vector_room(used_, used_count)) return false;
    words_.resize(word_count);
    used_.resize(used_count);
    return true;
  }
  void clear() noexcept {
    for (std::size_t i = 0; i < used_.size(); ++i) {
      for (std::uint64_t left = std::exchange(used_[i], 0); left != 0; left &= left - 1)
        words_[i * kWordBits + static_cast<std::size_t>(std::countr_zero(left))] = 0;
    }
  }
  bool has(std::uint32_t chunk) const noexcept {
    return (words_[chunk / kWordBits] >> (chunk % kWordBits) & 1) != 0;
  }
  void add(std::uint32_t chunk) noexcept {
    const std::size_t word = chunk / kWordBits;
    words_[word] |= std::uint64_t{1} << (chunk % kWordBits);
    used_[word / kWordBits] |= std::uint64_t{1} << (word % kWordBits);
  }
  void remove(std::uint32_t chunk) noexcept {
    words_[chunk / kWordBits] &= ~(std::uint64_t{1} << (chunk % kWordBits));
  }
  // Visits the chunks, the lowest index first; the visitor may remove the chunk.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::size_t i = 0; i < used_.size(); ++i) {
      for (std::uint64_t words = used_[i]; words != 0; words &= words - 1) {
        const std::size_t word = i * kWordBits + static_cast<std::size_t>(std::countr_zero(words));
        for (std::uint64_t left = words_[word]; left != 0; left &= left - 1)
          visit(static_cast<std::uint32_t>(word * kWordBits) +
                static_cast<std::uint32_t>(std::countr_zero(left)));
      }
    }
  }

 private:
  static constexpr std::size_t kWordBits = 64;
  std::vector<std::uint64_t> words_;
  std::vector<std::uint64_t> used_;  // Bit i: word i may have a chunk.
};

// Entries by index, which never move. Room is made without a lock (make_leaf, add), so take cannot fail.
template <typename Entry>
class EntryPool {
 public:
  EntryPool() noexcept = default;
  EntryPool(const EntryPool&) = delete;
  EntryPool& operator=(const EntryPool&) = delete;
  ~EntryPool() {
    for (Entry* leaf : leaves_) std::free(leaf);
  }

  std::uint32_t size() const noexcept { return used_; }  // Indices in use are below this.
  std::size_t available() const noexcept { return available_; }

  // Room for kLeafCount entries, which take makes, or null if the host has no memory.
  static Entry* make_leaf() noexcept { return static_cast<Entry*>(std::malloc(kLeafCount * sizeof(Entry))); }
  static constexpr std::size_t kLeafCount = 4096;
  bool full() const noexcept { return leaf_count_ == kLeavesMax; }
  void add(Entry* leaf) noexcept {
    leaves_[leaf_count_++] = leaf;
    available_ += kLeafCount;
  }

  Entry& operator[](std::uint32_t index) noexcept { return leaves_[index / kLeafCount][index % kLeafCount]; }
  const Entry& operator[](std::uint32_t index) const noexcept {
    return leaves_[index / kLeafCount][index % kLeafCount];
  }

  std::uint32_t take() noexcept {
    FOREBAY_CHECK(available_ > 0, "an entry was taken without room of %zu", available_);
    --available_;
    const std::uint32_t index = free_ == kNone ? used_++ : std::exchange(free_, (*this)[free_].next);
    new (&(*this)[index]) Entry;
    return index;
  }
  void give(std::uint32_t index) noexcept {
    (*this)[index] = Entry();
    (*this)[index].next = free_;
    free_ = index;
    ++available_;
  }

 private:
  // 16 million entries: 32 TiB in chunks of 2 MiB.
  static constexpr std::size_t kLeavesMax = 4096;
  Entry* leaves_[kLeavesMax] = {};
  std::size_t leaf_count_ = 0;
  std::size_t available_ = 0;
  std::uint32_t used_ = 0;
  std::uint32_t free_ = kNone;
};

// The range, mapping and chunk at each granule of the address range. A granule is as large as the smallest
// chunk. Two levels, so that a large reservation costs nothing until it is used. Entries of unmapped granules
// have no meaning.
class GranuleTable {
 public:
  struct Entry {
    Range* range = nullptr;         // The range that has the granule's first byte.
    std::uint32_t mapping = kNone;  // The mapping that covers it; kNone under an alias of a slot.
    std::uint32_t chunk = kNone;    // The chunk of that mapping.
  };
  // `granule_bytes`: a power of two.
  explicit GranuleTable(std::size_t granule_bytes) noexcept : shift_(std::countr_zero(granule_bytes)) {}
  GranuleTable(const GranuleTable&) = delete;
  GranuleTable& operator=(const GranuleTable&) = delete;
  ~GranuleTable() {
    for (std::size_t i = 0; i < leaf_count_; ++i) std::free(leaves_[i]);
    std::free(leaves_);
  }

  // False if the host has no memory. Called once.
  bool start(std::size_t reserve_bytes) noexcept {
    leaf_count_ = (reserve_bytes >> shift_) / kLeafCount + 1;
    leaves_ = static_cast<Entry**>(std::calloc(leaf_count_, sizeof(Entry*)));
    return leaves_ != nullptr;
  }
  // Allocates the leaves that [begin, end) still lacks. Called without mutex_, by one thread at a time. False
  // if the host has no memory; `leaves` then holds those allocated so far.
  bool make_leaves(std::size_t begin, std::size_t end, std::vector<std::pair<std::size_t, Entry*>>* leaves) {
    const std::size_t last = ((end - 1) >> shift_) / kLeafCount;
    for (std::size_t i = (begin >> shift_) / kLeafCount; i <= last; ++i) {
      if (leaves_[i] != nullptr) continue;
      auto* leaf = static_cast<Entry*>(std::malloc(kLeafCount * sizeof(Entry)));
      if (leaf == nullptr || !make_vector_room(*leaves, leaves->size() + 1)) {
        std::free(leaf);
        return false;
      }
      for (std::size_t j = 0; j < kLeafCount; ++j) new (leaf + j) Entry;
      leaves->push_back({i, leaf});
    }
    return true;
  }
  void install(std::size_t index, Entry* leaf) noexcept { leaves_[index] = leaf; }
  // Null where no entries have been made.
  const Entry* find(std::size_t offset) const noexcept {
    const std::size_t index = offset >> shift_;
    const Entry* leaf = leaves_[index / kLeafCount];
    return leaf == nullptr ? nullptr : leaf + index % kLeafCount;
  }
  Entry& at(std::size_t offset) noexcept {
    const std::size_t index = offset >> shift_;
    return leaves_[index / kLeafCount][index % kLeafCount];
  }
  // How many granules, from that of `one` on, show the same chunks as those from that of `other` on. Looks at
  // `most`.
  std::size_t alike(std::size_t one, std::size_t other, std::size_t most) const noexcept {
    std::size_t i = one >> shift_;
    std::size_t j = other >> shift_;
    std::size_t left = most;
    while (left > 0) {
      const std::size_t row = std::min({left, kLeafCount - i % kLeafCount, kLeafCount - j % kLeafCount});
      const Entry* a = leaves_[i / kLeafCount] + i % kLeafCount;
      const Entry* b = leaves_[j / kLeafCount] + j % kLeafCount;
      for (std::size_t k = 0; k < row; ++k) {
        if (a[k].chunk != b[k].chunk) return most - left + k;
      }
      i += row;
      j += row;
      left -= row;
    }
    return most;
  }
  // The granules that begin inside [begin, end) belong to `range`.
  void own(Range* range, std::size_t begin, std::size_t end) noexcept {
    const std::size_t rest = (std::size_t{1} << shift_) - 1;
    const std::size_t last = (end + rest) >> shift_;
    for (std::size_t index = (begin + rest) >> shift_; index < last;) {
      Entry* leaf = leaves_[index / kLeafCount];
      const std::size_t leaf_end = std::min(last, (index / kLeafCount + 1) * kLeafCount);
      if (leaf != nullptr) {
        // Large blocks have hundreds: four at a time.
        Entry* entry = leaf + index % kLeafCount;
        std::size_t left = leaf_end - index;
        for (; left >= 4; left -= 4, entry += 4) {
          entry[0].range = range;
          entry[1].range = range;
          entry[2].range = range;
          entry[3].range = range;
        }
        for (; left > 0; --left, ++entry) entry->range = range;
      }
      index = leaf_end;
    }
  }
  void own(Range* range) noexcept { own(range, range->offset, range->end()); }
  // Enters that [begin, end) is unmapped.
  void clear(std::size_t begin, std::size_t end) noexcept {
    for (std::size_t index = begin >> shift_; index < end >> shift_; ++index) {
      Entry* leaf = leaves_[index / kLeafCount];
      if (leaf != nullptr) leaf[index % kLeafCount] = Entry();
    }
  }

 private:
  static constexpr std::size_t kLeafCount = 1024;
  const int shift_;
  Entry** leaves_ = nullptr;
  std::size_t leaf_count_ = 0;
};

}  // namespace forebay::internal
