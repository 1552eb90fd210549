// HostMemory: the address space and the memory of a host backend. One sparse memfd is the device's physical
// memory; a chunk is a piece of it, and mapping one is an mmap of that piece, so that an alias is simply a
// second mmap.
//
// It keeps the books itself (what is reserved, mapped, accessible) and asks the kernel only for what the
// books allow: the kernel would accept most of what Backend's contract refuses.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "forebay/backend.h"

namespace forebay {

class HostMemory {
 public:
  struct Options {
    std::string name;
    std::size_t memory_bytes = 0;
    std::size_t granularity = 0;
    bool poison = false;
  };

  // Errors: kInvalidArgument (granularity), kIoError (no memfd).
  static Result<std::unique_ptr<HostMemory>> create(Options options);
  // Unmaps whatever is left.
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment);
  Status release(DevicePtr base, std::size_t bytes);
  Result<Chunk> chunk_create(std::size_t bytes);
  Status chunk_destroy(Chunk chunk);
  Status map(DevicePtr address, Chunk chunk);
  Status unmap(DevicePtr address, std::size_t bytes);
  Status set_access(DevicePtr address, std::size_t bytes);

  Result<DevicePtr> alloc(std::size_t bytes);
  Status free(DevicePtr address);
  Status pin(void* address, std::size_t bytes);
  Status unpin(void* address);

  // Refuses a range that lies in a reservation where the device could not read or write it. Ranges elsewhere
  // are ordinary host memory, which the backend cannot judge. `what` begins the message.
  Status check_usable(const void* address, std::size_t bytes, const char* what) const;

  std::size_t memory_bytes() const noexcept { return options_.memory_bytes; }
  std::size_t charged_bytes() const;
  std::size_t peak_charged_bytes() const;
  std::size_t live_handle_count() const;

 private:
  using Address = std::uintptr_t;

  struct Reservation {
    std::size_t bytes = 0;
    bool internal = false;    // Made by alloc; release and unmap do not know it.
    std::uint64_t chunk = 0;  // Of an internal one.
  };
  struct Mapping {
    std::size_t bytes = 0;
    std::uint64_t chunk = 0;
    bool accessible = false;
  };
  struct ChunkState {
    std::size_t offset = 0;
    std::size_t bytes = 0;
    std::size_t mapping_count = 0;
    bool destroyed = false;
    bool poisoned = false;
  };
  using Reservations = std::map<Address, Reservation>;
  using Mappings = std::map<Address, Mapping>;

  HostMemory(Options options, int file) noexcept;

  // All of these with mutex_ held.
  Reservations::const_iterator find_reservation(Address address, std::size_t bytes) const;
  Status find_mappings(DevicePtr address, std::size_t bytes, const char* what, Mappings::iterator* first,
                       Mappings::iterator* last);
  Result<DevicePtr> reserve_locked(std::size_t bytes, std::size_t alignment);
  Result<std::uint64_t> chunk_create_locked(std::size_t bytes, const char* what);
  Status map_locked(DevicePtr address, std::uint64_t id);
  Status unmap_locked(DevicePtr address, Mappings::iterator first, Mappings::iterator last);
  Status set_access_locked(DevicePtr address, Mappings::iterator first, Mappings::iterator last);
  void drop_chunk_if_unused_locked(std::uint64_t id);
  Status take_offset_locked(std::size_t bytes, std::size_t* offset);
  void give_offset_locked(std::size_t offset, std::size_t bytes);
  Status poison_locked(ChunkState& chunk);

  bool is_multiple(std::size_t bytes) const noexcept { return bytes % options_.granularity == 0; }

  const Options options_;
  const int file_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Reservations reservations_;
  Mappings mappings_;
  std::unordered_map<std::uint64_t, ChunkState> chunks_;
  std::map<Address, std::size_t> pinned_;
  std::map<std::size_t, std::size_t> free_extents_;  // Offset to bytes, below file_end_, never adjacent.
  std::size_t file_end_ = 0;    // Where the file has never been used, or is unused again.
  std::size_t file_bytes_ = 0;  // What the file was grown to; never shrinks.
  std::size_t charged_bytes_ = 0;
  std::size_t peak_charged_bytes_ = 0;
  std::size_t chunk_handle_count_ = 0;
};

// A handle value that no other object of this process has, so that a stale or foreign handle is always told
// apart.
std::uint64_t next_host_handle() noexcept;

}  // namespace forebay
