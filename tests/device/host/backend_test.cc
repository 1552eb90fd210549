// The host backend: its budget, poison, scripted faults and durations.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forebay/stream_call.h"
#include "runtime/device/host/script.h"

namespace forebay {
namespace {

constexpr std::size_t kHostGranule = 64 << 10;

HostBackendOptions small_options() {
  HostBackendOptions options;
  options.granularity = kHostGranule;
  options.memory_bytes = 16 * kHostGranule;
  return options;
}

TEST(HostBackend, OutOfMemoryNamesAskedFoundAndTry) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const Status status = backend->chunk_create(17 * kHostGranule).status();
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(
      status.message(),
      "cannot create a chunk of 1.06 MiB on host: 1.00 MiB of 1.00 MiB free; raise memory_bytes or free "
      "some first");
  EXPECT_EQ(backend->charged_bytes(), 0u);
  EXPECT_TRUE(backend->chunk_create(16 * kHostGranule).ok());
}

TEST(HostBackend, RefusesAQueueWithoutRoom) {
  HostBackendOptions options = small_options();
  options.queue_limit = 0;
  EXPECT_EQ(ScriptedHostBackend::create(options).status().message(),
            "cannot make host backend host: a queue_limit of 0 lets nothing run; give at least 1");
}

TEST(HostBackend, RefusesAFaultThatIsNoneAndAKernelWithoutAFunction) {
  EXPECT_EQ(ScriptedHostBackend::create(small_options(), {.faults = {HostFault{}}}).status().message(),
            "cannot make host backend host: a fault has nth 0 or no error; count from 1 and give a status");
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const HostKernel kernels[] = {{"nothing", nullptr}, {nullptr, nullptr}};
  const Status status = backend->load_module({.host_kernels = kernels}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("kernel nothing has no function"), std::string::npos) << status.message();
}

TEST(HostBackend, HasTheMemoryOfTheMachineUnlessLessIsGiven) {
  const std::size_t bytes = HostBackend::create({}).value()->capabilities().memory_bytes;
  EXPECT_EQ(bytes, static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
                       static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
}

// A hole between chunks is no place for a larger one.
TEST(HostBackend, ChunksOfAnySizeShareNoMemory) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const Chunk first = backend->chunk_create(kHostGranule).value();
  const Chunk second = backend->chunk_create(kHostGranule).value();
  ASSERT_TRUE(backend->chunk_destroy(first).ok());
  const Chunk third = backend->chunk_create(2 * kHostGranule).value();
  const DevicePtr base = backend->reserve(3 * kHostGranule, 0).value();
  ASSERT_TRUE(backend->map(base, second).ok());
  ASSERT_TRUE(backend->map(base + kHostGranule, third).ok());
  ASSERT_TRUE(backend->set_access(base, 3 * kHostGranule).ok());
  std::fill_n(base, kHostGranule, std::byte{1});
  std::fill_n(base + kHostGranule, 2 * kHostGranule, std::byte{2});
  EXPECT_EQ(std::count(base, base + kHostGranule, std::byte{1}), static_cast<std::ptrdiff_t>(kHostGranule));
  ASSERT_TRUE(backend->unmap(base, 3 * kHostGranule).ok());
  for (const Chunk chunk : {second, third}) ASSERT_TRUE(backend->chunk_destroy(chunk).ok());
  ASSERT_TRUE(backend->release(base, 3 * kHostGranule).ok());
}

TEST(HostBackend, RefusesABadGranularity) {
  HostBackendOptions half = small_options();
  half.granularity = 2048;
  EXPECT_EQ(
      ScriptedHostBackend::create(half).status().message(),
      "cannot make a host backend with a granularity of 2048 bytes: the page size is 4096; give a power "
      "of two that is at least as large");
  for (const std::size_t granularity : {0u, 512u, 3u * 4096u}) {
    HostBackendOptions options = small_options();
    options.granularity = granularity;
    EXPECT_EQ(ScriptedHostBackend::create(options).status().code(), StatusCode::kInvalidArgument)
        << granularity;
  }
}

TEST(HostBackend, FreshMemoryIsPoisonedAgainAfterReuse) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  for (int i = 0; i < 2; ++i) {
    const DevicePtr block = backend->alloc(kHostGranule).value();
    EXPECT_EQ(static_cast<int>(block[0]), 0xCB);
    EXPECT_EQ(static_cast<int>(block[kHostGranule - 1]), 0xCB);
    block[0] = std::byte{1};
    EXPECT_TRUE(backend->free(block).ok());
  }
  EXPECT_EQ(backend->live_handle_count(), 0u);
  EXPECT_EQ(backend->peak_charged_bytes(), kHostGranule);
}

