// Accesses of 4, 8 and 16 bytes, and the elements in them.
//
// FOREBAY_KERNEL marks a function that is device code under nvcc and an ordinary one elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/definitions.h"

#ifdef __CUDACC__
#define FOREBAY_KERNEL __device__ __forceinline__
#define FOREBAY_UNROLL _Pragma("unroll")
#else
#define FOREBAY_KERNEL inline
#define FOREBAY_UNROLL
#endif

namespace forebay::cuda_kernels {

template <DataType type>
using Storage = typename definitions::Element<type>::Storage;

// The bytes of one access.
inline constexpr int kAccessBytes = 16;

// `bytes` bytes in registers, as 32-bit words.
template <int bytes>
struct Packed {
  std::uint32_t words[bytes / 4];
};

#ifdef __CUDACC__

// Data is passed over once, so it is marked to leave the caches first.
FOREBAY_KERNEL Packed<16> load_packed(const void* address, Packed<16>*) {
  const uint4 value = __ldcs(static_cast<const uint4*>(address));
  return {{value.x, value.y, value.z, value.w}};
}
FOREBAY_KERNEL Packed<8> load_packed(const void* address, Packed<8>*) {
  const uint2 value = __ldcs(static_cast<const uint2*>(address));
  return {{value.x, value.y}};
}
FOREBAY_KERNEL void store_packed(void* address, const Packed<16>& value) {
  __stcs(static_cast<uint4*>(address),
         make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]));
}
FOREBAY_KERNEL void store_packed(void* address, const Packed<8>& value) {
  __stcs(static_cast<uint2*>(address), make_uint2(value.words[0], value.words[1]));
}

FOREBAY_KERNEL Packed<16> load_shared(const float* address) {
  const uint4 value = *reinterpret_cast<const uint4*>(address);
  return {{value.x, value.y, value.z, value.w}};
}

#else

// A device faults on a wide access that is not aligned to its width, so here it ends the program.
inline void expect_aligned(const void* address, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes == 0) return;
  std::fprintf(stderr, "simulated kernel: a %zu-byte access at %p is not aligned\n", bytes, address);
  std::abort();
}
template <int bytes>
inline Packed<bytes> load_packed(const void* address, Packed<bytes>*) {
  expect_aligned(address, bytes);
  Packed<bytes> value;
  std::memcpy(&value, address, bytes);
  return value;
}
inline Packed<16> load_shared(const float* address) {
  return load_packed(address, static_cast<Packed<16>*>(nullptr));
}
template <int bytes>
inline void store_packed(void* address, const Packed<bytes>& value) {
  expect_aligned(address, bytes);
  std::memcpy(address, &value, bytes);
}

#endif

// `count` neighbouring elements of a type in memory.
template <DataType type, int count>
struct Granule {
  static constexpr int kBytes = count * static_cast<int>(sizeof(Storage<type>));
  static_assert(kBytes == 8 || kBytes == 16);
  Packed<kBytes> packed;

  FOREBAY_KERNEL void load(const Storage<type>* source) {
    packed = load_packed(source, static_cast<Packed<kBytes>*>(nullptr));
  }
  FOREBAY_KERNEL void store(Storage<type>* target) const { store_packed(target, packed); }

  // Element i as it lies in memory; `i` is a constant once loops are unrolled.
  FOREBAY_KERNEL Storage<type> raw(int i) const {
    if constexpr (type == DataType::kFloat32) {
      return float_from_bits(packed.words[i]);
    } else {
      return static_cast<std::uint16_t>(packed.words[i / 2] >> (16 * (i % 2)));
    }
  }
  FOREBAY_KERNEL float value(int i) const { return definitions::Element<type>::load(raw(i)); }

  // Sets all elements in ascending order, each once.
  FOREBAY_KERNEL void set_raw(int i, Storage<type> value) {
    if constexpr (type == DataType::kFloat32) {
      packed.words[i] = float_bits(value);
    } else if (i % 2 == 0) {
      packed.words[i / 2] = value;
    } else {
      packed.words[i / 2] |= static_cast<std::uint32_t>(value) << 16;
    }
  }
  FOREBAY_KERNEL void set(int i, float value) { set_raw(i, definitions::Element<type>::round(value)); }
};

}  // namespace forebay::cuda_kernels
