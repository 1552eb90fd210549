// Engine: the Units of a model, their placement under a ZeRO stage, and the training step.
//
// The trainer describes its model (add_unit, add_parameter), reads the plan, commits, gives initial values,
// and then per step leases each unit forward and backward; the engine gathers, reduces, clips, checks and
// updates. At a given number of ranks, the result is bit for bit the same for every ZeRO stage, bucket size
// and overlap.
//
//   engine.step_begin();
//   for each micro-step i: engine.micro_step_begin(i);
//     for each unit u:            { Lease w = engine.forward(u, stream);  ... kernels on w.parameter(p) ... }
//     for each unit u, last first: { Lease w = engine.backward(u, stream); ... write w.gradient(p) ... }
//   StepResult result = engine.step(hyperparameters);
//
// The trainer queues its compute on `stream` before the lease ends: kernels, or closures through call_on()
// (stream_call.h). The engine averages gradients over ranks and micro-steps; the trainer does not divide.
// samples/01-first-trainer is a whole trainer on one page.
//
// Order, strict: units execute in the order of registration; skip(unit) says that this rank does not use a
// unit in this micro-step. At most one Lease is alive at a time. All ranks call in the same order. Between
// steps, evaluation_begin() opens a forward pass without gradients.
//
// Order, recorded (EngineOptions::order_of_units): units are leased in any order, any number of times,
// several at once. The engine records the order of a step and gathers ahead by it in the next one. Where the
// order changes, the step takes longer and the result stays the same bit for bit. The result is that of
// strict order wherever both can run.
//   - A unit's gradient is complete in a micro-step when the unit has had as many backward leases as forward
//     leases in it, or at the end of the micro-step: at the next micro_step_begin(), evaluation_begin(),
//     gradient_norm() or step(); with Accumulate::kLocal only there. So a unit may have two forward leases
//     before a backward one, a forward lease alone, or none.
//   - A rank may leave out units that other ranks use; it contributes zeros. All ranks lease the units that
//     they use in the same order. Ranks that do not are named, by the communicator or at the latest by
//     step().
//   - Before a step has been recorded, the order of registration is expected. It matters only where a rank
//     leaves out units. In a step in which the order changes, no rank leaves out units.
//   - step() ends a step after any number of micro-steps from 1 to EngineOptions::micro_steps, the same on
//     all ranks. evaluation_begin() works in a step too. abandon() gives up a step.
//
// Pipeline parallelism: each pipeline stage has an engine of its own, for its units, over the ranks that are
// data-parallel in that stage. With EngineOptions::forwards_ahead = a, a forward passes come before the first
// backward pass; from then on forward and backward passes take turns until the forward passes end
// (one-forward-one-backward). Backward passes come in the order of micro-steps:
//
//   forwards_ahead = 1, 3 micro-steps:  forward 0, forward 1, backward 0, forward 2, backward 1, backward 2
//
// Streams: forward and backward make `stream` wait for the gather; the host does not wait. step() queues
// the whole step, with its update, and then waits for the norm and the decision, not for the update. It reads
// its arguments at once: if a stream computes the metric, wait for that stream first.
//
// Errors: thrown as Error. A call out of turn or out of range changes nothing and the engine goes on. After a
// failure of a peer, a stream or the device the engine is failed, and every later call says so.
//
// Lifetime: the backend, kernels and communicator outlive the engine, and the engine outlives its leases. Its
// destructor waits for work queued under leases, so the trainer's streams outlive the engine or are drained
// before.
//
// Threads: one thread drives an Engine. In a child made by fork() its calls throw kUnsupported, and its
// destructor and those of its leases do nothing.
//
// Source: Rajbhandari et al., arXiv 1910.02054; ARCHITECTURE.md, "One step".
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forebay/arena.h"
#include "forebay/backend.h"
#include "forebay/communicator.h"
#include "forebay/kernels.h"
#include "forebay/plan.h"
#include "forebay/span.h"
#include "forebay/timeline.h"