TEST(HostBackend, PoisonsAllOfAWideBlock) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const DevicePtr block = backend->alloc(16 * kHostGranule).value();
  EXPECT_TRUE(
      std::all_of(block, block + 16 * kHostGranule, [](std::byte byte) { return byte == std::byte{0xCB}; }));
  EXPECT_TRUE(backend->free(block).ok());
}

TEST(HostBackend, RemembersTheMostThatWasCharged) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const Chunk wide = backend->chunk_create(3 * kHostGranule).value();
  EXPECT_TRUE(backend->chunk_destroy(wide).ok());
  const Chunk chunk = backend->chunk_create(kHostGranule).value();
  EXPECT_EQ(backend->charged_bytes(), kHostGranule);
  EXPECT_EQ(backend->peak_charged_bytes(), 3 * kHostGranule);
  EXPECT_TRUE(backend->chunk_destroy(chunk).ok());
}

// The file that the only host backend of this process keeps its memory in.
struct stat memory_file() {
  struct stat facts {};
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone)
            .string()
            .starts_with("/memfd:forebay-host-memory")) {
      EXPECT_EQ(::stat(entry.path().c_str(), &facts), 0);
    }
  }
  return facts;
}

TEST(HostBackend, UsesTheSpaceOfEndedChunksAndBlocksAgain) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const DevicePtr base = backend->reserve(16 * kHostGranule, 0).value();
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < 5; ++i) {
    chunks.push_back(backend->chunk_create(kHostGranule).value());
    ASSERT_TRUE(backend->map(base + i * kHostGranule, chunks.back()).ok());
  }
  EXPECT_EQ(memory_file().st_size, 5 * kHostGranule);
  EXPECT_EQ(memory_file().st_blocks * 512, 5 * kHostGranule);
  ASSERT_TRUE(backend->unmap(base, 5 * kHostGranule).ok());

  // 1 and 3 end, and then 2 between them: three granules lie together.
  for (const std::size_t i : {1, 3, 2}) ASSERT_TRUE(backend->chunk_destroy(chunks[i]).ok());
  EXPECT_EQ(memory_file().st_blocks * 512, 2 * kHostGranule);
  // The first takes exactly one of them, and the second the rest.
  const Chunk one = backend->chunk_create(kHostGranule).value();
  const Chunk two = backend->chunk_create(2 * kHostGranule).value();
  EXPECT_EQ(memory_file().st_size, 5 * kHostGranule);

  // A block, at the end: its space is the next one's.
  const DevicePtr block = backend->alloc(2 * kHostGranule).value();
  EXPECT_EQ(memory_file().st_size, 7 * kHostGranule);
  ASSERT_TRUE(backend->free(block).ok());
  const DevicePtr next = backend->alloc(3 * kHostGranule).value();
  EXPECT_EQ(memory_file().st_size, 8 * kHostGranule);
  ASSERT_TRUE(backend->free(next).ok());
  EXPECT_EQ(memory_file().st_blocks * 512, 2 * kHostGranule);

  for (const Chunk chunk : {one, two, chunks[0], chunks[4]}) EXPECT_TRUE(backend->chunk_destroy(chunk).ok());
  EXPECT_TRUE(backend->release(base, 16 * kHostGranule).ok());
  EXPECT_EQ(backend->live_handle_count(), 0u);
}

