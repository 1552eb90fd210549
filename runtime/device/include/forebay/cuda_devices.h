// The facts that the CUDA driver gives about itself and its devices, for reports (`forebay devices`) and for
// choosing a device, and whether CUDA can be used at all. Nothing here keeps a device in use.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay {

struct CudaDevice {
  int ordinal = 0;
  std::string name;        // "NVIDIA H200"
  std::string uuid;        // "GPU-5a0f2b1c-...", as nvidia-smi prints it.
  std::string pci_bus_id;  // "0000:41:00.0"; empty when unknown.
  int compute_major = 0;   // The compute capability.
  int compute_minor = 0;
  int multiprocessor_count = 0;
  int numa_node = -1;              // -1 when unknown.
  std::size_t memory_bytes = 0;    // The device's capacity.
  std::size_t free_bytes = 0;      // Free now. 0 with a `problem` when unknown.
  std::size_t granularity = 0;     // The granularity of virtual memory; 0 without virtual memory.
  bool has_posix_fd = false;       // Chunks can be exported as file descriptors.
  bool has_rdma = false;           // Chunks can be read and written by other PCI devices (GPUDirect RDMA).
  std::vector<int> peer_ordinals;  // The devices that can access this one's memory.
  std::string problem;             // The facts that could not be read, and why; empty when all could.
};

struct CudaSystem {
  std::string driver_path;  // The file that was opened.
  int driver_version = 0;   // 12040 for CUDA 12.4.
  std::vector<CudaDevice> devices;
};

// Errors: kUnavailable (no driver, or none that works), kUnsupported (a driver that is too old). A driver
// without devices is no error.
// Cost:   makes a context on each device to ask for its free memory: up to a second each where none is
// active.
Result<CudaSystem> read_cuda_system();

// True in a process made by fork after its parent had used the driver. CUDA does not survive fork, so nothing
// may be called any more.
bool cuda_lost_in_fork() noexcept;

}  // namespace forebay
