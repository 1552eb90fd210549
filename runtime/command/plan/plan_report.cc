#include "runtime/command/plan/plan_report.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::uint64_t kParameterCountLimit = std::uint64_t{1} << 52;

Status refuse(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

// The two numbers that every formula has.
constexpr std::uint64_t kTooLarge = ~std::uint64_t{0};

struct Scale {
  std::uint64_t psi = 0;
  std::uint64_t ranks = 1;

  std::uint64_t whole(std::uint64_t bytes) const { return bytes * psi; }
  // Rounded up: the rank with most.
  std::uint64_t shard(std::uint64_t bytes) const { return ceil_div(bytes * psi, ranks); }
  // Sending `bytes` bytes a parameter through a ring: the (N-1)/N of it that leaves the rank. kTooLarge if
  // that does not fit.
  std::uint64_t ring(std::uint64_t bytes) const {
    // Psi is below 2^52, N below 2^20 and `bytes` below 2^40.
    __extension__ using Wide = unsigned __int128;
    const Wide sent = (Wide{bytes} * psi * (ranks - 1) + ranks - 1) / ranks;
    return sent < kTooLarge ? static_cast<std::uint64_t>(sent) : kTooLarge;
  }
};

std::uint64_t largest_module(const ModelShape& model) {
  // A module holds a weight and its bias: the name up to its last dot.
  std::map<std::string, std::uint64_t> modules;
  std::uint64_t largest = 0;
  for (const UnitShape& unit : model.units) {
    for (const ParameterShape& parameter : unit.parameters) {
      std::uint64_t& count = modules[parameter.name.substr(0, parameter.name.rfind('.'))];
      count += parameter.count;
      largest = std::max(largest, count);
    }
  }
  return largest;
}

std::string times(std::uint64_t factor, const char* what) {
  return (factor == 1 ? "" : std::to_string(factor)) + what;
}

// "4Psi + 12Psi/N", without a part that is nothing.
std::string join(std::uint64_t whole, std::uint64_t sharded) {
  if (whole == 0 && sharded == 0) return "0";
  if (sharded == 0) return times(whole, "Psi");
  if (whole == 0) return times(sharded, "Psi/N");
  return times(whole, "Psi") + " + " + times(sharded, "Psi/N");
}

// --- paper ---

bool has_shard_accumulator(const PlanOptions& options) {
  return options.micro_steps > 1 && options.accumulate == Accumulate::kShard;
}

bool is_own_master(const PlanOptions& options) {
  return options.dtype == DataType::kFloat32 || !options.master_weights;
}

// Bytes of Muon that files do not take: the update of a matrix, or the v of another parameter.
std::uint64_t width_in_memory(const PlanOptions& options) {
  return options.optimizer == Optimizer::kMuon ? sizeof(float) : 0;
}

// Master, moments and moving average, without the exponents of block8.
std::uint64_t state_width(const PlanOptions& options) {
  const std::uint64_t moments =
      (has_first_moment(options.optimizer) ? 1 : 0) + (has_second_moment(options.optimizer) ? 1 : 0);
  return (is_own_master(options) ? element_bytes(options.dtype) : 4) +
         moments * moment_bytes(options.moments, 1) + (options.ema > 0 ? 4 : 0) + width_in_memory(options);
}

std::uint64_t optimizer_width(const PlanOptions& options) {
  return state_width(options) - (is_own_master(options) ? element_bytes(options.dtype) : 0);
}

// How often every parameter's element crosses the wire in a step.
std::uint64_t wire_passes(const PlanOptions& options) {
  const std::uint64_t k = static_cast<std::uint64_t>(options.micro_steps);
  if (options.stage == 3) return 3 * k;
  return (options.accumulate == Accumulate::kLocal ? 1 : k) + 1;
}

// "pinned 14Psi/N", "pinned 2Psi/N and staging; files 12Psi/N".
std::string below_device_formula(const PlanOptions& options) {
  if (options.offload == Offload::kNone) return "";
  const char* const what = options.stage == 0 ? "Psi" : "Psi/N";
  const std::uint64_t element = element_bytes(options.dtype);
  const std::uint64_t parameters =
      options.offload == Offload::kOptimizerAndParameters && !is_own_master(options) ? element : 0;
  if (options.tier == Tier::kPinned)
    return "pinned " + times(state_width(options) + element + parameters, what);
  const std::uint64_t in_memory = width_in_memory(options);
  return "pinned " + times(element + in_memory, what) + " and staging; files " +
         times(state_width(options) - in_memory + parameters, what);
}

// "2Psi + 14Psi/N", in bytes: states that every rank keeps whole, and states of which it keeps a shard.
std::string states_formula(const PlanOptions& options) {
  const std::uint64_t element = element_bytes(options.dtype);
  const std::uint64_t optimizer = optimizer_width(options);
  const std::uint64_t accumulator = has_shard_accumulator(options) ? 4 : 0;
  if (options.offload != Offload::kNone) {
    // Micro-steps add up on the host where ranks update shards.
    switch (options.stage) {
      case 0:
        return join(2 * element, accumulator);
      case 1:
        return join(2 * element, 0);
      case 2:
        return join(element, 0);
      default:
        return join(0, options.offload == Offload::kOptimizerAndParameters ? 0 : element);
    }
  }
  switch (options.stage) {
    case 0:
      return join(2 * element + optimizer, accumulator);
    case 1:
      return join(2 * element, optimizer + accumulator);
    case 2:
      return join(element, optimizer + std::max(element, accumulator));
    default:
      return join(0, element + optimizer + std::max(element, accumulator));
  }
}

std::string wire_formula(const PlanOptions& options) {
  const std::string matrices =
      options.optimizer == Optimizer::kMuon ? ", and 2Psi(N-1)/N of 4 for layers with matrices" : "";
  if (options.in_groups()) {
    const std::uint64_t reductions =
        options.accumulate == Accumulate::kLocal ? 1 : static_cast<std::uint64_t>(options.micro_steps);
    const std::uint64_t gathers = wire_passes(options) - reductions;
    // Whole slices travel as far as they must, sums once more across the groups, in fp32.
    return times(reductions, "Psi(G-1)/G") + " + " +
           times(gathers, options.shard_within_group ? "Psi(G-1)/G" : "Psi(N-1)/N") + " elements of " +
           std::to_string(element_bytes(options.dtype)) + " bytes, and " +
           times(options.shard_within_group ? 2 * reductions : reductions, "Psi(N/G-1)/N") + " of 4" +
           matrices;
  }
  return times(wire_passes(options), "Psi(N-1)/N") + " elements of " +
         std::to_string(element_bytes(options.dtype)) + " bytes" + matrices;
}

// With hybrid sharding, N becomes G.
std::string of_shards(std::string formula, const PlanOptions& options) {
  if (options.shard_within_group) {
    for (std::size_t at = 0; (at = formula.find("/N", at)) != std::string::npos;) formula[at + 1] = 'G';
  }
  return formula;
}

void fill_paper(const PlanOptions& options, const Scale& scale, PlanReport& report) {
  const std::uint64_t element = element_bytes(options.dtype);
  const bool accumulator = has_shard_accumulator(options);

  PlanFigures& bytes = report.bytes;
  bytes.parameters = options.stage >= 3 ? scale.shard(element) : scale.whole(element);
  if (options.stage <= 1) {
    bytes.gradients = scale.whole(element) + (accumulator ? scale.shard(4) : 0);
  } else {
    bytes.gradients = scale.shard(accumulator ? 4 : element);
  }
  const std::uint64_t optimizer = optimizer_width(options);
  bytes.optimizer = options.stage >= 1 ? scale.shard(optimizer) : scale.whole(optimizer);
  report.wire.sent = report.wire.received = scale.ring(wire_passes(options) * element);
  if (options.stage >= 3) report.evaluation.sent = report.evaluation.received = scale.ring(element);
  report.notes.push_back(
      "the paper's formulas without padding; it does not count gathered units and buckets, and writes the "
      "wire's (N-1)/N as 1");
}

// --- DeepSpeed ---

Status fill_deepspeed(const PlanOptions& options, const Scale& scale, const ModelShape* model,
                      PlanReport& report) {
  if (options.stage < 2) {
    return Status(StatusCode::kUnsupported,
                  "preset deepspeed at stage " + std::to_string(options.stage) +
                      ": DeepSpeed has estimators for stages 2 and 3 only; use one of them, or preset paper");
  }
  if (options.dtype == DataType::kFloat32) {
    return Status(StatusCode::kUnsupported,
                  "preset deepspeed with dtype fp32: DeepSpeed's estimators assume 16-bit training; use bf16 "
                  "or fp16, or preset paper");
  }
  // The estimator truncates the sharded sum once, so the pools are cut out of that sum.
  PlanFigures& bytes = report.bytes;
  const std::uint64_t sharded = 18 * scale.psi / scale.ranks;
  bytes.optimizer = 12 * scale.psi / scale.ranks;
  const std::uint64_t k = static_cast<std::uint64_t>(options.micro_steps);
  std::uint64_t passes = 3 * k;
  if (options.stage == 2) {
    bytes.parameters = 2 * scale.psi;
    bytes.gradients = sharded - bytes.optimizer;  // 2 bytes of the type and 4 in fp32.
    bytes.gathered = 0;
    passes = 2 * k + 1;
    report.states_formula = "2Psi + 18Psi/N";
    report.notes.push_back(
        "the wire is DeepSpeed's default, which all-reduces each bucket and keeps a slice "
        "(use_multi_rank_bucket_allreduce)");
  } else {
    bytes.parameters = 2 * scale.psi / scale.ranks;
    bytes.gradients = sharded - bytes.optimizer - bytes.parameters;
    if (model != nullptr) bytes.gathered = 4 * largest_module(*model);
    report.notes.push_back("gathered is 4 bytes a parameter of the largest layer, known from the shape only");
    report.states_formula = "18Psi/N";
  }
  report.wire.sent = report.wire.received = scale.ring(2 * passes);
  report.wire_formula = times(passes, "Psi(N-1)/N elements of 2 bytes");
  report.notes.push_back(
      "DeepSpeed's estimate_zero2/3_model_states_mem_needs with nothing offloaded; it does not count buckets "
      "and activations, and prints 2^30 bytes as GB");
  return Status();
}

// --- Megatron ---

Status fill_megatron(const PlanOptions& options, const Scale& scale, PlanReport& report) {
  if (options.stage > 1) {
    return Status(StatusCode::kUnsupported, "preset megatron at stage " + std::to_string(options.stage) +
                                                ": its table has no sharding (stage 0) and the distributed "
                                                "optimizer (stage 1); use one of them, or preset paper");
  }
  // Bytes a parameter. bf16 keeps its gradients in fp32 and needs no second copy of them.
  struct Row {
    std::uint64_t parameter, gradient, sharded_gradient, optimizer;
  };
  const Row row = options.dtype == DataType::kBfloat16  ? Row{2, 4, 0, 12}
                  : options.dtype == DataType::kFloat16 ? Row{2, 2, 4, 12}
                                                        : Row{4, 4, 0, 8};
  const bool distributed = options.stage == 1;
  const auto split = [&](std::uint64_t bytes) {
    return distributed ? scale.shard(bytes) : scale.whole(bytes);
  };
  report.bytes.parameters = scale.whole(row.parameter);
  report.bytes.gradients = scale.whole(row.gradient) + split(row.sharded_gradient);
  report.bytes.optimizer = split(row.optimizer);
  const std::uint64_t kept = row.parameter + row.gradient;
  const std::uint64_t sharded = row.sharded_gradient + row.optimizer;
  report.states_formula = distributed ? join(kept, sharded) : join(kept + sharded, 0);

  const std::uint64_t moved = distributed ? row.gradient + row.parameter : 2 * row.gradient;
  report.wire.sent = report.wire.received = scale.ring(moved);
  report.wire_formula = times(moved, "Psi(N-1)/N bytes");
  report.notes.push_back(
      "Megatron-LM's distributed optimizer table (its gradients are fp32 under bf16, and micro-steps add up "
      "locally before one reduction); it does not count buckets and activations");
  return Status();
}

// --- forebay ---

// Figures that a model of one unit cannot give for a model of many.
Status fill_offload_of_count(const PlanRequest& request, const Plan& plan, PlanReport& report) {
  const PlanOptions& options = request.options;
  if (options.offload_fraction != 1.0) {
    return refuse("offload-fraction " + std::to_string(options.offload_fraction) +
                  " leaves the first units on the device, which a number of parameters does not tell; give "
                  "the shape (--layers --hidden --heads --sequence --vocabulary, or --config)");
  }
  if (options.stage >= 2 && !has_shard_accumulator(options)) {
    // One unit's slices on their way to the host would be those of the whole model.
    report.bytes.gradients = 0;
    report.notes.push_back("gradients on their way to the host, two units' slices, need the shape");
  }
  if (plan.file_bytes.read_per_step > plan.file_bytes.optimizer) {
    // One unit comes up once a step; of many, each does for both passes.
    const std::uint64_t gathers = 2 * static_cast<std::uint64_t>(options.micro_steps);
    report.file.read_per_step =
        plan.file_bytes.optimizer + gathers * (plan.file_bytes.read_per_step - plan.file_bytes.optimizer);
    report.notes.push_back(
        "a run reads less from files: units are kept where a pass turns, and their size needs the shape");
  }
  return Status();
}

Status fill_forebay(const PlanRequest& request, const ModelShape* model, PlanReport& report) {
  ModelShape planned;
  if (model != nullptr) {
    planned = *model;
    planned.activation_bytes = report.bytes.activations.value_or(0);
  } else {
    planned.units.push_back({.name = "model", .parameters = {{.name = "all", .count = request.parameters}}});
  }
  FOREBAY_ASSIGN_OR_RETURN(const Plan plan, make_plan(planned, report.options));
  PlanFigures& bytes = report.bytes;
  bytes.parameters = plan.bytes.parameters;
  bytes.gradients = plan.bytes.gradients;
  bytes.optimizer = plan.bytes.optimizer;
  bytes.buckets = plan.bytes.buckets;
  if (plan.host_bytes.total() > 0 || request.options.offload != Offload::kNone) {
    bytes.pinned = plan.host_bytes.total();
    report.host = plan.host_bytes;
  }
  if (request.options.offload != Offload::kNone) {
    report.file = plan.file_bytes;
    if (model != nullptr) {
      report.device_units = plan.device_units;
      report.units = static_cast<int>(planned.units.size());
      if (plan.device_units > 0) {
        report.notes.push_back(
            "the formulas are for a model that is offloaded whole; units on the device hold the same bytes "
            "as without --offload");
      }
    } else {
      FOREBAY_RETURN_IF_ERROR(fill_offload_of_count(request, plan, report));
    }
  }
  report.wire = plan.wire_per_step;
  report.evaluation = plan.evaluation.first.wire;
  if (request.options.moments == MomentFormat::kBlock8) {
    report.notes.push_back(
        "the formulas leave out the exponents of block8: a byte for each 256 elements of m and v");
  }
  if (model != nullptr) {
    bytes.gathered = plan.bytes.gathered;
    bytes.activations = plan.bytes.activations;
    bytes.reserved = plan.reserved_bytes;
    bytes.total = plan.bytes.total();
    report.exact = true;
    const auto sharing = static_cast<std::uint64_t>(request.part.tensor_parallel);
    if (complete_shape(*request.shape).value().key_value_heads % sharing != 0) {
      report.notes.push_back(
          "key-value heads do not divide over the tensor-parallel ranks: each rank is taken to have as many "
          "as the one with most");
    }
    report.notes.push_back(
        "parameters to buckets and the wire are the bytes that the engine holds and sends, padding included");
    report.notes.push_back(
        std::string("activations are ") +
        (request.activation_bytes ? "saved inputs as planned below, and else " : "") +
        "an estimate by Korthikanti's count of the tensors that layers keep (arXiv 2205.05198)" +
        (request.activation_bytes ? "" : ", nothing recomputed") + ", with the loss" +
        (request.fused_attention
             ? " and dropout masks, without the scores of attention (--attention plain counts them), "
             : ", attention scores and dropout masks, without ") +
        "embedding, gradients and workspaces; "
        "forebay-gpt keeps other tensors, in fp32 for every --dtype, and goes by its own exact plan, made "
        "before step 1 (--memory is held against it, --report has it)");
    return Status();
  }
  if (request.options.stage < 2) bytes.gathered = 0;
  report.notes.push_back(
      "from the number of parameters alone: gathered units and activations need the shape (--layers --hidden "
      "--heads --sequence --vocabulary, or --config); buckets and padding are those of a model that is one "
      "unit");
  if (!is_elementwise(request.options.optimizer)) {
    report.notes.push_back(std::string("optimizer ") + optimizer_name(request.options.optimizer) +
                           " without the shape of its matrices is taken to keep a v for each element");
  }
  if (request.options.stage == 3) {
    report.notes.push_back(
        "the wire at stage 3 is lower by the units kept where a pass turns, which need the shape");
    // One unit is never gathered twice in a step, so its plan would promise too little.
    Scale scale{request.parameters, static_cast<std::uint64_t>(request.options.ranks)};
    const std::uint64_t passes = 3 * static_cast<std::uint64_t>(request.options.micro_steps);
    report.wire.sent = report.wire.received = scale.ring(passes * element_bytes(request.options.dtype));
  }
  return Status();
}

int part_count(const ModelPart& part) {
  return part.tensor_parallel * part.pipeline_parallel;
}

Status check_request(const PlanRequest& request) {
  const PlanOptions& options = request.options;
  if (!request.shape && (request.parameters == 0 || request.parameters > kParameterCountLimit)) {
    return refuse("parameters is " + std::to_string(request.parameters) + "; use 1 to " +
                  std::to_string(kParameterCountLimit));
  }
  if (options.offload != Offload::kNone && request.preset != Preset::kForebay) {
    return Status(StatusCode::kUnsupported, std::string("preset ") + preset_name(request.preset) +
                                                " with --offload " + offload_name(options.offload) +
                                                ": its formulas have nothing offloaded; use preset forebay");
  }
  if (!has_second_moment(options.optimizer) && request.preset != Preset::kForebay &&
      request.preset != Preset::kPaper) {
    return Status(StatusCode::kUnsupported, std::string("preset ") + preset_name(request.preset) +
                                                " with --optimizer " + optimizer_name(options.optimizer) +
                                                ": its formulas are for Adam; use preset forebay or paper");
  }
  if ((options.moments != MomentFormat::kFloat32 || !options.master_weights || options.ema > 0) &&
      request.preset != Preset::kForebay && request.preset != Preset::kPaper) {
    return Status(StatusCode::kUnsupported, std::string("preset ") + preset_name(request.preset) +
                                                " with --moments, --no-master-weights or --ema: its formulas "
                                                "are for master, m and v in fp32; use preset "
                                                "forebay or paper");
  }
  if (options.in_groups() && request.preset != Preset::kForebay) {
    return Status(StatusCode::kUnsupported,
                  std::string("preset ") + preset_name(request.preset) +
                      " with --order group: its formulas have no groups; use preset forebay");
  }
  if (options.in_groups() && !request.shape) {
    return refuse(
        "--order group needs the shape of the model, not only its number of parameters; give --layers "
        "--hidden --heads --sequence --vocabulary, or --config");
  }
  if (part_count(request.part) > 1 && (!request.shape || request.preset != Preset::kForebay)) {
    return refuse(
        "tensor and pipeline parallelism need the shape of the model and preset forebay; give --layers "
        "--hidden --heads --sequence, or --config");
  }
  // The presets have formulas of their own, but one set of options: the engine's checks serve them all.
  const ModelShape smallest{.units = {{.name = "unit", .parameters = {{.name = "parameter", .count = 1}}}}};
  return make_plan(smallest, options).status();
}

// Sets the ranks that decide about a step together, the most units on one of them, and the order of the
// pipeline stage's passes.
Status place_in_grid(const PlanRequest& request, PlanOptions* options) {
  if (part_count(request.part) == 1) return {};
  options->forwards_ahead = request.part.pipeline_parallel - 1 - request.part.pipeline_stage;
  options->deciding_ranks = options->ranks * part_count(request.part);
  ModelPart part = request.part;
  for (part.pipeline_stage = 0; part.pipeline_stage < part.pipeline_parallel; ++part.pipeline_stage) {
    FOREBAY_ASSIGN_OR_RETURN(const ModelShape stage, make_model_shape(*request.shape, part));
    options->deciding_units = std::max<std::uint64_t>(options->deciding_units, stage.units.size());
  }
  return {};
}

}  // namespace

