// Threads on given processors: this one, and those it starts.
#include "forebay/thread_binding.h"

#include <gtest/gtest.h>

#include <thread>
#include <type_traits>
#include <utility>

#include "forebay/block_runner.h"
#include "forebay/topology.h"
#include "runtime/topology/processor_mask.h"

namespace forebay {
namespace {

using Numbers = std::vector<int>;

TEST(ThreadBinding, KeepsTheThreadAndThoseItStartsUntilItsEnd) {
  const Numbers before = usable_processors_of_thread();
  ASSERT_FALSE(before.empty());
  Numbers during, started;
  {
    auto bound = ThreadBinding::create(Numbers{before.back()});
    ASSERT_TRUE(bound.ok()) << bound.status().to_string();
    const ThreadBinding moved = std::move(bound).value();
    during = usable_processors_of_thread();
    std::thread([&] { started = usable_processors_of_thread(); }).join();
  }

  EXPECT_EQ(during, Numbers{before.back()});
  EXPECT_EQ(started, during);
  EXPECT_EQ(usable_processors_of_thread(), before);
}

TEST(ThreadBinding, RefusesWhatCannotBe) {
  const Numbers before = usable_processors_of_thread();

  EXPECT_EQ(ThreadBinding::create(Numbers{}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ThreadBinding::create(Numbers{0, -1}).status().code(), StatusCode::kInvalidArgument);
  const auto beyond = ThreadBinding::create(Numbers{100'000});
  EXPECT_EQ(beyond.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(beyond.status().message().find("100000"), std::string::npos) << beyond.status().message();
  EXPECT_EQ(ThreadBinding::create(Numbers{1'000'000'000}).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(usable_processors_of_thread(), before);
}

// Two bindings of one thread end in the reverse order; an assignment would end the first one early.
static_assert(!std::is_move_assignable_v<ThreadBinding>);

TEST(ProcessorMask, HoldsAnyProcessors) {
  const Numbers processors = {0, 31, 32, 63, 64, 127, 128, 1000};

  EXPECT_EQ(internal::processors_of(internal::make_processor_mask(processors)), processors);
}

TEST(ThreadBinding, ServesAPlacementOfThisHost) {
  const Placement placement = place(read_topology(), {});

  const auto bound = ThreadBinding::create(placement.processors);
  const auto runner = BlockRunner::create_on(placement.cores);

  ASSERT_TRUE(bound.ok()) << bound.status().to_string();
  EXPECT_EQ(usable_processors_of_thread(), placement.processors);
  ASSERT_TRUE(runner.ok()) << runner.status().to_string();
  EXPECT_LE(runner.value()->thread_count(), static_cast<int>(placement.cores.size()));
}

}  // namespace
}  // namespace forebay
