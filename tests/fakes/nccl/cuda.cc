// How launches get onto streams: as kernels of the fake CUDA driver, found as the product finds its driver.
#include <cstdlib>
#include <cstring>

#include "tests/fakes/cuda/abi.h"
#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/fakes/nccl/state.h"

namespace forebay::fake_nccl {
namespace {

using cuda::CuResult;

// Addresses that one group of calls may use; the driver looks for each among its mappings.
constexpr std::size_t kAddressMax = 512;
constexpr const char* kKernelName = "fake_nccl_launch";

struct KernelArgument {
  std::uint64_t number;
  const void* addresses[kAddressMax];
};

void run_kernel(const fake_cuda::FakeLaunch&, void* const* arguments) {
  std::uint64_t number = 0;
  std::memcpy(&number, arguments[0], sizeof(number));
  std::shared_ptr<Launch> launch;
  {
    const Lock lock(state().mutex);
    launch = state().launches.at(number);
  }
  run_launch(*launch);
  const Lock lock(state().mutex);
  state().launches.erase(number);
  state().changed.notify_all();
}

constexpr std::size_t kArgumentBytes[] = {sizeof(KernelArgument)};
constexpr fake_cuda::FakeKernel kKernels[] = {{kKernelName, run_kernel, 1, kArgumentBytes}};

struct Driver {
  fake_cuda::FakeCuda controls;
  cuda::cuCtxGetCurrent_function* ctx_get = nullptr;
  cuda::cuCtxSetCurrent_function* ctx_set = nullptr;
  cuda::cuCtxGetDevice_function* ctx_device = nullptr;
  cuda::cuModuleLoadData_function* load = nullptr;
  cuda::cuModuleUnload_function* unload = nullptr;
  cuda::cuModuleGetFunction_function* function = nullptr;
  cuda::cuLaunchKernel_function* launch = nullptr;
};

const Driver& driver() {
  static const Driver instance = [] {
    const char* path = std::getenv("FOREBAY_LIBCUDA");
    Driver opened;
    opened.controls = fake_cuda::FakeCuda::open(path != nullptr ? path : "libcuda.so.1");
    const fake_cuda::FakeCuda& fake = opened.controls;
    opened.ctx_get = fake.symbol<cuda::cuCtxGetCurrent_function>("cuCtxGetCurrent");
    opened.ctx_set = fake.symbol<cuda::cuCtxSetCurrent_function>("cuCtxSetCurrent");
    opened.ctx_device = fake.symbol<cuda::cuCtxGetDevice_function>("cuCtxGetDevice");
    opened.load = fake.symbol<cuda::cuModuleLoadData_function>("cuModuleLoadData");
    opened.unload = fake.symbol<cuda::cuModuleUnload_function>("cuModuleUnload");
    opened.function = fake.symbol<cuda::cuModuleGetFunction_function>("cuModuleGetFunction");
    opened.launch = fake.symbol<cuda::cuLaunchKernel_function>("cuLaunchKernel");
    return opened;
  }();
  return instance;
}

// The comm's context for as long as it lives, as NCCL's own calls set the device.
class ContextScope {
 public:
  explicit ContextScope(void* context) {
    driver().ctx_get(&before_);
    driver().ctx_set(static_cast<cuda::CuContext>(context));
  }
  ~ContextScope() { driver().ctx_set(before_); }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  cuda::CuContext before_ = nullptr;
};

}  // namespace

bool current_context(void** context, int* device) {
  cuda::CuContext current = nullptr;
  cuda::CuDevice ordinal = 0;
  if (driver().ctx_get(&current) != CuResult::kSuccess || current == nullptr) return false;
  if (driver().ctx_device(&ordinal) != CuResult::kSuccess) return false;
  *context = current;
  *device = static_cast<int>(ordinal);
  return true;
}

bool load_kernel(Comm& comm) {
  // Again each time: a reset of the driver forgets kernels.
  driver().controls.register_kernels({kKernels, 1});
  cuda::CuModule module = nullptr;
  cuda::CuFunction kernel = nullptr;
  if (driver().load(&module, "forebay kernels") != CuResult::kSuccess) return false;
  comm.module = module;
  if (driver().function(&kernel, module, kKernelName) != CuResult::kSuccess) return false;
  comm.kernel = kernel;
  return true;
}

void unload_kernel(Comm& comm) {
  if (comm.module == nullptr) return;
  const ContextScope scope(comm.context);
  driver().unload(static_cast<cuda::CuModule>(comm.module));
  comm.module = nullptr;
}

bool queue_kernel(const Launch& launch, std::uint64_t number) {
  KernelArgument argument{};
  argument.number = number;
  if (launch.addresses.size() > kAddressMax) return false;
  std::copy(launch.addresses.begin(), launch.addresses.end(), argument.addresses);
  void* parameters[] = {&argument};
  const ContextScope scope(launch.comm->context);
  return driver().launch(static_cast<cuda::CuFunction>(launch.comm->kernel), 1, 1, 1, 1, 1, 1, 0,
                         reinterpret_cast<cuda::CuStream>(launch.stream), parameters,
                         nullptr) == CuResult::kSuccess;
}

}  // namespace forebay::fake_nccl