int world_size(const PlanReport& report) {
  return report.options.ranks * part_count(report.part);
}

const char* preset_name(Preset preset) noexcept {
  switch (preset) {
    case Preset::kForebay:
      return "forebay";
    case Preset::kPaper:
      return "paper";
    case Preset::kDeepSpeed:
      return "deepspeed";
    case Preset::kMegatron:
      return "megatron";
  }
  return "?";
}

std::optional<Preset> parse_preset(const std::string& name) {
  for (const Preset preset : {Preset::kForebay, Preset::kPaper, Preset::kDeepSpeed, Preset::kMegatron}) {
    if (name == preset_name(preset)) return preset;
  }
  return std::nullopt;
}

Result<std::uint64_t> parse_parameter_count(const std::string& text) {
  const Status refusal =
      refuse("parameters is '" + text + "'; use a whole number from 1 to 2^52, such as 124M, " +
             "7.5B, 1.5e9 or 124439808");
  const char* const end = text.data() + text.size();
  std::uint64_t whole = 0;
  if (const auto exact = std::from_chars(text.data(), end, whole);
      exact.ec == std::errc() && exact.ptr == end) {
    if (whole < 1 || whole > kParameterCountLimit) return refusal;
    return whole;
  }
  double number = 0;
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest == text.data()) return refusal;
  const std::string suffix(rest, end);
  double factor = 1;
  if (suffix == "K" || suffix == "k")
    factor = 1e3;
  else if (suffix == "M" || suffix == "m")
    factor = 1e6;
  else if (suffix == "B" || suffix == "b" || suffix == "G")
    factor = 1e9;
  else if (suffix == "T" || suffix == "t")
    factor = 1e12;
  else if (!suffix.empty())
    return refusal;
  number *= factor;
  if (!(number >= 1) || number > static_cast<double>(kParameterCountLimit)) return refusal;
  // 1.3B is 1300000000 although 1.3 is not a binary fraction; 1.5 parameters are none.
  if (std::abs(number - std::round(number)) > 1e-9 * number) return refusal;
  return static_cast<std::uint64_t>(std::llround(number));
}

