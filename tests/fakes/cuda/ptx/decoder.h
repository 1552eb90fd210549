// Decodes one instruction.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fakes/cuda/ptx/program.h"

namespace forebay::ptx {

// An operand as it is written.
struct Operand {
  enum class Kind : std::uint8_t {
    kRegister,   // `slot`; with `second`, the pair d|p.
    kNumber,     // `number`; the bits of a float where is_float is 4 or 8.
    kAddress,    // [base + displacement]: `slot` where has_base, and the variable's address in `number`.
    kVariable,   // Its address in `number`, and its space.
    kVector,     // `slots`; an unnamed one is "_".
    kLabel,      // `name`
    kDiscarded,  // "_"
  };
  struct Element {
    Slot slot;
    bool discarded = false;
  };

  Kind kind = Kind::kNumber;
  Slot slot{};
  bool negated = false;  // !p
  bool has_second = false;
  Slot second{};
  bool has_base = false;
  std::uint64_t number = 0;
  unsigned float_bytes = 0;
  Space space = Space::kGeneric;
  std::vector<Element> elements;
  std::string_view name;
};

// Gives out slots for constants.
class Constants {
 public:
  virtual ~Constants() = default;
  // `bytes` 0: a predicate, whose value is a LaneMask.
  virtual Slot constant(std::uint64_t value, unsigned bytes) = 0;
};

// Decodes `opcode`, with its modifiers, and its operands. A branch's target is left to the caller.
// Errors: throws Fault(kRefused), without a place, for anything that is not known exactly.
Instruction decode(std::string_view opcode, const std::vector<Operand>& operands, Constants& constants);

}  // namespace forebay::ptx
