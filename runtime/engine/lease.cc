// Leases: the right to read a gathered unit, and in the backward pass to write its gradients.

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/engine/engine_impl.h"

namespace forebay {

Lease::Lease(Lease&& other) noexcept {
  *this = std::move(other);
}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  if (engine_ != nullptr) engine_->impl_->end_lease(number_);
  engine_ = std::exchange(other.engine_, nullptr);
  number_ = other.number_;
  return *this;
}

Lease::~Lease() {
  if (engine_ != nullptr) engine_->impl_->end_lease(number_);
}

Lease Engine::Impl::make_lease(Engine& engine, int index, Stream stream, bool backward) {
  must(open_aliases(index, stream, backward));
  begin_span(backend, options.timeline, stream, "trainer");
  LiveLease& lease = leases.emplace_back(LiveLease{++lease_count, index, stream, backward, {}});
  if (backward) unit(index).leased_backward = true;
  if (backward) lease.answers.assign(shape(index).parameters.size() + shape(index).tied.size(), -1);
  return Lease(&engine, lease_count);
}

Engine::Impl::LiveLease& Engine::Impl::live_lease(std::uint64_t number) {
  const auto lease = std::find_if(leases.begin(), leases.end(),
                                  [&](const LiveLease& each) { return each.number == number; });
  if (lease == leases.end()) misuse("this lease has ended: abandon() ended it; lease the unit again");
  return *lease;
}

