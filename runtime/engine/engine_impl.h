// The inside of Engine: what commit() places where, and the state of the step.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "forebay/block_runner.h"
#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/file_store.h"
#include "forebay/mover.h"
#include "forebay/pinned_pool.h"
#include "forebay/store_pass.h"
#include "runtime/engine/engine_hooks.h"
#include "runtime/engine/marked_span.h"
#include "runtime/engine/plan/schedule.h"
#include "runtime/engine/plan/step_control.h"

namespace forebay {

// `count` values rounded to `type`, a 2-byte one.
void round_parameters(DataType type, const float* source, std::uint64_t count, std::byte* target);

// Optimizer states, in the order of the store's ranges and of saved state.
enum class StateField : int { kMaster, kM, kV };
inline constexpr int kStateFieldCount = 3;

struct Engine::Impl {
  // One run of elements of a unit's updated range that share a parameter group.
  struct Segment {
    std::uint64_t begin = 0;  // Elements from the start of the updated range.
    std::uint64_t count = 0;
    int group = 0;
  };

  // Bytes that live below the device: in page-locked host memory, or in a range of the store.
  struct Away {
    std::byte* host = nullptr;  // Null: in the range.
    StoreRange range;
    std::uint64_t range_bytes = 0;
  };

  // The sum of one bucket that is added up on the host, and where.
  struct HostSum {
    Impl* impl = nullptr;
    float* target = nullptr;
    std::uint64_t count = 0;
  };
  // All micro-steps of a unit have been added up.
  struct HostAverage {
    Impl* impl = nullptr;
    int unit = 0;
  };

  // Where a unit lies on this rank. "Updated range": the part of the trainable section whose master this rank
  // keeps: all of it at stage 0, slice `rank` otherwise.
  struct Unit {
    DevicePtr parameters =
        nullptr;  // The whole unit: persistent below stage 3, an alias of a slot at stage 3.
    DevicePtr parameter_shard = nullptr;  // Stage 3: trainable slice, then frozen slice.
    DevicePtr gradients = nullptr;       // The whole trainable section: persistent, or an alias from stage 2.
    DevicePtr gradient_shard = nullptr;  // Where this rank's reduced gradient g is, in gradient_type.
    DataType gradient_type = DataType::kFloat32;
    float* accumulator = nullptr;            // K > 1 with shard: the fp32 sum over micro-steps.
    DevicePtr updated_parameters = nullptr;  // The updated range in the engine's dtype.
    DevicePtr updated_gradients = nullptr;   // The updated range of g, in gradient_type.
    // Whether the optimizer is offloaded, and the parameter shard too.
    bool away = false;
    bool parameters_away = false;
    // In device memory, or on the host; null on the file tier.
    float* master = nullptr;
    float* m = nullptr;
    float* v = nullptr;
    // Offloaded: the updated range of g on the host. Where parameters stay on the device, a 2-byte one takes
    // its place in the update.
    std::byte* host_gradients = nullptr;
    std::array<Away, kStateFieldCount> states;  // File tier.
    // The parameter shard: trainable slice (in fp32 the master) and frozen slice.
    Away trainable_away;
    Away frozen_away;
    std::vector<HostSum> host_sums;  // By bucket, where micro-steps add up on the host.
    HostAverage host_average;
    std::size_t first_part = 0;  // File tier: of pass_parts.
    std::size_t part_count = 0;
    Event left;       // Offloaded: the updated range of g has been copied down.
    Event host_done;  // Offloaded: the host has updated it.
    Event updated;    // Offloaded: the parameters after the last update are where gathers and trainers look.
    std::uint64_t updated_begin = 0;  // Elements from the start of the trainable section.
    std::uint64_t updated_count = 0;
    std::vector<Segment> segments;
    Communicator* stages = nullptr;  // Those that share it; null where there are no others.
    // Runs of this rank's part of the norm, which begins at norm_begin of the gradient shard, that another
    // rank counts.
    std::vector<std::pair<std::uint64_t, std::uint64_t>> uncounted;
    std::vector<std::pair<std::uint64_t, std::uint64_t>>
        gaps;                // {offset, count} of padding in the trainable section.
    Event released;          // The trainer's last use of the unit's parameters and gradients.
    Event parameters_ready;  // Below stage 3: the parameters after the last update.
    // Of the current step.
    std::vector<bool> contributed;  // By parameter: its gradient buffer holds a contribution.
    std::vector<bool> skipped;      // By micro-step in flight: by this rank.
    bool used = false;              // In any micro-step of the current step, by this rank.
  };

