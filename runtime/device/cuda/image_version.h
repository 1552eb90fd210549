// Reads from a kernel image which CUDA release made it, to explain why an older driver refuses it.
#pragma once

#include <cstddef>
#include <string>

namespace forebay {

// The oldest driver that can load an image: an ELF file, PTX, or a fat binary of both.
// Returns: the release as drivers count it, 13000 for CUDA 13.0; for a fat binary that of the entry that
// needs least; 0 where the image does not tell or is damaged. A driver loads ELF files of its own major
// release and of earlier ones, and PTX of its own release and of earlier ones.
//
// Source: the headers of fat binaries have no documentation; CUDA 12 and 13 write this layout.
int needed_cuda_driver(const void* image, std::size_t bytes) noexcept;

// "12.4" for 12040.
std::string cuda_release_text(int release);

}  // namespace forebay
