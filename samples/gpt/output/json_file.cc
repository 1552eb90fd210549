#include "output/json_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "forebay/error.h"
#include "forebay/text.h"

namespace forebay::gpt {
namespace {

constexpr int kDepthMax = 8;

}  // namespace

nlohmann::json read_json(const std::string& path) {
  const auto cannot_read = [&](const std::string& found) {
    throw Error(StatusCode::kIoError,
                "cannot read " + shown_path(path) + ": " + found + "; give an existing JSON file");
  };
  const auto refuse = [&](const std::string& found) {
    throw Error(StatusCode::kCorruption,
                shown_path(path) + " is not a valid JSON file: " + found + "; download or write it again");
  };
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    cannot_read("it is not a regular file");
  std::ifstream stream(path, std::ios::binary);
  if (!stream) cannot_read(std::strerror(errno));
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (!error && bytes > kJsonBytesMax) refuse("it has more than " + std::to_string(kJsonBytesMax) + " bytes");
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (is_nested_deeper(text, kDepthMax))
    refuse("it is nested deeper than " + std::to_string(kDepthMax) + " levels");
  nlohmann::json root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) refuse("it is not an object");
  return root;
}

}  // namespace forebay::gpt
