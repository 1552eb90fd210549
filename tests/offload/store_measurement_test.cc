// The measurement of a drive, and the choice that follows.
#include "forebay/store_measurement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iostream>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "offload/io_engine.h"
#include "tests/support/process.h"

namespace forebay {
namespace {

using testing::TemporaryDirectory;
using Clock = std::chrono::steady_clock;

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
  // Five in a hundred may be given away, and the first of equals is taken.
  EXPECT_EQ(choose_point({{{1 << 20, 1, 949, 949}, {1 << 20, 2, 951, 951}, {1 << 20, 4, 1000, 1000}}}).depth,
            2u);
  EXPECT_EQ(choose_point({{{1 << 20, 4, 1000, 1000}, {2 << 20, 2, 1001, 1001}}}).depth, 4u);
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
  EXPECT_NE(result.value().description.find("blocks of 128.00 KiB, depth "), std::string::npos)
      << result.value().description;
}

// Notes the requests. The first write ends only when its share of the time is over.
struct Requests {
  std::set<std::uint64_t> read, written;  // Offsets.
  int most_in_flight = 0;
};
class NotingEngine final : public internal::IoEngine {
 public:
  NotingEngine(std::unique_ptr<internal::IoEngine> inner, Requests& requests, Clock::duration first_write,
               int error)
      : inner_(std::move(inner)), requests_(requests), end_(Clock::now() + first_write), error_(error) {}
  int submit(const internal::IoRequest& request) override {
    (request.write ? requests_.written : requests_.read).insert(request.offset);
    requests_.most_in_flight = std::max(requests_.most_in_flight, ++in_flight_);
    return inner_->submit(request);
  }
  std::size_t reap(std::span<internal::IoResult> results, std::chrono::nanoseconds timeout) override {
    while (Clock::now() < end_) std::this_thread::yield();
    const std::size_t count = inner_->reap(results, timeout);
    for (internal::IoResult& result : results.first(count)) {
      if (error_ != 0) result.result = -error_;
    }
    in_flight_ -= static_cast<int>(count);
    return count;
  }
  std::uint64_t register_memory(std::byte*, std::size_t) override { return 0; }
  std::string description() const override { return inner_->description(); }

 private:
  const std::unique_ptr<internal::IoEngine> inner_;
  Requests& requests_;
  const Clock::time_point end_;
  const int error_;
  int in_flight_ = 0;
};

Result<StoreMeasurement> measure_noting(Requests& requests, unsigned depth,
                                        std::chrono::milliseconds duration,
                                        std::chrono::milliseconds first_write, int error = 0) {
  const TemporaryDirectory directory;
  FileStoreOptions options;
  options.directories = {directory.path()};
  options.transfer_limit = 2;
  StoreMeasurementOptions measured;
  measured.block_bytes = {64 << 10};
  measured.depths = {depth};
  measured.range_bytes = 256 << 10;
  measured.duration = duration;
  return internal::measure_file_store(options, measured, [&](auto inner) {
    return std::make_unique<NotingEngine>(std::move(inner), requests, first_write, error);
  });
}

TEST(StoreMeasurement, GoesOverTheWholeRange) {
  using std::chrono::milliseconds;
  Requests requests;
  // The time is over when a read has been begun on each block.
  for (int i = 0; i < 100 && requests.read.size() < 4; ++i) {
    const auto result = measure_noting(requests, 1, milliseconds(100), milliseconds(0));
    ASSERT_TRUE(result.ok()) << result.status().to_string();
  }

  const std::set<std::uint64_t> all = {0, 64 << 10, 128 << 10, 192 << 10};
  EXPECT_EQ(requests.written, all);
  EXPECT_EQ(requests.read, all);
  EXPECT_EQ(requests.most_in_flight, 1);
}

TEST(StoreMeasurement, ReadsNothingThatItHasNotWritten) {
  using std::chrono::milliseconds;
  Requests requests;

  const auto result = measure_noting(requests, 1, milliseconds(40), milliseconds(100));

  ASSERT_TRUE(result.ok()) << result.status().to_string();
  EXPECT_LE(requests.written.size(), 2u);
  EXPECT_TRUE(std::includes(requests.written.begin(), requests.written.end(), requests.read.begin(),
                            requests.read.end()));
}

TEST(StoreMeasurement, HasNoMoreInFlightThanBlocks) {
  using std::chrono::milliseconds;
  Requests requests;

  const auto result = measure_noting(requests, 16, milliseconds(20), milliseconds(1));

  ASSERT_TRUE(result.ok()) << result.status().to_string();
  EXPECT_LE(requests.most_in_flight, 4);
}

TEST(StoreMeasurement, SaysThatTheDriveFailed) {
  Requests requests;

  const auto result = measure_noting(requests, 2, {}, {}, EIO);

  EXPECT_EQ(result.status().code(), StatusCode::kIoError);
}

// One block each way takes no minute and no millionth of a second.
TEST(StoreMeasurement, CountsBytesInASecond) {
  const TemporaryDirectory directory;
  FileStoreOptions options;
  options.directories = {directory.path()};
  StoreMeasurementOptions measured;
  measured.block_bytes = {4 << 20};
  measured.range_bytes = 4 << 20;
  measured.duration = std::chrono::milliseconds(0);

  const auto result = measure_file_store(options, measured);

  ASSERT_TRUE(result.ok()) << result.status().to_string();
  const StoreMeasurementPoint& point = result.value().chosen;
  EXPECT_GT(point.read_bytes_per_second, (4 << 20) / 60.0);
  EXPECT_LT(point.read_bytes_per_second, (4 << 20) * 1e6);
  EXPECT_GT(point.write_bytes_per_second, (4 << 20) / 60.0);
  EXPECT_LT(point.write_bytes_per_second, (4 << 20) * 1e6);
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
  EXPECT_EQ(
      measure_file_store(options, {.block_bytes = {1 << 20, 2 << 20}, .range_bytes = 4096})
          .status()
          .message(),
      "cannot measure a file store: a range of 4.00 KiB is smaller than a block of 2.00 MiB; give a larger "
      "range");
  options.directories = {directory / "not there"};
  EXPECT_EQ(measure_file_store(options).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay
