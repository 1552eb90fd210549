// Sizes in a step that plan and engine must agree on, and the record by which the device decides about a
// step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/kernels.h"

namespace forebay {

// Sums of buckets in flight: while one is averaged, the next bucket is on the wire. Smaller: the wire waits.
// Larger: more memory.
inline constexpr std::size_t kBucketsInFlight = 2;

// The bucket of small units is this fraction of the other buckets. A unit is small when two of it fit.
inline constexpr std::uint64_t kFusedBucketShare = 4;

// Uploaded for every step. The host knows the number of the step, so one bias correction is enough.
struct StepControl {
  StepState state;
  BiasCorrection correction;
};

// Gradient slices of offloaded units on their way to the host at a time.
inline constexpr std::uint64_t kTransitCount = 2;

// Elements that are updated together where 2-byte parameters take the place of fp32 gradients.
inline constexpr std::uint64_t kRoundedCount = 1u << 20;

// Tier kFile: pieces of the optimizer in host memory, of which some are read, one is updated and some are
// written; and pieces of parameters on their way to the device.
inline constexpr std::uint64_t kPassBuffers = 6;
inline constexpr std::uint64_t kMoverBuffers = 4;
// A piece has a multiple of this many elements, so that it is whole granules of the store in every type.
inline constexpr std::uint64_t kPieceGranule = 32768;
inline constexpr std::uint64_t kStagingBytesMin = 8u << 20;
// The fp32 states of each element: master, m and, where the optimizer has it, v.
inline constexpr std::uint64_t state_field_count(Optimizer optimizer) {
  return has_second_moment(optimizer) ? 3 : 2;
}
inline constexpr std::uint64_t state_bytes(Optimizer optimizer) {
  return state_field_count(optimizer) * sizeof(float);
}
// A range of the store has whole pages, which are the granules of a file store unless others are asked for.
inline constexpr std::uint64_t kPageBytes = 4096;

// One buffer of the pass: the states in fp32, and the parameters where they are in files, too.
inline constexpr std::uint64_t pass_buffer_bytes(std::uint64_t piece_count, DataType dtype,
                                                 Optimizer optimizer, bool offloads_parameters) {
  return piece_count * (state_bytes(optimizer) +
                        (offloads_parameters && dtype != DataType::kFloat32 ? element_bytes(dtype) : 0));
}

// Doubles that a rank sends in step() beside a flag for each unit that it used: its metric, its wish to stop,
// and a fingerprint of the values that must be the same on every rank.
inline constexpr std::uint64_t kStepFacts = 3;

// Scratch for the leaves of the norm of `count` elements.
inline std::uint64_t leaf_bytes(std::uint64_t count) {
  return count / kLeafCount * sizeof(double);
}

// Staging for the decision: the norms of all ranks and units, and scratch of the same size.
inline std::uint64_t decision_bytes(int ranks, std::uint64_t units) {
  return 2 * static_cast<std::uint64_t>(ranks) * units * sizeof(double);
}

// The norms of this rank, then the StepControl.
inline std::uint64_t record_bytes(std::uint64_t units) {
  return units * sizeof(double) + sizeof(StepControl);
}

}  // namespace forebay
