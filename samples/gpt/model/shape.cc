#include "model/shape.h"

#include <cmath>

#include "forebay/error.h"
#include "forebay/units.h"
#include "model/definitions.h"
#include "model/tokens.h"

namespace forebay::gpt {
namespace {

constexpr double kDeviation = 0.02;

GptParameter matrix(std::string name, std::size_t in, std::size_t out, double deviation = kDeviation) {
  return {.name = std::move(name), .shape = {in, out}, .deviation = deviation};
}

GptParameter vector(std::string name, std::size_t count, Initial initial) {
  return {.name = std::move(name), .shape = {count}, .group = kUndecayedGroup, .initial = initial};
}

GptParameter cut_by_rows(GptParameter parameter) {
  parameter.cut = Cut::kRows;
  return parameter;
}

GptParameter cut_by_columns(GptParameter parameter, std::size_t sections = 1) {
  parameter.cut = Cut::kColumns;
  parameter.sections = sections;
  return parameter;
}

// The rotary embedding turns pairs of a head's columns, by angles that turn_by() computes.
void check_rotary(const GptShape& shape) {
  const auto refuse = [](const std::string& message) { throw Error(StatusCode::kInvalidArgument, message); };
  const std::size_t columns = shape.hidden / shape.heads;
  if (columns % 2 != 0 || columns > 2 * kRotaryPairsMax) {
    refuse("--hidden / --heads is " + std::to_string(columns) +
           " with --model llama; use an even number up to " + std::to_string(2 * kRotaryPairsMax) +
           ", because pairs of columns turn");
  }
  if (shape.sequence > kRotaryPositionsMax) {
    refuse("--sequence is " + std::to_string(shape.sequence) + " with --model llama; use at most " +
           std::to_string(kRotaryPositionsMax) + ", up to which the angles are exact");
  }
  if (!(shape.rope_theta >= 1) || !std::isfinite(shape.rope_theta))
    refuse("--rope-theta is " + std::to_string(shape.rope_theta) + "; use 1 or more");
}

void check(const GptShape& shape) {
  const auto refuse = [](const std::string& message) { throw Error(StatusCode::kInvalidArgument, message); };
  if (shape.layers == 0) refuse("--layers is 0; use 1 or more");
  if (shape.hidden == 0) refuse("--hidden is 0; use a positive multiple of --heads");
  if (shape.heads == 0) refuse("--heads is 0; use a positive divisor of --hidden");
  if (shape.sequence == 0) refuse("--sequence is 0; use 1 or more");
  if (shape.vocabulary == 0 || shape.vocabulary > kVocabularyMax) {
    refuse("--vocabulary is " + std::to_string(shape.vocabulary) + "; use 1 to " +
           std::to_string(kVocabularyMax) + ": tokens have 16 bits");
  }
  if (shape.sequence > shape.position_count()) {
    refuse("--sequence " + std::to_string(shape.sequence) + " is more than the model's " +
           std::to_string(shape.position_count()) + " positions; use at most as many");
  }
  if (shape.is_llama() && shape.heads % shape.kv_head_count() != 0) {
    refuse("--kv-heads " + std::to_string(shape.kv_heads) + " does not divide --heads " +
           std::to_string(shape.heads) + "; use a divisor of it");
  }
  if (!shape.is_llama() && shape.kv_heads != 0)
    refuse("--kv-heads is for heads that share keys, and those of GPT-2 do not; add --model llama");
  if (shape.hidden % shape.heads != 0) {
    refuse("--heads " + std::to_string(shape.heads) + " does not divide --hidden " +
           std::to_string(shape.hidden) + "; use a divisor of it");
  }
  if (shape.is_llama()) check_rotary(shape);
}

// A parameter that projects from `in` to `out` columns is [out, in].
std::vector<GptUnit> describe_llama(const GptShape& shape) {
  const std::size_t hidden = shape.hidden, inner = shape.inner_count();
  const double residual = kDeviation / std::sqrt(2.0 * static_cast<double>(shape.layers));
  const auto gain = [&](std::string name) { return vector(std::move(name), hidden, Initial::kOne); };
  const std::string model = "model.";

  std::vector<GptUnit> units;
  units.push_back(
      {"embedding", {cut_by_rows(matrix(model + "embed_tokens.weight", shape.vocabulary, hidden))}});
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::string l = model + "layers." + std::to_string(layer) + ".";
    units.push_back({"layers." + std::to_string(layer),
                     {gain(l + "input_layernorm.weight"),
                      cut_by_rows(matrix(l + "self_attn.q_proj.weight", hidden, hidden)),
                      cut_by_rows(matrix(l + "self_attn.k_proj.weight", shape.kv_columns(), hidden)),
                      cut_by_rows(matrix(l + "self_attn.v_proj.weight", shape.kv_columns(), hidden)),
                      cut_by_columns(matrix(l + "self_attn.o_proj.weight", hidden, hidden, residual)),
                      gain(l + "post_attention_layernorm.weight"),
                      cut_by_rows(matrix(l + "mlp.gate_proj.weight", inner, hidden)),
                      cut_by_rows(matrix(l + "mlp.up_proj.weight", inner, hidden)),
                      cut_by_columns(matrix(l + "mlp.down_proj.weight", hidden, inner, residual))}});
  }
  GptUnit last{.name = "final", .parameters = {gain(model + "norm.weight")}, .uses_tokens = shape.tied_head};
  if (!shape.tied_head)
    last.parameters.push_back(cut_by_rows(matrix("lm_head.weight", shape.vocabulary, hidden)));
  units.push_back(std::move(last));
  return units;
}

}  // namespace

