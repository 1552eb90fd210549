// The behaviour of a CUDA driver that forebay relies on, in the driver's terms. It runs on the fake, and by
// the same program on the driver and GPU of the machine: every difference between the two is the fake's to
// mend.
//
// The driver is the library that FOREBAY_LIBCUDA names, otherwise libcuda.so.1.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/fakes/cuda/driver_under_test.h"
#include "tests/fakes/cuda/fake_cuda.h"

namespace forebay::fake_cuda {
namespace {

using namespace forebay::cuda;  // NOLINT: the interface under test.

// PTX of two kernels; the fake goes by the names. `store(int* target, int value)`. `spin(const int* flag)`
// ends when the flag is not zero, or after five seconds, so that a test that fails leaves the GPU to others.
constexpr char kPtx[] = R"(.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 target, .param .u32 value) {
  .reg .b32 %r<2>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [target];
  ld.param.u32 %r1, [value];
  cvta.to.global.u64 %rd2, %rd1;
  st.global.u32 [%rd2], %r1;
  ret;
}
.visible .entry spin(.param .u64 flag) {
  .reg .pred %p<3>;
  .reg .b32 %r<2>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [flag];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u64 %rd3, %globaltimer;
again:
  ld.volatile.global.u32 %r1, [%rd2];
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra done;
  mov.u64 %rd4, %globaltimer;
  sub.u64 %rd5, %rd4, %rd3;
  setp.lt.u64 %p2, %rd5, 5000000000;
  @%p2 bra again;
done:
  ret;
}
)";

void store(const FakeLaunch&, void* const* arguments) {
  **static_cast<int**>(arguments[0]) = *static_cast<int*>(arguments[1]);
}
void spin(const FakeLaunch&, void* const* arguments) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  const auto& flag = **static_cast<const std::atomic<int>**>(arguments[0]);
  while (flag == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

constexpr std::size_t kStoreBytes[] = {sizeof(int*), sizeof(int)};
constexpr FakeKernel kKernelList[] = {{"store", store, 2, kStoreBytes}, {"spin", spin, 1, kStoreBytes}};
constexpr FakeKernelTable kKernels{kKernelList, 2};

class DriverConformance : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const char* const path = std::getenv("FOREBAY_LIBCUDA");
    void* const library = ::dlopen(path != nullptr ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing_ = ::dlerror();
      return;
    }
    driver_ = DriverUnderTest::open(path != nullptr ? path : "libcuda.so.1");
    fake_ = ::dlsym(library, "fake_cuda_reset") != nullptr;
    if (fake_) controls_ = FakeCuda::open(path);
  }

  void SetUp() override {
    if (driver_.library == nullptr) GTEST_SKIP() << "no CUDA driver: " << missing_;
    if (fake_) {
      controls_.reset();
      FakeOptions options;
      options.memory_bytes = 256u << 20;
      options.host_access = HostAccess::kDenied;
      options.quiet = true;
      ASSERT_EQ(controls_.configure(options), 0);
      controls_.register_kernels(kKernels);
    }
    const CuResult started = driver_.cuInit(0);
    if (!fake_ && started != CuResult::kSuccess) GTEST_SKIP() << "the CUDA driver does not start";
    ASSERT_CU_OK(started);
    ASSERT_CU_OK(driver_.cuDevicePrimaryCtxRetain(&context_, 0));
    ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
    properties_.type = CuMemAllocationType::kPinned;
    properties_.location = {CuMemLocationType::kDevice, 0};
    properties_.requested_handle_types = CuMemHandleType::kPosixFileDescriptor;
    ASSERT_CU_OK(driver_.cuMemGetAllocationGranularity(&granule_, &properties_, CuMemGranularity::kMinimum));
    ASSERT_CU_OK(driver_.cuStreamCreate(&stream_, kStreamNonBlocking));
    ASSERT_CU_OK(driver_.cuModuleLoadData(&module_, kPtx));
    ASSERT_CU_OK(driver_.cuModuleGetFunction(&spin_, module_, "spin"));
  }

  void TearDown() override {
    if (context_ == nullptr) return;
    EXPECT_CU_OK(driver_.cuModuleUnload(module_));
    EXPECT_CU_OK(driver_.cuStreamDestroy_v2(stream_));
    EXPECT_CU_OK(driver_.cuDevicePrimaryCtxRelease_v2(0));
    if (!fake_) return;
    const FakeAccount account = controls_.accounts();
    EXPECT_EQ(account.live_handles(), 0u);
    EXPECT_EQ(account.orphans, 0u);
    EXPECT_EQ(account.device_bytes, 0u);
    EXPECT_EQ(account.hazards, 0u);
  }

  CuMemHandle create(std::size_t bytes) {
    CuMemHandle handle = 0;
    EXPECT_CU_OK(driver_.cuMemCreate(&handle, bytes, &properties_, 0));
    return handle;
  }
  CuDevicePtr reserve(std::size_t bytes) {
    CuDevicePtr address = 0;
    EXPECT_CU_OK(driver_.cuMemAddressReserve(&address, bytes, 0, 0, 0));
    return address;
  }
  CuResult allow(CuDevicePtr address, std::size_t bytes) {
    const CuMemAccessDesc access{{CuMemLocationType::kDevice, 0}, CuMemAccessFlags::kReadWrite};
    return driver_.cuMemSetAccess(address, bytes, &access, 1);
  }
  unsigned read(CuDevicePtr address) {
    unsigned value = 0;
    EXPECT_CU_OK(driver_.cuMemcpyDtoH_v2(&value, address, sizeof(value)));
    return value;
  }

  // Holds streams by kernels until it is opened. A host function would not do: a driver may run those of all
  // streams on one thread.
  class Gate {
   public:
    explicit Gate(const DriverConformance& test) : test_(test) {
      EXPECT_CU_OK(driver_.cuMemHostAlloc(&page_, 4096, kHostAllocPortable | kHostAllocDeviceMap));
      EXPECT_CU_OK(driver_.cuMemHostGetDevicePointer_v2(&address_, page_, 0));
      *flag() = 0;
    }
    ~Gate() {
      release();
      EXPECT_CU_OK(driver_.cuCtxSynchronize());
      EXPECT_CU_OK(driver_.cuMemFreeHost(page_));
    }
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;
    void hold(CuStream stream) {
      void* arguments[] = {&address_};
      ASSERT_CU_OK(driver_.cuLaunchKernel(test_.spin_, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
    }
    void release() { *flag() = 1; }

   private:
    std::atomic<int>* flag() { return static_cast<std::atomic<int>*>(page_); }

    const DriverConformance& test_;
    void* page_ = nullptr;
    CuDevicePtr address_ = 0;
  };

  inline static DriverUnderTest driver_;
  inline static FakeCuda controls_;
  inline static bool fake_ = false;
  inline static std::string missing_;
  CuContext context_ = nullptr;
  CuMemAllocationProp properties_{};
  std::size_t granule_ = 0;
  CuStream stream_ = nullptr;
  CuModule module_ = nullptr;
  CuFunction spin_ = nullptr;
};

TEST_F(DriverConformance, TheDeviceSaysWhatItIs) {
  char name[64] = {};
  std::size_t bytes = 0, free = 0, total = 0;
  int version = 0, count = 0, virtual_memory = 0, major = 0;
  CuUuid uuid{};

  EXPECT_CU_OK(driver_.cuDriverGetVersion(&version));
  EXPECT_CU_OK(driver_.cuDeviceGetCount(&count));
  EXPECT_CU_OK(driver_.cuDeviceGetName(name, sizeof(name), 0));
  EXPECT_CU_OK(driver_.cuDeviceGetUuid_v2(&uuid, 0));
  EXPECT_CU_OK(driver_.cuDeviceTotalMem_v2(&bytes, 0));
  EXPECT_CU_OK(driver_.cuMemGetInfo_v2(&free, &total));
  EXPECT_CU_OK(
      driver_.cuDeviceGetAttribute(&virtual_memory, CuDeviceAttribute::kVirtualMemoryManagementSupported, 0));
  EXPECT_CU_OK(driver_.cuDeviceGetAttribute(&major, CuDeviceAttribute::kComputeCapabilityMajor, 0));

  EXPECT_GE(version, 11030);
  EXPECT_GE(count, 1);
  EXPECT_STRNE(name, "");
  EXPECT_EQ(bytes, total);
  EXPECT_LE(free, total);
  EXPECT_EQ(virtual_memory, 1);
  EXPECT_GE(major, 7);
  EXPECT_CU(kInvalidDevice, driver_.cuDeviceGetName(name, sizeof(name), count));
  CuDevice device = -1;
  EXPECT_CU(kInvalidDevice, driver_.cuDeviceGet(&device, count));
}

TEST_F(DriverConformance, ErrorsHaveNames) {
  const char* text = nullptr;
  ASSERT_CU_OK(driver_.cuGetErrorName(CuResult::kOutOfMemory, &text));
  EXPECT_STREQ(text, "CUDA_ERROR_OUT_OF_MEMORY");
  ASSERT_CU_OK(driver_.cuGetErrorString(CuResult::kOutOfMemory, &text));
  EXPECT_STREQ(text, "out of memory");
  EXPECT_CU(kInvalidValue, driver_.cuGetErrorName(static_cast<CuResult>(12345), &text));
  EXPECT_EQ(text, nullptr);
}

// --- contexts ---

TEST_F(DriverConformance, AThreadHasNoContextUntilItSetsOne) {
  CuDevicePtr known = 0;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&known, 16));
  std::thread([&] {
    CuContext current = context_;
    EXPECT_CU_OK(driver_.cuCtxGetCurrent(&current));
    EXPECT_EQ(current, nullptr);
    CuDevicePtr address = 0;
    EXPECT_CU(kInvalidContext, driver_.cuMemAlloc_v2(&address, 16));
    EXPECT_NE(driver_.cuMemGetAddressRange_v2(&address, nullptr, known), CuResult::kSuccess);
    ASSERT_CU_OK(driver_.cuCtxPushCurrent_v2(context_));
    EXPECT_CU_OK(driver_.cuMemGetAddressRange_v2(&address, nullptr, known));
    CuDevice device = -1;
    EXPECT_CU_OK(driver_.cuCtxGetDevice(&device));
    EXPECT_EQ(device, 0);
    EXPECT_CU_OK(driver_.cuCtxPopCurrent_v2(&current));
    EXPECT_EQ(current, context_);
    EXPECT_CU(kInvalidContext, driver_.cuCtxGetDevice(&device));
  }).join();
  EXPECT_CU_OK(driver_.cuMemFree_v2(known));
}

