// Shared by the tests of kernels: hard values, arrays with guards, and the seed.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "forebay/conversions.h"
#include "forebay/data_type.h"

namespace forebay::kernel_test {

// FOREBAY_SEED, or a fresh one; printed so that a failure can be run again.
inline std::uint64_t test_seed() {
  const char* given = std::getenv("FOREBAY_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
  std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

// Elements of `type` at an offset from the start of an allocation, between guards that nobody may change.
class Array {
 public:
  Array(DataType type, std::size_t count, std::size_t offset)
      : type_(type),
        count_(count),
        offset_(kGuard + offset),
        bytes_((count + offset + 2 * kGuard) * bytes(), 0xA5) {}

  void* data() { return bytes_.data() + offset_ * bytes(); }
  const void* data() const { return bytes_.data() + offset_ * bytes(); }
  float* floats() { return static_cast<float*>(data()); }

  void set(std::size_t i, std::uint32_t value_bits) {
    std::memcpy(bytes_.data() + (offset_ + i) * bytes(), &value_bits, bytes());
  }
  std::uint32_t get(std::size_t i) const {
    std::uint32_t value_bits = 0;
    std::memcpy(&value_bits, bytes_.data() + (offset_ + i) * bytes(), bytes());
    return value_bits;
  }
  float value(std::size_t i) const {
    switch (type_) {
      case DataType::kFloat32:
        return float_from_bits(get(i));
      case DataType::kBfloat16:
        return bfloat16_to_float(static_cast<std::uint16_t>(get(i)));
      case DataType::kFloat16:
        return float16_to_float(static_cast<std::uint16_t>(get(i)));
    }
    return 0.0f;
  }

  std::size_t count() const { return count_; }
  // All of it, guards included, and where the first element is in that.
  unsigned char* allocation() { return bytes_.data(); }
  std::size_t allocation_bytes() const { return bytes_.size(); }
  std::size_t data_offset_bytes() const { return offset_ * bytes(); }
  friend bool operator==(const Array& a, const Array& b) { return a.bytes_ == b.bytes_; }

 private:
  // 64 elements, so that the distance to the allocation's start keeps the alignment that `offset` asks for.
  static constexpr std::size_t kGuard = 64;
  std::size_t bytes() const { return element_bytes(type_); }

  DataType type_;
  std::size_t count_, offset_;
  std::vector<unsigned char> bytes_;
};

// The first difference, for a message.
inline ::testing::AssertionResult same_bits(const char* name, const Array& got, const Array& expected) {
  if (got == expected) return ::testing::AssertionSuccess();
  for (std::size_t i = 0; i < got.count(); ++i) {
    if (got.get(i) != expected.get(i)) {
      return ::testing::AssertionFailure()
             << name << "[" << i << "] of " << got.count() << " is 0x" << std::hex << got.get(i)
             << ", the definition gives 0x" << expected.get(i);
    }
  }
  return ::testing::AssertionFailure() << name << " of " << got.count() << ": written outside the range";
}

// Any encoding at all for half of the elements (NaNs with payloads, infinities, subnormals), the rest about
// one.
inline void fill_hard(Array& array, DataType type, std::mt19937_64& random) {
  for (std::size_t i = 0; i < array.count(); ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    const float near_one = std::uniform_real_distribution<float>(-2.0f, 2.0f)(random);
    const std::uint32_t kind = static_cast<std::uint32_t>(random() % 8);
    std::uint32_t chosen = float_bits(near_one);
    if (kind < 4) chosen = bits;
    if (kind == 4) chosen = bits & 0x807FFFFFu;                  // fp32 subnormals and zeros
    if (kind == 5) chosen = (bits & 0x83FFFFFFu) | 0x34000000u;  // about fp16's subnormals
    if (type == DataType::kFloat32) {
      array.set(i, chosen);
    } else if (kind < 4) {
      array.set(i, bits & 0xFFFFu);
    } else if (type == DataType::kBfloat16) {
      array.set(i, float_to_bfloat16(float_from_bits(chosen)));
    } else {
      array.set(i, float_to_float16(float_from_bits(chosen)));
    }
  }
}

inline constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16};

}  // namespace forebay::kernel_test
