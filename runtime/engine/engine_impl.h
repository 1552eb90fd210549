// The inside of Engine: the description, the plan, the phase, leases, and the step through its four parts.
#pragma once

#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "forebay/access_guard.h"
#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/file_store.h"
#include "runtime/engine/state/state_claims.h"
#include "runtime/engine/state/state_directory.h"
#include "runtime/engine/state/state_files.h"
#include "runtime/engine/step/context.h"
#include "runtime/engine/step/decision.h"
#include "runtime/engine/step/factored_moments.h"
#include "runtime/engine/step/gatherer.h"
#include "runtime/engine/step/matrix_updates.h"
#include "runtime/engine/step/recorder.h"
#include "runtime/engine/step/reducer.h"
#include "runtime/engine/step/updater.h"

namespace forebay {
namespace internal {
class BackgroundSave;
class SavedState;
}  // namespace internal

// The ranges of AdamW's constants, which fp32 must hold. Errors: kInvalidArgument naming one.
Status check_adamw(double beta1, double beta2, double epsilon);

// Elements of `type`, widened.
std::vector<float> widen(DataType type, std::span<const std::byte> bytes);

// The error that `work` throws.
Status verdict_of(const std::function<void()>& work);

struct Engine::Impl : StepContext {
  Impl(Backend& backend, Kernels& kernels, Communicator& communicator, EngineOptions options);
  ~Impl();

  const pid_t process = ::getpid();

  // Alive around each collective call outside of steps: its bytes are not the steps' traffic.
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
  void commit();
  // Every rank gives its own verdict. If one is not ok, all throw the verdict of the lowest such rank; the
  // engine is not failed by that.
  void agree(const Status& mine);
  void agree_on_options();
  void agree_on_shared_units();
  // Runs a collective check. The engine is failed if it fails because a rank is lost.
  void together(const std::function<void()>& check);
  void connect();
  // AdamW's constants and the loss scale.
  Status check_scalars() const;
  Status check_options() const;
  std::uint64_t device_budget() const;
  std::uint64_t activation_room();
  Status check_budget() const;

  // --- options that commit measures (measured_options.cc); collective ---
  struct UpdateTimes {
    double device = 0;  // Seconds for one element.
    double offloaded = 0;
  };
  struct Probe;
  std::uint64_t choose_bucket_bytes();
  void warn_of_small_buckets();
  void warn_of_missing_shapes();
  std::uint64_t least_over_grid(std::uint64_t mine);
  int choose_device_units(const Plan& all_offloaded);
  double measure(const std::function<void()>& work) const;
  double measure_collective(const Probe& probe, std::uint64_t count, std::byte* receive, float* target);
  UpdateTimes measure_update(std::uint64_t count);
  double measure_store(std::byte* host, std::uint64_t bytes);
  std::chrono::nanoseconds now() const {
    return hooks.now ? hooks.now()
                     : std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch());
  }

  // --- memory (memory.cc) ---
  void allocate();
  void create_arena();
  void take_pool(Pool pool);
  void take_host_memory();
  void prepare_files();
  void open_store();
  std::unique_ptr<StagingBuffers> staging_buffers(Role role, std::uint64_t count);
  void place_units();
  void describe_unit(int unit);
  void note_gaps(int unit);
  void note_segments(int unit);
  void note_factors(int unit);
  void note_matrices(int unit);
  void note_uncounted(int unit);
  void place(const StatePlacement& placement);
  void place_of_unit(const StatePlacement& placement, std::byte* address);
  void place_state(const StatePlacement& placement, std::byte* address);
  OffloadedRange place_range(const StatePlacement& placement, std::byte* address);
  void complete_unit(int unit);
  void complete_offloaded_unit(int unit);
  void guard_alias(DevicePtr& leased, SlotUse use, int unit, std::uint64_t bytes);
  void make_parts(Unit& unit);

  // --- the step (step/step.cc) ---
  StepResult step(const Hyperparameters& hyperparameters);
  void refresh_squares();
  void check_passes(const char* call);
  void check_step(const Hyperparameters& hyperparameters);
  void begin_backward_of(int unit);
  void begin_backward();
  void finish_backward();
  void finish_pass();
  void pass_skipped(int unit);
  // Whether this rank skipped units [0, end) in the micro-step with the next or present backward pass.
  bool skipped(int end) const;
  bool forward_is_next() const {
    return forebay::forward_is_next(options.micro_steps, options.forwards_ahead, forward_count, micro_step);
  }
  std::size_t place_in_flight(int index) const {
    return static_cast<std::size_t>(index % (options.forwards_ahead + 1));
  }

