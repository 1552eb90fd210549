// Writes pickles opcode by opcode, so that tests need no Python and can write invalid pickles.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace forebay::testing {

class PickleWriter {
 public:
  explicit PickleWriter(int protocol = 4) { raw("\x80").byte(protocol); }

  PickleWriter& raw(std::string_view bytes) {
    text_ += bytes;
    return *this;
  }
  PickleWriter& byte(int value) {
    text_ += static_cast<char>(value);
    return *this;
  }
  PickleWriter& number(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) byte(static_cast<int>(value >> (8 * i) & 0xff));
    return *this;
  }
  // Values.
  PickleWriter& text(std::string_view value) { return raw("X").number(value.size(), 4).raw(value); }
  PickleWriter& integer(std::int64_t value) {
    return raw("\x8a").byte(8).number(static_cast<std::uint64_t>(value), 8);
  }
  PickleWriter& none() { return raw("N"); }
  PickleWriter& empty_list() { return raw("]"); }
  PickleWriter& empty_dict() { return raw("}"); }
  // Between begin_list and end_list come its elements; between begin_dict and end_dict keys and values in
  // turn.
  PickleWriter& begin_list() { return raw("]("); }
  PickleWriter& end_list() { return raw("e"); }
  PickleWriter& begin_dict() { return raw("}("); }
  PickleWriter& end_dict() { return raw("u"); }
  PickleWriter& entry(std::string_view key, std::int64_t value) { return text(key).integer(value); }
  PickleWriter& entry(std::string_view key, std::string_view value) { return text(key).text(value); }

  // The whole, with its STOP.
  std::string finish() const { return text_ + "."; }
  // The bytes written so far.
  const std::string& so_far() const { return text_; }

 private:
  std::string text_;
};

}  // namespace forebay::testing