namespace forebay {

namespace internal {
struct EngineHooks;
}

using UnitId = int;  // Index in order of registration.

struct ParameterId {
  UnitId unit = 0;
  int index = 0;  // In order of registration within the unit.
  friend constexpr bool operator==(ParameterId a, ParameterId b) noexcept {
    return a.unit == b.unit && a.index == b.index;
  }
  friend constexpr bool operator!=(ParameterId a, ParameterId b) noexcept { return !(a == b); }
};

struct LossScaleOptions {
  double initial = 65536.0;    // fp16 only; other types use 1 throughout.
  int growth_interval = 2000;  // Applied steps in a row after which the scale doubles.
  double minimum = 1.0;
};

// A slice of a unit's gradient: EngineOptions::on_reduced_gradient.
//
// At stage 0 each rank is given its part, and the whole is gathered after the call. With hybrid sharding
// every all-reduce group has the slice.
struct ReducedGradient {
  UnitId unit = 0;
  void* data = nullptr;  // On the device; on the host where `stream` is null.
  DataType type = DataType::kFloat32;
  std::uint64_t first = 0;  // Elements from the start of the unit's trainable section: UnitLayout::places.
  std::uint64_t count = 0;  // With padding, which is zero and stays so.
  // The work that changes the slice is queued here. Null: micro-steps add up on the host. Then the callback
  // changes the slice at once, on a thread of the engine, and calls nothing of the engine or the backend.
  Stream stream;
};

struct EngineOptions : ShardingOptions {
  // For a model divided over tensor- or pipeline-parallel ranks: all ranks together. The engine's
  // communicator, the data-parallel one, was split from it. All its ranks take one decision about every step:
  // the norm is over all of them, in order of their slices and then of their ranks here, and so are
  // StepResult::metric_sum and stop. Not owned; outlives the engine. Null: the communicator's ranks.
  Communicator* grid = nullptr;
  // Only the first tensor-parallel rank counts replicated parameters in the norm.
  bool counts_replicated = true;
  Timeline* timeline = nullptr;  // Not owned; outlives the engine. Null: nothing is marked.
  // Threads of the update on the host, at most 4096; 0: one for each processor. The result is the same.
  int host_threads = 0;
  // The processors, by the kernel's numbers, that these threads are bound to, one each. They replace
  // host_threads. Topology's Placement (topology.h) has those near the device. Empty: the threads are not
  // bound.
  std::vector<int> host_processors;
  // Offload on a host with several NUMA nodes: the host threads run, and the pinned memory lies, near the
  // device, where its node is known. With host_threads 0, one thread for each core there. Same results bit
  // for bit.
  bool near_device = true;
  double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8;
  LossScaleOptions loss_scale;
  // More {name, value} pairs that must be the same on every rank, or on every rank of `grid`. commit() names
  // the first that differs.
  std::vector<std::pair<std::string, std::string>> agreement;
  // Called with this rank's slice of each unit's gradient: reduced over ranks, averaged over micro-steps,
  // still times the loss scale, and before its norm. It may read, scale or replace the slice. Every rank sets
  // it or none does. The ranks that keep the same slice (ReducedGradient) must change it alike. An exception
  // from it fails the engine.
  std::function<void(const ReducedGradient&)> on_reduced_gradient;
  // Looks for elements that are not finite in each gradient when its backward lease ends;
  // StepResult::non_finite has the first one. The host waits for the stream and copies the gradient: for a
  // search, not for training.
  bool find_non_finite = false;
  // True: a trainer may leave out the gradient of any parameter, as if it had declared all of them optional
  // (Engine::declare_optional).
  bool optional_gradients = false;
  const internal::EngineHooks* hooks = nullptr;  // For tests.
};

struct GroupHyperparameters {
  double lr = 1e-3;
  double weight_decay = 0.0;
  // None: those of EngineOptions.
  std::optional<double> beta1 = {}, beta2 = {}, epsilon = {};
};

// The arguments of one step. They are the same on every rank, except metric and stop.
struct Hyperparameters {
  std::vector<GroupHyperparameters> groups;  // By parameter group: one for each that the model uses.
  double clip = 0.0;                         // Largest global gradient norm; 0: no clipping.
  // The averaged gradients are multiplied by this, before clipping. 0 or more.
  double gradient_factor = 1.0;
  double metric = 0.0;  // This rank's value, for example its loss. StepResult has the sum over ranks.
  bool stop = false;    // This rank wants to end after this step. StepResult tells all ranks.
};

// The first element of a gradient that is not finite, by micro-step and then by rank.
struct NonFiniteGradient {
  int rank = 0;  // In EngineOptions::grid, or in the communicator.
  int micro_step = 0;
  ParameterId parameter;      // In that rank's engine.
  std::uint64_t element = 0;  // In the parameter.
};

// The same on every rank.
struct StepResult {
  bool skipped = false;    // A gradient was not finite: only the loss scale changed.
  bool abandoned = false;  // Some rank called abandon(): nothing changed, and the step does not count.
  // Global, without the loss scale, with gradient_factor, before clipping; none when skipped or abandoned.
  std::optional<double> grad_norm;
  double loss_scale = 1.0;  // The scale that this step used.
  double metric_sum = 0.0;  // Hyperparameters::metric, added in the order of ranks (or the grid's).
  bool stop = false;        // Some rank asked to stop.
  // Where the step was skipped, with EngineOptions::find_non_finite: none if a sum of finite gradients was
  // too large.
  std::optional<NonFiniteGradient> non_finite;
};

// A collective takes the latency, and then its bytes (the slices of all ranks) at the bandwidth.
struct WireSpeed {
  double latency_seconds = 0;
  double bytes_per_second = 0;  // 0: not measured.
};

struct EngineStatistics {
  WireSpeed wire_speed;  // bucket_auto: measured by rank 0.
  PoolBytes peak;        // Live bytes, by pool.
  PoolBytes planned;
  std::uint64_t host_bytes = 0;  // Pinned memory of offloaded states.
  std::uint64_t planned_host_bytes = 0;
  std::string host_placement;    // One line: processors and node of host updates. Empty without offload.
  std::uint64_t file_bytes = 0;  // In the store.
  std::uint64_t planned_file_bytes = 0;
  std::uint64_t file_read_bytes = 0;  // So far, with the padding of ranges.
  std::uint64_t file_written_bytes = 0;
  std::string store_description;  // Tier kFile: engine, directories, block size and depth.
  std::uint64_t peak_reserved_bytes = 0;
  std::uint64_t planned_reserved_bytes = 0;
  WireBytes planned_wire_per_step;
  WireBytes traffic;  // Payload of all steps so far, without evaluations, saving, digests and the like.
  WireBytes evaluation_traffic;  // Payload of all evaluations so far: Plan::evaluation has each one's.
  std::uint64_t attempted_steps = 0;
  std::uint64_t applied_steps = 0;
  std::uint64_t gather_count = 0;  // Units gathered (stage 3).
};

// The states that spill() takes from the device. The two gathered units of stage 3 stay.
struct SpillOptions {
  bool parameters = true;
  bool gradients = true;  // There are none between steps; only their memory goes.
  bool optimizer = true;
  bool workspace = true;  // Buckets and the trainer's activations. Their contents are lost.
};

class Engine;

// m and v.
enum class Moment : std::uint8_t { kFirst, kSecond };

// How to write a gradient.
enum class GradientMode : std::uint8_t {
  kNone,   // The parameter is frozen: there is no gradient.
  kWrite,  // "=": the memory holds no value.
  kAdd,    // "+=": it holds the sum so far.
};
struct Gradient {
  DevicePtr data = nullptr;  // In the engine's dtype; null for kNone.
  GradientMode mode = GradientMode::kNone;