// Sets a limit of the process for as long as it lives.
class SoftLimit {
 public:
  SoftLimit(int resource, std::size_t value) : resource_(resource) {
    EXPECT_EQ(::getrlimit(resource_, &before_), 0);
    rlimit now = before_;
    now.rlim_cur = value;
    EXPECT_EQ(::setrlimit(resource_, &now), 0);
  }
  ~SoftLimit() { EXPECT_EQ(::setrlimit(resource_, &before_), 0); }

 private:
  int resource_;
  rlimit before_{};
};

TEST(HostBackend, KeepsToTheLimitOfFileSizes) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const SoftLimit limit(RLIMIT_FSIZE, 2 * kHostGranule);

  const Chunk chunk = backend->chunk_create(2 * kHostGranule).value();
  const Status refused = backend->chunk_create(kHostGranule).status();
  const Status no_block = backend->alloc(kHostGranule).status();

  EXPECT_EQ(refused.message(),
            "cannot create a chunk of 64.00 KiB on host: its memfd does not grow: File too large; raise the "
            "file size limit (ulimit -f)");
  EXPECT_EQ(no_block.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(backend->charged_bytes(), 2 * kHostGranule);
  EXPECT_TRUE(backend->chunk_destroy(chunk).ok());
}

// The file can grow that far, and the process has no such addresses.
TEST(HostBackend, ABlockWithoutAddressesIsNotCharged) {
  HostBackendOptions options = small_options();
  options.memory_bytes = std::size_t{1} << 61;
  const auto backend = ScriptedHostBackend::create(options).value();

  const Status refused = backend->alloc(std::size_t{1} << 60).status();

  EXPECT_EQ(refused.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(refused.message().find("the system has no such range free"), std::string::npos)
      << refused.message();
  EXPECT_EQ(backend->charged_bytes(), 0u);
  EXPECT_EQ(backend->live_handle_count(), 0u);
}

TEST(HostBackend, KeepsNoAddressesButThoseThatAreReserved) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const auto address_bytes = [] {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages * 4096;
  };
  constexpr std::size_t kWide = std::size_t{1} << 32;
  const std::size_t before = address_bytes();
  for (int i = 0; i < 10; ++i) {
    const DevicePtr base = backend->reserve(kWide, kWide).value();
    EXPECT_TRUE(backend->release(base, kWide).ok());
  }
  EXPECT_LT(address_bytes(), before + kWide / 2);

  const Status all = backend->reserve(SIZE_MAX / kHostGranule * kHostGranule, 0).status();
  EXPECT_EQ(all.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(all.message().find("more than there are addresses; reserve less"), std::string::npos)
      << all.message();
}

TEST(HostBackend, KeepsNothingOfTheProcessAfterItsEnd) {
  const auto address_bytes = [] {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages * 4096;
  };
  constexpr std::size_t kWide = std::size_t{1} << 32;
  for (const bool as_block : {false, true}) {
    HostBackendOptions options = small_options();
    options.memory_bytes = kWide;
    options.poison = false;
    auto backend = HostBackend::create(options).value();
    const std::size_t before = address_bytes();
    ASSERT_TRUE((as_block ? backend->alloc(kWide) : backend->reserve(kWide, 0)).ok());
    ASSERT_GE(address_bytes(), before + kWide / 2);
    EXPECT_NE(memory_file().st_ino, 0u);

    backend.reset();

    EXPECT_LT(address_bytes(), before + kWide / 2) << as_block;
    EXPECT_EQ(memory_file().st_ino, 0u) << "its file is open";
  }
}

TEST(HostBackend, AlignsTheArgumentsOfAKernel) {
  static std::uintptr_t places[3];
  static const HostKernel kKernels[] = {{"places",
                                         [](const Dimensions&, const Dimensions&, void* const* arguments) {
                                           for (int i = 0; i < 3; ++i)
                                             places[i] = reinterpret_cast<std::uintptr_t>(arguments[i]);
                                         }},
                                        {nullptr, nullptr}};
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const Module module = backend->load_module({.host_kernels = kKernels}).value();
  EXPECT_EQ(
      backend->get_kernel(module, "faces").status().message(),
      "cannot get kernel faces on host: the module has none of that name among its 1; check the spelling");
  const Kernel kernel = backend->get_kernel(module, "places").value();
  const Stream stream = backend->stream_create().value();
  const char letter = 'a';
  const double number = 1;
  const void* arguments[] = {&letter, &number, &letter};
  const std::size_t bytes[] = {1, sizeof number, 1};

  ASSERT_TRUE(backend->launch(kernel, {}, {}, arguments, bytes, 3, stream).ok());

  EXPECT_TRUE(backend->stream_destroy(stream).ok());
  for (const std::uintptr_t place : places) EXPECT_EQ(place % alignof(std::max_align_t), 0u);
}

TEST(HostBackend, GuardsWhereTheEnvironmentSaysSo) {
  const char* const set = std::getenv("FOREBAY_HOST_GUARD");
  const std::string before = set == nullptr ? "" : set;
  for (const auto& [value, guards] : {std::pair("", false), {"0", false}, {"1", true}, {"yes", true}}) {
    ::setenv("FOREBAY_HOST_GUARD", value, 1);
    EXPECT_EQ(HostBackend::create(small_options()).value()->access_guard() != nullptr, guards) << value;
  }
  if (set == nullptr) {
    ::unsetenv("FOREBAY_HOST_GUARD");
  } else {
    ::setenv("FOREBAY_HOST_GUARD", before.c_str(), 1);
  }
}

TEST(HostBackend, QueuesNoMoreThanItsLimit) {
  HostBackendOptions options = small_options();
  options.queue_limit = 2;
  const auto backend = ScriptedHostBackend::create(options).value();
  const Stream stream = backend->stream_create().value();
  std::atomic<bool> open{false};
  std::atomic<bool> queued{false};
  ASSERT_TRUE(call_on(*backend, stream, [&] { open.wait(false); }).ok());
  ASSERT_TRUE(call_on(*backend, stream, [] {}).ok());
  std::thread producer([&] {
    EXPECT_TRUE(call_on(*backend, stream, [] {}).ok());
    queued = true;
  });

  // The producer gets time to queue a third one.
  for (int i = 0; i < 2000; ++i) std::this_thread::yield();

  EXPECT_FALSE(queued);
  open = true;
  open.notify_all();
  producer.join();
  EXPECT_TRUE(backend->stream_destroy(stream).ok());
}

// Each callback holds one of the driver's threads for a millisecond.
TEST(HostBackend, CallbacksWaitForAThreadOfTheDriver) {
  for (const unsigned threads : {1u, 2u}) {
    HostClock clock(HostClock::Mode::kVirtual);
    HostBackendOptions options = small_options();
    options.clock = &clock;
    const auto backend =
        ScriptedHostBackend::create(
            options, {.callback_threads = threads, .callback_duration = std::chrono::milliseconds(1)})
            .value();
    HostClock::Registration self(clock);
    self.adopt();
    std::vector<Stream> streams;
    for (int i = 0; i < 4; ++i) streams.push_back(backend->stream_create().value());
    for (const Stream stream : streams) ASSERT_TRUE(call_on(*backend, stream, [] {}).ok());
    for (const Stream stream : streams) EXPECT_TRUE(backend->stream_synchronize(stream).ok());

    EXPECT_EQ(clock.now(), std::chrono::milliseconds(4 / threads));
    for (const Stream stream : streams) EXPECT_TRUE(backend->stream_destroy(stream).ok());
  }
}

TEST(HostBackend, CopiesOnTwoStreamsOverlapExactly) {
  HostClock clock(HostClock::Mode::kVirtual);
  HostBackendOptions options = small_options();
  options.clock = &clock;
  const auto backend = ScriptedHostBackend::create(options, {.copy_bytes_per_second = 1e9}).value();
  HostClock::Registration self(clock);
  self.adopt();
  const Stream first = backend->stream_create().value();
  const Stream second = backend->stream_create().value();
  const DevicePtr block = backend->alloc(4 * kHostGranule).value();
  EXPECT_TRUE(backend->copy_async(block, block + kHostGranule, 30000, first).ok());
  EXPECT_TRUE(backend->copy_async(block + 2 * kHostGranule, block + 3 * kHostGranule, 50000, second).ok());
  EXPECT_TRUE(backend->stream_synchronize(first).ok());
  EXPECT_EQ(clock.now(), std::chrono::microseconds(30));
  EXPECT_TRUE(backend->stream_synchronize(second).ok());
  EXPECT_EQ(clock.now(), std::chrono::microseconds(50));
  EXPECT_TRUE(backend->stream_destroy(first).ok());
  EXPECT_TRUE(backend->stream_destroy(second).ok());
}

TEST(HostBackend, AnExceptionFailsTheStream) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const Stream stream = backend->stream_create().value();
  EXPECT_TRUE(backend
                  ->call_host(
                      stream, [](void*) { throw std::runtime_error("deep water"); }, nullptr)
                  .ok());
  const Status status = backend->stream_synchronize(stream);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("deep water"), std::string::npos);
  EXPECT_TRUE(backend->stream_destroy(stream).ok());
}

