#include "trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace forebay::gpt {
namespace {

// Source: Hu et al., "MiniCPM", arXiv 2404.06395, section 4: a tenth of the steps and more are enough.
constexpr double kStableShare = 0.8;

// The part of the decay that is over, 0 to 1, after the part `progress` of the steps behind the warm-up.
double decayed(Schedule schedule, double progress) {
  switch (schedule) {
    case Schedule::kConstant:
      return 0;
    case Schedule::kCosine:
      return 0.5 * (1 - std::cos(std::numbers::pi * progress));
    case Schedule::kLinear:
      return progress;
    case Schedule::kWsd:
      return std::max(0.0, (progress - kStableShare) / (1 - kStableShare));
  }
  return 0;
}

}  // namespace

const char* schedule_name(Schedule schedule) noexcept {
  constexpr const char* kNames[] = {"constant", "cosine", "linear", "wsd"};
  return kNames[static_cast<std::size_t>(schedule)];
}

double learning_rate(const ScheduleOptions& o, std::uint64_t step) {
  if (step < o.warmup) return o.peak * (static_cast<double>(step) + 1) / static_cast<double>(o.warmup);
  if (o.schedule == Schedule::kConstant) return o.peak;
  // The last step has the last rate.
  const std::uint64_t behind = o.steps > o.warmup + 1 ? o.steps - o.warmup - 1 : 1;
  const double progress = std::min(1.0, static_cast<double>(step - o.warmup) / static_cast<double>(behind));
  return o.peak + (o.last - o.peak) * decayed(o.schedule, progress);
}

}  // namespace forebay::gpt
