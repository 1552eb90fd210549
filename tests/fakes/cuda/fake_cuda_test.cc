// The fake driver beyond a driver: it notices misuse, fails on demand, keeps accounts, and takes
// its time.
#include "tests/fakes/cuda/fake_cuda.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <list>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/fakes/cuda/driver_under_test.h"

namespace forebay::fake_cuda {
namespace {

using namespace forebay::cuda;  // NOLINT: the interface of the fake.

constexpr std::size_t kGranule = 64u << 10;

struct Gate {
  std::atomic<bool> open{false};
  static void wait(void* gate) { static_cast<Gate*>(gate)->open.wait(false); }
  void release() {
    open = true;
    open.notify_all();
  }
};

constexpr std::size_t kAddBytes[] = {sizeof(int*), sizeof(int)};
constexpr std::size_t kGateBytes[] = {sizeof(Gate*), sizeof(int*)};
constexpr FakeKernel kKernelList[] = {
    {"add",
     [](const FakeLaunch& launch, void* const* arguments) {
       **static_cast<int**>(arguments[0]) +=
           *static_cast<int*>(arguments[1]) * static_cast<int>(launch.grid[0]);
     },
     2, kAddBytes},
    {"wait_for_gate",
     [](const FakeLaunch&, void* const* arguments) {
       Gate::wait(*static_cast<Gate**>(arguments[0]));
       **static_cast<int**>(arguments[1]) += 1;
     },
     2, kGateBytes},
    {"call_driver",
     [](const FakeLaunch&, void* const*) { DriverUnderTest::open(FAKE_CUDA_LIBRARY).cuCtxSynchronize(); }, 0,
     nullptr}};
constexpr FakeKernelTable kKernels{kKernelList, std::size(kKernelList)};

FakeOptions small_options() {
  FakeOptions options;
  options.memory_bytes = 16u << 20;
  options.granularity = kGranule;
  options.quiet = true;
  return options;
}

class FakeCudaTest : public ::testing::Test {
 protected:
  FakeCudaTest()
      : fake_(FakeCuda::open(FAKE_CUDA_LIBRARY)), driver_(DriverUnderTest::open(FAKE_CUDA_LIBRARY)) {}
  ~FakeCudaTest() override { fake_.reset(); }

  void start(const FakeOptions& options = small_options()) {
    fake_.reset();
    ASSERT_EQ(fake_.configure(options), 0);
    fake_.register_kernels(kKernels);
    ASSERT_CU_OK(driver_.cuInit(0));
    context_ = enter(0);
    ASSERT_CU_OK(driver_.cuStreamCreate(&stream_, kStreamNonBlocking));
  }
  CuContext enter(int device) {
    CuContext context = nullptr;
    EXPECT_CU_OK(driver_.cuDevicePrimaryCtxRetain(&context, device));
    EXPECT_CU_OK(driver_.cuCtxSetCurrent(context));
    return context;
  }
  CuFunction kernel(const char* name) {
    CuModule module = nullptr;
    CuFunction function = nullptr;
    EXPECT_CU_OK(driver_.cuModuleLoadData(&module, "forebay kernels"));
    EXPECT_CU_OK(driver_.cuModuleGetFunction(&function, module, name));
    return function;
  }
  CuResult launch(CuFunction function, std::vector<void*> arguments, CuStream stream) {
    return driver_.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments.data(), nullptr);
  }
  CuMemAllocationProp properties(int device) const {
    CuMemAllocationProp result{};
    result.type = CuMemAllocationType::kPinned;
    result.location = {CuMemLocationType::kDevice, device};
    result.requested_handle_types = CuMemHandleType::kPosixFileDescriptor;
    return result;
  }
  // One granule of the device's memory at an address of its own, to be used by that device.
  CuDevicePtr mapped(int device = 0) {
    CuDevicePtr address = 0;
    CuMemHandle chunk = 0;
    const CuMemAllocationProp wanted = properties(device);
    const CuMemAccessDesc access{{CuMemLocationType::kDevice, device}, CuMemAccessFlags::kReadWrite};
    EXPECT_CU_OK(driver_.cuMemAddressReserve(&address, kGranule, 0, 0, 0));
    EXPECT_CU_OK(driver_.cuMemCreate(&chunk, kGranule, &wanted, 0));
    EXPECT_CU_OK(driver_.cuMemMap(address, kGranule, 0, chunk, 0));
    EXPECT_CU_OK(driver_.cuMemSetAccess(address, kGranule, &access, 1));
    EXPECT_CU_OK(driver_.cuMemRelease(chunk));
    return address;
  }
  unsigned read(CuDevicePtr address) {
    unsigned value = 0;
    EXPECT_CU_OK(driver_.cuMemcpyDtoH_v2(&value, address, sizeof(value)));
    return value;
  }

  std::list<Gate> gates_;  // Longer than the work that waits for them, which the destructor ends.
  FakeCuda fake_;
  DriverUnderTest driver_;
  CuContext context_ = nullptr;
  CuStream stream_ = nullptr;
};

// Runs `body` in a child of this process, where the driver has not started yet, and returns its exit code,
// 128 when a signal ended it.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

using FakeCudaDeathTest = FakeCudaTest;

// --- the host and device memory ---

TEST_F(FakeCudaDeathTest, TheHostDiesTouchingDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "fast");
  for (const HostAccess access : {HostAccess::kDenied, HostAccess::kWindows}) {
    FakeOptions options = small_options();
    options.host_access = access;
    start(options);
    CuDevicePtr allocated = 0;
    ASSERT_CU_OK(driver_.cuMemAlloc_v2(&allocated, 4096));
    for (const CuDevicePtr address : {allocated, mapped()}) {
      EXPECT_DEATH(*reinterpret_cast<volatile int*>(address) = 1, "");
      EXPECT_DEATH(static_cast<void>(*reinterpret_cast<volatile int*>(address)), "");
    }
    // Copies, fills and kernels reach it, and leave it shut.
    int two = 2;
    ASSERT_CU_OK(driver_.cuMemsetD32Async(allocated, 40, 1, stream_));
    ASSERT_CU_OK(launch(kernel("add"), {&allocated, &two}, stream_));
    ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
    EXPECT_EQ(read(allocated), 42u);
    EXPECT_DEATH(*reinterpret_cast<volatile int*>(allocated) = 1, "");
  }
}

TEST_F(FakeCudaTest, AHostFunctionIsHostCodeAlsoAfterAKernelRanOnItsThread) {
  fake_.reset();
  for (const HostAccess access : {HostAccess::kDenied, HostAccess::kWindows}) {
    const auto run = [&](CuHostFunction function) {
      return in_child([&] {
        FakeOptions options = small_options();
        options.host_access = access;
        start(options);
        CuDevicePtr address = mapped();
        int one = 1;
        launch(kernel("add"), {&address, &one}, stream_);
        driver_.cuLaunchHostFunc(stream_, function, reinterpret_cast<void*>(address));
        return driver_.cuStreamSynchronize(stream_) == CuResult::kSuccess ? 0 : 1;
      });
    };
    EXPECT_EQ(run([](void*) {}), 0);
    EXPECT_NE(run([](void* address) { *static_cast<volatile int*>(address) = 1; }), 0);
  }
}

TEST_F(FakeCudaTest, TheHostMayTouchDeviceMemoryWhereThatIsAllowed) {
  start();
  const CuDevicePtr address = mapped();
  *reinterpret_cast<unsigned*>(address) = 7;
  EXPECT_EQ(read(address), 7u);
}

TEST_F(FakeCudaTest, FreshMemoryIsPoisoned) {
  start();
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
  EXPECT_EQ(read(address), 0xCBCBCBCBu);
  EXPECT_EQ(read(mapped()), 0xCBCBCBCBu);
}

TEST_F(FakeCudaTest, AFreedBlockOfAPoolIsPoisoned) {
  start();
  CuDevicePtr first = 0, second = 0;
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&first, 1000, stream_));
  ASSERT_CU_OK(driver_.cuMemsetD8Async(first, 1, 1000, stream_));
  ASSERT_CU_OK(driver_.cuMemFreeAsync(first, stream_));
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&second, 1000, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  ASSERT_EQ(second, first);
  EXPECT_EQ(read(second), 0xCBCBCBCBu);
}

TEST_F(FakeCudaTest, MemoryEndsAtTheCapacityAndComesBack) {
  start();
  std::size_t free = 0, total = 0;
  CuDevicePtr address = 0, other = 0;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 12u << 20));
  EXPECT_CU(kOutOfMemory, driver_.cuMemAlloc_v2(&other, 5u << 20));
  EXPECT_CU_OK(driver_.cuMemGetInfo_v2(&free, &total));
  EXPECT_EQ(free, 4u << 20);
  EXPECT_EQ(total, 16u << 20);
  EXPECT_CU_OK(driver_.cuMemFree_v2(address));
  EXPECT_CU_OK(driver_.cuMemAlloc_v2(&other, 16u << 20));
}

TEST_F(FakeCudaTest, NeighbouringChunksByTheThousandFitTheKernelsLimit) {
  FakeOptions options = small_options();
  options.memory_bytes = std::size_t{1} << 30;
  options.granularity = 4096;
  options.poison = false;
  start(options);
  constexpr std::size_t kCount = 4000;
  CuDevicePtr base = 0;
  ASSERT_CU_OK(driver_.cuMemAddressReserve(&base, kCount * 4096, 0, 0, 0));
  const CuMemAllocationProp wanted = properties(0);
  const CuMemAccessDesc access{{CuMemLocationType::kDevice, 0}, CuMemAccessFlags::kReadWrite};
  for (std::size_t i = 0; i < kCount; ++i) {
    CuMemHandle chunk = 0;
    ASSERT_CU_OK(driver_.cuMemCreate(&chunk, 4096, &wanted, 0));
    ASSERT_CU_OK(driver_.cuMemMap(base + i * 4096, 4096, 0, chunk, 0));
    ASSERT_CU_OK(driver_.cuMemRelease(chunk));
  }
  ASSERT_CU_OK(driver_.cuMemSetAccess(base, kCount * 4096, &access, 1));
  ASSERT_CU_OK(driver_.cuMemsetD8_v2(base, 3, kCount * 4096));
  EXPECT_EQ(read(base + kCount * 4096 - 4), 0x03030303u);
}

// --- hazards ---

TEST_F(FakeCudaTest, UnmappingUnderQueuedWorkIsAHazardAndFailsTheContext) {
  start();
  const CuDevicePtr address = mapped();
  Gate& gate = gates_.emplace_back();
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(stream_, Gate::wait, &gate));
  ASSERT_CU_OK(driver_.cuMemsetD8Async(address, 1, kGranule, stream_));
  ASSERT_CU_OK(driver_.cuMemUnmap(address, kGranule));
  EXPECT_EQ(fake_.accounts().hazards, 1u);
  gate.release();
  CuDevicePtr other = 0;
  CuStream another = nullptr;
  EXPECT_CU(kIllegalAddress, driver_.cuStreamSynchronize(stream_));
  EXPECT_CU(kIllegalAddress, driver_.cuMemAlloc_v2(&other, 64));
  EXPECT_CU(kIllegalAddress, driver_.cuStreamCreate(&another, 0));
  EXPECT_CU(kIllegalAddress, driver_.cuCtxSynchronize());
  // A reset of the device ends it.
  ASSERT_CU_OK(driver_.cuDevicePrimaryCtxReset_v2(0));
  EXPECT_CU_OK(driver_.cuMemAlloc_v2(&other, 64));
  EXPECT_CU(kInvalidHandle, driver_.cuStreamSynchronize(stream_));
}

