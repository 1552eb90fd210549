// The parts of an Adafactor step (adafactor.h) on host memory.
//
// Threads: those of the BlockRunner, the caller among them; the bits do not depend on them. The work is done
// when a function returns.
#pragma once

#include "forebay/adafactor.h"
#include "forebay/block_runner.h"
#include "forebay/kernels.h"

namespace forebay {

void factor_sums(const FactorSumsArguments& arguments, const BlockRunner& runner);
void renew_factors(const FactorRenewalArguments& arguments, const BlockRunner& runner);
void update_squares(const UpdateSquaresArguments& arguments, const BlockRunner& runner);
// `sum`: of the masters before these.
void parameter_squares(const ParameterSquaresArguments& arguments, const BlockRunner& runner,
                       double sum = 0.0);
void adafactor_step(const AdafactorStepArguments& arguments, const BlockRunner& runner);
void factored_update(const FactoredUpdateArguments& arguments, const BlockRunner& runner);
void keep_factors(const KeepFactorsArguments& arguments, const BlockRunner& runner);

}  // namespace forebay
