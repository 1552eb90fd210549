// The block map of a report's page: what lay where in a process's memory at one moment, in the order of
// addresses, and which pieces between the blocks were free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/command/page/report_page.h"

namespace forebay {

// Neighbouring free blocks together, and the blocks that keep them from being larger.
struct FreePiece {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  // Into the sorted blocks; kNoBlock where the addresses end or nothing is known beside it.
  std::size_t before = SIZE_MAX;
  std::size_t after = SIZE_MAX;
};
inline constexpr std::size_t kNoBlock = SIZE_MAX;

// The blocks in the order of their addresses, without empty ones; where two overlap the latter is cut.
std::vector<PageBlock> blocks_in_order(const std::vector<PageBlock>& blocks);

// All free pieces, largest first. `blocks` as blocks_in_order gives them.
std::vector<FreePiece> free_pieces(const std::vector<PageBlock>& blocks);

// Empty blocks: a sentence that says so.
std::string blocks_html(const PageMoment& moment);

}  // namespace forebay
