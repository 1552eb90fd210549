#include "forebay/block_runner.h"

#include <sched.h>
#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include "forebay/log.h"
#include "kernels/float_environment.h"

namespace forebay {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif
#else
constexpr bool kThreadSanitizer = false;
#endif

int threads_to_use(int requested) {
  if (kThreadSanitizer) return 1;
  if (requested == 1) return 1;
  const int available = tbb::this_task_arena::max_concurrency();
  const int wanted = requested > 0 ? requested : std::max(available, 1);
  // An OpenMP runtime in the process that obeys OMP_PROC_BIND ties the main thread to one processor as it is
  // loaded, and TBB, which counts the processors of that thread, then runs everything serially without a
  // word.
  const char* bind = std::getenv("OMP_PROC_BIND");
  if (available == 1 && bind != nullptr && std::string_view(bind) != "false") {
    log(LogLevel::kWarning,
        "host kernels: OMP_PROC_BIND=%s leaves TBB one processor, so kernels run on one thread; unset "
        "OMP_PROC_BIND",
        bind);
  }
  return wanted;
}

// Keeps the threads of an arena to a set of processors while they are in it. A thread that the system will
// not move works where it is: slower, and with the same result.
class Placement : public tbb::task_scheduler_observer {
 public:
  Placement(tbb::task_arena& arena, const cpu_set_t& processors)
      : tbb::task_scheduler_observer(arena), processors_(processors) {
    observe(true);
  }
  // A worker that is still on its way out would not be told, and keep our processors. It leaves within a
  // millisecond of its last block; one that a process at its end has stopped never does.
  ~Placement() override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kLeaveDeadlineMs);
    while (inside_.load() != 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    observe(false);
  }

  void on_scheduler_entry(bool) override {
    inside_.fetch_add(1);
    saved_here = sched_getaffinity(0, sizeof saved, &saved) == 0;
    if (saved_here) sched_setaffinity(0, sizeof processors_, &processors_);
  }
  void on_scheduler_exit(bool) override {
    if (saved_here) sched_setaffinity(0, sizeof saved, &saved);
    saved_here = false;
    inside_.fetch_sub(1);
  }

 private:
  // Shorter, and a busy machine's worker may keep our processors; longer, and a process ends later.
  static constexpr int kLeaveDeadlineMs = 200;

  // The thread's earlier processors. Blocks start no other blocks, so a thread is in one of our arenas at a
  // time.
  static thread_local cpu_set_t saved;
  static thread_local bool saved_here;
  cpu_set_t processors_;
  std::atomic<int> inside_{0};
};

thread_local cpu_set_t Placement::saved;
thread_local bool Placement::saved_here = false;

}  // namespace

struct BlockRunner::Arena {
  explicit Arena(int thread_count) : arena(thread_count) {}
  Arena(int thread_count, const cpu_set_t& processors) : arena(thread_count) {
    arena.initialize();
    placement = std::make_unique<Placement>(arena, processors);
  }

  tbb::task_arena arena;
  std::unique_ptr<Placement> placement;  // Null: anywhere.
};

BlockRunner::BlockRunner(int thread_count) : thread_count_(threads_to_use(thread_count)) {
  if (thread_count_ > 1) arena_ = std::make_unique<Arena>(thread_count_);
}

BlockRunner::BlockRunner(std::unique_ptr<Arena> arena)
    : arena_(std::move(arena)), thread_count_(arena_->arena.max_concurrency()) {}

BlockRunner::~BlockRunner() = default;

Result<std::unique_ptr<BlockRunner>> BlockRunner::create_on(Span<const int> processors, int thread_count) {
  const auto invalid = [](const std::string& found) {
    return Status(StatusCode::kInvalidArgument, "kernels on given processors: " + found);
  };
  if (processors.empty()) return invalid("none is named; pass at least one");
  cpu_set_t allowed, wanted;
  CPU_ZERO(&wanted);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
    return Status(StatusCode::kUnsupported,
                  "kernels on given processors: the system does not say which processors there are; use a "
                  "number of threads instead");
  }
  for (const int processor : processors) {
    if (processor < 0 || processor >= CPU_SETSIZE || !CPU_ISSET(processor, &allowed)) {
      return invalid("processor " + std::to_string(processor) +
                     " is none that this process may use; see 'taskset -p', and name others");
    }
    if (CPU_ISSET(processor, &wanted)) {
      return invalid("processor " + std::to_string(processor) + " is named twice; name it once");
    }
    CPU_SET(processor, &wanted);
  }
  if (kThreadSanitizer) return std::make_unique<BlockRunner>(1);
  auto arena =
      std::make_unique<Arena>(thread_count > 0 ? thread_count : static_cast<int>(processors.size()), wanted);
  return std::unique_ptr<BlockRunner>(new BlockRunner(std::move(arena)));
}

void BlockRunner::run(std::size_t count, std::size_t block,
                      void (*function)(const void* context, std::size_t begin, std::size_t end),
                      const void* context) const {
  const auto run_block = [=](std::size_t index) {
    const DefaultFloatEnvironment environment;
    function(context, index * block, std::min(count, (index + 1) * block));
  };
  const std::size_t block_count = (count + block - 1) / block;
  if (arena_ == nullptr || (block_count <= 1 && arena_->placement == nullptr)) {
    for (std::size_t index = 0; index < block_count; ++index) run_block(index);
    return;
  }
  arena_->arena.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<std::size_t>(0, block_count),
        [&](const tbb::blocked_range<std::size_t>& range) {
          for (std::size_t index = range.begin(); index < range.end(); ++index) run_block(index);
        },
        tbb::simple_partitioner());
  });
}

}  // namespace forebay
