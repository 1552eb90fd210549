#include "allocator/preload/accounts.h"

#include "allocator/preload/state.h"

namespace forebay {
namespace {

// Counts an allocation that succeeded.
void count_served(PreloadServer server, std::size_t bytes) {
  PreloadCount& count = preload_state().record->served[static_cast<std::size_t>(server)];
  count.bytes.fetch_add(bytes, std::memory_order_relaxed);
  const std::uint64_t before = count.allocations.fetch_add(1, std::memory_order_relaxed);
  look_for_escapes_now_and_then(before + 1);
}

int current_device() {
  DriverDevice device = -1;
  const UsedCalls& used = preload_state().used;
  return used.cuCtxGetDevice != nullptr && used.cuCtxGetDevice(&device) == kDriverSuccess ? device : -1;
}

// Enters a block in the book and the events.
void enter(const EventRequest& request, const Arena* arena, DevicePtr address, BlockFacts facts) {
  EventLog* const events = EventLog::of_process();
  BlockBook& blocks = ProcessArenas::of_process().blocks();
  facts.server = request.server;
  if (events != nullptr) {
    // The driver reuses addresses without a free: those of a context that was destroyed. The old blocks leave
    // first, because both together would count in the peak.
    for (const auto& [old, lost] : blocks.take_within(address, facts.bytes)) events->lost(lost);
    events->allocated(address, request, arena, &facts);
  }
  blocks.add(address, facts);
}

// Tells the book the addresses that the arena has reserved around its first block.
void tell_range(int device, DevicePtr block) {
  const auto ask = preload_state().real.cuPointerGetAttribute;
  DriverAddress begin = 0;
  std::size_t bytes = 0;
  if (ask == nullptr || ask(&begin, kRangeStart, driver_address(block)) != kDriverSuccess ||
      ask(&bytes, kRangeSize, driver_address(block)) != kDriverSuccess) {
    return;
  }
  ProcessArenas::of_process().blocks().widen_range(device, device_pointer(begin), bytes);
}

}  // namespace

void enter_arena_block(const ProcessArenas::Use& use, DevicePtr address, BlockFacts facts,
                       DriverStream stream) {
  if (!ProcessArenas::of_process().blocks().is_arena_address(address)) tell_range(use.device(), address);
  enter({.bytes = facts.bytes, .device = use.device(), .stream = stream}, &use.arena(), address, facts);
  count_served(PreloadServer::kArena, facts.bytes);
  PreloadRecord& record = *preload_state().record;
  const std::uint64_t live =
      record.live_bytes.fetch_add(facts.bytes, std::memory_order_relaxed) + facts.bytes;
  std::uint64_t peak = record.peak_live_bytes.load(std::memory_order_relaxed);
  while (live > peak &&
         !record.peak_live_bytes.compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
  }
  if (facts.is_ordered) count_pool_use(use.device(), facts.bytes);
}

void enter_driver_block(PreloadServer server, DevicePtr address, std::size_t bytes, DriverStream stream) {
  const int device = EventLog::of_process() == nullptr ? -1 : current_device();
  BlockFacts facts{.bytes = bytes};
  DriverContext context = nullptr;
  // Memory in stream order ends with its pool.
  if (stream == nullptr && preload_state().used.cuCtxGetCurrent(&context) == kDriverSuccess)
    facts.context = context;
  enter({.bytes = bytes, .device = device, .stream = stream, .server = server}, nullptr, address, facts);
  count_served(server, bytes);
}

void leave_block(DevicePtr address, const BlockFacts& facts) {
  if (EventLog* const events = EventLog::of_process()) events->freed(address, facts);
  if (facts.device < 0) return;
  preload_state().record->live_bytes.fetch_sub(facts.bytes, std::memory_order_relaxed);
  if (facts.is_ordered) count_pool_use(facts.device, std::size_t{0} - facts.bytes);
}

void return_driver_block(DevicePtr address, const BlockFacts& facts) {
  // The handle of its stream is not known any more, so it is entered as a plain allocation.
  enter({.bytes = facts.bytes, .device = facts.event_device, .server = facts.server}, nullptr, address,
        facts);
}

void count_untracked(PreloadServer server, std::size_t bytes, int device) {
  if (EventLog* const events = EventLog::of_process()) {
    events->untracked({.bytes = bytes, .device = device, .server = server});
  }
  count_served(server, bytes);
}

void note_reserved(int device, const Arena* arena) {
  if (EventLog* const events = EventLog::of_process()) events->look_at(device, arena);
}

void count_refused(PreloadServer server, std::size_t bytes, int device, DriverStream stream) {
  if (EventLog* const events = EventLog::of_process()) {
    if (device < 0) device = current_device();
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    if (preload_state().real.cuMemGetInfo_v2(&free_bytes, &total_bytes) != kDriverSuccess) free_bytes = 0;
    events->refused({.bytes = bytes, .device = device, .stream = stream, .server = server}, free_bytes);
  }
  preload_state().record->refused.fetch_add(1, std::memory_order_relaxed);
}

void note_problem(const Status& status) {
  DriverContext context = nullptr;
  if (preload_state().used.cuCtxGetCurrent(&context) == kDriverDeinitialized) return;
  set_preload_text(preload_state().record->problem, status.message());
}

void count_unknown_free() {
  preload_state().record->unknown_frees.fetch_add(1, std::memory_order_relaxed);
  look_for_escapes();
}

}  // namespace forebay
