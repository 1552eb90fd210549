// Copies and fills. They move bytes when their turn comes, through the fake's own alias of device memory.
//
// How far a copy is asynchronous depends on the host memory, as it does in the driver: ordinary memory is
// read before the call returns, and written before it returns; pinned memory is used when the copy runs.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

enum class Place : std::uint8_t { kDevice, kPinned, kPageable };

// One end of a copy.
struct End {
  Address address = 0;
  ContextPtr context;  // Its device reaches the address.
  Place place = Place::kPageable;
  std::shared_ptr<std::byte[]> staged;  // The bytes of ordinary host memory, taken when the copy was queued.
};

Place place_of(Address address, std::size_t bytes) {
  if (driver().memory.is_device(address)) return Place::kDevice;
  return is_pinned(address, bytes) ? Place::kPinned : Place::kPageable;
}

CuResult pieces_of(const End& end, std::size_t bytes, bool write, std::vector<Piece>* pieces) {
  if (end.place == Place::kDevice) return resolve(*end.context, end.address, bytes, write, pieces);
  std::byte* const host =
      end.staged != nullptr ? end.staged.get() : reinterpret_cast<std::byte*>(end.address);
  pieces->push_back({nullptr, host, bytes});
  return CuResult::kSuccess;
}

// Whether a block of a pool, freed in the order of some stream, is used by mistake. Called when work is
// queued.
CuResult refuse_freed(const End& end, std::size_t bytes, const char* entry) {
  if (end.place != Place::kDevice) return CuResult::kSuccess;
  for (const Mapping* mapping : driver().memory.overlapping(end.address, bytes)) {
    if (mapping->kind != MappingKind::kPool || !mapping->freed) continue;
    hazard(*end.context, entry, "memory is used after cuMemFreeAsync was called on it");
    return CuResult::kIllegalAddress;
  }
  return CuResult::kSuccess;
}

// The range is gone, or not there yet, when the operation runs.
CuResult lost(const End& end, std::size_t bytes, const char* entry) {
  hazard(*end.context, entry, "its " + std::to_string(bytes) + " bytes are no longer mapped when it runs");
  return CuResult::kIllegalAddress;
}

CuResult check_available(const End& end, std::size_t bytes, const char* entry) {
  if (end.place != Place::kDevice) return CuResult::kSuccess;
  for (const Mapping* mapping : driver().memory.overlapping(end.address, bytes)) {
    if (mapping->available) continue;
    hazard(*end.context, entry, "it runs before the cuMemAllocAsync of its memory, or after the free");
    return CuResult::kIllegalAddress;
  }
  return CuResult::kSuccess;
}

void move_bytes(const std::vector<Piece>& targets, const std::vector<Piece>& sources) {
  std::size_t target = 0, source = 0, target_offset = 0, source_offset = 0;
  while (target < targets.size() && source < sources.size()) {
    const std::size_t bytes =
        std::min(targets[target].bytes - target_offset, sources[source].bytes - source_offset);
    std::memmove(targets[target].alias + target_offset, sources[source].alias + source_offset, bytes);
    target_offset += bytes;
    source_offset += bytes;
    if (target_offset == targets[target].bytes) ++target, target_offset = 0;
    if (source_offset == sources[source].bytes) ++source, source_offset = 0;
  }
}

struct CopyCall {
  const char* what;
  bool synchronous;  // An entry point without a stream.
  // The kinds of both ends by the entry point's name; kPageable stands for any host memory. Unset: found by
  // address.
  bool target_known = false, source_known = false;
  bool target_device = false, source_device = false;
};

