// The file store beside a drive that fails: operations that do not succeed, stop short or are interrupted,
// and bytes that come back changed.
#include "forebay/file_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "offload/io_engine.h"
#include "offload/say_once.h"
#include "offload/scratch_file.h"
#include "tests/offload/store_support.h"
#include "tests/support/process.h"
#include "tests/support/thread_limit.h"

namespace forebay {
namespace {

using internal::IoEngine;
using internal::IoRequest;
using internal::IoResult;
using testing::equal;
using testing::fill_pattern;
using testing::kSoon;
using testing::Memory;
using testing::read_all;
using testing::TemporaryDirectory;
using testing::write_all;

constexpr std::size_t kGranule = 4096;
constexpr std::size_t kBlock = 4 * kGranule;

// The fate of one operation of the drive.
struct Fault {
  int error = 0;           // The errno it fails with.
  bool at_submit = false;  // Already when it is handed over.
  bool half_done = false;  // Half of it is performed before it fails.
  std::int32_t lost = 0;   // Bytes it comes back short by; INT32_MAX: all.
};

// Operations that this thread has handed to an engine.
thread_local std::uint64_t submitted_here = 0;

// While not null, this thread hands an operation over only when all before it have been taken back.
struct Hold {
  std::atomic<bool> begun{false};
  std::atomic<bool> over{false};  // Nobody takes them back any more.
};
thread_local Hold* hold_here = nullptr;

// The n-th operation meets a fault; the rest go to the engine inside.
class FaultyEngine final : public IoEngine {
 public:
  struct Script {
    std::uint64_t first = 0;  // From the first-th operation on, counted from 1; 0: none.
    std::uint64_t count = 1;
    Fault fault;
    std::uint64_t submitted = 0;
    std::atomic<int> most_in_flight{0};
  };

  FaultyEngine(std::unique_ptr<IoEngine> inner, Script& script) : inner_(std::move(inner)), script_(script) {}

  ~FaultyEngine() override { EXPECT_EQ(in_flight_, 0) << "the store ended before its drive was done"; }

  int submit(const IoRequest& request) override {
    ++submitted_here;
    if (hold_here != nullptr) {
      while (in_flight_ > 0 && !hold_here->over) std::this_thread::yield();
      hold_here->begun = true;
    }
    const int error = submit_faulty(request);
    // One thread at a time submits.
    if (error == 0) script_.most_in_flight = std::max(script_.most_in_flight.load(), ++in_flight_);
    return error;
  }

  std::size_t reap(std::span<IoResult> results, std::chrono::nanoseconds timeout) override {
    const std::size_t count = reap_faulty(results, timeout);
    in_flight_ -= static_cast<int>(count);
    return count;
  }

  std::uint64_t register_memory(std::byte* memory, std::size_t bytes) override {
    return inner_->register_memory(memory, bytes);
  }
  std::string description() const override { return "faulty " + inner_->description(); }

 private:
  int submit_faulty(const IoRequest& request) {
    {
      const std::lock_guard lock(mutex_);
      const std::uint64_t nth = ++script_.submitted;
      if (script_.first != 0 && nth >= script_.first && nth - script_.first < script_.count) {
        const Fault& fault = script_.fault;
        if (fault.at_submit) return fault.error;
        if (fault.error != 0 && !fault.half_done) {
          failed_.push_back({request.tag, -fault.error});
          return 0;
        }
        altered_.push_back(request.tag);
        if (fault.half_done) {
          IoRequest half = request;
          half.bytes = std::max<std::uint32_t>(kGranule, request.bytes / 2 / kGranule * kGranule);
          return inner_->submit(half);
        }
      }
    }
    return inner_->submit(request);
  }

  std::size_t reap_faulty(std::span<IoResult> results, std::chrono::nanoseconds timeout) {
    {
      const std::lock_guard lock(mutex_);
      if (!failed_.empty()) {
        results[0] = failed_.front();
        failed_.pop_front();
        return 1;
      }
    }
    const std::size_t count = inner_->reap(results, timeout);
    const std::lock_guard lock(mutex_);
    for (IoResult& result : results.first(count)) {
      const auto altered = std::find(altered_.begin(), altered_.end(), result.tag);
      if (altered == altered_.end()) continue;
      altered_.erase(altered);
      result.result = script_.fault.error != 0
                          ? -script_.fault.error
                          : std::max<std::int32_t>(0, result.result - script_.fault.lost);
    }
    return count;
  }

