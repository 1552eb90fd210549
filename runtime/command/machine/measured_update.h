// The AdamW update that measurements repeat.
#pragma once

#include <cmath>
#include <cstddef>

#include "forebay/kernels.h"

namespace forebay {

// An update with the usual hyperparameters. `states` has `count` fp32 elements each of master, m and v. A
// parameter of a 2-byte type takes the place of its gradient.
inline AdamWArguments measured_update(float* states, void* gradient, std::size_t count, DataType dtype) {
  return {.gradient = gradient,
          .master = states,
          .m = states + count,
          .v = states + 2 * count,
          .parameter = dtype == DataType::kFloat32 ? nullptr : gradient,
          .count = count,
          .gradient_type = dtype,
          .parameter_type = dtype,
          .factor = 1,
          .lr = 1e-3F,
          .weight_decay = 0,
          .beta1 = 0.9F,
          .beta2 = 0.999F,
          .eps = 1e-8F,
          .a1 = 0.1F,
          .a2 = 0.001F,
          .c1 = 0.1F,
          .s2 = std::sqrt(0.001F)};
}

}  // namespace forebay
