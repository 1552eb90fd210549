// A Llama in double precision, as plain as possible: the loss from parameters, tokens and targets. It was
// written from samples/gpt/README.md, not from the model's code.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/shape.h"
#include "tests/samples/gpt_reference.h"

namespace forebay::gpt {

class LlamaReference {
 public:
  LlamaReference(const GptShape& shape, std::map<std::string, Values> parameters)
      : shape_(shape), parameters_(std::move(parameters)) {}

  Values& parameter(const std::string& name) { return parameters_.at(name); }

  // Mean over all tokens of a batch of samples.
  double loss(const std::vector<std::uint8_t>& tokens, const std::vector<std::uint8_t>& targets) const {
    double total = 0;
    for (std::size_t first = 0; first < tokens.size(); first += shape_.sequence) {
      const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(first);
      const Rows logits = forward({begin, begin + static_cast<std::ptrdiff_t>(shape_.sequence)});
      for (std::size_t t = 0; t < shape_.sequence; ++t) {
        double sum = 0;
        for (const double logit : logits[t]) sum += std::exp(logit);
        total += std::log(sum) - logits[t][targets[first + t]];
      }
    }
    return total / static_cast<double>(tokens.size());
  }

 private:
  const Values& p(const std::string& name) const { return parameters_.at(name); }

  Rows forward(const std::vector<std::uint8_t>& tokens) const {
    const std::string tokens_name = "model.embed_tokens.weight";
    Rows x(tokens.size(), Row(shape_.hidden));
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::size_t c = 0; c < shape_.hidden; ++c) x[t][c] = p(tokens_name)[tokens[t] * shape_.hidden + c];
    }
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      const std::string l = "model.layers." + std::to_string(layer) + ".";
      const Rows normal = norm(x, l + "input_layernorm");
      const Rows attended =
          attention(turned(linear(normal, l + "self_attn.q_proj")),
                    turned(linear(normal, l + "self_attn.k_proj")), linear(normal, l + "self_attn.v_proj"));
      add(x, linear(attended, l + "self_attn.o_proj"));
      const Rows second = norm(x, l + "post_attention_layernorm");
      Rows inner = linear(second, l + "mlp.gate_proj");
      const Rows up = linear(second, l + "mlp.up_proj");
      for (std::size_t t = 0; t < x.size(); ++t) {
        for (std::size_t c = 0; c < inner[t].size(); ++c)
          inner[t][c] = inner[t][c] / (1 + std::exp(-inner[t][c])) * up[t][c];
      }
      add(x, linear(inner, l + "mlp.down_proj"));
    }
    return multiplied(norm(x, "model.norm"), p(shape_.tied_head ? tokens_name : "lm_head.weight"));
  }

  static void add(Rows& x, const Rows& y) {
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t c = 0; c < x[t].size(); ++c) x[t][c] += y[t][c];
    }
  }

  Rows norm(const Rows& x, const std::string& name) const {
    Rows y = x;
    for (Row& row : y) {
      double mean_square = 0;
      for (const double v : row) mean_square += v * v / static_cast<double>(row.size());
      for (std::size_t c = 0; c < row.size(); ++c)
        row[c] *= p(name + ".weight")[c] / std::sqrt(mean_square + shape_.norm_epsilon);
    }
    return y;
  }

  Rows linear(const Rows& x, const std::string& name) const { return multiplied(x, p(name + ".weight")); }

  // x * weight^T; the weight is [out, in].
  static Rows multiplied(const Rows& x, const Values& weight) {
    const std::size_t in = x.front().size(), out = weight.size() / in;
    Rows y(x.size(), Row(out, 0.0));
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t o = 0; o < out; ++o) {
        for (std::size_t i = 0; i < in; ++i) y[t][o] += x[t][i] * weight[o * in + i];
      }
    }
    return y;
  }

  // Row t: columns i and i + half of every head turn by t * theta^(-i / half).
  Rows turned(Rows x) const {
    const std::size_t columns = shape_.hidden / shape_.heads, half = columns / 2;
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t head = 0; head < x[t].size(); head += columns) {
        for (std::size_t i = 0; i < half; ++i) {
          const double power = static_cast<double>(i) / static_cast<double>(half);
          const double angle = static_cast<double>(t) / std::pow(shape_.rope_theta, power);
          const double a = x[t][head + i], b = x[t][head + half + i];
          x[t][head + i] = a * std::cos(angle) - b * std::sin(angle);
          x[t][head + half + i] = b * std::cos(angle) + a * std::sin(angle);
        }
      }
    }
    return x;
  }

  Rows attention(const Rows& queries, const Rows& keys, const Rows& values) const {
    const std::size_t columns = shape_.hidden / shape_.heads;
    const std::size_t sharing = shape_.heads / shape_.kv_head_count();
    Rows output(queries.size(), Row(shape_.hidden, 0.0));
    for (std::size_t head = 0; head < shape_.heads; ++head) {
      const std::size_t q = head * columns, k = head / sharing * columns;
      for (std::size_t t = 0; t < queries.size(); ++t) {
        Row weights(t + 1, 0.0);
        double sum = 0;
        for (std::size_t j = 0; j <= t; ++j) {
          double score = 0;
          for (std::size_t c = 0; c < columns; ++c) score += queries[t][q + c] * keys[j][k + c];
          weights[j] = std::exp(score / std::sqrt(static_cast<double>(columns)));
          sum += weights[j];
        }
        for (std::size_t j = 0; j <= t; ++j) {
          for (std::size_t c = 0; c < columns; ++c) output[t][q + c] += weights[j] / sum * values[j][k + c];
        }
      }
    }
    return output;
  }

  GptShape shape_;
  std::map<std::string, Values> parameters_;
};

}  // namespace forebay::gpt
