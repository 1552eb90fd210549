// A toy trainer, and the numeric contract of ARCHITECTURE.md written out as plain loops (reference_toy), so
// that the engine's result is compared bit for bit with an independent account.
//
// The gradient of an element is half the gathered parameter plus noise that depends on rank, step,
// micro-step and element: a stale, misplaced or unreduced value changes the result.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "forebay/engine.h"
#include "forebay/pinned_pool.h"
#include "forebay/stream_call.h"
#include "kernels/moments.h"
#include "runtime/engine/engine_hooks.h"
#include "runtime/engine/plan/step_control.h"
#include "tests/support/elements.h"
#include "tests/support/local_world.h"

namespace forebay::testing {

struct ToyParameter {
  std::uint64_t count;
  int group = 0;
  bool frozen = false;
  bool replicated = false;
  std::vector<std::uint64_t> shape = {};  // Empty: not declared.
  bool elementwise = false;               // Engine::declare_elementwise().
};
struct ToyUnit {
  std::vector<ToyParameter> parameters;
  std::vector<UnitShape::Tied> tied;
  bool backward_reads_parameters = true;
};

struct ToyOptions {
  std::vector<ToyUnit> units;
  EngineOptions engine;
  internal::EngineHooks hooks;
  int ranks = 1;
  int steps = 4;
  double clip = 0.5;
  std::vector<GroupHyperparameters> groups{{1e-2, 0.1}, {1e-2, 0.0}};
  // True: `rank` does not use `unit` in (step, micro_step).
  std::function<bool(int rank, int step, int micro_step, int unit)> skips = [](int, int, int, int) {
    return false;
  };
  // Recorded order. Units in order of use in (rank, step, micro-step); without these, those that are not
  // skipped in order of registration, and in the reverse order.
  using Order = std::function<std::vector<int>(int rank, int step, int micro_step)>;
  Order forwards;
  Order backwards;
  Order evaluates;  // Units of an evaluation before the micro-step. Empty: no evaluation.
  std::function<int(int step)> micro_steps;  // Null: all.
  // Recorded order: called after each micro-step but the last.
  std::function<void(Engine& engine, int step, int micro_step)> between_micro_steps;
  std::function<bool(int rank, int step)> abandons = [](int, int) { return false; };
  std::function<double(int step)> gradient_factor = [](int) { return 1.0; };
  bool asks_norm = false;          // gradient_norm() before step().
  std::uint64_t overlap_seed = 0;  // Not 0: leases overlap, and end in a random order.
  // Added to the noise of every element: infinity makes a step overflow.
  std::function<float(int rank, int step)> disturbance = [](int, int) { return 0.0f; };
  Communicator* first_unit_shared_over = nullptr;  // Engine::share().

  int micro_steps_of(int step) const { return micro_steps ? micro_steps(step) : engine.micro_steps; }
  std::vector<int> forwards_of(int rank, int step, int k) const {
    if (forwards) return forwards(rank, step, k);
    std::vector<int> order;
    for (int u = 0; u < static_cast<int>(units.size()); ++u) {
      if (!skips(rank, step, k, u)) order.push_back(u);
    }
    return order;
  }
  std::vector<int> backwards_of(int rank, int step, int k) const {
    if (backwards) return backwards(rank, step, k);
    std::vector<int> order = forwards_of(rank, step, k);
    std::reverse(order.begin(), order.end());
    return order;
  }
  bool someone_abandons(int step) const {
    for (int r = 0; r < ranks; ++r) {
      if (abandons(r, step)) return true;
    }
    return false;
  }
};

struct ToyResult {
  std::vector<double> grad_norms;  // NaN where skipped.
  std::vector<double> metrics;
  std::vector<std::vector<float>> masters;   // By parameter over all units, in order of registration.
  std::vector<std::vector<float>> averages;  // The same; empty without a moving average.
  std::string digest;
  EngineStatistics statistics;
  std::string order;  // Engine::recorded_order().
  friend bool same_bits(const ToyResult& a, const ToyResult& b) {
    const auto equal = [](const auto& x, const auto& y) {
      return x.size() == y.size() &&
             (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0);
    };
    if (!equal(a.grad_norms, b.grad_norms) || !equal(a.metrics, b.metrics) ||
        a.masters.size() != b.masters.size())
      return false;
    for (std::size_t i = 0; i < a.masters.size(); ++i) {
      if (!equal(a.masters[i], b.masters[i])) return false;
    }
    return true;
  }
};

inline float toy_noise(int rank, int step, int micro_step, int parameter, std::uint64_t i) {
  const std::uint64_t x =
      mix((static_cast<std::uint64_t>(rank) << 48) ^ (static_cast<std::uint64_t>(step) << 40) ^
          (static_cast<std::uint64_t>(micro_step) << 36) ^ (static_cast<std::uint64_t>(parameter) << 28) ^ i);
  return static_cast<float>(static_cast<std::int64_t>(x >> 40) - (1 << 23)) / static_cast<float>(1 << 23);
}

// Initial value of a parameter's element.
inline float toy_initial(int parameter, std::uint64_t i) {
  return toy_noise(99, 0, 0, parameter, i) * 0.3f;
}

// --- the engine's way ---

class ToyTrainer {
 public:
  ToyTrainer(const ToyOptions& options, Rank& rank)
      : options_(options),
        rank_(rank),
        engine_(*rank.backend, *rank.kernels, *rank.communicator, with_hooks(options_)) {
    int number = 0;
    for (std::size_t u = 0; u < options.units.size(); ++u) {
      const ToyUnit& unit = options.units[u];
      const UnitId id = engine_.add_unit("unit" + std::to_string(u), unit.backward_reads_parameters);
      first_number_.push_back(number);
      for (const ToyParameter& parameter : unit.parameters) {
        ids_.push_back(engine_.add_parameter(id, "p" + std::to_string(number++), parameter.count,
                                             parameter.group, parameter.frozen, parameter.replicated));
        if (!parameter.shape.empty()) engine_.declare_shape(ids_.back(), parameter.shape);
        if (parameter.elementwise) engine_.declare_elementwise(ids_.back());
      }
      for (const UnitShape::Tied& tied : unit.tied) engine_.tie(id, {tied.unit, tied.index});
    }
    if (options.first_unit_shared_over != nullptr) engine_.share(0, *options.first_unit_shared_over);
    engine_.declare_activations(1000);
    engine_.commit();
    stream_ = value_or_throw(rank.backend->stream_create());
    pinned_ = value_or_throw(PinnedPool::create(*rank.backend, {.slab_bytes = 1u << 20}));
  }
  ~ToyTrainer() { static_cast<void>(rank_.backend->stream_destroy(stream_)); }

