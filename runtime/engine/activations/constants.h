// What the plan of activations and the checkpointer that follows it have in common.
#pragma once

#include <cstdint>

namespace forebay {

// Every place begins on this: what kernels expect of a block (arena.h). Spilled parts are multiples of it.
inline constexpr std::uint64_t kActivationAlignment = 512;
// Ranges of the store are whole pages.
inline constexpr std::uint64_t kActivationPageBytes = 4096;
// Host buffers of each direction of the file tier. Fewer: drive and copy wait for each other. More: memory.
inline constexpr std::uint64_t kActivationMoverBuffers = 4;
// Pieces on the file tier are multiples of it: of the granule that stores have by default.
inline constexpr std::uint64_t kFilePieceGranule = 64 << 10;

}  // namespace forebay
