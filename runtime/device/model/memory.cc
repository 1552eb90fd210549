#include "runtime/device/model/memory.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "runtime/device/address_text.h"

namespace forebay {

ModelMemory::ModelMemory(Options options)
    : options_(std::move(options)), granularity_bits_(std::countr_zero(options_.granularity)) {}

// --- address space ---

Result<DevicePtr> ModelMemory::reserve(std::size_t bytes, std::size_t alignment) {
  const std::lock_guard lock(mutex_);
  const std::string what = "cannot reserve " + format_bytes(bytes) + " of addresses on " + options_.name;
  if (bytes == 0 || !is_multiple(bytes)) {
    return invalid(what + ": not a multiple of the granularity; round up to " +
                   format_bytes(options_.granularity));
  }
  if (alignment != 0 && !is_power_of_two(alignment)) {
    return invalid(what + ": an alignment of " + std::to_string(alignment) +
                   " is not a power of two; give one, or 0 for the granularity");
  }
  return take_addresses(bytes, std::max(alignment, options_.granularity), false, what);
}

// Behind the last reservation made; from the bottom again, into the first gap that is wide enough, once the
// end is reached.
Result<DevicePtr> ModelMemory::take_addresses(std::size_t bytes, std::size_t alignment, bool internal,
                                              const std::string& what) {
  constexpr Address kEnd = kFirstAddress + kAddressBytes;
  const auto take = [&](Address base) -> Result<DevicePtr> {
    reservations_.emplace(base, Reservation{.bytes = bytes, .internal = internal});
    next_address_ = base + bytes;
    return to_pointer(base);
  };
  const auto fits = [&](Address from, Address end, Address* base) {
    *base = round_up(from, alignment);
    return *base >= from && *base <= end && bytes <= end - *base;
  };
  Address base = 0;
  if (bytes <= kAddressBytes && alignment <= kAddressBytes) {
    const auto next = reservations_.lower_bound(next_address_);
    if (fits(next_address_, next == reservations_.end() ? kEnd : next->first, &base)) return take(base);
    Address from = kFirstAddress;
    for (const auto& [start, reservation] : reservations_) {
      if (fits(from, start, &base)) return take(base);
      from = start + reservation.bytes;
    }
    if (fits(from, kEnd, &base)) return take(base);
  }
  return Status(StatusCode::kOutOfMemory,
                what + ": no such range is free among " + format_bytes(kAddressBytes) + "; reserve less");
}

Status ModelMemory::release(DevicePtr base, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto refusal = [&](const std::string& found_and_try) {
    return invalid("cannot release " + range_text(base, bytes) + " on " + options_.name + ": " +
                   found_and_try);
  };
  const auto found = reservations_.find(numeric(base));
  if (found == reservations_.end() || found->second.internal) {
    return refusal("no reservation starts there; give the address that reserve returned");
  }
  if (found->second.bytes != bytes) {
    return refusal(format_bytes(found->second.bytes) + " were reserved; release exactly those");
  }
  // The leaves with mappings are few, the granules of a reservation may be many.
  constexpr int kLeafBits = std::countr_zero(Leaf::kCount);
  const std::uint64_t first_granule = numeric(base) >> granularity_bits_;
  const std::uint64_t end_granule = first_granule + (bytes >> granularity_bits_);
  for (const auto& [number, leaf] : leaves_) {
    for (std::size_t i = 0; i < Leaf::kCount; ++i) {
      const std::uint64_t granule = (number << kLeafBits) + i;
      if (granule < first_granule || granule >= end_granule || leaf->granules[i].chunk == 0) continue;
      return refusal(hex(granule << granularity_bits_) + " is still mapped; unmap it first");
    }
  }
  reservations_.erase(found);
  return {};
}

// The reservation that holds the whole range, or end().
ModelMemory::Reservations::const_iterator ModelMemory::find_reservation(Address address,
                                                                        std::size_t bytes) const {
  const auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return reservations_.end();
  const auto found = std::prev(after);
  const std::size_t offset = address - found->first;
  if (offset > found->second.bytes || bytes > found->second.bytes - offset) return reservations_.end();
  return found;
}

const ModelMemory::Granule* ModelMemory::find_granule(Address address) const {
  const std::uint64_t granule = address >> granularity_bits_;
  const std::uint64_t number = granule / Leaf::kCount;
  if (number != cached_leaf_number_) {
    const auto found = leaves_.find(number);
    if (found == leaves_.end()) return nullptr;
    cached_leaf_number_ = number;
    cached_leaf_ = found->second.get();
  }
  return &cached_leaf_->granules[granule % Leaf::kCount];
}

// How many granules the mapping that starts at this address has; 0 if none starts there.
std::size_t ModelMemory::mapped_granules(Address address) const {
  const Granule* granule = find_granule(address);
  if (granule == nullptr || granule->chunk == 0 || !granule->starts) return 0;
  return chunks_[granule->chunk - 1].bytes >> granularity_bits_;
}

// The range is made up of whole mappings, without a hole, within one reservation.
Status ModelMemory::check_mappings(DevicePtr address, std::size_t bytes, const char* verb) const {
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
  Address next = begin;
  while (next < end) {
    const std::size_t count = mapped_granules(next);
    if (count == 0) {
      return next == begin ? refusal("no mapping starts there; give whole mappings")
                           : refusal("part of the range is not mapped; give a range without holes");
    }
    next += count << granularity_bits_;
  }
  if (next != end) return refusal("the range ends within a mapping; give whole mappings");
  return {};
}

Status ModelMemory::map(DevicePtr address, Chunk chunk) {
  const std::lock_guard lock(mutex_);
  const auto refusal = [&](const std::string& found_and_try) {
    return invalid("cannot map a chunk at " + hex(numeric(address)) + " on " + options_.name + ": " +
                   found_and_try);
  };
  std::uint32_t index = 0;
  ChunkState* const state = find_chunk(chunk, &index);
  if (state == nullptr) {
    return refusal(
        "there is no such chunk; give one that chunk_create returned and chunk_destroy has not had");
  }
  const Address begin = numeric(address);
  if (!is_multiple(begin)) {
    return refusal("not a multiple of the granularity, " + format_bytes(options_.granularity) +
                   "; align the address");
  }
  const auto reservation = find_reservation(begin, state->bytes);
  if (reservation == reservations_.end()) {
    return refusal(format_bytes(state->bytes) + " from there are not within one reservation; reserve them");
  }
  if (reservation->second.internal) {
    return refusal("that is a block of alloc; map at an address from reserve");
  }
  const Address end = begin + state->bytes;
  for (Address next = begin; next < end; next += options_.granularity) {
    const Granule* granule = find_granule(next);
    if (granule != nullptr && granule->chunk != 0) {
      return refusal(hex(next) + " is mapped already; unmap it first");
    }
  }
  for (Address next = begin; next < end; next += options_.granularity) {
    const std::uint64_t number = (next >> granularity_bits_) / Leaf::kCount;
    Granule* granule = find_granule(next);
    if (granule == nullptr) {
      leaves_.emplace(number, std::make_unique<Leaf>());
      granule = find_granule(next);
    }
    *granule = {.chunk = index + 1, .starts = next == begin, .accessible = false};
    ++cached_leaf_->mapped_count;
  }
  ++state->mapping_count;
  ++mapping_count_;
  return {};
}

Status ModelMemory::unmap(DevicePtr address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  FOREBAY_RETURN_IF_ERROR(check_mappings(address, bytes, "unmap"));
  const Address end = numeric(address) + bytes;
  for (Address next = numeric(address); next < end; next += options_.granularity) {
    Granule* const granule = find_granule(next);
    const std::uint32_t index = granule->chunk - 1;
    const bool starts = granule->starts;
    *granule = {};
    if (--cached_leaf_->mapped_count == 0) {
      leaves_.erase(cached_leaf_number_);
      cached_leaf_number_ = UINT64_MAX;
    }
    if (!starts) continue;
    --mapping_count_;
    --chunks_[index].mapping_count;
    drop_chunk_if_unused(index);
  }
  return {};
}

Status ModelMemory::set_access(DevicePtr address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  FOREBAY_RETURN_IF_ERROR(check_mappings(address, bytes, "set access to"));
  const Address end = numeric(address) + bytes;
  for (Address next = numeric(address); next < end; next += options_.granularity) {
    find_granule(next)->accessible = true;
  }
  return {};
}

// --- chunks ---

Status ModelMemory::charge(std::size_t bytes, const char* verb) {
  const std::size_t free_bytes = options_.memory_bytes - charged_bytes_;
  if (bytes > free_bytes) {
    return Status(StatusCode::kOutOfMemory, std::string("cannot ") + verb + format_bytes(bytes) + " on " +
                                                options_.name + ": " + format_bytes(free_bytes) + " of " +
                                                format_bytes(options_.memory_bytes) +
                                                " free; raise --memory or free some first");
  }
  charged_bytes_ += bytes;
  peak_charged_bytes_ = std::max(peak_charged_bytes_, charged_bytes_);
  return {};
}

Result<Chunk> ModelMemory::chunk_create(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes == 0 || !is_multiple(bytes)) {
    return invalid("cannot create a chunk of " + std::to_string(bytes) + " bytes on " + options_.name +
                   ": not a multiple of the granularity; round up to " + format_bytes(options_.granularity));
  }
  FOREBAY_RETURN_IF_ERROR(charge(bytes, "create a chunk of "));
  if (free_chunks_.empty()) {
    free_chunks_.push_back(static_cast<std::uint32_t>(chunks_.size()));
    chunks_.emplace_back();
  }
  const std::uint32_t index = free_chunks_.back();
  free_chunks_.pop_back();
  ChunkState& chunk = chunks_[index];
  chunk = {.bytes = bytes, .generation = chunk.generation + 1, .mapping_count = 0, .held = true};
  ++chunk_handle_count_;
  return Chunk{std::uint64_t{chunk.generation} << 32 | (index + 1)};
}

