// The plan of an engine: the bytes of every pool and every wire, and the place of every buffer, computed
// before anything is allocated. The engine allocates the plan's pools, the arena enforces their limits, and
// the report after a run sets the measured bytes beside the planned ones. `forebay plan` prints a plan.
//
// The persistent model states are parameters, gradients and optimizer. With Psi trainable parameters, N ranks
// and one micro-step they take, in bytes per rank:
//
//   ZeRO stage   2-byte parameters and gradients   fp32, which needs no separate master
//   0            16 Psi                            16 Psi
//   1            4 Psi + 12 Psi / N                8 Psi + 8 Psi / N
//   2            2 Psi + 14 Psi / N                4 Psi + 12 Psi / N
//   3            16 Psi / N                        16 Psi / N
//
// Source: Rajbhandari et al., arXiv 1910.02054, section 5 and table 1; ARCHITECTURE.md, "The memory
// contract".
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "forebay/sharding_options.h"
#include "forebay/status.h"
#include "forebay/tensor_split.h"

namespace forebay {

// One parameter of a model.
struct ParameterShape {
  std::string name;         // Unique in the model. Saved state finds the parameter by this name.
  std::uint64_t count = 0;  // Elements; not zero.
  int group = 0;            // The parameter group: an index into Hyperparameters::groups.
  bool frozen = false;      // Gathered with its unit, but neither reduced nor updated.
  // All tensor-parallel ranks have the parameter whole and compute the same gradient. It counts once in the
  // norm.
  bool replicated = false;
  bool optional = false;  // Its gradient may never be asked for (Engine::declare_optional).
  // Muon updates it by AdamW though it has two dimensions: an embedding or a head
  // (Engine::declare_elementwise).
  bool elementwise = false;
  // Dimensions, for readers of saved state; their product is `count`. Empty: not declared.
  std::vector<std::uint64_t> shape = {};
  std::optional<TensorSplit> split = {};  // A part of a tensor (Engine::declare_split).
};

// Parameters that are gathered together, usually one transformer block.
struct UnitShape {
  std::string name;
  std::vector<ParameterShape> parameters;
  // A parameter of an earlier unit that this unit uses too. The gradient buffer of its owner is kept from the
  // first contribution to the last.
  struct Tied {
    int unit = 0;   // The owner.
    int index = 0;  // In the owner's parameters.
  };
  std::vector<Tied> tied;
  // False for an embedding: its backward pass needs no gather.
  bool backward_reads_parameters = true;
  // Pipeline stages that have this unit and add up its gradients once a step. A unit of several pipeline
  // stages stays on the device, whatever is offloaded, and so do the units before it.
  int shared_by = 1;
};

// A model, as the engine sees it.
struct ModelShape {
  std::vector<UnitShape> units;        // In the order of the forward pass.
  std::uint64_t activation_bytes = 0;  // Taken by the trainer from the engine's arena.

  std::uint64_t parameter_count() const;
};

// Describes a model call by call, and refuses what no plan takes. A refused call changes nothing.
class ModelDescription {
 public:
  explicit ModelDescription(ModelShape& model) : model_(model) {}

  // Each returns the index of the new part.
  //
  // Errors: kInvalidArgument, thrown: a name that is in use, a parameter without elements, a unit or a
  //         parameter that was not added, a parameter of a unit that has tied ones, whose indices it would
  //         change.
  int add_unit(const std::string& name, bool backward_reads_parameters);
  int add_parameter(int unit, const ParameterShape& parameter);
  int tie(int unit, UnitShape::Tied owner);

 private:
  UnitShape& unit(int index, const std::string& call) const;

  ModelShape& model_;
  std::set<std::string> unit_names_, parameter_names_;
};

// The plan does not depend on ShardingOptions::overlap, memory_bytes or offload_directories, and knows no
// measurements: bucket_auto and offload_auto are taken as false.
struct PlanOptions : ShardingOptions {
  int ranks = 1;  // Data-parallel ranks.
  // For a model divided over tensor- or pipeline-parallel ranks: all ranks that decide about a step together,
  // and the largest number of units of any of them. 0: these ranks, these units.
  int deciding_ranks = 0;
  std::uint64_t deciding_units = 0;
  std::uint64_t chunk_bytes = 2u << 20;  // The device's mapping granularity, for reserved bytes.
  int device_units = -1;  // Units to keep on the device, whatever the fraction. -1: by the fraction.

