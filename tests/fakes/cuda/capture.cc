// Stream capture: work on a capturing stream is recorded, and calls that would not be valid in a graph are
// answered with the driver's errors and end the capture. A graph replays its operations in the order of
// capture.
#include <algorithm>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

thread_local CuCaptureMode thread_mode = CuCaptureMode::kGlobal;

void invalidate(Capture& capture) {
  capture.status = CuCaptureStatus::kInvalidated;
}

// Every capture in progress.
std::vector<std::shared_ptr<Capture>> captures() {
  std::vector<std::shared_ptr<Capture>> result;
  for (const auto& [handle, stream] : driver().streams) {
    if (stream->capture != nullptr && stream->capture->origin == handle) result.push_back(stream->capture);
  }
  for (const auto& [handle, context] : driver().contexts) {
    for (const auto& [number, stream] : context->per_thread) {
      if (stream->capture != nullptr && stream->capture->origin == stream->handle)
        result.push_back(stream->capture);
    }
  }
  return result;
}

// Streams leave the capture, which is over.
void dissolve(const std::shared_ptr<Capture>& capture) {
  for (const auto& [handle, stream] : driver().streams) {
    if (stream->capture == capture) stream->capture = nullptr;
  }
  for (const auto& [handle, context] : driver().contexts) {
    for (const auto& [number, stream] : context->per_thread) {
      if (stream->capture == capture) stream->capture = nullptr;
    }
  }
}

CuResult begin(CuStream handle, CuCaptureMode mode) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (mode != CuCaptureMode::kGlobal && mode != CuCaptureMode::kThreadLocal &&
      mode != CuCaptureMode::kRelaxed) {
    return CuResult::kInvalidValue;
  }
  StreamPtr stream;
  const CuResult result = find_stream(handle, &stream);
  if (result != CuResult::kSuccess) return result;
  // A thread's own default stream can be captured.
  if (stream->legacy) return CuResult::kStreamCaptureUnsupported;
  if (stream->capture != nullptr) return CuResult::kIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->id = state.next_capture_id++;
  capture->mode = mode;
  capture->thread = thread_number();
  capture->origin = stream->handle;
  capture->graph = std::make_shared<Graph>();
  capture->graph_handle = next_handle<CuGraph>();
  capture->streams.insert(stream->handle);
  stream->capture = std::move(capture);
  return CuResult::kSuccess;
}

CuResult info(CuStream handle, CuCaptureStatus* status, std::uint64_t* id, CuGraph* graph) {
  const Lock lock(driver().mutex);
  if (status == nullptr) return CuResult::kInvalidValue;
  StreamPtr stream;
  const CuResult result = find_stream(handle, &stream);
  if (result != CuResult::kSuccess) return result;
  const CuResult implicit = stream->legacy ? refuse_implicit(stream) : CuResult::kSuccess;
  if (implicit != CuResult::kSuccess) return implicit;
  *status = stream->capture == nullptr ? CuCaptureStatus::kNone : stream->capture->status;
  if (stream->capture == nullptr) return CuResult::kSuccess;
  if (id != nullptr) *id = stream->capture->id;
  if (graph != nullptr) *graph = stream->capture->graph_handle;
  return CuResult::kSuccess;
}

}  // namespace

Graph::~Graph() {
  for (const Address begin : owned) {
    if (driver().memory.mappings().count(begin) != 0) remove_allocation(begin);
  }
}

CuResult refuse_while_capturing() {
  if (thread_mode == CuCaptureMode::kRelaxed) return CuResult::kSuccess;
  bool refused = false;
  for (const std::shared_ptr<Capture>& capture : captures()) {
    const bool mine = capture->thread == thread_number();
    const bool forbids = capture->mode == CuCaptureMode::kGlobal
                             ? mine || thread_mode == CuCaptureMode::kGlobal
                             : capture->mode == CuCaptureMode::kThreadLocal && mine;
    if (!forbids) continue;
    invalidate(*capture);
    refused = true;
  }
  return refused ? CuResult::kStreamCaptureUnsupported : CuResult::kSuccess;
}

