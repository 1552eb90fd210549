// NCCL's entry points, and the controls.
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "tests/fakes/nccl/state.h"

#define FAKE_NCCL_EXPORT extern "C" [[gnu::visibility("default")]]

namespace forebay::fake_nccl {
namespace {

thread_local int group_depth = 0;
thread_local std::vector<std::shared_ptr<Launch>> group;
thread_local NcclResult group_failure = NcclResult::kSuccess;  // A call in the open group failed with it.
thread_local std::string last_error;

template <typename Value>
void read_variable(const char* name, Value* value) {
  const char* const text = std::getenv(name);
  if (text != nullptr && *text != '\0') *value = static_cast<Value>(std::atoll(text));
}

FakeNcclOptions options_of_environment() {
  FakeNcclOptions options;
  read_variable("FAKE_NCCL_VERSION", &options.version);
  read_variable("FAKE_NCCL_IN_PROGRESS", &options.in_progress);
  read_variable("FAKE_NCCL_SHARED_GPU", &options.shared_gpu);
  read_variable("FAKE_NCCL_FAIL_RANK", &options.fail_rank);
  read_variable("FAKE_NCCL_FAIL_CALL", &options.fail_call);
  read_variable("FAKE_NCCL_FAIL_RESULT", &options.fail_result);
  read_variable("FAKE_NCCL_HANG_RANK", &options.hang_rank);
  read_variable("FAKE_NCCL_HANG_OPERATION", &options.hang_operation);
  read_variable("FAKE_NCCL_HANG_RESULT", &options.hang_result);
  read_variable("FAKE_NCCL_HANG_SENDS", &options.hang_sends);
  read_variable("FAKE_NCCL_QUIET", &options.quiet);
  return options;
}

NcclResult refuse(NcclResult result, const std::string& why) {
  last_error = why;
  return result;
}

// Counts a call of `rank`, which may be the one that is to fail.
NcclResult admit(int rank, const char* call) {
  State& s = state();
  const std::uint64_t number = ++s.calls[rank];
  if (rank != s.options.fail_rank || number != s.options.fail_call) return NcclResult::kSuccess;
  ++s.faults;
  return refuse(static_cast<NcclResult>(s.options.fail_result),
                std::string(call) + " fails by script, call " + std::to_string(number) + " of rank " +
                    std::to_string(rank));
}

// One call on one communicator: found, counted, and alone in it.
class Entry {
 public:
  // `scripted`: it counts among the calls of which one may fail.
  Entry(NcclComm handle, const char* call, bool scripted = true) : lock_(state().mutex) {
    const auto found = state().comms.find(handle);
    if (found == state().comms.end()) {
      misuse("%s on a communicator that is gone or never was", call);
      result_ = refuse(NcclResult::kInvalidArgument, "there is no such communicator");
      return;
    }
    comm_ = found->second;
    if (comm_->in_use.exchange(true)) {
      // Only an abort frees a launch that a full queue blocks.
      if (!comm_->launching || std::strcmp(call, "ncclCommAbort") != 0)
        misuse("%s while another thread is in a call on the same communicator", call);
    } else {
      holds_ = true;
    }
    // A call takes time, in which another thread's would come.
    lock_.unlock();
    std::this_thread::yield();
    lock_.lock();
    if (scripted) result_ = admit(comm_->rank, call);
  }
  ~Entry() {
    if (holds_) comm_->in_use = false;
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  // For calls that need a communicator which is neither busy nor aborted.
  NcclResult check_idle(const char* call) {
    if (result_ != NcclResult::kSuccess) return result_;
    if (comm_->polls_left > 0 || comm_->pending || !comm_->ready) {
      misuse("%s while the communicator's previous call is in progress", call);
      return refuse(NcclResult::kInvalidArgument, "the previous call is in progress");
    }
    if (comm_->aborted || comm_->finalized) {
      misuse("%s on a communicator that was revoked or finalized", call);
      return refuse(NcclResult::kInvalidUsage, "the communicator was revoked or finalized");
    }
    return NcclResult::kSuccess;
  }

  NcclResult result() const { return result_; }
  Comm& comm() { return *comm_; }
  const CommPtr& shared() const { return comm_; }
  Lock& lock() { return lock_; }

 private:
  Lock lock_;
  CommPtr comm_;
  bool holds_ = false;
  NcclResult result_ = NcclResult::kSuccess;
};

// Does it now, or after as many questions as the script says.
NcclResult begin(Lock& lock, Comm& comm, std::function<NcclResult(Lock&)> work) {
  if (state().options.in_progress == 0) return work(lock);
  comm.polls_left = state().options.in_progress;
  comm.pending = std::move(work);
  return NcclResult::kInProgress;
}

std::size_t element_bytes(NcclType type) {
  switch (type) {
    case NcclType::kInt8:
    case NcclType::kUint8:
      return 1;
    case NcclType::kFloat16:
    case NcclType::kBfloat16:
      return 2;
    case NcclType::kInt32:
    case NcclType::kUint32:
    case NcclType::kFloat32:
      return 4;
    case NcclType::kInt64:
    case NcclType::kUint64:
    case NcclType::kFloat64:
      return 8;
  }
  return 0;
}

NcclResult launch_now(Lock& lock, const std::shared_ptr<Launch>& launch) {
  State& s = state();
  const std::uint64_t number = ++s.launch_count;
  Comm& comm = *launch->comm;
  const std::uint64_t operation = s.operations[comm.rank]++;
  if (comm.rank == s.options.hang_rank && operation == s.options.hang_operation) {
    ++s.faults;
    launch->hangs = true;
    if (s.options.hang_result != 0) comm.async = static_cast<NcclResult>(s.options.hang_result);
  }
  s.launches[number] = launch;
  // Not under our mutex: the driver has its own, under which it calls nobody, and its threads take ours.
  lock.unlock();
  comm.launching = true;
  const bool queued = queue_kernel(*launch, number);
  comm.launching = false;
  lock.lock();
  if (queued) return NcclResult::kSuccess;
  s.launches.erase(number);
  return refuse(NcclResult::kUnhandledCudaError, "the driver refuses the launch");
}

NcclResult end_group() {
  std::vector<std::shared_ptr<Launch>> launches;
  launches.swap(group);
  NcclResult first = std::exchange(group_failure, NcclResult::kSuccess);
  if (first != NcclResult::kSuccess) return first;  // Nothing of the group is done.
  for (const std::shared_ptr<Launch>& launch : launches) {
    Entry entry(launch->comm->handle, "ncclGroupEnd");
    NcclResult result = entry.check_idle("ncclGroupEnd");
    if (result == NcclResult::kSuccess) {
      result = begin(entry.lock(), entry.comm(), [launch](Lock& lock) { return launch_now(lock, launch); });
    }
    if (first == NcclResult::kSuccess) first = result;
  }
  return first;
}

struct DataCall {
  const char* name;
  NcclComm comm;
  NcclStream stream;
  std::size_t count;
  NcclType type;
  int peer;
  std::vector<const void*> addresses;
};

NcclResult check(const DataCall& call, Entry& entry) {
  const NcclResult idle = entry.check_idle(call.name);
  if (idle != NcclResult::kSuccess) return idle;
  if (element_bytes(call.type) == 0) return refuse(NcclResult::kInvalidArgument, "there is no such type");
  if (call.peer < 0 || call.peer >= entry.comm().world->size)
    return refuse(NcclResult::kInvalidArgument, "there is no such rank");
  for (const void* address : call.addresses) {
    if (address == nullptr && call.count != 0)
      return refuse(NcclResult::kInvalidArgument, "a buffer is null");
  }
  return NcclResult::kSuccess;
}

Launch& launch_of_group(const CommPtr& comm, NcclStream stream) {
  for (const std::shared_ptr<Launch>& open : group) {
    if (open->comm == comm && open->stream == stream) return *open;
  }
  group.push_back(std::make_shared<Launch>());
  group.back()->comm = comm;
  group.back()->stream = stream;
  return *group.back();
}

// Adds a call to the group, which is of this call alone outside any.
template <typename Add>
NcclResult add(const DataCall& call, Add add_to) {
  {
    Entry entry(call.comm, call.name);
    const NcclResult checked = check(call, entry);
    if (checked != NcclResult::kSuccess) {
      if (group_depth > 0) group_failure = checked;
      return checked;
    }
    Launch& launch = launch_of_group(entry.shared(), call.stream);
    launch.addresses.insert(launch.addresses.end(), call.addresses.begin(), call.addresses.end());
    add_to(launch, call.count * element_bytes(call.type));
  }
  return group_depth == 0 ? end_group() : NcclResult::kSuccess;
}

const std::byte* bytes_at(const void* address, std::size_t offset = 0) {
  return static_cast<const std::byte*>(address) + offset;
}
std::byte* bytes_at(void* address, std::size_t offset = 0) {
  return static_cast<std::byte*>(address) + offset;
}

// The first bytes of the ids of this process.
std::string id_prefix() {
  return "fake NCCL of process " + std::to_string(::getpid()) + ", id ";
}

// The end of a communicator: queued and waiting work ends, and the memory goes.
void end_comm(Lock& lock, const CommPtr& comm) {
  State& s = state();
  comm->aborted = true;
  comm->pending = nullptr;
  comm->polls_left = 0;
  s.comms.erase(comm->handle);
  s.changed.notify_all();
  lock.unlock();
  unload_kernel(*comm);
  lock.lock();
}

}  // namespace

State& state() {
  static State* const instance = [] {
    auto* made = new State;
    made->options = options_of_environment();
    return made;
  }();
  return *instance;
}

void misuse(const char* format, ...) {
  ++state().misuses;
  if (state().options.quiet) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "fake NCCL: %s\n", text);
}

}  // namespace forebay::fake_nccl

