#include "trainer/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

#include "forebay/activation_formulas.h"
#include "forebay/error.h"
#include "forebay/gloo_communicator.h"
#include "forebay/sharding_arguments.h"
#include "forebay/units.h"
#include "model/matmul.h"
#include "model/text.h"

namespace forebay::gpt {
namespace {

constexpr int kUsageExit = 2;
constexpr std::uint64_t kRanksMax = 1024;  // On one host: a typing mistake beyond it.
constexpr int kThreadsMax = 256;           // Per rank: the same.
constexpr double kSingleMax = 3e38;        // What reaches fp32 must not become infinite there,
constexpr double kEpsilonMin = 1e-30;      // nor zero, by which it would divide.

// The options that become other values once all is parsed.
struct Words {
  ShardingArguments<CLI::App> sharding;
  std::string device = "host";
  std::string recompute = "none";
  std::string activations = "keep";
};

// A whole number that fits its type, where CLI11 would let a negative one become a large one.
template <typename Integer>
CLI::Option* add_number(CLI::App& app, const char* name, Integer& target, const char* what) {
  const auto check = [](const std::string& text) -> std::string {
    Integer value{};
    const char* end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, value);
    if (result.ec == std::errc() && result.ptr == end) return "";
    return "'" + text + "' is not a whole number from " +
           std::to_string(std::numeric_limits<Integer>::min()) + " to " +
           std::to_string(std::numeric_limits<Integer>::max());
  };
  return app.add_option(name, target, what)->check(check);
}

void add_model_options(CLI::App& app, TrainerOptions& o) {
  const std::string group = "Model";
  add_number(app, "--layers", o.model.layers, "Transformer blocks")->capture_default_str()->group(group);
  add_number(app, "--hidden", o.model.hidden, "Columns of the residual stream, a multiple of --heads")
      ->capture_default_str()
      ->group(group);
  add_number(app, "--heads", o.model.heads, "Attention heads")->capture_default_str()->group(group);
  add_number(app, "--sequence", o.model.sequence, "Tokens (bytes) of one sample")
      ->capture_default_str()
      ->group(group);
}

void add_engine_options(CLI::App& app, TrainerOptions& o, Words& words) {
  const std::string group = "Ranks and memory";
  add_number(app, "--ranks", o.ranks, "Ranks to start on this host; under a launcher, its ranks are used")
      ->capture_default_str()
      ->group(group);
  app.add_option("--device", words.device,
                 "host, cuda or cuda:N: where ranks keep their memory and compute; with cuda, ranks take the "
                 "GPUs in turn")
      ->capture_default_str()
      ->group(group);
  app.add_option(
         "--communicator", o.communicator,
         "How ranks reach each other: shm (processes that share memory), gloo (processes, over TCP), "
         "auto (shm where all ranks can share memory, else gloo), local (threads), or with cuda and a "
         "GPU for each rank nccl (processes) or nccl-threads [default: auto for several ranks on the "
         "host, local on cuda]")
      ->group(group);
  app.add_option(
         "--nccl-library", o.nccl_library,
         "The libnccl.so.2 for --communicator nccl [default: FOREBAY_NCCL_LIBRARY, else the system's]")
      ->group(group);
  add_number(app, "--tensor-parallel", o.tensor_parallel,
             "Neighbouring ranks that share every layer, a divisor of --ranks and of --heads; the others are "
             "data-parallel")
      ->capture_default_str()
      ->group(group);
  add_number(
      app, "--pipeline-parallel", o.pipeline_parallel,
      "Stages of consecutive layers, each on ranks of its own, through which the micro-steps of a step "
      "pass one behind the other; with --tensor-parallel a divisor of --ranks, at most --layers. Give "
      "several times as many --micro-steps: stages wait for each other at both ends of a step")
      ->capture_default_str()
      ->group(group);
  words.sharding.add(app, kGptProgram, o);
  CLI::Option* const order = words.sharding.option("order");
  order->description(order->get_description() +
                     ". fast, over NCCL: fp32 sums in the order that NCCL chooses");
  order->type_name("rank|group:G|fast");
  add_number(app, "--deadline", o.deadline_seconds, "Seconds after which a silent peer is an error")
      ->capture_default_str()
      ->group(group);
  add_number(app, "--join-deadline", o.join_deadline_seconds,
             "Seconds until all ranks must have come, where they are processes; 0: as --deadline")
      ->capture_default_str()
      ->group(group);
}

void add_compute_options(CLI::App& app, TrainerOptions& o, Words& words) {
  const std::string group = "Computing";
  app.add_option("--matmul", o.matmul,
                 "library (host: oneDNN; cuda: cuBLAS, opened at run time) or plain (our own) [default: "
                 "library, on the host where built in]")
      ->group(group);
  add_number(app, "--threads", o.threads, "Compute threads per rank; 0: cores / ranks on this host")
      ->capture_default_str()
      ->group(group);
  app.add_option("--recompute", words.recompute,
                 "none; block: every block keeps nothing but its input and is computed again in the backward "
                 "pass; every:K: so does one block of K. Same bits, less memory, more time")
      ->capture_default_str()
      ->group(group);
  app.add_option(
         "--activations", words.activations,
         "Where the inputs of recomputed blocks wait for the backward pass. keep: whole, on each rank's "
         "device; partition: cut over the ranks of --tensor-parallel; partition+cpu, "
         "partition+nvme:DIR[,DIR...]: cut, and in page-locked host memory or in files without a name; "
         "auto: keep, or as much of partition, or then of partition+cpu, as --memory asks for. Same bits")
      ->capture_default_str()
      ->group(group);
}

void add_training_options(CLI::App& app, TrainerOptions& o) {
  const std::string group = "Training";
  app.add_option("--text", o.text,
                 "Text files, read as bytes [default: the licences in /usr/share/common-licenses]")
      ->group(group);
  add_number(app, "--batch", o.batch, "Samples per data-parallel rank and micro-step")
      ->capture_default_str()
      ->group(group);
  add_number(app, "--steps", o.steps, "Steps in all, those before a resume included")
      ->capture_default_str()
      ->group(group);
  app.add_option("--lr", o.lr, "Learning rate, constant")->capture_default_str()->group(group);
  app.add_option("--weight-decay", o.weight_decay, "AdamW's, of matrices and embeddings")
      ->capture_default_str()
      ->group(group);
  app.add_option("--clip", o.clip, "Largest global gradient norm; 0: no clipping")
      ->capture_default_str()
      ->group(group);
  app.add_option("--dropout", o.dropout,
                 "Probability with which an element is zeroed, after the embedding, in attention and after "
                 "both halves of a block: at least 0, less than 1")
      ->capture_default_str()
      ->group(group);
  app.add_option("--beta1", o.beta1, "AdamW's")->capture_default_str()->group(group);
  app.add_option("--beta2", o.beta2, "AdamW's")->capture_default_str()->group(group);
  app.add_option("--epsilon", o.epsilon, "AdamW's")->capture_default_str()->group(group);
  app.add_option("--loss-scale", o.loss_scale, "The first loss scale (fp16 only)")
      ->capture_default_str()
      ->group(group);
  add_number(app, "--seed", o.seed, "Of initial weights, of the order of samples and of dropout")
      ->capture_default_str()
      ->group(group);
}

void add_file_options(CLI::App& app, TrainerOptions& o) {
  const std::string group = "Files";
  app.add_option("--save-state", o.save_state, "Directory for training state, saved at the end and on Ctrl-C")
      ->group(group);
  add_number(app, "--save-every", o.save_every, "Save every this many steps too; 0: no")
      ->capture_default_str()
      ->group(group);
  app.add_option("--load-state", o.load_state, "Directory of training state to go on from")->group(group);
  app.add_option("--initial", o.initial_file, "Initial weights: a safetensors file")->group(group);
  app.add_option("--export", o.export_file, "Write the full fp32 weights here at the end (safetensors)")
      ->group(group);
  app.add_option("--report", o.report_file, "Write a report here at the end (JSON)")->group(group);
  app.add_option(
         "--timeline", o.timeline_file,
         "Write what ran when here at the end, for chrome://tracing or ui.perfetto.dev (JSON); ranks but the "
         "first add .rank-N to the name, before its ending. For a few steps: it slows them")
      ->group(group);
  app.add_option("--flight-recorder", o.flight_recorder,
                 "Directory in which every rank that fails, or is left when another has failed, says what it "
                 "was at (flight.rank-N.json)")
      ->group(group);
  app.add_flag("!--quiet", o.progress, "No progress lines")->group(group);
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(StatusCode::kInvalidArgument, message);
}

void place_activations(const std::string& text, TrainerOptions& o) {
  const std::string partition = "partition";
  if (text == "keep") return;
  if (text == "auto") {
    o.activations = ActivationPlacement::kAuto;
    return;
  }
  o.activations = ActivationPlacement::kPartition;
  if (text == partition) return;
  ShardingOptions tier;
  o.activations = ActivationPlacement::kPartitionAndSpill;
  if (text.rfind(partition + "+", 0) != 0 ||
      !set_option(tier, "offload-tier", text.substr(partition.size() + 1)).ok() ||
      (tier.tier == Tier::kFile && tier.offload_directories.empty())) {
    refuse("--activations is " + text +
           "; use keep, partition, partition+cpu, partition+nvme:DIR[,DIR...] or auto");
  }
  o.activation_tier = tier.tier;
  o.activation_directories = tier.offload_directories;
}

DeviceChoice device_of(const std::string& text) {
  if (text == "host") return {};
  if (text == "cuda") return {.cuda = true};
  const std::string prefix = "cuda:";
  if (text.compare(0, prefix.size(), prefix) == 0) {
    const char* const begin = text.data() + prefix.size();
    const char* const end = text.data() + text.size();
    int ordinal = -1;
    const auto result = std::from_chars(begin, end, ordinal);
    if (result.ec == std::errc() && result.ptr == end && ordinal >= 0)
      return {.cuda = true, .ordinal = ordinal};
  }
  refuse("--device " + text + ": not one of host, cuda, cuda:N (N counts GPUs from 0)");
}

void apply(Words& words, TrainerOptions& o) {
  o.fast_order = words.sharding.text("order") == "fast";
  if (o.fast_order) words.sharding.skip("order");
  throw_if_error(words.sharding.read(o));
  o.device = device_of(words.device);
  const std::optional<int> every = parse_recompute(words.recompute);
  if (!every) {
    refuse("--recompute " + words.recompute +
           ": not one of none, block, every:K (one block of K, at least 1)");
  }
  o.recompute_every = static_cast<std::size_t>(*every);
  place_activations(words.activations, o);
}

// An unset variable of a script, most often; CLI11 takes it for 0.
void refuse_empty(const std::vector<std::string>& arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.rfind("--", 0) == 0 && argument.size() > 1 && argument.back() == '=')
      refuse(argument.substr(0, argument.size() - 1) +
             " was given an empty value; give one or leave the option out");
    if (!argument.empty()) continue;
    if (i == 0 || arguments[i - 1].rfind("--", 0) != 0) refuse("an argument is empty; leave it out");
    refuse(arguments[i - 1] + " was given an empty value; give one or leave the option out");
  }
}

