#include "forebay/activation_formulas.h"

#include <algorithm>
#include <charconv>

#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::uint64_t kLimit = std::uint64_t{1} << 62;

// Multiplies, and remembers whether a product was too large.
class Product {
 public:
  std::uint64_t operator()(std::uint64_t a, std::uint64_t b) {
    std::uint64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || product > kLimit) overflowed_ = true;
    return product;
  }
  bool overflowed() const { return overflowed_; }

 private:
  bool overflowed_ = false;
};

Status check(const TransformerBlocks& blocks) {
  struct Number {
    const char* name;
    std::uint64_t value;
  };
  for (const Number& number :
       {Number{"layers", blocks.layers},
        {"hidden", blocks.hidden},
        {"heads", blocks.heads},
        {"sequence", blocks.sequence},
        {"batch", blocks.batch},
        {"element bytes", blocks.element_bytes},
        {"tensor-parallel", static_cast<std::uint64_t>(std::max(blocks.tensor_parallel, 0))}}) {
    if (number.value == 0) {
      return {StatusCode::kInvalidArgument,
              std::string(number.name) + " of an activation formula is 0 or less; use 1 or more"};
    }
  }
  if (blocks.recompute_every < 0) {
    return {StatusCode::kInvalidArgument, "recompute_every of an activation formula is " +
                                              std::to_string(blocks.recompute_every) +
                                              "; use 1 or more, or 0 for none"};
  }
  return {};
}

constexpr std::string_view kEvery = "every:";

}  // namespace

std::optional<int> parse_recompute(std::string_view word) {
  if (word == "none") return 0;
  if (word == "block") return 1;
  if (!word.starts_with(kEvery)) return std::nullopt;
  word.remove_prefix(kEvery.size());
  int every = 0;
  const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), every);
  if (error != std::errc() || rest != word.data() + word.size() || every < 1) return std::nullopt;
  return every;
}

std::string recompute_name(int every) {
  if (every <= 1) return every == 1 ? "block" : "none";
  return std::string(kEvery) + std::to_string(every);
}

std::uint64_t loss_bytes(std::uint64_t tokens, std::uint64_t vocabulary, std::uint64_t element_bytes,
                         int tensor_parallel) {
  Product times;
  const std::uint64_t all = times(times(tokens, vocabulary), element_bytes + 8);
  return times.overflowed() ? ~std::uint64_t{0} : ceil_div(all, static_cast<std::uint64_t>(tensor_parallel));
}

Result<ActivationFormulas> activation_formulas(const TransformerBlocks& blocks) {
  FOREBAY_RETURN_IF_ERROR(check(blocks));
  Product times;
  const auto t = static_cast<std::uint64_t>(blocks.tensor_parallel);
  const std::uint64_t e = blocks.element_bytes;
  const std::uint64_t sbh = times(times(blocks.sequence, blocks.batch), blocks.hidden);
  // Elements of the scores of one block: a s^2 b.
  const std::uint64_t scores =
      times(times(times(blocks.heads, blocks.sequence), blocks.sequence), blocks.batch);
  const std::uint64_t score_bytes = blocks.keeps_scores ? times(2 * e + 1, scores) : 0;
  const std::uint64_t parallel = times(12 * e, sbh);
  const std::uint64_t whole = times(4 * e + 2, sbh);
  const std::uint64_t input = times(e, sbh);  // M

  ActivationFormulas figures;
  figures.zero_all = times(times(12, input), blocks.layers);
  const std::uint64_t block = whole + ceil_div(parallel + score_bytes, t);
  figures.all = times(block, blocks.layers);
  figures.all_sequence_parallel = times(ceil_div(whole + parallel + score_bytes, t), blocks.layers);
  figures.selective = times(ceil_div(whole + parallel, t), blocks.layers);
  figures.without_scores_and_masks = times(times(4, input) + ceil_div(parallel, t), blocks.layers);
  const auto every = static_cast<std::uint64_t>(blocks.recompute_every);
  figures.saved_count =
      every == 0 ? 0
                 : ceil_div(blocks.first_layer + blocks.layers, every) - ceil_div(blocks.first_layer, every);
  figures.saved = times(figures.saved_count, input);
  figures.saved_partitioned = times(figures.saved_count, ceil_div(input, t));
  figures.kept = times(block, blocks.layers - figures.saved_count);
  figures.block = figures.saved_count == 0 ? 0 : block;
  if (blocks.has_output && blocks.vocabulary != 0) {
    figures.loss = times(
        1, loss_bytes(times(blocks.sequence, blocks.batch), blocks.vocabulary, e, blocks.tensor_parallel));
  }
  figures.zero_segment = times(times(12, input), std::min(every, blocks.layers));
  const std::uint64_t received_of_gather = times(t - 1, input) / t;
  const std::uint64_t all_reduces = times(4, blocks.layers) + figures.saved_count +
                                    (blocks.has_embedding ? 1 : 0) + (blocks.has_output ? 1 : 0);
  figures.tensor_parallel_wire = times(times(2, all_reduces), received_of_gather);
  figures.zero_tensor_parallel_wire = times(times(12, blocks.layers), received_of_gather);
  figures.partition_wire = times(figures.saved_count, received_of_gather);
  if (times.overflowed()) {
    return Status(StatusCode::kInvalidArgument,
                  "the activations of batch " + std::to_string(blocks.batch) + " and sequence " +
                      std::to_string(blocks.sequence) +
                      " are larger than 2^62 bytes; use a smaller batch or sequence");
  }
  return figures;
}

}  // namespace forebay