  // --- leases (lease.cc) ---
  struct LiveLease {
    std::uint64_t number = 0;
    int unit = 0;
    Stream stream;
    bool backward = false;
    std::vector<int> answers;  // By index in the lease: -1 not asked, 0 "=", 1 "+=".
  };
  Lease make_lease(Engine& engine, int unit, Stream stream, bool backward);
  // Errors: kInvalidArgument for a lease that has ended.
  LiveLease& live_lease(std::uint64_t number);
  void end_lease(std::uint64_t number) noexcept;
  // For a failed engine: ~Engine waits for the work queued under the lease, or this does.
  void cover_work(const LiveLease& lease) noexcept;
  // The trainer's last use of the unit is on `stream`.
  Status note_release(int unit, Stream stream);
  DevicePtr address(ParameterId parameter);
  // With an access guard: opens or closes the aliases that a lease of `unit` uses, in the order of `stream`.
  Status open_aliases(int unit, Stream stream, bool backward);
  Status close_aliases(int unit, Stream stream, bool backward);
  Status change_access(int unit, Stream stream, bool backward,
                       Status (AccessGuard::*change)(DevicePtr, AccessGuard::Access, Stream));
  // The parameter that `index` of a lease of `unit` names: its own in order, then the tied ones.
  ParameterId resolve(int unit, int index);
  // The same backwards.
  int index_in_lease(int unit, ParameterId parameter, const char* call);
  Gradient ask_for_gradient(std::uint64_t lease, int index);
  // Refuses a step in which the trainer left out gradients that are not optional.
  void check_gradients();
  // EngineOptions::find_non_finite.
  struct NonFinite {
    bool found = false;
    int micro_step = 0;
    ParameterId parameter;
    std::uint64_t element = 0;
  };
  void search_gradients(const LiveLease& lease);
  std::optional<NonFiniteGradient> first_non_finite();

  // --- evaluations (step/evaluation.cc) ---
  void begin_evaluation();
  void end_evaluation();

  // --- recorded order (step/recorded_order.cc) ---
  void begin_micro_step(int index);
  void finish_micro_step();
  // Before and after the stream waits for the unit: runs the events that come with a lease.
  void acquire(int unit, bool backward);
  void acquired(int unit, bool backward);
  void release(const LiveLease& lease);
  void come_to(UnitEvent event);
  void pass(UnitEvent event);
  void pass_rest();
  void prefetch_next();
  void run(UnitEvent event, bool used);
  void open_gradients(int unit);
  bool reads(int unit, bool backward) const { return !backward || shape(unit).backward_reads_parameters; }
  void prefetch_first(const UnitEvents& events);
  // The step has no more passes.
  void end_passes();
  // Refuses the end of a micro-step in which this rank has forward passes and no backward pass.
  void check_backward_passes();
  double gradient_norm();
  void abandon(int micro_steps);
  void give_up();
  Decision::Facts facts() const;
  void adopt_order();

  // --- on demand (state/values.cc) ---
  void spill(const SpillOptions& states);
  void fetch();

  // --- values and state (state/values.cc, training_state.cc) ---
  void copy_in(DevicePtr target, const void* source, std::uint64_t bytes);
  void copy_out(void* target, const std::byte* source, std::uint64_t bytes);
  // Between host memory and an offloaded range, at any byte. Waits; begins when all queued work is done.
  void write_range(const OffloadedRange& range, std::uint64_t offset, const void* source,
                   std::uint64_t bytes);
  void read_range(const OffloadedRange& range, std::uint64_t offset, void* target, std::uint64_t bytes);
  // Elements of a state that lie in one piece of memory or of the store.
  struct KeptRun {
    std::uint64_t values = 0;     // Bytes from the start of the state.
    std::uint64_t exponents = 0;  // The same, in MomentFormat::kBlock8.
    std::uint64_t count = 0;      // Elements.
  };
  std::vector<KeptRun> kept_runs(int unit, StateField field, std::uint64_t begin, std::uint64_t count);
  // Bytes of a state as it is kept.
  void write_kept(int unit, StateField field, std::uint64_t offset, const std::byte* bytes,
                  std::uint64_t count);
  void read_kept(int unit, StateField field, std::uint64_t offset, std::byte* bytes, std::uint64_t count);
  // Muon: whether the field is that of single elements alone (StepContext::OwnV). It lies in no file.
  bool is_own_v(StateField field) const {
    return field == StateField::kV && options.optimizer == Optimizer::kMuon;
  }
  // The parts of `count` elements of the updated range, from `begin` on, that have one.
  std::vector<OwnV> own_v_in(int unit, std::uint64_t begin, std::uint64_t count) const;
  // The states that are saved.
  std::vector<StateField> saved_fields() const {
    std::vector<StateField> fields = state_fields();
    if (is_own_v(StateField::kV)) fields.push_back(StateField::kV);
    return fields;
  }
  // `count` elements of the updated range of a state, from `begin` on, in fp32.
  void write_state(int unit, StateField field, std::uint64_t begin, std::span<const float> values);
  void read_state(int unit, StateField field, std::uint64_t begin, std::span<float> values);
  // This rank's slice of the parameters at stage 3; `offset` in bytes.
  void write_slice(int unit, bool frozen, std::uint64_t offset, std::span<const std::byte> bytes);
  void read_slice(int unit, bool frozen, std::uint64_t offset, std::span<std::byte> bytes);
  // Waits until every queued update has run, on the device and on the host. Errors: the tier's.
  void settle_updates();
  // Waits for the work that the trainer queued under leases, which may use parameters and gradients.
  void settle_leases();
  // All ranks' slices of `bytes` each, in rank order.
  std::vector<std::byte> all_slices(
      std::uint64_t bytes, const std::function<void(std::uint64_t offset, std::span<std::byte> piece)>& mine);
  // `keeps_equal`: the rule of set_changed_part().
  void set_parameter(ParameterId parameter, std::uint64_t first, Span<const float> values, bool keeps_equal);
  // set_parameter() for those that callers give, which all ranks compare.
  void set_given(const char* call, ParameterId parameter, std::uint64_t first, Span<const float> values,
                 bool keeps_equal);
  // The master and the moving average of updated elements from `first` on.
  void set_master(int unit, std::uint64_t first, std::span<const float> values, bool keeps_equal);
  // All ranks' elements of a state.
  std::vector<float> unit_states(int unit, StateField field);
  std::vector<float> unit_frozen(int unit);
  void publish_parameters();
  // Refuses `call` while the weights are their average.
  void expect_own_weights(const char* call);
  void expect_equal_values();
  void note_freeze(const UnitShape& unit, int index, bool frozen);
  void save_state(const std::string& directory, const std::string& trainer_state, int keep);
  void begin_save(const std::string& directory, const std::string& trainer_state, int keep);
  void end_save();
  void lock_state(const std::string& directory);
  // The elements of a section that this rank saves.
  struct SavedPart {
    int unit = 0;
    bool frozen = false;
    StateField field = StateField::kMaster;
    std::uint64_t begin = 0;  // Elements from the start of the section.
    std::uint64_t count = 0;
    bool factors = false;  // Not elements: Adafactor's factors of the unit.
  };
  std::vector<SavedPart> saved_parts() const;
  std::uint64_t saved_offset(const SavedPart& part) const;
  std::vector<OwnV> own_v_in(const SavedPart& part) const;
  void describe_copies();
  void describe_copies(const SavedPart& part, std::byte* target);
  // The contents of this rank's file of a state, in its order. A save in the background keeps it, because the
  // plan of the engine changes with the order of units.
  struct SavedFile {
    std::vector<internal::StateParameter> parameters;
    std::vector<SavedPart> parts;
    std::vector<internal::StateRun> runs;
    std::vector<std::vector<std::uint64_t>> begins;  // By part, of its runs: elements from its start.
  };
  SavedFile saved_file(bool saves_grid) const;
  // Writes `count` values of part `part`, from `begin` on, to `target`. The calls ascend.
  using PartReader =
      std::function<void(std::size_t part, std::uint64_t begin, std::uint64_t count, std::byte* target)>;
  void read_part(const SavedPart& part, std::vector<float>& memory);
  bool is_copied_as_saved(const SavedPart& part) const;
  std::uint64_t copied_bytes(const SavedPart& part) const;
  void read_copied_part(const SavedPart& part, const std::byte* copied, std::vector<float>& memory) const;
  Communicator& state_ranks(const std::string& directory);
  bool saves(int unit, const ParameterShape& parameter) const;
  // Copies of the values that stay, by part; null: the part has other bytes than its file. And the checksums
  // of their runs, in order.
  struct FinishedCopies {
    std::vector<const std::byte*> parts;
    std::vector<std::uint64_t> checksums;
  };
  FinishedCopies finish_copies(const SavedFile& saved) const;
  // `read` gives the parts of which there is no copy.
  void write_values(internal::StateFile target, const SavedFile& saved, const FinishedCopies& copies,
                    const PartReader& read) const;
  nlohmann::json state_manifest(const std::string& trainer_state, int saving_ranks) const;
  std::string load_state(const std::string& directory, std::optional<std::uint64_t> step);
  std::string load_state(Communicator& loading, const std::string& directory, const std::string& name);
  std::string name_of_state(Communicator& loading, const std::string& directory,
                            std::optional<std::uint64_t> step);
  bool is_superseded(Communicator& loading, const std::string& directory, std::optional<std::uint64_t> step,
                     const std::string& name);
  void load_part(internal::SavedState& saved, const ParameterShape& parameter, const char* field,
                 std::uint64_t offset, std::span<float> values);
  void load_values(internal::SavedState& saved);
  void load_factors(internal::SavedState& saved, int unit);
  Status local_verdict(const std::function<void()>& work) const;

  void check_parameter(ParameterId id, const char* call);
  void expect(Phase wanted, const char* call);
  // Whether this is the copy of an engine in a child made by fork(), which has none of its threads.
  bool is_forked() const noexcept { return ::getpid() != process; }
  void expect_own_process();
  void expect_fetched(const char* call);
  void expect_stream(Stream stream, const char* call);
  // In a step, without a lease.
  void expect_step(const char* call);
  // Between steps; in recorded order also in a step, after a micro-step's backward pass, which this ends.
  void expect_between_passes(const char* call);
  [[noreturn]] void misuse(const std::string& message);
  // Throws, and leaves the engine failed, if a peer or the tier of offloaded states has failed.
  void check_peers() {
    expect_own_process();
    must(communicator.status());
    if (updater != nullptr) must(updater->failure());
  }
  // The bytes of all communicators of the engine.
  Traffic traffic() const;

  // All memory of the pool; empty where each placement is memory of its own.
  std::span<std::byte>& memory(Pool pool) { return pool_memory[static_cast<std::size_t>(pool)]; }
  bool on_host(const std::byte* pointer) {
    const std::span<std::byte> host = memory(Pool::kHost);
    return pointer >= host.data() && pointer < host.data() + host.size();
  }

  // Constant after commit.
  ModelDescription description{model};
  std::vector<std::pair<int, Communicator*>> shared_units;  // With the pipeline stages that share them.
  SharingRank sharing_rank;                                 // This rank.
  int chosen_device_units = -1;
  std::uint64_t chosen_bucket_bytes = 0;  // 0: as given.
  WireSpeed wire_speed;                   // Where the bucket was chosen.
  std::unique_ptr<Arena> arena;
  std::array<Tag, kDevicePoolCount> tags{};
  std::array<std::span<std::byte>, kPoolCount> pool_memory{};
  DevicePtr activation_block = nullptr;
  std::string store_description;

  // The parts of the step, from commit on.
  std::unique_ptr<Decision> decision;
  std::unique_ptr<Updater> updater;
  std::unique_ptr<FactoredMoments> factored;      // Adafactor.
  std::unique_ptr<MatrixUpdates> matrix_updates;  // Muon.
  std::unique_ptr<Reducer> reducer;
  std::unique_ptr<Gatherer> gatherer;

  // The state of training.
  std::list<internal::StateLock> state_locks;
  internal::StateClaims state_claims;
  std::vector<StateCopy> saved_copies;
  std::vector<std::byte*> saved_targets;  // By part of saved_parts().
  std::unique_ptr<internal::BackgroundSave> background_save;
  bool average_is_swapped = false;  // swap_average() was called once more than undone.
  int forward_count = 0;            // Micro-steps with a complete forward pass.
  int micro_step = 0;               // Micro-steps with a complete backward pass: the next one's index.
  int cursor = 0;                   // Forward: the next unit. Backward: units at and above it are done.
  std::vector<LiveLease> leases;
  std::uint64_t lease_count = 0;
  std::optional<double> norm;                    // Where gradient_norm() was called in this step.
  std::optional<Phase> after_evaluation;         // In an evaluation: the phase before it.
  std::optional<OtherTraffic> outside_of_steps;  // Alive in an evaluation.
  Traffic evaluation_traffic;                    // All evaluations together.
  std::unique_ptr<Recorder> recorder;            // Null in strict order. The rest is for recorded order.
  bool passes_ended = false;                     // The step's last micro-step is over.
  int forward_leases = 0;                        // In this micro-step.
  int backward_leases = 0;
  bool gradients_checked = false;  // In an earlier step.
  NonFinite non_finite;            // This rank's, in this step.
  bool abandoned = false;          // Some rank gave up the step.
  std::vector<int> last_readers;   // The units that were read when the last unit was needed.
  int last_reduced = -1;
  std::array<bool, kDevicePoolCount> spilled{};
  Traffic other_traffic;  // Payload outside of steps: before the engine, commit, saving, digests.
};

}  // namespace forebay