  // What the host's update of one unit is given. Two sets, because a step may be queued while the updates of
  // the one before still run; those of the one before that have ended.
  struct HostUpdate {
    Impl* impl = nullptr;
    int unit = 0;
    std::vector<GroupHyperparameters> groups;
  };
  // File tier: the parts of a step's pass. Two, as above.
  struct HostPass {
    Impl* impl = nullptr;
    std::vector<const StorePassPart*> parts;
  };

  // Marks what is queued on `stream` while it is alive as one span of the timeline, if there is one.
  MarkedSpan marked(Stream stream, const char* track, const char* what, int unit) const {
    return {backend, options.timeline, stream, track,
            options.timeline == nullptr ? std::string() : what + (" " + shape(unit).name)};
  }

  enum class Phase { kDescribe, kIdle, kStep, kForward, kBackward, kFailed };

  Impl(Backend& backend, Kernels& kernels, Communicator& communicator, EngineOptions options);
  ~Impl();

  // What a collective call outside of steps sends is not the steps' traffic: alive around each such call.
  class OtherTraffic {
   public:
    explicit OtherTraffic(Impl& impl);
    ~OtherTraffic();

   private:
    Impl& impl_;
    Traffic before_;
  };

  // --- description and commit (commit.cc) ---
  PlanOptions plan_options() const;
  // offload_auto (measured_options.cc). Collective.
  struct UpdateTimes {
    double device = 0;  // Seconds for one element.
    double offloaded = 0;
  };
  // bucket_auto (step/bucket.cc). Collective.
  struct BucketProbe;
  std::uint64_t choose_bucket_bytes();
  std::uint64_t least_over_grid(std::uint64_t mine);
  // By the trainer's clock, if it gave one.
  std::chrono::nanoseconds now() const {
    return hooks.now ? hooks.now()
                     : std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch());
  }
  int choose_device_units(const Plan& all_offloaded);
  UpdateTimes measure_update(std::uint64_t count);
  void commit();
  // Every rank gives its own verdict; when one is not ok, all throw the lowest such rank's.
  // The engine is not failed by that: nothing it holds has changed.
  void agree(const Status& mine);
  void agree_on_options();
  void agree_on_shared_units();
  void together(const std::function<void()>& what);
  void connect();
  Status check_options() const;
  std::uint64_t device_budget() const;
  std::uint64_t activation_room();
  Status check_budget() const;
  // (memory.cc)
  void allocate();
  void create_arena();
  void take_pool(Pool pool);
  void prepare_offload();
  void open_store();
  void open_mover();
  void place_units();
  void describe_unit(int unit);
  void note_segments(int unit);
  void note_uncounted(int unit);
  void place(const Placement& placement);
  void place_of_unit(const Placement& placement, std::byte* address);
  void place_state(const Placement& placement, std::byte* address);
  Away place_away(const Placement& placement, std::byte* address);
  void complete_unit(int unit);
  void complete_offloaded_unit(int unit);
  DevicePtr alias_of(int slot, std::uint64_t bytes);
  void make_parts(Unit& unit);
  void make_host_record();

