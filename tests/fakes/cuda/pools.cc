// Memory pools and allocation in the order of a stream.
//
// A block is used again where the order is certain: on the stream it was freed on, or once its free has run.
// It becomes usable when its allocation runs and stops being so when its free runs, and work that comes too
// early or too late is a hazard.
#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

// The memory that a pool takes from the device at a time.
constexpr std::size_t kBlockBytes = 64 << 10;
// The unit of used bytes.
constexpr std::size_t kUseBytes = 512;

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

CuResult find_pool(CuMemoryPool handle, PoolPtr* result) {
  const auto found = driver().pools.find(handle);
  if (found == driver().pools.end()) return CuResult::kInvalidValue;
  *result = found->second;
  return CuResult::kSuccess;
}

void count_use(Pool& pool, std::size_t bytes) {
  pool.used += round_up(bytes, kUseBytes);
  pool.used_high = std::max(pool.used_high, pool.used);
}

// Gives blocks back until no more than `keep` bytes are reserved. Blocks with a pending free stay.
void trim(Pool& pool, std::uint64_t keep) {
  if (pool.reserved <= keep) return;
  std::vector<Address> gone;
  for (const auto& [begin, mapping] : driver().memory.mappings()) {
    if (mapping.kind != MappingKind::kPool || mapping.pool.get() != &pool || !mapping.freed) continue;
    if (mapping.free_mark != nullptr && !mapping.free_mark->done) continue;
    if (pool.reserved <= keep) break;
    pool.reserved -= mapping.bytes;
    gone.push_back(begin);
  }
  for (const Address begin : gone) remove_allocation(begin);
}

// A freed block that the stream may have, or null.
Mapping* find_block(const Pool& pool, std::size_t bytes, const Stream& stream) {
  Mapping* best = nullptr;
  for (auto& [begin, mapping] : driver().memory.mappings()) {
    if (mapping.kind != MappingKind::kPool || mapping.pool.get() != &pool || !mapping.freed) continue;
    if (mapping.bytes < bytes || mapping.bytes > 2 * bytes)
      continue;  // Larger ones stay for larger requests.
    const bool ran = mapping.free_mark == nullptr || mapping.free_mark->done;
    const bool ordered = mapping.free_stream_id == stream.id || (ran && pool.reuse_opportunistic != 0);
    if (ordered && (best == nullptr || mapping.bytes < best->bytes)) best = &mapping;
  }
  return best;
}

CuResult make_block(const PoolPtr& pool, std::size_t bytes, const ContextPtr& context, Mapping** result) {
  Memory& memory = driver().memory;
  Mapping mapping;
  mapping.bytes = bytes;
  mapping.kind = MappingKind::kPool;
  mapping.pool = pool;
  mapping.context = context;
  // Until the allocation is reached on its stream. A block that is used again was available there since its
  // free.
  mapping.available = false;
  CuMemAllocationProp properties{};
  properties.type = CuMemAllocationType::kPinned;
  properties.requested_handle_types = pool->properties.handle_types;
  properties.location = {CuMemLocationType::kDevice, pool->device};
  if (pool->properties.max_bytes != 0 && pool->reserved + bytes > pool->properties.max_bytes) {
    return CuResult::kOutOfMemory;
  }
  CuResult made = memory.create_physical(pool->device, bytes, properties, &mapping.physical);
  if (made != CuResult::kSuccess) {
    for (const auto& [handle, other] : driver().pools) {
      if (other->device == pool->device) trim(*other, 0);
    }
    made = memory.create_physical(pool->device, bytes, properties, &mapping.physical);
    if (made != CuResult::kSuccess) return made;
  }
  made = memory.reserve(bytes, kPageBytes, 0, true, &mapping.begin);
  if (made != CuResult::kSuccess) return made;
  const Address begin = mapping.begin;
  Mapping& added = memory.add_mapping(std::move(mapping));
  made = memory.open(added);
  if (made != CuResult::kSuccess) {
    remove_allocation(begin);
    return made;
  }
  pool->reserved += bytes;
  pool->reserved_high = std::max(pool->reserved_high, pool->reserved);
  *result = &added;
  return CuResult::kSuccess;
}

