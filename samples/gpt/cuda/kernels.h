// The bodies of the model's kernels, for nvcc and for a host compiler.
//
// A body is written for a whole block, as phases: block.each(f) calls f(thread) for every thread of it, and
// all threads finish f before the next phase begins. So the host runs a block as plain loops, and no thread
// can miss a barrier. A thread keeps its own values between phases in a Private; the last argument is the
// memory that the block's threads share. Sums are made in the order of definitions.h.
#pragma once

#include "model/definitions.h"
#include "model/operations.h"

// Marks a kernel's code. Under nvcc it is for the device only.
#ifdef __CUDACC__
#define FOREBAY_KERNEL __device__
#else
#define FOREBAY_KERNEL
#endif

namespace forebay::gpt::kernels {

using definitions::kLanes;

// Threads per block, for every kernel.
inline constexpr unsigned kThreads = 256;
// Rows or columns of a tile of the matrix product, and the depth that is in shared memory at a time.
inline constexpr std::size_t kTile = 64;
inline constexpr std::size_t kTileDepth = 16;
// Columns that one block sums.
inline constexpr std::size_t kSumColumns = 32;
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

template <typename Block, typename Arguments>
FOREBAY_KERNEL void run(Block& block, const Arguments& a, Nothing&) {
  for_elements(block, a.count, a);
}

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const Widen& a, Nothing&) {
  for_elements(block, a.count, [&](std::size_t i) { a.target[i] = load(a.source, i); });
}

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const Narrow& a, Nothing&) {
  for_elements(block, a.count, [&](std::size_t i) {
    const float before = a.accumulate ? load({a.target, a.type}, i) : 0.0F;
    store(a.type, a.target, i, a.accumulate ? before + a.source[i] : a.source[i]);
  });
}

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const AddBias& a, Nothing&) {
  for_elements(block, a.rows * a.columns, [&](std::size_t i) { a.matrix[i] += a.bias[i % a.columns]; });
}

// --- embedding ---

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const Embed& a, Nothing&) {
  for_elements(block, a.rows * a.hidden, [&](std::size_t i) {
    const std::size_t r = i / a.hidden, c = i % a.hidden;
    const std::size_t token = a.tokens_in[r];
    a.output[i] = a.range.has(token) ? a.tokens[(token - a.range.first) * a.hidden + c] : 0.0F;
  });
}

