#include "runtime/command/simulate/simulation.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "forebay/activation_checkpointer.h"
#include "forebay/all_reduce.h"
#include "forebay/error.h"
#include "forebay/rank_grid.h"
#include "forebay/simulated_communicator.h"
#include "forebay/units.h"
#include "runtime/command/simulate/cluster_timing.h"
#include "runtime/command/simulate/simulated_drives.h"
#include "runtime/command/simulate/stage_link.h"
#include "runtime/command/simulate/transformer_work.h"
#include "runtime/engine/engine_hooks.h"

namespace forebay {
namespace {

// Steps before the measured one: the first has no update to wait for, and slots fill.
constexpr int kStepsBefore = 2;
// The part of a plain product's efficiency that a fused attention kernel reaches. Assumed.
constexpr double kFusedAttentionPart = 0.6;
constexpr std::uint64_t kSumBucketBytes = 16u << 20;

// The cause that people look for, by the work's name.
std::string cause_of(const ModelStreamTime& time) {
  static const std::map<std::string_view, const char*> waits = {{"all_gather", "parameter gathers"},
                                                                {"reduce_scatter", "gradient reductions"},
                                                                {"sum of ranks", "gradient reductions"},
                                                                {"average", "gradient reductions"},
                                                                {"norm", "gradient reductions"},
                                                                {"add", "gradient reductions"},
                                                                {"copy to the device", "offload copies"},
                                                                {"copy to the host", "offload copies"},
                                                                {"update on the host", "update on the host"},
                                                                {"sum on the host", "update on the host"},
                                                                {"drives", "drives"},
                                                                {"recv", "pipeline bubble"},
                                                                {"send", "pipeline bubble"},
                                                                {"momentum", "update on the device"},
                                                                {"orthogonalise", "update on the device"},
                                                                {"factors", "update on the device"},
                                                                {"squares", "update on the device"},
                                                                {"update", "update on the device"}};
  if (time.own) {
    for (const char* const pass : {"forward", "backward", "recomputation"}) {
      if (time.name == pass) return pass;
    }
    if (time.name == "copy") return "activation copies";
    return time.name == "fill" ? "backward" : "tensor-parallel sums";
  }
  const auto found = waits.find(time.name);
  return found == waits.end() ? "decision and host" : found->second;
}

// The first rank of a pipeline stage: its devices, its communicators, its engine and a trainer without
// weights.
class SimulatedRank {
 public:
  // `mail`: with several pipeline stages.
  SimulatedRank(const SimulationRequest& request, const ActivationReport& activations, HostClock& clock,
                std::shared_ptr<SimulatedMail> mail)
      : request_(request),
        options_(request.options),
        part_(activations.request.part),
        layers_(stage_layers(request.shape.layers, part_)),
        clock_(clock),
        grid_(value_or_throw(RankGrid::create({.world_size = request.ranks,
                                               .tensor_parallel = part_.tensor_parallel,
                                               .pipeline_parallel = part_.pipeline_parallel}))),
        timing_(request.cluster, options_.dtype),
        backend_(value_or_throw(ModelBackend::create({.name = request.cluster.device.name,
                                                      .memory_bytes = device_bytes(),
                                                      .timing = &timing_,
                                                      .clock = &clock_}))),
        kernels_(value_or_throw(Kernels::create(*backend_))),
        world_(value_or_throw(
            SimulatedCommunicator::create({.rank = grid_.rank({.pipeline = part_.pipeline_stage}),
                                           .size = request.ranks,
                                           .levels = timing_.levels(request.ranks),
                                           .mail = std::move(mail),
                                           .processor_resource = kComputeResource,
                                           .control_seconds = request.cluster.control_seconds},
                                          *backend_, *kernels_))),
        timeline_([this] { return clock_.now(); }),
        stream_(value_or_throw(backend_->stream_create())) {
    connect();
    describe_work();
    make_engine(activations);
  }
  ~SimulatedRank() {
    saved_.reset();
    forward_.reset();
    backward_.reset();
    engine_.reset();
    timeline_.release(*backend_);
    static_cast<void>(backend_->stream_destroy(stream_));
  }
  SimulatedRank(const SimulatedRank&) = delete;
  SimulatedRank& operator=(const SimulatedRank&) = delete;

