// The exported functions: one per row of the table, and a second one for a row with a per-thread variant; and
// cuGetProcAddress, which answers from the same table.
#include <cstring>

#include "tests/fakes/cuda/driver.h"

#define FAKE_CUDA_EXPORT extern "C" [[gnu::visibility("default")]]

using namespace forebay::cuda;  // NOLINT: the parameter types of the table.

#define FAKE_CUDA_CALL(symbol, arguments, per_thread)                   \
  {                                                                     \
    const CuResult refused = forebay::fake_cuda::admit(symbol##_index); \
    if (refused != CuResult::kSuccess) return refused;                  \
    const forebay::fake_cuda::EntryScope entry_scope;                   \
    const forebay::fake_cuda::PerThreadScope scope(per_thread);         \
    return forebay::fake_cuda::symbol arguments;                        \
  }
#define FAKE_CUDA_EXPORT_NONE(symbol, parameters, arguments)
#define FAKE_CUDA_EXPORT_PTSZ(symbol, parameters, arguments) \
  FAKE_CUDA_EXPORT CuResult symbol##_ptsz parameters FAKE_CUDA_CALL(symbol, arguments, true)
#define FAKE_CUDA_EXPORT_PTDS(symbol, parameters, arguments) \
  FAKE_CUDA_EXPORT CuResult symbol##_ptds parameters FAKE_CUDA_CALL(symbol, arguments, true)
#define FAKE_CUDA_ROW(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  FAKE_CUDA_EXPORT CuResult symbol parameters FAKE_CUDA_CALL(symbol, arguments, false)        \
      FAKE_CUDA_EXPORT_##VARIANT(symbol, parameters, arguments)
FOREBAY_CUDA_ENTRY_POINTS(FAKE_CUDA_ROW)
#undef FAKE_CUDA_ROW

namespace forebay::fake_cuda {
namespace {

template <typename Function>
void* address_of(Function* function) {
  return reinterpret_cast<void*>(function);
}

#define FAKE_CUDA_VARIANT_NONE(symbol) nullptr
#define FAKE_CUDA_VARIANT_PTSZ(symbol) address_of(&::symbol##_ptsz)
#define FAKE_CUDA_VARIANT_PTDS(symbol) address_of(&::symbol##_ptds)

struct Exported {
  void* function;
  void* variant;
};

const Exported& exported(std::size_t entry) {
  static const Exported table[] = {
#define FAKE_CUDA_ROW(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  {address_of(&::symbol), FAKE_CUDA_VARIANT_##VARIANT(symbol)},
      FOREBAY_CUDA_ENTRY_POINTS(FAKE_CUDA_ROW)
#undef FAKE_CUDA_ROW
  };
  return table[entry];
}

}  // namespace

CuResult cuGetProcAddress_v2(const char* name, void** function, int version, std::uint64_t flags,
                             CuProcAddressQueryResult* found) {
  const int driver_version = driver().options.driver_version;
  if (name == nullptr || function == nullptr || version > driver_version ||
      flags > kProcAddressPerThreadStream) {
    return CuResult::kInvalidValue;
  }
  *function = nullptr;
  CuProcAddressQueryResult answer = CuProcAddressQueryResult::kSymbolNotFound;
  for (std::size_t i = 0; i < kEntryPointCount;
       ++i) {  // Rows of a name ascend in version: the last that fits stays.
    const EntryPoint& row = kEntryPoints[i];
    if (std::strcmp(row.name, name) != 0 || row.version > driver_version) continue;
    if (row.version > version) {
      if (*function == nullptr) answer = CuProcAddressQueryResult::kVersionNotSufficient;
      continue;
    }
    answer = CuProcAddressQueryResult::kSuccess;
    const bool variant = flags == kProcAddressPerThreadStream && exported(i).variant != nullptr &&
                         row.variant_version <= version;
    *function = variant ? exported(i).variant : exported(i).function;
  }
  if (found != nullptr) *found = answer;
  return CuResult::kSuccess;
}

// The older form has no other way to say that there is no such function.
CuResult cuGetProcAddress(const char* name, void** function, int version, std::uint64_t flags) {
  const CuResult result = cuGetProcAddress_v2(name, function, version, flags, nullptr);
  if (result != CuResult::kSuccess) return result;
  return *function != nullptr ? CuResult::kSuccess : CuResult::kNotFound;
}

// The driver's private tables are its own: nothing here imitates them.
CuResult cuGetExportTable(const void** table, const CuUuid*) {
  if (table != nullptr) *table = nullptr;
  return CuResult::kNotFound;
}

}  // namespace forebay::fake_cuda
