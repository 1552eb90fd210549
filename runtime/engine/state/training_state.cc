// Saving and loading the training state of an engine. state_files.h has the form on disk.

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <system_error>

#include "forebay/agreement.h"
#include "forebay/checksum.h"
#include "forebay/host_adam.h"
#include "forebay/log.h"
#include "forebay/text.h"
#include "runtime/engine/engine_impl.h"
#include "runtime/engine/state/background_save.h"
#include "runtime/engine/state/saved_state.h"
#include "runtime/engine/state/tensor_places.h"

namespace forebay {
namespace {

using Json = nlohmann::json;
using internal::kStateFields;
using internal::SavedState;
using internal::StateDirectory;
using internal::TensorPlaces;

// The part of a section, elements [begin, end), that belongs to one of its parameters.
struct SectionPart {
  std::size_t parameter = 0;  // In the unit.
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t offset = 0;  // `begin`, counted from the start of the parameter.
};

// The values of one part at a time.
struct PartInMemory {
  template <typename Read>
  void copy(std::size_t part, std::uint64_t begin, std::uint64_t count, std::byte* target, const Read& read) {
    if (part != held) read(memory);
    held = part;
    std::memcpy(target, &memory[begin], count * sizeof(float));
  }

  std::vector<float> memory;
  std::optional<std::size_t> held;
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

TensorPlaces places_of(const ParameterShape& parameter) {
  return parameter.split ? value_or_throw(TensorPlaces::of(*parameter.split)) : TensorPlaces(parameter.count);
}

[[noreturn]] void refuse_model(const SavedState& saved, const std::string& difference) {
  throw Error(StatusCode::kInvalidArgument, "the saved state " + saved.path() + " is of another model: " +
                                                difference + "; give the options of the run that saved it");
}

// Whether the state has the rank's part of a parameter alone, and does not know the whole.
bool is_of_part(const ParameterShape& parameter, const SavedState::Tensor& saved) {
  return parameter.split && !saved.is_split && saved.places.count() != places_of(parameter).count();
}

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text;
  for (const std::uint64_t extent : shape) text += (text.empty() ? "[" : ", ") + std::to_string(extent);
  return text + "]";
}

// Errors: throws kInvalidArgument if a parameter of the model is missing or of another shape.
void check_parameter_of(const ParameterShape& parameter, const SavedState& saved) {
  const auto found = saved.tensors().find(parameter.name);
  const SavedState::Tensor* const tensor = found == saved.tensors().end() ? nullptr : &found->second;
  const std::uint64_t there = tensor == nullptr ? 0 : tensor->places.count();
  const bool of_part = tensor != nullptr && is_of_part(parameter, *tensor);
  const std::uint64_t here = of_part ? parameter.count : places_of(parameter).count();
  if (there == 0 && here != 0) {
    refuse_model(saved,
                 "it lacks " + parameter.name + ", which has " + std::to_string(here) + " elements here");
  }
  if (there != here) {
    refuse_model(saved, parameter.name + " has " + std::to_string(there) + " elements there and " +
                            std::to_string(here) + " here");
  }
  const std::vector<std::uint64_t>& shape = parameter.split ? parameter.split->shape : parameter.shape;
  if (!of_part && !shape.empty() && !tensor->shape.empty() && shape != tensor->shape) {
    refuse_model(saved, parameter.name + " has the shape " + shape_text(tensor->shape) + " there and " +
                            shape_text(shape) + " here");
  }
}

// Which parameters of the saved state the model has, in order of their names, as 0 and 1. Errors: throws
// kInvalidArgument if the saved state has not all parameters of the model.
std::vector<std::byte> check_model(const ModelShape& model, const SavedState& saved) {
  std::map<std::string, std::size_t> places;
  for (const auto& [name, tensor] : saved.tensors()) places.emplace(name, places.size());
  std::vector<std::byte> known(places.size());
  for (const auto& [name, tensor] : saved.tensors()) {
    if (tensor.is_factors) known[places.at(name)] = std::byte{1};
  }
  for (const UnitShape& unit : model.units) {
    for (const ParameterShape& parameter : unit.parameters) {
      check_parameter_of(parameter, saved);
      known[places.at(parameter.name)] = std::byte{1};
    }
  }
  return known;
}

// Errors: throws kInvalidArgument if no rank has some parameter of the saved state. `known`: of all ranks.
void check_all_known(const std::vector<std::byte>& known, const SavedState& saved) {
  const std::size_t count = saved.tensors().size();
  std::size_t place = 0;
  for (const auto& [name, tensor] : saved.tensors()) {
    bool is_known = false;
    for (std::size_t at = place; at < known.size(); at += count) is_known |= known[at] != std::byte{0};
    if (!is_known) {
      refuse_model(saved, "it has " + std::to_string(count) + " parameters, and " + shown_value(name) +
                              " is not one of this model");
    }
    ++place;
  }
}

// The manifests of AdamW's states name no optimizer.
void check_same_optimizer(Optimizer optimizer, const SavedState& saved) {
  const Json& manifest = saved.manifest();
  if (manifest.value("weights_only", false)) return;  // All moments begin at zero.
  const std::string name = manifest.value("optimizer", optimizer_name(Optimizer::kAdamW));
  if (name == optimizer_name(optimizer)) return;
  throw Error(StatusCode::kInvalidArgument,
              "the saved state " + saved.path() + " is of the optimizer " + shown_value(name) +
                  ", and this run has " + optimizer_name(optimizer) +
                  ", whose moments mean something else; give the same optimizer, or "
                  "start from the weights alone (forebay state export)");
}

// Muon: a parameter that was a matrix has no v.
void check_same_rule(const ParameterShape& parameter, const SavedState& saved) {
  if (!saved.has(parameter.name, kStateFields[1])) return;  // All moments begin at zero.
  const bool is_matrix = is_muon_matrix(parameter);
  if (saved.has(parameter.name, kStateFields[2]) == !is_matrix) return;
  refuse_model(saved, parameter.name + (is_matrix ? " was updated by AdamW there and is a matrix here"
                                                  : " was a matrix there and is updated by AdamW here"));
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
    if (everyone().rank() != 0) return;
    const StateDirectory files = StateDirectory::make(directory);
    internal::check_latest(files);
    state_claims.check(files);
    state_locks.emplace_back(files);
  }));
}

// The ranks that save or load one state together: those of the grid, unless they gave several directories.
// Then each part of the grid has a state of its own.
Communicator& Engine::Impl::state_ranks(const std::string& directory) {
  if (options.grid == nullptr) return communicator;
  const std::uint64_t mine = checksum_of(directory.data(), directory.size());
  for (const std::uint64_t other : exchange(everyone(), mine)) {
    if (other != mine) return communicator;
  }
  return everyone();
}

// Each rank saves its part. If the ranks were given different values, the state would be a mixture that no
// rank ever had.
void Engine::Impl::expect_equal_values() {
  Status shared;
  if (options.grid != nullptr) {
    shared = check_shared_values(sharing_ranks, exchange(deciders(), shared_fingerprint()));
    for (const auto& [unit, stages] : shared_units) {
      std::uint64_t mine = 0;
      for (const ParameterShape& parameter : shape(unit).parameters)
        mine = mine * 31 + given_values.of(parameter.name);
      for (const std::uint64_t theirs : exchange(*stages, mine)) {
        if (theirs == mine || !shared.ok()) continue;
        shared = Status(StatusCode::kInvalidArgument,
                        "the pipeline stages that share unit " + shape(unit).name +
                            " were given different values of it; give all of these stages the same values");
      }
    }
  }
  std::ostringstream text;
  text << given_values.text() << "the hash of the calls of freeze() and reset_moments()\t" << std::hex
       << calls_fingerprint << '\n';
  agree_on_text(communicator, "values before this save", text.str());
  if (!shared.ok()) throw Error(shared);
}

