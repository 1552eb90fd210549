// Reading and writing weights in the safetensors format: 8 bytes of header length (little endian), a JSON
// header with each tensor's type, shape and place, then the bytes.
//
// A file is not trusted: every length, place and shape is checked against the file's size before it is used.
// Source: https://github.com/huggingface/safetensors, "Format".
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "forebay/data_type.h"
#include "output/output_file.h"

namespace forebay::gpt {

struct Tensor {
  DataType dtype = DataType::kFloat32;
  std::vector<std::uint64_t> shape;
  std::uint64_t first_byte = 0;  // From the end of the header.
  std::uint64_t count = 0;       // Elements.
};

class SafetensorsReader {
 public:
  // Errors: throws Error: kIoError (cannot be read), kCorruption (not a valid file; the message names the
  // place), kUnsupported (a type other than F32, BF16 or F16).
  explicit SafetensorsReader(const std::string& path);

  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  // The values of one tensor, widened to fp32.
  // Errors: throws Error(kCorruption) when there is no such tensor, (kIoError) when reading fails.
  std::vector<float> read(const std::string& name);

 private:
  [[noreturn]] void corrupt(const std::string& found) const;
  void parse_header(const std::string& header, std::uint64_t data_bytes);
  void check_places(std::uint64_t data_bytes) const;

  std::string path_;
  std::ifstream stream_;
  std::uint64_t data_start_ = 0;
  std::map<std::string, Tensor> tensors_;
};

struct TensorHeader {
  std::string name;
  std::vector<std::size_t> shape;
};

// A key of the header's metadata, at its beginning: forebay wrote the file.
inline constexpr const char* kExportedBy = "exported_by";

// Writes fp32 tensors, one after the other, to an OutputFile.
class SafetensorsWriter {
 public:
  // Errors: throws Error(kIoError); so do write() and finish().
  // `for_transformers`: the header has the metadata that transformers demands.
  SafetensorsWriter(const std::string& path, const std::vector<TensorHeader>& tensors,
                    bool for_transformers = false);

  // The values of the next tensor.
  void write(std::span<const float> values);
  void finish();

 private:
  std::string path_;
  OutputFile file_;
  std::uint64_t bytes_left_ = 0;
};

}  // namespace forebay::gpt
