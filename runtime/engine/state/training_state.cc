// Saving and loading the training state of an engine. state_files.h has the form on disk.

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <optional>

#include "forebay/host_adam.h"
#include "forebay/text.h"
#include "runtime/engine/engine_impl.h"
#include "runtime/engine/state/background_save.h"
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

// The manifests of AdamW's states name no optimizer.
void check_same_optimizer(Optimizer optimizer, const SavedState& saved) {
  const Json& manifest = saved.manifest();
  const std::string name = manifest.value("optimizer", optimizer_name(Optimizer::kAdamW));
  if (name == optimizer_name(optimizer)) return;
  throw Error(StatusCode::kInvalidArgument,
              "the saved state " + saved.path() + " is of the optimizer " + shown_value(name) +
                  ", and this run has " + optimizer_name(optimizer) +
                  ", whose moments mean something else; give the same optimizer, or "
                  "start from the weights alone (forebay state export)");
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
  end_save();
  const std::string name = internal::state_name(attempted_steps);
  const std::string temporary = internal::temporary_state(name);
  std::optional<StateDirectory> files;
  std::optional<internal::StateLock> lock;
  agree(local_verdict([&] {
    if (rank() != 0) return;
    files.emplace(StateDirectory::make(directory));
    lock.emplace(*files, true);
    files->remove(temporary);
    files->make_subdirectory(temporary);
  }));
  try {
    internal::StateFileEnd end;
    agree(local_verdict([&] {
      if (!files) files.emplace(directory);
      end = write_values(
          files->subdirectory(temporary).create(internal::state_file_name(rank(), ranks())),
          [&](const SavedPart& part, std::vector<float>& memory) { return read_part(part, memory); });
    }));
    const std::vector<internal::StateFileEnd> ends = exchange(communicator, end);
    agree(local_verdict([&] {
      if (rank() != 0) return;
      Json manifest = state_manifest(trainer_state);
      manifest["files"] = internal::file_list(ends);
      internal::publish_state(*files, name, manifest, keep);
    }));
  } catch (const Error&) {
    // A save that failed on some rank leaves nothing half-written.
    if (rank() == 0) files->remove(temporary);
    throw;
  }
}

void Engine::Impl::begin_save(const std::string& directory, const std::string& trainer_state, int keep) {
  if (!options.save_async) {
    misuse(
        "save_state_begin() of an engine that has no memory for a copy; set EngineOptions::save_async before "
        "commit(), or call save_state()");
  }
  end_save();
  internal::BackgroundSaveJob job;
  job.directory = directory;
  job.name = internal::state_name(attempted_steps);
  job.rank = rank();
  job.ranks = ranks();
  job.keep = keep;
  agree(local_verdict([&] {
    internal::check_text(trainer_state);
    if (rank() != 0) return;
    const StateDirectory files = StateDirectory::make(directory);
    job.lock = std::make_unique<internal::StateLock>(files, true);
    files.remove(internal::temporary_state(job.name));
    files.make_subdirectory(internal::temporary_state(job.name));
  }));
  if (rank() == 0) job.manifest = state_manifest(trainer_state);
  if (saved_copies.empty()) describe_copies();
  updater->copy(saved_copies);
  job.copied = [this] { return updater->wait_for_copies(); };
  job.write = [this](internal::StateFile file) {
    std::size_t next = 0;
    return write_values(std::move(file), [&](const SavedPart& part, std::vector<float>& memory) {
      const std::byte* const copied = saved_targets[next++];
      const MomentFormat format = format_of(part.field);
      if (part.frozen) {
        memory = widen(options.dtype, {copied, part.count * element()});
      } else if (format == MomentFormat::kFloat32) {
        return std::span<const float>(reinterpret_cast<const float*>(copied), part.count);
      } else {
        memory.resize(part.count);
        const std::byte* const exponents = copied + moment_bytes(format, part.count);
        widen_moment(format, part.field == StateField::kV, copied,
                     reinterpret_cast<const std::uint8_t*>(exponents), part.count, memory.data());
      }
      return std::span<const float>(memory);
    });
  };
  background_save = std::make_unique<internal::BackgroundSave>(std::move(job));
}

void Engine::Impl::end_save() {
  const std::unique_ptr<internal::BackgroundSave> save = std::move(background_save);
  if (save == nullptr) return;
  try {
    agree(save->wait_for_file());
  } catch (const Error&) {
    save->give_up();
    throw;
  }
  agree(save->wait());
}

// This rank's part of every slice. At stage 0 every rank has the whole section, and with hybrid sharding
// every all-reduce group has it. Each rank saves its part all the same.
std::vector<Engine::Impl::SavedPart> Engine::Impl::saved_parts() const {
  const auto number = static_cast<std::uint64_t>(part_number());
  std::vector<SavedPart> parts;
  for (int index = 0; index < unit_count(); ++index) {
    const std::uint64_t slice = layout(index).trainable_slice(ranks());
    for (const StateField field : state_fields())
      parts.push_back({index, false, field, number * slice, slice});
    const std::uint64_t frozen = layout(index).frozen_slice(ranks());
    if (frozen > 0) parts.push_back({index, true, StateField::kMaster, number * frozen, frozen});
  }
  return parts;
}

// Bytes before the part, in this rank's frozen parameters or in its updated range in fp32.
std::uint64_t Engine::Impl::saved_offset(const SavedPart& part) {
  if (!part.frozen) return (part.begin - unit(part.unit).updated_begin) * sizeof(float);
  const std::uint64_t kept =
      options.stage < 3 ? 0 : static_cast<std::uint64_t>(shard()) * frozen_slice(part.unit);
  return (part.begin - kept) * element();
}

void Engine::Impl::describe_copies() {
  std::byte* target = saved_values;
  for (const SavedPart& part : saved_parts()) {
    describe_copies(part, target);
    saved_targets.push_back(target);
    target += part.frozen ? part.count * element() : kept_bytes(format_of(part.field), part.count);
  }
}

void Engine::Impl::describe_copies(const SavedPart& part, std::byte* target) {
  const Unit& u = unit(part.unit);
  StateCopy copy;
  if (part.frozen) {
    copy.target = target;
    copy.offset = saved_offset(part);
    copy.bytes = part.count * element();
    if (u.parameters_offloaded) {
      copy.range = u.frozen_slice;
    } else {
      copy.device = options.stage < 3 ? u.parameters + layout(part.unit).trainable_count * element()
                                      : u.parameter_shard + plan.slice_count(part.unit) * element();
    }
    saved_copies.push_back(copy);
    return;
  }
  const auto field = static_cast<std::size_t>(part.field);
  if (u.part_count > 0) {
    copy.range = u.states[field];
  } else if (u.offloaded) {
    copy.range.host = u.kept[field];
  } else {
    copy.device = u.kept[field];
  }
  const auto add = [&](std::byte* to, std::uint64_t offset, std::uint64_t bytes) {
    copy.target = to;
    copy.offset = offset;
    copy.bytes = bytes;
    saved_copies.push_back(copy);
  };
  const MomentFormat format = format_of(part.field);
  std::byte* exponents = target + moment_bytes(format, part.count);
  for (const KeptRun& run :
       kept_runs(part.unit, part.field, saved_offset(part) / sizeof(float), part.count)) {
    const std::uint64_t bytes = moment_bytes(format, run.count);
    const std::uint64_t exponent_bytes = moment_exponent_bytes(format, run.count);
    add(target, run.values, bytes);
    if (exponent_bytes > 0) add(exponents, run.exponents, exponent_bytes);
    target += bytes;
    exponents += exponent_bytes;
  }
}