  SimulationResult run() {
    for (int step = 0; step < kStepsBefore; ++step) run_step();
    backend_->watch(stream_);
    const auto begin = backend_->now();
    run_step();
    if (backend_->now() >= kModelTimeEnd) {
      throw Error(StatusCode::kInvalidArgument,
                  "cannot simulate: " + std::to_string(kStepsBefore + 1) + " steps on cluster " +
                      request_.cluster.name +
                      " take more than 31 years; correct the rates in its description");
    }
    SimulationResult result;
    result.step_seconds = std::chrono::duration<double>(backend_->now() - begin).count();
    note_times(result);
    result.statistics = engine_->statistics();
    if (saved_) {
      const ActivationStatistics saved = saved_->statistics();
      result.statistics.host_bytes += saved.host_bytes;
      result.statistics.file_bytes += saved.file_bytes;
    }
    result.pipeline_stage = part_.pipeline_stage;
    result.sent_bytes_per_step = result.statistics.traffic.sent / (kStepsBefore + 1);
    result.tokens_per_step = static_cast<std::uint64_t>(grid_.data_parallel()) * request_.batch * sequence() *
                             static_cast<std::uint64_t>(options_.micro_steps);
    result.model_flops = options_.micro_steps * model_flops_;
    result.hardware_flops = options_.micro_steps * hardware_flops_;
    result.peak_flops = request_.cluster.device.flops.at(options_.dtype);
    result.device_bytes = device_bytes();
    result.host_memory_bytes =
        request_.cluster.host_memory_bytes / static_cast<std::uint64_t>(request_.cluster.host_ranks);
    if (request_.with_timeline) result.spans = timeline_.spans();
    return result;
  }

 private:
  std::uint64_t sequence() const {
    return request_.sequence != 0 ? request_.sequence : request_.shape.positions;
  }
  std::uint64_t device_bytes() const {
    const std::uint64_t device = request_.cluster.device.memory_bytes;
    const std::uint64_t given = options_.memory_bytes != 0 ? std::min(options_.memory_bytes, device) : device;
    return given > options_.room_bytes ? given - options_.room_bytes : 0;
  }

  bool has_parts() const { return part_.tensor_parallel * part_.pipeline_parallel > 1; }
  bool is_first() const { return part_.pipeline_stage == 0; }
  bool is_last() const { return part_.pipeline_stage + 1 == part_.pipeline_parallel; }
  int forwards_ahead() const { return part_.pipeline_parallel - 1 - part_.pipeline_stage; }

  void connect() {
    const auto along = [grid = grid_](int GridCoordinates::*dimension) {
      return [grid, dimension](int rank) {
        GridCoordinates first = grid.coordinates(rank);
        const int key = first.*dimension;
        first.*dimension = 0;
        return std::pair(grid.rank(first), key);
      };
    };
    if (has_parts()) {
      for (const auto dimension :
           {&GridCoordinates::tensor, &GridCoordinates::data, &GridCoordinates::pipeline})
        world_->expect_split(along(dimension));
      lines_ = value_or_throw(split_grid(*world_, grid_));
    }
    const int rank = world_->rank();
    if (request_.activations != ActivationPlacement::kKeep) {
      world_->expect_split(along(&GridCoordinates::tensor));
      saved_ranks_ = value_or_throw(world_->split(rank, 0));
    }
    if (part_.pipeline_parallel == 1) return;
    const int last = part_.pipeline_parallel - 1;
    const auto is_end = [last](int stage) { return stage == 0 || stage == last ? 0 : 1; };
    world_->expect_split([](int stage) { return std::pair(0, stage); });
    backward_ranks_ = value_or_throw(lines_.pipeline->split(0, part_.pipeline_stage));
    world_->expect_split([is_end](int stage) { return std::pair(is_end(stage), stage); });
    ends_ = value_or_throw(lines_.pipeline->split(is_end(part_.pipeline_stage), part_.pipeline_stage));
  }
  Communicator& data() { return lines_.data != nullptr ? *lines_.data : *world_; }