  Engine& engine() { return engine_; }

  void set(const ToyResult& values) {
    for (std::size_t n = 0; n < ids_.size(); ++n) engine_.set_parameter(ids_[n], values.masters[n]);
  }

  void initialize() {
    for (std::size_t n = 0; n < ids_.size(); ++n) {
      const auto& shape = engine_.model().units[static_cast<std::size_t>(ids_[n].unit)].parameters;
      std::vector<float> values(shape[static_cast<std::size_t>(ids_[n].index)].count);
      for (std::uint64_t i = 0; i < values.size(); ++i) values[i] = toy_initial(static_cast<int>(n), i);
      engine_.set_parameter(ids_[n], values);
    }
  }

  StepResult step(int step) {
    metric_ = 0.0;
    engine_.step_begin();
    if (options_.abandons(rank_.communicator->rank(), step)) {
      abandon(step);
      StepResult result;
      result.abandoned = true;
      return result;
    }
    if (options_.engine.order_of_units == OrderOfUnits::kRecorded) {
      run_recorded_passes(step);
    } else {
      run_passes(step);
    }
    throw_if_error(rank_.backend->stream_synchronize(stream_));
    free_copies();
    std::optional<double> norm;
    if (options_.asks_norm) norm = engine_.gradient_norm();
    Hyperparameters hyperparameters;
    hyperparameters.gradient_factor = options_.gradient_factor(step);
    hyperparameters.groups = options_.groups;
    hyperparameters.clip = options_.clip;
    hyperparameters.metric = metric_;
    const StepResult result = engine_.step(hyperparameters);
    if (norm && result.grad_norm && hyperparameters.gradient_factor == 1.0) {
      EXPECT_EQ(*norm, *result.grad_norm);
    }
    return result;
  }

  // A forward pass over all units without gradients.
  void evaluate_all() {
    engine_.evaluation_begin();
    for (int u = 0; u < static_cast<int>(options_.units.size()); ++u) static_cast<void>(forward_unit(u));
    throw_if_error(rank_.backend->stream_synchronize(stream_));
    engine_.evaluation_end();
    free_copies();
  }

  void collect(ToyResult& result) {
    result.masters.clear();
    engine_.visit_parameters([&](const ParameterShape&, std::span<const float> values) {
      result.masters.emplace_back(values.begin(), values.end());
    });
    result.averages.clear();
    for (const ParameterId id : ids_) {
      if (options_.engine.ema > 0) result.averages.push_back(engine_.get_average(id));
    }
    result.digest = engine_.digest();
    result.statistics = engine_.statistics();
    result.order = engine_.recorded_order();
  }

  void run_recorded_passes(int step) {
    const int rank = rank_.communicator->rank();
    const int micro_steps = options_.micro_steps_of(step);
    for (int k = 0; k <= micro_steps; ++k) {
      if (options_.between_micro_steps && k > 0 && k < micro_steps)
        options_.between_micro_steps(engine_, step, k - 1);
      evaluate(step, k);
      if (k == micro_steps) break;
      engine_.micro_step_begin(k);
      random_ = options_.overlap_seed + static_cast<std::uint64_t>(step * 16 + k);
      for (const int u : options_.forwards_of(rank, step, k)) hold(forward_unit(u));
      for (const int u : options_.backwards_of(rank, step, k)) hold(backward_unit(u, step, k));
      held_.clear();
    }
  }

  void evaluate(int step, int k) {
    const int rank = rank_.communicator->rank();
    const std::vector<int> order =
        options_.evaluates ? options_.evaluates(rank, step, k) : std::vector<int>();
    if (order.empty()) return;
    engine_.evaluation_begin();
    for (const int u : order) hold(forward_unit(u));
    held_.clear();
    engine_.evaluation_end();
  }

