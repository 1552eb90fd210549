// The data operations of a rank over NCCL: each is queued on the caller's stream, and some carry
// fingerprints.
#include <algorithm>
#include <string>
#include <utility>

#include "collectives/nccl/library.h"
#include "collectives/nccl/member.h"

namespace forebay::internal {
namespace {

using nccl::NcclComm;
using nccl::NcclType;
using Clock = NcclHandle::Clock;

}  // namespace

// --- data operations ---

Status NcclMember::await_slot(bool needs_batch) {
  const Clock::time_point give_up = limit();
  for (;;) {
    FOREBAY_RETURN_IF_ERROR(status());
    {
      const std::lock_guard lock(journal_mutex_);
      const bool has_batch = !needs_batch || next_batch_ - oldest_batch_ < kNcclBatches;
      if (next_ - oldest_ < kNcclSlots && has_batch) return {};
    }
    // The watch finds operations that do not end; this is for a stream that works on something else for so
    // long.
    if (Clock::now() >= give_up) {
      return fail_here(Status(StatusCode::kTimeout, "cannot queue an operation over NCCL: none of the ",
                              kNcclSlots, " before it was done within ", deadline_.count(),
                              " ms; queue fewer, or raise the deadline"));
    }
    std::this_thread::sleep_for(kNcclPoll);
  }
}

NcclMember::Luggage NcclMember::pack(Slot& slot, std::size_t index, bool decides) {
  const NcclOperation& operation = slot.operation;
  const std::size_t batches_bytes = kNcclBatches * ranks() * kNcclBatchBytes;
  if (!is_collective(operation)) {
    NcclOperation* const record = messages(index);
    std::byte* const place = device_operations_ + batches_bytes + 2 * index * sizeof(NcclOperation);
    const bool is_send = operation.fingerprint.operation == Operation::kSend;
    if (!is_send) {
      slot.compared = Compared::kPeer;
      return {.theirs = record + 1,
              .theirs_bytes = sizeof(NcclOperation),
              .piece = {.target = place + sizeof(NcclOperation), .bytes = sizeof(NcclOperation)}};
    }
    *record = operation;
    return {.mine = record, .piece = {.source = place, .bytes = sizeof(NcclOperation)}};
  }
  const std::uint64_t batch = next_batch_;
  NcclOperation* const mine = own_batch(batch);
  std::byte* const place = device_operations_ + batch % kNcclBatches * ranks() * kNcclBatchBytes;
  const Piece piece{.source = place + static_cast<std::size_t>(rank()) * kNcclBatchBytes,
                    .target = place,
                    .target_stride = kNcclBatchBytes,
                    .bytes = kNcclBatchBytes};
  // The operations that connect the ranks move bytes that nobody reads.
  if (!is_recorded(operation)) return {.piece = piece};
  constexpr NcclOperation kNone{.fingerprint = {.sequence = kNoSequence}};
  if (batch_count_ == 0) std::fill_n(mine, kNcclBatch, kNone);
  mine[batch_count_++] = operation;
  last_[collective_count_++ % kNcclBatch] = operation.fingerprint;
  // NCCL waits for no peer where no bytes are moved, so there fingerprints are.
  const bool travels = decides || batch_count_ == kNcclBatch || operation.fingerprint.count == 0;
  if (!travels) return {};
  batch_count_ = 0;
  ++next_batch_;
  slot.compared = Compared::kBatch;
  slot.batch = batch;
  NcclOperation* const theirs = arrived_batches(batch);
  std::fill_n(theirs, ranks() * kNcclBatch, kNone);
  return {.mine = mine, .theirs = theirs, .theirs_bytes = ranks() * kNcclBatchBytes, .piece = piece};
}

template <typename Body>
Status NcclMember::issue(const NcclOperation& operation, Stream stream, Body body, bool decides) {
  FOREBAY_RETURN_IF_ERROR(await_slot(is_collective(operation)));
  const std::size_t index = next_ % kNcclSlots;  // Only this thread changes it.
  Slot& slot = slots_[index];
  if (const Status recorded = backend_.event_record(slot.come, stream); !recorded.ok())
    return fail_here(recorded);
  Luggage luggage;
  {
    const std::lock_guard lock(journal_mutex_);
    slot = {.come = slot.come, .done = slot.done, .operation = operation};
    luggage = pack(slot, index, decides);
    if (is_recorded(operation)) slot.record = book_.issue(operation);
    ++next_;
  }
  const Piece& piece = luggage.piece;
  Status status;
  if (luggage.mine != nullptr) {
    status = backend_.copy_async(const_cast<std::byte*>(piece.source), luggage.mine, piece.bytes, stream);
  }
  if (status.ok()) {
    status = handle_->submit(describe(operation), limit(), [&](NcclComm comm) {
      return body(NcclCalls{handle_->library(), comm, static_cast<nccl::NcclStream>(stream.handle)}, piece);
    });
  }
  if (status.ok() && luggage.theirs != nullptr)
    status = backend_.copy_async(luggage.theirs, piece.target, luggage.theirs_bytes, stream);
  const Status recorded = backend_.event_record(slot.done, stream);
  if (status.ok()) status = recorded;
  {
    const std::lock_guard lock(journal_mutex_);
    slot.queued = status.ok();
  }
  if (status.ok()) return {};
  if (is_recorded(operation)) book_.end(slot.record, operation, false);
  // The watch may have ended the call, and knows the reason.
  return fail_here(status);
}

NcclStep NcclMember::exchange_in_pairs(const NcclCalls& calls, const Piece& piece) const {
  NcclStep step;
  const auto send = [&](const std::byte* source, int peer) {
    if (step.ok()) step = calls.send(source, piece.bytes, peer);
  };
  const auto recv = [&](std::byte* target, int peer) {
    if (step.ok()) step = calls.recv(target, piece.bytes, peer);
  };
  const auto slice = [](auto* first, std::size_t stride, int of) {
    return first + static_cast<std::size_t>(of) * stride;
  };
  if (piece.bytes == 0) return step;
  // Each rank starts with its right neighbour, so that not all ranks send to one rank at once.
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size();
    const int from = (rank() + size() - i) % size();
    send(slice(piece.source, piece.source_stride, to), to);
    recv(slice(piece.target, piece.target_stride, from), from);
  }
  std::byte* const place = slice(piece.target, piece.target_stride, rank());
  if (!piece.keep_own || place == piece.source) return step;
  send(piece.source, rank());
  recv(place, rank());
  return step;
}

