// Checkpoints of DeepSpeed's ZeRO.
//
// A rank's optimizer file has flat groups: all parameters of a group one after another, of which each rank
// has a part. At stages 1 and 2 the parts of all ranks in order are the group. At stage 3 each parameter is
// divided by itself: the flat groups of a rank have its part of each parameter.
//
// Source: DeepSpeed 0.19, deepspeed/utils/zero_to_fp32.py and the state_dict() of deepspeed/runtime/zero.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "forebay/error.h"
#include "forebay/text.h"
#include "runtime/command/state/stored_tensor.h"
#include "runtime/command/state/tensor_source.h"
#include "runtime/command/state/torch_file.h"

namespace forebay {
namespace {

using Kind = PickleValue::Kind;

// Smaller: jobs of many ranks are refused. Larger: a directory of many files takes long to refuse.
constexpr std::size_t kMostZeroRanks = 1 << 16;
constexpr std::uint64_t kMostTagBytes = 4096;
constexpr std::uint64_t kZeroPieceCount = 1u << 20;
constexpr int kFieldCount = 3;                     // The master, m and v.
constexpr double kMostSteps = 9007199254740992.0;  // Whole numbers of a double are exact up to here.

[[noreturn]] void refuse_zero(const std::string& path, const std::string& finding,
                              const std::string& remedy) {
  throw Error(StatusCode::kUnsupported, shown_path(path) + " cannot be imported: " + finding + "; " + remedy);
}

bool take_word(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

bool take_number(std::string_view& text, std::uint64_t* number) {
  std::size_t digits = 0;
  *number = 0;
  for (; digits < text.size() && digits < 9 && text[digits] >= '0' && text[digits] <= '9'; ++digits)
    *number = *number * 10 + static_cast<std::uint64_t>(text[digits] - '0');
  text.remove_prefix(digits);
  return digits > 0;
}

// "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt".
struct ZeroFileName {
  bool is_optimizer = false;
  std::uint64_t rank = 0;
  std::uint64_t model_rank = 0;
};

std::optional<ZeroFileName> zero_file_name(std::string_view name) {
  ZeroFileName found;
  static_cast<void>(take_word(name, "bf16_") || take_word(name, "fp16_"));
  const bool has_rank = take_word(name, "zero_pp_rank_");
  if (has_rank && !(take_number(name, &found.rank) && take_word(name, "_"))) return std::nullopt;
  if (!take_word(name, "mp_rank_") || !take_number(name, &found.model_rank)) return std::nullopt;
  found.is_optimizer = name == "_optim_states.pt";
  if (!found.is_optimizer && name != "_model_states.pt") return std::nullopt;
  return found;
}

std::string zero_directory(const std::string& path) {
  std::error_code error;
  const std::string latest = path + "/latest";
  if (!std::filesystem::exists(latest, error)) return path;
  const InputFile file(latest);
  if (file.bytes() > kMostTagBytes) refuse_import(latest, "it is too long for a name");
  std::string tag = file.text(0, file.bytes());
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == ' ' || tag.back() == '\r')) tag.pop_back();
  if (tag.empty() || tag == ".." || tag.find('/') != std::string::npos || tag.find('\0') != std::string::npos)
    refuse_import(latest, "it names no directory beside it");
  return path + "/" + tag;
}

// A flat vector of elements that lies in several places.
class FlatVector {
 public:
  // `place`: nothing where the file has no such values.
  // False if there are too many elements to count.
  [[nodiscard]] bool append(const std::optional<TorchTensor>& place, std::size_t file, std::uint64_t count) {
    parts_.push_back({end_, count, place, file});
    return !__builtin_add_overflow(end_, count, &end_);
  }
  std::uint64_t count() const { return end_; }

