// The cuda backend on the fake driver, beyond conformance: finding the driver, foreign streams, contexts
// and captures, the properties of chunks, and the end.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forebay/cuda_backend.h"
#include "forebay/cuda_devices.h"
#include "forebay/host_backend.h"
#include "forebay/kernel_launch.h"
#include "forebay/units.h"
#include "runtime/device/cuda/device.h"
#include "runtime/device/cuda/image_version.h"
#include "runtime/device/cuda/order_book.h"
#include "runtime/device/forwarding_backend.h"
#include "tests/device/cuda/fake_cuda_test.h"
#include "tests/fakes/cuda/abi.h"
#include "tests/support/gate.h"
#include "tests/support/process.h"
#include "tests/support/thread_state.h"

namespace forebay {
namespace {

using cuda::CuResult;

// The driver as the application around us uses it.
// clang-format off
#define FOREBAY_TEST_DRIVER(X)                                                                            \
  X(cuInit) X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease_v2) X(cuCtxSetCurrent) \
  X(cuCtxGetCurrent) X(cuStreamCreate) X(cuStreamDestroy_v2) X(cuStreamBeginCapture_v2)                   \
  X(cuStreamEndCapture) X(cuStreamIsCapturing) X(cuGraphDestroy) X(cuGraphGetNodes) X(cuMemGetAccess)     \
  X(cuMemRetainAllocationHandle) X(cuMemExportToShareableHandle) X(cuMemRelease)                          \
  X(cuThreadExchangeStreamCaptureMode) X(cuStreamGetPriority) X(cuMemGetInfo_v2)
// clang-format on
struct Application {
#define FOREBAY_TEST_MEMBER(symbol) cuda::symbol##_function* symbol = nullptr;
  FOREBAY_TEST_DRIVER(FOREBAY_TEST_MEMBER)
#undef FOREBAY_TEST_MEMBER

  explicit Application(const fake_cuda::FakeCuda& fake) {
#define FOREBAY_TEST_FIND(name) name = fake.symbol<cuda::name##_function>(#name);
    FOREBAY_TEST_DRIVER(FOREBAY_TEST_FIND)
#undef FOREBAY_TEST_FIND
  }

  cuda::CuContext retain(int ordinal) const {
    cuda::CuContext context = nullptr;
    EXPECT_EQ(cuInit(0), CuResult::kSuccess);
    EXPECT_EQ(cuDevicePrimaryCtxRetain(&context, ordinal), CuResult::kSuccess);
    return context;
  }
  cuda::CuContext current() const {
    cuda::CuContext context = nullptr;
    EXPECT_EQ(cuCtxGetCurrent(&context), CuResult::kSuccess);
    return context;
  }
};

constexpr std::size_t kGranule = 64u << 10;

class CudaBackendTest : public ::testing::Test {
 protected:
  CudaBackendTest() : fake_(fake_cuda::choose_fake()), application_(fake_) {
    ::setenv("FOREBAY_LOG", "info", 1);  // Before the first line, which fixes the level.
  }

  void start(fake_cuda::FakeOptions options = fake_cuda::strict_options()) {
    fake_cuda::start_fake(fake_, options);
  }
  std::unique_ptr<CudaBackend> make(CudaBackendOptions options = {}) {
    Result<std::unique_ptr<CudaBackend>> backend = CudaBackend::create(options);
    EXPECT_TRUE(backend.ok()) << backend.status().to_string();
    return backend.ok() ? std::move(backend).value() : nullptr;
  }
  // A chunk that is mapped and accessible.
  static DevicePtr map_chunk(Backend& backend) {
    const DevicePtr base = backend.reserve(kGranule, 0).value();
    const Chunk chunk = backend.chunk_create(kGranule).value();
    EXPECT_TRUE(backend.map(base, chunk).ok());
    EXPECT_TRUE(backend.set_access(base, kGranule).ok());
    EXPECT_TRUE(backend.chunk_destroy(chunk).ok());
    return base;
  }

  // By device.
  void expect_access(DevicePtr address, const std::vector<bool>& expected) const {
    for (int ordinal = 0; ordinal < static_cast<int>(expected.size()); ++ordinal) {
      const cuda::CuMemLocation location{cuda::CuMemLocationType::kDevice, ordinal};
      unsigned long long flags = 0;
      EXPECT_EQ(application_.cuMemGetAccess(&flags, &location, reinterpret_cast<std::uintptr_t>(address)),
                CuResult::kSuccess);
      const auto wanted = expected[static_cast<std::size_t>(ordinal)] ? cuda::CuMemAccessFlags::kReadWrite
                                                                      : cuda::CuMemAccessFlags::kNone;
      EXPECT_EQ(flags, static_cast<unsigned long long>(wanted)) << "device " << ordinal;
    }
  }

