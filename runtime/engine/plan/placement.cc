#include "runtime/engine/plan/placement.h"

#include <algorithm>
#include <array>
#include <utility>

#include "forebay/arena.h"
#include "forebay/grouped_communicator.h"
#include "forebay/units.h"
#include "runtime/engine/plan/step_control.h"

namespace forebay {
namespace {

// The input of the reduction of one bucket, from all ranks.
std::uint64_t bucket_staging_bytes(const PlanOptions& options, std::uint64_t columns) {
  if (options.ranks == 1) return 0;
  if (options.in_groups()) {
    return grouped_staging_bytes({.group = options.group, .replicate = options.shard_within_group},
                                 options.ranks, columns, options.dtype);
  }
  return static_cast<std::uint64_t>(options.ranks) * columns * element_bytes(options.dtype);
}

// The most scratch that the norm of a unit takes: its leaves, and a place to set aside the elements that this
// rank does not count.
std::uint64_t norm_scratch_bytes(const ModelShape& model, const Plan& plan) {
  std::uint64_t most = 0;
  for (std::size_t u = 0; u < model.units.size(); ++u) {
    const std::uint64_t slice = plan.layouts[u].trainable_slice(plan.options.ranks);
    std::uint64_t replicated = 0;
    for (const ParameterShape& parameter : model.units[u].parameters) {
      if ((parameter.replicated || model.units[u].shared_by > 1) && !parameter.frozen)
        replicated += parameter.count;
    }
    most = std::max(most, leaf_bytes(slice) + std::min(replicated, slice) * sizeof(float));
  }
  return most;
}

// Each rank saves one part of every slice that it keeps.
std::uint64_t saved_bytes(const Plan& plan) {
  std::uint64_t bytes = 0;
  for (const UnitLayout& layout : plan.layouts) {
    const std::uint64_t slice = layout.trainable_slice(plan.options.ranks);
    for (const StateField field : states_of(plan.options))
      bytes += kept_bytes(state_format(plan.options, field), slice);
    bytes += element_bytes(plan.options.dtype) * layout.frozen_slice(plan.options.ranks);
  }
  for (const std::uint64_t count : plan.factor_counts) bytes += count * sizeof(float);
  for (const Plan::MuonUnit& unit : plan.muon) bytes += unit.saved_v_count * sizeof(float);
  return bytes;
}

// Appends placements to the list. Each takes the next bytes of its pool.
class Placer {
 public:
  Placer(const ModelShape& model, const Plan& plan)
      : model_(model), plan_(plan), options_(plan.options), element_(element_bytes(plan.options.dtype)) {
    constexpr std::size_t kTypicalPerUnit = 6;
    placements_.reserve(kTypicalPerUnit * model.units.size());
  }

  std::vector<StatePlacement> place() {
    place_slots();
    place_buckets();
    place_matrices();
    add(Role::kActivations, Pool::kActivations, round_up(model_.activation_bytes, kBlockGranule));
    if (plan_.offloads()) {
      place_transit();
      if (options_.tier == Tier::kFile) place_file_buffers();
    }
    for (int unit = 0; unit < static_cast<int>(plan_.layouts.size()); ++unit) {
      place_parameters(unit);
      place_gradients(unit);
      place_states(unit);
      place_factors(unit);
      place_muon(unit);
      if (!plan_.is_offloaded(unit)) continue;
      place_host_gradients(unit);
      if (plan_.offloads_parameters()) place_offloaded_parameters(unit);
    }
    if (options_.save_async) add(Role::kSaved, Pool::kHost, saved_bytes(plan_));
    place_host_squares();
    place_rest_of_host();
    return std::move(placements_);
  }

 private:
  void add(Role role, Pool pool, std::uint64_t bytes, int index = 0) {
    if (pool == Pool::kFiles) bytes = round_up(bytes, kPageBytes);
    if (pool == Pool::kOptimizer) bytes = round_up(bytes, kBlockGranule);
    std::uint64_t& end = ends_[static_cast<std::size_t>(pool)];
    placements_.push_back({role, pool, index, end, bytes});
    end += bytes;
  }

