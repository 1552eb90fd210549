#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "forebay/activation_formulas.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/command_line.h"
#include "runtime/command/compare/comparison_print.h"
#include "runtime/command/plan/model_arguments.h"
#include "runtime/command/run/output_file.h"
#include "runtime/command/terminal_line.h"

namespace forebay {
namespace {

constexpr std::int64_t kComparedRanksMost = 200'000;
constexpr double kPriceMost = 1e9;
constexpr std::int64_t kCountMost = std::int64_t{1} << 40;

// The command line as typed.
struct CompareArguments {
  ModelArguments model;
  std::string cluster = "dgx-h100";
  std::optional<std::int64_t> ranks, global_batch;
  std::string dtype;
  std::string memory;
  std::vector<int> stages, tensor_parallel, pipeline_parallel;
  std::vector<std::string> activations;
  std::vector<std::uint64_t> batches;
  std::vector<std::string> recompute;
  std::string objective = "time";
  std::optional<double> price;
  std::optional<std::int64_t> limit, threads;
  std::string csv, html;
  bool json = false;
};

Status read_choices(const CompareArguments& arguments, ComparisonRequest* request) {
  ComparisonChoices& choices = request->choices;
  choices = default_choices(request->base, request->global_batch);
  if (!arguments.stages.empty()) choices.stages = arguments.stages;
  if (!arguments.tensor_parallel.empty()) choices.tensor_parallel = arguments.tensor_parallel;
  if (!arguments.pipeline_parallel.empty()) choices.pipeline_parallel = arguments.pipeline_parallel;
  if (!arguments.activations.empty()) choices.activations.clear();
  for (const std::string& word : arguments.activations) {
    const std::optional<ActivationChoice> choice = parse_activations(word);
    if (!choice || choice->placement == ActivationPlacement::kAuto)
      return refuse("--activations is '" + word + "'; use keep, partition, partition+cpu or partition+nvme");
    choices.activations.push_back(*choice);
  }
  if (!arguments.batches.empty()) choices.batches = arguments.batches;
  for (const int stage : choices.stages) {
    if (stage < 0 || stage > 3) return refuse("--stage is " + std::to_string(stage) + "; use 0 to 3");
  }
  for (const int tensor : choices.tensor_parallel) {
    if (tensor < 1) return refuse("--tensor-parallel is " + std::to_string(tensor) + "; use 1 or more");
  }
  for (const std::uint64_t batch : choices.batches) {
    if (batch == 0) return refuse("--micro-batch is 0; use 1 or more");
  }
  for (const int pipeline : choices.pipeline_parallel) {
    if (pipeline < 1 || static_cast<std::uint64_t>(pipeline) > request->base.shape.layers) {
      return refuse("--pipeline-parallel is " + std::to_string(pipeline) + "; use 1 to the model's " +
                    std::to_string(request->base.shape.layers) + " layers");
    }
  }
  if (arguments.recompute.empty()) return {};
  choices.recompute.clear();
  for (const std::string& word : arguments.recompute) {
    const std::optional<int> every = parse_recompute(word);
    if (!every) return refuse("--recompute is '" + word + "'; use none, block, or every:K");
    choices.recompute.push_back(*every);
  }
  return {};
}

Status read_comparison(const CompareArguments& arguments, ComparisonRequest* request, ComparisonText* text) {
  SimulationRequest& base = request->base;
  FOREBAY_ASSIGN_OR_RETURN(base.cluster, read_cluster(arguments.cluster));
  FOREBAY_ASSIGN_OR_RETURN(const ModelChoice model, read_model(arguments.model));
  base.shape = model.shape;
  base.sequence = model.sequence;
  base.ranks = base.cluster.host_ranks;
  if (arguments.ranks)
    FOREBAY_RETURN_IF_ERROR(read_positive("ranks", *arguments.ranks, kComparedRanksMost, &base.ranks));
  request->global_batch = static_cast<std::uint64_t>(base.ranks);
  if (arguments.global_batch)
    FOREBAY_RETURN_IF_ERROR(
        read_positive("global-batch", *arguments.global_batch, kCountMost, &request->global_batch));
  base.options.dtype =
      base.cluster.device.flops.contains(DataType::kBfloat16) ? DataType::kBfloat16 : DataType::kFloat16;
  if (!arguments.dtype.empty()) {
    const Status status = set_option(base.options, "dtype", arguments.dtype);
    if (!status.ok()) return refuse("--" + status.message());
  }
  if (!arguments.memory.empty())
    FOREBAY_RETURN_IF_ERROR(read_bytes("memory", arguments.memory, &base.options.memory_bytes));
  FOREBAY_RETURN_IF_ERROR(read_choices(arguments, request));
  request->threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (arguments.threads)
    FOREBAY_RETURN_IF_ERROR(read_positive("threads", *arguments.threads, 1024, &request->threads));
  if (arguments.limit)
    FOREBAY_RETURN_IF_ERROR(read_positive("limit", *arguments.limit, kCountMost, &request->limit));

  text->model = describe_model(model) + "; " + std::to_string(base.ranks) + " ranks of " + base.cluster.name +
                ", " + std::to_string(request->global_batch) + " sequences in a step";
  if (arguments.objective == "memory") {
    text->objective = Objective::kMemory;
  } else if (arguments.objective == "cost") {
    text->objective = Objective::kCost;
  } else if (arguments.objective != "time") {
    return refuse("--objective is '" + arguments.objective + "'; use time, memory or cost");
  }
  if (text->objective == Objective::kCost && !arguments.price)
    return refuse("--objective cost needs the price of a device for an hour; add --price");
  if (arguments.price && !(*arguments.price > 0 && *arguments.price <= kPriceMost))
    return refuse(
        format_text("--price is %g; use a number above 0, at most %g", *arguments.price, kPriceMost));
  text->price = arguments.price.value_or(0);
  if (!arguments.csv.empty()) FOREBAY_RETURN_IF_ERROR(check_run_file("--csv", arguments.csv, "setting,"));
  if (!arguments.html.empty())
    FOREBAY_RETURN_IF_ERROR(check_run_file("--html", arguments.html, "<!doctype html>"));
  return check_different_files("--csv", arguments.csv, "--html", arguments.html);
}

Status write_comparison(const CompareArguments& arguments, const Comparison& comparison,
                        const ComparisonText& text) {
  // First, so that it is there if a file cannot be written.
  FOREBAY_RETURN_IF_ERROR(write_standard_output(arguments.json ? comparison_json(comparison, text)
                                                               : comparison_text(comparison, text)));
  if (!arguments.csv.empty())
    FOREBAY_RETURN_IF_ERROR(write_run_text(arguments.csv, comparison_csv(comparison, text)));
  return arguments.html.empty() ? Status()
                                : write_run_text(arguments.html, comparison_page(comparison, text));
}

int run(const CompareArguments& arguments) {
  ComparisonRequest request;
  ComparisonText text;
  if (const Status status = read_comparison(arguments, &request, &text); !status.ok())
    return complain("forebay compare", status.message(), kBadUsage);
  TerminalLine line;
  request.progress = [&](const char* verb, std::size_t done, std::size_t all) {
    line.show(std::to_string(done) + " of " + std::to_string(all) + " settings " + verb);
  };
  const Result<Comparison> comparison = compare_settings(request);
  line.show("");
  if (!comparison.ok()) return complain("forebay compare", comparison.status().message(), kBadUsage);
  if (const Status written = write_comparison(arguments, comparison.value(), text); !written.ok())
    return complain("forebay compare", written.message(), kFailed);
  return best_first(comparison.value(), text.objective).empty() ? kFailed : 0;
}

}  // namespace

void add_compare_command(CLI::App& app, Action& action) {
  const auto arguments =
      std::make_shared<CompareArguments>();  // Shared by the parser's fields and the action.
  CompareArguments& a = *arguments;
  CLI::App* command =
      app.add_subcommand("compare", "Simulate many settings of a training, and print the best ones");
  add_model_options(*command, a.model);
  add_value(*command, "--cluster", a.cluster, "NAME|FILE", "The machine, as for forebay simulate")
      ->capture_default_str()
      ->group(kRanksHeading);
  add_value(*command, "--ranks", a.ranks, "N", "All ranks, one for each device")
      ->default_str("those of one host")
      ->group(kRanksHeading);
  add_value(*command, "--global-batch", a.global_batch, "N",
            "Sequences of a step over all ranks, the same for all settings")
      ->default_str("one for each rank")
      ->group(kModelHeading);
  add_value(*command, "--dtype", a.dtype, "fp32|bf16|fp16", "Type of parameters and gradients")
      ->default_str("bf16, where the device has it");
  add_value(*command, "--memory", a.memory, "BYTES", "Device memory of a rank")->default_str("the device's");
  const auto list = [&](const char* name, auto& target, const char* type, const char* help) {
    add_value(*command, name, target, type, help)->delimiter(',')->group("Settings");
  };
  list("--stage", a.stages, "N,", "ZeRO stages to try; without it all");
  list("--tensor-parallel", a.tensor_parallel, "N,", "Without it: powers of two within a host");
  list("--pipeline-parallel", a.pipeline_parallel, "N,", "Without it: 1");
  list("--activations", a.activations, "keep|partition|",
       "Where inputs of recomputed layers wait, as for forebay simulate; without it keep");
  list("--micro-batch", a.batches, "N,", "Sequences of a micro-step; without it powers of two to 32");
  list("--recompute", a.recompute, "none|block|every:K,", "Without it: none and block");
  add_value(*command, "--objective", a.objective, "time|memory|cost", "The order of the settings")
      ->capture_default_str();
  add_value(*command, "--price", a.price, "NUMBER", "Price of a device for an hour, in any currency");
  add_value(*command, "--limit", a.limit, "N", "Simulate at most so many settings, evenly over all that fit");
  add_value(*command, "--threads", a.threads, "N", "Simulations at the same time")
      ->default_str("one for each processor");
  add_value(*command, "--csv", a.csv, "FILE", "Write all settings as CSV");
  add_value(*command, "--html", a.html, "FILE", "Write a page with a plot");
  command->add_flag("--json", a.json, "Print JSON");
  command->footer(
      "Settings of which the plan does not fit are not simulated.\nExit code: 0; 1 if no setting fits; 2 for "
      "bad input.");
  command->callback([arguments, &action] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace forebay
