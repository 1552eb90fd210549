// Each call of the C interface reaches what it names, with its arguments in their places.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "forebay/all_reduce.h"
#include "forebay/file_store.h"
#include "forebay/gloo_communicator.h"
#include "tests/api/fixture.h"
#include "tests/support/temporary_directory.h"

namespace forebay::api {
namespace {

using nlohmann::json;

template <typename Handle>
json report_of_handle(std::int32_t (*report)(Handle*, const char**), Handle* handle) {
  return json::parse(c::get<const char*>(report, handle));
}
json engine_report(const c::Engine& engine) {
  return report_of_handle<forebay_engine>(forebay_engine_report, engine);
}

// The call is refused, in words that hold `text`.
#define EXPECT_REFUSED(call, text)           \
  EXPECT_EQ(call, FOREBAY_INVALID_ARGUMENT); \
  EXPECT_NE(last_error().find(text), std::string::npos) << last_error()

// --- records ---

TEST(CApiCalls, ASpanHasItsTrackAndItsName) {
  const auto timeline = c::make<c::Timeline>(forebay_timeline_create);
  ASSERT_OK(forebay_timeline_begin(timeline, "some track"));
  ASSERT_OK(forebay_timeline_end(timeline, "some track", "some work"));
  const json report = report_of_handle<forebay_timeline>(forebay_timeline_report, timeline);
  EXPECT_NE(report.dump().find("\"name\":\"some work\""), std::string::npos) << report;
}

TEST(CApiCalls, AStoreReportsItsFactsAndCounts) {
  const testing::TemporaryDirectory directory;
  const auto store = c::make<c::FileStore>(
      forebay_file_store_create,
      c::Options{{"store-directories", directory.path()}, {"store-depth", "3"}, {"store-checksums", "off"}});
  FileStoreOptions options;
  options.directories = {directory.path()};
  options.depth = 3;
  options.checksums = false;
  const auto same = make_file_store(options);
  ASSERT_TRUE(same.ok()) << same.status().to_string();
  const StoreFacts facts = same.value()->facts();
  const auto range = c::get<std::uint32_t>(forebay_file_store_range, store, "states", 200'000);
  std::vector<char> memory(131'072);
  for (const bool reads : {false, false, true}) {
    const auto ticket =
        reads
            ? c::get<std::uint64_t>(forebay_file_store_read, store, range, 0, memory.data(), memory.size())
            : c::get<std::uint64_t>(forebay_file_store_write, store, range, 0, memory.data(), memory.size());
    ASSERT_OK(forebay_file_store_wait(store, ticket, UINT64_MAX));
  }

  const json report = report_of_handle<forebay_file_store>(forebay_file_store_report, store);

  EXPECT_EQ(report["granule_bytes"], facts.granule_bytes);
  EXPECT_EQ(report["alignment_bytes"], facts.alignment_bytes);
  EXPECT_EQ(report["block_bytes"], facts.block_bytes);
  EXPECT_EQ(report["depth"], 3);
  EXPECT_EQ(report["transfer_limit"], facts.transfer_limit);
  EXPECT_EQ(report["checksums"], false);
  EXPECT_GE(report["read_bytes"], 131'072);
  EXPECT_EQ(report["written_bytes"], 2 * report["read_bytes"].get<std::uint64_t>());
  EXPECT_EQ(report["read_count"], 1);
  EXPECT_EQ(report["write_count"], 2);
  EXPECT_EQ(report["failed_count"], 0);
  EXPECT_LT(report["read_bytes"], 200'000);
  EXPECT_GE(report["range_bytes"], 200'000);
}

// --- devices ---

TEST(CApiCalls, AStreamWaitsForTheWorkOfAnother) {
  const One one;
  const auto early = c::get<void*>(forebay_stream_create, one.device);
  const auto late = c::get<void*>(forebay_stream_create, one.device);
  struct Shared {
    std::promise<void> gate;
    bool is_written = false;
    bool was_seen = false;
  } shared;
  ASSERT_OK(forebay_stream_call(
      one.device, early,
      [](void* user) {
        auto& s = *static_cast<Shared*>(user);
        s.gate.get_future().wait();
        s.is_written = true;
      },
      &shared));
  ASSERT_OK(forebay_stream_wait(one.device, late, early));
  std::promise<void> ran;
  ASSERT_OK(forebay_stream_call(
      one.device, late,
      [](void* user) {
        auto& s = *static_cast<Shared*>(user);
        s.was_seen = s.is_written;
      },
      &shared));
  ASSERT_OK(forebay_stream_call(
      one.device, late, [](void* user) { static_cast<std::promise<void>*>(user)->set_value(); }, &ran));
  // A stream that does not wait runs within this time.
  EXPECT_EQ(ran.get_future().wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  shared.gate.set_value();
  ASSERT_OK(forebay_stream_synchronize(one.device, late));
  EXPECT_TRUE(shared.was_seen);
  forebay_stream_destroy(one.device, late);
  forebay_stream_destroy(one.device, early);

  forebay_stream_destroy(one.device, early);
  EXPECT_NE(last_error().find("the stream was not made here, or was destroyed"), std::string::npos)
      << last_error();
  EXPECT_REFUSED(forebay_stream_call(one.device, nullptr, nullptr, nullptr), "function is null");
  const json report = report_of_handle<forebay_device>(forebay_device_report, one.device);
  EXPECT_EQ(report["host_accessible"], true);
  EXPECT_EQ(report["multiprocessor_count"], 0);
}

// --- memory ---

TEST(CApiCalls, AnArenaHasTagsSlotsAndPauses) {
  const One one;
  const auto arena = c::make<c::Arena>(forebay_arena_create, one.device,
                                       c::Options{{"arena-limit", "64MiB"}, {"arena-chunk", "4MiB"}});
  const auto number = [&](const char* name) {
    return c::get<std::uint64_t>(forebay_arena_number, arena, name);
  };
  EXPECT_EQ(number("chunk_bytes"), std::uint64_t{4} << 20);
  void* block = nullptr;
  EXPECT_REFUSED(forebay_arena_allocate(arena, 64, nullptr, 1 << 20, 0, &block),
                 "tag is 1048576; use 0, or one that forebay_arena_tag_create() gave");
  EXPECT_REFUSED(forebay_arena_allocate(arena, 64, nullptr, 0, 4, &block), "flags is 4; combine those");
  const auto tag = c::get<std::int32_t>(forebay_arena_tag_create, arena, "pausable", 0, FOREBAY_PAUSABLE);
  auto* const kept = static_cast<char*>(c::get<void*>(forebay_arena_allocate, arena, 1000, nullptr, tag, 0));
  ASSERT_OK(forebay_fill(one.device, kept, 7, 1000, nullptr));
  ASSERT_OK(forebay_stream_synchronize(one.device, nullptr));
  ASSERT_OK(forebay_arena_pause(arena, tag, 1));
  ASSERT_OK(forebay_arena_resume(arena, tag));
  EXPECT_EQ(kept[999], 7);
  ASSERT_OK(forebay_arena_pause(arena, tag, 0));
  ASSERT_OK(forebay_arena_resume(arena, tag));
  EXPECT_NE(kept[999], 7) << "nothing was kept, and a host device's new memory has other bytes";
  char foreign = 0;
  EXPECT_EQ(forebay_arena_record_stream(arena, &foreign, nullptr), FOREBAY_INVALID_ARGUMENT);

  // Two slots, and an alias that goes from one to the other.
  const auto slots = c::get<std::int32_t>(forebay_arena_tag_create, arena, "slots", 0, 0);
  const auto first = c::get<std::uint32_t>(forebay_arena_slot_create, arena, 4 << 20, slots);
  EXPECT_EQ(number("tags.slots.live_bytes"), std::uint64_t{4} << 20);
  const auto second = c::get<std::uint32_t>(forebay_arena_slot_create, arena, 4 << 20, 0);
  auto* const alias = static_cast<char*>(c::get<void*>(forebay_arena_alias_create, arena, first, 4 << 20));
  alias[5] = 1;
  ASSERT_OK(forebay_arena_alias_move(arena, alias, second));
  alias[5] = 2;
  ASSERT_OK(forebay_arena_alias_move(arena, alias, first));
  EXPECT_EQ(alias[5], 1);
  EXPECT_EQ(forebay_arena_slot_destroy(arena, first), FOREBAY_INVALID_ARGUMENT) << "it has an alias";
  ASSERT_OK(forebay_arena_alias_destroy(arena, alias));
  ASSERT_OK(forebay_arena_slot_destroy(arena, first));
  EXPECT_EQ(number("tags.slots.live_bytes"), 0u);
  EXPECT_GT(number("driver_call_count"), 0u);
  EXPECT_EQ(number("moved_chunk_count"), 0u);
  EXPECT_EQ(number("recalled_count"), 0u);

  // A snapshot is no longer than itself, whatever lay under its name.
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path() + "/snapshot";
  std::ofstream(path) << std::string(1 << 20, 'x');
  ASSERT_OK(forebay_arena_snapshot(arena, path.c_str()));
  EXPECT_LT(std::filesystem::file_size(path), 1u << 20);
  EXPECT_EQ(forebay_arena_snapshot(arena, (directory.path() + "/none/snapshot").c_str()), FOREBAY_IO_ERROR);
  EXPECT_NE(last_error().find("No such file or directory"), std::string::npos) << last_error();
}

TEST(CApiCalls, AFixedBlockHasAChunkOfItsOwn) {
  const One one;
  const auto arena =
      c::make<c::Arena>(forebay_arena_create, one.device, c::Options{{"arena-limit", "64MiB"}});
  const auto chunk_of_block = [&](std::int32_t flags) {
    auto* const block = c::get<void*>(forebay_arena_allocate, arena, 512, nullptr, 0, flags);
    return reinterpret_cast<std::uintptr_t>(block) / (2 << 20);
  };
  const std::uintptr_t shared = chunk_of_block(0), fixed = chunk_of_block(FOREBAY_FIXED);

  EXPECT_EQ(chunk_of_block(0), shared);
  EXPECT_NE(fixed, shared);
  EXPECT_NE(chunk_of_block(FOREBAY_FIXED), fixed);
}

TEST(CApiCalls, AFreedBlockServesItsStreamAtOnceAndOthersAfterItsWork) {
  const One one;
  const auto arena = c::make<c::Arena>(forebay_arena_create, one.device, c::Options{{"arena-limit", "4MiB"}});
  const auto stream = c::get<void*>(forebay_stream_create, one.device);
  constexpr std::uint64_t kBytes = 3 << 20;
  const auto hold_back = [&](std::shared_future<void>& gate) {
    const auto wait = [](void* user) { static_cast<std::shared_future<void>*>(user)->wait(); };
    ASSERT_OK(forebay_stream_call(one.device, stream, wait, &gate));
  };
  std::promise<void> opened[3];
  std::shared_future<void> gates[3];
  for (int i = 0; i < 3; ++i) gates[i] = opened[i].get_future().share();
  void* other = nullptr;

  hold_back(gates[0]);
  auto* block = c::get<void*>(forebay_arena_allocate, arena, kBytes, stream, 0, 0);
  EXPECT_OK(forebay_arena_free(arena, block, stream));
  EXPECT_OK(forebay_arena_allocate(arena, kBytes, stream, 0, 0, &block));
  EXPECT_OK(forebay_arena_free(arena, block, stream));
  EXPECT_EQ(forebay_arena_allocate(arena, kBytes, nullptr, 0, 0, &other), FOREBAY_OUT_OF_MEMORY);
  EXPECT_NE(last_error().find('\n'), std::string::npos) << "the tags stand in lines: " << last_error();
  opened[0].set_value();
  ASSERT_OK(forebay_stream_synchronize(one.device, stream));

  // The same of a block that a stream uses beside its own.
  block = c::get<void*>(forebay_arena_allocate, arena, kBytes, nullptr, 0, 0);
  hold_back(gates[1]);
  EXPECT_OK(forebay_arena_record_stream(arena, block, stream));
  EXPECT_OK(forebay_arena_free(arena, block, FOREBAY_NO_STREAM));
  EXPECT_EQ(forebay_arena_allocate(arena, kBytes, nullptr, 0, 0, &other), FOREBAY_OUT_OF_MEMORY);
  opened[1].set_value();
  ASSERT_OK(forebay_stream_synchronize(one.device, stream));

  // A stream that is retired is not waited for.
  block = c::get<void*>(forebay_arena_allocate, arena, kBytes, stream, 0, 0);
  ASSERT_OK(forebay_arena_free(arena, block, stream));
  ASSERT_OK(forebay_stream_synchronize(one.device, stream));
  ASSERT_OK(forebay_arena_retire_stream(arena, stream));
  hold_back(gates[2]);
  EXPECT_OK(forebay_arena_allocate(arena, kBytes, nullptr, 0, 0, &other));
  opened[2].set_value();
  ASSERT_OK(forebay_stream_synchronize(one.device, stream));
  forebay_stream_destroy(one.device, stream);
}

TEST(CApiCalls, ACaptureIsEndedAndThenReleased) {
  const One one;
  const auto arena =
      c::make<c::Arena>(forebay_arena_create, one.device, c::Options{{"arena-limit", "64MiB"}});
  const auto stream = c::get<void*>(forebay_stream_create, one.device);
  const auto capture = c::get<std::uint32_t>(forebay_arena_capture_begin, arena, stream);
  EXPECT_EQ(forebay_arena_capture_release(arena, capture), FOREBAY_INVALID_ARGUMENT);
  ASSERT_OK(forebay_arena_capture_end(arena, capture));
  EXPECT_EQ(forebay_arena_capture_end(arena, capture), FOREBAY_INVALID_ARGUMENT);
  ASSERT_OK(forebay_arena_capture_release(arena, capture));
  EXPECT_EQ(forebay_arena_capture_release(arena, capture), FOREBAY_INVALID_ARGUMENT);
  forebay_stream_destroy(one.device, stream);
}

TEST(CApiCalls, APoolIsPrewarmedAndItsPeaksAreReset) {
  const One one;
  const auto pool =
      c::make<c::PinnedPool>(forebay_pinned_pool_create, one.device, c::Options{{"pinned-slab", "1MiB"}});
  const auto number = [&](const char* name) {
    return c::get<std::uint64_t>(forebay_pinned_pool_number, pool, name);
  };
  ASSERT_OK(forebay_pinned_pool_prewarm(pool, 2 << 20, 0));
  EXPECT_GE(number("held_bytes"), 2u << 20);
  const std::uint64_t slabs = number("slab_count");
  EXPECT_GE(slabs, 1u);
  EXPECT_LE(slabs, 2u);
  EXPECT_EQ(number("pin_count"), slabs);
  auto* const block = c::get<void*>(forebay_pinned_pool_allocate, pool, 5000);
  ASSERT_OK(forebay_pinned_pool_free(pool, block, FOREBAY_NO_STREAM));
  EXPECT_EQ(number("peak_requested_bytes"), 5000u);
  ASSERT_OK(forebay_pinned_pool_reset_peaks(pool));
  EXPECT_EQ(number("peak_requested_bytes"), 0u);
}

TEST(CApiCalls, APoolIsPrewarmedForWholeBlocks) {
  const One one;
  const auto pool =
      c::make<c::PinnedPool>(forebay_pinned_pool_create, one.device, c::Options{{"pinned-slab", "1MiB"}});
  constexpr std::uint64_t kBlock = 768 << 10;
  ASSERT_OK(forebay_pinned_pool_prewarm(pool, 3 * kBlock, kBlock));
  const auto pinned = c::get<std::uint64_t>(forebay_pinned_pool_number, pool, "pin_count");
  for (int i = 0; i < 3; ++i) c::get<void*>(forebay_pinned_pool_allocate, pool, kBlock);
  EXPECT_EQ(c::get<std::uint64_t>(forebay_pinned_pool_number, pool, "pin_count"), pinned);
}

TEST(CApiCalls, ABlockOfThePoolIsUsedAgainWhenItsStreamHasDoneSo) {
  const One one;
  const auto pool =
      c::make<c::PinnedPool>(forebay_pinned_pool_create, one.device, c::Options{{"pinned-slab", "1MiB"}});
  void* stream = nullptr;
  ASSERT_OK(forebay_stream_create(one.device, &stream));
  std::promise<void> opened;
  std::shared_future<void> gate = opened.get_future().share();
  const auto wait = [](void* user) { static_cast<std::shared_future<void>*>(user)->wait(); };
  ASSERT_OK(forebay_stream_call(one.device, stream, wait, &gate));
  auto* const block = c::get<void*>(forebay_pinned_pool_allocate, pool, 1 << 20);
  ASSERT_OK(forebay_pinned_pool_free(pool, block, stream));

  auto* const other = c::get<void*>(forebay_pinned_pool_allocate, pool, 1 << 20);
  EXPECT_NE(other, block) << "a copy from it may be queued";
  opened.set_value();
  ASSERT_OK(forebay_stream_synchronize(one.device, stream));
  EXPECT_EQ(c::get<void*>(forebay_pinned_pool_allocate, pool, 1 << 20), block);
  forebay_stream_destroy(one.device, stream);
}

// --- ranks ---

// Runs `work` as each of `count` ranks, on threads.
template <typename Work>
void as_ranks(int count, const Work& work) {
  const auto group =
      c::make<c::LocalGroup>(forebay_local_group_create, count, c::Options{{"deadline", "20000"}});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = c::make<c::Device>(forebay_device_open, "host", nullptr);
      const auto ranks = c::make<c::Communicator>(forebay_local_group_communicator, group, rank, device);
      work(rank, device, ranks);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CApiCalls, OperationsTakeTheirArgumentsInOrder) {
  as_ranks(3, [](int rank, const c::Device& device, const c::Communicator& ranks) {
    std::int32_t mine = -1, size = -1;
    ASSERT_OK(forebay_communicator_rank(ranks, &mine, &size));
    EXPECT_EQ(mine, rank);
    EXPECT_EQ(size, 3);
    {
      // Ranks 2 and 0, in this order, and rank 1.
      const std::int32_t keys[] = {2, 0, 1};
      const auto part = c::make<c::Communicator>(forebay_communicator_split, ranks, rank % 2, keys[rank]);
      ASSERT_OK(forebay_communicator_rank(part, &mine, &size));
      EXPECT_EQ(size, rank == 1 ? 1 : 2);
      EXPECT_EQ(mine, rank == 0 ? 1 : 0);
    }
    float source = static_cast<float>(rank + 1);
    float gathered[6] = {};
    ASSERT_OK(forebay_communicator_all_gather(ranks, &source, gathered, 8, 4, nullptr));
    ASSERT_OK(forebay_stream_synchronize(device, nullptr));
    EXPECT_EQ(std::vector<float>(gathered, gathered + 6), (std::vector<float>{1, 0, 2, 0, 3, 0}));
    float staging[3] = {};
    float target = 100;
    for (const std::int32_t first : {1, 0}) {
      ASSERT_OK(forebay_communicator_reduce_scatter(ranks, gathered, 8, 1, FOREBAY_FP32, staging, &target,
                                                    first, nullptr));
      ASSERT_OK(forebay_stream_synchronize(device, nullptr));
      EXPECT_EQ(target, static_cast<float>(3 * (rank + 1) * (first != 0 ? 1 : 2)));
    }
    if (rank == 0) {
      ASSERT_OK(forebay_communicator_send(ranks, &source, 4, 2, 7, nullptr));
    } else if (rank == 2) {
      ASSERT_OK(forebay_communicator_receive(ranks, &target, 4, 0, 7, nullptr));
    }
    const std::uint16_t half[] = {0x3F80, 0x4000, 0x4040};  // 1, 2 and 3 in bf16.
    float sum = 0;
    ASSERT_OK(
        forebay_communicator_reduce_scatter(ranks, half, 2, 1, FOREBAY_BF16, staging, &sum, 1, nullptr));
    ASSERT_OK(forebay_stream_synchronize(device, nullptr));
    EXPECT_EQ(sum, static_cast<float>(3 * (rank + 1)));
    EXPECT_OK(forebay_communicator_barrier(ranks));
    if (rank == 2) {
      EXPECT_EQ(target, 1.0f);
    }

    const json report = report_of_handle<forebay_communicator>(forebay_communicator_report, ranks);
    EXPECT_EQ(report["name"], "local");
    EXPECT_EQ(report["rank"], rank);
    EXPECT_EQ(report["size"], 3);
    std::uint64_t sent = 0, received = 0;
    std::map<std::string, int> counts;
    for (const json& operation : report["operations"]) {
      counts[operation["operation"]] = operation["count"];
      for (const json& peer : operation["peers"]) {
        sent += peer["sent"].get<std::uint64_t>();
        received += peer["received"].get<std::uint64_t>();
      }
    }
    EXPECT_EQ(report["sent_bytes"], sent);
    EXPECT_EQ(report["received_bytes"], received);
    EXPECT_EQ(counts["all_gather"], 1);
    EXPECT_EQ(counts["reduce_scatter"], 3);
    EXPECT_EQ(counts["send"], rank == 0 ? 1 : 0);
    EXPECT_GT(sent, 0u);
    ASSERT_FALSE(report["last_operations"].empty());
    for (const json& operation : report["last_operations"]) {
      EXPECT_EQ(operation["state"], "done");
      EXPECT_LE(operation["queued_ns"], operation["begun_ns"]);
      EXPECT_LE(operation["begun_ns"], operation["ended_ns"]);
    }
  });
}

TEST(CApiCalls, AGroupWaitsForItsDeadline) {
  const auto device = c::make<c::Device>(forebay_device_open, "host", nullptr);
  const auto group = c::make<c::LocalGroup>(forebay_local_group_create, 2, c::Options{{"deadline", "123"}});
  const auto ranks = c::make<c::Communicator>(forebay_local_group_communicator, group, 0, device);
  EXPECT_EQ(forebay_communicator_barrier(ranks), FOREBAY_TIMEOUT);
  EXPECT_NE(last_error().find("123"), std::string::npos) << last_error();
}

TEST(CApiCalls, RanksRefuseWhatCannotBe) {
  as_ranks(2, [](int rank, const c::Device&, const c::Communicator& ranks) {
    if (rank != 0) return;
    char byte = 0;
    EXPECT_REFUSED(forebay_communicator_exchange(ranks, &byte, (1u << 29) + 1, &byte),
                   "bytes is 536870913; an exchange is for small values");
    float value = 0;
    EXPECT_REFUSED(forebay_communicator_all_reduce(ranks, &value, 1, FOREBAY_FP32, &value, 3, nullptr),
                   "bucket_bytes is less than one element");
    EXPECT_REFUSED(forebay_communicator_abort(ranks, FOREBAY_OK, "why"), "code is 0");
    EXPECT_REFUSED(forebay_communicator_abort(ranks, FOREBAY_INTERNAL + 1, "why"), "code is 10");
    EXPECT_OK(forebay_communicator_abort(ranks, FOREBAY_INTERNAL, "why"));
  });
  std::uint64_t bytes = 0;
  EXPECT_OK(forebay_all_reduce_staging(2, std::uint64_t{1} << 40, FOREBAY_FP32, &bytes));
  for (const std::int32_t dtype : {FOREBAY_FP32, FOREBAY_BF16}) {
    ASSERT_OK(forebay_all_reduce_staging(3, 1000, dtype, &bytes));
    EXPECT_EQ(bytes, all_reduce_staging_bytes(3, 1000, static_cast<DataType>(dtype)));
  }
  EXPECT_REFUSED(forebay_all_reduce_staging(0, 64, FOREBAY_FP32, &bytes), "ranks is 0; use 1 or more");
  EXPECT_REFUSED(forebay_all_reduce_staging(2, (std::uint64_t{1} << 40) + 1, FOREBAY_FP32, &bytes),
                 "bucket_bytes is larger than 1 TiB");
  forebay_local_group* group = nullptr;
  EXPECT_REFUSED(forebay_local_group_create(0, nullptr, &group), "size is 0; use 1 to 4096");
  EXPECT_REFUSED(forebay_local_group_create(4097, nullptr, &group), "size is 4097; use 1 to 4096");

  const One one;
  forebay_communicator* made = nullptr;
  EXPECT_REFUSED(forebay_communicator_create(one.device, c::Options{{"rank", "0"}}, nullptr, nullptr, &made),
                 "only one of the options rank and size is set");
  EXPECT_REFUSED(forebay_communicator_create(one.device, c::Options{{"size", "2"}}, nullptr, nullptr, &made),
                 "only one of the options rank and size is set");
  EXPECT_REFUSED(forebay_communicator_create(one.device, c::Options{{"rank", "1"}, {"size", "1"}}, nullptr,
                                             nullptr, &made),
                 "rank is 1 of 1; use 0");
  EXPECT_REFUSED(forebay_communicator_create(
                     one.device, c::Options{{"rank", "0"}, {"size", "1"}, {"communicator", "nccl"}}, nullptr,
                     nullptr, &made),
                 "communicator is nccl and the device is no cuda device");
}

TEST(CApiCalls, TheLauncherNamesTheStore) {
  ::setenv("FOREBAY_RANK", "0", 1);
  ::setenv("FOREBAY_SIZE", "2", 1);
  ::setenv("FOREBAY_STORE", "/proc/nonexistent/store", 1);
  const One one;
  forebay_communicator* made = nullptr;
  EXPECT_NE(
      forebay_communicator_create(one.device, c::Options{{"deadline", "1000"}}, nullptr, nullptr, &made),
      FOREBAY_OK);
  EXPECT_NE(last_error().find("/proc/nonexistent:"), std::string::npos) << last_error();
  // One that is given comes before it.
  EXPECT_NE(forebay_communicator_create(
                one.device, c::Options{{"deadline", "1000"}, {"store", "/proc/no-store-of-mine/store"}},
                nullptr, nullptr, &made),
            FOREBAY_OK);
  EXPECT_NE(last_error().find("/proc/no-store-of-mine:"), std::string::npos) << last_error();
  if (gloo_available()) {
    ::setenv("FOREBAY_INTERFACE", "not-the-interface", 1);
    const testing::TemporaryDirectory directory;
    EXPECT_NE(forebay_communicator_create(one.device,
                                          c::Options{{"deadline", "1000"},
                                                     {"communicator", "gloo"},
                                                     {"interface", "my-interface"},
                                                     {"store", directory.path()}},
                                          nullptr, nullptr, &made),
              FOREBAY_OK);
    EXPECT_NE(last_error().find("my-interface"), std::string::npos) << last_error();
  }
  for (const char* const name : {"FOREBAY_RANK", "FOREBAY_SIZE", "FOREBAY_STORE", "FOREBAY_INTERFACE"})
    ::unsetenv(name);
}

// A store in this process, for ranks that are threads.
struct NamedTexts {
  std::mutex mutex;
  std::map<std::string, std::string> texts;
  std::vector<std::string> names;  // As they were set.
  int released = 0;

  static NamedTexts& of(void* user) { return *static_cast<NamedTexts*>(user); }
  forebay_store_calls calls() {
    forebay_store_calls calls{};
    calls.size = sizeof(calls);
    calls.user = this;
    calls.set = [](void* user, const char* name, const void* text, std::uint64_t bytes) -> std::int32_t {
      const std::lock_guard lock(of(user).mutex);
      of(user).names.emplace_back(name);
      of(user).texts[name].assign(static_cast<const char*>(text), bytes);
      return 0;
    };
    calls.get = [](void* user, const char* name, void* text, std::uint64_t capacity,
                   std::uint64_t* bytes) -> std::int32_t {
      const std::lock_guard lock(of(user).mutex);
      const auto found = of(user).texts.find(name);
      *bytes = found == of(user).texts.end() ? FOREBAY_ABSENT : found->second.size();
      if (found != of(user).texts.end() && *bytes <= capacity)
        std::memcpy(text, found->second.data(), found->second.size());
      return 0;
    };
    calls.set_if_absent = [](void* user, const char* name, const void* text,
                             std::uint64_t bytes) -> std::int32_t {
      const std::lock_guard lock(of(user).mutex);
      of(user).names.emplace_back(name);
      of(user).texts.emplace(name, std::string(static_cast<const char*>(text), bytes));
      return 0;
    };
    calls.remove = [](void* user, const char* name) {
      const std::lock_guard lock(of(user).mutex);
      of(user).texts.erase(name);
    };
    calls.release = [](void* user) { ++of(user).released; };
    return calls;
  }
};

TEST(CApiCalls, AStoreOfTheProgramHoldsLongTextsUnderItsPrefix) {
  NamedTexts texts;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const c::Options options{{"rank", std::to_string(rank)}, {"size", "2"},
                               {"store-prefix", "a-prefix"},   {"communicator", "shm"},
                               {"deadline", "20000"},          {"configuration", std::string(5000, 'x')}};
      // A program that was built before release() was there.
      forebay_store_calls calls = texts.calls();
      calls.size = offsetof(forebay_store_calls, release);
      const auto device = c::make<c::Device>(forebay_device_open, "host", nullptr);
      forebay_communicator* made = nullptr;
      ASSERT_OK(forebay_communicator_create(device, options, &calls, nullptr, &made));
      const c::Communicator ranks(made);
      EXPECT_OK(forebay_communicator_barrier(ranks));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(texts.released, 0);
  ASSERT_FALSE(texts.names.empty());
  for (const std::string& name : texts.names) EXPECT_NE(name.find("a-prefix"), std::string::npos) << name;

  const One one;
  forebay_communicator* made = nullptr;
  {
    // A program that was built for a later library.
    struct Later {
      forebay_store_calls known;
      void* more[64];
    } later{texts.calls(), {}};
    std::memset(later.more, 0x55, sizeof(later.more));
    later.known.size = sizeof(later);
    ASSERT_OK(forebay_communicator_create(one.device, c::Options{{"rank", "0"}, {"size", "1"}}, &later.known,
                                          nullptr, &made));
    forebay_communicator_destroy(made);
    EXPECT_EQ(texts.released, 1);
  }
  for (int function = 0; function < 4; ++function) {
    forebay_store_calls calls = texts.calls();
    if (function == 0) calls.set = nullptr;
    if (function == 1) calls.get = nullptr;
    if (function == 2) calls.set_if_absent = nullptr;
    if (function == 3) calls.remove = nullptr;
    EXPECT_REFUSED(forebay_communicator_create(one.device, nullptr, &calls, nullptr, &made),
                   "store lacks one of");
  }
}

// --- activations ---

TEST(CApiCalls, ACheckpointerCountsAndDiscards) {
  const One one;
  const One other;
  const auto timeline = c::make<c::Timeline>(forebay_timeline_create);
  forebay_checkpointer* refused = nullptr;
  EXPECT_REFUSED(forebay_checkpointer_create(one.device, other.ranks, nullptr, nullptr, &refused),
                 "communicator is on another device");
  const auto checkpointer = c::make<c::Checkpointer>(forebay_checkpointer_create, one.device, one.ranks,
                                                     timeline, c::Options{{"activation-micro-batches", "2"}});
  const c::Options spilled{{"activation-placement", "partition+spill"}};
  constexpr std::uint64_t kBytes = 4096;
  for (int unit = 0; unit < 3; ++unit)
    ASSERT_OK(forebay_checkpointer_declare(checkpointer, unit, 1, kBytes, spilled));
  std::vector<char> activation(kBytes, 'a');
  const auto save = [&](int unit, int micro_batch) {
    return forebay_checkpointer_save(checkpointer, unit, 1, micro_batch, activation.data(), kBytes, nullptr,
                                     0, nullptr);
  };
  void* data = nullptr;
  std::uint64_t bytes = 0;
  const auto load = [&](int unit, int micro_batch) {
    return forebay_checkpointer_load(checkpointer, unit, 1, micro_batch, nullptr, &data, &bytes, nullptr,
                                     nullptr);
  };
  EXPECT_REFUSED(save(0, 0), "the checkpointer is not committed");
  ASSERT_OK(forebay_checkpointer_commit(checkpointer, nullptr));
  EXPECT_REFUSED(
      forebay_checkpointer_save(checkpointer, 0, 1, 0, activation.data(), kBytes, nullptr, 5, nullptr),
      "record is null and has bytes");

  for (int unit = 0; unit < 3; ++unit) ASSERT_OK(save(unit, 0));
  for (int unit = 2; unit >= 1; --unit) {
    ASSERT_OK(load(unit, 0));
    ASSERT_OK(forebay_checkpointer_load_end(checkpointer, unit, 1, 0));
  }
  ASSERT_OK(forebay_checkpointer_discard(checkpointer, 0, 1, 0));
  EXPECT_NE(load(0, 0), FOREBAY_OK);
  ASSERT_OK(save(0, 1));
  ASSERT_OK(forebay_checkpointer_discard_all(checkpointer));
  EXPECT_NE(load(0, 1), FOREBAY_OK);
  ASSERT_OK(forebay_stream_synchronize(one.device, nullptr));
  EXPECT_OK(forebay_checkpointer_check(checkpointer));

  const json report = report_of_handle<forebay_checkpointer>(forebay_checkpointer_report, checkpointer);
  const json& statistics = report["statistics"];
  EXPECT_EQ(statistics["device_bytes"], report["plan"]["device_bytes"]);
  EXPECT_EQ(statistics["host_bytes"], report["plan"]["host_bytes"]);
  EXPECT_NE(statistics["host_bytes"], 0);
  EXPECT_EQ(statistics["file_bytes"], 0);
  EXPECT_EQ(statistics["save_count"], 4);
  EXPECT_EQ(statistics["load_count"], 2);
  EXPECT_LE(statistics["ahead_count"], 2);
  EXPECT_GE(statistics["spilled_bytes"], 3 * kBytes);
  EXPECT_EQ(statistics["spilled_bytes"].get<std::uint64_t>() % kBytes, 0u);
  EXPECT_GE(statistics["fetched_bytes"], 2 * kBytes);
  EXPECT_EQ(statistics["fetched_bytes"].get<std::uint64_t>() % kBytes, 0u);
  EXPECT_EQ(statistics["most_saved_bytes"], 3 * kBytes);
  EXPECT_EQ(statistics["most_micro_batches"], 1);
  const std::string spans = c::get<const char*>(forebay_timeline_report, timeline);
  EXPECT_NE(spans.find("\"name\""), std::string::npos) << spans;

  ASSERT_OK(forebay_communicator_abort(one.ranks, FOREBAY_PEER_LOST, "the power went out"));
  EXPECT_EQ(forebay_checkpointer_check(checkpointer), FOREBAY_PEER_LOST);
}

TEST(CApiCalls, ALoadEndsByItsOwnKey) {
  const One one;
  std::vector<char> activation(512, 'a');  // Outlives the copies, which destroying the checkpointer awaits.
  const auto checkpointer = c::make<c::Checkpointer>(forebay_checkpointer_create, one.device, one.ranks,
                                                     nullptr, c::Options{{"activation-leases", "2"}});
  for (int unit = 0; unit < 2; ++unit)
    ASSERT_OK(forebay_checkpointer_declare(checkpointer, unit, 0, 512, nullptr));
  ASSERT_OK(forebay_checkpointer_commit(checkpointer, nullptr));
  for (int unit = 0; unit < 2; ++unit)
    ASSERT_OK(
        forebay_checkpointer_save(checkpointer, unit, 0, 0, activation.data(), 512, nullptr, 0, nullptr));
  void* data = nullptr;
  std::uint64_t bytes = 0;
  for (int unit = 1; unit >= 0; --unit)
    ASSERT_OK(forebay_checkpointer_load(checkpointer, unit, 0, 0, nullptr, &data, &bytes, nullptr, nullptr));
  ASSERT_OK(forebay_checkpointer_load_end(checkpointer, 0, 0, 0));
  EXPECT_REFUSED(forebay_checkpointer_load_end(checkpointer, 0, 0, 0), "this activation is not loaded");
  EXPECT_OK(forebay_checkpointer_load_end(checkpointer, 1, 0, 0));
}

// --- engine ---

// Two ranks that are a grid, with a data-parallel part of one rank each.
template <typename Work>
void as_grid(const Work& work) {
  as_ranks(2, [&](int rank, const c::Device& device, const c::Communicator& grid) {
    const auto part = c::make<c::Communicator>(forebay_communicator_split, grid, rank, 0);
    const auto engine = c::make<c::Engine>(forebay_engine_create, device, part, grid, nullptr, nullptr);
    work(rank, device, grid, engine);
  });
}

// One step of units that have one parameter of `counts` elements each, with gradients of `value`.
forebay_step_result step_of(forebay_device* device, forebay_engine* engine, const std::vector<int>& counts,
                            float value) {
  c::call(forebay_step_begin, engine);
  c::call(forebay_micro_step_begin, engine, 0);
  const auto units = static_cast<int>(counts.size());
  for (int unit = 0; unit < units; ++unit) c::Lease(engine, unit, c::Pass::kForward, nullptr);
  for (int unit = units - 1; unit >= 0; --unit) {
    const c::Lease lease(engine, unit, c::Pass::kBackward, nullptr);
    c::call(forebay_stream_synchronize, device, nullptr);
    std::fill_n(lease.gradient<float>(0).address, counts[static_cast<std::size_t>(unit)], value);
  }
  return c::step(engine);
}

TEST(CApiCalls, AGridSharesAUnitTheNormAndTheMetric) {
  as_grid([](int rank, const c::Device& device, const c::Communicator& grid, const c::Engine& engine) {
    const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, engine, "shared", 0);
    c::get<std::int32_t>(forebay_engine_add_parameter, engine, unit, "w", 64, 0, 0);
    auto stages = c::make<c::Communicator>(forebay_communicator_split, grid, 0, rank);
    ASSERT_OK(forebay_engine_share(engine, unit, stages));
    stages = {};  // The engine keeps it.
    ASSERT_OK(forebay_engine_commit(engine));
    ASSERT_OK(forebay_hyperparameter(engine, FOREBAY_WHOLE_STEP, "metric", rank + 1));
    const forebay_step_result result = step_of(device, engine, {64}, static_cast<float>(rank + 1));
    EXPECT_NEAR(result.grad_norm, 8 * (1 + 2), 1e-6) << "the gradient is the sum, and counts once";
    EXPECT_EQ(result.metric_sum, 3.0);
  });
}

TEST(CApiCalls, ActivationsHaveTheRoomThatIsLeft) {
  for (const std::uint64_t more : {0, 1}) {
    const One one(c::Options{{"memory", "8MiB"}});
    const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, one.engine, "unit", 0);
    c::get<std::int32_t>(forebay_engine_add_parameter, one.engine, unit, "w", 64, 0, 0);
    const auto room = c::get<std::uint64_t>(forebay_engine_activation_room, one.engine);
    ASSERT_OK(forebay_engine_declare_activations(one.engine, room + more));
    ASSERT_EQ(forebay_engine_commit(one.engine), more == 0 ? FOREBAY_OK : FOREBAY_OUT_OF_MEMORY);
    if (more != 0) continue;
    auto* const activations = c::get<char*>(
        [](forebay_engine* engine, char** address) {
          return forebay_engine_activations(engine, reinterpret_cast<void**>(address));
        },
        one.engine);
    ASSERT_NE(activations, nullptr);
    activations[room - 1] = 1;
  }
  One one;
  one.commit();
  EXPECT_EQ(c::get<void*>(forebay_engine_activations, one.engine), nullptr);
}

TEST(CApiCalls, AnAddressIsThatOfTheAcquiredParameter) {
  One one;
  c::get<std::int32_t>(forebay_engine_add_unit, one.engine, "a", 0);
  for (const char* const name : {"w", "v"})
    c::get<std::int32_t>(forebay_engine_add_parameter, one.engine, 0, name, 64, 0, 0);
  ASSERT_OK(forebay_engine_commit(one.engine));
  ASSERT_OK(forebay_step_begin(one.engine));
  ASSERT_OK(forebay_micro_step_begin(one.engine, 0));
  const c::Lease lease(one.engine, 0, c::Pass::kForward, nullptr);
  for (const std::int32_t index : {0, 1})
    EXPECT_EQ(c::get<void*>(forebay_engine_address, one.engine, 0, index), lease.parameter<void>(index));
}

// The third unit names the first one's parameter by the tie of the second.
TEST(CApiCalls, ATieOfATieIsTheOwnersParameter) {
  One one;
  for (const char* const name : {"a", "b", "c"})
    c::get<std::int32_t>(forebay_engine_add_unit, one.engine, name, 0);
  c::get<std::int32_t>(forebay_engine_add_parameter, one.engine, 0, "w", 64, 0, 0);
  c::get<std::int32_t>(forebay_engine_add_parameter, one.engine, 0, "v", 32, 0, 0);
  EXPECT_EQ(c::get<std::int32_t>(forebay_engine_tie, one.engine, 1, 0, 1), 0);
  EXPECT_EQ(c::get<std::int32_t>(forebay_engine_tie, one.engine, 2, 1, 0), 0);
  EXPECT_REFUSED(forebay_engine_freeze(one.engine, 1, 0, 1), "not committed");
  ASSERT_OK(forebay_engine_commit(one.engine));
  const float value = 5;
  ASSERT_OK(forebay_engine_set(one.engine, 2, 0, FOREBAY_FP32, &value, 31, 1));
  float read = 0;
  ASSERT_OK(forebay_engine_get(one.engine, 0, 1, FOREBAY_FP32, &read, 31, 1));
  EXPECT_EQ(read, 5.0f);
  ASSERT_OK(forebay_step_begin(one.engine));
  ASSERT_OK(forebay_micro_step_begin(one.engine, 0));
  for (const std::int32_t unit : {0, 1, 2}) c::Lease(one.engine, unit, c::Pass::kForward, nullptr);
  {
    const c::Lease lease(one.engine, 2, c::Pass::kBackward, nullptr);
    auto* const zeroed = c::get<void*>(forebay_zeroed_gradient, one.engine, 2, 0);
    EXPECT_NE(zeroed, nullptr);
    EXPECT_EQ(lease.gradient<void>(0).address, zeroed);
    EXPECT_OK(forebay_gradient_ready(one.engine, 2, 0));
    EXPECT_EQ(forebay_gradient_ready(one.engine, 2, 1), FOREBAY_INVALID_ARGUMENT);
  }
  EXPECT_REFUSED(forebay_engine_get(one.engine, 0, 2, FOREBAY_FP32, &read, 0, 1),
                 "index is 2; unit a has 2 parameters");
  EXPECT_REFUSED(forebay_engine_get(one.engine, 2, 1, FOREBAY_FP32, &read, 0, 1),
                 "index is 1; unit c has 1 parameters");
}

// The digest is of the whole model, and a shard's of the part of a rank.
TEST(CApiCalls, DigestsAreOfTheModelOrOfTheShard) {
  std::map<std::string, int> whole, shards;
  std::mutex mutex;
  as_ranks(2, [&](int, const c::Device& device, const c::Communicator& ranks) {
    const auto engine = c::make<c::Engine>(forebay_engine_create, device, ranks, nullptr, nullptr,
                                           c::Options{{"stage", "3"}});
    const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, engine, "unit", 0);
    c::get<std::int32_t>(forebay_engine_add_parameter, engine, unit, "w", 64, 0, 0);
    ASSERT_OK(forebay_engine_commit(engine));
    const float value = 5;
    ASSERT_OK(forebay_engine_set(engine, unit, 0, FOREBAY_FP32, &value, 1, 1));
    char digest[33], shard[33];
    ASSERT_OK(forebay_engine_digest(engine, digest));
    ASSERT_OK(forebay_engine_shard_digest(engine, shard));
    const std::lock_guard lock(mutex);
    ++whole[digest];
    ++shards[shard];
  });
  EXPECT_EQ(whole.size(), 1u);
  EXPECT_EQ(shards.size(), 2u);
}

TEST(CApiCalls, ATimelineHasTheSpansOfAnEngine) {
  const One one;
  const auto timeline = c::make<c::Timeline>(forebay_timeline_create);
  const auto engine =
      c::make<c::Engine>(forebay_engine_create, one.device, one.ranks, nullptr, timeline, nullptr);
  const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, engine, "unit", 0);
  c::get<std::int32_t>(forebay_engine_add_parameter, engine, unit, "w", 64, 0, 0);
  ASSERT_OK(forebay_engine_commit(engine));
  step_of(one.device, engine, {64}, 1);
  const std::string spans = c::get<const char*>(forebay_timeline_report, timeline);
  EXPECT_NE(spans.find("\"name\""), std::string::npos) << spans;
}

TEST(CApiCalls, TheDescriptionIsThatOfTheCalls) {
  One one(c::Options{{"optimizer", "muon"}, {"muon-rate", "match-rms-adamw"}});
  const auto plan = c::make<c::Engine>(forebay_engine_plan,
                                       c::Options{{"optimizer", "muon"}, {"muon-rate", "match-rms-adamw"}});
  const One other;
  forebay_engine* refused = nullptr;
  EXPECT_REFUSED(forebay_engine_create(one.device, other.ranks, nullptr, nullptr, nullptr, &refused),
                 "communicator is on another device");
  for (const c::Engine* engine : std::initializer_list<const c::Engine*>{&one.engine, &plan}) {
    std::int32_t index = 0;
    EXPECT_REFUSED(forebay_engine_add_unit(*engine, "a", 2, &index),
                   "flags is 2; combine those of this function");
    const auto first =
        c::get<std::int32_t>(forebay_engine_add_unit, *engine, "first", FOREBAY_BACKWARD_READS_NOTHING);
    EXPECT_REFUSED(forebay_engine_add_parameter(*engine, first, "a", 4, 0, 16, &index), "flags is 16");
    const auto add = [&](const char* name, std::int32_t flags) {
      const auto added =
          c::get<std::int32_t>(forebay_engine_add_parameter, *engine, first, name, 128 * 64, 0, flags);
      const std::uint64_t shape[] = {128, 64}, empty[] = {0, 64};
      EXPECT_NE(forebay_engine_declare_shape(*engine, first, added, empty, 2), FOREBAY_OK);
      EXPECT_OK(forebay_engine_declare_shape(*engine, first, added, shape, 2));
    };
    add("frozen", FOREBAY_FROZEN);
    add("replicated", FOREBAY_REPLICATED);
    add("elementwise", FOREBAY_ELEMENTWISE);
    const auto second = c::get<std::int32_t>(forebay_engine_add_unit, *engine, "second", 0);
    EXPECT_REFUSED(forebay_engine_tie(*engine, second, second, 0, &index),
                   "of_unit is not earlier than unit");
    c::get<std::int32_t>(forebay_engine_add_parameter, *engine, second, "w", 32, 1, 0);
    EXPECT_EQ(c::get<std::int32_t>(forebay_engine_tie, *engine, second, first, 1), 1);
    EXPECT_REFUSED(forebay_engine_add_model(*engine, R"({"model_type": "gpt2"})"),
                   "the engine has units already");
    ASSERT_OK(forebay_engine_declare_activations(*engine, 12345));
  }
  const json trained = engine_report(one.engine), planned = engine_report(plan);
  EXPECT_EQ(trained["model"], planned["model"]);
  EXPECT_EQ(trained["plan"], planned["plan"]);
  EXPECT_EQ(planned["model"]["activation_bytes"], 12345);
  const json& first = trained["model"]["units"][0];
  EXPECT_EQ(first["backward_reads_parameters"], false);
  EXPECT_EQ(first["parameters"][0]["frozen"], true);
  EXPECT_EQ(first["parameters"][0]["replicated"], false);
  EXPECT_EQ(first["parameters"][1]["frozen"], false);
  EXPECT_EQ(first["parameters"][1]["replicated"], true);
}

TEST(CApiCalls, OptionsThatDoNotGoTogetherAreRefusedWhenAnEngineIsMade) {
  const One one;
  const c::Options local{{"stage", "2"}, {"accumulate", "local"}}, files{{"offload-tier", "nvme:/tmp"}};
  forebay_engine* made = nullptr;
  for (const bool plans : {false, true}) {
    for (const auto& [options, named] : {std::pair(&local, "accumulate"), {&files, "nothing is offloaded"}}) {
      EXPECT_EQ(plans ? forebay_engine_plan(*options, &made)
                      : forebay_engine_create(one.device, one.ranks, nullptr, nullptr, *options, &made),
                FOREBAY_INVALID_ARGUMENT);
      EXPECT_NE(last_error().find(named), std::string::npos) << last_error();
    }
  }
}

TEST(CApiCalls, TheStatisticsAreOfTheFilesTheWireAndTheSteps) {
  const testing::TemporaryDirectory directory;
  One one(c::Options{{"stage", "3"}, {"offload", "optimizer"}, {"offload-tier", "nvme:" + directory.path()}});
  one.commit();
  const json before = engine_report(one.engine)["statistics"];
  for (int step = 0; step < 2; ++step) one.step(1);
  const json report = engine_report(one.engine);
  const json& statistics = report["statistics"];
  const json& files = report["plan"]["files"];
  EXPECT_EQ(statistics["file_bytes"], files["total"]);
  EXPECT_NE(statistics["file_bytes"], 0);
  const auto moved = [&](const char* name) {
    return statistics[name].get<std::uint64_t>() - before[name].get<std::uint64_t>();
  };
  // The reads of the step to come may have begun.
  EXPECT_GE(moved("file_read_bytes"), 2 * files["read_per_step"].get<std::uint64_t>());
  EXPECT_EQ(moved("file_written_bytes"), 2 * files["written_per_step"].get<std::uint64_t>());
  EXPECT_NE(statistics["file_read_bytes"], statistics["file_written_bytes"]);
  EXPECT_NE(statistics["store_description"], "");
  EXPECT_EQ(statistics["peak_reserved_bytes"], statistics["planned_reserved_bytes"]);
  EXPECT_EQ(statistics["traffic"], json::parse(R"({"sent": 0, "received": 0})"));
  EXPECT_EQ(statistics["attempted_steps"], 2);
  EXPECT_EQ(statistics["applied_steps"], 2);
}

TEST(CApiCalls, AGradientIsOfTheBackwardPassAndAccumulates) {
  One one(c::Options{{"order-of-units", "recorded"}, {"micro-steps", "2"}, {"accumulate", "local"}});
  one.commit();
  ASSERT_OK(forebay_step_begin(one.engine));
  for (int micro_step = 0; micro_step < 2; ++micro_step) {
    ASSERT_OK(forebay_micro_step_begin(one.engine, micro_step));
    { const c::Lease lease(one.engine, one.first, c::Pass::kForward, nullptr); }
    void* address = nullptr;
    std::int32_t accumulate = -1;
    {
      const c::Lease forward(one.engine, one.first, c::Pass::kForward, nullptr);
      EXPECT_REFUSED(forebay_gradient(one.engine, one.first, 0, &address, &accumulate),
                     "is not acquired for its backward pass");
    }
    const c::Lease backward(one.engine, one.first, c::Pass::kBackward, nullptr);
    ASSERT_OK(forebay_stream_synchronize(one.device, nullptr));
    ASSERT_OK(forebay_gradient(one.engine, one.first, 0, &address, &accumulate));
    EXPECT_EQ(accumulate, micro_step);
    for (int i = 0; i < 256; ++i)
      static_cast<float*>(address)[i] = accumulate != 0 ? static_cast<float*>(address)[i] + 1 : 1;
  }
  EXPECT_NEAR(c::step(one.engine).grad_norm, 16, 1e-6);
  EXPECT_TRUE(engine_report(one.engine)["recorded_order"].is_string());
}

TEST(CApiCalls, ASplitHasItsDimensionSectionsAndParts) {
  One one;
  one.describe();
  const std::uint64_t whole[] = {16, 32};  // The parameter has half of it.
  const auto split = [&](std::int32_t dimension, std::uint64_t sections, std::uint64_t part,
                         std::uint64_t parts) {
    return forebay_engine_declare_split(one.engine, one.first, 0, whole, 2, dimension, sections, part, parts);
  };
  EXPECT_EQ(split(2, 4, 1, 2), FOREBAY_INVALID_ARGUMENT) << "there are two dimensions";
  EXPECT_EQ(split(1, 3, 1, 2), FOREBAY_INVALID_ARGUMENT) << "32 have no 3 equal sections";
  EXPECT_EQ(split(1, 4, 2, 2), FOREBAY_INVALID_ARGUMENT) << "the parts are 0 and 1";
  EXPECT_EQ(split(1, 4, 1, 4), FOREBAY_INVALID_ARGUMENT) << "a quarter is another count";
  EXPECT_OK(split(1, 4, 1, 2));
}

TEST(CApiCalls, AnOptionalGradientMayBeLeftOut) {
  for (const bool optional : {false, true}) {
    One one(c::Options{{"optional-gradients", "off"}});
    const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, one.engine, "unit", 0);
    c::get<std::int32_t>(forebay_engine_add_parameter, one.engine, unit, "frozen", 64, 0, FOREBAY_FROZEN);
    c::get<std::int32_t>(forebay_engine_add_parameter, one.engine, unit, "w", 64, 0,
                         optional ? FOREBAY_OPTIONAL : 0);
    ASSERT_OK(forebay_engine_commit(one.engine));
    ASSERT_OK(forebay_step_begin(one.engine));
    ASSERT_OK(forebay_micro_step_begin(one.engine, 0));
    for (const c::Pass pass : {c::Pass::kForward, c::Pass::kBackward})
      c::Lease(one.engine, unit, pass, nullptr);
    forebay_step_result result{};
    EXPECT_EQ(forebay_step(one.engine, &result, sizeof(result)) == FOREBAY_OK, optional) << last_error();
  }
}

TEST(CApiCalls, AUnitThatIsSkippedNeedsNoPass) {
  One one;
  one.commit();
  ASSERT_OK(forebay_step_begin(one.engine));
  ASSERT_OK(forebay_micro_step_begin(one.engine, 0));
  ASSERT_OK(forebay_skip(one.engine, one.first));
  c::Lease(one.engine, one.second, c::Pass::kForward, nullptr);
  c::Lease(one.engine, one.second, c::Pass::kBackward, nullptr);
  forebay_step_result result{};
  EXPECT_OK(forebay_step(one.engine, &result, sizeof(result)));
}

float value_of(const One& one) {
  float value = 0;
  c::call(forebay_engine_get, one.engine, one.first, 0, FOREBAY_FP32, &value, 0, 1);
  return value;
}

TEST(CApiCalls, AResetOfTheMomentsBeginsAnotherOptimizer) {
  One one;
  one.commit();
  one.step(1);
  one.step(1);
  ASSERT_OK(forebay_engine_reset_moments(one.engine));
  std::uint64_t number = 1;
  ASSERT_OK(forebay_engine_number(one.engine, "applied_steps", &number));
  EXPECT_EQ(number, 0u);
  ASSERT_OK(forebay_engine_number(one.engine, "attempted_steps", &number));
  EXPECT_EQ(number, 2u);
  EXPECT_EQ(forebay_engine_reset_moments(nullptr), FOREBAY_INVALID_ARGUMENT);
}

TEST(CApiCalls, AFrozenParameterStaysAndTheAverageIsSwappedIn) {
  One one(c::Options{{"ema", "0.5"}});
  one.commit();
  one.step(1);
  const float value = value_of(one);
  ASSERT_OK(forebay_engine_swap_average(one.engine));
  EXPECT_NE(value_of(one), value);
  ASSERT_OK(forebay_engine_swap_average(one.engine));
  EXPECT_EQ(value_of(one), value);
  ASSERT_OK(forebay_engine_freeze(one.engine, one.first, 0, 1));
  ASSERT_OK(forebay_step_begin(one.engine));
  ASSERT_OK(forebay_micro_step_begin(one.engine, 0));
  for (const std::int32_t unit : {one.first, one.second})
    c::Lease(one.engine, unit, c::Pass::kForward, nullptr);
  for (const std::int32_t unit : {one.second, one.first}) {
    const c::Lease lease(one.engine, unit, c::Pass::kBackward, nullptr);
    EXPECT_EQ(lease.gradient<float>(0).address == nullptr, unit == one.first);
  }
  c::step(one.engine);
  EXPECT_EQ(value_of(one), value);
  ASSERT_OK(forebay_engine_freeze(one.engine, one.first, 0, 0));
  one.step(1);
  EXPECT_NE(value_of(one), value);
}

TEST(CApiCalls, EachStateIsSpilledByItsFlag) {
  One one(c::Options{{"spillable", "on"}, {"dtype", "bf16"}, {"granularity", "64KiB"}});
  const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, one.engine, "unit", 0);
  c::get<std::int32_t>(forebay_engine_add_parameter, one.engine, unit, "w", 1 << 20, 0, 0);
  ASSERT_OK(forebay_engine_declare_activations(one.engine, 7 << 20));
  ASSERT_OK(forebay_engine_commit(one.engine));
  EXPECT_REFUSED(forebay_spill(one.engine, 16), "flags is 16");
  const auto free_bytes = [&] {
    return report_of_handle<forebay_device>(forebay_device_report, one.device)["free_bytes"]
        .get<std::uint64_t>();
  };
  const json plan = engine_report(one.engine)["plan"]["bytes"];
  const auto bytes = [&](const char* pool) { return plan[pool].get<std::uint64_t>(); };
  const std::uint64_t before = free_bytes();
  const std::pair<std::int32_t, std::uint64_t> states[] = {
      {FOREBAY_SPILL_PARAMETERS, bytes("parameters")},
      {FOREBAY_SPILL_GRADIENTS, bytes("gradients")},
      {FOREBAY_SPILL_OPTIMIZER, bytes("optimizer")},
      {FOREBAY_SPILL_WORKSPACE, bytes("gathered") + bytes("buckets") + bytes("activations")}};
  for (const auto& [flag, spilled] : states) {
    ASSERT_OK(forebay_spill(one.engine, flag));
    const std::uint64_t gained = free_bytes() - before;
    EXPECT_NEAR(static_cast<double>(gained), static_cast<double>(spilled), 2 << 16) << flag;
    ASSERT_OK(forebay_fetch(one.engine));
    EXPECT_EQ(free_bytes(), before) << flag;
  }
}

TEST(CApiCalls, ADirectoryIsLockedAndKeepsTheNewestStates) {
  const testing::TemporaryDirectory directory;
  One one(c::Options{{"save-async", "on"}});
  one.commit();
  EXPECT_TRUE(directory.empty());
  ASSERT_OK(forebay_lock(one.engine, directory.path().c_str()));
  EXPECT_FALSE(directory.empty());
  EXPECT_REFUSED(forebay_save(one.engine, directory.path().c_str(), nullptr, 3),
                 "trainer_state is null and has bytes");
  for (int step = 0; step < 3; ++step) {
    one.step(1);
    ASSERT_OK(forebay_save_begin(one.engine, directory.path().c_str(), "cursor", 6, 2));
    ASSERT_OK(forebay_save_end(one.engine));
    EXPECT_TRUE(std::filesystem::exists(directory.path() + "/latest"));
  }
  int states = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path()))
    states += entry.path().filename().string().starts_with("step-") ? 1 : 0;
  EXPECT_EQ(states, 2);
  const void* state = nullptr;
  std::uint64_t bytes = 0;
  ASSERT_OK(forebay_load(one.engine, directory.path().c_str(), &state, &bytes));
  EXPECT_EQ(std::string(static_cast<const char*>(state), bytes), "cursor");
}

}  // namespace
}  // namespace forebay::api
