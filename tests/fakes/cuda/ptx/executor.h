// Executes kernels: every block of a grid, one after the other, warp by warp.
//
// Between two barriers the warps of a block run in ascending or in descending order, in turns, so that work
// which lacks a barrier goes wrong in one of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tests/fakes/cuda/ptx/fault.h"
#include "tests/fakes/cuda/ptx/memory.h"
#include "tests/fakes/cuda/ptx/program.h"

namespace forebay::ptx {

struct Launch {
  std::array<unsigned, 3> grid{1, 1, 1};
  std::array<unsigned, 3> block{1, 1, 1};
  std::size_t dynamic_shared_bytes = 0;
  // The most instructions that a warp may execute. Fewer would stop a long kernel; more let an endless one
  // run for longer.
  std::uint64_t most_instructions = std::uint64_t{1} << 32;
};

struct Executed {
  std::uint64_t instructions = 0;  // Each counted once for a warp.
};

// `parameters` are the kernel's, at their offsets.
// Errors: throws Fault, whose message names the kernel, the block and thread, the line and its text.
Executed execute(const Kernel& kernel, const Launch& launch, const std::byte* parameters,
                 const GlobalMemory& memory);

}  // namespace forebay::ptx
