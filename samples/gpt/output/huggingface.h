// A GPT-2 or Llama as Hugging Face's transformers describes it: config.json, and its names of tensors.
#pragma once

#include <string>

#include "model/shape.h"

namespace forebay::gpt {

// Whether `path` names a directory with config.json, and not a file of weights.
bool is_model_directory(const std::string& path);

// The shape in the directory's config.json, with the `sequence` of `given`.
// Errors: throws Error: kIoError, kCorruption, and kUnsupported naming a setting that this model lacks.
GptShape shape_of_model(const std::string& directory, const GptShape& given);

// The text of a config.json, from which transformers makes the same model.
std::string model_config(const GptShape& shape);

// The name that transformers gives a parameter of the model with its head.
std::string published_name(const std::string& parameter);

// Whether transformers makes this tensor from others, so that it holds no weights of its own.
bool is_derived_tensor(const std::string& name);

}  // namespace forebay::gpt
