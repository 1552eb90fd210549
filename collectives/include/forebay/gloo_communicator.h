// Ranks as processes, on one host or several, over TCP: Gloo as transport and rendezvous, our own ordered
// reduction on top. Present when forebay was built with Gloo (gloo_available()).
#pragma once

#include <memory>

#include "forebay/process_communicator.h"

namespace forebay {

using GlooOptions = ProcessOptions;

bool gloo_available() noexcept;

// Collective over all ranks. Errors: kTimeout naming the ranks that never came; kUnsupported without Gloo.
Result<std::unique_ptr<Communicator>> create_gloo_communicator(const GlooOptions& options, Backend& backend);

}  // namespace forebay
