#include "runtime/command/plan/model_arguments.h"

#include <algorithm>

#include "forebay/model_config.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/command_line.h"

namespace forebay {
namespace {

constexpr std::int64_t kNumberLimit = std::int64_t{1} << 40;  // Tighter bounds are the shape's own.

Status read_count(const char* name, std::int64_t value, std::uint64_t* target) {
  return read_positive(name, value, kNumberLimit, target);
}

}  // namespace

bool ModelArguments::has_shape() const {
  return given(sequence_option) || std::any_of(shape_options.begin(), shape_options.end(), given);
}

bool ModelArguments::has_batch() const {
  return given(batch_option);
}

void add_model_options(CLI::App& command, ModelArguments& arguments) {
  const auto number = [&](const char* name, std::int64_t& target, const char* help) {
    return add_value(command, name, target, "N", help)->capture_default_str()->group(kModelHeading);
  };
  command
      .add_option("--config", arguments.config,
                  "The model as a Hugging Face config.json of the kind of gpt2, llama, mistral, qwen2, "
                  "qwen3, gemma, gemma2, gemma3_text, phi3, mixtral, deepseek_v2 or deepseek_v3")
      ->type_name("FILE")
      ->group(kModelHeading);
  arguments.shape_options = {number("--layers", arguments.layers, "Layers, for a model of the GPT-2 kind"),
                             number("--hidden", arguments.hidden, "Width of a layer"),
                             number("--heads", arguments.heads, "Attention heads, a divisor of --hidden"),
                             number("--vocabulary", arguments.vocabulary, "Different tokens")};
  arguments.sequence_option = number("--sequence", arguments.sequence, "Tokens of one sequence");
  arguments.batch_option =
      number("--batch", arguments.batch,
             "Sequences per micro-step and data-parallel rank; with --config 1, unless given");
}

Result<ModelChoice> read_model(const ModelArguments& arguments) {
  const bool has_numbers = std::any_of(arguments.shape_options.begin(), arguments.shape_options.end(), given);
  if (arguments.has_config() && has_numbers) {
    return refuse("--config and a shape were both given; with --config use --sequence and --batch only");
  }
  ModelChoice model;
  FOREBAY_RETURN_IF_ERROR(read_count("batch", arguments.batch, &model.batch));
  TransformerShape shape;
  if (arguments.has_config()) {
    FOREBAY_ASSIGN_OR_RETURN(shape, read_model_config(arguments.config));
    if (!given(arguments.batch_option)) model.batch = 1;
    if (given(arguments.sequence_option)) {
      FOREBAY_RETURN_IF_ERROR(read_count("sequence", arguments.sequence, &model.sequence));
    } else if (shape.positions == 0) {
      return refuse(shown_path(arguments.config) +
                    " has no max_position_embeddings; give the tokens of one sequence with --sequence");
    }
  } else {
    FOREBAY_RETURN_IF_ERROR(read_count("layers", arguments.layers, &shape.layers));
    FOREBAY_RETURN_IF_ERROR(read_count("hidden", arguments.hidden, &shape.hidden));
    FOREBAY_RETURN_IF_ERROR(read_count("heads", arguments.heads, &shape.heads));
    FOREBAY_RETURN_IF_ERROR(read_count("sequence", arguments.sequence, &shape.positions));
    FOREBAY_RETURN_IF_ERROR(read_count("vocabulary", arguments.vocabulary, &shape.vocabulary));
  }
  FOREBAY_ASSIGN_OR_RETURN(model.shape, complete_shape(shape));
  return model;
}

std::string describe_model(const ModelChoice& model) {
  const TransformerShape& shape = model.shape;
  const std::uint64_t sequence = model.sequence == 0 ? shape.positions : model.sequence;
  std::string text = shape.kind == TransformerKind::kGpt2 ? "GPT-2 kind: " : "Llama kind: ";
  text += format_count(shape.layers, "layer") + ", hidden " + std::to_string(shape.hidden) + ", " +
          format_count(shape.heads, "head");
  if (shape.experts.count > 0)
    text +=
        ", " + std::to_string(shape.experts.active) + " of " + format_count(shape.experts.count, "expert");
  if (shape.key_value_heads != shape.heads) {
    text += " (" + std::to_string(shape.key_value_heads) + " for keys and values)";
  }
  text += ", sequence " + std::to_string(sequence) + ", vocabulary " + std::to_string(shape.vocabulary) +
          (shape.tied_embedding ? " (tied)" : " (not tied)") + ", batch " + std::to_string(model.batch);
  return text;
}

Status check_positive(const char* name, std::int64_t value, std::int64_t limit) {
  if (value >= 1 && value <= limit) return Status();
  return refuse(std::string("--") + name + " is " + std::to_string(value) + "; use 1 to " +
                std::to_string(limit));
}

Status read_bytes(const char* name, const std::string& text, std::uint64_t* bytes) {
  if (const std::string question = size_question(text.c_str()); !question.empty())
    return refuse(std::string("--") + name + " is " + question);
  if (parse_bytes(text.c_str(), bytes) && *bytes > 0) return Status();
  return refuse(std::string("--") + name + " is '" + text + "'; use a size, such as 2MiB, 80GB or 4096");
}

}  // namespace forebay
