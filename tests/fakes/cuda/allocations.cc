// cuMemAlloc and its kin: memory that belongs to a context.
#include <sys/mman.h>

#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

// The alignment of the rows of a pitched allocation.
constexpr std::size_t kPitchBytes = 512;

constexpr unsigned kAttachGlobal = 1;
constexpr unsigned kAttachHost = 2;

}  // namespace

CuResult cuMemAlloc_v2(CuDevicePtr* address, std::size_t bytes) {
  Driver& state = driver();
  Lock lock(state.mutex);
  if (address == nullptr || bytes == 0) return CuResult::kInvalidValue;
  ContextPtr context;
  CuResult result = current_context(&context);
  if (result == CuResult::kSuccess) result = refuse_while_capturing();
  if (result != CuResult::kSuccess) return result;
  if (bytes > state.memory.capacity()) return CuResult::kOutOfMemory;
  wait_as_a_driver_may(lock);
  Mapping mapping;
  mapping.bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  mapping.requested_bytes = bytes;
  mapping.kind = MappingKind::kAllocation;
  mapping.context = context;
  CuMemAllocationProp properties{};
  properties.type = CuMemAllocationType::kPinned;
  properties.location = {CuMemLocationType::kDevice, context->device};
  result = state.memory.create_physical(context->device, mapping.bytes, properties, &mapping.physical);
  if (result != CuResult::kSuccess) return result;
  result = state.memory.reserve(mapping.bytes, kPageBytes, 0, true, &mapping.begin);
  if (result != CuResult::kSuccess) return result;
  const Address begin = mapping.begin;
  result = state.memory.open(state.memory.add_mapping(std::move(mapping)));
  if (result != CuResult::kSuccess) {
    remove_allocation(begin);
    return result;
  }
  *address = begin;
  return CuResult::kSuccess;
}

CuResult cuMemAllocPitch_v2(CuDevicePtr* address, std::size_t* pitch, std::size_t width_bytes,
                            std::size_t height, unsigned element_bytes) {
  if (pitch == nullptr || width_bytes == 0 || height == 0 ||
      (element_bytes != 4 && element_bytes != 8 && element_bytes != 16)) {
    return CuResult::kInvalidValue;
  }
  const std::size_t row_bytes = (width_bytes + kPitchBytes - 1) / kPitchBytes * kPitchBytes;
  if (row_bytes < width_bytes || height > SIZE_MAX / row_bytes) return CuResult::kInvalidValue;
  const CuResult result = cuMemAlloc_v2(address, row_bytes * height);
  if (result == CuResult::kSuccess) *pitch = row_bytes;
  return result;
}

// Memory of the device, which the host may touch where it may touch any.
CuResult cuMemAllocManaged(CuDevicePtr* address, std::size_t bytes, unsigned flags) {
  if (flags != kAttachGlobal && flags != kAttachHost) return CuResult::kInvalidValue;
  if (driver().options.host_access != HostAccess::kAllowed) return CuResult::kNotSupported;
  return cuMemAlloc_v2(address, bytes);
}

CuResult cuMemFree_v2(CuDevicePtr address) {
  Driver& state = driver();
  Lock lock(state.mutex);
  if (address == 0) return CuResult::kSuccess;
  ContextPtr context;
  CuResult result = current_context(&context);
  if (context == nullptr) return result;
  const CuResult capturing = refuse_while_capturing();
  if (capturing != CuResult::kSuccess) return capturing;
  Mapping* mapping = state.memory.find(address);
  if (mapping == nullptr || mapping->begin != address || mapping->kind == MappingKind::kVirtual ||
      mapping->kind == MappingKind::kImported) {
    return CuResult::kInvalidValue;
  }
  if (mapping->kind == MappingKind::kPool) return free_pool_block(lock, *mapping);
  if (state.options.free_waits) wait_for_context(lock, context);
  check_unused(lock, "cuMemFree", address, mapping->bytes);
  wait_as_a_driver_may(lock);
  mapping = state.memory.find(address);  // The lock may have been given up for a moment.
  if (mapping == nullptr || mapping->begin != address) return CuResult::kInvalidValue;
  remove_allocation(address);
  return context->sticky;
}

CuResult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  ContextPtr context;
  const CuResult result = current_context(&context);
  if (result != CuResult::kSuccess) return result;
  if (total != nullptr) *total = state.memory.capacity();
  if (free != nullptr) *free = state.memory.capacity() - state.memory.charged_bytes(context->device);
  return CuResult::kSuccess;
}

// The mapping, as the driver answers: not the reservation around it.
CuResult cuMemGetAddressRange_v2(CuDevicePtr* base, std::size_t* bytes, CuDevicePtr address) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  ContextPtr context;
  const CuResult result = current_context(&context);
  if (result != CuResult::kSuccess) return result;
  const Mapping* const mapping = state.memory.find(address);
  if (mapping == nullptr) return CuResult::kNotFound;
  if (base != nullptr) *base = mapping->begin;
  if (bytes != nullptr) *bytes = mapping->requested_bytes != 0 ? mapping->requested_bytes : mapping->bytes;
  return CuResult::kSuccess;
}

// Direct memory access by other devices is not imitated. With `dma_buf` the descriptor is that of an empty
// file.
CuResult cuMemGetHandleForAddressRange(void* handle, CuDevicePtr address, std::size_t bytes,
                                       CuMemRangeHandleType, unsigned long long) {
  if (handle == nullptr) return CuResult::kInvalidValue;
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (!state.options.dma_buf) return CuResult::kNotSupported;
  for (CuDevicePtr at = address; at < address + bytes;) {
    const Mapping* const mapping = state.memory.find(at);
    if (mapping == nullptr) return CuResult::kInvalidValue;
    at = mapping->begin + mapping->bytes;
  }
  const int file = ::memfd_create("fake CUDA dma-buf", MFD_CLOEXEC);
  if (file < 0) return CuResult::kOutOfMemory;
  *static_cast<int*>(handle) = file;
  return CuResult::kSuccess;
}

}  // namespace forebay::fake_cuda
