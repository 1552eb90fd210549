#include "forebay/model_shape.h"

#include <gtest/gtest.h>

#include "forebay/model_config.h"

namespace forebay {
namespace {

std::string data(const std::string& name) {
  return std::string(FOREBAY_TEST_DATA) + "/" + name;
}

ModelShape shape_of_config(const std::string& name) {
  return make_model_shape(read_model_config(data(name)).value()).value();
}

TransformerShape small_gpt() {
  return {.layers = 2, .hidden = 8, .heads = 2, .vocabulary = 16, .positions = 4};
}

// --- GPT-2 ---

TEST(ModelShape, NamesGpt2ParametersAsHuggingFaceDoes) {
  const ModelShape model = make_model_shape(small_gpt()).value();

  ASSERT_EQ(model.units.size(), 4u);
  EXPECT_EQ(model.units[0].name, "embedding");
  EXPECT_EQ(model.units[1].name, "h.0");
  EXPECT_EQ(model.units[3].name, "final");
  std::vector<std::pair<std::string, std::uint64_t>> found;
  for (const ParameterShape& parameter : model.units[2].parameters) {
    found.emplace_back(parameter.name, parameter.count);
  }
  const std::vector<std::pair<std::string, std::uint64_t>> expected = {{"h.1.ln_1.weight", 8},
                                                                       {"h.1.ln_1.bias", 8},
                                                                       {"h.1.attn.c_attn.weight", 8 * 24},
                                                                       {"h.1.attn.c_attn.bias", 24},
                                                                       {"h.1.attn.c_proj.weight", 64},
                                                                       {"h.1.attn.c_proj.bias", 8},
                                                                       {"h.1.ln_2.weight", 8},
                                                                       {"h.1.ln_2.bias", 8},
                                                                       {"h.1.mlp.c_fc.weight", 8 * 32},
                                                                       {"h.1.mlp.c_fc.bias", 32},
                                                                       {"h.1.mlp.c_proj.weight", 32 * 8},
                                                                       {"h.1.mlp.c_proj.bias", 8}};
  EXPECT_EQ(found, expected);
  EXPECT_EQ(model.units[0].parameters[0].name, "wte.weight");
  EXPECT_EQ(model.units[0].parameters[1].name, "wpe.weight");
  EXPECT_EQ(model.units[3].parameters[0].name, "ln_f.weight");
}

TEST(ModelShape, PartsAreCutAsTensorParallelRanksShareThem) {
  const TransformerShape shape = {.layers = 1, .hidden = 12, .heads = 3, .vocabulary = 16, .positions = 4};
  const ModelShape model = make_model_shape(shape, {.tensor_parallel = 3}).value();

  std::vector<std::pair<std::uint64_t, bool>> found;  // Elements, and whether all ranks have them.
  for (const UnitShape& unit : model.units) {
    for (const ParameterShape& parameter : unit.parameters)
      found.emplace_back(parameter.count, parameter.replicated);
  }
  const std::vector<std::pair<std::uint64_t, bool>> expected = {
      {6 * 12, false},  {4 * 12, true},                                 // 16 tokens: 6, 6 and 4 of them.
      {12, true},       {12, true},     {12 * 12, false}, {12, false},  // Norm; query, key, value.
      {4 * 12, false},  {12, true},     {12, true},       {12, true},   // Projection; norm.
      {12 * 16, false}, {16, false},    {16 * 12, false}, {12, true},   // Feed-forward part.
      {12, true},       {12, true}};
  EXPECT_EQ(found, expected);

  // Ranks share a head of keys where there are fewer of these.
  const TransformerShape few_keys = {.kind = TransformerKind::kLlama,
                                     .layers = 1,
                                     .hidden = 12,
                                     .heads = 2,
                                     .vocabulary = 16,
                                     .intermediate = 8,
                                     .key_value_heads = 1};
  const ModelShape llama = make_model_shape(few_keys, {.tensor_parallel = 2}).value();
  for (const ParameterShape& parameter : llama.units[1].parameters) {
    if (parameter.name.find("k_proj") != std::string::npos) {
      EXPECT_EQ(parameter.count, 12u * 6);
    }
  }
}

TEST(ModelShape, PipelineStagesHaveAllLayersOnceAndTheEndsTheEmbedding) {
  TransformerShape shape = small_gpt();
  shape.layers = 7;
  std::vector<std::string> units;
  for (int stage = 0; stage < 3; ++stage) {
    const ModelShape model =
        make_model_shape(shape, {.pipeline_parallel = 3, .pipeline_stage = stage}).value();
    for (const UnitShape& unit : model.units) {
      units.push_back(unit.name);
      EXPECT_EQ(unit.shared_by, unit.name == "tokens" ? 2 : 1);
      EXPECT_EQ(unit.tied.size(), unit.name == "embedding" || unit.name == "final" ? 1u : 0u);
    }
  }

  EXPECT_EQ(units, (std::vector<std::string>{"tokens", "embedding", "h.0", "h.1", "h.2", "h.3", "tokens",
                                             "h.4", "h.5", "h.6", "final"}));
}

TEST(ModelShape, RefusesPartsThatThereCannotBe) {
  const auto says = [](const ModelPart& part) {
    return make_model_shape(small_gpt(), part).status().message();
  };
  EXPECT_NE(says({.tensor_parallel = 4}).find("2 heads, which it does not divide"), std::string::npos);
  EXPECT_NE(says({.tensor_parallel = 0}).find("tensor-parallel is 0"), std::string::npos);
  EXPECT_NE(says({.pipeline_parallel = 3}).find("each stage needs a layer"), std::string::npos);
  EXPECT_NE(says({.pipeline_parallel = 2, .pipeline_stage = 2}).find("use 0 to 1"), std::string::npos);
}

TEST(ModelShape, TiesTheOutputToTheEmbeddingWhoseBackwardReadsNoParameters) {
  const ModelShape model = make_model_shape(small_gpt()).value();

  EXPECT_FALSE(model.units[0].backward_reads_parameters);
  EXPECT_TRUE(model.units[1].backward_reads_parameters);
  ASSERT_EQ(model.units[3].tied.size(), 1u);
  EXPECT_EQ(model.units[3].tied[0].unit, 0);
  EXPECT_EQ(model.units[3].tied[0].index, 0);
  EXPECT_EQ(model.units[3].parameters.size(), 2u);

  TransformerShape untied = small_gpt();
  untied.tied_embedding = false;
  const ModelShape apart = make_model_shape(untied).value();
  EXPECT_TRUE(apart.units[3].tied.empty());
  EXPECT_EQ(apart.units[3].parameters.back().name, "lm_head.weight");
  EXPECT_EQ(apart.parameter_count(), model.parameter_count() + 16 * 8);
}

TEST(ModelShape, PutsOnlyMatricesInTheGroupThatDecays) {
  for (const char* config : {"gpt2.json", "llama_tied_biased.json"}) {
    for (const UnitShape& unit : shape_of_config(config).units) {
      for (const ParameterShape& parameter : unit.parameters) {
        const bool bias = parameter.name.ends_with(".bias");
        const bool norm = parameter.name.find("ln_") != std::string::npos ||
                          parameter.name.find("norm") != std::string::npos;
        EXPECT_EQ(parameter.group, bias || norm ? 1 : 0) << parameter.name;
        EXPECT_FALSE(parameter.frozen);
      }
    }
  }
}

// --- published models ---

TEST(ModelConfig, CountsTheParametersOfPublishedModels) {
  EXPECT_EQ(shape_of_config("gpt2.json").parameter_count(), 124'439'808u);
  EXPECT_EQ(shape_of_config("llama_2_7b.json").parameter_count(), 6'738'415'616u);
  EXPECT_EQ(shape_of_config("llama_3_8b.json").parameter_count(), 8'030'261'248u);
}

TEST(ModelConfig, CountsBiasesGroupedHeadsAndATiedEmbedding) {
  const ModelShape model = shape_of_config("llama_tied_biased.json");

  // 4 query heads and 2 key-value heads of 8: queries are 32 wide, keys and values 16, hidden 48.
  const std::uint64_t attention = (48 * 32 + 32) + 2 * (48 * 16 + 16) + (32 * 48 + 48);
  const std::uint64_t feed_forward = 2 * (48 * 100 + 100) + (100 * 48 + 48);
  const std::uint64_t layer = attention + feed_forward + 2 * 48;
  EXPECT_EQ(model.parameter_count(), 64 * 48 + 2 * layer + 48);
  ASSERT_EQ(model.units.back().tied.size(), 1u);
  EXPECT_EQ(model.units.back().parameters.front().name, "model.norm.weight");
  EXPECT_EQ(model.units[1].parameters[1].name, "model.layers.0.self_attn.q_proj.weight");
}

// Parameters as the models' cards and checkpoints have them.
TEST(ModelConfig, CountsTheParametersOfKnownModels) {
  struct Known {
    const char* config;
    std::uint64_t parameters;
  };
  const Known models[] = {
      {R"("model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000)",
       7'241'732'096},
      {R"("model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
          "num_experts_per_tok": 2)",
       46'702'792'704},
      {R"("model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
          "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064)",
       7'615'616'512},
      {R"("model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
          "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936)",
       8'190'735'360},
      {R"("model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8,
          "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384, "vocab_size": 256000)",
       2'506'172'416},
      {R"("model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
          "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000)",
       2'614'341'888},
      {R"("model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064)",
       3'821'079'552},
      {R"("model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
          "num_key_value_heads": 16, "intermediate_size": 10944, "vocab_size": 102400, "n_routed_experts": 64,
          "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
          "first_k_dense_replace": 1, "q_lora_rank": null, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
          "qk_nope_head_dim": 128, "v_head_dim": 128)",
       15'706'484'224}};
  for (const Known& model : models) {
    const std::string text = std::string("{") + model.config + "}";
    const TransformerShape shape = parse_model_config(text, "config").value();
    EXPECT_EQ(make_model_shape(shape).value().parameter_count(), model.parameters) << text;
  }
}

std::uint64_t parameters_of(const std::string& members) {
  const TransformerShape shape = parse_model_config("{" + members + "}", "config").value();
  return make_model_shape(shape).value().parameter_count();
}

// As transformers takes them.
TEST(ModelConfig, MembersThatAreLeftOutHaveTheValuesOfTheirKind) {
  const struct {
    std::string kind, heads, keys, head_dimension;
  } kinds[] = {{"qwen3", "64", "32", "128"},     {"gemma", "16", "16", "256"}, {"gemma2", "8", "4", "256"},
               {"gemma3_text", "8", "4", "256"}, {"mistral", "32", "8", "2"},  {"mixtral", "32", "8", "2"},
               {"qwen2", "64", "32", "1"},       {"llama", "32", "32", "2"}};
  for (const auto& kind : kinds) {
    const std::string text = R"("model_type": ")" + kind.kind + R"(", "num_attention_heads": )" + kind.heads +
                             R"(, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
                             "vocab_size": 100, "num_local_experts": 2, "num_experts_per_tok": 1)";
    const std::string keys = R"(, "num_key_value_heads": )", width = R"(, "head_dim": )";
    EXPECT_EQ(parameters_of(text), parameters_of(text + keys + kind.keys + width + kind.head_dimension))
        << text;
    EXPECT_EQ(parameters_of(text + keys + "null"), parameters_of(text + keys + kind.heads)) << text;
    EXPECT_EQ(parameters_of(text + width + "null"), parameters_of(text)) << text;
  }
}

TEST(ModelConfig, DeepSeeksShortVectorsHaveBiasesToo) {
  const std::string text =
      R"("model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
          "intermediate_size": 128, "vocab_size": 100, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 32, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
          "v_head_dim": 8)";
  const std::string queries = R"(, "q_lora_rank": 24)", bias = R"(, "attention_bias": true)";
  EXPECT_EQ(parameters_of(text + bias) - parameters_of(text), 3u * (8 + 4 + 64));
  EXPECT_EQ(parameters_of(text + queries + bias) - parameters_of(text + queries), 3u * (24 + 8 + 4 + 64));
}

// --- refusals ---

struct BadConfig {
  const char* file;
  StatusCode code;
  const char* says;
};

TEST(ModelConfig, SaysWhatIsWrongWithAFile) {
  const BadConfig cases[] = {{"absent.json", StatusCode::kIoError, "cannot read"},
                             {"", StatusCode::kIoError, "cannot read"},
                             {"malformed.json", StatusCode::kInvalidArgument, "not a JSON object"},
                             {"bert.json", StatusCode::kUnsupported, "\"bert\""},
                             {"gpt2_without_width.json", StatusCode::kInvalidArgument, "no \"n_embd\""},
                             {"gpt2_negative_layers.json", StatusCode::kInvalidArgument, "\"n_layer\": -12"}};
  for (const BadConfig& bad : cases) {
    const Status status = read_model_config(data(bad.file)).status();
    EXPECT_EQ(status.code(), bad.code) << bad.file;
    EXPECT_NE(status.message().find(bad.says), std::string::npos) << status.message();
  }
}

TEST(ModelConfig, RefusesValuesThatAreNestedWithoutEnd) {
  const std::string open(500'000, '['), close(500'000, ']');
  const Status status =
      parse_model_config(R"({"model_type": "llama", "num_hidden_layers": )" + open + close + "}", "config")
          .status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("nested deeper than 16 levels"), std::string::npos) << status.message();
}

TEST(ModelConfig, RefusesValuesOfTheWrongKind) {
  const std::string start = R"({"model_type": "gpt2", "n_head": 2, "n_layer": 2, "n_positions": 8, )";
  for (const char* rest :
       {R"("vocab_size": 10, "n_embd": 9})", R"("vocab_size": 10, "n_embd": 8.5})",
        R"("vocab_size": 0, "n_embd": 8})", R"("vocab_size": 1e30, "n_embd": 8})",
        R"("vocab_size": 10, "n_embd": "8"})", R"("vocab_size": 10, "n_embd": 8, "tie_word_embeddings": 1})",
        R"("vocab_size": 10, "n_embd": 18446744073709551615})"}) {
    EXPECT_EQ(parse_model_config(start + rest, "config").status().code(), StatusCode::kInvalidArgument)
        << rest;
  }
  EXPECT_TRUE(parse_model_config(start + R"("vocab_size": 10, "n_embd": 8})", "config").ok());
  EXPECT_EQ(
      parse_model_config(start + R"("vocab_size": 10, "n_embd": 8, "add_cross_attention": true})", "config")
          .status()
          .code(),
      StatusCode::kUnsupported);
  const std::string experts =
      R"({"model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 128, "vocab_size": 100, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 32, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
          "v_head_dim": 8, "moe_layer_freq": )";
  EXPECT_TRUE(parse_model_config(experts + "1}", "config").ok());
  EXPECT_EQ(parse_model_config(experts + "2}", "config").status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(parse_model_config(experts + "0}", "config").status().code(), StatusCode::kInvalidArgument);
  for (const char* other : {"[]", "3", "", "{}", R"({"model_type": 3})"}) {
    EXPECT_EQ(parse_model_config(other, "config").status().code(), StatusCode::kInvalidArgument) << other;
  }
}

TEST(ModelShape, NamesTheNumberThatDoesNotGoWithTheOthers) {
  const auto message = [](auto change) {
    TransformerShape shape = small_gpt();
    change(shape);
    const Status status = make_model_shape(shape).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_NE(message([](auto& s) { s.heads = 3; }).find("heads 3 does not divide hidden 8"),
            std::string::npos);
  EXPECT_NE(message([](auto& s) { s.layers = 0; }).find("layers is 0"), std::string::npos);
  EXPECT_NE(message([](auto& s) { s.positions = 0; }).find("sequence is 0"), std::string::npos);
  EXPECT_NE(message([](auto& s) { s.vocabulary = ~0ull; }).find("vocabulary is"), std::string::npos);
  EXPECT_NE(message([](auto& s) { s.hidden = 1ull << 40; }).find("hidden is"), std::string::npos);
  EXPECT_NE(message([](auto& s) { s.heads = 8, s.key_value_heads = 3; }).find("key-value heads 3"),
            std::string::npos);
  const auto with_experts = [](auto& s) {
    s.experts.count = 4, s.experts.active = 5, s.experts.intermediate = 8;
  };
  EXPECT_NE(message(with_experts).find("active experts is 5; use 1 to 4"), std::string::npos);
}

// --- activations ---

TEST(ActivationEstimate, IsKorthikantisFormulaForTwoByteTypes) {
  // Residual figures of the 1.5 B model of the ZeRO paper: 48 layers of 1600, 25 heads, 32 sequences of 1024.
  const TransformerShape shape = {
      .layers = 48, .hidden = 1600, .heads = 25, .vocabulary = 50257, .positions = 1024};

  const std::uint64_t bytes = estimate_activation_bytes(shape, {.batch = 32}).value();

  const std::uint64_t tokens = 1024 * 32;
  const std::uint64_t loss = tokens * 50257 * 10;  // Logits of 2 bytes, and two tensors of 4 bytes.
  EXPECT_EQ(bytes, 48 * tokens * (34 * 1600 + 5 * 25 * 1024) + loss);
  EXPECT_EQ(bytes, 286'890'393'600u + loss);
}

TEST(ActivationEstimate, GrowsWithTheTypeBatchAndSequence) {
  const TransformerShape shape = {.layers = 2, .hidden = 64, .heads = 4, .vocabulary = 10, .positions = 32};
  const auto estimate = [&](ActivationOptions options) {
    return estimate_activation_bytes(shape, options).value();
  };
  // fp32 doubles all but the masks: 66sbh and 9as^2b.
  EXPECT_EQ(estimate({.dtype = DataType::kFloat32}), 2u * 32 * (66 * 64 + 9 * 4 * 32) + 32 * 10 * 12);
  EXPECT_EQ(estimate({.batch = 3}), 3 * estimate({}));
  EXPECT_EQ(estimate({.sequence = 8}), 2u * 8 * (34 * 64 + 5 * 4 * 8) + 8 * 10 * 10);
}

TEST(ActivationEstimate, CountsTheExpertsThatATokenGoesThrough) {
  TransformerShape shape;
  shape.intermediate = 7;
  EXPECT_EQ(active_intermediate(shape), 7u);
  shape.experts.count = 8, shape.experts.active = 2, shape.experts.shared = 1, shape.experts.intermediate = 5;
  EXPECT_EQ(active_intermediate(shape), 3 * 5u);
}

TEST(ActivationEstimate, RefusesWhatTheModelHasNoPlaceFor) {
  const TransformerShape shape = {.layers = 2, .hidden = 64, .heads = 4, .vocabulary = 10, .positions = 32};
  EXPECT_EQ(estimate_activation_bytes(shape, {.sequence = 33}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(estimate_activation_bytes(shape, {.batch = 0}).status().code(), StatusCode::kInvalidArgument);

  TransformerShape huge = shape;
  huge.positions = 1u << 28;
  EXPECT_EQ(estimate_activation_bytes(huge, {.batch = 1u << 20}).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay
