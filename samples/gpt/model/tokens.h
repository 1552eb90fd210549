// Tokens on the host, and lists of them on a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/conversions.h"

namespace forebay::gpt {

using Token = std::uint16_t;
inline constexpr std::size_t kVocabularyMax = std::size_t{1} << 16;

// Tokens in a device's memory: a byte each where the vocabulary has room in it, else 16 bits.
class TokenList {
 public:
  FOREBAY_DEVICE TokenList(const std::uint8_t* tokens) : tokens_(tokens), bytes_(1) {}  // NOLINT
  FOREBAY_DEVICE TokenList(const Token* tokens) : tokens_(tokens), bytes_(2) {}         // NOLINT

  static std::size_t bytes_of_token(std::size_t vocabulary) { return vocabulary <= 256 ? 1 : 2; }
  static TokenList at(const std::byte* place, std::size_t vocabulary) {
    if (bytes_of_token(vocabulary) == 1) return reinterpret_cast<const std::uint8_t*>(place);
    return reinterpret_cast<const Token*>(place);
  }

  FOREBAY_DEVICE std::size_t operator[](std::size_t i) const {
    return bytes_ == 1 ? static_cast<const std::uint8_t*>(tokens_)[i] : static_cast<const Token*>(tokens_)[i];
  }

 private:
  const void* tokens_;
  std::size_t bytes_;
};

}  // namespace forebay::gpt
