#include "runtime/command/plan/activation_arguments.h"

#include <optional>

#include "runtime/command/command_line.h"
#include "runtime/command/plan/model_arguments.h"

namespace forebay {
namespace {

constexpr std::int64_t kPartLimit = 1 << 12;  // A larger product is no number of ranks.

}  // namespace

bool ActivationArguments::given() const {
  return !recompute.empty() || !placement.empty() || tensor_parallel_option->count() > 0 ||
         pipeline_parallel_option->count() > 0;
}

void add_activation_options(CLI::App& command, ActivationArguments& arguments) {
  const auto number = [&](const char* name, std::int64_t& target, const char* help) {
    return add_value(command, name, target, "N", help)->capture_default_str()->group(kRanksHeading);
  };
  const auto text = [&](const char* name, std::string& target, const char* values, const char* help) {
    return add_value(command, name, target, values, help)->group("Activations");
  };
  arguments.tensor_parallel_option = number("--tensor-parallel", arguments.tensor_parallel,
                                            "Ranks that share every layer, a divisor of --heads: each has "
                                            "1/N of its matrices and all of its inputs");
  arguments.pipeline_parallel_option =
      number("--pipeline-parallel", arguments.pipeline_parallel,
             "Pipeline stages that the layers are divided over, one forward, one backward: stage i holds the "
             "activations of up to N - i micro-steps. The plan is that of the stage that needs most");
  text("--recompute", arguments.recompute, "none|block|every:K",
       "Layers that the backward pass computes again: none; block, every layer from its input; every:K, one "
       "layer of every K, from the first on, while the others keep everything")
      ->default_str("block with --activations, otherwise none");
  text("--activations", arguments.placement, "keep|partition|partition+cpu|partition+nvme|auto",
       "Where the inputs of recomputed layers wait for the backward pass: keep, whole on each device; "
       "partition, a slice on each tensor-parallel rank; partition+cpu or partition+nvme, the slice in host "
       "memory or files; auto, the first that --memory has room for");
  text("--attention", arguments.attention, "fused|plain",
       "fused: one kernel that keeps no scores. plain: scores in memory, each operation a kernel, as before "
       "2022")
      ->capture_default_str();
}

Result<bool> read_fused_attention(const std::string& attention) {
  if (attention != "fused" && attention != "plain")
    return refuse("--attention is '" + attention + "'; use fused or plain");
  return attention == "fused";
}

Status check_optimizer(Optimizer optimizer, const ModelPart& part) {
  if (part.tensor_parallel == 1 || (optimizer != Optimizer::kMuon && optimizer != Optimizer::kAdafactor))
    return {};
  return refuse("--optimizer " + std::string(optimizer_name(optimizer)) +
                " needs whole matrices, which --tensor-parallel " + std::to_string(part.tensor_parallel) +
                " splits; use another optimizer, or no tensor parallelism");
}

Result<ActivationRequest> read_activations(const ActivationArguments& arguments) {
  ActivationRequest request;
  ModelPart& part = request.part;
  FOREBAY_RETURN_IF_ERROR(
      read_positive("tensor-parallel", arguments.tensor_parallel, kPartLimit, &part.tensor_parallel));
  FOREBAY_RETURN_IF_ERROR(
      read_positive("pipeline-parallel", arguments.pipeline_parallel, kPartLimit, &part.pipeline_parallel));
  const bool placed = !arguments.placement.empty();
  const std::string recompute = !arguments.recompute.empty() ? arguments.recompute
                                : placed                     ? "block"
                                                             : "none";
  const std::optional<int> every = parse_recompute(recompute);
  if (!every) {
    return refuse("--recompute is '" + recompute +
                  "'; use none, block, or every:K: one layer of every K, at least 1");
  }
  request.recompute_every = *every;
  if (!placed) return request;
  if (request.recompute_every == 0) {
    return refuse(
        "--activations keeps the inputs of recomputed layers and --recompute none saves none; use "
        "--recompute block, or every:K");
  }
  const std::optional<ActivationChoice> choice = parse_activations(arguments.placement);
  if (!choice) {
    return refuse("--activations is '" + arguments.placement +
                  "'; use keep, partition, partition+cpu, partition+nvme (directories may follow) or auto");
  }
  request.placement = choice->placement;
  request.tier = choice->tier;
  return request;
}

}  // namespace forebay
