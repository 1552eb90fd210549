// The arithmetic of every operation except matrix products, defined once, for one element. Host loops and
// device kernels both call it.
//
// Both keep the same order of sums, too. A sum along a row, or down a column, is made in kLanes
// partial sums: element i is added to lane i mod kLanes, ascending, and the lanes are folded in halves (lane
// j += lane j + 16, then + 8, ... + 1). Other sums ascend. So host and device agree bit for bit, as long as
// all numbers are finite: only fp32 additions, products, quotients and square roots are used, each rounded by
// itself (-ffp-contract=off, -fmad=false), and exponential() is written out.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "forebay/conversions.h"
#include "forebay/data_type.h"
#include "model/random.h"

namespace forebay::gpt {

// The terms of one row's loss, where l is the row's largest logit: the sum of exp(logit - l), and the
// target's logit minus l. The host computes the loss, log(sum) - target.
struct RowLoss {
  float sum;
  float target;
};

// The same for a part of the vocabulary, with the largest logit of that part. `target` is 0 if the target
// lies in another part.
struct RowLossPart {
  float largest;
  float sum;
  float target;
};

// The dropout of one tensor in one pass. Element i becomes zero when the upper half of splitmix64(key + i) is
// less than `threshold`; other elements are multiplied by `scale`. i counts the elements of the undivided
// tensor, over all ranks, so a mask does not depend on the number of ranks or on recomputation.
struct Dropout {
  std::uint64_t key = 0;
  std::uint32_t threshold = 0;  // 0: no dropout.
  float scale = 1;
  FOREBAY_DEVICE bool active() const { return threshold != 0; }
};

// One row of attention's softmax: the largest score, and 1 over the sum of exp(score - largest). The backward
// pass computes the probabilities from these instead of keeping them.
struct SoftmaxRow {
  float largest;
  float inverse;
};

// Limits of the rotary embedding: pairs of columns of a head, and positions.
inline constexpr std::size_t kRotaryPairsMax = 128;
inline constexpr std::size_t kRotaryPositionsMax = std::size_t{1} << 20;

namespace definitions {

inline constexpr std::size_t kLanes = 32;  // One warp; also a multiple of every host vector's width.
inline constexpr float kEpsilon = 1e-5F;   // LayerNorm's, and RMSNorm's default.

FOREBAY_DEVICE inline float larger(float a, float b) {
  return a < b ? b : a;
}

// --- conversions, without branches that depend on a value, so that loops vectorise ---

FOREBAY_DEVICE inline float from_bfloat16(std::uint16_t bits) {
  return float_from_bits(std::uint32_t{bits} << 16);
}

FOREBAY_DEVICE inline std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<std::uint16_t>(is_nan ? 0x7FC0u : rounded);
}

FOREBAY_DEVICE inline float from_float16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7FFFu;
  // As if it were an fp32 with a small exponent; the product moves the exponent and makes subnormals normal.
  const float scaled = float_from_bits(magnitude << 13) * 0x1p112F;
  const std::uint32_t special = (magnitude << 13) | 0x7F800000u;  // Infinity and NaN.
  const std::uint32_t result = magnitude >= 0x7C00u ? special : float_bits(scaled);
  return float_from_bits(result | sign);
}

FOREBAY_DEVICE inline std::uint16_t to_float16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Normal results: rebias the exponent by -112 and round the 13 bits that go.
  const std::uint32_t normal = (magnitude + 0xC8000FFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 makes the adder round at the right place, 2^-24.
  const float shifted = float_from_bits(magnitude) + 0.5F;
  const std::uint32_t subnormal = float_bits(shifted) - float_bits(0.5F);
  std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
  result = magnitude >= 0x477FF000u ? 0x7C00u : result;                 // From 65520 on: infinity.
  result = magnitude > 0x7F800000u ? 0x7E00u : result;                  // NaN
  return static_cast<std::uint16_t>(result | sign);
}