  // Ranks that a unit is sharded over, and copies of the sharded model: shards() * replicas() is `ranks`.
  int shards() const { return shard_within_group ? group : ranks; }
  int replicas() const { return ranks / shards(); }
  // Whether gradients are reduced in two levels.
  bool in_groups() const { return group > 1 || shard_within_group; }
};

// Live bytes on the device, by pool, per rank. K is the number of micro-steps.
struct PoolBytes {
  // Persistent. Offloaded parameter shards are not in it.
  std::uint64_t parameters = 0;
  // Persistent; with K > 1 the fp32 accumulator is in it. An offloaded unit has no gradient slice here from
  // stage 2 on, and no accumulator from stage 1 on. Instead two buffers carry slices, or with K > 1 the
  // fp32 sums of buckets, to the host.
  std::uint64_t gradients = 0;
  // Persistent: the master (2-byte types), m and v of the units that are not offloaded, as they are kept.
  // Adafactor: also the sums of all units, offloaded or not. Muon: v of single elements, and updates of
  // matrices (ARCHITECTURE.md).
  std::uint64_t optimizer = 0;
  // Slots for gathered units, and for unit gradients before their reduction. The number of layers does not
  // change it.
  std::uint64_t gathered = 0;
  // Staging of collectives. The model's size changes it only by the few bytes of each unit's norm. Muon: also
  // twice the largest unit in fp32, and the scratch that a matrix is orthogonalised with. Adafactor: also a
  // few values for each parameter, and for units on the device 1/64 byte for each element of the largest
  // slice.
  std::uint64_t buckets = 0;
  // Declared by the trainer.
  std::uint64_t activations = 0;

  std::uint64_t model_states() const { return parameters + gradients + optimizer; }
  std::uint64_t total() const { return model_states() + gathered + buckets + activations; }
  friend constexpr bool operator==(const PoolBytes& a, const PoolBytes& b) noexcept {
    return a.parameters == b.parameters && a.gradients == b.gradients && a.optimizer == b.optimizer &&
           a.gathered == b.gathered && a.buckets == b.buckets && a.activations == b.activations;
  }
  friend constexpr bool operator!=(const PoolBytes& a, const PoolBytes& b) noexcept { return !(a == b); }
};

// Pinned host memory of offloaded units and of saving, per rank.
struct HostBytes {
  // Master, m and v: 12 bytes for each offloaded element that this rank updates, and less where
  // ShardingOptions::moments or master_weights keep them in fewer. Tier kFile: none. Adafactor: the factors
  // and sums of offloaded units are here in both tiers. Muon: so are v and the updates of matrices.
  std::uint64_t optimizer = 0;
  // Gradients that wait for the update of their unit, in the gradient type. With K > 1 (Accumulate::kShard,
  // stages 1 to 3) micro-steps add up here, in fp32. Where parameters stay on the device, an updated 2-byte
  // parameter takes the place of its gradient until it is copied to the device.
  std::uint64_t gradients = 0;
  // The offloaded parameter shard, in the parameter type. In fp32 these are the frozen parameters alone,
  // because the master is the parameter. Tier kFile: none.
  std::uint64_t parameters = 0;
  // Tier kFile: buffers between files and the update. K > 1: the fp32 sum of one bucket. The rest of the last
  // page. The model's size changes nothing but that rest.
  std::uint64_t staging = 0;
  // ShardingOptions::save_async: a copy of the values that this rank saves: master, m and v as they are kept,
  // and the frozen elements in the parameter type.
  std::uint64_t saving = 0;

