// The loops are compiled once for each instruction set, and each has the same order of sums. Multiplications
// and additions are rounded one by one, so every set has the same bits.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include "model/host_operations.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "forebay/error.h"
#include "forebay/units.h"
#include "model/convert.h"
#include "model/definitions.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "model/host_operations.cc"
#include "hwy/foreach_target.h"  // Must come before highway.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace forebay::gpt {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using definitions::kLanes;

constexpr std::size_t kAlignment = 64;    // One cache line, and the widest vector.
constexpr std::size_t kColumnBlock = 64;  // Columns that one thread sums at a time.
[[maybe_unused]] constexpr std::size_t kParallelCount =
    1u << 14;  // Below it starting threads costs more than it saves.

std::size_t thread_index() {
#if defined(_OPENMP)
  return static_cast<std::size_t>(omp_get_thread_num());
#else
  return 0;
#endif
}

// The sum of f(0) ... f(count - 1) by lanes.
template <typename Function>
inline float lane_sum(std::size_t count, Function f) {
  float lanes[kLanes] = {};
  const std::size_t whole = count - count % kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += f(i + lane);
  }
  for (std::size_t i = whole; i < count; ++i) lanes[i - whole] += f(i);
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// Calls f(first column, one past the last) for blocks of columns, in parallel.
template <typename Function>
void for_column_blocks(std::size_t columns, Function f) {
  const std::size_t block_count = ceil_div(columns, kColumnBlock);
#pragma omp parallel for schedule(static)
  for (std::size_t b = 0; b < block_count; ++b) {
    f(b * kColumnBlock, std::min(columns, (b + 1) * kColumnBlock));
  }
}

// target[c] = the sum by lanes of f(0, c) ... f(rows - 1, c).
template <typename Function>
void column_sums(std::size_t rows, std::size_t columns, float* target, Function f) {
  for_column_blocks(columns, [&](std::size_t first, std::size_t last) {
    float lanes[kLanes][kColumnBlock] = {};
    for (std::size_t r = 0; r < rows; ++r) {
      float* sums = lanes[r % kLanes];
      for (std::size_t c = first; c < last; ++c) sums[c - first] += f(r, c);
    }
    for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
      for (std::size_t lane = 0; lane < width; ++lane) {
        for (std::size_t c = 0; c < kColumnBlock; ++c) lanes[lane][c] += lanes[lane + width][c];
      }
    }
    std::copy_n(lanes[0], last - first, target + first);
  });
}

class HostOperations final : public Operations {
 public:
  HostOperations(std::unique_ptr<MatMul> matmul, int threads)
      : matmul_(std::move(matmul)), threads_(threads) {}

  const char* matmul() const noexcept override { return matmul_->name(); }
  bool queues() const noexcept override { return false; }
  std::size_t prepare_product(const ProductShape& shape, DataType b_type) override;
  std::size_t prepare_attention(const Attention& shape) override;
  void multiply(const ProductShape& shape, const float* a, Operand b, float* c,
                std::byte* workspace) override;
  void zero(float* target, std::size_t count) override;
  FOREBAY_GPT_OPERATIONS(FOREBAY_OVERRIDE_OPERATION)
  void run(const AttentionBackward& arguments) override;

 private:
  const std::unique_ptr<MatMul> matmul_;
  const int threads_;
};

// --- products; `b` is widened into the beginning of the workspace ---

std::size_t widened_bytes(const ProductShape& shape, DataType b_type) {
  if (b_type == DataType::kFloat32) return 0;
  return round_up(shape.depth * shape.columns * sizeof(float), kAlignment);
}

std::size_t HostOperations::prepare_product(const ProductShape& shape, DataType b_type) {
  return widened_bytes(shape, b_type) + matmul_->prepare(shape);
}

void HostOperations::multiply(const ProductShape& shape, const float* a, Operand b, float* c,
                              std::byte* workspace) {
  const float* values = static_cast<const float*>(b.data);
  if (b.type != DataType::kFloat32) {
    float* widened = reinterpret_cast<float*>(workspace);
    run(Widen{b, widened, shape.depth * shape.columns});
    values = widened;
  }
  matmul_->multiply(shape, a, values, c, workspace + widened_bytes(shape, b.type));
}

// --- element by element ---

template <typename Element>
void for_elements(const Element& given) {
  const Element element = given;
  const std::size_t count = element.count;
#pragma omp parallel for simd schedule(static) firstprivate(element) if (count >= kParallelCount)
  for (std::size_t i = 0; i < count; ++i) element(i);
}