  fake_cuda::FakeCuda fake_;
  Application application_;
};

// --- finding the driver ---

// An event that was recorded before the failing call is a good one.
TEST(CudaOrder, AFailureCountsForItsCallAndLaterOnes) {
  CudaStreamState state;
  const std::uint64_t before = state.next_call();
  const std::uint64_t failing = state.next_call();
  const std::uint64_t after = state.next_call();
  state.fail(failing, Status(StatusCode::kInternal, "first"));
  state.fail(before, Status(StatusCode::kInternal, "reported later"));

  EXPECT_TRUE(state.failure(before).ok());
  EXPECT_EQ(state.failure(failing).message(), "first");
  EXPECT_EQ(state.failure(after).message(), "first");
}

TEST(CudaDriver, NamesTheVariableWhenItsLibraryIsMissing) {
  ::setenv("FOREBAY_LIBCUDA", "/nowhere/libcuda.so.1", 1);
  const Status status = CudaBackend::create({}).status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("FOREBAY_LIBCUDA"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("/nowhere/libcuda.so.1"), std::string::npos) << status.message();
  EXPECT_EQ(CudaBackend::device_count().status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(read_cuda_system().status().code(), StatusCode::kUnavailable);
}

TEST(CudaDriver, NamesWhatALibraryThatIsNoDriverLacks) {
  ::setenv("FOREBAY_LIBCUDA", "libc.so.6", 1);
  const Status status = CudaBackend::create({}).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("cuInit"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("FOREBAY_LIBCUDA"), std::string::npos) << status.message();
}

TEST_F(CudaBackendTest, FindsTheDriverAfterAFailureToo) {
  ::setenv("FOREBAY_LIBCUDA", "/nowhere/libcuda.so.1", 1);
  EXPECT_EQ(CudaBackend::device_count().status().code(), StatusCode::kUnavailable);
  ::setenv("FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA, 1);
  start();
  EXPECT_EQ(CudaBackend::device_count().value(), 1);
}

TEST_F(CudaBackendTest, ADriverWithoutDevicesIsNoErrorAndHasNoBackend) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 0;
  start(options);
  const Result<int> count = CudaBackend::device_count();
  if (count.ok()) {
    EXPECT_EQ(count.value(), 0);
  } else {  // A driver may refuse cuInit for want of a device.
    EXPECT_NE(count.status().message().find("CUDA_ERROR_NO_DEVICE"), std::string::npos);
  }
  const Status status = CudaBackend::create({}).status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("host backend"), std::string::npos) << status.message();
}

TEST_F(CudaBackendTest, RefusesADeviceThatIsNotThere) {
  start();
  const Status status = CudaBackend::create({.ordinal = 3}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("cuda:3: there is 1 device; give 0"), std::string::npos)
      << status.message();
  EXPECT_EQ(CudaBackend::create({.ordinal = -1}).status().code(), StatusCode::kInvalidArgument);
  const Status small = CudaBackend::create({.memory_bytes = kGranule - 1}).status();
  EXPECT_EQ(small.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(small.message().find(": a budget of 64.00 KiB is less than one chunk; give at least 64.00 KiB"),
            std::string::npos)
      << small.message();
  EXPECT_NE(CudaBackend::create({.memory_bytes = 1}).status().message().find("give at least 64.00 KiB"),
            std::string::npos);
  EXPECT_TRUE(CudaBackend::create({.memory_bytes = kGranule}).ok());

  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 3;
  start(options);
  EXPECT_EQ(CudaBackend::create({.ordinal = 3}).status().message(),
            "cannot make a backend on cuda:3: there are 3 devices; give 0 to 2");
}

// A caller acts by the kind of an error: it waits, asks for less, or ends the process.
TEST_F(CudaBackendTest, EachErrorOfTheDriverHasItsKind) {
  start();
  const auto backend = make();
  const auto expect_kind = [&](StatusCode code, std::initializer_list<CuResult> results, const char* remedy) {
    for (const CuResult result : results) {
      ASSERT_EQ(fake_.fail("cuEventCreate", 1, static_cast<int>(result)), 0);
      const Status status = backend->event_create().status();
      EXPECT_EQ(status.code(), code) << status.to_string();
      EXPECT_NE(status.message().find(remedy), std::string::npos) << status.message();
    }
  };
  using enum CuResult;
  expect_kind(StatusCode::kOutOfMemory, {kOutOfMemory}, "free some device memory");
  expect_kind(StatusCode::kInvalidArgument,
              {kInvalidValue, kInvalidHandle, kInvalidDevice, kNotFound, kNotMapped, kAlreadyMapped,
               kLaunchOutOfResources},
              "check the arguments");
  expect_kind(StatusCode::kInvalidArgument, {kInvalidContext, kContextIsDestroyed}, "belongs to this device");
  expect_kind(StatusCode::kInvalidArgument, {kHostMemoryAlreadyRegistered}, "pin each page once");
  expect_kind(StatusCode::kInvalidArgument, {kHostMemoryNotRegistered}, "the address that was pinned");
  expect_kind(StatusCode::kInvalidArgument, {kInvalidImage, kInvalidPtx, kInvalidSource}, "that is whole");
  expect_kind(StatusCode::kUnsupported,
              {kNoBinaryForGpu, kUnsupportedPtxVersion, kJitCompilerNotFound, kJitCompilationDisabled},
              "this device's architecture");
  expect_kind(StatusCode::kUnsupported, {kNotSupported, kCallRequiresNewerDriver, kPeerAccessUnsupported},
              "cannot do it");
  expect_kind(StatusCode::kUnavailable, {kNoDevice}, "CUDA_VISIBLE_DEVICES");
  expect_kind(StatusCode::kUnavailable, {kNotInitialized}, "after fork");
  expect_kind(StatusCode::kUnavailable, {kDeinitialized}, "the process is ending");
  expect_kind(StatusCode::kUnavailable, {kDeviceUnavailable}, "exclusively");
  expect_kind(StatusCode::kUnavailable,
              {kSystemNotReady, kSystemDriverMismatch, kCompatNotSupportedOnDevice, kStubLibrary,
               kDeviceNotLicensed, kMpsConnectionFailed, kMpsRpcFailure, kMpsServerNotReady,
               kMpsMaxClientsReached, kMpsMaxConnectionsReached},
              "installed and running");
  expect_kind(StatusCode::kUnavailable,
              {kStreamCaptureUnsupported, kStreamCaptureInvalidated, kStreamCaptureIsolation,
               kStreamCaptureImplicit, kStreamCaptureWrongThread, kCapturedEvent},
              "a CUDA graph is being captured");
  expect_kind(StatusCode::kInternal, {kNotPermitted}, "a host function must not call the driver");
  expect_kind(StatusCode::kTimeout, {kTimeout}, "dmesg");
  expect_kind(StatusCode::kIoError, {kOperatingSystem}, "ulimit -a");
  expect_kind(StatusCode::kInternal, {kUnknown, kIllegalState}, "documentation of this error");
  expect_kind(StatusCode::kInternal,
              {kEccUncorrectable, kNvlinkUncorrectable, kContained, kIllegalAddress, kLaunchTimeout, kAssert,
               kHardwareStackError, kIllegalInstruction, kMisalignedAddress, kInvalidAddressSpace, kInvalidPc,
               kLaunchFailed, kTensorMemoryLeak, kMpsClientTerminated, kExternalDevice},
              "the CUDA context is lost; end the process");
}

// --- facts ---

TEST_F(CudaBackendTest, SaysWhatItIs) {
  start();
  const auto backend = make({.room_bytes = 0});
  const Capabilities& capabilities = backend->capabilities();
  EXPECT_EQ(capabilities.kind, BackendKind::kCuda);
  EXPECT_EQ(std::string(capabilities.name).find("cuda:0 "), 0u) << capabilities.name;
  EXPECT_EQ(capabilities.granularity, kGranule);
  EXPECT_EQ(capabilities.memory_bytes, 64u << 20);
  EXPECT_FALSE(capabilities.host_accessible);
  EXPECT_GT(capabilities.multiprocessor_count, 0);
  // No more than there is.
  EXPECT_EQ(make({.memory_bytes = 1_GiB, .room_bytes = 0})->capabilities().memory_bytes, 64u << 20);
}

TEST_F(CudaBackendTest, ReadsTheSystem) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 2;
  options.driver_version = 12040;
  options.compute_capability = 89;
  start(options);
  const CudaSystem system = read_cuda_system().value();
  EXPECT_EQ(system.driver_path, FOREBAY_FAKE_LIBCUDA);
  EXPECT_EQ(system.driver_version, 12040);
  ASSERT_EQ(system.devices.size(), 2u);
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    const CudaDevice& device = system.devices[static_cast<std::size_t>(ordinal)];
    EXPECT_EQ(device.ordinal, ordinal);
    EXPECT_EQ(device.problem, "");
    EXPECT_FALSE(device.name.empty());
    EXPECT_EQ(device.uuid.size(), 40u) << device.uuid;
    EXPECT_EQ(device.uuid.substr(0, 4), "GPU-");
    for (std::size_t i = 0; i < device.uuid.size(); ++i) {
      const bool is_dash = i == 3 || i == 12 || i == 17 || i == 22 || i == 27;
      EXPECT_EQ(device.uuid[i] == '-', is_dash) << device.uuid;
    }
    EXPECT_EQ(device.compute_major, 8);
    EXPECT_EQ(device.compute_minor, 9);
    EXPECT_EQ(device.memory_bytes, 64u << 20);
    EXPECT_EQ(device.free_bytes, 64u << 20);
    EXPECT_EQ(device.granularity, kGranule);
    EXPECT_TRUE(device.has_posix_fd);
    EXPECT_TRUE(device.has_rdma);
    EXPECT_EQ(device.peer_ordinals, std::vector<int>{1 - ordinal});
  }
  EXPECT_NE(system.devices[0].uuid, system.devices[1].uuid);
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, ReadsWhatItCanOfADeviceThatFails) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 2;
  options.peers = false;
  start(options);
  ASSERT_EQ(fake_.fail("cuDeviceGetPCIBusId", 1, static_cast<int>(CuResult::kUnknown)), 0);
  ASSERT_EQ(fake_.fail("cuMemGetInfo", 1, static_cast<int>(CuResult::kUnknown)), 0);
  ASSERT_EQ(fake_.fail("cuDeviceGetName", 2, static_cast<int>(CuResult::kUnknown)), 0);

  const CudaSystem system = read_cuda_system().value();

  ASSERT_EQ(system.devices.size(), 2u);
  const std::string error = "CUDA_ERROR_UNKNOWN; see the CUDA driver's documentation of this error";
  EXPECT_EQ(system.devices[0].problem, "cannot read the properties of cuda:0: cuDeviceGetPCIBusId: " + error +
                                           "; cannot read the free memory of cuda:0: cuMemGetInfo: " + error);
  EXPECT_EQ(system.devices[0].peer_ordinals, std::vector<int>{});
  EXPECT_EQ(system.devices[1].ordinal, 1);
  EXPECT_EQ(system.devices[1].problem, "cannot read the properties of cuda:1: cuDeviceGetName: " + error);
}

TEST(CudaDevice, FindsItsNumaNode) {
  const testing::TemporaryDirectory sysfs;
  const std::string device = sysfs / "bus/pci/devices/0000:ab:00.0";
  std::filesystem::create_directories(device);
  std::ofstream(device + "/numa_node") << "1\n";
  EXPECT_EQ(read_numa_node(sysfs.path(), "0000:AB:00.0"), 1);
  EXPECT_EQ(read_numa_node(sysfs.path(), "0000:cd:00.0"), -1);
  EXPECT_EQ(read_numa_node(sysfs.path(), ""), -1);
  EXPECT_EQ(read_numa_node(sysfs.path(), "../devices/0000:ab:00.0"), -1);
  std::ofstream(device + "/numa_node") << "-1\n";
  EXPECT_EQ(read_numa_node(sysfs.path(), "0000:ab:00.0"), -1);
  for (const std::string text : {"nonsense\n", "-7\n", "1048577\n"}) {
    std::ofstream(device + "/numa_node") << text;
    EXPECT_EQ(read_numa_node(sysfs.path(), "0000:ab:00.0"), -1) << text;
  }
  std::filesystem::create_directories(sysfs / "bus/pci/devices/0000:fa:00.0");
  std::ofstream(sysfs / "bus/pci/devices/0000:fa:00.0/numa_node") << "3\n";
  EXPECT_EQ(read_numa_node(sysfs.path(), "0000:FA:00.0"), 3);
}

// --- memory ---

TEST_F(CudaBackendTest, KeepsItsBudget) {
  start();
  {
    const auto backend = make({.memory_bytes = 1_MiB});
    EXPECT_EQ(backend->memory_info().total_bytes, 1_MiB);
    const Chunk chunk = backend->chunk_create(512_KiB).value();
    const DevicePtr block = backend->alloc(256_KiB).value();
    EXPECT_EQ(backend->charged_bytes(), 768_KiB);
    EXPECT_EQ(backend->memory_info().free_bytes, 256_KiB);
    const Status status = backend->chunk_create(512_KiB).status();
    EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
    EXPECT_NE(status.message().find("256.00 KiB of 1.00 MiB free"), std::string::npos) << status.message();
    EXPECT_EQ(backend->alloc(512_KiB).status().code(), StatusCode::kOutOfMemory);
    EXPECT_TRUE(backend->free(block).ok());
    EXPECT_TRUE(backend->chunk_destroy(chunk).ok());
    EXPECT_EQ(backend->charged_bytes(), 0u);
  }
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, HasNoMoreFreeThanTheDeviceHas) {
  start();
  const auto backend = make({.memory_bytes = 60_MiB, .room_bytes = 0});
  const auto other = make({.room_bytes = 0});
  const Chunk taken = other->chunk_create(32_MiB).value();
  EXPECT_EQ(backend->memory_info().free_bytes, 32_MiB);
  EXPECT_TRUE(other->chunk_destroy(taken).ok());
}

TEST_F(CudaBackendTest, LeavesTheDriverItsRoom) {
  const auto fill = [](CudaBackend& backend) {
    Status refused;
    for (std::size_t count = 0; count < 100 && refused.ok(); ++count)
      refused = backend.chunk_create(1_MiB).status();
    return refused;
  };
  for (const std::size_t room : {0_MiB, 3_MiB, 8_MiB, 384_MiB}) {
    start();
    const std::size_t kept = std::min(room, 8_MiB);  // An eighth of the device.
    const auto backend = make({.room_bytes = room});
    EXPECT_EQ(backend->capabilities().memory_bytes, 64_MiB - kept);
    EXPECT_EQ(backend->memory_info().free_bytes, 64_MiB - kept);
    // Others use the device too.
    const auto other = make({.room_bytes = 0});
    const Chunk taken = other->chunk_create(16_MiB).value();

    const Status refused = fill(*backend);

    EXPECT_EQ(refused.code(), StatusCode::kOutOfMemory);
    EXPECT_EQ(backend->charged_bytes(), 48_MiB - kept);
    EXPECT_EQ(other->memory_info().free_bytes, kept);
    if (kept != 0) {
      EXPECT_NE(refused.message().find(format_bytes(kept) + " of 64.00 MiB free, and " + format_bytes(kept) +
                                       " are kept for the driver"),
                std::string::npos)
          << refused.message();
      EXPECT_NE(refused.message().find("CudaBackendOptions::room_bytes"), std::string::npos);
    }
    EXPECT_TRUE(other->chunk_destroy(taken).ok());
    EXPECT_EQ(fill(*backend).code(), StatusCode::kOutOfMemory);
    EXPECT_EQ(backend->charged_bytes(), 64_MiB - kept);
    // A new process can use a device that is full but for its room.
    EXPECT_EQ(CudaBackend::create({.room_bytes = room}).ok(), kept != 0);
  }
}

TEST_F(CudaBackendTest, UrgentStreamsHaveTheHighestPriority) {
  start();
  const auto backend = make();
  const auto priority = [&](Stream stream) {
    int found = 99;
    EXPECT_EQ(application_.cuCtxSetCurrent(application_.retain(0)), CuResult::kSuccess);
    EXPECT_EQ(application_.cuStreamGetPriority(static_cast<cuda::CuStream>(stream.handle), &found),
              CuResult::kSuccess);
    EXPECT_EQ(application_.cuDevicePrimaryCtxRelease_v2(0), CuResult::kSuccess);
    return found;
  };
  for (int round = 0; round < 2; ++round) {  // The second time from streams that were used before.
    const Stream urgent = backend->urgent_stream_create().value();
    const Stream plain = backend->stream_create().value();
    EXPECT_EQ(priority(urgent), -5);
    EXPECT_EQ(priority(plain), 0);
    EXPECT_TRUE(backend->stream_destroy(urgent).ok());
    EXPECT_TRUE(backend->stream_destroy(plain).ok());
  }
  EXPECT_EQ(fake_.call_count("cuStreamCreateWithPriority"), 1u);
  // One of each is kept: two of a kind are one of those and a new one.
  const Stream urgent[] = {backend->urgent_stream_create().value(), backend->urgent_stream_create().value()};
  for (const Stream stream : urgent) EXPECT_EQ(priority(stream), -5);
}

TEST_F(CudaBackendTest, SaysHowMuchIsFreeWhenTheDeviceIsFull) {
  start();
  const auto backend = make({.room_bytes = 0});
  for (const Status& status : {backend->chunk_create(65_MiB).status(), backend->alloc(65_MiB).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
    EXPECT_NE(status.message().find("CUDA_ERROR_OUT_OF_MEMORY: 64.00 MiB of 64.00 MiB free"),
              std::string::npos)
        << status.message();
  }
  EXPECT_EQ(backend->charged_bytes(), 0u);
  const Chunk chunk = backend->chunk_create(16_MiB).value();
  EXPECT_NE(backend->alloc(65_MiB).status().message().find("48.00 MiB of 64.00 MiB free"), std::string::npos);
  EXPECT_TRUE(backend->chunk_destroy(chunk).ok());
}

TEST_F(CudaBackendTest, KeepsItsStreamsAndEventsFromTheNextBackend) {
  start();
  auto first = make();
  const auto second = make();
  const Stream parked = first->stream_create().value();
  EXPECT_TRUE(first->stream_destroy(parked).ok());
  const Stream stream = second->stream_create().value();
  const Event event = second->event_create().value();
  EXPECT_NE(stream.handle, parked.handle);
  EXPECT_EQ(first->stream_create().value().handle, parked.handle);

  first.reset();

  EXPECT_TRUE(second->event_record(event, stream).ok());
  EXPECT_TRUE(second->event_synchronize(event).ok());
}

TEST_F(CudaBackendTest, EventsTellNoTimeUnlessTheyWereMadeForIt) {
  start();
  const auto backend = make();
  const Stream stream = backend->stream_create().value();
  const Event event = backend->event_create().value();
  EXPECT_TRUE(backend->event_record(event, stream).ok());
  EXPECT_TRUE(backend->event_synchronize(event).ok());
  EXPECT_FALSE(backend->elapsed(event, event).ok());
}

TEST_F(CudaBackendTest, GivesBackWhateverIsLeft) {
  start();
  alignas(4096) static std::array<std::byte, 4096> page;
  {
    const auto backend = make();
    map_chunk(*backend);
    static_cast<void>(backend->chunk_create(kGranule).value());
    static_cast<void>(backend->alloc(1).value());
    EXPECT_TRUE(backend->pin(page.data(), page.size()).ok());
    const Stream stream = backend->stream_create().value();
    EXPECT_TRUE(backend->event_record(backend->event_create().value(), stream).ok());
    static_cast<void>(backend->load_module(fake_cuda::kStoreImage).value());
    EXPECT_EQ(backend->live_handle_count(), 8u);
  }
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, APeerGetsAccessWhenItCopies) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 3;
  start(options);
  const auto owner = make({.ordinal = 1});
  const auto peer = make({.ordinal = 0});
  EXPECT_EQ(owner->peer_count(), 2);
  const DevicePtr source = map_chunk(*owner);
  const DevicePtr target = map_chunk(*peer);
  expect_access(source, {false, true, false});

  const Stream stream = peer->stream_create().value();
  ASSERT_TRUE(peer->copy_async(target, source, kGranule, stream).ok());
  ASSERT_TRUE(peer->stream_synchronize(stream).ok());

  expect_access(source, {true, true, false});
  expect_access(target, {true, false, false});
  expect_access(map_chunk(*owner), {true, true, false});
  const std::uint64_t calls = fake_.call_count("cuMemSetAccess");
  ASSERT_TRUE(peer->copy_async(source, target, kGranule, stream).ok());
  ASSERT_TRUE(peer->stream_synchronize(stream).ok());
  EXPECT_EQ(fake_.call_count("cuMemSetAccess"), calls);
  EXPECT_EQ(owner->open_to_peer(7).code(), StatusCode::kUnsupported);
}

