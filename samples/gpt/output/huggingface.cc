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

  // A missing or null value is `otherwise`, unless that is 0.
  std::size_t size(const char* key, std::size_t otherwise = 0, std::size_t most = kSizeMax) const {
    const Json value = root_.value(key, Json());
    if (value.is_null() && otherwise > 0) return otherwise;
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() == 0 || value.get<std::uint64_t>() > most) {
      throw Error(StatusCode::kCorruption, shown_path(path_) + ": " + key + " is " + shown(value) +
                                               ", not a number from 1 to " + std::to_string(most) +
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
    std::string all;
    for (const Json& one : known) all += (all.empty() ? "" : " or ") + (one.is_null() ? "none" : shown(one));
    throw Error(StatusCode::kUnsupported, shown_path(path_) + ": " + key + " is " + shown(value) +
                                              ", and forebay-gpt has models with " + all +
                                              " only; give another model");
  }
  std::string word(const char* key) const {
    const Json value = root_.value(key, Json());
    return value.is_string() ? value.get<std::string>() : "";
  }
  bool is_true(const char* key, bool otherwise) const {
    const Json value = root_.value(key, Json(otherwise));
    return value.is_boolean() && value.get<bool>();
  }
  // A number above 0 and at most `most`.
  double positive(const char* key, double otherwise, double most) const {
    return positive_of(root_.value(key, Json(otherwise)), key, most);
  }
  // The base of the rotary embedding's frequencies. Newer files have it in "rope_parameters".
  double rope_theta() const {
    double theta = positive("rope_theta", 10000, kThetaMax);
    for (const char* key : {"rope_parameters", "rope_scaling"}) {
      const Json one = root_.value(key, Json());
      if (one.is_null()) continue;
      const Json type = one.is_object() ? one.value("rope_type", one.value("type", Json("default"))) : Json();
      if (type != "default") {
        throw Error(StatusCode::kUnsupported,
                    shown_path(path_) + ": " + key + " is " + shown(one) +
                        ", and forebay-gpt has rotary embeddings of the type default "
                        "only; give another model");
      }
      theta = positive_of(one.value("rope_theta", Json(theta)), "rope_theta", kThetaMax);
    }
    return theta;
  }

 private:
  static constexpr double kThetaMax = 1e30;

  double positive_of(const Json& value, const char* key, double most) const {
    if (!value.is_number() || !(value.get<double>() > 0) || value.get<double>() > most) {
      throw Error(StatusCode::kCorruption, shown_path(path_) + ": " + key + " is " + shown(value) +
                                               ", not a number above 0; download or export the model again");
    }
    return value.get<double>();
  }
  static std::string shown(const Json& value) {
    return value.is_null() ? "missing"
                           : shown_value(value.dump(-1, ' ', true, Json::error_handler_t::replace));
  }

  std::string path_;
  Json root_;
};

void read_gpt2(const Config& config, GptShape& shape) {
  config.expect("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  config.expect("layer_norm_epsilon", {1e-5});
  config.expect("scale_attn_weights", {true});
  config.expect("scale_attn_by_inverse_layer_idx", {false});
  config.expect("add_cross_attention", {false});
  config.expect("tie_word_embeddings", {true});
  config.expect("is_causal", {true});
  shape.layers = config.size("n_layer", 0, GptShape::kLayersMax);
  shape.hidden = config.size("n_embd");
  shape.heads = config.size("n_head");
  shape.positions = config.size("n_positions");
  shape.vocabulary = config.size("vocab_size");
  const std::size_t inner = config.size("n_inner", 4 * shape.hidden);
  if (inner != 4 * shape.hidden) shape.inner = inner;
}

void read_llama(const Config& config, GptShape& shape) {
  config.expect("hidden_act", {"silu"});
  config.expect("attention_bias", {false});
  config.expect("mlp_bias", {false});
  config.expect("pretraining_tp", {1});
  config.expect("is_causal", {true});
  shape.kind = ModelKind::kLlama;
  shape.layers = config.size("num_hidden_layers", 0, GptShape::kLayersMax);
  shape.hidden = config.size("hidden_size");
  shape.heads = config.size("num_attention_heads");
  shape.kv_heads = config.size("num_key_value_heads", shape.heads);
  shape.inner = config.size("intermediate_size");
  shape.positions = config.size("max_position_embeddings");
  shape.vocabulary = config.size("vocab_size");
  shape.norm_epsilon = config.positive("rms_norm_eps", 1e-6, 1);
  shape.rope_theta = config.rope_theta();
  shape.tied_head = config.is_true("tie_word_embeddings", false);
  config.expect("head_dim", {nullptr, shape.hidden / shape.heads});
}

nlohmann::ordered_json llama_config(const GptShape& shape) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"attention_bias", false},
          {"bos_token_id", nullptr},
          {"dtype", "float32"},
          {"eos_token_id", nullptr},
          {"head_dim", shape.hidden / shape.heads},
          {"hidden_act", "silu"},
          {"hidden_size", shape.hidden},
          {"intermediate_size", shape.inner_count()},
          {"max_position_embeddings", shape.position_count()},
          {"mlp_bias", false},
          {"num_attention_heads", shape.heads},
          {"num_hidden_layers", shape.layers},
          {"num_key_value_heads", shape.kv_head_count()},
          {"rms_norm_eps", shape.norm_epsilon},
          {"rope_parameters", {{"rope_theta", shape.rope_theta}, {"rope_type", "default"}}},
          {"rope_theta", shape.rope_theta},
          {"tie_word_embeddings", shape.tied_head},
          {"vocab_size", shape.vocabulary}};
}

nlohmann::ordered_json gpt2_config(const GptShape& shape) {
  const Json inner = shape.inner == 0 ? Json() : Json(shape.inner);
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"activation_function", "gelu_new"},
          {"bos_token_id", nullptr},
          {"dtype", "float32"},
          {"eos_token_id", nullptr},
          {"layer_norm_epsilon", 1e-5},
          {"n_embd", shape.hidden},
          {"n_head", shape.heads},
          {"n_inner", inner},
          {"n_layer", shape.layers},
          {"n_positions", shape.position_count()},
          {"tie_word_embeddings", true},
          {"vocab_size", shape.vocabulary}};
}

}  // namespace

bool is_model_directory(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

GptShape shape_of_model(const std::string& directory, const GptShape& given) {
  const Config config(directory);
  config.expect("model_type", {"gpt2", "llama"});
  GptShape shape = given;
  if (config.word("model_type") == model_name(ModelKind::kLlama)) {
    read_llama(config, shape);
  } else {
    read_gpt2(config, shape);
  }
  return shape;
}

std::string model_config(const GptShape& shape) {
  return (shape.is_llama() ? llama_config(shape) : gpt2_config(shape)).dump(2) + "\n";
}

std::string published_name(const std::string& parameter) {
  const bool is_llama = parameter.starts_with("model.") || parameter == "lm_head.weight";
  return is_llama ? parameter : "transformer." + parameter;
}

bool is_derived_tensor(const std::string& name) {
  // Masks and frequencies, which older versions saved, and the head where it is tied to the embedding.
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq") || name == "lm_head.weight";
}

}  // namespace forebay::gpt