CuResult refuse_around_captures(const ContextPtr& context) {
  bool refused = false;
  for (const std::shared_ptr<Capture>& capture : captures()) {
    const auto origin = driver().streams.find(capture->origin);
    if (origin == driver().streams.end() || origin->second->context != context) continue;
    invalidate(*capture);
    refused = true;
  }
  return refused ? CuResult::kStreamCaptureUnsupported : CuResult::kSuccess;
}

CuResult refuse_on_capturing(const StreamPtr& stream) {
  if (stream->capture == nullptr) return refuse_implicit(stream);
  if (stream->capture->status == CuCaptureStatus::kInvalidated) return CuResult::kStreamCaptureInvalidated;
  invalidate(*stream->capture);
  return CuResult::kStreamCaptureUnsupported;
}

CuResult refuse_implicit(const StreamPtr& stream) {
  if (!stream->legacy) return CuResult::kSuccess;
  bool refused = false;
  for (const auto& [handle, other] : driver().streams) {
    if (other->capture == nullptr || other->context != stream->context) continue;
    if ((other->flags & kStreamNonBlocking) != 0) continue;
    invalidate(*other->capture);
    refused = true;
  }
  return refused ? CuResult::kStreamCaptureImplicit : CuResult::kSuccess;
}

CuResult record_captured(const StreamPtr& stream, Operation operation) {
  if (stream->capture->status == CuCaptureStatus::kInvalidated) return CuResult::kStreamCaptureInvalidated;
  stream->capture->graph->operations.push_back(std::move(operation));
  if (stream->handle != stream->capture->origin) stream->capture->unjoined.insert(stream->handle);
  return CuResult::kSuccess;
}

CuResult capture_record(const StreamPtr& stream, const EventPtr& event) {
  if (stream->capture->status == CuCaptureStatus::kInvalidated) return CuResult::kStreamCaptureInvalidated;
  event->captured = stream->capture;
  event->captured_stream = stream->handle;
  return CuResult::kSuccess;
}

CuResult capture_wait(const StreamPtr& stream, const EventPtr& event, bool* handled) {
  *handled = stream->capture != nullptr || event->captured != nullptr;
  if (!*handled) return CuResult::kSuccess;
  if (stream->capture != nullptr && stream->capture->status == CuCaptureStatus::kInvalidated) {
    return CuResult::kStreamCaptureInvalidated;
  }
  if (event->captured == nullptr) {
    // Work outside the capture cannot be waited for inside it.
    invalidate(*stream->capture);
    return CuResult::kStreamCaptureIsolation;
  }
  if (event->captured->status == CuCaptureStatus::kInvalidated) return CuResult::kStreamCaptureInvalidated;
  if (stream->capture == nullptr) {
    if (stream->is_default) {
      invalidate(*event->captured);
      return CuResult::kStreamCaptureImplicit;
    }
    if (!event->captured->graph) return CuResult::kCapturedEvent;  // Its capture has ended.
    stream->capture = event->captured;
    stream->capture->streams.insert(stream->handle);
    stream->capture->unjoined.insert(stream->handle);
    return CuResult::kSuccess;
  }
  if (stream->capture != event->captured) {
    invalidate(*stream->capture);
    return CuResult::kStreamCaptureMerge;
  }
  // The streams that the origin waits for have joined it.
  if (stream->handle == stream->capture->origin) stream->capture->unjoined.erase(event->captured_stream);
  return CuResult::kSuccess;
}

CuResult cuThreadExchangeStreamCaptureMode(CuCaptureMode* mode) {
  if (mode == nullptr || (*mode != CuCaptureMode::kGlobal && *mode != CuCaptureMode::kThreadLocal &&
                          *mode != CuCaptureMode::kRelaxed)) {
    return CuResult::kInvalidValue;
  }
  std::swap(*mode, thread_mode);
  return CuResult::kSuccess;
}

CuResult cuStreamBeginCapture(CuStream stream) {
  return begin(stream, CuCaptureMode::kGlobal);
}
CuResult cuStreamBeginCapture_v2(CuStream stream, CuCaptureMode mode) {
  return begin(stream, mode);
}

