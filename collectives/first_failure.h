// The first failure of a run as text, for the store or the memory that the ranks share.
#pragma once

#include <string>

#include "forebay/status.h"

namespace forebay::internal {

std::string encode_failure(const Status& cause);

// Never ok: a damaged text is a kPeerLost that says so.
Status decode_failure(const std::string& text);

}  // namespace forebay::internal
