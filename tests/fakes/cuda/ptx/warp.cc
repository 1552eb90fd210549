#include "tests/fakes/cuda/ptx/warp.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "tests/fakes/cuda/ptx/block.h"

namespace forebay::ptx {
namespace {

constexpr std::size_t kFrameAlignment = 64;
constexpr std::uint32_t kNowhere = 0xFFFFFFFF;

// Generic addresses of shared and local memory and of parameters: windows above every device address.
constexpr std::uint64_t kWindowBytes = std::uint64_t{1} << 56;
constexpr std::uint64_t kSharedWindow = kWindowBytes, kLocalWindow = 2 * kWindowBytes,
                        kParameterWindow = 3 * kWindowBytes;

std::string hexadecimal(std::uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%" PRIx64, value);
  return text;
}

const char* name_of(Space space) {
  switch (space) {
    case Space::kGlobal:
      return "global";
    case Space::kShared:
      return "shared";
    case Space::kLocal:
      return "local";
    case Space::kParameter:
      return "parameter";
    case Space::kGeneric:
      break;
  }
  return "generic";
}

}  // namespace

std::uint64_t window_of(Space space) {
  switch (space) {
    case Space::kShared:
      return kSharedWindow;
    case Space::kLocal:
      return kLocalWindow;
    case Space::kParameter:
      return kParameterWindow;
    case Space::kGlobal:
    case Space::kGeneric:
      break;
  }
  return 0;
}

Warp::Warp(Block& block, const Kernel& kernel, unsigned index)
    : block_(block),
      kernel_(kernel),
      index_(index),
      storage_(kernel.frame_bytes + kFrameAlignment),
      defined_(kernel.slot_count),
      local_(kernel.local_bytes * kWarpSize) {
  const auto begin = reinterpret_cast<std::uintptr_t>(storage_.data());
  frame_ = storage_.data() + (kFrameAlignment - begin % kFrameAlignment) % kFrameAlignment;
  for (const Kernel::Constant& constant : kernel.constants) {
    if (constant.slot.bytes == 0) {
      *values<LaneMask>(constant.slot) = static_cast<LaneMask>(constant.value);
    } else {
      for (unsigned lane = 0; lane < kWarpSize; ++lane) put(constant.slot, lane, constant.value);
    }
  }
}

void Warp::begin(LaneMask lanes) {
  launched_ = lanes;
  exited_ = waiting_ = arrived_ = 0;
  places_.fill(0);
  recent_ = nullptr;
  std::fill(local_.begin(), local_.end(), kSharedPoison);
  std::fill(defined_.begin(), defined_.end(), 0);
  clock_.assign(block_.warps_.size(), 0);
  clock_[index_] = 1;
  for (const Kernel::Constant& constant : kernel_.constants) defined_[constant.slot.index] = kAllLanes;
  const std::array<unsigned, 3>& size = block_.launch_.block;
  for (const auto& [slot, special, dimension] : kernel_.specials) {
    defined_[slot.index] = kAllLanes;
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      const unsigned thread = first_thread() + lane;
      const LaneMask bit = LaneMask{1} << lane;
      std::uint32_t value = 0;
      switch (special) {
        case Special::kThread:
          value = dimension == 0   ? thread % size[0]
                  : dimension == 1 ? thread / size[0] % size[1]
                                   : thread / size[0] / size[1];
          break;
        case Special::kBlockSize:
          value = size[dimension];
          break;
        case Special::kBlock:
          value = block_.place_[dimension];
          break;
        case Special::kGridSize:
          value = block_.launch_.grid[dimension];
          break;
        case Special::kLane:
          value = lane;
          break;
        case Special::kWarp:
          value = index_;
          break;
        case Special::kWarpCount:
          value = static_cast<std::uint32_t>(block_.warps_.size());
          break;
        case Special::kLaneMaskEqual:
          value = bit;
          break;
        case Special::kLaneMaskBelow:
          value = bit - 1;
          break;
        case Special::kLaneMaskBelowOrEqual:
          value = bit | (bit - 1);
          break;
        case Special::kLaneMaskAbove:
          value = ~(bit | (bit - 1));
          break;
        case Special::kLaneMaskAboveOrEqual:
          value = ~(bit - 1);
          break;
      }
      put(slot, lane, value);
    }
  }
}

// --- registers ---

std::uint64_t Warp::get(const Slot& slot, unsigned lane) {
  switch (slot.bytes) {
    case 1:
      return values<std::uint8_t>(slot)[lane];
    case 2:
      return values<std::uint16_t>(slot)[lane];
    case 4:
      return values<std::uint32_t>(slot)[lane];
    case 8:
      return values<std::uint64_t>(slot)[lane];
    default:
      return predicate(slot) >> lane & 1;
  }
}

void Warp::put(const Slot& slot, unsigned lane, std::uint64_t value) {
  switch (slot.bytes) {
    case 1:
      values<std::uint8_t>(slot)[lane] = static_cast<std::uint8_t>(value);
      break;
    case 2:
      values<std::uint16_t>(slot)[lane] = static_cast<std::uint16_t>(value);
      break;
    case 4:
      values<std::uint32_t>(slot)[lane] = static_cast<std::uint32_t>(value);
      break;
    case 8:
      values<std::uint64_t>(slot)[lane] = value;
      break;
    default:
      put_predicate(slot, lane, (value & 1) != 0);
  }
  defined_[slot.index] |= LaneMask{1} << lane;
}

void Warp::put_predicate(const Slot& slot, unsigned lane, bool value) {
  LaneMask& target = *values<LaneMask>(slot);
  const LaneMask bit = LaneMask{1} << lane;
  target = value ? target | bit : target & ~bit;
  defined_[slot.index] |= bit;
}

void Warp::check_inputs(const Instruction& instruction) {
  if (instruction.undefined_allowed) return;
  for (unsigned i = 0; i < instruction.in_count; ++i) {
    const Slot& slot = instruction.in[i];
    const LaneMask missing = active & ~defined_[slot.index];
    if (missing == 0) continue;
    fail(FaultKind::kUninitialised, static_cast<unsigned>(__builtin_ctz(missing)),
         "register " + kernel_.register_names[slot.index] + " is read before anything was written to it");
  }
}

// --- memory ---

std::uint64_t Warp::address(const Instruction& instruction, const Slot& base, unsigned lane) {
  return get(base, lane) + static_cast<std::uint64_t>(instruction.displacement);
}

std::byte* Warp::reach(const Instruction& instruction, unsigned lane, std::uint64_t address, unsigned bytes,
                       SharedShadow::Access access) {
  Space space = instruction.space;
  if (address % bytes != 0) {
    fail(FaultKind::kAlignment, lane,
         "an access of " + std::to_string(bytes) + " bytes at " + hexadecimal(address) + " is not aligned");
  }
  if (space == Space::kGeneric) {
    space = Space::kGlobal;
    for (const Space window : {Space::kShared, Space::kLocal, Space::kParameter}) {
      if (address / kWindowBytes != window_of(window) / kWindowBytes) continue;
      space = window;
      address -= window_of(window);
    }
  }
  const auto beyond = [&](std::uint64_t size) {
    fail(FaultKind::kAddress, lane,
         "an access of " + std::to_string(bytes) + " bytes at " + hexadecimal(address) + " lies beyond the " +
             std::to_string(size) + " bytes of " + name_of(space) + " memory");
  };
  switch (space) {
    case Space::kGlobal: {
      if (recent_ == nullptr || address < recent_->begin || address >= recent_->end)
        recent_ = block_.memory_.find(address);
      const bool writes = access != SharedShadow::Access::kRead;
      if (recent_ == nullptr || bytes > recent_->end - address || (writes && !recent_->writable)) {
        fail(FaultKind::kAddress, lane,
             std::string(writes ? "a write of " : "a read of ") + std::to_string(bytes) + " bytes at " +
                 hexadecimal(address) +
                 (recent_ == nullptr               ? " finds no memory there"
                  : bytes > recent_->end - address ? " reaches beyond its allocation"
                                                   : " finds memory that may only be read"));
      }
      return recent_->bytes + (address - recent_->begin);
    }
    case Space::kShared: {
      std::size_t place = address;
      const std::size_t fixed = kernel_.shared_bytes;
      if (address >= kDynamicSharedBegin) {
        place = address - kDynamicSharedBegin;
        const std::size_t dynamic = block_.shared_.size() - fixed;
        if (place > dynamic || bytes > dynamic - place) beyond(dynamic);
        place += fixed;
      } else if (place > fixed || bytes > fixed - place) {
        beyond(fixed);
      }
      SharedShadow::Conflict conflict;
      const unsigned thread = first_thread() + lane;
      if (!block_.shadow_.record(place, bytes, thread, clock_, access, &conflict)) {
        if (conflict.unwritten) {
          fail(FaultKind::kUninitialised, lane,
               "shared memory at " + hexadecimal(address) + " is read before anything was written to it");
        }
        fail(FaultKind::kRace, lane,
             "shared memory at " + hexadecimal(address) + " was " + (conflict.wrote ? "written" : "read") +
                 " by thread " + std::to_string(conflict.thread) + " with no barrier since");
      }
      return block_.shared_.data() + place;
    }
    case Space::kLocal: {
      const std::size_t size = kernel_.local_bytes;
      if (address > size || bytes > size - address) beyond(size);
      return local_.data() + lane * size + address;
    }
    case Space::kParameter:
      if (access != SharedShadow::Access::kRead)
        fail(FaultKind::kAddress, lane, "parameters may not be written");
      if (address > kernel_.parameter_bytes || bytes > kernel_.parameter_bytes - address)
        beyond(kernel_.parameter_bytes);
      return const_cast<std::byte*>(block_.parameters_) + address;
    case Space::kGeneric:
      break;
  }
  fail(FaultKind::kAddress, lane, "no such space");
}

