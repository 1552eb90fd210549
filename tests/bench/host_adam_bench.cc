// Compares the host's AdamW step with the memory bandwidth, for each format of m and v.
//
//   host_adam_bench [ELEMENTS [ROUNDS [THREADS]]]        default 67108864 15 0 (all processors)
//
// Method: all rows run interleaved, A B C ... A B C ..., after one untimed round; a figure is the median of
// its rounds, a ratio the median of the rounds' ratios, with the least and the greatest. GB/s counts the
// bytes that the formula reads and writes. The limit reads four fp32 arrays and writes three of them in
// place, with the kernel's prefetch and almost no arithmetic.
//
// Target: the fp32 row reaches 0.95 of the limit. With 8-bit m and v the time goes into arithmetic, not
// memory.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "forebay/block_runner.h"
#include "forebay/conversions.h"
#include "forebay/host_adam.h"
#include "tests/bench/huge_pages.h"

namespace forebay {
namespace {

constexpr double kBar = 0.95;

// One cache line, in the registers that the compiler has.
using Line = float __attribute__((vector_size(64), aligned(4), may_alias));

struct Streams {
  float *g, *p, *m, *v;
};

// The distance of the kernel: kPrefetchBytes of host_moments_simd.cc.
constexpr std::size_t kPrefetchCount = 64;

// All loads of a line come before its stores, as in the kernel. Otherwise, with arrays that begin at the same
// offset of a page, each load waits for the preceding store.
void stream_four_three(const void* context, std::size_t begin, std::size_t end) {
  const auto& a = *static_cast<const Streams*>(context);
  for (std::size_t i = begin; i + 16 <= end; i += 16) {
    __builtin_prefetch(a.g + i + kPrefetchCount);
    __builtin_prefetch(a.p + i + kPrefetchCount);
    __builtin_prefetch(a.m + i + kPrefetchCount);
    __builtin_prefetch(a.v + i + kPrefetchCount);
    const Line g = *reinterpret_cast<const Line*>(a.g + i);
    const Line p = *reinterpret_cast<const Line*>(a.p + i) + g;
    const Line m = *reinterpret_cast<const Line*>(a.m + i) + g;
    const Line v = *reinterpret_cast<const Line*>(a.v + i) + g;
    *reinterpret_cast<Line*>(a.p + i) = p;
    *reinterpret_cast<Line*>(a.m + i) = m;
    *reinterpret_cast<Line*>(a.v + i) = v;
  }
}

struct Row {
  std::string name;
  double bytes_per_element;
  std::function<void()> run;
  std::vector<double> seconds = {};
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "host_adam_bench: %s\n", status.to_string().c_str());
  std::exit(1);
}

int run(std::size_t count, int round_count, int thread_count) {
  const BlockRunner runner(thread_count);
  const bench::HugePages<float> g(count), p(count), m(count), v(count);
  const bench::HugePages<std::uint16_t> narrow_gradient(count), parameter(count), half_m(count),
      half_v(count);
  const bench::HugePages<std::uint8_t> code_m(count), code_v(count);
  std::vector<std::uint8_t> m_exponents(moment_exponent_bytes(MomentFormat::kBlock8, count)),
      v_exponents = m_exponents;
  std::fill_n(g.data(), count, 0.01f);
  std::fill_n(p.data(), count, 1.0f);
  std::fill_n(v.data(), count, 1.0f);
  std::fill_n(narrow_gradient.data(), count, float_to_bfloat16(0.01f));
  std::printf("%zu elements, %d rounds, %d threads\n", count, round_count, runner.thread_count());

  HostAdamArguments fp32 = {};
  AdamWArguments& update = fp32.update;
  update.gradient = g.data(), update.master = p.data(), update.count = count;
  update.gradient_type = update.parameter_type = DataType::kFloat32;
  update.factor = 0.5f, update.lr = 1e-4f, update.weight_decay = 0.1f;
  update.beta1 = 0.9f, update.beta2 = 0.999f, update.eps = 1e-8f;
  update.a1 = 0.1f, update.a2 = 0.001f, update.c1 = 0.9f, update.s2 = 0.9f;
  fp32.moments = {MomentFormat::kFloat32, m.data(), v.data(), nullptr, nullptr};
  HostAdamArguments whole = fp32;
  whole.update.parameter = parameter.data(), whole.update.parameter_type = DataType::kBfloat16;
  HostAdamArguments half_gradient = whole;
  half_gradient.update.gradient = narrow_gradient.data();
  half_gradient.update.gradient_type = DataType::kBfloat16;
  HostAdamArguments half = half_gradient;
  half.moments = {MomentFormat::kBfloat16, half_m.data(), half_v.data(), nullptr, nullptr};
  HostAdamArguments codes = half_gradient;
  codes.moments = {MomentFormat::kBlock8, code_m.data(), code_v.data(), m_exponents.data(),
                   v_exponents.data()};
  const auto nearest = [](HostAdamArguments a) {
    a.rounding = MomentRounding::kNearest;
    return a;
  };
  std::uint64_t step = 0;
  const auto adam = [&](const HostAdamArguments& arguments) -> std::function<void()> {
    return [&runner, &step, arguments] {
      HostAdamArguments a = arguments;
      a.step = ++step;
      must(host_adam(a, runner));
    };
  };

  const Streams streams = {g.data(), p.data(), m.data(), v.data()};
  Row rows[] = {
      {"limit: 4 read, 3 written in place", 28,
       [&] { runner.run(count, 65536, stream_four_three, &streams); }},
      {"adam fp32", 28, adam(fp32)},
      {"step: fp32 gradient, bf16 parameter", 30, adam(whole)},
      {"step: bf16 gradient, bf16 parameter", 28, adam(half_gradient)},
      {"step: the same, bf16 m and v, dithered", 20, adam(half)},
      {"step: the same, bf16 m and v, nearest", 20, adam(nearest(half))},
      {"step: the same, block8 m and v, dithered", 16, adam(codes)},
      {"step: the same, block8 m and v, nearest", 16, adam(nearest(codes))},
  };
  for (int round = -1; round < round_count; ++round) {
    for (Row& row : rows) {
      const auto start = std::chrono::steady_clock::now();
      row.run();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      if (round >= 0) row.seconds.push_back(elapsed.count());
    }
  }

  std::printf("%-42s %8s %9s %7s %9s  %s\n", "", "ms", "Mparam/s", "GB/s", "of limit", "[least..greatest]");
  double fp32_ratio = 0.0;
  for (const Row& row : rows) {
    std::vector<double> ratios;
    for (int round = 0; round < round_count; ++round) {
      ratios.push_back(row.bytes_per_element / row.seconds[round] /
                       (rows[0].bytes_per_element / rows[0].seconds[round]));
    }
    const double seconds = median(row.seconds), ratio = median(ratios);
    if (&row == &rows[1]) fp32_ratio = ratio;
    std::printf("%-42s %8.2f %9.0f %7.1f %9.3f  [%.3f..%.3f]\n", row.name.c_str(), seconds * 1e3,
                static_cast<double>(count) / seconds * 1e-6,
                row.bytes_per_element * static_cast<double>(count) / seconds * 1e-9, ratio,
                *std::min_element(ratios.begin(), ratios.end()),
                *std::max_element(ratios.begin(), ratios.end()));
  }
  const bool reached = fp32_ratio >= kBar;
  std::printf("adam fp32 at %.3f of the limit, bar %.2f: %s\n", fp32_ratio, kBar,
              reached ? "reached" : "missed");
  return reached ? 0 : 1;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  const std::size_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::size_t{1} << 26;
  const int round_count = argc > 2 ? std::atoi(argv[2]) : 15;
  const int thread_count = argc > 3 ? std::atoi(argv[3]) : 0;
  if (count < 65536 || round_count < 1 || thread_count < 0) {
    std::fprintf(stderr, "usage: %s [ELEMENTS (at least 65536) [ROUNDS [THREADS]]]\n", argv[0]);
    return 2;
  }
  return forebay::run(count, round_count, thread_count);
}
