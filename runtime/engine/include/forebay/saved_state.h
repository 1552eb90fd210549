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
  kM,       // The optimizer's first and second moments; SGD and Lion have no v.
  kV,
  kAverage,  // The moving average of the weights (ShardingOptions::ema).
};

struct SavedParameter {
  std::string name;
  std::uint64_t count = 0;           // Elements.
  std::vector<std::uint64_t> shape;  // {count} if it was not declared (Engine::declare_shape).
  bool has_shape = false;            // It was declared.
  bool frozen = false;               // It has no m and v.
  bool has_v = false;
  bool has_average = false;

  // In fp32, with m, v and the average.
  std::uint64_t bytes() const {
    return count * 4 * (frozen ? 1 : 2 + (has_v ? 1 : 0) + (has_average ? 1 : 0));
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
  int ranks = 1;  // Ranks that saved. A model in parts has a state for each part.
  int stage = 0;
  std::string dtype;
  std::string optimizer = "adamw";
  std::string trainer_state;  // As given to Engine::save_state().
  std::vector<SavedFile> files;
  std::vector<SavedParameter> parameters;  // In order of registration; by name in states of older versions.
};

// The states in `directory` by name, newest first, whole or not. The one that Engine::load_state() would
// load is not always the first: a step that was saved again has two names for a moment.
std::vector<std::string> saved_state_names(const std::string& directory);

class SavedStateReader {
 public:
  // Opens the state that Engine::load_state() would load; with `name`, that one of saved_state_names().
  // Errors: also kIoError for a directory with the parts of a model, naming them.
  explicit SavedStateReader(const std::string& directory, const std::string& name = "");
  ~SavedStateReader();
  SavedStateReader(SavedStateReader&&) noexcept;
  SavedStateReader& operator=(SavedStateReader&&) noexcept;

  const SavedStateFacts& facts() const;

  // Passes all values of a field to `visit`, in order, at most kPieceCount at once.
  // Errors: kCorruption after the last piece of a run with a wrong checksum.
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
