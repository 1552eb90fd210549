// The fat binary that nvcc made, taken in by the assembler.
#include "kernels/cuda/image.h"

asm(".section .rodata\n"
    ".balign 64\n"
    ".local forebay_kernel_image_begin\n"
    ".local forebay_kernel_image_end\n"
    "forebay_kernel_image_begin:\n"
    ".incbin \"" FOREBAY_KERNEL_IMAGE
    "\"\n"
    "forebay_kernel_image_end:\n"
    ".byte 0\n"
    ".previous\n");

extern "C" {
__attribute__((visibility("hidden"))) extern const unsigned char forebay_kernel_image_begin[];
__attribute__((visibility("hidden"))) extern const unsigned char forebay_kernel_image_end[];
}

namespace forebay::cuda_kernels {

KernelImage kernel_image() noexcept {
  return {forebay_kernel_image_begin,
          static_cast<std::size_t>(forebay_kernel_image_end - forebay_kernel_image_begin),
          FOREBAY_KERNEL_TARGETS};
}

}  // namespace forebay::cuda_kernels
