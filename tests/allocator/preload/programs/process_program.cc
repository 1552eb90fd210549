// A process's life: forks before and after it has used the driver, programs it starts, threads without a
// context, and work after main.
//   process_program fork | exec | threads | exit | exit-threads | workers | signals | reopen DRIVER
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tests/allocator/preload/driver_access.h"

namespace forebay::testing {
namespace {

Driver driver;

int start() {
  CuContext context = nullptr;
  CHECK_CU(driver.cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  return 0;
}

int wait_for(pid_t child) {
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  return WEXITSTATUS(status);
}

// The driver does not survive a fork, and says so in the child; the parent goes on.
int fork_after_use() {
  if (start() != 0) return 1;
  CuDevicePtr kept = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&kept, 1u << 20));
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    CuDevicePtr address = 0;
    CuStream stream = nullptr;
    std::size_t free = 0, total = 0;
    std::printf("child: %u %u %u %u %u %u\n", static_cast<unsigned>(driver.cuInit(0)),
                static_cast<unsigned>(driver.cuMemAlloc_v2(&address, 4096)),
                static_cast<unsigned>(driver.cuMemFree_v2(kept)),
                static_cast<unsigned>(driver.cuMemAllocAsync(&address, 4096, stream)),
                static_cast<unsigned>(driver.cuMemFreeAsync(kept, stream)),
                static_cast<unsigned>(driver.cuMemGetInfo_v2(&free, &total)));
    std::fflush(stdout);
    std::_Exit(0);
  }
  CHECK(wait_for(child) == 0);
  CHECK_CU(driver.cuMemFree_v2(kept));
  std::printf("parent: all well\n");
  return 0;
}

// Forked before the driver was used, like data loaders: each is a process of its own.
int fork_before_use() {
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      CuDevicePtr address = 0;
      if (start() != 0) std::exit(1);
      const bool well = driver.cuMemAlloc_v2(&address, 1u << 20) == CuResult::kSuccess &&
                        driver.cuMemFree_v2(address) == CuResult::kSuccess;
      std::exit(well ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) CHECK(wait_for(child) == 0);
  std::printf("workers: all well\n");
  return 0;
}

// Programs without any use of CUDA, started by one that uses it.
int start_programs() {
  if (start() != 0) return 1;
  CuDevicePtr address = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&address, 1u << 20));
  std::fflush(stdout);
  CHECK(std::system("/bin/sh -c 'cd / && /bin/echo child of a shell'") == 0);
  CHECK(std::system("/bin/false") != 0);
  CHECK_CU(driver.cuMemFree_v2(address));
  return 0;
}

// A thread without a context: the driver refuses to allocate, but frees by address.
int use_threads() {
  if (start() != 0) return 1;
  CuResult refused = CuResult::kSuccess;
  std::thread([&] {
    CuDevicePtr address = 0;
    refused = driver.cuMemAlloc_v2(&address, 4096);
  }).join();
  std::printf("without a context: %u\n", static_cast<unsigned>(refused));
  return 0;
}

// Waits for a signal that is passed on, and ends with its number.
int wait_for_signal() {
  sigset_t wanted;
  ::sigfillset(&wanted);
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGCHLD, SIGCONT}) {
    ::sigdelset(&wanted, number);
  }
  ::sigprocmask(SIG_BLOCK, &wanted, nullptr);
  if (start() != 0) return 1;
  std::printf("ready\n");
  std::fflush(stdout);
  int number = 0;
  ::sigwait(&wanted, &number);
  std::printf("got signal %d\n", number);
  return 10 + number;
}

// Memory that is given back by a destructor after main, when the driver is gone.
struct LateUser {
  CuDevicePtr plain = 0, ordered = 0;
  ~LateUser() {
    if (plain == 0) return;
    std::printf("after main: %u %u\n", static_cast<unsigned>(driver.cuMemFreeAsync(ordered, nullptr)),
                static_cast<unsigned>(driver.cuMemFree_v2(plain)));
  }
};
LateUser late_user;

int end_late() {
  if (start() != 0) return 1;
  CHECK_CU(driver.cuMemAlloc_v2(&late_user.plain, 1u << 20));
  CHECK_CU(driver.cuMemAllocAsync(&late_user.ordered, 1u << 20, nullptr));
  return 0;
}

// Threads that allocate and free while main returns: the driver ends under them.
std::atomic<int> rounds{0};

void work_until_the_end(CuContext context) {
  if (driver.cuCtxSetCurrent(context) != CuResult::kSuccess) return;
  while (true) {
    CuDevicePtr plain = 0, ordered = 0;
    if (driver.cuMemAlloc_v2(&plain, 1u << 16) == CuResult::kSuccess) (void)driver.cuMemFree_v2(plain);
    if (driver.cuMemAllocAsync(&ordered, 1u << 16, nullptr) == CuResult::kSuccess) {
      (void)driver.cuMemFreeAsync(ordered, nullptr);
    }
    rounds.fetch_add(1, std::memory_order_relaxed);
  }
}

int end_under_threads() {
  if (start() != 0) return 1;
  CuContext context = nullptr;
  CHECK_CU(driver.cuCtxGetCurrent(&context));
  for (int i = 0; i < 4; ++i) std::thread(&work_until_the_end, context).detach();
  while (rounds.load(std::memory_order_relaxed) < 200) std::this_thread::yield();
  return 0;
}

// One driver is looked at and closed; another, which takes its place, is worked with.
int reopen(const char* first_path) {
  void* const first = ::dlopen(first_path, RTLD_NOW);
  CHECK(first != nullptr);
  CHECK(::dlsym(first, "cuInit") != nullptr && ::dlsym(first, "cuMemGetInfo_v2") != nullptr);
  CHECK(::dlclose(first) == 0);
  CHECK(::dlopen(first_path, RTLD_NOW | RTLD_NOLOAD) == nullptr);
  void* const second = ::dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(second != nullptr);
  const auto find = [second](const char* symbol) { return ::dlsym(second, symbol); };
  driver.cuInit = reinterpret_cast<cuInit_function*>(find("cuInit"));
  driver.cuDevicePrimaryCtxRetain =
      reinterpret_cast<cuDevicePrimaryCtxRetain_function*>(find("cuDevicePrimaryCtxRetain"));
  driver.cuCtxSetCurrent = reinterpret_cast<cuCtxSetCurrent_function*>(find("cuCtxSetCurrent"));
  driver.cuMemAlloc_v2 = reinterpret_cast<cuMemAlloc_v2_function*>(find("cuMemAlloc_v2"));
  driver.cuMemFree_v2 = reinterpret_cast<cuMemFree_v2_function*>(find("cuMemFree_v2"));
  if (start() != 0) return 1;
  CuDevicePtr address = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&address, 1u << 20));
  CHECK_CU(driver.cuMemFree_v2(address));
  // Its answer includes the free memory of the device; no other code asks this driver for that.
  CHECK(driver.cuMemAlloc_v2(&address, std::size_t{1} << 50) == CuResult::kOutOfMemory);
  std::printf("reopened\n");
  return 0;
}

}  // namespace
}  // namespace forebay::testing

int main(int argc, char** argv) {
  using namespace forebay::testing;
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "reopen") return reopen(argc > 2 ? argv[2] : "");
  if (!open_driver("libcuda.so.1", &driver)) return 2;
  if (what == "fork") return fork_after_use();
  if (what == "workers") return fork_before_use();
  if (what == "exec") return start_programs();
  if (what == "threads") return use_threads();
  if (what == "exit") return end_late();
  if (what == "exit-threads") return end_under_threads();
  if (what == "signals") return wait_for_signal();
  return 2;
}
