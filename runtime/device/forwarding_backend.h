// ForwardingBackend: a Backend that passes every call to another one. A wrapper of a backend derives from it
// and overrides the calls that it changes.
//
// Threads: as the backend below.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/backend.h"

namespace forebay {

class ForwardingBackend : public Backend {
 public:
  // Requires: `below` outlives this.
  explicit ForwardingBackend(Backend& below) noexcept : below_(below) {}

  const Capabilities& capabilities() const noexcept override { return below_.capabilities(); }
  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) override {
    return below_.reserve(bytes, alignment);
  }
  Status release(DevicePtr base, std::size_t bytes) override { return below_.release(base, bytes); }
  Result<Chunk> chunk_create(std::size_t bytes) override { return below_.chunk_create(bytes); }
  Status chunk_destroy(Chunk chunk) override { return below_.chunk_destroy(chunk); }
  Status map(DevicePtr address, Chunk chunk) override { return below_.map(address, chunk); }
  Status unmap(DevicePtr address, std::size_t bytes) override { return below_.unmap(address, bytes); }
  Status set_access(DevicePtr address, std::size_t bytes) override {
    return below_.set_access(address, bytes);
  }
  Result<DevicePtr> alloc(std::size_t bytes) override { return below_.alloc(bytes); }
  Status free(DevicePtr address) override { return below_.free(address); }
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
  Result<Stream> urgent_stream_create() override { return below_.urgent_stream_create(); }
  Status stream_destroy(Stream stream) override { return below_.stream_destroy(stream); }
  Status stream_synchronize(Stream stream) override { return below_.stream_synchronize(stream); }
  Result<Event> event_create() override { return below_.event_create(); }
  Result<Event> timed_event_create() override { return below_.timed_event_create(); }
  Status event_destroy(Event event) override { return below_.event_destroy(event); }
  Status event_record(Event event, Stream stream) override { return below_.event_record(event, stream); }
  Result<bool> event_query(Event event) override { return below_.event_query(event); }
  Status event_synchronize(Event event) override { return below_.event_synchronize(event); }
  Result<std::chrono::nanoseconds> elapsed(Event begin, Event end) override {
    return below_.elapsed(begin, end);
  }
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
  AccessGuard* access_guard() noexcept override { return below_.access_guard(); }

 private:
  Backend& below_;
};

}  // namespace forebay
