// The host backend: its budget, poison, scripted faults and durations.
#include <gtest/gtest.h>

#include <stdexcept>

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
}

TEST(HostBackend, RefusesABadGranularity) {
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

TEST(HostBackend, EndsWithLiveHandles) {
  const auto backend = ScriptedHostBackend::create(small_options()).value();
  EXPECT_TRUE(backend->alloc(kHostGranule).ok());
  EXPECT_TRUE(backend->stream_create().ok());
  EXPECT_TRUE(backend->event_create().ok());
  EXPECT_EQ(backend->live_handle_count(), 3u);
}

}  // namespace
}  // namespace forebay