using namespace forebay::fake_nccl;  // NOLINT: the functions below are its C interface.

// --- controls ---

FAKE_NCCL_EXPORT void fake_nccl_configure(const FakeNcclOptions& options) {
  const Lock lock(state().mutex);
  state().options = options;
}

FAKE_NCCL_EXPORT void fake_nccl_reset() {
  State& s = state();
  const Lock lock(s.mutex);
  s.options = options_of_environment();
  s.comms.clear();
  s.worlds.clear();
  s.launches.clear();
  s.calls.clear();
  s.operations.clear();
  s.launch_count = s.faults = s.misuses = s.aborts = s.destroys = 0;
}

FAKE_NCCL_EXPORT void fake_nccl_account(FakeNcclAccount& account) {
  State& s = state();
  const Lock lock(s.mutex);
  account = {};
  account.comms = s.comms.size();
  for (const auto& [handle, comm] : s.comms) account.registrations += comm->registrations.size();
  account.operations = s.launches.size();
  account.launches = s.launch_count;
  for (const auto& [rank, count] : s.calls) account.calls += count;
  account.faults = s.faults;
  account.misuses = s.misuses;
  account.aborts = s.aborts;
  account.destroys = s.destroys;
}

// --- the library ---

FAKE_NCCL_EXPORT NcclResult ncclGetVersion(int* version) {
  if (version == nullptr) return NcclResult::kInvalidArgument;
  const Lock lock(state().mutex);
  *version = state().options.version;
  return NcclResult::kSuccess;
}

FAKE_NCCL_EXPORT const char* ncclGetErrorString(NcclResult result) {
  switch (result) {
    case NcclResult::kSuccess:
      return "no error";
    case NcclResult::kInProgress:
      return "NCCL operation in progress";
    default:
      return "a failure of the fake NCCL";
  }
}

FAKE_NCCL_EXPORT const char* ncclGetLastError(NcclComm) {
  return last_error.c_str();
}

FAKE_NCCL_EXPORT NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  State& s = state();
  const Lock lock(s.mutex);
  if (const NcclResult result = admit(0, "ncclGetUniqueId"); result != NcclResult::kSuccess) return result;
  std::memset(id, 0, sizeof(*id));
  std::random_device random;
  std::snprintf(id->internal, sizeof(id->internal), "%s%llu %08x%08x", id_prefix().c_str(),
                static_cast<unsigned long long>(s.next_id++), random(), random());
  return NcclResult::kSuccess;
}

FAKE_NCCL_EXPORT NcclResult ncclCommInitRankConfig(NcclComm* result, int size, NcclUniqueId id, int rank,
                                                   NcclConfig* config) {
  State& s = state();
  Lock lock(s.mutex);
  *result = nullptr;
  if (const NcclResult failed = admit(rank, "ncclCommInitRankConfig"); failed != NcclResult::kSuccess)
    return failed;
  if (size < 1 || rank < 0 || rank >= size) return refuse(NcclResult::kInvalidArgument, "no such rank");
  if (config == nullptr || config->magic != kApiMagic || config->size < sizeof(NcclConfig))
    return refuse(NcclResult::kInvalidArgument, "the configuration was not initialised");
  if (config->blocking != 0) {
    misuse("ncclCommInitRankConfig of a blocking communicator, which this fake does not have");
    return refuse(NcclResult::kInvalidUsage, "blocking communicators are not imitated");
  }
  if (std::string(id.internal, kUniqueIdBytes).rfind(id_prefix(), 0) != 0)
    return refuse(NcclResult::kSystemError,
                  "the id is not of this process, and the ranks of this fake are threads");
  auto comm = std::make_shared<Comm>();
  lock.unlock();
  const bool has_context = current_context(&comm->context, &comm->device) && load_kernel(*comm);
  lock.lock();
  if (!has_context) return refuse(NcclResult::kUnhandledCudaError, "no CUDA context is current");
  std::weak_ptr<World>& place = s.worlds[std::string(id.internal, sizeof(id.internal))];
  comm->world = place.lock();
  if (comm->world == nullptr) {
    comm->world = std::make_shared<World>();
    comm->world->size = size;
    place = comm->world;
  }
  comm->rank = rank;
  s.next_handle += 0x40;
  comm->handle = reinterpret_cast<NcclComm>(s.next_handle);
  s.comms[comm->handle] = comm;
  *result = comm->handle;
  World& world = *comm->world;
  for (const int device : world.devices) {
    if (device == comm->device && !s.options.shared_gpu) world.failure = NcclResult::kInvalidUsage;
  }
  world.devices.push_back(comm->device);
  ++world.joined;
  comm->polls_left = s.options.in_progress;
  // In the background, even for one rank: the answer comes with ncclCommGetAsyncError.
  return NcclResult::kInProgress;
}

