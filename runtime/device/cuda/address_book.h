// CudaAddressBook: what a cuda backend has reserved, mapped and made accessible, and what it has charged
// against its budget. It judges every request before the driver sees it, because drivers differ in what they
// refuse and some crash on a handle that is gone. It calls no driver.
//
// Questions answer with the reason for refusing ("<what was found>; <what to try>"), or null for yes.
//
// Threads: every function may be called from any thread; no memory is allocated or freed under its mutex. A
// caller that asks and then changes holds a mutex of its own over both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "forebay/backend.h"

namespace forebay {

class CudaAddressBook {
 public:
  struct ChunkFacts {
    std::uint64_t driver_handle = 0;
    std::size_t bytes = 0;
  };

  // `budget_bytes` 0: none.
  CudaAddressBook(std::size_t granularity, std::size_t budget_bytes) noexcept
      : granularity_(granularity), budget_bytes_(budget_bytes) {}

  // --- reservations ---
  void add_reservation(DevicePtr base, std::size_t bytes);
  const char* check_release(DevicePtr base, std::size_t bytes) const;
  void remove_reservation(DevicePtr base);

  // --- chunks; their numbers are never used twice, so that one that is gone is always told apart ---
  Chunk add_chunk(std::uint64_t driver_handle, std::size_t bytes);
  const char* find_chunk(Chunk chunk, ChunkFacts* facts) const;
  // The handle is given up; mappings keep the charge.
  void remove_chunk(Chunk chunk);

  // --- mappings ---
  const char* check_map(DevicePtr address, Chunk chunk) const;
  void add_mapping(DevicePtr address, Chunk chunk);
  // For unmap and set_access: the range is made of whole mappings, without a hole, in one reservation.
  const char* check_mappings(DevicePtr address, std::size_t bytes) const;
  // The bytes of the mapping that starts there. Requires: there is one.
  std::size_t mapping_bytes(DevicePtr address) const;
  void set_accessible(DevicePtr address, std::size_t bytes);
  void remove_mappings(DevicePtr address, std::size_t bytes);

  // For copies and fills: no part of the range lies in a reservation where it is not accessible. What lies
  // elsewhere is another's memory, which this cannot judge.
  const char* check_usable(const void* address, std::size_t bytes) const;

  // --- blocks of alloc ---
  void add_block(DevicePtr address, std::size_t bytes);
  // The block's bytes, which stay charged; 0 when there is none at that address.
  std::size_t remove_block(DevicePtr address);

  // --- the budget ---
  // Takes `bytes` of it. False, with what is left, when there is less.
  bool charge(std::size_t bytes, std::size_t* free_bytes);
  void refund(std::size_t bytes);
  std::size_t budget_bytes() const noexcept { return budget_bytes_; }
  std::size_t charged_bytes() const;

  // Reservations, chunks, mappings and blocks not given back.
  std::size_t live_count() const;

  // For giving everything back at the end: one of each that is left, until none is.
  bool any_mapping(DevicePtr* address, std::size_t* bytes) const;
  bool any_chunk(Chunk* chunk) const;
  bool any_reservation(DevicePtr* base, std::size_t* bytes) const;
  bool any_block(DevicePtr* address) const;

 private:
  using Address = std::uintptr_t;
  struct Mapping {
    std::size_t bytes = 0;
    std::uint64_t chunk = 0;
    bool accessible = false;
  };
  struct ChunkState {
    ChunkFacts facts;
    std::size_t mapping_count = 0;
    bool destroyed = false;
  };
  using Reservations = std::map<Address, std::size_t>;
  using Mappings = std::map<Address, Mapping>;
  using Chunks = std::map<std::uint64_t, ChunkState>;
  using Blocks = std::map<Address, std::size_t>;

  // With mutex_ held.
  Reservations::const_iterator find_reservation(Address address, std::size_t bytes) const;
  void drop_chunk_if_unused(Chunks::iterator chunk, Chunks* dropped);

  const std::size_t granularity_;
  const std::size_t budget_bytes_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Reservations reservations_;
  Mappings mappings_;
  Chunks chunks_;
  Blocks blocks_;
  std::uint64_t next_chunk_ = 1;
  std::size_t charged_bytes_ = 0;
};

}  // namespace forebay