// One block per token of the vocabulary. It visits the rows that have the token, in ascending order.
template <typename Block>
FOREBAY_KERNEL void run(Block& block, const EmbedTokensBackward& a, Nothing&) {
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

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const EmbedPositionsBackward& a, Nothing&) {
  for_elements(block, a.sequence * a.hidden, [&](std::size_t i) {
    float sum = 0;
    for (std::size_t r = i / a.hidden; r < a.rows; r += a.sequence)
      sum += a.gradient[r * a.hidden + i % a.hidden];
    a.positions_gradient[i] = sum;
  });
}

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

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const ColumnSums& a, ColumnSumsShared& shared) {
  column_sums(block, shared, a.rows, a.columns, a.sums,
              [&](std::size_t r, std::size_t c) { return a.matrix[r * a.columns + c]; });
}

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const GainBackward& a, ColumnSumsShared& shared) {
  const LayerNorm& n = a.norm;
  column_sums(block, shared, n.rows, n.hidden, a.gain_gradient, [&](std::size_t r, std::size_t c) {
    const std::size_t i = r * n.hidden + c;
    return a.gradient[i] * definitions::normalised(n.input[i], n.mean_of(r), n.inverse[r]);
  });
}

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

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const NormForward& a, RowShared& shared) {
  const LayerNorm& n = a.norm;
  const float count = static_cast<float>(n.hidden);
  typename Block::template Private<float> mean, variance;
  for_rows(block, n.rows, [&](std::size_t first) {
    if (n.mean != nullptr) {
      row_sums(block, shared, first, n.rows, n.hidden, mean,
               [&](unsigned, std::size_t r, std::size_t c) { return n.input[r * n.hidden + c]; });
      block.each([&](unsigned thread) { mean[thread] /= count; });
    } else {
      block.each([&](unsigned thread) { mean[thread] = 0.0F; });
    }
    row_sums(block, shared, first, n.rows, n.hidden, variance,
             [&](unsigned thread, std::size_t r, std::size_t c) {
               return definitions::squared_deviation(n.input[r * n.hidden + c], mean[thread]);
             });
    block.each([&](unsigned thread) {
      const std::size_t r = first + thread / kLanes;
      if (r >= n.rows) return;
      const float inverse = definitions::inverse_deviation(variance[thread] / count, n.epsilon);
      for (std::size_t c = thread % kLanes; c < n.hidden; c += kLanes) {
        const std::size_t i = r * n.hidden + c;
        const float bias = a.bias != nullptr ? a.bias[c] : 0.0F;
        a.output[i] = definitions::layer_norm(n.input[i], mean[thread], inverse, a.gain[c], bias);
      }
      if (thread % kLanes == 0) {
        if (n.mean != nullptr) n.mean[r] = mean[thread];
        n.inverse[r] = inverse;
      }
    });
  });
}

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const NormBackward& a, RowShared& shared) {
  const LayerNorm& n = a.norm;
  const float count = static_cast<float>(n.hidden);
  typename Block::template Private<float> mean_g, mean_gx;
  for_rows(block, n.rows, [&](std::size_t first) {
    if (n.mean != nullptr) {
      row_sums(block, shared, first, n.rows, n.hidden, mean_g, [&](unsigned, std::size_t r, std::size_t c) {
        return a.gradient[r * n.hidden + c] * a.gain[c];
      });
    } else {
      block.each([&](unsigned thread) { mean_g[thread] = 0.0F; });
    }
    row_sums(block, shared, first, n.rows, n.hidden, mean_gx, [&](unsigned, std::size_t r, std::size_t c) {
      const std::size_t i = r * n.hidden + c;
      return a.gradient[i] * a.gain[c] * definitions::normalised(n.input[i], n.mean_of(r), n.inverse[r]);
    });
    block.each([&](unsigned thread) {
      const std::size_t r = first + thread / kLanes;
      if (r >= n.rows) return;
      for (std::size_t c = thread % kLanes; c < n.hidden; c += kLanes) {
        const std::size_t i = r * n.hidden + c;
        a.input_gradient[i] +=
            definitions::layer_norm_slope(n.input[i], n.mean_of(r), n.inverse[r], a.gradient[i] * a.gain[c],
                                          mean_g[thread] / count, mean_gx[thread] / count);
      }
    });
  });
}

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const CrossEntropy& a, RowShared& shared) {
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

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const CrossEntropyBackward& a, Nothing&) {
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

// --- attention: one block per query; the backward pass also has one per key ---

// The most blocks of attention, each with rows of workspace: 8 per multiprocessor of the largest GPUs.
inline constexpr std::size_t kAttentionBlocksMax = 1152;

FOREBAY_DEVICE inline std::size_t attention_blocks(const Attention& shape) {
  return shape.softmax_rows() < kAttentionBlocksMax ? shape.softmax_rows() : kAttentionBlocksMax;
}
// The workspace is two rows of scores for each block, whole multiples of 256 bytes, and then the means of the
// backward pass.
FOREBAY_DEVICE inline std::size_t scores_bytes(const Attention& shape) {
  return (attention_blocks(shape) * 2 * shape.sequence * sizeof(float) + 255) / 256 * 256;
}

struct AttentionBackwardQueries : AttentionBackward {};
struct AttentionBackwardKeys : AttentionBackward {};

// One query or key: row `position` of head `head` of sample `sample`, and the `index`-th of all.
struct AttentionRow {
  const Attention& shape;
  std::size_t sample, head, position, index;

  // Column 0 of the head in row `other` of [batch, sequence, hidden].
  FOREBAY_KERNEL std::size_t place_of(std::size_t other) const {
    return (sample * shape.sequence + other) * shape.hidden + head * shape.head_columns();
  }
  FOREBAY_KERNEL HeadPlaces places() const { return shape.places(sample, head); }
  // Applies dropout to the probability with which query `i` sees position `j`, or to its gradient.
  FOREBAY_KERNEL float after_dropout(std::size_t i, std::size_t j, float value) const {
    if (!shape.dropout.active()) return value;
    return definitions::dropped(shape.dropout, shape.dropout_index(sample, head, i) + j, value);
  }
};

// Calls f(row, weights, slopes) for all rows of `heads` heads; the block has the last two in its workspace.
template <typename Block, typename Function>
FOREBAY_KERNEL void for_attention_rows(Block& block, const Attention& shape, std::size_t heads,
                                       std::byte* workspace, Function f) {
  float* weights = reinterpret_cast<float*>(workspace) + block.index() * 2 * shape.sequence;
  const std::size_t rows = shape.batch * heads * shape.sequence;
  for (std::size_t index = block.index(); index < rows; index += block.count()) {
    const std::size_t head = index / shape.sequence;
    f(AttentionRow{shape, head / heads, head % heads, index % shape.sequence, index}, weights,
      weights + shape.sequence);
  }
}

FOREBAY_KERNEL inline float dot(const float* a, const float* b, std::size_t count) {
  float sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// The sum by lanes of f(0) ... f(count - 1), into shared.values[0].
template <typename Block, typename Function>
FOREBAY_KERNEL void block_sum(Block& block, RowShared& shared, std::size_t count, Function f) {
  block.each([&](unsigned thread) {
    float sum = 0;
    if (thread < kLanes) {
      for (std::size_t i = thread; i < count; i += kLanes) sum += f(i);
    }
    shared.values[thread] = sum;
  });
  block.fold(shared.values);
}

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const AttentionForward& a, RowShared& shared) {
  const std::size_t columns = a.shape.head_columns();
  const float factor = definitions::attention_factor(columns);
  const auto attend = [&](const AttentionRow& row, float* weights, float*) {
    const std::size_t seen = row.position + 1;
    const HeadPlaces in = row.places();
    const float* query = a.qkv + in.query + row.position * in.query_stride;
    block.each([&](unsigned thread) {
      float largest = -INFINITY;
      for (std::size_t j = thread; j < seen; j += kThreads) {
        weights[j] = dot(query, a.qkv + in.key + j * in.key_stride, columns) * factor;
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
      if (thread == 0) a.softmax[row.index] = softmax[thread];
      for (std::size_t j = thread; j < seen; j += kThreads)
        weights[j] = row.after_dropout(row.position, j, weights[j] * softmax[thread].inverse);
    });
    block.each([&](unsigned thread) {
      for (std::size_t c = thread; c < columns; c += kThreads) {
        const float* value = a.qkv + in.value + c;
        float sum = 0;
        for (std::size_t j = 0; j < seen; ++j) sum += weights[j] * value[j * in.key_stride];
        a.output[row.place_of(row.position) + c] = sum;
      }
    });
  };
  for_attention_rows(block, a.shape, a.shape.heads, a.workspace, attend);
}

// The gradient of each query, and the mean that the gradient of its softmax needs.
template <typename Block>
FOREBAY_KERNEL void run(Block& block, const AttentionBackwardQueries& a, RowShared& shared) {
  const std::size_t columns = a.shape.head_columns();
  const float factor = definitions::attention_factor(columns);
  float* means = reinterpret_cast<float*>(a.workspace + scores_bytes(a.shape));
  const auto gradient_of_row = [&](const AttentionRow& row, float* weights, float* slopes) {
    const std::size_t seen = row.position + 1;
    const HeadPlaces in = row.places();
    const std::size_t query_place = in.query + row.position * in.query_stride;
    const float* output_gradient = a.gradient + row.place_of(row.position);
    block.each([&](unsigned thread) {
      for (std::size_t j = thread; j < seen; j += kThreads) {
        const float* key = a.qkv + in.key + j * in.key_stride;
        const float* value = a.qkv + in.value + j * in.key_stride;
        weights[j] =
            definitions::probability(dot(a.qkv + query_place, key, columns) * factor, a.softmax[row.index]);
        slopes[j] = row.after_dropout(row.position, j, dot(output_gradient, value, columns));
      }
    });
    block_sum(block, shared, seen, [&](std::size_t j) { return weights[j] * slopes[j]; });
    block.each([&](unsigned thread) {
      if (thread == 0) means[row.index] = shared.values[0];
      for (std::size_t j = thread; j < seen; j += kThreads)
        slopes[j] = definitions::score_gradient(weights[j], slopes[j], shared.values[0], factor);
    });
    block.each([&](unsigned thread) {
      for (std::size_t c = thread; c < columns; c += kThreads) {
        const float* key = a.qkv + in.key + c;
        float sum = 0;
        for (std::size_t j = 0; j < seen; ++j) sum += slopes[j] * key[j * in.key_stride];
        a.qkv_gradient[query_place + c] = sum;
      }
    });
  };
  for_attention_rows(block, a.shape, a.shape.heads, a.workspace, gradient_of_row);
}

// The gradients of each key and its value, from the queries that see them: those of the heads that share the
// key, one head after the other.
template <typename Block>
FOREBAY_KERNEL void run(Block& block, const AttentionBackwardKeys& a, Nothing&) {
  const std::size_t columns = a.shape.head_columns();
  const std::size_t hidden = a.shape.hidden;
  const std::size_t sharing = a.shape.heads_of_key();
  const float factor = definitions::attention_factor(columns);
  const float* means = reinterpret_cast<const float*>(a.workspace + scores_bytes(a.shape));
  const auto gradients_of_key = [&](const AttentionRow& key, float* weights, float* slopes) {
    for (std::size_t shared = 0; shared < sharing; ++shared) {
      const AttentionRow row{key.shape, key.sample, key.head * sharing + shared, key.position, 0};
      const std::size_t first_of_head = (row.sample * a.shape.heads + row.head) * a.shape.sequence;
      const HeadPlaces in = row.places();
      const std::size_t key_place = in.key + row.position * in.key_stride;
      const std::size_t value_place = in.value + row.position * in.key_stride;
      block.each([&](unsigned thread) {
        for (std::size_t i = row.position + thread; i < a.shape.sequence; i += kThreads) {
          const float* query = a.qkv + in.query + i * in.query_stride;
          const float* output_gradient = a.gradient + row.place_of(i);
          const float p = definitions::probability(dot(query, a.qkv + key_place, columns) * factor,
                                                   a.softmax[first_of_head + i]);
          const float dp =
              row.after_dropout(i, row.position, dot(output_gradient, a.qkv + value_place, columns));
          weights[i] = row.after_dropout(i, row.position, p);
          slopes[i] = definitions::score_gradient(p, dp, means[first_of_head + i], factor);
        }
      });
      block.each([&](unsigned thread) {
        for (std::size_t c = thread; c < columns; c += kThreads) {
          const float* query = a.qkv + in.query + c;
          const float* output_gradient = a.gradient + row.place_of(0) + c;
          float d_key = shared == 0 ? 0.0F : a.qkv_gradient[key_place + c];
          float d_value = shared == 0 ? 0.0F : a.qkv_gradient[value_place + c];
          for (std::size_t i = row.position; i < a.shape.sequence; ++i) {
            d_value += weights[i] * output_gradient[i * hidden];
            d_key += slopes[i] * query[i * in.query_stride];
          }
          a.qkv_gradient[key_place + c] = d_key;
          a.qkv_gradient[value_place + c] = d_value;
        }
      });
    }
  };
  for_attention_rows(block, a.shape, a.shape.kv_head_count(), a.workspace, gradients_of_key);
}

// --- the plain product: one block per tile of c, 4 x 4 elements per thread, over the depth in ascending
// order ---

struct Product {
  ProductShape shape;
  const float* a;
  Operand b;
  float* c;
};

inline constexpr std::size_t kEdge = 4;  // Elements of a thread, per dimension.
static_assert(kTile / kEdge * (kTile / kEdge) == kThreads);

struct ProductShared {
  float a[kTileDepth][kTile];
  float b[kTileDepth][kTile];
};

struct ProductSums {
  float at[kEdge][kEdge];
};

// Loads a part of a matrix whose other extent is `count`: elements from `begin` on, depth from `first` on; 0
// outside. `by_depth`: the matrix is [depth, count], otherwise [count, depth]. Neighbouring threads read
// neighbouring elements.
FOREBAY_KERNEL inline void load_tile(const Operand& matrix, bool by_depth, std::size_t count,
                                     std::size_t begin, std::size_t depth, std::size_t first, unsigned thread,
                                     float (&tile)[kTileDepth][kTile]) {
  for (std::size_t i = thread; i < kTile * kTileDepth; i += kThreads) {
    const std::size_t d = by_depth ? i / kTile : i % kTileDepth;
    const std::size_t e = by_depth ? i % kTile : i / kTileDepth;
    const bool inside = begin + e < count && first + d < depth;
    const std::size_t place = by_depth ? (first + d) * count + begin + e : (begin + e) * depth + first + d;
    tile[d][e] = inside ? load(matrix, place) : 0.0F;
  }
}

template <typename Block>
FOREBAY_KERNEL void run(Block& block, const Product& p, ProductShared& shared) {
  const ProductShape& s = p.shape;
  const std::size_t tile_columns = (s.columns + kTile - 1) / kTile;
  const std::size_t tile_count = (s.rows + kTile - 1) / kTile * tile_columns;
  typename Block::template Private<ProductSums> sums;
  for (std::size_t tile = block.index(); tile < tile_count; tile += block.count()) {
    const std::size_t row = tile / tile_columns * kTile;
    const std::size_t column = tile % tile_columns * kTile;
    block.each([&](unsigned thread) { sums[thread] = {}; });
    for (std::size_t first = 0; first < s.depth; first += kTileDepth) {
      const std::size_t depth = s.depth - first < kTileDepth ? s.depth - first : kTileDepth;
      block.each([&](unsigned thread) {
        load_tile({p.a, DataType::kFloat32}, s.transpose_a, s.rows, row, s.depth, first, thread, shared.a);
        load_tile(p.b, !s.transpose_b, s.columns, column, s.depth, first, thread, shared.b);
      });
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

// Every kernel: its name in an image, its arguments, and the memory that a block shares.
#define FOREBAY_GPT_KERNELS(ROW)                                                   \
  ROW(forebay_gpt_widen, Widen, Nothing)                                           \
  ROW(forebay_gpt_narrow, Narrow, Nothing)                                         \
  ROW(forebay_gpt_add_bias, AddBias, Nothing)                                      \
  ROW(forebay_gpt_add, Add, Nothing)                                               \
  ROW(forebay_gpt_drop, Drop, Nothing)                                             \
  ROW(forebay_gpt_gelu, Gelu, Nothing)                                             \
  ROW(forebay_gpt_gelu_backward, GeluBackward, Nothing)                            \
  ROW(forebay_gpt_swiglu, SwiGlu, Nothing)                                         \
  ROW(forebay_gpt_swiglu_backward, SwiGluBackward, Nothing)                        \
  ROW(forebay_gpt_rotate, Rotate, Nothing)                                         \
  ROW(forebay_gpt_embed, Embed, Nothing)                                           \
  ROW(forebay_gpt_embed_tokens_backward, EmbedTokensBackward, Nothing)             \
  ROW(forebay_gpt_embed_positions_backward, EmbedPositionsBackward, Nothing)       \
  ROW(forebay_gpt_column_sums, ColumnSums, ColumnSumsShared)                       \
  ROW(forebay_gpt_gain_backward, GainBackward, ColumnSumsShared)                   \
  ROW(forebay_gpt_norm_forward, NormForward, RowShared)                            \
  ROW(forebay_gpt_norm_backward, NormBackward, RowShared)                          \
  ROW(forebay_gpt_cross_entropy, CrossEntropy, RowShared)                          \
  ROW(forebay_gpt_cross_entropy_backward, CrossEntropyBackward, Nothing)           \
  ROW(forebay_gpt_attention, AttentionForward, RowShared)                          \
  ROW(forebay_gpt_attention_backward_queries, AttentionBackwardQueries, RowShared) \
  ROW(forebay_gpt_attention_backward_keys, AttentionBackwardKeys, Nothing)         \
  ROW(forebay_gpt_product, Product, ProductShared)

}  // namespace forebay::gpt::kernels
