#include "runtime/command/state/tensor_source.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "forebay/data_type.h"
#include "forebay/error.h"
#include "forebay/text.h"
#include "runtime/command/state/input_file.h"
#include "runtime/command/state/stored_tensor.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::uint64_t kMostHeaderBytes = 100u << 20;  // As the library of safetensors has it.
constexpr int kMostDepth = 16;
constexpr std::uint64_t kPieceCount = 1u << 20;

// Errors: throws Error(kCorruption) if brackets are nested too deep.
std::string json_text(const InputFile& file, std::uint64_t offset, std::uint64_t bytes) {
  std::string text = file.text(offset, bytes);
  if (is_nested_deeper(text, kMostDepth)) refuse_import(file.path(), "its brackets are nested too deep");
  return text;
}

std::uint64_t number_of(const Json& json) {
  return json.get_ref<const Json::number_unsigned_t&>();
}

std::optional<DataType> type_of(const std::string& name) {
  if (name == "F32") return DataType::kFloat32;
  if (name == "BF16") return DataType::kBfloat16;
  if (name == "F16") return DataType::kFloat16;
  return std::nullopt;
}

class Safetensors : public TensorSource {
 public:
  // All tensors of these files.
  explicit Safetensors(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) add_file(files_.add(path));
    for (auto& [name, tensor] : by_name_) {
      if (tensor.count == 0) {
        without_elements_.push_back(name);
        continue;
      }
      tensors_.push_back({name, tensor.shape, tensor.count});
      places_.push_back(tensor);
    }
    refuse_shared_bytes();
  }

  // Errors: throws Error(kCorruption) for a tensor of the index `path` that its file does not have.
  void check_index(const std::string& path, const std::map<std::string, std::string>& file_of) const {
    for (const auto& [name, file] : file_of) {
      const auto found = by_name_.find(name);
      if (found == by_name_.end() || files_.path(found->second.file) != file)
        refuse_import(path, "the tensor " + shown_value(name) + " is not in " + shown_path(file));
    }
  }

  const std::vector<Tensor>& tensors() const override { return tensors_; }

  void read(std::size_t tensor, SavedField, const std::function<void(Span<const float>)>& visit) override {
    const Place& place = places_.at(tensor);
    const std::uint64_t width = element_bytes(place.type);
    std::vector<float> piece(std::min(place.count, kPieceCount));
    std::vector<std::byte> stored(piece.size() * width);
    for (std::uint64_t done = 0; done < place.count; done += piece.size()) {
      piece.resize(std::min(place.count - done, kPieceCount));
      files_.open(place.file).read_at(place.at + done * width, stored.data(), piece.size() * width);
      widen_elements(place.type, stored.data(), piece.size(), piece.data());
      visit(Span<const float>(piece.data(), piece.size()));
    }
  }

 private:
  struct Place {
    std::size_t file = 0;
    std::uint64_t at = 0;  // Bytes from the start of the file.
    DataType type = DataType::kFloat32;
    std::vector<std::uint64_t> shape;
    std::uint64_t count = 0;
  };

  void add_file(std::size_t number) {
    const InputFile& file = files_.open(number);
    std::uint64_t length = 0;
    if (file.bytes() < sizeof(length)) refuse_import(file.path(), "it is too short");
    file.read_at(0, &length, sizeof(length));
    if (length > std::min(file.bytes() - sizeof(length), kMostHeaderBytes))
      refuse_import(file.path(), "its header is too long");
    const std::uint64_t data_at = sizeof(length) + length;
    try {
      const std::string text = json_text(file, sizeof(length), length);
      const Json header = Json::parse(text);
      // A parsed object has the last one of two entries of a name.
      if (const auto name = header.is_object() ? repeated_name(text, header.size()) : std::nullopt)
        refuse_import(file.path(), "it has " + shown_value(*name) + " twice");
      for (const auto& [name, entry] : header.items()) {
        if (name != "__metadata__") add_tensor(file, number, data_at, name, entry);
      }
    } catch (const Json::exception&) {
      refuse_import(file.path(), "its header cannot be read");
    }
  }

  void add_tensor(const InputFile& file, std::size_t number, std::uint64_t data_at, const std::string& name,
                  const Json& entry) {
    const auto type_name = entry.at("dtype").get<std::string>();
    const std::optional<DataType> type = type_of(type_name);
    if (!type) {
      throw Error(StatusCode::kUnsupported, shown_path(file.path()) + " has the tensor " + shown_value(name) +
                                                " of type " + shown_value(type_name) +
                                                "; weights are F32, BF16 or F16: leave other tensors out");
    }
    Place place{.file = number, .type = *type, .count = 1};
    for (const Json& extent : entry.at("shape")) {
      place.shape.push_back(number_of(extent));
      if (__builtin_mul_overflow(place.count, place.shape.back(), &place.count))
        refuse_import(file.path(), "the shape of " + shown_value(name) + " is too large");
    }
    const std::uint64_t begin = number_of(entry.at("data_offsets").at(0));
    const std::uint64_t end = number_of(entry.at("data_offsets").at(1));
    const std::uint64_t width = element_bytes(*type);
    if (begin > end || end > file.bytes() - data_at || (end - begin) % width != 0 ||
        (end - begin) / width != place.count)
      refuse_import(file.path(), "the place of " + shown_value(name) + " is not that of its elements");
    place.at = data_at + begin;
    if (!by_name_.emplace(name, std::move(place)).second)
      refuse_import(file.path(), "another file has " + shown_value(name) + " too");
  }

  void refuse_shared_bytes() const {
    std::vector<std::size_t> order(places_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto start = [&](std::size_t i) { return std::pair(places_[i].file, places_[i].at); };
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return start(a) < start(b); });
    for (std::size_t i = 1; i < order.size(); ++i) {
      const Place& place = places_[order[i - 1]];
      if (start(order[i]) < std::pair(place.file, place.at + place.count * element_bytes(place.type)))
        refuse_import(files_.path(place.file), "its tensors " + shown_value(tensors_[order[i - 1]].name) +
                                                   " and " + shown_value(tensors_[order[i]].name) +
                                                   " share bytes");
    }
  }

  InputFiles files_;
  std::map<std::string, Place> by_name_;
  std::vector<Tensor> tensors_;
  std::vector<Place> places_;
};