  // Requires: T is float for fp32, std::uint16_t for 2-byte types.
  template <typename T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(data);
  }
};

// A parameter's elements in the engine's dtype.
template <typename T>
struct ParameterView {
  const T* data = nullptr;
  std::uint64_t count = 0;
  Span<const std::uint64_t> shape;  // As declared (Engine::declare_shape), otherwise one dimension.
};

// The right to read a gathered unit, and in the backward pass to write its gradients. A lease ends with its
// scope, in stream order: compute queued on the stream before the end may use the addresses.
// Engine::abandon() ends all leases.
//
// A parameter is named by its ParameterId, a tied one by that of its owner, or by its index in the lease.
//
// A trainer that computes on the host may wait for its stream inside a lease and compute at once: the
// addresses hold until the lease ends. That costs the overlap of gathers and computation, and no bit changes.
//
// Threads: the thread that drives the engine.
// Errors:  kInvalidArgument, thrown, for a parameter that the unit does not use and for a lease that was
//          moved from. The engine goes on. The destructor does not throw; the engine's next call does.
class Lease {
 public:
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease();

  // The unit's `index`-th parameter, in the engine's dtype. Tied parameters follow the unit's own. The
  // address is the same for the engine's life. Requires: in the backward pass, a unit that was added with
  // backward_reads_parameters.
  DevicePtr parameter(int index) const;
  DevicePtr parameter(ParameterId id) const;
  // The same, with its dimensions. Requires: T is float for fp32, std::uint16_t for 2-byte types.
  template <typename T>
  ParameterView<T> view(ParameterId id) const {
    ParameterView<T> view;
    view.data = reinterpret_cast<const T*>(parameter_of_size(id, sizeof(T)));
    view.shape = shape(id, &view.count);
    return view;
  }

