// One instruction while it is decoded: its modifiers are taken one by one, then its operands by their types.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fakes/cuda/ptx/decoder.h"
#include "tests/fakes/cuda/ptx/program.h"

namespace forebay::ptx {

struct Type {
  char kind = 'b';  // 'b', 'u', 's', 'f', 'p', or 'h' for bf16.
  unsigned bits = 0;

  unsigned bytes() const { return bits / 8; }  // 0: a predicate.
  bool is_float() const { return kind == 'f' || kind == 'h'; }
  bool is_signed() const { return kind == 's'; }
  bool is(char expected, unsigned expected_bits) const { return kind == expected && bits == expected_bits; }
};

class Statement {
 public:
  Statement(std::string_view opcode, const std::vector<Operand>& operands, Constants& constants);

  std::string_view name() const { return name_; }
  // The next modifier, if it is this one.
  bool take(std::string_view modifier);
  // The modifier is required.
  void expect(std::string_view modifier);
  // The next modifier, which has to be a type.
  Type type();
  bool next_is_type() const;
  bool next_begins(std::string_view begin) const;
  // Takes the next modifier.
  std::string_view any();
  // .rn, .rz, .rm, .rp; false where there is none.
  bool rounding();

  std::size_t operand_count() const { return operands_.size(); }
  const Operand& operand(std::size_t index) const;
  void expect_operands(std::size_t least, std::size_t most);

  // Adds an operand to the instruction's results or inputs. `bytes` 0: a predicate. With `wider`, a register
  // may be wider than that.
  void out(std::size_t index, unsigned bytes, bool wider = false);
  void out_slot(const Slot& slot, bool used);
  void in(std::size_t index, unsigned bytes, bool wider = false);
  void in(std::size_t index, const Type& type) { in(index, type.bytes()); }
  void in_slot(const Slot& slot);
  void in_constant(std::uint64_t value, unsigned bytes) { in_slot(constants_.constant(value, bytes)); }
  // The value of an operand that has to be a number.
  std::uint64_t number(std::size_t index) const;

  [[noreturn]] void refuse(const std::string& why) const;
  // Refuses modifiers that nobody has taken, and a missing execute function.
  Instruction finish();

  Instruction result;

 private:
  std::string_view opcode_, name_;
  std::vector<std::string_view> modifiers_;
  std::size_t taken_ = 0;
  const std::vector<Operand>& operands_;
  Constants& constants_;
};

// Each fills `statement` and returns true if the opcode is one of its own.
bool decode_integer(Statement& statement);
bool decode_float(Statement& statement);
bool decode_bits(Statement& statement);
bool decode_comparison(Statement& statement);
bool decode_conversion(Statement& statement);
bool decode_memory(Statement& statement);
bool decode_control(Statement& statement);

}  // namespace forebay::ptx
