// JSON files of foreign origin.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace forebay::gpt {

// Errors: throws Error: kIoError, kCorruption for a file that is too large, nested deeper than 8 levels or
// not a JSON object.
nlohmann::json read_json(const std::string& path);

}  // namespace forebay::gpt
