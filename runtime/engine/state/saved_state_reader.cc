#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

#include "forebay/error.h"
#include "forebay/saved_state.h"
#include "forebay/text.h"
#include "runtime/engine/plan/step_control.h"
#include "runtime/engine/state/saved_state.h"

namespace forebay {
namespace {

using Json = nlohmann::json;
using internal::SavedState;
using internal::StateDirectory;
using internal::whole_number;

constexpr std::uint64_t kMostRanks = 1'000'000;

const char* field_name(SavedField field) {
  return internal::kStateFields[static_cast<std::size_t>(field)];
}

// "step-40/part-0, step-40/part-1": directories two levels below that hold a saved state.
std::string states_below(const std::string& directory) {
  namespace fs = std::filesystem;
  std::vector<std::string> states;
  std::error_code error;
  for (const auto& outer : fs::directory_iterator(directory, error)) {
    for (const auto& inner : fs::directory_iterator(outer.path(), error)) {
      if (fs::exists(inner.path() / "latest", error))
        states.push_back(outer.path().filename().string() + "/" + inner.path().filename().string());
    }
  }
  std::sort(states.begin(), states.end());
  constexpr std::size_t kMostShown = 4;
  std::string text;
  for (std::size_t i = 0; i < std::min(states.size(), kMostShown); ++i)
    text += (text.empty() ? "" : ", ") + states[i];
  return text + (states.size() > kMostShown ? ", ..." : "");
}

StateDirectory opened(const std::string& directory) {
  std::error_code error;
  if (!std::filesystem::exists(directory, error) && !error) {
    throw Error(StatusCode::kIoError, "there is no directory " + shown_path(directory) +
                                          "; give the directory that a run saved its state in");
  }
  return StateDirectory(directory);
}

std::string name_to_open(const std::string& directory, const std::string& wanted) {
  const StateDirectory files = opened(directory);
  if (!wanted.empty()) {
    const std::vector<std::string> names = saved_state_names(directory);
    if (std::find(names.begin(), names.end(), wanted) != names.end()) return wanted;
    throw Error(StatusCode::kIoError, shown_path(directory) + " has no state " + shown_value(wanted) +
                                          "; it has " +
                                          (names.empty() ? "none" : names.back() + " to " + names.front()));
  }
  std::string found = internal::find_state(files);
  if (!found.empty()) return found;
  const std::string below = states_below(directory);
  throw Error(StatusCode::kIoError,
              "there is no saved state in " + shown_path(directory) + " (no file named latest)" +
                  (below.empty() ? "; give the directory that a run saved its state in"
                                 : ", but in its directories " + shown_path(below) + "; give one of these"));
}

}  // namespace

std::vector<std::string> saved_state_names(const std::string& directory) {
  return internal::state_names(opened(directory));
}

struct SavedStateReader::Impl {
  Impl(const std::string& directory, const std::string& name) : state(directory, name) {
    const Json& manifest = state.manifest();
    facts.path = state.path();
    try {
      facts.attempted_steps = whole_number(manifest, "attempted_steps");
      facts.applied_steps = whole_number(manifest, "applied_steps");
      manifest.at("loss_scale").get_to(facts.loss_scale);
      facts.ranks = small_number(manifest, "ranks");
      facts.stage = small_number(manifest, "stage");
      manifest.at("dtype").get_to(facts.dtype);
      facts.optimizer = manifest.value("optimizer", facts.optimizer);
      facts.weights_only = manifest.value("weights_only", false);
      manifest.at("trainer_state").get_to(facts.trainer_state);
      for (const Json& file : manifest.at("files"))
        facts.files.push_back({file.at("name").get<std::string>(), whole_number(file, "bytes")});
      if (whole_number(manifest, "format") > 1) {
        for (const std::string& parameter : state.names()) {
          const SavedState::Tensor& tensor = state.tensors().at(parameter);
          if (!tensor.is_factors) add_shape(add(parameter), tensor.shape);
        }
      } else if (manifest.contains("parameters")) {
        for (const Json& entry : manifest.at("parameters")) read_parameter(entry);
      } else {
        for (const std::string& parameter : state.names()) add(parameter);
      }
    } catch (const Json::exception&) {
      corrupt(
          "its manifest has no steps, loss scale, ranks, stage, dtype or trainer state, or one is of another "
          "kind");
    }
    const auto others =
        static_cast<std::size_t>(std::count_if(state.tensors().begin(), state.tensors().end(),
                                               [](const auto& tensor) { return tensor.second.is_factors; }));
    if (facts.parameters.size() + others != state.tensors().size())
      corrupt("its manifest lists " + std::to_string(facts.parameters.size()) +
              " parameters, and its files have " + std::to_string(state.tensors().size()));
  }

