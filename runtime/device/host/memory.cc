#include "runtime/device/host/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "forebay/log.h"
#include "forebay/standard_streams.h"
#include "forebay/units.h"
#include "runtime/device/address_text.h"
#include "runtime/device/host/guarded_ranges.h"

namespace forebay {
namespace {

constexpr unsigned char kPoison = 0xCB;

// A refusal of the kernel. ENOMEM from mmap and mprotect is nearly always the limit on the number of
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

Result<std::unique_ptr<HostMemory>> HostMemory::create(Options options) {
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (!std::has_single_bit(options.granularity) || options.granularity < page_bytes) {
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

HostMemory::HostMemory(Options options, int file)
    : options_(std::move(options)),
      file_(file),
      book_({.name = options_.name,
             .granularity = options_.granularity,
             .budget_bytes = options_.memory_bytes}) {}

HostMemory::~HostMemory() {
  const AddressBook::Left left = book_.left();
  for (const auto& [base, bytes] : left.reservations) {
    forget_guarded_ranges(base, bytes);
    ::munmap(base, bytes);
  }
  for (const auto& [base, bytes] : left.blocks) ::munmap(base, bytes);
  ::close(file_);
}

// --- address space ---

Result<DevicePtr> HostMemory::reserve(std::size_t bytes, std::size_t alignment) {
  FOREBAY_RETURN_IF_ERROR(book_.check_reserve(bytes, alignment));
  const std::lock_guard lock(mutex_);
  Result<DevicePtr> base = take_addresses(bytes, std::max(alignment, options_.granularity));
  if (base.ok()) book_.add_reservation(base.value(), bytes);
  return base;
}

Result<DevicePtr> HostMemory::take_addresses(std::size_t bytes, std::size_t alignment) {
  const std::string what = "cannot reserve " + format_bytes(bytes) + " of addresses on " + options_.name;
  if (bytes > SIZE_MAX - alignment) {
    return Status(StatusCode::kOutOfMemory, what + ": more than there are addresses; reserve less");
  }
  // More than was asked for, so that it contains an aligned range; the rest goes back.
  const std::size_t wide_bytes = bytes + alignment;
  void* wide = ::mmap(nullptr, wide_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wide == MAP_FAILED) {
    if (errno != ENOMEM) return kernel_refusal(what, errno);
    return Status(StatusCode::kOutOfMemory,
                  what + ": the system has no such range free; reserve less, or raise ulimit -v");
  }
  const std::uintptr_t start = numeric(wide);
  const std::uintptr_t base = round_up(start, alignment);
  if (base != start) ::munmap(wide, base - start);
  if (const std::uintptr_t end = start + wide_bytes; base + bytes != end) {
    ::munmap(to_pointer(base + bytes), end - (base + bytes));
  }
  return to_pointer(base);
}

Status HostMemory::release(DevicePtr base, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  FOREBAY_RETURN_IF_ERROR(book_.check_release(base, bytes));
  forget_guarded_ranges(base, bytes);
  if (::munmap(base, bytes) != 0) {
    return kernel_refusal("cannot release " + range_text(base, bytes) + " on " + options_.name, errno);
  }
  book_.remove_reservation(base);
  return {};
}

Status HostMemory::map(DevicePtr address, Chunk chunk) {
  const std::lock_guard lock(mutex_);
  FOREBAY_ASSIGN_OR_RETURN(const AddressBook::ChunkFacts facts, book_.check_map(address, chunk));
  const auto [offset, bytes, was_mapped] = facts;
  // A chunk is poisoned when it is first mapped: nobody can read it before, and a chunk that is never mapped
  // takes no memory.
  if (!was_mapped) FOREBAY_RETURN_IF_ERROR(poison(offset, bytes));
  if (::mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_, static_cast<off_t>(offset)) ==
      MAP_FAILED) {
    return kernel_refusal("cannot map a chunk at " + hex(numeric(address)) + " on " + options_.name, errno);
  }
  book_.add_mapping(address, chunk);
  return {};
}

Status HostMemory::unmap(DevicePtr address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  FOREBAY_RETURN_IF_ERROR(book_.check_mappings(address, bytes, "unmap"));
  // One call replaces all mappings, so another thread's mmap cannot take the addresses in between.
  if (::mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
      MAP_FAILED) {
    return kernel_refusal("cannot unmap " + range_text(address, bytes) + " on " + options_.name, errno);
  }
  std::vector<AddressBook::ChunkFacts> ended;
  book_.remove_mappings(address, bytes, &ended);
  for (const AddressBook::ChunkFacts& chunk : ended) give_back(chunk.resource, chunk.bytes);
  return {};
}

Status HostMemory::set_access(DevicePtr address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  FOREBAY_RETURN_IF_ERROR(book_.check_mappings(address, bytes, "set access to"));
  if (::mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) {
    const int error = errno;
    // mprotect may have changed a part before it failed.
    for (DevicePtr next = address; next < address + bytes;) {
      const AddressBook::MappingFacts mapping = book_.mapping_at(next);
      if (!mapping.accessible) ::mprotect(next, mapping.bytes, PROT_NONE);
      next += mapping.bytes;
    }
    return kernel_refusal("cannot set access to " + range_text(address, bytes) + " on " + options_.name,
                          error);
  }
  book_.set_accessible(address, bytes);
  return protect_guarded_ranges(address, bytes);
}

Status HostMemory::guard(DevicePtr address, std::size_t bytes, const std::string& name) {
  const std::lock_guard lock(mutex_);
  FOREBAY_RETURN_IF_ERROR(book_.check_mappings(address, bytes, "guard"));
  return guard_range(address, bytes, name + " on " + options_.name);
}

// --- chunks and the file ---

Result<Chunk> HostMemory::chunk_create(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  FOREBAY_RETURN_IF_ERROR(book_.charge_chunk(bytes));
  std::size_t offset = 0;
  if (Status status = take_offset(bytes, &offset); !status.ok()) {
    book_.refund(bytes);
    return status;
  }
  return book_.add_chunk(offset, bytes);
}

Status HostMemory::chunk_destroy(Chunk chunk) {
  const std::lock_guard lock(mutex_);
  FOREBAY_RETURN_IF_ERROR(book_.check_destroy(chunk).status());
  std::vector<AddressBook::ChunkFacts> ended;
  book_.remove_chunk(chunk, &ended);
  for (const AddressBook::ChunkFacts& facts : ended) give_back(facts.resource, facts.bytes);
  return {};
}

// The lowest extent that is large enough: chunks made one after another then lie one after another in the
// file, and the kernel merges their mappings into one.
Status HostMemory::take_offset(std::size_t bytes, std::size_t* offset) {
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
                                          options_.name + ": more than a file can hold; lower memory_bytes"};
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

void HostMemory::give_back(std::size_t offset, std::size_t bytes) {
  if (::getpid() != process_) return;  // A child made by fork() has the same file as its parent.
  if (::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes)) != 0) {
    static std::atomic<bool> logged{false};
    if (!logged.exchange(true)) {
      log(LogLevel::kWarning, "%s: memory does not go back to the system: fallocate: %s",
          options_.name.c_str(), std::strerror(errno));
    }
  }
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

// Fills fresh memory of the file. Through the file, because its addresses are not accessible yet.
Status HostMemory::poison(std::size_t offset, std::size_t bytes) {
  if (!options_.poison) return {};
  constexpr std::size_t kBufferBytes = std::size_t{256} << 10;
  static const std::vector<unsigned char>& buffer = *new std::vector<unsigned char>(kBufferBytes, kPoison);
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t written = ::pwrite(file_, buffer.data(), std::min(kBufferBytes, bytes - done),
                                     static_cast<off_t>(offset + done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      return {StatusCode::kOutOfMemory,
              "cannot map a chunk of " + format_bytes(bytes) + " on " + options_.name +
                  ": the system refused the memory: " + std::strerror(errno) + "; lower memory_bytes"};
    }
    done += static_cast<std::size_t>(written);
  }
  return {};
}

// --- blocks ---

Result<DevicePtr> HostMemory::alloc(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  FOREBAY_ASSIGN_OR_RETURN(const std::size_t rounded, book_.charge_block(bytes, options_.granularity));
  std::size_t offset = 0;
  if (Status status = take_offset(rounded, &offset); !status.ok()) {
    book_.refund(rounded);
    return status;
  }
  Result<DevicePtr> base = take_addresses(rounded, options_.granularity);
  Status status = base.ok() ? poison(offset, rounded) : base.status();
  if (status.ok() && ::mmap(base.value(), rounded, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_,
                            static_cast<off_t>(offset)) == MAP_FAILED) {
    status = kernel_refusal("cannot allocate " + format_bytes(rounded) + " on " + options_.name, errno);
  }
  if (status.ok()) {
    book_.add_block(base.value(), {.bytes = rounded, .resource = offset});
    return base;
  }
  if (base.ok()) ::munmap(base.value(), rounded);
  give_back(offset, rounded);
  book_.refund(rounded);
  return status;
}

Status HostMemory::free(DevicePtr address) {
  const std::lock_guard lock(mutex_);
  FOREBAY_ASSIGN_OR_RETURN(const AddressBook::BlockFacts block, book_.remove_block(address));
  if (::munmap(address, block.bytes) != 0) {
    const int error = errno;
    book_.add_block(address, block);
    return kernel_refusal("cannot free " + hex(numeric(address)) + " on " + options_.name, error);
  }
  give_back(block.resource, block.bytes);
  book_.refund(block.bytes);
  return {};
}

}  // namespace forebay
