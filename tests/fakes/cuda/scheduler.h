// Streams and the threads that serve them.
//
// A stream is a queue and no thread: a few executor threads take the first operation of any stream whose
// operation is ready, so a stream that waits for another holds no thread. Operations are ordered by marks
// alone: each has one, which is done when the operation is, and an operation is ready when all marks it comes
// after are done.
//
// Threads: everything here is guarded by the driver's mutex (driver.h).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "tests/fakes/cuda/abi.h"
#include "tests/fakes/cuda/fake_cuda.h"

namespace forebay::fake_cuda {

using namespace forebay::cuda;  // NOLINT: this library is an implementation of that interface.

using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

struct Mark {
  bool done = false;
  bool is_awaited = false;                // By a host.
  CuResult failure = CuResult::kSuccess;  // The stream's failure up to here.
  Clock::time_point time;                 // When it was done.
};
using MarkPtr = std::shared_ptr<Mark>;

// Device addresses from `begin` to before `end`.
struct Range {
  std::uintptr_t begin;
  std::uintptr_t end;
};

struct Operation {
  const char* what = "";     // The entry point that queued it.
  std::uint64_t serial = 0;  // Ascends in the order of queueing, over all streams.
  std::vector<MarkPtr> after;
  std::vector<Range> touches;
  std::size_t bytes = 0;  // The bytes of a copy or fill, for the bandwidth.
  // Called with the lock held, which it gives up while it moves bytes or runs foreign code. May be empty. It
  // may be called again: a graph is launched more than once.
  std::function<CuResult(Lock&)> run;
  // Called with the lock held; the operation runs once it is true. Empty: at once.
  std::function<bool()> ready;
  bool is_host_function = false;
  // Called with the lock held when the operation is skipped because its stream has failed. May be empty.
  std::function<void()> skip;
  MarkPtr mark = std::make_shared<Mark>();
};

struct Context;
struct Capture;

struct Stream {
  CuStream handle = nullptr;
  std::shared_ptr<Context> context;
  unsigned flags = 0;
  int priority = 0;
  std::uint64_t id = 0;
  bool legacy = false;      // The context's legacy default stream.
  bool is_default = false;  // That one or a per-thread one.
  unsigned connection = 0;  // Its hardware queue.

  std::deque<Operation> queue;
  bool running = false;  // An executor runs the first of the queue.
  MarkPtr last;          // The mark of the last queued operation; null before any.
  CuResult failure = CuResult::kSuccess;
  std::shared_ptr<Capture> capture;
  // With a seed: the first of the queue is held back until then, or until so many operations have finished.
  bool held = false;
  Clock::time_point held_until;
  std::uint64_t held_until_finished = 0;
};
using StreamPtr = std::shared_ptr<Stream>;

class Scheduler {
 public:
  explicit Scheduler(std::mutex& mutex) : mutex_(mutex) {}

  // Sets the seed, the latency and the bandwidth. Called before any work, once after each reset.
  void configure(const FakeOptions& options);

  // Queues the operation and returns its mark.
  MarkPtr queue(const StreamPtr& stream, Operation operation);
  // Waits until the mark is done. Null counts as done.
  void wait(Lock& lock, const MarkPtr& mark);
  // Waits until the operation that an executor runs now on a stream that fulfils `matches` is over.
  void wait_running(Lock& lock, const std::function<bool(const Stream&, const Operation&)>& matches);
  // The host waits: operations that the seed holds back may go.
  void release_held();

  // All streams with work; includes streams without a handle.
  const std::unordered_set<StreamPtr>& busy() const { return busy_; }
  std::uint64_t pending_count() const { return pending_; }
  // The serial of the operation that is queued next.
  std::uint64_t next_serial() const { return queued_ + 1; }
  // Waits while a stream of the context has more pending operations than the options allow.
  void wait_for_room(Lock& lock, const Context& context);

 private:
  void execute();
  // The stream to serve next, or null; `until` is then when a held one may go.
  // Sets `must_poll` when an operation waits for a value that the host writes.
  StreamPtr choose(Clock::time_point* until, bool* must_poll);
  // Whether a hardware queue or the callback threads hold the first operation of the stream back.
  bool is_blocked(const Stream& stream) const;
  // Whether nothing that an executor does not see itself holds the first operation of a busy stream back.
  bool may_begin(const Stream& stream) const;
  void run_one(Lock& lock, const StreamPtr& stream);
  void hold(Stream& stream);
  void wake();

  std::mutex& mutex_;
  std::unique_ptr<std::condition_variable> work_;      // For executors.
  std::unique_ptr<std::condition_variable> progress_;  // For waiting hosts.
  long process_ = 0;                                   // The process that started the threads.
  std::unordered_set<StreamPtr> busy_;
  std::uint64_t pending_ = 0;
  std::uint64_t queued_ = 0;
  std::uint64_t finished_ = 0;
  std::size_t threads_ = 0;
  std::size_t running_ = 0;       // Threads, and streams, that run an operation.
  unsigned waiting_for_any_ = 0;  // Hosts that look whenever an operation has finished.
  std::uint64_t latency_ns_ = 0;
  std::uint64_t bytes_per_second_ = 0;
  bool seeded_ = false;
  unsigned callback_threads_ = 0;
  std::size_t queue_limit_ = 0;
  bool hardware_queues_ = false;
  bool polled_ = false;  // An executor looks from time to time whether operations have become ready.
  std::mt19937_64 random_;
};

}  // namespace forebay::fake_cuda
