// Finds the PTX in an image as nvcc embeds it.
#pragma once

#include <cstddef>
#include <string>

namespace forebay::ptx {

// The PTX text of an image: the image itself, or the entry for the newest architecture of a fat binary,
// unpacked; empty where the image has none. A fat binary's length is in its header, and text ends with a
// zero. Errors: throws Fault(kRefused) for a fat binary that is damaged or packed in an unknown way.
//
// Source: the header of fat binaries has no documentation; CUDA 12 and 13 write this layout.
std::string text_of_image(const void* image);

}  // namespace forebay::ptx
