// Ranks with a CUDA device each, over NCCL. NCCL moves the bytes between devices, our kernels add them in
// rank order, and another communicator of the same ranks does the rest: control operations, agreement on the
// first failure, and watching the peers.
//
// NCCL is opened at run time: a program that includes this header needs no NCCL to be built or started. See
// nccl_library().
//
// Exactness. `reduce_scatter` sends each slice to its owner, which adds with Kernels::accumulate: bit for bit
// the same as `local`, `gloo` and `shm`. NCCL's own reductions add in an order that depends on its choice of
// algorithm, and round 16-bit types at each hop; NcclOrder::kFast asks for them.
//
// Watching. NCCL itself waits for ever for a peer that died, that is late, or that issued another operation.
// So each communicator has a thread that, every 50 ms, exchanges with the other ranks which operations were
// issued and which are done. It finds the rank that issued another operation, the rank that did not come
// within the deadline (which begins when this rank's stream reaches the operation) and, through
// `control`, the rank that died. Then, and after any error of NCCL, every rank takes the same first failure
// from `control` and aborts its part of NCCL, so that work queued on its stream ends. Fingerprints also
// travel between the devices: that of a message with it, those of collectives with every eighth and with a
// gather that decides. status() has compared those that have come.
//
// Waiting. Creation connects all pairs of ranks, so operations are queued without waiting for peers. A call
// waits, at most the deadline, until NCCL has set up the operation, and until at most 64 operations are in
// flight. A destructor waits until the queued operations are done, and then up to 200 ms for the other ranks
// to leave as well. A send and its recv are matched by (peer, order of issue); a different tag or size is an
// error.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "forebay/communicator.h"
#include "forebay/cuda_backend.h"
#include "forebay/kernels.h"

namespace forebay {

enum class NcclOrder : std::uint8_t {
  kRank,  // The sum in rank order: exact, the same everywhere.
  kFast,  // NCCL's own reduction for fp32 in contiguous slices, in NCCL's order; all else as kRank.
};

struct NcclOptions {
  // A path to libnccl.so.2, for a process that has none yet. Empty: FOREBAY_NCCL_LIBRARY, else the system's.
  std::string library;
  std::chrono::milliseconds deadline{60'000};
  NcclOrder order = NcclOrder::kRank;  // The same on all ranks.
  // The trainer's own ncclComm_t of the same ranks, or null. This communicator alone uses it, from its
  // creation to its end, and never destroys it. It should be non-blocking: a call into a blocking one may
  // wait past the deadline. After a failure it is revoked where NCCL has ncclCommRevoke; otherwise the
  // trainer aborts it, which ends the work queued on it.
  void* adopted = nullptr;
};

class NcclCommunicator : public Communicator {
 public:
  // Lets NCCL use these bytes without copies of its own. Give mapped chunks (an arena's memory): NCCL cannot
  // register memory of Backend::alloc safely.
  // Requires: every rank registers its part of the same operations' buffers; the memory stays mapped until it
  //           is deregistered or this communicator ends.
  // Errors:   kUnsupported when the library does not offer it; kInvalidArgument for a registered buffer.
  virtual Status register_buffer(DevicePtr address, std::size_t bytes) = 0;
  // Takes the address that was registered.
  // Errors:   kInvalidArgument when nothing is registered there.
  virtual Status deregister_buffer(DevicePtr address) = 0;
};

// The library that was loaded.
struct NcclLibraryFacts {
  std::string path;
  int version = 0;  // As ncclGetVersion counts: 22809 is 2.28.9.
  bool can_register = false;
  bool can_revoke = false;
};

// Loads NCCL: the copy that the process has already (a trainer's), else the one of NcclOptions::library. It
// is loaded once; later calls return the first one. Threads: any. Errors:  kUnavailable (there is none),
// kUnsupported (too old, or an entry point is missing).
Result<NcclLibraryFacts> nccl_library(const std::string& library = {});

// Order:    collective over the ranks of `control`; blocks. The new communicator uses `control` and keeps it.
// Requires: `backend` and `kernels` outlive it; each rank has a device of its own, as NCCL demands.
// Errors:   the first failure of any rank, on all of them.
Result<std::unique_ptr<NcclCommunicator>> create_nccl_communicator(std::unique_ptr<Communicator> control,
                                                                   CudaBackend& backend, Kernels& kernels,
                                                                   const NcclOptions& options = {});

}  // namespace forebay