CuResult cuStreamEndCapture(CuStream stream, CuGraph* graph) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (graph == nullptr) return CuResult::kInvalidValue;
  *graph = nullptr;
  StreamPtr found;
  const CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  const std::shared_ptr<Capture> capture = found->capture;
  if (capture == nullptr) return CuResult::kIllegalState;
  if (capture->mode != CuCaptureMode::kRelaxed && capture->thread != thread_number()) {
    return CuResult::kStreamCaptureWrongThread;
  }
  if (capture->origin != found->handle) {
    invalidate(*capture);
    return CuResult::kStreamCaptureUnmatched;
  }
  const bool invalidated = capture->status == CuCaptureStatus::kInvalidated;
  const bool unjoined = !capture->unjoined.empty();
  dissolve(capture);
  const GraphPtr captured = std::exchange(capture->graph, nullptr);
  if (invalidated) return CuResult::kStreamCaptureInvalidated;
  capture->status = CuCaptureStatus::kInvalidated;  // For events that still point here.
  if (unjoined) return CuResult::kStreamCaptureUnjoined;
  state.graphs[capture->graph_handle] = captured;
  *graph = capture->graph_handle;
  return CuResult::kSuccess;
}

CuResult cuStreamIsCapturing(CuStream stream, CuCaptureStatus* status) {
  return info(stream, status, nullptr, nullptr);
}
CuResult cuStreamGetCaptureInfo(CuStream stream, CuCaptureStatus* status, std::uint64_t* id) {
  return info(stream, status, id, nullptr);
}
CuResult cuStreamGetCaptureInfo_v2(CuStream stream, CuCaptureStatus* status, std::uint64_t* id,
                                   CuGraph* graph, const CuGraphNode** dependencies,
                                   std::size_t* dependency_count) {
  if (dependencies != nullptr) *dependencies = nullptr;
  if (dependency_count != nullptr) *dependency_count = 0;
  return info(stream, status, id, graph);
}
CuResult cuStreamGetCaptureInfo_v3(CuStream stream, CuCaptureStatus* status, std::uint64_t* id,
                                   CuGraph* graph, const CuGraphNode** dependencies,
                                   const CuGraphEdgeData** edges, std::size_t* dependency_count) {
  if (edges != nullptr) *edges = nullptr;
  return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, dependency_count);
}

// Counts the nodes; they have no handles here.
CuResult cuGraphGetNodes(CuGraph graph, CuGraphNode* nodes, std::size_t* count) {
  const Lock lock(driver().mutex);
  const auto found = driver().graphs.find(graph);
  if (found == driver().graphs.end() || count == nullptr) return CuResult::kInvalidValue;
  if (nodes != nullptr) return CuResult::kNotSupported;
  *count = found->second->operations.size();
  return CuResult::kSuccess;
}

CuResult cuGraphDestroy(CuGraph graph) {
  const Lock lock(driver().mutex);
  return driver().graphs.erase(graph) != 0 ? CuResult::kSuccess : CuResult::kInvalidValue;
}

CuResult cuGraphInstantiateWithFlags(CuGraphExec* exec, CuGraph graph, unsigned long long) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  const auto found = state.graphs.find(graph);
  if (exec == nullptr || found == state.graphs.end()) return CuResult::kInvalidValue;
  *exec = next_handle<CuGraphExec>();
  state.graph_execs[*exec] = found->second;  // Operations never change after capture.
  return CuResult::kSuccess;
}

CuResult cuGraphLaunch(CuGraphExec exec, CuStream stream) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  const auto found = state.graph_execs.find(exec);
  if (found == state.graph_execs.end()) return CuResult::kInvalidValue;
  StreamPtr target;
  const CuResult result = find_stream(stream, &target);
  if (result != CuResult::kSuccess) return result;
  for (Operation operation : found->second->operations) {
    operation.mark = std::make_shared<Mark>();
    const CuResult queued = enqueue(target, std::move(operation));
    if (queued != CuResult::kSuccess) return queued;
  }
  return CuResult::kSuccess;
}

CuResult cuGraphExecDestroy(CuGraphExec exec) {
  const Lock lock(driver().mutex);
  return driver().graph_execs.erase(exec) != 0 ? CuResult::kSuccess : CuResult::kInvalidValue;
}

}  // namespace forebay::fake_cuda
