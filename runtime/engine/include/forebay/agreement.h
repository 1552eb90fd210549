// Agreement: the ranks of a communicator compare verdicts or texts before they go on.
#pragma once

#include <string>

#include "forebay/communicator.h"

namespace forebay {

// Every rank gives its own verdict. If any is not ok, all throw the verdict of the lowest such rank.
// Collective. Errors: also those of the communicator.
void agree(Communicator& communicator, const Status& mine);

// Every rank gives a text of lines "key value". If the texts differ, all throw kInvalidArgument: it begins
// with `what` and names the first line that differs, with its values and their ranks. Collective.
void agree_on_text(Communicator& communicator, const std::string& what, const std::string& mine);

}  // namespace forebay
