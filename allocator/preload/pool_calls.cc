// The driver keeps the default pool's handle and settings. Its figures are the sum of the arena's and those
// of the driver's own pool.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "allocator/preload/accounts.h"
#include "allocator/preload/routes.h"

namespace forebay {
namespace {

enum : unsigned { kReservedCurrent = 5, kReservedHigh = 6, kUsedCurrent = 7, kUsedHigh = 8 };

struct PoolUse {
  std::atomic<std::uint64_t> used{0};
  std::atomic<std::uint64_t> used_high{0};
  std::atomic<bool> has_other{false};
};
constinit PoolUse pool_uses[kPreloadDeviceLimit];

// The memory that the arena holds for stream-ordered blocks: all that is not in plain blocks.
struct Reserved {
  std::uint64_t current;
  std::uint64_t high;
};
Reserved reserved_of(const ProcessArenas::Use& use) {
  const ArenaStatistics statistics = use.arena().statistics();
  const std::uint64_t used = pool_uses[use.device()].used.load(std::memory_order_relaxed);
  const std::uint64_t plain = statistics.requested_bytes > used ? statistics.requested_bytes - used : 0;
  const auto without_plain = [&](std::uint64_t bytes) { return bytes > plain ? bytes - plain : 0; };
  return {without_plain(statistics.reserved_bytes), without_plain(statistics.peak_reserved_bytes)};
}

// The arena that serves in place of the pool, if it is a device's default pool.
ProcessArenas::Use arena_of_pool(DriverPool pool) {
  for (int device = 0; device < kPreloadDeviceLimit; ++device) {
    ProcessArenas::Use use = ProcessArenas::of_process().find(device);
    if (use && is_default_pool(pool, device)) return use;
  }
  return {};
}

DriverResult pool_get_attribute(DriverPool pool, unsigned attribute, void* value) {
  const DriverResult result = preload_state().real.cuMemPoolGetAttribute(pool, attribute, value);
  if (result != kDriverSuccess || attribute < kReservedCurrent || attribute > kUsedHigh) return result;
  const ProcessArenas::Use use = arena_of_pool(pool);
  if (!use) return result;
  const PoolUse& pool_use = pool_uses[use.device()];
  std::uint64_t ours = 0;
  switch (attribute) {
    case kReservedCurrent:
      ours = reserved_of(use).current;
      break;
    case kReservedHigh:
      ours = reserved_of(use).high;
      break;
    case kUsedCurrent:
      ours = pool_use.used.load(std::memory_order_relaxed);
      break;
    case kUsedHigh:
      ours = pool_use.used_high.load(std::memory_order_relaxed);
      break;
  }
  *static_cast<std::uint64_t*>(value) += ours;
  return result;
}

DriverResult pool_set_attribute(DriverPool pool, unsigned attribute, void* value) {
  const DriverResult result = preload_state().real.cuMemPoolSetAttribute(pool, attribute, value);
  if (result != kDriverSuccess || (attribute != kReservedHigh && attribute != kUsedHigh)) return result;
  if (const ProcessArenas::Use use = arena_of_pool(pool)) {
    PoolUse& pool_use = pool_uses[use.device()];
    if (attribute == kUsedHigh) {
      pool_use.used_high.store(pool_use.used.load(std::memory_order_relaxed), std::memory_order_relaxed);
    } else {
      use.arena().reset_peaks();
    }
  }
  return result;
}

DriverResult pool_trim_to(DriverPool pool, std::size_t keep_bytes) {
  const DriverResult result = preload_state().real.cuMemPoolTrimTo(pool, keep_bytes);
  if (result != kDriverSuccess) return result;
  const ProcessArenas::Use use = arena_of_pool(pool);
  if (use && reserved_of(use).current > keep_bytes) (void)trim_arena(use, false);
  return result;
}

DriverResult device_set_pool(DriverDevice device, DriverPool pool) {
  const DriverResult result = preload_state().real.cuDeviceSetMemPool(device, pool);
  if (result == kDriverSuccess && device >= 0 && device < kPreloadDeviceLimit) {
    pool_uses[device].has_other.store(!is_default_pool(pool, device), std::memory_order_relaxed);
  }
  return result;
}

// The location may be a node of the host, so the devices are asked when their pool matters.
DriverResult location_set_pool(void* location, unsigned type, DriverPool pool) {
  const DriverResult result = preload_state().real.cuMemSetMemPool(location, type, pool);
  if (result == kDriverSuccess) {
    for (PoolUse& pool_use : pool_uses) pool_use.has_other.store(true, std::memory_order_relaxed);
  }
  return result;
}

}  // namespace

void count_pool_use(int device, std::size_t bytes) {
  PoolUse& pool_use = pool_uses[device];
  const std::uint64_t used = pool_use.used.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (static_cast<std::int64_t>(bytes) < 0) return;
  std::uint64_t high = pool_use.used_high.load(std::memory_order_relaxed);
  while (used > high && !pool_use.used_high.compare_exchange_weak(high, used, std::memory_order_relaxed)) {
  }
}

void forget_pool_use(int device) {
  pool_uses[device].used.store(0, std::memory_order_relaxed);
  pool_uses[device].used_high.store(0, std::memory_order_relaxed);
}

bool has_other_pool(int device) {
  if (!pool_uses[device].has_other.load(std::memory_order_relaxed)) return false;
  // The end of a pool makes the default one current again.
  const auto current_of = preload_state().used.cuDeviceGetMemPool;
  DriverPool current = nullptr;
  return current_of == nullptr || current_of(&current, device) != kDriverSuccess ||
         !is_default_pool(current, device);
}

bool is_default_pool(DriverPool pool, int device) {
  const PreloadState& state = preload_state();
  DriverPool standard = nullptr;
  return state.used.cuDeviceGetDefaultMemPool != nullptr &&
         state.used.cuDeviceGetDefaultMemPool(&standard, device) == kDriverSuccess && standard == pool;
}

void replace_pool_calls(HookedCalls* calls) {
  replace(&calls->cuMemPoolGetAttribute, pool_get_attribute);
  replace(&calls->cuMemPoolSetAttribute, pool_set_attribute);
  replace(&calls->cuMemPoolTrimTo, pool_trim_to);
  replace(&calls->cuDeviceSetMemPool, device_set_pool);
  replace(&calls->cuMemSetMemPool, location_set_pool);
}

}  // namespace forebay
