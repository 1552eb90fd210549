#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "forebay/sharding_arguments.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/command_line.h"
#include "runtime/command/host_limits.h"
#include "runtime/command/plan/activation_arguments.h"
#include "runtime/command/plan/largest.h"
#include "runtime/command/plan/model_arguments.h"
#include "runtime/command/plan/plan_print.h"
#include "runtime/command/plan/plan_report.h"
#include "runtime/command/terminal_line.h"

namespace forebay {
namespace {

constexpr int kDoesNotHold = 1;
// Granularity in which devices map memory: at least a page; GPUs have 2 MiB.
constexpr std::uint64_t kChunkLeast = std::uint64_t{4} << 10;
constexpr std::uint64_t kChunkMost = std::uint64_t{1} << 30;

// The command line as typed. Numbers are signed, so that the refusal of a negative one is ours.
struct PlanArguments {
  std::string parameters;
  ModelArguments model;
  ActivationArguments activations;
  std::int64_t ranks = 0;  // 0: one data-parallel rank.
  std::int64_t host_ranks = 0;
  ShardingArguments<CLI::App> sharding;
  std::string chunk = "2MiB";
  std::string preset = "forebay";
  bool json = false;
  bool largest = false;

  const CLI::Option* ranks_option = nullptr;
  const CLI::Option* host_ranks_option = nullptr;
};

// Reads the model, and describes its shape, if it has one.
Status read_request(const PlanArguments& arguments, PlanRequest* request, std::string* description) {
  const ModelArguments& model = arguments.model;
  const bool has_count = !arguments.parameters.empty();
  if (has_count && (model.has_config() || model.has_shape() || model.has_batch())) {
    return refuse(
        "--parameters and a shape were both given; a shape says how many parameters there are, so use one of "
        "them");
  }
  if (has_count) {
    FOREBAY_ASSIGN_OR_RETURN(request->parameters, parse_parameter_count(arguments.parameters));
    return Status();
  }
  FOREBAY_ASSIGN_OR_RETURN(const ModelChoice read, read_model(model));
  request->shape = read.shape;
  request->batch = read.batch;
  request->sequence = read.sequence;
  *description = describe_model(read);
  return Status();
}

Status read_options(const PlanArguments& arguments, PlanRequest* request) {
  PlanOptions& options = request->options;
  FOREBAY_RETURN_IF_ERROR(arguments.sharding.read(options));
  for (const char* const name : {"bucket", "offload-fraction"}) {
    if (option_text(options, name) == "auto") {
      return refuse(std::string("--") + name + " is auto, which is measured where a model is trained; " +
                    "give a plan the value to expect");
    }
  }
  FOREBAY_RETURN_IF_ERROR(read_bytes("chunk", arguments.chunk, &options.chunk_bytes));
  if (!std::has_single_bit(options.chunk_bytes) || options.chunk_bytes < kChunkLeast ||
      options.chunk_bytes > kChunkMost) {
    return refuse("--chunk is '" + arguments.chunk + "', and devices map powers of two; use one from " +
                  format_bytes(kChunkLeast) + " to " + format_bytes(kChunkMost) + ", such as 2MiB");
  }

  const std::optional<Preset> preset = parse_preset(arguments.preset);
  if (!preset) {
    return refuse("--preset is '" + arguments.preset + "'; use forebay, paper, deepspeed or megatron");
  }
  request->preset = *preset;
  return Status();
}

// All ranks are one grid, as in forebay-gpt: ranks / (tensor-parallel * pipeline-parallel) are data-parallel.
Status read_ranks(const PlanArguments& arguments, PlanRequest* request, int* world_size) {
  const int parts = request->part.tensor_parallel * request->part.pipeline_parallel;
  *world_size = parts;
  if (given(arguments.ranks_option))
    FOREBAY_RETURN_IF_ERROR(read_positive("ranks", arguments.ranks, 1'000'000, world_size));
  if (*world_size % parts != 0) {
    return refuse("--ranks is " + std::to_string(*world_size) + ", which --tensor-parallel " +
                  std::to_string(request->part.tensor_parallel) + " times --pipeline-parallel " +
                  std::to_string(request->part.pipeline_parallel) + " = " + std::to_string(parts) +
                  " does not divide; use a multiple of " + std::to_string(parts));
  }
  request->options.ranks = *world_size / parts;
  return Status();
}

// No device is there to take the room from, so only a room that was given counts.
Status read_memory(const PlanArguments& arguments, const ShardingOptions& options, PlanBudget* budget) {
  budget->memory_bytes = options.memory_bytes;
  if (!arguments.sharding.given("device-room")) return Status();
  if (options.memory_bytes == 0)
    return refuse("--device-room is taken off --memory, which was not given; add --memory");
  if (options.room_bytes >= options.memory_bytes) {
    return refuse("--device-room " + format_bytes(options.room_bytes) + " leaves nothing of --memory " +
                  format_bytes(options.memory_bytes) + "; give less");
  }
  budget->room_bytes = options.room_bytes;
  budget->memory_bytes -= options.room_bytes;
  return Status();
}

Status read_budget(const PlanArguments& arguments, int world_size, PlanBudget* budget) {
  if (given(arguments.host_ranks_option)) {
    if (arguments.host_ranks < 0 || arguments.host_ranks > world_size) {
      return refuse("--host-ranks is " + std::to_string(arguments.host_ranks) + "; use 0 to all ranks (" +
                    std::to_string(world_size) + ")");
    }
    budget->host_ranks = static_cast<std::uint64_t>(arguments.host_ranks);
  }
  if (budget->host_ranks != 0) budget->host_limits = read_host_limits();
  return Status();
}

// Completes the request for activations, if one was made, from the other options.
Status read_kept(const PlanArguments& arguments, const PlanBudget& budget, PlanRequest* request,
                 std::optional<ActivationRequest>* kept) {
  if (!*kept) return {};
  ActivationRequest& wanted = **kept;
  if (!request->shape || request->preset != Preset::kForebay) {
    return refuse(
        "--tensor-parallel, --pipeline-parallel, --recompute and --activations need the shape of a model and "
        "preset forebay; give --layers --hidden --heads --sequence --batch, or --config");
  }
  wanted.shape = *request->shape;
  wanted.batch = request->batch;
  wanted.sequence = request->sequence;
  wanted.fused_attention = request->fused_attention;
  wanted.micro_steps = request->options.micro_steps;
  wanted.dtype = request->options.dtype;
  if (wanted.placement == ActivationPlacement::kAuto &&
      (budget.memory_bytes == 0 || !arguments.sharding.given("stage")))
    return refuse(
        "--activations auto fills the part of a budget that a stage leaves; add --memory and --stage");
  return {};
}

// Plans the activations of one pipeline stage and adds their bytes to the request. `auto` gives saved inputs
// the part of the device budget that everything else leaves.
Status plan_activations(ActivationRequest wanted, const PlanBudget& budget, PlanRequest* request,
                        std::vector<ActivationReport>* reports) {
  wanted.part = request->part;
  if (wanted.placement == ActivationPlacement::kAuto) {
    ActivationRequest without = wanted;
    without.placement = ActivationPlacement::kKeep;
    FOREBAY_ASSIGN_OR_RETURN(const ActivationReport live, make_activation_report(without));
    request->activation_bytes = live.live_bytes();
    FOREBAY_ASSIGN_OR_RETURN(const PlanReport others, make_plan_report(*request));
    const std::uint64_t needed = others.bytes.needed();
    if (budget.memory_bytes <= needed) {
      return refuse("--activations auto has nothing to choose: everything but saved inputs needs " +
                    format_bytes(needed) + " and --memory is " + format_bytes(budget.memory_bytes) +
                    "; shard or offload more of the model states");
    }
    wanted.device_bytes = budget.memory_bytes - needed;
  }
  FOREBAY_ASSIGN_OR_RETURN(ActivationReport made, make_activation_report(wanted));
  request->activation_bytes = made.device_bytes();
  request->host_activation_bytes = made.plan ? made.plan->host_bytes() : 0;
  reports->push_back(std::move(made));
  return {};
}

// Plans one ZeRO stage: the report of the pipeline stage that needs most.
Result<PlanReport> plan_worst(PlanRequest request, const std::optional<ActivationRequest>& kept,
                              const PlanBudget& budget, std::vector<ActivationReport>* activations) {
  std::vector<PlanReport> stages;
  activations->clear();
  for (int stage = 0; stage < request.part.pipeline_parallel; ++stage) {
    request.part.pipeline_stage = stage;
    if (kept) FOREBAY_RETURN_IF_ERROR(plan_activations(*kept, budget, &request, activations));
    FOREBAY_ASSIGN_OR_RETURN(PlanReport report, make_plan_report(request));
    stages.push_back(std::move(report));
  }
  return stages.size() == 1 ? std::move(stages.front()) : worst_stage(stages);
}

// Plans the ZeRO stage given, or all of them. It is an error only when none can be planned.
Status plan_stages(PlanRequest request, std::optional<int> only, const std::optional<ActivationRequest>& kept,
                   const PlanBudget& budget, std::vector<PlanReport>* reports,
                   std::vector<std::string>* left_out, std::vector<ActivationReport>* activations) {
  Status first;
  for (int stage = only.value_or(0); stage <= only.value_or(3); ++stage) {
    request.options.stage = stage;
    Result<PlanReport> report = plan_worst(request, kept, budget, activations);
    if (report.ok()) {
      reports->push_back(std::move(report).value());
      continue;
    }
    if (first.ok()) first = report.status();
    left_out->push_back(report.status().message());
  }
  return reports->empty() ? first : Status();
}

// Prints the largest models and batches instead of a plan. `*holds`: one layer fits at one of the stages.
Status print_largest(const PlanArguments& arguments, PlanRequest request, PlanBudget budget,
                     const std::optional<ActivationRequest>& kept, const std::string& description,
                     bool* holds) {
  if (!request.shape || budget.memory_bytes == 0) {
    return refuse(
        "--largest grows the shape of a model until --memory is full; give --memory, and --layers --hidden "
        "--heads or --config");
  }
  const bool has_stage = arguments.sharding.given("stage");
  std::vector<LargestFigures> figures;
  TerminalLine line;
  for (int stage = 0; stage <= 3; ++stage) {
    if (has_stage && stage != request.options.stage) continue;
    PlanRequest one = request;
    one.options.stage = stage;
    figures.push_back(find_largest(
        one, kept, budget,
        [&](const PlanRequest& candidate, const std::optional<ActivationRequest>& activations) {
          if (line.due()) {
            line.show("stage " + std::to_string(stage) + ": trying " + grouped(candidate.shape->layers) +
                      " layers, a batch of " + grouped(candidate.batch));
          }
          std::vector<ActivationReport> reports;
          return plan_worst(candidate, activations, budget, &reports);
        }));
  }
  line.show("");
  *holds =
      std::any_of(figures.begin(), figures.end(), [](const LargestFigures& one) { return one.layers > 0; });
  throw_if_error(write_standard_output(arguments.json ? largest_json(figures, budget)
                                                      : largest_text(figures, budget, description)));
  return Status();
}

// Prints the plan. `*holds`: one of the stages shown fits into the given limits; the host is one with
// --host-ranks.
Status plan(const PlanArguments& arguments, bool* holds) {
  const bool has_stage = arguments.sharding.given("stage");
  if (arguments.json && !has_stage && !arguments.largest)
    return refuse("--json prints one plan and no --stage was given; add --stage");
  PlanRequest request;
  PlanBudget budget;
  std::string description;
  std::optional<ActivationRequest> kept;
  FOREBAY_ASSIGN_OR_RETURN(request.fused_attention, read_fused_attention(arguments.activations.attention));
  if (arguments.activations.given()) {
    FOREBAY_ASSIGN_OR_RETURN(kept, read_activations(arguments.activations));
    request.part = kept->part;
  }
  int world_size = 1;
  FOREBAY_RETURN_IF_ERROR(read_ranks(arguments, &request, &world_size));
  FOREBAY_RETURN_IF_ERROR(read_options(arguments, &request));
  FOREBAY_RETURN_IF_ERROR(check_optimizer(request.options.optimizer, request.part));
  FOREBAY_RETURN_IF_ERROR(read_request(arguments, &request, &description));
  FOREBAY_RETURN_IF_ERROR(read_memory(arguments, request.options, &budget));
  FOREBAY_RETURN_IF_ERROR(read_budget(arguments, world_size, &budget));
  FOREBAY_RETURN_IF_ERROR(read_kept(arguments, budget, &request, &kept));
  if (arguments.largest) return print_largest(arguments, request, budget, kept, description, holds);

  std::vector<PlanReport> reports;
  std::vector<std::string> left_out;
  std::vector<ActivationReport> activations;  // By pipeline stage; the same at every ZeRO stage.
  FOREBAY_RETURN_IF_ERROR(plan_stages(request,
                                      has_stage ? std::optional<int>(request.options.stage) : std::nullopt,
                                      kept, budget, &reports, &left_out, &activations));
  const std::string text = arguments.json ? plan_json(reports.front(), budget, activations)
                                          : plan_text(reports, left_out, description, budget, activations);
  throw_if_error(write_standard_output(text));  // Not bad usage.
  *holds = std::any_of(reports.begin(), reports.end(),
                       [&](const PlanReport& report) { return plan_fits(report, budget); });
  return Status();
}

int run(const PlanArguments& arguments) {
  bool holds = false;
  const Status status = plan(arguments, &holds);
  if (status.ok()) return holds ? 0 : kDoesNotHold;
  return complain("forebay plan", status.message(), kBadUsage);
}

}  // namespace

void add_plan_command(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<PlanArguments>();  // Shared by the parser's fields and the action.
  PlanArguments& a = *arguments;
  CLI::App* command = app.add_subcommand(
      "plan", "Print the bytes that each rank holds and sends, before anything is allocated");
  const auto text = [&](const char* name, std::string& target, const char* help, const char* type) {
    return command->add_option(name, target, help)->type_name(type)->capture_default_str();
  };
  text("--parameters", a.parameters, "The model as a number of parameters: 124M, 7.5B, 1.5e9", "COUNT")
      ->group(kModelHeading);
  add_model_options(*command, a.model);
  a.ranks_option =
      add_value(*command, "--ranks", a.ranks, "N",
                "All ranks; --ranks / (--tensor-parallel * --pipeline-parallel) of them are data-parallel")
          ->default_str("one data-parallel rank")
          ->group(kRanksHeading);
  add_activation_options(*command, a.activations);
  a.sharding.add(*command, kPlanProgram, {.dtype = DataType::kBfloat16});
  a.sharding.option("stage")->default_str("all of them, side by side");
  // `auto` is for programs that measure: read_options refuses it.
  for (const auto& [name, values] : {std::pair("bucket", "BYTES"), std::pair("offload-fraction", "0..1")}) {
    CLI::Option* const option = a.sharding.option(name);
    const std::string help = option->get_description();
    option->type_name(values)->description(help.substr(0, help.find_last_of(".;", help.find(" auto:"))));
  }
  text("--chunk", a.chunk, "Granularity in which the device maps memory", "BYTES");
  text("--preset", a.preset,
       "Accounting: forebay, the bytes of this engine; paper, the formulas of ZeRO; deepspeed or megatron, "
       "the bytes that these would hold",
       "forebay|paper|deepspeed|megatron");
  a.host_ranks_option = add_value(*command, "--host-ranks", a.host_ranks, "N",
                                  "Judge this host too, as if so many ranks kept their device bytes in its "
                                  "memory; in a pipeline, those that need most. 0: not judged")
                            ->capture_default_str();
  command->add_flag("--largest", a.largest,
                    "Print the largest model of the shape's width, grown to at most 10,000 layers, and the "
                    "largest batch of the shape, that --memory holds");
  command->add_flag("--json", a.json, "Print JSON");
  command->footer(
      std::string(
          "Without --parameters, --config or a shape, the model is the one that forebay-gpt trains by "
          "default (there in fp32).\nSizes: ") +
      kBytesSyntax +
      ".\nExit code: 0; 1 if none of the stages shown fits into --memory and, with --host-ranks, into this "
      "host; 2 for bad input.");
  command->callback([arguments, &action] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace forebay
