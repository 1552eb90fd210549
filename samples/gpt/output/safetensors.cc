#include "output/safetensors.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "forebay/error.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "model/convert.h"

namespace forebay::gpt {
namespace {

using Json = nlohmann::ordered_json;

// Smaller: models of more than some 100,000 tensors are refused. Larger: a damaged file takes more memory,
// some 50 times its header.
constexpr std::uint64_t kHeaderBytesMax = 16u << 20;
// A shape, in a tensor's entry, in the header.
constexpr int kHeaderDepthMax = 3;
constexpr std::uint64_t kLengthBytes = 8;
constexpr const char* kMetadata = "__metadata__";

// The product of `shape`; none if it overflows.
bool element_count(const std::vector<std::uint64_t>& shape, std::uint64_t* count) {
  *count = 1;
  for (const std::uint64_t extent : shape) {
    if (__builtin_mul_overflow(*count, extent, count)) return false;
  }
  return true;
}

}  // namespace

SafetensorsReader::SafetensorsReader(const std::string& path) : path_(path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::is_other(
          status)) {  // Opening a pipe may block, and neither it nor a device has a length.
    throw Error(StatusCode::kIoError, "cannot read weights from " + shown_path(path) +
                                          ": it is not a regular file; give an existing safetensors file");
  }
  stream_.open(path, std::ios::binary);
  const auto cannot_read = [&] {
    throw Error(StatusCode::kIoError, "cannot read weights from " + shown_path(path) + ": " +
                                          std::strerror(errno) + "; give an existing safetensors file");
  };
  if (!stream_) cannot_read();
  stream_.seekg(0, std::ios::end);
  const std::streamoff end = stream_.tellg();
  if (end < 0 || end == std::numeric_limits<std::streamoff>::max()) {  // For example a directory.
    errno = EISDIR;
    cannot_read();
  }
  stream_.seekg(0);

  const auto size = static_cast<std::uint64_t>(end);
  if (size < kLengthBytes)
    corrupt("it has " + std::to_string(size) + " bytes, fewer than a header length takes");
  std::uint8_t length_bytes[kLengthBytes];
  stream_.read(reinterpret_cast<char*>(length_bytes), kLengthBytes);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) length |= std::uint64_t{length_bytes[i]} << (8 * i);
  if (length > kHeaderBytesMax) {
    corrupt("its header claims " + std::to_string(length) + " bytes, more than the " +
            std::to_string(kHeaderBytesMax) + " that are read");
  }
  if (length > size - kLengthBytes) {
    corrupt("its header claims " + std::to_string(length) + " bytes and the file has " +
            std::to_string(size - kLengthBytes) + " after the length");
  }
  std::string header(length, '\0');
  stream_.read(header.data(), static_cast<std::streamsize>(length));
  if (!stream_) cannot_read();
  data_start_ = kLengthBytes + length;
  parse_header(header, size - data_start_);
  check_places(size - data_start_);
}

void SafetensorsReader::corrupt(const std::string& found) const {
  throw Error(StatusCode::kCorruption, shown_path(path_) + " is not a valid safetensors file: " + found +
                                           "; export or download it again");
}

void SafetensorsReader::parse_header(const std::string& header, std::uint64_t data_bytes) {
  if (is_nested_deeper(header, kHeaderDepthMax))
    corrupt("its header is nested deeper than " + std::to_string(kHeaderDepthMax) + " levels");
  const Json root = Json::parse(header, /*callback=*/nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) corrupt("its header is not a JSON object");
  if (const auto name = repeated_name(header, root.size()))
    corrupt("its header names " + shown_value(*name) + " twice");

  for (const auto& item : root.items()) {
    const std::string& name = item.key();
    const Json& entry = item.value();
    if (name == kMetadata) continue;
    const auto broken = [&](const std::string& found) {
      corrupt("tensor " + shown_value(name) + ": " + found);
    };
    const auto is_counts = [](const Json& value) {
      return value.is_array() &&
             std::all_of(value.begin(), value.end(), [](const Json& v) { return v.is_number_unsigned(); });
    };
    if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
        !entry.contains("shape") || !is_counts(entry["shape"]) || !entry.contains("data_offsets") ||
        !is_counts(entry["data_offsets"]) || entry["data_offsets"].size() != 2) {
      broken("its entry lacks a valid dtype, shape or pair of data_offsets");
    }
    Tensor tensor;
    const std::string dtype = entry["dtype"].get<std::string>();
    if (dtype == "F32") {
      tensor.dtype = DataType::kFloat32;
    } else if (dtype == "BF16") {
      tensor.dtype = DataType::kBfloat16;
    } else if (dtype == "F16") {
      tensor.dtype = DataType::kFloat16;
    } else {
      throw Error(StatusCode::kUnsupported, "cannot read tensor " + shown_value(name) + " of " +
                                                shown_path(path_) + ": its type is " + shown_value(dtype) +
                                                "; convert it to F32, BF16 or F16");
    }
    tensor.shape = entry["shape"].get<std::vector<std::uint64_t>>();
    tensor.first_byte = entry["data_offsets"][0].get<std::uint64_t>();
    const auto last_byte = entry["data_offsets"][1].get<std::uint64_t>();
    if (tensor.first_byte > last_byte || last_byte > data_bytes) {
      broken("its bytes " + std::to_string(tensor.first_byte) + " to " + std::to_string(last_byte) +
             " are not within the " + std::to_string(data_bytes) + " that the file has (truncated?)");
    }
    const std::uint64_t bytes = last_byte - tensor.first_byte;
    if (!element_count(tensor.shape, &tensor.count) || tensor.count > bytes ||
        tensor.count * element_bytes(tensor.dtype) != bytes) {
      broken("its shape does not take the " + std::to_string(bytes) + " bytes it has");
    }
    tensors_.emplace(name, std::move(tensor));
  }
}

