// What a directory's drives deliver to a file store: measured for about half a second, so that block size and
// depth follow the machine and a plan knows the rates.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "forebay/file_store.h"

namespace forebay {

struct StoreMeasurementOptions {
  std::vector<std::size_t> block_bytes{512 << 10, 1 << 20, 4 << 20};  // Each with each depth.
  std::vector<unsigned> depths{4, 16, 32};
  // Smaller: less that a drive's own cache has to hold. Larger: more disk and host memory for the moment.
  std::uint64_t range_bytes = 64 << 20;
  // For all points together. Smaller: more noise. Larger: a slower start. A slow drive that is not done with
  // its first points by then is not asked for the others.
  std::chrono::milliseconds duration{500};
};

struct StoreMeasurementPoint {
  std::size_t block_bytes = 0;
  unsigned depth = 0;
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;

  // Of a pass that reads and writes the same number of bytes, one after the other.
  double pass_bytes_per_second() const;
};

struct StoreMeasurement {
  std::vector<StoreMeasurementPoint> points;  // In the order they were measured; at least one.
  StoreMeasurementPoint chosen;
  std::string description;  // Of the store that was measured.
};

// The point with the fewest bytes in flight among those within a twentieth of the fastest pass. Requires: at
// least one.
StoreMeasurementPoint choose_point(std::span<const StoreMeasurementPoint> points);

// Takes block_bytes and depth from `measured` and the rest from `options`, writes and reads a range of its
// own, and leaves nothing. Rates are those of ranges in their first use, on which file systems spend a little
// more than later. Cost: `duration`, and on a slow drive what one point has in flight. Errors:
// make_file_store's and the store's; kInvalidArgument for no block sizes, no depths, or a range smaller than
// a block.
Result<StoreMeasurement> measure_file_store(const FileStoreOptions& options,
                                            const StoreMeasurementOptions& measured = {});

}  // namespace forebay
