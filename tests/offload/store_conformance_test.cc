// The conformance suite of Store, on every implementation.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "forebay/file_store.h"
#include "tests/offload/memory_store.h"
#include "tests/offload/store_support.h"
#include "tests/support/process.h"

namespace forebay {
namespace {

using testing::choose_seed;
using testing::equal;
using testing::fill_pattern;
using testing::kPage;
using testing::kSoon;
using testing::Memory;
using testing::read_all;
using testing::TemporaryDirectory;
using testing::write_all;

constexpr std::size_t kGranule = 4096;
constexpr std::size_t kBlock = 4 * kGranule;
constexpr unsigned kLimit = 24;

struct Directories {
  TemporaryDirectory first;
  TemporaryDirectory second;
  TemporaryDirectory third;
};

struct Kind {
  std::string name;
  std::function<Result<std::unique_ptr<Store>>(const Directories&)> make;

  friend void PrintTo(const Kind& kind, std::ostream* stream) { *stream << kind.name; }
};

Kind memory_kind(const std::string& name, std::uint64_t order_seed) {
  return {name, [order_seed](const Directories&) {
            return make_memory_store({.granule_bytes = kGranule,
                                      .alignment_bytes = kPage,
                                      .transfer_limit = kLimit,
                                      .order_seed = order_seed});
          }};
}

Kind file_kind(const std::string& name,
               const std::function<void(FileStoreOptions&, const Directories&)>& change) {
  return {name, [change](const Directories& directories) {
            FileStoreOptions options;
            options.directories = {directories.first.path()};
            options.block_bytes = kBlock;
            options.depth = 4;
            options.thread_count = 3;
            options.granule_bytes = kGranule;
            options.transfer_limit = kLimit;
            options.bounce_count = 2;
            change(options, directories);
            return make_file_store(options);
          }};
}

void three_directories(FileStoreOptions& options, const Directories& directories) {
  options.directories = {directories.first.path(), directories.second.path(), directories.third.path()};
  options.stripe_bytes = 3 * kGranule;
}

std::vector<Kind> kinds() {
  using Options = FileStoreOptions;
  using D = Directories;
  return {
      memory_kind("Memory", 0),
      memory_kind("MemoryInAnyOrder", 20261121),
      file_kind("Threads", [](Options& options, const D&) { options.engine = FileEngine::kThreads; }),
      file_kind("ThreadsThroughThePageCache",
                [](Options& options, const D&) {
                  options.engine = FileEngine::kThreads;
                  options.direct = false;
                }),
      file_kind("ThreadsInThreeDirectories",
                [](Options& options, const D& directories) {
                  options.engine = FileEngine::kThreads;
                  three_directories(options, directories);
                }),
      file_kind("IoUring", [](Options& options, const D&) { options.engine = FileEngine::kIoUring; }),
      file_kind("IoUringUnregistered",
                [](Options& options, const D&) {
                  options.engine = FileEngine::kIoUring;
                  options.registered = false;
                  options.checksums = false;
                }),
      file_kind("IoUringThroughThePageCache",
                [](Options& options, const D&) {
                  options.engine = FileEngine::kIoUring;
                  options.direct = false;
                }),
      file_kind("IoUringInThreeDirectories",
                [](Options& options, const D& directories) {
                  options.engine = FileEngine::kIoUring;
                  three_directories(options, directories);
                }),
      file_kind("IoUringOneAtATime",
                [](Options& options, const D&) {
                  options.engine = FileEngine::kIoUring;
                  options.depth = 1;
                  options.bounce_count = 1;
                }),
  };
}

class StoreConformance : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    auto made = GetParam().make(directories_);
    if (!made.ok() && made.status().code() == StatusCode::kUnavailable)
      GTEST_SKIP() << made.status().message();
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    store_ = std::move(made).value();
  }

  StoreRange make_range(const std::string& name, std::uint64_t bytes) {
    auto range = store_->create_range(name, bytes);
    EXPECT_TRUE(range.ok()) << range.status().to_string();
    return range.ok() ? range.value() : StoreRange{};
  }

