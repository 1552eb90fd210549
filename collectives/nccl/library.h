// NcclLibrary: NCCL as opened at run time, and the meaning of its results. Nothing of ours links NCCL, and no
// second copy is loaded into a process that has one: two copies in one process do not know of each other.
#pragma once

#include <string>

#include "collectives/nccl/abi.h"
#include "forebay/nccl_communicator.h"

namespace forebay::internal {

struct NcclLibrary {
#define FOREBAY_NCCL_MEMBER(symbol, result, parameters) nccl::symbol##_function* symbol = nullptr;
  FOREBAY_NCCL_ENTRY_POINTS(FOREBAY_NCCL_MEMBER)  // The optional ones may be null.
#undef FOREBAY_NCCL_MEMBER

  NcclLibraryFacts facts;

  // The process's library, as nccl_library() describes. Never closed: its threads may run until the process
  // ends.
  static Result<const NcclLibrary*> get(const std::string& path);
  // Opens the library at `path` only, separately from that of get().
  static Result<NcclLibrary> open(const std::string& path);
};

// "2.28.9".
std::string nccl_version_text(int version);

// An error: "cannot <what>: <call>: <NCCL's error name>: <its message>; <advice>". `comm` may be null.
// Requires: `result` is neither success nor in progress.
Status nccl_failure(const NcclLibrary& library, nccl::NcclResult result, nccl::NcclComm comm,
                    const char* call, const std::string& what);

}  // namespace forebay::internal
