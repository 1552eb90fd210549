// The one scalar definition of every kernel's arithmetic. The SIMD bodies, their tails and the CUDA kernels
// follow these functions operation by operation, and the tests compare them bit for bit.
//
// Compile with -ffp-contract=off (nvcc: -fmad=false -prec-sqrt=true -prec-div=true -ftz=false): every fused
// multiply-add is written out, and only those are fused. Values stored as fp32 pass through canonical():
// which NaN an instruction gives depends on the processor and on the order of its operands, so no NaN is
// stored as it came.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "forebay/conversions.h"
#include "forebay/data_type.h"
#include "forebay/kernels.h"

namespace forebay::definitions {

// Elements of a type in memory: Storage, its value in fp32, and rounding fp32 to it.
template <DataType type>
struct Element;

template <>
struct Element<DataType::kFloat32> {
  using Storage = float;
  FOREBAY_DEVICE static float load(float value) noexcept { return value; }
  FOREBAY_DEVICE static float round(float value) noexcept { return canonical(value); }
};

template <>
struct Element<DataType::kBfloat16> {
  using Storage = std::uint16_t;
  FOREBAY_DEVICE static float load(std::uint16_t value) noexcept { return bfloat16_to_float(value); }
  FOREBAY_DEVICE static std::uint16_t round(float value) noexcept { return float_to_bfloat16(value); }
};

template <>
struct Element<DataType::kFloat16> {
  using Storage = std::uint16_t;
  FOREBAY_DEVICE static float load(std::uint16_t value) noexcept { return float16_to_float(value); }
  FOREBAY_DEVICE static std::uint16_t round(float value) noexcept { return float_to_float16(value); }
};

template <DataType source, DataType target>
FOREBAY_DEVICE inline typename Element<target>::Storage cast_element(
    typename Element<source>::Storage value) noexcept {
  return Element<target>::round(Element<source>::load(value));
}

// One rank's contribution to the rank-ordered sum.
FOREBAY_DEVICE inline float accumulate_step(float sum, float contribution) noexcept {
  return sum + contribution;
}

// The end of accumulate: the stored value.
FOREBAY_DEVICE inline float accumulate_store(float target, float sum, bool first) noexcept {
  return canonical(first ? sum : target + sum);
}

template <DataType round_type>
FOREBAY_DEVICE inline typename Element<round_type>::Storage scale_element(float value,
                                                                          float factor) noexcept {
  return Element<round_type>::round(value * factor);
}

template <DataType type>
FOREBAY_DEVICE inline typename Element<type>::Storage add_element(
    typename Element<type>::Storage target, typename Element<type>::Storage source) noexcept {
  return Element<type>::round(Element<type>::load(target) + Element<type>::load(source));
}

// Lanes of a norm leaf; element i of a leaf is added to lane i mod 16.
inline constexpr std::size_t kNormLanes = 16;

// The square of a widened fp32 is exact in double (48 significant bits), so this equals a fused multiply-add.
FOREBAY_DEVICE inline double norm_step(double lane, float value) noexcept {
  const double wide = static_cast<double>(value);
  return lane + wide * wide;
}

// Folds `lane_count` lanes (a power of two) by halves: lane j += lane j + half.
FOREBAY_DEVICE inline double norm_fold(double* lanes, std::size_t lane_count) noexcept {
  for (std::size_t half = lane_count / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
  }
  return lanes[0];
}

// The canonical NaN of a double, as canonical() is for fp32.
FOREBAY_DEVICE inline double canonical_double(double value) noexcept {
  if (value == value) return value;
  const std::uint64_t bits = 0x7FF8000000000000;
  double nan;
  memcpy(&nan, &bits, sizeof nan);
  return nan;
}

// The constants of an update that do not depend on the element.
struct AdamWConstants {
  float factor;
  float decay;  // -(lr * weight_decay); weight_decay for kAdam and kSgd.
  float beta1, a1;
  float beta2, a2;
  float step;  // -(lr / c1); -lr for kSgd and kLion.
  float s2, eps;
};

FOREBAY_DEVICE inline AdamWConstants adamw_constants(const AdamWArguments& a, float factor, float c1,
                                                     float s2) noexcept {
  const bool is_decoupled = a.optimizer == Optimizer::kAdamW || a.optimizer == Optimizer::kLion;
  const float decay = is_decoupled ? -(a.lr * a.weight_decay) : a.weight_decay;
  const float step = has_second_moment(a.optimizer) ? -(a.lr / c1) : -a.lr;
  return {factor, decay, a.beta1, a.a1, a.beta2, a.a2, step, s2, a.eps};
}

struct AdamWElement {
  float p, m, v;
};

// The rules of optimizer.h. The first is AdamW's.
FOREBAY_DEVICE inline AdamWElement adamw_element(const AdamWConstants& c, float gradient, float p, float m,
                                                 float v) noexcept {
  const float g = gradient * c.factor;
  p = fmaf(c.decay, p, p);
  m = fmaf(c.beta1, m, c.a1 * g);
  v = fmaf(c.beta2, v, c.a2 * (g * g));
  p = fmaf(c.step, m / (sqrtf(v) / c.s2 + c.eps), p);
  return {canonical(p), canonical(m), canonical(v)};
}

FOREBAY_DEVICE inline float sign(float value) noexcept {
  return value > 0.0f ? 1.0f : value < 0.0f ? -1.0f : 0.0f;
}

// Any rule. An optimizer without a second moment leaves v.
FOREBAY_DEVICE inline AdamWElement update_element(Optimizer optimizer, const AdamWConstants& c,
                                                  float gradient, float p, float m, float v) noexcept {
  float g = gradient * c.factor;
  switch (optimizer) {
    case Optimizer::kAdamW:
      return adamw_element(c, gradient, p, m, v);
    case Optimizer::kAdam:
      g = fmaf(c.decay, p, g);
      m = fmaf(c.beta1, m, c.a1 * g);
      v = fmaf(c.beta2, v, c.a2 * (g * g));
      p = fmaf(c.step, m / (sqrtf(v) / c.s2 + c.eps), p);
      break;
    case Optimizer::kSgd:
      g = fmaf(c.decay, p, g);
      m = fmaf(c.beta1, m, g);
      p = fmaf(c.step, m, p);
      break;
    case Optimizer::kLion: {
      const float u = fmaf(c.beta1, m, c.a1 * g);
      p = fmaf(c.decay, p, p);
      p = fmaf(c.step, sign(u), p);
      m = fmaf(c.beta2, m, c.a2 * g);
      break;
    }
    case Optimizer::kAdafactor:
    case Optimizer::kMuon:
      break;  // Not rules of single elements.
  }
  return {canonical(p), canonical(m), canonical(v)};
}

// An exponential moving average of `value`.
FOREBAY_DEVICE inline float average_element(float average, float value, float weight) noexcept {
  return canonical(fmaf(weight, value - average, average));
}

// The move of a master by an update that is not one of single elements: master_move.h.
FOREBAY_DEVICE inline float moved_master(float decay, float step, float u, float p) noexcept {
  return canonical(fmaf(step, u, fmaf(decay, p, p)));
}

// The next step of an element's chain in a product of matrices, which begins as 0.
FOREBAY_DEVICE inline float product_step(float sum, float a, float b) noexcept {
  return fmaf(a, b, sum);
}

FOREBAY_DEVICE inline float combine_element(float alpha, float x, float beta, float y) noexcept {
  return fmaf(alpha, x, beta * y);
}

// The divisor of a matrix before it is orthogonalised, from its sum of squares.
FOREBAY_DEVICE inline float matrix_divisor(double squares) noexcept {
  const float norm = static_cast<float>(sqrt(squares));
  return norm > kMuonEpsilon ? norm : kMuonEpsilon;
}

// --- Adafactor ---

// A factor of the second moment, from the mean of squares: their sum over `count` elements.
FOREBAY_DEVICE inline float factor_element(float weight, float sum, float count, float factor) noexcept {
  return canonical(fmaf(weight, sum / count - factor, factor));
}

// The mean of row factors, from the 16 lanes that they were added in.
FOREBAY_DEVICE inline float row_mean(double* lanes, std::uint64_t rows) noexcept {
  return static_cast<float>(norm_fold(lanes, kNormLanes) / static_cast<double>(rows));
}

// q: a row factor beside the mean of its matrix.
FOREBAY_DEVICE inline float row_share(float row, float mean) noexcept {
  return row / (mean > kAdafactorEpsilon1 ? mean : kAdafactorEpsilon1);
}

// u: g over the root of its moment, which is the least one where it is no number.
FOREBAY_DEVICE inline float factored_element(float g, float q, float column) noexcept {
  constexpr float kLeast = kAdafactorEpsilon1 * kAdafactorEpsilon1;
  const float moment = q * column;
  return g / sqrtf(moment > kLeast ? moment : kLeast);
}

// See AdafactorStepArguments.
FOREBAY_DEVICE inline float adafactor_step(double lr, std::uint64_t step, std::uint64_t count,
                                           double parameter_squares, double update_squares) noexcept {
  const double all = static_cast<double>(count);
  const double falling = 1.0 / sqrt(static_cast<double>(step));
  const double rate = falling < lr ? falling : lr;
  const double size = sqrt(parameter_squares / all);
  const double alpha = (size > kAdafactorEpsilon2 ? size : kAdafactorEpsilon2) * rate;
  const double excess = sqrt(update_squares / all) / kAdafactorThreshold;
  return -static_cast<float>(alpha / (excess > 1.0 ? excess : 1.0));
}

// See StepControlArguments. `sum` is the sum of squares of all units.
FOREBAY_DEVICE inline void advance_step(const StepControlArguments& a, double sum) noexcept {
  StepState& s = *a.state;
  const double norm = sqrt(sum) / s.loss_scale;
  ++s.attempted_steps;
  s.used_loss_scale = s.loss_scale;
  const double zero = norm - norm;  // Not a number when norm is infinite or none.
  s.grad_norm = canonical_double(norm + zero);
  if (!(zero == 0.0)) {
    s.outcome = StepOutcome::kSkipped;
    if (a.dynamic_loss_scale) {
      const double half = s.loss_scale / 2.0;
      s.loss_scale = half < a.minimum_loss_scale ? a.minimum_loss_scale : half;
      s.growth_counter = 0;
    }
    return;
  }
  const std::uint64_t number = s.applied_steps + 1;
  if (number < a.first_step || number - a.first_step >= a.correction_count) {
    s.outcome = StepOutcome::kNoCorrection;
    return;
  }
  const double shrink = a.clip > 0.0 && norm > a.clip ? a.clip / norm : 1.0;
  s.factor = static_cast<float>(shrink / s.loss_scale);
  s.c1 = a.corrections[number - a.first_step].c1;
  s.s2 = a.corrections[number - a.first_step].s2;
  s.outcome = StepOutcome::kApplied;
  s.applied_steps = number;
  if (a.dynamic_loss_scale && ++s.growth_counter == a.growth_interval) {
    s.loss_scale *= 2.0;
    s.growth_counter = 0;
  }
}

// Whether the last step is applied to a unit.
FOREBAY_DEVICE inline bool updates(const StepState& state, const std::uint32_t* used) noexcept {
  return state.outcome == StepOutcome::kApplied && (used == nullptr || *used != 0);
}

// Gives a part of an Adafactor or Muon step the values of the decision. False: the step is not applied.
FOREBAY_DEVICE inline bool decided(const StepState* state, MuonMomentumArguments& a) noexcept {
  if (state == nullptr) return true;
  a.gradient.factor = state->factor;
  return updates(*state, nullptr);
}
FOREBAY_DEVICE inline bool decided(const StepState* state, OrthogonaliseArguments&) noexcept {
  return state == nullptr || updates(*state, nullptr);
}
FOREBAY_DEVICE inline bool decided(const StepState* state, MuonUpdateArguments& a) noexcept {
  if (state == nullptr) return true;
  a.gradient.factor = state->factor;
  a.step_number = state->applied_steps;
  return updates(*state, nullptr);
}
FOREBAY_DEVICE inline bool decided(const StepState* state, FactorSumsArguments& a) noexcept {
  if (state == nullptr) return true;
  a.run.factor = state->factor;
  return updates(*state, nullptr);
}
FOREBAY_DEVICE inline bool decided(const StepState* state, FactorRenewalArguments&) noexcept {
  return state == nullptr || updates(*state, nullptr);
}
FOREBAY_DEVICE inline bool decided(const StepState* state, UpdateSquaresArguments& a) noexcept {
  if (state == nullptr) return true;
  a.run.factor = state->factor;
  return updates(*state, nullptr);
}
FOREBAY_DEVICE inline bool decided(const StepState* state, ParameterSquaresArguments&) noexcept {
  return state == nullptr || updates(*state, nullptr);
}
FOREBAY_DEVICE inline bool decided(const StepState* state, AdafactorStepArguments& a) noexcept {
  if (state == nullptr) return true;
  a.step_number = state->applied_steps;
  return updates(*state, nullptr);
}
FOREBAY_DEVICE inline bool decided(const StepState* state, FactoredUpdateArguments& a) noexcept {
  if (state != nullptr) {
    if (!updates(*state, nullptr)) return false;
    a.run.factor = state->factor;
    a.step_number = state->applied_steps;
  }
  if (a.computed_step != nullptr) a.step = *a.computed_step;
  return true;
}
FOREBAY_DEVICE inline bool decided(const StepState* state, KeepFactorsArguments&) noexcept {
  return state == nullptr || updates(*state, nullptr);
}

}  // namespace forebay::definitions
