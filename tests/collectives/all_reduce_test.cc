// all_reduce against the naive sum in rank order, to the last bit.
#include "forebay/all_reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/support/elements.h"
#include "tests/support/local_world.h"

namespace forebay::testing {
namespace {

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16};

std::uint64_t seed_of_sums() {
  const char* text = std::getenv("FOREBAY_SEED");
  const std::uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 20261122;
  std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

// Values with magnitudes so far apart that the order of a sum shows.
float sample_of(std::uint64_t seed, int rank, std::uint64_t index) {
  const std::uint64_t x = mix(seed + static_cast<std::uint64_t>(rank) * 1'000'003 + index);
  const float unit = static_cast<float>(x >> 40) / 16777216.0f - 0.5f;
  return std::ldexp(unit, static_cast<int>(x & 7) - 4);
}

// Host backends' memory is not the process's ordinary memory: blocks come from the backend.
class Block {
 public:
  Block(Backend& backend, std::uint64_t bytes) : backend_(backend) {
    address_ = value_or_throw(backend.alloc(bytes > 0 ? bytes : 1));
  }
  ~Block() { static_cast<void>(backend_.free(address_)); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::byte* data() const { return address_; }

 private:
  Backend& backend_;
  DevicePtr address_;
};

struct Case {
  int ranks;
  std::uint64_t count;
  std::uint64_t bucket_bytes;
  DataType type;
};

void check(const Case& c, std::uint64_t seed) {
  SCOPED_TRACE(std::to_string(c.count) + " elements of " + data_type_name(c.type) + ", " +
               std::to_string(c.ranks) + " ranks, buckets of " + std::to_string(c.bucket_bytes) + " bytes");
  run_ranks(c.ranks, {}, [&](Rank& rank) {
    const std::size_t element = element_bytes(c.type);
    const std::uint64_t guard = 16;  // Elements past the end that stay as they are.
    std::vector<std::byte> values((c.count + guard) * element);
    for (std::uint64_t i = 0; i < c.count + guard; ++i)
      store(c.type, values.data(), i, sample_of(seed, rank.communicator->rank(), i));
    const Block data(*rank.backend, values.size());
    const std::uint64_t staging_bytes = all_reduce_staging_bytes(c.ranks, c.bucket_bytes, c.type);
    const Block staging(*rank.backend, staging_bytes + 64);
    const Stream stream = value_or_throw(rank.backend->stream_create());
    std::vector<std::byte> past(64);
    throw_if_error(rank.backend->fill_async(staging.data(), 0xCB, staging_bytes + 64, stream));
    throw_if_error(rank.backend->copy_async(data.data(), values.data(), values.size(), stream));

    throw_if_error(all_reduce(*rank.communicator, *rank.backend, *rank.kernels,
                              {.data = data.data(),
                               .count = c.count,
                               .type = c.type,
                               .staging = staging.data(),
                               .bucket_bytes = c.bucket_bytes},
                              stream));

    throw_if_error(rank.backend->copy_async(values.data(), data.data(), values.size(), stream));
    throw_if_error(rank.backend->copy_async(past.data(), staging.data() + staging_bytes, 64, stream));
    throw_if_error(rank.backend->stream_synchronize(stream));
    throw_if_error(rank.communicator->status());
    EXPECT_EQ(rank.communicator->traffic().sent_bytes,
              all_reduce_sent_bytes(c.ranks, c.bucket_bytes, c.type, c.count));
    static_cast<void>(rank.backend->stream_destroy(stream));
    for (std::uint64_t i = 0; i < c.count; ++i) {
      float expected = round_to(c.type, sample_of(seed, 0, i));
      for (int r = 1; r < c.ranks; ++r) expected += round_to(c.type, sample_of(seed, r, i));
      ASSERT_EQ(load(c.type, values.data(), i), round_to(c.type, expected)) << i;
    }
    for (std::uint64_t i = c.count; i < c.count + guard; ++i) {
      ASSERT_EQ(load(c.type, values.data(), i),
                round_to(c.type, sample_of(seed, rank.communicator->rank(), i)))
          << "an element past the end was written";
    }
    for (const std::byte byte : past) ASSERT_EQ(byte, std::byte{0xCB}) << "past the end of the staging";
    throw_if_error(rank.communicator->barrier());
  });
}

TEST(AllReduce, AddsInRankOrderAndRoundsOnceForAnyCountAndBucket) {
  const std::uint64_t seed = seed_of_sums();
  for (const DataType type : kTypes) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const std::uint64_t count : {0, 1, 2, 3, 7, 1000, 1001}) {
        for (const std::uint64_t bucket_bytes : {64, 130, 1 << 20})
          check({ranks, count, bucket_bytes, type}, seed);
      }
    }
  }
}

TEST(AllReduce, TakesABucketThatIsSmallerThanOneElementOfEachRank) {
  const std::uint64_t seed = seed_of_sums();
  check({3, 10, 1, DataType::kFloat32}, seed);
  check({4, 9, 2, DataType::kBfloat16}, seed);
}

TEST(AllReduce, MovesTheBytesOfARingAndItsPadding) {
  run_ranks(4, {}, [](Rank& rank) {
    const std::uint64_t bucket_bytes = 4096;
    const std::uint64_t count = 2000 * 4;  // Some whole buckets and a part of one.
    const Block data(*rank.backend, count * sizeof(float));
    const Block staging(*rank.backend, all_reduce_staging_bytes(4, bucket_bytes, DataType::kFloat32));
    const Stream stream = value_or_throw(rank.backend->stream_create());
    throw_if_error(rank.backend->fill_async(data.data(), 0, count * sizeof(float), stream));

    throw_if_error(all_reduce(*rank.communicator, *rank.backend, *rank.kernels,
                              {.data = data.data(),
                               .count = count,
                               .type = DataType::kFloat32,
                               .staging = staging.data(),
                               .bucket_bytes = bucket_bytes},
                              stream));

    throw_if_error(rank.backend->stream_synchronize(stream));
    EXPECT_EQ(rank.communicator->traffic().sent_bytes, 2 * 3 * (count / 4) * sizeof(float));
    EXPECT_EQ(rank.communicator->traffic().received_bytes, 2 * 3 * (count / 4) * sizeof(float));
    static_cast<void>(rank.backend->stream_destroy(stream));
    throw_if_error(rank.communicator->barrier());
  });
}

TEST(AllReduce, OfOneRankThatFailedIsTheFailure) {
  run_ranks(1, {}, [](Rank& rank) {
    const Block data(*rank.backend, 64);
    const AllReduceArguments arguments{
        .data = data.data(), .count = 16, .type = DataType::kFloat32, .staging = nullptr, .bucket_bytes = 64};
    EXPECT_TRUE(all_reduce(*rank.communicator, *rank.backend, *rank.kernels, arguments, {}).ok());

    rank.communicator->abort(Status(StatusCode::kIoError, "the disk is full"));

    EXPECT_EQ(all_reduce(*rank.communicator, *rank.backend, *rank.kernels, arguments, {}).message(),
              "the disk is full");
  });
}

TEST(AllReduce, NeedsNoStagingForOneRankAndABoundedOneForMore) {
  EXPECT_EQ(all_reduce_staging_bytes(1, 1 << 20, DataType::kFloat32), 0u);
  EXPECT_EQ(all_reduce_staging_bytes(4, 1 << 20, DataType::kFloat32), (2u << 20) + (1u << 18));
  EXPECT_EQ(all_reduce_staging_bytes(4, 1 << 20, DataType::kBfloat16), (2u << 20) + (1u << 19));
}

}  // namespace
}  // namespace forebay::testing
