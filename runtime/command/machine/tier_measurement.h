// Measures the tiers of this machine: copies between a device and pinned memory, host memory, files. Numbers
// only; bench_tiers_print.h prints them, offload_choice.h draws conclusions.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "forebay/backend.h"
#include "forebay/data_type.h"
#include "forebay/drives.h"
#include "forebay/store_measurement.h"
#include "forebay/topology.h"

namespace forebay {

// Called with the name of the next measurement.
using Progress = std::function<void(const std::string& measurement)>;

struct CopyMeasurement {
  double to_device_bytes_per_second = 0;
  double from_device_bytes_per_second = 0;
  // Both at once: the sum of the two directions.
  double both_bytes_per_second = 0;
};

// Copies `bytes` each way and both at once, each for a third of `duration` and at least three times; the rate
// is that of the median copy. Pinned memory and the threads of host streams are placed by `placement`.
//
// Errors: kOutOfMemory if the device or the host has less than twice `bytes`; the Backend's.
Result<CopyMeasurement> measure_copies(Backend& backend, const Placement& placement, std::uint64_t bytes,
                                       std::chrono::nanoseconds duration, const Progress& progress);

struct HostMeasurement {
  int thread_count = 0;  // One for each usable core, within the CPU quota.
  int node_count = 0;    // NUMA nodes, each with threads and memory of its own.
  // a = b + s * c of doubles: 24 bytes per element. The read that a store causes in the cache is not counted.
  double triad_bytes_per_second = 0;
  double adamw_elements_per_second = 0;  // The host's step with fp32 master, m and v.
  // 24 for master, m and v, the gradient, and the parameter if its type has 2 bytes.
  std::uint64_t adamw_bytes_per_element = 0;
};

// Measures all NUMA nodes at the same time, each on pinned memory of its own: three arrays of `bytes` over
// all nodes, or the states of bytes / 8 elements. Each measurement takes half of `duration`, and at least
// three passes. `dtype` is the type of gradient and parameter. `backend` pins the memory.
//
// Errors: kOutOfMemory if the host has less than three times `bytes`.
Result<HostMeasurement> measure_host(Backend& backend, const Topology& topology, DataType dtype,
                                     std::uint64_t bytes, std::chrono::nanoseconds duration,
                                     const Progress& progress);

struct FileMeasurement {
  std::vector<DirectoryFacts> directories;  // Several: the store stripes over them.
  bool is_direct = false;                   // Bypasses the page cache.
  std::uint64_t free_bytes = 0;             // For stripes of the same size in each directory.
  StoreMeasurement store;
};

// Checks quickly that measure_files can run. Errors: kInvalidArgument for a path that is no directory;
// kIoError if no file can be made; kOutOfMemory if there is no room for `bytes`.
Result<FileMeasurement> prepare_files(const Topology& topology, const std::vector<std::string>& directories,
                                      std::uint64_t bytes);

// Measures depths of 1 to 32 with blocks of 256 KiB to 4 MiB, as far as `bytes` has that many blocks, on a
// store as the engine makes it. Leaves no file behind.
//
// Requires: `files` comes from prepare_files. Errors: the store's.
Status measure_files(std::uint64_t bytes, std::chrono::nanoseconds duration, const Progress& progress,
                     FileMeasurement* files);

}  // namespace forebay
