#include "operations.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "forebay/error.h"
#include "forebay/units.h"

namespace forebay::gpt {
namespace {

constexpr float kEpsilon = 1e-5F;
constexpr std::size_t kColumnBlock = 64;  // Columns one thread sums down at a time.
[[maybe_unused]] constexpr std::size_t kParallelCount =
    1u << 14;                       // Below it starting threads costs more than it saves.
constexpr std::size_t kLanes = 16;  // Partial sums of a row: enough for every vector width.

std::size_t thread_index() {
#if defined(_OPENMP)
  return static_cast<std::size_t>(omp_get_thread_num());
#else
  return 0;
#endif
}

// exp(x) for x in [-87, 88], clamped to it: 2^n * p(r), within 2 units in the last place. Written out so that
// it vectorises and gives the same bits everywhere.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0F), 88.0F);
  constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer.
  const float rounded = x * 1.44269504F + kRounder;
  const float n = rounded - kRounder;
  const float r = (x - n * 0.693359375F) - n * -2.12194440e-4F;  // ln 2 in two parts.
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  // n stands in the low bits of `rounded`; a NaN stays one, through p.
  const std::uint32_t exponent =
      std::bit_cast<std::uint32_t>(rounded) - std::bit_cast<std::uint32_t>(kRounder) + 127u;
  return p * std::bit_cast<float>(exponent << 23);
}

// The sum of f(0) ... f(count - 1) in 16 lanes, folded 8, 4, 2, 1.
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

}  // namespace

void set_compute_threads(int count) {
#if defined(_OPENMP)
  omp_set_dynamic(0);  // Fewer threads than oneDNN prepared its products for: it would compute wrongly.
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

void add_bias(float* matrix, const float* bias, std::size_t rows, std::size_t columns) {
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < rows; ++r) {
    float* row = matrix + r * columns;
    for (std::size_t c = 0; c < columns; ++c) row[c] += bias[c];
  }
}

void bias_backward(const float* gradient, float* bias_gradient, std::size_t rows, std::size_t columns) {
  for_column_blocks(columns, [&](std::size_t first, std::size_t last) {
    std::fill(bias_gradient + first, bias_gradient + last, 0.0F);
    for (std::size_t r = 0; r < rows; ++r) {
      const float* row = gradient + r * columns;
      for (std::size_t c = first; c < last; ++c) bias_gradient[c] += row[c];
    }
  });
}

void add(const float* a, const float* b, float* target, std::size_t count) {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
  for (std::size_t i = 0; i < count; ++i) target[i] = a[i] + b[i];
}

void embed(std::span<const std::uint8_t> tokens_in, const float* tokens, const float* positions,
           float* output, std::size_t sequence, std::size_t hidden) {
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < tokens_in.size(); ++r) {
    const float* token = tokens + tokens_in[r] * hidden;
    const float* position = positions + r % sequence * hidden;
    for (std::size_t c = 0; c < hidden; ++c) output[r * hidden + c] = token[c] + position[c];
  }
}

void embed_tokens_backward(std::span<const std::uint8_t> tokens_in, const float* gradient,
                           float* tokens_gradient, std::size_t vocabulary, std::size_t hidden) {
  for_column_blocks(hidden, [&](std::size_t first, std::size_t last) {
    for (std::size_t v = 0; v < vocabulary; ++v) {
      std::fill(tokens_gradient + v * hidden + first, tokens_gradient + v * hidden + last, 0.0F);
    }
    for (std::size_t r = 0; r < tokens_in.size(); ++r) {
      float* target = tokens_gradient + tokens_in[r] * hidden;
      for (std::size_t c = first; c < last; ++c) target[c] += gradient[r * hidden + c];
    }
  });
}

void embed_positions_backward(const float* gradient, float* positions_gradient, std::size_t rows,
                              std::size_t sequence, std::size_t hidden) {
#pragma omp parallel for schedule(static)
  for (std::size_t position = 0; position < sequence; ++position) {
    float* target = positions_gradient + position * hidden;
    std::fill(target, target + hidden, 0.0F);
    for (std::size_t r = position; r < rows; r += sequence) {
      for (std::size_t c = 0; c < hidden; ++c) target[c] += gradient[r * hidden + c];
    }
  }
}

void layer_norm(const LayerNorm& norm, const float* gain, const float* bias, float* output) {
  const std::size_t hidden = norm.hidden;
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < norm.rows; ++r) {
    const float* x = norm.input + r * hidden;
    float* y = output + r * hidden;
    const float mean = lane_sum(hidden, [x](std::size_t c) { return x[c]; }) / static_cast<float>(hidden);
    const float variance =
        lane_sum(hidden, [x, mean](std::size_t c) { return (x[c] - mean) * (x[c] - mean); }) /
        static_cast<float>(hidden);
    const float inverse = 1.0F / std::sqrt(variance + kEpsilon);
    for (std::size_t c = 0; c < hidden; ++c) y[c] = (x[c] - mean) * inverse * gain[c] + bias[c];
    norm.mean[r] = mean;
    norm.inverse[r] = inverse;
  }
}

