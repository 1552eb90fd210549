// Saving, fetching ahead, gathering and loading.

#include <algorithm>
#include <cstring>
#include <utility>

#include "forebay/activation_checkpointer.h"
#include "forebay/agreement.h"
#include "forebay/check.h"
#include "forebay/error.h"
#include "forebay/log.h"
#include "forebay/units.h"
#include "runtime/engine/activations/checkpointer_impl.h"

namespace forebay {
namespace {

std::string text_of(const ActivationKey& key) {
  return "slot " + std::to_string(key.slot) + " of unit " + std::to_string(key.unit) + " in micro-batch " +
         std::to_string(key.micro_batch);
}

// The range [begin, begin + bytes), cut off at `end`.
std::uint64_t cut_off(std::uint64_t begin, std::uint64_t bytes, std::uint64_t end) {
  return begin >= end ? 0 : std::min(bytes, end - begin);
}

// FNV-1a, a word at a time.
std::uint64_t hash_of(std::uint64_t before, const ActivationSlot& slot, int micro_batch) {
  for (const int word : {slot.unit, slot.slot, micro_batch})
    before = (before ^ static_cast<std::uint32_t>(word)) * 1099511628211u;
  return before;
}

}  // namespace

// --- failure ---

void ActivationCheckpointer::Impl::misuse(const std::string& message) {
  throw Error(StatusCode::kInvalidArgument, message);
}

void ActivationCheckpointer::Impl::expect_committed(const char* call) const {
  if (!failure.ok()) throw Error(failure.with_context("the activation checkpointer failed earlier"));
  if (!committed) misuse(std::string(call) + " of an activation checkpointer needs commit() first");
}

void ActivationCheckpointer::Impl::must(const Status& status) {
  if (status.ok()) return;
  failure = status;
  if (communicator.size() > 1) communicator.abort(status);
  throw Error(status);
}

Status ActivationCheckpointer::Impl::status() const {
  if (const Status peers = communicator.status(); !peers.ok()) return peers;
  if (tier == nullptr) return {};
  const Status stored = tier->status();
  return stored.ok() ? stored : stored.with_context("the spilled activations");
}

void ActivationCheckpointer::Impl::check_peers() {
  must(status());
}

// --- look-ups ---

int ActivationCheckpointer::Impl::find_slot(const ActivationKey& key) const {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].unit == key.unit && slots[i].slot == key.slot) return static_cast<int>(i);
  }
  return -1;
}

int ActivationCheckpointer::Impl::find_saved(const ActivationKey& key) const {
  const int slot = find_slot(key);
  if (slot < 0) return -1;
  const int first = slot * plan.options.micro_batches;
  for (int i = first; i < first + plan.options.micro_batches; ++i) {
    const Place& p = places[static_cast<std::size_t>(i)];
    if (p.used && p.micro_batch == key.micro_batch) return i;
  }
  return -1;
}

int ActivationCheckpointer::Impl::find_free(int slot) const {
  const int first = slot * plan.options.micro_batches;
  for (int i = first; i < first + plan.options.micro_batches; ++i) {
    if (!places[static_cast<std::size_t>(i)].used) return i;
  }
  return -1;
}

ActivationCheckpointer::Impl::MicroBatch* ActivationCheckpointer::Impl::find_micro_batch(int number) {
  for (MicroBatch& each : in_flight) {
    if (each.number == number) return &each;
  }
  return nullptr;
}

// Buffers are taken in turn, so that the one released longest ago comes first.
int ActivationCheckpointer::Impl::free_buffer() const {
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const std::size_t index = (next_buffer + i) % buffers.size();
    if (buffers[index].place < 0) return static_cast<int>(index);
  }
  return -1;
}

MarkedSpan ActivationCheckpointer::Impl::marked(Stream stream, const char* track, const char* what,
                                                const Place& p) {
  if (options.timeline == nullptr) return {backend, nullptr, stream, track, {}};
  const ActivationSlot& slot = plan.slots[static_cast<std::size_t>(p.slot)];
  return {backend, options.timeline, stream, track,
          std::string(what) + " " + std::to_string(slot.unit) + "." + std::to_string(slot.slot) +
              " micro-batch " + std::to_string(p.micro_batch)};
}

