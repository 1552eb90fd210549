// Output files of `forebay run`. A reader sees a whole file or none.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "forebay/status.h"

namespace forebay {

// Checks, without writing, that a file of that name can be written. `option`: the option that names it, for
// messages. `beginning`: an existing file may be overwritten only if it begins with this. Errors:
// kInvalidArgument.
Status check_run_file(const std::string& option, const std::string& path, std::string_view beginning);

// Checks that two options name different files. An empty path and a stream (is_run_stream) are no files.
// Errors: kInvalidArgument.
Status check_different_files(const std::string& option, const std::string& path,
                             const std::string& other_option, const std::string& other_path);

// Passes a new file to `write` and renames it to `path` when it is complete. If `path` is no regular file (a
// pipe, a terminal, /dev/stdout), it is written in place and never truncated. Errors: kIoError; an earlier
// file stays. A pipe that nobody opens for reading within some seconds is an error.
Status write_run_file(const std::string& path, const std::function<Status(int file)>& write);

// The same with a text.
Status write_run_text(const std::string& path, const std::string& text);

// Writes a file of a report's directory, where others may have put links and pipes: none is followed or
// opened. `replaces`: this process wrote the file before. Otherwise one that is there stays. Errors:
// kIoError.
Status write_report_file(const std::string& path, const std::string& text, bool replaces);

// Makes the directory of `--report`, if it does not exist. Errors: kInvalidArgument if it already contains a
// report; kIoError.
Status make_report_directory(const std::string& directory);
inline constexpr char kReportSummary[] = "summary.txt";
inline constexpr char kReportPage[] = "report.html";
inline constexpr char kReportJson[] = "summary.json";

// Overwrites a file in place: on a full disk that works as long as the text is no longer than a block.
// Errors: kIoError.
Status overwrite_run_text(const std::string& path, const std::string& text);

// Whether a file of that name is written in place (see write_run_file).
bool is_run_stream(const std::string& path);

}  // namespace forebay
