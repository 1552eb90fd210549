// The Communicator of processes over any Transport: it checks arguments, numbers operations, queues them on
// the stream and records them. The Transport carries them out.

#include <algorithm>
#include <map>
#include <utility>

#include "collectives/operation_book.h"
#include "collectives/process/transport.h"
#include "forebay/stream_call.h"

namespace forebay::internal {
namespace {

// Shared by the communicator and its queued operations, which may run after it is gone.
struct Shared {
  explicit Shared(std::shared_ptr<Transport> given)
      : transport(std::move(given)), book(transport->rank(), transport->size()) {}
  Shared(std::shared_ptr<Transport> given, const OperationBook& origin)
      : transport(std::move(given)),
        book(transport->rank(), origin, transport->membership().name_in_origin,
             transport->membership().world_ranks) {}

  // Carries out the operation that the book has as `number`.
  template <typename Function>
  Status run(std::uint64_t number, const Issued& issued, Function operation) {
    book.begin(number);
    const Status status = operation(*transport);
    book.end(number, issued, status.ok());
    return status;
  }

  const std::shared_ptr<Transport> transport;
  OperationBook book;
};

class ProcessCommunicator final : public Communicator {
 public:
  ProcessCommunicator(std::shared_ptr<Shared> shared, Backend& backend)
      : shared_(std::move(shared)), backend_(backend) {}

