// Measures the rates of a file store in given directories, in about half a second, so that block size and
// depth suit the machine and a plan knows the rates.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "forebay/file_store.h"
#include "forebay/span.h"

namespace forebay {

struct StoreMeasurementOptions {
  std::vector<std::size_t> block_bytes{512 << 10, 1 << 20, 4 << 20};  // Each is measured with each depth.
  std::vector<unsigned> depths{4, 16, 32};
  // Smaller: a drive's own cache may hold it all. Larger: more disk and host memory for the moment.
  std::uint64_t range_bytes = 64 << 20;
  // For all points together. Smaller: more noise. Larger: a slower start. Points that a slow drive has not
  // begun by then are left out.
  std::chrono::milliseconds duration{500};
};

struct StoreMeasurementPoint {
  std::size_t block_bytes = 0;
  unsigned depth = 0;
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;

  // The rate of a pass that reads and then writes the same number of bytes.
  double pass_bytes_per_second() const;
};

struct StoreMeasurement {
  std::vector<StoreMeasurementPoint> points;  // In the order they were measured; at least one.
  StoreMeasurementPoint chosen;
  std::string description;  // The measured store's.
};

// The point with the fewest bytes in flight among the points within a twentieth of the fastest pass.
// Requires: at least one point.
StoreMeasurementPoint choose_point(Span<const StoreMeasurementPoint> points);

// Takes block_bytes and depth from `measured` and the other options from `options`. It writes and reads a
// range of its own and leaves nothing. The first use of a range is a little slower than later uses on some
// file systems. Cost: `duration`, and on a slow drive the time for the bytes of one point in flight. Errors:
// those of make_file_store and of the store; kInvalidArgument for no block sizes, no depths, or a range
// smaller than a block.
Result<StoreMeasurement> measure_file_store(const FileStoreOptions& options,
                                            const StoreMeasurementOptions& measured = {});

}  // namespace forebay
