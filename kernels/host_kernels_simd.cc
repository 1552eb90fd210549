#include "host_kernels.h"

namespace forebay::host_kernels {

const RangeKernels& simd_kernels() {
  return scalar_kernels();
}

}  // namespace forebay::host_kernels