  // The address for the gradient of `index`, in the engine's dtype; null for a frozen parameter. If the
  // trainer does not ask for the gradient of a trainable parameter, that gradient is zero. One that it asks
  // for is used as it is, written or not; on a guarded host backend it is NaN until it is written.
  // Requires: the backward pass. `accumulate` is not null.
  // Order:    `*accumulate` says how to write: false "=", true "+=". Write before the lease ends.
  DevicePtr gradient(int index, bool* accumulate);
  Gradient gradient(ParameterId id);
  // The same for code that only adds: the memory is zeroed in the order of the lease's stream where it holds
  // no value. The mode is kAdd, or kNone.
  Gradient zeroed_gradient(ParameterId id);

  // Optional: says that this gradient is complete in stream order. The end of the lease completes all.
  // Requires: the backward pass.
  void grad_ready(int index);

 private:
  friend class Engine;
  Lease(Engine* engine, std::uint64_t number) : engine_(engine), number_(number) {}

  DevicePtr parameter_of_size(ParameterId id, std::size_t element_bytes) const;
  Span<const std::uint64_t> shape(ParameterId id, std::uint64_t* count) const;

  Engine* engine_ = nullptr;
  std::uint64_t number_ = 0;  // Counts the engine's leases.
};

class Engine {
 public:
  // Takes no device memory yet.
  // Requires: all three outlive the engine; `kernels` and `communicator` run on `backend`.
  Engine(Backend& backend, Kernels& kernels, Communicator& communicator, EngineOptions options);
  // Waits for all queued work, then gives everything back. Does not fail: the first error is logged.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- describe, before commit() ---

  // Adds the parameters that are gathered together, usually one transformer block. Units execute in the order
  // of these calls. `backward_reads_parameters`: false saves a gather, for example of an embedding.
  UnitId add_unit(const std::string& name, bool backward_reads_parameters = true);
  // `group`: index into Hyperparameters::groups. `frozen`: neither reduced nor updated. `replicated`: all
  // tensor-parallel ranks have it, with the same gradient (EngineOptions::grid). Give them the same values:
  // only data-parallel ranks, and pipeline stages that share a unit, are compared.
  // Requires: `name` is unique in the model; it is the name in saved state.
  ParameterId add_parameter(UnitId unit, const std::string& name, std::uint64_t count, int group = 0,
                            bool frozen = false, bool replicated = false);
  // The gradient of this parameter may never be asked for; it is zero then. Otherwise the first step in which
  // the unit has a backward lease refuses that.
  void declare_optional(ParameterId parameter);
  // Optimizer::kMuon updates this parameter by AdamW, though it has two dimensions: an embedding or a head.
  void declare_elementwise(ParameterId parameter);
  // Declares the dimensions of a parameter, which saved state keeps for its readers (saved_state.h).
  // Adafactor makes its factors from them, and Muon takes parameters of two dimensions for matrices.
  // Requires: their product is the parameter's count.
  void declare_shape(ParameterId parameter, Span<const std::uint64_t> shape);
  // Says that the parameter is one tensor-parallel rank's part of a larger tensor. Saved state then has the
  // whole tensor, and any other grid of ranks loads its own parts. Requires: the part has the parameter's
  // count; all ranks that have a part declare the same whole tensor.
  void declare_split(ParameterId parameter, const TensorSplit& split);
  // `unit` uses `parameter` of an earlier unit too. Returns its index in leases of `unit`. A lease of `unit`
  // counts for the owner too. Order: after the unit's own parameters.
  int tie(UnitId unit, ParameterId parameter);
  // The ranks of `stages` all have `unit`, with the same parameters and values: for example the embedding
  // that the first pipeline stage reads and the last one multiplies by. Its gradient is the sum of theirs,
  // added once a step in the order of these ranks, so the copies stay the same. The first of them counts it
  // in the norm. The unit and those before it stay on the device, and no rank may skip it.
  // Requires: EngineOptions::grid. `stages` joins one rank of each of these pipeline stages, all with the
  //           same data-parallel rank; nobody else uses it, and it outlives the engine.
  void share(UnitId unit, Communicator& stages);
  // Declares the bytes of activations(), so that the plan is whole.
  void declare_activations(std::uint64_t bytes);