TEST_F(CudaBackendTest, APeerGetsAccessWhenItWrites) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 2;
  start(options);
  const auto owner = make({.ordinal = 1});
  const auto peer = make({.ordinal = 0});
  const DevicePtr target = map_chunk(*owner);
  const DevicePtr source = map_chunk(*peer);
  // A mapping without access has none afterwards either.
  const DevicePtr closed = owner->reserve(kGranule, 0).value();
  const Chunk chunk = owner->chunk_create(kGranule).value();
  ASSERT_TRUE(owner->map(closed, chunk).ok());
  const Stream stream = peer->stream_create().value();

  ASSERT_TRUE(peer->copy_async(target, source, kGranule, stream).ok());
  ASSERT_TRUE(peer->stream_synchronize(stream).ok());

  expect_access(target, {true, true});
  expect_access(closed, {false, false});
}

TEST_F(CudaBackendTest, BackendsThatOpenToPeersGiveEachOtherAccess) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 3;
  start(options);
  const auto first = make({.ordinal = 0, .open_to_peers = true});
  const DevicePtr early = map_chunk(*first);
  const auto second = make({.ordinal = 2, .open_to_peers = true});
  const auto third = make({.ordinal = 1});
  expect_access(early, {true, false, true});
  expect_access(map_chunk(*second), {true, false, true});
  expect_access(map_chunk(*third), {false, true, false});
  const auto late = make({.ordinal = 0, .open_to_peers = true});
  expect_access(map_chunk(*third), {false, true, false});
}

TEST_F(CudaBackendTest, APeerThatCannotBeGivenAccessIsNamed) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 2;
  start(options);
  const auto owner = make({.ordinal = 1});
  const DevicePtr source = map_chunk(*owner);
  fake_.fail("cuMemSetAccess", 1, static_cast<int>(CuResult::kNotSupported));
  const Status status = owner->open_to_peer(0);
  EXPECT_NE(status.message().find("cannot give cuda:0 access on cuda:1"), std::string::npos)
      << status.message();
  expect_access(source, {false, true});
  EXPECT_TRUE(owner->open_to_peer(0).ok());
  expect_access(source, {true, true});
}

TEST_F(CudaBackendTest, MakesChunksThatCanBeExported) {
  start();
  const auto backend = make();
  EXPECT_TRUE(backend->chunks_have_posix_fd());
  EXPECT_TRUE(backend->chunks_have_rdma());
  const DevicePtr address = map_chunk(*backend);
  cuda::CuMemHandle handle = 0;
  ASSERT_EQ(application_.cuMemRetainAllocationHandle(&handle, address), CuResult::kSuccess);
  int file = -1;
  EXPECT_EQ(application_.cuMemExportToShareableHandle(&file, handle,
                                                      cuda::CuMemHandleType::kPosixFileDescriptor, 0),
            CuResult::kSuccess);
  EXPECT_GE(file, 0);
  ::close(file);
  EXPECT_EQ(application_.cuMemRelease(handle), CuResult::kSuccess);
}

TEST_F(CudaBackendTest, MakesPlainerChunksWhereATrialFails) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.gpu_direct_rdma = false;
  start(options);
  EXPECT_FALSE(make()->chunks_have_rdma());

  start();
  fake_.fail("cuMemCreate", 1, static_cast<int>(CuResult::kNotSupported));
  ::testing::internal::CaptureStderr();
  auto backend = make();
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(backend->chunks_have_posix_fd());
  EXPECT_FALSE(backend->chunks_have_rdma());
  EXPECT_NE(log.find("without GPUDirect RDMA, because"), std::string::npos) << log;
  EXPECT_NE(log.find("cuMemCreate: CUDA_ERROR_NOT_SUPPORTED"), std::string::npos) << log;
  map_chunk(*backend);
  backend.reset();
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, DoesNotTryPlainerChunksOnAFullDevice) {
  start();
  fake_.fail("cuMemCreate", 1, static_cast<int>(CuResult::kOutOfMemory));
  EXPECT_EQ(CudaBackend::create({}).status().code(), StatusCode::kOutOfMemory);
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, UnmapsOneAtATimeWhereTheDriverWantsThat) {
  start();
  {
    const auto backend = make();
    const DevicePtr base = backend->reserve(3 * kGranule, 0).value();
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(backend->map(base + i * kGranule, backend->chunk_create(kGranule).value()).ok());
    }
    const std::uint64_t before = fake_.call_count("cuMemUnmap");
    fake_.fail("cuMemUnmap", 1, static_cast<int>(CuResult::kInvalidValue));
    EXPECT_TRUE(backend->unmap(base, 3 * kGranule).ok());
    EXPECT_EQ(fake_.call_count("cuMemUnmap") - before, 4u);
    EXPECT_TRUE(backend->release(base, 3 * kGranule).ok());
    // There is nothing to take apart where there is one.
    const DevicePtr one = map_chunk(*backend);
    fake_.fail("cuMemUnmap", 1, static_cast<int>(CuResult::kInvalidValue));
    EXPECT_EQ(backend->unmap(one, kGranule).code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(backend->unmap(one, kGranule).ok());
  }
  fake_cuda::expect_nothing_left(fake_);
}

