#include "trainer/trainer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <utility>

#include "cuda/cublas_products.h"
#include "cuda/image.h"
#include "forebay/agreement.h"
#include "forebay/communicator.h"
#include "forebay/cuda_backend.h"
#include "forebay/cuda_devices.h"
#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/gloo_communicator.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "forebay/local_communicator.h"
#include "forebay/nccl_communicator.h"
#include "forebay/shm_communicator.h"
#include "forebay/units.h"
#include "model/batch_feed.h"
#include "model/gpt.h"
#include "model/host_operations.h"
#include "model/launched_operations.h"
#include "model/tensor_group.h"
#include "model/text.h"
#include "trainer/checkpointed_inputs.h"
#include "trainer/compute_stream.h"
#include "trainer/engine_model.h"
#include "trainer/files.h"
#include "trainer/grid.h"
#include "trainer/initial.h"
#include "trainer/parted_state.h"
#include "trainer/pipeline_group.h"
#include "trainer/progress.h"
#include "trainer/safetensors.h"

namespace forebay::gpt {
namespace {

using Clock = std::chrono::steady_clock;
using CommunicatorMaker = std::function<Result<std::unique_ptr<Communicator>>(Backend&, Kernels&)>;

std::atomic<bool> stop_requested{false};
std::atomic<bool> steps_have_begun{false};  // And look whether they should stop.
std::atomic<bool> output_has_failed{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

struct RankPlace {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;  // Ranks that share this host's cores.
  bool is_process = false;
};

// The kinds of operations that carry payload.
constexpr const char* kCountedOperations[] = {"reduce_scatter", "all_gather", "exchange", "send", "recv"};

EngineOptions engine_options(const TrainerOptions& o, const Text& text, int threads, Timeline* timeline,
                             Grid& grid) {
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
  return engine;
}

// The data cursor, kept with the saved state: what a resumed run needs to go on with the same samples, and
// what of the model the sizes of its parameters do not tell.
struct Cursor {
  std::uint64_t samples = 0;  // Read so far, over all ranks.
  std::uint64_t seed = 0;
  std::uint64_t text = 0;
  std::uint64_t heads = 0;
  std::uint64_t part = 0;  // Of the grid.

  std::string to_text() const {
    return nlohmann::ordered_json(
               {{"samples", samples}, {"seed", seed}, {"text", text}, {"heads", heads}, {"part", part}})
        .dump();
  }

  static Cursor from_text(const std::string& saved) {
    const auto json = nlohmann::json::parse(saved, nullptr, /*allow_exceptions=*/false);
    Cursor cursor;
    const auto read = [&](const char* key, std::uint64_t* value) {
      if (!json.is_object() || !json.contains(key) || !json[key].is_number_unsigned()) {
        throw Error(StatusCode::kCorruption,
                    std::string("the saved state was not saved by this trainer: its data "
                                "cursor has no ") +
                        key + "; give another directory with --load-state");
      }
      *value = json[key].get<std::uint64_t>();
    };
    read("samples", &cursor.samples);
    read("seed", &cursor.seed);
    read("text", &cursor.text);
    read("heads", &cursor.heads);
    read("part", &cursor.part);
    return cursor;
  }
};

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// What a rank trains on.
struct Rank {
  RankPlace place;
  int threads = 1;
  int ordinal = -1;  // Of its GPU.
  // Of what carries control operations beside NCCL; none without it.
  std::unique_ptr<Backend> control_backend;
  std::unique_ptr<Kernels> control_kernels;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Kernels> kernels;
  std::unique_ptr<Communicator> communicator;

  bool on_gpu() const { return ordinal >= 0; }
};

std::unique_ptr<Operations> make_operations(const TrainerOptions& options, const Rank& rank, Stream stream) {
  const bool plain = options.matmul == "plain";
  if (!rank.on_gpu()) {
    return std::make_unique<HostOperations>(plain ? create_plain_matmul() : create_library_matmul(),
                                            rank.threads);
  }
  auto library = plain ? nullptr : std::make_unique<CublasProducts>(rank.ordinal, stream);
  try {
    return std::make_unique<LaunchedOperations>(
        *rank.backend, stream,
        LaunchedOperations::Options{
            .image = kernels::kernel_image(), .library = std::move(library), .product_type = options.dtype});
  } catch (const Error& error) {
    if (kernels::kernel_image_is_compiled()) throw;
    throw Error(error.status().with_context(
        "this forebay-gpt was built without nvcc, so it has no kernels for a GPU; build it where the CUDA "
        "toolkit is installed"));
  }
}

// What steps read from files and write to them. The engine counts everything, so its users leave stretches
// that are not steps out.
class FileMeter {
 public:
  FileMeter(Engine& engine, bool enabled) : engine_(engine), enabled_(enabled) {}

  void begin() { begin_ = now(); }
  void end() {
    const Moved moved = now();
    sum_.read += moved.read - begin_.read;
    sum_.written += moved.written - begin_.written;
  }
  void forget() {
    sum_ = {};
    begin();
  }
  double read_bytes() const { return static_cast<double>(sum_.read); }
  double written_bytes() const { return static_cast<double>(sum_.written); }

 private:
  struct Moved {
    std::uint64_t read = 0;
    std::uint64_t written = 0;
  };
  Moved now() {
    if (!enabled_) return {};  // Asking waits for the engine.
    const EngineStatistics statistics = engine_.statistics();
    return {statistics.file_read_bytes, statistics.file_written_bytes};
  }

  Engine& engine_;
  const bool enabled_;
  Moved begin_;
  Moved sum_;
};

// What ranks that share every layer do together, in buckets no larger than what there is to add up.
TensorGroup make_tensor_group(const TrainerOptions& o, const Rank& rank, Communicator* communicator,
                              Stream stream) {
  const auto ranks = static_cast<std::uint64_t>(o.tensor_parallel);
  const std::uint64_t count = round_up(o.batch * o.model.sequence * o.model.hidden, ranks);
  return TensorGroup({.communicator = communicator,
                      .backend = rank.backend.get(),
                      .kernels = rank.kernels.get(),
                      .stream = stream,
                      .bucket_bytes = std::min(o.bucket_bytes, count * sizeof(float))});
}

// Where the ranks are threads whose memory the host does not reach, they wait in the call for each other.
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

// One rank: the model under the engine. Begins and ends on the thread that drives it.
class Trainer {
 public:
  Trainer(const TrainerOptions& options, const Rank& rank)
      : options_(options),
        rank_(rank),
        place_(rank.place),
        communicator_(*rank.communicator),
        grid_(communicator_, grid_options(options)),
        text_(Text::read(options.text)),
        whole_units_(describe_units(options.model)),
        units_(part_of(stage_of(whole_units_, grid_.stage()), grid_.tensor_part())),
        compute_(*rank.backend, /*queues=*/rank.on_gpu()),
        operations_(make_operations(options, rank, compute_.stream())),
        group_(make_tensor_group(options, rank, grid_.tensor(), compute_.stream())),
        pipeline_(pipeline_options(options, rank, grid_, compute_.stream())),
        engine_(*rank.backend, *rank.kernels, grid_.data(),
                engine_options(options, text_, rank.threads, &timeline_, grid_)),
        model_(engine_, units_, compute_, grid_.ends()),
        inputs_(place_inputs()),
        gpt_(make_gpt(inputs_.get())),
        feed_(*rank.backend, gpt_.row_count()) {
    if (text_.bytes().size() <= options.model.sequence) {
      throw Error(StatusCode::kInvalidArgument,
                  "the text has " + std::to_string(text_.bytes().size()) + " bytes, too few for --sequence " +
                      std::to_string(options.model.sequence) + "; give more with --text");
    }
    compute_.run([threads = rank.threads] { set_compute_threads(threads); });
    compute_.synchronize();  // Throws when they are not to be had.
    model_.set_model(gpt_, inputs_ != nullptr ? inputs_->device_bytes() : 0);
    engine_.commit();
    DevicePtr const saved = model_.use_engine_memory();
    if (inputs_ != nullptr) inputs_->use_memory(saved);
    say_what_was_chosen();
    say_where_states_are();
    set_weights();
  }
  // What is queued uses the members that go before the stream.
  ~Trainer() {
    compute_.drain();
    pipeline_.drain();
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  TrainingReport train() {
    TrainingReport report;
    report.first_step = engine_.attempted_steps();
    Progress progress({.enabled = options_.progress && place_.rank == 0,
                       .first_step = report.first_step,
                       .steps = options_.steps,
                       .tokens_per_step = tokens_per_step()});
    std::vector<double> step_ms;
    FileMeter files(engine_, offloads_to_files());
    files.begin();
    std::uint64_t saved_at = UINT64_MAX;
    while (engine_.attempted_steps() < options_.steps && !report.interrupted) {
      const Clock::time_point start = Clock::now();
      const StepResult result = step();
      step_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
      report.loss.push_back(result.metric_sum / grid_.shape().data_parallel());
      report.grad_norm.push_back(result.grad_norm);
      report.interrupted = result.stop && engine_.attempted_steps() < options_.steps;
      progress.show(engine_.attempted_steps(), report.loss.back(), result.grad_norm);
      const bool last = engine_.attempted_steps() == options_.steps || report.interrupted;
      if (step_ms.size() == 1 && !last) files.forget();
      if (options_.save_every > 0 && engine_.attempted_steps() % options_.save_every == 0) {
        files.end();
        save();
        files.begin();
        saved_at = engine_.attempted_steps();
      }
    }
    files.end();
    report.steps = engine_.attempted_steps();
    fill_report(report, step_ms, files);
    if (!options_.save_state.empty() && saved_at != report.steps) save();
    if (!options_.export_file.empty() && !report.interrupted) export_weights();
    if (!options_.timeline_file.empty()) write_timeline();
    throw_if_error(communicator_.barrier());  // No rank leaves while another still needs it.
    return report;
  }

 private:
  Gpt make_gpt(BlockInputs* inputs) {
    return Gpt(model_options(options_, grid_.stage(), inputs), *operations_, compute_, group_);
  }

  std::unique_ptr<CheckpointedInputs> make_inputs(std::uint64_t device_bytes) {
    return std::make_unique<CheckpointedInputs>(options_, grid_.stage(), *rank_.backend, *grid_.activations(),
                                                compute_.stream(), &timeline_, device_bytes);
  }

  // After the units are registered.
  std::unique_ptr<CheckpointedInputs> place_inputs() {
    if (options_.activations == ActivationPlacement::kKeep) return nullptr;
    if (options_.activations == ActivationPlacement::kAuto) return place_inputs_in(engine_.activation_room());
    return recomputed_layers(options_, grid_.stage()).empty() ? nullptr : make_inputs(0);
  }

  // The stages of a pipeline need not come to the same.
  std::unique_ptr<CheckpointedInputs> place_inputs_in(std::uint64_t room) {
    if (room == 0) return nullptr;  // The engine's commit says what else has to be smaller.
    std::optional<std::uint64_t> device_bytes;
    Status verdict;
    try {
      if (!recomputed_layers(options_, grid_.stage()).empty()) device_bytes = choose_device_bytes(room);
    } catch (const Error& error) {
      verdict = error.status();
    }
    agree(communicator_, verdict);
    return device_bytes ? make_inputs(*device_bytes) : nullptr;
  }

  std::optional<std::uint64_t> choose_device_bytes(std::uint64_t room) {
    const std::unique_ptr<CheckpointedInputs> unlimited = make_inputs(0);
    return choose_activations(options_, grid_.stage(),
                              {.keep = EngineModel::memory_bytes(make_gpt(nullptr), 0),
                               .elsewhere = EngineModel::memory_bytes(make_gpt(unlimited.get()), 0)},
                              room);
  }

  // Where this rank has a parameter of the whole model, if it does.
  std::optional<ParameterId> find_parameter(const GptParameter& parameter) const {
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      const std::vector<GptParameter>& mine = units_[unit].parameters;
      const auto place = std::find_if(mine.begin(), mine.end(),
                                      [&](const GptParameter& one) { return one.name == parameter.name; });
      if (place != mine.end())
        return ParameterId{static_cast<UnitId>(unit), static_cast<int>(place - mine.begin())};
    }
    return std::nullopt;
  }

  void set_weights() {
    cursor_ = {.samples = 0,
               .seed = options_.seed,
               .text = text_.hash(),
               .heads = options_.model.heads,
               .part = static_cast<std::uint64_t>(grid_.part())};
    if (!options_.load_state.empty()) {
      load();
      return;
    }
    const ParameterSetter set = [&](std::size_t unit, std::size_t index, std::span<const float> values) {
      const GptParameter& parameter = whole_units_[unit].parameters[index];
      if (const std::optional<ParameterId> place = find_parameter(parameter))
        engine_.set_parameter(*place, take_part(parameter, grid_.tensor_part(), values));
    };
    if (options_.initial_file.empty()) {
      set_random(whole_units_, options_.seed, set);
    } else {
      set_from_file(whole_units_, options_.initial_file, set);
    }
  }

  void load() {
    const std::string directory = saved_part(grid_, options_.load_state);
    const Cursor saved = Cursor::from_text(engine_.load_state(directory));
    const auto refuse = [&](const std::string& what) {
      throw Error(StatusCode::kInvalidArgument, "--load-state " + options_.load_state +
                                                    " was saved with another " + what +
                                                    "; resume with the same one");
    };
    if (saved.seed != cursor_.seed) refuse("--seed, " + std::to_string(saved.seed));
    if (saved.text != cursor_.text) refuse("--text");
    if (saved.heads != cursor_.heads) refuse("--heads, " + std::to_string(saved.heads));
    if (saved.part != cursor_.part) {
      throw Error(StatusCode::kCorruption, "--load-state: " + directory + " holds part " +
                                               std::to_string(saved.part) + " of the model, not part " +
                                               std::to_string(cursor_.part) +
                                               ": files were moved; restore them, or give another directory");
    }
    cursor_ = saved;
  }

  void save() {
    save_parts(grid_, options_.save_state, engine_.attempted_steps(),
               [&](const std::string& directory) { engine_.save_state(directory, cursor_.to_text()); });
  }

  StepResult step() {
    steps_have_begun.store(true, std::memory_order_relaxed);
    engine_.step_begin();
    run_passes();
    compute_.synchronize();
    if (inputs_ != nullptr) inputs_->check();

    Hyperparameters hyperparameters;
    hyperparameters.groups = {{.lr = options_.lr, .weight_decay = options_.weight_decay},
                              {.lr = options_.lr, .weight_decay = 0.0}};
    hyperparameters.clip = options_.clip;
    // The ranks that share a batch know the same loss, on the last stage: one of them tells it.
    if (grid_.stage().is_last()) {
      const double loss = mean(feed_.take_losses());
      hyperparameters.metric = grid_.at().tensor == 0 ? loss : 0;
    }
    hyperparameters.stop = stop_requested.load(std::memory_order_relaxed);
    const StepResult result = engine_.step(hyperparameters);
    cursor_.samples += samples_per_step();
    return result;
  }

  // One forward, one backward, once as many forward passes are ahead as there are stages behind this one.
  void run_passes() {
    StageLink* const forward = pipeline_.forward();
    StageLink* const backward = pipeline_.backward();
    const int ahead = forwards_ahead(grid_.stage());
    if (forward != nullptr) forward->receive(gpt_.input(0), gpt_.stage_bytes());
    if (backward != nullptr && pipeline_.asks_ahead())
      backward->receive(gpt_.gradient(0), gpt_.stage_bytes());
    int forwards = 0;
    for (int micro_step = 0; micro_step < options_.micro_steps; ++micro_step) {
      while (forwards < options_.micro_steps && forwards - micro_step <= ahead) {
        run_forward(forwards++);
        most_passes_in_flight_ =
            std::max(most_passes_in_flight_, static_cast<std::uint64_t>(forwards - micro_step));
      }
      run_backward(micro_step);
    }
  }

  void run_forward(int micro_step) {
    const std::size_t sequence = options_.model.sequence;
    const BatchPlace place = batch_place(micro_step);
    const BatchFeed::Batch batch = feed_.next();
    for (std::size_t b = 0; b < options_.batch; ++b) {
      copy_sample(text_, options_.seed, place.sample() + b, batch.tokens.subspan(b * sequence, sequence),
                  batch.targets.subspan(b * sequence, sequence));
    }
    gpt_.begin(pass_of(place));
    feed_.send(gpt_, compute_.stream());
    StageLink* const link = pipeline_.forward();
    if (link == nullptr) return model_.forward_pass(micro_step);
    link->wait_for_received();
    link->wait_for_place(place.micro_step);
    model_.forward_pass(micro_step);
    link->send(gpt_.output(place.micro_step), gpt_.stage_bytes(), place.micro_step);
    if (micro_step + 1 < options_.micro_steps)
      link->receive(gpt_.input(place.micro_step + 1), gpt_.stage_bytes());
  }

  void run_backward(int micro_step) {
    const BatchPlace place = batch_place(micro_step);
    gpt_.begin(pass_of(place));
    if (StageLink* const link = pipeline_.backward(); link != nullptr) {
      if (!pipeline_.asks_ahead()) link->receive(gpt_.gradient(place.micro_step), gpt_.stage_bytes());
      link->wait_for_received();
      link->wait_for_place(place.micro_step);
      model_.backward_pass();
      link->send(gpt_.gradient(place.micro_step), gpt_.stage_bytes(), place.micro_step);
      if (pipeline_.asks_ahead() && micro_step + 1 < options_.micro_steps)
        link->receive(gpt_.gradient(place.micro_step + 1), gpt_.stage_bytes());
    } else {
      model_.backward_pass();
    }
    model_.end_backward_pass();
    if (grid_.stage().is_last()) feed_.receive(gpt_, compute_.stream());
  }

  BatchPlace batch_place(int micro_step) const {
    return {.first_sample = cursor_.samples,
            .micro_step = static_cast<std::uint64_t>(micro_step),
            .rank = static_cast<std::uint64_t>(grid_.at().data),
            .rank_count = static_cast<std::uint64_t>(grid_.shape().data_parallel()),
            .batch = options_.batch};
  }
  Pass pass_of(const BatchPlace& place) const {
    return {.step = engine_.attempted_steps(),
            .micro_step = place.micro_step,
            .first_sample = place.rank * options_.batch};
  }

  std::uint64_t samples_per_step() const {
    return static_cast<std::uint64_t>(grid_.shape().data_parallel()) *
           static_cast<std::uint64_t>(options_.micro_steps) * options_.batch;
  }
  double tokens_per_step() const { return static_cast<double>(samples_per_step() * options_.model.sequence); }

  bool offloads_to_files() const {
    return options_.offload != Offload::kNone && options_.tier == Tier::kFile;
  }

  void say_what_was_chosen() {
    say_bucket();
    say_pipeline();
    if (options_.activations != ActivationPlacement::kAuto) return;
    const std::vector<std::string> choices =
        of_each_stage(inputs_ == nullptr ? "keep: the device has room for the inputs of all recomputed blocks"
                                         : describe_choice(inputs_->plan()));
    if (place_.rank != 0 || !options_.progress) return;
    const bool same = all_alike(choices);
    for (std::size_t stage = 0; stage < (same ? 1 : choices.size()); ++stage) {
      std::fprintf(stderr, "forebay-gpt: activations auto%s: %s\n",
                   same ? "" : (" at pipeline stage " + std::to_string(stage)).c_str(),
                   choices[stage].c_str());
    }
  }

  // What the ranks of each stage of the pipeline say, which those that share its layers say alike. All ranks
  // at once.
  std::vector<std::string> of_each_stage(const std::string& mine) {
    const std::vector<std::string> parts = grid_.of_each_part(mine);
    std::vector<std::string> stages;
    for (std::size_t part = 0; part < parts.size(); part += grid_.tensor_part().size)
      stages.push_back(parts[part]);
    return stages;
  }

  static bool all_alike(const std::vector<std::string>& stages) {
    return std::equal(stages.begin() + 1, stages.end(), stages.begin());
  }

  void say_pipeline() {
    const int stages = grid_.shape().pipeline_parallel();
    if (stages == 1 || place_.rank != 0 || !options_.progress) return;
    const double waits = 100.0 * (stages - 1) / (options_.micro_steps + stages - 1);
    std::fprintf(stderr,
                 "forebay-gpt: pipeline of %d stages, %d micro-steps: each stage waits %.0f %% of a step at "
                 "least; more --micro-steps make it less\n",
                 stages, options_.micro_steps, waits);
  }

  void say_bucket() {
    const WireSpeed speed = engine_.statistics().wire_speed;
    if (place_.rank != 0 || !options_.progress || speed.bytes_per_second <= 0) return;
    std::fprintf(stderr, "forebay-gpt: buckets of %s: a collective takes %.0f us and as long as %s/s need\n",
                 format_bytes(engine_.plan().options.bucket_bytes).c_str(), speed.latency_seconds * 1e6,
                 format_bytes(static_cast<std::uint64_t>(speed.bytes_per_second)).c_str());
  }

  // Where states go and how fast it may be: what a person should see at once.
  void say_where_states_are() {
    if (!options_.progress || place_.rank != 0 || options_.offload == Offload::kNone) return;
    const std::string store = engine_.statistics().store_description;
    const double share = 100.0 * static_cast<double>(offloaded_parameters()) /
                         static_cast<double>(parameter_count(options_.model));
    std::fprintf(
        stderr,
        "forebay-gpt: offload %s to %s: %.0f %% of the model, %d of %zu units stay on the device%s%s\n",
        offload_name(options_.offload), tier_name(options_.tier), share, engine_.plan().device_units,
        engine_.model().units.size(), store.empty() ? "" : "; ", store.c_str());
  }

  std::uint64_t offloaded_parameters() const {
    const ModelShape& model = engine_.model();
    std::uint64_t count = 0;
    for (auto u = static_cast<std::size_t>(engine_.plan().device_units); u < model.units.size(); ++u) {
      for (const ParameterShape& parameter : model.units[u].parameters) count += parameter.count;
    }
    return count;
  }

  void fill_report(TrainingReport& report, std::vector<double> step_ms, const FileMeter& files) {
    const EngineStatistics statistics = engine_.statistics();
    const double steps = std::max<double>(static_cast<double>(step_ms.size()), 1);
    if (step_ms.size() > 1) step_ms.erase(step_ms.begin());  // The first meets cold caches and new pages.
    RankReport mine;
    mine.parameters = engine_.model().parameter_count();
    mine.peak_bytes = statistics.peak;
    mine.planned_bytes = statistics.planned;
    mine.reserved_bytes = statistics.peak_reserved_bytes;
    mine.planned_reserved_bytes = statistics.planned_reserved_bytes;
    mine.host_bytes = statistics.host_bytes;
    mine.planned_host_bytes = statistics.planned_host_bytes;
    mine.file_bytes = statistics.file_bytes;
    mine.planned_file_bytes = statistics.planned_file_bytes;
    const double metered_steps = std::max<double>(static_cast<double>(step_ms.size()), 1);
    mine.file_read_bytes_per_step = files.read_bytes() / metered_steps;
    mine.file_written_bytes_per_step = files.written_bytes() / metered_steps;
    const FileBytes planned_files = engine_.plan().file_bytes;
    mine.planned_file_read_bytes_per_step = planned_files.read_per_step;
    mine.planned_file_written_bytes_per_step = planned_files.written_per_step;
    mine.sent_bytes_per_step = static_cast<double>(statistics.traffic.sent) / steps;
    mine.received_bytes_per_step = static_cast<double>(statistics.traffic.received) / steps;
    mine.planned_sent_bytes_per_step = statistics.planned_wire_per_step.sent;
    mine.planned_received_bytes_per_step = statistics.planned_wire_per_step.received;
    if (Communicator* const tensor = grid_.tensor(); tensor != nullptr) {
      const Traffic traffic = tensor->traffic();
      mine.tensor_sent_bytes_per_step = static_cast<double>(traffic.sent_bytes) / steps;
      mine.tensor_received_bytes_per_step = static_cast<double>(traffic.received_bytes) / steps;
    }
    if (grid_.forward() != nullptr) {
      for (Communicator* const stages : {grid_.forward(), grid_.backward()}) {
        const Traffic traffic = stages->traffic();
        mine.pipeline_sent_bytes_per_step += static_cast<double>(traffic.sent_bytes) / steps;
        mine.pipeline_received_bytes_per_step += static_cast<double>(traffic.received_bytes) / steps;
      }
    }
    mine.most_passes_in_flight = most_passes_in_flight_;
    if (inputs_ != nullptr) {
      const ActivationStatistics saved = inputs_->statistics();
      const ActivationPlan& plan = inputs_->plan();
      mine.saved_device_bytes = saved.device_bytes;
      mine.planned_saved_device_bytes = plan.device_bytes();
      mine.saved_host_bytes = saved.host_bytes;
      mine.planned_saved_host_bytes = plan.host_bytes();
      mine.saved_file_bytes = saved.file_bytes;
      mine.planned_saved_file_bytes = plan.file_bytes;
      mine.saved_sent_bytes_per_step = static_cast<double>(saved.traffic.sent_bytes) / steps;
      mine.planned_saved_sent_bytes_per_step =
          plan.wire_per_micro_batch.sent * static_cast<std::uint64_t>(options_.micro_steps);
    }
    mine.step_ms = step_ms.empty() ? 0 : mean(step_ms);

    if (!options_.timeline_file.empty()) {
      const Exposure communication = exposure(timeline_.spans(), "engine", "trainer");
      mine.communication_ms_per_step = static_cast<double>(communication.busy.count()) / 1e6 / steps;
      mine.exposed_communication_ms_per_step =
          static_cast<double>(communication.exposed.count()) / 1e6 / steps;
    }

    report.traffic = gather_traffic();
    static_assert(std::is_trivially_copyable_v<RankReport>);
    report.ranks.resize(static_cast<std::size_t>(place_.size));
    throw_if_error(communicator_.exchange(std::as_bytes(std::span(&mine, 1)),
                                          std::as_writable_bytes(std::span(report.ranks))));
    report.training = training_of(options_);
    report.training.emplace_back("text", std::to_string(text_.hash()));
    report.world_size = place_.size;
    report.tensor_parallel = grid_.shape().tensor_parallel();
    report.data_parallel = grid_.shape().data_parallel();
    report.pipeline_parallel = grid_.shape().pipeline_parallel();
    report.recompute = recompute_name(options_);
    report.activations = chosen_activations();
    report.dropout = options_.dropout;
    report.sharding = options_;
    report.sharding.bucket_bytes = engine_.plan().options.bucket_bytes;
    report.offloaded_parameters = offloaded_parameters();
    report.store = statistics.store_description;
    report.communicator = communicator_.name();
    report.device = rank_.on_gpu() ? rank_.backend->capabilities().name : "host";
    report.matmul = operations_->matmul();
    report.compute_threads = rank_.threads;
    report.parameters = parameter_count(options_.model);
    if (options_.offload_auto) {
      report.sharding.offload_fraction =
          static_cast<double>(report.offloaded_parameters) / static_cast<double>(report.parameters);
    }
    const double step_seconds = report.ranks.front().step_ms / 1e3;
    report.tokens_per_second = step_seconds > 0 ? tokens_per_step() / step_seconds : 0;
    report.digest = digest();
  }

  std::string chosen_activations() {
    if (options_.activations != ActivationPlacement::kAuto) return activations_name(options_);
    const std::vector<std::string> names =
        of_each_stage(inputs_ == nullptr ? "keep" : activations_name(inputs_->plan()));
    std::string text = names.front();
    if (all_alike(names)) return text;
    for (std::size_t stage = 1; stage < names.size(); ++stage) text += ", " + names[stage];
    return text;
  }

  std::string digest() {
    std::string joined;
    for (const std::string& part : grid_.of_each_part(engine_.digest()))
      joined += (joined.empty() ? "" : "+") + part;
    return joined;
  }

  // What every rank's communicator has counted so far, for all kinds that any has used.
  std::vector<std::vector<OperationReport>> gather_traffic() {
    const std::vector<OperationTraffic> mine = grid_.operation_traffic(engine_.operation_traffic());
    const auto size = static_cast<std::size_t>(place_.size);
    std::vector<std::vector<OperationReport>> all(size);
    for (const char* kind : kCountedOperations) {
      std::vector<std::uint64_t> words(1 + 2 * size);
      for (const OperationTraffic& one : mine) {
        if (std::string_view(one.operation) != kind) continue;
        words[0] = one.count;
        for (std::size_t peer = 0; peer < size; ++peer) {
          words[1 + peer] = one.peers[peer].sent_bytes;
          words[1 + size + peer] = one.peers[peer].received_bytes;
        }
      }
      std::vector<std::uint64_t> by_rank(words.size() * size);
      throw_if_error(communicator_.exchange(std::as_bytes(std::span(words)),
                                            std::as_writable_bytes(std::span(by_rank))));
      for (std::size_t rank = 0; rank < size; ++rank) {
        const auto first = by_rank.begin() + static_cast<std::ptrdiff_t>(rank * words.size());
        if (*first == 0) continue;
        const auto middle = first + 1 + static_cast<std::ptrdiff_t>(size);
        all[rank].push_back(
            {kind, *first, {first + 1, middle}, {middle, middle + static_cast<std::ptrdiff_t>(size)}});
      }
    }
    return all;
  }

  void write_timeline() {
    static_cast<void>(engine_.statistics());  // Waits for what is queued.
    std::vector<std::vector<Timeline::Span>> spans(static_cast<std::size_t>(place_.rank) + 1);
    spans.back() = timeline_.spans();
    try {
      write_file(timeline_file(options_, place_.rank), timeline_json(spans));
    } catch (const Error& error) {  // Of no weight beside what was trained.
      std::fprintf(stderr, "forebay-gpt: %s; all else is there\n", error.status().message().c_str());
      output_has_failed = true;
    }
  }

  // The parts of `parameter` that the ranks have, put together.
  std::vector<float> whole_parameter(const GptParameter& parameter, std::span<const float> values) {
    Communicator* const tensor = grid_.tensor();
    if (tensor == nullptr) return {values.begin(), values.end()};
    TensorPart part = grid_.tensor_part();
    std::vector<float> parts(values.size() * part.size);
    throw_if_error(tensor->exchange(std::as_bytes(values), std::as_writable_bytes(std::span(parts))));
    std::vector<float> whole(parameter.count());
    for (part.rank = 0; part.rank < part.size; ++part.rank)
      put_part(parameter, part, std::span(parts).subspan(part.rank * values.size(), values.size()), whole);
    return whole;
  }

  void export_weights() {
    std::unique_ptr<SafetensorsWriter> writer;
    if (place_.rank == 0) {
      std::vector<TensorHeader> headers;
      for (const GptUnit& unit : whole_units_) {
        for (const GptParameter& parameter : unit.parameters)
          headers.push_back({parameter.name, parameter.shape});
      }
      writer = std::make_unique<SafetensorsWriter>(options_.export_file, headers);
    }
    for (int stage = 0; stage < grid_.shape().pipeline_parallel(); ++stage) export_stage(stage, writer.get());
    if (writer != nullptr) writer->finish();
  }

  // The parameters that no stage before has, in the order of the model. Every rank goes through those of
  // every stage.
  void export_stage(int stage, SafetensorsWriter* writer) {
    std::vector<const GptParameter*> parameters;
    for (const GptUnit& unit : whole_units_) {
      for (const GptParameter& parameter : unit.parameters) {
        if (stage_that_has(parameter) == stage) parameters.push_back(&parameter);
      }
    }
    std::size_t index = 0;
    const auto write = [&](std::span<const float> mine) {
      const GptParameter& parameter = *parameters[index++];
      const std::vector<float> whole = from_stage(stage, parameter, whole_parameter(parameter, mine));
      if (writer != nullptr) writer->write(whole);
    };
    if (grid_.at().pipeline == stage) {
      engine_.visit_parameters([&](const ParameterShape& shape, std::span<const float> values) {
        if (index < parameters.size() && shape.name == parameters[index]->name) write(values);
      });
    } else {
      while (index < parameters.size())
        write(std::vector<float>(part_of(*parameters[index], grid_.tensor_part()).count()));
    }
  }

  int stage_that_has(const GptParameter& parameter) const {
    const auto count = static_cast<std::size_t>(grid_.shape().pipeline_parallel());
    for (std::size_t stage = 0; stage + 1 < count; ++stage) {
      for (const GptUnit& unit : stage_of(whole_units_, {stage, count})) {
        for (const GptParameter& one : unit.parameters) {
          if (one.name == parameter.name) return static_cast<int>(stage);
        }
      }
    }
    return static_cast<int>(count) - 1;
  }

  // What that stage gives, on all of them.
  std::vector<float> from_stage(int stage, const GptParameter& parameter, std::vector<float> mine) {
    Communicator* const stages = grid_.forward();
    if (stages == nullptr) return mine;
    std::vector<float> all(parameter.count() * static_cast<std::size_t>(stages->size()));
    throw_if_error(stages->exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
    const auto place = all.begin() + static_cast<std::ptrdiff_t>(parameter.count()) * stage;
    return {place, place + static_cast<std::ptrdiff_t>(parameter.count())};
  }

  const TrainerOptions& options_;
  const Rank& rank_;
  const RankPlace place_;
  Communicator& communicator_;
  Grid grid_;
  const Text text_;
  const std::vector<GptUnit> whole_units_;
  const std::vector<GptUnit> units_;  // As this rank has them.
  ComputeStream compute_;             // Outlives the engine.
  const std::unique_ptr<Operations> operations_;
  TensorGroup group_;
  Timeline timeline_;  // Outlives the engine.
  PipelineGroup pipeline_;
  Engine engine_;
  EngineModel model_;
  std::unique_ptr<CheckpointedInputs> inputs_;  // In the engine's memory. Null: the model keeps them.
  Gpt gpt_;
  BatchFeed feed_;
  Cursor cursor_;
  std::uint64_t most_passes_in_flight_ = 0;
};

// Ranks that are threads hand each other device memory, which takes GPUs that reach each other's.
void check_peers_among(int count) {
  const CudaSystem system = value_or_throw(read_cuda_system());
  for (const CudaDevice& device : system.devices) {
    for (int other = 0; other < count; ++other) {
      if (device.ordinal >= count || other == device.ordinal) continue;
      const std::vector<int>& peers = device.peer_ordinals;
      if (std::find(peers.begin(), peers.end(), other) != peers.end()) continue;
      throw Error(StatusCode::kUnsupported,
                  "cuda:" + std::to_string(other) +
                      " cannot reach the memory of cuda:" + std::to_string(device.ordinal) +
                      ", which ranks on both need; put all on one (--device cuda:0), or name those that do "
                      "reach each other in CUDA_VISIBLE_DEVICES (forebay devices lists peers)");
    }
  }
}

// NCCL refuses two ranks on one GPU, unless it takes them for ranks of two hosts. Processes may each be shown
// another GPU, which is then for NCCL to judge.
void check_a_gpu_each(const DeviceChoice& choice, const RankPlace& place, int count) {
  const int gpus = choice.ordinal ? 1 : count;
  if (place.local_size <= gpus) return;
  const auto is_set = [](const char* variable) { return std::getenv(variable) != nullptr; };
  if (place.is_process && (is_set("NCCL_HOSTID") || is_set("CUDA_VISIBLE_DEVICES"))) return;
  throw Error(StatusCode::kInvalidArgument,
              "--communicator nccl needs a GPU for each rank, because NCCL refuses two on one, and " +
                  std::to_string(place.local_size) + " ranks of this host have " + std::to_string(gpus) +
                  "; start fewer, name no single GPU in --device, or use --communicator local, whose ranks "
                  "share GPUs");
}

// The GPU of a rank: the one that was named, or they take them in turn.
int choose_ordinal(const TrainerOptions& options, const RankPlace& place) {
  const DeviceChoice& choice = options.device;
  const int count = value_or_throw(CudaBackend::device_count());
  if (count == 0) {
    throw Error(
        StatusCode::kUnavailable,
        "there is a CUDA driver and no GPU that it shows; unset CUDA_VISIBLE_DEVICES, or use --device "
        "host");
  }
  if (uses_nccl(options.communicator)) {
    check_a_gpu_each(choice, place, count);
    return choice.ordinal.value_or(place.local_rank % count);
  }
  if (choice.ordinal) return *choice.ordinal;
  if (const int used = std::min(count, place.size); used > 1) check_peers_among(used);
  return place.rank % count;
}

// What is free on this host for each of its ranks. Above it the kernel kills whom it likes.
std::size_t free_memory_share(int local_size) {
  std::ifstream file("/proc/meminfo");
  for (std::string name, rest; file >> name && std::getline(file, rest);) {
    if (name != "MemAvailable:") continue;
    const std::size_t bytes = std::strtoull(rest.c_str(), nullptr, 10) * 1024;
    return std::max<std::size_t>(bytes / static_cast<std::size_t>(local_size), 1);
  }
  return SIZE_MAX;
}

void open_device(const TrainerOptions& options, Rank& rank) {
  if (!options.device.cuda) {
    rank.backend =
        value_or_throw(HostBackend::create({.name = "host of rank " + std::to_string(rank.place.rank),
                                            .memory_bytes = free_memory_share(rank.place.local_size)}));
    return;
  }
  try {
    const int ordinal = choose_ordinal(options, rank.place);
    rank.backend = value_or_throw(CudaBackend::create({.ordinal = ordinal}));
    rank.ordinal = ordinal;
  } catch (const Error& error) {
    throw Error(error.status().with_context("--device cuda"));
  }
}

Rank make_rank(const TrainerOptions& options, const RankPlace& place, const CommunicatorMaker& make) {
  Rank rank;
  rank.place = place;
  rank.threads =
      options.threads > 0 ? options.threads : std::max(1, default_compute_threads() / place.local_size);
  const auto open = [&] {
    open_device(options, rank);
    rank.kernels = value_or_throw(Kernels::create(*rank.backend, {.thread_count = rank.threads}));
  };
  if (!uses_nccl(options.communicator)) {
    open();
    rank.communicator = value_or_throw(make(*rank.backend, *rank.kernels));
    return rank;
  }
  rank.control_backend =
      value_or_throw(HostBackend::create({.name = "control of rank " + std::to_string(place.rank)}));
  rank.control_kernels = value_or_throw(Kernels::create(*rank.control_backend, {.thread_count = 1}));
  rank.communicator = value_or_throw(make(*rank.control_backend, *rank.control_kernels));
  try {
    open();
  } catch (const Error& error) {
    rank.communicator->abort(error.status().with_context("rank " + std::to_string(place.rank)));
    throw;
  }
  return rank;
}

// The rank's communicator becomes the control plane of one over NCCL. All ranks at once; all fail together.
// Requires: a rank on a GPU, whose backend is a CudaBackend.
void go_over_nccl(const TrainerOptions& options, Rank& rank) {
  const Result<NcclLibraryFacts> library = nccl_library(options.nccl_library);
  if (!library.ok()) {
    const Status cause =
        library.status().with_context("--communicator nccl, whose library --nccl-library names");
    rank.communicator->abort(cause.with_context("rank " + std::to_string(rank.place.rank)));
    throw Error(cause);
  }
  if (rank.place.rank == 0 && options.progress) {
    const int version = library.value().version;
    std::fprintf(stderr, "forebay-gpt: NCCL %d.%d.%d from %s\n", version / 10'000, version / 100 % 100,
                 version % 100, library.value().path.c_str());
  }
  rank.communicator = value_or_throw(create_nccl_communicator(
      std::move(rank.communicator), static_cast<CudaBackend&>(*rank.backend), *rank.kernels,
      {.library = options.nccl_library,
       .deadline = std::chrono::seconds(options.deadline_seconds),
       .order = options.fast_order ? NcclOrder::kFast : NcclOrder::kRank}));
}

// What a rank was at when it failed. That it cannot be written is no reason to hide why it had to be.
void write_flight_record(const TrainerOptions& options, const Communicator& communicator) {
  try {
    write_file(flight_file(options, communicator.rank()),
               flight_json(communicator.status(), communicator.last_operations()));
  } catch (const Error& error) {
    std::fprintf(stderr, "forebay-gpt: %s\n", error.status().message().c_str());
  }
}

TrainingReport train_rank(const TrainerOptions& options, Rank& rank) {
  if (uses_nccl(options.communicator)) go_over_nccl(options, rank);
  const RankPlace& place = rank.place;
  const auto fail = [&](const Status& cause) {
    rank.communicator->abort(place.size > 1 ? cause.with_context("rank " + std::to_string(place.rank))
                                            : cause);
    if (!options.flight_recorder.empty()) write_flight_record(options, *rank.communicator);
  };
  try {
    set_compute_threads(rank.threads);  // The products are prepared on this thread.
    return Trainer(options, rank).train();
  } catch (const Error& error) {
    fail(error.status());
    // What this rank saw may be the echo of another's failure: the communicator knows the first cause.
    if (error.code() == StatusCode::kPeerLost && !rank.communicator->status().ok())
      throw Error(rank.communicator->status());
    throw;
  } catch (const std::exception& error) {
    const Status cause(StatusCode::kInternal, error.what());
    fail(cause);
    throw Error(cause);
  }
}

// The cause to show: the first failure that is not only the echo of another rank's.
const Error* first_cause(const std::vector<std::pair<int, Error>>& failures) {
  for (const auto& [rank, error] : failures) {
    if (error.code() != StatusCode::kPeerLost) return &error;
  }
  return failures.empty() ? nullptr : &failures.front().second;
}

}  // namespace

bool output_failed() noexcept {
  return output_has_failed;
}

bool has_begun_steps() noexcept {
  return steps_have_begun.load(std::memory_order_relaxed);
}
bool request_stop() noexcept {
  stop_requested.store(true, std::memory_order_relaxed);
  return has_begun_steps();
}
void clear_stop() noexcept {
  stop_requested.store(false, std::memory_order_relaxed);
}

TrainingReport run_training(const TrainerOptions& options) {
  return run_training(std::vector<TrainerOptions>(static_cast<std::size_t>(options.ranks), options));
}

TrainingReport run_training(const std::vector<TrainerOptions>& by_rank) {
  const int size = static_cast<int>(by_rank.size());
  LocalOptions group_options;
  group_options.deadline = std::chrono::seconds(by_rank.front().deadline_seconds);
  const std::shared_ptr<LocalGroup> group = LocalGroup::create(size, group_options);

  // All of them before the first starts: one that cannot be made keeps none waiting.
  std::vector<Rank> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(make_rank(
        by_rank[static_cast<std::size_t>(rank)],
        {.rank = rank, .size = size, .local_rank = rank, .local_size = size},
        [&](Backend& backend, Kernels& kernels) { return group->communicator(rank, backend, kernels); }));
  }

  std::mutex mutex;
  std::vector<std::pair<int, Error>> failures;  // In the order of time. Guarded by mutex.
  TrainingReport report;                        // Rank 0's.
  const auto run = [&](int rank) {
    try {
      const auto index = static_cast<std::size_t>(rank);
      const TrainingReport mine = train_rank(by_rank[index], ranks[index]);
      if (rank == 0) report = mine;
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      failures.emplace_back(rank, error);
    }
  };
  std::vector<std::thread> threads;
  std::promise<bool> all_there;
  const std::shared_future<bool> may_run = all_there.get_future().share();
  try {
    for (int rank = 1; rank < size; ++rank) {
      threads.emplace_back([&run, may_run, rank] {
        if (may_run.get()) run(rank);
      });
    }
  } catch (const std::exception& error) {
    all_there.set_value(false);
    for (std::thread& thread : threads) thread.join();
    throw Error(StatusCode::kUnavailable, "cannot start a thread for each of " + std::to_string(size) +
                                              " ranks: " + error.what() +
                                              "; start fewer, or raise ulimit -u or -v");
  }
  all_there.set_value(true);
  run(0);
  for (std::thread& thread : threads) thread.join();
  if (const Error* cause = first_cause(failures)) throw *cause;
  return report;
}

TrainingReport run_training_rank(const TrainerOptions& options, const LaunchEnvironment& environment) {
  const ProcessOptions process{.rank = environment.rank,
                               .size = environment.size,
                               .store = environment.store,
                               .interface = environment.interface,
                               .configuration = configuration_of(options),
                               .deadline = std::chrono::seconds(options.deadline_seconds),
                               .join_deadline = std::chrono::seconds(options.join_deadline_seconds)};
  Rank rank = make_rank(options,
                        {.rank = environment.rank,
                         .size = environment.size,
                         .local_rank = environment.local_rank,
                         .local_size = environment.local_size,
                         .is_process = true},
                        [&](Backend& backend, Kernels&) {
                          Result<std::unique_ptr<Communicator>> joined =
                              options.communicator == "shm" ? create_shm_communicator(process, backend)
                              : options.communicator == "gloo"
                                  ? create_gloo_communicator(process, backend)
                                  : create_process_communicator(process, backend);
                          if (!joined.ok()) throw JoinError(joined.status());
                          return joined;
                        });
  return train_rank(options, rank);
}

}  // namespace forebay::gpt
