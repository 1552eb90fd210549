// The bodies of the model's kernels, for nvcc and for a host compiler.
//
// A body is written for a whole block, as phases: block.each(f) calls f(thread) for every thread of it, and
// all threads finish f before the next phase begins. So the host runs a block as plain loops, and no thread
// can miss a barrier. A thread keeps its own values between phases in a Private, and shares values in Shared.
// Sums are made in the order of definitions.h.
#pragma once

#include "cuda/launches.h"
#include "model/definitions.h"

// Marks a kernel's code. Under nvcc it is for the device only.
#ifdef __CUDACC__
#define FOREBAY_KERNEL __device__
#else
#define FOREBAY_KERNEL
#endif

namespace forebay::gpt::kernels {

using definitions::kLanes;

inline constexpr std::size_t kRowsPerBlock = kThreads / kLanes;  // For kernels with one warp per row.

FOREBAY_KERNEL inline float load(Operand operand, std::size_t i) {
  switch (operand.type) {
    case DataType::kBfloat16:
      return definitions::from_bfloat16(static_cast<const std::uint16_t*>(operand.data)[i]);
    case DataType::kFloat16:
      return definitions::from_float16(static_cast<const std::uint16_t*>(operand.data)[i]);
    default:
      return static_cast<const float*>(operand.data)[i];
  }
}

FOREBAY_KERNEL inline void store(DataType type, void* target, std::size_t i, float value) {
  switch (type) {
    case DataType::kBfloat16:
      static_cast<std::uint16_t*>(target)[i] = definitions::to_bfloat16(value);
      return;
    case DataType::kFloat16:
      static_cast<std::uint16_t*>(target)[i] = definitions::to_float16(value);
      return;
    default:
      static_cast<float*>(target)[i] = value;
  }
}

// Calls f(i) for i < count, over all blocks of the grid.
template <typename Block, typename Function>
FOREBAY_KERNEL void for_elements(Block& block, std::size_t count, Function f) {
  block.each([&](unsigned thread) {
    const std::size_t stride = std::size_t{block.count()} * kThreads;
    for (std::size_t i = std::size_t{block.index()} * kThreads + thread; i < count; i += stride) f(i);
  });
}

struct Nothing {};

// --- element by element ---

struct Widen {
  using Launch = WidenLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for_elements(block, a.count, [&](std::size_t i) { a.target[i] = load(a.source, i); });
  }
};

struct Narrow {
  using Launch = NarrowLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for_elements(block, a.count, [&](std::size_t i) {
      const float before = a.accumulate ? load({a.target, a.type}, i) : 0.0F;
      store(a.type, a.target, i, a.accumulate ? before + a.source[i] : a.source[i]);
    });
  }
};

struct AddBias {
  using Launch = AddBiasLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for_elements(block, a.rows * a.columns, [&](std::size_t i) { a.matrix[i] += a.bias[i % a.columns]; });
  }
};

struct Add {
  using Launch = AddLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for_elements(block, a.count, [&](std::size_t i) { a.target[i] = a.a[i] + a.b[i]; });
  }
};

struct Drop {
  using Launch = DropLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for_elements(block, a.count, [&](std::size_t i) {
      a.target[i] = definitions::dropped(a.dropout, a.first + i, a.source[i]);
    });
  }
};

struct Gelu {
  using Launch = GeluLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for_elements(block, a.count, [&](std::size_t i) { a.target[i] = definitions::gelu(a.input[i]); });
  }
};

struct GeluBackward {
  using Launch = GeluLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for_elements(block, a.count, [&](std::size_t i) { a.target[i] *= definitions::gelu_slope(a.input[i]); });
  }
};

// --- embedding ---

struct Embed {
  using Launch = EmbedLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for_elements(block, a.rows * a.hidden, [&](std::size_t i) {
      const std::size_t r = i / a.hidden, c = i % a.hidden;
      const std::size_t token = a.tokens_in[r];
      a.output[i] = a.range.has(token) ? a.tokens[(token - a.range.first) * a.hidden + c] : 0.0F;
    });
  }
};

// One block per token of the vocabulary. It visits the rows that have the token, in ascending order.
struct EmbedTokensBackward {
  using Launch = EmbedTokensBackwardLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for (std::size_t v = block.index(); v < a.range.count; v += block.count()) {
      block.each([&](unsigned thread) {
        for (std::size_t c = thread; c < a.hidden; c += kThreads) {
          float sum = 0;
          for (std::size_t r = 0; r < a.rows; ++r) {
            if (a.tokens_in[r] == a.range.first + v) sum += a.gradient[r * a.hidden + c];
          }
          a.tokens_gradient[v * a.hidden + c] = sum;
        }
      });
    }
  }
};

struct EmbedPositionsBackward {
  using Launch = EmbedPositionsBackwardLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    for_elements(block, a.sequence * a.hidden, [&](std::size_t i) {
      float sum = 0;
      for (std::size_t r = i / a.hidden; r < a.rows; r += a.sequence)
        sum += a.gradient[r * a.hidden + i % a.hidden];
      a.positions_gradient[i] = sum;
    });
  }
};

// --- sums of columns: a thread adds every eighth row of one column, into four of the lanes ---

struct ColumnSumsShared {
  float lanes[kLanes][kSumColumns];
};

template <typename Block, typename Function>
FOREBAY_KERNEL void column_sums(Block& block, ColumnSumsShared& shared, std::size_t rows, std::size_t columns,
                                float* sums, Function f) {
  constexpr std::size_t kRowThreads = kThreads / kSumColumns;
  constexpr std::size_t kLanesOfThread = kLanes / kRowThreads;
  for (std::size_t first = block.index() * kSumColumns; first < columns;
       first += block.count() * kSumColumns) {
    block.each([&](unsigned thread) {
      const std::size_t c = thread % kSumColumns, begin = thread / kSumColumns;
      float partial[kLanesOfThread] = {};
      if (first + c < columns) {
        for (std::size_t r = begin; r < rows; r += kLanes) {
          for (std::size_t k = 0; k < kLanesOfThread; ++k) {
            if (r + k * kRowThreads < rows) partial[k] += f(r + k * kRowThreads, first + c);
          }
        }
      }
      for (std::size_t k = 0; k < kLanesOfThread; ++k) shared.lanes[begin + k * kRowThreads][c] = partial[k];
    });
    for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
      block.each([&](unsigned thread) {
        const std::size_t c = thread % kSumColumns;
        for (std::size_t lane = thread / kSumColumns; lane < width; lane += kRowThreads)
          shared.lanes[lane][c] += shared.lanes[lane + width][c];
      });
    }
    block.each([&](unsigned thread) {
      if (thread < kSumColumns && first + thread < columns) sums[first + thread] = shared.lanes[0][thread];
    });
  }
}

struct ColumnSums {
  using Launch = ColumnSumsLaunch;
  using Shared = ColumnSumsShared;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared& shared) {
    column_sums(block, shared, a.rows, a.columns, a.sums,
                [&](std::size_t r, std::size_t c) { return a.matrix[r * a.columns + c]; });
  }
};

struct GainBackward {
  using Launch = GainBackwardLaunch;
  using Shared = ColumnSumsShared;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared& shared) {
    const LayerNorm& n = a.norm;
    column_sums(block, shared, n.rows, n.hidden, a.gain_gradient, [&](std::size_t r, std::size_t c) {
      const std::size_t i = r * n.hidden + c;
      return a.gradient[i] * definitions::normalised(n.input[i], n.mean[r], n.inverse[r]);
    });
  }
};

// --- rows: one warp each ---

struct RowShared {
  float values[kThreads];
};

// Calls f(first row of the block) for the rows of the grid. A thread's row is the first one + thread /
// kLanes; it may lie past the last row.
template <typename Block, typename Function>
FOREBAY_KERNEL void for_rows(Block& block, std::size_t rows, Function f) {
  for (std::size_t first = block.index() * kRowsPerBlock; first < rows;
       first += block.count() * kRowsPerBlock) {
    f(first);
  }
}

// The sum by lanes of f(row, 0) ... f(row, count - 1) for every row of the block. Every thread of a row gets
// it.
template <typename Block, typename Function>
FOREBAY_KERNEL void row_sums(Block& block, RowShared& shared, std::size_t first, std::size_t rows,
                             std::size_t count, typename Block::template Private<float>& sums, Function f) {
  block.each([&](unsigned thread) {
    const std::size_t row = first + thread / kLanes;
    float sum = 0;
    if (row < rows) {
      for (std::size_t c = thread % kLanes; c < count; c += kLanes) sum += f(thread, row, c);
    }
    shared.values[thread] = sum;
  });
  block.fold(shared.values);
  block.each([&](unsigned thread) { sums[thread] = shared.values[thread / kLanes * kLanes]; });
}

struct NormForward {
  using Launch = LayerNormLaunch;
  using Shared = RowShared;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared& shared) {
    const LayerNorm& n = a.norm;
    const float count = static_cast<float>(n.hidden);
    typename Block::template Private<float> mean, variance;
    for_rows(block, n.rows, [&](std::size_t first) {
      row_sums(block, shared, first, n.rows, n.hidden, mean,
               [&](unsigned, std::size_t r, std::size_t c) { return n.input[r * n.hidden + c]; });
      block.each([&](unsigned thread) { mean[thread] /= count; });
      row_sums(block, shared, first, n.rows, n.hidden, variance,
               [&](unsigned thread, std::size_t r, std::size_t c) {
                 return definitions::squared_deviation(n.input[r * n.hidden + c], mean[thread]);
               });
      block.each([&](unsigned thread) {
        const std::size_t r = first + thread / kLanes;
        if (r >= n.rows) return;
        const float inverse = definitions::inverse_deviation(variance[thread] / count);
        for (std::size_t c = thread % kLanes; c < n.hidden; c += kLanes) {
          const std::size_t i = r * n.hidden + c;
          a.output[i] = definitions::layer_norm(n.input[i], mean[thread], inverse, a.gain[c], a.bias[c]);
        }
        if (thread % kLanes == 0) {
          n.mean[r] = mean[thread];
          n.inverse[r] = inverse;
        }
      });
    });
  }
};

struct NormBackward {
  using Launch = LayerNormBackwardLaunch;
  using Shared = RowShared;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared& shared) {
    const LayerNorm& n = a.norm;
    const float count = static_cast<float>(n.hidden);
    typename Block::template Private<float> mean_g, mean_gx;
    for_rows(block, n.rows, [&](std::size_t first) {
      row_sums(block, shared, first, n.rows, n.hidden, mean_g, [&](unsigned, std::size_t r, std::size_t c) {
        return a.gradient[r * n.hidden + c] * a.gain[c];
      });
      row_sums(block, shared, first, n.rows, n.hidden, mean_gx, [&](unsigned, std::size_t r, std::size_t c) {
        const std::size_t i = r * n.hidden + c;
        return a.gradient[i] * a.gain[c] * definitions::normalised(n.input[i], n.mean[r], n.inverse[r]);
      });
      block.each([&](unsigned thread) {
        const std::size_t r = first + thread / kLanes;
        if (r >= n.rows) return;
        for (std::size_t c = thread % kLanes; c < n.hidden; c += kLanes) {
          const std::size_t i = r * n.hidden + c;
          a.input_gradient[i] +=
              definitions::layer_norm_slope(n.input[i], n.mean[r], n.inverse[r], a.gradient[i] * a.gain[c],
                                            mean_g[thread] / count, mean_gx[thread] / count);
        }
      });
    });
  }
};

