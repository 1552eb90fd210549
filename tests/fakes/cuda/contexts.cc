// Contexts: current, primary and created ones, peers, and failed contexts.
#include <algorithm>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

// The stack of cuCtxSetCurrent, Push and Pop. Handles are never used twice, so one left over from before a
// reset is known to be stale. It has no destructor: destructors of a program's thread-locals may call the
// driver.
class ContextStack {
 public:
  bool empty() const { return count_ == 0; }
  CuContext& back() { return handles_[count_ - 1]; }
  // False if it is full.
  bool push(CuContext context) {
    if (count_ == kMost) return false;
    handles_[count_++] = context;
    return true;
  }
  void pop() { --count_; }

 private:
  static constexpr std::size_t kMost = 16;  // Static memory of threads is scarce in a namespace of dlmopen().
  CuContext handles_[kMost] = {};
  std::size_t count_ = 0;
};
thread_local constinit ContextStack current_stack;

CuResult retain_primary(int device, ContextPtr* result) {
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  const ContextPtr& context = driver().devices[static_cast<std::size_t>(device)].primary;
  context->alive = true;
  *result = context;
  return CuResult::kSuccess;
}

CuResult reset_primary(CuDevice device) {
  Lock lock(driver().mutex);
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  const ContextPtr context = driver().devices[static_cast<std::size_t>(device)].primary;
  const bool retained = context->retain_count != 0;
  if (context->alive) destroy_context(lock, context);
  context->alive = retained;  // Its retainers go on with a fresh one.
  return CuResult::kSuccess;
}

CuResult create_context(CuContext* result, unsigned flags, CuDevice device) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (result == nullptr || (flags & ~kContextFlagsMask) != 0) return CuResult::kInvalidValue;
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  auto context = std::make_shared<Context>();
  context->handle = next_handle<CuContext>();
  context->device = device;
  context->alive = true;
  context->flags = flags;
  if (!current_stack.push(context->handle)) return CuResult::kOutOfMemory;
  state.contexts[context->handle] = context;
  *result = context->handle;
  return CuResult::kSuccess;
}

}  // namespace

bool valid_device(int device) {
  return device >= 0 && device < driver().options.device_count;
}

bool can_access_peer(int device, int peer) {
  return driver().options.peers && device != peer && valid_device(device) && valid_device(peer);
}

ContextPtr find_context(CuContext handle) {
  const auto found = driver().contexts.find(handle);
  return found == driver().contexts.end() ? nullptr : found->second;
}

CuResult current_context(ContextPtr* result) {
  if (current_stack.empty() || current_stack.back() == nullptr) return CuResult::kInvalidContext;
  const ContextPtr context = find_context(current_stack.back());
  if (context == nullptr) return CuResult::kInvalidContext;
  if (!context->alive) return CuResult::kContextIsDestroyed;
  *result = context;
  return context->sticky;
}

bool is_sticky(CuResult result) {
  switch (result) {
    case CuResult::kEccUncorrectable:
    case CuResult::kNvlinkUncorrectable:
    case CuResult::kContained:
    case CuResult::kIllegalAddress:
    case CuResult::kLaunchTimeout:
    case CuResult::kAssert:
    case CuResult::kHardwareStackError:
    case CuResult::kIllegalInstruction:
    case CuResult::kMisalignedAddress:
    case CuResult::kInvalidAddressSpace:
    case CuResult::kInvalidPc:
    case CuResult::kLaunchFailed:
      return true;
    default:
      return false;
  }
}

void fail_context(Context& context, CuResult failure) {
  if (context.sticky == CuResult::kSuccess) context.sticky = failure;
}

CuResult stream_failure(const Stream& stream) {
  if (stream.context->sticky != CuResult::kSuccess) return stream.context->sticky;
  return stream.failure;
}

void fail_stream(Stream& stream, CuResult result) {
  if (is_sticky(result)) {
    fail_context(*stream.context, result);
  } else if (stream.failure == CuResult::kSuccess) {
    stream.failure = result;
  }
}

void hazard(Context& context, const char* entry, const std::string& what) {
  ++driver().hazards;
  report("HAZARD in %s: %s", entry, what.c_str());
  fail_context(context, CuResult::kIllegalAddress);
}