  void place_slots() {
    int slot = 0;
    for (const std::uint64_t bytes : plan_.slots.slot_bytes) add(Role::kSlot, Pool::kGathered, bytes, slot++);
  }

  void place_buckets() {
    const std::uint64_t units = plan_.deciding_units();
    const std::uint64_t factor_bytes =
        plan_.factor_counts.empty()
            ? 0
            : *std::max_element(plan_.factor_counts.begin(), plan_.factor_counts.end()) * sizeof(float);
    const auto ranks = static_cast<std::uint64_t>(options_.ranks);
    // Muon's matrices return from all ranks, also where gradients are added in groups.
    const std::uint64_t matrix_bytes =
        plan_.matrix_work_count == 0 || ranks == 1 ? 0 : ranks * plan_.bucket_columns * element_;
    add(Role::kReceive, Pool::kBuckets,
        round_up(std::max({bucket_staging_bytes(options_, plan_.bucket_columns),
                           decision_bytes(plan_.deciding_ranks(), units), ranks == 1 ? 0 : factor_bytes,
                           matrix_bytes}),
                 kBlockGranule));
    const std::uint64_t sum_bytes =
        round_up(std::max({plan_.bucket_columns * sizeof(float), norm_scratch_bytes(model_, plan_),
                           factor_bytes / ranks}),
                 kBlockGranule);
    for (std::size_t i = 0; i < kBucketsInFlight; ++i)
      add(Role::kBucketSum, Pool::kBuckets, sum_bytes, static_cast<int>(i));
    const auto shards = static_cast<std::uint64_t>(options_.shards());
    add(Role::kFused, Pool::kBuckets, round_up(shards * plan_.fused_columns * element_, kBlockGranule));
    const std::uint64_t norm_bytes = units * sizeof(double);
    add(Role::kNorms, Pool::kBuckets, norm_bytes);
    add(Role::kControl, Pool::kBuckets, round_up(record_bytes(units), kBlockGranule) - norm_bytes);
    place_squares();
  }

  std::uint64_t square_bytes() const {
    const auto records = static_cast<std::uint64_t>(options_.ranks) + 1;
    return round_up(records * plan_.square_count * sizeof(double), kBlockGranule);
  }

  void place_squares() {
    if (plan_.square_count == 0) return;
    add(Role::kSquares, Pool::kBuckets, square_bytes());
    std::uint64_t scalars = 0, leaves = 0;
    for (int unit = 0; unit < plan_.device_units; ++unit) {
      const auto number = static_cast<std::size_t>(unit);
      scalars += factor_scalar_count(model_.units[number]);
      leaves = std::max(leaves, leaf_room(plan_.layouts[number].trainable_slice(options_.ranks)));
    }
    if (scalars == 0) return;
    add(Role::kFactorScalars, Pool::kBuckets, round_up(scalars * sizeof(float), kBlockGranule));
    add(Role::kFactorLeaves, Pool::kBuckets, round_up(leaves * sizeof(double), kBlockGranule));
  }

  // Pinned memory has whole pages.
  void place_rest_of_host() {
    const std::uint64_t end = ends_[static_cast<std::size_t>(Pool::kHost)];
    if (const std::uint64_t rest = round_up(end, kPageBytes) - end; rest > 0)
      add(Role::kHostRest, Pool::kHost, rest);
  }

  // To the end of a page, which Adafactor's bytes count.
  void place_host_squares() {
    if (plan_.square_count == 0 || !plan_.offloads()) return;
    const std::uint64_t begin = ends_[static_cast<std::size_t>(Pool::kHost)];
    add(Role::kHostSquares, Pool::kHost, round_up(begin + square_bytes(), kPageBytes) - begin);
  }

  // Gradients of offloaded units leave the device from here: as slices, or as the fp32 sums of buckets where
  // micro-steps add up on the host. At stages 0 and 1 slices leave from the unit's own gradients.
  void place_transit() {
    std::uint64_t largest = 0;
    for (int unit = plan_.device_units; unit < static_cast<int>(plan_.layouts.size()); ++unit)
      largest = std::max(largest, plan_.slice_count(unit));
    const std::uint64_t sum_bytes = largest == 0 ? 0 : plan_.bucket_columns * sizeof(float);
    const bool sums = plan_.adds_on_host();
    if (!sums && options_.stage <= 1) return;
    for (std::uint64_t i = 0; i < kTransitCount; ++i) {
      add(Role::kTransit, Pool::kGradients, sums ? sum_bytes : largest * element_, static_cast<int>(i));
    }
    if (sums) add(Role::kHostSum, Pool::kHost, sum_bytes);
  }

