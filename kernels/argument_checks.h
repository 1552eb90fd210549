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
Status check_arguments(const ControlledKeptUpdateArguments& arguments);
Status check_arguments(const Controlled<MuonMomentumArguments>& arguments);
Status check_arguments(const Controlled<OrthogonaliseArguments>& arguments);
Status check_arguments(const Controlled<MuonUpdateArguments>& arguments);
Status check_arguments(const Controlled<FactorSumsArguments>& arguments);
Status check_arguments(const Controlled<FactorRenewalArguments>& arguments);
Status check_arguments(const Controlled<UpdateSquaresArguments>& arguments);
Status check_arguments(const Controlled<ParameterSquaresArguments>& arguments);
Status check_arguments(const Controlled<AdafactorStepArguments>& arguments);
Status check_arguments(const Controlled<FactoredUpdateArguments>& arguments);
Status check_arguments(const Controlled<KeepFactorsArguments>& arguments);

// The parts of an update of kept states, for messages of `function`.
Status check_arguments(const char* function, const KeptUpdateArguments& arguments);
Status check_moments(const char* function, const Moments& moments, std::size_t count, bool has_v);
Status check_rounding(const char* function, std::size_t count, MomentRounding rounding);

}  // namespace forebay
