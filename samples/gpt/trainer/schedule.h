// The learning rate of each step.
#pragma once

#include <cstdint>

namespace forebay::gpt {

enum class Schedule : std::uint8_t {
  kConstant,
  kCosine,  // Half a cosine from the peak to the last rate.
  kLinear,  // A line from the peak to the last rate.
  kWsd,  // Warm-up, stable, decay: the peak, then a line to the last rate over the last fifth of the steps.
};

const char* schedule_name(Schedule schedule) noexcept;  // "constant", "cosine", "linear", "wsd"

struct ScheduleOptions {
  Schedule schedule = Schedule::kConstant;
  std::uint64_t steps = 0;   // In all.
  std::uint64_t warmup = 0;  // Steps in which the rate rises on a line to the peak.
  double peak = 0;
  double last = 0;  // The rate that the schedule ends at; not used by kConstant.
};

// The rate of step `step`, from 0. Computed in double from these numbers alone, so a resumed run goes on with
// the same rates.
double learning_rate(const ScheduleOptions& options, std::uint64_t step);

}  // namespace forebay::gpt
