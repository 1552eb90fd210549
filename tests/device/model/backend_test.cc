// The model backend: capacities beyond the machine, the three orders, scripts, and random calls that it and
// the host backend have to answer alike.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "forebay/host_backend.h"
#include "forebay/units.h"
#include "runtime/device/model/script.h"

namespace forebay {
namespace {

std::unique_ptr<ScriptedModelBackend> make(ModelBackendOptions options, ModelScript script = {}) {
  return ScriptedModelBackend::create(std::move(options), std::move(script)).value();
}

std::unique_ptr<ScriptedModelBackend> make(ModelOrder order, std::uint64_t seed = 1) {
  return make({}, {.order = order, .seed = seed});
}

TEST(ModelBackend, SaysWhatItIs) {
  const auto backend = make(ModelBackendOptions{});
  EXPECT_EQ(backend->capabilities().kind, BackendKind::kModel);
  EXPECT_STREQ(backend->capabilities().name, "model");
  EXPECT_FALSE(backend->capabilities().host_accessible);
}

TEST(ModelBackend, HoldsFarMoreThanTheMachine) {
  ModelBackendOptions options;
  options.memory_bytes = 64ull << 40;
  const auto backend = make(options);
  const std::size_t bytes = 60ull << 40;
  const DevicePtr base = backend->reserve(bytes, 0).value();
  const Chunk wide = backend->chunk_create(1_GiB).value();
  for (std::size_t i = 0; i < 100; ++i) ASSERT_TRUE(backend->map(base + i * 1_GiB, wide).ok());
  EXPECT_TRUE(backend->set_access(base, 100 * 1_GiB).ok());
  const DevicePtr block = backend->alloc(bytes).value();
  EXPECT_EQ(backend->charged_bytes(), bytes + 1_GiB);
  EXPECT_EQ(backend->chunk_create(4ull << 40).status().code(), StatusCode::kOutOfMemory);

  EXPECT_TRUE(backend->unmap(base, 100 * 1_GiB).ok());
  EXPECT_TRUE(backend->chunk_destroy(wide).ok());
  EXPECT_TRUE(backend->free(block).ok());
  EXPECT_TRUE(backend->release(base, bytes).ok());
  EXPECT_EQ(backend->charged_bytes(), 0u);
  EXPECT_EQ(backend->live_handle_count(), 0u);
}

TEST(ModelBackend, RefusesOddOptions) {
  for (const std::size_t granularity : {0u, 256u, 3u * 4096u}) {
    ModelBackendOptions options;
    options.granularity = granularity;
    EXPECT_EQ(ScriptedModelBackend::create(options).status().code(), StatusCode::kInvalidArgument)
        << granularity;
  }
  ModelBackendOptions options;
  options.memory_bytes = SIZE_MAX;
  EXPECT_EQ(ScriptedModelBackend::create(options).status().code(), StatusCode::kInvalidArgument);
  options.memory_bytes = (std::size_t{1} << 48) + 1;
  EXPECT_EQ(ScriptedModelBackend::create(options).status().code(), StatusCode::kInvalidArgument);
  options = {};
  options.queue_limit = 0;
  EXPECT_EQ(ScriptedModelBackend::create(options).status().code(), StatusCode::kInvalidArgument);
  ModelScript script;
  script.faults.push_back({.call = HostCall::kMap, .nth = 1, .status = {}});
  EXPECT_EQ(ScriptedModelBackend::create({}, script).status().code(), StatusCode::kInvalidArgument);
}

TEST(ModelBackend, FailsTheCallsOfItsScriptWithoutEffect) {
  ModelScript script;
  script.faults.push_back(
      {.call = HostCall::kChunkCreate, .nth = 2, .status = {StatusCode::kOutOfMemory, "as scripted"}});
  const auto backend = make({}, script);
  const DevicePtr base = backend->reserve(8_MiB, 0).value();
  const Chunk chunk = backend->chunk_create(2_MiB).value();
  EXPECT_EQ(backend->chunk_create(2_MiB).status().message(), "as scripted");
  EXPECT_EQ(backend->charged_bytes(), 2_MiB);
  EXPECT_TRUE(backend->chunk_create(2_MiB).ok());

  ASSERT_TRUE(backend->map(base, chunk).ok());
  backend->add_fault(
      {.call = HostCall::kUnmap, .nth = 1, .status = {StatusCode::kInternal, "as scripted too"}});
  EXPECT_EQ(backend->unmap(base, 2_MiB).message(), "as scripted too");
  EXPECT_TRUE(backend->unmap(base, 2_MiB).ok());
  EXPECT_EQ(backend->call_count(HostCall::kChunkCreate), 3u);
  EXPECT_EQ(backend->call_count(HostCall::kMap), 1u);
  EXPECT_EQ(backend->call_count(HostCall::kUnmap), 2u);
  EXPECT_EQ(backend->call_count(HostCall::kSetAccess), 0u);
}

TEST(ModelBackend, AtOnceMeansThatNothingIsEverPending) {
  const auto backend = make(ModelOrder::kAtOnce);
  const Stream first = backend->stream_create().value();
  const Stream second = backend->stream_create().value();
  const Event event = backend->event_create().value();
  int count = 0;
  const HostFunction add = [](void* counter) { ++*static_cast<int*>(counter); };
  EXPECT_TRUE(backend->call_host(first, add, &count).ok());
  EXPECT_EQ(count, 1);
  EXPECT_TRUE(backend->event_record(event, first).ok());
  EXPECT_TRUE(backend->event_query(event).value());
  EXPECT_TRUE(backend->stream_wait(second, event).ok());
  EXPECT_TRUE(backend->call_host(second, add, &count).ok());
  EXPECT_EQ(count, 2);
  EXPECT_EQ(backend->queued_count(), 0u);
}

TEST(ModelBackend, ByHandNothingCompletesUntilAsked) {
  const auto backend = make(ModelOrder::kManual);
  const Stream first = backend->stream_create().value();
  const Stream second = backend->stream_create().value();
  const Event event = backend->event_create().value();
  const Event after = backend->event_create().value();
  EXPECT_TRUE(backend->event_record(event, first).ok());
  EXPECT_TRUE(backend->stream_wait(second, event).ok());
  EXPECT_TRUE(backend->event_record(after, second).ok());
  EXPECT_FALSE(backend->event_query(event).value());
  EXPECT_FALSE(backend->complete_next(second));  // It waits for the first.
  EXPECT_TRUE(backend->complete_next(first));
  EXPECT_TRUE(backend->event_query(event).value());
  EXPECT_FALSE(backend->event_query(after).value());
  EXPECT_EQ(backend->queued_count(), 2u);
  EXPECT_TRUE(backend->complete_next(second));
  EXPECT_TRUE(backend->complete_next(second));
  EXPECT_TRUE(backend->event_query(after).value());
  EXPECT_FALSE(backend->complete_any());
  EXPECT_TRUE(backend->event_record(after, second).ok());
  backend->complete_all();
  EXPECT_TRUE(backend->event_query(after).value());
}

// The order in which four streams finish three functions each.
std::string order_of(std::uint64_t seed, ModelOrder order) {
  const auto backend = make(order, seed);
  struct Note {
    std::string* text;
    char name;
  };
  std::string text;
  std::vector<Note> notes;
  for (int i = 0; i < 4; ++i) notes.push_back({&text, static_cast<char>('a' + i)});
  std::vector<Stream> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(backend->stream_create().value());
  for (int turn = 0; turn < 3; ++turn) {
    for (std::size_t i = 0; i < 4; ++i) {
      const HostFunction append = [](void* note) {
        static_cast<Note*>(note)->text->push_back(static_cast<Note*>(note)->name);
      };
      EXPECT_TRUE(backend->call_host(streams[i], append, &notes[i]).ok());
    }
  }
  backend->complete_all();
  return text;
}

TEST(ModelBackend, ASeedGivesOneOrderAndAnotherSeedAnother) {
  EXPECT_EQ(order_of(1, ModelOrder::kAtOnce), "abcdabcdabcd");
  for (const ModelOrder order : {ModelOrder::kSeeded, ModelOrder::kManual}) {
    EXPECT_EQ(order_of(7, order), order_of(7, order));
    EXPECT_NE(order_of(7, order), order_of(8, order));
  }
}

TEST(ModelBackend, WorkOnWhatWasUnmappedMeanwhileFailsItsStream) {
  const auto backend = make(ModelOrder::kManual);
  const Stream stream = backend->stream_create().value();
  const DevicePtr base = backend->reserve(2_MiB, 0).value();
  const Chunk chunk = backend->chunk_create(2_MiB).value();
  ASSERT_TRUE(backend->map(base, chunk).ok());
  EXPECT_FALSE(backend->fill_async(base, 1, 16, stream).ok());  // No access yet.
  ASSERT_TRUE(backend->set_access(base, 2_MiB).ok());
  EXPECT_TRUE(backend->fill_async(base, 1, 16, stream).ok());
  EXPECT_TRUE(backend->unmap(base, 2_MiB).ok());
  EXPECT_EQ(backend->stream_synchronize(stream).code(), StatusCode::kInternal);

  const Stream other = backend->stream_create().value();
  std::byte host[16];
  ASSERT_TRUE(backend->map(base, chunk).ok());
  ASSERT_TRUE(backend->set_access(base, 2_MiB).ok());
  EXPECT_TRUE(backend->copy_async(host, base, 16, other).ok());
  EXPECT_TRUE(backend->unmap(base, 2_MiB).ok());
  EXPECT_EQ(backend->stream_synchronize(other).code(), StatusCode::kInternal);
}

TEST(ModelBackend, AddressesAreUsedAgainWhenTheyRunOut) {
  const auto backend = make(ModelBackendOptions{});
  const std::size_t bytes = std::size_t{1} << 46;  // A quarter of all.
  std::vector<DevicePtr> bases;
  for (int i = 0; i < 4; ++i) bases.push_back(backend->reserve(bytes, 0).value());
  EXPECT_EQ(backend->reserve(2_MiB, 0).status().code(), StatusCode::kOutOfMemory);
  ASSERT_TRUE(backend->release(bases[1], bytes).ok());
  EXPECT_EQ(backend->reserve(bytes, 0).value(), bases[1]);
  EXPECT_EQ(backend->reserve(bytes, 0).status().code(), StatusCode::kOutOfMemory);
}

TEST(ModelBackend, AddressesFollowThoseThatWereTakenLast) {
  const auto backend = make(ModelBackendOptions{});
  const DevicePtr first = backend->reserve(2_MiB, 0).value();
  ASSERT_TRUE(backend->release(first, 2_MiB).ok());
  const DevicePtr second = backend->reserve(2_MiB, 0).value();
  EXPECT_EQ(second, first + 2_MiB);
  const DevicePtr block = backend->alloc(1).value();
  EXPECT_EQ(block, second + 2_MiB);
  ASSERT_TRUE(backend->free(block).ok());
  EXPECT_EQ(backend->reserve(2_MiB, 0).value(), block + 2_MiB);
  // A wider alignment skips some.
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(backend->reserve(2_MiB, 64_MiB).value()) % 64_MiB, 0u);
}

TEST(ModelBackend, ABlockWithoutAddressesIsNotCharged) {
  ModelBackendOptions options;
  options.memory_bytes = std::size_t{1} << 48;
  const auto backend = make(options);
  ASSERT_TRUE(backend->reserve(std::size_t{3} << 46, 0).ok());

  const Status refused = backend->alloc(std::size_t{1} << 47).status();

  EXPECT_EQ(refused.message(),
            "cannot allocate 128.00 TiB on model: no such range is free among 256.00 TiB; reserve less");
  EXPECT_EQ(backend->charged_bytes(), 0u);
}

TEST(ModelBackend, KnowsItsOwnAddressesFromThoseOfTheHost) {
  const auto backend = make(ModelBackendOptions{});
  const Stream stream = backend->stream_create().value();
  const DevicePtr first = backend->alloc(2_MiB).value();
  const auto fill = [&](DevicePtr address) { return backend->fill_async(address, 1, 16, stream); };

  EXPECT_TRUE(fill(first - 16).ok());
  EXPECT_EQ(fill(first - 8).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(fill(first + 2_MiB).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(fill(first + (std::size_t{1} << 48) - 16).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(fill(first + (std::size_t{1} << 48)).ok());
}

TEST(ModelBackend, KnowsTheKernelsOfAModule) {
  static const HostKernel kKernels[] = {{"one", [](const Dimensions&, const Dimensions&, void* const*) {}},
                                        {nullptr, nullptr}};
  const auto backend = make(ModelBackendOptions{});
  const Module module = backend->load_module({.host_kernels = kKernels}).value();
  EXPECT_EQ(
      backend->get_kernel(module, "two").status().message(),
      "cannot get kernel two on model: the module has none of that name among its 1; check the spelling");
  EXPECT_EQ(backend->load_module({.image = "PTX", .image_bytes = 0}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(ModelBackend, QueuesNoMoreThanItsLimit) {
  const auto backend = make({.queue_limit = 2}, {.order = ModelOrder::kManual});
  const Stream stream = backend->stream_create().value();
  const HostFunction nothing = [](void*) {};
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(backend->call_host(stream, nothing, nullptr).ok());
  EXPECT_EQ(backend->queued_count(), 2u);
}

TEST(ModelBackend, TheFirstFailureStaysAndReachesThoseWhoWait) {
  const auto backend = make(ModelOrder::kManual);
  const Stream stream = backend->stream_create().value();
  const Stream other = backend->stream_create().value();
  const Event event = backend->event_create().value();
  ASSERT_TRUE(backend
                  ->call_host(
                      stream, [](void*) { throw std::runtime_error("first"); }, nullptr)
                  .ok());
  ASSERT_TRUE(backend
                  ->call_host(
                      stream, [](void*) { throw std::runtime_error("second"); }, nullptr)
                  .ok());
  ASSERT_TRUE(backend->event_record(event, stream).ok());
  ASSERT_TRUE(backend->stream_wait(other, event).ok());

  const Status status = backend->stream_synchronize(stream);

  EXPECT_EQ(status.message(),
            "cannot run a host function on a stream of model: it threw: first; catch within the function");
  EXPECT_EQ(backend->stream_synchronize(other).message(), status.message());
}

// Random calls to both backends give the same answers and the same charged bytes.
TEST(ModelBackend, AnswersAsTheHostBackendDoes) {
  constexpr std::size_t kGranule = 4096;
  constexpr std::size_t kCount = 16;  // Granules of the range.
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
    HostBackendOptions host_options;
    host_options.granularity = kGranule;
    host_options.memory_bytes = 12 * kGranule;
    const auto host = HostBackend::create(host_options).value();
    ModelBackendOptions model_options;
    model_options.granularity = kGranule;
    model_options.memory_bytes = 12 * kGranule;
    const auto model = make(model_options);
    const DevicePtr host_base = host->reserve(kCount * kGranule, 0).value();
    const DevicePtr model_base = model->reserve(kCount * kGranule, 0).value();
    std::vector<Chunk> host_chunks(1);
    std::vector<Chunk> model_chunks(1);
    for (int i = 0; i < 3000; ++i) {
      const std::size_t offset = below(kCount) * kGranule + (below(20) == 0 ? 512 : 0);
      const std::size_t bytes = below(5) * kGranule;
      const std::size_t which = below(host_chunks.size());
      const auto same = [&](const Status& a, const Status& b) {
        ASSERT_EQ(a.code(), b.code()) << a.to_string() << " / " << b.to_string();
      };
      switch (below(6)) {
        case 0: {
          const Result<Chunk> a = host->chunk_create(bytes);
          const Result<Chunk> b = model->chunk_create(bytes);
          same(a.status(), b.status());
          if (a.ok() && b.ok()) {
            host_chunks.push_back(a.value());
            model_chunks.push_back(b.value());
          }
          break;
        }
        case 1:
          same(host->chunk_destroy(host_chunks[which]), model->chunk_destroy(model_chunks[which]));
          break;
        case 2:
          same(host->unmap(host_base + offset, bytes), model->unmap(model_base + offset, bytes));
          break;
        case 3:
          same(host->set_access(host_base + offset, bytes), model->set_access(model_base + offset, bytes));
          break;
        default:
          same(host->map(host_base + offset, host_chunks[which]),
               model->map(model_base + offset, model_chunks[which]));
          break;
      }
      ASSERT_EQ(host->charged_bytes(), model->charged_bytes());
      ASSERT_EQ(host->live_handle_count(), model->live_handle_count());
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(host->release(host_base, kCount * kGranule).code(),
              model->release(model_base, kCount * kGranule).code());
  }
}

}  // namespace
}  // namespace forebay
