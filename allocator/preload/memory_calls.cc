// Calls that allocate, free, and ask how much memory there is.
//
// A free is routed by its address, and behaves like the call that allocated the block: a free of a plain
// block waits for the device, as programs rely on. The driver serves the requests that the arena cannot.
#include <algorithm>
#include <utility>

#include "allocator/preload/accounts.h"
#include "allocator/preload/routes.h"
#include "allocator/preload/shared_blocks.h"
#include "allocator/preload/state.h"

namespace forebay {
namespace {

// The driver's location type for devices.
constexpr unsigned kDeviceLocation = 1;

// Lets the driver allocate, and enters the block in the accounts. `stream`: numbered (routes.h); null: none.
template <typename Call>
DriverResult allocate_elsewhere(PreloadServer server, std::size_t bytes, DriverAddress* address,
                                DriverStream stream, const Call& call) {
  const DriverResult result = call_with_room(call);
  if (result == kDriverOutOfMemory) count_refused(server, bytes, -1, stream);
  if (result != kDriverSuccess) return result;
  enter_driver_block(server, device_pointer(*address), bytes, stream);
  return result;
}

// --- frees put off until the end of a capture ---

struct WaitingFree {
  DevicePtr address;
  BlockFacts facts;
  std::uint64_t generation;  // The arena it is of: a later one may have another block there.
  DriverContext user;        // It may use the block still: the one that was current, or that of a stream.
};

SharedList<WaitingFree>& waiting_frees() {
  return SharedList<WaitingFree>::of_process();
}

// Gives back a block whose last use is queued on the arena's `stream`; null: it is idle.
void give_back(const ProcessArenas::Use& use, DevicePtr address, const BlockFacts& facts, Stream stream) {
  if (facts.outside != KnownOutside::kNo) {
    ProcessArenas::of_process().blocks().park(address, facts, stream);
    return;
  }
  const Status status = use.arena().free(address, stream);
  if (status.ok()) return;
  if (status.code() == StatusCode::kInvalidArgument) return note_problem(status);
  // The arena waits for a stream that it has no place for, which a capture may refuse.
  waiting_frees().add({{address, facts, use.generation(), current_context()}});
}

DriverResult driver_result(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOutOfMemory:
      return kDriverOutOfMemory;
    case StatusCode::kInvalidArgument:
      return kDriverInvalidValue;
    default:
      return kDriverNotSupported;
  }
}

// The bytes of the frees that are put off, by the sizes that were asked for.
std::size_t waiting_bytes(const ProcessArenas::Use& use) {
  std::size_t bytes = 0;
  waiting_frees().visit([&](const WaitingFree& free) {
    if (free.facts.device == use.device() && free.generation == use.generation()) bytes += free.facts.bytes;
  });
  return bytes;
}

}  // namespace

void forget_user(DriverContext context) {
  waiting_frees().visit([=](WaitingFree& free) {
    if (free.user == context) free.user = nullptr;
  });
  forget_closing_user(context);
}

void forget_waiting_frees(int device) {
  (void)waiting_frees().take([=](const WaitingFree& free) { return free.facts.device == device; });
}

void finish_waiting_frees() {
  finish_waiting_closes();
  if (waiting_frees().size() == 0 || any_capture()) return;
  const std::lock_guard lock(giving_back());
  for (int device = 0; device < kPreloadDeviceLimit; ++device) {
    const ProcessArenas::Use use = ProcessArenas::of_process().find(device);
    if (!use) continue;
    auto frees = waiting_frees().take([=](const WaitingFree& free) { return free.facts.device == device; });
    for (DriverContext waited = nullptr; !frees.empty(); frees.pop_front()) {
      const WaitingFree& free = frees.front();
      const DriverContext user = free.user != nullptr ? free.user : static_cast<DriverContext>(use.context());
      if (user != waited && is_captured_error(wait_for_users(use.context(), user))) break;
      waited = user;
      if (free.generation == use.generation()) give_back(use, free.address, free.facts, Stream());
    }
    waiting_frees().add(std::move(frees));
  }
}

DriverResult free_after_users(const ProcessArenas::Use& use, DevicePtr block, const BlockFacts& facts) {
  auto* const other = static_cast<DriverContext>(facts.other_context);
  const DriverContext user = other != nullptr ? other : current_context();
  const DriverResult result = wait_for_users(use.context(), user);
  if (is_captured_error(result)) {
    waiting_frees().add({{block, facts, use.generation(), user}});
    return kDriverSuccess;
  }
  finish_waiting_frees();
  // The block is freed whatever became of the work.
  give_back(use, block, facts, Stream());
  return result;
}

// --- allocation ---

namespace {

// Asks the streams on which parked blocks were last used. `bytes`: blocks of that size; 0: all.
void find_idle_parked(const ProcessArenas::Use& use, std::size_t bytes) {
  BlockBook& blocks = ProcessArenas::of_process().blocks();
  Stream streams[BlockBook::kMostParkedStreams];
  std::uint64_t number = 0;
  const std::size_t count = blocks.parked_streams(use.device(), bytes, streams, &number);
  if (count == 0) return;
  const bool captures = any_capture();
  const ContextScope scope(use.context());
  if (scope.result() != kDriverSuccess) return;
  const RelaxedCapture relaxed;
  for (std::size_t i = 0; i < count; ++i) {
    auto* const stream = static_cast<DriverStream>(streams[i].handle);
    DriverResult answer = kDriverSuccess;
    // A question to a captured stream, or to the default stream beside one, would end the capture.
    if (captures && (is_default_stream(stream) || is_capturing(stream, false, &answer))) continue;
    if (preload_state().used.cuStreamQuery(stream) == kDriverSuccess)
      blocks.set_parked_idle(use.device(), streams[i], number);
  }
}

}  // namespace

void give_back_parked(const ProcessArenas::Use& use) {
  BlockBook& blocks = ProcessArenas::of_process().blocks();
  if (blocks.parked_shared_bytes(use.device()) == 0) return;
  // A capture forbids to wait.
  bool only_idle = any_capture();
  if (only_idle) find_idle_parked(use, 0);
  const BlockBook::ParkedBlocks parked = blocks.take_parked_shared(use.device(), only_idle);
  if (!only_idle) only_idle = is_captured_error(wait_for_device(use));
  for (const auto& [address, block] : parked) {
    if (only_idle && block.stream != Stream()) {
      blocks.park(address, block.facts, block.stream);
      continue;
    }
    forget_shared_block(address);
    if (const Status status = use.arena().free(address, Stream()); !status.ok()) note_problem(status);
  }
}

Result<DevicePtr> allocate_from(const ProcessArenas::Use& use, AllocationRequest* request,
                                KnownOutside* outside) {
  *outside = KnownOutside::kNo;
  BlockBook& blocks = ProcessArenas::of_process().blocks();
  for (const bool is_last : {false, true}) {
    DevicePtr const block = blocks.unpark(use.device(), request->bytes, request->stream, outside);
    if (block != nullptr) return block;
    if (!is_last) find_idle_parked(use, request->bytes);
  }
  Result<DevicePtr> made = use.arena().allocate(*request);
  if (made.status().code() != StatusCode::kOutOfMemory) return made;
  // Freed memory that queued work may still use counts as taken, so waits for that work and tries again.
  end_idle_streams();
  { const std::lock_guard others(giving_back()); }
  int polls = 0;
  made = allocate_again(use, *request, std::move(made), [&] {
    finish_waiting_frees();
    const DriverResult waited = wait_for_device(use);
    return waited == kDriverSuccess || (is_captured_error(waited) && wait_a_moment(&polls));
  });
  if (made.status().code() != StatusCode::kOutOfMemory) return made;
  {
    const std::lock_guard lock(giving_back());
    give_back_parked(use);
  }
  made = use.arena().allocate(*request);
  if (made.status().code() != StatusCode::kOutOfMemory) return made;
  // Better than none.
  find_idle_parked(use, 0);
  DevicePtr const larger = blocks.unpark_larger(use.device(), &request->bytes, request->stream, outside);
  return larger != nullptr ? Result<DevicePtr>(larger) : made;
}

