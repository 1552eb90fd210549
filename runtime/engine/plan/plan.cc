#include "forebay/plan.h"

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>

#include "forebay/all_reduce.h"
#include "forebay/arena.h"
#include "forebay/error.h"
#include "forebay/kernels.h"
#include "forebay/units.h"
#include "runtime/engine/plan/placement.h"
#include "runtime/engine/plan/schedule.h"
#include "runtime/engine/plan/step_control.h"

namespace forebay {
namespace {

// Larger models: sums of bytes would overflow 64 bits. No machine holds one.
constexpr std::uint64_t kParameterCountLimit = std::uint64_t{1} << 52;
constexpr std::uint64_t kActivationBytesLimit = std::uint64_t{1} << 60;
constexpr int kParameterGroupLimit = 4096;
// Larger: a bucket of the smallest shared unit would be empty.
constexpr int kSharedByLimit = 32;

Status refuse(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

Status check_options(const PlanOptions& options) {
  FOREBAY_RETURN_IF_ERROR(check_sharding_options(options));
  if (options.ranks < 1 || options.ranks > 1'000'000) {
    return refuse("ranks is " + std::to_string(options.ranks) + "; use 1 to 1000000");
  }
  if (options.ranks % options.group != 0) {
    return refuse("groups of " + std::to_string(options.group) + " ranks do not divide " +
                  std::to_string(options.ranks) + " ranks; give a number that does, 1 for no groups");
  }
  if (options.chunk_bytes == 0)
    return refuse("chunk is 0 bytes; use the device's granularity (2 MiB is usual)");
  return Status();
}

Status check_parameter(const ParameterShape& parameter) {
  if (parameter.count == 0)
    return refuse("parameter " + parameter.name + " has no elements; give it one or more, or leave it out");
  if (parameter.group < 0 || parameter.group >= kParameterGroupLimit) {
    return refuse("parameter " + parameter.name + " is in parameter group " +
                  std::to_string(parameter.group) + "; use a group from 0 to " +
                  std::to_string(kParameterGroupLimit - 1));
  }
  return {};
}

Status same_name(const std::string& name) {
  return refuse("two parameters are named " + name +
                "; saved state finds parameters by name, so give each its own");
}

Status check_model(const ModelShape& model) {
  if (model.units.empty()) return refuse("the model has no units; add at least one");
  std::set<std::string> names;
  std::uint64_t total = 0;
  for (std::size_t u = 0; u < model.units.size(); ++u) {
    const UnitShape& unit = model.units[u];
    for (const ParameterShape& parameter : unit.parameters) {
      FOREBAY_RETURN_IF_ERROR(check_parameter(parameter));
      if (!names.insert(parameter.name).second) return same_name(parameter.name);
      if (parameter.count > kParameterCountLimit || (total += parameter.count) > kParameterCountLimit) {
        return refuse("the model has more than " + std::to_string(kParameterCountLimit) +
                      " elements up to parameter " + parameter.name + "; make it smaller");
      }
    }
    if (unit.shared_by < 1 || unit.shared_by > kSharedByLimit) {
      return refuse("unit " + unit.name + " is shared by " + std::to_string(unit.shared_by) +
                    " pipeline stages; use 1 to " + std::to_string(kSharedByLimit));
    }
    for (const UnitShape::Tied& tied : unit.tied) {
      if (tied.unit < 0 || tied.unit >= static_cast<int>(u) || tied.index < 0 ||
          tied.index >=
              static_cast<int>(model.units[static_cast<std::size_t>(tied.unit)].parameters.size())) {
        return refuse("unit " + unit.name +
                      " ties a parameter that no earlier unit has; tie one that was added before the unit");
      }
    }
  }
  if (total == 0) return refuse("the model has no parameters; add at least one");
  if (model.activation_bytes > kActivationBytesLimit) {
    return refuse("the model declares " + std::to_string(model.activation_bytes) +
                  " bytes of activations; declare at most " + std::to_string(kActivationBytesLimit));
  }
  return Status();
}

// Adafactor takes sums over whole rows and columns, Muon products of whole matrices.
Status check_whole(const ModelShape& model, Optimizer optimizer) {
  const bool is_muon = optimizer == Optimizer::kMuon;
  for (const UnitShape& unit : model.units) {
    for (const ParameterShape& parameter : unit.parameters) {
      if (!parameter.split || parameter.split->parts == 1 || parameter.frozen) continue;
      if (is_muon && !is_muon_matrix(parameter)) continue;
      return Status(StatusCode::kUnsupported, "parameter " + parameter.name +
                                                  " is split over tensor-parallel ranks, and optimizer " +
                                                  optimizer_name(optimizer) + " needs whole " +
                                                  (is_muon ? "matrices" : "rows and columns") +
                                                  "; use another optimizer, or no tensor parallelism");
    }
  }
  return {};
}

// Parameters that Adafactor's saved factors would have the name of.
Status check_factor_names(const ModelShape& model) {
  std::set<std::string> names;
  for (const UnitShape& unit : model.units) {
    for (const ParameterShape& parameter : unit.parameters) names.insert(parameter.name);
  }
  for (const std::string& name : names) {
    if (!names.contains(name + kFactorsName)) continue;
    return refuse("parameter " + name + kFactorsName +
                  " has the name under which a saved state keeps Adafactor's "
                  "factors of parameter " +
                  name + "; give it another one, or use another optimizer");
  }
  return {};
}

// The most elements of a slice that have a v of their own.
std::uint64_t most_own_v(const UnitShape& unit, const UnitLayout& layout, const PlanOptions& options,
                         std::uint64_t slice) {
  std::uint64_t most = 0, number = 0, sum = 0;
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    if (!has_own_v(options, unit.parameters[i])) continue;
    const std::uint64_t end = layout.places[i].offset + layout.places[i].count;
    for (std::uint64_t at = layout.places[i].offset; at < end;) {
      if (at / slice != number) sum = 0;
      number = at / slice;
      const std::uint64_t stop = std::min(end, (number + 1) * slice);
      sum += stop - at;
      most = std::max(most, sum);
      // Slices that are full of the parameter are alike.
      at = stop - at == slice ? std::max(stop, end / slice * slice) : stop;
    }
  }
  return most;
}

void count_muon(const ModelShape& model, Plan& plan) {
  if (plan.options.optimizer != Optimizer::kMuon) return;
  for (std::size_t u = 0; u < model.units.size(); ++u) {
    const UnitLayout& layout = plan.layouts[u];
    Plan::MuonUnit& muon = plan.muon.emplace_back();
    if (layout.trainable_count == 0) continue;
    muon.v_count = most_own_v(model.units[u], layout, plan.options, plan.updated_count(static_cast<int>(u)));
    muon.saved_v_count =
        most_own_v(model.units[u], layout, plan.options, layout.trainable_slice(plan.options.ranks));
    for (const ParameterShape& parameter : model.units[u].parameters) {
      if (!is_muon_matrix(parameter)) continue;
      muon.has_matrices = true;
      const FactoredShape shape = factored_shape_of(parameter);
      plan.matrix_work_count =
          std::max(plan.matrix_work_count, orthogonal_scratch_count(shape.rows, shape.columns));
    }
  }
}

void count_factors(const ModelShape& model, Plan& plan) {
  if (plan.options.optimizer != Optimizer::kAdafactor) return;
  const std::uint64_t granule = static_cast<std::uint64_t>(plan.options.ranks) * kFactorGranule;
  for (const UnitShape& unit : model.units) {
    std::uint64_t count = 0;
    for (const ParameterShape& parameter : unit.parameters) {
      if (parameter.frozen) continue;
      count += factored_shape_of(parameter).factor_count();
      plan.square_count += 2;
    }
    plan.factor_counts.push_back(round_up(count, granule));
  }
}

UnitLayout lay_out(const UnitShape& unit, int ranks, std::uint64_t alignment) {
  UnitLayout layout;
  std::uint64_t end[2] = {0, 0};  // Trainable section, frozen section.
  for (const ParameterShape& parameter : unit.parameters) {
    std::uint64_t& section_end = end[parameter.frozen ? 1 : 0];
    layout.places.push_back({parameter.frozen, section_end, parameter.count});
    section_end = round_up(section_end + parameter.count, alignment);
  }
  const std::uint64_t granule = static_cast<std::uint64_t>(ranks) * kLeafCount;
  layout.trainable_count = round_up(end[0], granule);
  layout.frozen_count = round_up(end[1], granule);
  return layout;
}

// Padded elements of consecutive units: all trainable ones, the largest trainable slice and the largest
// updated range.
struct Elements {
  std::uint64_t trainable = 0;
  std::uint64_t largest_slice = 0;
  std::uint64_t largest_updated = 0;
};

Elements elements_from(const Plan& plan, int first_unit) {
  Elements elements;
  for (int unit = first_unit; unit < static_cast<int>(plan.layouts.size()); ++unit) {
    elements.trainable += plan.layouts[static_cast<std::size_t>(unit)].trainable_count;
    elements.largest_slice = std::max(elements.largest_slice, plan.slice_count(unit));
    elements.largest_updated = std::max(elements.largest_updated, plan.updated_count(unit));
  }
  return elements;
}

// Every replica adds up a part of each bucket, in whole leaves.
std::uint64_t column_granule(const PlanOptions& options) {
  return static_cast<std::uint64_t>(options.replicas()) * kLeafCount;
}

std::uint64_t bucket_columns(const PlanOptions& options, std::uint64_t largest_slice) {
  const auto shards = static_cast<std::uint64_t>(options.shards());
  const std::uint64_t granule = column_granule(options);
  const std::uint64_t wanted =
      options.bucket_bytes / (shards * element_bytes(options.dtype)) / granule * granule;
  return std::min(std::max(wanted, granule), largest_slice);
}

// The bucket of small units exists for every model, so that the bytes of buckets do not depend on the model.
std::uint64_t fused_columns(const Plan& plan) {
  const std::uint64_t granule = column_granule(plan.options);
  return plan.options.ranks == 1 ? 0 : plan.bucket_columns / kFusedBucketShare / granule * granule;
}

// Wide enough for the bytes of a step at any number of ranks, micro-steps and parameters that is accepted.
__extension__ using Wide = unsigned __int128;

// This rank's slices that one step gathers at stage 3.
struct Gathered {
  Wide all = 0;              // Elements.
  Wide offloaded_bytes = 0;  // The part in offloaded units, in whole pages.

