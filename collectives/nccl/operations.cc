// The data operations of a rank over NCCL: each is queued on the caller's stream with its fingerprint.
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

Status NcclMember::await_slot() {
  const Clock::time_point give_up = limit();
  for (;;) {
    FOREBAY_RETURN_IF_ERROR(status());
    {
      const std::lock_guard lock(journal_mutex_);
      if (next_ - oldest_ < kNcclSlots) return {};
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

template <typename Body>
Status NcclMember::issue(const Slot& wanted, Stream stream, Body body) {
  FOREBAY_RETURN_IF_ERROR(await_slot());
  const std::uint64_t number = next_;  // Only this thread changes it.
  const std::size_t index = number % kNcclSlots;
  const std::size_t record = sizeof(NcclOperation);
  NcclOperation* const out = fingerprints_.data() + index;
  NcclOperation* const in = arrivals(index);
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
    std::fill_n(in, ranks(), NcclOperation{.fingerprint = {.sequence = kNoSequence}});
    if (is_recorded(wanted.operation)) slot.record = book_.issue(wanted.operation);
    ++next_;
    if (is_collective(wanted.operation) && is_recorded(wanted.operation)) ++collective_count_;
  }
  *out = wanted.operation;
  Status status = backend_.copy_async(own, out, record, stream);
  if (status.ok()) {
    status = handle_->submit(describe(wanted.operation), limit(), [&](NcclComm comm) {
      return body(NcclCalls{handle_->library(), comm, static_cast<nccl::NcclStream>(stream.handle)}, own,
                  all);
    });
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
  // The watch may have ended the call, and knows the reason.
  return fail_here(status);
}

NcclStep NcclMember::exchange_in_pairs(const NcclCalls& calls, const Piece& piece, std::byte* own,
                                       std::byte* all) const {
  const std::size_t record = sizeof(NcclOperation);
  NcclStep step;
  const auto send = [&](const std::byte* source, std::size_t bytes, int peer) {
    if (step.ok()) step = calls.send(source, bytes, peer);
  };
  const auto recv = [&](std::byte* target, std::size_t bytes, int peer) {
    if (step.ok()) step = calls.recv(target, bytes, peer);
  };
  const auto slice = [](auto* first, std::size_t stride, int of) {
    return first + static_cast<std::size_t>(of) * stride;
  };
  // Each rank starts with its right neighbour, so that not all ranks send to one rank at once.
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size();
    const int from = (rank() + size() - i) % size();
    send(own, record, to);
    recv(slice(all, record, from), record, from);
    if (piece.bytes == 0) continue;
    send(slice(piece.source, piece.source_stride, to), piece.bytes, to);
    recv(slice(piece.target, piece.target_stride, from), piece.bytes, from);
  }
  if (piece.bytes == 0 || !piece.keep_own) return step;
  std::byte* const place = slice(piece.target, piece.target_stride, rank());
  if (place == piece.source) return step;
  send(piece.source, piece.bytes, rank());
  recv(place, piece.bytes, rank());
  return step;
}

Status NcclMember::queue_connections(Stream stream) {
  Slot slot;
  slot.operation.fingerprint = {.sequence = kWarmUpSequence, .operation = Operation::kBarrier};
  slot.compared = Compared::kAll;
  FOREBAY_RETURN_IF_ERROR(issue(slot, stream, [&](const NcclCalls& calls, std::byte* own, std::byte* all) {
    return exchange_in_pairs(calls, {}, own, all);
  }));
  return issue(slot, stream, [&](const NcclCalls& calls, std::byte* own, std::byte* all) {
    return calls.all_gather(own, all, sizeof(NcclOperation));
  });
}

Status NcclMember::queue_transfer(const Collective& collective, Stream stream) {
  const Piece& piece = collective.piece;
  Slot slot;
  slot.operation.fingerprint = collective.fingerprint;
  slot.operation.fingerprint.sequence = collective_sequence_++;
  slot.compared = Compared::kAll;
  const bool is_gather = piece.keep_own;
  const bool is_contiguous = size() == 1 || piece.target_stride == piece.bytes;
  return issue(slot, stream, [&](const NcclCalls& calls, std::byte* own, std::byte* all) {
    if (!is_gather || !is_contiguous) return exchange_in_pairs(calls, piece, own, all);
    const NcclStep step = calls.all_gather(own, all, sizeof(NcclOperation));
    if (!step.ok() || piece.bytes == 0) return step;
    return calls.all_gather(piece.source, piece.target, piece.bytes);
  });
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
  const Collective collective = reduce_scatter_transfer(arguments);
  std::byte* const sum = arguments.first ? reinterpret_cast<std::byte*>(arguments.target) : arguments.receive;
  Slot slot;
  slot.operation.fingerprint = collective.fingerprint;
  slot.operation.fingerprint.sequence = collective_sequence_++;
  slot.compared = Compared::kAll;
  FOREBAY_RETURN_IF_ERROR(issue(slot, stream, [&](const NcclCalls& calls, std::byte* own, std::byte* all) {
    const NcclStep step = calls.all_gather(own, all, sizeof(NcclOperation));
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
  return queue_transfer(all_gather_transfer(arguments), stream);
}

Status NcclMember::send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
                        Stream stream) {
  Slot slot;
  slot.operation =
      issued_message(Operation::kSend, bytes, peer, tag, sent_to_[static_cast<std::size_t>(peer)]++);
  return issue(slot, stream, [&](const NcclCalls& calls, std::byte* own, std::byte*) {
    const NcclStep step = calls.send(own, sizeof(NcclOperation), peer);
    return step.ok() && bytes > 0 ? calls.send(source, bytes, peer) : step;
  });
}

Status NcclMember::recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) {
  const auto from = static_cast<std::size_t>(peer);
  Slot slot;
  slot.operation = issued_message(Operation::kRecv, bytes, peer, tag, received_from_[from]++);
  slot.compared = Compared::kPeer;
  return issue(slot, stream, [&](const NcclCalls& calls, std::byte*, std::byte* all) {
    const NcclStep step = calls.recv(all + from * sizeof(NcclOperation), sizeof(NcclOperation), peer);
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