  void place_file_buffers() {
    add(Role::kPassBuffers, Pool::kStaging, kPassBuffers * pass_buffer_bytes(plan_.piece_count, options_));
    if (plan_.offloads_parameters())
      add(Role::kMoverBuffers, Pool::kStaging, kMoverBuffers * plan_.piece_count * sizeof(float));
  }

  void place_parameters(int unit) {
    const UnitLayout& layout = plan_.layouts[static_cast<std::size_t>(unit)];
    if (options_.stage < 3) {
      add(Role::kParameters, Pool::kParameters, layout.total_count() * element_, unit);
    } else if (!plan_.is_offloaded(unit) || !plan_.offloads_parameters()) {
      const std::uint64_t count = plan_.slice_count(unit) + layout.frozen_slice(options_.shards());
      add(Role::kParameterShard, Pool::kParameters, count * element_, unit);
    }
  }

  void place_gradients(int unit) {
    const UnitLayout& layout = plan_.layouts[static_cast<std::size_t>(unit)];
    if (options_.stage <= 1) add(Role::kGradients, Pool::kGradients, layout.trainable_count * element_, unit);
    const std::uint64_t slice = plan_.slice_count(unit);
    if (plan_.is_offloaded(unit) && options_.stage >= 1) return;  // They are on the host.
    if (plan_.accumulates_in_fp32()) {
      add(Role::kAccumulator, Pool::kGradients, slice * sizeof(float), unit);
    } else if (options_.stage >= 2) {
      add(Role::kGradientShard, Pool::kGradients, slice * element_, unit);
    }
  }

  void place_states(int unit) {
    const bool offloaded = plan_.is_offloaded(unit);
    const Pool pool = offloaded ? offload_pool() : Pool::kOptimizer;
    constexpr Role kRoles[kStateFieldCount] = {Role::kMaster, Role::kM, Role::kV, Role::kAverage};
    const std::uint64_t count = plan_.updated_count(unit);
    for (const StateField field : states_of(options_)) {
      if (field == StateField::kMaster && is_own_master(options_) && !offloaded) continue;
      const MomentFormat format = state_format(options_, field);
      add(kRoles[static_cast<int>(field)], pool,
          pool == Pool::kFiles ? stored_bytes(format, count, plan_.piece_count) : kept_bytes(format, count),
          unit);
    }
  }

  void place_factors(int unit) {
    if (plan_.factor_counts.empty()) return;
    const std::uint64_t bytes = plan_.factor_counts[static_cast<std::size_t>(unit)] * sizeof(float);
    if (bytes == 0) return;
    const bool offloaded = plan_.is_offloaded(unit);
    add(Role::kFactors, offloaded ? Pool::kHost : Pool::kOptimizer, bytes, unit);
    add(Role::kFactorSums, Pool::kOptimizer, bytes, unit);
    if (offloaded) add(Role::kHostFactorSums, Pool::kHost, bytes, unit);
  }

  // The memory that all units of Muon use in turn.
  void place_matrices() {
    if (plan_.matrix_work_count == 0) return;
    std::uint64_t largest = 0;
    for (std::size_t unit = 0; unit < plan_.muon.size(); ++unit) {
      if (plan_.muon[unit].has_matrices) largest = std::max(largest, plan_.layouts[unit].trainable_count);
    }
    for (std::size_t i = 0; i < kMatricesInFlight; ++i)
      add(Role::kMatrices, Pool::kBuckets, largest * sizeof(float), static_cast<int>(i));
    add(Role::kMatrixWork, Pool::kBuckets, round_up(plan_.matrix_work_count * sizeof(float), kBlockGranule));
  }

