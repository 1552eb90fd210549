#include "kernels/argument_checks.h"

#include <cstdarg>
#include <cstdio>

namespace forebay {
namespace {

__attribute__((format(printf, 1, 2))) Status invalid(const char* format, ...) {
  char message[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return Status(StatusCode::kInvalidArgument, message);
}

bool valid(DataType type) noexcept {
  return type == DataType::kFloat32 || type == DataType::kBfloat16 || type == DataType::kFloat16;
}

Status check_type(const char* kernel, const char* name, DataType type) {
  if (valid(type)) return Status();
  return invalid("%s: %s is data type %d, which does not exist; pass kFloat32, kBfloat16 or kFloat16", kernel,
                 name, static_cast<int>(type));
}

// A pointer that `count` elements are read from or written to.
Status check_pointer(const char* kernel, const char* name, const void* pointer, std::size_t count,
                     std::size_t alignment) {
  if (count == 0) return Status();
  if (pointer == nullptr) {
    return invalid("%s of %zu elements: %s is null; pass device memory, or count 0", kernel, count, name);
  }
  if (reinterpret_cast<std::uintptr_t>(pointer) % alignment != 0) {
    return invalid("%s of %zu elements: %s is %p, not aligned to its %zu-byte elements; align it", kernel,
                   count, name, pointer, alignment);
  }
  return Status();
}

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) noexcept {
  const auto a_begin = reinterpret_cast<std::uintptr_t>(a);
  const auto b_begin = reinterpret_cast<std::uintptr_t>(b);
  return a_begin < b_begin + b_bytes && b_begin < a_begin + a_bytes;
}

}  // namespace

Status check_arguments(const CastArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("cast", "source_type", a.source_type));
  FOREBAY_RETURN_IF_ERROR(check_type("cast", "target_type", a.target_type));
  const std::size_t source_bytes = element_bytes(a.source_type);
  const std::size_t target_bytes = element_bytes(a.target_type);
  FOREBAY_RETURN_IF_ERROR(check_pointer("cast", "source", a.source, a.count, source_bytes));
  FOREBAY_RETURN_IF_ERROR(check_pointer("cast", "target", a.target, a.count, target_bytes));
  const bool in_place = a.source == a.target && a.source_type == a.target_type;
  if (!in_place && overlap(a.source, a.count * source_bytes, a.target, a.count * target_bytes)) {
    return invalid("cast of %zu elements from %s to %s: source %p and target %p overlap; use separate memory",
                   a.count, data_type_name(a.source_type), data_type_name(a.target_type), a.source, a.target);
  }
  return Status();
}

Status check_arguments(const AccumulateArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("accumulate", "type", a.type));
  if (a.rank_count < 1 || a.rank < 0 || a.rank >= a.rank_count) {
    return invalid("accumulate: rank %d of %d ranks does not exist; pass 0 <= rank < rank_count", a.rank,
                   a.rank_count);
  }
  const std::size_t bytes = element_bytes(a.type);
  FOREBAY_RETURN_IF_ERROR(check_pointer("accumulate", "own", a.own, a.count, bytes));
  FOREBAY_RETURN_IF_ERROR(check_pointer("accumulate", "target", a.target, a.count, sizeof(float)));
  if (a.rank_count == 1) return Status();
  FOREBAY_RETURN_IF_ERROR(check_pointer("accumulate", "received", a.received, a.count, bytes));
  if (a.received_stride_bytes < a.count * bytes || a.received_stride_bytes % bytes != 0) {
    return invalid(
        "accumulate of %zu %s elements from %d ranks: received_stride_bytes is %zu; pass a multiple of %zu "
        "that is at least %zu",
        a.count, data_type_name(a.type), a.rank_count, a.received_stride_bytes, bytes, a.count * bytes);
  }
  return Status();
}

Status check_arguments(const ScaleArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("scale", "round_type", a.round_type));
  FOREBAY_RETURN_IF_ERROR(check_type("scale", "target_type", a.target_type));
  if (a.target_type != a.round_type && a.target_type != DataType::kFloat32) {
    return invalid("scale rounded to %s: target_type is %s; pass the rounding type or fp32",
                   data_type_name(a.round_type), data_type_name(a.target_type));
  }
  const std::size_t target_bytes = element_bytes(a.target_type);
  FOREBAY_RETURN_IF_ERROR(check_pointer("scale", "source", a.source, a.count, sizeof(float)));
  FOREBAY_RETURN_IF_ERROR(check_pointer("scale", "target", a.target, a.count, target_bytes));
  const bool in_place = a.target == a.source && a.target_type == DataType::kFloat32;
  if (!in_place && overlap(a.source, a.count * sizeof(float), a.target, a.count * target_bytes)) {
    return invalid(
        "scale of %zu elements into %s: source %p and target %p overlap; only fp32 may be scaled in place",
        a.count, data_type_name(a.target_type), static_cast<const void*>(a.source), a.target);
  }
  return Status();
}

Status check_arguments(const AddArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("add", "type", a.type));
  const std::size_t bytes = element_bytes(a.type);
  FOREBAY_RETURN_IF_ERROR(check_pointer("add", "source", a.source, a.count, bytes));
  FOREBAY_RETURN_IF_ERROR(check_pointer("add", "target", a.target, a.count, bytes));
  if (a.source != a.target && overlap(a.source, a.count * bytes, a.target, a.count * bytes)) {
    return invalid("add of %zu elements: source %p and target %p overlap in part; use separate memory",
                   a.count, a.source, a.target);
  }
  return Status();
}

Status check_arguments(const NormArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("norm", "type", a.type));
  if (a.count % kLeafCount != 0) {
    return invalid("norm of %zu elements: the count is no multiple of %zu; pad it with zeros", a.count,
                   kLeafCount);
  }
  FOREBAY_RETURN_IF_ERROR(check_pointer("norm", "source", a.source, a.count, element_bytes(a.type)));
  FOREBAY_RETURN_IF_ERROR(check_pointer("norm", "scratch", a.scratch, a.count / kLeafCount, sizeof(double)));
  return check_pointer("norm", "result", a.result, 1, sizeof(double));
}

Status check_arguments(const AdamWArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("adamw", "gradient_type", a.gradient_type));
  FOREBAY_RETURN_IF_ERROR(check_type("adamw", "parameter_type", a.parameter_type));
  FOREBAY_RETURN_IF_ERROR(
      check_pointer("adamw", "gradient", a.gradient, a.count, element_bytes(a.gradient_type)));
  FOREBAY_RETURN_IF_ERROR(check_pointer("adamw", "master", a.master, a.count, sizeof(float)));
  FOREBAY_RETURN_IF_ERROR(check_pointer("adamw", "m", a.m, a.count, sizeof(float)));
  if (static_cast<int>(a.optimizer) >= kOptimizerCount) {
    return invalid(
        "adamw: optimizer is %d, which is no rule of single elements; pass adamw, adam, sgd or lion",
        static_cast<int>(a.optimizer));
  }
  if (has_second_moment(a.optimizer))
    FOREBAY_RETURN_IF_ERROR(check_pointer("adamw", "v", a.v, a.count, sizeof(float)));
  if (a.parameter == nullptr) return Status();
  return check_pointer("adamw", "parameter", a.parameter, a.count, element_bytes(a.parameter_type));
}

Status check_arguments(const FillArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("fill", "type", a.type));
  return check_pointer("fill", "target", a.target, a.count, element_bytes(a.type));
}

