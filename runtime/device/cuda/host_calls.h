// CudaHostCalls: the host functions of a backend, in the order of CUDA streams.
//
// A driver may run the host functions of a context one after another, on one thread. So the function that the
// driver gets only signals. The work runs on a thread of ours, and its stream waits for a value in pinned
// memory that is written when the work is done. A function that takes long holds its own stream back, and no
// other.
//
// Where the driver has no cuStreamWaitValue32 (CUDA before 11.7) or refuses it, functions run on the driver's
// thread. Then a function that takes long may hold back the functions of other streams.
//
// Threads: every function may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "forebay/backend.h"
#include "runtime/device/cuda/driver.h"
#include "runtime/device/cuda/order_book.h"

namespace forebay {

class CudaHostCalls {
 public:
  explicit CudaHostCalls(const CudaDriver& driver) noexcept;
  ~CudaHostCalls();
  CudaHostCalls(const CudaHostCalls&) = delete;
  CudaHostCalls& operator=(const CudaHostCalls&) = delete;

  // The answer of the driver, and the call that gave it.
  struct Answer {
    cuda::CuResult result = cuda::CuResult::kSuccess;
    const char* call = "";
  };

  // Queues the function. `is_foreign`: the stream is not the backend's own.
  // Requires: a CudaScope; the stream is not being captured.
  Answer queue(cuda::CuStream stream, bool is_foreign, std::shared_ptr<CudaStreamState> state,
               HostFunction function, void* argument);
  // After a success: why functions run on the driver's thread from now on. kSuccess: nothing new.
  Answer take_refusal() noexcept;

  // Waits until the functions of the stream that have begun have returned. For streams that have failed: the
  // driver does not wait for them.
  void wait_for_begun(cuda::CuStream stream);
  // The stream is gone, and its work is done or lost.
  void forget(cuda::CuStream stream);

  // Whether a stream of others has had functions.
  bool has_foreign() const;
  // Waits for the functions that have begun. Returns the pinned pages, which are the caller's to free.
  // Functions that are still queued write no values any more.
  // Requires: no stream waits for a value.
  std::vector<void*> take_pages();

  // Whether the calling thread runs a host function. Then its stream fails, because it has called `function`.
  static bool note_forbidden_call(const char* function) noexcept;

 private:
  struct Line;
  struct Call;
  class Workers;

  Answer find_line(cuda::CuStream stream, bool is_foreign, std::shared_ptr<Line>* line);
  Answer add_page();
  static Workers& workers();
  static void signal(void* call);
  static void run(Call* call);

  const CudaDriver& driver_;
  std::atomic<bool> can_wait_;
  std::atomic<cuda::CuResult> refusal_{cuda::CuResult::kSuccess};

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<cuda::CuStream, std::shared_ptr<Line>> lines_;
  struct Word {
    std::uint32_t* host = nullptr;
    cuda::CuDevicePtr device = 0;
  };
  std::vector<Word> free_words_;
  std::vector<void*> pages_;
  bool has_foreign_ = false;
};

}  // namespace forebay
