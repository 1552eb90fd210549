#include "runtime/command/simulate/cluster_timing.h"

#include <algorithm>

#include "forebay/units.h"

namespace forebay {
namespace {

// Bytes of host memory that AdamW moves for one element: master, m and v in and out; a gradient comes in and
// a parameter goes out besides.
constexpr double kHostStateBytes = 24;

}  // namespace

std::chrono::nanoseconds bounded_nanoseconds(double seconds) {
  constexpr auto kMost = static_cast<double>(kModelTimeEnd.count());
  const double ns = seconds * 1e9;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(ns < kMost ? ns : kMost));
}

// Requires: the device has the type.
ClusterTiming::ClusterTiming(const ClusterDescription& cluster, DataType type)
    : cluster_(cluster),
      flops_(cluster.device.flops.at(type)),
      element_bytes_(static_cast<double>(element_bytes(type))),
      device_bytes_per_second_(cluster.device.memory_bytes_per_second * cluster.device.memory_efficiency),
      host_share_(cluster.host_bytes_per_second / cluster.host_ranks) {}

ModelWork ClusterTiming::kernel(const char* name, std::uint64_t bytes) const {
  ModelWork work{.name = name, .delay_seconds = cluster_.device.kernel_seconds};
  work.add(kComputeResource, static_cast<double>(bytes) / device_bytes_per_second_);
  return work;
}

ModelWork ClusterTiming::copy(ModelCopy kind, std::uint64_t bytes) const {
  const auto count = static_cast<double>(bytes);
  if (kind == ModelCopy::kOnDevice) return kernel("copy", 2 * bytes);
  if (kind == ModelCopy::kOnHost) return host_pass(2 * bytes);
  const bool up = kind == ModelCopy::kToDevice;
  ModelWork work{.name = up ? "copy to the device" : "copy to the host",
                 .delay_seconds = cluster_.device.kernel_seconds};
  const int bus = up ? kBusUpResource : kBusDownResource;
  work.add(cluster_.shared_processors ? kComputeResource : bus,
           count * cluster_.ranks_per_bus / cluster_.bus_bytes_per_second);
  if (!cluster_.shared_processors) work.add(kHostMemoryResource, count / host_share_);
  return work;
}

std::chrono::nanoseconds ClusterTiming::queue_time() const {
  return bounded_nanoseconds(cluster_.device.queue_seconds);
}

ModelWork ClusterTiming::product(const char* name, double m, double n, double k, double count,
                                 double part) const {
  return product_of(name, m, n, k, count, flops_ * part, element_bytes_);
}

ModelWork ClusterTiming::fp32_products(const char* name, double m, double n, double k, double count) const {
  const std::map<DataType, double>& rates = cluster_.device.flops;
  const auto fp32 = rates.find(DataType::kFloat32);
  const auto slowest = std::min_element(rates.begin(), rates.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
  return product_of(name, m, n, k, count, (fp32 != rates.end() ? fp32 : slowest)->second, sizeof(float));
}

ModelWork ClusterTiming::product_of(const char* name, double m, double n, double k, double count,
                                    double flops, double bytes_each) const {
  const double arithmetic =
      2 * m * n * k * count / (flops * matrix_efficiency(cluster_.device, m, n * count, k));
  const double memory = (m * k + k * n + m * n) * count * bytes_each / device_bytes_per_second_;
  ModelWork work{.name = name, .delay_seconds = cluster_.device.kernel_seconds};
  work.add(kComputeResource, std::max(arithmetic, memory));
  return work;
}

ModelWork ClusterTiming::host_update(std::uint64_t count) const {
  ModelWork work{.name = "update on the host"};
  work.add(host_resource(),
           static_cast<double>(count) * (kHostStateBytes + 2 * element_bytes_) / host_share_);
  return work;
}

ModelWork ClusterTiming::host_pass(std::uint64_t bytes) const {
  ModelWork work{.name = "sum on the host"};
  work.add(host_resource(), static_cast<double>(bytes) / host_share_);
  return work;
}

double ClusterTiming::drive_seconds(bool reads, std::uint64_t bytes) const {
  const double rate = reads ? cluster_.drive_read_bytes_per_second : cluster_.drive_write_bytes_per_second;
  return static_cast<double>(bytes) * cluster_.host_ranks / rate;
}

std::vector<SimulatedLevel> ClusterTiming::levels(int ranks) const {
  std::vector<SimulatedLevel> levels;
  int resource = kFirstLinkResource;
  for (const LinkDescription& link : cluster_.links) {
    const int smaller = levels.empty() ? 1 : levels.back().ranks;
    SimulatedLevel& level = levels.emplace_back();
    level.name = link.name;
    level.ranks = link.ranks != 0
                      ? link.ranks
                      : static_cast<int>(round_up(static_cast<std::uint64_t>(std::max(ranks, smaller)),
                                                  static_cast<std::uint64_t>(smaller)));
    level.bytes_per_second = link.bytes_per_second;
    level.ranks_per_link = link.ranks_per_link;
    level.latency_seconds = link.latency_seconds;
    level.message_seconds = link.message_seconds;
    level.resource = resource++;
    level.processor_seconds_per_byte = link.processor_seconds_per_byte;
  }
  return levels;
}

}  // namespace forebay
