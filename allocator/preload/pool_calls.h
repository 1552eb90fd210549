// The device's default memory pool, as far as the arena stands for it.
#pragma once

#include <cstddef>

#include "allocator/preload/driver_types.h"

namespace forebay {

// Bytes that were allocated in the order of a stream, and as a negative number, freed.
void count_pool_use(int device, std::size_t bytes);

// The device's arena is gone, with all it had.
void forget_pool_use(int device);

// Whether the program has made another pool than the default one the device's current pool.
bool has_other_pool(int device);

// The default pool of the device, by its handle.
bool is_default_pool(DriverPool pool, int device);

}  // namespace forebay
