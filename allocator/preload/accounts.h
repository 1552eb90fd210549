// What the record counts. Requires a record: the preload has started.
#pragma once

#include <cstddef>

#include "allocator/preload/block_book.h"
#include "forebay/preload_record.h"

namespace forebay {

// An allocation that succeeded, by whoever served it.
void count_served(PreloadServer server, std::size_t bytes);
// One that the arena of the device has served, and its free.
void count_arena_allocation(int device, std::size_t bytes, bool is_ordered);
void count_arena_free(const BlockFacts& facts);
// One that ended with out-of-memory.
void count_refused();
// A free of what nobody was seen to allocate.
void count_unknown_free();

}  // namespace forebay
