#include <algorithm>
#include <bit>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "forebay/check.h"
#include "forebay/model_backend.h"
#include "runtime/device/address_book.h"
#include "runtime/device/address_text.h"
#include "runtime/device/backend_checks.h"
#include "runtime/device/fault_script.h"
#include "runtime/device/model/script.h"
#include "runtime/device/model/timed_work.h"

namespace forebay {
namespace {

// Where addresses begin, and how many there are: the upper half of 49 bits, which no process of today's
// systems gets from its kernel without asking for it.
constexpr std::uintptr_t kFirstAddress = std::uintptr_t{1} << 48;
constexpr std::size_t kAddressBytes = std::size_t{1} << 48;
// Blocks of alloc are aligned to the granularity, and have to be aligned to this.
constexpr std::size_t kSmallestGranularity = 512;

struct ModelStream;

// One recording of an event. Shared by the event, the stream that will reach it and the streams that wait for
// it, since recording again moves the event but not those who already wait.
struct ModelMark {
  bool reached = false;
  std::chrono::nanoseconds time{0};  // When it was reached.
  Status failure;                    // The first failure of the stream up to here, once reached.
  ModelStream* stream = nullptr;     // That will reach it; looked at only until then.
};

// Queued work. Ranges are those of copies and fills; host memory is not read or written.
struct ModelAccess {
  const void* target;
  const void* source;  // Null: a fill.
  std::size_t bytes;
};
struct ModelFunctionCall {
  HostFunction function;
  void* argument;
};
struct ModelLaunch {
  ModelWork work;  // Its time; without timing none.
};
struct ModelSignalWait {
  std::shared_ptr<const ModelSignal> signal;
  const char* name;
};
struct ModelRecord {
  std::shared_ptr<ModelMark> mark;
};
struct ModelWait {
  std::shared_ptr<ModelMark> mark;
};
using ModelOperation =
    std::variant<ModelAccess, ModelFunctionCall, ModelLaunch, ModelRecord, ModelWait, ModelSignalWait>;

// Guarded by the backend's mutex.
struct ModelStream {
  std::deque<ModelOperation> operations;
  std::uint64_t queued_count = 0;
  std::uint64_t done_count = 0;
  bool running = false;  // A thread is in a host function of this stream, without the mutex.
  internal::Task task;   // kTimed: the oldest operation, whose time has not passed yet.
  bool closed = false;
  Status failure;
  const char* forbidden_call = nullptr;  // Set by the thread that runs.
};

thread_local ModelStream* running_stream = nullptr;

// A small generator with a state of one word: the order need not be fair, only different for each seed.
class SplitMix {
 public:
  explicit SplitMix(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t next() noexcept {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t limit) noexcept { return static_cast<std::size_t>(next() % limit); }

 private:
  std::uint64_t state_;
};

class ModelBackendImpl final : public ScriptedModelBackend {
 public:
  ModelBackendImpl(ModelBackendOptions options, ModelScript script)
      : options_(std::move(options)),
        order_(options_.timing != nullptr ? ModelOrder::kTimed : script.order),
        book_({.name = options_.name,
               .granularity = options_.granularity,
               .budget_bytes = options_.memory_bytes,
               .own_begin = kFirstAddress,
               .own_bytes = kAddressBytes}),
        faults_(std::move(script.faults)),
        random_(script.seed) {
    std::strncpy(capabilities_.name, options_.name.c_str(), sizeof(capabilities_.name) - 1);
    capabilities_.kind = BackendKind::kModel;
    capabilities_.granularity = options_.granularity;
    capabilities_.memory_bytes = options_.memory_bytes;
    capabilities_.host_accessible = false;
    timing_ = options_.timing;
    if (timing_ != nullptr) timed_ = std::make_unique<internal::TimedWork>(*options_.clock);
  }

  // Host functions still queued own their argument, so they run.
  ~ModelBackendImpl() override { complete_all(); }

  // --- ModelBackend and ScriptedModelBackend ---

  bool complete_next(Stream stream) override {
    std::unique_lock lock(mutex_);
    const std::shared_ptr<ModelStream> found = find_stream(stream);
    return found != nullptr && can_advance(*found) && run_head(lock, *found);
  }
  bool complete_any() override {
    std::unique_lock lock(mutex_);
    return advance_any(lock);
  }
  void complete_all() override {
    std::unique_lock lock(mutex_);
    if (timed_ != nullptr) {
      while (pass_time(lock)) {
      }
    }
    while (advance_any(lock)) {
    }
  }
  std::size_t queued_count() const override {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const auto& [id, stream] : streams_) count += stream->queued_count - stream->done_count;
    return count;
  }

