#include "output/json_file.h"

#include "forebay/error.h"
#include "forebay/regular_file.h"
#include "forebay/text.h"

namespace forebay::gpt {
namespace {

constexpr int kDepthMax = 8;

}  // namespace

nlohmann::json read_json(const std::string& path) {
  const auto refuse = [&](const std::string& found) {
    throw Error(StatusCode::kCorruption,
                shown_path(path) + " is not a valid JSON file: " + found + "; download or write it again");
  };
  const Result<std::string> read = internal::read_regular_file(path, kJsonBytesMax);
  if (!read.ok()) {
    throw Error(read.status().code(),
                "cannot read " + shown_path(path) + ": " + read.status().message() + "; give a JSON file");
  }
  const std::string& text = read.value();
  if (is_nested_deeper(text, kDepthMax))
    refuse("it is nested deeper than " + std::to_string(kDepthMax) + " levels");
  nlohmann::json root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) refuse("it is not an object");
  return root;
}

}  // namespace forebay::gpt
