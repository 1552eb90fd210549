// Agreement: the ranks of a communicator compare verdicts or texts before they go on.
#pragma once

#include <string>

#include "forebay/communicator.h"
#include "forebay/error.h"

namespace forebay {

// The ranks could not compare: one is lost. Every other Error of these functions is an agreed one.
class AgreementLost : public Error {
 public:
  using Error::Error;
};

// Every rank gives its own verdict. If any is not ok, all throw the verdict of the lowest such rank. No rank
// returns before all have it. Collective. Errors: AgreementLost.
void agree(Communicator& communicator, const Status& mine);

// Every rank gives a text of lines "key value", or "key\tvalue" for a key with spaces. If the texts differ,
// all throw kInvalidArgument: it names `what` and the first line that differs, with its values and their
// ranks. No rank returns before all have it. Collective. Errors: AgreementLost.
void agree_on_text(Communicator& communicator, const std::string& what, const std::string& mine);

}  // namespace forebay
