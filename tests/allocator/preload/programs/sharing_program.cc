// Two processes that share memory by CUDA IPC: one computes into its block and hands the handle to the other,
// which reads, checks and writes; then the first checks the written bytes. The program starts itself for the
// second process.
//   sharing_program            both, and prints the result
//   sharing_program open       the second: handles on standard input
//   sharing_program kill       the first is killed after it has handed over its handle
//   sharing_program refuse     handles that cannot be opened
//   sharing_program reset      the first shares a block, resets its context, and shares another in its place
//   sharing_program sizes      the first shares and frees blocks of many sizes, more than there is memory
//   sharing_program signals    a timer interrupts the second
//   sharing_program held-up    processes that never send their request come before the second
//   sharing_program crowded    the first has no descriptor left when the second asks, and some later
//   sharing_program crowded-later   the same, but the first has waited for a request before
//   sharing_program stranger   the second runs in another environment: nothing is preloaded there
//   sharing_program foreign    the second runs as another user (only root can do that)
//   sharing_program impostor   another user has taken the address of a process that has ended (only root can
//   do that)
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/allocator/preload/driver_access.h"

namespace forebay::testing {
namespace {

constexpr std::size_t kWords = (9u << 20) / sizeof(std::uint32_t) + 77;
constexpr std::size_t kBytes = kWords * sizeof(std::uint32_t);

Driver driver;

int start() {
  CuContext context = nullptr;
  CHECK(query_driver("libcuda.so.1", kProcAddressDefault, &driver));
  CHECK_CU(driver.cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  return 0;
}

std::vector<std::uint32_t> pattern(std::uint32_t seed) {
  std::vector<std::uint32_t> words(kWords);
  for (std::size_t i = 0; i < kWords; ++i) words[i] = static_cast<std::uint32_t>(i) * 2654435761u + seed;
  return words;
}

bool holds(CuDevicePtr address, std::uint32_t seed) {
  std::vector<std::uint32_t> back(kWords);
  return driver.cuMemcpyDtoH_v2(back.data(), address, kBytes) == CuResult::kSuccess && back == pattern(seed);
}

// Whether the driver gives the block as the range around an address inside it.
bool is_block(CuDevicePtr block) {
  CuDevicePtr base = 0, begin = 0;
  std::size_t base_bytes = 0, bytes = 0;
  const CuDevicePtr inside = block + kBytes / 2;
  CuPointerAttribute asked[] = {CuPointerAttribute::kRangeStartAddr, CuPointerAttribute::kRangeSize};
  void* answers[] = {&begin, &bytes};
  return driver.cuMemGetAddressRange_v2(&base, &base_bytes, inside) == CuResult::kSuccess && base == block &&
         base_bytes == kBytes &&
         driver.cuPointerGetAttributes(2, asked, answers, inside) == CuResult::kSuccess && begin == block &&
         bytes == kBytes;
}

// Fragmented memory: the free ranges lie between blocks that stay.
int allocate_in_pieces(CuDevicePtr* block, std::vector<CuDevicePtr>* kept) {
  std::vector<CuDevicePtr> others;
  // So that later blocks begin inside a chunk.
  CuDevicePtr small = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&small, 64u << 10));
  kept->push_back(small);
  for (int i = 0; i < 14; ++i) {
    CuDevicePtr one = 0;
    CHECK_CU(driver.cuMemAlloc_v2(&one, 4u << 20));
    (i % 2 == 0 ? kept : &others)->push_back(one);
  }
  for (const CuDevicePtr one : others) CHECK_CU(driver.cuMemFree_v2(one));
  CHECK_CU(driver.cuMemAlloc_v2(block, kBytes));
  return 0;
}

// Descriptors that came with messages, and how many of them a program that this process starts would inherit.
std::atomic<int> received_count{0}, inherited_count{0};

void count_descriptors(msghdr* message) {
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr; header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; CMSG_LEN(at) < header->cmsg_len; at += sizeof(int)) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header) + at, sizeof descriptor);
      ++received_count;
      if ((::fcntl(descriptor, F_GETFD) & FD_CLOEXEC) == 0) ++inherited_count;
    }
  }
}

struct Message {
  CuIpcMemHandle handle;
};

