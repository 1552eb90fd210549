// The checks of every launch before it is queued, on all backends.
//
// Errors: kInvalidArgument, with a message that names the kernel, the argument and the allowed values.
#pragma once

#include "forebay/kernels.h"

namespace forebay {

Status check_arguments(const CastArguments& arguments);
Status check_arguments(const AccumulateArguments& arguments);
Status check_arguments(const ScaleArguments& arguments);
Status check_arguments(const AddArguments& arguments);
Status check_arguments(const NormArguments& arguments);
Status check_arguments(const AdamWArguments& arguments);
Status check_arguments(const FillArguments& arguments);
Status check_arguments(const StepControlArguments& arguments);
Status check_arguments(const ControlledAdamWArguments& arguments);

}  // namespace forebay