  void add_fault(HostFault fault) override {
    FOREBAY_CHECK(is_fault_valid(fault), "a fault needs nth of at least 1 and an error");
    faults_.add(std::move(fault));
  }
  std::uint64_t call_count(HostCall call) const override { return faults_.count(call); }
  std::size_t charged_bytes() const override { return book_.charged_bytes(); }
  std::size_t peak_charged_bytes() const override { return book_.peak_charged_bytes(); }
  std::size_t live_handle_count() const override {
    const std::size_t memory_count = book_.live_count();
    const std::lock_guard lock(mutex_);
    return memory_count + streams_.size() + events_.size() + modules_.size();
  }

  // --- virtual time ---

  Status work(const ModelWork& work, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter("work"));
    FOREBAY_RETURN_IF_ERROR(check_timed("queue work of a duration"));
    return queue(stream, ModelLaunch{work}, "queue work of a duration");
  }
  Status wait_for(std::shared_ptr<const ModelSignal> signal, const char* name, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter("wait_for"));
    FOREBAY_RETURN_IF_ERROR(check_timed("wait for a signal"));
    return queue(stream, ModelSignalWait{std::move(signal), name}, "wait for a signal");
  }
  void spend(const ModelWork& work) override {
    if (running_stream != nullptr) return running_stream->task.add(work);
    std::unique_lock lock(mutex_);
    host_task_.add(work);
    spend_host(lock);
  }
  void spend_until(std::chrono::nanoseconds time, const char* name) override {
    if (running_stream != nullptr) return running_stream->task.add_until(time, name);
    std::unique_lock lock(mutex_);
    host_task_.add_until(time, name);
    spend_host(lock);
  }
  std::chrono::nanoseconds now() const override {
    if (timed_ == nullptr) return std::chrono::steady_clock::now().time_since_epoch();
    const std::chrono::nanoseconds now = timed_->now();
    return running_stream != nullptr ? running_stream->task.end_alone(now) : now;
  }
  void watch(Stream stream) override {
    const std::lock_guard lock(mutex_);
    watched_ = find_stream(stream);
    watched_times_.clear();
    if (timed_ != nullptr) timed_->clear_busy();
  }
  std::vector<ModelStreamTime> watched() const override {
    const std::lock_guard lock(mutex_);
    return watched_times_;
  }
  std::array<double, kModelResourcesMax> busy_seconds() const override {
    const std::lock_guard lock(mutex_);
    return timed_->busy_seconds();
  }

  // --- facts ---

  const Capabilities& capabilities() const noexcept override { return capabilities_; }

  // --- address space and memory ---

  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kReserve));
    FOREBAY_RETURN_IF_ERROR(book_.check_reserve(bytes, alignment));
    const std::lock_guard lock(memory_mutex_);
    const DevicePtr base = book_.find_free_addresses(bytes, std::max(alignment, options_.granularity));
    if (base == nullptr) return no_addresses("reserve " + format_bytes(bytes) + " of addresses");
    book_.add_reservation(base, bytes);
    return base;
  }
  Status release(DevicePtr base, std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter("release"));
    const std::lock_guard lock(memory_mutex_);
    FOREBAY_RETURN_IF_ERROR(book_.check_release(base, bytes));
    book_.remove_reservation(base);
    return {};
  }
  Result<Chunk> chunk_create(std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kChunkCreate));
    FOREBAY_RETURN_IF_ERROR(book_.charge_chunk(bytes));
    return book_.add_chunk(0, bytes);
  }
  Status chunk_destroy(Chunk chunk) override {
    FOREBAY_RETURN_IF_ERROR(enter("chunk_destroy"));
    const std::lock_guard lock(memory_mutex_);
    FOREBAY_RETURN_IF_ERROR(book_.check_destroy(chunk).status());
    book_.remove_chunk(chunk);
    return {};
  }
  Status map(DevicePtr address, Chunk chunk) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kMap));
    const std::lock_guard lock(memory_mutex_);
    FOREBAY_RETURN_IF_ERROR(book_.check_map(address, chunk).status());
    book_.add_mapping(address, chunk);
    return {};
  }
  Status unmap(DevicePtr address, std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kUnmap));
    const std::lock_guard lock(memory_mutex_);
    FOREBAY_RETURN_IF_ERROR(book_.check_mappings(address, bytes, "unmap"));
    book_.remove_mappings(address, bytes);
    return {};
  }
  Status set_access(DevicePtr address, std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kSetAccess));
    const std::lock_guard lock(memory_mutex_);
    FOREBAY_RETURN_IF_ERROR(book_.check_mappings(address, bytes, "set access to"));
    book_.set_accessible(address, bytes);
    return {};
  }
  Result<DevicePtr> alloc(std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kAlloc));
    FOREBAY_ASSIGN_OR_RETURN(const std::size_t rounded, book_.charge_block(bytes, options_.granularity));
    const std::lock_guard lock(memory_mutex_);
    const DevicePtr base = book_.find_free_addresses(rounded, options_.granularity);
    if (base == nullptr) {
      book_.refund(rounded);
      return no_addresses("allocate " + format_bytes(rounded));
    }
    book_.add_block(base, {.bytes = rounded});
    return base;
  }
  Status free(DevicePtr address) override {
    FOREBAY_RETURN_IF_ERROR(enter("free"));
    const Result<AddressBook::BlockFacts> block = book_.remove_block(address);
    if (block.ok()) book_.refund(block.value().bytes);
    return block.status();
  }
  Status pin(void* address, std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kPin));
    return book_.add_pinned(address, bytes);
  }
  Status unpin(void* address) override {
    FOREBAY_RETURN_IF_ERROR(enter("unpin"));
    return book_.remove_pinned(address).status();
  }
  MemoryInfo memory_info() override {
    // Fails the stream if the call is from its host function; the figures are right all the same.
    static_cast<void>(enter("memory_info"));
    const std::size_t total = book_.budget_bytes();
    return {.free_bytes = total - book_.charged_bytes(), .total_bytes = total};
  }

  // --- copies ---

  Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kCopyAsync));
    if (bytes > 0) {
      FOREBAY_RETURN_IF_ERROR(book_.check_usable(target, bytes, "copy to"));
      FOREBAY_RETURN_IF_ERROR(book_.check_usable(source, bytes, "copy from"));
      if (overlap(target, source, bytes)) return refuse("copy", kOverlap);
    }
    return queue(stream, ModelAccess{target, source, bytes}, "copy");
  }
  Status fill_async(DevicePtr target, std::uint8_t /*value*/, std::size_t bytes, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kFillAsync));
    if (bytes > 0) FOREBAY_RETURN_IF_ERROR(book_.check_usable(target, bytes, "fill"));
    return queue(stream, ModelAccess{target, nullptr, bytes}, "fill");
  }

  // --- order ---

  Result<Stream> stream_create() override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kStreamCreate));
    const std::lock_guard lock(mutex_);
    const std::uint64_t id = ++last_id_;
    streams_.emplace(id, std::make_shared<ModelStream>());
    return Stream{to_handle(id)};
  }

  Status stream_destroy(Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter("stream_destroy"));
    std::unique_lock lock(mutex_);
    const std::shared_ptr<ModelStream> found = find_stream(stream);
    if (found == nullptr || found->closed) return no_stream("destroy a stream");
    found->closed = true;
    run_until(lock, *found, found->queued_count);
    streams_.erase(to_id(stream.handle));
    settle(lock);
    return {};
  }

  Status stream_synchronize(Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter("stream_synchronize"));
    std::unique_lock lock(mutex_);
    const std::shared_ptr<ModelStream> found = find_stream(stream);
    if (found == nullptr) return no_stream("synchronize a stream");
    run_until(lock, *found, found->queued_count);
    settle(lock);
    return found->failure;
  }

  Result<Event> event_create() override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kEventCreate));
    const std::lock_guard lock(mutex_);
    const std::uint64_t id = ++last_id_;
    events_.emplace(id, nullptr);
    return Event{to_handle(id)};
  }

  Status event_destroy(Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter("event_destroy"));
    const std::lock_guard lock(mutex_);
    if (events_.erase(to_id(event.handle)) == 0) return no_event("destroy an event");
    return {};
  }

  Status event_record(Event event, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kEventRecord));
    std::unique_lock lock(mutex_);
    if (events_.count(to_id(event.handle)) == 0) return no_event("record an event");
    const std::shared_ptr<ModelStream> found = find_stream(stream);
    if (found == nullptr) return no_stream("record an event");
    auto mark = std::make_shared<ModelMark>();
    mark->stream = found.get();
    FOREBAY_RETURN_IF_ERROR(queue(lock, found, ModelRecord{mark}));
    // The event may have been destroyed while older work ran.
    if (const auto state = events_.find(to_id(event.handle)); state != events_.end()) {
      state->second = std::move(mark);
    }
    return {};
  }

  Result<bool> event_query(Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter("event_query"));
    std::unique_lock lock(mutex_);
    if (events_.count(to_id(event.handle)) == 0) return no_event("query an event");
    if (order_ == ModelOrder::kSeeded) advance_some(lock);
    settle(lock);
    const auto found = events_.find(to_id(event.handle));
    return found == events_.end() || found->second == nullptr || found->second->reached;
  }

  Status event_synchronize(Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter("event_synchronize"));
    std::unique_lock lock(mutex_);
    const auto found = events_.find(to_id(event.handle));
    if (found == events_.end()) return no_event("synchronize an event");
    const std::shared_ptr<ModelMark> mark = found->second;
    if (mark == nullptr) return {};
    while (!mark->reached) {
      host_waits_for_ = mark->stream;
      step_towards(lock, *mark->stream);
    }
    host_waits_for_ = nullptr;
    settle(lock);
    return mark->failure;
  }

  Result<std::chrono::nanoseconds> elapsed(Event begin, Event end) override {
    FOREBAY_RETURN_IF_ERROR(enter("elapsed"));
    const std::lock_guard lock(mutex_);
    const auto first = events_.find(to_id(begin.handle));
    const auto last = events_.find(to_id(end.handle));
    if (first == events_.end() || last == events_.end()) return no_event("read a time");
    if (first->second == nullptr || last->second == nullptr) return refuse("read a time", kNotRecorded);
    if (!first->second->reached || !last->second->reached)
      return Status(StatusCode::kUnavailable, "cannot read a time on " + options_.name + kNotReached);
    return last->second->time - first->second->time;
  }

  Status stream_wait(Stream stream, Event event) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kStreamWait));
    std::unique_lock lock(mutex_);
    const auto found = events_.find(to_id(event.handle));
    if (found == events_.end()) return no_event("wait for an event");
    const std::shared_ptr<ModelStream> waiter = find_stream(stream);
    if (waiter == nullptr) return no_stream("wait for an event");
    if (found->second == nullptr) return {};
    return queue(lock, waiter, ModelWait{found->second});
  }

  Status call_host(Stream stream, HostFunction function, void* argument) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kCallHost));
    if (function == nullptr) return refuse("call a host function", "it is null; give one");
    return queue(stream, ModelFunctionCall{function, argument}, "call a host function");
  }

  // --- launch: any image will do, as nothing of it runs ---

  Result<Module> load_module(const ModuleImage& image) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kLoadModule));
    if (image.host_kernels == nullptr && (image.image == nullptr || image.image_bytes == 0)) {
      return refuse("load a module", "the image is empty; give host_kernels or an image");
    }
    ModuleState state;
    state.has_names = image.host_kernels != nullptr;
    for (const HostKernel* kernel = image.host_kernels; kernel != nullptr && kernel->name != nullptr;
         ++kernel) {
      state.kernels.emplace(kernel->name, 0);
    }
    const std::lock_guard lock(mutex_);
    const std::uint64_t id = ++last_id_;
    for (auto& [name, kernel_id] : state.kernels) {
      kernel_id = ++last_id_;
      kernels_.emplace(kernel_id, id);
    }
    modules_.emplace(id, std::move(state));
    return Module{to_handle(id)};
  }

  Status unload_module(Module module) override {
    FOREBAY_RETURN_IF_ERROR(enter("unload_module"));
    const std::lock_guard lock(mutex_);
    const auto found = modules_.find(to_id(module.handle));
    if (found == modules_.end()) return refuse("unload a module", kNoModuleTwice);
    for (const auto& [name, kernel_id] : found->second.kernels) kernels_.erase(kernel_id);
    modules_.erase(found);
    return {};
  }

  Result<Kernel> get_kernel(Module module, const char* name) override {
    FOREBAY_RETURN_IF_ERROR(enter("get_kernel"));
    if (name == nullptr) return refuse("get a kernel", "its name is null; give one");
    const std::lock_guard lock(mutex_);
    const auto found = modules_.find(to_id(module.handle));
    const std::string what = std::string("get kernel ") + name;
    if (found == modules_.end()) return refuse(what, kNoModule);
    ModuleState& state = found->second;
    auto kernel = state.kernels.find(name);
    if (kernel == state.kernels.end()) {
      if (state.has_names) {
        return refuse(what, "the module has none of that name among its " +
                                std::to_string(state.kernels.size()) + "; check the spelling");
      }
      // The names in a binary image are not known here; every name is accepted.
      kernel = state.kernels.emplace(name, ++last_id_).first;
      kernels_.emplace(kernel->second, found->first);
    }
    return Kernel{to_handle(kernel->second)};
  }

  Status launch(Kernel kernel, Dimensions grid, Dimensions block, const void* const* arguments,
                const std::size_t* argument_bytes, std::size_t argument_count, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(enter(HostCall::kLaunch));
    if (const std::string problem = launch_problem(grid, block, arguments, argument_bytes, argument_count);
        !problem.empty()) {
      return refuse("launch a kernel", problem);
    }
    std::unique_lock lock(mutex_);
    if (kernels_.count(to_id(kernel.handle)) == 0) return refuse("launch a kernel", kNoKernel);
    const std::shared_ptr<ModelStream> target = find_stream(stream);
    if (target == nullptr) return no_stream("launch a kernel");
    return queue(lock, target, ModelLaunch{{}});
  }

 private:
  struct ModuleState {
    bool has_names = false;                                  // From host_kernels: these are all there are.
    std::unordered_map<std::string, std::uint64_t> kernels;  // Name to handle.
  };

  // Every call begins here: is it allowed on this thread, and does the script fail it?
  Status enter(const char* function) {
    if (running_stream == nullptr) return {};
    running_stream->forbidden_call = function;
    return {StatusCode::kInternal, std::string("cannot call ") + function + " on " + options_.name +
                                       " from a host function: its stream would wait for itself; call it "
                                       "from the thread that queues the work"};
  }
  Status enter(HostCall call) {
    FOREBAY_RETURN_IF_ERROR(enter(kHostCallNames[static_cast<std::size_t>(call)]));
    return faults_.next(call);
  }

  Status refuse(const std::string& what, const std::string& found_and_try) const {
    return {StatusCode::kInvalidArgument, "cannot " + what + " on " + options_.name + ": " + found_and_try};
  }
  Status no_addresses(const std::string& what) const {
    return {StatusCode::kOutOfMemory, "cannot " + what + " on " + options_.name +
                                          ": no such range is free among " + format_bytes(kAddressBytes) +
                                          "; reserve less"};
  }
  Status no_stream(const char* what) const { return refuse(what, kNoStream); }
  Status no_event(const char* what) const { return refuse(what, kNoEvent); }

  // All below with mutex_ held. Shared, because a stream may be destroyed while a host function runs.
  std::shared_ptr<ModelStream> find_stream(Stream stream) const {
    const auto found = streams_.find(to_id(stream.handle));
    return found == streams_.end() ? nullptr : found->second;
  }

  Status queue(Stream stream, ModelOperation operation, const char* what) {
    std::unique_lock lock(mutex_);
    const std::shared_ptr<ModelStream> found = find_stream(stream);
    if (found == nullptr) return no_stream(what);
    return queue(lock, found, std::move(operation));
  }

  Status queue(std::unique_lock<std::mutex>& lock, const std::shared_ptr<ModelStream>& stream,
               ModelOperation operation) {
    // The operation that runs counts too: it takes a place until it is done.
    while (!stream->closed && stream->queued_count - stream->done_count >= options_.queue_limit) {
      host_waits_for_ = stream.get();
      step_towards(lock, *stream);
      host_waits_for_ = nullptr;
    }
    if (stream->closed) {
      return {StatusCode::kInvalidArgument, "cannot queue work on a stream of " + options_.name +
                                                ": it is being destroyed; queue before stream_destroy"};
    }
    if (timed_ != nullptr && takes_time(operation)) {
      if (const std::chrono::nanoseconds time = timing_->queue_time(); time.count() > 0) {
        host_task_.add_until(timed_->now() + time, "queueing");
        spend_host(lock);
      }
    }
    stream->operations.push_back(std::move(operation));
    ++stream->queued_count;
    if (order_ == ModelOrder::kTimed) {
      if (can_advance(*stream)) start_ready(lock);
    } else if (order_ == ModelOrder::kSeeded) {
      advance_some(lock);
    } else if (order_ == ModelOrder::kAtOnce) {
      ++left_count_;
      if (can_advance(*stream)) run_head(lock, *stream);
      settle(lock);
    }
    return {};
  }

  // At once means all of it; something is left only where another thread's host function held it up.
  void settle(std::unique_lock<std::mutex>& lock) {
    if (order_ != ModelOrder::kAtOnce) return;
    while (left_count_ > 0 && advance_any(lock)) {
    }
  }

  // Its oldest operation could run now.
  static bool can_advance(const ModelStream& stream) {
    if (stream.running || !stream.task.empty() || stream.operations.empty()) return false;
    const ModelWait* wait = std::get_if<ModelWait>(&stream.operations.front());
    return wait == nullptr || wait->mark->reached;
  }

  // Requires: can_advance(stream), and that somebody shares the ownership of it.
  bool run_head(std::unique_lock<std::mutex>& lock, ModelStream& stream) {
    ModelOperation operation = std::move(stream.operations.front());
    stream.operations.pop_front();
    if (const auto* access = std::get_if<ModelAccess>(&operation)) {
      run_access(stream, *access);
      if (timed_ != nullptr && access->bytes > 0 && stream.failure.ok()) stream.task.add(time_of(*access));
    } else if (const auto* launch = std::get_if<ModelLaunch>(&operation)) {
      if (timed_ != nullptr && stream.failure.ok()) stream.task.add(launch->work);
    } else if (const auto* call = std::get_if<ModelFunctionCall>(&operation)) {
      run_function(lock, stream, *call);
    } else if (const auto* record = std::get_if<ModelRecord>(&operation)) {
      record->mark->reached = true;
      record->mark->time = now();
      record->mark->failure = stream.failure;
      record->mark->stream = nullptr;
    } else if (const auto* message = std::get_if<ModelSignalWait>(&operation)) {
      if (stream.failure.ok()) stream.task.add_signal(message->signal, message->name);
    } else if (const auto* wait = std::get_if<ModelWait>(&operation)) {
      // The awaited work failed, so later work here has no valid input: it fails for the same reason.
      fail(stream, wait->mark->failure);
    }
    if (!stream.task.empty()) {
      timed_->begin(stream.task);
      return true;
    }
    ++stream.done_count;
    if (order_ == ModelOrder::kAtOnce) --left_count_;
    if (waiting_count_ > 0) progress_.notify_all();
    return true;
  }

  // Nothing moves, but the memory has to be mapped still: a defect of the caller shows as on a device.
  void run_access(ModelStream& stream, const ModelAccess& access) {
    if (access.bytes == 0 || !stream.failure.ok()) return;
    Status status = book_.check_usable(access.target, access.bytes, "run queued work on");
    if (status.ok() && access.source != nullptr) {
      status = book_.check_usable(access.source, access.bytes, "run queued work on");
    }
    if (!status.ok()) fail(stream, Status(StatusCode::kInternal, status.message()));
  }

  // Host functions run even after a failure: they own their argument.
  void run_function(std::unique_lock<std::mutex>& lock, ModelStream& stream, const ModelFunctionCall& call) {
    stream.running = true;
    stream.forbidden_call = nullptr;
    lock.unlock();
    Status status;
    const auto failed = [&](const std::string& found_and_try) {
      status = Status(StatusCode::kInternal,
                      "cannot run a host function on a stream of " + options_.name + ": " + found_and_try);
    };
    running_stream = &stream;
    try {
      call.function(call.argument);
    } catch (const std::exception& error) {
      failed(std::string("it threw: ") + error.what() + "; catch within the function");
    } catch (...) {
      failed("it threw; catch within the function");
    }
    running_stream = nullptr;
    if (status.ok() && stream.forbidden_call != nullptr) {
      failed(std::string("it called Backend::") + stream.forbidden_call +
             "; queue that from the thread that queues the work");
    }
    lock.lock();
    stream.running = false;
    fail(stream, status);
  }

  static void fail(ModelStream& stream, const Status& status) {
    if (stream.failure.ok()) stream.failure = status;
  }

  // --- kTimed ---

  Status check_timed(const char* what) const {
    if (timed_ != nullptr) return {};
    return refuse(what, "nothing takes time here; give ModelBackendOptions a timing and a virtual clock");
  }
  static bool takes_time(const ModelOperation& operation) {
    return std::holds_alternative<ModelAccess>(operation) || std::holds_alternative<ModelLaunch>(operation);
  }
  ModelWork time_of(const ModelAccess& access) const {
    const auto on_device = [&](const void* address) { return numeric(address) >= kFirstAddress; };
    if (access.source == nullptr) return timing_->fill(access.bytes);
    const bool to = on_device(access.target);
    const bool from = on_device(access.source);
    const ModelCopy kind = to ? (from ? ModelCopy::kOnDevice : ModelCopy::kToDevice)
                              : (from ? ModelCopy::kToHost : ModelCopy::kOnHost);
    return timing_->copy(kind, access.bytes);
  }

  // Starts all operations that can start now. Operations without a duration run at once.
  void start_ready(std::unique_lock<std::mutex>& lock) {
    for (bool any = true; any;) {
      any = false;
      for (const auto& [id, stream] : streams_) {
        while (can_advance(*stream)) {
          run_head(lock, *stream);
          any = true;
        }
      }
    }
  }

  // Moves the time to the next end of some work, and goes on from there. False: no work is under way.
  bool pass_time(std::unique_lock<std::mutex>& lock) {
    if (!timed_->any()) return false;
    const ModelStreamTime spent = watched_ != nullptr ? account() : ModelStreamTime{};
    const bool host_worked = !host_task_.empty();
    const std::chrono::nanoseconds passed = timed_->advance();
    if (watched_ != nullptr && passed.count() > 0) add_watched(spent, passed);
    // The end of the host's own work lets no stream go on.
    if (timed_->ended_count() == (host_worked && host_task_.empty() ? 1u : 0u)) return true;
    for (const auto& [id, stream] : streams_) {
      if (stream->queued_count - stream->done_count == stream->operations.size()) continue;
      if (!stream->task.empty() || stream->running) continue;
      ++stream->done_count;
    }
    start_ready(lock);
    return true;
  }

  // Waits until the host's own work has ended.
  void spend_host(std::unique_lock<std::mutex>& lock) {
    timed_->begin(host_task_);
    while (!host_task_.empty()) pass_time(lock);
  }

  // The way in which the watched stream spends the time from now to the next end of some work: its own work,
  // or else the work at the other end of what it waits for.
  ModelStreamTime account() const {
    const ModelStream* stream = watched_.get();
    if (!stream->task.empty()) return {stream->task.name(), true, {}};
    bool asked_host = false;
    while (stream->task.empty()) {
      if (!stream->operations.empty()) {
        const ModelWait* wait = std::get_if<ModelWait>(&stream->operations.front());
        if (wait == nullptr || wait->mark->reached || wait->mark->stream == nullptr) break;
        stream = wait->mark->stream;
      } else if (!host_task_.empty()) {
        return {host_task_.name(), false, {}};
      } else if (host_waits_for_ != nullptr && !asked_host) {
        asked_host = true;
        stream = host_waits_for_;
      } else {
        break;
      }
    }
    return {stream->task.empty() ? "host" : stream->task.name(), false, {}};
  }

  void add_watched(const ModelStreamTime& spent, std::chrono::nanoseconds passed) {
    const auto found = std::find_if(
        watched_times_.begin(), watched_times_.end(),
        [&](const ModelStreamTime& one) { return one.own == spent.own && one.name == spent.name; });
    if (found == watched_times_.end()) {
      watched_times_.push_back({spent.name, spent.own, passed});
    } else {
      found->time += passed;
    }
  }

  // One operation of a stream picked by the seed.
  bool advance_any(std::unique_lock<std::mutex>& lock) {
    std::vector<std::shared_ptr<ModelStream>>& ready = ready_streams_;
    ready.clear();
    for (const auto& [id, stream] : streams_) {
      if (can_advance(*stream)) ready.push_back(stream);
    }
    if (ready.empty()) return false;
    const std::shared_ptr<ModelStream> picked = ready[random_.below(ready.size())];
    ready.clear();
    return run_head(lock, *picked);
  }

  void advance_some(std::unique_lock<std::mutex>& lock) {
    for (std::size_t count = random_.below(3); count > 0; --count) {
      if (!advance_any(lock)) return;
    }
  }

  // Brings the stream nearer to its end by one operation: its own oldest, or one of those it waits for. Where
  // another thread runs that one, waits for it.
  void step_towards(std::unique_lock<std::mutex>& lock, ModelStream& stream) {
    if (timed_ != nullptr) {
      FOREBAY_CHECK(pass_time(lock), "%s waits for work that nothing brings nearer", options_.name.c_str());
      return;
    }
    ModelStream* next = &stream;
    // An event that is waited for was recorded earlier, so this ends.
    while (!next->running && !next->operations.empty() && !can_advance(*next)) {
      next = std::get_if<ModelWait>(&next->operations.front())->mark->stream;
    }
    if (can_advance(*next)) {
      const std::shared_ptr<ModelStream> keep = share(*next);
      run_head(lock, *next);
      return;
    }
    ++waiting_count_;
    progress_.wait(lock);
    --waiting_count_;
  }

  std::shared_ptr<ModelStream> share(const ModelStream& stream) const {
    for (const auto& [id, one] : streams_) {
      if (one.get() == &stream) return one;
    }
    return nullptr;
  }

  void run_until(std::unique_lock<std::mutex>& lock, ModelStream& stream, std::uint64_t goal) {
    host_waits_for_ = &stream;
    while (stream.done_count < goal) step_towards(lock, stream);
    host_waits_for_ = nullptr;
  }

  const ModelBackendOptions options_;
  const ModelOrder order_;
  Capabilities capabilities_;  // Constant after construction.
  AddressBook book_;
  std::mutex memory_mutex_;  // Held from a question to book_ to the change that follows.
  FaultScript faults_;

  mutable std::mutex mutex_;
  std::condition_variable progress_;  // An operation is done.
  // Guarded by mutex_.
  std::size_t waiting_count_ = 0;  // Threads that wait for progress_.
  std::size_t left_count_ = 0;     // kAtOnce: operations queued and not run yet.
  SplitMix random_;
  std::uint64_t last_id_ = 0;  // Handles are numbers never used twice: a stale one is refused, not followed.
  std::map<std::uint64_t, std::shared_ptr<ModelStream>> streams_;  // Ordered, so that a seed gives one order.
  std::vector<std::shared_ptr<ModelStream>> ready_streams_;        // Scratch of advance_any.
  std::unordered_map<std::uint64_t, std::shared_ptr<ModelMark>> events_;  // The last record; null: none.
  std::unordered_map<std::uint64_t, ModuleState> modules_;
  std::unordered_map<std::uint64_t, std::uint64_t> kernels_;  // Handle to module.
  // kTimed. One thread calls the backend.
  std::unique_ptr<internal::TimedWork> timed_;
  internal::Task host_task_;                     // The host's own work.
  const ModelStream* host_waits_for_ = nullptr;  // While the host waits.
  std::shared_ptr<const ModelStream> watched_;
  std::vector<ModelStreamTime> watched_times_;
};

}  // namespace

