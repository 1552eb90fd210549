// The entry point for the front end, called once cuInit has succeeded, so only in processes that use CUDA.
#include <cstdlib>
#include <cstring>

#include "allocator/preload/event_log.h"
#include "allocator/preload/state.h"
#include "forebay/cuda_backend.h"
#include "forebay/log.h"
#include "forebay/units.h"

namespace forebay {
namespace {

PreloadMode chosen_mode() {
  const char* chosen = std::getenv(kPreloadModeVariable);
  if (chosen == nullptr || chosen[0] == '\0' || std::strcmp(chosen, "arena") == 0) return PreloadMode::kArena;
  if (std::strcmp(chosen, "observe") == 0) return PreloadMode::kObserve;
  if (std::strcmp(chosen, "off") != 0) {
    log(LogLevel::kWarning, "%s is '%s'; use arena, observe or off; nothing is replaced",
        kPreloadModeVariable, chosen);
  }
  return PreloadMode::kOff;
}

// A chunk of the arena, the least that a device gives.
constexpr std::uint64_t kLimitLeast = 2 << 20;

// Only the arena enforces the limit, so the program is told of it only with the arena.
std::size_t chosen_limit(PreloadMode mode) {
  const char* limit = std::getenv(kPreloadMemoryVariable);
  std::uint64_t bytes = 0;
  if (mode != PreloadMode::kArena || limit == nullptr || limit[0] == '\0') return 0;
  if (!parse_bytes(limit, &bytes) || bytes < kLimitLeast) {
    log(LogLevel::kWarning,
        "%s is '%s'; use bytes, at least 2MiB, such as 24GiB; until then the arena serves nothing",
        kPreloadMemoryVariable, limit);
    return 0;
  }
  return bytes;
}

void check_room(PreloadMode mode) {
  const char* room = std::getenv(kPreloadRoomVariable);
  std::uint64_t bytes = 0;
  if (mode != PreloadMode::kArena || room == nullptr || room[0] == '\0' || parse_bytes(room, &bytes)) return;
  log(LogLevel::kWarning, "%s is '%s'; use bytes, such as 384MiB, or 0; until then the arena serves nothing",
      kPreloadRoomVariable, room);
}

// The name of a call that the driver lacks and the preload needs; null: none.
const char* missing_call(const PreloadStart& start) {
  const HookedCalls& real = *start.real;
  if (real.cuMemAlloc_v2 == nullptr) return "cuMemAlloc_v2";
  if (real.cuMemFree_v2 == nullptr) return "cuMemFree_v2";
  if (real.cuMemGetInfo_v2 == nullptr) return "cuMemGetInfo_v2";
  if (real.cuDevicePrimaryCtxRelease_v2 == nullptr) return "cuDevicePrimaryCtxRelease_v2";
#define FOREBAY_PRELOAD_ROW(symbol, parameters) \
  if (start.used->symbol == nullptr) return #symbol;
  FOREBAY_PRELOAD_NEEDED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW
  return nullptr;
}

}  // namespace

PreloadState& preload_state() {
  static auto* const state = new PreloadState;
  return *state;
}

}  // namespace forebay

extern "C" int forebay_preload_start(const PreloadStart* start) {
  using namespace forebay;
  constexpr int kNothingReplaced = 1;
  if (start->bytes != sizeof(PreloadStart) || start->hooked_count != kHookedCount) {
    log(LogLevel::kWarning,
        "libforebay-preload.so and libforebay-core.so are of different builds; install both from "
        "one; nothing is replaced");
    return kNothingReplaced;
  }
  const PreloadMode mode = chosen_mode();
  if (mode == PreloadMode::kOff) return kNothingReplaced;
  PreloadState& state = preload_state();
  state.real = *start->real;
  state.used = *start->used;
  state.mode = mode;
  state.memory_limit = chosen_limit(mode);
  check_room(mode);
  state.hooked_dlsym = start->hooked_dlsym;
  state.record = &preload_record_of_process(mode);
  if (const char* missing = missing_call(*start)) {
    set_preload_text(state.record->problem,
                     std::string("the driver has no ") + missing +
                         ", without which nothing can be replaced; install a newer driver");
    return kNothingReplaced;
  }
  // The driver is opened here and not at the first allocation: opening takes the loader's lock, which another
  // thread may hold while it waits for an arena to be made.
  if (const Result<int> count = CudaBackend::device_count(); !count.ok()) {
    set_preload_text(state.record->problem, count.status().message());
    return kNothingReplaced;
  }
  EventLog::start(*state.record);
  replace_memory_calls(start->ours);
  replace_pool_calls(start->ours);
  replace_context_calls(start->ours);
  replace_sharing_calls(start->ours);
  return 0;
}