Status check_arguments(const StepControlArguments& a) {
  const char* const kernel = "step_control";
  if (a.rank_count < 1 || a.rank_stride < a.unit_count) {
    return invalid(
        "step_control of %zu units on %d ranks, %zu doubles apart: pass 1 rank or more, and a rank_stride of "
        "at least the units",
        a.unit_count, a.rank_count, a.rank_stride);
  }
  if (!(a.clip >= 0.0)) return invalid("step_control: clip is %g; pass 0 for none, or more", a.clip);
  if (a.dynamic_loss_scale && (a.growth_interval < 1 || !(a.minimum_loss_scale > 0.0))) {
    return invalid(
        "step_control: a growth interval of %d and a smallest loss scale of %g; pass 1 or more, and more "
        "than 0",
        a.growth_interval, a.minimum_loss_scale);
  }
  if ((a.used == nullptr) != (a.unit_used == nullptr)) {
    return invalid("step_control: of used and unit_used one is null; pass both or neither");
  }
  if (a.correction_count == 0 || a.first_step < 1) {
    return invalid("step_control: %zu bias corrections from step %llu; pass at least one, and steps from 1",
                   a.correction_count, static_cast<unsigned long long>(a.first_step));
  }
  const std::size_t value_count = a.unit_count * static_cast<std::size_t>(a.rank_count);
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "state", a.state, 1, alignof(StepState)));
  FOREBAY_RETURN_IF_ERROR(
      check_pointer(kernel, "corrections", a.corrections, a.correction_count, alignof(BiasCorrection)));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "squares", a.squares, value_count, sizeof(double)));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "scratch", a.scratch, value_count, sizeof(double)));
  if (a.used == nullptr) return Status();
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "used", a.used, value_count, sizeof(double)));
  return check_pointer(kernel, "unit_used", a.unit_used, a.unit_count, sizeof(std::uint32_t));
}

Status check_arguments(const ControlledAdamWArguments& a) {
  const char* const kernel = "adamw_controlled";
  FOREBAY_RETURN_IF_ERROR(check_arguments(a.update));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "state", a.state, a.update.count, alignof(StepState)));
  return a.used == nullptr ? Status()
                           : check_pointer(kernel, "used", a.used, a.update.count, sizeof(std::uint32_t));
}

namespace {

Status check_controlled(const char* kernel, const MuonGradient& gradient, const StepState* state,
                        std::uint64_t count) {
  FOREBAY_RETURN_IF_ERROR(check_type(kernel, "gradient.type", gradient.type));
  FOREBAY_RETURN_IF_ERROR(
      check_pointer(kernel, "gradient.values", gradient.values, count, element_bytes(gradient.type)));
  return state == nullptr ? Status() : check_pointer(kernel, "state", state, count, alignof(StepState));
}

// A master, and what follows from it.
Status check_move(const char* kernel, const MasterMove& a, std::uint64_t count) {
  FOREBAY_RETURN_IF_ERROR(
      a.half.elements != nullptr
          ? check_pointer(kernel, "half.elements", a.half.elements, count, sizeof(std::uint16_t))
          : check_pointer(kernel, "master", a.master, count, sizeof(float)));
  if (a.average != nullptr)
    FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "average", a.average, count, sizeof(float)));
  FOREBAY_RETURN_IF_ERROR(check_type(kernel, "parameter_type", a.parameter_type));
  return a.parameter == nullptr
             ? Status()
             : check_pointer(kernel, "parameter", a.parameter, count, element_bytes(a.parameter_type));
}

Status check_state(const char* kernel, const StepState* state) {
  return state == nullptr ? Status() : check_pointer(kernel, "state", state, 1, alignof(StepState));
}

Status check_run(const char* kernel, const FactoredRun& run) {
  FOREBAY_RETURN_IF_ERROR(check_type(kernel, "run.type", run.type));
  if (run.first > run.shape.count() || run.count > run.shape.count() - run.first) {
    return invalid("%s: a run of %llu elements from %llu on, of a parameter of %llu; keep it inside", kernel,
                   static_cast<unsigned long long>(run.count), static_cast<unsigned long long>(run.first),
                   static_cast<unsigned long long>(run.shape.count()));
  }
  return check_pointer(kernel, "run.gradient", run.gradient, run.count, element_bytes(run.type));
}

// The factors and row means that a moment is made of.
Status check_factors(const char* kernel, const FactoredRun& run, const float* factors,
                     const float* row_means) {
  FOREBAY_RETURN_IF_ERROR(check_run(kernel, run));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "factors", factors, run.count, sizeof(float)));
  return check_pointer(kernel, "row_means", row_means, run.shape.has_rows ? run.count : 0, sizeof(float));
}

}  // namespace