Result<std::unique_ptr<ModelBackend>> ModelBackend::create(ModelBackendOptions options) {
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<ScriptedModelBackend> backend,
                           ScriptedModelBackend::create(std::move(options)));
  return std::unique_ptr<ModelBackend>(std::move(backend));
}

Result<std::unique_ptr<ScriptedModelBackend>> ScriptedModelBackend::create(ModelBackendOptions options,
                                                                           ModelScript script) {
  const auto refusal = [&](const std::string& found_and_try) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot make model backend " + options.name + ": " + found_and_try);
  };
  if (!std::has_single_bit(options.granularity) || options.granularity < kSmallestGranularity ||
      options.granularity > kAddressBytes) {
    return refusal("a granularity of " + std::to_string(options.granularity) +
                   " bytes is not a power of two from 512; give one, such as 2 MiB");
  }
  if (options.memory_bytes > kAddressBytes) {
    return refusal("memory of " + format_bytes(options.memory_bytes) + " is more than there are addresses, " +
                   format_bytes(kAddressBytes) + "; give less");
  }
  if (options.timing != nullptr &&
      (options.clock == nullptr || options.clock->mode() != HostClock::Mode::kVirtual)) {
    return refusal("a timing needs a virtual clock; give ModelBackendOptions::clock");
  }
  if (options.queue_limit == 0) return refusal("a queue_limit of 0 lets nothing run; give at least 1");
  if (!std::all_of(script.faults.begin(), script.faults.end(), is_fault_valid)) {
    return refusal("a fault has nth 0 or no error; count from 1 and give a status");
  }
  return std::unique_ptr<ScriptedModelBackend>(
      std::make_unique<ModelBackendImpl>(std::move(options), std::move(script)));
}

}  // namespace forebay
