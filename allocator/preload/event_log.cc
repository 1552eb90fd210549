#include "allocator/preload/event_log.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "forebay/log.h"
#include "forebay/units.h"

namespace forebay {
namespace {

constexpr char kSuffix[] = ".events";
constexpr std::uint64_t kPage = 4096;
// Disk space that the file takes at a time. Smaller: more system calls. Larger: a process with few events
// takes more.
constexpr std::uint64_t kSegmentBytes = std::uint64_t{256} << 10;
// One part in this many of the bound is for the table of live blocks.
constexpr std::uint64_t kBlockShare = 4;

std::atomic<EventLog*> log_of_process{nullptr};

void add(std::atomic<std::uint64_t>& counter, std::uint64_t bytes) {
  counter.store(counter.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
}
void raise(std::atomic<std::uint64_t>& peak, std::uint64_t bytes) {
  if (bytes > peak.load(std::memory_order_relaxed)) peak.store(bytes, std::memory_order_relaxed);
}

std::uint64_t clock_ns(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

std::uint64_t header_bytes() {
  return align_up(sizeof(PreloadEventsHeader), kPage);
}

// 0, or an errno.
int take_disk(int file, std::uint64_t offset, std::uint64_t bytes) {
  return ::posix_fallocate(file, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

}  // namespace

EventLog* EventLog::of_process() noexcept {
  return log_of_process.load(std::memory_order_acquire);
}

// Touching mapped memory without disk space behind it kills the process, so the space is taken first. The
// file is opened by its name each time: programs close descriptors that they do not know, and another file
// may then have the number. The directory may be another user's by then, with a link in the file's place.
int EventLog::back(std::uint64_t offset, std::uint64_t bytes) const {
  const int file = ::open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return errno;
  struct stat facts {};
  const bool is_same = ::fstat(file, &facts) == 0 && facts.st_dev == device_ && facts.st_ino == inode_;
  const int error = is_same ? take_disk(file, offset, bytes) : ESTALE;
  ::close(file);
  return error;
}

void EventLog::tell_of_lack(std::uint64_t kept_bytes, int error) {
  const std::string kept = kept_bytes == 0
                               ? "no events are kept"
                               : "only the latest " + format_bytes(kept_bytes) + " of events are kept";
  set_preload_text(record_.problem,
                   kept + ": there is no more room for them in " + path_.substr(0, path_.find_last_of('/')) +
                       " (" + std::strerror(error) + "); make room there, or have records elsewhere (" +
                       kPreloadRecordsVariable + ", forebay run --records)");
}

void EventLog::start(PreloadRecord& record) {
  const char* chosen = std::getenv(kPreloadEventsVariable);
  if (chosen == nullptr || chosen[0] == '\0') return;
  const auto complain = [&](const std::string& found) {
    const std::string text = "no events are kept (" + std::string(kPreloadEventsVariable) + "): " + found;
    log(LogLevel::kWarning, "%s", text.c_str());
    set_preload_text(record.problem, text);
  };
  std::uint64_t bound = 0;
  if (!parse_bytes(chosen, &bound) ||
      (bound != 0 && (bound < kPreloadEventsLeastBytes || bound > kPreloadEventsMostBytes))) {
    return complain("it is '" + std::string(chosen) + "'; use " + format_bytes(kPreloadEventsLeastBytes) +
                    " to " + format_bytes(kPreloadEventsMostBytes) + ", such as 256MiB, or 0 for none");
  }
  if (bound == 0) return;
  const char* directory = std::getenv(kPreloadRecordsVariable);
  if (directory == nullptr || directory[0] == '\0') {
    return complain(std::string(kPreloadRecordsVariable) + " names no directory; set it too");
  }
  const std::uint64_t block_bytes = bound / kBlockShare / kPage * kPage;
  const std::uint64_t event_bytes = (bound - block_bytes) / kPage * kPage;
  const std::uint64_t all_bytes = header_bytes() + event_bytes + block_bytes;
  std::string path;
  const int file = make_preload_file(directory, kSuffix, all_bytes, &path);
  if (file < 0 && errno == EFBIG) {
    return complain("this process may write no file of " + format_bytes(all_bytes) +
                    " (ulimit -f); ask for less");
  }
  if (file < 0) return complain(std::string(directory) + ": " + std::strerror(errno));
  void* memory = MAP_FAILED;
  struct stat facts {};
  if (take_disk(file, 0, header_bytes()) == 0 && ::fstat(file, &facts) == 0) {
    memory = ::mmap(nullptr, all_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  ::close(file);
  if (memory == MAP_FAILED) {
    ::unlink(path.c_str());
    return complain(std::string(directory) + " has no room for them; make some there, or name another by " +
                    kPreloadRecordsVariable);
  }
  auto* header = new (memory) PreloadEventsHeader();
  header->bytes = sizeof(PreloadEventsHeader);
  header->process = static_cast<std::int32_t>(::getpid());
  header->start_us = clock_ns(CLOCK_REALTIME) / 1000;
  header->event_offset = header_bytes();
  header->block_offset = header_bytes() + event_bytes;
  header->event_capacity.store(event_bytes / sizeof(PreloadEvent), std::memory_order_relaxed);
  char* const from_root = ::realpath(path.c_str(), nullptr);
  auto* made = new EventLog(static_cast<unsigned char*>(memory), from_root != nullptr ? from_root : path,
                            facts, record);
  std::free(from_root);
  made->block_limit_ = block_bytes / sizeof(PreloadBlock);
  header->magic.store(kPreloadEventsMagic, std::memory_order_release);
  set_preload_text(record.events, path.substr(path.find_last_of('/') + 1));
  log_of_process.store(made, std::memory_order_release);
}

EventLog::EventLog(unsigned char* memory, std::string path, const struct stat& facts, PreloadRecord& record)
    : memory_(memory),
      path_(std::move(path)),
      device_(facts.st_dev),
      inode_(facts.st_ino),
      record_(record),
      header_(*reinterpret_cast<PreloadEventsHeader*>(memory)),
      start_ns_(clock_ns(CLOCK_MONOTONIC)) {}

std::uint64_t EventLog::now() const {
  return clock_ns(CLOCK_MONOTONIC) - start_ns_;
}

// --- with the lock held ---

std::uint16_t EventLog::number_of(DriverStream stream) {
  if (stream == nullptr) return kPreloadPlainStream;
  if (stream == DRIVER_LEGACY_STREAM) return kPreloadLegacyStream;
  if (stream == DRIVER_PER_THREAD_STREAM) return kPreloadPerThreadStream;
  constexpr std::size_t kEntries = std::size(decltype(streams_){});
  // Handles are addresses; their middle bits differ.
  std::size_t index = (reinterpret_cast<std::uintptr_t>(stream) * 0x9E3779B97F4A7C15u >> 40) % kEntries;
  for (;; index = (index + 1) % kEntries) {
    StreamNumber& entry = streams_[index];
    if (entry.number != 0 && entry.stream == stream) return entry.number;
    if (entry.number != 0) continue;
    if (stream_count_ == kPreloadStreamLimit) return kPreloadStreamLimit - 1;
    entry = {stream, stream_count_++};
    return entry.number;
  }
}

PreloadDeviceCounts* EventLog::counts(int device) {
  return device >= 0 && device < kPreloadEventDevices ? &header_.devices[device] : nullptr;
}

void EventLog::append(const PreloadEvent& event) {
  std::uint64_t capacity = header_.event_capacity.load(std::memory_order_relaxed);
  if (written_ == backed_events_ && backed_events_ < capacity) {
    const std::uint64_t bytes = std::min(kSegmentBytes, (capacity - backed_events_) * sizeof(PreloadEvent));
    const int error = back(header_.event_offset + backed_events_ * sizeof(PreloadEvent), bytes);
    if (error == 0) {
      backed_events_ += bytes / sizeof(PreloadEvent);
    } else {
      // The disk is full: the ring is as large as it is now.
      capacity = backed_events_;
      header_.event_capacity.store(capacity, std::memory_order_release);
      tell_of_lack(capacity * sizeof(PreloadEvent), error);
    }
  }
  if (capacity == 0) return;
  auto* events = reinterpret_cast<PreloadEvent*>(memory_ + header_.event_offset);
  events[written_ % capacity] = event;
  header_.written.store(++written_, std::memory_order_release);
}

std::uint32_t EventLog::take_entry(const PreloadBlock& block) {
  auto* blocks = reinterpret_cast<PreloadBlock*>(memory_ + header_.block_offset);
  std::uint64_t index = free_entry_;
  if (index == UINT64_MAX) {
    if (block_count_ == backed_blocks_ && backed_blocks_ < block_limit_) {
      const std::uint64_t bytes =
          std::min(kSegmentBytes, (block_limit_ - backed_blocks_) * sizeof(PreloadBlock));
      if (back(header_.block_offset + backed_blocks_ * sizeof(PreloadBlock), bytes) == 0) {
        backed_blocks_ += bytes / sizeof(PreloadBlock);
      } else {
        block_limit_ = backed_blocks_;
      }
    }
    if (block_count_ == backed_blocks_) {
      add(header_.untold_blocks, 1);
      return kNoEventEntry;
    }
    index = block_count_++;
  } else {
    free_entry_ = blocks[index].number;
  }
  PreloadBlock& entry = blocks[index];
  PreloadBlock without_address = block;
  without_address.address = 0;
  entry = without_address;
  // Last: a reader uses every entry that has an address.
  std::atomic_ref(entry.address).store(block.address, std::memory_order_release);
  header_.block_count.store(block_count_, std::memory_order_release);
  return static_cast<std::uint32_t>(index);
}

void EventLog::leave_entry(std::uint32_t index) {
  if (index == kNoEventEntry) return;
  PreloadBlock& entry = reinterpret_cast<PreloadBlock*>(memory_ + header_.block_offset)[index];
  std::atomic_ref(entry.address).store(0, std::memory_order_release);
  entry.number = free_entry_;
  free_entry_ = index;
}

void EventLog::settle_peak(PreloadDeviceCounts& count, std::uint64_t arena_peak_bytes) {
  raise(count.peak_requested_bytes, count.requested_bytes.load(std::memory_order_relaxed));
  raise(count.peak_reserved_bytes,
        std::max(count.arena_bytes.load(std::memory_order_relaxed), arena_peak_bytes) +
            count.elsewhere_bytes.load(std::memory_order_relaxed));
}

void EventLog::look(int device, const Arena* arena, std::uint64_t time_ns) {
  PreloadDeviceCounts* const count = counts(device);
  if (count == nullptr) return;
  const ArenaStatistics statistics = arena == nullptr ? ArenaStatistics() : arena->statistics();
  const std::uint64_t before = count->arena_bytes.load(std::memory_order_relaxed);
  // The arena may have taken memory and given it back within one call.
  std::uint64_t& known_peak = arena_peaks_[device];
  const std::uint64_t new_peak =
      statistics.peak_reserved_bytes > known_peak ? statistics.peak_reserved_bytes : 0;
  known_peak = statistics.peak_reserved_bytes;
  if (statistics.reserved_bytes == before && new_peak == 0) return;
  count->arena_bytes.store(statistics.reserved_bytes, std::memory_order_relaxed);
  settle_peak(*count, new_peak);
  if (statistics.reserved_bytes == before) return;
  append({.address = before,
          .bytes = statistics.reserved_bytes,
          .time_ns = time_ns,
          .device = static_cast<std::int16_t>(device),
          .kind = PreloadEventKind::kReserved});
}

void EventLog::forget(const BlockFacts& facts) {
  leave_entry(facts.event_entry);
  PreloadDeviceCounts* const count = counts(facts.event_device);
  if (count == nullptr) return;
  add(count->frees, 1);
  add(count->requested_bytes, std::uint64_t{0} - facts.bytes);
  if (facts.server != PreloadServer::kArena) add(count->elsewhere_bytes, std::uint64_t{0} - facts.bytes);
}

// --- events ---

PreloadEvent EventLog::event_of(PreloadEventKind kind, const EventRequest& request, std::uint64_t address) {
  return {.address = address,
          .bytes = request.bytes,
          .time_ns = now(),
          .stream = number_of(request.stream),
          .device = static_cast<std::int16_t>(request.device),
          .server = request.server,
          .kind = kind};
}

void EventLog::allocated(DevicePtr address, const EventRequest& request, const Arena* arena,
                         BlockFacts* facts) {
  const std::lock_guard lock(mutex_);
  const PreloadEvent event =
      event_of(PreloadEventKind::kAllocation, request, reinterpret_cast<std::uintptr_t>(address));
  if (arena != nullptr) look(request.device, arena, event.time_ns);
  facts->server = event.server;
  facts->event_stream = event.stream;
  facts->event_device = event.device;
  facts->event_entry = take_entry({.address = event.address,
                                   .bytes = event.bytes,
                                   .number = written_,
                                   .stream = event.stream,
                                   .device = event.device,
                                   .server = event.server});
  append(event);
  PreloadDeviceCounts* const count = counts(request.device);
  if (count == nullptr) return;
  add(count->allocations, 1);
  add(count->requested_bytes, request.bytes);
  if (request.server != PreloadServer::kArena) add(count->elsewhere_bytes, request.bytes);
  settle_peak(*count, 0);
}

void EventLog::freed(DevicePtr address, const BlockFacts& facts) {
  const std::uint64_t time_ns = now();
  const std::lock_guard lock(mutex_);
  append({.address = reinterpret_cast<std::uintptr_t>(address),
          .bytes = facts.bytes,
          .time_ns = time_ns,
          .stream = facts.event_stream,
          .device = facts.event_device,
          .server = facts.server,
          .kind = PreloadEventKind::kFree});
  forget(facts);
}

void EventLog::lost(const BlockFacts& facts) {
  const std::lock_guard lock(mutex_);
  forget(facts);
}

// The free memory of the driver and of the arena, within the limit of the process.
std::uint64_t EventLog::free_bytes(int device, std::uint64_t driver_free_bytes) {
  const PreloadDeviceCounts* const count = counts(device);
  if (count == nullptr) return driver_free_bytes;
  const std::uint64_t live = count->requested_bytes.load(std::memory_order_relaxed);
  const std::uint64_t live_in_arena = live - count->elsewhere_bytes.load(std::memory_order_relaxed);
  const std::uint64_t in_arena = count->arena_bytes.load(std::memory_order_relaxed);
  const std::uint64_t capacity = count->capacity_bytes.load(std::memory_order_relaxed);
  const std::uint64_t free = driver_free_bytes + in_arena - std::min(in_arena, live_in_arena);
  return capacity == 0 ? free : std::min(free, capacity - std::min(capacity, live));
}

void EventLog::refused(const EventRequest& request, std::uint64_t driver_free_bytes) {
  const std::lock_guard lock(mutex_);
  append(event_of(PreloadEventKind::kRefused, request, free_bytes(request.device, driver_free_bytes)));
  if (PreloadDeviceCounts* const count = counts(request.device)) add(count->refused, 1);
}

void EventLog::untracked(const EventRequest& request) {
  const std::lock_guard lock(mutex_);
  append(event_of(PreloadEventKind::kUntracked, request, 0));
}

void EventLog::look_at(int device, const Arena* arena) {
  const std::uint64_t time_ns = now();
  const std::lock_guard lock(mutex_);
  look(device, arena, time_ns);
}

void EventLog::set_capacity(int device, std::uint64_t bytes, std::uint64_t chunk_bytes) {
  const std::lock_guard lock(mutex_);
  PreloadDeviceCounts* const count = counts(device);
  if (count == nullptr) return;
  count->capacity_bytes.store(bytes, std::memory_order_relaxed);
  count->chunk_bytes.store(chunk_bytes, std::memory_order_relaxed);
}

}  // namespace forebay
