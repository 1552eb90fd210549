// The communicator of one rank: data operations queued with their fingerprints, a journal of those not done,
// and the thread that watches them and the peers.
//
// First cause. Whatever fails first on any rank goes to `control->abort`, which keeps the first of all ranks;
// every rank then takes what control->status() says. The watch's own communicator is aborted with it, so that
// a rank that waits in a heartbeat learns at once.
#include "forebay/nccl_communicator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arguments.h"
#include "fingerprint.h"
#include "forebay/log.h"
#include "nccl_handle.h"
#include "nccl_library.h"
#include "nccl_watch.h"
#include "operation_book.h"

namespace forebay {
namespace {

using internal::Fingerprint;
using internal::NcclHandle;
using internal::NcclHeartbeat;
using internal::NcclLibrary;
using internal::NcclMemberState;
using internal::NcclOperation;
using internal::NcclStep;
using internal::Operation;
using internal::OperationBook;
using nccl::NcclComm;
using nccl::NcclStream;
using nccl::NcclType;
using Clock = NcclHandle::Clock;
using std::chrono::milliseconds;

constexpr std::size_t kSlots = kNcclInFlightMax;
// Between two looks at something that the device or a peer will soon have done.
constexpr std::chrono::microseconds kPoll{50};
// How often a rank that is about to leave looks whether its last operations are done.
constexpr milliseconds kLeavePoll{1};
// How long what was queued may take to end after NCCL was aborted, before its memory is left to it.
constexpr milliseconds kDrainMax{5000};
// A deadline that no clock arithmetic overflows with.
constexpr milliseconds kDeadlineMax = std::chrono::hours(24 * 365);
// Of the operation that connects the ranks. No collective of a caller has it.
constexpr std::uint64_t kWarmUpSequence = ~std::uint64_t{0};

NcclStream native(Stream stream) noexcept {
  return static_cast<NcclStream>(stream.handle);
}

// Page-locked host memory.
class PinnedMemory {
 public:
  explicit PinnedMemory(Backend& backend) : backend_(backend) {}
  ~PinnedMemory() {
    if (address_ == nullptr) return;
    static_cast<void>(backend_.unpin(address_));
    ::munmap(address_, bytes_);
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  Status allocate(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    bytes_ = (bytes + page - 1) / page * page;
    void* const address = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
      return Status(StatusCode::kOutOfMemory, "cannot map " + std::to_string(bytes_) +
                                                  " bytes for fingerprints: the system refuses; free memory");
    }
    const Status pinned = backend_.pin(address, bytes_);
    if (!pinned.ok()) {
      ::munmap(address, bytes_);
      return pinned;
    }
    address_ = address;
    return {};
  }
  NcclOperation* operations() const noexcept { return static_cast<NcclOperation*>(address_); }
  // Leaves the memory to work that may still use it.
  void abandon() noexcept { address_ = nullptr; }

 private:
  Backend& backend_;
  void* address_ = nullptr;
  std::size_t bytes_ = 0;
};

// What every rank must have the same of.
struct Facts {
  std::int64_t version = 0;
  std::int64_t order = 0;
  std::int64_t adopted = 0;
};

Status compare_facts(const std::vector<Facts>& all) {
  for (std::size_t r = 1; r < all.size(); ++r) {
    const auto differ = [&](const std::string& first, const std::string& other, const char* try_this) {
      return Status(StatusCode::kInvalidArgument, "ranks disagree about NCCL: rank 0 has " + first +
                                                      ", rank " + std::to_string(r) + " has " + other + "; " +
                                                      try_this);
    };
    if (all[r].version != all[0].version) {
      return differ(internal::nccl_version_text(static_cast<int>(all[0].version)),
                    internal::nccl_version_text(static_cast<int>(all[r].version)),
                    "load the same library on all ranks");
    }
    if (all[r].order != all[0].order) {
      return differ("order " + std::to_string(all[0].order), "order " + std::to_string(all[r].order),
                    "give all ranks the same options");
    }
    if (all[r].adopted != all[0].adopted) {
      return differ(all[0].adopted != 0 ? "a communicator of the trainer's" : "none of the trainer's",
                    all[r].adopted != 0 ? "one" : "none", "adopt one on all ranks or on none");
    }
  }
  return {};
}

// One rank. Shared by its communicator and its watch's thread.
class Member : public std::enable_shared_from_this<Member> {
 public:
  Member(std::unique_ptr<Communicator> control, CudaBackend& backend, Kernels& kernels,
         const NcclOptions& options)
      : control_(std::move(control)),
        backend_(backend),
        kernels_(kernels),
        options_(options),
        deadline_(std::clamp(options.deadline, milliseconds(1), kDeadlineMax)),
        sent_to_(static_cast<std::size_t>(control_->size())),
        received_from_(static_cast<std::size_t>(control_->size())),
        fingerprints_(backend),
        book_(control_->rank(), control_->size()),
        table_(static_cast<std::size_t>(control_->size())),
        left_at_(static_cast<std::size_t>(control_->size())) {}
  ~Member() { give_back(); }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  int rank() const noexcept { return control_->rank(); }
  int size() const noexcept { return control_->size(); }
  Communicator& control() noexcept { return *control_; }
  CudaBackend& backend() noexcept { return backend_; }
  Kernels& kernels() noexcept { return kernels_; }
  const NcclOptions& options() const noexcept { return options_; }

