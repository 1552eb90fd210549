// The optimizers: the rule by which an update changes a parameter and its moments. kernels.h has the kernels.
#pragma once

#include <cstdint>

#include "forebay/conversions.h"

namespace forebay {

// All arithmetic is fp32, in the order that is written and no other. g is float(gradient) * factor, p the
// master, and sign(0) is 0. Other names are those of AdamWArguments.
enum class Optimizer : std::uint8_t {
  // p = fma(-(lr * weight_decay), p, p)
  // m = fma(beta1, m, a1 * g)
  // v = fma(beta2, v, a2 * (g * g))
  // p = fma(-(lr / c1), m / (sqrt(v) / s2 + eps), p)
  // Source: Loshchilov and Hutter, arXiv 1711.05101, with bias corrections c1 and s2 given by the caller.
  kAdamW,
  // Adam with weight decay as an L2 term of the loss.
  // g = fma(weight_decay, p, g)
  // m, v and p: as AdamW without its first line.
  // Source: Kingma and Ba, arXiv 1412.6980.
  kAdam,
  // Stochastic gradient descent with momentum beta1, without dampening. No v.
  // g = fma(weight_decay, p, g)
  // m = fma(beta1, m, g)
  // p = fma(-lr, m, p)
  // Source: Sutskever et al., ICML 2013, in the form that PyTorch has.
  kSgd,
  // No v.
  // u = fma(beta1, m, a1 * g)
  // p = fma(-(lr * weight_decay), p, p)
  // p = fma(-lr, sign(u), p)
  // m = fma(beta2, m, a2 * g)
  // Source: Chen et al., arXiv 2302.06675.
  kLion,
  // A second moment in factors, by row and by column, and steps in proportion to the parameter. No m and no
  // v: adafactor.h has its arithmetic, which is not one of single elements.
  // Source: Shazeer and Stern, arXiv 1804.04235, in the form that PyTorch has.
  kAdafactor,
  // Matrices move by their orthogonalised momentum, and other parameters by AdamW. No v for matrices:
  // muon.h has its arithmetic, which is not one of single elements.
  // Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), in the form that
  // PyTorch has.
  kMuon,
};
// The optimizers that update each element by itself. They come first.
inline constexpr int kOptimizerCount = 4;
inline constexpr int kAllOptimizerCount = 6;

// Whether the optimizer updates each element by itself.
constexpr bool is_elementwise(Optimizer optimizer) noexcept {
  return static_cast<int>(optimizer) < kOptimizerCount;
}

// Whether the optimizer has a first moment m.
FOREBAY_DEVICE constexpr bool has_first_moment(Optimizer optimizer) noexcept {
  return optimizer != Optimizer::kAdafactor;
}

// Whether the optimizer has a second moment v for each element.
FOREBAY_DEVICE constexpr bool has_second_moment(Optimizer optimizer) noexcept {
  return optimizer == Optimizer::kAdamW || optimizer == Optimizer::kAdam;
}

// "adamw", "adam", "sgd", "lion", "adafactor" or "muon": the words of options and reports.
constexpr const char* optimizer_name(Optimizer optimizer) noexcept {
  constexpr const char* kNames[kAllOptimizerCount] = {"adamw", "adam", "sgd", "lion", "adafactor", "muon"};
  return kNames[static_cast<int>(optimizer)];
}

}  // namespace forebay