  void add(const Gathered& other, std::uint64_t times) {
    all += other.all * times;
    offloaded_bytes += other.offloaded_bytes * times;
  }
};

// Counts the gathers of passes, one after the other.
class GatherCount {
 public:
  GatherCount(const ModelShape& model, const Plan& plan)
      : model_(model), plan_(plan), residency_(plan.slots) {}

  Gathered forward() {
    Gathered gathered;
    for (int unit = 0; unit < unit_count(); ++unit) read(unit, gathered);
    return gathered;
  }
  Gathered backward() {
    Gathered gathered;
    for (int unit = unit_count() - 1; unit >= 0; --unit) {
      if (model_.units[static_cast<std::size_t>(unit)].backward_reads_parameters) read(unit, gathered);
    }
    return gathered;
  }
  // A pass without gradients. `order`: null, or the recorded one, which may have none.
  Gathered evaluation(const UnitOrder* order) {
    return order != nullptr && !order->evaluation.empty() ? recorded(order->evaluation) : forward();
  }
  Gathered recorded(const UnitEvents& events) {
    Gathered gathered;
    for (const UnitEvent& event : events) {
      if (!event.reduces()) read(event.unit, gathered);
    }
    return gathered;
  }

 private:
  int unit_count() const { return static_cast<int>(model_.units.size()); }
  void read(int unit, Gathered& gathered) {
    for (const int needed : units_read_by(model_, unit)) {
      if (plan_.slots.parameter_slot[static_cast<std::size_t>(needed)] == SlotAssignment::kNone) continue;
      if (!residency_.take(needed, 1)) continue;
      const std::uint64_t trainable = plan_.slice_count(needed);
      const std::uint64_t frozen =
          plan_.layouts[static_cast<std::size_t>(needed)].frozen_slice(plan_.options.shards());
      gathered.all += trainable + frozen;
      if (!plan_.is_offloaded(needed)) continue;
      const std::uint64_t element = element_bytes(plan_.options.dtype);
      gathered.offloaded_bytes +=
          round_up(trainable * element, kPageBytes) + round_up(frozen * element, kPageBytes);
    }
  }

