#include "allocator/preload/process_arenas.h"

#include <pthread.h>

#include <cstdlib>
#include <utility>

#include "allocator/preload/event_log.h"
#include "allocator/preload/learned_file.h"
#include "allocator/preload/record.h"
#include "forebay/log.h"
#include "forebay/units.h"

namespace forebay {

// A stream that waits for a thread's default stream, and the event that it waits for.
struct ProcessArenas::Relay {
  Stream stream;
  Event event;
  Relay* next = nullptr;  // In Entry::left_relays.
};

// The relays of one thread, by device.
struct ProcessArenas::ThreadRelays {
  struct Held {
    Relay* relay = nullptr;
    std::uint64_t generation = 0;
  };
  Held held[kPreloadDeviceLimit];
};

int ProcessArenas::Use::device() const noexcept {
  return entry_->device;
}
Arena& ProcessArenas::Use::arena() const noexcept {
  return *entry_->arena;
}
CudaBackend& ProcessArenas::Use::backend() const noexcept {
  return *entry_->backend;
}
std::uint64_t ProcessArenas::Use::generation() const noexcept {
  return entry_->generation;
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
      *why = Status(StatusCode::kUnsupported, "cannot make an arena on cuda:", device, ": ",
                    kPreloadDeviceLimit, " devices can have one; use one with a lower number");
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
    found = find(device);  // Empty if it was dropped meanwhile.
  }
  return found;
}

// Makes an arena that follows learned placements.
Status ProcessArenas::follow(Entry& entry, ArenaOptions options, const char* path) {
  FOREBAY_ASSIGN_OR_RETURN(const std::string learned, read_learned_file(path));
  options.learned = learned;
  FOREBAY_ASSIGN_OR_RETURN(entry.arena, Arena::create(*entry.backend, options));
  return {};
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
  // A program's kernels may use addresses of all devices that it allocates on.
  CudaBackendOptions cuda_options{.ordinal = device, .open_to_peers = true};
  if (const char* room = std::getenv(kPreloadRoomVariable); room != nullptr && room[0] != '\0') {
    std::uint64_t bytes = 0;
    if (!parse_bytes(room, &bytes)) {
      return {StatusCode::kInvalidArgument, std::string("cannot keep room for the driver: ") +
                                                kPreloadRoomVariable + " is '" + room +
                                                "'; use bytes, such as 384MiB, or 0"};
    }
    cuda_options.room_bytes = bytes;
  }
  FOREBAY_ASSIGN_OR_RETURN(entry.backend, CudaBackend::create(cuda_options));
  const Capabilities& cuda = entry.backend->capabilities();
  if (options.limit_bytes > cuda.memory_bytes) options.limit_bytes = 0;
  const std::size_t capacity_bytes = options.limit_bytes != 0 ? options.limit_bytes : cuda.memory_bytes;
  // Knowledge that cannot be used costs no more than its gain.
  if (const char* path = std::getenv(kPreloadLearnedVariable); path != nullptr && path[0] != '\0') {
    const Status followed = follow(entry, options, path);
    if (!followed.ok()) log(LogLevel::kWarning, "%s; going on without", followed.message().c_str());
  }
  if (entry.arena == nullptr) {
    FOREBAY_ASSIGN_OR_RETURN(entry.arena, Arena::create(*entry.backend, options));
  }
  entry.device = device;
  entry.context = context_of == nullptr ? nullptr : context_of(device);
  if (EventLog* const events = EventLog::of_process())
    events->set_capacity(device, capacity_bytes, entry.arena->chunk_bytes());
  log(LogLevel::kInfo, "%s: an arena of up to %s serves this process", cuda.name,
      format_bytes(capacity_bytes).c_str());
  return {};
}

BlockBook::Blocks ProcessArenas::drop(int device) {
  if (device < 0 || device >= kPreloadDeviceLimit) return {};
  Entry& entry = entries_[device];
  const std::unique_lock lock(entry.mutex);
  if (entry.arena == nullptr) return {};
  BlockBook::Blocks gone = blocks_.forget_device(device);
  entry.arena.reset();
  entry.backend.reset();  // Destroys the streams and events of the relays.
  entry.context = nullptr;
  Relay* left = nullptr;
  {
    const std::lock_guard relay_lock(entry.relay_mutex);
    ++entry.generation;  // Makes the relays that threads hold invalid.
    std::swap(left, entry.left_relays);
    entry.relay_count = 0;
    delete std::exchange(entry.shared_relay, nullptr);
  }
  while (left != nullptr) delete std::exchange(left, left->next);
  return gone;
}

