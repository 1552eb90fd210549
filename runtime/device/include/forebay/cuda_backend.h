// CudaBackend: a Backend on one CUDA device, through the driver alone. The driver is opened at run time
// (FOREBAY_LIBCUDA, a path, or libcuda.so.1), so nothing that includes this needs CUDA to be built or
// started.
//
// It works on the device's primary context, the one that the CUDA runtime and PyTorch use: their pointers and
// streams are this backend's and the other way round. Beyond backend.h:
//
// Streams. A Stream's handle is a CUstream, of this backend's making or anybody's of the primary context. The
// default streams are default_stream() and per_thread_stream(); a null handle is no stream and is refused,
// also here. Events are CUevents without timing. Several backends may share a device (one per rank of a
// process) and be given each other's streams, events and addresses; each destroys its own.
//
// Context. Every call makes the primary context current on the calling thread and, where another one or none
// was current, puts that back before it returns.
//
// Graphs. While any stream is being captured, address-space and memory calls go on working; they do not
// become part of the graph. On a stream that is itself being captured, copies, fills and launches are
// captured; what would spoil the capture or makes no sense in it (recording or waiting for events, host
// functions, synchronizing, destroying) is refused with kUnavailable and leaves the capture as it was.
//
// Copies. Page-locked memory makes copies asynchronous (pin). A copy from or to pageable host memory is
// correct, but queueing it may wait for the device.
//
// Failure. A kernel that faults loses the context, as CUDA has it: every stream and event of the process
// reports that failure from then on, and only a new process helps. A host function that calls a Backend fails
// its own stream alone; streams that waited for that stream's events are not told.
//
// Processes. A child made by fork gets kUnavailable from every call. While the process ends (after main),
// giving back succeeds and does nothing.
#pragma once

#include <cstddef>
#include <memory>

#include "forebay/backend.h"

namespace forebay {

struct CudaBackendOptions {
  int ordinal = 0;               // Which device, counted as the driver does (CUDA_VISIBLE_DEVICES applies).
  std::size_t memory_bytes = 0;  // The device budget for chunks and blocks; 0: what the device has.
};

class CudaBackend : public Backend {
 public:
  // Errors: kUnavailable (no driver, no device, a forked child), kInvalidArgument (no such ordinal),
  // kUnsupported (a device without virtual memory management, a driver too old).
  static Result<std::unique_ptr<CudaBackend>> create(const CudaBackendOptions& options);

  // Devices there are; 0 when there is a driver and no device.
  // Errors: as read_cuda_system.
  static Result<int> device_count();

  // The streams that have no object: the legacy default stream, which waits for all blocking streams, and the
  // calling thread's own default stream.
  static Stream default_stream() noexcept;
  static Stream per_thread_stream() noexcept;

  // What chunks are made with: chosen at creation by what the device claims and a trial confirms.
  virtual bool chunks_have_posix_fd() const noexcept = 0;
  virtual bool chunks_have_rdma() const noexcept = 0;
  // Devices besides this one that set_access gives access to.
  virtual int peer_count() const noexcept = 0;

  // Calls `function(argument)` with the primary context current on this thread, for libraries that find their
  // device by it (NCCL), and puts back what was current.
  // Requires: `function` does not throw. Errors: those of making the context current; it was not called then.
  virtual Status call_in_context(HostFunction function, void* argument) = 0;

  // Bytes of chunks and blocks held now.
  virtual std::size_t charged_bytes() const = 0;
  // Handles not yet given back (reservations, chunks, mappings, blocks, pins, streams, events, modules).
  virtual std::size_t live_handle_count() const = 0;
};

}  // namespace forebay
