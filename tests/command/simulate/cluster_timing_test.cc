// The times of kernels, copies, drives and links, from round figures that all differ.

#include "runtime/command/simulate/cluster_timing.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "forebay/error.h"
#include "runtime/command/simulate/simulated_drives.h"

namespace forebay {
namespace {

ClusterDescription round_cluster() {
  ClusterDescription cluster;
  cluster.device.memory_bytes_per_second = 4000;
  cluster.device.memory_efficiency = 0.25;  // 1000 bytes a second.
  cluster.device.flops = {{DataType::kBfloat16, 1e6}, {DataType::kFloat16, 5e5}};
  cluster.device.matrix_efficiency = {{1, 0.5}};
  cluster.device.kernel_seconds = 0.125;
  cluster.device.queue_seconds = 0.0625;
  cluster.host_ranks = 4;
  cluster.host_bytes_per_second = 2000;  // 500 a rank.
  cluster.bus_bytes_per_second = 600;
  cluster.ranks_per_bus = 2;
  cluster.drive_read_bytes_per_second = 80;
  cluster.drive_write_bytes_per_second = 40;
  cluster.links = {{.name = "inner",
                    .ranks = 4,
                    .bytes_per_second = 100,
                    .ranks_per_link = 1,
                    .latency_seconds = 0.5,
                    .message_seconds = 0.25,
                    .processor_seconds_per_byte = 0.75},
                   {.name = "outer",
                    .bytes_per_second = 10,
                    .ranks_per_link = 2,
                    .latency_seconds = 5,
                    .message_seconds = 2.5}};
  return cluster;
}

// The seconds that `work` takes of one resource.
double seconds_on(const ModelWork& work, int resource) {
  double seconds = 0;
  for (std::size_t i = 0; i < work.part_count; ++i)
    seconds += work.parts[i].resource == resource ? work.parts[i].seconds : 0;
  return seconds;
}

TEST(ClusterTiming, KernelsAndCopiesMoveTheirBytes) {
  const ClusterTiming timing(round_cluster(), DataType::kBfloat16);
  const ModelWork kernel = timing.kernel("kernel", 500);
  EXPECT_DOUBLE_EQ(seconds_on(kernel, kComputeResource), 0.5);
  EXPECT_EQ(kernel.delay_seconds, 0.125);
  EXPECT_DOUBLE_EQ(seconds_on(timing.fill(250), kComputeResource), 0.25);
  // Read and written.
  EXPECT_DOUBLE_EQ(seconds_on(timing.copy(ModelCopy::kOnDevice, 500), kComputeResource), 1);
  EXPECT_DOUBLE_EQ(seconds_on(timing.copy(ModelCopy::kOnHost, 500), kHostMemoryResource), 2);
  const ModelWork up = timing.copy(ModelCopy::kToDevice, 600);
  EXPECT_DOUBLE_EQ(seconds_on(up, kBusUpResource), 2);
  EXPECT_DOUBLE_EQ(seconds_on(up, kBusDownResource), 0);
  EXPECT_DOUBLE_EQ(seconds_on(up, kHostMemoryResource), 1.2);
  const ModelWork down = timing.copy(ModelCopy::kToHost, 600);
  EXPECT_DOUBLE_EQ(seconds_on(down, kBusDownResource), 2);
  EXPECT_DOUBLE_EQ(seconds_on(down, kBusUpResource), 0);
  EXPECT_EQ(timing.queue_time(), std::chrono::microseconds(62'500));
}

TEST(ClusterTiming, SharedProcessorsDoAllWorkOfAHost) {
  ClusterDescription cluster = round_cluster();
  cluster.shared_processors = true;
  const ClusterTiming timing(cluster, DataType::kBfloat16);
  const ModelWork up = timing.copy(ModelCopy::kToDevice, 600);
  EXPECT_DOUBLE_EQ(seconds_on(up, kComputeResource), 2);
  EXPECT_DOUBLE_EQ(seconds_on(up, kHostMemoryResource), 0);
  EXPECT_DOUBLE_EQ(seconds_on(timing.host_pass(500), kComputeResource), 1);
  EXPECT_DOUBLE_EQ(seconds_on(timing.host_update(50), kComputeResource), 2.8);
}

TEST(ClusterTiming, ProductsTakeTheSlowerOfArithmeticAndMemory) {
  ClusterDescription cluster = round_cluster();
  const ClusterTiming timing(cluster, DataType::kBfloat16);
  // 2 * 100^3 operations at half of 1e6 a second; 3 * 100^2 elements of 2 bytes at 1000 a second.
  EXPECT_DOUBLE_EQ(seconds_on(timing.product("p", 100, 100, 100, 1), kComputeResource), 60);
  cluster.device.memory_bytes_per_second = 4e9;
  const ClusterTiming fast(cluster, DataType::kBfloat16);
  EXPECT_DOUBLE_EQ(seconds_on(fast.product("p", 100, 100, 100, 3), kComputeResource), 12);
  EXPECT_DOUBLE_EQ(seconds_on(fast.product("p", 100, 100, 100, 3, 0.5), kComputeResource), 24);
  // Without a figure for fp32, that of the slowest type.
  EXPECT_DOUBLE_EQ(seconds_on(fast.fp32_products("p", 100, 100, 100, 3), kComputeResource), 24);
  cluster.device.flops[DataType::kFloat32] = 3e6;
  EXPECT_DOUBLE_EQ(
      seconds_on(ClusterTiming(cluster, DataType::kBfloat16).fp32_products("p", 100, 100, 100, 3),
                 kComputeResource),
      4);
}

TEST(ClusterTiming, HostUpdatesMoveStatesGradientsAndParameters) {
  const ClusterDescription cluster = round_cluster();
  EXPECT_DOUBLE_EQ(
      seconds_on(ClusterTiming(cluster, DataType::kBfloat16).host_update(50), kHostMemoryResource),
      50 * (24 + 2 * 2) / 500.0);
}

TEST(ClusterTiming, LevelsHaveTheFiguresOfTheirLinks) {
  const ClusterTiming timing(round_cluster(), DataType::kBfloat16);
  const std::vector<SimulatedLevel> levels = timing.levels(10);
  ASSERT_EQ(levels.size(), 2u);
  EXPECT_EQ(levels[0].name, "inner");
  EXPECT_EQ(levels[0].ranks, 4);
  EXPECT_EQ(levels[0].bytes_per_second, 100);
  EXPECT_EQ(levels[0].ranks_per_link, 1);
  EXPECT_EQ(levels[0].latency_seconds, 0.5);
  EXPECT_EQ(levels[0].message_seconds, 0.25);
  EXPECT_EQ(levels[0].processor_seconds_per_byte, 0.75);
  EXPECT_EQ(levels[0].resource, kFirstLinkResource);
  EXPECT_EQ(levels[1].ranks, 12);  // Whole hosts.
  EXPECT_EQ(levels[1].ranks_per_link, 2);
  EXPECT_EQ(levels[1].message_seconds, 2.5);
  EXPECT_EQ(levels[1].resource, kFirstLinkResource + 1);
  EXPECT_EQ(timing.levels(1)[1].ranks, 4);
}

TEST(SimulatedDrives, ServeReadsAndWritesBesideEachOther) {
  const ClusterTiming timing(round_cluster(), DataType::kBfloat16);
  // All ranks of a host share its drives.
  EXPECT_DOUBLE_EQ(timing.drive_seconds(true, 40), 2);
  EXPECT_DOUBLE_EQ(timing.drive_seconds(false, 40), 4);
  HostClock clock(HostClock::Mode::kVirtual);
  const auto backend = value_or_throw(ModelBackend::create({.timing = &timing, .clock = &clock}));
  const auto drives = make_simulated_drives(timing, *backend);
  const StoreRange range = value_or_throw(drives->create_range("r", 4096));
  const auto submit = [&](StoreDirection direction) {
    const StoreTransfer transfer{.direction = direction, .range = range, .bytes = 40};
    return value_or_throw(drives->submit(Span<const StoreTransfer>(&transfer, 1)));
  };
  const StoreTicket write = submit(StoreDirection::kWrite);
  const StoreTicket first = submit(StoreDirection::kRead);
  const StoreTicket second = submit(StoreDirection::kRead);
  const auto end_of = [&](StoreTicket ticket) {
    throw_if_error(drives->wait(ticket, std::chrono::milliseconds(0)));
    return backend->now();
  };
  EXPECT_EQ(end_of(first), std::chrono::seconds(2));
  EXPECT_FALSE(value_or_throw(drives->poll(second)));
  EXPECT_EQ(end_of(second), std::chrono::seconds(4));
  EXPECT_TRUE(value_or_throw(drives->poll(write)));
  EXPECT_EQ(drives->poll(write).status().code(), StatusCode::kInvalidArgument);
  const StoreStatistics statistics = drives->statistics();
  EXPECT_EQ(statistics.read_bytes, 80u);
  EXPECT_EQ(statistics.written_bytes, 40u);
  EXPECT_EQ(statistics.read_count, 2u);
  EXPECT_EQ(statistics.write_count, 1u);
  EXPECT_EQ(statistics.range_bytes, 4096u);
  EXPECT_EQ(statistics.transfers_in_flight, 0u);
  EXPECT_EQ(statistics.most_transfers_in_flight, 3u);
}

}  // namespace
}  // namespace forebay
