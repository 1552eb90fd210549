// Comparisons of settings: only settings that fit are simulated, the best one is that of an exhaustive sweep,
// and the front has the settings that nothing beats.

#include "runtime/command/compare/comparison.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "forebay/error.h"
#include "runtime/command/compare/comparison_print.h"
#include "tests/support/thread_limit.h"

namespace forebay {
namespace {

ComparisonRequest request_of(std::uint64_t layers, std::uint64_t hidden, int ranks, const char* cluster) {
  ComparisonRequest request;
  request.base.shape = {
      .layers = layers, .hidden = hidden, .heads = 16, .vocabulary = 32000, .positions = 1024};
  request.base.ranks = ranks;
  request.base.cluster = value_or_throw(read_cluster(cluster));
  request.base.options.dtype = DataType::kFloat16;
  request.global_batch = static_cast<std::uint64_t>(ranks) * 2;
  request.choices = default_choices(request.base, request.global_batch);
  request.choices.batches = {1, 2};
  request.choices.buckets = {16u << 20};
  request.choices.tiers = {Tier::kPinned};
  request.choices.fractions = {1.0};
  request.choices.tensor_parallel = {1, 2};
  return request;
}

TEST(Comparison, SimulatesTheSettingsThatFitAndNoOthers) {
  const Comparison comparison = value_or_throw(compare_settings(request_of(24, 8192, 16, "dgx-2")));
  std::size_t fitting = 0;
  for (const Setting& setting : comparison.settings) {
    EXPECT_EQ(setting.simulated, setting.fits()) << setting_text(setting);
    fitting += setting.fits() ? 1 : 0;
  }
  EXPECT_GT(fitting, 0u);
  EXPECT_LT(fitting, comparison.settings.size());
  const auto misses = nearest_misses(comparison);
  ASSERT_FALSE(misses.empty());
  for (std::size_t i = 1; i < misses.size(); ++i) {
    EXPECT_LE(comparison.settings[misses[i - 1]].missing_bytes(),
              comparison.settings[misses[i]].missing_bytes());
  }
}

TEST(Comparison, TheFrontHasTheSettingsThatNothingBeats) {
  const Comparison comparison = value_or_throw(compare_settings(request_of(8, 2048, 8, "dgx-h100")));
  const auto front = pareto_front(comparison);
  const auto beats = [](const Setting& a, const Setting& b) {
    return a.step_seconds <= b.step_seconds && a.device_bytes <= b.device_bytes &&
           (a.step_seconds < b.step_seconds || a.device_bytes < b.device_bytes);
  };
  for (const std::size_t i : front) {
    for (const Setting& other : comparison.settings) {
      if (!other.simulated) continue;
      EXPECT_FALSE(beats(other, comparison.settings[i])) << setting_text(other);
    }
  }
  EXPECT_EQ(best_first(comparison, Objective::kMemory).front(), front.front());
  EXPECT_EQ(comparison.settings[best_first(comparison, Objective::kTime).front()].step_seconds,
            comparison.settings[front.back()].step_seconds);
}

TEST(Comparison, TheBestSettingIsThatOfAnExhaustiveSweep) {
  const char* const given = std::getenv("FOREBAY_SEED");
  const unsigned long seed = given != nullptr ? std::strtoul(given, nullptr, 0) : std::random_device()();
  std::printf("FOREBAY_SEED=%lu\n", seed);
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto pick = [&](auto... values) {
    const std::uint64_t all[] = {static_cast<std::uint64_t>(values)...};
    return all[random() % (sizeof(all) / sizeof(all[0]))];
  };
  const char* const clusters[] = {"dgx-2", "dgx-a100", "dgx-h100"};
  for (int pair = 0; pair < 20; ++pair) {
    ComparisonRequest request = request_of(pick(1, 2), pick(512, 1024, 4096),
                                           static_cast<int>(pick(2, 8, 32)), clusters[random() % 3]);
    request.choices.batches = {pick(1, 2)};
    const Comparison comparison = value_or_throw(compare_settings(request));
    const Setting& named = comparison.settings[best_first(comparison, Objective::kTime).front()];
    double best = 1e300;
    for (const Setting& setting : comparison.settings) {
      const Result<SimulationResult> result = simulate(setting.request);
      if (result.ok() && setting.host_bytes <= setting.host_limit)
        best = std::min(best, result.value().step_seconds);
    }
    EXPECT_EQ(named.step_seconds, best) << setting_text(named);
  }
}

TEST(Comparison, TheNumberOfThreadsChangesNothing) {
  ComparisonRequest request = request_of(4, 1024, 8, "dgx-a100");
  const ComparisonText text{.model = "model"};
  const std::string one = comparison_json(value_or_throw(compare_settings(request)), text);
  request.threads = 3;
  EXPECT_EQ(comparison_json(value_or_throw(compare_settings(request)), text), one);
  // Neither do threads that the system does not have.
  for (const int threads : {0, 1}) {
    const testing::ThreadLimit limit(threads);
    EXPECT_EQ(comparison_json(value_or_throw(compare_settings(request)), text), one);
  }
}

TEST(Comparison, PrintsEverySettingAsCsvAndThePageStandsAlone) {
  const Comparison comparison = value_or_throw(compare_settings(request_of(24, 8192, 16, "dgx-2")));
  const ComparisonText text{.model = "a < b", .objective = Objective::kCost, .price = 2};
  const std::string csv = comparison_csv(comparison, text);
  EXPECT_EQ(static_cast<std::size_t>(std::count(csv.begin(), csv.end(), '\n')),
            comparison.settings.size() + 1);
  EXPECT_NE(csv.find("price_per_million_tokens"), std::string::npos);
  const std::string page = comparison_page(comparison, text);
  EXPECT_NE(page.find("a &lt; b"), std::string::npos);
  EXPECT_EQ(page.find("http"), std::string::npos);
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_NE(page.find("class=\"front\""), std::string::npos);
  const std::string shown = comparison_text(comparison, text);
  EXPECT_NE(shown.find("too much"), std::string::npos) << shown;
  EXPECT_NE(shown.find("options: --stage"), std::string::npos) << shown;
}

TEST(Comparison, SaysThatNoSettingDividesTheBatch) {
  ComparisonRequest request = request_of(2, 512, 8, "dgx-a100");
  request.global_batch = 7;
  EXPECT_NE(compare_settings(request).status().message().find("no setting gives 7 sequences"),
            std::string::npos);
}

TEST(Comparison, ProductsThatOverflowAreNoSettings) {
  ComparisonRequest request = request_of(2, 512, 8, "dgx-a100");
  request.choices.batches = {std::uint64_t{1} << 61, (std::uint64_t{1} << 61) + 1};  // 8 of one are 2^64.
  const auto refusal = [&] { return compare_settings(request).status().message(); };
  EXPECT_NE(refusal().find("no setting gives 16 sequences"), std::string::npos) << refusal();

  request = request_of(1 << 16, 64, 8, "dgx-a100");
  request.choices.tensor_parallel = {1 << 16};
  request.choices.pipeline_parallel = {1 << 16};
  EXPECT_NE(refusal().find("no setting gives 16 sequences"), std::string::npos) << refusal();
}

TEST(Comparison, SaysHowManySequencesAStepMayHave) {
  ComparisonRequest request = request_of(2, 512, 8, "dgx-a100");
  request.choices.batches = {1};
  request.choices.tensor_parallel = {1};
  request.global_batch = 8 * ((std::uint64_t{1} << 32) + 1);
  EXPECT_EQ(compare_settings(request).status().message(),
            "--global-batch is 34359738376; a micro-step of 8 ranks takes at most 8 sequences (--micro-batch "
            "1) and a step has at most 1000000 micro-steps, so use at most 8000000, more --ranks or a larger "
            "--micro-batch");
}

TEST(Comparison, SettingsThatFitAndCannotBeSimulatedAreNotSilent) {
  ComparisonRequest request = request_of(4, 512, 8, "dgx-a100");
  request.choices.stages = {0};
  request.choices.offloads = {Offload::kNone};
  request.choices.tensor_parallel = {1};
  request.choices.pipeline_parallel = {1, 4};
  const testing::ThreadLimit limit(0);
  const Comparison comparison = value_or_throw(compare_settings(request));
  ASSERT_FALSE(failures(comparison).empty());
  for (const Setting& setting : comparison.settings)
    EXPECT_EQ(setting.simulated, setting.request.part.pipeline_parallel == 1) << setting_text(setting);
  const ComparisonText text{.model = "model"};
  for (const std::string& shown : {comparison_text(comparison, text), comparison_page(comparison, text)})
    EXPECT_NE(shown.find(" could not be simulated, the first one (stage 0, pipeline-parallel 4"),
              std::string::npos)
        << shown;
  EXPECT_NE(comparison_json(comparison, text).find("\"failure\": \"there is no thread"), std::string::npos);
}

TEST(Comparison, AModelThatFitsNowhereHasMissesAndNoBest) {
  ComparisonRequest request = request_of(400, 8192, 2, "dgx-2");
  request.choices.offloads = {Offload::kNone};
  const Comparison comparison = value_or_throw(compare_settings(request));
  EXPECT_TRUE(best_first(comparison, Objective::kTime).empty());
  EXPECT_EQ(nearest_misses(comparison).size(), comparison.settings.size());
  const ComparisonText text{.model = "large"};
  EXPECT_NE(comparison_text(comparison, text).find("0 simulated"), std::string::npos);
  EXPECT_NE(comparison_page(comparison, text).find("No setting fits"), std::string::npos);
}

}  // namespace
}  // namespace forebay
