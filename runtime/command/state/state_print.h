// The contents of saved training state as text and as JSON.
#pragma once

#include <string>
#include <vector>

#include "forebay/saved_state.h"

namespace forebay {

// `names`: all states of the directory, newest first.
std::string state_text(const SavedStateFacts& facts, const std::vector<std::string>& names);
std::string state_json(const SavedStateFacts& facts, const std::vector<std::string>& names);

// "4 files, 1.2 MiB; 28 parameters", for one line about a state.
std::string state_size_text(const SavedStateFacts& facts);

// At most `columns` characters of a name: its middle is left out. Requires: columns >= 8.
std::string shortened_name(const std::string& name, std::size_t columns);

}  // namespace forebay
