// Gpt: the forward and backward pass of a model like GPT-2 or Llama, unit by unit, or one tensor-parallel
// rank's part of it.
//
// It knows neither engines nor devices: it calls Operations in order. The caller passes, for each unit, the
// addresses of its parameters and gradients, so the same arithmetic runs under a ZeRO engine and in a plain
// loop. Activations and workspaces lie in one region of device memory, of a size that is known from the
// start.
//
//   gpt.begin(pass); copy to gpt.tokens() and gpt.targets();
//   for each unit: gpt.forward(unit, parameters);
//   for each unit, last first: gpt.backward(unit, parameters, gradients, loss_scale);
//   copy from gpt.row_losses();
//
// Every call queues its computations on a WorkQueue and its collectives on a TensorGroup, from the calling
// thread.
//
// Tensor parallelism. The first matrix of attention and of the MLP is divided by columns (whole heads), the
// second by rows, and the embedding and the head by tokens. The outputs of a second matrix are added over the
// ranks, and so are the gradients that return through a first one. Between blocks, activations are whole and
// bit for bit the same on every rank.
//
// Pipeline parallelism. A Gpt may be one pipeline stage: some of the blocks, the first stage with the
// embedding, the last with the final unit. Then up to Options::passes passes are between their forward and
// their backward pass. Activations for other stages lie in the same region, at input(), output() and
// gradient().
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

// The destination of one parameter's gradient, in the model's data type. Null: no gradient is needed.
struct GradientTarget {
  DevicePtr data = nullptr;
  bool accumulate = false;  // Write "+=" instead of "=".
};

// Addresses of one unit's parameters, in the order of describe_units(). The last unit has the head at the
// end, also where it is the tied token embedding.
using Parameters = std::vector<const std::byte*>;
using Gradients = std::vector<GradientTarget>;

// Identifies one forward and backward pass. Its dropout depends on these numbers and on the seed.
struct Pass {
  std::uint64_t step = 0;
  std::uint64_t micro_step = 0;  // Consecutive passes of a pipeline have consecutive numbers.
  std::size_t first_sample =
      0;  // The first of this rank's batch, counted over all ranks' samples of the micro-step.
  bool evaluates = false;  // No backward pass follows: no dropout, and no input is saved.
};

class Gpt {
 public:
  struct Options {
    GptShape shape;
    std::size_t batch = 1;
    DataType dtype = DataType::kFloat32;  // The type of parameters and gradients.
    // One block in so many, from the first on, keeps only its input. The backward pass computes the rest
    // again, with the same result. 0: no block; 1: every block.
    std::size_t recompute_every = 0;
    // Keeps these inputs; outlives this. Null: they lie with the other activations.
    BlockInputs* inputs = nullptr;
    double dropout = 0;      // The probability with which an element is zeroed, at least 0 and less than 1.
    std::uint64_t seed = 1;  // For dropout.
    PipelineStage stage;
    std::size_t passes = 1;  // The most that are between their forward and their backward pass.
  };

  // Prepares `operations` for the model. All three must outlive this.
  Gpt(const Options& options, Operations& operations, WorkQueue& queue, TensorGroup& group);

  std::size_t memory_bytes() const { return memory_bytes_; }
  // `memory`, aligned to 256 bytes, holds memory_bytes().
  void use_memory(DevicePtr memory) { memory_ = memory; }

  // Units of this pipeline stage: its blocks, and the embedding or the final unit if it has them.
  int unit_count() const { return first_block() + static_cast<int>(layers_.count()) + (is_last() ? 1 : 0); }
  // batch * sequence: tokens of one pass.
  std::size_t row_count() const { return rows_; }
  std::size_t vocabulary() const { return shape_.vocabulary; }
  // Bytes of a TokenList of row_count() tokens.
  std::size_t token_bytes() const { return rows_ * TokenList::bytes_of_token(shape_.vocabulary); }

