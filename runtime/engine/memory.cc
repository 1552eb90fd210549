// From a plan to memory. The plan decides where everything lies (Plan::placements); the engine allocates the
// pools and adds their base addresses.

#include <algorithm>
#include <cstring>

#include "forebay/store_measurement.h"
#include "forebay/units.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {
namespace {

// The drive is measured for files from this size on. Smaller: the measurement takes longer than it saves.
// Larger: more runs use block sizes and depths that were not measured.
constexpr std::uint64_t kMeasuredFileBytes = 256u << 20;

const char* range_name(Role role) {
  switch (role) {
    case Role::kMaster:
      return "master";
    case Role::kM:
      return "m";
    case Role::kV:
      return "v";
    case Role::kAverage:
      return "average";
    case Role::kTrainableSlice:
      return "parameters";
    default:
      return "frozen parameters";
  }
}

}  // namespace

void Engine::Impl::allocate() {
  create_arena();
  engine_stream.open_urgent();
  slots = std::make_unique<SlotTable>(*this, *arena, tags[static_cast<std::size_t>(Pool::kGathered)]);
  for (const Pool pool :
       {Pool::kParameters, Pool::kGradients, Pool::kOptimizer, Pool::kBuckets, Pool::kActivations})
    take_pool(pool);
  if (plan.offloads()) host_placement = choose_host_placement(backend.capabilities(), options);
  if (plan.bytes_in(Pool::kHost) > 0 || plan.offloads()) take_host_memory();
  if (plan.offloads() && options.tier == Tier::kFile) prepare_files();
}

void Engine::Impl::create_arena() {
  const std::uint64_t chunk = plan.options.chunk_bytes;
  ArenaOptions arena_options;
  // In recorded order more slots may be needed than planned.
  arena_options.limit_bytes = recorded() ? device_budget() : plan.reserved_bytes;
  // The plan counts to the byte.
  arena_options.growth_bytes = chunk;
  // Addresses cost nothing. Each alias takes addresses for a whole unit, although many units share a slot.
  arena_options.reserve_bytes = 4 * std::max(plan.reserved_bytes, 4 * chunk);
  const int aliases = backend.access_guard() == nullptr ? 1 : 2;
  for (const UnitLayout& unit_layout : plan.layouts) {
    arena_options.reserve_bytes += aliases * round_up(unit_layout.total_count() * element(), chunk) +
                                   aliases * round_up(unit_layout.trainable_count * element(), chunk);
  }
  arena = value_or_throw(Arena::create(backend, arena_options));
  for (int i = 0; i < kDevicePoolCount; ++i) {
    const Pool pool = static_cast<Pool>(i);
    const bool may_grow = recorded() && pool == Pool::kGathered;
    // Slots are not blocks, so they stay when the engine is spilled.
    tags[static_cast<std::size_t>(i)] =
        value_or_throw(arena->tag_create({.name = pool_name(pool),
                                          .limit_bytes = may_grow ? 0 : plan.bytes_in(pool),
                                          .pausable = options.spillable && pool != Pool::kGathered}));
  }
}

// Allocates one block, filled with zeros, for all placements of a pool on the device.
void Engine::Impl::take_pool(Pool pool) {
  AllocationRequest request;
  request.bytes = plan.bytes_in(pool);
  if (request.bytes == 0) return;
  request.region = Region::kPersistent;
  request.tag = tags[static_cast<std::size_t>(pool)];
  request.stream = engine_stream;
  const DevicePtr block = value_or_throw(arena->allocate(request));
  throw_if_error(backend.fill_async(block, 0, request.bytes, engine_stream));
  memory(pool) = {block, request.bytes};
}

// Makes the block of the host pool, filled with zeros.
void Engine::Impl::take_host_memory() {
  PinnedPoolOptions pool = pinned_options();
  pool.numa_node = host_placement.memory_node;
  pinned = value_or_throw(PinnedPool::create(backend, pool));
  if (const std::uint64_t bytes = plan.bytes_in(Pool::kHost); bytes > 0) {
    memory(Pool::kHost) = {value_or_throw(pinned->allocate(bytes)), bytes};
    if (!counts_only()) std::memset(memory(Pool::kHost).data(), 0, bytes);
  }
}

