// The harsh side of the fake driver: each mode refuses or delays what it says, and nothing else.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/driver_under_test.h"
#include "tests/fakes/cuda/fake_cuda.h"

namespace forebay::fake_cuda {
namespace {

using namespace forebay::cuda;  // NOLINT: the interface under test.

constexpr std::size_t kPage = 4096;

constexpr char kPtx[] = R"(.version 7.0
.target sm_70
.address_size 64
.visible .entry nothing() {
  ret;
}
.visible .entry store(.param .u64 target) {
  .reg .b64 %rd<3>;
  .reg .b32 %r<2>;
  ld.param.u64 %rd1, [target];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, 7;
  st.global.u32 [%rd2], %r1;
  ret;
}
)";

struct Gate {
  std::atomic<bool> open{false};
  std::atomic<bool> holds{false};
  static void wait(void* gate) {
    static_cast<Gate*>(gate)->holds = true;
    static_cast<Gate*>(gate)->open.wait(false);
  }
  void release() {
    open = true;
    open.notify_all();
  }
};

void count(void* counter) {
  ++*static_cast<std::atomic<int>*>(counter);
}

class HarshFakeCuda : public ::testing::Test {
 protected:
  HarshFakeCuda() {
    ::unsetenv("FAKE_CUDA_HARSH");
    ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  }
  ~HarshFakeCuda() override {
    for (Gate& gate : gates_) gate.release();
    driver_.cuCtxSynchronize();
    fake_.reset();
  }
  void start(const FakeOptions& options) {
    fake_.reset();
    ASSERT_EQ(fake_.configure(options), 0);
    ASSERT_CU_OK(driver_.cuInit(0));
    ASSERT_CU_OK(driver_.cuDevicePrimaryCtxRetain(&context_, 0));
    ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
    first_ = stream();
    second_ = stream();
  }
  CuStream stream() {
    CuStream made = nullptr;
    EXPECT_CU_OK(driver_.cuStreamCreate(&made, kStreamNonBlocking));
    return made;
  }
  void hold(CuStream stream, std::size_t gate = 0) {
    ASSERT_CU_OK(driver_.cuLaunchHostFunc(stream, Gate::wait, &gates_[gate]));
  }
  // Whether `done` comes true within a time in which it would, if nothing held it back.
  static bool soon(const std::function<bool()>& done) {
    for (int i = 0; i < 100 && !done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return done();
  }
  // Whether a host function on the stream runs soon.
  bool runs(CuStream stream) {
    auto* const ran = &counters_[next_counter_++];
    EXPECT_CU_OK(driver_.cuLaunchHostFunc(stream, count, ran));
    return soon([&] { return *ran == 1; });
  }

  FakeCuda fake_ = FakeCuda::open(FAKE_CUDA_LIBRARY);
  DriverUnderTest driver_ = DriverUnderTest::open(FAKE_CUDA_LIBRARY);
  Gate gates_[2];
  std::atomic<int> counters_[16] = {};
  std::size_t next_counter_ = 0;
  CuContext context_ = nullptr;
  CuStream first_ = nullptr;
  CuStream second_ = nullptr;
};

TEST_F(HarshFakeCuda, OneCallbackThreadHoldsBackTheHostFunctionsOfAllStreams) {
  start({});
  hold(first_);
  EXPECT_TRUE(runs(second_));
  gates_[0].release();
  ASSERT_CU_OK(driver_.cuCtxSynchronize());

  start({.callback_threads = 1});
  hold(first_, 1);
  EXPECT_FALSE(runs(second_));
  gates_[1].release();
  EXPECT_CU_OK(driver_.cuCtxSynchronize());
  EXPECT_EQ(counters_[1], 1);
}

TEST_F(HarshFakeCuda, AFullQueueBlocksItsCallerAndEverybodyElseInTheContext) {
  for (const std::size_t limit : {std::size_t{57}, std::size_t{512}}) {
    gates_[0].open = false;
    start({.queue_limit = limit});
    hold(first_);
    std::atomic<std::size_t> queued{1};
    std::atomic<int> ran{0};
    std::thread queueing([&] {
      ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
      for (std::size_t i = 0; i < limit; ++i, ++queued)
        ASSERT_CU_OK(driver_.cuLaunchHostFunc(first_, count, &ran));
    });
    while (queued != limit) std::this_thread::yield();
    std::atomic<bool> other_returned{false};
    EXPECT_FALSE(soon([&] { return queued > limit; }));
    std::thread other([&] {
      ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
      ASSERT_CU_OK(driver_.cuLaunchHostFunc(second_, count, &ran));
      other_returned = true;
    });
    EXPECT_FALSE(soon([&] { return other_returned.load(); })) << limit;
    gates_[0].release();
    queueing.join();
    other.join();
    ASSERT_CU_OK(driver_.cuCtxSynchronize());
    EXPECT_EQ(static_cast<std::size_t>(ran), limit + 1);
  }
}

TEST_F(HarshFakeCuda, ACopyOfOrdinaryMemoryWaitsForItsStream) {
  for (const bool waits : {false, true}) {
    gates_[0].open = false;
    start({.pageable_waits = waits});
    CuDevicePtr address = 0;
    ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
    hold(first_);
    std::atomic<bool> returned{false};
    std::thread copying([&] {
      ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
      const int value = 7;
      EXPECT_CU_OK(driver_.cuMemcpyHtoDAsync_v2(address, &value, sizeof(value), first_));
      returned = true;
    });
    EXPECT_EQ(soon([&] { return returned.load(); }), !waits);
    gates_[0].release();
    copying.join();
    ASSERT_CU_OK(driver_.cuStreamSynchronize(first_));
    ASSERT_CU_OK(driver_.cuMemFree_v2(address));
  }
}

TEST_F(HarshFakeCuda, ACopyOverMemoryThatIsPinnedInPartIsRefused) {
  auto* const memory = static_cast<std::byte*>(
      ::mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (const bool refuses : {false, true}) {
    start({.refuse_part_pinned = refuses});
    CuDevicePtr address = 0;
    ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 2 * kPage));
    ASSERT_CU_OK(driver_.cuMemHostRegister_v2(memory, kPage, kHostRegisterPortable));
    EXPECT_CU_OK(driver_.cuMemcpyHtoDAsync_v2(address, memory, kPage, first_));
    EXPECT_CU_OK(driver_.cuMemcpyHtoDAsync_v2(address, memory + kPage, kPage, first_));
    const CuResult both = driver_.cuMemcpyHtoDAsync_v2(address, memory, 2 * kPage, first_);
    EXPECT_EQ(both, refuses ? CuResult::kInvalidValue : CuResult::kSuccess);
    ASSERT_CU_OK(driver_.cuStreamSynchronize(first_));
    ASSERT_CU_OK(driver_.cuMemHostUnregister(memory));
    ASSERT_CU_OK(driver_.cuMemFree_v2(address));
  }
  ::munmap(memory, 2 * kPage);
}

TEST_F(HarshFakeCuda, PinnedMemoryHasADeviceAddressOnlyWhereThatWasAskedFor) {
  for (const bool needs : {false, true}) {
    start({.need_device_map = needs});
    void* plain = nullptr;
    void* mapped = nullptr;
    CuDevicePtr address = 0;
    ASSERT_CU_OK(driver_.cuMemHostAlloc(&plain, kPage, kHostAllocPortable));
    ASSERT_CU_OK(driver_.cuMemHostAlloc(&mapped, kPage, kHostAllocDeviceMap));
    EXPECT_EQ(driver_.cuMemHostGetDevicePointer_v2(&address, plain, 0),
              needs ? CuResult::kInvalidValue : CuResult::kSuccess);
    EXPECT_CU_OK(driver_.cuMemHostGetDevicePointer_v2(&address, mapped, 0));
    // Its host address is no device address either.
    const CuResult used = needs ? CuResult::kInvalidValue : CuResult::kSuccess;
    const auto plain_address = reinterpret_cast<CuDevicePtr>(plain);
    EXPECT_EQ(driver_.cuStreamWaitValue32_v2(first_, plain_address, 0, kWaitValueGeq), used);
    EXPECT_CU_OK(driver_.cuStreamWaitValue32_v2(first_, address, 0, kWaitValueGeq));
    EXPECT_EQ(driver_.cuMemsetD8Async(plain_address, 1, kPage, first_), used);
    EXPECT_CU_OK(driver_.cuMemsetD8Async(address, 1, kPage, first_));
    EXPECT_CU_OK(driver_.cuStreamSynchronize(first_));
    EXPECT_CU_OK(driver_.cuMemFreeHost(plain));
    EXPECT_CU_OK(driver_.cuMemFreeHost(mapped));
  }
}

TEST_F(HarshFakeCuda, KernelsReachPinnedMemoryOnlyWhereItIsMapped) {
  for (const bool needs : {false, true}) {
    start({.quiet = true, .need_device_map = needs});
    void* plain = nullptr;
    CuModule module = nullptr;
    CuFunction store = nullptr;
    ASSERT_CU_OK(driver_.cuMemHostAlloc(&plain, kPage, kHostAllocPortable));
    ASSERT_CU_OK(driver_.cuModuleLoadData(&module, kPtx));
    ASSERT_CU_OK(driver_.cuModuleGetFunction(&store, module, "store"));
    void* arguments[] = {&plain};
    ASSERT_CU_OK(driver_.cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, first_, arguments, nullptr));
    EXPECT_EQ(driver_.cuStreamSynchronize(first_), needs ? CuResult::kIllegalAddress : CuResult::kSuccess);
  }
}

