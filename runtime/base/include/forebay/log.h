// One-line messages on stderr for people. FOREBAY_LOG sets the level (off | error | warning | info | debug;
// default warning). Never used inside an allocation path.
#pragma once

#include "forebay/language.h"

namespace forebay {

enum class LogLevel : int { kOff = -1, kError, kWarning, kInfo, kDebug };

// Writes "forebay: message\n" in one write call if `level` is enabled.
__attribute__((format(printf, 2, 3))) void log(LogLevel level, const char* format, ...) noexcept;

}  // namespace forebay
