// SavedState: a state of a directory, read by parameter and element. state_files.h has the form on disk.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/engine/state/state_directory.h"
#include "runtime/engine/state/state_files.h"
#include "runtime/engine/state/tensor_places.h"

namespace forebay::internal {

// Opened and checked but for the values, which are checked when they are read.
//
// Cost: reads the blocks that have the wanted elements and the headers of their files, and keeps one block
// for
//       each part of the tensor. In format 1 a block is a whole run.
// Errors: every function throws: kIoError if there is no state or it cannot be read, kCorruption if it is
//         damaged, kUnsupported for another format.
class SavedState {
 public:
  SavedState(const std::string& directory, const std::string& name);

  struct Tensor {
    TensorPlaces places;
    std::vector<std::uint64_t> shape;  // The whole tensor's dimensions; empty: not declared.
    bool is_split = false;
    bool is_factors = false;  // Not a parameter (StateParameter::factors).

    struct Piece {
      std::size_t file = 0;
      std::uint64_t offset = 0;  // Elements from the start of the part.
      std::uint64_t count = 0;
      std::uint64_t at = 0;  // Bytes from the start of the file.
      std::uint64_t first_block = 0;
      std::uint64_t block_count = 0;  // Elements of a block.
    };
    // By field and part, in order of their offsets.
    std::array<std::map<std::uint64_t, std::vector<Piece>>, std::size(kStateFields)> pieces;
  };

  const std::string& path() const { return files_.path(); }
  const nlohmann::json& manifest() const { return manifest_; }
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  // In order of registration; by name in states of older versions.
  const std::vector<std::string>& names() const { return names_; }
  bool has(const std::string& parameter, const std::string& field) const;
  // Reads elements [begin, begin + target.size()) of the whole tensor.
  void read(const std::string& parameter, const std::string& field, std::uint64_t begin,
            std::span<float> target);
  // Passes all elements of a field to `visit` in order, at most `piece_count` at once.
  void visit(const std::string& parameter, const std::string& field, std::uint64_t piece_count,
             const std::function<void(std::span<const float>)>& visit);
  // Keeps the files open, so that they are read also after the state is removed. Not for very many of them.
  // False: one is not there.
  bool hold_files();
  // Checks that all files are there, with their headers and checksums.
  void check_files();
  // Checks the index for other tools against the files.
  void check_tensor_index() const;
  // Bytes of values, headers and checksums that were read so far.
  std::uint64_t bytes_read() const { return bytes_read_; }

 private:
  struct File {
    std::string name;
    std::uint64_t bytes = 0;
    std::uint64_t blocks = 0;
    std::uint64_t index_checksum = 0;
    bool is_open = false;  // Its checksums are here.
    std::vector<std::uint64_t> checksums;
    std::optional<StateFile> held;
  };
  struct Block {
    std::size_t file = 0;
    std::uint64_t number = UINT64_MAX;  // In the file. This: none.
    std::uint64_t at = 0;               // Bytes from the start of the file.
    std::uint64_t last_use = 0;
    std::vector<float> values;
  };
  void read_manifest();
  void list_files();
  void list_tensors();
  void list_piece(Tensor& tensor, const nlohmann::json& entry);
  void read_old_index(std::size_t file);
  void enter_old_run(std::size_t file, const nlohmann::json& entry);
  void open(std::size_t file);
  StateFile& file_of(std::size_t number, std::optional<StateFile>& fresh);
  std::span<const float> block_of(const Tensor& tensor, const Tensor::Piece& piece, int field,
                                  std::uint64_t block, const std::string& parameter);

  StateDirectory files_;
  nlohmann::json manifest_;
  std::uint64_t format_ = 0;
  std::vector<File> list_;
  std::map<std::string, Tensor> tensors_;
  std::vector<std::string> names_;
  std::vector<Block> blocks_;
  std::uint64_t uses_ = 0;
  std::uint64_t bytes_read_ = 0;
};

}  // namespace forebay::internal
