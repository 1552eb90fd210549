// Weights in one safetensors file, or in the files of a model directory as Hugging Face's transformers keeps
// them: model.safetensors, or shards that model.safetensors.index.json lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "output/safetensors.h"

namespace forebay::gpt {

class WeightFiles {
 public:
  // Errors: those of SafetensorsReader; throws Error(kIoError) for a directory without weights and
  // Error(kCorruption) for an index that does not describe its files.
  explicit WeightFiles(const std::string& path);

  // Null: there is no such tensor.
  const Tensor* find(const std::string& name) const;
  std::vector<std::string> names() const;
  // Requires: find(name) is not null. Errors: those of SafetensorsReader::read().
  std::vector<float> read(const std::string& name) { return reader_of_.at(name)->read(name); }

 private:
  void add_file(const std::string& path);
  void read_index(const std::string& directory, const std::string& path);

  std::vector<std::unique_ptr<SafetensorsReader>> readers_;
  std::map<std::string, SafetensorsReader*> reader_of_;  // By tensor.
};

// Writes fp32 tensors, one after the other, to the files of a model directory.
class ModelDirectoryWriter {
 public:
  // No file has more than `shard_bytes` of tensors, unless one tensor is larger. 0: one file.
  // Errors: throws Error(kIoError); so do write() and finish().
  ModelDirectoryWriter(const std::string& directory, std::vector<TensorHeader> tensors,
                       std::uint64_t shard_bytes);

  // The values of the next tensor.
  void write(std::span<const float> values);
  // Writes the index, too, if there are several files.
  void finish();

 private:
  // Tensors from `begin` to before `end`.
  struct Shard {
    std::size_t begin, end;
  };

  std::string file_name(std::size_t shard) const;

  const std::string directory_;
  const std::vector<TensorHeader> tensors_;
  std::vector<Shard> shards_;
  std::unique_ptr<SafetensorsWriter> writer_;  // For the shard with the next tensor.
  std::size_t shard_ = 0;
  std::size_t written_ = 0;  // Tensors.
};

// Refuses a directory that holds a model already, and makes it where it is missing.
// Errors: throws Error: kInvalidArgument, kIoError.
void prepare_model_directory(const std::string& directory);

}  // namespace forebay::gpt
