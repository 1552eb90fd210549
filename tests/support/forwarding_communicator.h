// A Communicator that passes everything on to another one. A test derives from it to change one thing.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "forebay/communicator.h"

namespace forebay::testing {

class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(std::unique_ptr<Communicator> inner) : inner_(std::move(inner)) {}

  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  const char* name() const noexcept override { return inner_->name(); }
  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) override {
    return inner_->reduce_scatter(arguments, stream);
  }
  Status all_gather(const AllGatherArguments& arguments, Stream stream) override {
    return inner_->all_gather(arguments, stream);
  }
  std::size_t staging_bytes(std::size_t count, DataType type) const override {
    return inner_->staging_bytes(count, type);
  }
  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              Stream stream) override {
    return inner_->send(source, bytes, peer, tag, stream);
  }
  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) override {
    return inner_->recv(target, bytes, peer, tag, stream);
  }
  Status exchange(Span<const std::byte> mine, Span<std::byte> all) override {
    return inner_->exchange(mine, all);
  }
  Status barrier() override { return inner_->barrier(); }
  Result<std::unique_ptr<Communicator>> split(int color, int key) override {
    return inner_->split(color, key);
  }
  Status status() const override { return inner_->status(); }
  void abort(const Status& cause) noexcept override { inner_->abort(cause); }
  Status vote(std::uint64_t step, Span<const std::byte> decision) override {
    return inner_->vote(step, decision);
  }
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override {
    return inner_->survivors_vote(step);
  }
  Traffic traffic() const override { return inner_->traffic(); }
  std::vector<OperationTraffic> operation_traffic() const override { return inner_->operation_traffic(); }
  std::vector<OperationRecord> last_operations() const override { return inner_->last_operations(); }

 private:
  const std::unique_ptr<Communicator> inner_;
};

}  // namespace forebay::testing
