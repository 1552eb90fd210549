// Communicator: a set of ranks and the operations they do together. It is the second of forebay's three
// interfaces. `local` (ranks as threads of one process) is its reference implementation, and one conformance
// suite tests every implementation.
//
// Two planes. Data operations take device memory and a stream: they queue and return at once. (One exception:
// `local` ranks in memory that the host does not reach wait, at most the deadline, until their peers issue
// the operation too.) Control operations take small host memory and block. Every rank of a communicator
// issues the same operations in the same order, its data operations on one stream. A fingerprint {sequence,
// operation, type, count} of each operation travels; a mismatch is an error that names both ranks. Over
// `nccl` fingerprints travel in batches, so a mismatch of equal sizes may be found some operations later, but
// before a vote that follows a gather which decides.
//
// Exactness. `reduce_scatter` sends each slice to its owner, which takes the bytes of a ring: (N-1)/N of the
// buffer. The owner adds in rank order in fp32, so the result depends neither on the bucket size nor on the
// order in which messages arrive. An all_reduce is by definition a reduce_scatter followed by an all_gather.
//
// Failure. Nothing waits past the deadline. After the first failure the communicator stays failed: status()
// and every later call return that failure, on all ranks, and queued data operations do nothing. A data
// operation that fails does not say so itself: wait for the stream, then ask status() before using the bytes.
//
// The commit point. An operation may end well on one rank and fail on another, so ranks could disagree about
// a decision that they take together from its bytes. Therefore each rank votes for the decision before it
// acts on it. Once the communicator has failed it takes no more votes, and a rank that could not vote asks
// whether any other rank did. Then either all ranks act on the decision, or none does.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "forebay/backend.h"
#include "forebay/data_type.h"
#include "forebay/span.h"

namespace forebay {

// Payload that went to, or came from, other ranks since the communicator was made.
// Units: bytes: elements times element size. Fingerprints and other headers do not count, nor does a rank's
//        own slice, which is not sent.
struct Traffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

// The traffic of one kind of operation.
struct OperationTraffic {
  const char* operation = "";  // "reduce_scatter".
  std::uint64_t count = 0;     // Operations that ended well.
  std::vector<Traffic> peers;  // By rank; zero for this rank.
};

enum class OperationState : std::uint8_t { kQueued, kRunning, kDone, kFailed };

// One of the last operations: a record for finding out why a run failed.
// Units: times since the communicator was made; zero for a state that was not reached.
struct OperationRecord {
  std::string what;  // "all_gather of 4096 bytes (operation 7)".
  OperationState state = OperationState::kQueued;
  std::chrono::nanoseconds queued{0};
  std::chrono::nanoseconds begun{0};
  std::chrono::nanoseconds ended{0};
};

// The longest decision that can be voted for.
inline constexpr std::size_t kDecisionBytesMax = 256;

// Shape: `source` has size() slices of `count` elements; `target` has one slice in fp32.
struct ReduceScatterArguments {
  const std::byte* source;          // Slice 0 of this rank's contribution.
  std::size_t source_stride_bytes;  // From one slice to the next, for instance a row of a larger buffer.
  std::size_t count;                // Elements of one slice.
  DataType type;
  std::byte* receive;  // Staging of the caller: staging_bytes(count, type). Its contents are undefined after.
  float* target;       // The rank-ordered fp32 sum of slice rank() goes here, or is added here.
  bool first;          // True: target = sum. False: target = target + sum.
};

// Shape: `source` is one slice; `target` has size() slices.
struct AllGatherArguments {
  const std::byte* source;          // This rank's slice; it may already be in its place in `target`.
  std::byte* target;                // Slice 0 of the whole.
  std::size_t target_stride_bytes;  // Slice r is at target + r * target_stride_bytes.
  std::size_t bytes;                // Bytes of one slice.
  // The ranks take a decision from these bytes and vote for it: before the vote, `nccl` compares all
  // operations up to this one. The same on every rank.
  bool decides = false;
};

// Threads: data operations come from one thread at a time, control operations from one thread at a time; the
//          other functions from any thread.
// Errors:  every operation returns kInvalidArgument for arguments that cannot be right, and after the first
//          failure that failure: kTimeout, kPeerLost, kInvalidArgument for ranks that disagree, or another
//          rank's.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  // "local", "shm", "gloo", "nccl": for reports.
  virtual const char* name() const noexcept = 0;

  // --- data plane ---
  // Order:    queued on `stream`, in the same order on every rank.
  // Requires: the memory stays valid until the stream is past the operation.

  // Gives each rank the sum of its slice over all ranks.
  virtual Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) = 0;
  // Gives every rank the slices of all ranks.
  virtual Status all_gather(const AllGatherArguments& arguments, Stream stream) = 0;
  // Bytes that a reduce_scatter of slices of `count` elements needs at `receive`.
  virtual std::size_t staging_bytes(std::size_t count, DataType type) const {
    return static_cast<std::size_t>(size()) * count * element_bytes(type);
  }
  // One message from rank to rank. A send and its recv are matched by (peer, tag) in the order of issue and
  // have the same size. A send may wait for its recv.
  virtual Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
                      Stream stream) = 0;
  virtual Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) = 0;

  // --- control plane ---
  // These block, at most the deadline.
  // Requires: no data operation is queued that a peer's control operation could wait for.

  // Every rank gives `mine`; `all` gets the pieces of all ranks in rank order. Counts as payload.
  // Shape:    `all` has size() pieces of mine.size() bytes.
  virtual Status exchange(Span<const std::byte> mine, Span<std::byte> all) = 0;
  // Returns when every rank has called it.
  virtual Status barrier() = 0;
  // Makes a communicator of the ranks that give the same `color`, ordered by (key, rank). Every rank calls
  // it. A communicator and those split from it fail together, with one first failure. This one may be
  // destroyed before them.
  virtual Result<std::unique_ptr<Communicator>> split(int color, int key) = 0;

  // --- failure ---
  // The first failure of all ranks, or ok.
  virtual Status status() const = 0;
  // Fails this communicator on every rank that can be reached, with `cause`. Never blocks past the deadline.
  virtual void abort(const Status& cause) noexcept = 0;

  // --- the commit point ---
  // Threads: any, host functions of streams too.

  // This rank has all it needs for `step` and takes `decision`. If ok, it may act on the decision.
  // Otherwise the communicator had failed before, and no vote was recorded.
  // Requires: `step` is greater than any before; at most kDecisionBytesMax bytes; the same decision on
  //           every rank that votes for the step.
  virtual Status vote(std::uint64_t step, Span<const std::byte> decision) = 0;
  // Once vote() has refused: the decision that some rank voted for, or nothing; the same on every survivor.
  // Waits at most some seconds for the survivors' votes, however long the deadline is.
  virtual std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) = 0;

  // --- accounts ---
  virtual Traffic traffic() const = 0;
  // The same by kind of operation and by peer, for the kinds that were used, in no particular order.
  virtual std::vector<OperationTraffic> operation_traffic() const = 0;
  // The last operations of both planes, the oldest first: those of this communicator, of the communicators
  // split from it, and of those it was split from.
  virtual std::vector<OperationRecord> last_operations() const = 0;
};

}  // namespace forebay
