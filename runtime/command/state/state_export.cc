#include "runtime/command/state/state_export.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "forebay/conversions.h"
#include "forebay/descriptor.h"
#include "forebay/error.h"
#include "forebay/output_pipe.h"
#include "forebay/text.h"
#include "forebay/units.h"

namespace forebay {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kSuffix = ".safetensors";
constexpr const char* kIndexSuffix = ".index.json";
constexpr const char* kMetadata = "__metadata__";
// In the metadata of each file, near its beginning, so that a later export may overwrite the file.
constexpr const char* kMarker = "exported_by";

[[noreturn]] void cannot_write(const std::string& path, int error) {
  throw Error(StatusCode::kIoError, "cannot write " + path + ": " + std::strerror(error) +
                                        "; name a place that can be written to and has room");
}

// A file under a temporary name. rename_to_path() gives it its name; otherwise it is removed.
class NewFile {
 public:
  explicit NewFile(std::string path)
      // The number keeps two exports to one file apart.
      : path_(std::move(path)), temporary_(path_ + ".exporting." + std::to_string(::getpid())) {
    ::unlink(temporary_.c_str());
    const int file = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) cannot_write(path_, errno);
    file_ = internal::Descriptor(file);
  }
  ~NewFile() {
    if (!renamed_) ::unlink(temporary_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, std::size_t bytes) {
    if (write_all(file_.number(), data, bytes) < bytes) cannot_write(path_, errno);
  }
  // And closes: there may be many files.
  void sync() {
    if (::fsync(file_.number()) != 0) cannot_write(path_, errno);
    file_.reset();
  }
  void rename_to_path() {
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) cannot_write(path_, errno);
    renamed_ = true;
  }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  const std::string temporary_;
  internal::Descriptor file_;
  bool renamed_ = false;
};

struct Shard {
  std::vector<const SavedParameter*> tensors;
  std::uint64_t bytes = 0;
};

// As save_pretrained() does: in order, a new file when the next tensor would exceed the limit.
std::vector<Shard> shards_of(const SavedStateFacts& facts, const StateExport& options) {
  std::vector<Shard> shards(1);
  for (const SavedParameter& parameter : facts.parameters) {
    const std::uint64_t bytes = parameter.count * element_bytes(options.dtype);
    const bool is_full = options.max_shard_bytes > 0 && shards.back().bytes + bytes > options.max_shard_bytes;
    if (is_full && !shards.back().tensors.empty()) shards.emplace_back();
    shards.back().tensors.push_back(&parameter);
    shards.back().bytes += bytes;
  }
  return shards;
}

// Errors: throws kInvalidArgument for a parameter whose name safetensors has for its own use.
void check_names(const Shard& shard) {
  for (const SavedParameter* parameter : shard.tensors) {
    if (parameter->name == kMetadata) {
      throw Error(StatusCode::kInvalidArgument, "a parameter is called " + std::string(kMetadata) +
                                                    ", which safetensors has for its own use; export a state "
                                                    "with other names");
    }
  }
}

// "model-00001-of-00003.safetensors".
std::string shard_path(const std::string& to, std::size_t index, std::size_t count) {
  if (count == 1) return to;
  char place[48];
  std::snprintf(place, sizeof place, "-%05zu-of-%05zu", index + 1, count);
  return to.substr(0, to.size() - kSuffix.size()) + place + std::string(kSuffix);
}

std::string file_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);  // npos + 1 is 0.
}

const char* type_name(DataType type) {
  return type == DataType::kFloat32 ? "F32" : type == DataType::kBfloat16 ? "BF16" : "F16";
}

// Errors: throws kInvalidArgument where a parameter's name is not UTF-8.
std::string dump(const Json& json, int indent) {
  try {
    return json.dump(indent);
  } catch (const Json::exception&) {
    throw Error(
        StatusCode::kInvalidArgument,
        "a parameter's name is not UTF-8 text, which safetensors needs; export a state with other names");
  }
}

