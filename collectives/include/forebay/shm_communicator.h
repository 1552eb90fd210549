// Ranks as processes of one host, over shared memory. All bytes go in pieces through a fixed number of slots
// of a fixed size per rank, so the memory depends neither on the size of the model nor on that of an
// operation.
//
// Exactness. The owner of a slice adds the ranks' pieces straight from their slots, in rank order and by the
// definition of Kernels::accumulate: bit for bit the same as `local` and `gloo`. A reduce_scatter does not
// touch `receive`, and `target` may be this rank's own slice of `source`.
//
// Waiting. A rank that waits looks again for some microseconds, if the ranks have processors enough, and then
// sleeps in the kernel until a peer wakes it or the deadline passes. Data operations run on their stream's
// thread, control operations on the caller's; this communicator has no thread of its own.
//
// Failure. The first failure is one record in the shared memory, so every rank reports the same one, and
// sleeping ranks are woken for it. Every 100 ms a rank that waits, or that asks for status(), looks whether
// its peers' processes (by process id and start time) still run; so a killed rank is named within that
// time. A peer that left in order fails only the ranks that need it. A send and a recv that meet with
// different sizes or tags are an error at once; when the peer is in a collective instead, the deadline finds
// it.
//
// Nothing is left behind. The memory is an anonymous file of rank 0, which the others open through /proc
// while they join: it is gone with the last process, however that ended. The rendezvous store holds one text
// while the ranks join, and one more with the reason if that fails.
//
// Memory: 2084 KiB a rank (four data slots of 512 KiB, four control slots of 8 KiB, 4 KiB of state) and 8
// KiB, once for all ranks together. A communicator made by split() has its own; one of a single rank has
// none.
#pragma once

#include <memory>

#include "forebay/process_communicator.h"

namespace forebay {

using ShmOptions = ProcessOptions;  // `interface` is not used.

inline constexpr int kShmRanksMax = 256;

// Order:    collective over all ranks; blocks.
// Requires: `backend` outlives the communicator.
// Errors:   kTimeout naming the ranks that did not join; kPeerLost naming a rank that ended; kUnsupported
//           when a rank is on another host, in another process namespace or of another user, or when the
//           host does not reach the backend's memory; kOutOfMemory when the shared memory does not fit;
//           kInvalidArgument for more than kShmRanksMax ranks.
Result<std::unique_ptr<Communicator>> create_shm_communicator(const ShmOptions& options, Backend& backend);

}  // namespace forebay
