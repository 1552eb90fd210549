// What the device needs to decide about a step, and what it decides: the part of the step that plan and
// engine must agree on in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/kernels.h"

namespace forebay {

// While the sum of one bucket is averaged, the next is on the wire.
inline constexpr std::size_t kBucketsInFlight = 2;

// The bucket in which small units are put together, at least two, is this part of the others.
inline constexpr std::uint64_t kFusedBucketShare = 4;

// Uploaded for every step, whose number the host knows, so the table of corrections has one entry.
struct StepControl {
  StepState state;
  BiasCorrection correction;
};

// Gradient slices of an offloaded optimizer that are on their way to the host at a time.
inline constexpr std::uint64_t kTransitCount = 2;

// Elements that are updated together where a 2-byte parameter takes the place of an fp32 gradient.
inline constexpr std::uint64_t kRoundedCount = 1u << 20;

// File tier. Pieces of the optimizer in host memory: some read, one updated, some written. And of parameters
// on their way up.
inline constexpr std::uint64_t kPassBuffers = 6;
inline constexpr std::uint64_t kMoverBuffers = 4;
// Elements that a piece is a multiple of: whole granules of the store in every type.
inline constexpr std::uint64_t kPieceGranule = 32768;
inline constexpr std::uint64_t kStagingBytesMin = 8u << 20;

// One buffer of the pass: fp32 master, m, v, and the parameter where that is kept in files too.
inline constexpr std::uint64_t pass_buffer_bytes(std::uint64_t piece_count, DataType dtype,
                                                 bool parameters_away) {
  return piece_count * (12 + (parameters_away && dtype != DataType::kFloat32 ? element_bytes(dtype) : 0));
}

// What a rank says in step() besides which units it used: its metric, whether it wants to stop, and what must
// be the same on every rank.
inline constexpr std::uint64_t kStepFacts = 3;

// Scratch of the norm of so many elements.
inline std::uint64_t leaf_bytes(std::uint64_t count) {
  return count / kLeafCount * sizeof(double);
}

// Staging for the decision: the norms of all ranks and units, and as much scratch.
inline std::uint64_t decision_bytes(int ranks, std::uint64_t units) {
  return 2 * static_cast<std::uint64_t>(ranks) * units * sizeof(double);
}

// This rank's norms, then the StepControl.
inline std::uint64_t record_bytes(std::uint64_t units) {
  return units * sizeof(double) + sizeof(StepControl);
}

}  // namespace forebay
