// DeviceView: one of several Backends over one device, as the cuda backends of ranks that share a GPU are:
// they take each other's events and addresses, and the host must not touch their memory. The device is a
// HostBackend, which does not stop who touches it all the same; the fake CUDA driver does.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "forebay/host_backend.h"
#include "runtime/device/fault_script.h"
#include "runtime/device/forwarding_backend.h"

namespace forebay::testing {

class DeviceView final : public ForwardingBackend {
 public:
  DeviceView(std::shared_ptr<HostBackend> device, const std::string& name)
      : ForwardingBackend(*device), device_(std::move(device)), capabilities_(device_->capabilities()) {
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
  Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kCopyAsync));
    return ForwardingBackend::copy_async(target, source, bytes, stream);
  }
  Result<Event> event_create() override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kEventCreate));
    return ForwardingBackend::event_create();
  }
  Status event_record(Event event, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kEventRecord));
    return ForwardingBackend::event_record(event, stream);
  }
  Status stream_wait(Stream stream, Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kStreamWait));
    return ForwardingBackend::stream_wait(stream, event);
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