TEST_F(DriverConformance, ThePrimaryContextIsOne) {
  CuContext again = nullptr;
  unsigned flags = 0;
  int active = 0;
  ASSERT_CU_OK(driver_.cuDevicePrimaryCtxRetain(&again, 0));
  EXPECT_EQ(again, context_);
  ASSERT_CU_OK(driver_.cuDevicePrimaryCtxGetState(0, &flags, &active));
  EXPECT_EQ(active, 1);
  EXPECT_CU_OK(driver_.cuDevicePrimaryCtxRelease_v2(0));
  CuDevicePtr address = 0;
  EXPECT_CU_OK(driver_.cuMemAlloc_v2(&address, 16));
  EXPECT_CU_OK(driver_.cuMemFree_v2(address));
}

// --- memory ---

TEST_F(DriverConformance, AllocationsAreAlignedAndFreedOnce) {
  CuDevicePtr address = 0, base = 0;
  std::size_t bytes = 0;
  EXPECT_CU(kInvalidValue, driver_.cuMemAlloc_v2(&address, 0));
  EXPECT_CU(kOutOfMemory, driver_.cuMemAlloc_v2(&address, std::size_t{1} << 50));
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 1000));
  EXPECT_EQ(address % 256, 0u);
  EXPECT_CU_OK(driver_.cuMemGetAddressRange_v2(&base, &bytes, address + 999));
  EXPECT_EQ(base, address);
  EXPECT_EQ(bytes, 1000u);
  EXPECT_CU_OK(driver_.cuMemFree_v2(0));
  EXPECT_CU_OK(driver_.cuMemFree_v2(address));
  EXPECT_CU(kInvalidValue, driver_.cuMemFree_v2(address));
  EXPECT_CU(kNotFound, driver_.cuMemGetAddressRange_v2(&base, &bytes, address));
}

