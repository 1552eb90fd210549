// PickleReader: reads the plain data of a pickle. It reads protocols 2 to 5 into a table of values and
// executes nothing: an opcode that would import or call something is refused with its place and its name,
// except for a few names of plain data, which become empty containers or opaque values. With
// PickleNames::kAll names and calls are data, too: they are recorded and never followed.
//
// Bounds: values are counted against limits, strings stay in the input, and nothing recurses, so that no
// input takes more memory than the limits or more stack than a short one.
//
// Source: CPython, Lib/pickletools.py, for the meaning of each opcode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// A value is 16 bytes and refers to its pickle for everything else.
struct PickleValue {
  enum class Kind : std::uint8_t {
    kNone,
    kBool,
    kInteger,
    kFloat,
    kString,  // Text or bytes.
    kList,    // Also tuples and sets.
    kDict,
    kOpaque,  // Data of a known, harmless kind that is not read; also integers beyond 64 bits.
    kName,    // "torch.float32". With PickleNames::kAll alone, as is kObject.
    kObject,  // A name that was called: its name, its arguments and its state.
  };
  Kind kind = Kind::kNone;
  std::uint32_t length = 0;  // kString and kName: bytes.
  union {
    std::int64_t integer = 0;  // Also kBool.
    double number;
    const char* text;
    std::uint32_t container;
  };
};

struct PickleLimits {
  std::size_t values = std::size_t{1} << 28;      // In containers and on the stack. 16 bytes each.
  std::size_t containers = std::size_t{1} << 26;  // Lists and dicts. 24 bytes each.
};

enum class PickleNames : std::uint8_t {
  kKnown,  // A name of something else than plain data is refused.
  kAll,    // Names are kName, and calls of them kObject. Persistent ids are objects named kPersistentId.
};

// The content of one pickle. Requires: the text it was read from outlives it.
class Pickle {
 public:
  // Errors: kInvalidArgument with the byte offset of the opcode that cannot be read.
  static Result<Pickle> read(std::string_view text, const PickleLimits& limits = {},
                             PickleNames names = PickleNames::kKnown);
  Pickle() = default;
  Pickle(Pickle&&) noexcept = default;
  Pickle& operator=(Pickle&&) noexcept = default;

  const PickleValue& root() const { return root_; }

  // The elements of a list, in order; of a dict, keys and values in turn. Empty for other kinds.
  const std::vector<PickleValue>& items(const PickleValue& value) const;
  // The value at a key of a dict; null if it is no dict or has no such key. The last of equal keys counts. A
  // dict of more than kLookupLimit keys is not searched: it is no record, and a small file could make the
  // search very long.
  const PickleValue* find(const PickleValue& dict, std::string_view key) const;

  static constexpr std::size_t kLookupLimit = 256;

  static constexpr std::string_view kPersistentId = "persistent id";
  // The text of a kName, and that of a kObject's name; empty for other kinds.
  std::string_view name_of(const PickleValue& value) const;
  // The arguments of a kObject; empty for other kinds.
  const std::vector<PickleValue>& arguments(const PickleValue& object) const;
  // The state that a kObject was given, a dict as a rule; null if it was given none.
  const PickleValue* state_of(const PickleValue& object) const;
  // find() in the state.
  const PickleValue* attribute(const PickleValue& object, std::string_view name) const;

  // Call before a copy of so many bytes of the values. False if more would be copied in all than a pickle of
  // this length needs: lists that are in it once and named many times make copies without bound.
  bool may_copy(std::size_t bytes) const noexcept {
    copied_bytes_ += bytes;
    return copied_bytes_ <= kLeastCopied + kCopiedPerByte * text_bytes_;
  }

  static std::string_view text_of(const PickleValue& value) {
    return value.kind == PickleValue::Kind::kString ? std::string_view(value.text, value.length)
                                                    : std::string_view();
  }

 private:
  friend class PickleMachine;
  static constexpr std::size_t kLeastCopied = 1 << 20;
  // A chunk of a distributed checkpoint has 60 bytes and more, and 200 when it is copied.
  static constexpr std::size_t kCopiedPerByte = 32;

  PickleValue root_;
  std::size_t text_bytes_ = 0;
  mutable std::size_t copied_bytes_ = 0;
  std::vector<std::vector<PickleValue>> containers_;  // An object has three values: name, arguments, state.
  std::set<std::string, std::less<>> names_;          // Values of kind kName refer to them.
};

// The input begins as a pickle of a protocol that is read here.
bool is_pickle(std::string_view text);

// 0 or 1 if the input begins like a list or a dict in that protocol. These protocols do not state their
// number.
std::optional<int> old_pickle_protocol(std::string_view text);

}  // namespace forebay
