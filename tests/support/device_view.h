// DeviceView: one of several Backends over one device, as the cuda backends of ranks that share a GPU are:
// they take each other's events and addresses, and the host must not touch their memory. The device is a
// HostBackend, which does not stop who touches it all the same; the fake CUDA driver does.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "forebay/host_backend.h"

namespace forebay::testing {

class DeviceView final : public Backend {
 public:
  DeviceView(std::shared_ptr<HostBackend> device, const std::string& name)
      : device_(std::move(device)), capabilities_(device_->capabilities()) {
    std::strncpy(capabilities_.name, name.c_str(), sizeof(capabilities_.name) - 1);
    capabilities_.host_accessible = false;
  }

  // Fails the nth call of that kind through this view, counted from now and from 1.
  void fail(HostCall call, std::uint64_t nth, Status status) {
    fault_ = std::move(status);
    fault_call_ = call;
    fault_countdown_ = nth;
  }

  const Capabilities& capabilities() const noexcept override { return capabilities_; }
  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) override {
    return device_->reserve(bytes, alignment);
  }
  Status release(DevicePtr base, std::size_t bytes) override { return device_->release(base, bytes); }
  Result<Chunk> chunk_create(std::size_t bytes) override { return device_->chunk_create(bytes); }
  Status chunk_destroy(Chunk chunk) override { return device_->chunk_destroy(chunk); }
  Status map(DevicePtr address, Chunk chunk) override { return device_->map(address, chunk); }
  Status unmap(DevicePtr address, std::size_t bytes) override { return device_->unmap(address, bytes); }
  Status set_access(DevicePtr address, std::size_t bytes) override {
    return device_->set_access(address, bytes);
  }
  Result<DevicePtr> alloc(std::size_t bytes) override { return device_->alloc(bytes); }
  Status free(DevicePtr address) override { return device_->free(address); }
  Status pin(void* address, std::size_t bytes) override { return device_->pin(address, bytes); }
  Status unpin(void* address) override { return device_->unpin(address); }
  MemoryInfo memory_info() override { return device_->memory_info(); }
  Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kCopyAsync));
    return device_->copy_async(target, source, bytes, stream);
  }
  Status fill_async(DevicePtr target, std::uint8_t value, std::size_t bytes, Stream stream) override {
    return device_->fill_async(target, value, bytes, stream);
  }
  Result<Stream> stream_create() override { return device_->stream_create(); }
  Status stream_destroy(Stream stream) override { return device_->stream_destroy(stream); }
  Status stream_synchronize(Stream stream) override { return device_->stream_synchronize(stream); }
  Result<Event> event_create() override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kEventCreate));
    return device_->event_create();
  }
  Status event_destroy(Event event) override { return device_->event_destroy(event); }
  Status event_record(Event event, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kEventRecord));
    return device_->event_record(event, stream);
  }
  Result<bool> event_query(Event event) override { return device_->event_query(event); }
  Status event_synchronize(Event event) override { return device_->event_synchronize(event); }
  Status stream_wait(Stream stream, Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kStreamWait));
    return device_->stream_wait(stream, event);
  }
  Status call_host(Stream stream, HostFunction function, void* argument) override {
    return device_->call_host(stream, function, argument);
  }
  Result<Module> load_module(const ModuleImage& image) override { return device_->load_module(image); }
  Status unload_module(Module module) override { return device_->unload_module(module); }
  Result<Kernel> get_kernel(Module module, const char* name) override {
    return device_->get_kernel(module, name);
  }
  Status launch(Kernel kernel, Dimensions grid, Dimensions block, const void* const* arguments,
                const std::size_t* argument_bytes, std::size_t argument_count, Stream stream) override {
    return device_->launch(kernel, grid, block, arguments, argument_bytes, argument_count, stream);
  }

 private:
  // Set and called while one rank's operations are issued, by whichever thread issues them.
  Status enter(HostCall call) {
    if (call != fault_call_ || fault_countdown_ == 0 || --fault_countdown_ > 0) return {};
    return fault_;
  }

  const std::shared_ptr<HostBackend> device_;  // Shared with the other views.
  Capabilities capabilities_;
  HostCall fault_call_ = HostCall::kCopyAsync;
  std::uint64_t fault_countdown_ = 0;  // 0: no fault.
  Status fault_;
};

}  // namespace forebay::testing
