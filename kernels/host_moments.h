// The host's update with m and v in any format, and loading and storing the narrow ones: plain functions over
// a range of elements, in two forms with the same bits, one straight from moments.h and definitions.h and one
// in SIMD for the best instruction set of the processor.
#pragma once

#include <cstddef>

#include "forebay/host_adam.h"
#include "kernels/host_kernels.h"
#include "kernels/moments.h"

namespace forebay::host_kernels {

struct Rounding {
  bool dithered;
  std::uint32_t seed;  // dither_seed()
};

// Each works on elements [begin, end) of `moments`, of which in kBlock8 all blocks are whole but for the last
// of the array. `load` and `store` take no kFloat32 and no null v, and element `begin` is m[0] and v[0].
struct MomentKernels {
  const char* target;  // "scalar", or Highway's name of the instruction set.
  void (*load)(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v);
  void (*store)(const float* m, const float* v, std::size_t begin, std::size_t end, const Moments& moments,
                Rounding rounding);
  // AdamW with an fp32 master.
  void (*update)(const HostAdamArguments& arguments, std::size_t begin, std::size_t end, Rounding rounding);
};

// The arguments for the elements from `start` on. Their m and v are left, and their count.
AdamWArguments from_element(const AdamWArguments& arguments, std::size_t start) noexcept;

// The same update for every optimizer and master, in blocks that are fp32 in between.
void update_in_blocks(const HostAdamArguments& arguments, std::size_t begin, std::size_t end,
                      Rounding rounding, const MomentKernels& moments, const RangeKernels& kernels);

// The definitions in a loop.
const MomentKernels& scalar_moment_kernels() noexcept;

// The functions for this processor.
const MomentKernels& simd_moment_kernels();

// The whole update on the threads of `runner`. Requires: arguments that are in order.
void run_update(const HostAdamArguments& arguments, const BlockRunner& runner);

}  // namespace forebay::host_kernels