TEST(HostBackend, WorkAfterAFailureIsSkippedAndTheFirstFailureStays) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const Stream stream = backend->stream_create().value();
  const Stream other = backend->stream_create().value();
  const Event event = backend->event_create().value();
  const DevicePtr block = backend->alloc(kHostGranule).value();
  ASSERT_TRUE(call_on(*backend, stream, [] { throw std::runtime_error("first"); }).ok());
  ASSERT_TRUE(call_on(*backend, stream, [] { throw std::runtime_error("second"); }).ok());
  ASSERT_TRUE(backend->fill_async(block, 1, 1, stream).ok());
  ASSERT_TRUE(backend->event_record(event, stream).ok());
  ASSERT_TRUE(backend->stream_wait(other, event).ok());
  ASSERT_TRUE(backend->fill_async(block + 1, 1, 1, other).ok());

  const Status status = backend->stream_synchronize(stream);

  EXPECT_EQ(status.message(),
            "cannot run a host function on a stream of host: it threw: first; catch within the function");
  // It had to wait for work that failed.
  EXPECT_EQ(backend->stream_synchronize(other).message(), status.message());
  EXPECT_EQ(static_cast<int>(block[0]), 0xCB);
  EXPECT_EQ(static_cast<int>(block[1]), 0xCB);
  EXPECT_TRUE(backend->stream_destroy(stream).ok());
  EXPECT_TRUE(backend->stream_destroy(other).ok());
}

