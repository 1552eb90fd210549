// Every driver call that the cuda backend makes fails by script, one call of one run at a time, in runs that
// make each of them. The error must be told (a Status, or a line of the log where there is nobody to tell),
// name the call and the driver's error, and leave nothing behind.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/cuda_devices.h"
#include "runtime/device/cuda/driver.h"
#include "tests/device/cuda/fake_cuda_test.h"

namespace forebay {
namespace {

struct Call {
  const char* name;    // As messages have it: without the version.
  const char* symbol;  // As the fake's script takes it.
};

#define FOREBAY_TEST_CALL(name, symbol, version, parameters) {#name, #symbol},
constexpr Call kCalls[] = {FOREBAY_CUDA_CALLED(FOREBAY_TEST_CALL) FOREBAY_CUDA_OPTIONAL(FOREBAY_TEST_CALL)};
#undef FOREBAY_TEST_CALL

// Made for messages alone, and only for codes that cuda/abi.h does not know.
bool is_called(const Call& call) {
  return std::string_view(call.symbol) != "cuGetErrorName";
}

// The failures that a run got.
class Told {
 public:
  bool note(const Status& status) {
    if (!status.ok()) text_ += status.to_string() + "\n";
    return status.ok();
  }
  template <typename T>
  T note(Result<T> result) {
    return note(result.status()) ? std::move(result).value() : T{};
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

constexpr std::size_t kPage = 4096;

struct Workload {
  alignas(kPage) std::array<std::byte, 2 * kPage> host{};
  std::atomic<int> called{0};
};

// Waits in a way that a single failure does not end.
void wait_for(Backend& backend, Stream stream, Told& told) {
  if (!told.note(backend.stream_synchronize(stream))) told.note(backend.stream_synchronize(stream));
}

// The calls of an engine on a backend, each kind of call at least once, going on after a failure as far as
// that makes sense. At the end the backend gets back everything.
void use(Backend& backend, Workload& workload, Told& told) {
  const std::size_t granule = backend.capabilities().granularity;
  const DevicePtr base = told.note(backend.reserve(4 * granule, 0));
  const Chunk chunk = told.note(backend.chunk_create(granule));
  const Chunk other = told.note(backend.chunk_create(granule));
  const DevicePtr block = told.note(backend.alloc(kPage));
  const bool pinned = told.note(backend.pin(workload.host.data(), workload.host.size()));
  const Stream stream = told.note(backend.stream_create());
  const Stream second = told.note(backend.urgent_stream_create());
  const Event event = told.note(backend.timed_event_create());
  const Module module = told.note(backend.load_module(fake_cuda::kStoreImage));
  const Kernel kernel = module.handle == nullptr ? Kernel{} : told.note(backend.get_kernel(module, "store"));
  bool accessible = false;
  if (base != nullptr && chunk != Chunk{} && other != Chunk{}) {
    accessible = told.note(backend.map(base, chunk)) && told.note(backend.map(base + granule, other)) &&
                 told.note(backend.set_access(base, 2 * granule));
  }
  EXPECT_EQ(backend.memory_info().total_bytes, backend.capabilities().memory_bytes);

  if (stream != Stream{} && second != Stream{} && accessible && block != nullptr) {
    told.note(backend.fill_async(base, 0x5A, 2 * granule, stream));
    told.note(backend.copy_async(block, base, kPage, stream));
    if (pinned) told.note(backend.copy_async(workload.host.data(), block, kPage, stream));
    const HostFunction count = [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); };
    told.note(backend.call_host(stream, count, &workload.called));
    told.note(backend.call_host(CudaBackend::default_stream(), count, &workload.called));
    if (kernel.handle != nullptr) {
      const int value = 7;
      const void* arguments[] = {&block, &value};
      const std::size_t bytes[] = {sizeof(block), sizeof(value)};
      told.note(backend.launch(kernel, {}, {}, arguments, bytes, 2, stream));
    }
    if (event != Event{} && told.note(backend.event_record(event, stream))) {
      told.note(backend.event_query(event));
      told.note(backend.stream_wait(second, event));
      if (told.note(backend.event_synchronize(event))) told.note(backend.elapsed(event, event));
    }
    wait_for(backend, stream, told);
    wait_for(backend, second, told);
    wait_for(backend, CudaBackend::default_stream(), told);
  }

  if (accessible) told.note(backend.unmap(base, 2 * granule));
  if (chunk != Chunk{}) told.note(backend.chunk_destroy(chunk));
  if (base != nullptr && accessible) told.note(backend.release(base, 4 * granule));
  if (block != nullptr) told.note(backend.free(block));
  if (pinned) told.note(backend.unpin(workload.host.data()));
  if (event != Event{}) told.note(backend.event_destroy(event));
  if (module.handle != nullptr) told.note(backend.unload_module(module));
  if (stream != Stream{}) told.note(backend.stream_destroy(stream));
  // `other` and `second` are left for the backend to give back.
}

void use_all(Workload& workload, Told& told) {
  const Result<CudaSystem> system = read_cuda_system();
  if (told.note(system.status())) {
    for (const CudaDevice& device : system.value().devices) {
      if (!device.problem.empty()) told.note(Status(StatusCode::kInternal, device.problem));
    }
  }
  told.note(CudaBackend::device_count().status());
  Result<std::unique_ptr<CudaBackend>> backend = CudaBackend::create({.memory_bytes = 16u << 20});
  if (told.note(backend.status())) use(*backend.value(), workload, told);
}

class CudaBackendFaultRun : public ::testing::Test {
 protected:
  CudaBackendFaultRun() : fake_(fake_cuda::choose_fake()) {
    // A trial that fails is told at this level.
    ::setenv("FOREBAY_LOG", "info", 1);
  }

  void start() {
    fake_cuda::FakeOptions options = fake_cuda::strict_options();
    options.device_count = 2;
    fake_cuda::start_fake(fake_, options);
  }

  // Everything that a run was told, the log included.
  std::string run_with_fault(const Call& call, std::uint64_t nth) {
    start();
    EXPECT_EQ(fake_.fail(call.symbol, nth, static_cast<int>(cuda::CuResult::kUnknown)), 0);
    ::testing::internal::CaptureStderr();
    const auto workload = std::make_unique<Workload>();
    Told told;
    use_all(*workload, told);
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_GE(fake_.call_count(call.symbol), nth) << "the fault was never met";
    // Resources that the driver refuses to take back at the very end stay.
    const bool is_last = std::string_view(call.name) == "cuDevicePrimaryCtxRelease" ||
                         log.find("cannot give everything back") != std::string::npos;
    if (!is_last) fake_cuda::expect_nothing_left(fake_);
    return told.text() + log;
  }

  void expect_told(const Call& call, std::uint64_t nth) {
    SCOPED_TRACE(std::string(call.symbol) + ", call " + std::to_string(nth));
    const std::string told = run_with_fault(call, nth);
    EXPECT_NE(told.find(std::string(call.name) + ": CUDA_ERROR_UNKNOWN"), std::string::npos) << told;
  }

  fake_cuda::FakeCuda fake_;
};

class CudaBackendFaults : public CudaBackendFaultRun, public ::testing::WithParamInterface<Call> {};

TEST_P(CudaBackendFaults, EachCallThatFailsIsToldAndLeavesNothing) {
  const Call& call = GetParam();
  if (!is_called(call)) return;
  start();
  Told told;
  use_all(*std::make_unique<Workload>(), told);
  EXPECT_EQ(told.text(), "");
  const std::uint64_t count = fake_.call_count(call.symbol);
  ASSERT_GT(count, 0u);
  for (std::uint64_t nth = 1; nth <= count; ++nth) expect_told(call, nth);
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaBackendFaults, ::testing::ValuesIn(kCalls),
                         [](const auto& info) { return info.param.symbol; });

TEST_F(CudaBackendFaultRun, ARunWithoutFaultsIsToldNothingAndMakesEveryCall) {
  start();
  const auto workload = std::make_unique<Workload>();
  Told told;
  ::testing::internal::CaptureStderr();
  use_all(*workload, told);
  EXPECT_EQ(told.text() + ::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(workload->called, 2);
  EXPECT_EQ(workload->host[kPage - 1], std::byte{0x5A});
  for (const Call& call : kCalls) {
    if (is_called(call)) {
      EXPECT_GT(fake_.call_count(call.symbol), 0u) << call.symbol;
    }
  }
  fake_cuda::expect_nothing_left(fake_);
}

}  // namespace
}  // namespace forebay