  // Appends the places of elements [begin, begin + count) as boxes from `target` on. Returns how many
  // elements have no place. Requires: begin + count <= count().
  std::uint64_t find(std::uint64_t begin, std::uint64_t count, std::uint64_t target,
                     std::vector<StoredBox>& boxes) const {
    std::uint64_t missing = 0;
    auto part = std::upper_bound(parts_.begin(), parts_.end(), begin, [](std::uint64_t at, const Part& one) {
      return at < one.begin + one.count;
    });
    for (; count > 0 && part != parts_.end(); ++part) {
      if (part->count == 0) continue;
      const std::uint64_t skipped = begin - part->begin;
      const std::uint64_t taken = std::min(count, part->count - skipped);
      if (part->place) {
        const DataType type = part->place->float_type().value_or(DataType::kFloat32);  // Was checked.
        boxes.push_back(
            {part->file, part->place->at + skipped * element_bytes(type), type, {target}, {taken}});
      } else {
        missing += taken;
      }
      begin += taken;
      target += taken;
      count -= taken;
    }
    return missing + count;
  }

 private:
  struct Part {
    std::uint64_t begin = 0;
    std::uint64_t count = 0;
    std::optional<TorchTensor> place;
    std::size_t file = 0;
  };
  std::vector<Part> parts_;
  std::uint64_t end_ = 0;
};

// The values of a group of a rank: the master, m and v.
struct FlatGroup {
  std::optional<TorchTensor> fields[kFieldCount];
};

class ZeroCheckpoint : public TensorSource {
 public:
  ZeroCheckpoint(const std::string& path, bool weights_alone)
      : directory_(zero_directory(path)), weights_alone_(weights_alone) {
    list_files();
    for (std::size_t rank = 0; rank < optimizer_files_.size(); ++rank) read_optimizer(rank);
    read_model(0);
    add_trained();
    if (stage_ == 3) add_frozen_parts();
    if (tensors_.empty()) refuse_import(directory_, "it has no parameters");
    if (!has_optimizer_steps_) take_steps_of_engine();
    steps_.attempted = std::max(steps_.attempted, steps_.applied);
  }

  const std::vector<Tensor>& tensors() const override { return tensors_; }
  Steps steps() const override { return steps_; }
  std::string optimizer() const override { return has_v_ ? "adamw" : has_momentum_ ? "sgd" : "lion"; }

  void read(std::size_t tensor, SavedField field,
            const std::function<void(Span<const float>)>& visit) override {
    read_boxes(stored_.at(tensor).at(static_cast<std::size_t>(field)), files_, kZeroPieceCount, visit);
  }

 private:
  using Shapes = std::vector<std::pair<std::string, std::vector<std::uint64_t>>>;

  const std::string& path_of(std::size_t file) const { return files_.path(file); }

  void list_files() {
    std::map<std::uint64_t, std::string> optimizer;
    std::map<std::uint64_t, std::string> model;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(directory_, error)) {
      const std::string name = entry.path().filename().string();
      const std::string_view view = name;
      if (view.starts_with("layer_") && view.ends_with("-model_states.pt"))
        refuse_zero(directory_, "its layers are in parts of a pipeline", "save it without pipeline stages");
      if (view.starts_with("expp_rank_") || (view.starts_with("layer_") && view.ends_with("_states.pt")))
        refuse_zero(directory_, "it has experts in files of their own", "save a model without experts");
      const std::optional<ZeroFileName> found = zero_file_name(name);
      if (!found) continue;
      if (found->model_rank > 0) {
        refuse_zero(directory_, "it is in parts of tensor-parallel ranks (" + shown_value(name) + ")",
                    "merge the parts with DeepSpeed first");
      }
      auto& files = found->is_optimizer ? optimizer : model;
      if (!files.emplace(found->rank, directory_ + "/" + name).second)
        refuse_import(directory_, "two of its files are of rank " + std::to_string(found->rank));
    }
    if (error) {
      throw Error(StatusCode::kIoError, "cannot read the directory " + shown_path(directory_) + ": " +
                                            error.message() + "; give the directory of a checkpoint");
    }
    if (optimizer.empty()) {
      refuse_zero(directory_, "it has no files *_optim_states.pt",
                  "give a checkpoint of ZeRO stage 1, 2 or 3 that save_checkpoint() wrote");
    }
    add_files(optimizer, "_optim_states.pt", optimizer_files_);
    add_files(model, "_model_states.pt", model_files_);
  }

