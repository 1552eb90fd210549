#include <memory>
#include <string>
#include <vector>

#include "forebay/sharding_arguments.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/command_line.h"
#include "runtime/command/plan/activation_arguments.h"
#include "runtime/command/plan/model_arguments.h"
#include "runtime/command/run/output_file.h"
#include "runtime/command/simulate/simulation_print.h"
#include "runtime/command/terminal_line.h"

namespace forebay {
namespace {

// The most ranks that a simulation is made for. Larger: the exchange of a step takes gigabytes.
constexpr std::int64_t kRanksMost = 200'000;

// The command line as typed.
struct SimulateArguments {
  ModelArguments model;
  ActivationArguments activations;
  std::string cluster = "dgx-h100";
  std::int64_t ranks = 0;  // 0: one host.
  ShardingArguments<CLI::App> sharding;
  std::string activation_bytes;
  std::string timeline;
  bool json = false;
  bool without_changes = false;

  const CLI::Option* ranks_option = nullptr;
};

Status read_request(const SimulateArguments& arguments, SimulationRequest* request,
                    std::string* description) {
  FOREBAY_ASSIGN_OR_RETURN(request->cluster, read_cluster(arguments.cluster));
  FOREBAY_ASSIGN_OR_RETURN(const ModelChoice model, read_model(arguments.model));
  *description = describe_model(model);
  request->shape = model.shape;
  request->batch = model.batch;
  request->sequence = model.sequence;
  FOREBAY_ASSIGN_OR_RETURN(const ActivationRequest kept, read_activations(arguments.activations));
  if (kept.placement == ActivationPlacement::kAuto)
    return refuse(
        "--activations is auto, which a simulation does not choose; use keep, partition, partition+cpu or "
        "partition+nvme");
  request->part = kept.part;
  request->recompute_every = kept.recompute_every;
  request->activations = kept.placement;
  request->activation_tier = kept.tier;
  request->ranks = request->cluster.host_ranks;
  if (given(arguments.ranks_option))
    FOREBAY_RETURN_IF_ERROR(read_positive("ranks", arguments.ranks, kRanksMost, &request->ranks));
  const int parts = request->part.tensor_parallel * request->part.pipeline_parallel;
  if (request->ranks % parts != 0) {
    return refuse("--ranks is " + std::to_string(request->ranks) + ", which --tensor-parallel " +
                  std::to_string(request->part.tensor_parallel) + " times --pipeline-parallel " +
                  std::to_string(request->part.pipeline_parallel) + " does not divide; use a multiple of " +
                  std::to_string(parts));
  }
  FOREBAY_RETURN_IF_ERROR(arguments.sharding.read(request->options));
  FOREBAY_RETURN_IF_ERROR(check_optimizer(request->options.optimizer, request->part));
  if (!arguments.sharding.given("dtype") && !request->cluster.device.flops.contains(request->options.dtype))
    request->options.dtype = DataType::kFloat16;
  FOREBAY_ASSIGN_OR_RETURN(request->fused_attention, read_fused_attention(arguments.activations.attention));
  if (!arguments.activation_bytes.empty())
    FOREBAY_RETURN_IF_ERROR(
        read_bytes("activation-bytes", arguments.activation_bytes, &request->activation_bytes.emplace()));
  request->with_timeline = !arguments.timeline.empty();
  if (request->with_timeline)
    FOREBAY_RETURN_IF_ERROR(check_run_file("--timeline", arguments.timeline, "{\"traceEvents\""));
  return Status();
}

Status print(const SimulateArguments& arguments, const SimulationRequest& request,
             const SimulationResult& result, const std::string& description, TerminalLine& line) {
  std::vector<SimulatedChange> changes;
  if (!arguments.without_changes) {
    FOREBAY_ASSIGN_OR_RETURN(changes, simulate_changes(request));
  }
  line.show("");
  if (request.with_timeline) {
    const std::vector<Timeline::Span> spans[] = {result.spans};
    FOREBAY_RETURN_IF_ERROR(write_run_text(arguments.timeline, timeline_json(spans)));
  }
  return write_standard_output(arguments.json ? simulation_json(request, result, changes)
                                              : simulation_text(request, result, changes, description));
}

int run(const SimulateArguments& arguments) {
  SimulationRequest request;
  std::string description;
  if (const Status status = read_request(arguments, &request, &description); !status.ok())
    return complain("forebay simulate", status.message(), kBadUsage);
  TerminalLine line;
  request.progress = [&](const std::string& subject, double done) {
    if (line.due()) line.show(format_text("%s: %.0f %%", subject.c_str(), 100 * done));
  };
  const Result<SimulationResult> result = simulate(request);
  if (!result.ok()) {
    line.show("");
    const bool too_large = result.status().code() == StatusCode::kOutOfMemory;
    return complain("forebay simulate", result.status().message(), too_large ? kFailed : kBadUsage);
  }
  const Status printed = print(arguments, request, result.value(), description, line);
  return printed.ok() ? 0 : complain("forebay simulate", printed.message(), kFailed);
}

}  // namespace

void add_simulate_command(CLI::App& app, Action& action) {
  const auto arguments =
      std::make_shared<SimulateArguments>();  // Shared by the parser's fields and the action.
  SimulateArguments& a = *arguments;
  CLI::App* command =
      app.add_subcommand("simulate", "Simulate a training step on a cluster that is not here");
  add_model_options(*command, a.model);
  add_value(*command, "--cluster", a.cluster, "NAME|FILE",
            "The machine: dgx-2, dgx-a100, dgx-h100, or a JSON file like those installed in "
            "share/forebay/machines")
      ->capture_default_str()
      ->group(kRanksHeading);
  a.ranks_option = add_value(*command, "--ranks", a.ranks, "N", "All ranks, one for each device")
                       ->default_str("those of one host")
                       ->group(kRanksHeading);
  add_activation_options(*command, a.activations);
  a.sharding.add(*command, kPlanProgram, {.dtype = DataType::kBfloat16});
  add_value(*command, "--activation-bytes", a.activation_bytes, "BYTES",
            "Device memory of activations, where a trainer knows it")
      ->default_str("the formulas of forebay plan")
      ->group("Activations");
  add_value(*command, "--timeline", a.timeline, "FILE", "Write the steps as a timeline for Perfetto");
  command->add_flag("--no-changes", a.without_changes,
                    "Leave out the changes that would help, which takes a "
                    "simulation for each");
  command->add_flag("--json", a.json, "Print JSON");
  command->footer(
      "The engine's own schedule and memory run on a device that keeps no bytes, in virtual time. One rank "
      "of each pipeline stage stands for all of them.\nExit code: 0; 1 if the plan does not fit into a "
      "device; 2 for bad input.");
  command->callback([arguments, &action] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace forebay
