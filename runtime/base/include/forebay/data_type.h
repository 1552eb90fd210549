// The element types that forebay stores, sends and computes on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/language.h"

namespace forebay {

enum class DataType : std::uint8_t { kFloat32, kBfloat16, kFloat16 };

constexpr std::size_t element_bytes(DataType type) noexcept {
  return type == DataType::kFloat32 ? 4 : 2;
}

// "fp32", "bf16" or "fp16": the words of the command line and of reports.
constexpr const char* data_type_name(DataType type) noexcept {
  switch (type) {
    case DataType::kFloat32:
      return "fp32";
    case DataType::kBfloat16:
      return "bf16";
    case DataType::kFloat16:
      return "fp16";
  }
  return "?";
}

}  // namespace forebay
