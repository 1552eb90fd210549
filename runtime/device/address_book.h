// AddressBook: the reservations, chunks, mappings, access rights, blocks, pinned ranges and budget of one
// backend. It applies the rules of backend.h and words the refusals, so that all backends refuse alike, and
// before a driver sees the request: drivers differ in their checks, and some crash on a stale handle. The
// book calls no driver and no system.
//
// A backend asks (`check_...`), makes the driver's call, and then notes the change (`add_...`, `remove_...`).
//
// Cost: reservations are in a tree. Mappings are in a table with an entry per granule, so that finding one
// takes the same time however many there are; mapping and unmapping take time per granule of the range.
//
// Threads: every function may be called from any thread. A backend holds a mutex of its own from the question
// to the change that follows from it.
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

class AddressBook {
 public:
  using Address = std::uintptr_t;

  struct Options {
    std::string name;                     // The backend's name in messages.
    std::size_t granularity = 0;          // A power of two.
    std::size_t budget_bytes = SIZE_MAX;  // For chunks and blocks together. SIZE_MAX: no limit.
    // A range of addresses that the backend hands out by find_free_addresses. Nothing else is there. 0: none.
    Address own_begin = 0;
    std::size_t own_bytes = 0;
  };
  struct Range {
    DevicePtr address = nullptr;
    std::size_t bytes = 0;
  };
  // `resource` is the backend's own number for the memory: a driver handle, an offset in a file.
  struct ChunkFacts {
    std::uint64_t resource = 0;
    std::size_t bytes = 0;
    bool was_mapped = false;  // Now or at any earlier time.
  };
  struct MappingFacts {
    std::size_t bytes = 0;
    bool accessible = false;
  };
  struct BlockFacts {
    std::size_t bytes = 0;
    std::uint64_t resource = 0;
  };

  explicit AddressBook(Options options);
  AddressBook(const AddressBook&) = delete;
  AddressBook& operator=(const AddressBook&) = delete;

  // check_reserve, check_map, charge_* and add_pinned make room for the entries that follow them, so that no
  // list grows where the host has no memory. Errors: kOutOfMemory.

  // --- reservations ---
  Status check_reserve(std::size_t bytes, std::size_t alignment) const;
  // A free range among the own addresses; null when there is none. `alignment` is a power of two.
  DevicePtr find_free_addresses(std::size_t bytes, std::size_t alignment) const;
  void add_reservation(DevicePtr base, std::size_t bytes);
  Status check_release(DevicePtr base, std::size_t bytes) const;
  void remove_reservation(DevicePtr base);

  // Whether the address lies in a reservation or block.
  bool holds(const void* address) const;

  // --- chunks; a stale handle is told apart from the handles made later, also by other books ---
  Chunk add_chunk(std::uint64_t resource, std::size_t bytes);
  Result<ChunkFacts> check_destroy(Chunk chunk) const;
  // Ends the handle. A chunk without handle and mappings has ended: its charge is refunded, and it is
  // appended to `ended`.
  void remove_chunk(Chunk chunk, std::vector<ChunkFacts>* ended = nullptr);

  // --- mappings ---
  Result<ChunkFacts> check_map(DevicePtr address, Chunk chunk);
  void add_mapping(DevicePtr address, Chunk chunk);
  // For unmap and set_access: the range consists of whole mappings of one reservation, without a hole. `verb`
  // begins the message.
  Status check_mappings(DevicePtr address, std::size_t bytes, const char* verb) const;
  // Requires, here and in the next two: check_mappings accepts the range.
  MappingFacts mapping_at(DevicePtr address) const;
  void set_accessible(DevicePtr address, std::size_t bytes);
  void remove_mappings(DevicePtr address, std::size_t bytes, std::vector<ChunkFacts>* ended = nullptr);

  // For copies and fills: refuses a range that touches a reservation or a block and is not within it, or is
  // not accessible. Memory elsewhere is not the backend's, and is not judged. `verb` begins the message.
  // Requires: bytes > 0.
  Status check_usable(const void* address, std::size_t bytes, const char* verb) const;

  // --- blocks of alloc ---
  void add_block(DevicePtr address, BlockFacts block);
  // The block stays charged. Errors: kInvalidArgument when no block starts there.
  Result<BlockFacts> remove_block(DevicePtr address);