  const ModelShape& model_;
  const Plan& plan_;
  Residency residency_;
};

// A pass leaves the same units in the slots whatever was there before, so its gathers depend on the pass
// before it only.
Gathered gathered_in_order(GatherCount count, int micro_steps, int forwards_ahead) {
  const auto all = static_cast<std::uint64_t>(micro_steps);
  // So many forward passes come first, and so many backward passes last. Between them the two alternate.
  const std::uint64_t ahead = std::min(static_cast<std::uint64_t>(forwards_ahead) + 1, all);
  Gathered sum;
  sum.add(count.forward(), 1);
  sum.add(count.forward(), ahead - 1);
  sum.add(count.backward(), all - ahead + 1);
  sum.add(count.backward(), ahead - 1);
  sum.add(count.forward(), all - ahead);
  return sum;
}

// Micro-steps behind the last that was recorded are as that one.
Gathered gathered_in_order(GatherCount count, int micro_steps, const UnitOrder& order) {
  const int recorded = std::min(static_cast<int>(order.micro_steps.size()) + 1, micro_steps);
  Gathered sum;
  for (int k = 0; k < recorded; ++k) sum.add(count.recorded(order.micro_step(k)), 1);
  if (recorded < micro_steps)
    sum.add(count.recorded(order.micro_step(recorded)), static_cast<std::uint64_t>(micro_steps - recorded));
  return sum;
}

// The gathers of a step that begins with `count`.
Gathered gathered_in_step(const GatherCount& count, const PlanOptions& options, const UnitOrder* order) {
  return order != nullptr ? gathered_in_order(count, options.micro_steps, *order)
                          : gathered_in_order(count, options.micro_steps, options.forwards_ahead);
}

Gathered gathered_slices(const ModelShape& model, const Plan& plan, const UnitOrder* order) {
  if (plan.options.stage < 3) return {};
  return gathered_in_step(GatherCount(model, plan), plan.options, order);
}

// Errors: kInvalidArgument, for a number of bytes that is too large to be planned.
Status narrow(Wide bytes, const char* what, const PlanOptions& options, std::uint64_t* narrowed) {
  *narrowed = static_cast<std::uint64_t>(bytes);
  if (bytes <= ~std::uint64_t{0}) return {};
  return refuse("the bytes " + std::string(what) + " in a step of " + std::to_string(options.micro_steps) +
                " micro-steps on " + std::to_string(options.ranks) +
                " ranks are more than 2^64; plan fewer micro-steps, ranks or parameters");
}

// After an update every unit has to be gathered again. A pass leaves the same units in the slots whatever was
// there before.
Status count_evaluation(const ModelShape& model, const Gathered& in_step, const UnitOrder* order,
                        Plan& plan) {
  const PlanOptions& options = plan.options;
  if (options.stage < 3) return {};
  const auto count_pass = [&](Wide all, Wide offloaded_bytes, PassBytes* bytes) {
    const Wide sent = (static_cast<std::uint64_t>(options.shards()) - 1) * all * element_bytes(options.dtype);
    FOREBAY_RETURN_IF_ERROR(narrow(sent, "sent by a rank", options, &bytes->wire.sent));
    bytes->wire.received = bytes->wire.sent;
    if (options.tier != Tier::kFile || !plan.offloads_parameters()) return Status();
    return narrow(offloaded_bytes, "read from files", options, &bytes->file_read);
  };
  GatherCount count(model, plan);
  const Gathered first = count.evaluation(order);
  const Gathered next = count.evaluation(order);
  const Gathered step_after = gathered_in_step(count, options, order);
  EvaluationBytes& bytes = plan.evaluation;
  FOREBAY_RETURN_IF_ERROR(count_pass(first.all, first.offloaded_bytes, &bytes.first));
  FOREBAY_RETURN_IF_ERROR(count_pass(next.all, next.offloaded_bytes, &bytes.next));
  return count_pass(in_step.all - step_after.all, in_step.offloaded_bytes - step_after.offloaded_bytes,
                    &bytes.spared);
}

// The number of first units that fit into the part of the model that stays on the device.
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

// Bytes that one rank sends to add up the gradients of shared units over their pipeline stages.
std::uint64_t shared_sent_bytes(const ModelShape& model, const Plan& plan) {
  std::uint64_t bytes = 0;
  for (std::size_t u = 0; u < model.units.size(); ++u) {
    const int stages = model.units[u].shared_by;
    if (stages == 1) continue;
    const int unit = static_cast<int>(u);
    const DataType type = plan.gradient_type(unit);
    const std::uint64_t bucket = plan.shared_bucket_count(unit, stages);
    bytes += all_reduce_sent_bytes(stages, bucket * element_bytes(type), type, plan.slice_count(unit));
  }
  return bytes;
}

// Bytes that one rank sends to reduce all gradients once.
std::uint64_t reduced_bytes(const PlanOptions& options, std::uint64_t trainable) {
  const std::uint64_t element = element_bytes(options.dtype);
  const auto ranks = static_cast<std::uint64_t>(options.ranks);
  if (!options.in_groups()) return (ranks - 1) * (trainable / ranks) * element;
  const auto group = static_cast<std::uint64_t>(options.group);
  const std::uint64_t across = (ranks / group - 1) * (trainable / ranks) * sizeof(float);
  return (group - 1) * (trainable / group) * element + across * (options.shard_within_group ? 2 : 1);
}

// Device bytes beside the activations: in chunks of their own, rounded up, and in chunks that they share with
// the activations.
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
  for (const std::uint64_t slot : plan.slots.slot_bytes) chunks.whole += round_up(slot, chunk);
  return chunks;
}

std::uint64_t reserved_bytes(const Plan& plan) {
  const Chunks beside = chunks_beside_activations(plan);
  return beside.whole + round_up(beside.shared + plan.bytes.activations, plan.options.chunk_bytes);
}

// Tier kFile: elements of a piece, such that the pass buffers and the mover buffers fit into the staging.
std::uint64_t piece_count(const Plan& plan) {
  const PlanOptions& options = plan.options;
  if (options.tier != Tier::kFile) return 0;
  const std::uint64_t mover_bytes = plan.offloads_parameters() ? kMoverBuffers * sizeof(float) : 0;
  const std::uint64_t limit =
      options.staging_bytes /
      (kPassBuffers * (state_bytes(options) + element_bytes(options.dtype)) + mover_bytes);
  const std::uint64_t largest = elements_from(plan, plan.device_units).largest_updated;
  return std::min(std::max(limit / kPieceGranule * kPieceGranule, kPieceGranule),
                  round_up(largest, kPieceGranule));
}

// An applied step reads and writes the optimizer once. It reads parameters for each gather. It writes them
// once, unless they are the master. Muon reads m once more, before the vote.
Status count_file_traffic(const Gathered& gathered, Plan& plan) {
  FileBytes& files = plan.file_bytes;
  files.read_per_step = files.optimizer;
  files.written_per_step = files.optimizer;
  for (std::size_t unit = 0; unit < plan.muon.size() && plan.options.tier == Tier::kFile; ++unit) {
    const int index = static_cast<int>(unit);
    if (plan.muon[unit].has_matrices && plan.is_offloaded(index))
      files.read_per_step += round_up(plan.updated_count(index) * sizeof(float), kPageBytes);
  }
  if (plan.options.tier != Tier::kFile || !plan.offloads_parameters()) return {};
  FOREBAY_RETURN_IF_ERROR(narrow(files.read_per_step + gathered.offloaded_bytes, "read from files",
                                 plan.options, &files.read_per_step));
  files.written_per_step += plan.bytes_of(Role::kTrainableSlice);
  return {};
}

// Bytes that one rank sends in step(): its facts to the data-parallel ranks, its norms to the deciding ranks.
std::uint64_t decision_sent_bytes(const ModelShape& model, const Plan& plan) {
  const auto ranks = static_cast<std::uint64_t>(plan.options.ranks);
  const auto others = static_cast<std::uint64_t>(plan.deciding_ranks()) - 1;
  std::uint64_t doubles = (ranks - 1) * (kStepFacts + model.units.size()) + others * plan.deciding_units();
  if (plan.options.deciding_ranks != 0) doubles += others * kGridFacts;
  return doubles * sizeof(double);
}

// Bytes that one rank sends for Adafactor: a reduce-scatter and an all-gather of each unit's sums, two sums
// of each parameter, and the last gather before the vote.
std::uint64_t factors_sent_bytes(const Plan& plan) {
  if (plan.options.optimizer != Optimizer::kAdafactor) return 0;
  const auto ranks = static_cast<std::uint64_t>(plan.options.ranks);
  const auto deciders = static_cast<std::uint64_t>(plan.deciding_ranks());
  std::uint64_t bytes = ((ranks - 1) * plan.square_count + (deciders - 1)) * sizeof(double);
  for (const std::uint64_t count : plan.factor_counts)
    bytes += 2 * (ranks - 1) * (count / ranks) * sizeof(float);
  return bytes;
}

// Bytes that one rank sends for Muon: two collectives of each unit with matrices, in fp32, and the last
// gather before the vote.
std::uint64_t matrices_sent_bytes(const Plan& plan) {
  if (plan.options.optimizer != Optimizer::kMuon) return 0;
  const auto ranks = static_cast<std::uint64_t>(plan.options.ranks);
  std::uint64_t bytes = (static_cast<std::uint64_t>(plan.deciding_ranks()) - 1) * sizeof(double);
  for (std::size_t unit = 0; unit < plan.muon.size(); ++unit) {
    if (!plan.muon[unit].has_matrices) continue;
    bytes += 2 * (ranks - 1) * plan.slice_count(static_cast<int>(unit)) * sizeof(float);
  }
  return bytes;
}

// A rank receives as much as it sends: each collective hands every other rank a slice.
Status count_wire(const ModelShape& model, const Gathered& gathered, Plan& plan) {
  const PlanOptions& options = plan.options;
  const std::uint64_t trainable = elements_from(plan, 0).trainable;
  const auto shards = static_cast<std::uint64_t>(options.shards());
  const std::uint64_t reductions =
      options.accumulate == Accumulate::kLocal ? 1 : static_cast<std::uint64_t>(options.micro_steps);
  const Wide gathers = options.stage == 3 ? gathered.all : trainable / shards;
  const Wide sent = Wide{reductions} * reduced_bytes(options, trainable) +
                    (shards - 1) * gathers * element_bytes(options.dtype) + shared_sent_bytes(model, plan) +
                    decision_sent_bytes(model, plan) + factors_sent_bytes(plan) + matrices_sent_bytes(plan);
  FOREBAY_RETURN_IF_ERROR(narrow(sent, "sent by a rank", options, &plan.wire_per_step.sent));
  plan.wire_per_step.received = plan.wire_per_step.sent;
  return {};
}

}  // namespace