  // In the middle of the forward pass, with a lease alive.
  void abandon(int step) {
    const int rank = rank_.communicator->rank();
    evaluate(step, 0);
    engine_.micro_step_begin(0);
    const std::vector<int> order = options_.forwards_of(rank, step, 0);
    for (std::size_t i = 0; i + 1 < order.size(); ++i) static_cast<void>(forward_unit(order[i]));
    Lease last = backward_unit(order[order.size() - 2], step, 0);
    engine_.abandon(options_.micro_steps_of(step));
    EXPECT_THROW(static_cast<void>(last.parameter(0)), Error);
    throw_if_error(rank_.backend->stream_synchronize(stream_));
    free_copies();
  }

  // First the forward passes ahead that the engine was made for, then one pass of each kind in turn.
  void run_passes(int step) {
    const int micro_steps = options_.engine.micro_steps;
    int forwards = 0;
    for (int k = 0; k < micro_steps; ++k) {
      while (forwards < micro_steps && forwards <= k + options_.engine.forwards_ahead)
        forward_pass(step, forwards++);
      backward_pass(step, k);
    }
  }

  void forward_pass(int step, int k) {
    const int unit_count = static_cast<int>(options_.units.size());
    const int rank = rank_.communicator->rank();
    engine_.micro_step_begin(k);
    for (int u = 0; u < unit_count; ++u) {
      if (options_.skips(rank, step, k, u)) {
        engine_.skip(u);
        continue;
      }
      static_cast<void>(forward_unit(u));
    }
  }

  Lease forward_unit(int u) {
    Lease lease = engine_.forward(u, stream_);
    for_each(u, [&](int index, int number, std::uint64_t count, bool) {
      const std::byte* values = on_host(lease.parameter(index), count, true);
      call([this, values, count, number] {
        for (std::uint64_t i = 0; i < count; i += 7) {
          metric_ += static_cast<double>(load(options_.engine.dtype, values, i)) * (1 + number);
        }
      });
    });
    return lease;
  }

  int fixed = -1;  // The parameter that Engine::freeze() fixed, by its number over all.

  void backward_pass(int step, int k) {
    const int rank = rank_.communicator->rank();
    for (int u = static_cast<int>(options_.units.size()) - 1; u >= 0; --u) {
      if (!options_.skips(rank, step, k, u)) static_cast<void>(backward_unit(u, step, k));
    }
  }

  Lease backward_unit(int u, int step, int k) {
    const int rank = rank_.communicator->rank();
    Lease lease = engine_.backward(u, stream_);
    const bool reads = options_.units[static_cast<std::size_t>(u)].backward_reads_parameters;
    for_each(u, [&](int index, int number, std::uint64_t count, bool frozen) {
      bool accumulate = false;
      std::byte* gradient = lease.gradient(index, &accumulate);
      ASSERT_EQ(gradient == nullptr, frozen || number == fixed);
      if (gradient == nullptr) return;
      const std::byte* values = reads ? on_host(lease.parameter(index), count, true) : nullptr;
      std::byte* computed = on_host(gradient, count, accumulate);
      const float disturbance = options_.disturbance(rank, step);
      const float scale = static_cast<float>(engine_.loss_scale());
      const DataType type = options_.engine.dtype;
      call([=] {
        for (std::uint64_t i = 0; i < count; ++i) {
          const float value = values == nullptr ? 0.0f : load(type, values, i);
          const float g = (0.5f * value + toy_noise(rank, step, k, number, i) + disturbance) * scale;
          store(type, computed, i, accumulate ? load(type, computed, i) + round_to(type, g) : g);
        }
      });
      if (computed != gradient) {
        throw_if_error(rank_.backend->copy_async(gradient, computed, count * element_bytes(type), stream_));
      }
      lease.grad_ready(index);
    });
    return lease;
  }

 private:
  static EngineOptions with_hooks(const ToyOptions& options) {
    EngineOptions result = options.engine;
    result.hooks = &options.hooks;
    result.optional_gradients = true;  // Some tests lease units backward and ask for nothing.
    return result;
  }

  // Visits own parameters, then tied ones: (index in the lease, number over all, count, frozen).
  template <typename Visitor>
  void for_each(int u, Visitor visit) {
    const UnitShape& unit = engine_.model().units[static_cast<std::size_t>(u)];
    int index = 0;
    for (const ParameterShape& parameter : unit.parameters) {
      visit(index, first_number_[static_cast<std::size_t>(u)] + index, parameter.count, parameter.frozen);
      ++index;
    }
    for (const UnitShape::Tied& tied : unit.tied) {
      const ParameterShape& owner = engine_.model()
                                        .units[static_cast<std::size_t>(tied.unit)]
                                        .parameters[static_cast<std::size_t>(tied.index)];
      visit(index++, first_number_[static_cast<std::size_t>(tied.unit)] + tied.index, owner.count,
            owner.frozen);
    }
  }
  // Ends the lease at once, or some of those held in a random order.
  void hold(Lease lease) {
    if (options_.overlap_seed == 0) return;
    held_.push_back(std::move(lease));
    while (held_.size() > 3 || (!held_.empty() && (random_ = mix(random_)) % 2 == 0))
      held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(mix(random_) % held_.size()));
  }
  void free_copies() {
    for (std::byte* copy : copies_) throw_if_error(pinned_->free(copy, {}));
    copies_.clear();
  }
  template <typename Function>
  void call(Function function) {
    throw_if_error(call_on(*rank_.backend, stream_, std::move(function)));
  }
  // `count` elements of device memory for host functions on the stream: in place if the host reaches them,
  // otherwise a copy that lives to the end of the step. The copy is pinned, because a copy from other host
  // memory may be made when it is queued.
  std::byte* on_host(DevicePtr elements, std::uint64_t count, bool with_values) {
    if (rank_.backend->capabilities().host_accessible) return elements;
    const std::uint64_t bytes = count * element_bytes(options_.engine.dtype);
    std::byte* copy = copies_.emplace_back(value_or_throw(pinned_->allocate(bytes)));
    if (with_values) throw_if_error(rank_.backend->copy_async(copy, elements, bytes, stream_));
    return copy;
  }

