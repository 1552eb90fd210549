// Gpt: the forward and backward pass of a GPT-2 style model, unit by unit, or one tensor-parallel rank's part
// of it.
//
// It knows nothing of engines, nor of devices: it says in which order the Operations come and on what.
// Whoever drives it hands in, for each unit, where the parameters are and where the gradients go; so the same
// arithmetic runs under a ZeRO engine and in a plain loop. All it keeps (activations, workspaces) is in one
// piece of the device's memory whose size is known from the start.
//
//   gpt.begin(pass); copy to gpt.tokens() and gpt.targets();
//   for each unit: gpt.forward(unit, parameters);
//   for each unit, last first: gpt.backward(unit, parameters, gradients, loss_scale);
//   copy from gpt.row_losses();
//
// Every call gives its pieces of computing to a WorkQueue and what the ranks of a TensorGroup do together to
// that group, from the thread that makes the call.
//
// Tensor parallelism. Attention and MLP have their first matrix cut by columns (whole heads) and their second
// by rows, the embedding by tokens. What a second matrix gives is added over the ranks, as are the gradients
// that come back through a first one; between them activations are whole, and the same bits on every rank.
//
// Pipeline parallelism. A Gpt may be one stage of a pipeline: some of the blocks, the first with the
// embedding, the last with the final unit. Up to Options::passes passes are then between their forward and
// their backward pass; what goes from stage to stage is taken from and put into places of this memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "forebay/backend.h"
#include "forebay/data_type.h"
#include "model/block_inputs.h"
#include "model/operations.h"
#include "model/shape.h"
#include "model/tensor_group.h"
#include "model/work_queue.h"

namespace forebay::gpt {

// Where the gradient of one parameter goes, in the model's data type. Null: it is not wanted.
struct GradientTarget {
  DevicePtr data = nullptr;
  bool accumulate = false;  // "+=" rather than "=".
};

// Of one unit, in the order of describe_units(); for the last unit with the tied wte.weight after its own.
using Parameters = std::vector<const std::byte*>;
using Gradients = std::vector<GradientTarget>;

// One forward and backward pass among all: what its dropout depends on, besides the seed.
struct Pass {
  std::uint64_t step = 0;
  std::uint64_t micro_step = 0;  // In a pipeline, of consecutive passes consecutive numbers.
  std::size_t first_sample = 0;  // Of this rank's batch, among those of the micro-step over all ranks.
};

class Gpt {
 public:
  struct Options {
    GptShape shape;
    std::size_t batch = 1;
    DataType dtype = DataType::kFloat32;  // Of parameters and gradients.
    // Every so many blocks, from the first on, one keeps nothing but its input, from which the backward pass
    // computes the rest again: the same bits. 0: none; 1: all.
    std::size_t recompute_every = 0;
    // Keeps these inputs, and outlives this. Null: they are kept with the other activations.
    BlockInputs* inputs = nullptr;
    double dropout = 0;      // The probability with which an element is zeroed, at least 0 and less than 1.
    std::uint64_t seed = 1;  // Of dropout.
    PipelineStage stage;
    std::size_t passes = 1;  // At most so many are between their forward and their backward pass.
  };

  // Prepares `operations` for the model. All three must outlive this.
  Gpt(const Options& options, Operations& operations, WorkQueue& queue, TensorGroup& group);

  std::size_t memory_bytes() const { return memory_bytes_; }
  // `memory`, aligned to 256 bytes, holds memory_bytes().
  void use_memory(DevicePtr memory) { memory_ = memory; }

  // Of this stage: the embedding, if it has it, its blocks, and the final unit, if it has it.
  int unit_count() const { return first_block() + static_cast<int>(layers_.count()) + (is_last() ? 1 : 0); }
  // batch * sequence: tokens of one pass.
  std::size_t row_count() const { return rows_; }

  // --- places in that memory, each of row_count() ---
  // Of the pass that was begun. Bytes, [batch, sequence], in place before the first unit's forward pass; the
  // first stage reads tokens, the last one targets, up to its backward pass.
  DevicePtr tokens() const { return memory_ + tokens_[pass_place()]; }
  DevicePtr targets() const { return memory_ + targets_[pass_place()]; }
  // One RowLoss each, of the loss before scaling. From the last unit's backward pass on.
  DevicePtr row_losses() const { return memory_ + row_losses_; }

