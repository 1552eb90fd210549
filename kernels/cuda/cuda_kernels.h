// Kernels over a cuda backend: the compiled image, launched through the Backend alone.
#pragma once

#include "forebay/kernels.h"

namespace forebay {

// Kernels::create for BackendKind::kCuda.
Result<std::unique_ptr<Kernels>> create_cuda_kernels(Backend& backend);

}  // namespace forebay
