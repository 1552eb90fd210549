#include <algorithm>

#include "kernels/host_kernels.h"
#include "kernels/host_moments.h"

namespace forebay::host_kernels {
namespace {

using namespace definitions;

void load_bfloat16(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const auto* kept_m = static_cast<const std::uint16_t*>(moments.m);
  const auto* kept_v = static_cast<const std::uint16_t*>(moments.v);
  for (std::size_t i = begin; i < end; ++i) {
    m[i - begin] = bfloat16_to_float(kept_m[i]);
    v[i - begin] = bfloat16_to_float(kept_v[i]);
  }
}

void store_bfloat16(const float* m, const float* v, std::size_t begin, std::size_t end,
                    const Moments& moments, Rounding rounding) {
  auto* kept_m = static_cast<std::uint16_t*>(moments.m);
  auto* kept_v = static_cast<std::uint16_t*>(moments.v);
  for (std::size_t i = begin; i < end; ++i) {
    const float new_m = canonical(m[i - begin]), new_v = canonical(v[i - begin]);
    const DitherBits random = dither_bits(rounding.seed, new_m, new_v, kBfloat16Shift);
    kept_m[i] = moment_to_bfloat16(new_m, rounding.dithered, random.m);
    kept_v[i] = moment_to_bfloat16(new_v, rounding.dithered, random.v);
  }
}

void load_block8(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const auto* m_codes = static_cast<const std::uint8_t*>(moments.m);
  const auto* v_codes = static_cast<const std::uint8_t*>(moments.v);
  for (std::size_t i = begin; i < end; ++i) {
    const std::size_t block = i / kMomentBlockCount;
    m[i - begin] = m_from_code(m_codes[i], moment_exponent_read(moments.m_exponents[block]));
    v[i - begin] = v_from_code(v_codes[i], moment_exponent_read(moments.v_exponents[block]));
  }
}

void store_block8(const float* m, const float* v, std::size_t begin, std::size_t end, const Moments& moments,
                  Rounding rounding) {
  auto* m_codes = static_cast<std::uint8_t*>(moments.m);
  auto* v_codes = static_cast<std::uint8_t*>(moments.v);
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    const std::size_t stop = std::min(end, start + kMomentBlockCount);
    std::uint32_t greatest_m = 0, greatest_v = 0;
    for (std::size_t i = start; i < stop; ++i) {
      greatest_m = std::max(greatest_m, float_bits(m[i - begin]) & 0x7FFFFFFFu);
      greatest_v = std::max(greatest_v, float_bits(v[i - begin]) & 0x7FFFFFFFu);
    }
    const std::uint32_t m_exponent = moment_exponent(greatest_m), v_exponent = moment_exponent(greatest_v);
    moments.m_exponents[start / kMomentBlockCount] = static_cast<std::uint8_t>(m_exponent);
    moments.v_exponents[start / kMomentBlockCount] = static_cast<std::uint8_t>(v_exponent);
    for (std::size_t i = start; i < stop; ++i) {
      const float new_m = canonical(m[i - begin]), new_v = canonical(v[i - begin]);
      const DitherBits random = dither_bits(rounding.seed, new_m, new_v, kMomentShift);
      const bool m_nan = m_exponent == kMomentExponentNan, v_nan = v_exponent == kMomentExponentNan;
      m_codes[i] = m_nan ? 0 : m_to_code(new_m, m_exponent, rounding.dithered, random.m);
      v_codes[i] = v_nan ? 0 : v_to_code(new_v, v_exponent, rounding.dithered, random.v);
    }
  }
}

void load(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const auto function = moments.format == MomentFormat::kBfloat16 ? load_bfloat16 : load_block8;
  function(moments, begin, end, m, v);
}

void store(const float* m, const float* v, std::size_t begin, std::size_t end, const Moments& moments,
           Rounding rounding) {
  const auto function = moments.format == MomentFormat::kBfloat16 ? store_bfloat16 : store_block8;
  function(m, v, begin, end, moments, rounding);
}

void update(const HostAdamArguments& a, std::size_t begin, std::size_t end, Rounding rounding) {
  update_in_blocks(a, begin, end, rounding, scalar_moment_kernels(), scalar_kernels());
}

// The elements of `moments` from the start of a block on. `no_v` stands in for a v that there is none of.
Moments moments_from(const Moments& moments, std::size_t start, std::uint16_t* no_v) {
  const std::size_t offset = moment_bytes(moments.format, start), block = start / kMomentBlockCount;
  Moments part;
  part.format = moments.format;
  part.m = static_cast<std::byte*>(moments.m) + offset;
  part.v = moments.v != nullptr ? static_cast<std::byte*>(moments.v) + offset : static_cast<void*>(no_v);
  if (moments.format != MomentFormat::kBlock8) return part;
  part.m_exponents = moments.m_exponents + block;
  part.v_exponents = moments.v != nullptr ? moments.v_exponents + block
                                          : reinterpret_cast<std::uint8_t*>(no_v + kMomentBlockCount);
  return part;
}

}  // namespace

const MomentKernels& scalar_moment_kernels() noexcept {
  static constexpr MomentKernels kKernels = {"scalar", load, store, update};
  return kKernels;
}

AdamWArguments from_element(const AdamWArguments& arguments, std::size_t start) noexcept {
  AdamWArguments part = arguments;
  part.gradient = static_cast<const std::byte*>(part.gradient) + start * element_bytes(part.gradient_type);
  if (part.master != nullptr) part.master += start;
  if (part.parameter != nullptr)
    part.parameter = static_cast<std::byte*>(part.parameter) + start * element_bytes(part.parameter_type);
  return part;
}

void update_in_blocks(const HostAdamArguments& a, std::size_t begin, std::size_t end, Rounding rounding,
                      const MomentKernels& moments, const RangeKernels& kernels) {
  const bool is_narrow = a.moments.format != MomentFormat::kFloat32;
  const bool has_v = has_second_moment(a.update.optimizer);
  const std::uint64_t seed = step_seed(a.half.key, a.step);
  alignas(64) float p[kMomentBlockCount], m[kMomentBlockCount], v[kMomentBlockCount];
  std::uint16_t no_v[kMomentBlockCount + 1] = {};
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    const std::size_t count = std::min(end - start, kMomentBlockCount);
    const Moments kept = moments_from(a.moments, start, no_v);
    AdamWArguments part = from_element(a.update, start);
    std::uint16_t* const half = a.half.elements == nullptr ? nullptr : a.half.elements + start;
    if (half != nullptr) {
      kernels.cast({half, p, count, DataType::kBfloat16, DataType::kFloat32}, 0, count);
      part.master = p;
    }
    part.m = m;
    part.v = has_v ? v : nullptr;
    if (is_narrow) {
      moments.load(kept, 0, count, m, v);
    } else {
      part.m = static_cast<float*>(kept.m);
      if (has_v) part.v = static_cast<float*>(kept.v);
    }
    kernels.adamw(part, 0, count);
    if (is_narrow) moments.store(m, v, 0, count, kept, rounding);
    for (std::size_t i = 0; half != nullptr && i < count; ++i)
      half[i] = master_to_bfloat16(p[i], rounding.dithered, seed, a.half.first + start + i);
  }
}

}  // namespace forebay::host_kernels
