// A host backend that calls itself a cuda backend: modules are the CUDA kernels built for the host
// (tests/kernels/simulated_kernels.h), everything else is the host backend's.
//
// With it the code that launches CUDA kernels runs where there is neither a device nor a fake driver.
#pragma once

#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/device/forwarding_backend.h"
#include "runtime/device/host/script.h"
#include "tests/kernels/simulated_kernels.h"

namespace forebay::kernel_test {

class SimulatedCudaBackend final : public ForwardingBackend {
 public:
  explicit SimulatedCudaBackend(std::unique_ptr<ScriptedHostBackend> host, int multiprocessor_count)
      : ForwardingBackend(*host), host_(std::move(host)), capabilities_(host_->capabilities()) {
    capabilities_.kind = BackendKind::kCuda;
    capabilities_.multiprocessor_count = multiprocessor_count;
    std::snprintf(capabilities_.name, sizeof capabilities_.name, "cuda:simulated");
    for (std::size_t i = 0; i < cuda_kernels::kKernelCount; ++i) {
      const cuda_kernels::SimulatedKernel& kernel = cuda_kernels::simulated_kernels()[i];
      table_.push_back({kernel.name, kernel.function});
    }
    table_.push_back({nullptr, nullptr});
  }

  ScriptedHostBackend& host() noexcept { return *host_; }

  const Capabilities& capabilities() const noexcept override { return capabilities_; }
  // Takes any image, as a fake driver does: only the names count.
  Result<Module> load_module(const ModuleImage& image) override {
    if (image.image == nullptr || image.image_bytes == 0) {
      return Status(StatusCode::kInvalidArgument, "a cuda backend was given no image");
    }
    ModuleImage table;
    table.host_kernels = table_.data();
    return ForwardingBackend::load_module(table);
  }

 private:
  std::unique_ptr<ScriptedHostBackend> host_;
  Capabilities capabilities_;
  std::vector<HostKernel> table_;
};

}  // namespace forebay::kernel_test
