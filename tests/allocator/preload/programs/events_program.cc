// A program with known allocations, which a report can be compared with.
//   events_program steps: three blocks, one of them freed and another in its place; all freed
//   events_program killed: the same, and kills itself at the peak
//   events_program killed-at COUNT: short blocks without end, and a thread that kills it after so many
//   events_program full [1]: fills the device, is refused, waits for SIGTERM if asked to, and frees all
//   events_program many COUNT: a block that stays, then COUNT short ones
//   events_program closes COUNT: the same, and in the middle closes all descriptors but the first three
//   events_program listen [1]: keeps freed memory; asks for more on SIGHUP, with 1 in a capture first
//   events_program chunk: a chunk of the program's own beside a block
//   events_program refused-free: the driver refuses the free of a block of 8 MiB; then another of 4 MiB
//   events_program lost: a block of 8 MiB goes with its context; another of 4 MiB gets its address
//   events_program measure COUNT: the time of an allocation and its free, in nanoseconds
#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "tests/allocator/preload/driver_access.h"

namespace forebay::testing {
namespace {

constexpr std::size_t kMiB = 1u << 20;

Driver driver;

int start(CuStream* stream) {
  CuContext context = nullptr;
  CHECK_CU(driver.cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CHECK_CU(driver.cuStreamCreate(stream, kStreamNonBlocking));
  return 0;
}

int steps(CuStream stream, bool is_killed) {
  CuDevicePtr a = 0, b = 0, c = 0, d = 0;
  CHECK_CU(driver.cuMemAllocAsync(&a, 8 * kMiB, stream));
  CHECK_CU(driver.cuMemAllocAsync(&b, 4 * kMiB, stream));
  CHECK_CU(driver.cuMemFreeAsync(b, stream));
  CHECK_CU(driver.cuMemAllocAsync(&d, 3 * kMiB, stream));
  CHECK_CU(driver.cuMemAlloc_v2(&c, 2 * kMiB));
  if (is_killed) ::kill(::getpid(), SIGKILL);
  CHECK_CU(driver.cuMemFreeAsync(a, stream));
  CHECK_CU(driver.cuMemFreeAsync(d, stream));
  CHECK_CU(driver.cuMemFree_v2(c));
  return 0;
}

void wait_for(int number) {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, number);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  std::printf("ready\n");
  std::fflush(stdout);
  ::sigwait(&signals, &number);
}

int full(CuStream stream, bool waits) {
  std::vector<CuDevicePtr> blocks;
  CuDevicePtr block = 0;
  while (driver.cuMemAllocAsync(&block, 12 * kMiB, stream) == CuResult::kSuccess) blocks.push_back(block);
  if (waits) wait_for(SIGTERM);
  for (const CuDevicePtr one : blocks) CHECK_CU(driver.cuMemFreeAsync(one, stream));
  return 0;
}

int many(CuStream stream, int count) {
  CuDevicePtr first = 0, short_lived = 0;
  CHECK_CU(driver.cuMemAllocAsync(&first, 5 * kMiB, stream));
  for (int i = 0; i < count; ++i) {
    CHECK_CU(driver.cuMemAllocAsync(&short_lived, kMiB, stream));
    CHECK_CU(driver.cuMemFreeAsync(short_lived, stream));
  }
  return 0;
}

// As daemons do. Files opened later then get the numbers of the closed ones.
int closes(CuStream stream, int count) {
  CHECK(many(stream, count / 2) == 0);
  const int limit = static_cast<int>(::sysconf(_SC_OPEN_MAX));
  for (int i = 3; i < std::min(limit, 4096); ++i) ::close(i);
  const int own[] = {::open("/dev/null", O_RDWR), ::open("/dev/null", O_RDWR), ::open("/dev/null", O_RDWR)};
  CHECK(many(stream, count - count / 2) == 0);
  for (const int file : own) CHECK(::fcntl(file, F_GETFD) == 0);
  return 0;
}

// In the middle of anything.
int killed_at(CuStream stream, int count) {
  static std::atomic<int> done{0};
  std::thread([count] {
    while (done.load(std::memory_order_relaxed) < count) {
    }
    ::kill(::getpid(), SIGKILL);
  }).detach();
  CuDevicePtr blocks[8] = {};
  for (std::size_t i = 0;; i = (i + 1) % std::size(blocks)) {
    if (blocks[i] != 0) CHECK_CU(driver.cuMemFreeAsync(blocks[i], stream));
    CHECK_CU(driver.cuMemAllocAsync(&blocks[i], (i + 1) << 16, stream));
    done.fetch_add(1, std::memory_order_relaxed);
  }
}

int listen(CuStream stream, bool captures) {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGHUP);
  ::sigaddset(&signals, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  CuDevicePtr kept = 0, freed = 0;
  CuStream captured{};
  CHECK_CU(driver.cuStreamCreate(&captured, kStreamNonBlocking));
  CHECK_CU(driver.cuMemAllocAsync(&kept, 4 * kMiB, stream));
  CHECK_CU(driver.cuMemAllocAsync(&freed, 32 * kMiB, stream));
  CHECK_CU(driver.cuMemFreeAsync(freed, stream));
  std::printf("ready\n");
  std::fflush(stdout);
  for (int number = 0; ::sigwait(&signals, &number) == 0 && number != SIGTERM;) {
    CuDevicePtr block = 0;
    if (captures) CHECK_CU(driver.cuStreamBeginCapture_v2(captured, CuCaptureMode::kRelaxed));
    CHECK_CU(driver.cuMemAllocAsync(&block, kMiB, stream));
    if (captures) {
      std::printf("captured\n");
      std::fflush(stdout);
      CHECK(::sigwait(&signals, &number) == 0);
      CuGraph graph{};
      CHECK_CU(driver.cuStreamEndCapture(captured, &graph));
      CHECK_CU(driver.cuMemAllocAsync(&block, kMiB, stream));
      captures = false;
    }
  }
  return 0;
}

int chunk() {
  CuMemAllocationProp properties{};
  properties.type = CuMemAllocationType::kPinned;
  properties.location = {CuMemLocationType::kDevice, 0};
  CuMemHandle handle = 0;
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuMemCreate(&handle, 6 * kMiB, &properties, 0));
  CHECK_CU(driver.cuMemRelease(handle));
  return 0;
}

int refused_free() {
  CuContext context = nullptr;
  CuDevicePtr block = 0, other = 0;
  CHECK_CU(driver.cuCtxGetCurrent(&context));
  CHECK_CU(driver.cuMemAlloc_v2(&block, 8 * kMiB));
  CHECK_CU(driver.cuCtxSetCurrent(nullptr));
  CHECK(driver.cuMemFree_v2(block) != CuResult::kSuccess);
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CHECK_CU(driver.cuMemAlloc_v2(&other, 4 * kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  return 0;
}

int lost() {
  CuContext context = nullptr, own = nullptr;
  CuDevicePtr block = 0, other = 0;
  CHECK_CU(driver.cuCtxGetCurrent(&context));
  CHECK_CU(driver.cuCtxCreate_v2(&own, 0, 0));
  CHECK_CU(driver.cuMemAlloc_v2(&block, 8 * kMiB));
  CHECK_CU(driver.cuCtxDestroy_v2(own));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CHECK_CU(driver.cuMemAlloc_v2(&other, 4 * kMiB));
  CHECK(other == block);
  return 0;
}

double processor_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e9 + static_cast<double>(time.tv_nsec);
}

// The least of many rounds, in processor time, so that other load does not count.
int measure(CuStream stream, int count) {
  constexpr int kRounds = 200;
  CuDevicePtr block = 0;
  double least = 1e18;
  for (int round = 0; round < kRounds; ++round) {
    const double begin = processor_ns();
    for (int i = 0; i < count; ++i) {
      CHECK_CU(driver.cuMemAllocAsync(&block, kMiB, stream));
      CHECK_CU(driver.cuMemFreeAsync(block, stream));
    }
    least = std::min(least, (processor_ns() - begin) / count);
  }
  std::printf("%.0f ns for an allocation and its free\n", least);
  return 0;
}

int run(const std::string& what, int count) {
  CuStream stream = nullptr;
  if (!query_driver("libcuda.so.1", kProcAddressDefault, &driver) || start(&stream) != 0) return 2;
  if (what == "steps") return steps(stream, false);
  if (what == "killed") return steps(stream, true);
  if (what == "full") return full(stream, count != 0);
  if (what == "many") return many(stream, count);
  if (what == "closes") return closes(stream, count);
  if (what == "killed-at") return killed_at(stream, count);
  if (what == "listen") return listen(stream, count == 1);
  if (what == "chunk") return chunk();
  if (what == "refused-free") return refused_free();
  if (what == "lost") return lost();
  if (what == "measure") return measure(stream, count);
  return 2;
}

}  // namespace
}  // namespace forebay::testing

int main(int argc, char** argv) {
  return forebay::testing::run(argc > 1 ? argv[1] : "", argc > 2 ? std::atoi(argv[2]) : 0);
}
