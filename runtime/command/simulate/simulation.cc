#include "runtime/command/simulate/simulation.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "forebay/all_reduce.h"
#include "forebay/error.h"
#include "forebay/rank_grid.h"
#include "forebay/simulated_communicator.h"
#include "forebay/units.h"
#include "runtime/command/plan/activation_report.h"
#include "runtime/command/simulate/cluster_timing.h"
#include "runtime/command/simulate/simulated_drives.h"
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
                                                                {"update", "update on the device"}};
  if (time.own) {
    for (const char* const pass : {"forward", "backward", "recomputation"}) {
      if (time.name == pass) return pass;
    }
    return time.name == "fill" ? "backward" : "tensor-parallel sums";
  }
  const auto found = waits.find(time.name);
  return found == waits.end() ? "decision and host" : found->second;
}

// One rank: its devices, its communicators, its engine and a trainer without weights.
class SimulatedRank {
 public:
  SimulatedRank(const SimulationRequest& request, const ActivationReport& activations)
      : request_(request),
        options_(request.options),
        timing_(request.cluster, options_.dtype),
        backend_(value_or_throw(ModelBackend::create({.name = request.cluster.device.name,
                                                      .memory_bytes = device_bytes(),
                                                      .timing = &timing_,
                                                      .clock = &clock_}))),
        kernels_(value_or_throw(Kernels::create(*backend_))),
        world_(
            value_or_throw(SimulatedCommunicator::create({.size = request.ranks,
                                                          .levels = timing_.levels(request.ranks),
                                                          .control_seconds = request.cluster.control_seconds},
                                                         *backend_, *kernels_))),
        timeline_([this] { return clock_.now(); }),
        stream_(value_or_throw(backend_->stream_create())) {
    connect();
    describe_work();
    make_engine(activations);
  }
  ~SimulatedRank() {
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

  void connect() {
    grid_ = value_or_throw(
        RankGrid::create({.world_size = request_.ranks, .tensor_parallel = request_.tensor_parallel}));
    if (request_.tensor_parallel == 1) return;
    const auto along = [grid = grid_](int GridCoordinates::*dimension) {
      return [grid, dimension](int rank) {
        GridCoordinates first = grid.coordinates(rank);
        const int key = first.*dimension;
        first.*dimension = 0;
        return std::pair(grid.rank(first), key);
      };
    };
    world_->expect_split(along(&GridCoordinates::tensor));
    world_->expect_split(along(&GridCoordinates::data));
    world_->expect_split(along(&GridCoordinates::pipeline));
    lines_ = value_or_throw(split_grid(*world_, grid_));
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
    if (request_.tensor_parallel == 1 && replicas == 1) return;
    world_->expect_split([grid = grid_, shards, replicas](int rank) {
      const int data_rank = grid.coordinates(rank).data;
      return std::pair(0, data_rank % shards * replicas + data_rank / shards);
    });
  }

  void describe_work() {
    work_ = transformer_work({.shape = request_.shape,
                              .batch = request_.batch,
                              .sequence = sequence(),
                              .tensor_parallel = request_.tensor_parallel,
                              .dtype = options_.dtype,
                              .fused_attention = request_.fused_attention});
    const auto layers = static_cast<double>(request_.shape.layers);
    model_flops_ = 3 * (layers * total_flops(work_.layer) + total_flops(work_.final));
    hardware_flops_ = model_flops_;
    for (std::uint64_t layer = 0; layer < request_.shape.layers; ++layer) {
      if (is_recomputed(layer)) hardware_flops_ += total_flops(work_.recomputed_layer);
    }
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
    if (request_.tensor_parallel > 1) options.grid = world_.get();
    options.host_threads = 1;
    options.near_device = false;
    options.hooks = &hooks_;
    if (request_.with_timeline) options.timeline = &timeline_;
    engine_ = std::make_unique<Engine>(*backend_, *kernels_, data(), options);

    const ModelShape shape =
        value_or_throw(make_model_shape(request_.shape, {.tensor_parallel = request_.tensor_parallel}));
    for (const UnitShape& unit : shape.units) {
      const UnitId id = engine_->add_unit(unit.name, unit.backward_reads_parameters);
      int index = 0;
      for (const ParameterShape& parameter : unit.parameters) {
        engine_->add_parameter(id, parameter.name, parameter.count, parameter.group, parameter.frozen,
                               parameter.replicated);
        trainable_.resize(static_cast<std::size_t>(id) + 1);
        trainable_.back().push_back(index++);
      }
      for (const UnitShape::Tied& tied : unit.tied)
        trainable_.back().push_back(engine_->tie(id, {tied.unit, tied.index}));
    }
    const std::uint64_t sum_bytes = request_.batch * sequence() * request_.shape.hidden * element();
    const std::uint64_t staging = all_reduce_staging_bytes(
        request_.tensor_parallel, std::min(kSumBucketBytes, sum_bytes), options_.dtype);
    const std::uint64_t least = request_.tensor_parallel > 1 ? round_up(sum_bytes, 512) + staging : 0;
    engine_->declare_activations(
        std::max(request_.activation_bytes.value_or(activations.device_bytes()), least));
    expect_splits();
    engine_->commit();
  }
  std::uint64_t element() const { return element_bytes(options_.dtype); }

  void run_step() {
    engine_->step_begin();
    for (int micro_step = 0; micro_step < options_.micro_steps; ++micro_step) {
      engine_->micro_step_begin(micro_step);
      const int last = static_cast<int>(request_.shape.layers) + 1;
      for (int unit = 0; unit <= last; ++unit) {
        const Lease lease = engine_->forward(unit, stream_);
        queue("forward", unit == 0 ? work_.embedding : unit == last ? work_.final : work_.layer);
      }
      for (int unit = last; unit >= 0; --unit) {
        Lease lease = engine_->backward(unit, stream_);
        if (unit > 0 && unit < last && is_recomputed(static_cast<std::uint64_t>(unit - 1)))
          queue("recomputation", work_.recomputed_layer);
        bool accumulate = false;
        for (const int index : trainable_[static_cast<std::size_t>(unit)])
          static_cast<void>(lease.gradient(index, &accumulate));
        queue("backward", unit == 0      ? work_.embedding_backward
                          : unit == last ? work_.final_backward
                                         : work_.layer_backward);
      }
    }
    static_cast<void>(engine_->step({.groups = {{}, {}}}));
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

  const SimulationRequest& request_;
  const ShardingOptions& options_;
  HostClock clock_{HostClock::Mode::kVirtual};
  const ClusterTiming timing_;
  const std::unique_ptr<ModelBackend> backend_;
  const std::unique_ptr<Kernels> kernels_;
  const std::unique_ptr<SimulatedCommunicator> world_;
  RankGrid grid_;
  GridCommunicators lines_;  // Empty without tensor parallelism.
  Timeline timeline_;
  const Stream stream_;
  internal::EngineHooks hooks_;
  TransformerWork work_;
  double model_flops_ = 0;  // A micro-step's.
  double hardware_flops_ = 0;
  std::vector<std::vector<int>> trainable_;  // By unit: the indices in its leases.
  std::unique_ptr<Engine> engine_;
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
  return RankGrid::create({.world_size = request.ranks, .tensor_parallel = request.tensor_parallel}).status();
}

}  // namespace

Result<SimulationResult> simulate(const SimulationRequest& given) {
  SimulationRequest request = given;
  FOREBAY_ASSIGN_OR_RETURN(request.shape, complete_shape(given.shape));
  FOREBAY_RETURN_IF_ERROR(check(request));
  FOREBAY_ASSIGN_OR_RETURN(const ActivationReport activations,
                           make_activation_report({.shape = request.shape,
                                                   .batch = request.batch,
                                                   .sequence = request.sequence,
                                                   .dtype = request.options.dtype,
                                                   .part = {.tensor_parallel = request.tensor_parallel},
                                                   .micro_steps = request.options.micro_steps,
                                                   .recompute_every = request.recompute_every,
                                                   .fused_attention = request.fused_attention,
                                                   .placement = request.activations}));
  try {
    SimulationResult result = SimulatedRank(request, activations).run();
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
