#include "trainer/initial.h"

#include <cstring>
#include <set>

#include "forebay/error.h"
#include "forebay/text.h"
#include "model/random.h"
#include "output/huggingface.h"
#include "output/weight_files.h"

namespace forebay::gpt {
namespace {

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text;
  for (const std::uint64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

constexpr const char* kHead = "lm_head.weight";

bool has_same_bits(WeightFiles& files, const std::string& one, const std::string& other) {
  const std::vector<float> a = files.read(one);
  const std::vector<float> b = files.read(other);
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
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
  WeightFiles files(path);
  const auto refuse = [&](const std::string& found) {
    throw Error(StatusCode::kCorruption, "--initial " + shown_path(path) + ": " + found +
                                             "; give weights of the same --layers, --hidden and --sequence");
  };
  // A model with its head has longer names than one without.
  const auto name_of = [&](const GptParameter& parameter) {
    const std::string published = published_name(parameter.name);
    return files.find(published) != nullptr ? published : parameter.name;
  };
  std::set<std::string> known;
  for (const GptUnit& unit : units) {
    for (const GptParameter& parameter : unit.parameters) {
      const std::string name = name_of(parameter);
      known.insert(name);
      const Tensor* const tensor = files.find(name);
      if (tensor == nullptr) refuse("tensor " + name + " is missing");
      const std::vector<std::uint64_t> wanted(parameter.shape.begin(), parameter.shape.end());
      if (tensor->shape != wanted) {
        refuse("tensor " + name + " has the shape " + shape_text(tensor->shape) + ", not " +
               shape_text(wanted));
      }
    }
  }
  for (const std::string& name : files.names()) {
    if (!known.contains(name) && !is_derived_tensor(name))
      refuse("tensor " + shown_value(name) + " is not one of this model");
  }
  if (files.find(kHead) != nullptr && !known.contains(kHead)) {
    for (const GptUnit& unit : units) {
      for (const GptParameter& parameter : unit.parameters) {
        if (is_token_embedding(parameter.name) && !has_same_bits(files, kHead, name_of(parameter))) {
          throw Error(StatusCode::kUnsupported, "--initial " + shown_path(path) + ": its " + kHead +
                                                    " has other values than its " + parameter.name +
                                                    ", and this model uses one tensor for both; remove it "
                                                    "from the file if it should be the same, "
                                                    "or give another model");
        }
      }
    }
  }
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (std::size_t i = 0; i < units[u].parameters.size(); ++i)
      set(u, i, files.read(name_of(units[u].parameters[i])));
  }
}

}  // namespace forebay::gpt
