// The properties of a CUDA device that need no context, for choosing a device and for reports.
#pragma once

#include <string>

#include "forebay/cuda_devices.h"
#include "runtime/device/cuda/driver.h"

namespace forebay {

// Errors: those of the driver, naming the call.
Result<int> cuda_device_count(const CudaDriver& driver);

// All of CudaDevice but free_bytes. Requires: `ordinal` is in range.
Result<CudaDevice> read_cuda_device(const CudaDriver& driver, int ordinal);

// The properties of chunks on a device.
cuda::CuMemAllocationProp cuda_chunk_properties(int ordinal, bool posix_fd, bool rdma) noexcept;

// The NUMA node that <sysfs>/bus/pci/devices/<id>/numa_node names; -1 when it is not there or says so.
int read_numa_node(const std::string& sysfs, std::string pci_bus_id);

}  // namespace forebay
