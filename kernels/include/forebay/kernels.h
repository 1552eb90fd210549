// Kernels: the arithmetic of training, launched on a Backend's streams.
//
// Each kernel has one scalar definition (kernels/definitions.h) that the SIMD bodies, their tails and the
// CUDA kernels follow operation by operation, so the bits do not depend on the instruction set, the number of
// threads or the device. All arithmetic is IEEE round-to-nearest-even in fp32 unless said otherwise, every
// fused multiply-add is written out, and subnormals are kept.
//
// Pointers are device memory of the backend given at creation. All calls queue on `stream` and return at
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "forebay/backend.h"
#include "forebay/data_type.h"

namespace forebay {

// Elements in one leaf of the gradient norm, and the granule of a shard.
inline constexpr std::size_t kLeafCount = 512;

struct CastArguments {
  const void* source;
  void* target;  // May equal source only if the types are equal.
  std::size_t count;
  DataType source_type;
  DataType target_type;
};

// sum = source(0); sum = sum + source(1); ... in rank order, in fp32; then target = first ? sum : target +
// sum. source(r) is `own` for r == rank, otherwise `received + r * received_stride_bytes`.
struct AccumulateArguments {
  const void* own;
  const std::byte* received;
  std::size_t received_stride_bytes;
  float* target;
  std::size_t count;
  int rank;
  int rank_count;
  DataType type;
  bool first;
};

// target = round(source * factor): one fp32 product, rounded to `round_type`, stored as `target_type`.
// target_type is round_type or kFloat32 (the rounded value widened again, exactly). In place when target ==
// source and target_type is kFloat32.
struct ScaleArguments {
  const float* source;
  void* target;
  std::size_t count;
  float factor;
  DataType round_type;
  DataType target_type;
};

// target = target + source, both of `type`, added in fp32 and rounded to `type`. What `--accumulate local`
// does.
struct AddArguments {
  const void* source;
  void* target;
  std::size_t count;
  DataType type;
};

// The sum of squares of `count` elements (a multiple of kLeafCount) as a fixed tree. A leaf is 512 elements,
// each widened to double, squared, and summed in 16 lanes (element i goes to lane i mod 16, ascending), the
// lanes folded 8, 4, 2, 1 (lane j += lane j + 8, then + 4, ...). Leaves are then added in adjacent pairs,
// level by level, an odd one passing up. `scratch` holds count / 512 doubles. `result` gets one double; it is
// not finite exactly when some element is not, so it is the overflow check too. count 0 gives 0.
struct NormArguments {
  const void* source;
  double* scratch;
  double* result;
  std::size_t count;
  DataType type;
};

// One AdamW update of `count` elements. In this order and no other, all fp32:
//   g = float(gradient) * factor
//   p = fma(-(lr * weight_decay), p, p)
//   m = fma(beta1, m, a1 * g)
//   v = fma(beta2, v, a2 * (g * g))
//   p = fma(-(lr / c1), m / (sqrt(v) / s2 + eps), p)
// and `parameter`, unless null, gets p rounded to parameter_type.
// Source: Loshchilov and Hutter, arXiv 1711.05101 (AdamW), with bias corrections c1 and s2 given by the
// caller.
struct AdamWArguments {
  const void* gradient;
  float* master;
  float* m;
  float* v;
  void* parameter;  // Null when the master is the parameter (fp32).
  std::size_t count;
  DataType gradient_type;
  DataType parameter_type;
  float factor;  // min(1, clip / norm) / loss scale
  float lr, weight_decay, beta1, beta2, eps;
  float a1;  // 1 - beta1, from double
  float a2;  // 1 - beta2, from double
  float c1;  // 1 - beta1^t, from double
  float s2;  // sqrt(1 - beta2^t), from double
};

struct KernelOptions {
  int thread_count =
      0;  // Host backend: threads one kernel may use; 0: as many as the machine has. Never changes bits.
};

class Kernels {
 public:
  // Loads the kernels onto `backend`, which must outlive this object; this object must outlive the work
  // queued through it.
  static Result<std::unique_ptr<Kernels>> create(Backend& backend, const KernelOptions& options = {});
  virtual ~Kernels() = default;

  virtual Status cast(const CastArguments& arguments, Stream stream) = 0;
  virtual Status accumulate(const AccumulateArguments& arguments, Stream stream) = 0;
  virtual Status scale(const ScaleArguments& arguments, Stream stream) = 0;
  virtual Status add(const AddArguments& arguments, Stream stream) = 0;
  virtual Status norm(const NormArguments& arguments, Stream stream) = 0;
  virtual Status adamw(const AdamWArguments& arguments, Stream stream) = 0;

  // What runs: "host AVX3_ZEN4, 2 threads": for reports.
  virtual const char* description() const noexcept = 0;
};

// The same tree as NormArguments' second half, for host values: adjacent pairs, level by level, an odd one
// passing up. Used over the ranks' slices and then over units. Destroys `values`.
double pairwise_sum(double* values, std::size_t count) noexcept;

}  // namespace forebay
