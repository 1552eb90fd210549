// The memory store's scripts: faults, order, and the modelled drive on a virtual clock.
#include "tests/offload/memory_store.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "tests/offload/store_support.h"

namespace forebay {
namespace {

using std::chrono::milliseconds;
using testing::equal;
using testing::fill_pattern;
using testing::kGranule;
using testing::kSoon;
using testing::Memory;
using testing::read_all;
using testing::write_all;

TEST(MemoryStore, FailsTheTransferThatTheScriptNames) {
  const Status broken(StatusCode::kIoError, "as scripted");
  for (std::uint64_t n = 1; n <= 3; ++n) {
    auto store =
        make_memory_store({.granule_bytes = kGranule, .faults = {{StoreDirection::kWrite, n, broken}}})
            .value();
    const StoreRange range = store->create_range("w", 3 * kGranule).value();
    Memory memory(3 * kGranule);
    for (std::uint64_t i = 1; i <= 3; ++i) {
      const Status status = write_all(*store, range, (i - 1) * kGranule, memory.bytes().first(kGranule));
      EXPECT_EQ(status.code(), i == n ? StatusCode::kIoError : StatusCode::kOk);
      EXPECT_EQ(status.message().find("of range 'w'") != std::string::npos, i == n) << status.message();
    }

    // Torn bytes are corrupt until they are written again.
    const Status read = read_all(*store, range, (n - 1) * kGranule, memory.bytes().first(kGranule));
    EXPECT_EQ(read.code(), StatusCode::kCorruption) << read.to_string();
    EXPECT_TRUE(write_all(*store, range, 0, memory.bytes()).ok());
    EXPECT_TRUE(read_all(*store, range, 0, memory.bytes()).ok());
  }
}

TEST(MemoryStore, AWriteThatFailsWholeLeavesWhatWasThere) {
  auto store =
      make_memory_store(
          {.granule_bytes = kGranule,
           .faults = {{StoreDirection::kWrite, 2, Status(StatusCode::kIoError, "as scripted"), false}}})
          .value();
  const StoreRange range = store->create_range("w", kGranule).value();
  Memory first(kGranule);
  fill_pattern(first.bytes(), 1);
  Memory second(kGranule);
  ASSERT_TRUE(write_all(*store, range, 0, first.bytes()).ok());
  ASSERT_FALSE(write_all(*store, range, 0, second.bytes()).ok());

  ASSERT_TRUE(read_all(*store, range, 0, second.bytes()).ok());

  EXPECT_TRUE(equal(first.bytes(), second.bytes()));
}

TEST(MemoryStore, ASeedGivesAnOrderOfItsOwn) {
  const auto order_of = [](std::uint64_t seed) {
    auto store = make_memory_store({.granule_bytes = kGranule, .order_seed = seed}).value();
    const StoreRange range = store->create_range("w", kGranule).value();
    Memory memory(kGranule);
    std::vector<std::pair<std::size_t, StoreTicket>> left;
    for (std::size_t i = 0; i < 8; ++i)
      left.emplace_back(i, store->read(range, 0, memory.data(), kGranule).value());
    std::vector<std::size_t> order;
    while (!left.empty()) {
      for (std::size_t i = 0; i < left.size(); ++i) {
        if (!store->poll(left[i].second).value()) continue;
        order.push_back(left[i].first);
        left.erase(left.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
    return order;
  };

  std::set<std::vector<std::size_t>> orders;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) orders.insert(order_of(seed));

  EXPECT_GE(orders.size(), 3u);
  EXPECT_EQ(order_of(7), order_of(7));
}

TEST(MemoryStore, HasNoMoreRoomThanItWasGiven) {
  auto store = make_memory_store({.capacity_bytes = 1000}).value();
  ASSERT_TRUE(store->create_range("fits", 600).ok());

  EXPECT_EQ(store->create_range("too large", 401).status().code(), StatusCode::kOutOfMemory);

  EXPECT_TRUE(store->create_range("still fits", 400).ok());
}

TEST(MemoryStore, AModelledDriveServesOneTransferAfterTheOther) {
  HostClock clock(HostClock::Mode::kVirtual);
  HostClock::Registration registration(clock);
  registration.adopt();
  auto store = make_memory_store({.granule_bytes = 1000,
                                  .clock = &clock,
                                  .read_bytes_per_second = 1'000'000,  // 1000 bytes in 1 ms.
                                  .write_bytes_per_second = 500'000,
                                  .latency = milliseconds(3)})
                   .value();
  const StoreRange range = store->create_range("w", 10'000).value();
  Memory memory(10'000);
  fill_pattern(memory.bytes(), 1);

  const StoreTicket write = store->write(range, 0, memory.data(), 10'000).value();  // Until 20 ms.
  Memory target(5000);
  const StoreTicket read = store->read(range, 0, target.data(), 5000).value();  // Until 25 ms.

  EXPECT_FALSE(store->poll(write).value());
  const Status late = store->wait(write, milliseconds(22));
  EXPECT_EQ(late.code(), StatusCode::kTimeout);
  EXPECT_EQ(
      late.message(),
      "a transfer was not done within 22 ms; wait for its ticket again, and see whether the drive still "
      "answers");
  EXPECT_EQ(clock.now(), milliseconds(22));
  EXPECT_TRUE(store->wait(write, kSoon).ok());
  EXPECT_EQ(clock.now(), milliseconds(23));
  EXPECT_FALSE(store->poll(read).value());
  EXPECT_EQ(store->wait(read, milliseconds(-1)).code(), StatusCode::kTimeout);
  EXPECT_TRUE(store->wait(read, milliseconds::max()).ok());
  EXPECT_EQ(clock.now(), milliseconds(28));
  EXPECT_TRUE(equal(target.bytes(), memory.bytes().first(5000)));
  // After a rest it begins when it is asked.
  clock.sleep(milliseconds(100));
  EXPECT_TRUE(read_all(*store, range, 0, target.bytes().first(1000)).ok());
  EXPECT_EQ(clock.now(), milliseconds(132));
}

TEST(MemoryStore, RefusesOptionsThatContradictThemselves) {
  HostClock clock;
  const auto code = [](const MemoryStoreOptions& options) {
    return make_memory_store(options).status().code();
  };
  EXPECT_EQ(code({}), StatusCode::kOk);
  EXPECT_EQ(code({.granule_bytes = 0}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.alignment_bytes = 0}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.transfer_limit = 0}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.faults = {{StoreDirection::kRead, 1, Status()}}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.read_bytes_per_second = 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.order_seed = 1, .clock = &clock}), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay
