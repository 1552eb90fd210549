// `forebay devices` as text and as JSON.
#pragma once

#include <string>

#include "forebay/cuda_devices.h"
#include "forebay/status.h"
#include "host_facts.h"

namespace forebay {

struct DevicesReport {
  Status cuda_status;  // Not ok: why there is no `cuda`.
  CudaSystem cuda;
  HostFacts host;
  std::string host_kernels;  // "host AVX3_ZEN4, 2 threads"
};

std::string devices_text(const DevicesReport& report);
std::string devices_json(const DevicesReport& report);

}  // namespace forebay
