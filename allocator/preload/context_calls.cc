// Calls that end memory or streams: reset and release of a device's context, destruction of a stream. And
// calls that begin or end a capture.
#include <array>
#include <atomic>
#include <mutex>

#include "allocator/preload/accounts.h"
#include "allocator/preload/routes.h"
#include "allocator/preload/shared_blocks.h"

namespace forebay {
namespace {

// The program's hold of a device's primary context. The arena retains it once more.
struct Primary {
  // Held by the driver's call too: a thread that retains the context gets it before the last release, or
  // after the arena is gone.
  std::mutex mutex;
  int retained = 0;
  DriverContext context = nullptr;
};
constinit std::array<Primary, kPreloadDeviceLimit> primaries;

bool is_device(DriverDevice device) {
  return device >= 0 && device < kPreloadDeviceLimit;
}

// Called before the device's context goes away with all its memory. The arena's chunks belong to no context
// and would stay.
void drop_arena(DriverDevice device) {
  void* context = nullptr;
  std::uint64_t generation = 0;
  {
    const ProcessArenas::Use use = ProcessArenas::of_process().find(device);
    if (!use) return;
    context = use.context();
    // Beside a capture too, which ends with the context.
    const ContextScope scope(context);
    if (scope.result() == kDriverSuccess) (void)preload_state().used.cuCtxSynchronize();
    generation = use.generation();
  }
  forget_streams(context);
  for (const auto& [address, facts] : ProcessArenas::of_process().drop(device)) leave_block(address, facts);
  forget_waiting_frees(device);
  forget_shared_blocks(device, generation);
  note_reserved(device, nullptr);
  forget_pool_use(device);
}

// Called when the context is gone.
void forget_context(DriverContext context) {
  if (context == nullptr) return;
  forget_streams(context);
  forget_user(context);
  forget_opened_blocks(context);
  for (const auto& [address, facts] : ProcessArenas::of_process().blocks().forget_context(context))
    leave_block(address, facts);
}

DriverResult enable_peer_access(DriverContext peer, unsigned flags) {
  const DriverResult result = preload_state().real.cuCtxEnablePeerAccess(peer, flags);
  if (result == kDriverSuccess) note_peer_access();
  return result;
}

DriverResult primary_retain(DriverContext* context, DriverDevice device) {
  const auto retain = [=] { return preload_state().real.cuDevicePrimaryCtxRetain(context, device); };
  if (!is_device(device)) return retain();
  Primary& primary = primaries[static_cast<std::size_t>(device)];
  const std::lock_guard lock(primary.mutex);
  const DriverResult result = retain();
  if (result != kDriverSuccess) return result;
  ++primary.retained;
  primary.context = *context;
  return result;
}

template <auto kCall>
DriverResult primary_release(DriverDevice device) {
  const auto release = [=] { return (preload_state().real.*kCall)(device); };
  if (!is_device(device)) return release();
  Primary& primary = primaries[static_cast<std::size_t>(device)];
  const std::lock_guard lock(primary.mutex);
  const bool is_last = primary.retained == 1;
  if (primary.retained > 0) --primary.retained;
  if (is_last) drop_arena(device);
  const DriverResult result = release();
  if (result == kDriverSuccess && is_last) forget_context(primary.context);
  return result;
}

// Its captures and streams end with it. Its streams are forgotten before that, because new ones may get their
// handles.
DriverResult context_destroy(DriverContext context) {
  if (context != nullptr) forget_streams(context);
  const DriverResult result = preload_state().real.cuCtxDestroy_v2(context);
  if (result != kDriverSuccess) return result;
  forget_context(context);
  return result;
}

template <auto kCall>
DriverResult primary_reset(DriverDevice device) {
  const auto reset = [=] { return (preload_state().real.*kCall)(device); };
  if (!is_device(device)) return reset();
  Primary& primary = primaries[static_cast<std::size_t>(device)];
  const std::lock_guard lock(primary.mutex);
  drop_arena(device);
  const DriverResult result = reset();
  if (result == kDriverSuccess) forget_context(primary.context);
  return result;
}

// --- captures ---

template <auto kCall, bool kPerThread, typename... More>
DriverResult begin_capture(DriverStream stream, More... more) {
  const CaptureBeginning beginning;
  const DriverResult result = (preload_state().real.*kCall)(stream, more...);
  if (result == kDriverSuccess) capture_began(stream, kPerThread);
  return result;
}

// After an error the capture may go on or be over. Only here the driver can be asked about a thread's default
// stream, which any_capture cannot.
template <auto kCall, bool kPerThread>
DriverResult end_capture(DriverStream stream, DriverGraph* graph) {
  DriverResult answer = kDriverSuccess;
  const bool was_capturing = is_capturing(stream, kPerThread, &answer);
  const DriverResult result = (preload_state().real.*kCall)(stream, graph);
  if (result == kDriverSuccess || (was_capturing && !is_capturing(stream, kPerThread, &answer)))
    capture_ended(stream, kPerThread);
  return result;
}

}  // namespace

void replace_context_calls(HookedCalls* calls) {
  replace(&calls->cuDevicePrimaryCtxRetain, primary_retain);
  replace(&calls->cuDevicePrimaryCtxRelease, primary_release<&HookedCalls::cuDevicePrimaryCtxRelease>);
  replace(&calls->cuDevicePrimaryCtxRelease_v2, primary_release<&HookedCalls::cuDevicePrimaryCtxRelease_v2>);
  replace(&calls->cuDevicePrimaryCtxReset, primary_reset<&HookedCalls::cuDevicePrimaryCtxReset>);
  replace(&calls->cuDevicePrimaryCtxReset_v2, primary_reset<&HookedCalls::cuDevicePrimaryCtxReset_v2>);
  replace(&calls->cuCtxDestroy_v2, context_destroy);
  replace(&calls->cuCtxEnablePeerAccess, enable_peer_access);
  replace(&calls->cuStreamDestroy_v2, destroy_stream);
  replace(&calls->cuStreamBeginCapture, begin_capture<&HookedCalls::cuStreamBeginCapture, false>);
  replace(&calls->cuStreamBeginCapture_ptsz, begin_capture<&HookedCalls::cuStreamBeginCapture_ptsz, true>);
  replace(&calls->cuStreamBeginCapture_v2, begin_capture<&HookedCalls::cuStreamBeginCapture_v2, false>);
  replace(&calls->cuStreamBeginCapture_v2_ptsz,
          begin_capture<&HookedCalls::cuStreamBeginCapture_v2_ptsz, true>);
  replace(&calls->cuStreamBeginCaptureToGraph,
          begin_capture<&HookedCalls::cuStreamBeginCaptureToGraph, false>);
  replace(&calls->cuStreamBeginCaptureToGraph_ptsz,
          begin_capture<&HookedCalls::cuStreamBeginCaptureToGraph_ptsz, true>);
  replace(&calls->cuStreamEndCapture, end_capture<&HookedCalls::cuStreamEndCapture, false>);
  replace(&calls->cuStreamEndCapture_ptsz, end_capture<&HookedCalls::cuStreamEndCapture_ptsz, true>);
}

}  // namespace forebay
