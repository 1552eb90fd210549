#include "forebay/host_adam.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/argument_checks.h"
#include "kernels/host_moments.h"

namespace forebay {
namespace {

using host_kernels::MomentKernels;
using host_kernels::Rounding;

// Elements of one block: see kBlockCount of the other kernels. Whole blocks of kMomentBlockCount.
constexpr std::size_t kBlockCount = 65536;
static_assert(kBlockCount % kMomentBlockCount == 0);

Status invalid(const char* function, std::size_t count, const char* found) {
  return Status(StatusCode::kInvalidArgument,
                std::string(function) + " of " + std::to_string(count) + " elements: " + found);
}

Rounding rounding_of(MomentRounding rounding, std::uint64_t step) {
  return {rounding == MomentRounding::kDithered, definitions::dither_seed(step)};
}

}  // namespace

Status host_adam(const HostAdamArguments& a, const BlockRunner& runner) {
  FOREBAY_RETURN_IF_ERROR(check_arguments("host_adam", a));
  host_kernels::run_update(a, runner);
  return Status();
}

void host_kernels::run_update(const HostAdamArguments& a, const BlockRunner& runner) {
  const bool is_adamw = a.update.optimizer == Optimizer::kAdamW;
  const MomentKernels& moments = simd_moment_kernels();
  const RangeKernels& kernels = simd_kernels();
  const Rounding rounding = rounding_of(a.rounding, a.step);
  AdamWArguments whole = a.update;
  whole.m = static_cast<float*>(a.moments.m);
  whole.v = static_cast<float*>(a.moments.v);
  const bool is_half = a.half.elements != nullptr;
  AverageArguments average = {a.update.master, a.average, DataType::kFloat32, a.average_weight};
  if (is_half) average = {a.half.elements, a.average, DataType::kBfloat16, a.average_weight};
  runner.run(a.update.count, kBlockCount, [&](std::size_t begin, std::size_t end) {
    if (is_half || (!is_adamw && a.moments.format != MomentFormat::kFloat32)) {
      update_in_blocks(a, begin, end, rounding, moments, kernels);
    } else if (!is_adamw) {
      kernels.adamw(whole, begin, end);
    } else {
      moments.update(a, begin, end, rounding);
    }
    // The block's masters are still in the caches.
    if (a.average != nullptr) kernels.average(average, begin, end);
  });
}

Status store_moments(const float* m, const float* v, std::size_t count, const Moments& moments,
                     MomentRounding rounding, std::uint64_t step, const BlockRunner& runner) {
  const char* const function = "store_moments";
  FOREBAY_RETURN_IF_ERROR(check_moments(function, moments, count, true));
  FOREBAY_RETURN_IF_ERROR(check_rounding(function, count, rounding));
  if (count != 0 && (m == nullptr || v == nullptr)) {
    return invalid(function, count, "the source of m or v is null; pass fp32 values");
  }
  const MomentKernels& kernels = host_kernels::simd_moment_kernels();
  const Rounding how = rounding_of(rounding, step);
  runner.run(count, kBlockCount, [&](std::size_t begin, std::size_t end) {
    if (moments.format != MomentFormat::kFloat32)
      return kernels.store(m + begin, v + begin, begin, end, moments, how);
    for (std::size_t i = begin; i < end; ++i) {
      static_cast<float*>(moments.m)[i] = canonical(m[i]);
      static_cast<float*>(moments.v)[i] = canonical(v[i]);
    }
  });
  return Status();
}

Status load_moments(const Moments& moments, std::size_t count, float* m, float* v,
                    const BlockRunner& runner) {
  const char* const function = "load_moments";
  FOREBAY_RETURN_IF_ERROR(check_moments(function, moments, count, true));
  if (count != 0 && (m == nullptr || v == nullptr)) {
    return invalid(function, count, "the target of m or v is null; pass room for fp32 values");
  }
  const MomentKernels& kernels = host_kernels::simd_moment_kernels();
  runner.run(count, kBlockCount, [&](std::size_t begin, std::size_t end) {
    if (moments.format != MomentFormat::kFloat32)
      return kernels.load(moments, begin, end, m + begin, v + begin);
    for (std::size_t i = begin; i < end; ++i) {
      m[i] = canonical(static_cast<const float*>(moments.m)[i]);
      v[i] = canonical(static_cast<const float*>(moments.v)[i]);
    }
  });
  return Status();
}

void widen_moment(MomentFormat format, bool is_v, const void* kept, const std::uint8_t* exponents,
                  std::size_t count, float* values) {
  const auto* half = static_cast<const std::uint16_t*>(kept);
  const auto* codes = static_cast<const std::uint8_t*>(kept);
  switch (format) {
    case MomentFormat::kFloat32:
      std::memcpy(values, kept, count * sizeof(float));
      return;
    case MomentFormat::kBfloat16:
      for (std::size_t i = 0; i < count; ++i) values[i] = bfloat16_to_float(half[i]);
      return;
    case MomentFormat::kBlock8:
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t exponent = definitions::moment_exponent_read(exponents[i / kMomentBlockCount]);
        values[i] = is_v ? definitions::v_from_code(codes[i], exponent)
                         : definitions::m_from_code(codes[i], exponent);
      }
  }
}

void narrow_moment(MomentFormat format, bool is_v, const float* values, std::size_t count, void* kept,
                   std::uint8_t* exponents) {
  auto* half = static_cast<std::uint16_t*>(kept);
  auto* codes = static_cast<std::uint8_t*>(kept);
  switch (format) {
    case MomentFormat::kFloat32:
      std::memcpy(kept, values, count * sizeof(float));
      return;
    case MomentFormat::kBfloat16:
      for (std::size_t i = 0; i < count; ++i) half[i] = float_to_bfloat16(values[i]);
      return;
    case MomentFormat::kBlock8:
      for (std::size_t start = 0; start < count; start += kMomentBlockCount) {
        const std::size_t end = std::min(count, start + kMomentBlockCount);
        std::uint32_t greatest = 0;
        for (std::size_t i = start; i < end; ++i)
          greatest = std::max(greatest, float_bits(values[i]) & 0x7FFFFFFFu);
        const std::uint32_t exponent = definitions::moment_exponent(greatest);
        exponents[start / kMomentBlockCount] = static_cast<std::uint8_t>(exponent);
        for (std::size_t i = start; i < end; ++i) {
          codes[i] = exponent == definitions::kMomentExponentNan ? std::uint8_t{0}
                     : is_v ? definitions::v_to_code(values[i], exponent, false, 0)
                            : definitions::m_to_code(values[i], exponent, false, 0);
        }
      }
  }
}

}  // namespace forebay