CuResult allocate_from(CuDevicePtr* address, std::size_t bytes, PoolPtr pool, const StreamPtr& stream) {
  Driver& state = driver();
  if (bytes > state.memory.capacity()) return CuResult::kOutOfMemory;
  if (stream->capture != nullptr && stream->capture->status == CuCaptureStatus::kInvalidated) {
    return CuResult::kStreamCaptureInvalidated;
  }
  const std::size_t block_bytes = round_up(bytes, kBlockBytes);
  const bool capturing = stream->capture != nullptr;
  Mapping* block = capturing ? nullptr : find_block(*pool, block_bytes, *stream);
  if (block == nullptr) {
    const CuResult made = make_block(pool, block_bytes, stream->context, &block);
    if (made != CuResult::kSuccess) return made;
  }
  const Address begin = block->begin;
  block->requested_bytes = bytes;
  block->freed = false;
  block->free_mark = nullptr;
  *address = begin;
  if (capturing) {
    // The graph owns it: it is there at every launch, and goes with the graph.
    pool->reserved -= block->bytes;
    block->available = true;
    block->graph_owned = true;
    stream->capture->graph->owned.push_back(begin);
    return record_captured(stream, {});
  }
  count_use(*pool, bytes);
  block->context = stream->context;
  Operation operation;
  operation.what = "cuMemAllocAsync";
  operation.run = [begin](Lock&) {
    if (Mapping* const mapping = driver().memory.find(begin)) mapping->available = true;
    return CuResult::kSuccess;
  };
  const CuResult queued = enqueue(stream, std::move(operation));
  if (queued == CuResult::kSuccess) return queued;
  pool->used -= round_up(bytes, kUseBytes);
  block->freed = true;
  return queued;
}

// Whether work queued before `serial` on another stream still uses the range: nothing orders it before the
// free.
bool used_elsewhere(std::uint64_t stream_id, std::uint64_t serial, Address begin, std::size_t bytes) {
  for (const StreamPtr& stream : driver().scheduler.busy()) {
    if (stream->id == stream_id) continue;
    for (const Operation& operation : stream->queue) {
      if (operation.serial > serial) break;
      for (const Range& range : operation.touches) {
        if (range.begin < begin + bytes && begin < range.end) return true;
      }
    }
  }
  return false;
}

CuResult free_in_order(Mapping& mapping, const StreamPtr& stream) {
  const Address begin = mapping.begin;
  const std::size_t bytes = mapping.bytes;
  Operation operation;
  operation.what = "cuMemFreeAsync";
  if (mapping.kind == MappingKind::kAllocation) {
    operation.run = [begin](Lock&) {
      if (driver().memory.mappings().count(begin) != 0) remove_allocation(begin);
      return CuResult::kSuccess;
    };
    return enqueue(stream, std::move(operation));
  }
  const MarkPtr mark = operation.mark;
  const std::uint64_t serial = driver().scheduler.next_serial();
  operation.run = [begin, bytes, stream_id = stream->id, serial, context = stream->context, mark](Lock&) {
    Driver& state = driver();
    Mapping* const found = state.memory.find(begin);
    if (found == nullptr) return CuResult::kSuccess;
    if (used_elsewhere(stream_id, serial, begin, bytes)) {
      hazard(*context, "cuMemFreeAsync",
             "another stream still uses the memory and nothing makes the free wait for it");
      return CuResult::kIllegalAddress;
    }
    found->available = false;
    if (state.options.poison) found->physical->fill_with_poison();
    return CuResult::kSuccess;
  };
  const CuResult queued = enqueue(stream, std::move(operation));
  if (queued != CuResult::kSuccess) return queued;
  mapping.freed = true;
  mapping.free_mark = mark;
  mapping.free_stream_id = stream->id;
  mapping.pool->used -= round_up(mapping.requested_bytes, kUseBytes);
  return CuResult::kSuccess;
}

}  // namespace

PoolPtr make_pool(int device, const CuMemPoolProps& properties, bool is_default) {
  Driver& state = driver();
  auto pool = std::make_shared<Pool>();
  pool->handle = next_handle<CuMemoryPool>();
  pool->device = device;
  pool->is_default = is_default;
  pool->properties = properties;
  pool->access.assign(static_cast<std::size_t>(state.options.device_count), CuMemAccessFlags::kNone);
  pool->access[static_cast<std::size_t>(device)] = CuMemAccessFlags::kReadWrite;
  state.pools[pool->handle] = pool;
  return pool;
}

void trim_pools() {
  for (const auto& [handle, pool] : driver().pools) trim(*pool, pool->release_threshold);
}

CuResult free_pool_block(Lock& lock, Mapping& mapping) {
  Driver& state = driver();
  const Address begin = mapping.begin;
  if (mapping.freed || mapping.graph_owned) return CuResult::kInvalidValue;
  check_unused(lock, "cuMemFree", begin, mapping.bytes);
  Mapping* const found = state.memory.find(begin);
  if (found == nullptr || found->freed) return CuResult::kInvalidValue;
  found->freed = true;
  found->available = false;
  found->free_mark = nullptr;
  if (state.options.poison) found->physical->fill_with_poison();
  const PoolPtr pool = found->pool;
  pool->used -= round_up(found->requested_bytes, kUseBytes);
  trim(*pool, pool->destroyed ? 0 : pool->release_threshold);
  return CuResult::kSuccess;
}