TEST_F(FakeCudaTest, UnmappingAfterTheWorkIsNone) {
  start();
  const CuDevicePtr address = mapped();
  ASSERT_CU_OK(driver_.cuMemsetD8Async(address, 1, kGranule, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  ASSERT_CU_OK(driver_.cuMemUnmap(address, kGranule));
  EXPECT_EQ(fake_.accounts().hazards, 0u);
}

TEST_F(FakeCudaTest, FreeingUnderAKernelIsAHazardUnlessFreeWaits) {
  for (const bool waits : {false, true}) {
    FakeOptions options = small_options();
    options.free_waits = waits;
    start(options);
    CuDevicePtr address = 0;
    ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
    Gate& gate = gates_.emplace_back();
    Gate* pointer = &gate;
    ASSERT_CU_OK(launch(kernel("wait_for_gate"), {&pointer, &address}, stream_));
    std::thread opener;
    if (waits) {
      opener = std::thread([&] { gate.release(); });
    } else {
      gate.release();  // The free still comes before the kernel's end or after it; queue more to be certain.
      Gate& held = gates_.emplace_back();
      Gate* held_pointer = &held;
      ASSERT_CU_OK(launch(kernel("wait_for_gate"), {&held_pointer, &address}, stream_));
      opener = std::thread([&] {
        while (fake_.accounts().hazards == 0) std::this_thread::yield();
        held.release();
      });
      EXPECT_CU(kIllegalAddress, driver_.cuMemFree_v2(address));
      opener.join();
      EXPECT_EQ(fake_.accounts().hazards, 1u);
      continue;
    }
    EXPECT_CU_OK(driver_.cuMemFree_v2(address));
    opener.join();
    EXPECT_EQ(fake_.accounts().hazards, 0u);
    EXPECT_EQ(fake_.accounts().allocations, 0u);
  }
}

TEST_F(FakeCudaTest, PageLockedMemoryUnderACopyIsWatchedToo) {
  start();
  CuDevicePtr address = 0;
  void* memory = nullptr;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 4096));
  ASSERT_CU_OK(driver_.cuMemHostAlloc(&memory, 4096, 0));
  Gate& gate = gates_.emplace_back();
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(stream_, Gate::wait, &gate));
  ASSERT_CU_OK(driver_.cuMemcpyHtoDAsync_v2(address, memory, 4096, stream_));
  EXPECT_CU_OK(driver_.cuMemFreeHost(memory));
  EXPECT_EQ(fake_.accounts().hazards, 1u);
  gate.release();
}

TEST_F(FakeCudaTest, UsingABlockOfAPoolAfterItsFreeIsAHazard) {
  start();
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&address, 1000, stream_));
  ASSERT_CU_OK(driver_.cuMemFreeAsync(address, stream_));
  EXPECT_CU(kIllegalAddress, driver_.cuMemsetD8Async(address, 1, 1000, stream_));
  EXPECT_EQ(fake_.accounts().hazards, 1u);
}

TEST_F(FakeCudaTest, UsingABlockOnAnotherStreamBeforeItsAllocationIsAHazard) {
  start();
  CuStream other = nullptr;
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuStreamCreate(&other, kStreamNonBlocking));
  Gate& gate = gates_.emplace_back();
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(stream_, Gate::wait, &gate));
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&address, 1000, stream_));
  ASSERT_CU_OK(driver_.cuMemsetD8Async(address, 1, 1000, other));
  EXPECT_CU(kIllegalAddress, driver_.cuStreamSynchronize(other));
  EXPECT_EQ(fake_.accounts().hazards, 1u);
  gate.release();
}

TEST_F(FakeCudaTest, ABlockUsedAgainIsThereInTheOrderOfItsStream) {
  start();
  CuStream other = nullptr;
  CuDevicePtr first = 0, second = 0, third = 0;
  ASSERT_CU_OK(driver_.cuStreamCreate(&other, kStreamNonBlocking));
  Gate& early = gates_.emplace_back();
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&first, 1000, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(stream_, Gate::wait, &early));
  ASSERT_CU_OK(driver_.cuMemsetD8Async(first, 1, 1000, stream_));
  ASSERT_CU_OK(driver_.cuMemFreeAsync(first, stream_));
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&second, 1000, stream_));
  ASSERT_CU_OK(driver_.cuMemsetD8Async(second, 1, 1000, stream_));
  ASSERT_CU_OK(driver_.cuMemFreeAsync(second, stream_));
  Gate& late = gates_.emplace_back();
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(stream_, Gate::wait, &late));
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&third, 1000, stream_));
  early.release();
  EXPECT_EQ(second, first);
  EXPECT_EQ(third, first);
  while (fake_.accounts().operations > 2) std::this_thread::yield();  // The gate and the allocation.
  EXPECT_EQ(fake_.accounts().hazards, 0u);
  ASSERT_CU_OK(driver_.cuMemsetD8Async(third, 1, 1000, other));
  EXPECT_CU(kIllegalAddress, driver_.cuStreamSynchronize(other));
  EXPECT_EQ(fake_.accounts().hazards, 1u);
  late.release();
}

