#include <optional>
#include <utility>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/nccl/member.h"
#include "forebay/nccl_communicator.h"

namespace forebay {
namespace {

using internal::NcclMember;
using internal::NcclOperation;
using internal::Operation;
using internal::OperationBook;

class NcclCommunicatorImpl final : public NcclCommunicator {
 public:
  static Result<std::unique_ptr<NcclCommunicator>> open(std::shared_ptr<NcclMember> member) {
    const Status opened = member->open();
    if (opened.ok()) return std::make_unique<NcclCommunicatorImpl>(std::move(member));
    Status first = member->fail_here(opened);
    member->leave();
    return first;
  }

  explicit NcclCommunicatorImpl(std::shared_ptr<NcclMember> member) : member_(std::move(member)) {}
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

  Status exchange(Span<const std::byte> mine, Span<std::byte> all) override {
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
    internal::NcclWorld world{.numbers = {}, .size = member_->world().size};
    FOREBAY_RETURN_IF_ERROR(controlled(Operation::kSplit, 0, [&](Communicator& control) {
      FOREBAY_ASSIGN_OR_RETURN(part_control, control.split(color, key));
      const int mine = member_->world_rank(rank());
      world.numbers.resize(static_cast<std::size_t>(part_control->size()));
      return part_control->exchange(std::as_bytes(std::span(&mine, 1)),
                                    std::as_writable_bytes(std::span(world.numbers)));
    }));
    NcclOptions options = member_->options();
    options.adopted = nullptr;  // The adopted one is for all ranks.
    FOREBAY_ASSIGN_OR_RETURN(
        std::unique_ptr<NcclCommunicator> part,
        open(std::make_shared<NcclMember>(std::move(part_control), member_->backend(), member_->kernels(),
                                          options, std::move(world), &member_->book())));
    return part;
  }

  Status status() const override { return member_->status(); }

  void abort(const Status& cause) noexcept override {
    if (!cause.ok()) {
      static_cast<void>(member_->fail(cause));
      return;
    }
    static_cast<void>(member_->fail_here(
        Status(StatusCode::kPeerLost, "it aborted the communicator without a cause; see its output")));
  }

  // A failure reaches `control` before the rank, so both refuse votes after the same failure. The bytes of
  // operations that differ are no ground for a decision.
  Status vote(std::uint64_t step, Span<const std::byte> decision) override {
    FOREBAY_RETURN_IF_ERROR(member_->compare_arrived());
    return member_->control().vote(step, decision);
  }
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override {
    return member_->control().survivors_vote(step);
  }

  Traffic traffic() const override { return up_to_now().traffic(); }
  std::vector<OperationTraffic> operation_traffic() const override { return up_to_now().operation_traffic(); }
  std::vector<OperationRecord> last_operations() const override { return up_to_now().last_operations(); }

  Status register_buffer(DevicePtr address, std::size_t bytes) override {
    return member_->register_buffer(address, bytes);
  }
  Status deregister_buffer(DevicePtr address) override { return member_->deregister_buffer(address); }

 private:
  // The book with all operations that are done by now; otherwise the next heartbeat records them.
  OperationBook& up_to_now() const {
    static_cast<void>(member_->status());
    return member_->book();
  }

  // A failed control operation fails everything, and the first failure counts.
  template <typename Function>
  Status controlled(Operation operation, std::uint64_t bytes, Function function) {
    const NcclOperation issued{
        .fingerprint = {.sequence = control_sequence_++, .count = bytes, .operation = operation}};
    const std::uint64_t number = member_->book().issue(issued);
    member_->book().begin(number);
    const Status status = function(member_->control());
    member_->book().end(number, issued, status.ok());
    return status.ok() ? status : member_->fail(status);
  }

  const std::shared_ptr<NcclMember> member_;  // Shared with the thread of its watch.
  std::uint64_t control_sequence_ = 0;        // Control operations are issued from one thread at a time.
};

}  // namespace

Result<std::unique_ptr<NcclCommunicator>> create_nccl_communicator(std::unique_ptr<Communicator> control,
                                                                   CudaBackend& backend, Kernels& kernels,
                                                                   const NcclOptions& options) {
  const int size = control->size();
  return NcclCommunicatorImpl::open(std::make_shared<NcclMember>(
      std::move(control), backend, kernels, options, internal::NcclWorld{.numbers = {}, .size = size}));
}

}  // namespace forebay
