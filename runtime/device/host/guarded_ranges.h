// The guarded ranges of all host backends of this process, and the report of a use of a closed one. See
// forebay/access_guard.h.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstddef>
#include <string>

#include "forebay/access_guard.h"

namespace forebay {

// Closes a range. The first call installs the handler of SIGSEGV, which writes its report and passes the
// signal to the handler before it. Errors: kInvalidArgument (overlap), kIoError (mprotect).
Status guard_range(std::byte* base, std::size_t bytes, const std::string& name);
// Protects the guarded ranges in [base, base + bytes) again, after their addresses were made accessible.
// Errors: kIoError.
Status protect_guarded_ranges(const std::byte* base, std::size_t bytes);
// Forgets the guarded ranges in [base, base + bytes): the addresses are released.
void forget_guarded_ranges(const std::byte* base, std::size_t bytes) noexcept;
// Counts an open (+1) or a close (-1) and protects the range accordingly. Without such a range it does
// nothing. Errors: kIoError (mprotect).
Status count_access(std::byte* base, AccessGuard::Access access, int change);

}  // namespace forebay
