// Learnt placements: their form as text, how the arena notes them, and how it follows them.
#include "allocator/arena/learned.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "allocator/arena/chunked_arena.h"

namespace forebay {
namespace internal {

namespace {

// Neighbours that are always mapped together become one chunk, up to this. Larger: fewer driver calls.
// Smaller: a program that goes another way can use more of the memory elsewhere.
constexpr std::size_t kLearnedChunkMax = 32_MiB;

// The most mappings and chunks of a file. Smaller: a job of very many steps is refused. Larger: a damaged
// file takes more memory.
constexpr std::size_t kMappingsMax = std::size_t{1} << 22;

// Numbers of seven bits a byte, the lowest first.
void put(std::uint64_t value, std::string* text) {
  for (; value >= 0x80; value >>= 7) text->push_back(static_cast<char>(value | 0x80));
  text->push_back(static_cast<char>(value));
}

class NumberReader {
 public:
  explicit NumberReader(std::string_view text) : rest_(text) {}
  // 0 after the end, or after a number beyond 64 bits; then is_good is false.
  std::uint64_t next() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      if (shift == 63 && byte > 1) break;
      value |= std::uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    is_good_ = false;
    return 0;
  }
  // A number of items of at least one byte each.
  std::size_t count(std::size_t most) {
    const std::uint64_t value = next();
    if (value > std::min(most, rest_.size())) is_good_ = false;
    return is_good_ ? value : 0;
  }
  // A multiple of the granule of blocks, below 2^52.
  std::size_t bytes() {
    const std::uint64_t value = next();
    if (value >= (std::uint64_t{1} << 52) / kBlockGranule) is_good_ = false;
    return is_good_ ? value * kBlockGranule : 0;
  }
  bool is_good() const { return is_good_; }
  bool at_end() const { return is_good_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool is_good_ = true;
};

Status refused(const char* found_and_try) {
  return invalid_argument("cannot use learned placements: ", found_and_try);
}

// Whether all numbers can be those of an arena.
bool is_possible(const LearnedPlacements& learned) {
  const std::size_t granule = learned.granule_bytes;
  if (!std::has_single_bit(granule) || learned.reserve_bytes % granule != 0 ||
      learned.transient_offset % granule != 0 || learned.transient_offset > learned.reserve_bytes) {
    return false;
  }
  for (const std::size_t bytes : learned.chunk_bytes) {
    if (bytes == 0 || bytes % granule != 0 || bytes > learned.reserve_bytes) return false;
  }
  std::size_t end = 0;
  for (const LearnedMapping& mapping : learned.mappings) {
    if (mapping.chunk >= learned.chunk_bytes.size() || mapping.offset % granule != 0 || mapping.offset < end)
      return false;
    end = mapping.offset + learned.chunk_bytes[mapping.chunk];
    if (end > learned.reserve_bytes) return false;
  }
  return std::all_of(learned.placements.begin(), learned.placements.end(), [&](const LearnedPlacement& one) {
    return one.bytes != 0 && one.bytes <= learned.reserve_bytes &&
           one.offset <= learned.reserve_bytes - one.bytes && one.live_bytes <= learned.reserve_bytes &&
           one.kind < 2 * kRegionCount;
  });
}

}  // namespace

// --- the form ----------------------------------------------------

std::uint64_t learned_checksum(std::string_view text) {
  std::uint64_t sum = 0xCBF29CE484222325;
  for (const char c : text) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return sum;
}

std::size_t LearnedPlacements::held_bytes() const {
  return std::accumulate(chunk_bytes.begin(), chunk_bytes.end(), std::size_t{0});
}

std::string LearnedPlacements::encode() const {
  std::string body;
  const auto put_bytes = [&](std::size_t bytes) { put(bytes / kBlockGranule, &body); };
  for (const std::size_t bytes : {granule_bytes, reserve_bytes, transient_offset, peak_live_bytes})
    put_bytes(bytes);
  put(chunk_bytes.size(), &body);
  for (const std::size_t bytes : chunk_bytes) put_bytes(bytes);
  put(mappings.size(), &body);
  for (const LearnedMapping& mapping : mappings) {
    put_bytes(mapping.offset);
    put(mapping.chunk, &body);
  }
  put(placements.size(), &body);
  for (const LearnedPlacement& placement : placements) {
    put_bytes(placement.bytes);
    put_bytes(placement.live_bytes);
    put(placement.kind, &body);
    put_bytes(placement.offset);
  }
  std::string text;
  text += kLearnedHeadline;
  text += kLearnedVersion;
  const std::uint64_t sum = learned_checksum(body);
  for (int i = 0; i < 8; ++i) text.push_back(static_cast<char>(sum >> (8 * i)));
  return text + body;
}

Result<LearnedPlacements> LearnedPlacements::decode(std::string_view text) {
  if (!text.starts_with(kLearnedHeadline))
    return refused("the file is none of `forebay replay --learn`; name one that it wrote");
  text.remove_prefix(kLearnedHeadline.size());
  if (!text.starts_with(kLearnedVersion))
    return refused("another version of forebay wrote the file; learn them again (forebay replay --learn)");
  text.remove_prefix(kLearnedVersion.size());
  const Status damaged =
      refused("the file is damaged or not complete; learn them again (forebay replay --learn)");
  if (text.size() < 8) return damaged;
  std::uint64_t sum = 0;
  for (int i = 0; i < 8; ++i) sum |= std::uint64_t{static_cast<unsigned char>(text[i])} << (8 * i);
  text.remove_prefix(8);
  if (learned_checksum(text) != sum) return damaged;

  NumberReader reader(text);
  LearnedPlacements learned;
  learned.granule_bytes = reader.bytes();
  learned.reserve_bytes = reader.bytes();
  learned.transient_offset = reader.bytes();
  learned.peak_live_bytes = reader.bytes();
  learned.chunk_bytes.resize(reader.count(kMappingsMax));
  for (std::size_t& bytes : learned.chunk_bytes) bytes = reader.bytes();
  learned.mappings.resize(reader.count(kMappingsMax));
  for (LearnedMapping& mapping : learned.mappings) {
    mapping.offset = reader.bytes();
    mapping.chunk = static_cast<std::uint32_t>(std::min<std::uint64_t>(reader.next(), kNone));
  }
  learned.placements.resize(reader.count(StepMemory::kLearnedMax));
  for (LearnedPlacement& placement : learned.placements) {
    placement.bytes = reader.bytes();
    placement.live_bytes = reader.bytes();
    placement.kind = reader.next();
    placement.offset = reader.bytes();
  }
  if (!reader.at_end() || !is_possible(learned)) return damaged;
  return learned;
}

Status LearnedPlacements::move_to(std::size_t granule, std::size_t reserve, std::size_t transient) {
  const Status too_few = refused(
      "they were learnt with a larger range of addresses or other granules; learn them for this "
      "device (forebay replay --learn, with --memory of its size)");
  // Persistent blocks grow from the beginning, transient ones from their offset, and stitches downwards from
  // the end.
  const std::size_t middle = transient_offset + (reserve_bytes - transient_offset) / 2;
  const auto moved = [&](std::size_t offset) {
    if (offset < transient_offset) return offset;
    return offset < middle ? offset - transient_offset + transient : offset - reserve_bytes + reserve;
  };
  std::size_t last_end = 0;
  for (LearnedMapping& mapping : mappings) {
    const std::size_t bytes = chunk_bytes[mapping.chunk];
    const std::size_t last = moved(mapping.offset + bytes - 1);
    mapping.offset = moved(mapping.offset);
    // With fewer addresses, a range may begin before the first one and end behind it.
    const bool fits = bytes % granule == 0 && mapping.offset % granule == 0 && mapping.offset >= last_end &&
                      mapping.offset <= last && last < reserve && last + 1 - mapping.offset == bytes;
    if (!fits) return too_few;
    last_end = last + 1;
  }
  for (LearnedPlacement& placement : placements) {
    placement.offset = moved(placement.offset);
    if (placement.offset >= reserve || placement.bytes > reserve - placement.offset) return too_few;
  }
  granule_bytes = granule;
  reserve_bytes = reserve;
  transient_offset = transient;
  return Status();
}

// --- noting ------------------------------------------------------

Status ChunkedArena::learn_begin() {
  auto noted =
      std::unique_ptr<std::vector<LearnedPlacement>>(new (std::nothrow) std::vector<LearnedPlacement>());
  if (noted == nullptr) return no_books();
  noted->reserve(StepMemory::kLearnedMax);
  Lock lock(mutex_);
  if (total_.live_bytes != 0)
    return invalid_argument("cannot learn placements: ", format_bytes(total_.live_bytes),
                            " are live; begin where nothing is");
  noted_.swap(noted);
  return Status();
}

void ChunkedArena::note_placement(const Placement& placement, std::size_t offset) {
  if (noted_->size() == StepMemory::kLearnedMax) return;
  noted_->push_back({placement.bytes, total_.live_bytes, placement.kind, offset});
}

Result<std::string> ChunkedArena::learn_end() {
  std::lock_guard growth(growth_mutex_);
  LearnedPlacements learned;
  // The mappings that blocks lay in, in the order of addresses, with their chunks.
  std::vector<std::pair<std::size_t, std::uint32_t>> used;
  std::unordered_map<std::uint32_t, std::vector<std::size_t>> offsets;  // By chunk.
  {
    Lock lock(mutex_);
    if (noted_ == nullptr) return invalid_argument("cannot learn placements: call learn_begin first");
    learned.placements.swap(*noted_);
    noted_.reset();
    learned.peak_live_bytes = high_water();
    std::unordered_map<std::size_t, std::uint32_t> found;
    for (const LearnedPlacement& one : learned.placements) {
      for (std::size_t offset = one.offset; offset < one.offset + one.bytes;) {
        const GranuleTable::Entry* entry = granules_.find(offset);
        // Memory that went back meanwhile is not learnt.
        if (entry == nullptr || entry->range == nullptr || entry->mapping == kNone) break;
        const Mapping& mapping = mappings_[entry->mapping];
        found.emplace(mapping.offset, mapping.chunk);
        offset = mapping.offset + chunks_[mapping.chunk].bytes;
      }
    }
    used.assign(found.begin(), found.end());
    std::sort(used.begin(), used.end());
    for (const auto& [offset, chunk] : used) offsets[chunk].push_back(offset);
    learned.granule_bytes = chunk_bytes_;
    learned.reserve_bytes = reserve_bytes_;
    learned.transient_offset = transient_offset_;

    // Chunks that are neighbours wherever they are mapped become one.
    std::unordered_map<std::uint32_t, bool> taken;
    for (const auto& [first_offset, first_chunk] : used) {
      if (std::exchange(taken[first_chunk], true)) continue;
      const std::vector<std::size_t>& places = offsets[first_chunk];
      std::size_t bytes = chunks_[first_chunk].bytes;
      for (;;) {
        const auto next = found.find(places.front() + bytes);
        if (next == found.end() || taken[next->second]) break;
        const std::vector<std::size_t>& others = offsets[next->second];
        const std::size_t next_bytes = chunks_[next->second].bytes;
        const bool beside = others.size() == places.size() &&
                            std::equal(places.begin(), places.end(), others.begin(),
                                       [&](std::size_t a, std::size_t b) { return a + bytes == b; });
        const bool crosses =
            places.front() < transient_offset_ && places.front() + bytes >= transient_offset_;
        if (!beside || crosses || bytes + next_bytes > kLearnedChunkMax) break;
        taken[next->second] = true;
        bytes += next_bytes;
      }
      const auto index = static_cast<std::uint32_t>(learned.chunk_bytes.size());
      learned.chunk_bytes.push_back(bytes);
      for (const std::size_t offset : places) learned.mappings.push_back({offset, index});
    }
  }
  std::sort(learned.mappings.begin(), learned.mappings.end(),
            [](const LearnedMapping& a, const LearnedMapping& b) { return a.offset < b.offset; });
  return learned.encode();
}

// --- following ---------------------------------------------------

// Called once, before the first request.
void ChunkedArena::follow(LearnedPlacements learned) {
  for (const LearnedPlacement& one : learned.placements) {
    (void)steps_.find(one.bytes, one.live_bytes, one.kind);
    steps_.store(one.bytes, one.offset);
  }
  learned_.reset(new (std::nothrow) Learned);
  if (learned_ == nullptr) return;
  learned_->held_bytes = learned.held_bytes();
  learned_->peak_live_bytes = learned.peak_live_bytes;
  learned_->mappings = std::move(learned.mappings);
  for (const std::size_t bytes : learned.chunk_bytes) learned_->chunks.push_back({bytes, kNone});
}

// The index of the learned mapping that has the byte at `offset`, or the number of mappings.
std::size_t ChunkedArena::Learned::mapping_at(std::size_t offset) const {
  const auto after = std::upper_bound(
      mappings.begin(), mappings.end(), offset,
      [](std::size_t value, const LearnedMapping& mapping) { return value < mapping.offset; });
  if (after == mappings.begin()) return mappings.size();
  const auto found = after - 1;
  return offset < end_of(*found) ? static_cast<std::size_t>(found - mappings.begin()) : mappings.size();
}

// The chunk that stands for a learned one, or kNone. mutex_ held.
std::uint32_t ChunkedArena::learned_chunk(std::uint32_t learned) const {
  const Learned::LearnedChunk& chunk = learned_->chunks[learned];
  if (chunk.index == kNone || chunk.index >= chunks_.size()) return kNone;
  const PhysicalChunk& entry = chunks_[chunk.index];
  return entry.held && entry.learned == learned && entry.bytes == chunk.bytes ? chunk.index : kNone;
}

// Whether these addresses were learnt, and some of them are not mapped yet while the others show the learnt
// chunks. mutex_ held.
bool ChunkedArena::learned_and_missing(std::size_t begin, std::size_t end) const {
  bool missing = false;
  for (std::size_t i = learned_->mapping_at(begin); begin < end; ++i) {
    if (i == learned_->mappings.size() || learned_->mappings[i].offset > begin) return false;
    const LearnedMapping& mapping = learned_->mappings[i];
    begin = learned_->end_of(mapping);
    const GranuleTable::Entry* entry = granules_.find(mapping.offset);
    if (entry == nullptr || entry->range == nullptr) {
      missing = true;
    } else if (entry->mapping == kNone || mappings_[entry->mapping].offset != mapping.offset ||
               mappings_[entry->mapping].chunk != learned_chunk(mapping.chunk)) {
      return false;
    }
  }
  return missing;
}

// The block's range, in no bin, at the addresses of an earlier run, where this run has mapped nothing yet. No
// more memory is taken for that than the earlier run held. Null if these addresses cannot serve it. Both
// locks held; releases mutex_ meanwhile.
Range* ChunkedArena::place_as_learned(Lock& lock, const Placement& placement) {
  const std::size_t begin = placement.known;
  const std::size_t end = begin + placement.bytes;
  if (begin == StepMemory::kUnknown || (begin & (placement.alignment - 1)) != 0 || end > reserve_bytes_ ||
      placement.region >= kSharedRegionCount || capturing_count_ != 0) {
    return nullptr;
  }
  if (!learned_and_missing(begin, end) || !map_as_learned(lock, placement, begin, end)) return nullptr;
  if (!reserve_books(lock, placement.bytes)) return nullptr;
  std::size_t run_count = 0;
  if (!shows_free(begin, end, placement, &run_count)) return nullptr;
  // Each part that other addresses own may be cut from the middle of a range.
  if (pool_.available() < 2 * run_count + kSplitsMax) return nullptr;
  return own_here(begin, end, placement, run_count);
}

// Makes the learned mappings of [begin, end) that are missing. True if all are there. growth_mutex_ and
// mutex_ held; releases mutex_ meanwhile.
bool ChunkedArena::map_as_learned(Lock& lock, const Placement& placement, std::size_t begin,
                                  std::size_t end) {
  const std::vector<LearnedMapping>& mappings = learned_->mappings;
  const std::size_t first = learned_->mapping_at(begin);
  const std::uint32_t stamp = ++stamp_;
  std::size_t last = first;
  std::size_t new_bytes = 0;
  for (; last < mappings.size() && mappings[last].offset < end; ++last) {
    if (range_at(mappings[last].offset) != nullptr) continue;
    std::uint32_t& counted = learned_->chunks[mappings[last].chunk].counted;
    if (std::exchange(counted, stamp) == stamp) continue;
    if (learned_chunk(mappings[last].chunk) == kNone) new_bytes += learned_->bytes_of(mappings[last]);
  }
  if (total_.reserved_bytes + new_bytes > std::min(limit_bytes_, learned_->held_bytes)) return false;
  std::vector<std::uint32_t> chunks;
  for (std::size_t i = first; i < last;) {
    if (range_at(mappings[i].offset) != nullptr) {
      ++i;
      continue;
    }
    lock.unlock();
    chunks.clear();
    const bool room = make_vector_room(chunks, last - i);
    lock.lock();
    if (!room) return false;
    // A row of neighbours is mapped at once. Until then its new chunks are spares.
    const std::size_t row_begin = mappings[i].offset;
    std::size_t row_end = row_begin;
    for (; i < last && mappings[i].offset == row_end && range_at(row_end) == nullptr; ++i) {
      std::uint32_t chunk = learned_chunk(mappings[i].chunk);
      if (std::find(chunks.begin(), chunks.end(), chunk) != chunks.end()) break;
      if (chunk == kNone) {
        const std::size_t bytes = learned_->bytes_of(mappings[i]);
        if (!create_chunks(lock, bytes, bytes, &chunks).ok()) return false;
        chunk = chunks.back();
        keep_spare(chunk);
        chunks_[chunk].learned = mappings[i].chunk;
        learned_->chunks[mappings[i].chunk].index = chunk;
      } else {
        chunks.push_back(chunk);
      }
      row_end = learned_->end_of(mappings[i]);
    }
    if (!map_learned_row(lock, placement, row_begin, row_end, chunks)) return false;
  }
  return true;
}

// Maps the chunks side by side. A chunk that no other address shows is free there; of the others these
// addresses are shadows. Both locks held; releases mutex_ meanwhile.
bool ChunkedArena::map_learned_row(Lock& lock, const Placement& placement, std::size_t begin, std::size_t end,
                                   const std::vector<std::uint32_t>& chunks) {
  if (!reserve_ranges(lock, 2 * chunks.size() + kSplitsMax) || mappings_.available() < chunks.size())
    return false;
  Range* hole = holes_;
  while (hole != nullptr && hole->end() <= begin) hole = hole->bin_next;
  if (hole == nullptr || hole->offset > begin || hole->end() < end) return false;
  // No other thread sees these chunks, so their stamps stay.
  const std::uint32_t owned = ++stamp_;
  for (const std::uint32_t chunk : chunks) {
    if (chunks_[chunk].first_mapping != kNone) continue;
    remove_spare(chunk);
    chunks_[chunk].stamp = owned;
  }
  Range* target = claim_hole(hole, begin, end);
  if (!map_chunks(lock, target, chunks).ok()) return false;
  target->region = placement.region;
  target->waits = 0;
  // Other threads may have taken the descriptors. Without new ones the row stays out of use: its parts belong
  // to different blocks.
  if (!reserve_ranges(lock, chunks.size() + kSplitsMax)) {
    target->kind = RangeKind::kShadow;
    return false;
  }
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Range* part = target;
    if (i + 1 < chunks.size()) {
      const auto [lower, upper] = split(target, target->offset + chunks_[chunks[i]].bytes);
      part = lower;
      target = upper;
    }
    if (std::exchange(chunks_[chunks[i]].stamp, 0) == owned) {
      put_free(part);
    } else {
      part->kind = RangeKind::kShadow;
    }
  }
  return true;
}

// --- returning from a refining -----------------------------------

// Keeps the record, and the mappings that its addresses show. Nothing is kept if the host has no memory, or
// beside private regions, whose chunks are no others'. Both locks held, nothing live; releases mutex_
// meanwhile.
void ChunkedArena::keep_earlier(Lock& lock) {
  for (const PrivateRegion& region : private_regions_) {
    if (region.use != PrivateRegion::Use::kNone) return;
  }
  lock.unlock();
  std::unique_ptr<Earlier> earlier(new (std::nothrow) Earlier);
  if (earlier != nullptr && !earlier->steps.start()) earlier.reset();
  if (earlier != nullptr && (!make_vector_room(earlier->placed.chunks, chunk_count_) ||
                             !make_vector_room(earlier->placed.mappings, mapping_count_))) {
    earlier.reset();
  }
  lock.lock();
  if (earlier == nullptr || total_.live_bytes != 0) return;
  Learned& placed = earlier->placed;
  for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
    if (!evictable(i)) continue;
    const auto index = static_cast<std::uint32_t>(placed.chunks.size());
    for (std::uint32_t j = chunks_[i].first_mapping; j != kNone; j = mappings_[j].next) {
      placed.mappings.push_back({mappings_[j].offset, index});
    }
    placed.chunks.push_back({chunks_[i].bytes, kNone});
    placed.held_bytes += chunks_[i].bytes;
  }
  std::sort(placed.mappings.begin(), placed.mappings.end(),
            [](const LearnedMapping& a, const LearnedMapping& b) { return a.offset < b.offset; });
  placed.peak_live_bytes = high_water();
  earlier->steps.swap(steps_);
  earlier_ = std::move(earlier);
}

// Makes all mappings that were kept, so that the next pass makes no driver call. Both locks held, nothing
// live; releases mutex_ meanwhile.
void ChunkedArena::return_to_earlier(Lock& lock) {
  give_back_all_free(lock);
  std::unique_ptr<Earlier> earlier = std::move(earlier_);
  steps_.swap(earlier->steps);
  learned_.reset(new (std::nothrow) Learned(std::move(earlier->placed)));
  lock.unlock();
  earlier.reset();
  lock.lock();
  if (learned_ == nullptr || learned_->mappings.empty()) return;
  Placement all;
  if (reserve_books(lock, learned_->mappings.size() * chunk_bytes_))
    (void)map_as_learned(lock, all, learned_->mappings.front().offset, reserve_bytes_);
}

}  // namespace internal

Status check_learned_placements(std::string_view learned) {
  return internal::LearnedPlacements::decode(learned).status();
}

}  // namespace forebay