TEST_F(DriverConformance, CopiesAndFillsMoveTheBytes) {
  CuDevicePtr first = 0, second = 0;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&first, 4096));
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&second, 4096));
  std::vector<unsigned> host(1024), back(1024);
  for (unsigned i = 0; i < 1024; ++i) host[i] = i * 2654435761u;

  ASSERT_CU_OK(driver_.cuMemcpyHtoD_v2(first, host.data(), 4096));
  ASSERT_CU_OK(driver_.cuMemcpyDtoD_v2(second, first, 4096));
  ASSERT_CU_OK(driver_.cuMemcpyDtoH_v2(back.data(), second, 4096));
  EXPECT_EQ(back, host);

  ASSERT_CU_OK(driver_.cuMemsetD32Async(first, 0xDEADBEEF, 512, stream_));
  ASSERT_CU_OK(driver_.cuMemsetD16Async(first + 2048, 0x1234, 512, stream_));
  ASSERT_CU_OK(driver_.cuMemsetD8Async(first + 3072, 0x77, 1024, stream_));
  ASSERT_CU_OK(driver_.cuMemcpyAsync(second, first, 4096, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(read(second + 2044), 0xDEADBEEFu);
  EXPECT_EQ(read(second + 2048), 0x12341234u);
  EXPECT_EQ(read(second + 4092), 0x77777777u);

  EXPECT_CU(kInvalidValue, driver_.cuMemcpyAsync(first, 0, 16, stream_));
  EXPECT_CU(kInvalidValue, driver_.cuMemcpyHtoD_v2(0, host.data(), 16));
  EXPECT_CU_OK(driver_.cuMemcpyAsync(first, second, 0, stream_));
  EXPECT_CU_OK(driver_.cuMemFree_v2(first));
  EXPECT_CU_OK(driver_.cuMemFree_v2(second));
}

TEST_F(DriverConformance, OrdinaryHostMemoryIsTakenWhenACopyIsQueued) {
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
  Gate gate(*this);
  unsigned value = 1;
  gate.hold(stream_);
  // The call may wait for its stream, so somebody else opens the gate.
  std::promise<void> returned;
  std::thread opener([&] {
    returned.get_future().wait_for(std::chrono::milliseconds(100));
    gate.release();
  });
  EXPECT_CU_OK(driver_.cuMemcpyHtoDAsync_v2(address, &value, sizeof(value), stream_));
  value = 2;
  returned.set_value();
  opener.join();
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_CU_OK(driver_.cuStreamQuery(stream_));
  EXPECT_EQ(read(address), 1u);
  EXPECT_CU_OK(driver_.cuMemFree_v2(address));
}

TEST_F(DriverConformance, PageLockedMemoryIsUsedWhenTheCopyRuns) {
  CuDevicePtr address = 0;
  void* memory = nullptr;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
  ASSERT_CU_OK(driver_.cuMemHostAlloc(&memory, 4096, kHostAllocPortable));
  auto* const value = static_cast<std::atomic<unsigned>*>(memory);
  Gate gate(*this);
  *value = 1;
  gate.hold(stream_);
  ASSERT_CU_OK(driver_.cuMemcpyHtoDAsync_v2(address, memory, sizeof(unsigned), stream_));
  ASSERT_CU_OK(driver_.cuMemcpyDtoHAsync_v2(value + 1, address, sizeof(unsigned), stream_));
  *value = 2;
  gate.release();
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(value[1], 2u);
  EXPECT_CU_OK(driver_.cuMemFreeHost(memory));
  EXPECT_CU_OK(driver_.cuMemFree_v2(address));
}

TEST_F(DriverConformance, HostRangesAreRegisteredOnce) {
  void* const memory = ::mmap(nullptr, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  CuDevicePtr device = 0;
  EXPECT_CU(kHostMemoryNotRegistered, driver_.cuMemHostUnregister(memory));
  ASSERT_CU_OK(
      driver_.cuMemHostRegister_v2(memory, 2 * 4096, kHostRegisterPortable | kHostRegisterDeviceMap));
  EXPECT_CU(kHostMemoryAlreadyRegistered, driver_.cuMemHostRegister_v2(memory, 4096, kHostRegisterPortable));
  EXPECT_CU_OK(driver_.cuMemHostGetDevicePointer_v2(&device, memory, 0));
  EXPECT_NE(device, 0u);
  EXPECT_CU_OK(driver_.cuMemHostUnregister(memory));
  EXPECT_CU(kInvalidValue, driver_.cuMemHostRegister_v2(nullptr, 4096, 0));
  ::munmap(memory, 3 * 4096);
}

// --- virtual memory ---

TEST_F(DriverConformance, AChunkIsSeenThroughAllItsMappings) {
  const CuDevicePtr base = reserve(4 * granule_);
  const CuMemHandle chunk = create(granule_);
  ASSERT_CU_OK(driver_.cuMemMap(base, granule_, 0, chunk, 0));
  ASSERT_CU_OK(driver_.cuMemMap(base + 2 * granule_, granule_, 0, chunk, 0));
  ASSERT_CU_OK(allow(base, granule_));
  ASSERT_CU_OK(allow(base + 2 * granule_, granule_));
  ASSERT_CU_OK(driver_.cuMemsetD32_v2(base, 42, granule_ / 4));
  EXPECT_EQ(read(base + 3 * granule_ - 4), 42u);
  EXPECT_CU_OK(driver_.cuMemUnmap(base, granule_));
  EXPECT_CU_OK(driver_.cuMemRelease(chunk));
  EXPECT_EQ(read(base + 2 * granule_), 42u);  // It lives while it is mapped.
  EXPECT_CU_OK(driver_.cuMemUnmap(base + 2 * granule_, granule_));
  EXPECT_CU_OK(driver_.cuMemAddressFree(base, 4 * granule_));
}

TEST_F(DriverConformance, WhatCannotBeMappedIsRefused) {
  const CuDevicePtr base = reserve(4 * granule_);
  const CuMemHandle wide = create(2 * granule_);
  const CuMemHandle chunk = create(granule_);
  CuDevicePtr other = 0;
  CuMemHandle none = 0;

  EXPECT_CU(kInvalidValue, driver_.cuMemAddressReserve(&other, 0, 0, 0, 0));
  EXPECT_CU(kInvalidValue, driver_.cuMemAddressReserve(&other, granule_, 3, 0, 0));
  EXPECT_CU(kInvalidValue, driver_.cuMemCreate(&none, granule_ + 1, &properties_, 0));
  EXPECT_CU(kInvalidValue, driver_.cuMemMap(base, granule_, granule_, wide, 0));  // An offset.
  EXPECT_CU(kInvalidValue, driver_.cuMemMap(base + 512, granule_, 0, chunk, 0));  // Not aligned.
  EXPECT_CU(kInvalidValue, driver_.cuMemMap(base, 2 * granule_, 0, chunk, 0));    // More than there is.
  EXPECT_CU(kInvalidValue, driver_.cuMemMap(base + 3 * granule_, 2 * granule_, 0, wide, 0));  // Past the end.
  ASSERT_CU_OK(driver_.cuMemMap(base + granule_, 2 * granule_, 0, wide, 0));
  EXPECT_NE(driver_.cuMemMap(base + granule_, granule_, 0, chunk, 0), CuResult::kSuccess);      // Taken.
  EXPECT_NE(driver_.cuMemMap(base + 2 * granule_, granule_, 0, chunk, 0), CuResult::kSuccess);  // Taken.
  EXPECT_CU(kInvalidValue, driver_.cuMemUnmap(base + granule_, granule_));  // Part of a mapping.
  EXPECT_CU(kInvalidValue, allow(base, 3 * granule_));                      // A hole in front.
  EXPECT_CU(kInvalidValue, allow(base + granule_, 3 * granule_));           // A hole behind.
  EXPECT_CU(kInvalidValue, driver_.cuMemAddressFree(base, 2 * granule_));   // Not the reserved size.

  EXPECT_CU_OK(driver_.cuMemUnmap(base + granule_, 2 * granule_));
  EXPECT_CU_OK(driver_.cuMemRelease(wide));
  EXPECT_CU_OK(driver_.cuMemRelease(chunk));
  EXPECT_CU_OK(driver_.cuMemAddressFree(base, 4 * granule_));
}

TEST_F(DriverConformance, MemoryWithoutAccessIsNotCopied) {
  const CuDevicePtr base = reserve(granule_);
  const CuMemHandle chunk = create(granule_);
  ASSERT_CU_OK(driver_.cuMemMap(base, granule_, 0, chunk, 0));
  const unsigned value = 0;
  EXPECT_NE(driver_.cuMemcpyHtoD_v2(base, &value, sizeof(value)), CuResult::kSuccess);
  // A driver may refuse the call, or let the copy fault, which ends the context.
  if (driver_.cuCtxSynchronize() != CuResult::kSuccess) {
    ASSERT_FALSE(fake_);
    context_ = nullptr;
    return;
  }
  EXPECT_CU_OK(driver_.cuMemUnmap(base, granule_));
  EXPECT_CU_OK(driver_.cuMemRelease(chunk));
  EXPECT_CU_OK(driver_.cuMemAddressFree(base, granule_));
}

TEST_F(DriverConformance, OneAccessCallCoversManyMappings) {
  const CuDevicePtr base = reserve(3 * granule_);
  for (std::size_t i = 0; i < 3; ++i) {
    const CuMemHandle chunk = create(granule_);
    ASSERT_CU_OK(driver_.cuMemMap(base + i * granule_, granule_, 0, chunk, 0));
    ASSERT_CU_OK(driver_.cuMemRelease(chunk));
  }
  ASSERT_CU_OK(allow(base, 3 * granule_));
  ASSERT_CU_OK(driver_.cuMemsetD8_v2(base, 0x21, 3 * granule_));
  EXPECT_EQ(read(base + granule_ - 2), 0x21212121u);  // Across two of them.
  unsigned long long flags = 0;
  const CuMemLocation here{CuMemLocationType::kDevice, 0};
  EXPECT_CU_OK(driver_.cuMemGetAccess(&flags, &here, base + granule_));
  EXPECT_EQ(flags, static_cast<unsigned long long>(CuMemAccessFlags::kReadWrite));
  EXPECT_CU_OK(driver_.cuMemUnmap(base, 3 * granule_));
  EXPECT_CU_OK(driver_.cuMemAddressFree(base, 3 * granule_));
}

TEST_F(DriverConformance, AnExportedChunkIsTheSameMemory) {
  const CuDevicePtr base = reserve(2 * granule_);
  const CuMemHandle chunk = create(granule_);
  int file = -1;
  CuMemHandle imported = 0, retained = 0;
  ASSERT_CU_OK(driver_.cuMemExportToShareableHandle(&file, chunk, CuMemHandleType::kPosixFileDescriptor, 0));
  ASSERT_CU_OK(driver_.cuMemImportFromShareableHandle(&imported, reinterpret_cast<void*>(std::intptr_t{file}),
                                                      CuMemHandleType::kPosixFileDescriptor));
  ::close(file);
  ASSERT_CU_OK(driver_.cuMemMap(base, granule_, 0, chunk, 0));
  ASSERT_CU_OK(driver_.cuMemMap(base + granule_, granule_, 0, imported, 0));
  ASSERT_CU_OK(allow(base, 2 * granule_));
  ASSERT_CU_OK(driver_.cuMemsetD32_v2(base, 7, 1));
  EXPECT_EQ(read(base + granule_), 7u);
  ASSERT_CU_OK(driver_.cuMemRetainAllocationHandle(&retained, reinterpret_cast<void*>(base + 512)));
  CuMemAllocationProp properties{};
  EXPECT_CU_OK(driver_.cuMemGetAllocationPropertiesFromHandle(&properties, retained));
  EXPECT_EQ(properties.location.type, CuMemLocationType::kDevice);
  EXPECT_CU_OK(driver_.cuMemRelease(retained));
  EXPECT_CU_OK(driver_.cuMemUnmap(base, 2 * granule_));
  EXPECT_CU_OK(driver_.cuMemRelease(chunk));
  EXPECT_CU_OK(driver_.cuMemRelease(imported));
  EXPECT_CU_OK(driver_.cuMemAddressFree(base, 2 * granule_));
}

TEST_F(DriverConformance, PointersSayWhatTheyAre) {
  const CuDevicePtr base = reserve(2 * granule_);
  const CuMemHandle chunk = create(granule_);
  ASSERT_CU_OK(driver_.cuMemMap(base + granule_, granule_, 0, chunk, 0));
  ASSERT_CU_OK(allow(base + granule_, granule_));
  CuDevicePtr plain = 0, start = 0;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&plain, 64));
  CuMemoryType type{};
  int ordinal = -1;
  std::size_t bytes = 0;
  CuContext context = nullptr;

  EXPECT_CU_OK(driver_.cuPointerGetAttribute(&type, CuPointerAttribute::kMemoryType, base + granule_));
  EXPECT_EQ(type, CuMemoryType::kDevice);
  EXPECT_CU_OK(
      driver_.cuPointerGetAttribute(&ordinal, CuPointerAttribute::kDeviceOrdinal, base + granule_ + 5));
  EXPECT_EQ(ordinal, 0);
  EXPECT_CU_OK(driver_.cuPointerGetAttribute(&start, CuPointerAttribute::kRangeStartAddr, base + granule_));
  EXPECT_EQ(start, base);  // The reservation; cuMemGetAddressRange gives the mapping.
  EXPECT_CU_OK(driver_.cuMemGetAddressRange_v2(&start, &bytes, base + granule_ + 5));
  EXPECT_EQ(start, base + granule_);
  EXPECT_EQ(bytes, granule_);
  EXPECT_CU_OK(driver_.cuPointerGetAttribute(&context, CuPointerAttribute::kContext, plain));
  EXPECT_EQ(context, context_);
  EXPECT_CU(kInvalidValue, driver_.cuPointerGetAttribute(&type, CuPointerAttribute::kMemoryType,
                                                         reinterpret_cast<CuDevicePtr>(&type)));
  CuPointerAttribute wanted[] = {CuPointerAttribute::kMemoryType};
  void* data[] = {&type};
  EXPECT_CU_OK(driver_.cuPointerGetAttributes(1, wanted, data, reinterpret_cast<CuDevicePtr>(&type)));
  EXPECT_EQ(static_cast<int>(type), 0);

  EXPECT_CU_OK(driver_.cuMemFree_v2(plain));
  EXPECT_CU_OK(driver_.cuMemUnmap(base + granule_, granule_));
  EXPECT_CU_OK(driver_.cuMemRelease(chunk));
  EXPECT_CU_OK(driver_.cuMemAddressFree(base, 2 * granule_));
}