// Makes the store and its staging.
void Engine::Impl::prepare_files() {
  open_store();
  pass_buffers = staging_buffers(Role::kPassBuffers, kPassBuffers);
  if (plan.offloads_parameters()) mover_buffers = staging_buffers(Role::kMoverBuffers, kMoverBuffers);
}

void Engine::Impl::open_store() {
  if (hooks.make_store) {
    store = value_or_throw(hooks.make_store(rank()));
  } else {
    FileStoreOptions files;
    files.directories = options.offload_directories;
    std::string measured;
    if (plan.file_bytes.total() >= kMeasuredFileBytes) {
      const StoreMeasurement measurement = value_or_throw(measure_file_store(files));
      files.block_bytes = measurement.chosen.block_bytes;
      files.depth = measurement.chosen.depth;
      measured =
          ", measured " + format_bytes(static_cast<std::uint64_t>(measurement.chosen.read_bytes_per_second)) +
          "/s read, " + format_bytes(static_cast<std::uint64_t>(measurement.chosen.write_bytes_per_second)) +
          "/s written";
    }
    store = value_or_throw(make_file_store(files));
    store_description = measured;
  }
  const StoreFacts facts = store->facts();
  store_description.insert(0, facts.description);
  if (kPieceGranule * 2 % facts.granule_bytes != 0) {
    throw Error(StatusCode::kInvalidArgument,
                "the store's granule of " + std::to_string(facts.granule_bytes) +
                    " bytes does not divide 64 KiB, which optimizer states need; use a smaller one");
  }
}

std::unique_ptr<StagingBuffers> Engine::Impl::staging_buffers(Role role, std::uint64_t count) {
  auto buffers = value_or_throw(
      StagingBuffers::create(*pinned, {.buffer_bytes = plan.bytes_of(role) / count, .buffer_count = count}));
  throw_if_error(store->register_memory(buffers->memory().data(), buffers->memory().size()));
  return buffers;
}

void Engine::Impl::place_units() {
  units.resize(plan.layouts.size());
  for (int index = 0; index < unit_count(); ++index) describe_unit(index);
  for (const StatePlacement& placement : plan.placements) place(placement);
  for (int index = 0; index < unit_count(); ++index) complete_unit(index);
  if (pinned == nullptr) {
    PinnedPoolOptions pool = pinned_options();
    pool.huge_pages = false;
    pinned = value_or_throw(PinnedPool::create(backend, pool));
  }
  throw_if_error(backend.stream_synchronize(engine_stream));
}

// Sets everything in a unit that does not depend on addresses.
void Engine::Impl::describe_unit(int index) {
  Unit& u = unit(index);
  for (const auto& [shared, stages] : shared_units) {
    if (shared == index) u.stages = stages;
  }
  u.updated_count = plan.updated_count(index);
  u.updated_begin = options.stage == 0 ? 0 : static_cast<std::uint64_t>(shard()) * u.updated_count;
  u.offloaded = plan.is_offloaded(index);
  u.parameters_offloaded = u.offloaded && plan.offloads_parameters();
  u.gradient_type = plan.gradient_type(index);
  u.fixed.assign(layout(index).places.size(), false);
  for (const ParameterShape& parameter : shape(index).parameters)
    group_count = std::max(group_count, parameter.group + 1);
  note_gaps(index);
  note_matrices(index);
  note_segments(index);
  note_factors(index);
  note_uncounted(index);
  u.contributed.assign(layout(index).places.size(), false);
  u.asked = u.contributed;
  u.skipped.assign(static_cast<std::size_t>(options.forwards_ahead) + 1, false);
}

// Notes the padding of the trainable section.
void Engine::Impl::note_gaps(int index) {
  Unit& u = unit(index);
  const UnitLayout& unit_layout = layout(index);
  std::uint64_t end = 0;
  for (const UnitLayout::Place& p : unit_layout.places) {
    if (p.frozen) continue;
    if (p.offset > end) u.gaps.emplace_back(end, p.offset - end);
    end = p.offset + p.count;
  }
  if (unit_layout.trainable_count > end) u.gaps.emplace_back(end, unit_layout.trainable_count - end);
}

