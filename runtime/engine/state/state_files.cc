#include "runtime/engine/state/state_files.h"

#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <string_view>
#include <utility>

#include "forebay/check.h"
#include "forebay/checksum.h"
#include "forebay/error.h"
#include "forebay/log.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/engine/state/saved_state.h"
#include "runtime/engine/state/tensor_places.h"

namespace forebay::internal {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kFormat = 2;
constexpr std::string_view kTemporaryPrefix = ".saving-";
constexpr std::size_t kSaveNumberLength = 17;  // With its dash.
constexpr std::string_view kRemovedPrefix = ".removing-";
constexpr const char* kLatest = "latest";
constexpr const char* kNextLatest = ".latest";
constexpr std::uint64_t kMostLatestBytes = 64;

// A rank's file is written in pieces of this size, a huge page. A disk takes one in few requests, each of
// which interrupts a processor. Smaller: more requests. Larger: leaves the processor's cache.
constexpr std::uint64_t kPieceBytes = 2 << 20;
constexpr std::uint64_t kPageBytes = 4096;  // Every disk takes whole pages of this size.
// Behind a part of a page that is not written yet.
constexpr std::uint64_t kBufferBytes = kPageBytes + kPieceBytes;
constexpr std::uint64_t kBlockBytes = kBlockCount * sizeof(float);
static_assert(kPieceBytes % kBlockBytes == 0);

// In the header of a rank's file.
constexpr const char* kMetadata = "__metadata__";
constexpr const char* kState = "forebay_state";
constexpr const char* kChecksums = "checksums";  // Names of other tensors have a '/'.

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
std::string dump(const auto& json, int indent) {
  try {
    return json.dump(indent);
  } catch (const Json::exception&) {
    throw Error(
        StatusCode::kInvalidArgument,
        "the trainer's state or a parameter's name is not UTF-8 text, which saved state needs; encode it");
  }
}

// The state that is written in a directory of this name; empty: in none. Older versions had no number.
std::string_view state_of_temporary(std::string_view name) {
  if (!name.starts_with(kTemporaryPrefix)) return {};
  name.remove_prefix(kTemporaryPrefix.size());
  const std::string_view end = name.substr(name.size() - std::min(name.size(), kSaveNumberLength));
  if (end.starts_with('-') && end.find_first_not_of("0123456789abcdef", 1) == std::string_view::npos)
    name.remove_suffix(end.size());
  return is_state_name(name) ? name : std::string_view();
}

// Says so where something stays.
void remove_aloud(const StateDirectory& directory, const std::string& name) {
  directory.remove(name);
  if (!directory.has(name)) return;
  log(LogLevel::kWarning,
      "%s/%s stays: it has files that are not of a saved state, or they cannot be removed now; the next save "
      "tries again, or move them",
      directory.path().c_str(), name.c_str());
}

// Whether a directory that has the name of a state is one. A save gives the name to one with its manifest.
bool is_state(const StateDirectory& directory, const std::string& name) {
  try {
    return directory.subdirectory(name).has(kManifest);
  } catch (const Error& error) {
    if (error.code() == StatusCode::kUnavailable) throw;
    return false;  // A link, or a file.
  }
}

// No state has its name and a part of its files, at any moment. A directory that is no state stays.
void remove_state(const StateDirectory& directory, const std::string& name) {
  if (!directory.has(name) || directory.remove_link(name) || !is_state(directory, name)) return;
  const std::string removed = std::string(kRemovedPrefix) + name;
  directory.remove(removed);
  remove_aloud(directory, directory.rename_directory(name, removed) ? removed : name);
}

// Keeps `newest` and the states of the steps before it, `keep` in all. States of later steps are those of a
// run that was left, and stay.
void remove_all_but(const StateDirectory& directory, const std::string& newest, int keep) {
  const auto step_of = [](const std::string& name) { return name.substr(0, kPlainNameLength); };
  int kept = 1;
  for (const std::string& name : state_names(directory)) {
    if (name == newest || step_of(name) > step_of(newest)) continue;
    const bool is_earlier = step_of(name) < step_of(newest);
    if (is_earlier && kept < keep && is_state(directory, name)) {
      ++kept;
    } else {
      try {
        remove_state(directory, name);
      } catch (const Error& error) {
        log(LogLevel::kWarning, "an old saved state stays: %s", error.what());
      }
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
      SavedState(directory.path(), name).check_files();
      return name;
    } catch (const Error& error) {
      if (error.code() == StatusCode::kUnavailable) throw;
      // An older one may be whole.
    }
  }
  return "";
}

}  // namespace

