// Who reaches the driver past the hook: libraries whose dlsym, or whose calls of the driver, are bound to
// something else than the front end, as RTLD_DEEPBIND does. What they allocate is not seen; the record names
// them.
#pragma once

#include <cstdint>

namespace forebay {

// Looks through the loaded libraries. Does nothing once it has found some, or has looked kEscapeLooks times.
void look_for_escapes();
inline constexpr int kEscapeLooks = 8;

// The same at the `count`-th allocation, for some of them.
void look_for_escapes_now_and_then(std::uint64_t count);

}  // namespace forebay