  // --- the step (step/step.cc) ---
  void gather(int unit);
  void require(int unit);
  void wait_for_parameters(int unit, Stream stream);
  void prefetch(int unit);
  void begin_backward_of(int unit);
  void pass_skipped(int unit);
  bool forward_is_next() const {
    return forebay::forward_is_next(options.micro_steps, options.forwards_ahead, forward_count, micro_step);
  }
  std::size_t place_in_flight(int index) const {
    return static_cast<std::size_t>(index % (options.forwards_ahead + 1));
  }
  // Whether this rank skipped units [0, end) in the micro-step whose backward pass is next, or under way.
  bool skipped(int end) const;
  void begin_backward();
  void finish_backward();
  void finish_pass();
  // (step/reduce.cc)
  void reduce(int unit);
  void reduce_alone(int unit);
  void fuse(int unit);
  void reduce_fused();
  void average_accumulator(int unit);
  void finish_reduction(int unit);
  void add_over_stages(int unit);
  void average_after_reduction();
  std::size_t next_bucket();
  float average_factor() const;
  void complete_gradients(int unit, Stream stream);
  void all_gather_section(DevicePtr base, const std::byte* own_slice, std::uint64_t slice_bytes);
  void queue_norm(int unit);
  std::vector<bool> agree_on_step(const Hyperparameters& hyperparameters, StepResult& result);
  void agree_over_grid(const Hyperparameters& hyperparameters, StepResult& result);
  void queue_decision(double clip);
  void settle_decision();
  void queue_update(const Hyperparameters& hyperparameters, const std::vector<bool>& used);
  void gather_updated(const Unit& u);
  void spill_gradients(int unit);
  void reduce_on_host(int unit);
  void average_on_host(int unit);
  void queue_host_update(int unit, const Hyperparameters& hyperparameters);
  void update_on_host(const HostUpdate& update);
  void update_in_files(const HostUpdate& update);
  void update_part(const HostUpdate& update, std::uint64_t begin, std::uint64_t count, float* master,
                   float* m, float* v, std::byte* parameters);
  void fetch_parameters(int unit, int slot);
  AdamWArguments adamw_arguments() const;
  StepResult step(const Hyperparameters& hyperparameters);
  void end_lease(int unit, Stream stream, bool backward) noexcept;

  // --- on demand (state/values.cc) ---
  void spill(const SpillOptions& states);
  void fetch();

  // --- values and state (state/values.cc, training_state.cc) ---
  void copy_in(DevicePtr target, const void* source, std::uint64_t bytes);
  void copy_out(void* target, const std::byte* source, std::uint64_t bytes);
  // Between host memory and what is away, at any byte. Waits; begins with everything queued before done.
  void write_away(const Away& away, std::uint64_t offset, const void* source, std::uint64_t bytes);
  void read_away(const Away& away, std::uint64_t offset, void* target, std::uint64_t bytes);
  // `count` elements of the updated range of a state, from `begin` on.
  void write_state(int unit, StateField field, std::uint64_t begin, std::span<const float> values);
  void read_state(int unit, StateField field, std::uint64_t begin, std::span<float> values);
  // Of this rank's slice of the parameters at stage 3; `offset` in bytes.
  void write_slice(int unit, bool frozen, std::uint64_t offset, std::span<const std::byte> bytes);
  void read_slice(int unit, bool frozen, std::uint64_t offset, std::span<std::byte> bytes);
  // Every queued update has run, wherever, and no failure of the tier is hidden any more.
  void settle_updates();
  // All ranks' slices of `bytes` each, in rank order.
  std::vector<std::byte> all_slices(
      std::uint64_t bytes, const std::function<void(std::uint64_t offset, std::span<std::byte> piece)>& mine);
  void set_parameter(ParameterId parameter, std::span<const float> values);
  std::vector<float> unit_masters(int unit);
  std::vector<float> unit_frozen(int unit);
  void publish_parameters();
  void save_state(const std::string& directory, const std::string& trainer_state);
  void agree_on_save(const Status& mine, const std::string& temporary);
  std::string load_state(const std::string& directory);

  // The parameter that `index` of a lease of `unit` names: its own in order, then the tied ones.
  ParameterId resolve(int unit, int index);
  void check_parameter(ParameterId id, const char* call);
  void expect(Phase wanted, const char* call);
  [[noreturn]] void misuse(const std::string& message);
  // Throws, and leaves the engine failed, unless `status` is ok.
  void must(const Status& status);
  void check_peers() {
    must(communicator.status());
    if (tier_failed.load(std::memory_order_acquire)) must(tier_status());
  }
  // What the host's updates and the mover met. Any thread.
  void fail_tier(const Status& status);
  Status tier_status() const;

