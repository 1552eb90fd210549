#include "runtime/command/replay/baseline_allocator.h"

#include <algorithm>
#include <utility>

#include "forebay/units.h"

namespace forebay {

BaselineAllocator::~BaselineAllocator() {
  for (const auto& [address, block] : blocks_) {
    // A failure here would be the device's own: each address is one that it gave.
    if (block->before == nullptr) static_cast<void>(backend_.free(address));
  }
}

Result<DevicePtr> BaselineAllocator::allocate(std::size_t bytes, std::uint32_t stream) {
  if (bytes > SIZE_MAX - kSegmentRounding) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot allocate " + format_bytes(bytes) + ": more than there are addresses; ask for less");
  }
  const std::size_t rounded = std::max<std::size_t>(round_up(bytes, kRounding), kRounding);
  const bool small = rounded <= kSmallLimit;
  Pool& pool = small ? small_ : large_;
  Block key;
  key.stream = stream;
  key.bytes = rounded;
  Block* block = nullptr;
  const auto fit = pool.lower_bound(&key);
  if (fit != pool.end() && (*fit)->stream == stream) {
    block = *fit;
    pool.erase(fit);
  } else {
    FOREBAY_ASSIGN_OR_RETURN(block, take_segment(rounded, stream, small));
  }
  const std::size_t rest = block->bytes - rounded;
  if (small ? rest >= kRounding : rest > kSmallLimit) split(block, rounded);
  block->live = true;
  return block->address;
}

Result<BaselineAllocator::Block*> BaselineAllocator::take_segment(std::size_t bytes, std::uint32_t stream,
                                                                  bool small) {
  const std::size_t segment_bytes = small                  ? kSmallSegment
                                    : bytes < kMiddleLimit ? kMiddleSegment
                                                           : round_up(bytes, kSegmentRounding);
  Result<DevicePtr> address = backend_.alloc(segment_bytes);
  if (!address.ok() && address.status().code() == StatusCode::kOutOfMemory) {
    const bool gave_large = give_back_segments(large_);
    const bool gave_small = give_back_segments(small_);
    if (gave_large || gave_small) address = backend_.alloc(segment_bytes);
  }
  if (!address.ok()) return address.status();
  auto block = std::make_unique<Block>();
  block->address = address.value();
  block->bytes = segment_bytes;
  block->stream = stream;
  block->small = small;
  return blocks_.emplace(address.value(), std::move(block)).first->second.get();
}

bool BaselineAllocator::give_back_segments(Pool& pool) {
  bool gave = false;
  for (auto next = pool.begin(); next != pool.end();) {
    Block* const block = *next;
    if (block->before != nullptr || block->after != nullptr || !backend_.free(block->address).ok()) {
      ++next;
      continue;
    }
    next = pool.erase(next);
    blocks_.erase(block->address);
    gave = true;
  }
  return gave;
}

void BaselineAllocator::split(Block* block, std::size_t bytes) {
  auto rest = std::make_unique<Block>(*block);
  rest->address += bytes;
  rest->bytes -= bytes;
  rest->live = false;
  rest->before = block;
  if (block->after != nullptr) block->after->before = rest.get();
  block->after = rest.get();
  block->bytes = bytes;
  pool_of(*rest).insert(rest.get());
  blocks_.emplace(rest->address, std::move(rest));
}

// `with` is the free neighbour behind `block`; its bytes become `block`'s.
void BaselineAllocator::join(Block* block, Block* with) {
  block->bytes += with->bytes;
  block->after = with->after;
  if (with->after != nullptr) with->after->before = block;
  blocks_.erase(with->address);
}

Status BaselineAllocator::free(DevicePtr address) {
  const auto found = blocks_.find(address);
  if (found == blocks_.end() || !found->second->live) {
    return {StatusCode::kInvalidArgument,
            "cannot free a block: no live block starts at that address; free each address that allocate "
            "returned once"};
  }
  Block* block = found->second.get();
  block->live = false;
  if (Block* const after = block->after; after != nullptr && !after->live) {
    pool_of(*after).erase(after);
    join(block, after);
  }
  if (Block* const before = block->before; before != nullptr && !before->live) {
    pool_of(*before).erase(before);
    join(before, block);
    block = before;
  }
  pool_of(*block).insert(block);
  return {};
}

}  // namespace forebay
