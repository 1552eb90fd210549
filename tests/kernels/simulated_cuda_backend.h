// A host backend that calls itself a cuda backend: modules are the CUDA kernels built for the host
// (kernels/cuda/simulated_kernels.h), everything else is the host backend's.
//
// With it the code that launches CUDA kernels runs where there is neither a device nor a fake driver.
#pragma once

#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "forebay/host_backend.h"
#include "kernels/cuda/simulated_kernels.h"

namespace forebay::kernel_test {

class SimulatedCudaBackend final : public Backend {
 public:
  explicit SimulatedCudaBackend(std::unique_ptr<HostBackend> host, int multiprocessor_count)
      : host_(std::move(host)), capabilities_(host_->capabilities()) {
    capabilities_.kind = BackendKind::kCuda;
    capabilities_.multiprocessor_count = multiprocessor_count;
    std::snprintf(capabilities_.name, sizeof capabilities_.name, "cuda:simulated");
    for (std::size_t i = 0; i < cuda_kernels::kKernelCount; ++i) {
      const cuda_kernels::SimulatedKernel& kernel = cuda_kernels::simulated_kernels()[i];
      table_.push_back({kernel.name, kernel.function});
    }
    table_.push_back({nullptr, nullptr});
  }

  HostBackend& host() noexcept { return *host_; }

  const Capabilities& capabilities() const noexcept override { return capabilities_; }
  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) override {
    return host_->reserve(bytes, alignment);
  }
  Status release(DevicePtr base, std::size_t bytes) override { return host_->release(base, bytes); }
  Result<Chunk> chunk_create(std::size_t bytes) override { return host_->chunk_create(bytes); }
  Status chunk_destroy(Chunk chunk) override { return host_->chunk_destroy(chunk); }
  Status map(DevicePtr address, Chunk chunk) override { return host_->map(address, chunk); }
  Status unmap(DevicePtr address, std::size_t bytes) override { return host_->unmap(address, bytes); }
  Status set_access(DevicePtr address, std::size_t bytes) override {
    return host_->set_access(address, bytes);
  }
  Result<DevicePtr> alloc(std::size_t bytes) override { return host_->alloc(bytes); }
  Status free(DevicePtr address) override { return host_->free(address); }
  Status pin(void* address, std::size_t bytes) override { return host_->pin(address, bytes); }
  Status unpin(void* address) override { return host_->unpin(address); }
  MemoryInfo memory_info() override { return host_->memory_info(); }
  Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) override {
    return host_->copy_async(target, source, bytes, stream);
  }
  Status fill_async(DevicePtr target, std::uint8_t value, std::size_t bytes, Stream stream) override {
    return host_->fill_async(target, value, bytes, stream);
  }
  Result<Stream> stream_create() override { return host_->stream_create(); }
  Status stream_destroy(Stream stream) override { return host_->stream_destroy(stream); }
  Status stream_synchronize(Stream stream) override { return host_->stream_synchronize(stream); }
  Result<Event> event_create() override { return host_->event_create(); }
  Status event_destroy(Event event) override { return host_->event_destroy(event); }
  Status event_record(Event event, Stream stream) override { return host_->event_record(event, stream); }
  Result<bool> event_query(Event event) override { return host_->event_query(event); }
  Status event_synchronize(Event event) override { return host_->event_synchronize(event); }
  Status stream_wait(Stream stream, Event event) override { return host_->stream_wait(stream, event); }
  Status call_host(Stream stream, HostFunction function, void* argument) override {
    return host_->call_host(stream, function, argument);
  }
  // Takes any image, as a fake driver does: the names are what counts.
  Result<Module> load_module(const ModuleImage& image) override {
    if (image.image == nullptr || image.image_bytes == 0) {
      return Status(StatusCode::kInvalidArgument, "a cuda backend was given no image");
    }
    ModuleImage table;
    table.host_kernels = table_.data();
    return host_->load_module(table);
  }
  Status unload_module(Module module) override { return host_->unload_module(module); }
  Result<Kernel> get_kernel(Module module, const char* name) override {
    return host_->get_kernel(module, name);
  }
  Status launch(Kernel kernel, Dimensions grid, Dimensions block, const void* const* arguments,
                const std::size_t* argument_bytes, std::size_t argument_count, Stream stream) override {
    return host_->launch(kernel, grid, block, arguments, argument_bytes, argument_count, stream);
  }

 private:
  std::unique_ptr<HostBackend> host_;
  Capabilities capabilities_;
  std::vector<HostKernel> table_;
};

}  // namespace forebay::kernel_test
