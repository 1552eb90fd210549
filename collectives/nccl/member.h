// NcclMember: one rank of an NCCL communicator. It queues data operations, keeps a journal of operations that
// are not done, and has a thread that watches them and the peers. The contract is in nccl_communicator.h.
//
// Fingerprints. Each message carries its own. Collectives have theirs travel in batches, with every
// kNcclBatch-th collective and with one that decides, because they cost two copies and an all_gather.
// Heartbeats show the last batch too.
//
// First failure. A rank that fails gives its cause to control->abort(), which keeps the first of all ranks;
// every rank then takes control->status(). The watch's own communicator is aborted with it, so that a rank
// that waits in a heartbeat learns at once.
//
// Its parts: nccl/member.cc (joining, failing, the journal), nccl/operations.cc (data operations),
// nccl/member_watch.cc.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/nccl/handle.h"
#include "collectives/nccl/watch.h"
#include "collectives/operation_book.h"
#include "forebay/nccl_communicator.h"

namespace forebay::internal {

inline constexpr std::size_t kNcclSlots = kNcclInFlightMax;
// Batches of fingerprints in flight; a collective that begins one more waits.
inline constexpr std::size_t kNcclBatches = kNcclSlots / kNcclBatch;
inline constexpr std::size_t kNcclBatchBytes = kNcclBatch * sizeof(NcclOperation);
// The pause between two looks at work that the device or a peer will soon have done.
inline constexpr std::chrono::microseconds kNcclPoll{50};
// How long queued work may take to end after NCCL was aborted. After it the memory that the work uses is
// leaked.
inline constexpr std::chrono::milliseconds kNcclDrainMax{5000};
// The sequence of the operation that connects the ranks. No collective of a caller has it.
inline constexpr std::uint64_t kWarmUpSequence = ~std::uint64_t{0};
// The sequence of a fingerprint that has not come.
inline constexpr std::uint64_t kNoSequence = kWarmUpSequence - 1;

// Pinned host memory for fingerprints.
class PinnedOperations {
 public:
  explicit PinnedOperations(Backend& backend) : backend_(backend) {}
  ~PinnedOperations();
  PinnedOperations(const PinnedOperations&) = delete;
  PinnedOperations& operator=(const PinnedOperations&) = delete;

  Status allocate(std::size_t count);
  NcclOperation* data() const noexcept { return static_cast<NcclOperation*>(address_); }
  // Leaks the memory, because work may still use it.
  void abandon() noexcept { address_ = nullptr; }

 private:
  Backend& backend_;
  void* address_ = nullptr;
  std::size_t bytes_ = 0;
};

// NCCL's calls for bytes, on one communicator and stream.
struct NcclCalls {
  const NcclLibrary& library;
  nccl::NcclComm comm;
  nccl::NcclStream stream;

  NcclStep send(const void* source, std::size_t bytes, int peer) const {
    return {library.ncclSend(source, bytes, nccl::NcclType::kUint8, peer, comm, stream), "ncclSend"};
  }
  NcclStep recv(void* target, std::size_t bytes, int peer) const {
    return {library.ncclRecv(target, bytes, nccl::NcclType::kUint8, peer, comm, stream), "ncclRecv"};
  }
  // Requires: the target's slices lie side by side.
  NcclStep all_gather(const Piece& piece) const {
    if (piece.bytes == 0) return {};
    return {
        library.ncclAllGather(piece.source, piece.target, piece.bytes, nccl::NcclType::kUint8, comm, stream),
        "ncclAllGather"};
  }
};

// The place of a group among all ranks: by rank, the numbers in the world, which messages use; empty for the
// world itself.
struct NcclWorld {
  std::vector<int> numbers;
  int size = 1;
};

// Shared by the communicator and the thread that watches.
class NcclMember : public std::enable_shared_from_this<NcclMember> {
 public:
  // `origin`: the book of the communicator that this one was split from, or null.
  NcclMember(std::unique_ptr<Communicator> control, CudaBackend& backend, Kernels& kernels,
             const NcclOptions& options, NcclWorld world, const OperationBook* origin = nullptr);
  ~NcclMember() { give_back(); }
  NcclMember(const NcclMember&) = delete;
  NcclMember& operator=(const NcclMember&) = delete;

  int rank() const noexcept { return control_->rank(); }
  int size() const noexcept { return control_->size(); }
  Communicator& control() noexcept { return *control_; }
  CudaBackend& backend() noexcept { return backend_; }
  Kernels& kernels() noexcept { return kernels_; }
  const NcclOptions& options() const noexcept { return options_; }
  const NcclWorld& world() const noexcept { return world_; }
  int world_rank(int of) const { return number_of(world_.numbers, of); }

  // Joins the other ranks. Once, before anything else; collective.
  Status open();
  // Waits for queued operations, and leaves.
  void leave() noexcept;