// --- forward ---

void ActivationCheckpointer::Impl::check_save(const ActivationKey& key, int slot, const std::byte* source,
                                              std::uint64_t bytes, std::size_t state_bytes) const {
  const auto refuse = [&](const std::string& why) {
    misuse("the activation of " + text_of(key) + " cannot be saved: " + why);
  };
  if (slot < 0) refuse("it was not declared; declare() it before commit()");
  const ActivationSlot& declared = slots[static_cast<std::size_t>(slot)];
  if (bytes != declared.bytes) {
    refuse("it has " + std::to_string(bytes) + " bytes, " + std::to_string(declared.bytes) +
           " were declared; save the declared bytes");
  }
  if (source == nullptr) refuse("its address is null");
  if (state_bytes > declared.state_bytes) {
    refuse("its record has " + std::to_string(state_bytes) + " bytes, state_bytes is " +
           std::to_string(declared.state_bytes) + "; declare a larger one");
  }
  if (find_saved(key) >= 0) refuse("it is saved already; load or discard it first");
  const bool known = std::any_of(in_flight.begin(), in_flight.end(),
                                 [&](const MicroBatch& each) { return each.number == key.micro_batch; });
  if (!known && in_flight.size() == static_cast<std::size_t>(plan.options.micro_batches)) {
    refuse(std::to_string(in_flight.size()) +
           " micro-batches are in flight, as many as were planned; load one to its end first, or plan for "
           "more (micro_batches)");
  }
}

void ActivationCheckpointer::Impl::save(const ActivationKey& key, const std::byte* source,
                                        std::uint64_t bytes, Stream stream, Span<const std::byte> state) {
  expect_committed("save()");
  const int slot = find_slot(key);
  check_save(key, slot, source, bytes, state.size());
  check_peers();
  const int index = find_free(slot);
  FOREBAY_CHECK(index >= 0, "slot %d has no place for a micro-batch that is in flight", slot);
  Place& p = place(index);
  p.micro_batch = key.micro_batch;
  try {
    queue_save(index, source, stream);
  } catch (const Error&) {
    // A copy to memory that ~Impl releases may be queued, and no event tells when it is over.
    static_cast<void>(backend.stream_synchronize(stream));
    throw;
  }

  p.used = true;
  p.state_bytes = state.size();
  std::copy(state.begin(), state.end(), p.state.begin());
  MicroBatch* micro_batch = find_micro_batch(key.micro_batch);
  if (micro_batch == nullptr) micro_batch = &in_flight.emplace_back(MicroBatch{key.micro_batch, {}, false});
  micro_batch->places.push_back(index);
  if (micro_batch->places.size() == slots.size()) micro_batch->complete = true;
  ++counts.save_count;
  saved_bytes += planned(p).slice_bytes;
  counts.most_saved_bytes = std::max(counts.most_saved_bytes, saved_bytes);
  counts.most_micro_batches = std::max<std::uint64_t>(counts.most_micro_batches, in_flight.size());
  fetch_ahead();
}

void ActivationCheckpointer::Impl::queue_save(int index, const std::byte* source, Stream stream) {
  Place& p = place(index);
  const ActivationPlace& bytes = planned(p);
  const std::uint64_t begin =
      bytes.ways == 1 ? 0 : static_cast<std::uint64_t>(communicator.rank()) * bytes.slice_bytes;
  const std::uint64_t end = plan.slots[static_cast<std::size_t>(p.slot)].bytes;
  // The previous activation of this place has been read, or its copy to here is over.
  must(backend.stream_wait(stream, p.saved));
  must(backend.stream_wait(stream, p.read));
  if (bytes.spilled_bytes > 0) spill(p, source + begin, cut_off(begin, bytes.spilled_bytes, end), stream);
  const std::uint64_t kept_begin = begin + bytes.spilled_bytes;
  if (const std::uint64_t count = cut_off(kept_begin, bytes.kept_bytes, end); count > 0)
    must(backend.copy_async(p.kept, source + kept_begin, count, stream));
  must(backend.event_record(p.saved, stream));
}

