// The memory that a launch may use, and the checks of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/fakes/cuda/ptx/program.h"

namespace forebay::ptx {

// Device addresses, and where the interpreter reaches their bytes.
class GlobalMemory {
 public:
  struct Range {
    std::uint64_t begin;
    std::uint64_t end;
    std::byte* bytes;
    bool writable;
  };

  // Ranges that do not overlap.
  void add(const Range& range);
  // The range that holds the address, or null. Requires no add() after the first call.
  const Range* find(std::uint64_t address) const;

 private:
  std::vector<Range> ranges_;  // In ascending order.
};

// A thread's view of time, for races: an access is known to a warp once a barrier has ordered it before the
// warp's next ones. clock[v] is the last moment of warp v that this warp knows of; its own entry is its
// present moment.
using Clock = std::vector<std::uint32_t>;

// The threads that last wrote and read each word of a block's shared memory. A byte never written is refused
// to readers. Accesses to different bytes of one word are no race, and of such only the last is remembered.
class SharedShadow {
 public:
  enum class Access : std::uint8_t { kRead, kWrite, kAtomic };
  struct Conflict {
    unsigned thread;  // The other one.
    bool wrote;
    bool unwritten;  // Nobody has written the bytes; the rest is meaningless.
  };

  void reset(std::size_t bytes);
  // Records an access to [address, address + bytes) by the thread, whose warp's clock is given. False when it
  // is a defect, which `conflict` describes.
  bool record(std::size_t address, unsigned bytes, unsigned thread, const Clock& clock, Access access,
              Conflict* conflict);

 private:
  static constexpr std::uint16_t kNobody = 0xFFFF;
  struct Use {
    std::uint32_t moment = 0;
    std::uint16_t thread = kNobody;
    std::uint8_t bytes = 0;  // A bit for each.
    bool atomic = false;
  };
  struct Word {
    Use write;
    Use reads[2];  // The last one, and the last one of another thread.
    std::uint8_t written = 0;
  };

  static bool ordered(const Use& use, unsigned thread, const Clock& clock);

  std::vector<Word> words_;
};

}  // namespace forebay::ptx
