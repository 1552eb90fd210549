#include "trainer/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "forebay/activation_formulas.h"
#include "forebay/command_line.h"
#include "forebay/error.h"
#include "forebay/gloo_communicator.h"
#include "forebay/sharding_arguments.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "forebay/version.h"
#include "model/matmul.h"
#include "model/text.h"
#include "model/tokens.h"
#include "output/huggingface.h"
#include "trainer/tokenizer_file.h"

namespace forebay::gpt {
namespace {

constexpr const char* kProgram = "forebay-gpt";
constexpr int kUsageExit = 2;
constexpr std::uint64_t kSizeMax = std::uint64_t{1} << 24;  // Byte counts are then far from overflowing.
constexpr int kRanksMax = 1024;                             // On one host: a typing mistake beyond it.
constexpr int kKeptMax = 100'000;                           // The same.
constexpr int kThreadsMax = 256;                            // Per rank: the same.
constexpr double kSingleMax = 3e38;                         // A larger value would be infinite in fp32,
constexpr double kEpsilonMin = 1e-30;  // and a smaller epsilon zero, by which it divides.

// The options that config.json of a model gives.
constexpr const char* kModelSizes[] = {"--model",    "--layers", "--hidden",     "--heads",
                                       "--kv-heads", "--inner",  "--rope-theta", "--vocabulary"};

// The options that become other values once all is parsed.
struct Words {
  ShardingArguments<CLI::App> sharding;
  std::string model = "gpt2";
  std::string device = "host";
  std::string recompute = "none";
  std::string activations = "keep";
  std::string schedule = "constant";
  std::string export_shard;
  std::vector<std::string> tokenizer;
};

// The whole of `text` as a number; none for other text.
template <typename Number>
std::optional<Number> number_of(std::string_view text) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc() && result.ptr == end ? std::optional(value) : std::nullopt;
}

// Options under one heading of the help text.
class Section {
 public:
  Section(CLI::App& app, const char* heading) : app_(app), heading_(heading) {}

