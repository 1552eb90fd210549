#include "runtime/engine/state/state_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "forebay/error.h"

namespace forebay::internal {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr char kMagic[8] = {'F', 'B', 'S', 'T', 'A', 'T', 'E', '1'};
constexpr std::uint64_t kTrailerBytes = 2 * sizeof(std::uint64_t);
constexpr int kFormat = 1;
constexpr std::string_view kTemporaryPrefix = ".saving-";

[[noreturn]] void io_error(const std::string& action, const std::string& path) {
  throw Error(StatusCode::kIoError, "cannot " + action + " " + path + ": " + std::strerror(errno) +
                                        "; check that the directory exists, is writable and has room");
}

[[noreturn]] void corrupt(const std::string& path, const std::string& finding) {
  throw Error(StatusCode::kCorruption,
              "saved state " + path + " is damaged: " + finding + "; load another saved state");
}

}  // namespace

class File {
 public:
  File(const std::string& path, int flags)
      : path_(path), descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    if (descriptor_ < 0) io_error("open", path);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { ::close(descriptor_); }

  void write(const void* data, std::uint64_t bytes) {
    const auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = ::write(descriptor_, at, bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) io_error("write", path_);
      at += written;
      bytes -= static_cast<std::uint64_t>(written);
    }
  }
  void read_at(std::uint64_t offset, void* data, std::uint64_t bytes) const {
    auto* at = static_cast<char*>(data);
    while (bytes > 0) {
      const ssize_t count = ::pread(descriptor_, at, bytes, static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) io_error("read", path_);
      if (count == 0) corrupt(path_, "it ends early (truncated)");
      at += count;
      offset += static_cast<std::uint64_t>(count);
      bytes -= static_cast<std::uint64_t>(count);
    }
  }
  void sync() {
    if (::fsync(descriptor_) != 0) io_error("sync", path_);
  }

 private:
  std::string path_;
  int descriptor_;
};

namespace {

void sync_directory(const std::string& path) {
  File(path, O_RDONLY | O_DIRECTORY).sync();
}

void write_text_synced(const std::string& path, const std::string& text) {
  File file(path, O_WRONLY | O_CREAT | O_TRUNC);
  file.write(text.data(), text.size());
  file.sync();
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) io_error("open", path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool is_state_name(const std::string& name) {
  constexpr std::size_t kPrefixLength = 5;
  return name.size() == kPrefixLength + 12 && name.rfind("step-", 0) == 0 &&
         name.find_first_not_of("0123456789", kPrefixLength) == std::string::npos;
}

// Errors: kInvalidArgument when a string in `json` is not UTF-8.
std::string dump(const Json& json) {
  try {
    return json.dump(1);
  } catch (const Json::exception&) {
    throw Error(
        StatusCode::kInvalidArgument,
        "the trainer's state or a parameter's name is not UTF-8 text, which saved state needs; encode it");
  }
}

std::uint64_t checksum_of(const void* data, std::uint64_t bytes) {
  return XXH3_64bits(data, bytes);
}

// Removes the temporary directories of killed runs, and a state that a new one has replaced.
void remove_unfinished(const std::string& directory) {
  std::error_code ignored;
  std::vector<std::string> unfinished;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kTemporaryPrefix) && is_state_name(name.substr(kTemporaryPrefix.size()))) {
      unfinished.push_back(entry.path().string());
    }
  }
  for (const std::string& path : unfinished) remove_quietly(path);
}

// Gives the state its name. If the step was saved before, the two directories change places in one move, so
// that `latest` names a whole state at any moment.
void move_into_place(const std::string& temporary, const std::string& path) {
  if (!fs::exists(path)) {
    if (std::rename(temporary.c_str(), path.c_str()) != 0) io_error("rename", temporary);
  } else if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) != 0) {
    io_error("exchange", temporary);
  }
}

StateRun read_run(const Json& entry) {
  StateRun run;
  entry.at("parameter").get_to(run.parameter);
  entry.at("field").get_to(run.field);
  entry.at("offset").get_to(run.offset);
  entry.at("count").get_to(run.count);
  entry.at("at").get_to(run.at);
  entry.at("checksum").get_to(run.checksum);
  return run;
}

}  // namespace

