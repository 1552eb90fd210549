#include "collectives/nccl/member.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "collectives/nccl/library.h"
#include "forebay/log.h"

namespace forebay::internal {
namespace {

using Clock = NcclHandle::Clock;

// The facts that must be the same on every rank.
struct Facts {
  std::int64_t version = 0;
  std::int64_t order = 0;
  std::int64_t adopted = 0;
};

Status compare_facts(const std::vector<Facts>& all) {
  for (std::size_t r = 1; r < all.size(); ++r) {
    const auto differ = [&](const std::string& first, const std::string& other, const char* try_this) {
      return invalid_argument("ranks disagree about NCCL: rank 0 has ", first, ", rank ", r, " has ", other,
                              "; ", try_this);
    };
    if (all[r].version != all[0].version) {
      return differ(nccl_version_text(static_cast<int>(all[0].version)),
                    nccl_version_text(static_cast<int>(all[r].version)),
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

}  // namespace

PinnedOperations::~PinnedOperations() {
  if (address_ == nullptr) return;
  static_cast<void>(backend_.unpin(address_));
  ::munmap(address_, bytes_);
}

Status PinnedOperations::allocate(std::size_t count) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  bytes_ = (count * sizeof(NcclOperation) + page - 1) / page * page;
  void* const address = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    return Status(StatusCode::kOutOfMemory, "cannot map ", bytes_,
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

// --- creation ---

NcclMember::NcclMember(std::unique_ptr<Communicator> control, CudaBackend& backend, Kernels& kernels,
                       const NcclOptions& options, NcclWorld world, const OperationBook* origin)
    : control_(std::move(control)),
      world_(std::move(world)),
      backend_(backend),
      kernels_(kernels),
      options_(options),
      deadline_(clamp_deadline(options.deadline)),
      sent_to_(static_cast<std::size_t>(control_->size())),
      received_from_(static_cast<std::size_t>(control_->size())),
      fingerprints_(backend),
      book_(origin == nullptr ? OperationBook(control_->rank(), control_->size())
                              : OperationBook(control_->rank(), *origin,
                                              describe_group(world_.numbers, world_.size), world_.numbers)),
      table_(static_cast<std::size_t>(control_->size())),
      left_at_(static_cast<std::size_t>(control_->size())) {}
Status NcclMember::open() {
  FOREBAY_ASSIGN_OR_RETURN(const NcclLibrary* library, NcclLibrary::get(options_.library));
  handle_ = std::make_unique<NcclHandle>(*library, backend_);
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
  try {
    watcher_ = std::thread([self = shared_from_this()] { self->watch(); });
  } catch (const std::system_error& error) {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    return Status(StatusCode::kUnavailable,
                  "cannot start the thread that watches a communicator: ", error.what(),
                  "; end other processes, or raise ulimit -u or -v");
  }
  return warm_up();
}

Status NcclMember::agree_on_facts() {
  const Facts mine{.version = handle_->library().facts.version,
                   .order = static_cast<std::int64_t>(options_.order),
                   .adopted = options_.adopted != nullptr};
  std::vector<Facts> all(ranks());
  FOREBAY_RETURN_IF_ERROR(
      control_->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
  return compare_facts(all);
}

// The id is a secret: it goes through `control` and nowhere else.
Status NcclMember::join() {
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

Status NcclMember::allocate() {
  slots_.resize(kNcclSlots);
  for (Slot& slot : slots_) {
    for (Event* event : {&slot.come, &slot.done}) {
      FOREBAY_ASSIGN_OR_RETURN(*event, backend_.event_create());
    }
  }
  constexpr std::size_t kMessages = 2 * kNcclSlots;
  constexpr std::size_t kInBatches = kNcclBatches * kNcclBatch;  // For one rank.
  FOREBAY_RETURN_IF_ERROR(fingerprints_.allocate((1 + ranks()) * kInBatches + kMessages));
  FOREBAY_ASSIGN_OR_RETURN(device_operations_,
                           backend_.alloc((ranks() * kInBatches + kMessages) * sizeof(NcclOperation)));
  return {};
}

// NCCL connects two ranks at their first exchange, and the rank that comes first waits in the call. Here all
// pairs are connected once.
Status NcclMember::warm_up() {
  FOREBAY_ASSIGN_OR_RETURN(const Stream stream, backend_.stream_create());
  Status status = queue_connections(stream);
  while (status.ok() && !is_empty()) {
    std::this_thread::sleep_for(kNcclPoll);
    status = this->status();
  }
  // No rank begins before all are here. A failure from now on, on a rank that is ahead, is a failure of this
  // communicator and not of its creation.
  if (status.ok()) static_cast<void>(control_->barrier());
  const Status given_back = backend_.stream_destroy(stream);
  return status.ok() ? given_back : status;
}

void NcclMember::give_back() noexcept {
  bool drained = true;
  const Clock::time_point limit = Clock::now() + kNcclDrainMax;
  for (std::uint64_t n = oldest_; n != next_ && drained; ++n) {
    // An operation that was queued only in part has recorded the event too. A device that does not answer
    // uses nothing any more.
    for (Result<bool> done = backend_.event_query(slot(n).done); done.ok() && !done.value();
         done = backend_.event_query(slot(n).done)) {
      if (Clock::now() >= limit) {
        drained = false;
        break;
      }
      std::this_thread::sleep_for(kNcclPoll);
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
        "work queued over NCCL on %s did not end after its communicator failed; the memory that it may use "
        "is leaked",
        backend_.capabilities().name);
    fingerprints_.abandon();
  } else if (device_operations_ != nullptr) {
    static_cast<void>(backend_.free(device_operations_));
  }
}

// --- failure ---

Status NcclMember::status() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
  }
  if (const Status status = control_->status(); !status.ok()) return fail(status);
  if (const Status status = drain(); !status.ok()) return fail(status);
  return {};
}

Status NcclMember::fail(const Status& cause) noexcept {
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
    // Out of memory for copies of the message; the peers find the failure at their deadline.
  }
  if (handle_ != nullptr) handle_->interrupt();
  if (watch != nullptr) watch->abort(first);
  changed_.notify_all();
  return first;
}

// A fingerprint lies in one cache line and arrives whole. A batch that has come in part is left to drain().
Status NcclMember::compare_arrived() {
  Status compared;
  {
    const std::lock_guard lock(journal_mutex_);
    for (std::uint64_t n = oldest_; n != next_ && compared.ok(); ++n) {
      const Slot& open = slot(n);
      if (!open.queued || open.compared != Compared::kBatch) continue;
      const NcclOperation* const mine = own_batch(open.batch);
      const NcclOperation* const come = arrived_batches(open.batch);
      const auto is_missing = [](const NcclOperation& operation) {
        return operation.fingerprint.sequence == kNoSequence;
      };
      bool is_here = true;
      for (std::size_t i = 0; i < ranks() * kNcclBatch; ++i)
        is_here = is_here && (!is_missing(come[i]) || is_missing(mine[i % kNcclBatch]));
      if (is_here) compared = compare(open, n % kNcclSlots);
    }
  }
  return compared.ok() ? compared : fail(compared);
}

// --- the journal ---

Status NcclMember::drain(NcclHeartbeat* open) {
  const std::lock_guard lock(journal_mutex_);
  for (; oldest_ != next_; ++oldest_) {
    Slot& first = slot(oldest_);
    if (!first.started) {
      // An operation that is being queued is under way too: its thread waits in NCCL.
      FOREBAY_ASSIGN_OR_RETURN(const bool come,
                               first.queued ? backend_.event_query(first.come) : Result<bool>(true));
      if (come) {
        first.started = true;
        first.started_at = Clock::now();
        if (is_recorded(first.operation)) book_.begin(first.record);
      }
    }
    if (!first.queued) break;
    FOREBAY_ASSIGN_OR_RETURN(const bool done, backend_.event_query(first.done));
    if (!done) break;
    const Status compared = compare(first, oldest_ % kNcclSlots);
    if (is_recorded(first.operation)) book_.end(first.record, first.operation, compared.ok());
    FOREBAY_RETURN_IF_ERROR(compared);
    if (first.compared == Compared::kBatch) oldest_batch_ = first.batch + 1;
  }
  if (open == nullptr) return {};
  open->collective_count = collective_count_;
  std::copy(std::begin(last_), std::end(last_), open->last);
  open->open_count = 0;
  for (std::uint64_t n = oldest_; n != next_ && open->open_count < kNcclWindow; ++n)
    open->open[open->open_count++] = slot(n).operation;
  return {};
}

Status NcclMember::compare(const Slot& done, std::size_t index) const {
  if (done.compared == Compared::kNone) return {};
  if (done.compared == Compared::kPeer)
    return compare_with(done.operation.peer, done.operation, messages(index)[1]);
  const NcclOperation* const mine = own_batch(done.batch);
  const NcclOperation* const theirs = arrived_batches(done.batch);
  for (std::size_t i = 0; i < kNcclBatch; ++i) {
    for (std::size_t r = 0; r < ranks(); ++r)
      FOREBAY_RETURN_IF_ERROR(compare_with(static_cast<int>(r), mine[i], theirs[r * kNcclBatch + i]));
  }
  return {};
}

Status NcclMember::compare_with(int peer, const NcclOperation& mine, const NcclOperation& theirs) const {
  return compare_operations(world_rank(rank()), numbered(mine, world_.numbers), world_rank(peer), theirs);
}

bool NcclMember::is_empty() {
  const std::lock_guard lock(journal_mutex_);
  return oldest_ == next_;
}

}  // namespace forebay::internal
