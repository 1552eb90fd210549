// Reads a model's shape from a Hugging Face config.json of GPT-2 or Llama kind.
#pragma once

#include <string>

#include "forebay/model_shape.h"
#include "forebay/status.h"

namespace forebay {

// Errors: kIoError if the file cannot be read; kInvalidArgument if it is not JSON, lacks a key or has a wrong
// value (the key is named); kUnsupported for another model_type or for parts that are not planned.
Result<TransformerShape> read_model_config(const std::string& path);

// The same from the text; `name` stands for it in messages.
Result<TransformerShape> parse_model_config(const std::string& text, const std::string& name);

}  // namespace forebay
