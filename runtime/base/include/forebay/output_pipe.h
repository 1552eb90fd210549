// Opening an output that may be a named pipe.
#pragma once

#include "forebay/language.h"

namespace forebay {

// As open(path, flags | O_WRONLY | O_CLOEXEC) for a file that exists. If it is a pipe, it waits some seconds
// for a reader, and no longer; later writes wait for the reader. Errors: -1 and errno, ENXIO for a pipe that
// nobody reads.
int open_output_pipe(const char* path, int flags = 0) noexcept;

}  // namespace forebay
