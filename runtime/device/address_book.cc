#include "runtime/device/address_book.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <iterator>
#include <utility>

#include "forebay/host_room.h"
#include "runtime/device/address_text.h"

namespace forebay {
namespace {

using internal::has_host_memory;
using internal::has_text_room;
using internal::kNoHostMemory;
using internal::make_vector_room;

// Puts `value` at a free index and returns that.
template <typename T>
std::uint32_t add_at_free_index(T value, std::vector<T>& values, std::vector<std::uint32_t>& free_indices) {
  if (free_indices.empty()) {
    values.push_back(std::move(value));
    return static_cast<std::uint32_t>(values.size() - 1);
  }
  const std::uint32_t index = free_indices.back();
  free_indices.pop_back();
  values[index] = std::move(value);
  return index;
}

}  // namespace

AddressBook::AddressBook(Options options)
    : options_(std::move(options)),
      granularity_bits_(std::countr_zero(options_.granularity)),
      next_own_(options_.own_begin) {}

std::string AddressBook::message(const std::string& what, const std::string& found_and_try) const {
  return "cannot " + what + " on " + options_.name + ": " + found_and_try;
}

Status AddressBook::no_room() const {
  return has_text_room() ? Status(StatusCode::kOutOfMemory,
                                  message("keep books", "the host has no memory left; free host memory"))
                         : Status(StatusCode::kOutOfMemory, kNoHostMemory);
}

Status AddressBook::refusal(const std::string& what, const std::string& found_and_try) const {
  return invalid(message(what, found_and_try));
}

// --- reservations ---

Status AddressBook::check_reserve(std::size_t bytes, std::size_t alignment) const {
  const auto what = [bytes] { return "reserve " + format_bytes(bytes) + " of addresses"; };
  if (bytes == 0 || !is_multiple(bytes)) {
    return refusal(what(),
                   "not a multiple of the granularity; round up to " + format_bytes(options_.granularity));
  }
  if (alignment != 0 && !std::has_single_bit(alignment)) {
    return refusal(what(), "an alignment of " + std::to_string(alignment) +
                               " is not a power of two; give one, or 0 for the granularity");
  }
  return has_text_room() ? Status() : no_room();
}

// Behind the last range that was taken. After the last address, from the bottom again: the first gap that is
// wide enough.
DevicePtr AddressBook::find_free_addresses(std::size_t bytes, std::size_t alignment) const {
  if (bytes > options_.own_bytes || alignment > options_.own_bytes) return nullptr;
  const Address own_end = options_.own_begin + options_.own_bytes;
  Address base = 0;
  const auto fits = [&](Address from, Address end) {
    base = align_up(from, alignment);
    return base >= from && base <= end && bytes <= end - base;
  };
  const std::lock_guard lock(mutex_);
  const auto next = reservations_.lower_bound(next_own_);
  if (fits(next_own_, next == reservations_.end() ? own_end : next->first)) return to_pointer(base);
  Address from = options_.own_begin;
  for (const auto& [start, reservation] : reservations_) {
    if (fits(from, start)) return to_pointer(base);
    from = start + reservation.bytes;
  }
  return fits(from, own_end) ? to_pointer(base) : nullptr;
}

void AddressBook::add_reservation(DevicePtr base, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  reservations_.emplace(numeric(base), Reservation{.bytes = bytes});
  next_own_ = numeric(base) + bytes;
}

Status AddressBook::check_release(DevicePtr base, std::size_t bytes) const {
  const auto refuse = [&](const std::string& found_and_try) {
    return refusal("release " + range_text(base, bytes), found_and_try);
  };
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(numeric(base));
  if (found == reservations_.end() || found->second.is_block) {
    return refuse("no reservation starts there; give the address that reserve returned");
  }
  if (found->second.bytes != bytes) {
    return refuse(format_bytes(found->second.bytes) + " were reserved; release exactly those");
  }
  if (found->second.mapped_bytes != 0) {
    return refuse(format_bytes(found->second.mapped_bytes) + " of it are still mapped; unmap them first");
  }
  return {};
}

void AddressBook::remove_reservation(DevicePtr base) {
  const std::lock_guard lock(mutex_);
  reservations_.erase(numeric(base));
}

// The reservation that holds the whole range, or end().
AddressBook::Reservations::const_iterator AddressBook::find_reservation(Address address,
                                                                        std::size_t bytes) const {
  const auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return reservations_.end();
  const auto found = std::prev(after);
  const std::size_t offset = address - found->first;
  if (offset > found->second.bytes || bytes > found->second.bytes - offset) return reservations_.end();
  return found;
}

// --- chunks ---

// A handle is a serial number of the process in its upper half, and an index + 1 in its lower half.
Chunk AddressBook::add_chunk(std::uint64_t resource, std::size_t bytes) {
  static std::atomic<std::uint32_t> next_serial{1};
  const std::uint32_t serial = next_serial.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  const std::uint32_t index = add_at_free_index(
      ChunkState{.facts = {resource, bytes, false}, .serial = serial, .mapping_count = 0, .held = true},
      chunks_, free_chunks_);
  ++chunk_handle_count_;
  return Chunk{std::uint64_t{serial} << 32 | (index + 1)};
}

// The chunk with this handle, or null.
const AddressBook::ChunkState* AddressBook::find_chunk(Chunk chunk) const {
  const auto number = static_cast<std::uint32_t>(chunk.handle);
  if (number == 0 || number > chunks_.size()) return nullptr;
  const ChunkState& state = chunks_[number - 1];
  return state.held && state.serial == chunk.handle >> 32 ? &state : nullptr;
}

Result<AddressBook::ChunkFacts> AddressBook::check_destroy(Chunk chunk) const {
  const std::lock_guard lock(mutex_);
  if (const ChunkState* state = find_chunk(chunk)) return state->facts;
  return refusal("destroy a chunk", "there is no such chunk; give one that chunk_create returned, once");
}

void AddressBook::remove_chunk(Chunk chunk, std::vector<ChunkFacts>* ended) {
  const std::lock_guard lock(mutex_);
  const auto index = static_cast<std::uint32_t>(find_chunk(chunk) - chunks_.data());
  chunks_[index].held = false;
  --chunk_handle_count_;
  drop_chunk_if_unused(index, ended);
}

void AddressBook::drop_chunk_if_unused(std::uint32_t index, std::vector<ChunkFacts>* ended) {
  const ChunkState& chunk = chunks_[index];
  if (chunk.held || chunk.mapping_count > 0) return;
  charged_bytes_ -= chunk.facts.bytes;
  if (ended != nullptr) ended->push_back(chunk.facts);
  free_chunks_.push_back(index);
}

// --- mappings ---

AddressBook::Leaf* AddressBook::find_leaf(Address address) const {
  const std::uint64_t number = (address >> granularity_bits_) / Leaf::kCount;
  if (number != cached_leaf_number_) {
    const auto found = leaves_.find(number);
    if (found == leaves_.end()) return nullptr;
    cached_leaf_number_ = number;
    cached_leaf_ = found->second.get();
  }
  return cached_leaf_;
}

const AddressBook::Mapping* AddressBook::find_mapping(Address address) const {
  const Leaf* const leaf = find_leaf(address);
  const std::uint32_t number = leaf == nullptr ? 0 : leaf->granules[index_in_leaf(address)];
  return number == 0 ? nullptr : &mappings_[number - 1];
}

// Writes `value` for all granules of the mapping. A leaf is made for its first mapped granule and goes with
// its last.
void AddressBook::set_granules(const Mapping& mapping, std::uint32_t value) {
  const std::size_t leaf_bytes = Leaf::kCount << granularity_bits_;
  const Address end = mapping.begin + mapping.bytes;
  for (Address next = mapping.begin; next < end;) {
    Leaf* leaf = find_leaf(next);
    if (leaf == nullptr) {
      leaves_.emplace((next >> granularity_bits_) / Leaf::kCount, std::make_unique<Leaf>());
      leaf = find_leaf(next);
    }
    const Address part_end = std::min<Address>(end, (next & ~(leaf_bytes - 1)) + leaf_bytes);
    const std::size_t count = (part_end - next) >> granularity_bits_;
    std::fill_n(leaf->granules.begin() + static_cast<std::ptrdiff_t>(index_in_leaf(next)), count, value);
    next = part_end;
    leaf->mapped_count = value != 0 ? leaf->mapped_count + count : leaf->mapped_count - count;
    if (leaf->mapped_count > 0) continue;
    leaves_.erase(cached_leaf_number_);
    cached_leaf_number_ = UINT64_MAX;
  }
}

Result<AddressBook::ChunkFacts> AddressBook::check_map(DevicePtr address, Chunk chunk) {
  const auto refuse = [&](const std::string& found_and_try) {
    return refusal("map a chunk at " + hex(numeric(address)), found_and_try);
  };
  const std::lock_guard lock(mutex_);
  const ChunkState* const state = find_chunk(chunk);
  if (state == nullptr) {
    return refuse(
        "there is no such chunk; give one that chunk_create returned and chunk_destroy has not had");
  }
  const Address begin = numeric(address);
  const std::size_t bytes = state->facts.bytes;
  if (!is_multiple(begin)) {
    return refuse("not a multiple of the granularity, " + format_bytes(options_.granularity) +
                  "; align the address");
  }
  const auto reservation = find_reservation(begin, bytes);
  if (reservation == reservations_.end()) {
    return refuse(format_bytes(bytes) + " from there are not within one reservation; reserve them");
  }
  if (reservation->second.is_block) {
    return refuse("that is a block of alloc; map at an address from reserve");
  }
  for (Address next = begin; next < begin + bytes; next += options_.granularity) {
    if (const Mapping* mapping = find_mapping(next)) {
      return refuse(range_text(to_pointer(mapping->begin), mapping->bytes) +
                    " are mapped already; unmap them first");
    }
  }
  const std::size_t leaf_count = (bytes >> granularity_bits_) / Leaf::kCount + 2;
  const bool has_room = make_vector_room(mappings_) &&
                        make_vector_room(free_mappings_, mappings_.capacity()) &&
                        has_host_memory(leaf_count * 2 * sizeof(Leaf)) && has_text_room();
  return has_room ? Result<ChunkFacts>(state->facts) : no_room();
}

void AddressBook::add_mapping(DevicePtr address, Chunk chunk) {
  const std::lock_guard lock(mutex_);
  const auto chunk_index = static_cast<std::uint32_t>(find_chunk(chunk) - chunks_.data());
  ChunkState& state = chunks_[chunk_index];
  const Mapping mapping{
      .begin = numeric(address), .bytes = state.facts.bytes, .chunk = chunk_index, .accessible = false};
  set_granules(mapping, add_at_free_index(mapping, mappings_, free_mappings_) + 1);
  reservation_at(mapping.begin).mapped_bytes += mapping.bytes;
  state.facts.was_mapped = true;
  ++state.mapping_count;
}

Status AddressBook::check_mappings(DevicePtr address, std::size_t bytes, const char* verb) const {
  const auto refuse = [&](const char* found_and_try) {
    return refusal(std::string(verb) + " " + range_text(address, bytes), found_and_try);
  };
  const Address begin = numeric(address);
  if (bytes == 0 || !is_multiple(bytes) || !is_multiple(begin)) {
    return refuse("not a multiple of the granularity; give whole mappings");
  }
  const std::lock_guard lock(mutex_);
  const auto reservation = find_reservation(begin, bytes);
  if (reservation == reservations_.end() || reservation->second.is_block) {
    return refuse("the range is not within one reservation; give a range from reserve");
  }
  const Address end = begin + bytes;
  Address next = begin;
  while (next < end) {
    const Mapping* const mapping = find_mapping(next);
    if (mapping == nullptr || mapping->begin != next) {
      return next == begin ? refuse("no mapping starts there; give whole mappings")
                           : refuse("part of the range is not mapped; give a range without holes");
    }
    next += mapping->bytes;
  }
  if (next != end) return refuse("the range ends within a mapping; give whole mappings");
  return {};
}

AddressBook::MappingFacts AddressBook::mapping_at(DevicePtr address) const {
  const std::lock_guard lock(mutex_);
  const Mapping& mapping = *find_mapping(numeric(address));
  return {.bytes = mapping.bytes, .accessible = mapping.accessible};
}

void AddressBook::set_accessible(DevicePtr address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const Address end = numeric(address) + bytes;
  for (Address next = numeric(address); next < end;) {
    Mapping& mapping = mapping_of(next);
    mapping.accessible = true;
    next += mapping.bytes;
  }
}

void AddressBook::remove_mappings(DevicePtr address, std::size_t bytes, std::vector<ChunkFacts>* ended) {
  const std::lock_guard lock(mutex_);
  const Address end = numeric(address) + bytes;
  reservation_at(numeric(address)).mapped_bytes -= bytes;
  for (Address next = numeric(address); next < end;) {
    Mapping& mapping = mapping_of(next);
    const std::uint32_t chunk = mapping.chunk;
    next += mapping.bytes;
    set_granules(mapping, 0);
    mapping = {};
    free_mappings_.push_back(static_cast<std::uint32_t>(&mapping - mappings_.data()));
    --chunks_[chunk].mapping_count;
    drop_chunk_if_unused(chunk, ended);
  }
}

bool AddressBook::holds(const void* address) const {
  const std::lock_guard lock(mutex_);
  const auto after = reservations_.upper_bound(numeric(address));
  if (after == reservations_.begin()) return false;
  const auto& [begin, reservation] = *std::prev(after);
  return numeric(address) - begin < reservation.bytes;
}

Status AddressBook::check_usable(const void* address, std::size_t bytes, const char* verb) const {
  const auto refuse = [&](const char* found_and_try) {
    return refusal(std::string(verb) + " " + range_text(address, bytes), found_and_try);
  };
  const Address begin = numeric(address);
  if (begin == 0) return refuse("the address is null; give a valid one");
  if (bytes > SIZE_MAX - begin) return refuse("the range wraps around; give its size in bytes");
  const Address end = begin + bytes;
  const bool has_own = options_.own_bytes != 0;
  if (has_own && (end <= options_.own_begin || begin >= options_.own_begin + options_.own_bytes)) return {};
  const std::lock_guard lock(mutex_);
  // The last reservation that begins before the end of the range is the only one that can hold all of it.
  const auto after = reservations_.lower_bound(end);
  const auto last = after == reservations_.begin() ? reservations_.end() : std::prev(after);
  const bool touches = last != reservations_.end() && last->first + last->second.bytes > begin;
  if (!touches && !has_own) return {};
  if (!touches || begin < last->first || end > last->first + last->second.bytes) {
    return refuse("the range is not within one reservation; keep to one reservation");
  }
  if (last->second.is_block) return {};
  for (Address next = begin; next < end;) {
    const Mapping* const mapping = find_mapping(next);
    if (mapping == nullptr) return refuse("part of the range is not mapped; map a chunk first");
    if (!mapping->accessible) return refuse("part of the range has no access; call set_access first");
    next = mapping->begin + mapping->bytes;
  }
  return {};
}

// --- blocks ---

void AddressBook::add_block(DevicePtr address, BlockFacts block) {
  const std::lock_guard lock(mutex_);
  reservations_.emplace(numeric(address),
                        Reservation{.bytes = block.bytes, .is_block = true, .resource = block.resource});
  next_own_ = numeric(address) + block.bytes;
}

Result<AddressBook::BlockFacts> AddressBook::remove_block(DevicePtr address) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(numeric(address));
  if (found == reservations_.end() || !found->second.is_block) {
    return refusal("free " + hex(numeric(address)),
                   "no block starts there; give an address that alloc returned, once");
  }
  const BlockFacts block{.bytes = found->second.bytes, .resource = found->second.resource};
  reservations_.erase(found);
  return block;
}

