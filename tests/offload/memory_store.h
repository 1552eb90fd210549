// The memory store: a Store in host memory, for tests. It is the reference for the file store and takes
// scripted faults. It moves bytes as late as it may, so that using memory before its ticket is done shows.
//
// With a HostClock and rates it models a drive that serves one transfer after the other.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "forebay/host_clock.h"
#include "forebay/store.h"

namespace forebay {

namespace testing {
// The granule of most stores in tests.
constexpr std::size_t kGranule = 4096;
}  // namespace testing

// Fails one transfer. Transfers of each direction are counted from 1, in the order of submission.
struct StoreFault {
  StoreDirection direction = StoreDirection::kRead;
  std::uint64_t nth = 0;
  Status status;  // Not ok.
  bool torn =
      true;  // A write: half of the bytes arrive, and reading them is kCorruption. False: none arrive.
};

struct MemoryStoreOptions {
  std::size_t granule_bytes = 64 << 10;
  std::size_t alignment_bytes = 1;  // For facts(). Other memory is counted as bounced.
  unsigned transfer_limit = 256;
  std::uint64_t capacity_bytes = 0;  // For all ranges together; 0: no limit.
  std::uint64_t order_seed = 0;      // Not 0: transfers run in an order drawn from it, one per poll.
  std::vector<StoreFault> faults;

  // The modelled drive. Null: no time passes.
  HostClock* clock = nullptr;
  std::uint64_t read_bytes_per_second = 0;  // 0: as fast as memory.
  std::uint64_t write_bytes_per_second = 0;
  std::chrono::nanoseconds latency{0};  // From the end of a transfer until its ticket can be done.
};

// Requires: the clock outlives the store.
// Errors: kInvalidArgument for a granule, an alignment or a limit of zero, a fault with an ok status, rates
// without a clock, and a clock with a seed.
Result<std::unique_ptr<Store>> make_memory_store(const MemoryStoreOptions& options = {});

}  // namespace forebay