// The chunk with this handle, or null.
ModelMemory::ChunkState* ModelMemory::find_chunk(Chunk chunk, std::uint32_t* index) {
  const auto number = static_cast<std::uint32_t>(chunk.handle);
  if (number == 0 || number > chunks_.size()) return nullptr;
  ChunkState& state = chunks_[number - 1];
  if (!state.held || state.generation != chunk.handle >> 32) return nullptr;
  *index = number - 1;
  return &state;
}

Status ModelMemory::chunk_destroy(Chunk chunk) {
  const std::lock_guard lock(mutex_);
  std::uint32_t index = 0;
  ChunkState* const state = find_chunk(chunk, &index);
  if (state == nullptr) {
    return invalid("cannot destroy a chunk on " + options_.name +
                   ": there is no such chunk; give one that chunk_create returned, once");
  }
  state->held = false;
  --chunk_handle_count_;
  drop_chunk_if_unused(index);
  return {};
}

void ModelMemory::drop_chunk_if_unused(std::uint32_t index) {
  const ChunkState& chunk = chunks_[index];
  if (chunk.held || chunk.mapping_count > 0) return;
  charged_bytes_ -= chunk.bytes;
  free_chunks_.push_back(index);
}

// --- memory ---

Result<DevicePtr> ModelMemory::alloc(std::size_t bytes) {
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
  FOREBAY_RETURN_IF_ERROR(charge(rounded, "allocate "));
  Result<DevicePtr> base =
      take_addresses(rounded, options_.granularity, true,
                     "cannot allocate " + format_bytes(rounded) + " on " + options_.name);
  if (!base.ok()) charged_bytes_ -= rounded;
  return base;
}

Status ModelMemory::free(DevicePtr address) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(numeric(address));
  if (found == reservations_.end() || !found->second.internal) {
    return invalid("cannot free " + hex(numeric(address)) + " on " + options_.name +
                   ": no block starts there; give an address that alloc returned, once");
  }
  charged_bytes_ -= found->second.bytes;
  reservations_.erase(found);
  return {};
}

Status ModelMemory::pin(void* address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto refusal = [&](const std::string& found_and_try) {
    return invalid("cannot pin " + range_text(address, bytes) + " on " + options_.name + ": " +
                   found_and_try);
  };
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const Address begin = numeric(address);
  if (begin == 0 || bytes == 0 || begin % page_bytes != 0 || bytes % page_bytes != 0 ||
      bytes > SIZE_MAX - begin) {
    return refusal("not whole pages of " + format_bytes(page_bytes) + "; align the range to pages");
  }
  const auto after = pinned_.lower_bound(begin);
  const bool overlaps_after = after != pinned_.end() && after->first < begin + bytes;
  const bool overlaps_before =
      after != pinned_.begin() && std::prev(after)->first + std::prev(after)->second > begin;
  if (overlaps_after || overlaps_before) {
    return refusal("part of it is pinned already; pin a range once");
  }
  pinned_.emplace_hint(after, begin, bytes);
  return {};
}

Status ModelMemory::unpin(void* address) {
  const std::lock_guard lock(mutex_);
  if (pinned_.erase(numeric(address)) == 0) {
    return invalid("cannot unpin " + hex(numeric(address)) + " on " + options_.name +
                   ": no pinned range starts there; give an address that was pinned, once");
  }
  return {};
}

Status ModelMemory::check_usable(const void* address, std::size_t bytes, const char* what) const {
  const Address begin = numeric(address);
  const auto refusal = [&](const char* found_and_try) {
    return invalid(std::string("cannot ") + what + " " + range_text(address, bytes) + " on " + options_.name +
                   ": " + found_and_try);
  };
  if (begin == 0) return refusal("the address is null; give a valid one");
  if (bytes > SIZE_MAX - begin) return refusal("the range wraps around; give its size in bytes");
  const Address end = begin + bytes;
  if (end <= kFirstAddress || begin >= kFirstAddress + kAddressBytes) return {};
  const std::lock_guard lock(mutex_);
  const auto reservation = find_reservation(begin, bytes);
  if (reservation == reservations_.end()) {
    return refusal("the range is not within one reservation; keep to one reservation");
  }
  if (reservation->second.internal) return {};
  for (Address next = begin & ~(options_.granularity - 1); next < end; next += options_.granularity) {
    const Granule* granule = find_granule(next);
    if (granule == nullptr || granule->chunk == 0) {
      return refusal("part of the range is not mapped; map a chunk first");
    }
    if (!granule->accessible) return refusal("part of the range has no access; call set_access first");
  }
  return {};
}

std::size_t ModelMemory::charged_bytes() const {
  const std::lock_guard lock(mutex_);
  return charged_bytes_;
}

std::size_t ModelMemory::peak_charged_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_charged_bytes_;
}

std::size_t ModelMemory::live_handle_count() const {
  const std::lock_guard lock(mutex_);
  // A reservation is one handle, and so is a block of alloc.
  return chunk_handle_count_ + pinned_.size() + reservations_.size() + mapping_count_;
}

}  // namespace forebay
