#include "forebay/host_adam.h"

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

Status invalid(const char* function, std::size_t count, const std::string& found) {
  return Status(StatusCode::kInvalidArgument,
                std::string(function) + " of " + std::to_string(count) + " elements: " + found);
}

Status check_moments(const char* function, const Moments& a, std::size_t count, bool has_v = true) {
  if (a.format != MomentFormat::kFloat32 && a.format != MomentFormat::kBfloat16 &&
      a.format != MomentFormat::kBlock8) {
    return invalid(function, count,
                   "format is " + std::to_string(static_cast<int>(a.format)) +
                       ", which does not exist; pass kFloat32, kBfloat16 or kBlock8");
  }
  if (count == 0) return Status();
  const std::string format = moment_format_name(a.format);
  if (a.m == nullptr || (a.v == nullptr && has_v)) {
    return invalid(function, count,
                   std::string(a.m == nullptr ? "m" : "v") + " is null; pass moment_bytes() of memory");
  }
  const std::size_t alignment = moment_bytes(a.format, 1);
  for (const void* pointer : {a.m, a.v}) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % alignment != 0) {
      return invalid(function, count,
                     std::string(pointer == a.m ? "m" : "v") + " is not aligned to its " +
                         std::to_string(alignment) + "-byte elements; align it");
    }
  }
  if (a.format == MomentFormat::kBlock8 && (a.m_exponents == nullptr || a.v_exponents == nullptr)) {
    return invalid(function, count,
                   format + " without " + (a.m_exponents == nullptr ? "m_exponents" : "v_exponents") +
                       "; pass moment_exponent_bytes() of memory");
  }
  return Status();
}

Status check_rounding(const char* function, std::size_t count, MomentRounding rounding) {
  if (rounding == MomentRounding::kNearest || rounding == MomentRounding::kDithered) return Status();
  return invalid(function, count,
                 "rounding is " + std::to_string(static_cast<int>(rounding)) +
                     ", which does not exist; pass kNearest or kDithered");
}

Rounding rounding_of(MomentRounding rounding, std::uint64_t step) {
  return {rounding == MomentRounding::kDithered, definitions::dither_seed(step)};
}

}  // namespace

const char* moment_format_name(MomentFormat format) noexcept {
  switch (format) {
    case MomentFormat::kFloat32:
      return "fp32";
    case MomentFormat::kBfloat16:
      return "bf16";
    case MomentFormat::kBlock8:
      return "block8";
  }
  return "?";
}

Status host_adam(const HostAdamArguments& a, const BlockRunner& runner) {
  const char* const function = "host_adam";
  const std::size_t count = a.update.count;
  FOREBAY_RETURN_IF_ERROR(check_moments(function, a.moments, count, has_second_moment(a.update.optimizer)));
  FOREBAY_RETURN_IF_ERROR(check_rounding(function, count, a.rounding));
  // These are not read, so any memory will do.
  AdamWArguments checked = a.update;
  checked.m = checked.v = a.update.master;
  FOREBAY_RETURN_IF_ERROR(check_arguments(checked).with_context(function));
  if (a.update.optimizer != Optimizer::kAdamW) {
    if (a.moments.format != MomentFormat::kFloat32) {
      return invalid(function, count,
                     std::string("format is ") + moment_format_name(a.moments.format) + " and optimizer " +
                         optimizer_name(a.update.optimizer) +
                         "; narrow m and v are for adamw, pass kFloat32");
    }
    AdamWArguments whole = a.update;
    whole.m = static_cast<float*>(a.moments.m);
    whole.v = static_cast<float*>(a.moments.v);
    runner.run(count, kBlockCount, [&](std::size_t begin, std::size_t end) {
      host_kernels::simd_kernels().adamw(whole, begin, end);
    });
    return Status();
  }
  const MomentKernels& kernels = host_kernels::simd_moment_kernels();
  const Rounding rounding = rounding_of(a.rounding, a.step);
  runner.run(count, kBlockCount,
             [&](std::size_t begin, std::size_t end) { kernels.update(a, begin, end, rounding); });
  return Status();
}

Status store_moments(const float* m, const float* v, std::size_t count, const Moments& moments,
                     MomentRounding rounding, std::uint64_t step, const BlockRunner& runner) {
  const char* const function = "store_moments";
  FOREBAY_RETURN_IF_ERROR(check_moments(function, moments, count));
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
  FOREBAY_RETURN_IF_ERROR(check_moments(function, moments, count));
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

}  // namespace forebay
