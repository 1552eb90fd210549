// A warp: its registers, and the memory it reaches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fakes/cuda/ptx/fault.h"
#include "tests/fakes/cuda/ptx/memory.h"
#include "tests/fakes/cuda/ptx/program.h"

namespace forebay::ptx {

class Block;

// Where a space lies among generic addresses; 0 for global memory.
std::uint64_t window_of(Space space);

class Warp {
 public:
  Warp(Block& block, const Kernel& kernel, unsigned index);

  // Puts the lanes of `lanes` at the begin of the kernel, with no register written.
  void begin(LaneMask lanes);
  // Runs until every lane waits or has ended. Returns whether anything was done.
  bool run();

  // --- for the functions of instructions: the lanes that execute one, and their registers ---

  LaneMask active = 0;

  template <typename T>
  T* values(const Slot& slot) {
    return reinterpret_cast<T*>(frame_ + slot.offset);
  }
  template <typename T>
  void set(const Slot& slot, const T (&results)[kWarpSize]) {
    T* const target = values<T>(slot);
    if (active == kAllLanes) {
      std::memcpy(target, results, sizeof results);
    } else {
      for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        if ((active >> lane & 1) != 0) target[lane] = results[lane];
      }
    }
    defined_[slot.index] |= active;
  }
  LaneMask predicate(const Slot& slot) { return *values<LaneMask>(slot); }
  void set_predicate(const Slot& slot, LaneMask value) {
    LaneMask& target = *values<LaneMask>(slot);
    target = (target & ~active) | (value & active);
    defined_[slot.index] |= active;
  }
  // Marks lanes of a register as never written.
  void undefine(const Slot& slot, LaneMask lanes) { defined_[slot.index] &= ~lanes; }
  LaneMask defined(const Slot& slot) const { return defined_[slot.index]; }

  // One lane of a register of any width, extended by zeros, and back, cut to the width.
  std::uint64_t get(const Slot& slot, unsigned lane);
  void put(const Slot& slot, unsigned lane, std::uint64_t value);
  void put_predicate(const Slot& slot, unsigned lane, bool value);

  // Calls f(lane) for the active lanes, in ascending order.
  template <typename Function>
  void for_lanes(Function f) {
    for (LaneMask rest = active; rest != 0; rest &= rest - 1) f(static_cast<unsigned>(__builtin_ctz(rest)));
  }

  // The bytes at an address of the instruction's space, for one lane. Errors: throws Fault.
  std::byte* reach(const Instruction& instruction, unsigned lane, std::uint64_t address, unsigned bytes,
                   SharedShadow::Access access);
  // The address that a load, store or atomic of this lane uses.
  std::uint64_t address(const Instruction& instruction, const Slot& base, unsigned lane);

  // Lanes that have not ended.
  LaneMask live() const { return launched_ & ~exited_; }
  unsigned index() const { return index_; }
  // bar.warp.sync: earlier accesses of the lanes are ordered before their next ones.
  void order_lanes() { ++clock_[index_]; }

  // Stops the kernel, with the place of the current instruction.
  [[noreturn]] void fail(FaultKind kind, unsigned lane, const std::string& what) const;

 private:
  friend class Block;

  // Runs lanes that are at one place until they part, meet, wait, or come to `limit`.
  void advance(LaneMask group, std::uint32_t at, std::uint32_t limit);
  void check_inputs(const Instruction& instruction);
  // Lets lanes go on that have met within the warp, or arrive at a barrier together. Whether any did.
  bool resolve();
  void set_place(LaneMask lanes, std::uint32_t at);
  void wait(LaneMask lanes, std::uint32_t at);
  void execute_meeting(const Instruction& instruction, LaneMask lanes);
  LaneMask lanes_at(LaneMask among, std::uint32_t at) const;
  unsigned first_thread() const { return index_ * kWarpSize; }

  Block& block_;
  const Kernel& kernel_;
  unsigned index_;
  std::vector<std::byte> storage_;
  std::byte* frame_;
  std::vector<LaneMask> defined_;
  LaneMask launched_ = 0, exited_ = 0;
  LaneMask waiting_ = 0;  // At a barrier or meeting; `arrived_` are those that a barrier has counted.
  LaneMask arrived_ = 0;
  std::array<std::uint32_t, kWarpSize> places_{};
  std::vector<std::byte> local_;
  const GlobalMemory::Range* recent_ = nullptr;
  const Instruction* current_ = nullptr;
  Clock clock_;
};

}  // namespace forebay::ptx
