#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "forebay/check.h"
#include "forebay/data_type.h"
#include "forebay/error.h"
#include "output/safetensors.h"
#include "tests/fuzz/picker.h"

namespace {

using forebay::testing::Picker;

std::string with_length(const std::string& header, std::size_t data_bytes) {
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  return file + header + std::string(data_bytes, '\1');
}

// A header of tensors that follow each other; now and then a value is another one.
std::string structured(std::string_view bytes) {
  Picker picker(bytes);
  static constexpr std::uint64_t kExtents[] = {0, 1, 2, 3, 7, 16, 1u << 16, 1ull << 32, 1ull << 62, ~0ull};
  static constexpr const char* kTypes[] = {"F32", "BF16", "F16", "F64", "f32", ""};
  static constexpr const char* kNames[] = {"a",       "b",       "wte.weight", "__metadata__",
                                           "\\u0000", "\\ud800", "\xff"};
  std::string header = "{";
  std::uint64_t next = 0;
  for (std::uint32_t i = 0, count = picker.pick(6); i < count; ++i) {
    const std::uint32_t type = picker.pick(8) == 0 ? picker.pick(6) : picker.pick(3);
    std::uint64_t elements = 1;
    std::string shape;
    for (std::uint32_t d = 0, dims = picker.pick(4); d < dims; ++d) {
      const std::uint64_t extent = picker.pick(16) == 0 ? picker.one_of(kExtents) : 1 + picker.pick(8);
      elements *= extent;
      shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    }
    std::uint64_t end = next + elements * (type == 0 ? 4 : 2);
    const std::uint64_t begin = picker.pick(16) == 0 ? picker.number() : next;
    if (picker.pick(16) == 0) end = picker.number();
    next = end;
    const std::string name = picker.pick(4) == 0 ? picker.one_of(kNames) : "t" + std::to_string(i);
    header += (i == 0 ? "\"" : ",\"") + name + "\":{\"dtype\":\"" + kTypes[type] + "\",\"shape\":[" + shape +
              "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]" +
              (picker.pick(16) == 0 ? ",\"more\":" + picker.text(20) : "") + "}";
  }
  header += picker.pick(16) == 0 ? picker.text(20) : "}";
  const std::uint64_t data_bytes = picker.pick(16) == 0 ? picker.pick(4096) : next;
  return with_length(header, static_cast<std::size_t>(std::min<std::uint64_t>(data_bytes, 1u << 16)));
}

// An accepted file has tensors that cover its data, and each of them can be read.
void check_file(const std::string& text) {
  static const int file = ::memfd_create("fuzz", MFD_CLOEXEC);
  FOREBAY_CHECK(file >= 0 && ::ftruncate(file, 0) == 0 &&
                    ::pwrite(file, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()),
                "a file of %zu bytes cannot be made", text.size());
  try {
    forebay::gpt::SafetensorsReader reader("/proc/self/fd/" + std::to_string(file));
    std::uint64_t covered = 0;
    for (const auto& [name, tensor] : reader.tensors()) {
      covered += tensor.count * forebay::element_bytes(tensor.dtype);
      FOREBAY_CHECK(reader.read(name).size() == tensor.count, "a tensor of %zu values",
                    static_cast<std::size_t>(tensor.count));
    }
    FOREBAY_CHECK(covered < text.size(), "%zu bytes of tensors", static_cast<std::size_t>(covered));
  } catch (const forebay::Error&) {
  }
}

}  // namespace

// The first byte selects: a whole file, a header without its length, or choices that make a header.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0]) {
    case 'f':
      check_file(std::string(rest));
      break;
    case 'h':
      check_file(with_length(std::string(rest), 64));
      break;
    case 's':
      check_file(structured(rest));
      break;
    default:
      break;
  }
  return 0;
}
