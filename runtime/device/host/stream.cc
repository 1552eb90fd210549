#include "runtime/device/host/stream.h"

#include <cstring>
#include <exception>
#include <utility>

#include "forebay/stream_copy.h"
#include "runtime/device/host/guarded_ranges.h"

namespace forebay {
namespace {

// Larger copies go past the caches: their next reader reads more than a core's cache
// holds.
constexpr std::size_t kStreamedBytes = 1 << 20;

thread_local HostStream* running_stream = nullptr;

template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace

HostStream* HostStream::running_here() noexcept {
  return running_stream;
}

HostStream::HostStream(HostClock& clock, const HostBackendOptions& options, const HostScript& script,
                       unsigned& callbacks)
    : clock_(clock), options_(options), script_(script), callbacks_(callbacks) {
  // Registered by its maker, so that virtual time cannot pass between here and the thread's first wait.
  worker_ = std::thread(&HostStream::work, this, HostClock::Registration(clock));
}

Status HostStream::queue(std::unique_lock<std::mutex>& lock, HostOperation operation) {
  // The operation that runs counts too: it takes a place until it is done.
  const auto has_room = [this] { return closed_ || queued_count_ - done_count_ < options_.queue_limit; };
  if (!has_room()) clock_.wait(lock, has_room);
  if (closed_) {
    return {StatusCode::kInvalidArgument, "cannot queue work on a stream of " + options_.name +
                                              ": it is being destroyed; queue before stream_destroy"};
  }
  operations_.push_back(std::move(operation));
  ++queued_count_;
  clock_.notify();
  return {};
}

Status HostStream::synchronize(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t goal = queued_count_;
  clock_.wait(lock, [this, goal] { return done_count_ >= goal; });
  return failure_;
}

void HostStream::finish() {
  {
    std::unique_lock lock(clock_.mutex());
    closed_ = true;
    clock_.notify();
    // Waits on the clock and not in join(): a registered thread that joins would hold virtual time back for
    // ever.
    clock_.wait(lock, [this] { return done_count_ == queued_count_; });
  }
  worker_.join();
}

void HostStream::work(HostClock::Registration registration) {
  registration.adopt();
  std::unique_lock lock(clock_.mutex());
  for (;;) {
    if (operations_.empty()) {
      if (closed_) break;
      clock_.wait(lock, [this] { return closed_ || !operations_.empty(); });
      continue;
    }
    HostOperation operation = std::move(operations_.front());
    operations_.pop_front();
    run(lock, std::move(operation));
    ++done_count_;
    clock_.notify();
  }
  lock.unlock();  // The registration takes the mutex when it ends.
}

void HostStream::run(std::unique_lock<std::mutex>& lock, HostOperation operation) {
  std::visit(Overloaded{[&](const HostCopy& copy) {
                          run_data(lock, [&] {
                            if (copy.bytes >= kStreamedBytes) {
                              stream_copy(copy.target, copy.source, copy.bytes);
                            } else {
                              std::memcpy(copy.target, copy.source, copy.bytes);
                            }
                            if (script_.copy_bytes_per_second > 0) {
                              clock_.sleep(HostClock::Nanoseconds(static_cast<std::int64_t>(
                                  static_cast<double>(copy.bytes) * 1e9 / script_.copy_bytes_per_second)));
                            }
                          });
                        },
                        [&](const HostFill& fill) {
                          run_data(lock, [&] { std::memset(fill.target, fill.value, fill.bytes); });
                        },
                        [&](const HostFunctionCall& queued) { call(lock, queued); },
                        [&](const HostLaunch& launch) {
                          run_data(lock, [&] {
                            lock.lock();
                            run_foreign(lock, launch.kernel->name.c_str(), [&] {
                              launch.kernel->function(launch.grid, launch.block, launch.arguments.data());
                            });
                            lock.unlock();
                            if (script_.kernel_duration)
                              clock_.sleep(script_.kernel_duration(launch.kernel->name.c_str()));
                          });
                        },
                        [&](const HostRecord& record) {
                          record.mark->reached = true;
                          record.mark->time = clock_.now_locked();
                          record.mark->failure = failure_;
                        },
                        [&](const HostWait& wait) {
                          HostMark* mark = wait.mark.get();
                          clock_.wait(lock, [mark] { return mark->reached; });
                          // The awaited work failed, so later work here has no valid input: it fails for the
                          // same reason.
                          fail_locked(mark->failure);
                        },
                        // After a failure too: host functions run even then.
                        [&](const HostAccess& access) {
                          fail_locked(count_access(access.address, access.access, access.change));
                        }},
             operation);
}

void HostStream::call(std::unique_lock<std::mutex>& lock, const HostFunctionCall& call) {
  const auto work = [&] { run_foreign(lock, "a host function", [&] { call.function(call.argument); }); };
  const unsigned limit = script_.callback_threads;
  if (limit != 0) {
    clock_.wait(lock, [this, limit] { return callbacks_ < limit; });
    ++callbacks_;
    lock.unlock();
    clock_.sleep(script_.callback_duration);
    lock.lock();
    if (script_.work_in_callbacks) work();
    --callbacks_;
    clock_.notify();
    if (script_.work_in_callbacks) return;
  }
  work();
}

// Copies, fills and launches after a failure would have invalid input, so they are skipped.
template <typename Function>
void HostStream::run_data(std::unique_lock<std::mutex>& lock, Function function) {
  if (!failure_.ok()) return;
  lock.unlock();
  function();
  lock.lock();
}

// Runs functions of users, without the lock. Host functions run even after a failure: they own their
// argument.
template <typename Function>
void HostStream::run_foreign(std::unique_lock<std::mutex>& lock, const char* what, Function function) {
  lock.unlock();
  Status status;
  const auto failed = [&](const std::string& found_and_try) {
    status = Status(StatusCode::kInternal, "cannot run " + std::string(what) + " on a stream of " +
                                               options_.name + ": " + found_and_try);
  };
  forbidden_call_ = nullptr;
  running_stream = this;
  try {
    function();
  } catch (const std::exception& error) {
    failed(std::string("it threw: ") + error.what() + "; catch within the function");
  } catch (...) {
    failed("it threw; catch within the function");
  }
  running_stream = nullptr;
  if (status.ok() && forbidden_call_ != nullptr) {
    failed(std::string("it called Backend::") + forbidden_call_ +
           "; queue that from the thread that queues the work");
  }
  lock.lock();
  fail_locked(status);
}

void HostStream::fail_locked(const Status& status) {
  if (failure_.ok()) failure_ = status;
}

}  // namespace forebay
