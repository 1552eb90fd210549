// Values in and out: initial weights, the fp32 masters, the digest.

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "forebay/conversions.h"
#include "forebay/host_adam.h"
#include "forebay/units.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {

namespace {

// Bytes that one rank sends at once on the control plane, at most.
constexpr std::uint64_t kExchangeBytes = 4u << 20;

// `values` rounded to `type`, as bytes.
std::vector<std::byte> round_to(DataType type, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * element_bytes(type));
  if (type == DataType::kFloat32) {
    std::copy(values.begin(), values.end(), reinterpret_cast<float*>(bytes.data()));
    return bytes;
  }
  round_parameters(type, values.data(), values.size(), bytes.data());
  return bytes;
}

std::string hex_digest(const XXH3_state_t& state) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : canonical.digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace

std::vector<float> widen(DataType type, std::span<const std::byte> bytes) {
  std::vector<float> values(bytes.size() / element_bytes(type));
  if (type == DataType::kFloat32) {
    std::copy_n(reinterpret_cast<const float*>(bytes.data()), values.size(), values.data());
    return values;
  }
  const auto* half = reinterpret_cast<const std::uint16_t*>(bytes.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = type == DataType::kBfloat16 ? bfloat16_to_float(half[i]) : float16_to_float(half[i]);
  }
  return values;
}

void Engine::Impl::settle_updates() {
  updater->synchronize();
  if (const Status status = gatherer->synchronize(); !status.ok()) updater->fail(status);
  must(updater->failure());
}

void Engine::Impl::settle_leases() {
  for (const Unit& u : units) must(backend.event_synchronize(u.released));
}

void Engine::Impl::copy_in(DevicePtr target, const void* source, std::uint64_t bytes) {
  if (bytes == 0) return;
  settle_updates();
  if (on_host(target)) {
    std::memcpy(target, source, bytes);
    return;
  }
  must(backend.copy_async(target, source, bytes, engine_stream));
  must(backend.stream_synchronize(engine_stream));
}

void Engine::Impl::copy_out(void* target, const std::byte* source, std::uint64_t bytes) {
  if (bytes == 0) return;
  settle_updates();
  if (on_host(source)) {
    std::memcpy(target, source, bytes);
    return;
  }
  must(backend.copy_async(target, source, bytes, engine_stream));
  must(backend.stream_synchronize(engine_stream));
}

void Engine::Impl::read_range(const OffloadedRange& range, std::uint64_t offset, void* target,
                              std::uint64_t bytes) {
  if (bytes == 0) return;
  settle_updates();
  must(read_offloaded(range, offset, target, bytes));
}

void Engine::Impl::write_range(const OffloadedRange& range, std::uint64_t offset, const void* source,
                               std::uint64_t bytes) {
  if (bytes == 0) return;
  settle_updates();
  if (range.host != nullptr) {
    std::memcpy(range.host + offset, source, bytes);
    return;
  }
  updater->drop_read_ahead();
  const std::uint64_t granule = store->facts().granule_bytes;
  std::vector<std::byte> piece;
  const auto* at = static_cast<const std::byte*>(source);
  for (const std::uint64_t end = offset + bytes; offset < end;) {
    const std::uint64_t begin = offset / granule * granule;
    const std::uint64_t stop =
        std::min({begin + kStorePieceBytes, round_up(end, granule), range.range_bytes});
    piece.resize(stop - begin);
    // Other bytes of the same granules stay as they are.
    if (begin < offset || end < stop) read_range(range, begin, piece.data(), piece.size());
    const std::uint64_t count = std::min(end, stop) - offset;
    std::memcpy(piece.data() + (offset - begin), at, count);
    const StoreTicket ticket = value_or_throw(store->write(range.range, begin, piece.data(), piece.size()));
    must(store->wait(ticket, kStoreDeadline));
    at += count;
    offset += count;
  }
}

// Only pieces of codes, which have exponents between them, are apart from each other.
std::vector<Engine::Impl::KeptRun> Engine::Impl::kept_runs(int index, StateField field, std::uint64_t begin,
                                                           std::uint64_t count) {
  const Unit& u = unit(index);
  const MomentFormat format = format_of(field);
  const bool is_one = u.part_count == 0 || format != MomentFormat::kBlock8;
  const std::uint64_t most = is_one ? u.updated_count : plan.piece_count;
  std::vector<KeptRun> runs;
  for (const std::uint64_t end = begin + count; begin < end;) {
    const std::uint64_t number = begin / most, first = number * most;
    const std::uint64_t total = std::min(most, u.updated_count - first);
    const std::uint64_t here = std::min(end, first + total) - begin;
    const std::uint64_t offset = is_one ? 0 : number * stored_bytes(format, most, most);
    const KeptPlace place = kept_place(format, total, begin - first);
    runs.push_back({offset + place.values, offset + place.exponents, here});
    begin += here;
  }
  return runs;
}

void Engine::Impl::write_kept(int index, StateField field, std::uint64_t offset, const std::byte* bytes,
                              std::uint64_t count) {
  const Unit& u = unit(index);
  const auto number = static_cast<std::size_t>(field);
  if (u.part_count > 0) {
    write_range(u.states[number], offset, bytes, count);
  } else {
    copy_in(u.kept[number] + offset, bytes, count);
  }
}

void Engine::Impl::read_kept(int index, StateField field, std::uint64_t offset, std::byte* bytes,
                             std::uint64_t count) {
  const Unit& u = unit(index);
  const auto number = static_cast<std::size_t>(field);
  if (u.part_count > 0) {
    read_range(u.states[number], offset, bytes, count);
  } else {
    copy_out(bytes, u.kept[number] + offset, count);
  }
}

std::vector<StepContext::OwnV> Engine::Impl::own_v_in(int index, std::uint64_t begin,
                                                      std::uint64_t count) const {
  std::vector<OwnV> parts;
  for (const OwnV& v : units[static_cast<std::size_t>(index)].own_v) {
    const std::uint64_t lower = std::max(begin, v.begin), upper = std::min(begin + count, v.begin + v.count);
    if (lower < upper) parts.push_back({v.parameter, lower, upper - lower, v.at + lower - v.begin});
  }
  return parts;
}

void Engine::Impl::write_state(int index, StateField field, std::uint64_t begin,
                               std::span<const float> values) {
  std::byte* const own_v = unit(index).kept[static_cast<std::size_t>(StateField::kV)];
  if (is_own_v(field)) {
    for (const OwnV& v : own_v_in(index, begin, values.size()))
      copy_in(own_v + v.at * sizeof(float), &values[v.begin - begin], v.count * sizeof(float));
    return;
  }
  const MomentFormat format = format_of(field);
  if (field == StateField::kMaster) unit(index).squares_known = false;
  if (format == MomentFormat::kFloat32) {
    return write_kept(index, field, begin * sizeof(float), reinterpret_cast<const std::byte*>(values.data()),
                      values.size_bytes());
  }
  std::vector<std::byte> kept;
  std::vector<std::uint8_t> exponents;
  for (const KeptRun& run : kept_runs(index, field, begin, values.size())) {
    kept.resize(moment_bytes(format, run.count));
    exponents.resize(moment_exponent_bytes(format, run.count));
    narrow_moment(format, field == StateField::kV, values.data(), run.count, kept.data(), exponents.data());
    write_kept(index, field, run.values, kept.data(), kept.size());
    write_kept(index, field, run.exponents, reinterpret_cast<const std::byte*>(exponents.data()),
               exponents.size());
    values = values.subspan(run.count);
  }
}

void Engine::Impl::read_state(int index, StateField field, std::uint64_t begin, std::span<float> values) {
  const std::byte* const own_v = unit(index).kept[static_cast<std::size_t>(StateField::kV)];
  if (is_own_v(field)) {
    std::fill(values.begin(), values.end(), 0.0f);
    for (const OwnV& v : own_v_in(index, begin, values.size()))
      copy_out(&values[v.begin - begin], own_v + v.at * sizeof(float), v.count * sizeof(float));
    return;
  }
  const MomentFormat format = format_of(field);
  if (format == MomentFormat::kFloat32) {
    return read_kept(index, field, begin * sizeof(float), reinterpret_cast<std::byte*>(values.data()),
                     values.size_bytes());
  }
  std::vector<std::byte> kept;
  std::vector<std::uint8_t> exponents;
  for (const KeptRun& run : kept_runs(index, field, begin, values.size())) {
    kept.resize(moment_bytes(format, run.count));
    exponents.resize(moment_exponent_bytes(format, run.count));
    read_kept(index, field, run.values, kept.data(), kept.size());
    read_kept(index, field, run.exponents, reinterpret_cast<std::byte*>(exponents.data()), exponents.size());
    widen_moment(format, field == StateField::kV, kept.data(), exponents.data(), run.count, values.data());
    values = values.subspan(run.count);
  }
}

void Engine::Impl::write_slice(int index, bool frozen, std::uint64_t offset,
                               std::span<const std::byte> bytes) {
  const Unit& u = unit(index);
  if (u.parameters_offloaded) {
    write_range(frozen ? u.frozen_slice : u.trainable_slice, offset, bytes.data(), bytes.size());
    return;
  }
  const std::uint64_t section = frozen ? layout(index).trainable_slice(shards()) * element() : 0;
  copy_in(u.parameter_shard + section + offset, bytes.data(), bytes.size());
}

void Engine::Impl::read_slice(int index, bool frozen, std::uint64_t offset, std::span<std::byte> bytes) {
  const Unit& u = unit(index);
  if (u.parameters_offloaded) {
    read_range(frozen ? u.frozen_slice : u.trainable_slice, offset, bytes.data(), bytes.size());
    return;
  }
  const std::uint64_t section = frozen ? layout(index).trainable_slice(shards()) * element() : 0;
  copy_out(bytes.data(), u.parameter_shard + section + offset, bytes.size());
}

// Sends piece by piece over the control plane.
std::vector<std::byte> Engine::Impl::all_slices(
    std::uint64_t bytes, const std::function<void(std::uint64_t offset, std::span<std::byte> piece)>& mine) {
  std::vector<std::byte> whole(bytes * static_cast<std::uint64_t>(shards()));
  std::vector<std::byte> piece;
  std::vector<std::byte> pieces;
  for (std::uint64_t offset = 0; offset < bytes; offset += kExchangeBytes) {
    const std::uint64_t count = std::min(kExchangeBytes, bytes - offset);
    piece.resize(count);
    pieces.resize(count * static_cast<std::uint64_t>(shards()));
    mine(offset, piece);
    must(sharded().exchange(piece, pieces));
    for (std::uint64_t r = 0; r < static_cast<std::uint64_t>(shards()); ++r) {
      std::memcpy(&whole[r * bytes + offset], &pieces[r * count], count);
    }
  }
  return whole;
}

std::vector<float> Engine::Impl::unit_states(int index, StateField field) {
  if (options.stage == 0) {
    std::vector<float> values(layout(index).trainable_count);
    read_state(index, field, 0, values);
    return values;
  }
  const auto mine = [&](std::uint64_t offset, std::span<std::byte> piece) {
    read_state(index, field, offset / sizeof(float),
               {reinterpret_cast<float*>(piece.data()), piece.size() / sizeof(float)});
  };
  return widen(DataType::kFloat32, all_slices(unit(index).updated_count * sizeof(float), mine));
}

std::vector<float> Engine::Impl::unit_frozen(int index) {
  const Unit& u = unit(index);
  const std::uint64_t count = layout(index).frozen_count;
  if (options.stage < 3) {
    std::vector<std::byte> bytes(count * element());
    copy_out(bytes.data(), u.parameters + layout(index).trainable_count * element(), bytes.size());
    return widen(options.dtype, bytes);
  }
  const auto mine = [&](std::uint64_t offset, std::span<std::byte> piece) {
    read_slice(index, true, offset, piece);
  };
  return widen(options.dtype, all_slices(layout(index).frozen_slice(shards()) * element(), mine));
}

void Engine::Impl::set_master(int unit, std::uint64_t first, std::span<const float> values,
                              bool keeps_equal) {
  const bool has_average = options.ema > 0.0;
  if (values.empty() || (!keeps_equal && !has_average))
    return write_state(unit, StateField::kMaster, first, values);
  std::vector<float> master(values.begin(), values.end()), average(has_average ? values.size() : 0);
  std::vector<bool> keeps(values.size());
  if (keeps_equal) {
    std::vector<float> old(values.size());
    read_state(unit, StateField::kMaster, first, old);
    if (has_average) read_state(unit, StateField::kAverage, first, average);
    const std::vector<std::byte> given = round_to(options.dtype, values),
                                 rounded = round_to(options.dtype, old);
    for (std::size_t i = 0; i < values.size(); ++i) {
      keeps[i] = std::memcmp(&given[i * element()], &rounded[i * element()], element()) == 0;
      if (keeps[i]) master[i] = old[i];
    }
  }
  write_state(unit, StateField::kMaster, first, master);
  if (!has_average) return;
  // It begins as the master, as that is kept.
  read_state(unit, StateField::kMaster, first, master);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!keeps[i]) average[i] = master[i];
  }
  write_state(unit, StateField::kAverage, first, average);
}

void Engine::Impl::set_parameter(ParameterId id, std::uint64_t first, Span<const float> values,
                                 bool keeps_equal) {
  Unit& u = unit(id.unit);
  must(backend.event_synchronize(u.released));  // The trainer may still read it.
  const UnitLayout& place_of_unit = layout(id.unit);
  UnitLayout::Place place = place_of_unit.places[static_cast<std::size_t>(id.index)];
  place.offset += first;
  place.count = values.size();
  // The part of [place.offset, + count) that lies in [begin, begin + count), as {target offset, source
  // offset, count}.
  struct Part {
    std::uint64_t target, source, count;
  };
  const auto intersect = [&](std::uint64_t begin, std::uint64_t count) -> Part {
    const std::uint64_t lower = std::max(begin, place.offset);
    const std::uint64_t upper = std::min(begin + count, place.offset + place.count);
    if (lower >= upper) return {0, 0, 0};
    return {lower - begin, lower - place.offset, upper - lower};
  };

  if (!place.frozen) {
    const Part part = intersect(u.updated_begin, u.updated_count);
    set_master(id.unit, part.target, values.subspan(part.source, part.count), keeps_equal);
  }
  if (options.stage < 3) {
    const std::uint64_t section = place.frozen ? place_of_unit.trainable_count : 0;
    const std::vector<std::byte> rounded = round_to(options.dtype, values);
    copy_in(u.parameters + (section + place.offset) * element(), rounded.data(), rounded.size());
    return;
  }
  const std::uint64_t slice =
      place.frozen ? place_of_unit.frozen_slice(shards()) : place_of_unit.trainable_slice(shards());
  const Part part = intersect(static_cast<std::uint64_t>(shard()) * slice, slice);
  const std::vector<std::byte> rounded = round_to(options.dtype, values.subspan(part.source, part.count));
  write_slice(id.unit, place.frozen, part.target * element(), rounded);
  gatherer->weights_changed();
}

void Engine::Impl::spill(const SpillOptions& states) {
  if (!options.spillable) {
    misuse("spill() of an engine whose states share memory; set EngineOptions::spillable before commit()");
  }
  settle_leases();
  must(backend.stream_synchronize(engine_stream));
  // An abandoned step leaves reductions and their norms in the queue.
  reducer->synchronize();
  settle_updates();
  const std::array<bool, kDevicePoolCount> wanted{
      states.parameters, states.gradients, states.optimizer, false, states.workspace, states.workspace};
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i] || spilled[i] || pool_memory[i].empty()) continue;
    const Pool pool = static_cast<Pool>(i);
    throw_if_error(arena->pause(tags[i], pool == Pool::kParameters || pool == Pool::kOptimizer));
    spilled[i] = true;
  }
}