Result<PlanReport> make_plan_report(const PlanRequest& request) {
  FOREBAY_RETURN_IF_ERROR(check_request(request));
  PlanReport report;
  report.preset = request.preset;
  report.options = request.options;
  report.part = request.part;
  report.parameters = report.part_parameters = request.parameters;

  std::optional<ModelShape> model;
  if (request.shape) {
    FOREBAY_ASSIGN_OR_RETURN(const ModelShape whole, make_model_shape(*request.shape));
    // Bounds the sum of the parameters.
    FOREBAY_RETURN_IF_ERROR(make_plan(whole, request.options).status());
    FOREBAY_ASSIGN_OR_RETURN(model, make_model_shape(*request.shape, request.part));
    FOREBAY_RETURN_IF_ERROR(place_in_grid(request, &report.options));
    report.parameters = whole.parameter_count();
    report.part_parameters = model->parameter_count();
    report.layers = stage_layers(complete_shape(*request.shape).value().layers, request.part).count;
  }
  const ModelShape* const shape = model ? &*model : nullptr;
  const Scale scale{report.parameters, static_cast<std::uint64_t>(request.options.ranks)};

  if (request.shape && request.preset == Preset::kForebay) {
    FOREBAY_ASSIGN_OR_RETURN(
        const std::uint64_t estimate,
        estimate_activation_bytes(*request.shape, {.batch = request.batch,
                                                   .sequence = request.sequence,
                                                   .dtype = request.options.dtype,
                                                   .fused_attention = request.fused_attention}));
    report.bytes.activations = request.activation_bytes.value_or(estimate);
    report.bytes.host_activations = request.host_activation_bytes;
  }
  if (request.shape && request.preset == Preset::kPaper) {
    // "12 x hidden dim x batch x seq length x layers" elements: section 3.2, footnote 3. The estimate above
    // is made too, for its checks.
    const TransformerShape full = complete_shape(*request.shape).value();
    FOREBAY_RETURN_IF_ERROR(
        estimate_activation_bytes(full, {request.batch, request.sequence, request.options.dtype}).status());
    const std::uint64_t sequence = request.sequence == 0 ? full.positions : request.sequence;
    report.bytes.activations =
        12 * element_bytes(request.options.dtype) * full.hidden * request.batch * sequence * full.layers;
  }

  // The engine's formulas are the paper's; the other presets put their own in their place.
  report.states_formula = of_shards(states_formula(request.options), request.options);
  report.below_device_formula = of_shards(below_device_formula(request.options), request.options);
  report.wire_formula = wire_formula(request.options);
  if (request.preset == Preset::kForebay && request.options.stage == 3) {
    report.wire_formula = "at most " + report.wire_formula;
  }
  bool complete = true;
  switch (request.preset) {
    case Preset::kForebay:
      FOREBAY_RETURN_IF_ERROR(fill_forebay(request, shape, report));
      complete = shape != nullptr;
      break;
    case Preset::kPaper:
      fill_paper(request.options, scale, report);
      break;
    case Preset::kDeepSpeed:
      FOREBAY_RETURN_IF_ERROR(fill_deepspeed(request.options, scale, shape, report));
      complete = report.bytes.gathered.has_value();
      break;
    case Preset::kMegatron:
      FOREBAY_RETURN_IF_ERROR(fill_megatron(request.options, scale, report));
      break;
  }
  if (report.wire.sent == kTooLarge) {
    return Status(StatusCode::kInvalidArgument,
                  "the bytes that a rank sends in a step of " + std::to_string(request.options.micro_steps) +
                      " micro-steps are more than 2^64; plan fewer micro-steps or parameters");
  }
  if (complete) report.bytes.total = report.bytes.known();
  return report;
}

