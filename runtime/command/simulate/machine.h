// Descriptions of devices and clusters: the figures that a simulation goes by. They are JSON, so that a
// person can write one for another machine. Each figure is {"value": NUMBER, "source": "TEXT"}; the source
// says where it comes from, or "assumed".
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "forebay/data_type.h"
#include "forebay/status.h"

namespace forebay {

struct DeviceDescription {
  std::string name;  // "V100-32"
  std::uint64_t memory_bytes = 0;
  double memory_bytes_per_second = 0;
  double memory_efficiency = 0;      // The part of it that a kernel reaches.
  std::map<DataType, double> flops;  // Dense, by type; a type that is missing cannot be used.
  // The part of it that a product of matrices reaches, by the cube root of its multiply-adds: ascending.
  std::vector<std::pair<double, double>> matrix_efficiency;
  double kernel_seconds = 0;  // On the device, from one kernel to the next that waits for it.
  double queue_seconds = 0;   // The host's time to queue one kernel.
};

// Links between ranks. `ranks` 0: all of the cluster, however many there are.
struct LinkDescription {
  std::string name;
  int ranks = 0;
  double bytes_per_second = 0;  // One link, each way, as collectives reach it.
  int ranks_per_link = 1;
  double latency_seconds = 0;
  double message_seconds = 0;
  double processor_seconds_per_byte = 0;  // Compute time of the device, where processors are shared.
};

struct ClusterDescription {
  std::string name;  // "dgx-2"
  DeviceDescription device;
  int host_ranks = 1;  // Devices of one host.
  std::uint64_t host_memory_bytes = 0;
  double host_bytes_per_second = 0;  // Memory of a host, as updates reach it.
  double bus_bytes_per_second = 0;   // From host memory to devices, each way, of one link.
  int ranks_per_bus = 1;
  double drive_read_bytes_per_second = 0;  // All drives of a host; 0: there are none.
  double drive_write_bytes_per_second = 0;
  double control_seconds = 0;  // One hop of a small message between hosts.
  // The device is the host: kernels, copies, updates on the host and links take the same processors.
  bool shared_processors = false;
  std::vector<LinkDescription> links;  // From the innermost.
};

// The names of the installed descriptions.
std::vector<std::string> device_names();
std::vector<std::string> cluster_names();

// Where `forebay bench-tiers --save this` keeps the description of this machine: FOREBAY_MACHINE, or a file
// in the user's cache directory. Errors: kInvalidArgument if no variable says where that is.
Result<std::string> this_machine_path();

// A cluster by name, the path of a file, or "this": "dgx-2", "mine.json". A cluster names its device, or has
// it whole.
//
// Errors: kInvalidArgument naming the file, the field and the allowed values; for another name the nearest.
//         kIoError for a file that cannot be read.
Result<ClusterDescription> read_cluster(const std::string& name_or_path);
Result<DeviceDescription> read_device(const std::string& name);
// `file` is for messages. Errors: kInvalidArgument.
Result<ClusterDescription> parse_cluster(const std::string& file, std::string_view text);
Result<DeviceDescription> parse_device(const std::string& file, std::string_view text);

// The part of its FLOP/s that the device reaches in a product of an m x k and a k x n matrix.
double matrix_efficiency(const DeviceDescription& device, double m, double n, double k);

}  // namespace forebay
