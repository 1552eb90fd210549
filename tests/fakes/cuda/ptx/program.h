// A module of PTX in the form that is executed: every instruction decoded once to a function and the places
// of its operands.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace forebay::ptx {

class Warp;

inline constexpr unsigned kWarpSize = 32;
using LaneMask = std::uint32_t;
inline constexpr LaneMask kAllLanes = 0xFFFFFFFF;

// A register, constant or special register of a warp: 32 values side by side in the warp's frame. A predicate
// is a LaneMask instead, with `bytes` 0.
struct Slot {
  std::uint32_t offset = 0;  // Into the frame.
  std::uint16_t index = 0;   // Among the slots of the kernel.
  std::uint8_t bytes = 0;    // The size of one value.
};

// The address in shared memory at which a launch's dynamic part begins; the static part begins at 0. Larger
// than any device's shared memory.
inline constexpr std::size_t kDynamicSharedBegin = 1u << 20;

enum class Space : std::uint8_t { kGeneric, kGlobal, kShared, kLocal, kParameter };

enum class Rounding : std::uint8_t { kNearest, kToZero, kDown, kUp };

// How the warp goes on after an instruction.
enum class Flow : std::uint8_t {
  kNext,
  kBranch,
  kExit,
  kTrap,
  kBarrier,  // Waits for threads of the block.
  kArrive,   // Counts at a barrier and goes on.
  kMeeting,  // Waits for lanes of the warp: shuffle, vote, bar.warp.
};

enum class Reduction : std::uint8_t { kNone, kAnd, kOr, kPopulation };

struct Instruction {
  using Execute = void (*)(Warp&, const Instruction&);

  Execute execute = nullptr;
  std::array<Slot, 4> out{};
  std::array<Slot, 6> in{};
  std::uint8_t out_count = 0, in_count = 0;
  std::uint8_t out_used = 0xF;  // Bit i: out[i] is a register, not "_".
  Slot guard{};
  bool guarded = false, guard_negated = false;

  Flow flow = Flow::kNext;
  Space space = Space::kGeneric;
  Rounding rounding = Rounding::kNearest;
  bool flush = false, saturate = false;
  bool is_signed = false;                    // The type of a load, or the source of a conversion.
  bool is_float = false;                     // The type of a conversion's source.
  bool to_signed = false, to_float = false;  // The type of a conversion's result.
  bool to_integral = false;                  // A conversion rounds to an integral value.
  bool aligned = false;                      // A barrier: all lanes come together.
  bool undefined_allowed = false;            // The function itself cares for inputs that nobody wrote.
  bool input_negated = false;                // The last predicate counts as its contrary.
  bool from_generic = false;                 // cvta.to
  Reduction reduction = Reduction::kNone;
  std::uint8_t bytes = 0;         // An element of an access, or a conversion's source.
  std::uint8_t to_bytes = 0;      // A conversion's result.
  std::uint8_t elements = 1;      // The length of an access's vector.
  std::uint8_t table = 0;         // lop3's function; the choice among an opcode's operations.
  std::uint32_t target = 0;       // A branch's, as an index into the code.
  std::int64_t displacement = 0;  // Added to the address.
  std::uint32_t line = 0;         // In the text.
};

enum class Special : std::uint8_t {
  kThread,     // %tid: three, for x, y and z, like the next three.
  kBlockSize,  // %ntid
  kBlock,      // %ctaid
  kGridSize,   // %nctaid
  kLane,
  kWarp,
  kWarpCount,
  kLaneMaskEqual,
  kLaneMaskBelow,
  kLaneMaskBelowOrEqual,
  kLaneMaskAbove,
  kLaneMaskAboveOrEqual,
};

struct Parameter {
  std::size_t offset;
  std::size_t bytes;
};

struct Kernel {
  struct Constant {
    Slot slot;
    std::uint64_t value;  // All lanes have it; a predicate's is its mask.
  };
  struct SpecialSlot {
    Slot slot;
    Special special;
    unsigned dimension;
  };

  std::string name;
  std::vector<Parameter> parameters;
  std::size_t parameter_bytes = 0;
  std::size_t shared_bytes = 0;  // The static part.
  std::size_t local_bytes = 0;   // For each thread.
  unsigned most_threads = 1024;  // The largest block.
  std::vector<Instruction> code;
  std::vector<Constant> constants;
  std::vector<SpecialSlot> specials;
  std::size_t frame_bytes = 0;
  std::size_t slot_count = 0;
  std::vector<std::string> register_names;  // By slot; empty for constants.
  std::shared_ptr<const std::string> text;  // The module's, for messages.
};

struct Module {
  std::map<std::string, Kernel, std::less<>> kernels;
};

// Line `line` of the text, without the space around it.
std::string text_line(const std::string& text, unsigned line);

}  // namespace forebay::ptx
