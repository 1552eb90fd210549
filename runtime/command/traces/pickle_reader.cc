#include "runtime/command/traces/pickle_reader.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "forebay/units.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay {
namespace {

// Opcodes, by their names in pickletools.
enum Opcode : unsigned char {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kDup = '2',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinFloat = 'G',
  kReduce = 'R',
  kBinString = 'T',
  kShortBinString = 'U',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kDict = 'd',
  kEmptyDict = '}',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kList = 'l',
  kEmptyList = ']',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kPersistent = 'Q',
  kSetItem = 's',
  kTuple = 't',
  kEmptyTuple = ')',
  kSetItems = 'u',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kProto = 0x80,
  kNewObject = 0x81,
  kNewObjectEx = 0x92,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
};

// Names that stand for plain data. Some become dicts; the content of the others is not read.
struct KnownName {
  std::string_view name;
  bool is_dict;
};
constexpr KnownName kKnownNames[] = {
    {"collections.OrderedDict", true},
    {"collections.defaultdict", true},
    {"builtins.set", false},
    {"builtins.frozenset", false},
    {"builtins.list", false},
    {"builtins.dict", true},
    {"torch.device", false},
    {"torch.Size", false},
    {"torch.dtype", false},
};

// GLOBAL pushes an opaque value: `integer` is the index of the known name plus one. Other opaque values have
// this:
constexpr std::int64_t kNotAName = 0;

// Different names of one pickle, and letters of one. Larger: a small file that combines long words takes more
// memory.
constexpr std::size_t kMostNames = 1 << 16;
constexpr std::size_t kMostNameLetters = 200;

}  // namespace

// The stack machine. Every step checks that its operands exist, and fails otherwise.
class PickleMachine {
 public:
  PickleMachine(std::string_view text, const PickleLimits& limits, PickleNames names)
      : text_(text), limits_(limits), takes_all_names_(names == PickleNames::kAll) {}

  Result<Pickle> run() {
    while (!stopped_) {
      at_ = position_;
      if (position_ >= text_.size()) return refuse("the pickle ends before its STOP; is the file cut off?");
      const auto opcode = static_cast<unsigned char>(text_[position_++]);
      step(opcode);
      if (!failure_.empty()) return refuse(failure_);
    }
    return std::move(pickle_);
  }

 private:
  using Kind = PickleValue::Kind;
  using Handler = void (*)(PickleMachine&);

  Status refuse(const std::string& found_and_try) const {
    return {StatusCode::kInvalidArgument, "byte " + std::to_string(at_) + ": " + found_and_try};
  }
  void fail(std::string found_and_try) {
    if (failure_.empty()) failure_ = std::move(found_and_try);
  }

  // --- input ---

  void check_protocol(std::uint64_t protocol) {
    if (failure_.empty() && (protocol < 2 || protocol > 5)) {
      fail("protocol " + std::to_string(protocol) +
           ", and protocols 2 to 5 are read; write it again with pickle.dump(snapshot, file, protocol=4)");
    }
  }
  void check_frame(std::uint64_t bytes) {
    if (bytes > text_.size() - position_) {
      fail("a frame of " + format_count(bytes, "byte") + " where " +
           format_count(text_.size() - position_, "is", "are") + " left; is the file cut off?");
    }
  }
  void stop() {
    pickle_.root_ = pop();
    pickle_.text_bytes_ = text_.size();
    stopped_ = true;
  }

