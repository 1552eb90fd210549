// The version of this library, as built.
#pragma once

#include "forebay/language.h"

namespace forebay {

// "0.1.0".
const char* version() noexcept;

}  // namespace forebay