std::uint64_t whole_number(const Json& object, const char* name) {
  return object.at(name).get_ref<const Json::number_unsigned_t&>();
}

std::string state_name(std::uint64_t step) {
  constexpr std::uint64_t kMostSteps = 999'999'999'999;  // The digits of a state's name.
  if (step > kMostSteps)
    throw Error(StatusCode::kInvalidArgument, "the state is of step " + std::to_string(step) +
                                                  ", and a state has step " + std::to_string(kMostSteps) +
                                                  " at most; save it at an earlier step");
  char name[32];
  std::snprintf(name, sizeof(name), "step-%012" PRIu64, step);
  return name;
}

std::string state_file_name(int rank, int ranks) {
  return "rank-" + std::to_string(rank) + "-of-" + std::to_string(ranks) + ".safetensors";
}

bool is_state_file(std::string_view name) {
  if (name == kManifest || name == TensorIndex::kName) return true;
  // A save in the background gives a file its name without the dot when it is whole.
  if (name.starts_with('.')) name.remove_prefix(1);
  constexpr std::string_view kSuffix = ".safetensors";  // Not in format 1.
  if (name.ends_with(kSuffix)) name.remove_suffix(kSuffix.size());
  const auto take = [&](std::string_view word) {
    if (!name.starts_with(word)) return false;
    name.remove_prefix(word.size());
    const std::size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
    name.remove_prefix(digits);
    return digits > 0;
  };
  return take("rank-") && take("-of-") && name.empty();
}

std::vector<std::string> state_names(const StateDirectory& directory) {
  std::vector<std::string> names = directory.names();
  std::erase_if(names, [](const std::string& name) { return !is_state_name(name); });
  std::sort(names.rbegin(), names.rend());
  return names;
}

std::uint64_t new_save_number() {
  static std::atomic<std::uint64_t> count{0};
  const std::uint64_t facts[] = {
      static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count()),
      static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()),
      static_cast<std::uint64_t>(::getpid()), ++count};
  return checksum_of(facts, sizeof facts);
}

std::string temporary_state(const std::string& name, std::uint64_t save) {
  char number[kSaveNumberLength + 1];
  std::snprintf(number, sizeof number, "-%016llx", static_cast<unsigned long long>(save));
  return std::string(kTemporaryPrefix) + name + number;
}

void remove_unfinished(const StateDirectory& directory) {
  for (const std::string& name : directory.names()) {
    const bool is_removed = name.starts_with(kRemovedPrefix) &&
                            is_state_name(std::string_view(name).substr(kRemovedPrefix.size()));
    if (is_removed || !state_of_temporary(name).empty()) remove_aloud(directory, name);
  }
}

std::string find_state(const StateDirectory& directory) {
  Status damage;
  try {
    if (std::string name = read_latest(directory); !name.empty()) return name;
  } catch (const Error& error) {
    if (error.code() == StatusCode::kUnavailable) throw;
    damage = error.status();
  }
  const std::string found = newest_whole_state(directory);
  if (found.empty()) {
    throw_if_error(damage);
    return found;
  }
  log(LogLevel::kWarning, "%s/%s %s; the newest whole one is %s", directory.path().c_str(), kLatest,
      directory.has(kLatest) ? "names no state" : "is missing, which names the state to load", found.c_str());
  return found;
}

