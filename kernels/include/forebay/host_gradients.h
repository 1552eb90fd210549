// Sums of gradients in host memory, by the same definitions as on a device (kernels.h) and bit for bit the
// same, on the calling thread and those of a BlockRunner. The work is done when a function returns.
#pragma once

#include <cstddef>

#include "forebay/block_runner.h"
#include "forebay/kernels.h"

namespace forebay {

// target = first ? source : target + source, in fp32: Kernels::accumulate() of one rank. No overlap.
void host_accumulate(const float* source, float* target, std::size_t count, bool first,
                     const BlockRunner& runner);

// Kernels::accumulate() itself, on the calling thread: for contributions that arrive piece by piece.
// Errors: kInvalidArgument, before anything is written.
Status host_accumulate(const AccumulateArguments& arguments);

// Kernels::scale() and Kernels::norm(). Errors: kInvalidArgument, before anything is written.
Status host_scale(const ScaleArguments& arguments, const BlockRunner& runner);
Status host_norm(const NormArguments& arguments, const BlockRunner& runner);

}  // namespace forebay