// An element of a type in memory, its value in fp32, and rounding fp32 to it (to nearest, ties to even).
template <DataType type>
struct Element {
  using Storage = float;
  FOREBAY_DEVICE static float load(float value) { return value; }
  FOREBAY_DEVICE static float round(float value) { return value; }
};
template <>
struct Element<DataType::kBfloat16> {
  using Storage = std::uint16_t;
  FOREBAY_DEVICE static float load(std::uint16_t bits) { return from_bfloat16(bits); }
  FOREBAY_DEVICE static std::uint16_t round(float value) { return to_bfloat16(value); }
};
template <>
struct Element<DataType::kFloat16> {
  using Storage = std::uint16_t;
  FOREBAY_DEVICE static float load(std::uint16_t bits) { return from_float16(bits); }
  FOREBAY_DEVICE static std::uint16_t round(float value) { return to_float16(value); }
};

// --- elementary functions ---

// exp(x) for x in [-87, 88], clamped to it: 2^n * p(r), within 2 units in the last place.
FOREBAY_DEVICE inline float exponential(float x) {
  x = x < -87.0F ? -87.0F : x;
  x = 88.0F < x ? 88.0F : x;
  constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer.
  const float rounded = x * 1.44269504F + kRounder;
  const float n = rounded - kRounder;
  const float r = (x - n * 0.693359375F) - n * -2.12194440e-4F;  // ln 2 in two parts.
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  // n stands in the low bits of `rounded`; a NaN stays one, through p.
  const std::uint32_t exponent = float_bits(rounded) - float_bits(kRounder) + 127u;
  return p * float_from_bits(exponent << 23);
}

// tanh by exp. The absolute error is about 1e-7, small enough for GELU.
FOREBAY_DEVICE inline float hyperbolic_tangent(float x) {
  return 1.0F - 2.0F / (exponential(2.0F * x) + 1.0F);
}

// --- dropout ---

FOREBAY_DEVICE inline float dropped(const Dropout& dropout, std::uint64_t index, float value) {
  const bool drops = splitmix64(dropout.key + index) >> 32 < dropout.threshold;
  return drops ? 0.0F : value * dropout.scale;
}

// --- GELU: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) ---

inline constexpr float kGeluFactor = 0.7978845608F;  // sqrt(2 / pi)
inline constexpr float kGeluCubic = 0.044715F;

FOREBAY_DEVICE inline float gelu(float x) {
  const float t = hyperbolic_tangent(kGeluFactor * (x + kGeluCubic * x * x * x));
  return 0.5F * x * (1.0F + t);
}

FOREBAY_DEVICE inline float gelu_slope(float x) {
  const float t = hyperbolic_tangent(kGeluFactor * (x + kGeluCubic * x * x * x));
  const float inner = kGeluFactor * (1.0F + 3.0F * kGeluCubic * x * x);
  return 0.5F * (1.0F + t) + 0.5F * x * (1.0F - t * t) * inner;
}

// --- SwiGLU: silu(gate) * up, where silu(x) = x / (1 + exp(-x)) ---

FOREBAY_DEVICE inline float sigmoid(float x) {
  return 1.0F / (1.0F + exponential(-x));
}
FOREBAY_DEVICE inline float silu(float x) {
  return x * sigmoid(x);
}
FOREBAY_DEVICE inline float silu_slope(float x) {
  const float s = sigmoid(x);
  return s * (1.0F + x * (1.0F - s));
}

// --- the rotary embedding ---

struct Turn {
  float cosine;
  float sine;
};

