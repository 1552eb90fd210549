// Virtual memory: reserving addresses, creating chunks, mapping, access, and handles for other processes.
// It refuses the same calls as the driver.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

bool is_multiple(std::uint64_t value) {
  return value % driver().memory.granularity() == 0;
}

CuResult check_properties(const CuMemAllocationProp* properties) {
  if (properties == nullptr || properties->type != CuMemAllocationType::kPinned)
    return CuResult::kInvalidValue;
  if (properties->location.type == CuMemLocationType::kHost ||
      properties->location.type == CuMemLocationType::kHostNuma ||
      properties->location.type == CuMemLocationType::kHostNumaCurrent) {
    return CuResult::kNotSupported;  // The devices say so: their attributes for it are 0.
  }
  if (properties->location.type != CuMemLocationType::kDevice) return CuResult::kInvalidValue;
  if (!valid_device(properties->location.id)) return CuResult::kInvalidDevice;
  const auto types = static_cast<unsigned>(properties->requested_handle_types);
  const auto known = static_cast<unsigned>(CuMemHandleType::kPosixFileDescriptor);
  if ((types & static_cast<unsigned>(CuMemHandleType::kFabric)) != 0) return CuResult::kNotSupported;
  if ((types & ~known) != 0) return CuResult::kInvalidValue;
  if (properties->flags.gpu_direct_rdma_capable > 1) return CuResult::kInvalidValue;
  if (properties->flags.gpu_direct_rdma_capable == 1 && !driver().options.gpu_direct_rdma) {
    return CuResult::kNotSupported;
  }
  return CuResult::kSuccess;
}

CuMemHandle add_chunk(PhysicalPtr physical) {
  const CuMemHandle handle = next_handle_number();
  driver().memory.chunks()[handle] = {std::move(physical), 1};
  return handle;
}

// The mappings that make up the range exactly: no part of one, no hole. Errors: kInvalidValue.
CuResult whole_mappings(Address begin, std::size_t bytes, std::vector<Mapping*>* result) {
  if (bytes == 0 || begin + bytes < begin) return CuResult::kInvalidValue;
  *result = driver().memory.overlapping(begin, bytes);
  Address next = begin;
  for (const Mapping* mapping : *result) {
    if (mapping->kind != MappingKind::kVirtual || mapping->begin != next) return CuResult::kInvalidValue;
    next = mapping->end();
  }
  return next == begin + bytes ? CuResult::kSuccess : CuResult::kInvalidValue;
}

}  // namespace

CuResult cuMemAddressReserve(CuDevicePtr* address, std::size_t bytes, std::size_t alignment, CuDevicePtr hint,
                             unsigned long long flags) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (address == nullptr || bytes == 0 || !is_multiple(bytes) || (alignment & (alignment - 1)) != 0 ||
      flags != 0) {
    return CuResult::kInvalidValue;
  }
  Address result = 0;
  const std::size_t wanted = std::max(alignment, state.memory.granularity());
  const CuResult reserved = state.memory.reserve(bytes, wanted, hint, false, &result);
  if (reserved == CuResult::kSuccess) *address = result;
  return reserved;
}

CuResult cuMemAddressFree(CuDevicePtr address, std::size_t bytes) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  const auto found = state.memory.reservations().find(address);
  if (found == state.memory.reservations().end() || found->second.internal || found->second.bytes != bytes) {
    return CuResult::kInvalidValue;
  }
  if (!state.memory.overlapping(address, bytes).empty()) return CuResult::kInvalidValue;
  state.memory.release(address);
  return CuResult::kSuccess;
}

CuResult cuMemGetAllocationGranularity(std::size_t* granularity, const CuMemAllocationProp* properties,
                                       CuMemGranularity option) {
  const Lock lock(driver().mutex);
  if (granularity == nullptr ||
      (option != CuMemGranularity::kMinimum && option != CuMemGranularity::kRecommended)) {
    return CuResult::kInvalidValue;
  }
  const CuResult result = check_properties(properties);
  if (result == CuResult::kSuccess) *granularity = driver().memory.granularity();
  return result;
}

