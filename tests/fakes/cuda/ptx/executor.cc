#include "tests/fakes/cuda/ptx/executor.h"

#include <algorithm>
#include <cfenv>
#include <memory>
#include <optional>
#include <string>

#include "tests/fakes/cuda/ptx/block.h"

namespace forebay::ptx {
namespace {

// Rounds to nearest and keeps subnormals. The calling thread's own settings come back at the end.
class FloatEnvironment {
 public:
  FloatEnvironment() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&before_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace

Block::Block(const Kernel& kernel, const Launch& launch, const std::byte* parameters,
             const GlobalMemory& memory)
    : kernel_(kernel), launch_(launch), parameters_(parameters), memory_(memory) {
  thread_count_ = launch.block[0] * launch.block[1] * launch.block[2];
  if (thread_count_ == 0 || thread_count_ > kernel.most_threads) {
    throw Fault(FaultKind::kLaunch, "kernel " + kernel.name + ": blocks of " + std::to_string(thread_count_) +
                                        " threads were asked for, and its text allows 1 to " +
                                        std::to_string(kernel.most_threads));
  }
  shared_.resize(kernel.shared_bytes + launch.dynamic_shared_bytes);
  const unsigned warp_count = (thread_count_ + kWarpSize - 1) / kWarpSize;
  for (unsigned i = 0; i < warp_count; ++i) warps_.push_back(std::make_unique<Warp>(*this, kernel, i));
}

void Block::run(const std::array<unsigned, 3>& place, unsigned number) {
  place_ = place;
  std::fill(shared_.begin(), shared_.end(), kSharedPoison);
  shadow_.reset(shared_.size());
  for (Barrier& barrier : barriers_) barrier = Barrier();
  for (const std::unique_ptr<Warp>& warp : warps_) {
    const unsigned left = thread_count_ - warp->index() * kWarpSize;
    warp->begin(left >= kWarpSize ? kAllLanes : (1u << left) - 1);
  }
  for (unsigned round = number;; ++round) {
    bool progress = false, ended = true;
    for (std::size_t i = 0; i < warps_.size(); ++i) {
      Warp& warp = *warps_[round % 2 == 0 ? i : warps_.size() - 1 - i];
      progress = warp.run() || progress;
      ended = ended && warp.live() == 0;
    }
    for (Barrier& barrier : barriers_) {
      if (barrier.expected == 0 || barrier.count < barrier.expected) continue;
      release(barrier);
      progress = true;
    }
    if (ended) return;
    if (!progress) describe_deadlock();
  }
}

// --- barriers ---

void Block::arrive(Warp& warp, LaneMask lanes, const Instruction& instruction) {
  const auto first = static_cast<unsigned>(__builtin_ctz(lanes));
  const std::uint64_t id = warp.get(instruction.in[0], first);
  if (id >= barriers_.size())
    warp.fail(FaultKind::kMeeting, first, "there are 16 barriers, and not " + std::to_string(id));
  // in[1] is the number of threads, where 0 stands for all of the block.
  const auto wanted = static_cast<unsigned>(warp.get(instruction.in[1], first));
  if (wanted % kWarpSize != 0) {
    warp.fail(FaultKind::kMeeting, first, "a barrier's number of threads must be a multiple of 32");
  }
  const unsigned expected = wanted == 0 ? thread_count_ : wanted;
  Barrier& barrier = barriers_[id];
  if (barrier.expected != 0 && barrier.count == barrier.expected) release(barrier);
  if (barrier.expected == 0) {
    barrier.expected = expected;
    barrier.lanes.assign(warps_.size(), 0);
    barrier.clock.assign(warps_.size(), 0);
    barrier.line = instruction.line;
  }
  if (barrier.expected != expected) {
    warp.fail(FaultKind::kMeeting, first, "the threads of a barrier expect different numbers of threads");
  }
  if (instruction.reduction != Reduction::kNone) {
    const LaneMask given = warp.predicate(instruction.in[2]) & lanes;
    barrier.population += static_cast<unsigned>(__builtin_popcount(given));
  }
  barrier.count += static_cast<unsigned>(__builtin_popcount(lanes));
  if (barrier.count > barrier.expected) {
    warp.fail(FaultKind::kMeeting, first, "more threads come to a barrier than it expects");
  }
  for (std::size_t w = 0; w < warps_.size(); ++w)
    barrier.clock[w] = std::max(barrier.clock[w], warp.clock_[w]);
  if (instruction.flow == Flow::kArrive) {
    ++warp.clock_[warp.index_];
  } else {
    barrier.lanes[warp.index_] |= lanes;
    warp.arrived_ |= lanes;
  }
}

void Block::release(Barrier& barrier) {
  for (std::size_t w = 0; w < warps_.size(); ++w) {
    const LaneMask lanes = barrier.lanes[w];
    if (lanes == 0) continue;
    Warp& warp = *warps_[w];
    for (std::size_t v = 0; v < warps_.size(); ++v)
      warp.clock_[v] = std::max(warp.clock_[v], barrier.clock[v]);
    ++warp.clock_[w];
    const auto first = static_cast<unsigned>(__builtin_ctz(lanes));
    const Instruction& instruction = kernel_.code[warp.places_[first]];
    warp.active = lanes;
    const unsigned population = barrier.population;
    if (instruction.reduction == Reduction::kPopulation) {
      warp.for_lanes([&](unsigned lane) { warp.put(instruction.out[0], lane, population); });
    } else if (instruction.reduction != Reduction::kNone) {
      const bool result =
          instruction.reduction == Reduction::kOr ? population > 0 : population == barrier.expected;
      warp.set_predicate(instruction.out[0], result ? kAllLanes : 0);
    }
    warp.for_lanes([&](unsigned lane) { ++warp.places_[lane]; });
    warp.waiting_ &= ~lanes;
    warp.arrived_ &= ~lanes;
  }
  barrier = Barrier();
}

std::string Block::whereabouts(unsigned thread) const {
  const Warp& warp = *warps_[thread / kWarpSize];
  const unsigned lane = thread % kWarpSize;
  if ((warp.exited_ >> lane & 1) != 0) return "thread " + std::to_string(thread) + " has ended";
  const unsigned line = kernel_.code[warp.places_[lane]].line;
  return "thread " + std::to_string(thread) + " waits at line " + std::to_string(line) + " (" +
         text_line(*kernel_.text, line) + ")";
}

void Block::describe_deadlock() const {
  // The first thread that waits, and the first that is elsewhere.
  std::optional<unsigned> waits, elsewhere;
  std::uint32_t place = 0;
  for (unsigned thread = 0; thread < thread_count_ && !waits.has_value(); ++thread) {
    const Warp& warp = *warps_[thread / kWarpSize];
    if ((warp.exited_ >> thread % kWarpSize & 1) != 0) continue;
    waits = thread;
    place = warp.places_[thread % kWarpSize];
  }
  for (unsigned thread = 0; thread < thread_count_ && !elsewhere.has_value(); ++thread) {
    const Warp& warp = *warps_[thread / kWarpSize];
    const bool exited = (warp.exited_ >> thread % kWarpSize & 1) != 0;
    if (exited || warp.places_[thread % kWarpSize] != place) elsewhere = thread;
  }
  std::string what = whereabouts(waits.value_or(0));
  what += elsewhere.has_value() ? ", " + whereabouts(*elsewhere) : ", and so do all others";
  throw Fault(FaultKind::kMeeting, "kernel " + kernel_.name + ", block " + std::to_string(place_[0]) +
                                       ": threads cannot meet: " + what);
}

Executed execute(const Kernel& kernel, const Launch& launch, const std::byte* parameters,
                 const GlobalMemory& memory) {
  const FloatEnvironment environment;
  Block block(kernel, launch, parameters, memory);
  unsigned number = 0;
  for (unsigned z = 0; z < launch.grid[2]; ++z) {
    for (unsigned y = 0; y < launch.grid[1]; ++y) {
      for (unsigned x = 0; x < launch.grid[0]; ++x) block.run({x, y, z}, number++);
    }
  }
  return {block.instructions()};
}

}  // namespace forebay::ptx
