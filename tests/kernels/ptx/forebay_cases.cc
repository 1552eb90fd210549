// The cases of forebay's own kernels. Their definitions are definitions.h, in the plainest loops.
#include <algorithm>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "forebay/host_adafactor.h"
#include "forebay/host_muon.h"
#include "forebay/kernels.h"
#include "kernels/cuda/image.h"
#include "kernels/cuda/launches.h"
#include "kernels/definitions.h"
#include "kernels/host_kernels.h"
#include "kernels/host_moments.h"
#include "tests/fakes/cuda/ptx/image.h"
#include "tests/kernels/plain_adafactor.h"
#include "tests/kernels/ptx/kernel_case.h"

namespace forebay::ptx_test {
namespace {

using cuda_kernels::ElementLaunch;

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16};

Element element_of(DataType type) {
  return type == DataType::kFloat32    ? Element::kFloat32
         : type == DataType::kBfloat16 ? Element::kBfloat16
                                       : Element::kFloat16;
}
std::string name_of(DataType type) {
  return type == DataType::kFloat32 ? "fp32" : type == DataType::kBfloat16 ? "bf16" : "fp16";
}

// The elements before the first place where every operand is aligned to its access; `count` where there is
// none.
std::size_t head_of(std::size_t count, std::size_t granule,
                    std::initializer_list<std::pair<const void*, std::size_t>> operands) {
  for (std::size_t head = 0; head < granule; ++head) {
    const bool aligned = std::all_of(operands.begin(), operands.end(), [&](const auto& operand) {
      const auto [address, bytes] = operand;
      return (reinterpret_cast<std::uintptr_t>(address) + head * bytes) % (granule * bytes) == 0;
    });
    if (aligned) return std::min(head, count);
  }
  return count;
}

// Shifts of the operands: all aligned, shifted alike, and against each other, where no wide access fits.
struct Offsets {
  std::size_t a, b;
};
constexpr Offsets kOffsets[] = {{0, 0}, {3, 3}, {0, 1}};

// Adjacent pairs level by level, an odd one passing up.
double tree(std::vector<double> level) {
  if (level.empty()) return 0.0;
  while (level.size() > 1) {
    std::vector<double> above;
    for (std::size_t i = 0; i < level.size(); i += 2) {
      above.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    }
    level = std::move(above);
  }
  return level[0];
}

class Cases {
 public:
  explicit Cases(std::uint64_t seed) : random_(seed) {}

  std::vector<KernelCase> make() {
    for (const DataType source : kTypes) {
      for (const DataType target : kTypes) {
        if (source != target) cast(source, target);
      }
    }
    for (const DataType type : kTypes) {
      accumulate(type);
      scale(type, type);
      if (type != DataType::kFloat32) scale(type, DataType::kFloat32);
      add(type);
      fill(type);
      for (int i = 0; i < kOptimizerCount; ++i) {
        for (const DataType parameter : kTypes) update(static_cast<Optimizer>(i), type, parameter, true);
        update(static_cast<Optimizer>(i), type, DataType::kFloat32, false);
      }
      norm_leaves(type);
    }
    norm_tree();
    step_control();
    for (const MomentFormat format : {MomentFormat::kFloat32, MomentFormat::kBfloat16, MomentFormat::kBlock8})
      kept_update(format);
    for (int n = 0; n < 12; ++n) {
      muon_momentum(n);
      muon_update(n);
    }
    for (const auto& [rows, columns] :
         {std::pair<std::size_t, std::size_t>{37, 53}, {1, 300}, {300, 1}, {40, 150}, {0, 3}}) {
      for (const Values values : kValues) matrix_norm(rows, columns, values);
    }
    for (std::size_t rows = 2; rows < 32; ++rows) matrix_norm(rows, 3, Values::kMild);
    for (const auto& [rows, columns] :
         {std::pair<std::size_t, std::size_t>{37, 53}, {1, 70}, {70, 1}, {64, 32}}) {
      for (const Values values : kValues) {
        for (const bool divides : {false, true}) {
          matrix_move(rows, columns, divides, false, values);
          matrix_move(rows, columns, divides, true, values);
        }
      }
    }
    // One tile and several, inner dimensions of no step, of whole steps and of neither.
    using cuda_kernels::ProductKind;
    for (const auto& [rows, depth, columns] : {std::tuple<std::size_t, std::size_t, std::size_t>{37, 53, 70},
                                               {1, 16, 1},
                                               {3, 1, 200},
                                               {130, 33, 131},
                                               {140, 17, 5},
                                               {20, 64, 129},
                                               {5, 2, 3}}) {
      for (const Values values : kValues) {
        matrix_product(ProductKind::kGram, rows, depth, rows, values);
        matrix_product(ProductKind::kPolynomial, rows, rows, rows, values);
        matrix_product(ProductKind::kStep, rows, rows, columns, values);
      }
    }
    adafactor();
    return std::move(cases_);
  }

 private:
  Array hard(DataType type, std::size_t count, std::size_t offset) {
    return array_of(element_of(type), count, offset, [&] { return hard_value(element_of(type), random_); });
  }
  Array read_only(Array array) {
    array.read_only = true;
    return array;
  }
  float factor() {
    return std::ldexp(std::uniform_real_distribution<float>(0.5f, 1.0f)(random_),
                      static_cast<int>(random_() % 8) - 4);
  }
  KernelCase& add_case(const std::string& kernel, const std::string& description, unsigned grid) {
    cases_.push_back({kernel, description, grid, {}, {}, {}});
    return cases_.back();
  }
  static std::string describe(const Offsets& offsets, std::size_t count) {
    return "offsets " + std::to_string(offsets.a) + " " + std::to_string(offsets.b) + ", " +
           std::to_string(count) + " elements";
  }

  void cast(DataType source, DataType target) {
    for (const Offsets& offsets : kOffsets) {
      // Every encoding of a 16-bit type, once.
      const bool all = source != DataType::kFloat32 && offsets.b == 0;
      const std::size_t count = all ? 65536 + 5 : 16389;
      KernelCase& c =
          add_case("forebay_cast_" + name_of(source) + "_" + name_of(target), describe(offsets, count), 5);
      c.arrays = {read_only(hard(source, count, offsets.a)), hard(target, count, offsets.b)};
      for (std::size_t i = 0; all && i < 65536; ++i) c.arrays[0].values[i] = i;
      const std::size_t bytes = std::max(element_bytes(source), element_bytes(target));
      const auto arguments = [=](const Pointers& p) {
        return CastArguments{p.at(0), p.at(1), count, source, target};
      };
      c.argument = [=](const Pointers& p) {
        return bytes_of_struct(ElementLaunch<CastArguments>{
            arguments(p), head_of(count, 16 / bytes,
                                  {{p.at(0), element_bytes(source)}, {p.at(1), element_bytes(target)}})});
      };
      c.define = [=](const Pointers& p) { host_kernels::scalar_kernels().cast(arguments(p), 0, count); };
    }
  }

