// Threads that allocate, use and free on several streams each, with memory that goes from stream to stream,
// and check every byte. Prints one digest of all that was read back, which depends on nothing but the
// arguments.
//   stress_program THREADS ROUNDS LIMIT_MIB
#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/allocator/preload/driver_access.h"

namespace forebay::testing {
namespace {

constexpr int kStreams = 3;
constexpr std::size_t kWord = sizeof(std::uint32_t);

struct Block {
  CuDevicePtr address = 0;
  std::size_t words = 0;
  std::uint32_t value = 0;
  int stream = 0;  // The stream whose work used it last.
  bool is_ordered = true;
  bool is_spilled = false;  // Its bytes were right, and its memory is free.
};

Driver driver;
CuContext context = nullptr;
std::atomic<int> failures{0};
std::atomic<std::uint64_t> retries{0};

class Worker {
 public:
  Worker(int number, int rounds, std::size_t limit_bytes)
      : random_(static_cast<std::uint64_t>(number) * 7919 + 17), rounds_(rounds), limit_bytes_(limit_bytes) {}

  int run() {
    CHECK_CU(driver.cuCtxSetCurrent(context));
    for (CuStream& stream : streams_) CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));
    CHECK_CU(driver.cuEventCreate(&event_, kEventDisableTiming));
    for (int round = 0; round < rounds_; ++round) {
      // Sizes of every kind: a few bytes, odd ones, and large ones that hardly fit anywhere.
      std::size_t words = 1 + random_() % 300;
      if (round % 3 == 1) words = 1 + random_() % (64u << 10);
      if (round % 7 == 2) words = 1 + random_() % (700u << 10);
      while (live_bytes_ + words * kWord > limit_bytes_ && !blocks_.empty()) {
        if (release(random_() % blocks_.size()) != 0) return 1;
      }
      if (acquire(words) != 0) return 1;
      if (!blocks_.empty() && random_() % 3 == 0 && hand_over(random_() % blocks_.size()) != 0) return 1;
      if (!blocks_.empty() && random_() % 2 == 0 && release(random_() % blocks_.size()) != 0) return 1;
    }
    while (!blocks_.empty()) {
      if (release(blocks_.size() - 1) != 0) return 1;
    }
    for (CuStream& stream : streams_) {
      CHECK_CU(driver.cuStreamSynchronize(stream));
      CHECK_CU(driver.cuStreamDestroy_v2(stream));
    }
    CHECK_CU(driver.cuEventDestroy_v2(event_));
    return 0;
  }

  std::uint64_t digest() const { return digest_; }

 private:
  int acquire(std::size_t words) {
    Block block;
    block.words = words;
    block.value = static_cast<std::uint32_t>(random_());
    block.stream = static_cast<int>(random_() % kStreams);
    block.is_ordered = random_() % 5 != 0;
    const CuStream stream = streams_[block.stream];
    // As frameworks do: when there is no memory, wait for queued work and ask again.
    CuResult result = CuResult::kOutOfMemory;
    for (int attempt = 0; result == CuResult::kOutOfMemory && attempt < 1000; ++attempt) {
      if (attempt > 0) {
        ++retries;
        for (const CuStream one : streams_) CHECK_CU(driver.cuStreamSynchronize(one));
        std::this_thread::yield();
        // All threads may hold what another one needs in one piece.
        if (attempt % 50 == 0 && spill_one() != 0) return 1;
      }
      result = block.is_ordered ? driver.cuMemAllocAsync(&block.address, words * kWord, stream)
                                : driver.cuMemAlloc_v2(&block.address, words * kWord);
    }
    CHECK_CU(result);
    CHECK_CU(driver.cuMemsetD32Async(block.address, block.value, words, stream));
    live_bytes_ += words * kWord;
    blocks_.push_back(block);
    return 0;
  }

  // Another stream goes on with it, after the first.
  int hand_over(std::size_t index) {
    Block& block = blocks_[index];
    const int next = static_cast<int>(random_() % kStreams);
    if (block.is_spilled) return 0;
    CHECK_CU(driver.cuEventRecord(event_, streams_[block.stream]));
    CHECK_CU(driver.cuStreamWaitEvent(streams_[next], event_, 0));
    block.stream = next;
    return 0;
  }

  int release(std::size_t index) {
    const Block block = blocks_[index];
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(index));
    // Stream-ordered memory may be freed by either call, and plain memory too.
    const bool by_stream = block.is_ordered || random_() % 2 == 0;
    if (!block.is_spilled && take_back(block, by_stream) != 0) return 1;
    live_bytes_ -= block.words * kWord;
    digest_ = (digest_ ^ block.value) * 1099511628211ull + block.words;
    return 0;
  }

  // Frees the memory of the oldest block that has some.
  int spill_one() {
    const auto found =
        std::find_if(blocks_.begin(), blocks_.end(), [](const Block& block) { return !block.is_spilled; });
    if (found == blocks_.end()) return 0;
    found->is_spilled = true;
    return take_back(*found, found->is_ordered);
  }

  // Reads the block and frees its memory.
  int take_back(const Block& block, bool by_stream) {
    const CuStream stream = streams_[block.stream];
    back_.resize(block.words);
    CHECK_CU(driver.cuMemcpyDtoHAsync_v2(back_.data(), block.address, block.words * kWord, stream));
    if (by_stream) {
      CHECK_CU(driver.cuMemFreeAsync(block.address, stream));
      CHECK_CU(driver.cuStreamSynchronize(stream));
    } else {
      CHECK_CU(driver.cuStreamSynchronize(stream));
      CHECK_CU(driver.cuMemFree_v2(block.address));
    }
    for (std::size_t i = 0; i < block.words; ++i) {
      if (back_[i] == block.value) continue;
      std::printf("word %zu of %zu at %llx is %08x and should be %08x\n", i, block.words,
                  static_cast<unsigned long long>(block.address), back_[i], block.value);
      return 1;
    }
    return 0;
  }

  std::mt19937_64 random_;
  const int rounds_;
  const std::size_t limit_bytes_;
  CuStream streams_[kStreams] = {};
  CuEvent event_ = nullptr;
  std::vector<Block> blocks_;
  std::vector<std::uint32_t> back_;
  std::size_t live_bytes_ = 0;
  std::uint64_t digest_ = 14695981039346656037ull;
};

int run(int thread_count, int rounds, std::size_t limit_bytes) {
  CHECK(query_driver("libcuda.so.1", kProcAddressDefault, &driver));
  CHECK_CU(driver.cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  // Freed memory stays in the pool, as frameworks configure it.
  CuMemoryPool pool = nullptr;
  std::uint64_t threshold = UINT64_MAX;
  CHECK_CU(driver.cuDeviceGetDefaultMemPool(&pool, 0));
  CHECK_CU(driver.cuMemPoolSetAttribute(pool, CuMemPoolAttribute::kReleaseThreshold, &threshold));
  std::vector<Worker> workers;
  for (int i = 0; i < thread_count; ++i) {
    workers.emplace_back(i, rounds, limit_bytes / static_cast<std::size_t>(thread_count));
  }
  std::vector<std::thread> threads;
  for (Worker& worker : workers) threads.emplace_back([&worker] { failures += worker.run(); });
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  CHECK_CU(driver.cuCtxSynchronize());
  for (const Worker& worker : workers) std::printf("%016" PRIx64 "\n", worker.digest());
  return 0;
}

}  // namespace
}  // namespace forebay::testing

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  return forebay::testing::run(std::atoi(argv[1]), std::atoi(argv[2]),
                               static_cast<std::size_t>(std::atoi(argv[3])) << 20);
}
