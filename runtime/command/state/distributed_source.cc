// Distributed checkpoints of PyTorch: .metadata, a pickle that lists all tensors and the boxes that they are
// divided into, and files __RANK_NUMBER.distcp, in which each box is a file of torch.save().
//
// Source: PyTorch 2.15, torch/distributed/checkpoint: metadata.py, filesystem.py, state_dict.py.
#include <algorithm>
#include <cmath>
#include <filesystem>
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

// About 1.5 million boxes. Larger: a damaged file takes more memory, up to 12 times as much.
constexpr std::uint64_t kMostMetadataBytes = 256u << 20;
constexpr PickleLimits kMetadataLimits{.values = std::size_t{1} << 26, .containers = std::size_t{1} << 24};
constexpr std::uint64_t kDistributedPieceCount = 1u << 20;
constexpr double kMostDistributedSteps = 9007199254740992.0;
constexpr std::string_view kMetadataName = "/.metadata";
constexpr std::string_view kStatePart = "state.";
constexpr std::string_view kMomentEndings[] = {".exp_avg", ".momentum_buffer", ".exp_avg_sq"};

[[noreturn]] void refuse_distributed(const std::string& path, const std::string& finding,
                                     const std::string& remedy) {
  throw Error(StatusCode::kUnsupported, shown_path(path) + " cannot be imported: " + finding + "; " + remedy);
}

std::string metadata_path(const std::string& path) {
  return std::string_view(path).ends_with(kMetadataName) ? path : path + std::string(kMetadataName);
}

// Where `part` ("state.") begins for the first time in `key`, at its start or after a dot; npos if nowhere.
std::size_t find_part(std::string_view key, std::string_view part) {
  std::size_t at = key.find(part);
  while (at != key.npos && at > 0 && key[at - 1] != '.') at = key.find(part, at + 1);
  return at;
}

// Where a value of an optimizer's state belongs: "optim." + "state." + "layer.weight" + ".exp_avg".
struct StateKey {
  std::string prefix;  // "optim."
  std::string name;
  std::string ending;
};

std::optional<StateKey> state_key(std::string_view key) {
  const std::size_t at = find_part(key, kStatePart);
  if (at == key.npos) return std::nullopt;
  const std::string_view rest = key.substr(at + kStatePart.size());
  for (const std::string_view ending : {kMomentEndings[0], kMomentEndings[1], kMomentEndings[2],
                                        std::string_view(".step"), std::string_view(".max_exp_avg_sq")}) {
    if (rest.size() > ending.size() && rest.ends_with(ending)) {
      return StateKey{std::string(key.substr(0, at)),
                      std::string(rest.substr(0, rest.size() - ending.size())), std::string(ending)};
    }
  }
  return std::nullopt;
}

// Buffers that count or mask, which are no weights.
bool is_counter(const std::string& type) {
  return type.find("int") != std::string::npos || type == "torch.bool";
}

