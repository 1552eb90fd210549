// The times of a simulation: the resources of one rank, and the work of kernels, copies, drives and hosts on
// them, from the description of a cluster.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "forebay/model_backend.h"
#include "forebay/simulated_communicator.h"
#include "runtime/command/simulate/machine.h"

namespace forebay {

// The resources of one rank; links follow from kFirstLink on.
enum SimulatedResource : int {
  kComputeResource,
  kBusDownResource,
  kBusUpResource,
  kHostMemoryResource,
  kDriveReadResource,
  kDriveWriteResource,
  kFirstLinkResource,
};

// At most kModelTimeEnd.
std::chrono::nanoseconds bounded_nanoseconds(double seconds);

class ClusterTiming : public ModelTiming {
 public:
  ClusterTiming(const ClusterDescription& cluster, DataType type);

  ModelWork copy(ModelCopy kind, std::uint64_t bytes) const override;
  ModelWork fill(std::uint64_t bytes) const override { return kernel("fill", bytes); }
  ModelWork kernel(const char* name, std::uint64_t bytes) const override;
  // Without an fp32 figure, the device's slowest type.
  ModelWork fp32_products(const char* name, double m, double n, double k, double count) const override;
  std::chrono::nanoseconds queue_time() const override;

  // The product of an m x k and a k x n matrix, `count` times in one kernel. The slower of arithmetic and
  // memory counts. `part`: of the efficiency of a plain product.
  ModelWork product(const char* name, double m, double n, double k, double count, double part = 1) const;
  // An update of `count` elements in host memory, and a pass over its bytes.
  ModelWork host_update(std::uint64_t count) const;
  ModelWork host_pass(std::uint64_t bytes) const;
  double drive_seconds(bool reads, std::uint64_t bytes) const;

  // The topology of `ranks` ranks.
  std::vector<SimulatedLevel> levels(int ranks) const;

 private:
  ModelWork product_of(const char* name, double m, double n, double k, double count, double flops,
                       double bytes_each) const;
  int host_resource() const { return cluster_.shared_processors ? kComputeResource : kHostMemoryResource; }

  const ClusterDescription cluster_;
  const double flops_;
  const double element_bytes_;
  const double device_bytes_per_second_;
  const double host_share_;  // Bytes per second of host memory for one rank.
};

}  // namespace forebay