void HostOperations::run(const Widen& a) {
  widen(a.source.type, static_cast<const std::byte*>(a.source.data), a.target, a.count);
}

void HostOperations::run(const Narrow& a) {
  narrow(a.type, a.source, static_cast<std::byte*>(a.target), a.count, a.accumulate);
}

void HostOperations::run(const Add& a) {
  for_elements(a);
}

void HostOperations::run(const Drop& a) {
  for_elements(a);
}

void HostOperations::run(const Gelu& a) {
  for_elements(a);
}

void HostOperations::run(const GeluBackward& a) {
  for_elements(a);
}

void HostOperations::run(const SwiGlu& a) {
  for_elements(a);
}

void HostOperations::run(const SwiGluBackward& a) {
  for_elements(a);
}

void HostOperations::run(const Rotate& a) {
#pragma omp parallel for schedule(static) if (a.count >= kParallelCount)
  for (std::size_t i = 0; i < a.count; ++i) a(i);
}

void HostOperations::zero(float* target, std::size_t count) {
  std::fill_n(target, count, 0.0F);
}

void HostOperations::run(const AddBias& a) {
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < a.rows; ++r) {
    float* row = a.matrix + r * a.columns;
    for (std::size_t c = 0; c < a.columns; ++c) row[c] += a.bias[c];
  }
}

void HostOperations::run(const ColumnSums& a) {
  column_sums(a.rows, a.columns, a.sums,
              [=](std::size_t r, std::size_t c) { return a.matrix[r * a.columns + c]; });
}

// --- embedding ---

void HostOperations::run(const Embed& a) {
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < a.rows; ++r) {
    float* row = a.output + r * a.hidden;
    if (a.range.has(a.tokens_in[r])) {
      std::copy_n(a.tokens + (a.tokens_in[r] - a.range.first) * a.hidden, a.hidden, row);
    } else {
      std::fill_n(row, a.hidden, 0.0F);
    }
  }
}

void HostOperations::run(const EmbedTokensBackward& a) {
  for_column_blocks(a.hidden, [&](std::size_t first, std::size_t last) {
    for (std::size_t v = 0; v < a.range.count; ++v)
      std::fill(a.tokens_gradient + v * a.hidden + first, a.tokens_gradient + v * a.hidden + last, 0.0F);
    for (std::size_t r = 0; r < a.rows; ++r) {
      if (!a.range.has(a.tokens_in[r])) continue;
      float* target = a.tokens_gradient + (a.tokens_in[r] - a.range.first) * a.hidden;
      for (std::size_t c = first; c < last; ++c) target[c] += a.gradient[r * a.hidden + c];
    }
  });
}

void HostOperations::run(const EmbedPositionsBackward& a) {
#pragma omp parallel for schedule(static)
  for (std::size_t position = 0; position < a.sequence; ++position) {
    float* target = a.positions_gradient + position * a.hidden;
    std::fill_n(target, a.hidden, 0.0F);
    for (std::size_t r = position; r < a.rows; r += a.sequence) {
      for (std::size_t c = 0; c < a.hidden; ++c) target[c] += a.gradient[r * a.hidden + c];
    }
  }
}

// --- LayerNorm ---

void HostOperations::run(const NormForward& a) {
  const LayerNorm& norm = a.norm;
  const std::size_t hidden = norm.hidden;
  const float count = static_cast<float>(hidden);
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < norm.rows; ++r) {
    const float* x = norm.input + r * hidden;
    float* y = a.output + r * hidden;
    const float mean =
        norm.mean == nullptr ? 0.0F : lane_sum(hidden, [x](std::size_t c) { return x[c]; }) / count;
    const float variance =
        lane_sum(hidden, [x, mean](std::size_t c) { return definitions::squared_deviation(x[c], mean); }) /
        count;
    const float inverse = definitions::inverse_deviation(variance, norm.epsilon);
    for (std::size_t c = 0; c < hidden; ++c)
      y[c] = definitions::layer_norm(x[c], mean, inverse, a.gain[c], a.bias != nullptr ? a.bias[c] : 0.0F);
    if (norm.mean != nullptr) norm.mean[r] = mean;
    norm.inverse[r] = inverse;
  }
}

