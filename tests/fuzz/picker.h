// Choices taken from the bytes of a fuzzer, so that a changed byte changes one choice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace forebay::testing {

class Picker {
 public:
  explicit Picker(std::string_view bytes) : bytes_(bytes) {}

  bool is_empty() const { return bytes_.empty(); }
  // 0 to count - 1; 0 once the bytes are used up.
  std::uint32_t pick(std::uint32_t count) {
    std::uint32_t number = 0;
    for (std::uint32_t range = count - 1; range > 0 && !bytes_.empty(); range >>= 8)
      number = number << 8 | take();
    return number % count;
  }
  std::uint64_t number() {
    std::uint64_t number = 0;
    for (int i = 0; i < 8 && !bytes_.empty(); ++i) number = number << 8 | take();
    return number;
  }
  std::string text(std::size_t most) {
    const std::string_view taken = bytes_.substr(0, pick(static_cast<std::uint32_t>(most) + 1));
    bytes_.remove_prefix(taken.size());
    return std::string(taken);
  }
  template <typename T, std::size_t count>
  const T& one_of(const T (&values)[count]) {
    return values[pick(static_cast<std::uint32_t>(count))];
  }

 private:
  unsigned char take() {
    const auto byte = static_cast<unsigned char>(bytes_.front());
    bytes_.remove_prefix(1);
    return byte;
  }

  std::string_view bytes_;
};

}  // namespace forebay::testing