struct CrossEntropy {
  using Launch = CrossEntropyLaunch;
  using Shared = RowShared;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared& shared) {
    const LogitsPart& part = a.part;
    typename Block::template Private<float> largest, target, sum;
    for_rows(block, part.rows, [&](std::size_t first) {
      block.each([&](unsigned thread) {
        const std::size_t r = first + thread / kLanes;
        if (r >= part.rows) return;
        const float* row = part.logits + r * part.columns;
        float found = -INFINITY;
        for (std::size_t v = thread % kLanes; v < part.range.count; v += kLanes)
          found = definitions::larger(found, row[v]);
        shared.values[thread] = found;
        const std::size_t token = part.targets[r];
        target[thread] = part.range.has(token) ? row[token - part.range.first] : 0.0F;
      });
      block.each([&](unsigned thread) {
        if (first + thread / kLanes >= part.rows) return;
        const float* found = shared.values + thread / kLanes * kLanes;
        largest[thread] = found[0];
        for (std::size_t lane = 1; lane < kLanes; ++lane)
          largest[thread] = definitions::larger(largest[thread], found[lane]);
      });
      row_sums(block, shared, first, part.rows, part.range.count, sum,
               [&](unsigned thread, std::size_t r, std::size_t v) {
                 float& logit = part.logits[r * part.columns + v];
                 logit = definitions::exponential(logit - largest[thread]);
                 return logit;
               });
      block.each([&](unsigned thread) {
        const std::size_t r = first + thread / kLanes;
        if (r >= part.rows || thread % kLanes != 0) return;
        const bool has_target = part.range.has(part.targets[r]);
        a.losses[r] = {largest[thread], sum[thread], has_target ? target[thread] - largest[thread] : 0.0F};
      });
    });
  }
};

struct CrossEntropyBackward {
  using Launch = CrossEntropyBackwardLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    const LogitsPart& part = a.part;
    for_rows(block, part.rows, [&](std::size_t first) {
      block.each([&](unsigned thread) {
        const std::size_t r = first + thread / kLanes;
        if (r >= part.rows) return;
        const std::size_t target = part.targets[r];
        const definitions::WholeRow whole =
            definitions::whole_row(a.losses + r, part.rows, a.parts, target / part.columns);
        const float scale =
            definitions::softmax_scale(whole, a.losses[a.index * part.rows + r].largest, a.factor);
        float* row = part.logits + r * part.columns;
        for (std::size_t v = thread % kLanes; v < part.columns; v += kLanes) {
          const float gradient = v < part.range.count ? row[v] * scale : 0.0F;
          row[v] = part.range.first + v == target ? gradient - a.factor : gradient;
        }
        if (thread % kLanes == 0) a.row_losses[r] = whole.loss;
      });
    });
  }
};

// --- attention: one block per query; the backward pass also has one per key ---

struct AttentionShared {
  float values[kThreads];
};

// One query or key: row `position` of head `head` of sample `sample`, and the `index`-th of all.
struct AttentionRow {
  std::size_t sample, head, position, index;
};

FOREBAY_KERNEL inline AttentionRow attention_row(const Attention& shape, std::size_t index) {
  const std::size_t head = index / shape.sequence;
  return {head / shape.heads, head % shape.heads, index % shape.sequence, index};
}

// Column 0 of a head in row `position` of [batch, sequence, hidden], or of [.., 3 hidden] for qkv.
FOREBAY_KERNEL inline std::size_t place_of(const Attention& shape, const AttentionRow& row,
                                           std::size_t position) {
  return (row.sample * shape.sequence + position) * shape.hidden + row.head * shape.head_columns();
}
FOREBAY_KERNEL inline std::size_t qkv_place_of(const Attention& shape, const AttentionRow& row,
                                               std::size_t position) {
  return (row.sample * shape.sequence + position) * 3 * shape.hidden + row.head * shape.head_columns();
}

