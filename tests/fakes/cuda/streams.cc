// Streams as their users see them: handles, the default streams and their ordering, queries and waits.
#include <algorithm>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

bool blocking(const Stream& stream) {
  return (stream.flags & kStreamNonBlocking) == 0;
}

// The operations that the default-stream rules put before one that is queued now: the legacy stream and the
// blocking streams of its context wait for each other.
void add_implicit_order(const StreamPtr& stream, Operation* operation) {
  const auto add = [&](const StreamPtr& other) {
    if (other != nullptr && other != stream && other->last != nullptr && !other->last->done) {
      operation->after.push_back(other->last);
    }
  };
  if (stream->legacy) {
    for (const StreamPtr& other : driver().scheduler.busy()) {
      if (other->context == stream->context && blocking(*other)) add(other);
    }
  } else if (blocking(*stream)) {
    add(stream->context->legacy);
  }
}

CuResult create_stream(CuStream* result, unsigned flags, int priority) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (result == nullptr || (flags & ~kStreamNonBlocking) != 0) return CuResult::kInvalidValue;
  ContextPtr context;
  const CuResult current = current_context(&context);
  if (current != CuResult::kSuccess) return current;
  const StreamPtr stream = make_stream(context, flags, std::clamp(priority, -5, 0));
  stream->handle = next_handle(state.old_streams);
  state.streams[stream->handle] = stream;
  *result = stream->handle;
  return CuResult::kSuccess;
}

}  // namespace

StreamPtr make_stream(const ContextPtr& context, unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->flags = flags;
  stream->priority = priority;
  stream->id = driver().next_stream_id++;
  stream->connection = context->stream_count++ % driver().connections;
  return stream;
}

CuResult find_stream(CuStream handle, StreamPtr* result) {
  Driver& state = driver();
  const bool per_thread = handle == per_thread_stream() || (handle == nullptr && null_stream_is_per_thread());
  if (handle != nullptr && handle != legacy_stream() && !per_thread) {
    const auto found = state.streams.find(handle);
    if (found == state.streams.end()) return CuResult::kInvalidHandle;
    *result = found->second;
    return stream_failure(*found->second);
  }
  ContextPtr context;
  const CuResult current = current_context(&context);
  if (current != CuResult::kSuccess) return current;
  StreamPtr& slot = per_thread ? context->per_thread[thread_number()] : context->legacy;
  if (slot == nullptr) {
    slot = make_stream(context, kStreamDefault, 0);
    slot->handle = per_thread ? per_thread_stream() : legacy_stream();
    slot->legacy = !per_thread;
    slot->is_default = true;
  }
  *result = slot;
  return stream_failure(*slot);
}

CuResult enqueue(const StreamPtr& stream, Operation operation) {
  if (stream->capture != nullptr) return record_captured(stream, std::move(operation));
  const CuResult implicit = refuse_implicit(stream);
  if (implicit != CuResult::kSuccess) return implicit;
  add_implicit_order(stream, &operation);
  driver().scheduler.queue(stream, std::move(operation));
  EntryScope::note(stream->context);
  return CuResult::kSuccess;
}

CuResult wait_for_context(Lock& lock, const ContextPtr& context) {
  std::vector<MarkPtr> last;
  for (const StreamPtr& stream : driver().scheduler.busy()) {
    if (stream->context == context) last.push_back(stream->last);
  }
  for (const MarkPtr& mark : last) driver().scheduler.wait(lock, mark);
  return context->sticky;
}

void wait_as_a_driver_may(Lock& lock) {
  ContextPtr context;
  if (driver().options.calls_wait && current_context(&context) == CuResult::kSuccess)
    wait_for_context(lock, context);
}

CuResult wait_for_stream(Lock& lock, const StreamPtr& stream) {
  MarkPtr last = stream->last;
  if (stream->legacy) {
    // As an operation queued here now would.
    Operation probe;
    add_implicit_order(stream, &probe);
    for (const MarkPtr& mark : probe.after) driver().scheduler.wait(lock, mark);
  }
  driver().scheduler.wait(lock, last);
  return stream_failure(*stream);
}

