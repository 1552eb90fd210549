#include "host_module.h"

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "float_environment.h"
#include "forebay/log.h"

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

// Elements of one block. Large enough that handing it out (about a microsecond) is nothing beside its 20 us
// or more; small enough that a million-element unit still occupies 16 threads.
constexpr std::size_t kBlockCount = 65536;

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

// Runs one element-wise kernel: `Member` is its entry in RangeKernels.
template <typename Arguments,
          void (*host_kernels::RangeKernels::*Member)(const Arguments&, std::size_t, std::size_t)>
void run_elements(const Dimensions&, const Dimensions&, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<Arguments>*>(arguments[0]);
  launch.context->runner.run(
      launch.arguments.count, kBlockCount,
      [](const void* context, std::size_t begin, std::size_t end) {
        const auto& l = *static_cast<const HostLaunch<Arguments>*>(context);
        (l.context->kernels.*Member)(l.arguments, begin, end);
      },
      &launch);
}

void run_fill(const Dimensions&, const Dimensions&, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<FillArguments>*>(arguments[0]);
  launch.context->runner.run(
      launch.arguments.count, kBlockCount,
      [](const void* context, std::size_t begin, std::size_t end) {
        const FillArguments& a = static_cast<const HostLaunch<FillArguments>*>(context)->arguments;
        host_kernels::with_type(a.type, [&]<DataType type>() {
          auto* target = static_cast<typename definitions::Element<type>::Storage*>(a.target);
          std::fill(target + begin, target + end, definitions::Element<type>::round(a.value));
        });
      },
      &launch);
}

// The decision is small and serial: one double per rank and unit.
void run_step_control(const Dimensions&, const Dimensions&, void* const* arguments) {
  const StepControlArguments& a =
      static_cast<const HostLaunch<StepControlArguments>*>(arguments[0])->arguments;
  const DefaultFloatEnvironment environment;
  const auto ranks = static_cast<std::size_t>(a.rank_count);
  for (std::size_t unit = 0; unit < a.unit_count; ++unit) {
    double* slices = a.scratch + unit * ranks;
    bool used = false;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      slices[rank] = a.squares[rank * a.rank_stride + unit];
      used = used || (a.used != nullptr && a.used[rank * a.rank_stride + unit] != 0.0);
    }
    a.scratch[unit] = pairwise_sum(slices, ranks);
    if (a.used != nullptr) a.unit_used[unit] = used ? 1 : 0;
  }
  definitions::advance_step(a, pairwise_sum(a.scratch, a.unit_count));
}

// The state is read when the stream gets here, not when the launch was queued.
void run_adamw_controlled(const Dimensions& grid, const Dimensions& block, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<ControlledAdamWArguments>*>(arguments[0]);
  const StepState& state = *launch.arguments.state;
  if (!definitions::updates(state, launch.arguments.used)) return;
  HostLaunch<AdamWArguments> update = {launch.context, launch.arguments.update};
  update.arguments.factor = state.factor;
  update.arguments.c1 = state.c1;
  update.arguments.s2 = state.s2;
  void* const pointers[] = {&update};
  run_elements<AdamWArguments, &host_kernels::RangeKernels::adamw>(grid, block, pointers);
}

void run_norm(const Dimensions&, const Dimensions&, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<NormArguments>*>(arguments[0]);
  const std::size_t leaf_count = launch.arguments.count / kLeafCount;
  launch.context->runner.run(
      leaf_count, kBlockCount / kLeafCount,
      [](const void* context, std::size_t begin, std::size_t end) {
        const auto& l = *static_cast<const HostLaunch<NormArguments>*>(context);
        l.context->kernels.norm_leaves(l.arguments, begin, end);
      },
      &launch);
  const DefaultFloatEnvironment environment;
  const double sum = pairwise_sum(launch.arguments.scratch, leaf_count);
  *launch.arguments.result = definitions::canonical_double(sum);
}

}  // namespace

struct BlockRunner::Arena {
  explicit Arena(int thread_count) : arena(thread_count) {}
  tbb::task_arena arena;
};

BlockRunner::BlockRunner(int thread_count) : thread_count_(threads_to_use(thread_count)) {
  if (thread_count_ > 1) arena_ = std::make_unique<Arena>(thread_count_);
}

BlockRunner::~BlockRunner() = default;

void BlockRunner::run(std::size_t count, std::size_t block,
                      void (*function)(const void* context, std::size_t begin, std::size_t end),
                      const void* context) const {
  const auto run_block = [=](std::size_t index) {
    const DefaultFloatEnvironment environment;
    function(context, index * block, std::min(count, (index + 1) * block));
  };
  const std::size_t block_count = (count + block - 1) / block;
  if (arena_ == nullptr || block_count <= 1) {
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

const HostKernel* host_kernel_table() noexcept {
  using host_kernels::RangeKernels;
  static constexpr HostKernel kTable[] = {
      {"forebay_cast", run_elements<CastArguments, &RangeKernels::cast>},
      {"forebay_accumulate", run_elements<AccumulateArguments, &RangeKernels::accumulate>},
      {"forebay_scale", run_elements<ScaleArguments, &RangeKernels::scale>},
      {"forebay_add", run_elements<AddArguments, &RangeKernels::add>},
      {"forebay_norm", run_norm},
      {"forebay_adamw", run_elements<AdamWArguments, &RangeKernels::adamw>},
      {"forebay_fill", run_fill},
      {"forebay_step_control", run_step_control},
      {"forebay_adamw_controlled", run_adamw_controlled},
      {nullptr, nullptr},
  };
  return kTable;
}

}  // namespace forebay
