#include "trainer/cursor.h"

#include <nlohmann/json.hpp>

#include "forebay/error.h"

namespace forebay::gpt {

std::string Cursor::to_text() const {
  return nlohmann::ordered_json(
             {{"samples", samples}, {"seed", seed}, {"text", text}, {"heads", heads}, {"part", part}})
      .dump();
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
  if (saved.part != own.part) {
    throw Error(StatusCode::kCorruption, "--load-state: " + directory + " holds part " +
                                             std::to_string(saved.part) + " of the model, not part " +
                                             std::to_string(own.part) +
                                             ": files were moved; restore them, or give another directory");
  }
}

}  // namespace forebay::gpt