TEST_F(FakeCudaTest, FreeingABlockWhileAnotherStreamUsesItIsAHazard) {
  start();
  CuStream other = nullptr;
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuStreamCreate(&other, kStreamNonBlocking));
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&address, 1000, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  Gate& gate = gates_.emplace_back();
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(other, Gate::wait, &gate));
  ASSERT_CU_OK(driver_.cuMemsetD8Async(address, 1, 1000, other));
  ASSERT_CU_OK(driver_.cuMemFreeAsync(address, stream_));
  EXPECT_CU(kIllegalAddress, driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(fake_.accounts().hazards, 1u);
  gate.release();
}

TEST_F(FakeCudaTest, AKernelGivenMemoryItsDeviceCannotUseIsAHazard) {
  FakeOptions options = small_options();
  options.device_count = 2;
  start(options);
  CuDevicePtr elsewhere = mapped(1);
  int one = 1;
  ASSERT_CU_OK(launch(kernel("add"), {&elsewhere, &one}, stream_));
  EXPECT_CU(kIllegalAddress, driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(fake_.accounts().hazards, 1u);
}

TEST_F(FakeCudaTest, AHostFunctionThatCallsTheDriverFailsItsStreamAlone) {
  start();
  CuStream other = nullptr;
  ASSERT_CU_OK(driver_.cuStreamCreate(&other, kStreamNonBlocking));
  CuResult answer = CuResult::kSuccess;
  struct Call {
    DriverUnderTest* driver;
    CuResult* answer;
  } call{&driver_, &answer};
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(
      stream_,
      [](void* argument) {
        const Call& made = *static_cast<Call*>(argument);
        CuDevicePtr address = 0;
        *made.answer = made.driver->cuMemAlloc_v2(&address, 64);
      },
      &call));
  EXPECT_CU(kNotPermitted, driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(answer, CuResult::kNotPermitted);
  EXPECT_CU(kNotPermitted, driver_.cuLaunchHostFunc(
                               stream_, [](void*) {}, nullptr));
  EXPECT_CU_OK(driver_.cuStreamSynchronize(other));
  EXPECT_EQ(fake_.accounts().forbidden_calls, 1u);
  ASSERT_CU_OK(launch(kernel("call_driver"), {}, other));
  EXPECT_CU(kNotPermitted, driver_.cuStreamSynchronize(other));
  EXPECT_EQ(fake_.accounts().forbidden_calls, 2u);
}

TEST_F(FakeCudaTest, HandlesAreUsedAgainWithoutWhatTheyStoodFor) {
  start();
  CuStream old_stream = nullptr, stream = nullptr;
  ASSERT_CU_OK(driver_.cuStreamCreate(&old_stream, kStreamNonBlocking));
  CuEvent old_event = nullptr, event = nullptr;
  ASSERT_CU_OK(driver_.cuEventCreate(&old_event, kEventDisableTiming));
  ASSERT_CU_OK(driver_.cuStreamDestroy_v2(old_stream));
  ASSERT_CU_OK(driver_.cuEventDestroy_v2(old_event));
  EXPECT_CU(kInvalidHandle, driver_.cuStreamQuery(old_stream));
  EXPECT_CU(kInvalidHandle, driver_.cuEventQuery(old_event));
  ASSERT_CU_OK(driver_.cuStreamCreate(&stream, 0));
  ASSERT_CU_OK(driver_.cuEventCreate(&event, 0));
  EXPECT_EQ(stream, old_stream);
  EXPECT_EQ(event, old_event);
  unsigned flags = ~0u;
  ASSERT_CU_OK(driver_.cuStreamGetFlags(stream, &flags));
  EXPECT_EQ(flags, 0u);
}

// --- several devices ---

TEST_F(FakeCudaTest, PeersReachMemoryOnceAccessIsSet) {
  FakeOptions options = small_options();
  options.device_count = 3;
  start(options);
  int reachable = 0;
  EXPECT_CU_OK(driver_.cuDeviceCanAccessPeer(&reachable, 0, 1));
  EXPECT_EQ(reachable, 1);
  const CuDevicePtr there = mapped(1);
  EXPECT_CU(kInvalidValue, driver_.cuMemsetD8Async(there, 1, 64, stream_));
  const CuMemAccessDesc both[] = {{{CuMemLocationType::kDevice, 0}, CuMemAccessFlags::kReadWrite},
                                  {{CuMemLocationType::kDevice, 2}, CuMemAccessFlags::kRead}};
  ASSERT_CU_OK(driver_.cuMemSetAccess(there, kGranule, both, 2));
  EXPECT_CU_OK(driver_.cuMemsetD8Async(there, 1, 64, stream_));
  EXPECT_CU_OK(driver_.cuStreamSynchronize(stream_));
  enter(2);
  EXPECT_EQ(read(there), 0x01010101u);
  EXPECT_CU(kInvalidValue, driver_.cuMemsetD8_v2(there, 1, 64));  // It may only read.
}

TEST_F(FakeCudaTest, PeerAccessOfContextsIsForAllocationsAndPeerCopiesNeedNone) {
  FakeOptions options = small_options();
  options.device_count = 2;
  start(options);
  CuDevicePtr here = 0, there = 0;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&here, 64));
  const CuContext other = enter(1);
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&there, 64));
  ASSERT_CU_OK(driver_.cuMemsetD8_v2(there, 9, 64));
  ASSERT_CU_OK(driver_.cuCtxSynchronize());
  ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
  EXPECT_CU(kInvalidValue, driver_.cuMemcpyDtoDAsync_v2(here, there, 64, stream_));
  ASSERT_CU_OK(driver_.cuMemcpyPeerAsync(here, context_, there, other, 64, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(read(here), 0x09090909u);
  EXPECT_CU(kPeerAccessNotEnabled, driver_.cuCtxDisablePeerAccess(other));
  ASSERT_CU_OK(driver_.cuCtxEnablePeerAccess(other, 0));
  EXPECT_CU(kPeerAccessAlreadyEnabled, driver_.cuCtxEnablePeerAccess(other, 0));
  EXPECT_CU_OK(driver_.cuMemcpyDtoDAsync_v2(here, there, 64, stream_));
  EXPECT_CU_OK(driver_.cuStreamSynchronize(stream_));
}

TEST_F(FakeCudaTest, DevicesWithoutPeersKeepApart) {
  FakeOptions options = small_options();
  options.device_count = 2;
  options.peers = false;
  start(options);
  const CuDevicePtr there = mapped(1);
  const CuMemAccessDesc access{{CuMemLocationType::kDevice, 0}, CuMemAccessFlags::kReadWrite};
  EXPECT_CU(kInvalidDevice, driver_.cuMemSetAccess(there, kGranule, &access, 1));
  const CuContext other = enter(1);
  ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
  EXPECT_CU(kPeerAccessUnsupported, driver_.cuCtxEnablePeerAccess(other, 0));
}

// --- faults, counts, the account ---

TEST_F(FakeCudaTest, TheNthCallFailsOnceAndHasNoEffect) {
  start();
  CuDevicePtr first = 0, second = 0, third = 0;
  ASSERT_EQ(fake_.fail("cuMemAlloc", 2, static_cast<int>(CuResult::kNotSupported)), 0);
  EXPECT_CU_OK(driver_.cuMemAlloc_v2(&first, 64));
  const std::uint64_t bytes = fake_.accounts().device_bytes;
  EXPECT_CU(kNotSupported, driver_.cuMemAlloc_v2(&second, 64));
  EXPECT_EQ(second, 0u);
  EXPECT_EQ(fake_.accounts().device_bytes, bytes);
  EXPECT_CU_OK(driver_.cuMemAlloc_v2(&third, 64));
  EXPECT_EQ(fake_.call_count("cuMemAlloc"), 3u);
  EXPECT_EQ(fake_.call_count("cuMemAlloc_v2"), 3u);
  EXPECT_EQ(fake_.fail("cuNoSuchFunction", 1, 1), -1);
  ASSERT_EQ(fake_.fail("cuMemAlloc_v2", 1, static_cast<int>(CuResult::kOutOfMemory)), 0);
  ASSERT_EQ(fake_.fail("cuMemAlloc_v2", 0, 0), 0);
  EXPECT_CU_OK(driver_.cuMemAlloc_v2(&second, 64));
}

// Every entry point can be made to fail by its symbol, and by its variant.
TEST_F(FakeCudaTest, EveryEntryPointFailsOnDemand) {
  start();
  for (const EntryPoint& row : kEntryPoints) {
    const std::uint64_t before = fake_.call_count(row.symbol);
    ASSERT_EQ(fake_.fail(row.symbol, 1, static_cast<int>(CuResult::kTimeout)), 0) << row.symbol;
    // The fault comes before the arguments are looked at, so any will do.
    using Any = CuResult(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*);
    if (std::strcmp(row.symbol, "cuIpcOpenMemHandle") == 0 ||
        std::strcmp(row.symbol, "cuIpcOpenMemHandle_v2") == 0) {
      CuDevicePtr address = 0;
      EXPECT_CU(kTimeout,
                driver_.variant<cuIpcOpenMemHandle_function>(row.symbol)(&address, CuIpcMemHandle{}, 0));
    } else {
      auto* const call = driver_.variant<Any>(row.symbol);
      EXPECT_CU(kTimeout, call(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                               nullptr, nullptr, nullptr))
          << row.symbol;
    }
    EXPECT_EQ(fake_.call_count(row.symbol), before + 1) << row.symbol;
    if (row.variant_symbol == nullptr) continue;
    ASSERT_EQ(fake_.fail(row.symbol, 1, static_cast<int>(CuResult::kTimeout)), 0) << row.symbol;
    EXPECT_CU(kTimeout,
              driver_.variant<Any>(row.variant_symbol)(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                                       nullptr, nullptr, nullptr, nullptr, nullptr));
  }
}

TEST_F(FakeCudaTest, TheAccountListsWhatIsAlive) {
  start();
  EXPECT_EQ(fake_.accounts().live_handles(), 2u);  // The context and the stream.
  CuEvent event = nullptr;
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuEventCreate(&event, 0));
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 4096));
  const CuDevicePtr chunk = mapped();
  FakeAccount account = fake_.accounts();
  EXPECT_EQ(account.contexts, 1u);
  EXPECT_EQ(account.streams, 1u);
  EXPECT_EQ(account.events, 1u);
  EXPECT_EQ(account.allocations, 1u);
  EXPECT_EQ(account.reservations, 1u);
  EXPECT_EQ(account.mappings, 1u);
  EXPECT_EQ(account.device_bytes, kGranule + 4096);
  // Allocations that end with their context were leaked; chunks belong to no context.
  ASSERT_CU_OK(driver_.cuDevicePrimaryCtxRelease_v2(0));
  account = fake_.accounts();
  EXPECT_EQ(account.orphans, 3u);
  EXPECT_EQ(account.live_handles(), 2u);
  EXPECT_CU_OK(driver_.cuMemUnmap(chunk, kGranule));
  EXPECT_CU_OK(driver_.cuMemAddressFree(chunk, kGranule));
  EXPECT_EQ(fake_.accounts().live_handles(), 0u);
  EXPECT_EQ(fake_.accounts().device_bytes, 0u);
}

