// Saved training state on disk: the names and files of a state. saved_state.h reads it, training_state.cc
// has the engine's values.
//
//   DIR/step-000000000042/manifest.json                  steps, loss scale, trainer state, files, and the
//                                                        place of every element; checksummed
//   DIR/step-000000000042/rank-0-of-4.safetensors        the values that rank 0 of 4 saved
//   DIR/step-000000000042/state.safetensors.index.json   the file of each tensor, for other tools
//   DIR/latest                                           the name of the newest complete state
//
// A rank's file is a safetensors file of fp32 tensors: NAME/master, NAME/m and NAME/v of each parameter. The
// tensors begin at a page of 4096 bytes, so copies in memory can go past the page cache as they are.
// Where a file has a part of a tensor alone, its name goes on: "/part-0-of-2" is the part of a
// tensor-parallel rank,
// "/100-200" are elements 100 to 199 of that in one dimension. The last tensor has the checksums: XXH3-64 of
// each piece of kBlockCount elements, tensor by tensor.
//
// So the elements of a parameter can be found at any number of ranks, any stage and any grid. A state is
// written under a temporary name, synced, and then renamed; `latest` is replaced last, by a rename. A kill at
// any moment leaves the state that `latest` names whole. A state that is removed gets a name that begins with
// ".removing-" first, so no state has its name and a part of its files. A step that is saved again goes to
// step-000000000042-2, or back. One process saves at a time (StateLock). Where `latest` is damaged, the
// newest whole state is loaded.
//
// Format 1, which is read and no longer written, has files "rank-0-of-4": magic, fp32 data, index (JSON),
// length and checksum of the index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/tensor_split.h"
#include "runtime/engine/state/state_directory.h"

namespace forebay::internal {

inline constexpr const char* kStateFields[] = {"master", "m", "v", "average"};
// Adafactor: the factors of a parameter are field v of NAME and kFactorsName.
inline constexpr int kFieldOfFactors = 2;
inline constexpr const char* kManifest = "manifest.json";

inline constexpr std::size_t kMostStateName = 32;  // With the null character.

std::string state_name(std::uint64_t step);
std::string state_file_name(int rank, int ranks);
// Whether a file of this name in the directory of a state is one that a save wrote.
bool is_state_file(std::string_view name);

// A number that no other save has.
std::uint64_t new_save_number();
// The directory that the state of this name is written in until it is complete. A rank of an earlier job that
// was held up, as by a network file system, knows another number, so it cannot write into it.
std::string temporary_state(const std::string& name, std::uint64_t save);
// Removes what killed runs began to write or to remove. Requires: the StateLock.
void remove_unfinished(const StateDirectory& directory);
// The states in a directory by name, newest first, whole or not.
std::vector<std::string> state_names(const StateDirectory& directory);
// The name of the state that `latest` names or, where it names none, of the newest whole state. Empty when
// there is none. Errors: throws kCorruption if `latest` is damaged and there is no whole state.
std::string find_state(const StateDirectory& directory);
// Errors: throws kInvalidArgument if another tool wrote `latest`, which a save would replace.
void check_latest(const StateDirectory& directory);

// The newest whole state of this attempted step; empty when there is none.
std::string find_state_of(const StateDirectory& directory, std::uint64_t step);

// A whole number of a JSON object, from 0 on. Errors: throws Json::exception for any other value.
std::uint64_t whole_number(const nlohmann::json& object, const char* name);

// Elements of one checksum. Smaller: more checksums. Larger: a rank reads more around the elements that it
// needs.
inline constexpr std::uint64_t kBlockCount = std::uint64_t{1} << 18;

// The largest manifest or index that is read.
inline constexpr std::uint64_t kMostIndexBytes = std::uint64_t{1} << 30;

// A parameter as saved state describes it.
struct StateParameter {
  std::string name;
  std::uint64_t count = 0;           // Elements of the rank's part.
  std::vector<std::uint64_t> shape;  // Dimensions of the rank's part; empty: not declared.
  bool frozen = false;
  std::optional<TensorSplit> split;
  bool factors = false;  // Not a parameter: Adafactor's factors of one, with a field v alone.
};

// A run of one field of one parameter.
struct StateRun {
  std::size_t parameter = 0;  // In the writer's list.
  int field = 0;
  std::uint64_t offset = 0;  // Elements from the start of the parameter.
  std::uint64_t count = 0;
};

// Writes the file of one rank from its first byte to its last. Errors: throws kIoError; kInvalidArgument if a
// parameter's name is not UTF-8.
class StateFileWriter {
 public:
  StateFileWriter(StateFile file, std::span<const StateParameter> parameters, std::vector<StateRun> runs);

  // The next values of the runs, in order; any number at once.
  void write(std::span<const float> values);
  // The same for values that `fill` writes, elements [first, first + count) of `count` to `target`.
  using Fill = std::function<void(std::byte* target, std::uint64_t first, std::uint64_t count)>;
  void write(std::uint64_t count, const Fill& fill);
  // The next run, whose values stay until finish(), with a checksum of each kBlockCount of them. They go to
  // the file without a copy where they lie in a page of memory as in a page of the file.
  void write_run(const std::byte* values, const std::uint64_t* checksums);
  // Writes the checksums and syncs the file. Requires: all runs are written.
  void finish();

 private:
  std::byte* room_in_buffer(std::uint64_t bytes);
  void append(const void* data, std::uint64_t bytes);
  void append_kept(const std::byte* data, std::uint64_t bytes);
  void write_pages();

  StateFile file_;
  std::unique_ptr<std::byte, void (*)(void*)> buffer_;
  // The bytes that go to the file next, in the buffer or where the caller keeps them.
  const std::byte* pending_;
  std::uint64_t pending_bytes_ = 0;
  std::vector<StateRun> runs_;
  std::size_t next_ = 0;     // The run that is being written.
  std::uint64_t done_ = 0;   // Elements of it.
  std::uint64_t block_ = 0;  // Elements of the next checksum that are in the buffer.
  std::vector<std::uint64_t> checksums_;
};

// The header and the checksums of a rank's file. Errors: throws kIoError, kCorruption.
struct StateFileIndex {
  explicit StateFileIndex(const StateFile& file);

  nlohmann::json header;
  std::uint64_t bytes = 0;    // The file's size.
  std::uint64_t data_at = 0;  // Bytes from the start of the file.
  std::vector<std::uint64_t> checksums;
  std::uint64_t checksum = 0;  // XXH3-64 of the header and the checksums.
};

// The index for other tools: the file of each tensor, as Hugging Face writes it.
class TensorIndex {
 public:
  static constexpr const char* kName = "state.safetensors.index.json";

  void add(const StateFileIndex& index, const std::string& file);
  std::string text() const;

 private:
  nlohmann::json weight_map_ = nlohmann::json::object();
  std::uint64_t bytes_ = 0;
};

// Errors: throws kInvalidArgument if a manifest that has this text is not UTF-8.
void check_text(const std::string& trainer_state);

// Adds to the manifest the files of the temporary state and the places of all elements in them, writes it,
// gives the state its name, and lets `latest` name it; then removes the state before it; with `keep` above 1,
// the earlier states but for the newest `keep` - 1. Requires: the manifest has "ranks".
// Errors: throws kIoError, kCorruption; kInvalidArgument if the manifest is not UTF-8 or has more than
// `most_bytes`, if two ranks saved the same elements or no rank did. Then the states before it stay.
void publish_state(const StateDirectory& directory, const std::string& temporary, nlohmann::json manifest,
                   int keep = 1, std::uint64_t most_bytes = kMostIndexBytes);

}  // namespace forebay::internal