  // A value with its default.
  template <typename Value>
  CLI::Option* value(const char* name, Value& target, const char* values, const char* help) {
    return app_.add_option(name, target, help)->type_name(values)->capture_default_str()->group(heading_);
  }
  // A whole number from `least` to `most`.
  template <typename Integer>
  void number(const char* name, Integer& target, std::type_identity_t<Integer> least,
              std::type_identity_t<Integer> most, const char* help) {
    value(name, target, "N", help)->check([=](const std::string& text) {
      const std::optional<Integer> given = number_of<Integer>(text);
      if (given && *given >= least && *given <= most) return std::string();
      return refusal(text, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
    });
  }
  // A number of at least `least` and less than `below`.
  void real(const char* name, double& target, const char* values, double least, double below,
            const char* help) {
    value(name, target, values, help)->check([=](const std::string& text) {
      const std::optional<double> given = number_of<double>(text);
      if (given && *given >= least && *given < below) return std::string();
      char range[96];
      std::snprintf(range, sizeof range, "a number of at least %g and less than %g", least, below);
      return refusal(text, range);
    });
  }
  // A text that is empty by default; `otherwise` names the choice made then.
  template <typename Text>
  CLI::Option* text(const char* name, Text& target, const char* values, const char* help,
                    const char* otherwise = "") {
    return app_.add_option(name, target, help)->type_name(values)->default_str(otherwise)->group(heading_);
  }
  // The same for one of `words`, "a|b|c".
  void word(const char* name, std::string& target, const char* words, const char* help,
            const char* otherwise) {
    text(name, target, words, help, otherwise)->check([=](const std::string& given) {
      if (("|" + std::string(words) + "|").find("|" + given + "|") != std::string::npos) return std::string();
      return refusal(given, "one of " + std::string(words));
    });
  }

 private:
  static std::string refusal(const std::string& given, const std::string& allowed) {
    return "'" + given + "' was given; use " + allowed;
  }

  CLI::App& app_;
  const char* heading_;
};

void add_model_options(CLI::App& app, TrainerOptions& o, Words& words) {
  Section model(app, "Model");
  model.word(
      "--model", words.model, "gpt2|llama",
      "Kind of the blocks: gpt2; llama, with RMSNorm, rotary position embeddings, SwiGLU, no biases, and "
      "a head of its own",
      "gpt2");
  model.number("--layers", o.model.layers, 1, GptShape::kLayersMax, "Transformer blocks");
  model.number("--hidden", o.model.hidden, 1, kSizeMax,
               "Columns of the residual stream, a multiple of --heads");
  model.number("--heads", o.model.heads, 1, kSizeMax, "Attention heads");
  model.number(
      "--kv-heads", o.model.kv_heads, 0, kSizeMax,
      "Heads of keys and values, with --model llama a divisor of --heads that share them; 0: as many");
  model.number("--inner", o.model.inner, 0, kSizeMax,
               "Columns of the MLP; 0: 4 times --hidden, with --model llama 8 / 3 of it in multiples of 32");
  model.real("--rope-theta", o.model.rope_theta, "X", 1, kSingleMax,
             "Base of the frequencies of rotary position embeddings, with --model llama");
  model.number("--sequence", o.model.sequence, 1, kSizeMax, "Tokens per sample");
  model.number("--vocabulary", o.model.vocabulary, 1, kVocabularyMax,
               "Tokens that the model knows; with --tokenizer bpe at least those of the tokenizer, otherwise "
               "the bytes");
}

void add_rank_options(CLI::App& app, TrainerOptions& o, Words& words) {
  Section ranks(app, "Ranks");
  ranks.number("--ranks", o.ranks, 1, kRanksMax,
               "Ranks to start on this host; under a launcher, its ranks are used");
  ranks.value("--device", words.device, "host|cuda|cuda:N",
              "Where ranks keep their memory and compute; with cuda, ranks take the GPUs in turn");
  ranks.word("--communicator", o.communicator, "auto|shm|gloo|local|nccl|nccl-threads",
             "How ranks reach each other: shm, processes over shared memory; gloo, processes over TCP; auto, "
             "shm where all ranks can share memory, otherwise gloo; local, threads; with cuda and a GPU for "
             "each rank nccl, processes, or nccl-threads",
             "auto for several ranks on the host, otherwise local");
  ranks.text("--nccl-library", o.nccl_library, "FILE", "The libnccl.so.2 for --communicator nccl",
             "FOREBAY_NCCL_LIBRARY, otherwise the system's");
  ranks.number("--tensor-parallel", o.tensor_parallel, 1, kRanksMax,
               "Neighbouring ranks that share every layer, a divisor of --ranks and of --heads; the other "
               "ranks are data-parallel");
  ranks.number("--pipeline-parallel", o.pipeline_parallel, 1, kRanksMax,
               "Pipeline stages of consecutive layers, each on ranks of its own; with --tensor-parallel a "
               "divisor of --ranks, at most --layers. Stages wait for each other at both ends of a step, so "
               "give several times as many --micro-steps");
  ranks.number("--deadline", o.deadline_seconds, 1, INT_MAX, "Seconds after which a silent peer is an error");
  ranks.number("--join-deadline", o.join_deadline_seconds, 0, INT_MAX,
               "Seconds within which all ranks that are processes must join; 0: as --deadline");
}

void add_sharding_options(CLI::App& app, TrainerOptions& o, Words& words) {
  words.sharding.add(app, kGptProgram, o);
  CLI::Option* const order = words.sharding.option("order");
  order->description(order->get_description() +
                     ". fast, over NCCL: fp32 sums in the order that NCCL chooses");
  order->type_name("rank|group:G|fast");
}

void add_compute_options(CLI::App& app, TrainerOptions& o, Words& words) {
  Section computing(app, "Computing");
  computing.word(
      "--matmul", o.matmul, "library|plain",
      "Matrix products: library, oneDNN on the host and cuBLAS, opened at run time, on CUDA; "
      "plain, the sample's own. Bits of library may differ between numbers of --threads and processors",
      "library, on the host where built in");
  computing.number("--threads", o.threads, 0, kThreadsMax,
                   "Compute threads per rank; 0: the cores of this host / its ranks");
  computing.value(
      "--recompute", words.recompute, "none|block|every:K",
      "Blocks that the backward pass computes again: none; block, every block from its input, which is all "
      "that it keeps; every:K, one block of every K. Less memory, more time, the same result");
  computing.value("--activations", words.activations,
                  "keep|partition|partition+cpu|partition+nvme:DIR[,DIR...]|auto",
                  "Where the inputs of recomputed blocks wait for the backward pass: keep, whole on each "
                  "device; partition, a slice on each --tensor-parallel rank; partition+cpu or "
                  "partition+nvme, the slice in pinned host memory or in anonymous files; auto, the first of "
                  "keep, partition and partition+cpu that --memory has room for. The result is the same");
}

void add_training_options(CLI::App& app, TrainerOptions& o, Words& words) {
  Section training(app, "Training");
  training.text("--text", o.text, "FILE", "Text files, read as bytes",
                "the licences in /usr/share/common-licenses");
  training
      .text("--tokenizer", words.tokenizer, "bytes|bpe FILE",
            "Tokens of a text: bytes; bpe, GPT-2's byte-level pairs from a tokenizer.json, from a vocab.json "
            "with its merges.txt, or from a directory that has them",
            "bytes")
      ->expected(1, 2);
  training.text(
      "--data", o.data, "FILE",
      "In place of text, a file of tokens as 16-bit numbers, as nanoGPT and llm.c write them. It is "
      "read in parts, not as a whole. Tokens are below --vocabulary");
  training.number("--batch", o.batch, 1, kSizeMax, "Samples per data-parallel rank and micro-step");
  training.number("--steps", o.steps, 0, (std::uint64_t{1} << 62) - 1,
                  "Steps in all, including those before a resume");
  training.real("--lr", o.lr, "X", 0, kSingleMax, "Learning rate of AdamW; with a schedule, its peak");
  training.word("--schedule", words.schedule, "constant|cosine|linear|wsd",
                "Learning rates after the warm-up: constant; cosine or linear, down to --last-lr at the last "
                "step; wsd, constant and then linear over the last fifth of the steps",
                "constant");
  training.number("--warmup", o.warmup, 0, (std::uint64_t{1} << 62) - 1,
                  "Steps in which the learning rate rises to --lr, on a line");
  training.real("--last-lr", o.last_lr, "X", 0, kSingleMax, "Learning rate that a schedule ends at");
  training.real("--weight-decay", o.weight_decay, "X", 0, kSingleMax,
                "Weight decay of AdamW, for matrices and embeddings");
  training.real("--clip", o.clip, "X", 0, kSingleMax, "Largest global gradient norm; 0: no clipping");
  training.real("--dropout", o.dropout, "0..1", 0, 1,
                "Probability, less than 1, that an element is zeroed: after the embedding, in attention, and "
                "after the attention and the MLP of a block");
  training.real("--beta1", o.beta1, "0..1", 0, 1, "Decay of the first moment; the momentum of sgd");
  training.real("--beta2", o.beta2, "0..1", 0, 1, "Decay of AdamW's second moment");
  training.real("--epsilon", o.epsilon, "X", kEpsilonMin, kSingleMax, "AdamW's epsilon");
  training.real("--loss-scale", o.loss_scale, "X", 1, kSingleMax, "Initial loss scale, for fp16");
  training.number("--seed", o.seed, 0, UINT64_MAX,
                  "Seed of initial weights, of the order of samples and of dropout");
}

void add_use_options(CLI::App& app, TrainerOptions& o) {
  Section use(app, "Evaluation and generation (the training stays bit for bit the same)");
  use.text("--evaluation-text", o.evaluation_text, "FILE",
           "Text files that are not trained on; their mean loss is computed at the end");
  use.text("--evaluation-data", o.evaluation_data, "FILE", "In place of that text, a file as for --data");
  use.number("--evaluate-every", o.evaluate_every, 0, UINT64_MAX,
             "Compute it after every N steps, too; 0: only at the end");
  use.number("--evaluation-samples", o.evaluation_samples, 0, UINT64_MAX,
             "Samples to evaluate, from the beginning of the text; 0: all");
  use.number("--generate", o.generate, 0, kSizeMax,
             "Tokens of text to generate at the end, on stdout; with --steps 0, from loaded weights");
  use.text("--prompt", o.prompt, "TEXT", "The beginning of that text", "a line feed");
  use.real("--temperature", o.temperature, "X", 0, kSingleMax,
           "Divisor of the logits before a token is drawn from their softmax; 0: the most likely one");
}

void add_file_options(CLI::App& app, TrainerOptions& o, Words& words) {
  Section files(app, "Files");
  files.text("--save-state", o.save_state, "DIR", "Save the training state here at the end and on Ctrl-C");
  files.number("--save-every", o.save_every, 0, UINT64_MAX,
               "Save it after every N steps, too; 0: only at the end");
  files.number("--keep", o.keep, 1, kKeptMax, "Saved states to keep in --save-state: the newest N");
  files.text("--load-state", o.load_state, "DIR", "Resume from the training state saved here");
  files.number("--load-step", o.load_step, 0, UINT64_MAX,
               "Resume from the state of this step, one of those that --keep left; 0: the newest");
  app.add_flag(
         "--resume", o.resume,
         "Resume from --save-state if a state is saved there, so that a job that is started again by its "
         "scheduler or launcher goes on with the same command")
      ->group("Files");
  app.add_flag("--elastic", o.elastic,
               "When a rank of --ranks is lost, go on with the ranks that are left from the last state in "
               "--save-state; needs --resume")
      ->group("Files");
  files.text("--initial", o.initial_file, "FILE|DIR",
             "Initial weights: a safetensors file, or a directory as transformers of Hugging Face writes it, "
             "which gives the model's sizes, too");
  files.text("--export", o.export_file, "FILE|DIR/",
             "Write the full fp32 weights here at the end: a safetensors file, or a directory that "
             "transformers reads");
  files.text("--export-shard", words.export_shard, "BYTES", "The most bytes of one file in that directory",
             "one file");
  files.text("--logits", o.logits_file, "FILE",
             "Write the logits of the first --sequence tokens of the text to evaluate here at the end "
             "(safetensors, one row for each token)");
  files.text("--write-tokens", o.tokens_file, "FILE",
             "Write the tokens of the text to train on here at the end, as --data reads them");
  files.text("--report", o.report_file, "FILE", "Write a report here at the end (JSON)");
  files.text("--timeline", o.timeline_file, "FILE",
             "Write a timeline here at the end, for chrome://tracing or ui.perfetto.dev (JSON); ranks after "
             "the first add .rank-N before the suffix. It slows steps, so record a few");
  files.text("--flight-recorder", o.flight_recorder, "DIR",
             "When a rank fails, every rank writes its last operations here (flight.rank-N.json)");
  app.add_flag("!--quiet", o.progress, "Print nothing on stderr but errors and warnings")->group("Files");
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(StatusCode::kInvalidArgument, message);
}

// A directory of --initial says how large the model is.
void take_model_sizes(const CLI::App& app, TrainerOptions& o) {
  if (!is_model_directory(o.initial_file)) return;
  for (const char* option : kModelSizes) {
    if (app.count(option) > 0)
      refuse(std::string(option) + " is given by config.json in the directory of --initial; leave it out");
  }
  o.model = shape_of_model(o.initial_file, o.model);
}

// The model has the tokens of the tokenizer, unless it is given its own number.
void take_tokenizer(const CLI::App& app, const Words& words, TrainerOptions& o) {
  const std::vector<std::string>& given = words.tokenizer;
  if (given.empty() || given == std::vector<std::string>{"bytes"}) return;
  if (given.size() != 2 || given.front() != "bpe") {
    refuse("--tokenizer is '" + given.front() + (given.size() > 1 ? " " + given.back() : "") +
           "'; use bytes, or bpe FILE");
  }
  o.tokenizer = std::make_shared<const BytePairs>(read_tokenizer(given.back()));
  const std::size_t tokens = o.tokenizer->vocabulary();
  if (app.count("--vocabulary") == 0 && !is_model_directory(o.initial_file)) o.model.vocabulary = tokens;
  if (tokens > o.model.vocabulary) {
    refuse("--tokenizer has " + std::to_string(tokens) + " tokens, and the model " +
           std::to_string(o.model.vocabulary) + "; use a larger --vocabulary, or the model's own tokenizer");
  }
}

DeviceChoice device_of(const std::string& text) {
  if (text == "host") return {};
  if (text == "cuda") return {.cuda = true};
  constexpr std::string_view kPrefix = "cuda:";
  if (text.starts_with(kPrefix)) {
    const std::optional<int> ordinal = number_of<int>(std::string_view(text).substr(kPrefix.size()));
    if (ordinal && *ordinal >= 0) return {.cuda = true, .ordinal = ordinal};
  }
  refuse("--device is '" + text + "'; use host, cuda or cuda:N (N counts GPUs from 0)");
}

void apply(Words& words, TrainerOptions& o) {
  o.fast_order = words.sharding.text("order") == "fast";
  if (o.fast_order) words.sharding.skip("order");
  throw_if_error(words.sharding.read(o));
  o.device = device_of(words.device);
  if (words.model == model_name(ModelKind::kLlama)) o.model.kind = ModelKind::kLlama;
  for (const Schedule one : {Schedule::kConstant, Schedule::kCosine, Schedule::kLinear, Schedule::kWsd}) {
    if (words.schedule == schedule_name(one)) o.schedule = one;
  }
  const std::optional<int> every = parse_recompute(words.recompute);
  if (!every) {
    refuse("--recompute is '" + words.recompute +
           "'; use none, block, or every:K: one layer of every K, at least 1");
  }
  o.recompute_every = static_cast<std::size_t>(*every);
  if (!words.export_shard.empty() &&
      (!parse_bytes(words.export_shard.c_str(), &o.export_shard_bytes) || o.export_shard_bytes == 0))
    refuse("--export-shard is '" + words.export_shard + "'; use a size such as 4GiB");
  const std::optional<ActivationChoice> inputs = parse_activations(words.activations);
  if (!inputs || (inputs->tier == Tier::kFile && inputs->directories.empty())) {
    refuse("--activations is " + words.activations +
           "; use keep, partition, partition+cpu, partition+nvme:DIR[,DIR...] or auto");
  }
  o.activations = inputs->placement;
  o.activation_tier = inputs->tier;
  o.activation_directories = inputs->directories;
}

// An empty value is most often an unset variable of a script. CLI11 takes it for 0.
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

void check_sizes(const TrainerOptions& o) {
  constexpr double kBytesMax = 0x1p56;
  const double layers = static_cast<double>(o.model.layers);
  const double hidden = static_cast<double>(o.model.hidden);
  const double rows = static_cast<double>(o.batch) * static_cast<double>(o.model.sequence);
  const double inner = static_cast<double>(o.model.inner);
  const double columns = 16 * hidden + 3 * inner + static_cast<double>(o.model.heads);
  if (layers * (rows * columns + (12 * hidden + 3 * inner) * hidden) * 16 > kBytesMax) {
    refuse(
        "--layers, --hidden, --inner, --sequence and --batch ask for more than 2^56 bytes together; lower "
        "one of them");
  }
}

// Refuses options that the engine would refuse, before anything starts.
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

// Any bytes on one line.
std::string hexadecimal(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    text += digits;
  }
  return text;
}

// Each output has a file of its own, which is no input's.
void check_files(const TrainerOptions& o) {
  namespace fs = std::filesystem;
  std::vector<std::pair<const char*, std::string>> taken = {{"--data", o.data},
                                                            {"--initial", o.initial_file},
                                                            {"--evaluation-data", o.evaluation_data},
                                                            {"--save-state", o.save_state},
                                                            {"--flight-recorder", o.flight_recorder}};
  for (const std::string& text : o.text) taken.emplace_back("--text", text);
  for (const std::string& text : o.evaluation_text) taken.emplace_back("--evaluation-text", text);
  const std::pair<const char*, std::string> outputs[] = {{"--export", o.export_file},
                                                         {"--logits", o.logits_file},
                                                         {"--write-tokens", o.tokens_file},
                                                         {"--report", o.report_file},
                                                         {"--timeline", o.timeline_file}};
  for (const auto& [option, file] : outputs) {
    std::error_code error;
    // A directory or a stream may have several.
    if (file.empty() || (fs::exists(file, error) && !fs::is_regular_file(file, error))) continue;
    // "same" and "./same" are one file, also before it is made.
    const auto place = [&](const std::string& name) {
      return fs::weakly_canonical(fs::absolute(name, error), error);
    };
    for (const auto& [other, other_file] : taken) {
      if (!other_file.empty() && place(other_file) == place(file))
        refuse(std::string(option) + " and " + other + " both name " + shown_path(file) +
               "; give each a file of its own");
    }
    taken.emplace_back(option, file);
  }
}

// Checks all that needs no other ranks and no files.
void check_options(const TrainerOptions& o) {
  check_files(o);
  check_sizes(o);
  static_cast<void>(describe_units(o.model));  // Checks the sizes.
  if (!o.model.is_llama() && o.model.rope_theta != GptShape().rope_theta)
    refuse("--rope-theta is for rotary position embeddings, which GPT-2 lacks; add --model llama");
  check_sharding(o);
  check_part(o.model, {.size = static_cast<std::size_t>(o.tensor_parallel)});
  check_stages(o.model, static_cast<std::size_t>(o.pipeline_parallel));
  if (o.activations != ActivationPlacement::kKeep && o.recompute_every == 0) {
    refuse("--activations " + activations_name(o) +
           " needs recomputation, and no block is computed again; add --recompute block");
  }
  if (o.activations == ActivationPlacement::kAuto && o.bucket_auto) {
    refuse(
        "--activations auto fills the part of --memory that the rest leaves, and --bucket auto is measured "
        "later; give --bucket a size");
  }
  const bool is_process = starts_processes(o.communicator);
  const bool over_nccl = uses_nccl(o.communicator);
  if (over_nccl && !o.device.cuda) {
    refuse("--communicator " + o.communicator +
           ": NCCL moves bytes between GPUs, and the ranks are on the host; add --device cuda, or use auto");
  }
  if (o.fast_order && !over_nccl) {
    refuse(
        "--order fast is NCCL's own sum, in an order that NCCL chooses; add --communicator nccl, or use rank "
        "or group:G");
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
  if (o.matmul == "library" && !o.device.cuda && !library_matmul_available()) {
    refuse("--matmul library: this build has no oneDNN; use plain, or install libdnnl-dev and build again");
  }
  if (!o.data.empty() && !o.text.empty()) refuse("--text and --data both name the text; use one of them");
  if (o.schedule == Schedule::kConstant && o.last_lr != 0)
    refuse("--last-lr ends a schedule, and the learning rate is constant; add --schedule cosine, say");
  if (o.warmup > o.steps && o.steps > 0) {
    refuse("--warmup is " + std::to_string(o.warmup) + " and --steps " + std::to_string(o.steps) +
           "; warm up for fewer steps, because the rate would never reach --lr");
  }
  if (!o.evaluation_text.empty() && !o.evaluation_data.empty())
    refuse("--evaluation-text and --evaluation-data both name the text to evaluate; use one of them");
  if (!o.evaluates() && o.evaluate_every + o.evaluation_samples > 0) {
    refuse(std::string(o.evaluate_every > 0 ? "--evaluate-every" : "--evaluation-samples") +
           " needs a text to evaluate; add --evaluation-text FILE");
  }
  if (o.export_shard_bytes > 0 && !o.export_file.ends_with('/') && !is_model_directory(o.export_file))
    refuse("--export-shard is the size of the files in a directory; add --export DIR/");
  if (!o.logits_file.empty() && !o.evaluates()) refuse("--logits needs a text; add --evaluation-text FILE");
  if (o.generate > 0 && o.tokenizer == nullptr && o.model.vocabulary != kVocabulary) {
    refuse("--generate writes text, and the tokens of a --vocabulary of " +
           std::to_string(o.model.vocabulary) + " are not bytes; add --tokenizer bpe FILE");
  }
  if (o.tokenizer != nullptr && !o.data.empty() && o.evaluation_text.empty() && o.generate == 0)
    refuse("--tokenizer is for text, and --data is a file of tokens; leave one of them out");
  if (o.generate == 0 &&
      (o.prompt != TrainerOptions().prompt || o.temperature != TrainerOptions().temperature))
    refuse("--prompt and --temperature are for generated text; add --generate N");
  if (o.save_every > 0 && o.save_state.empty())
    refuse("--save-every says how often to save and no directory was given; add --save-state DIR");
  if (!o.load_state.empty() && !o.initial_file.empty()) {
    refuse("--load-state and --initial both give the weights; use one of them");
  }
  if (o.keep > 1 && o.save_state.empty())
    refuse("--keep says how many saved states to keep and no directory was given; add --save-state DIR");
  if (o.save_async && o.save_state.empty())
    refuse("--save-async says how to save and no directory was given; add --save-state DIR");
  if (o.load_step > 0 && o.load_state.empty() && !o.resume)
    refuse("--load-step needs a directory of saved states; add --load-state DIR");
  if (o.resume && o.save_state.empty()) refuse("--resume needs --save-state DIR");
  if (o.resume && !o.load_state.empty()) {
    refuse("--resume loads the state from --save-state, --load-state from elsewhere; use one of them");
  }
  if (o.elastic && !o.resume) {
    refuse("--elastic goes on from the last saved state; add --resume, --save-state DIR and --save-every N");
  }
}

}  // namespace

ParsedCommand parse_command(const std::vector<std::string>& arguments) {
  TrainerOptions options;
  Words words;
  CLI::App app("Train a model like GPT-2 or Llama on text under ZeRO stages 0 to 3", kProgram);
  app.set_version_flag("--version", std::string(kProgram) + " " + version(), "Print the version");
  app.footer(std::string("Sizes: ") + kBytesSyntax + ".");
  add_model_options(app, options, words);
  add_training_options(app, options, words);
  add_rank_options(app, options, words);
  add_sharding_options(app, options, words);
  add_compute_options(app, options, words);
  add_use_options(app, options);
  add_file_options(app, options, words);

  const CommandText description = describe_command(app, kProgram);
  const auto complain = [](const std::string& message) -> ParsedCommand {
    std::fprintf(stderr, "%s: %s\n", kProgram, shown_text(message).c_str());
    return {std::nullopt, kUsageExit};
  };
  try {
    if (arguments.size() == 2 && arguments[0] == "--write-manual") {
      throw_if_error(write_manual(description, arguments[1]));
      return {std::nullopt, 0};
    }
    refuse_empty(arguments);
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // As CLI11 wants them.
    apply(words, options);
    take_model_sizes(app, options);
    take_tokenizer(app, words, options);
    check_options(options);
  } catch (const CLI::CallForHelp&) {
    std::fputs(help_text(description, terminal_width()).c_str(), stdout);
    return {std::nullopt, 0};
  } catch (const CLI::CallForVersion& answer) {
    std::printf("%s\n", answer.what());
    return {std::nullopt, 0};
  } catch (const CLI::ParseError& error) {
    const std::vector<std::string> unknown = app.remaining();
    return complain(unknown.empty() ? parse_error_text(error.what(), kProgram)
                                    : unknown_word_text(description, unknown.front()));
  } catch (const Error& error) {
    return complain(error.status().message());
  }
  return {std::move(options), 0};
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
  if (options.text.empty() && options.data.empty()) options.text = default_text_files();
  return options;
}

namespace {

Text text_of(const TrainerOptions& o, const std::vector<std::string>& files, const std::string& data) {
  if (!data.empty()) return Text::open(data, o.model.vocabulary);
  Text text = Text::read(files, o.model.vocabulary);
  return o.tokenizer != nullptr ? text.encoded(*o.tokenizer) : text;
}

}  // namespace

Text training_text(const TrainerOptions& o) {
  return text_of(o, o.text, o.data);
}

Text evaluation_text(const TrainerOptions& o) {
  return text_of(o, o.evaluation_text, o.evaluation_data);
}

ScheduleOptions schedule_of(const TrainerOptions& o) {
  return {.schedule = o.schedule, .steps = o.steps, .warmup = o.warmup, .peak = o.lr, .last = o.last_lr};
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
  return forebay::activations_name(o.activations, o.activation_tier);
}

std::string configuration_of(const TrainerOptions& o) {
  return "--tensor-parallel " + std::to_string(o.tensor_parallel) + " --pipeline-parallel " +
         std::to_string(o.pipeline_parallel) + " --recompute " + recompute_name(o) + " --activations " +
         activations_name(o) + " --dropout " + exact(o.dropout);
}

// "constant"; "cosine to 1e-05 in 1000 steps, warm-up 50".
std::string schedule_text(const TrainerOptions& o) {
  std::string text = schedule_name(o.schedule);
  if (o.schedule != Schedule::kConstant)
    text += " to " + exact(o.last_lr) + " in " + std::to_string(o.steps) + " steps";
  return text + (o.warmup > 0 ? ", warm-up " + std::to_string(o.warmup) : "");
}

std::vector<std::pair<std::string, std::string>> training_of(const TrainerOptions& o) {
  const auto given = [](const std::string& path) { return std::string(path.empty() ? "no" : "yes"); };
  std::vector<std::pair<std::string, std::string>> all = {
      {"layers", std::to_string(o.model.layers)},
      {"hidden", std::to_string(o.model.hidden)},
      {"heads", std::to_string(o.model.heads)},
      {"sequence", std::to_string(o.model.sequence)},
      {"batch", std::to_string(o.batch)},
      {"lr", exact(o.lr)},
      {"schedule", schedule_text(o)},
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
  if (o.model.vocabulary != kVocabulary) all.emplace_back("vocabulary", std::to_string(o.model.vocabulary));
  if (o.tokenizer != nullptr) all.emplace_back("tokenizer", "bpe " + std::to_string(o.tokenizer->hash()));
  if (o.model.inner != 0) all.emplace_back("inner", std::to_string(o.model.inner));
  if (o.model.is_llama()) {
    all.emplace_back("model", model_name(o.model.kind));
    all.emplace_back("kv-heads", std::to_string(o.model.kv_head_count()));
    all.emplace_back("rope-theta", exact(o.model.rope_theta));
    all.emplace_back("norm-epsilon", exact(o.model.norm_epsilon));
    all.emplace_back("tied-head", o.model.tied_head ? "yes" : "no");
  }
  if (o.optimizer != Optimizer::kAdamW) all.emplace_back("optimizer", option_text(o, "optimizer"));
  if (o.muon_matches_rms) all.emplace_back("muon-rate", option_text(o, "muon-rate"));
  if (o.moments != MomentFormat::kFloat32) all.emplace_back("moments", option_text(o, "moments"));
  if (!o.master_weights) all.emplace_back("master-weights", option_text(o, "master-weights"));
  if (o.ema > 0) all.emplace_back("ema", exact(o.ema));
  return all;
}

std::vector<std::pair<std::string, std::string>> agreement_of(const TrainerOptions& o) {
  const auto given = [](const std::string& path) { return std::string(path.empty() ? "no" : "yes"); };
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto& [name, value] : training_of(o)) all.emplace_back("--" + name, value);
  const std::pair<std::string, std::string> more[] = {
      {"--steps", std::to_string(o.steps)},
      {"--recompute", recompute_name(o)},
      {"--activations", activations_name(o)},
      {"--offload-staging", option_text(o, "offload-staging")},
      {"--save-state", given(o.save_state)},
      {"--save-every", std::to_string(o.save_every)},
      {"--keep", std::to_string(o.keep)},
      {"--load-state", given(o.load_state)},
      {"--load-step", std::to_string(o.load_step)},
      {"--export", given(o.export_file)},
      {"--logits", given(o.logits_file)},
      {"--write-tokens", given(o.tokens_file)},
      {"--evaluate-every", std::to_string(o.evaluate_every)},
      {"--evaluation-samples", std::to_string(o.evaluation_samples)},
      {"--generate", std::to_string(o.generate)},
      {"--prompt", hexadecimal(o.prompt)},
      {"--temperature", exact(o.temperature)}};
  all.insert(all.end(), std::begin(more), std::end(more));
  return all;
}

}  // namespace forebay::gpt