std::string state_name(std::uint64_t step) {
  char name[32];
  std::snprintf(name, sizeof(name), "step-%012" PRIu64, step);
  return name;
}

std::string state_file_name(int rank, int ranks) {
  return "rank-" + std::to_string(rank) + "-of-" + std::to_string(ranks);
}

std::string read_latest(const std::string& directory) {
  const std::string path = directory + "/latest";
  if (!fs::exists(path)) return "";
  std::string name = read_text(path);
  if (!name.empty() && name.back() == '\n') name.pop_back();
  if (!is_state_name(name)) corrupt(path, "it does not name a saved state");
  return name;
}

std::string temporary_state(const std::string& directory, const std::string& name) {
  return directory + "/" + std::string(kTemporaryPrefix) + name;
}

void make_temporary_state(const std::string& directory, const std::string& temporary) {
  std::error_code error;
  fs::create_directories(directory, error);
  remove_quietly(temporary);
  if (error || ::mkdir(temporary.c_str(), 0755) != 0) {
    throw Error(StatusCode::kIoError, "cannot make " + temporary + " to save the state in: " +
                                          (error ? error.message() : std::strerror(errno)) +
                                          "; give a directory that can be written");
  }
}

void remove_quietly(const std::string& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

StateFileWriter::StateFileWriter(const std::string& path)
    : file_(std::make_unique<File>(path, O_WRONLY | O_CREAT | O_TRUNC)) {
  file_->write(kMagic, sizeof(kMagic));
  at_ = sizeof(kMagic);
}

StateFileWriter::~StateFileWriter() = default;

void StateFileWriter::write(const std::string& parameter, const char* field, std::uint64_t offset,
                            std::span<const float> values) {
  file_->write(values.data(), values.size_bytes());
  index_.push_back({{"parameter", parameter},
                    {"field", field},
                    {"offset", offset},
                    {"count", values.size()},
                    {"at", at_},
                    {"checksum", checksum_of(values.data(), values.size_bytes())}});
  at_ += values.size_bytes();
}

StateFileEnd StateFileWriter::finish() {
  const std::string text = dump(index_);
  const std::uint64_t checksum = checksum_of(text.data(), text.size());
  const std::uint64_t trailer[2] = {text.size(), checksum};
  file_->write(text.data(), text.size());
  file_->write(trailer, sizeof(trailer));
  file_->sync();
  return {at_ + text.size() + sizeof(trailer), checksum};
}

void publish_state(const std::string& directory, const std::string& temporary, const std::string& name,
                   const Json& manifest) {
  std::string superseded;
  try {
    superseded = read_latest(directory);
  } catch (const Error&) {
    // A damaged `latest` supersedes nothing; it is replaced.
  }
  const std::string text = dump(manifest);
  write_text_synced(temporary + "/manifest.json",
                    dump({{"checksum", checksum_of(text.data(), text.size())}, {"manifest", text}}));
  sync_directory(temporary);
  move_into_place(temporary, directory + "/" + name);
  sync_directory(directory);
  write_text_synced(directory + "/.latest", name + "\n");
  if (std::rename((directory + "/.latest").c_str(), (directory + "/latest").c_str()) != 0) {
    io_error("rename", directory + "/.latest");
  }
  sync_directory(directory);
  remove_unfinished(directory);
  if (!superseded.empty() && superseded != name) remove_quietly(directory + "/" + superseded);
}

SavedState::SavedState(const std::string& directory) {
  const std::string name = read_latest(directory);
  if (name.empty()) {
    throw Error(StatusCode::kIoError, "there is no saved state in " + directory +
                                          " (no file named latest); give the directory that a run saved to");
  }
  path_ = directory + "/" + name;
  read_manifest();
  for (const Json& entry : manifest_.at("files")) {
    read_index(path_ + "/" + entry.at("name").get<std::string>(), entry.at("bytes").get<std::uint64_t>(),
               entry.at("index_checksum").get<std::uint64_t>());
  }
}

void SavedState::read_manifest() {
  const std::string path = path_ + "/manifest.json";
  try {
    const Json envelope = Json::parse(read_text(path));
    const std::string text = envelope.at("manifest").get<std::string>();
    if (checksum_of(text.data(), text.size()) != envelope.at("checksum").get<std::uint64_t>()) {
      corrupt(path, "its checksum differs");
    }
    manifest_ = Json::parse(text);
    if (manifest_.at("format").get<int>() != kFormat) {
      throw Error(StatusCode::kUnsupported, path +
                                                " has a format this version does not read; use the "
                                                "version of forebay that wrote it");
    }
  } catch (const Json::exception&) {
    corrupt(path, "it is not a manifest");
  }
}

void SavedState::read_index(const std::string& path, std::uint64_t expected_bytes,
                            std::uint64_t expected_checksum) {
  const File file(path, O_RDONLY);
  std::error_code ignored;
  const std::uint64_t bytes = fs::file_size(path, ignored);
  if (bytes != expected_bytes) {
    corrupt(path, "it has " + std::to_string(bytes) + " bytes, " + std::to_string(expected_bytes) +
                      " were written");
  }
  constexpr std::uint64_t kFrameBytes = sizeof(kMagic) + kTrailerBytes;
  char magic[sizeof(kMagic)];
  std::uint64_t trailer[2];  // Length and checksum of the index.
  if (bytes < kFrameBytes) corrupt(path, "it is shorter than an empty one");
  file.read_at(0, magic, sizeof(magic));
  file.read_at(bytes - kTrailerBytes, trailer, sizeof(trailer));
  if (std::memcmp(magic, kMagic, sizeof(magic)) != 0) corrupt(path, "it does not begin as one");
  if (trailer[0] > bytes - kFrameBytes) corrupt(path, "its index is longer than itself");
  std::string text(trailer[0], '\0');
  file.read_at(bytes - kTrailerBytes - text.size(), text.data(), text.size());
  if (checksum_of(text.data(), text.size()) != trailer[1] || trailer[1] != expected_checksum) {
    corrupt(path, "the checksum of its index differs");
  }
  try {
    for (const Json& entry : Json::parse(text)) {
      StateRun run = read_run(entry);
      if (run.count > bytes / sizeof(float) || run.at > bytes) corrupt(path, "a run lies outside of it");
      enter(path, std::move(run));
    }
  } catch (const Json::exception&) {
    corrupt(path, "its index cannot be read");
  }
}

void SavedState::enter(const std::string& path, StateRun run) {
  if (run.field == kStateFields[0]) counts_[run.parameter] += run.count;
  auto& sources = sources_[{run.parameter, run.field}];
  sources.push_back({path, std::move(run)});
}

void SavedState::read(const std::string& parameter, const std::string& field, std::uint64_t begin,
                      std::span<float> target) {
  const std::uint64_t end = begin + target.size();
  std::uint64_t filled = 0;
  for (const Source& source : sources_[{parameter, field}]) {
    const std::uint64_t first = std::max(begin, source.run.offset);
    const std::uint64_t stop = std::min(end, source.run.offset + source.run.count);
    if (first >= stop) continue;
    std::copy_n(values_of(source).data() + (first - source.run.offset), stop - first,
                target.data() + (first - begin));
    filled += stop - first;
  }
  if (filled != target.size()) corrupt(path_, field + " of " + parameter + " is not whole");
}

std::span<const float> SavedState::values_of(const Source& source) {
  if (&source == last_) return values_;
  const StateRun& run = source.run;
  last_ = nullptr;
  values_.resize(run.count);
  File(source.path, O_RDONLY).read_at(run.at, values_.data(), run.count * sizeof(float));
  if (checksum_of(values_.data(), run.count * sizeof(float)) != run.checksum) {
    corrupt(source.path, "the checksum of " + run.field + " of " + run.parameter + " differs");
  }
  last_ = &source;
  return values_;
}

}  // namespace forebay::internal
