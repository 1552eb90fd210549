#include "output/weight_files.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "forebay/error.h"
#include "forebay/text.h"
#include "output/json_file.h"
#include "output/output_file.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

std::uint64_t bytes_of(const TensorHeader& tensor) {
  std::uint64_t bytes = sizeof(float);
  for (const std::size_t extent : tensor.shape) bytes *= extent;
  return bytes;
}

}  // namespace

WeightFiles::WeightFiles(const std::string& path) {
  std::error_code error;
  const std::string single = path + "/" + kSingleFile, index = path + "/" + kIndexFile;
  if (!fs::is_directory(path, error)) {
    add_file(path);
  } else if (fs::exists(single, error)) {
    add_file(single);
  } else if (fs::exists(index, error)) {
    read_index(path, index);
  } else {
    throw Error(StatusCode::kIoError, shown_path(path) + " has neither " + kSingleFile + " nor " +
                                          kIndexFile +
                                          "; give a directory with a model in the safetensors format");
  }
}

void WeightFiles::add_file(const std::string& path) {
  readers_.push_back(std::make_unique<SafetensorsReader>(path));
  for (const auto& [name, tensor] : readers_.back()->tensors()) {
    if (!reader_of_.emplace(name, readers_.back().get()).second) {
      throw Error(StatusCode::kCorruption,
                  shown_path(path) + " has tensor " + shown_value(name) +
                      ", which another file of the model has too; export or download the model again");
    }
  }
}

void WeightFiles::read_index(const std::string& directory, const std::string& path) {
  const auto refuse = [&](const std::string& found) {
    throw Error(StatusCode::kCorruption, shown_path(path) + " is not a valid index of weights: " + found +
                                             "; export or download the model again");
  };
  const nlohmann::json root = read_json(path);
  if (!root.contains("weight_map") || !root["weight_map"].is_object()) refuse("it has no weight_map");
  std::map<std::string, std::string> file_of;
  std::vector<std::string> files;
  for (const auto& [name, file] : root["weight_map"].items()) {
    if (!file.is_string()) refuse("tensor " + shown_value(name) + " has no file");
    const auto word = file.get<std::string>();
    // A name with a folder could lead out of the directory.
    if (word.empty() || word == ".." || word.find('/') != std::string::npos ||
        word.find('\0') != std::string::npos)
      refuse("tensor " + shown_value(name) + " lies in " + shown_value(word) + ", which is no file name");
    file_of[name] = word;
    if (std::find(files.begin(), files.end(), word) == files.end()) files.push_back(word);
  }
  for (const std::string& file : files) add_file(directory + "/" + file);
  for (const auto& [name, file] : file_of) {
    if (find(name) == nullptr)
      refuse("tensor " + shown_value(name) + " is not in " + shown_value(file) + ", where it should be");
  }
}

const Tensor* WeightFiles::find(const std::string& name) const {
  const auto place = reader_of_.find(name);
  return place == reader_of_.end() ? nullptr : &place->second->tensors().at(name);
}

std::vector<std::string> WeightFiles::names() const {
  std::vector<std::string> names;
  for (const auto& entry : reader_of_) names.push_back(entry.first);
  return names;
}

ModelDirectoryWriter::ModelDirectoryWriter(const std::string& directory, std::vector<TensorHeader> tensors,
                                           std::uint64_t shard_bytes)
    : directory_(directory), tensors_(std::move(tensors)) {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const std::uint64_t more = bytes_of(tensors_[i]);
    if (shards_.empty() || (shard_bytes > 0 && bytes + more > shard_bytes)) {
      shards_.push_back({i, i});
      bytes = 0;
    }
    shards_.back().end = i + 1;
    bytes += more;
  }
}

std::string ModelDirectoryWriter::file_name(std::size_t shard) const {
  if (shards_.size() == 1) return kSingleFile;
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, shards_.size());
  return name;
}

void ModelDirectoryWriter::write(std::span<const float> values) {
  const Shard& shard = shards_.at(shard_);
  if (writer_ == nullptr) {
    const auto place = [&](std::size_t i) { return tensors_.begin() + static_cast<std::ptrdiff_t>(i); };
    writer_ = std::make_unique<SafetensorsWriter>(
        directory_ + "/" + file_name(shard_), std::vector<TensorHeader>(place(shard.begin), place(shard.end)),
        /*for_transformers=*/true);
  }
  writer_->write(values);
  if (++written_ < shard.end) return;
  writer_->finish();
  writer_.reset();
  ++shard_;
}

void ModelDirectoryWriter::finish() {
  FOREBAY_CHECK(written_ == tensors_.size(), "%zu tensors of %s were not written", tensors_.size() - written_,
                directory_.c_str());
  if (shards_.size() == 1) return;
  std::uint64_t bytes = 0;
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  for (std::size_t s = 0; s < shards_.size(); ++s) {
    for (std::size_t i = shards_[s].begin; i < shards_[s].end; ++i) {
      map[tensors_[i].name] = file_name(s);
      bytes += bytes_of(tensors_[i]);
    }
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}}, {"weight_map", map}};
  write_file(directory_ + "/" + kIndexFile, index.dump(2) + "\n");
}

void prepare_model_directory(const std::string& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  const fs::directory_iterator entries =
      error ? fs::directory_iterator() : fs::directory_iterator(directory, error);
  if (error) {
    throw Error(StatusCode::kIoError, "cannot make or read the directory " + shown_path(directory) + ": " +
                                          error.message() + "; give one that exists or can be made");
  }
  for (const fs::directory_entry& entry : entries) {
    const std::string name = entry.path().filename().string();
    if (name != "config.json" && name != kIndexFile && entry.path().extension() != ".safetensors") continue;
    throw Error(StatusCode::kInvalidArgument, shown_path(directory) + " holds a model already (" +
                                                  shown_value(name) + "); give an empty or a new directory");
  }
  OutputFile::check_regular(directory + "/" + kSingleFile);
}

}  // namespace forebay::gpt