  // --- places of what goes from stage to stage, each of stage_bytes() ---
  std::size_t stage_bytes() const { return rows_ * shape_.hidden * sizeof(float); }
  // What the forward pass of a micro-step begins with; null on the first stage. It may be written once the
  // forward pass before has been queued, behind what was queued until then.
  DevicePtr input(std::uint64_t micro_step) const {
    return inputs_.empty() ? nullptr : memory_ + inputs_[micro_step % inputs_.size()];
  }
  // What it ends with; not the last stage's. There until the forward pass after the next.
  DevicePtr output(std::uint64_t micro_step) const {
    return memory_ + outputs_[micro_step % outputs_.size()];
  }
  // What its backward pass begins with, but for the last stage, and ends with, but for the first. It may be
  // written once the backward pass before has been queued, and stays until the one after the next.
  DevicePtr gradient(std::uint64_t micro_step) const {
    return memory_ + residual_gradients_[micro_step % residual_gradients_.size()];
  }

  // --- one pass ---
  // Before its forward pass, and before its backward pass if others have come in between.
  void begin(const Pass& pass) { pass_ = pass; }
  void forward(int unit, const Parameters& parameters);
  // The embedding's backward pass reads no parameters. The final unit's loss is multiplied by `loss_scale`.
  void backward(int unit, const Parameters& parameters, const Gradients& gradients, double loss_scale);

 private:
  // Places in memory_, in bytes.
  struct BlockPlaces {
    std::size_t input, norm1, norm1_mean, norm1_inverse, qkv, softmax, attended, middle, norm2, norm2_mean,
        norm2_inverse, expanded, activated;
  };
  class Layout;
  // Where dropout is: after the embedding, and three times in a block.
  enum Site : std::uint64_t { kProbabilities, kAttention, kMlp, kSitesOfBlock };

  bool is_first() const { return options_.stage.is_first(); }
  bool is_last() const { return options_.stage.is_last(); }
  int first_block() const { return is_first() ? 1 : 0; }

  BlockPlaces lay_out_block(Layout& layout) const;
  void lay_out_blocks(Layout& layout);
  // Layers are numbered over the whole model.
  bool recomputes(std::size_t layer) const {
    return options_.recompute_every > 0 && layer % options_.recompute_every == 0;
  }
  bool saves(std::size_t layer) const { return options_.inputs != nullptr && recomputes(layer); }

  // Of the pass that was begun: known when work is queued, not when it runs.
  std::size_t pass_place() const { return pass_.micro_step % options_.passes; }
  const BlockPlaces& places(std::size_t layer) const { return blocks_[pass_place()][layer - layers_.begin]; }
  float* input_of(std::size_t layer);
  float* output_of(std::size_t layer);
  float* residual_gradient() { return reinterpret_cast<float*>(gradient(pass_.micro_step)); }

  void embedding_forward(const Parameters& parameters);
  void block_forward(std::size_t layer, const Parameters& parameters);
  void final_forward(const Parameters& parameters);
  void embedding_backward(const Gradients& gradients);
  void block_backward(std::size_t layer, const Parameters& parameters, const Gradients& gradients);
  void final_backward(const Parameters& parameters, const Gradients& gradients, double loss_scale);

  // The three parts of a block's forward pass. The backward pass needs what the first two compute.
  void attend(std::size_t layer, const float* input, const Parameters& parameters);
  void expand(std::size_t layer, const float* input, const Parameters& parameters);
  void contract(std::size_t layer, const Parameters& parameters);
  // target = input + dropout(projected + bias), where `projected` is what the ranks have added up.
  struct Residual {
    const float* input;
    const std::byte* bias;
    Dropout dropout;
    std::uint64_t first;  // See first_element().
  };
  void add_residual(const Residual& residual, float* target);
  // The residual gradient back through that dropout.
  const float* dropped_gradient(const float* residual, const Dropout& dropout, std::uint64_t first);

  // output = input * weight + bias: [rows, in] x [in, out].
  void linear(const float* input, const std::byte* weight, const std::byte* bias, std::size_t in,
              std::size_t out, float* output);
  // The gradients of `linear`. `input_gradient` gets "=".
  struct LinearGradient {
    const float* input;
    const float* output_gradient;
    float* input_gradient;
    const std::byte* weight;
    GradientTarget weight_gradient;
    GradientTarget bias_gradient;
    std::size_t in;
    std::size_t out;
  };
  void linear_backward(const LinearGradient& arguments);
  void norm_backward(const LayerNorm& norm, const std::byte* gain, const float* gradient,
                     float* input_gradient, GradientTarget gain_gradient, GradientTarget bias_gradient);