// As destructors do, which have nobody to tell.
TEST_F(CudaBackendTest, TellsAtItsEndWhatRefusalNobodyAskedAbout) {
  start();
  auto backend = make();
  const Chunk chunk = backend->chunk_create(kGranule).value();
  fake_.fail("cuCtxSetCurrent", 1, static_cast<int>(CuResult::kUnknown));
  static_cast<void>(backend->chunk_destroy(chunk));
  fake_.fail("cuMemRelease", 1, static_cast<int>(CuResult::kNotSupported));
  static_cast<void>(backend->chunk_destroy(chunk));

  ::testing::internal::CaptureStderr();
  backend.reset();
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_NE(log.find("1 handles were not given back"), std::string::npos) << log;
  EXPECT_NE(log.find("cuCtxSetCurrent: CUDA_ERROR_UNKNOWN"), std::string::npos) << log;
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, SaysNothingAtItsEndOfARefusalThatWasTriedAgain) {
  start();
  auto backend = make();
  const Chunk chunk = backend->chunk_create(kGranule).value();
  fake_.fail("cuMemRelease", 1, static_cast<int>(CuResult::kUnknown));
  EXPECT_FALSE(backend->chunk_destroy(chunk).ok());
  EXPECT_TRUE(backend->chunk_destroy(chunk).ok());

  ::testing::internal::CaptureStderr();
  backend.reset();

  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(CudaBackendTest, TellsMemoryPinnedByOthersFromItsOwn) {
  start();
  const auto backend = make();
  const auto other = make();
  alignas(4096) static std::array<std::byte, 8192> pages;
  ASSERT_TRUE(other->pin(pages.data(), 4096).ok());
  const Status status = backend->pin(pages.data(), 8192);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"), std::string::npos)
      << status.message();
  EXPECT_EQ(backend->live_handle_count(), 0u);
  EXPECT_TRUE(other->unpin(pages.data()).ok());
}

// --- among an application's streams, contexts and captures ---

TEST_F(CudaBackendTest, LeavesTheThreadsContextAsItWas) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 2;
  start(options);
  const cuda::CuContext other = application_.retain(1);
  {
    const auto backend = make();
    EXPECT_EQ(application_.current(), nullptr);
    static_cast<void>(backend->alloc(512).value());
    EXPECT_EQ(application_.current(), nullptr);
    ASSERT_EQ(application_.cuCtxSetCurrent(other), CuResult::kSuccess);
    const Stream stream = backend->stream_create().value();
    EXPECT_TRUE(backend->fill_async(map_chunk(*backend), 1, kGranule, stream).ok());
    EXPECT_TRUE(backend->stream_synchronize(stream).ok());
    EXPECT_EQ(application_.current(), other);
  }
  EXPECT_EQ(application_.current(), other);
  ASSERT_EQ(application_.cuCtxSetCurrent(nullptr), CuResult::kSuccess);
  EXPECT_EQ(application_.cuDevicePrimaryCtxRelease_v2(1), CuResult::kSuccess);
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, AFunctionCalledInItsContextFindsThatAndTheThreadKeepsItsOwn) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.device_count = 2;
  start(options);
  const cuda::CuContext mine = application_.retain(0);
  const cuda::CuContext other = application_.retain(1);
  ASSERT_EQ(application_.cuCtxSetCurrent(other), CuResult::kSuccess);
  {
    const auto backend = make();
    auto question = std::pair(&application_, cuda::CuContext());
    const HostFunction ask = [](void* argument) {
      auto& [application, found] = *static_cast<decltype(question)*>(argument);
      found = application->current();
    };
    EXPECT_TRUE(backend->call_in_context(ask, &question).ok());
    EXPECT_EQ(question.second, mine);
    EXPECT_EQ(application_.current(), other);
  }
  ASSERT_EQ(application_.cuCtxSetCurrent(nullptr), CuResult::kSuccess);
  for (const int device : {0, 1})
    EXPECT_EQ(application_.cuDevicePrimaryCtxRelease_v2(device), CuResult::kSuccess);
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, WorksOnTheApplicationsStreams) {
  start();
  const cuda::CuContext context = application_.retain(0);
  ASSERT_EQ(application_.cuCtxSetCurrent(context), CuResult::kSuccess);
  cuda::CuStream own = nullptr;
  ASSERT_EQ(application_.cuStreamCreate(&own, cuda::kStreamDefault), CuResult::kSuccess);
  const auto backend = make();
  const DevicePtr block = backend->alloc(4096).value();
  const Event event = backend->event_create().value();
  for (const Stream stream : {Stream{own}, CudaBackend::default_stream(), CudaBackend::per_thread_stream()}) {
    std::atomic<int> called{0};
    std::array<std::byte, 4096> found{};
    EXPECT_TRUE(backend->fill_async(block, 0x3D, 4096, stream).ok());
    const HostFunction count = [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); };
    EXPECT_TRUE(backend->call_host(stream, count, &called).ok());
    EXPECT_TRUE(backend->event_record(event, stream).ok());
    EXPECT_TRUE(backend->event_synchronize(event).ok());
    EXPECT_EQ(fake_.accounts().spinning_waits, 0u);  // The host's cores have other work.
    EXPECT_EQ(called, 1);
    EXPECT_TRUE(backend->copy_async(found.data(), block, 4096, stream).ok());
    EXPECT_TRUE(backend->stream_synchronize(stream).ok());
    EXPECT_EQ(found[4095], std::byte{0x3D});
    EXPECT_EQ(backend->stream_destroy(stream).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(application_.cuStreamDestroy_v2(own), CuResult::kSuccess);
}

TEST_F(CudaBackendTest, HostFunctionsRunOnTheDriversThreadWhereStreamsCannotWaitForValues) {
  start();
  {
    const auto backend = make();
    const Stream stream = backend->stream_create().value();
    ASSERT_EQ(fake_.fail("cuStreamWaitValue32", 1, static_cast<int>(CuResult::kNotSupported)), 0);
    std::vector<int> order;
    std::pair<std::vector<int>*, int> calls[] = {{&order, 0}, {&order, 1}, {&order, 2}};
    const HostFunction append = [](void* argument) {
      const auto& [numbers, number] = *static_cast<std::pair<std::vector<int>*, int>*>(argument);
      numbers->push_back(number);
    };
    ::testing::internal::CaptureStderr();
    for (auto& call : calls) ASSERT_TRUE(backend->call_host(stream, append, &call).ok());
    ASSERT_TRUE(backend->stream_synchronize(stream).ok());
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(fake_.call_count("cuStreamWaitValue32"), 1u);
    EXPECT_NE(log.find("host functions run on the driver's thread"), std::string::npos) << log;
  }
  fake_cuda::expect_nothing_left(fake_);
}

// More streams than a page has words for, one after another and at once, some of them ended.
TEST_F(CudaBackendTest, ManyStreamsHaveHostFunctions) {
  start();
  {
    const auto backend = make();
    const HostFunction add = [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); };
    std::atomic<int> called{0};
    for (int round = 0; round < 3; ++round) {
      std::vector<Stream> streams;
      for (int i = 0; i < 150; ++i) streams.push_back(backend->stream_create().value());
      for (const Stream stream : streams) {
        ASSERT_TRUE(backend->call_host(stream, add, &called).ok());
        ASSERT_TRUE(backend->call_host(stream, add, &called).ok());
      }
      for (const Stream stream : streams) ASSERT_TRUE(backend->stream_destroy(stream).ok());
      EXPECT_EQ(called, 300 * (round + 1));
    }
  }
  fake_cuda::expect_nothing_left(fake_);
}

// The word on which a stream waits goes to another stream when the first one is destroyed.
TEST_F(CudaBackendTest, AStreamWithTheWordOfADestroyedOneWaitsForItsHostFunction) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  // A stream's host function is called when all that older streams can do is done.
  options.callback_threads = 1;
  start(options);
  {
    const auto backend = make();
    constexpr std::size_t kKeptStreams = 64;
    std::vector<Stream> streams;
    for (std::size_t i = 0; i < kKeptStreams; ++i) streams.push_back(backend->stream_create().value());
    const Stream destroyed = backend->stream_create().value();
    const Stream younger = backend->stream_create().value();
    const HostFunction nothing = [](void*) {};
    ASSERT_TRUE(backend->call_host(destroyed, nothing, nullptr).ok());
    for (const Stream stream : streams) ASSERT_TRUE(backend->stream_destroy(stream).ok());
    ASSERT_TRUE(backend->stream_destroy(destroyed).ok());
    EXPECT_EQ(fake_.call_count("cuStreamDestroy"), 1u);
    const Stream stream = backend->stream_create().value();
    const Event event = backend->event_create().value();
    testing::Gate gate;

    ASSERT_TRUE(backend->call_host(stream, &testing::Gate::wait, &gate).ok());
    ASSERT_TRUE(backend->event_record(event, stream).ok());
    ASSERT_TRUE(backend->call_host(younger, nothing, nullptr).ok());
    ASSERT_TRUE(backend->stream_synchronize(younger).ok());

    EXPECT_FALSE(backend->event_query(event).value()) << "the stream did not wait for its host function";
    gate.open();
    EXPECT_TRUE(backend->event_synchronize(event).ok());
    EXPECT_TRUE(backend->event_destroy(event).ok());
    for (const Stream left : {stream, younger}) EXPECT_TRUE(backend->stream_destroy(left).ok());
  }
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, TheProcessHasAsManyHardwareQueuesAsThereAreUnlessTheUserChose) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto connections_with = [&](const char* chosen) {
    if (chosen != nullptr) ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", chosen, 1);
    start();
    make();
    std::fprintf(stderr, "connections %s\n", std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"));
    std::_Exit(0);
  };
  ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  EXPECT_EXIT(connections_with(nullptr), ::testing::ExitedWithCode(0), "connections 32");
  EXPECT_EXIT(connections_with("4"), ::testing::ExitedWithCode(0), "connections 4");
}

// The variable would do nothing, and programs that it starts would get it.
TEST_F(CudaBackendTest, ADriverThatRunsAlreadyIsAskedForNoHardwareQueues) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto make_in_a_program_that_uses_cuda = [&] {
    ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    start();
    EXPECT_EQ(application_.cuInit(0), CuResult::kSuccess);
    make();
    std::fprintf(stderr, "asked %d\n", std::getenv("CUDA_DEVICE_MAX_CONNECTIONS") != nullptr);
    std::_Exit(0);
  };
  EXPECT_EXIT(make_in_a_program_that_uses_cuda(), ::testing::ExitedWithCode(0), "asked 0");
}

TEST_F(CudaBackendTest, ItsStreamsDoNotWaitForTheDefaultStream) {
  start();
  const auto backend = make();
  testing::Gate gate;
  ASSERT_TRUE(backend->call_host(CudaBackend::default_stream(), &testing::Gate::wait, &gate).ok());
  const DevicePtr block = backend->alloc(64).value();

  for (const Stream stream : {backend->stream_create().value(), backend->urgent_stream_create().value()}) {
    EXPECT_TRUE(backend->fill_async(block, 1, 64, stream).ok());
    EXPECT_TRUE(backend->stream_synchronize(stream).ok());  // Waits for ever if the stream does.
  }

  gate.open();
  EXPECT_TRUE(backend->stream_synchronize(CudaBackend::default_stream()).ok());
}