int second() {
  Message message;
  if (start() != 0) return 1;
  CHECK(::read(STDIN_FILENO, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  CuDevicePtr address = 0, again = 0;
  CHECK(driver.cuIpcOpenMemHandle_v2(&address, message.handle, kIpcLazyEnablePeerAccess + 1) ==
        CuResult::kInvalidValue);
  CHECK_CU(driver.cuIpcOpenMemHandle_v2(&address, message.handle, kIpcLazyEnablePeerAccess));
  CHECK((received_count > 0) == (std::getenv("FOREBAY_PRELOAD") != nullptr));
  CHECK(inherited_count == 0);
  CHECK(holds(address, 1));
  CHECK(is_block(address));
  // Another context has an opening of its own.
  CuContext before = nullptr, second = nullptr;
  CHECK_CU(driver.cuCtxGetCurrent(&before));
  CHECK_CU(driver.cuCtxCreate_v2(&second, 0, 0));
  CHECK_CU(driver.cuIpcOpenMemHandle_v2(&again, message.handle, kIpcLazyEnablePeerAccess));
  CHECK(again != address && holds(again, 1));
  CHECK_CU(driver.cuCtxDestroy_v2(second));
  CHECK_CU(driver.cuCtxSetCurrent(before));
  CHECK(holds(address, 1));
  // Opened twice, it is there until it was closed twice.
  CHECK_CU(driver.cuIpcOpenMemHandle_v2(&again, message.handle, kIpcLazyEnablePeerAccess));
  CHECK(again == address);
  CHECK_CU(driver.cuIpcCloseMemHandle(again));
  const std::vector<std::uint32_t> mine = pattern(2);
  CHECK_CU(driver.cuMemcpyHtoD_v2(address, mine.data(), kBytes));
  CHECK_CU(driver.cuCtxSynchronize());
  CHECK(driver.cuMemFree_v2(address) == CuResult::kInvalidValue);
  if (std::getenv("FOREBAY_PRELOAD") != nullptr) {
    // Closed at once: under the preload that waits for queued work.
    for (int i = 0; i < 3; ++i)
      CHECK_CU(driver.cuMemcpyHtoDAsync_v2(address, mine.data(), kBytes, legacy_stream()));
  }
  CHECK_CU(driver.cuIpcCloseMemHandle(address));
  CHECK(driver.cuIpcCloseMemHandle(address) == CuResult::kInvalidValue);
  return 0;
}

// Whether the thread of this process with this name is waiting.
bool is_waiting(const std::string& name) {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string found, stat;
    std::ifstream(task.path() / "comm") >> found;
    std::getline(std::ifstream(task.path() / "stat"), stat);
    // "NUMBER (NAME) STATE ...".
    const std::size_t end = stat.rfind(") ");
    if (found == name && end != std::string::npos && stat[end + 2] == 'S') return true;
  }
  return false;
}

// The thread that answers gets no signals of the program, and the calling thread keeps its own.
bool signals_are_left_alone() {
  sigset_t mine;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mine);
  if (::sigismember(&mine, SIGTERM) != 0 || ::sigismember(&mine, SIGUSR1) != 0) return false;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    std::ifstream status(task.path() / "status");
    unsigned long long blocked = ~0ull;
    for (std::string word; name == "forebay-ipc" && status >> word;) {
      if (word == "SigBlk:") status >> std::hex >> blocked;
    }
    for (const int number : {SIGINT, SIGTERM, SIGUSR1}) {
      if ((blocked >> (number - 1) & 1) == 0) return false;
    }
  }
  return true;
}

// No other block gets memory that another process may have opened, at whatever address, while there is other
// memory.
int allocate_around(CuDevicePtr block) {
  constexpr std::size_t kOther = 1u << 20;
  std::vector<CuDevicePtr> others;
  CuDevicePtr other = 0;
  std::size_t free = 0, total = 0;
  CHECK_CU(driver.cuMemGetInfo_v2(&free, &total));
  for (; free > kBytes + 4 * kOther; free -= kOther) {
    CHECK_CU(driver.cuMemAlloc_v2(&other, kOther));
    CHECK_CU(driver.cuMemsetD8_v2(other, 0x6B, kOther));
    others.push_back(other);
  }
  CuDevicePtr again = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&again, kBytes));
  CHECK(again == block && holds(block, 2));
  for (const CuDevicePtr one : others) CHECK_CU(driver.cuMemFree_v2(one));
  CHECK_CU(driver.cuMemFree_v2(again));
  return 0;
}

struct Child {
  pid_t process = -1;
  int input = -1;
};

