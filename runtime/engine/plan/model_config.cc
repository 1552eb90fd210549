#include "forebay/model_config.h"

#include <nlohmann/json.hpp>
#include <string_view>

#include "forebay/regular_file.h"
#include "forebay/text.h"

namespace forebay {
namespace {

using Json = nlohmann::json;

// A configuration is a page of text; more than this is some other file.
constexpr std::size_t kConfigBytesMax = std::size_t{1} << 20;

// Reads keys out of one JSON object and remembers the first complaint, so that the reading stays a plain
// list.
class Reader {
 public:
  Reader(const Json& object, const std::string& name) : object_(object), name_(name) {}

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }

  std::uint64_t required(const char* key) {
    if (!has(key)) {
      complain(std::string("has no \"") + key + "\"");
      return 0;
    }
    return positive(key);
  }
  // 0 is allowed.
  std::uint64_t whole(const char* key) {
    const bool is_zero = has(key) && object_.at(key).is_number_unsigned() && object_.at(key) == 0;
    return is_zero ? 0 : optional(key);
  }
  std::uint64_t optional(const char* key) { return has(key) ? positive(key) : 0; }

  bool flag(const char* key, bool otherwise) {
    if (!has(key)) return otherwise;
    if (!object_.at(key).is_boolean()) {
      complain(std::string("has \"") + key + "\": " + shown_value(object_.at(key).dump()) +
               ", which is not true or false");
      return otherwise;
    }
    return object_.at(key).get<bool>();
  }

  const Status& status() const { return status_; }

 private:
  std::uint64_t positive(const char* key) {
    const Json& value = object_.at(key);
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > 0) return value.get<std::uint64_t>();
    complain(std::string("has \"") + key + "\": " + shown_value(value.dump()) +
             ", which is not a positive whole number");
    return 0;
  }
  void complain(const std::string& what) {
    if (!status_.ok()) return;
    status_ = Status(StatusCode::kInvalidArgument,
                     name_ + " " + what + "; use the config.json that came with the model");
  }

  const Json& object_;
  std::string name_;
  Status status_;
};

Result<TransformerShape> parse_gpt2(const Json& object, const std::string& name) {
  Reader reader(object, name);
  TransformerShape shape;
  shape.kind = TransformerKind::kGpt2;
  shape.layers = reader.required("n_layer");
  shape.hidden = reader.required("n_embd");
  shape.heads = reader.required("n_head");
  shape.vocabulary = reader.required("vocab_size");
  shape.positions = reader.required("n_positions");
  shape.intermediate = reader.optional("n_inner");
  shape.tied_embedding = reader.flag("tie_word_embeddings", true);
  const bool cross_attention = reader.flag("add_cross_attention", false);
  FOREBAY_RETURN_IF_ERROR(reader.status());
  if (cross_attention) {
    return Status(StatusCode::kUnsupported,
                  name +
                      " asks for cross-attention, whose parameters are not "
                      "planned; use a decoder-only configuration, or give the number of parameters");
  }
  return complete_shape(shape);
}

// The value of a key that a configuration of one kind may leave out, as transformers takes it. Kinds that are
// not here have none: heads share no keys, and they divide hidden_size.
struct KindDefaults {
  std::string_view kind;
  std::uint64_t key_value_heads = 0;
  std::uint64_t head_dimension = 0;
};
constexpr KindDefaults kKindDefaults[] = {{"mistral", 8, 0},      {"mixtral", 8, 0},  {"qwen2", 32, 0},
                                          {"qwen3", 32, 128},     {"gemma", 16, 256}, {"gemma2", 4, 256},
                                          {"gemma3_text", 4, 256}};

KindDefaults defaults_of(std::string_view kind) {
  for (const KindDefaults& defaults : kKindDefaults) {
    if (defaults.kind == kind) return defaults;
  }
  return {};
}

