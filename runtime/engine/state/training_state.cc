// Saved training state: what it is on disk.
//
//   DIR/step-000000000042/manifest.json    steps, loss scale, trainer state, the files and their index
//   checksums DIR/step-000000000042/rank-0-of-4      magic, fp32 data, index (JSON), then the index's length
//   and checksum DIR/latest                             the name of the newest complete one
//
// Each rank writes the part of master, m and v that it owns, as runs of a parameter by logical name and
// offset, so a run can be found at any number of ranks and any stage. A state is written under a temporary
// name, synced, and then renamed; `latest` is replaced by a rename last. A kill at any moment leaves the
// state that `latest` names whole.

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
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "forebay/conversions.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr char kMagic[8] = {'F', 'B', 'S', 'T', 'A', 'T', 'E', '1'};
constexpr std::uint64_t kTrailerBytes = 2 * sizeof(std::uint64_t);
constexpr const char* kFields[] = {"master", "m", "v"};

[[noreturn]] void io_error(const std::string& what, const std::string& path) {
  throw Error(StatusCode::kIoError, "cannot " + what + " " + path + ": " + std::strerror(errno) +
                                        "; check that the directory exists, is writable and has room");
}

[[noreturn]] void corrupt(const std::string& path, const std::string& what) {
  throw Error(StatusCode::kCorruption,
              "saved state " + path + " is damaged: " + what + "; load another saved state (--load-state)");
}

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
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int descriptor_;
};

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

std::string state_name(std::uint64_t step) {
  char name[32];
  std::snprintf(name, sizeof(name), "step-%012" PRIu64, step);
  return name;
}

bool is_state_name(const std::string& name) {
  constexpr std::size_t kPrefixLength = 5;
  return name.size() == kPrefixLength + 12 && name.rfind("step-", 0) == 0 &&
         name.find_first_not_of("0123456789", kPrefixLength) == std::string::npos;
}

std::string rank_file_name(int rank, int ranks) {
  return "rank-" + std::to_string(rank) + "-of-" + std::to_string(ranks);
}

// A run of one field of one parameter in a file.
struct Run {
  std::string parameter;
  std::string field;
  std::uint64_t offset = 0;  // Elements from the start of the parameter.
  std::uint64_t count = 0;
  std::uint64_t at = 0;  // Bytes from the start of the file.
  std::uint64_t checksum = 0;
};

struct RankFile {
  std::string path;
  std::vector<Run> runs;
};

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

RankFile read_index(const std::string& path, std::uint64_t expected_bytes, std::uint64_t expected_checksum) {
  RankFile result;
  result.path = path;
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
      Run run;
      entry.at("parameter").get_to(run.parameter);
      entry.at("field").get_to(run.field);
      entry.at("offset").get_to(run.offset);
      entry.at("count").get_to(run.count);
      entry.at("at").get_to(run.at);
      entry.at("checksum").get_to(run.checksum);
      if (run.count > bytes / sizeof(float) || run.at > bytes) corrupt(path, "a run lies outside of it");
      result.runs.push_back(std::move(run));
    }
  } catch (const Json::exception&) {
    corrupt(path, "its index cannot be read");
  }
  return result;
}

// Reads whole runs, verified, and keeps the last one: neighbours ask for parts of the same run.
class RunReader {
 public:
  std::span<const float> read(const RankFile& file, const Run& run) {
    if (&run != last_) {
      const File handle(file.path, O_RDONLY);
      values_.resize(run.count);
      handle.read_at(run.at, values_.data(), run.count * sizeof(float));
      if (checksum_of(values_.data(), run.count * sizeof(float)) != run.checksum) {
        corrupt(file.path, "the checksum of " + run.field + " of " + run.parameter + " differs");
      }
      last_ = &run;
    }
    return values_;
  }

 private:
  const Run* last_ = nullptr;
  std::vector<float> values_;
};