// Notes the parameter groups in the updated range, without parameters that freeze() fixed. Padding belongs to
// the segment before it, because zeros stay zeros under the arithmetic of every parameter group.
void Engine::Impl::note_segments(int index) {
  Unit& u = unit(index);
  const UnitLayout& unit_layout = layout(index);
  std::vector<Segment> runs;
  bool is_open = false;  // The last run goes on.
  const bool has_whole_parameters = !is_elementwise(options.optimizer);
  const bool joins = format_of(StateField::kMaster) == MomentFormat::kFloat32 && !has_whole_parameters;
  const auto end_run = [&](std::uint64_t end) {
    if (is_open) runs.back().count = end - runs.back().begin;
    is_open = false;
  };
  for (std::size_t i = 0; i < unit_layout.places.size(); ++i) {
    const UnitLayout::Place& p = unit_layout.places[i];
    const int group = shape(index).parameters[i].group;
    if (p.frozen) continue;
    if (is_open && runs.back().group == group && !u.fixed[i] && joins) continue;
    end_run(p.offset);
    if (u.fixed[i]) continue;
    runs.push_back({p.offset, 0, group, {nullptr, 0, rounding_key(shape(index).parameters[i].name)}, i});
    is_open = true;
    if (has_whole_parameters) end_run(p.offset + p.count);  // Padding has no row and no column.
  }
  end_run(unit_layout.trainable_count);
  u.segments.clear();
  for (const Segment& run : runs) {
    const std::uint64_t begin = std::max(run.begin, u.updated_begin);
    const std::uint64_t stop = std::min(run.begin + run.count, u.updated_begin + u.updated_count);
    if (begin >= stop) continue;
    u.segments.push_back({begin - u.updated_begin, stop - begin, run.group, run.rounding, run.parameter});
    u.segments.back().rounding.first = begin - run.begin;
    for (const Matrix& matrix : u.matrices) {
      if (matrix.parameter == run.parameter) u.segments.back().matrix = &matrix;
    }
    for (const OwnV& v : u.own_v) {
      if (v.parameter == run.parameter) u.segments.back().v_at = v.at;
    }
  }
}

// Muon: notes the matrices, and the other parameters' elements in the updated range.
void Engine::Impl::note_matrices(int index) {
  if (options.optimizer != Optimizer::kMuon) return;
  Unit& u = unit(index);
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < layout(index).places.size(); ++i) {
    const UnitLayout::Place& p = layout(index).places[i];
    const ParameterShape& parameter = shape(index).parameters[i];
    if (is_muon_matrix(parameter)) {
      const FactoredShape extents = factored_shape_of(parameter);
      u.matrices.push_back({i, p.offset, extents.rows, extents.columns});
    }
    if (!has_own_v(options, parameter)) continue;
    const std::uint64_t begin = std::max(p.offset, u.updated_begin);
    const std::uint64_t end = std::min(p.offset + p.count, u.updated_begin + u.updated_count);
    if (begin >= end) continue;
    u.own_v.push_back({i, begin - u.updated_begin, end - begin, at});
    at += end - begin;
  }
}

// Notes the trainable parameters and the places of their factors.
void Engine::Impl::note_factors(int index) {
  if (options.optimizer != Optimizer::kAdafactor) return;
  Unit& u = unit(index);
  if (index > 0) {
    const Unit& before = unit(index - 1);
    u.squares_at = before.squares_at + 2 * before.factored.size();
    u.scalars_at = before.scalars_at + factor_scalar_count(shape(index - 1));
  }
  std::uint64_t scalars = u.scalars_at;
  u.factored_index.assign(layout(index).places.size(), 0);
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < layout(index).places.size(); ++i) {
    const UnitLayout::Place& p = layout(index).places[i];
    if (p.frozen) continue;
    const FactoredShape matrices = factored_shape_of(shape(index).parameters[i]);
    u.factored_index[i] = u.factored.size();
    u.factored.push_back({i, matrices, p.offset, at});
    const std::uint64_t means = matrices.has_rows ? matrices.batches : 0;
    u.factored.back().scalars_at = scalars;
    scalars += 1 + means;
    if (u.offloaded) u.factored.back().row_means.resize(means);
    at += matrices.factor_count();
  }
}

