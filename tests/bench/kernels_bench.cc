// Compares the kernels with the memory bandwidth: each beside a streaming loop of the same run.
//
//   kernels_bench [ELEMENTS [ROUNDS [THREADS]]]        default 33554432 21 0 (all processors)
//
// Method: all rows run interleaved, A B C ... A B C ..., after one untimed round; a figure is the median of
// its rounds, a ratio the median of the rounds' ratios. GB/s counts the bytes that the formula reads and
// writes.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "forebay/conversions.h"
#include "kernels/host_kernels.h"
#include "kernels/host_module.h"

namespace forebay {
namespace {

using Vector = float __attribute__((vector_size(16), aligned(4), may_alias));

struct Arrays {
  float *g, *p, *m, *v;
  std::uint16_t *narrow, *narrow_target;
};

// The limit: reads four arrays and writes three in place, with the kernel's prefetch and almost no
// arithmetic.
void stream_four_three(const void* context, std::size_t begin, std::size_t end) {
  const auto& a = *static_cast<const Arrays*>(context);
  for (std::size_t i = begin; i + 16 <= end; i += 16) {
    for (const float* array : {a.g, a.p, a.m, a.v}) __builtin_prefetch(array + i + 512);
    for (std::size_t j = i; j < i + 16; j += 4) {
      const Vector g = *reinterpret_cast<const Vector*>(a.g + j);
      *reinterpret_cast<Vector*>(a.p + j) += g;
      *reinterpret_cast<Vector*>(a.m + j) += g;
      *reinterpret_cast<Vector*>(a.v + j) += g;
    }
  }
}

struct Row {
  const char* name;
  double bytes_per_element;
  std::function<void()> run;
  std::vector<double> seconds = {};
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

template <typename Arguments,
          void (*host_kernels::RangeKernels::*Member)(const Arguments&, std::size_t, std::size_t)>
std::function<void()> elementwise(const HostContext& context, const Arguments& arguments) {
  return [&context, arguments] {
    const HostLaunch<Arguments> launch = {&context, arguments};
    context.runner.run(
        arguments.count, 65536,
        [](const void* opaque, std::size_t begin, std::size_t end) {
          const auto& l = *static_cast<const HostLaunch<Arguments>*>(opaque);
          (l.context->kernels.*Member)(l.arguments, begin, end);
        },
        &launch);
  };
}

int run(std::size_t count, int round_count, int thread_count) {
  using host_kernels::RangeKernels;
  constexpr DataType f32 = DataType::kFloat32, bf16 = DataType::kBfloat16, f16 = DataType::kFloat16;
  std::vector<float> g(count, 0.01f), p(count, 1.0f), m(count, 0.0f), v(count, 1.0f);
  std::vector<std::uint16_t> narrow(count, float_to_bfloat16(0.01f)), narrow_target(count, 0);
  std::vector<double> scratch(count / kLeafCount);
  double norm = 0.0;
  const Arrays arrays = {g.data(), p.data(), m.data(), v.data(), narrow.data(), narrow_target.data()};
  const HostContext context({.thread_count = thread_count});
  std::printf("%zu elements, %d rounds, %s, %d threads\n", count, round_count, context.kernels.target,
              context.runner.thread_count());

  AdamWArguments adamw = {};
  adamw.gradient = g.data(), adamw.master = p.data(), adamw.m = m.data(), adamw.v = v.data();
  adamw.count = count;
  adamw.gradient_type = adamw.parameter_type = f32;
  adamw.factor = 1.0f, adamw.lr = 1e-4f, adamw.weight_decay = 0.1f, adamw.beta1 = 0.9f, adamw.beta2 = 0.999f;
  adamw.eps = 1e-8f, adamw.a1 = 0.1f, adamw.a2 = 0.001f, adamw.c1 = 0.9f, adamw.s2 = 0.9f;
  AdamWArguments mixed = adamw;
  mixed.parameter = narrow_target.data(), mixed.parameter_type = bf16;
  AdamWArguments narrow_gradient = mixed;
  narrow_gradient.gradient = narrow.data(), narrow_gradient.gradient_type = bf16;

  const NormArguments norm_f32 = {g.data(), scratch.data(), &norm, count / kLeafCount * kLeafCount, f32};
  NormArguments norm_bf16 = norm_f32;
  norm_bf16.source = narrow.data(), norm_bf16.type = bf16;
  const auto leaves = [&](const NormArguments& arguments) -> std::function<void()> {
    return [&context, arguments] {
      const HostLaunch<NormArguments> launch = {&context, arguments};
      context.runner.run(
          arguments.count / kLeafCount, 65536 / kLeafCount,
          [](const void* opaque, std::size_t begin, std::size_t end) {
            const auto& l = *static_cast<const HostLaunch<NormArguments>*>(opaque);
            l.context->kernels.norm_leaves(l.arguments, begin, end);
          },
          &launch);
      pairwise_sum(arguments.scratch, arguments.count / kLeafCount);
    };
  };
  // Four ranks: the own slice and three received ones, each a quarter of the elements.
  const std::size_t slice = count / 4;
  const AccumulateArguments sum4 = {narrow.data(),
                                    reinterpret_cast<const std::byte*>(narrow.data()),
                                    slice * 2,
                                    p.data(),
                                    slice,
                                    0,
                                    4,
                                    bf16,
                                    false};

  Row rows[] = {
      {"limit: 4 read, 3 written in place", 28,
       [&] { context.runner.run(count, 65536, stream_four_three, &arrays); }},
      {"adamw fp32", 28, elementwise<AdamWArguments, &RangeKernels::adamw>(context, adamw)},
      {"adamw fp32 gradient, bf16 parameter", 30,
       elementwise<AdamWArguments, &RangeKernels::adamw>(context, mixed)},
      {"adamw bf16 gradient, bf16 parameter", 28,
       elementwise<AdamWArguments, &RangeKernels::adamw>(context, narrow_gradient)},
      {"cast fp32 to bf16", 6,
       elementwise<CastArguments, &RangeKernels::cast>(context,
                                                       {g.data(), narrow_target.data(), count, f32, bf16})},
      {"cast fp32 to fp16", 6,
       elementwise<CastArguments, &RangeKernels::cast>(context,
                                                       {g.data(), narrow_target.data(), count, f32, f16})},
      {"cast bf16 to fp32", 6,
       elementwise<CastArguments, &RangeKernels::cast>(context, {narrow.data(), g.data(), count, bf16, f32})},
      {"scale fp32 in place", 8,
       elementwise<ScaleArguments, &RangeKernels::scale>(context,
                                                         {g.data(), g.data(), count, 1.0f, f32, f32})},
      {"add bf16", 6,
       elementwise<AddArguments, &RangeKernels::add>(context,
                                                     {narrow.data(), narrow_target.data(), count, bf16})},
      {"accumulate 4 ranks of bf16 (per slice element: 16 B)", 4,
       elementwise<AccumulateArguments, &RangeKernels::accumulate>(context, sum4)},
      {"norm fp32", 4, leaves(norm_f32)},
      {"norm bf16", 2, leaves(norm_bf16)},
  };
  for (int round = -1; round < round_count; ++round) {
    for (Row& row : rows) {
      const auto start = std::chrono::steady_clock::now();
      row.run();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      if (round >= 0) row.seconds.push_back(elapsed.count());
    }
  }

  std::printf("%-52s %8s %8s %8s\n", "", "ms", "GB/s", "of limit");
  for (const Row& row : rows) {
    std::vector<double> ratios;
    for (int round = 0; round < round_count; ++round) {
      ratios.push_back(row.bytes_per_element / row.seconds[round] /
                       (rows[0].bytes_per_element / rows[0].seconds[round]));
    }
    const double seconds = median(row.seconds);
    std::printf("%-52s %8.2f %8.1f %8.3f\n", row.name, seconds * 1e3,
                row.bytes_per_element * static_cast<double>(count) / seconds * 1e-9, median(ratios));
  }
  return 0;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  const std::size_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::size_t{1} << 25;
  const int round_count = argc > 2 ? std::atoi(argv[2]) : 21;
  const int thread_count = argc > 3 ? std::atoi(argv[3]) : 0;
  if (count < 65536 || round_count < 1 || thread_count < 0) {
    std::fprintf(stderr, "usage: %s [ELEMENTS (at least 65536) [ROUNDS [THREADS]]]\n", argv[0]);
    return 2;
  }
  return forebay::run(count, round_count, thread_count);
}