Child start_second(const char* program, const char* what) {
  int ends[2];
  Child child;
  if (::pipe(ends) != 0) return child;
  child.process = ::fork();
  if (child.process == 0) {
    ::dup2(ends[0], STDIN_FILENO);
    ::close(ends[0]);
    ::close(ends[1]);
    ::execl(program, program, what, nullptr);
    ::_exit(127);
  }
  ::close(ends[0]);
  child.input = ends[1];
  return child;
}

int wait_for(const Child& child) {
  int status = 0;
  ::waitpid(child.process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int both(const char* program) {
  // Started before this process has used the driver, which does not survive a fork.
  const Child child = start_second(program, "open");
  if (start() != 0) return 1;
  CuDevicePtr block = 0;
  std::vector<CuDevicePtr> kept;
  if (allocate_in_pieces(&block, &kept) != 0) return 1;
  const std::vector<std::uint32_t> mine = pattern(1);
  CHECK_CU(driver.cuMemcpyHtoD_v2(block, mine.data(), kBytes));
  CHECK_CU(driver.cuCtxSynchronize());
  Message message, same;
  CHECK_CU(driver.cuIpcGetMemHandle(&message.handle, block));
  // MPI libraries ask for an address inside the block, and add its offset to the opened address.
  CHECK(is_block(block));
  CHECK_CU(driver.cuIpcGetMemHandle(&same.handle, block + kBytes / 2));
  int can_share = 0;
  CHECK_CU(driver.cuPointerGetAttribute(&can_share, CuPointerAttribute::kIsLegacyCudaIpcCapable, block));
  CHECK(can_share == 1);
  CHECK(std::memcmp(&message, &same, sizeof message) == 0);
  const bool is_preloaded = std::getenv("FOREBAY_PRELOAD") != nullptr;
  // A thread that has just been made has no signals yet in any case.
  while (is_preloaded && !is_waiting("forebay-ipc")) ::sched_yield();
  CHECK(signals_are_left_alone());
  // A process does not open its own handles.
  CuDevicePtr own = 0;
  CHECK(driver.cuIpcOpenMemHandle_v2(&own, message.handle, kIpcLazyEnablePeerAccess) ==
        CuResult::kInvalidContext);
  CHECK(::write(child.input, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  const int ended = wait_for(child);
  std::printf("second: %d\n", ended);
  CHECK(holds(block, 2));
  CHECK_CU(driver.cuMemFree_v2(block));
  if (is_preloaded && allocate_around(block) != 0) return 1;
  for (const CuDevicePtr one : kept) CHECK_CU(driver.cuMemFree_v2(one));
  std::printf("first: all well\n");
  return ended;
}

int share_a_pattern(CuDevicePtr* block, Message* message) {
  CHECK_CU(driver.cuMemAlloc_v2(block, kBytes));
  const std::vector<std::uint32_t> mine = pattern(1);
  CHECK_CU(driver.cuMemcpyHtoD_v2(*block, mine.data(), kBytes));
  CHECK_CU(driver.cuCtxSynchronize());
  CHECK_CU(driver.cuIpcGetMemHandle(&message->handle, *block));
  return 0;
}

// The opening process: blocks that it has mapped outlive the other process; others cannot be opened any more.
int survive() {
  Message message;
  char go = 0;
  if (start() != 0) return 1;
  CHECK(::read(STDIN_FILENO, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  CuDevicePtr address = 0;
  CHECK_CU(driver.cuIpcOpenMemHandle_v2(&address, message.handle, kIpcLazyEnablePeerAccess));
  ::kill(::getppid(), SIGUSR1);
  // The end of the input is the end of the other process.
  while (::read(STDIN_FILENO, &go, 1) > 0) {
  }
  std::printf("mapped memory holds %d\n", holds(address, 1));
  CHECK_CU(driver.cuIpcCloseMemHandle(address));
  const auto begin = std::chrono::steady_clock::now();
  const CuResult again = driver.cuIpcOpenMemHandle_v2(&address, message.handle, kIpcLazyEnablePeerAccess);
  const bool is_at_once = std::chrono::steady_clock::now() - begin < std::chrono::seconds(4);
  std::printf("opened anew: %u, at once %d\n", static_cast<unsigned>(again), is_at_once);
  CuDevicePtr own = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&own, 1u << 20));
  CHECK_CU(driver.cuMemFree_v2(own));
  std::printf("survivor: all well\n");
  return 0;
}

int be_killed(const char* program) {
  sigset_t wanted;
  ::sigemptyset(&wanted);
  ::sigaddset(&wanted, SIGUSR1);
  ::sigprocmask(SIG_BLOCK, &wanted, nullptr);
  const Child child = start_second(program, "survive");
  if (start() != 0) return 1;
  CuDevicePtr block = 0;
  Message message;
  if (share_a_pattern(&block, &message) != 0) return 1;
  CHECK(::write(child.input, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  int number = 0;
  ::sigwait(&wanted, &number);
  // A child without exec that lives on, as PyTorch's loaders of data do for a while.
  const pid_t first = ::getpid();
  if (::fork() == 0) {
    ::close(child.input);
    ::close(STDOUT_FILENO);
    ::close(STDERR_FILENO);
    ::alarm(10);
    ::pause();
  }
  ::kill(first, SIGKILL);
  return 1;
}

double processor_ms() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

// `is_awaited`: the table is filled when the thread that answers is already waiting. The system has then set
// a descriptor aside for the first connection, and there is none for the chunk.
int be_crowded(const char* program, bool is_awaited) {
  constexpr int kWaitMs = 400;
  const Child child = start_second(program, "open");
  if (start() != 0) return 1;
  CuDevicePtr block = 0;
  Message message;
  if (share_a_pattern(&block, &message) != 0) return 1;
  while (is_awaited && !is_waiting("forebay-ipc")) ::sched_yield();
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  rlimit low = limit;
  low.rlim_cur = 64;
  CHECK(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  std::vector<int> files;
  for (int file = 0; (file = ::dup(STDIN_FILENO)) >= 0;) files.push_back(file);
  const double begin = processor_ms();
  CHECK(::write(child.input, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  // The test measures the cost of the wait.
  (void)::poll(nullptr, 0, kWaitMs);
  const double used = processor_ms() - begin;
  // The fake keeps its own descriptors beyond 1000.
  CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
  for (const int file : files) ::close(file);
  std::printf("second: %d\n", wait_for(child));
  std::printf("waited idly: %d\n", used < kWaitMs / 4);
  CHECK(holds(block, 2));
  CHECK_CU(driver.cuMemFree_v2(block));
  return 0;
}

// The first's blocks of three contexts have the same address and size.
int share_after_resets(const char* program) {
  const Child child = start_second(program, "open-each");
  if (start() != 0) return 1;
  std::size_t free_before = 0;
  for (std::uint32_t round = 1; round <= 3; ++round) {
    CuContext context = nullptr;
    CuDevicePtr block = 0;
    std::size_t free = 0, total = 0;
    CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
    CHECK_CU(driver.cuCtxSetCurrent(context));
    CHECK_CU(driver.cuMemGetInfo_v2(&free, &total));
    CHECK(round == 1 || free == free_before);  // Nothing is left of the context before.
    free_before = free;
    CHECK_CU(driver.cuMemAlloc_v2(&block, kBytes));
    const std::vector<std::uint32_t> mine = pattern(round);
    CHECK_CU(driver.cuMemcpyHtoD_v2(block, mine.data(), kBytes));
    CHECK_CU(driver.cuCtxSynchronize());
    Message message;
    CHECK_CU(driver.cuIpcGetMemHandle(&message.handle, block));
    CHECK(::write(child.input, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
    // The second stops itself when it has read the block.
    int status = 0;
    CHECK(::waitpid(child.process, &status, WUNTRACED) == child.process && WIFSTOPPED(status));
    CHECK_CU(driver.cuDevicePrimaryCtxReset_v2(0));
    CHECK(::kill(child.process, SIGCONT) == 0);
  }
  ::close(child.input);
  std::printf("second: %d\n", wait_for(child));
  return 0;
}

int open_each() {
  Message message;
  if (start() != 0) return 1;
  for (std::uint32_t round = 1; ::read(STDIN_FILENO, &message, sizeof message) > 0; ++round) {
    CuDevicePtr address = 0;
    CHECK_CU(driver.cuIpcOpenMemHandle_v2(&address, message.handle, kIpcLazyEnablePeerAccess));
    CHECK(holds(address, round));
    if (round == 1) {
      CHECK_CU(driver.cuIpcCloseMemHandle(address));
    } else {
      // Opened memory ends with its context.
      CuContext context = nullptr;
      CHECK_CU(driver.cuDevicePrimaryCtxReset_v2(0));
      CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
      CHECK_CU(driver.cuCtxSetCurrent(context));
      std::uint32_t word = 0;
      CHECK(driver.cuMemcpyDtoH_v2(&word, address, sizeof word) == CuResult::kInvalidValue);
      CHECK(driver.cuIpcCloseMemHandle(address) == CuResult::kInvalidValue);
    }
    ::raise(SIGSTOP);
  }
  return 0;
}

// Closes the opened block while queued work reads it.
int close_in_use() {
  Message message;
  if (start() != 0) return 1;
  CHECK(::read(STDIN_FILENO, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  CuContext opening = nullptr, other = nullptr, peer = nullptr;
  CHECK_CU(driver.cuCtxGetCurrent(&opening));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&peer, 1));
  CuStream busy = nullptr, captured = nullptr;
  CHECK_CU(driver.cuStreamCreate(&busy, kStreamNonBlocking));
  CHECK_CU(driver.cuStreamCreate(&captured, kStreamNonBlocking));
  CuDevicePtr target = 0, address = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&target, kBytes));
  const auto use = [&] {
    CHECK_CU(driver.cuIpcOpenMemHandle_v2(&address, message.handle, kIpcLazyEnablePeerAccess));
    for (int i = 0; i < 3; ++i) CHECK_CU(driver.cuMemcpyAsync(target, address, kBytes, busy));
    return 0;
  };
  if (use() != 0) return 1;
  CHECK_CU(driver.cuCtxCreate_v2(&other, 0, 0));
  CHECK_CU(driver.cuIpcCloseMemHandle(address));
  CHECK_CU(driver.cuCtxSetCurrent(opening));
  CHECK_CU(driver.cuStreamSynchronize(busy));
  CHECK(holds(target, 1));

  if (use() != 0) return 1;
  CHECK_CU(driver.cuStreamBeginCapture_v2(captured, CuCaptureMode::kRelaxed));
  CHECK_CU(driver.cuIpcCloseMemHandle(address));
  CuGraph graph = nullptr;
  CHECK_CU(driver.cuStreamEndCapture(captured, &graph));
  CHECK_CU(driver.cuStreamSynchronize(busy));
  CHECK(holds(target, 1));

  // Work of another device, which is current.
  CHECK_CU(driver.cuCtxSetCurrent(opening));
  CHECK_CU(driver.cuIpcOpenMemHandle_v2(&address, message.handle, kIpcLazyEnablePeerAccess));
  CHECK_CU(driver.cuCtxSetCurrent(peer));
  CuStream there = nullptr;
  CuDevicePtr copy = 0;
  CHECK_CU(driver.cuStreamCreate(&there, kStreamNonBlocking));
  CHECK_CU(driver.cuMemAlloc_v2(&copy, kBytes));
  for (int i = 0; i < 3; ++i) CHECK_CU(driver.cuMemcpyAsync(copy, address, kBytes, there));
  CHECK_CU(driver.cuIpcCloseMemHandle(address));
  CHECK_CU(driver.cuStreamSynchronize(there));
  CHECK(holds(copy, 1));
  CHECK_CU(driver.cuMemFree_v2(copy));
  CHECK_CU(driver.cuCtxSetCurrent(opening));

  CHECK_CU(driver.cuMemFree_v2(target));
  std::uint32_t word = 0;
  CHECK(driver.cuMemcpyDtoH_v2(&word, address, sizeof word) == CuResult::kInvalidValue);
  return 0;
}

int share_many_sizes() {
  constexpr std::size_t kStep = 4096;
  if (start() != 0) return 1;
  std::size_t free_at_first = 0, free = 0, total = 0;
  CHECK_CU(driver.cuMemGetInfo_v2(&free_at_first, &total));
  for (std::size_t i = 0; i < 3 * total / (2u << 20); ++i) {
    CuDevicePtr block = 0;
    CuIpcMemHandle handle{};
    CHECK_CU(driver.cuMemAlloc_v2(&block, (2u << 20) + i * kStep));
    CHECK_CU(driver.cuIpcGetMemHandle(&handle, block));
    CHECK_CU(driver.cuMemFree_v2(block));
  }
  CHECK_CU(driver.cuMemGetInfo_v2(&free, &total));
  std::printf("nearly all is free: %d\n", free_at_first - free <= (4u << 20));
  // Also during a capture, which forbids to wait.
  CuStream stream = nullptr;
  CuGraph graph = nullptr;
  CuDevicePtr most = 0;
  CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));
  CHECK_CU(driver.cuStreamBeginCapture_v2(stream, CuCaptureMode::kRelaxed));
  CHECK_CU(driver.cuMemAlloc_v2(&most, free - (8u << 20)));
  CHECK_CU(driver.cuStreamEndCapture(stream, &graph));
  CHECK_CU(driver.cuMemFree_v2(most));
  CHECK_CU(driver.cuGraphDestroy(graph));
  // Also where the driver needs it.
  CuDevicePtr all = 0;
  std::size_t pitch = 0;
  CHECK_CU(driver.cuMemAllocPitch_v2(&all, &pitch, free / 2 / 1024, 1024, 4));
  CHECK_CU(driver.cuMemFree_v2(all));
  return 0;
}

// A signal handler, or a stop, interrupts system calls.
int open_while_interrupted() {
  Message message;
  if (start() != 0) return 1;
  CHECK(::read(STDIN_FILENO, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  struct sigaction action {};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  CHECK(::sigaction(SIGALRM, &action, nullptr) == 0);
  const itimerval often{.it_interval = {0, 500}, .it_value = {0, 500}};
  CHECK(::setitimer(ITIMER_REAL, &often, nullptr) == 0);
  for (int i = 0; i < 400; ++i) {
    CuDevicePtr address = 0;
    CHECK_CU(driver.cuIpcOpenMemHandle_v2(&address, message.handle, kIpcLazyEnablePeerAccess));
    CHECK_CU(driver.cuIpcCloseMemHandle(address));
  }
  return 0;
}

// The second process does what its argument says with a block of this one.
int share_with(const char* program, const char* what) {
  const Child child = start_second(program, what);
  if (start() != 0) return 1;
  CuDevicePtr block = 0;
  Message message;
  if (share_a_pattern(&block, &message) != 0) return 1;
  CHECK(::write(child.input, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  std::printf("second: %d\n", wait_for(child));
  return 0;
}

int be_held_up(const char* program) {
  const Child child = start_second(program, "open");
  if (start() != 0) return 1;
  CuDevicePtr block = 0;
  Message message;
  if (share_a_pattern(&block, &message) != 0) return 1;
  // A handle has token and process.
  std::uint64_t token = 0;
  std::int32_t process = 0;
  std::memcpy(&token, message.handle.bytes + 8, sizeof token);
  std::memcpy(&process, message.handle.bytes + 24, sizeof process);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int length =
      std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "forebay-ipc-%d-%016llx",
                    static_cast<int>(process), static_cast<unsigned long long>(token));
  constexpr int kCallers = 100;  // More than are kept waiting.
  for (int i = 0; i < kCallers; ++i) {
    const int caller = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(::connect(caller, reinterpret_cast<sockaddr*>(&address),
                    static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                           static_cast<std::size_t>(length))) == 0);
  }
  CHECK(::write(child.input, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  std::printf("second: %d\n", wait_for(child));
  CHECK(holds(block, 2));
  return 0;
}

int try_to_open() {
  Message message;
  if (start() != 0) return 1;
  CHECK(::read(STDIN_FILENO, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  CuDevicePtr address = 0;
  const CuResult result = driver.cuIpcOpenMemHandle_v2(&address, message.handle, kIpcLazyEnablePeerAccess);
  std::printf("a stranger opens it: %u\n", static_cast<unsigned>(result));
  return 0;
}

int share_with_a_stranger(const char* program, bool is_foreign) {
  if (!is_foreign) ::unsetenv("LD_PRELOAD");
  const Child child = start_second(program, is_foreign ? "try-as-another-user" : "try");
  if (start() != 0) return 1;
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, kBytes));
  Message message;
  CHECK_CU(driver.cuIpcGetMemHandle(&message.handle, block));
  CHECK(::write(child.input, &message, sizeof message) == static_cast<ssize_t>(sizeof message));
  CHECK(wait_for(child) == 0);
  CHECK_CU(driver.cuMemFree_v2(block));
  std::printf("first: all well\n");
  return 0;
}

// A handle whose process has ended, and whose address a process of another user has taken.
int meet_an_impostor() {
  if (start() != 0) return 1;
  CuDevicePtr block = 0, other = 0;
  CuIpcMemHandle handle{};
  CHECK_CU(driver.cuMemAlloc_v2(&block, 4096));
  CHECK_CU(driver.cuIpcGetMemHandle(&handle, block));
  for (std::size_t i = 8; i < 16; ++i) handle.bytes[i] = static_cast<char>(~handle.bytes[i]);
  std::uint64_t token = 0;
  std::memcpy(&token, handle.bytes + 8, sizeof token);
  int ends[2];
  CHECK(::pipe(ends) == 0);
  const pid_t parent = ::getppid();  // Any process that is not this one.
  std::memcpy(handle.bytes + 24, &parent, sizeof parent);
  const pid_t impostor = ::fork();
  if (impostor == 0) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const int length =
        std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "forebay-ipc-%d-%016llx",
                      static_cast<int>(parent), static_cast<unsigned long long>(token));
    const int listener = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (::setuid(65534) != 0 ||
        ::bind(listener, reinterpret_cast<sockaddr*>(&address),
               static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                      static_cast<std::size_t>(length))) != 0 ||
        ::listen(listener, 1) != 0 || ::write(ends[1], "", 1) != 1) {
      ::_exit(2);
    }
    char request[64];
    ::_exit(::recv(::accept(listener, nullptr, nullptr), request, sizeof request, 0) > 0 ? 1 : 0);
  }
  char ready = 0;
  CHECK(::read(ends[0], &ready, 1) == 1);
  std::printf("opened: %d\n", driver.cuIpcOpenMemHandle_v2(&other, handle, 1) == CuResult::kSuccess);
  int status = 0;
  CHECK(::waitpid(impostor, &status, 0) == impostor);
  std::printf("asked an impostor: %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  return 0;
}

int refuse() {
  if (start() != 0) return 1;
  CuIpcMemHandle handle{};
  CuDevicePtr address = 0;
  std::printf("zeros: %u\n", static_cast<unsigned>(driver.cuIpcOpenMemHandle_v2(&address, handle, 1)));
  std::printf("no such mapping: %u\n", static_cast<unsigned>(driver.cuIpcCloseMemHandle(0x1234000)));
  std::printf("of the host: %u\n", static_cast<unsigned>(driver.cuIpcGetMemHandle(
                                       &handle, reinterpret_cast<CuDevicePtr>(&handle))));
  CHECK_CU(driver.cuMemAlloc_v2(&address, 4096));
  std::printf("of ours: %u\n", static_cast<unsigned>(driver.cuIpcGetMemHandle(&handle, address)));
  CuDevicePtr other = 0;
  // A handle of a process that has ended; no other process has its number.
  for (std::size_t i = 8; i < 16; ++i) handle.bytes[i] = static_cast<char>(~handle.bytes[i]);
  const CuResult stale = driver.cuIpcOpenMemHandle_v2(&other, handle, 1);
  std::printf("of nobody: %d\n", stale != CuResult::kSuccess);
  CHECK_CU(driver.cuMemFree_v2(address));
  return 0;
}

}  // namespace
}  // namespace forebay::testing

// In place of the C library's, for every library of this process.
extern "C" __attribute__((visibility("default"))) ssize_t recvmsg(int socket, msghdr* message, int flags) {
  const ssize_t received = ::syscall(SYS_recvmsg, socket, message, flags);
  if (received >= 0) forebay::testing::count_descriptors(message);
  return received;
}

int main(int argc, char** argv) {
  using namespace forebay::testing;
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "open") return second();
  if (what == "survive") return survive();
  if (what == "kill") return be_killed(argv[0]);
  if (what == "refuse") return refuse();
  if (what == "reset") return share_after_resets(argv[0]);
  if (what == "open-each") return open_each();
  if (what == "sizes") return share_many_sizes();
  if (what == "closer") return share_with(argv[0], "close-in-use");
  if (what == "close-in-use") return close_in_use();
  if (what == "signals") return share_with(argv[0], "open-while-interrupted");
  if (what == "open-while-interrupted") return open_while_interrupted();
  if (what == "held-up") return be_held_up(argv[0]);
  if (what == "try") return try_to_open();
  if (what == "try-as-another-user") return ::setuid(65534) == 0 ? try_to_open() : 1;
  if (what == "foreign") return share_with_a_stranger(argv[0], true);
  if (what == "impostor") return meet_an_impostor();
  if (what == "crowded") return be_crowded(argv[0], false);
  if (what == "crowded-later") return be_crowded(argv[0], true);
  if (what == "stranger") return share_with_a_stranger(argv[0], false);
  return both(argv[0]);
}