// --- order ---

TEST_F(DriverConformance, EventsMarkPointsInStreams) {
  CuEvent event = nullptr;
  CuStream other = nullptr;
  ASSERT_CU_OK(driver_.cuEventCreate(&event, kEventDisableTiming));
  ASSERT_CU_OK(driver_.cuStreamCreate(&other, kStreamNonBlocking));
  EXPECT_CU_OK(driver_.cuEventQuery(event));  // Never recorded: done.
  EXPECT_CU_OK(driver_.cuStreamWaitEvent(other, event, 0));
  Gate gate(*this);
  gate.hold(stream_);
  ASSERT_CU_OK(driver_.cuEventRecord(event, stream_));
  ASSERT_CU_OK(driver_.cuStreamWaitEvent(other, event, 0));
  EXPECT_CU(kNotReady, driver_.cuEventQuery(event));
  EXPECT_CU(kNotReady, driver_.cuStreamQuery(other));
  gate.release();
  EXPECT_CU_OK(driver_.cuEventSynchronize(event));
  EXPECT_CU_OK(driver_.cuStreamSynchronize(other));
  EXPECT_CU_OK(driver_.cuStreamDestroy_v2(other));
  EXPECT_CU_OK(driver_.cuEventDestroy_v2(event));
}

TEST_F(DriverConformance, TimeIsMeasuredBetweenTimedEventsOnly) {
  CuEvent timed[2], untimed = nullptr;
  float milliseconds = -1;
  for (CuEvent& event : timed) ASSERT_CU_OK(driver_.cuEventCreate(&event, kEventDefault));
  ASSERT_CU_OK(driver_.cuEventCreate(&untimed, kEventDisableTiming));
  EXPECT_CU(kInvalidHandle, driver_.cuEventElapsedTime(&milliseconds, timed[0], timed[1]));
  for (CuEvent event : {timed[0], timed[1], untimed}) ASSERT_CU_OK(driver_.cuEventRecord(event, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_CU_OK(driver_.cuEventElapsedTime(&milliseconds, timed[0], timed[1]));
  EXPECT_GE(milliseconds, 0);
  EXPECT_CU(kInvalidHandle, driver_.cuEventElapsedTime(&milliseconds, timed[0], untimed));
  for (CuEvent event : {timed[0], timed[1], untimed}) EXPECT_CU_OK(driver_.cuEventDestroy_v2(event));
}

TEST_F(DriverConformance, TheLegacyStreamWaitsForBlockingStreamsAndTheyForIt) {
  CuStream blocking = nullptr;
  ASSERT_CU_OK(driver_.cuStreamCreate(&blocking, kStreamDefault));
  std::atomic<int> ran{0};
  const CuHostFunction count = [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); };
  // That is not blocking takes no part; meanwhile the others would have run, if they could.
  const auto let_time_pass = [&] {
    for (int i = 0; i < 20; ++i) {
      ASSERT_CU_OK(driver_.cuLaunchHostFunc(
          stream_, [](void*) {}, nullptr));
      ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
    }
  };
  Gate first(*this), second(*this);
  first.hold(blocking);
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(nullptr, count, &ran));
  second.hold(legacy_stream());
  ASSERT_CU_OK(driver_.cuLaunchHostFunc(blocking, count, &ran));
  let_time_pass();
  EXPECT_EQ(ran, 0);
  first.release();
  while (ran == 0) std::this_thread::yield();
  let_time_pass();
  EXPECT_EQ(ran, 1);
  EXPECT_CU(kNotReady, driver_.cuStreamQuery(legacy_stream()));
  EXPECT_CU(kNotReady, driver_.cuStreamQuery(blocking));
  second.release();
  EXPECT_CU_OK(driver_.cuStreamSynchronize(blocking));
  EXPECT_EQ(ran, 2);
  EXPECT_CU_OK(driver_.cuStreamQuery(nullptr));
  EXPECT_CU_OK(driver_.cuStreamDestroy_v2(blocking));
}

TEST_F(DriverConformance, EachThreadHasADefaultStreamOfItsOwn) {
  Gate gate(*this);
  gate.hold(per_thread_stream());
  std::thread([&] {
    ASSERT_CU_OK(driver_.cuCtxSetCurrent(context_));
    ASSERT_CU_OK(driver_.cuLaunchHostFunc(
        per_thread_stream(), [](void*) {}, nullptr));
    EXPECT_CU_OK(driver_.cuStreamSynchronize(per_thread_stream()));
  }).join();
  EXPECT_CU(kNotReady, driver_.cuStreamQuery(per_thread_stream()));
  // The variants take a null stream for it.
  auto* const query = driver_.variant<cuStreamQuery_function>("cuStreamQuery_ptsz");
  ASSERT_NE(query, nullptr);
  EXPECT_CU(kNotReady, query(nullptr));
  gate.release();
  EXPECT_CU_OK(driver_.cuStreamSynchronize(per_thread_stream()));
  EXPECT_CU_OK(query(nullptr));
}

TEST_F(DriverConformance, AStreamIsGoneAfterItsDestruction) {
  CuStream other = nullptr;
  ASSERT_CU_OK(driver_.cuStreamCreateWithPriority(&other, kStreamNonBlocking, -1));
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; ++i) {
    ASSERT_CU_OK(driver_.cuLaunchHostFunc(
        other, [](void* count) { ++*static_cast<std::atomic<int>*>(count); }, &ran));
  }
  EXPECT_CU_OK(driver_.cuStreamDestroy_v2(other));
  EXPECT_CU_OK(driver_.cuCtxSynchronize());
  EXPECT_EQ(ran, 100);
}

