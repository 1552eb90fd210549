// Conversions against a reference that knows only the values of the formats: it decodes all 2^15
// magnitudes to double once, and rounds by looking for the nearest, ties to the even encoding.
#include "forebay/conversions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace forebay {
namespace {

// A 16-bit binary format by its widths.
class ReferenceFormat {
 public:
  ReferenceFormat(int exponent_bits, int mantissa_bits)
      : mantissa_bits_(mantissa_bits), exponent_bits_(exponent_bits), bias_((1 << (exponent_bits - 1)) - 1) {
    for (int bits = 0; bits <= infinity_bits(); ++bits) magnitudes_.push_back(magnitude(bits));
  }

  int infinity_bits() const { return ((1 << exponent_bits_) - 1) << mantissa_bits_; }

  // Infinity counts as the next power of two after the largest value, as rounding to nearest treats it.
  double magnitude(int bits) const {
    const int exponent = bits >> mantissa_bits_;
    const int mantissa = bits & ((1 << mantissa_bits_) - 1);
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias_ - mantissa_bits_);
    return std::ldexp((1 << mantissa_bits_) + mantissa, exponent - bias_ - mantissa_bits_);
  }

  std::uint16_t round(float value) const {
    const int sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return static_cast<std::uint16_t>(infinity_bits() | (1 << (mantissa_bits_ - 1)));
    const double wanted = std::fabs(static_cast<double>(value));
    if (wanted >= magnitudes_.back()) return static_cast<std::uint16_t>(sign | infinity_bits());
    const auto above = std::upper_bound(magnitudes_.begin(), magnitudes_.end(), wanted);
    const int low = static_cast<int>(above - magnitudes_.begin()) - 1;
    const double to_low = wanted - magnitudes_[low];
    const double to_high = magnitudes_[low + 1] - wanted;
    const bool up = to_high < to_low || (to_high == to_low && low % 2 != 0);
    return static_cast<std::uint16_t>(sign | (up ? low + 1 : low));
  }

  float widen(std::uint16_t bits) const {
    const int magnitude_bits = bits & 0x7FFF;
    if (magnitude_bits > infinity_bits()) return std::numeric_limits<float>::quiet_NaN();
    const double wide = magnitude_bits == infinity_bits() ? std::numeric_limits<double>::infinity()
                                                          : magnitudes_[magnitude_bits];
    return static_cast<float>((bits & 0x8000) != 0 ? -wide : wide);
  }

 private:
  int mantissa_bits_, exponent_bits_, bias_;
  std::vector<double> magnitudes_;
};

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Every sign and exponent, with all kept mantissas of both formats and dropped parts about zero, half and
// one; and an even walk through all encodings.
template <typename Function>
void for_dense_sample(Function&& function) {
  for (std::uint32_t exponent = 0; exponent < 512; ++exponent) {
    for (const int dropped_bits : {16, 13}) {
      const std::uint32_t half = 1u << (dropped_bits - 1);
      for (std::uint32_t kept = 0; kept < (1u << (23 - dropped_bits)); ++kept) {
        for (const std::uint32_t dropped : {0u, 1u, half - 1, half, half + 1, 2 * half - 1}) {
          function(float_of(exponent << 23 | kept << dropped_bits | dropped));
        }
      }
    }
    // fp16 subnormals drop up to 24 bits: the neighbourhood of each power of two, and of halves between them.
    for (int bit = 0; bit < 23; ++bit) {
      for (const std::uint32_t mantissa :
           {(1u << bit) - 1, 1u << bit, (1u << bit) + 1, 0x7FFFFFu ^ (1u << bit)}) {
        function(float_of(exponent << 23 | mantissa));
      }
    }
  }
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 4099) {
    function(float_of(static_cast<std::uint32_t>(bits)));
  }
}

const ReferenceFormat& bfloat16() {
  static const ReferenceFormat format(8, 7);
  return format;
}
const ReferenceFormat& float16() {
  static const ReferenceFormat format(5, 10);
  return format;
}

TEST(Conversions, EveryBfloat16WidensExactlyAndComesBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto value = static_cast<std::uint16_t>(bits);
    const float wide = bfloat16_to_float(value);
    ASSERT_EQ(bits_of(wide), bits_of(bfloat16().widen(value))) << std::hex << bits;
    ASSERT_EQ(float_to_bfloat16(wide), std::isnan(wide) ? kCanonicalNanBfloat16 : value) << std::hex << bits;
  }
}

TEST(Conversions, EveryFloat16WidensExactlyAndComesBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto value = static_cast<std::uint16_t>(bits);
    const float wide = float16_to_float(value);
    ASSERT_EQ(bits_of(wide), bits_of(float16().widen(value))) << std::hex << bits;
    ASSERT_EQ(float_to_float16(wide), std::isnan(wide) ? kCanonicalNanFloat16 : value) << std::hex << bits;
  }
}

TEST(Conversions, DenseFloat32RoundsToTheNearestBfloat16TiesToEven) {
  for_dense_sample([](float value) {
    const std::uint16_t expected = bfloat16().round(value);
    if (float_to_bfloat16(value) != expected) {
      ADD_FAILURE() << std::hex << bits_of(value) << " gave " << float_to_bfloat16(value) << ", not "
                    << expected;
    }
  });
}

TEST(Conversions, DenseFloat32RoundsToTheNearestFloat16TiesToEven) {
  for_dense_sample([](float value) {
    const std::uint16_t expected = float16().round(value);
    if (float_to_float16(value) != expected) {
      ADD_FAILURE() << std::hex << bits_of(value) << " gave " << float_to_float16(value) << ", not "
                    << expected;
    }
  });
}

TEST(Conversions, LandmarksHaveTheirPublishedEncodings) {
  EXPECT_EQ(float_to_bfloat16(1.0f), 0x3F80);
  EXPECT_EQ(float_to_bfloat16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(float_to_bfloat16(float_of(0x00000001)), 0x0000);
  EXPECT_EQ(float_to_bfloat16(float_of(0x00010000)), 0x0001);
  EXPECT_EQ(float_to_bfloat16(float_of(0xFFA12345)), kCanonicalNanBfloat16);
  EXPECT_EQ(float_to_float16(1.0f), 0x3C00);
  EXPECT_EQ(float_to_float16(65504.0f), 0x7BFF);
  EXPECT_EQ(float_to_float16(65519.996f), 0x7BFF);
  EXPECT_EQ(float_to_float16(65520.0f), 0x7C00);
  EXPECT_EQ(float_to_float16(-0x1p-24f), 0x8001);
  EXPECT_EQ(float_to_float16(0x1p-25f), 0x0000);
  EXPECT_EQ(float_to_float16(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(float_to_float16(float_of(0x7F800001)), kCanonicalNanFloat16);
}

}  // namespace
}  // namespace forebay
