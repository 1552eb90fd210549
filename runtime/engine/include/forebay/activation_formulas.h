// What the literature says the activations of a transformer take, with and without recomputation, and what
// tensor parallelism and the partitioning of activations send. Plain formulas, without padding; what a run
// keeps to the byte is an ActivationPlan (activation_plan.h).
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
//
//   tensor parallelism, received                n 2(t-1)/t M, n = 4L + R + 2 all-reduces
//     ZeRO's count, with recomputation          n = 6L
//
// The n all-reduces: each block has two in each pass. One of R that are computed again has one more, not two:
// what its last matrix gives is not needed again. The embedding has one forward, the output projection one
// backward.
//
// ZeRO's count leaves out the attention's scores and the dropout masks. At other widths Korthikanti's terms
// are counted alike: 10 = 4e + 2, 24 = 12e, 34 = 16e + 2, 5 = 2e + 1, the masks one byte an element.
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

struct TransformerBlocks {
  std::uint64_t layers = 1;
  std::uint64_t first_layer = 0;  // The number of the first of them in the model, from 0.
  std::uint64_t hidden = 1;
  std::uint64_t heads = 1;
  std::uint64_t sequence = 1;
  std::uint64_t batch = 1;
  int tensor_parallel = 1;
  std::uint64_t element_bytes = 2;
  bool has_embedding = true;  // Cut over the tensor-parallel ranks, as the output projection is.
  bool has_output = true;
  // Of so many layers of the model the first one is recomputed, alone, from its saved input; the others keep
  // everything. 1: all are recomputed; 0: none is.
  int recompute_every = 1;
};

// TransformerBlocks::recompute_every of "none", "block" (all) or "every:K", and the other way round. Nothing
// for other words.
std::optional<int> parse_recompute(std::string_view word);
std::string recompute_name(int every);

// Bytes of one micro-batch on one rank.
struct ActivationFormulas {
  // Nothing recomputed.
  std::uint64_t zero_all = 0;               // ZeRO's count, whole on every rank.
  std::uint64_t all = 0;                    // Korthikanti's, tensor parallelism.
  std::uint64_t all_sequence_parallel = 0;  // The same with sequence parallelism.
  std::uint64_t selective = 0;              // The same with the attention recomputed.
  // As `all`, where attention keeps no scores and dropout is drawn again. forebay-gpt's blocks are like that.
  std::uint64_t without_scores_and_masks = 0;
  // Layers recomputed: inputs that are saved, what the other layers keep, and what is alive while one layer
  // is recomputed.
  std::uint64_t saved_count = 0;
  std::uint64_t saved = 0;
  std::uint64_t saved_partitioned = 0;  // Pa: rounded up to whole bytes.
  std::uint64_t kept = 0;               // Korthikanti's, tensor parallelism.
  std::uint64_t block = 0;              // Korthikanti's of one layer; 0 where none is recomputed.
  // ZeRO's count, where all layers from one saved input up to the next are recomputed together.
  std::uint64_t zero_segment = 0;
  // Received by one rank, forward, recomputation and backward; the same is sent.
  std::uint64_t tensor_parallel_wire = 0;       // 4L + R + 2 all-reduces of M.
  std::uint64_t zero_tensor_parallel_wire = 0;  // ZeRO's count: 6L of them.
  std::uint64_t partition_wire = 0;             // One all-gather for each input that is saved.
};

// Errors: kInvalidArgument for a number that is zero, and where a figure passes 2^62 bytes.
Result<ActivationFormulas> activation_formulas(const TransformerBlocks& blocks);

// A printed figure of the ZeRO paper beside what its formula gives.
struct PrintedFigure {
  std::string what;       // "1.5B parameters, batch 32: all activations"
  std::string where;      // "section 3.2"
  double printed_gb = 0;  // 1e9 bytes.
  std::uint64_t bytes = 0;
  bool agrees() const;  // To the last digit printed.
};

std::vector<PrintedFigure> printed_activation_figures();

}  // namespace forebay
