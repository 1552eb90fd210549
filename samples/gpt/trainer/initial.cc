#include "trainer/initial.h"

#include <set>

#include "forebay/error.h"
#include "model/random.h"
#include "output/safetensors.h"

namespace forebay::gpt {
namespace {

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text;
  for (const std::uint64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

}  // namespace

std::vector<float> random_values(const GptParameter& parameter, std::uint64_t index, std::uint64_t seed) {
  std::vector<float> values(parameter.count(), parameter.initial == Initial::kOne ? 1.0F : 0.0F);
  if (parameter.initial != Initial::kNormal) return values;
#pragma omp parallel for schedule(static)
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(parameter.deviation * draw_normal(seed, index, i));
  }
  return values;
}

void set_random(const std::vector<GptUnit>& units, std::uint64_t seed, const ParameterSetter& set) {
  std::uint64_t stream = 0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (std::size_t i = 0; i < units[u].parameters.size(); ++i) {
      set(u, i, random_values(units[u].parameters[i], stream++, seed));
    }
  }
}

void set_from_file(const std::vector<GptUnit>& units, const std::string& path, const ParameterSetter& set) {
  SafetensorsReader file(path);
  const auto refuse = [&](const std::string& found) {
    throw Error(StatusCode::kCorruption, "--initial " + path + ": " + found +
                                             "; give weights of the same --layers, --hidden and --sequence");
  };
  std::set<std::string> known;
  for (const GptUnit& unit : units) {
    for (const GptParameter& parameter : unit.parameters) {
      known.insert(parameter.name);
      const auto place = file.tensors().find(parameter.name);
      if (place == file.tensors().end()) refuse("tensor " + parameter.name + " is missing");
      const std::vector<std::uint64_t> wanted(parameter.shape.begin(), parameter.shape.end());
      if (place->second.shape != wanted) {
        refuse("tensor " + parameter.name + " has the shape " + shape_text(place->second.shape) + ", not " +
               shape_text(wanted));
      }
    }
  }
  for (const auto& [name, tensor] : file.tensors()) {
    if (!known.contains(name)) refuse("tensor " + name + " is not one of this model");
  }
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (std::size_t i = 0; i < units[u].parameters.size(); ++i)
      set(u, i, file.read(units[u].parameters[i].name));
  }
}

}  // namespace forebay::gpt
