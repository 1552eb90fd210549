#include "trainer/cursor.h"

#include <nlohmann/json.hpp>

#include "forebay/error.h"
#include "forebay/text.h"

namespace forebay::gpt {

std::string Cursor::to_text() const {
  nlohmann::ordered_json json = {
      {"samples", samples}, {"seed", seed}, {"text", text}, {"heads", heads}, {"part", part}};
  if (rope_theta > 0) json["rope_theta"] = rope_theta;
  if (norm_epsilon > 0) json["norm_epsilon"] = norm_epsilon;
  return json.dump();
}

Cursor Cursor::from_text(const std::string& saved) {
  const auto json = nlohmann::json::parse(saved, nullptr, /*allow_exceptions=*/false);
  Cursor cursor;
  const auto read = [&](const char* key, std::uint64_t* value) {
    if (!json.is_object() || !json.contains(key) || !json[key].is_number_unsigned()) {
      throw Error(StatusCode::kCorruption,
                  std::string("the saved state was not saved by this trainer: its data cursor has no ") +
                      key + "; give another directory with --load-state");
    }
    *value = json[key].get<std::uint64_t>();
  };
  read("samples", &cursor.samples);
  read("seed", &cursor.seed);
  read("text", &cursor.text);
  read("heads", &cursor.heads);
  read("part", &cursor.part);
  const auto read_if_there = [&](const char* key, double* value) {
    if (json.contains(key) && json[key].is_number()) *value = json[key].get<double>();
  };
  read_if_there("rope_theta", &cursor.rope_theta);
  read_if_there("norm_epsilon", &cursor.norm_epsilon);
  return cursor;
}

void check_may_resume(const Cursor& own, const Cursor& saved, const std::string& load_state,
                      const std::string& directory) {
  const auto refuse = [&](const std::string& difference) {
    throw Error(StatusCode::kInvalidArgument, "--load-state " + load_state + " was saved with another " +
                                                  difference + "; resume with the same one");
  };
  if (saved.seed != own.seed) refuse("--seed, " + std::to_string(saved.seed));
  if (saved.text != own.text) refuse("--text");
  if (saved.heads != own.heads) refuse("--heads, " + std::to_string(saved.heads));
  const auto differs = [](double saved_value, double own_value) {
    return saved_value > 0 && own_value > 0 && saved_value != own_value;
  };
  if (differs(saved.rope_theta, own.rope_theta)) refuse(format_text("--rope-theta, %.17g", saved.rope_theta));
  if (differs(saved.norm_epsilon, own.norm_epsilon))
    refuse(format_text("rms_norm_eps, %.17g, which --initial gives", saved.norm_epsilon));
  if (saved.part != own.part) {
    throw Error(StatusCode::kCorruption, "--load-state: " + directory + " holds part " +
                                             std::to_string(saved.part) + " of the model, not part " +
                                             std::to_string(own.part) +
                                             ": files were moved; restore them, or give another directory");
  }
}

}  // namespace forebay::gpt