void layer_norm_backward(const LayerNorm& norm, const float* gain, const float* gradient,
                         float* input_gradient, float* gain_gradient, float* bias_gradient) {
  const std::size_t hidden = norm.hidden;
  const float scale = 1.0F / static_cast<float>(hidden);

  // Through the normalised x^ = (x - mean) * inverse, with g = gradient * gain:
  // dx = inverse * (g - mean(g) - x^ * mean(g * x^)).
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < norm.rows; ++r) {
    const float* x = norm.input + r * hidden;
    const float* dy = gradient + r * hidden;
    float* dx = input_gradient + r * hidden;
    const float mean = norm.mean[r];
    const float inverse = norm.inverse[r];
    const float mean_g = scale * lane_sum(hidden, [=](std::size_t c) { return dy[c] * gain[c]; });
    const float mean_gx =
        scale * lane_sum(hidden, [=](std::size_t c) { return dy[c] * gain[c] * ((x[c] - mean) * inverse); });
    for (std::size_t c = 0; c < hidden; ++c) {
      const float normalised = (x[c] - mean) * inverse;
      dx[c] += inverse * (dy[c] * gain[c] - mean_g - normalised * mean_gx);
    }
  }

  for_column_blocks(hidden, [&](std::size_t first, std::size_t last) {
    std::fill(gain_gradient + first, gain_gradient + last, 0.0F);
    std::fill(bias_gradient + first, bias_gradient + last, 0.0F);
    for (std::size_t r = 0; r < norm.rows; ++r) {
      const float* x = norm.input + r * hidden;
      const float* dy = gradient + r * hidden;
      for (std::size_t c = first; c < last; ++c) {
        gain_gradient[c] += dy[c] * ((x[c] - norm.mean[r]) * norm.inverse[r]);
        bias_gradient[c] += dy[c];
      }
    }
  });
}

namespace {

constexpr float kGeluFactor = 0.7978845608F;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715F;

// tanh by exp: the absolute error, about 1e-7, is what GELU needs.
inline float tanh_of(float x) {
  return 1.0F - 2.0F / (exponential(2.0F * x) + 1.0F);
}

}  // namespace

void gelu(const float* input, float* output, std::size_t count) {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
  for (std::size_t i = 0; i < count; ++i) {
    const float x = input[i];
    const float t = tanh_of(kGeluFactor * (x + kGeluCubic * x * x * x));
    output[i] = 0.5F * x * (1.0F + t);
  }
}

void gelu_backward(const float* input, float* gradient, std::size_t count) {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
  for (std::size_t i = 0; i < count; ++i) {
    const float x = input[i];
    const float t = tanh_of(kGeluFactor * (x + kGeluCubic * x * x * x));
    const float inner = kGeluFactor * (1.0F + 3.0F * kGeluCubic * x * x);
    gradient[i] *= 0.5F * (1.0F + t) + 0.5F * x * (1.0F - t * t) * inner;
  }
}

namespace {

// One head of one sample: where its query, key and value columns are.
struct Head {
  const float* query;  // Of row 0; the next row is `stride` further. So for the others.
  const float* key;
  const float* value;
  std::size_t stride;
};

Head head_of(const Attention& shape, const float* qkv, std::size_t sample, std::size_t head) {
  const std::size_t stride = 3 * shape.hidden;
  const float* row = qkv + sample * shape.sequence * stride + head * shape.head_columns();
  return {row, row + shape.hidden, row + 2 * shape.hidden, stride};
}

// target[c][row] = source[row][c]: sums over columns then run along memory.
void transpose(const float* source, std::size_t stride, std::size_t rows, std::size_t columns,
               float* target) {
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < columns; ++c) target[c * rows + r] = source[r * stride + c];
  }
}

// dots[j] = factor * (vector . column j of `transposed`), for j < count.
void dots_with_columns(const float* vector, std::size_t columns, const float* transposed,
                       std::size_t row_count, float factor, float* dots, std::size_t count) {
  std::fill(dots, dots + count, 0.0F);
  for (std::size_t c = 0; c < columns; ++c) {
    const float v = vector[c];
    const float* row = transposed + c * row_count;
    for (std::size_t j = 0; j < count; ++j) dots[j] += v * row[j];
  }
  for (std::size_t j = 0; j < count; ++j) dots[j] *= factor;
}

void add_scaled(float factor, const float* source, float* target, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] += factor * source[i];
}

}  // namespace

