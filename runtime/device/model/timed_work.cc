#include "runtime/device/model/timed_work.h"

#include <algorithm>
#include <cmath>

#include "forebay/check.h"

namespace forebay::internal {
namespace {

constexpr double kNanosecondsPerSecond = 1e9;
// Less work than this is none: it is left over by rounding. Larger: time is lost. Smaller: a task may need
// one nanosecond more.
constexpr double kNothingLeft = 1e-6;

// Also of endless work. With work of no time after kModelTimeEnd, 64 bits hold every time.
double bounded_ns(double ns) {
  constexpr auto kMost = static_cast<double>(kModelTimeEnd.count());
  return ns < kMost ? ns : kMost;
}

HostClock::Nanoseconds nanoseconds(double seconds) {
  return HostClock::Nanoseconds(
      static_cast<std::int64_t>(std::llround(bounded_ns(seconds * kNanosecondsPerSecond))));
}

}  // namespace

Task::Nanoseconds Task::end_alone(Nanoseconds begin) const {
  for (const Phase& phase : phases_) {
    if (begin >= kModelTimeEnd) break;
    double longest = 0;
    for (std::size_t i = 0; i < phase.work.part_count; ++i)
      longest = std::max(longest, phase.work.parts[i].seconds);
    begin = std::max(begin + nanoseconds(phase.work.delay_seconds + longest), phase.until);
  }
  return begin;
}

void TimedWork::begin(Task& task) {
  FOREBAY_CHECK(!task.empty() && !task.begun_, "a task of %zu phases begins", task.phases_.size());
  active_.push_back(&task);
  begin_phase(task, now());
}

void TimedWork::begin_phase(Task& task, Nanoseconds now) {
  const Task::Phase& phase = task.phases_.front();
  const bool is_over = now >= kModelTimeEnd;
  task.begun_ = true;
  task.delay_end_ = is_over ? now : std::max(now + nanoseconds(phase.work.delay_seconds), phase.until);
  if (phase.signal != nullptr && !phase.signal->is_announced()) task.delay_end_ = HostClock::kNever;
  task.delayed_ = task.delay_end_ > now;
  for (std::size_t i = 0; i < phase.work.part_count; ++i)
    task.left_ns_[i] = is_over ? 0 : bounded_ns(phase.work.parts[i].seconds * kNanosecondsPerSecond);
  if (!task.delayed_) count_parts(task);
}

// Each part that is not done uses its resource.
void TimedWork::count_parts(const Task& task) {
  const ModelWork& work = task.phases_.front().work;
  for (std::size_t i = 0; i < work.part_count; ++i) {
    if (task.left_ns_[i] > kNothingLeft) ++users_[static_cast<std::size_t>(work.parts[i].resource)];
  }
}

bool TimedWork::has_ended(const Task& task, Nanoseconds now) const {
  if (task.delayed_ && task.delay_end_ > now && !is_announced(task)) return false;
  const ModelWork& work = task.phases_.front().work;
  for (std::size_t i = 0; i < work.part_count; ++i) {
    if (task.left_ns_[i] > kNothingLeft) return false;
  }
  return true;
}

bool TimedWork::is_announced(const Task& task) {
  const auto& signal = task.phases_.front().signal;
  return signal != nullptr && signal->is_announced();
}

TimedWork::Nanoseconds TimedWork::pass(Nanoseconds begin, Nanoseconds end) {
  const bool waits = std::any_of(active_.begin(), active_.end(),
                                 [](const Task* task) { return task->phases_.front().signal != nullptr; });
  if (waits) {
    std::unique_lock lock(clock_.mutex());
    clock_.wait(
        lock,
        [this] {
          return std::any_of(active_.begin(), active_.end(),
                             [](const Task* task) { return is_announced(*task); });
        },
        end);
    return clock_.now_locked();
  }
  FOREBAY_CHECK(end != HostClock::kNever, "nothing is under way on %zu tasks", active_.size());
  if (end > begin) clock_.sleep(end - begin);
  return end;
}

TimedWork::Nanoseconds TimedWork::advance(Nanoseconds limit) {
  const Nanoseconds begin = now();
  Nanoseconds end = limit;
  for (const Task* task : active_) {
    if (task->delayed_) {
      end = std::min(end, task->delay_end_);
      continue;
    }
    const ModelWork& work = task->phases_.front().work;
    bool any = false;
    for (std::size_t i = 0; i < work.part_count; ++i) {
      if (task->left_ns_[i] <= kNothingLeft) continue;
      any = true;
      const double alone =
          bounded_ns(task->left_ns_[i] * users_[static_cast<std::size_t>(work.parts[i].resource)]);
      end = std::min(end, begin + Nanoseconds(static_cast<std::int64_t>(std::ceil(alone - kNothingLeft))));
    }
    if (!any) end = begin;
  }
  end = pass(begin, end);
  const Nanoseconds passed = std::max(end - begin, Nanoseconds(0));
  const auto passed_ns = static_cast<double>(passed.count());

  for (std::size_t r = 0; r < users_.size(); ++r) {
    if (users_[r] > 0) busy_[r] += passed_ns / kNanosecondsPerSecond;
  }
  const std::array<int, kModelResourcesMax> users = users_;
  for (Task* task : active_) {
    if (task->delayed_) continue;
    const ModelWork& work = task->phases_.front().work;
    for (std::size_t i = 0; i < work.part_count; ++i) {
      if (task->left_ns_[i] <= kNothingLeft) continue;
      const auto resource = static_cast<std::size_t>(work.parts[i].resource);
      task->left_ns_[i] = end >= kModelTimeEnd ? 0 : task->left_ns_[i] - passed_ns / users[resource];
      if (task->left_ns_[i] <= kNothingLeft) --users_[resource];
    }
  }
  for (Task* task : active_) {
    if (task->delayed_ && (task->delay_end_ <= end || is_announced(*task))) {
      task->delayed_ = false;
      count_parts(*task);
    }
    while (!task->phases_.empty() && has_ended(*task, end)) {
      task->phases_.pop_front();
      task->begun_ = false;
      if (!task->phases_.empty()) begin_phase(*task, end);
    }
  }
  ended_count_ = std::erase_if(active_, [](const Task* task) { return task->empty(); });
  return passed;
}

}  // namespace forebay::internal

namespace forebay {

void ModelSignal::announce() {
  const std::lock_guard lock(clock_.mutex());
  announced_.store(true, std::memory_order_release);
  clock_.notify();
}

}  // namespace forebay
