// Plan: every pool's bytes and every wire's bytes, computed before anything is allocated. The engine
// allocates what the plan says, the arena enforces it, and the report after a run sets measured beside
// planned. `forebay plan` prints it.
//
// Persistent model states are parameters + gradients + optimizer. With Psi trainable parameters, N ranks,
// 2-byte parameters and gradients and one micro-step they are 16Psi, 4Psi+12Psi/N, 2Psi+14Psi/N and 16Psi/N
// bytes for stages 0 to 3; in fp32, which needs no separate master, 16Psi, 8Psi+8Psi/N, 4Psi+12Psi/N and
// 16Psi/N. Source: Rajbhandari et al., arXiv 1910.02054, section 5 and table 1; ARCHITECTURE.md, "The memory
// contract".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "forebay/data_type.h"
#include "forebay/status.h"

namespace forebay {

// Where micro-steps add up (ARCHITECTURE.md, "The numeric contract").
enum class Accumulate : std::uint8_t {
  kShard,  // Every micro-step is reduced; the owner adds in fp32. All stages.
  kLocal,  // Each rank adds locally in the gradient type; one reduction a step. Stages 0 and 1.
};

// Which states live below the device and only visit it.
enum class Offload : std::uint8_t {
  kNone,
  kOptimizer,               // fp32 master, m and v: the update runs on the host.
  kOptimizerAndParameters,  // Stage 3: the parameter shard too, which then comes up for each gather.
};

// Where what is offloaded lives.
enum class Tier : std::uint8_t {
  kPinned,  // Page-locked host memory.
  kFile,    // Files. Gradients still wait for their unit's update in page-locked memory.
};

struct ParameterShape {
  std::string name;         // Logical and unique: the name in saved state.
  std::uint64_t count = 0;  // Elements.
  int group = 0;            // Index into Hyperparameters::groups.
  bool frozen = false;      // Gathered with its unit but neither reduced nor updated.
  // The tensor-parallel ranks all have it, with the same gradient: it counts once in the norm.
  bool replicated = false;
};

struct UnitShape {
  std::string name;
  std::vector<ParameterShape> parameters;
  // Parameters of earlier units that this unit uses too, as (unit, index in that unit). Their owner's
  // gradient buffer is kept from the first contribution to the last.
  struct Tied {
    int unit = 0;
    int index = 0;
  };
  std::vector<Tied> tied;
  bool backward_reads_parameters = true;  // False (an embedding): its backward pass needs no gather.
  // Stages of a pipeline that all have this unit, and add up its gradients once a step. It stays on the
  // device, whatever is offloaded, and so do the units before it.
  int shared_by = 1;
};

struct ModelShape {
  std::vector<UnitShape> units;        // In the order of execution of the forward pass.
  std::uint64_t activation_bytes = 0;  // What the trainer will take from the engine's arena besides.

  std::uint64_t parameter_count() const;
};

struct PlanOptions {
  int stage = 0;  // 0 data parallel, 1 optimizer states, 2 + gradients, 3 + parameters.
  int ranks = 1;  // Data-parallel ranks.
  // Order group(g): reductions are within groups of this many consecutive ranks first, then across them
  // (grouped_communicator.h). 1: in the order of the ranks.
  int group = 1;
  // Hybrid sharding: the stage shards over the ranks of a group, and each group has all of it.
  bool shard_within_group = false;
  // Of a model that is cut over tensor- or pipeline-parallel ranks: all that decide about a step together,
  // and the units of whichever has most; 0: just these ranks, these units.
  int deciding_ranks = 0;
  std::uint64_t deciding_units = 0;
  DataType dtype = DataType::kFloat32;  // Of parameters and gradients. 2-byte types get an fp32 master.
  int micro_steps = 1;                  // K: forward/backward passes per step.
  // Forward passes of micro-steps that run ahead of the backward pass of an earlier one: at stage 3, other
  // gathers.
  int forwards_ahead = 0;
  Accumulate accumulate = Accumulate::kShard;
  std::uint64_t bucket_bytes =
      16u << 20;  // One bucket: all N slices of a column range. Rounded to 512 columns.
  std::uint64_t chunk_bytes = 2u << 20;  // The device's mapping granularity, for reserved bytes.
  Offload offload = Offload::kNone;
  Tier tier = Tier::kPinned;
  // How much of the model is offloaded, by elements, 0 to 1; the rest stays on the device whole. That is the
  // first units, which the next step needs first.
  double offload_fraction = 1.0;
  int device_units = -1;  // Not negative: just so many, whatever the fraction.
  // Each pool has chunks of its own, so that it can be spilled: up to a chunk more each.
  bool spillable = false;
  // Tier kFile: host memory that states pass through, at most. Smaller: smaller pieces, and more of them.
  std::uint64_t staging_bytes = 96u << 20;

  // The ranks that a unit is sharded over, and how often that is done: shards() * replicas() is `ranks`.
  int shards() const { return shard_within_group ? group : ranks; }
  int replicas() const { return ranks / shards(); }
  // Whether reductions are in two levels.
  bool in_groups() const { return group > 1 || shard_within_group; }
};

struct PoolBytes {
  std::uint64_t parameters = 0;  // Persistent.
  // Persistent; with K > 1 the fp32 accumulator. Of offloaded units, stages 2 and 3 keep room for two slices
  // instead, which leave as they are reduced; with K > 1, stages 1 to 3 for two buckets' fp32 sums.
  std::uint64_t gradients = 0;
  std::uint64_t optimizer = 0;  // Persistent: master (2-byte types), m, v; nothing when offloaded.
  std::uint64_t gathered =
      0;  // Slots of gathered units and of unreduced unit gradients. Does not grow with depth.
  std::uint64_t buckets = 0;  // Communication staging. Constant, but for the few bytes of each unit's norm.
  std::uint64_t activations = 0;  // Declared by the trainer.

  std::uint64_t model_states() const { return parameters + gradients + optimizer; }
  std::uint64_t total() const { return model_states() + gathered + buckets + activations; }
  friend bool operator==(const PoolBytes&, const PoolBytes&) = default;
};

// Page-locked host memory of what is offloaded.
struct HostBytes {
  // fp32 master, m and v: 12 bytes for each offloaded element this rank updates. Nothing on the file tier.
  std::uint64_t optimizer = 0;
  // Gradients that wait for their unit's update, in the gradient type; with K > 1 (shard, stages 1 to 3) in
  // fp32, because there they add up over the micro-steps. Where parameters stay on the device, a 2-byte
  // parameter goes back up from the place of the gradient it was made of.
  std::uint64_t gradients = 0;
  // The offloaded parameter shard, in the parameter type; in fp32 only frozen parameters, because the master
  // is the parameter. Nothing on the file tier.
  std::uint64_t parameters = 0;
  // Tier kFile: what states pass through; K > 1: one bucket's sum. Does not grow with the model.
  std::uint64_t staging = 0;

  std::uint64_t total() const { return optimizer + gradients + parameters + staging; }
  friend bool operator==(const HostBytes&, const HostBytes&) = default;
};

// What is in files, and what one applied step moves. Payload: ends of ranges are padded to a page.
struct FileBytes {
  std::uint64_t optimizer = 0;
  std::uint64_t parameters = 0;  // As HostBytes::parameters.
  std::uint64_t read_per_step = 0;
  std::uint64_t written_per_step = 0;

  std::uint64_t total() const { return optimizer + parameters; }
  friend bool operator==(const FileBytes&, const FileBytes&) = default;
};

struct WireBytes {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  friend bool operator==(const WireBytes&, const WireBytes&) = default;
};

// Where a unit's parameters lie. A unit is one flat buffer of two sections, trainable then frozen, each
// padded to N * 512 elements; rank r owns the r-th of N equal slices of each. With hybrid sharding there are
// as many slices as ranks of a group, and the padding is the same.
struct UnitLayout {
  struct Place {
    bool frozen = false;
    std::uint64_t offset = 0;  // Elements from the start of its section.
    std::uint64_t count = 0;
  };
  std::vector<Place> places;          // In order of registration.
  std::uint64_t trainable_count = 0;  // Padded.
  std::uint64_t frozen_count = 0;     // Padded.
  std::uint64_t trainable_slice(int slices) const {
    return trainable_count / static_cast<std::uint64_t>(slices);
  }
  std::uint64_t frozen_slice(int slices) const { return frozen_count / static_cast<std::uint64_t>(slices); }
  std::uint64_t total_count() const { return trainable_count + frozen_count; }
};

// Each parameter starts at a multiple of this many elements of its section (16-byte accesses on every
// device).
inline constexpr std::uint64_t kParameterAlignment = 64;

// Where a placement takes its bytes. The first six pools are accounts of the engine's arena, on the device.
enum class Pool : std::uint8_t {
  kParameters,
  kGradients,
  kOptimizer,
  kGathered,  // Each placement is an arena slot.
  kBuckets,
  kActivations,
  kHost,     // One block of pinned host memory: states and gradients of offloaded units.
  kStaging,  // Pinned host memory that states in files pass through; each placement is a block.
  kFiles,    // The store; each placement is a range.
};
inline constexpr int kDevicePoolCount = 6;
inline constexpr int kPoolCount = 9;

const char* pool_name(Pool pool) noexcept;  // "parameters"

// The use of a placement. A slice is this rank's part of a section. The updated range is the part of the
// trainable section that this rank updates: all of it at stage 0, its slice at the other stages.
enum class Role : std::uint8_t {
  // Placements of a unit.
  kParameters,      // The whole unit: stages 0 to 2.
  kParameterShard,  // The trainable slice, then the frozen slice: stage 3, on the device.
  kGradients,       // The whole trainable section: stages 0 and 1.
  kAccumulator,     // The slice of the fp32 sum over micro-steps, on the device.
  kGradientShard,   // The slice of the reduced gradient: stages 2 and 3, without an accumulator.
  kMaster,          // The updated range in fp32. In fp32 on the device, the parameters are the master.
  kM,
  kV,
  kHostGradients,   // The updated range of the gradient on the host: offloaded units.
  kTrainableSlice,  // The offloaded trainable slice, in a 2-byte type. In fp32 it is the master.
  kFrozenSlice,     // The offloaded frozen slice.
  // Placements of the engine.
  kSlot,          // Units and gradients are gathered here: SlotAssignment.
  kReceive,       // Input of a reduce-scatter from all ranks; or the norms of all ranks.
  kBucketSum,     // The fp32 sum of a bucket, or the scratch of a norm.
  kFused,         // The bucket of small units.
  kNorms,         // One norm per unit, of this rank's part.
  kControl,       // The decision about a step.
  kActivations,   // Declared by the trainer.
  kTransit,       // A gradient slice, or a bucket's fp32 sum, on its way to the host.
  kHostSum,       // The fp32 sum of a bucket on the host.
  kPassBuffers,   // Buffers of the optimizer's pass over files.
  kMoverBuffers,  // Buffers of parameters on their way from files to the device.
};

// A run of bytes in one pool. The placements of a pool lie one after the other, without gaps, in the order of
// the list; where each placement is memory of its own, `offset` only counts.
struct Placement {
  Role role = Role::kParameters;
  Pool pool = Pool::kParameters;
  int index = 0;  // The unit; of the engine's placements, the number among those of the role.
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const Placement&, const Placement&) = default;
};