  const ToyOptions& options_;
  Rank& rank_;
  Engine engine_;
  Stream stream_;
  std::vector<ParameterId> ids_;
  std::vector<int> first_number_;
  std::unique_ptr<PinnedPool> pinned_;
  std::vector<std::byte*> copies_;  // Copies of device memory that the host does not reach.
  std::vector<Lease> held_;
  std::uint64_t random_ = 0;
  double metric_ = 0.0;
};

// Trains on ranks that are threads. Returns the result of rank 0; compares ranks where they must agree.
inline ToyResult run_toy(const ToyOptions& options, const WorldOptions& world = {}) {
  std::vector<ToyResult> results(static_cast<std::size_t>(options.ranks));
  run_ranks(options.ranks, world, [&](Rank& rank) {
    ToyResult& result = results[static_cast<std::size_t>(rank.communicator->rank())];
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    for (int step = 0; step < options.steps; ++step) {
      const StepResult outcome = trainer.step(step);
      result.grad_norms.push_back(outcome.grad_norm.value_or(std::nan("")));
      result.metrics.push_back(outcome.abandoned ? 0.0 : outcome.metric_sum);
      EXPECT_EQ(outcome.abandoned, options.someone_abandons(step));
    }
    trainer.collect(result);
  });
  for (const ToyResult& other : results) {
    EXPECT_TRUE(same_bits(other, results[0])) << "the ranks of one run disagree";
    EXPECT_EQ(other.digest, results[0].digest);
  }
  return results[0];
}

// --- the contract, written out ---

// m and v as they are kept after step t. A block of kBlock8 never holds elements of two parameters.
inline void keep_moments(MomentFormat format, std::uint64_t t, std::vector<float>& m, std::vector<float>& v) {
  if (format == MomentFormat::kFloat32) return;
  const std::uint32_t seed = definitions::dither_seed(t);
  for (std::size_t start = 0; start < m.size(); start += kMomentBlockCount) {
    const std::size_t end = std::min(m.size(), start + kMomentBlockCount);
    float most_m = 0, most_v = 0;
    for (std::size_t i = start; i < end; ++i) {
      most_m = std::max(most_m, std::fabs(m[i]));
      most_v = std::max(most_v, v[i]);
    }
    const std::uint32_t m_exponent = definitions::moment_exponent(float_bits(most_m));
    const std::uint32_t v_exponent = definitions::moment_exponent(float_bits(most_v));
    for (std::size_t i = start; i < end; ++i) {
      const definitions::DitherBits random = definitions::dither_bits(
          seed, m[i], v[i],
          format == MomentFormat::kBfloat16 ? definitions::kBfloat16Shift : definitions::kMomentShift);
      if (format == MomentFormat::kBfloat16) {
        m[i] = bfloat16_to_float(definitions::moment_to_bfloat16(m[i], true, random.m));
        v[i] = bfloat16_to_float(definitions::moment_to_bfloat16(v[i], true, random.v));
      } else {
        m[i] = definitions::m_from_code(definitions::m_to_code(m[i], m_exponent, true, random.m), m_exponent);
        v[i] = definitions::v_from_code(definitions::v_to_code(v[i], v_exponent, true, random.v), v_exponent);
      }
    }
  }
}

// A parameter as Adafactor divides it over ranks.
struct AdafactorParameter {
  std::vector<std::uint64_t> shape;
  std::size_t place;  // Its first element in the unit.
  std::size_t slice;  // Elements of the unit that one rank owns.
  int ranks;
};

