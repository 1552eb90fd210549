// From a plan to memory: the arena, the host's block, the store's ranges, and who lies where in them.

#include <algorithm>
#include <cstring>

#include "forebay/store_measurement.h"
#include "forebay/units.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {
namespace {

// Ranges of the store are whole pages.
constexpr std::uint64_t kPageBytes = 4096;
// Below this, measuring the drive would take longer than it saves.
constexpr std::uint64_t kMeasuredFileBytes = 256u << 20;

}  // namespace

DevicePtr Engine::Impl::take(Pool pool, std::uint64_t bytes) {
  if (bytes == 0) return nullptr;
  AllocationRequest request;
  request.bytes = bytes;
  request.region = Region::kPersistent;
  request.tag = tags[static_cast<std::size_t>(pool)];
  request.stream = engine_stream;
  const DevicePtr block = value_or_throw(arena->allocate(request));
  throw_if_error(backend.fill_async(block, 0, bytes, engine_stream));
  pool_blocks[static_cast<std::size_t>(pool)].emplace_back(block, bytes);
  return block;
}

void Engine::Impl::allocate() {
  ArenaOptions arena_options;
  arena_options.limit_bytes = plan.reserved_bytes;
  // Addresses cost nothing, and aliases take them for whole units, however many share a slot.
  const std::uint64_t chunk = plan.options.chunk_bytes;
  // The plan counts what is taken to the byte.
  arena_options.growth_bytes = chunk;
  arena_options.reserve_bytes = 4 * std::max(plan.reserved_bytes, 4 * chunk);
  for (const UnitLayout& place : plan.layouts) {
    arena_options.reserve_bytes +=
        round_up(place.total_count() * element(), chunk) + round_up(place.trainable_count * element(), chunk);
  }
  arena = value_or_throw(Arena::create(backend, arena_options));
  for (int i = 0; i < kPoolCount; ++i) {
    // Slots are not blocks, and stay.
    tags[static_cast<std::size_t>(i)] = value_or_throw(
        arena->tag_create({.name = kPoolNames[i],
                           .limit_bytes = pool_bytes(plan.bytes, static_cast<Pool>(i)),
                           .pausable = options.spillable && static_cast<Pool>(i) != Pool::kGathered}));
  }
  engine_stream = value_or_throw(backend.stream_create());
  average_stream = value_or_throw(backend.stream_create());
  update_stream = value_or_throw(backend.stream_create());
  bucket_reduced = value_or_throw(backend.event_create());
  averaged = value_or_throw(backend.event_create());
  for (Event& event : bucket_averaged) event = value_or_throw(backend.event_create());
  updates_done = value_or_throw(backend.event_create());
  slots = assign_slots(model, plan.layouts, plan.options);
  for (const std::uint64_t bytes : slots.slot_bytes) {
    arena_slots.push_back(
        value_or_throw(arena->slot_create(bytes, tags[static_cast<std::size_t>(Pool::kGathered)])));
    slot_ready.push_back(value_or_throw(backend.event_create()));
  }
}

// One page-locked block for all states on the host; the store; and what drives the updates.
void Engine::Impl::place_offloaded() {
  pinned = value_or_throw(PinnedPool::create(backend, {.slab_bytes = 1}));
  if (const std::uint64_t bytes = host_states_bytes(); bytes > 0) {
    host_states = value_or_throw(pinned->allocate(bytes));
    std::memset(host_states, 0, bytes);
  }
  tier_stream = value_or_throw(backend.stream_create());
  up_stream = value_or_throw(backend.stream_create());
  tier_done = value_or_throw(backend.event_create());
  host_runner = options.host_processors.empty()
                    ? std::make_unique<BlockRunner>(options.host_threads)
                    : value_or_throw(BlockRunner::create_on(options.host_processors));
  transit_user.fill(-1);
  for (std::vector<HostUpdate>& updates : host_updates) {
    updates.resize(plan.layouts.size());
    for (std::size_t i = 0; i < updates.size(); ++i) {
      updates[i].impl = this;
      updates[i].unit = static_cast<int>(i);
    }
  }
  if (options.tier == Tier::kFile) open_store();
  if (options.offload == Offload::kOptimizerAndParameters) {
    if (options.tier == Tier::kPinned) {
      fetch_stream = value_or_throw(backend.stream_create());
    } else {
      mover_buffers = value_or_throw(
          StagingBuffers::create(*pinned, {.buffer_bytes = plan.move_bytes, .buffer_count = kMoverBuffers}));
      mover = value_or_throw(Mover::create(backend, *store, *mover_buffers));
      throw_if_error(store->register_memory(mover_buffers->memory().data(), mover_buffers->memory().size()));
      fetch_stream = mover->stream();
    }
    for (std::size_t i = 0; i < slots.slot_bytes.size(); ++i)
      slot_fetched.push_back(value_or_throw(backend.event_create()));
  }
}

