// Saved training state on disk. The engine's values are read and written by training_state.cc.
//
//   DIR/step-000000000042/manifest.json    steps, loss scale, trainer state, the list of files; checksummed
//   DIR/step-000000000042/rank-0-of-4      magic, fp32 data, index (JSON), length and checksum of the index
//   DIR/latest                             the name of the newest complete state
//
// Each rank writes its part of master, m and v as runs of a parameter, by name and offset. So a run can be
// found at any number of ranks and any stage. A state is written under a temporary name, synced, and then
// renamed; `latest` is replaced last, by a rename. A kill at any moment leaves the state that `latest` names
// whole. A step that is saved again goes to step-000000000042-2, or back. One process saves at a time
// (StateLock). Where `latest` is damaged, the newest whole state is loaded.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/engine/state/state_directory.h"

namespace forebay::internal {

inline constexpr const char* kStateFields[] = {"master", "m", "v", "average"};

inline constexpr std::size_t kMostStateName = 32;  // With the null character.

std::string state_name(std::uint64_t step);
std::string state_file_name(int rank, int ranks);

// The directory that a state is written in until it is complete.
std::string temporary_state(const std::string& name);
// The states in a directory by name, newest first, whole or not.
std::vector<std::string> state_names(const StateDirectory& directory);
// The name of the state that `latest` names or, where it names none, of the newest whole state. Empty when
// there is none. Errors: throws kCorruption if `latest` is damaged and there is no whole state.
std::string find_state(const StateDirectory& directory);

// The newest whole state of this attempted step; empty when there is none.
std::string find_state_of(const StateDirectory& directory, std::uint64_t step);

// A whole number of a JSON object, from 0 on. Errors: throws Json::exception for any other value.
std::uint64_t whole_number(const nlohmann::json& object, const char* name);

// A run of one field of one parameter.
struct StateRun {
  std::string parameter;
  std::string field;
  std::uint64_t offset = 0;  // Elements from the start of the parameter.
  std::uint64_t count = 0;
  std::uint64_t at = 0;  // Bytes from the start of the file.
  std::uint64_t checksum = 0;
};

// The end of a written file, for the manifest.
struct StateFileEnd {
  std::uint64_t bytes = 0;
  std::uint64_t index_checksum = 0;
};

// Writes the file of one rank. Errors: throws kIoError; kInvalidArgument if a parameter's name is not UTF-8.
class StateFileWriter {
 public:
  explicit StateFileWriter(StateFile file);

  void write(const std::string& parameter, const char* field, std::uint64_t offset,
             std::span<const float> values);
  // Writes the index and syncs the file.
  StateFileEnd finish();

 private:
  StateFile file_;
  nlohmann::json index_ = nlohmann::json::array();
  std::uint64_t at_ = 0;
};

// The end of a whole file. Errors: throws kCorruption if it is too short.
StateFileEnd read_state_file_end(const StateFile& file);

// The list of files in a manifest, from the ends of the files of all ranks.
nlohmann::json file_list(std::span<const StateFileEnd> ends);

// Errors: throws kInvalidArgument if a manifest that has this text is not UTF-8.
void check_text(const std::string& trainer_state);

// Writes the manifest into the temporary state, gives the state its name, and lets `latest` name it; then
// removes the state before it; with `keep` above 1, the earlier states but for the newest `keep` - 1. Errors:
// throws kIoError; kInvalidArgument if the manifest is not UTF-8.
void publish_state(const StateDirectory& directory, const std::string& name, const nlohmann::json& manifest,
                   int keep = 1);

// A state of a directory, opened and checked but for the values, which are checked when they are
// read. Errors: every function throws: kIoError if there is no state or it cannot be read, kCorruption if it
// is damaged, kUnsupported for another format.
class SavedState {
 public:
  SavedState(const std::string& directory, const std::string& name);

  const std::string& path() const { return files_.path(); }
  const nlohmann::json& manifest() const { return manifest_; }
  // Elements by parameter.
  const std::map<std::string, std::uint64_t>& parameters() const { return counts_; }
  bool has(const std::string& parameter, const std::string& field) const;
  // Passes all elements of a field to `visit` in order, at most `piece_count` at once. Returns their number.
  std::uint64_t visit(const std::string& parameter, const std::string& field, std::uint64_t piece_count,
                      const std::function<void(std::span<const float>)>& visit) const;
  // Reads elements [begin, begin + target.size()) of a parameter.
  void read(const std::string& parameter, const std::string& field, std::uint64_t begin,
            std::span<float> target);

 private:
  struct Source {
    std::string file;
    StateRun run;
  };
  void read_manifest();
  void read_index(const std::string& name, std::uint64_t expected_bytes, std::uint64_t expected_checksum);
  void enter(const std::string& file, StateRun run);
  std::span<const float> values_of(const Source& source);
  void visit_run(const Source& source, std::uint64_t piece_count,
                 const std::function<void(std::span<const float>)>& visit) const;

  StateDirectory files_;
  nlohmann::json manifest_;
  std::map<std::pair<std::string, std::string>, std::vector<Source>> sources_;  // By parameter and field.
  std::map<std::string, std::uint64_t> counts_;
  // The run that was read last: neighbours ask for parts of the same run.
  const Source* last_ = nullptr;
  std::vector<float> values_;
};

}  // namespace forebay::internal