  int small_number(const Json& object, const char* name) const {
    const std::uint64_t number = whole_number(object, name);
    if (number > kMostRanks) corrupt(std::string(name) + " is " + std::to_string(number));
    return static_cast<int>(number);
  }

  [[noreturn]] void corrupt(const std::string& finding) const {
    throw Error(StatusCode::kCorruption, "saved state " + shown_path(facts.path) + " is damaged: " + finding +
                                             "; use another saved state");
  }

  SavedParameter& add(const std::string& name) {
    const std::uint64_t count = state.tensors().at(name).places.count();
    const bool has_m = state.has(name, field_name(SavedField::kM));
    const bool has_factors = state.tensors().contains(name + kFactorsName);
    return facts.parameters.emplace_back(
        SavedParameter{.name = name,
                       .count = count,
                       .shape = {count},
                       .frozen = !has_m && !has_factors && !facts.weights_only,
                       .has_m = has_m,
                       .has_v = state.has(name, field_name(SavedField::kV)),
                       .has_average = state.has(name, field_name(SavedField::kAverage))});
  }

  void read_parameter(const Json& entry) {
    const auto name = entry.at("name").get<std::string>();
    if (!state.tensors().contains(name)) corrupt("no file has its parameter " + shown_value(name));
    std::vector<std::uint64_t> shape;
    for (const Json& extent : entry.at("shape"))
      shape.push_back(extent.get_ref<const Json::number_unsigned_t&>());
    add_shape(add(name), shape);
  }

  void add_shape(SavedParameter& parameter, const std::vector<std::uint64_t>& shape) const {
    if (shape.empty() && parameter.count != 1) return;  // Otherwise a scalar.
    std::uint64_t count = 1;
    for (const std::uint64_t extent : shape) {
      if (__builtin_mul_overflow(count, extent, &count)) count = std::numeric_limits<std::uint64_t>::max();
    }
    if (count != parameter.count)
      corrupt("the shape of " + shown_value(parameter.name) + " is not that of its elements");
    parameter.shape = shape;
    parameter.has_shape = true;
  }

  SavedState state;
  SavedStateFacts facts;
};

SavedStateReader::SavedStateReader(const std::string& directory, const std::string& name) {
  constexpr int kMostTries = 10;
  for (int tries = 1; !impl_; ++tries) {
    const std::string found = name_to_open(directory, name);
    // A job that saves there may have removed this state after it made a newer one.
    const auto tries_again = [&] {
      return name.empty() && tries < kMostTries && name_to_open(directory, name) != found;
    };
    try {
      impl_ = std::make_unique<Impl>(directory, found);
    } catch (const Error& error) {
      if (error.code() != StatusCode::kIoError || !tries_again()) throw;
    }
    if (impl_ && !impl_->state.hold_files() && tries_again()) impl_.reset();
  }
}

SavedStateReader::~SavedStateReader() = default;
SavedStateReader::SavedStateReader(SavedStateReader&&) noexcept = default;
SavedStateReader& SavedStateReader::operator=(SavedStateReader&&) noexcept = default;

const SavedStateFacts& SavedStateReader::facts() const {
  return impl_->facts;
}

void SavedStateReader::read(const SavedParameter& parameter, SavedField field,
                            const std::function<void(Span<const float>)>& visit) {
  impl_->state.visit(parameter.name, field_name(field), kPieceCount, [&](std::span<const float> piece) {
    visit(Span<const float>(piece.data(), piece.size()));
  });
}

void SavedStateReader::verify(const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  impl_->state.check_files();
  impl_->state.check_tensor_index();
  std::uint64_t all = 0;
  for (const SavedParameter& parameter : impl_->facts.parameters) all += parameter.bytes();
  std::uint64_t done = 0;
  const auto count = [&](std::uint64_t elements) {
    done += elements * sizeof(float);
    progress(done, all);
  };
  for (const auto& [name, tensor] : impl_->state.tensors()) {
    if (tensor.is_factors) all += tensor.places.count() * sizeof(float);
  }
  for (const auto& [name, tensor] : impl_->state.tensors()) {
    if (!tensor.is_factors) continue;
    impl_->state.visit(name, field_name(SavedField::kV), kPieceCount,
                       [&](std::span<const float> piece) { count(piece.size()); });
  }
  for (const SavedParameter& parameter : impl_->facts.parameters) {
    for (const SavedField field :
         {SavedField::kMaster, SavedField::kM, SavedField::kV, SavedField::kAverage}) {
      if (!parameter.has_m && field == SavedField::kM) continue;
      if (!parameter.has_v && field == SavedField::kV) continue;
      if (!parameter.has_average && field == SavedField::kAverage) continue;
      read(parameter, field, [&](Span<const float> piece) { count(piece.size()); });
    }
  }
}

}  // namespace forebay