void Engine::Impl::fetch() {
  for (std::size_t i = 0; i < spilled.size(); ++i) {
    if (!spilled[i]) continue;
    throw_if_error(arena->resume(tags[i]));
    spilled[i] = false;
    const Pool pool = static_cast<Pool>(i);
    if (pool == Pool::kParameters || pool == Pool::kOptimizer) continue;
    // Padding of gradients, and norms of units without a slice, are zeros.
    must(backend.fill_async(pool_memory[i].data(), 0, pool_memory[i].size(), engine_stream));
    // So are the sums of squares of masters on the device.
    for (Unit& u : units) u.squares_known = u.squares_known && u.offloaded;
  }
  must(backend.stream_synchronize(engine_stream));
}

// Sets the parameters on all ranks from the masters, after a change of the masters other than a step.
void Engine::Impl::publish_parameters() {
  settle_updates();
  for (int index = 0; index < unit_count(); ++index) {
    Unit& u = unit(index);
    if (u.offloaded && u.updated_count > 0) {
      std::vector<float> masters(u.updated_count);
      read_state(index, StateField::kMaster, 0, masters);
      const std::vector<std::byte> rounded = round_to(options.dtype, masters);
      if (options.stage == 3) {
        write_slice(index, false, 0, rounded);
      } else {
        copy_in(u.updated_parameters, rounded.data(), rounded.size());
      }
    } else if (!is_own_master(options) && u.updated_count > 0) {
      CastArguments cast{u.kept[static_cast<std::size_t>(StateField::kMaster)], u.updated_parameters,
                         u.updated_count, DataType::kFloat32, options.dtype};
      must(kernels.cast(cast, engine_stream));
    }
    must(gatherer->publish(index, true));
  }
  must(backend.stream_synchronize(engine_stream));
  check_peers();
  gatherer->weights_changed();
}

void Engine::Impl::expect_own_weights(const char* call) {
  if (!average_is_swapped) return;
  misuse(std::string(call) +
         " while the weights are their moving average; call swap_average() once more first");
}

void Engine::swap_average() {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "swap_average()");
  if (impl.options.ema == 0.0)
    impl.misuse("swap_average() of an engine that keeps no average; set EngineOptions::ema before commit()");
  if (impl.format_of(StateField::kMaster) != MomentFormat::kFloat32) {
    impl.misuse(
        "swap_average() without master weights, which would round the average to bf16 for good; set "
        "EngineOptions::master_weights");
  }
  const Impl::OtherTraffic other(impl);
  impl.settle_leases();
  std::vector<float> masters, averages;
  for (int unit = 0; unit < impl.unit_count(); ++unit) {
    const std::uint64_t count = impl.unit(unit).updated_count;
    for (std::uint64_t done = 0; done < count; done += masters.size()) {
      masters.resize(std::min(count - done, kExchangeBytes / sizeof(float)));
      averages.resize(masters.size());
      impl.read_state(unit, StateField::kMaster, done, masters);
      impl.read_state(unit, StateField::kAverage, done, averages);
      impl.write_state(unit, StateField::kMaster, done, averages);
      impl.write_state(unit, StateField::kAverage, done, masters);
    }
  }
  impl.publish_parameters();
  impl.average_is_swapped = !impl.average_is_swapped;
}

void Engine::set_parameter(ParameterId parameter, Span<const float> values) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "set_parameter()");
  impl.check_parameter(parameter, "set_parameter()");
  const std::uint64_t count =
      impl.layout(parameter.unit).places[static_cast<std::size_t>(parameter.index)].count;
  if (values.size() != count) {
    impl.misuse("set_parameter(" +
                impl.shape(parameter.unit).parameters[static_cast<std::size_t>(parameter.index)].name +
                ") was given " + std::to_string(values.size()) + " values for " + std::to_string(count));
  }
  set_parameter_part(parameter, 0, values);
}

void Engine::set_parameter_part(ParameterId parameter, std::uint64_t first, Span<const float> values) {
  impl_->set_given("set_parameter_part()", parameter, first, values, false);
}

void Engine::set_changed_part(ParameterId parameter, std::uint64_t first, Span<const float> values) {
  impl_->set_given("set_changed_part()", parameter, first, values, true);
}

void Engine::Impl::set_given(const char* call, ParameterId parameter, std::uint64_t first,
                             Span<const float> values, bool keeps_equal) {
  expect(Phase::kIdle, call);
  check_parameter(parameter, call);
  const ParameterShape& of = shape(parameter.unit).parameters[static_cast<std::size_t>(parameter.index)];
  if (first > of.count || values.size() > of.count - first) {
    misuse(std::string(call) + " of " + of.name + " was given " + std::to_string(values.size()) +
           " values from element " + std::to_string(first) + " on, and it has " + std::to_string(of.count));
  }
  given_values.give(of.name, first, values, of.count, keeps_equal, shape(parameter.unit).shared_by > 1);
  set_parameter(parameter, first, values, keeps_equal);
}

std::vector<float> Engine::get_parameter(ParameterId parameter) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "get_parameter()");
  impl.check_parameter(parameter, "get_parameter()");
  const Impl::OtherTraffic other(impl);
  const UnitLayout::Place& place =
      impl.layout(parameter.unit).places[static_cast<std::size_t>(parameter.index)];
  const std::vector<float> section =
      place.frozen ? impl.unit_frozen(parameter.unit) : impl.unit_states(parameter.unit, StateField::kMaster);
  const auto begin = section.begin() + static_cast<std::ptrdiff_t>(place.offset);
  return {begin, begin + static_cast<std::ptrdiff_t>(place.count)};
}

std::vector<float> Engine::get_moment(ParameterId parameter, Moment moment) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "get_moment()");
  impl.check_parameter(parameter, "get_moment()");
  const Impl::OtherTraffic other(impl);
  const UnitLayout::Place& place =
      impl.layout(parameter.unit).places[static_cast<std::size_t>(parameter.index)];
  if (place.frozen) {
    impl.misuse("get_moment() of " +
                impl.shape(parameter.unit).parameters[static_cast<std::size_t>(parameter.index)].name +
                ", which is frozen and has neither m nor v; ask for that of a trainable parameter");
  }
  if (moment == Moment::kFirst && !has_first_moment(impl.options.optimizer)) {
    impl.misuse(std::string("get_moment() of m, which ") + optimizer_name(impl.options.optimizer) +
                " has not, and its second moment is in factors; read them from saved state");
  }
  const ParameterShape& shape =
      impl.shape(parameter.unit).parameters[static_cast<std::size_t>(parameter.index)];
  if (moment == Moment::kSecond && !has_second_moment(impl.options.optimizer) &&
      !has_own_v(impl.options, shape)) {
    impl.misuse(std::string("get_moment() of v, which ") + optimizer_name(impl.options.optimizer) +
                " has not" + (is_muon_matrix(shape) ? " for " + shape.name : std::string()) +
                "; ask for the first moment");
  }
  const std::vector<float> section =
      impl.unit_states(parameter.unit, moment == Moment::kFirst ? StateField::kM : StateField::kV);
  const auto begin = section.begin() + static_cast<std::ptrdiff_t>(place.offset);
  return {begin, begin + static_cast<std::ptrdiff_t>(place.count)};
}

std::vector<float> Engine::get_average(ParameterId parameter) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "get_average()");
  impl.check_parameter(parameter, "get_average()");
  const Impl::OtherTraffic other(impl);
  const UnitLayout::Place& place =
      impl.layout(parameter.unit).places[static_cast<std::size_t>(parameter.index)];
  if (impl.options.ema == 0.0)
    impl.misuse("get_average() of an engine that keeps none; set EngineOptions::ema before commit()");
  if (place.frozen) return get_parameter(parameter);
  const std::vector<float> section = impl.unit_states(parameter.unit, StateField::kAverage);
  const auto begin = section.begin() + static_cast<std::ptrdiff_t>(place.offset);
  return {begin, begin + static_cast<std::ptrdiff_t>(place.count)};
}

// The stages that share a unit number it differently.
void Engine::Impl::note_freeze(const UnitShape& unit, int index, bool frozen) {
  if (unit.shared_by < 2) return;
  const std::string& name = unit.parameters[static_cast<std::size_t>(index)].name;
  shared_calls_fingerprint =
      XXH3_64bits_withSeed(name.data(), name.size(), shared_calls_fingerprint ^ (frozen ? 1 : 2));
}

