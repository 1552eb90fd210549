#include "output/huggingface.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "forebay/error.h"
#include "forebay/text.h"
#include "output/json_file.h"

namespace forebay::gpt {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kSizeMax = std::size_t{1} << 24;  // That of the command line.

// config.json, with errors that name it.
class Config {
 public:
  explicit Config(const std::string& directory)
      : path_(directory + "/config.json"), root_(read_json(path_)) {}

  std::size_t size(const char* key) const {
    const Json& value = root_.value(key, Json());
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() == 0 ||
        value.get<std::uint64_t>() > kSizeMax) {
      throw Error(StatusCode::kCorruption, shown_path(path_) + ": " + key + " is " + shown(value) +
                                               ", not a number from 1 to " + std::to_string(kSizeMax) +
                                               "; download or export the model again");
    }
    return value.get<std::size_t>();
  }
  // Refuses a value other than these; a missing one is the first.
  void expect(const char* key, const std::vector<Json>& known) const {
    const Json value = root_.value(key, known.front());
    for (const Json& one : known) {
      if (value == one) return;
    }
    throw Error(StatusCode::kUnsupported, shown_path(path_) + ": " + key + " is " + shown(value) +
                                              ", and forebay-gpt has models with " + shown(known.front()) +
                                              " only; give another model");
  }
  std::string word(const char* key) const {
    const Json value = root_.value(key, Json());
    return value.is_string() ? value.get<std::string>() : "";
  }

 private:
  static std::string shown(const Json& value) {
    return value.is_null() ? "missing"
                           : shown_value(value.dump(-1, ' ', true, Json::error_handler_t::replace));
  }

  std::string path_;
  Json root_;
};

}  // namespace

bool is_model_directory(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

GptShape shape_of_model(const std::string& directory, const GptShape& given) {
  const Config config(directory);
  config.expect("model_type", {"gpt2"});
  config.expect("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  config.expect("layer_norm_epsilon", {1e-5});
  config.expect("scale_attn_weights", {true});
  config.expect("scale_attn_by_inverse_layer_idx", {false});
  config.expect("add_cross_attention", {false});
  config.expect("tie_word_embeddings", {true});
  GptShape shape = given;
  shape.layers = config.size("n_layer");
  shape.hidden = config.size("n_embd");
  shape.heads = config.size("n_head");
  shape.positions = config.size("n_positions");
  shape.vocabulary = config.size("vocab_size");
  config.expect("n_inner", {nullptr, 4 * shape.hidden});
  return shape;
}

std::string model_config(const GptShape& shape) {
  const nlohmann::ordered_json config = {{"architectures", {"GPT2LMHeadModel"}},
                                         {"model_type", "gpt2"},
                                         {"activation_function", "gelu_new"},
                                         {"bos_token_id", nullptr},
                                         {"dtype", "float32"},
                                         {"eos_token_id", nullptr},
                                         {"layer_norm_epsilon", 1e-5},
                                         {"n_embd", shape.hidden},
                                         {"n_head", shape.heads},
                                         {"n_inner", nullptr},
                                         {"n_layer", shape.layers},
                                         {"n_positions", shape.position_count()},
                                         {"tie_word_embeddings", true},
                                         {"vocab_size", shape.vocabulary}};
  return config.dump(2) + "\n";
}

std::string published_name(const std::string& parameter) {
  return "transformer." + parameter;
}

bool is_derived_tensor(const std::string& name) {
  // Masks of attention, which older versions saved, and the head, which is tied to wte.weight.
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") || name == "lm_head.weight";
}

}  // namespace forebay::gpt
