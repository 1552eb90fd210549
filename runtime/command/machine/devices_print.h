// `forebay devices` as text and as JSON.
#pragma once

#include <string>
#include <vector>

#include "forebay/cuda_devices.h"
#include "forebay/status.h"
#include "forebay/topology.h"
#include "runtime/command/machine/host_facts.h"

namespace forebay {

struct DevicesReport {
  Status cuda_status;  // Not ok: the reason why `cuda` is empty.
  CudaSystem cuda;
  HostFacts host;
  std::string host_kernels;  // "host AVX3_ZEN4, 2 threads"
  Topology topology;
  // One for each device of `cuda`, in their order. Without devices: one, for the host alone.
  std::vector<Placement> placements;
};

// Where the pinned memory and the host threads of each device would be.
std::vector<Placement> place_devices(const Topology& topology, const std::vector<CudaDevice>& devices);

std::string devices_text(const DevicesReport& report);
std::string devices_json(const DevicesReport& report);

}  // namespace forebay
