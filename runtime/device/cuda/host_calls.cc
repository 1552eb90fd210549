#include "runtime/device/cuda/host_calls.h"

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <cstring>
#include <string>
#include <utility>

namespace forebay {
namespace {

using cuda::CuResult;

// A page has a word for each of 64 streams. Closer together: streams would write to one another's cache
// lines.
constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kWordBytes = 64;

}  // namespace

// The functions of one stream.
struct CudaHostCalls::Line {
  ~Line();

  cuda::CuDevicePtr address = 0;  // The device address of the word.

  // Held over the two driver calls of a function, so that functions keep the order of their numbers. The
  // driver may block meanwhile.
  std::mutex order;
  std::uint64_t issued = 0;  // Guarded by `order`: the number of the last function.

  std::mutex mutex;
  std::condition_variable returned;
  // Guarded by `mutex`.
  std::uint32_t* word = nullptr;  // Null: nobody waits for it any more.
  std::uint64_t begun = 0;        // The highest number given to a worker,
  std::uint64_t done = 0;         // and of a function that has returned.
  std::uint64_t here = 0;         // This function runs on the driver's thread: its stream does not wait.
};

// A host function on its way through a stream.
struct CudaHostCalls::Call {
  HostFunction function;
  void* argument;
  std::shared_ptr<CudaStreamState> state;
  std::uint64_t state_number;
  std::shared_ptr<Line> line;       // Null: it runs on the driver's thread.
  std::uint64_t number = 0;         // In its line.
  const char* forbidden = nullptr;  // The first function of a Backend that it called.
  Call* previous = nullptr;         // Links of PendingCalls; `next` is one of the workers' queue later.
  Call* next = nullptr;
};

// The threads that run functions: as many as there are lines. A line has one function at a time, so none ever
// waits for a thread. Idle threads beyond that number end.
class CudaHostCalls::Workers {
 public:
  // One more line. False when there is no thread to be had.
  bool add_line() {
    const std::lock_guard lock(mutex_);
    if (threads_ == lines_ && !start_thread()) return false;
    ++lines_;
    return true;
  }
  void remove_line() {
    const std::lock_guard lock(mutex_);
    --lines_;
    work_.notify_all();
  }
  void hand(Call* call) {
    const std::lock_guard lock(mutex_);
    call->next = nullptr;
    (last_ == nullptr ? first_ : last_->next) = call;
    last_ = call;
    work_.notify_one();
  }

 private:
  bool start_thread() {
    // The program's signals are for its own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const auto entry = [](void* workers) -> void* {
      static_cast<Workers*>(workers)->work();
      return nullptr;
    };
    const bool started = pthread_create(&thread, nullptr, entry, this) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!started) return false;
    pthread_detach(thread);
    ++threads_;
    return true;
  }
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return first_ != nullptr || threads_ > lines_; });
      if (first_ == nullptr) break;
      Call* const call = first_;
      first_ = call->next;
      if (first_ == nullptr) last_ = nullptr;
      lock.unlock();
      run(call);
      lock.lock();
    }
    --threads_;
  }

  std::mutex mutex_;
  std::condition_variable work_;
  // Guarded by mutex_.
  std::size_t lines_ = 0;
  std::size_t threads_ = 0;
  Call* first_ = nullptr;
  Call* last_ = nullptr;
};

namespace {

// The calls that the driver has and has not made yet. After a context is lost it may make them or not, and
// nobody can tell when it will not: they stay here, which is the process's memory and no leak.
template <typename Call>
class PendingCalls {
 public:
  void add(Call* call) {
    const std::lock_guard lock(mutex_);
    call->next = first_;
    if (first_ != nullptr) first_->previous = call;
    first_ = call;
  }
  void remove(Call* call) {
    const std::lock_guard lock(mutex_);
    (call->previous == nullptr ? first_ : call->previous->next) = call->next;
    if (call->next != nullptr) call->next->previous = call->previous;
  }

 private:
  std::mutex mutex_;
  Call* first_ = nullptr;  // Guarded by mutex_.
};
template <typename Call>
PendingCalls<Call>& pending() {
  static constinit PendingCalls<Call> calls;
  return calls;
}

// Where the running function notes a forbidden call; null: this thread runs none. Initial-exec: the core may
// run inside an allocation call, where lazily made thread storage would allocate.
__attribute__((tls_model("initial-exec"))) constinit thread_local const char** running_forbidden = nullptr;

}  // namespace

// Never destroyed: functions may run while the process ends.
CudaHostCalls::Workers& CudaHostCalls::workers() {
  static Workers* const all = new Workers;
  return *all;
}

CudaHostCalls::Line::~Line() {
  // A child made by fork has none of the threads, and perhaps a locked mutex.
  if (!cuda_lost_in_fork()) workers().remove_line();
}

CudaHostCalls::CudaHostCalls(const CudaDriver& driver) noexcept
    : driver_(driver), can_wait_(driver.cuStreamWaitValue32_v2 != nullptr) {}

CudaHostCalls::~CudaHostCalls() = default;

CudaHostCalls::Answer CudaHostCalls::queue(cuda::CuStream stream, bool is_foreign,
                                           std::shared_ptr<CudaStreamState> state, HostFunction function,
                                           void* argument) {
  std::shared_ptr<Line> line;
  if (can_wait_) {
    const Answer answer = find_line(stream, is_foreign, &line);
    if (answer.result != CuResult::kSuccess) return answer;
  }
  const std::uint64_t state_number = state->next_call();
  auto call = std::unique_ptr<Call>(new Call{.function = function,
                                             .argument = argument,
                                             .state = std::move(state),
                                             .state_number = state_number,
                                             .line = line});
  std::unique_lock<std::mutex> order;
  if (line != nullptr) {
    order = std::unique_lock(line->order);
    call->number = ++line->issued;
  }
  const std::uint64_t number = call->number;
  pending<Call>().add(call.get());
  const CuResult launched = driver_.cuLaunchHostFunc(stream, &signal, call.get());
  if (launched != CuResult::kSuccess) {
    pending<Call>().remove(call.get());
    if (line != nullptr) --line->issued;
    return {launched, "cuLaunchHostFunc"};
  }
  static_cast<void>(call.release());  // run() owns it now.
  if (line == nullptr) return {};
  const CuResult waits = driver_.cuStreamWaitValue32_v2(
      stream, line->address, static_cast<std::uint32_t>(number), cuda::kWaitValueGeq);
  if (waits == CuResult::kSuccess) return {};

  // The stream does not wait, so the function has to run on the driver's thread; if it has begun, the caller
  // waits in place of the stream.
  can_wait_ = false;
  refusal_ = waits;
  std::unique_lock lock(line->mutex);
  if (line->begun < number) {
    line->here = number;
  } else {
    line->returned.wait(lock, [&] { return line->done >= number; });
  }
  return {};
}

CudaHostCalls::Answer CudaHostCalls::take_refusal() noexcept {
  return {refusal_.exchange(CuResult::kSuccess), "cuStreamWaitValue32"};
}

// Called by the driver.
void CudaHostCalls::signal(void* argument) {
  auto* const call = static_cast<Call*>(argument);
  pending<Call>().remove(call);
  bool is_here = call->line == nullptr;
  if (!is_here) {
    Line& line = *call->line;
    const std::lock_guard lock(line.mutex);
    is_here = line.here == call->number;
    if (!is_here) line.begun = call->number;
  }
  if (is_here) {
    run(call);
  } else {
    workers().hand(call);
  }
}

void CudaHostCalls::run(Call* argument) {
  const std::unique_ptr<Call> call(argument);
  running_forbidden = &call->forbidden;
  call->function(call->argument);
  running_forbidden = nullptr;
  if (call->forbidden != nullptr) {
    call->state->fail(
        call->state_number,
        Status(StatusCode::kInternal, "cannot run a host function on a CUDA stream: it called Backend::" +
                                          std::string(call->forbidden) +
                                          "; queue that from the thread that queues the work"));
  }
  if (call->line == nullptr) return;
  Line& line = *call->line;
  const std::lock_guard lock(line.mutex);
  if (line.done < call->number) line.done = call->number;
  // The stream goes on. All that the function has written is seen before this.
  if (line.word != nullptr)
    __atomic_store_n(line.word, static_cast<std::uint32_t>(line.done), __ATOMIC_RELEASE);
  line.returned.notify_all();
}

