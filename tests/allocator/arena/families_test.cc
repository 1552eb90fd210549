// The arena on made-up jobs of eight families (families.h). The table that this prints has the fragmentation
// of the first pass and of the last, the smallest capacity, and the driver calls.
#include "tests/allocator/arena/families.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "forebay/model_backend.h"
#include "runtime/command/replay/trace_replay.h"

namespace forebay {
namespace {

using testing::Family;
using testing::family_name;
using testing::FamilyMaker;

constexpr int kSeedCount = 25;
constexpr int kPasses = 4;

struct Figures {
  double sum = 0;
  double worst = 0;
  void add(double value) {
    sum += value;
    worst = std::max(worst, value);
  }
  double mean() const { return sum / kSeedCount; }
};

// The bounds of a family, in percent: of the mean and of the worst seed, in the first pass and the last.
struct Bounds {
  Family family;
  double first_mean;
  double first_worst;
  double last_mean;
  double last_worst;
};

void PrintTo(const Bounds& bounds, std::ostream* out) {
  *out << family_name(bounds.family);
}

class ArenaFamilies : public ::testing::TestWithParam<Bounds> {};

TEST_P(ArenaFamilies, WasteLittleFromTheFirstPassAndSettle) {
  const Bounds& bounds = GetParam();
  // Also searches the smallest capacity, which takes minutes.
  const bool thorough = std::getenv("FOREBAY_FAMILIES_CAPACITY") != nullptr;
  Figures first;
  Figures last;
  Figures over;
  std::uint64_t first_calls = 0;

  for (int seed = 1; seed <= kSeedCount; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AllocationTrace trace = FamilyMaker(bounds.family, static_cast<std::uint64_t>(seed)).make();
    ModelBackendOptions options;
    options.memory_bytes = 128_GiB;
    const std::unique_ptr<ModelBackend> backend = std::move(ModelBackend::create(std::move(options))).value();
    const ReplayResult result = replay_trace(trace, *backend, ReplayTarget::kArena,
                                             {.passes = kPasses, .timed = false, .progress = {}})
                                    .value();

    ASSERT_TRUE(result.completed) << result.failure;
    for (std::size_t pass = 2; pass < result.pass_calls.size(); ++pass) {
      EXPECT_EQ(result.pass_calls[pass], 0u) << "pass " << pass + 1;
    }
    EXPECT_LE(result.last_peak_physical_bytes, result.peak_physical_bytes) << "worse later than first";
    first.add(100 * result.fragmentation());
    last.add(100 * result.last_fragmentation());
    first_calls += result.pass_calls.front();
    if (thorough) {
      const auto least = find_minimum_capacity(trace, ReplayTarget::kArena, {}).value();
      ASSERT_TRUE(least.has_value());
      over.add(100 * (static_cast<double>(*least) / static_cast<double>(trace.peak_requested_bytes()) - 1));
    }
  }

  std::printf("%-15s first pass %5.2f %% (worst %5.2f), last %5.2f %% (worst %5.2f), capacity over the peak ",
              family_name(bounds.family), first.mean(), first.worst, last.mean(), last.worst);
  if (thorough) {
    std::printf("%5.2f %% (worst %5.2f)", over.mean(), over.worst);
  } else {
    std::printf("not searched");
  }
  std::printf(", %llu calls\n", static_cast<unsigned long long>(first_calls / kSeedCount));
  EXPECT_LE(first.mean(), bounds.first_mean);
  EXPECT_LE(first.worst, bounds.first_worst);
  EXPECT_LE(last.mean(), bounds.last_mean);
  EXPECT_LE(last.worst, bounds.last_worst);
}

INSTANTIATE_TEST_SUITE_P(Of, ArenaFamilies,
                         ::testing::Values(Bounds{Family::kZero3Loop, 0.2, 0.5, 0.2, 0.5},
                                           Bounds{Family::kRandomLengths, 0.4, 1.2, 0.3, 0.7},
                                           Bounds{Family::kExperts, 0.6, 2.0, 0.4, 2.0},
                                           Bounds{Family::kServing, 0.5, 2.0, 0.3, 0.6},
                                           Bounds{Family::kCrossStream, 0.3, 1.0, 0.2, 0.8},
                                           Bounds{Family::kTrainEvaluate, 0.2, 1.0, 0.2, 1.0},
                                           Bounds{Family::kLeaks, 1.3, 4.0, 0.3, 1.0},
                                           Bounds{Family::kRobson, 1.8, 7.0, 1.3, 5.0}),
                         [](const auto& info) {
                           std::string name = family_name(info.param.family);
                           std::erase_if(name,
                                         [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                           return name;
                         });

}  // namespace
}  // namespace forebay