// The tensors must cover the bytes without a gap or an overlap.
void SafetensorsReader::check_places(std::uint64_t data_bytes) const {
  std::vector<std::pair<std::uint64_t, const std::pair<const std::string, Tensor>*>> order;
  for (const auto& entry : tensors_) order.emplace_back(entry.second.first_byte, &entry);
  // By place. At the same place, an empty tensor comes first.
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first, a.second->second.count) < std::pair(b.first, b.second->second.count);
  });
  std::uint64_t next = 0;
  for (const auto& [first, entry] : order) {
    if (first != next) {
      corrupt("tensor " + shown_value(entry->first) + " starts at byte " + std::to_string(first) + " where " +
              std::to_string(next) + " is the first free one: a hole or an overlap");
    }
    next = first + entry->second.count * element_bytes(entry->second.dtype);
  }
  if (next != data_bytes) {
    corrupt(std::to_string(data_bytes - next) + " bytes at its end belong to no tensor");
  }
}

std::vector<float> SafetensorsReader::read(const std::string& name) {
  const auto place = tensors_.find(name);
  if (place == tensors_.end()) {
    throw Error(StatusCode::kCorruption,
                shown_path(path_) + " has no tensor " + name + "; it belongs to another model");
  }
  const Tensor& tensor = place->second;
  std::vector<std::byte> bytes(tensor.count * element_bytes(tensor.dtype));
  stream_.clear();
  stream_.seekg(static_cast<std::streamoff>(data_start_ + tensor.first_byte));
  stream_.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!stream_) {
    throw Error(StatusCode::kIoError,
                "cannot read tensor " + name + " of " + shown_path(path_) + ": the file ended or changed");
  }
  std::vector<float> values(tensor.count);
  widen(tensor.dtype, bytes.data(), values.data(), values.size());
  return values;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<TensorHeader>& tensors,
                                     bool for_transformers)
    : path_(path), file_(path) {
  Json metadata = {{kExportedBy, "forebay-gpt"}};
  if (for_transformers) metadata["format"] = "pt";
  Json header = {{kMetadata, metadata}};
  for (const TensorHeader& tensor : tensors) {
    std::uint64_t bytes = sizeof(float);
    for (const std::size_t extent : tensor.shape) bytes *= extent;
    header[tensor.name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {bytes_left_, bytes_left_ + bytes}}};
    bytes_left_ += bytes;
  }
  std::string text = header.dump();
  text.resize(round_up(text.size(), kLengthBytes), ' ');  // Aligns the tensors.

  std::uint8_t length[kLengthBytes];
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length[i] = static_cast<std::uint8_t>(text.size() >> (8 * i));
  file_.write(length, sizeof(length));
  file_.write(text.data(), text.size());
}

void SafetensorsWriter::write(std::span<const float> values) {
  FOREBAY_CHECK(values.size_bytes() <= bytes_left_, "%zu bytes more than the header of %s has room for",
                values.size_bytes(), path_.c_str());
  file_.write(values.data(), values.size_bytes());
  bytes_left_ -= values.size_bytes();
}

void SafetensorsWriter::finish() {
  FOREBAY_CHECK(bytes_left_ == 0, "%llu bytes of %s were not written",
                static_cast<unsigned long long>(bytes_left_), path_.c_str());
  file_.finish();
}

}  // namespace forebay::gpt
