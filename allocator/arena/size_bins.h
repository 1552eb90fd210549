// SizeBins: free ranges by size, in the two-level classes of TLSF. There is a row for each power of two, with
// sixteen columns, and bitmaps that find the next class in use in two bit scans.
//
// The empty state is all zero bits, so an array of these may come from calloc and costs memory only where it
// is used.
// Source: Masmano et al., "TLSF: a New Dynamic Memory Allocator for Real-Time Systems", ECRTS 2004.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "allocator/arena/range.h"
#include "forebay/units.h"

namespace forebay::internal {

// True if a block of `bytes` aligned to `alignment`, a power of two, fits in [begin, end).
inline bool block_fits(std::size_t begin, std::size_t end, std::size_t bytes,
                       std::size_t alignment) noexcept {
  const std::size_t start = align_up(begin, alignment);
  return start <= end && bytes <= end - start;
}

struct SizeBins {
  static constexpr unsigned kColumnBits = 4;
  static constexpr unsigned kColumns = 1u << kColumnBits;
  static constexpr unsigned kRows = 40;  // Up to 2^52 bytes, more than an address space holds.
  static constexpr unsigned kNone = kRows * kColumns;

  std::uint64_t rows = 0;  // Bit r: row r is not empty.
  std::size_t bytes = 0;   // The sum of all ranges.
  std::uint16_t columns[kRows] = {};
  Range* heads[kRows * kColumns] = {};

  static unsigned bin_of(std::size_t bytes) noexcept {
    const std::uint64_t granules = bytes / kBlockGranule;
    if (granules < kColumns) return static_cast<unsigned>(granules);
    const unsigned top = std::bit_width(granules) - 1;
    const unsigned row = top - kColumnBits + 1;
    return row * kColumns + static_cast<unsigned>((granules >> (top - kColumnBits)) & (kColumns - 1));
  }

  // The first bin from `bin` on that is not empty, or kNone.
  unsigned next_filled(unsigned bin) const noexcept {
    if (bin >= kNone) return kNone;
    const unsigned row = bin / kColumns;
    const unsigned here = columns[row] & (0xFFFFu << (bin % kColumns));
    if (here != 0) return row * kColumns + static_cast<unsigned>(std::countr_zero(here));
    const std::uint64_t above = row + 1 < 64 ? rows & (~std::uint64_t{0} << (row + 1)) : 0;
    if (above == 0) return kNone;
    const auto filled = static_cast<unsigned>(std::countr_zero(above));
    return filled * kColumns + static_cast<unsigned>(std::countr_zero(columns[filled]));
  }

  void insert(Range* range) noexcept {
    bytes += range->bytes;
    const unsigned bin = bin_of(range->bytes);
    range->bin_previous = nullptr;
    range->bin_next = heads[bin];
    if (heads[bin] != nullptr) heads[bin]->bin_previous = range;
    heads[bin] = range;
    columns[bin / kColumns] = static_cast<std::uint16_t>(columns[bin / kColumns] | 1u << (bin % kColumns));
    rows |= std::uint64_t{1} << (bin / kColumns);
  }

  void remove(Range* range) noexcept {
    bytes -= range->bytes;
    const unsigned bin = bin_of(range->bytes);
    if (range->bin_next != nullptr) range->bin_next->bin_previous = range->bin_previous;
    if (range->bin_previous != nullptr) {
      range->bin_previous->bin_next = range->bin_next;
    } else {
      heads[bin] = range->bin_next;
    }
    if (heads[bin] != nullptr) return;
    columns[bin / kColumns] = static_cast<std::uint16_t>(columns[bin / kColumns] & ~(1u << (bin % kColumns)));
    if (columns[bin / kColumns] == 0) rows &= ~(std::uint64_t{1} << (bin / kColumns));
  }

  // The last bin before `bin` that is not empty, or kNone.
  unsigned previous_filled(unsigned bin) const noexcept {
    const unsigned row = bin / kColumns;
    const unsigned here = row < kRows ? columns[row] & ~(0xFFFFu << (bin % kColumns)) : 0;
    if (here != 0) return row * kColumns + static_cast<unsigned>(std::bit_width(here)) - 1;
    const std::uint64_t below = rows & ((std::uint64_t{1} << row) - 1);
    if (below == 0) return kNone;
    const auto filled = static_cast<unsigned>(std::bit_width(below)) - 1;
    return filled * kColumns + static_cast<unsigned>(std::bit_width(unsigned{columns[filled]})) - 1;
  }

  // The size of the largest range, 0 if there is none. Takes as long as the last bin in use has ranges,
  // unless all ranges of that bin have one size.
  std::size_t largest_bytes() const noexcept {
    const unsigned bin = previous_filled(kNone);
    if (bin == kNone) return 0;
    std::size_t largest = heads[bin]->bytes;
    if (bin < kColumns) return largest;
    for (const Range* range = heads[bin]; range != nullptr; range = range->bin_next) {
      largest = std::max(largest, range->bytes);
    }
    return largest;
  }

  // The ranges of the largest classes first, until `visit` returns false. False if it did.
  template <typename Visit>
  bool for_each_from_largest(Visit visit) const {
    for (unsigned bin = previous_filled(kNone); bin != kNone; bin = previous_filled(bin)) {
      for (Range* range = heads[bin]; range != nullptr; range = range->bin_next) {
        if (!visit(range)) return false;
      }
    }
    return true;
  }

  // The smallest range, lowest address first, among the first `scan_count_max` of the lowest bin with a fit.
  // Plain TLSF skips the bin of `bytes` itself, because its ranges may be too small, and so misses every
  // exact fit of a large block. Looking at a bounded number of them keeps both the bound and the fit.
  Range* find(std::size_t bytes, std::size_t alignment, std::size_t scan_count_max) const noexcept {
    for (unsigned bin = next_filled(bin_of(bytes)); bin != kNone; bin = next_filled(bin + 1)) {
      Range* best = nullptr;
      std::size_t scan_count = 0;
      for (Range* range = heads[bin]; range != nullptr && scan_count < scan_count_max;
           range = range->bin_next, ++scan_count) {
        if (!block_fits(range->offset, range->end(), bytes, alignment)) continue;
        if (best == nullptr || range->bytes < best->bytes ||
            (range->bytes == best->bytes && range->offset < best->offset)) {
          best = range;
        }
      }
      if (best != nullptr) return best;
    }
    return nullptr;
  }
};

}  // namespace forebay::internal