// Notes the runs in this rank's part of the norm that another rank counts.
void Engine::Impl::note_uncounted(int index) {
  Unit& u = unit(index);
  const bool counts_shared = u.stages == nullptr || u.stages->rank() == 0;
  if (options.counts_replicated && counts_shared) return;
  const UnitLayout& unit_layout = layout(index);
  const std::uint64_t count = unit_layout.trainable_slice(ranks());
  const std::uint64_t begin = static_cast<std::uint64_t>(part_number()) * count;
  for (std::size_t i = 0; i < unit_layout.places.size(); ++i) {
    const UnitLayout::Place& p = unit_layout.places[i];
    const bool counts =
        counts_shared && (options.counts_replicated || !shape(index).parameters[i].replicated);
    if (p.frozen || counts) continue;
    const std::uint64_t lower = std::max(begin, p.offset);
    const std::uint64_t upper = std::min(begin + count, p.offset + p.count);
    if (lower < upper) u.uncounted.emplace_back(lower - begin, upper - lower);
  }
}

void Engine::Impl::place(const StatePlacement& placement) {
  std::byte* const base = memory(placement.pool).data();
  std::byte* const address = base == nullptr ? nullptr : base + placement.offset;
  const auto number = static_cast<std::size_t>(placement.index);
  switch (placement.role) {
    case Role::kReceive:
      staging = address;
      return;
    case Role::kBucketSum:
      bucket_sums[number] = reinterpret_cast<float*>(address);
      return;
    case Role::kFused:
      fused = address;
      return;
    case Role::kNorms:
      norms = reinterpret_cast<double*>(address);
      return;
    case Role::kControl:
      control = reinterpret_cast<StepControl*>(address);
      return;
    case Role::kActivations:
      activation_block = address;
      return;
    case Role::kTransit:
      transit[number] = address;
      return;
    case Role::kHostSum:
      host_sum = reinterpret_cast<float*>(address);
      return;
    case Role::kSaved:
      saved_values = address;
      return;
    case Role::kSquares:
      squares = reinterpret_cast<double*>(address);
      return;
    case Role::kHostSquares:
      host_squares = reinterpret_cast<double*>(address);
      return;
    case Role::kFactorScalars:
      factor_scalars = reinterpret_cast<float*>(address);
      return;
    case Role::kFactorLeaves:
      factor_leaves = reinterpret_cast<double*>(address);
      return;
    case Role::kMatrices:
      matrices[number] = reinterpret_cast<float*>(address);
      return;
    case Role::kMatrixWork:
      matrix_work = reinterpret_cast<float*>(address);
      return;
    case Role::kSlot:
    case Role::kHostRest:
    case Role::kPassBuffers:
    case Role::kMoverBuffers:
      return;  // allocate() made them.
    default:
      place_of_unit(placement, address);
  }
}

void Engine::Impl::place_of_unit(const StatePlacement& placement, std::byte* address) {
  Unit& u = unit(placement.index);
  switch (placement.role) {
    case Role::kParameters:
      u.parameters = address;
      return;
    case Role::kParameterShard:
      u.parameter_shard = address;
      return;
    case Role::kGradients:
      u.gradients = address;
      return;
    case Role::kAccumulator:
      u.accumulator = reinterpret_cast<float*>(address);
      return;
    case Role::kGradientShard:
      u.gradient_shard = address;
      return;
    case Role::kHostGradients:
      u.host_gradients = address;
      return;
    case Role::kFactors:
      u.factors = reinterpret_cast<float*>(address);
      return;
    case Role::kFactorSums:
      u.factor_sums = reinterpret_cast<float*>(address);
      return;
    case Role::kHostFactorSums:
      u.host_factor_sums = reinterpret_cast<float*>(address);
      return;
    case Role::kOrthogonal:
      u.orthogonal = reinterpret_cast<float*>(address);
      return;
    case Role::kTrainableSlice:
      u.trainable_slice = place_range(placement, address);
      return;
    case Role::kFrozenSlice:
      u.frozen_slice = place_range(placement, address);
      return;
    default:
      place_state(placement, address);
  }
}

void Engine::Impl::place_state(const StatePlacement& placement, std::byte* address) {
  Unit& u = unit(placement.index);
  const auto field = static_cast<std::size_t>(placement.role) - static_cast<std::size_t>(Role::kMaster);
  if (placement.pool == Pool::kFiles) {
    u.states[field] = place_range(placement, address);
  } else {
    u.kept[field] = address;
  }
}

// Host memory at `address`, or a new range of the store, which reads as zeros.
OffloadedRange Engine::Impl::place_range(const StatePlacement& placement, std::byte* address) {
  OffloadedRange range;
  range.host = address;
  if (placement.pool != Pool::kFiles) return range;
  range.range_bytes = placement.bytes;  // Whole pages.
  range.range = value_or_throw(store->create_range(
      std::to_string(placement.index) + " " + shape(placement.index).name + " " + range_name(placement.role),
      range.range_bytes));
  return range;
}

// Sets the addresses that follow from the placements: aliases of slots, and this rank's parts of whole
// buffers.
void Engine::Impl::complete_unit(int index) {
  Unit& u = unit(index);
  const UnitLayout& unit_layout = layout(index);
  const std::uint64_t updated_offset = u.updated_begin * element();
  if (options.stage >= 3) {
    u.parameters = slots->create_alias(SlotUse::kParameters, index, unit_layout.total_count() * element());
    u.updated_parameters = u.parameter_shard;
  } else {
    u.updated_parameters = u.parameters + updated_offset;
  }
  if (options.stage <= 1) {
    u.gradient_shard =
        u.gradients + static_cast<std::uint64_t>(shard()) * plan.slice_count(index) * element();
    u.updated_gradients = u.gradients + updated_offset;
  } else {
    u.gradients = slots->create_alias(SlotUse::kGradients, index, unit_layout.trainable_count * element());
    if (u.offloaded) {
      u.gradient_shard = transit[static_cast<std::size_t>(index) % kTransitCount];
    } else if (u.accumulator != nullptr) {
      u.gradient_shard = reinterpret_cast<std::byte*>(u.accumulator);
    }
    u.updated_gradients = u.gradient_shard;
  }
  if (u.offloaded) {
    complete_offloaded_unit(index);
  } else if (is_own_master(options)) {
    u.kept[static_cast<std::size_t>(StateField::kMaster)] = u.updated_parameters;
  }
  u.leased_parameters = u.parameters;
  u.leased_gradients = u.gradients;
  guard_alias(u.leased_parameters, SlotUse::kParameters, index, unit_layout.total_count() * element());
  guard_alias(u.leased_gradients, SlotUse::kGradients, index, unit_layout.trainable_count * element());
  u.updated = EngineEvent(*this);
  u.released = EngineEvent(*this);
}

void Engine::Impl::complete_offloaded_unit(int index) {
  Unit& u = unit(index);
  if (u.parameters_offloaded && is_own_master(options)) {
    const auto master = static_cast<std::size_t>(StateField::kMaster);
    u.trainable_slice = u.states[master];
    u.trainable_slice.host = u.kept[master];
  }
  if (options.tier == Tier::kFile) make_parts(u);
}

// With an access guard: gives leases an alias of a slot of their own, closed until a lease opens it.
void Engine::Impl::guard_alias(DevicePtr& leased, SlotUse use, int index, std::uint64_t bytes) {
  AccessGuard* const guard = backend.access_guard();
  if (guard == nullptr || slots->slot_of(use, index) == SlotAssignment::kNone) return;
  leased = slots->create_alias(use, index, bytes);
  throw_if_error(guard->guard(
      leased, round_up(bytes, plan.options.chunk_bytes),
      (use == SlotUse::kParameters ? "parameters of unit " : "gradients of unit ") + shape(index).name));
}

// Cuts a unit's states into the pieces that pass through host memory.
void Engine::Impl::make_parts(Unit& u) {
  u.first_part = pass_parts.size();
  const bool writes_parameters = u.parameters_offloaded && !is_own_master(options);
  std::uint64_t number = 0;
  for (std::uint64_t begin = 0; begin < u.updated_count; begin += plan.piece_count, ++number) {
    const bool last = u.updated_count - begin <= plan.piece_count;
    StorePassPart& part = pass_parts.emplace_back();
    const auto add = [&](const OffloadedRange& range, std::uint64_t piece_bytes, bool read) {
      const std::uint64_t offset = number * piece_bytes;
      const std::uint64_t bytes = last ? range.range_bytes - offset : piece_bytes;
      part.fields[part.field_count++] = {range.range, offset, bytes, read, true};
    };
    for (const StateField field : state_fields()) {
      add(u.states[static_cast<std::size_t>(field)],
          stored_bytes(format_of(field), plan.piece_count, plan.piece_count), true);
    }
    if (writes_parameters) add(u.trainable_slice, plan.piece_count * element(), false);
  }
  u.part_count = pass_parts.size() - u.first_part;
}

}  // namespace forebay