  // The splits that the engine makes when it commits.
  void expect_splits() {
    const int group = options_.group;
    const int data_ranks = grid_.data_parallel();
    const bool in_groups = (group > 1 || options_.shard_within_group) && data_ranks > 1;
    if (in_groups) {
      world_->expect_split([group](int rank) { return std::pair(rank / group, rank % group); });
      world_->expect_split([group](int rank) { return std::pair(rank % group, rank / group); });
    }
    const int shards = options_.shard_within_group ? group : data_ranks;
    const int replicas = data_ranks / shards;
    if (!has_parts() && replicas == 1) return;
    world_->expect_split([grid = grid_, shards, replicas](int rank) {
      const int data_rank = grid.coordinates(rank).data;
      return std::pair(0, data_rank % shards * replicas + data_rank / shards);
    });
  }

  void describe_work() {
    work_ = transformer_work({.shape = request_.shape,
                              .batch = request_.batch,
                              .sequence = sequence(),
                              .tensor_parallel = part_.tensor_parallel,
                              .dtype = options_.dtype,
                              .fused_attention = request_.fused_attention});
    // The mean over pipeline stages.
    model_flops_ = 3 * total_flops(work_.final);
    double recomputed = 0;
    for (std::uint64_t layer = 0; layer < request_.shape.layers; ++layer) {
      model_flops_ += 3 * total_flops(work_.of_layer(layer).forward);
      if (is_recomputed(layer)) recomputed += total_flops(work_.of_layer(layer).recomputed);
    }
    hardware_flops_ = model_flops_ + recomputed;
    model_flops_ /= part_.pipeline_parallel;
    hardware_flops_ /= part_.pipeline_parallel;
  }
  bool is_recomputed(std::uint64_t layer) const {
    return request_.recompute_every > 0 && layer % static_cast<std::uint64_t>(request_.recompute_every) == 0;
  }