CuResult copy(const CopyCall& call, End target, End source, std::size_t bytes, CuStream stream_handle) {
  Driver& state = driver();
  Lock lock(state.mutex);
  StreamPtr stream;
  CuResult result = find_stream(stream_handle, &stream);
  if (result != CuResult::kSuccess) return result;
  if (bytes == 0) return CuResult::kSuccess;
  if (target.address == 0 || source.address == 0) return CuResult::kInvalidValue;
  target.place = place_of(target.address, bytes);
  source.place = place_of(source.address, bytes);
  if ((call.target_known && call.target_device != (target.place == Place::kDevice)) ||
      (call.source_known && call.source_device != (source.place == Place::kDevice))) {
    // Pinned host memory has a device address, which is its own.
    const bool target_fits = !call.target_known || (call.target_device && target.place != Place::kPageable) ||
                             (!call.target_device && target.place != Place::kDevice);
    const bool source_fits = !call.source_known || (call.source_device && source.place != Place::kPageable) ||
                             (!call.source_device && source.place != Place::kDevice);
    if (!target_fits || !source_fits) return CuResult::kInvalidValue;
  }
  for (const End& end : {target, source}) {
    if (state.options.refuse_part_pinned && end.place == Place::kPageable &&
        is_part_pinned(end.address, bytes)) {
      return CuResult::kInvalidValue;
    }
  }
  if (target.context == nullptr) target.context = stream->context;
  if (source.context == nullptr) source.context = stream->context;
  std::vector<Piece> checked;
  result = pieces_of(target, bytes, true, &checked);
  if (result == CuResult::kSuccess) result = pieces_of(source, bytes, false, &checked);
  if (result == CuResult::kSuccess) result = refuse_freed(target, bytes, call.what);
  if (result == CuResult::kSuccess) result = refuse_freed(source, bytes, call.what);
  if (result != CuResult::kSuccess) return result;
  if (call.synchronous) {
    result = refuse_while_capturing();
    if (result != CuResult::kSuccess) return result;
  }

  const bool capturing = stream->capture != nullptr;
  const bool waits = state.options.pageable_waits && !capturing &&
                     (target.place == Place::kPageable || source.place == Place::kPageable);
  if (waits) {
    result = wait_for_stream(lock, stream);
    if (result != CuResult::kSuccess) return result;
  }
  const bool host_to_host = target.place != Place::kDevice && source.place != Place::kDevice;
  if (source.place == Place::kPageable && !host_to_host) {
    source.staged = std::shared_ptr<std::byte[]>(new std::byte[bytes]);
    lock.unlock();
    std::memcpy(source.staged.get(), reinterpret_cast<const void*>(source.address), bytes);
    lock.lock();
  }
  bool wait = waits || host_to_host || target.place == Place::kPageable;
  if (call.synchronous) {
    wait = wait || target.place == Place::kPinned || source.place == Place::kPinned;
  }

  Operation operation;
  operation.what = call.what;
  operation.bytes = bytes;
  // Ordinary host memory is the caller's affair; a staged copy of it is used where it matters.
  if (target.place != Place::kPageable) operation.touches.push_back({target.address, target.address + bytes});
  if (source.place != Place::kPageable) operation.touches.push_back({source.address, source.address + bytes});
  operation.run = [target, source, bytes, what = call.what](Lock& running) {
    std::vector<Piece> targets, sources;
    if (pieces_of(target, bytes, true, &targets) != CuResult::kSuccess) return lost(target, bytes, what);
    if (pieces_of(source, bytes, false, &sources) != CuResult::kSuccess) return lost(source, bytes, what);
    CuResult available = check_available(target, bytes, what);
    if (available == CuResult::kSuccess) available = check_available(source, bytes, what);
    if (available != CuResult::kSuccess) return available;
    running.unlock();
    move_bytes(targets, sources);
    running.lock();
    return CuResult::kSuccess;
  };
  const MarkPtr mark = operation.mark;
  result = enqueue(stream, std::move(operation));
  if (result != CuResult::kSuccess || !wait || capturing) return result;
  state.scheduler.wait(lock, mark);
  return mark->failure;
}

End end_at(const void* host) {
  End end;
  end.address = reinterpret_cast<Address>(host);
  return end;
}
End end_at(CuDevicePtr device) {
  End end;
  end.address = static_cast<Address>(device);
  return end;
}

constexpr CopyCall from_any_to_any(const char* what, bool synchronous) {
  return {what, synchronous};
}
constexpr CopyCall host_to_device(const char* what, bool synchronous) {
  return {what, synchronous, true, true, true, false};
}
constexpr CopyCall device_to_host(const char* what, bool synchronous) {
  return {what, synchronous, true, true, false, true};
}
constexpr CopyCall device_to_device(const char* what, bool synchronous) {
  return {what, synchronous, true, true, true, true};
}

CuResult copy_peer(const CopyCall& call, CuDevicePtr target, CuContext target_context, CuDevicePtr source,
                   CuContext source_context, std::size_t bytes, CuStream stream) {
  End to = end_at(target), from = end_at(source);
  {
    const Lock lock(driver().mutex);
    to.context = find_context(target_context);
    from.context = find_context(source_context);
    if (to.context == nullptr || from.context == nullptr) return CuResult::kInvalidContext;
  }
  return copy(call, to, from, bytes, stream);
}

CuResult fill(const char* what, CuDevicePtr target, const void* value, std::size_t value_bytes,
              std::size_t count, CuStream stream_handle, bool synchronous) {
  Driver& state = driver();
  Lock lock(state.mutex);
  StreamPtr stream;
  CuResult result = find_stream(stream_handle, &stream);
  if (result != CuResult::kSuccess) return result;
  if (count == 0) return CuResult::kSuccess;
  const std::size_t bytes = count * value_bytes;
  End end = end_at(target);
  end.context = stream->context;
  end.place = place_of(end.address, bytes);
  if (end.address == 0 || end.place == Place::kPageable ||
      (end.place == Place::kPinned && !is_mapped(end.address, bytes)) || bytes / value_bytes != count) {
    return CuResult::kInvalidValue;
  }
  if (end.address % value_bytes != 0) return CuResult::kInvalidValue;
  std::vector<Piece> checked;
  result = pieces_of(end, bytes, true, &checked);
  if (result == CuResult::kSuccess) result = refuse_freed(end, bytes, what);
  if (result == CuResult::kSuccess && synchronous) result = refuse_while_capturing();
  if (result != CuResult::kSuccess) return result;

  Operation operation;
  operation.what = what;
  operation.bytes = bytes;
  operation.touches.push_back({end.address, end.address + bytes});
  std::uint32_t pattern = 0;
  std::memcpy(&pattern, value, value_bytes);
  operation.run = [end, bytes, pattern, value_bytes, what](Lock& running) {
    std::vector<Piece> pieces;
    if (pieces_of(end, bytes, true, &pieces) != CuResult::kSuccess) return lost(end, bytes, what);
    const CuResult available = check_available(end, bytes, what);
    if (available != CuResult::kSuccess) return available;
    running.unlock();
    for (const Piece& piece : pieces) {
      // Pieces begin and end on pages, or where the aligned range does: none splits a value.
      for (std::size_t i = 0; i < piece.bytes; i += value_bytes) {
        std::memcpy(piece.alias + i, &pattern, value_bytes);
      }
    }
    running.lock();
    return CuResult::kSuccess;
  };
  const MarkPtr mark = operation.mark;
  result = enqueue(stream, std::move(operation));
  if (result != CuResult::kSuccess || !synchronous || end.place != Place::kPinned) return result;
  state.scheduler.wait(lock, mark);
  return mark->failure;
}

}  // namespace