CuResult cuMemAllocFromPoolAsync(CuDevicePtr* address, std::size_t bytes, CuMemoryPool pool,
                                 CuStream stream) {
  const Lock lock(driver().mutex);
  if (address == nullptr || bytes == 0) return CuResult::kInvalidValue;
  StreamPtr found;
  CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  PoolPtr from;
  result = find_pool(pool, &from);
  return result == CuResult::kSuccess ? allocate_from(address, bytes, from, found) : result;
}

CuResult cuMemAllocAsync(CuDevicePtr* address, std::size_t bytes, CuStream stream) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (address == nullptr || bytes == 0) return CuResult::kInvalidValue;
  StreamPtr found;
  const CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  return allocate_from(address, bytes,
                       state.devices[static_cast<std::size_t>(found->context->device)].current_pool, found);
}

CuResult cuMemFreeAsync(CuDevicePtr address, CuStream stream) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (address == 0) return CuResult::kSuccess;
  StreamPtr found;
  const CuResult result = find_stream(stream, &found);
  if (result != CuResult::kSuccess) return result;
  Mapping* const mapping = state.memory.find(address);
  if (mapping == nullptr || mapping->begin != address || mapping->freed ||
      (mapping->kind != MappingKind::kPool && mapping->kind != MappingKind::kAllocation)) {
    return CuResult::kInvalidValue;
  }
  if (found->capture != nullptr) {
    // A free node: of memory that a graph allocated, once in each graph.
    std::set<Address>& freed = found->capture->graph->freed;
    if (!mapping->graph_owned || freed.count(address) != 0) return CuResult::kInvalidValue;
    const CuResult recorded = record_captured(found, {});
    if (recorded == CuResult::kSuccess) freed.insert(address);
    return recorded;
  }
  if (mapping->graph_owned) return CuResult::kInvalidValue;
  return free_in_order(*mapping, found);
}

CuResult cuMemPoolCreate(CuMemoryPool* pool, const CuMemPoolProps* properties) {
  const Lock lock(driver().mutex);
  if (pool == nullptr || properties == nullptr || properties->type != CuMemAllocationType::kPinned) {
    return CuResult::kInvalidValue;
  }
  if (properties->location.type != CuMemLocationType::kDevice) return CuResult::kNotSupported;
  if (!valid_device(properties->location.id)) return CuResult::kInvalidDevice;
  if (properties->handle_types != CuMemHandleType::kNone &&
      properties->handle_types != CuMemHandleType::kPosixFileDescriptor) {
    return CuResult::kNotSupported;
  }
  *pool = make_pool(properties->location.id, *properties, false)->handle;
  return CuResult::kSuccess;
}

CuResult cuMemPoolDestroy(CuMemoryPool pool) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  PoolPtr found;
  const CuResult result = find_pool(pool, &found);
  if (result != CuResult::kSuccess) return result;
  if (found->is_default) return CuResult::kInvalidValue;
  Device& device = state.devices[static_cast<std::size_t>(found->device)];
  if (device.current_pool == found) device.current_pool = device.default_pool;
  found->destroyed = true;
  found->release_threshold = 0;
  trim(*found, 0);
  state.pools.erase(pool);
  return CuResult::kSuccess;
}

CuResult cuMemPoolSetAttribute(CuMemoryPool pool, CuMemPoolAttribute attribute, void* value) {
  const Lock lock(driver().mutex);
  PoolPtr found;
  const CuResult result = find_pool(pool, &found);
  if (result != CuResult::kSuccess) return result;
  if (value == nullptr) return CuResult::kInvalidValue;
  using enum CuMemPoolAttribute;
  switch (attribute) {
    case kReuseFollowEventDependencies:
      found->reuse_follow = *static_cast<int*>(value);
      return CuResult::kSuccess;
    case kReuseAllowOpportunistic:
      found->reuse_opportunistic = *static_cast<int*>(value);
      return CuResult::kSuccess;
    case kReuseAllowInternalDependencies:
      found->reuse_internal = *static_cast<int*>(value);
      return CuResult::kSuccess;
    case kReleaseThreshold:
      found->release_threshold = *static_cast<std::uint64_t*>(value);
      return CuResult::kSuccess;
    case kReservedMemHigh:
      if (*static_cast<std::uint64_t*>(value) != 0) return CuResult::kInvalidValue;
      found->reserved_high = found->reserved;
      return CuResult::kSuccess;
    case kUsedMemHigh:
      if (*static_cast<std::uint64_t*>(value) != 0) return CuResult::kInvalidValue;
      found->used_high = found->used;
      return CuResult::kSuccess;
    default:
      return CuResult::kInvalidValue;
  }
}