void check_positive(const char* option, bool positive) {
  if (!positive) refuse(std::string(option) + " must be at least 1");
}

// Also what a negative number becomes when it is read as a count.
template <typename Count>
void check_count(const char* option, Count count, std::uint64_t largest) {
  check_positive(option, count >= 1);
  if (static_cast<std::uint64_t>(count) > largest) {
    refuse(std::string(option) + " must be between 1 and " + std::to_string(largest));
  }
}

void check_sizes(const TrainerOptions& o) {
  constexpr std::uint64_t kLargest = std::uint64_t{1} << 24;
  check_count("--layers", o.model.layers, kLargest);
  check_count("--hidden", o.model.hidden, kLargest);
  check_count("--heads", o.model.heads, kLargest);
  check_count("--sequence", o.model.sequence, kLargest);
  check_count("--batch", o.batch, kLargest);
  // Byte counts of the whole are then far from overflowing.
  constexpr double kBytesMax = 0x1p56;
  const double layers = static_cast<double>(o.model.layers);
  const double hidden = static_cast<double>(o.model.hidden);
  const double rows = static_cast<double>(o.batch) * static_cast<double>(o.model.sequence);
  const double columns = 16 * hidden + static_cast<double>(o.model.heads);
  if (layers * (rows * columns + 12 * hidden * hidden) * 16 > kBytesMax) {
    refuse(
        "--layers, --hidden, --sequence and --batch ask for more than 2^56 bytes together; lower one of "
        "them");
  }
}

