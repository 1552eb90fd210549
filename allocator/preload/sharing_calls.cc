// Calls that make the program's memory known outside: attributes of addresses, handles for other processes
// and devices.
//
// A block that is known outside the process is pinned: its address and memory stay together even after it was
// freed. While a block is live they stay together in any case.
#include <cstring>

#include "allocator/preload/routes.h"
#include "allocator/preload/shared_blocks.h"

namespace forebay {
namespace {

// Pointer attributes that the preload answers, or that make memory known outside.
enum : unsigned {
  kP2pTokens = 5,
  kSyncMemops = 6,
  kBufferId = 7,
  kIsIpcCapable = 10,
  kRangeStart = 11,
  kRangeSize = 12,
  kPoolHandle = 17,
};

void pin(DriverAddress address, std::size_t bytes) {
  ProcessArenas::of_process().blocks().pin(device_pointer(address), bytes, KnownOutside::kPinned);
}

bool is_ours(DriverAddress address) {
  return ProcessArenas::of_process().blocks().is_arena_address(device_pointer(address));
}

// Finds the block around the address: of an arena, or opened from another process (facts->device is -1).
bool find_block(DriverAddress address, DriverAddress* begin, BlockFacts* facts) {
  if (find_opened_block(address, begin, &facts->bytes)) return true;
  DevicePtr block = nullptr;
  if (!is_ours(address) ||
      !ProcessArenas::of_process().blocks().find(device_pointer(address), &block, facts) ||
      facts->device < 0) {
    return false;
  }
  *begin = driver_address(block);
  return true;
}

bool can_share(int device) {
  const ProcessArenas::Use use = ProcessArenas::of_process().find(device);
  return use && use.backend().chunks_have_posix_fd();
}

// Answers as for memory of cuMemAlloc. The driver would answer for the chunk or the whole reservation.
bool answer_attribute(void* data, unsigned attribute, DriverAddress address) {
  if (attribute != kBufferId && attribute != kIsIpcCapable && attribute != kRangeStart &&
      attribute != kRangeSize && attribute != kPoolHandle) {
    return false;
  }
  DriverAddress begin = 0;
  BlockFacts facts;
  if (!find_block(address, &begin, &facts)) return false;
  if (attribute == kBufferId) {
    if (facts.id == 0) return false;
    std::memcpy(data, &facts.id, sizeof facts.id);
  } else if (attribute == kIsIpcCapable) {
    if (!can_share(facts.device)) return false;
    // CUDA does not say how wide this answer is. The driver has set all of it to 0.
    *static_cast<unsigned char*>(data) = 1;
  } else if (attribute == kRangeStart) {
    std::memcpy(data, &begin, sizeof begin);
  } else if (attribute == kRangeSize) {
    std::memcpy(data, &facts.bytes, sizeof facts.bytes);
  } else {
    DriverPool pool = nullptr;
    if (facts.is_ordered) (void)preload_state().used.cuDeviceGetDefaultMemPool(&pool, facts.device);
    std::memcpy(data, &pool, sizeof pool);
  }
  return true;
}

DriverResult pointer_get_attribute(void* data, unsigned attribute, DriverAddress address) {
  const DriverResult result = preload_state().real.cuPointerGetAttribute(data, attribute, address);
  if (data == nullptr) return result;
  if (result == kDriverSuccess && attribute == kP2pTokens && is_ours(address)) pin(address, 1);
  return answer_attribute(data, attribute, address) ? static_cast<DriverResult>(kDriverSuccess) : result;
}

DriverResult pointer_get_attributes(unsigned count, unsigned* attributes, void** data,
                                    DriverAddress address) {
  const DriverResult result = preload_state().real.cuPointerGetAttributes(count, attributes, data, address);
  if (result != kDriverSuccess) return result;
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == kP2pTokens && is_ours(address)) pin(address, 1);
    (void)answer_attribute(data[i], attributes[i], address);
  }
  return result;
}

DriverResult pointer_set_attribute(const void* value, unsigned attribute, DriverAddress address) {
  const DriverResult result = preload_state().real.cuPointerSetAttribute(value, attribute, address);
  // A program sets SYNC_MEMOPS when it has registered the memory with another device.
  if (attribute == kSyncMemops && is_ours(address)) pin(address, 1);
  return result;
}

