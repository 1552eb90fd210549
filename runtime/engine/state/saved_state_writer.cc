#include <optional>
#include <utility>

#include "forebay/error.h"
#include "forebay/saved_state.h"
#include "runtime/engine/state/state_files.h"

namespace forebay {

using internal::StateDirectory;

namespace {

StateDirectory directory_for_writer(const std::string& path) {
  StateDirectory directory = StateDirectory::make(path);
  internal::check_latest(directory);
  return directory;
}

}  // namespace

struct SavedStateWriter::Impl {
  Impl(const std::string& path, const SavedStateFacts& given)
      : facts(given),
        directory(directory_for_writer(path)),
        lock(directory),
        temporary(internal::temporary_state(internal::state_name(facts.attempted_steps),
                                            internal::new_save_number())) {
    internal::check_text(facts.trainer_state);
    internal::remove_unfinished(directory);
    directory.make_subdirectory(temporary);
    std::vector<internal::StateParameter> parameters;
    std::vector<internal::StateRun> runs;
    for (const SavedParameter& parameter : facts.parameters) {
      const std::size_t index = parameters.size();
      parameters.push_back({.name = parameter.name,
                            .count = parameter.count,
                            .shape = parameter.has_shape ? parameter.shape : std::vector<std::uint64_t>(),
                            .frozen = parameter.frozen});
      const bool fields[] = {true, parameter.has_m, parameter.has_v};
      for (int field = 0; field < 3; ++field) {
        if (fields[field])
          runs.push_back({.parameter = index, .field = field, .offset = 0, .count = parameter.count});
      }
    }
    file.emplace(directory.subdirectory(temporary).create(internal::state_file_name(0, 1)), parameters,
                 std::move(runs));
  }
  ~Impl() {
    if (!finished) directory.remove(temporary);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  const SavedStateFacts facts;
  const StateDirectory directory;
  const internal::StateLock lock;
  const std::string temporary;
  std::optional<internal::StateFileWriter> file;
  bool finished = false;
};

SavedStateWriter::SavedStateWriter(const std::string& directory, const SavedStateFacts& facts) {
  static_cast<void>(internal::state_name(facts.attempted_steps));  // Before a directory is made.
  impl_ = std::make_unique<Impl>(directory, facts);
}

SavedStateWriter::~SavedStateWriter() = default;

void SavedStateWriter::write(Span<const float> values) {
  impl_->file->write({values.data(), values.size()});
}

void SavedStateWriter::finish() {
  impl_->file->finish();
  nlohmann::json manifest = {{"attempted_steps", impl_->facts.attempted_steps},
                             {"applied_steps", impl_->facts.applied_steps},
                             {"loss_scale", impl_->facts.loss_scale},
                             {"growth_counter", 0},
                             {"trainer_state", impl_->facts.trainer_state},
                             {"ranks", 1},
                             {"stage", 0},
                             {"dtype", "fp32"},
                             {"optimizer", impl_->facts.optimizer},
                             {"weights_only", impl_->facts.weights_only}};
  internal::publish_state(impl_->directory, impl_->temporary, std::move(manifest));
  impl_->finished = true;
}

}  // namespace forebay
