#include "runtime/device/cuda/address_book.h"

#include <iterator>
#include <utility>

#include "runtime/device/address_text.h"

namespace forebay {
namespace {

constexpr const char* kNoChunk =
    "there is no such chunk; give one that chunk_create returned and chunk_destroy has not had";

// Puts a node that was made before the mutex was taken into the map, so that nothing is allocated under it.
template <typename Map>
void move_all(Map& from, Map& to) {
  while (!from.empty()) to.insert(from.extract(from.begin()));
}

}  // namespace

// --- reservations ---

void CudaAddressBook::add_reservation(DevicePtr base, std::size_t bytes) {
  Reservations added{{numeric(base), bytes}};
  const std::lock_guard lock(mutex_);
  move_all(added, reservations_);
}

const char* CudaAddressBook::check_release(DevicePtr base, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(numeric(base));
  if (found == reservations_.end()) {
    return "no reservation starts there; give the address that reserve returned";
  }
  if (found->second != bytes) return "that is not what was reserved; release exactly that";
  const auto mapping = mappings_.lower_bound(found->first);
  if (mapping != mappings_.end() && mapping->first < found->first + bytes) {
    return "part of it is still mapped; unmap it first";
  }
  return nullptr;
}

void CudaAddressBook::remove_reservation(DevicePtr base) {
  Reservations::node_type removed;  // Destroyed after the mutex is given back; so are its like below.
  const std::lock_guard lock(mutex_);
  removed = reservations_.extract(numeric(base));
}

CudaAddressBook::Reservations::const_iterator CudaAddressBook::find_reservation(Address address,
                                                                                std::size_t bytes) const {
  auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return reservations_.end();
  const auto found = std::prev(after);
  const std::size_t offset = address - found->first;
  if (offset > found->second || bytes > found->second - offset) return reservations_.end();
  return found;
}

// --- chunks ---

Chunk CudaAddressBook::add_chunk(std::uint64_t driver_handle, std::size_t bytes) {
  Chunks added{{0, ChunkState{.facts = {driver_handle, bytes}}}};
  auto node = added.extract(added.begin());
  const std::lock_guard lock(mutex_);
  node.key() = next_chunk_++;
  return Chunk{chunks_.insert(std::move(node)).position->first};
}

const char* CudaAddressBook::find_chunk(Chunk chunk, ChunkFacts* facts) const {
  const std::lock_guard lock(mutex_);
  const auto found = chunks_.find(chunk.handle);
  if (found == chunks_.end() || found->second.destroyed) return kNoChunk;
  *facts = found->second.facts;
  return nullptr;
}

void CudaAddressBook::remove_chunk(Chunk chunk) {
  Chunks dropped;
  const std::lock_guard lock(mutex_);
  const auto found = chunks_.find(chunk.handle);
  found->second.destroyed = true;
  drop_chunk_if_unused(found, &dropped);
}

void CudaAddressBook::drop_chunk_if_unused(Chunks::iterator chunk, Chunks* dropped) {
  if (!chunk->second.destroyed || chunk->second.mapping_count > 0) return;
  charged_bytes_ -= chunk->second.facts.bytes;
  dropped->insert(chunks_.extract(chunk));
}

// --- mappings ---

const char* CudaAddressBook::check_map(DevicePtr address, Chunk chunk) const {
  const std::lock_guard lock(mutex_);
  const auto found = chunks_.find(chunk.handle);
  if (found == chunks_.end() || found->second.destroyed) return kNoChunk;
  const Address begin = numeric(address);
  const std::size_t bytes = found->second.facts.bytes;
  if (begin % granularity_ != 0) return "not a multiple of the granularity; align the address";
  if (find_reservation(begin, bytes) == reservations_.end()) {
    return "the chunk does not lie within one reservation there; reserve the addresses";
  }
  const auto after = mappings_.lower_bound(begin);
  const bool runs_into = after != mappings_.end() && after->first < begin + bytes;
  const bool is_inside =
      after != mappings_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > begin;
  if (runs_into || is_inside) return "part of the range is mapped already; unmap it first";
  return nullptr;
}

void CudaAddressBook::add_mapping(DevicePtr address, Chunk chunk) {
  Mappings added{{numeric(address), Mapping{.chunk = chunk.handle}}};
  const std::lock_guard lock(mutex_);
  ChunkState& state = chunks_.find(chunk.handle)->second;
  added.begin()->second.bytes = state.facts.bytes;
  ++state.mapping_count;
  move_all(added, mappings_);
}

const char* CudaAddressBook::check_mappings(DevicePtr address, std::size_t bytes) const {
  const Address begin = numeric(address);
  if (bytes == 0 || bytes % granularity_ != 0 || begin % granularity_ != 0) {
    return "not a multiple of the granularity; give whole mappings";
  }
  const std::lock_guard lock(mutex_);
  if (find_reservation(begin, bytes) == reservations_.end()) {
    return "the range is not within one reservation; give a range from reserve";
  }
  auto mapping = mappings_.find(begin);
  if (mapping == mappings_.end()) return "no mapping starts there; give whole mappings";
  const Address end = begin + bytes;
  Address next = begin;
  for (; next < end; ++mapping) {
    if (mapping == mappings_.end() || mapping->first != next) {
      return "part of the range is not mapped; give a range without holes";
    }
    next += mapping->second.bytes;
  }
  return next == end ? nullptr : "the range ends within a mapping; give whole mappings";
}

std::size_t CudaAddressBook::mapping_bytes(DevicePtr address) const {
  const std::lock_guard lock(mutex_);
  return mappings_.find(numeric(address))->second.bytes;
}

void CudaAddressBook::set_accessible(DevicePtr address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto end = mappings_.lower_bound(numeric(address) + bytes);
  for (auto mapping = mappings_.find(numeric(address)); mapping != end; ++mapping) {
    mapping->second.accessible = true;
  }
}

void CudaAddressBook::remove_mappings(DevicePtr address, std::size_t bytes) {
  Mappings removed;
  Chunks dropped;
  const std::lock_guard lock(mutex_);
  const auto end = mappings_.lower_bound(numeric(address) + bytes);
  for (auto mapping = mappings_.find(numeric(address)); mapping != end;) {
    const auto chunk = chunks_.find(mapping->second.chunk);
    --chunk->second.mapping_count;
    drop_chunk_if_unused(chunk, &dropped);
    removed.insert(mappings_.extract(mapping++));
  }
}

const char* CudaAddressBook::check_usable(const void* address, std::size_t bytes) const {
  const Address begin = numeric(address);
  const Address end = begin + bytes;
  if (end < begin) return "the range wraps around; check its size";
  const std::lock_guard lock(mutex_);
  const auto after = reservations_.lower_bound(end);
  if (after == reservations_.begin()) return nullptr;
  const auto reservation = std::prev(after);
  if (reservation->first + reservation->second <= begin) return nullptr;
  if (begin < reservation->first || end > reservation->first + reservation->second) {
    return "the range leaves the reservation; give a range within it";
  }
  auto mapping = mappings_.upper_bound(begin);
  if (mapping != mappings_.begin()) --mapping;
  Address next = begin;
  for (; next < end; ++mapping) {
    if (mapping == mappings_.end() || mapping->first > next ||
        mapping->first + mapping->second.bytes <= next) {
      return "part of the range is not mapped; map it first";
    }
    if (!mapping->second.accessible) return "part of the range is not accessible; set_access it first";
    next = mapping->first + mapping->second.bytes;
  }
  return nullptr;
}

// --- blocks ---

void CudaAddressBook::add_block(DevicePtr address, std::size_t bytes) {
  Blocks added{{numeric(address), bytes}};
  const std::lock_guard lock(mutex_);
  move_all(added, blocks_);
}

std::size_t CudaAddressBook::remove_block(DevicePtr address) {
  Blocks::node_type removed;
  const std::lock_guard lock(mutex_);
  removed = blocks_.extract(numeric(address));
  return removed.empty() ? 0 : removed.mapped();
}

// --- the budget ---

bool CudaAddressBook::charge(std::size_t bytes, std::size_t* free_bytes) {
  const std::lock_guard lock(mutex_);
  *free_bytes = budget_bytes_ > charged_bytes_ ? budget_bytes_ - charged_bytes_ : 0;
  if (budget_bytes_ != 0 && bytes > *free_bytes) return false;
  charged_bytes_ += bytes;
  return true;
}

void CudaAddressBook::refund(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  charged_bytes_ -= bytes;
}

std::size_t CudaAddressBook::charged_bytes() const {
  const std::lock_guard lock(mutex_);
  return charged_bytes_;
}

std::size_t CudaAddressBook::live_count() const {
  const std::lock_guard lock(mutex_);
  std::size_t count = reservations_.size() + mappings_.size() + blocks_.size();
  for (const auto& [number, chunk] : chunks_) count += chunk.destroyed ? 0 : 1;
  return count;
}

bool CudaAddressBook::any_mapping(DevicePtr* address, std::size_t* bytes) const {
  const std::lock_guard lock(mutex_);
  if (mappings_.empty()) return false;
  *address = to_pointer(mappings_.begin()->first);
  *bytes = mappings_.begin()->second.bytes;
  return true;
}

bool CudaAddressBook::any_chunk(Chunk* chunk) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [number, state] : chunks_) {
    if (state.destroyed) continue;
    *chunk = Chunk{number};
    return true;
  }
  return false;
}

bool CudaAddressBook::any_reservation(DevicePtr* base, std::size_t* bytes) const {
  const std::lock_guard lock(mutex_);
  if (reservations_.empty()) return false;
  *base = to_pointer(reservations_.begin()->first);
  *bytes = reservations_.begin()->second;
  return true;
}

bool CudaAddressBook::any_block(DevicePtr* address) const {
  const std::lock_guard lock(mutex_);
  if (blocks_.empty()) return false;
  *address = to_pointer(blocks_.begin()->first);
  return true;
}

}  // namespace forebay
