// The measurement of a drive, and the choice that follows.
#include "forebay/store_measurement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <thread>
#include <utility>
#include <vector>

#include "offload/io_engine.h"
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

// The first read ends no earlier than twice the time after its begin that has passed before: all writes took
// less.
class SlowReads final : public internal::IoEngine {
 public:
  explicit SlowReads(std::unique_ptr<internal::IoEngine> inner) : inner_(std::move(inner)) {}
  int submit(const internal::IoRequest& request) override {
    const Clock::time_point now = Clock::now();
    if (!request.write && end_ == made_) end_ = now + 2 * (now - made_);
    return inner_->submit(request);
  }
  std::size_t reap(std::span<internal::IoResult> results, std::chrono::nanoseconds timeout) override {
    while (Clock::now() < end_) std::this_thread::yield();
    return inner_->reap(results, timeout);
  }
  std::uint64_t register_memory(std::byte* memory, std::size_t bytes) override {
    return inner_->register_memory(memory, bytes);
  }
  std::string description() const override { return inner_->description(); }

 private:
  using Clock = std::chrono::steady_clock;
  const std::unique_ptr<internal::IoEngine> inner_;
  const Clock::time_point made_ = Clock::now();
  Clock::time_point end_ = made_;
};

TEST(StoreMeasurement, TellsReadsFromWrites) {
  const TemporaryDirectory directory;
  FileStoreOptions options;
  options.directories = {directory.path()};
  StoreMeasurementOptions measured;
  measured.block_bytes = {128 << 10};
  measured.range_bytes = 128 << 10;
  measured.duration = std::chrono::milliseconds(0);  // One block each way.

  const auto result = internal::measure_file_store(
      options, measured, [](auto inner) { return std::make_unique<SlowReads>(std::move(inner)); });

  ASSERT_TRUE(result.ok()) << result.status().to_string();
  const StoreMeasurementPoint& point = result.value().points.at(0);
  EXPECT_LT(point.read_bytes_per_second, point.write_bytes_per_second);
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
