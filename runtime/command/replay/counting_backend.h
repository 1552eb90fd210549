// CountingBackend: a Backend in front of another one that counts the calls which cost on a device, by kind,
// and the bytes taken from it. So the figures of a replay mean the same on every backend.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "forebay/backend.h"

namespace forebay {

// Calls of each kind so far, failed ones included.
struct DriverCalls {
  std::uint64_t create = 0;
  std::uint64_t destroy = 0;
  std::uint64_t map = 0;
  std::uint64_t unmap = 0;
  std::uint64_t set_access = 0;
  std::uint64_t alloc = 0;
  std::uint64_t free = 0;

  std::uint64_t total() const { return create + destroy + map + unmap + set_access + alloc + free; }
  friend DriverCalls operator-(const DriverCalls& a, const DriverCalls& b) {
    return {a.create - b.create,         a.destroy - b.destroy, a.map - b.map,  a.unmap - b.unmap,
            a.set_access - b.set_access, a.alloc - b.alloc,     a.free - b.free};
  }
};

class CountingBackend final : public Backend {
 public:
  // Requires: `below` outlives this.
  explicit CountingBackend(Backend& below) : below_(below) {}

  DriverCalls calls() const;
  // The sum of calls(); cheap enough to be asked around every allocation.
  std::uint64_t call_count() const noexcept { return call_count_.load(std::memory_order_relaxed); }
  // Bytes of the chunks and blocks held now; the most since the last reset_peak.
  std::uint64_t held_bytes() const;
  std::uint64_t peak_held_bytes() const;
  void reset_peak();

  const Capabilities& capabilities() const noexcept override { return below_.capabilities(); }
  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) override {
    return below_.reserve(bytes, alignment);
  }
  Status release(DevicePtr base, std::size_t bytes) override { return below_.release(base, bytes); }
  Result<Chunk> chunk_create(std::size_t bytes) override;
  Status chunk_destroy(Chunk chunk) override;
  Status map(DevicePtr address, Chunk chunk) override;
  Status unmap(DevicePtr address, std::size_t bytes) override;
  Status set_access(DevicePtr address, std::size_t bytes) override;
  Result<DevicePtr> alloc(std::size_t bytes) override;
  Status free(DevicePtr address) override;
  Status pin(void* address, std::size_t bytes) override { return below_.pin(address, bytes); }
  Status unpin(void* address) override { return below_.unpin(address); }
  MemoryInfo memory_info() override { return below_.memory_info(); }
  Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) override {
    return below_.copy_async(target, source, bytes, stream);
  }
  Status fill_async(DevicePtr target, std::uint8_t value, std::size_t bytes, Stream stream) override {
    return below_.fill_async(target, value, bytes, stream);
  }
  Result<Stream> stream_create() override { return below_.stream_create(); }
  Status stream_destroy(Stream stream) override { return below_.stream_destroy(stream); }
  Status stream_synchronize(Stream stream) override { return below_.stream_synchronize(stream); }
  Result<Event> event_create() override { return below_.event_create(); }
  Status event_destroy(Event event) override { return below_.event_destroy(event); }
  Status event_record(Event event, Stream stream) override { return below_.event_record(event, stream); }
  Result<bool> event_query(Event event) override { return below_.event_query(event); }
  Status event_synchronize(Event event) override { return below_.event_synchronize(event); }
  Status stream_wait(Stream stream, Event event) override { return below_.stream_wait(stream, event); }
  Status call_host(Stream stream, HostFunction function, void* argument) override {
    return below_.call_host(stream, function, argument);
  }
  Result<Module> load_module(const ModuleImage& image) override { return below_.load_module(image); }
  Status unload_module(Module module) override { return below_.unload_module(module); }
  Result<Kernel> get_kernel(Module module, const char* name) override {
    return below_.get_kernel(module, name);
  }
  Status launch(Kernel kernel, Dimensions grid, Dimensions block, const void* const* arguments,
                const std::size_t* argument_bytes, std::size_t argument_count, Stream stream) override {
    return below_.launch(kernel, grid, block, arguments, argument_bytes, argument_count, stream);
  }

 private:
  void count(std::uint64_t DriverCalls::*kind);
  void hold(std::uint64_t key, std::size_t bytes);
  void give_back(std::uint64_t key);

  Backend& below_;
  std::atomic<std::uint64_t> call_count_{0};
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  DriverCalls calls_;
  std::unordered_map<std::uint64_t, std::size_t> held_;  // Chunk handle, or address of a block.
  std::uint64_t held_bytes_ = 0;
  std::uint64_t peak_held_bytes_ = 0;
};

}  // namespace forebay