std::size_t GptShape::inner_count() const {
  if (inner != 0) return inner;
  return is_llama() ? round_up(ceil_div(8 * hidden, std::size_t{3}), 32) : 4 * hidden;
}

bool is_token_embedding(const std::string& parameter) {
  return parameter == "wte.weight" || parameter == "model.embed_tokens.weight";
}

const char* model_name(ModelKind kind) {
  return kind == ModelKind::kLlama ? "llama" : "gpt2";
}

std::size_t GptParameter::count() const {
  std::size_t count = 1;
  for (const std::size_t extent : shape) count *= extent;
  return count;
}

std::vector<GptUnit> describe_units(const GptShape& shape) {
  check(shape);
  if (shape.is_llama()) return describe_llama(shape);
  const std::size_t hidden = shape.hidden, inner = shape.inner_count();
  // The projections that add to the residual stream: 2 per layer add up to the same variance at every depth.
  const double residual = kDeviation / std::sqrt(2.0 * static_cast<double>(shape.layers));

  std::vector<GptUnit> units;
  units.push_back({"embedding",
                   {cut_by_rows(matrix("wte.weight", shape.vocabulary, hidden)),
                    matrix("wpe.weight", shape.position_count(), hidden)}});
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::string h = "h." + std::to_string(layer) + ".";
    units.push_back(
        {"h." + std::to_string(layer),
         {vector(h + "ln_1.weight", hidden, Initial::kOne), vector(h + "ln_1.bias", hidden, Initial::kZero),
          cut_by_columns(matrix(h + "attn.c_attn.weight", hidden, 3 * hidden), 3),
          cut_by_columns(vector(h + "attn.c_attn.bias", 3 * hidden, Initial::kZero), 3),
          cut_by_rows(matrix(h + "attn.c_proj.weight", hidden, hidden, residual)),
          vector(h + "attn.c_proj.bias", hidden, Initial::kZero),
          vector(h + "ln_2.weight", hidden, Initial::kOne), vector(h + "ln_2.bias", hidden, Initial::kZero),
          cut_by_columns(matrix(h + "mlp.c_fc.weight", hidden, inner)),
          cut_by_columns(vector(h + "mlp.c_fc.bias", inner, Initial::kZero)),
          cut_by_rows(matrix(h + "mlp.c_proj.weight", inner, hidden, residual)),
          vector(h + "mlp.c_proj.bias", hidden, Initial::kZero)}});
  }
  units.push_back({.name = "final",
                   .parameters = {vector("ln_f.weight", hidden, Initial::kOne),
                                  vector("ln_f.bias", hidden, Initial::kZero)},
                   .uses_tokens = true});
  return units;
}

std::size_t parameter_count(const GptShape& shape) {
  std::size_t count = 0;
  for (const GptUnit& unit : describe_units(shape)) {
    for (const GptParameter& parameter : unit.parameters) count += parameter.count();
  }
  return count;
}

LayerRange layers_of(const GptShape& shape, const PipelineStage& stage) {
  return {stage.index * shape.layers / stage.count, (stage.index + 1) * shape.layers / stage.count};
}

