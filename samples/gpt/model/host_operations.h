// The operations of a GPT as loops over OpenMP threads, in memory that the host may touch.
//
// One thread computes each output element in a fixed order, so the results do not depend on the number of
// threads.
#pragma once

#include <memory>

#include "model/matmul.h"
#include "model/operations.h"

namespace forebay::gpt {

// Sets the exact number of OpenMP threads for the calling thread's loops and matrix products, and tries it.
// Without OpenMP it is always one. Errors: throws Error(kUnavailable) when OpenMP gives another number.
void set_compute_threads(int count);
// The number of processors, within OpenMP's own limits.
int default_compute_threads();

// `threads`: the number that will compute, see set_compute_threads(). The loops take the widest vectors that
// the processor has; the results are the same with any.
std::unique_ptr<Operations> create_host_operations(std::unique_ptr<MatMul> matmul, int threads);

}  // namespace forebay::gpt