void destroy_context(Lock& lock, const ContextPtr& context) {
  Driver& state = driver();
  // Work still queued is dropped, as on a device that is being reset; running work is waited for.
  if (context->sticky == CuResult::kSuccess) context->sticky = CuResult::kContextIsDestroyed;
  context->alive = false;
  std::vector<MarkPtr> last;
  for (const StreamPtr& stream : state.scheduler.busy()) {
    if (stream->context == context) last.push_back(stream->last);
  }
  for (const MarkPtr& mark : last) state.scheduler.wait(lock, mark);

  for (auto i = state.streams.begin(); i != state.streams.end();) {
    const bool mine = i->second->context == context;
    state.orphans += mine;
    if (mine && i->second->capture == nullptr) state.old_streams.push_back(i->first);
    i = mine ? state.streams.erase(i) : std::next(i);
  }
  for (auto i = state.events.begin(); i != state.events.end();) {
    const bool mine = i->second->context == context;
    state.orphans += mine;
    if (mine) state.old_events.push_back(i->first);
    i = mine ? state.events.erase(i) : std::next(i);
  }
  for (auto i = state.modules.begin(); i != state.modules.end();) {
    const bool mine = i->second.context == context;
    state.orphans += mine;
    if (mine)
      std::erase_if(state.functions, [&](const auto& entry) { return entry.second.module == i->first; });
    i = mine ? state.modules.erase(i) : std::next(i);
  }
  std::vector<Address> allocations;
  for (const auto& [begin, mapping] : state.memory.mappings()) {
    // Memory of cuMemCreate belongs to no context and stays.
    if (mapping.kind != MappingKind::kVirtual && mapping.context.lock() == context)
      allocations.push_back(begin);
  }
  state.orphans += allocations.size();
  for (const Address begin : allocations) remove_allocation(begin);
  context->legacy = nullptr;
  context->per_thread.clear();
  context->peers.clear();
  for (const auto& [handle, other] : state.contexts) other->peers.erase(context->handle);
  context->sticky = CuResult::kSuccess;
}

CuResult cuDevicePrimaryCtxRetain(CuContext* context, CuDevice device) {
  const Lock lock(driver().mutex);
  if (context == nullptr) return CuResult::kInvalidValue;
  ContextPtr primary;
  const CuResult result = retain_primary(device, &primary);
  if (result != CuResult::kSuccess) return result;
  ++primary->retain_count;
  *context = primary->handle;
  return CuResult::kSuccess;
}

CuResult cuDevicePrimaryCtxRelease_v2(CuDevice device) {
  Lock lock(driver().mutex);
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  const ContextPtr context = driver().devices[static_cast<std::size_t>(device)].primary;
  if (context->retain_count == 0) return CuResult::kInvalidContext;
  if (--context->retain_count == 0) destroy_context(lock, context);
  return CuResult::kSuccess;
}
CuResult cuDevicePrimaryCtxRelease(CuDevice device) {
  return cuDevicePrimaryCtxRelease_v2(device);
}

CuResult cuDevicePrimaryCtxGetState(CuDevice device, unsigned* flags, int* active) {
  const Lock lock(driver().mutex);
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  const ContextPtr& context = driver().devices[static_cast<std::size_t>(device)].primary;
  if (flags != nullptr) *flags = context->flags;
  if (active != nullptr) *active = context->alive ? 1 : 0;
  return CuResult::kSuccess;
}

CuResult cuDevicePrimaryCtxSetFlags_v2(CuDevice device, unsigned flags) {
  const Lock lock(driver().mutex);
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  if ((flags & ~kContextFlagsMask) != 0) return CuResult::kInvalidValue;
  driver().devices[static_cast<std::size_t>(device)].primary->flags = flags;
  return CuResult::kSuccess;
}
CuResult cuDevicePrimaryCtxSetFlags(CuDevice device, unsigned flags) {
  return cuDevicePrimaryCtxSetFlags_v2(device, flags);
}

CuResult cuDevicePrimaryCtxReset_v2(CuDevice device) {
  return reset_primary(device);
}
CuResult cuDevicePrimaryCtxReset(CuDevice device) {
  return reset_primary(device);
}

CuResult cuCtxCreate_v2(CuContext* context, unsigned flags, CuDevice device) {
  return create_context(context, flags, device);
}
CuResult cuCtxCreate_v3(CuContext* context, void* affinities, int affinity_count, unsigned flags,
                        CuDevice device) {
  if (affinities != nullptr || affinity_count != 0) return CuResult::kUnsupportedExecAffinity;
  return create_context(context, flags, device);
}
CuResult cuCtxCreate_v4(CuContext* context, void* parameters, unsigned flags, CuDevice device) {
  if (parameters != nullptr) return CuResult::kNotSupported;
  return create_context(context, flags, device);
}

CuResult cuCtxDestroy_v2(CuContext context) {
  Driver& state = driver();
  Lock lock(state.mutex);
  const ContextPtr found = find_context(context);
  if (found == nullptr || found->primary) return CuResult::kInvalidContext;
  destroy_context(lock, found);
  state.contexts.erase(context);
  if (!current_stack.empty() && current_stack.back() == context) current_stack.pop();
  return CuResult::kSuccess;
}

CuResult cuCtxSetCurrent(CuContext context) {
  const Lock lock(driver().mutex);
  if (context != nullptr && find_context(context) == nullptr) return CuResult::kInvalidContext;
  if (current_stack.empty()) {
    if (context != nullptr) current_stack.push(context);
  } else if (context == nullptr) {
    current_stack.pop();
  } else {
    current_stack.back() = context;
  }
  return CuResult::kSuccess;
}

CuResult cuCtxGetCurrent(CuContext* context) {
  if (context == nullptr) return CuResult::kInvalidValue;
  const Lock lock(driver().mutex);
  *context = current_stack.empty() ? nullptr : current_stack.back();
  if (find_context(*context) == nullptr) *context = nullptr;
  return CuResult::kSuccess;
}

CuResult cuCtxPushCurrent_v2(CuContext context) {
  const Lock lock(driver().mutex);
  if (find_context(context) == nullptr) return CuResult::kInvalidContext;
  if (!current_stack.push(context)) return CuResult::kOutOfMemory;
  return CuResult::kSuccess;
}

CuResult cuCtxPopCurrent_v2(CuContext* context) {
  if (current_stack.empty()) return CuResult::kInvalidContext;
  if (context != nullptr) *context = current_stack.back();
  current_stack.pop();
  return CuResult::kSuccess;
}

CuResult cuCtxGetDevice(CuDevice* device) {
  const Lock lock(driver().mutex);
  if (device == nullptr) return CuResult::kInvalidValue;
  ContextPtr context;
  current_context(&context);
  if (context == nullptr) return CuResult::kInvalidContext;
  *device = context->device;
  return CuResult::kSuccess;
}

CuResult cuCtxGetDevice_v2(CuDevice* device, CuContext context) {
  if (context == nullptr) return cuCtxGetDevice(device);
  const Lock lock(driver().mutex);
  if (device == nullptr) return CuResult::kInvalidValue;
  const ContextPtr found = find_context(context);
  if (found == nullptr) return CuResult::kInvalidContext;
  *device = found->device;
  return CuResult::kSuccess;
}

CuResult cuCtxGetApiVersion(CuContext context, unsigned* version) {
  const Lock lock(driver().mutex);
  if (version == nullptr) return CuResult::kInvalidValue;
  if (context != nullptr && find_context(context) == nullptr) return CuResult::kInvalidContext;
  *version = 3020;
  return CuResult::kSuccess;
}

CuResult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  const Lock lock(driver().mutex);
  ContextPtr context;
  const CuResult result = current_context(&context);
  if (result != CuResult::kSuccess) return result;
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return CuResult::kSuccess;
}

CuResult cuCtxSynchronize() {
  Lock lock(driver().mutex);
  ContextPtr context;
  CuResult result = current_context(&context);
  if (result != CuResult::kSuccess) return result;
  result = refuse_while_capturing();
  if (result != CuResult::kSuccess) return result;
  result = refuse_around_captures(context);
  if (result != CuResult::kSuccess) return result;
  result = wait_for_context(lock, context);
  trim_pools();
  return result;
}

CuResult cuCtxSynchronize_v2(CuContext context) {
  if (context == nullptr) return cuCtxSynchronize();
  Lock lock(driver().mutex);
  const ContextPtr found = find_context(context);
  if (found == nullptr) return CuResult::kInvalidContext;
  CuResult result = refuse_around_captures(found);
  if (result != CuResult::kSuccess) return result;
  result = wait_for_context(lock, found);
  trim_pools();
  return result;
}

CuResult cuCtxEnablePeerAccess(CuContext peer, unsigned flags) {
  const Lock lock(driver().mutex);
  ContextPtr context;
  const CuResult result = current_context(&context);
  if (result != CuResult::kSuccess) return result;
  const ContextPtr other = find_context(peer);
  if (other == nullptr) return CuResult::kInvalidContext;
  if (flags != 0) return CuResult::kInvalidValue;
  if (other == context) return CuResult::kInvalidContext;
  if (!can_access_peer(context->device, other->device)) return CuResult::kPeerAccessUnsupported;
  return context->peers.insert(peer).second ? CuResult::kSuccess : CuResult::kPeerAccessAlreadyEnabled;
}

CuResult cuCtxDisablePeerAccess(CuContext peer) {
  const Lock lock(driver().mutex);
  ContextPtr context;
  const CuResult result = current_context(&context);
  if (result != CuResult::kSuccess) return result;
  if (find_context(peer) == nullptr) return CuResult::kInvalidContext;
  return context->peers.erase(peer) != 0 ? CuResult::kSuccess : CuResult::kPeerAccessNotEnabled;
}

}  // namespace forebay::fake_cuda
