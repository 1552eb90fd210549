// The block map of a report's page: the blocks in a process's memory at one moment, in the order of their
// addresses, and the free pieces between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/command/page/report_page.h"

namespace forebay {

// Neighbouring free blocks joined, and the live blocks on both sides.
struct FreePiece {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  // Indices into the sorted blocks; kNoBlock at the end of the addresses or beside unknown memory.
  std::size_t before = SIZE_MAX;
  std::size_t after = SIZE_MAX;
};
inline constexpr std::size_t kNoBlock = SIZE_MAX;

// The blocks in the order of their addresses, without empty ones; if two overlap, the latter is cut.
std::vector<PageBlock> blocks_in_order(const std::vector<PageBlock>& blocks);

// All free pieces, largest first. Requires: `blocks` comes from blocks_in_order.
std::vector<FreePiece> free_pieces(const std::vector<PageBlock>& blocks);

// Without blocks: a sentence that says so.
std::string blocks_html(const PageMoment& moment);

}  // namespace forebay