TEST_F(HarshFakeCuda, CallsThatMayWaitForTheDeviceDo) {
  for (const bool waits : {false, true}) {
    start({.calls_wait = waits});
    CuDevicePtr block = 0, other_block = 0;
    void *page = nullptr, *other_page = nullptr;
    CuModule module = nullptr, other_module = nullptr;
    CuFunction function = nullptr;
    alignas(kPage) static std::byte memory[kPage], other_memory[kPage];
    ASSERT_CU_OK(driver_.cuMemAlloc_v2(&block, 64));
    ASSERT_CU_OK(driver_.cuMemHostAlloc(&page, kPage, 0));
    ASSERT_CU_OK(driver_.cuMemHostRegister_v2(memory, kPage, 0));
    ASSERT_CU_OK(driver_.cuModuleLoadData(&module, kPtx));
    const std::pair<const char*, std::function<CuResult()>> calls[] = {
        {"cuMemAlloc", [&] { return driver_.cuMemAlloc_v2(&other_block, 64); }},
        {"cuMemFree", [&] { return driver_.cuMemFree_v2(block); }},
        {"cuMemHostAlloc", [&] { return driver_.cuMemHostAlloc(&other_page, kPage, 0); }},
        {"cuMemFreeHost", [&] { return driver_.cuMemFreeHost(page); }},
        {"cuMemHostRegister", [&] { return driver_.cuMemHostRegister_v2(other_memory, kPage, 0); }},
        {"cuMemHostUnregister", [&] { return driver_.cuMemHostUnregister(memory); }},
        {"cuModuleGetFunction", [&] { return driver_.cuModuleGetFunction(&function, module, "nothing"); }},
        {"cuModuleLoadData", [&] { return driver_.cuModuleLoadData(&other_module, kPtx); }},
        {"cuModuleUnload", [&] { return driver_.cuModuleUnload(module); }},
    };
    for (const auto& [name, call] : calls) {
      gates_[0].open = false;
      hold(first_);
      std::atomic<bool> returned{false};
      std::thread calling([&, &wanted = call] {
        ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
        EXPECT_CU_OK(wanted());
        returned = true;
      });
      EXPECT_EQ(soon([&] { return returned.load(); }), !waits) << name;
      gates_[0].release();
      calling.join();
      ASSERT_CU_OK(driver_.cuCtxSynchronize());
    }
    // No other call waits: mapping does not.
    gates_[0].open = false;
    hold(first_);
    CuMemHandle chunk = 0;
    CuMemAllocationProp properties{};
    properties.type = CuMemAllocationType::kPinned;
    properties.location = {CuMemLocationType::kDevice, 0};
    EXPECT_CU_OK(driver_.cuMemCreate(&chunk, std::size_t{2} << 20, &properties, 0));
    EXPECT_CU_OK(driver_.cuMemRelease(chunk));
    gates_[0].release();
    ASSERT_CU_OK(driver_.cuCtxSynchronize());
  }
}

