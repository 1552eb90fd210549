// Saving and loading the training state of an engine. state_files.h has the form on disk.

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <optional>

#include "forebay/text.h"
#include "runtime/engine/engine_impl.h"
#include "runtime/engine/state/state_files.h"

namespace forebay {
namespace {

using Json = nlohmann::json;
using internal::kStateFields;
using internal::SavedState;
using internal::StateDirectory;

// The part of a section, elements [begin, end), that belongs to one of its parameters.
struct SectionPart {
  std::size_t parameter = 0;  // In the unit.
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t offset = 0;  // `begin`, counted from the start of the parameter.
};

std::vector<SectionPart> parts_of(const UnitLayout& layout, bool frozen, std::uint64_t begin,
                                  std::uint64_t end) {
  std::vector<SectionPart> parts;
  for (std::size_t i = 0; i < layout.places.size(); ++i) {
    const UnitLayout::Place& place = layout.places[i];
    if (place.frozen != frozen) continue;
    const std::uint64_t lower = std::max(begin, place.offset);
    const std::uint64_t upper = std::min(end, place.offset + place.count);
    if (lower < upper) parts.push_back({i, lower, upper, lower - place.offset});
  }
  return parts;
}

// Errors: throws kInvalidArgument if the saved state has other parameters than the model.
void check_same_model(const ModelShape& model, const SavedState& saved) {
  const auto refuse = [&](const std::string& difference) {
    throw Error(StatusCode::kInvalidArgument, "the saved state " + saved.path() + " is of another model: " +
                                                  difference + "; give the options of the run that saved it");
  };
  std::size_t known = 0;
  for (const UnitShape& unit : model.units) {
    for (const ParameterShape& parameter : unit.parameters) {
      ++known;
      const auto found = saved.parameters().find(parameter.name);
      const std::uint64_t count = found == saved.parameters().end() ? 0 : found->second;
      if (count != parameter.count) {
        refuse(parameter.name + " has " + std::to_string(count) + " elements there and " +
               std::to_string(parameter.count) + " here");
      }
    }
  }
  if (known != saved.parameters().size()) {
    refuse("it has " + std::to_string(saved.parameters().size()) + " parameters, this one " +
           std::to_string(known));
  }
}

}  // namespace

// Runs `work`. An operating error is returned, for the ranks to agree on; it is thrown if the engine has
// failed, because there is nobody left to agree with.
Status Engine::Impl::local_verdict(const std::function<void()>& work) const {
  try {
    work();
  } catch (const Error& error) {
    if (phase == Phase::kFailed) throw;
    return error.status();
  }
  return {};
}

void Engine::Impl::lock_state(const std::string& directory) {
  agree(local_verdict([&] {
    // Rank 0 of the communicator saves; of a grid, each part's rank 0 saves in a directory of its own.
    if (everyone().rank() == 0) state_locks.emplace_back(StateDirectory::make(directory));
  }));
}

void Engine::Impl::save_state(const std::string& directory, const std::string& trainer_state, int keep) {
  const std::string name = internal::state_name(attempted_steps);
  const std::string temporary = internal::temporary_state(name);
  std::optional<StateDirectory> files;
  std::optional<internal::StateLock> lock;
  agree(local_verdict([&] {
    if (rank() != 0) return;
    files.emplace(StateDirectory::make(directory));
    lock.emplace(*files);
    files->remove(temporary);
    files->make_subdirectory(temporary);
  }));
  try {
    internal::StateFileEnd end;
    agree(local_verdict([&] {
      if (!files) files.emplace(directory);
      end = write_rank_state(files->subdirectory(temporary));
    }));
    const std::uint64_t mine[2] = {end.bytes, end.index_checksum};
    std::vector<std::uint64_t> ends(2 * static_cast<std::size_t>(ranks()));
    must(communicator.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(ends))));
    agree(local_verdict([&] {
      if (rank() == 0) internal::publish_state(*files, name, state_manifest(ends, trainer_state), keep);
    }));
  } catch (const Error&) {
    // A save that failed on some rank leaves nothing half-written.
    if (rank() == 0) files->remove(temporary);
    throw;
  }
}

