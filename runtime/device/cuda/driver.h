// CudaDriver: the CUDA driver library of this process, opened at run time, and the meaning of its answers.
// Nothing of ours links a CUDA library, so one binary serves machines with and without a GPU.
//
// The library is the one that FOREBAY_LIBCUDA names (a path), otherwise "libcuda.so.1". It is opened once and
// never closed: others in the process keep pointers into it.
//
// Threads: every function may be called from any thread. No lock is held while the library is opened, because
// opening takes the loader's lock and others may come here with that lock held.
#pragma once

#include <string>

#include "forebay/cuda_devices.h"
#include "forebay/status.h"
#include "runtime/device/cuda/abi.h"

namespace forebay {

struct CudaDriver {
#define FOREBAY_CUDA_MEMBER(name, symbol, version, parameters) cuda::symbol##_function* symbol = nullptr;
  FOREBAY_CUDA_CALLED(FOREBAY_CUDA_MEMBER)
  FOREBAY_CUDA_OPTIONAL(FOREBAY_CUDA_MEMBER)
#undef FOREBAY_CUDA_MEMBER

  std::string path;  // The file that was opened.

  // The process's driver, initialised (cuInit). After a failure the next call tries again.
  // Errors: kUnavailable (no library, no device that works, a child made by fork), kUnsupported (the library
  // lacks an entry point).
  static Result<const CudaDriver*> get();
};

// The Status of every call in a process in which cuda_lost_in_fork().
Status cuda_fork_status(const std::string& what);

// "CUDA_ERROR_OUT_OF_MEMORY". For a code newer than cuda/abi.h the driver is asked.
std::string cuda_error_name(const CudaDriver& driver, cuda::CuResult result);

// A failure as a Status: "cannot <what>: <call>: <the driver's error name>; <advice>".
// Requires: `result` is not kSuccess.
Status cuda_failure(const CudaDriver& driver, cuda::CuResult result, const char* call,
                    const std::string& what);

// True for errors after which the context answers nothing else: the work that was queued has failed, and only
// a new process helps.
bool is_context_lost(cuda::CuResult result) noexcept;

}  // namespace forebay
