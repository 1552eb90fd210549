// HostPlacement: the processors for the threads that update on the host, and the NUMA node for the engine's
// pinned memory. Both are near the device, where the host has several nodes and the device's node is known.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "forebay/backend.h"
#include "forebay/block_runner.h"
#include "forebay/engine.h"
#include "forebay/topology.h"

namespace forebay {

struct HostPlacement {
  std::vector<int> processors;  // Empty: any.
  int thread_count = 0;         // 0: one per processor, or as many as the machine has.
  int memory_node = -1;         // -1: as PinnedPool chooses.
  std::string text;             // One line for people.
};

// Obeys EngineOptions::host_processors, host_threads and near_device.
// Cost: reads the topology (milliseconds) when the node of the device is known, and does nothing otherwise.
HostPlacement choose_host_placement(const Capabilities& device, const EngineOptions& options,
                                    const TopologyOptions& topology = {});

// The threads for the placement. Where the system refuses processors that the engine chose, the threads may
// run anywhere, and the text says so. Errors: those of BlockRunner::create_on for
// EngineOptions::host_processors.
std::unique_ptr<BlockRunner> create_host_runner(HostPlacement& placement, const EngineOptions& options);

}  // namespace forebay