Status check_arguments(const Controlled<MuonMomentumArguments>& a) {
  const char* const kernel = "muon_momentum";
  const std::uint64_t count = a.part.count;
  FOREBAY_RETURN_IF_ERROR(check_controlled(kernel, a.part.gradient, a.state, count));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "m", a.part.m, count, sizeof(float)));
  return check_pointer(kernel, "values", a.part.values, count, sizeof(float));
}

Status check_arguments(const Controlled<OrthogonaliseArguments>& a) {
  const char* const kernel = "orthogonalise";
  const std::uint64_t count = a.part.rows * a.part.columns;
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "matrix", a.part.matrix, count, sizeof(float)));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "scratch", a.part.scratch, count, alignof(double)));
  if (count > 0 && overlap(a.part.matrix, count * sizeof(float), a.part.scratch,
                           orthogonal_scratch_count(a.part.rows, a.part.columns) * sizeof(float))) {
    return invalid("%s of %zu elements: matrix %p and scratch %p overlap; use separate memory", kernel,
                   static_cast<std::size_t>(count), static_cast<void*>(a.part.matrix),
                   static_cast<void*>(a.part.scratch));
  }
  return a.state == nullptr ? Status() : check_pointer(kernel, "state", a.state, count, alignof(StepState));
}

Status check_arguments(const Controlled<MuonUpdateArguments>& a) {
  const char* const kernel = "muon_update";
  const MuonUpdateArguments& u = a.part;
  FOREBAY_RETURN_IF_ERROR(check_controlled(kernel, u.gradient, a.state, u.count));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "m", u.m, u.count, sizeof(float)));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "u", u.u, u.count, sizeof(float)));
  return check_move(kernel, u, u.count);
}

Status check_arguments(const Controlled<FactorSumsArguments>& a) {
  const char* const kernel = "factor_sums";
  FOREBAY_RETURN_IF_ERROR(check_state(kernel, a.state));
  FOREBAY_RETURN_IF_ERROR(check_run(kernel, a.part.run));
  return check_pointer(kernel, "sums", a.part.sums, a.part.run.shape.factor_count(), sizeof(float));
}

Status check_arguments(const Controlled<FactorRenewalArguments>& a) {
  const char* const kernel = "renew_factors";
  const FactoredShape& shape = a.part.shape;
  FOREBAY_RETURN_IF_ERROR(check_state(kernel, a.state));
  FOREBAY_RETURN_IF_ERROR(
      check_pointer(kernel, "factors", a.part.factors, shape.factor_count(), sizeof(float)));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "sums", a.part.sums, shape.factor_count(), sizeof(float)));
  return check_pointer(kernel, "row_means", a.part.row_means, shape.has_rows ? shape.batches : 0,
                       sizeof(float));
}

Status check_arguments(const Controlled<UpdateSquaresArguments>& a) {
  const char* const kernel = "update_squares";
  FOREBAY_RETURN_IF_ERROR(check_state(kernel, a.state));
  FOREBAY_RETURN_IF_ERROR(check_factors(kernel, a.part.run, a.part.factors, a.part.row_means));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "scratch", a.part.scratch, a.part.run.count, sizeof(double)));
  return check_pointer(kernel, "result", a.part.result, 1, sizeof(double));
}

Status check_arguments(const Controlled<ParameterSquaresArguments>& a) {
  const char* const kernel = "parameter_squares";
  const ParameterSquaresArguments& part = a.part;
  FOREBAY_RETURN_IF_ERROR(check_state(kernel, a.state));
  FOREBAY_RETURN_IF_ERROR(check_type(kernel, "type", part.type));
  FOREBAY_RETURN_IF_ERROR(
      check_pointer(kernel, "masters", part.masters, part.count, element_bytes(part.type)));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "scratch", part.scratch, part.count, sizeof(double)));
  return check_pointer(kernel, "result", part.result, 1, sizeof(double));
}

Status check_arguments(const Controlled<AdafactorStepArguments>& a) {
  const char* const kernel = "adafactor_step";
  FOREBAY_RETURN_IF_ERROR(check_state(kernel, a.state));
  FOREBAY_RETURN_IF_ERROR(
      check_pointer(kernel, "squares", a.part.squares, a.part.rank_count, sizeof(double)));
  return check_pointer(kernel, "step", a.part.step, 1, sizeof(float));
}