// The file of each tensor of an index.
std::map<std::string, std::string> files_of_index(const std::string& path) {
  const InputFile index(path);
  if (index.bytes() > kMostHeaderBytes) refuse_import(path, "it is too long for an index");
  std::map<std::string, std::string> files;
  try {
    const Json json = Json::parse(json_text(index, 0, index.bytes()));
    for (const auto& [tensor, file] : json.at("weight_map").items()) {
      const auto name = file.get<std::string>();
      if (name.find('/') != std::string::npos) refuse_import(path, "it names a file in another directory");
      files[tensor] = (fs::path(path).parent_path() / name).string();
    }
  } catch (const Json::exception&) {
    refuse_import(path, "it is not an index");
  }
  return files;
}

std::unique_ptr<TensorSource> open_index(const std::string& path) {
  const std::map<std::string, std::string> file_of = files_of_index(path);
  std::set<std::string> files;
  for (const auto& [tensor, file] : file_of) files.insert(file);
  auto source = std::make_unique<Safetensors>(std::vector<std::string>(files.begin(), files.end()));
  source->check_index(path, file_of);
  return source;
}

}  // namespace

const std::vector<std::string>& TensorSource::left_out() const {
  static const std::vector<std::string> kNone;
  return kNone;
}

std::unique_ptr<TensorSource> open_safetensors(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    const std::string file = path + "/model.safetensors";
    const std::string index = file + ".index.json";
    // In this order, as transformers has it.
    return open_safetensors(fs::exists(file, error) || !fs::exists(index, error) ? file : index);
  }
  if (std::string_view(path).ends_with(".json")) return open_index(path);
  return std::make_unique<Safetensors>(std::vector{path});
}

}  // namespace forebay
