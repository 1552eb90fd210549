// The Communicator of one local rank: it checks arguments, numbers operations, queues them on the stream and
// writes them into the rank's book. The group's parts carry them out.

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/local/group.h"
#include "forebay/kernels.h"
#include "forebay/stream_call.h"

namespace forebay::internal {
namespace {

Status fail_with(LocalRanks& ranks, const Status& cause) {
  ranks.fail(cause);
  return ranks.status();
}

void pass_time(LocalWorld& world, LocalWorld::Nanoseconds duration) {
  LocalWorld::Lock lock(world.mutex());
  world.pass_time(lock, duration);
}

Status stall(LocalWorld& world) {
  LocalWorld::Lock lock(world.mutex());
  world.await(lock, [&] { return world.has_failed(); });
  return world.failure();
}

// The error of `rank` after its scripted death.
Status died_by_script(const LocalRanks& ranks, int rank) {
  return Status(StatusCode::kPeerLost, ranks.name_of(rank), " died by script");
}

// A data operation of `rank` that a LocalFault changes: it fails, comes late, differs, or never comes.
Status run_faulty(LocalRanks& ranks, int rank, const LocalFault& fault, const Fingerprint& fingerprint,
                  const std::function<Status(const Fingerprint&)>& operation) {
  switch (fault.kind) {
    case LocalFault::Kind::kFails:
      return fail_with(ranks, fault.cause);
    case LocalFault::Kind::kFailsAfter: {
      const Status status = operation(fingerprint);
      pass_time(ranks.world(), fault.delay);
      return fail_with(ranks, status.ok() ? fault.cause : status);
    }
    case LocalFault::Kind::kDies:
      ranks.die(rank);
      return died_by_script(ranks, rank);
    case LocalFault::Kind::kStalls:
      return stall(ranks.world());
    case LocalFault::Kind::kMismatches: {
      Fingerprint other = fingerprint;
      ++other.count;
      return operation(other);
    }
    case LocalFault::Kind::kComesLate:
      pass_time(ranks.world(), fault.delay);
      return operation(fingerprint);
  }
  return {};
}

class LocalCommunicator final : public Communicator {
 public:
  // Takes the port's events, if it has any.
  LocalCommunicator(std::shared_ptr<LocalGroupImpl> group, int rank, Backend& backend, Kernels& kernels,
                    const DevicePort& port)
      : group_(std::move(group)),
        ranks_(group_->ranks()),
        rank_(rank),
        backend_(backend),
        kernels_(kernels),
        port_(port) {}
  ~LocalCommunicator() override {
    ranks_.close(rank_);
    for (const Event event : {port_.come, port_.copied}) {
      if (event.handle != nullptr) static_cast<void>(backend_.event_destroy(event));
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return ranks_.size(); }
  const char* name() const noexcept override { return "local"; }

  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(ranks_.status());
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments, size()));
    // Alone, there is nobody to wait for and nothing to compare: only the sum is queued, unless a script has
    // a fault.
    if (size() > 1 || group_->fault().rank >= 0) {
      FOREBAY_RETURN_IF_ERROR(queue_round(reduce_scatter_transfer(arguments), stream));
    }
    if (arguments.count == 0) return {};
    return fail_unless_ok(kernels_.accumulate(accumulate_arguments(arguments, rank_, size()), stream));
  }

