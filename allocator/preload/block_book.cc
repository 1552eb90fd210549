#include "allocator/preload/block_book.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "forebay/arena.h"

namespace forebay {
namespace {

std::uintptr_t number(DevicePtr address) noexcept {
  return reinterpret_cast<std::uintptr_t>(address);
}

}  // namespace

void BlockBook::add(DevicePtr address, const BlockFacts& facts) {
  Blocks made, gone;
  made.emplace(address, facts);
  Blocks::node_type node = made.extract(made.begin());
  const std::lock_guard lock(mutex_);
  node.mapped().id = ++last_id_;
  extract_within(address, facts.bytes, &gone);
  blocks_.insert(std::move(node));
  widen(facts.device, address, facts.bytes);
}

void BlockBook::widen_range(int device, DevicePtr begin, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  widen(device, begin, bytes);
}

// Requires: mutex_ is held.
void BlockBook::widen(int device, DevicePtr address, std::size_t bytes) {
  if (device < 0 || device >= kPreloadDeviceLimit) return;
  Range& range = ranges_[device];
  if (device >= range_count_.load(std::memory_order_relaxed)) {
    range_count_.store(device + 1, std::memory_order_relaxed);
  }
  const std::uintptr_t begin = number(address);
  const std::uintptr_t end = begin + std::max<std::size_t>(bytes, 1);
  if (begin < range.begin.load(std::memory_order_relaxed))
    range.begin.store(begin, std::memory_order_relaxed);
  if (end > range.end.load(std::memory_order_relaxed)) range.end.store(end, std::memory_order_relaxed);
}

// Requires: mutex_ is held. The caller destroys them without it.
void BlockBook::extract_within(DevicePtr begin, std::size_t bytes, Blocks* gone) {
  const std::uintptr_t end = number(begin) + std::max<std::size_t>(bytes, 1);
  auto i = blocks_.lower_bound(begin);
  if (i != blocks_.begin() && number(std::prev(i)->first) + std::prev(i)->second.bytes > number(begin)) --i;
  while (i != blocks_.end() && number(i->first) < end) {
    const auto inside = i++;
    gone->insert(blocks_.extract(inside));
  }
}

BlockBook::Blocks BlockBook::take_within(DevicePtr begin, std::size_t bytes) {
  Blocks gone;
  const std::lock_guard lock(mutex_);
  extract_within(begin, bytes, &gone);
  return gone;
}

bool BlockBook::take(DevicePtr address, BlockFacts* facts) {
  Blocks::node_type node;
  const std::lock_guard lock(mutex_);
  node = blocks_.extract(address);
  if (node.empty()) return false;
  *facts = node.mapped();
  return true;
}

bool BlockBook::find(DevicePtr address, DevicePtr* begin, BlockFacts* facts) const {
  const std::lock_guard lock(mutex_);
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return false;
  --after;
  if (number(address) - number(after->first) >= after->second.bytes) return false;
  *begin = after->first;
  *facts = after->second;
  return true;
}

void BlockBook::note_streams(DevicePtr address, OtherStreams streams, void* context) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return;
  found->second.other_streams = std::max(found->second.other_streams, streams);
  if (context != nullptr) found->second.other_context = context;
}

void BlockBook::pin(DevicePtr begin, std::size_t bytes, KnownOutside outside) {
  const std::lock_guard lock(mutex_);
  auto i = blocks_.upper_bound(begin);
  if (i != blocks_.begin() && number(std::prev(i)->first) + std::prev(i)->second.bytes > number(begin)) --i;
  for (; i != blocks_.end() && number(i->first) < number(begin) + bytes; ++i) {
    if (i->second.device >= 0) i->second.outside = std::max(i->second.outside, outside);
  }
}

bool BlockBook::is_arena_address(DevicePtr address) const noexcept {
  const int count = range_count_.load(std::memory_order_relaxed);
  return std::any_of(ranges_, ranges_ + count, [&](const Range& range) {
    return number(address) >= range.begin.load(std::memory_order_relaxed) &&
           number(address) < range.end.load(std::memory_order_relaxed);
  });
}

// Requires: mutex_ is held. The caller destroys them without it.
template <typename Condition>
BlockBook::ParkedBlocks BlockBook::take_parked(Condition condition) {
  ParkedBlocks taken;
  for (auto i = parked_.begin(); i != parked_.end();) {
    const auto entry = i++;
    if (condition(entry->second)) taken.insert(parked_.extract(entry));
  }
  parked_count_.store(parked_.size(), std::memory_order_relaxed);
  return taken;
}