Status NcclMember::queue_connections(Stream stream) {
  NcclOperation operation;
  operation.fingerprint = {.sequence = kWarmUpSequence, .operation = Operation::kBarrier};
  FOREBAY_RETURN_IF_ERROR(issue(operation, stream, [&](const NcclCalls& calls, const Piece& luggage) {
    return exchange_in_pairs(calls, luggage);
  }));
  return issue(operation, stream,
               [&](const NcclCalls& calls, const Piece& luggage) { return calls.all_gather(luggage); });
}

Status NcclMember::queue_transfer(const Collective& collective, Stream stream, bool decides) {
  const Piece& piece = collective.piece;
  NcclOperation operation;
  operation.fingerprint = collective.fingerprint;
  operation.fingerprint.sequence = collective_sequence_++;
  const bool is_contiguous = size() == 1 || piece.target_stride == piece.bytes;
  const bool in_pairs = !piece.keep_own || !is_contiguous;
  return issue(
      operation, stream,
      [&](const NcclCalls& calls, const Piece& luggage) {
        const auto move = [&](const Piece& part) {
          return in_pairs ? exchange_in_pairs(calls, part) : calls.all_gather(part);
        };
        const NcclStep step = move(luggage);
        return step.ok() ? move(piece) : step;
      },
      decides);
}