void remove_quietly(const std::string& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

// Reads the name that `latest` holds; empty when there is none. Errors: kCorruption when it is no state's
// name.
std::string read_latest(const std::string& directory) {
  const std::string path = directory + "/latest";
  if (!fs::exists(path)) return "";
  std::string name = read_text(path);
  if (!name.empty() && name.back() == '\n') name.pop_back();
  if (!is_state_name(name)) corrupt(path, "it does not name a saved state");
  return name;
}

// What killed runs left half-written, and what a new state changed places with.
void remove_unfinished(const std::string& directory) {
  constexpr std::string_view kPrefix = ".saving-";
  std::error_code ignored;
  std::vector<std::string> unfinished;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kPrefix) && is_state_name(name.substr(kPrefix.size()))) {
      unfinished.push_back(entry.path().string());
    }
  }
  for (const std::string& path : unfinished) remove_quietly(path);
}

}  // namespace

void Engine::Impl::save_state(const std::string& directory, const std::string& trainer_state) {
  const std::string name = state_name(attempted_steps);
  const std::string temporary = directory + "/.saving-" + name;
  const std::string final_path = directory + "/" + name;

  Status local;
  std::string superseded;  // What `latest` names until this one is complete.
  if (rank() == 0) {
    try {
      superseded = read_latest(directory);
    } catch (const Error&) {
      // A `latest` that names nothing supersedes nothing; it is replaced.
    }
    std::error_code error;
    fs::create_directories(directory, error);
    remove_quietly(temporary);
    if (error || ::mkdir(temporary.c_str(), 0755) != 0) {
      local = Status(StatusCode::kIoError, "cannot make " + temporary + " to save the state in: " +
                                               (error ? error.message() : std::strerror(errno)) +
                                               "; give a directory that can be written (--save-state)");
    }
  }
  agree(local);

  std::uint64_t file_bytes = 0;
  std::uint64_t index_checksum = 0;
  try {
    Json index = Json::array();
    const std::string path = temporary + "/" + rank_file_name(rank(), ranks());
    File file(path, O_WRONLY | O_CREAT | O_TRUNC);
    file.write(kMagic, sizeof(kMagic));
    std::uint64_t at = sizeof(kMagic);
    {
      const auto write_runs = [&](int unit_index, bool frozen, const char* field,
                                  std::span<const float> slice, std::uint64_t slice_begin) {
        for (std::size_t i = 0; i < layout(unit_index).places.size(); ++i) {
          const UnitLayout::Place& place = layout(unit_index).places[i];
          if (place.frozen != frozen) continue;
          const std::uint64_t lower = std::max(slice_begin, place.offset);
          const std::uint64_t upper = std::min(slice_begin + slice.size(), place.offset + place.count);
          if (lower >= upper) continue;
          const float* values = slice.data() + (lower - slice_begin);
          const std::uint64_t bytes = (upper - lower) * sizeof(float);
          file.write(values, bytes);
          index.push_back({{"parameter", shape(unit_index).parameters[i].name},
                           {"field", field},
                           {"offset", lower - place.offset},
                           {"count", upper - lower},
                           {"at", at},
                           {"checksum", checksum_of(values, bytes)}});
          at += bytes;
        }
      };
      std::vector<float> host;
      for (int unit_index = 0; unit_index < unit_count(); ++unit_index) {
        const Unit& u = unit(unit_index);
        // At stage 0 every rank has everything, and with hybrid sharding every group; each rank writes its
        // part all the same.
        const std::uint64_t slice = layout(unit_index).trainable_slice(ranks());
        const std::uint64_t begin = static_cast<std::uint64_t>(part_number()) * slice;
        for (int f = 0; f < kStateFieldCount; ++f) {
          host.resize(slice);
          read_state(unit_index, static_cast<StateField>(f), begin - u.updated_begin, host);
          write_runs(unit_index, false, kFields[f], host, begin);
        }
        const std::uint64_t frozen_slice = layout(unit_index).frozen_slice(ranks());
        if (frozen_slice == 0) continue;
        const std::uint64_t frozen_begin = static_cast<std::uint64_t>(part_number()) * frozen_slice;
        const std::vector<float> frozen = unit_frozen(unit_index);
        write_runs(unit_index, true, "master",
                   std::span<const float>(frozen).subspan(frozen_begin, frozen_slice), frozen_begin);
      }
    }
    const std::string text = dump(index);
    index_checksum = checksum_of(text.data(), text.size());
    const std::uint64_t trailer[2] = {text.size(), index_checksum};
    file.write(text.data(), text.size());
    file.write(trailer, sizeof(trailer));
    file.sync();
    file_bytes = at + text.size() + sizeof(trailer);
  } catch (const Error& error) {
    if (phase == Phase::kFailed) {  // A peer is gone, or a store: there is nobody to agree with.
      if (rank() == 0) remove_quietly(temporary);
      throw;
    }
    local = error.status();
  }
  agree_on_save(local, temporary);

  const std::uint64_t mine[2] = {file_bytes, index_checksum};
  std::vector<std::uint64_t> all(2 * static_cast<std::size_t>(ranks()));
  must(communicator.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
  if (rank() == 0) {
    try {
      Json files = Json::array();
      for (int r = 0; r < ranks(); ++r) {
        const std::size_t i = 2 * static_cast<std::size_t>(r);
        files.push_back(
            {{"name", rank_file_name(r, ranks())}, {"bytes", all[i]}, {"index_checksum", all[i + 1]}});
      }
      const Json manifest = {{"format", 1},
                             {"attempted_steps", attempted_steps},
                             {"applied_steps", applied_steps},
                             {"loss_scale", loss_scale},
                             {"growth_counter", growth_counter},
                             {"trainer_state", trainer_state},
                             {"ranks", ranks()},
                             {"stage", options.stage},
                             {"dtype", data_type_name(options.dtype)},
                             {"files", files}};
      const std::string text = dump(manifest);
      write_text_synced(temporary + "/manifest.json",
                        dump({{"checksum", checksum_of(text.data(), text.size())}, {"manifest", text}}));
      sync_directory(temporary);
      // Saving the same step again: the two change places in one move, so that `latest` always names a whole
      // one.
      if (!fs::exists(final_path)) {
        if (std::rename(temporary.c_str(), final_path.c_str()) != 0) io_error("rename", temporary);
      } else if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, final_path.c_str(), RENAME_EXCHANGE) !=
                 0) {
        io_error("exchange", temporary);
      }
      sync_directory(directory);
      write_text_synced(directory + "/.latest", name + "\n");
      if (std::rename((directory + "/.latest").c_str(), (directory + "/latest").c_str()) != 0) {
        io_error("rename", directory + "/.latest");
      }
      sync_directory(directory);
      remove_unfinished(directory);
      if (!superseded.empty() && superseded != name) remove_quietly(directory + "/" + superseded);
    } catch (const Error& error) {
      local = error.status();
    }
  }
  agree_on_save(local, temporary);
}