CuResult cuMemcpy(CuDevicePtr target, CuDevicePtr source, std::size_t bytes) {
  return copy(from_any_to_any("cuMemcpy", true), end_at(target), end_at(source), bytes, nullptr);
}
CuResult cuMemcpyAsync(CuDevicePtr target, CuDevicePtr source, std::size_t bytes, CuStream stream) {
  return copy(from_any_to_any("cuMemcpyAsync", false), end_at(target), end_at(source), bytes, stream);
}
CuResult cuMemcpyHtoD_v2(CuDevicePtr target, const void* source, std::size_t bytes) {
  return copy(host_to_device("cuMemcpyHtoD", true), end_at(target), end_at(source), bytes, nullptr);
}
CuResult cuMemcpyHtoDAsync_v2(CuDevicePtr target, const void* source, std::size_t bytes, CuStream stream) {
  return copy(host_to_device("cuMemcpyHtoDAsync", false), end_at(target), end_at(source), bytes, stream);
}
CuResult cuMemcpyDtoH_v2(void* target, CuDevicePtr source, std::size_t bytes) {
  return copy(device_to_host("cuMemcpyDtoH", true), end_at(target), end_at(source), bytes, nullptr);
}
CuResult cuMemcpyDtoHAsync_v2(void* target, CuDevicePtr source, std::size_t bytes, CuStream stream) {
  return copy(device_to_host("cuMemcpyDtoHAsync", false), end_at(target), end_at(source), bytes, stream);
}
CuResult cuMemcpyDtoD_v2(CuDevicePtr target, CuDevicePtr source, std::size_t bytes) {
  return copy(device_to_device("cuMemcpyDtoD", true), end_at(target), end_at(source), bytes, nullptr);
}
CuResult cuMemcpyDtoDAsync_v2(CuDevicePtr target, CuDevicePtr source, std::size_t bytes, CuStream stream) {
  return copy(device_to_device("cuMemcpyDtoDAsync", false), end_at(target), end_at(source), bytes, stream);
}
CuResult cuMemcpyPeer(CuDevicePtr target, CuContext target_context, CuDevicePtr source,
                      CuContext source_context, std::size_t bytes) {
  return copy_peer(device_to_device("cuMemcpyPeer", true), target, target_context, source, source_context,
                   bytes, nullptr);
}
CuResult cuMemcpyPeerAsync(CuDevicePtr target, CuContext target_context, CuDevicePtr source,
                           CuContext source_context, std::size_t bytes, CuStream stream) {
  return copy_peer(device_to_device("cuMemcpyPeerAsync", false), target, target_context, source,
                   source_context, bytes, stream);
}

CuResult cuMemsetD8_v2(CuDevicePtr target, unsigned char value, std::size_t count) {
  return fill("cuMemsetD8", target, &value, sizeof(value), count, nullptr, true);
}
CuResult cuMemsetD8Async(CuDevicePtr target, unsigned char value, std::size_t count, CuStream stream) {
  return fill("cuMemsetD8Async", target, &value, sizeof(value), count, stream, false);
}
CuResult cuMemsetD16_v2(CuDevicePtr target, unsigned short value, std::size_t count) {
  return fill("cuMemsetD16", target, &value, sizeof(value), count, nullptr, true);
}
CuResult cuMemsetD16Async(CuDevicePtr target, unsigned short value, std::size_t count, CuStream stream) {
  return fill("cuMemsetD16Async", target, &value, sizeof(value), count, stream, false);
}
CuResult cuMemsetD32_v2(CuDevicePtr target, unsigned value, std::size_t count) {
  return fill("cuMemsetD32", target, &value, sizeof(value), count, nullptr, true);
}
CuResult cuMemsetD32Async(CuDevicePtr target, unsigned value, std::size_t count, CuStream stream) {
  return fill("cuMemsetD32Async", target, &value, sizeof(value), count, stream, false);
}

}  // namespace forebay::fake_cuda
