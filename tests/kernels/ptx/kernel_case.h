// One launch of a compiled kernel beside its definition: random and special inputs, executed from PTX,
// compared bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/ptx/executor.h"
#include "tests/fakes/cuda/ptx/program.h"

namespace forebay::ptx_test {

enum class Element : std::uint8_t { kByte, kFloat16, kBfloat16, kFloat32, kFloat64, kWord32, kWord64 };

std::size_t bytes_of(Element element);

// Values in memory that begins at `offset` elements past a multiple of 64 bytes.
struct Array {
  Element element = Element::kFloat32;
  std::size_t count = 0;
  std::size_t offset = 0;
  bool read_only = false;
  std::vector<std::uint64_t> values;
  bool any_nan = false;  // The definition promises that a NaN is a NaN, and not which.
};

// The arrays of one side, device or definition, as addresses.
class Pointers {
 public:
  explicit Pointers(std::vector<std::byte*> begins) : begins_(std::move(begins)) {}
  template <typename T = float>
  T* at(std::size_t index) const {
    return reinterpret_cast<T*>(begins_[index]);
  }

 private:
  std::vector<std::byte*> begins_;
};

struct KernelCase {
  std::string kernel;
  std::string description;
  unsigned grid = 1;
  std::vector<Array> arrays;
  // The bytes of the kernel's one argument.
  std::function<std::vector<std::byte>(const Pointers&)> argument;
  // Computes the expected contents in place.
  std::function<void(const Pointers&)> define;
};

template <typename T>
std::vector<std::byte> bytes_of_struct(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<std::byte> bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

struct Comparison {
  std::uint64_t values = 0;
  std::uint64_t differences = 0;
  std::uint64_t instructions = 0;
  std::string first_difference;
};

// Errors: throws ptx::Fault as execution does.
Comparison compare(const KernelCase& wanted, const ptx::Kernel& kernel, std::uint64_t most_instructions);

// --- values ---

// Ordinary numbers, any bits at all, subnormals, zeros of both signs, infinities, NaNs, and ties of rounding
// to 16 bits.
std::uint64_t hard_value(Element element, std::mt19937_64& random);
// Ordinary numbers about one, and zeros.
std::uint64_t mild_value(Element element, std::mt19937_64& random);

template <typename Value>
Array array_of(Element element, std::size_t count, std::size_t offset, Value value) {
  Array array{element, count, offset, false, {}, false};
  for (std::size_t i = 0; i < count; ++i) array.values.push_back(value());
  return array;
}

// The cases of forebay's kernels, and of the sample's, each kernel at least once.
std::vector<KernelCase> forebay_cases(std::uint64_t seed);
std::vector<KernelCase> gpt_cases(std::uint64_t seed);

// The text that this build embeds; empty where nvcc was not found.
std::string forebay_ptx();
std::string gpt_ptx();

}  // namespace forebay::ptx_test
