// Random numbers by counter: draw(seed, stream, counter) is a pure function, so that every rank, thread and
// other implementation gets the same value for the same place, in any order. Source: Steele, Lea and Flood,
// "Fast splittable pseudorandom number generators", 2014 (the SplitMix64 finalizer).
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "forebay/conversions.h"  // FOREBAY_DEVICE

namespace forebay::gpt {

FOREBAY_DEVICE constexpr std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

FOREBAY_DEVICE constexpr std::uint64_t draw(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  return splitmix64(splitmix64(splitmix64(seed) + stream) + counter);
}

// The `index`-th standard normal value of a stream: Box-Muller in double from draws 2 * index and 2 * index
// + 1.
inline double draw_normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  constexpr double kUnit = 0x1p-53;
  const double u = static_cast<double>((draw(seed, stream, 2 * index) >> 11) + 1) * kUnit;  // In (0, 1].
  const double v = static_cast<double>(draw(seed, stream, 2 * index + 1) >> 11) * kUnit;    // In [0, 1).
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

// Streams: the parameter's index over all units in order of registration, and these for the text, for dropout
// and for generated text.
inline constexpr std::uint64_t kTextStream = std::uint64_t{1} << 32;
inline constexpr std::uint64_t kDropoutStream = std::uint64_t{1} << 33;
inline constexpr std::uint64_t kGenerationStream = std::uint64_t{1} << 34;

}  // namespace forebay::gpt
