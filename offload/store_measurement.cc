#include "forebay/store_measurement.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>

#include "forebay/check.h"
#include "forebay/units.h"
#include "offload/io_engine.h"
#include "offload/scratch_file.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;

// A drive that does not answer for so long is not worth measuring.
constexpr std::chrono::milliseconds kDeadline{30'000};

// How much slower than the fastest a point with less in flight may be. Smaller: noise chooses. Larger:
// bandwidth is given away.
constexpr double kChoiceSlack = 0.05;

constexpr std::size_t kHugePageBytes = 2 << 20;

// Memory that transfers go to and from, in huge pages where the system gives them.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes + kHugePageBytes) {
    mapped_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) return;
    auto* const first = static_cast<std::byte*>(mapped_);
    const std::size_t beyond = reinterpret_cast<std::uintptr_t>(first) % kHugePageBytes;
    data_ = first + (beyond == 0 ? 0 : kHugePageBytes - beyond);
    ::madvise(data_, bytes, MADV_HUGEPAGE);
    std::memset(data_, 0x5A, bytes);  // Not zeros, which some drives store for nothing.
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (mapped_ != MAP_FAILED) ::munmap(mapped_, bytes_);
  }
  // Null when there was no memory.
  std::byte* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* mapped_;
  std::byte* data_ = nullptr;
};

struct Run {
  Store& store;
  StoreRange range;
  std::byte* memory;
  std::size_t block_bytes;
  unsigned depth;
};

// Keeps `depth` blocks in flight, round and round over the first `bytes` of the range, until the time is
// over.
Result<double> rate(const Run& run, StoreDirection direction, std::uint64_t bytes, Clock::duration time,
                    std::uint64_t* moved_bytes) {
  const Clock::time_point begin = Clock::now();
  const std::uint64_t count = bytes / run.block_bytes;
  std::deque<StoreTicket> tickets;
  std::uint64_t submitted = 0;
  Status failed;
  const auto finish_one = [&] {
    const Status status = run.store.wait(tickets.front(), kDeadline);
    tickets.pop_front();
    if (failed.ok()) failed = status;
  };
  while (failed.ok() && (submitted == 0 || Clock::now() - begin < time)) {
    // One for each block of memory: transfers in flight never overlap.
    if (tickets.size() == std::min<std::uint64_t>(run.depth, count)) finish_one();
    const std::uint64_t offset = submitted % count * run.block_bytes;
    const StoreTransfer transfer{direction, run.range, offset, run.memory + offset, run.block_bytes};
    const auto ticket = run.store.submit({&transfer, 1});
    if (!ticket.ok()) {
      failed = ticket.status();
      break;
    }
    tickets.push_back(ticket.value());
    ++submitted;
  }
  while (!tickets.empty()) finish_one();
  if (!failed.ok()) return failed;
  *moved_bytes = submitted * run.block_bytes;
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return static_cast<double>(*moved_bytes) / std::max(seconds, 1e-9);
}

}  // namespace

double StoreMeasurementPoint::pass_bytes_per_second() const {
  if (read_bytes_per_second <= 0 || write_bytes_per_second <= 0) return 0;
  return 1 / (1 / read_bytes_per_second + 1 / write_bytes_per_second);
}

StoreMeasurementPoint choose_point(Span<const StoreMeasurementPoint> points) {
  FOREBAY_CHECK(!points.empty(), "no points to choose from");
  double fastest = 0;
  for (const StoreMeasurementPoint& point : points)
    fastest = std::max(fastest, point.pass_bytes_per_second());
  const StoreMeasurementPoint* chosen = nullptr;
  const auto in_flight = [](const StoreMeasurementPoint& point) { return point.block_bytes * point.depth; };
  for (const StoreMeasurementPoint& point : points) {
    if (point.pass_bytes_per_second() < (1 - kChoiceSlack) * fastest) continue;
    if (chosen == nullptr || in_flight(point) < in_flight(*chosen)) chosen = &point;
  }
  return *chosen;
}

Result<StoreMeasurement> internal::measure_file_store(const FileStoreOptions& options,
                                                      const StoreMeasurementOptions& measured,
                                                      const EngineWrap& wrap) {
  const auto refuse = [](StatusCode code, const std::string& why) {
    return Status(code, "cannot measure a file store: " + why);
  };
  if (measured.block_bytes.empty() || measured.depths.empty()) {
    return refuse(StatusCode::kInvalidArgument,
                  "no block size or no depth was given; give at least one of each");
  }
  const std::size_t largest = *std::max_element(measured.block_bytes.begin(), measured.block_bytes.end());
  if (measured.range_bytes < largest) {
    return refuse(StatusCode::kInvalidArgument, "a range of " + format_bytes(measured.range_bytes) +
                                                    " is smaller than a block of " + format_bytes(largest) +
                                                    "; give a larger range");
  }
  const Buffer buffer(measured.range_bytes);
  if (buffer.data() == nullptr) {
    return refuse(StatusCode::kOutOfMemory,
                  "no " + format_bytes(measured.range_bytes) + " of memory: " + internal::errno_text(errno));
  }
  const Clock::time_point begin = Clock::now();
  const auto share = measured.duration / (2 * measured.block_bytes.size() * measured.depths.size());
  StoreMeasurement result;
  for (const std::size_t block_bytes : measured.block_bytes) {
    for (const unsigned depth : measured.depths) {
      if (!result.points.empty() && Clock::now() - begin > measured.duration) continue;
      FileStoreOptions used = options;
      used.block_bytes = block_bytes;
      used.depth = depth;
      used.transfer_limit = std::max(options.transfer_limit, depth);
      FOREBAY_ASSIGN_OR_RETURN(auto made, make_file_store(used, wrap));
      Store& store = *made;
      FOREBAY_RETURN_IF_ERROR(store.register_memory(buffer.data(), measured.range_bytes));
      FOREBAY_ASSIGN_OR_RETURN(const auto range, store.create_range("measurement", measured.range_bytes));
      const Run run{store, range, buffer.data(), block_bytes, depth};
      std::uint64_t moved_bytes = 0;
      FOREBAY_ASSIGN_OR_RETURN(const auto written, rate(run, StoreDirection::kWrite, measured.range_bytes,
                                                        std::chrono::nanoseconds(share), &moved_bytes));
      // Only written blocks: the others have nothing to read.
      FOREBAY_ASSIGN_OR_RETURN(const auto read,
                               rate(run, StoreDirection::kRead, std::min(moved_bytes, measured.range_bytes),
                                    std::chrono::nanoseconds(share), &moved_bytes));
      result.points.push_back({block_bytes, depth, read, written});
      result.description = store.facts().description;
    }
  }
  result.chosen = choose_point(result.points);
  return result;
}

Result<StoreMeasurement> measure_file_store(const FileStoreOptions& options,
                                            const StoreMeasurementOptions& measured) {
  return internal::measure_file_store(options, measured, {});
}

}  // namespace forebay
