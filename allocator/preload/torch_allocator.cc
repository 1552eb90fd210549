// The functions that PyTorch calls, with and without the preload. The driver's functions that the backend
// does not offer are looked up here, since without the preload there is no table of them.
#include "forebay/torch_allocator.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>

#include "allocator/preload/accounts.h"
#include "allocator/preload/routes.h"
#include "forebay/cuda_devices.h"
#include "forebay/log.h"

namespace forebay {
namespace {

// The backend has opened the driver by now.
template <typename Function>
Function* driver_function(const char* name) {
  const char* chosen = std::getenv("FOREBAY_LIBCUDA");
  void* const driver =
      ::dlopen(chosen != nullptr && chosen[0] != '\0' ? chosen : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return driver == nullptr ? nullptr : reinterpret_cast<Function*>(::dlsym(driver, name));
}

bool is_captured(DriverStream stream) {
  static auto* const ask = driver_function<Driver_cuStreamIsCapturing>("cuStreamIsCapturing");
  unsigned status = 0;
  return ask != nullptr && (ask(stream, &status) != kDriverSuccess || status != 0);
}

// A capture whose number the driver does not tell. No other one is the same.
constexpr std::uint64_t kUnknownCapture = UINT64_MAX;

// The number of the capture that the stream is in; 0: it is in none, as the legacy stream always is.
std::uint64_t capture_of(DriverStream stream) {
  if (numbered(stream, false) == DRIVER_LEGACY_STREAM) return 0;
  using CaptureInfo = DriverResult(DriverStream stream, unsigned* status, std::uint64_t* number);
  static auto* const ask = driver_function<CaptureInfo>("cuStreamGetCaptureInfo");
  unsigned status = 0;
  std::uint64_t number = 0;
  if (ask == nullptr || ask(stream, &status, &number) != kDriverSuccess)
    return is_captured(stream) ? kUnknownCapture : 0;
  return status != 0 ? number : 0;
}

// A block that a captured graph uses and the program has freed. The graph may run at any time, so only the
// capture itself uses it again.
struct GraphBlock {
  DevicePtr address;
  std::size_t bytes;
  int device;
  std::uint64_t generation;  // The arena's.
  DriverStream stream;       // On which it was freed.
  std::uint64_t capture;
};

SharedList<GraphBlock>& graph_blocks() {
  return SharedList<GraphBlock>::of_process();
}

// Null: there is none.
DevicePtr take_graph_block(const ProcessArenas::Use& use, DriverStream stream, std::size_t* bytes) {
  if (graph_blocks().size() == 0) return nullptr;
  const std::uint64_t capture = capture_of(stream);
  bool found = false;
  const auto fits = [&](const GraphBlock& block) {
    if (found || capture == 0 || capture == kUnknownCapture || block.capture != capture ||
        block.stream != stream || block.device != use.device() || block.generation != use.generation() ||
        block.bytes < *bytes || block.bytes / 2 > *bytes)
      return false;
    found = true;
    return true;
  };
  for (const GraphBlock& block : graph_blocks().take(fits)) {
    *bytes = block.bytes;
    return block.address;
  }
  return nullptr;
}

// The capture that allocated the block uses it again, unless other streams use it too.
void keep_for_graph(const ProcessArenas::Use& use, DevicePtr address, const BlockFacts& facts,
                    DriverStream stream) {
  static std::atomic_flag told;
  if (!told.test_and_set()) {
    log(LogLevel::kWarning,
        "memory of captured CUDA graphs stays taken until the process ends, because a graph may run at any "
        "time; a program that captures again and again allocates in forebay.memory_pool(), where PyTorch "
        "knows its graphs");
  }
  const std::uint64_t capture = capture_of(stream);
  if (capture == 0 || capture == kUnknownCapture || capture != facts.capture ||
      facts.outside != KnownOutside::kNo || !BlockBook::has_room())
    return;
  graph_blocks().add({{address, facts.bytes, use.device(), use.generation(), stream, capture}});
}

bool is_preloaded() {
  return preload_state().record != nullptr;
}

// --- blocks whose free waits for the device, without the preload ---

struct WaitingBlock {
  DevicePtr address;
  int device;
  std::uint64_t generation;     // The arena's.
  DriverContext other_context;  // BlockFacts::other_context.
};

SharedList<WaitingBlock>& waiting_blocks() {
  return SharedList<WaitingBlock>::of_process();
}

// Waits for all work queued on the device, and gives the arena the blocks that waited for it. Blocks with
// work in another context wait for that and for all devices with an arena, too.
bool wait_for_device_alone(const ProcessArenas::Use& use) {
  static auto* const retain = driver_function<Driver_cuDevicePrimaryCtxRetain>("cuDevicePrimaryCtxRetain");
  static auto* const release =
      driver_function<Driver_cuDevicePrimaryCtxRelease_v2>("cuDevicePrimaryCtxRelease_v2");
  static auto* const current = driver_function<Driver_cuCtxGetCurrent>("cuCtxGetCurrent");
  static auto* const set = driver_function<Driver_cuCtxSetCurrent>("cuCtxSetCurrent");
  static auto* const wait = driver_function<Driver_cuCtxSynchronize>("cuCtxSynchronize");
  DriverContext previous = nullptr;
  if (retain == nullptr || release == nullptr || current == nullptr || set == nullptr || wait == nullptr ||
      current(&previous) != kDriverSuccess)
    return false;
  const auto wait_for_primary = [&](int device) {
    DriverContext context = nullptr;
    if (retain(&context, device) != kDriverSuccess) return false;
    const bool waited = set(context) == kDriverSuccess && wait() == kDriverSuccess;
    (void)set(previous);
    (void)release(device);
    return waited;
  };
  const auto wait_for_others = [&](DriverContext other) {
    // A context that is gone has no work.
    bool waited = set(other) != kDriverSuccess || wait() == kDriverSuccess;
    (void)set(previous);
    for (int device = 0; waited && device < kPreloadDeviceLimit; ++device) {
      if (device != use.device() && ProcessArenas::of_process().find(device))
        waited = wait_for_primary(device);
    }
    return waited;
  };
  // Blocks that are freed from here on may have work that this wait does not cover.
  auto blocks =
      waiting_blocks().take([&](const WaitingBlock& block) { return block.device == use.device(); });
  const bool waited = wait_for_primary(use.device());
  decltype(blocks) left;
  DriverContext asked = nullptr;
  bool is_idle = true;
  for (auto i = blocks.begin(); i != blocks.end();) {
    const auto block = i++;
    if (waited && block->other_context != nullptr && block->other_context != asked) {
      asked = block->other_context;
      is_idle = wait_for_others(asked);
    }
    if (!waited || (block->other_context != nullptr && !is_idle)) left.splice(left.end(), blocks, block);
  }
  waiting_blocks().add(std::move(left));
  for (const WaitingBlock& block : blocks) {
    if (block.generation == use.generation()) (void)use.arena().free(block.address, Stream());
  }
  return waited;
}

void free_after_device(const ProcessArenas::Use& use, DevicePtr address, const BlockFacts& facts) {
  if (is_preloaded()) {
    (void)free_after_users(use, address, facts);  // The program hears of errors of its work elsewhere.
    return;
  }
  auto* const other = static_cast<DriverContext>(facts.other_context);
  waiting_blocks().add({{address, use.device(), use.generation(), other}});
  (void)wait_for_device_alone(use);  // If it cannot, as beside a capture, a later call does.
}

ProcessArenas::Use arena_of(int device, Status* why) {
  return ProcessArenas::of_process().use(device, is_preloaded() ? &primary_context : nullptr, why);
}

// The arena's stream for a CUDA stream. Null while it is captured: the graph may run on any stream, so only
// idle memory will do.
Stream stream_of(const ProcessArenas::Use& use, DriverStream stream) {
  if (stream == DRIVER_PER_THREAD_STREAM) return ProcessArenas::thread_stream(use);
  return Stream{numbered(stream, false)};
}

// The stream's context, if it is not that of the arena, whose events cannot be recorded there. Null: it is,
// or nobody knows.
DriverContext other_context_of(const ProcessArenas::Use& use, DriverStream stream) {
  static auto* const current = driver_function<Driver_cuCtxGetCurrent>("cuCtxGetCurrent");
  static auto* const set = driver_function<Driver_cuCtxSetCurrent>("cuCtxSetCurrent");
  static auto* const device_of = driver_function<Driver_cuCtxGetDevice>("cuCtxGetDevice");
  static auto* const context_of = driver_function<Driver_cuStreamGetCtx>("cuStreamGetCtx");
  DriverContext now = nullptr, context = nullptr;
  if (current == nullptr || set == nullptr || device_of == nullptr || current(&now) != kDriverSuccess)
    return nullptr;
  if (is_default_stream(stream)) {
    context = now;
  } else if (context_of == nullptr || context_of(stream, &context) != kDriverSuccess) {
    return nullptr;
  }
  if (context == nullptr || context == use.context()) return nullptr;
  if (use.context() != nullptr) return context;
  DriverDevice device = use.device();
  if (context == now) {
    (void)device_of(&device);
  } else if (set(context) == kDriverSuccess) {
    (void)device_of(&device);
    (void)set(now);
  }
  return device != use.device() ? context : nullptr;
}

void complain(const Status& status) {
  log(LogLevel::kError, "%s", status.message().c_str());
}

}  // namespace
}  // namespace forebay

namespace forebay {
namespace {

// `for_any_stream`: for idle memory, which any stream may use at once, and a free that waits for the device,
// as of the driver's plain allocations.
void* allocate_for_torch(ssize_t bytes, int device, void* stream, bool for_any_stream) {
  if (bytes <= 0 || cuda_lost_in_fork() || !BlockBook::has_room()) return nullptr;
  if (is_preloaded()) trim_if_asked();
  Status why;
  const ProcessArenas::Use use = arena_of(device, &why);
  if (!use) {
    complain(why);
    return nullptr;
  }
  auto* const given = static_cast<DriverStream>(stream);
  const bool captured = is_captured(given);
  AllocationRequest request{.bytes = static_cast<std::size_t>(bytes)};
  if (!captured && !for_any_stream) request.stream = stream_of(use, given);
  KnownOutside outside = KnownOutside::kNo;
  DevicePtr const again =
      captured && !for_any_stream ? take_graph_block(use, numbered(given, false), &request.bytes) : nullptr;
  int polls = 0;
  const Result<DevicePtr> block =
      again != nullptr ? Result<DevicePtr>(again)
      : is_preloaded() ? allocate_from(use, &request, &outside)
                       : allocate_again(use, request, use.arena().allocate(request), [&] {
                           return captured ? wait_a_moment(&polls) : wait_for_device_alone(use);
                         });
  if (!block.ok()) {
    if (is_preloaded() && block.status().code() == StatusCode::kOutOfMemory) {
      note_reserved(use.device(), &use.arena());
      count_refused(PreloadServer::kArena, request.bytes, use.device(), numbered(given, false));
    }
    complain(block.status());
    return nullptr;
  }
  const BlockFacts facts{.bytes = request.bytes,
                         .device = use.device(),
                         .is_ordered = !for_any_stream,
                         .capture = captured && !for_any_stream ? capture_of(given) : 0,
                         .outside = outside};
  if (is_preloaded()) {
    enter_arena_block(use, block.value(), facts, numbered(given, false));
  } else {
    ProcessArenas::of_process().blocks().add(block.value(), facts);
  }
  return block.value();
}

}  // namespace
}  // namespace forebay

using namespace forebay;  // NOLINT: the functions below are its C interface.

extern "C" void* forebay_torch_alloc(ssize_t bytes, int device, void* stream) {
  return allocate_for_torch(bytes, device, stream, false);
}

extern "C" void* forebay_torch_pool_alloc(ssize_t bytes, int device, void* stream) {
  return allocate_for_torch(bytes, device, stream, true);
}

extern "C" void forebay_torch_free(void* block, ssize_t, int, void* stream) {
  // A child has its parent's tensors and neither their memory nor a use for the parent's books.
  if (block == nullptr || cuda_lost_in_fork()) return;
  BlockBook& blocks = ProcessArenas::of_process().blocks();
  const auto address = static_cast<DevicePtr>(block);
  DevicePtr begin = nullptr;
  BlockFacts facts;
  if (!blocks.find(address, &begin, &facts) || begin != address || facts.device < 0 ||
      !blocks.take(address, &facts)) {
    log(LogLevel::kError, "forebay_torch_free: %p was not allocated by forebay_torch_alloc; it is left alone",
        block);
    return;
  }
  if (is_preloaded()) leave_block(address, facts);
  const ProcessArenas::Use use = ProcessArenas::of_process().find(facts.device);
  if (!use) return;
  auto* const given = numbered(static_cast<DriverStream>(stream), false);
  if (facts.is_ordered && (facts.capture != 0 || capture_of(given) != 0))
    return keep_for_graph(use, address, facts, given);
  // PyTorch frees with any device current, so a default stream is that of the block's device.
  DriverContext const other = is_default_stream(given) ? nullptr : other_context_of(use, given);
  if (other != nullptr) {
    facts.other_streams = OtherStreams::kUnrecorded;
    facts.other_context = other;
  }
  const bool is_parked_by_one = facts.outside != KnownOutside::kNo;
  if (!facts.is_ordered || facts.other_streams == OtherStreams::kUnrecorded ||
      (facts.other_streams == OtherStreams::kRecorded && is_parked_by_one))
    return free_after_device(use, address, facts);
  const Result<Stream> behind = stream_behind(use, given);
  if (!behind.ok()) return free_after_device(use, address, facts);
  if (facts.outside != KnownOutside::kNo) {
    blocks.park(address, facts, behind.value());
    return;
  }
  const Status status = use.arena().free(address, behind.value());
  if (status.ok()) return;
  if (status.code() == StatusCode::kInvalidArgument) return complain(status);
  free_after_device(use, address, facts);  // A capture has refused the arena's wait for a stream.
}

extern "C" void forebay_torch_record_stream(void* block, void* stream) {
  if (cuda_lost_in_fork()) return;
  DevicePtr begin = nullptr;
  BlockFacts facts;
  if (!ProcessArenas::of_process().blocks().find(static_cast<DevicePtr>(block), &begin, &facts) ||
      facts.device < 0)
    return;
  const ProcessArenas::Use use = ProcessArenas::of_process().find(facts.device);
  if (!use) return;
  auto* const given = static_cast<DriverStream>(stream);
  if (facts.capture != 0) return ProcessArenas::of_process().blocks().pin(begin, 1, KnownOutside::kPinned);
  BlockBook& blocks = ProcessArenas::of_process().blocks();
  if (DriverContext const other = other_context_of(use, given); other != nullptr) {
    note_peer_access();  // Several of them are waited for, too.
    return blocks.note_streams(begin, OtherStreams::kUnrecorded, other);
  }
  const Result<Stream> behind =
      is_captured(given) ? stream_of(use, given) : stream_behind(use, numbered(given, false));
  if (!behind.ok()) return blocks.note_streams(begin, OtherStreams::kUnrecorded);
  if (behind.value().handle == nullptr) return;  // Its work has run.
  const Status status = use.arena().record_stream(begin, behind.value());
  blocks.note_streams(begin, status.ok() ? OtherStreams::kRecorded : OtherStreams::kUnrecorded);
}
