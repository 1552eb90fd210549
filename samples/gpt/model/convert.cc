#include "model/convert.h"

#include "model/definitions.h"

namespace forebay::gpt {
namespace {

using definitions::Element;

[[maybe_unused]] constexpr std::size_t kParallelCount =
    1u << 15;  // Below it starting threads costs more than it saves.

template <DataType type>
void widen_each(const std::byte* source_bytes, float* target, std::size_t count) {
  const auto* source = reinterpret_cast<const typename Element<type>::Storage*>(source_bytes);
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
  for (std::size_t i = 0; i < count; ++i) target[i] = Element<type>::load(source[i]);
}

template <DataType type>
void narrow_each(const float* source, std::byte* target_bytes, std::size_t count, bool accumulate) {
  auto* target = reinterpret_cast<typename Element<type>::Storage*>(target_bytes);
  if (accumulate) {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
    for (std::size_t i = 0; i < count; ++i)
      target[i] = Element<type>::round(Element<type>::load(target[i]) + source[i]);
  } else {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
    for (std::size_t i = 0; i < count; ++i) target[i] = Element<type>::round(source[i]);
  }
}

}  // namespace

void widen(DataType type, const std::byte* source, float* target, std::size_t count) {
  switch (type) {
    case DataType::kFloat32:
      return widen_each<DataType::kFloat32>(source, target, count);
    case DataType::kBfloat16:
      return widen_each<DataType::kBfloat16>(source, target, count);
    case DataType::kFloat16:
      return widen_each<DataType::kFloat16>(source, target, count);
  }
}

void narrow(DataType type, const float* source, std::byte* target, std::size_t count, bool accumulate) {
  switch (type) {
    case DataType::kFloat32:
      return narrow_each<DataType::kFloat32>(source, target, count, accumulate);
    case DataType::kBfloat16:
      return narrow_each<DataType::kBfloat16>(source, target, count, accumulate);
    case DataType::kFloat16:
      return narrow_each<DataType::kFloat16>(source, target, count, accumulate);
  }
}

}  // namespace forebay::gpt
