// Accounts: every allocation, free and refusal is counted in the record and, if events are kept, in the
// events. Requires: the preload has started, so there is a record.
#pragma once

#include <cstddef>

#include "allocator/preload/block_book.h"
#include "allocator/preload/calls.h"
#include "allocator/preload/event_log.h"
#include "allocator/preload/process_arenas.h"
#include "allocator/preload/record.h"

namespace forebay {

// Counts a new block and enters it in the book. Called before the program gets the address. `facts.device`:
// the arena's device; -1 for blocks of the driver. `stream`: numbered (routes.h); null: a plain allocation.
void enter_arena_block(const ProcessArenas::Use& use, DevicePtr address, BlockFacts facts,
                       DriverStream stream);
void enter_driver_block(PreloadServer server, DevicePtr address, std::size_t bytes, DriverStream stream);
// Counts the free of a block that was taken out of the book. Called before the memory is given back.
void leave_block(DevicePtr address, const BlockFacts& facts);
// Undoes leave_block after the driver refused the free.
void return_driver_block(DevicePtr address, const BlockFacts& facts);
// Counts an allocation whose free will not be seen.
void count_untracked(PreloadServer server, std::size_t bytes, int device);
// Records how much an arena holds, if that has changed without an allocation. Null: the arena is gone.
void note_reserved(int device, const Arena* arena);

// Counts a request that ended with out-of-memory. `device` -1: the current one.
void count_refused(PreloadServer server, std::size_t bytes, int device, DriverStream stream);
// Counts a free of an address that was not seen to be allocated.
void count_unknown_free();
// Records a failure of the arena, unless the driver is shut down: then every call fails.
void note_problem(const Status& status);

// --- the device's default memory pool, in place of which the arena serves (pool_calls.cc) ---

// Counts bytes allocated in stream order; a negative number (as its two's complement) counts freed bytes.
void count_pool_use(int device, std::size_t bytes);

// Forgets all counts of the device, because its arena is gone.
void forget_pool_use(int device);

// Whether the program has set another current pool on the device than the default one.
bool has_other_pool(int device);

// Whether the handle is that of the device's default pool.
bool is_default_pool(DriverPool pool, int device);

}  // namespace forebay