  // Joins the other ranks. Once, before anything else; collective.
  Status open();
  // Waits for what is queued, and leaves.
  void leave() noexcept;

  Status status();
  // Fails this rank with the first cause of all ranks, which is `cause` if nobody was faster. Returns it.
  Status fail(const Status& cause) noexcept;
  Status fail_here(const Status& cause) noexcept {
    try {
      return fail(cause.with_context("rank " + std::to_string(rank())));
    } catch (const std::exception&) {
      return fail(cause);  // Out of memory for the context.
    }
  }

  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream);
  Status all_gather(const AllGatherArguments& arguments, Stream stream);
  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag, Stream stream);
  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream);
  Status register_buffer(DevicePtr address, std::size_t bytes);
  Status deregister_buffer(DevicePtr address);

  OperationBook& book() noexcept { return book_; }

 private:
  // Where an operation's fingerprints lie on the device, and whose are compared once it is done.
  enum class Compared : std::uint8_t { kNone, kPeer, kAll };
  struct Slot {
    Event come;  // The stream has reached the operation.
    Event done;
    NcclOperation operation;
    Compared compared = Compared::kNone;
    std::uint64_t record = 0;  // Its number in the book.
    bool queued = false;       // All of it is on the stream.
    bool started = false;
    Clock::time_point started_at;
  };

  Slot& slot(std::uint64_t number) { return slots_[number % kSlots]; }
  // The operations that connect the ranks are nobody's.
  static bool is_recorded(const NcclOperation& operation) noexcept {
    return operation.fingerprint.sequence != kWarmUpSequence;
  }
  std::size_t ranks() const noexcept { return static_cast<std::size_t>(size()); }
  Clock::time_point limit() const { return Clock::now() + deadline_; }

  // --- creation ---
  Status agree_on_facts();
  Status join();
  Status allocate();
  Status warm_up();
  void give_back() noexcept;

  // --- data operations ---

  // Queues an operation with its fingerprint. `body(comm, own, all)` makes the NCCL calls: `own` is this
  // rank's fingerprint on the device, `all` those of all ranks.
  template <typename Body>
  Status issue(const Slot& wanted, Stream stream, Body body);
  Status await_slot();
  Status queue_transfer(const internal::Collective& collective, Stream stream);
  NcclStep exchange_in_pairs(NcclComm comm, const internal::Piece& piece, std::byte* own, std::byte* all,
                             Stream stream) const;

  // --- the journal ---

  // Takes what is done out of the journal, and compares its fingerprints. `open` gets the oldest that are
  // not done, if it is not null.
  Status drain(NcclHeartbeat* open = nullptr);
  Status compare(const Slot& done, std::size_t index) const;
  bool is_empty();

  // --- the watch ---
  void watch() noexcept;
  // One heartbeat. `over`: this rank has left.
  Status beat(bool* over);
  Status check_deadline();
  Status exchange_heartbeats(const NcclHeartbeat& mine);
  Status part(bool gone);

  const std::unique_ptr<Communicator> control_;
  CudaBackend& backend_;
  Kernels& kernels_;
  const NcclOptions options_;
  const milliseconds deadline_;

  // Of the thread that issues.
  std::uint64_t collective_sequence_ = 0;
  std::vector<std::uint64_t> sent_to_;
  std::vector<std::uint64_t> received_from_;
  std::map<DevicePtr, void*> registered_;

  // Set up by open().
  std::unique_ptr<NcclHandle> handle_;
  std::vector<Slot> slots_;                // The entries that the journal uses are guarded by journal_mutex_.
  DevicePtr device_operations_ = nullptr;  // kSlots times size() fingerprints.
  PinnedMemory fingerprints_;              // kSlots own ones, then kSlots times size() as they came.
  std::thread watcher_;

  OperationBook book_;

  std::mutex journal_mutex_;
  // Guarded by journal_mutex_: operations are numbered as they are issued.
  std::uint64_t oldest_ = 0;  // Not done.
  std::uint64_t next_ = 0;
  std::uint64_t collective_count_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  Status failure_;
  bool leaving_ = false;
  bool ended_ = true;                    // The watch's thread has nothing more to do; true before it starts.
  std::shared_ptr<Communicator> watch_;  // Shared with whoever aborts it while a heartbeat is in it.

  // Of the watch's thread.
  std::vector<int> watched_{};        // The ranks of watch_.
  std::vector<NcclHeartbeat> table_;  // By rank, the last heard.
  std::vector<Clock::time_point> left_at_;
  bool has_left_ = false;
  Clock::time_point leaving_since_;
};