Status NcclMember::reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) {
  const bool is_contiguous = arguments.source_stride_bytes == arguments.count * sizeof(float);
  const bool is_fast = options_.order == NcclOrder::kFast && size() > 1 && is_contiguous &&
                       arguments.count > 0 && arguments.type == DataType::kFloat32;
  if (!is_fast) {
    // A single rank has nobody to exchange with: only the sum is queued.
    if (size() > 1) FOREBAY_RETURN_IF_ERROR(queue_transfer(reduce_scatter_transfer(arguments), stream));
    if (arguments.count == 0) return {};
    const Status summed = kernels_.accumulate(accumulate_arguments(arguments, rank(), size()), stream);
    return summed.ok() ? summed : fail_here(summed);
  }
  std::byte* const sum = arguments.first ? reinterpret_cast<std::byte*>(arguments.target) : arguments.receive;
  NcclOperation operation;
  operation.fingerprint = reduce_scatter_transfer(arguments).fingerprint;
  operation.fingerprint.sequence = collective_sequence_++;
  FOREBAY_RETURN_IF_ERROR(issue(operation, stream, [&](const NcclCalls& calls, const Piece& luggage) {
    const NcclStep step = calls.all_gather(luggage);
    if (!step.ok()) return step;
    return NcclStep{
        calls.library.ncclReduceScatter(arguments.source, sum, arguments.count, NcclType::kFloat32,
                                        nccl::NcclReduction::kSum, calls.comm, calls.stream),
        "ncclReduceScatter"};
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

Status NcclMember::all_gather(const AllGatherArguments& arguments, Stream stream) {
  Collective collective = all_gather_transfer(arguments);
  collective.fingerprint.type = arguments.decides ? 1 : 0;
  return queue_transfer(collective, stream, arguments.decides);
}

Status NcclMember::send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
                        Stream stream) {
  const NcclOperation operation =
      issued_message(Operation::kSend, bytes, peer, tag, sent_to_[static_cast<std::size_t>(peer)]++);
  return issue(operation, stream, [&](const NcclCalls& calls, const Piece& luggage) {
    const NcclStep step = calls.send(luggage.source, luggage.bytes, peer);
    return step.ok() && bytes > 0 ? calls.send(source, bytes, peer) : step;
  });
}

Status NcclMember::recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) {
  const NcclOperation operation =
      issued_message(Operation::kRecv, bytes, peer, tag, received_from_[static_cast<std::size_t>(peer)]++);
  return issue(operation, stream, [&](const NcclCalls& calls, const Piece& luggage) {
    const NcclStep step = calls.recv(luggage.target, luggage.bytes, peer);
    return step.ok() && bytes > 0 ? calls.recv(target, bytes, peer) : step;
  });
}

Status NcclMember::register_buffer(DevicePtr address, std::size_t bytes) {
  FOREBAY_RETURN_IF_ERROR(status());
  const NcclLibrary& library = handle_->library();
  const std::string what = "register " + std::to_string(bytes) + " bytes with NCCL";
  if (!library.facts.can_register) {
    return Status(StatusCode::kUnsupported, "cannot ", what, ": ", library.facts.path,
                  " has no ncclCommRegister; go on without, or load NCCL 2.19 "
                  "or newer");
  }
  if (address == nullptr || bytes == 0 || registered_.count(address) != 0) {
    return invalid_argument("cannot ", what, ": it is empty or registered already; give each buffer once");
  }
  void* registration = nullptr;
  const Status status = handle_->call(what, limit(), [&](NcclComm comm) {
    return NcclStep{library.ncclCommRegister(comm, address, bytes, &registration), "ncclCommRegister"};
  });
  if (!status.ok()) return fail_here(status);
  registered_[address] = registration;
  return {};
}

Status NcclMember::deregister_buffer(DevicePtr address) {
  FOREBAY_RETURN_IF_ERROR(status());
  const auto found = registered_.find(address);
  if (found == registered_.end()) {
    return invalid_argument(
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

}  // namespace forebay::internal
