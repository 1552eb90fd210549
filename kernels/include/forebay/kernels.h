// Kernels: the arithmetic of training, launched on a Backend's streams.
//
// Each kernel has one scalar definition (kernels/definitions.h) that the SIMD bodies, their tails and the
// CUDA kernels follow operation by operation, so the result is the same bit for bit on every instruction set,
// number of threads and device. Arithmetic is IEEE round-to-nearest-even in fp32 unless said otherwise, every
// fused multiply-add is written out, and subnormals are kept.
//
// Pointers are device memory of the backend given at creation. All calls queue on `stream` and return at
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "forebay/adafactor.h"
#include "forebay/backend.h"
#include "forebay/data_type.h"
#include "forebay/moments.h"
#include "forebay/muon.h"
#include "forebay/optimizer.h"

namespace forebay {

// Elements in one leaf of the gradient norm, and the granule of a shard.
inline constexpr std::size_t kLeafCount = 512;

// Leaves that `count` neighbouring elements touch, at most.
constexpr std::uint64_t leaf_room(std::uint64_t count) {
  return count / kLeafCount + 2;
}

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

// target = target + source, both of `type`, added in fp32 and rounded to `type`. For accumulation in the
// gradient's type.
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

// One update of `count` elements by the rule of `optimizer` (optimizer.h). `parameter`, unless null, gets p
// rounded to parameter_type.
struct AdamWArguments {
  const void* gradient;
  float* master;
  float* m;
  float* v;         // Null for an optimizer without a second moment.
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
  Optimizer optimizer = Optimizer::kAdamW;
};

// The same update of states that are kept in fewer bytes.
struct KeptUpdateArguments {
  AdamWArguments update;  // Its m and v are not read, nor its master where `half` has elements.
  Moments moments;
  MomentRounding rounding = MomentRounding::kDithered;  // For formats narrower than fp32, and for `half`.
  std::uint64_t step =
      0;  // The applied step's number, for kDithered: another one each step, the same on all ranks.
  HalfMaster half;
  // An exponential moving average of the master as it is kept: average = fma(weight, master - average,
  // average). Null: none.
  float* average = nullptr;
  float average_weight = 0.0f;
};

// Every element = `value`, rounded to `type`.
struct FillArguments {
  void* target;
  std::size_t count;
  float value;
  DataType type;
};

// --- A step that the host does not wait for ---
//
// Whether a step is applied, its clipping factor, the number of applied steps and the loss scale follow from
// the gradient norm, which only the device knows. So they are on the device, in one StepState, and the host
// queues whole steps ahead. Usage:
//
//   once     allocate a StepState and a table of BiasCorrections on the device; copy in a StepState (a fresh
//            one, or the saved counts and loss scale) and the table that bias_corrections() gives.
//   a step   norm() of each unit's slice into this rank's record; the ranks exchange their records on the
//            device; step_control(); adamw_controlled() for every unit, with the learning rate of this
//            attempted step; copy the StepState to pinned host memory and record an event.
//   later    when that event is reached, the host reads the outcome of the step.
//
// The table has to hold every count that can be in flight. If the host last read `applied` applied steps and
// has queued n attempted steps since, the next one has a number between applied + 1 and applied + 1 + n. A
// table may be replaced by a copy on the same stream, at any time. A step with a number outside the table is
// not applied (kNoCorrection); it never uses a wrong correction.

// The bias corrections of one applied step t, computed in double: c1 = 1 - beta1^t, s2 = sqrt(1 - beta2^t).
struct BiasCorrection {
  float c1;
  float s2;
};

// The decision of step_control() about the last attempted step.
enum class StepOutcome : std::uint32_t {
  kNone,     // There was no step yet.
  kApplied,  // adamw_controlled() updates.
  kSkipped,  // The norm was not finite: nothing changes but the loss scale.
  // The table did not hold the step's number, a defect of the caller. Only attempted_steps changes.
  kNoCorrection,
};

// Written by the host before the first step; afterwards by step_control() alone.
struct StepState {
  std::uint64_t attempted_steps = 0;
  std::uint64_t applied_steps = 0;
  double loss_scale = 1.0;  // For the next step.
  // The last attempted step.
  double used_loss_scale = 1.0;
  double grad_norm = 0.0;  // Global, unscaled, before clipping; not a number when skipped.
  float factor = 0.0f;     // The remaining three are meaningful when it was applied.
  float c1 = 0.0f;
  float s2 = 0.0f;
  StepOutcome outcome = StepOutcome::kNone;
  std::int32_t growth_counter = 0;  // Applied steps since the loss scale last changed.
};

// Decides about the step, in double:
//   norm = sqrt(sum of squares) / loss_scale; skipped when it is not finite
//   factor = fp32((clip > 0 and norm > clip ? clip / norm : 1) / loss_scale)
//   applied_steps + 1 is the step's number t; c1 and s2 are the table's for it
//   dynamic loss scale: times 2 after `growth_interval` applied steps in a row, half (at least `minimum`)
//   after a skipped one
// The sum of squares is adjacent pairs over a unit's slices in rank order, then over units (pairwise_sum).
// Order: on one stream, after `squares`, `used` and the table are written and before adamw_controlled().
struct StepControlArguments {
  StepState* state;
  // The result of norm() for slice r of unit u is squares[r * rank_stride + u]; 0 for a unit without
  // trainable elements.
  const double* squares;
  // Not 0 where rank r used unit u in this step, laid out as `squares`. Null: every unit is used.
  const double* used;
  std::uint32_t* unit_used;  // Gets, by unit, whether some rank used it; null when `used` is.
  double* scratch;           // rank_count * unit_count doubles.
  std::size_t rank_stride;   // Doubles from one rank's record to the next; at least unit_count.
  std::size_t unit_count;
  int rank_count;
  double clip;  // Largest gradient norm; 0: no clipping.
  const BiasCorrection* corrections;
  std::uint64_t first_step;  // corrections[i] belongs to applied step first_step + i, which starts from 1.
  std::size_t correction_count;
  bool dynamic_loss_scale;  // False: the loss scale and its counter stay as they are.
  std::int32_t growth_interval;
  double minimum_loss_scale;
};

// AdamW with the decision of step_control(). In `update` the learning rate is that of the attempted step; its
// factor, c1 and s2 are not read. Unless the step is applied to this unit, only `state` and `used` are read.
// Cost: one pass of 24 bytes per element, plus gradient and parameter.
struct ControlledAdamWArguments {
  AdamWArguments update;
  const StepState* state;
  const std::uint32_t* used;  // The unit's entry of unit_used; null when every unit is used.
};

// The same for states that are kept in fewer bytes. The step's number is the state's, too. Without a state
// the update has the factor, the corrections and the number that are given.
struct ControlledKeptUpdateArguments {
  KeptUpdateArguments kept;
  const StepState* state;
  const std::uint32_t* used;
};

// A part of an Adafactor or Muon step (adafactor.h, muon.h) with the decision of step_control(): the
// gradient's factor and the number of the step are the state's. Unless the step is applied, nothing is moved,
// and results that are not kept between steps have any values. Without a state factor and number are those
// that are given.
template <typename Arguments>
struct Controlled {
  Arguments part;
  const StepState* state;
};

// table[i] = the bias corrections of applied step first_step + i, for the host to upload.
void bias_corrections(double beta1, double beta2, std::uint64_t first_step, BiasCorrection* table,
                      std::size_t count) noexcept;

struct KernelOptions {
  int thread_count = 0;  // Host backend: threads one kernel may use; 0: as many as the machine has. The
                         // result is the same bit for bit.
};

class Kernels {
 public:
  // Loads the kernels onto `backend`, which must outlive this object; this object must outlive the work
  // queued through it.
  // Errors: kUnsupported for a cuda backend when forebay was built without nvcc.
  static Result<std::unique_ptr<Kernels>> create(Backend& backend, const KernelOptions& options = {});
  virtual ~Kernels() = default;