FAKE_NCCL_EXPORT NcclResult ncclCommGetAsyncError(NcclComm handle, NcclResult* error) {
  Entry entry(handle, "ncclCommGetAsyncError", false);
  if (entry.result() != NcclResult::kSuccess) return entry.result();
  Comm& comm = entry.comm();
  *error = NcclResult::kInProgress;
  if (comm.polls_left > 0) {
    --comm.polls_left;
    return NcclResult::kSuccess;
  }
  if (!comm.ready) {
    if (comm.world->joined < comm.world->size) return NcclResult::kSuccess;
    if (comm.world->failure != NcclResult::kSuccess) {
      last_error = "Duplicate GPU detected";
      *error = comm.world->failure;
      return NcclResult::kSuccess;
    }
    comm.ready = true;
  }
  if (comm.pending) {
    const auto work = std::exchange(comm.pending, nullptr);
    const NcclResult result = work(entry.lock());
    if (result != NcclResult::kSuccess) comm.async = result;
  }
  *error = comm.async;
  return NcclResult::kSuccess;
}

FAKE_NCCL_EXPORT NcclResult ncclCommCount(NcclComm handle, int* count) {
  Entry entry(handle, "ncclCommCount");
  if (entry.result() == NcclResult::kSuccess) *count = entry.comm().world->size;
  return entry.result();
}

FAKE_NCCL_EXPORT NcclResult ncclCommUserRank(NcclComm handle, int* rank) {
  Entry entry(handle, "ncclCommUserRank");
  if (entry.result() == NcclResult::kSuccess) *rank = entry.comm().rank;
  return entry.result();
}

FAKE_NCCL_EXPORT NcclResult ncclCommFinalize(NcclComm handle) {
  Entry entry(handle, "ncclCommFinalize");
  const NcclResult idle = entry.check_idle("ncclCommFinalize");
  if (idle != NcclResult::kSuccess) return idle;
  return begin(entry.lock(), entry.comm(), [comm = &entry.comm()](Lock&) {
    comm->finalized = true;
    return NcclResult::kSuccess;
  });
}

FAKE_NCCL_EXPORT NcclResult ncclCommDestroy(NcclComm handle) {
  Entry entry(handle, "ncclCommDestroy");
  if (entry.shared() == nullptr) return entry.result();
  if (!entry.comm().finalized) misuse("ncclCommDestroy before ncclCommFinalize, which waits for the peers");
  ++state().destroys;
  end_comm(entry.lock(), entry.shared());
  return entry.result();
}

// Ends it even where a script says that it fails, so that leftovers are the caller's fault.
FAKE_NCCL_EXPORT NcclResult ncclCommAbort(NcclComm handle) {
  Entry entry(handle, "ncclCommAbort");
  if (entry.shared() == nullptr) return entry.result();
  ++state().aborts;
  end_comm(entry.lock(), entry.shared());
  return entry.result();
}

FAKE_NCCL_EXPORT NcclResult ncclCommRevoke(NcclComm handle, int flags) {
  Entry entry(handle, "ncclCommRevoke");
  if (entry.result() != NcclResult::kSuccess) return entry.result();
  if (flags != 0) return refuse(NcclResult::kInvalidArgument, "there are no flags");
  entry.comm().aborted = true;
  state().changed.notify_all();
  return NcclResult::kSuccess;
}

