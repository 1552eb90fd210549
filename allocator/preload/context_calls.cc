// Calls that end memory or streams: reset and release of a device's context, destruction of a stream. And
// calls that begin or end a capture.
#include <atomic>

#include "allocator/preload/accounts.h"
#include "allocator/preload/pool_calls.h"
#include "allocator/preload/routes.h"

namespace forebay {
namespace {

// How often the program has retained the device's primary context. The arena retains it once more.
constinit std::atomic<int> retained[kPreloadDeviceLimit] = {};

bool is_device(DriverDevice device) {
  return device >= 0 && device < kPreloadDeviceLimit;
}

// Called before the device's context goes away with all its memory. The arena's chunks belong to no context
// and would stay.
void drop_arena(DriverDevice device) {
  void* context = nullptr;
  {
    const ProcessArenas::Use use = ProcessArenas::of_process().find(device);
    if (!use) return;
    (void)wait_for_device(use);
    context = use.context();
  }
  forget_streams(context);
  for (const auto& [address, facts] : ProcessArenas::of_process().drop(device)) leave_block(address, facts);
  note_reserved(device, nullptr);
  forget_pool_use(device);
}

DriverResult primary_retain(DriverContext* context, DriverDevice device) {
  const DriverResult result = preload_state().real.cuDevicePrimaryCtxRetain(context, device);
  if (result == kDriverSuccess && is_device(device)) retained[device].fetch_add(1, std::memory_order_relaxed);
  return result;
}

DriverResult release(DriverDevice device, Driver_cuDevicePrimaryCtxRelease* by_driver) {
  if (is_device(device)) {
    const int before = retained[device].load(std::memory_order_relaxed);
    if (before > 0) retained[device].fetch_sub(1, std::memory_order_relaxed);
    if (before == 1) drop_arena(device);
  }
  return by_driver(device);
}

DriverResult primary_release(DriverDevice device) {
  return release(device, preload_state().real.cuDevicePrimaryCtxRelease);
}
DriverResult primary_release_v2(DriverDevice device) {
  return release(device, preload_state().real.cuDevicePrimaryCtxRelease_v2);
}

DriverResult primary_reset(DriverDevice device) {
  if (is_device(device)) drop_arena(device);
  return preload_state().real.cuDevicePrimaryCtxReset(device);
}
DriverResult primary_reset_v2(DriverDevice device) {
  if (is_device(device)) drop_arena(device);
  return preload_state().real.cuDevicePrimaryCtxReset_v2(device);
}

DriverResult stream_destroy(DriverStream stream) {
  return destroy_stream(stream);
}

// --- captures ---

DriverResult begun(DriverResult result, DriverStream stream, bool per_thread) {
  if (result == kDriverSuccess) capture_began(stream, per_thread);
  return result;
}

DriverResult begin_capture(DriverStream stream) {
  return begun(preload_state().real.cuStreamBeginCapture(stream), stream, false);
}
DriverResult begin_capture_ptsz(DriverStream stream) {
  return begun(preload_state().real.cuStreamBeginCapture_ptsz(stream), stream, true);
}
DriverResult begin_capture_v2(DriverStream stream, unsigned mode) {
  return begun(preload_state().real.cuStreamBeginCapture_v2(stream, mode), stream, false);
}
DriverResult begin_capture_v2_ptsz(DriverStream stream, unsigned mode) {
  return begun(preload_state().real.cuStreamBeginCapture_v2_ptsz(stream, mode), stream, true);
}
DriverResult begin_capture_to_graph(DriverStream stream, DriverGraph graph,
                                    const DriverGraphNode* dependencies, const void* edges, std::size_t count,
                                    unsigned mode) {
  return begun(
      preload_state().real.cuStreamBeginCaptureToGraph(stream, graph, dependencies, edges, count, mode),
      stream, false);
}
DriverResult begin_capture_to_graph_ptsz(DriverStream stream, DriverGraph graph,
                                         const DriverGraphNode* dependencies, const void* edges,
                                         std::size_t count, unsigned mode) {
  return begun(
      preload_state().real.cuStreamBeginCaptureToGraph_ptsz(stream, graph, dependencies, edges, count, mode),
      stream, true);
}

// After an error the capture may go on or be over; any_capture asks the driver.
DriverResult ended(DriverResult result, DriverStream stream, bool per_thread) {
  if (result == kDriverSuccess) capture_ended(stream, per_thread);
  return result;
}

DriverResult end_capture(DriverStream stream, DriverGraph* graph) {
  return ended(preload_state().real.cuStreamEndCapture(stream, graph), stream, false);
}
DriverResult end_capture_ptsz(DriverStream stream, DriverGraph* graph) {
  return ended(preload_state().real.cuStreamEndCapture_ptsz(stream, graph), stream, true);
}

}  // namespace

void replace_context_calls(HookedCalls* calls) {
  replace(&calls->cuDevicePrimaryCtxRetain, primary_retain);
  replace(&calls->cuDevicePrimaryCtxRelease, primary_release);
  replace(&calls->cuDevicePrimaryCtxRelease_v2, primary_release_v2);
  replace(&calls->cuDevicePrimaryCtxReset, primary_reset);
  replace(&calls->cuDevicePrimaryCtxReset_v2, primary_reset_v2);
  replace(&calls->cuStreamDestroy_v2, stream_destroy);
  replace(&calls->cuStreamBeginCapture, begin_capture);
  replace(&calls->cuStreamBeginCapture_ptsz, begin_capture_ptsz);
  replace(&calls->cuStreamBeginCapture_v2, begin_capture_v2);
  replace(&calls->cuStreamBeginCapture_v2_ptsz, begin_capture_v2_ptsz);
  replace(&calls->cuStreamBeginCaptureToGraph, begin_capture_to_graph);
  replace(&calls->cuStreamBeginCaptureToGraph_ptsz, begin_capture_to_graph_ptsz);
  replace(&calls->cuStreamEndCapture, end_capture);
  replace(&calls->cuStreamEndCapture_ptsz, end_capture_ptsz);
}

}  // namespace forebay