  Directories directories_;
  std::unique_ptr<Store> store_;
};

TEST_P(StoreConformance, GivesBackWhatWasWrittenAtEveryEdgeSize) {
  const std::size_t sizes[] = {
      0,          1,      511,        512,        kGranule - 1,     kGranule, kGranule + 1,
      kBlock - 1, kBlock, kBlock + 1, 3 * kBlock, 7 * kBlock + 4095};
  for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{512}}) {
    std::vector<StoreRange> ranges;
    for (const std::size_t size : sizes) {
      ranges.push_back(make_range("r" + std::to_string(size) + "+" + std::to_string(shift), size));
      Memory source(size, shift);
      fill_pattern(source.bytes(), size + shift);

      ASSERT_TRUE(write_all(*store_, ranges.back(), 0, source.bytes()).ok());
    }

    for (std::size_t i = 0; i < ranges.size(); ++i) {
      Memory expected(sizes[i]);
      fill_pattern(expected.bytes(), sizes[i] + shift);
      // A row of bytes behind it must stay as it is.
      Memory target(sizes[i] + 64, shift);

      const Status status = read_all(*store_, ranges[i], 0, target.bytes().first(sizes[i]));

      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_TRUE(equal(target.bytes().first(sizes[i]), expected.bytes())) << sizes[i] << " bytes";
      for (const std::byte byte : target.bytes().subspan(sizes[i])) ASSERT_EQ(byte, std::byte{0xEE});
    }
  }
}

TEST_P(StoreConformance, ReadsZerosWhereNothingWasWritten) {
  const StoreRange range = make_range("w", 3 * kBlock + 17);
  Memory granule(kGranule);
  fill_pattern(granule.bytes(), 1);
  ASSERT_TRUE(write_all(*store_, range, kBlock, granule.bytes()).ok());

  Memory all(3 * kBlock + 17);
  ASSERT_TRUE(read_all(*store_, range, 0, all.bytes()).ok());

  Memory expected(all.size());
  std::fill(expected.bytes().begin(), expected.bytes().end(), std::byte{0});
  std::copy(granule.bytes().begin(), granule.bytes().end(), expected.bytes().begin() + kBlock);
  EXPECT_TRUE(equal(all.bytes(), expected.bytes()));
}