void check_latest(const StateDirectory& directory) {
  if (!directory.has(kLatest)) return;
  std::string name;
  try {
    name = directory.read(kLatest, kMostLatestBytes);
  } catch (const Error&) {
    // A directory, say, or a link. Beside saved states it is a damaged one.
  }
  if (!name.empty() && name.back() == '\n') name.pop_back();
  if (is_state_name(name)) return;
  const bool names_other = !name.empty() && name.find('/') == std::string::npos && directory.has(name);
  if (!names_other && !state_names(directory).empty()) return;
  throw Error(
      StatusCode::kInvalidArgument,
      "cannot save in " + shown_path(directory.path()) +
          ": its file latest names no saved state of forebay, so another tool wrote it, and this save "
          "would replace it; give another directory");
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

namespace {

std::string part_text(const TensorSplit& split) {
  return "/part-" + std::to_string(split.part) + "-of-" + std::to_string(split.parts);
}

std::string tensor_name(const StateParameter& parameter, const StateRun& run) {
  std::string name = parameter.name + "/" + kStateFields[run.field];
  if (parameter.split && parameter.split->parts > 1) name += part_text(*parameter.split);
  if (run.count < parameter.count)
    name += "/" + std::to_string(run.offset) + "-" + std::to_string(run.offset + run.count);
  return name;
}

Json described(const StateParameter& parameter) {
  Json json = {{"name", parameter.name},
               {"count", parameter.count},
               {"shape", parameter.shape},
               {"frozen", parameter.frozen}};
  if (parameter.factors) json["factors"] = true;
  if (const auto& split = parameter.split) {
    json["part"] = split->part;
    json["split"] = {{"shape", split->shape},
                     {"dimension", split->dimension},
                     {"sections", split->sections},
                     {"parts", split->parts}};
  }
  return json;
}

}  // namespace

StateFileWriter::StateFileWriter(StateFile file, std::span<const StateParameter> parameters,
                                 std::vector<StateRun> runs)
    : file_(std::move(file)),
      buffer_(static_cast<std::byte*>(std::aligned_alloc(kPieceBytes, round_up(kBufferBytes, kPieceBytes))),
              std::free),
      pending_(buffer_.get()),
      runs_(std::move(runs)) {
  if (!buffer_) throw std::bad_alloc();
  static_cast<void>(::madvise(buffer_.get(), kPieceBytes, MADV_HUGEPAGE));
  static_cast<void>(file_.set_direct(true));
  Json state = {{"format", kFormat}, {"parameters", Json::array()}, {"runs", Json::array()}};
  for (const StateParameter& parameter : parameters) state["parameters"].push_back(described(parameter));
  using OrderedJson = nlohmann::ordered_json;
  OrderedJson header = {{kMetadata, nullptr}};
  auto& entries = header.get_ref<OrderedJson::object_t&>();  // [] would look through all that are there.
  std::uint64_t at = 0;
  std::uint64_t blocks = 0;
  for (const StateRun& run : runs_) {
    state["runs"].push_back({run.parameter, run.field, run.offset, run.count});
    const StateParameter& parameter = parameters[run.parameter];
    const bool is_whole = run.count == parameter.count && !parameter.shape.empty();
    const std::uint64_t end = at + run.count * sizeof(float);
    entries.emplace_back(tensor_name(parameter, run),
                         OrderedJson{{"dtype", "F32"},
                                     {"shape", is_whole ? parameter.shape : std::vector{run.count}},
                                     {"data_offsets", {at, end}}});
    at = end;
    blocks += ceil_div(run.count, kBlockCount);
  }
  const std::uint64_t checksum_bytes = blocks * sizeof(std::uint64_t);
  header[kChecksums] = {
      {"dtype", "U8"}, {"shape", {checksum_bytes}}, {"data_offsets", {at, at + checksum_bytes}}};
  header[kMetadata] = {{"format", "pt"}, {kState, dump(state, -1)}};
  std::string text = dump(header, -1);
  const std::uint64_t length = round_up(sizeof(length) + text.size(), kPageBytes) - sizeof(length);
  text.resize(length, ' ');         // The tensors begin at a page.
  append(&length, sizeof(length));  // Little-endian, as every host of forebay is.
  append(text.data(), text.size());
}

// Room for `bytes`, of a block at most, behind the bytes that go to the file next.
std::byte* StateFileWriter::room_in_buffer(std::uint64_t bytes) {
  if (pending_ != buffer_.get() || pending_bytes_ + bytes > kBufferBytes) {
    write_pages();
    std::memmove(buffer_.get(), pending_, pending_bytes_);
    pending_ = buffer_.get();
  }
  return buffer_.get() + pending_bytes_;
}

void StateFileWriter::append(const void* data, std::uint64_t bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const std::uint64_t count = std::min(bytes, kBlockBytes);
    std::memcpy(room_in_buffer(count), from, count);
    pending_bytes_ += count;
    from += count;
    bytes -= count;
  }
}