namespace {

// Allocates from the arena; if that fails for another reason than lack of memory, from the driver. `stream`:
// the arena's stream; null: any stream may use the block at once. `named`: the program's stream, numbered;
// null: a plain allocation.
template <typename Call>
DriverResult allocate_here(const ProcessArenas::Use& use, DriverAddress* address, std::size_t bytes,
                           Stream stream, DriverStream named, const Call& call) {
  if (!BlockBook::has_room()) return kDriverOutOfMemory;
  KnownOutside outside = KnownOutside::kNo;
  AllocationRequest request{.bytes = bytes, .stream = stream};
  const Result<DevicePtr> made = allocate_from(use, &request, &outside);
  if (!made.ok()) {
    const Status& status = made.status();
    if (driver_result(status) == kDriverOutOfMemory) {
      note_reserved(use.device(), &use.arena());
      count_refused(PreloadServer::kArena, bytes, use.device(), named);
      return kDriverOutOfMemory;
    }
    note_problem(status);
    return allocate_elsewhere(PreloadServer::kUnavailable, bytes, address, named, call);
  }
  const DevicePtr block = made.value();
  enter_arena_block(
      use, block,
      {.bytes = request.bytes, .device = use.device(), .is_ordered = named != nullptr, .outside = outside},
      named);
  *address = driver_address(block);
  return kDriverSuccess;
}

DriverResult mem_alloc(DriverAddress* address, std::size_t bytes) {
  const auto by_driver = [=] { return preload_state().real.cuMemAlloc_v2(address, bytes); };
  if (address == nullptr || bytes == 0) return by_driver();
  trim_if_asked();
  const Route route = route_of_current_context();
  if (!route.use) return allocate_elsewhere(route.otherwise, bytes, address, nullptr, by_driver);
  return allocate_here(route.use, address, bytes, Stream(), nullptr, by_driver);
}

// The arena's stream for a numbered stream.
Stream arena_stream(const ProcessArenas::Use& use, DriverStream numbered_stream) {
  if (numbered_stream == DRIVER_PER_THREAD_STREAM) return ProcessArenas::thread_stream(use);
  return Stream{numbered_stream};
}

Route route_of(DriverStream stream) {
  return is_default_stream(stream) ? route_of_current_context() : route_of_stream(stream);
}

// `pool` null: the device's current one.
template <typename Call>
DriverResult allocate_ordered(DriverAddress* address, std::size_t bytes, DriverPool pool, DriverStream stream,
                              bool per_thread, const Call& by_driver) {
  if (address == nullptr || bytes == 0) return by_driver();
  DriverResult answer = kDriverSuccess;
  const bool captured = is_capturing(stream, per_thread, &answer);
  if (answer != kDriverSuccess) return by_driver();
  const DriverStream named = numbered(stream, per_thread);
  if (captured) return allocate_elsewhere(PreloadServer::kCaptured, bytes, address, named, by_driver);
  trim_if_asked();
  Route route = route_of(stream);
  if (route.use &&
      (pool == nullptr ? has_other_pool(route.use.device()) : !is_default_pool(pool, route.use.device()))) {
    route.use = {};
    route.otherwise = PreloadServer::kOtherPool;
  }
  if (!route.use) return allocate_elsewhere(route.otherwise, bytes, address, named, by_driver);
  return allocate_here(route.use, address, bytes, arena_stream(route.use, named), named, by_driver);
}

template <auto kCall, bool kPerThread>
DriverResult mem_alloc_async(DriverAddress* address, std::size_t bytes, DriverStream stream) {
  return allocate_ordered(address, bytes, nullptr, stream, kPerThread,
                          [=] { return (preload_state().real.*kCall)(address, bytes, stream); });
}
template <auto kCall, bool kPerThread>
DriverResult mem_alloc_from_pool_async(DriverAddress* address, std::size_t bytes, DriverPool pool,
                                       DriverStream stream) {
  const auto by_driver = [=] { return (preload_state().real.*kCall)(address, bytes, pool, stream); };
  return pool == nullptr ? by_driver()
                         : allocate_ordered(address, bytes, pool, stream, kPerThread, by_driver);
}

DriverResult mem_alloc_pitch(DriverAddress* address, std::size_t* pitch, std::size_t width_bytes,
                             std::size_t height, unsigned element_bytes) {
  return allocate_elsewhere(PreloadServer::kPitched, width_bytes * height, address, nullptr, [=] {
    return preload_state().real.cuMemAllocPitch_v2(address, pitch, width_bytes, height, element_bytes);
  });
}

DriverResult mem_alloc_managed(DriverAddress* address, std::size_t bytes, unsigned flags) {
  return allocate_elsewhere(PreloadServer::kManaged, bytes, address, nullptr,
                            [=] { return preload_state().real.cuMemAllocManaged(address, bytes, flags); });
}

DriverResult mem_create(DriverMemory* memory, std::size_t bytes, const DriverMemoryProperties* properties,
                        unsigned long long flags) {
  const auto by_driver = [=] { return preload_state().real.cuMemCreate(memory, bytes, properties, flags); };
  // Memory of the host or of a NUMA node is not the arena's matter.
  if (properties == nullptr || properties->location.type != kDeviceLocation) return by_driver();
  const DriverResult result = call_with_room(by_driver);
  const int device = properties->location.id;
  if (result == kDriverOutOfMemory) count_refused(PreloadServer::kVirtualMemory, bytes, device, nullptr);
  if (result == kDriverSuccess) count_untracked(PreloadServer::kVirtualMemory, bytes, device);
  return result;
}

// --- free ---

// A free of an address that no arena owns: the driver serves it.
template <typename Call>
DriverResult free_elsewhere(DriverAddress address, bool is_known, const BlockFacts& facts, const Call& call) {
  // Counted first: once it is free, another thread may get the same address.
  if (is_known) leave_block(device_pointer(address), facts);
  const DriverResult result = call();
  if (address == 0) return result;
  if (is_known && result != kDriverSuccess) {
    return_driver_block(device_pointer(address), facts);
  } else if (!is_known && result == kDriverSuccess) {
    count_unknown_free();
  }
  return result;
}

DriverResult mem_free(DriverAddress address) {
  const auto by_driver = [=] { return preload_state().real.cuMemFree_v2(address); };
  if (address == 0) return by_driver();
  trim_if_asked();
  BlockBook& blocks = ProcessArenas::of_process().blocks();
  const DevicePtr block = device_pointer(address);
  BlockFacts facts;
  // Out of the book first: once it is free, another thread may get the same address.
  const bool is_known = blocks.take(block, &facts);
  if (!is_known && blocks.is_arena_address(block)) return kDriverInvalidValue;
  if (!is_known || facts.device < 0) return free_elsewhere(address, is_known, facts, by_driver);
  leave_block(block, facts);
  const ProcessArenas::Use use = ProcessArenas::of_process().find(facts.device);
  if (!use) return kDriverSuccess;  // The arena is gone with the device's context.
  if (!facts.is_ordered) return free_after_users(use, block, facts);
  give_back(use, block, facts, Stream());
  return kDriverSuccess;
}

// Whether the stream belongs to the context of the device's arena.
bool is_stream_of(DriverStream stream, int device) {
  const Route route = route_of(stream);
  return route.use && route.use.device() == device;
}

template <auto kCall, bool kPerThread>
DriverResult mem_free_async(DriverAddress address, DriverStream stream) {
  const auto by_driver = [=] { return (preload_state().real.*kCall)(address, stream); };
  BlockBook& blocks = ProcessArenas::of_process().blocks();
  const DevicePtr block = device_pointer(address);
  DevicePtr begin = nullptr;
  BlockFacts facts;
  const bool is_served = blocks.find(block, &begin, &facts) && begin == block && facts.device >= 0;
  if (!is_served) {
    if (blocks.is_arena_address(block)) return kDriverInvalidValue;
    const bool is_known = blocks.take(block, &facts);
    return free_elsewhere(address, is_known, facts, by_driver);
  }
  // On a captured stream the driver refuses it: a graph frees only memory that the graph allocated.
  DriverResult answer = kDriverSuccess;
  if (is_capturing(stream, kPerThread, &answer)) return by_driver();
  if (answer != kDriverSuccess) return answer;
  trim_if_asked();
  const bool is_same_context = is_stream_of(stream, facts.device);
  // If two threads free the block, one of them gets it.
  if (!blocks.take(block, &facts)) return kDriverInvalidValue;
  leave_block(block, facts);
  const ProcessArenas::Use use = ProcessArenas::of_process().find(facts.device);
  if (!use) return kDriverSuccess;
  const DriverStream last = numbered(stream, kPerThread);
  if (!is_same_context) {
    // The arena's events cannot be recorded on that stream, so wait here.
    const RelaxedCapture relaxed;
    if (is_captured_error(preload_state().used.cuStreamSynchronize(last))) {
      DriverContext user = current_context();
      if (!is_default_stream(last)) (void)preload_state().used.cuStreamGetCtx(last, &user);
      waiting_frees().add({{block, facts, use.generation(), user}});
      return kDriverSuccess;
    }
    give_back(use, block, facts, Stream());
    return kDriverSuccess;
  }
  const Result<Stream> behind = stream_behind(use, last);
  if (behind.ok()) {
    give_back(use, block, facts, behind.value());
  } else {
    note_problem(behind.status());
  }
  return kDriverSuccess;
}

// --- how much memory there is ---

std::size_t limited(std::size_t total_bytes) {
  const std::size_t limit = preload_state().memory_limit;
  return limit == 0 ? total_bytes : std::min(limit, total_bytes);
}

// Unused memory of the arena counts as free: the program's next requests are served from it.
DriverResult mem_get_info(std::size_t* free_bytes, std::size_t* total_bytes) {
  trim_if_asked();
  std::size_t free = 0;
  std::size_t total = 0;
  const DriverResult result = preload_state().real.cuMemGetInfo_v2(&free, &total);
  if (result != kDriverSuccess) return result;
  const std::size_t device_bytes = total;
  total = limited(total);
  if (const ProcessArenas::Use use = arena_of_current_context()) {
    const ArenaStatistics statistics = use.arena().statistics();
    // The arena leaves room for the driver.
    const std::size_t room = device_bytes - std::min(device_bytes, use.backend().capabilities().memory_bytes);
    free -= std::min(free, room);
    const std::size_t parked = ProcessArenas::of_process().blocks().parked_shared_bytes(use.device());
    const std::size_t freed = parked + waiting_bytes(use);
    const std::size_t live = statistics.live_bytes - std::min<std::size_t>(statistics.live_bytes, freed);
    free = std::min(free + (statistics.reserved_bytes - live), device_bytes);
    if (total < device_bytes) free = std::min(free, total > live ? total - live : std::size_t{0});
  }
  if (free_bytes != nullptr) *free_bytes = std::min(free, total);
  if (total_bytes != nullptr) *total_bytes = total;
  look_for_escapes();
  return result;
}

DriverResult device_total_mem(std::size_t* bytes, DriverDevice device) {
  const DriverResult result = preload_state().real.cuDeviceTotalMem_v2(bytes, device);
  if (result == kDriverSuccess) *bytes = limited(*bytes);
  return result;
}

}  // namespace

