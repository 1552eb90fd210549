// The options for a model's shape that `forebay plan` and `forebay bench-tiers` share, and the refusal of bad
// values.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "forebay/model_shape.h"
#include "forebay/status.h"

namespace forebay {

// Headings of help texts.
constexpr const char* kModelHeading = "Model";
constexpr const char* kRanksHeading = "Ranks";

// The options as typed. Numbers are signed, so that the refusal of a negative one is ours. The defaults are
// those of forebay-gpt, so that the same options mean the same run.
struct ModelArguments {
  std::string config;
  std::int64_t layers = 4;
  std::int64_t hidden = 128;
  std::int64_t heads = 4;
  std::int64_t sequence = 64;
  std::int64_t vocabulary = 256;
  std::int64_t batch = 8;

  std::vector<const CLI::Option*> shape_options;  // Not with --config.
  const CLI::Option* sequence_option = nullptr;
  const CLI::Option* batch_option = nullptr;

  bool has_shape() const;  // One of shape_options, or --sequence, was given.
  bool has_config() const { return !config.empty(); }
  bool has_batch() const;
};

struct ModelChoice {
  TransformerShape shape;
  std::uint64_t batch = 1;
  std::uint64_t sequence = 0;  // 0: the shape's positions.
};

// Requires: `arguments` outlives the parsing.
void add_model_options(CLI::App& command, ModelArguments& arguments);

// Requires: has_shape() or has_config(). Errors: kInvalidArgument naming the option and its allowed values;
// those of read_model_config.
Result<ModelChoice> read_model(const ModelArguments& arguments);

// "GPT-2 kind: 4 layers, hidden 128, ...".
std::string describe_model(const ModelChoice& model);

// Errors: kInvalidArgument naming the option and its allowed values.
Status check_positive(const char* name, std::int64_t value, std::int64_t limit);
template <typename Number>
Status read_positive(const char* name, std::int64_t value, std::int64_t limit, Number* target) {
  FOREBAY_RETURN_IF_ERROR(check_positive(name, value, limit));
  *target = static_cast<Number>(value);
  return Status();
}
Status read_bytes(const char* name, const std::string& text, std::uint64_t* bytes);

}  // namespace forebay