// Runs every fallible call once; fails at most one of them.
Status use_everything(HostBackend& backend) {
  static const HostKernel kKernels[] = {
      {"nothing", [](const Dimensions&, const Dimensions&, void* const*) {}}, {nullptr, nullptr}};
  alignas(4096) static std::byte page[4096];
  Status first;
  const auto note = [&first](Status status) {
    if (first.ok() && !status.ok()) first = std::move(status);
    return first.ok();
  };
  Result<DevicePtr> base = backend.reserve(kHostGranule, 0);
  note(base.status());
  Result<Chunk> chunk = backend.chunk_create(kHostGranule);
  note(chunk.status());
  if (base.ok() && chunk.ok()) {
    const Status mapped = backend.map(base.value(), chunk.value());
    note(mapped);
    if (mapped.ok()) {
      note(backend.set_access(base.value(), kHostGranule));
      if (!note(backend.unmap(base.value(), kHostGranule))) {
        static_cast<void>(backend.unmap(base.value(), kHostGranule));
      }
    }
  }
  if (chunk.ok()) note(backend.chunk_destroy(chunk.value()));
  if (base.ok()) note(backend.release(base.value(), kHostGranule));
  const Status pinned = backend.pin(page, sizeof(page));
  note(pinned);
  if (pinned.ok()) note(backend.unpin(page));
  Result<DevicePtr> block = backend.alloc(kHostGranule);
  note(block.status());
  Result<Stream> stream = backend.stream_create();
  note(stream.status());
  Result<Event> event = backend.event_create();
  note(event.status());
  Result<Module> module = backend.load_module({.host_kernels = kKernels});
  note(module.status());
  if (stream.ok()) {
    if (block.ok()) {
      note(backend.fill_async(block.value(), 1, kHostGranule, stream.value()));
      note(backend.copy_async(page, block.value(), sizeof(page), stream.value()));
    }
    if (event.ok()) {
      note(backend.event_record(event.value(), stream.value()));
      note(backend.stream_wait(stream.value(), event.value()));
    }
    note(backend.call_host(
        stream.value(), [](void*) {}, nullptr));
    if (module.ok()) {
      const Kernel kernel = backend.get_kernel(module.value(), "nothing").value();
      note(backend.launch(kernel, {}, {}, nullptr, nullptr, 0, stream.value()));
    }
    note(backend.stream_destroy(stream.value()));
  }
  if (module.ok()) note(backend.unload_module(module.value()));
  if (event.ok()) note(backend.event_destroy(event.value()));
  if (block.ok()) note(backend.free(block.value()));
  return first;
}

