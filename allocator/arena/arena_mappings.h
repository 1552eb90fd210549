// The mappings that an arena keeps for steps that are repeated, for tools that explain a program's driver
// calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/arena.h"

namespace forebay {

struct ArenaMappings {
  std::size_t count = 0;
  // The most to keep for a step that is repeated, each about 200 bytes of host memory. A program that needs
  // more makes driver calls in every repeat.
  std::size_t most = std::size_t{1} << 20;
  // Mappings that owned no memory and were unmapped because there were too many.
  std::uint64_t dropped_count = 0;
};

ArenaMappings mappings_of(const Arena& arena);

// Sets ArenaMappings::most.
void limit_mappings(Arena& arena, std::size_t most);

}  // namespace forebay
