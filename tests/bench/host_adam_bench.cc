// Compares the host's AdamW step with the memory bandwidth, for each format of m and v.
//
//   host_adam_bench [ELEMENTS [ROUNDS [THREADS]]]        default 67108864 15 0 (all processors)
//
// Method: all rows run interleaved, A B C ... A B C ..., after one untimed round; a figure is the median of
// its rounds, a ratio the median of the rounds' ratios, with the least and the greatest. GB/s counts the
// bytes that the formula reads and writes. The limit reads four fp32 arrays and writes three of them in
// place, with the kernel's prefetch and almost no arithmetic. "Of its pattern" is against a loop of the same
// kind that reads and writes the arrays of the row itself.
//
// Target: the fp32 row reaches 0.95 of the limit.
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
using Line = std::uint32_t __attribute__((vector_size(64), aligned(4), may_alias));

struct Streams {
  std::byte *g, *p, *m, *v, *parameter;
};

// The distance of the kernel: kPrefetchBytes of host_moments_simd.cc.
constexpr std::size_t kPrefetchBytes = 512;

void read(const std::byte* address, Line& line) {
  __builtin_prefetch(address + kPrefetchBytes);
  line = *reinterpret_cast<const Line*>(address);
}

void write(std::byte* address, const Line& line) {
  *reinterpret_cast<Line*>(address) = line;
}

// Past the caches, as the kernel writes the parameter.
void write_past(std::byte* address, const Line& line) {
#ifdef __SSE2__
  __m128 parts[4];
  std::memcpy(parts, &line, sizeof parts);
  for (std::size_t i = 0; i < 4; ++i) _mm_stream_ps(reinterpret_cast<float*>(address) + 4 * i, parts[i]);
#else
  write(address, line);
#endif
}

// Bytes per element of the gradient, of m, of v and of the parameter; the master has 4. A turn is 64
// elements, whose loads come before its stores, as in the kernel. Otherwise, with arrays that begin at the
// same offset of a page, each load waits for the preceding store.
template <std::size_t gradient, std::size_t moment, std::size_t parameter>
void stream(const void* context, std::size_t begin, std::size_t end) {
  const auto& a = *static_cast<const Streams*>(context);
  for (std::size_t i = begin; i + 64 <= end; i += 64) {
    Line g[gradient], p[4], m[moment], v[moment];
    for (std::size_t k = 0; k < gradient; ++k) read(a.g + i * gradient + 64 * k, g[k]);
    for (std::size_t k = 0; k < 4; ++k) read(a.p + i * 4 + 64 * k, p[k]);
    for (std::size_t k = 0; k < moment; ++k) read(a.m + i * moment + 64 * k, m[k]);
    for (std::size_t k = 0; k < moment; ++k) read(a.v + i * moment + 64 * k, v[k]);
    for (std::size_t k = 1; k < gradient; ++k) g[0] += g[k];
    for (std::size_t k = 0; k < 4; ++k) p[k] += g[0];
    for (std::size_t k = 0; k < moment; ++k) m[k] += g[0], v[k] += g[0];
    for (std::size_t k = 0; k < 4; ++k) write(a.p + i * 4 + 64 * k, p[k]);
    for (std::size_t k = 0; k < moment; ++k) write(a.m + i * moment + 64 * k, m[k]);
    for (std::size_t k = 0; k < moment; ++k) write(a.v + i * moment + 64 * k, v[k]);
    for (std::size_t k = 0; k < parameter; ++k) write_past(a.parameter + i * parameter + 64 * k, p[k]);
  }
}

struct Row {
  std::string name;
  double bytes_per_element;
  std::function<void()> run;
  std::size_t pattern;  // The row of its pattern.
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

  // Arrays of their own, which the loops fill with any bytes: the time of an update depends on its values.
  const bench::HugePages<std::byte> bytes[5] = {
      bench::HugePages<std::byte>(4 * count), bench::HugePages<std::byte>(4 * count),
      bench::HugePages<std::byte>(4 * count), bench::HugePages<std::byte>(4 * count),
      bench::HugePages<std::byte>(2 * count)};
  const Streams streams = {bytes[0].data(), bytes[1].data(), bytes[2].data(), bytes[3].data(),
                           bytes[4].data()};
  using Body = void (*)(const void*, std::size_t, std::size_t);
  const auto loop = [&](Body body) -> std::function<void()> {
    return [&runner, &streams, body, count] { runner.run(count, 65536, body, &streams); };
  };
  Row rows[] = {
      {"limit: 4 read, 3 written in place", 28, loop(stream<4, 4, 0>), 0},
      {"pattern of fp32 gradient, bf16 parameter", 30, loop(stream<4, 4, 2>), 1},
      {"pattern of bf16 gradient, bf16 parameter", 28, loop(stream<2, 4, 2>), 2},
      {"pattern of the same, bf16 m and v", 20, loop(stream<2, 2, 2>), 3},
      {"pattern of the same, block8 m and v", 16, loop(stream<2, 1, 2>), 4},
      {"adam fp32", 28, adam(fp32), 0},
      {"step: fp32 gradient, bf16 parameter", 30, adam(whole), 1},
      {"step: bf16 gradient, bf16 parameter", 28, adam(half_gradient), 2},
      {"step: the same, bf16 m and v, dithered", 20, adam(half), 3},
      {"step: the same, bf16 m and v, nearest", 20, adam(nearest(half)), 3},
      {"step: the same, block8 m and v, dithered", 16, adam(codes), 4},
      {"step: the same, block8 m and v, nearest", 16, adam(nearest(codes)), 4},
  };
  for (int round = -1; round < round_count; ++round) {
    for (Row& row : rows) {
      const auto start = std::chrono::steady_clock::now();
      row.run();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      if (round >= 0) row.seconds.push_back(elapsed.count());
    }
  }

  std::printf("%-42s %8s %9s %7s %9s  %-18s %14s\n", "", "ms", "Mparam/s", "GB/s", "of limit",
              "[least..greatest]", "of its pattern");
  double fp32_ratio = 0.0;
  for (const Row& row : rows) {
    const auto ratios_to = [&](const Row& other) {
      std::vector<double> ratios;
      for (int round = 0; round < round_count; ++round) {
        ratios.push_back(row.bytes_per_element / row.seconds[round] /
                         (other.bytes_per_element / other.seconds[round]));
      }
      return ratios;
    };
    const std::vector<double> ratios = ratios_to(rows[0]);
    const double seconds = median(row.seconds), ratio = median(ratios);
    if (row.name == "adam fp32") fp32_ratio = ratio;
    std::printf("%-42s %8.2f %9.0f %7.1f %9.3f  [%.3f..%.3f] %18.3f\n", row.name.c_str(), seconds * 1e3,
                static_cast<double>(count) / seconds * 1e-6,
                row.bytes_per_element * static_cast<double>(count) / seconds * 1e-9, ratio,
                *std::min_element(ratios.begin(), ratios.end()),
                *std::max_element(ratios.begin(), ratios.end()), median(ratios_to(rows[row.pattern])));
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
