// What the ranks of a communicator find out together before they go on.
#pragma once

#include <string>

#include "forebay/communicator.h"

namespace forebay {

// Every rank gives its own verdict; when one is not ok, all throw the lowest such rank's. Collective.
// Errors: those of the communicator, too.
void agree(Communicator& communicator, const Status& mine);

// Every rank gives a text of lines "key value"; where they differ, all throw kInvalidArgument that says
// `what` differs, and names the first line that does and who has which. Collective.
void agree_on_text(Communicator& communicator, const std::string& what, const std::string& mine);

}  // namespace forebay
