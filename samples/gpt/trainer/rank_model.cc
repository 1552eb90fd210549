#include "trainer/rank_model.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cuda/cublas_products.h"
#include "cuda/image.h"
#include "forebay/agreement.h"
#include "forebay/error.h"
#include "forebay/units.h"
#include "model/host_operations.h"
#include "model/launched_operations.h"

namespace forebay::gpt {
namespace {

EngineOptions engine_options(const TrainerOptions& o, const Text& text, const Text& evaluation_text,
                             int threads, Timeline* timeline, Grid& grid) {
  EngineOptions engine{o};
  engine.forwards_ahead = forwards_ahead(grid.stage());
  if (grid.part_count() > 1) engine.grid = &grid.world();
  engine.counts_replicated = grid.at().tensor == 0;
  if (!o.timeline_file.empty()) engine.timeline = timeline;
  engine.host_threads = threads;
  engine.beta1 = o.beta1;
  engine.beta2 = o.beta2;
  engine.epsilon = o.epsilon;
  engine.loss_scale.initial = o.loss_scale;
  engine.agreement = agreement_of(o);
  engine.agreement.emplace_back("--text", std::to_string(text.hash()));
  engine.agreement.emplace_back("--evaluation-text", std::to_string(evaluation_text.hash()));
  return engine;
}

std::unique_ptr<Operations> make_operations(const TrainerOptions& options, const Rank& rank, Stream stream) {
  const bool plain = options.matmul == "plain";
  if (!rank.on_gpu()) {
    return create_host_operations(plain ? create_plain_matmul() : create_library_matmul(), rank.threads);
  }
  auto library =
      plain ? nullptr : std::make_unique<CublasProducts>(static_cast<CudaBackend&>(*rank.backend), stream);
  try {
    return std::make_unique<LaunchedOperations>(
        *rank.backend, stream,
        LaunchedOperations::Options{
            .image = kernels::kernel_image(), .library = std::move(library), .product_type = options.dtype});
  } catch (const Error& error) {
    if (kernels::kernel_image_is_compiled()) throw;
    throw Error(
        error.status().with_context("this forebay-gpt was built without nvcc, so it has no kernels for a "
                                    "GPU; build it where the CUDA toolkit is installed"));
  }
}

// The least piece of a sum of activations. Smaller: its latency is most of its time.
constexpr std::uint64_t kLeastSumBytes = 64u << 10;

// Sums over the ranks that share every layer. The bucket is no larger than one sum.
TensorGroup make_tensor_group(const TrainerOptions& o, const Rank& rank, Communicator* communicator,
                              Stream stream) {
  const auto ranks = static_cast<std::uint64_t>(o.tensor_parallel);
  const std::uint64_t count = round_up(o.batch * o.model.sequence * o.model.hidden, ranks);
  return TensorGroup(
      {.communicator = communicator,
       .backend = rank.backend.get(),
       .kernels = rank.kernels.get(),
       .stream = stream,
       .bucket_bytes = std::min(std::max(o.bucket_bytes, kLeastSumBytes), count * sizeof(float))});
}

// Threads that share GPUs without NCCL wait for each other inside a call; all other communicators only queue.
PipelineGroup::Options pipeline_options(const TrainerOptions& o, const Rank& rank, Grid& grid,
                                        Stream stream) {
  return {.forward = grid.forward(),
          .backward = grid.backward(),
          .backend = rank.backend.get(),
          .compute = stream,
          .queues = rank.backend->capabilities().host_accessible || uses_nccl(o.communicator)};
}

Gpt::Options model_options(const TrainerOptions& o, const PipelineStage& stage, BlockInputs* inputs) {
  return {.shape = o.model,
          .batch = o.batch,
          .dtype = o.dtype,
          .recompute_every = o.recompute_every,
          .inputs = inputs,
          .dropout = o.dropout,
          .seed = o.seed,
          .stage = stage,
          .passes = static_cast<std::size_t>(passes_in_flight(o, stage))};
}

}  // namespace

RankModel::RankModel(const TrainerOptions& trainer_options, const Rank& opened)
    : options(trainer_options),
      rank(opened),
      communicator(*rank.communicator),
      grid(communicator, grid_options(options)),
      text(training_text(options)),
      evaluation_text(gpt::evaluation_text(options)),
      whole_units(describe_units(options.model)),
      units(part_of(stage_of(whole_units, grid.stage()), grid.tensor_part())),
      compute(*rank.backend, /*queues=*/rank.on_gpu()),
      operations(make_operations(options, rank, compute.stream())),
      tensor_group(make_tensor_group(options, rank, grid.tensor(), compute.stream())),
      pipeline(pipeline_options(options, rank, grid, compute.stream())),
      engine(*rank.backend, *rank.kernels, grid.data(),
             engine_options(options, text, evaluation_text, rank.threads, &timeline, grid)),
      engine_model(engine, units, compute, grid.ends()),
      inputs(place_inputs()),
      gpt(make_gpt(inputs.get())),
      feed(*rank.backend, gpt) {
  const auto check_length = [&](const std::string& option, const Text& given) {
    if (given.size() > options.model.sequence) return;
    throw Error(StatusCode::kInvalidArgument,
                option + " has " + std::to_string(given.size()) + (given.is_bytes() ? " bytes" : " tokens") +
                    ", too few for --sequence " + std::to_string(options.model.sequence) +
                    "; give more with " + option);
  };
  check_length(options.data.empty() ? "--text" : "--data", text);
  if (options.evaluates())
    check_length(options.evaluation_data.empty() ? "--evaluation-text" : "--evaluation-data",
                 evaluation_text);
  compute.run([threads = rank.threads] { set_compute_threads(threads); });
  compute.synchronize();  // Throws when the threads cannot be started.
  engine_model.set_model(gpt, inputs != nullptr ? inputs->device_bytes() : 0);
  engine.commit();
  DevicePtr const saved = engine_model.use_engine_memory();
  if (inputs != nullptr) inputs->use_memory(saved);
}

RankModel::~RankModel() {
  compute.drain();
  pipeline.drain();
}

Gpt RankModel::make_gpt(BlockInputs* block_inputs) {
  return Gpt(model_options(options, grid.stage(), block_inputs), *operations, compute, tensor_group);
}

std::unique_ptr<CheckpointedInputs> RankModel::make_inputs(std::uint64_t device_bytes) {
  return std::make_unique<CheckpointedInputs>(options, grid.stage(), *rank.backend, *grid.activations(),
                                              compute.stream(), &timeline, device_bytes);
}

// Requires: the units are registered with the engine.
std::unique_ptr<CheckpointedInputs> RankModel::place_inputs() {
  if (options.activations == ActivationPlacement::kKeep) return nullptr;
  if (options.activations == ActivationPlacement::kAuto) return place_inputs_in(engine.activation_room());
  return recomputed_layers(options, grid.stage()).empty() ? nullptr : make_inputs(0);
}

// Pipeline stages may choose differently; all ranks agree on whether it succeeded.
std::unique_ptr<CheckpointedInputs> RankModel::place_inputs_in(std::uint64_t room) {
  if (room == 0) return nullptr;  // The engine's commit will fail and say why.
  std::optional<std::uint64_t> device_bytes;
  Status verdict;
  try {
    if (!recomputed_layers(options, grid.stage()).empty()) device_bytes = choose_device_bytes(room);
  } catch (const Error& error) {
    verdict = error.status();
  }
  agree(communicator, verdict);
  return device_bytes ? make_inputs(*device_bytes) : nullptr;
}

std::optional<std::uint64_t> RankModel::choose_device_bytes(std::uint64_t room) {
  const std::unique_ptr<CheckpointedInputs> unlimited = make_inputs(0);
  return choose_activations(options, grid.stage(),
                            {.keep = EngineModel::memory_bytes(make_gpt(nullptr), 0),
                             .elsewhere = EngineModel::memory_bytes(make_gpt(unlimited.get()), 0)},
                            room);
}

std::optional<ParameterId> RankModel::find_parameter(const GptParameter& parameter) const {
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const std::vector<GptParameter>& mine = units[unit].parameters;
    const auto place = std::find_if(mine.begin(), mine.end(),
                                    [&](const GptParameter& one) { return one.name == parameter.name; });
    if (place != mine.end())
      return ParameterId{static_cast<UnitId>(unit), static_cast<int>(place - mine.begin())};
  }
  return std::nullopt;
}

std::uint64_t RankModel::offloaded_parameters() const {
  const ModelShape& model = engine.model();
  std::uint64_t count = 0;
  for (auto u = static_cast<std::size_t>(engine.plan().device_units); u < model.units.size(); ++u) {
    for (const ParameterShape& parameter : model.units[u].parameters) count += parameter.count;
  }
  return count;
}

bool RankModel::offloads_to_files() const {
  return options.offload != Offload::kNone && options.tier == Tier::kFile;
}

std::uint64_t RankModel::samples_per_step() const {
  return static_cast<std::uint64_t>(grid.shape().data_parallel()) *
         static_cast<std::uint64_t>(options.micro_steps) * options.batch;
}

double RankModel::tokens_per_step() const {
  return static_cast<double>(samples_per_step() * options.model.sequence);
}

std::vector<std::string> RankModel::of_each_stage(const std::string& mine) {
  const std::vector<std::string> parts = grid.of_each_part(mine);
  std::vector<std::string> stages;
  for (std::size_t part = 0; part < parts.size(); part += grid.tensor_part().size)
    stages.push_back(parts[part]);
  return stages;
}

}  // namespace forebay::gpt