UnitShape& ModelDescription::unit(int index, const std::string& call) const {
  if (index < 0 || static_cast<std::size_t>(index) >= model_.units.size()) {
    throw_if_error(refuse(call + ": unit is " + std::to_string(index) + ", and the model has " +
                          std::to_string(model_.units.size()) + " so far; add the unit first"));
  }
  return model_.units[static_cast<std::size_t>(index)];
}

int ModelDescription::add_unit(const std::string& name, bool backward_reads_parameters) {
  if (!unit_names_.insert(name).second)
    throw_if_error(refuse("two units are named " + name + "; messages name units, so give each its own"));
  UnitShape& added = model_.units.emplace_back();
  added.name = name;
  added.backward_reads_parameters = backward_reads_parameters;
  return static_cast<int>(model_.units.size()) - 1;
}

int ModelDescription::add_parameter(int index, const ParameterShape& parameter) {
  UnitShape& owner = unit(index, "add_parameter(" + parameter.name + ")");
  throw_if_error(check_parameter(parameter));
  if (!owner.tied.empty()) {
    throw_if_error(refuse("add_parameter(" + parameter.name + ") to unit " + owner.name +
                          " after tie(): tied parameters come after the unit's own, so their indices would "
                          "change; add all parameters of the unit first"));
  }
  if (!parameter_names_.insert(parameter.name).second) throw_if_error(same_name(parameter.name));
  owner.parameters.push_back(parameter);
  return static_cast<int>(owner.parameters.size()) - 1;
}

