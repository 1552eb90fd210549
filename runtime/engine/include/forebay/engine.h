// Engine: the Units of a model, their placement under a ZeRO stage, and the training step.
//
// The trainer describes its model (add_unit, add_parameter), reads the plan, commits, gives initial values,
// and then per step leases each unit forward and backward; the engine gathers, reduces, clips, checks and
// updates. Whatever the stage, the bucket size or the overlap, the resulting bits are the same at a given
// number of ranks.
//
//   engine.step_begin();
//   for each micro-step i: engine.micro_step_begin(i);
//     for each unit u:            { Lease w = engine.forward(u, stream);  ... kernels on w.parameter(p) ... }
//     for each unit u, last first: { Lease w = engine.backward(u, stream); ... write w.gradient(p) ... }
//   StepResult result = engine.step(hyperparameters);
//
// What the trainer's compute does, it queues on `stream` before the lease ends: kernels, or closures through
// call_on() (stream_call.h). The engine averages gradients over ranks and micro-steps; the trainer does not
// divide. samples/01-first-trainer is a whole trainer on one page.
//
// Order: units execute in the order of registration; skip(unit) says that this rank does not use one in this
// micro-step. At most one Lease is alive at a time. All ranks call in the same order.
//
// Pipeline parallelism: each stage of the pipeline has an engine of its own, for its units, over the ranks
// that are data-parallel in that stage. With EngineOptions::forwards_ahead = a, a forward passes come before
// the first backward pass; from then on a forward and a backward pass take turns, until the forward passes
// are through (one-forward-one-backward). Backward passes come in the order of micro-steps:
//
//   forwards_ahead = 1, 3 micro-steps:  forward 0, forward 1, backward 0, forward 2, backward 1, backward 2
//
// Streams: forward and backward make `stream` wait for the gather; the host does not wait. step() queues
// everything, the update too, before it waits to learn the norm and whether the step was applied; it does not
// wait for the update. What it is given (a metric, say) it reads at once: wait for the stream that computes
// it first.
//
// Errors: thrown as Error. A call out of turn or out of range changes nothing and the engine goes on. After a
// failure of a peer, a stream or the device the engine is failed, and every later call says so.
//
// Lifetime: the backend, kernels and communicator outlive the engine, and the engine its leases. Its end
// waits for what was queued under leases, so the trainer's streams outlive it too or are drained before.
//
// Threads: one thread drives an Engine.
//
// Source: Rajbhandari et al., arXiv 1910.02054; ARCHITECTURE.md, "One step".
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "forebay/arena.h"
#include "forebay/backend.h"
#include "forebay/communicator.h"
#include "forebay/kernels.h"
#include "forebay/plan.h"
#include "forebay/timeline.h"

