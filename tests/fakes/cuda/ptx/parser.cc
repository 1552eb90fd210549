#include "tests/fakes/cuda/ptx/parser.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <utility>

#include "tests/fakes/cuda/ptx/decoder.h"
#include "tests/fakes/cuda/ptx/fault.h"
#include "tests/fakes/cuda/ptx/lexer.h"

namespace forebay::ptx {
namespace {

constexpr std::size_t kFrameAlignment = 64;

struct Variable {
  Space space;
  std::uint64_t address;
};

// The size of one value of a type such as ".f32"; 0 for ".pred".
std::optional<unsigned> type_bytes(std::string_view type) {
  if (type == ".pred") return 0;
  for (const auto& [suffix, bytes] :
       {std::pair<std::string_view, unsigned>{"8", 1}, {"16", 2}, {"32", 4}, {"64", 8}}) {
    if (type.size() == suffix.size() + 2 && type[0] == '.' && type.substr(2) == suffix &&
        std::string_view("busf").find(type[1]) != std::string_view::npos) {
      return bytes;
    }
  }
  return std::nullopt;
}

std::size_t round_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// The slots of one kernel.
class Slots final : public Constants {
 public:
  explicit Slots(Kernel& kernel) : kernel_(kernel) {}

  Slot add(unsigned bytes, std::string name) {
    if (kernel_.slot_count > 0xFFFF)
      throw Fault(FaultKind::kRefused, "the kernel has more than 65536 registers");
    const Slot slot{static_cast<std::uint32_t>(kernel_.frame_bytes),
                    static_cast<std::uint16_t>(kernel_.slot_count++), static_cast<std::uint8_t>(bytes)};
    kernel_.frame_bytes += round_up(bytes == 0 ? sizeof(LaneMask) : bytes * kWarpSize, kFrameAlignment);
    kernel_.register_names.push_back(std::move(name));
    return slot;
  }

  Slot constant(std::uint64_t value, unsigned bytes) override {
    const auto [known, is_new] = constants_.try_emplace({value, bytes});
    if (is_new) {
      known->second = add(bytes, {});
      kernel_.constants.push_back({known->second, value});
    }
    return known->second;
  }

  std::optional<Slot> special(std::string_view name) {
    if (const auto known = specials_.find(name); known != specials_.end()) return known->second;
    static const std::map<std::string_view, Special> kVectors = {{"%tid", Special::kThread},
                                                                 {"%ntid", Special::kBlockSize},
                                                                 {"%ctaid", Special::kBlock},
                                                                 {"%nctaid", Special::kGridSize}};
    static const std::map<std::string_view, Special> kScalars = {
        {"%laneid", Special::kLane},
        {"%warpid", Special::kWarp},
        {"%nwarpid", Special::kWarpCount},
        {"%lanemask_eq", Special::kLaneMaskEqual},
        {"%lanemask_lt", Special::kLaneMaskBelow},
        {"%lanemask_le", Special::kLaneMaskBelowOrEqual},
        {"%lanemask_gt", Special::kLaneMaskAbove},
        {"%lanemask_ge", Special::kLaneMaskAboveOrEqual}};
    Kernel::SpecialSlot found{};
    const std::size_t dot = name.find('.');
    if (dot == std::string_view::npos) {
      const auto scalar = kScalars.find(name);
      if (scalar == kScalars.end()) return std::nullopt;
      found.special = scalar->second;
    } else {
      const auto vector = kVectors.find(name.substr(0, dot));
      const std::string_view dimension = name.substr(dot + 1);
      if (vector == kVectors.end() || (dimension != "x" && dimension != "y" && dimension != "z"))
        return std::nullopt;
      found.special = vector->second;
      found.dimension = static_cast<unsigned>(dimension[0] - 'x');
    }
    found.slot = add(sizeof(std::uint32_t), std::string(name));
    kernel_.specials.push_back(found);
    specials_.emplace(name, found.slot);
    return found.slot;
  }

 private:
  Kernel& kernel_;
  std::map<std::pair<std::uint64_t, unsigned>, Slot> constants_;
  std::map<std::string_view, Slot> specials_;
};

class Parser {
 public:
  explicit Parser(std::string text)
      : text_(std::make_shared<const std::string>(std::move(text))), tokens_(lex(*text_)) {}

  Module run() {
    while (peek().kind != TokenKind::kEnd) module_statement();
    return std::move(module_);
  }

 private:
  // --- tokens ---

