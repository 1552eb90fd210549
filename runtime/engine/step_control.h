// What the device needs to decide about a step, and what it decides: the part of the step that plan and
// engine must agree on in bytes.
#pragma once

#include <cstdint>

#include "forebay/kernels.h"

namespace forebay {

// Uploaded for every step, whose number the host knows, so the table of corrections has one entry.
struct StepControl {
  StepState state;
  BiasCorrection correction;
};

// Gradient slices of an offloaded optimizer that are on their way to the host at a time.
inline constexpr std::uint64_t kTransitCount = 2;

// Staging for the decision: the norms of all ranks and units, and as much scratch.
inline std::uint64_t decision_bytes(int ranks, std::uint64_t units) {
  return 2 * static_cast<std::uint64_t>(ranks) * units * sizeof(double);
}

// This rank's norms, then the StepControl.
inline std::uint64_t record_bytes(std::uint64_t units) {
  return units * sizeof(double) + sizeof(StepControl);
}

}  // namespace forebay