TEST(HostBackend, EveryFaultStrikesOnceAndLeaksNothing) {
  for (int call = 0; call < kHostCallCount; ++call) {
    HostScript script;
    script.faults = {{static_cast<HostCall>(call), 1, Status(StatusCode::kUnavailable, "scripted")}};
    const auto backend = ScriptedHostBackend::create(small_options(), script).value();
    EXPECT_EQ(use_everything(*backend).message(), "scripted") << call;
    EXPECT_EQ(backend->live_handle_count(), 0u) << call;
    EXPECT_EQ(backend->charged_bytes(), 0u) << call;
    EXPECT_TRUE(use_everything(*backend).ok()) << call;

    backend->add_fault({static_cast<HostCall>(call), 1, Status(StatusCode::kUnavailable, "added")});
    EXPECT_EQ(use_everything(*backend).message(), "added") << call;
    EXPECT_EQ(backend->live_handle_count(), 0u) << call;
  }
}

TEST(HostBackend, AChildThatGivesMemoryBackLeavesItsParentsAlone) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  const DevicePtr address = backend->reserve(kHostGranule, kHostGranule).value();
  const Chunk chunk = backend->chunk_create(kHostGranule).value();
  ASSERT_TRUE(backend->map(address, chunk).ok() && backend->set_access(address, kHostGranule).ok());
  *address = std::byte{7};
  const pid_t child = ::fork();
  if (child == 0) {
    static_cast<void>(backend->unmap(address, kHostGranule));
    static_cast<void>(backend->chunk_destroy(chunk));
    ::_exit(0);
  }
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  EXPECT_EQ(state, 0);
  EXPECT_EQ(*address, std::byte{7});
}

TEST(HostBackend, EndsWithLiveHandles) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  EXPECT_TRUE(backend->alloc(kHostGranule).ok());
  EXPECT_TRUE(backend->stream_create().ok());
  EXPECT_TRUE(backend->event_create().ok());
  static const HostKernel kNone[] = {{nullptr, nullptr}};
  EXPECT_TRUE(backend->load_module({.host_kernels = kNone}).ok());
  EXPECT_EQ(backend->live_handle_count(), 4u);
}

}  // namespace
}  // namespace forebay
