// The conformance suite of Kernels on the cuda backend, over the fake driver without host builds: the image
// is loaded, and its PTX is executed.
#include "forebay/cuda_backend.h"
#include "kernels/cuda/image.h"
#include "tests/kernels/kernels_conformance.h"

namespace forebay::kernel_test {
namespace {

Machine make_machine() {
  if (cuda_kernels::kernel_image().targets == nullptr) {
    return {nullptr, "nvcc was not found when this was built, so there is no PTX to execute"};
  }
  ::setenv("FOREBAY_LIBCUDA", FOREBAY_FAKE_CUDA, 1);
  ::setenv("FAKE_CUDA_KERNELS", "", 1);
  ::setenv("FAKE_CUDA_STRICT", "1", 1);
  ::setenv("FAKE_CUDA_SEED", "1", 1);
  Result<std::unique_ptr<CudaBackend>> backend = CudaBackend::create({});
  EXPECT_TRUE(backend.ok()) << backend.status().to_string();
  return {backend.ok() ? std::move(backend).value() : nullptr, "no fake driver"};
}

INSTANTIATE_TEST_SUITE_P(, KernelsConformance, ::testing::Values(MachineParameter{"PtxOnFake", make_machine}),
                         machine_name);

}  // namespace
}  // namespace forebay::kernel_test
