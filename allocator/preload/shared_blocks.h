// Shares blocks of the arenas with other processes (cuIpcGetMemHandle and related calls). The driver refuses
// these calls for memory of cuMemCreate, which has file descriptors instead.
//
// A handle names the process and the block. The opening process connects to a socket of that process, gets a
// descriptor for each chunk of the block, and maps the chunks side by side. Both processes need the preload,
// the same user (or root), and the same network namespace; otherwise the handle is refused as a bad one.
//
// Threads: every function may be called from any thread. The first shared block starts one thread, which
// answers connections.
#pragma once

#include "allocator/preload/calls.h"
#include "allocator/preload/process_arenas.h"

namespace forebay {

// Makes a handle for the block that starts at `begin`, the same one every time. The block stays pinned: its
// address and memory stay together. False: it cannot be shared (chunks without descriptors, no socket);
// `handle` is unchanged. Requires: the block is live.
bool share_block(const ProcessArenas::Use& use, DevicePtr begin, std::size_t bytes, DriverIpcHandle* handle);

// Releases what keeps the memory of shared blocks: of those of an arena that is gone, and of a block that the
// arena gets back. Their handles cannot be opened any more; processes that have opened one keep the memory.
void forget_shared_blocks(int device, std::uint64_t generation);
void forget_shared_block(DevicePtr begin);

// Whether share_block of any process made the handle.
bool is_shared_handle(const DriverIpcHandle& handle);

// Maps the block for the current context's device. Opening a handle again gives the same address and needs
// one more close_shared_block.
DriverResult open_shared_block(const DriverIpcHandle& handle, unsigned flags, DriverAddress* address);

struct OpenedRange {
  DriverAddress begin = 0;
  std::size_t bytes = 0;
  std::uint64_t id = 0;  // No other opening has or had it.
  DriverContext context = nullptr;
};
// Finds the opened block around the address.
bool find_opened_block(DriverAddress address, OpenedRange* range);

// Unmaps what was opened in a context that is gone, as the driver does with memory that it has opened.
void forget_opened_blocks(DriverContext context);

// Undoes one opening. The last one waits for the users of the context that opened the block (wait_for_users)
// and unmaps it, during a capture later. False: no shared block was opened at that address.
bool close_shared_block(DriverAddress address, DriverResult* result);
// Unmaps what was closed during a capture, unless there is one still.
void finish_waiting_closes();
// Forgets that they wait for work of a context, which is gone.
void forget_closing_user(DriverContext context);

}  // namespace forebay