void Warp::fail(FaultKind kind, unsigned lane, const std::string& what) const {
  const std::array<unsigned, 3>& place = block_.place_;
  const unsigned line = current_ == nullptr ? 0 : current_->line;
  throw Fault(kind, "kernel " + kernel_.name + ", block " + std::to_string(place[0]) + "," +
                        std::to_string(place[1]) + "," + std::to_string(place[2]) + ", thread " +
                        std::to_string(first_thread() + lane) + ": " + what + "; line " +
                        std::to_string(line) + ": " + text_line(*kernel_.text, line));
}

// --- control ---

void Warp::set_place(LaneMask lanes, std::uint32_t at) {
  for (LaneMask rest = lanes; rest != 0; rest &= rest - 1)
    places_[static_cast<unsigned>(__builtin_ctz(rest))] = at;
}

void Warp::wait(LaneMask lanes, std::uint32_t at) {
  waiting_ |= lanes;
  set_place(lanes, at);
}

LaneMask Warp::lanes_at(LaneMask among, std::uint32_t at) const {
  LaneMask found = 0;
  for (LaneMask rest = among; rest != 0; rest &= rest - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(rest));
    if (places_[lane] == at) found |= LaneMask{1} << lane;
  }
  return found;
}

// Lanes that have parted are run lowest place first, which brings them together again where their ways join.
bool Warp::run() {
  bool progress = false;
  for (;;) {
    const LaneMask ready = live() & ~waiting_;
    if (ready == 0) {
      if (!resolve()) return progress;
      progress = true;
      continue;
    }
    std::uint32_t lowest = kNowhere, second = kNowhere;
    for (LaneMask rest = ready; rest != 0; rest &= rest - 1) {
      const std::uint32_t place = places_[static_cast<unsigned>(__builtin_ctz(rest))];
      if (place < lowest) {
        second = lowest;
        lowest = place;
      } else if (place > lowest && place < second) {
        second = place;
      }
    }
    advance(lanes_at(ready, lowest), lowest, second);
    progress = true;
  }
}

