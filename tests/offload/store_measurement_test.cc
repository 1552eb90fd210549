// The measurement of a drive, and the choice that follows.
#include "forebay/store_measurement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <vector>

#include "tests/support/process.h"

namespace forebay {
namespace {

using testing::TemporaryDirectory;

TEST(StoreMeasurement, ChoosesTheLeastInFlightAmongTheFastest) {
  const std::vector<StoreMeasurementPoint> points = {{1 << 20, 4, 2.0e9, 2.0e9},
                                                     {1 << 20, 16, 3.0e9, 2.9e9},
                                                     {4 << 20, 16, 3.0e9, 3.0e9},
                                                     {1 << 20, 32, 3.0e9, 3.0e9}};

  const StoreMeasurementPoint chosen = choose_point(points);

  EXPECT_EQ(chosen.block_bytes, 1u << 20);
  EXPECT_EQ(chosen.depth, 16u);
  // Both ways count: a fast reader that hardly writes is no choice.
  EXPECT_EQ(choose_point({{{1 << 20, 1, 9e9, 1e8}, {1 << 20, 8, 2e9, 2e9}}}).depth, 8u);
  EXPECT_DOUBLE_EQ((StoreMeasurementPoint{1, 1, 3e9, 6e9}).pass_bytes_per_second(), 2e9);
}

TEST(StoreMeasurement, MeasuresAPointForEachPairAndLeavesNothing) {
  const TemporaryDirectory directory;
  FileStoreOptions options;
  options.directories = {directory.path()};
  options.checksums = false;
  StoreMeasurementOptions measured;
  measured.block_bytes = {128 << 10, 256 << 10};
  measured.depths = {1, 4};
  measured.range_bytes = 4 << 20;
  // Longer than it takes: the first point is always there, the others only in time.
  measured.duration = std::chrono::milliseconds(200);

  const auto result = measure_file_store(options, measured);

  ASSERT_TRUE(result.ok()) << result.status().to_string();
  const StoreMeasurement& measurement = result.value();
  ASSERT_GE(measurement.points.size(), 1u);
  EXPECT_LE(measurement.points.size(), 4u);
  for (const StoreMeasurementPoint& point : measurement.points) {
    std::cout << point.block_bytes << " bytes, depth " << point.depth << ": "
              << point.read_bytes_per_second / 1e6 << " MB/s read, " << point.write_bytes_per_second / 1e6
              << " MB/s written\n";
    EXPECT_GT(point.read_bytes_per_second, 0);
    EXPECT_GT(point.write_bytes_per_second, 0);
  }
  EXPECT_GT(measurement.chosen.depth, 0u);
  EXPECT_FALSE(measurement.description.empty());
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(StoreMeasurement, StopsAtTheFirstPointWhenItsTimeIsOver) {
  const TemporaryDirectory directory;
  FileStoreOptions options;
  options.directories = {directory.path()};
  StoreMeasurementOptions measured;
  measured.range_bytes = 4 << 20;
  measured.duration = std::chrono::milliseconds(0);

  const auto result = measure_file_store(options, measured);

  ASSERT_TRUE(result.ok()) << result.status().to_string();
  EXPECT_EQ(result.value().points.size(), 1u);
}

TEST(StoreMeasurement, RefusesWhatCannotBeMeasured) {
  const TemporaryDirectory directory;
  FileStoreOptions options;
  options.directories = {directory.path()};
  EXPECT_EQ(measure_file_store(options, {.block_bytes = {}}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(measure_file_store(options, {.depths = {}}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(measure_file_store(options, {.range_bytes = 4096}).status().code(), StatusCode::kInvalidArgument);
  options.directories = {directory / "not there"};
  EXPECT_EQ(measure_file_store(options).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay
