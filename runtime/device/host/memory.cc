#include "runtime/device/host/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

#include "forebay/log.h"
#include "forebay/standard_streams.h"
#include "forebay/units.h"
#include "runtime/device/address_text.h"

namespace forebay {
namespace {

constexpr unsigned char kPoison = 0xCB;

// What the kernel refused. ENOMEM from mmap and mprotect is nearly always the limit on the number of
// mappings.
Status kernel_refusal(const std::string& what, int error) {
  if (error == ENOMEM) {
    return {StatusCode::kOutOfMemory, what +
                                          ": the kernel has no room for another mapping; raise "
                                          "vm.max_map_count, ulimit -v or the chunk size"};
  }
  return {StatusCode::kIoError, what + ": " + std::strerror(error) + "; see the system's limits (ulimit -a)"};
}

std::size_t machine_memory_bytes() noexcept {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page_bytes = ::sysconf(_SC_PAGESIZE);
  return static_cast<std::size_t>(std::max(pages, 1L)) * static_cast<std::size_t>(std::max(page_bytes, 1L));
}

}  // namespace

std::uint64_t next_host_handle() noexcept {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

Result<std::unique_ptr<HostMemory>> HostMemory::create(Options options) {
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (!is_power_of_two(options.granularity) || options.granularity < page_bytes) {
    return invalid("cannot make a host backend with a granularity of " + std::to_string(options.granularity) +
                   " bytes: the page size is " + std::to_string(page_bytes) +
                   "; give a power of two that is at least as large");
  }
  if (options.memory_bytes == SIZE_MAX) options.memory_bytes = machine_memory_bytes();
  keep_standard_streams();
  const int file = ::memfd_create("forebay-host-memory", MFD_CLOEXEC);
  if (file < 0) {
    return Status(
        StatusCode::kIoError,
        "cannot make the memory of " + options.name + ": memfd_create: " + std::strerror(errno) +
            (errno == EMFILE || errno == ENFILE ? "; raise the limit of open files (ulimit -n)"
                                                : "; allow it where the process is confined (seccomp)"));
  }
  return std::unique_ptr<HostMemory>(new HostMemory(std::move(options), file));
}

HostMemory::HostMemory(Options options, int file) noexcept : options_(std::move(options)), file_(file) {}

HostMemory::~HostMemory() {
  for (const auto& [base, reservation] : reservations_) ::munmap(to_pointer(base), reservation.bytes);
  ::close(file_);
}

// --- address space ---

Result<DevicePtr> HostMemory::reserve(std::size_t bytes, std::size_t alignment) {
  const std::lock_guard lock(mutex_);
  return reserve_locked(bytes, alignment);
}

Result<DevicePtr> HostMemory::reserve_locked(std::size_t bytes, std::size_t alignment) {
  const std::string what = "cannot reserve " + format_bytes(bytes) + " of addresses on " + options_.name;
  if (bytes == 0 || !is_multiple(bytes)) {
    return invalid(what + ": not a multiple of the granularity; round up to " +
                   format_bytes(options_.granularity));
  }
  if (alignment != 0 && !is_power_of_two(alignment)) {
    return invalid(what + ": an alignment of " + std::to_string(alignment) +
                   " is not a power of two; give one, or 0 for the granularity");
  }
  alignment = std::max(alignment, options_.granularity);
  if (bytes > SIZE_MAX - alignment) {
    return Status(StatusCode::kOutOfMemory, what + ": more than there are addresses; reserve less");
  }
  // More than asked for, so that an aligned range is somewhere inside; the rest goes back.
  const std::size_t wide_bytes = bytes + alignment;
  void* wide = ::mmap(nullptr, wide_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wide == MAP_FAILED) {
    if (errno != ENOMEM) return kernel_refusal(what, errno);
    return Status(StatusCode::kOutOfMemory,
                  what + ": the system has no such range free; reserve less, or raise ulimit -v");
  }
  const Address start = numeric(wide);
  const Address base = round_up(start, alignment);
  if (base != start) ::munmap(wide, base - start);
  if (const Address end = start + wide_bytes; base + bytes != end) {
    ::munmap(to_pointer(base + bytes), end - (base + bytes));
  }
  reservations_.emplace(base, Reservation{.bytes = bytes});
  return to_pointer(base);
}

Status HostMemory::release(DevicePtr base, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::string what = "cannot release " + range_text(base, bytes) + " on " + options_.name;
  const auto found = reservations_.find(numeric(base));
  if (found == reservations_.end() || found->second.internal) {
    return invalid(what + ": no reservation starts there; give the address that reserve returned");
  }
  if (found->second.bytes != bytes) {
    return invalid(what + ": " + format_bytes(found->second.bytes) + " were reserved; release exactly those");
  }
  const auto mapping = mappings_.lower_bound(found->first);
  if (mapping != mappings_.end() && mapping->first < found->first + bytes) {
    return invalid(what + ": " + range_text(to_pointer(mapping->first), mapping->second.bytes) +
                   " are still mapped; unmap them first");
  }
  if (::munmap(base, bytes) != 0) return kernel_refusal(what, errno);
  reservations_.erase(found);
  return {};
}

// The reservation that holds the whole range, or end().
HostMemory::Reservations::const_iterator HostMemory::find_reservation(Address address,
                                                                      std::size_t bytes) const {
  auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return reservations_.end();
  const auto found = std::prev(after);
  const std::size_t offset = address - found->first;
  if (offset > found->second.bytes || bytes > found->second.bytes - offset) return reservations_.end();
  return found;
}

// The mappings [*first, *last) that make up the range exactly: whole ones, no hole, one reservation.
Status HostMemory::find_mappings(DevicePtr address, std::size_t bytes, const char* verb,
                                 Mappings::iterator* first, Mappings::iterator* last) {
  const auto refusal = [&](const char* found_and_try) {
    return invalid(std::string("cannot ") + verb + " " + range_text(address, bytes) + " on " + options_.name +
                   ": " + found_and_try);
  };
  const Address begin = numeric(address);
  if (bytes == 0 || !is_multiple(bytes) || !is_multiple(begin)) {
    return refusal("not a multiple of the granularity; give whole mappings");
  }
  const auto reservation = find_reservation(begin, bytes);
  if (reservation == reservations_.end() || reservation->second.internal) {
    return refusal("the range is not within one reservation; give a range from reserve");
  }
  const Address end = begin + bytes;
  *first = mappings_.find(begin);
  if (*first == mappings_.end()) return refusal("no mapping starts there; give whole mappings");
  Address next = begin;
  for (*last = *first; next < end; ++*last) {
    if (*last == mappings_.end() || (*last)->first != next) {
      return refusal("part of the range is not mapped; give a range without holes");
    }
    next += (*last)->second.bytes;
  }
  if (next != end) return refusal("the range ends within a mapping; give whole mappings");
  return {};
}

Status HostMemory::map(DevicePtr address, Chunk chunk) {
  const std::lock_guard lock(mutex_);
  const auto reservation = find_reservation(numeric(address), 1);
  if (reservation != reservations_.end() && reservation->second.internal) {
    return invalid("cannot map a chunk at " + hex(numeric(address)) + " on " + options_.name +
                   ": that is a block of alloc; map at an address from reserve");
  }
  return map_locked(address, chunk.handle);
}

Status HostMemory::map_locked(DevicePtr address, std::uint64_t id) {
  const std::string what = "cannot map a chunk at " + hex(numeric(address)) + " on " + options_.name;
  const auto found = chunks_.find(id);
  if (found == chunks_.end() || found->second.destroyed) {
    return invalid(
        what + ": there is no such chunk; give one that chunk_create returned and chunk_destroy has not had");
  }
  ChunkState& chunk = found->second;
  const Address begin = numeric(address);
  if (!is_multiple(begin)) {
    return invalid(what + ": not a multiple of the granularity, " + format_bytes(options_.granularity) +
                   "; align the address");
  }
  if (find_reservation(begin, chunk.bytes) == reservations_.end()) {
    return invalid(what + ": " + format_bytes(chunk.bytes) +
                   " from there are not within one reservation; reserve them");
  }
  auto after = mappings_.lower_bound(begin);
  if (after != mappings_.end() && after->first < begin + chunk.bytes) {
    return invalid(what + ": " + range_text(to_pointer(after->first), after->second.bytes) +
                   " are mapped already; unmap them first");
  }
  if (after != mappings_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.bytes > begin) {
      return invalid(what + ": " + range_text(to_pointer(before->first), before->second.bytes) +
                     " are mapped already; unmap them first");
    }
  }
  FOREBAY_RETURN_IF_ERROR(poison_locked(chunk));
  if (::mmap(address, chunk.bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_,
             static_cast<off_t>(chunk.offset)) == MAP_FAILED) {
    return kernel_refusal(what, errno);
  }
  mappings_.emplace_hint(after, begin, Mapping{.bytes = chunk.bytes, .chunk = id});
  ++chunk.mapping_count;
  return {};
}

Status HostMemory::unmap(DevicePtr address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  Mappings::iterator first;
  Mappings::iterator last;
  FOREBAY_RETURN_IF_ERROR(find_mappings(address, bytes, "unmap", &first, &last));
  return unmap_locked(address, first, last);
}

Status HostMemory::unmap_locked(DevicePtr address, Mappings::iterator first, Mappings::iterator last) {
  std::size_t bytes = 0;
  for (auto mapping = first; mapping != last; ++mapping) bytes += mapping->second.bytes;
  // One call replaces all of them, so there is no moment in which another thread's mmap could take the
  // addresses.
  if (::mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
      MAP_FAILED) {
    return kernel_refusal("cannot unmap " + range_text(address, bytes) + " on " + options_.name, errno);
  }
  while (first != last) {
    const std::uint64_t chunk = first->second.chunk;
    first = mappings_.erase(first);
    --chunks_.at(chunk).mapping_count;
    drop_chunk_if_unused_locked(chunk);
  }
  return {};
}

Status HostMemory::set_access(DevicePtr address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  Mappings::iterator first;
  Mappings::iterator last;
  FOREBAY_RETURN_IF_ERROR(find_mappings(address, bytes, "set access to", &first, &last));
  return set_access_locked(address, first, last);
}

Status HostMemory::set_access_locked(DevicePtr address, Mappings::iterator first, Mappings::iterator last) {
  std::size_t bytes = 0;
  for (auto mapping = first; mapping != last; ++mapping) bytes += mapping->second.bytes;
  if (::mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) {
    const int error = errno;
    // mprotect may have done a part before it failed.
    for (auto mapping = first; mapping != last; ++mapping) {
      if (!mapping->second.accessible)
        ::mprotect(to_pointer(mapping->first), mapping->second.bytes, PROT_NONE);
    }
    return kernel_refusal("cannot set access to " + range_text(address, bytes) + " on " + options_.name,
                          error);
  }
  for (; first != last; ++first) first->second.accessible = true;
  return {};
}

// --- chunks ---

Result<Chunk> HostMemory::chunk_create(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes == 0 || !is_multiple(bytes)) {
    return invalid("cannot create a chunk of " + std::to_string(bytes) + " bytes on " + options_.name +
                   ": not a multiple of the granularity; round up to " + format_bytes(options_.granularity));
  }
  Result<std::uint64_t> id = chunk_create_locked(bytes, "create a chunk of ");
  if (!id.ok()) return id.status();
  ++chunk_handle_count_;
  return Chunk{id.value()};
}

Result<std::uint64_t> HostMemory::chunk_create_locked(std::size_t bytes, const char* verb) {
  const std::size_t free_bytes = options_.memory_bytes - charged_bytes_;
  if (bytes > free_bytes) {
    return Status(StatusCode::kOutOfMemory, std::string("cannot ") + verb + format_bytes(bytes) + " on " +
                                                options_.name + ": " + format_bytes(free_bytes) + " of " +
                                                format_bytes(options_.memory_bytes) +
                                                " free; raise --memory or free some first");
  }
  std::size_t offset = 0;
  FOREBAY_RETURN_IF_ERROR(take_offset_locked(bytes, &offset));
  charged_bytes_ += bytes;
  peak_charged_bytes_ = std::max(peak_charged_bytes_, charged_bytes_);
  const std::uint64_t id = next_host_handle();
  chunks_.emplace(id, ChunkState{.offset = offset, .bytes = bytes});
  return id;
}

Status HostMemory::chunk_destroy(Chunk chunk) {
  const std::lock_guard lock(mutex_);
  const auto found = chunks_.find(chunk.handle);
  if (found == chunks_.end() || found->second.destroyed) {
    return invalid("cannot destroy a chunk on " + options_.name +
                   ": there is no such chunk; give one that chunk_create returned, once");
  }
  found->second.destroyed = true;
  --chunk_handle_count_;
  drop_chunk_if_unused_locked(chunk.handle);
  return {};
}

void HostMemory::drop_chunk_if_unused_locked(std::uint64_t id) {
  const auto found = chunks_.find(id);
  const ChunkState& chunk = found->second;
  if (!chunk.destroyed || chunk.mapping_count > 0) return;
  if (::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(chunk.offset),
                  static_cast<off_t>(chunk.bytes)) != 0) {
    static std::atomic<bool> logged{false};
    if (!logged.exchange(true)) {
      log(LogLevel::kWarning, "%s: memory does not go back to the system: fallocate: %s",
          options_.name.c_str(), std::strerror(errno));
    }
  }
  charged_bytes_ -= chunk.bytes;
  give_offset_locked(chunk.offset, chunk.bytes);
  chunks_.erase(found);
}

// The lowest extent that is large enough: chunks made one after another then lie one after another in the
// file, and the kernel merges their mappings into one.
Status HostMemory::take_offset_locked(std::size_t bytes, std::size_t* offset) {
  for (auto extent = free_extents_.begin(); extent != free_extents_.end(); ++extent) {
    if (extent->second < bytes) continue;
    *offset = extent->first;
    const std::size_t rest = extent->second - bytes;
    const auto after = free_extents_.erase(extent);
    if (rest > 0) free_extents_.emplace_hint(after, *offset + bytes, rest);
    return {};
  }
  if (bytes > static_cast<std::size_t>(INT64_MAX) - file_end_) {
    return {StatusCode::kOutOfMemory, "cannot create a chunk of " + format_bytes(bytes) + " on " +
                                          options_.name + ": more than a file can hold; lower --memory"};
  }
  const std::size_t end = file_end_ + bytes;
  if (end > file_bytes_) {
    // Asked beforehand, because exceeding it raises a signal that ends the process.
    rlimit limit{};
    const bool allowed =
        ::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || end <= limit.rlim_cur;
    if (!allowed) errno = EFBIG;
    if (!allowed || ::ftruncate(file_, static_cast<off_t>(end)) != 0) {
      return {StatusCode::kOutOfMemory, "cannot create a chunk of " + format_bytes(bytes) + " on " +
                                            options_.name + ": its memfd does not grow: " +
                                            std::strerror(errno) + "; raise the file size limit (ulimit -f)"};
    }
    file_bytes_ = end;
  }
  *offset = file_end_;
  file_end_ = end;
  return {};
}

void HostMemory::give_offset_locked(std::size_t offset, std::size_t bytes) {
  auto after = free_extents_.lower_bound(offset);
  if (after != free_extents_.end() && after->first == offset + bytes) {
    bytes += after->second;
    after = free_extents_.erase(after);
  }
  if (after != free_extents_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_extents_.erase(before);
    }
  }
  if (offset + bytes == file_end_) {
    file_end_ = offset;
  } else {
    free_extents_.emplace(offset, bytes);
  }
}

// A chunk is filled when it is first mapped rather than when it is made: nobody can read it before, and a
// chunk that never is mapped takes no memory. Written through the file, as the addresses are not accessible
// yet.
Status HostMemory::poison_locked(ChunkState& chunk) {
  if (!options_.poison || chunk.poisoned) return {};
  constexpr std::size_t kBufferBytes = std::size_t{256} << 10;
  static const std::vector<unsigned char>& buffer = *new std::vector<unsigned char>(kBufferBytes, kPoison);
  std::size_t done = 0;
  while (done < chunk.bytes) {
    const ssize_t written = ::pwrite(file_, buffer.data(), std::min(kBufferBytes, chunk.bytes - done),
                                     static_cast<off_t>(chunk.offset + done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      return {StatusCode::kOutOfMemory,
              "cannot map a chunk of " + format_bytes(chunk.bytes) + " on " + options_.name +
                  ": the system refused the memory: " + std::strerror(errno) + "; lower --memory"};
    }
    done += static_cast<std::size_t>(written);
  }
  chunk.poisoned = true;
  return {};
}

// --- memory ---

Result<DevicePtr> HostMemory::alloc(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes == 0) {
    return invalid("cannot allocate 0 bytes on " + options_.name +
                   ": a block has at least one; ask for more");
  }
  if (bytes > SIZE_MAX - options_.granularity) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate " + format_bytes(bytes) + " on " +
                                                options_.name +
                                                ": more than there are addresses; ask for less");
  }
  const std::size_t rounded = round_up(bytes, options_.granularity);
  Result<std::uint64_t> id = chunk_create_locked(rounded, "allocate ");
  if (!id.ok()) return id.status();
  Result<DevicePtr> base = reserve_locked(rounded, 0);
  Status status = base.status();
  if (status.ok()) {
    Reservation& reservation = reservations_.at(numeric(base.value()));
    reservation.internal = true;
    reservation.chunk = id.value();
    status = map_locked(base.value(), id.value());
  }
  if (status.ok()) {
    const auto mapping = mappings_.find(numeric(base.value()));
    status = set_access_locked(base.value(), mapping, std::next(mapping));
    if (status.ok()) {
      chunks_.at(id.value()).destroyed = true;  // It lives as long as its mapping.
      return base;
    }
    mappings_.erase(mapping);
    --chunks_.at(id.value()).mapping_count;
  }
  if (base.ok()) {
    ::munmap(base.value(), rounded);
    reservations_.erase(numeric(base.value()));
  }
  chunks_.at(id.value()).destroyed = true;
  drop_chunk_if_unused_locked(id.value());
  return status;
}

Status HostMemory::free(DevicePtr address) {
  const std::lock_guard lock(mutex_);
  const std::string what = "cannot free " + hex(numeric(address)) + " on " + options_.name;
  const auto found = reservations_.find(numeric(address));
  if (found == reservations_.end() || !found->second.internal) {
    return invalid(what + ": no block starts there; give an address that alloc returned, once");
  }
  if (::munmap(address, found->second.bytes) != 0) return kernel_refusal(what, errno);
  const std::uint64_t chunk = found->second.chunk;
  mappings_.erase(found->first);
  reservations_.erase(found);
  --chunks_.at(chunk).mapping_count;
  drop_chunk_if_unused_locked(chunk);
  return {};
}

// Copies on this backend are memcpy on the stream's thread and need no locked pages, so pinning is
// bookkeeping: it refuses what a driver refuses, and mlock's usually tiny limit does not get in the way.
Status HostMemory::pin(void* address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::string what = "cannot pin " + range_text(address, bytes) + " on " + options_.name;
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const Address begin = numeric(address);
  if (begin == 0 || bytes == 0 || begin % page_bytes != 0 || bytes % page_bytes != 0 ||
      bytes > SIZE_MAX - begin) {
    return invalid(what + ": not whole pages of " + format_bytes(page_bytes) + "; align the range to pages");
  }
  const auto after = pinned_.lower_bound(begin);
  const bool overlaps_after = after != pinned_.end() && after->first < begin + bytes;
  const bool overlaps_before =
      after != pinned_.begin() && std::prev(after)->first + std::prev(after)->second > begin;
  if (overlaps_after || overlaps_before) {
    return invalid(what + ": part of it is pinned already; pin a range once");
  }
  pinned_.emplace_hint(after, begin, bytes);
  return {};
}

Status HostMemory::unpin(void* address) {
  const std::lock_guard lock(mutex_);
  if (pinned_.erase(numeric(address)) == 0) {
    return invalid("cannot unpin " + hex(numeric(address)) + " on " + options_.name +
                   ": no pinned range starts there; give an address that was pinned, once");
  }
  return {};
}

Status HostMemory::check_usable(const void* address, std::size_t bytes, const char* what) const {
  const Address begin = numeric(address);
  const auto refusal = [&](const char* found_and_try) {
    return invalid(std::string("cannot ") + what + " " + range_text(address, bytes) + " on " + options_.name +
                   ": " + found_and_try);
  };
  if (begin == 0) return refusal("the address is null; give a valid one");
  if (bytes > SIZE_MAX - begin) return refusal("the range wraps around; give its size in bytes");
  const Address end = begin + bytes;
  const std::lock_guard lock(mutex_);
  // Which reservation does the range touch? At most the one before its end matters if it lies within one.
  auto reservation = reservations_.lower_bound(end);
  if (reservation == reservations_.begin()) return {};
  --reservation;
  if (reservation->first + reservation->second.bytes <= begin) return {};
  if (find_reservation(begin, bytes) == reservations_.end()) {
    return refusal("the range leaves its reservation; keep to one reservation");
  }
  auto mapping = mappings_.upper_bound(begin);
  if (mapping == mappings_.begin()) return refusal("nothing is mapped there; map a chunk first");
  --mapping;
  for (Address next = mapping->first; next < end; ++mapping) {
    if (mapping == mappings_.end() || mapping->first != next || next + mapping->second.bytes <= begin) {
      return refusal("part of the range is not mapped; map a chunk first");
    }
    if (!mapping->second.accessible) return refusal("part of the range has no access; call set_access first");
    next += mapping->second.bytes;
  }
  return {};
}

std::size_t HostMemory::charged_bytes() const {
  const std::lock_guard lock(mutex_);
  return charged_bytes_;
}

std::size_t HostMemory::peak_charged_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_charged_bytes_;
}

std::size_t HostMemory::live_handle_count() const {
  const std::lock_guard lock(mutex_);
  std::size_t count = chunk_handle_count_ + pinned_.size();
  for (const auto& [base, reservation] : reservations_) {
    // A block of alloc is one handle: its mapping and its chunk are its own affair.
    if (!reservation.internal) ++count;
  }
  return count + mappings_.size();  // Those of blocks stand for the blocks.
}

}  // namespace forebay
