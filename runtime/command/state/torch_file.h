// A file of torch.save(), or one of several in a file: its values, and the places of its tensors. The values
// of the tensors stay in the file.
//
// Source: PyTorch, torch/serialization.py (_save, _load) and torch/_utils.py (_rebuild_tensor_v2).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "forebay/data_type.h"
#include "runtime/command/state/input_file.h"
#include "runtime/command/state/zip_archive.h"
#include "runtime/command/traces/pickle_reader.h"

namespace forebay {

// A pickle as data alone, with PickleNames::kAll. Errors: throws Error(kCorruption), naming `path`.
Pickle read_pickle(const std::string& path, std::string_view text, const PickleLimits& limits);

// The numbers of a list or of a torch.Size; nothing for other values and negative numbers, and where
// Pickle::may_copy() says no.
std::optional<std::vector<std::uint64_t>> numbers_of(const Pickle& pickle, const PickleValue& value);

// The number of an enumerator, IntEnum(2), or of an integer; nothing for other values.
std::optional<std::uint64_t> number_of(const Pickle& pickle, const PickleValue& value);

// Elements of a shape; nothing if there are too many to count.
std::optional<std::uint64_t> element_count(const std::vector<std::uint64_t>& shape);

struct TorchTensor {
  std::vector<std::uint64_t> shape;
  std::uint64_t count = 0;  // Elements.
  std::uint64_t at = 0;     // Bytes from the start of the file.
  std::string type;         // "Float".
  // Nothing for types that are not fp32, bf16 or fp16.
  std::optional<DataType> float_type() const;
};

class TorchFile {
 public:
  // Bytes [begin, begin + bytes) of the file. Requires: `file` outlives this.
  // Errors: throws Error: kCorruption, kUnsupported, kIoError.
  // Cost: memory for the pickle, at most kMostPickleBytes, and its values.
  TorchFile(const InputFile& file, std::uint64_t begin, std::uint64_t bytes);
  explicit TorchFile(const InputFile& file) : TorchFile(file, 0, file.bytes()) {}
  TorchFile(const TorchFile&) = delete;
  TorchFile& operator=(const TorchFile&) = delete;

  static constexpr std::uint64_t kMostPickleBytes = 64u << 20;

  const Pickle& pickle() const { return pickle_; }
  const PickleValue& root() const { return pickle_.root(); }

  // A tensor or a parameter; nothing for other values.
  // Errors: throws Error: kCorruption for a tensor that is not within its storage or the file, kUnsupported
  // for one that is not contiguous.
  std::optional<TorchTensor> tensor(const PickleValue& value) const;
  // The number of an integer, or of a tensor with one element; nothing for other values.
  std::optional<double> scalar(const PickleValue& value) const;

 private:
  [[noreturn]] void refuse(const std::string& finding) const { refuse_import(file_.path(), finding); }

  const InputFile& file_;
  const ZipArchive archive_;
  const std::string root_;
  std::string text_;
  Pickle pickle_;
};

}  // namespace forebay