void HostOperations::run(const NormBackward& a) {
  using definitions::normalised;
  const LayerNorm& norm = a.norm;
  const std::size_t hidden = norm.hidden;
  const float* gain = a.gain;
  const float count = static_cast<float>(hidden);
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < norm.rows; ++r) {
    const float* x = norm.input + r * hidden;
    const float* dy = a.gradient + r * hidden;
    float* dx = a.input_gradient + r * hidden;
    const float mean = norm.mean_of(r);
    const float inverse = norm.inverse[r];
    const float mean_g = norm.mean == nullptr
                             ? 0.0F
                             : lane_sum(hidden, [=](std::size_t c) { return dy[c] * gain[c]; }) / count;
    const float mean_gx =
        lane_sum(hidden, [=](std::size_t c) { return dy[c] * gain[c] * normalised(x[c], mean, inverse); }) /
        count;
    for (std::size_t c = 0; c < hidden; ++c)
      dx[c] += definitions::layer_norm_slope(x[c], mean, inverse, dy[c] * gain[c], mean_g, mean_gx);
  }
}

void HostOperations::run(const GainBackward& a) {
  column_sums(a.norm.rows, a.norm.hidden, a.gain_gradient,
              [norm = a.norm, gradient = a.gradient](std::size_t r, std::size_t c) {
                const std::size_t i = r * norm.hidden + c;
                return gradient[i] * definitions::normalised(norm.input[i], norm.mean_of(r), norm.inverse[r]);
              });
}

// --- attention ---
//
// Rows of queries go in blocks of kRows, so that a key or a value is loaded once for kRows of them and sums
// stay in registers. Each sum ascends as it does row by row, so the blocks change no bit.

constexpr std::size_t kMostRows = 8;
constexpr std::size_t kMostLanes = 16;
constexpr std::size_t kLanesHere = hn::MaxLanes(hn::ScalableTag<float>());
static_assert(kLanesHere <= kMostLanes);
constexpr std::size_t kRows =
    kLanesHere == kMostLanes ? kMostRows : kMostRows / 2;  // They fill the registers.

// The floats of one row over the sequence: whole vectors, so that a vector of keys ends inside of the
// workspace, and one cache line, because rows a power of two apart share few sets of the cache.
std::size_t padded(const Attention& shape) {
  return round_up(shape.sequence, 2 * kMostLanes) + kMostLanes;
}

// The workspace of one thread, in floats: keys and values of a head, transposed, and two blocks of weights,
// as large as on any processor.
std::size_t attention_count(const Attention& shape) {
  return (2 * shape.head_columns() + 2 * kMostRows) * padded(shape);
}

// target[c][row] = source[row][c]: sums over columns then run along memory.
void transpose(const float* source, std::size_t stride, std::size_t rows, std::size_t columns, float* target,
               std::size_t target_stride) {
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < columns; ++c) target[c * target_stride + r] = source[r * stride + c];
  }
  for (std::size_t c = 0; c < columns; ++c)
    std::fill(target + c * target_stride + rows, target + (c + 1) * target_stride, 0.0F);
}

// A matrix whose rows are `stride` floats apart.
struct Rows {
  const float* first;
  std::size_t stride;
  const float* row(std::size_t r) const { return first + r * stride; }
};

// dots[r][j] = factor * (row r of `vectors` . column j of `transposed`), for j < count and some beyond it.
// The rows of `dots` are as long as those of `transposed`.
template <std::size_t rows>
void dots_with_columns(Rows vectors, std::size_t columns, Rows transposed, float factor, float* dots,
                       std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto factors = hn::Set(d, factor);
  for (std::size_t j = 0; j < count; j += 2 * lanes) {
    hn::Vec<decltype(d)> low[rows], high[rows];
    for (std::size_t r = 0; r < rows; ++r) low[r] = high[r] = hn::Zero(d);
    for (std::size_t c = 0; c < columns; ++c) {
      const float* row = transposed.row(c) + j;
      const auto first = hn::LoadU(d, row), second = hn::LoadU(d, row + lanes);
      for (std::size_t r = 0; r < rows; ++r) {
        const auto v = hn::Set(d, vectors.row(r)[c]);
        low[r] = hn::Add(low[r], hn::Mul(v, first));
        high[r] = hn::Add(high[r], hn::Mul(v, second));
      }
    }
    for (std::size_t r = 0; r < rows; ++r) {
      float* target = dots + r * transposed.stride + j;
      hn::StoreU(hn::Mul(low[r], factors), d, target);
      hn::StoreU(hn::Mul(high[r], factors), d, target + lanes);
    }
  }
}