ParameterId Engine::Impl::resolve(int index_of_unit, int index) {
  const UnitShape& own = shape(index_of_unit);
  const int own_count = static_cast<int>(own.parameters.size());
  if (index >= 0 && index < own_count) return {index_of_unit, index};
  if (index < 0 || index - own_count >= static_cast<int>(own.tied.size())) {
    misuse("unit " + own.name + " has no parameter " + std::to_string(index) + "; give 0 to " +
           std::to_string(own_count + static_cast<int>(own.tied.size()) - 1));
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

DevicePtr Engine::Impl::address(ParameterId id) {
  const UnitLayout& unit_layout = layout(id.unit);
  const UnitLayout::Place& place = unit_layout.places[static_cast<std::size_t>(id.index)];
  const std::uint64_t offset = (place.frozen ? unit_layout.trainable_count : 0) + place.offset;
  return unit(id.unit).leased_parameters + offset * element();
}

DevicePtr Engine::address(ParameterId parameter) const {
  Impl& impl = *impl_;
  if (impl.phase == Impl::Phase::kDescribe) impl.misuse("address() needs a committed engine");
  impl.check_parameter(parameter, "address()");
  return impl.address(parameter);
}

DevicePtr Lease::parameter(int index) const {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  const Engine::Impl::LiveLease& lease = impl.live_lease(number_);
  const ParameterId id = impl.resolve(lease.unit, index);
  if (!impl.reads(lease.unit, lease.backward)) {
    impl.misuse("unit " + impl.shape(lease.unit).name +
                " was added as one whose backward pass reads no parameters, so none are gathered for it");
  }
  return impl.address(id);
}

DevicePtr Lease::parameter(ParameterId id) const {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  return parameter(impl.index_in_lease(impl.live_lease(number_).unit, id, "parameter()"));
}

DevicePtr Lease::parameter_of_size(ParameterId id, std::size_t bytes) const {
  expect_alive(engine_);
  const DataType type = engine_->impl_->options.dtype;
  if (element_bytes(type) != bytes) {
    engine_->impl_->misuse("view() of elements of " + std::to_string(bytes) + " bytes, and the engine has " +
                           data_type_name(type) + "; use float for fp32 and std::uint16_t for 2-byte types");
  }
  return parameter(id);
}

Span<const std::uint64_t> Lease::shape(ParameterId id, std::uint64_t* count) const {
  const ParameterShape& described =
      engine_->impl_->shape(id.unit).parameters[static_cast<std::size_t>(id.index)];
  *count = described.count;
  if (described.shape.empty()) return {&described.count, 1};
  return {described.shape.data(), described.shape.size()};
}

int Engine::Impl::index_in_lease(int index_of_unit, ParameterId parameter, const char* call) {
  check_parameter(parameter, call);
  if (parameter.unit == index_of_unit) return parameter.index;
  const UnitShape& own = shape(index_of_unit);
  for (std::size_t i = 0; i < own.tied.size(); ++i) {
    if (own.tied[i].unit == parameter.unit && own.tied[i].index == parameter.index)
      return static_cast<int>(own.parameters.size() + i);
  }
  misuse(std::string(call) + " of parameter " +
         shape(parameter.unit).parameters[static_cast<std::size_t>(parameter.index)].name +
         ", which the leased unit " + own.name + " does not use; lease its unit, or tie() it");
}

DevicePtr Lease::gradient(int index, bool* accumulate) {
  expect_alive(engine_);
  if (accumulate == nullptr)
    engine_->impl_->misuse("gradient() needs a place to say \"=\" or \"+=\": accumulate is null");
  const Gradient gradient = engine_->impl_->ask_for_gradient(number_, index);
  if (gradient.mode != GradientMode::kNone) *accumulate = gradient.mode == GradientMode::kAdd;
  return gradient.data;
}

Gradient Lease::gradient(ParameterId id) {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  const int unit = impl.live_lease(number_).unit;
  return impl.ask_for_gradient(number_, impl.index_in_lease(unit, id, "gradient()"));
}

Gradient Lease::zeroed_gradient(ParameterId id) {
  Gradient gradient = this->gradient(id);
  if (gradient.mode != GradientMode::kWrite) return gradient;
  Engine::Impl& impl = *engine_->impl_;
  Engine::Impl::LiveLease& lease = impl.live_lease(number_);
  const UnitLayout::Place& place = impl.layout(id.unit).places[static_cast<std::size_t>(id.index)];
  impl.must(impl.backend.fill_async(gradient.data, 0, place.count * impl.element(), lease.stream));
  lease.answers[static_cast<std::size_t>(impl.index_in_lease(lease.unit, id, "zeroed_gradient()"))] = 1;
  gradient.mode = GradientMode::kAdd;
  return gradient;
}

Gradient Engine::Impl::ask_for_gradient(std::uint64_t number, int index) {
  LiveLease& lease = live_lease(number);
  if (!lease.backward) misuse("gradient() belongs to the backward pass of unit " + shape(lease.unit).name);
  const ParameterId id = resolve(lease.unit, index);
  const UnitLayout::Place& place = layout(id.unit).places[static_cast<std::size_t>(id.index)];
  StepContext::Unit& owner = unit(id.unit);
  if (place.frozen || owner.fixed[static_cast<std::size_t>(id.index)]) return {};
  owner.asked[static_cast<std::size_t>(id.index)] = true;
  DevicePtr const data = owner.leased_gradients + place.offset * element();
  int& answer = lease.answers[static_cast<std::size_t>(index)];
  if (answer < 0) {
    answer = owner.contributed[static_cast<std::size_t>(id.index)] ? 1 : 0;
    owner.contributed[static_cast<std::size_t>(id.index)] = true;
    // A test sees a gradient that is never written: these bytes are not a number in any type.
    if (answer == 0 && backend.access_guard() != nullptr) {
      must(backend.fill_async(data, 0xFF, place.count * element(), lease.stream));
      must(backend.stream_synchronize(lease.stream));  // The host may write next.
    }
  }
  return {data, answer == 1 ? GradientMode::kAdd : GradientMode::kWrite};
}

void Engine::Impl::check_gradients() {
  if (gradients_checked || options.optional_gradients) return;
  std::string first;
  int missing = 0;
  for (int index = 0; index < unit_count(); ++index) {
    if (!unit(index).leased_backward) continue;
    for (std::size_t i = 0; i < shape(index).parameters.size(); ++i) {
      const ParameterShape& parameter = shape(index).parameters[i];
      if (parameter.frozen || parameter.optional || unit(index).asked[i] || unit(index).fixed[i]) continue;
      if (missing++ == 0) first = parameter.name + " of unit " + shape(index).name;
    }
  }
  if (missing == 0) return;
  misuse("step() without the gradient of parameter " + first +
         (missing > 1 ? " and of " + std::to_string(missing - 1) + " more" : "") +
         ": the trainer never asked for it, so it would be zero; call Lease::gradient() in the backward "
         "pass, or "
         "Engine::declare_optional() before commit()");
}

// Notes the first element that is not finite in a gradient that this lease wrote.
void Engine::Impl::search_gradients(const LiveLease& lease) {
  if (non_finite.found) return;
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < lease.answers.size(); ++i) {
    if (lease.answers[i] < 0) continue;
    const ParameterId id = resolve(lease.unit, static_cast<int>(i));
    const UnitLayout::Place& place = layout(id.unit).places[static_cast<std::size_t>(id.index)];
    bytes.resize(place.count * element());
    must(backend.copy_async(bytes.data(), unit(id.unit).gradients + place.offset * element(), bytes.size(),
                            lease.stream));
    must(backend.stream_synchronize(lease.stream));
    const std::vector<float> values = widen(options.dtype, bytes);
    const auto first =
        std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
    if (first == values.end()) continue;
    non_finite = {true, micro_step, id, static_cast<std::uint64_t>(first - values.begin())};
    return;
  }
}

// The first finding by micro-step, then by rank.
std::optional<NonFiniteGradient> Engine::Impl::first_non_finite() {
  const OtherTraffic other(*this);
  std::optional<NonFiniteGradient> first;
  const std::vector<NonFinite> all = exchange(everyone(), non_finite);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (!all[r].found || (first && first->micro_step <= all[r].micro_step)) continue;
    first = {static_cast<int>(r), all[r].micro_step, all[r].parameter, all[r].element};
  }
  return first;
}

