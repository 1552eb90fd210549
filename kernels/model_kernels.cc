#include "kernels/model_kernels.h"

#include <algorithm>
#include <string>

#include "forebay/model_backend.h"
#include "kernels/argument_checks.h"

namespace forebay {
namespace {

class ModelKernels final : public Kernels {
 public:
  explicit ModelKernels(ModelBackend& backend)
      : backend_(backend), description_(std::string(backend.capabilities().name) + ", nothing is computed") {}

  Status cast(const CastArguments& a, Stream stream) override {
    return launch("cast", a, element_bytes(a.source_type) + element_bytes(a.target_type), stream);
  }
  Status accumulate(const AccumulateArguments& a, Stream stream) override {
    const std::uint64_t added = static_cast<std::uint64_t>(a.rank_count) * element_bytes(a.type);
    return launch("sum of ranks", a, added + (a.first ? 1 : 2) * sizeof(float), stream);
  }
  Status scale(const ScaleArguments& a, Stream stream) override {
    return launch("average", a, sizeof(float) + element_bytes(a.target_type), stream);
  }
  Status add(const AddArguments& a, Stream stream) override {
    return launch("add", a, 3 * element_bytes(a.type), stream);
  }
  Status norm(const NormArguments& a, Stream stream) override {
    return launch("norm", a, element_bytes(a.type), stream);
  }
  Status adamw(const AdamWArguments& a, Stream stream) override {
    return launch("update", a, adam_bytes(a), stream);
  }
  Status fill(const FillArguments& a, Stream stream) override {
    return launch("fill", a, element_bytes(a.type), stream);
  }
  Status step_control(const StepControlArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return queue("decision", static_cast<std::uint64_t>(a.rank_count) * a.unit_count * 2 * sizeof(double),
                 stream);
  }
  Status adamw_controlled(const ControlledAdamWArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return queue("update", a.update.count * adam_bytes(a.update), stream);
  }
  Status update_kept(const ControlledKeptUpdateArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const AdamWArguments& update = a.kept.update;
    const std::size_t moments = has_second_moment(update.optimizer) ? 2 : 1;
    std::size_t states =
        (a.kept.half.elements != nullptr ? sizeof(std::uint16_t) : sizeof(float)) * update.count +
        moments * (moment_bytes(a.kept.moments.format, update.count) +
                   moment_exponent_bytes(a.kept.moments.format, update.count));
    if (a.kept.average != nullptr) states += sizeof(float) * update.count;
    return queue("update", 2 * states + update.count * other_bytes(update), stream);
  }
  Status muon_momentum(const Controlled<MuonMomentumArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return queue("momentum", a.part.count * (element_bytes(a.part.gradient.type) + 2 * sizeof(float)),
                 stream);
  }
  Status orthogonalise(const Controlled<OrthogonaliseArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    if (backend_.timing() == nullptr || a.part.rows * a.part.columns == 0) return Status();
    const auto k = static_cast<double>(std::min(a.part.rows, a.part.columns));
    const double n = orthogonal_cost(a.part.rows, a.part.columns) / (kMuonSteps * k * k);
    return backend_.work(backend_.timing()->fp32_products("orthogonalise", k, n, k, kMuonSteps), stream);
  }
  Status muon_update(const Controlled<MuonUpdateArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const MuonUpdateArguments& u = a.part;
    return queue("update", u.count * (element_bytes(u.gradient.type) + 3 * sizeof(float) + moved_bytes(u)),
                 stream);
  }

  // Rows and columns: the gradient is read twice.
  Status factor_sums(const Controlled<FactorSumsArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const FactoredRun& run = a.part.run;
    const std::uint64_t passes = run.shape.has_rows ? 2 : 1;
    return queue("factors",
                 passes * run.count * element_bytes(run.type) + run.shape.factor_count() * sizeof(float),
                 stream);
  }
  Status renew_factors(const Controlled<FactorRenewalArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const FactoredShape& shape = a.part.shape;
    return queue("factors", (3 * shape.factor_count() + shape.row_count()) * sizeof(float), stream);
  }
  Status update_squares(const Controlled<UpdateSquaresArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return queue("squares", a.part.run.count * element_bytes(a.part.run.type) + leaf_bytes(a.part.run.count),
                 stream);
  }
  Status parameter_squares(const Controlled<ParameterSquaresArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return queue("squares", a.part.count * element_bytes(a.part.type) + leaf_bytes(a.part.count), stream);
  }
  Status adafactor_step(const Controlled<AdafactorStepArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return queue("squares", a.part.rank_count * 2 * sizeof(double), stream);
  }
  Status factored_update(const Controlled<FactoredUpdateArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const FactoredUpdateArguments& u = a.part;
    return queue("update", u.run.count * (element_bytes(u.run.type) + moved_bytes(u)), stream);
  }
  Status keep_factors(const Controlled<KeepFactorsArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return queue("factors", a.part.count * 2 * sizeof(float), stream);
  }

  const char* description() const noexcept override { return description_.c_str(); }

 private:
  // Leaves are written and read.
  static std::uint64_t leaf_bytes(std::uint64_t count) { return 2 * sizeof(double) * (count / kLeafCount); }
  // A master, and what follows from it.
  static std::uint64_t moved_bytes(const MasterMove& a) {
    return 2 * (a.half.elements != nullptr ? sizeof(std::uint16_t) : sizeof(float)) +
           (a.average != nullptr ? 2 * sizeof(float) : 0) +
           (a.parameter != nullptr ? element_bytes(a.parameter_type) : 0);
  }
  static std::uint64_t adam_bytes(const AdamWArguments& a) {
    const std::uint64_t states = a.v != nullptr ? 3 : 2;  // Each is read and written.
    return states * 2 * sizeof(float) + other_bytes(a);
  }
  // The gradient and the parameter.
  static std::uint64_t other_bytes(const AdamWArguments& a) {
    return element_bytes(a.gradient_type) + (a.parameter != nullptr ? element_bytes(a.parameter_type) : 0);
  }

  template <typename Arguments>
  Status launch(const char* name, const Arguments& arguments, std::uint64_t bytes_each, Stream stream) {
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
    return queue(name, arguments.count * bytes_each, stream);
  }

  Status queue(const char* name, std::uint64_t bytes, Stream stream) {
    if (bytes == 0 || backend_.timing() == nullptr) return Status();
    return backend_.work(backend_.timing()->kernel(name, bytes), stream);
  }

  ModelBackend& backend_;
  const std::string description_;
};

}  // namespace

Result<std::unique_ptr<Kernels>> create_model_kernels(Backend& backend) {
  auto* const model = dynamic_cast<ModelBackend*>(&backend);
  if (model == nullptr) {
    return Status(StatusCode::kUnsupported,
                  std::string("kernels for backend '") + backend.capabilities().name +
                      "': it wraps a model backend; make the kernels on the model backend itself");
  }
  return std::unique_ptr<Kernels>(std::make_unique<ModelKernels>(*model));
}

}  // namespace forebay