// One step of Adafactor from g, which is unscaled and clipped. `factors`: rows, then columns.
inline void reference_adafactor(const AdafactorParameter& q, const std::vector<float>& g, double t,
                                const GroupHyperparameters& group, std::vector<float>& factors,
                                std::vector<float>& master) {
  const std::size_t count = g.size();
  const bool has_rows = q.shape.size() >= 2;
  const std::size_t columns = has_rows ? q.shape.back() : count;
  const std::size_t rows = has_rows ? q.shape[q.shape.size() - 2] : 1;
  const std::size_t batches = count / (rows * columns), row_count = has_rows ? batches * rows : 0;
  factors.resize(row_count + batches * columns);
  const auto owner = [&](std::size_t i) { return static_cast<int>((q.place + i) / q.slice); };
  const auto fold = [](double* lanes) {
    for (int half = 8; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
  };
  const auto square = [](float value) { return static_cast<double>(value) * value; };
  std::vector<float> sums(factors.size());
  for (int r = 0; r < q.ranks; ++r) {
    const auto add = [&](std::size_t at, double partial) {
      const float rounded = static_cast<float>(partial);
      sums[at] = r == 0 ? rounded : sums[at] + rounded;
    };
    for (std::size_t row = 0; row < row_count; ++row) {
      double lanes[16] = {};
      for (std::size_t j = 0; j < columns; ++j) {
        if (owner(row * columns + j) == r) lanes[j % 16] += square(g[row * columns + j]);
      }
      add(row, fold(lanes));
    }
    for (std::size_t matrix = 0; matrix < batches; ++matrix) {
      for (std::size_t j = 0; j < columns; ++j) {
        double total = 0;
        for (std::size_t band = 0; band < rows; band += 256) {
          double sum = 0;
          for (std::size_t row = band; row < std::min(rows, band + 256); ++row) {
            const std::size_t i = (matrix * rows + row) * columns + j;
            if (owner(i) == r) sum += square(g[i]);
          }
          total += sum;
        }
        add(row_count + matrix * columns + j, total);
      }
    }
  }
  const auto weight = static_cast<float>(std::pow(t, -0.8));
  for (std::size_t k = 0; k < factors.size(); ++k) {
    const float mean = sums[k] / static_cast<float>(k < row_count ? columns : rows);
    factors[k] = std::fma(weight, mean - factors[k], factors[k]);
  }
  constexpr float kEpsilon = 0x1p-23f;
  std::vector<float> u(count);
  for (std::size_t matrix = 0; matrix < batches; ++matrix) {
    double lanes[16] = {};
    for (std::size_t row = 0; has_rows && row < rows; ++row) lanes[row % 16] += factors[matrix * rows + row];
    const auto mean = static_cast<float>(fold(lanes) / static_cast<double>(rows));
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t j = 0; j < columns; ++j) {
        const std::size_t i = (matrix * rows + row) * columns + j;
        float moment = factors[row_count + matrix * columns + j];
        if (has_rows) moment = factors[matrix * rows + row] / std::max(mean, kEpsilon) * moment;
        u[i] = g[i] / std::sqrt(std::max(moment, kEpsilon * kEpsilon));
      }
    }
  }
  const auto sum_of_squares = [&](const std::vector<float>& values) {
    double all = 0;
    for (int r = 0; r < q.ranks; ++r) {
      double sum = 0;
      for (std::size_t leaf = q.place / 512 * 512; leaf < q.place + count; leaf += 512) {
        if (static_cast<int>(leaf / q.slice) != r) continue;
        double lanes[16] = {};
        for (std::size_t at = std::max(leaf, q.place); at < std::min(leaf + 512, q.place + count); ++at)
          lanes[at % 16] += square(values[at - q.place]);
        sum += fold(lanes);
      }
      all += sum;
    }
    return all;
  };
  const auto all = static_cast<double>(count);
  const double alpha =
      std::max(1e-3, std::sqrt(sum_of_squares(master) / all)) * std::min(group.lr, 1.0 / std::sqrt(t));
  const float step = -static_cast<float>(alpha / std::max(1.0, std::sqrt(sum_of_squares(u) / all)));
  const float decay = -(static_cast<float>(group.lr) * static_cast<float>(group.weight_decay));
  for (std::size_t i = 0; i < count; ++i) {
    master[i] = std::fma(decay, master[i], master[i]);
    master[i] = std::fma(step, u[i], master[i]);
  }
}

