// Leases: the right to read a gathered unit, and in the backward pass to write its gradients.

#include <utility>

#include "runtime/engine/engine_impl.h"

namespace forebay {

Lease::Lease(Engine* engine, UnitId unit, Stream stream, bool backward)
    : engine_(engine), unit_(unit), stream_(stream), backward_(backward) {}

Lease::Lease(Lease&& other) noexcept {
  *this = std::move(other);
}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  if (engine_ != nullptr) engine_->impl_->end_lease(unit_, stream_, backward_);
  engine_ = std::exchange(other.engine_, nullptr);
  unit_ = other.unit_;
  stream_ = other.stream_;
  backward_ = other.backward_;
  return *this;
}

Lease::~Lease() {
  if (engine_ != nullptr) engine_->impl_->end_lease(unit_, stream_, backward_);
}

ParameterId Engine::Impl::resolve(int index_of_unit, int index) {
  const UnitShape& own = shape(index_of_unit);
  const int own_count = static_cast<int>(own.parameters.size());
  if (index >= 0 && index < own_count) return {index_of_unit, index};
  if (index < 0 || index - own_count >= static_cast<int>(own.tied.size())) {
    misuse("unit " + own.name + " has no parameter " + std::to_string(index));
  }
  const UnitShape::Tied& tied = own.tied[static_cast<std::size_t>(index - own_count)];
  return {tied.unit, tied.index};
}

namespace {

void expect_alive(const Engine* engine) {
  if (engine == nullptr)
    throw Error(StatusCode::kInvalidArgument, "this lease was moved from; use the one it went to");
}

}  // namespace

DevicePtr Lease::parameter(int index) const {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  const ParameterId id = impl.resolve(unit_, index);
  if (backward_ && !impl.shape(unit_).backward_reads_parameters) {
    impl.misuse("unit " + impl.shape(unit_).name +
                " was added as one whose backward pass reads no parameters, so none are gathered for it");
  }
  const UnitLayout& layout = impl.layout(id.unit);
  const UnitLayout::Place& place = layout.places[static_cast<std::size_t>(id.index)];
  const std::uint64_t offset = (place.frozen ? layout.trainable_count : 0) + place.offset;
  return impl.unit(id.unit).leased_parameters + offset * impl.element();
}

DevicePtr Lease::gradient(int index, bool* accumulate) {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  if (!backward_) impl.misuse("gradient() belongs to the backward pass of unit " + impl.shape(unit_).name);
  if (accumulate == nullptr)
    impl.misuse("gradient() needs a place to say \"=\" or \"+=\": accumulate is null");
  const ParameterId id = impl.resolve(unit_, index);
  const UnitLayout::Place& place = impl.layout(id.unit).places[static_cast<std::size_t>(id.index)];
  if (place.frozen) return nullptr;
  StepContext::Unit& owner = impl.unit(id.unit);
  int& answer = impl.lease_answer[static_cast<std::size_t>(index)];
  if (answer < 0) {
    answer = owner.contributed[static_cast<std::size_t>(id.index)] ? 1 : 0;
    owner.contributed[static_cast<std::size_t>(id.index)] = true;
  }
  *accumulate = answer == 1;
  return owner.leased_gradients + place.offset * impl.element();
}

void Lease::grad_ready(int index) {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  if (!backward_) impl.misuse("grad_ready() belongs to the backward pass of unit " + impl.shape(unit_).name);
  static_cast<void>(impl.resolve(unit_, index));
}

void Engine::Impl::end_lease(int index, Stream stream, bool backward) noexcept {
  lease_alive = false;
  const Status closed = close_aliases(index, stream, backward);
  if (phase == Phase::kFailed) {
    static_cast<void>(backend.event_record(unit(index).released, stream));  // ~Engine waits for it.
    return;
  }
  try {
    must(closed);
    if (options.timeline != nullptr) {
      end_span(backend, options.timeline, stream, "trainer",
               (backward ? "backward " : "forward ") + shape(index).name);
    }
    if (backward) reducer->complete(index, stream);
    must(backend.event_record(unit(index).released, stream));
    gatherer->note_lease(index);
    if (!backward) return;
    engine_stream.wait(unit(index).released);
    cursor = index;
    reducer->reduce(index, micro_step);
    if (!options.overlap) must(backend.stream_wait(stream, reducer->reduced(index)));
  } catch (const Error& error) {
    // A destructor cannot throw. The engine's next call throws this.
    phase = Phase::kFailed;
    failure = error.status();
  }
}

Status Engine::Impl::change_access(int index, Stream stream, bool backward,
                                   Status (AccessGuard::*change)(DevicePtr, AccessGuard::Access, Stream)) {
  AccessGuard* const guard = backend.access_guard();
  if (guard == nullptr) return {};
  const bool reads = !backward || shape(index).backward_reads_parameters;
  for (const int owner : units_read_by(model, index)) {
    const Unit& u = unit(owner);
    if (reads && u.leased_parameters != u.parameters) {
      FOREBAY_RETURN_IF_ERROR((guard->*change)(u.leased_parameters, AccessGuard::Access::kRead, stream));
    }
    if (backward && u.leased_gradients != u.gradients) {
      FOREBAY_RETURN_IF_ERROR((guard->*change)(u.leased_gradients, AccessGuard::Access::kWrite, stream));
    }
  }
  return {};
}

Status Engine::Impl::open_aliases(int index, Stream stream, bool backward) {
  return change_access(index, stream, backward, &AccessGuard::open);
}
Status Engine::Impl::close_aliases(int index, Stream stream, bool backward) {
  return change_access(index, stream, backward, &AccessGuard::close);
}

}  // namespace forebay