// Data that stays.
void StateFileWriter::append_kept(const std::byte* data, std::uint64_t bytes) {
  if (data != pending_ + pending_bytes_) {
    const std::uint64_t in_page = reinterpret_cast<std::uintptr_t>(data) % kPageBytes;
    const std::uint64_t head = round_up(in_page, kPageBytes) - in_page;
    if (pending_bytes_ % kPageBytes != in_page || bytes < head + kPageBytes) return append(data, bytes);
    append(data, head);
    write_pages();
    pending_ = data + head;
    bytes -= head;
  }
  pending_bytes_ += bytes;
  if (pending_bytes_ >= kPieceBytes) write_pages();
}

// Leaves a part of a page.
void StateFileWriter::write_pages() {
  while (pending_bytes_ >= kPageBytes) {
    const std::uint64_t bytes = std::min(pending_bytes_ - pending_bytes_ % kPageBytes, kPieceBytes);
    file_.write(pending_, bytes);
    pending_ += bytes;
    pending_bytes_ -= bytes;
  }
}

void StateFileWriter::write(std::span<const float> values) {
  write(values.size(), [&](std::byte* target, std::uint64_t first, std::uint64_t count) {
    std::memcpy(target, &values[first], count * sizeof(float));
  });
}

void StateFileWriter::write(std::uint64_t count, const Fill& fill) {
  for (std::uint64_t first = 0; first < count;) {
    FOREBAY_CHECK(next_ < runs_.size(), "more values than %zu runs have", runs_.size());
    const std::uint64_t left = runs_[next_].count - done_;
    const std::uint64_t here = std::min({count - first, left, kBlockCount - block_});
    std::byte* const block = room_in_buffer(std::min(left + block_, kBlockCount) * sizeof(float));
    fill(block + block_ * sizeof(float), first, here);
    first += here;
    done_ += here;
    block_ += here;
    if (here == left || block_ == kBlockCount) {
      checksums_.push_back(checksum_of(block, block_ * sizeof(float)));
      pending_bytes_ += block_ * sizeof(float);
      block_ = 0;
    }
    if (here < left) continue;
    ++next_;
    done_ = 0;
  }
}

void StateFileWriter::write_run(const std::byte* values, const std::uint64_t* checksums) {
  FOREBAY_CHECK(next_ < runs_.size() && done_ == 0, "run %zu of %zu is begun", next_, runs_.size());
  const std::uint64_t count = runs_[next_++].count;
  checksums_.insert(checksums_.end(), checksums, checksums + ceil_div(count, kBlockCount));
  append_kept(values, count * sizeof(float));
}

void StateFileWriter::finish() {
  FOREBAY_CHECK(next_ == runs_.size(), "%zu of %zu runs are written", next_, runs_.size());
  append(checksums_.data(), checksums_.size() * sizeof(std::uint64_t));
  write_pages();
  static_cast<void>(file_.set_direct(false));
  file_.write(pending_, pending_bytes_);
  file_.sync();
}

