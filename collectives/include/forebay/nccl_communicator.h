// Ranks with a CUDA device each, over NCCL: its library moves the bytes between devices, our kernels add them
// in rank order, and another communicator of the same ranks carries what NCCL does not have: control
// operations, agreement on the first failure, and a watch over the peers.
//
// NCCL is opened at run time, so nothing that includes this needs it to be built or started. See
// nccl_library().
//
// Bits. `reduce_scatter` sends each slice to its owner and adds there with Kernels::accumulate: the bits of
// `local`, `gloo` and `shm`. NCCL's own reductions add in an order, and for 16-bit types with a rounding for
// each hop, that depend on its choice of algorithm; NcclOrder::kFast asks for them.
//
// Watching. NCCL itself waits for ever: for a peer that died, one that is late and one that issued something
// else. So each communicator has a thread that, every kNcclHeartbeat, exchanges with those of the other ranks
// what was issued and what is done. It finds the rank that issued another operation, the one that did not
// come within the deadline (counted from when this rank's stream has come to the operation) and, through
// `control`, the one that died. Then, and after any error of NCCL, every rank takes the same first failure
// from `control` and aborts its part of NCCL, so that what is queued on its stream ends. With each operation
// its fingerprint travels between the devices too; status() has compared those of all operations that are
// done.
//
// Waiting. Creation connects all pairs of ranks, so that operations are queued without waiting for peers. A
// call waits, at most the deadline, for NCCL to finish setting up what it was asked, or for the oldest of
// kNcclInFlightMax operations. A destructor waits for what was queued, and then up to kNcclGoodbyeMax for the
// others to leave as well. A send and its recv are matched by (peer, order of issue); a different tag or size
// on the other side is an error.
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
  kFast,  // NCCL's own reduction for fp32 in contiguous slices, in an order of NCCL's; all else as kRank.
};

struct NcclOptions {
  // A path to libnccl.so.2 for a process that has none yet; empty: FOREBAY_NCCL_LIBRARY, else the system's.
  std::string library;
  std::chrono::milliseconds deadline{60'000};
  NcclOrder order = NcclOrder::kRank;  // The same on all ranks.
  // The trainer's own ncclComm_t of the same ranks, in use from its creation to the end of this communicator
  // by us alone, and not given back by us. It should be non-blocking: a call into a blocking one may wait
  // past the deadline. After a failure it is revoked where NCCL has ncclCommRevoke; otherwise it is the
  // trainer's to abort, and what is queued on it ends then.
  void* adopted = nullptr;
};

// How often ranks tell each other where they are. Smaller costs an exchange on `control` more often; larger
// finds a mismatch or a lost rank later.
inline constexpr std::chrono::milliseconds kNcclHeartbeat{50};
// Operations queued on the stream and not done. More are waited for.
inline constexpr int kNcclInFlightMax = 64;
// How long a rank that leaves waits for the others to leave too, so that NCCL can end in order; after it this
// rank's part of NCCL is aborted, which loses nothing: all it was asked to do is done.
inline constexpr std::chrono::milliseconds kNcclGoodbyeMax{200};

class NcclCommunicator : public Communicator {
 public:
  // Lets NCCL use these bytes without copies of its own. Give mapped chunks (an arena's memory): NCCL cannot
  // register memory of Backend::alloc safely.
  // Requires: every rank registers its part of the same operations' buffers; the memory stays mapped until it
  //           is deregistered or this communicator ends.
  // Errors:   kUnsupported when the library does not offer it.
  virtual Status register_buffer(DevicePtr address, std::size_t bytes) = 0;
  // Takes the address that was registered.
  virtual Status deregister_buffer(DevicePtr address) = 0;
};

// What was loaded: for reports and for deciding.
struct NcclLibraryFacts {
  std::string path;
  int version = 0;  // As ncclGetVersion counts: 22809 is 2.28.9.
  bool can_register = false;
  bool can_revoke = false;
};

// Loads NCCL: the copy the process has already (a trainer's), else `library`, else what FOREBAY_NCCL_LIBRARY
// names, else the system's libnccl.so.2. Once; later calls answer with the first one loaded.
// Errors: kUnavailable (there is none), kUnsupported (too old, or an entry point is missing).
Result<NcclLibraryFacts> nccl_library(const std::string& library = {});

// Collective over the ranks of `control`, which is used and kept by the new communicator.
// Requires: `backend` and `kernels` outlive it; each rank has a device of its own, as NCCL demands.
// Errors:   the first failure of any rank, on all of them.
Result<std::unique_ptr<NcclCommunicator>> create_nccl_communicator(std::unique_ptr<Communicator> control,
                                                                   CudaBackend& backend, Kernels& kernels,
                                                                   const NcclOptions& options = {});

}  // namespace forebay
