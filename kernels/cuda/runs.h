// Runs: neighbouring elements that a thread has in each array of an update. The types of the arrays are the
// same for all threads, and the kernel waits for memory, so they are looked up while it runs.
#pragma once

#include "kernels/cuda/launches.h"
#include "kernels/cuda/packed.h"
#include "kernels/moments.h"

namespace forebay::cuda_kernels {

using Run = float[kRun];

// The elements of one array that a thread has, from `begin` on. Elements behind `present` are zeros.
struct Place {
  std::size_t begin;
  int present;
  bool wide;
};

template <DataType type>
FOREBAY_KERNEL void load_as(const void* array, const Place& place, Run& values) {
  constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(Storage<type>));
  const auto* source = static_cast<const Storage<type>*>(array) + place.begin;
  if (place.wide) {
    FOREBAY_UNROLL
    for (int i = 0; i < kRun; i += kWidth) {
      Granule<type, kWidth> granule;
      granule.load(source + i);
      FOREBAY_UNROLL
      for (int j = 0; j < kWidth; ++j) values[i + j] = granule.value(j);
    }
    return;
  }
  FOREBAY_UNROLL
  for (int i = 0; i < kRun; ++i)
    values[i] = i < place.present ? definitions::Element<type>::load(source[i]) : 0.0f;
}

FOREBAY_KERNEL void load(const void* array, DataType type, const Place& place, Run& values) {
  if (type == DataType::kFloat32) {
    load_as<DataType::kFloat32>(array, place, values);
  } else if (type == DataType::kBfloat16) {
    load_as<DataType::kBfloat16>(array, place, values);
  } else {
    load_as<DataType::kFloat16>(array, place, values);
  }
}

// `raw(i)` gives element i as it lies in memory.
template <DataType type, typename Raw>
FOREBAY_KERNEL void store_raw(void* array, const Place& place, const Raw& raw) {
  constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(Storage<type>));
  auto* target = static_cast<Storage<type>*>(array) + place.begin;
  if (place.wide) {
    FOREBAY_UNROLL
    for (int i = 0; i < kRun; i += kWidth) {
      Granule<type, kWidth> granule;
      FOREBAY_UNROLL
      for (int j = 0; j < kWidth; ++j) granule.set_raw(j, raw(i + j));
      granule.store(target + i);
    }
    return;
  }
  FOREBAY_UNROLL
  for (int i = 0; i < kRun; ++i) {
    if (i < place.present) target[i] = raw(i);
  }
}

template <DataType type>
FOREBAY_KERNEL void store_as(void* array, const Place& place, const Run& values) {
  store_raw<type>(array, place, [&](int i) { return definitions::Element<type>::round(values[i]); });
}

// The run of the thread in the tile that begins with element `start`. `aligned`: every array begins at a
// multiple of an access.
template <typename Context>
FOREBAY_KERNEL Place place_in_tile(const Context& c, std::size_t start, std::size_t count, bool aligned) {
  Place place = {start + c.thread() * static_cast<std::size_t>(kRun), 0, false};
  if (place.begin < count) {
    const std::size_t left = count - place.begin;
    place.present = left < static_cast<std::size_t>(kRun) ? static_cast<int>(left) : kRun;
  }
  place.wide = aligned && place.present == kRun;
  return place;
}

// Masters, which are fp32 or, where `half` has elements, bf16; and what follows from them.
struct Masters {
  float* elements;
  HalfMaster half;
  float* average;
  float average_weight;
  void* parameter;
  DataType parameter_type;

  FOREBAY_KERNEL void load(const Place& place, Run& p) const {
    if (half.elements != nullptr) {
      load_as<DataType::kBfloat16>(half.elements, place, p);
    } else {
      load_as<DataType::kFloat32>(elements, place, p);
    }
  }
  FOREBAY_KERNEL void store(const Place& place, bool dithered, std::uint64_t seed, Run& p) const {
    if (half.elements != nullptr) {
      Packed<16> kept = {};
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i) {
        const std::uint16_t rounded = definitions::master_to_bfloat16(
            p[i], dithered, seed, half.first + place.begin + static_cast<std::size_t>(i));
        kept.words[i / 2] |= static_cast<std::uint32_t>(rounded) << (16 * (i % 2));
        p[i] = bfloat16_to_float(rounded);
      }
      store_raw<DataType::kBfloat16>(half.elements, place, [&](int i) {
        return static_cast<std::uint16_t>(kept.words[i / 2] >> (16 * (i % 2)));
      });
    } else {
      store_raw<DataType::kFloat32>(elements, place, [&](int i) { return p[i]; });
    }
    if (average != nullptr) {
      Run values;
      load_as<DataType::kFloat32>(average, place, values);
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i)
        values[i] = definitions::average_element(values[i], p[i], average_weight);
      store_raw<DataType::kFloat32>(average, place, [&](int i) { return values[i]; });
    }
    if (parameter == nullptr) return;
    if (parameter_type == DataType::kFloat32) {
      store_as<DataType::kFloat32>(parameter, place, p);
    } else if (parameter_type == DataType::kBfloat16) {
      store_as<DataType::kBfloat16>(parameter, place, p);
    } else {
      store_as<DataType::kFloat16>(parameter, place, p);
    }
  }
};

}  // namespace forebay::cuda_kernels