  std::uint64_t total() const { return optimizer + gradients + parameters + staging + saving; }
  friend constexpr bool operator==(const HostBytes& a, const HostBytes& b) noexcept {
    return a.optimizer == b.optimizer && a.gradients == b.gradients && a.parameters == b.parameters &&
           a.staging == b.staging && a.saving == b.saving;
  }
  friend constexpr bool operator!=(const HostBytes& a, const HostBytes& b) noexcept { return !(a == b); }
};

// Bytes in files, and bytes that one applied step moves, per rank. The files themselves are larger: each
// range is padded to a page.
struct FileBytes {
  std::uint64_t optimizer = 0;         // Master, m and v.
  std::uint64_t parameters = 0;        // As HostBytes::parameters.
  std::uint64_t read_per_step = 0;     // The optimizer once, and a parameter slice for each gather.
  std::uint64_t written_per_step = 0;  // The optimizer once, and 2-byte parameters once.

  std::uint64_t total() const { return optimizer + parameters; }
  friend constexpr bool operator==(const FileBytes& a, const FileBytes& b) noexcept {
    return a.optimizer == b.optimizer && a.parameters == b.parameters && a.read_per_step == b.read_per_step &&
           a.written_per_step == b.written_per_step;
  }
  friend constexpr bool operator!=(const FileBytes& a, const FileBytes& b) noexcept { return !(a == b); }
};

// Payload of collectives, per rank.
struct WireBytes {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  friend constexpr bool operator==(const WireBytes& a, const WireBytes& b) noexcept {
    return a.sent == b.sent && a.received == b.received;
  }
  friend constexpr bool operator!=(const WireBytes& a, const WireBytes& b) noexcept { return !(a == b); }
};

// Bytes that forward passes without gradients move (Engine::evaluation_begin), per rank. They take no memory
// of their own. Below stage 3 they move nothing.
struct PassBytes {
  WireBytes wire;
  std::uint64_t file_read = 0;  // Parameters in files: a slice for each gather.
};
struct EvaluationBytes {
  // A pass over all units right after an update: Psi (N-1)/N elements are sent.
  PassBytes first;
  // A pass after another one, without an update between. Units that still lie in slots are not gathered.
  PassBytes next;
  // The step that follows an evaluation moves so much less, for the same reason.
  PassBytes spared;
};

// Each parameter starts at a multiple of this many elements of its section, so that every access of 16 bytes
// is aligned. Smaller: kernels that read 16 bytes at a time fail. Larger: more padding.
inline constexpr std::uint64_t kParameterAlignment = 64;

// The same with these options. With MomentFormat::kBlock8 no block of m and v spans two parameters, which may
// differ in magnitude and in their parameter group.
constexpr std::uint64_t parameter_alignment(const ShardingOptions& options) {
  return options.moments == MomentFormat::kBlock8 ? kMomentBlockCount : kParameterAlignment;
}

// The flat buffer of a unit. It has two sections, trainable and then frozen, each padded to N * 512 elements
// and cut into N equal slices, of which rank r owns slice r. Hybrid sharding cuts the same padded sections
// into as many slices as an all-reduce group has ranks.
struct UnitLayout {
  struct Place {
    bool frozen = false;
    std::uint64_t offset = 0;  // Elements from the start of the section.
    std::uint64_t count = 0;   // Elements.
  };
  std::vector<Place> places;          // By parameter, in order of registration.
  std::uint64_t trainable_count = 0;  // Elements, padded.
  std::uint64_t frozen_count = 0;     // Elements, padded.
  std::uint64_t trainable_slice(int slices) const {
    return trainable_count / static_cast<std::uint64_t>(slices);
  }
  std::uint64_t frozen_slice(int slices) const { return frozen_count / static_cast<std::uint64_t>(slices); }
  std::uint64_t total_count() const { return trainable_count + frozen_count; }
};

// The memory that a placement lies in. The first six pools are on the device, each an account of the engine's
// arena with the bytes of its member of PoolBytes.
enum class Pool : std::uint8_t {
  kParameters,
  kGradients,
  kOptimizer,
  kGathered,  // Each placement is an arena slot. The other pools of the device are one block each.
  kBuckets,
  kActivations,
  kHost,     // One block of pinned host memory: states, gradients and sums of offloaded units, kSaved.
  kStaging,  // Pinned host memory between files and the update; each placement is a block.
  kFiles,    // The store; each placement is a range.
};
inline constexpr int kDevicePoolCount = 6;
inline constexpr int kPoolCount = 9;

const char* pool_name(Pool pool) noexcept;  // "parameters"

// The use of a placement. A slice is this rank's part of a section. The updated range is the part of the
// trainable section that this rank updates: the whole section at stage 0, the slice at the other stages.
enum class Role : std::uint8_t {
  // Placements of a unit.
  kParameters,      // The whole unit: stages 0 to 2.
  kParameterShard,  // The trainable slice, then the frozen slice: stage 3, on the device.
  kGradients,       // The whole trainable section: stages 0 and 1.
  kAccumulator,     // The slice of the fp32 sum over micro-steps, on the device.
  kGradientShard,   // The slice of the reduced gradient: stages 2 and 3, without an accumulator.
  kMaster,          // The updated range in fp32. Parameters on the device may be the master themselves: in
                    // fp32, or without ShardingOptions::master_weights.
  kM,
  kV,
  kAverage,         // The exponential moving average of the updated range's master, in fp32.
  kFactors,         // Adafactor: the factors of all parameters of the unit, on every rank.
  kFactorSums,      // Adafactor: sums over ranks, and then the new factors, on the device;
  kHostFactorSums,  // and the same on the host, for an offloaded unit.
  kOrthogonal,      // Muon: the updated range of momentum, and then of orthogonalised updates, in fp32.
  kHostGradients,   // The updated range of the gradient on the host: offloaded units.
  kTrainableSlice,  // The offloaded trainable slice, in a 2-byte type. In fp32 it is the master.
  kFrozenSlice,     // The offloaded frozen slice.
  // Placements of the engine.
  kSlot,           // Units and gradients are gathered here: SlotAssignment.
  kReceive,        // Input of a reduce-scatter from all ranks; or the norms of all ranks.
  kBucketSum,      // The fp32 sum of a bucket, or the scratch of a norm.
  kFused,          // The bucket of small units.
  kNorms,          // One norm per unit, of this rank's part.
  kControl,        // The decision about a step.
  kActivations,    // Declared by the trainer.
  kTransit,        // A gradient slice, or a bucket's fp32 sum, on its way to the host.
  kHostSum,        // The fp32 sum of a bucket on the host.
  kPassBuffers,    // Buffers of the optimizer's pass over files.
  kMoverBuffers,   // Buffers of parameters on their way from files to the device.
  kSaved,          // The copy of the values that a thread saves.
  kSquares,        // Adafactor: two sums of each trainable parameter, of this rank and then of all ranks.
  kHostSquares,    // The same on the host.
  kHostRest,       // The rest of the last page of pinned memory.
  kFactorScalars,  // Adafactor: the factor of u and the row means of each parameter on the device, in fp32.
  kFactorLeaves,   // Adafactor: the sum of each leaf of a slice on the device.
  kMatrices,    // Muon: momentum of all ranks, and then the orthogonalised matrices of this rank, of a unit.
  kMatrixWork,  // Muon: the scratch of an orthogonalisation.
};

// A run of bytes in one pool. The placements of a pool follow each other without gaps, in the order of the
// list. In pools where each placement is memory of its own, `offset` is only a running sum.
struct StatePlacement {
  Role role = Role::kParameters;
  Pool pool = Pool::kParameters;
  int index = 0;  // The unit; for the engine's placements, a number within the role.
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  friend constexpr bool operator==(const StatePlacement& a, const StatePlacement& b) noexcept {
    return a.role == b.role && a.pool == b.pool && a.index == b.index && a.offset == b.offset &&
           a.bytes == b.bytes;
  }
  friend constexpr bool operator!=(const StatePlacement& a, const StatePlacement& b) noexcept {
    return !(a == b);
  }
};

// The slot of each unit. Units take two slots in turn; the owner of a tied parameter has a slot of its own.
struct SlotAssignment {
  static constexpr int kNone = -1;
  std::vector<int> parameter_slot;        // By unit; kNone below stage 3.
  std::vector<int> gradient_slot;         // By unit; kNone below stage 2 or without trainable parameters.
  std::vector<std::uint64_t> slot_bytes;  // By slot.
};

// A plan is the same on every rank: all figures are per rank.
struct Plan {
  PlanOptions options;
  std::vector<UnitLayout> layouts;  // By unit.
  // Everything that the engine places, its own placements first, then the placements of each unit. The engine
  // allocates the pools and adds their base addresses. `bytes`, `host_bytes` and `file_bytes` are sums over
  // this list.
  std::vector<StatePlacement> placements;
  PoolBytes bytes;
  std::uint64_t reserved_bytes = 0;  // `bytes` in whole chunks: the least budget that is enough.
  HostBytes host_bytes;
  FileBytes file_bytes;
  WireBytes wire_per_step;
  EvaluationBytes evaluation;
  SlotAssignment slots;
  int device_units = 0;              // The first units, which are not offloaded. Offload::kNone: all units.
  std::uint64_t bucket_columns = 0;  // Elements of each slice in one bucket.
  std::uint64_t fused_columns = 0;   // Elements of each slice in the bucket of small units.
  std::uint64_t piece_count = 0;     // Tier kFile: elements of the optimizer in one pass buffer.
  // Adafactor: fp32 factors by unit, padded to a multiple of the ranks; otherwise empty.
  std::vector<std::uint64_t> factor_counts;
  std::uint64_t square_count = 0;  // Adafactor: doubles of one rank, two for each trainable parameter.
  // Muon: by unit; otherwise empty.
  struct MuonUnit {
    bool has_matrices = false;
    // Elements with a v, which are those of no matrix: in the updated range of the rank with the most, and in
    // the part that a rank saves.
    std::uint64_t v_count = 0;
    std::uint64_t saved_v_count = 0;
  };
  std::vector<MuonUnit> muon;
  std::uint64_t matrix_work_count = 0;  // Muon: fp32 elements of kMatrixWork.

