// The device's default memory pool. The arena serves in its place.
#pragma once

#include <cstddef>

#include "allocator/preload/driver_types.h"

namespace forebay {

// Counts bytes allocated in stream order; a negative number (as its two's complement) counts freed bytes.
void count_pool_use(int device, std::size_t bytes);

// Forgets all counts of the device, because its arena is gone.
void forget_pool_use(int device);

// Whether the program has set another current pool on the device than the default one.
bool has_other_pool(int device);

// Whether the handle is that of the device's default pool.
bool is_default_pool(DriverPool pool, int device);

}  // namespace forebay
