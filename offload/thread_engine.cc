// The engine of threads that read and write and wait for it.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "forebay/units.h"
#include "offload/io_engine.h"

namespace forebay::internal {
namespace {

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(std::vector<int> files, unsigned depth, unsigned thread_count) : files_(std::move(files)) {
    results_.reserve(depth);
    requests_.reserve(depth);
    threads_.reserve(thread_count);
    try {
      for (unsigned i = 0; i < thread_count; ++i) {
        threads_.emplace_back([this] { work(); });
        ::pthread_setname_np(threads_.back().native_handle(), "forebay-file");
      }
    } catch (...) {
      end();
      throw;
    }
  }

  ~ThreadEngine() override { end(); }

  int submit(const IoRequest& request) override {
    {
      const std::lock_guard lock(mutex_);
      requests_.push_back(request);
    }
    asked_.notify_one();
    return 0;
  }

  std::size_t reap(std::span<IoResult> results, std::chrono::nanoseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (timeout.count() > 0) done_.wait_for(lock, timeout, [this] { return !results_.empty(); });
    const std::size_t count = std::min(results.size(), results_.size());
    std::copy_n(results_.begin(), count, results.begin());
    results_.erase(results_.begin(), results_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

  std::uint64_t register_memory(std::byte*, std::size_t) override { return 0; }

  std::string description() const override { return format_count(threads_.size(), "thread"); }

 private:
  void end() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    asked_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      asked_.wait(lock, [this] { return ending_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const IoRequest request = requests_.front();
      requests_.erase(requests_.begin());
      lock.unlock();
      const int file = files_[request.file];
      const auto offset = static_cast<off_t>(request.offset);
      const ssize_t moved = request.write ? ::pwrite(file, request.memory, request.bytes, offset)
                                          : ::pread(file, request.memory, request.bytes, offset);
      const auto result = static_cast<std::int32_t>(moved < 0 ? -errno : moved);
      lock.lock();
      results_.push_back({request.tag, result});
      done_.notify_one();
    }
  }

  const std::vector<int> files_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable asked_;
  std::condition_variable done_;
  // Guarded by mutex_. Neither holds more than the store's depth, for which both have memory.
  std::vector<IoRequest> requests_;
  std::vector<IoResult> results_;
  bool ending_ = false;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(std::vector<int> files, unsigned depth, unsigned thread_count) {
  return std::make_unique<ThreadEngine>(std::move(files), depth, std::min(depth, thread_count));
}

}  // namespace forebay::internal
