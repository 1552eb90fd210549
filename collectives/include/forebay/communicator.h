// Communicator: the ranks that communicate, and what they can do together. The second of forebay's three
// interfaces; `local` (ranks as threads of one process) is its reference implementation and one conformance
// suite judges all.
//
// There are two planes. Data operations take device memory and a stream, queue and return at once; only
// `local` ranks in memory that the host does not reach wait, at most the deadline, for their peers to issue
// the operation too. Control operations (`exchange`, `barrier`) take small host memory and block. Every rank
// of a communicator must issue the same operations in the same order, the data ones on one stream of its own;
// a fingerprint {sequence, operation, type, count} travels with each and a mismatch is an error that names
// both ranks.
//
// Exactness. `reduce_scatter` sends each slice to its owner (the bytes of a ring: (N-1)/N of the buffer) and
// the owner adds in rank order in fp32, so the result does not depend on the bucket size or on how messages
// arrive. all_reduce is by definition reduce_scatter, then all_gather.
//
// Failure. Nothing waits past the deadline. After the first failure the communicator stays failed: `status()`
// and every later call return that first failure, queued data operations become no-ops, and `abort` spreads a
// cause of one's own. A data operation's failure arrives through `status()`, so whoever waits for a stream
// asks it before using the bytes: stream order, not an Event of its own, says when an operation is done.
//
// The commit point. What all ranks decide together from the bytes of one operation can still break apart: the
// operation may end well on one rank and fail on another. So each rank, before it acts on the decision, votes
// for it; once the communicator has failed no vote is taken any more, and whoever could not vote asks whether
// any survivor did. Then all act on the decision or none does.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "forebay/backend.h"
#include "forebay/data_type.h"

namespace forebay {

// Payload bytes handed to or taken from other ranks, elements times element size, since the communicator was
// made. Fingerprints and other headers are not payload; a rank's own slice is not sent and does not count.
struct Traffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

// What one kind of operation has moved.
struct OperationTraffic {
  const char* operation = "";  // "reduce_scatter".
  std::uint64_t count = 0;     // Operations that ended well.
  std::vector<Traffic> peers;  // By rank; zero for this one.
};

enum class OperationState : std::uint8_t { kQueued, kRunning, kDone, kFailed };

// One of the last operations, for whoever wants to know why a run failed. Times since the communicator was
// made; zero for what has not happened.
struct OperationRecord {
  std::string what;  // "all_gather of 4096 bytes (operation 7)".
  OperationState state = OperationState::kQueued;
  std::chrono::nanoseconds queued{0};
  std::chrono::nanoseconds begun{0};
  std::chrono::nanoseconds ended{0};
};

// Longest decision that can be voted for.
inline constexpr std::size_t kDecisionBytesMax = 256;

struct ReduceScatterArguments {
  const std::byte* source;          // Slice 0 of this rank's contribution.
  std::size_t source_stride_bytes;  // From one slice to the next: of a larger buffer's columns, say.
  std::size_t count;                // Elements of one slice.
  DataType type;
  std::byte* receive;  // Staging the caller owns: staging_bytes() of count and type; undefined after.
  float* target;       // Gets (or adds) the rank-ordered fp32 sum of slice rank(); count elements.
  bool first;          // True: target = sum. False: target = target + sum.
};

struct AllGatherArguments {
  const std::byte* source;  // This rank's slice; may already be in its place.
  std::byte* target;        // Slice 0 of the whole; slice r is at target + r * target_stride_bytes.
  std::size_t target_stride_bytes;
  std::size_t bytes;  // Of one slice.
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  // "local", "gloo": for reports.
  virtual const char* name() const noexcept = 0;

  // --- data plane: queued on `stream`, in the same order on every rank ---
  virtual Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) = 0;
  virtual Status all_gather(const AllGatherArguments& arguments, Stream stream) = 0;
  // Bytes that a reduce_scatter of slices of `count` elements needs at `receive`.
  virtual std::size_t staging_bytes(std::size_t count, DataType type) const {
    return static_cast<std::size_t>(size()) * count * element_bytes(type);
  }
  // Point to point: matched by (peer, tag) in order of issue. A send may wait for its recv.
  virtual Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
                      Stream stream) = 0;
  virtual Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) = 0;

  // --- control plane: host memory, blocking, at most the deadline; never while data operations are queued
  // that a peer's control operation could wait for --- Every rank gives `mine`; `all` gets size() pieces of
  // mine.size() bytes in rank order. Counts as payload.
  virtual Status exchange(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
  virtual Status barrier() = 0;

  // Ranks with the same `color` form a new communicator, ordered by (key, rank). Collective; blocking. The
  // two fail together, with one first failure, and this one lives on in those split from it.
  virtual Result<std::unique_ptr<Communicator>> split(int color, int key) = 0;

  // The first failure, or ok.
  virtual Status status() const = 0;
  // Fails this communicator on every rank that can be reached, with `cause`. Never blocks past the deadline.
  virtual void abort(const Status& cause) noexcept = 0;

  // --- the commit point: any thread, host functions of streams too ---
  // This rank has all it needs for `step` (greater than any before) and takes `decision`. Ok: it may act on
  // it. Otherwise the communicator had failed before, and nothing is recorded.
  // Requires: at most kDecisionBytesMax bytes; the same on every rank that votes for the step.
  virtual Status vote(std::uint64_t step, std::span<const std::byte> decision) = 0;
  // Once vote() has refused: the decision that some rank voted for, or nothing, the same on every survivor.
  // Waits for what survivors say at most some seconds, however long the deadline.
  virtual std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) = 0;

  // --- accounts ---
  virtual Traffic traffic() const = 0;
  // The same by kind of operation and by peer: kinds that have been used, in no particular order.
  virtual std::vector<OperationTraffic> operation_traffic() const = 0;
  // The last operations of both planes, the oldest first: of this communicator, of those split from it and of
  // those that it was split from.
  virtual std::vector<OperationRecord> last_operations() const = 0;
};

}  // namespace forebay