// --- creation ---

Status Member::open() {
  const Result<const NcclLibrary*> library = NcclLibrary::get(options_.library);
  FOREBAY_RETURN_IF_ERROR(library.status());
  handle_ = std::make_unique<NcclHandle>(*library.value(), backend_);
  FOREBAY_RETURN_IF_ERROR(agree_on_facts());
  FOREBAY_RETURN_IF_ERROR(allocate());
  FOREBAY_RETURN_IF_ERROR(join());
  Result<std::unique_ptr<Communicator>> watch = control_->split(0, rank());
  FOREBAY_RETURN_IF_ERROR(watch.status());
  {
    const std::lock_guard lock(mutex_);
    watch_ = std::move(watch).value();
    ended_ = false;
  }
  for (int r = 0; r < size(); ++r) watched_.push_back(r);
  watcher_ = std::thread([self = shared_from_this()] { self->watch(); });
  return warm_up();
}

Status Member::agree_on_facts() {
  const Facts mine{.version = handle_->library().facts.version,
                   .order = static_cast<std::int64_t>(options_.order),
                   .adopted = options_.adopted != nullptr};
  std::vector<Facts> all(ranks());
  FOREBAY_RETURN_IF_ERROR(
      control_->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
  return compare_facts(all);
}

// The id is a secret: it goes through `control` and nowhere else.
Status Member::join() {
  if (options_.adopted != nullptr) {
    FOREBAY_RETURN_IF_ERROR(handle_->adopt(options_.adopted, size(), rank()));
    return control_->barrier();
  }
  nccl::NcclUniqueId mine{};
  if (rank() == 0) {
    const NcclLibrary& library = handle_->library();
    if (const nccl::NcclResult result = library.ncclGetUniqueId(&mine);
        result != nccl::NcclResult::kSuccess) {
      return nccl_failure(library, result, nullptr, "ncclGetUniqueId", "start a group of ranks over NCCL");
    }
  }
  std::vector<nccl::NcclUniqueId> all(ranks());
  FOREBAY_RETURN_IF_ERROR(
      control_->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
  FOREBAY_RETURN_IF_ERROR(
      handle_->init(size(), all[0], rank(), limit(), [this] { return control_->status(); }));
  return control_->barrier();
}

Status Member::allocate() {
  slots_.resize(kSlots);
  for (Slot& slot : slots_) {
    for (Event* event : {&slot.come, &slot.done}) {
      Result<Event> created = backend_.event_create();
      FOREBAY_RETURN_IF_ERROR(created.status());
      *event = created.value();
    }
  }
  FOREBAY_RETURN_IF_ERROR(fingerprints_.allocate(kSlots * (1 + ranks()) * sizeof(NcclOperation)));
  Result<DevicePtr> block = backend_.alloc(kSlots * ranks() * sizeof(NcclOperation));
  FOREBAY_RETURN_IF_ERROR(block.status());
  device_operations_ = block.value();
  return {};
}

// NCCL connects two ranks when they first exchange something, and the rank that comes first waits in the
// call. Here that happens once for all of them.
Status Member::warm_up() {
  Result<Stream> created = backend_.stream_create();
  FOREBAY_RETURN_IF_ERROR(created.status());
  const Stream stream = created.value();
  Slot slot;
  slot.operation.fingerprint = {.sequence = kWarmUpSequence,
                                .operation = static_cast<std::uint32_t>(Operation::kBarrier)};
  slot.compared = Compared::kAll;
  Status status = issue(slot, stream, [&](NcclComm comm, std::byte* own, std::byte* all) {
    return exchange_in_pairs(comm, {}, own, all, stream);
  });
  if (status.ok()) {
    status = issue(slot, stream, [&](NcclComm comm, std::byte* own, std::byte* all) {
      return NcclStep{handle_->library().ncclAllGather(own, all, sizeof(NcclOperation), NcclType::kUint8,
                                                       comm, native(stream)),
                      "ncclAllGather"};
    });
  }
  while (status.ok() && !is_empty()) {
    std::this_thread::sleep_for(kPoll);
    status = this->status();
  }
  // Nobody begins before all are here. What fails from now on, on a rank that is ahead, is this
  // communicator's failure and not that of creating it.
  if (status.ok()) static_cast<void>(control_->barrier());
  const Status given_back = backend_.stream_destroy(stream);
  return status.ok() ? given_back : status;
}

void Member::give_back() noexcept {
  bool drained = true;
  const Clock::time_point limit = Clock::now() + kDrainMax;
  for (std::uint64_t n = oldest_; n != next_ && drained; ++n) {
    // An operation that could not be queued whole has recorded the event too. A device that answers nothing
    // uses nothing any more.
    for (Result<bool> done = backend_.event_query(slot(n).done); done.ok() && !done.value();
         done = backend_.event_query(slot(n).done)) {
      if (Clock::now() >= limit) {
        drained = false;
        break;
      }
      std::this_thread::sleep_for(kPoll);
    }
  }
  handle_.reset();
  for (const Slot& slot : slots_) {
    for (const Event event : {slot.come, slot.done}) {
      if (event.handle != nullptr) static_cast<void>(backend_.event_destroy(event));
    }
  }
  if (!drained) {
    log(LogLevel::kWarning,
        "work queued over NCCL on %s did not end after its communicator failed; the memory it may use is "
        "left "
        "to it",
        backend_.capabilities().name);
    fingerprints_.abandon();
  } else if (device_operations_ != nullptr) {
    static_cast<void>(backend_.free(device_operations_));
  }
}

// --- failure ---

Status Member::status() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
  }
  if (const Status status = control_->status(); !status.ok()) return fail(status);
  if (const Status status = drain(); !status.ok()) return fail(status);
  return {};
}