  // Both tiers keep these in memory.
  void place_muon(int unit) {
    if (plan_.muon.empty()) return;
    const Plan::MuonUnit& muon = plan_.muon[static_cast<std::size_t>(unit)];
    const Pool pool = plan_.is_offloaded(unit) ? Pool::kHost : Pool::kOptimizer;
    if (muon.v_count > 0) add(Role::kV, pool, round_up(muon.v_count * sizeof(float), kBlockGranule), unit);
    if (muon.has_matrices) add(Role::kOrthogonal, pool, plan_.updated_count(unit) * sizeof(float), unit);
  }

  void place_host_gradients(int unit) {
    add(Role::kHostGradients, Pool::kHost,
        plan_.updated_count(unit) * element_bytes(plan_.gradient_type(unit)), unit);
  }

  void place_offloaded_parameters(int unit) {
    const std::uint64_t frozen =
        plan_.layouts[static_cast<std::size_t>(unit)].frozen_slice(options_.shards());
    if (!is_own_master(options_))
      add(Role::kTrainableSlice, offload_pool(), plan_.slice_count(unit) * element_, unit);
    if (frozen > 0) add(Role::kFrozenSlice, offload_pool(), frozen * element_, unit);
  }

  Pool offload_pool() const { return options_.tier == Tier::kFile ? Pool::kFiles : Pool::kHost; }

  const ModelShape& model_;
  const Plan& plan_;
  const PlanOptions& options_;
  const std::uint64_t element_;
  std::array<std::uint64_t, kPoolCount> ends_{};
  std::vector<StatePlacement> placements_;
};

std::uint64_t& host_total(HostBytes& bytes, Role role) {
  switch (role) {
    case Role::kSaved:
      return bytes.saving;
    case Role::kHostSum:
    case Role::kHostRest:
      return bytes.staging;
    case Role::kHostGradients:
      return bytes.gradients;
    case Role::kTrainableSlice:
    case Role::kFrozenSlice:
      return bytes.parameters;
    default:
      return bytes.optimizer;
  }
}

std::uint64_t& file_total(FileBytes& bytes, Role role) {
  return role == Role::kTrainableSlice || role == Role::kFrozenSlice ? bytes.parameters : bytes.optimizer;
}

// The total of the plan that counts the placement.
std::uint64_t& total_of(Plan& plan, const StatePlacement& placement) {
  switch (placement.pool) {
    case Pool::kParameters:
      return plan.bytes.parameters;
    case Pool::kGradients:
      return plan.bytes.gradients;
    case Pool::kOptimizer:
      return plan.bytes.optimizer;
    case Pool::kGathered:
      return plan.bytes.gathered;
    case Pool::kBuckets:
      return plan.bytes.buckets;
    case Pool::kActivations:
      return plan.bytes.activations;
    case Pool::kHost:
      return host_total(plan.host_bytes, placement.role);
    case Pool::kStaging:
      return plan.host_bytes.staging;
    case Pool::kFiles:
      return file_total(plan.file_bytes, placement.role);
  }
  return plan.bytes.activations;
}

}  // namespace

std::vector<StatePlacement> make_placements(const ModelShape& model, const Plan& plan) {
  return Placer(model, plan).place();
}

void add_up_placements(Plan& plan) {
  plan.bytes = {};
  plan.host_bytes = {};
  plan.file_bytes = {};
  for (const StatePlacement& placement : plan.placements) total_of(plan, placement) += placement.bytes;
}

std::uint64_t Plan::bytes_in(Pool pool) const {
  std::uint64_t sum = 0;
  for (const StatePlacement& placement : placements) {
    if (placement.pool == pool) sum += placement.bytes;
  }
  return sum;
}

std::uint64_t Plan::bytes_of(Role role) const {
  std::uint64_t sum = 0;
  for (const StatePlacement& placement : placements) {
    if (placement.role == role) sum += placement.bytes;
  }
  return sum;
}

const char* pool_name(Pool pool) noexcept {
  constexpr const char* kNames[kPoolCount] = {"parameters",  "gradients", "optimizer", "gathered", "buckets",
                                              "activations", "host",      "staging",   "files"};
  return kNames[static_cast<std::size_t>(pool)];
}

}  // namespace forebay