  // The next bytes, little endian. 0 after a failure.
  std::uint64_t take_number(std::size_t bytes) {
    const std::string_view part = take(bytes);
    std::uint64_t value = 0;
    for (std::size_t i = part.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(part[i]);
    return value;
  }
  std::string_view take(std::uint64_t bytes) {
    if (bytes > text_.size() - position_) {
      fail("an operand of " + format_count(bytes, "byte") + " where " +
           format_count(text_.size() - position_, "is", "are") + " left; is the file cut off?");
      return {};
    }
    const std::string_view part = text_.substr(position_, bytes);
    position_ += bytes;
    return part;
  }
  std::string_view take_line() {
    const std::size_t end = text_.find('\n', position_);
    if (end == std::string_view::npos) {
      fail("a line without an end; is the file cut off?");
      return {};
    }
    const std::string_view line = text_.substr(position_, end - position_);
    position_ = end + 1;
    return line;
  }

  // --- stack ---

  void push(PickleValue value) {
    if (count_value()) stack_.push_back(value);
  }
  void push(Kind kind, std::int64_t integer = 0) {
    PickleValue value;
    value.kind = kind;
    value.integer = integer;
    push(value);
  }
  // Two's complement, little endian; 9 bytes if the ninth is the sign of a value that fits.
  void push_long(std::string_view digits) {
    if (digits.size() > 8) return push(Kind::kOpaque, kNotAName);
    std::uint64_t value = !digits.empty() && (digits.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;
    for (std::size_t i = digits.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(digits[i]);
    push(Kind::kInteger, static_cast<std::int64_t>(value));
  }
  // Big endian.
  void push_float(std::string_view digits) {
    std::uint64_t bits = 0;
    for (const char digit : digits) bits = bits << 8 | static_cast<unsigned char>(digit);
    PickleValue value;
    value.kind = Kind::kFloat;
    value.number = std::bit_cast<double>(bits);
    push(value);
  }
  void push_text(std::string_view text) {
    if (text.size() > UINT32_MAX) return fail("a string of more than 4 GiB; record less history");
    PickleValue value;
    value.kind = Kind::kString;
    value.length = static_cast<std::uint32_t>(text.size());
    value.text = text.data();
    push(value);
  }
  PickleValue pop() {
    if (stack_.size() <= floor()) {
      fail("an opcode needs a value that is not there; the file is damaged, record it again");
      return {};
    }
    const PickleValue value = stack_.back();
    stack_.pop_back();
    --value_count_;
    return value;
  }
  PickleValue* top() {
    if (stack_.size() > floor()) return &stack_.back();
    fail("an opcode needs a value that is not there; the file is damaged, record it again");
    return nullptr;
  }
  // Values below the last mark are out of reach.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  void push_mark() {
    if (marks_.size() >= limits_.values) return fail("too many marks; the file is damaged, record it again");
    marks_.push_back(stack_.size());
  }
  void pop_value_or_mark() {
    if (stack_.size() == floor() && !marks_.empty()) {
      marks_.pop_back();
    } else {
      pop();
    }
  }
  // Removes the last mark. Returns the index of its first value on the stack.
  std::optional<std::size_t> pop_mark() {
    if (marks_.empty()) {
      fail("an opcode needs a MARK that is not there; the file is damaged, record it again");
      return std::nullopt;
    }
    const std::size_t begin = marks_.back();
    marks_.pop_back();
    return begin;
  }
  void drop_from(std::size_t begin) {
    value_count_ -= stack_.size() - begin;
    stack_.resize(begin);
  }
  bool count_value() {
    if (value_count_ >= limits_.values) {
      fail("more than " + std::to_string(limits_.values) + " values; record less history (max_entries)");
      return false;
    }
    ++value_count_;
    return true;
  }

  // --- containers ---

  void push_container(Kind kind) {
    if (pickle_.containers_.size() >= limits_.containers) {
      return fail("more than " + std::to_string(limits_.containers) +
                  " containers; record less history (max_entries)");
    }
    PickleValue value;
    value.kind = kind;
    value.container = static_cast<std::uint32_t>(pickle_.containers_.size());
    pickle_.containers_.emplace_back();
    push(value);
  }
  // A new container with the stack's values from `begin` on.
  void collect(Kind kind, std::size_t begin) {
    if (kind == Kind::kDict && (stack_.size() - begin) % 2 != 0) {
      return fail("a dict with a key and no value; the file is damaged, record it again");
    }
    const std::vector<PickleValue> values(stack_.begin() + static_cast<std::ptrdiff_t>(begin), stack_.end());
    stack_.resize(begin);
    push_container(kind);
    if (failure_.empty()) pickle_.containers_.back() = values;
  }
  void collect_last(std::size_t count) {
    if (stack_.size() - floor() < count) {
      return fail("an opcode needs a value that is not there; the file is damaged, record it again");
    }
    collect(Kind::kList, stack_.size() - count);
  }
  // Moves the stack's values from `begin` on into the container below them.
  void extend(Kind kind, std::size_t begin) {
    if (begin <= floor())
      return fail("an opcode needs a container that is not there; the file is damaged, record it again");
    const PickleValue target = stack_[begin - 1];
    if (kind == Kind::kDict && (stack_.size() - begin) % 2 != 0) {
      return fail("a dict with a key and no value; the file is damaged, record it again");
    }
    if (target.kind == Kind::kOpaque || target.kind == Kind::kObject) return drop_from(begin);
    if (target.kind != kind)
      return fail("values for a container of another kind; the file is damaged, record it again");
    std::vector<PickleValue>& items = pickle_.containers_[target.container];
    items.insert(items.end(), stack_.begin() + static_cast<std::ptrdiff_t>(begin), stack_.end());
    stack_.resize(begin);
  }

  void extend_by_last(Kind kind, std::size_t count) {
    extend(kind, stack_.size() - std::min(stack_.size(), count));
  }

  // --- names ---

  void push_name_of_lines() {
    const std::string_view module = take_line();
    const std::string_view name = take_line();
    if (failure_.empty()) push_name(module, name);
  }
  void push_name_of_stack() {
    const PickleValue name = pop();
    const PickleValue module = pop();
    if (failure_.empty()) push_name(Pickle::text_of(module), Pickle::text_of(name));
  }
  void push_name(std::string_view module, std::string_view name) {
    if (takes_all_names_) return push_any_name(module, name);
    const std::string full = std::string(module.substr(0, 80)) + "." + std::string(name.substr(0, 80));
    for (std::size_t i = 0; i < std::size(kKnownNames); ++i) {
      if (kKnownNames[i].name == full) return push(Kind::kOpaque, static_cast<std::int64_t>(i) + 1);
    }
    fail("it names " + quote_text(full) +
         ", which is code and not data; nothing of it was run. A memory snapshot holds data alone: do not "
         "load this file with Python's pickle unless you trust its author");
  }
  void push_any_name(std::string_view module, std::string_view name) {
    if (module.size() + name.size() > kMostNameLetters) return fail("a name of too many letters");
    if (pickle_.names_.size() >= kMostNames) return fail("too many different names");
    const std::string& full = *pickle_.names_.insert(std::string(module) + "." + std::string(name)).first;
    push_interned(full);
  }
  void push_interned(const std::string& full) {
    PickleValue value;
    value.kind = Kind::kName;
    value.length = static_cast<std::uint32_t>(full.size());
    value.text = full.data();
    push(value);
  }
  // A call of a name, which is not made: a dict for the names of dicts, otherwise an object.
  void record_call() {
    if (stack_.size() - floor() < 2) {
      return fail("an opcode needs a value that is not there; the file is damaged, record it again");
    }
    const std::string_view name = pickle_.name_of(stack_[stack_.size() - 2]);
    for (const KnownName& known : kKnownNames) {
      if (!known.is_dict || known.name != name) continue;
      drop_from(stack_.size() - 2);
      return push_container(Kind::kDict);
    }
    push(Kind::kNone);  // The state, until BUILD.
    if (failure_.empty()) collect(Kind::kObject, stack_.size() - 3);
  }
  void record_persistent_id() {
    const PickleValue id = pop();
    if (!failure_.empty()) return;
    push_interned(*pickle_.names_.insert(std::string(Pickle::kPersistentId)).first);
    push(id);
    if (failure_.empty()) record_call();
  }
  void set_state() {
    const PickleValue state = pop();
    if (!failure_.empty() || stack_.size() <= floor()) return;
    if (stack_.back().kind == Kind::kObject) pickle_.containers_[stack_.back().container][2] = state;
  }
  // A call of a known name makes an empty dict or an opaque value.
  void call_name() {
    if (takes_all_names_) return record_call();
    pop();  // The arguments.
    const PickleValue name = pop();
    if (!failure_.empty()) return;
    if (name.kind != Kind::kOpaque || name.integer == kNotAName) {
      return fail("it calls something that is not a known name of plain data; nothing of it was run");
    }
    if (kKnownNames[static_cast<std::size_t>(name.integer) - 1].is_dict) return push_container(Kind::kDict);
    push(Kind::kOpaque, kNotAName);
  }

  // --- memo ---

  void store(std::uint64_t index) {
    const PickleValue* value = top();
    if (value == nullptr) return;
    // Picklers number from 0 without gaps, one number per value at most; write_memory_snapshot has its own
    // numbers of one byte for its words.
    if ((index > memo_.size() + kMemoGapLimit && index > UINT8_MAX) || index >= limits_.values) {
      return fail("a memo index far beyond those before; the file is damaged, record it again");
    }
    if (index >= memo_.size()) memo_.resize(index + 1);
    memo_[index] = *value;
  }
  void recall(std::uint64_t index) {
    if (index >= memo_.size())
      return fail("a memo index without a stored value; the file is damaged, record it again");
    push(memo_[index]);
  }

  // By opcode; null for an opcode that is refused.
  static constexpr std::array<Handler, 256> make_handlers();
  void step(unsigned char opcode);

  // A pickle of n bytes stores at most n times, so gaps of at most this many bound the memo.
  static constexpr std::size_t kMemoGapLimit = 16;

  const std::string_view text_;
  const PickleLimits limits_;
  const bool takes_all_names_;
  std::size_t position_ = 0;
  std::size_t at_ = 0;  // Position of the opcode that runs.
  bool stopped_ = false;
  std::string failure_;
  std::vector<PickleValue> stack_;
  std::vector<std::size_t> marks_;
  std::vector<PickleValue> memo_;
  std::size_t value_count_ = 0;
  Pickle pickle_;
};

constexpr std::array<PickleMachine::Handler, 256> PickleMachine::make_handlers() {
  using M = PickleMachine;
  std::array<Handler, 256> on{};
  on[kProto] = [](M& m) { m.check_protocol(m.take_number(1)); };
  on[kFrame] = [](M& m) { m.check_frame(m.take_number(8)); };
  on[kStop] = [](M& m) { m.stop(); };

  on[kNone] = [](M& m) { m.push(Kind::kNone); };
  on[kNewTrue] = [](M& m) { m.push(Kind::kBool, 1); };
  on[kNewFalse] = [](M& m) { m.push(Kind::kBool, 0); };
  on[kBinInt] = [](M& m) { m.push(Kind::kInteger, static_cast<std::int32_t>(m.take_number(4))); };
  on[kBinInt1] = [](M& m) { m.push(Kind::kInteger, static_cast<std::int64_t>(m.take_number(1))); };
  on[kBinInt2] = [](M& m) { m.push(Kind::kInteger, static_cast<std::int64_t>(m.take_number(2))); };
  on[kLong1] = [](M& m) { m.push_long(m.take(m.take_number(1))); };
  on[kLong4] = [](M& m) { m.push_long(m.take(m.take_number(4))); };
  on[kBinFloat] = [](M& m) { m.push_float(m.take(8)); };
  on[kShortBinString] = on[kShortBinBytes] =
      on[kShortBinUnicode] = [](M& m) { m.push_text(m.take(m.take_number(1))); };
  on[kBinString] = on[kBinBytes] = on[kBinUnicode] = [](M& m) { m.push_text(m.take(m.take_number(4))); };
  on[kBinUnicode8] = on[kBinBytes8] = on[kByteArray8] = [](M& m) { m.push_text(m.take(m.take_number(8))); };

  on[kMark] = [](M& m) { m.push_mark(); };
  on[kPop] = [](M& m) { m.pop_value_or_mark(); };
  on[kPopMark] = [](M& m) {
    if (const auto begin = m.pop_mark()) m.drop_from(*begin);
  };
  on[kDup] = [](M& m) {
    if (const PickleValue* value = m.top()) m.push(*value);
  };

  on[kEmptyList] = on[kEmptyTuple] = on[kEmptySet] = [](M& m) { m.push_container(Kind::kList); };
  on[kEmptyDict] = [](M& m) { m.push_container(Kind::kDict); };
  on[kList] = on[kTuple] = on[kFrozenSet] = [](M& m) {
    if (const auto begin = m.pop_mark()) m.collect(Kind::kList, *begin);
  };
  on[kDict] = [](M& m) {
    if (const auto begin = m.pop_mark()) m.collect(Kind::kDict, *begin);
  };
  on[kTuple1] = [](M& m) { m.collect_last(1); };
  on[kTuple2] = [](M& m) { m.collect_last(2); };
  on[kTuple3] = [](M& m) { m.collect_last(3); };
  on[kAppend] = [](M& m) { m.extend_by_last(Kind::kList, 1); };
  on[kSetItem] = [](M& m) { m.extend_by_last(Kind::kDict, 2); };
  on[kAppends] = on[kAddItems] = [](M& m) {
    if (const auto begin = m.pop_mark()) m.extend(Kind::kList, *begin);
  };
  on[kSetItems] = [](M& m) {
    if (const auto begin = m.pop_mark()) m.extend(Kind::kDict, *begin);
  };

  on[kBinGet] = [](M& m) { m.recall(m.take_number(1)); };
  on[kLongBinGet] = [](M& m) { m.recall(m.take_number(4)); };
  on[kBinPut] = [](M& m) { m.store(m.take_number(1)); };
  on[kLongBinPut] = [](M& m) { m.store(m.take_number(4)); };
  on[kMemoize] = [](M& m) { m.store(m.memo_.size()); };

  on[kGlobal] = [](M& m) { m.push_name_of_lines(); };
  on[kStackGlobal] = [](M& m) { m.push_name_of_stack(); };
  on[kReduce] = on[kNewObject] = [](M& m) { m.call_name(); };
  on[kNewObjectEx] = [](M& m) {
    m.pop();  // The arguments by keyword.
    m.call_name();
  };
  on[kPersistent] = [](M& m) { m.record_persistent_id(); };
  on[kBuild] = [](M& m) { m.set_state(); };
  return on;
}

void PickleMachine::step(unsigned char opcode) {
  static constexpr std::array<Handler, 256> kHandlers = make_handlers();
  const bool is_known = takes_all_names_ || (opcode != kPersistent && opcode != kNewObjectEx);
  if (kHandlers[opcode] != nullptr && is_known) return kHandlers[opcode](*this);
  constexpr char kDigits[] = "0123456789abcdef";
  const char text[] = {kDigits[opcode >> 4], kDigits[opcode & 15], '\0'};
  fail(std::string("opcode 0x") + text +
       " is not one of plain data; give a file that pickle.dump wrote of a memory snapshot");
}

Result<Pickle> Pickle::read(std::string_view text, const PickleLimits& limits, PickleNames names) {
  return PickleMachine(text, limits, names).run();
}

std::string_view Pickle::name_of(const PickleValue& value) const {
  if (value.kind == PickleValue::Kind::kName) return {value.text, value.length};
  if (value.kind != PickleValue::Kind::kObject) return {};
  const PickleValue& name = containers_[value.container][0];
  return name.kind == PickleValue::Kind::kName ? std::string_view(name.text, name.length)
                                               : std::string_view();
}

const std::vector<PickleValue>& Pickle::arguments(const PickleValue& object) const {
  static const PickleValue kNothing{};
  return items(object.kind == PickleValue::Kind::kObject ? containers_[object.container][1] : kNothing);
}

const PickleValue* Pickle::state_of(const PickleValue& object) const {
  if (object.kind != PickleValue::Kind::kObject) return nullptr;
  const PickleValue& state = containers_[object.container][2];
  return state.kind == PickleValue::Kind::kNone ? nullptr : &state;
}

const PickleValue* Pickle::attribute(const PickleValue& object, std::string_view name) const {
  const PickleValue* const state = state_of(object);
  return state == nullptr ? nullptr : find(*state, name);
}

const std::vector<PickleValue>& Pickle::items(const PickleValue& value) const {
  static const std::vector<PickleValue>& kEmpty = *new std::vector<PickleValue>();
  const bool is_container = value.kind == PickleValue::Kind::kList || value.kind == PickleValue::Kind::kDict;
  return is_container ? containers_[value.container] : kEmpty;
}

const PickleValue* Pickle::find(const PickleValue& dict, std::string_view key) const {
  if (dict.kind != PickleValue::Kind::kDict) return nullptr;
  const std::vector<PickleValue>& all = items(dict);
  if (all.size() > 2 * kLookupLimit) return nullptr;
  for (std::size_t i = all.size(); i >= 2; i -= 2) {
    const PickleValue& name = all[i - 2];
    if (name.kind == PickleValue::Kind::kString && text_of(name) == key) return &all[i - 1];
  }
  return nullptr;
}

bool is_pickle(std::string_view text) {
  return text.size() >= 2 && static_cast<unsigned char>(text[0]) == kProto && text[1] >= 2 && text[1] <= 5;
}

std::optional<int> old_pickle_protocol(std::string_view text) {
  const auto begins = [&](std::string_view start) { return text.substr(0, start.size()) == start; };
  // The container, and at once the memo that it goes into: as text in protocol 0, as a byte in protocol 1.
  if (begins("(dp") || begins("(lp")) {
    return text.size() > 3 && text[3] >= '0' && text[3] <= '9' ? std::optional<int>(0) : std::nullopt;
  }
  if (begins("}q") || begins("]q")) return 1;
  return std::nullopt;
}

}  // namespace forebay
