// The facts that the parts of a step share: the ranks, the model and its plan, where everything lies, and the
// queue of collectives.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "forebay/adafactor.h"
#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/pinned_pool.h"
#include "forebay/staging_buffers.h"
#include "forebay/store_pass.h"
#include "runtime/engine/engine_hooks.h"
#include "runtime/engine/host_placement.h"
#include "runtime/engine/marked_span.h"
#include "runtime/engine/plan/schedule.h"
#include "runtime/engine/plan/step_control.h"
#include "runtime/engine/step/given_values.h"
#include "runtime/engine/step/handles.h"
#include "runtime/engine/step/slot_table.h"

namespace forebay {

// Bytes that pass between the store and values at once, at most.
inline constexpr std::uint64_t kStorePieceBytes = 4u << 20;
// A drive that does not answer for this long is lost.
inline constexpr std::chrono::minutes kStoreDeadline{10};
// The context of a failure of the host's memory or of the drive.
inline constexpr const char* kStatesFailed = "the offloaded states failed";

// Offloaded bytes: in pinned host memory, or in a range of the store.
struct OffloadedRange {
  std::byte* host = nullptr;  // Null: in the store.
  StoreRange range;
  std::uint64_t range_bytes = 0;
};

// Values that are copied to host memory between two updates.
struct StateCopy {
  std::byte* target = nullptr;        // Pinned.
  const std::byte* device = nullptr;  // Null: they lie in `range`.
  OffloadedRange range;
  std::uint64_t offset = 0;  // Bytes from `device`, or from the start of the range.
  std::uint64_t bytes = 0;
  bool is_leased = false;  // The trainer has the address, as of fp32 weights at stages 0 to 2, and may write.
};

// Where elements of a state that is kept in pieces lie, in bytes from the start of the state.
struct KeptPlace {
  std::uint64_t values = 0;     // The first of them.
  std::uint64_t exponents = 0;  // Its exponent, in MomentFormat::kBlock8.
};
// The place of element `begin` of the `total` elements of a piece.
inline KeptPlace kept_place(MomentFormat format, std::uint64_t total, std::uint64_t begin) {
  return {moment_bytes(format, begin), moment_bytes(format, total) + begin / kMomentBlockCount};
}

struct StepContext {
  enum class Phase { kDescribe, kIdle, kStep, kForward, kBackward, kFailed };

  // Muon: a matrix of a unit, which one rank orthogonalises.
  struct Matrix {
    std::size_t parameter = 0;  // In the unit.
    std::uint64_t begin = 0;    // Elements from the start of the trainable section.
    std::uint64_t rows = 0;
    std::uint64_t columns = 0;
    int owner = 0;
    std::uint64_t count() const { return rows * columns; }
  };

  // Muon: elements of the updated range that have a v. These lie one after another.
  struct OwnV {
    std::size_t parameter = 0;  // In the unit.
    std::uint64_t begin = 0;    // Elements from the start of the updated range.
    std::uint64_t count = 0;
    std::uint64_t at = 0;  // Elements from the start of v.
  };

  // A run of elements of a unit's updated range that share a parameter group. Without master weights, and
  // with Adafactor and Muon, each parameter has runs of its own.
  struct Segment {
    std::uint64_t begin = 0;  // Elements from the start of the updated range.
    std::uint64_t count = 0;
    int group = 0;
    HalfMaster rounding;             // Without master weights: its elements are set for each update.
    std::size_t parameter = 0;       // Adafactor and Muon: in the unit.
    const Matrix* matrix = nullptr;  // Muon; null for single elements.
    std::uint64_t v_at = 0;          // Muon: the v of its first element.
  };

  // Adafactor: a trainable parameter of a unit.
  struct Factored {
    std::size_t parameter = 0;  // In the unit.
    FactoredShape shape;
    std::uint64_t begin = 0;       // Elements from the start of the trainable section.
    std::uint64_t factors_at = 0;  // Elements from the start of the unit's factors.
    // On the device: the factor of u and then the means of the new row factors, by matrix. Elements from the
    // start of factor_scalars.
    std::uint64_t scalars_at = 0;
    // Offloaded: the same means, and the sum of squares of this rank's masters. A unit on the device has
    // these there.
    std::vector<float> row_means = {};
    double squares = 0.0;
  };

  // Where a unit lies on this rank. The updated range is the part of the trainable section that this rank
  // updates: all of it at stage 0, its slice at the other stages.
  struct Unit {
    DevicePtr parameters =
        nullptr;  // The whole unit: persistent below stage 3, an alias of a slot at stage 3.
    DevicePtr parameter_shard = nullptr;  // Stage 3: trainable slice, then frozen slice.
    DevicePtr gradients = nullptr;  // The whole trainable section: persistent, or an alias from stage 2.
    // The addresses that leases give out: those above, or with an access guard aliases of their own, because
    // the engine's work goes on while they are closed.
    DevicePtr leased_parameters = nullptr;
    DevicePtr leased_gradients = nullptr;
    DevicePtr gradient_shard = nullptr;  // This rank's reduced gradient g, in gradient_type.
    DataType gradient_type = DataType::kFloat32;
    float* accumulator = nullptr;            // K > 1 with shard: the fp32 sum over micro-steps.
    DevicePtr updated_parameters = nullptr;  // The updated range in the engine's dtype.
    DevicePtr updated_gradients = nullptr;   // The updated range of g, in gradient_type.
    bool offloaded = false;                  // The optimizer states are offloaded.
    bool parameters_offloaded = false;       // The parameter shard is offloaded too.
    // The states of the updated range, by StateField, as they are kept: in device memory or on the host. Null
    // on the file tier, and for a state that the optimizer does not have.
    std::array<std::byte*, kStateFieldCount> kept{};
    // Offloaded: the updated range of g on the host. Where parameters stay on the device, the update writes
    // 2-byte parameters over it.
    std::byte* host_gradients = nullptr;
    std::array<OffloadedRange, kStateFieldCount> states;  // File tier.
    OffloadedRange trainable_slice;                       // In fp32 it is the master.
    OffloadedRange frozen_slice;
    std::size_t first_part = 0;  // File tier: index in pass_parts.
    std::size_t part_count = 0;
    std::uint64_t updated_begin = 0;  // Elements from the start of the trainable section.
    std::uint64_t updated_count = 0;
    std::vector<Segment> segments;  // In order, without the parameters that are fixed.
    // Adafactor. An offloaded unit has its factors on the host, and its sums on both sides.
    std::vector<Factored> factored;
    std::vector<std::size_t> factored_index;  // By parameter.
    float* factors = nullptr;
    float* factor_sums = nullptr;
    float* host_factor_sums = nullptr;
    // Muon. The updates of matrices: see Role::kOrthogonal.
    std::vector<Matrix> matrices;
    std::vector<OwnV> own_v;
    float* orthogonal = nullptr;
    std::uint64_t squares_at = 0;    // Doubles from the start of a rank's squares.
    std::uint64_t scalars_at = 0;    // Elements from the start of factor_scalars.
    bool squares_known = false;      // The sums of squares of masters are up to date.
    std::vector<bool> fixed;         // By parameter: Engine::freeze.
    Communicator* stages = nullptr;  // The pipeline stages that share the unit; null: no others do.
    // {begin, count} of runs of this rank's part of the norm that another rank counts.
    std::vector<std::pair<std::uint64_t, std::uint64_t>> uncounted;
    std::vector<std::pair<std::uint64_t, std::uint64_t>>
        gaps;              // {offset, count} of padding: trainable section.
    EngineEvent released;  // The trainer's last use of the unit's parameters and gradients.
    EngineEvent updated;   // The last update's parameters are where gathers and trainers look.
    // The current step.
    std::vector<bool> contributed;  // By parameter: its gradient buffer holds a contribution.
    std::vector<bool> asked;        // By parameter: the trainer asked for its gradient.
    bool leased_backward = false;
    std::vector<bool> skipped;  // By micro-step in flight: this rank skipped the unit.
    bool used = false;          // This rank used the unit in some micro-step.
    // Recorded order. Leases of a unit count for the owners of its tied parameters too.
    int readers = 0;    // Leases alive that read its parameters.
    int forwards = 0;   // Leases in this micro-step, the backward ones that ended,
    int backwards = 0;  // and those alive.
    int open_backwards = 0;
    bool reduced = false;  // In this micro-step.
    Stream released_on;    // The stream that `released` was recorded on last.
  };

  StepContext(Backend& backend, Kernels& kernels, Communicator& communicator, EngineOptions options);

  // Throws, and leaves a committed engine failed, unless `status` is ok.
  void must(const Status& status);
  // The same failure, with the usual cause of ranks that differ in recorded order.
  Status hint_at_order(const Status& status) const;
  // A hash of the values and calls that pipeline stages with the same shared units have in common.
  std::uint64_t shared_fingerprint() const { return given_values.shared() ^ shared_calls_fingerprint; }
  // Giving back does not fail: keeps the first error for the log.
  void note(const Status& status);
  // One value of each rank. Collective. Errors: thrown, the engine is failed.
  template <typename Value>
  std::vector<Value> exchange(Communicator& ranks_in, const Value& mine) {
    std::vector<Value> all(static_cast<std::size_t>(ranks_in.size()));
    must(ranks_in.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
    return all;
  }
  // Reads bytes of an offloaded range. Requires: nothing that is queued changes them.
  Status read_offloaded(const OffloadedRange& range, std::uint64_t offset, void* target, std::uint64_t bytes);
  // Queues the gather of a section from all shards' slices. Errors: the Communicator's.
  Status all_gather_section(DevicePtr base, const std::byte* own_slice, std::uint64_t slice_bytes);
  // Marks the work queued on `stream` during the result's life as one span of the timeline.
  MarkedSpan marked(Stream stream, const char* track, const char* name, int unit_index) const {
    return {backend, options.timeline, stream, track,
            options.timeline == nullptr ? std::string() : name + (" " + shape(unit_index).name)};
  }

  int rank() const { return communicator.rank(); }
  int ranks() const { return communicator.size(); }
  // The slices of every unit, and the one that this rank keeps; every replica has the same.
  int shards() const { return options.shard_within_group ? options.group : ranks(); }
  int shard() const { return rank() % shards(); }
  int replicas() const { return ranks() / shards(); }
  int replica() const { return rank() / shards(); }
  // Each slice is cut into as many parts as there are replicas, so there are as many parts as ranks. This is
  // the number of this rank's part. The norm adds parts in this order; saved state is written in parts.
  int part_number() const { return shard() * replicas() + replica(); }
  // The ranks that share slices; all ranks of the model; the ranks that decide about a step.
  Communicator& sharded() const { return grouped != nullptr ? *grouped : communicator; }
  Communicator& everyone() const { return options.grid != nullptr ? *options.grid : communicator; }
  Communicator& deciders() const { return deciding != nullptr ? *deciding : communicator; }

  // The backend is a model: host memory of offloaded states is not touched, and every step is applied.
  bool counts_only() const { return backend.capabilities().kind == BackendKind::kModel; }
  // The options of pinned memory: one slab for each request.
  PinnedPoolOptions pinned_options() const { return {.slab_bytes = 1, .addresses_only = counts_only()}; }
  bool recorded() const { return options.order_of_units == OrderOfUnits::kRecorded; }
  std::uint64_t element() const { return element_bytes(options.dtype); }
  std::vector<StateField> state_fields() const { return states_of(options); }
  MomentFormat format_of(StateField field) const { return state_format(options, field); }
  // Whether states have the fp32 kernels' form.
  bool states_are_fp32() const {
    return options.moments == MomentFormat::kFloat32 && options.ema == 0.0 &&
           format_of(StateField::kMaster) == MomentFormat::kFloat32;
  }
  int unit_count() const { return static_cast<int>(model.units.size()); }
  Unit& unit(int index) { return units[static_cast<std::size_t>(index)]; }
  const UnitLayout& layout(int index) const { return plan.layouts[static_cast<std::size_t>(index)]; }
  const UnitShape& shape(int index) const { return model.units[static_cast<std::size_t>(index)]; }
  std::uint64_t frozen_slice(int index) const { return layout(index).frozen_slice(shards()); }
  // Doubles that each rank sends for a decision: of the deciding rank with the most units.
  std::uint64_t norm_count() const { return plan.deciding_units(); }

  // Constant after construction.
  Backend& backend;
  Kernels& kernels;
  Communicator& communicator;  // The data-parallel ranks.
  EngineOptions options;
  internal::EngineHooks hooks;
  Status closing;  // The first error of giving back.

  // Constant after commit.
  ModelShape model;
  Plan plan;
  std::unique_ptr<Communicator> grouped;   // Null without all-reduce groups.
  std::unique_ptr<Communicator> deciding;  // Null: `communicator` decides.
  std::uint64_t deciding_units = 0;        // The most units of a rank of the grid.
  HostPlacement host_placement;            // Chosen where something is offloaded.
  std::unique_ptr<PinnedPool> pinned;
  std::unique_ptr<Store> store;  // File tier.
  std::unique_ptr<StagingBuffers> pass_buffers;
  std::unique_ptr<StagingBuffers> mover_buffers;
  std::unique_ptr<SlotTable> slots;  // The parts that wait for slots end before it.
  std::vector<Unit> units;
  int group_count = 0;                    // Parameter groups in use.
  std::vector<StorePassPart> pass_parts;  // File tier: unit by unit.
  // Device memory of the step.
  std::byte* staging = nullptr;                        // One received bucket; the norms of all ranks.
  std::array<float*, kBucketsInFlight> bucket_sums{};  // fp32 sums of buckets, or scratch of a norm.
  std::byte* fused = nullptr;  // Slices of small units side by side, a row for each rank.
  double* norms = nullptr;     // One per unit, of this rank's part; zeros after the last.
  StepControl* control = nullptr;
  double* squares = nullptr;                         // Adafactor: of this rank, then of all ranks,
  double* host_squares = nullptr;                    // and the same on the host for offloaded units;
  float* factor_scalars = nullptr;                   // see Role::kFactorScalars,
  double* factor_leaves = nullptr;                   // and Role::kFactorLeaves.
  std::array<float*, kMatricesInFlight> matrices{};  // Muon: see Role::kMatrices,
  float* matrix_work = nullptr;                      // and Role::kMatrixWork.
  std::array<DevicePtr, kTransitCount> transit{};    // Gradient slices or sums on their way to the host.
  float* host_sum = nullptr;                         // On the host: the sum of one bucket.
  std::byte* saved_values = nullptr;                 // On the host: the copy that a thread saves.
  // The engine's own work. The order of this queue is the order of collectives.
  EngineStream engine_stream{*this};

  // The state of training.
  Phase phase = Phase::kDescribe;
  Status failure;  // Why the engine is failed.
  std::uint64_t attempted_steps = 0;
  std::uint64_t applied_steps = 0;
  double loss_scale = 1.0;
  int growth_counter = 0;  // Applied steps since the scale last changed.
  GivenValues given_values;
  // Hash of all calls of freeze() and reset_moments(), in order.
  std::uint64_t calls_fingerprint = 0;
  std::uint64_t shared_calls_fingerprint = 0;  // The same of shared units alone.
  std::vector<SharingRank> sharing_ranks;      // By rank of deciders().
  // Recorded order, in the current step: this rank had an evaluation, or is in abandon().
  bool evaluated_in_step = false;
  bool gives_up = false;
};

// A part of the step: the context, with short names for its most used members.
class StepPart {
 protected:
  using Unit = StepContext::Unit;

  explicit StepPart(StepContext& context)
      : context_(context),
        backend_(context.backend),
        kernels_(context.kernels),
        options_(context.options),
        plan_(context.plan),
        engine_stream_(context.engine_stream) {}

  void must(const Status& status) const { context_.must(status); }
  Unit& unit(int index) const { return context_.unit(index); }
  const UnitLayout& layout(int index) const { return context_.layout(index); }
  std::uint64_t element() const { return context_.element(); }
  std::uint64_t trainable_slice(int index) const { return plan_.slice_count(index); }

  StepContext& context_;
  Backend& backend_;
  Kernels& kernels_;
  const EngineOptions& options_;
  const Plan& plan_;
  const EngineStream& engine_stream_;
};

}  // namespace forebay