  void accumulate(DataType type) {
    const std::size_t bytes = element_bytes(type);
    for (const int ranks : {1, 2, 3, 4, 5, 9}) {
      for (const bool first : {false, true}) {
        for (const Offsets& offsets : kOffsets) {
          const std::size_t count = 1501;
          const std::size_t stride = offsets.a == 3 ? count : (count + 7) / 8 * 8;
          const int rank = static_cast<int>(random_() % static_cast<std::uint64_t>(ranks));
          KernelCase& c = add_case("forebay_accumulate_" + name_of(type),
                                   describe(offsets, count) + ", " + std::to_string(ranks) + " ranks", 2);
          c.arrays = {read_only(hard(type, count, offsets.a)),
                      read_only(hard(type, stride * static_cast<std::size_t>(ranks), offsets.a)),
                      hard(DataType::kFloat32, count, offsets.b)};
          const auto arguments = [=](const Pointers& p) {
            return AccumulateArguments{
                p.at(0), p.at<std::byte>(1), stride * bytes, p.at(2), count, rank, ranks, type, first};
          };
          c.argument = [=](const Pointers& p) {
            const AccumulateArguments a = arguments(p);
            const bool received = ranks > 1;
            const std::byte* const begin = received ? a.received : p.at<std::byte>(0);
            const std::byte* const second = received ? begin + a.received_stride_bytes : begin;
            return bytes_of_struct(ElementLaunch<AccumulateArguments>{
                a, head_of(count, 4,
                           {{a.target, sizeof(float)}, {a.own, bytes}, {begin, bytes}, {second, bytes}})});
          };
          c.define = [=](const Pointers& p) {
            host_kernels::scalar_kernels().accumulate(arguments(p), 0, count);
          };
        }
      }
    }
  }

  void scale(DataType round, DataType target) {
    for (const Offsets& offsets : kOffsets) {
      const std::size_t count = 12011;
      const float by = factor();
      KernelCase& c =
          add_case("forebay_scale_" + name_of(round) + "_" + name_of(target), describe(offsets, count), 3);
      c.arrays = {read_only(hard(DataType::kFloat32, count, offsets.a)), hard(target, count, offsets.b)};
      const auto arguments = [=](const Pointers& p) {
        return ScaleArguments{p.at(0), p.at(1), count, by, round, target};
      };
      c.argument = [=](const Pointers& p) {
        return bytes_of_struct(ElementLaunch<ScaleArguments>{
            arguments(p), head_of(count, 4, {{p.at(0), sizeof(float)}, {p.at(1), element_bytes(target)}})});
      };
      c.define = [=](const Pointers& p) { host_kernels::scalar_kernels().scale(arguments(p), 0, count); };
    }
  }

  void add(DataType type) {
    const std::size_t bytes = element_bytes(type);
    for (const Offsets& offsets : kOffsets) {
      const std::size_t count = 12011;
      KernelCase& c = add_case("forebay_add_" + name_of(type), describe(offsets, count), 3);
      c.arrays = {read_only(hard(type, count, offsets.a)), hard(type, count, offsets.b)};
      const auto arguments = [=](const Pointers& p) { return AddArguments{p.at(0), p.at(1), count, type}; };
      c.argument = [=](const Pointers& p) {
        return bytes_of_struct(ElementLaunch<AddArguments>{
            arguments(p), head_of(count, 16 / bytes, {{p.at(0), bytes}, {p.at(1), bytes}})});
      };
      c.define = [=](const Pointers& p) { host_kernels::scalar_kernels().add(arguments(p), 0, count); };
    }
  }

  void fill(DataType type) {
    const std::size_t bytes = element_bytes(type);
    for (const std::size_t offset : {0, 1, 5}) {
      for (const std::uint32_t bits : {0x3F808000u, 0x80000000u, 0x000116C2u, 0xFFC01234u, 0x7149F2CAu}) {
        const std::size_t count = 1003;
        const auto value = std::bit_cast<float>(bits);
        KernelCase& c = add_case("forebay_fill_" + name_of(type), describe({offset, 0}, count), 2);
        c.arrays = {hard(type, count, offset)};
        const auto arguments = [=](const Pointers& p) { return FillArguments{p.at(0), count, value, type}; };
        c.argument = [=](const Pointers& p) {
          return bytes_of_struct(
              ElementLaunch<FillArguments>{arguments(p), head_of(count, 16 / bytes, {{p.at(0), bytes}})});
        };
        c.define = [=](const Pointers& p) {
          host_kernels::with_type(type, [&]<DataType t>() {
            auto* const target = p.at<typename definitions::Element<t>::Storage>(0);
            std::fill(target, target + count, definitions::Element<t>::round(value));
          });
        };
      }
    }
  }