// target[r][c] += the sum of weights[r][j] * source[j][c] over j < seen + r, ascending. One row of weights
// sees one more row of `source` than the row before it.
template <std::size_t rows>
void add_weighted_rows(Rows weights, Rows source, std::size_t columns, float* target,
                       std::size_t target_stride, std::size_t seen) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t c = 0;
  for (; c + lanes <= columns; c += lanes) {
    hn::Vec<decltype(d)> sums[rows];
    for (std::size_t r = 0; r < rows; ++r) sums[r] = hn::LoadU(d, target + r * target_stride + c);
    for (std::size_t j = 0; j < seen; ++j) {
      const auto values = hn::LoadU(d, source.row(j) + c);
      for (std::size_t r = 0; r < rows; ++r)
        sums[r] = hn::Add(sums[r], hn::Mul(hn::Set(d, weights.row(r)[j]), values));
    }
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t j = seen; j < seen + r; ++j)
        sums[r] = hn::Add(sums[r], hn::Mul(hn::Set(d, weights.row(r)[j]), hn::LoadU(d, source.row(j) + c)));
      hn::StoreU(sums[r], d, target + r * target_stride + c);
    }
  }
  for (std::size_t r = 0; r < rows && c < columns; ++r) {
    for (std::size_t j = 0; j < seen + r; ++j) {
      for (std::size_t i = c; i < columns; ++i)
        target[r * target_stride + i] += weights.row(r)[j] * source.row(j)[i];
    }
  }
}

// target[j][c] += the sum of weights[r][j] * source[r][c] over the rows r that see j, ascending: row r sees
// j < seen + r.
template <std::size_t rows>
void add_outer_products(Rows weights, Rows source, std::size_t columns, float* target,
                        std::size_t target_stride, std::size_t seen) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t c = 0;
  for (; c + lanes <= columns; c += lanes) {
    hn::Vec<decltype(d)> values[rows];
    for (std::size_t r = 0; r < rows; ++r) values[r] = hn::LoadU(d, source.row(r) + c);
    for (std::size_t j = 0; j < seen + rows - 1; ++j) {
      auto sum = hn::LoadU(d, target + j * target_stride + c);
      for (std::size_t r = j < seen ? 0 : j - seen + 1; r < rows; ++r)
        sum = hn::Add(sum, hn::Mul(hn::Set(d, weights.row(r)[j]), values[r]));
      hn::StoreU(sum, d, target + j * target_stride + c);
    }
  }
  for (std::size_t j = 0; j < seen + rows - 1 && c < columns; ++j) {
    for (std::size_t r = j < seen ? 0 : j - seen + 1; r < rows; ++r) {
      for (std::size_t i = c; i < columns; ++i)
        target[j * target_stride + i] += weights.row(r)[j] * source.row(r)[i];
    }
  }
}

// Applies dropout to probabilities or to their gradients. Element j has the index `first + j`.
void drop_row(const Dropout& dropout, std::uint64_t first, float* row, std::size_t count) {
  if (!dropout.active()) return;
  for (std::size_t j = 0; j < count; ++j) row[j] = definitions::dropped(dropout, first + j, row[j]);
}

// Calls f(sample, head, workspace of this thread) for `heads` heads of all samples, in parallel.
template <typename Function>
void for_heads(const Attention& shape, std::size_t heads, std::byte* workspace, int threads, Function f) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (std::size_t sample = 0; sample < shape.batch; ++sample) {
    for (std::size_t head = 0; head < heads; ++head)
      f(sample, head, reinterpret_cast<float*>(workspace) + thread_index() * attention_count(shape));
  }
}

// Calls f.operator()<rows>(first row) for all rows of queries, in blocks.
template <typename Function>
void for_row_blocks(std::size_t sequence, Function f) {
  std::size_t i = 0;
  for (; i + kRows <= sequence; i += kRows) f.template operator()<kRows>(i);
  for (; i < sequence; ++i) f.template operator()<1>(i);
}

std::size_t HostOperations::prepare_attention(const Attention& shape) {
  return static_cast<std::size_t>(threads_) * attention_count(shape) * sizeof(float);
}

