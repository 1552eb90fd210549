// Allocations shared between processes by handle. A handle names the exporting process and its file of the
// memory, so the exporter must be alive when it is opened; memory of cuMemCreate and of pools has other ways
// and is refused.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

constexpr std::uint64_t kIpcMagic = 0x46414B4543554441;

struct HandleContent {
  std::uint64_t magic;
  std::int32_t process;
  std::int32_t file;
  std::uint64_t requested_bytes;
};
static_assert(sizeof(HandleContent) <= sizeof(CuIpcMemHandle));

CuResult open_handle(CuDevicePtr* address, const CuIpcMemHandle& handle, unsigned flags) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  HandleContent content;
  std::memcpy(&content, handle.bytes, sizeof(content));
  if (address == nullptr || content.magic != kIpcMagic || (flags & ~kIpcLazyEnablePeerAccess) != 0) {
    return CuResult::kInvalidValue;
  }
  ContextPtr context;
  CuResult result = current_context(&context);
  if (result != CuResult::kSuccess) return result;
  // A process does not open its own handles.
  if (content.process == ::getpid()) return CuResult::kInvalidContext;
  // Opened before: the same address, counted.
  for (auto& [begin, known] : state.memory.mappings()) {
    if (known.kind != MappingKind::kImported || known.import_process != content.process ||
        known.import_file != content.file || known.context.lock() != context) {
      continue;
    }
    ++known.import_count;
    *address = begin;
    return CuResult::kSuccess;
  }
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", content.process, content.file);
  const int file = ::open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return CuResult::kInvalidValue;
  Mapping mapping;
  result = state.memory.import_physical(file, &mapping.physical);
  ::close(file);
  if (result != CuResult::kSuccess) return result;
  mapping.kind = MappingKind::kImported;
  mapping.bytes = mapping.physical->bytes;
  mapping.requested_bytes = content.requested_bytes;
  mapping.context = context;
  mapping.import_process = content.process;
  mapping.import_file = content.file;
  mapping.import_count = 1;
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

}  // namespace

CuResult cuIpcGetMemHandle(CuIpcMemHandle* handle, CuDevicePtr address) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  const Mapping* const mapping = state.memory.find(address);
  if (handle == nullptr || mapping == nullptr || mapping->kind != MappingKind::kAllocation) {
    return CuResult::kInvalidValue;
  }
  mapping->physical->exported = true;
  const HandleContent content{kIpcMagic, ::getpid(), mapping->physical->file, mapping->requested_bytes};
  *handle = {};
  std::memcpy(handle->bytes, &content, sizeof(content));
  return CuResult::kSuccess;
}

CuResult cuIpcOpenMemHandle_v2(CuDevicePtr* device_address, CuIpcMemHandle handle, unsigned flags) {
  return open_handle(device_address, handle, flags);
}
CuResult cuIpcOpenMemHandle(CuDevicePtr* device_address, CuIpcMemHandle handle, unsigned flags) {
  return open_handle(device_address, handle, flags);
}

CuResult cuIpcCloseMemHandle(CuDevicePtr address) {
  Driver& state = driver();
  Lock lock(state.mutex);
  Mapping* const mapping = state.memory.find(address);
  if (mapping == nullptr || mapping->begin != address || mapping->kind != MappingKind::kImported) {
    return CuResult::kInvalidValue;
  }
  if (--mapping->import_count > 0) return CuResult::kSuccess;
  check_unused(lock, "cuIpcCloseMemHandle", address, mapping->bytes);
  if (state.memory.mappings().count(address) == 0) return CuResult::kInvalidValue;
  remove_allocation(address);
  return CuResult::kSuccess;
}

}  // namespace forebay::fake_cuda