  void update(Optimizer optimizer, DataType gradient, DataType parameter, bool has_parameter) {
    const bool is_adamw = optimizer == Optimizer::kAdamW;
    const std::size_t gradient_bytes = element_bytes(gradient), parameter_bytes = element_bytes(parameter);
    // How the step's control decides: there is none, it applies, it skips, the unit was not used, it has no
    // table.
    for (const int control : {0, 1, 2, 3, 4}) {
      if (control > 1 && !is_adamw) continue;  // Both kernels decide alike.
      const bool controlled = control > 0, updates = control == 0 || control == 1 || control == 4;
      for (const Offsets& offsets : kOffsets) {
        if (control > 1 && offsets.a != 0) continue;
        const std::size_t count = control > 1 || !is_adamw ? 517 : 4099;
        KernelCase& c = add_case((is_adamw ? "forebay_adamw_" : "forebay_update_") + name_of(gradient) +
                                     (has_parameter ? "_" + name_of(parameter) : ""),
                                 describe(offsets, count) + ", control " + std::to_string(control) + ", " +
                                     optimizer_name(optimizer),
                                 3);
        c.arrays = {read_only(hard(gradient, count, offsets.a)), hard(DataType::kFloat32, count, offsets.b),
                    hard(DataType::kFloat32, count, offsets.b), hard(DataType::kFloat32, count, offsets.b),
                    hard(parameter, has_parameter ? count : 0, offsets.a)};
        for (std::uint64_t& v : c.arrays[3].values) {
          if (random_() % 4 != 0) v &= 0x7FFFFFFF;  // A second moment is rarely negative.
        }
        StepState state;
        state.outcome = control == 2 ? StepOutcome::kSkipped : StepOutcome::kApplied;
        state.factor = 0.021f;
        state.c1 = 0.4f;
        state.s2 = 0.6f;
        const std::vector<std::byte> state_bytes = bytes_of_struct(state);
        Array state_array{Element::kByte, state_bytes.size(), 0, true, {}, false};
        for (const std::byte b : state_bytes) state_array.values.push_back(std::to_integer<std::uint64_t>(b));
        c.arrays.push_back(std::move(state_array));
        c.arrays.push_back({Element::kWord32, 1, 0, true, {control == 3 ? 0u : 1u}, false});
        const auto arguments = [=](const Pointers& p) {
          AdamWArguments a = {};
          a.gradient = p.at(0);
          a.optimizer = optimizer;
          a.master = p.at(1), a.m = p.at(2);
          if (has_second_moment(optimizer)) a.v = p.at(3);
          a.parameter = has_parameter ? p.at(4) : nullptr;
          a.count = count;
          a.gradient_type = gradient, a.parameter_type = parameter;
          a.factor = 0.37f, a.lr = 3e-4f, a.weight_decay = 0.1f, a.beta1 = 0.9f, a.beta2 = 0.95f,
          a.eps = 1e-8f;
          a.a1 = 0.1f, a.a2 = 0.05f, a.c1 = 0.19f, a.s2 = 0.31f;
          return a;
        };
        c.argument = [=](const Pointers& p) {
          const AdamWArguments a = arguments(p);
          ControlledAdamWArguments all = {a, nullptr, nullptr};
          if (controlled) all.state = p.at<StepState>(5);
          if (controlled && control != 4) all.used = p.at<std::uint32_t>(6);
          const std::size_t head =
              has_parameter
                  ? head_of(count, 4,
                            {{a.gradient, gradient_bytes},
                             {a.master, 4},
                             {a.m, 4},
                             {a.v, 4},
                             {a.parameter, parameter_bytes}})
                  : head_of(count, 4, {{a.gradient, gradient_bytes}, {a.master, 4}, {a.m, 4}, {a.v, 4}});
          return bytes_of_struct(ElementLaunch<ControlledAdamWArguments>{all, head});
        };
        c.define = [=](const Pointers& p) {
          AdamWArguments a = arguments(p);
          if (controlled) a.factor = state.factor, a.c1 = state.c1, a.s2 = state.s2;
          if (updates) host_kernels::scalar_kernels().adamw(a, 0, count);
        };
      }
    }
  }

  // Sums of squares that stay finite, and one element that is not, now and then.
  void norm_leaves(DataType type) {
    const Element element = element_of(type);
    const std::size_t chunk = 256 / element_bytes(type);  // Leaves of a block: a whole subtree.
    for (const std::size_t leaves : {1, 2, 63, 64, 65, 127, 129, 300}) {
      for (const std::size_t offset : {0, 1}) {
        KernelCase& c = add_case("forebay_norm_leaves_" + name_of(type),
                                 std::to_string(leaves) + " leaves, offset " + std::to_string(offset), 2);
        const std::size_t count = leaves * kLeafCount, chunks = (leaves + chunk - 1) / chunk;
        Array source = array_of(element, count, offset, [&] { return mild_value(element, random_); });
        if (random_() % 2 == 0) source.values[random_() % count] = hard_value(element, random_);
        source.read_only = true;
        c.arrays = {std::move(source), array_of(Element::kFloat64, chunks, 0, [] { return 0; })};
        c.arrays[1].any_nan = true;  // norm_tree gives the canonical one.
        c.argument = [=](const Pointers& p) {
          return bytes_of_struct(cuda_kernels::NormLeavesLaunch{
              p.at(0), p.at<double>(1), leaves, reinterpret_cast<std::uintptr_t>(p.at(0)) % 16 == 0});
        };
        c.define = [=](const Pointers& p) {
          std::vector<double> sums(leaves);
          host_kernels::scalar_kernels().norm_leaves({p.at(0), sums.data(), nullptr, count, type}, 0, leaves);
          for (std::size_t k = 0; k < chunks; ++k) {
            const auto begin = sums.begin() + static_cast<std::ptrdiff_t>(k * chunk);
            const auto end = sums.begin() + static_cast<std::ptrdiff_t>(std::min(leaves, (k + 1) * chunk));
            p.at<double>(1)[k] = tree({begin, end});
          }
        };
      }
    }
  }

  void norm_tree() {
    for (const std::size_t count : {0, 1, 2, 3, 5, 64, 255, 513, 1000, 2049}) {
      for (const bool is_hard : {false, true}) {
        KernelCase& c = add_case("forebay_norm_tree", std::to_string(count) + " values", 1);
        c.arrays = {array_of(Element::kFloat64, count, 0,
                             [&] {
                               return is_hard ? hard_value(Element::kFloat64, random_)
                                              : mild_value(Element::kFloat64, random_);
                             }),
                    array_of(Element::kFloat64, 1, 0, [] { return 0; })};
        c.arrays[0].any_nan = true;  // The inner values; the result has the canonical one.
        c.argument = [=](const Pointers& p) {
          return bytes_of_struct(cuda_kernels::NormTreeLaunch{p.at<double>(0), count, p.at<double>(1)});
        };
        c.define = [=](const Pointers& p) {
          double* const values = p.at<double>(0);
          for (std::size_t step = 1; step < count; step *= 2) {
            for (std::size_t i = 0; i + step < count; i += 2 * step) values[i] += values[i + step];
          }
          *p.at<double>(1) = definitions::canonical_double(count == 0 ? 0.0 : values[0]);
        };
      }
    }
  }

