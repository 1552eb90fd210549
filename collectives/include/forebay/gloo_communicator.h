// Ranks as processes over TCP, on one host or several. Gloo moves the bytes; the reduction in rank order is
// ours. Present when forebay was built with Gloo.
#pragma once

#include <memory>

#include "forebay/process_communicator.h"

namespace forebay {

using GlooOptions = ProcessOptions;

// Whether this forebay was built with Gloo.
bool gloo_available() noexcept;

// Order:    collective over all ranks; blocks.
// Requires: `backend` outlives the communicator and has memory that the host reaches.
// Errors:   kTimeout naming the ranks that did not join; kPeerLost naming a rank that ended;
//           kInvalidArgument for an interface that this host does not have; kUnsupported without Gloo.
Result<std::unique_ptr<Communicator>> create_gloo_communicator(const GlooOptions& options, Backend& backend);

}  // namespace forebay
