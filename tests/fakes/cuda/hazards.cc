// The users of device memory: resolving ranges to bytes, and noticing that memory goes away under queued
// work.
#include <algorithm>
#include <cstdio>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

bool overlaps(const Operation& operation, Address begin, Address end) {
  return std::any_of(operation.touches.begin(), operation.touches.end(),
                     [&](const Range& range) { return range.begin < end && begin < range.end; });
}

CuMemAccessFlags access_of(const std::vector<CuMemAccessFlags>& access, int device) {
  const auto index = static_cast<std::size_t>(device);
  return index < access.size() ? access[index] : CuMemAccessFlags::kNone;
}

}  // namespace

bool accessible(const Context& context, const Mapping& mapping, bool write) {
  CuMemAccessFlags allowed = CuMemAccessFlags::kNone;
  if (mapping.kind == MappingKind::kVirtual) {
    allowed = access_of(mapping.access, context.device);
  } else if (mapping.kind == MappingKind::kPool) {
    allowed = access_of(mapping.pool->access, context.device);
  } else {
    const ContextPtr owner = mapping.context.lock();
    const bool reaches =
        owner != nullptr && (owner->device == context.device || context.peers.count(owner->handle) != 0);
    if (reaches) allowed = CuMemAccessFlags::kReadWrite;
  }
  return allowed == CuMemAccessFlags::kReadWrite || (!write && allowed == CuMemAccessFlags::kRead);
}

CuResult resolve(const Context& context, Address address, std::size_t bytes, bool write,
                 std::vector<Piece>* pieces) {
  while (bytes != 0) {
    Mapping* const mapping = driver().memory.find(address);
    if (mapping == nullptr || !accessible(context, *mapping, write)) return CuResult::kInvalidValue;
    const std::size_t offset = address - mapping->begin;
    const std::size_t here = std::min(bytes, mapping->bytes - offset);
    if (pieces != nullptr) pieces->push_back({mapping->physical, mapping->physical->alias + offset, here});
    address += here;
    bytes -= here;
  }
  return CuResult::kSuccess;
}

void check_unused(Lock& lock, const char* entry, Address address, std::size_t bytes) {
  Driver& state = driver();
  const Address end = address + bytes;
  std::vector<std::pair<ContextPtr, std::string>> found;
  for (const StreamPtr& stream : state.scheduler.busy()) {
    if (stream_failure(*stream) != CuResult::kSuccess) continue;  // Work queued there will not run.
    for (const Operation& operation : stream->queue) {
      if (!overlaps(operation, address, end)) continue;
      char text[256];
      std::snprintf(text, sizeof(text), "%zu bytes at 0x%zx go away while %s %s on stream %llu uses them",
                    bytes, address,
                    stream->running && &operation == &stream->queue.front() ? "running" : "queued",
                    operation.what, static_cast<unsigned long long>(stream->id));
      found.emplace_back(stream->context, text);
      break;
    }
  }
  for (const auto& [context, text] : found) hazard(*context, entry, text);
  // The fake's own memory must not disappear under running work.
  state.scheduler.wait_running(
      lock, [&](const Stream&, const Operation& operation) { return overlaps(operation, address, end); });
}

void remove_allocation(Address begin) {
  Memory& memory = driver().memory;
  memory.remove_mapping(begin);
  memory.release(begin);
}

}  // namespace forebay::fake_cuda