// The ninth stream shares the queue of the first where there are eight, and the thirty-third where there
// are 32.
TEST_F(HarshFakeCuda, AHeldStreamStallsTheStreamsOfItsHardwareQueue) {
  for (const std::size_t connections : {std::size_t{8}, std::size_t{32}}) {
    gates_[0].open = false;
    if (connections != 8) ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    start({.hardware_queues = true});
    std::vector<CuStream> streams = {first_, second_};
    while (streams.size() <= connections) streams.push_back(stream());
    hold(first_);
    EXPECT_FALSE(runs(streams[connections])) << connections;
    EXPECT_TRUE(runs(streams[connections - 1])) << connections;
    gates_[0].release();
    EXPECT_CU_OK(driver_.cuCtxSynchronize());
  }
}

TEST_F(HarshFakeCuda, AFailureThatADriverCannotRecoverFromPoisonsTheContext) {
  for (const bool sticky : {false, true}) {
    start({.sticky_faults = sticky});
    CuDevicePtr address = 0;
    for (const CuResult clean : {CuResult::kOutOfMemory, CuResult::kInvalidValue, CuResult::kUnknown}) {
      ASSERT_EQ(fake_.fail("cuMemAlloc", 1, static_cast<int>(clean)), 0);
      EXPECT_EQ(driver_.cuMemAlloc_v2(&address, 16), clean);
      ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 16));
    }
    ASSERT_EQ(fake_.fail("cuMemAlloc", 1, static_cast<int>(CuResult::kEccUncorrectable)), 0);
    EXPECT_CU(kEccUncorrectable, driver_.cuMemAlloc_v2(&address, 16));
    const CuResult after = sticky ? CuResult::kEccUncorrectable : CuResult::kSuccess;
    EXPECT_EQ(driver_.cuMemAlloc_v2(&address, 16), after);
    EXPECT_EQ(driver_.cuStreamSynchronize(first_), after);
  }
}

TEST_F(HarshFakeCuda, OneVariableTurnsAllOfItOn) {
  ::setenv("FAKE_CUDA_HARSH", "57", 1);
  start({});
  void* plain = nullptr;
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuMemHostAlloc(&plain, kPage, 0));
  EXPECT_CU(kInvalidValue, driver_.cuMemHostGetDevicePointer_v2(&address, plain, 0));
  EXPECT_CU_OK(driver_.cuMemFreeHost(plain));
  hold(first_);
  ASSERT_TRUE(soon([&] { return gates_[0].holds.load(); }));  // The seed could take the other one first.
  EXPECT_FALSE(runs(second_));
  ::unsetenv("FAKE_CUDA_HARSH");
}

}  // namespace
}  // namespace forebay::fake_cuda