void check_number(const char* option, double value, double low, double below) {
  if (std::isfinite(value) && value >= low && value < below) return;
  char text[160];
  std::snprintf(text, sizeof(text), "%s is %g: it must be at least %g and less than %g", option, value, low,
                below);
  refuse(text);
}

// What the engine would refuse, before anything starts.
void check_sharding(const TrainerOptions& o) {
  if (const Status status = check_sharding_options(o); !status.ok()) refuse("--" + status.message());
  if (o.tier == Tier::kFile && o.offload_directories.empty())
    refuse("--offload-tier is nvme without a directory; use nvme:DIR[,DIR...]");
  if (o.tier != Tier::kFile && o.staging_bytes != ShardingOptions().staging_bytes)
    refuse("--offload-staging is memory that states in files pass through; add --offload-tier nvme:DIR");
}

// The shortest text that reads back as the same value.
std::string exact(double value) {
  char text[32];
  const auto result = std::to_chars(text, text + sizeof(text), value);
  return {text, result.ptr};
}

void check_parallel(const TrainerOptions& o) {
  check_count("--tensor-parallel", std::max(o.tensor_parallel, 0), kRanksMax);
  check_part(o.model, {.size = static_cast<std::size_t>(o.tensor_parallel)});
  check_count("--pipeline-parallel", std::max(o.pipeline_parallel, 0), kRanksMax);
  check_stages(o.model, static_cast<std::size_t>(o.pipeline_parallel));
}

}  // namespace

ParsedCommand parse_command(const std::vector<std::string>& arguments) {
  TrainerOptions options;
  Words words;
  CLI::App app("Trains a GPT-2 style model on bytes of text under ZeRO stages 0 to 3.", "forebay-gpt");
  add_model_options(app, options);
  add_training_options(app, options);
  add_engine_options(app, options, words);
  add_compute_options(app, options, words);
  add_file_options(app, options);

  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // What CLI11 wants.
  try {
    refuse_empty(arguments);
    app.parse(reversed);
    apply(words, options);
    check_options(options);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return {std::nullopt, 0};
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "forebay-gpt: %s (--help lists the options)\n", error.what());
    return {std::nullopt, kUsageExit};
  } catch (const Error& error) {
    std::fprintf(stderr, "forebay-gpt: %s\n", error.status().message().c_str());
    return {std::nullopt, kUsageExit};
  }
  return {std::move(options), 0};
}

void check_options(const TrainerOptions& o) {
  check_sizes(o);
  static_cast<void>(describe_units(o.model));  // Checks that heads divide hidden.
  check_sharding(o);
  check_count("--ranks", std::max(o.ranks, 0), kRanksMax);
  if (o.steps >> 62 != 0) refuse("--steps must be less than 2^62");
  check_positive("--deadline", o.deadline_seconds >= 1);
  if (o.join_deadline_seconds < 0) refuse("--join-deadline must be at least 0");
  if (o.threads < 0 || o.threads > kThreadsMax) {
    refuse("--threads is " + std::to_string(o.threads) + ": it must be 0 (choose) to " +
           std::to_string(kThreadsMax));
  }
  check_number("--lr", o.lr, 0, kSingleMax);
  check_number("--weight-decay", o.weight_decay, 0, kSingleMax);
  check_number("--clip", o.clip, 0, kSingleMax);
  check_number("--beta1", o.beta1, 0, 1);
  check_number("--beta2", o.beta2, 0, 1);
  check_number("--epsilon", o.epsilon, kEpsilonMin, kSingleMax);
  check_number("--loss-scale", o.loss_scale, 1, kSingleMax);
  check_number("--dropout", o.dropout, 0, 1);
  check_parallel(o);
  if (o.activations != ActivationPlacement::kKeep && o.recompute_every == 0) {
    refuse("--activations " + activations_name(o) +
           " is about the inputs of blocks that are computed again, and none is; add --recompute block");
  }
  if (o.activations == ActivationPlacement::kAuto && o.bucket_auto) {
    refuse(
        "--activations auto fills what the rest leaves of --memory, and how much --bucket auto takes is "
        "known "
        "only afterwards; give --bucket a size");
  }
  const bool is_process = starts_processes(o.communicator);
  const bool over_nccl = uses_nccl(o.communicator);
  if (!o.communicator.empty() && !is_process && !over_nccl && o.communicator != "local") {
    refuse("--communicator " + o.communicator + ": not one of auto, shm, gloo, local, nccl, nccl-threads");
  }
  if (over_nccl && !o.device.cuda) {
    refuse("--communicator " + o.communicator +
           ": NCCL moves bytes between GPUs, and the ranks are on the host; add --device cuda, or use auto");
  }
  if (o.fast_order && !over_nccl) {
    refuse(
        "--order fast is NCCL's own sum, in an order that NCCL chooses; add --communicator nccl, or use rank "
        "or "
        "group:G");
  }
  if (!over_nccl && !o.nccl_library.empty())
    refuse("--nccl-library is for ranks over NCCL; add --communicator nccl, or leave it out");
  if (o.communicator == "gloo" && !gloo_available()) {
    refuse("--communicator gloo: this build has no Gloo; use shm, or install libgloo-dev and build again");
  }
  if (is_process && !over_nccl && o.device.cuda) {
    refuse("--communicator " + o.communicator +
           ": its ranks are processes that exchange host memory; with --device cuda use local, whose ranks "
           "are threads and may share a GPU, or nccl, with a GPU for each rank");
  }
  if (!o.matmul.empty() && o.matmul != "library" && o.matmul != "plain") {
    refuse("--matmul " + o.matmul + ": not one of library, plain");
  }
  if (o.matmul == "library" && !o.device.cuda && !library_matmul_available()) {
    refuse("--matmul library: this build has no oneDNN; use plain, or install libdnnl-dev and build again");
  }
  if (o.save_every > 0 && o.save_state.empty()) refuse("--save-every needs --save-state DIR");
  if (!o.load_state.empty() && !o.initial_file.empty()) {
    refuse("--load-state and --initial both give the weights; use one of them");
  }
}