  const std::unique_ptr<IoEngine> inner_;
  std::atomic<int> in_flight_{0};
  std::mutex mutex_;
  Script& script_;
  std::deque<IoResult> failed_;
  std::vector<std::uint64_t> altered_;
};

class FileStore : public ::testing::TestWithParam<FileEngine> {
 protected:
  FileStore() {
    options_.directories = {directory_.path(), other_directory_.path()};
    options_.engine = GetParam();
    options_.block_bytes = kBlock;
    options_.granule_bytes = kGranule;
    options_.depth = 4;
    options_.thread_count = 2;
    options_.bounce_count = 2;
  }
  void SetUp() override {
    const auto made = make_file_store(options_);
    if (!made.ok() && made.status().code() == StatusCode::kUnavailable)
      GTEST_SKIP() << made.status().message();
    ASSERT_TRUE(made.ok()) << made.status().to_string();
  }

  std::unique_ptr<Store> make(FaultyEngine::Script& script) {
    return internal::make_file_store(options_,
                                     [&](std::unique_ptr<IoEngine> engine) {
                                       return std::make_unique<FaultyEngine>(std::move(engine), script);
                                     })
        .value();
  }

  TemporaryDirectory directory_;
  TemporaryDirectory other_directory_;
  FileStoreOptions options_;
};

constexpr std::size_t kRangeBytes = 5 * kBlock + 100;  // Its end is bounced.

// Two ranges, written, one rewritten, both read. Returns the failures, in order.
struct Outcome {
  std::vector<Status> failures;
  bool exact = true;  // Bytes read without an error are those last written without one.
  StoreStatistics statistics;
};

Outcome play(Store& store) {
  Outcome outcome;
  struct Kept {
    StoreRange range;
    Memory bytes{kRangeBytes};
    bool known = true;  // Every write went well, or the last one did over all of it.
  };
  std::vector<Kept> kept(2);
  for (std::size_t i = 0; i < 2; ++i)
    kept[i].range = store.create_range(i == 0 ? "first" : "second", kRangeBytes).value();
  const auto write = [&](Kept& one, std::uint64_t salt) {
    Memory source(kRangeBytes, salt % 2 == 0 ? 0 : 8);
    fill_pattern(source.bytes(), salt);
    const Status status = write_all(store, one.range, 0, source.bytes());
    one.known = status.ok();
    if (!status.ok()) outcome.failures.push_back(status);
    fill_pattern(one.bytes.bytes(), salt);
  };
  const auto read = [&](Kept& one) {
    Memory target(kRangeBytes);
    const Status status = read_all(store, one.range, 0, target.bytes());
    if (!status.ok()) {
      outcome.failures.push_back(status);
    } else if (one.known && !equal(target.bytes(), one.bytes.bytes())) {
      outcome.exact = false;
    }
  };
  write(kept[0], 2);
  write(kept[1], 3);
  read(kept[0]);
  read(kept[1]);
  write(kept[0], 4);
  read(kept[0]);
  read(kept[1]);
  // After any earlier failure, newly written bytes are there.
  write(kept[0], 6);
  write(kept[1], 8);
  read(kept[0]);
  read(kept[1]);
  outcome.statistics = store.statistics();
  return outcome;
}

TEST_P(FileStore, ReportsTheFailureOfAnyOperationAndGoesOn) {
  FaultyEngine::Script quiet;
  EXPECT_TRUE(play(*make(quiet)).failures.empty());
  const std::uint64_t count = quiet.submitted;
  ASSERT_GT(count, 40u);
  for (const Fault& fault : {Fault{.error = EIO}, Fault{.error = EIO, .half_done = true},
                             Fault{.error = ENOSPC}, Fault{.error = EIO, .at_submit = true}}) {
    // Every operation fails once in the plain way, every third in the others.
    const std::uint64_t step = fault.error == EIO && !fault.half_done && !fault.at_submit ? 1 : 3;
    for (std::uint64_t n = 1; n <= count; n += step) {
      FaultyEngine::Script script{.first = n, .fault = fault};
      auto store = make(script);

      const Outcome outcome = play(*store);

      ASSERT_FALSE(outcome.failures.empty()) << "operation " << n;
      const Status& first = outcome.failures.front();
      EXPECT_EQ(first.code(), StatusCode::kIoError) << first.to_string();
      for (const char* part : {" bytes at ", " of range '", ", in '", "(errno "}) {
        EXPECT_NE(first.message().find(part), std::string::npos) << part << ": " << first.to_string();
      }
      // Afterwards only readers of the range of the failed write may fail, and they know why.
      for (std::size_t i = 1; i < outcome.failures.size(); ++i) {
        EXPECT_EQ(outcome.failures[i].code(), StatusCode::kCorruption) << outcome.failures[i].to_string();
      }
      EXPECT_TRUE(outcome.exact) << "operation " << n;
      EXPECT_EQ(outcome.statistics.transfers_in_flight, 0u);
      EXPECT_EQ(outcome.statistics.failed_count, outcome.failures.size());
    }
  }
}

TEST_P(FileStore, TakesUpWhatCameBackShortOrInterrupted) {
  FaultyEngine::Script quiet;
  play(*make(quiet));
  for (const Fault& fault : {Fault{.lost = kGranule}, Fault{.lost = 1}, Fault{.lost = INT32_MAX},
                             Fault{.error = EINTR}, Fault{.error = EAGAIN}, Fault{.error = EBUSY},
                             Fault{.error = ECANCELED}, Fault{.error = EAGAIN, .at_submit = true}}) {
    for (std::uint64_t n = 1; n <= quiet.submitted; n += 3) {
      FaultyEngine::Script script{.first = n, .count = 3, .fault = fault};
      auto store = make(script);

      const Outcome outcome = play(*store);

      EXPECT_TRUE(outcome.failures.empty()) << outcome.failures.front().to_string();
      EXPECT_TRUE(outcome.exact) << "operation " << n;
      EXPECT_EQ(outcome.statistics.continued_count, std::min<std::uint64_t>(3, script.submitted - n + 1));
    }
  }
}

// Nobody else takes the results from the drive.
TEST_P(FileStore, AWaitOfNoTimeIsAPoll) {
  FaultyEngine::Script quiet;
  auto store = make(quiet);
  const StoreRange range = store->create_range("w", kBlock).value();
  Memory memory(kBlock);
  const StoreTicket ticket = store->write(range, 0, memory.bytes().data(), kBlock).value();

  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  Status status(StatusCode::kTimeout, "");
  while (status.code() == StatusCode::kTimeout && std::chrono::steady_clock::now() < limit) {
    status = store->wait(ticket, std::chrono::milliseconds(0));
    std::this_thread::yield();
  }

  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_P(FileStore, GivesUpOnADriveThatNeverMovesOn) {
  for (const Fault& fault :
       {Fault{.lost = INT32_MAX}, Fault{.error = EAGAIN}, Fault{.error = EINTR, .at_submit = true}}) {
    FaultyEngine::Script script{.first = 1, .count = UINT64_MAX, .fault = fault};
    auto store = make(script);
    const StoreRange range = store->create_range("w", kBlock).value();
    Memory memory(kBlock);

    const Status status = write_all(*store, range, 0, memory.bytes());

    EXPECT_EQ(status.code(), StatusCode::kIoError) << status.to_string();
    EXPECT_LT(script.submitted, 100u);
  }
}

TEST_P(FileStore, TriesAnOperationSeventeenTimes) {
  for (const Fault& fault : {Fault{.lost = INT32_MAX}, Fault{.error = EAGAIN}}) {
    for (const std::uint64_t count : {16u, 17u}) {
      FaultyEngine::Script script{.first = 1, .count = count, .fault = fault};
      auto store = make(script);
      const StoreRange range = store->create_range("w", kBlock).value();
      Memory memory(kBlock);

      EXPECT_EQ(write_all(*store, range, 0, memory.bytes()).ok(), count == 16) << fault.error;
      EXPECT_EQ(script.submitted, 17u);
    }
  }
}

TEST_P(FileStore, AdvisesByTheError) {
  const std::string drive = "see the system log about the drive, or name another directory";
  const std::string space = "free space in the directory or name another";
  const std::string memory =
      "the kernel had no memory or no thread left for it; use fewer ranks, or raise ulimit -v and -u";
  const std::vector<std::pair<int, std::string>> expected = {
      {EIO, drive},
      {ENOSPC, space},
      {EDQUOT, space},
      {EFBIG, space},
      {ENOMEM, memory},
      {ECANCELED, memory},
      {EINVAL, "the file system may want another alignment; try without direct transfers"}};
  options_.directories = {directory_.path()};
  for (const auto& [error, advice] : expected) {
    FaultyEngine::Script script{.first = 1, .count = UINT64_MAX, .fault = {.error = error}};
    auto store = make(script);
    const StoreRange range = store->create_range("w", kBlock).value();
    Memory source(kBlock);

    EXPECT_EQ(write_all(*store, range, 0, source.bytes()).message(),
              "cannot write 16384 bytes at 0 of range 'w', in '" + directory_.path() +
                  "': " + internal::errno_text(error) + "; " + advice);
  }
}

TEST_P(FileStore, GivesTheDriveNoMoreThanItsDepthAtOnce) {
  FaultyEngine::Script script;
  auto store = make(script);
  const StoreRange range = store->create_range("w", 64 * kBlock).value();
  Memory memory(64 * kBlock);

  ASSERT_TRUE(write_all(*store, range, 0, memory.bytes()).ok());

  EXPECT_EQ(script.most_in_flight, static_cast<int>(options_.depth));
}

TEST_P(FileStore, ATicketCarriesItsFirstFailure) {
  FaultyEngine::Script script{.first = 1, .count = 2, .fault = {.error = EIO}};
  auto store = make(script);
  const StoreRange range = store->create_range("w", 4 * kBlock).value();
  Memory memory(4 * kBlock);

  const Status status = write_all(*store, range, 0, memory.bytes());

  EXPECT_TRUE(status.message().starts_with("cannot write 16384 bytes at 0 of range 'w'")) << status.message();
  EXPECT_EQ(store->statistics().failed_count, 1u);
}

TEST_P(FileStore, EndsWhenTheDriveIsDoneWithTheMemory) {
  FaultyEngine::Script script;
  for (int i = 0; i < 20; ++i) {
    auto store = make(script);
    const StoreRange range = store->create_range("w", 16 * kBlock).value();
    Memory memory(16 * kBlock, i % 2 == 0 ? 0 : 8);
    ASSERT_TRUE(store->write(range, 0, memory.data(), memory.size()).ok());
    ASSERT_TRUE(store->read(range, 0, memory.data(), memory.size()).ok());

    store.reset();  // The engine looks whether anything is left.
  }
  // Most was still queued.
  EXPECT_LT(script.submitted, 20u * 32);
}

TEST_P(FileStore, SubmitHandsOverNoMoreThanTheDriveTakesAtOnce) {
  FaultyEngine::Script script;
  auto store = make(script);
  const StoreRange range = store->create_range("w", 256 * kBlock).value();
  Memory memory(256 * kBlock);
  const std::uint64_t before = submitted_here;
  Hold hold;
  // One thread waits for the last batch, and takes results for all.
  std::thread waiting([&] {
    while (!hold.begun) std::this_thread::yield();
    const StoreTicket last = store->write(range, 255 * kBlock, memory.data() + 255 * kBlock, kBlock).value();
    EXPECT_TRUE(store->wait(last, kSoon).ok());
    hold.over = true;
  });
  hold_here = &hold;

  const StoreTicket ticket = store->write(range, 0, memory.data(), 255 * kBlock).value();

  hold_here = nullptr;
  // Once before results are looked at, once after.
  EXPECT_LE(submitted_here - before, 2 * options_.depth);
  waiting.join();
  EXPECT_TRUE(store->wait(ticket, kSoon).ok());
}

TEST_P(FileStore, AFailedBatchDropsItsRestAndNoOther) {
  FaultyEngine::Script script{.first = 1, .fault = {.error = EIO}};
  auto store = make(script);
  const StoreRange range = store->create_range("w", 64 * kBlock).value();
  Memory source(64 * kBlock);
  fill_pattern(source.bytes(), 1);
  const StoreTicket failing = store->write(range, 0, source.data(), 32 * kBlock).value();
  const StoreTicket fine = store->write(range, 32 * kBlock, source.data() + 32 * kBlock, 32 * kBlock).value();

  EXPECT_EQ(store->wait(failing, kSoon).code(), StatusCode::kIoError);
  EXPECT_TRUE(store->wait(fine, kSoon).ok());

  Memory target(32 * kBlock);
  ASSERT_TRUE(read_all(*store, range, 32 * kBlock, target.bytes()).ok());
  EXPECT_TRUE(equal(target.bytes(), source.bytes().subspan(32 * kBlock)));
  // Exactly the operations that the drive had by then.
  EXPECT_LE(store->statistics().write_count, 32u + 2 * options_.depth);
}

// The descriptors of this process for files in the directory.
std::vector<int> descriptors_in(const std::string& directory) {
  std::vector<int> descriptors;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (!gone && target.starts_with(directory + "/"))
      descriptors.push_back(std::stoi(entry.path().filename().string()));
  }
  return descriptors;
}

// The store's scratch files of one directory, opened once more as a stranger would.
class ScratchAccess {
 public:
  explicit ScratchAccess(const std::string& directory) {
    for (const int descriptor : descriptors_in(directory)) {
      const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
      files_.push_back(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    }
  }
  ~ScratchAccess() {
    for (const int file : files_) ::close(file);
  }
  const std::vector<int>& files() const { return files_; }

  void flip(std::uint64_t offset) const {
    unsigned char byte = 0;
    ASSERT_EQ(::pread(files_.at(0), &byte, 1, static_cast<off_t>(offset)), 1);
    byte ^= 0x10;
    ASSERT_EQ(::pwrite(files_.at(0), &byte, 1, static_cast<off_t>(offset)), 1);
    ASSERT_EQ(::fsync(files_.at(0)), 0);
  }

 private:
  std::vector<int> files_;
};

TEST_P(FileStore, FindsFlippedBytesOnDisk) {
  options_.directories = {directory_.path()};
  auto store = make_file_store(options_).value();
  constexpr std::size_t kBytes = 3 * kBlock + 100;
  const StoreRange range = store->create_range("w", kBytes).value();
  Memory source(kBytes);
  fill_pattern(source.bytes(), 1);
  ASSERT_TRUE(write_all(*store, range, 0, source.bytes()).ok());
  const ScratchAccess access(directory_.path());
  ASSERT_EQ(access.files().size(), 1u);
  Memory target(kBytes);

  for (const std::size_t offset : {std::size_t{0}, kGranule - 1, kBlock + 7, 3 * kBlock, kBytes - 1}) {
    access.flip(offset);

    const Status status = read_all(*store, range, 0, target.bytes());

    EXPECT_EQ(status.code(), StatusCode::kCorruption) << offset;
    const std::string place = "from " + std::to_string(offset / kGranule * kGranule) + " on";
    EXPECT_NE(status.message().find(place), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("'w'"), std::string::npos) << status.message();
    // Other granules are as they were.
    const std::size_t elsewhere = offset < 2 * kBlock ? 2 * kBlock : 0;
    EXPECT_TRUE(read_all(*store, range, elsewhere, target.bytes().first(kBlock)).ok());
    access.flip(offset);
    EXPECT_TRUE(read_all(*store, range, 0, target.bytes()).ok());
    EXPECT_TRUE(equal(source.bytes(), target.bytes()));
  }
  // The bytes behind the end of the range are unused.
  access.flip(kBytes);
  EXPECT_TRUE(read_all(*store, range, 0, target.bytes()).ok());
}

TEST_P(FileStore, AFileThatWasShortenedIsAnError) {
  options_.directories = {directory_.path()};
  auto store = make_file_store(options_).value();
  const StoreRange range = store->create_range("w", 4 * kBlock).value();
  Memory memory(4 * kBlock);
  ASSERT_TRUE(write_all(*store, range, 0, memory.bytes()).ok());
  const ScratchAccess access(directory_.path());
  ASSERT_EQ(::ftruncate(access.files().at(0), 2 * kBlock), 0);

  const Status status = read_all(*store, range, 0, memory.bytes());

  EXPECT_EQ(status.code(), StatusCode::kIoError) << status.to_string();
  EXPECT_NE(status.message().find("the drive stopped after 0 bytes without saying why; see that nobody has "
                                  "shortened the file"),
            std::string::npos)
      << status.message();
  ASSERT_EQ(::ftruncate(access.files().at(0), kBlock + 2 * kGranule), 0);
  const Status in_part = read_all(*store, range, 0, memory.bytes().first(2 * kBlock));
  EXPECT_NE(in_part.message().find("the drive stopped after 8192 bytes"), std::string::npos)
      << in_part.message();
}

// Bytes of other ranges, or of anything else, do not get into the space behind the end.
TEST_P(FileStore, WritesZerosBehindTheEndOfARange) {
  options_.directories = {directory_.path()};
  auto store = make_file_store(options_).value();
  if (store->facts().alignment_bytes == 1) GTEST_SKIP() << "no direct transfers here";
  const StoreRange other = store->create_range("other", 4 * kBlock).value();
  const StoreRange range = store->create_range("w", 100).value();
  Memory bounced(4 * kBlock, 8);
  ASSERT_TRUE(write_all(*store, other, 0, bounced.bytes()).ok());

  ASSERT_TRUE(write_all(*store, range, 0, bounced.bytes().first(100)).ok());

  const ScratchAccess access(directory_.path());
  std::vector<char> behind(kGranule - 100, 'x');
  ASSERT_EQ(::pread(access.files().at(0), behind.data(), behind.size(), 4 * kBlock + 100),
            static_cast<ssize_t>(behind.size()));
  EXPECT_EQ(behind, std::vector<char>(behind.size(), 0));
}

TEST_P(FileStore, TellsWhatItIs) {
  options_.transfer_limit = 31;
  options_.depth = 3;
  auto store = make_file_store(options_).value();
  const StoreFacts facts = store->facts();
  EXPECT_EQ(facts.granule_bytes, kGranule);
  EXPECT_EQ(facts.block_bytes, kBlock);
  EXPECT_EQ(facts.depth, 3u);
  EXPECT_EQ(facts.transfer_limit, 31u);
  EXPECT_TRUE(facts.checksums);
  EXPECT_EQ(facts.registered_bytes, 0u);
  const bool direct = facts.alignment_bytes > 1;
  const std::string engine = GetParam() == FileEngine::kThreads ? "2 threads" : "io_uring";
  EXPECT_EQ(facts.description, engine + (direct ? ", direct" : ", page cache") +
                                   ", blocks of 16.00 KiB, depth 3, checksums, in " + directory_.path() +
                                   " and " + other_directory_.path());

  options_.depth = 1;
  options_.direct = false;
  options_.checksums = false;
  options_.directories = {directory_.path()};
  store = make_file_store(options_).value();
  EXPECT_EQ(store->facts().description, (GetParam() == FileEngine::kThreads ? "1 thread" : engine) +
                                            ", page cache, blocks of 16.00 KiB, depth 1, no checksums, in " +
                                            directory_.path());
  EXPECT_FALSE(store->facts().checksums);
  EXPECT_EQ(store->facts().alignment_bytes, 1u);

  FileStoreOptions plain;
  plain.directories = {directory_.path()};
  plain.engine = GetParam();
  store = make_file_store(plain).value();
  EXPECT_EQ(store->facts().description, (GetParam() == FileEngine::kThreads ? "8 threads" : engine) +
                                            (direct ? ", direct" : ", page cache") +
                                            ", blocks of 4.00 MiB, depth 8, checksums, in " +
                                            directory_.path());
  EXPECT_EQ(store->facts().granule_bytes, 64u << 10);
  EXPECT_EQ(store->facts().transfer_limit, 256u);

  options_.engine = FileEngine::kAuto;
  options_.depth = 4;
  if (GetParam() == FileEngine::kIoUring) {
    EXPECT_TRUE(make_file_store(options_).value()->facts().description.starts_with("io_uring"));
  }
}

TEST_P(FileStore, AddsUpTheMemoryThatWasRegistered) {
  auto store = make_file_store(options_).value();
  Memory first(kBlock);
  Memory second(2 * kBlock);
  ASSERT_TRUE(store->register_memory(first.data(), first.size()).ok());
  const std::uint64_t after_first = store->facts().registered_bytes;
  ASSERT_TRUE(store->register_memory(second.data(), second.size()).ok());
  EXPECT_EQ(store->facts().registered_bytes, 3 * after_first);

  const StoreRange range = store->create_range("w", 64 * kBlock).value();
  Memory memory(64 * kBlock);
  const StoreTicket ticket = store->write(range, 0, memory.data(), memory.size()).value();
  EXPECT_EQ(store->register_memory(first.data(), first.size()).message(),
            "cannot register memory while transfers are in flight; register it before the first");
  EXPECT_TRUE(store->wait(ticket, std::chrono::milliseconds::max()).ok());

  options_.registered = false;
  store = make_file_store(options_).value();
  ASSERT_TRUE(store->register_memory(first.data(), first.size()).ok());
  EXPECT_EQ(store->facts().registered_bytes, 0u);
}

TEST_P(FileStore, MakesNoRangeBeyondAnyFile) {
  auto store = make_file_store(options_).value();

  const Status status = store->create_range("w", INT64_MAX).status();

  EXPECT_EQ(status.message(), "cannot make range 'w' of 8192.00 PiB: no file is that large");
  EXPECT_EQ(store->create_range("w", 1).value().index, 0u);
  // The ranges follow each other.
  const Status behind = store->create_range("x", INT64_MAX - kGranule).status();
  EXPECT_TRUE(behind.message().ends_with(": no file is that large")) << behind.message();
}

TEST_P(FileStore, DealsStripesToAllDirectoriesAndReservesThem) {
  auto store = make_file_store(options_).value();
  ASSERT_TRUE(store->create_range("w", 10 * kBlock + 1).ok());
  ASSERT_TRUE(store->create_range("x", 9 * kBlock).ok());
  std::uint64_t total = 0;

  for (const std::string& directory : {directory_.path(), other_directory_.path()}) {
    const ScratchAccess access(directory);
    ASSERT_EQ(access.files().size(), 1u);
    struct stat facts {};
    ASSERT_EQ(::fstat(access.files()[0], &facts), 0);
    total += static_cast<std::uint64_t>(facts.st_size);
    EXPECT_NEAR(static_cast<double>(facts.st_size), 9.5 * kBlock, 1.0 * kBlock);
    EXPECT_GE(static_cast<std::uint64_t>(facts.st_blocks) * 512, static_cast<std::uint64_t>(facts.st_size));
    EXPECT_EQ(facts.st_nlink, 0u);
  }

  EXPECT_EQ(total, 19 * kBlock + kGranule);
}

TEST_P(FileStore, ARefusedRangeGivesTheSpaceInOtherDirectoriesBack) {
  auto store = make_file_store(options_).value();
  ASSERT_TRUE(store->create_range("w", 10 * kBlock).ok());
  const ScratchAccess first(directory_.path());
  const auto size = [&] {
    struct stat facts {};
    EXPECT_EQ(::fstat(first.files().at(0), &facts), 0);
    return facts.st_size;
  };
  const auto before = size();
  // Nothing can be written to the second file.
  for (const int descriptor : descriptors_in(other_directory_.path())) {
    const int unwritable = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ASSERT_EQ(::dup3(unwritable, descriptor, O_CLOEXEC), descriptor);
    ::close(unwritable);
  }

  EXPECT_EQ(store->create_range("x", 10 * kBlock).status().code(), StatusCode::kIoError);

  EXPECT_EQ(size(), before);
}

// Bounce buffers take memory once they are used, and addresses at once.
TEST_P(FileStore, GivesTheAddressesOfItsBounceBuffersBack) {
  const auto address_bytes = [] {
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  };
  options_.block_bytes = 256 << 20;
  options_.bounce_count = 4;
  const std::uint64_t before = address_bytes();
  auto store = make_file_store(options_).value();
  EXPECT_GE(address_bytes(), before + (std::uint64_t{1} << 30));

  store.reset();

  EXPECT_LT(address_bytes(), before + (std::uint64_t{1} << 29));
}

TEST_P(FileStore, MemoryOnAPageGoesPastTheBounceBuffers) {
  auto store = make_file_store(options_).value();
  const StoreRange range = store->create_range("w", 8 * kBlock + 10).value();
  Memory aligned(8 * kBlock + 10);
  ASSERT_TRUE(write_all(*store, range, 0, aligned.bytes()).ok());
  const bool direct = store->facts().alignment_bytes > 1;
  EXPECT_EQ(store->statistics().bounced_bytes, direct ? 10u : 0u);

  EXPECT_EQ(store->statistics().write_count, 9u);

  Memory shifted(8 * kBlock + 10, 16);
  ASSERT_TRUE(read_all(*store, range, 0, shifted.bytes()).ok());

  EXPECT_EQ(store->statistics().read_count, 9u);
  EXPECT_EQ(store->statistics().bounced_bytes, direct ? 10 + 8 * kBlock + 10 : 0);
  EXPECT_TRUE(equal(aligned.bytes(), shifted.bytes()));
}

TEST_P(FileStore, RefusesOptionsThatContradictThemselves) {
  const auto code = [&](const std::function<void(FileStoreOptions&)>& change) {
    FileStoreOptions options = options_;
    change(options);
    return make_file_store(options).status().code();
  };
  EXPECT_EQ(code([](auto&) {}), StatusCode::kOk);
  EXPECT_EQ(code([](auto& o) { o.directories.clear(); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.directories = {"/there/is/no/such/directory"}; }),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.directories = {"/proc/self/status"}; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.directories = {"/proc/self"}; }), StatusCode::kIoError);
  EXPECT_EQ(code([](auto& o) { o.granule_bytes = 512; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.granule_bytes = 12288; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.block_bytes = kGranule + 512; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.block_bytes = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.stripe_bytes = 100; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.depth = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.depth = 4096; }), StatusCode::kOk);
  EXPECT_EQ(code([](auto& o) { o.depth = 4097; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.block_bytes = 1 << 30; }), StatusCode::kOk);
  EXPECT_EQ(code([](auto& o) { o.block_bytes = (1 << 30) + kGranule; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.directories.resize(64, o.directories[0]); }), StatusCode::kOk);
  EXPECT_EQ(code([](auto& o) { o.directories.resize(65, o.directories[0]); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.bounce_count = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.transfer_limit = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.thread_count = 0; }), StatusCode::kInvalidArgument);
}

TEST_P(FileStore, SaysWhichOptionIsWrong) {
  const auto message = [&](const std::function<void(FileStoreOptions&)>& change) {
    FileStoreOptions options = options_;
    change(options);
    return make_file_store(options).status().message();
  };
  const std::string what = "cannot make a file store: ";
  EXPECT_EQ(message([](auto& o) { o.directories.clear(); }),
            what + "it needs 1 to 64 directories and was given 0");
  EXPECT_EQ(message([](auto& o) { o.granule_bytes = 512; }),
            what + "a granule is a power of two from 4096 bytes on, not 512");
  EXPECT_EQ(message([](auto& o) { o.block_bytes = 5000; }),
            what + "a block is a multiple of the granule (4096 bytes) and at most 1 GiB, not 5000 bytes");
  EXPECT_EQ(message([](auto& o) { o.stripe_bytes = 100; }),
            what + "a stripe is a multiple of the granule (4096 bytes), not 100 bytes");
  EXPECT_EQ(message([](auto& o) { o.depth = 4097; }), what + "the depth is 1 to 4096, not 4097");
  EXPECT_EQ(message([](auto& o) { o.thread_count = 0; }),
            what + "thread_count, transfer_limit and bounce_count are at least 1");
}

TEST(FileStoreThreads, AreAllThereOrTheStoreIsRefused) {
  const testing::TemporaryDirectory directory;
  FileStoreOptions options;
  options.directories = {directory.path()};
  options.engine = FileEngine::kThreads;
  for (int threads = 0; threads < 8; ++threads) {
    const testing::ThreadLimit limit(threads);
    EXPECT_EQ(make_file_store(options).status().code(), StatusCode::kUnavailable) << threads;
  }
  EXPECT_TRUE(make_file_store(options).ok());
}

INSTANTIATE_TEST_SUITE_P(Engines, FileStore, ::testing::Values(FileEngine::kThreads, FileEngine::kIoUring),
                         [](const auto& info) {
                           return info.param == FileEngine::kThreads ? "Threads" : "IoUring";
                         });

// A later closing of the file, such as by a ring that ends later, holds none of its space.
TEST(ScratchFile, GivesItsSpaceBackAtItsEnd) {
  const TemporaryDirectory directory;
  auto file = internal::ScratchFile::create(directory.path(), {});
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const int other = ::dup(file.value().descriptor());
  {
    internal::ScratchFile ends = std::move(file).value();
    bool reserved = false;
    ASSERT_TRUE(ends.grow(1 << 20, &reserved).ok());
  }
  struct stat facts {};
  ASSERT_EQ(::fstat(other, &facts), 0);
  EXPECT_EQ(facts.st_blocks, 0);
  ::close(other);
}

TEST(ScratchFile, GrowsAndKeepsItsFactsWhenItIsMoved) {
  const TemporaryDirectory directory;
  auto one = internal::ScratchFile::create(directory.path(), {});
  auto other = internal::ScratchFile::create(directory.path(), {.direct = false});
  ASSERT_TRUE(one.ok() && other.ok());
  internal::ScratchFile direct = std::move(one).value();
  internal::ScratchFile buffered = std::move(other).value();
  const std::size_t alignment_bytes = direct.alignment_bytes();
  const bool is_direct = direct.direct();
  bool reserved = false;
  ASSERT_TRUE(direct.grow(1 << 20, &reserved).ok());

  std::swap(direct, buffered);

  EXPECT_EQ(buffered.alignment_bytes(), alignment_bytes);
  EXPECT_EQ(buffered.direct(), is_direct);
  EXPECT_EQ(direct.alignment_bytes(), 1u);
  // It knows that it has them.
  struct stat facts {};
  ASSERT_TRUE(buffered.grow(1 << 19, &reserved).ok());
  ASSERT_EQ(::fstat(buffered.descriptor(), &facts), 0);
  EXPECT_EQ(facts.st_size, 1 << 20);
}

TEST(ScratchFile, KeepsToTheLimitOfFileSizes) {
  const TemporaryDirectory directory;
  auto made = internal::ScratchFile::create(directory.path(), {});
  ASSERT_TRUE(made.ok());
  internal::ScratchFile file = std::move(made).value();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  bool reserved = false;

  const Status fits = file.grow(1 << 20, &reserved);
  const Status refused = file.grow((1 << 20) + 4096, &reserved);

  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(fits.ok()) << fits.to_string();
  EXPECT_EQ(refused.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(refused.message(), "cannot take 4.00 KiB more in '" + directory.path() +
                                   "': a file of this process may have at most 1.00 MiB; raise the limit "
                                   "(ulimit -f) or add a directory");
}

TEST(SayOnce, SaysAMessageOnce) {
  ::testing::internal::CaptureStderr();
  for (const char* message : {"one drive", "another drive", "one drive"}) internal::say_once(message);
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 2) << log;
}

TEST(ScratchFile, TakesTheNextNameWhereOneIsTaken) {
  const TemporaryDirectory directory;
  const std::string taken = directory.path() + "/.forebay-scratch-" + std::to_string(::getpid()) + "-0";
  std::filesystem::create_directory(taken);

  EXPECT_TRUE(internal::ScratchFile::create(directory.path(), {.unnamed = false}).ok());

  EXPECT_TRUE(std::filesystem::exists(taken));
  EXPECT_EQ(testing::count_entries(directory.path().c_str()), 3u);
}

TEST(ScratchFile, HasNoNameEitherWay) {
  for (const bool unnamed : {true, false}) {
    const TemporaryDirectory directory;

    const auto file = internal::ScratchFile::create(directory.path(), {.unnamed = unnamed});

    ASSERT_TRUE(file.ok()) << file.status().to_string();
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
    struct stat facts {};
    ASSERT_EQ(::fstat(file.value().descriptor(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 0777, 0600u);
    EXPECT_NE(::fcntl(file.value().descriptor(), F_GETFD) & FD_CLOEXEC, 0);
  }
}

}  // namespace
}  // namespace forebay