CuResult cuStreamCreate(CuStream* stream, unsigned flags) {
  return create_stream(stream, flags, 0);
}
CuResult cuStreamCreateWithPriority(CuStream* stream, unsigned flags, int priority) {
  return create_stream(stream, flags, priority);
}

// Returns at once; queued work still runs.
CuResult cuStreamDestroy_v2(CuStream stream) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  const auto found = state.streams.find(stream);
  if (found == state.streams.end()) return CuResult::kInvalidHandle;
  const StreamPtr kept = found->second;
  // A capture names its streams by their handles.
  if (kept->capture != nullptr) {
    kept->capture->status = CuCaptureStatus::kInvalidated;
  } else {
    state.old_streams.push_back(stream);
  }
  state.streams.erase(found);
  return kept->context->sticky;
}

CuResult cuStreamQuery(CuStream stream) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  StreamPtr found;
  CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  result = refuse_on_capturing(found);
  if (result != CuResult::kSuccess) return result;
  state.scheduler.release_held();
  return found->last == nullptr || found->last->done ? CuResult::kSuccess : CuResult::kNotReady;
}

CuResult cuStreamSynchronize(CuStream stream) {
  Lock lock(driver().mutex);
  StreamPtr found;
  CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  result = refuse_on_capturing(found);
  if (result != CuResult::kSuccess) return result;
  result = wait_for_stream(lock, found);
  trim_pools();
  return result;
}

CuResult cuStreamGetCtx(CuStream stream, CuContext* context) {
  const Lock lock(driver().mutex);
  if (context == nullptr) return CuResult::kInvalidValue;
  StreamPtr found;
  const CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  *context = found->context->handle;
  return CuResult::kSuccess;
}
CuResult cuStreamGetCtx_v2(CuStream stream, CuContext* context, void** green) {
  if (green != nullptr) *green = nullptr;
  return cuStreamGetCtx(stream, context);
}

CuResult cuStreamGetDevice(CuStream stream, CuDevice* device) {
  const Lock lock(driver().mutex);
  if (device == nullptr) return CuResult::kInvalidValue;
  StreamPtr found;
  const CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  *device = found->context->device;
  return CuResult::kSuccess;
}

CuResult cuStreamGetFlags(CuStream stream, unsigned* flags) {
  const Lock lock(driver().mutex);
  if (flags == nullptr) return CuResult::kInvalidValue;
  StreamPtr found;
  const CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  *flags = found->flags;
  return CuResult::kSuccess;
}

CuResult cuStreamGetPriority(CuStream stream, int* priority) {
  const Lock lock(driver().mutex);
  if (priority == nullptr) return CuResult::kInvalidValue;
  StreamPtr found;
  const CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  *priority = found->priority;
  return CuResult::kSuccess;
}

CuResult cuStreamGetId(CuStream stream, unsigned long long* id) {
  const Lock lock(driver().mutex);
  if (id == nullptr) return CuResult::kInvalidValue;
  StreamPtr found;
  const CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  *id = found->id;
  return CuResult::kSuccess;
}

CuResult cuLaunchHostFunc(CuStream stream, CuHostFunction function, void* argument) {
  const Lock lock(driver().mutex);
  if (function == nullptr) return CuResult::kInvalidValue;
  StreamPtr found;
  const CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  Operation operation;
  operation.what = "cuLaunchHostFunc";
  operation.is_host_function = true;
  operation.run = [function, argument](Lock& running) {
    running.unlock();
    bool called_driver = false;
    {
      const ForeignScope scope("a host function");
      function(argument);
      called_driver = scope.called_driver();
    }
    running.lock();
    return called_driver ? CuResult::kNotPermitted : CuResult::kSuccess;
  };
  return enqueue(found, std::move(operation));
}

}  // namespace forebay::fake_cuda
