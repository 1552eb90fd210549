// The driver's facts about an address.
#include <cstring>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

template <typename Value>
CuResult answer(void* data, Value value) {
  std::memcpy(data, &value, sizeof(value));
  return CuResult::kSuccess;
}

// The attributes of device memory. Errors: kInvalidValue for unknown ones.
CuResult device_attribute(void* data, CuPointerAttribute attribute, const Mapping& mapping, Address address) {
  Memory& memory = driver().memory;
  const bool virtual_memory = mapping.kind == MappingKind::kVirtual;
  using enum CuPointerAttribute;
  switch (attribute) {
    case kContext: {
      // Memory of cuMemCreate and of pools belongs to no context.
      const ContextPtr context = mapping.context.lock();
      if (virtual_memory || mapping.kind == MappingKind::kPool || context == nullptr) {
        return answer<CuContext>(data, nullptr);
      }
      return answer(data, context->handle);
    }
    case kMemoryType:
      return answer(data, CuMemoryType::kDevice);
    case kDevicePointer:
      return answer<CuDevicePtr>(data, address);
    case kSyncMemops:
      return answer<int>(data, mapping.sync_memops ? 1 : 0);
    case kBufferId:
    case kMemoryBlockId:
      return answer<unsigned long long>(data, mapping.physical->id);
    case kIsManaged:
      return answer<int>(data, 0);
    case kDeviceOrdinal:
      return answer<int>(data, mapping.physical->device);
    case kIsLegacyCudaIpcCapable:
      return answer<int>(data, mapping.kind == MappingKind::kAllocation ? 1 : 0);
    case kRangeStartAddr:
    case kRangeSize: {
      // The reservation around virtual memory; otherwise the allocation.
      Address begin = mapping.begin;
      std::size_t bytes = mapping.requested_bytes;
      if (virtual_memory) {
        const auto after = memory.reservations().upper_bound(address);
        begin = std::prev(after)->first;
        bytes = std::prev(after)->second.bytes;
      }
      return attribute == kRangeStartAddr ? answer<CuDevicePtr>(data, begin) : answer(data, bytes);
    }
    case kMapped:
      return answer<int>(data, 1);
    case kAllowedHandleTypes:
      return answer(data,
                    static_cast<unsigned long long>(mapping.physical->properties.requested_handle_types));
    case kIsGpuDirectRdmaCapable:
      return answer<int>(data,
                         !virtual_memory || mapping.physical->properties.flags.gpu_direct_rdma_capable != 0
                             ? driver().options.gpu_direct_rdma
                             : 0);
    case kAccessFlags: {
      ContextPtr context;
      const CuResult result = current_context(&context);
      if (result != CuResult::kSuccess) return result;
      const CuMemAccessFlags flags = accessible(*context, mapping, true)    ? CuMemAccessFlags::kReadWrite
                                     : accessible(*context, mapping, false) ? CuMemAccessFlags::kRead
                                                                            : CuMemAccessFlags::kNone;
      return answer(data, flags);
    }
    case kMempoolHandle:
      return answer<CuMemoryPool>(data, mapping.kind == MappingKind::kPool ? mapping.pool->handle : nullptr);
    case kMappingSize:
      return answer(data, mapping.bytes);
    case kMappingBaseAddr:
      return answer<CuDevicePtr>(data, mapping.begin);
    default:
      return CuResult::kInvalidValue;
  }
}

// The attributes of pinned host memory.
CuResult host_attribute(void* data, CuPointerAttribute attribute, Address address) {
  using enum CuPointerAttribute;
  switch (attribute) {
    case kMemoryType:
      return answer(data, CuMemoryType::kHost);
    case kDevicePointer:
      return answer<CuDevicePtr>(data, address);
    case kHostPointer:
      return answer(data, reinterpret_cast<void*>(address));
    case kIsManaged:
    case kIsLegacyCudaIpcCapable:
    case kSyncMemops:
      return answer<int>(data, 0);
    case kMapped:
      return answer<int>(data, 1);
    case kDeviceOrdinal: {
      ContextPtr context;
      current_context(&context);
      return answer<int>(data, context == nullptr ? 0 : context->device);
    }
    default:
      return CuResult::kInvalidValue;
  }
}

CuResult attribute_of(void* data, CuPointerAttribute attribute, Address address) {
  if (const Mapping* const mapping = driver().memory.find(address)) {
    return device_attribute(data, attribute, *mapping, address);
  }
  if (is_pinned(address, 1)) return host_attribute(data, attribute, address);
  return CuResult::kInvalidValue;
}

// The values that cuPointerGetAttributes writes for unknown memory.
void answer_unknown(void* data, CuPointerAttribute attribute, Address address) {
  using enum CuPointerAttribute;
  switch (attribute) {
    case kDeviceOrdinal:
      answer<int>(data, -2);
      break;
    case kHostPointer:
      answer<CuDevicePtr>(data, address);
      break;
    case kMemoryType:
    case kSyncMemops:
    case kIsManaged:
    case kIsLegacyCudaIpcCapable:
    case kMapped:
    case kIsGpuDirectRdmaCapable:
    case kAccessFlags:
      answer<int>(data, 0);
      break;
    default:
      answer<unsigned long long>(data, 0);
      break;
  }
}

}  // namespace

CuResult cuPointerGetAttribute(void* data, CuPointerAttribute attribute, CuDevicePtr address) {
  const Lock lock(driver().mutex);
  if (data == nullptr) return CuResult::kInvalidValue;
  return attribute_of(data, attribute, address);
}

CuResult cuPointerGetAttributes(unsigned count, CuPointerAttribute* attributes, void** data,
                                CuDevicePtr address) {
  const Lock lock(driver().mutex);
  if (attributes == nullptr || data == nullptr) return CuResult::kInvalidValue;
  for (unsigned i = 0; i < count; ++i) {
    if (data[i] == nullptr) return CuResult::kInvalidValue;
    if (attribute_of(data[i], attributes[i], address) != CuResult::kSuccess) {
      answer_unknown(data[i], attributes[i], address);
    }
  }
  return CuResult::kSuccess;
}

CuResult cuPointerSetAttribute(const void* value, CuPointerAttribute attribute, CuDevicePtr address) {
  const Lock lock(driver().mutex);
  if (value == nullptr || attribute != CuPointerAttribute::kSyncMemops) return CuResult::kInvalidValue;
  Mapping* const mapping = driver().memory.find(address);
  if (mapping == nullptr) return CuResult::kInvalidValue;
  if (mapping->kind != MappingKind::kAllocation) return CuResult::kNotSupported;
  mapping->sync_memops = *static_cast<const unsigned*>(value) != 0;
  return CuResult::kSuccess;
}

}  // namespace forebay::fake_cuda