TEST_F(DriverConformance, AStreamWaitsForAValueThatTheHostOrAnotherStreamWrites) {
  CuStream other = nullptr;
  void* page = nullptr;
  CuDevicePtr word = 0, address = 0;
  ASSERT_CU_OK(driver_.cuStreamCreate(&other, kStreamNonBlocking));
  ASSERT_CU_OK(driver_.cuMemHostAlloc(&page, 4096, kHostAllocPortable | kHostAllocDeviceMap));
  ASSERT_CU_OK(driver_.cuMemHostGetDevicePointer_v2(&word, page, 0));
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
  ASSERT_CU_OK(driver_.cuMemsetD32Async(address, 1, 1, stream_));
  auto* const value = static_cast<std::atomic<std::uint32_t>*>(page);
  *value = 0xFFFFFFFF;  // One less than zero: the difference counts.

  EXPECT_CU(kInvalidValue, driver_.cuStreamWaitValue32_v2(stream_, word + 1, 0, kWaitValueGeq));
  ASSERT_CU_OK(driver_.cuStreamWaitValue32_v2(stream_, word, 0, kWaitValueGeq));
  ASSERT_CU_OK(driver_.cuMemsetD32Async(address, 2, 1, stream_));
  EXPECT_CU(kNotReady, driver_.cuStreamQuery(stream_));
  *value = 0;
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(read(address), 2u);

  ASSERT_CU_OK(driver_.cuStreamWaitValue32_v2(stream_, word, 7, kWaitValueGeq));
  ASSERT_CU_OK(driver_.cuStreamWriteValue32_v2(other, word, 9, kWriteValueDefault));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(*value, 9u);
  EXPECT_CU_OK(driver_.cuMemFree_v2(address));
  EXPECT_CU_OK(driver_.cuMemFreeHost(page));
  EXPECT_CU_OK(driver_.cuStreamDestroy_v2(other));
}

// --- pools ---

