#include "tests/fakes/cuda/scheduler.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

// Threads that may run operations at once. A host function may block until another stream's has run, so this
// bounds how many such can wait for each other; streams beyond it wait their turn.
constexpr std::size_t kExecutorLimit = 256;

// Between two looks at the values that streams wait for: short against a step in a test, long against a look.
constexpr std::chrono::microseconds kPollPeriod{30};

// How long a seed may hold one operation back: long against a copy in a test, short against the test.
constexpr std::chrono::microseconds kLongestHold{400};

}  // namespace

void Scheduler::configure(const FakeOptions& options) {
  if (process_ != ::getpid()) {
    // A child has none of its parent's executors, who may have been waiting here: these stay as they are,
    // unused.
    static_cast<void>(work_.release());
    static_cast<void>(progress_.release());
    work_ = std::make_unique<std::condition_variable>();
    progress_ = std::make_unique<std::condition_variable>();
    threads_ = 0;
    process_ = ::getpid();
  }
  latency_ns_ = options.latency_ns;
  bytes_per_second_ = options.bytes_per_second;
  seeded_ = options.seed != 0;
  callback_threads_ = options.callback_threads;
  queue_limit_ = options.queue_limit;
  hardware_queues_ = options.hardware_queues;
  random_.seed(options.seed);
}

MarkPtr Scheduler::queue(const StreamPtr& stream, Operation operation) {
  MarkPtr mark = operation.mark;
  stream->last = mark;
  operation.serial = ++queued_;
  stream->queue.push_back(std::move(operation));
  ++pending_;
  if (stream->queue.size() == 1) {
    busy_.insert(stream);
    hold(*stream);
    wake();
  }
  return mark;
}

void Scheduler::wait(Lock& lock, const MarkPtr& mark) {
  if (mark == nullptr || mark->done) return;
  release_held();
  mark->is_awaited = true;
  progress_->wait(lock, [&] { return mark->done; });
}

void Scheduler::wait_running(Lock& lock,
                             const std::function<bool(const Stream&, const Operation&)>& matches) {
  ++waiting_for_any_;
  progress_->wait(lock, [&] {
    return std::none_of(busy_.begin(), busy_.end(), [&](const StreamPtr& stream) {
      return stream->running && matches(*stream, stream->queue.front());
    });
  });
  --waiting_for_any_;
}

void Scheduler::release_held() {
  if (!seeded_) return;
  for (const StreamPtr& stream : busy_) stream->held = false;
  wake();
}

// One more executor hears of it, or is made, if there is something for it. It wakes the next in its turn.
void Scheduler::wake() {
  if (busy_.size() == running_) return;
  if (std::none_of(busy_.begin(), busy_.end(), [&](const StreamPtr& stream) { return may_begin(*stream); }))
    return;
  if (threads_ > running_) {
    work_->notify_one();
  } else if (threads_ < kExecutorLimit) {
    ++threads_;
    // Detached: the library is never unloaded, and at exit a stuck host function must not hold the process.
    std::thread(&Scheduler::execute, this).detach();
  }
}

void Scheduler::hold(Stream& stream) {
  stream.held = false;
  if (!seeded_) return;
  const std::uint64_t draw = random_();
  if (draw % 2 == 0) return;
  stream.held = true;
  stream.held_until_finished = finished_ + 1 + (draw >> 8) % 4;
  stream.held_until = Clock::now() + std::chrono::microseconds((draw >> 16) % kLongestHold.count());
}

void Scheduler::wait_for_room(Lock& lock, const Context& context) {
  if (queue_limit_ == 0) return;
  ++waiting_for_any_;
  progress_->wait(lock, [&] {
    return std::none_of(busy_.begin(), busy_.end(), [&](const StreamPtr& stream) {
      return stream->context.get() == &context && stream->queue.size() > queue_limit_;
    });
  });
  --waiting_for_any_;
}

bool Scheduler::is_blocked(const Stream& stream) const {
  const Operation& first = stream.queue.front();
  unsigned callbacks = 0;
  for (const StreamPtr& other : busy_) {
    if (other.get() == &stream || other->context != stream.context) continue;
    const Operation& front = other->queue.front();
    const bool holds = front.is_host_function || front.ready != nullptr;
    if (other->running && front.is_host_function) ++callbacks;
    if (!hardware_queues_ || other->connection != stream.connection) continue;
    // The first operation of the other stream that has not started.
    const Operation* waiting = &front;
    if (other->running && !holds) waiting = other->queue.size() > 1 ? &other->queue[1] : nullptr;
    if (waiting != nullptr && waiting->serial < first.serial) return true;
  }
  return first.is_host_function && callback_threads_ != 0 && callbacks >= callback_threads_;
}

bool Scheduler::may_begin(const Stream& stream) const {
  if (stream.running) return false;
  const std::vector<MarkPtr>& after = stream.queue.front().after;
  return std::all_of(after.begin(), after.end(), [](const MarkPtr& mark) { return mark->done; }) &&
         !is_blocked(stream);
}

StreamPtr Scheduler::choose(Clock::time_point* until, bool* must_poll) {
  std::vector<StreamPtr> ready;
  *until = Clock::time_point::max();
  *must_poll = false;
  const Clock::time_point now = seeded_ ? Clock::now() : Clock::time_point{};
  for (const StreamPtr& stream : busy_) {
    if (!may_begin(*stream)) continue;
    // Work behind a failure is skipped, so it waits for nothing.
    const std::function<bool()>& is_ready = stream->queue.front().ready;
    if (is_ready && stream_failure(*stream) == CuResult::kSuccess && !is_ready()) {
      *must_poll = true;
      continue;
    }
    if (stream->held && finished_ < stream->held_until_finished && now < stream->held_until) {
      *until = std::min(*until, stream->held_until);
      continue;
    }
    ready.push_back(stream);
  }
  if (ready.empty()) return nullptr;
  // By age, so that without a seed the order does not depend on that of the set.
  std::sort(ready.begin(), ready.end(), [](const StreamPtr& a, const StreamPtr& b) { return a->id < b->id; });
  return ready[seeded_ ? random_() % ready.size() : 0];
}

void Scheduler::execute() {
  begin_executor_thread();
  Lock lock(mutex_);
  while (true) {
    Clock::time_point until;
    bool must_poll = false;
    if (const StreamPtr stream = choose(&until, &must_poll); stream != nullptr) {
      run_one(lock, stream);
      continue;
    }
    const bool polls = must_poll && !polled_;
    if (polls) {
      polled_ = true;
      until = std::min(until, Clock::now() + kPollPeriod);
    }
    if (until == Clock::time_point::max()) {
      work_->wait(lock);
    } else {
      work_->wait_until(lock, until);
    }
    if (polls) polled_ = false;
  }
}

void Scheduler::run_one(Lock& lock, const StreamPtr& stream) {
  stream->running = true;
  ++running_;
  wake();  // Others may be ready as well.
  Operation& operation =
      stream->queue.front();  // Stays: a deque moves nothing when others are queued behind it.
  std::uint64_t delay_ns = operation.run ? latency_ns_ : 0;
  if (bytes_per_second_ != 0) {
    delay_ns += static_cast<std::uint64_t>(1e9 * static_cast<double>(operation.bytes) /
                                           static_cast<double>(bytes_per_second_));
  }
  if (delay_ns != 0) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::nanoseconds(delay_ns));
    lock.lock();
  }
  CuResult failure = stream_failure(*stream);
  if (failure != CuResult::kSuccess) {
    if (operation.skip) operation.skip();
  } else if (operation.run) {
    const CuResult result = operation.run(lock);
    if (result != CuResult::kSuccess) fail_stream(*stream, result);
    failure = stream_failure(*stream);
  }
  operation.mark->failure = failure;
  operation.mark->time = Clock::now();
  operation.mark->done = true;
  const bool is_awaited = operation.mark->is_awaited || waiting_for_any_ > 0;
  stream->queue.pop_front();
  stream->running = false;
  --running_;
  --pending_;
  ++finished_;
  if (stream->queue.empty()) {
    busy_.erase(stream);
  } else {
    hold(*stream);
  }
  if (is_awaited) progress_->notify_all();
}

}  // namespace forebay::fake_cuda