bool CudaHostCalls::note_forbidden_call(const char* function) noexcept {
  if (running_forbidden == nullptr) [[likely]]
    return false;
  if (*running_forbidden == nullptr) *running_forbidden = function;
  return true;
}

CudaHostCalls::Answer CudaHostCalls::find_line(cuda::CuStream stream, bool is_foreign,
                                               std::shared_ptr<Line>* line) {
  const std::lock_guard lock(mutex_);
  has_foreign_ = has_foreign_ || is_foreign;
  const auto found = lines_.find(stream);
  if (found != lines_.end()) {
    *line = found->second;
    return {};
  }
  if (free_words_.empty()) {
    const Answer answer = add_page();
    if (answer.result != CuResult::kSuccess) return answer;
  }
  if (!workers().add_line()) return {CuResult::kOperatingSystem, "pthread_create"};
  auto made = std::make_shared<Line>();
  made->word = free_words_.back().host;
  made->address = free_words_.back().device;
  free_words_.pop_back();
  // It may have served a stream that is gone.
  made->issued = made->begun = made->done = *made->word;
  *line = made;
  lines_.emplace(stream, std::move(made));
  return {};
}

// Requires: mutex_ is held, a CudaScope.
CudaHostCalls::Answer CudaHostCalls::add_page() {
  void* page = nullptr;
  CuResult result =
      driver_.cuMemHostAlloc(&page, kPageBytes, cuda::kHostAllocPortable | cuda::kHostAllocDeviceMap);
  if (result != CuResult::kSuccess) return {result, "cuMemHostAlloc"};
  cuda::CuDevicePtr address = 0;
  result = driver_.cuMemHostGetDevicePointer_v2(&address, page, 0);
  if (result != CuResult::kSuccess) {
    static_cast<void>(driver_.cuMemFreeHost(page));
    return {result, "cuMemHostGetDevicePointer"};
  }
  std::memset(page, 0, kPageBytes);
  pages_.push_back(page);
  for (std::size_t offset = 0; offset < kPageBytes; offset += kWordBytes) {
    free_words_.push_back(
        {reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(page) + offset), address + offset});
  }
  return {};
}

void CudaHostCalls::wait_for_begun(cuda::CuStream stream) {
  std::shared_ptr<Line> line;
  {
    const std::lock_guard lock(mutex_);
    const auto found = lines_.find(stream);
    if (found == lines_.end()) return;
    line = found->second;
  }
  std::unique_lock lock(line->mutex);
  line->returned.wait(lock, [&] { return line->done >= line->begun; });
}

void CudaHostCalls::forget(cuda::CuStream stream) {
  wait_for_begun(stream);
  const std::lock_guard lock(mutex_);
  const auto found = lines_.find(stream);
  if (found == lines_.end()) return;
  const std::shared_ptr<Line> line = std::move(found->second);
  lines_.erase(found);
  const std::lock_guard order(line->order);
  const std::lock_guard line_lock(line->mutex);
  // A function that the driver lost may still come, so its word serves no other stream.
  if (line->done == line->issued) free_words_.push_back({line->word, line->address});
  line->word = nullptr;
}

bool CudaHostCalls::has_foreign() const {
  const std::lock_guard lock(mutex_);
  return has_foreign_;
}

std::vector<void*> CudaHostCalls::take_pages() {
  const std::lock_guard lock(mutex_);
  for (const auto& [stream, line] : lines_) {
    std::unique_lock line_lock(line->mutex);
    line->returned.wait(line_lock, [&, &waited = *line] { return waited.done >= waited.begun; });
    line->word = nullptr;
  }
  return std::exchange(pages_, {});
}

}  // namespace forebay