// --- pinned host memory ---

Status AddressBook::add_pinned(void* address, std::size_t bytes) {
  const auto what = [=] { return "pin " + range_text(address, bytes); };
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const Address begin = numeric(address);
  if (begin == 0 || bytes == 0 || begin % page_bytes != 0 || bytes % page_bytes != 0 ||
      bytes > SIZE_MAX - begin) {
    return refusal(what(), "not whole pages of " + format_bytes(page_bytes) + "; align the range to pages");
  }
  if (!has_text_room()) return no_room();
  const std::lock_guard lock(mutex_);
  const auto after = pinned_.lower_bound(begin + bytes);
  if (after != pinned_.begin() && std::prev(after)->first + std::prev(after)->second > begin) {
    return refusal(what(), "part of it is pinned already; pin a range once");
  }
  pinned_.emplace(begin, bytes);
  return {};
}

Result<std::size_t> AddressBook::remove_pinned(void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = pinned_.find(numeric(address));
  if (found == pinned_.end()) {
    return refusal("unpin " + hex(numeric(address)),
                   "no pinned range starts there; give an address that was pinned, once");
  }
  const std::size_t bytes = found->second;
  pinned_.erase(found);
  return bytes;
}

// --- the budget ---

Status AddressBook::charge(std::size_t bytes, const char* verb) {
  if (!has_text_room()) return no_room();
  const std::lock_guard lock(mutex_);
  const std::size_t free_bytes = options_.budget_bytes - charged_bytes_;
  if (bytes > free_bytes) {
    return {StatusCode::kOutOfMemory,
            message(verb + format_bytes(bytes), format_bytes(free_bytes) + " of " +
                                                    format_bytes(options_.budget_bytes) +
                                                    " free; raise memory_bytes or free some first")};
  }
  charged_bytes_ += bytes;
  peak_charged_bytes_ = std::max(peak_charged_bytes_, charged_bytes_);
  return {};
}

