// Events: points in streams, and the waits for them.
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

CuResult find_event(CuEvent handle, EventPtr* result) {
  const auto found = driver().events.find(handle);
  if (found == driver().events.end()) return CuResult::kInvalidHandle;
  *result = found->second;
  return CuResult::kSuccess;
}

// Asking about an event whose last record is in a capture ends that capture.
CuResult refuse_captured(const Event& event) {
  if (event.captured == nullptr) return CuResult::kSuccess;
  event.captured->status = CuCaptureStatus::kInvalidated;
  return CuResult::kCapturedEvent;
}

CuResult elapsed(float* milliseconds, CuEvent start, CuEvent end) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (milliseconds == nullptr) return CuResult::kInvalidValue;
  EventPtr first, last;
  if (find_event(start, &first) != CuResult::kSuccess || find_event(end, &last) != CuResult::kSuccess) {
    return CuResult::kInvalidHandle;
  }
  if (((first->flags | last->flags) & kEventDisableTiming) != 0 || first->mark == nullptr ||
      last->mark == nullptr) {
    return CuResult::kInvalidHandle;
  }
  state.scheduler.release_held();
  if (!first->mark->done || !last->mark->done) return CuResult::kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(last->mark->time - first->mark->time).count();
  return CuResult::kSuccess;
}

}  // namespace

CuResult cuEventCreate(CuEvent* event, unsigned flags) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (event == nullptr || (flags & ~(kEventBlockingSync | kEventDisableTiming | kEventInterprocess)) != 0) {
    return CuResult::kInvalidValue;
  }
  if ((flags & kEventInterprocess) != 0) {
    return (flags & kEventDisableTiming) == 0 ? CuResult::kInvalidValue : CuResult::kNotSupported;
  }
  auto created = std::make_shared<Event>();
  const CuResult result = current_context(&created->context);
  if (result != CuResult::kSuccess) return result;
  created->flags = flags;
  *event = next_handle(state.old_events);
  state.events[*event] = std::move(created);
  return CuResult::kSuccess;
}

CuResult cuEventDestroy_v2(CuEvent event) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  EventPtr found;
  const CuResult result = find_event(event, &found);
  if (result != CuResult::kSuccess) return result;
  state.events.erase(event);
  state.old_events.push_back(event);
  return found->context->sticky;
}

CuResult cuEventRecordWithFlags(CuEvent event, CuStream stream, unsigned flags) {
  const Lock lock(driver().mutex);
  if ((flags & ~kEventRecordExternal) != 0) return CuResult::kInvalidValue;
  EventPtr found;
  CuResult result = find_event(event, &found);
  if (result != CuResult::kSuccess) return result;
  StreamPtr target;
  result = find_stream(stream, &target);
  if (result != CuResult::kSuccess) return result;
  if (found->context != target->context) return CuResult::kInvalidHandle;
  if (target->capture != nullptr && flags == 0) return capture_record(target, found);
  if (target->capture == nullptr && flags != 0) return CuResult::kIllegalState;
  Operation operation;
  operation.what = "cuEventRecord";
  const MarkPtr mark = operation.mark;
  result = enqueue(target, std::move(operation));
  if (result != CuResult::kSuccess) return result;
  found->captured = nullptr;
  found->mark = mark;
  return CuResult::kSuccess;
}
CuResult cuEventRecord(CuEvent event, CuStream stream) {
  return cuEventRecordWithFlags(event, stream, 0);
}

CuResult cuEventQuery(CuEvent event) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  EventPtr found;
  CuResult result = find_event(event, &found);
  if (result != CuResult::kSuccess) return result;
  if (found->context->sticky != CuResult::kSuccess) return found->context->sticky;
  result = refuse_captured(*found);
  if (result != CuResult::kSuccess) return result;
  result = refuse_while_capturing();
  if (result != CuResult::kSuccess) return result;
  state.scheduler.release_held();
  if (found->mark == nullptr) return CuResult::kSuccess;
  return found->mark->done ? found->mark->failure : CuResult::kNotReady;
}

CuResult cuEventSynchronize(CuEvent event) {
  Driver& state = driver();
  Lock lock(state.mutex);
  EventPtr found;
  CuResult result = find_event(event, &found);
  if (result != CuResult::kSuccess) return result;
  if (found->context->sticky != CuResult::kSuccess) return found->context->sticky;
  result = refuse_captured(*found);
  if (result != CuResult::kSuccess) return result;
  result = refuse_while_capturing();
  if (result != CuResult::kSuccess) return result;
  if ((found->flags & kEventBlockingSync) == 0) ++state.spinning_waits;
  const MarkPtr mark = found->mark;  // Recording again meanwhile does not prolong the wait.
  state.scheduler.wait(lock, mark);
  trim_pools();
  if (found->context->sticky != CuResult::kSuccess) return found->context->sticky;
  return mark == nullptr ? CuResult::kSuccess : mark->failure;
}

CuResult cuEventElapsedTime(float* milliseconds, CuEvent start, CuEvent end) {
  return elapsed(milliseconds, start, end);
}
CuResult cuEventElapsedTime_v2(float* milliseconds, CuEvent start, CuEvent end) {
  return elapsed(milliseconds, start, end);
}

CuResult cuStreamWaitEvent(CuStream stream, CuEvent event, unsigned flags) {
  const Lock lock(driver().mutex);
  if ((flags & ~kEventWaitExternal) != 0) return CuResult::kInvalidValue;
  StreamPtr target;
  CuResult result = find_stream(stream, &target);
  if (result != CuResult::kSuccess) return result;
  EventPtr found;
  result = find_event(event, &found);
  if (result != CuResult::kSuccess) return result;
  bool handled = false;
  result = capture_wait(target, found, &handled);
  if (result != CuResult::kSuccess || handled) return result;
  if (found->mark == nullptr) return CuResult::kSuccess;
  Operation operation;
  operation.what = "cuStreamWaitEvent";
  operation.after.push_back(found->mark);
  return enqueue(target, std::move(operation));
}

}  // namespace forebay::fake_cuda
