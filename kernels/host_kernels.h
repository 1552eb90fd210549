// The host bodies of the kernels: plain functions over a range of elements, in two forms with the same bits,
// one straight from definitions.h and one in SIMD for the best instruction set of the running processor.
//
// They neither check arguments nor start threads: kernels.cc does the first, host_module.cc the second.
#pragma once

#include <cmath>
#include <cstddef>

#include "forebay/kernels.h"
#include "kernels/definitions.h"

namespace forebay::host_kernels {

// See KeptUpdateArguments::average.
struct AverageArguments {
  const void* source;
  float* average;
  DataType source_type;
  float weight;
};

// Each works on elements [begin, end) of its arguments; `norm_leaves` on leaves, writing scratch[begin, end).
struct RangeKernels {
  const char* target;  // "scalar", or Highway's name of the instruction set.
  void (*cast)(const CastArguments& arguments, std::size_t begin, std::size_t end);
  void (*accumulate)(const AccumulateArguments& arguments, std::size_t begin, std::size_t end);
  void (*scale)(const ScaleArguments& arguments, std::size_t begin, std::size_t end);
  void (*add)(const AddArguments& arguments, std::size_t begin, std::size_t end);
  void (*norm_leaves)(const NormArguments& arguments, std::size_t begin, std::size_t end);
  void (*adamw)(const AdamWArguments& arguments, std::size_t begin, std::size_t end);
  void (*average)(const AverageArguments& arguments, std::size_t begin, std::size_t end);
};

// The definitions in a loop.
const RangeKernels& scalar_kernels() noexcept;

// The kernels for this processor; scalar_kernels() where it has no fused multiply-add.
const RangeKernels& simd_kernels();

inline definitions::AdamWConstants constants_of(const AdamWArguments& a) noexcept {
  return definitions::adamw_constants(a, a.factor, a.c1, a.s2);
}

// Calls `body` with the optimizer as a compile-time constant: `body.template operator()<optimizer>()`.
template <typename Body>
void with_optimizer(Optimizer optimizer, Body&& body) {
  switch (optimizer) {
    case Optimizer::kAdamW:
      body.template operator()<Optimizer::kAdamW>();
      break;
    case Optimizer::kAdam:
      body.template operator()<Optimizer::kAdam>();
      break;
    case Optimizer::kSgd:
      body.template operator()<Optimizer::kSgd>();
      break;
    case Optimizer::kLion:
      body.template operator()<Optimizer::kLion>();
      break;
    case Optimizer::kAdafactor:
    case Optimizer::kMuon:
      break;  // Refused by the checks of arguments.
  }
}

// Whether the SIMD bodies' way of dividing by s2 gives the definition's bits; elsewhere they call the
// definition. All of a beta2 from 0 to 1 - 2^-40 is in the range, and a negative zero of eps is not, which
// the sign of a zero v would reach.
inline bool has_simd_update(const AdamWArguments& a) noexcept {
  return a.s2 >= 0x1p-20f && a.s2 <= 1.0f && !std::signbit(a.eps);
}

// Calls `body` with the type as a compile-time constant: `body.template operator()<type>()`.
template <typename Body>
void with_type(DataType type, Body&& body) {
  switch (type) {
    case DataType::kFloat32:
      body.template operator()<DataType::kFloat32>();
      break;
    case DataType::kBfloat16:
      body.template operator()<DataType::kBfloat16>();
      break;
    case DataType::kFloat16:
      body.template operator()<DataType::kFloat16>();
      break;
  }
}

// Where rank r's contribution starts.
inline const void* contribution(const AccumulateArguments& a, int rank) noexcept {
  return rank == a.rank ? a.own : a.received + static_cast<std::size_t>(rank) * a.received_stride_bytes;
}

}  // namespace forebay::host_kernels