bool is_digits(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

class DistributedCheckpoint : public TensorSource {
 public:
  DistributedCheckpoint(const std::string& path, bool weights_alone)
      : metadata_path_(metadata_path(path)),
        directory_(metadata_path_.substr(0, metadata_path_.size() - kMetadataName.size())) {
    const InputFile file(metadata_path_);
    if (file.bytes() > kMostMetadataBytes) refuse("it is too long");
    const std::string text = file.text(0, file.bytes());
    const Pickle pickle = read_pickle(metadata_path_, text, kMetadataLimits);
    read_places(pickle);
    read_tensors(pickle);
    sort_keys(weights_alone);
    for (const std::string& key : weights_) add(key);
    if (tensors_.empty()) refuse("it has no tensors of fp32, bf16 or fp16");
    find_prefixes(pickle);
  }

  const std::vector<Tensor>& tensors() const override { return tensors_; }
  Steps steps() const override { return {steps_.value_or(0), steps_.value_or(0)}; }
  std::string optimizer() const override { return has_v_ ? "adamw" : has_momentum_ ? "sgd" : "lion"; }
  std::vector<std::string> prefixes() const override { return prefixes_; }
  const std::vector<std::string>& left_out() const override { return left_out_; }

  void read(std::size_t tensor, SavedField field,
            const std::function<void(Span<const float>)>& visit) override {
    read_boxes(stored_.at(tensor).at(static_cast<std::size_t>(field)), files_, kDistributedPieceCount, visit);
  }

 private:
  // Bytes of a .distcp file: a file of torch.save().
  struct Item {
    std::size_t file = 0;
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
  };
  struct Chunk {
    std::vector<std::uint64_t> offsets;
    std::vector<std::uint64_t> sizes;
  };
  struct Listed {
    bool is_tensor = false;
    std::string type;  // "torch.float32".
    std::vector<std::uint64_t> shape;
    std::vector<Chunk> chunks;
  };
  struct Moments {
    std::string m, v;  // Keys; empty where there is none.
  };

  [[noreturn]] void refuse(const std::string& finding) const { refuse_import(metadata_path_, finding); }

  // The attribute of an object. Errors: throws kCorruption if there is none.
  const PickleValue& need(const Pickle& pickle, const PickleValue& object, const char* name) const {
    const PickleValue* const found = pickle.attribute(object, name);
    if (found == nullptr) refuse("an object in it has no " + std::string(name));
    return *found;
  }
  std::vector<std::uint64_t> need_numbers(const Pickle& pickle, const PickleValue& object,
                                          const char* name) const {
    const std::optional<std::vector<std::uint64_t>> numbers = numbers_of(pickle, need(pickle, object, name));
    if (!numbers) refuse("its " + std::string(name) + " are not numbers, or too many");
    return *numbers;
  }

  // --- .metadata ---

  void read_places(const Pickle& pickle) {
    const PickleValue* const places = pickle.attribute(pickle.root(), "storage_data");
    if (places == nullptr || places->kind != Kind::kDict)
      refuse("it is not the metadata of a distributed checkpoint");
    std::map<std::string, std::size_t, std::less<>> numbers;
    const std::vector<PickleValue>& entries = pickle.items(*places);
    for (std::size_t i = 0; i + 1 < entries.size(); i += 2) {
      const std::string key(Pickle::text_of(need(pickle, entries[i], "fqn")));
      const PickleValue* const offset = pickle.attribute(entries[i], "offset");
      std::vector<std::uint64_t> offsets;
      if (offset != nullptr) offsets = numbers_of(pickle, *offset).value_or(offsets);
      if (!pickle.may_copy(key.size())) refuse("it names values too often");
      const std::string name(Pickle::text_of(need(pickle, entries[i + 1], "relative_path")));
      if (name.empty() || name == ".." || name.find('/') != std::string::npos ||
          name.find('\0') != std::string::npos)
        refuse("it names a file outside of its directory");
      const PickleValue* const transforms = pickle.attribute(entries[i + 1], "transform_descriptors");
      if (transforms != nullptr && !pickle.items(*transforms).empty()) {
        refuse_distributed(metadata_path_, shown_value(key) + " is compressed or transformed",
                           "save it without extensions");
      }
      const std::optional<std::uint64_t> begin = number_of(pickle, need(pickle, entries[i + 1], "offset"));
      const std::optional<std::uint64_t> bytes = number_of(pickle, need(pickle, entries[i + 1], "length"));
      if (!begin || !bytes) refuse("the place of " + shown_value(key) + " is not a number");
      const auto [number, is_new] = numbers.try_emplace(name, files_.size());
      if (is_new) files_.add(directory_ + "/" + name);
      listed_bytes_.resize(files_.size());
      std::uint64_t& listed = listed_bytes_[number->second];
      if (__builtin_add_overflow(listed, *bytes, &listed)) listed = ~std::uint64_t{0};
      items_[key].push_back({offsets, {number->second, *begin, *bytes}});
    }
    for (auto& [key, items] : items_) {
      std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    }
  }

  void read_tensors(const Pickle& pickle) {
    const PickleValue* const list = pickle.attribute(pickle.root(), "state_dict_metadata");
    if (list == nullptr || list->kind != Kind::kDict)
      refuse("it is not the metadata of a distributed checkpoint");
    const std::vector<PickleValue>& entries = pickle.items(*list);
    for (std::size_t i = 0; i + 1 < entries.size(); i += 2) {
      const std::string key(Pickle::text_of(entries[i]));
      if (key.empty()) refuse("one of its tensors has no name");
      Listed& listed = listed_[key];
      const PickleValue* const chunks = pickle.attribute(entries[i + 1], "chunks");
      if (chunks == nullptr) continue;  // Not a tensor.
      listed.is_tensor = true;
      listed.shape = need_numbers(pickle, entries[i + 1], "size");
      const PickleValue* const properties = pickle.state_of(need(pickle, entries[i + 1], "properties"));
      if (properties != nullptr && properties->kind == Kind::kList && !pickle.items(*properties).empty())
        listed.type = pickle.name_of(pickle.items(*properties).front());
      for (const PickleValue& chunk : pickle.items(*chunks)) {
        listed.chunks.push_back(
            {need_numbers(pickle, chunk, "offsets"), need_numbers(pickle, chunk, "sizes")});
        if (listed.chunks.size() > kMostBoxes) refuse(shown_value(key) + " has too many parts");
      }
    }
  }

  // --- names ---

  bool is_float(const std::string& key) const {
    const std::string& type = listed_.at(key).type;
    return type == "torch.float32" || type == "torch.bfloat16" || type == "torch.float16";
  }

  // Which keys are weights, and which are moments of which parameter.
  void sort_keys(bool weights_alone) {
    std::set<std::string, std::less<>> optimizers;  // "optim."
    std::vector<std::string> step_keys;
    for (const auto& [key, listed] : listed_) {
      const std::optional<StateKey> found = state_key(key);
      if (!found) continue;
      optimizers.insert(found->prefix);
      if (weights_alone) continue;
      if (found->ending == ".max_exp_avg_sq")
        refuse_distributed(metadata_path_, "its optimizer is AMSGrad, which forebay does not have",
                           "use --weights-only");
      if (is_digits(found->name)) {
        refuse_distributed(
            metadata_path_,
            "the moments have numbers in place of the names of parameters (" + shown_value(key) + ")",
            "save what torch.distributed.checkpoint.state_dict.get_state_dict() returns, or use "
            "--weights-only");
      }
      if (found->ending == ".step") {
        step_keys.push_back(key);
        continue;
      }
      if (!listed.is_tensor || !is_float(key)) {
        refuse_distributed(metadata_path_, shown_value(key) + " is not a tensor of fp32, bf16 or fp16",
                           "use --weights-only");
      }
      Moments& moments = moments_[found->name];
      std::string& place = found->ending == ".exp_avg_sq" ? moments.v : moments.m;
      if (!place.empty()) {
        refuse_distributed(metadata_path_, "it has two optimizers with " + shown_value(found->name),
                           "use --weights-only");
      }
      place = key;
      has_v_ |= found->ending == ".exp_avg_sq";
      has_momentum_ |= found->ending == ".momentum_buffer";
    }
    for (const auto& [key, listed] : listed_) {
      const auto is_in = [&, key = std::string_view(key)](std::string_view part) {
        const std::size_t at = find_part(key, part);
        return at != key.npos && optimizers.contains(key.substr(0, at));
      };
      const bool is_state = is_in(kStatePart);
      if (is_state && !weights_alone && !state_key(key)) {
        refuse_distributed(metadata_path_,
                           "its optimizer keeps " + shown_value(key) + ", which forebay's do not",
                           "use --weights-only");
      }
      if (!listed.is_tensor || is_state || is_in("param_groups.")) continue;
      if (is_float(key)) {
        weights_.push_back(key);
      } else if (!is_counter(listed.type)) {
        left_out_.push_back(key);
      }
    }
    for (const auto& [name, moments] : moments_) check_moments(name, moments);
    for (const std::string& key : step_keys) take_step(key);
    if (!moments_.empty() && !steps_)
      refuse_distributed(metadata_path_, "it has moments and no step", "use --weights-only");
  }

  void check_moments(const std::string& name, const Moments& moments) const {
    if (moments.m.empty() && !moments.v.empty()) {
      refuse_distributed(metadata_path_,
                         "its optimizer keeps exp_avg_sq of " + shown_value(name) +
                             " and no exp_avg, as none of forebay's does",
                         "use --weights-only");
    }
  }

  // The prefixes that join the names of all moments to names of weights; without moments, the keys that the
  // weights were saved under.
  void find_prefixes(const Pickle& pickle) {
    std::set<std::string> found;
    if (!moments_.empty()) {
      const std::set<std::string, std::less<>> weights(weights_.begin(), weights_.end());
      const std::string& name = moments_.begin()->first;
      for (const std::string& key : weights_) {
        if (!key.ends_with(name) || (key.size() > name.size() && key[key.size() - name.size() - 1] != '.'))
          continue;
        const std::string prefix = key.substr(0, key.size() - name.size());
        const auto has = [&](const auto& entry) { return weights.contains(prefix + entry.first); };
        if (std::all_of(moments_.begin(), moments_.end(), has)) found.insert(prefix);
      }
      if (found.empty()) {
        refuse_distributed(metadata_path_, "it has moments of " + shown_value(name) + " and no such weights",
                           "save the model with the optimizer, or use --weights-only");
      }
    } else if (const PickleValue* const paths = pickle.attribute(pickle.root(), "planner_data")) {
      const std::set<std::string, std::less<>> weights(weights_.begin(), weights_.end());
      const std::vector<PickleValue>& entries = pickle.items(*paths);
      for (std::size_t i = 0; paths->kind == Kind::kDict && i + 1 < entries.size(); i += 2) {
        if (!weights.contains(Pickle::text_of(entries[i]))) continue;
        const std::vector<PickleValue>& path = pickle.items(entries[i + 1]);
        found.insert(path.size() > 1 ? std::string(Pickle::text_of(path.front())) + "." : "");
      }
    }
    prefixes_.assign(found.begin(), found.end());
    attach_moments();
  }

  // Moments that several prefixes join to weights are read once.
  void attach_moments() {
    std::map<std::string_view, std::size_t> tensors;
    for (std::size_t i = 0; i < tensors_.size(); ++i) tensors.emplace(tensors_[i].name, i);
    for (const auto& [name, moments] : moments_) {
      const std::string* const keys[] = {&moments.m, &moments.v};
      std::optional<StoredTensor> places[2];
      for (const std::string& prefix : prefixes_) {
        const auto found = tensors.find(prefix + name);
        if (found == tensors.end()) continue;
        Tensor& to = tensors_[found->second];
        to.frozen = false;
        for (std::size_t field = 0; field < 2; ++field) {
          if (keys[field]->empty()) continue;
          if (listed_.at(*keys[field]).shape != listed_.at(to.name).shape)
            refuse(shown_value(*keys[field]) + " has another shape than its parameter");
          if (!places[field]) places[field] = place(*keys[field]);
          stored_[found->second][field + 1] = *places[field];
          (field == 0 ? to.has_m : to.has_v) = true;
        }
      }
    }
  }

  // --- the files ---

  const Item& item_of(const std::string& key, const std::vector<std::uint64_t>& offsets) const {
    const auto items = items_.find(key);
    if (items == items_.end()) refuse("it has no place of " + shown_value(key));
    const auto found =
        std::lower_bound(items->second.begin(), items->second.end(), offsets,
                         [](const auto& item, const auto& wanted) { return item.first < wanted; });
    if (found == items->second.end() || found->first != offsets)
      refuse("it has no place of a part of " + shown_value(key));
    return found->second;
  }

  // So all items together are read once, however many name the same bytes.
  const InputFile& open(const Item& item) {
    const InputFile& file = files_.open(item.file);
    if (listed_bytes_[item.file] > file.bytes()) {
      refuse_import(file.path(), "it has " + std::to_string(file.bytes()) + " bytes, and the parts that " +
                                     shown_path(metadata_path_) + " places in it have more together");
    }
    return file;
  }

  StoredTensor place(const std::string& key) {
    const Listed& listed = listed_.at(key);
    StoredTensor stored{listed.shape, {}};
    for (const Chunk& chunk : listed.chunks) {
      const Item& item = item_of(key, chunk.offsets);
      const InputFile& file = open(item);
      const TorchFile torch(file, item.begin, item.bytes);
      const std::optional<TorchTensor> found = torch.tensor(torch.root());
      if (!found || found->shape != chunk.sizes || !found->float_type())
        refuse_import(file.path(),
                      "the part of " + shown_value(key) + " in it is not the one that is listed");
      stored.boxes.push_back({item.file, found->at, *found->float_type(), chunk.offsets, chunk.sizes});
    }
    check_boxes(stored, key, metadata_path_);
    return stored;
  }

  // A tensor with one element, or a number.
  void take_step(const std::string& key) {
    const Listed& listed = listed_.at(key);
    const std::vector<std::uint64_t> offsets =
        listed.chunks.empty() ? std::vector<std::uint64_t>() : listed.chunks.front().offsets;
    const Item& item = item_of(key, offsets);
    const InputFile& file = open(item);
    const TorchFile torch(file, item.begin, item.bytes);
    const std::optional<double> step = torch.scalar(torch.root());
    if (!step || !(*step >= 0 && *step <= kMostDistributedSteps) || *step != std::floor(*step))
      refuse_import(file.path(), shown_value(key) + " is not a whole number");
    const auto applied = static_cast<std::uint64_t>(*step);
    if (steps_ && *steps_ != applied) {
      refuse_distributed(metadata_path_, "its parameters took different numbers of steps",
                         "use --weights-only for the weights alone");
    }
    steps_ = applied;
  }

  void add(const std::string& key) {
    const Listed& listed = listed_.at(key);
    const std::optional<std::uint64_t> count = element_count(listed.shape);
    if (!count) refuse("the shape of " + shown_value(key) + " is too large");
    if (*count == 0) return without_elements_.push_back(key);
    tensors_.push_back({.name = key, .shape = listed.shape, .count = *count, .frozen = !moments_.empty()});
    stored_.push_back({place(key), {}, {}});
  }

  const std::string metadata_path_;
  const std::string directory_;
  InputFiles files_;
  std::vector<std::uint64_t> listed_bytes_;  // By file: of all its items.
  std::map<std::string, std::vector<std::pair<std::vector<std::uint64_t>, Item>>> items_;  // By offsets.
  std::map<std::string, Listed> listed_;
  std::vector<std::string> weights_;        // Keys.
  std::vector<std::string> left_out_;       // Keys.
  std::map<std::string, Moments> moments_;  // By name of the parameter.
  std::optional<std::uint64_t> steps_;
  bool has_v_ = false;
  bool has_momentum_ = false;
  std::vector<std::string> prefixes_;
  std::vector<Tensor> tensors_;
  std::vector<std::vector<StoredTensor>> stored_;  // By tensor and field.
};

}  // namespace

bool is_distributed(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(metadata_path(path), error);
}

std::unique_ptr<TensorSource> open_distributed(const std::string& path, bool weights_alone) {
  return std::make_unique<DistributedCheckpoint>(path, weights_alone);
}

}  // namespace forebay