// A signal handler of the program must not run in the middle of a host function of an engine.
TEST_F(CudaBackendTest, HostFunctionsGetNoSignals) {
  start();
  const auto backend = make();
  const Stream stream = backend->stream_create().value();
  const HostFunction ask = [](void* mask) {
    ::pthread_sigmask(SIG_SETMASK, nullptr, static_cast<sigset_t*>(mask));
  };
  sigset_t none, before, after, during;
  ::sigemptyset(&none);
  ::sigemptyset(&during);
  ::pthread_sigmask(SIG_SETMASK, &none, &before);

  ASSERT_TRUE(backend->call_host(stream, ask, &during).ok());
  ASSERT_TRUE(backend->stream_synchronize(stream).ok());

  ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGCHLD}) {
    EXPECT_EQ(::sigismember(&during, signal), 1) << signal;
    EXPECT_EQ(::sigismember(&after, signal), 0) << "the caller's own are blocked: " << signal;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST_F(CudaBackendTest, TheThreadsOfHostFunctionsEndWithTheirBackend) {
  start();
  auto backend = make();
  const HostFunction tell = [](void* number) { *static_cast<pid_t*>(number) = ::gettid(); };
  pid_t numbers[3] = {};
  for (pid_t& number : numbers) {
    const Stream stream = backend->stream_create().value();
    ASSERT_TRUE(backend->call_host(stream, tell, &number).ok());
    ASSERT_TRUE(backend->stream_synchronize(stream).ok());
  }

  backend.reset();

  for (const pid_t number : numbers) {
    ASSERT_NE(number, 0);
    while (std::filesystem::exists("/proc/self/task/" + std::to_string(number))) std::this_thread::yield();
  }
}

// Another thread may be walking along the list of variables while the driver is loaded.
TEST_F(CudaBackendTest, TheEnvironmentThatOtherThreadsReadStaysAsItIs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto load = [&] {
    start();
    ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    ::setenv("FOREBAY_TEST", "1", 1);  // From now on setenv would free the list.
    char** const list = environ;
    std::vector<char*> before;
    for (char** entry = list; *entry != nullptr; ++entry) before.push_back(*entry);
    before.push_back(nullptr);
    make();
    const bool is_added = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS") != nullptr;
    const bool is_kept = std::equal(before.begin(), before.end(), list);
    std::fprintf(stderr, "added %d kept %d\n", is_added, is_kept);
    std::_Exit(0);
  };
  EXPECT_EXIT(load(), ::testing::ExitedWithCode(0), "added 1 kept 1");
}

TEST_F(CudaBackendTest, AFailureOnTheApplicationsStreamStaysWithIt) {
  start();
  const auto backend = make();
  const Stream stream = CudaBackend::default_stream();
  const HostFunction call = [](void* other) { static_cast<Backend*>(other)->memory_info(); };
  ASSERT_TRUE(backend->call_host(stream, call, backend.get()).ok());
  const Status status = backend->stream_synchronize(stream);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("Backend::memory_info"), std::string::npos) << status.message();
  EXPECT_EQ(fake_.accounts().forbidden_calls, 0u);  // It was stopped before the driver.

  const Event event = backend->event_create().value();
  ASSERT_TRUE(backend->event_record(event, stream).ok());
  EXPECT_EQ(backend->event_synchronize(event).code(), StatusCode::kInternal);
  ASSERT_TRUE(backend->event_record(event, CudaBackend::per_thread_stream()).ok());
  EXPECT_TRUE(backend->event_synchronize(event).ok()) << "recorded again, it has nothing of that stream";
}

TEST_F(CudaBackendTest, BackendsOfOneDeviceUseEachOthersStreamsAndEvents) {
  start();
  {
    const auto first = make();
    const auto second = make();
    const Stream stream = first->stream_create().value();
    const Stream other = second->stream_create().value();
    const Event event = first->event_create().value();
    const DevicePtr block = map_chunk(*first);
    EXPECT_TRUE(first->fill_async(block, 0x17, kGranule, stream).ok());
    EXPECT_TRUE(first->event_record(event, stream).ok());
    EXPECT_TRUE(second->stream_wait(other, event).ok());
    std::byte found{};
    EXPECT_TRUE(second->copy_async(&found, block, 1, other).ok());
    EXPECT_TRUE(second->stream_synchronize(other).ok());
    EXPECT_EQ(found, std::byte{0x17});
    EXPECT_TRUE(second->stream_synchronize(stream).ok());
    EXPECT_EQ(second->stream_destroy(stream).code(), StatusCode::kInvalidArgument);
  }
  fake_cuda::expect_nothing_left(fake_);
}

TEST_F(CudaBackendTest, GoesOnWhileTheApplicationCaptures) {
  start();
  const cuda::CuContext context = application_.retain(0);
  ASSERT_EQ(application_.cuCtxSetCurrent(context), CuResult::kSuccess);
  cuda::CuStream captured = nullptr;
  ASSERT_EQ(application_.cuStreamCreate(&captured, cuda::kStreamNonBlocking), CuResult::kSuccess);
  const auto backend = make();
  const DevicePtr block = backend->alloc(4096).value();
  const Stream stream = backend->stream_create().value();
  const Event event = backend->event_create().value();
  alignas(4096) static std::array<std::byte, 4096> page;
  ASSERT_EQ(application_.cuStreamBeginCapture_v2(captured, cuda::CuCaptureMode::kGlobal), CuResult::kSuccess);

  // The calls of an allocator, in the middle of it.
  const DevicePtr base = map_chunk(*backend);
  EXPECT_TRUE(backend->fill_async(base, 1, kGranule, stream).ok());
  EXPECT_TRUE(backend->event_record(event, stream).ok());
  EXPECT_TRUE(backend->event_query(event).ok());
  EXPECT_TRUE(backend->event_synchronize(event).ok());
  EXPECT_TRUE(backend->stream_synchronize(stream).ok());
  EXPECT_TRUE(backend->unmap(base, kGranule).ok());
  EXPECT_TRUE(backend->release(base, kGranule).ok());
  EXPECT_TRUE(backend->free(backend->alloc(4096).value()).ok());
  EXPECT_TRUE(backend->pin(page.data(), page.size()).ok());
  EXPECT_TRUE(backend->unpin(page.data()).ok());
  EXPECT_GT(backend->memory_info().free_bytes, 0u);
  EXPECT_TRUE(backend->event_destroy(backend->event_create().value()).ok());
  EXPECT_TRUE(backend->stream_destroy(backend->stream_create().value()).ok());
  EXPECT_TRUE(backend->unload_module(backend->load_module(fake_cuda::kStoreImage).value()).ok());

  // On the captured stream itself: work is captured, the rest is refused.
  EXPECT_TRUE(backend->fill_async(block, 0x44, 4096, Stream{captured}).ok());
  const HostFunction nothing = [](void*) {};
  for (const Status& status :
       {backend->event_record(event, Stream{captured}), backend->stream_wait(Stream{captured}, event),
        backend->call_host(Stream{captured}, nothing, nullptr),
        backend->stream_synchronize(Stream{captured})}) {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.to_string();
    EXPECT_NE(status.message().find("captured into a CUDA graph"), std::string::npos) << status.message();
  }

  cuda::CuGraph graph = nullptr;
  ASSERT_EQ(application_.cuStreamEndCapture(captured, &graph), CuResult::kSuccess);
  std::size_t node_count = 0;
  EXPECT_EQ(application_.cuGraphGetNodes(graph, nullptr, &node_count), CuResult::kSuccess);
  EXPECT_EQ(node_count, 1u);  // The fill alone.
  EXPECT_EQ(application_.cuGraphDestroy(graph), CuResult::kSuccess);
  // The thread's own mode was put back.
  cuda::CuCaptureMode mode = cuda::CuCaptureMode::kGlobal;
  EXPECT_EQ(application_.cuThreadExchangeStreamCaptureMode(&mode), CuResult::kSuccess);
  EXPECT_EQ(mode, cuda::CuCaptureMode::kGlobal);
  EXPECT_EQ(application_.cuStreamDestroy_v2(captured), CuResult::kSuccess);
}

TEST_F(CudaBackendTest, AStreamOfItsOwnThatIsCapturedIsNotDestroyed) {
  start();
  const auto backend = make();
  const Stream stream = backend->stream_create().value();
  auto* const captured = static_cast<cuda::CuStream>(stream.handle);
  ASSERT_EQ(application_.cuCtxSetCurrent(application_.retain(0)), CuResult::kSuccess);
  ASSERT_EQ(application_.cuStreamBeginCapture_v2(captured, cuda::CuCaptureMode::kGlobal), CuResult::kSuccess);

  const Status refused = backend->stream_destroy(stream);
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
  EXPECT_NE(refused.message().find("captured into a CUDA graph"), std::string::npos) << refused.message();

  cuda::CuGraph graph = nullptr;
  EXPECT_EQ(application_.cuStreamEndCapture(captured, &graph), CuResult::kSuccess);
  EXPECT_EQ(application_.cuGraphDestroy(graph), CuResult::kSuccess);
  EXPECT_TRUE(backend->stream_destroy(stream).ok());
  EXPECT_EQ(application_.cuDevicePrimaryCtxRelease_v2(0), CuResult::kSuccess);
}

// As good as captured itself: the streams that wait for it are.
TEST_F(CudaBackendTest, TheDefaultStreamIsLeftAloneWhileAStreamThatWaitsForItIsCaptured) {
  start();
  const auto backend = make();
  const Event event = backend->event_create().value();
  const Stream stream = CudaBackend::default_stream();
  ASSERT_EQ(application_.cuCtxSetCurrent(application_.retain(0)), CuResult::kSuccess);
  cuda::CuStream captured = nullptr;
  ASSERT_EQ(application_.cuStreamCreate(&captured, cuda::kStreamDefault), CuResult::kSuccess);
  ASSERT_EQ(application_.cuStreamBeginCapture_v2(captured, cuda::CuCaptureMode::kRelaxed),
            CuResult::kSuccess);

  const HostFunction nothing = [](void*) {};
  for (const Status& status :
       {backend->event_record(event, stream), backend->stream_wait(stream, event),
        backend->call_host(stream, nothing, nullptr), backend->stream_synchronize(stream)}) {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.to_string();
    EXPECT_NE(status.message().find("captured into a CUDA graph"), std::string::npos) << status.message();
  }

  cuda::CuGraph graph = nullptr;
  static_cast<void>(application_.cuStreamEndCapture(captured, &graph));
  if (graph != nullptr) {
    EXPECT_EQ(application_.cuGraphDestroy(graph), CuResult::kSuccess);
  }
  EXPECT_EQ(application_.cuStreamDestroy_v2(captured), CuResult::kSuccess);
  EXPECT_TRUE(backend->event_record(event, stream).ok());
  EXPECT_EQ(application_.cuDevicePrimaryCtxRelease_v2(0), CuResult::kSuccess);
}

// --- failure and the end ---

TEST_F(CudaBackendTest, AFaultOfTheDeviceIsReportedByEverybodyFromThenOn) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.quiet = true;
  start(options);
  auto backend = make();
  const DevicePtr base = map_chunk(*backend);
  const Stream stream = backend->stream_create().value();
  const Stream other = backend->stream_create().value();
  const Event event = backend->event_create().value();
  std::atomic<bool> open{false};
  const HostFunction wait = [](void* gate) { static_cast<std::atomic<bool>*>(gate)->wait(false); };
  ASSERT_TRUE(backend->call_host(stream, wait, &open).ok());
  ASSERT_TRUE(backend->fill_async(base, 1, kGranule, stream).ok());
  ASSERT_TRUE(backend->event_record(event, stream).ok());
  // The defect: memory goes away under queued work.
  static_cast<void>(backend->unmap(base, kGranule));
  open = true;
  open.notify_all();

  for (int again = 0; again < 2; ++again) {
    const Status status = backend->stream_synchronize(stream);
    EXPECT_EQ(status.code(), StatusCode::kInternal);
    EXPECT_NE(status.message().find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << status.message();
    EXPECT_EQ(backend->event_synchronize(event).code(), StatusCode::kInternal);
    EXPECT_EQ(backend->stream_synchronize(other).code(), StatusCode::kInternal);
  }
  EXPECT_FALSE(backend->alloc(1).ok());
  EXPECT_TRUE(backend->stream_destroy(other).ok());
  EXPECT_EQ(backend->event_destroy(event).code(), StatusCode::kInternal);

  // The handles that it could not give back are the fault's, not the program's.
  ::testing::internal::CaptureStderr();
  backend.reset();
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(log.find("handles were not given back"), std::string::npos) << log;
}

// A host function that waits at its gate.
struct BegunFunction {
  testing::Gate gate;
  std::atomic<bool> begun{false};
  static void run(void* argument) {
    auto* const self = static_cast<BegunFunction*>(argument);
    self->begun = true;
    testing::Gate::wait(&self->gate);
  }
};

// The driver does not wait for the work of a lost context, and a function may use what its owner frees.
TEST_F(CudaBackendTest, TheEndAfterAFaultOfTheDeviceWaitsForFunctionsThatHaveBegun) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.sticky_faults = true;
  start(options);
  std::unique_ptr<CudaBackend> backend = make();
  const Stream stream = backend->stream_create().value();
  const Stream other = backend->stream_create().value();
  BegunFunction function;
  ASSERT_TRUE(backend->call_host(stream, BegunFunction::run, &function).ok());
  while (!function.begun) std::this_thread::yield();
  ASSERT_EQ(fake_.fail("cuStreamSynchronize", 1, static_cast<int>(CuResult::kIllegalAddress)), 0);
  ASSERT_EQ(backend->stream_synchronize(other).code(), StatusCode::kInternal);

  std::atomic<pid_t> number{0};
  std::atomic<bool> has_ended{false};
  std::thread end([&] {
    number = ::gettid();
    backend.reset();
    has_ended = true;
  });
  while (!has_ended && (fake_.call_count("cuStreamDestroy") < 2 || !testing::is_waiting(number)))
    std::this_thread::yield();

  EXPECT_EQ(fake_.call_count("cuMemFreeHost"), 0u);
  EXPECT_FALSE(has_ended);
  function.gate.open();
  end.join();
  EXPECT_EQ(fake_.call_count("cuMemFreeHost"), 1u);
}

// The caller frees what the function uses as soon as it has the failure.
TEST_F(CudaBackendTest, AFailedSynchronizationWaitsForTheFunctionThatHasBegun) {
  start();
  const auto backend = make();
  const Stream stream = backend->stream_create().value();
  BegunFunction function;
  ASSERT_TRUE(backend->call_host(stream, BegunFunction::run, &function).ok());
  while (!function.begun) std::this_thread::yield();
  ASSERT_EQ(fake_.fail("cuStreamSynchronize", 1, static_cast<int>(CuResult::kLaunchFailed)), 0);

  std::atomic<pid_t> number{0};
  std::atomic<bool> has_returned{false};
  std::thread caller([&] {
    number = ::gettid();
    EXPECT_EQ(backend->stream_synchronize(stream).code(), StatusCode::kInternal);
    has_returned = true;
  });
  while (!has_returned && (fake_.call_count("cuStreamSynchronize") == 0 || !testing::is_waiting(number)))
    std::this_thread::yield();

  EXPECT_FALSE(has_returned);
  function.gate.open();
  caller.join();
  EXPECT_TRUE(backend->stream_synchronize(stream).ok());
}