void Engine::Impl::open_store() {
  if (options.make_store) {
    store = value_or_throw(options.make_store(rank()));
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
  pass_buffers = value_or_throw(StagingBuffers::create(
      *pinned, {.buffer_bytes = pass_buffer_bytes(plan.piece_count, options.dtype,
                                                  options.offload == Offload::kOptimizerAndParameters),
                .buffer_count = kPassBuffers}));
  throw_if_error(store->register_memory(pass_buffers->memory().data(), pass_buffers->memory().size()));
  pass = std::make_unique<StorePass>(*store, *pass_buffers);
  for (HostPass& host_pass : host_passes) host_pass.impl = this;
  all_parts.impl = this;
}

// On whole pages, so that no transfer needs a copy. It reads as zeros.
Engine::Impl::Away Engine::Impl::make_range(const std::string& name, std::uint64_t bytes) {
  Away away;
  away.range_bytes = round_up(bytes, kPageBytes);
  away.range = value_or_throw(store->create_range(name, away.range_bytes));
  return away;
}

// The pieces in which a unit's states pass through host memory.
void Engine::Impl::make_parts(Unit& u) {
  u.first_part = pass_parts.size();
  const bool writes_parameters = u.parameters_away && options.dtype != DataType::kFloat32;
  for (std::uint64_t begin = 0; begin < u.updated_count; begin += plan.piece_count) {
    const bool last = u.updated_count - begin <= plan.piece_count;
    StorePassPart& part = pass_parts.emplace_back();
    const auto add = [&](const Away& away, std::uint64_t size, bool read) {
      const std::uint64_t offset = begin * size;
      const std::uint64_t bytes = last ? away.range_bytes - offset : plan.piece_count * size;
      part.fields[part.field_count++] = {away.range, offset, bytes, read, true};
    };
    for (const Away& state : u.states) add(state, sizeof(float), true);
    if (writes_parameters) add(u.trainable_away, element(), false);
  }
  u.part_count = pass_parts.size() - u.first_part;
}

// Where parameters lie in this rank's part of the norm that another one counts. Returns their elements.
std::uint64_t Engine::Impl::note_uncounted(int index) {
  const bool counts_shared = unit(index).stages == nullptr || unit(index).stages->rank() == 0;
  if (options.counts_replicated && counts_shared) return 0;
  const UnitLayout& place = layout(index);
  const std::uint64_t count = place.trainable_slice(ranks());
  const std::uint64_t begin = static_cast<std::uint64_t>(part_number()) * count;
  std::uint64_t elements = 0;
  for (std::size_t i = 0; i < place.places.size(); ++i) {
    const UnitLayout::Place& p = place.places[i];
    const bool counts =
        counts_shared && (options.counts_replicated || !shape(index).parameters[i].replicated);
    if (p.frozen || counts) continue;
    const std::uint64_t lower = std::max(begin, p.offset);
    const std::uint64_t upper = std::min(begin + count, p.offset + p.count);
    if (lower >= upper) continue;
    unit(index).uncounted.emplace_back(lower - begin, upper - lower);
    elements += upper - lower;
  }
  return elements;
}

void Engine::Impl::place_units() {
  const std::uint64_t size = element();
  const auto shard_index = static_cast<std::uint64_t>(shard());
  const bool has_master = options.dtype != DataType::kFloat32;
  const int stage = options.stage;

  // One block per pool; units take their parts in order of registration.
  std::byte* parameters = take(Pool::kParameters, plan.bytes.parameters);
  std::byte* gradients = take(Pool::kGradients, plan.bytes.gradients);
  if (offloads()) place_offloaded();
  std::byte* optimizer = take(Pool::kOptimizer, plan.bytes.optimizer);
  std::byte* host = host_states;
  const auto part = [](std::byte*& cursor_in_pool, std::uint64_t bytes) {
    std::byte* begin = cursor_in_pool;
    cursor_in_pool += bytes;
    return begin;
  };
  const auto alias = [&](int slot, std::uint64_t bytes) -> DevicePtr {
    if (slot == SlotAssignment::kNone) return nullptr;
    return value_or_throw(arena->alias_create(arena_slots[static_cast<std::size_t>(slot)], bytes));
  };

  if (offloads() && adds_on_host()) {
    for (std::size_t i = 0; i < kTransitCount; ++i) {
      transit[i] = part(gradients, 4 * plan.bucket_columns);
      sum_ready[i] = value_or_throw(backend.event_create());
      sum_left[i] = value_or_throw(backend.event_create());
    }
    host_sum = reinterpret_cast<float*>(part(host, 4 * plan.bucket_columns));
  } else if (offloads() && stage >= 2) {
    std::uint64_t largest_slice = 0;
    for (int index = plan.device_units; index < unit_count(); ++index)
      largest_slice = std::max(largest_slice, layout(index).trainable_slice(shards()));
    for (DevicePtr& place : transit) place = part(gradients, largest_slice * size);
  }

  std::uint64_t largest_uncounted = 0;
  for (int index = 0; index < unit_count(); ++index) {
    const UnitLayout& place = layout(index);
    const std::uint64_t slice = place.trainable_slice(shards());
    const std::uint64_t frozen_slice = place.frozen_slice(shards());
    Unit& u = units.emplace_back();
    for (const auto& [shared, stages] : shared_units) {
      if (shared == index) u.stages = stages;
    }
    u.updated_begin = stage == 0 ? 0 : shard_index * slice;
    u.updated_count = stage == 0 ? place.trainable_count : slice;
    u.away = index >= plan.device_units;
    u.parameters_away = u.away && options.offload == Offload::kOptimizerAndParameters;
    const bool in_files = u.away && options.tier == Tier::kFile;

    if (stage >= 3) {
      if (!u.parameters_away) u.parameter_shard = part(parameters, (slice + frozen_slice) * size);
      u.parameters = alias(slots.parameter_slot[static_cast<std::size_t>(index)], place.total_count() * size);
      u.updated_parameters = u.parameter_shard;
    } else {
      u.parameters = part(parameters, place.total_count() * size);
      u.updated_parameters = u.parameters + u.updated_begin * size;
    }

    u.gradient_type = options.dtype;
    if (stage <= 1) {
      u.gradients = part(gradients, place.trainable_count * size);
      u.gradient_shard = u.gradients + shard_index * slice * size;
      if (accumulates_in_fp32() && !(u.away && adds_on_host()))
        u.accumulator = reinterpret_cast<float*>(part(gradients, 4 * slice));
      u.updated_gradients = u.gradients + u.updated_begin * size;
    } else {
      u.gradients = alias(slots.gradient_slot[static_cast<std::size_t>(index)], place.trainable_count * size);
      if (accumulates_in_fp32() && !u.away)
        u.accumulator = reinterpret_cast<float*>(part(gradients, 4 * slice));
      if (u.away) {
        u.gradient_shard = transit[static_cast<std::size_t>(index) % kTransitCount];
      } else if (accumulates_in_fp32()) {
        u.gradient_shard = reinterpret_cast<std::byte*>(u.accumulator);
        u.gradient_type = DataType::kFloat32;
      } else {
        u.gradient_shard = part(gradients, slice * size);
      }
      u.updated_gradients = u.gradient_shard;
    }

    const std::uint64_t state_bytes = 4 * u.updated_count;
    if (in_files) {
      const std::string prefix = std::to_string(index) + " " + shape(index).name + " ";
      const char* const fields[] = {"master", "m", "v"};
      for (std::size_t f = 0; f < u.states.size(); ++f)
        u.states[f] = make_range(prefix + fields[f], state_bytes);
    } else {
      std::byte*& states = u.away ? host : optimizer;
      u.master =
          reinterpret_cast<float*>(has_master || u.away ? part(states, state_bytes) : u.updated_parameters);
      u.m = reinterpret_cast<float*>(part(states, state_bytes));
      u.v = reinterpret_cast<float*>(part(states, state_bytes));
    }
    if (u.away) {
      if (adds_on_host()) u.gradient_type = DataType::kFloat32;
      u.host_gradients = part(host, u.updated_count * element_bytes(u.gradient_type));
      u.host_average = {this, index};
      for (std::uint64_t column = 0; adds_on_host() && column < slice; column += plan.bucket_columns) {
        u.host_sums.push_back({this, reinterpret_cast<float*>(u.host_gradients) + column,
                               std::min(plan.bucket_columns, slice - column)});
      }
      u.left = value_or_throw(backend.event_create());
      u.host_done = value_or_throw(backend.event_create());
    }
    if (u.parameters_away) {
      const auto place_away = [&](const char* what, std::uint64_t bytes) {
        if (in_files) return make_range(std::to_string(index) + " " + shape(index).name + " " + what, bytes);
        Away away;
        away.host = part(host, bytes);
        return away;
      };
      if (has_master) {
        u.trainable_away = place_away("parameters", slice * size);
      } else if (in_files) {
        u.trainable_away = u.states[static_cast<std::size_t>(StateField::kMaster)];
      } else {
        u.trainable_away.host = reinterpret_cast<std::byte*>(u.master);
      }
      if (frozen_slice > 0) u.frozen_away = place_away("frozen parameters", frozen_slice * size);
    }
    if (in_files) make_parts(u);

    // Padding joins the segment before it: zeros stay zeros under every group's arithmetic.
    std::uint64_t end = 0;
    std::vector<Segment> runs;
    for (std::size_t i = 0; i < place.places.size(); ++i) {
      const UnitLayout::Place& p = place.places[i];
      const int group = shape(index).parameters[i].group;
      group_count = std::max(group_count, group + 1);
      if (p.frozen) continue;
      if (p.offset > end) u.gaps.emplace_back(end, p.offset - end);
      end = p.offset + p.count;
      if (runs.empty() || runs.back().group != group) {
        if (!runs.empty()) runs.back().count = p.offset - runs.back().begin;
        runs.push_back({p.offset, 0, group});
      }
    }
    largest_uncounted = std::max(largest_uncounted, note_uncounted(index));
    if (place.trainable_count > end) u.gaps.emplace_back(end, place.trainable_count - end);
    if (!runs.empty()) runs.back().count = place.trainable_count - runs.back().begin;
    for (const Segment& run : runs) {
      const std::uint64_t begin = std::max(run.begin, u.updated_begin);
      const std::uint64_t stop = std::min(run.begin + run.count, u.updated_begin + u.updated_count);
      if (begin < stop) u.segments.push_back({begin - u.updated_begin, stop - begin, run.group});
    }

    u.updated = value_or_throw(backend.event_create());
    u.released = value_or_throw(backend.event_create());
    u.parameters_ready = value_or_throw(backend.event_create());
    gradient_ready.push_back(value_or_throw(backend.event_create()));
    u.contributed.assign(place.places.size(), false);
    u.skipped.assign(static_cast<std::size_t>(options.forwards_ahead) + 1, false);
  }

  for (const StorePassPart& each : pass_parts) all_parts.parts.push_back(&each);

  staging = take(Pool::kBuckets, plan.staging_bytes);
  for (float*& sum : bucket_sums) sum = reinterpret_cast<float*>(take(Pool::kBuckets, plan.sum_bytes));
  fused = take(Pool::kBuckets, plan.fused_columns * static_cast<std::uint64_t>(shards()) * element());
  const std::uint64_t norm_count = std::max<std::uint64_t>(units.size(), deciding_units);
  norms = reinterpret_cast<double*>(take(Pool::kBuckets, record_bytes(norm_count)));
  control = reinterpret_cast<StepControl*>(norms + norm_count);
  step_decided = value_or_throw(backend.event_create());
  if (pinned == nullptr)
    pinned = value_or_throw(PinnedPool::create(backend, {.slab_bytes = 1, .huge_pages = false}));
  std::byte* const record = value_or_throw(
      pinned->allocate(sizeof(StepControl) + sizeof(StepState) + units.size() * sizeof(double)));
  uploaded = new (record) StepControl;
  decided = new (record + sizeof(StepControl)) StepState;
  host_norms = reinterpret_cast<double*>(record + sizeof(StepControl) + sizeof(StepState));
  if (host_sum != nullptr) {
    std::uint64_t leaves = 0;
    for (const UnitLayout& place : plan.layouts)
      leaves = std::max(leaves, leaf_bytes(place.trainable_slice(ranks())) / sizeof(double));
    norm_scratch.resize(leaves);
    norm_aside.resize(largest_uncounted);
    rounded.resize(kRoundedCount * size);
  }
  activation_block = take(Pool::kActivations, model.activation_bytes);
  throw_if_error(backend.stream_synchronize(engine_stream));
}

}  // namespace forebay