  int rank() const { return communicator.rank(); }
  int ranks() const { return communicator.size(); }
  // The slices of every unit, and the one that this rank keeps; every replica has the same.
  int shards() const { return options.shard_within_group ? options.group : ranks(); }
  int shard() const { return rank() % shards(); }
  int replicas() const { return ranks() / shards(); }
  int replica() const { return rank() / shards(); }
  // Each slice is cut into as many parts as there are replicas, so there are as many as ranks, and this is
  // the number of this rank's. The norm adds them in this order; saved state is written in these parts.
  int part_number() const { return shard() * replicas() + replica(); }
  // The communicator of the slices; of what all ranks agree on; and of those that decide about a step.
  Communicator& sharded() const { return grouped != nullptr ? *grouped : communicator; }
  Communicator& everyone() const { return options.grid != nullptr ? *options.grid : communicator; }
  Communicator& deciders() const { return deciding != nullptr ? *deciding : communicator; }
  // Of all communicators that are the engine's.
  Traffic traffic() const;
  std::uint64_t element() const { return element_bytes(options.dtype); }
  int unit_count() const { return static_cast<int>(model.units.size()); }
  Unit& unit(int index) { return units[static_cast<std::size_t>(index)]; }
  const UnitLayout& layout(int index) const { return plan.layouts[static_cast<std::size_t>(index)]; }
  const UnitShape& shape(int index) const { return model.units[static_cast<std::size_t>(index)]; }
  // The reduction out of the unit's gradients.
  Event reduced(int index) const {
    const int slot = plan.slots.gradient_slot[static_cast<std::size_t>(index)];
    return slot == SlotAssignment::kNone ? gradient_ready[static_cast<std::size_t>(index)]
                                         : slot_ready[static_cast<std::size_t>(slot)];
  }
  int parameter_slot(int index) const { return plan.slots.parameter_slot[static_cast<std::size_t>(index)]; }
  // Whether any unit is.
  bool offloads() const { return plan.offloads(); }
  bool offloads_to_files() const { return offloads() && options.tier == Tier::kFile; }
  // All memory of the pool; empty where each placement is memory of its own.
  std::span<std::byte>& memory(Pool pool) { return pool_memory[static_cast<std::size_t>(pool)]; }
  bool on_host(const std::byte* pointer) {
    const std::span<std::byte> host = memory(Pool::kHost);
    return pointer >= host.data() && pointer < host.data() + host.size();
  }
  bool adds_on_host() const { return plan.adds_on_host(); }

  // Constant after construction.
  Backend& backend;
  Kernels& kernels;
  Communicator& communicator;  // Of the data-parallel ranks.
  EngineOptions options;
  internal::EngineHooks hooks;

