#include "runtime/engine/host_placement.h"

#include <utility>

#include "forebay/error.h"
#include "forebay/units.h"

namespace forebay {

HostPlacement choose_host_placement(const Capabilities& device, const EngineOptions& options,
                                    const TopologyOptions& topology) {
  const auto anywhere = [&](const std::string& reason) {
    return HostPlacement{.thread_count = options.host_threads,
                         .text = "host updates run anywhere: " + reason};
  };
  if (!options.host_processors.empty()) {
    return {.processors = options.host_processors,
            .text = "host updates run on processors " + processors_text(options.host_processors) +
                    ": EngineOptions::host_processors"};
  }
  if (!options.near_device) return anywhere("EngineOptions::near_device is off");
  if (device.numa_node < 0) return anywhere("the device has no known NUMA node");
  const Topology host = read_topology(topology);
  if (host.nodes.size() < 2) return anywhere("the host has one NUMA node");
  if (host.find_node(device.numa_node) == nullptr)
    return anywhere("the host does not show the device's NUMA node");
  const Placement near = place(host, {.nodes = {device.numa_node}});
  if (near.processors.empty()) return anywhere("the process may use no processor near the device");
  HostPlacement placement;
  // Ranks near the same node share its processors: the system spreads their threads over them.
  placement.processors = near.processors;
  placement.thread_count =
      options.host_threads > 0 ? options.host_threads : static_cast<int>(near.cores.size());
  placement.memory_node = near.memory_node;
  placement.text =
      format_count(static_cast<std::uint64_t>(placement.thread_count), "host thread") + " on processors " +
      processors_text(placement.processors) +
      (near.memory_node < 0 ? "" : ", pinned memory on node " + std::to_string(near.memory_node)) + ": " +
      near.reason;
  return placement;
}

std::unique_ptr<BlockRunner> create_host_runner(HostPlacement& placement, const EngineOptions& options) {
  if (!placement.processors.empty()) {
    Result<std::unique_ptr<BlockRunner>> runner =
        BlockRunner::create_on(placement.processors, placement.thread_count);
    if (runner.ok()) return std::move(runner).value();
    if (!options.host_processors.empty()) throw Error(runner.status());
    placement.text = "host updates run anywhere: " + runner.status().message();
  }
  return std::make_unique<BlockRunner>(options.host_threads);
}

}  // namespace forebay