CuResult cuMemPoolGetAttribute(CuMemoryPool pool, CuMemPoolAttribute attribute, void* value) {
  const Lock lock(driver().mutex);
  PoolPtr found;
  const CuResult result = find_pool(pool, &found);
  if (result != CuResult::kSuccess) return result;
  if (value == nullptr) return CuResult::kInvalidValue;
  using enum CuMemPoolAttribute;
  switch (attribute) {
    case kReuseFollowEventDependencies:
      *static_cast<int*>(value) = found->reuse_follow;
      return CuResult::kSuccess;
    case kReuseAllowOpportunistic:
      *static_cast<int*>(value) = found->reuse_opportunistic;
      return CuResult::kSuccess;
    case kReuseAllowInternalDependencies:
      *static_cast<int*>(value) = found->reuse_internal;
      return CuResult::kSuccess;
    case kReleaseThreshold:
      *static_cast<std::uint64_t*>(value) = found->release_threshold;
      return CuResult::kSuccess;
    case kReservedMemCurrent:
      *static_cast<std::uint64_t*>(value) = found->reserved;
      return CuResult::kSuccess;
    case kReservedMemHigh:
      *static_cast<std::uint64_t*>(value) = found->reserved_high;
      return CuResult::kSuccess;
    case kUsedMemCurrent:
      *static_cast<std::uint64_t*>(value) = found->used;
      return CuResult::kSuccess;
    case kUsedMemHigh:
      *static_cast<std::uint64_t*>(value) = found->used_high;
      return CuResult::kSuccess;
  }
  return CuResult::kInvalidValue;
}

CuResult cuMemPoolTrimTo(CuMemoryPool pool, std::size_t keep_bytes) {
  const Lock lock(driver().mutex);
  PoolPtr found;
  const CuResult result = find_pool(pool, &found);
  if (result == CuResult::kSuccess) trim(*found, keep_bytes);
  return result;
}

CuResult cuMemPoolSetAccess(CuMemoryPool pool, const CuMemAccessDesc* access, std::size_t count) {
  const Lock lock(driver().mutex);
  PoolPtr found;
  const CuResult result = find_pool(pool, &found);
  if (result != CuResult::kSuccess) return result;
  if (access == nullptr && count != 0) return CuResult::kInvalidValue;
  for (std::size_t i = 0; i < count; ++i) {
    if (access[i].location.type != CuMemLocationType::kDevice) return CuResult::kInvalidValue;
    const int device = access[i].location.id;
    if (!valid_device(device)) return CuResult::kInvalidDevice;
    if (device == found->device ? access[i].flags != CuMemAccessFlags::kReadWrite
                                : !can_access_peer(device, found->device)) {
      return CuResult::kInvalidDevice;
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    found->access[static_cast<std::size_t>(access[i].location.id)] = access[i].flags;
  }
  return CuResult::kSuccess;
}

CuResult cuMemPoolGetAccess(CuMemAccessFlags* flags, CuMemoryPool pool, CuMemLocation* location) {
  const Lock lock(driver().mutex);
  PoolPtr found;
  const CuResult result = find_pool(pool, &found);
  if (result != CuResult::kSuccess) return result;
  if (flags == nullptr || location == nullptr || location->type != CuMemLocationType::kDevice ||
      !valid_device(location->id)) {
    return CuResult::kInvalidValue;
  }
  *flags = found->access[static_cast<std::size_t>(location->id)];
  return CuResult::kSuccess;
}

CuResult cuDeviceGetDefaultMemPool(CuMemoryPool* pool, CuDevice device) {
  const Lock lock(driver().mutex);
  if (pool == nullptr) return CuResult::kInvalidValue;
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  *pool = driver().devices[static_cast<std::size_t>(device)].default_pool->handle;
  return CuResult::kSuccess;
}

CuResult cuDeviceGetMemPool(CuMemoryPool* pool, CuDevice device) {
  const Lock lock(driver().mutex);
  if (pool == nullptr) return CuResult::kInvalidValue;
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  *pool = driver().devices[static_cast<std::size_t>(device)].current_pool->handle;
  return CuResult::kSuccess;
}

CuResult cuDeviceSetMemPool(CuDevice device, CuMemoryPool pool) {
  const Lock lock(driver().mutex);
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  PoolPtr found;
  const CuResult result = find_pool(pool, &found);
  if (result != CuResult::kSuccess) return result;
  if (found->device != device) return CuResult::kInvalidValue;
  driver().devices[static_cast<std::size_t>(device)].current_pool = found;
  return CuResult::kSuccess;
}

CuResult cuMemSetMemPool(CuMemLocation* location, CuMemAllocationType type, CuMemoryPool pool) {
  if (location == nullptr) return CuResult::kInvalidValue;
  if (location->type != CuMemLocationType::kDevice || type != CuMemAllocationType::kPinned)
    return CuResult::kNotSupported;
  return cuDeviceSetMemPool(location->id, pool);
}

}  // namespace forebay::fake_cuda
