#include "tests/kernels/simt.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define FOREBAY_FIBER_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FOREBAY_FIBER_ASAN
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define FOREBAY_FIBER_TSAN
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FOREBAY_FIBER_TSAN
#endif
#endif

#ifdef FOREBAY_FIBER_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef FOREBAY_FIBER_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace forebay::simt {
namespace {

constexpr unsigned kWarpSize = 32;

// A body's frames are small; a sanitizer's are not.
#if defined(FOREBAY_FIBER_ASAN) || defined(FOREBAY_FIBER_TSAN)
constexpr std::size_t kStackBytes = 256 * 1024;
#else
constexpr std::size_t kStackBytes = 32 * 1024;
#endif

enum class State { kRuns, kBarrier, kShuffle, kEnded };

// Where a fiber, or the scheduler, goes on.
struct Context {
  ucontext_t machine = {};
  jmp_buf place;
  bool started = false;
};

// Stores where the caller is in `from`, and goes on at `to`.
void switch_context(Context& from, Context& to) {
#if defined(FOREBAY_FIBER_ASAN) || defined(FOREBAY_FIBER_TSAN)
  swapcontext(&from.machine, &to.machine);
#else
  // swapcontext calls the system twice each time, for the signal mask. This does so at the start of a fiber.
  from.started = true;
  if (_setjmp(from.place) != 0) return;
  if (to.started) _longjmp(to.place, 1);
  setcontext(&to.machine);
#endif
}

struct Fiber {
  Context context;
  State state = State::kRuns;
  Site site;  // The barrier or shuffle it waits at.
  std::uint64_t given = 0, got = 0;
  unsigned delta = 0;
#ifdef FOREBAY_FIBER_ASAN
  void* fake_stack = nullptr;
#endif
#ifdef FOREBAY_FIBER_TSAN
  void* tsan = nullptr;
#endif
};

std::string place_of(const Fiber& fiber) {
  if (fiber.state == State::kEnded) return "has ended";
  const std::string_view path = fiber.site.file;
  return std::string("waits at the ") + (fiber.state == State::kBarrier ? "barrier" : "shuffle") + " of " +
         std::string(path.substr(path.rfind('/') + 1)) + ":" + std::to_string(fiber.site.line);
}

bool same_place(const Fiber& a, const Fiber& b) {
  if (a.state != b.state) return false;
  return a.state == State::kEnded ||
         (a.site.line == b.site.line && std::string_view(a.site.file) == b.site.file);
}

}  // namespace

// The threads of one block at a time, and the scheduler that they give way to.
class Block {
 public:
  explicit Block(unsigned threads) : fibers_(threads), stacks_(new unsigned char[threads * kStackBytes]) {
#ifdef FOREBAY_FIBER_TSAN
    scheduler_tsan_ = __tsan_get_current_fiber();
#endif
    for (std::size_t i = 0; i < fibers_.size(); ++i) prepare(i);
  }
  ~Block() {
#ifdef FOREBAY_FIBER_TSAN
    for (Fiber& fiber : fibers_) __tsan_destroy_fiber(fiber.tsan);
#endif
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  unsigned threads() const {
    return static_cast<unsigned>(fibers_.size());
  }

  // Before the first block of a launch.
  void begin(unsigned grid_size, std::size_t shared_bytes, BlockBody body, const void* launch) {
    body_ = body;
    launch_ = launch;
    grid_size_ = grid_size;
    shared_.resize(shared_bytes / sizeof(std::max_align_t) + 1);
  }

  // Runs one block to its end. After a failure there is no other.
  std::string run(unsigned index) {
    index_ = index;
    std::memset(shared_.data(), kSharedPoison, shared_.size() * sizeof shared_[0]);
    for (Fiber& fiber : fibers_) fiber.state = State::kRuns;
    // Between two barriers threads run in ascending or in descending order, in turns, and neighbouring blocks
    // the other way round: a missing barrier shows in one of them.
    for (unsigned round = index;; ++round) {
      const std::size_t count = fibers_.size();
      for (std::size_t i = 0; i < count; ++i) {
        current_ = round % 2 == 0 ? i : count - 1 - i;
        if (fibers_[current_].state == State::kRuns) resume(fibers_[current_]);
      }
      if (all_at(State::kEnded, 0, fibers_.size())) return {};
      if (!release()) return describe();
    }
  }

  // Called on a fiber: waits until release() lets it go on.
  void give_way(State state, const Site& site) {
    Fiber& fiber = fibers_[current_];
    fiber.state = state;
    fiber.site = site;
    leave(fiber);
  }

  Fiber& fiber(unsigned thread) {
    return fibers_[thread];
  }

 private:
  void prepare(std::size_t i) {
    Fiber& fiber = fibers_[i];
#ifdef FOREBAY_FIBER_TSAN
    fiber.tsan = __tsan_create_fiber(0);
#endif
    ucontext_t& machine = fiber.context.machine;
    getcontext(&machine);
    machine.uc_stack.ss_sp = stacks_.get() + i * kStackBytes;
    machine.uc_stack.ss_size = kStackBytes;
    machine.uc_link = nullptr;
    // makecontext passes ints, so the pointer goes in two halves.
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&machine, reinterpret_cast<void (*)()>(&Block::enter), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self & 0xFFFFFFFFu));
  }

  static void enter(unsigned high, unsigned low) {
    Block& block = *reinterpret_cast<Block*>((static_cast<std::uintptr_t>(high) << 32) | low);
    block.arrive(nullptr);
    const auto thread = static_cast<unsigned>(block.current_);
    // Each turn is the thread of another block.
    for (;;) {
      const BlockContext context(block, thread, block.index_, static_cast<unsigned>(block.fibers_.size()),
                                 block.grid_size_);
      block.body_(context, block.shared_.data(), block.launch_);
      block.give_way(State::kEnded, {});
    }
  }

  void resume(Fiber& fiber) {
#ifdef FOREBAY_FIBER_ASAN
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, fiber.context.machine.uc_stack.ss_sp, kStackBytes);
#endif
#ifdef FOREBAY_FIBER_TSAN
    __tsan_switch_to_fiber(fiber.tsan, 0);