BlockBook::Blocks BlockBook::forget_device(int device) {
  Blocks gone;
  ParkedBlocks gone_parked;
  const std::lock_guard lock(mutex_);
  gone_parked = take_parked([=](const Parked& parked) { return parked.facts.device == device; });
  for (auto i = blocks_.begin(); i != blocks_.end();) {
    const auto next = std::next(i);
    if (i->second.device == device) gone.insert(blocks_.extract(i));
    i = next;
  }
  ranges_[device].begin.store(UINTPTR_MAX, std::memory_order_relaxed);
  ranges_[device].end.store(0, std::memory_order_relaxed);
  return gone;
}

BlockBook::Blocks BlockBook::forget_context(void* context) {
  Blocks gone;
  if (context == nullptr) return gone;
  const std::lock_guard lock(mutex_);
  for (auto i = blocks_.begin(); i != blocks_.end();) {
    const auto entry = i++;
    if (entry->second.context == context) gone.insert(blocks_.extract(entry));
  }
  return gone;
}

void BlockBook::park(DevicePtr address, const BlockFacts& facts, Stream stream) {
  ParkedBlocks made;
  made.emplace(address, Parked{facts, stream});
  ParkedBlocks::node_type node = made.extract(made.begin());
  const std::lock_guard lock(mutex_);
  node.mapped().number = ++last_parked_;
  parked_.insert(std::move(node));
  parked_count_.store(parked_.size(), std::memory_order_relaxed);
}

DevicePtr BlockBook::unpark(int device, std::size_t bytes, Stream stream, KnownOutside* outside) {
  BlockFacts facts;
  DevicePtr const block = unpark(device, bytes, bytes, stream, &facts);
  if (block != nullptr) *outside = facts.outside;
  return block;
}

DevicePtr BlockBook::unpark_larger(int device, std::size_t* bytes, Stream stream, KnownOutside* outside) {
  BlockFacts facts;
  DevicePtr const block = unpark(device, *bytes, SIZE_MAX, stream, &facts);
  if (block == nullptr) return nullptr;
  *bytes = facts.bytes;
  *outside = facts.outside;
  return block;
}

// The smallest block of a size from `least` to `most`.
DevicePtr BlockBook::unpark(int device, std::size_t least, std::size_t most, Stream stream,
                            BlockFacts* facts) {
  if (parked_count_.load(std::memory_order_relaxed) == 0) return nullptr;
  ParkedBlocks::node_type node;
  const std::lock_guard lock(mutex_);
  auto found = parked_.end();
  for (auto i = parked_.begin(); i != parked_.end(); ++i) {
    const Parked& parked = i->second;
    const std::size_t bytes = parked.facts.bytes;
    if (parked.facts.device != device || bytes < least || bytes > most ||
        (parked.stream != Stream() && parked.stream != stream))
      continue;
    if (found == parked_.end() || bytes < found->second.facts.bytes) found = i;
    if (bytes == least) break;
  }
  if (found == parked_.end()) return nullptr;
  node = parked_.extract(found);
  *facts = node.mapped().facts;
  parked_count_.store(parked_.size(), std::memory_order_relaxed);
  return node.key();
}

std::size_t BlockBook::parked_streams(int device, std::size_t bytes, Stream (&streams)[kMostParkedStreams],
                                      std::uint64_t* number) const {
  if (parked_count_.load(std::memory_order_relaxed) == 0) return 0;
  const std::lock_guard lock(mutex_);
  *number = last_parked_;
  std::size_t count = 0;
  for (const auto& [address, parked] : parked_) {
    if (parked.facts.device != device || parked.stream == Stream() ||
        (bytes != 0 && parked.facts.bytes != bytes) ||
        std::find(streams, streams + count, parked.stream) != streams + count) {
      continue;
    }
    streams[count++] = parked.stream;
    if (count == kMostParkedStreams) break;
  }
  return count;
}

void BlockBook::set_parked_idle(int device, Stream stream, std::uint64_t number) {
  if (parked_count_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(mutex_);
  for (auto& [address, parked] : parked_) {
    if (parked.facts.device == device && parked.stream == stream && parked.number <= number)
      parked.stream = Stream();
  }
}

std::size_t BlockBook::parked_shared_bytes(int device) const {
  if (parked_count_.load(std::memory_order_relaxed) == 0) return 0;
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [address, parked] : parked_) {
    if (parked.facts.device == device && parked.facts.outside == KnownOutside::kShared)
      bytes += (parked.facts.bytes + kBlockGranule - 1) / kBlockGranule * kBlockGranule;
  }
  return bytes;
}

BlockBook::ParkedBlocks BlockBook::take_parked_shared(int device, bool only_idle) {
  const std::lock_guard lock(mutex_);
  return take_parked([=](const Parked& parked) {
    return parked.facts.device == device && parked.facts.outside == KnownOutside::kShared &&
           (!only_idle || parked.stream == Stream());
  });
}

}  // namespace forebay
