// Loaded activations equal the saved ones, on every tier and over any number of ranks, in the bytes of the
// plan.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "forebay/activation_checkpointer.h"
#include "tests/engine/activations/chain.h"

namespace forebay::testing {
namespace {

using enum ActivationPlacement;

// Sizes that no number of ranks divides, and one that is smaller than the ranks are many.
std::vector<ActivationSlot> odd_slots(ActivationPlacement placement, double fraction) {
  std::vector<ActivationSlot> slots;
  int unit = 0;
  for (const std::uint64_t bytes : {12'345u, 4'096u, 1u, 17u, 9'999u, 20'001u}) {
    slots.push_back({.unit = unit++,
                     .slot = 3,
                     .bytes = bytes,
                     .shared = bytes != 4'096u,
                     .placement = placement,
                     .spill_fraction = fraction,
                     .state_bytes = bytes == 17u ? 24u : 0u});
  }
  return slots;
}

struct Case {
  ActivationPlacement placement = kKeep;
  double fraction = 1.0;
  Tier tier = Tier::kPinned;
};

void expect_plan_is_measured(ActivationCheckpointer& checkpointer, std::uint64_t micro_batches) {
  const ActivationPlan& plan = checkpointer.committed_plan();
  const ActivationStatistics measured = checkpointer.statistics();
  EXPECT_EQ(measured.device_bytes, plan.device_bytes());
  EXPECT_EQ(measured.host_bytes, plan.host_bytes());
  EXPECT_EQ(measured.file_bytes, plan.file_bytes);
  EXPECT_EQ(measured.traffic.sent_bytes, micro_batches * plan.wire_per_micro_batch.sent);
  EXPECT_EQ(measured.traffic.received_bytes, micro_batches * plan.wire_per_micro_batch.received);
  EXPECT_EQ(measured.spilled_bytes, micro_batches * plan.spilled_bytes_per_micro_batch);
  EXPECT_EQ(measured.fetched_bytes, micro_batches * plan.spilled_bytes_per_micro_batch);
}

class EveryPlacement : public ::testing::TestWithParam<int> {};

TEST_P(EveryPlacement, GivesBackTheBitsInTheBytesOfThePlan) {
  const int ranks = GetParam();
  for (const Case& c :
       {Case{kKeep}, Case{kPartition}, Case{kPartitionAndSpill}, Case{kPartitionAndSpill, 0.4},
        Case{kPartitionAndSpill, 1.0, Tier::kFile}, Case{kPartitionAndSpill, 0.4, Tier::kFile}}) {
    for (const int held : {1, 3}) {
      for (const int look_ahead : {0, 2}) {
        SCOPED_TRACE(std::string(activation_placement_name(c.placement)) + " " + std::to_string(c.fraction) +
                     (c.tier == Tier::kFile ? " in files, " : ", ") + std::to_string(held) + " held, " +
                     std::to_string(look_ahead) + " ahead");
        run_ranks(ranks, {}, [&](Rank& rank) {
          Chain chain(rank, odd_slots(c.placement, c.fraction),
                      memory_options({.micro_batches = held, .look_ahead = look_ahead, .tier = c.tier}));
          chain.commit();

          chain.run(5, held);
          chain.finish();

          expect_plan_is_measured(chain.checkpointer, 5);
          EXPECT_EQ(chain.checkpointer.statistics().most_micro_batches, static_cast<std::uint64_t>(held));
          EXPECT_EQ(chain.checkpointer.statistics().load_count, 30u);
          std::uint64_t saved = 0;
          for (const ActivationPlace& place : chain.checkpointer.committed_plan().places)
            saved += place.slice_bytes;
          EXPECT_EQ(chain.checkpointer.statistics().most_saved_bytes, held * saved);
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EveryPlacement, ::testing::Values(1, 2, 3, 4));

TEST(ActivationCheckpointer, DividesWhatTheRanksShare) {
  constexpr std::uint64_t kBytes = 3 * 4 * 512 * 2;
  const auto device_bytes = [](int ranks, ActivationPlacement placement) {
    std::uint64_t result = 0;
    run_ranks(ranks, {}, [&](Rank& rank) {
      std::vector<ActivationSlot> slots;
      for (int u = 0; u < 24; ++u) slots.push_back({.unit = u, .bytes = kBytes, .placement = placement});
      Chain chain(rank, slots, memory_options({}));
      chain.commit();
      chain.run(1, 1);
      chain.finish();
      if (rank.communicator->rank() == 0) result = chain.checkpointer.statistics().device_bytes;
    });
    return result;
  };

  EXPECT_EQ(device_bytes(1, kKeep), 24 * kBytes);
  EXPECT_EQ(device_bytes(4, kKeep), 24 * kBytes);
  EXPECT_EQ(device_bytes(1, kPartition), 24 * kBytes);
  // Beside the slices: the activation in use and the one ahead.
  for (const int ranks : {2, 3, 4}) {
    EXPECT_EQ(device_bytes(ranks, kPartition), 24 * kBytes / static_cast<std::uint64_t>(ranks) + 2 * kBytes);
    // Nothing but that, and what it leaves from.
    EXPECT_EQ(device_bytes(ranks, kPartitionAndSpill),
              2 * kBytes / static_cast<std::uint64_t>(ranks) + 2 * kBytes);
  }
}

// A device that is too small for one placement is large enough for the next, and `auto` finds it.
TEST(ActivationCheckpointer, FindsWhatFitsTheDevice) {
  constexpr std::uint64_t kBudget = 1 << 20;
  const auto outcome = [&](int layers, ActivationPlacement placement) {
    std::string text;
    WorldOptions world;
    world.backend.memory_bytes = kBudget + (64 << 10);  // The chain's own buffer.
    run_ranks(4, world, [&](Rank& rank) {
      std::vector<ActivationSlot> slots;
      for (int u = 0; u < layers; ++u)
        slots.push_back({.unit = u, .bytes = 32 << 10, .placement = placement});
      Chain chain(rank, slots, memory_options({.device_bytes = kBudget}));
      try {
        chain.commit();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::kOutOfMemory) << error.what();
        if (rank.communicator->rank() == 0) text = "does not fit";
        return;
      }
      chain.run(2, 1);
      chain.finish();
      EXPECT_LE(chain.checkpointer.statistics().device_bytes, kBudget);
      const ActivationPlan& plan = chain.checkpointer.committed_plan();
      if (rank.communicator->rank() == 0) text = activation_placement_name(plan.slots.front().placement);
    });
    return text;
  };

  EXPECT_EQ(outcome(24, kKeep), "keep");
  EXPECT_EQ(outcome(24, kAuto), "keep");
  EXPECT_EQ(outcome(80, kKeep), "does not fit");
  EXPECT_EQ(outcome(80, kPartition), "partition");
  EXPECT_EQ(outcome(80, kAuto), "partition");
  EXPECT_EQ(outcome(160, kPartition), "does not fit");
  EXPECT_EQ(outcome(160, kAuto), "partition+spill");
}

TEST(ActivationCheckpointer, FetchesAheadWhatComesNext) {
  run_ranks(2, {}, [](Rank& rank) {
    Chain chain(rank, odd_slots(kPartitionAndSpill, 1.0), memory_options({.micro_batches = 2}));
    chain.commit();

    chain.run(6, 2);
    chain.finish();

    // Each micro-batch's forward pass is over before its backward pass begins.
    const ActivationStatistics measured = chain.checkpointer.statistics();
    EXPECT_EQ(measured.load_count, 36u);
    EXPECT_EQ(measured.ahead_count, 36u);
  });
}

TEST(ActivationCheckpointer, TakesNothingAfterCommit) {
  run_ranks(2, {}, [](Rank& rank) {
    ScriptedHostBackend& host = rank.host_backend();
    const std::size_t handles = host.live_handle_count();
    {
      Chain chain(rank, odd_slots(kPartitionAndSpill, 0.5),
                  memory_options({.micro_batches = 2, .tier = Tier::kFile}));
      chain.commit();
      const auto taken = [&host] {
        std::uint64_t sum = host.live_handle_count();
        for (const HostCall call :
             {HostCall::kReserve, HostCall::kChunkCreate, HostCall::kMap, HostCall::kAlloc, HostCall::kPin,
              HostCall::kStreamCreate, HostCall::kEventCreate}) {
          sum += host.call_count(call);
        }
        return sum;
      };
      const std::uint64_t before = taken();

      chain.run(7, 2);
      chain.finish();

      EXPECT_EQ(taken(), before);
    }
    EXPECT_EQ(host.live_handle_count(), handles);
  });
}

TEST(ActivationCheckpointer, LiesInARegionThatItIsGiven) {
  run_ranks(2, {}, [](Rank& rank) {
    const std::vector<ActivationSlot> slots = odd_slots(kPartition, 1.0);
    Chain chain(rank, slots, memory_options({}));
    const std::uint64_t bytes = chain.checkpointer.plan().device_bytes();
    DevicePtr const region = value_or_throw(rank.backend->alloc(bytes + 512));
    std::memset(region + bytes, 0x5A, 512);
    const Stream stream = value_or_throw(rank.backend->stream_create());
    DevicePtr const source = value_or_throw(rank.backend->alloc(100'000));
    {
      EXPECT_THROW(chain.checkpointer.commit(region + 1), Error) << "not aligned";
      chain.checkpointer.commit(region);
      for (const ActivationSlot& slot : slots)
        chain.checkpointer.save({slot.unit, slot.slot, 0}, source, slot.bytes, stream,
                                std::vector<std::byte>(slot.state_bytes));
      for (const ActivationSlot& slot : slots) {
        const ActivationLease lease = chain.checkpointer.load({slot.unit, slot.slot, 0}, stream);
        EXPECT_GE(lease.data(), region);
        EXPECT_LE(lease.data() + lease.bytes(), region + bytes);
      }
      throw_if_error(rank.backend->stream_synchronize(stream));
      EXPECT_EQ(chain.checkpointer.statistics().device_bytes, bytes);
    }
    for (std::uint64_t i = 0; i < 512; ++i) EXPECT_EQ(region[bytes + i], std::byte{0x5A});
    chain.checkpointer.discard_all();
    throw_if_error(rank.backend->stream_destroy(stream));
    throw_if_error(rank.backend->free(source));
  });
}

template <typename Call>
void expect_refused(const std::string& part, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// The trainer's stream reads the memory until then. The virtual clock moves on only while all threads wait.
TEST(ActivationCheckpointer, ClosesWhenItsLastReaderHasRead) {
  for (const ActivationPlacement placement : {kKeep, kPartition}) {
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    run_ranks(2, world, [&](Rank& rank) {
      const Stream stream = value_or_throw(rank.backend->stream_create());
      DevicePtr const source = value_or_throw(rank.backend->alloc(1000));
      std::atomic<bool> has_read{false};
      {
        ActivationCheckpointer checkpointer(*rank.backend, *rank.communicator, memory_options({}));
        checkpointer.declare({.bytes = 1000, .placement = placement});
        checkpointer.commit();
        checkpointer.save({}, source, 1000, stream);
        const ActivationLease lease = checkpointer.load({}, stream);
        throw_if_error(call_on(*rank.backend, stream, [&] {
          clock.sleep(std::chrono::milliseconds(1));
          has_read = true;
        }));
      }
      EXPECT_TRUE(has_read) << activation_placement_name(placement);
      throw_if_error(rank.backend->stream_synchronize(stream));
      throw_if_error(rank.backend->stream_destroy(stream));
      throw_if_error(rank.backend->free(source));
    });
  }
}

TEST(ActivationCheckpointer, NeedsADirectoryOnlyForFilesThatItHas) {
  run_ranks(1, {}, [](Rank& rank) {
    ActivationCheckpointerOptions options;
    options.plan.tier = Tier::kFile;
    ActivationCheckpointer kept(*rank.backend, *rank.communicator, options);
    kept.declare({.bytes = 1000, .placement = kKeep});
    EXPECT_NO_THROW(kept.commit());
    ActivationCheckpointer spilled(*rank.backend, *rank.communicator, options);
    spilled.declare({.bytes = 1000, .placement = kPartitionAndSpill});
    expect_refused("need a directory", [&] { spilled.commit(); });
  });
}

// The budget of what lies in a region is for bytes, that of an arena for whole chunks.
TEST(ActivationCheckpointer, FillsARegionToTheByteOfItsBudget) {
  run_ranks(2, {}, [](Rank& rank) {
    const std::vector<ActivationSlot> slots = {{.unit = 0, .bytes = 10'240, .placement = kAuto}};
    const auto placement_with = [&](bool in_region, std::uint64_t bytes) {
      ActivationCheckpointerOptions options = memory_options({.device_bytes = bytes});
      options.in_region = in_region;
      ActivationCheckpointer checkpointer(*rank.backend, *rank.communicator, options);
      for (const ActivationSlot& slot : slots) checkpointer.declare(slot);
      try {
        return std::string(activation_placement_name(checkpointer.plan().slots[0].placement));
      } catch (const Error& error) {
        return std::string("does not fit");
      }
    };

    EXPECT_EQ(placement_with(true, 10'240), "keep");
    EXPECT_EQ(placement_with(true, 10'239), "does not fit");
    EXPECT_EQ(placement_with(false, 10'240), "does not fit");

    ActivationCheckpointerOptions options = memory_options({});
    options.in_region = true;
    ActivationCheckpointer checkpointer(*rank.backend, *rank.communicator, options);
    checkpointer.declare(slots[0]);
    expect_refused("was committed without one", [&] { checkpointer.commit(); });
  });
}

// A checkpointer of one activation with two streams; work queued on `late` ends a second after the start.
struct LateStream {
  static constexpr std::uint64_t kBytes = 10'000;
  LateStream(Rank& rank, HostClock& clock, ActivationPlacement placement)
      : backend(*rank.backend), checkpointer(backend, *rank.communicator, memory_options({})) {
    checkpointer.declare({.unit = 0, .bytes = kBytes, .placement = placement});
    checkpointer.commit();
    late = value_or_throw(backend.stream_create());
    early = value_or_throw(backend.stream_create());
    sources = value_or_throw(backend.alloc(2 * kBytes));
    std::memset(sources, 1, kBytes);
    std::memset(sources + kBytes, 2, kBytes);
    throw_if_error(call_on(backend, late, [&clock] { clock.sleep(std::chrono::seconds(1)); }));
  }
  void end() {
    for (const Stream stream : {late, early}) {
      throw_if_error(backend.stream_synchronize(stream));
      throw_if_error(backend.stream_destroy(stream));
    }
    throw_if_error(backend.free(sources));
  }
  Backend& backend;
  ActivationCheckpointer checkpointer;
  Stream late, early;
  DevicePtr sources = nullptr;  // Two activations, of ones and of twos.
};

// The save of an activation that was discarded may still wait on its stream when its place is used again.
TEST(ActivationCheckpointer, SavesIntoAPlaceOnlyWhenItsLastSaveIsOver) {
  for (const ActivationPlacement placement : {kKeep, kPartition}) {
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    run_ranks(1, world, [&](Rank& rank) {
      LateStream s(rank, clock, placement);
      s.checkpointer.save({0, 0, 0}, s.sources, s.kBytes, s.late);
      s.checkpointer.discard({0, 0, 0});
      s.checkpointer.save({0, 0, 1}, s.sources + s.kBytes, s.kBytes, s.early);
      for (const Stream stream : {s.late, s.early}) throw_if_error(s.backend.stream_synchronize(stream));
      {
        const ActivationLease lease = s.checkpointer.load({0, 0, 1}, s.early);
        throw_if_error(s.backend.stream_synchronize(s.early));
        EXPECT_EQ(lease.data()[0], std::byte{2});
      }
      s.end();
    });
  }
}

TEST(ActivationCheckpointer, LoadsOnAnotherStreamWhenTheSaveIsOver) {
  for (const ActivationPlacement placement : {kKeep, kPartition, kPartitionAndSpill}) {
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    run_ranks(1, world, [&](Rank& rank) {
      LateStream s(rank, clock, placement);
      s.checkpointer.save({0, 0, 0}, s.sources, s.kBytes, s.late);
      {
        const ActivationLease lease = s.checkpointer.load({0, 0, 0}, s.early);
        throw_if_error(s.backend.stream_synchronize(s.early));
        EXPECT_EQ(lease.data()[s.kBytes - 1], std::byte{1}) << activation_placement_name(placement);
      }
      EXPECT_EQ(clock.now(), std::chrono::seconds(1)) << activation_placement_name(placement);
      s.end();
    });
  }
}

// A micro-batch without some of its activations: its first load says that its forward pass is over.
TEST(ActivationCheckpointer, FetchesAheadWhereSomeAreNotSaved) {
  constexpr std::uint64_t kBytes = 10'000;
  run_ranks(2, {}, [](Rank& rank) {
    Backend& backend = *rank.backend;
    ActivationCheckpointer checkpointer(backend, *rank.communicator, memory_options({.look_ahead = 1}));
    for (const int unit : {0, 1, 2})
      checkpointer.declare({.unit = unit, .bytes = kBytes, .placement = kPartition});
    checkpointer.commit();
    const Stream stream = value_or_throw(backend.stream_create());
    DevicePtr const source = value_or_throw(backend.alloc(kBytes));
    for (const int unit : {0, 1}) checkpointer.save({unit, 0, 0}, source, kBytes, stream);
    for (const int unit : {1, 0}) static_cast<void>(checkpointer.load({unit, 0, 0}, stream));
    EXPECT_EQ(checkpointer.statistics().ahead_count, 1u);
    throw_if_error(backend.stream_synchronize(stream));
    throw_if_error(backend.stream_destroy(stream));
    throw_if_error(backend.free(source));
  });
}

// On the virtual clock: what is saved takes no time, and its place is read a millisecond later by a kernel
// (what is kept), a gather (what is cut) or a fetch (what is spilled).
TEST(ActivationCheckpointer, SavesIntoAPlaceOnlyWhenItsLastReaderHasRead) {
  constexpr std::uint64_t kBytes = 10'000;
  for (const auto& [placement, fraction] :
       {std::pair(kKeep, 1.0), {kPartition, 1.0}, {kPartitionAndSpill, 0.5}, {kPartitionAndSpill, 1.0}}) {
    SCOPED_TRACE(std::string(activation_placement_name(placement)) + " " + std::to_string(fraction));
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    run_ranks(2, world, [&, placement = placement, fraction = fraction](Rank& rank) {
      Backend& backend = *rank.backend;
      ActivationCheckpointer checkpointer(backend, *rank.communicator, memory_options({.look_ahead = 0}));
      for (const int unit : {0, 1})
        checkpointer.declare(
            {.unit = unit, .bytes = kBytes, .placement = placement, .spill_fraction = fraction});
      checkpointer.commit();
      const Stream first = value_or_throw(backend.stream_create());
      const Stream second = value_or_throw(backend.stream_create());
      DevicePtr const sources = value_or_throw(backend.alloc(3 * kBytes));
      for (int i = 0; i < 3; ++i) std::memset(sources + i * kBytes, i, kBytes);
      const auto save = [&](const ActivationKey& key, int content, Stream stream) {
        checkpointer.save(key, sources + content * kBytes, kBytes, stream);
      };
      std::atomic<std::uint64_t> wrong_bytes{0};
      const auto load = [&](const ActivationKey& key, int content) {
        const ActivationLease lease = checkpointer.load(key, first);
        throw_if_error(call_on(backend, first, [&, content, data = lease.data()] {
          clock.sleep(std::chrono::milliseconds(1));
          for (std::uint64_t i = 0; i < kBytes; ++i) wrong_bytes += data[i] != std::byte(content);
        }));
      };
      save({0, 0, 0}, 0, first);
      save({1, 0, 0}, 1, first);

      load({1, 0, 0}, 1);  // The one buffer there is has this reader before it is gathered into again.
      load({0, 0, 0}, 0);
      save({0, 0, 1}, 2, second);
      load({0, 0, 1}, 2);

      throw_if_error(backend.stream_synchronize(first));
      throw_if_error(backend.stream_synchronize(second));
      EXPECT_EQ(wrong_bytes, 0u);
      EXPECT_GE(clock.now(), std::chrono::milliseconds(3));
      throw_if_error(backend.stream_destroy(first));
      throw_if_error(backend.stream_destroy(second));
      throw_if_error(backend.free(sources));
    });
  }
}

// On the virtual clock: the gather of a small activation, which is discarded, waits a second for the other
// rank. A large one is fetched into the same buffer meanwhile.
TEST(ActivationCheckpointer, FetchesIntoABufferOnlyWhenItsLastGatherIsOver) {
  HostClock clock(HostClock::Mode::kVirtual);
  WorldOptions world;
  world.clock = &clock;
  run_ranks(2, world, [&](Rank& rank) {
    std::vector<ActivationSlot> slots;
    for (const std::uint64_t bytes : {40'000u, 10'000u}) {
      const int unit = static_cast<int>(slots.size());
      slots.push_back({.unit = unit, .bytes = bytes, .placement = kPartitionAndSpill});
    }
    Chain chain(rank, slots, memory_options({.micro_batches = 2, .look_ahead = 1}));
    chain.commit();
    if (rank.communicator->rank() == 1) chain.queue([&clock] { clock.sleep(std::chrono::seconds(1)); });

    chain.forward(0);  // Its last activation is fetched ahead.
    chain.forward(1);
    for (const int unit : {0, 1}) chain.checkpointer.discard({unit, 0, 0});
    chain.backward(1);

    chain.finish();
    EXPECT_EQ(chain.checkpointer.statistics().ahead_count, 1u);
    EXPECT_GE(clock.now(), std::chrono::seconds(1));
  });
}

// Any order of calls works that is the same on all ranks.
TEST(ActivationCheckpointer, GivesBackTheBitsInAnyOrder) {
  const std::uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  constexpr int kHeld = 3;
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, {}, [&](Rank& rank) {
      std::mt19937_64 random(seed);
      std::vector<ActivationSlot> slots = odd_slots(kPartitionAndSpill, 0.7);
      slots[0].placement = kKeep;
      slots[4].placement = kPartition;
      Chain chain(rank, slots, memory_options({.micro_batches = kHeld, .look_ahead = 2}));
      chain.commit();
      std::set<std::pair<std::size_t, int>> saved;
      std::set<int> in_flight;
      int next = 0;
      for (int i = 0; i < 400; ++i) {
        const std::size_t slot = random() % slots.size();
        in_flight.clear();
        for (const auto& each : saved) in_flight.insert(each.second);
        const int micro_batch =
            in_flight.size() < kHeld && random() % 4 == 0
                ? next++
                : (in_flight.empty() ? next++ : *std::next(in_flight.begin(), random() % in_flight.size()));
        if (saved.contains({slot, micro_batch})) {
          if (random() % 5 == 0) {
            chain.checkpointer.discard({slots[slot].unit, slots[slot].slot, micro_batch});
          } else {
            chain.load(slot, micro_batch);
          }
          saved.erase({slot, micro_batch});
        } else {
          chain.save(slot, micro_batch);
          saved.insert({slot, micro_batch});
        }
      }
      chain.finish();
      chain.checkpointer.discard_all();
      chain.run(2, 1);
      chain.finish();
    });
  }
}

TEST(ActivationCheckpointer, GivesSeveralLeasesAtATime) {
  run_ranks(2, {}, [](Rank& rank) {
    std::vector<ActivationSlot> slots;
    for (int s = 0; s < 3; ++s)
      slots.push_back({.unit = 7, .slot = s, .bytes = 1000, .placement = kPartition});
    Chain chain(rank, slots, memory_options({.look_ahead = 0, .lease_limit = 2}));
    chain.commit();
    chain.forward(0);
    {
      const ActivationLease second = chain.checkpointer.load({7, 1, 0}, chain.stream);
      const ActivationLease first = chain.checkpointer.load({7, 0, 0}, chain.stream);
      EXPECT_NE(first.data(), second.data());
      EXPECT_THROW(static_cast<void>(chain.checkpointer.load({7, 2, 0}, chain.stream)), Error);
    }
    chain.load(2, 0);
    chain.finish();
  });
}

// Every message names what was asked, and nothing has changed: the same chain goes on.
TEST(ActivationCheckpointer, RefusesMisuseAndGoesOn) {
  run_ranks(2, {}, [](Rank& rank) {
    Chain chain(rank, odd_slots(kPartitionAndSpill, 1.0), memory_options({.micro_batches = 2}));
    ActivationCheckpointer& checkpointer = chain.checkpointer;
    std::byte byte{};
    const Stream none;
    expect_refused("needs commit() first", [&] { checkpointer.save({0, 3, 0}, &byte, 12'345, none); });
    expect_refused("declared twice", [&] { checkpointer.declare({.unit = 0, .slot = 3, .bytes = 1}); });
    chain.commit();
    expect_refused("called twice", [&] { checkpointer.commit(); });
    expect_refused("belongs before commit()", [&] { checkpointer.declare({.unit = 9, .bytes = 1}); });
    chain.forward(4);
    expect_refused("slot 3 of unit 0 in micro-batch 4 cannot be saved: it is saved already", [&] {
      checkpointer.save({0, 3, 4}, &byte, 12'345, chain.stream);
    });
    expect_refused("has 12344 bytes, 12345 were declared", [&] {
      checkpointer.save({0, 3, 5}, &byte, 12'344, chain.stream);
    });
    expect_refused("was not declared", [&] { checkpointer.save({0, 2, 5}, &byte, 1, chain.stream); });
    expect_refused("address is null", [&] { checkpointer.save({0, 3, 5}, nullptr, 12'345, chain.stream); });
    const std::vector<std::byte> record(25);
    expect_refused("its record has 25 bytes, state_bytes is 24", [&] {
      checkpointer.save({3, 3, 5}, &byte, 17, chain.stream, record);
    });
    expect_refused("it was not saved", [&] {
      static_cast<void>(checkpointer.load({0, 3, 5}, chain.stream));
    });
    expect_refused("was not declared", [&] {
      static_cast<void>(checkpointer.load({1, 1, 4}, chain.stream));
    });
    expect_refused("it is not saved", [&] { checkpointer.discard({0, 3, 5}); });
    chain.forward(5);
    expect_refused("2 micro-batches are in flight", [&] {
      checkpointer.save({0, 3, 6}, &byte, 12'345, chain.stream);
    });
    {
      const ActivationLease lease = checkpointer.load({5, 3, 4}, chain.stream);
      expect_refused("a lease of it is alive", [&] {
        static_cast<void>(checkpointer.load({5, 3, 4}, chain.stream));
      });
      expect_refused("1 lease is alive", [&] {
        static_cast<void>(checkpointer.load({4, 3, 4}, chain.stream));
      });
      expect_refused("a lease of it is alive", [&] { checkpointer.discard({5, 3, 4}); });
      expect_refused("while 1 lease is alive; end it first", [&] { checkpointer.discard_all(); });
    }
    expect_refused("has been loaded already", [&] {
      static_cast<void>(checkpointer.load({5, 3, 4}, chain.stream));
    });
    for (std::size_t i = 5; i-- > 0;) chain.load(i, 4);
    chain.backward(5);
    chain.finish();
  });
}

TEST(ActivationCheckpointer, NamesTheRankWithAnotherPlan) {
  try {
    run_ranks(3, {}, [](Rank& rank) {
      const std::uint64_t bytes = rank.communicator->rank() == 2 ? 1001 : 1000;
      Chain chain(rank, {{.unit = 4, .bytes = bytes}}, memory_options({}));
      chain.commit();
    });
    FAIL() << "committed";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    const std::string message = error.what();
    EXPECT_NE(message.find("activation:4.0 is 1000 bytes"), std::string::npos) << message;
    EXPECT_NE(message.find("on ranks 0, 1, 1001 bytes"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace forebay::testing