  // --- addresses in that memory, of row_count() elements each ---
  // The tokens of the current pass, a TokenList [batch, sequence]. Order: the caller writes them before the
  // first unit's forward pass. The first stage reads tokens, the last one targets, until its backward pass
  // ends.
  DevicePtr tokens() const { return memory_ + tokens_[pass_place()]; }
  DevicePtr targets() const { return memory_ + targets_[pass_place()]; }
  // One RowLoss for each row, before loss scaling. Valid from the last unit's backward pass, or from
  // compute_losses(), on.
  DevicePtr row_losses() const { return memory_ + row_losses_; }
  // The logits of a row, as fp32: this rank's logit_count() tokens, those of tensor-parallel rank r from
  // token r * logit_count() on. Valid between the last unit's forward pass and compute_losses().
  DevicePtr logits(std::size_t row) const { return memory_ + logits_ + row * vocabulary_ * sizeof(float); }
  std::size_t logit_count() const { return vocabulary_; }

  // --- activations that pipeline stages exchange, stage_bytes() each ---
  std::size_t stage_bytes() const { return rows_ * shape_.hidden * sizeof(float); }
  // The input of a micro-step's forward pass; null on the first stage. Order: written after the work of the
  // preceding forward pass.
  DevicePtr input(std::uint64_t micro_step) const {
    return inputs_.empty() ? nullptr : memory_ + inputs_[micro_step % inputs_.size()];
  }
  // The output of the forward pass; not on the last stage. Valid until the forward pass after the next.
  DevicePtr output(std::uint64_t micro_step) const {
    return memory_ + outputs_[micro_step % outputs_.size()];
  }
  // The input of the backward pass (not on the last stage), overwritten by its output (not on the first).
  // Order: written after the work of the preceding backward pass. Valid until the backward pass after the
  // next.
  DevicePtr gradient(std::uint64_t micro_step) const {
    return memory_ + residual_gradients_[micro_step % residual_gradients_.size()];
  }

  // --- one pass ---
  // Call it before the forward pass, and again before the backward pass if another pass was begun since.
  void begin(const Pass& pass) { pass_ = pass; }
  void forward(int unit, const Parameters& parameters);
  // In place of a backward pass: the losses of the pass, on the last stage.
  void compute_losses() { cross_entropy(0); }
  // The embedding's backward pass reads no parameters. The final unit's loss is multiplied by `loss_scale`.
  void backward(int unit, const Parameters& parameters, const Gradients& gradients, double loss_scale);

 private:
  // Offsets in memory_, in bytes.
  struct BlockPlaces {
    std::size_t input, norm1, norm1_mean, norm1_inverse, qkv, softmax, attended, middle, norm2, norm2_mean,
        norm2_inverse, expanded, activated;
    std::size_t up;  // Llama's; its gate is `expanded`.
  };
  // Indices of a block's parameters that both models have.
  struct BlockIndices {
    int norm1, attention, norm2, contract;
  };
  class Layout;
  // Sites of dropout: one after the embedding, three in each block.
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

  // Depends on the current pass: call it while queuing, not while the work runs.
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

  // Computes the losses, and replaces the logits by their gradient times `factor`.
  void cross_entropy(float factor);
  // The three parts of a block's forward pass. The backward pass needs the results of the first two.
  void attend(std::size_t layer, const float* input, const Parameters& parameters);
  void expand(std::size_t layer, const float* input, const Parameters& parameters);
  void contract(std::size_t layer, const Parameters& parameters);
  // target = input + dropout(projected + bias), where `projected` is the sum over ranks.
  struct Residual {
    const float* input;
    const std::byte* bias;
    Dropout dropout;
    std::uint64_t first;  // See first_element().
  };
  void add_residual(const Residual& residual, float* target);
  // The residual gradient, taken back through that dropout.
  const float* dropped_gradient(const float* residual, const Dropout& dropout, std::uint64_t first);

  // Queries, keys and values from the result of a block's first norm; and back, from the gradients in
  // wide_gradient_ to that of the norm in narrow_gradient_.
  void project_qkv(const BlockPlaces& b, const Parameters& parameters);
  void project_qkv_backward(const BlockPlaces& b, const Parameters& parameters, const Gradients& gradients);
  // From the result of the second norm to `activated`; and back, from its gradient at activated_gradient() to
  // that of the norm in narrow_gradient_.
  void activate(const BlockPlaces& b, const Parameters& parameters);
  void activate_backward(const BlockPlaces& b, const Parameters& parameters, const Gradients& gradients);
  float* activated_gradient() { return at(wide_gradient_) + (shape_.is_llama() ? rows_ * inner_ : 0); }
  // The rotary embedding of `heads` heads, in place; `direction` -1 turns back.
  void rotate(float* values, std::size_t heads, float direction);