void write_header(NewFile& file, const Shard& shard, DataType type) {
  Json header = {{kMetadata, {{"format", "pt"}, {kMarker, "forebay"}}}};
  auto& entries = header.get_ref<Json::object_t&>();  // [] would look through all that are there.
  std::uint64_t at = 0;
  for (const SavedParameter* parameter : shard.tensors) {
    const std::uint64_t end = at + parameter->count * element_bytes(type);
    entries.emplace_back(
        parameter->name,
        Json{{"dtype", type_name(type)}, {"shape", parameter->shape}, {"data_offsets", {at, end}}});
    at = end;
  }
  std::string text = dump(header, -1);
  text.resize(round_up(text.size(), 8), ' ');  // Aligns the tensors.
  std::uint8_t length[8];
  for (std::size_t i = 0; i < sizeof length; ++i)
    length[i] = static_cast<std::uint8_t>(text.size() >> (8 * i));
  file.write(length, sizeof length);
  file.write(text.data(), text.size());
}

void write_values(NewFile& file, Span<const float> values, DataType type,
                  std::vector<std::uint16_t>& narrow) {
  if (type == DataType::kFloat32) return file.write(values.data(), values.size() * sizeof(float));
  narrow.resize(values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    narrow[i] = type == DataType::kBfloat16 ? float_to_bfloat16(values[i]) : float_to_float16(values[i]);
  file.write(narrow.data(), narrow.size() * sizeof(std::uint16_t));
}

std::string index_text(const std::vector<Shard>& shards, const std::vector<std::string>& paths) {
  std::uint64_t bytes = 0;
  nlohmann::json places = nlohmann::json::object();  // Sorted by name.
  for (std::size_t i = 0; i < shards.size(); ++i) {
    bytes += shards[i].bytes;
    for (const SavedParameter* parameter : shards[i].tensors) places[parameter->name] = file_name(paths[i]);
  }
  return dump({{"metadata", {{kMarker, "forebay"}, {"total_size", bytes}}}, {"weight_map", places}}, 2) +
         "\n";
}

// Names and links may differ, so files and directories are compared by device and inode.
using FileId = std::pair<dev_t, ino_t>;

// Nothing where `path` is not there.
std::optional<FileId> id_of(const std::string& path) {
  struct stat facts {};
  if (::stat(path.c_str(), &facts) != 0) return std::nullopt;
  return FileId(facts.st_dev, facts.st_ino);
}

// Errors: throws kInvalidArgument where a path of `paths` is a file of the states beside `state`, or in the
// directory of one.
void refuse_files_of_states(const std::string& state, const std::vector<std::string>& paths) {
  namespace fs = std::filesystem;
  const std::string all = state.substr(0, state.rfind('/'));
  std::error_code error;
  std::set<FileId> directories, files;
  for (const std::string& name : saved_state_names(all)) {
    const std::string directory = all + "/" + name;
    if (const auto id = id_of(directory)) directories.insert(*id);
    for (const auto& entry : fs::directory_iterator(directory, error))
      if (const auto id = id_of(entry.path())) files.insert(*id);
  }
  for (const std::string& path : paths) {
    const std::optional<FileId> there = id_of(path);
    bool is_of_state = there && files.contains(*there);
    fs::path above = fs::canonical(fs::absolute(path, error).parent_path(), error);
    for (; !error && !is_of_state && above.has_relative_path(); above = above.parent_path()) {
      const std::optional<FileId> directory = id_of(above);
      is_of_state = directory && directories.contains(*directory);
    }
    if (!is_of_state) continue;
    throw Error(StatusCode::kInvalidArgument, "cannot export to " + shown_path(path) +
                                                  ": it is a file of the saved states in " + shown_path(all) +
                                                  ", or in the directory of one; name a file elsewhere");
  }
}

// Errors: throws kInvalidArgument where a path is there and is not an earlier export.
void refuse_files_of_others(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    struct stat facts {};
    if (::lstat(path.c_str(), &facts) != 0) continue;
    if (!S_ISREG(facts.st_mode)) {
      throw Error(StatusCode::kInvalidArgument,
                  "cannot write " + shown_path(path) + ": it is there and is no regular file; name another");
    }
    const internal::Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    char text[128] = {};
    const ssize_t count = file.number() < 0 ? -1 : ::read(file.number(), text, sizeof text);
    if (count > 0 &&
        std::string_view(text, static_cast<std::size_t>(count)).find(kMarker) != std::string::npos)
      continue;
    throw Error(StatusCode::kInvalidArgument,
                "cannot write " + shown_path(path) +
                    ": the file was not written by forebay state export, and is "
                    "not overwritten; name another file or remove it");
  }
}