int ModelDescription::tie(int index, UnitShape::Tied owner) {
  UnitShape& user = unit(index, "tie()");
  if (owner.unit < 0 || owner.unit >= index || owner.index < 0 ||
      static_cast<std::size_t>(owner.index) >=
          model_.units[static_cast<std::size_t>(owner.unit)].parameters.size()) {
    throw_if_error(refuse("unit " + user.name + " ties parameter " + std::to_string(owner.index) +
                          " of unit " + std::to_string(owner.unit) +
                          ", which no earlier unit has; tie one that was added before the unit"));
  }
  user.tied.push_back(owner);
  return static_cast<int>(user.parameters.size() + user.tied.size()) - 1;
}

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
  if (!is_elementwise(options.optimizer)) FOREBAY_RETURN_IF_ERROR(check_whole(model, options.optimizer));
  if (options.optimizer == Optimizer::kAdafactor) FOREBAY_RETURN_IF_ERROR(check_factor_names(model));

  Plan plan;
  plan.options = options;
  count_factors(model, plan);
  for (const UnitShape& unit : model.units)
    plan.layouts.push_back(lay_out(unit, options.ranks, parameter_alignment(options)));
  count_muon(model, plan);
  std::optional<UnitOrder> order;
  if (!options.recorded_order.empty()) {
    Result<UnitOrder> parsed = parse_unit_order(options.recorded_order, static_cast<int>(model.units.size()));
    if (!parsed.ok()) return parsed.status();
    order = std::move(parsed).value();
  }
  const UnitOrder* const known = order ? &*order : nullptr;
  plan.slots = assign_slots(model, plan.layouts, options, known);
  const Elements all = elements_from(plan, 0);
  plan.bucket_columns = bucket_columns(options, all.largest_slice);
  plan.fused_columns = fused_columns(plan);
  plan.device_units = units_on_device(model, plan, all.trainable);
  plan.piece_count = piece_count(plan);
  plan.placements = make_placements(model, plan);
  add_up_placements(plan);
  plan.reserved_bytes = reserved_bytes(plan);
  const Gathered gathered = gathered_slices(model, plan, known);
  FOREBAY_RETURN_IF_ERROR(count_file_traffic(gathered, plan));
  FOREBAY_RETURN_IF_ERROR(count_wire(model, gathered, plan));
  FOREBAY_RETURN_IF_ERROR(count_evaluation(model, gathered, known, plan));
  return plan;
}