StateFileIndex::StateFileIndex(const StateFile& file) : bytes(file.bytes()) {
  std::uint64_t length = 0;
  if (bytes < sizeof(length)) corrupt(file.path(), "it is shorter than an empty one");
  file.read_at(0, &length, sizeof(length));
  if (length > std::min(bytes - sizeof(length), kMostIndexBytes))
    corrupt(file.path(), "its header is too long");
  std::string text(length, '\0');
  file.read_at(sizeof(length), text.data(), text.size());
  data_at = sizeof(length) + length;
  try {
    header = Json::parse(text);
    const Json& offsets = header.at(kChecksums).at("data_offsets");
    const auto begin = offsets.at(0).get_ref<const Json::number_unsigned_t&>();
    const auto end = offsets.at(1).get_ref<const Json::number_unsigned_t&>();
    if (begin > end || end != bytes - data_at || (end - begin) % sizeof(std::uint64_t) != 0)
      corrupt(file.path(), "its header does not describe all of it");
    checksums.resize((end - begin) / sizeof(std::uint64_t));
    file.read_at(data_at + begin, checksums.data(), end - begin);
  } catch (const Json::exception&) {
    corrupt(file.path(), "its header cannot be read");
  }
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> hash(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(hash.get());
  XXH3_64bits_update(hash.get(), text.data(), text.size());
  XXH3_64bits_update(hash.get(), checksums.data(), checksums.size() * sizeof(std::uint64_t));
  checksum = XXH3_64bits_digest(hash.get());
}

void check_text(const std::string& trainer_state) {
  static_cast<void>(dump(Json(trainer_state), -1));
}

namespace {

// The parameters of a state and the place of every element, from the files of all ranks.
class PlaceList {
 public:
  void add(const StateFile& file, const StateFileIndex& index, std::size_t number);
  void check() const;
  Json json() const;

 private:
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };
  struct Parameter {
    Json description;
    TensorPlaces places;
    Json pieces = Json::array();
    // By field and part.
    std::array<std::map<std::uint64_t, std::vector<Range>>, std::size(kStateFields)> saved;
  };
  std::size_t find(const Json& description, const std::string& file);
  static void check(const std::string& name, const TensorPlaces& places, const char* field,
                    std::map<std::uint64_t, std::vector<Range>> saved);

  std::vector<Parameter> parameters_;
  std::map<std::string, std::size_t> by_name_;
};

std::size_t PlaceList::find(const Json& description, const std::string& file) {
  // The description of the whole tensor.
  Json whole = {{"name", description.at("name")},
                {"count", description.at("count")},
                {"shape", description.at("shape")},
                {"frozen", description.at("frozen")}};
  if (description.contains("factors")) whole["factors"] = true;
  TensorPlaces places(whole_number(description, "count"));
  if (description.contains("split")) {
    Json split = description.at("split");
    places = value_or_throw(TensorPlaces::of({.shape = split.at("shape").get<std::vector<std::uint64_t>>(),
                                              .dimension = split.at("dimension").get<int>(),
                                              .sections = whole_number(split, "sections"),
                                              .parts = whole_number(split, "parts")}));
    whole["count"] = places.count();
    whole["shape"] = split.at("shape");
    split.erase("shape");
    whole["split"] = split;
  }
  const auto name = description.at("name").get<std::string>();
  const auto [found, is_new] = by_name_.emplace(name, parameters_.size());
  if (is_new) {
    parameters_.push_back({.description = std::move(whole), .places = places});
  } else if (parameters_[found->second].description != whole) {
    throw Error(StatusCode::kInvalidArgument,
                "ranks saved " + shown_value(name) + " in different shapes or splits; " + shown_path(file) +
                    " differs from an earlier file; give declare_split() the same whole tensor on all ranks");
  }
  return found->second;
}

void PlaceList::add(const StateFile& file, const StateFileIndex& index, std::size_t number) {
  try {
    const Json state = Json::parse(index.header.at(kMetadata).at(kState).get_ref<const std::string&>());
    std::vector<std::pair<std::size_t, std::uint64_t>> parameters;  // Here, and the part in this file.
    for (const Json& description : state.at("parameters")) {
      parameters.emplace_back(find(description, file.path()),
                              description.contains("part") ? whole_number(description, "part") : 0);
    }
    std::map<std::pair<std::size_t, std::uint64_t>, std::size_t> pieces;  // By parameter and offset.
    std::uint64_t at = index.data_at;
    std::uint64_t block = 0;
    for (const Json& run : state.at("runs")) {
      const auto parameter_index = run.at(0).get<std::size_t>();
      const auto field = run.at(1).get<std::size_t>();
      if (parameter_index >= parameters.size() || field >= std::size(kStateFields))
        corrupt(file.path(), "a run of its header names no parameter or field");
      const auto [place, part] = parameters[parameter_index];
      const auto offset = run.at(2).get<std::uint64_t>();
      const auto count = run.at(3).get<std::uint64_t>();
      Parameter& parameter = parameters_[place];
      const auto [piece, is_new] = pieces.emplace(std::pair{place, offset}, parameter.pieces.size());
      if (is_new)
        parameter.pieces.push_back({{"file", number}, {"part", part}, {"offset", offset}, {"count", count}});
      parameter.pieces[piece->second][kStateFields[field]] = {at, block};
      parameter.saved[field][part].push_back({offset, offset + count});
      at += count * sizeof(float);
      block += ceil_div(count, kBlockCount);
    }
  } catch (const Json::exception&) {
    corrupt(file.path(), "its header cannot be read");
  }
}

void PlaceList::check(const std::string& name, const TensorPlaces& places, const char* field,
                      std::map<std::uint64_t, std::vector<Range>> saved) {
  for (std::uint64_t part = 0; part < places.parts(); ++part) {
    std::vector<Range>& ranges = saved[part];
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    std::uint64_t end = 0;
    for (const Range& range : ranges) {
      if (range.begin < end) {
        throw Error(
            StatusCode::kInvalidArgument,
            "several ranks saved element " + std::to_string(range.begin) + " of " + field + " of " +
                shown_value(name) +
                "; ranks that divide a tensor declare it (Engine::declare_split), or each part of the "
                "grid saves in a directory of its own");
      }
      if (range.begin > end) break;
      end = range.end;
    }
    if (end != places.part_count()) {
      throw Error(StatusCode::kInvalidArgument,
                  "no rank saved element " + std::to_string(end) + " of " + field + " of " +
                      shown_value(name) + ", part " + std::to_string(part) + " of " +
                      std::to_string(places.parts()) + "; give all ranks of the grid the same directory");
    }
  }
}

void PlaceList::check() const {
  for (const Parameter& parameter : parameters_) {
    for (std::size_t f = 0; f < std::size(kStateFields); ++f) {
      const bool is_needed =
          parameter.description.contains("factors") ? static_cast<int>(f) == kFieldOfFactors : f == 0;
      if (!is_needed && parameter.saved[f].empty()) continue;
      check(parameter.description.at("name").get<std::string>(), parameter.places, kStateFields[f],
            parameter.saved[f]);
    }
  }
}

Json PlaceList::json() const {
  Json list = Json::array();
  for (const Parameter& parameter : parameters_) {
    list.push_back(parameter.description);
    list.back()["pieces"] = parameter.pieces;
  }
  return list;
}

TensorIndex add_files(const StateDirectory& temporary, Json& manifest) {
  PlaceList places;
  TensorIndex tensors;
  manifest["files"] = Json::array();
  const int ranks = manifest.at("ranks").get<int>();
  for (int r = 0; r < ranks; ++r) {
    const std::string name = state_file_name(r, ranks);
    const StateFile file = temporary.open(name);
    const StateFileIndex index(file);
    manifest["files"].push_back({{"name", name},
                                 {"bytes", index.bytes},
                                 {"blocks", index.checksums.size()},
                                 {"index_checksum", index.checksum}});
    places.add(file, index, static_cast<std::size_t>(r));
    tensors.add(index, name);
  }
  places.check();
  manifest["parameters"] = places.json();
  return tensors;
}

}  // namespace