  // --- pinned host memory ---
  Status add_pinned(void* address, std::size_t bytes);
  Result<std::size_t> remove_pinned(void* address);

  // --- the budget ---
  // Errors: kOutOfMemory with the bytes that are left; kInvalidArgument for a size that is not allowed.
  Status charge_chunk(std::size_t bytes);
  // Charges `bytes` rounded up to `multiple`, and returns that.
  Result<std::size_t> charge_block(std::size_t bytes, std::size_t multiple);
  void refund(std::size_t bytes);
  std::size_t budget_bytes() const noexcept { return options_.budget_bytes; }
  std::size_t charged_bytes() const;
  std::size_t peak_charged_bytes() const;

  // Reservations, blocks, chunk handles, mappings and pinned ranges not given back.
  std::size_t live_count() const;

  // Everything that is not given back, for the backend's end.
  struct Left {
    std::vector<Range> pinned;
    std::vector<Range> blocks;
    std::vector<Range> mappings;
    std::vector<std::uint64_t> chunks;  // The resources of those with a handle.
    std::vector<Range> reservations;
  };
  Left left() const;

 private:
  struct Reservation {
    std::size_t bytes = 0;
    std::size_t mapped_bytes = 0;
    bool is_block = false;
    std::uint64_t resource = 0;  // A block's.
  };
  using Reservations = std::map<Address, Reservation>;
  struct ChunkState {
    ChunkFacts facts;
    std::uint32_t serial = 0;  // Differs from those of earlier chunks with this index.
    std::uint32_t mapping_count = 0;
    bool held = false;  // Its handle has not been given up.
  };
  struct Mapping {
    Address begin = 0;  // 0: this index is free.
    std::size_t bytes = 0;
    std::uint32_t chunk = 0;  // An index of chunks_.
    bool accessible = false;
  };
  // The mappings of neighbouring granules: an index of mappings_ + 1 each; 0: nothing is mapped.
  struct Leaf {
    static constexpr std::size_t kCount = 512;
    std::array<std::uint32_t, kCount> granules{};
    std::size_t mapped_count = 0;
  };

  // All of these with mutex_ held.
  Reservations::const_iterator find_reservation(Address address, std::size_t bytes) const;
  Reservation& reservation_at(Address address) {
    return std::prev(reservations_.upper_bound(address))->second;
  }
  const ChunkState* find_chunk(Chunk chunk) const;
  Leaf* find_leaf(Address address) const;
  std::size_t index_in_leaf(Address address) const { return (address >> granularity_bits_) % Leaf::kCount; }
  // The mapping that covers this address, or null.
  const Mapping* find_mapping(Address address) const;
  Mapping& mapping_of(Address address) { return const_cast<Mapping&>(*find_mapping(address)); }
  void set_granules(const Mapping& mapping, std::uint32_t value);
  void drop_chunk_if_unused(std::uint32_t index, std::vector<ChunkFacts>* ended);
  Status charge(std::size_t bytes, const char* verb);

  bool is_multiple(std::size_t bytes) const noexcept { return (bytes & (options_.granularity - 1)) == 0; }
  // "cannot WHAT on NAME: FOUND_AND_TRY".
  std::string message(const std::string& what, const std::string& found_and_try) const;
  Status no_room() const;
  Status refusal(const std::string& what, const std::string& found_and_try) const;

  const Options options_;
  const int granularity_bits_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Reservations reservations_;  // Blocks too: they never overlap.
  Address next_own_ = 0;       // Where find_free_addresses looks first.
  std::vector<ChunkState> chunks_;
  std::vector<std::uint32_t> free_chunks_;  // Indices to use again, as below.
  std::vector<Mapping> mappings_;
  std::vector<std::uint32_t> free_mappings_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Leaf>> leaves_;  // By address; only those with a mapping.
  mutable std::uint64_t cached_leaf_number_ = UINT64_MAX;            // The leaf looked at last.
  mutable Leaf* cached_leaf_ = nullptr;
  std::map<Address, std::size_t> pinned_;
  std::size_t charged_bytes_ = 0;
  std::size_t peak_charged_bytes_ = 0;
  std::size_t chunk_handle_count_ = 0;
};

}  // namespace forebay
