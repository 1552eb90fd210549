#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "forebay/access_guard.h"
#include "forebay/check.h"
#include "forebay/host_backend.h"
#include "forebay/host_room.h"
#include "forebay/log.h"
#include "forebay/units.h"
#include "runtime/device/backend_checks.h"
#include "runtime/device/fault_script.h"
#include "runtime/device/host/memory.h"
#include "runtime/device/host/script.h"
#include "runtime/device/host/stream.h"

namespace forebay {
namespace {

// Handles are numbers that the process never uses twice: a stale or foreign handle is refused, not followed.
std::uint64_t next_host_handle() noexcept {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}
// The kernels of a module, by handle.
using ModuleState = std::vector<std::pair<std::uint64_t, std::shared_ptr<const HostLoadedKernel>>>;

bool guard_in_environment() noexcept {
  const char* const value = std::getenv("FOREBAY_HOST_GUARD");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

class HostBackendImpl final : public ScriptedHostBackend, private AccessGuard {
 public:
  HostBackendImpl(HostBackendOptions options, HostScript script, std::unique_ptr<HostMemory> memory)
      : options_(std::move(options)),
        script_(std::move(script)),
        memory_(std::move(memory)),
        faults_(script_.faults) {
    if (options_.clock == nullptr) options_.clock = &own_clock_;
    if (guard_in_environment()) options_.guard = true;
    std::strncpy(capabilities_.name, options_.name.c_str(), sizeof(capabilities_.name) - 1);
    capabilities_.kind = BackendKind::kHost;
    capabilities_.granularity = options_.granularity;
    capabilities_.memory_bytes = memory_->book().budget_bytes();
    capabilities_.host_accessible = true;
  }

  ~HostBackendImpl() override {
    const std::size_t leaked = live_handle_count();
    for (auto& [id, stream] : streams_) stream->finish();
    if (leaked > 0) {
      log(LogLevel::kDebug, "%s: %zu handles were not given back before the backend ended",
          options_.name.c_str(), leaked);
    }
  }

  // --- HostBackend and ScriptedHostBackend ---

  void add_fault(HostFault fault) override {
    FOREBAY_CHECK(is_fault_valid(fault), "a fault needs nth of at least 1 and an error");
    faults_.add(std::move(fault));
  }
  std::uint64_t call_count(HostCall call) const override { return faults_.count(call); }
  HostClock& clock() override { return *options_.clock; }
  std::size_t charged_bytes() const override { return memory_->book().charged_bytes(); }
  std::size_t peak_charged_bytes() const override { return memory_->book().peak_charged_bytes(); }

  std::size_t live_handle_count() const override {
    const std::size_t memory_count = memory_->book().live_count();
    const std::lock_guard lock(options_.clock->mutex());
    return memory_count + streams_.size() + events_.size() + modules_.size();
  }

  // --- facts ---

  const Capabilities& capabilities() const noexcept override { return capabilities_; }

  // --- address space and memory ---

  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kReserve));
    return memory_->reserve(bytes, alignment);
  }
  Status release(DevicePtr base, std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter("release"));
    return memory_->release(base, bytes);
  }
  Result<Chunk> chunk_create(std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kChunkCreate));
    return memory_->chunk_create(bytes);
  }
  Status chunk_destroy(Chunk chunk) override {
    FOREBAY_RETURN_IF_ERROR(enter("chunk_destroy"));
    return memory_->chunk_destroy(chunk);
  }
  Status map(DevicePtr address, Chunk chunk) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kMap));
    return memory_->map(address, chunk);
  }
  Status unmap(DevicePtr address, std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kUnmap));
    return memory_->unmap(address, bytes);
  }
  Status set_access(DevicePtr address, std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kSetAccess));
    return memory_->set_access(address, bytes);
  }
  Result<DevicePtr> alloc(std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kAlloc));
    return memory_->alloc(bytes);
  }
  Status free(DevicePtr address) override {
    FOREBAY_RETURN_IF_ERROR(enter("free"));
    return memory_->free(address);
  }
  Status pin(void* address, std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kPin));
    return memory_->pin(address, bytes);
  }
  Status unpin(void* address) override {
    FOREBAY_RETURN_IF_ERROR(enter("unpin"));
    return memory_->unpin(address);
  }
  MemoryInfo memory_info() override {
    static_cast<void>(
        enter("memory_info"));  // Fails the stream if it is one's; the figures are right all the same.
    const std::size_t total = memory_->book().budget_bytes();
    return {.free_bytes = total - memory_->book().charged_bytes(), .total_bytes = total};
  }

  // --- copies ---

  Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kCopyAsync));
    if (bytes > 0) {
      FOREBAY_RETURN_IF_ERROR(memory_->book().check_usable(target, bytes, "copy to"));
      FOREBAY_RETURN_IF_ERROR(memory_->book().check_usable(source, bytes, "copy from"));
      if (overlap(target, source, bytes)) return invalid("copy", kOverlap);
    }
    return queue(stream, HostCopy{target, source, bytes}, "copy");
  }
  Status fill_async(DevicePtr target, std::uint8_t value, std::size_t bytes, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kFillAsync));
    if (bytes > 0) FOREBAY_RETURN_IF_ERROR(memory_->book().check_usable(target, bytes, "fill"));
    return queue(stream, HostFill{target, value, bytes}, "fill");
  }

  // --- order ---

  Result<Stream> stream_create() override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kStreamCreate));
    std::shared_ptr<HostStream> stream;
    try {
      const std::uint64_t id = next_host_handle();
      stream = std::make_shared<HostStream>(*options_.clock, options_, script_, callbacks_);
      const std::lock_guard lock(options_.clock->mutex());
      streams_.emplace(id, stream);
      return Stream{to_handle(id)};
    } catch (const std::bad_alloc&) {
      if (stream != nullptr) stream->finish();
      return Status(StatusCode::kOutOfMemory, internal::kNoHostMemory);
    } catch (const std::system_error& error) {
      return Status(StatusCode::kUnavailable, "cannot create a stream on " + options_.name +
                                                  ": there is no thread for it: " + error.what() +
                                                  "; raise ulimit -u or -v, or destroy other streams");
    }
  }

  Status stream_destroy(Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter("stream_destroy"));
    std::shared_ptr<HostStream> found;
    {
      const std::lock_guard lock(options_.clock->mutex());
      found = find_stream(stream);
      if (found == nullptr) return no_stream("destroy a stream");
      streams_.erase(to_id(stream.handle));
    }
    found->finish();
    return {};
  }

  Status stream_synchronize(Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter("stream_synchronize"));
    std::unique_lock lock(options_.clock->mutex());
    const std::shared_ptr<HostStream> found = find_stream(stream);
    if (found == nullptr) return no_stream("synchronize a stream");
    return found->synchronize(lock);
  }

  Result<Event> event_create() override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kEventCreate));
    const std::uint64_t id = next_host_handle();
    const std::lock_guard lock(options_.clock->mutex());
    events_.emplace(id, nullptr);
    return Event{to_handle(id)};
  }

  Status event_destroy(Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter("event_destroy"));
    const std::lock_guard lock(options_.clock->mutex());
    if (events_.erase(to_id(event.handle)) == 0) return no_event("destroy an event");
    return {};
  }

  Status event_record(Event event, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kEventRecord));
    auto mark = std::make_shared<HostMark>();
    std::unique_lock lock(options_.clock->mutex());
    if (!events_.contains(to_id(event.handle))) return no_event("record an event");
    const std::shared_ptr<HostStream> found = find_stream(stream);
    if (found == nullptr) return no_stream("record an event");
    FOREBAY_RETURN_IF_ERROR(found->queue(lock, HostRecord{mark}));
    // The event may have been destroyed while this waited for room.
    if (const auto state = events_.find(to_id(event.handle)); state != events_.end()) {
      state->second = std::move(mark);
    }
    return {};
  }

  Result<bool> event_query(Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter("event_query"));
    const std::lock_guard lock(options_.clock->mutex());
    const auto found = events_.find(to_id(event.handle));
    if (found == events_.end()) return no_event("query an event");
    const std::shared_ptr<HostMark>& mark = found->second;
    return mark == nullptr || mark->reached;
  }

  Status event_synchronize(Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter("event_synchronize"));
    std::unique_lock lock(options_.clock->mutex());
    const auto found = events_.find(to_id(event.handle));
    if (found == events_.end()) return no_event("synchronize an event");
    const std::shared_ptr<HostMark> mark = found->second;
    if (mark == nullptr) return {};
    options_.clock->wait(lock, [&mark] { return mark->reached; });
    return mark->failure;
  }

  Result<std::chrono::nanoseconds> elapsed(Event begin, Event end) override {
    FOREBAY_RETURN_IF_ERROR(enter("elapsed"));
    const std::lock_guard lock(options_.clock->mutex());
    const auto first = events_.find(to_id(begin.handle));
    const auto last = events_.find(to_id(end.handle));
    if (first == events_.end() || last == events_.end()) return no_event("read a time");
    if (first->second == nullptr || last->second == nullptr) return invalid("read a time", kNotRecorded);
    if (!first->second->reached || !last->second->reached)
      return Status(StatusCode::kUnavailable, "cannot read a time on " + options_.name + kNotReached);
    return last->second->time - first->second->time;
  }

  Status stream_wait(Stream stream, Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kStreamWait));
    std::unique_lock lock(options_.clock->mutex());
    const auto found = events_.find(to_id(event.handle));
    if (found == events_.end()) return no_event("wait for an event");
    const std::shared_ptr<HostStream> waiter = find_stream(stream);
    if (waiter == nullptr) return no_stream("wait for an event");
    if (found->second == nullptr) return {};
    return waiter->queue(lock, HostWait{found->second});
  }

  Status call_host(Stream stream, HostFunction function, void* argument) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kCallHost));
    if (function == nullptr) return invalid("call a host function", "it is null; give one");
    return queue(stream, HostFunctionCall{function, argument}, "call a host function");
  }

  // --- launch ---

  Result<Module> load_module(const ModuleImage& image) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kLoadModule));
    if (image.host_kernels == nullptr) {
      if (image.image == nullptr) return invalid("load a module", "the image is empty; give host_kernels");
      return Status(StatusCode::kUnsupported,
                    "cannot load a module on " + options_.name +
                        ": the image is for another kind of device; give host_kernels");
    }
    ModuleState module;
    for (const HostKernel* kernel = image.host_kernels; kernel->name != nullptr; ++kernel) {
      if (kernel->function == nullptr) {
        return invalid("load a module", std::string("kernel ") + kernel->name + " has no function; give one");
      }
      module.emplace_back(next_host_handle(), std::make_shared<const HostLoadedKernel>(
                                                  HostLoadedKernel{kernel->name, kernel->function}));
    }
    const std::uint64_t id = next_host_handle();
    const std::lock_guard lock(options_.clock->mutex());
    for (const auto& [kernel_id, kernel] : module) kernels_.emplace(kernel_id, kernel);
    modules_.emplace(id, std::move(module));
    return Module{to_handle(id)};
  }

  Status unload_module(Module module) override {
    FOREBAY_RETURN_IF_ERROR(enter("unload_module"));
    const std::lock_guard lock(options_.clock->mutex());
    const auto found = modules_.find(to_id(module.handle));
    if (found == modules_.end()) return invalid("unload a module", kNoModuleTwice);
    for (const auto& [kernel_id, kernel] : found->second) kernels_.erase(kernel_id);
    modules_.erase(found);
    return {};
  }

  Result<Kernel> get_kernel(Module module, const char* name) override {
    FOREBAY_RETURN_IF_ERROR(enter("get_kernel"));
    if (name == nullptr) return invalid("get a kernel", "its name is null; give one");
    const std::lock_guard lock(options_.clock->mutex());
    const auto found = modules_.find(to_id(module.handle));
    const std::string what = std::string("get kernel ") + name;
    if (found == modules_.end()) return invalid(what, kNoModule);
    for (const auto& [kernel_id, kernel] : found->second) {
      if (kernel->name == name) return Kernel{to_handle(kernel_id)};
    }
    return invalid(what, "the module has none of that name among its " +
                             std::to_string(found->second.size()) + "; check the spelling");
  }

  Status launch(Kernel kernel, Dimensions grid, Dimensions block, const void* const* arguments,
                const std::size_t* argument_bytes, std::size_t argument_count, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kLaunch));
    if (const std::string problem = launch_problem(grid, block, arguments, argument_bytes, argument_count);
        !problem.empty()) {
      return invalid("launch a kernel", problem);
    }
    // The values lie one after another, each aligned for any type.
    constexpr std::size_t kAlignment = alignof(std::max_align_t);
    std::size_t total_bytes = 0;
    for (std::size_t i = 0; i < argument_count; ++i) total_bytes += round_up(argument_bytes[i], kAlignment);
    HostLaunch launch{.kernel = nullptr, .grid = grid, .block = block, .arguments = {}, .values = nullptr};
    launch.values = std::make_unique<std::byte[]>(total_bytes);
    launch.arguments.reserve(argument_count);
    std::byte* next = launch.values.get();
    for (std::size_t i = 0; i < argument_count; ++i) {
      std::memcpy(next, arguments[i], argument_bytes[i]);
      launch.arguments.push_back(next);
      next += round_up(argument_bytes[i], kAlignment);
    }
    std::unique_lock lock(options_.clock->mutex());
    const auto found = kernels_.find(to_id(kernel.handle));
    if (found == kernels_.end()) return invalid("launch a kernel", kNoKernel);
    launch.kernel = found->second;
    const std::shared_ptr<HostStream> target = find_stream(stream);
    if (target == nullptr) return no_stream("launch a kernel");
    return target->queue(lock, std::move(launch));
  }

  // --- debugging ---

  AccessGuard* access_guard() noexcept override { return options_.guard ? this : nullptr; }

 private:
  Status guard(DevicePtr address, std::size_t bytes, const std::string& name) override {
    FOREBAY_RETURN_IF_ERROR(enter("guard"));
    return memory_->guard(address, bytes, name);
  }
  Status open(DevicePtr address, Access access, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter("open"));
    return queue(stream, HostAccess{address, access, +1}, "open a range");
  }
  Status close(DevicePtr address, Access access, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter("close"));
    return queue(stream, HostAccess{address, access, -1}, "close a range");
  }

  // Every call begins here: is it allowed on this thread, and does the script fail it?
  Status enter(const char* function) {
    HostStream* running = HostStream::running_here();
    if (running == nullptr) return {};
    running->note_forbidden_call(function);
    return {StatusCode::kInternal, std::string("cannot call ") + function + " on " + options_.name +
                                       " from a host function or kernel: its stream would wait for itself; "
                                       "call it from the thread that queues the work"};
  }
  Status enter(HostCall call) {
    FOREBAY_RETURN_IF_ERROR(enter(kHostCallNames[static_cast<std::size_t>(call)]));
    return faults_.next(call);
  }

  Status invalid(const std::string& what, const std::string& found_and_try) const {
    return {StatusCode::kInvalidArgument, "cannot " + what + " on " + options_.name + ": " + found_and_try};
  }
  Status no_stream(const char* what) const { return invalid(what, kNoStream); }
  Status no_event(const char* what) const { return invalid(what, kNoEvent); }

  // With the clock's mutex held. Shared, because the stream may be destroyed while the caller waits.
  std::shared_ptr<HostStream> find_stream(Stream stream) const {
    const auto found = streams_.find(to_id(stream.handle));
    return found == streams_.end() ? nullptr : found->second;
  }

  Status queue(Stream stream, HostOperation operation, const char* what) {
    std::unique_lock lock(options_.clock->mutex());
    const std::shared_ptr<HostStream> found = find_stream(stream);
    if (found == nullptr) return no_stream(what);
    return found->queue(lock, std::move(operation));
  }

  HostClock own_clock_;
  HostBackendOptions options_;  // Constant after construction.
  const HostScript script_;
  unsigned callbacks_ = 0;  // Guarded by the clock's mutex: the driver's threads in use.
  Capabilities capabilities_;
  const std::unique_ptr<HostMemory> memory_;
  FaultScript faults_;

  // Guarded by the clock's mutex.
  std::unordered_map<std::uint64_t, std::shared_ptr<HostStream>> streams_;
  std::unordered_map<std::uint64_t, std::shared_ptr<HostMark>> events_;  // The last record; null: none.
  std::unordered_map<std::uint64_t, std::shared_ptr<const HostLoadedKernel>> kernels_;
  std::unordered_map<std::uint64_t, ModuleState> modules_;
};

}  // namespace

Result<std::unique_ptr<HostBackend>> HostBackend::create(HostBackendOptions options) {
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<ScriptedHostBackend> backend,
                           ScriptedHostBackend::create(std::move(options)));
  return std::unique_ptr<HostBackend>(std::move(backend));
}

Result<std::unique_ptr<ScriptedHostBackend>> ScriptedHostBackend::create(HostBackendOptions options,
                                                                         HostScript script) {
  const auto refusal = [&](const char* found_and_try) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot make host backend " + options.name + ": " + std::string(found_and_try));
  };
  if (options.queue_limit == 0) return refusal("a queue_limit of 0 lets nothing run; give at least 1");
  if (!std::all_of(script.faults.begin(), script.faults.end(), is_fault_valid)) {
    return refusal("a fault has nth 0 or no error; count from 1 and give a status");
  }
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<HostMemory> memory,
                           HostMemory::create({.name = options.name,
                                               .memory_bytes = options.memory_bytes,
                                               .granularity = options.granularity,
                                               .poison = options.poison}));
  return std::unique_ptr<ScriptedHostBackend>(
      std::make_unique<HostBackendImpl>(std::move(options), std::move(script), std::move(memory)));
}

}  // namespace forebay
