// PTX through the fake driver: modules without host builds are parsed when they are loaded, and executed when
// they run.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/fakes/cuda/driver_under_test.h"
#include "tests/fakes/cuda/fake_cuda.h"

namespace forebay::fake_cuda {
namespace {

using namespace forebay::cuda;  // NOLINT: the interface of the fake.

// By append: under tsan GCC 12 takes operator + for a write beyond a string, and warnings are errors there.
std::string module_of(const char* function) {
  std::string text = ".version 8.0\n.target sm_80\n.address_size 64\n";
  return text.append(function);
}

// reverse(target, count): each block of `count` threads writes the numbers of its threads in reverse, by way
// of dynamic shared memory, to its own part of the target.
constexpr char kReverse[] = R"(
.extern .shared .align 4 .b8 dynamic[];
.visible .entry reverse(.param .u64 target, .param .u32 count)
.maxntid 64
{
  .reg .b32 %r<9>;
  .reg .b64 %d<4>;
  ld.param.u64 %d1, [target];
  ld.param.u32 %r1, [count];
  cvta.to.global.u64 %d1, %d1;
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %ctaid.x;
  mad.lo.u32 %r4, %r2, 4, dynamic;
  st.shared.u32 [%r4], %r2;
  bar.sync 0;
  sub.u32 %r5, %r1, %r2;
  mad.lo.u32 %r5, %r5, 4, dynamic;
  ld.shared.u32 %r6, [%r5+-4];
  mad.lo.u32 %r7, %r3, %r1, %r2;
  mul.wide.u32 %d2, %r7, 4;
  add.u64 %d2, %d1, %d2;
  st.global.u32 [%d2], %r6;
  ret;
})";

// poke(address): writes 4 bytes there.
constexpr char kPoke[] = R"(
.visible .entry poke(.param .u64 address)
{
  .reg .b64 %d<2>;
  ld.param.u64 %d1, [address];
  st.global.u32 [%d1], 7;
  ret;
})";

class PtxDriver : public ::testing::Test {
 protected:
  PtxDriver() : fake_(FakeCuda::open(FAKE_CUDA_LIBRARY)), driver_(DriverUnderTest::open(FAKE_CUDA_LIBRARY)) {
    ::unsetenv("FAKE_CUDA_KERNELS");
    FakeOptions options;
    options.memory_bytes = 16u << 20;
    options.granularity = 64u << 10;
    options.host_access = HostAccess::kDenied;
    options.quiet = true;
    fake_.reset();
    EXPECT_EQ(fake_.configure(options), 0);
    EXPECT_CU_OK(driver_.cuInit(0));
    CuContext context = nullptr;
    EXPECT_CU_OK(driver_.cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT_CU_OK(driver_.cuCtxSetCurrent(context));
    EXPECT_CU_OK(driver_.cuStreamCreate(&stream_, kStreamNonBlocking));
  }
  ~PtxDriver() override { fake_.reset(); }

  CuFunction load(const std::string& text, const char* name) {
    CuModule module = nullptr;
    CuFunction function = nullptr;
    EXPECT_CU_OK(driver_.cuModuleLoadData(&module, text.c_str()));
    EXPECT_CU_OK(driver_.cuModuleGetFunction(&function, module, name));
    return function;
  }
  CuDevicePtr allocate(std::size_t bytes) {
    CuDevicePtr address = 0;
    EXPECT_CU_OK(driver_.cuMemAlloc_v2(&address, bytes));
    return address;
  }
  // Launches `poke` with the address, and returns the result of waiting for it.
  CuResult poke(CuDevicePtr address) {
    void* arguments[] = {&address};
    EXPECT_CU_OK(driver_.cuLaunchKernel(load(module_of(kPoke), "poke"), 1, 1, 1, 1, 1, 1, 0, stream_,
                                        arguments, nullptr));
    return driver_.cuStreamSynchronize(stream_);
  }

  FakeCuda fake_;
  DriverUnderTest driver_;
  CuStream stream_ = nullptr;
};

TEST_F(PtxDriver, ExecutesAKernelThatHasNoHostBuild) {
  const CuFunction function = load(module_of(kReverse), "reverse");
  CuDevicePtr target = allocate(3 * 48 * 4);
  unsigned count = 48;
  void* arguments[] = {&target, &count};

  ASSERT_CU_OK(driver_.cuLaunchKernel(function, 3, 1, 1, 48, 1, 1, 48 * 4, stream_, arguments, nullptr));
  ASSERT_CU_OK(driver_.cuStreamSynchronize(stream_));

  std::vector<unsigned> got(3 * 48);
  ASSERT_CU_OK(driver_.cuMemcpyDtoH_v2(got.data(), target, got.size() * 4));
  for (unsigned i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], 47 - i % 48);
  int threads = 0;
  ASSERT_CU_OK(driver_.cuFuncGetAttribute(&threads, CuFunctionAttribute::kMaxThreadsPerBlock, function));
  EXPECT_EQ(threads, 64);
  EXPECT_EQ(driver_.cuLaunchKernel(function, 1, 1, 1, 65, 1, 1, 0, stream_, arguments, nullptr),
            CuResult::kInvalidValue);
  EXPECT_EQ(fake_.accounts().hazards, 0u);
}

