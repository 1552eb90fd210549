// What the tiers of this machine deliver: copies between a device and page-locked memory, host memory, files.
// Numbers only; bench_tiers_print.h writes them down, offload_choice.h draws conclusions.
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

// Told what is measured next.
using Progress = std::function<void(const std::string& what)>;

struct CopyMeasurement {
  double to_device_bytes_per_second = 0;
  double from_device_bytes_per_second = 0;
  // Both at once: the sum of the two directions.
  double both_bytes_per_second = 0;
};

// Copies of `bytes`, each way and both at once, each for a third of `duration` and at least three times; a
// rate is that of the median copy. Page-locked memory and the threads of host streams are where `placement`
// says.
//
// Errors: kOutOfMemory where the device or the host has less than twice `bytes`; the Backend's.
Result<CopyMeasurement> measure_copies(Backend& backend, const Placement& placement, std::uint64_t bytes,
                                       std::chrono::nanoseconds duration, const Progress& progress);

struct HostMeasurement {
  int thread_count = 0;  // One for each core that may be used, within the quota.
  int node_count = 0;    // NUMA nodes, each with threads and memory of its own.
  // a = b + s * c of doubles: 24 bytes an element. What a store reads beforehand is not counted.
  double triad_bytes_per_second = 0;
  double adamw_elements_per_second = 0;  // The host's step with fp32 master, m and v.
  // 24 of master, m and v, the gradient, and the parameter of a 2-byte type.
  std::uint64_t adamw_bytes_per_element = 0;
};

// All NUMA nodes at the same time, on page-locked memory of their own: three arrays of `bytes` over all
// nodes, or the states of bytes / 8 elements. Each for half of `duration`, and at least three passes.
// `dtype`: of gradient and parameter. `backend` page-locks.
//
// Errors: kOutOfMemory where the host has less than three times `bytes`.
Result<HostMeasurement> measure_host(Backend& backend, const Topology& topology, DataType dtype,
                                     std::uint64_t bytes, std::chrono::nanoseconds duration,
                                     const Progress& progress);

struct FileMeasurement {
  std::vector<DirectoryFacts> directories;  // Several: striped over.
  bool is_direct = false;                   // Past the page cache.
  std::uint64_t free_bytes = 0;             // For stripes of the same size in each directory.
  StoreMeasurement store;
};

// Checks what measure_files needs, and is quick. Errors: kInvalidArgument for what is no directory; kIoError
// where no file can be made; kOutOfMemory where there is no room for `bytes`.
Result<FileMeasurement> prepare_files(const Topology& topology, const std::vector<std::string>& directories,
                                      std::uint64_t bytes);

// Depths of 1 to 32 with blocks of 256 KiB to 4 MiB, as far as `bytes` has so many blocks, on a store as the
// engine makes it. `files` is what prepare_files gave. Leaves nothing. Errors: the store's.
Status measure_files(std::uint64_t bytes, std::chrono::nanoseconds duration, const Progress& progress,
                     FileMeasurement* files);

}  // namespace forebay
