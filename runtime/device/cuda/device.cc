#include "runtime/device/cuda/device.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "runtime/device/cuda/scope.h"

namespace forebay {
namespace {

using cuda::CuResult;

std::string uuid_text(const cuda::CuUuid& uuid) {
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += digits;
  }
  return text;
}

// Free memory belongs to a context; this one is kept only for the question.
Status read_free_bytes(const CudaDriver& driver, CudaDevice& device) {
  const std::string what = "read the free memory of cuda:" + std::to_string(device.ordinal);
  cuda::CuDevice handle = 0;
  if (const CuResult result = driver.cuDeviceGet(&handle, device.ordinal); result != CuResult::kSuccess) {
    return cuda_failure(driver, result, "cuDeviceGet", what);
  }
  cuda::CuContext context = nullptr;
  if (const CuResult result = driver.cuDevicePrimaryCtxRetain(&context, handle);
      result != CuResult::kSuccess) {
    return cuda_failure(driver, result, "cuDevicePrimaryCtxRetain", what);
  }
  Status status;
  {
    std::atomic<bool> has_reported{false};
    const CudaScope scope(driver, context, has_reported);
    std::size_t total = 0;
    if (scope.result() != CuResult::kSuccess) {
      status = cuda_failure(driver, scope.result(), scope.call(), what);
    } else if (const CuResult result = driver.cuMemGetInfo_v2(&device.free_bytes, &total);
               result != CuResult::kSuccess) {
      status = cuda_failure(driver, result, "cuMemGetInfo", what);
    }
  }
  const CuResult released = driver.cuDevicePrimaryCtxRelease_v2(handle);
  if (status.ok() && released != CuResult::kSuccess && released != CuResult::kDeinitialized) {
    status = cuda_failure(driver, released, "cuDevicePrimaryCtxRelease", what);
  }
  return status;
}

}  // namespace

Result<int> cuda_device_count(const CudaDriver& driver) {
  int count = 0;
  const CuResult result = driver.cuDeviceGetCount(&count);
  if (result == CuResult::kNoDevice) return 0;
  if (result != CuResult::kSuccess) {
    return cuda_failure(driver, result, "cuDeviceGetCount", "count the CUDA devices");
  }
  return count;
}

cuda::CuMemAllocationProp cuda_chunk_properties(int ordinal, bool posix_fd, bool rdma) noexcept {
  cuda::CuMemAllocationProp properties = {};
  properties.type = cuda::CuMemAllocationType::kPinned;
  properties.location = {cuda::CuMemLocationType::kDevice, ordinal};
  properties.requested_handle_types =
      posix_fd ? cuda::CuMemHandleType::kPosixFileDescriptor : cuda::CuMemHandleType::kNone;
  properties.flags.gpu_direct_rdma_capable = rdma ? 1 : 0;
  return properties;
}