FOREBAY_KERNEL inline float dot(const float* a, const float* b, std::size_t count) {
  float sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Applies dropout to the probability with which query `i` of the row's head sees position `j`, or to its
// gradient.
FOREBAY_KERNEL inline float after_dropout(const Attention& shape, const AttentionRow& row, std::size_t i,
                                          std::size_t j, float value) {
  if (!shape.dropout.active()) return value;
  return definitions::dropped(shape.dropout, shape.dropout_index(row.sample, row.head, i) + j, value);
}

// The sum by lanes of f(0) ... f(count - 1), into shared.values[0].
template <typename Block, typename Function>
FOREBAY_KERNEL void block_sum(Block& block, AttentionShared& shared, std::size_t count, Function f) {
  block.each([&](unsigned thread) {
    float sum = 0;
    if (thread < kLanes) {
      for (std::size_t i = thread; i < count; i += kLanes) sum += f(i);
    }
    shared.values[thread] = sum;
  });
  block.fold(shared.values);
}

struct AttentionForward {
  using Launch = AttentionLaunch;
  using Shared = AttentionShared;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared& shared) {
    const std::size_t columns = a.shape.head_columns();
    const std::size_t hidden = a.shape.hidden;
    const float factor = definitions::attention_factor(columns);
    float* weights = a.scores + block.index() * 2 * a.shape.sequence;
    for (std::size_t index = block.index(); index < a.shape.softmax_rows(); index += block.count()) {
      const AttentionRow row = attention_row(a.shape, index);
      const std::size_t seen = row.position + 1;
      const float* query = a.qkv + qkv_place_of(a.shape, row, row.position);
      block.each([&](unsigned thread) {
        float largest = -INFINITY;
        for (std::size_t j = thread; j < seen; j += kThreads) {
          const float* key = a.qkv + qkv_place_of(a.shape, row, j) + hidden;
          weights[j] = dot(query, key, columns) * factor;
          largest = definitions::larger(largest, weights[j]);
        }
        shared.values[thread] = largest;
      });
      for (unsigned width = kThreads / 2; width > 0; width /= 2) {
        block.each([&](unsigned thread) {
          if (thread < width)
            shared.values[thread] = definitions::larger(shared.values[thread], shared.values[thread + width]);
        });
      }
      typename Block::template Private<SoftmaxRow> softmax;
      block.each([&](unsigned thread) {
        softmax[thread] = {shared.values[0], 1.0F};
        for (std::size_t j = thread; j < seen; j += kThreads)
          weights[j] = definitions::probability(weights[j], softmax[thread]);
      });
      block_sum(block, shared, seen, [&](std::size_t j) { return weights[j]; });
      block.each([&](unsigned thread) {
        softmax[thread].inverse = 1.0F / shared.values[0];
        if (thread == 0) a.softmax[index] = softmax[thread];
        for (std::size_t j = thread; j < seen; j += kThreads)
          weights[j] = after_dropout(a.shape, row, row.position, j, weights[j] * softmax[thread].inverse);
      });
      block.each([&](unsigned thread) {
        for (std::size_t c = thread; c < columns; c += kThreads) {
          const float* value = a.qkv + qkv_place_of(a.shape, row, 0) + 2 * hidden + c;
          float sum = 0;
          for (std::size_t j = 0; j < seen; ++j) sum += weights[j] * value[j * 3 * hidden];
          a.output[place_of(a.shape, row, row.position) + c] = sum;
        }
      });
    }
  }
};

// The gradient of each query, and the mean that the gradient of its softmax needs.
struct AttentionBackwardQueries {
  using Launch = AttentionBackwardLaunch;
  using Shared = AttentionShared;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared& shared) {
    const std::size_t columns = a.shape.head_columns();
    const std::size_t hidden = a.shape.hidden;
    const float factor = definitions::attention_factor(columns);
    float* weights = a.scores + block.index() * 2 * a.shape.sequence;
    float* slopes = weights + a.shape.sequence;
    for (std::size_t index = block.index(); index < a.shape.softmax_rows(); index += block.count()) {
      const AttentionRow row = attention_row(a.shape, index);
      const std::size_t seen = row.position + 1;
      const std::size_t query_place = qkv_place_of(a.shape, row, row.position);
      const float* output_gradient = a.gradient + place_of(a.shape, row, row.position);
      block.each([&](unsigned thread) {
        for (std::size_t j = thread; j < seen; j += kThreads) {
          const float* key = a.qkv + qkv_place_of(a.shape, row, j) + hidden;
          weights[j] =
              definitions::probability(dot(a.qkv + query_place, key, columns) * factor, a.softmax[index]);
          slopes[j] =
              after_dropout(a.shape, row, row.position, j, dot(output_gradient, key + hidden, columns));
        }
      });
      block_sum(block, shared, seen, [&](std::size_t j) { return weights[j] * slopes[j]; });
      block.each([&](unsigned thread) {
        if (thread == 0) a.means[index] = shared.values[0];
        for (std::size_t j = thread; j < seen; j += kThreads)
          slopes[j] = definitions::score_gradient(weights[j], slopes[j], shared.values[0], factor);
      });
      block.each([&](unsigned thread) {
        for (std::size_t c = thread; c < columns; c += kThreads) {
          const float* key = a.qkv + qkv_place_of(a.shape, row, 0) + hidden + c;
          float sum = 0;
          for (std::size_t j = 0; j < seen; ++j) sum += slopes[j] * key[j * 3 * hidden];
          a.qkv_gradient[query_place + c] = sum;
        }
      });
    }
  }
};

// The gradients of each key and its value, from the queries that see them.
struct AttentionBackwardKeys {
  using Launch = AttentionBackwardLaunch;
  using Shared = Nothing;
  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& a, Shared&) {
    const std::size_t columns = a.shape.head_columns();
    const std::size_t hidden = a.shape.hidden;
    const float factor = definitions::attention_factor(columns);
    float* weights = a.scores + block.index() * 2 * a.shape.sequence;
    float* slopes = weights + a.shape.sequence;
    for (std::size_t index = block.index(); index < a.shape.softmax_rows(); index += block.count()) {
      const AttentionRow row = attention_row(a.shape, index);
      const std::size_t first_of_head = index - row.position;
      const std::size_t key_place = qkv_place_of(a.shape, row, row.position) + hidden;
      block.each([&](unsigned thread) {
        for (std::size_t i = row.position + thread; i < a.shape.sequence; i += kThreads) {
          const float* query = a.qkv + qkv_place_of(a.shape, row, i);
          const float* output_gradient = a.gradient + place_of(a.shape, row, i);
          const float p = definitions::probability(dot(query, a.qkv + key_place, columns) * factor,
                                                   a.softmax[first_of_head + i]);
          const float dp = after_dropout(a.shape, row, i, row.position,
                                         dot(output_gradient, a.qkv + key_place + hidden, columns));
          weights[i] = after_dropout(a.shape, row, i, row.position, p);
          slopes[i] = definitions::score_gradient(p, dp, a.means[first_of_head + i], factor);
        }
      });
      block.each([&](unsigned thread) {
        for (std::size_t c = thread; c < columns; c += kThreads) {
          const float* query = a.qkv + qkv_place_of(a.shape, row, 0) + c;
          const float* output_gradient = a.gradient + place_of(a.shape, row, 0) + c;
          float d_key = 0, d_value = 0;
          for (std::size_t i = row.position; i < a.shape.sequence; ++i) {
            d_value += weights[i] * output_gradient[i * hidden];
            d_key += slopes[i] * query[i * 3 * hidden];
          }
          a.qkv_gradient[key_place + c] = d_key;
          a.qkv_gradient[key_place + hidden + c] = d_value;
        }
      });
    }
  }
};

// --- the plain product: one block per tile of c, 4 x 4 elements per thread, over the depth in ascending
// order ---

struct Product {
  using Launch = ProductLaunch;
  static constexpr std::size_t kEdge = 4;  // Elements of a thread, per dimension.
  static_assert(kTile / kEdge * (kTile / kEdge) == kThreads);
  struct Shared {
    float a[kTileDepth][kTile];
    float b[kTileDepth][kTile];
  };
  struct Sums {
    float at[kEdge][kEdge];
  };

