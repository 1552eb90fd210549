// Ranks as processes of one host, over memory they share: a fixed number of fixed slots per rank through
// which everything goes in pieces, so the memory does not depend on the size of the model or of an operation.
//
// Bits. The owner of a slice adds the ranks' pieces straight from their slots, in rank order and by the
// definition of Kernels::accumulate: the bits of `local` and `gloo`. `receive` of a reduce_scatter is not
// touched; `target` may be this rank's own slice of `source`.
//
// Waiting. A rank that waits looks again for some microseconds where the ranks have processors enough, and
// then sleeps in the kernel until a peer rings or the deadline passes. Data operations run on their stream's
// thread, control operations on the caller's; nothing here has a thread of its own.
//
// Failure. The first failure is one record in the shared memory, so every rank reports the same one, and who
// sleeps is woken for it. Every kShmLivenessPeriod a rank that waits, or that asks for status(), looks
// whether its peers' processes (process id and start time) still run: one that was killed is named after at
// most that long. A peer that left in order fails only those who need it. A send and a recv that
// meet with different sizes or tags are an error at once; one whose peer waits in a collective instead says
// so when its deadline passes.
//
// What is left behind. The memory has no name in any file system: it is an anonymous file of rank 0, which
// the others open through /proc while they join. So it is gone with the last process, however that ended. In
// the store there is one text while the ranks join, and one with the cause if that fails.
//
// Requires: one host, one process namespace and one user; ranks find out by the boot's id and the namespaces,
// never by names or variables of the environment.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "forebay/process_communicator.h"

namespace forebay {

using ShmOptions = ProcessOptions;  // `interface` is not looked at.

inline constexpr int kShmRanksMax = 256;
inline constexpr std::chrono::milliseconds kShmLivenessPeriod{100};

// The shared memory of one communicator of `size` ranks, once for all of them together: 2084 KiB a rank (four
// data slots of 512 KiB, four control slots of 8 KiB, 4 KiB of state) and 8 KiB. A communicator made by
// split() has its own; one of a single rank has none.
std::size_t shm_segment_bytes(int size) noexcept;

// Collective over all ranks. Errors: kTimeout naming the ranks that never came; kUnsupported when a rank is
// on another host or in another namespace, or the backend's memory is not the host's; kOutOfMemory when the
// shared memory does not fit.
Result<std::unique_ptr<Communicator>> create_shm_communicator(const ShmOptions& options, Backend& backend);

}  // namespace forebay
