// The loops of host_adafactor.cc over values of one row, in two forms with the same bits: one straight from
// the contract, and one in SIMD for the best instruction set of the processor.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "forebay/master_move.h"
#include "kernels/host_kernels.h"

namespace forebay::host_kernels {

// Elements in fp32 between two loops. Larger: they leave the first cache.
inline constexpr std::size_t kChunkCount = 512;
using Values = std::array<float, kChunkCount>;

// Elements that one thread takes at once. Smaller: more waiting for each other. Larger: the threads end
// unevenly.
inline constexpr std::size_t kElementBlock = 65536;

// Calls visit(at, count) for the chunks of [begin, end).
template <typename Visit>
void for_each_chunk(std::uint64_t begin, std::uint64_t end, const Visit& visit) {
  for (std::uint64_t at = begin; at < end; at += kChunkCount)
    visit(at, std::min<std::uint64_t>(kChunkCount, end - at));
}

struct FactoredKernels {
  const char* target;  // "scalar", or Highway's name of the instruction set.
  // target[i] = float(source[i]) * factor
  void (*scale)(const void* source, DataType type, float factor, std::size_t count, float* target);
  // sums[i] += values[i] * values[i]
  void (*add_squares)(const float* values, std::size_t count, double* sums);
  // The same, to lanes[i mod kNormLanes]. Requires: `count` is a multiple of kNormLanes.
  void (*add_to_lanes)(const float* values, std::size_t count, double* lanes);
  // Gradients to updates: values[i] = factored_element(values[i], q, c[i]).
  void (*divide)(float q, const float* c, std::size_t count, float* values);
  // p[i] = canonical(fma(step, u[i], fma(decay, p[i], p[i])))
  void (*move)(float decay, float step, const float* u, std::size_t count, float* p);
};

const FactoredKernels& scalar_factored_kernels() noexcept;

// The loops for this processor.
const FactoredKernels& simd_factored_kernels();

// Moves `count` masters, at most kChunkCount, from element `at` on by u. `seed`: step_seed() of the half
// masters and the step.
void move_masters(const MasterMove& move, std::uint64_t seed, std::uint64_t at, std::size_t count,
                  const float* u);

}  // namespace forebay::host_kernels