  void step_control() {
    for (std::size_t n = 0; n < 120; ++n) {
      const std::size_t units = n < 3 ? n : random_() % 300 + 1;
      const int ranks = static_cast<int>(random_() % 9) + 1;
      const std::size_t stride = units + random_() % 5, all = stride * static_cast<std::size_t>(ranks);
      const bool has_used = n % 4 != 0, dynamic = n % 2 == 1;
      StepState start;
      start.attempted_steps = random_() % 100;
      start.applied_steps = random_() % 5;
      start.loss_scale = dynamic ? 65536.0 : 1.0;
      start.growth_counter = n % 5 == 0 ? 1999 : 3;
      KernelCase& c = add_case("forebay_step_control",
                               std::to_string(units) + " units of " + std::to_string(ranks) + " ranks", 1);
      Array state{Element::kByte, sizeof start, 0, false, {}, false};
      for (const std::byte b : bytes_of_struct(start))
        state.values.push_back(std::to_integer<std::uint64_t>(b));
      Array squares = array_of(Element::kFloat64, all, 0,
                               [&] { return mild_value(Element::kFloat64, random_) & 0x7FFFFFFFFFFFFFFF; });
      if (n % 7 == 3 && all > 0)
        squares.values[random_() % all] = 0x7FF0000000000000 + (random_() % 2) * 0x8000000000000;
      Array corrections = array_of(Element::kFloat32, 6, 0,
                                   [&] { return mild_value(Element::kFloat32, random_) & 0x7FFFFFFF; });
      corrections.read_only = squares.read_only = true;
      c.arrays = {std::move(state),
                  std::move(squares),
                  read_only(array_of(Element::kFloat64, all, 0,
                                     [&] { return random_() % 3 != 0 ? 0 : 0x3FF0000000000000; })),
                  array_of(Element::kWord32, units, 0, [] { return 77; }),
                  array_of(Element::kFloat64, units * static_cast<std::size_t>(ranks), 0, [] { return 0; }),
                  std::move(corrections)};
      const std::uint64_t first_step = random_() % 3 + 1;
      const double clip = n % 3 == 0 ? 0.0 : 1.0;
      c.arrays[4].any_nan = true;  // The scratch.
      const auto arguments = [=](const Pointers& p) {
        StepControlArguments a = {};
        a.state = p.at<StepState>(0);
        a.squares = p.at<double>(1);
        a.used = has_used ? p.at<double>(2) : nullptr;
        a.unit_used = has_used ? p.at<std::uint32_t>(3) : nullptr;
        a.scratch = p.at<double>(4);
        a.rank_stride = stride, a.unit_count = units, a.rank_count = ranks;
        a.clip = clip;
        a.corrections = p.at<BiasCorrection>(5), a.first_step = first_step, a.correction_count = 3;
        a.dynamic_loss_scale = dynamic, a.growth_interval = 2000, a.minimum_loss_scale = 1.0;
        return a;
      };
      c.argument = [=](const Pointers& p) { return bytes_of_struct(arguments(p)); };
      c.define = [=](const Pointers& p) {
        const StepControlArguments a = arguments(p);
        const auto rank_count = static_cast<std::size_t>(ranks);
        for (std::size_t u = 0; u < units; ++u) {
          bool used = false;
          for (std::size_t r = 0; r < rank_count; ++r) {
            a.scratch[r * units + u] = a.squares[r * stride + u];
            used = used || (has_used && a.used[r * stride + u] != 0.0);
          }
          if (has_used) a.unit_used[u] = used ? 1 : 0;
          for (std::size_t step = 1; step < rank_count; step *= 2) {
            for (std::size_t r = 0; r + step < rank_count; r += 2 * step)
              a.scratch[r * units + u] += a.scratch[(r + step) * units + u];
          }
        }
        for (std::size_t step = 1; step < units; step *= 2) {
          for (std::size_t u = 0; u + step < units; u += 2 * step) a.scratch[u] += a.scratch[u + step];
        }
        definitions::advance_step(a, units == 0 ? 0.0 : a.scratch[0]);
      };
    }
  }

  // Every optimizer with every type of gradient, and masters of both kinds.
  void kept_update(MomentFormat format) {
    const Element element = format == MomentFormat::kFloat32    ? Element::kFloat32
                            : format == MomentFormat::kBfloat16 ? Element::kBfloat16
                                                                : Element::kByte;
    for (int n = 0; n < 8 * kOptimizerCount; ++n) {
      const auto optimizer = static_cast<Optimizer>(n % kOptimizerCount);
      const bool is_half = n % 8 >= 4, has_v = has_second_moment(optimizer);
      const bool has_parameter = !is_half && n % 3 != 0;
      const DataType gradient = kTypes[n % 3], parameter = kTypes[(n / 3) % 3];
      const std::size_t offset = n % 5 == 4 ? 3 : 0, count = n % 4 == 0 ? 5003 : 517;
      const bool dithered = n % 7 != 0, controlled = n % 2 == 1, used = n % 16 != 5;
      KernelCase& c = add_case(std::string("forebay_kept_update_") + moment_format_name(format),
                               describe({offset, offset}, count) + ", case " + std::to_string(n) + ", " +
                                   optimizer_name(optimizer),
                               2);
      const auto kept = [&](std::size_t elements) {
        Array array = array_of(element, elements, offset, [&] {
          return element == Element::kByte ? random_() % 256 : hard_value(element, random_);
        });
        return array;
      };
      const auto exponents = [&] {
        return array_of(Element::kByte, moment_exponent_bytes(format, count), 0,
                        [&] { return random_() % 8 == 0 ? random_() % 256 : 115 + random_() % 24; });
      };
      StepState state;
      state.outcome = StepOutcome::kApplied;
      state.applied_steps = 12;
      state.factor = 0.021f, state.c1 = 0.4f, state.s2 = 0.6f;
      Array state_array{Element::kByte, sizeof state, 0, true, {}, false};
      for (const std::byte b : bytes_of_struct(state))
        state_array.values.push_back(std::to_integer<std::uint64_t>(b));
      c.arrays = {read_only(hard(gradient, count, offset)),
                  hard(is_half ? DataType::kBfloat16 : DataType::kFloat32, count, offset),
                  kept(count),
                  kept(has_v ? count : 0),
                  exponents(),
                  exponents(),
                  hard(parameter, has_parameter ? count : 0, offset),
                  std::move(state_array),
                  {Element::kWord32, 1, 0, true, {used ? 1u : 0u}, false},
                  hard(DataType::kFloat32, count, offset)};
      const bool has_average = n % 6 < 3;
      const auto arguments = [=](const Pointers& p) {
        KeptUpdateArguments a;
        AdamWArguments& u = a.update;
        u = {};
        u.gradient = p.at(0);
        u.optimizer = optimizer;
        u.parameter = has_parameter ? p.at(6) : nullptr;
        u.count = count;
        u.gradient_type = gradient, u.parameter_type = parameter;
        u.factor = 0.37f, u.lr = 3e-4f, u.weight_decay = 0.1f, u.beta1 = 0.9f, u.beta2 = 0.95f, u.eps = 1e-8f;
        u.a1 = 0.1f, u.a2 = 0.05f, u.c1 = 0.19f, u.s2 = 0.31f;
        if (is_half) {
          a.half = {p.at<std::uint16_t>(1), 0xFFFFFF00u, 0xFEDCBA9876543210u};
        } else {
          u.master = p.at(1);
        }
        a.moments = {format, p.at(2), has_v ? p.at(3) : nullptr, nullptr, nullptr};
        if (format == MomentFormat::kBlock8) {
          a.moments.m_exponents = p.at<std::uint8_t>(4);
          if (has_v) a.moments.v_exponents = p.at<std::uint8_t>(5);
        }
        a.rounding = dithered ? MomentRounding::kDithered : MomentRounding::kNearest;
        a.step = 3;
        a.average = has_average ? p.at(9) : nullptr;
        a.average_weight = 0.125f;
        return a;
      };
      c.argument = [=](const Pointers& p) {
        cuda_kernels::KeptUpdateLaunch launch = {{arguments(p), nullptr, nullptr}, offset == 0};
        if (controlled) {
          launch.arguments.state = p.at<StepState>(7);
          launch.arguments.used = p.at<std::uint32_t>(8);
        }
        return bytes_of_struct(launch);
      };
      c.define = [=](const Pointers& p) {
        KeptUpdateArguments a = arguments(p);
        if (controlled) {
          if (!used) return;
          a.update.factor = state.factor, a.update.c1 = state.c1, a.update.s2 = state.s2;
          a.step = state.applied_steps;
        }
        host_kernels::scalar_moment_kernels().update(a, 0, count,
                                                     {dithered, definitions::dither_seed(a.step)});
        const void* const master = is_half ? static_cast<const void*>(a.half.elements) : a.update.master;
        const DataType type = is_half ? DataType::kBfloat16 : DataType::kFloat32;
        if (has_average)
          host_kernels::scalar_kernels().average({master, a.average, type, a.average_weight}, 0, count);
      };
    }
  }