TEST_F(CudaBackendTest, AChildMadeByForkIsToldSo) {
  start();
  auto backend = make();
  const Stream stream = backend->stream_create().value();
  const pid_t child = ::fork();
  if (child == 0) {
    const auto told = [](const Status& status) {
      return status.code() == StatusCode::kUnavailable && status.message().find("fork") != std::string::npos;
    };
    bool all = told(backend->alloc(1).status()) && told(backend->stream_synchronize(stream)) &&
               told(backend->free(nullptr)) && told(CudaBackend::create({}).status()) &&
               told(CudaBackend::device_count().status()) && backend->memory_info().free_bytes == 0;
    // Its end leaves the parent's handles alone, and says nothing.
    ::testing::internal::CaptureStderr();
    backend.reset();
    all = all && ::testing::internal::GetCapturedStderr().empty();
    ::_exit(all ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_TRUE(backend->stream_synchronize(stream).ok());
}

// Its static object is destroyed after the driver has ended, as those of a trainer may be.
TEST_F(CudaBackendTest, GivingBackWhileTheProcessEndsIsHarmless) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        static std::unique_ptr<CudaBackend> last;
        static struct Ender {
          DevicePtr block = nullptr;
          ~Ender() {
            if (last == nullptr || !last->free(block).ok()) ::_exit(3);
          }
        } ender;
        start();
        last = make();
        ender.block = last->alloc(512).value();
        // Handlers run in the opposite order: the driver's, registered by now, before those above.
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(CudaBackendTest, TakesPtxThatDoesNotEndInZero) {
  start();
  const auto backend = make();
  std::vector<char> ptx(fake_cuda::kStorePtx, fake_cuda::kStorePtx + sizeof(fake_cuda::kStorePtx) - 1);
  ptx.shrink_to_fit();
  EXPECT_TRUE(backend->load_module({.image = ptx.data(), .image_bytes = ptx.size()}).ok());
  const Status status = backend->load_module({.image = "nonsense", .image_bytes = 8}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("CUDA_ERROR_INVALID_IMAGE"), std::string::npos) << status.message();
  const std::string wrong =
      ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry wrong() { none; }\n";
  const Status refused = backend->load_module({.image = wrong.data(), .image_bytes = wrong.size()}).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("CUDA_ERROR_INVALID_PTX"), std::string::npos) << refused.message();
  EXPECT_NE(refused.message().find(" (the driver's compiler says: "), std::string::npos) << refused.message();
  EXPECT_NE(refused.message().find("'none'"), std::string::npos) << refused.message();
}

// A fat binary of ELF files with an ABI version each, and of packed PTX 9.0.
std::string fat_binary(std::initializer_list<unsigned char> abi_versions) {
  constexpr std::uint32_t kElfArchitecture = 90, kPtxArchitecture = 100;
  std::string entries;
  const auto add = [&](std::uint16_t kind, std::uint16_t minor, std::uint16_t major,
                       std::uint32_t architecture, std::string content) {
    content.resize(64);
    std::string header(64, '\0');
    const std::uint32_t header_bytes = 64;
    const std::uint64_t content_bytes = content.size();
    std::memcpy(header.data(), &kind, sizeof kind);
    std::memcpy(header.data() + 4, &header_bytes, sizeof header_bytes);
    std::memcpy(header.data() + 8, &content_bytes, sizeof content_bytes);
    std::memcpy(header.data() + 24, &minor, sizeof minor);
    std::memcpy(header.data() + 26, &major, sizeof major);
    std::memcpy(header.data() + 28, &architecture, sizeof architecture);
    entries += header + content;
  };
  for (const unsigned char abi : abi_versions) {
    add(2, abi, 1, kElfArchitecture, std::string("\177ELF\2\1\1\101", 8) + static_cast<char>(abi));
  }
  add(1, 0, 9, kPtxArchitecture, "");
  const std::uint64_t bytes = entries.size();
  std::string image("\x50\xED\x55\xBA\1\0\x10\0", 8);
  image.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  return image + entries;
}

TEST_F(CudaBackendTest, ADriverTooOldForAnImageIsNamedWithBothVersions) {
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.driver_version = 12040;
  start(options);
  const auto backend = make();
  std::string elf("\177ELF\2\1\1\101\10", 9);
  elf.resize(64);
  std::string ptx = fake_cuda::kStorePtx;
  ptx.replace(ptx.find(".version"), ptx.find('\n', ptx.find(".version")) - ptx.find(".version"),
              ".version 9.0");
  for (const std::string& image : {fat_binary({8, 8}), elf, ptx}) {
    const Status status = backend->load_module({.image = image.data(), .image_bytes = image.size()}).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.message();
    EXPECT_NE(status.message().find("the driver has CUDA 12.4, the image was made for CUDA 13.0"),
              std::string::npos)
        << status.message();
    EXPECT_NE(status.message().find("install a newer driver"), std::string::npos) << status.message();
  }
}

TEST_F(CudaBackendTest, AnImageWithoutCodeForTheDeviceIsRefused) {
  const std::string image = fat_binary({8});
  // The code of 9.0 runs on devices of 9.x, and the PTX of 10.0 on those from 10.0 on.
  for (const int capability : {75, 80, 89, 90, 100, 120}) {
    fake_cuda::FakeOptions options = fake_cuda::strict_options();
    options.compute_capability = capability;
    start(options);
    const auto backend = make();
    const Status status = backend->load_module({.image = image.data(), .image_bytes = image.size()}).status();
    const bool is_refused = status.message().find("CUDA_ERROR_NO_BINARY_FOR_GPU") != std::string::npos;
    EXPECT_EQ(is_refused, capability < 90) << capability << ": " << status.message();
    if (!is_refused) continue;
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_EQ(status.message().find("too old"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("compile the image for this device's architecture"), std::string::npos)
        << status.message();
  }
}

TEST(ImageVersion, IsThatOfTheEntryThatNeedsLeast) {
  const auto needed = [](const std::string& image) { return needed_cuda_driver(image.data(), image.size()); };
  EXPECT_EQ(needed(fat_binary({8, 8})), 13000);
  EXPECT_EQ(needed(fat_binary({8, 7})), 0);
  EXPECT_EQ(needed(fat_binary({})), 13000);
  EXPECT_EQ(needed("// made by hand\n.version 8.4\n.target sm_80\n"), 12040);
  EXPECT_EQ(needed(".version 8.7\n"), 12080);
  EXPECT_EQ(needed(".version 8.6\n"), 12070);
  EXPECT_EQ(needed(".version 8.5\n"), 12050);
  EXPECT_EQ(needed(".version 7.0\n"), 11000);
  EXPECT_EQ(needed(".version 8x4\n"), 0);
  EXPECT_EQ(needed(".version 6.0\n"), 0);
  EXPECT_EQ(needed("forebay kernels\n"), 0);
  // Damaged images tell nothing.
  const std::string whole = fat_binary({8});
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) needed(whole.substr(0, bytes));
  EXPECT_EQ(needed(whole.substr(0, 40)), 0);
  std::string wide_header = whole;
  wide_header[7] = 0x7F;
  EXPECT_EQ(needed(wide_header), 0);
}

TEST_F(CudaBackendTest, StreamsBeyondThoseKeptAreDestroyed) {
  start();
  {
    const auto backend = make();
    std::vector<Stream> streams;
    for (int i = 0; i < 70; ++i) streams.push_back(backend->stream_create().value());
    for (const Stream stream : streams) EXPECT_TRUE(backend->stream_destroy(stream).ok());
    EXPECT_EQ(backend->live_handle_count(), 0u);
    EXPECT_EQ(fake_.accounts().streams, 64u);
    const std::uint64_t before = fake_.call_count("cuStreamCreate");
    const Stream again = backend->stream_create().value();
    EXPECT_EQ(fake_.call_count("cuStreamCreate"), before);
    EXPECT_TRUE(backend->stream_destroy(again).ok());
  }
  fake_cuda::expect_nothing_left(fake_);
}

// A float and the stale bytes behind it may look like the address of memory that the kernel does not use.
TEST(KernelLaunch, ThePaddingOfTheArgumentIsZero) {
#if __has_builtin(__builtin_clear_padding)
  struct Argument {
    std::uint64_t counts[8];  // Many, so that a copy is one of bytes.
    float scale;
  };
  class Capturing final : public ForwardingBackend {
   public:
    using ForwardingBackend::ForwardingBackend;
    Status launch(Kernel, Dimensions, Dimensions, const void* const* arguments, const std::size_t* bytes,
                  std::size_t, Stream) override {
      const auto* const first = static_cast<const std::byte*>(arguments[0]);
      given.assign(first, first + bytes[0]);
      return {};
    }
    std::vector<std::byte> given;
  };
  const std::unique_ptr<HostBackend> below = HostBackend::create({}).value();
  Capturing backend(*below);
  alignas(Argument) std::byte stale[sizeof(Argument)];
  std::memset(stale, 0xCB, sizeof stale);
  const float scale = 0.5f;
  std::memcpy(stale + offsetof(Argument, scale), &scale, sizeof scale);
  Argument argument;
  std::memcpy(&argument, stale, sizeof argument);

  ASSERT_TRUE(launch_with(backend, {}, {}, {}, argument, {}).ok());

  std::memset(stale + offsetof(Argument, scale) + sizeof scale, 0,
              sizeof stale - offsetof(Argument, scale) - sizeof scale);
  EXPECT_EQ(backend.given, std::vector<std::byte>(std::begin(stale), std::end(stale)));
#else
  GTEST_SKIP() << "this compiler cannot clear padding";
#endif
}

}  // namespace
}  // namespace forebay
