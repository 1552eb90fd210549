// Reads a file that a user named, whatever it is.
#pragma once

#include <cstdint>
#include <string>

#include "forebay/status.h"

namespace forebay::internal {

// The content of a regular file of at most `most_bytes`. Pipes and devices may have no end, or block.
//
// Errors, without the path: kIoError ("it is not a regular file", or the system's reason), kInvalidArgument
// ("it has more than 1.00 MiB").
Result<std::string> read_regular_file(const std::string& path, std::uint64_t most_bytes);

}  // namespace forebay::internal