  const Token& peek(std::size_t ahead = 0) const {
    return tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
  }
  const Token& next() {
    const Token& token = peek();
    if (at_ < tokens_.size() - 1) ++at_;
    return token;
  }
  bool take(std::string_view expected) {
    if (!peek().is(expected)) return false;
    next();
    return true;
  }
  void expect(std::string_view expected) {
    if (!take(expected))
      refuse("expected '" + std::string(expected) + "', found '" + std::string(peek().text) + "'");
  }
  std::string_view word(const char* meaning) {
    if (peek().kind != TokenKind::kWord)
      refuse(std::string("expected ") + meaning + ", found '" + std::string(peek().text) + "'");
    return next().text;
  }
  [[noreturn]] void refuse(const std::string& why) const { refuse_at(peek().line, why); }
  [[noreturn]] void refuse_at(unsigned line, const std::string& why) const {
    throw Fault(FaultKind::kRefused,
                "PTX line " + std::to_string(line) + ": " + why + ", in: " + text_line(*text_, line));
  }

  // A number with its sign; floats as their bits.
  Operand number() {
    const bool negative = take("-");
    std::string_view digits = peek().text;
    if (peek().kind != TokenKind::kNumber) refuse("expected a number, found '" + std::string(digits) + "'");
    next();
    Operand result;
    int base = 10;
    if (digits.size() > 2 && digits[0] == '0') {
      const char form = static_cast<char>(digits[1] | 0x20);
      const bool is_float = (form == 'f' && digits.size() == 10) || (form == 'd' && digits.size() == 18);
      if (is_float) result.float_bytes = form == 'f' ? 4 : 8;
      if (is_float || form == 'x') {
        base = 16;
        digits.remove_prefix(2);
      }
    }
    if (result.float_bytes == 0 && (digits.back() == 'U' || digits.back() == 'u')) digits.remove_suffix(1);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), result.number, base);
    if (error != std::errc() || end != digits.data() + digits.size()) {
      refuse("'" + std::string(digits) + "' is no number that this interpreter knows");
    }
    if (negative && result.float_bytes != 0) refuse("a float's bits have no sign before them");
    if (negative) result.number = 0 - result.number;
    return result;
  }
  std::uint64_t plain_number() { return number().number; }

  // --- the module ---

  void module_statement() {
    if (take(".version") || take(".target")) {
      next();
      while (take(",")) next();
    } else if (take(".address_size")) {
      if (plain_number() != 64) refuse("addresses must have 64 bits");
    } else if (take(".file")) {
      skip_line();
    } else {
      while (take(".visible") || take(".extern") || take(".weak")) continue;
      if (take(".entry")) {
        kernel();
      } else if (take(".shared")) {
        shared_variable(module_variables_, nullptr);
      } else {
        refuse("'" + std::string(peek().text) + "' is not known to this interpreter");
      }
    }
  }

  void skip_line() {
    const unsigned line = tokens_[at_ - 1].line;
    while (peek().kind != TokenKind::kEnd && peek().line == line) next();
  }

  void kernel() {
    Kernel kernel;
    kernel.text = text_;
    kernel.name = word("a kernel's name");
    kernel_ = &kernel;
    Slots slots(kernel);
    slots_ = &slots;
    scopes_.assign(1, {});
    labels_.clear();
    branches_.clear();
    variables_ = module_variables_;
    kernel.shared_bytes = module_shared_bytes_;
    if (take("(") && !take(")")) {
      do parameter();
      while (take(","));
      expect(")");
    }
    while (!peek().is("{")) kernel_directive();
    block();
    for (const auto& [index, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end())
        refuse_at(kernel.code[index].line, "there is no label " + std::string(label));
      kernel.code[index].target = found->second;
    }
    // Running off the end is a return.
    Instruction end;
    end.flow = Flow::kExit;
    end.line = peek().line;
    kernel.code.push_back(end);
    std::string name = kernel.name;
    if (!module_.kernels.emplace(name, std::move(kernel)).second) refuse("there are two kernels " + name);
  }

  // .param .align 8 .b8 name[40], or .param .u64 name
  void parameter() {
    expect(".param");
    std::size_t alignment = 0;
    if (take(".align")) alignment = plain_number();
    const std::optional<unsigned> bytes = type_bytes(word("a type"));
    if (!bytes.has_value() || *bytes == 0) refuse("a parameter has an unknown type");
    const std::string_view name = word("a parameter's name");
    std::size_t count = 1;
    if (take("[")) {
      count = plain_number();
      expect("]");
    }
    Kernel& kernel = *kernel_;
    const std::size_t offset = round_up(kernel.parameter_bytes, std::max<std::size_t>(alignment, *bytes));
    kernel.parameters.push_back({offset, *bytes * count});
    kernel.parameter_bytes = offset + *bytes * count;
    variables_[name] = {Space::kParameter, offset};
  }

  void kernel_directive() {
    if (take(".maxntid") || take(".reqntid")) {
      std::uint64_t threads = plain_number();
      while (take(",")) threads *= plain_number();
      kernel_->most_threads = static_cast<unsigned>(threads);
    } else if (take(".minnctapersm") || take(".maxnreg") || take(".pragma")) {
      next();
      take(";");
    } else {
      refuse("'" + std::string(peek().text) + "' is not known to this interpreter");
    }
  }

  // [.align 8] .b8 name[17408]; at the module's level the length may be open: dynamic shared memory.
  void shared_variable(std::map<std::string_view, Variable>& variables, Kernel* kernel) {
    std::size_t& total = kernel != nullptr ? kernel->shared_bytes : module_shared_bytes_;
    const auto [name, bytes, alignment] = variable();
    if (bytes == 0) {
      if (kernel != nullptr) refuse("shared memory of a kernel must have a length");
      variables[name] = {Space::kShared, kDynamicSharedBegin};
      return;
    }
    total = round_up(total, alignment);
    variables[name] = {Space::kShared, total};
    total += bytes;
  }

  struct Declared {
    std::string_view name;
    std::size_t bytes, alignment;
  };
  Declared variable() {
    std::size_t alignment = 0;
    if (take(".align")) alignment = plain_number();
    const std::optional<unsigned> element = type_bytes(word("a type"));
    if (!element.has_value() || *element == 0) refuse("a variable has an unknown type");
    const std::string_view name = word("a variable's name");
    std::size_t count = 1;
    if (take("[")) {
      count = peek().is("]") ? 0 : plain_number();
      expect("]");
    }
    expect(";");
    return {name, *element * count, std::max<std::size_t>(alignment, *element)};
  }

  // --- a kernel's body ---

  void block() {
    expect("{");
    scopes_.emplace_back();
    while (!take("}")) {
      if (peek().kind == TokenKind::kEnd) refuse("a block has no end");
      statement();
    }
    scopes_.pop_back();
  }

  void statement() {
    if (peek().is("{")) {
      block();
    } else if (take(".reg")) {
      registers();
    } else if (take(".shared")) {
      shared_variable(variables_, kernel_);
    } else if (take(".local")) {
      const auto [name, bytes, alignment] = variable();
      kernel_->local_bytes = round_up(kernel_->local_bytes, alignment);
      variables_[name] = {Space::kLocal, kernel_->local_bytes};
      kernel_->local_bytes += bytes;
    } else if (take(".pragma")) {
      next();
      expect(";");
    } else if (take(".loc")) {
      skip_line();
    } else if (peek().kind == TokenKind::kWord && peek(1).is(":")) {
      const std::string_view label = next().text;
      next();
      if (!labels_.emplace(label, static_cast<std::uint32_t>(kernel_->code.size())).second) {
        refuse("there are two labels " + std::string(label));
      }
    } else {
      instruction();
    }
  }

  // .reg .b32 %r<268>; or .reg .pred p, q;
  void registers() {
    const std::optional<unsigned> bytes = type_bytes(word("a type"));
    if (!bytes.has_value()) refuse("registers have an unknown type");
    do {
      const std::string name(word("a register's name"));
      if (take("<")) {
        const std::uint64_t count = plain_number();
        expect(">");
        for (std::uint64_t i = 0; i < count; ++i) add_register(name + std::to_string(i), *bytes);
      } else {
        add_register(name, *bytes);
      }
    } while (take(","));
    expect(";");
  }
  void add_register(const std::string& name, unsigned bytes) {
    scopes_.back()[name] = slots_->add(bytes, name);
  }

