#include "forebay/plan.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "forebay/all_reduce.h"
#include "forebay/arena.h"
#include "forebay/grouped_communicator.h"
#include "forebay/kernels.h"
#include "forebay/units.h"
#include "runtime/engine/plan/schedule.h"
#include "runtime/engine/plan/step_control.h"

namespace forebay {
namespace {

// Far beyond any machine, and far enough from overflow that every sum below is exact in 64 bits.
constexpr std::uint64_t kParameterCountLimit = std::uint64_t{1} << 52;
constexpr std::uint64_t kActivationBytesLimit = std::uint64_t{1} << 60;
constexpr int kParameterGroupLimit = 4096;
constexpr int kSharedByLimit = 32;  // With more, a bucket of the smallest unit would be empty.

Status refuse(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

Status check_options(const PlanOptions& options) {
  if (options.stage < 0 || options.stage > 3) {
    return refuse("stage " + std::to_string(options.stage) + " does not exist; use 0, 1, 2 or 3");
  }
  if (options.ranks < 1 || options.ranks > 1'000'000) {
    return refuse("ranks is " + std::to_string(options.ranks) + "; use 1 to 1000000");
  }
  if (options.group < 1 || options.ranks % options.group != 0) {
    return refuse("groups of " + std::to_string(options.group) + " ranks do not divide " +
                  std::to_string(options.ranks) + " ranks; give a number that does, 1 for no groups");
  }
  if (options.micro_steps < 1) {
    return refuse("micro-steps is " + std::to_string(options.micro_steps) + "; use 1 or more");
  }
  if (options.forwards_ahead < 0) {
    return refuse("forwards-ahead is " + std::to_string(options.forwards_ahead) + "; use 0 or more");
  }
  if (options.bucket_bytes == 0) return refuse("bucket is 0 bytes; use 1 or more (16 MiB is usual)");
  if (options.chunk_bytes == 0)
    return refuse("chunk is 0 bytes; use the device's granularity (2 MiB is usual)");
  if (options.accumulate == Accumulate::kLocal && options.stage >= 2) {
    return refuse("accumulate local needs the whole gradient on each rank, which stage " +
                  std::to_string(options.stage) + " does not keep; use accumulate shard, or stage 0 or 1");
  }
  if (options.offload == Offload::kNone) return Status();
  if (options.offload == Offload::kOptimizerAndParameters && options.stage < 3) {
    return refuse("offload optimizer+parameters takes the parameter shard off the device, and stage " +
                  std::to_string(options.stage) +
                  " keeps parameters whole; use stage 3, or offload optimizer");
  }
  if (!(options.offload_fraction >= 0.0 && options.offload_fraction <= 1.0)) {
    return refuse("offload-fraction is " + std::to_string(options.offload_fraction) + "; use 0 to 1");
  }
  if (options.tier == Tier::kFile && options.staging_bytes < kStagingBytesMin) {
    return refuse("offload-staging is " + std::to_string(options.staging_bytes) + " bytes; use at least " +
                  format_bytes(kStagingBytesMin));
  }
  return Status();
}

Status check_model(const ModelShape& model) {
  if (model.units.empty()) return refuse("the model has no units; add at least one");
  std::set<std::string> names;
  std::uint64_t total = 0;
  for (std::size_t u = 0; u < model.units.size(); ++u) {
    const UnitShape& unit = model.units[u];
    for (const ParameterShape& parameter : unit.parameters) {
      if (parameter.count == 0) return refuse("parameter " + parameter.name + " has no elements");
      if (parameter.group < 0 || parameter.group >= kParameterGroupLimit) {
        return refuse("parameter " + parameter.name + " has group " + std::to_string(parameter.group) +
                      "; groups are numbered from 0 to " + std::to_string(kParameterGroupLimit - 1));
      }
      if (!names.insert(parameter.name).second) {
        return refuse("two parameters are named " + parameter.name + "; names are what saved state goes by");
      }
      if (parameter.count > kParameterCountLimit || (total += parameter.count) > kParameterCountLimit) {
        return refuse("the model has more than " + std::to_string(kParameterCountLimit) + " parameters at " +
                      parameter.name);
      }
    }
    if (unit.shared_by < 1 || unit.shared_by > kSharedByLimit) {
      return refuse("unit " + unit.name + " is shared by " + std::to_string(unit.shared_by) +
                    " stages; 1 to " + std::to_string(kSharedByLimit) + " may share one");
    }
    for (const UnitShape::Tied& tied : unit.tied) {
      if (tied.unit < 0 || tied.unit >= static_cast<int>(u) || tied.index < 0 ||
          tied.index >=
              static_cast<int>(model.units[static_cast<std::size_t>(tied.unit)].parameters.size())) {
        return refuse("unit " + unit.name + " ties a parameter that no earlier unit has");
      }
    }
  }
  if (total == 0) return refuse("the model has no parameters");
  if (model.activation_bytes > kActivationBytesLimit) {
    return refuse("the model declares " + std::to_string(model.activation_bytes) +
                  " bytes of activations; at most " + std::to_string(kActivationBytesLimit) + " make sense");
  }
  return Status();
}

UnitLayout lay_out(const UnitShape& unit, int ranks) {
  UnitLayout layout;
  std::uint64_t end[2] = {0, 0};  // Trainable, frozen.
  for (const ParameterShape& parameter : unit.parameters) {
    std::uint64_t& section_end = end[parameter.frozen ? 1 : 0];
    layout.places.push_back({parameter.frozen, section_end, parameter.count});
    section_end = round_up(section_end + parameter.count, kParameterAlignment);
  }
  const std::uint64_t granule = static_cast<std::uint64_t>(ranks) * kLeafCount;
  layout.trainable_count = round_up(end[0], granule);
  layout.frozen_count = round_up(end[1], granule);
  return layout;
}

struct Gathered {
  std::uint64_t all = 0;
  std::uint64_t offloaded = 0;  // Of these, in units that are not on the device.
};

// Units gathered in one step at stage 3, as slices of this rank, in elements.
Gathered gathered_slices(const ModelShape& model, const Plan& plan, const SlotAssignment& slots) {
  Residency residency(slots);
  Gathered gathered;
  const auto read = [&](int unit) {
    for (const int needed : units_read_by(model, unit)) {
      if (slots.parameter_slot[static_cast<std::size_t>(needed)] == SlotAssignment::kNone) continue;
      if (!residency.take(needed, 1)) continue;
      const std::uint64_t elements = plan.layouts[static_cast<std::size_t>(needed)].total_count() /
                                     static_cast<std::uint64_t>(plan.options.shards());
      gathered.all += elements;
      if (needed >= plan.device_units) gathered.offloaded += elements;
    }
  };
  const int unit_count = static_cast<int>(model.units.size());
  const PlanOptions& options = plan.options;
  for (int forwards = 0, backwards = 0; backwards < options.micro_steps;) {
    if (forward_is_next(options.micro_steps, options.forwards_ahead, forwards, backwards)) {
      for (int unit = 0; unit < unit_count; ++unit) read(unit);
      ++forwards;
    } else {
      for (int unit = unit_count - 1; unit >= 0; --unit) {
        if (model.units[static_cast<std::size_t>(unit)].backward_reads_parameters) read(unit);
      }
      ++backwards;
    }
  }
  return gathered;
}

// The first units that stay on the device: as many as fit into what is not to be offloaded.
int units_within_fraction(const Plan& plan, std::uint64_t trainable) {
  const auto room =
      static_cast<std::uint64_t>((1.0 - plan.options.offload_fraction) * static_cast<double>(trainable));
  std::uint64_t taken = 0;
  int count = 0;
  for (const UnitLayout& layout : plan.layouts) {
    taken += layout.trainable_count;
    if (taken > room) break;
    ++count;
  }
  return count;
}

int units_on_device(const ModelShape& model, const Plan& plan, std::uint64_t trainable) {
  const int unit_count = static_cast<int>(plan.layouts.size());
  if (plan.options.offload == Offload::kNone) return unit_count;
  int shared = 0;
  for (int unit = 0; unit < unit_count; ++unit) {
    if (model.units[static_cast<std::size_t>(unit)].shared_by > 1) shared = unit + 1;
  }
  const int count = plan.options.device_units >= 0 ? std::min(plan.options.device_units, unit_count)
                                                   : units_within_fraction(plan, trainable);
  return std::max(count, shared);
}

GroupedOptions grouping(const PlanOptions& options) {
  return {.group = options.group, .replicate = options.shard_within_group};
}

// What the reduction of a bucket of so many columns receives.
std::uint64_t bucket_staging_bytes(const PlanOptions& options, std::uint64_t columns) {
  if (options.ranks == 1) return 0;
  if (options.in_groups())
    return grouped_staging_bytes(grouping(options), options.ranks, columns, options.dtype);
  return static_cast<std::uint64_t>(options.ranks) * columns * element_bytes(options.dtype);
}

// The leaves of the norm of a unit, and what is set aside because it does not count in it.
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

// Of the bucket in which small units are put together. It is there for every model, so that the bytes of
// buckets do not depend on it.
std::uint64_t fused_columns(const Plan& plan, std::uint64_t granule) {
  return plan.options.ranks == 1 ? 0 : plan.bucket_columns / kFusedBucketShare / granule * granule;
}

// What one rank sends to add up the gradients of shared units over the stages that have them.
std::uint64_t shared_sent_bytes(const ModelShape& model, const Plan& plan) {
  const PlanOptions& options = plan.options;
  const bool in_fp32 =
      options.stage >= 2 && options.micro_steps > 1 && options.accumulate == Accumulate::kShard;
  std::uint64_t bytes = 0;
  for (std::size_t u = 0; u < model.units.size(); ++u) {
    const int stages = model.units[u].shared_by;
    if (stages == 1) continue;
    const DataType type = in_fp32 ? DataType::kFloat32 : options.dtype;
    const std::uint64_t bucket = plan.shared_bucket_count(static_cast<int>(u), stages);
    bytes += all_reduce_sent_bytes(stages, bucket * element_bytes(type), type,
                                   plan.layouts[u].trainable_slice(options.shards()));
  }
  return bytes;
}

// What one rank sends to reduce all gradients once.
std::uint64_t reduced_bytes(const PlanOptions& options, std::uint64_t trainable) {
  const std::uint64_t element = element_bytes(options.dtype);
  const auto ranks = static_cast<std::uint64_t>(options.ranks);
  if (!options.in_groups()) return (ranks - 1) * (trainable / ranks) * element;
  const auto group = static_cast<std::uint64_t>(options.group);
  const std::uint64_t across = (ranks / group - 1) * (trainable / ranks) * sizeof(float);
  return (group - 1) * (trainable / group) * element + across * (options.shard_within_group ? 2 : 1);
}

// Bytes in chunks that activations have no part in, whole chunks, and those in chunks that they have.
struct Chunks {
  std::uint64_t whole = 0;
  std::uint64_t shared = 0;
};

Chunks chunks_beside_activations(const Plan& plan) {
  const std::uint64_t chunk = plan.options.chunk_bytes;
  Chunks chunks;
  for (const std::uint64_t pool :
       {plan.bytes.parameters, plan.bytes.gradients, plan.bytes.optimizer, plan.bytes.buckets}) {
    if (plan.options.spillable) {
      chunks.whole += round_up(pool, chunk);
    } else {
      chunks.shared += pool;
    }
  }
  for (const std::uint64_t slot : plan.slot_bytes) chunks.whole += round_up(slot, chunk);
  return chunks;
}

}  // namespace

std::uint64_t ModelShape::parameter_count() const {
  std::uint64_t count = 0;
  for (const UnitShape& unit : units) {
    for (const ParameterShape& parameter : unit.parameters) count += parameter.count;
  }
  return count;
}

Result<Plan> make_plan(const ModelShape& model, const PlanOptions& options) {
  FOREBAY_RETURN_IF_ERROR(check_options(options));
  FOREBAY_RETURN_IF_ERROR(check_model(model));

  Plan plan;
  plan.options = options;
  const auto ranks = static_cast<std::uint64_t>(options.ranks);
  const auto shards = static_cast<std::uint64_t>(options.shards());
  const auto replicas = static_cast<std::uint64_t>(options.replicas());
  const std::uint64_t element = element_bytes(options.dtype);
  const bool has_master = options.dtype != DataType::kFloat32;
  const bool shard_accumulator = options.micro_steps > 1 && options.accumulate == Accumulate::kShard;

  std::uint64_t trainable = 0;  // Padded elements of the whole model.
  std::uint64_t frozen = 0;
  std::uint64_t largest_slice = 0;  // Of a unit's trainable section.
  for (const UnitShape& unit : model.units) {
    plan.layouts.push_back(lay_out(unit, options.ranks));
    trainable += plan.layouts.back().trainable_count;
    frozen += plan.layouts.back().frozen_count;
    largest_slice = std::max(largest_slice, plan.layouts.back().trainable_slice(options.shards()));
  }
  const std::uint64_t slice = trainable / shards;

  // Every replica adds up a part of a bucket.
  const std::uint64_t column_granule = replicas * kLeafCount;
  const std::uint64_t wanted_columns =
      options.bucket_bytes / (shards * element) / column_granule * column_granule;
  plan.bucket_columns = std::min(std::max(wanted_columns, column_granule), largest_slice);

  // The part that is not on the device: the last units.
  plan.device_units = units_on_device(model, plan, trainable);
  std::uint64_t away = 0;
  std::uint64_t away_frozen = 0;
  std::uint64_t largest_away = 0;  // Slice.
  for (std::size_t u = static_cast<std::size_t>(plan.device_units); u < plan.layouts.size(); ++u) {
    away += plan.layouts[u].trainable_count;
    away_frozen += plan.layouts[u].frozen_count;
    largest_away = std::max(largest_away, plan.layouts[u].trainable_slice(options.shards()));
  }
  const std::uint64_t away_slice = away / shards;
  const std::uint64_t away_updated = options.stage == 0 ? away : away_slice;
  const bool parameters_away = options.offload == Offload::kOptimizerAndParameters;

  // Offloaded units' micro-steps add up on the host.
  const bool adds_on_host = shard_accumulator && options.stage >= 1;
  PoolBytes& bytes = plan.bytes;
  if (options.stage < 3) {
    bytes.parameters = element * (trainable + frozen);
  } else {
    bytes.parameters = element * (trainable + frozen - (parameters_away ? away + away_frozen : 0)) / shards;
  }
  const std::uint64_t kept_slice = slice - (options.stage == 0 ? 0 : away_slice);
  if (options.stage <= 1) {
    bytes.gradients = element * trainable + (shard_accumulator ? 4 * kept_slice : 0);
  } else {
    bytes.gradients = (shard_accumulator ? 4 : element) * kept_slice;
  }
  if (away > 0 && adds_on_host) {
    bytes.gradients += kTransitCount * 4 * plan.bucket_columns;
  } else if (options.stage >= 2) {
    bytes.gradients += kTransitCount * largest_away * element;
  }
  const std::uint64_t updated = options.stage == 0 ? trainable : slice;
  bytes.optimizer = (has_master ? 12 : 8) * (updated - away_updated);

  // Below the device.
  const std::uint64_t parameters = !parameters_away ? 0
                                   : has_master     ? element * (away_slice + away_frozen / shards)
                                                    : element * (away_frozen / shards);
  plan.host_bytes.gradients = (adds_on_host ? 4 : element) * away_updated;
  if (away > 0 && adds_on_host) plan.host_bytes.staging = 4 * plan.bucket_columns;
  if (options.tier == Tier::kPinned) {
    plan.host_bytes.optimizer = 12 * away_updated;
    plan.host_bytes.parameters = parameters;
  } else if (away_updated > 0) {
    plan.file_bytes.optimizer = 12 * away_updated;
    plan.file_bytes.parameters = parameters;
    // The optimizer's pieces, with the parameter that is made of them, and the parameters' on their way up.
    const std::uint64_t piece_limit =
        options.staging_bytes / (kPassBuffers * (12 + element) + (parameters_away ? kMoverBuffers * 4 : 0));
    const std::uint64_t largest_updated = options.stage == 0 ? largest_away * shards : largest_away;
    const std::uint64_t largest_total = round_up(largest_updated, kPieceGranule);
    plan.piece_count =
        std::min(std::max(piece_limit / kPieceGranule * kPieceGranule, kPieceGranule), largest_total);
    plan.host_bytes.staging +=
        kPassBuffers * pass_buffer_bytes(plan.piece_count, options.dtype, parameters_away);
    if (parameters_away) {
      plan.move_bytes = plan.piece_count * 4;
      plan.host_bytes.staging += kMoverBuffers * plan.move_bytes;
    }
  }

  const SlotAssignment slots = assign_slots(model, plan.layouts, options);
  plan.slot_bytes = slots.slot_bytes;
  for (const std::uint64_t slot : slots.slot_bytes) bytes.gathered += slot;

  // Staging, the fp32 sum of one bucket, and the record of the step.
  const std::uint64_t units = model.units.size();
  const int deciding_ranks = options.deciding_ranks == 0 ? options.ranks : options.deciding_ranks;
  const std::uint64_t deciding_units = std::max(units, options.deciding_units);
  plan.staging_bytes = round_up(std::max(bucket_staging_bytes(options, plan.bucket_columns),
                                         decision_bytes(deciding_ranks, deciding_units)),
                                kBlockGranule);
  // A norm has its scratch where a sum was.
  plan.sum_bytes =
      round_up(std::max(plan.bucket_columns * sizeof(float), norm_scratch_bytes(model, plan)), kBlockGranule);
  plan.fused_columns = fused_columns(plan, column_granule);
  bytes.buckets = plan.staging_bytes + kBucketsInFlight * plan.sum_bytes +
                  round_up(shards * plan.fused_columns * element, kBlockGranule) +
                  round_up(record_bytes(deciding_units), kBlockGranule);
  bytes.activations = round_up(model.activation_bytes, kBlockGranule);

  const Chunks beside = chunks_beside_activations(plan);
  plan.reserved_bytes = beside.whole + round_up(beside.shared + bytes.activations, options.chunk_bytes);

  const std::uint64_t reductions =
      options.accumulate == Accumulate::kLocal ? 1 : static_cast<std::uint64_t>(options.micro_steps);
  std::uint64_t gathers = slice * element;  // Of this rank's slices.
  if (options.stage == 3) {
    const Gathered gathered = gathered_slices(model, plan, slots);
    gathers = gathered.all * element;
    if (parameters_away && options.tier == Tier::kFile) {
      plan.file_bytes.read_per_step = gathered.offloaded * element;
      if (has_master) plan.file_bytes.written_per_step = element * away_slice;
    }
  }
  plan.file_bytes.read_per_step += plan.file_bytes.optimizer;
  plan.file_bytes.written_per_step += plan.file_bytes.optimizer;
  // Sent, and as much received: each collective hands every other rank a slice.
  plan.wire_per_step.sent = reductions * reduced_bytes(options, trainable) + (shards - 1) * gathers;
  plan.wire_per_step.sent += shared_sent_bytes(model, plan);
  // What the ranks tell each other in step().
  plan.wire_per_step.sent += (ranks - 1) * sizeof(double) * (kStepFacts + units);
  const auto others = static_cast<std::uint64_t>(deciding_ranks) - 1;
  plan.wire_per_step.sent += others * sizeof(double) * deciding_units;
  if (options.deciding_ranks != 0) plan.wire_per_step.sent += others * sizeof(double) * kStepFacts;
  plan.wire_per_step.received = plan.wire_per_step.sent;
  return plan;
}

bool Plan::fuses(int unit) const {
  const std::uint64_t slice = layouts[static_cast<std::size_t>(unit)].trainable_slice(options.shards());
  return unit < device_units && slice > 0 && slice <= fused_columns / 2;
}

std::uint64_t Plan::activation_room(std::uint64_t budget) const {
  const Chunks beside = chunks_beside_activations(*this);
  if (budget < beside.whole) return 0;
  const std::uint64_t in_chunks = (budget - beside.whole) / options.chunk_bytes * options.chunk_bytes;
  return in_chunks < beside.shared ? 0 : (in_chunks - beside.shared) / kBlockGranule * kBlockGranule;
}

// The staging of that sum, at most a slice and two buckets in fp32, has the room of one bucket's sum.
std::uint64_t Plan::shared_bucket_count(int unit, int stages) const {
  const std::uint64_t columns =
      std::min(bucket_columns, layouts[static_cast<std::size_t>(unit)].trainable_slice(options.shards()));
  const auto count = static_cast<std::uint64_t>(stages);
  const std::uint64_t slice = columns / (1 + 2 * count) / 4 * 4;  // Whole accesses of 16 bytes.
  return slice * count;
}

const char* offload_name(Offload offload) noexcept {
  switch (offload) {
    case Offload::kNone:
      return "none";
    case Offload::kOptimizer:
      return "optimizer";
    case Offload::kOptimizerAndParameters:
      return "optimizer+parameters";
  }
  return "unknown";
}

const char* tier_name(Tier tier) noexcept {
  return tier == Tier::kPinned ? "cpu" : "nvme";
}

std::string Plan::fingerprint_text() const {
  std::ostringstream text;
  text << "stage " << options.stage << "\nranks " << options.ranks << "\ndtype "
       << data_type_name(options.dtype) << "\nmicro-steps " << options.micro_steps << "\nforwards-ahead "
       << options.forwards_ahead << "\naccumulate "
       << (options.accumulate == Accumulate::kShard ? "shard" : "local") << "\ngroup " << options.group
       << "\nshard-within " << (options.shard_within_group ? "group" : "all") << "\noffload "
       << offload_name(options.offload) << "\noffload-tier " << tier_name(options.tier)
       << "\nunits-on-device " << device_units << "\nbucket-columns " << bucket_columns << "\n";
  for (std::size_t unit = 0; unit < layouts.size(); ++unit) {
    text << "unit-" << unit;
    for (const UnitLayout::Place& place : layouts[unit].places) {
      text << ' ' << (place.frozen ? "frozen:" : "") << place.count;
    }
    text << '\n';
  }
  return text.str();
}

}  // namespace forebay
