// Pinned host memory: allocated here, or registered.
#include <sys/mman.h>

#include <iterator>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

// The range that holds the address, or null.
std::map<Address, HostRange>::iterator find_range(Address address) {
  auto& ranges = driver().host_ranges;
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return ranges.end();
  --after;
  return address < after->first + after->second.bytes ? after : ranges.end();
}

bool overlaps_range(Address begin, std::size_t bytes) {
  const auto& ranges = driver().host_ranges;
  const auto after = ranges.lower_bound(begin);
  if (after != ranges.end() && after->first < begin + bytes) return true;
  return after != ranges.begin() && std::prev(after)->first + std::prev(after)->second.bytes > begin;
}

CuResult allocate(void** address, std::size_t bytes, unsigned flags) {
  Driver& state = driver();
  Lock lock(state.mutex);
  if (address == nullptr || bytes == 0 ||
      (flags & ~(kHostAllocPortable | kHostAllocDeviceMap | kHostAllocWriteCombined)) != 0) {
    return CuResult::kInvalidValue;
  }
  ContextPtr context;
  CuResult result = current_context(&context);
  if (result == CuResult::kSuccess) result = refuse_while_capturing();
  if (result != CuResult::kSuccess) return result;
  wait_as_a_driver_may(lock);
  bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return CuResult::kOutOfMemory;
  state.host_ranges[reinterpret_cast<Address>(memory)] = {bytes, false, flags};
  *address = memory;
  return CuResult::kSuccess;
}

CuResult register_range(void* address, std::size_t bytes, unsigned flags) {
  Driver& state = driver();
  Lock lock(state.mutex);
  const auto begin = reinterpret_cast<Address>(address);
  if (address == nullptr || bytes == 0 || begin + bytes < begin ||
      (flags & ~(kHostRegisterPortable | kHostRegisterDeviceMap | kHostRegisterIoMemory |
                 kHostRegisterReadOnly)) != 0 ||
      state.memory.is_device(begin)) {
    return CuResult::kInvalidValue;
  }
  if ((flags & (kHostRegisterIoMemory | kHostRegisterReadOnly)) != 0) return CuResult::kNotSupported;
  ContextPtr context;
  const CuResult result = current_context(&context);
  if (result != CuResult::kSuccess) return result;
  wait_as_a_driver_may(lock);
  if (overlaps_range(begin, bytes)) return CuResult::kHostMemoryAlreadyRegistered;
  // As page-locking would: pages that are not there cannot be locked.
  unsigned char resident[1];
  for (Address page = begin & ~(kPageBytes - 1); page < begin + bytes; page += kPageBytes) {
    if (::mincore(reinterpret_cast<void*>(page), 1, resident) != 0) return CuResult::kInvalidValue;
  }
  state.host_ranges[begin] = {bytes, true, flags};
  return CuResult::kSuccess;
}

}  // namespace

bool is_pinned(Address address, std::size_t bytes) {
  const auto found = find_range(address);
  return found != driver().host_ranges.end() && address + bytes <= found->first + found->second.bytes;
}

bool is_part_pinned(Address address, std::size_t bytes) {
  return overlaps_range(address, bytes) && !is_pinned(address, bytes);
}

bool is_mapped(const HostRange& range) {
  // One bit for both: kHostAllocDeviceMap and kHostRegisterDeviceMap.
  static_assert(kHostAllocDeviceMap == kHostRegisterDeviceMap);
  return !driver().options.need_device_map || (range.flags & kHostAllocDeviceMap) != 0;
}

bool is_mapped(Address address, std::size_t bytes) {
  return is_pinned(address, bytes) && is_mapped(find_range(address)->second);
}

CuResult cuMemHostAlloc(void** address, std::size_t bytes, unsigned flags) {
  return allocate(address, bytes, flags);
}
CuResult cuMemAllocHost_v2(void** address, std::size_t bytes) {
  return allocate(address, bytes, 0);
}

CuResult cuMemFreeHost(void* address) {
  Driver& state = driver();
  Lock lock(state.mutex);
  const auto found = state.host_ranges.find(reinterpret_cast<Address>(address));
  if (found == state.host_ranges.end() || found->second.registered) return CuResult::kInvalidValue;
  check_unused(lock, "cuMemFreeHost", found->first, found->second.bytes);
  wait_as_a_driver_may(lock);
  const auto again = state.host_ranges.find(reinterpret_cast<Address>(address));
  if (again == state.host_ranges.end()) return CuResult::kInvalidValue;
  ::munmap(address, again->second.bytes);
  state.host_ranges.erase(again);
  return CuResult::kSuccess;
}

CuResult cuMemHostRegister_v2(void* address, std::size_t bytes, unsigned flags) {
  return register_range(address, bytes, flags);
}
CuResult cuMemHostRegister(void* address, std::size_t bytes, unsigned flags) {
  return register_range(address, bytes, flags);
}

CuResult cuMemHostUnregister(void* address) {
  Driver& state = driver();
  Lock lock(state.mutex);
  const auto found = state.host_ranges.find(reinterpret_cast<Address>(address));
  if (found == state.host_ranges.end()) {
    return find_range(reinterpret_cast<Address>(address)) == state.host_ranges.end()
               ? CuResult::kHostMemoryNotRegistered
               : CuResult::kInvalidValue;
  }
  if (!found->second.registered) return CuResult::kHostMemoryNotRegistered;
  check_unused(lock, "cuMemHostUnregister", found->first, found->second.bytes);
  wait_as_a_driver_may(lock);
  state.host_ranges.erase(reinterpret_cast<Address>(address));
  return CuResult::kSuccess;
}

// With unified addressing the device's address is the host's.
CuResult cuMemHostGetDevicePointer_v2(CuDevicePtr* device_address, void* address, unsigned flags) {
  const Lock lock(driver().mutex);
  const auto found = find_range(reinterpret_cast<Address>(address));
  if (device_address == nullptr || flags != 0 || found == driver().host_ranges.end() ||
      !is_mapped(found->second)) {
    return CuResult::kInvalidValue;
  }
  *device_address = reinterpret_cast<Address>(address);
  return CuResult::kSuccess;
}

CuResult cuMemHostGetFlags(unsigned* flags, void* address) {
  const Lock lock(driver().mutex);
  const auto found = find_range(reinterpret_cast<Address>(address));
  if (flags == nullptr || found == driver().host_ranges.end() || found->second.registered) {
    return CuResult::kInvalidValue;
  }
  *flags = found->second.flags;
  return CuResult::kSuccess;
}

}  // namespace forebay::fake_cuda
