// Values in and out: initial weights, the fp32 masters, the digest.

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "engine_impl.h"
#include "forebay/conversions.h"

namespace forebay {

void round_parameters(DataType type, const float* source, std::uint64_t count, std::byte* target) {
  auto* half = reinterpret_cast<std::uint16_t*>(target);
  for (std::uint64_t i = 0; i < count; ++i) {
    half[i] = type == DataType::kBfloat16 ? float_to_bfloat16(source[i]) : float_to_float16(source[i]);
  }
}

namespace {

// The most one rank sends at once on the control plane.
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

}  // namespace

void Engine::Impl::copy_in(DevicePtr target, const void* source, std::uint64_t bytes) {
  if (bytes == 0) return;
  if (offloads()) must(backend.stream_synchronize(tier_stream));
  if (on_host(target)) {
    std::memcpy(target, source, bytes);
    return;
  }
  must(backend.copy_async(target, source, bytes, engine_stream));
  must(backend.stream_synchronize(engine_stream));
}

void Engine::Impl::copy_out(void* target, const std::byte* source, std::uint64_t bytes) {
  if (bytes == 0) return;
  if (offloads()) must(backend.stream_synchronize(tier_stream));
  if (on_host(source)) {
    std::memcpy(target, source, bytes);
    return;
  }
  must(backend.copy_async(target, source, bytes, engine_stream));
  must(backend.stream_synchronize(engine_stream));
}

// All ranks' slices of `bytes` each, in rank order, piece by piece over the control plane.
std::vector<std::byte> Engine::Impl::all_slices(const std::byte* mine, std::uint64_t bytes) {
  std::vector<std::byte> whole(bytes * static_cast<std::uint64_t>(ranks()));
  std::vector<std::byte> piece;
  std::vector<std::byte> pieces;
  for (std::uint64_t offset = 0; offset < bytes; offset += kExchangeBytes) {
    const std::uint64_t count = std::min(kExchangeBytes, bytes - offset);
    piece.resize(count);
    pieces.resize(count * static_cast<std::uint64_t>(ranks()));
    copy_out(piece.data(), mine + offset, count);
    must(communicator.exchange(piece, pieces));
    for (std::uint64_t r = 0; r < static_cast<std::uint64_t>(ranks()); ++r) {
      std::memcpy(&whole[r * bytes + offset], &pieces[r * count], count);
    }
  }
  return whole;
}

std::vector<float> Engine::Impl::unit_masters(int index) {
  const Unit& u = unit(index);
  const std::uint64_t count = layout(index).trainable_count;
  const auto* master = reinterpret_cast<const std::byte*>(u.master);
  if (options.stage == 0) {
    std::vector<float> values(count);
    copy_out(values.data(), master, count * sizeof(float));
    return values;
  }
  return widen(DataType::kFloat32, all_slices(master, u.updated_count * sizeof(float)));
}

std::vector<float> Engine::Impl::unit_frozen(int index) {
  const Unit& u = unit(index);
  const std::uint64_t count = layout(index).frozen_count;
  if (options.stage < 3) {
    std::vector<std::byte> bytes(count * element());
    copy_out(bytes.data(), u.parameters + layout(index).trainable_count * element(), bytes.size());
    return widen(options.dtype, bytes);
  }
  const std::uint64_t slice = layout(index).frozen_slice(ranks());
  return widen(
      options.dtype,
      all_slices(u.parameter_shard + layout(index).trainable_slice(ranks()) * element(), slice * element()));
}

void Engine::Impl::set_parameter(ParameterId id, std::span<const float> values) {
  Unit& u = unit(id.unit);
  const UnitLayout& place_of_unit = layout(id.unit);
  const UnitLayout::Place& place = place_of_unit.places[static_cast<std::size_t>(id.index)];
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
    copy_in(reinterpret_cast<std::byte*>(u.master + part.target), values.data() + part.source,
            part.count * sizeof(float));
  }
  if (options.stage < 3) {
    const std::uint64_t section = place.frozen ? place_of_unit.trainable_count : 0;
    const std::vector<std::byte> rounded = round_to(options.dtype, values);
    copy_in(u.parameters + (section + place.offset) * element(), rounded.data(), rounded.size());
    return;
  }
  const std::uint64_t slice =
      place.frozen ? place_of_unit.frozen_slice(ranks()) : place_of_unit.trainable_slice(ranks());
  const std::uint64_t section = place.frozen ? place_of_unit.trainable_slice(ranks()) : 0;
  const Part part = intersect(static_cast<std::uint64_t>(rank()) * slice, slice);
  const std::vector<std::byte> rounded = round_to(options.dtype, values.subspan(part.source, part.count));
  copy_in(u.parameter_shard + (section + part.target) * element(), rounded.data(), rounded.size());
  ++version;
}