Status AddressBook::charge_chunk(std::size_t bytes) {
  if (bytes == 0 || !is_multiple(bytes)) {
    return refusal("create a chunk of " + std::to_string(bytes) + " bytes",
                   "not a multiple of the granularity; round up to " + format_bytes(options_.granularity));
  }
  {
    const std::lock_guard lock(mutex_);
    if (!make_vector_room(chunks_) || !make_vector_room(free_chunks_, chunks_.capacity())) return no_room();
  }
  return charge(bytes, "create a chunk of ");
}

Result<std::size_t> AddressBook::charge_block(std::size_t bytes, std::size_t multiple) {
  if (bytes == 0) return refusal("allocate 0 bytes", "a block has at least 1 byte; ask for more");
  if (bytes > SIZE_MAX - multiple) {
    return Status(StatusCode::kOutOfMemory,
                  message("allocate " + format_bytes(bytes), "more than there are addresses; ask for less"));
  }
  const std::size_t rounded = align_up(bytes, multiple);
  FOREBAY_RETURN_IF_ERROR(charge(rounded, "allocate "));
  return rounded;
}

void AddressBook::refund(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  charged_bytes_ -= bytes;
}

std::size_t AddressBook::charged_bytes() const {
  const std::lock_guard lock(mutex_);
  return charged_bytes_;
}

std::size_t AddressBook::peak_charged_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_charged_bytes_;
}

// --- everything at once ---

std::size_t AddressBook::live_count() const {
  const std::lock_guard lock(mutex_);
  return reservations_.size() + chunk_handle_count_ + (mappings_.size() - free_mappings_.size()) +
         pinned_.size();
}

AddressBook::Left AddressBook::left() const {
  Left left;
  const std::lock_guard lock(mutex_);
  for (const auto& [address, bytes] : pinned_) left.pinned.push_back({to_pointer(address), bytes});
  for (const auto& [address, reservation] : reservations_) {
    (reservation.is_block ? left.blocks : left.reservations)
        .push_back({to_pointer(address), reservation.bytes});
  }
  for (const Mapping& mapping : mappings_) {
    if (mapping.begin != 0) left.mappings.push_back({to_pointer(mapping.begin), mapping.bytes});
  }
  for (const ChunkState& chunk : chunks_) {
    if (chunk.held) left.chunks.push_back(chunk.facts.resource);
  }
  return left;
}

}  // namespace forebay