Status check_arguments(const Controlled<FactoredUpdateArguments>& a) {
  const char* const kernel = "factored_update";
  FOREBAY_RETURN_IF_ERROR(check_state(kernel, a.state));
  FOREBAY_RETURN_IF_ERROR(check_factors(kernel, a.part.run, a.part.factors, a.part.row_means));
  return check_move(kernel, a.part, a.part.run.count);
}

Status check_arguments(const Controlled<KeepFactorsArguments>& a) {
  const char* const kernel = "keep_factors";
  FOREBAY_RETURN_IF_ERROR(check_state(kernel, a.state));
  FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "source", a.part.source, a.part.count, sizeof(float)));
  return check_pointer(kernel, "target", a.part.target, a.part.count, sizeof(float));
}

Status check_moments(const char* function, const Moments& a, std::size_t count, bool has_v) {
  if (a.format != MomentFormat::kFloat32 && a.format != MomentFormat::kBfloat16 &&
      a.format != MomentFormat::kBlock8) {
    return invalid(
        "%s of %zu elements: format is %d, which does not exist; pass kFloat32, kBfloat16 or kBlock8",
        function, count, static_cast<int>(a.format));
  }
  if (count == 0) return Status();
  if (a.m == nullptr || (a.v == nullptr && has_v)) {
    return invalid("%s of %zu elements: %s is null; pass moment_bytes() of memory", function, count,
                   a.m == nullptr ? "m" : "v");
  }
  const std::size_t alignment = moment_bytes(a.format, 1);
  for (const void* pointer : {a.m, a.v}) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % alignment != 0) {
      return invalid("%s of %zu elements: %s is not aligned to its %zu-byte elements; align it", function,
                     count, pointer == a.m ? "m" : "v", alignment);
    }
  }
  if (a.format == MomentFormat::kBlock8 &&
      (a.m_exponents == nullptr || (has_v && a.v_exponents == nullptr))) {
    return invalid("%s of %zu elements: %s without %s; pass moment_exponent_bytes() of memory", function,
                   count, moment_format_name(a.format),
                   a.m_exponents == nullptr ? "m_exponents" : "v_exponents");
  }
  return Status();
}

Status check_rounding(const char* function, std::size_t count, MomentRounding rounding) {
  if (rounding == MomentRounding::kNearest || rounding == MomentRounding::kDithered) return Status();
  return invalid("%s of %zu elements: rounding is %d, which does not exist; pass kNearest or kDithered",
                 function, count, static_cast<int>(rounding));
}

Status check_arguments(const char* function, const KeptUpdateArguments& a) {
  const std::size_t count = a.update.count;
  FOREBAY_RETURN_IF_ERROR(check_moments(function, a.moments, count, has_second_moment(a.update.optimizer)));
  FOREBAY_RETURN_IF_ERROR(check_rounding(function, count, a.rounding));
  // These are not read, so any memory will do.
  static float any;
  AdamWArguments checked = a.update;
  checked.m = checked.v = &any;
  if (a.half.elements != nullptr) {
    FOREBAY_RETURN_IF_ERROR(
        check_pointer(function, "half.elements", a.half.elements, count, sizeof(std::uint16_t)));
    checked.master = &any;
  }
  if (a.average != nullptr)
    FOREBAY_RETURN_IF_ERROR(check_pointer(function, "average", a.average, count, sizeof(float)));
  return check_arguments(checked).with_context(function);
}

Status check_arguments(const ControlledKeptUpdateArguments& a) {
  const char* const kernel = "update_kept";
  FOREBAY_RETURN_IF_ERROR(check_arguments(kernel, a.kept));
  const std::size_t count = a.kept.update.count;
  if (a.state != nullptr)
    FOREBAY_RETURN_IF_ERROR(check_pointer(kernel, "state", a.state, count, alignof(StepState)));
  return a.used == nullptr ? Status() : check_pointer(kernel, "used", a.used, count, sizeof(std::uint32_t));
}

}  // namespace forebay