TEST_F(FakeCudaTest, RefusesOptionsThatNoMachineHas) {
  FakeOptions options = small_options();
  options.device_count = 65;
  EXPECT_EQ(fake_.configure(options), -1);
  options = small_options();
  options.granularity = 3 << 12;
  EXPECT_EQ(fake_.configure(options), -1);

  ::setenv("FAKE_CUDA_DEVICES", "100000", 1);
  fake_.reset();
  ::unsetenv("FAKE_CUDA_DEVICES");
  ASSERT_CU_OK(driver_.cuInit(0));
  int count = 0;
  EXPECT_CU_OK(driver_.cuDeviceGetCount(&count));
  EXPECT_EQ(count, 1);
}

TEST_F(FakeCudaTest, ResetReturnsToTheStateBeforeTheStart) {
  start();
  Gate& gate = gates_.emplace_back();
  gate.open = true;
  mapped();
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(stream_, Gate::wait, &gate));
  EXPECT_EQ(fake_.configure(small_options()), -1);  // Not while it runs.
  fake_.reset();
  CuDevicePtr address = 0;
  EXPECT_CU(kNotInitialized, driver_.cuMemAlloc_v2(&address, 64));
  EXPECT_EQ(fake_.accounts().live_handles(), 0u);
  EXPECT_EQ(fake_.accounts().device_bytes, 0u);
  ASSERT_CU_OK(driver_.cuInit(0));
  EXPECT_CU(kInvalidContext, driver_.cuMemAlloc_v2(&address, 64));  // The old one is not current any more.
}