  // Constant after commit.
  std::vector<std::pair<int, Communicator*>> shared_units;  // With the stages that share them.
  std::unique_ptr<Communicator> grouped;                    // Null without groups.
  std::unique_ptr<Communicator> deciding;                   // Null where it would be `communicator`.
  std::uint64_t deciding_units = 0;                         // Of the grid's rank that has most.
  int chosen_device_units = -1;
  std::uint64_t chosen_bucket_bytes = 0;  // 0: as given.
  WireSpeed wire_speed;                   // Where the bucket was chosen.
  ModelShape model;
  Plan plan;
  std::unique_ptr<Arena> arena;
  std::array<Tag, kDevicePoolCount> tags{};
  std::vector<Unit> units;
  std::vector<Slot> arena_slots;
  Stream engine_stream;  // The engine's own work; the order of collectives is the order of this queue.
  Stream update_stream;  // Updates on the device, so that the next step's first gathers pass them.
  Event updates_done;    // The last of them of a step.
  // By slot: the gather into it (parameters) or the reduction out of it (gradients).
  std::vector<Event> slot_ready;
  std::vector<Event> gradient_ready;  // Stages 0 and 1, by unit: the reduction out of its gradients.
  std::byte* staging = nullptr;       // One received bucket; the norms of all ranks.
  // The fp32 sums of buckets in flight, or scratch of a norm; and when each is free.
  std::array<float*, kBucketsInFlight> bucket_sums{};
  std::array<Event, kBucketsInFlight> bucket_averaged{};
  std::size_t bucket_count = 0;  // That have been through, all together.
  Stream average_stream;         // Averages and norms of reduced gradients.
  Event bucket_reduced;          // Each only from its record to the wait that follows.
  Event averaged;
  // Units that are reduced together: their slices side by side, in as many rows as there are slices.
  struct FusedUnit {
    int unit = 0;
    std::uint64_t column = 0;
  };
  std::byte* fused = nullptr;
  std::vector<FusedUnit> fused_units;
  std::uint64_t fused_count = 0;   // Columns taken.
  double* norms = nullptr;         // One per unit, of this rank's part; zeros after the last.
  StepControl* control = nullptr;  // On the device.
  Event step_decided;              // `decided` holds what became of the step.
  std::unique_ptr<PinnedPool> pinned;
  StepControl* uploaded = nullptr;  // In pinned memory: what the device is given for a step,
  StepState* decided = nullptr;     // and what it gave back.
  // Of the step that is decided: whether this rank may act on it. Written in the order of engine_stream,
  // before step_decided.
  bool committed = false;
  std::unique_ptr<Store> store;  // File tier.
  std::string store_description;
  std::unique_ptr<StagingBuffers> pass_buffers;
  std::unique_ptr<StagingBuffers> mover_buffers;
  std::vector<StorePassPart> pass_parts;  // By unit, the first first.
  std::unique_ptr<StorePass> pass;        // Belongs to tier_stream while anything is queued there.
  std::array<HostPass, 2> host_passes;
  HostPass all_parts;
  std::unique_ptr<Mover> mover;     // File tier: parameters on their way up.
  Stream fetch_stream;              // Tier kPinned: the same. Otherwise the mover's.
  std::vector<Event> slot_fetched;  // By slot: this rank's slice is in its place.
  std::array<DevicePtr, kTransitCount> transit{};
  std::array<int, kTransitCount> transit_user{};  // The unit whose slice was there last, or -1.
  // Where micro-steps add up on the host, a transit holds one bucket's sum: the events of its arrival there
  // and of its leaving; the sum on the host; scratch of a norm; and norms, page-locked, on their way to the
  // device.
  std::array<Event, kTransitCount> sum_ready{};
  std::array<Event, kTransitCount> sum_left{};
  std::uint64_t sum_count = 0;  // Buckets that have been through, all together.
  float* host_sum = nullptr;
  std::vector<double> norm_scratch;
  std::vector<float> norm_aside;  // What another rank counts, while this one's norm is taken.
  double* host_norms = nullptr;
  std::vector<std::byte>
      rounded;  // 2-byte parameters of a few elements, before their gradients' place is free.
  Stream tier_stream;
  Stream up_stream;  // Parameters that stay on the device: up, beside the next unit's update.
  Event tier_done;   // The last update of a step.
  std::unique_ptr<BlockRunner> host_runner;
  std::array<std::vector<HostUpdate>, 2> host_updates;
  DevicePtr activation_block = nullptr;
  int group_count = 0;

  mutable std::mutex tier_mutex;
  Status tier_failure;  // Guarded by tier_mutex.
  std::atomic<bool> tier_failed{false};

  std::array<std::span<std::byte>, kPoolCount> pool_memory{};

  // The state of training.
  Phase phase = Phase::kDescribe;
  Status failure;  // Why the engine is failed.
  std::unique_ptr<Residency> residency;
  std::vector<int> slot_user;  // By slot: the unit last gathered into it, or -1.
  int last_leased = -1;
  std::uint64_t version = 1;             // Of the weights.
  std::uint64_t values_fingerprint = 0;  // Of what set_parameter() was given, in order.
  int forward_count = 0;                 // Micro-steps whose forward pass is complete.
  int micro_step = 0;                    // Those whose backward pass is, so that of the next.
  int cursor = 0;                        // Forward: the next unit. Backward: units at and above it are done.
  bool lease_alive = false;
  std::vector<int> lease_answer;  // By index in the live lease: -1 not asked, 0 "=", 1 "+=".
  std::uint64_t attempted_steps = 0;
  std::uint64_t applied_steps = 0;
  double loss_scale = 1.0;
  int growth_counter = 0;  // Applied steps since the scale last changed.
  std::uint64_t gather_count = 0;
  std::array<bool, kDevicePoolCount> spilled{};
  Traffic other_traffic;  // Payload that is not of steps: from before the engine, commit, saving, digests.
};

}  // namespace forebay
