// HostMemory: the address space and the memory of a host backend. One sparse memfd is the device's physical
// memory; a chunk is a part of it, and mapping one is an mmap of that part, so an alias is a second mmap.
//
// The AddressBook judges every request first: the kernel would accept most calls that backend.h forbids.
//
// Threads: every function may be called from any thread.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "forebay/backend.h"
#include "runtime/device/address_book.h"

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
  // Unmaps the rest.
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // As the functions of Backend with these names.
  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment);
  Status release(DevicePtr base, std::size_t bytes);
  Result<Chunk> chunk_create(std::size_t bytes);
  Status chunk_destroy(Chunk chunk);
  Status map(DevicePtr address, Chunk chunk);
  Status unmap(DevicePtr address, std::size_t bytes);
  Status set_access(DevicePtr address, std::size_t bytes);
  // As AccessGuard::guard().
  Status guard(DevicePtr address, std::size_t bytes, const std::string& name);
  Result<DevicePtr> alloc(std::size_t bytes);
  Status free(DevicePtr address);
  // A copy on this backend is memcpy on the stream's thread and needs no locked pages, so pinning is only
  // noted: the rules of a driver apply, and mlock's usually tiny limit does not get in the way.
  Status pin(void* address, std::size_t bytes) { return book_.add_pinned(address, bytes); }
  Status unpin(void* address) { return book_.remove_pinned(address).status(); }

  const AddressBook& book() const noexcept { return book_; }

 private:
  HostMemory(Options options, int file);

  // All of these with mutex_ held.
  Result<DevicePtr> take_addresses(std::size_t bytes, std::size_t alignment);
  Status take_offset(std::size_t bytes, std::size_t* offset);
  void give_back(std::size_t offset, std::size_t bytes);
  Status poison(std::size_t offset, std::size_t bytes);

  const Options options_;
  const int file_;
  const pid_t process_ = ::getpid();
  AddressBook book_;

  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<std::size_t, std::size_t> free_extents_;  // Offset to bytes, below file_end_, never adjacent.
  std::size_t file_end_ = 0;    // Where the file has never been used, or is unused again.
  std::size_t file_bytes_ = 0;  // The size of the file; never shrinks.
};

}  // namespace forebay
