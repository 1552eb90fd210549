// WatchedBackend: forwards to another backend and knows which memory every address shows, so that a test can
// tell without reading a byte whether two addresses show the same memory, and hears of every call that
// changes mappings or that concerns an event.
//
// Memory is named by a number per byte that no other byte ever had: a chunk made later gets new ones.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "forebay/backend.h"
#include "runtime/device/forwarding_backend.h"

namespace forebay::testing {

// Bytes [begin, end) of the device's memory.
struct Extent {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

class WatchedBackend final : public ForwardingBackend {
 public:
  explicit WatchedBackend(Backend& backend) : ForwardingBackend(backend) {}

  // Called before the call is forwarded, without a lock held.
  std::function<void(DevicePtr address, std::size_t bytes)> on_unmap;
  std::function<void(DevicePtr address, std::size_t bytes, bool mapped_elsewhere)> on_map;
  std::function<void(Stream stream)> on_event_record;

  // The memory that [address, address + bytes) shows, neighbours joined. Fails the test where nothing is
  // mapped or accessible.
  std::vector<Extent> shown(DevicePtr address, std::size_t bytes) const {
    std::vector<Extent> extents;
    const std::lock_guard lock(mutex_);
    for (std::size_t done = 0; done < bytes;) {
      const Mapping* mapping = find(address + done);
      if (mapping == nullptr || !mapping->accessible) {
        ADD_FAILURE() << "nothing can be used at " << static_cast<void*>(address + done);
        return extents;
      }
      const auto inside = static_cast<std::size_t>(address + done - mapping->address);
      const std::size_t part = std::min(bytes - done, mapping->bytes - inside);
      const std::uint64_t begin = mapping->memory + inside;
      if (!extents.empty() && extents.back().end == begin) {
        extents.back().end += part;
      } else {
        extents.push_back({begin, begin + part});
      }
      done += part;
    }
    return extents;
  }
  // The whole chunk that is shown at `address`, and at how many addresses it is mapped.
  Extent chunk_at(DevicePtr address, int* mapping_count = nullptr) const {
    const std::lock_guard lock(mutex_);
    const Mapping* mapping = find(address);
    if (mapping == nullptr) return {};
    if (mapping_count != nullptr) {
      *mapping_count = 0;
      for (const auto& [at, other] : mappings_) *mapping_count += other.memory == mapping->memory;
    }
    return {mapping->memory, mapping->memory + mapping->bytes};
  }
  std::size_t mapping_count() const {
    const std::lock_guard lock(mutex_);
    return mappings_.size();
  }

  Result<Chunk> chunk_create(std::size_t bytes) override {
    Result<Chunk> chunk = ForwardingBackend::chunk_create(bytes);
    if (!chunk.ok()) return chunk;
    const std::lock_guard lock(mutex_);
    chunks_[chunk.value().handle] = {next_memory_, bytes, 0};
    next_memory_ += bytes + kGap;
    return chunk;
  }
  Status chunk_destroy(Chunk chunk) override {
    {
      const std::lock_guard lock(mutex_);
      chunks_.erase(chunk.handle);
    }
    return ForwardingBackend::chunk_destroy(chunk);
  }
  Status map(DevicePtr address, Chunk chunk) override {
    PhysicalMemory memory;
    {
      const std::lock_guard lock(mutex_);
      memory = chunks_[chunk.handle];
    }
    if (on_map) on_map(address, memory.bytes, memory.mapping_count > 0);
    Status status = ForwardingBackend::map(address, chunk);
    if (!status.ok()) return status;
    const std::lock_guard lock(mutex_);
    ++chunks_[chunk.handle].mapping_count;
    mappings_[address] = {address, memory.bytes, memory.begin, chunk.handle, false};
    return status;
  }
  Status unmap(DevicePtr address, std::size_t bytes) override {
    if (on_unmap) on_unmap(address, bytes);
    Status status = ForwardingBackend::unmap(address, bytes);
    if (!status.ok()) return status;
    const std::lock_guard lock(mutex_);
    for (auto at = mappings_.lower_bound(address); at != mappings_.end() && at->first < address + bytes;) {
      const auto chunk = chunks_.find(at->second.chunk);
      if (chunk != chunks_.end()) --chunk->second.mapping_count;
      at = mappings_.erase(at);
    }
    return status;
  }
  Status set_access(DevicePtr address, std::size_t bytes) override {
    Status status = ForwardingBackend::set_access(address, bytes);
    if (!status.ok()) return status;
    const std::lock_guard lock(mutex_);
    for (auto at = mappings_.lower_bound(address); at != mappings_.end() && at->first < address + bytes; ++at)
      at->second.accessible = true;
    return status;
  }
  Status event_record(Event event, Stream stream) override {
    if (on_event_record) on_event_record(stream);
    return ForwardingBackend::event_record(event, stream);
  }

 private:
  // So that the last byte of one chunk and the first of the next are never taken for neighbours.
  static constexpr std::uint64_t kGap = 1u << 20;

  struct PhysicalMemory {
    std::uint64_t begin = 0;
    std::size_t bytes = 0;
    int mapping_count = 0;
  };
  struct Mapping {
    DevicePtr address = nullptr;
    std::size_t bytes = 0;
    std::uint64_t memory = 0;
    std::uint64_t chunk = 0;
    bool accessible = false;
  };

  const Mapping* find(DevicePtr address) const {
    auto at = mappings_.upper_bound(address);
    if (at == mappings_.begin()) return nullptr;
    --at;
    return address < at->first + at->second.bytes ? &at->second : nullptr;
  }

  mutable std::mutex mutex_;
  std::map<std::uint64_t, PhysicalMemory> chunks_;
  std::map<DevicePtr, Mapping> mappings_;
  std::uint64_t next_memory_ = kGap;
};

}  // namespace forebay::testing
