#include "forebay/kernels.h"

#include <cmath>
#include <string>

#include "kernels/argument_checks.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/host_module.h"
#include "kernels/model_kernels.h"

namespace forebay {
namespace {

class HostKernels final : public Kernels {
 public:
  HostKernels(Backend& backend, const KernelOptions& options) : backend_(backend), context_(options) {
    const int threads = context_.runner.thread_count();
    description_ = std::string("host ") + context_.kernels.target + ", " + std::to_string(threads) +
                   (threads == 1 ? " thread" : " threads");
  }

  ~HostKernels() override {
    if (module_.handle == nullptr) return;
    // A release path: a backend that refuses keeps the table, which is static memory.
    static_cast<void>(backend_.unload_module(module_).ok());
  }

  // Loads the module. Called once, before anything else.
  Status load() {
    ModuleImage image;
    image.host_kernels = host_kernel_table();
    Result<Module> module = backend_.load_module(image);
    if (!module.ok()) return module.status().with_context("cannot load the host kernels");
    module_ = module.value();
    FOREBAY_RETURN_IF_ERROR(find("forebay_cast", cast_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_accumulate", accumulate_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_scale", scale_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_add", add_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_norm", norm_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_adamw", adamw_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_fill", fill_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_step_control", step_control_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_kept_update", kept_update_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_muon_momentum", muon_momentum_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_orthogonalise", orthogonalise_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_muon_update", muon_update_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_factor_sums", factor_sums_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_renew_factors", renew_factors_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_update_squares", update_squares_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_parameter_squares", parameter_squares_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_adafactor_step", adafactor_step_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_factored_update", factored_update_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_keep_factors", keep_factors_));
    return find("forebay_adamw_controlled", adamw_controlled_);
  }

  Status cast(const CastArguments& arguments, Stream stream) override {
    return launch(cast_, arguments, stream);
  }
  Status accumulate(const AccumulateArguments& arguments, Stream stream) override {
    return launch(accumulate_, arguments, stream);
  }
  Status scale(const ScaleArguments& arguments, Stream stream) override {
    return launch(scale_, arguments, stream);
  }
  Status add(const AddArguments& arguments, Stream stream) override {
    return launch(add_, arguments, stream);
  }
  Status norm(const NormArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
    return queue(norm_, arguments, stream);  // Count 0 has a result too.
  }
  Status adamw(const AdamWArguments& arguments, Stream stream) override {
    return launch(adamw_, arguments, stream);
  }
  Status fill(const FillArguments& arguments, Stream stream) override {
    return launch(fill_, arguments, stream);
  }
  Status step_control(const StepControlArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
    return queue(step_control_, arguments, stream);
  }
  Status adamw_controlled(const ControlledAdamWArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
    if (arguments.update.count == 0) return Status();
    return queue(adamw_controlled_, arguments, stream);
  }
  Status update_kept(const ControlledKeptUpdateArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
    if (arguments.kept.update.count == 0) return Status();
    return queue(kept_update_, arguments, stream);
  }
  Status muon_momentum(const Controlled<MuonMomentumArguments>& arguments, Stream stream) override {
    return controlled(muon_momentum_, arguments, arguments.part.count, stream);
  }
  Status orthogonalise(const Controlled<OrthogonaliseArguments>& arguments, Stream stream) override {
    return controlled(orthogonalise_, arguments, arguments.part.rows * arguments.part.columns, stream);
  }
  Status muon_update(const Controlled<MuonUpdateArguments>& arguments, Stream stream) override {
    return controlled(muon_update_, arguments, arguments.part.count, stream);
  }
  Status factor_sums(const Controlled<FactorSumsArguments>& arguments, Stream stream) override {
    return controlled(factor_sums_, arguments, arguments.part.run.shape.factor_count(), stream);
  }
  Status renew_factors(const Controlled<FactorRenewalArguments>& arguments, Stream stream) override {
    return controlled(renew_factors_, arguments, arguments.part.shape.factor_count(), stream);
  }
  // The sum of no elements is a result, too.
  Status update_squares(const Controlled<UpdateSquaresArguments>& arguments, Stream stream) override {
    return controlled(update_squares_, arguments, 1, stream);
  }
  Status parameter_squares(const Controlled<ParameterSquaresArguments>& arguments, Stream stream) override {
    return controlled(parameter_squares_, arguments, 1, stream);
  }
  Status adafactor_step(const Controlled<AdafactorStepArguments>& arguments, Stream stream) override {
    return controlled(adafactor_step_, arguments, 1, stream);
  }
  Status factored_update(const Controlled<FactoredUpdateArguments>& arguments, Stream stream) override {
    return controlled(factored_update_, arguments, arguments.part.run.count, stream);
  }
  Status keep_factors(const Controlled<KeepFactorsArguments>& arguments, Stream stream) override {
    return controlled(keep_factors_, arguments, arguments.part.count, stream);
  }

  const char* description() const noexcept override { return description_.c_str(); }

 private:
  Status find(const char* name, Kernel& kernel) {
    FOREBAY_ASSIGN_OR_RETURN(kernel, backend_.get_kernel(module_, name));
    return Status();
  }

  template <typename Arguments>
  Status launch(Kernel kernel, const Arguments& arguments, Stream stream) {
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
    if (arguments.count == 0) return Status();
    return queue(kernel, arguments, stream);
  }

  template <typename Arguments>
  Status controlled(Kernel kernel, const Arguments& arguments, std::uint64_t count, Stream stream) {
    FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
    return count == 0 ? Status() : queue(kernel, arguments, stream);
  }

  template <typename Arguments>
  Status queue(Kernel kernel, const Arguments& arguments, Stream stream) {
    const HostLaunch<Arguments> launch = {&context_, arguments};
    const void* const pointers[] = {&launch};
    const std::size_t bytes[] = {sizeof launch};
    return backend_.launch(kernel, Dimensions{}, Dimensions{}, pointers, bytes, 1, stream);
  }

  Backend& backend_;
  HostContext context_;
  std::string description_;
  Module module_;
  Kernel cast_, accumulate_, scale_, add_, norm_, adamw_, fill_, step_control_, adamw_controlled_;
  Kernel kept_update_, muon_momentum_, orthogonalise_, muon_update_;
  Kernel factor_sums_, renew_factors_, update_squares_, parameter_squares_, adafactor_step_;
  Kernel factored_update_, keep_factors_;
};

}  // namespace

Result<std::unique_ptr<Kernels>> Kernels::create(Backend& backend, const KernelOptions& options) {
  if (options.thread_count < 0) {
    return Status(StatusCode::kInvalidArgument,
                  "kernels on " + std::to_string(options.thread_count) +
                      " threads: the count is negative; pass 0 for all processors, or more");
  }
  const Capabilities& capabilities = backend.capabilities();
  if (capabilities.kind == BackendKind::kCuda) return create_cuda_kernels(backend);
  if (capabilities.kind == BackendKind::kModel) return create_model_kernels(backend);
  auto kernels = std::make_unique<HostKernels>(backend, options);
  FOREBAY_RETURN_IF_ERROR(kernels->load());
  return std::unique_ptr<Kernels>(std::move(kernels));
}

void bias_corrections(double beta1, double beta2, std::uint64_t first_step, BiasCorrection* table,
                      std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    const double t = static_cast<double>(first_step + i);
    table[i].c1 = static_cast<float>(1.0 - std::pow(beta1, t));
    table[i].s2 = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, t)));
  }
}

}  // namespace forebay
