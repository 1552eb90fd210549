// Hides values that look like secrets in the words of a command line.
#pragma once

#include <cstddef>

#include "forebay/language.h"

namespace forebay {

// Overwrites with stars, in words that each end with a zero byte, as in /proc/PID/cmdline:
// the value of --password, --hf-token, API_KEY= and the like; words that begin as known tokens do ("hf_",
// "ghp_", "sk-"); the part of a URL before its @; the word behind "Bearer". The length stays.
void mask_secrets(char* words, std::size_t bytes) noexcept;

}  // namespace forebay
