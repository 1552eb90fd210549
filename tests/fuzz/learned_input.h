// The inputs of fuzz_learned: the first byte says whether the rest is a file, or the numbers of a file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "allocator/arena/learned.h"

namespace forebay::testing {

// The file of an input that begins with 'f' (a file) or 'n' (its numbers, which get a beginning and a sum
// that are right).
inline std::string learned_file(std::string_view input) {
  const std::string_view rest = input.substr(1);
  if (input.front() != 'n') return std::string(rest);
  std::string file(internal::kLearnedHeadline);
  file += internal::kLearnedVersion;
  const std::uint64_t sum = internal::learned_checksum(rest);
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(sum >> (8 * i)));
  file += rest;
  return file;
}

}  // namespace forebay::testing