Status Member::fail(const Status& cause) noexcept {
  std::shared_ptr<Communicator> watch;
  Status first;
  try {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_.ok()) return failure_;
    }
    control_->abort(cause);
    first = control_->status();
    if (first.ok()) first = cause;
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
    failure_ = first;
    watch = watch_;
  } catch (const std::exception&) {
    // Out of memory for copies of the message; the peers' deadline does the rest.
  }
  if (handle_ != nullptr) handle_->interrupt();
  if (watch != nullptr) watch->abort(first);
  changed_.notify_all();
  return first;
}

// --- data operations ---

Status Member::await_slot() {
  const Clock::time_point give_up = limit();
  for (;;) {
    FOREBAY_RETURN_IF_ERROR(status());
    {
      const std::lock_guard lock(journal_mutex_);
      if (next_ - oldest_ < kSlots) return {};
    }
    // The watch finds what does not end; this is for a stream that works on other things for so long.
    if (Clock::now() >= give_up) {
      return fail_here(Status(StatusCode::kTimeout,
                              "cannot queue an operation over NCCL: none of the " + std::to_string(kSlots) +
                                  " before it was done within " + std::to_string(deadline_.count()) +
                                  " ms; queue fewer, or raise the deadline"));
    }
    std::this_thread::sleep_for(kPoll);
  }
}

template <typename Body>
Status Member::issue(const Slot& wanted, Stream stream, Body body) {
  FOREBAY_RETURN_IF_ERROR(await_slot());
  const std::uint64_t number = next_;  // Only this thread changes it.
  const std::size_t index = number % kSlots;
  const std::size_t record = sizeof(NcclOperation);
  NcclOperation* const out = fingerprints_.operations() + index;
  NcclOperation* const in = fingerprints_.operations() + kSlots + index * ranks();
  std::byte* const all = device_operations_ + index * ranks() * record;
  std::byte* const own = all + static_cast<std::size_t>(rank()) * record;
  Slot& slot = slots_[index];

  if (const Status recorded = backend_.event_record(slot.come, stream); !recorded.ok())
    return fail_here(recorded);
  {
    const std::lock_guard lock(journal_mutex_);
    const Slot events = slot;
    slot = wanted;
    slot.come = events.come;
    slot.done = events.done;
    if (is_recorded(wanted.operation)) slot.record = book_.issue(wanted.operation);
    ++next_;
    if (is_collective(wanted.operation) && is_recorded(wanted.operation)) ++collective_count_;
  }
  *out = wanted.operation;
  Status status = backend_.copy_async(own, out, record, stream);
  if (status.ok()) {
    status = handle_->submit(describe(wanted.operation), limit(),
                             [&](NcclComm comm) { return body(comm, own, all); });
  }
  if (status.ok() && wanted.compared != Compared::kNone)
    status = backend_.copy_async(in, all, ranks() * record, stream);
  const Status recorded = backend_.event_record(slot.done, stream);
  if (status.ok()) status = recorded;
  {
    const std::lock_guard lock(journal_mutex_);
    slot.queued = status.ok();
  }
  if (status.ok()) return {};
  if (is_recorded(wanted.operation)) book_.end(slot.record, wanted.operation, false);
  // The watch may have ended the call, and knows why.
  return fail_here(status);
}

NcclStep Member::exchange_in_pairs(NcclComm comm, const internal::Piece& piece, std::byte* own,
                                   std::byte* all, Stream stream) const {
  const NcclLibrary& library = handle_->library();
  const std::size_t record = sizeof(NcclOperation);
  NcclStep step;
  const auto send = [&](const std::byte* source, std::size_t bytes, int peer) {
    if (step.ok() && bytes > 0)
      step = {library.ncclSend(source, bytes, NcclType::kUint8, peer, comm, native(stream)), "ncclSend"};
  };
  const auto recv = [&](std::byte* target, std::size_t bytes, int peer) {
    if (step.ok() && bytes > 0)
      step = {library.ncclRecv(target, bytes, NcclType::kUint8, peer, comm, native(stream)), "ncclRecv"};
  };
  // Each rank starts with its right neighbour, so that no rank is sent to by all at once.
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size();
    const int from = (rank() + size() - i) % size();
    send(own, record, to);
    send(piece.source + static_cast<std::size_t>(to) * piece.source_stride, piece.bytes, to);
    recv(all + static_cast<std::size_t>(from) * record, record, from);
    recv(piece.target + static_cast<std::size_t>(from) * piece.target_stride, piece.bytes, from);
  }
  std::byte* const place = piece.target + static_cast<std::size_t>(rank()) * piece.target_stride;
  if (piece.keep_own && place != piece.source) {
    send(piece.source, piece.bytes, rank());
    recv(place, piece.bytes, rank());
  }
  return step;
}