// The directory of the files to come.
class TargetDirectory {
 public:
  explicit TargetDirectory(const std::string& path) {
    const std::size_t end = path.rfind('/');
    const std::string directory = end == std::string::npos ? "." : path.substr(0, end + 1);
    opened_ = internal::Descriptor(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  // From now on no other export gives names there.
  void lock() const {
    while (opened_.number() >= 0 && ::flock(opened_.number(), LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  // So that a crash after the export does not undo a renaming. Some file systems refuse; the files are
  // complete.
  void sync() const {
    if (opened_.number() >= 0) ::fsync(opened_.number());
  }

 private:
  internal::Descriptor opened_;
};

}  // namespace

std::vector<std::string> export_state(SavedStateReader& state, const StateExport& options,
                                      const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  if (options.to.size() <= kSuffix.size() || !std::string_view(options.to).ends_with(kSuffix) ||
      file_name(options.to) == kSuffix) {
    throw Error(StatusCode::kInvalidArgument,
                "--to is " + options.to + "; name a file that ends in .safetensors, as in model.safetensors");
  }
  const std::vector<Shard> shards = shards_of(state.facts(), options);
  for (const Shard& shard : shards) check_names(shard);
  // Where both are there, some programs read the one file, and others the index.
  const std::string other = shards.size() > 1 ? options.to : options.to + kIndexSuffix;
  if (struct stat facts{}; ::stat(other.c_str(), &facts) == 0) {
    throw Error(StatusCode::kInvalidArgument, "cannot export to " + options.to + ": " + other +
                                                  " is there, and programs would read it in place of this "
                                                  "export; remove it, or name another file");
  }
  std::vector<std::string> paths;
  for (std::size_t i = 0; i < shards.size(); ++i) paths.push_back(shard_path(options.to, i, shards.size()));
  if (shards.size() > 1) paths.push_back(options.to + kIndexSuffix);
  refuse_files_of_states(state.facts().path, paths);
  refuse_files_of_others(paths);
  std::uint64_t all = 0;
  for (const Shard& shard : shards) all += shard.bytes;

  std::vector<std::unique_ptr<NewFile>> files;
  std::vector<std::uint16_t> narrow;
  std::uint64_t done = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    NewFile& file = *files.emplace_back(std::make_unique<NewFile>(paths[i]));
    write_header(file, shards[i], options.dtype);
    for (const SavedParameter* parameter : shards[i].tensors) {
      const bool average = options.average && parameter->has_average;
      state.read(*parameter, average ? SavedField::kAverage : SavedField::kMaster,
                 [&](Span<const float> piece) {
                   write_values(file, piece, options.dtype, narrow);
                   done += piece.size() * element_bytes(options.dtype);
                   progress(done, all);
                 });
    }
    file.sync();
  }
  if (shards.size() > 1) {
    const std::string text = index_text(shards, paths);
    NewFile& index = *files.emplace_back(std::make_unique<NewFile>(paths.back()));
    index.write(text.data(), text.size());
    index.sync();
  }
  // An earlier export with as many files has the same names, as has one at the same time: its index would go
  // with files of both.
  const TargetDirectory target(options.to);
  target.lock();
  if (shards.size() > 1 && ::unlink(paths.back().c_str()) == 0) target.sync();
  for (const std::unique_ptr<NewFile>& file : files) file->rename_to_path();
  target.sync();
  return paths;
}

}  // namespace forebay
