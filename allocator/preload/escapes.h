// Libraries that reach the driver past the hook: their dlsym, or their calls of the driver, are bound to
// another object than the front end, for example by RTLD_DEEPBIND. Their allocations are not seen; the record
// names them.
#pragma once

#include <cstdint>

namespace forebay {

// Looks through the loaded libraries. Does nothing after it has found one or has looked kEscapeLooks times.
void look_for_escapes();
inline constexpr int kEscapeLooks = 8;

// Looks at some allocations, by their number.
void look_for_escapes_now_and_then(std::uint64_t count);

}  // namespace forebay