  // The state of an applied step, or of one that is skipped.
  static Array state_array(StepState state, bool applied) {
    state.outcome = applied ? StepOutcome::kApplied : StepOutcome::kSkipped;
    Array array{Element::kByte, sizeof state, 0, true, {}, false};
    for (const std::byte b : bytes_of_struct(state))
      array.values.push_back(std::to_integer<std::uint64_t>(b));
    return array;
  }

  void muon_momentum(int n) {
    const DataType type = kTypes[n % 3];
    const std::size_t offset = n % 4 == 3 ? 3 : 0, count = n % 5 == 0 ? 5003 : 517;
    const bool controlled = n % 2 == 1, applied = n % 6 != 5;
    KernelCase& c = add_case("forebay_muon_momentum", describe({offset, offset}, count), 2);
    StepState state;
    state.factor = 0.021f;
    c.arrays = {read_only(hard(type, count, offset)), read_only(hard(DataType::kFloat32, count, offset)),
                hard(DataType::kFloat32, count, offset), state_array(state, applied)};
    const auto arguments = [=](const Pointers& p) {
      return MuonMomentumArguments{{p.at(0), type, 0.37f}, 0.05f, p.at(1), p.at(2), count};
    };
    c.argument = [=](const Pointers& p) {
      return bytes_of_struct(cuda_kernels::RunLaunch<MuonMomentumArguments>{
          {arguments(p), controlled ? p.at<StepState>(3) : nullptr}, offset == 0});
    };
    c.define = [=](const Pointers& p) {
      MuonMomentumArguments a = arguments(p);
      if (!definitions::decided(controlled ? p.at<StepState>(3) : nullptr, a)) return;
      forebay::muon_momentum(a, BlockRunner(1));
    };
  }

  void muon_update(int n) {
    const DataType type = kTypes[n % 3], parameter = kTypes[n / 3 % 3];
    const bool is_half = n % 4 == 1, has_parameter = !is_half && n % 4 != 2, has_average = n % 5 < 2;
    const std::size_t offset = n % 4 == 3 ? 3 : 0, count = n % 5 == 0 ? 5003 : 517;
    const bool controlled = n % 2 == 1, applied = n % 6 != 5;
    KernelCase& c = add_case("forebay_muon_update", describe({offset, offset}, count), 2);
    StepState state;
    state.factor = 0.021f, state.applied_steps = 12;
    c.arrays = {read_only(hard(type, count, offset)),
                read_only(hard(DataType::kFloat32, count, offset)),
                hard(DataType::kFloat32, count, offset),
                hard(is_half ? DataType::kBfloat16 : DataType::kFloat32, count, offset),
                hard(DataType::kFloat32, count, offset),
                hard(parameter, has_parameter ? count : 0, offset),
                state_array(state, applied)};
    const auto arguments = [=](const Pointers& p) {
      MuonUpdateArguments a;
      a.gradient = {p.at(0), type, 0.37f};
      a.a1 = 0.05f, a.u = p.at(1), a.m = p.at(2), a.count = count;
      a.decay = -1e-3f, a.step = -1e-2f, a.step_number = 3;
      if (is_half) {
        a.half = {p.at<std::uint16_t>(3), 0xFFFFFF00u, 0xFEDCBA9876543210u};
      } else {
        a.master = p.at(3);
      }
      if (has_average) a.average = p.at(4), a.average_weight = 0.125f;
      if (has_parameter) a.parameter = p.at(5), a.parameter_type = parameter;
      return a;
    };
    c.argument = [=](const Pointers& p) {
      return bytes_of_struct(cuda_kernels::RunLaunch<MuonUpdateArguments>{
          {arguments(p), controlled ? p.at<StepState>(6) : nullptr}, offset == 0});
    };
    c.define = [=](const Pointers& p) {
      MuonUpdateArguments a = arguments(p);
      if (!definitions::decided(controlled ? p.at<StepState>(6) : nullptr, a)) return;
      forebay::muon_update(a, BlockRunner(1));
    };
  }

  // The values of a matrix: any, those about one, and subnormals, of which products are subnormals or zeros.
  // A definition gives a NaN, and not a certain one.
  enum class Values { kHard, kMild, kSmall };
  static constexpr Values kValues[] = {Values::kHard, Values::kMild, Values::kSmall};
  Array matrix_of(std::size_t count, Values values) {
    Array array = array_of(Element::kFloat32, count, static_cast<std::size_t>(values), [&] {
      if (random_() % 16 == 0) return std::uint64_t{0x80000000};
      if (values == Values::kHard) return hard_value(Element::kFloat32, random_);
      if (values == Values::kMild) return mild_value(Element::kFloat32, random_);
      const float value =
          std::bit_cast<float>(static_cast<std::uint32_t>(mild_value(Element::kFloat32, random_)));
      return static_cast<std::uint64_t>(
          std::bit_cast<std::uint32_t>(std::ldexp(value, random_() % 2 == 0 ? -75 : -130)));
    });
    array.any_nan = true;
    return array;
  }

  // Both kernels of the norm.
  void matrix_norm(std::size_t rows, std::size_t columns, Values values) {
    for (const bool is_tree : {false, true}) {
      KernelCase& c = add_case(is_tree ? "forebay_matrix_norm" : "forebay_matrix_squares",
                               std::to_string(rows) + " x " + std::to_string(columns), is_tree ? 1 : 3);
      Array sums = array_of(Element::kFloat64, rows, 0, [&] {
        return is_tree ? mild_value(Element::kFloat64, random_) & ~(1ull << 63) : 0;
      });
      sums.any_nan = true;
      c.arrays = {read_only(matrix_of(rows * columns, values)), sums, hard(DataType::kFloat32, 1, 0)};
      const auto launch = [=](const Pointers& p) {
        return cuda_kernels::MatrixNormLaunch{p.at(0), p.at<double>(1), p.at(2), rows, columns, nullptr};
      };
      c.argument = [=](const Pointers& p) { return bytes_of_struct(launch(p)); };
      c.define = [=](const Pointers& p) {
        const cuda_kernels::MatrixNormLaunch a = launch(p);
        double sum = 0.0;
        for (std::size_t i = 0; i < rows; ++i) {
          if (!is_tree) {
            double lanes[definitions::kNormLanes] = {};
            for (std::size_t j = 0; j < columns; ++j) {
              double& lane = lanes[j % definitions::kNormLanes];
              lane = definitions::norm_step(lane, a.matrix[i * columns + j]);
            }
            a.sums[i] = definitions::norm_fold(lanes, definitions::kNormLanes);
          }
          sum = sum + a.sums[i];
        }
        if (is_tree) *a.divisor = definitions::matrix_divisor(sum);
      };
    }
  }

  void matrix_move(std::size_t rows, std::size_t columns, bool divides, bool turned, Values values) {
    KernelCase& c = add_case("forebay_matrix_move",
                             std::to_string(rows) + " x " + std::to_string(columns) +
                                 (divides ? ", divided" : "") + (turned ? ", turned" : ""),
                             2);
    c.arrays = {read_only(matrix_of(rows * columns, values)), matrix_of(rows * columns, values),
                matrix_of(1, values)};
    const auto launch = [=](const Pointers& p) {
      return cuda_kernels::MatrixMoveLaunch{p.at(0), p.at(1), divides ? p.at(2) : nullptr, rows, columns,
                                            turned,  nullptr};
    };
    c.argument = [=](const Pointers& p) { return bytes_of_struct(launch(p)); };
    c.define = [=](const Pointers& p) {
      for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t j = 0; j < columns; ++j) {
          const float value = p.at(0)[i * columns + j];
          p.at(1)[turned ? j * rows + i : i * columns + j] = divides ? value / *p.at(2) : value + 0.0f;
        }
      }
    };
  }

  // A matrix that is symmetric stays so, bit for bit.
  void matrix_product(cuda_kernels::ProductKind kind, std::size_t rows, std::size_t depth,
                      std::size_t columns, Values values) {
    using cuda_kernels::ProductKind;
    const char* const name = kind == ProductKind::kGram         ? "forebay_matrix_gram"
                             : kind == ProductKind::kPolynomial ? "forebay_matrix_polynomial"
                                                                : "forebay_matrix_step";
    KernelCase& c = add_case(
        name, std::to_string(rows) + " x " + std::to_string(depth) + " x " + std::to_string(columns), 2);
    Array a = matrix_of(rows * depth, values);
    for (std::size_t i = 0; i < rows && kind == ProductKind::kPolynomial; ++i) {
      for (std::size_t j = 0; j < i; ++j) a.values[i * rows + j] = a.values[j * rows + i];
    }
    c.arrays = {read_only(std::move(a)), read_only(matrix_of(depth * columns, values)),
                matrix_of(rows * columns, values)};
    const auto launch = [=](const Pointers& p) {
      return cuda_kernels::MatrixProductLaunch{p.at(0), p.at(1), p.at(2), rows, depth, columns, nullptr};
    };
    c.argument = [=](const Pointers& p) { return bytes_of_struct(launch(p)); };
    c.define = [=](const Pointers& p) {
      const cuda_kernels::MatrixProductLaunch m = launch(p);
      for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t j = 0; j < columns; ++j) {
          float sum = 0.0f;
          for (std::size_t t = 0; t < depth; ++t) {
            const float b = kind == ProductKind::kGram         ? m.a[j * depth + t]
                            : kind == ProductKind::kPolynomial ? m.a[t * columns + j]
                                                               : m.b[t * columns + j];
            sum = definitions::product_step(sum, m.a[i * depth + t], b);
          }
          if (kind == ProductKind::kPolynomial)
            sum = definitions::combine_element(kMuonC, sum, kMuonB, m.a[i * columns + j]);
          if (kind == ProductKind::kStep)
            sum = definitions::combine_element(kMuonA, m.b[i * columns + j], 1.0f, sum);
          m.c[i * columns + j] = sum;
        }
      }
    };
  }

  // A run of a parameter's elements.
  struct RunCase {
    FactoredShape shape;
    std::uint64_t first, count, place;
    float factor = 0.37f;
  };

  void adafactor() {
    // Whole parameters, and slices that cut rows, bands and matrices.
    const RunCase runs[] = {{{1, 37, 53, true}, 0, 1961, 0},      {{1, 37, 53, true}, 60, 1500, 67},
                            {{1, 1, 1300, false}, 0, 1300, 512},  {{1, 1, 1300, false}, 500, 300, 1012},
                            {{2, 600, 7, true}, 0, 8400, 0},      {{2, 600, 7, true}, 1001, 6555, 13},
                            {{1, 2100, 1, true}, 700, 1024, 703}, {{5, 1, 19, true}, 3, 80, 509},
                            {{20, 2, 3, true}, 1, 100, 15},       {{1, 3, 200, true}, 0, 600, 1},
                            {{1, 2100, 1, true}, 0, 2100, 3}};
    int number = 0;
    for (const RunCase& run : runs) {
      for (const DataType type : kTypes) {
        for (const bool is_mild : {true, false}) {
          factor_sums(run, type, is_mild);
          update_leaves(run, type, is_mild);
          parameter_leaves(run, type, is_mild);
        }
      }
      for (int n = 0; n < 4; ++n) factored_update(run, number++);
      for (int n = 0; n < 4; ++n) factor_renewal(run.shape, number++);
      keep_factors(run.shape.factor_count(), number);
    }
    for (const std::size_t count : {0, 1, 2, 30, 1024, 1025, 2500}) chain(count);
    for (const std::uint64_t ranks : {1, 3, 127, 300}) {
      for (int n = 0; n < 4; ++n) adafactor_step(ranks, n);
    }
  }

  Array values_of(DataType type, std::size_t count, std::size_t offset, bool is_mild) {
    if (!is_mild) return hard(type, count, offset);
    return array_of(element_of(type), count, offset, [&] { return mild_value(element_of(type), random_); });
  }
  // Values of one size: a bit that is wrong in any of them is seen in their sum.
  Array near_values(DataType type, std::size_t count) {
    return array_of(element_of(type), count, type == DataType::kFloat32 ? 0 : 1, [&] {
      const float value = std::uniform_real_distribution<float>(0.5f, 1.0f)(random_);
      if (type == DataType::kBfloat16) return std::uint64_t{float_to_bfloat16(value)};
      if (type == DataType::kFloat16) return std::uint64_t{float_to_float16(value)};
      return std::uint64_t{std::bit_cast<std::uint32_t>(value)};
    });
  }
  // Row and column factors, means and sums of squares: no sign.
  Array squares_array(Element element, std::size_t count) {
    const std::uint64_t sign = element == Element::kFloat64 ? 1ull << 63 : 1ull << 31;
    return array_of(element, count, 0, [&] { return mild_value(element, random_) & ~sign; });
  }
  static FactoredRun run_of(const RunCase& c, const Pointers& p, DataType type) {
    return {p.at(0), type, c.factor, c.shape, c.first, c.count, c.place};
  }
  static std::string describe(const RunCase& c) {
    return std::to_string(c.shape.batches) + " x " + std::to_string(c.shape.rows) + " x " +
           std::to_string(c.shape.columns) + ", " + std::to_string(c.count) + " elements from " +
           std::to_string(c.first);
  }
  static float element_at(const void* values, DataType type, std::size_t i) {
    if (type == DataType::kFloat32) return static_cast<const float*>(values)[i];
    const std::uint16_t half = static_cast<const std::uint16_t*>(values)[i];
    return type == DataType::kBfloat16 ? bfloat16_to_float(half) : float16_to_float(half);
  }
  static kernel_test::PlainRun plain_run(const RunCase& c, const void* gradient, DataType type) {
    kernel_test::PlainRun run{c.shape, c.first, c.place, {}};
    for (std::size_t i = 0; i < c.count; ++i) run.g.push_back(element_at(gradient, type, i) * c.factor);
    return run;
  }
  // The sums of the leaves of values that begin at element `place` of the unit.
  static void plain_leaves(const std::vector<float>& values, std::uint64_t place, double* leaves) {
    for (std::size_t i = 0; i < values.size();) {
      const std::size_t end = std::min(values.size(), ((place + i) / kLeafCount + 1) * kLeafCount - place);
      *leaves++ = kernel_test::plain_squares({values.begin() + static_cast<std::ptrdiff_t>(i),
                                              values.begin() + static_cast<std::ptrdiff_t>(end)},
                                             place + i);
      i = end;
    }
  }

  void factor_sums(RunCase run, DataType type, bool is_mild) {
    if (is_mild) run.factor = 0.5f;
    for (const bool by_row : {true, false}) {
      if (by_row && !run.shape.has_rows) continue;
      const unsigned bands = run.shape.rows > 1024 ? 8 : run.shape.rows > 256 ? 4 : 1;
      KernelCase& c = add_case(by_row ? "forebay_factor_rows" : "forebay_factor_columns", describe(run), 2);
      Array gradient = values_of(type, run.count, 1, is_mild);
      // Chains that tell their order: the squares of the first two values are near the middle of two fp32
      // values, and each of the others vanishes beside them.
      for (std::size_t i = 0; i < run.count && is_mild && type == DataType::kFloat32; ++i) {
        const std::uint64_t element = run.first + i, row = element / run.shape.columns % run.shape.rows;
        const std::uint64_t number = by_row ? element % run.shape.columns / 16 : row;
        const std::uint64_t column = element % run.shape.columns;
        if (!by_row && column % 2 != 0) continue;
        const float value = by_row && column % 16 != 0 ? 0.0f
                            : number == 0              ? 2.0f
                            : number == 1              ? 0x1p-11f
                                                       : 0x1p-26f;
        gradient.values[i] = std::bit_cast<std::uint32_t>(value);
      }
      c.arrays = {read_only(std::move(gradient)), hard(DataType::kFloat32, run.shape.factor_count(), 0)};
      c.argument = [=](const Pointers& p) {
        return bytes_of_struct(
            cuda_kernels::FactorSumsLaunch{{{run_of(run, p, type), p.at(1)}, nullptr}, bands});
      };
      c.define = [=](const Pointers& p) {
        const std::vector<float> sums = kernel_test::plain_factor_sums(plain_run(run, p.at(0), type));
        const std::size_t rows = run.shape.row_count();
        std::copy(sums.begin() + static_cast<std::ptrdiff_t>(by_row ? 0 : rows),
                  by_row ? sums.begin() + static_cast<std::ptrdiff_t>(rows) : sums.end(),
                  p.at(1) + (by_row ? 0 : rows));
      };
    }
  }

  void update_leaves(const RunCase& run, DataType type, bool is_mild) {
    KernelCase& c = add_case("forebay_leaves_of_updates", describe(run), 2);
    Array leaves = squares_array(Element::kFloat64, cuda_kernels::leaves_of(run.place, run.count));
    leaves.any_nan = true;
    const auto factors = [&](std::size_t count) {
      return read_only(is_mild ? near_values(DataType::kFloat32, count)
                               : squares_array(Element::kFloat32, count));
    };
    c.arrays = {read_only(is_mild ? near_values(type, run.count) : hard(type, run.count, 1)),
                factors(run.shape.factor_count()), factors(run.shape.batches), leaves};
    c.argument = [=](const Pointers& p) {
      return bytes_of_struct(cuda_kernels::FactoredLeavesLaunch{run_of(run, p, type), p.at(1), p.at(2),
                                                                p.at<double>(3), nullptr});
    };
    c.define = [=](const Pointers& p) {
      kernel_test::PlainFactors factors;
      factors.factors.assign(p.at(1), p.at(1) + run.shape.factor_count());
      factors.row_means.assign(p.at(2), p.at(2) + run.shape.batches);
      plain_leaves(kernel_test::plain_updates(plain_run(run, p.at(0), type), factors), run.place,
                   p.at<double>(3));
    };
  }

  void parameter_leaves(const RunCase& run, DataType type, bool is_mild) {
    KernelCase& c = add_case("forebay_leaves_of_parameters", describe(run), 2);
    Array leaves = squares_array(Element::kFloat64, cuda_kernels::leaves_of(run.place, run.count));
    leaves.any_nan = true;
    c.arrays = {read_only(values_of(type, run.count, 1, is_mild)), leaves};
    c.argument = [=](const Pointers& p) {
      FactoredRun masters;
      masters.gradient = p.at(0), masters.type = type, masters.count = run.count, masters.place = run.place;
      return bytes_of_struct(
          cuda_kernels::FactoredLeavesLaunch{masters, nullptr, nullptr, p.at<double>(1), nullptr});
    };
    c.define = [=](const Pointers& p) {
      std::vector<float> masters;
      for (std::size_t i = 0; i < run.count; ++i) masters.push_back(element_at(p.at(0), type, i));
      plain_leaves(masters, run.place, p.at<double>(1));
    };
  }

  // New factors, and the means of the rows from others.
  void factor_renewal(const FactoredShape& shape, int n) {
    const bool applied = n % 3 != 2;
    for (const bool is_mean : {false, true}) {
      if (is_mean && !shape.has_rows) continue;
      KernelCase& c = add_case(is_mean ? "forebay_factor_means" : "forebay_factor_renewal",
                               std::to_string(shape.factor_count()) + " factors", 2);
      Array means = squares_array(Element::kFloat32, shape.batches);
      means.any_nan = true;
      c.arrays = {read_only(squares_array(Element::kFloat32, shape.factor_count())),
                  squares_array(Element::kFloat32, shape.factor_count()), means, state_array({}, applied)};
      if (!is_mean) c.arrays[1] = hard(DataType::kFloat32, shape.factor_count(), 0);
      c.argument = [=](const Pointers& p) {
        return bytes_of_struct(
            Controlled<FactorRenewalArguments>{{shape, 0.4f, p.at(0), p.at(1), p.at(2)}, p.at<StepState>(3)});
      };
      c.define = [=](const Pointers& p) {
        if (!applied) return;
        const std::vector<float> before(p.at(0), p.at(0) + shape.factor_count());
        const std::vector<float> sums(p.at(1), p.at(1) + shape.factor_count());
        if (!is_mean) {
          const std::vector<float> factors = kernel_test::plain_renewal(shape, 0.4f, before, sums).factors;
          std::copy(factors.begin(), factors.end(), p.at(1));
          return;
        }
        for (std::size_t matrix = 0; matrix < shape.batches; ++matrix) {
          double lanes[definitions::kNormLanes] = {};
          for (std::size_t i = 0; i < shape.rows; ++i)
            lanes[i % definitions::kNormLanes] += static_cast<double>(sums[matrix * shape.rows + i]);
          p.at(2)[matrix] = definitions::row_mean(lanes, shape.rows);
        }
      };
    }
  }

  void keep_factors(std::size_t count, int n) {
    const bool controlled = n % 2 == 0, applied = n % 4 != 0;
    KernelCase& c = add_case("forebay_keep_factors", std::to_string(count) + " factors", 2);
    c.arrays = {read_only(hard(DataType::kFloat32, count, 0)), hard(DataType::kFloat32, count, 3),
                state_array({}, applied)};
    c.argument = [=](const Pointers& p) {
      return bytes_of_struct(Controlled<KeepFactorsArguments>{{p.at(0), p.at(1), count},
                                                              controlled ? p.at<StepState>(2) : nullptr});
    };
    c.define = [=](const Pointers& p) {
      if (!controlled || applied) std::copy_n(p.at(0), count, p.at(1));
    };
  }

  void chain(std::size_t count) {
    KernelCase& c = add_case("forebay_chain", std::to_string(count) + " values", 1);
    c.arrays = {read_only(squares_array(Element::kFloat64, count)), squares_array(Element::kFloat64, 1)};
    c.argument = [=](const Pointers& p) {
      return bytes_of_struct(cuda_kernels::ChainLaunch{p.at<double>(0), count, p.at<double>(1), nullptr});
    };
    c.define = [=](const Pointers& p) {
      double sum = 0.0;
      for (std::size_t i = 0; i < count; ++i) sum = sum + p.at<double>(0)[i];
      *p.at<double>(1) = sum;
    };
  }

  // Parameters that are small and large, rates above and below the falling one, updates that are clipped.
  void adafactor_step(std::uint64_t ranks, int n) {
    const bool controlled = n % 2 == 1, applied = ranks != 127;
    const std::uint64_t count = n < 2 ? 7 : std::uint64_t{1} << 40, stride = n < 2 ? 2 : 5;
    const double lr = n % 2 == 0 ? 0.01 : 3.0;
    KernelCase& c = add_case("forebay_adafactor_step", std::to_string(ranks) + " ranks", 1);
    StepState state;
    state.applied_steps = 12;
    c.arrays = {read_only(squares_array(Element::kFloat64, ranks * stride)), hard(DataType::kFloat32, 1, 0),
                state_array(state, applied)};
    c.argument = [=](const Pointers& p) {
      return bytes_of_struct(
          Controlled<AdafactorStepArguments>{{p.at<double>(0), stride, ranks, lr, count, 7, p.at(1)},
                                             controlled ? p.at<StepState>(2) : nullptr});
    };
    c.define = [=](const Pointers& p) {
      if (controlled && !applied) return;
      double sums[2] = {};
      for (std::uint64_t rank = 0; rank < ranks; ++rank) {
        sums[0] = sums[0] + p.at<double>(0)[rank * stride];
        sums[1] = sums[1] + p.at<double>(0)[rank * stride + 1];
      }
      *p.at(1) = kernel_test::plain_step(lr, controlled ? 12 : 7, count, sums[0], sums[1]);
    };
  }

  void factored_update(const RunCase& run, int n) {
    const DataType type = kTypes[n % 3], parameter = kTypes[n / 3 % 3];
    const bool is_half = n % 4 == 1, has_parameter = !is_half && n % 4 != 2, has_average = n % 5 < 2;
    const std::size_t offset = n % 4 == 3 ? 3 : 0;
    const bool controlled = n % 2 == 1, applied = n % 6 != 5;
    KernelCase& c = add_case("forebay_factored_update", describe(run), 2);
    StepState state;
    state.factor = 0.021f, state.applied_steps = 12;
    c.arrays = {read_only(hard(type, run.count, offset)),
                read_only(squares_array(Element::kFloat32, run.shape.factor_count())),
                read_only(squares_array(Element::kFloat32, run.shape.batches)),
                hard(is_half ? DataType::kBfloat16 : DataType::kFloat32, run.count, offset),
                hard(DataType::kFloat32, run.count, offset),
                hard(parameter, has_parameter ? run.count : 0, offset),
                state_array(state, applied),
                read_only(squares_array(Element::kFloat32, 1))};
    const auto arguments = [=](const Pointers& p) {
      FactoredUpdateArguments a;
      a.run = run_of(run, p, type);
      a.factors = p.at(1), a.row_means = p.at(2);
      a.decay = -1e-3f, a.step = -1e-2f, a.step_number = 3;
      if (n % 2 == 0) a.computed_step = p.at(7);
      if (is_half) {
        a.half = {p.at<std::uint16_t>(3), 0xFFFFFF00u, 0xFEDCBA9876543210u};
      } else {
        a.master = p.at(3);
      }
      if (has_average) a.average = p.at(4), a.average_weight = 0.125f;
      if (has_parameter) a.parameter = p.at(5), a.parameter_type = parameter;
      return a;
    };
    c.argument = [=](const Pointers& p) {
      return bytes_of_struct(cuda_kernels::RunLaunch<FactoredUpdateArguments>{
          {arguments(p), controlled ? p.at<StepState>(6) : nullptr}, offset == 0});
    };
    c.define = [=](const Pointers& p) {
      FactoredUpdateArguments a = arguments(p);
      if (!definitions::decided(controlled ? p.at<StepState>(6) : nullptr, a)) return;
      forebay::factored_update(a, BlockRunner(1));
    };
  }

  std::mt19937_64 random_;
  std::vector<KernelCase> cases_;
};

}  // namespace

std::vector<KernelCase> forebay_cases(std::uint64_t seed) {
  return Cases(seed).make();
}

std::string forebay_ptx() {
  return ptx::text_of_image(cuda_kernels::kernel_image().data);
}

}  // namespace forebay::ptx_test