void TensorIndex::add(const StateFileIndex& index, const std::string& file) {
  for (const auto& [tensor, facts] : index.header.items()) {
    if (tensor != kMetadata && tensor != kChecksums) weight_map_[tensor] = file;
  }
  bytes_ += index.bytes - index.data_at - index.checksums.size() * sizeof(std::uint64_t);
}

std::string TensorIndex::text() const {
  return dump(Json{{"metadata", {{"total_size", bytes_}}}, {"weight_map", weight_map_}}, 2) + "\n";
}

namespace {

// Errors: throws kInvalidArgument if the state has other parameters than the one that it supersedes.
void check_same_parameters(const StateDirectory& directory, const std::string& superseded,
                           const Json& parameters) {
  std::map<std::string, std::uint64_t> there;
  try {
    const SavedState saved(directory.path(), superseded);
    for (const auto& [name, tensor] : saved.tensors()) {
      if (!tensor.is_factors) there.emplace(name, tensor.places.count());
    }
  } catch (const Error& error) {
    if (error.code() == StatusCode::kUnavailable) throw;  // Nothing is known of it.
    return;                                               // It cannot be loaded.
  }
  const auto refuse = [&](const std::string& name, const std::string& difference) {
    throw Error(StatusCode::kInvalidArgument,
                "cannot save in " + shown_path(directory.path()) + ": it holds the state " + superseded +
                    " of another model, which this save would replace: " + shown_value(name) + difference +
                    "; give each model a directory of its own, or remove the states there");
  };
  const auto elements = [](std::uint64_t count) { return std::to_string(count) + " elements"; };
  for (const Json& parameter : parameters) {
    if (parameter.contains("factors")) continue;
    const auto name = parameter.at("name").get<std::string>();
    const auto count = whole_number(parameter, "count");
    const auto found = there.find(name);
    if (found == there.end()) refuse(name, " has no value there and " + elements(count) + " here");
    if (found->second != count)
      refuse(name, " has " + elements(found->second) + " there and " + elements(count) + " here");
    there.erase(found);
  }
  if (!there.empty())
    refuse(there.begin()->first, " has " + elements(there.begin()->second) + " there and no value here");
}

// Refuses to write a file that no reader accepts.
void check_size(const char* name, std::uint64_t bytes, std::uint64_t most_bytes) {
  if (bytes <= most_bytes) return;
  throw Error(
      StatusCode::kInvalidArgument,
      "cannot save the state: its " + std::string(name) + " would have " + format_bytes(bytes) +
          ", and at most " + format_bytes(most_bytes) +
          " are read; keep large data of the trainer in a file of its own, and its name in the state");
}

}  // namespace

