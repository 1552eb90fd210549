#include "output/files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "forebay/error.h"
#include "forebay/text.h"
#include "model/text.h"
#include "output/export.h"
#include "output/output_file.h"
#include "output/safetensors.h"
#include "output/weight_files.h"
#include "parallel/parted_state.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

// Whether an option wrote the file that begins so.
using IsOwn = bool (*)(std::string_view beginning);
constexpr std::size_t kBeginningBytes = 128;

bool is_own_report(std::string_view beginning) {
  return beginning.find("\"world_size\"") != std::string_view::npos;
}
bool is_own_timeline(std::string_view beginning) {
  return beginning.find("\"traceEvents\"") != std::string_view::npos;
}
bool is_own_flight(std::string_view beginning) {
  return beginning.find("\"cause\"") != std::string_view::npos;
}
bool is_own_safetensors(std::string_view beginning) {
  return beginning.find(kExportedBy) != std::string_view::npos;
}

[[noreturn]] void keep_file(const std::string& path, const char* found) {
  throw Error(StatusCode::kInvalidArgument, "cannot write " + shown_path(path) + ": the file " + found +
                                                ", and is not overwritten; name another file or remove it");
}

// Errors: throws kInvalidArgument where a file is there that is none of ours.
void check_replaced(const std::string& path, IsOwn is_own) {
  if (std::error_code error; !fs::is_regular_file(path, error)) return;
  std::ifstream file(path, std::ios::binary);
  std::string beginning(kBeginningBytes, '\0');
  file.read(beginning.data(), static_cast<std::streamsize>(beginning.size()));
  beginning.resize(static_cast<std::size_t>(file.gcount()));
  if (!beginning.empty() && !is_own(beginning)) keep_file(path, "was not written by this option");
}

// For files without a header, which do not show who wrote them. Errors: also kInvalidArgument where one is
// there.
void check_new(const std::string& path) {
  OutputFile::check(path);
  std::error_code error;
  if (fs::is_regular_file(path, error) && fs::file_size(path, error) > 0) keep_file(path, "is there");
}

void check_output(const char* option, const std::string& path,
                  void (*check)(const std::string&) = &OutputFile::check, IsOwn is_own = nullptr) {
  if (path.empty()) return;
  try {
    check(path);
    if (is_own != nullptr) check_replaced(path, is_own);
  } catch (const Error& error) {
    throw Error(error.status().with_context(option));
  }
}

// Tries to write a file, because permissions do not show a read-only or pseudo file system. Returns errno, or
// 0.
int try_to_write_in(const std::string& directory) {
  std::string trial = directory + "/.trial-XXXXXX";
  const int file = ::mkstemp(trial.data());
  if (file < 0) return errno;
  ::close(file);
  ::unlink(trial.c_str());
  return 0;
}

void check_directory_can_be_written(const std::string& directory) {
  const auto refuse = [&](int error) {
    throw Error(StatusCode::kIoError,
                "--save-state: cannot write in " + shown_path(directory) + ": " + std::strerror(error) +
                    "; give a directory that exists, or can be made, and may be written");
  };
  const bool makes = ::mkdir(directory.c_str(), 0777) == 0;
  if (!makes && errno != EEXIST) refuse(errno);
  const int error = try_to_write_in(directory);
  if (makes) ::rmdir(directory.c_str());  // A run that ends early must not leave it behind.
  if (error != 0) refuse(error);
}

// Free space is checked later, by the engine.
void check_drives(const char* option, const std::vector<std::string>& directories) {
  for (const std::string& directory : directories) {
    if (const int error = try_to_write_in(directory); error != 0) {
      throw Error(StatusCode::kIoError,
                  std::string(option) + ": cannot write in " + shown_path(directory) + ": " +
                      std::strerror(error) +
                      "; give a directory that exists and may be written, on the drive for offloaded states");
    }
  }
}

void check_state(const TrainerOptions& options) {
  const std::string& directory = options.save_state;
  if (directory.empty()) return;
  check_directory_can_be_written(directory);
  std::error_code error;
  if (!holds_state(directory)) return;
  if (!options.load_state.empty() && fs::equivalent(directory, options.load_state, error)) return;
  throw Error(
      StatusCode::kInvalidArgument,
      "--save-state " + shown_path(directory) +
          " holds a saved state already, which this run would replace; go on from it with --resume, or give "
          "another directory");
}

}  // namespace

void find_state_to_resume(TrainerOptions& options) {
  if (!options.resume || !holds_state(options.save_state)) return;
  options.load_state = options.save_state;
  options.initial_file.clear();
}

std::string timeline_file(const TrainerOptions& options, int rank) {
  fs::path file = options.timeline_file;
  if (rank != 0) file.replace_extension(".rank-" + std::to_string(rank) + file.extension().string());
  return file.string();
}

std::string flight_file(const TrainerOptions& options, int rank) {
  return options.flight_recorder + "/flight.rank-" + std::to_string(rank) + ".json";
}

void check_files(const TrainerOptions& options) {
  check_output("--report", options.report_file, &OutputFile::check, is_own_report);
  for (int rank = 0; rank < std::max(options.ranks, 1) && !options.timeline_file.empty(); ++rank) {
    check_output("--timeline", timeline_file(options, rank), &OutputFile::check, is_own_timeline);
  }
  const bool exports_model = !options.export_file.empty() && names_directory(options.export_file);
  if (exports_model) {
    check_output("--export", options.export_file, &prepare_model_directory);
  } else {
    check_output("--export", options.export_file, &OutputFile::check_regular, is_own_safetensors);
  }
  check_output("--logits", options.logits_file, &OutputFile::check, is_own_safetensors);
  check_output("--write-tokens", options.tokens_file, &check_new);
  for (int rank = 0; rank < std::max(options.ranks, 1) && !options.flight_recorder.empty(); ++rank)
    check_output("--flight-recorder", flight_file(options, rank), &OutputFile::check_regular, is_own_flight);
  check_state(options);
  check_drives("--offload-tier", options.offload_directories);
  check_drives("--activations", options.activation_directories);
  static_cast<void>(training_text(options));
  static_cast<void>(evaluation_text(options));
}

}  // namespace forebay::gpt