// Random batches on several ranges, many in flight, collected in any order, against plain arrays.
TEST_P(StoreConformance, AgreesWithAModelUnderRandomTransfers) {
  const std::uint64_t seed = choose_seed();
  SCOPED_TRACE("FOREBAY_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };

  struct Model {
    StoreRange range;
    std::vector<std::byte> bytes;
    std::vector<char> busy;  // By granule: in flight.
  };
  std::deque<Model> models;
  const std::size_t sizes[] = {1, kGranule, 5 * kBlock, 2 * kBlock + 100, 40 * kGranule + 1, kBlock - 1};
  for (const std::size_t size : sizes) {
    Model& model = models.emplace_back();
    model.range = make_range("model" + std::to_string(size), size);
    model.bytes.resize(size);
    model.busy.resize((size + kGranule - 1) / kGranule);
  }
  struct Part {
    Model* model;
    StoreTransfer transfer;
    Memory memory;
  };
  struct Pending {
    StoreTicket ticket;
    std::vector<Part> parts;
  };
  std::vector<Pending> pending;
  std::size_t in_flight = 0;

  const auto collect = [&](std::size_t index, bool polled) {
    Pending& batch = pending[index];
    if (polled) {
      const auto done = store_->poll(batch.ticket);
      ASSERT_TRUE(done.ok()) << done.status().to_string();
      if (!done.value()) return;
    } else {
      const Status status = store_->wait(batch.ticket, kSoon);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    for (Part& part : batch.parts) {
      const std::span<std::byte> place =
          std::span(part.model->bytes).subspan(part.transfer.offset, part.transfer.bytes);
      if (part.transfer.direction == StoreDirection::kWrite) {
        std::copy(part.memory.bytes().begin(), part.memory.bytes().end(), place.begin());
      } else {
        EXPECT_TRUE(equal(part.memory.bytes(), place));
      }
      for (std::size_t g = part.transfer.offset / kGranule;
           g * kGranule < part.transfer.offset + part.transfer.bytes; ++g) {
        part.model->busy[g] = 0;
      }
    }
    in_flight -= batch.parts.size();
    pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(index));
  };

  for (int i = 0; i < 600 && !HasFatalFailure(); ++i) {
    Pending batch;
    std::vector<StoreTransfer> transfers;
    const std::size_t wished = 1 + below(4);
    for (std::size_t j = 0; j < wished; ++j) {
      Model& model = models[below(models.size())];
      const std::size_t first = below(model.busy.size());
      std::size_t end = std::min(model.busy.size(), first + 1 + below(9));
      for (std::size_t g = first; g < end; ++g) {
        if (model.busy[g] != 0) end = g;
      }
      const std::size_t offset = first * kGranule;
      const std::size_t bytes =
          std::min(end * kGranule, model.bytes.size()) - std::min(offset, end * kGranule);
      Part part{&model, {}, Memory(bytes, below(3) == 0 ? below(kPage) : 0)};
      part.transfer = {below(2) == 0 ? StoreDirection::kRead : StoreDirection::kWrite, model.range, offset,
                       part.memory.data(), bytes};
      if (part.transfer.direction == StoreDirection::kWrite) fill_pattern(part.memory.bytes(), random());
      std::fill(model.busy.begin() + static_cast<std::ptrdiff_t>(first),
                model.busy.begin() + static_cast<std::ptrdiff_t>(std::max(first, end)), 1);
      transfers.push_back(part.transfer);
      batch.parts.push_back(std::move(part));
    }
    while (in_flight + transfers.size() > kLimit && !HasFatalFailure()) collect(below(pending.size()), false);
    const auto ticket = store_->submit(transfers);
    ASSERT_TRUE(ticket.ok()) << ticket.status().to_string();
    batch.ticket = ticket.value();
    in_flight += transfers.size();
    pending.push_back(std::move(batch));
    if (below(2) == 0 && !pending.empty()) collect(below(pending.size()), true);
  }
  while (!pending.empty() && !HasFatalFailure()) collect(below(pending.size()), false);

  for (const Model& model : models) {
    Memory all(model.bytes.size());
    ASSERT_TRUE(read_all(*store_, model.range, 0, all.bytes()).ok());
    EXPECT_TRUE(equal(all.bytes(), model.bytes));
  }
  EXPECT_EQ(store_->statistics().transfers_in_flight, 0u);
}

TEST_P(StoreConformance, CollectsTicketsInAnyOrder) {
  const StoreRange range = make_range("w", kLimit * kBlock);
  Memory source(kLimit * kBlock);
  Memory target(kLimit * kBlock);
  fill_pattern(source.bytes(), 3);
  std::vector<StoreTicket> tickets;
  for (std::size_t i = 0; i < kLimit; ++i) {
    tickets.push_back(store_->write(range, i * kBlock, source.data() + i * kBlock, kBlock).value());
  }
  std::reverse(tickets.begin(), tickets.end());
  for (const StoreTicket ticket : tickets) ASSERT_TRUE(store_->wait(ticket, kSoon).ok());

  tickets.clear();
  for (std::size_t i = 0; i < kLimit; ++i) {
    tickets.push_back(store_->read(range, i * kBlock, target.data() + i * kBlock, kBlock).value());
  }
  // All by polling, in any order.
  while (!tickets.empty()) {
    for (std::size_t i = tickets.size(); i-- > 0;) {
      const auto done = store_->poll(tickets[i]);
      ASSERT_TRUE(done.ok()) << done.status().to_string();
      if (done.value()) tickets.erase(tickets.begin() + static_cast<std::ptrdiff_t>(i));
    }
    std::this_thread::yield();
  }

  EXPECT_TRUE(equal(source.bytes(), target.bytes()));
}

TEST_P(StoreConformance, RefusesWhatExceedsTheLimitAndLosesNothing) {
  const StoreRange range = make_range("w", kBlock);
  Memory memory(kLimit * kGranule);
  std::vector<StoreTicket> tickets;
  for (unsigned i = 0; i < kLimit; ++i)
    tickets.push_back(store_->read(range, 0, memory.data() + i * kGranule, kGranule).value());

  const auto refused = store_->read(range, 0, memory.data(), kGranule);
  EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable) << refused.status().to_string();
  EXPECT_EQ(store_->statistics().refused_count, 1u);
  EXPECT_EQ(store_->statistics().transfers_in_flight, kLimit);
  const std::vector<StoreTransfer> many(kLimit + 1,
                                        {StoreDirection::kRead, range, 0, memory.data(), kGranule});
  EXPECT_EQ(store_->submit(many).status().code(), StatusCode::kInvalidArgument);

  ASSERT_TRUE(store_->wait(tickets.front(), kSoon).ok());
  const auto accepted = store_->read(range, 0, memory.data(), kGranule);
  ASSERT_TRUE(accepted.ok());
  tickets.front() = accepted.value();
  for (const StoreTicket ticket : tickets) EXPECT_TRUE(store_->wait(ticket, kSoon).ok());
  EXPECT_EQ(store_->statistics().most_transfers_in_flight, kLimit);
}