// Copies to a staging place, so that the source is free at once. The trainer waits only while all staging
// places are being copied to the host.
void ActivationCheckpointer::Impl::spill(Place& p, const std::byte* source, std::uint64_t bytes,
                                         Stream stream) {
  StagingPlace& stage = staging[next_staging++ % staging.size()];
  {
    const MarkedSpan span = marked(stream, "activations wait", "save", p);
    must(backend.stream_wait(stream, stage.left));
  }
  if (bytes > 0) must(backend.copy_async(stage.data, source, bytes, stream));
  must(backend.event_record(stage.filled, stream));
  must(backend.stream_wait(tier->down(), stage.filled));
  must(backend.stream_wait(tier->down(), p.fetched));
  {
    const MarkedSpan span = marked(tier->down(), "activations down", "spill", p);
    must(tier->spill(stage.data, p.home));
  }
  must(backend.event_record(p.spilled, tier->down()));
  must(backend.event_record(stage.left, tier->down()));
  counts.spilled_bytes += planned(p).spilled_bytes;
}

// --- backward ---

int ActivationCheckpointer::Impl::load(const ActivationKey& key, Stream stream, DevicePtr* data) {
  expect_committed("load()");
  const int index = find_saved(key);
  const auto refuse = [&](const std::string& why) {
    misuse("the activation of " + text_of(key) + " cannot be loaded: " + why);
  };
  if (find_slot(key) < 0) refuse("it was not declared; declare() it before commit() and save() it first");
  if (index < 0) refuse("it was not saved, or has been loaded already; save() it in the forward pass");
  Place& p = place(index);
  if (p.leased) refuse("a lease of it is alive; end that first");
  const bool direct = planned(p).direct();
  if (!direct && leased_buffers == plan.options.lease_limit) {
    refuse(format_count(leased_buffers, "lease") + (leased_buffers == 1 ? " is" : " are") +
           " alive, as many as were planned; end one first, or plan for more (lease_limit)");
  }
  check_peers();
  find_micro_batch(key.micro_batch)->complete = true;
  if (direct) {
    must(backend.stream_wait(stream, p.saved));
    *data = p.kept;
  } else {
    if (p.buffer >= 0) {
      ++counts.ahead_count;
    } else {
      fetch(index);
    }
    const GatheredBuffer& buffer = buffers[static_cast<std::size_t>(p.buffer)];
    const MarkedSpan span = marked(stream, "activations wait", "load", p);
    must(backend.stream_wait(stream, buffer.ready));
    *data = buffer.data;
    ++leased_buffers;
  }
  p.leased = true;
  ++lease_count;
  ++counts.load_count;
  fetch_ahead();
  return index;
}

// The next loads, as far as the look-ahead goes: the rest of the micro-batches whose forward pass is over,
// the oldest first. Only the calls decide, so the result is the same on every rank.
void ActivationCheckpointer::Impl::fetch_ahead() {
  int ahead = 0;
  for (const GatheredBuffer& buffer : buffers) {
    if (buffer.place >= 0 && !place(buffer.place).leased) ++ahead;
  }
  for (const MicroBatch& micro_batch : in_flight) {
    if (!micro_batch.complete) continue;
    for (auto i = micro_batch.places.rbegin(); i != micro_batch.places.rend(); ++i) {
      const Place& p = place(*i);
      if (p.buffer >= 0 || planned(p).direct()) continue;
      if (ahead == plan.look_ahead || free_buffer() < 0) return;
      fetch(*i);
      ++ahead;
    }
  }
}

