// What every launch checks before it is queued, whichever backend runs it.
//
// Errors: kInvalidArgument, with a message that names the kernel, the argument and what to pass.
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
