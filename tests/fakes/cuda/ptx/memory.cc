#include "tests/fakes/cuda/ptx/memory.h"

#include <algorithm>
#include <utility>

namespace forebay::ptx {

void GlobalMemory::add(const Range& range) {
  const auto place =
      std::upper_bound(ranges_.begin(), ranges_.end(), range.begin,
                       [](std::uint64_t begin, const Range& other) { return begin < other.begin; });
  ranges_.insert(place, range);
}

const GlobalMemory::Range* GlobalMemory::find(std::uint64_t address) const {
  const auto after =
      std::upper_bound(ranges_.begin(), ranges_.end(), address,
                       [](std::uint64_t wanted, const Range& range) { return wanted < range.begin; });
  if (after == ranges_.begin()) return nullptr;
  const Range& range = *(after - 1);
  return address < range.end ? &range : nullptr;
}

void SharedShadow::reset(std::size_t bytes) {
  words_.assign((bytes + 3) / 4, Word());
}

bool SharedShadow::ordered(const Use& use, unsigned thread, const Clock& clock) {
  if (use.thread == kNobody || use.thread == thread) return true;
  const unsigned warp = use.thread / kWarpSize;
  // Lanes of one warp are ordered by its own barriers.
  return warp == thread / kWarpSize ? use.moment < clock[warp] : use.moment <= clock[warp];
}

bool SharedShadow::record(std::size_t address, unsigned bytes, unsigned thread, const Clock& clock,
                          Access access, Conflict* conflict) {
  const std::uint32_t moment = clock[thread / kWarpSize];
  for (std::size_t at = address / 4; at * 4 < address + bytes; ++at) {
    Word& word = words_[at];
    const std::size_t begin = std::max(address, at * 4) - at * 4,
                      end = std::min(address + bytes, at * 4 + 4) - at * 4;
    const auto mask = static_cast<std::uint8_t>((1u << end) - (1u << begin));
    const auto clashes = [&](const Use& use) {
      return (use.bytes & mask) != 0 && !ordered(use, thread, clock);
    };
    const bool both_atomic = word.write.atomic && access == Access::kAtomic;
    if (!both_atomic && clashes(word.write)) {
      *conflict = {word.write.thread, true, false};
      return false;
    }
    if (access != Access::kWrite && (word.written & mask) != mask) {
      *conflict = {0, false, true};
      return false;
    }
    if (access == Access::kRead) {
      if (word.reads[0].thread != thread) word.reads[1] = word.reads[0];
      word.reads[0] = {moment, static_cast<std::uint16_t>(thread), mask, false};
      continue;
    }
    for (const Use& read : word.reads) {
      if (!clashes(read)) continue;
      *conflict = {read.thread, false, false};
      return false;
    }
    word.write = {moment, static_cast<std::uint16_t>(thread), mask, access == Access::kAtomic};
    word.written |= mask;
  }
  return true;
}

}  // namespace forebay::ptx
