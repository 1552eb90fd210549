// The same GPT in double precision, as plain as possible: the loss from parameters, tokens and targets. It
// was written from samples/gpt/README.md, not from the model's code.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "model/random.h"
#include "model/shape.h"

namespace forebay::gpt {

using Values = std::vector<double>;
using Row = std::vector<double>;
using Rows = std::vector<Row>;

class GptReference {
 public:
  GptReference(const GptShape& shape, std::map<std::string, Values> parameters)
      : shape_(shape), parameters_(std::move(parameters)) {}

  // Dropout with probability `probability` in a micro-step that begins with sample `first_sample`.
  struct Dropped {
    double probability = 0;
    std::uint64_t seed = 1, step = 0, micro_step = 0, first_sample = 0;
  };
  void drop(const Dropped& dropped) { dropped_ = dropped; }

  Values& parameter(const std::string& name) { return parameters_.at(name); }

  // Mean over all tokens of `batch` samples.
  double loss(const std::vector<std::uint8_t>& tokens, const std::vector<std::uint8_t>& targets) const {
    const std::size_t samples = tokens.size() / shape_.sequence;
    double total = 0;
    for (std::size_t s = 0; s < samples; ++s) {
      const auto first = s * shape_.sequence;
      const Rows logits = forward({tokens.begin() + first, tokens.begin() + first + shape_.sequence}, s);
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

  // The factor of element `i` of a sample's part of a tensor, which has `count` elements.
  double kept(std::uint64_t site, std::size_t sample, std::size_t count, std::size_t i) const {
    if (dropped_.probability == 0) return 1;
    const std::uint64_t key =
        draw(draw(dropped_.seed, std::uint64_t{1} << 33, dropped_.step), site, dropped_.micro_step);
    const std::uint64_t index = (dropped_.first_sample + sample) * count + i;
    const double threshold = std::round(dropped_.probability * 0x1p32);
    if (static_cast<double>(splitmix64(key + index) >> 32) < threshold) return 0;
    return 1 / (1 - dropped_.probability);
  }
  Rows after_dropout(Rows x, std::uint64_t site, std::size_t sample) const {
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t c = 0; c < shape_.hidden; ++c)
        x[t][c] *= kept(site, sample, shape_.sequence * shape_.hidden, t * shape_.hidden + c);
    }
    return x;
  }

  Rows forward(const std::vector<std::uint8_t>& tokens, std::size_t sample) const {
    Rows x(tokens.size(), Row(shape_.hidden));
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::size_t c = 0; c < shape_.hidden; ++c) {
        x[t][c] = p("wte.weight")[tokens[t] * shape_.hidden + c] + p("wpe.weight")[t * shape_.hidden + c];
      }
    }
    x = after_dropout(x, 0, sample);
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      const std::string h = "h." + std::to_string(layer) + ".";
      const std::uint64_t site = 1 + 3 * layer;
      const Rows attended = attention(linear(norm(x, h + "ln_1"), h + "attn.c_attn"), site, sample);
      add(x, after_dropout(linear(attended, h + "attn.c_proj"), site + 1, sample));
      Rows inner = linear(norm(x, h + "ln_2"), h + "mlp.c_fc");
      for (Row& row : inner) {
        for (double& v : row) {
          v = 0.5 * v * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
        }
      }
      add(x, after_dropout(linear(inner, h + "mlp.c_proj"), site + 2, sample));
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

  Rows attention(const Rows& qkv, std::uint64_t site, std::size_t sample) const {
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
          const std::size_t n = shape_.sequence;
          const double p =
              weights[j] / sum * kept(site, sample, shape_.heads * n * n, (head * n + t) * n + j);
          for (std::size_t c = 0; c < columns; ++c) output[t][q + c] += p * qkv[j][v + c];
        }
      }
    }
    return output;
  }

  GptShape shape_;
  Dropped dropped_;
  std::map<std::string, Values> parameters_;
};

}  // namespace forebay::gpt