bool starts_processes(const std::string& communicator) {
  return communicator == "auto" || communicator == "shm" || communicator == "gloo" || communicator == "nccl";
}

bool uses_nccl(const std::string& communicator) {
  return communicator == "nccl" || communicator == "nccl-threads";
}

TrainerOptions resolve_options(TrainerOptions options) {
  const bool cuda = options.device.cuda;
  if (options.communicator.empty()) options.communicator = options.ranks > 1 && !cuda ? "auto" : "local";
  if (options.matmul.empty()) options.matmul = cuda || library_matmul_available() ? "library" : "plain";
  if (options.text.empty()) options.text = default_text_files();
  return options;
}

Grid::Options grid_options(const TrainerOptions& o) {
  return {.tensor_parallel = o.tensor_parallel,
          .pipeline_parallel = o.pipeline_parallel,
          .activations = o.activations};
}

int forwards_ahead(const PipelineStage& stage) {
  return static_cast<int>(stage.count - 1 - stage.index);
}

int passes_in_flight(const TrainerOptions& o, const PipelineStage& stage) {
  return std::min(forwards_ahead(stage) + 1, o.micro_steps);
}

std::vector<std::size_t> recomputed_layers(const TrainerOptions& o, const PipelineStage& stage) {
  const LayerRange range = layers_of(o.model, stage);
  std::vector<std::size_t> layers;
  for (std::size_t layer = range.begin; o.recompute_every > 0 && layer < range.end; ++layer) {
    if (layer % o.recompute_every == 0) layers.push_back(layer);
  }
  return layers;
}

