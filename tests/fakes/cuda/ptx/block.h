// A block: its warps, its shared memory and its barriers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/fakes/cuda/ptx/executor.h"
#include "tests/fakes/cuda/ptx/warp.h"

namespace forebay::ptx {

// Fills shared and local memory when a block begins.
inline constexpr std::byte kSharedPoison{0xCD};

// Used for one block of the grid after the other.
class Block {
 public:
  Block(const Kernel& kernel, const Launch& launch, const std::byte* parameters, const GlobalMemory& memory);

  // Runs the block at `place` to its end; `number` decides the order of its warps. Errors: throws Fault.
  void run(const std::array<unsigned, 3>& place, unsigned number);
  std::uint64_t instructions() const { return instructions_; }

 private:
  friend class Warp;

  struct Barrier {
    unsigned expected = 0;  // Threads; 0: nobody has come yet.
    unsigned count = 0;
    unsigned population = 0;      // True predicates that a reduction was given.
    std::vector<LaneMask> lanes;  // By warp: those that wait.
    Clock clock;
    unsigned line = 0;
  };

  // Counts lanes at the barrier of the instruction.
  void arrive(Warp& warp, LaneMask lanes, const Instruction& instruction);
  void release(Barrier& barrier);
  std::string whereabouts(unsigned thread) const;
  [[noreturn]] void describe_deadlock() const;

  const Kernel& kernel_;
  const Launch& launch_;
  const std::byte* parameters_;
  const GlobalMemory& memory_;
  unsigned thread_count_;
  std::array<unsigned, 3> place_{};
  std::vector<std::byte> shared_;
  SharedShadow shadow_;
  std::array<Barrier, 16> barriers_;
  std::vector<std::unique_ptr<Warp>> warps_;
  std::uint64_t instructions_ = 0;
};

}  // namespace forebay::ptx
