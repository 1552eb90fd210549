// The AdamW step of optimizer states in host memory: one pass that unscales and clips the gradient, updates
// master, m and v, and writes the low-precision parameter, on the calling thread and those of a BlockRunner.
//
// The arithmetic is that of Kernels::adamw() and update_kept() (kernels.h), by the same definition, and bit
// for bit the same. The step is not queued on a stream and needs no backend: it is done when it returns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/block_runner.h"
#include "forebay/kernels.h"
#include "forebay/moments.h"
#include "forebay/status.h"

namespace forebay {

using HostAdamArguments = KeptUpdateArguments;

// Updates all elements, in place. None of the arrays may overlap, except that a parameter may take the place
// of its gradient where both have the same number of bytes.
//
// Cost: one pass over memory; per element 8 bytes of master, the gradient, the parameter, and m and v twice.
//
// Threads: those of `runner`, the caller among them.
//
// Errors: kInvalidArgument, before anything is written.
Status host_adam(const HostAdamArguments& arguments, const BlockRunner& runner);

// Rounds m and v of `count` elements from fp32 to the format of `moments`, as a step does with its results:
// for states that are loaded.
// Errors: kInvalidArgument, before anything is written.
Status store_moments(const float* m, const float* v, std::size_t count, const Moments& moments,
                     MomentRounding rounding, std::uint64_t step, const BlockRunner& runner);

// Widens m and v to fp32, exactly. Storing them again in the same format, with either rounding, gives the
// same values: saving and loading states changes nothing.
// Errors: kInvalidArgument, before anything is written.
Status load_moments(const Moments& moments, std::size_t count, float* m, float* v, const BlockRunner& runner);

// Widens `count` elements of one of m and v to fp32, exactly. `exponents` are those of kBlock8.
void widen_moment(MomentFormat format, bool is_v, const void* kept, const std::uint8_t* exponents,
                  std::size_t count, float* values);

// Rounds `count` elements of one of m and v to the nearest, as store_moments() does.
void narrow_moment(MomentFormat format, bool is_v, const float* values, std::size_t count, void* kept,
                   std::uint8_t* exponents);

}  // namespace forebay
