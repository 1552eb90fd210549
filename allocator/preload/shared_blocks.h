// Blocks of the arenas in other processes: cuIpcGetMemHandle and its kin, which the driver refuses for memory
// of cuMemCreate, by means of the file descriptors that such memory has instead.
//
// A handle names the process and the block. Who opens one connects to a socket of that process, gets a
// descriptor for each chunk that the block lies in, and maps those side by side. So both processes need the
// preload, one user (or root), and one network namespace; others are refused as a bad handle is.
//
// Threads: every function may be called from any thread. The first block that is shared starts one thread,
// which answers those who connect.
#pragma once

#include "allocator/preload/driver_types.h"
#include "allocator/preload/process_arenas.h"

namespace forebay {

// A handle for the block that starts at `begin`, the same one every time. `begin` must be live, and stays
// pinned. False: it cannot be shared (chunks without descriptors, no socket); `handle` is as it was.
bool share_block(const ProcessArenas::Use& use, DevicePtr begin, std::size_t bytes, DriverIpcHandle* handle);

// Whether the handle is one of share_block, of whatever process.
bool is_shared_handle(const DriverIpcHandle& handle);

// Maps the block for the current context's device. Opening a handle again gives the same address, and counts.
DriverResult open_shared_block(const DriverIpcHandle& handle, unsigned flags, DriverAddress* address);

// Undoes one opening; the last one unmaps, after all work of the current context. False: it is no such
// address.
bool close_shared_block(DriverAddress address, DriverResult* result);

}  // namespace forebay
