// The same GPT in double precision and as plainly as it can be said: the loss from parameters, tokens and
// targets. Written from samples/gpt/README.md, not from the model's code.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "shape.h"

namespace forebay::gpt {

using Values = std::vector<double>;
using Row = std::vector<double>;
using Rows = std::vector<Row>;

class GptReference {
 public:
  GptReference(const GptShape& shape, std::map<std::string, Values> parameters)
      : shape_(shape), parameters_(std::move(parameters)) {}

  Values& parameter(const std::string& name) { return parameters_.at(name); }

  // Mean over all tokens of `batch` samples.
  double loss(const std::vector<std::uint8_t>& tokens, const std::vector<std::uint8_t>& targets) const {
    const std::size_t samples = tokens.size() / shape_.sequence;
    double total = 0;
    for (std::size_t s = 0; s < samples; ++s) {
      const auto first = s * shape_.sequence;
      const Rows logits = forward({tokens.begin() + first, tokens.begin() + first + shape_.sequence});
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
    Rows x(tokens.size(), Row(shape_.hidden));
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::size_t c = 0; c < shape_.hidden; ++c) {
        x[t][c] = p("wte.weight")[tokens[t] * shape_.hidden + c] + p("wpe.weight")[t * shape_.hidden + c];
      }
    }
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      const std::string h = "h." + std::to_string(layer) + ".";
      add(x, linear(attention(linear(norm(x, h + "ln_1"), h + "attn.c_attn")), h + "attn.c_proj"));
      Rows inner = linear(norm(x, h + "ln_2"), h + "mlp.c_fc");
      for (Row& row : inner) {
        for (double& v : row) {
          v = 0.5 * v * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
        }
      }
      add(x, linear(inner, h + "mlp.c_proj"));
    }
    x = norm(x, "ln_f");
    Rows logits(x.size(), Row(kVocabulary, 0.0));
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t v = 0; v < kVocabulary; ++v) {
        for (std::size_t c = 0; c < shape_.hidden; ++c) {
          logits[t][v] += x[t][c] * p("wte.weight")[v * shape_.hidden + c];
        }
      }
    }
    return logits;
  }

  static void add(Rows& x, const Rows& y) {
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t c = 0; c < x[t].size(); ++c) x[t][c] += y[t][c];
    }
  }

  Rows norm(const Rows& x, const std::string& name) const {
    Rows y = x;
    for (Row& row : y) {
      double mean = 0, variance = 0;
      for (const double v : row) mean += v / static_cast<double>(row.size());
      for (const double v : row) variance += (v - mean) * (v - mean) / static_cast<double>(row.size());
      for (std::size_t c = 0; c < row.size(); ++c) {
        row[c] = (row[c] - mean) / std::sqrt(variance + 1e-5) * p(name + ".weight")[c] + p(name + ".bias")[c];
      }
    }
    return y;
  }

  Rows linear(const Rows& x, const std::string& name) const {
    const Values& weight = p(name + ".weight");
    const Values& bias = p(name + ".bias");
    Rows y(x.size(), bias);
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t i = 0; i < x[t].size(); ++i) {
        for (std::size_t o = 0; o < bias.size(); ++o) y[t][o] += x[t][i] * weight[i * bias.size() + o];
      }
    }
    return y;
  }

  Rows attention(const Rows& qkv) const {
    const std::size_t hidden = shape_.hidden, columns = hidden / shape_.heads;
    Rows output(qkv.size(), Row(hidden, 0.0));
    for (std::size_t head = 0; head < shape_.heads; ++head) {
      const std::size_t q = head * columns, k = hidden + q, v = 2 * hidden + q;
      for (std::size_t t = 0; t < qkv.size(); ++t) {
        Row weights(t + 1, 0.0);
        double sum = 0;
        for (std::size_t j = 0; j <= t; ++j) {
          double score = 0;
          for (std::size_t c = 0; c < columns; ++c) score += qkv[t][q + c] * qkv[j][k + c];
          weights[j] = std::exp(score / std::sqrt(static_cast<double>(columns)));
          sum += weights[j];
        }
        for (std::size_t j = 0; j <= t; ++j) {
          for (std::size_t c = 0; c < columns; ++c) output[t][q + c] += weights[j] / sum * qkv[j][v + c];
        }
      }
    }
    return output;
  }

  GptShape shape_;
  std::map<std::string, Values> parameters_;
};

}  // namespace forebay::gpt