void Engine::freeze(ParameterId parameter, bool frozen) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "freeze()");
  impl.check_parameter(parameter, "freeze()");
  const auto index = static_cast<std::size_t>(parameter.index);
  const ParameterShape& shape = impl.shape(parameter.unit).parameters[index];
  if (shape.frozen) {
    impl.misuse(
        "freeze() of " + shape.name +
        ", which add_parameter() froze: it has no optimizer states; add it as trainable, and freeze it");
  }
  impl.settle_updates();
  impl.unit(parameter.unit).fixed[index] = frozen;
  impl.note_segments(parameter.unit);
  const int call[] = {parameter.unit, parameter.index, frozen ? 1 : 0};
  impl.calls_fingerprint = XXH3_64bits_withSeed(call, sizeof(call), impl.calls_fingerprint);
  impl.note_freeze(impl.shape(parameter.unit), parameter.index, frozen);
}

void Engine::reset_moments() {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "reset_moments()");
  impl.settle_updates();
  std::vector<float> zeros;
  for (int unit = 0; unit < impl.unit_count(); ++unit) {
    const std::uint64_t count = impl.unit(unit).updated_count;
    for (const StateField field : impl.saved_fields()) {
      if (field == StateField::kMaster || field == StateField::kAverage) continue;
      for (std::uint64_t done = 0; done < count; done += zeros.size()) {
        zeros.assign(std::min(count - done, kExchangeBytes / sizeof(float)), 0.0f);
        impl.write_state(unit, field, done, zeros);
      }
    }
    if (impl.unit(unit).factored.empty()) continue;
    zeros.assign(impl.plan.factor_counts[static_cast<std::size_t>(unit)], 0.0f);
    impl.copy_in(reinterpret_cast<std::byte*>(impl.unit(unit).factors), zeros.data(),
                 zeros.size() * sizeof(float));
  }
  impl.applied_steps = 0;
  constexpr char kCall[] = "reset_moments";
  impl.calls_fingerprint = XXH3_64bits_withSeed(kCall, sizeof(kCall), impl.calls_fingerprint);
  impl.shared_calls_fingerprint = XXH3_64bits_withSeed(kCall, sizeof(kCall), impl.shared_calls_fingerprint);
}

void Engine::visit_parameters(const std::function<void(const ParameterShape&, Span<const float>)>& visitor) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "visit_parameters()");
  const Impl::OtherTraffic other(impl);
  for (int index = 0; index < impl.unit_count(); ++index) {
    const std::vector<float> masters = impl.unit_states(index, StateField::kMaster);
    const std::vector<float> frozen = impl.unit_frozen(index);
    for (std::size_t i = 0; i < impl.layout(index).places.size(); ++i) {
      const UnitLayout::Place& place = impl.layout(index).places[i];
      visitor(impl.shape(index).parameters[i],
              std::span<const float>(place.frozen ? frozen : masters).subspan(place.offset, place.count));
    }
  }
}

std::string Engine::digest() {
  impl_->expect(Impl::Phase::kIdle, "digest()");
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  visit_parameters([&](const ParameterShape&, std::span<const float> values) {
    XXH3_128bits_update(&state, values.data(), values.size_bytes());
  });
  return hex_digest(state);
}

std::string Engine::shard_digest() {
  Impl& impl = *impl_;
  impl.expect_own_process();
  if (impl.phase == Impl::Phase::kDescribe) impl.misuse("shard_digest() belongs after commit()");
  impl.expect_fetched("shard_digest()");
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  std::vector<float> piece;
  for (int unit = 0; unit < impl.unit_count(); ++unit) {
    const std::uint64_t count = impl.unit(unit).updated_count;
    for (std::uint64_t done = 0; done < count; done += piece.size()) {
      piece.resize(std::min(count - done, kExchangeBytes / sizeof(float)));
      impl.read_state(unit, StateField::kMaster, done, piece);
      XXH3_128bits_update(&state, piece.data(), piece.size() * sizeof(float));
    }
  }
  return hex_digest(state);
}

}  // namespace forebay