void ActivationCheckpointer::Impl::fetch(int index) {
  Place& p = place(index);
  const ActivationPlace& bytes = planned(p);
  const int free = free_buffer();
  FOREBAY_CHECK(free >= 0, "no buffer is free with %d leased", leased_buffers);
  next_buffer = static_cast<std::size_t>(free) + 1;
  GatheredBuffer& buffer = buffers[static_cast<std::size_t>(free)];
  DevicePtr const mine =
      buffer.data +
      (bytes.ways == 1 ? 0 : static_cast<std::uint64_t>(communicator.rank()) * bytes.slice_bytes);
  must(backend.stream_wait(gather_stream, buffer.released));
  must(backend.stream_wait(gather_stream, p.saved));
  if (bytes.spilled_bytes > 0) {
    const Stream up = tier->up();
    must(backend.stream_wait(up, p.spilled));
    must(backend.stream_wait(up, buffer.released));
    must(backend.stream_wait(up, buffer.ready));  // It may have been gathered and never leased.
    {
      const MarkedSpan span = marked(up, "activations up", "fetch", p);
      must(tier->fetch(p.home, mine));
    }
    must(backend.event_record(p.fetched, up));
    must(backend.stream_wait(gather_stream, p.fetched));
    counts.fetched_bytes += bytes.spilled_bytes;
  }
  const bool in_place = bytes.spilled_bytes > 0 || bytes.ways == 1;
  if (in_place && bytes.kept_bytes > 0)
    must(backend.copy_async(mine + bytes.spilled_bytes, p.kept, bytes.kept_bytes, gather_stream));
  if (bytes.ways > 1) {
    AllGatherArguments gather;
    gather.source = in_place ? mine : p.kept;
    gather.target = buffer.data;
    gather.target_stride_bytes = bytes.slice_bytes;
    gather.bytes = bytes.slice_bytes;
    const MarkedSpan span = marked(gather_stream, "activations gather", "gather", p);
    must(communicator.all_gather(gather, gather_stream));
    gathered = hash_of(gathered, plan.slots[static_cast<std::size_t>(p.slot)], p.micro_batch);
  }
  must(backend.event_record(p.read, gather_stream));
  must(backend.event_record(buffer.ready, gather_stream));
  buffer.place = index;
  p.buffer = free;
}

void ActivationCheckpointer::Impl::end_lease(int index, Stream stream) noexcept {
  Place& p = place(index);
  const Event event = p.buffer < 0 ? p.read : buffers[static_cast<std::size_t>(p.buffer)].released;
  if (const Status recorded = backend.event_record(event, stream); !recorded.ok()) {
    if (failure.ok()) {
      failure = recorded;
      communicator.abort(recorded);
    }
    static_cast<void>(backend.stream_synchronize(stream));  // In place of ~Impl, which waits for the event.
  }
  if (p.buffer >= 0) --leased_buffers;
  --lease_count;
  p.leased = false;
  forget(index);
}

void ActivationCheckpointer::Impl::forget(int index) {
  Place& p = place(index);
  if (p.buffer >= 0) buffers[static_cast<std::size_t>(p.buffer)].place = -1;
  p.buffer = -1;
  p.used = false;
  saved_bytes -= planned(p).slice_bytes;
  const auto micro_batch = std::find_if(in_flight.begin(), in_flight.end(),
                                        [&](const MicroBatch& each) { return each.number == p.micro_batch; });
  std::erase(micro_batch->places, index);
  if (micro_batch->places.empty()) in_flight.erase(micro_batch);
}

void ActivationCheckpointer::Impl::discard(const ActivationKey& key) {
  expect_committed("discard()");
  const int index = find_saved(key);
  if (index < 0)
    misuse("the activation of " + text_of(key) +
           " cannot be discarded: it is not saved; discard it once, after save()");
  if (place(index).leased)
    misuse("the activation of " + text_of(key) + " cannot be discarded: a lease of it is alive; end that");
  forget(index);
}

void ActivationCheckpointer::Impl::discard_all() {
  expect_committed("discard_all()");
  if (lease_count > 0)
    misuse("activations cannot be discarded while " + format_count(lease_count, "lease") +
           (lease_count == 1 ? " is alive; end it first" : " are alive; end them first"));
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places[i].used) forget(static_cast<int>(i));
  }
}

// Gathers of one size look alike to the communicator.
Status ActivationCheckpointer::Impl::check_order() {
  std::vector<std::uint64_t> all(static_cast<std::size_t>(communicator.size()));
  FOREBAY_RETURN_IF_ERROR(
      communicator.exchange(std::as_bytes(std::span(&gathered, 1)), std::as_writable_bytes(std::span(all))));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    return Status(
        StatusCode::kInvalidArgument,
        "tensor-parallel rank " + std::to_string(rank) +
            " loaded different activations from rank 0, or in another order, so the loaded values are wrong; "
            "call save() and load() for the same activations in the same order on all tensor-parallel ranks");
  }
  return {};
}