void Engine::Impl::save_state(const std::string& directory, const std::string& trainer_state, int keep) {
  end_save();
  Communicator& saving = state_ranks(directory);
  const bool saves_grid = &saving != &communicator;
  const std::uint64_t number = exchange(saving, internal::new_save_number()).front();
  const std::string temporary = internal::temporary_state(internal::state_name(attempted_steps), number);
  std::optional<StateDirectory> files;
  std::optional<internal::StateLock> lock;
  agree(local_verdict([&] {
    expect_equal_values();
    if (saving.rank() != 0) return;
    files.emplace(StateDirectory::make(directory));
    internal::check_latest(*files);
    lock.emplace(*files, true);
    state_claims.check(*files);
    internal::remove_unfinished(*files);
    files->make_subdirectory(temporary);
  }));
  try {
    agree(local_verdict([&] {
      if (!files) files.emplace(directory);
      const SavedFile saved = saved_file(saves_grid);
      PartInMemory held;
      write_values(
          files->subdirectory(temporary).create(internal::state_file_name(saving.rank(), saving.size())),
          saved, FinishedCopies{.parts = std::vector<const std::byte*>(saved.parts.size())},
          [&](std::size_t part, std::uint64_t begin, std::uint64_t count, std::byte* target) {
            held.copy(part, begin, count, target,
                      [&](std::vector<float>& memory) { read_part(saved.parts[part], memory); });
          });
    }));
    agree(local_verdict([&] {
      if (saving.rank() != 0) return;
      internal::publish_state(*files, temporary, state_manifest(trainer_state, saving.size()), keep);
      state_claims.add(*files);
    }));
  } catch (const Error&) {
    // A save that failed on some rank leaves nothing half-written.
    if (saving.rank() == 0) files->remove(temporary);
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
  Communicator& saving = state_ranks(directory);
  const bool saves_grid = &saving != &communicator;
  internal::BackgroundSaveJob job;
  // The program may change its working directory before the thread opens it.
  std::error_code unknown;
  const std::filesystem::path absolute = std::filesystem::absolute(directory, unknown);
  job.directory = unknown ? directory : absolute.string();
  const std::uint64_t number = exchange(saving, internal::new_save_number()).front();
  job.temporary = internal::temporary_state(internal::state_name(attempted_steps), number);
  job.rank = saving.rank();
  job.ranks = saving.size();
  job.keep = keep;
  agree(local_verdict([&] {
    expect_equal_values();
    internal::check_text(trainer_state);
    if (saving.rank() != 0) return;
    const StateDirectory files = StateDirectory::make(directory);
    internal::check_latest(files);
    job.lock = std::make_unique<internal::StateLock>(files, true);
    state_claims.check(files);
    internal::remove_unfinished(files);
    files.make_subdirectory(job.temporary);
  }));
  if (saving.rank() == 0) job.manifest = state_manifest(trainer_state, saving.size());
  job.published = [this](const StateDirectory& files) { state_claims.add(files); };
  if (saved_copies.empty()) describe_copies();
  updater->copy(saved_copies);
  job.copied = [this] { return updater->wait_for_copies(); };
  job.write = [this, saved = saved_file(saves_grid)](internal::StateFile file) {
    const FinishedCopies copies = finish_copies(saved);
    PartInMemory held;
    write_values(std::move(file), saved, copies,
                 [&](std::size_t number, std::uint64_t begin, std::uint64_t count, std::byte* target) {
                   held.copy(number, begin, count, target, [&](std::vector<float>& memory) {
                     read_copied_part(saved.parts[number], saved_targets[number], memory);
                   });
                 });
  };
  background_save = std::make_unique<internal::BackgroundSave>(std::move(job));
}

// Whether its copy has the bytes that go to the file.
bool Engine::Impl::is_copied_as_saved(const SavedPart& part) const {
  if (part.frozen || is_own_v(part.field)) return false;
  return part.factors || format_of(part.field) == MomentFormat::kFloat32;
}

// A part whose copy has other bytes than its file.
void Engine::Impl::read_copied_part(const SavedPart& part, const std::byte* copied,
                                    std::vector<float>& memory) const {
  const std::uint64_t bytes = copied_bytes(part);
  if (part.frozen) {
    memory = widen(options.dtype, {copied, bytes});
    return;
  }
  if (is_own_v(part.field)) {
    memory.assign(part.count, 0.0f);
    const auto* from = reinterpret_cast<const float*>(copied);
    for (const OwnV& v : own_v_in(part)) {
      std::copy_n(from, v.count, &memory[v.begin - saved_offset(part) / sizeof(float)]);
      from += v.count;
    }
    return;
  }
  const MomentFormat format = format_of(part.field);
  memory.resize(part.count);
  const std::byte* const exponents = copied + moment_bytes(format, part.count);
  widen_moment(format, part.field == StateField::kV, copied, reinterpret_cast<const std::uint8_t*>(exponents),
               part.count, memory.data());
}

void Engine::Impl::end_save() {
  const std::unique_ptr<internal::BackgroundSave> save = std::move(background_save);
  if (save == nullptr) return;
  try {
    const Status file = save->wait_for_file();
    updater->end_copies();  // A save that failed left them.
    agree(file);
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
    for (const StateField field : saved_fields())
      parts.push_back({index, false, field, number * slice, slice});
    const std::uint64_t frozen = layout(index).frozen_slice(ranks());
    if (frozen > 0) parts.push_back({index, true, StateField::kMaster, number * frozen, frozen});
    // All ranks have the same factors.
    const std::uint64_t factors =
        plan.factor_counts.empty() ? 0 : plan.factor_counts[static_cast<std::size_t>(index)];
    if (factors > 0 && rank() == 0) parts.push_back({index, false, StateField::kV, 0, factors, true});
  }
  return parts;
}

// Bytes before the part, in this rank's frozen parameters or in its updated range in fp32.
std::uint64_t Engine::Impl::saved_offset(const SavedPart& part) const {
  if (!part.frozen)
    return (part.begin - units[static_cast<std::size_t>(part.unit)].updated_begin) * sizeof(float);
  const std::uint64_t kept =
      options.stage < 3 ? 0 : static_cast<std::uint64_t>(shard()) * frozen_slice(part.unit);
  return (part.begin - kept) * element();
}

void Engine::Impl::describe_copies() {
  std::byte* target = saved_values;
  for (const SavedPart& part : saved_parts()) {
    describe_copies(part, target);
    saved_targets.push_back(target);
    target += copied_bytes(part);
  }
}

std::uint64_t Engine::Impl::copied_bytes(const SavedPart& part) const {
  if (part.frozen) return part.count * element();
  if (part.factors) return part.count * sizeof(float);
  if (!is_own_v(part.field)) return kept_bytes(format_of(part.field), part.count);
  std::uint64_t count = 0;
  for (const OwnV& v : own_v_in(part)) count += v.count;
  return count * sizeof(float);
}

std::vector<StepContext::OwnV> Engine::Impl::own_v_in(const SavedPart& part) const {
  return own_v_in(part.unit, saved_offset(part) / sizeof(float), part.count);
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
      copy.is_leased = options.stage < 3;
    }
    saved_copies.push_back(copy);
    return;
  }
  if (part.factors) {
    auto* const factors = reinterpret_cast<std::byte*>(u.factors);
    copy.target = target;
    copy.bytes = part.count * sizeof(float);
    if (u.offloaded) {
      copy.range.host = factors;
    } else {
      copy.device = factors;
    }
    saved_copies.push_back(copy);
    return;
  }
  const auto field = static_cast<std::size_t>(part.field);
  if (u.part_count > 0 && !is_own_v(part.field)) {
    copy.range = u.states[field];
  } else if (u.offloaded) {
    copy.range.host = u.kept[field];
  } else {
    copy.device = u.kept[field];
    copy.is_leased = part.field == StateField::kMaster && is_own_master(options) && options.stage < 3;
  }
  const auto add = [&](std::byte* to, std::uint64_t offset, std::uint64_t bytes) {
    copy.target = to;
    copy.offset = offset;
    copy.bytes = bytes;
    saved_copies.push_back(copy);
  };
  if (is_own_v(part.field)) {
    for (const OwnV& v : own_v_in(part)) {
      add(target, v.at * sizeof(float), v.count * sizeof(float));
      target += v.count * sizeof(float);
    }
    return;
  }
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

void Engine::Impl::read_part(const SavedPart& part, std::vector<float>& memory) {
  memory.resize(part.count);
  if (part.factors) {
    copy_out(memory.data(), reinterpret_cast<const std::byte*>(unit(part.unit).factors),
             part.count * sizeof(float));
    return;
  }
  if (!part.frozen) {
    read_state(part.unit, part.field, saved_offset(part) / sizeof(float), memory);
    return;
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
}

// Whether this rank saves a parameter, of which other parts of the grid may have copies.
bool Engine::Impl::saves(int index, const ParameterShape& parameter) const {
  const Unit& u = units[static_cast<std::size_t>(index)];
  const bool counts_shared = u.stages == nullptr || u.stages->rank() == 0;
  return counts_shared && (options.counts_replicated || !parameter.replicated);
}

Engine::Impl::SavedFile Engine::Impl::saved_file(bool saves_grid) const {
  std::vector<internal::StateParameter> parameters;
  std::vector<std::size_t> first_of_unit;
  for (const UnitShape& unit : model.units) {
    first_of_unit.push_back(parameters.size());
    for (const ParameterShape& p : unit.parameters)
      parameters.push_back(
          {p.name, p.count, p.shape, p.frozen, saves_grid ? p.split : std::optional<TensorSplit>()});
  }
  // Adafactor: then the factors of each.
  std::vector<std::size_t> first_factors_of_unit;
  for (const Unit& u : units) {
    first_factors_of_unit.push_back(parameters.size());
    for (const Factored& p : u.factored) {
      const std::size_t at = first_of_unit[first_factors_of_unit.size() - 1] + p.parameter;
      parameters.push_back(
          {.name = parameters[at].name + kFactorsName, .count = p.shape.factor_count(), .factors = true});
    }
  }
  const std::vector<SavedPart> saved = saved_parts();
  std::vector<internal::StateRun> runs;
  std::vector<std::vector<std::uint64_t>> begins(saved.size());  // The runs of each part.
  for (std::size_t i = 0; i < saved.size(); ++i) {
    const SavedPart& part = saved[i];
    const auto number = static_cast<std::size_t>(part.unit);
    if (part.factors) {
      const std::vector<Factored>& factored_of_unit = units[number].factored;
      for (std::size_t k = 0; k < factored_of_unit.size(); ++k) {
        const Factored& p = factored_of_unit[k];
        if (saves_grid && !saves(part.unit, shape(part.unit).parameters[p.parameter])) continue;
        runs.push_back(
            {first_factors_of_unit[number] + k, internal::kFieldOfFactors, 0, p.shape.factor_count()});
        begins[i].push_back(p.factors_at);
      }
      continue;
    }
    for (const SectionPart& run :
         parts_of(layout(part.unit), part.frozen, part.begin, part.begin + part.count)) {
      const ParameterShape& parameter = shape(part.unit).parameters[run.parameter];
      if (saves_grid && !saves(part.unit, parameter)) continue;
      if (is_own_v(part.field) && !has_own_v(options, parameter)) continue;
      runs.push_back({first_of_unit[number] + run.parameter, static_cast<int>(part.field), run.offset,
                      run.end - run.begin});
      begins[i].push_back(run.begin - part.begin);
    }
  }
  return {std::move(parameters), saved, std::move(runs), std::move(begins)};
}

// Threads: that of the save.
Engine::Impl::FinishedCopies Engine::Impl::finish_copies(const SavedFile& saved) const {
  FinishedCopies copies;
  auto next = saved.runs.begin();
  for (std::size_t i = 0; i < saved.parts.size(); ++i) {
    const std::byte* const part = is_copied_as_saved(saved.parts[i]) ? saved_targets[i] : nullptr;
    copies.parts.push_back(part);
    for (const std::uint64_t begin : saved.begins[i]) {
      const std::uint64_t end = begin + (next++)->count;
      for (std::uint64_t at = begin; part != nullptr && at < end; at += internal::kBlockCount) {
        const std::uint64_t bytes = std::min(end - at, internal::kBlockCount) * sizeof(float);
        updater->finish_copy(part + at * sizeof(float), bytes, [&](const std::byte* values) {
          copies.checksums.push_back(checksum_of(values, bytes));
        });
      }
    }
  }
  updater->finish_copies();
  updater->end_copies();
  return copies;
}

// Threads: any.
void Engine::Impl::write_values(internal::StateFile target, const SavedFile& saved,
                                const FinishedCopies& copies, const PartReader& read) const {
  internal::StateFileWriter file(std::move(target), saved.parameters, saved.runs);
  const std::uint64_t* checksums = copies.checksums.data();
  auto next = saved.runs.begin();
  for (std::size_t i = 0; i < saved.parts.size(); ++i) {
    if (hooks.before_state_write) hooks.before_state_write(saved.parts[i].count * sizeof(float));
    for (const std::uint64_t begin : saved.begins[i]) {
      const std::uint64_t run_count = (next++)->count;
      if (copies.parts[i] != nullptr) {
        file.write_run(copies.parts[i] + begin * sizeof(float), checksums);
        checksums += ceil_div(run_count, internal::kBlockCount);
        continue;
      }
      file.write(run_count, [&](std::byte* target, std::uint64_t first, std::uint64_t count) {
        read(i, begin + first, count, target);
      });
    }
  }
  file.finish();
}

// Without its files and parameters.
Json Engine::Impl::state_manifest(const std::string& trainer_state, int saving_ranks) const {
  Json manifest = {{"attempted_steps", attempted_steps},
                   {"applied_steps", applied_steps},
                   {"loss_scale", loss_scale},
                   {"growth_counter", growth_counter},
                   {"trainer_state", trainer_state},
                   {"ranks", saving_ranks},
                   {"stage", options.stage},
                   {"dtype", data_type_name(options.dtype)}};
  if (options.optimizer != Optimizer::kAdamW) manifest["optimizer"] = optimizer_name(options.optimizer);
  return manifest;
}

std::string Engine::Impl::load_state(const std::string& directory, std::optional<std::uint64_t> step) {
  end_save();
  Communicator& loading = state_ranks(directory);
  constexpr int kMostTries = 10;
  for (int tries = 1;; ++tries) {
    const std::string name = name_of_state(loading, directory, step);
    try {
      return load_state(loading, directory, name);
    } catch (const Error& error) {
      // A job that saves there may have removed this state after it made a newer one. All ranks have one
      // error.
      if (error.code() != StatusCode::kIoError || !is_superseded(loading, directory, step, name)) throw;
      if (tries == kMostTries) {
        throw Error(error.code(), error.status().message() +
                                      "; another job replaces it faster than it is loaded: "
                                      "let that one keep more states");
      }
    }
  }
}

// The state that rank 0 finds, which all ranks load.
std::string Engine::Impl::name_of_state(Communicator& loading, const std::string& directory,
                                        std::optional<std::uint64_t> step) {
  std::array<char, internal::kMostStateName> name{};
  agree(local_verdict([&] {
    if (loading.rank() != 0) return;
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
  return exchange(loading, name).front().data();
}

// Whether rank 0 finds another state than `name` by now. The state of a given step has no successor.
bool Engine::Impl::is_superseded(Communicator& loading, const std::string& directory,
                                 std::optional<std::uint64_t> step, const std::string& name) {
  std::uint64_t superseded = 0;
  if (loading.rank() == 0 && !step) {
    static_cast<void>(
        local_verdict([&] { superseded = internal::find_state(StateDirectory(directory)) != name; }));
  }
  const std::vector<std::uint64_t> answers = exchange(everyone(), superseded);
  return std::ranges::find(answers, std::uint64_t{1}) != answers.end();
}

std::string Engine::Impl::load_state(Communicator& loading, const std::string& directory,
                                     const std::string& name) {
  std::string trainer_state;
  std::optional<SavedState> opened;
  agree(local_verdict([&] {
    try {
      opened.emplace(directory, name);
    } catch (const Error& error) {
      if (loading.rank() == 0 || error.code() != StatusCode::kIoError) throw;
      throw Error(error.code(), error.status().message() +
                                    "; rank 0 found this state: give all ranks one directory, on a file "
                                    "system that they share");
    }
  }));
  const std::string manifest_text = opened->manifest().dump();
  const auto fingerprints =
      exchange<std::uint64_t>(loading, XXH3_64bits(manifest_text.data(), manifest_text.size()));
  std::vector<std::byte> known;  // The parameters that this rank has.
  agree(local_verdict([&] {
    const auto other = std::ranges::adjacent_find(fingerprints, std::not_equal_to());
    if (other != fingerprints.end()) {
      throw Error(StatusCode::kInvalidArgument,
                  "rank " + std::to_string(other - fingerprints.begin() + 1) + " found another state as " +
                      opened->path() +
                      " than rank 0; give all ranks one directory, on a file system that they share");
    }
    known = check_model(model, *opened);
    check_same_optimizer(options.optimizer, *opened);
  }));
  SavedState& saved = *opened;
  std::vector<std::byte> known_to_all(known.size() * static_cast<std::size_t>(loading.size()));
  must(loading.exchange(known, known_to_all));
  agree(local_verdict([&] {
    try {
      check_all_known(known_to_all, saved);
      load_values(saved);
      const Json& manifest = saved.manifest();
      attempted_steps = internal::whole_number(manifest, "attempted_steps");
      applied_steps = internal::whole_number(manifest, "applied_steps");
      manifest.at("trainer_state").get_to(trainer_state);
      if (loading.rank() == 0) state_claims.add(StateDirectory(directory));
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
  const bool has_average =
      std::any_of(saved.tensors().begin(), saved.tensors().end(), [&](const auto& tensor) {
        return saved.has(tensor.first, kStateFields[static_cast<int>(StateField::kAverage)]);
      });
  if (has_average && options.ema == 0.0 && loading.rank() == 0) {
    log(LogLevel::kWarning,
        "the saved state %s has a moving average of the weights, and this run keeps none, so its states will "
        "not have it; give the option ema to go on with it",
        shown_path(saved.path()).c_str());
  }
  // All ranks have the same values again. Which parameters freeze() has frozen is left as it was.
  given_values.clear();
  calls_fingerprint = shared_calls_fingerprint = 0;
  for (int index = 0; index < unit_count(); ++index) {
    const std::vector<bool>& fixed = unit(index).fixed;
    for (std::size_t p = 0; p < fixed.size(); ++p) {
      const std::uint64_t id[] = {static_cast<std::uint64_t>(index), p};
      if (!fixed[p]) continue;
      calls_fingerprint = XXH3_64bits_withSeed(id, sizeof(id), calls_fingerprint);
      note_freeze(shape(index), static_cast<int>(p), true);
    }
  }
  return trainer_state;
}

// Elements [offset, offset + values.size()) of this rank's part of a parameter. Padding is zero, and so is a
// moment that was not saved: the parameter was frozen, or the state has weights alone.
void Engine::Impl::load_part(SavedState& saved, const ParameterShape& parameter, const char* field,
                             std::uint64_t offset, std::span<float> values) {
  if (field != kStateFields[0] && !saved.has(parameter.name, field)) return;
  if (!parameter.split || is_of_part(parameter, saved.tensors().at(parameter.name)))
    return saved.read(parameter.name, field, offset, values);
  const TensorPlaces places = places_of(parameter);
  while (!values.empty()) {
    const TensorPlaces::InWhole run = places.place(parameter.split->part, offset);
    const std::uint64_t count = std::min<std::uint64_t>(run.count, values.size());
    if (run.at) saved.read(parameter.name, field, *run.at, values.first(count));
    values = values.subspan(count);
    offset += count;
  }
}

// Factors that were not saved are zeros: the parameter was frozen, or the state has weights alone.
void Engine::Impl::load_factors(SavedState& saved, int index) {
  const Unit& u = unit(index);
  if (u.factored.empty()) return;
  std::vector<float> host(plan.factor_counts[static_cast<std::size_t>(index)]);
  for (const Factored& p : u.factored) {
    const std::string& parameter = shape(index).parameters[p.parameter].name;
    const std::string name = parameter + kFactorsName;
    const auto found = saved.tensors().find(name);
    if (found == saved.tensors().end()) continue;
    const std::uint64_t there = found->second.places.count(), here = p.shape.factor_count();
    if (there != here) {
      refuse_model(saved, "Adafactor's moment of " + parameter + " has " + std::to_string(there) +
                              " factors there and " + std::to_string(here) +
                              " here, so another shape was declared");
    }
    saved.read(name, kStateFields[internal::kFieldOfFactors], 0, std::span(host).subspan(p.factors_at, here));
  }
  copy_in(reinterpret_cast<std::byte*>(u.factors), host.data(), host.size() * sizeof(float));
}

void Engine::Impl::load_values(SavedState& saved) {
  settle_leases();
  std::vector<float> host;
  for (int unit_index = 0; unit_index < unit_count(); ++unit_index) {
    const std::vector<ParameterShape>& parameters = shape(unit_index).parameters;
    const std::uint64_t begin = unit(unit_index).updated_begin;
    const std::uint64_t count = unit(unit_index).updated_count;
    for (const StateField field : saved_fields()) {
      host.assign(count, 0.0f);
      for (const SectionPart& part : parts_of(layout(unit_index), false, begin, begin + count)) {
        if (is_own_v(field)) check_same_rule(parameters[part.parameter], saved);
        // A state without an average goes on from its weights.
        const char* const wanted = kStateFields[static_cast<int>(field)];
        const bool starts =
            field == StateField::kAverage && !saved.has(parameters[part.parameter].name, wanted);
        load_part(saved, parameters[part.parameter], starts ? kStateFields[0] : wanted, part.offset,
                  std::span(host).subspan(part.begin - begin, part.end - part.begin));
      }
      write_state(unit_index, field, 0, host);
    }
    load_factors(saved, unit_index);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].frozen) continue;
      host.assign(parameters[i].count, 0.0f);
      load_part(saved, parameters[i], kStateFields[0], 0, host);
      set_parameter({unit_index, static_cast<int>(i)}, 0, host, false);
    }
  }
}

}  // namespace forebay