Result<TransformerShape> parse_llama(const Json& object, std::string_view kind, const std::string& name) {
  Reader reader(object, name);
  TransformerShape shape;
  shape.kind = TransformerKind::kLlama;
  shape.layers = reader.required("num_hidden_layers");
  shape.hidden = reader.required("hidden_size");
  shape.heads = reader.required("num_attention_heads");
  shape.vocabulary = reader.required("vocab_size");
  shape.intermediate = reader.required("intermediate_size");
  shape.positions = reader.optional("max_position_embeddings");
  const KindDefaults defaults = defaults_of(kind);
  const bool has_key_value_heads = object.contains("num_key_value_heads");  // Null: as many as heads.
  shape.key_value_heads =
      has_key_value_heads ? reader.optional("num_key_value_heads") : defaults.key_value_heads;
  shape.head_dimension = reader.has("head_dim") ? reader.optional("head_dim") : defaults.head_dimension;
  shape.tied_embedding = reader.flag("tie_word_embeddings", kind.starts_with("gemma"));
  shape.attention_bias = reader.flag("attention_bias", false);
  shape.feed_forward_bias = reader.flag("mlp_bias", false);
  if (kind == "qwen2") shape.query_key_value_bias = true;
  if (kind == "qwen3" || kind == "gemma3_text") shape.query_key_norm = true;
  if (kind == "gemma2" || kind == "gemma3_text") shape.output_norms = true;
  if (kind == "mixtral") {
    shape.experts = {.count = reader.required("num_local_experts"),
                     .active = reader.required("num_experts_per_tok"),
                     .intermediate = shape.intermediate};
  }
  bool every_layer_has_experts = true;
  if (kind == "deepseek_v2" || kind == "deepseek_v3") {
    shape.experts = {.count = reader.required("n_routed_experts"),
                     .active = reader.required("num_experts_per_tok"),
                     .shared = reader.optional("n_shared_experts"),
                     .intermediate = reader.required("moe_intermediate_size"),
                     .dense_layers = reader.whole("first_k_dense_replace")};
    shape.latent = {.query_rank = reader.optional("q_lora_rank"),
                    .key_value_rank = reader.required("kv_lora_rank"),
                    .rotary_dimension = reader.required("qk_rope_head_dim"),
                    .value_dimension = reader.required("v_head_dim")};
    shape.head_dimension = reader.required("qk_nope_head_dim");
    every_layer_has_experts = reader.optional("moe_layer_freq") <= 1;
  }
  FOREBAY_RETURN_IF_ERROR(reader.status());
  if (!every_layer_has_experts) {
    return Status(
        StatusCode::kUnsupported,
        name + " has \"moe_layer_freq\" above 1, which is not planned; give the number of parameters");
  }
  return complete_shape(shape);
}

// The kinds that parse_llama() reads.
constexpr std::string_view kLlamaKinds[] = {"llama",   "mistral",     "qwen2",       "qwen3",
                                            "gemma",   "gemma2",      "gemma3_text", "phi3",
                                            "mixtral", "deepseek_v2", "deepseek_v3"};

}  // namespace

Result<TransformerShape> parse_model_config(const std::string& text, const std::string& name) {
  constexpr int kDepthMax = 16;  // Far more than there is in any config.json.
  if (is_nested_deeper(text, kDepthMax)) {
    return Status(StatusCode::kInvalidArgument, name + " is nested deeper than " + std::to_string(kDepthMax) +
                                                    " levels; use the config.json that came with the model");
  }
  const Json object = Json::parse(text, nullptr, false);
  if (object.is_discarded() || !object.is_object()) {
    return Status(StatusCode::kInvalidArgument,
                  name + " is not a JSON object; use the config.json that came with the model");
  }
  if (!object.contains("model_type") || !object.at("model_type").is_string()) {
    return Status(StatusCode::kInvalidArgument,
                  name + " has no \"model_type\"; use the config.json that came with the model");
  }
  const std::string type = object.at("model_type").get<std::string>();
  if (type == "gpt2") return parse_gpt2(object, name);
  std::string kinds;
  for (const std::string_view kind : kLlamaKinds) {
    if (type == kind) return parse_llama(object, kind, name);
    kinds += ", " + std::string(kind);
  }
  return Status(StatusCode::kUnsupported, name, " has \"model_type\": \"", shown_value(type), "\"; gpt2",
                kinds, " can be read; give others as a number of parameters or by their shape");
}

Result<TransformerShape> read_model_config(const std::string& path) {
  const Result<std::string> text = internal::read_regular_file(path, kConfigBytesMax);
  if (!text.ok()) {
    return Status(text.status().code(), "cannot read ", shown_path(path), ": ", text.status().message(),
                  "; give the path of the model's config.json");
  }
  return parse_model_config(text.value(), path);
}

}  // namespace forebay
