#include "runtime/command/simulate/stage_link.h"

#include "forebay/error.h"

namespace forebay {
namespace {

constexpr std::uint32_t kTag = 0;  // Each direction has one kind of message.

}  // namespace

StageLink::StageLink(Backend& backend, Communicator& communicator, DevicePtr memory, const Options& options)
    : backend_(backend),
      communicator_(communicator),
      memory_(memory),
      options_(options),
      stream_(value_or_throw(backend.stream_create())),
      computed_(value_or_throw(backend.event_create())),
      received_(value_or_throw(backend.event_create())),
      sent_{value_or_throw(backend.event_create()), value_or_throw(backend.event_create())} {}

StageLink::~StageLink() {
  for (const Event event : {computed_, received_, sent_[0], sent_[1]})
    static_cast<void>(backend_.event_destroy(event));
  static_cast<void>(backend_.stream_destroy(stream_));
}

void StageLink::follow_compute() {
  throw_if_error(backend_.event_record(computed_, options_.compute));
  throw_if_error(backend_.stream_wait(stream_, computed_));
}

void StageLink::receive() {
  if (!options_.from) return;
  follow_compute();
  throw_if_error(communicator_.recv(memory_, options_.bytes, *options_.from, kTag, stream_));
  throw_if_error(backend_.event_record(received_, stream_));
}

void StageLink::wait_for_received() {
  if (options_.from) throw_if_error(backend_.stream_wait(options_.compute, received_));
}

void StageLink::send(int micro_step) {
  if (!options_.to) return;
  follow_compute();
  throw_if_error(communicator_.send(memory_, options_.bytes, *options_.to, kTag, stream_));
  throw_if_error(backend_.event_record(sent_[static_cast<std::size_t>(micro_step) % 2], stream_));
}

void StageLink::wait_for_place(int micro_step) {
  if (options_.to)
    throw_if_error(backend_.stream_wait(options_.compute, sent_[static_cast<std::size_t>(micro_step) % 2]));
}

}  // namespace forebay
