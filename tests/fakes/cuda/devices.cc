// The start of the driver, the names of its errors, and the properties of the devices.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

// The bus addresses: one domain, one device each.
constexpr int kFirstBus = 0x10;

void start_devices(Driver& state) {
  state.memory.configure(state.options);
  state.scheduler.configure(state.options);
  state.devices.clear();
  for (int i = 0; i < state.options.device_count; ++i) {
    Device device;
    device.primary = std::make_shared<Context>();
    device.primary->handle = next_handle<CuContext>();
    device.primary->device = i;
    device.primary->primary = true;
    state.contexts[device.primary->handle] = device.primary;
    CuMemPoolProps properties{};
    properties.type = CuMemAllocationType::kPinned;
    properties.location = {CuMemLocationType::kDevice, i};
    device.default_pool = make_pool(i, properties, true);
    device.current_pool = device.default_pool;
    state.devices.push_back(std::move(device));
  }
}

}  // namespace

CuResult cuInit(unsigned flags) {
  Driver& state = driver();
  if (flags != 0) return CuResult::kInvalidValue;
  const Lock lock(state.mutex);
  if (state.options.device_count == 0) return CuResult::kNoDevice;
  if (state.initialised) return CuResult::kSuccess;
  if (const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"); connections != nullptr) {
    state.connections = static_cast<unsigned>(std::clamp(std::atoi(connections), 1, 32));
  } else {
    state.connections = 8;
  }
  start_devices(state);
  // Like the real driver, it ends before the destructors of older objects, which must cope.
  const auto end = [] {
    driver().exiting = true;
    write_summary();
  };
  if (std::atexit(end) != 0) return CuResult::kOutOfMemory;
  state.initialised = true;
  state.process.store(::getpid(), std::memory_order_release);
  return CuResult::kSuccess;
}

CuResult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CuResult::kInvalidValue;
  *version = driver().options.driver_version;
  return CuResult::kSuccess;
}

CuResult cuGetErrorName(CuResult error, const char** text) {
  if (text == nullptr) return CuResult::kInvalidValue;
  *text = nullptr;
  switch (error) {
#define FAKE_CUDA_ROW(name, real, value) \
  case CuResult::name:                   \
    *text = #real;                       \
    return CuResult::kSuccess;
    FOREBAY_CUDA_RESULTS(FAKE_CUDA_ROW)
#undef FAKE_CUDA_ROW
  }
  return CuResult::kInvalidValue;
}

CuResult cuGetErrorString(CuResult error, const char** text) {
  const CuResult result = cuGetErrorName(error, text);
  if (result != CuResult::kSuccess) return result;
  switch (error) {
    case CuResult::kSuccess:
      *text = "no error";
      break;
    case CuResult::kInvalidValue:
      *text = "invalid argument";
      break;
    case CuResult::kOutOfMemory:
      *text = "out of memory";
      break;
    case CuResult::kIllegalAddress:
      *text = "an illegal memory access was encountered";
      break;
    default:  // The fake knows no more than the name.
      break;
  }
  return CuResult::kSuccess;
}

CuResult cuDeviceGet(CuDevice* device, int ordinal) {
  if (device == nullptr) return CuResult::kInvalidValue;
  if (!valid_device(ordinal)) return CuResult::kInvalidDevice;
  *device = ordinal;
  return CuResult::kSuccess;
}

CuResult cuDeviceGetCount(int* count) {
  if (count == nullptr) return CuResult::kInvalidValue;
  *count = driver().options.device_count;
  return CuResult::kSuccess;
}

CuResult cuDeviceGetName(char* name, int bytes, CuDevice device) {
  if (name == nullptr || bytes <= 0) return CuResult::kInvalidValue;
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  std::snprintf(name, static_cast<std::size_t>(bytes), "Fake GPU %d", device);
  return CuResult::kSuccess;
}

CuResult cuDeviceGetUuid_v2(CuUuid* uuid, CuDevice device) {
  if (uuid == nullptr) return CuResult::kInvalidValue;
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  std::memcpy(uuid->bytes, "forebay-fake-gpu", sizeof(uuid->bytes));
  uuid->bytes[15] = static_cast<char>(device);
  return CuResult::kSuccess;
}
CuResult cuDeviceGetUuid(CuUuid* uuid, CuDevice device) {
  return cuDeviceGetUuid_v2(uuid, device);
}

CuResult cuDeviceTotalMem_v2(std::size_t* bytes, CuDevice device) {
  if (bytes == nullptr) return CuResult::kInvalidValue;
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  *bytes = driver().options.memory_bytes;
  return CuResult::kSuccess;
}

