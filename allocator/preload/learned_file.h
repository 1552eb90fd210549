// The file of learned placements that `forebay replay --learn` writes and `forebay run --learned` names.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "allocator/arena/learned.h"
#include "forebay/status.h"

namespace forebay {

// The file for the arenas of a process under the preload. Unset or empty: none.
inline constexpr char kPreloadLearnedVariable[] = "FOREBAY_PRELOAD_LEARNED";
// A file of the most placements is smaller. Larger: a wrong file takes more memory before it is refused.
inline constexpr std::size_t kLearnedFileLimit = std::size_t{64} << 20;

// The beginning of every such file.
inline constexpr std::string_view kLearnedBeginning = internal::kLearnedHeadline;

// The file's bytes, for ArenaOptions::learned. Errors: kIoError if it cannot be read; kInvalidArgument if it
// is damaged, foreign, or of another version.
Result<std::string> read_learned_file(const std::string& path);

}  // namespace forebay