TEST_P(StoreConformance, RefusesWhatCannotBeTransferred) {
  const StoreRange range = make_range("w", 2 * kGranule + 10);
  Memory memory(4 * kGranule);
  const auto code = [&](std::uint64_t offset, std::size_t bytes, StoreRange which, std::byte* target) {
    const auto ticket = store_->read(which, offset, target, bytes);
    return ticket.ok() ? store_->wait(ticket.value(), kSoon).code() : ticket.status().code();
  };
  std::byte* const target = memory.data();

  EXPECT_EQ(code(0, 2 * kGranule + 10, range, target), StatusCode::kOk);
  EXPECT_EQ(code(2 * kGranule, 10, range, target), StatusCode::kOk);
  EXPECT_EQ(code(kGranule, kGranule, range, target), StatusCode::kOk);
  EXPECT_EQ(code(0, 0, range, nullptr), StatusCode::kOk);
  EXPECT_EQ(code(2 * kGranule + 10, 0, range, target), StatusCode::kOk);
  EXPECT_EQ(code(0, 2 * kGranule + 11, range, target), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(3 * kGranule, 1, range, target), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(UINT64_MAX - 1, 4, range, target), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, 10, range, target), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, kGranule + 512, range, target), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(512, kGranule, range, target), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, kGranule, StoreRange{7}, target), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, kGranule, StoreRange{}, target), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, kGranule, range, nullptr), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->submit({}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->register_memory(nullptr, 4096).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->statistics().transfers_in_flight, 0u);
}

