// The steps of every entry point before its body, and the controls that act there: counts and faults.
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

thread_local bool null_is_per_thread = false;
thread_local ForeignScope* foreign = nullptr;
thread_local ContextPtr* queued_in = nullptr;

// These answer before cuInit, after exit and in a child process: they touch no state of the device.
bool needs_no_start(std::size_t entry) {
  switch (entry) {
    case cuInit_index:
    case cuDriverGetVersion_index:
    case cuGetErrorName_index:
    case cuGetErrorString_index:
    case cuGetProcAddress_index:
    case cuGetProcAddress_v2_index:
    case cuGetExportTable_index:
      return true;
    default:
      return false;
  }
}

// A scripted fault is met.
CuResult meet(CuResult result) {
  ContextPtr context;
  if (driver().options.sticky_faults && is_sticky(result)) current_context(&context);
  if (context != nullptr) fail_context(*context, result);
  return result;
}

}  // namespace

Driver& driver() {
  static Driver* const instance = new Driver;
  return *instance;
}

std::uint64_t next_handle_number() {
  static std::atomic<std::uint64_t> next{0xFA4E'0000'0000'1000};
  return next.fetch_add(0x40);
}

std::uint64_t thread_number() {
  static std::atomic<std::uint64_t> next{1};
  thread_local const std::uint64_t number = next.fetch_add(1);
  return number;
}

void report(const char* format, ...) {
  if (driver().options.quiet) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "fake CUDA: %s\n", text);
}

PerThreadScope::PerThreadScope(bool per_thread) : before_(null_is_per_thread) {
  null_is_per_thread = per_thread;
}
PerThreadScope::~PerThreadScope() {
  null_is_per_thread = before_;
}
bool null_stream_is_per_thread() {
  return null_is_per_thread;
}

ForeignScope::ForeignScope(const char* what) : what_(what) {
  foreign = this;
}
ForeignScope::~ForeignScope() {
  foreign = nullptr;
}

EntryScope::EntryScope() {
  if (driver().options.queue_limit != 0 && queued_in == nullptr) queued_in = new ContextPtr;
}
EntryScope::~EntryScope() {
  if (queued_in == nullptr) return;
  const std::unique_ptr<ContextPtr> context(std::exchange(queued_in, nullptr));
  if (*context == nullptr) return;
  Lock lock(driver().mutex);
  driver().scheduler.wait_for_room(lock, **context);
}
void EntryScope::note(const ContextPtr& context) {
  if (queued_in != nullptr) *queued_in = context;
}

void begin_executor_thread() {
  deny_device_memory_to_this_thread();
}

CuResult admit(std::size_t entry) {
  Driver& state = driver();
  const long process = state.process.load(std::memory_order_acquire);
  if (process != 0 && process != ::getpid()) {
    // A child: its mutex may be locked for ever, and the driver does not survive a fork.
    if (!needs_no_start(entry) || entry == cuInit_index) return CuResult::kNotInitialized;
    return CuResult::kSuccess;
  }
  if (state.exiting && !needs_no_start(entry)) return CuResult::kDeinitialized;
  const Lock lock(state.mutex);
  ++state.calls[entry];
  if (foreign != nullptr && !needs_no_start(entry)) {
    ++state.forbidden_calls;
    foreign->called_ = true;
    report("%s was called from %s, which must not call the driver", kEntryPoints[entry].symbol,
           foreign->what_);
    return CuResult::kNotPermitted;
  }
  if (!needs_no_start(entry) && ++state.call_count == state.failing_call) return meet(state.failing_result);
  for (std::size_t i = 0; i < state.faults.size(); ++i) {
    Driver::Fault& fault = state.faults[i];
    const bool same_name = std::strcmp(kEntryPoints[fault.entry].name, kEntryPoints[entry].name) == 0;
    if (fault.by_name ? !same_name : fault.entry != entry) continue;
    if (--fault.calls_left != 0) continue;
    const CuResult result = fault.result;
    state.faults.erase(state.faults.begin() + static_cast<std::ptrdiff_t>(i));
    return meet(result);
  }
  if (!state.initialised && !needs_no_start(entry)) return CuResult::kNotInitialized;
  return CuResult::kSuccess;
}

}  // namespace forebay::fake_cuda