namespace forebay {

namespace internal {
struct EngineHooks;
}

using UnitId = int;  // Index in order of registration.

struct ParameterId {
  UnitId unit = 0;
  int index = 0;  // In order of registration within the unit.
  friend bool operator==(ParameterId, ParameterId) = default;
};

struct LossScaleOptions {
  double initial = 65536.0;    // fp16 only; other types use 1 throughout.
  int growth_interval = 2000;  // Applied steps in a row after which the scale doubles.
  double minimum = 1.0;
};

struct EngineOptions {
  int stage = 0;
  DataType dtype = DataType::kFloat32;
  int micro_steps = 1;
  int forwards_ahead = 0;  // See above.
  Accumulate accumulate = Accumulate::kShard;
  // Order group(g): gradients are added within groups of this many consecutive ranks first, then across them
  // (grouped_communicator.h). 1: in the order of the ranks. Other bits, the same at every stage.
  int group = 1;
  // Hybrid sharding: what the stage shards is sharded over the ranks of a group, and each group has all of
  // it. The bits are those of the same groups without it.
  bool shard_within_group = false;
  // Of a model that is cut over tensor- or pipeline-parallel ranks too: all ranks together, from which the
  // engine's communicator, the data-parallel one, was split. They take one decision about every step: the
  // norm is over all of them, in order of their slices and then of their ranks here, and so are
  // StepResult::metric_sum and stop. Not owned; outlives the engine. Null: the communicator's ranks.
  Communicator* grid = nullptr;
  // Of the tensor-parallel ranks one, the first, counts replicated parameters in the norm.
  bool counts_replicated = true;
  std::uint64_t bucket_bytes = 16u << 20;
  // bucket_bytes is chosen at commit, from the latency and the bandwidth that rank 0 measures: 256 KiB to 64
  // MiB, such that latency is a twentieth of a collective. Same bits. With one rank it is left as it is.
  bool bucket_auto = false;
  // The optimizer below the device: its update runs on the host, unit by unit, while the next step's first
  // units are on their way. Same bits.
  Offload offload = Offload::kNone;
  Tier tier = Tier::kPinned;
  double offload_fraction = 1.0;  // Of the model's elements; see PlanOptions.
  // Tier kFile: where the files are; with several, states are striped over them. They have no name there.
  std::vector<std::string> offload_directories;
  std::uint64_t staging_bytes = 96u << 20;  // Tier kFile: host memory that states pass through, at most.
  // offload_fraction is chosen at commit: the part of the update that is offloaded and the part on the device
  // are measured, and it is such that both take as long; more is offloaded where the budget asks for it.
  bool offload_auto = false;
  Timeline* timeline = nullptr;  // Not owned; outlives the engine. Null: nothing is marked.
  int host_threads = 0;          // Of the update on the host; 0: as many as the machine has. Same bits.
  // Processors that these threads are kept to, as the kernel numbers them, one each; then host_threads is not
  // looked at. Those near the device are in Topology's Placement (topology.h). Empty: anywhere.
  std::vector<int> host_processors;
  bool spillable = false;          // Engine::spill works; up to a chunk more of device memory for each pool.
  bool overlap = true;             // False: every collective is waited for where it is issued. Same bits.
  std::uint64_t memory_bytes = 0;  // Device budget of this rank; 0: what the backend has.
  double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8;
  LossScaleOptions loss_scale;
  // More "name, value" pairs that must be the same on every rank, of `grid` if there is one; commit() names
  // the first that differs.
  std::vector<std::pair<std::string, std::string>> agreement;
  const internal::EngineHooks* hooks = nullptr;  // For tests.
};

struct GroupHyperparameters {
  double lr = 1e-3;
  double weight_decay = 0.0;
};

struct Hyperparameters {
  std::vector<GroupHyperparameters> groups;  // By parameter group: one for each that the model uses.
  double clip = 0.0;                         // Largest global gradient norm; 0: no clipping.
  double metric = 0.0;  // This rank's value (its loss, say); summed over ranks in StepResult.
  bool stop = false;    // This rank wants to end after this step; told to all in StepResult.
};

struct StepResult {
  bool skipped = false;             // A gradient was not finite; nothing changed but the loss scale.
  std::optional<double> grad_norm;  // Global, unscaled, before clipping; none when skipped.
  double loss_scale = 1.0;          // What this step used.
  double metric_sum = 0.0;  // Hyperparameters::metric over ranks, added in rank order (or the grid's).
  bool stop = false;        // Some rank asked to stop; the same on every rank.
};

// What a collective takes: the latency, and as long as its bytes (all ranks' slices) take at this bandwidth.
struct WireSpeed {
  double latency_seconds = 0;
  double bytes_per_second = 0;  // 0: not measured.
};

struct EngineStatistics {
  WireSpeed wire_speed;  // bucket_auto: rank 0's.
  PoolBytes peak;        // Live bytes, by pool.
  PoolBytes planned;
  std::uint64_t host_bytes = 0;  // Page-locked for what is offloaded.
  std::uint64_t planned_host_bytes = 0;
  std::uint64_t file_bytes = 0;  // In the store.
  std::uint64_t planned_file_bytes = 0;
  std::uint64_t file_read_bytes = 0;  // So far; padding of ranges included.
  std::uint64_t file_written_bytes = 0;
  std::string store_description;  // Tier kFile: engine, directories, block size and depth.
  std::uint64_t peak_reserved_bytes = 0;
  std::uint64_t planned_reserved_bytes = 0;
  WireBytes planned_wire_per_step;
  WireBytes traffic;  // Payload of all steps so far; saving, digests and the like left out.
  std::uint64_t attempted_steps = 0;
  std::uint64_t applied_steps = 0;
  std::uint64_t gather_count = 0;  // Units gathered (stage 3).
};

// What spill() takes from the device. Gathered units (two, at stage 3) stay.
struct SpillOptions {
  bool parameters = true;
  bool gradients = true;  // Between steps there are none to keep; their memory goes.
  bool optimizer = true;
  bool workspace = true;  // Buckets and the trainer's activations, whose contents are lost.
};

class Engine;

// The right to read a gathered unit, and in the backward pass to write its gradients. Move-only; ends with
// its scope, in stream order.
class Lease {
 public:
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease();

  // The unit's `index`-th parameter, in the engine's dtype; past its own come the tied ones. The address is
  // the same for the engine's life. Not for a unit whose backward does not read parameters, in backward.
  DevicePtr parameter(int index) const;

  // Backward only: where to write the gradient of `index`. `*accumulate` says how: false "=", true "+=" (in
  // the engine's dtype). A trainable parameter whose gradient is not asked for counts as zero. Null for a
  // frozen one.
  DevicePtr gradient(int index, bool* accumulate);

  // Backward only, optional: this gradient is complete in stream order. Any order; ending the lease completes
  // all.
  void grad_ready(int index);

 private:
  friend class Engine;
  Lease(Engine* engine, UnitId unit, Stream stream, bool backward);

