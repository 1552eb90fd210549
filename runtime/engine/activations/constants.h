// Constants that the plan of activations and the checkpointer share.
#pragma once

#include <cstdint>

namespace forebay {

// Alignment of every place, which kernels expect of a block (arena.h). Offloaded parts are multiples of it.
inline constexpr std::uint64_t kActivationAlignment = 512;
// Ranges of the file store are whole pages.
inline constexpr std::uint64_t kActivationPageBytes = 4096;
// Host buffers of each direction of the file tier. Fewer: drive and copy wait for each other. More: memory.
inline constexpr std::uint64_t kActivationMoverBuffers = 4;
// Pieces on the file tier are multiples of this, the default granule of file stores.
inline constexpr std::uint64_t kFilePieceGranule = 64 << 10;

}  // namespace forebay