// After the masters changed by other means than a step: the parameters follow, everywhere.
void Engine::Impl::publish_parameters() {
  for (int index = 0; index < unit_count(); ++index) {
    Unit& u = unit(index);
    if (offloads() && u.updated_count > 0) {
      const std::vector<std::byte> rounded = round_to(options.dtype, {u.master, u.updated_count});
      copy_in(u.updated_parameters, rounded.data(), rounded.size());
    } else if (options.dtype != DataType::kFloat32 && u.updated_count > 0) {
      CastArguments cast{u.master, u.updated_parameters, u.updated_count, DataType::kFloat32, options.dtype};
      must(kernels.cast(cast, engine_stream));
    }
    if (options.stage == 1 || options.stage == 2) {
      all_gather_section(u.parameters, u.updated_parameters, u.updated_count * element());
    }
    must(backend.event_record(u.parameters_ready, engine_stream));
  }
  must(backend.stream_synchronize(engine_stream));
  check_peers();
  ++version;
}

void Engine::set_parameter(ParameterId parameter, std::span<const float> values) {
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
  const std::uint64_t id =
      (static_cast<std::uint64_t>(parameter.unit) << 32) + static_cast<std::uint64_t>(parameter.index);
  impl.values_fingerprint =
      XXH3_64bits_withSeed(values.data(), values.size_bytes(), impl.values_fingerprint ^ id);
  impl.set_parameter(parameter, values);
}

std::vector<float> Engine::get_parameter(ParameterId parameter) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "get_parameter()");
  impl.check_parameter(parameter, "get_parameter()");
  const Impl::OtherTraffic other(impl);
  const UnitLayout::Place& place =
      impl.layout(parameter.unit).places[static_cast<std::size_t>(parameter.index)];
  const std::vector<float> section =
      place.frozen ? impl.unit_frozen(parameter.unit) : impl.unit_masters(parameter.unit);
  const auto begin = section.begin() + static_cast<std::ptrdiff_t>(place.offset);
  return {begin, begin + static_cast<std::ptrdiff_t>(place.count)};
}

void Engine::visit_parameters(
    const std::function<void(const ParameterShape&, std::span<const float>)>& visitor) {
  Impl& impl = *impl_;
  impl.expect(Impl::Phase::kIdle, "visit_parameters()");
  const Impl::OtherTraffic other(impl);
  for (int index = 0; index < impl.unit_count(); ++index) {
    const std::vector<float> masters = impl.unit_masters(index);
    const std::vector<float> frozen = impl.unit_frozen(index);
    for (std::size_t i = 0; i < impl.layout(index).places.size(); ++i) {
      const UnitLayout::Place& place = impl.layout(index).places[i];
      visitor(impl.shape(index).parameters[i],
              std::span<const float>(place.frozen ? frozen : masters).subspan(place.offset, place.count));
    }
  }
}

std::string Engine::digest() {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  visit_parameters([&](const ParameterShape&, std::span<const float> values) {
    XXH3_128bits_update(&state, values.data(), values.size_bytes());
  });
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

}  // namespace forebay
