#include "shape.h"

#include <cmath>

#include "forebay/error.h"

namespace forebay::gpt {
namespace {

constexpr double kDeviation = 0.02;

GptParameter matrix(std::string name, std::size_t in, std::size_t out, double deviation = kDeviation) {
  return {.name = std::move(name), .shape = {in, out}, .deviation = deviation};
}

GptParameter vector(std::string name, std::size_t count, Initial initial) {
  return {.name = std::move(name), .shape = {count}, .group = kUndecayedGroup, .initial = initial};
}

void check(const GptShape& shape) {
  const auto refuse = [](const std::string& message) { throw Error(StatusCode::kInvalidArgument, message); };
  if (shape.layers == 0) refuse("--layers is 0: a model needs at least one block");
  if (shape.hidden == 0) refuse("--hidden is 0: give a positive multiple of --heads");
  if (shape.heads == 0) refuse("--heads is 0: give a positive divisor of --hidden");
  if (shape.sequence == 0) refuse("--sequence is 0: a sample needs at least one token");
  if (shape.hidden % shape.heads != 0) {
    refuse("--heads " + std::to_string(shape.heads) + " does not divide --hidden " +
           std::to_string(shape.hidden) + ": every head needs the same whole number of columns");
  }
}

}  // namespace

std::size_t GptParameter::count() const {
  std::size_t count = 1;
  for (const std::size_t extent : shape) count *= extent;
  return count;
}

std::vector<GptUnit> describe_units(const GptShape& shape) {
  check(shape);
  const std::size_t hidden = shape.hidden;
  // The projections that add to the residual stream: 2 per layer add up to the same variance at every depth.
  const double residual = kDeviation / std::sqrt(2.0 * static_cast<double>(shape.layers));

  std::vector<GptUnit> units;
  units.push_back(
      {"embedding",
       {matrix("wte.weight", kVocabulary, hidden), matrix("wpe.weight", shape.sequence, hidden)}});
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::string h = "h." + std::to_string(layer) + ".";
    units.push_back(
        {"h." + std::to_string(layer),
         {vector(h + "ln_1.weight", hidden, Initial::kOne), vector(h + "ln_1.bias", hidden, Initial::kZero),
          matrix(h + "attn.c_attn.weight", hidden, 3 * hidden),
          vector(h + "attn.c_attn.bias", 3 * hidden, Initial::kZero),
          matrix(h + "attn.c_proj.weight", hidden, hidden, residual),
          vector(h + "attn.c_proj.bias", hidden, Initial::kZero),
          vector(h + "ln_2.weight", hidden, Initial::kOne), vector(h + "ln_2.bias", hidden, Initial::kZero),
          matrix(h + "mlp.c_fc.weight", hidden, 4 * hidden),
          vector(h + "mlp.c_fc.bias", 4 * hidden, Initial::kZero),
          matrix(h + "mlp.c_proj.weight", 4 * hidden, hidden, residual),
          vector(h + "mlp.c_proj.bias", hidden, Initial::kZero)}});
  }
  units.push_back(
      {"final", {vector("ln_f.weight", hidden, Initial::kOne), vector("ln_f.bias", hidden, Initial::kZero)}});
  return units;
}

std::size_t parameter_count(const GptShape& shape) {
  std::size_t count = 0;
  for (const GptUnit& unit : describe_units(shape)) {
    for (const GptParameter& parameter : unit.parameters) count += parameter.count();
  }
  return count;
}

}  // namespace forebay::gpt