void attention(const Attention& shape, const float* qkv, float* output, float* log_sums, float* workspace) {
  const std::size_t columns = shape.head_columns();
  const std::size_t sequence = shape.sequence;
  const float factor = 1.0F / std::sqrt(static_cast<float>(columns));
#pragma omp parallel for collapse(2) schedule(static) num_threads(shape.threads)
  for (std::size_t sample = 0; sample < shape.batch; ++sample) {
    for (std::size_t head = 0; head < shape.heads; ++head) {
      float* keys = workspace + thread_index() * shape.workspace_count();  // [columns, sequence]
      float* weights = keys + 2 * columns * sequence;
      const Head in = head_of(shape, qkv, sample, head);
      transpose(in.key, in.stride, sequence, columns, keys);
      for (std::size_t i = 0; i < sequence; ++i) {
        const std::size_t seen = i + 1;
        dots_with_columns(in.query + i * in.stride, columns, keys, sequence, factor, weights, seen);
        const float largest = *std::max_element(weights, weights + seen);
        for (std::size_t j = 0; j < seen; ++j) weights[j] = exponential(weights[j] - largest);
        const float sum = lane_sum(seen, [weights](std::size_t j) { return weights[j]; });
        log_sums[(sample * shape.heads + head) * sequence + i] = largest + std::log(sum);

        float* out = output + (sample * sequence + i) * shape.hidden + head * columns;
        std::fill(out, out + columns, 0.0F);
        for (std::size_t j = 0; j < seen; ++j)
          add_scaled(weights[j] / sum, in.value + j * in.stride, out, columns);
      }
    }
  }
}

void attention_backward(const Attention& shape, const float* qkv, const float* log_sums,
                        const float* gradient, float* qkv_gradient, float* workspace) {
  const std::size_t columns = shape.head_columns();
  const std::size_t sequence = shape.sequence;
  const float factor = 1.0F / std::sqrt(static_cast<float>(columns));
#pragma omp parallel for collapse(2) schedule(static) num_threads(shape.threads)
  for (std::size_t sample = 0; sample < shape.batch; ++sample) {
    for (std::size_t head = 0; head < shape.heads; ++head) {
      float* keys = workspace + thread_index() * shape.workspace_count();
      float* values = keys + columns * sequence;
      float* weights = values + columns * sequence;
      float* weight_gradients = weights + sequence;
      const Head in = head_of(shape, qkv, sample, head);
      transpose(in.key, in.stride, sequence, columns, keys);
      transpose(in.value, in.stride, sequence, columns, values);

      const std::size_t stride = in.stride;
      float* d_query = qkv_gradient + (in.query - qkv);
      float* d_key = qkv_gradient + (in.key - qkv);
      float* d_value = qkv_gradient + (in.value - qkv);
      for (std::size_t i = 0; i < sequence; ++i) {
        std::fill(d_query + i * stride, d_query + i * stride + columns, 0.0F);
        std::fill(d_key + i * stride, d_key + i * stride + columns, 0.0F);
        std::fill(d_value + i * stride, d_value + i * stride + columns, 0.0F);
      }

      for (std::size_t i = 0; i < sequence; ++i) {
        const std::size_t seen = i + 1;
        const float* query = in.query + i * stride;
        const float* d_out = gradient + (sample * sequence + i) * shape.hidden + head * columns;
        const float log_sum = log_sums[(sample * shape.heads + head) * sequence + i];

        // The probabilities p again, and dp[j] = d_out . value[j].
        dots_with_columns(query, columns, keys, sequence, factor, weights, seen);
        for (std::size_t j = 0; j < seen; ++j) weights[j] = exponential(weights[j] - log_sum);
        dots_with_columns(d_out, columns, values, sequence, 1.0F, weight_gradients, seen);

        // Through the softmax: ds = p * (dp - sum of p * dp).
        const float mean = lane_sum(seen, [=](std::size_t j) { return weights[j] * weight_gradients[j]; });
        for (std::size_t j = 0; j < seen; ++j) {
          const float d_score = weights[j] * (weight_gradients[j] - mean) * factor;
          add_scaled(weights[j], d_out, d_value + j * stride, columns);
          add_scaled(d_score, in.key + j * stride, d_query + i * stride, columns);
          add_scaled(d_score, query, d_key + j * stride, columns);
        }
      }
    }
  }
}

double cross_entropy(float* logits, std::span<const std::uint8_t> targets, std::size_t vocabulary,
                     float factor, double* row_losses) {
  const std::size_t rows = targets.size();
#pragma omp parallel for schedule(static)
  for (std::size_t r = 0; r < rows; ++r) {
    float* row = logits + r * vocabulary;
    const float largest = *std::max_element(row, row + vocabulary);
    const float target = row[targets[r]] - largest;
    for (std::size_t v = 0; v < vocabulary; ++v) row[v] = exponential(row[v] - largest);
    const float sum = lane_sum(vocabulary, [row](std::size_t v) { return row[v]; });
    row_losses[r] = std::log(static_cast<double>(sum)) - static_cast<double>(target);
    const float scale = factor / sum;
    for (std::size_t v = 0; v < vocabulary; ++v) row[v] *= scale;
    row[targets[r]] -= factor;
  }
  double total = 0;
  for (std::size_t r = 0; r < rows; ++r) total += row_losses[r];
  return total / static_cast<double>(rows);
}

}  // namespace forebay::gpt