void Warp::advance(LaneMask group, std::uint32_t at, std::uint32_t limit) {
  for (;;) {
    const Instruction& instruction = kernel_.code[at];
    current_ = &instruction;
    if (++block_.instructions_ > block_.launch_.most_instructions) {
      fail(FaultKind::kEndless, static_cast<unsigned>(__builtin_ctz(group)),
           "the launch has executed as many instructions as it may");
    }
    active = group;
    if (instruction.guarded) {
      const LaneMask missing = group & ~defined_[instruction.guard.index];
      if (missing != 0) {
        fail(FaultKind::kUninitialised, static_cast<unsigned>(__builtin_ctz(missing)),
             "predicate " + kernel_.register_names[instruction.guard.index] +
                 " is read before anything was written to it");
      }
      const LaneMask guard = predicate(instruction.guard);
      active &= instruction.guard_negated ? ~guard : guard;
    }
    const LaneMask lanes = active, others = group & ~lanes;
    if (lanes == 0) {
      ++at;
    } else {
      check_inputs(instruction);
      switch (instruction.flow) {
        case Flow::kNext:
          instruction.execute(*this, instruction);
          ++at;
          break;
        case Flow::kBranch:
          if (others != 0) {
            set_place(lanes, instruction.target);
            set_place(others, at + 1);
            return;
          }
          at = instruction.target;
          break;
        case Flow::kExit:
          exited_ |= lanes;
          set_place(others, at + 1);
          return;
        case Flow::kTrap:
          fail(FaultKind::kTrap, static_cast<unsigned>(__builtin_ctz(lanes)), "the kernel stopped itself");
        case Flow::kArrive:
          block_.arrive(*this, lanes, instruction);
          ++at;
          break;
        case Flow::kBarrier:
          if (!instruction.aligned) block_.arrive(*this, lanes, instruction);
          wait(lanes, at);
          set_place(others, at + 1);
          return;
        case Flow::kMeeting:
          // The lanes that have come together are usually all that are expected.
          if (others == 0 && lanes == live() && waiting_ == 0) {
            execute_meeting(instruction, lanes);
            ++at;
            break;
          }
          wait(lanes, at);
          set_place(others, at + 1);
          return;
      }
    }
    if (at >= limit) {
      set_place(group, at);
      return;
    }
  }
}

// in[0] is the mask of the lanes that take part.
void Warp::execute_meeting(const Instruction& instruction, LaneMask lanes) {
  current_ = &instruction;
  active = lanes;
  const auto first = static_cast<unsigned>(__builtin_ctz(lanes));
  const auto members = static_cast<LaneMask>(get(instruction.in[0], first));
  for_lanes([&](unsigned lane) {
    if (get(instruction.in[0], lane) != members)
      fail(FaultKind::kMeeting, lane, "the lanes give different masks");
    if ((members >> lane & 1) == 0)
      fail(FaultKind::kMeeting, lane, "a lane takes part that is not in the mask");
  });
  if ((members & live()) != lanes) {
    fail(FaultKind::kMeeting, first, "the mask names lanes that do not come");
  }
  instruction.execute(*this, instruction);
}

bool Warp::resolve() {
  const LaneMask waiting = waiting_ & ~arrived_ & ~exited_;
  bool released = false;
  for (LaneMask rest = waiting; rest != 0;) {
    const auto first = static_cast<unsigned>(__builtin_ctz(rest));
    const std::uint32_t at = places_[first];
    const LaneMask lanes = lanes_at(rest, at);
    rest &= ~lanes;
    const Instruction& instruction = kernel_.code[at];
    if (instruction.flow != Flow::kMeeting) continue;
    const auto members = static_cast<LaneMask>(get(instruction.in[0], first));
    if ((members & live() & ~lanes) != 0) continue;
    execute_meeting(instruction, lanes);
    set_place(lanes, at + 1);
    waiting_ &= ~lanes;
    released = true;
  }
  if (released || waiting == 0) return released;
  const auto first = static_cast<unsigned>(__builtin_ctz(waiting));
  const std::uint32_t at = places_[first];
  const LaneMask lanes = lanes_at(waiting, at);
  current_ = &kernel_.code[at];
  if (lanes != launched_) {
    const auto missing = first_thread() + static_cast<unsigned>(__builtin_ctz(launched_ & ~lanes));
    fail(FaultKind::kMeeting, first,
         "all lanes of a warp have to come here together, and " + block_.whereabouts(missing));
  }
  if (current_->flow == Flow::kBarrier) {
    active = lanes;
    block_.arrive(*this, lanes, *current_);
  }
  return false;
}

}  // namespace forebay::ptx