  std::optional<Slot> find_register(std::string_view name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->find(name); found != scope->end()) return found->second;
    }
    return slots_->special(name);
  }
  Slot expect_register(std::string_view name) {
    const std::optional<Slot> slot = find_register(name);
    if (!slot.has_value()) refuse("there is no register " + std::string(name));
    return *slot;
  }

  void instruction() {
    const unsigned line = peek().line;
    Slot guard;
    bool guarded = false, negated = false;
    if (take("@")) {
      guarded = true;
      negated = take("!");
      guard = expect_register(word("a predicate"));
      if (guard.bytes != 0) refuse("a guard must be a predicate");
    }
    const std::string_view opcode = word("an instruction");
    std::vector<Operand> operands;
    if (!take(";")) {
      do operands.push_back(operand());
      while (take(","));
      expect(";");
    }
    Instruction decoded;
    try {
      decoded = decode(opcode, operands, *slots_);
    } catch (const Fault& fault) {
      refuse_at(line, fault.what());
    }
    decoded.guard = guard;
    decoded.guarded = guarded;
    decoded.guard_negated = negated;
    decoded.line = line;
    if (decoded.flow == Flow::kBranch) branches_.emplace_back(kernel_->code.size(), operands[0].name);
    kernel_->code.push_back(decoded);
  }

  Operand operand() {
    Operand result;
    if (take("{")) {
      result.kind = Operand::Kind::kVector;
      do {
        const std::string_view name = word("a register");
        if (name == "_") {
          result.elements.push_back({{}, true});
        } else {
          result.elements.push_back({expect_register(name), false});
        }
      } while (take(","));
      expect("}");
      return result;
    }
    if (take("[")) {
      result.kind = Operand::Kind::kAddress;
      if (peek().kind == TokenKind::kNumber) {
        result.number = plain_number();
      } else {
        const std::string_view name = word("an address");
        if (const std::optional<Slot> slot = find_register(name); slot.has_value()) {
          result.slot = *slot;
          result.has_base = true;
        } else {
          place_variable(name, result);
        }
        if (take("+"))
          result.number += plain_number();
        else if (peek().is("-"))
          result.number += plain_number();
      }
      expect("]");
      return result;
    }
    result.negated = take("!");
    if (peek().kind == TokenKind::kNumber || peek().is("-")) {
      if (result.negated) refuse("'!' stands before a predicate only");
      return number();
    }
    const std::string_view name = word("an operand");
    if (name == "_") {
      result.kind = Operand::Kind::kDiscarded;
      if (take("|")) {
        result.has_second = true;
        result.second = expect_register(word("a predicate"));
      }
    } else if (const std::optional<Slot> slot = find_register(name); slot.has_value()) {
      result.kind = Operand::Kind::kRegister;
      result.slot = *slot;
      if (take("|")) {
        result.has_second = true;
        result.second = expect_register(word("a predicate"));
      }
    } else if (variables_.count(name) != 0) {
      result.kind = Operand::Kind::kVariable;
      place_variable(name, result);
      if (take("+")) result.number += plain_number();
    } else {
      result.kind = Operand::Kind::kLabel;
      result.name = name;
    }
    return result;
  }

  void place_variable(std::string_view name, Operand& operand) {
    const auto found = variables_.find(name);
    if (found == variables_.end()) refuse("there is no variable " + std::string(name));
    operand.space = found->second.space;
    operand.number = found->second.address;
  }

  std::shared_ptr<const std::string> text_;
  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  Module module_;
  std::map<std::string_view, Variable> module_variables_;
  std::size_t module_shared_bytes_ = 0;

  // The kernel that is being parsed.
  Kernel* kernel_ = nullptr;
  Slots* slots_ = nullptr;
  std::vector<std::map<std::string, Slot, std::less<>>> scopes_;
  std::map<std::string_view, Variable> variables_;
  std::map<std::string_view, std::uint32_t> labels_;
  std::vector<std::pair<std::size_t, std::string_view>> branches_;
};

}  // namespace

Module parse(std::string text) {
  return Parser(std::move(text)).run();
}

std::vector<std::string> kernel_names(const std::string& text) {
  constexpr std::string_view kEntry = ".entry ";
  std::vector<std::string> names;
  for (std::size_t at = text.find(kEntry); at != std::string::npos; at = text.find(kEntry, at)) {
    at += kEntry.size();
    names.push_back(text.substr(at, text.find_first_of(" (\t\n", at) - at));
  }
  return names;
}

std::string text_line(const std::string& text, unsigned line) {
  std::size_t begin = 0;
  for (; line > 1 && begin < text.size(); --line)
    begin = std::min(text.find('\n', begin), text.size() - 1) + 1;
  std::string result = text.substr(begin, text.find('\n', begin) - begin);
  for (char& c : result) {
    if (c == '\t') c = ' ';
  }
  const std::size_t first = result.find_first_not_of(' ');
  return first == std::string::npos ? std::string() : result.substr(first);
}

}  // namespace forebay::ptx