  void multiply(const ProductShape& product, const float* a, Operand b, float* c);
  ProductShape forward_product(std::size_t in, std::size_t out) const;
  ProductShape input_gradient_product(std::size_t in, std::size_t out) const;
  ProductShape weight_gradient_product(std::size_t in, std::size_t out) const;

  LayerNorm norm_of(const float* input, std::size_t mean, std::size_t inverse);
  Attention attention_shape() const;
  Attention attention_of(std::size_t layer) const;
  TokenRange token_range() const;
  LogitsPart logits_part(DevicePtr targets);

  Dropout dropout_of(std::uint64_t site) const;
  Dropout dropout_of(std::size_t layer, Site site) const {
    return dropout_of(1 + layer * kSitesOfBlock + site);
  }
  // The index of this rank's first element in a tensor of [all rows, hidden].
  std::uint64_t first_element() const { return pass_.first_sample * shape_.sequence * shape_.hidden; }

  // A parameter as it is kept, and what a pass has computed.
  Operand stored(const std::byte* parameter) const { return {parameter, dtype_}; }
  static Operand computed(const float* values) { return {values, DataType::kFloat32}; }
  // A vector or an embedding in fp32: where it is, or widened into the workspace at `offset`, where it stays
  // until the next use.
  const float* widened(const std::byte* parameter, std::size_t count, std::size_t offset = 0);
  // Where to compute a gradient in fp32 ...
  float* gradient_space(const GradientTarget& target, std::size_t offset = 0);
  // ... and how it gets to its target from there.
  void store_gradient(const GradientTarget& target, std::size_t count, std::size_t offset = 0);

  // Adds up over the ranks what the pieces before have left at `place`, [rows, hidden].
  void all_reduce(float* data) { group_.all_reduce(data, rows_ * shape_.hidden, memory_ + group_space_); }

  float* at(std::size_t place) { return reinterpret_cast<float*>(memory_ + place); }
  SoftmaxRow* softmax_at(std::size_t place) { return reinterpret_cast<SoftmaxRow*>(memory_ + place); }
  RowLossPart* loss_parts() { return reinterpret_cast<RowLossPart*>(memory_ + loss_parts_); }
  const Options options_;
  const GptShape& shape_ = options_.shape;
  const std::size_t batch_ = options_.batch;
  const std::size_t rows_ = batch_ * shape_.sequence;
  const LayerRange layers_ = layers_of(shape_, options_.stage);
  const DataType dtype_ = options_.dtype;
  Operations& operations_;
  WorkQueue& queue_;
  TensorGroup& group_;
  const TensorPart part_ = group_.part();
  // What this rank has of hidden columns in attention, of the MLP's 4 hidden, of heads and of tokens.
  const std::size_t width_ = shape_.hidden / part_.size;
  const std::size_t inner_ = 4 * width_;
  const std::size_t heads_ = shape_.heads / part_.size;
  const std::size_t vocabulary_ = (kVocabulary + part_.size - 1) / part_.size;

  Pass pass_;
  DevicePtr memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  std::vector<std::vector<BlockPlaces>> blocks_;  // By pass between forward and backward, then by layer here.
  std::vector<std::size_t> tokens_, targets_;     // By pass between forward and backward.
  std::vector<std::size_t> inputs_;   // Of the first block here, unless the embedding is: in turn.
  std::vector<std::size_t> outputs_;  // Of the last block here: in turn.
  std::size_t final_norm_ = 0, final_mean_ = 0, final_inverse_ = 0, logits_ = 0, row_losses_ = 0;
  std::size_t loss_parts_ = 0;
  std::vector<std::size_t> residual_gradients_;  // In turn.
  std::size_t narrow_gradient_ = 0, wide_gradient_ = 0, dropped_gradient_ = 0;
  std::size_t parameter_space_ = 0, gradient_space_ = 0, product_space_ = 0, attention_space_ = 0;
  std::size_t group_space_ = 0;
};

}  // namespace forebay::gpt
