// Replaces the fat binary where nvcc was not found. A driver refuses it; the fake driver, which has host
// builds of the kernels, needs only the names.
#include "cuda/image.h"
#include "cuda/kernels.h"

namespace forebay::gpt::kernels {
namespace {

#define FOREBAY_NAME_LINE(name, arguments, shared) #name "\n"
constexpr char kNames[] = "forebay kernels\n" FOREBAY_GPT_KERNELS(FOREBAY_NAME_LINE);

}  // namespace

ModuleImage kernel_image() noexcept {
  return {.image = kNames, .image_bytes = sizeof kNames};
}

bool kernel_image_is_compiled() noexcept {
  return false;
}

}  // namespace forebay::gpt::kernels