  Engine* engine_ = nullptr;
  UnitId unit_ = 0;
  Stream stream_;
  bool backward_ = false;
};

class Engine {
 public:
  // Requires: all three outlive the engine; `kernels` and `communicator` run on `backend`.
  Engine(Backend& backend, Kernels& kernels, Communicator& communicator, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- describe, before commit ---
  UnitId add_unit(const std::string& name, bool backward_reads_parameters = true);
  // `replicated`: the tensor-parallel ranks all have it, with the same gradient (EngineOptions::grid).
  ParameterId add_parameter(UnitId unit, const std::string& name, std::uint64_t count, int group = 0,
                            bool frozen = false, bool replicated = false);
  // `unit` uses `parameter` of an earlier unit too: its index in leases of `unit` is returned.
  int tie(UnitId unit, ParameterId parameter);
  // The ranks of `stages` all have `unit`, of the same parameters with the same values, in their models: the
  // embedding that a pipeline's first stage reads and its last one multiplies by, say. Its gradient is the
  // sum of theirs, added in the order of these ranks once a step, so their copies stay the same; the first of
  // them counts it in the norm. It cannot be skipped and stays on the device, as do the units before it.
  // `stages`: as many ranks as have the same data-parallel rank; used by nobody else; outlives the engine.
  void share(UnitId unit, Communicator& stages);
  // Bytes the trainer will use of activations(): declared so that the plan is whole.
  void declare_activations(std::uint64_t bytes);

  // The most that declare_activations() may be given once all units are there: what the budgets leave beside
  // the rest of the plan, the least of all ranks'. With bucket_auto the bucket is taken to be bucket_bytes,
  // and with offload_auto as much offloaded as may be. Collective.
  std::uint64_t activation_room();

  const ModelShape& model() const;
  // Works before commit and allocates nothing.
  Plan plan() const;
  // Compares plan and agreement over the ranks, checks the budget, allocates everything. Collective.
  // Errors: kOutOfMemory naming the largest pool and the options that change it; kInvalidArgument naming what
  // differs between which ranks.
  void commit();

  // --- values; full parameters in fp32, the same on every rank; zero until set ---
  void set_parameter(ParameterId parameter, std::span<const float> values);
  // The fp32 master weights (a frozen parameter's value widened). Collective.
  std::vector<float> get_parameter(ParameterId parameter);
  // Visits the masters of all parameters in order of registration. Collective; holds one unit in host memory.
  void visit_parameters(const std::function<void(const ParameterShape&, std::span<const float>)>& visitor);
  // XXH3-128 over the fp32 masters in order of registration, padding left out, as 32 hex digits. Collective.
  std::string digest();

  // The declared activation memory, from this rank's device; null when none was declared.
  DevicePtr activations() const;

  // --- the step ---
  void step_begin();
  // Begins the forward pass of a micro-step.
  void micro_step_begin(int index);
  Lease forward(UnitId unit, Stream stream);
  // Of the first micro-step that has had its forward and not its backward pass.
  Lease backward(UnitId unit, Stream stream);
  // In the forward pass: this rank does not use `unit` in this micro-step. It contributes zeros; a unit that
  // every rank skips in every micro-step keeps its weights, m and v.
  void skip(UnitId unit);
  // What the trainer multiplies its loss by (1 except for fp16).
  double loss_scale() const;
  StepResult step(const Hyperparameters& hyperparameters);

  // --- on demand, between steps ---
  // Gives the physical memory of these states back to the device, so that something else may have it until
  // fetch(); parameters and optimizer states are kept in page-locked host memory meanwhile. Addresses stay.
  // Waits for all work of the engine and of leases. Not collective. Errors: kInvalidArgument when the engine
  // was not made spillable; kOutOfMemory when the host has no room, and then nothing is lost.
  void spill(const SpillOptions& states = {});
  // Takes back all that is spilled. Until it has, steps and values are refused. Errors: kOutOfMemory when the
  // device has not enough any more: what is missing stays spilled, and fetch() may be called again.
  void fetch();

  // --- training state ---
  // Saves master, m, v, steps and loss scale under `directory`, with `trainer_state` (opaque; the data
  // cursor, say). Written to a temporary name, synced, checksummed, renamed: a kill at any moment leaves the
  // last saved state. Collective.
  void save_state(const std::string& directory, const std::string& trainer_state);
  // Loads the latest saved state, at any number of ranks and any stage; returns trainer_state. Collective.
  // Errors: kIoError (nothing there), kCorruption (truncated, changed), kInvalidArgument (another model).
  std::string load_state(const std::string& directory);

  // Waits for the engine's queued work, so that the traffic of complete steps is complete.
  EngineStatistics statistics();
  // What moved so far, in steps and outside of them, by kind of operation and by rank; what goes over the
  // grid and over the stages that share a unit is left out.
  std::vector<OperationTraffic> operation_traffic() const;
  const EngineOptions& options() const;
  std::uint64_t attempted_steps() const;
  std::uint64_t applied_steps() const;

  // --- after a failure too ---
  // The last step that was decided, skipped ones counted: after a failure the same on every rank that is
  // left, and the masters are those that it left.
  std::uint64_t committed_step() const;
  // XXH3-128 over the masters that this rank keeps, in order, padding included, as 32 hex digits. Waits for
  // queued updates.
  std::string shard_digest();

 private:
  friend class Lease;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay
