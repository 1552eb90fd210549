// Finds the PTX in an image as nvcc embeds it.
#pragma once

#include <cstddef>
#include <limits>
#include <string>

namespace forebay::ptx {

// The PTX text of an image: the image itself, or the entry for the newest architecture of a fat binary,
// unpacked; empty where the image has none. A fat binary's length is in its header, and text ends with a
// zero. Errors: throws Fault(kRefused) for a fat binary that is damaged or packed in an unknown way.
//
// Source: the header of fat binaries has no documentation; CUDA 12 and 13 write this layout.
std::string text_of_image(const void* image);

// The release of the oldest driver that loads the image for devices of the compute capability (90 for 9.0),
// 13000 for CUDA 13.0; 0 for images of CUDA 11 and older, and for ELF files of CUDA 12. The ELF file or PTX
// of a fat binary that needs least counts, among those that run on the device: ELF files of its generation
// that are no newer, PTX that is no newer. Returns: kNoDriver where none runs.
int needed_driver(const void* image, int compute_capability);
constexpr int kNoDriver = std::numeric_limits<int>::max();

}  // namespace forebay::ptx