// The slot of each unit. Units take two slots in turn; the owner of a tied parameter has its own.
struct SlotAssignment {
  static constexpr int kNone = -1;
  std::vector<int> parameter_slot;        // By unit; kNone below stage 3.
  std::vector<int> gradient_slot;         // By unit; kNone below stage 2 or without trainable parameters.
  std::vector<std::uint64_t> slot_bytes;  // By slot.
};

struct Plan {
  PlanOptions options;
  std::vector<UnitLayout> layouts;
  PoolBytes bytes;                   // Live bytes per rank; every rank has the same.
  std::uint64_t reserved_bytes = 0;  // The same in whole chunks: what --memory must hold.
  HostBytes host_bytes;              // Per rank; every rank has the same.
  FileBytes file_bytes;              // Per rank; every rank has the same.
  int device_units = 0;              // The first so many units are not offloaded: all, with Offload::kNone.
  std::uint64_t piece_count = 0;  // Tier kFile: elements of an optimizer that pass through staging together.
  WireBytes wire_per_step;        // Payload per rank and step; every rank has the same.
  std::uint64_t bucket_columns = 0;  // Elements of one slice in one bucket.
  std::uint64_t fused_columns = 0;   // The same in the bucket of small units.
  SlotAssignment slots;
  // Everything that the engine places. The engine allocates the pools and adds their base addresses. `bytes`,
  // `host_bytes` and `file_bytes` are sums over this list.
  std::vector<Placement> placements;

  std::uint64_t bytes_in(Pool pool) const;
  std::uint64_t bytes_of(Role role) const;

  bool is_offloaded(int unit) const { return unit >= device_units; }
  bool offloads() const { return device_units < static_cast<int>(layouts.size()); }
  bool offloads_parameters() const { return options.offload == Offload::kOptimizerAndParameters; }
  // Whether the owner of a slice adds up its micro-steps in fp32; for offloaded units, whether the host does.
  bool accumulates_in_fp32() const {
    return options.micro_steps > 1 && options.accumulate == Accumulate::kShard;
  }
  bool adds_on_host() const { return accumulates_in_fp32() && options.stage >= 1; }
  // Elements of the unit's slice, and of its updated range.
  std::uint64_t slice_count(int unit) const;
  std::uint64_t updated_count(int unit) const;
  // The type of the reduced gradient. It stays fp32 where it stays in the fp32 sum over micro-steps.
  DataType gradient_type(int unit) const;
  // The ranks that decide about a step together, and the most units that one of them has.
  int deciding_ranks() const { return options.deciding_ranks == 0 ? options.ranks : options.deciding_ranks; }
  std::uint64_t deciding_units() const;

  // Whether the unit's gradients are reduced together with other units'.
  bool fuses(int unit) const;

  // The most that ModelShape::activation_bytes may be for reserved_bytes not to pass `budget`; 0 as well
  // where what is beside them passes it alone.
  std::uint64_t activation_room(std::uint64_t budget) const;

  // Elements that one sum over the `stages` that share `unit` takes at most: the same on all of them.
  std::uint64_t shared_bucket_count(int unit, int stages) const;

  // Same text on every rank means the same plan: one "key value" line per option and per unit.
  std::string fingerprint_text() const;
};

const char* offload_name(Offload offload) noexcept;  // "none", "optimizer", "optimizer+parameters"
const char* tier_name(Tier tier) noexcept;           // "cpu", "nvme"

// Errors: kInvalidArgument naming the option or the unit and what it may be.
Result<Plan> make_plan(const ModelShape& model, const PlanOptions& options);

}  // namespace forebay