#endif
    switch_context(scheduler_, fiber.context);
#ifdef FOREBAY_FIBER_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  void leave(Fiber& fiber) {
#ifdef FOREBAY_FIBER_ASAN
    __sanitizer_start_switch_fiber(&fiber.fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#endif
#ifdef FOREBAY_FIBER_TSAN
    __tsan_switch_to_fiber(scheduler_tsan_, 0);
#endif
    switch_context(fiber.context, scheduler_);
    arrive(&fiber);
  }

  // On a fiber that has just been switched to.
  void arrive([[maybe_unused]] Fiber* fiber) {
#ifdef FOREBAY_FIBER_ASAN
    __sanitizer_finish_switch_fiber(fiber == nullptr ? nullptr : fiber->fake_stack, &scheduler_stack_,
                                    &scheduler_stack_bytes_);
#endif
  }

  // Whether the threads [begin, end) all wait at one place, or have all ended.
  bool all_at(State state, std::size_t begin, std::size_t end) const {
    for (std::size_t i = begin; i < end; ++i) {
      if (fibers_[i].state != state || !same_place(fibers_[i], fibers_[begin])) return false;
    }
    return true;
  }

  // Lets those go on that have met. False when nobody can.
  bool release() {
    const std::size_t count = fibers_.size();
    bool released = false;
    if (all_at(State::kBarrier, 0, count)) {
      for (Fiber& fiber : fibers_) fiber.state = State::kRuns;
      return true;
    }
    for (std::size_t begin = 0; begin < count; begin += kWarpSize) {
      const std::size_t end = std::min<std::size_t>(begin + kWarpSize, count);
      if (!all_at(State::kShuffle, begin, end)) continue;
      for (std::size_t i = begin; i < end; ++i) {
        const std::size_t from = i + fibers_[i].delta;
        fibers_[i].got = fibers_[from < end ? from : i].given;
        fibers_[i].state = State::kRuns;
      }
      released = true;
    }
    return released;
  }

  // The first thread that waits, and the first of its barrier or shuffle that is elsewhere.
  std::string describe() const {
    std::size_t waiting = 0;
    while (fibers_[waiting].state == State::kEnded) ++waiting;
    // A shuffle concerns its warp; where a whole warp waits at one, the defect is elsewhere.
    std::size_t begin = 0, end = fibers_.size();
    if (fibers_[waiting].state == State::kShuffle) {
      begin = waiting / kWarpSize * kWarpSize;
      end = std::min<std::size_t>(begin + kWarpSize, end);
    }
    std::size_t other = begin;
    while (other < end && same_place(fibers_[other], fibers_[waiting])) ++other;
    return std::string("divergent ") + (fibers_[waiting].state == State::kBarrier ? "barrier" : "shuffle") +
           " in block " + std::to_string(index_) + ": thread " + std::to_string(waiting) + " " +
           place_of(fibers_[waiting]) + ", thread " + std::to_string(other) + " " + place_of(fibers_[other]) +
           "; every thread has to come to it";
  }

  BlockBody body_ = nullptr;
  const void* launch_ = nullptr;
  unsigned grid_size_ = 0;
  unsigned index_ = 0;
  std::size_t current_ = 0;
  std::vector<std::max_align_t> shared_;
  std::vector<Fiber> fibers_;
  std::unique_ptr<unsigned char[]> stacks_;
  Context scheduler_;
#ifdef FOREBAY_FIBER_ASAN
  const void* scheduler_stack_ = nullptr;
  std::size_t scheduler_stack_bytes_ = 0;
#endif
#ifdef FOREBAY_FIBER_TSAN
  void* scheduler_tsan_ = nullptr;
#endif
};

void BlockContext::barrier(const char* file, int line) const {
  simulated_->give_way(State::kBarrier, {file, line});
}

std::uint64_t BlockContext::shuffle(std::uint64_t bits, unsigned delta, const Site& site) const {
  Fiber& fiber = simulated_->fiber(thread());
  fiber.given = bits;
  fiber.delta = delta;
  simulated_->give_way(State::kShuffle, site);
  return fiber.got;
}

std::string run_blocks(const Dimensions& grid, const Dimensions& block, std::size_t shared_bytes,
                       BlockBody body, const void* launch) {
  // Kept for the next launch: stacks and fibers take longer to make than most kernels to run.
  thread_local std::unique_ptr<Block> kept;
  std::unique_ptr<Block> simulated = std::move(kept);
  if (simulated == nullptr || simulated->threads() != block.x) simulated = std::make_unique<Block>(block.x);
  simulated->begin(grid.x, shared_bytes, body, launch);
  for (unsigned index = 0; index < grid.x; ++index) {
    std::string failure = simulated->run(index);
    if (!failure.empty()) return failure;
  }
  kept = std::move(simulated);
  return {};
}

}  // namespace forebay::simt