// The orthogonalised matrix of Muon, by the contract in plain loops.
inline std::vector<float> reference_orthogonal(std::size_t rows, std::size_t columns,
                                               const std::vector<float>& u) {
  double all = 0.0;
  for (std::size_t row = 0; row < rows; ++row) {
    double lanes[16] = {};
    for (std::size_t j = 0; j < columns; ++j)
      lanes[j % 16] += static_cast<double>(u[row * columns + j]) * u[row * columns + j];
    for (int half = 8; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    all += lanes[0];
  }
  const float divisor = std::max(static_cast<float>(std::sqrt(all)), 1e-7f);
  const std::size_t k = std::min(rows, columns), n = std::max(rows, columns);
  const auto place = [&](std::size_t i, std::size_t j) {
    return rows > columns ? j * columns + i : i * columns + j;
  };
  std::vector<float> x(k * n), result(k * n);
  for (std::size_t i = 0; i < k; ++i) {
    for (std::size_t j = 0; j < n; ++j) x[i * n + j] = u[place(i, j)] / divisor;
  }
  // Element (i, j) of a product over t.
  const auto product = [](std::size_t height, std::size_t depth, std::size_t width, auto left, auto right) {
    std::vector<float> c(height * width);
    for (std::size_t i = 0; i < height; ++i) {
      for (std::size_t j = 0; j < width; ++j) {
        for (std::size_t t = 0; t < depth; ++t)
          c[i * width + j] = std::fma(left(i, t), right(t, j), c[i * width + j]);
      }
    }
    return c;
  };
  const auto of_x = [&](std::size_t i, std::size_t j) { return x[i * n + j]; };
  for (int step = 0; step < 5; ++step) {
    std::vector<float> gram =
        product(k, n, k, of_x, [&](std::size_t t, std::size_t j) { return of_x(j, t); });
    const auto of_gram = [&](std::size_t i, std::size_t j) { return gram[i * k + j]; };
    const std::vector<float> square = product(k, k, k, of_gram, of_gram);
    for (std::size_t i = 0; i < k * k; ++i) gram[i] = std::fma(2.0315f, square[i], -4.7750f * gram[i]);
    const std::vector<float> moved = product(k, k, n, of_gram, of_x);
    for (std::size_t i = 0; i < k * n; ++i) x[i] = std::fma(3.4445f, x[i], moved[i]);
  }
  for (std::size_t i = 0; i < k; ++i) {
    for (std::size_t j = 0; j < n; ++j) result[place(i, j)] = x[i * n + j] + 0.0f;
  }
  return result;
}

inline double reference_pairs(std::vector<double> values) {
  if (values.empty()) return 0.0;
  while (values.size() > 1) {
    std::vector<double> next;
    for (std::size_t i = 0; i + 1 < values.size(); i += 2) next.push_back(values[i] + values[i + 1]);
    if (values.size() % 2 == 1) next.push_back(values.back());
    values = next;
  }
  return values[0];
}

inline ToyResult reference_toy(const ToyOptions& options) {
  const int n = options.ranks;
  const DataType type = options.engine.dtype;
  struct Parameter {
    int unit;
    ToyParameter shape;
    std::vector<float> master, m, v, average;
    std::size_t place = 0;  // In the trainable section.
    std::vector<float> factors = {};
  };
  const bool own_master = !options.engine.master_weights;
  const auto alignment = static_cast<std::size_t>(parameter_alignment(options.engine));
  std::vector<Parameter> parameters;
  std::vector<int> first_number;
  for (std::size_t u = 0; u < options.units.size(); ++u) {
    first_number.push_back(static_cast<int>(parameters.size()));
    for (const ToyParameter& shape : options.units[u].parameters) {
      Parameter p{static_cast<int>(u), shape, {}, {}, {}, {}};
      for (std::uint64_t i = 0; i < shape.count; ++i) {
        const float value = toy_initial(static_cast<int>(parameters.size()), i);
        p.master.push_back(shape.frozen || own_master ? round_to(type, value) : value);
      }
      p.average = p.master;
      p.m.assign(shape.count, 0.0f);
      p.v.assign(shape.count, 0.0f);
      parameters.push_back(p);
    }
  }
  std::vector<std::size_t> section_end(options.units.size(), 0);
  for (Parameter& p : parameters) {
    if (p.shape.frozen) continue;
    std::size_t& end = section_end[static_cast<std::size_t>(p.unit)];
    end = (end + alignment - 1) / alignment * alignment;
    p.place = end;
    end += p.shape.count;
  }
  double loss_scale = type == DataType::kFloat16 ? options.engine.loss_scale.initial : 1.0;
  int growth = 0;
  int applied = 0;
  ToyResult result;
  for (int step = 0; step < options.steps; ++step) {
    if (options.someone_abandons(step)) {
      result.grad_norms.push_back(std::nan(""));
      result.metrics.push_back(0.0);
      continue;
    }
    const int micro_steps = options.micro_steps_of(step);
    std::vector<std::vector<float>> sums(parameters.size());  // fp32 sums over ranks and micro-steps
    std::vector<bool> used(options.units.size(), false);
    for (std::size_t q = 0; q < parameters.size(); ++q) sums[q].assign(parameters[q].shape.count, 0.0f);
    // By rank and parameter: the sum of `local` over micro-steps.
    std::vector<std::vector<std::vector<float>>> kept(static_cast<std::size_t>(n));
    double metric_sum = 0.0;
    std::vector<double> metrics(static_cast<std::size_t>(n), 0.0);
    const auto read = [&](int r, const std::vector<int>& order, auto visit) {
      for (const int u : order) {
        visit(u, [&](int q) {
          const std::vector<float>& master = parameters[static_cast<std::size_t>(q)].master;
          for (std::size_t i = 0; i < master.size(); i += 7) {
            metrics[static_cast<std::size_t>(r)] += static_cast<double>(round_to(type, master[i])) * (1 + q);
          }
        });
      }
    };
    const auto visit = [&](int u, auto function) {
      const ToyUnit& unit = options.units[static_cast<std::size_t>(u)];
      for (std::size_t i = 0; i < unit.parameters.size(); ++i)
        function(first_number[static_cast<std::size_t>(u)] + static_cast<int>(i));
      for (const UnitShape::Tied& tied : unit.tied)
        function(first_number[static_cast<std::size_t>(tied.unit)] + tied.index);
    };
    for (int k = 0; k < micro_steps; ++k) {
      std::vector<std::vector<std::vector<float>>> gradients(static_cast<std::size_t>(n));
      for (int r = 0; r < n; ++r) {
        std::vector<std::vector<float>>& mine = gradients[static_cast<std::size_t>(r)];
        std::vector<bool> touched(parameters.size(), false);
        mine.resize(parameters.size());
        for (std::size_t q = 0; q < parameters.size(); ++q) mine[q].assign(parameters[q].shape.count, 0.0f);
        const bool local = options.engine.accumulate == Accumulate::kLocal;
        if (local && k > 0) {
          mine = kept[static_cast<std::size_t>(r)];
          touched.assign(parameters.size(), true);
        }
        if (options.evaluates) read(r, options.evaluates(r, step, k), visit);
        read(r, options.forwards_of(r, step, k), visit);
        for (const int u : options.backwards_of(r, step, k)) {
          used[static_cast<std::size_t>(u)] = true;
          for (const UnitShape::Tied& tied : options.units[static_cast<std::size_t>(u)].tied)
            used[static_cast<std::size_t>(tied.unit)] = true;
          const bool reads = options.units[static_cast<std::size_t>(u)].backward_reads_parameters;
          visit(u, [&](int q) {
            Parameter& p = parameters[static_cast<std::size_t>(q)];
            if (p.shape.frozen) return;
            for (std::uint64_t i = 0; i < p.shape.count; ++i) {
              const float value = reads ? round_to(type, p.master[i]) : 0.0f;
              const float g = (0.5f * value + toy_noise(r, step, k, q, i) + options.disturbance(r, step)) *
                              static_cast<float>(loss_scale);
              float& target = mine[static_cast<std::size_t>(q)][i];
              target = touched[static_cast<std::size_t>(q)] ? round_to(type, target + round_to(type, g))
                                                            : round_to(type, g);
            }
            touched[static_cast<std::size_t>(q)] = true;
          });
        }
        kept[static_cast<std::size_t>(r)] = mine;
      }
      if (options.engine.accumulate == Accumulate::kLocal && k + 1 < micro_steps) continue;
      for (std::size_t q = 0; q < parameters.size(); ++q) {
        for (std::uint64_t i = 0; i < parameters[q].shape.count; ++i) {
          // Each all-reduce group in the order of its ranks, then the groups in order.
          const int group = options.engine.group > 1 ? options.engine.group : n;
          float sum = 0;
          for (int g = 0; g < n; g += group) {
            float partial = gradients[static_cast<std::size_t>(g)][q][i];
            for (int r = g + 1; r < g + group; ++r)
              partial = partial + gradients[static_cast<std::size_t>(r)][q][i];
            sum = g == 0 ? partial : sum + partial;
          }
          const bool first = k == 0 || options.engine.accumulate == Accumulate::kLocal;
          sums[q][i] = first ? sum : sums[q][i] + sum;
        }
      }
    }
    for (int r = 0; r < n; ++r) {
      if (options.evaluates) read(r, options.evaluates(r, step, micro_steps), visit);
      metric_sum += metrics[static_cast<std::size_t>(r)];
    }
    result.metrics.push_back(metric_sum);
    const bool over_ranks = options.engine.average == Average::kRanks;
    const float average = static_cast<float>(1.0 / (static_cast<double>(n) * (over_ranks ? 1 : micro_steps)));
    for (std::size_t q = 0; q < parameters.size(); ++q) {
      for (float& g : sums[q]) g = round_to(type, g * average);
    }
    std::vector<double> unit_norms;
    for (std::size_t u = 0; u < options.units.size(); ++u) {
      std::vector<float> flat;
      for (std::size_t q = 0; q < parameters.size(); ++q) {
        if (parameters[q].unit != static_cast<int>(u) || parameters[q].shape.frozen) continue;
        flat.resize((flat.size() + alignment - 1) / alignment * alignment, 0.0f);
        flat.insert(flat.end(), sums[q].begin(), sums[q].end());
      }
      const std::size_t granule = 512 * static_cast<std::size_t>(n);
      flat.resize((flat.size() + granule - 1) / granule * granule, 0.0f);
      const std::size_t slice = flat.size() / static_cast<std::size_t>(n);
      std::vector<double> slices;
      for (int r = 0; r < n; ++r) {
        std::vector<double> leaves;
        for (std::size_t leaf = 0; leaf < slice; leaf += 512) {
          double lanes[16] = {};
          for (std::size_t i = 0; i < 512; ++i) {
            const double g = flat[static_cast<std::size_t>(r) * slice + leaf + i];
            lanes[i % 16] += g * g;
          }
          for (int half = 8; half > 0; half /= 2) {
            for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
          }
          leaves.push_back(lanes[0]);
        }
        slices.push_back(reference_pairs(leaves));
      }
      unit_norms.push_back(reference_pairs(slices));
    }
    const double scale = loss_scale / options.gradient_factor(step);
    const double norm = std::sqrt(reference_pairs(unit_norms)) / scale;
    if (!std::isfinite(norm)) {
      result.grad_norms.push_back(std::nan(""));
      if (type == DataType::kFloat16) {
        loss_scale = std::max(loss_scale / 2.0, options.engine.loss_scale.minimum);
        growth = 0;
      }
      continue;
    }
    result.grad_norms.push_back(norm);
    const double t = ++applied;
    const double shrink = options.clip > 0 && norm > options.clip ? options.clip / norm : 1.0;
    const float factor = static_cast<float>(shrink / scale);
    for (std::size_t q = 0; q < parameters.size(); ++q) {
      Parameter& p = parameters[q];
      if (p.shape.frozen || !used[static_cast<std::size_t>(p.unit)]) continue;
      const GroupHyperparameters& group = options.groups[static_cast<std::size_t>(p.shape.group)];
      const float lr = static_cast<float>(group.lr);
      const float decay = static_cast<float>(group.weight_decay);
      const double wide_beta1 = group.beta1.value_or(options.engine.beta1);
      const double wide_beta2 = group.beta2.value_or(options.engine.beta2);
      const auto beta1 = static_cast<float>(wide_beta1);
      const auto beta2 = static_cast<float>(wide_beta2);
      const auto a1 = static_cast<float>(1.0 - wide_beta1);
      const auto a2 = static_cast<float>(1.0 - wide_beta2);
      const auto c1 = static_cast<float>(1.0 - std::pow(wide_beta1, t));
      const auto s2 = static_cast<float>(std::sqrt(1.0 - std::pow(wide_beta2, t)));
      const auto eps = static_cast<float>(group.epsilon.value_or(options.engine.epsilon));
      const bool is_factored = options.engine.optimizer == Optimizer::kAdafactor;
      if (is_factored) {
        std::vector<float> g = sums[q];
        for (float& value : g) value *= factor;
        const std::size_t granule = 512 * static_cast<std::size_t>(n);
        const std::size_t section =
            (section_end[static_cast<std::size_t>(p.unit)] + granule - 1) / granule * granule;
        reference_adafactor({p.shape.shape, p.place, section / static_cast<std::size_t>(n), n}, g, t, group,
                            p.factors, p.master);
      }
      const bool is_matrix =
          options.engine.optimizer == Optimizer::kMuon && p.shape.shape.size() == 2 && !p.shape.elementwise;
      if (is_matrix) {
        std::vector<float> u(p.shape.count);
        for (std::size_t i = 0; i < u.size(); ++i) {
          const float g = sums[q][i] * factor;
          p.m[i] = std::fma(a1, g - p.m[i], p.m[i]);
          u[i] = std::fma(a1, g - p.m[i], p.m[i]);
        }
        const std::size_t rows = p.shape.shape[0], columns = p.shape.shape[1];
        u = reference_orthogonal(rows, columns, u);
        const auto down = static_cast<double>(rows), across = static_cast<double>(columns);
        const double ratio = options.engine.muon_matches_rms ? 0.2 * std::sqrt(std::max(down, across))
                                                             : std::sqrt(std::max(1.0, down / across));
        const float rate = -static_cast<float>(group.lr * ratio);
        for (std::size_t i = 0; i < u.size(); ++i) {
          p.master[i] = std::fma(-(lr * decay), p.master[i], p.master[i]);
          p.master[i] = std::fma(rate, u[i], p.master[i]);
        }
      }
      for (std::uint64_t i = 0; i < p.shape.count && !is_factored && !is_matrix; ++i) {
        float g = sums[q][i] * factor;
        float w = p.master[i];
        const Optimizer optimizer = options.engine.optimizer;
        if (optimizer == Optimizer::kSgd) {
          g = std::fma(decay, w, g);
          p.m[i] = std::fma(beta1, p.m[i], g);
          p.master[i] = std::fma(-lr, p.m[i], w);
          continue;
        }
        if (optimizer == Optimizer::kLion) {
          const float u = std::fma(beta1, p.m[i], a1 * g);
          w = std::fma(-(lr * decay), w, w);
          p.master[i] = std::fma(-lr, u > 0.0f ? 1.0f : u < 0.0f ? -1.0f : 0.0f, w);
          p.m[i] = std::fma(beta2, p.m[i], a2 * g);
          continue;
        }
        if (optimizer == Optimizer::kAdam) {
          g = std::fma(decay, w, g);
        } else {
          w = std::fma(-(lr * decay), w, w);
        }
        p.m[i] = std::fma(beta1, p.m[i], a1 * g);
        p.v[i] = std::fma(beta2, p.v[i], a2 * (g * g));
        w = std::fma(-(lr / c1), p.m[i] / (std::sqrt(p.v[i]) / s2 + eps), w);
        p.master[i] = w;
      }
      keep_moments(options.engine.moments, static_cast<std::uint64_t>(applied), p.m, p.v);
      const auto average = [&] {
        const auto weight = static_cast<float>(1.0 - options.engine.ema);
        for (std::uint64_t i = 0; i < p.shape.count; ++i)
          p.average[i] = std::fma(weight, p.master[i] - p.average[i], p.average[i]);
      };
      if (!own_master) {
        average();
        continue;
      }
      const std::string name = "p" + std::to_string(q);
      const std::uint64_t seed =
          definitions::step_seed(rounding_key(name), static_cast<std::uint64_t>(applied));
      for (std::uint64_t i = 0; i < p.shape.count; ++i) {
        p.master[i] = bfloat16_to_float(definitions::master_to_bfloat16(p.master[i], true, seed, i));
      }
      average();
    }
    if (type == DataType::kFloat16 && ++growth == options.engine.loss_scale.growth_interval) {
      loss_scale *= 2.0;
      growth = 0;
    }
  }
  for (const Parameter& p : parameters) result.masters.push_back(p.master);
  for (const Parameter& p : parameters) {
    if (options.engine.ema > 0) result.averages.push_back(p.average);
  }
  return result;
}

}  // namespace forebay::testing