// A save that failed on some rank leaves nothing half-written.
void Engine::Impl::agree_on_save(const Status& mine, const std::string& temporary) {
  try {
    agree(mine);
  } catch (const Error&) {
    if (rank() == 0) remove_quietly(temporary);
    throw;
  }
}

std::string Engine::Impl::load_state(const std::string& directory) {
  Status local;
  std::string trainer_state;
  try {
    const std::string name = read_latest(directory);
    if (name.empty()) {
      throw Error(StatusCode::kIoError,
                  "there is no saved state in " + directory +
                      " (no file named latest); give the directory that --save-state was given");
    }
    const std::string base = directory + "/" + name;
    const std::string manifest_path = base + "/manifest.json";
    Json manifest;
    try {
      const Json envelope = Json::parse(read_text(manifest_path));
      const std::string text = envelope.at("manifest").get<std::string>();
      if (checksum_of(text.data(), text.size()) != envelope.at("checksum").get<std::uint64_t>()) {
        corrupt(manifest_path, "its checksum differs");
      }
      manifest = Json::parse(text);
      if (manifest.at("format").get<int>() != 1) {
        throw Error(StatusCode::kUnsupported, manifest_path +
                                                  " has a format this version does not read; use the "
                                                  "version of forebay that wrote it");
      }
    } catch (const Json::exception&) {
      corrupt(manifest_path, "it cannot be read as what was written");
    }

    std::vector<RankFile> files;
    for (const Json& entry : manifest.at("files")) {
      files.push_back(read_index(base + "/" + entry.at("name").get<std::string>(),
                                 entry.at("bytes").get<std::uint64_t>(),
                                 entry.at("index_checksum").get<std::uint64_t>()));
    }
    using Source = std::pair<const RankFile*, const Run*>;
    std::map<std::pair<std::string, std::string>, std::vector<Source>> sources;
    std::map<std::string, std::uint64_t> saved_counts;
    for (const RankFile& file : files) {
      for (const Run& run : file.runs) {
        sources[{run.parameter, run.field}].emplace_back(&file, &run);
        if (run.field == "master") saved_counts[run.parameter] += run.count;
      }
    }
    std::size_t known = 0;
    for (const UnitShape& unit_shape : model.units) {
      for (const ParameterShape& parameter : unit_shape.parameters) {
        ++known;
        const auto saved = saved_counts.find(parameter.name);
        if (saved == saved_counts.end() || saved->second != parameter.count) {
          throw Error(StatusCode::kInvalidArgument,
                      "the saved state " + base + " is of another model: " + parameter.name + " has " +
                          std::to_string(saved == saved_counts.end() ? 0 : saved->second) +
                          " elements there and " + std::to_string(parameter.count) +
                          " here; give the options of the run that saved it");
        }
      }
    }
    if (known != saved_counts.size()) {
      throw Error(StatusCode::kInvalidArgument, "the saved state " + base + " is of another model: it has " +
                                                    std::to_string(saved_counts.size()) +
                                                    " parameters, this one " + std::to_string(known) +
                                                    "; give the options of the run that saved it");
    }

    RunReader reader;
    // Fills `target`, elements [begin, begin + target.size()) of a section, from the runs that cover them.
    const auto fill = [&](int unit_index, bool frozen, const std::string& field, std::uint64_t begin,
                          std::span<float> target) {
      for (std::size_t i = 0; i < layout(unit_index).places.size(); ++i) {
        const UnitLayout::Place& place = layout(unit_index).places[i];
        if (place.frozen != frozen) continue;
        const std::uint64_t lower = std::max(begin, place.offset);
        const std::uint64_t upper = std::min(begin + target.size(), place.offset + place.count);
        if (lower >= upper) continue;
        const std::string& parameter = shape(unit_index).parameters[i].name;
        std::uint64_t filled = 0;
        for (const auto& [file, run] : sources[{parameter, field}]) {
          const std::uint64_t first = std::max(lower - place.offset, run->offset);
          const std::uint64_t stop = std::min(upper - place.offset, run->offset + run->count);
          if (first >= stop) continue;
          const std::span<const float> values = reader.read(*file, *run);
          std::copy_n(values.data() + (first - run->offset), stop - first,
                      target.data() + (place.offset + first - begin));
          filled += stop - first;
        }
        if (filled != upper - lower) corrupt(base, field + " of " + parameter + " is not whole");
      }
    };
    std::vector<float> host;
    for (int unit_index = 0; unit_index < unit_count(); ++unit_index) {
      Unit& u = unit(unit_index);
      for (int f = 0; f < kStateFieldCount; ++f) {
        host.assign(u.updated_count, 0.0f);
        fill(unit_index, false, kFields[f], u.updated_begin, host);
        write_state(unit_index, static_cast<StateField>(f), 0, host);
      }
      for (std::size_t i = 0; i < layout(unit_index).places.size(); ++i) {
        const UnitLayout::Place& place = layout(unit_index).places[i];
        if (!place.frozen) continue;
        // set_parameter takes a whole parameter; `fill` works on the section, so give it just this
        // parameter's part.
        host.assign(place.count, 0.0f);
        fill(unit_index, true, "master", place.offset, host);
        set_parameter({unit_index, static_cast<int>(i)}, host);
      }
    }
    manifest.at("attempted_steps").get_to(attempted_steps);
    manifest.at("applied_steps").get_to(applied_steps);
    manifest.at("trainer_state").get_to(trainer_state);
    if (options.dtype == DataType::kFloat16 && manifest.at("dtype").get<std::string>() == "fp16") {
      manifest.at("loss_scale").get_to(loss_scale);
      manifest.at("growth_counter").get_to(growth_counter);
    }
  } catch (const Error& error) {
    if (phase == Phase::kFailed) throw;
    local = error.status();
  } catch (const Json::exception& error) {
    local =
        Status(StatusCode::kCorruption, "the saved state in " + directory + " is damaged: " + error.what());
  }
  agree(local);
  publish_parameters();
  return trainer_state;
}

}  // namespace forebay
