// NCCL's binary interface, as far as we call or imitate it: result codes, types, the configuration and one
// table of entry points. Declarations only: nothing here loads or calls a library, and NCCL's own header is
// not needed.
//
// Everything lies in namespace forebay::nccl and nothing is named as in <nccl.h>, so that a test can include
// both; tests/collectives/nccl/abi_test.cc does, and holds every value, offset and signature against the real
// header wherever one is installed.
//
// The lists are X-macros: a list named FOREBAY_NCCL_... takes a macro X and expands it once per row.
//
// Source: NCCL's API reference and the header of NCCL 2.30.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace forebay::nccl {

// As ncclGetVersion counts: 2.18.5 is 21805.
constexpr int version_code(int major, int minor, int patch) noexcept {
  return major * 10'000 + minor * 100 + patch;
}
// The oldest version with non-blocking communicators that can be set up, finalised and aborted as we do it.
inline constexpr int kVersionMin = version_code(2, 18, 0);
// The newest version that this file was compared with. Newer ones are used, with one message in the log.
inline constexpr int kVersionKnown = version_code(2, 30, 99);

// --- result codes: X(enumerator, name in nccl.h, value) ---
// clang-format off
#define FOREBAY_NCCL_RESULTS(X) \
  X(kSuccess, ncclSuccess, 0) \
  X(kUnhandledCudaError, ncclUnhandledCudaError, 1) \
  X(kSystemError, ncclSystemError, 2) \
  X(kInternalError, ncclInternalError, 3) \
  X(kInvalidArgument, ncclInvalidArgument, 4) \
  X(kInvalidUsage, ncclInvalidUsage, 5) \
  X(kRemoteError, ncclRemoteError, 6) \
  X(kInProgress, ncclInProgress, 7)

// --- element types and reductions ---
#define FOREBAY_NCCL_TYPES(X) \
  X(kInt8, ncclInt8, 0) \
  X(kUint8, ncclUint8, 1) \
  X(kInt32, ncclInt32, 2) \
  X(kUint32, ncclUint32, 3) \
  X(kInt64, ncclInt64, 4) \
  X(kUint64, ncclUint64, 5) \
  X(kFloat16, ncclFloat16, 6) \
  X(kFloat32, ncclFloat32, 7) \
  X(kFloat64, ncclFloat64, 8) \
  X(kBfloat16, ncclBfloat16, 9)
// clang-format on

#define FOREBAY_NCCL_VALUE(name, real, value) name = value,
enum class NcclResult : int { FOREBAY_NCCL_RESULTS(FOREBAY_NCCL_VALUE) };
enum class NcclType : int { FOREBAY_NCCL_TYPES(FOREBAY_NCCL_VALUE) };
#undef FOREBAY_NCCL_VALUE
enum class NcclReduction : int { kSum = 0 };

using NcclComm = struct NcclCommTag*;
using NcclStream = struct NcclStreamTag*;  // A cudaStream_t, which is a CUstream.

inline constexpr std::size_t kUniqueIdBytes = 128;
// A secret: a process that knows it can join.
struct NcclUniqueId {
  char internal[kUniqueIdBytes];
};

inline constexpr int kUndefinedInt = INT_MIN;
inline constexpr unsigned kApiMagic = 0xcafebeef;

// The part of ncclConfig_t that NCCL 2.18 has. A newer library sees that from `size` and `version`, and takes
// its defaults for the rest.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = kApiMagic;
  unsigned version = static_cast<unsigned>(kVersionMin);
  int blocking = kUndefinedInt;
  int cga_cluster_size = kUndefinedInt;
  int min_ctas = kUndefinedInt;
  int max_ctas = kUndefinedInt;
  const char* net_name = nullptr;
  int split_share = kUndefinedInt;
};

// --- entry points: X(symbol, result, parameters) ---
// clang-format off
#define FOREBAY_NCCL_REQUIRED(X) \
  X(ncclGetVersion, NcclResult, (int* version)) \
  X(ncclGetUniqueId, NcclResult, (NcclUniqueId* id)) \
  X(ncclCommInitRankConfig, NcclResult, (NcclComm* comm, int size, NcclUniqueId id, int rank, NcclConfig* config)) \
  X(ncclCommFinalize, NcclResult, (NcclComm comm)) \
  X(ncclCommDestroy, NcclResult, (NcclComm comm)) \
  X(ncclCommAbort, NcclResult, (NcclComm comm)) \
  X(ncclCommGetAsyncError, NcclResult, (NcclComm comm, NcclResult* error)) \
  X(ncclCommCount, NcclResult, (NcclComm comm, int* count)) \
  X(ncclCommUserRank, NcclResult, (NcclComm comm, int* rank)) \
  X(ncclGetErrorString, const char*, (NcclResult result)) \
  X(ncclGetLastError, const char*, (NcclComm comm)) \
  X(ncclGroupStart, NcclResult, ()) \
  X(ncclGroupEnd, NcclResult, ()) \
  X(ncclSend, NcclResult, (const void* source, std::size_t count, NcclType type, int peer, NcclComm comm, NcclStream stream)) \
  X(ncclRecv, NcclResult, (void* target, std::size_t count, NcclType type, int peer, NcclComm comm, NcclStream stream)) \
  X(ncclAllGather, NcclResult, (const void* source, void* target, std::size_t count, NcclType type, NcclComm comm, NcclStream stream)) \
  X(ncclReduceScatter, NcclResult, (const void* source, void* target, std::size_t count, NcclType type, NcclReduction reduction, NcclComm comm, NcclStream stream))

// Entry points that only some releases have.
#define FOREBAY_NCCL_OPTIONAL(X) \
  X(ncclCommRegister, NcclResult, (NcclComm comm, void* address, std::size_t bytes, void** handle)) \
  X(ncclCommDeregister, NcclResult, (NcclComm comm, void* handle)) \
  X(ncclCommRevoke, NcclResult, (NcclComm comm, int flags))

#define FOREBAY_NCCL_ENTRY_POINTS(X) FOREBAY_NCCL_REQUIRED(X) FOREBAY_NCCL_OPTIONAL(X)
// clang-format on

// ncclSend_function, and so on: the function types.
#define FOREBAY_NCCL_FUNCTION(symbol, result, parameters) using symbol##_function = result parameters;
FOREBAY_NCCL_ENTRY_POINTS(FOREBAY_NCCL_FUNCTION)
#undef FOREBAY_NCCL_FUNCTION

}  // namespace forebay::nccl