TEST_P(StoreConformance, SaysWhyItRefuses) {
  const StoreRange range = make_range("w", 2 * kGranule + 10);
  Memory memory(4 * kGranule);
  std::byte* const target = memory.data();
  struct Case {
    StoreTransfer transfer;
    std::string message;
  };
  const auto read = StoreDirection::kRead;
  const auto write = StoreDirection::kWrite;
  for (const Case& one : std::vector<Case>{
           {{read, range, kGranule, target, 2 * kGranule},
            "cannot read 8192 bytes at 4096 of range 'w': the range has 8202 bytes; stay within them"},
           {{write, range, 0, target, 10},
            "cannot write 10 bytes at 0 of range 'w': transfers are of whole granules of 4096 bytes, or end "
            "with the range; change offset or bytes"},
           {{write, range, 0, nullptr, kGranule},
            "cannot write 4096 bytes at 0 of range 'w': the memory is null; give an address"},
           {{read, StoreRange{7}, 0, target, kGranule},
            "no range has the index 7; the store has 1, from create_range"}}) {
    EXPECT_EQ(store_->submit({&one.transfer, 1}).status().message(), one.message);
  }
  EXPECT_EQ(store_->submit({}).status().message(), "cannot submit an empty batch; leave it out");
  EXPECT_EQ(store_->poll(StoreTicket{4711}).status().message(),
            "no ticket has the id 4711; a ticket is spent when it has been found done or failed");

  std::vector<StoreTransfer> many(kLimit + 1, {read, range, 0, target, kGranule});
  EXPECT_EQ(store_->submit(many).status().message(),
            "cannot submit 25 transfers at once: at most 24 may be in flight; split the batch or raise "
            "transfer_limit");
  EXPECT_EQ(store_->statistics().refused_count, 0u);
  many.resize(kLimit - 1, {});
  const auto ticket = store_->submit(many);
  ASSERT_TRUE(ticket.ok()) << ticket.status().to_string();
  EXPECT_EQ(store_->submit(std::span(many).first(3)).status().message(),
            "cannot submit 3 transfers: 23 of 24 are in flight; wait for a ticket first");
  EXPECT_EQ(store_->statistics().refused_count, 1u);
  ASSERT_TRUE(store_->wait(ticket.value(), kSoon).ok());
}

TEST_P(StoreConformance, BeginsNothingOfABatchWithAMistake) {
  const StoreRange range = make_range("w", 2 * kGranule);
  Memory source(kGranule);
  fill_pattern(source.bytes(), 4);
  const StoreTransfer batch[] = {{StoreDirection::kWrite, range, 0, source.data(), kGranule},
                                 {StoreDirection::kWrite, range, 1, source.data(), kGranule}};

  const auto refused = store_->submit(batch);

  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("'w'"), std::string::npos) << refused.status().message();
  Memory target(kGranule);
  ASSERT_TRUE(read_all(*store_, range, 0, target.bytes()).ok());
  for (const std::byte byte : target.bytes()) ASSERT_EQ(byte, std::byte{0});
}