void publish_state(const StateDirectory& directory, const std::string& temporary_name, Json manifest,
                   int keep, std::uint64_t most_bytes) {
  const std::string name(state_of_temporary(temporary_name));
  std::string superseded;
  try {
    superseded = find_state(directory);
  } catch (const Error& error) {
    if (error.code() == StatusCode::kUnavailable) throw;
    // A damaged `latest` and no whole state supersede nothing.
  }
  const std::string target = superseded == name ? name + std::string(kAgain) : name;
  const StateDirectory temporary = directory.subdirectory(temporary_name);
  manifest["format"] = kFormat;
  const TensorIndex tensors = add_files(temporary, manifest);
  if (!superseded.empty()) check_same_parameters(directory, superseded, manifest.at("parameters"));
  const std::string text = dump(manifest, -1);
  const std::string index = tensors.text();
  const std::string envelope =
      dump(Json{{"checksum", checksum_of(text.data(), text.size())}, {"manifest", text}}, 1);
  check_size(TensorIndex::kName, index.size(), most_bytes);
  check_size(kManifest, envelope.size(), most_bytes);
  temporary.write_synced(TensorIndex::kName, index);
  temporary.write_synced(kManifest, envelope);
  temporary.sync();
  remove_state(directory, target);  // Nothing names it.
  if (directory.has(target)) {
    throw Error(StatusCode::kInvalidArgument,
                "cannot save in " + shown_path(directory.path()) + ": it has " + target +
                    ", which is no saved state and stays; move it, or give another directory");
  }
  directory.rename(temporary_name, target);
  directory.sync();
  directory.write_synced(kNextLatest, target + "\n");
  directory.rename(kNextLatest, kLatest);
  directory.sync();
  try {
    remove_all_but(directory, target, std::max(keep, 1));
  } catch (const std::exception& error) {
    // The new state has its name.
    log(LogLevel::kWarning, "old saved states stay: %s", error.what());
  }
}

}  // namespace forebay::internal