// --- time and order ---

TEST_F(FakeCudaTest, LatencyAndBandwidthTakeTheirTime) {
  FakeOptions options = small_options();
  options.latency_ns = 2'000'000;
  options.bytes_per_second = 1u << 30;
  start(options);
  CuDevicePtr address = 0;
  CuEvent first = nullptr, last = nullptr;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 4u << 20));
  for (CuEvent* event : {&first, &last}) ASSERT_CU_OK(driver_.cuEventCreate(event, 0));
  ASSERT_CU_OK(driver_.cuEventRecord(first, stream_));
  ASSERT_CU_OK(driver_.cuMemsetD8Async(address, 0, 4u << 20, stream_));
  ASSERT_CU_OK(driver_.cuEventRecord(last, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  float milliseconds = 0;
  EXPECT_CU_OK(driver_.cuEventElapsedTime(&milliseconds, first, last));
  EXPECT_GE(milliseconds, 2.0f + 3.9f);
}

// Two streams, one operation each per round: which is first is the seed's to say, so over the rounds both
// are.
TEST_F(FakeCudaTest, ASeedReordersIndependentStreams) {
  FakeOptions options = small_options();
  options.seed = 7;
  start(options);
  CuStream other = nullptr;
  ASSERT_CU_OK(driver_.cuStreamCreate(&other, kStreamNonBlocking));
  std::set<int> first_seen;
  for (int round = 0; round < 500 && first_seen.size() < 2; ++round) {
    std::atomic<int> first{0};
    struct Note {
      std::atomic<int>* first;
      int mine;
      static void make(void* argument) {
        const Note& note = *static_cast<Note*>(argument);
        int nobody = 0;
        note.first->compare_exchange_strong(nobody, note.mine);
      }
    } one{&first, 1}, two{&first, 2};
    ASSERT_CU_OK(driver_.cuLaunchHostFunc(stream_, Note::make, &one));
    ASSERT_CU_OK(driver_.cuLaunchHostFunc(other, Note::make, &two));
    ASSERT_CU_OK(driver_.cuCtxSynchronize());
    first_seen.insert(first);
  }
  EXPECT_EQ(first_seen.size(), 2u);
}

// A random program of copies, fills and event waits over several streams, ordered so that its result is
// certain, gives that result under any seed.
TEST_F(FakeCudaTest, OrderedWorkGivesTheSameResultUnderAnySeed) {
  const std::uint64_t first_seed = std::random_device{}();
  std::printf("first seed %llu\n", static_cast<unsigned long long>(first_seed));
  for (std::uint64_t seed = first_seed; seed < first_seed + 8; ++seed) {
    FakeOptions options = small_options();
    options.seed = seed | 1;
    start(options);
    constexpr std::size_t kStreams = 4, kCells = 16;
    CuStream streams[kStreams];
    for (CuStream& stream : streams) ASSERT_CU_OK(driver_.cuStreamCreate(&stream, kStreamNonBlocking));
    CuDevicePtr cells = 0;
    ASSERT_CU_OK(driver_.cuMemAlloc_v2(&cells, kCells * 4));
    CuEvent written[kCells];
    for (CuEvent& event : written) ASSERT_CU_OK(driver_.cuEventCreate(&event, kEventDisableTiming));
    std::vector<unsigned> model(kCells, 0);
    ASSERT_CU_OK(driver_.cuMemsetD32_v2(cells, 0, kCells));
    ASSERT_CU_OK(driver_.cuCtxSynchronize());
    std::mt19937_64 random(seed);
    for (int i = 0; i < 200; ++i) {
      const CuStream stream = streams[random() % kStreams];
      const std::size_t to = random() % kCells, from = random() % kCells;
      // After the last use of both cells, which each cell's event marks.
      ASSERT_CU_OK(driver_.cuStreamWaitEvent(stream, written[to], 0));
      ASSERT_CU_OK(driver_.cuStreamWaitEvent(stream, written[from], 0));
      if (to == from) {
        const auto value = static_cast<unsigned>(random());
        ASSERT_CU_OK(driver_.cuMemsetD32Async(cells + to * 4, value, 1, stream));
        model[to] = value;
      } else {
        ASSERT_CU_OK(driver_.cuMemcpyDtoDAsync_v2(cells + to * 4, cells + from * 4, 4, stream));
        model[to] = model[from];
      }
      ASSERT_CU_OK(driver_.cuEventRecord(written[to], stream));
      ASSERT_CU_OK(driver_.cuEventRecord(written[from], stream));
    }
    ASSERT_CU_OK(driver_.cuCtxSynchronize());
    std::vector<unsigned> result(kCells);
    ASSERT_CU_OK(driver_.cuMemcpyDtoH_v2(result.data(), cells, kCells * 4));
    EXPECT_EQ(result, model) << "seed " << seed;
  }
}

TEST_F(FakeCudaTest, ThreadsCallAtTheSameTime) {
  FakeOptions options = small_options();
  options.seed = 3;
  start(options);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
      CuStream stream = nullptr;
      ASSERT_CU_OK(driver_.cuStreamCreate(&stream, kStreamNonBlocking));
      for (unsigned i = 0; i < 50; ++i) {
        CuDevicePtr address = 0;
        unsigned value = 0;
        ASSERT_CU_OK(driver_.cuMemAllocAsync(&address, 4096, stream));
        ASSERT_CU_OK(driver_.cuMemsetD32Async(address, t * 1000 + i, 1024, stream));
        ASSERT_CU_OK(driver_.cuMemcpyDtoHAsync_v2(&value, address + 4092, 4, stream));
        ASSERT_CU_OK(driver_.cuMemFreeAsync(address, stream));
        EXPECT_EQ(value, t * 1000 + i);
      }
      EXPECT_CU_OK(driver_.cuStreamDestroy_v2(stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fake_.accounts().hazards, 0u);
  EXPECT_EQ(fake_.accounts().pool_blocks, 0u);
}

TEST_F(FakeCudaTest, ManyStreamsThatWaitForEachOtherNeedFewThreads) {
  start();
  constexpr int kCount = 1000;
  CuEvent event = nullptr;
  ASSERT_CU_OK(driver_.cuEventCreate(&event, kEventDisableTiming));
  Gate& gate = gates_.emplace_back();
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(stream_, Gate::wait, &gate));
  ASSERT_CU_OK(driver_.cuEventRecord(event, stream_));
  std::atomic<int> ran{0};
  for (int i = 0; i < kCount; ++i) {
    CuStream stream = nullptr;
    ASSERT_CU_OK(driver_.cuStreamCreate(&stream, kStreamNonBlocking));
    ASSERT_CU_OK(driver_.cuStreamWaitEvent(stream, event, 0));
    ASSERT_CU_OK(driver_.cuLaunchHostFunc(
        stream, [](void* count) { ++*static_cast<std::atomic<int>*>(count); }, &ran));
    ASSERT_CU_OK(driver_.cuEventRecord(event, stream));
    ASSERT_CU_OK(driver_.cuStreamDestroy_v2(stream));
  }
  EXPECT_EQ(ran, 0);
  gate.release();
  ASSERT_CU_OK(driver_.cuCtxSynchronize());
  EXPECT_EQ(ran, kCount);
}

// --- kernels ---

TEST_F(FakeCudaTest, KernelsOfALibraryAreFoundThroughTheEnvironment) {
  start();
  ::setenv("FAKE_CUDA_KERNELS", "/no/such/library.so:" FAKE_CUDA_KERNEL_LIBRARY, 1);
  CuDevicePtr address = 0;
  int five = 5;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
  ASSERT_CU_OK(driver_.cuMemsetD32Async(address, 1, 1, stream_));
  void* arguments[] = {&address, &five};
  const CuFunction function = kernel("add_from_library");
  ::unsetenv("FAKE_CUDA_KERNELS");
  ASSERT_CU_OK(driver_.cuLaunchKernel(function, 3, 1, 1, 1, 1, 1, 0, stream_, arguments, nullptr));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(read(address), 16u);
}

TEST_F(FakeCudaTest, SharedMemoryIsLimitedUntilAskedFor) {
  start();
  const CuFunction function = kernel("add");
  CuDevicePtr address = mapped();
  int one = 1;
  void* arguments[] = {&address, &one};
  const auto with_shared = [&](unsigned bytes) {
    return driver_.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, bytes, stream_, arguments, nullptr);
  };
  EXPECT_CU(kInvalidValue, with_shared(100u << 10));
  EXPECT_CU(kInvalidValue,
            driver_.cuFuncSetAttribute(function, CuFunctionAttribute::kMaxDynamicSharedSizeBytes, 1 << 20));
  EXPECT_CU_OK(
      driver_.cuFuncSetAttribute(function, CuFunctionAttribute::kMaxDynamicSharedSizeBytes, 100 << 10));
  EXPECT_CU_OK(with_shared(100u << 10));
  EXPECT_CU_OK(driver_.cuStreamSynchronize(stream_));
}