  virtual Status cast(const CastArguments& arguments, Stream stream) = 0;
  virtual Status accumulate(const AccumulateArguments& arguments, Stream stream) = 0;
  virtual Status scale(const ScaleArguments& arguments, Stream stream) = 0;
  virtual Status add(const AddArguments& arguments, Stream stream) = 0;
  virtual Status norm(const NormArguments& arguments, Stream stream) = 0;
  virtual Status adamw(const AdamWArguments& arguments, Stream stream) = 0;
  virtual Status fill(const FillArguments& arguments, Stream stream) = 0;
  virtual Status step_control(const StepControlArguments& arguments, Stream stream) = 0;
  virtual Status adamw_controlled(const ControlledAdamWArguments& arguments, Stream stream) = 0;
  virtual Status update_kept(const ControlledKeptUpdateArguments& arguments, Stream stream) = 0;
  virtual Status muon_momentum(const Controlled<MuonMomentumArguments>& arguments, Stream stream) = 0;
  virtual Status orthogonalise(const Controlled<OrthogonaliseArguments>& arguments, Stream stream) = 0;
  virtual Status muon_update(const Controlled<MuonUpdateArguments>& arguments, Stream stream) = 0;
  virtual Status factor_sums(const Controlled<FactorSumsArguments>& arguments, Stream stream) = 0;
  virtual Status renew_factors(const Controlled<FactorRenewalArguments>& arguments, Stream stream) = 0;
  virtual Status update_squares(const Controlled<UpdateSquaresArguments>& arguments, Stream stream) = 0;
  virtual Status parameter_squares(const Controlled<ParameterSquaresArguments>& arguments, Stream stream) = 0;
  virtual Status adafactor_step(const Controlled<AdafactorStepArguments>& arguments, Stream stream) = 0;
  virtual Status factored_update(const Controlled<FactoredUpdateArguments>& arguments, Stream stream) = 0;
  virtual Status keep_factors(const Controlled<KeepFactorsArguments>& arguments, Stream stream) = 0;

  // The implementation, for reports: "host AVX3_ZEN4, 2 threads", "cuda:0 NVIDIA H200, 132 multiprocessors".
  virtual const char* description() const noexcept = 0;
};

// The same tree as NormArguments' second half, for host values: adjacent pairs, level by level, an odd one
// passing up. Used over the ranks' slices and then over units. Destroys `values`.
double pairwise_sum(double* values, std::size_t count) noexcept;

}  // namespace forebay
