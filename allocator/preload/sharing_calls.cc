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

// Further attributes that the preload answers, or that make memory known outside.
enum : unsigned {
  kContext = 1,
  kP2pTokens = 5,
  kSyncMemops = 6,
  kBufferId = 7,
  kIsIpcCapable = 10,
  kHandleTypes = 14,
  kPoolHandle = 17,
  kMappingSize = 18,
  kMappingBase = 19,
  kMemoryBlockId = 20,
};

// An address that no driver knows.
constexpr DriverAddress kNowhere = 1;

void pin(DriverAddress address, std::size_t bytes) {
  ProcessArenas::of_process().blocks().pin(device_pointer(address), bytes, KnownOutside::kPinned);
}

bool is_ours(DriverAddress address) {
  return ProcessArenas::of_process().blocks().is_arena_address(device_pointer(address));
}

// A block as the program sees it: as memory of cuMemAlloc, not as a part of mapped chunks.
struct ShownBlock {
  DriverAddress begin = 0;
  std::size_t bytes = 0;
  std::uint64_t id = 0;
  DriverContext context = nullptr;  // Null for memory in stream order.
  DriverPool pool = nullptr;        // Set for memory in stream order.
  bool can_be_shared = false;
};

enum class Whose : std::uint8_t {
  kDriver,  // The driver's own answers hold.
  kBlock,   // A block of the arena, or opened from another process.
  kNobody,  // In an arena, but in no live block.
};

Whose find_block(DriverAddress address, ShownBlock* shown) {
  if (OpenedRange opened; find_opened_block(address, &opened)) {
    *shown = {.begin = opened.begin, .bytes = opened.bytes, .id = opened.id, .context = opened.context};
    return Whose::kBlock;
  }
  if (!is_ours(address)) return Whose::kDriver;
  DevicePtr begin = nullptr;
  BlockFacts facts;
  if (!ProcessArenas::of_process().blocks().find(device_pointer(address), &begin, &facts))
    return Whose::kNobody;
  if (facts.device < 0) return Whose::kDriver;
  *shown = {.begin = driver_address(begin), .bytes = facts.bytes, .id = facts.id};
  if (facts.is_ordered) (void)preload_state().used.cuDeviceGetDefaultMemPool(&shown->pool, facts.device);
  if (const ProcessArenas::Use use = ProcessArenas::of_process().find(facts.device)) {
    if (!facts.is_ordered) shown->context = static_cast<DriverContext>(use.context());
    shown->can_be_shared = use.backend().chunks_have_posix_fd();
  }
  return Whose::kBlock;
}

// Replaces what the driver has answered, where that is of the chunk or of the reservation.
void answer_attribute(void* data, unsigned attribute, const ShownBlock& block) {
  const auto answer = [=](const auto& value) { std::memcpy(data, &value, sizeof value); };
  switch (attribute) {
    case kContext:
      return answer(block.context);
    case kBufferId:
    case kMemoryBlockId:
      return answer(block.id);
    case kRangeStart:
    case kMappingBase:
      return answer(block.begin);
    case kRangeSize:
    case kMappingSize:
      return answer(block.bytes);
    case kPoolHandle:
      return answer(block.pool);
    case kIsIpcCapable:
      // CUDA does not say how wide this answer is. The driver has set all of it to 0.
      if (block.can_be_shared) *static_cast<unsigned char*>(data) = 1;
      return;
    case kHandleTypes:
      return answer(std::uint32_t{0});  // Nor how wide this one is; the driver's value fits into it.
    default:
      return;
  }
}

DriverResult pointer_get_attribute(void* data, unsigned attribute, DriverAddress address) {
  ShownBlock block;
  const Whose whose = find_block(address, &block);
  const DriverResult result = preload_state().real.cuPointerGetAttribute(
      data, attribute, whose == Whose::kNobody ? kNowhere : address);
  if (data == nullptr || result != kDriverSuccess || whose != Whose::kBlock) return result;
  if (attribute == kP2pTokens) pin(address, 1);
  answer_attribute(data, attribute, block);
  return result;
}

DriverResult pointer_get_attributes(unsigned count, unsigned* attributes, void** data,
                                    DriverAddress address) {
  ShownBlock block;
  const Whose whose = find_block(address, &block);
  const DriverResult result = preload_state().real.cuPointerGetAttributes(
      count, attributes, data, whose == Whose::kNobody ? kNowhere : address);
  if (result != kDriverSuccess || whose != Whose::kBlock) return result;
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == kP2pTokens) pin(address, 1);
    answer_attribute(data[i], attributes[i], block);
  }
  return result;
}

DriverResult pointer_set_attribute(const void* value, unsigned attribute, DriverAddress address) {
  ShownBlock block;
  const bool is_known = find_block(address, &block) != Whose::kNobody;
  const DriverResult result =
      preload_state().real.cuPointerSetAttribute(value, attribute, is_known ? address : kNowhere);
  // A program sets SYNC_MEMOPS when it has registered the memory with another device.
  if (attribute == kSyncMemops && is_ours(address)) pin(address, 1);
  return result;
}

DriverResult get_address_range(DriverAddress* base, std::size_t* bytes, DriverAddress address) {
  ShownBlock block;
  const Whose whose = find_block(address, &block);
  const DriverResult result =
      preload_state().real.cuMemGetAddressRange_v2(base, bytes, whose == Whose::kNobody ? kNowhere : address);
  if (result != kDriverSuccess || whose != Whose::kBlock) return result;
  if (base != nullptr) *base = block.begin;
  if (bytes != nullptr) *bytes = block.bytes;
  return result;
}

// The handle would be that of a chunk, which can have other blocks in it, and need not have all of this one.
DriverResult retain_allocation_handle(DriverMemory* memory, void* address) {
  ShownBlock block;
  if (find_block(driver_address(static_cast<DevicePtr>(address)), &block) != Whose::kDriver)
    return kDriverInvalidValue;
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