  // Errors: throws kCorruption if a rank's file is missing.
  void add_files(const std::map<std::uint64_t, std::string>& paths, const char* suffix,
                 std::vector<std::size_t>& files) {
    if (paths.size() > kMostZeroRanks || paths.empty() || paths.rbegin()->first != paths.size() - 1) {
      refuse_import(directory_, "its files *" + std::string(suffix) +
                                    " are not those of ranks 0, 1, ..., of which " +
                                    std::to_string(paths.size()) + " are there");
    }
    for (const auto& [rank, path] : paths) files.push_back(files_.add(path));
  }

  // --- the files of the optimizer ---

  void read_optimizer(std::size_t rank) {
    const std::size_t number = optimizer_files_[rank];
    const InputFile file(path_of(number));
    const TorchFile torch(file);
    const Pickle& pickle = torch.pickle();
    const PickleValue* const state = pickle.find(torch.root(), "optimizer_state_dict");
    if (state == nullptr) refuse_import(file.path(), "it has no optimizer_state_dict");
    check_ranks(file.path(), pickle, *state);
    const PickleValue* masters = pickle.find(*state, "fp32_flat_groups");
    const bool is_whole = masters == nullptr;  // Stages 1 and 2.
    if (is_whole) masters = pickle.find(*state, "single_partition_of_fp32_groups");
    const int stage = is_whole ? 2 : 3;
    if (masters == nullptr || masters->kind != Kind::kList) {
      refuse_zero(file.path(), "it has no fp32 weights of ZeRO stages 1 to 3",
                  "give a checkpoint of one of these stages");
    }
    if (rank > 0 && stage != stage_) refuse_import(file.path(), "it is of another stage than the first");
    stage_ = stage;
    if (stage == 3 && pickle.find(*state, "ds_zero_partition_groups") != nullptr)
      refuse_zero(file.path(), "its experts are divided by themselves", "save a model without experts");
    if (rank == 0) read_paddings(file.path(), pickle, *state);
    std::vector<FlatGroup> groups(pickle.items(*masters).size());
    for (std::size_t group = 0; group < groups.size(); ++group)
      groups[group].fields[0] = float_tensor(torch, file.path(), pickle.items(*masters)[group]);
    if (!weights_alone_) read_moments(torch, file.path(), *state, groups);
    append(number, groups, rank);
  }

  void check_ranks(const std::string& path, const Pickle& pickle, const PickleValue& state) const {
    const PickleValue* const count = pickle.find(state, "partition_count");
    std::vector<std::uint64_t> counts;
    if (count != nullptr && count->kind == Kind::kList) {
      counts = numbers_of(pickle, *count).value_or(counts);
    } else if (count != nullptr) {
      if (const std::optional<std::uint64_t> one = number_of(pickle, *count)) counts.push_back(*one);
    }
    if (counts.empty()) refuse_import(path, "it has no partition_count");
    for (const std::uint64_t one : counts) {
      if (one != counts.front())
        refuse_zero(path, "its groups are divided over different numbers of ranks",
                    "save a model without experts");
      if (one != optimizer_files_.size()) {
        refuse_import(path, "it is of " + std::to_string(one) + " ranks, and " +
                                std::to_string(optimizer_files_.size()) + " files are there");
      }
    }
  }

  // Elements after each parameter of each group that belong to none.
  void read_paddings(const std::string& path, const Pickle& pickle, const PickleValue& state) {
    const PickleValue* const lists = pickle.find(state, "param_alignment_paddings");
    if (lists == nullptr) return;
    for (const PickleValue& list : pickle.items(*lists)) {
      const std::optional<std::vector<std::uint64_t>> paddings = numbers_of(pickle, list);
      if (!paddings) refuse_import(path, "its param_alignment_paddings are not numbers, or too many");
      paddings_.push_back(*paddings);
    }
  }

