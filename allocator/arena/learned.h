// Placements of an earlier run: where the blocks of a job's steady state lay, and which chunks their
// addresses showed. A later run of the same job places its blocks there from its first step on.
//
// Only the form is here: how it is written and read. The arena notes placements (learn_begin, learn_end) and
// follows them (serve_as_learned); see arena/learned.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/status.h"

namespace forebay::internal {

// The first words of the text, and the version of the form, which follows them. The checksum of the rest
// comes next, its lowest byte first.
inline constexpr std::string_view kLearnedHeadline = "forebay learned placements ";
inline constexpr std::string_view kLearnedVersion = "2\n";
std::uint64_t learned_checksum(std::string_view text);

// A request, as StepMemory identifies it, and its block's offset in the address range.
struct LearnedPlacement {
  std::size_t bytes = 0;
  std::size_t live_bytes = 0;  // Before it.
  std::size_t kind = 0;
  std::size_t offset = 0;
};

// Addresses that showed a chunk.
struct LearnedMapping {
  std::size_t offset = 0;
  std::uint32_t chunk = 0;  // Into LearnedPlacements::chunk_bytes.
};

struct LearnedPlacements {
  std::size_t granule_bytes = 0;  // Arena::chunk_bytes.
  std::size_t reserve_bytes = 0;
  std::size_t transient_offset = 0;
  std::size_t peak_live_bytes = 0;
  std::vector<std::size_t> chunk_bytes;
  std::vector<LearnedMapping> mappings;      // In the order of addresses; they do not overlap.
  std::vector<LearnedPlacement> placements;  // In the order of requests.

  std::size_t held_bytes() const;  // Bytes of all chunks.

  std::string encode() const;
  // Errors: kInvalidArgument for a text that encode did not write, that is damaged, or that another version
  //         wrote.
  static Result<LearnedPlacements> decode(std::string_view text);
  // Moves everything to where an arena of that address range has it. Errors: kInvalidArgument if it has too
  // few addresses, or other granules.
  Status move_to(std::size_t granule_bytes, std::size_t reserve_bytes, std::size_t transient_offset);
};

}  // namespace forebay::internal
