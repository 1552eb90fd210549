// Formulas of the literature for the activations of a transformer, with and without recomputation, and for
// the bytes that tensor parallelism and partitioned activations send. They have no padding. The bytes that a
// run keeps are in an ActivationPlan (activation_plan.h).
//
// h hidden, b sequences, s tokens of each, a heads, L layers, t tensor-parallel ranks, e bytes of an element;
// M = s b h e is the input of one block.
//
//   nothing recomputed, ZeRO's count            12 h b s L elements
//   nothing recomputed, Korthikanti's           sbh (10 + 24/t + 5as/(ht)) L bytes at e = 2
//     with sequence parallelism                 sbh (34 + 5as/h) L / t
//     and attention recomputed (selective)      34 sbh L / t
//     neither scores nor dropout masks kept     sbh e (4 + 12/t) L
//   all recomputed, one block's input each      M L, and M L / t partitioned (Pa)
//   the loss, while it is computed              sbV (e + 8) / t bytes, for a vocabulary of V tokens
//
//   tensor parallelism, received                n 2(t-1)/t M, n = 4L + R + 2 all-reduces
//     ZeRO's count, with recomputation          n = 6L
//
// The n all-reduces: each block has two in each pass. Each of the R recomputed blocks has one more, not two,
// because the result of its last matrix is not needed again. The embedding has one in the forward pass, the
// output projection one in the backward pass.
//
// The loss has the logits in their type and two fp32 tensors of their size: first a copy and the softmax,
// then the softmax and its gradient. A trainer that keeps them in parts or in 2 bytes needs less.
//
// ZeRO's count leaves out the scores of attention and the dropout masks. For other element sizes
// Korthikanti's terms are 10 = 4e + 2, 24 = 12e, 34 = 16e + 2 and 5 = 2e + 1, with masks of one byte per
// element.
//
// Source: Rajbhandari et al., arXiv 1910.02054, section 3.2 (footnote), 6.1 and 8; Korthikanti et al., arXiv
// 2205.05198, equations 1 to 6 and table 2.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// The transformer blocks of one rank.
struct TransformerBlocks {
  std::uint64_t layers = 1;
  std::uint64_t first_layer = 0;  // The number of the first layer in the model, from 0.
  std::uint64_t hidden = 1;
  std::uint64_t heads = 1;
  std::uint64_t sequence = 1;
  std::uint64_t batch = 1;
  int tensor_parallel = 1;
  std::uint64_t element_bytes = 2;
  bool keeps_scores = true;      // False: a fused attention kernel keeps neither scores nor their masks.
  bool has_embedding = true;     // Partitioned over the tensor-parallel ranks.
  bool has_output = true;        // The output projection, partitioned likewise, and the loss.
  std::uint64_t vocabulary = 0;  // V of the loss. 0: the loss is not counted.
  // One layer of every `recompute_every` layers of the model is recomputed from its saved input: the first.
  // The other layers keep everything. 1: all layers are recomputed. 0: no layer is.
  int recompute_every = 1;
};

// TransformerBlocks::recompute_every for "none", "block" (all layers) and "every:K"; nothing for other words.
// And the word for a number.
std::optional<int> parse_recompute(std::string_view word);
std::string recompute_name(int every);

// Bytes of one micro-batch on one rank.
struct ActivationFormulas {
  // With no recomputation.
  std::uint64_t zero_all = 0;               // ZeRO's count, whole on every rank.
  std::uint64_t all = 0;                    // Korthikanti's, tensor parallelism.
  std::uint64_t all_sequence_parallel = 0;  // The same with sequence parallelism.
  std::uint64_t selective = 0;              // The same with the attention recomputed.
  // As `all`, but attention keeps no scores and dropout masks are drawn again, as in forebay-gpt.
  std::uint64_t without_scores_and_masks = 0;
  // With recomputation.
  std::uint64_t saved_count = 0;        // Recomputed layers, each with a saved input.
  std::uint64_t saved = 0;              // The saved inputs.
  std::uint64_t saved_partitioned = 0;  // The same partitioned (Pa), rounded up to whole bytes.
  std::uint64_t kept = 0;               // Korthikanti's, for the layers that are not recomputed.
  std::uint64_t block = 0;              // Korthikanti's, for one layer while it is recomputed; 0 with none.
  std::uint64_t loss = 0;               // While the loss is computed.
  // ZeRO's count, where all layers from one saved input to the next are recomputed together.
  std::uint64_t zero_segment = 0;
  // Received by one rank in the forward pass, recomputation and backward pass. It sends as much.
  std::uint64_t tensor_parallel_wire = 0;       // 4L + R + 2 all-reduces of M.
  std::uint64_t zero_tensor_parallel_wire = 0;  // ZeRO's count, 6L all-reduces.
  std::uint64_t partition_wire = 0;             // One all-gather for each saved input.
};

// Bytes of the loss of `tokens` tokens, sb: sbV (e + 8) / t, rounded up; more than 2^62 if it is larger.
std::uint64_t loss_bytes(std::uint64_t tokens, std::uint64_t vocabulary, std::uint64_t element_bytes,
                         int tensor_parallel);

// All formulas for some blocks.
//
// Errors: kInvalidArgument for a number that is 0, and where a figure is larger than 2^62 bytes.
Result<ActivationFormulas> activation_formulas(const TransformerBlocks& blocks);

}  // namespace forebay