void Lease::grad_ready(int index) {
  expect_alive(engine_);
  Engine::Impl& impl = *engine_->impl_;
  const Engine::Impl::LiveLease& lease = impl.live_lease(number_);
  if (!lease.backward)
    impl.misuse("grad_ready() belongs to the backward pass of unit " + impl.shape(lease.unit).name);
  static_cast<void>(impl.resolve(lease.unit, index));
}

// Where work on two streams used the unit, the last event covers both.
Status Engine::Impl::note_release(int index, Stream stream) {
  Unit& u = unit(index);
  if (u.released_on.handle != nullptr && u.released_on != stream)
    FOREBAY_RETURN_IF_ERROR(backend.stream_wait(stream, u.released));
  u.released_on = stream;
  return backend.event_record(u.released, stream);
}

void Engine::Impl::end_lease(std::uint64_t number) noexcept {
  if (is_forked()) return;
  const auto found = std::find_if(leases.begin(), leases.end(),
                                  [&](const LiveLease& each) { return each.number == number; });
  if (found == leases.end()) return;
  const LiveLease lease = std::move(*found);
  leases.erase(found);
  const int index = lease.unit;
  const Status closed = close_aliases(index, lease.stream, lease.backward);
  if (phase == Phase::kFailed) {
    cover_work(lease);
    return;
  }
  try {
    must(closed);
    if (options.timeline != nullptr) {
      end_span(backend, options.timeline, lease.stream, "trainer",
               (lease.backward ? "backward " : "forward ") + shape(index).name);
    }
    if (lease.backward && options.find_non_finite) search_gradients(lease);
    if (!recorded() && lease.backward) reducer->complete(index, lease.stream);
    for (const int owner : units_read_by(model, index)) must(note_release(owner, lease.stream));
    gatherer->note_lease(index);
    if (recorded()) {
      release(lease);
    } else {
      if (!lease.backward) return;
      engine_stream.wait(unit(index).released);
      cursor = index;
      reducer->reduce(index, micro_step);
      if (index == 0) reducer->flush();
    }
    if (lease.backward && !options.overlap) must(backend.stream_wait(lease.stream, reducer->reduced(index)));
  } catch (const Error& error) {
    // A destructor cannot throw. The engine's next call throws this.
    phase = Phase::kFailed;
    failure = error.status();
    cover_work(lease);
  }
}

void Engine::Impl::cover_work(const LiveLease& lease) noexcept {
  if (!note_release(lease.unit, lease.stream).ok())
    static_cast<void>(backend.stream_synchronize(lease.stream));
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