CuResult cuMemCreate(CuMemHandle* handle, std::size_t bytes, const CuMemAllocationProp* properties,
                     unsigned long long flags) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (handle == nullptr || bytes == 0 || !is_multiple(bytes) || flags != 0) return CuResult::kInvalidValue;
  CuResult result = check_properties(properties);
  if (result != CuResult::kSuccess) return result;
  PhysicalPtr physical;
  result = state.memory.create_physical(properties->location.id, bytes, *properties, &physical);
  if (result == CuResult::kSuccess) *handle = add_chunk(std::move(physical));
  return result;
}

CuResult cuMemRelease(CuMemHandle handle) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  const auto found = state.memory.chunks().find(handle);
  if (found == state.memory.chunks().end()) return CuResult::kInvalidValue;
  // The memory stays while it is mapped.
  if (--found->second.references == 0) state.memory.chunks().erase(found);
  return CuResult::kSuccess;
}

CuResult cuMemMap(CuDevicePtr address, std::size_t bytes, std::size_t offset, CuMemHandle handle,
                  unsigned long long flags) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  Memory& memory = state.memory;
  const auto chunk = memory.chunks().find(handle);
  if (chunk == memory.chunks().end()) return CuResult::kInvalidValue;
  if (offset != 0 || flags != 0 || bytes == 0 || !is_multiple(bytes) || !is_multiple(address) ||
      bytes > chunk->second.physical->bytes) {
    return CuResult::kInvalidValue;
  }
  const Reservation* const reservation = memory.find_reservation(address, bytes);
  if (reservation == nullptr || reservation->internal) return CuResult::kInvalidValue;
  if (!memory.overlapping(address, bytes).empty()) return CuResult::kInvalidValue;
  Mapping mapping;
  mapping.begin = address;
  mapping.bytes = bytes;
  mapping.physical = chunk->second.physical;
  mapping.chunk = handle;
  mapping.access.assign(static_cast<std::size_t>(state.options.device_count), CuMemAccessFlags::kNone);
  memory.add_mapping(std::move(mapping));
  return CuResult::kSuccess;
}

CuResult cuMemUnmap(CuDevicePtr address, std::size_t bytes) {
  Driver& state = driver();
  Lock lock(state.mutex);
  std::vector<Mapping*> mappings;
  CuResult result = whole_mappings(address, bytes, &mappings);
  if (result != CuResult::kSuccess) return result;
  check_unused(lock, "cuMemUnmap", address, bytes);
  // The lock may have been given up for a moment.
  result = whole_mappings(address, bytes, &mappings);
  if (result != CuResult::kSuccess) return result;
  for (const Mapping* mapping : mappings) state.memory.remove_mapping(mapping->begin);
  return CuResult::kSuccess;
}

CuResult cuMemSetAccess(CuDevicePtr address, std::size_t bytes, const CuMemAccessDesc* access,
                        std::size_t count) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (access == nullptr || count == 0) return CuResult::kInvalidValue;
  std::vector<Mapping*> mappings;
  CuResult result = whole_mappings(address, bytes, &mappings);
  if (result != CuResult::kSuccess) return result;
  for (std::size_t i = 0; i < count; ++i) {
    if (access[i].location.type != CuMemLocationType::kDevice) return CuResult::kInvalidValue;
    if (!valid_device(access[i].location.id)) return CuResult::kInvalidDevice;
    if (access[i].flags != CuMemAccessFlags::kNone && access[i].flags != CuMemAccessFlags::kRead &&
        access[i].flags != CuMemAccessFlags::kReadWrite) {
      return CuResult::kInvalidValue;
    }
    for (const Mapping* mapping : mappings) {
      const int device = mapping->physical->device;
      if (access[i].flags != CuMemAccessFlags::kNone && device != access[i].location.id &&
          !can_access_peer(access[i].location.id, device)) {
        return CuResult::kInvalidDevice;
      }
    }
  }
  for (Mapping* mapping : mappings) {
    const std::vector<CuMemAccessFlags> before = mapping->access;
    for (std::size_t i = 0; i < count; ++i) {
      mapping->access[static_cast<std::size_t>(access[i].location.id)] = access[i].flags;
    }
    if (mapping->access == before) continue;
    result = state.memory.open(*mapping);
    if (result == CuResult::kSuccess) continue;
    mapping->access = before;
    return result;
  }
  return CuResult::kSuccess;
}

