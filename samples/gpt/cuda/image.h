// The model's kernels as one image, embedded when the sample is built: a fat binary where nvcc was found,
// otherwise a text with their names, which a driver refuses.
#pragma once

#include "forebay/backend.h"

namespace forebay::gpt::kernels {

ModuleImage kernel_image() noexcept;
bool kernel_image_is_compiled() noexcept;

}  // namespace forebay::gpt::kernels
