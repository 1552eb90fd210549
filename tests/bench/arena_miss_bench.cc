// The cost of a request that no free range can hold, against the number of free ranges: 10^2 to 10^5 of them,
// in a checkerboard with live blocks. The device is the model, so the times are those of the arena's books.
//
// chunks: free ranges of one chunk, and requests of two, which are stitched. halves: free ranges of half a
// chunk in chunks that are live otherwise, and requests of two chunks, which need new memory.
//
//   arena_miss_bench [RANGES_MAX]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "forebay/arena.h"
#include "forebay/model_backend.h"
#include "forebay/units.h"

using namespace forebay;

namespace {

constexpr std::size_t kChunkBytes = 2_MiB;
constexpr std::size_t kRequestsMax = 200;

struct Cost {
  double median_us = 0;
  double worst_us = 0;
  double driver_calls = 0;  // Mean per request.
};

Cost measure(std::size_t range_count, std::size_t block_bytes) {
  ModelBackendOptions device;
  const std::size_t request_count = std::min(kRequestsMax, range_count / 4);
  const std::size_t held_bytes = round_up(2 * range_count * block_bytes, kChunkBytes);
  device.memory_bytes = held_bytes + (block_bytes < kChunkBytes ? request_count * 2 * kChunkBytes : 0);
  const auto backend = ModelBackend::create(std::move(device)).value();
  const Stream stream = backend->stream_create().value();
  const auto arena =
      Arena::create(*backend, {.growth_bytes = kChunkBytes, .largest_chunk_bytes = kChunkBytes}).value();
  std::vector<DevicePtr> blocks(2 * range_count);
  for (DevicePtr& block : blocks) block = arena->allocate({.bytes = block_bytes, .stream = stream}).value();
  for (std::size_t i = 0; i < blocks.size(); i += 2)
    FOREBAY_CHECK(arena->free(blocks[i], stream).ok(), "free");

  const std::uint64_t calls_before = arena->statistics().driver_call_count;
  std::vector<double> times_us;
  for (std::size_t i = 0; i < request_count; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const Result<DevicePtr> block = arena->allocate({.bytes = 2 * kChunkBytes, .stream = stream});
    const auto end = std::chrono::steady_clock::now();
    FOREBAY_CHECK(block.ok(), "request %zu", i);
    times_us.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
  }
  const std::uint64_t calls = arena->statistics().driver_call_count - calls_before;
  std::sort(times_us.begin(), times_us.end());
  return {times_us[times_us.size() / 2], times_us.back(),
          static_cast<double>(calls) / static_cast<double>(request_count)};
}

}  // namespace

int main(int argc, char** argv) {
  constexpr double kRatioMax = 20;  // The median at 10^5 ranges over that at 10^2.
  const std::size_t ranges_max = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100000;
  std::printf("%-8s %12s %12s %14s %12s %10s\n", "free", "ranges", "median, us", "worst, us", "driver calls",
              "ratio");
  bool is_met = true;
  for (const std::size_t block_bytes : {kChunkBytes, kChunkBytes / 2}) {
    double first_us = 0;
    for (std::size_t range_count = 100; range_count <= ranges_max; range_count *= 10) {
      const Cost cost = measure(range_count, block_bytes);
      if (first_us == 0) first_us = cost.median_us;
      const double ratio = cost.median_us / first_us;
      is_met = is_met && ratio <= kRatioMax;
      std::printf("%-8s %12zu %12.1f %14.1f %12.1f %10.1f\n",
                  block_bytes == kChunkBytes ? "chunks" : "halves", range_count, cost.median_us,
                  cost.worst_us, cost.driver_calls, ratio);
    }
  }
  std::printf("ratio at most %g: %s\n", kRatioMax, is_met ? "yes" : "no");
  return is_met ? 0 : 1;
}
