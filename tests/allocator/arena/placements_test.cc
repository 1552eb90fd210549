// The placements of whole jobs, byte for byte. A change that only makes the arena faster keeps them. A change
// that places blocks better changes this table too: the test prints the new hashes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <ostream>
#include <utility>
#include <vector>

#include "forebay/arena.h"
#include "forebay/model_backend.h"
#include "forebay/units.h"
#include "runtime/command/traces/allocation_trace.h"
#include "tests/allocator/arena/families.h"

namespace forebay {
namespace {

using testing::Family;
using testing::family_name;
using testing::FamilyMaker;

struct Job {
  Family family;
  std::uint64_t seed;
  std::uint64_t first;  // The hash of all addresses in the first pass, relative to the first one of all.
  std::uint64_t third;
};

constexpr Job kJobs[] = {
    {Family::kZero3Loop, 1, 0xd90dbcf1d72ff21b, 0xd90dbcf1d72ff21b},
    {Family::kZero3Loop, 2, 0x597a4435aee927b1, 0x597a4435aee927b1},
    {Family::kZero3Loop, 3, 0x6b877107537b16f0, 0x6b877107537b16f0},
    {Family::kRandomLengths, 1, 0x43d121e983254cba, 0x43d121e983254cba},
    {Family::kRandomLengths, 2, 0x615a77b8531f0271, 0x615a77b8531f0271},
    {Family::kRandomLengths, 3, 0x539ccb5ab32f7b9b, 0x539ccb5ab32f7b9b},
    {Family::kExperts, 1, 0xadd43b57bfd1fde5, 0x246177a7543074f2},
    {Family::kExperts, 2, 0x855f025654a857b2, 0x855f025654a857b2},
    {Family::kExperts, 3, 0x4944b693d4a512db, 0x4944b693d4a512db},
    {Family::kServing, 1, 0xa90eef9d7ded3a28, 0x8477b7dd26751c2c},
    {Family::kServing, 2, 0x7392ca0b2cd36759, 0x7392ca0b2cd36759},
    {Family::kServing, 3, 0x9b64828e407ca76e, 0x9b64828e407ca76e},
    {Family::kCrossStream, 1, 0x45d875149b47b99d, 0xd81cca112ff4ead1},
    {Family::kCrossStream, 2, 0xb323413294fdec3d, 0x5ef8afff257d5526},
    {Family::kCrossStream, 3, 0xc9ddf6d740c12167, 0xc9ddf6d740c12167},
    {Family::kTrainEvaluate, 1, 0xdea73aa2fb5bfb66, 0xdea73aa2fb5bfb66},
    {Family::kTrainEvaluate, 2, 0x171ca15006dc230d, 0x171ca15006dc230d},
    {Family::kTrainEvaluate, 3, 0xcc5d5e1823634343, 0xcc5d5e1823634343},
    {Family::kLeaks, 1, 0xc0262499c7d6b74f, 0x8e915d3858e75bfd},
    {Family::kLeaks, 2, 0x00a3022294cb2c0c, 0x00a3022294cb2c0c},
    {Family::kLeaks, 3, 0x2f4bb592c490b0ca, 0x2f4bb592c490b0ca},
    {Family::kRobson, 1, 0xce8adf25049a79e2, 0xb0ffc1c3cfb4f359},
    {Family::kRobson, 2, 0xbb64e50e7dbe476d, 0xe1dbf1157165cd58},
    {Family::kRobson, 3, 0x068a291829a2b637, 0x068a291829a2b637},
};

void PrintTo(const Job& job, std::ostream* out) {
  *out << family_name(job.family) << " " << job.seed;
}

class ArenaPlacements : public ::testing::TestWithParam<Job> {};

TEST_P(ArenaPlacements, AreTheOnesOfTheTable) {
  const Job& job = GetParam();
  const AllocationTrace trace = FamilyMaker(job.family, job.seed).make();
  ModelBackendOptions options;
  options.memory_bytes = std::max<std::uint64_t>(128_GiB, round_up(2 * trace.peak_requested_bytes(), 2_MiB));
  const std::unique_ptr<ModelBackend> backend = std::move(ModelBackend::create(std::move(options))).value();
  std::vector<Stream> streams;
  for (std::uint32_t i = 0; i < std::max(1u, trace.stream_count); ++i)
    streams.push_back(backend->stream_create().value());
  std::unique_ptr<Arena> arena = std::move(Arena::create(*backend, {})).value();

  std::vector<DevicePtr> blocks(trace.blocks.size());
  DevicePtr origin = nullptr;
  std::uint64_t hashes[3] = {};
  for (std::uint64_t& hash : hashes) {
    hash = 0xCBF29CE484222325;
    for (const auto& event : trace.events) {
      DevicePtr& block = blocks[event.block];
      if (event.is_free) {
        ASSERT_TRUE(arena->free(std::exchange(block, nullptr), streams[event.stream]).ok());
        continue;
      }
      block = arena->allocate({.bytes = trace.blocks[event.block].bytes, .stream = streams[event.stream]})
                  .value();
      if (origin == nullptr) origin = block;
      const auto distance = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(block) -
                                                       reinterpret_cast<std::uintptr_t>(origin));
      for (int i = 0; i < 8; ++i) hash = (hash ^ (distance >> (8 * i) & 0xFF)) * 0x100000001B3;
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (blocks[i] == nullptr) continue;
      ASSERT_TRUE(arena->free(std::exchange(blocks[i], nullptr), streams[trace.blocks[i].stream]).ok());
    }
  }

  const bool same = hashes[0] == job.first && hashes[2] == job.third;
  EXPECT_TRUE(same) << "the hashes are now 0x" << std::hex << hashes[0] << ", 0x" << hashes[2];
  for (const Stream stream : streams) {
    EXPECT_TRUE(arena->stream_retire(stream).ok());
  }
  arena.reset();
  for (const Stream stream : streams) EXPECT_TRUE(backend->stream_destroy(stream).ok());
}

INSTANTIATE_TEST_SUITE_P(Jobs, ArenaPlacements, ::testing::ValuesIn(kJobs));

}  // namespace
}  // namespace forebay