  template <typename Block>
  static FOREBAY_KERNEL void run(Block& block, const Launch& p, Shared& shared) {
    const ProductShape& s = p.shape;
    const std::size_t tile_columns = (s.columns + kTile - 1) / kTile;
    const std::size_t tile_count = (s.rows + kTile - 1) / kTile * tile_columns;
    typename Block::template Private<Sums> sums;
    for (std::size_t tile = block.index(); tile < tile_count; tile += block.count()) {
      const std::size_t row = tile / tile_columns * kTile;
      const std::size_t column = tile % tile_columns * kTile;
      block.each([&](unsigned thread) { sums[thread] = {}; });
      for (std::size_t first = 0; first < s.depth; first += kTileDepth) {
        const std::size_t depth = s.depth - first < kTileDepth ? s.depth - first : kTileDepth;
        block.each([&](unsigned thread) { load_tiles(p, thread, row, column, first, shared); });
        block.each([&](unsigned thread) {
          const std::size_t r = thread / (kTile / kEdge) * kEdge, c = thread % (kTile / kEdge) * kEdge;
          for (std::size_t d = 0; d < depth; ++d) {
            for (std::size_t i = 0; i < kEdge; ++i) {
              for (std::size_t j = 0; j < kEdge; ++j)
                sums[thread].at[i][j] += shared.a[d][r + i] * shared.b[d][c + j];
            }
          }
        });
      }
      block.each([&](unsigned thread) {
        const std::size_t r = row + thread / (kTile / kEdge) * kEdge;
        const std::size_t c = column + thread % (kTile / kEdge) * kEdge;
        for (std::size_t i = 0; i < kEdge && r + i < s.rows; ++i) {
          for (std::size_t j = 0; j < kEdge && c + j < s.columns; ++j)
            p.c[(r + i) * s.columns + c + j] = sums[thread].at[i][j];
        }
      });
    }
  }

  // Reads 0 outside the matrix. Neighbouring threads read neighbouring elements.
  static FOREBAY_KERNEL void load_tiles(const Launch& p, unsigned thread, std::size_t row, std::size_t column,
                                        std::size_t first, Shared& shared) {
    const ProductShape& s = p.shape;
    for (std::size_t i = thread; i < kTile * kTileDepth; i += kThreads) {
      const bool along_rows = s.transpose_a;
      const std::size_t d = along_rows ? i / kTile : i % kTileDepth;
      const std::size_t r = along_rows ? i % kTile : i / kTileDepth;
      const bool inside = row + r < s.rows && first + d < s.depth;
      const std::size_t place = along_rows ? (first + d) * s.rows + row + r : (row + r) * s.depth + first + d;
      shared.a[d][r] = inside ? p.a[place] : 0.0F;
    }
    for (std::size_t i = thread; i < kTile * kTileDepth; i += kThreads) {
      const bool along_columns = !s.transpose_b;
      const std::size_t d = along_columns ? i / kTile : i % kTileDepth;
      const std::size_t c = along_columns ? i % kTile : i / kTileDepth;
      const bool inside = column + c < s.columns && first + d < s.depth;
      const std::size_t place =
          along_columns ? (first + d) * s.columns + column + c : (column + c) * s.depth + first + d;
      shared.b[d][c] = inside ? load(p.b, place) : 0.0F;
    }
  }
};

// Every kernel: its name in an image, and its body.
#define FOREBAY_GPT_KERNELS(ROW)                                        \
  ROW(forebay_gpt_widen, Widen)                                         \
  ROW(forebay_gpt_narrow, Narrow)                                       \
  ROW(forebay_gpt_add_bias, AddBias)                                    \
  ROW(forebay_gpt_add, Add)                                             \
  ROW(forebay_gpt_drop, Drop)                                           \
  ROW(forebay_gpt_gelu, Gelu)                                           \
  ROW(forebay_gpt_gelu_backward, GeluBackward)                          \
  ROW(forebay_gpt_embed, Embed)                                         \
  ROW(forebay_gpt_embed_tokens_backward, EmbedTokensBackward)           \
  ROW(forebay_gpt_embed_positions_backward, EmbedPositionsBackward)     \
  ROW(forebay_gpt_column_sums, ColumnSums)                              \
  ROW(forebay_gpt_gain_backward, GainBackward)                          \
  ROW(forebay_gpt_norm_forward, NormForward)                            \
  ROW(forebay_gpt_norm_backward, NormBackward)                          \
  ROW(forebay_gpt_cross_entropy, CrossEntropy)                          \
  ROW(forebay_gpt_cross_entropy_backward, CrossEntropyBackward)         \
  ROW(forebay_gpt_attention, AttentionForward)                          \
  ROW(forebay_gpt_attention_backward_queries, AttentionBackwardQueries) \
  ROW(forebay_gpt_attention_backward_keys, AttentionBackwardKeys)       \
  ROW(forebay_gpt_product, Product)

}  // namespace forebay::gpt::kernels
