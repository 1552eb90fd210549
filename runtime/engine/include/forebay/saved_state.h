// SavedStateReader: reads training state that Engine::save_state() wrote, without an engine or a device. It
// shows the contents of a state, verifies them, and passes values on in pieces of bounded size.
//
//   SavedStateReader state("run/state");
//   for (const SavedParameter& p : state.facts().parameters)
//     state.read(p, SavedField::kMaster, [](Span<const float> piece) { ... });
//
// Errors: every function throws Error: kIoError where nothing is saved or a file cannot be read, kCorruption
// where a state is damaged, kUnsupported for another format.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "forebay/span.h"

namespace forebay {

enum class SavedField : std::uint8_t {
  kMaster,  // The fp32 weights, and the values of frozen parameters.
  kM,       // The optimizer's first and second moments; SGD and Lion have no v, nor have matrices
            // of Muon; Adafactor has neither.
  kV,
  kAverage,  // The moving average of the weights (ShardingOptions::ema).
};

struct SavedParameter {
  std::string name;
  std::uint64_t count = 0;           // Elements.
  std::vector<std::uint64_t> shape;  // {count} if it was not declared (Engine::declare_shape).
  bool has_shape = false;            // It was declared, or there is one element: {} then.
  bool frozen = false;               // When it was saved.
  bool has_m = false;                // Not where it is frozen, and not in states with weights alone.
  bool has_v = false;
  bool has_average = false;

  // In fp32, with m, v and the average.
  std::uint64_t bytes() const {
    return count * 4 * (1u + (has_m ? 1 : 0) + (has_v ? 1 : 0) + (has_average ? 1 : 0));
  }
};

struct SavedFile {
  std::string name;
  std::uint64_t bytes = 0;
};

struct SavedStateFacts {
  std::string path;  // The directory of this state: "run/state/step-000000000042".
  std::uint64_t attempted_steps = 0;
  std::uint64_t applied_steps = 0;
  double loss_scale = 1.0;
  int ranks = 1;  // Ranks that saved.
  int stage = 0;
  std::string dtype;
  std::string optimizer = "adamw";
  bool weights_only = false;  // An engine with any optimizer loads it; its moments begin at zero.
  std::string trainer_state;  // As given to Engine::save_state().
  std::vector<SavedFile> files;
  // The parameters of the whole model, in order of registration; by name in states of older versions.
  std::vector<SavedParameter> parameters;
};

// Writes a state without an engine. Any engine with these parameters loads it, at any number of ranks, ZeRO
// stage and grid.
//
// Cost: memory for the pieces that it is given.
class SavedStateWriter {
 public:
  // Begins a state in `directory`, which is made. Takes attempted_steps, applied_steps, weights_only,
  // optimizer, trainer_state and parameters from `facts`.
  // Errors: kIoError; kUnavailable if a job saves there; kInvalidArgument for a step of 13 digits, and where
  //         another tool wrote the file `latest` there.
  SavedStateWriter(const std::string& directory, const SavedStateFacts& facts);
  // Without finish() nothing is left in the directory.
  ~SavedStateWriter();
  SavedStateWriter(const SavedStateWriter&) = delete;
  SavedStateWriter& operator=(const SavedStateWriter&) = delete;

  // The next values, parameter by parameter: the masters, then m and v where it has them.
  void write(Span<const float> values);
  // Gives the state its name, and removes the one that it supersedes. Requires: all values are written.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The states in `directory` by name, newest first, whole or not. The one that Engine::load_state() would
// load is not always the first: a step that was saved again has two names for a moment.
std::vector<std::string> saved_state_names(const std::string& directory);

class SavedStateReader {
 public:
  // Opens the state that Engine::load_state() would load; with `name`, that one of saved_state_names().
  // Errors: also kIoError for a directory with the parts of a model, as older versions wrote it, naming them.
  explicit SavedStateReader(const std::string& directory, const std::string& name = "");
  ~SavedStateReader();
  SavedStateReader(SavedStateReader&&) noexcept;
  SavedStateReader& operator=(SavedStateReader&&) noexcept;

  const SavedStateFacts& facts() const;

  // Passes all values of a field to `visit`, in order, at most kPieceCount at once.
  // Errors: kCorruption before a piece with a wrong checksum.
  static constexpr std::uint64_t kPieceCount = 1u << 20;
  void read(const SavedParameter& parameter, SavedField field,
            const std::function<void(Span<const float>)>& visit);

  // Reads everything, and checks that each field of each parameter is whole and has its checksums.
  // `progress` gets the bytes so far and in all.
  void verify(const std::function<void(std::uint64_t done, std::uint64_t all)>& progress);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay
