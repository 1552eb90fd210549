// The suite on the host kernels, on the CUDA kernels built for the host, and on these through the cuda
// backend and the fake driver.
#include "tests/kernels/kernels_conformance.h"

#include <cstdlib>

#include "forebay/cuda_backend.h"
#include "tests/kernels/simulated_cuda_backend.h"

namespace forebay::kernel_test {
namespace {

std::unique_ptr<ScriptedHostBackend> make_host() {
  Result<std::unique_ptr<ScriptedHostBackend>> backend =
      ScriptedHostBackend::create({.granularity = 64u << 10});
  EXPECT_TRUE(backend.ok()) << backend.status().to_string();
  return backend.ok() ? std::move(backend).value() : nullptr;
}

#ifdef FOREBAY_FAKE_CUDA
// Device memory that the host may not touch, and streams served in a random order.
Machine make_fake() {
  ::setenv("FOREBAY_LIBCUDA", FOREBAY_FAKE_CUDA, 1);
  ::setenv("FAKE_CUDA_KERNELS", FOREBAY_FAKE_KERNELS, 1);
  ::setenv("FAKE_CUDA_STRICT", "1", 1);
  ::setenv("FAKE_CUDA_SEED", "1", 1);
  Result<std::unique_ptr<CudaBackend>> backend = CudaBackend::create({});
  EXPECT_TRUE(backend.ok()) << backend.status().to_string();
  return {backend.ok() ? std::move(backend).value() : nullptr, "no fake driver"};
}
#endif

const MachineParameter kMachines[] = {
    {"Host",
     [] {
       return Machine{make_host(), ""};
     }},
    {"SimulatedCuda",
     [] {
       return Machine{std::make_unique<SimulatedCudaBackend>(make_host(), 1), ""};
     }},
#ifdef FOREBAY_FAKE_CUDA
    {"CudaOnFake", make_fake},
#endif
};

INSTANTIATE_TEST_SUITE_P(, KernelsConformance, ::testing::ValuesIn(kMachines), machine_name);

TEST(CudaKernels, DescriptionNamesTheDeviceAndItsMultiprocessors) {
  SimulatedCudaBackend backend(make_host(), 132);
  Result<std::unique_ptr<Kernels>> kernels = Kernels::create(backend);
  ASSERT_TRUE(kernels.ok()) << kernels.status().to_string();
  EXPECT_STREQ(kernels.value()->description(), "cuda:simulated, 132 multiprocessors");
}

TEST(CudaKernels, GiveTheirModuleBack) {
  SimulatedCudaBackend backend(make_host(), 1);
  {
    Result<std::unique_ptr<Kernels>> kernels = Kernels::create(backend);
    ASSERT_TRUE(kernels.ok()) << kernels.status().to_string();
    EXPECT_EQ(backend.host().live_handle_count(), 1u);
  }
  EXPECT_EQ(backend.host().live_handle_count(), 0u);
}

// A driver that refuses the image: the message depends on whether the build has a real image.
TEST(CudaKernels, ARefusedImageIsReportedWithItsReason) {
  SimulatedCudaBackend backend(make_host(), 1);
  backend.host().add_fault({HostCall::kLoadModule, 1, Status(StatusCode::kUnsupported, "scripted")});

  const Status status = Kernels::create(backend).status();

  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
#if FOREBAY_HAVE_NVCC
  EXPECT_NE(status.message().find("compiled for sm_"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("scripted"), std::string::npos) << status.message();
#else
  EXPECT_NE(status.message().find("nvcc was not found when it was built"), std::string::npos)
      << status.message();
#endif
}

}  // namespace
}  // namespace forebay::kernel_test