TEST_F(DriverConformance, StreamOrderedAllocationsComeFromThePool) {
  CuMemoryPool pool = nullptr, current = nullptr;
  ASSERT_CU_OK(driver_.cuDeviceGetDefaultMemPool(&pool, 0));
  ASSERT_CU_OK(driver_.cuDeviceGetMemPool(&current, 0));
  EXPECT_EQ(current, pool);
  std::uint64_t used = 0, reserved = 0;
  CuDevicePtr first = 0, second = 0;
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&first, 1 << 20, stream_));
  ASSERT_CU_OK(driver_.cuMemsetD8Async(first, 1, 1 << 20, stream_));
  ASSERT_CU_OK(driver_.cuMemPoolGetAttribute(pool, CuMemPoolAttribute::kUsedMemCurrent, &used));
  EXPECT_EQ(used, 1u << 20);
  ASSERT_CU_OK(driver_.cuMemFreeAsync(first, stream_));
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&second, 1 << 20, stream_));
  EXPECT_EQ(second, first);  // On the same stream the order is certain.
  ASSERT_CU_OK(driver_.cuMemsetD8Async(second, 2, 1 << 20, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(read(second), 0x02020202u);
  ASSERT_CU_OK(driver_.cuMemFreeAsync(second, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  ASSERT_CU_OK(driver_.cuMemPoolTrimTo(pool, 0));
  ASSERT_CU_OK(driver_.cuMemPoolGetAttribute(pool, CuMemPoolAttribute::kReservedMemCurrent, &reserved));
  EXPECT_EQ(reserved, 0u);
}

TEST_F(DriverConformance, APoolOfOnesOwnKeepsWhatItIsTold) {
  CuMemPoolProps properties{};
  properties.type = CuMemAllocationType::kPinned;
  properties.location = {CuMemLocationType::kDevice, 0};
  CuMemoryPool pool = nullptr;
  ASSERT_CU_OK(driver_.cuMemPoolCreate(&pool, &properties));
  std::uint64_t threshold = ~std::uint64_t{0}, reserved = 0;
  ASSERT_CU_OK(driver_.cuMemPoolSetAttribute(pool, CuMemPoolAttribute::kReleaseThreshold, &threshold));
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuMemAllocFromPoolAsync(&address, 1 << 20, pool, stream_));
  ASSERT_CU_OK(driver_.cuMemFreeAsync(address, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  ASSERT_CU_OK(driver_.cuMemPoolGetAttribute(pool, CuMemPoolAttribute::kReservedMemCurrent, &reserved));
  EXPECT_GE(reserved, 1u << 20);
  EXPECT_CU_OK(driver_.cuMemPoolDestroy(pool));
}

// --- capture ---

TEST_F(DriverConformance, CapturedWorkRunsWhenTheGraphIsLaunched) {
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
  ASSERT_CU_OK(driver_.cuMemsetD32_v2(address, 1, 1));
  CuGraph graph = nullptr;
  CuGraphExec exec = nullptr;
  CuCaptureStatus status{};
  std::size_t nodes = 0;
  ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(stream_, CuCaptureMode::kThreadLocal));
  ASSERT_CU_OK(driver_.cuMemsetD32Async(address, 2, 1, stream_));
  EXPECT_CU_OK(driver_.cuStreamIsCapturing(stream_, &status));
  EXPECT_EQ(status, CuCaptureStatus::kActive);
  ASSERT_CU_OK(driver_.cuStreamEndCapture(stream_, &graph));
  EXPECT_EQ(read(address), 1u);
  EXPECT_CU_OK(driver_.cuGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 1u);
  ASSERT_CU_OK(driver_.cuGraphInstantiateWithFlags(&exec, graph, 0));
  ASSERT_CU_OK(driver_.cuGraphLaunch(exec, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(read(address), 2u);
  EXPECT_CU_OK(driver_.cuGraphExecDestroy(exec));
  EXPECT_CU_OK(driver_.cuGraphDestroy(graph));
  EXPECT_CU_OK(driver_.cuMemFree_v2(address));
}

TEST_F(DriverConformance, ACapturedFreeIsOfMemoryThatAGraphAllocated) {
  CuDevicePtr outside = 0, inside = 0;
  CuGraph graph = nullptr;
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&outside, 1 << 20, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(stream_, CuCaptureMode::kThreadLocal));
  EXPECT_CU(kInvalidValue, driver_.cuMemFreeAsync(outside, stream_));
  driver_.cuStreamEndCapture(stream_, &graph);  // It may have been invalidated.
  if (graph != nullptr) {
    EXPECT_CU_OK(driver_.cuGraphDestroy(graph));
  }
  ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(stream_, CuCaptureMode::kThreadLocal));
  ASSERT_CU_OK(driver_.cuMemAllocAsync(&inside, 1 << 20, stream_));
  EXPECT_CU_OK(driver_.cuMemFreeAsync(inside, stream_));
  EXPECT_CU(kInvalidValue, driver_.cuMemFreeAsync(inside, stream_));
  graph = nullptr;
  driver_.cuStreamEndCapture(stream_, &graph);
  if (graph != nullptr) {
    EXPECT_CU_OK(driver_.cuGraphDestroy(graph));
  }
  ASSERT_CU_OK(driver_.cuMemFreeAsync(outside, stream_));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
}

TEST_F(DriverConformance, WaitingForACapturingStreamEndsTheCapture) {
  CuGraph graph = nullptr;
  ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(stream_, CuCaptureMode::kThreadLocal));
  EXPECT_CU(kStreamCaptureUnsupported, driver_.cuStreamSynchronize(stream_));
  CuCaptureStatus status{};
  EXPECT_CU_OK(driver_.cuStreamIsCapturing(stream_, &status));
  EXPECT_EQ(status, CuCaptureStatus::kInvalidated);
  EXPECT_CU(kStreamCaptureInvalidated, driver_.cuStreamEndCapture(stream_, &graph));
  EXPECT_EQ(graph, nullptr);
  EXPECT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_CU(kIllegalState, driver_.cuStreamEndCapture(stream_, &graph));
}

TEST_F(DriverConformance, UnsafeCallsEndACaptureUnlessTheThreadIsRelaxed) {
  CuGraph graph = nullptr;
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(stream_, CuCaptureMode::kGlobal));
  CuCaptureMode mode = CuCaptureMode::kRelaxed;
  ASSERT_CU_OK(driver_.cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, CuCaptureMode::kGlobal);
  EXPECT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
  EXPECT_CU_OK(driver_.cuMemFree_v2(address));
  ASSERT_CU_OK(driver_.cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT_CU(kStreamCaptureUnsupported, driver_.cuMemAlloc_v2(&address, 64));
  EXPECT_CU(kStreamCaptureInvalidated, driver_.cuStreamEndCapture(stream_, &graph));
}

TEST_F(DriverConformance, TheLegacyStreamDoesNotMixWithACaptureOfABlockingStream) {
  CuStream blocking = nullptr;
  CuGraph graph = nullptr;
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
  ASSERT_CU_OK(driver_.cuStreamCreate(&blocking, kStreamDefault));
  ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(blocking, CuCaptureMode::kThreadLocal));
  EXPECT_CU(kStreamCaptureImplicit, driver_.cuMemsetD8Async(address, 0, 64, nullptr));
  EXPECT_CU(kStreamCaptureInvalidated, driver_.cuStreamEndCapture(blocking, &graph));
  EXPECT_CU(kStreamCaptureUnsupported, driver_.cuStreamBeginCapture_v2(nullptr, CuCaptureMode::kGlobal));
  // A thread's own default stream can be captured.
  ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(per_thread_stream(), CuCaptureMode::kThreadLocal));
  ASSERT_CU_OK(driver_.cuStreamEndCapture(per_thread_stream(), &graph));
  EXPECT_CU_OK(driver_.cuGraphDestroy(graph));
  EXPECT_CU_OK(driver_.cuStreamDestroy_v2(blocking));
  EXPECT_CU_OK(driver_.cuMemFree_v2(address));
}

TEST_F(DriverConformance, ForkedStreamsMustJoinTheCaptureAgain) {
  CuStream other = nullptr;
  CuEvent fork = nullptr, join = nullptr, outside = nullptr;
  CuGraph graph = nullptr;
  ASSERT_CU_OK(driver_.cuStreamCreate(&other, kStreamNonBlocking));
  for (CuEvent* event : {&fork, &join, &outside})
    ASSERT_CU_OK(driver_.cuEventCreate(event, kEventDisableTiming));
  const auto fork_and_work = [&] {
    ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(stream_, CuCaptureMode::kThreadLocal));
    ASSERT_CU_OK(driver_.cuEventRecord(fork, stream_));
    ASSERT_CU_OK(driver_.cuStreamWaitEvent(other, fork, 0));
    ASSERT_CU_OK(driver_.cuLaunchHostFunc(
        other, [](void*) {}, nullptr));
  };

  fork_and_work();
  ASSERT_CU_OK(driver_.cuEventRecord(join, other));
  ASSERT_CU_OK(driver_.cuStreamWaitEvent(stream_, join, 0));
  ASSERT_CU_OK(driver_.cuStreamEndCapture(stream_, &graph));
  EXPECT_CU_OK(driver_.cuGraphDestroy(graph));

  fork_and_work();
  EXPECT_CU(kStreamCaptureUnjoined, driver_.cuStreamEndCapture(stream_, &graph));

  ASSERT_CU_OK(driver_.cuEventRecord(outside, other));
  ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(stream_, CuCaptureMode::kThreadLocal));
  EXPECT_CU(kStreamCaptureIsolation, driver_.cuStreamWaitEvent(stream_, outside, 0));
  EXPECT_CU(kStreamCaptureInvalidated, driver_.cuStreamEndCapture(stream_, &graph));

  ASSERT_CU_OK(driver_.cuStreamBeginCapture_v2(stream_, CuCaptureMode::kThreadLocal));
  ASSERT_CU_OK(driver_.cuEventRecord(fork, stream_));
  EXPECT_CU(kCapturedEvent, driver_.cuEventQuery(fork));
  EXPECT_CU(kStreamCaptureInvalidated, driver_.cuStreamEndCapture(stream_, &graph));

  for (CuEvent event : {fork, join, outside}) EXPECT_CU_OK(driver_.cuEventDestroy_v2(event));
  EXPECT_CU_OK(driver_.cuStreamDestroy_v2(other));
}

