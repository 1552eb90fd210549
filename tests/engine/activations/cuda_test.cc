// Activations on cuda backends over the fake driver, with ranks that share one GPU: memory that kills a host
// which touches it, and streams that overtake each other wherever no event forbids it.

#include <gtest/gtest.h>

#include <string>

#include "tests/engine/activations/chain.h"
#include "tests/support/fake_gpu.h"

namespace forebay::testing {
namespace {

TEST(ActivationsOnCuda, GiveBackTheBitsHoweverStreamsOvertakeEachOther) {
  for (const int ranks : {1, 3}) {
    for (const ActivationPlacement placement : {ActivationPlacement::kKeep, ActivationPlacement::kPartition,
                                                ActivationPlacement::kPartitionAndSpill}) {
      for (const double fraction : {1.0, 0.5}) {
        for (const std::uint64_t seed : {0u, 1u, 2u, 3u}) {
          SCOPED_TRACE(std::to_string(ranks) + " ranks, " + activation_placement_name(placement) + " " +
                       std::to_string(fraction) + ", seed " + std::to_string(seed));
          fake_cuda::FakeOptions reordering = strict_gpu();
          reordering.seed = seed;
          FakeGpu gpu(reordering);
          run_ranks(ranks, {.create_backend = [&gpu](int) { return gpu.create_backend(); }}, [&](Rank& rank) {
            std::vector<ActivationSlot> slots;
            for (int u = 0; u < 6; ++u) {
              slots.push_back({.unit = u,
                               .bytes = 3001,
                               .shared = u != 3,
                               .placement = placement,
                               .spill_fraction = fraction});
            }
            Chain chain(rank, slots, memory_options({.micro_batches = 2, .look_ahead = 2}));
            chain.commit();
            chain.run(5, 2);
            chain.finish();
            std::uint64_t fetched = 0;
            for (const ActivationPlace& place : chain.checkpointer.committed_plan().places)
              fetched += place.direct() ? 0 : 5;
            EXPECT_EQ(chain.checkpointer.statistics().ahead_count, fetched);
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace forebay::testing
