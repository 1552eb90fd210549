#include "kernels/host_module.h"

#include <algorithm>

#include "forebay/host_adafactor.h"
#include "forebay/host_muon.h"
#include "kernels/float_environment.h"
#include "kernels/host_moments.h"

namespace forebay {
namespace {

// Elements of one block. Large enough that handing it out (about a microsecond) is nothing beside its 20 us
// or more; small enough that a million-element unit still occupies 16 threads.
constexpr std::size_t kBlockCount = 65536;

// Runs one element-wise kernel: `Member` is its entry in RangeKernels.
template <typename Arguments,
          void (*host_kernels::RangeKernels::*Member)(const Arguments&, std::size_t, std::size_t)>
void run_elements(const Dimensions&, const Dimensions&, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<Arguments>*>(arguments[0]);
  launch.context->runner.run(launch.arguments.count, kBlockCount, [&](std::size_t begin, std::size_t end) {
    (launch.context->kernels.*Member)(launch.arguments, begin, end);
  });
}

void run_fill(const Dimensions&, const Dimensions&, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<FillArguments>*>(arguments[0]);
  const FillArguments& a = launch.arguments;
  launch.context->runner.run(a.count, kBlockCount, [&](std::size_t begin, std::size_t end) {
    host_kernels::with_type(a.type, [&]<DataType type>() {
      auto* target = static_cast<typename definitions::Element<type>::Storage*>(a.target);
      std::fill(target + begin, target + end, definitions::Element<type>::round(a.value));
    });
  });
}

// The decision is small and serial: one double per rank and unit.
void run_step_control(const Dimensions&, const Dimensions&, void* const* arguments) {
  const StepControlArguments& a =
      static_cast<const HostLaunch<StepControlArguments>*>(arguments[0])->arguments;
  const DefaultFloatEnvironment environment;
  const auto ranks = static_cast<std::size_t>(a.rank_count);
  for (std::size_t unit = 0; unit < a.unit_count; ++unit) {
    double* slices = a.scratch + unit * ranks;
    bool used = false;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      slices[rank] = a.squares[rank * a.rank_stride + unit];
      used = used || (a.used != nullptr && a.used[rank * a.rank_stride + unit] != 0.0);
    }
    a.scratch[unit] = pairwise_sum(slices, ranks);
    if (a.used != nullptr) a.unit_used[unit] = used ? 1 : 0;
  }
  definitions::advance_step(a, pairwise_sum(a.scratch, a.unit_count));
}

// The state is read when the stream gets here, not when the launch was queued.
void run_adamw_controlled(const Dimensions& grid, const Dimensions& block, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<ControlledAdamWArguments>*>(arguments[0]);
  const StepState& state = *launch.arguments.state;
  if (!definitions::updates(state, launch.arguments.used)) return;
  HostLaunch<AdamWArguments> update = {launch.context, launch.arguments.update};
  update.arguments.factor = state.factor;
  update.arguments.c1 = state.c1;
  update.arguments.s2 = state.s2;
  void* const pointers[] = {&update};
  run_elements<AdamWArguments, &host_kernels::RangeKernels::adamw>(grid, block, pointers);
}

void run_kept_update(const Dimensions&, const Dimensions&, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<ControlledKeptUpdateArguments>*>(arguments[0]);
  KeptUpdateArguments kept = launch.arguments.kept;
  if (const StepState* const state = launch.arguments.state) {
    if (!definitions::updates(*state, launch.arguments.used)) return;
    kept.update.factor = state->factor;
    kept.update.c1 = state->c1;
    kept.update.s2 = state->s2;
    kept.step = state->applied_steps;
  }
  host_kernels::run_update(kept, launch.context->runner);
}

template <typename Arguments, void (*part)(const Arguments&, const BlockRunner&)>
void run_controlled(const Dimensions&, const Dimensions&, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<Controlled<Arguments>>*>(arguments[0]);
  const DefaultFloatEnvironment environment;
  Arguments a = launch.arguments.part;
  if (definitions::decided(launch.arguments.state, a)) part(a, launch.context->runner);
}

void add_parameter_squares(const ParameterSquaresArguments& arguments, const BlockRunner& runner) {
  parameter_squares(arguments, runner);
}

void run_norm(const Dimensions&, const Dimensions&, void* const* arguments) {
  const auto& launch = *static_cast<const HostLaunch<NormArguments>*>(arguments[0]);
  const std::size_t leaf_count = launch.arguments.count / kLeafCount;
  launch.context->runner.run(leaf_count, kBlockCount / kLeafCount, [&](std::size_t begin, std::size_t end) {
    launch.context->kernels.norm_leaves(launch.arguments, begin, end);
  });
  const DefaultFloatEnvironment environment;
  const double sum = pairwise_sum(launch.arguments.scratch, leaf_count);
  *launch.arguments.result = definitions::canonical_double(sum);
}

}  // namespace

const HostKernel* host_kernel_table() noexcept {
  using host_kernels::RangeKernels;
  static constexpr HostKernel kTable[] = {
      {"forebay_cast", run_elements<CastArguments, &RangeKernels::cast>},
      {"forebay_accumulate", run_elements<AccumulateArguments, &RangeKernels::accumulate>},
      {"forebay_scale", run_elements<ScaleArguments, &RangeKernels::scale>},
      {"forebay_add", run_elements<AddArguments, &RangeKernels::add>},
      {"forebay_norm", run_norm},
      {"forebay_adamw", run_elements<AdamWArguments, &RangeKernels::adamw>},
      {"forebay_fill", run_fill},
      {"forebay_step_control", run_step_control},
      {"forebay_adamw_controlled", run_adamw_controlled},
      {"forebay_kept_update", run_kept_update},
      {"forebay_muon_momentum", run_controlled<MuonMomentumArguments, muon_momentum>},
      {"forebay_orthogonalise", run_controlled<OrthogonaliseArguments, orthogonalise>},
      {"forebay_muon_update", run_controlled<MuonUpdateArguments, muon_update>},
      {"forebay_factor_sums", run_controlled<FactorSumsArguments, factor_sums>},
      {"forebay_renew_factors", run_controlled<FactorRenewalArguments, renew_factors>},
      {"forebay_update_squares", run_controlled<UpdateSquaresArguments, update_squares>},
      {"forebay_parameter_squares", run_controlled<ParameterSquaresArguments, add_parameter_squares>},
      {"forebay_adafactor_step", run_controlled<AdafactorStepArguments, adafactor_step>},
      {"forebay_factored_update", run_controlled<FactoredUpdateArguments, factored_update>},
      {"forebay_keep_factors", run_controlled<KeepFactorsArguments, keep_factors>},
      {nullptr, nullptr},
  };
  return kTable;
}

}  // namespace forebay
