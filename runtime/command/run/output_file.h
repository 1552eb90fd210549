// Files that `forebay run` was asked to write: whole or not at all, for whoever reads them meanwhile.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "forebay/status.h"

namespace forebay {

// Whether a file of that name can be written, found out without writing it. `option`: who names it.
// `beginning`: of the files that may be written over; one that begins otherwise is somebody's work. Errors:
// kInvalidArgument.
Status check_run_file(const std::string& option, const std::string& path, std::string_view beginning);

// Gives a new file to `write` and puts it in the place of `path` once all of it is there. Where `path` is no
// regular file (a pipe, a terminal, /dev/stdout), it is written as it is and never made empty. Errors:
// kIoError, and what was there before stays.
Status write_run_file(const std::string& path, const std::function<Status(int file)>& write);

// The same of a text.
Status write_run_text(const std::string& path, const std::string& text);

// Overwrites a file where it lies, which takes no more of a full disk as long as the text is no longer than a
// block. Errors: kIoError.
Status overwrite_run_text(const std::string& path, const std::string& text);

// Whether a file of that name is written as it is.
bool is_run_stream(const std::string& path);

}  // namespace forebay