  // output = input * weight + bias, [rows, in] to [rows, out]. `weight` is the index of the weight in its
  // unit; the bias has the next one. So do the gain and the bias of a norm. Llama has no biases.
  void linear(const float* input, const Parameters& parameters, int weight, std::size_t in, std::size_t out,
              float* output);
  struct LinearGradient {
    const float* input;
    const float* output_gradient;
    float* input_gradient;  // Gets "=".
  };
  void linear_backward(const LinearGradient& arguments, const Parameters& parameters,
                       const Gradients& gradients, int weight, std::size_t in, std::size_t out);
  void norm_forward(const LayerNorm& norm, const Parameters& parameters, int gain, float* output);
  // The gradient of the output is in narrow_gradient_. `input_gradient` gets "+=".
  void norm_backward(const LayerNorm& norm, const Parameters& parameters, const Gradients& gradients,
                     int gain, float* input_gradient);

  void multiply(const ProductShape& product, const float* a, Operand b, float* c);
  ProductShape forward_product(std::size_t in, std::size_t out) const;
  ProductShape input_gradient_product(std::size_t in, std::size_t out) const;
  ProductShape weight_gradient_product(std::size_t in, std::size_t out) const;

  // A weight is [in, out] in GPT-2, and [out, in] in Llama.
  ProductShape output_product(std::size_t in, std::size_t out) const {
    return shape_.is_llama() ? input_gradient_product(out, in) : forward_product(in, out);
  }

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

  // A stored parameter, or an fp32 result of this pass, as an operand.
  Operand stored(const std::byte* parameter) const { return {parameter, dtype_}; }
  static Operand computed(const float* values) { return {values, DataType::kFloat32}; }
  // A vector or an embedding in fp32: in place, or widened into the workspace at `offset`. Valid until the
  // next use of that workspace.
  const float* widened(const std::byte* parameter, std::size_t count, std::size_t offset = 0);
  // Where to compute a gradient in fp32.
  float* gradient_space(const GradientTarget& target, std::size_t offset = 0);
  // The bias behind a weight or gain; null in Llama.
  const std::byte* bias_of(const Parameters& parameters, int weight) const {
    return shape_.is_llama() ? nullptr : parameters[weight + 1];
  }
  // Moves a gradient from gradient_space() to its target.
  void store_gradient(const GradientTarget& target, std::size_t count, std::size_t offset = 0);

  // Sums `data`, [rows, hidden], over the tensor-parallel ranks.
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
  // This rank's share of the columns of attention, of the MLP's columns, of the heads and of the vocabulary.
  const std::size_t width_ = shape_.hidden / part_.size;
  const std::size_t inner_ = (shape_.inner_count() + part_.size - 1) / part_.size;
  const std::size_t heads_ = shape_.heads / part_.size;
  const std::size_t kv_heads_ = shape_.kv_head_count() / part_.size;
  const std::size_t kv_width_ = shape_.kv_columns() / part_.size;  // Columns of keys, and of values.
  const std::size_t qkv_width_ = width_ + 2 * kv_width_;
  const std::size_t vocabulary_ = (shape_.vocabulary + part_.size - 1) / part_.size;

  const BlockIndices index_;
  const int head_;  // The index of the head in the final unit.

  Pass pass_;
  DevicePtr memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  std::vector<std::vector<BlockPlaces>> blocks_;  // By pass in flight, then by layer of this stage.
  std::vector<std::size_t> tokens_, targets_;     // By pass in flight.
  std::vector<std::size_t> inputs_;   // Inputs of the first block, in turn; none on the first stage.
  std::vector<std::size_t> outputs_;  // Outputs of the last block, in turn.
  std::size_t final_norm_ = 0, final_mean_ = 0, final_inverse_ = 0, logits_ = 0, row_losses_ = 0;
  std::size_t loss_parts_ = 0;
  std::vector<std::size_t> residual_gradients_;  // Used in turn.
  std::size_t narrow_gradient_ = 0, wide_gradient_ = 0, dropped_gradient_ = 0;
  std::size_t second_gradient_ = 0;  // Llama's: of an input that several projections share.
  std::size_t parameter_space_ = 0, gradient_space_ = 0, product_space_ = 0, attention_space_ = 0;
  std::size_t group_space_ = 0;
};

}  // namespace forebay::gpt