PlanReport worst_stage(const std::vector<PlanReport>& stages) {
  PlanReport worst = *std::max_element(
      stages.begin(), stages.end(),
      [](const PlanReport& a, const PlanReport& b) { return a.bytes.needed() < b.bytes.needed(); });
  for (const PlanReport& stage : stages)
    worst.pipeline.push_back({stage.layers, stage.part_parameters, stage.bytes, stage.wire});
  return worst;
}

std::string shrink_advice(const PlanReport& report, std::uint64_t memory_bytes) {
  struct Pool {
    const char* name;
    std::uint64_t bytes;
    std::string advice;
  };
  const PlanOptions& options = report.options;
  const int stage = options.stage;
  const std::string share = "use more --ranks";
  const bool alone = options.ranks == 1;  // Then no ZeRO stage shards anything.
  const auto offload_more = [&](Offload needed, const char* name) -> std::string {
    if (options.offload < needed) return std::string(", or --offload ") + name;
    return options.offload_fraction < 1 ? ", or a larger --offload-fraction" : "";
  };
  const auto shard_at = [&](int from) -> std::string {
    if (stage >= from) return share;
    if (alone)
      return "use more --ranks, and --stage " + std::to_string(from) + (from == 3 ? "" : " or higher");
    return from == 3 ? "use --stage 3" : "use --stage " + std::to_string(from) + " or higher";
  };
  const Pool pools[] = {
      {"parameters", report.bytes.parameters,
       shard_at(3) +
           (stage == 3 ? offload_more(Offload::kOptimizerAndParameters, "optimizer+parameters") : "")},
      {"gradients", report.bytes.gradients, shard_at(2)},
      {"optimizer", report.bytes.optimizer, shard_at(1) + offload_more(Offload::kOptimizer, "optimizer")},
      {"gathered", report.bytes.gathered.value_or(0),
       "use a smaller --hidden or --vocabulary, or a 2-byte --dtype"},
      {"buckets", report.bytes.buckets.value_or(0), "use a smaller --bucket"},
      {"activations", report.bytes.activations.value_or(0),
       "use a smaller --batch or --sequence, or --recompute block"},
  };
  const Pool* largest = std::max_element(std::begin(pools), std::end(pools),
                                         [](const Pool& a, const Pool& b) { return a.bytes < b.bytes; });
  // Sharding leaves activations as they are.
  const Pool& activations = *(std::end(pools) - 1);
  if (memory_bytes != 0 && activations.bytes > memory_bytes) largest = &activations;
  return std::string("the largest pool is ") + largest->name + " with " + format_bytes(largest->bytes) +
         ": " + largest->advice;
}