TEST_P(StoreConformance, SpendsATicketOnce) {
  const StoreRange range = make_range("w", kGranule);
  Memory memory(kGranule);
  const StoreTicket ticket = store_->read(range, 0, memory.data(), kGranule).value();

  EXPECT_TRUE(store_->wait(ticket, kSoon).ok());

  EXPECT_EQ(store_->wait(ticket, kSoon).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->poll(ticket).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->poll(StoreTicket{}).status().code(), StatusCode::kInvalidArgument);
  // Its place taken by another, it is still spent.
  const StoreTicket next = store_->read(range, 0, memory.data(), kGranule).value();
  EXPECT_EQ(store_->poll(ticket).status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(store_->wait(next, kSoon).ok());
}

TEST_P(StoreConformance, AWaitThatTimesOutKeepsTheTicket) {
  const StoreRange range = make_range("w", 64 * kBlock);
  Memory memory(64 * kBlock);
  fill_pattern(memory.bytes(), 5);
  const StoreTicket ticket = store_->write(range, 0, memory.data(), memory.size()).value();

  const Status first = store_->wait(ticket, std::chrono::milliseconds(0));

  if (!first.ok()) {
    ASSERT_EQ(first.code(), StatusCode::kTimeout) << first.to_string();
    EXPECT_TRUE(store_->wait(ticket, std::chrono::milliseconds::max()).ok());
  }
  Memory target(memory.size());
  ASSERT_TRUE(read_all(*store_, range, 0, target.bytes()).ok());
  EXPECT_TRUE(equal(target.bytes(), memory.bytes()));
}

TEST_P(StoreConformance, NamesAreNewAndNotEmpty) {
  make_range("w", 10);

  EXPECT_EQ(store_->create_range("w", 10).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->create_range("", 10).status().code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(store_->create_range("more than there can be", UINT64_MAX - 5).ok());
  EXPECT_FALSE(store_->create_range("more than a file can be", std::uint64_t{1} << 62).ok());

  // A refused range leaves the store as it was.
  const StoreRange next = make_range("x", kGranule);
  Memory memory(kGranule);
  fill_pattern(memory.bytes(), 6);
  ASSERT_TRUE(write_all(*store_, next, 0, memory.bytes()).ok());
  EXPECT_EQ(store_->statistics().range_bytes, 10 + kGranule);
}

TEST_P(StoreConformance, RangesCanBeMadeWhileTransfersAreInFlight) {
  const StoreRange first = make_range("first", 8 * kBlock);
  Memory source(8 * kBlock);
  fill_pattern(source.bytes(), 7);
  const StoreTicket ticket = store_->write(first, 0, source.data(), source.size()).value();

  std::vector<StoreRange> others;
  for (int i = 0; i < 50; ++i) others.push_back(make_range("other" + std::to_string(i), kBlock + 1));

  ASSERT_TRUE(store_->wait(ticket, kSoon).ok());
  Memory target(8 * kBlock);
  ASSERT_TRUE(read_all(*store_, first, 0, target.bytes()).ok());
  EXPECT_TRUE(equal(source.bytes(), target.bytes()));
}

TEST_P(StoreConformance, RegisteredMemoryIsUsedAsOther) {
  Memory memory(16 * kBlock);
  ASSERT_TRUE(store_->register_memory(memory.data(), 8 * kBlock).ok());
  ASSERT_TRUE(store_->register_memory(memory.data() + 8 * kBlock, 8 * kBlock).ok());
  const StoreRange range = make_range("w", 8 * kBlock);
  fill_pattern(memory.bytes().first(8 * kBlock), 8);

  ASSERT_TRUE(write_all(*store_, range, 0, memory.bytes().first(8 * kBlock)).ok());
  ASSERT_TRUE(read_all(*store_, range, 0, memory.bytes().subspan(8 * kBlock)).ok());

  EXPECT_TRUE(equal(memory.bytes().first(8 * kBlock), memory.bytes().subspan(8 * kBlock)));
  EXPECT_LE(store_->facts().registered_bytes, memory.size());
  const StoreTicket ticket = store_->read(range, 0, memory.data(), kGranule).value();
  store_->wait(ticket, kSoon).ok();
  store_.reset();
}

TEST_P(StoreConformance, MemoryMayBeRegisteredInPart) {
  Memory memory(16 * kBlock);
  ASSERT_TRUE(store_->register_memory(memory.data(), 5 * kBlock / 2).ok());
  const StoreRange range = make_range("w", 8 * kBlock);
  fill_pattern(memory.bytes().first(8 * kBlock), 9);

  const Status written = write_all(*store_, range, 0, memory.bytes().first(8 * kBlock));
  const Status read = read_all(*store_, range, 0, memory.bytes().subspan(8 * kBlock));

  ASSERT_TRUE(written.ok()) << written.to_string();
  ASSERT_TRUE(read.ok()) << read.to_string();
  EXPECT_TRUE(equal(memory.bytes().first(8 * kBlock), memory.bytes().subspan(8 * kBlock)));
}

TEST_P(StoreConformance, CountsBytesAndOperations) {
  const StoreRange range = make_range("w", 3 * kBlock + 1);
  Memory memory(3 * kBlock + 1);

  ASSERT_TRUE(write_all(*store_, range, 0, memory.bytes()).ok());
  ASSERT_TRUE(read_all(*store_, range, 0, memory.bytes()).ok());
  ASSERT_TRUE(read_all(*store_, range, 0, memory.bytes().first(kBlock)).ok());

  const StoreStatistics statistics = store_->statistics();
  EXPECT_EQ(statistics.written_bytes, 3 * kBlock + 1);
  EXPECT_EQ(statistics.read_bytes, 4 * kBlock + 1);
  EXPECT_GE(statistics.write_count, 1u);
  EXPECT_GE(statistics.read_count, 2u);
  EXPECT_EQ(statistics.range_bytes, 3 * kBlock + 1);
  EXPECT_EQ(statistics.failed_count, 0u);
  EXPECT_EQ(statistics.transfers_in_flight, 0u);
  EXPECT_FALSE(store_->facts().description.empty());
}

TEST_P(StoreConformance, EndsWithWorkInFlightAndLeavesTheMemoryAlone) {
  for (int round = 0; round < 5; ++round) {
    auto made = GetParam().make(directories_);
    ASSERT_TRUE(made.ok());
    std::unique_ptr<Store> store = std::move(made).value();
    const StoreRange range = store->create_range("w", 16 * kBlock).value();
    auto memory = std::make_unique<Memory>(16 * kBlock, round % 2 == 0 ? 0 : 24);
    for (std::size_t i = 0; i < 16; ++i) {
      const auto direction = i % 2 == 0 ? StoreDirection::kRead : StoreDirection::kWrite;
      const StoreTransfer transfer{direction, range, i * kBlock, memory->data() + i * kBlock, kBlock};
      ASSERT_TRUE(store->submit({&transfer, 1}).ok());
    }

    store.reset();

    // A late write to it would show in the comparison, or to a sanitizer.
    fill_pattern(memory->bytes(), 9);
    Memory same(16 * kBlock);
    fill_pattern(same.bytes(), 9);
    EXPECT_TRUE(equal(memory->bytes(), same.bytes()));
    memory.reset();
  }
}

TEST_P(StoreConformance, LeavesNoDescriptorsThreadsOrFilesBehind) {
  store_.reset();
  const auto cycle = [&] {
    auto store = GetParam().make(directories_).value();
    const StoreRange range = store->create_range("w", 4 * kBlock).value();
    Memory memory(4 * kBlock, 8);
    EXPECT_TRUE(write_all(*store, range, 0, memory.bytes()).ok());
    EXPECT_TRUE(read_all(*store, range, 0, memory.bytes()).ok());
  };
  cycle();
  const std::size_t descriptors = testing::count_entries("/proc/self/fd");

  for (int i = 0; i < 20; ++i) cycle();

  EXPECT_EQ(testing::count_entries("/proc/self/fd"), descriptors);
  // "." and "..".
  EXPECT_EQ(testing::count_entries(directories_.first.path().c_str()), 2u);
  EXPECT_EQ(testing::count_entries(directories_.third.path().c_str()), 2u);
}

TEST_P(StoreConformance, ServesSeveralThreads) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 40;
  std::vector<StoreRange> ranges;
  for (int i = 0; i < kThreads; ++i) ranges.push_back(make_range("thread" + std::to_string(i), 6 * kBlock));
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      Memory source(6 * kBlock, i == 0 ? 40 : 0);
      Memory target(6 * kBlock);
      const StoreRange range = ranges[static_cast<std::size_t>(i)];
      for (int round = 0; round < kRounds; ++round) {
        fill_pattern(source.bytes(), static_cast<std::uint64_t>(i * kRounds + round));
        const StoreTransfer halves[] = {
            {StoreDirection::kWrite, range, 0, source.data(), 3 * kBlock},
            {StoreDirection::kWrite, range, 3 * kBlock, source.data() + 3 * kBlock, 3 * kBlock}};
        const auto written = store_->submit(halves);
        ASSERT_TRUE(written.ok()) << written.status().to_string();
        ASSERT_TRUE(store_->wait(written.value(), kSoon).ok());
        const auto read = store_->read(range, 0, target.data(), target.size());
        ASSERT_TRUE(read.ok());
        if (round % 2 == 0) {
          ASSERT_TRUE(store_->wait(read.value(), kSoon).ok());
        } else {
          for (auto done = store_->poll(read.value()); !done.value(); done = store_->poll(read.value())) {
            std::this_thread::yield();
          }
        }
        ASSERT_TRUE(equal(source.bytes(), target.bytes())) << "thread " << i << ", round " << round;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreConformance, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace forebay