  void make_engine(const ActivationReport& activations) {
    hooks_.now = [this] { return backend_->now(); };
    hooks_.before_host_update = [this](std::uint64_t count) { backend_->spend(timing_.host_update(count)); };
    hooks_.before_host_sum = [this](std::uint64_t bytes) { backend_->spend(timing_.host_pass(bytes)); };
    hooks_.make_store = [this](int) -> Result<std::unique_ptr<Store>> {
      return make_simulated_drives(timing_, *backend_);
    };
    EngineOptions options{options_};
    options.memory_bytes = 0;  // The backend has as much as may be used.
    options.forwards_ahead = forwards_ahead();
    if (has_parts()) options.grid = world_.get();
    options.host_threads = 1;
    options.near_device = false;
    options.hooks = &hooks_;
    if (request_.with_timeline) options.timeline = &timeline_;
    engine_ = std::make_unique<Engine>(*backend_, *kernels_, data(), options);

    const ModelShape shape = value_or_throw(make_model_shape(request_.shape, part_));
    for (const UnitShape& unit : shape.units) {
      const UnitId id = engine_->add_unit(unit.name, unit.backward_reads_parameters);
      int index = 0;
      for (const ParameterShape& parameter : unit.parameters) {
        const ParameterId added = engine_->add_parameter(id, parameter.name, parameter.count, parameter.group,
                                                         parameter.frozen, parameter.replicated);
        if (!parameter.shape.empty())
          engine_->declare_shape(added, {parameter.shape.data(), parameter.shape.size()});
        if (parameter.split) engine_->declare_split(added, *parameter.split);
        if (parameter.elementwise) engine_->declare_elementwise(added);
        trainable_.resize(static_cast<std::size_t>(id) + 1);
        trainable_.back().push_back(index++);
      }
      trainable_.resize(static_cast<std::size_t>(id) + 1);
      if (unit.shared_by > 1) {
        trainable_.back().clear();  // Its gradients are those of the units that are tied to it.
        engine_->share(id, *ends_);
      }
      for (const UnitShape::Tied& tied : unit.tied)
        trainable_.back().push_back(engine_->tie(id, {tied.unit, tied.index}));
      if (unit.shared_by == 1) first_unit_ = std::min(first_unit_, id);
    }
    unit_count_ = static_cast<int>(shape.units.size());
    const std::uint64_t sum_bytes = request_.batch * sequence() * request_.shape.hidden * element();
    const std::uint64_t staging =
        all_reduce_staging_bytes(part_.tensor_parallel, std::min(kSumBucketBytes, sum_bytes), options_.dtype);
    std::uint64_t least = part_.tensor_parallel > 1 ? round_up(sum_bytes, kAlignment) + staging : 0;
    if (part_.pipeline_parallel > 1 || saved_ranks_ != nullptr) least = std::max(least, sum_bytes);
    saved_inputs_ = saved_ranks_ != nullptr && activations.plan;
    if (saved_inputs_) make_checkpointer(activations);
    const std::uint64_t saved_bytes = saved_inputs_ ? saved_->plan().device_bytes() : 0;
    const std::uint64_t given = request_.activation_bytes.value_or(activations.device_bytes());
    const std::uint64_t live =
        round_up(std::max(given - std::min(given, saved_bytes), least), saved_inputs_ ? kAlignment : 1);
    engine_->declare_activations(live + saved_bytes);
    expect_splits();
    engine_->commit();
    if (saved_inputs_) saved_->commit(saved_bytes > 0 ? engine_->activations() + live : nullptr);
    if (part_.pipeline_parallel == 1) return;
    const int stage = part_.pipeline_stage;
    const auto before = is_first() ? std::nullopt : std::optional(stage - 1);
    const auto after = is_last() ? std::nullopt : std::optional(stage + 1);
    forward_.emplace(*backend_, *lines_.pipeline, engine_->activations(),
                     StageLink::Options{stream_, sum_bytes, before, after});
    backward_.emplace(*backend_, *backward_ranks_, engine_->activations(),
                      StageLink::Options{stream_, sum_bytes, after, before});
  }
  void make_checkpointer(const ActivationReport& activations) {
    ActivationCheckpointerOptions options{.plan = activations.plan->options, .in_region = true};
    options.hooks = &hooks_;
    if (request_.with_timeline) options.timeline = &timeline_;
    saved_.emplace(*backend_, *saved_ranks_, options);
    for (std::uint64_t layer = layers_.first; layer < layers_.first + layers_.count; ++layer) {
      if (!is_recomputed(layer)) continue;
      saved_->declare({.unit = static_cast<int>(layer),
                       .bytes = request_.batch * sequence() * request_.shape.hidden * element(),
                       .placement = request_.activations});
    }
  }
  std::uint64_t element() const { return element_bytes(options_.dtype); }

  void run_step() {
    engine_->step_begin();
    // One forward, one backward: forward passes run ahead by the number of pipeline stages behind this one.
    if (forward_) forward_->receive();
    if (backward_) backward_->receive();
    int forwards = 0;
    for (int micro_step = 0; micro_step < options_.micro_steps; ++micro_step) {
      while (forwards < options_.micro_steps && forwards - micro_step <= forwards_ahead())
        run_forward(forwards++);
      run_backward(micro_step);
    }
    if (saved_inputs_) {
      throw_if_error(backend_->stream_synchronize(stream_));
      saved_->check();
    }
    static_cast<void>(engine_->step({.groups = {{}, {}}}));
  }

  // Before each unit of each pass. The first pipeline stage speaks for all of them.
  void show_progress() {
    if (!request_.progress || !is_first()) return;
    const double all = 2.0 * (kStepsBefore + 1) * options_.micro_steps * unit_count_;
    request_.progress("a step", static_cast<double>(passes_++) / all);
  }

