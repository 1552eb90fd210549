// The fat binary that nvcc made, included by the assembler.
#include "cuda/image.h"

asm(".section .rodata\n"
    ".balign 64\n"
    ".local forebay_gpt_image_begin\n"
    ".local forebay_gpt_image_end\n"
    "forebay_gpt_image_begin:\n"
    ".incbin \"" FOREBAY_GPT_IMAGE
    "\"\n"
    "forebay_gpt_image_end:\n"
    ".byte 0\n"
    ".previous\n");

extern "C" {
__attribute__((visibility("hidden"))) extern const unsigned char forebay_gpt_image_begin[];
__attribute__((visibility("hidden"))) extern const unsigned char forebay_gpt_image_end[];
}

namespace forebay::gpt::kernels {

ModuleImage kernel_image() noexcept {
  return {.image = forebay_gpt_image_begin,
          .image_bytes = static_cast<std::size_t>(forebay_gpt_image_end - forebay_gpt_image_begin)};
}

bool kernel_image_is_compiled() noexcept {
  return true;
}

}  // namespace forebay::gpt::kernels
