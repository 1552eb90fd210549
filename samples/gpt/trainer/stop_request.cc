#include "trainer/stop_request.h"

#include <atomic>

namespace forebay::gpt {
namespace {

std::atomic<bool> stop_requested{false};
std::atomic<bool> steps_have_begun{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

}  // namespace

bool request_stop() noexcept {
  stop_requested.store(true, std::memory_order_relaxed);
  return has_begun_steps();
}
bool stop_is_requested() noexcept {
  return stop_requested.load(std::memory_order_relaxed);
}
void clear_stop() noexcept {
  stop_requested.store(false, std::memory_order_relaxed);
}

bool has_begun_steps() noexcept {
  return steps_have_begun.load(std::memory_order_relaxed);
}
void note_step_begins() noexcept {
  steps_have_begun.store(true, std::memory_order_relaxed);
}

}  // namespace forebay::gpt