// --- between processes ---

void send_file(int socket, int file) {
  char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &file, sizeof(file));
  ASSERT_EQ(::sendmsg(socket, &message, 0), 1);
}

int receive_file(int socket) {
  char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(socket, &message, 0) != 1) return -1;
  int file = -1;
  std::memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(file));
  return file;
}

TEST_F(FakeCudaTest, ChunksAndAllocationsAreSharedWithAnotherProcess) {
  fake_.reset();
  int sockets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  // Forked before the driver starts: each of the two has its own.
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(sockets[0]);
    CuContext context = nullptr;
    CuIpcMemHandle handle{};
    CuMemHandle chunk = 0;
    CuDevicePtr address = 0, allocation = 0;
    const CuMemAccessDesc access{{CuMemLocationType::kDevice, 0}, CuMemAccessFlags::kReadWrite};
    const int file = receive_file(sockets[1]);
    bool good = ::read(sockets[1], &handle, sizeof(handle)) == sizeof(handle);
    const auto check = [&good](CuResult result) { good = good && result == CuResult::kSuccess; };
    fake_.configure(small_options());
    check(driver_.cuInit(0));
    check(driver_.cuDevicePrimaryCtxRetain(&context, 0));
    check(driver_.cuCtxSetCurrent(context));
    check(driver_.cuMemImportFromShareableHandle(&chunk, reinterpret_cast<void*>(std::intptr_t{file}),
                                                 CuMemHandleType::kPosixFileDescriptor));
    check(driver_.cuMemAddressReserve(&address, kGranule, 0, 0, 0));
    check(driver_.cuMemMap(address, kGranule, 0, chunk, 0));
    check(driver_.cuMemSetAccess(address, kGranule, &access, 1));
    check(driver_.cuIpcOpenMemHandle_v2(&allocation, handle, kIpcLazyEnablePeerAccess));
    check(driver_.cuMemcpyDtoD_v2(allocation, address, 64));
    check(driver_.cuMemsetD8_v2(address, 0x66, 64));
    check(driver_.cuCtxSynchronize());
    check(driver_.cuIpcCloseMemHandle(allocation));
    good = good && fake_.accounts().device_bytes == 0;  // The exporter is charged.
    ::_exit(good ? 0 : 1);
  }
  ::close(sockets[1]);
  start();
  CuDevicePtr address = 0, allocation = 0, again = 0;
  CuMemHandle chunk = 0;
  CuIpcMemHandle handle{};
  int file = -1;
  const CuMemAllocationProp wanted = properties(0);
  const CuMemAccessDesc access{{CuMemLocationType::kDevice, 0}, CuMemAccessFlags::kReadWrite};
  ASSERT_CU_OK(driver_.cuMemAddressReserve(&address, kGranule, 0, 0, 0));
  ASSERT_CU_OK(driver_.cuMemCreate(&chunk, kGranule, &wanted, 0));
  ASSERT_CU_OK(driver_.cuMemMap(address, kGranule, 0, chunk, 0));
  ASSERT_CU_OK(driver_.cuMemSetAccess(address, kGranule, &access, 1));
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&allocation, 64));
  ASSERT_CU_OK(driver_.cuMemsetD8_v2(address, 0x55, 64));
  ASSERT_CU_OK(driver_.cuCtxSynchronize());
  ASSERT_CU_OK(driver_.cuMemExportToShareableHandle(&file, chunk, CuMemHandleType::kPosixFileDescriptor, 0));
  EXPECT_CU(kInvalidValue, driver_.cuIpcGetMemHandle(&handle, address));  // Not for virtual memory.
  ASSERT_CU_OK(driver_.cuIpcGetMemHandle(&handle, allocation));
  EXPECT_CU(kInvalidContext, driver_.cuIpcOpenMemHandle_v2(&again, handle, 0));  // Not in the same process.
  send_file(sockets[0], file);
  ::close(file);
  ASSERT_EQ(::write(sockets[0], &handle, sizeof(handle)), static_cast<ssize_t>(sizeof(handle)));
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ::close(sockets[0]);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read(allocation), 0x55555555u);
  EXPECT_EQ(read(address), 0x66666666u);
}

