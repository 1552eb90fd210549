#include "forebay/host_adam.h"

#include <algorithm>
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

Status check_moments(const char* function, const Moments& a, std::size_t count) {
  if (a.format != MomentFormat::kFloat32 && a.format != MomentFormat::kBfloat16 &&
      a.format != MomentFormat::kBlock8) {
    return invalid(function, count,
                   "format is " + std::to_string(static_cast<int>(a.format)) +
                       ", which does not exist; pass kFloat32, kBfloat16 or kBlock8");
  }
  if (count == 0) return Status();
  const std::string format = moment_format_name(a.format);
  if (a.m == nullptr || a.v == nullptr) {
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

struct Update {
  const HostAdamArguments& arguments;
  const MomentKernels& kernels;
  Rounding rounding;
};

struct Copy {
  const float *from_m, *from_v;
  float *to_m, *to_v;
  const Moments& moments;
  const MomentKernels& kernels;
  Rounding rounding;
};

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
  FOREBAY_RETURN_IF_ERROR(check_moments(function, a.moments, count));
  FOREBAY_RETURN_IF_ERROR(check_rounding(function, count, a.rounding));
  // These are not read, so any memory will do.
  AdamWArguments checked = a.update;
  checked.m = checked.v = a.update.master;
  FOREBAY_RETURN_IF_ERROR(check_arguments(checked).with_context(function));
  const Update context = {a, host_kernels::simd_moment_kernels(), rounding_of(a.rounding, a.step)};
  runner.run(
      count, kBlockCount,
      [](const void* opaque, std::size_t begin, std::size_t end) {
        const auto& update = *static_cast<const Update*>(opaque);
        update.kernels.update(update.arguments, begin, end, update.rounding);
      },
      &context);
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
  const Copy context = {
      m, v, nullptr, nullptr, moments, host_kernels::simd_moment_kernels(), rounding_of(rounding, step)};
  runner.run(
      count, kBlockCount,
      [](const void* opaque, std::size_t begin, std::size_t end) {
        const auto& c = *static_cast<const Copy*>(opaque);
        if (c.moments.format != MomentFormat::kFloat32) {
          c.kernels.store(c.from_m + begin, c.from_v + begin, begin, end, c.moments, c.rounding);
          return;
        }
        auto* kept_m = static_cast<float*>(c.moments.m);
        auto* kept_v = static_cast<float*>(c.moments.v);
        for (std::size_t i = begin; i < end; ++i) {
          kept_m[i] = canonical(c.from_m[i]);
          kept_v[i] = canonical(c.from_v[i]);
        }
      },
      &context);
  return Status();
}

Status load_moments(const Moments& moments, std::size_t count, float* m, float* v,
                    const BlockRunner& runner) {
  const char* const function = "load_moments";
  FOREBAY_RETURN_IF_ERROR(check_moments(function, moments, count));
  if (count != 0 && (m == nullptr || v == nullptr)) {
    return invalid(function, count, "the target of m or v is null; pass room for fp32 values");
  }
  const Copy context = {nullptr, nullptr, m, v, moments, host_kernels::simd_moment_kernels(), {}};
  runner.run(
      count, kBlockCount,
      [](const void* opaque, std::size_t begin, std::size_t end) {
        const auto& c = *static_cast<const Copy*>(opaque);
        if (c.moments.format != MomentFormat::kFloat32) {
          c.kernels.load(c.moments, begin, end, c.to_m + begin, c.to_v + begin);
          return;
        }
        const auto* kept_m = static_cast<const float*>(c.moments.m);
        const auto* kept_v = static_cast<const float*>(c.moments.v);
        for (std::size_t i = begin; i < end; ++i) {
          c.to_m[i] = canonical(kept_m[i]);
          c.to_v[i] = canonical(kept_v[i]);
        }
      },
      &context);
  return Status();
}

}  // namespace forebay