// The cosine and sine of an angle of at most 2^20, in double and rounded once, so that host and device agree.
// The polynomials are those of fdlibm for [-pi/4, pi/4].
FOREBAY_DEVICE inline Turn turn_by(float angle) {
  constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer.
  const double x = static_cast<double>(angle);
  const double n = (x * 6.36619772367581382433e-01 + kRounder) - kRounder;
  const double r =
      (x - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11;  // pi/2 in two parts.
  const double z = r * r;
  double s = 1.58969099521155010221e-10;
  s = s * z - 2.50507602534068634195e-08;
  s = s * z + 2.75573137070700676789e-06;
  s = s * z - 1.98412698298579493134e-04;
  s = s * z + 8.33333333332248946124e-03;
  s = s * z - 1.66666666666666324348e-01;
  s = r + r * (z * s);
  double c = -1.13596475577881948265e-11;
  c = c * z + 2.08757232129817482790e-09;
  c = c * z - 2.75573143513906633035e-07;
  c = c * z + 2.48015872894767294178e-05;
  c = c * z - 1.38888888888741095749e-03;
  c = c * z + 4.16666666666666019037e-02;
  c = (1.0 - 0.5 * z) + z * (z * c);
  const int quarter = static_cast<int>(n) & 3;
  const float sine = static_cast<float>(quarter & 1 ? c : s);
  const float cosine = static_cast<float>(quarter & 1 ? s : c);
  return {quarter == 1 || quarter == 2 ? -cosine : cosine, quarter >= 2 ? -sine : sine};
}

// --- LayerNorm: y = (x - mean) * inverse * gain + bias. RMSNorm is the same with mean 0 and no bias ---

FOREBAY_DEVICE inline float squared_deviation(float x, float mean) {
  return (x - mean) * (x - mean);
}
FOREBAY_DEVICE inline float inverse_deviation(float variance, float epsilon) {
  return 1.0F / sqrtf(variance + epsilon);
}
FOREBAY_DEVICE inline float normalised(float x, float mean, float inverse) {
  return (x - mean) * inverse;
}
FOREBAY_DEVICE inline float layer_norm(float x, float mean, float inverse, float gain, float bias) {
  return normalised(x, mean, inverse) * gain + bias;
}
// Through x^ = normalised(x), with g = gradient * gain: dx = inverse * (g - mean(g) - x^ * mean(g * x^)).
FOREBAY_DEVICE inline float layer_norm_slope(float x, float mean, float inverse, float g, float mean_g,
                                             float mean_gx) {
  return inverse * (g - mean_g - normalised(x, mean, inverse) * mean_gx);
}

// --- the loss, from parts of the vocabulary ---

// The loss of a whole row, from its parts: the largest logit, the sum of exp(logit - largest) in the order of
// parts, and the target's logit minus the largest.
struct WholeRow {
  float largest;
  RowLoss loss;
};
// `parts` points to the first part's entry; each further part is `stride` entries on.
FOREBAY_DEVICE inline WholeRow whole_row(const RowLossPart* parts, std::size_t stride, std::size_t count,
                                         std::size_t target_part) {
  WholeRow row{parts[0].largest, {0.0F, 0.0F}};
  for (std::size_t p = 1; p < count; ++p) row.largest = larger(row.largest, parts[p * stride].largest);
  for (std::size_t p = 0; p < count; ++p) {
    const float sum = parts[p * stride].sum * exponential(parts[p * stride].largest - row.largest);
    row.loss.sum = p == 0 ? sum : row.loss.sum + sum;
  }
  const RowLossPart& target = parts[target_part * stride];
  row.loss.target = target.target + (target.largest - row.largest);
  return row;
}
// The factor that turns exp(logit - the part's largest) into factor * softmax.
FOREBAY_DEVICE inline float softmax_scale(const WholeRow& row, float part_largest, float factor) {
  return exponential(part_largest - row.largest) * (factor / row.loss.sum);
}

// --- softmax, and the way back through it ---

FOREBAY_DEVICE inline float attention_factor(std::size_t head_columns) {
  return 1.0F / sqrtf(static_cast<float>(head_columns));
}
FOREBAY_DEVICE inline float probability(float score, SoftmaxRow row) {
  return exponential(score - row.largest) * row.inverse;
}
// ds = p * (dp - sum of p * dp), times the factor of the scores.
FOREBAY_DEVICE inline float score_gradient(float p, float dp, float mean, float factor) {
  return p * (dp - mean) * factor;
}

}  // namespace definitions
}  // namespace forebay::gpt