void check_stages(const GptShape& shape, std::size_t stages) {
  if (stages <= shape.layers) return;
  throw Error(StatusCode::kInvalidArgument, "--pipeline-parallel " + std::to_string(stages) +
                                                " is more than --layers " + std::to_string(shape.layers) +
                                                "; use at most as many stages as layers");
}

std::vector<GptUnit> stage_of(const std::vector<GptUnit>& units, const PipelineStage& stage) {
  if (stage.count == 1) return units;
  GptUnit embedding = units.front();
  std::vector<GptUnit> mine;
  if (units.back().uses_tokens) {
    GptUnit tokens{
        .name = "tokens", .parameters = {embedding.parameters[embedding::kTokens]}, .is_computed = false};
    embedding.parameters.erase(embedding.parameters.begin() + embedding::kTokens);
    embedding.uses_tokens = true;
    if (stage.is_first() || stage.is_last()) mine.push_back(std::move(tokens));
  }
  if (stage.is_first()) mine.push_back(std::move(embedding));
  const LayerRange layers = layers_of({.layers = units.size() - 2}, stage);
  for (std::size_t layer = layers.begin; layer < layers.end; ++layer) mine.push_back(units[1 + layer]);
  if (stage.is_last()) mine.push_back(units.back());
  return mine;
}

void check_part(const GptShape& shape, const TensorPart& part) {
  const auto check_heads = [&](const char* option, std::size_t heads) {
    if (heads % part.size == 0) return;
    throw Error(StatusCode::kInvalidArgument, "--tensor-parallel " + std::to_string(part.size) +
                                                  " does not divide " + option + " " + std::to_string(heads) +
                                                  "; use a divisor of it");
  };
  check_heads("--heads", shape.heads);
  check_heads("--kv-heads", shape.kv_head_count());
}

std::vector<GptUnit> part_of(const std::vector<GptUnit>& units, const TensorPart& part) {
  std::vector<GptUnit> parts = units;
  for (GptUnit& unit : parts) {
    for (GptParameter& parameter : unit.parameters) parameter = part_of(parameter, part);
  }
  return parts;
}

GptParameter part_of(const GptParameter& whole, const TensorPart& part) {
  GptParameter cut = whole;
  if (whole.cut == Cut::kRows) cut.shape.front() = ceil_div(whole.shape.front(), part.size);
  if (whole.cut == Cut::kColumns)
    cut.shape.back() = whole.sections * ceil_div(whole.shape.back() / whole.sections, part.size);
  if (whole.cut != Cut::kWhole && part.size > 1) {
    cut.split = {.shape = {whole.shape.begin(), whole.shape.end()},
                 .dimension = whole.cut == Cut::kRows ? 0 : static_cast<int>(whole.shape.size()) - 1,
                 .sections = whole.sections,
                 .part = part.rank,
                 .parts = part.size};
  }
  return cut;
}

std::optional<std::size_t> place_in_whole(const GptParameter& whole, const TensorPart& part, std::size_t i) {
  if (whole.cut == Cut::kWhole) return i;
  const std::size_t columns = whole.shape.back();
  if (whole.cut == Cut::kRows) {
    const std::size_t place = part.rank * ceil_div(whole.shape.front(), part.size) * columns + i;
    return place < whole.count() ? std::optional(place) : std::nullopt;
  }
  const std::size_t section_columns = columns / whole.sections;
  const std::size_t part_columns = ceil_div(section_columns, part.size);
  const std::size_t row = i / (whole.sections * part_columns);
  const std::size_t section = i / part_columns % whole.sections;
  const std::size_t column = part.rank * part_columns + i % part_columns;
  if (column >= section_columns) return std::nullopt;
  return row * columns + section * section_columns + column;
}

std::vector<float> take_part(const GptParameter& whole, const TensorPart& part,
                             std::span<const float> values) {
  std::vector<float> taken(part_of(whole, part).count(), 0.0F);
  for (std::size_t i = 0; i < taken.size(); ++i) {
    if (const std::optional<std::size_t> place = place_in_whole(whole, part, i)) taken[i] = values[*place];
  }
  return taken;
}

void put_part(const GptParameter& whole, const TensorPart& part, std::span<const float> part_values,
              std::span<float> values) {
  for (std::size_t i = 0; i < part_values.size(); ++i) {
    if (const std::optional<std::size_t> place = place_in_whole(whole, part, i))
      values[*place] = part_values[i];
  }
}

}  // namespace forebay::gpt