void HostOperations::run(const AttentionForward& a) {
  const Attention& shape = a.shape;
  const std::size_t columns = shape.head_columns();
  const std::size_t sequence = shape.sequence;
  const std::size_t stride = padded(shape);
  const float factor = definitions::attention_factor(columns);
  const auto one_head = [&, columns, sequence, stride, factor](std::size_t sample, std::size_t head,
                                                               float* keys) {
    float* weights = keys + 2 * columns * stride;
    const HeadPlaces in = shape.places(sample, head);
    transpose(a.qkv + in.key, in.key_stride, sequence, columns, keys, stride);
    SoftmaxRow* softmax = a.softmax + (sample * shape.heads + head) * sequence;
    float* output = a.output + sample * sequence * shape.hidden + head * columns;
    for_row_blocks(sequence, [&]<std::size_t rows>(std::size_t first) {
      dots_with_columns<rows>({a.qkv + in.query + first * in.query_stride, in.query_stride}, columns,
                              {keys, stride}, factor, weights, first + rows);
      for (std::size_t r = 0; r < rows; ++r) {
        const std::size_t i = first + r;
        const std::size_t seen = i + 1;
        float* row_weights = weights + r * stride;
        SoftmaxRow row{*std::max_element(row_weights, row_weights + seen), 1.0F};
        for (std::size_t j = 0; j < seen; ++j) row_weights[j] = definitions::probability(row_weights[j], row);
        row.inverse = 1.0F / lane_sum(seen, [row_weights](std::size_t j) { return row_weights[j]; });
        softmax[i] = row;
        for (std::size_t j = 0; j < seen; ++j) row_weights[j] *= row.inverse;
        drop_row(shape.dropout, shape.dropout_index(sample, head, i), row_weights, seen);
        std::fill_n(output + i * shape.hidden, columns, 0.0F);
      }
      add_weighted_rows<rows>({weights, stride}, {a.qkv + in.value, in.key_stride}, columns,
                              output + first * shape.hidden, shape.hidden, first + 1);
    });
  };
  for_heads(shape, shape.heads, a.workspace, threads_, one_head);
}

void HostOperations::run(const AttentionBackward& a) {
  const Attention& shape = a.shape;
  const std::size_t columns = shape.head_columns();
  const std::size_t sequence = shape.sequence;
  const std::size_t stride = padded(shape);
  const float factor = definitions::attention_factor(columns);
  // The gradients of a key and its value get those of each head that shares them, in order.
  const auto one_head = [&, columns, sequence, stride, factor](std::size_t sample, std::size_t head,
                                                               float* keys) {
    float* values = keys + columns * stride;
    float* weights = values + columns * stride;
    float* weight_gradients = weights + kRows * stride;
    const HeadPlaces in = shape.places(sample, head);
    transpose(a.qkv + in.key, in.key_stride, sequence, columns, keys, stride);
    transpose(a.qkv + in.value, in.key_stride, sequence, columns, values, stride);

    float* d_query = a.qkv_gradient + in.query;
    float* d_key = a.qkv_gradient + in.key;
    float* d_value = a.qkv_gradient + in.value;
    const bool is_first = head % shape.heads_of_key() == 0;
    for (std::size_t i = 0; i < sequence; ++i) {
      std::fill_n(d_query + i * in.query_stride, columns, 0.0F);
      if (is_first) std::fill_n(d_key + i * in.key_stride, columns, 0.0F);
      if (is_first) std::fill_n(d_value + i * in.key_stride, columns, 0.0F);
    }

    const SoftmaxRow* softmax = a.softmax + (sample * shape.heads + head) * sequence;
    for_row_blocks(sequence, [&]<std::size_t rows>(std::size_t first) {
      const Rows query{a.qkv + in.query + first * in.query_stride, in.query_stride};
      const Rows d_out{a.gradient + (sample * sequence + first) * shape.hidden + head * columns,
                       shape.hidden};
      // The probabilities p again, and dp[j] = d_out . value[j], back through dropout.
      dots_with_columns<rows>(query, columns, {keys, stride}, factor, weights, first + rows);
      dots_with_columns<rows>(d_out, columns, {values, stride}, 1.0F, weight_gradients, first + rows);
      for (std::size_t r = 0; r < rows; ++r) {
        const std::size_t i = first + r;
        const std::size_t seen = i + 1;
        float* p = weights + r * stride;
        float* dp = weight_gradients + r * stride;
        const SoftmaxRow row = softmax[i];
        const std::uint64_t dropout_index = shape.dropout_index(sample, head, i);
        for (std::size_t j = 0; j < seen; ++j) p[j] = definitions::probability(p[j], row);
        drop_row(shape.dropout, dropout_index, dp, seen);
        const float mean = lane_sum(seen, [=](std::size_t j) { return p[j] * dp[j]; });
        for (std::size_t j = 0; j < seen; ++j) dp[j] = definitions::score_gradient(p[j], dp[j], mean, factor);
        drop_row(shape.dropout, dropout_index, p, seen);
      }
      const Rows d_scores{weight_gradients, stride};
      add_weighted_rows<rows>(d_scores, {a.qkv + in.key, in.key_stride}, columns,
                              d_query + first * in.query_stride, in.query_stride, first + 1);
      add_outer_products<rows>(d_scores, query, columns, d_key, in.key_stride, first + 1);
      add_outer_products<rows>({weights, stride}, d_out, columns, d_value, in.key_stride, first + 1);
    });
  };
  for_heads(shape, shape.kv_head_count(), a.workspace, threads_,
            [&](std::size_t sample, std::size_t key, float* workspace) {
              for (std::size_t i = 0; i < shape.heads_of_key(); ++i)
                one_head(sample, key * shape.heads_of_key() + i, workspace);
            });
}

// --- the loss ---

void HostOperations::run(const CrossEntropy& a) {
  const LogitsPart& part = a.part;
  const TokenRange range = part.range;
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < part.rows; ++r) {
    float* row = part.logits + r * part.columns;
    const float largest = range.count > 0 ? *std::max_element(row, row + range.count) : -INFINITY;
    const std::size_t target = part.targets[r];
    a.losses[r].largest = largest;
    a.losses[r].target = range.has(target) ? row[target - range.first] - largest : 0.0F;
    for (std::size_t v = 0; v < range.count; ++v) row[v] = definitions::exponential(row[v] - largest);
    a.losses[r].sum = lane_sum(range.count, [row](std::size_t v) { return row[v]; });
  }
}

void HostOperations::run(const CrossEntropyBackward& a) {
  const LogitsPart& part = a.part;
  const TokenRange range = part.range;
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < part.rows; ++r) {
    float* row = part.logits + r * part.columns;
    const std::size_t target = part.targets[r];
    const definitions::WholeRow whole =
        definitions::whole_row(a.losses + r, part.rows, a.parts, target / part.columns);
    a.row_losses[r] = whole.loss;
    const float scale =
        definitions::softmax_scale(whole, a.losses[a.index * part.rows + r].largest, a.factor);
    for (std::size_t v = 0; v < range.count; ++v) row[v] *= scale;
    if (range.has(target)) row[target - range.first] -= a.factor;
    std::fill(row + range.count, row + part.columns, 0.0F);
  }
}

}  // namespace

std::unique_ptr<Operations> make_operations(std::unique_ptr<MatMul>* matmul, int threads) {
  return std::make_unique<HostOperations>(std::move(*matmul), threads);
}

}  // namespace HWY_NAMESPACE
}  // namespace forebay::gpt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace forebay::gpt {

HWY_EXPORT(make_operations);

std::unique_ptr<Operations> create_host_operations(std::unique_ptr<MatMul> matmul, int threads) {
  return HWY_DYNAMIC_DISPATCH(make_operations)(&matmul, threads);
}

void set_compute_threads(int count) {
#if defined(_OPENMP)
  omp_set_dynamic(0);  // oneDNN computes wrong results with fewer threads than it prepared for.
  omp_set_num_threads(count);
  int got = 0;
#pragma omp parallel
  {
#pragma omp single
    got = omp_get_num_threads();
  }
  if (got != count) {
    throw Error(
        StatusCode::kUnavailable,
        std::to_string(count) + " compute threads were asked for and OpenMP gives " + std::to_string(got) +
            "; unset OMP_THREAD_LIMIT and OMP_MAX_ACTIVE_LEVELS, or give --threads " + std::to_string(got));
  }
#else
  static_cast<void>(count);
#endif
}

int default_compute_threads() {
#if defined(_OPENMP)
  if (omp_get_max_active_levels() < 1) return 1;
  return std::min(omp_get_num_procs(), omp_get_thread_limit());
#else
  return 1;
#endif
}

double mean_loss(std::span<const RowLoss> rows) {
  double total = 0;
  for (const RowLoss& row : rows) total += std::log(double{row.sum}) - double{row.target};
  return total / static_cast<double>(rows.size());
}

}  // namespace forebay::gpt
#endif
