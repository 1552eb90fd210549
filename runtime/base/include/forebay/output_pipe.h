// Opening an output that may be a named pipe, and writing to one.
#pragma once

#include <cstddef>

#include "forebay/language.h"

namespace forebay {

// As open(path, flags | O_WRONLY | O_CLOEXEC) for a file that exists. If it is a pipe, it waits some seconds
// for a reader, and no longer; later writes wait for the reader. Errors: -1 and errno, ENXIO for a pipe that
// nobody reads.
int open_output_pipe(const char* path, int flags = 0) noexcept;

// Writes so many bytes. Returns their number, or fewer with errno.
std::size_t write_all(int file, const void* data, std::size_t bytes) noexcept;

}  // namespace forebay