  TorchTensor float_tensor(const TorchFile& torch, const std::string& path, const PickleValue& value) const {
    const std::optional<TorchTensor> found = torch.tensor(value);
    if (!found) refuse_import(path, "a group of its weights or moments is not a tensor");
    if (!found->float_type()) {
      refuse_zero(path, "it has weights or moments of the type " + found->type,
                  "weights and moments are fp32, bf16 or fp16");
    }
    return *found;
  }

  void read_moments(const TorchFile& torch, const std::string& path, const PickleValue& state,
                    std::vector<FlatGroup>& groups) {
    const Pickle& pickle = torch.pickle();
    if (const PickleValue* const step = pickle.find(state, "base_optimizer_state_step"))
      take_step(torch, path, *step);
    // The state_dict() of the optimizer; of an elastic checkpoint, a list with a dict for each group.
    const PickleValue* const base =
        pickle.find(state, stage_ < 3 ? "base_optimizer_state" : "optimizer_state_dict");
    if (base == nullptr) return;
    if (base->kind == Kind::kList) {
      const std::vector<PickleValue>& entries = pickle.items(*base);
      for (std::size_t group = 0; group < std::min(entries.size(), groups.size()); ++group)
        read_moments_of_group(torch, path, entries[group], groups[group]);
      return;
    }
    const PickleValue* const states = pickle.find(*base, "state");
    if (states == nullptr || states->kind != Kind::kDict) return;
    const std::vector<PickleValue>& entries = pickle.items(*states);
    for (std::size_t i = 0; i + 1 < entries.size(); i += 2) {
      const std::optional<std::uint64_t> group = number_of(pickle, entries[i]);
      if (!group || *group >= groups.size()) refuse_import(path, "it has moments of no group");
      read_moments_of_group(torch, path, entries[i + 1], groups[static_cast<std::size_t>(*group)]);
    }
    const PickleValue* const parameter_groups = pickle.find(*base, "param_groups");
    if (parameter_groups == nullptr) return;
    for (const PickleValue& group : pickle.items(*parameter_groups)) {
      if (const PickleValue* const step = pickle.find(group, "step")) take_step(torch, path, *step);
    }
  }

  void read_moments_of_group(const TorchFile& torch, const std::string& path, const PickleValue& state,
                             FlatGroup& group) {
    const Pickle& pickle = torch.pickle();
    if (pickle.find(state, "max_exp_avg_sq") != nullptr)
      refuse_zero(path, "its optimizer is AMSGrad, which forebay does not have", "use --weights-only");
    const PickleValue* m = pickle.find(state, "exp_avg");
    const PickleValue* const v = pickle.find(state, "exp_avg_sq");
    if (m == nullptr) {
      m = pickle.find(state, "momentum_buffer");
      if (m != nullptr && m->kind == Kind::kNone) m = nullptr;
      has_momentum_ |= m != nullptr;
    }
    if (m != nullptr) group.fields[1] = float_tensor(torch, path, *m);
    if (v != nullptr) group.fields[2] = float_tensor(torch, path, *v);
    has_v_ |= v != nullptr;
    check_state_of_group(torch, path, state, m != nullptr, v != nullptr);
    for (int field = 1; field < kFieldCount; ++field) {
      if (group.fields[field] && group.fields[field]->count < group.fields[0]->count)
        refuse_import(path, "a moment has fewer elements than its weights");
    }
    if (const PickleValue* const step = pickle.find(state, "step")) take_step(torch, path, *step);
  }

  // Moments of other optimizers would be taken for those of AdamW or Lion.
  void check_state_of_group(const TorchFile& torch, const std::string& path, const PickleValue& state,
                            bool has_m, bool has_v) const {
    if (has_v && !has_m) {
      refuse_zero(path, "its optimizer keeps exp_avg_sq and no exp_avg, as none of forebay's does",
                  "use --weights-only");
    }
    const std::vector<PickleValue>& entries = torch.pickle().items(state);
    for (std::size_t i = 0; state.kind == Kind::kDict && i + 1 < entries.size(); i += 2) {
      const std::string_view name = Pickle::text_of(entries[i]);
      const bool is_known =
          name == "exp_avg" || name == "exp_avg_sq" || name == "momentum_buffer" || name == "step";
      if (!is_known && torch.tensor(entries[i + 1])) {
        refuse_zero(path, "its optimizer keeps " + shown_value(name) + ", which forebay's do not",
                    "use --weights-only");
      }
    }
  }

