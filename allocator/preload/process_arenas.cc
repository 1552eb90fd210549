#include "allocator/preload/process_arenas.h"

#include <cstdlib>
#include <mutex>
#include <utility>

#include "forebay/log.h"
#include "forebay/preload_record.h"
#include "forebay/units.h"

namespace forebay {

int ProcessArenas::Use::device() const noexcept {
  return entry_->device;
}
Arena& ProcessArenas::Use::arena() const noexcept {
  return *entry_->arena;
}
CudaBackend& ProcessArenas::Use::backend() const noexcept {
  return *entry_->backend;
}
void* ProcessArenas::Use::context() const noexcept {
  return entry_->context;
}

ProcessArenas& ProcessArenas::of_process() {
  static auto* const arenas = new ProcessArenas;
  return *arenas;
}

ProcessArenas::Use ProcessArenas::find(int device) {
  Use use;
  if (device < 0 || device >= kPreloadDeviceLimit) return use;
  Entry& entry = entries_[device];
  std::shared_lock lock(entry.mutex);
  if (entry.arena == nullptr) return use;
  use.lock_ = std::move(lock);
  use.entry_ = &entry;
  return use;
}

ProcessArenas::Use ProcessArenas::use(int device, void* (*context_of)(int device), Status* why) {
  Use found = find(device);
  while (!found) {
    if (device < 0 || device >= kPreloadDeviceLimit) {
      *why =
          Status(StatusCode::kUnsupported, "cannot make an arena on cuda:" + std::to_string(device) + ": " +
                                               std::to_string(kPreloadDeviceLimit) + " devices can have one");
      return found;
    }
    Entry& entry = entries_[device];
    {
      const std::unique_lock lock(entry.mutex);
      if (entry.has_given_up) {
        *why = entry.why;
        return found;
      }
      if (entry.arena == nullptr) {
        Status made = make(entry, device, context_of);
        if (!made.ok()) {
          entry.arena.reset();
          entry.backend.reset();
          entry.has_given_up = made.code() != StatusCode::kOutOfMemory;
          entry.why = made;
          *why = std::move(made);
          return found;
        }
      }
    }
    found = find(device);  // Empty when it was dropped in between.
  }
  return found;
}

Status ProcessArenas::make(Entry& entry, int device, void* (*context_of)(int device)) {
  ArenaOptions options;
  if (const char* limit = std::getenv(kPreloadMemoryVariable); limit != nullptr && limit[0] != '\0') {
    std::uint64_t bytes = 0;
    if (!parse_bytes(limit, &bytes) || bytes == 0) {
      return {StatusCode::kInvalidArgument, std::string("cannot limit the arena: ") + kPreloadMemoryVariable +
                                                " is '" + limit + "'; use bytes, such as 24GiB"};
    }
    options.limit_bytes = bytes;
  }
  Result<std::unique_ptr<CudaBackend>> backend = CudaBackend::create({.ordinal = device});
  FOREBAY_RETURN_IF_ERROR(backend.status());
  entry.backend = std::move(backend).value();
  if (options.limit_bytes > entry.backend->capabilities().memory_bytes) options.limit_bytes = 0;
  Result<std::unique_ptr<Arena>> arena = Arena::create(*entry.backend, options);
  FOREBAY_RETURN_IF_ERROR(arena.status());
  entry.arena = std::move(arena).value();
  entry.device = device;
  entry.context = context_of == nullptr ? nullptr : context_of(device);
  log(LogLevel::kInfo, "%s: an arena of up to %s serves this process", entry.backend->capabilities().name,
      format_bytes(options.limit_bytes != 0 ? options.limit_bytes
                                            : entry.backend->capabilities().memory_bytes)
          .c_str());
  return {};
}

std::size_t ProcessArenas::drop(int device) {
  if (device < 0 || device >= kPreloadDeviceLimit) return 0;
  Entry& entry = entries_[device];
  const std::unique_lock lock(entry.mutex);
  if (entry.arena == nullptr) return 0;
  const std::size_t bytes = blocks_.forget_device(device);
  entry.arena.reset();
  entry.backend.reset();  // With the relay.
  entry.relay = Stream();
  entry.context = nullptr;
  return bytes;
}

Status ProcessArenas::free_on_thread_stream(const Use& use, DevicePtr block) {
  Entry& entry = *use.entry_;
  CudaBackend& backend = *entry.backend;
  Stream relay;
  {
    const std::lock_guard lock(entry.relay_mutex);
    if (entry.relay == Stream()) {
      const Result<Stream> made = backend.stream_create();
      if (made.ok()) entry.relay = made.value();
    }
    relay = entry.relay;
  }
  const Result<Event> event =
      relay == Stream() ? Result<Event>(Status(StatusCode::kInternal, "no stream")) : backend.event_create();
  if (event.ok()) {
    Status queued = backend.event_record(event.value(), CudaBackend::per_thread_stream());
    if (queued.ok()) queued = backend.stream_wait(relay, event.value());
    (void)backend.event_destroy(event.value());
    if (queued.ok()) return use.arena().free(block, relay);
  }
  // Without an event: wait here.
  FOREBAY_RETURN_IF_ERROR(backend.stream_synchronize(CudaBackend::per_thread_stream()));
  return use.arena().free(block, Stream());
}

}  // namespace forebay
