#include "parallel/pipeline_group.h"

#include "forebay/error.h"
#include "forebay/log.h"

namespace forebay::gpt {
namespace {

constexpr std::uint32_t kTag = 0;  // Each direction has one kind of message.

}  // namespace

StageLink::StageLink(Backend& backend, Communicator& communicator, Stream compute, std::optional<int> from,
                     std::optional<int> to)
    : backend_(backend),
      communicator_(communicator),
      compute_(compute),
      from_(from),
      to_(to),
      stream_(value_or_throw(backend.stream_create())),
      computed_(backend),
      received_(backend),
      sent_{OwnedEvent(backend), OwnedEvent(backend)} {}

StageLink::~StageLink() {
  gave_back(backend_.stream_destroy(stream_));
}

void StageLink::follow_compute() {
  throw_if_error(backend_.event_record(computed_.get(), compute_));
  throw_if_error(backend_.stream_wait(stream_, computed_.get()));
}

void StageLink::receive(DevicePtr target, std::size_t bytes) {
  if (!from_) return;
  follow_compute();
  throw_if_error(communicator_.recv(target, bytes, *from_, kTag, stream_));
  throw_if_error(backend_.event_record(received_.get(), stream_));
}

void StageLink::wait_for_received() {
  if (from_) throw_if_error(backend_.stream_wait(compute_, received_.get()));
}

void StageLink::send(const std::byte* source, std::size_t bytes, std::uint64_t micro_step) {
  if (!to_) return;
  follow_compute();
  throw_if_error(communicator_.send(source, bytes, *to_, kTag, stream_));
  throw_if_error(backend_.event_record(sent_[micro_step % sent_.size()].get(), stream_));
}

void StageLink::wait_for_place(std::uint64_t micro_step) {
  if (to_) throw_if_error(backend_.stream_wait(compute_, sent_[micro_step % sent_.size()].get()));
}

void StageLink::drain() noexcept {
  const Status status = backend_.stream_synchronize(stream_);
  if (!status.ok()) log(LogLevel::kInfo, "%s", status.message().c_str());
}

PipelineGroup::PipelineGroup(const Options& options) : options_(options) {
  const PipelineStage mine = stage();
  if (mine.count == 1) return;
  const auto index = static_cast<int>(mine.index);
  const auto before = mine.is_first() ? std::nullopt : std::optional(index - 1);
  const auto after = mine.is_last() ? std::nullopt : std::optional(index + 1);
  forward_.emplace(*options.backend, *options.forward, options.compute, before, after);
  backward_.emplace(*options.backend, *options.backward, options.compute, after, before);
}

PipelineStage PipelineGroup::stage() const {
  if (options_.forward == nullptr) return {};
  return {static_cast<std::size_t>(options_.forward->rank()),
          static_cast<std::size_t>(options_.forward->size())};
}

void PipelineGroup::drain() noexcept {
  if (forward_) forward_->drain();
  if (backward_) backward_->drain();
}

}  // namespace forebay::gpt
