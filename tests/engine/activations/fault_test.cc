// Failures while activations are saved: the call that meets the failure reports it, and so do all later
// calls. No rank hangs, and nothing leaks.

#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <functional>
#include <string>

#include "runtime/engine/engine_hooks.h"
#include "tests/engine/activations/chain.h"

namespace forebay::testing {
namespace {

using enum ActivationPlacement;

std::vector<ActivationSlot> slots_of(ActivationPlacement placement) {
  std::vector<ActivationSlot> slots;
  for (int u = 0; u < 5; ++u) slots.push_back({.unit = u, .bytes = 10'001, .placement = placement});
  return slots;
}

// No rank is in a collective call of an earlier part any more when one fails in the next. Real time.
using Meeting = std::barrier<>;

// Runs until a failure, and returns it, or ok.
Status outcome_of(Chain& chain, int micro_batches) {
  try {
    chain.run(micro_batches, 2);
    chain.finish();
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

void expect_failed_for_good(Chain& chain, const std::string& cause) {
  for (const auto& call :
       {std::function<void()>([&] { chain.save(0, 99); }), std::function<void()>([&] { chain.load(0, 0); }),
        std::function<void()>([&] { chain.checkpointer.check(); })}) {
    try {
      call();
      ADD_FAILURE() << "not failed";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("failed earlier"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(cause), std::string::npos) << error.what();
    }
  }
}

TEST(ActivationFaults, TellOfEveryTransferOfTheStoreThatFails) {
  for (const StoreDirection direction : {StoreDirection::kWrite, StoreDirection::kRead}) {
    for (const std::uint64_t nth : {1u, 4u, 7u}) {
      std::array<Status, 2> outcomes;
      Meeting committed(2);
      run_ranks(2, {}, [&](Rank& rank) {
        const int number = rank.communicator->rank();
        ActivationCheckpointerOptions options = memory_options({.micro_batches = 2, .tier = Tier::kFile});
        internal::EngineHooks hooks;
        options.hooks = &hooks;
        hooks.make_store = [&](int r) {
          MemoryStoreOptions store{.granule_bytes = 4096};
          if (r == 1)
            store.faults = {{direction, nth, Status(StatusCode::kIoError, "the drive has gone"), false}};
          return make_memory_store(store);
        };
        const std::size_t handles = rank.host_backend().live_handle_count();
        {
          Chain chain(rank, slots_of(kPartitionAndSpill), options);
          chain.commit();
          committed.arrive_and_wait();
          outcomes[static_cast<std::size_t>(number)] = outcome_of(chain, 4);
          if (number == 1) expect_failed_for_good(chain, "the drive has gone");
        }
        EXPECT_EQ(rank.host_backend().live_handle_count(), handles);
      });
      EXPECT_EQ(outcomes[1].code(), StatusCode::kIoError) << outcomes[1].to_string();
      EXPECT_NE(outcomes[1].message().find("the spilled activations"), std::string::npos);
      EXPECT_FALSE(outcomes[0].ok());
      EXPECT_NE(outcomes[0].message().find("the drive has gone"), std::string::npos)
          << outcomes[0].to_string();
    }
  }
}

TEST(ActivationFaults, TellOfACallOfTheBackendThatFails) {
  for (const HostCall call : {HostCall::kCopyAsync, HostCall::kEventRecord, HostCall::kStreamWait}) {
    for (const std::uint64_t nth : {1u, 6u, 30u}) {
      Meeting committed(2);
      run_ranks(2, {}, [&](Rank& rank) {
        ScriptedHostBackend& host = rank.host_backend();
        const std::size_t handles = host.live_handle_count();
        {
          Chain chain(rank, slots_of(kPartitionAndSpill), memory_options({.micro_batches = 2}));
          chain.commit();
          committed.arrive_and_wait();
          if (rank.communicator->rank() == 0)
            host.add_fault({call, nth, Status(StatusCode::kInternal, "the device is not well")});
          const Status outcome = outcome_of(chain, 4);
          EXPECT_NE(outcome.message().find("the device is not well"), std::string::npos)
              << outcome.to_string();
          if (rank.communicator->rank() == 0) expect_failed_for_good(chain, "the device is not well");
        }
        EXPECT_EQ(host.live_handle_count(), handles);
      });
    }
  }
}

// Every call that commit() makes of the backend.
TEST(ActivationFaults, GiveEverythingBackWhenCommitFails) {
  for (const HostCall call :
       {HostCall::kReserve, HostCall::kChunkCreate, HostCall::kMap, HostCall::kSetAccess, HostCall::kPin,
        HostCall::kFillAsync, HostCall::kStreamCreate, HostCall::kEventCreate}) {
    int failed = 0;
    for (std::uint64_t nth = 1;; ++nth) {
      std::array<Status, 2> outcomes;
      run_ranks(2, {}, [&](Rank& rank) {
        ScriptedHostBackend& host = rank.host_backend();
        const int number = rank.communicator->rank();
        const std::size_t handles = host.live_handle_count();
        {
          Chain chain(rank, slots_of(kPartitionAndSpill), memory_options({}));
          // From then on, for what is tried again.
          for (std::uint64_t i = nth; number == 1 && i < nth + 64; ++i)
            host.add_fault({call, i, Status(StatusCode::kOutOfMemory, "there is no more")});
          try {
            chain.checkpointer.commit();
          } catch (const Error& error) {
            outcomes[static_cast<std::size_t>(number)] = error.status();
          }
        }
        EXPECT_EQ(host.live_handle_count(), handles);
      });
      EXPECT_EQ(outcomes[0].ok(), outcomes[1].ok());
      if (outcomes[1].ok()) break;
      ++failed;
      EXPECT_NE(outcomes[0].message().find("rank 1: "), std::string::npos) << outcomes[0].to_string();
      EXPECT_NE(outcomes[0].message().find("there is no more"), std::string::npos);
    }
    EXPECT_GT(failed, 0) << static_cast<int>(call);
  }
}

TEST(ActivationFaults, RefuseAHostThatIsFull) {
  run_ranks(2, {}, [&](Rank& rank) {
    Chain chain(rank, slots_of(kPartitionAndSpill), memory_options({.host_bytes = 20'000}));
    try {
      chain.commit();
      ADD_FAILURE() << "committed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kOutOfMemory);
      EXPECT_NE(std::string(error.what()).find("pinned host memory"), std::string::npos);
    }
  });
}

TEST(ActivationFaults, RefuseADeviceThatIsTooSmall) {
  WorldOptions world;
  world.backend.memory_bytes = 128u << 10;
  run_ranks(1, world, [&](Rank& rank) {
    std::vector<ActivationSlot> slots = slots_of(kKeep);
    for (ActivationSlot& slot : slots) slot.bytes = 100'000;
    Chain chain(rank, slots, memory_options({}));
    try {
      chain.checkpointer.commit();
      ADD_FAILURE() << "committed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kOutOfMemory) << error.what();
    }
  });
}

// A rank that is lost after the forward pass: the others learn of it instead of waiting for its slices.
TEST(ActivationFaults, TellOfARankLostBetweenForwardAndBackward) {
  for (const ActivationPlacement placement : {kPartition, kPartitionAndSpill}) {
    std::array<Status, 3> outcomes;
    Meeting turned(3);
    run_ranks(3, {}, [&](Rank& rank) {
      const auto number = static_cast<std::size_t>(rank.communicator->rank());
      const std::size_t handles = rank.host_backend().live_handle_count();
      {
        Chain chain(rank, slots_of(placement), memory_options({.look_ahead = 0}));
        chain.commit();
        chain.forward(0);
        throw_if_error(rank.backend->stream_synchronize(chain.stream));
        turned.arrive_and_wait();
        if (number == 2) {
          rank.communicator->abort(Status(StatusCode::kPeerLost, "rank 2 has left the run"));
        } else {
          try {
            chain.backward(0);
            throw_if_error(rank.backend->stream_synchronize(chain.stream));
            chain.checkpointer.check();
          } catch (const Error& error) {
            outcomes[number] = error.status();
          }
        }
      }
      EXPECT_EQ(rank.host_backend().live_handle_count(), handles);
    });
    for (const std::size_t rank : {0u, 1u}) {
      EXPECT_NE(outcomes[rank].message().find("rank 2 has left the run"), std::string::npos)
          << outcomes[rank].to_string();
    }
  }
}

Status checked(Chain& chain) {
  try {
    chain.checkpointer.check();
  } catch (const Error& error) {
    return error.status();
  }
  return Status();
}

// Gathers of one size, which no communicator can tell apart.
TEST(ActivationFaults, TellOfRanksThatLoadInDifferentOrders) {
  for (const ActivationPlacement placement : {kPartition, kPartitionAndSpill}) {
    for (const int look_ahead : {0, 1}) {
      std::array<Status, 3> outcomes;
      run_ranks(3, {}, [&](Rank& rank) {
        const auto number = static_cast<std::size_t>(rank.communicator->rank());
        Chain chain(rank, slots_of(placement), memory_options({.look_ahead = look_ahead}));
        chain.commit();
        chain.run(1, 1);
        chain.finish();
        chain.forward(1);
        const std::vector<ActivationSlot> slots = slots_of(placement);
        for (std::size_t i = 0; i < slots.size(); ++i) {
          const ActivationSlot& slot = slots[number == 1 ? i : slots.size() - 1 - i];
          const ActivationLease lease = chain.checkpointer.load({slot.unit, slot.slot, 1}, chain.stream);
        }
        throw_if_error(rank.backend->stream_synchronize(chain.stream));
        outcomes[number] = checked(chain);
      });
      for (const Status& outcome : outcomes) {
        EXPECT_EQ(outcome.code(), StatusCode::kInvalidArgument) << outcome.to_string();
        EXPECT_NE(outcome.message().find("tensor-parallel rank 1 loaded different activations"),
                  std::string::npos)
            << outcome.to_string();
      }
    }
  }
}

TEST(ActivationFaults, TellOfRanksThatLoadMicroBatchesInDifferentOrders) {
  std::array<Status, 3> outcomes;
  run_ranks(3, {}, [&](Rank& rank) {
    const auto number = static_cast<std::size_t>(rank.communicator->rank());
    Chain chain(rank, slots_of(kPartition), memory_options({.micro_batches = 2}));
    chain.commit();
    for (const int micro_batch : {0, 1}) chain.forward(micro_batch);
    const ActivationSlot slot = slots_of(kPartition).back();
    for (const int i : {0, 1}) {
      const int micro_batch = number == 1 ? 1 - i : i;
      const ActivationLease lease =
          chain.checkpointer.load({slot.unit, slot.slot, micro_batch}, chain.stream);
    }
    throw_if_error(rank.backend->stream_synchronize(chain.stream));
    outcomes[number] = checked(chain);
  });
  for (const Status& outcome : outcomes) {
    EXPECT_NE(outcome.message().find("tensor-parallel rank 1 loaded different activations"),
              std::string::npos)
        << outcome.to_string();
  }
}

// One that says nothing is found by the deadline.
TEST(ActivationFaults, WaitForASilentRankNoLongerThanTheDeadline) {
  HostClock clock(HostClock::Mode::kVirtual);
  WorldOptions world;
  world.clock = &clock;
  world.local.deadline = std::chrono::seconds(30);
  world.local.fault = {.rank = 1, .operation = 2, .kind = LocalFault::Kind::kDies};
  run_ranks(2, world, [&](Rank& rank) {
    Chain chain(rank, slots_of(kPartition), memory_options({}));
    chain.commit();
    chain.forward(0);
    const Status outcome = [&] {
      try {
        chain.backward(0);
        throw_if_error(rank.backend->stream_synchronize(chain.stream));
        chain.checkpointer.check();
      } catch (const Error& error) {
        return error.status();
      }
      return Status();
    }();
    // Rank 1 believes to be well.
    EXPECT_TRUE(!outcome.ok() || rank.communicator->rank() == 1);
    EXPECT_LE(clock.now(), std::chrono::seconds(61));
  });
}

// The memory of a checkpointer stays until the work on it is over, even where no event can be recorded.
void expect_the_work_to_end_first(ActivationPlacement placement, bool in_save, std::uint64_t failing_calls) {
  HostClock clock(HostClock::Mode::kVirtual);
  WorldOptions world;
  world.clock = &clock;
  run_ranks(1, world, [&](Rank& rank) {
    Backend& backend = *rank.backend;
    const Stream stream = value_or_throw(backend.stream_create());
    DevicePtr const source = value_or_throw(backend.alloc(10'001));
    auto checkpointer =
        std::make_unique<ActivationCheckpointer>(backend, *rank.communicator, memory_options({}));
    checkpointer->declare({.unit = 0, .bytes = 10'001, .placement = placement});
    checkpointer->commit();
    const auto work_of_which_no_event_tells = [&] {
      throw_if_error(call_on(backend, stream, [&clock] { clock.sleep(std::chrono::seconds(7)); }));
      for (std::uint64_t nth = 1; nth <= failing_calls; ++nth) {
        rank.host_backend().add_fault(
            {HostCall::kEventRecord, nth, Status(StatusCode::kInternal, "the device is not well")});
      }
    };

    if (in_save) {
      work_of_which_no_event_tells();
      EXPECT_THROW(checkpointer->save({0, 0, 0}, source, 10'001, stream), Error);
    } else {
      checkpointer->save({0, 0, 0}, source, 10'001, stream);
      const ActivationLease lease = checkpointer->load({0, 0, 0}, stream);
      work_of_which_no_event_tells();
    }
    EXPECT_THROW(checkpointer->check(), Error);
    checkpointer.reset();

    EXPECT_EQ(clock.now(), std::chrono::seconds(7));
    throw_if_error(backend.free(source));
    throw_if_error(backend.stream_destroy(stream));
  });
}

TEST(ActivationFaults, WaitForWorkWhoseEndWasNotRecorded) {
  for (const ActivationPlacement placement : {kKeep, kPartitionAndSpill}) {
    for (const std::uint64_t failing_calls : {1u, 100u}) {
      expect_the_work_to_end_first(placement, true, failing_calls);
      expect_the_work_to_end_first(placement, false, failing_calls);
    }
  }
}

}  // namespace
}  // namespace forebay::testing
