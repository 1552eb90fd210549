// Stands in for the fat binary where there was no nvcc: the kernels' names. A driver refuses it; a fake
// driver, which has host builds of the kernels, needs no more.
#include "kernels/cuda/image.h"
#include "kernels/cuda/kernel_list.h"

namespace forebay::cuda_kernels {
namespace {

#define FOREBAY_NAME_LINE(name, ...) #name "\n"
constexpr char kNames[] =
    "forebay kernels\n" FOREBAY_ELEMENT_KERNELS(FOREBAY_NAME_LINE) FOREBAY_BLOCK_KERNELS(FOREBAY_NAME_LINE);

}  // namespace

KernelImage kernel_image() noexcept {
  return {kNames, sizeof kNames, nullptr};
}

}  // namespace forebay::cuda_kernels