// --- default streams of threads ---
//
// Each thread that uses its default stream gets a relay: a stream of the arena's. Whenever the thread frees a
// block, it records an event on its default stream and lets the relay wait for it. So the relay stands for
// the default stream, and other streams can wait for it.

// The most relays of single threads on a device. Further threads share one: they free as others do, and are
// served from idle memory alone. Larger: more driver memory.
constexpr int kRelayLimit = 32;

// Called when a thread ends: its relays become available to other threads. Calls no driver, which may be
// gone.
void ProcessArenas::leave_relays(void* relays) {
  auto* const left = static_cast<ThreadRelays*>(relays);
  for (int device = 0; device < kPreloadDeviceLimit; ++device) {
    const ThreadRelays::Held& held = left->held[device];
    if (held.relay == nullptr) continue;
    Entry& entry = of_process().entries_[device];
    const std::lock_guard lock(entry.relay_mutex);
    if (held.generation != entry.generation) {
      delete held.relay;
      continue;
    }
    held.relay->next = entry.left_relays;
    entry.left_relays = held.relay;
  }
  delete left;
}

// Takes a relay of an ended thread whose work has all run, so that memory freed on it is idle.
ProcessArenas::Relay* ProcessArenas::take_left_relay(Entry& entry) {
  Relay* left = nullptr;
  {
    const std::lock_guard lock(entry.relay_mutex);
    std::swap(left, entry.left_relays);
  }
  Relay* taken = nullptr;
  while (left != nullptr) {
    Relay* const one = std::exchange(left, left->next);
    const Result<bool> reached =
        taken == nullptr ? entry.backend->event_query(one->event) : Result<bool>(false);
    if (reached.ok() && reached.value()) {
      taken = one;
      continue;
    }
    const std::lock_guard lock(entry.relay_mutex);
    one->next = entry.left_relays;
    entry.left_relays = one;
  }
  return taken;
}

ProcessArenas::Relay* ProcessArenas::make_relay(Entry& entry) {
  const Result<Stream> stream = entry.backend->stream_create();
  const Result<Event> event = entry.backend->event_create();
  return stream.ok() && event.ok() ? new Relay{stream.value(), event.value()} : nullptr;
}

ProcessArenas::Relay* ProcessArenas::relay_of_thread(Entry& entry) {
  static pthread_key_t key;
  static const bool has_key = ::pthread_key_create(&key, &leave_relays) == 0;
  if (!has_key) return nullptr;
  auto* relays = static_cast<ThreadRelays*>(::pthread_getspecific(key));
  if (relays == nullptr) {
    relays = new ThreadRelays;
    if (::pthread_setspecific(key, relays) != 0) {
      delete relays;
      return nullptr;
    }
  }
  ThreadRelays::Held& held = relays->held[entry.device];
  if (held.relay != nullptr && held.generation == entry.generation) return held.relay;
  delete held.relay;  // Its arena, stream and event are gone.
  held.relay = take_left_relay(entry);
  if (held.relay == nullptr) {
    {
      const std::lock_guard lock(entry.relay_mutex);
      if (entry.relay_count == kRelayLimit) return nullptr;
      ++entry.relay_count;
    }
    held.relay = make_relay(entry);
    if (held.relay == nullptr) return nullptr;  // Stays counted: the next attempt would fail too.
  }
  held.generation = entry.generation;
  return held.relay;
}

Stream ProcessArenas::thread_stream(const Use& use) {
  const Relay* const relay = relay_of_thread(*use.entry_);
  return relay == nullptr ? Stream() : relay->stream;
}

Result<Stream> ProcessArenas::stream_behind_thread(const Use& use) {
  Entry& entry = *use.entry_;
  CudaBackend& backend = *entry.backend;
  const auto follows = [&](const Relay& relay) {
    return backend.event_record(relay.event, CudaBackend::per_thread_stream()).ok() &&
           backend.stream_wait(relay.stream, relay.event).ok();
  };
  if (const Relay* const relay = relay_of_thread(entry)) {
    if (follows(*relay)) return relay->stream;
  } else {
    const std::lock_guard lock(entry.relay_mutex);
    if (entry.shared_relay == nullptr) entry.shared_relay = make_relay(entry);
    if (entry.shared_relay != nullptr && follows(*entry.shared_relay)) return entry.shared_relay->stream;
  }
  FOREBAY_RETURN_IF_ERROR(backend.stream_synchronize(CudaBackend::per_thread_stream()));
  return Stream();
}

}  // namespace forebay
