// ModelMemory: the address space and the memory of a model backend: books without bytes. The rules and the
// messages are those of HostMemory; what is mapped is kept in a table with an entry per granule, so that
// mapping and unmapping cost the same however much is mapped.
//
// Threads: every function may be called from any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "forebay/backend.h"

namespace forebay {

class ModelMemory {
 public:
  struct Options {
    std::string name;
    std::size_t memory_bytes = 0;
    std::size_t granularity = 0;
  };
  // Where addresses begin, and how many there are: the upper half of 49 bits, which no process of today's
  // systems gets from its kernel without asking for it.
  static constexpr std::uintptr_t kFirstAddress = std::uintptr_t{1} << 48;
  static constexpr std::size_t kAddressBytes = std::size_t{1} << 48;
  // Bytes a block of alloc is aligned to.
  static constexpr std::size_t kSmallestGranularity = 512;

  // Requires: granularity is a power of two of at least kSmallestGranularity; memory_bytes <= kAddressBytes.
  explicit ModelMemory(Options options);
  ModelMemory(const ModelMemory&) = delete;
  ModelMemory& operator=(const ModelMemory&) = delete;

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

  // Refuses a range of these addresses that the device could not read or write. Ranges elsewhere are ordinary
  // host memory, which the backend cannot judge. `what` begins the message.
  Status check_usable(const void* address, std::size_t bytes, const char* what) const;

  std::size_t memory_bytes() const noexcept { return options_.memory_bytes; }
  std::size_t charged_bytes() const;
  std::size_t peak_charged_bytes() const;
  std::size_t live_handle_count() const;

 private:
  using Address = std::uintptr_t;

  struct Reservation {
    std::size_t bytes = 0;
    bool internal = false;  // A block of alloc; release and unmap do not know it.
  };
  using Reservations = std::map<Address, Reservation>;

  struct ChunkState {
    std::size_t bytes = 0;
    std::uint32_t generation = 0;  // Told apart from those that had this index before.
    std::uint32_t mapping_count = 0;
    bool held = false;  // Its handle has not been given up.
  };

  // One granule of the address space.
  struct Granule {
    std::uint32_t chunk = 0;  // Index of the mapped chunk + 1; 0: nothing is mapped.
    bool starts = false;      // The first granule of its mapping.
    bool accessible = false;
  };
  struct Leaf {
    static constexpr std::size_t kCount = 512;
    std::array<Granule, kCount> granules;
    std::size_t mapped_count = 0;
  };

  // All of these with mutex_ held.
  Reservations::const_iterator find_reservation(Address address, std::size_t bytes) const;
  Result<DevicePtr> take_addresses(std::size_t bytes, std::size_t alignment, bool internal,
                                   const std::string& what);
  Status charge(std::size_t bytes, const char* verb);
  ChunkState* find_chunk(Chunk chunk, std::uint32_t* index);
  void drop_chunk_if_unused(std::uint32_t index);
  // The granule at this address if anything is mapped in its leaf, else null.
  const Granule* find_granule(Address address) const;
  Granule* find_granule(Address address) {
    return const_cast<Granule*>(static_cast<const ModelMemory*>(this)->find_granule(address));
  }
  std::size_t mapped_granules(Address address) const;
  Status check_mappings(DevicePtr address, std::size_t bytes, const char* verb) const;

  bool is_multiple(std::size_t bytes) const noexcept { return (bytes & (options_.granularity - 1)) == 0; }

  const Options options_;
  const int granularity_bits_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Reservations reservations_;
  Address next_address_ = kFirstAddress;                             // Where the next reservation is tried.
  std::unordered_map<std::uint64_t, std::unique_ptr<Leaf>> leaves_;  // By address; only those with a mapping.
  mutable std::uint64_t cached_leaf_number_ = UINT64_MAX;            // The leaf looked at last.
  mutable Leaf* cached_leaf_ = nullptr;
  std::vector<ChunkState> chunks_;
  std::vector<std::uint32_t> free_chunks_;  // Indices to use again.
  std::map<Address, std::size_t> pinned_;
  std::size_t charged_bytes_ = 0;
  std::size_t peak_charged_bytes_ = 0;
  std::size_t chunk_handle_count_ = 0;
  std::size_t mapping_count_ = 0;
};

}  // namespace forebay