  void take_step(const TorchFile& torch, const std::string& path, const PickleValue& value) {
    const std::optional<double> step = torch.scalar(value);
    if (!step || !(*step >= 0 && *step <= kMostSteps) || *step != std::floor(*step))
      refuse_import(path, "its step is not a whole number");
    const auto applied = static_cast<std::uint64_t>(*step);
    if (has_optimizer_steps_ && applied != steps_.applied) {
      refuse_zero(path, "its parameters took different numbers of steps", "use --weights-only");
    }
    has_optimizer_steps_ = true;
    steps_.applied = applied;
  }

  // At stages 1 and 2 a vector for each group, of all ranks; at stage 3 one for each rank, of all groups.
  void append(std::size_t file, const std::vector<FlatGroup>& groups, std::size_t rank) {
    if (stage_ < 3 && rank > 0 && groups.size() != vectors_.size())
      refuse_import(path_of(file), "it has another number of groups than the first");
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const std::size_t vector = stage_ < 3 ? group : rank;
      if (vector >= vectors_.size()) vectors_.resize(vector + 1);
      const std::uint64_t count = groups[group].fields[0]->count;
      if (stage_ < 3) check_part(path_of(file), vectors_[vector], count, rank);
      for (int field = 0; field < kFieldCount; ++field) {
        if (!vectors_[vector].fields[field].append(groups[group].fields[field], file, count))
          refuse_import(path_of(file), "its groups have too many elements");
      }
    }
  }

  struct Vectors {
    FlatVector fields[kFieldCount];
    std::uint64_t full_part = 0;   // Elements of the part of rank 0, at stages 1 and 2.
    std::uint64_t most_ahead = 0;  // That the part of the next rank may have.
  };

  // The parts of a group have the same length, but for the end of the group, after which nothing comes.
  static void check_part(const std::string& path, Vectors& vector, std::uint64_t count, std::size_t rank) {
    if (rank == 0) vector.full_part = vector.most_ahead = count;
    if (count > vector.most_ahead) {
      refuse_import(path, "its part of a group has " + std::to_string(count) +
                              " elements where those of the " + "ranks before leave room for " +
                              std::to_string(vector.most_ahead));
    }
    if (count < vector.full_part) vector.most_ahead = 0;
  }

  // --- the files of the model ---

  void read_model(std::size_t index) {
    if (stage_ == 3 && model_files_.size() != optimizer_files_.size())
      refuse_import(directory_, "the files *_model_states.pt of some ranks are missing");
    const std::size_t number = model_files_[index];
    const InputFile file(path_of(number));
    const TorchFile torch(file);
    const Pickle& pickle = torch.pickle();
    const PickleValue* const shapes = pickle.find(torch.root(), "param_shapes");
    if (shapes == nullptr || shapes->kind != Kind::kList)
      refuse_import(file.path(), "it has no param_shapes, which a checkpoint of ZeRO has");
    for (const PickleValue& group : pickle.items(*shapes))
      shapes_.push_back(shapes_of(file.path(), pickle, group));
    const PickleValue* const frozen = pickle.find(torch.root(), "frozen_param_shapes");
    if (frozen != nullptr && stage_ == 3) frozen_ = shapes_of(file.path(), pickle, *frozen);
    const std::optional<std::uint64_t> steps = step_number(file.path(), pickle, torch.root(), "global_steps");
    has_engine_steps_ = steps.has_value();
    steps_.attempted = steps.value_or(0);
    skipped_steps_ = step_number(file.path(), pickle, torch.root(), "skipped_steps").value_or(0);
    if (stage_ < 3) add_frozen_of_module(torch, number);
  }

  // Nothing if the file has no such number.
  std::optional<std::uint64_t> step_number(const std::string& path, const Pickle& pickle,
                                           const PickleValue& root, const char* name) const {
    const PickleValue* const value = pickle.find(root, name);
    if (value == nullptr || value->kind == Kind::kNone) return std::nullopt;
    const std::optional<std::uint64_t> number = number_of(pickle, *value);
    if (!number || static_cast<double>(*number) > kMostSteps)
      refuse_import(path, "its " + std::string(name) + " is not a number of steps");
    return number;
  }

  // Moments without a step would be taken for those before the first.
  void take_steps_of_engine() {
    const bool has_moments = std::any_of(tensors_.begin(), tensors_.end(),
                                         [](const Tensor& one) { return one.has_m || one.has_v; });
    if (has_moments && !has_engine_steps_)
      refuse_zero(directory_, "it has moments and no step", "use --weights-only");
    steps_.applied = steps_.attempted - std::min(steps_.attempted, skipped_steps_);
  }

  Shapes shapes_of(const std::string& path, const Pickle& pickle, const PickleValue& dict) const {
    Shapes shapes;
    const std::vector<PickleValue>& entries = pickle.items(dict);
    for (std::size_t i = 0; dict.kind == Kind::kDict && i + 1 < entries.size(); i += 2) {
      const std::optional<std::vector<std::uint64_t>> shape = numbers_of(pickle, entries[i + 1]);
      if (entries[i].kind != Kind::kString || !shape || !element_count(*shape) ||
          !pickle.may_copy(entries[i].length))
        refuse_import(path, "the shape of a parameter cannot be read");
      shapes.emplace_back(Pickle::text_of(entries[i]), *shape);
    }
    return shapes;
  }

  // At stages 1 and 2 the module's tensors are whole. Tensors that were not trained, and are neither buffers
  // nor other names of a parameter, are frozen.
  void add_frozen_of_module(const TorchFile& torch, std::size_t number) {
    const Pickle& pickle = torch.pickle();
    const PickleValue* const module = pickle.find(torch.root(), "module");
    if (module == nullptr || module->kind != Kind::kDict) return;
    std::set<std::string, std::less<>> known;
    for (const Shapes& group : shapes_) {
      for (const auto& [name, shape] : group) known.insert(name);
    }
    const auto add_names = [&](const char* key, std::size_t stride) {
      const PickleValue* const names = pickle.find(torch.root(), key);
      if (names == nullptr) return;
      const std::vector<PickleValue>& items = pickle.items(*names);
      for (std::size_t i = 0; i < items.size(); i += stride) known.emplace(Pickle::text_of(items[i]));
    };
    add_names("buffer_names", 1);
    add_names("shared_params", 2);
    const std::vector<PickleValue>& entries = pickle.items(*module);
    for (std::size_t i = 0; i + 1 < entries.size(); i += 2) {
      const std::string name(Pickle::text_of(entries[i]));
      if (name.empty() || known.contains(name)) continue;
      const std::optional<TorchTensor> found = torch.tensor(entries[i + 1]);
      if (!found) continue;  // Extra state of a module.
      if (found->count == 0) {
        without_elements_.push_back(name);
        continue;
      }
      const TorchTensor place = float_tensor(torch, path_of(number), entries[i + 1]);
      StoredTensor stored{{place.count}, {{number, place.at, *place.float_type(), {0}, {place.count}}}};
      add(name, place.shape, true, {std::move(stored), {}, {}});
    }
  }

  // At stage 3 each rank has a part of each frozen parameter in its own file.
  void add_frozen_parts() {
    std::vector<StoredTensor> stored(frozen_.size());
    for (std::size_t p = 0; p < frozen_.size(); ++p) stored[p].shape = {*element_count(frozen_[p].second)};
    for (std::size_t rank = 0; rank < model_files_.size() && !frozen_.empty(); ++rank) {
      const InputFile file(path_of(model_files_[rank]));
      const TorchFile torch(file);
      const Pickle& pickle = torch.pickle();
      const PickleValue* const fragments = pickle.find(torch.root(), "frozen_param_fragments");
      std::map<std::string_view, const PickleValue*> by_name;
      const std::vector<PickleValue>& entries =
          pickle.items(fragments == nullptr ? torch.root() : *fragments);
      for (std::size_t i = 0; fragments != nullptr && i + 1 < entries.size(); i += 2)
        by_name[Pickle::text_of(entries[i])] = &entries[i + 1];
      for (std::size_t p = 0; p < frozen_.size(); ++p) {
        const auto found = by_name.find(frozen_[p].first);
        if (found == by_name.end())
          refuse_import(file.path(), "it has no part of " + shown_value(frozen_[p].first));
        const std::uint64_t count = stored[p].shape.front();
        const auto [begin, part] = part_of(count, rank);
        if (part == 0) continue;
        const TorchTensor place = float_tensor(torch, file.path(), *found->second);
        if (place.count < part)
          refuse_import(file.path(), "its part of " + shown_value(frozen_[p].first) + " is too short");
        stored[p].boxes.push_back({model_files_[rank], place.at, *place.float_type(), {begin}, {part}});
      }
    }
    for (std::size_t p = 0; p < frozen_.size(); ++p) {
      // Parameters without elements are among the frozen, and have nothing to import.
      if (stored[p].shape.front() == 0) {
        without_elements_.push_back(frozen_[p].first);
      } else {
        add(frozen_[p].first, frozen_[p].second, true, {std::move(stored[p]), {}, {}});
      }
    }
  }

  // The first element and the number of elements of a parameter that a rank has at stage 3.
  std::pair<std::uint64_t, std::uint64_t> part_of(std::uint64_t count, std::size_t rank) const {
    const std::uint64_t part = part_count(count);
    if (part == 0 || rank > count / part) return {count, 0};
    const std::uint64_t begin = rank * part;
    return {begin, std::min(part, count - begin)};
  }
  std::uint64_t part_count(std::uint64_t count) const {
    const std::uint64_t ranks = optimizer_files_.size();
    return count / ranks + (count % ranks != 0 ? 1 : 0);
  }

  // --- the parameters ---

  void add_trained() {
    if (stage_ < 3) {
      if (shapes_.size() != vectors_.size())
        refuse_import(directory_, "the model has other groups of parameters than the optimizer");
      for (std::size_t group = 0; group < shapes_.size(); ++group) add_group(group);
      return;
    }
    std::uint64_t at = 0;
    for (const Shapes& group : shapes_) {
      for (const auto& [name, shape] : group) {
        const std::uint64_t count = *element_count(shape);
        std::vector<StoredTensor> stored(kFieldCount);
        for (std::size_t rank = 0; rank < vectors_.size(); ++rank) {
          const auto [begin, part] = part_of(count, rank);
          find(vectors_[rank], name, at, part, begin, stored);
        }
        add_trained(name, shape, std::move(stored));
        at += part_count(count);
      }
    }
    for (const Vectors& rank : vectors_) check_end(at, rank.fields[0].count(), 1);
  }

  // Elements that no parameter takes are of parameters that the model's file does not name. Groups of stages
  // 1 and 2 end with padding to a multiple of `alignment`.
  void check_end(std::uint64_t taken, std::uint64_t count, std::uint64_t alignment) const {
    const auto blocks = [&](std::uint64_t n) { return n / alignment + (n % alignment != 0 ? 1 : 0); };
    if (blocks(taken) == blocks(count)) return;
    refuse_import(directory_, "its parameters take " + std::to_string(taken) + " of the " +
                                  std::to_string(count) + " elements of a flat group");
  }

  void add_group(std::size_t group) {
    if (!paddings_.empty() && (group >= paddings_.size() || paddings_[group].size() != shapes_[group].size()))
      refuse_import(directory_, "its param_alignment_paddings are not those of its parameters");
    std::uint64_t at = 0;
    for (std::size_t p = 0; p < shapes_[group].size(); ++p) {
      const auto& [name, shape] = shapes_[group][p];
      const std::uint64_t count = *element_count(shape);
      std::vector<StoredTensor> stored(kFieldCount);
      find(vectors_[group], name, at, count, 0, stored);
      add_trained(name, shape, std::move(stored));
      at += count;
      if (!paddings_.empty() && __builtin_add_overflow(at, paddings_[group][p], &at))
        refuse_import(directory_, "its param_alignment_paddings are too large");
    }
    check_end(at, vectors_[group].fields[0].count(), 2 * std::uint64_t{optimizer_files_.size()});
  }

  // Adds the places of elements [at, at + count) to the boxes of all fields, from element `begin` on.
  void find(const Vectors& vectors, const std::string& name, std::uint64_t at, std::uint64_t count,
            std::uint64_t begin, std::vector<StoredTensor>& stored) {
    const std::uint64_t all = vectors.fields[0].count();
    if (at > all || count > all - at) {
      refuse_zero(directory_,
                  "its flat groups end before " + shown_value(name) +
                      ", so they were swapped to files, or are not whole",
                  "save it without offload to NVMe");
    }
    for (std::size_t field = 0; field < kFieldCount; ++field)
      missing_[field] += vectors.fields[field].find(at, count, begin, stored[field].boxes);
  }

  void add_trained(const std::string& name, const std::vector<std::uint64_t>& shape,
                   std::vector<StoredTensor> stored) {
    const std::uint64_t count = *element_count(shape);
    for (std::size_t field = 0; field < kFieldCount; ++field) {
      const std::uint64_t missing = std::exchange(missing_[field], 0);
      if (missing > 0 && missing < count)
        refuse_import(directory_, "some ranks have no moments of " + shown_value(name));
      if (missing > 0) stored[field].boxes.clear();
      stored[field].shape = {count};
    }
    add(name, shape, false, std::move(stored));
  }

  void add(const std::string& name, const std::vector<std::uint64_t>& shape, bool frozen,
           std::vector<StoredTensor> stored) {
    if (!names_.insert(name).second) refuse_import(directory_, "it has " + shown_value(name) + " twice");
    const std::uint64_t count = *element_count(shape);
    if (count == 0) refuse_import(directory_, shown_value(name) + " has no elements");
    tensors_.push_back({.name = name,
                        .shape = shape,
                        .count = count,
                        .frozen = frozen,
                        .has_m = !stored[1].boxes.empty(),
                        .has_v = !stored[2].boxes.empty()});
    for (StoredTensor& field : stored) {
      if (!field.boxes.empty()) check_boxes(field, name, directory_);
    }
    stored_.push_back(std::move(stored));
  }

  const std::string directory_;
  const bool weights_alone_;
  InputFiles files_;
  std::vector<std::size_t> optimizer_files_;  // By rank.
  std::vector<std::size_t> model_files_;
  int stage_ = 0;  // 2: also stage 1.
  std::vector<std::vector<std::uint64_t>> paddings_;
  std::vector<Vectors> vectors_;
  std::vector<Shapes> shapes_;  // By group.
  Shapes frozen_;
  Steps steps_;
  std::uint64_t skipped_steps_ = 0;
  bool has_optimizer_steps_ = false;
  bool has_engine_steps_ = false;
  bool has_momentum_ = false;
  bool has_v_ = false;
  std::uint64_t missing_[kFieldCount] = {};
  std::set<std::string> names_;
  std::vector<Tensor> tensors_;
  std::vector<std::vector<StoredTensor>> stored_;  // By tensor and field.
};

}  // namespace

bool is_deepspeed(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return false;
  if (std::filesystem::exists(path + "/latest", error)) return true;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    if (std::string_view(name).ends_with("_optim_states.pt") ||
        std::string_view(name).ends_with("_model_states.pt"))
      return true;
  }
  return false;
}

std::unique_ptr<TensorSource> open_deepspeed(const std::string& path, bool weights_alone) {
  return std::make_unique<ZeroCheckpoint>(path, weights_alone);
}

}  // namespace forebay