DriverResult get_address_range(DriverAddress* base, std::size_t* bytes, DriverAddress address) {
  const DriverResult result = preload_state().real.cuMemGetAddressRange_v2(base, bytes, address);
  DriverAddress begin = 0;
  BlockFacts facts;
  if (result != kDriverSuccess || !find_block(address, &begin, &facts)) return result;
  if (base != nullptr) *base = begin;
  if (bytes != nullptr) *bytes = facts.bytes;
  return result;
}

// As for memory of cuMemAlloc. The handle would be that of a chunk, which can have other blocks in it, and
// need not have all of this one.
DriverResult retain_allocation_handle(DriverMemory* memory, void* address) {
  DriverAddress begin = 0;
  BlockFacts facts;
  if (find_block(driver_address(static_cast<DevicePtr>(address)), &begin, &facts)) return kDriverInvalidValue;
  return preload_state().real.cuMemRetainAllocationHandle(memory, address);
}

DriverResult get_handle_for_address_range(void* handle, DriverAddress address, std::size_t bytes,
                                          unsigned type, unsigned long long flags) {
  const DriverResult result =
      preload_state().real.cuMemGetHandleForAddressRange(handle, address, bytes, type, flags);
  if (result == kDriverSuccess) pin(address, bytes);
  return result;
}

DriverResult multicast_bind_address(DriverMemory multicast, std::size_t multicast_offset,
                                    DriverAddress address, std::size_t bytes, unsigned long long flags) {
  const DriverResult result =
      preload_state().real.cuMulticastBindAddr(multicast, multicast_offset, address, bytes, flags);
  if (result == kDriverSuccess) pin(address, bytes);
  return result;
}

// --- other processes ---

DriverResult ipc_get_handle(DriverIpcHandle* handle, DriverAddress address) {
  DevicePtr begin = nullptr;
  BlockFacts facts;
  if (handle != nullptr &&
      ProcessArenas::of_process().blocks().find(device_pointer(address), &begin, &facts) &&
      facts.device >= 0) {
    const ProcessArenas::Use use = ProcessArenas::of_process().find(facts.device);
    if (use && share_block(use, begin, facts.bytes, handle)) return kDriverSuccess;
  }
  // If the arena's memory cannot be shared, the driver's refusal is returned.
  return preload_state().real.cuIpcGetMemHandle(handle, address);
}

template <auto kCall>
DriverResult ipc_open_handle(DriverAddress* address, DriverIpcHandle handle, unsigned flags) {
  if (is_shared_handle(handle)) return open_shared_block(handle, flags, address);
  return (preload_state().real.*kCall)(address, handle, flags);
}

DriverResult ipc_close_handle(DriverAddress address) {
  DriverResult result = kDriverSuccess;
  if (close_shared_block(address, &result)) return result;
  return preload_state().real.cuIpcCloseMemHandle(address);
}

}  // namespace

void replace_sharing_calls(HookedCalls* calls) {
  replace(&calls->cuPointerGetAttribute, pointer_get_attribute);
  replace(&calls->cuPointerGetAttributes, pointer_get_attributes);
  replace(&calls->cuPointerSetAttribute, pointer_set_attribute);
  replace(&calls->cuMemGetAddressRange_v2, get_address_range);
  replace(&calls->cuMemRetainAllocationHandle, retain_allocation_handle);
  replace(&calls->cuMemGetHandleForAddressRange, get_handle_for_address_range);
  replace(&calls->cuMulticastBindAddr, multicast_bind_address);
  replace(&calls->cuIpcGetMemHandle, ipc_get_handle);
  replace(&calls->cuIpcOpenMemHandle, ipc_open_handle<&HookedCalls::cuIpcOpenMemHandle>);
  replace(&calls->cuIpcOpenMemHandle_v2, ipc_open_handle<&HookedCalls::cuIpcOpenMemHandle_v2>);
  replace(&calls->cuIpcCloseMemHandle, ipc_close_handle);
}

}  // namespace forebay
