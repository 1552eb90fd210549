// The placement of host updates: near the device where the host has several NUMA nodes, anywhere otherwise.
#include "runtime/engine/host_placement.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "forebay/error.h"
#include "forebay/thread_binding.h"
#include "tests/topology/laid_out_host.h"

namespace forebay::testing {
namespace {

using Numbers = std::vector<int>;

class HostPlacementTest : public ::testing::Test {
 protected:
  HostPlacementTest() { lay_out_two_nodes(host_); }

  HostPlacement choose(int device_node, const EngineOptions& options = {}) {
    Capabilities device;
    device.numa_node = device_node;
    TopologyOptions topology = host_.options();
    topology.usable_processors = Numbers{0, 1, 2, 3, 4, 5, 6, 7};
    return choose_host_placement(device, options, topology);
  }

  LaidOutHost host_;
};

TEST_F(HostPlacementTest, IsNearTheDevice) {
  const HostPlacement placement = choose(1);

  EXPECT_EQ(placement.processors, (Numbers{2, 3, 6, 7}));
  EXPECT_EQ(placement.thread_count, 2);  // One for each core.
  EXPECT_EQ(placement.memory_node, 1);
  EXPECT_EQ(placement.text,
            "2 host threads on processors 2-3,6-7, pinned memory on node 1: nearest NUMA node 1");
}

TEST_F(HostPlacementTest, KeepsTheNumberOfThreadsThatIsAskedFor) {
  EngineOptions options;
  options.host_threads = 1;

  const HostPlacement placement = choose(0, options);

  EXPECT_EQ(placement.processors, (Numbers{0, 1, 4, 5}));
  EXPECT_EQ(placement.thread_count, 1);
}

TEST_F(HostPlacementTest, IsAnywhereWithoutAKnownNodeOrWhenSwitchedOff) {
  EngineOptions off;
  off.host_threads = 3;
  off.near_device = false;
  for (const HostPlacement& placement : {choose(-1), choose(5), choose(1, off)}) {
    EXPECT_TRUE(placement.processors.empty()) << placement.text;
    EXPECT_EQ(placement.memory_node, -1) << placement.text;
    EXPECT_EQ(placement.text.find("host updates run anywhere: "), 0u) << placement.text;
  }
  EXPECT_EQ(choose(1, off).thread_count, 3);
}

TEST(HostPlacement, IsAnywhereOnAHostWithOneNode) {
  LaidOutHost host;
  host.add_node(0, "0-1", "10");
  Capabilities device;
  device.numa_node = 0;

  const HostPlacement placement = choose_host_placement(device, {}, host.options());

  EXPECT_TRUE(placement.processors.empty());
  EXPECT_EQ(placement.text, "host updates run anywhere: the host has one NUMA node");
}

TEST_F(HostPlacementTest, ProcessorsOfTheOptionsComeFirst) {
  EngineOptions options;
  options.host_processors = {6, 3};

  const HostPlacement placement = choose(0, options);

  EXPECT_EQ(placement.processors, (Numbers{6, 3}));
  EXPECT_EQ(placement.memory_node, -1);
}

TEST(HostPlacement, TheRunnerKeepsItsThreadsOnTheProcessors) {
  const Numbers usable = usable_processors_of_thread();
  HostPlacement placement{.processors = {usable.front()}, .thread_count = 2};

  const std::unique_ptr<BlockRunner> runner = create_host_runner(placement, {});

  std::atomic<int> elsewhere{0};
  struct Context {
    int processor;
    std::atomic<int>* elsewhere;
  } const context{usable.front(), &elsewhere};
  runner->run(
      64, 1,
      [](const void* given, std::size_t, std::size_t) {
        const auto& one = *static_cast<const Context*>(given);
        if (sched_getcpu() != one.processor) one.elsewhere->fetch_add(1);
      },
      &context);
  if (runner->thread_count() == 2) {  // Not under ThreadSanitizer.
    EXPECT_EQ(elsewhere.load(), 0);
  }
}

TEST(HostPlacement, ChosenProcessorsThatAreRefusedAreGivenUpAndGivenOnesAreAnError) {
  HostPlacement placement{.processors = {1 << 20}, .thread_count = 2};
  EngineOptions options;
  options.host_threads = 1;

  EXPECT_EQ(create_host_runner(placement, options)->thread_count(), 1);
  EXPECT_EQ(placement.text.find("host updates run anywhere: "), 0u) << placement.text;

  options.host_processors = {1 << 20};
  placement.processors = options.host_processors;
  EXPECT_THROW(create_host_runner(placement, options), Error);
}

}  // namespace
}  // namespace forebay::testing
