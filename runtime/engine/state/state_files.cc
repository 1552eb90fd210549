#include "runtime/engine/state/state_files.h"

#include <xxhash.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>

#include "forebay/error.h"
#include "forebay/log.h"
#include "forebay/text.h"

namespace forebay::internal {
namespace {

using Json = nlohmann::json;

constexpr char kMagic[8] = {'F', 'B', 'S', 'T', 'A', 'T', 'E', '1'};
constexpr std::uint64_t kTrailerBytes = 2 * sizeof(std::uint64_t);
constexpr std::uint64_t kFormat = 1;
constexpr std::string_view kTemporaryPrefix = ".saving-";
constexpr const char* kLatest = "latest";
constexpr const char* kNextLatest = ".latest";
constexpr const char* kManifest = "manifest.json";
constexpr std::uint64_t kMostLatestBytes = 64;
constexpr std::uint64_t kMostIndexBytes = std::uint64_t{1} << 30;

[[noreturn]] void corrupt(const std::string& path, const std::string& finding) {
  throw Error(StatusCode::kCorruption,
              "saved state " + path + " is damaged: " + finding + "; load another saved state");
}

// A step that is saved again has the other of two names, so that a whole state has its name at any moment.
constexpr std::string_view kAgain = "-2";

constexpr std::size_t kPrefixLength = 5;
constexpr std::size_t kPlainNameLength = kPrefixLength + 12;

bool is_state_name(std::string_view name) {
  if (name.ends_with(kAgain)) name.remove_suffix(kAgain.size());
  return name.size() == kPlainNameLength && name.starts_with("step-") &&
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

// Removes the temporary directories of killed runs.
void remove_unfinished(const StateDirectory& directory) {
  for (const std::string& name : directory.names()) {
    if (name.starts_with(kTemporaryPrefix) && is_state_name(name.substr(kTemporaryPrefix.size())))
      directory.remove(name);
  }
}

// Keeps `newest` and the states of the steps before it, `keep` in all. States of later steps are those of a
// run that was left, and stay.
void remove_all_but(const StateDirectory& directory, const std::string& newest, int keep) {
  const auto step_of = [](const std::string& name) { return name.substr(0, kPlainNameLength); };
  int kept = 1;
  for (const std::string& name : state_names(directory)) {
    if (name == newest || step_of(name) > step_of(newest)) continue;
    const bool is_earlier = step_of(name) < step_of(newest);
    if (is_earlier && kept < keep) {
      ++kept;
    } else {
      directory.remove(name);
    }
  }
}

// The state that `latest` names; empty if there is none. Errors: throws kCorruption if it names none.
std::string read_latest(const StateDirectory& directory) {
  if (!directory.has(kLatest)) return "";
  std::string name = directory.read(kLatest, kMostLatestBytes);
  if (!name.empty() && name.back() == '\n') name.pop_back();
  const std::string path = directory.path() + "/" + kLatest;
  if (!is_state_name(name)) corrupt(path, "it does not name a saved state");
  if (!directory.has(name)) corrupt(path, "it names " + name + ", which is not there");
  return name;
}

// The newest whole state, or the one of the step that `plain_name` names; empty if there is none.
std::string newest_whole_state(const StateDirectory& directory, const std::string& plain_name = "") {
  for (const std::string& name : state_names(directory)) {
    if (!name.starts_with(plain_name)) continue;
    try {
      static_cast<void>(SavedState(directory.path(), name));
      return name;
    } catch (const Error&) {
      // An older one may be whole.
    }
  }
  return "";
}

StateRun read_run(const Json& entry) {
  return {.parameter = entry.at("parameter").get<std::string>(),
          .field = entry.at("field").get<std::string>(),
          .offset = whole_number(entry, "offset"),
          .count = whole_number(entry, "count"),
          .at = whole_number(entry, "at"),
          .checksum = whole_number(entry, "checksum")};
}

}  // namespace

std::uint64_t whole_number(const Json& object, const char* name) {
  return object.at(name).get_ref<const Json::number_unsigned_t&>();
}

std::string state_name(std::uint64_t step) {
  char name[32];
  std::snprintf(name, sizeof(name), "step-%012" PRIu64, step);
  return name;
}

std::string state_file_name(int rank, int ranks) {
  return "rank-" + std::to_string(rank) + "-of-" + std::to_string(ranks);
}

std::vector<std::string> state_names(const StateDirectory& directory) {
  std::vector<std::string> names = directory.names();
  std::erase_if(names, [](const std::string& name) { return !is_state_name(name); });
  std::sort(names.rbegin(), names.rend());
  return names;
}

std::string temporary_state(const std::string& name) {
  return std::string(kTemporaryPrefix) + name;
}

std::string find_state(const StateDirectory& directory) {
  Status damage;
  try {
    if (std::string name = read_latest(directory); !name.empty()) return name;
  } catch (const Error& error) {
    damage = error.status();
  }
  const std::string found = newest_whole_state(directory);
  if (found.empty()) {
    throw_if_error(damage);
    return found;
  }
  log(LogLevel::kWarning, "%s/%s names no state; the newest whole one is %s", directory.path().c_str(),
      kLatest, found.c_str());
  return found;
}

std::string find_state_of(const StateDirectory& directory, std::uint64_t step) {
  const std::string name = state_name(step);
  try {
    // A step that was saved again has two names.
    if (std::string latest = read_latest(directory); latest.starts_with(name)) return latest;
  } catch (const Error&) {
    // The states have names all the same.
  }
  return newest_whole_state(directory, name);
}

StateFileWriter::StateFileWriter(StateFile file) : file_(std::move(file)) {
  file_.write(kMagic, sizeof(kMagic));
  at_ = sizeof(kMagic);
}

void StateFileWriter::write(const std::string& parameter, const char* field, std::uint64_t offset,
                            std::span<const float> values) {
  file_.write(values.data(), values.size_bytes());
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
  file_.write(text.data(), text.size());
  file_.write(trailer, sizeof(trailer));
  file_.sync();
  return {at_ + text.size() + sizeof(trailer), checksum};
}

StateFileEnd read_state_file_end(const StateFile& file) {
  const std::uint64_t bytes = file.bytes();
  std::uint64_t trailer[2];  // Length and checksum of the index.
  if (bytes < sizeof(kMagic) + kTrailerBytes) corrupt(file.path(), "it is shorter than an empty one");
  file.read_at(bytes - kTrailerBytes, trailer, sizeof(trailer));
  return {bytes, trailer[1]};
}

Json file_list(std::span<const StateFileEnd> ends) {
  Json files = Json::array();
  for (std::size_t r = 0; r < ends.size(); ++r) {
    files.push_back({{"name", state_file_name(static_cast<int>(r), static_cast<int>(ends.size()))},
                     {"bytes", ends[r].bytes},
                     {"index_checksum", ends[r].index_checksum}});
  }
  return files;
}

void check_text(const std::string& trainer_state) {
  static_cast<void>(dump(trainer_state));
}

void publish_state(const StateDirectory& directory, const std::string& name, const Json& manifest, int keep) {
  std::string superseded;
  try {
    superseded = find_state(directory);
  } catch (const Error&) {
    // A damaged `latest` and no whole state supersede nothing.
  }
  const std::string target = superseded == name ? name + std::string(kAgain) : name;
  const std::string text = dump(manifest);
  const StateDirectory temporary = directory.subdirectory(temporary_state(name));
  temporary.write_synced(kManifest,
                         dump({{"checksum", checksum_of(text.data(), text.size())}, {"manifest", text}}));
  temporary.sync();
  directory.remove(target);  // A state that nothing names.
  directory.rename(temporary_state(name), target);
  directory.sync();
  directory.write_synced(kNextLatest, target + "\n");
  directory.rename(kNextLatest, kLatest);
  directory.sync();
  remove_unfinished(directory);
  if (keep > 1) {
    remove_all_but(directory, target, keep);
  } else if (!superseded.empty()) {
    directory.remove(superseded);
  }
}

SavedState::SavedState(const std::string& directory, const std::string& name)
    : files_(StateDirectory(directory).subdirectory(name)) {
  read_manifest();
  try {
    for (const Json& entry : manifest_.at("files")) {
      read_index(entry.at("name").get<std::string>(), whole_number(entry, "bytes"),
                 whole_number(entry, "index_checksum"));
    }
  } catch (const Json::exception&) {
    corrupt(path(), "its manifest does not list its files");
  }
}

void SavedState::read_manifest() {
  const std::string path = files_.path() + "/" + kManifest;
  try {
    const Json envelope = Json::parse(files_.read(kManifest, kMostIndexBytes));
    const std::string text = envelope.at("manifest").get<std::string>();
    if (checksum_of(text.data(), text.size()) != whole_number(envelope, "checksum")) {
      corrupt(path, "its checksum differs");
    }
    manifest_ = Json::parse(text);
    if (whole_number(manifest_, "format") != kFormat) {
      throw Error(StatusCode::kUnsupported, path +
                                                " has a format this version does not read; use the "
                                                "version of forebay that wrote it");
    }
  } catch (const Json::exception&) {
    corrupt(path, "it is not a manifest");
  }
}

void SavedState::read_index(const std::string& name, std::uint64_t expected_bytes,
                            std::uint64_t expected_checksum) {
  if (name.find('/') != std::string::npos) corrupt(path(), "its manifest names a file outside of it");
  const StateFile file = files_.open(name);
  const std::string& path = file.path();
  const std::uint64_t bytes = file.bytes();
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
  if (trailer[0] > std::min(bytes - kFrameBytes, kMostIndexBytes)) corrupt(path, "its index is too long");
  std::string text(trailer[0], '\0');
  file.read_at(bytes - kTrailerBytes - text.size(), text.data(), text.size());
  if (checksum_of(text.data(), text.size()) != trailer[1] || trailer[1] != expected_checksum) {
    corrupt(path, "the checksum of its index differs");
  }
  try {
    for (const Json& entry : Json::parse(text)) {
      StateRun run = read_run(entry);
      if (run.count > bytes / sizeof(float) || run.at > bytes) corrupt(path, "a run lies outside of it");
      enter(name, std::move(run));
    }
  } catch (const Json::exception&) {
    corrupt(path, "its index cannot be read");
  }
}

void SavedState::enter(const std::string& file, StateRun run) {
  if (run.field == kStateFields[0]) counts_[run.parameter] += run.count;
  auto& sources = sources_[{run.parameter, run.field}];
  sources.push_back({file, std::move(run)});
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
  if (filled != target.size()) corrupt(path(), field + " of " + shown_value(parameter) + " is not whole");
}

std::span<const float> SavedState::values_of(const Source& source) {
  if (&source == last_) return values_;
  const StateRun& run = source.run;
  last_ = nullptr;
  values_.resize(run.count);
  const StateFile file = files_.open(source.file);
  file.read_at(run.at, values_.data(), run.count * sizeof(float));
  if (checksum_of(values_.data(), run.count * sizeof(float)) != run.checksum) {
    corrupt(file.path(),
            "the checksum of " + shown_value(run.field) + " of " + shown_value(run.parameter) + " differs");
  }
  last_ = &source;
  return values_;
}

bool SavedState::has(const std::string& parameter, const std::string& field) const {
  return sources_.contains({parameter, field});
}

std::uint64_t SavedState::visit(const std::string& parameter, const std::string& field,
                                std::uint64_t piece_count,
                                const std::function<void(std::span<const float>)>& visit) const {
  const auto found = sources_.find({parameter, field});
  if (found == sources_.end()) return 0;
  std::vector<const Source*> runs;
  for (const Source& source : found->second) runs.push_back(&source);
  std::sort(runs.begin(), runs.end(),
            [](const Source* a, const Source* b) { return a->run.offset < b->run.offset; });
  std::uint64_t count = 0;
  for (const Source* source : runs) {
    if (source->run.offset != count)
      corrupt(path(), field + " of " + shown_value(parameter) + " is not whole");
    visit_run(*source, piece_count, visit);
    count += source->run.count;
  }
  return count;
}

void SavedState::visit_run(const Source& source, std::uint64_t piece_count,
                           const std::function<void(std::span<const float>)>& visit) const {
  const StateRun& run = source.run;
  const StateFile file = files_.open(source.file);
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> hash(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(hash.get());
  std::vector<float> piece(std::min(run.count, piece_count));
  for (std::uint64_t done = 0; done < run.count; done += piece.size()) {
    piece.resize(std::min(run.count - done, piece_count));
    file.read_at(run.at + done * sizeof(float), piece.data(), piece.size() * sizeof(float));
    XXH3_64bits_update(hash.get(), piece.data(), piece.size() * sizeof(float));
    visit(piece);
  }
  if (XXH3_64bits_digest(hash.get()) != run.checksum)
    corrupt(file.path(),
            "the checksum of " + shown_value(run.field) + " of " + shown_value(run.parameter) + " differs");
}

}  // namespace forebay::internal