Status Member::queue_transfer(const internal::Collective& collective, Stream stream) {
  const internal::Piece& piece = collective.piece;
  Slot slot;
  slot.operation.fingerprint = collective.fingerprint;
  slot.operation.fingerprint.sequence = collective_sequence_++;
  slot.compared = Compared::kAll;
  const bool is_gather = piece.keep_own;
  const bool is_contiguous = size() == 1 || piece.target_stride == piece.bytes;
  return issue(slot, stream, [&](NcclComm comm, std::byte* own, std::byte* all) {
    if (!is_gather || !is_contiguous) return exchange_in_pairs(comm, piece, own, all, stream);
    const NcclLibrary& library = handle_->library();
    NcclStep step{
        library.ncclAllGather(own, all, sizeof(NcclOperation), NcclType::kUint8, comm, native(stream)),
        "ncclAllGather"};
    if (step.ok() && piece.bytes > 0) {
      step.result = library.ncclAllGather(piece.source, piece.target, piece.bytes, NcclType::kUint8, comm,
                                          native(stream));
    }
    return step;
  });
}

Status Member::reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) {
  const bool is_contiguous = arguments.source_stride_bytes == arguments.count * sizeof(float);
  const bool is_fast = options_.order == NcclOrder::kFast && size() > 1 && is_contiguous &&
                       arguments.count > 0 && arguments.type == DataType::kFloat32;
  if (!is_fast) {
    // Alone, there is nobody to exchange with: only the sum is queued.
    if (size() > 1)
      FOREBAY_RETURN_IF_ERROR(queue_transfer(internal::reduce_scatter_transfer(arguments), stream));
    if (arguments.count == 0) return {};
    const Status summed =
        kernels_.accumulate(internal::accumulate_arguments(arguments, rank(), size()), stream);
    return summed.ok() ? summed : fail_here(summed);
  }
  const internal::Collective collective = internal::reduce_scatter_transfer(arguments);
  std::byte* const sum = arguments.first ? reinterpret_cast<std::byte*>(arguments.target) : arguments.receive;
  Slot slot;
  slot.operation.fingerprint = collective.fingerprint;
  slot.operation.fingerprint.sequence = collective_sequence_++;
  slot.compared = Compared::kAll;
  FOREBAY_RETURN_IF_ERROR(issue(slot, stream, [&](NcclComm comm, std::byte* own, std::byte* all) {
    const NcclLibrary& library = handle_->library();
    NcclStep step{
        library.ncclAllGather(own, all, sizeof(NcclOperation), NcclType::kUint8, comm, native(stream)),
        "ncclAllGather"};
    if (step.ok()) {
      step = {library.ncclReduceScatter(arguments.source, sum, arguments.count, NcclType::kFloat32,
                                        nccl::NcclReduction::kSum, comm, native(stream)),
              "ncclReduceScatter"};
    }
    return step;
  }));
  if (arguments.first) return {};
  const Status added = kernels_.accumulate({.own = sum,
                                            .received = nullptr,
                                            .received_stride_bytes = 0,
                                            .target = arguments.target,
                                            .count = arguments.count,
                                            .rank = 0,
                                            .rank_count = 1,
                                            .type = DataType::kFloat32,
                                            .first = false},
                                           stream);
  return added.ok() ? added : fail_here(added);
}

Status Member::all_gather(const AllGatherArguments& arguments, Stream stream) {
  return queue_transfer(internal::all_gather_transfer(arguments), stream);
}

Status Member::send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) {
  Slot slot;
  slot.operation = {.fingerprint = {.sequence = sent_to_[static_cast<std::size_t>(peer)]++,
                                    .count = bytes,
                                    .operation = static_cast<std::uint32_t>(Operation::kSend)},
                    .peer = peer,
                    .tag = tag};
  return issue(slot, stream, [&](NcclComm comm, std::byte* own, std::byte*) {
    const NcclLibrary& library = handle_->library();
    NcclStep step{library.ncclSend(own, sizeof(NcclOperation), NcclType::kUint8, peer, comm, native(stream)),
                  "ncclSend"};
    if (step.ok() && bytes > 0)
      step.result = library.ncclSend(source, bytes, NcclType::kUint8, peer, comm, native(stream));
    return step;
  });
}

Status Member::recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) {
  Slot slot;
  slot.operation = {.fingerprint = {.sequence = received_from_[static_cast<std::size_t>(peer)]++,
                                    .count = bytes,
                                    .operation = static_cast<std::uint32_t>(Operation::kRecv)},
                    .peer = peer,
                    .tag = tag};
  slot.compared = Compared::kPeer;
  return issue(slot, stream, [&](NcclComm comm, std::byte*, std::byte* all) {
    const NcclLibrary& library = handle_->library();
    NcclStep step{library.ncclRecv(all + static_cast<std::size_t>(peer) * sizeof(NcclOperation),
                                   sizeof(NcclOperation), NcclType::kUint8, peer, comm, native(stream)),
                  "ncclRecv"};
    if (step.ok() && bytes > 0)
      step.result = library.ncclRecv(target, bytes, NcclType::kUint8, peer, comm, native(stream));
    return step;
  });
}

Status Member::register_buffer(DevicePtr address, std::size_t bytes) {
  FOREBAY_RETURN_IF_ERROR(status());
  const NcclLibrary& library = handle_->library();
  const std::string what = "register " + std::to_string(bytes) + " bytes with NCCL";
  if (!library.facts.can_register) {
    return Status(StatusCode::kUnsupported, "cannot " + what + ": " + library.facts.path +
                                                " has no ncclCommRegister; go on without, or load NCCL 2.19 "
                                                "or newer");
  }
  if (address == nullptr || bytes == 0 || registered_.count(address) != 0) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot " + what + ": there is nothing there or it is registered; give a buffer once");
  }
  void* registration = nullptr;
  const Status status = handle_->call(what, limit(), [&](NcclComm comm) {
    return NcclStep{library.ncclCommRegister(comm, address, bytes, &registration), "ncclCommRegister"};
  });
  if (!status.ok()) return fail_here(status);
  registered_[address] = registration;
  return {};
}

Status Member::deregister_buffer(DevicePtr address) {
  FOREBAY_RETURN_IF_ERROR(status());
  const auto found = registered_.find(address);
  if (found == registered_.end()) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot deregister a buffer with NCCL: none is registered there; give the address of "
                  "register_buffer");
  }
  void* const registration = found->second;
  registered_.erase(found);
  const Status status = handle_->call("deregister a buffer with NCCL", limit(), [&](NcclComm comm) {
    return NcclStep{handle_->library().ncclCommDeregister(comm, registration), "ncclCommDeregister"};
  });
  return status.ok() ? status : fail_here(status);
}

// --- the journal ---

Status Member::drain(NcclHeartbeat* open) {
  const std::lock_guard lock(journal_mutex_);
  for (; oldest_ != next_; ++oldest_) {
    Slot& first = slot(oldest_);
    if (!first.started) {
      // One that is being queued is under way too: its thread waits in NCCL.
      const Result<bool> come = first.queued ? backend_.event_query(first.come) : Result<bool>(true);
      FOREBAY_RETURN_IF_ERROR(come.status());
      if (come.value()) {
        first.started = true;
        first.started_at = Clock::now();
        if (is_recorded(first.operation)) book_.begin(first.record);
      }
    }
    if (!first.queued) break;
    const Result<bool> done = backend_.event_query(first.done);
    FOREBAY_RETURN_IF_ERROR(done.status());
    if (!done.value()) break;
    const Status compared = compare(first, oldest_ % kSlots);
    if (is_recorded(first.operation)) book_.end(first.record, first.operation, compared.ok());
    FOREBAY_RETURN_IF_ERROR(compared);
  }
  if (open == nullptr) return {};
  open->collective_count = collective_count_;
  open->open_count = 0;
  for (std::uint64_t n = oldest_; n != next_ && open->open_count < internal::kNcclWindow; ++n)
    open->open[open->open_count++] = slot(n).operation;
  return {};
}

Status Member::compare(const Slot& done, std::size_t index) const {
  if (done.compared == Compared::kNone) return {};
  const NcclOperation* const theirs = fingerprints_.operations() + kSlots + index * ranks();
  for (int r = 0; r < size(); ++r) {
    if (r == rank() || (done.compared == Compared::kPeer && r != done.operation.peer)) continue;
    FOREBAY_RETURN_IF_ERROR(
        compare_operations(rank(), done.operation, r, theirs[static_cast<std::size_t>(r)]));
  }
  return {};
}

bool Member::is_empty() {
  const std::lock_guard lock(journal_mutex_);
  return oldest_ == next_;
}

// --- the watch ---

void Member::watch() noexcept {
  bool over = false;
  bool failed = false;
  bool hurries = false;
  while (!over && !failed) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, hurries ? kLeavePoll : kNcclHeartbeat,
                        [&] { return !failure_.ok() || leaving_ != hurries; });
      hurries = leaving_;
      failed = !failure_.ok();
    }
    if (failed) break;
    try {
      if (const Status status = beat(&over); !status.ok()) {
        static_cast<void>(fail(status));
        failed = true;
      }
    } catch (const std::exception&) {
      static_cast<void>(
          fail(Status(StatusCode::kOutOfMemory, "cannot watch an NCCL communicator: out of memory")));
      failed = true;
    }
  }
  if (failed) handle_->abort();
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