void replace_memory_calls(HookedCalls* calls) {
  replace(&calls->cuMemAlloc_v2, mem_alloc);
  replace(&calls->cuMemAllocPitch_v2, mem_alloc_pitch);
  replace(&calls->cuMemAllocManaged, mem_alloc_managed);
  replace(&calls->cuMemFree_v2, mem_free);
  replace(&calls->cuMemAllocAsync, mem_alloc_async<&HookedCalls::cuMemAllocAsync, false>);
  replace(&calls->cuMemAllocAsync_ptsz, mem_alloc_async<&HookedCalls::cuMemAllocAsync_ptsz, true>);
  replace(&calls->cuMemAllocFromPoolAsync,
          mem_alloc_from_pool_async<&HookedCalls::cuMemAllocFromPoolAsync, false>);
  replace(&calls->cuMemAllocFromPoolAsync_ptsz,
          mem_alloc_from_pool_async<&HookedCalls::cuMemAllocFromPoolAsync_ptsz, true>);
  replace(&calls->cuMemFreeAsync, mem_free_async<&HookedCalls::cuMemFreeAsync, false>);
  replace(&calls->cuMemFreeAsync_ptsz, mem_free_async<&HookedCalls::cuMemFreeAsync_ptsz, true>);
  replace(&calls->cuMemGetInfo_v2, mem_get_info);
  replace(&calls->cuDeviceTotalMem_v2, device_total_mem);
  replace(&calls->cuMemCreate, mem_create);
}

}  // namespace forebay