std::vector<LimitVerdict> judge_host(const PlanReport& report, const std::vector<HostLimit>& limits,
                                     std::uint64_t ranks_here) {
  const auto of_rank = [](const PlanFigures& bytes) {
    return bytes.needed() + bytes.pinned.value_or(0) + bytes.host_activations;
  };
  std::vector<std::uint64_t> by_stage;
  for (const StageFigures& stage : report.pipeline) by_stage.push_back(of_rank(stage.bytes));
  if (by_stage.empty()) by_stage.push_back(of_rank(report.bytes));
  std::sort(by_stage.rbegin(), by_stage.rend());
  const std::uint64_t ranks_of_stage = static_cast<std::uint64_t>(world_size(report)) / by_stage.size();

  std::uint64_t needed = 0;
  for (std::size_t i = 0; i < by_stage.size(); ++i) {
    const std::uint64_t bytes = by_stage[i];
    const std::uint64_t ranks = i + 1 < by_stage.size() ? std::min(ranks_here, ranks_of_stage) : ranks_here;
    ranks_here -= ranks;
    std::uint64_t product = 0;
    if (__builtin_mul_overflow(bytes, ranks, &product) || __builtin_add_overflow(needed, product, &needed))
      needed = ~std::uint64_t{0};
  }
  std::vector<LimitVerdict> verdicts;
  for (const HostLimit& limit : limits) {
    verdicts.push_back(
        {.name = limit.name, .where = limit.where, .limit_bytes = limit.bytes, .needed_bytes = needed});
  }
  return verdicts;
}

}  // namespace forebay
