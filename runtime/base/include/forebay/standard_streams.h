// The standard descriptors 0, 1 and 2, which whoever starts a process may leave closed.
#pragma once

namespace forebay {

// Opens /dev/null on each of them that is closed. Otherwise the next file, memory or socket to be opened
// would get its number, and every message to standard error would be written into it. Called before the
// library opens what it keeps; a program calls it first. Threads: from any thread; once is enough.
void keep_standard_streams() noexcept;

}  // namespace forebay