  Status all_gather(const AllGatherArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(ranks_.status());
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments, size()));
    return queue_round(all_gather_transfer(arguments), stream);
  }

  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(ranks_.status());
    FOREBAY_RETURN_IF_ERROR(check_peer("send", source, bytes, peer, rank_, size()));
    return queue(stream, issued_message(Operation::kSend, bytes, peer, tag),
                 [end = end_of_message(peer, tag, stream), source](LocalGroupImpl& group,
                                                                   const Fingerprint& fingerprint) {
                   return group.messages().send(end, source, fingerprint.count);
                 });
  }

  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(ranks_.status());
    FOREBAY_RETURN_IF_ERROR(check_peer("recv", target, bytes, peer, rank_, size()));
    return queue(stream, issued_message(Operation::kRecv, bytes, peer, tag),
                 [end = end_of_message(peer, tag, stream), target](LocalGroupImpl& group,
                                                                   const Fingerprint& fingerprint) {
                   return group.messages().recv(end, target, fingerprint.count);
                 });
  }

  Status exchange(Span<const std::byte> mine, Span<std::byte> all) override {
    FOREBAY_RETURN_IF_ERROR(ranks_.status());
    FOREBAY_RETURN_IF_ERROR(check_exchange(mine, all, size()));
    return control(Operation::kExchange, control_sequence_++, mine, all);
  }

  Status barrier() override {
    FOREBAY_RETURN_IF_ERROR(ranks_.status());
    return control(Operation::kBarrier, control_sequence_++, {}, {});
  }

  Result<std::unique_ptr<Communicator>> split(int color, int key) override {
    FOREBAY_RETURN_IF_ERROR(ranks_.status());
    const SplitWish mine{color, key, rank_};
    std::vector<SplitWish> all(static_cast<std::size_t>(size()));
    const std::uint64_t sequence = control_sequence_++;
    FOREBAY_RETURN_IF_ERROR(control(Operation::kSplit, sequence, std::as_bytes(std::span(&mine, 1)),
                                    std::as_writable_bytes(std::span(all))));
    const std::vector<SplitWish> members = split_members(std::move(all), color);
    const auto place = std::find_if(members.begin(), members.end(),
                                    [&](const SplitWish& wish) { return wish.rank == rank_; });
    return group_->split_group(sequence, color, members)
        ->communicator(static_cast<int>(place - members.begin()), backend_, kernels_);
  }

  Status status() const override { return ranks_.status(); }

  void abort(const Status& cause) noexcept override {
    if (ranks_.is_dead(rank_)) return;
    ranks_.fail(cause_of_abort(cause, ranks_.world_rank(rank_)));
  }

  Status vote(std::uint64_t step, Span<const std::byte> decision) override {
    FOREBAY_RETURN_IF_ERROR(check_vote(decision));
    if (ranks_.is_dead(rank_)) return died_by_script(ranks_, rank_);
    return ranks_.vote(rank_, step, decision);
  }
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override {
    return ranks_.survivors_vote(step);
  }

  Traffic traffic() const override { return ranks_.book(rank_).traffic(); }
  std::vector<OperationTraffic> operation_traffic() const override {
    return ranks_.book(rank_).operation_traffic();
  }
  std::vector<OperationRecord> last_operations() const override {
    return ranks_.book(rank_).last_operations();
  }

 private:
  DevicePort port_on(Stream stream) const {
    DevicePort port = port_;
    port.stream = stream;
    return port;
  }
  LocalMessageEnd end_of_message(int peer, std::uint32_t tag, Stream stream) const {
    return {.rank = rank_, .peer = peer, .tag = tag, .port = port_on(stream)};
  }

  Status fail_unless_ok(Status status) {
    // The peers' half of this operation would wait for ours until the deadline; tell them now.
    if (!status.ok()) ranks_.fail(status.with_context(ranks_.name_of(rank_)));
    return status;
  }

  // Carries out `operation()`, which the book has as `number`.
  template <typename Function>
  static Status run(LocalRanks& ranks, int rank, std::uint64_t number, const Issued& issued,
                    Function operation) {
    OperationBook& book = ranks.book(rank);
    book.begin(number);
    const Status status = ranks.is_dead(rank) ? died_by_script(ranks, rank) : operation();
    book.end(number, issued, status.ok());
    return status;
  }

  Status control(Operation operation, std::uint64_t sequence, std::span<const std::byte> mine,
                 std::span<std::byte> all) {
    Collective collective = control_transfer(operation, mine, all);
    collective.fingerprint.sequence = sequence;
    const Issued issued{.fingerprint = collective.fingerprint};
    return run(ranks_, rank_, ranks_.book(rank_).issue(issued), issued, [&] {
      return group_->rounds().run(LocalPlane::kControl, rank_, collective.fingerprint,
                                  {.port = {}, .piece = collective.piece});
    });
  }

  Status queue_round(Collective collective, Stream stream) {
    collective.fingerprint.sequence = data_sequence_++;
    const DevicePart part{.port = port_on(stream), .piece = collective.piece};
    return queue(stream, {.fingerprint = collective.fingerprint},
                 [rank = rank_, part](LocalGroupImpl& group, const Fingerprint& fingerprint) {
                   return group.rounds().run(LocalPlane::kData, rank, fingerprint, part);
                 });
  }

  // Queues operation(group, fingerprint), changed as the script says. With a port the operation itself
  // queues.
  template <typename Function>
  Status queue(Stream stream, const Issued& issued, Function operation) {
    const LocalFault& fault = group_->fault();
    const bool is_faulty = fault.rank == rank_ && fault.operation == operation_count_;
    ++operation_count_;
    const std::uint64_t number = ranks_.book(rank_).issue(issued);
    // The failure of an operation is the group's: status() reports it.
    const auto carry_out = [rank = rank_, is_faulty, number, issued, operation](LocalGroupImpl& group) {
      const auto on_group = [&](const Fingerprint& fingerprint) { return operation(group, fingerprint); };
      return run(group.ranks(), rank, number, issued, [&] {
        return is_faulty ? run_faulty(group.ranks(), rank, group.fault(), issued.fingerprint, on_group)
                         : on_group(issued.fingerprint);
      });
    };
    if (port_.used()) return carry_out(*group_);
    ranks_.begin_operation(rank_);
    // The closure keeps the group alive: it may run after this communicator is gone.
    Status status = call_on(backend_, stream, [group = group_, rank = rank_, carry_out] {
      static_cast<void>(carry_out(*group));
      group->ranks().finish_operation(rank);
    });
    if (!status.ok()) {
      ranks_.finish_operation(rank_);
      ranks_.book(rank_).end(number, issued, false);
    }
    return fail_unless_ok(std::move(status));
  }

  const std::shared_ptr<LocalGroupImpl> group_;  // Shared with the other ranks and with queued operations.
  LocalRanks& ranks_;                            // The group's.
  const int rank_;
  Backend& backend_;
  Kernels& kernels_;
  const DevicePort port_;  // Without a stream.
  // Data operations are issued from one thread at a time, control operations from one thread at a time.
  std::uint64_t data_sequence_ = 0;
  std::uint64_t operation_count_ = 0;
  std::uint64_t control_sequence_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> create_local_communicator(std::shared_ptr<LocalGroupImpl> group, int rank,
                                                        Backend& backend, Kernels& kernels,
                                                        const DevicePort& port) {
  return std::make_unique<LocalCommunicator>(std::move(group), rank, backend, kernels, port);
}

}  // namespace forebay::internal
