// CudaScope: the calling thread as the driver's calls need it, for as long as the scope lasts. The context is
// current, and calls that a capture elsewhere in the process would refuse are let through. Both are put back
// as they were, so the settings of the application's thread do not change.
#pragma once

#include <atomic>

#include "forebay/log.h"
#include "runtime/device/cuda/driver.h"

namespace forebay {

class CudaScope {
 public:
  // `has_reported`: whether it has been said that putting back failed; it is said once for each such flag.
  CudaScope(const CudaDriver& driver, cuda::CuContext context, std::atomic<bool>& has_reported) noexcept
      : driver_(driver), has_reported_(has_reported) {
    if (failed(driver.cuCtxGetCurrent(&previous_), "cuCtxGetCurrent")) return;
    if (previous_ != context) {
      if (failed(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")) return;
      has_set_ = true;
    }
    if (failed(driver.cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode")) return;
    has_exchanged_ = true;
  }
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;
  ~CudaScope() {
    if (has_exchanged_)
      put_back(driver_.cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
    if (has_set_) put_back(driver_.cuCtxSetCurrent(previous_), "cuCtxSetCurrent");
  }

  // The result of entering, and the call that failed.
  cuda::CuResult result() const noexcept { return result_; }
  const char* call() const noexcept { return call_; }

 private:
  bool failed(cuda::CuResult result, const char* call) noexcept {
    result_ = result;
    call_ = call;
    return result != cuda::CuResult::kSuccess;
  }
  // The work itself is done by now, so the caller is told that it is.
  void put_back(cuda::CuResult result, const char* call) const noexcept {
    if (result == cuda::CuResult::kSuccess || result == cuda::CuResult::kDeinitialized) return;
    if (has_reported_.exchange(true, std::memory_order_relaxed)) return;
    log(LogLevel::kWarning, "cannot put back the calling thread's CUDA state: %s: %s; said once", call,
        cuda_error_name(driver_, result).c_str());
  }

  const CudaDriver& driver_;
  std::atomic<bool>& has_reported_;
  cuda::CuContext previous_ = nullptr;
  cuda::CuCaptureMode mode_ = cuda::CuCaptureMode::kRelaxed;
  cuda::CuResult result_ = cuda::CuResult::kSuccess;
  const char* call_ = "";
  bool has_set_ = false;
  bool has_exchanged_ = false;
};

}  // namespace forebay
