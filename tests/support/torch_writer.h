// Writes files as torch.save() does, so that tests need no PyTorch and can write invalid files: a zip archive
// with stored entries, of which one is a pickle of protocol 2.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/pickle_writer.h"

namespace forebay::testing {

// Checksums are zero: the reader under test does not look at them.
class ZipWriter {
 public:
  ZipWriter& add(std::string name, std::string content, int method = 0) {
    entries_.push_back({std::move(name), std::move(content), method});
    return *this;
  }
  // `wide`: with the records of zip64, as for archives of more than 4 GiB.
  std::string finish(bool wide = false) const {
    std::string text;
    std::string directory;
    for (const Entry& entry : entries_) {
      const std::uint64_t at = text.size();
      text += "PK\3\4" + numbers({{20, 2}, {0, 2}, {entry.method, 2}, {0, 4}, {0, 4}}) +
              numbers({{0, 4}, {0, 4}, {entry.name.size(), 2}, {6, 2}}) + entry.name +
              std::string("FB\2\0ZZ", 6) + entry.content;
      const std::uint64_t size = wide ? 0xffffffff : entry.content.size();
      const std::string extra =
          wide ? numbers({{1, 2}, {24, 2}, {entry.content.size(), 8}, {entry.content.size(), 8}, {at, 8}})
               : "";
      directory += "PK\1\2" + numbers({{20, 2}, {20, 2}, {0, 2}, {entry.method, 2}, {0, 4}, {0, 4}}) +
                   numbers({{size, 4}, {size, 4}, {entry.name.size(), 2}, {extra.size(), 2}}) +
                   numbers({{0, 2}, {0, 2}, {0, 2}, {0, 4}, {wide ? 0xffffffff : at, 4}}) + entry.name +
                   extra;
    }
    const std::uint64_t at = text.size();
    const std::uint64_t count = entries_.size();
    text += directory;
    if (wide) {
      const std::uint64_t record = text.size();
      text += "PK\6\6" + numbers({{44, 8}, {20, 2}, {20, 2}, {0, 4}, {0, 4}, {count, 8}, {count, 8}}) +
              numbers({{directory.size(), 8}, {at, 8}});
      text += "PK\6\7" + numbers({{0, 4}, {record, 8}, {1, 4}});
    }
    return text + "PK\5\6" +
           numbers({{0, 2}, {0, 2}, {wide ? 0xffff : count, 2}, {wide ? 0xffff : count, 2}}) +
           numbers({{wide ? 0xffffffff : directory.size(), 4}, {wide ? 0xffffffff : at, 4}, {0, 2}});
  }

 private:
  struct Entry {
    std::string name;
    std::string content;
    int method = 0;
  };
  // Little endian: numbers and their bytes.
  static std::string numbers(const std::vector<std::pair<std::uint64_t, int>>& parts) {
    std::string text;
    for (const auto& [number, bytes] : parts) {
      for (int i = 0; i < bytes; ++i) text += static_cast<char>(number >> (8 * i) & 0xff);
    }
    return text;
  }

  std::vector<Entry> entries_;
};

// Writes a pickle with tensors, and the archive around it.
class TorchWriter : public PickleWriter {
 public:
  using Shape = std::vector<std::uint64_t>;

  TorchWriter() : PickleWriter(2) {}

  static std::string bytes_of(const std::vector<float>& values) {
    std::string text(values.size() * sizeof(float), '\0');
    if (!values.empty()) std::memcpy(text.data(), values.data(), text.size());
    return text;
  }
  // A tensor with a storage of its own.
  TorchWriter& tensor(const std::vector<float>& values, const Shape& shape) {
    return tensor_of("Float", add_storage(bytes_of(values)), values.size(), 0, shape, strides_of(shape));
  }
  std::string add_storage(std::string bytes) {
    storages_.push_back(std::move(bytes));
    return std::to_string(storages_.size() - 1);
  }
  // A tensor of type "Float", "BFloat16", "Long"...
  TorchWriter& tensor_of(const std::string& type, const std::string& key, std::uint64_t elements,
                         std::uint64_t offset, const Shape& shape, const Shape& strides) {
    raw("ctorch._utils\n_rebuild_tensor_v2\n((").text("storage").raw("ctorch\n" + type + "Storage\n");
    text(key).text("cpu").integer(static_cast<std::int64_t>(elements)).raw("tQ");
    integer(static_cast<std::int64_t>(offset));
    tuple(shape).tuple(strides).raw(
        "\x89"
        "ccollections\nOrderedDict\n)RtR");
    return *this;
  }
  TorchWriter& tuple(const Shape& numbers) {
    raw("(");
    for (const std::uint64_t number : numbers) integer(static_cast<std::int64_t>(number));
    raw("t");
    return *this;
  }
  TorchWriter& size(const Shape& shape) {
    raw("ctorch\nSize\n").raw("(");
    tuple(shape).raw("tR");
    return *this;
  }
  static Shape strides_of(const Shape& shape) {
    Shape strides(shape.size(), 1);
    for (std::size_t d = shape.size(); d > 1; --d) strides[d - 2] = strides[d - 1] * shape[d - 1];
    return strides;
  }
  ZipWriter archive(const std::string& name = "archive") const {
    ZipWriter zip;
    zip.add(name + "/data.pkl", finish()).add(name + "/byteorder", "little");
    for (std::size_t i = 0; i < storages_.size(); ++i)
      zip.add(name + "/data/" + std::to_string(i), storages_[i]);
    return zip;
  }

 private:
  std::vector<std::string> storages_;
};

}  // namespace forebay::testing
