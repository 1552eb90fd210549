#include "runtime/engine/step/context.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "forebay/units.h"

namespace forebay {

EngineEvent::EngineEvent(StepContext& context)
    : context_(&context), event_(value_or_throw(context.backend.event_create())) {}

EngineEvent::~EngineEvent() {
  if (event_.handle != nullptr) context_->note(context_->backend.event_destroy(event_));
}

void EngineStream::close(Arena* arena) {
  if (!owned_) return;
  owned_ = false;
  context_.note(context_.backend.stream_synchronize(stream_));
  if (arena != nullptr) context_.note(arena->stream_retire(stream_));
  context_.note(context_.backend.stream_destroy(std::exchange(stream_, {})));
}

void EngineStream::open() {
  stream_ = value_or_throw(context_.backend.stream_create());
  owned_ = true;
}

void EngineStream::open_urgent() {
  stream_ = value_or_throw(context_.backend.urgent_stream_create());
  owned_ = true;
}

void EngineStream::wait(Event event) const {
  context_.must(context_.backend.stream_wait(stream_, event));
}

void EngineStream::record(Event event) const {
  context_.must(context_.backend.event_record(event, stream_));
}

void EngineStream::copy(void* target, const void* source, std::uint64_t bytes) const {
  context_.must(context_.backend.copy_async(target, source, bytes, stream_));
}

void EngineStream::fill(DevicePtr target, std::uint8_t value, std::uint64_t bytes) const {
  context_.must(context_.backend.fill_async(target, value, bytes, stream_));
}

void EngineStream::call(HostFunction function, void* argument) const {
  context_.must(context_.backend.call_host(stream_, function, argument));
}

void EngineStream::synchronize() const {
  context_.must(context_.backend.stream_synchronize(stream_));
}

StepContext::StepContext(Backend& backend_in, Kernels& kernels_in, Communicator& communicator_in,
                         EngineOptions options_in)
    : backend(backend_in),
      kernels(kernels_in),
      communicator(communicator_in),
      options(std::move(options_in)),
      hooks(options.hooks != nullptr ? *options.hooks : internal::EngineHooks{}) {}

Status StepContext::hint_at_order(const Status& status) const {
  if (gives_up || evaluated_in_step) {
    return Status(status.code(),
                  status.message() + "; this rank " +
                      (gives_up ? "gave the step up by abandon(), which has no evaluation between its "
                                  "micro-steps: a rank that ran one is the usual cause"
                                : "ran an evaluation within the step: a rank that gave the step up by "
                                  "abandon(), or ran no evaluation, is the usual cause") +
                      "; run evaluations between steps, on every rank, where a rank may abandon a step");
  }
  return Status(status.code(),
                status.message() +
                    "; in recorded order all ranks lease their units in one order: uneven numbers "
                    "of forward passes are the usual cause of a difference, for example a loop "
                    "that ends earlier on one rank, an evaluation on rank 0 alone, or experts "
                    "that are units of their own; run as many on every rank");
}

void StepContext::must(const Status& status) {
  if (status.ok()) return;
  const bool differs = status.code() == StatusCode::kTimeout ||
                       status.message().find("ranks disagree about an operation") != std::string::npos;
  const Status told = recorded() && ranks() > 1 && differs ? hint_at_order(status) : status;
  if (phase != Phase::kDescribe) {
    phase = Phase::kFailed;
    failure = told;
  }
  throw Error(told);
}

void StepContext::note(const Status& status) {
  if (!status.ok() && closing.ok()) closing = status;
}

Status StepContext::read_offloaded(const OffloadedRange& range, std::uint64_t offset, void* target,
                                   std::uint64_t bytes) {
  if (range.host != nullptr) {
    std::memcpy(target, range.host + offset, bytes);
    return {};
  }
  const std::uint64_t granule = store->facts().granule_bytes;
  std::vector<std::byte> piece;
  auto* at = static_cast<std::byte*>(target);
  for (const std::uint64_t end = offset + bytes; offset < end;) {
    const std::uint64_t begin = offset / granule * granule;
    const std::uint64_t stop =
        std::min({begin + kStorePieceBytes, round_up(end, granule), range.range_bytes});
    piece.resize(stop - begin);
    const Result<StoreTicket> ticket = store->read(range.range, begin, piece.data(), piece.size());
    if (!ticket.ok()) return ticket.status();
    FOREBAY_RETURN_IF_ERROR(store->wait(ticket.value(), kStoreDeadline));
    const std::uint64_t count = std::min(end, stop) - offset;
    std::memcpy(at, piece.data() + (offset - begin), count);
    at += count;
    offset += count;
  }
  return {};
}

Status StepContext::all_gather_section(DevicePtr base, const std::byte* own_slice,
                                       std::uint64_t slice_bytes) {
  if (slice_bytes == 0) return Status();
  return sharded().all_gather(
      {.source = own_slice, .target = base, .target_stride_bytes = slice_bytes, .bytes = slice_bytes},
      engine_stream);
}

}  // namespace forebay