  int rank() const noexcept override { return transport().rank(); }
  int size() const noexcept override { return transport().size(); }
  const char* name() const noexcept override { return transport().name(); }

  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(transport().status());
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments, size()));
    Fingerprint fingerprint = reduce_scatter_transfer(arguments).fingerprint;
    fingerprint.sequence = data_sequence_++;
    return queue(stream, {.fingerprint = fingerprint},
                 [=](Transport& transport) { return transport.reduce_scatter(fingerprint, arguments); });
  }

  Status all_gather(const AllGatherArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(transport().status());
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments, size()));
    Collective collective = all_gather_transfer(arguments);
    collective.fingerprint.sequence = data_sequence_++;
    return queue(stream, {.fingerprint = collective.fingerprint}, [=](Transport& transport) {
      return transport.gather(TransportPlane::kData, collective.fingerprint, collective.piece);
    });
  }

  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(transport().status());
    FOREBAY_RETURN_IF_ERROR(check_peer("send", source, bytes, peer, rank(), size()));
    const Issued issued = issued_message(Operation::kSend, bytes, peer, tag, sends_[{peer, tag}]++);
    return queue(stream, issued, [=](Transport& transport) {
      return transport.send(source, bytes, peer, tag, issued.fingerprint.sequence);
    });
  }

  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(transport().status());
    FOREBAY_RETURN_IF_ERROR(check_peer("recv", target, bytes, peer, rank(), size()));
    const Issued issued = issued_message(Operation::kRecv, bytes, peer, tag, recvs_[{peer, tag}]++);
    return queue(stream, issued, [=](Transport& transport) {
      return transport.recv(target, bytes, peer, tag, issued.fingerprint.sequence);
    });
  }

  Status exchange(Span<const std::byte> mine, Span<std::byte> all) override {
    FOREBAY_RETURN_IF_ERROR(transport().status());
    FOREBAY_RETURN_IF_ERROR(check_exchange(mine, all, size()));
    return control(Operation::kExchange, mine, all);
  }

  Status barrier() override { return control(Operation::kBarrier, {}, {}); }

  Result<std::unique_ptr<Communicator>> split(int color, int key) override {
    const SplitWish mine{color, key, rank()};
    std::vector<SplitWish> all(static_cast<std::size_t>(size()));
    const std::uint64_t sequence = control_sequence_;
    FOREBAY_RETURN_IF_ERROR(control(Operation::kSplit, std::as_bytes(std::span(&mine, 1)),
                                    std::as_writable_bytes(std::span(all))));
    const std::vector<SplitWish> members = split_members(std::move(all), color);
    const auto place = std::find_if(members.begin(), members.end(),
                                    [&](const SplitWish& wish) { return wish.rank == mine.rank; });
    const Membership& parent = transport().membership();
    // All members compute the same name, and no other group of this run does.
    Membership membership{.rank = static_cast<int>(place - members.begin()),
                          .size = static_cast<int>(members.size()),
                          .deadline = parent.deadline,
                          .generation = parent.generation + "-" + std::to_string(sequence) + "." +
                                        std::to_string(members.front().rank)};
    FOREBAY_ASSIGN_OR_RETURN(
        std::shared_ptr<Transport> transport_of_group,
        transport().split(std::move(membership), members,
                          [this](std::span<const std::byte> given, std::span<std::byte> got) {
                            return control(Operation::kSplit, given, got);
                          }));
    return std::make_unique<ProcessCommunicator>(
        std::make_shared<Shared>(std::move(transport_of_group), shared_->book), backend_);
  }

  Status status() const override { return transport().status(); }

  void abort(const Status& cause) noexcept override {
    static_cast<void>(transport().fail(cause_of_abort(cause, transport().world_rank(rank()))));
  }

  Status vote(std::uint64_t step, Span<const std::byte> decision) override {
    FOREBAY_RETURN_IF_ERROR(check_vote(decision));
    return transport().vote(step, decision);
  }
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override {
    return transport().survivors_vote(step);
  }

  Traffic traffic() const override { return shared_->book.traffic(); }
  std::vector<OperationTraffic> operation_traffic() const override {
    return shared_->book.operation_traffic();
  }
  std::vector<OperationRecord> last_operations() const override { return shared_->book.last_operations(); }

 private:
  Transport& transport() const noexcept { return *shared_->transport; }

  Status control(Operation operation, std::span<const std::byte> mine, std::span<std::byte> all) {
    Collective collective = control_transfer(operation, mine, all);
    collective.fingerprint.sequence = control_sequence_++;
    const Issued issued{.fingerprint = collective.fingerprint};
    return shared_->run(shared_->book.issue(issued), issued, [&](Transport& transport) {
      return transport.gather(TransportPlane::kControl, collective.fingerprint, collective.piece);
    });
  }

  template <typename Function>
  Status queue(Stream stream, const Issued& issued, Function operation) {
    const std::uint64_t number = shared_->book.issue(issued);
    // The transport keeps the failure of an operation: status() reports it.
    const Status queued = call_on(backend_, stream, [shared = shared_, number, issued, operation] {
      static_cast<void>(shared->run(number, issued, operation));
    });
    if (!queued.ok()) {
      shared_->book.end(number, issued, false);
      // The peers would wait for this operation until the deadline; tell them now.
      static_cast<void>(
          transport().fail(queued.with_context("rank " + std::to_string(transport().world_rank(rank())))));
    }
    return queued;
  }

  const std::shared_ptr<Shared> shared_;
  Backend& backend_;
  // Data operations are issued from one thread at a time, control operations from one thread at a time.
  std::uint64_t data_sequence_ = 0;
  std::map<std::pair<int, std::uint32_t>, std::uint64_t> sends_;  // By peer and tag.
  std::map<std::pair<int, std::uint32_t>, std::uint64_t> recvs_;
  std::uint64_t control_sequence_ = 0;
};

}  // namespace

Result<Membership> check_membership(const char* name, int rank, int size, std::chrono::milliseconds deadline,
                                    const Backend& backend) {
  if (size < 1 || rank < 0 || rank >= size) {
    return invalid_argument("rank ", rank, " of ", size, " ranks does not exist; ranks are 0 to size - 1");
  }
  const Capabilities& device = backend.capabilities();
  if (!device.host_accessible) {
    return Status(StatusCode::kUnsupported, name, " needs memory that the host reaches, and the memory of ",
                  device.name, " is not such; use the host backend or another communicator");
  }
  return Membership{.rank = rank, .size = size, .deadline = clamp_deadline(deadline)};
}

std::unique_ptr<Communicator> create_process_communicator(std::shared_ptr<Transport> transport,
                                                          Backend& backend) {
  return std::make_unique<ProcessCommunicator>(std::make_shared<Shared>(std::move(transport)), backend);
}

}  // namespace forebay::internal