CuResult cuDeviceGetPCIBusId(char* bus_id, int bytes, CuDevice device) {
  if (bus_id == nullptr || bytes < 13) return CuResult::kInvalidValue;
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  std::snprintf(bus_id, static_cast<std::size_t>(bytes), "0000:%02X:00.0", kFirstBus + device);
  return CuResult::kSuccess;
}

CuResult cuDeviceCanAccessPeer(int* can_access, CuDevice device, CuDevice peer) {
  if (can_access == nullptr) return CuResult::kInvalidValue;
  if (!valid_device(device) || !valid_device(peer)) return CuResult::kInvalidDevice;
  *can_access = can_access_peer(device, peer) ? 1 : 0;
  return CuResult::kSuccess;
}

CuResult cuDeviceGetP2PAttribute(int* value, CuDeviceP2PAttribute attribute, CuDevice source,
                                 CuDevice target) {
  if (value == nullptr) return CuResult::kInvalidValue;
  if (!valid_device(source) || !valid_device(target) || source == target) return CuResult::kInvalidDevice;
  const bool reachable = can_access_peer(source, target);
  switch (attribute) {
    case CuDeviceP2PAttribute::kPerformanceRank:
      *value = 0;
      return CuResult::kSuccess;
    case CuDeviceP2PAttribute::kAccessSupported:
    case CuDeviceP2PAttribute::kNativeAtomicSupported:
      *value = reachable ? 1 : 0;
      return CuResult::kSuccess;
  }
  return CuResult::kInvalidValue;
}

CuResult cuDeviceGetAttribute(int* value, CuDeviceAttribute attribute, CuDevice device) {
  if (value == nullptr) return CuResult::kInvalidValue;
  if (!valid_device(device)) return CuResult::kInvalidDevice;
  const FakeOptions& options = driver().options;
  using enum FakeDeviceAttribute;
  switch (static_cast<FakeDeviceAttribute>(attribute)) {
    case kMaxThreadsPerBlock:
    case kMaxBlockDimX:
    case kMaxBlockDimY:
      *value = 1024;
      break;
    case kMaxBlockDimZ:
      *value = 64;
      break;
    case kMaxGridDimX:
      *value = 0x7FFFFFFF;
      break;
    case kMaxGridDimY:
    case kMaxGridDimZ:
      *value = 65535;
      break;
    case kMaxSharedMemoryPerBlock:
      *value = 48 << 10;
      break;
    case kMaxSharedMemoryPerBlockOptin:
      *value = 227 << 10;
      break;
    case kWarpSize:
      *value = 32;
      break;
    case kMaxRegistersPerBlock:
      *value = 65536;
      break;
    case kMultiprocessorCount:
      *value = 4;  // Few, so that grids sized by it stay small.
      break;
    case kMaxThreadsPerMultiprocessor:
      *value = 2048;
      break;
    case kAsyncEngineCount:
      *value = 2;
      break;
    case kClockRate:
    case kMemoryClockRate:
      *value = 1000000;
      break;
    case kGlobalMemoryBusWidth:
      *value = 5120;
      break;
    case kL2CacheSize:
      *value = 50 << 20;
      break;
    case kComputeCapabilityMajor:
      *value = options.compute_capability / 10;
      break;
    case kComputeCapabilityMinor:
      *value = options.compute_capability % 10;
      break;
    case kPciBusId:
      *value = kFirstBus + device;
      break;
    case kDmaBufSupported:
      *value = options.dma_buf ? 1 : 0;
      break;
    case kGpuDirectRdmaSupported:
    case kGpuDirectRdmaWithCudaVmmSupported:
      *value = options.gpu_direct_rdma ? 1 : 0;
      break;
    case kMempoolSupportedHandleTypes:
      *value = static_cast<int>(CuMemHandleType::kPosixFileDescriptor);
      break;
    case kCanMapHostMemory:
    case kConcurrentKernels:
    case kUnifiedAddressing:
    case kStreamPrioritiesSupported:
    case kCanUseHostPointerForRegisteredMem:
    case kHostRegisterSupported:
    case kVirtualMemoryManagementSupported:
    case kHandleTypePosixFileDescriptorSupported:
    case kMemoryPoolsSupported:
      *value = 1;
      break;
    case kNumaId:
      *value = -1;
      break;
    case kManagedMemory:
      *value = options.host_access == HostAccess::kAllowed ? 1 : 0;
      break;
    case kPciDeviceId:
    case kPciDomainId:
    case kIntegrated:
    case kEccEnabled:
    case kPageableMemoryAccess:
    case kConcurrentManagedAccess:
    case kReadOnlyHostRegisterSupported:
    case kHandleTypeFabricSupported:
    case kNumaConfig:
    case kMulticastSupported:
    case kHostNumaId:
      *value = 0;
      break;
    default:
      return CuResult::kInvalidValue;
  }
  return CuResult::kSuccess;
}

}  // namespace forebay::fake_cuda
