#include "forebay/kernels.h"

namespace forebay {

double pairwise_sum(double* values, std::size_t count) noexcept {
  if (count == 0) return 0.0;
  while (count > 1) {
    const std::size_t pairs = count / 2;
    for (std::size_t i = 0; i < pairs; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    if (count % 2 != 0) values[pairs] = values[count - 1];
    count = pairs + count % 2;
  }
  return values[0];
}

}  // namespace forebay