std::uint64_t Plan::slice_count(int unit) const {
  return layouts[static_cast<std::size_t>(unit)].trainable_slice(options.shards());
}

std::uint64_t Plan::updated_count(int unit) const {
  return options.stage == 0 ? layouts[static_cast<std::size_t>(unit)].trainable_count : slice_count(unit);
}

DataType Plan::gradient_type(int unit) const {
  const bool stays_summed = options.stage >= 2 || (options.stage == 1 && is_offloaded(unit));
  return accumulates_in_fp32() && stays_summed ? DataType::kFloat32 : options.dtype;
}

std::uint64_t Plan::deciding_units() const {
  return std::max<std::uint64_t>(layouts.size(), options.deciding_units);
}

bool Plan::fuses(int unit) const {
  const std::uint64_t slice = slice_count(unit);
  return !is_offloaded(unit) && slice > 0 && slice <= fused_columns / 2;
}

std::uint64_t Plan::activation_room(std::uint64_t budget) const {
  const Chunks beside = chunks_beside_activations(*this);
  if (budget < beside.whole) return 0;
  const std::uint64_t in_chunks = (budget - beside.whole) / options.chunk_bytes * options.chunk_bytes;
  return in_chunks < beside.shared ? 0 : (in_chunks - beside.shared) / kBlockGranule * kBlockGranule;
}

// The sum has its staging, at most a slice and two buckets in fp32, where the sum of one bucket lies.
std::uint64_t Plan::shared_bucket_count(int unit, int stages) const {
  const std::uint64_t columns = std::min(bucket_columns, slice_count(unit));
  const auto count = static_cast<std::uint64_t>(stages);
  const std::uint64_t slice = columns / (1 + 2 * count) / 4 * 4;  // Accesses are of 16 bytes.
  return slice * count;
}

std::string Plan::fingerprint_text() const {
  std::ostringstream text;
  text << option_lines(options, &OptionRow::in_fingerprint) << "ranks " << options.ranks
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
