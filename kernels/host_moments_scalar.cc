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
    const std::uint32_t random = dither_bits(rounding.seed, new_m, new_v);
    kept_m[i] = moment_to_bfloat16(new_m, rounding.dithered, random >> 16);
    kept_v[i] = moment_to_bfloat16(new_v, rounding.dithered, random & 0xFFFFu);
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
      const std::uint32_t random = dither_bits(rounding.seed, new_m, new_v);
      const bool m_nan = m_exponent == kMomentExponentNan, v_nan = v_exponent == kMomentExponentNan;
      m_codes[i] = m_nan ? 0 : m_to_code(new_m, m_exponent, rounding.dithered, random >> 12);
      v_codes[i] = v_nan ? 0 : v_to_code(new_v, v_exponent, rounding.dithered, random & 0xFFFFFu);
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

// A block's m and v are fp32 in between, in every format.
void update(const HostAdamArguments& a, std::size_t begin, std::size_t end, Rounding rounding) {
  if (a.moments.format == MomentFormat::kFloat32) {
    AdamWArguments whole = a.update;
    whole.m = static_cast<float*>(a.moments.m);
    whole.v = static_cast<float*>(a.moments.v);
    scalar_kernels().adamw(whole, begin, end);
    return;
  }
  float m[kMomentBlockCount], v[kMomentBlockCount];
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    const std::size_t stop = std::min(end, start + kMomentBlockCount);
    load(a.moments, start, stop, m, v);
    AdamWArguments part = a.update;
    part.gradient =
        static_cast<const std::byte*>(a.update.gradient) + start * element_bytes(a.update.gradient_type);
    part.master = a.update.master + start;
    part.m = m;
    part.v = v;
    if (a.update.parameter != nullptr) {
      part.parameter =
          static_cast<std::byte*>(a.update.parameter) + start * element_bytes(a.update.parameter_type);
    }
    scalar_kernels().adamw(part, 0, stop - start);
    store(m, v, start, stop, a.moments, rounding);
  }
}

}  // namespace

const MomentKernels& scalar_moment_kernels() noexcept {
  static constexpr MomentKernels kKernels = {"scalar", load, store, update};
  return kKernels;
}

}  // namespace forebay::host_kernels