  // Sums over `placements`.
  //
  // Cost: a pass over the list.
  std::uint64_t bytes_in(Pool pool) const;
  std::uint64_t bytes_of(Role role) const;

  bool is_offloaded(int unit) const { return unit >= device_units; }
  bool offloads() const { return device_units < static_cast<int>(layouts.size()); }
  bool offloads_parameters() const { return options.offload == Offload::kOptimizerAndParameters; }
  // Whether the owner of a slice adds up micro-steps in fp32, and whether the host does so for offloaded
  // units.
  bool accumulates_in_fp32() const {
    return options.micro_steps > 1 && options.accumulate == Accumulate::kShard;
  }
  bool adds_on_host() const { return accumulates_in_fp32() && options.stage >= 1; }
  // Elements of the unit's trainable slice, and of its updated range.
  std::uint64_t slice_count(int unit) const;
  std::uint64_t updated_count(int unit) const;
  // The type of the unit's reduced gradient: fp32 where it stays in the fp32 sum over micro-steps, otherwise
  // the gradient type.
  DataType gradient_type(int unit) const;
  // The number of ranks that decide about a step together, and the most units that one of them has.
  int deciding_ranks() const { return options.deciding_ranks == 0 ? options.ranks : options.deciding_ranks; }
  std::uint64_t deciding_units() const;

  // Whether the unit's gradients are reduced in one bucket with those of other units.
  bool fuses(int unit) const;

  // The largest ModelShape::activation_bytes with which reserved_bytes is at most `budget`. 0 also means that
  // the other pools alone are larger than `budget`.
  std::uint64_t activation_room(std::uint64_t budget) const;

  // The most elements in one sum over the pipeline stages that share `unit`. It is the same on all of them.
  std::uint64_t shared_bucket_count(int unit, int stages) const;

  // One "key value" line per option and per unit. Ranks with the same text have the same plan.
  std::string fingerprint_text() const;
};

// Computes the plan of a model.
//
// Errors: kInvalidArgument naming the option or the unit, and the allowed values.
// Cost: linear in units and parameters.
Result<Plan> make_plan(const ModelShape& model, const PlanOptions& options);

}  // namespace forebay