Status Member::beat(bool* over) {
  NcclHeartbeat mine;
  FOREBAY_RETURN_IF_ERROR(drain(&mine));
  FOREBAY_RETURN_IF_ERROR(control_->status());
  FOREBAY_RETURN_IF_ERROR(handle_->async_error());
  FOREBAY_RETURN_IF_ERROR(check_deadline());
  bool leaving = false;
  {
    const std::lock_guard lock(mutex_);
    leaving = leaving_;
  }
  const Clock::time_point now = Clock::now();
  if (leaving && mine.open_count == 0) {
    if (!std::exchange(has_left_, true)) leaving_since_ = now;
    mine.state = now - leaving_since_ < kNcclGoodbyeMax ? NcclMemberState::kLeaving : NcclMemberState::kGone;
  }
  FOREBAY_RETURN_IF_ERROR(exchange_heartbeats(mine));

  const auto all_watched = [&](auto condition) {
    return std::all_of(watched_.begin(), watched_.end(),
                       [&](int r) { return condition(table_[static_cast<std::size_t>(r)].state); });
  };
  if (all_watched([](NcclMemberState state) { return state != NcclMemberState::kRunning; })) {
    handle_->close(static_cast<int>(watched_.size()) == size(), limit());
    *over = true;
    return {};
  }
  if (all_watched([](NcclMemberState state) { return state != NcclMemberState::kGone; })) return {};
  FOREBAY_RETURN_IF_ERROR(part(mine.state == NcclMemberState::kGone));
  if (mine.state != NcclMemberState::kGone) return {};
  handle_->close(false, limit());
  *over = true;
  return {};
}

Status Member::exchange_heartbeats(const NcclHeartbeat& mine) {
  std::vector<NcclHeartbeat> all(watched_.size());
  const Status exchanged =
      watch_->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  if (!exchanged.ok()) {
    // A cause that came this way is the first one already; anything else was found here.
    const Status known = control_->status();
    return known.ok() ? exchanged : known;
  }
  const Clock::time_point now = Clock::now();
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    const auto r = static_cast<std::size_t>(watched_[i]);
    if (all[i].state != NcclMemberState::kRunning && table_[r].state == NcclMemberState::kRunning)
      left_at_[r] = now;
    table_[r] = all[i];
  }
  return judge_heartbeats(table_);
}

// All watched ranks come here in the same heartbeat: those that go and those that stay watch apart from then.
Status Member::part(bool gone) {
  Result<std::unique_ptr<Communicator>> rest = watch_->split(gone ? 1 : 0, rank());
  FOREBAY_RETURN_IF_ERROR(rest.status());
  std::erase_if(watched_, [&](int r) {
    return (table_[static_cast<std::size_t>(r)].state == NcclMemberState::kGone) != gone;
  });
  Status failure;
  std::shared_ptr<Communicator> watch = std::move(rest).value();
  {
    const std::lock_guard lock(mutex_);
    std::swap(watch_, watch);
    failure = failure_;
  }
  return failure;
}

Status Member::check_deadline() {
  NcclOperation operation;
  Clock::duration waited{};
  {
    const std::lock_guard lock(journal_mutex_);
    if (oldest_ == next_ || !slot(oldest_).started) return {};
    operation = slot(oldest_).operation;
    waited = Clock::now() - slot(oldest_).started_at;
  }
  if (!is_collective(operation)) {
    // A peer that has left has done its part of what it issued; what remains open so long it did not issue.
    const auto peer = static_cast<std::size_t>(operation.peer);
    const bool left = table_[peer].state != NcclMemberState::kRunning;
    if (left && waited > kNcclGoodbyeMax && Clock::now() - left_at_[peer] > kNcclGoodbyeMax) {
      return Status(StatusCode::kPeerLost, describe(operation) + " on rank " + std::to_string(rank()) +
                                               ": rank " + std::to_string(operation.peer) +
                                               " left before it; see why it ended");
    }
  }
  return waited < deadline_ ? Status() : operation_timeout(rank(), operation, table_, deadline_);
}

void Member::leave() noexcept {
  std::unique_lock lock(mutex_);
  leaving_ = true;
  changed_.notify_all();
  // The watch ends after what is queued is done, or fails at the deadline; then it has its own waits.
  const milliseconds patience = deadline_ + deadline_ + kDrainMax;
  const bool ended = changed_.wait_for(lock, patience, [&] { return ended_; });
  lock.unlock();
  if (!watcher_.joinable()) return;
  if (ended) {
    watcher_.join();
    return;
  }
  log(LogLevel::kError,
      "NCCL does not come back from ending a communicator; the thread that waits for it is left to it");
  watcher_.detach();
  // What that thread uses stays for ever: when it comes back, the backend may be gone.
  static_cast<void>(new std::shared_ptr<Member>(shared_from_this()));
}