internal::StateFileEnd Engine::Impl::write_rank_state(const StateDirectory& directory) {
  internal::StateFileWriter file(directory.create(internal::state_file_name(rank(), ranks())));
  const auto write = [&](int unit_index, bool frozen, const char* field, std::span<const float> slice,
                         std::uint64_t begin) {
    for (const SectionPart& part : parts_of(layout(unit_index), frozen, begin, begin + slice.size())) {
      file.write(shape(unit_index).parameters[part.parameter].name, field, part.offset,
                 slice.subspan(part.begin - begin, part.end - part.begin));
    }
  };
  const auto part = static_cast<std::uint64_t>(part_number());
  std::vector<float> host;
  for (int unit_index = 0; unit_index < unit_count(); ++unit_index) {
    // At stage 0 every rank has the whole section, and with hybrid sharding every all-reduce group has it.
    // Each rank writes its part all the same.
    const std::uint64_t slice = layout(unit_index).trainable_slice(ranks());
    for (int f = 0; f < kStateFieldCount; ++f) {
      host.resize(slice);
      read_state(unit_index, static_cast<StateField>(f), part * slice - unit(unit_index).updated_begin, host);
      write(unit_index, false, kStateFields[f], host, part * slice);
    }
    const std::uint64_t frozen_slice = layout(unit_index).frozen_slice(ranks());
    if (frozen_slice == 0) continue;
    const std::vector<float> frozen = unit_frozen(unit_index);
    write(unit_index, true, kStateFields[0],
          std::span<const float>(frozen).subspan(part * frozen_slice, frozen_slice), part * frozen_slice);
  }
  return file.finish();
}

// `ends`: bytes and index checksum of each rank's file.
Json Engine::Impl::state_manifest(std::span<const std::uint64_t> ends,
                                  const std::string& trainer_state) const {
  Json files = Json::array();
  for (int r = 0; r < ranks(); ++r) {
    const std::size_t i = 2 * static_cast<std::size_t>(r);
    files.push_back({{"name", internal::state_file_name(r, ranks())},
                     {"bytes", ends[i]},
                     {"index_checksum", ends[i + 1]}});
  }
  Json parameters = Json::array();
  for (const UnitShape& unit : model.units) {
    for (const ParameterShape& parameter : unit.parameters)
      parameters.push_back({{"name", parameter.name}, {"shape", parameter.shape}});
  }
  return {{"format", 1},
          {"attempted_steps", attempted_steps},
          {"applied_steps", applied_steps},
          {"loss_scale", loss_scale},
          {"growth_counter", growth_counter},
          {"trainer_state", trainer_state},
          {"ranks", ranks()},
          {"stage", options.stage},
          {"dtype", data_type_name(options.dtype)},
          {"parameters", parameters},
          {"files", files}};
}

std::string Engine::Impl::load_state(const std::string& directory) {
  std::string trainer_state;
  // All ranks load the state that rank 0 finds.
  std::array<char, internal::kMostStateName> name{};
  agree(local_verdict([&] {
    if (rank() != 0) return;
    if (std::error_code error; !std::filesystem::exists(directory, error) && !error) {
      throw Error(StatusCode::kIoError, "there is no directory " + shown_path(directory) +
                                            " to load a state from; give the directory that a run saved to");
    }
    const std::string found = internal::find_state(StateDirectory(directory));
    if (found.empty()) {
      throw Error(StatusCode::kIoError,
                  "there is no saved state in " + shown_path(directory) +
                      " (no file named latest); give the directory that a run saved to");
    }
    found.copy(name.data(), name.size() - 1);
  }));
  name = exchange(communicator, name).front();
  agree(local_verdict([&] {
    try {
      SavedState saved(directory, name.data());
      check_same_model(model, saved);
      load_values(saved);
      const Json& manifest = saved.manifest();
      attempted_steps = internal::whole_number(manifest, "attempted_steps");
      applied_steps = internal::whole_number(manifest, "applied_steps");
      manifest.at("trainer_state").get_to(trainer_state);
      if (options.dtype == DataType::kFloat16 && manifest.at("dtype").get<std::string>() == "fp16") {
        manifest.at("loss_scale").get_to(loss_scale);
        growth_counter = static_cast<int>(internal::whole_number(manifest, "growth_counter"));
      }
    } catch (const Json::exception& error) {
      throw Error(StatusCode::kCorruption,
                  "the saved state in " + shown_path(directory) + " is damaged: " + error.what());
    }
  }));
  publish_parameters();
  return trainer_state;
}

void Engine::Impl::load_values(SavedState& saved) {
  std::vector<float> host;
  for (int unit_index = 0; unit_index < unit_count(); ++unit_index) {
    const std::vector<ParameterShape>& parameters = shape(unit_index).parameters;
    const std::uint64_t begin = unit(unit_index).updated_begin;
    const std::uint64_t count = unit(unit_index).updated_count;
    for (int f = 0; f < kStateFieldCount; ++f) {
      host.assign(count, 0.0f);
      for (const SectionPart& part : parts_of(layout(unit_index), false, begin, begin + count)) {
        saved.read(parameters[part.parameter].name, kStateFields[f], part.offset,
                   std::span(host).subspan(part.begin - begin, part.end - part.begin));
      }
      write_state(unit_index, static_cast<StateField>(f), 0, host);
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].frozen) continue;
      host.assign(parameters[i].count, 0.0f);
      saved.read(parameters[i].name, kStateFields[0], 0, host);
      set_parameter({unit_index, static_cast<int>(i)}, 0, host);
    }
  }
}

}  // namespace forebay
