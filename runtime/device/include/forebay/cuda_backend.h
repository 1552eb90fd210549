// CudaBackend: a Backend on one CUDA device, through the driver alone. The driver is opened at run time
// (FOREBAY_LIBCUDA, a path, or libcuda.so.1), so nothing that includes this needs CUDA to be built or
// started.
//
// It works on the device's primary context, which the CUDA runtime and PyTorch use too, so pointers and
// streams may be exchanged with them. Beyond backend.h:
//
// Streams. A Stream's handle is a CUstream of the primary context, made by this backend or by others. The
// default streams are default_stream() and per_thread_stream(); a null handle is refused. Events are
// CUevents, without timing but for those of timed_event_create(). Several backends may share a device (one
// per rank of a process) and use each other's streams, events and addresses; each destroys its own.
//
// Context. Every call makes the primary context current on the calling thread and restores the earlier one
// before it returns.
//
// Graphs. While a stream is being captured, address-space and memory calls work as usual and do not become
// part of the graph. On the captured stream itself, copies, fills and launches are captured. Calls that would
// invalidate the capture (recording or waiting for events, host functions, synchronizing, destroying) are
// refused with kUnavailable and leave the capture as it was.
//
// Copies. Pinned memory makes copies asynchronous (pin). A copy from or to pageable host memory is correct,
// but queueing it may wait for the device.
//
// Failure. A kernel that faults loses the CUDA context: every stream and event of the process reports that
// failure from then on, and only a new process helps. A host function that calls a Backend fails its own
// stream alone; streams that waited for events of that stream do not fail.
//
// Processes. A child made by fork gets kUnavailable from every call. While the process ends (after main),
// giving back succeeds and does nothing.
#pragma once

#include <cstddef>
#include <memory>

#include "forebay/backend.h"

namespace forebay {

struct CudaBackendOptions {
  int ordinal = 0;  // Which device, counted as the driver does (CUDA_VISIBLE_DEVICES applies).
  std::size_t memory_bytes =
      0;  // The device budget for chunks and blocks; 0: all of the device but the room.
  // Device memory that stays free for the driver, which takes some for modules, local memory, graphs and
  // libraries: no chunk is made of it. At most an eighth of the device is kept.
  std::size_t room_bytes = std::size_t{384} << 20;
  // Gives all other devices with such a backend in this process access to this one's chunks, and this device
  // to theirs, for programs that use addresses of several devices in their kernels. Without it a peer gets
  // access when one of its backends copies from or to this device, or by open_to_peer().
  bool open_to_peers = false;
};

class CudaBackend : public Backend {
 public:
  // Errors: kUnavailable (no driver, no device, a forked child), kInvalidArgument (no such ordinal),
  // kUnsupported (a device without virtual memory management, a driver too old).
  static Result<std::unique_ptr<CudaBackend>> create(const CudaBackendOptions& options);

  // The number of devices; 0 when there is a driver and no device.
  // Errors: as read_cuda_system.
  static Result<int> device_count();

  // The streams that exist without stream_create: the legacy default stream, which waits for all blocking
  // streams, and the calling thread's default stream.
  static Stream default_stream() noexcept;
  static Stream per_thread_stream() noexcept;

  // Properties of the chunks. A trial at creation confirms those that the device claims.
  virtual bool chunks_have_posix_fd() const noexcept = 0;
  virtual bool chunks_have_rdma() const noexcept = 0;
  // Devices besides this one that can be given access.
  virtual int peer_count() const noexcept = 0;
  // Gives the device `ordinal` access to all chunks that are mapped here, now and later.
  // Errors: kUnsupported when it cannot reach this device; the driver's.
  virtual Status open_to_peer(int ordinal) = 0;

  // Calls `function(argument)` with the primary context current on this thread, for libraries that find their
  // device by it (NCCL), and restores the earlier context. Requires: `function` does not throw. Errors: the
  // context cannot be made current; `function` was not called then.
  virtual Status call_in_context(HostFunction function, void* argument) = 0;

  // Bytes of chunks and blocks held now.
  virtual std::size_t charged_bytes() const = 0;
  // Handles not yet given back (reservations, chunks, mappings, blocks, pins, streams, events, modules).
  virtual std::size_t live_handle_count() const = 0;
};

}  // namespace forebay
