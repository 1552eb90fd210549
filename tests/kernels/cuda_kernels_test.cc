// The suite through the cuda backend: on the fake driver, or on a GPU, as FOREBAY_LIBCUDA says.
//
//   cuda_kernels_test    the driver of this machine; the tests are skipped where there is none
#include "forebay/cuda_backend.h"
#include "tests/kernels/kernels_conformance.h"

namespace forebay::kernel_test {
namespace {

INSTANTIATE_TEST_SUITE_P(, KernelsConformance,
                         ::testing::Values(MachineParameter{
                             "Cuda",
                             [] {
                               Result<std::unique_ptr<CudaBackend>> backend = CudaBackend::create({});
                               if (!backend.ok()) return Machine{nullptr, backend.status().to_string()};
                               return Machine{std::move(backend).value(), ""};
                             }}),
                         machine_name);

}  // namespace
}  // namespace forebay::kernel_test
