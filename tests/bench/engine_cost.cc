// Measures the engine's overhead: tokens/s of a GPT under the engine, on one rank at stage 0, relative to a
// plain loop of the same model.
//
// The plain loop has the same forward and backward pass on the same stream, the norm kernel over each unit,
// the same clipping, and the AdamW kernel, which also rounds to the parameters. Steps of the two alternate in
// one process, so both see the same load of the machine. The figure is the median of the ratios of
// neighbouring steps.
//
//   engine_cost [pairs [dtype]]     exit code 1 if the median is below the target
//   engine_cost smoke               one pair of a tiny model, without a target

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "forebay/local_communicator.h"
#include "forebay/units.h"
#include "model/gpt.h"
#include "model/host_operations.h"
#include "model/random.h"
#include "trainer/compute_stream.h"
#include "trainer/engine_model.h"
#include "trainer/initial.h"

namespace forebay::gpt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kTarget = 0.97;
constexpr int kPairsDefault = 21;
constexpr std::size_t kBatch = 4;
// 25.3 million parameters.
constexpr GptShape kShape{.layers = 8, .hidden = 512, .heads = 8, .sequence = 128};
constexpr double kLr = 1e-4, kWeightDecay = 0.1, kClip = 1.0, kBeta1 = 0.9, kBeta2 = 0.95, kEpsilon = 1e-8;

