// The cuda backend under the suite of all backends: on the fake driver where FOREBAY_LIBCUDA names it,
// otherwise on the machine's own driver and device 0. Every difference between the two is the fake's to mend.
#include "tests/device/backend_conformance.h"

#include <memory>

#include "tests/device/cuda/fake_cuda_test.h"

namespace forebay {
namespace {

// Null when the tests run on a real driver.
const fake_cuda::FakeCuda* fake() {
  static const std::unique_ptr<fake_cuda::FakeCuda> opened = []() -> std::unique_ptr<fake_cuda::FakeCuda> {
    const char* path = std::getenv("FOREBAY_LIBCUDA");
    if (path == nullptr) return nullptr;
    void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr || ::dlsym(library, "fake_cuda_reset") == nullptr) return nullptr;
    return std::make_unique<fake_cuda::FakeCuda>(fake_cuda::FakeCuda::open(path));
  }();
  return opened.get();
}

std::unique_ptr<Backend> make(std::uint64_t seed) {
  if (fake() != nullptr) {
    fake_cuda::FakeOptions options = fake_cuda::strict_options();
    options.seed = seed;
    fake_cuda::start_fake(*fake(), options);
  }
  const std::size_t memory_bytes = (fake() == nullptr ? 256u : 16u) << 20;
  Result<std::unique_ptr<CudaBackend>> backend = CudaBackend::create({.memory_bytes = memory_bytes});
  if (!backend.ok()) {
    ADD_FAILURE() << backend.status().to_string();
    return nullptr;
  }
  return std::move(backend).value();
}

Status available() {
  if (fake() != nullptr) return {};
  const Result<int> count = CudaBackend::device_count();
  FOREBAY_RETURN_IF_ERROR(count.status());
  if (count.value() > 0) return {};
  return {StatusCode::kUnavailable, "there is a CUDA driver and no device"};
}

void after() {
  if (fake() != nullptr) fake_cuda::expect_nothing_left(*fake());
}

const HostKernel kHostKernels[] = {{nullptr, nullptr}};

BackendUnderTest cuda(const char* name, std::uint64_t seed) {
  return {.name = name,
          .make = [seed] { return make(seed); },
          .available = available,
          .after = after,
          .module = fake_cuda::kStoreImage,
          .foreign_module = {.host_kernels = kHostKernels},
          .store_kernel = "store"};
}

// The second kind has its independent streams reordered, which only the fake can do.
INSTANTIATE_TEST_SUITE_P(Cuda, BackendConformance,
                         ::testing::Values(cuda("cuda", 0), cuda("reordered", 20261121)),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace forebay