void ActivationCheckpointer::Impl::check() {
  expect_committed("check()");
  if (communicator.size() > 1) {
    must(backend.stream_synchronize(gather_stream));
    const Traffic before = communicator.traffic();
    try {
      throw_if_error(check_order());
      // A slice that its file store did not return is wrong on every rank, and only one rank knows.
      if (tier != nullptr) agree(communicator, status());
    } catch (const Error& error) {
      check_peers();
      must(error.status());
    }
    const Traffic after = communicator.traffic();
    traffic_before.sent_bytes += after.sent_bytes - before.sent_bytes;
    traffic_before.received_bytes += after.received_bytes - before.received_bytes;
  }
  check_peers();
}

ActivationStatistics ActivationCheckpointer::Impl::statistics() {
  expect_committed("statistics()");
  must(backend.stream_synchronize(gather_stream));
  check_peers();
  ActivationStatistics result = counts;
  result.device_bytes = arena == nullptr ? plan.device_bytes() : arena->statistics().peak_live_bytes;
  result.host_bytes = tier == nullptr ? 0 : tier->host_bytes();
  result.file_bytes = tier == nullptr ? 0 : tier->file_bytes();
  const Traffic now = communicator.traffic();
  result.traffic = {now.sent_bytes - traffic_before.sent_bytes,
                    now.received_bytes - traffic_before.received_bytes};
  return result;
}

// --- the lease ---

ActivationLease::ActivationLease(ActivationLease&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)),
      item_(other.item_),
      stream_(other.stream_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      state_(other.state_) {}

ActivationLease& ActivationLease::operator=(ActivationLease&& other) noexcept {
  std::swap(owner_, other.owner_);
  std::swap(item_, other.item_);
  std::swap(stream_, other.stream_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(state_, other.state_);
  return *this;
}

ActivationLease::~ActivationLease() {
  if (owner_ != nullptr) owner_->impl_->end_lease(item_, stream_);
}

// --- the public face ---

ActivationCheckpointer::ActivationCheckpointer(Backend& backend, Communicator& communicator,
                                               ActivationCheckpointerOptions options)
    : impl_(std::make_unique<Impl>(backend, communicator, std::move(options))) {}

ActivationCheckpointer::~ActivationCheckpointer() = default;

void ActivationCheckpointer::declare(const ActivationSlot& slot) {
  if (impl_->committed) Impl::misuse("declare() of an activation checkpointer belongs before commit()");
  if (impl_->find_slot({slot.unit, slot.slot, 0}) >= 0) {
    Impl::misuse("slot " + std::to_string(slot.slot) + " of unit " + std::to_string(slot.unit) +
                 " was declared twice; give it another number");
  }
  impl_->slots.push_back(slot);
}

ActivationPlan ActivationCheckpointer::plan() const {
  return value_or_throw(make_activation_plan(impl_->slots, impl_->plan_options()));
}

void ActivationCheckpointer::commit(DevicePtr region) {
  impl_->commit(region);
}

void ActivationCheckpointer::save(const ActivationKey& key, const std::byte* source, std::uint64_t bytes,
                                  Stream stream, Span<const std::byte> state) {
  impl_->save(key, source, bytes, stream, state);
}

ActivationLease ActivationCheckpointer::load(const ActivationKey& key, Stream stream) {
  ActivationLease lease;
  lease.item_ = impl_->load(key, stream, &lease.data_);
  const Impl::Place& p = impl_->place(lease.item_);
  lease.owner_ = this;
  lease.stream_ = stream;
  lease.bytes_ = impl_->plan.slots[static_cast<std::size_t>(p.slot)].bytes;
  lease.state_ = std::span(p.state).first(p.state_bytes);
  return lease;
}

void ActivationCheckpointer::discard(const ActivationKey& key) {
  impl_->discard(key);
}

void ActivationCheckpointer::discard_all() {
  impl_->discard_all();
}

void ActivationCheckpointer::check() {
  impl_->check();
}

ActivationStatistics ActivationCheckpointer::statistics() {
  return impl_->statistics();
}

const ActivationPlan& ActivationCheckpointer::committed_plan() const {
  impl_->expect_committed("committed_plan()");
  return impl_->plan;
}

}  // namespace forebay