  bool is_embedding(int unit) const { return is_first() && unit == first_unit_; }
  bool is_final(int unit) const { return is_last() && unit + 1 == unit_count_; }
  // Requires: neither of the two above, nor a shared unit.
  std::uint64_t layer_of(int unit) const {
    return layers_.first + static_cast<std::uint64_t>(unit - first_unit_ - (is_first() ? 1 : 0));
  }
  ActivationKey saved_key(int unit, int micro_step) const {
    return {.unit = static_cast<int>(layer_of(unit)), .micro_batch = micro_step};
  }

  void run_forward(int micro_step) {
    if (forward_) {
      forward_->wait_for_received();
      forward_->wait_for_place(micro_step);
    }
    engine_->micro_step_begin(micro_step);
    for (int unit = 0; unit < unit_count_; ++unit) {
      show_progress();
      const Lease lease = engine_->forward(unit, stream_);
      if (unit < first_unit_) continue;  // Shared: the units that are tied to it compute.
      const bool is_layer = !is_embedding(unit) && !is_final(unit);
      if (saved_inputs_ && is_layer && is_recomputed(layer_of(unit))) {
        const std::uint64_t bytes = request_.batch * sequence() * request_.shape.hidden * element();
        saved_->save(saved_key(unit, micro_step), engine_->activations(), bytes, stream_);
      }
      queue("forward", is_embedding(unit) ? work_.embedding
                       : is_final(unit)   ? work_.final
                                          : work_.of_layer(layer_of(unit)).forward);
    }
    if (!forward_) return;
    forward_->send(micro_step);
    if (micro_step + 1 < options_.micro_steps) forward_->receive();
  }

  void run_backward(int micro_step) {
    if (backward_) {
      backward_->wait_for_received();
      backward_->wait_for_place(micro_step);
    }
    for (int unit = unit_count_ - 1; unit >= 0; --unit) {
      show_progress();
      // The units that are tied to a shared one send their gradients to the stage before first.
      if (unit < first_unit_ && backward_) send_gradients(micro_step);
      Lease lease = engine_->backward(unit, stream_);
      if (unit < first_unit_) continue;
      const bool is_layer = !is_embedding(unit) && !is_final(unit);
      std::optional<ActivationLease> input;
      if (is_layer && is_recomputed(layer_of(unit))) {
        if (saved_inputs_) input.emplace(saved_->load(saved_key(unit, micro_step), stream_));
        queue("recomputation", work_.of_layer(layer_of(unit)).recomputed);
      }
      bool accumulate = false;
      for (const int index : trainable_[static_cast<std::size_t>(unit)])
        static_cast<void>(lease.gradient(index, &accumulate));
      queue("backward", is_embedding(unit) ? work_.embedding_backward
                        : is_final(unit)   ? work_.final_backward
                                           : work_.of_layer(layer_of(unit)).backward);
    }
    if (backward_ && first_unit_ == 0) send_gradients(micro_step);
  }
  void send_gradients(int micro_step) {
    backward_->send(micro_step);
    if (micro_step + 1 < options_.micro_steps) backward_->receive();
  }

  void queue(const char* pass, const WorkPieces& pieces) {
    for (const WorkPiece& piece : pieces) {
      switch (piece.kind) {
        case WorkPiece::Kind::kProduct:
          queue(timing_.product(pass, piece.m, piece.n, piece.k, piece.count));
          break;
        case WorkPiece::Kind::kAttention: {
          // The scores stay on the chip.
          ModelWork work = timing_.product(pass, piece.m, piece.n, piece.k, piece.count, kFusedAttentionPart);
          const double flops = request_.cluster.device.flops.at(options_.dtype);
          const double part =
              matrix_efficiency(request_.cluster.device, piece.m, piece.n * piece.count, piece.k) *
              kFusedAttentionPart;
          work.parts[0].seconds = piece.flops() / (flops * part);
          queue(work);
          break;
        }
        case WorkPiece::Kind::kPass:
          queue(timing_.kernel(pass, piece.bytes));
          break;
        case WorkPiece::Kind::kSum:
          sum(piece.bytes);
          break;
      }
    }
  }
  void queue(const ModelWork& work) { throw_if_error(backend_->work(work, stream_)); }

  void sum(std::uint64_t bytes) {
    DevicePtr const data = engine_->activations();
    throw_if_error(all_reduce(*lines_.tensor, *backend_, *kernels_,
                              {.data = data,
                               .count = bytes / element(),
                               .type = options_.dtype,
                               .staging = data + round_up(bytes, 512),
                               .bucket_bytes = std::min(kSumBucketBytes, bytes)},
                              stream_));
  }

  void note_times(SimulationResult& result) const {
    for (const ModelStreamTime& time : backend_->watched()) {
      const std::string cause = cause_of(time);
      const auto found = std::find_if(result.times.begin(), result.times.end(),
                                      [&](const SimulatedTime& one) { return one.cause == cause; });
      const double seconds = std::chrono::duration<double>(time.time).count();
      if (found == result.times.end()) {
        result.times.push_back({cause, !time.own, seconds});
      } else {
        found->seconds += seconds;
      }
    }
    std::stable_sort(result.times.begin(), result.times.end(),
                     [](const SimulatedTime& a, const SimulatedTime& b) {
                       return a.exposed != b.exposed ? b.exposed : a.seconds > b.seconds;
                     });
    const auto busy = backend_->busy_seconds();
    result.compute_busy = busy[kComputeResource] / result.step_seconds;
    result.bus_busy = std::max(busy[kBusDownResource], busy[kBusUpResource]) / result.step_seconds;
    result.host_busy = busy[kHostMemoryResource] / result.step_seconds;
    for (std::size_t level = 0; level < request_.cluster.links.size(); ++level)
      result.link_busy.push_back(busy[kFirstLinkResource + level] / result.step_seconds);
  }

  static constexpr std::uint64_t kAlignment = 512;

  const SimulationRequest& request_;
  const ShardingOptions& options_;
  const ModelPart part_;
  const LayerRange layers_;  // This pipeline stage's.
  HostClock& clock_;
  const RankGrid grid_;
  const ClusterTiming timing_;
  const std::unique_ptr<ModelBackend> backend_;
  const std::unique_ptr<Kernels> kernels_;
  const std::unique_ptr<SimulatedCommunicator> world_;
  GridCommunicators lines_;                       // Empty if the model is in one part.
  std::unique_ptr<Communicator> saved_ranks_;     // Tensor-parallel ranks; null if inputs are kept.
  std::unique_ptr<Communicator> backward_ranks_;  // Pipeline stages, for gradients.
  std::unique_ptr<Communicator> ends_;            // The first and the last pipeline stage.
  Timeline timeline_;
  const Stream stream_;
  internal::EngineHooks hooks_;
  TransformerWork work_;
  double model_flops_ = 0;  // A micro-step's.
  double hardware_flops_ = 0;
  std::vector<std::vector<int>> trainable_;  // By unit: the indices in its leases.
  int unit_count_ = 0;
  std::uint64_t passes_ = 0;
  UnitId first_unit_ = std::numeric_limits<UnitId>::max();  // After a shared one.
  std::unique_ptr<Engine> engine_;
  bool saved_inputs_ = false;  // By saved_.
  std::optional<ActivationCheckpointer> saved_;
  std::optional<StageLink> forward_;  // Null with one pipeline stage.
  std::optional<StageLink> backward_;
};

Status check(const SimulationRequest& request) {
  const DeviceDescription& device = request.cluster.device;
  if (!device.flops.contains(request.options.dtype)) {
    std::string types;
    for (const auto& [type, flops] : device.flops)
      types += std::string(types.empty() ? "" : ", ") + data_type_name(type);
    return Status(StatusCode::kUnsupported, "device " + device.name + " has no products in " +
                                                data_type_name(request.options.dtype) + "; it has " + types);
  }
  if (request.options.tier == Tier::kFile && (request.cluster.drive_read_bytes_per_second == 0 ||
                                              request.cluster.drive_write_bytes_per_second == 0)) {
    return Status(StatusCode::kUnsupported, "cluster " + request.cluster.name +
                                                " has no drives for offload-tier nvme; use cpu, or give "
                                                "their rates in its description");
  }
  const bool in_files = request.activations == ActivationPlacement::kPartitionAndSpill &&
                        request.activation_tier == Tier::kFile;
  if (in_files && request.cluster.drive_write_bytes_per_second == 0) {
    return Status(StatusCode::kUnsupported, "cluster " + request.cluster.name +
                                                " has no drives for activations; put them in host memory, or "
                                                "give the drives' rates in its description");
  }
  return RankGrid::create({.world_size = request.ranks,
                           .tensor_parallel = request.part.tensor_parallel,
                           .pipeline_parallel = request.part.pipeline_parallel})
      .status();
}

// One thread for each pipeline stage, on one virtual clock. The figures of the stage that needs most memory.
Result<SimulationResult> simulate_stages(const SimulationRequest& request,
                                         const std::vector<ActivationReport>& activations) {
  HostClock clock(HostClock::Mode::kVirtual);
  if (activations.size() == 1) return SimulatedRank(request, activations[0], clock, nullptr).run();
  const auto mail = std::make_shared<SimulatedMail>(clock);
  std::vector<Result<SimulationResult>> results(activations.size(), SimulationResult());
  std::vector<HostClock::Registration> registrations;
  for (std::size_t stage = 0; stage < activations.size(); ++stage) registrations.emplace_back(clock);
  const auto run = [&](std::size_t stage, HostClock::Registration registration) {
    registration.adopt();
    try {
      results[stage] = SimulatedRank(request, activations[stage], clock, mail).run();
    } catch (const Error& error) {
      results[stage] = error.status();
    } catch (const std::bad_alloc&) {
      results[stage] = Status(StatusCode::kOutOfMemory, "this host has no memory for pipeline stage ", stage,
                              " of the simulation; simulate fewer stages");
    }
    if (!results[stage].ok()) mail->abandon();
  };
  std::vector<std::thread> threads;
  Status no_thread;
  try {
    for (std::size_t stage = 0; stage < activations.size(); ++stage)
      threads.emplace_back(run, stage, std::move(registrations[stage]));
  } catch (const std::system_error& error) {
    no_thread =
        Status(StatusCode::kUnavailable, "there is no thread for pipeline stage ", threads.size(),
               " of the simulation: ", error.what(), "; raise ulimit -u or -v, or simulate fewer stages");
    mail->abandon();
    registrations.clear();  // So that the clock does not wait for them.
  }
  for (std::thread& thread : threads) thread.join();
  FOREBAY_RETURN_IF_ERROR(no_thread);
  std::size_t most = 0;
  for (std::size_t stage = 0; stage < results.size(); ++stage) {
    FOREBAY_RETURN_IF_ERROR(results[stage].status());
    const auto reserved = [&](std::size_t i) { return results[i].value().statistics.peak_reserved_bytes; };
    if (reserved(stage) > reserved(most)) most = stage;
  }
  return std::move(results[most]);
}

}  // namespace

Result<std::vector<ActivationReport>> activations_of_stages(const SimulationRequest& request) {
  std::vector<ActivationReport> stages;
  for (int stage = 0; stage < request.part.pipeline_parallel; ++stage) {
    ModelPart part = request.part;
    part.pipeline_stage = stage;
    FOREBAY_ASSIGN_OR_RETURN(stages.emplace_back(),
                             make_activation_report({.shape = request.shape,
                                                     .batch = request.batch,
                                                     .sequence = request.sequence,
                                                     .dtype = request.options.dtype,
                                                     .part = part,
                                                     .micro_steps = request.options.micro_steps,
                                                     .recompute_every = request.recompute_every,
                                                     .fused_attention = request.fused_attention,
                                                     .placement = request.activations,
                                                     .tier = request.activation_tier}));
  }
  return stages;
}

Result<SimulationResult> simulate(const SimulationRequest& given) {
  SimulationRequest request = given;
  FOREBAY_ASSIGN_OR_RETURN(request.shape, complete_shape(given.shape));
  FOREBAY_RETURN_IF_ERROR(check(request));
  FOREBAY_ASSIGN_OR_RETURN(const std::vector<ActivationReport> activations, activations_of_stages(request));
  try {
    FOREBAY_ASSIGN_OR_RETURN(SimulationResult result, simulate_stages(request, activations));
    FOREBAY_ASSIGN_OR_RETURN(const ModelShape whole, make_model_shape(request.shape));
    for (const UnitShape& unit : whole.units) {
      for (const ParameterShape& parameter : unit.parameters) result.parameters += parameter.count;
    }
    return result;
  } catch (const Error& error) {
    return error.status();
  }
}

const SimulatedTime& bottleneck(const SimulationResult& result) {
  return *std::max_element(
      result.times.begin(), result.times.end(),
      [](const SimulatedTime& a, const SimulatedTime& b) { return a.seconds < b.seconds; });
}

Result<std::vector<SimulatedChange>> simulate_changes(const SimulationRequest& given) {
  SimulationRequest request = given;
  request.with_timeline = false;
  std::vector<SimulatedChange> changes;
  const auto with = [&](const std::string& change, const std::function<void(ClusterDescription&)>& apply) {
    SimulationRequest changed = request;
    apply(changed.cluster);
    if (given.progress) {
      changed.progress = [&](const std::string& subject, double done) {
        given.progress(subject + " with " + change, done);
      };
    }
    const Result<SimulationResult> result = simulate(changed);
    if (result.ok()) changes.push_back({change, result.value().step_seconds});
    return result.status();
  };
  FOREBAY_RETURN_IF_ERROR(with("twice the FLOP/s of the device", [](ClusterDescription& c) {
    for (auto& [type, flops] : c.device.flops) flops *= 2;
  }));
  FOREBAY_RETURN_IF_ERROR(with("twice the memory bandwidth of the device",
                               [](ClusterDescription& c) { c.device.memory_bytes_per_second *= 2; }));
  FOREBAY_RETURN_IF_ERROR(with("kernels without gaps and launches", [](ClusterDescription& c) {
    c.device.kernel_seconds = c.device.queue_seconds = 0;
  }));
  if (request.ranks > 1) {
    for (std::size_t level = 0; level < request.cluster.links.size(); ++level) {
      if (level > 0 && request.ranks <= request.cluster.links[level - 1].ranks) break;
      const std::string name = request.cluster.links[level].name;
      FOREBAY_RETURN_IF_ERROR(with("twice the bandwidth of the links: " + name,
                                   [&](ClusterDescription& c) { c.links[level].bytes_per_second *= 2; }));
    }
    FOREBAY_RETURN_IF_ERROR(with("links without latency", [](ClusterDescription& c) {
      for (LinkDescription& link : c.links) link.latency_seconds = link.message_seconds = 0;
      c.control_seconds = 0;
    }));
  }
  if (request.options.offload != Offload::kNone) {
    FOREBAY_RETURN_IF_ERROR(
        with("twice the bus to the host", [](ClusterDescription& c) { c.bus_bytes_per_second *= 2; }));
    FOREBAY_RETURN_IF_ERROR(with("twice the memory bandwidth of the host",
                                 [](ClusterDescription& c) { c.host_bytes_per_second *= 2; }));
  }
  if (request.options.tier == Tier::kFile) {
    FOREBAY_RETURN_IF_ERROR(with("twice the drives", [](ClusterDescription& c) {
      c.drive_read_bytes_per_second *= 2;
      c.drive_write_bytes_per_second *= 2;
    }));
  }
  std::stable_sort(changes.begin(), changes.end(), [](const SimulatedChange& a, const SimulatedChange& b) {
    return a.step_seconds < b.step_seconds;
  });
  return changes;
}

}  // namespace forebay