class NcclCommunicatorImpl final : public NcclCommunicator {
 public:
  explicit NcclCommunicatorImpl(std::shared_ptr<Member> member) : member_(std::move(member)) {}
  ~NcclCommunicatorImpl() override { member_->leave(); }

  int rank() const noexcept override { return member_->rank(); }
  int size() const noexcept override { return member_->size(); }
  const char* name() const noexcept override { return "nccl"; }

  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(member_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_arguments(arguments, size()));
    return member_->reduce_scatter(arguments, stream);
  }

  Status all_gather(const AllGatherArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(member_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_arguments(arguments, size()));
    return member_->all_gather(arguments, stream);
  }

  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(member_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_peer("send", source, bytes, peer, rank(), size()));
    return member_->send(source, bytes, peer, tag, stream);
  }

  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(member_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_peer("recv", target, bytes, peer, rank(), size()));
    return member_->recv(target, bytes, peer, tag, stream);
  }

  Status exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    FOREBAY_RETURN_IF_ERROR(member_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_exchange(mine, all, size()));
    return controlled(Operation::kExchange, mine.size(),
                      [&](Communicator& control) { return control.exchange(mine, all); });
  }

  Status barrier() override {
    FOREBAY_RETURN_IF_ERROR(member_->status());
    return controlled(Operation::kBarrier, 0, [](Communicator& control) { return control.barrier(); });
  }

  Result<std::unique_ptr<Communicator>> split(int color, int key) override {
    FOREBAY_RETURN_IF_ERROR(member_->status());
    std::unique_ptr<Communicator> part_control;
    FOREBAY_RETURN_IF_ERROR(controlled(Operation::kSplit, 0, [&](Communicator& control) {
      Result<std::unique_ptr<Communicator>> result = control.split(color, key);
      FOREBAY_RETURN_IF_ERROR(result.status());
      part_control = std::move(result).value();
      return Status();
    }));
    NcclOptions options = member_->options();
    options.adopted = nullptr;  // That one is of all ranks.
    Result<std::unique_ptr<NcclCommunicator>> part =
        create_nccl_communicator(std::move(part_control), member_->backend(), member_->kernels(), options);
    FOREBAY_RETURN_IF_ERROR(part.status());
    return std::unique_ptr<Communicator>(std::move(part).value());
  }

  Status status() const override { return member_->status(); }

  void abort(const Status& cause) noexcept override {
    if (!cause.ok()) {
      static_cast<void>(member_->fail(cause));
      return;
    }
    static_cast<void>(
        member_->fail_here(Status(StatusCode::kPeerLost, "it aborted the communicator without a cause")));
  }

  // Whatever fails a rank has failed `control` before, so what it takes no vote after is the same.
  Status vote(std::uint64_t step, std::span<const std::byte> decision) override {
    return member_->control().vote(step, decision);
  }
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override {
    return member_->control().survivors_vote(step);
  }

  Traffic traffic() const override { return member_->book().traffic(); }
  std::vector<OperationTraffic> operation_traffic() const override {
    return member_->book().operation_traffic();
  }
  std::vector<OperationRecord> last_operations() const override { return member_->book().last_operations(); }

  Status register_buffer(DevicePtr address, std::size_t bytes) override {
    return member_->register_buffer(address, bytes);
  }
  Status deregister_buffer(DevicePtr address) override { return member_->deregister_buffer(address); }

 private:
  // With a control operation everything fails, and the first cause is what counts.
  template <typename Function>
  Status controlled(Operation operation, std::uint64_t bytes, Function function) {
    const NcclOperation issued{.fingerprint = {.sequence = control_sequence_++,
                                               .count = bytes,
                                               .operation = static_cast<std::uint32_t>(operation)}};
    const std::uint64_t number = member_->book().issue(issued);
    member_->book().begin(number);
    const Status status = function(member_->control());
    member_->book().end(number, issued, status.ok());
    return status.ok() ? status : member_->fail(status);
  }

  const std::shared_ptr<Member> member_;  // Shared with the thread of its watch.
  std::uint64_t control_sequence_ = 0;    // Control operations are issued from one thread at a time.
};

}  // namespace

Result<std::unique_ptr<NcclCommunicator>> create_nccl_communicator(std::unique_ptr<Communicator> control,
                                                                   CudaBackend& backend, Kernels& kernels,
                                                                   const NcclOptions& options) {
  const auto member = std::make_shared<Member>(std::move(control), backend, kernels, options);
  const Status opened = member->open();
  if (opened.ok()) {
    return std::unique_ptr<NcclCommunicator>(std::make_unique<NcclCommunicatorImpl>(member));
  }
  Status first = member->fail_here(opened);
  member->leave();
  return first;
}

}  // namespace forebay