  // The most bytes that declare_activations() may be given: the smallest room that any rank's budget leaves
  // beside the rest of the plan. Here bucket_auto counts as bucket_bytes, and offload_auto as the largest
  // possible offload.
  // Order:  after all units are added, before commit(). Collective.
  // Errors: those of make_plan().
  std::uint64_t activation_room();

  const ModelShape& model() const;
  // The bytes of every pool and wire. Before commit() it is made from the present description and options;
  // nothing is allocated. Errors: those of make_plan().
  Plan plan() const;
  // Compares the plan and EngineOptions::agreement over the ranks, checks the budget and allocates
  // everything. Parameters are zero afterwards.
  // Order:  once. Collective.
  // Errors: kOutOfMemory naming the largest pool and the options that change it; kInvalidArgument naming the
  //         difference and its ranks. All ranks throw.
  void commit();

  // --- values, between steps: full parameters in fp32 ---

  // Requires: `values` has the parameter's count, and every rank gives the same values; step() and saves
  // check this.
  void set_parameter(ParameterId parameter, Span<const float> values);
  // The same for the elements from `first` on. Requires: they are a part of the parameter. A part that
  // is given again is so on every rank, unless all of the parameter is.
  void set_parameter_part(ParameterId parameter, std::uint64_t first, Span<const float> values);
  // The same for values that were read in the engine's dtype and changed: an element whose value in that
  // dtype is that of its master keeps the master, and its moving average.
  void set_changed_part(ParameterId parameter, std::uint64_t first, Span<const float> values);
  // The fp32 master weights; a frozen parameter's value is widened. Order: collective.
  std::vector<float> get_parameter(ParameterId parameter);
  // AdamW's m or v of a parameter. Requires: it is not frozen by add_parameter(). Order: collective.
  std::vector<float> get_moment(ParameterId parameter, Moment moment);
  // The moving average of a parameter's weights (ShardingOptions::ema). Requires: as get_moment(). Order:
  // collective.
  std::vector<float> get_average(ParameterId parameter);
  // Exchanges the weights and their moving average, so that evaluations and get_parameter() are of the
  // average; the next call exchanges them again. Requires: ShardingOptions::ema, and a master in fp32, which
  // loses no bit. Order: collective, between steps; no step, no saving and no loading in between.
  void swap_average();
  // Freezes a parameter, or unfreezes it, from the next step on: its gradient is not asked for (its mode is
  // kNone) and zero, and its value, m, v and moving average stay. It keeps its place, and its zeros are
  // reduced: Plan counts a step in which nothing is frozen, which moves the most. A run that loads a state
  // freezes again. Requires: it is not frozen by add_parameter(); every rank makes the same calls, which
  // step() checks. Order: after commit(), between steps.
  void freeze(ParameterId parameter, bool frozen = true);
  // Sets all m and v, and Adafactor's factors, to zero, and applied_steps() too: the next step is the first
  // of another optimizer. The weights, their moving average and attempted_steps() stay. Requires: every rank
  // makes the call, which step() checks. Order: after commit(), between steps.
  void reset_moments();
  // Visits the masters of all parameters in order of registration, with one unit at a time in host memory.
  // Order: collective.
  void visit_parameters(const std::function<void(const ParameterShape&, Span<const float>)>& visitor);
  // XXH3-128 over the fp32 masters in order of registration, without padding, as 32 hex digits. Order:
  // collective.
  std::string digest();

  // The address of a parameter in the engine's dtype: that of Lease::parameter(), without a lease. It never
  // changes. At stage 3 there are values only while the unit is leased.
  // Order: after commit().
  DevicePtr address(ParameterId parameter) const;
  // The declared activation memory on this rank's device; null if none was declared.
  DevicePtr activations() const;

  // --- the step ---

