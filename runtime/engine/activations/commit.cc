// From declared slots to memory: the plan, the agreement of the ranks, the places.

#include "forebay/agreement.h"
#include "forebay/error.h"
#include "forebay/log.h"
#include "forebay/units.h"
#include "runtime/engine/activations/checkpointer_impl.h"
#include "runtime/engine/activations/constants.h"
#include "runtime/engine/engine_hooks.h"

namespace forebay {

ActivationCheckpointer::Impl::Impl(Backend& backend_in, Communicator& communicator_in,
                                   ActivationCheckpointerOptions options_in)
    : backend(backend_in), communicator(communicator_in), options(std::move(options_in)) {}

// Releasing does not fail: a refusal of the backend is logged once, and the object leaked.
ActivationCheckpointer::Impl::~Impl() {
  Status first;
  const auto note = [&first](const Status& status) {
    if (!status.ok() && first.ok()) first = status;
  };
  const auto wait_for = [&](Event event) {
    if (event.handle != nullptr) note(backend.event_synchronize(event));
  };
  // Streams of the trainer may still use the memory that is released here.
  for (const Place& p : places) {
    wait_for(p.saved);
    wait_for(p.read);
  }
  for (const GatheredBuffer& buffer : buffers) wait_for(buffer.released);
  if (gather_stream.handle != nullptr) note(backend.stream_synchronize(gather_stream));
  tier.reset();
  if (gather_stream.handle != nullptr) {
    if (arena != nullptr) note(arena->stream_retire(gather_stream));
    note(backend.stream_destroy(gather_stream));
  }
  for (const Event event : events) note(backend.event_destroy(event));
  if (options.timeline != nullptr) options.timeline->release(backend);
  if (!first.ok() && failure.ok())
    log(LogLevel::kWarning, "closing an activation checkpointer: %s", first.message().c_str());
}

ActivationPlanOptions ActivationCheckpointer::Impl::plan_options() const {
  ActivationPlanOptions result = options.plan;
  result.ranks = communicator.size();
  result.chunk_bytes = options.in_region ? kActivationAlignment : backend.capabilities().granularity;
  return result;
}

void ActivationCheckpointer::Impl::commit(DevicePtr region) {
  if (committed) misuse("commit() of an activation checkpointer was called twice; call it once");
  if (!failure.ok()) throw Error(failure.with_context("the activation checkpointer failed earlier"));
  Result<ActivationPlan> made = make_activation_plan(slots, plan_options());
  Status verdict = made.status();
  if (verdict.ok() && slots.empty()) {
    verdict = Status(
        StatusCode::kInvalidArgument,
        "an activation checkpointer without slots was committed; declare() a slot for each activation");
  } else if (verdict.ok() && made.value().options.tier == Tier::kFile && made.value().file_bytes > 0 &&
             (options.hooks == nullptr || !options.hooks->make_store) && options.directories.empty()) {
    verdict = Status(StatusCode::kInvalidArgument,
                     "activations that are spilled to files need a directory for them; give one on the "
                     "drive that is to hold them");
  }
  if (verdict.ok() && options.in_region && region == nullptr && made.value().device_bytes() > 0) {
    verdict = Status(StatusCode::kInvalidArgument,
                     "an activation checkpointer whose options say in_region was committed without one; give "
                     "plan().device_bytes() of device memory");
  }
  if (verdict.ok() && reinterpret_cast<std::uintptr_t>(region) % kActivationAlignment != 0) {
    verdict = Status(StatusCode::kInvalidArgument,
                     "the region given to an activation checkpointer is not aligned to " +
                         std::to_string(kActivationAlignment) + " bytes; align it");
  }
  agree(communicator, verdict);
  plan = std::move(made).value();
  agree_on_text(communicator, "activation plans", plan.fingerprint_text());
  Status allocated;
  try {
    gather_stream = value_or_throw(backend.urgent_stream_create());
    if (region == nullptr && plan.device_bytes() > 0) {
      take_region();
    } else {
      lay_out(region);
    }
  } catch (const Error& error) {
    allocated = error.status();
    failure = allocated;
  }
  try {
    agree(communicator, allocated);
  } catch (const Error& error) {
    failure = error.status();
    throw;
  }
  traffic_before = communicator.traffic();
  committed = true;
}

// One block, so that it never fragments.
void ActivationCheckpointer::Impl::take_region() {
  ArenaOptions arena_options;
  arena_options.limit_bytes = plan.reserved_bytes;
  arena_options.growth_bytes = plan.options.chunk_bytes;
  arena_options.reserve_bytes = 4 * plan.reserved_bytes;
  arena = value_or_throw(Arena::create(backend, arena_options));
  AllocationRequest request;
  request.bytes = plan.device_bytes();
  request.region = Region::kPersistent;
  request.tag = value_or_throw(arena->tag_create("activations", plan.device_bytes()));
  request.stream = gather_stream;
  lay_out(value_or_throw(arena->allocate(request)));
}

Event ActivationCheckpointer::Impl::make_event() {
  events.push_back(value_or_throw(backend.event_create()));
  return events.back();
}

void ActivationCheckpointer::Impl::lay_out(DevicePtr region) {
  // Bytes past the end of a short slice are sent too.
  if (plan.device_bytes() > 0)
    throw_if_error(backend.fill_async(region, 0, plan.device_bytes(), gather_stream));
  const auto part = [&region](std::uint64_t bytes) {
    DevicePtr const begin = region;
    region += round_up(bytes, kActivationAlignment);
    return begin;
  };
  if (plan.spilled_bytes_per_micro_batch > 0)
    tier = ActivationTier::create(backend, plan, options, communicator.rank());
  for (std::size_t slot = 0; slot < plan.slots.size(); ++slot) {
    const ActivationPlace& bytes = plan.places[slot];
    for (int i = 0; i < plan.options.micro_batches; ++i) {
      Place& p = places.emplace_back();
      p.slot = static_cast<int>(slot);
      if (bytes.kept_bytes > 0) p.kept = part(bytes.kept_bytes);
      if (bytes.spilled_bytes > 0) {
        const ActivationSlot& declared = plan.slots[slot];
        p.home = tier->make_home("activation " + std::to_string(declared.unit) + "." +
                                     std::to_string(declared.slot) + " place " + std::to_string(i),
                                 bytes.spilled_bytes);
      }
      p.state.resize(plan.slots[slot].state_bytes);
      p.saved = make_event();
      p.spilled = make_event();
      p.read = make_event();
      p.fetched = make_event();
    }
  }
  for (int i = 0; tier != nullptr && i < plan.options.staging_count; ++i) {
    const Event filled = make_event();
    staging.push_back({part(plan.staging_buffer_bytes), filled, make_event()});
  }
  for (int i = 0; i < plan.gathered_count; ++i) {
    const Event ready = make_event();
    buffers.push_back({part(plan.gathered_buffer_bytes), -1, ready, make_event()});
  }
  in_flight.reserve(static_cast<std::size_t>(plan.options.micro_batches));
  throw_if_error(backend.stream_synchronize(gather_stream));
}

}  // namespace forebay