TEST_F(PtxDriver, RunsAHostBuildWhereThereIsOne) {
  static int ran = 0;
  static constexpr std::size_t kBytes[] = {sizeof(CuDevicePtr)};
  static constexpr FakeKernel kKernels[] = {
      {"poke", [](const FakeLaunch&, void* const*) { ++ran; }, 1, kBytes}};
  static constexpr FakeKernelTable kTable{kKernels, 1};
  fake_.register_kernels(kTable);

  EXPECT_EQ(poke(allocate(4)), CuResult::kSuccess);

  EXPECT_EQ(ran, 1);
}

TEST_F(PtxDriver, RefusesTextThatItDoesNotKnow) {
  std::string text = module_of(kPoke);
  text.replace(text.find("st.global.u32"), 13, "st.global.u33");
  CuModule module = nullptr;

  EXPECT_EQ(driver_.cuModuleLoadData(&module, text.c_str()), CuResult::kInvalidPtx);

  CuFunction function = nullptr;
  ASSERT_CU_OK(driver_.cuModuleLoadData(&module, module_of(kPoke).c_str()));
  EXPECT_EQ(driver_.cuModuleGetFunction(&function, module, "nothing"), CuResult::kNotFound);
}

TEST_F(PtxDriver, KeepsKernelsWithinTheBytesThatWereAllocated) {
  const CuDevicePtr block = allocate(100);
  EXPECT_EQ(poke(block + 96), CuResult::kSuccess);

  EXPECT_EQ(poke(block + 100), CuResult::kIllegalAddress);

  // The context has failed.
  CuDevicePtr another = 0;
  EXPECT_EQ(driver_.cuMemAlloc_v2(&another, 4), CuResult::kIllegalAddress);
  EXPECT_EQ(fake_.accounts().hazards, 1u);
}

TEST_F(PtxDriver, ReportsAnAddressThatIsNotAligned) {
  EXPECT_EQ(poke(allocate(100) + 2), CuResult::kMisalignedAddress);
  EXPECT_EQ(fake_.accounts().hazards, 1u);
}

TEST_F(PtxDriver, LetsKernelsUsePinnedHostMemory) {
  void* memory = nullptr;
  ASSERT_CU_OK(driver_.cuMemHostAlloc(&memory, 64, kHostAllocDeviceMap));
  CuDevicePtr address = 0;
  ASSERT_CU_OK(driver_.cuMemHostGetDevicePointer_v2(&address, memory, 0));

  EXPECT_EQ(poke(address), CuResult::kSuccess);

  EXPECT_EQ(*static_cast<unsigned*>(memory), 7u);
}

}  // namespace
}  // namespace forebay::fake_cuda
