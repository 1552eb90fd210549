// The standard descriptors 0, 1 and 2, which may be closed when a process starts.
#pragma once

#include "forebay/language.h"
#include "forebay/status.h"

namespace forebay {

// Opens /dev/null on each of them that is closed. Otherwise the next file or socket that is opened would get
// its number, and messages to standard error would be written into it. The library calls it before it opens
// anything that it keeps; a program calls it first. Threads: from any thread; once is enough.
void keep_standard_streams() noexcept;

// Writes what standard output still holds. Errors: kIoError, also if an earlier write to it failed. A program
// calls it last.
Status flush_standard_output();

}  // namespace forebay
