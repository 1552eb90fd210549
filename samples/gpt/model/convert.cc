#include "model/convert.h"

#include "model/definitions.h"

namespace forebay::gpt {
namespace {

using definitions::Element;

// Below it starting threads costs more than it saves.
[[maybe_unused]] constexpr std::size_t kParallelCount = 1u << 15;

// Calls f(Element<type>()).
template <typename Function>
void with_element(DataType type, Function f) {
  switch (type) {
    case DataType::kFloat32:
      return f(Element<DataType::kFloat32>());
    case DataType::kBfloat16:
      return f(Element<DataType::kBfloat16>());
    case DataType::kFloat16:
      return f(Element<DataType::kFloat16>());
  }
}

}  // namespace

void widen(DataType type, const std::byte* source_bytes, float* target, std::size_t count) {
  with_element(type, [=](auto element) {
    const auto* source = reinterpret_cast<const typename decltype(element)::Storage*>(source_bytes);
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
    for (std::size_t i = 0; i < count; ++i) target[i] = decltype(element)::load(source[i]);
  });
}

void narrow(DataType type, const float* source, std::byte* target_bytes, std::size_t count, bool accumulate) {
  with_element(type, [=](auto element) {
    auto* target = reinterpret_cast<typename decltype(element)::Storage*>(target_bytes);
    if (accumulate) {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
      for (std::size_t i = 0; i < count; ++i)
        target[i] = decltype(element)::round(decltype(element)::load(target[i]) + source[i]);
    } else {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
      for (std::size_t i = 0; i < count; ++i) target[i] = decltype(element)::round(source[i]);
    }
  });
}

}  // namespace forebay::gpt