  // Order:  after commit() or step(), while nothing is spilled.
  // Errors: the failure of a peer, a device or a store since the last step.
  void step_begin();
  // Begins the forward pass of a micro-step. In recorded order a step with forward passes needs a backward
  // pass of some unit in its first micro-step; a later micro-step without one adds zeros, and counts in the
  // average. Requires: micro-steps in order, each once; no lease is alive.
  void micro_step_begin(int index);
  // Leases the next unit in order of registration; in recorded order, any unit. Reads on `stream` wait for
  // its gather; the host does not wait.
  // Requires: strict order: no other lease is alive.
  // Errors:   recorded order: kOutOfMemory, if so many units are leased at once that the budget has no room
  //           for them.
  Lease forward(UnitId unit, Stream stream);
  // The same, last unit first, for the first micro-step that had its forward pass and not its backward pass;
  // in recorded order, any unit, for the present micro-step.
  // Requires: strict order: this rank did not skip the unit in that micro-step. Recorded order: the unit's
  //           gradient is not complete in this micro-step.
  Lease backward(UnitId unit, Stream stream);
  // In place of forward(): this rank does not use `unit` in this micro-step and contributes zeros. A unit
  // that all ranks skip in every micro-step keeps its weights, m and v. In recorded order it has no effect: a
  // unit without a backward pass on any rank keeps them.
  // Requires: a unit that is not shared.
  void skip(UnitId unit);
  // Opens a forward pass without gradients: forward() leases units until evaluation_end(). It changes no bit
  // of the training after it. In strict order it goes over units in order of registration and may stop early,
  // on all ranks alike. A rank that calls abandon() runs no evaluation within that step.
  // Order: between steps; in recorded order also in a step after a micro-step's backward pass, which this
  //        call ends. No lease is alive at either call. Collective.
  void evaluation_begin();
  void evaluation_end();
  // The norm that step() finds: global, without the loss scale, before clipping and gradient_factor. It is
  // not finite if a gradient is not. step() takes it over. Order: after the last backward pass, before
  // step(). Collective. Waits for the gradients.
  double gradient_norm();
  // The trainer multiplies its loss by this: 1 except for fp16.
  double loss_scale() const;
  // Decides about the step and queues the update; see "Streams" above.
  // Order:  after the last backward pass. Collective.
  // Errors: kInvalidArgument for hyperparameters that are missing, not finite or differ between ranks, and in
  //         the first step for gradients that were never asked for (declare_optional); the failure of a peer,
  //         a device or a store. committed_step() says whether the step was decided.
  StepResult step(const Hyperparameters& hyperparameters);
  // Gives up the step, for example after an exception in the trainer. All leases end. Weights, m, v, the
  // numbers of steps and the loss scale stay, here and on all ranks: their step() returns `abandoned`, and so
  // does nothing else. Then training goes on with step_begin(). Recorded order only.
  // Order:  in a step. Other ranks run their step, of `micro_steps` micro-steps in all (0:
  //         EngineOptions::micro_steps), without evaluations within it, or call abandon() too. Before an
  //         order has been recorded or given, all ranks call it, after the same leases in the step.
  //         Evaluations before the step do not count. The others follow the recorded order. Collective.
  // Errors: kInvalidArgument where ranks differ before an order has been recorded or given, at the latest
  //         after a deadline, with the operations and their ranks: a rank alone does not know the
  //         collectives that the others run. The engine is failed then.
  void abandon(int micro_steps = 0);
  // The order in which the last steps and evaluations used units, for ShardingOptions::recorded_order. It is
  // the same text on every rank. Empty in strict order, and before a step has ended.
  std::string recorded_order() const;

  // --- on demand, between steps ---

  // Gives the physical memory of these states back to the device until fetch(). Pinned host memory keeps
  // parameters and optimizer states meanwhile. Addresses stay. Waits for all work of the engine and of
  // leases.
  // Requires: EngineOptions::spillable.
  // Errors:   kOutOfMemory if the host has no room; then nothing is lost.
  void spill(const SpillOptions& states = {});
  // Takes back all spilled states. Until then steps and values are refused.
  // Errors: kOutOfMemory if the device has too little room. The rest stays spilled; call fetch() again.
  void fetch();