// --- modules and launches ---

TEST_F(DriverConformance, LaunchesTakeTheValuesOfTheirArguments) {
  CuModule none = nullptr;
  CuFunction function = nullptr;
  CuDevicePtr address = 0;
  EXPECT_NE(driver_.cuModuleLoadData(&none, "no image at all"), CuResult::kSuccess);
  EXPECT_CU(kNotFound, driver_.cuModuleGetFunction(&function, module_, "no_such_kernel"));
  ASSERT_CU_OK(driver_.cuModuleGetFunction(&function, module_, "store"));
  ASSERT_CU_OK(driver_.cuMemAlloc_v2(&address, 64));
  Gate gate(*this);
  int value = 5;
  void* arguments[] = {&address, &value};
  const CuDevicePtr target = address;
  gate.hold(stream_);
  ASSERT_CU_OK(driver_.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream_, arguments, nullptr));
  value = 6;
  address = 0;
  gate.release();
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(read(target), 5u);
  EXPECT_CU(kInvalidValue,
            driver_.cuLaunchKernel(function, 0, 1, 1, 1, 1, 1, 0, stream_, arguments, nullptr));
  EXPECT_CU(kInvalidValue,
            driver_.cuLaunchKernel(function, 1, 1, 1, 2048, 1, 1, 0, stream_, arguments, nullptr));
  CuLaunchConfig config{1, 1, 1, 1, 1, 1, 0, stream_, nullptr, 0};
  address = target;
  ASSERT_CU_OK(driver_.cuLaunchKernelEx(&config, function, arguments, nullptr));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));
  EXPECT_EQ(read(target), 6u);
  EXPECT_CU_OK(driver_.cuMemFree_v2(target));
}

// --- entry points ---

TEST_F(DriverConformance, EntryPointsAreFoundByNameAndVersion) {
  int version = 0;
  ASSERT_CU_OK(driver_.cuDriverGetVersion(&version));
  for (const EntryPoint& row : kEntryPoints) {
    if (row.version > version) continue;
    void* found = nullptr;
    CuProcAddressQueryResult status{};
    ASSERT_CU_OK(driver_.cuGetProcAddress_v2(row.name, &found, row.version, kProcAddressDefault, &status))
        << row.symbol;
    EXPECT_EQ(status, CuProcAddressQueryResult::kSuccess) << row.symbol;
    EXPECT_EQ(found, ::dlsym(driver_.library, row.symbol)) << row.symbol;
    if (row.variant_symbol == nullptr || row.variant_version > version) continue;
    ASSERT_CU_OK(driver_.cuGetProcAddress_v2(row.name, &found, row.variant_version,
                                             kProcAddressPerThreadStream, &status));
    EXPECT_EQ(found, ::dlsym(driver_.library, row.variant_symbol)) << row.variant_symbol;
  }
  void* found = nullptr;
  CuProcAddressQueryResult status{};
  EXPECT_CU_OK(
      driver_.cuGetProcAddress_v2("cuNoSuchFunction", &found, version, kProcAddressDefault, &status));
  EXPECT_EQ(status, CuProcAddressQueryResult::kSymbolNotFound);
  EXPECT_EQ(found, nullptr);
  // Older than its per-thread variant: the legacy one.
  EXPECT_CU_OK(
      driver_.cuGetProcAddress_v2("cuMemcpyAsync", &found, 4000, kProcAddressPerThreadStream, &status));
  EXPECT_EQ(found, ::dlsym(driver_.library, "cuMemcpyAsync"));
  EXPECT_CU_OK(driver_.cuGetProcAddress_v2("cuMemCreate", &found, 10000, kProcAddressDefault, &status));
  EXPECT_EQ(status, CuProcAddressQueryResult::kVersionNotSufficient);
  EXPECT_CU(kInvalidValue,
            driver_.cuGetProcAddress_v2("cuInit", &found, version + 1000, kProcAddressDefault, &status));
}

TEST_F(DriverConformance, AChildMadeByForkHasNoDriver) {
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    ::_exit(driver_.cuDeviceGetCount(&count) == CuResult::kNotInitialized &&
                    driver_.cuInit(0) == CuResult::kNotInitialized
                ? 0
                : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// A driver that hangs must end the test that found it, and no other.
constexpr unsigned kLongestTestSeconds = 60;

// Runs each test in a process of its own. Returns how many failed.
int run_each_alone(const char* program) {
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  int run = 0, failed = 0;
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const std::string name = std::string(suite.name()) + "." + suite.GetTestInfo(t)->name();
      const std::string filter = "--gtest_filter=" + name;
      std::fflush(stdout);
      const pid_t child = ::fork();
      if (child == 0) {
        ::execl("/proc/self/exe", program, filter.c_str(), "--gtest_brief=1", static_cast<char*>(nullptr));
        ::_exit(127);
      }
      int status = -1;
      const bool ended = child > 0 && ::waitpid(child, &status, 0) == child;
      const bool hung = ended && WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
      ++run;
      if (ended && WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
      ++failed;
      std::printf("[  FAILED  ] %s%s\n", name.c_str(), hung ? ": it hung" : "");
    }
  }
  std::printf("[==========] %d tests, each in a process of its own: %d failed\n", run, failed);
  return failed;
}

}  // namespace
}  // namespace forebay::fake_cuda

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  // With a filter (CTest gives one) or for the list it is one process.
  const bool alone = testing::GTEST_FLAG(filter) != "*" || testing::GTEST_FLAG(list_tests);
  if (!alone) return forebay::fake_cuda::run_each_alone(argv[0]) == 0 ? 0 : 1;
  ::alarm(forebay::fake_cuda::kLongestTestSeconds);
  return RUN_ALL_TESTS();
}