TEST_F(FakeCudaTest, OptionsComeFromTheEnvironment) {
  ::setenv("FAKE_CUDA_DEVICES", "3", 1);
  ::setenv("FAKE_CUDA_MEMORY", "1048576", 1);
  fake_.reset();
  ::unsetenv("FAKE_CUDA_DEVICES");
  ::unsetenv("FAKE_CUDA_MEMORY");
  ASSERT_CU_OK(driver_.cuInit(0));
  int count = 0;
  std::size_t bytes = 0;
  EXPECT_CU_OK(driver_.cuDeviceGetCount(&count));
  EXPECT_EQ(count, 3);
  EXPECT_CU_OK(driver_.cuDeviceTotalMem_v2(&bytes, 2));
  EXPECT_EQ(bytes, 1048576u);
}

TEST_F(FakeCudaTest, AnOlderDriverHasNoNewerEntryPoints) {
  FakeOptions options = small_options();
  options.driver_version = 12000;
  start(options);
  void* found = nullptr;
  CuProcAddressQueryResult status{};
  EXPECT_CU_OK(driver_.cuGetProcAddress_v2("cuStreamGetDevice", &found, 12000, 0, &status));
  EXPECT_EQ(status, CuProcAddressQueryResult::kSymbolNotFound);
  EXPECT_CU_OK(driver_.cuGetProcAddress_v2("cuStreamGetCaptureInfo", &found, 12000, 0, &status));
  EXPECT_EQ(found, ::dlsym(driver_.library, "cuStreamGetCaptureInfo_v2"));
  EXPECT_CU(kInvalidValue, driver_.cuGetProcAddress_v2("cuInit", &found, 12010, 0, &status));
}

TEST_F(FakeCudaTest, ThePrivateTablesAreRefused) {
  start();
  const void* table = &table;
  const CuUuid id{};
  EXPECT_CU(kNotFound, driver_.cuGetExportTable(&table, &id));
  EXPECT_EQ(table, nullptr);
}

TEST_F(FakeCudaTest, AtExitTheDriverIsGoneBeforeWhatWasThereBeforeIt) {
  struct Late {
    ~Late() {
      int count = 0;
      const CuResult result = driver->cuDeviceGetCount(&count);
      if (result != expected) ::_exit(2);
      if (last) ::_exit(0);
    }
    const DriverUnderTest* driver;
    CuResult expected;
    bool last;
  };
  const int code = in_child([&] {
    static const DriverUnderTest driver = driver_;
    static const Late before{&driver, CuResult::kDeinitialized, true};
    fake_.configure(small_options());
    if (driver.cuInit(0) != CuResult::kSuccess) return 3;
    static const Late after{&driver, CuResult::kSuccess, false};
    std::exit(1);
  });
  EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace forebay::fake_cuda
