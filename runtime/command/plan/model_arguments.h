// A model's shape on the command line: the options that `forebay plan` and `forebay bench-tiers` share, and
// the words in which bad values are refused.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "forebay/model_shape.h"
#include "forebay/status.h"

namespace forebay {

// As it was typed; numbers are signed so that a negative one gets an answer in our words. The defaults are
// forebay-gpt's, so that the same options mean the same run.
struct ModelArguments {
  std::string config;
  std::int64_t layers = 4;
  std::int64_t hidden = 128;
  std::int64_t heads = 4;
  std::int64_t sequence = 64;
  std::int64_t vocabulary = 256;
  std::int64_t batch = 8;

  // Which of them were given.
  std::vector<const CLI::Option*> shape_options;  // Those that --config leaves no room for.
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

// Requires: has_shape() or has_config(). Errors: kInvalidArgument naming the option and what it may be; those
// of read_model_config.
Result<ModelChoice> read_model(const ModelArguments& arguments);

// "GPT-2 kind: 4 layers, hidden 128, ...".
std::string describe_model(const ModelChoice& model);

// Errors: kInvalidArgument naming the option and what it may be.
Status read_positive(const char* name, std::int64_t value, std::int64_t limit, std::int64_t* target);
Status read_bytes(const char* name, const std::string& text, std::uint64_t* bytes);

}  // namespace forebay