FAKE_NCCL_EXPORT NcclResult ncclCommRegister(NcclComm handle, void* address, std::size_t bytes,
                                             void** result) {
  Entry entry(handle, "ncclCommRegister");
  const NcclResult idle = entry.check_idle("ncclCommRegister");
  if (idle != NcclResult::kSuccess) return idle;
  if (address == nullptr || bytes == 0) return refuse(NcclResult::kInvalidArgument, "there is nothing there");
  entry.comm().registrations[address] = bytes;
  *result = address;
  return NcclResult::kSuccess;
}

FAKE_NCCL_EXPORT NcclResult ncclCommDeregister(NcclComm handle, void* registration) {
  Entry entry(handle, "ncclCommDeregister");
  const NcclResult idle = entry.check_idle("ncclCommDeregister");
  if (idle != NcclResult::kSuccess) return idle;
  if (entry.comm().registrations.erase(registration) == 0)
    return refuse(NcclResult::kInvalidArgument, "it is not registered");
  return NcclResult::kSuccess;
}

FAKE_NCCL_EXPORT NcclResult ncclGroupStart() {
  ++group_depth;
  return NcclResult::kSuccess;
}

FAKE_NCCL_EXPORT NcclResult ncclGroupEnd() {
  if (group_depth == 0) {
    misuse("ncclGroupEnd without ncclGroupStart");
    return refuse(NcclResult::kInvalidUsage, "no group is open");
  }
  return --group_depth == 0 ? end_group() : NcclResult::kSuccess;
}

FAKE_NCCL_EXPORT NcclResult ncclSend(const void* source, std::size_t count, NcclType type, int peer,
                                     NcclComm comm, NcclStream stream) {
  return add({"ncclSend", comm, stream, count, type, peer, {source}}, [&](Launch& launch, std::size_t bytes) {
    launch.transfers.push_back({Channel::kMessage, true, peer, bytes_at(source), nullptr, bytes});
  });
}

FAKE_NCCL_EXPORT NcclResult ncclRecv(void* target, std::size_t count, NcclType type, int peer, NcclComm comm,
                                     NcclStream stream) {
  return add({"ncclRecv", comm, stream, count, type, peer, {target}}, [&](Launch& launch, std::size_t bytes) {
    launch.transfers.push_back({Channel::kMessage, false, peer, nullptr, bytes_at(target), bytes});
  });
}

FAKE_NCCL_EXPORT NcclResult ncclAllGather(const void* source, void* target, std::size_t count, NcclType type,
                                          NcclComm comm, NcclStream stream) {
  return add({"ncclAllGather", comm, stream, count, type, 0, {source, target}}, [&](Launch& launch,
                                                                                    std::size_t bytes) {
    for (int peer = 0; peer < launch.comm->world->size; ++peer) {
      std::byte* const place = bytes_at(target, static_cast<std::size_t>(peer) * bytes);
      launch.transfers.push_back({Channel::kAllGather, true, peer, bytes_at(source), nullptr, bytes});
      launch.transfers.push_back({Channel::kAllGather, false, peer, nullptr, place, bytes});
    }
  });
}

FAKE_NCCL_EXPORT NcclResult ncclReduceScatter(const void* source, void* target, std::size_t count,
                                              NcclType type, NcclReduction reduction, NcclComm comm,
                                              NcclStream stream) {
  if (type != NcclType::kFloat32 || reduction != NcclReduction::kSum)
    return refuse(NcclResult::kInvalidUsage, "only sums of fp32 are imitated");
  return add({"ncclReduceScatter", comm, stream, count, type, 0, {source, target}}, [&](Launch& launch,
                                                                                        std::size_t bytes) {
    const int size = launch.comm->world->size;
    const int rank = launch.comm->rank;
    auto sum = std::make_unique<Sum>();
    sum->own = bytes_at(source, static_cast<std::size_t>(rank) * bytes);
    sum->target = bytes_at(target);
    sum->count = count;
    sum->terms.resize(static_cast<std::size_t>(size));
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      std::vector<std::byte>& term = sum->terms[static_cast<std::size_t>(peer)];
      term.resize(bytes);
      const std::byte* const slice = bytes_at(source, static_cast<std::size_t>(peer) * bytes);
      launch.transfers.push_back({Channel::kReduceScatter, true, peer, slice, nullptr, bytes});
      launch.transfers.push_back({Channel::kReduceScatter, false, peer, nullptr, term.data(), bytes});
    }
    launch.sums.push_back(std::move(sum));
  });
}
