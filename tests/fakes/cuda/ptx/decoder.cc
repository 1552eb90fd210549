#include "tests/fakes/cuda/ptx/decoder.h"

#include <algorithm>
#include <array>

#include "tests/fakes/cuda/ptx/fault.h"
#include "tests/fakes/cuda/ptx/statement.h"

namespace forebay::ptx {
namespace {

bool parse_type(std::string_view text, Type* type) {
  if (text == "pred") {
    *type = {'p', 0};
    return true;
  }
  if (text == "bf16") {
    *type = {'h', 16};
    return true;
  }
  if (text.size() < 2 || std::string_view("busf").find(text[0]) == std::string_view::npos) return false;
  for (const auto& [suffix, bits] :
       {std::pair<std::string_view, unsigned>{"8", 8}, {"16", 16}, {"32", 32}, {"64", 64}}) {
    if (text.substr(1) != suffix || (text[0] == 'f' && bits == 8)) continue;
    *type = {text[0], bits};
    return true;
  }
  return false;
}

}  // namespace

Statement::Statement(std::string_view opcode, const std::vector<Operand>& operands, Constants& constants)
    : opcode_(opcode), operands_(operands), constants_(constants) {
  for (std::size_t begin = 0; begin <= opcode.size();) {
    const std::size_t end = std::min(opcode.find('.', begin), opcode.size());
    modifiers_.push_back(opcode.substr(begin, end - begin));
    begin = end + 1;
  }
  name_ = modifiers_[0];
  taken_ = 1;
}

bool Statement::take(std::string_view modifier) {
  if (taken_ == modifiers_.size() || modifiers_[taken_] != modifier) return false;
  ++taken_;
  return true;
}

void Statement::expect(std::string_view modifier) {
  if (!take(modifier)) refuse("'." + std::string(modifier) + "' is expected");
}

bool Statement::next_is_type() const {
  Type type;
  return taken_ < modifiers_.size() && parse_type(modifiers_[taken_], &type);
}

bool Statement::next_begins(std::string_view begin) const {
  return taken_ < modifiers_.size() && modifiers_[taken_].substr(0, begin.size()) == begin;
}

Type Statement::type() {
  Type type;
  if (taken_ == modifiers_.size() || !parse_type(modifiers_[taken_], &type)) refuse("a type is expected");
  ++taken_;
  return type;
}

std::string_view Statement::any() {
  if (taken_ == modifiers_.size()) refuse("a modifier is missing");
  return modifiers_[taken_++];
}

bool Statement::rounding() {
  for (const auto& [name, rounding] : {std::pair<std::string_view, Rounding>{"rn", Rounding::kNearest},
                                       {"rz", Rounding::kToZero},
                                       {"rm", Rounding::kDown},
                                       {"rp", Rounding::kUp}}) {
    if (!take(name)) continue;
    result.rounding = rounding;
    return true;
  }
  return false;
}

const Operand& Statement::operand(std::size_t index) const {
  if (index >= operands_.size()) refuse("an operand is missing");
  return operands_[index];
}

void Statement::expect_operands(std::size_t least, std::size_t most) {
  if (operands_.size() < least || operands_.size() > most) {
    refuse("it has " + std::to_string(operands_.size()) + " operands");
  }
}

void Statement::out_slot(const Slot& slot, bool used) {
  if (result.out_count == result.out.size()) refuse("it has too many results");
  if (!used) result.out_used = static_cast<std::uint8_t>(result.out_used & ~(1u << result.out_count));
  result.out[result.out_count++] = slot;
}

void Statement::in_slot(const Slot& slot) {
  if (result.in_count == result.in.size()) refuse("it has too many inputs");
  result.in[result.in_count++] = slot;
}

void Statement::out(std::size_t index, unsigned bytes, bool wider) {
  const Operand& target = operand(index);
  if (target.kind == Operand::Kind::kDiscarded) {
    out_slot({}, false);
    return;
  }
  if (target.kind != Operand::Kind::kRegister || target.negated) refuse("its result must be a register");
  const bool fits = target.slot.bytes == bytes || (wider && bytes != 0 && target.slot.bytes > bytes);
  if (!fits) refuse("the register of its result has another width");
  out_slot(target.slot, true);
}

void Statement::in(std::size_t index, unsigned bytes, bool wider) {
  const Operand& source = operand(index);
  switch (source.kind) {
    case Operand::Kind::kRegister: {
      const bool fits = source.slot.bytes == bytes || (wider && bytes != 0 && source.slot.bytes > bytes);
      if (!fits) refuse("a register has another width than the instruction");
      if (source.negated) refuse("'!' is not known here");
      in_slot(source.slot);
      return;
    }
    case Operand::Kind::kNumber: {
      if (source.float_bytes != 0 && source.float_bytes != bytes)
        refuse("a float has another width than the instruction");
      const std::uint64_t value = bytes == 0 ? (source.number != 0 ? kAllLanes : 0) : source.number;
      in_constant(value, bytes);
      return;
    }
    case Operand::Kind::kVariable:
      if (bytes != 8 && bytes != 4) refuse("an address needs 32 or 64 bits");
      in_constant(source.number, bytes);
      return;
    default:
      refuse("an operand has an unknown form");
  }
}

std::uint64_t Statement::number(std::size_t index) const {
  if (operand(index).kind != Operand::Kind::kNumber) refuse("an operand must be a number");
  return operand(index).number;
}

void Statement::refuse(const std::string& why) const {
  throw Fault(FaultKind::kRefused, "'" + std::string(opcode_) + "': " + why);
}

Instruction Statement::finish() {
  if (taken_ != modifiers_.size()) {
    refuse("the modifier '." + std::string(modifiers_[taken_]) + "' is not known to this interpreter");
  }
  if (result.execute == nullptr && (result.flow == Flow::kNext || result.flow == Flow::kMeeting)) {
    refuse("it is not known to this interpreter with this type");
  }
  return result;
}

Instruction decode(std::string_view opcode, const std::vector<Operand>& operands, Constants& constants) {
  constexpr std::array kFamilies = {decode_integer,    decode_float,  decode_bits,   decode_comparison,
                                    decode_conversion, decode_memory, decode_control};
  Statement statement(opcode, operands, constants);
  for (const auto family : kFamilies) {
    if (family(statement)) return statement.finish();
  }
  statement.refuse("the instruction is not known to this interpreter");
}

}  // namespace forebay::ptx