std::string recompute_name(const TrainerOptions& o) {
  return forebay::recompute_name(static_cast<int>(o.recompute_every));
}

std::string activations_name(const TrainerOptions& o) {
  if (o.activations == ActivationPlacement::kKeep) return "keep";
  if (o.activations == ActivationPlacement::kAuto) return "auto";
  if (o.activations == ActivationPlacement::kPartition) return "partition";
  return o.activation_tier == Tier::kFile ? "partition+nvme" : "partition+cpu";
}

std::string configuration_of(const TrainerOptions& o) {
  return "--tensor-parallel " + std::to_string(o.tensor_parallel) + " --pipeline-parallel " +
         std::to_string(o.pipeline_parallel) + " --recompute " + recompute_name(o) + " --activations " +
         activations_name(o) + " --dropout " + exact(o.dropout);
}

std::vector<std::pair<std::string, std::string>> training_of(const TrainerOptions& o) {
  const auto given = [](const std::string& path) { return std::string(path.empty() ? "no" : "yes"); };
  return {{"layers", std::to_string(o.model.layers)},
          {"hidden", std::to_string(o.model.hidden)},
          {"heads", std::to_string(o.model.heads)},
          {"sequence", std::to_string(o.model.sequence)},
          {"batch", std::to_string(o.batch)},
          {"lr", exact(o.lr)},
          {"weight-decay", exact(o.weight_decay)},
          {"clip", exact(o.clip)},
          {"beta1", exact(o.beta1)},
          {"beta2", exact(o.beta2)},
          {"epsilon", exact(o.epsilon)},
          {"loss-scale", exact(o.loss_scale)},
          {"seed", std::to_string(o.seed)},
          {"dropout", exact(o.dropout)},
          {"tensor-parallel", std::to_string(o.tensor_parallel)},
          {"pipeline-parallel", std::to_string(o.pipeline_parallel)},
          {"order", o.fast_order ? "fast" : option_text(o, "order")},
          {"device", o.device.cuda ? "cuda" : "host"},
          {"matmul", o.matmul},
          {"initial", given(o.initial_file)}};
}

std::vector<std::pair<std::string, std::string>> agreement_of(const TrainerOptions& o) {
  const auto given = [](const std::string& path) { return std::string(path.empty() ? "no" : "yes"); };
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto& [name, value] : training_of(o)) all.emplace_back("--" + name, value);
  const std::pair<std::string, std::string> more[] = {
      {"--steps", std::to_string(o.steps)},   {"--recompute", recompute_name(o)},
      {"--activations", activations_name(o)}, {"--offload-staging", option_text(o, "offload-staging")},
      {"--save-state", given(o.save_state)},  {"--save-every", std::to_string(o.save_every)},
      {"--load-state", given(o.load_state)},  {"--export", given(o.export_file)}};
  all.insert(all.end(), std::begin(more), std::end(more));
  return all;
}

}  // namespace forebay::gpt
