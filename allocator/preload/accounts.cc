#include "allocator/preload/accounts.h"

#include "allocator/preload/escapes.h"
#include "allocator/preload/pool_calls.h"
#include "allocator/preload/preload_state.h"

namespace forebay {

void count_served(PreloadServer server, std::size_t bytes) {
  PreloadCount& count = preload_state().record->served[static_cast<std::size_t>(server)];
  count.bytes.fetch_add(bytes, std::memory_order_relaxed);
  const std::uint64_t before = count.allocations.fetch_add(1, std::memory_order_relaxed);
  look_for_escapes_now_and_then(before + 1);
}

void count_arena_allocation(int device, std::size_t bytes, bool is_ordered) {
  count_served(PreloadServer::kArena, bytes);
  PreloadRecord& record = *preload_state().record;
  const std::uint64_t live = record.live_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::uint64_t peak = record.peak_live_bytes.load(std::memory_order_relaxed);
  while (live > peak &&
         !record.peak_live_bytes.compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
  }
  if (is_ordered) count_pool_use(device, bytes);
}

void count_arena_free(const BlockFacts& facts) {
  preload_state().record->live_bytes.fetch_sub(facts.bytes, std::memory_order_relaxed);
  if (facts.is_ordered) count_pool_use(facts.device, std::size_t{0} - facts.bytes);
}

void count_refused() {
  preload_state().record->refused.fetch_add(1, std::memory_order_relaxed);
}

void count_unknown_free() {
  preload_state().record->unknown_frees.fetch_add(1, std::memory_order_relaxed);
  look_for_escapes();
}

}  // namespace forebay