CuResult cuMemGetAccess(unsigned long long* flags, const CuMemLocation* location, CuDevicePtr address) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (flags == nullptr || location == nullptr || location->type != CuMemLocationType::kDevice) {
    return CuResult::kInvalidValue;
  }
  if (!valid_device(location->id)) return CuResult::kInvalidDevice;
  const Mapping* const mapping = state.memory.find(address);
  if (mapping == nullptr || mapping->kind != MappingKind::kVirtual) return CuResult::kInvalidValue;
  *flags = static_cast<unsigned long long>(mapping->access[static_cast<std::size_t>(location->id)]);
  return CuResult::kSuccess;
}

CuResult cuMemExportToShareableHandle(void* shareable, CuMemHandle handle, CuMemHandleType type,
                                      unsigned long long flags) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  const auto chunk = state.memory.chunks().find(handle);
  if (shareable == nullptr || flags != 0 || chunk == state.memory.chunks().end())
    return CuResult::kInvalidValue;
  if (type != CuMemHandleType::kPosixFileDescriptor) return CuResult::kNotSupported;
  if (chunk->second.physical->properties.requested_handle_types != type) return CuResult::kInvalidValue;
  const int file = ::fcntl(chunk->second.physical->file, F_DUPFD_CLOEXEC, 0);
  if (file < 0) return CuResult::kOperatingSystem;
  chunk->second.physical->exported = true;
  *static_cast<int*>(shareable) = file;
  return CuResult::kSuccess;
}

CuResult cuMemImportFromShareableHandle(CuMemHandle* handle, void* os_handle, CuMemHandleType type) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (handle == nullptr) return CuResult::kInvalidValue;
  if (type != CuMemHandleType::kPosixFileDescriptor) return CuResult::kNotSupported;
  const int file = static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
  // Memory of this process is known again: same file, same memory, charged once.
  struct stat wanted {};
  if (::fstat(file, &wanted) != 0) return CuResult::kInvalidValue;
  const auto same = [&](const PhysicalPtr& physical) {
    struct stat facts {};
    return ::fstat(physical->file, &facts) == 0 && facts.st_dev == wanted.st_dev &&
           facts.st_ino == wanted.st_ino;
  };
  PhysicalPtr physical;
  for (const auto& [other, chunk] : state.memory.chunks()) {
    if (same(chunk.physical)) physical = chunk.physical;
  }
  for (const auto& [begin, mapping] : state.memory.mappings()) {
    if (same(mapping.physical)) physical = mapping.physical;
  }
  if (physical == nullptr) {
    const CuResult result = state.memory.import_physical(file, &physical);
    if (result != CuResult::kSuccess) return result;
  }
  *handle = add_chunk(std::move(physical));
  return CuResult::kSuccess;
}

CuResult cuMemRetainAllocationHandle(CuMemHandle* handle, void* address) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  const Mapping* const mapping = state.memory.find(reinterpret_cast<Address>(address));
  if (handle == nullptr || mapping == nullptr || mapping->kind != MappingKind::kVirtual) {
    return CuResult::kInvalidValue;
  }
  // The handle it was mapped from, also when that was released meanwhile.
  Chunk& chunk = state.memory.chunks()[mapping->chunk];
  chunk.physical = mapping->physical;
  ++chunk.references;
  *handle = mapping->chunk;
  return CuResult::kSuccess;
}

CuResult cuMemGetAllocationPropertiesFromHandle(CuMemAllocationProp* properties, CuMemHandle handle) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  const auto chunk = state.memory.chunks().find(handle);
  if (properties == nullptr || chunk == state.memory.chunks().end()) return CuResult::kInvalidValue;
  *properties = chunk->second.physical->properties;
  return CuResult::kSuccess;
}

}  // namespace forebay::fake_cuda
