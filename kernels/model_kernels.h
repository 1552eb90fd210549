// Kernels over a model backend: each takes its time and computes nothing.
#pragma once

#include "forebay/kernels.h"

namespace forebay {

// Kernels::create for BackendKind::kModel. Errors: kUnsupported for a backend that wraps a model backend.
Result<std::unique_ptr<Kernels>> create_model_kernels(Backend& backend);

}  // namespace forebay