Result<CudaDevice> read_cuda_device(const CudaDriver& driver, int ordinal) {
  const auto what = [ordinal] { return "read the properties of cuda:" + std::to_string(ordinal); };
  const auto check = [&](CuResult result, const char* call) {
    return result == CuResult::kSuccess ? Status() : cuda_failure(driver, result, call, what());
  };
  CudaDevice device;
  device.ordinal = ordinal;
  cuda::CuDevice handle = 0;
  FOREBAY_RETURN_IF_ERROR(check(driver.cuDeviceGet(&handle, ordinal), "cuDeviceGet"));
  char name[256] = {};
  FOREBAY_RETURN_IF_ERROR(
      check(driver.cuDeviceGetName(name, static_cast<int>(sizeof(name)) - 1, handle), "cuDeviceGetName"));
  device.name = name;
  cuda::CuUuid uuid = {};
  FOREBAY_RETURN_IF_ERROR(check(driver.cuDeviceGetUuid_v2(&uuid, handle), "cuDeviceGetUuid"));
  device.uuid = uuid_text(uuid);
  FOREBAY_RETURN_IF_ERROR(
      check(driver.cuDeviceTotalMem_v2(&device.memory_bytes, handle), "cuDeviceTotalMem"));

  using Attribute = cuda::CuDeviceAttribute;
  const auto attribute = [&](Attribute which, int* value) {
    return check(driver.cuDeviceGetAttribute(value, which, handle), "cuDeviceGetAttribute");
  };
  int has_virtual_memory = 0;
  int has_posix_fd = 0;
  int has_rdma = 0;
  FOREBAY_RETURN_IF_ERROR(attribute(Attribute::kComputeCapabilityMajor, &device.compute_major));
  FOREBAY_RETURN_IF_ERROR(attribute(Attribute::kComputeCapabilityMinor, &device.compute_minor));
  FOREBAY_RETURN_IF_ERROR(attribute(Attribute::kMultiprocessorCount, &device.multiprocessor_count));
  FOREBAY_RETURN_IF_ERROR(attribute(Attribute::kVirtualMemoryManagementSupported, &has_virtual_memory));
  FOREBAY_RETURN_IF_ERROR(attribute(Attribute::kHandleTypePosixFileDescriptorSupported, &has_posix_fd));
  FOREBAY_RETURN_IF_ERROR(attribute(Attribute::kGpuDirectRdmaWithCudaVmmSupported, &has_rdma));
  if (has_virtual_memory != 0) {
    device.has_posix_fd = has_posix_fd != 0;
    device.has_rdma = has_rdma != 0;
    const cuda::CuMemAllocationProp properties =
        cuda_chunk_properties(ordinal, device.has_posix_fd, device.has_rdma);
    FOREBAY_RETURN_IF_ERROR(check(driver.cuMemGetAllocationGranularity(&device.granularity, &properties,
                                                                       cuda::CuMemGranularity::kMinimum),
                                  "cuMemGetAllocationGranularity"));
  }

  FOREBAY_ASSIGN_OR_RETURN(const int count, cuda_device_count(driver));
  for (int peer = 0; peer < count; ++peer) {
    if (peer == ordinal) continue;
    cuda::CuDevice peer_handle = 0;
    int can_access = 0;
    FOREBAY_RETURN_IF_ERROR(check(driver.cuDeviceGet(&peer_handle, peer), "cuDeviceGet"));
    FOREBAY_RETURN_IF_ERROR(
        check(driver.cuDeviceCanAccessPeer(&can_access, peer_handle, handle), "cuDeviceCanAccessPeer"));
    if (can_access != 0) device.peer_ordinals.push_back(peer);
  }

  // A device with an unknown place is slower at worst, so it is used all the same.
  char bus_id[32] = {};
  const Status placed =
      check(driver.cuDeviceGetPCIBusId(bus_id, static_cast<int>(sizeof(bus_id)) - 1, handle),
            "cuDeviceGetPCIBusId");
  if (placed.ok()) {
    device.pci_bus_id = bus_id;
    device.numa_node = read_numa_node("/sys", device.pci_bus_id);
  } else {
    device.problem = placed.message();
  }
  return device;
}

int read_numa_node(const std::string& sysfs, std::string pci_bus_id) {
  if (pci_bus_id.empty() || pci_bus_id.find('/') != std::string::npos) return -1;
  // The driver writes capital letters where the kernel writes small ones.
  std::transform(pci_bus_id.begin(), pci_bus_id.end(), pci_bus_id.begin(),
                 [](char letter) { return letter >= 'A' && letter <= 'F' ? letter - 'A' + 'a' : letter; });
  const std::string path = sysfs + "/bus/pci/devices/" + pci_bus_id + "/numa_node";
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  char text[16] = {};
  const ssize_t count = ::read(file, text, sizeof(text) - 1);
  ::close(file);
  if (count <= 0) return -1;
  char* end = nullptr;
  const long node = std::strtol(text, &end, 10);
  return end == text || node < 0 || node > 1 << 20 ? -1 : static_cast<int>(node);
}

Result<CudaSystem> read_cuda_system() {
  FOREBAY_ASSIGN_OR_RETURN(const CudaDriver* const found, CudaDriver::get());
  const CudaDriver& driver = *found;
  CudaSystem system;
  system.driver_path = driver.path;
  if (const CuResult result = driver.cuDriverGetVersion(&system.driver_version);
      result != CuResult::kSuccess) {
    return cuda_failure(driver, result, "cuDriverGetVersion", "use the CUDA driver " + driver.path);
  }
  FOREBAY_ASSIGN_OR_RETURN(const int count, cuda_device_count(driver));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Result<CudaDevice> device = read_cuda_device(driver, ordinal);
    if (!device.ok()) {
      CudaDevice unread;
      unread.ordinal = ordinal;
      unread.problem = device.status().message();
      system.devices.push_back(std::move(unread));
      continue;
    }
    system.devices.push_back(std::move(device).value());
    CudaDevice& known = system.devices.back();
    const Status status = read_free_bytes(driver, known);
    if (!status.ok()) known.problem += (known.problem.empty() ? "" : "; ") + status.message();
  }
  return system;
}

}  // namespace forebay
