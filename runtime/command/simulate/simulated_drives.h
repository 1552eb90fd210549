// A file store in virtual time: the drives of a host, of which each rank has its share. It keeps no bytes.
// Transfers of each direction are served one after the other.
#pragma once

#include <memory>

#include "forebay/store.h"
#include "runtime/command/simulate/cluster_timing.h"

namespace forebay {

// Requires: both outlive the store.
std::unique_ptr<Store> make_simulated_drives(const ClusterTiming& timing, ModelBackend& backend);

}  // namespace forebay
