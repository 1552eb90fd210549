// Compares stream_copy with glibc's memcpy for staging buffers, in turns. There is one thread per core, each
// with its own memory, larger than its caches.
//
//   stream_copy_bench [ROUNDS [THREADS]]
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "forebay/stream_copy.h"
#include "tests/bench/huge_pages.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kArenaBytes = 256u << 20;  // Source and target of one thread together.
constexpr std::size_t kCopiedBytes = 512u << 20;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

int run(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  const int thread_count =
      argc > 2 ? std::atoi(argv[2]) : static_cast<int>(std::thread::hardware_concurrency());
  std::printf("%d threads, %d rounds; GB/s read and written, medians; ratio of each round's\n", thread_count,
              rounds);
  std::printf("%10s %9s %12s %7s\n", "KiB", "memcpy", "stream_copy", "ratio");
  for (std::size_t bytes = 64u << 10; bytes <= 16u << 20; bytes *= 4) {
    std::vector<double> seconds[2];
    std::vector<double> ratios;
    std::barrier start(thread_count + 1);
    std::barrier stop(thread_count + 1);
    std::vector<std::thread> threads;
    for (int t = 0; t < thread_count; ++t) {
      threads.emplace_back([&] {
        const bench::HugePages<std::byte> memory(kArenaBytes);
        std::memset(memory.data(), 1, kArenaBytes);
        const std::size_t places = kArenaBytes / 2 / bytes;
        for (int round = 0; round < 2 * rounds; ++round) {
          start.arrive_and_wait();
          for (std::size_t i = 0; i < kCopiedBytes / bytes; ++i) {
            std::byte* const source = memory.data() + i % places * bytes;
            std::byte* const target = source + kArenaBytes / 2;
            if (round % 2 == 0) {
              std::memcpy(target, source, bytes);
            } else {
              stream_copy(target, source, bytes);
            }
          }
          stop.arrive_and_wait();
        }
      });
    }
    for (int round = 0; round < 2 * rounds; ++round) {
      start.arrive_and_wait();
      const Clock::time_point begin = Clock::now();
      stop.arrive_and_wait();
      seconds[round % 2].push_back(std::chrono::duration<double>(Clock::now() - begin).count());
      if (round % 2 == 1) ratios.push_back(seconds[0].back() / seconds[1].back());
    }
    for (std::thread& thread : threads) thread.join();
    const double moved = 2.0 * static_cast<double>(kCopiedBytes) * thread_count / 1e9;
    std::printf("%10zu %9.1f %12.1f %7.2f\n", bytes >> 10, moved / median(seconds[0]),
                moved / median(seconds[1]), median(ratios));
  }
  return 0;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  return forebay::run(argc, argv);
}
