// JSON files of foreign origin.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace forebay::gpt {

// Larger than any vocabulary of 65536 tokens with its merges. More: a damaged file takes more memory.
constexpr std::uint64_t kJsonBytesMax = 64u << 20;

// Errors: throws Error: kIoError, kCorruption for a file that is too large, nested deeper than 8 levels or
// not a JSON object.
nlohmann::json read_json(const std::string& path);

}  // namespace forebay::gpt
