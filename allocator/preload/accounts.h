// What the record counts, and the events where they are kept. Requires a record: the preload has started.
#pragma once

#include <cstddef>

#include "allocator/preload/block_book.h"
#include "allocator/preload/driver_types.h"
#include "allocator/preload/event_log.h"
#include "allocator/preload/process_arenas.h"
#include "allocator/preload/record.h"

namespace forebay {

// A block that has been allocated and that nobody else knows yet: counts it and enters it in the book.
// `facts.device` is the arena's; the driver's blocks have -1 there. `stream`: by its number; null: a plain
// allocation.
void enter_arena_block(const ProcessArenas::Use& use, DevicePtr address, BlockFacts facts,
                       DriverStream stream);
void enter_driver_block(PreloadServer server, DevicePtr address, std::size_t bytes, DriverStream stream);
// One that is out of the book and about to be given back.
void leave_block(DevicePtr address, const BlockFacts& facts);
// The driver would not have it: the block is its owner's again.
void return_driver_block(DevicePtr address, const BlockFacts& facts);
// An allocation whose free is not seen.
void count_untracked(PreloadServer server, std::size_t bytes, int device);
// What an arena holds may have changed without an allocation. Null: it is gone.
void note_reserved(int device, const Arena* arena);

// A request that ended with out-of-memory. `device` -1: the current one.
void count_refused(PreloadServer server, std::size_t bytes, int device, DriverStream stream);
// A free of what nobody was seen to allocate.
void count_unknown_free();
// What the arena failed at, unless the driver has come to its end: what fails then fails for everybody.
void note_problem(const Status& status);

}  // namespace forebay