std::span<const float> Engine::Impl::read_part(const SavedPart& part, std::vector<float>& memory) {
  memory.resize(part.count);
  if (!part.frozen) {
    read_state(part.unit, part.field, saved_offset(part) / sizeof(float), memory);
    return memory;
  }
  std::vector<std::byte> bytes(part.count * element());
  if (options.stage < 3) {
    copy_out(bytes.data(),
             unit(part.unit).parameters + layout(part.unit).trainable_count * element() + saved_offset(part),
             bytes.size());
  } else {
    read_slice(part.unit, true, saved_offset(part), bytes);
  }
  memory = widen(options.dtype, bytes);
  return memory;
}

// `read` is asked for each part in turn. Threads: any.
internal::StateFileEnd Engine::Impl::write_values(internal::StateFile target, const PartReader& read) const {
  internal::StateFileWriter file(std::move(target));
  std::vector<float> memory;
  for (const SavedPart& part : saved_parts()) {
    const std::span<const float> values = read(part, memory);
    if (hooks.before_state_write) hooks.before_state_write(part.count * sizeof(float));
    for (const SectionPart& run :
         parts_of(layout(part.unit), part.frozen, part.begin, part.begin + part.count)) {
      file.write(shape(part.unit).parameters[run.parameter].name, kStateFields[static_cast<int>(part.field)],
                 run.offset, values.subspan(run.begin - part.begin, run.end - run.begin));
    }
  }
  return file.finish();
}

// Without its files.
Json Engine::Impl::state_manifest(const std::string& trainer_state) const {
  Json parameters = Json::array();
  for (const UnitShape& unit : model.units) {
    for (const ParameterShape& parameter : unit.parameters)
      parameters.push_back({{"name", parameter.name}, {"shape", parameter.shape}});
  }
  Json manifest = {{"format", 1},
                   {"attempted_steps", attempted_steps},
                   {"applied_steps", applied_steps},
                   {"loss_scale", loss_scale},
                   {"growth_counter", growth_counter},
                   {"trainer_state", trainer_state},
                   {"ranks", ranks()},
                   {"stage", options.stage},
                   {"dtype", data_type_name(options.dtype)},
                   {"parameters", parameters}};
  if (options.optimizer != Optimizer::kAdamW) manifest["optimizer"] = optimizer_name(options.optimizer);
  return manifest;
}

std::string Engine::Impl::load_state(const std::string& directory, std::optional<std::uint64_t> step) {
  end_save();
  std::string trainer_state;
  // All ranks load the state that rank 0 finds.
  std::array<char, internal::kMostStateName> name{};
  agree(local_verdict([&] {
    if (rank() != 0) return;
    if (std::error_code error; !std::filesystem::exists(directory, error) && !error) {
      throw Error(StatusCode::kIoError, "there is no directory " + shown_path(directory) +
                                            " to load a state from; give the directory that a run saved to");
    }
    const StateDirectory files(directory);
    const std::string found = step ? internal::find_state_of(files, *step) : internal::find_state(files);
    if (found.empty() && step) {
      throw Error(StatusCode::kIoError, "there is no saved state of step " + std::to_string(*step) + " in " +
                                            shown_path(directory) +
                                            "; give a step that `forebay state show` lists");
    }
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
      check_same_optimizer(options.optimizer, saved);
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
    for (const StateField field : state_fields()) {
      host.assign(count, 0.0f);
      for (const SectionPart& part : parts_of(layout(unit_index), false, begin, begin + count)) {
        // A state without an average goes on from its weights.
        const std::string& name = parameters[part.parameter].name;
        const char* const wanted = kStateFields[static_cast<int>(field)];
        const bool starts = field == StateField::kAverage && !saved.has(name, wanted);
        saved.read(name, starts ? kStateFields[0] : wanted, part.offset,
                   std::span(host).subspan(part.begin - begin, part.end - part.begin));
      }
      write_state(unit_index, field, 0, host);
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
