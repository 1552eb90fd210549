// Each row of our table against the toolkit's headers: the name has, at the row's version, the function type
// that the table gives it, and so has the symbol. In a file of its own, because declarations of superseded
// functions are to be had only in place of the usual ones.
#define __CUDA_API_VERSION_INTERNAL  // NOLINT: the headers' own name.
#include <cuda.h>
#include <cudaTypedefs.h>
#undef __CUDA_API_VERSION_INTERNAL

#include "tests/device/cuda/same_abi.h"
#include "tests/fakes/cuda/abi.h"

namespace forebay::cuda {

#define FOREBAY_TEST_VARIANT_NONE(name, symbol, version)
#define FOREBAY_TEST_VARIANT_PTSZ(name, symbol, version)                                        \
  static_assert(same_abi<symbol##_function*, PFN_##name##_v##version##_ptsz>, #symbol "_ptsz"); \
  static_assert(same_abi<symbol##_function*, decltype(&::symbol##_ptsz)>, #symbol "_ptsz");
#define FOREBAY_TEST_VARIANT_PTDS(name, symbol, version)                                        \
  static_assert(same_abi<symbol##_function*, PFN_##name##_v##version##_ptds>, #symbol "_ptds"); \
  static_assert(same_abi<symbol##_function*, decltype(&::symbol##_ptds)>, #symbol "_ptds");
#define FOREBAY_TEST_ROW(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  static_assert(same_abi<symbol##_function*, PFN_##name##_v##version>, #symbol);                 \
  static_assert(same_abi<symbol##_function*, decltype(&::symbol)>, #symbol);                     \
  FOREBAY_TEST_VARIANT_##VARIANT(name, symbol, variant_version)
FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_TEST_ROW)

// The comparison can tell these apart.
static_assert(!same_abi<cuMemAlloc_v2_function*, cuMemFree_v2_function*>);
static_assert(!same_abi<CuResult (*)(int), CuResult (*)(long)>);
static_assert(!same_abi<CuResult (*)(int*), CuResult (*)(long*)>);
static_assert(!same_abi<CuResult (*)(float), CuResult (*)(int)>);
static_assert(!same_abi<CuResult (*)(CuDevicePtr*), CuResult (*)(CuDevicePtr)>);
static_assert(!same_abi<CuResult (*)(const CuMemAccessDesc*), CuResult (*)(const CuMemLocation*)>);

}  // namespace forebay::cuda