// Zeroed device memory: the same kind of pages as the engine's, so that only the loops differ.
class Memory {
 public:
  Memory(Backend& backend, std::size_t bytes)
      : backend_(backend), data_(value_or_throw(backend.alloc(std::max<std::size_t>(bytes, 1)))) {
    std::fill_n(data_, bytes, std::byte{0});
  }
  ~Memory() { static_cast<void>(backend_.free(data_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  Backend& backend_;
  DevicePtr data_;
};

// One unit's parameters, gradients and optimizer state as plain flat arrays.
struct BareUnit {
  BareUnit(const GptUnit& unit, DataType dtype, Backend& backend)
      : offsets(),
        count(layout(unit, offsets)),
        master(backend, count * 4),
        m(backend, count * 4),
        v(backend, count * 4),
        parameters(backend, dtype == DataType::kFloat32 ? 0 : count * 2),
        gradients(backend, count * element_bytes(dtype)),
        norm_scratch(backend, count / kLeafCount * sizeof(double)),
        dtype(dtype) {}

  static std::size_t layout(const GptUnit& unit, std::vector<std::size_t>& offsets) {
    std::size_t next = 0;
    for (const GptParameter& parameter : unit.parameters) {
      offsets.push_back(next);
      next = round_up(next + parameter.count(), kParameterAlignment);
    }
    return round_up(next, kLeafCount);
  }

  std::byte* parameter(std::size_t i) const {
    return (dtype == DataType::kFloat32 ? master.data() : parameters.data()) +
           offsets[i] * element_bytes(dtype);
  }
  std::byte* gradient(std::size_t i) const { return gradients.data() + offsets[i] * element_bytes(dtype); }

  std::vector<std::size_t> offsets;
  std::size_t count;
  Memory master, m, v, parameters, gradients, norm_scratch;
  DataType dtype;
};

void give(const std::vector<std::uint8_t>& tokens, const std::vector<std::uint8_t>& targets, const Gpt& gpt) {
  std::memcpy(gpt.tokens(), tokens.data(), tokens.size());
  std::memcpy(gpt.targets(), targets.data(), targets.size());
}

double loss_of(const Gpt& gpt) {
  return mean_loss({reinterpret_cast<const RowLoss*>(gpt.row_losses()), gpt.row_count()});
}

class BareLoop {
 public:
  BareLoop(const Gpt::Options& options, Operations& operations, Backend& backend, Kernels& kernels,
           ComputeStream& compute)
      : kernels_(kernels),
        compute_(compute),
        gpt_(options, operations, compute, alone_),
        memory_(backend, gpt_.memory_bytes()) {
    gpt_.use_memory(memory_.data());
    const std::vector<GptUnit> descriptions = describe_units(options.shape);
    norms_.resize(descriptions.size());
    for (const GptUnit& unit : descriptions)
      units_.push_back(std::make_unique<BareUnit>(unit, options.dtype, backend));
    set_random(descriptions, 1, [&](std::size_t u, std::size_t i, std::span<const float> values) {
      std::copy(values.begin(), values.end(), units_[u]->master.floats() + units_[u]->offsets[i]);
    });
    for (const auto& unit : units_) {
      if (unit->dtype == DataType::kFloat32) continue;
      throw_if_error(kernels_.cast(
          {unit->master.data(), unit->parameters.data(), unit->count, DataType::kFloat32, unit->dtype},
          compute_.stream()));
    }
    compute_.synchronize();
  }

  double step(const std::vector<std::uint8_t>& tokens, const std::vector<std::uint8_t>& targets) {
    compute_.run([this, &tokens, &targets] { give(tokens, targets, gpt_); });
    for (int u = 0; u < gpt_.unit_count(); ++u) gpt_.forward(u, parameters_of(u));
    for (int u = gpt_.unit_count() - 1; u >= 0; --u) gpt_.backward(u, parameters_of(u), gradients_of(u), 1.0);
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const BareUnit& unit = *units_[u];
      throw_if_error(
          kernels_.norm({unit.gradients.data(), reinterpret_cast<double*>(unit.norm_scratch.data()),
                         &norms_[u], unit.count, unit.dtype},
                        compute_.stream()));
    }
    compute_.synchronize();
    const double norm = std::sqrt(pairwise_sum(norms_.data(), norms_.size()));
    if (!std::isfinite(norm)) throw Error(StatusCode::kInternal, "the bare loop's gradient is not finite");
    update(norm > kClip ? static_cast<float>(kClip / norm) : 1.0F);
    compute_.synchronize();
    return loss_of(gpt_);
  }

 private:
  std::vector<const std::byte*> parameters_of(int u) const {
    const BareUnit& unit = *units_[static_cast<std::size_t>(u)];
    std::vector<const std::byte*> all;
    for (std::size_t i = 0; i < unit.offsets.size(); ++i) all.push_back(unit.parameter(i));
    if (u + 1 == gpt_.unit_count()) all.push_back(units_[0]->parameter(embedding::kTokens));
    return all;
  }

  std::vector<GradientTarget> gradients_of(int u) const {
    const BareUnit& unit = *units_[static_cast<std::size_t>(u)];
    std::vector<GradientTarget> all;
    for (std::size_t i = 0; i < unit.offsets.size(); ++i) {
      all.push_back({unit.gradient(i), u == 0 && i == embedding::kTokens});
    }
    if (u + 1 == gpt_.unit_count()) all.push_back({units_[0]->gradient(embedding::kTokens), false});
    return all;
  }

  void update(float factor) {
    ++step_;
    for (const auto& unit : units_) {
      // One parameter group for all: weight decay does not change the time.
      AdamWArguments a{};
      a.gradient = unit->gradients.data();
      a.master = unit->master.floats();
      a.m = unit->m.floats();
      a.v = unit->v.floats();
      a.parameter = unit->dtype == DataType::kFloat32 ? nullptr : unit->parameters.data();
      a.count = unit->count;
      a.gradient_type = unit->dtype;
      a.parameter_type = unit->dtype;
      a.factor = factor;
      a.lr = static_cast<float>(kLr);
      a.weight_decay = static_cast<float>(kWeightDecay);
      a.beta1 = static_cast<float>(kBeta1);
      a.beta2 = static_cast<float>(kBeta2);
      a.eps = static_cast<float>(kEpsilon);
      a.a1 = static_cast<float>(1 - kBeta1);
      a.a2 = static_cast<float>(1 - kBeta2);
      a.c1 = static_cast<float>(1 - std::pow(kBeta1, step_));
      a.s2 = static_cast<float>(std::sqrt(1 - std::pow(kBeta2, step_)));
      throw_if_error(kernels_.adamw(a, compute_.stream()));
    }
  }

  Kernels& kernels_;
  ComputeStream& compute_;
  TensorGroup alone_;
  Gpt gpt_;
  Memory memory_;
  std::vector<std::unique_ptr<BareUnit>> units_;
  std::vector<double> norms_;
  int step_ = 0;
};

class EngineLoop {
 public:
  EngineLoop(const Gpt::Options& options, Operations& operations, Backend& backend, Kernels& kernels,
             Communicator& communicator, ComputeStream& compute)
      : compute_(compute),
        units_(describe_units(options.shape)),
        gpt_(options, operations, compute, alone_),
        engine_(backend, kernels, communicator, {{.stage = 0, .dtype = options.dtype}}),
        model_(engine_, units_, compute) {
    model_.set_model(gpt_, 0);
    engine_.commit();
    model_.use_engine_memory();
    set_random(units_, 1, [&](std::size_t u, std::size_t i, std::span<const float> values) {
      engine_.set_parameter({static_cast<UnitId>(u), static_cast<int>(i)}, values);
    });
  }

  double step(const std::vector<std::uint8_t>& tokens, const std::vector<std::uint8_t>& targets) {
    engine_.step_begin();
    compute_.run([this, &tokens, &targets] { give(tokens, targets, gpt_); });
    model_.forward_pass(0);
    model_.backward_pass();
    model_.end_backward_pass();
    compute_.synchronize();
    Hyperparameters hyperparameters;
    hyperparameters.groups = {{kLr, kWeightDecay}, {kLr, kWeightDecay}};
    hyperparameters.clip = kClip;
    engine_.step(hyperparameters);
    static_cast<void>(engine_.statistics());  // Waits for the updates, as the plain loop does.
    return loss_of(gpt_);
  }

 private:
  ComputeStream& compute_;
  const std::vector<GptUnit> units_;
  TensorGroup alone_;
  Gpt gpt_;
  Engine engine_;
  EngineModel model_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(const GptShape& shape, int pairs, DataType dtype, double target) {
  const int threads = default_compute_threads();
  set_compute_threads(threads);
  const auto backend = value_or_throw(HostBackend::create({}));
  const auto kernels = value_or_throw(Kernels::create(*backend, {.thread_count = threads}));
  const auto communicator = value_or_throw(LocalGroup::create(1)->communicator(0, *backend, *kernels));
  ComputeStream compute(*backend, /*queues=*/false);
  compute.run([threads] { set_compute_threads(threads); });
  const std::unique_ptr<Operations> made = create_host_operations(
      library_matmul_available() ? create_library_matmul() : create_plain_matmul(), threads);
  Operations& operations = *made;
  const Gpt::Options options{.shape = shape, .batch = kBatch, .dtype = dtype};
  EngineLoop engine(options, operations, *backend, *kernels, *communicator, compute);
  BareLoop bare(options, operations, *backend, *kernels, compute);

  std::vector<std::uint8_t> tokens(kBatch * shape.sequence), targets(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::uint8_t>(draw(1, kTextStream, i));
    targets[i] = static_cast<std::uint8_t>(draw(1, kTextStream, i + 1));
  }
  const auto seconds = [&](auto& loop, double* loss) {
    const Clock::time_point start = Clock::now();
    *loss = loop.step(tokens, targets);
    return std::chrono::duration<double>(Clock::now() - start).count();
  };

  std::vector<double> ratios, engine_seconds, bare_seconds;
  for (int pair = -2; pair < pairs; ++pair) {  // Two rounds to warm up.
    double engine_loss = 0, bare_loss = 0, with_engine = 0, without = 0;
    // The order alternates, so that neither always follows the other.
    if (pair % 2 == 0) {
      with_engine = seconds(engine, &engine_loss);
      without = seconds(bare, &bare_loss);
    } else {
      without = seconds(bare, &bare_loss);
      with_engine = seconds(engine, &engine_loss);
    }
    if (engine_loss != bare_loss) {
      std::fprintf(stderr, "the two loops differ: loss %.17g under the engine, %.17g bare\n", engine_loss,
                   bare_loss);
      return 1;
    }
    if (pair < 0) continue;
    engine_seconds.push_back(with_engine);
    bare_seconds.push_back(without);
    ratios.push_back(without / with_engine);
  }

  const double tokens_per_step = static_cast<double>(tokens.size());
  const auto [low, high] = std::minmax_element(ratios.begin(), ratios.end());
  std::printf("%zu parameters, %s, %d threads, %s products, %s\n", parameter_count(shape),
              data_type_name(dtype), threads, operations.matmul(), kernels->description());
  std::printf("bare loop   %8.0f tokens/s (median of %d)\n", tokens_per_step / median(bare_seconds), pairs);
  std::printf("engine      %8.0f tokens/s\n", tokens_per_step / median(engine_seconds));
  std::printf("engine / bare: median %.4f [%.3f..%.3f], target %.2f\n", median(ratios), *low, *high, target);
  return median(ratios) >= target ? 0 : 1;
}

}  // namespace
}  // namespace forebay::gpt

int main(int argc, char** argv) {
  const bool is_smoke = argc == 2 && std::string(argv[1]) == "smoke";
  const int pairs = is_smoke ? 1 : argc > 1 ? std::atoi(argv[1]) : forebay::gpt::kPairsDefault;
  const std::string dtype = argc > 2 ? argv[2] : "fp32";
  if (pairs < 1 || (dtype != "fp32" && dtype != "bf16" && dtype != "fp16")) {
    std::fprintf(stderr, "usage: engine_cost [pairs [fp32|bf16|fp16]]\n");
    return 2;
  }
  try {
    const forebay::gpt::GptShape shape =
        is_smoke ? forebay::gpt::GptShape{.layers = 2, .hidden = 32, .heads = 2, .sequence = 16}
                 : forebay::gpt::kShape;
    return forebay::gpt::run(shape, pairs,
                             dtype == "fp32"   ? forebay::DataType::kFloat32
                             : dtype == "bf16" ? forebay::DataType::kBfloat16
                                               : forebay::DataType::kFloat16,
                             is_smoke ? 0 : forebay::gpt::kTarget);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "engine_cost: %s\n", error.what());
    return 1;
  }
}
