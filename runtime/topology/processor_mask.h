// Sets of processors as the system's calls take them, for any number of processors.
#pragma once

#include <span>
#include <vector>

namespace forebay::internal {

using ProcessorMask = std::vector<unsigned long>;

// The calling thread's; empty when the system does not say.
ProcessorMask read_processor_mask();
// False with errno.
bool write_processor_mask(const ProcessorMask& mask);

// Requires: none is negative.
ProcessorMask make_processor_mask(std::span<const int> processors);
std::vector<int> processors_of(const ProcessorMask& mask);

}  // namespace forebay::internal