  Status status();
  // Compares the fingerprints of operations that have arrived, without asking the device which operations are
  // done: for host functions of the stream that the operations are on.
  Status compare_arrived();
  // Fails this rank with the first failure of all ranks, which is `cause` unless a rank failed before.
  // Returns it.
  Status fail(const Status& cause) noexcept;
  Status fail_here(const Status& cause) noexcept {
    try {
      return fail(cause.with_context("rank " + std::to_string(world_rank(rank()))));
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
  // The fingerprints that come with an operation and are compared once it is done: none, that of the peer's
  // send, or a batch of each rank.
  enum class Compared : std::uint8_t { kNone, kPeer, kBatch };
  struct Slot {
    Event come;  // The stream has reached the operation.
    Event done;
    NcclOperation operation;
    Compared compared = Compared::kNone;
    std::uint64_t batch = 0;   // Its number, where a batch comes.
    std::uint64_t record = 0;  // Its number in the book.
    bool queued = false;       // All of it is on the stream.
    bool started = false;
    NcclHandle::Clock::time_point started_at;
  };

  // Where the fingerprints lie that travel with an operation: on the host, and as NCCL moves them.
  struct Luggage {
    const NcclOperation* mine = nullptr;  // Copied to piece.source, unless null.
    NcclOperation* theirs = nullptr;      // Copied from piece.target, unless null.
    std::size_t theirs_bytes = 0;
    Piece piece;  // Without bytes: none travel.
  };

  Slot& slot(std::uint64_t number) { return slots_[number % kNcclSlots]; }
  // The operations that connect the ranks are not in the book.
  static bool is_recorded(const NcclOperation& operation) noexcept {
    return operation.fingerprint.sequence != kWarmUpSequence;
  }
  std::size_t ranks() const noexcept { return static_cast<std::size_t>(size()); }
  NcclHandle::Clock::time_point limit() const { return NcclHandle::Clock::now() + deadline_; }

  // --- creation ---
  Status agree_on_facts();
  Status join();
  Status allocate();
  Status warm_up();
  void give_back() noexcept;

  // --- data operations ---

  // Queues an operation. `body(calls, luggage)` makes the NCCL calls; `luggage` is the Piece of the
  // fingerprints that travel with it.
  template <typename Body>
  Status issue(const NcclOperation& operation, Stream stream, Body body, bool decides = false);
  Status await_slot(bool needs_batch);
  // Takes note of the operation in its slot. Requires: journal_mutex_.
  Luggage pack(Slot& slot, std::size_t index, bool decides);
  // Makes NCCL connect all pairs of ranks, in both of the ways that operations use.
  Status queue_connections(Stream stream);
  Status queue_transfer(const Collective& collective, Stream stream, bool decides = false);
  NcclStep exchange_in_pairs(const NcclCalls& calls, const Piece& piece) const;

  // --- the journal ---

  // Takes finished operations out of the journal, and compares their fingerprints. `open`, if it is not null,
  // gets the oldest that are not done.
  Status drain(NcclHeartbeat* open = nullptr);
  Status compare(const Slot& done, std::size_t index) const;
  Status compare_with(int peer, const NcclOperation& mine, const NcclOperation& theirs) const;
  // Pinned memory: this rank's batches, those of all ranks as they came, and two fingerprints for each slot:
  // of a message and of its peer.
  NcclOperation* own_batch(std::uint64_t batch) const noexcept {
    return fingerprints_.data() + batch % kNcclBatches * kNcclBatch;
  }
  NcclOperation* arrived_batches(std::uint64_t batch) const noexcept {
    return fingerprints_.data() + (kNcclBatches + batch % kNcclBatches * ranks()) * kNcclBatch;
  }
  NcclOperation* messages(std::size_t index) const noexcept {
    return fingerprints_.data() + (1 + ranks()) * kNcclBatches * kNcclBatch + 2 * index;
  }
  bool is_empty();

  // --- the watch ---
  void watch() noexcept;
  // One heartbeat. `over`: this rank has left.
  Status beat(bool* over);
  Status check_deadline();
  Status exchange_heartbeats(const NcclHeartbeat& mine);
  Status part(bool gone);

  const std::unique_ptr<Communicator> control_;
  const NcclWorld world_;
  CudaBackend& backend_;
  Kernels& kernels_;
  const NcclOptions options_;
  const std::chrono::milliseconds deadline_;

  // Used by the thread that issues operations.
  std::uint64_t collective_sequence_ = 0;
  std::vector<std::uint64_t> sent_to_;
  std::vector<std::uint64_t> received_from_;
  std::map<DevicePtr, void*> registered_;

  // Set up by open().
  std::unique_ptr<NcclHandle> handle_;
  std::vector<Slot> slots_;                // The entries that the journal uses are guarded by journal_mutex_.
  DevicePtr device_operations_ = nullptr;  // kNcclBatches of all ranks, then two fingerprints for each slot.
  PinnedOperations fingerprints_;
  std::thread watcher_;

  OperationBook book_;

  std::mutex journal_mutex_;
  // Guarded by journal_mutex_: operations are numbered as they are issued.
  std::uint64_t oldest_ = 0;  // The oldest operation that is not done.
  std::uint64_t next_ = 0;
  std::uint64_t collective_count_ = 0;
  std::uint64_t oldest_batch_ = 0;  // The oldest that has not come.
  std::uint64_t next_batch_ = 0;    // The one that is being filled, with batch_count_ so far.
  std::size_t batch_count_ = 0;
  Fingerprint last_[kNcclBatch];  // As in heartbeats.

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  Status failure_;
  bool leaving_ = false;
  bool ended_ = true;                    // The watch's thread has nothing more to do; true before it starts.
  std::shared_ptr<Communicator> watch_;  // Shared with a thread that aborts it during a heartbeat.

  // Used by the thread that watches.
  std::vector<int> watched_;          // The ranks of watch_.
  std::vector<NcclHeartbeat> table_;  // By rank, the last heartbeat.
  std::vector<NcclHandle::Clock::time_point> left_at_;
  bool has_left_ = false;
  NcclHandle::Clock::time_point leaving_since_;
};

}  // namespace forebay::internal