  // --- training state, between steps ---
  // In recorded order a state is saved in a step, too, after a micro-step's backward pass, which the call
  // ends: it is that of the step before, without the gradients that wait. A rank that calls abandon() saves
  // nothing within that step.

  // Keeps other jobs from saving in `directory` until the engine is destroyed or the process ends. Call it
  // before training, so that a mistake costs no training. save_state() does the same while it saves.
  // Order:  after commit(). Collective.
  // Errors: kUnavailable naming the process that holds it; kIoError; kInvalidArgument where another tool
  //         wrote the file `latest` there, and where another engine of this process saved its state there
  //         or loaded it, and this one did not.
  void lock_state(const std::string& directory);
  // Saves master, m, v, steps and loss scale under `directory`, with `trainer_state`, which is opaque: for
  // example the data cursor. A state is written to a temporary name, synced, checksummed and renamed: a kill
  // at any moment leaves the last saved state whole. The directory keeps this state and the newest ones of
  // earlier steps, `keep` in all. With EngineOptions::grid all ranks that give the same directory save one
  // state of the whole model, with rank 0's `trainer_state`; parts of the grid that give directories of their
  // own save their parts alone.
  // Order: collective.
  // Errors: on all ranks; the engine goes on: kIoError; kInvalidArgument where another tool wrote the file
  //         `latest` there, where that names the state of a model with other parameters, where another engine
  //         of this process saved its state there or loaded it, and this one did not, and where the ranks
  //         were given different values or froze other parameters: load a state then.
  void save_state(const std::string& directory, const std::string& trainer_state, int keep = 1);
  // The same, while training goes on. This call queues copies to pinned host memory and returns; a thread
  // writes them, and gives the state its name when the files of all ranks are there. The thread itself copies
  // values that the host can read. The next update waits for all copies. A save that was begun earlier is
  // ended first; its error is thrown, and then nothing is begun. The engine's end waits for the thread, and
  // on rank 0 for the files of the other ranks, until no rank has written for 10 s: then the state is lost,
  // and a warning says so. save_state_end() would throw an error. Requires: EngineOptions::save_async.
  // `directory` is one that all ranks see. Order: collective.
  void save_state_begin(const std::string& directory, const std::string& trainer_state, int keep = 1);
  // Waits until the state that was begun has its name. Without one it has no effect. save_state() and
  // load_state() do the same first.
  // Order: collective.
  // Errors: kIoError, on all ranks: the state was not saved. The engine goes on.
  void save_state_end();
  // Loads the latest whole state, or that of attempted step `step`, at any number of ranks, ZeRO stage, dtype
  // and grid; returns trainer_state. Each rank reads its own part. The masters are those that were saved, bit
  // for bit. A moment that was not saved, because the parameter was frozen or the state has weights alone, is
  // zero.
  // Order: collective.
  // Errors: kIoError (none there), kCorruption (truncated or changed), kInvalidArgument (another model). The
  //         values are undefined then.
  std::string load_state(const std::string& directory, std::optional<std::uint64_t> step = {});

  // Waits for the engine's queued work, so that the traffic of complete steps is complete.
  EngineStatistics statistics();
  // Bytes moved so far, in steps and outside of them, by kind of operation and by rank. Traffic over the grid
  // and over pipeline stages that share a unit is left out.
  std::vector<OperationTraffic> operation_traffic() const;
  const EngineOptions& options() const;
  // Steps so far; applied_steps() leaves out the skipped ones.
  std::uint64_t attempted_steps() const;
  std::uint64_t applied_steps() const;
  // How far the calls of a pass have come, for a caller that an exception may have kept from noting it: 1
  // from step_begin() to step() or abandon(), and the micro-steps begun in between; 1 from evaluation_begin()
  // to evaluation_end(); the leases that are alive. 0 else.
  std::uint64_t open_steps() const;
  std::uint64_t begun_micro_steps() const;
  std::uint64_t open_evaluations() const;
  std::uint64_t open_leases() const;

  // --- after a failure too ---

  // The last step that was decided, with the skipped ones. After a failure it is the same on every surviving
  // rank, and the masters are those after that step.
  std::uint64_t committed_step() const;
  // XXH3-128 over the masters that this rank keeps, in order, with padding, as 32 hex digits. Waits for
  // queued updates. Order: after commit(); not collective.
  std::string shard_digest();

 private:
  friend class Lease;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay
