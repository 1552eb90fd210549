// Comparisons of settings: only settings that fit are simulated, the best one is that of an exhaustive sweep,
// and the front has the settings that nothing beats.

#include "runtime/command/compare/comparison.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
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

TEST(Comparison, TheHostHasSpilledActivations) {
  ComparisonRequest request = request_of(4, 1024, 8, "dgx-a100");
  request.choices.stages = {1};
  request.choices.offloads = {Offload::kNone};
  request.choices.recompute = {1};
  request.choices.tensor_parallel = {2};
  request.choices.batches = {1};
  request.choices.buckets = {16u << 20};
  request.choices.activations = {{.placement = ActivationPlacement::kPartition},
                                 {.placement = ActivationPlacement::kPartitionAndSpill}};

  const Comparison comparison = value_or_throw(compare_settings(request));

  ASSERT_EQ(comparison.settings.size(), 2u);
  const std::uint64_t spilled_bytes = 4 * 1024 * 1024 * 2 / 2;  // Four inputs, cut over two ranks.
  EXPECT_EQ(comparison.settings[1].host_bytes, comparison.settings[0].host_bytes + spilled_bytes);
}

TEST(Comparison, SaysThatNoSettingDividesTheBatch) {
  ComparisonRequest request = request_of(2, 512, 8, "dgx-a100");
  request.global_batch = 7;
  EXPECT_NE(compare_settings(request).status().message().find("no setting gives 7 sequences"),
            std::string::npos);
  request.choices.tensor_parallel = {3, 5};
  const std::string message = compare_settings(request).status().message();
  EXPECT_NE(message.find("divides the 8 ranks; use values that do"), std::string::npos) << message;
}

TEST(Comparison, ProductsThatOverflowAreNoSettings) {
  ComparisonRequest request = request_of(2, 512, 8, "dgx-a100");
  request.choices.batches = {std::uint64_t{1} << 61, (std::uint64_t{1} << 61) + 1};  // 8 of one are 2^64.
  const auto refusal = [&] { return compare_settings(request).status().message(); };
  EXPECT_NE(refusal().find("no setting gives 16 sequences"), std::string::npos) << refusal();

  request = request_of(1 << 16, 64, 8, "dgx-a100");
  request.choices.tensor_parallel = {1 << 16};
  request.choices.pipeline_parallel = {1 << 16};
  EXPECT_NE(refusal().find("no --tensor-parallel times --pipeline-parallel divides the 8 ranks"),
            std::string::npos)
      << refusal();
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

TEST(Comparison, WhereNoSettingCanBePlannedTheFirstSaysWhy) {
  ComparisonRequest request = request_of(8, 2048, 8, "dgx-h100");
  request.base.options.accumulate = Accumulate::kLocal;
  request.choices.stages = {2, 3};
  const Status status = compare_settings(request).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("accumulate local"), std::string::npos) << status.message();
}

TEST(Comparison, TriesByDefaultWhatTheModelAndTheClusterCanHave) {
  SimulationRequest base;
  base.cluster = value_or_throw(read_cluster("dgx-a100"));  // 8 devices in a host.
  base.cluster.drive_read_bytes_per_second = 1;
  base.cluster.drive_write_bytes_per_second = 1;
  base.shape.heads = 12;
  base.ranks = 16;
  ComparisonChoices choices = default_choices(base, 20);
  EXPECT_EQ(choices.stages, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(choices.tensor_parallel, (std::vector<int>{1, 2, 4}));
  EXPECT_EQ(choices.pipeline_parallel, std::vector<int>{1});
  EXPECT_EQ(choices.batches, (std::vector<std::uint64_t>{1, 2, 4, 8, 16}));
  EXPECT_EQ(choices.groups, (std::vector<int>{1, 8}));
  EXPECT_EQ(choices.tiers, (std::vector<Tier>{Tier::kPinned, Tier::kFile}));
  EXPECT_EQ(choices.fractions, (std::vector<double>{0.5, 1}));
  EXPECT_EQ(choices.recompute, (std::vector<int>{0, 1}));
  EXPECT_EQ(choices.buckets, (std::vector<std::uint64_t>{16u << 20, 64u << 20}));

  base.ranks = 8;
  base.shape.heads = 16;
  base.cluster.drive_write_bytes_per_second = 0;
  choices = default_choices(base, 100);
  EXPECT_EQ(choices.tensor_parallel, (std::vector<int>{1, 2, 4, 8}));
  EXPECT_EQ(choices.batches, (std::vector<std::uint64_t>{1, 2, 4, 8, 16, 32}));
  EXPECT_EQ(choices.groups, std::vector<int>{1}) << "all ranks are on one host";
  EXPECT_EQ(choices.tiers, std::vector<Tier>{Tier::kPinned}) << "files could not be written";
  base.ranks = 2;
  EXPECT_EQ(default_choices(base, 1).tensor_parallel, (std::vector<int>{1, 2}));
  EXPECT_EQ(default_choices(base, 1).batches, std::vector<std::uint64_t>{1});
}

TEST(Comparison, CombinesValuesThatGoTogether) {
  ComparisonRequest request = request_of(4, 512, 16, "dgx-a100");
  request.choices.groups = {1, 8};
  request.choices.activations.push_back({.placement = ActivationPlacement::kPartition});
  request.limit = 1;
  int in_groups = 0, partitioned = 0, offloaded = 0;
  for (const Setting& setting : value_or_throw(compare_settings(request)).settings) {
    const SimulationRequest& one = setting.request;
    const int data = one.ranks / one.part.tensor_parallel;
    EXPECT_EQ(static_cast<std::uint64_t>(one.options.micro_steps * data) * one.batch, request.global_batch);
    if (one.options.group > 1) {
      ++in_groups;
      EXPECT_EQ(one.options.group, 8);
      EXPECT_EQ(data, 16) << "a group of all ranks is none";
    }
    if (one.activations != ActivationPlacement::kKeep) {
      ++partitioned;
      EXPECT_EQ(one.recompute_every, 1);
    }
    if (one.options.offload == Offload::kOptimizerAndParameters) {
      ++offloaded;
      EXPECT_EQ(one.options.stage, 3);
    }
  }
  EXPECT_GT(in_groups, 0);
  EXPECT_GT(partitioned, 0);
  EXPECT_GT(offloaded, 0);
}

TEST(Comparison, ALimitTakesSettingsEvenlyOverTheSweep) {
  ComparisonRequest request = request_of(2, 512, 8, "dgx-a100");
  std::size_t fitting = 0;
  for (const Setting& setting : value_or_throw(compare_settings(request)).settings) fitting += setting.fits();
  ASSERT_GT(fitting, 6u);
  request.limit = 3;
  std::map<std::string, std::size_t> calls, counts;
  request.progress = [&](const char* verb, std::size_t done, std::size_t all) {
    EXPECT_EQ(done, ++calls[verb]);
    counts[verb] = all;
  };
  const Comparison comparison = value_or_throw(compare_settings(request));
  EXPECT_EQ(comparison.left_out, fitting - 3);
  EXPECT_EQ(calls, counts);
  EXPECT_EQ(calls["simulated"], 3u);
  EXPECT_GE(calls["planned"], comparison.settings.size());
  std::vector<std::size_t> simulated;
  std::size_t index = 0;
  for (const Setting& setting : comparison.settings) {
    if (setting.simulated) simulated.push_back(index);
    index += setting.fits() ? 1 : 0;
  }
  EXPECT_EQ(simulated, (std::vector<std::size_t>{0, fitting / 3, 2 * fitting / 3}));
}

TEST(Comparison, LimitsAreThoseOfADeviceAndOfARanksShareOfItsHost) {
  ComparisonRequest request = request_of(2, 512, 8, "dgx-a100");
  request.limit = 1;
  const ClusterDescription& cluster = request.base.cluster;
  const auto limits = [&](std::uint64_t memory, std::uint64_t room) {
    request.base.options.memory_bytes = memory;
    request.base.options.room_bytes = room;
    const Comparison comparison = value_or_throw(compare_settings(request));
    EXPECT_EQ(comparison.settings[0].host_limit, cluster.host_memory_bytes / 8);
    return comparison.settings[0].device_limit;
  };
  const std::uint64_t device = cluster.device.memory_bytes;
  EXPECT_EQ(limits(0, 0), device);
  EXPECT_EQ(limits(0, 1000), device - 1000);
  EXPECT_EQ(limits(2 * device, 1000), device - 1000);
  EXPECT_EQ(limits(device / 2, 1000), device / 2 - 1000);
  EXPECT_EQ(limits(500, 1000), 0u);
}

// A pipeline with tensor-parallel ranks, offloaded states and saved inputs in host memory.
TEST(Comparison, TheBytesOfASettingAreThoseOfItsSimulation) {
  ComparisonRequest request = request_of(4, 512, 16, "dgx-a100");
  request.choices.pipeline_parallel = {1, 2};
  request.choices.stages = {1, 3};
  request.choices.recompute = {1};
  request.choices.batches = {1};
  request.choices.activations = {{.placement = ActivationPlacement::kKeep},
                                 {.placement = ActivationPlacement::kPartitionAndSpill}};
  request.limit = 1;
  int checked = 0;
  for (const Setting& setting : value_or_throw(compare_settings(request)).settings) {
    const Result<SimulationResult> result = simulate(setting.request);
    ASSERT_TRUE(result.ok()) << setting_text(setting) << result.status().message();
    EXPECT_EQ(result.value().statistics.planned_reserved_bytes, setting.device_bytes)
        << setting_text(setting);
    ++checked;
  }
  EXPECT_GT(checked, 8);
}

// Settings with figures of their own: 0 and 1 are simulated, 2 fails, 3 to 6 miss by 4, 1, 2 and 3 MiB, and 7
// is simulated too, slower and larger than 0.
Comparison example() {
  Comparison comparison;
  const auto add = [&](std::uint64_t device, std::uint64_t host) -> Setting& {
    Setting setting;
    setting.request.ranks = 8;
    setting.request.batch = 2;
    setting.request.options.micro_steps = 3;
    setting.request.options.bucket_bytes = 16u << 20;
    setting.device_bytes = device << 20;
    setting.host_bytes = host << 20;
    setting.device_limit = 100u << 20;
    setting.host_limit = 50u << 20;
    return comparison.settings.emplace_back(setting);
  };
  const auto simulated = [](Setting& setting, double seconds, double tokens, double used,
                            const char* bottleneck) {
    setting.simulated = true;
    setting.step_seconds = seconds;
    setting.tokens_per_second = tokens;
    setting.model_flops_used = used;
    setting.bottleneck = bottleneck;
  };
  Setting& full = add(90, 20);
  full.request.options.stage = 3;
  full.request.options.offload = Offload::kOptimizerAndParameters;
  full.request.options.tier = Tier::kFile;
  full.request.options.offload_fraction = 0.25;
  full.request.options.group = 4;
  full.request.recompute_every = 2;
  full.request.activations = ActivationPlacement::kPartition;
  full.request.part = {.tensor_parallel = 5, .pipeline_parallel = 6};
  simulated(full, 0.5, 1600.4, 0.3456, "the device");
  Setting& small = add(60, 30);
  small.request.options.stage = 1;
  simulated(small, 1.25, 640.6, 0.2, "the links");
  add(70, 40).failure = Status(StatusCode::kUnavailable, "no\nthreads");
  add(104, 10);
  add(101, 50);
  add(99, 52);
  add(101, 52).request.options.stage = 2;
  simulated(add(95, 5), 0.75, 1000, 0.1, "the host");
  comparison.left_out = 9;
  return comparison;
}

TEST(ComparisonPrint, EachFigureStandsBehindItsName) {
  EXPECT_EQ(comparison_text(example(), {.model = "the model", .price = 2.5}), R"(the model
8 settings: 3 simulated, 4 do not fit, 9 left out by --limit
1 could not be simulated, the first one (stage 0, batch 2 x 3, bucket 16MiB): no\nthreads

best
  stage 3, offload optimizer+parameters to nvme by 0.25, recompute every:2, activations partition, tensor-parallel 5, pipeline-parallel 6, order group:4, batch 2 x 3, bucket 16MiB
    step 0.500 s, tokens/s 1600, MFU 34.6 %, device 90.00 MiB, host 20.00 MiB, price of 1M tokens 3.4714, most time the device
  stage 0, batch 2 x 3, bucket 16MiB
    step 0.750 s, tokens/s 1000, MFU 10.0 %, device 95.00 MiB, host 5.00 MiB, price of 1M tokens 5.5556, most time the host
  stage 1, batch 2 x 3, bucket 16MiB
    step 1.250 s, tokens/s 641, MFU 20.0 %, device 60.00 MiB, host 30.00 MiB, price of 1M tokens 8.6724, most time the links
  options: --stage 3 --micro-steps 3 --batch 2 --bucket 16MiB --offload optimizer+parameters --offload-tier nvme --offload-fraction 0.25 --recompute every:2 --activations partition --tensor-parallel 5 --pipeline-parallel 6 --order group:4

no setting is both faster and smaller
  stage 1, batch 2 x 3, bucket 16MiB
    step 1.250 s, tokens/s 641, MFU 20.0 %, device 60.00 MiB, host 30.00 MiB, price of 1M tokens 8.6724, most time the links
  stage 3, offload optimizer+parameters to nvme by 0.25, recompute every:2, activations partition, tensor-parallel 5, pipeline-parallel 6, order group:4, batch 2 x 3, bucket 16MiB
    step 0.500 s, tokens/s 1600, MFU 34.6 %, device 90.00 MiB, host 20.00 MiB, price of 1M tokens 3.4714, most time the device

just do not fit
  stage 0, batch 2 x 3, bucket 16MiB: 1.00 MiB too much
  stage 0, batch 2 x 3, bucket 16MiB: 2.00 MiB too much
  stage 2, batch 2 x 3, bucket 16MiB: 3.00 MiB too much
)");
}

// More than the best settings that are shown, each slower and smaller than the last.
TEST(ComparisonPrint, TheFrontIsShownWhole) {
  Comparison comparison;
  for (int i = 0; i < 9; ++i) {
    Setting setting = example().settings[1];
    setting.step_seconds = 1 + i;
    setting.device_bytes = static_cast<std::uint64_t>(90 - i) << 20;
    comparison.settings.push_back(setting);
  }
  const std::string text = comparison_text(comparison, {.model = "the model"});
  const std::string front = text.substr(text.find("no setting is both faster and smaller"));
  for (int i = 0; i < 9; ++i)
    EXPECT_NE(front.find("step " + std::to_string(1 + i) + ".00"), std::string::npos) << i << "\n" << text;
}

TEST(ComparisonPrint, WithoutAPriceNoneIsPrintedAndTheOrderIsTheObjectives) {
  EXPECT_EQ(comparison_text(example(), {.model = "the model", .objective = Objective::kMemory}), R"(the model
8 settings: 3 simulated, 4 do not fit, 9 left out by --limit
1 could not be simulated, the first one (stage 0, batch 2 x 3, bucket 16MiB): no\nthreads

best
  stage 1, batch 2 x 3, bucket 16MiB
    step 1.250 s, tokens/s 641, MFU 20.0 %, device 60.00 MiB, host 30.00 MiB, most time the links
  stage 3, offload optimizer+parameters to nvme by 0.25, recompute every:2, activations partition, tensor-parallel 5, pipeline-parallel 6, order group:4, batch 2 x 3, bucket 16MiB
    step 0.500 s, tokens/s 1600, MFU 34.6 %, device 90.00 MiB, host 20.00 MiB, most time the device
  stage 0, batch 2 x 3, bucket 16MiB
    step 0.750 s, tokens/s 1000, MFU 10.0 %, device 95.00 MiB, host 5.00 MiB, most time the host
  options: --stage 1 --micro-steps 3 --batch 2 --bucket 16MiB

no setting is both faster and smaller
  stage 1, batch 2 x 3, bucket 16MiB
    step 1.250 s, tokens/s 641, MFU 20.0 %, device 60.00 MiB, host 30.00 MiB, most time the links
  stage 3, offload optimizer+parameters to nvme by 0.25, recompute every:2, activations partition, tensor-parallel 5, pipeline-parallel 6, order group:4, batch 2 x 3, bucket 16MiB
    step 0.500 s, tokens/s 1600, MFU 34.6 %, device 90.00 MiB, host 20.00 MiB, most time the device

just do not fit
  stage 0, batch 2 x 3, bucket 16MiB: 1.00 MiB too much
  stage 0, batch 2 x 3, bucket 16MiB: 2.00 MiB too much
  stage 2, batch 2 x 3, bucket 16MiB: 3.00 MiB too much
)");
}

TEST(ComparisonPrint, EachFigureHasItsKeyInJson) {
  EXPECT_EQ(nlohmann::json::parse(comparison_json(example(), {.model = "the model", .price = 2.5})),
            nlohmann::json::parse(R"(
{"model": "the model",
 "settings": [{"setting": "stage 3, offload optimizer+parameters to nvme by 0.25, recompute every:2, activations partition, tensor-parallel 5, pipeline-parallel 6, order group:4, batch 2 x 3, bucket 16MiB",
               "options": "--stage 3 --micro-steps 3 --batch 2 --bucket 16MiB --offload optimizer+parameters --offload-tier nvme --offload-fraction 0.25 --recompute every:2 --activations partition --tensor-parallel 5 --pipeline-parallel 6 --order group:4",
               "stage": 3, "offload": "optimizer+parameters", "tier": "nvme", "fraction": 0.25,
               "recompute": "every:2", "tensor_parallel": 5, "pipeline_parallel": 6, "activations": "partition",
               "group": 4, "batch": 2, "micro_steps": 3, "bucket": 16777216, "device_bytes": 94371840,
               "host_bytes": 20971520, "missing_bytes": 0, "step_seconds": 0.5, "tokens_per_second": 1600.4,
               "model_flops_utilisation": 0.3456, "bottleneck": "the device",
               "price_per_million_tokens": 3.471354383626316},
              {"setting": "stage 1, batch 2 x 3, bucket 16MiB",
               "options": "--stage 1 --micro-steps 3 --batch 2 --bucket 16MiB", "stage": 1, "offload": "none",
               "tier": "cpu", "fraction": 1.0, "recompute": "none", "tensor_parallel": 1,
               "pipeline_parallel": 1, "activations": "keep", "group": 1, "batch": 2, "micro_steps": 3,
               "bucket": 16777216, "device_bytes": 62914560, "host_bytes": 31457280, "missing_bytes": 0,
               "step_seconds": 1.25, "tokens_per_second": 640.6, "model_flops_utilisation": 0.2,
               "bottleneck": "the links", "price_per_million_tokens": 8.672425156970895},
              {"setting": "stage 0, batch 2 x 3, bucket 16MiB",
               "options": "--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB", "stage": 0, "offload": "none",
               "tier": "cpu", "fraction": 1.0, "recompute": "none", "tensor_parallel": 1,
               "pipeline_parallel": 1, "activations": "keep", "group": 1, "batch": 2, "micro_steps": 3,
               "bucket": 16777216, "device_bytes": 73400320, "host_bytes": 41943040, "missing_bytes": 0,
               "failure": "no\\nthreads"},
              {"setting": "stage 0, batch 2 x 3, bucket 16MiB",
               "options": "--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB", "stage": 0, "offload": "none",
               "tier": "cpu", "fraction": 1.0, "recompute": "none", "tensor_parallel": 1,
               "pipeline_parallel": 1, "activations": "keep", "group": 1, "batch": 2, "micro_steps": 3,
               "bucket": 16777216, "device_bytes": 109051904, "host_bytes": 10485760, "missing_bytes": 4194304},
              {"setting": "stage 0, batch 2 x 3, bucket 16MiB",
               "options": "--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB", "stage": 0, "offload": "none",
               "tier": "cpu", "fraction": 1.0, "recompute": "none", "tensor_parallel": 1,
               "pipeline_parallel": 1, "activations": "keep", "group": 1, "batch": 2, "micro_steps": 3,
               "bucket": 16777216, "device_bytes": 105906176, "host_bytes": 52428800, "missing_bytes": 1048576},
              {"setting": "stage 0, batch 2 x 3, bucket 16MiB",
               "options": "--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB", "stage": 0, "offload": "none",
               "tier": "cpu", "fraction": 1.0, "recompute": "none", "tensor_parallel": 1,
               "pipeline_parallel": 1, "activations": "keep", "group": 1, "batch": 2, "micro_steps": 3,
               "bucket": 16777216, "device_bytes": 103809024, "host_bytes": 54525952, "missing_bytes": 2097152},
              {"setting": "stage 2, batch 2 x 3, bucket 16MiB",
               "options": "--stage 2 --micro-steps 3 --batch 2 --bucket 16MiB", "stage": 2, "offload": "none",
               "tier": "cpu", "fraction": 1.0, "recompute": "none", "tensor_parallel": 1,
               "pipeline_parallel": 1, "activations": "keep", "group": 1, "batch": 2, "micro_steps": 3,
               "bucket": 16777216, "device_bytes": 105906176, "host_bytes": 54525952, "missing_bytes": 3145728},
              {"setting": "stage 0, batch 2 x 3, bucket 16MiB",
               "options": "--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB", "stage": 0, "offload": "none",
               "tier": "cpu", "fraction": 1.0, "recompute": "none", "tensor_parallel": 1,
               "pipeline_parallel": 1, "activations": "keep", "group": 1, "batch": 2, "micro_steps": 3,
               "bucket": 16777216, "device_bytes": 99614720, "host_bytes": 5242880, "missing_bytes": 0,
               "step_seconds": 0.75, "tokens_per_second": 1000.0, "model_flops_utilisation": 0.1,
               "bottleneck": "the host", "price_per_million_tokens": 5.555555555555556}],
 "best": [0, 7, 1], "pareto_front": [1, 0], "nearest_misses": [4, 5, 6, 3]})"));
}

TEST(ComparisonPrint, CsvHasTheColumnsOfASimulatedSetting) {
  EXPECT_EQ(
      comparison_csv(example(), {.model = "the model"}),
      R"(setting,options,stage,offload,tier,fraction,recompute,tensor_parallel,pipeline_parallel,activations,group,batch,micro_steps,bucket,device_bytes,host_bytes,missing_bytes,step_seconds,tokens_per_second,model_flops_utilisation,bottleneck
"stage 3, offload optimizer+parameters to nvme by 0.25, recompute every:2, activations partition, tensor-parallel 5, pipeline-parallel 6, order group:4, batch 2 x 3, bucket 16MiB","--stage 3 --micro-steps 3 --batch 2 --bucket 16MiB --offload optimizer+parameters --offload-tier nvme --offload-fraction 0.25 --recompute every:2 --activations partition --tensor-parallel 5 --pipeline-parallel 6 --order group:4",3,"optimizer+parameters","nvme",0.25,"every:2",5,6,"partition",4,2,3,16777216,94371840,20971520,0,0.5,1600.4,0.3456,"the device"
"stage 1, batch 2 x 3, bucket 16MiB","--stage 1 --micro-steps 3 --batch 2 --bucket 16MiB",1,"none","cpu",1.0,"none",1,1,"keep",1,2,3,16777216,62914560,31457280,0,1.25,640.6,0.2,"the links"
"stage 0, batch 2 x 3, bucket 16MiB","--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB",0,"none","cpu",1.0,"none",1,1,"keep",1,2,3,16777216,73400320,41943040,0,,,,
"stage 0, batch 2 x 3, bucket 16MiB","--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB",0,"none","cpu",1.0,"none",1,1,"keep",1,2,3,16777216,109051904,10485760,4194304,,,,
"stage 0, batch 2 x 3, bucket 16MiB","--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB",0,"none","cpu",1.0,"none",1,1,"keep",1,2,3,16777216,105906176,52428800,1048576,,,,
"stage 0, batch 2 x 3, bucket 16MiB","--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB",0,"none","cpu",1.0,"none",1,1,"keep",1,2,3,16777216,103809024,54525952,2097152,,,,
"stage 2, batch 2 x 3, bucket 16MiB","--stage 2 --micro-steps 3 --batch 2 --bucket 16MiB",2,"none","cpu",1.0,"none",1,1,"keep",1,2,3,16777216,105906176,54525952,3145728,,,,
"stage 0, batch 2 x 3, bucket 16MiB","--stage 0 --micro-steps 3 --batch 2 --bucket 16MiB",0,"none","cpu",1.0,"none",1,1,"keep",1,2,3,16777216,99614720,5242880,0,0.75,1000.0,0.1,"the host"
)");
}

TEST(ComparisonPrint, ThePageDrawsEachSettingWhereItsFiguresAre) {
  const std::string page = comparison_page(example(), {.model = "the model"});

  EXPECT_EQ(page.substr(page.find("</style>")), R"(</style></head><body>
<h1>Settings compared</h1>
<p>the model</p>
<p>8 settings, 3 simulated.</p>
<p>1 could not be simulated, the first one (stage 0, batch 2 x 3, bucket 16MiB): no\nthreads
</p>
<svg viewBox="0 0 800 420" role="img" aria-label="Seconds of a step against device memory">
<line class="grid" x1="70.0" y1="375.0" x2="790.0" y2="375.0"/><text x="64.0" y="379.0" text-anchor="end">0 s</text><text x="70.0" y="393.0" text-anchor="middle">0 B</text>
<line class="grid" x1="70.0" y1="283.8" x2="790.0" y2="283.8"/><text x="64.0" y="287.8" text-anchor="end">0.312 s</text><text x="250.0" y="393.0" text-anchor="middle">25.00 MiB</text>
<line class="grid" x1="70.0" y1="192.5" x2="790.0" y2="192.5"/><text x="64.0" y="196.5" text-anchor="end">0.625 s</text><text x="430.0" y="393.0" text-anchor="middle">50.00 MiB</text>
<line class="grid" x1="70.0" y1="101.2" x2="790.0" y2="101.2"/><text x="64.0" y="105.2" text-anchor="end">0.938 s</text><text x="610.0" y="393.0" text-anchor="middle">75.00 MiB</text>
<line class="grid" x1="70.0" y1="10.0" x2="790.0" y2="10.0"/><text x="64.0" y="14.0" text-anchor="end">1.25 s</text><text x="790.0" y="393.0" text-anchor="end">100.00 MiB</text>
<text x="435.0" y="414.0" text-anchor="middle">device memory</text>
<circle class="stage3" cx="718.0" cy="229.0" r="3.5"><title>stage 3, offload optimizer+parameters to nvme by 0.25, recompute every:2, activations partition, tensor-parallel 5, pipeline-parallel 6, order group:4, batch 2 x 3, bucket 16MiB: 0.500 s, 90.00 MiB</title></circle>
<circle class="stage0" cx="754.0" cy="156.0" r="3.5"><title>stage 0, batch 2 x 3, bucket 16MiB: 0.750 s, 95.00 MiB</title></circle>
<circle class="stage1" cx="502.0" cy="10.0" r="3.5"><title>stage 1, batch 2 x 3, bucket 16MiB: 1.250 s, 60.00 MiB</title></circle>
<polyline class="front" points="502.0,10.0 718.0,229.0 "/>
</svg>
<p class="key"><span><svg style="width:.8em;height:.8em" viewBox="0 0 10 10"><circle class="stage0" cx="5" cy="5" r="5"/></svg> stage 0</span><span><svg style="width:.8em;height:.8em" viewBox="0 0 10 10"><circle class="stage1" cx="5" cy="5" r="5"/></svg> stage 1</span><span><svg style="width:.8em;height:.8em" viewBox="0 0 10 10"><circle class="stage2" cx="5" cy="5" r="5"/></svg> stage 2</span><span><svg style="width:.8em;height:.8em" viewBox="0 0 10 10"><circle class="stage3" cx="5" cy="5" r="5"/></svg> stage 3</span>The line joins the settings that no other one beats in both.</p>
<h2>Best</h2>
<table><thead><tr><th scope="col">setting</th><th scope="col">step</th><th scope="col">tokens/s</th><th scope="col">MFU</th><th scope="col">device</th><th scope="col">host</th><th scope="col">most time</th></tr></thead><tbody>
<tr><td>stage 3, offload optimizer+parameters to nvme by 0.25, recompute every:2, activations partition, tensor-parallel 5, pipeline-parallel 6, order group:4, batch 2 x 3, bucket 16MiB</td><td>0.500 s</td><td>1600</td><td>34.6 %</td><td>90.00 MiB</td><td>20.00 MiB</td><td>the device</td></tr>
<tr><td>stage 0, batch 2 x 3, bucket 16MiB</td><td>0.750 s</td><td>1000</td><td>10.0 %</td><td>95.00 MiB</td><td>5.00 MiB</td><td>the host</td></tr>
<tr><td>stage 1, batch 2 x 3, bucket 16MiB</td><td>1.250 s</td><td>641</td><td>20.0 %</td><td>60.00 MiB</td><td>30.00 MiB</td><td>the links</td></tr>
</tbody></table>
<h2>Neither slower nor larger than any other</h2>
<table><thead><tr><th scope="col">setting</th><th scope="col">step</th><th scope="col">tokens/s</th><th scope="col">MFU</th><th scope="col">device</th><th scope="col">host</th><th scope="col">most time</th></tr></thead><tbody>
<tr><td>stage 1, batch 2 x 3, bucket 16MiB</td><td>1.250 s</td><td>641</td><td>20.0 %</td><td>60.00 MiB</td><td>30.00 MiB</td><td>the links</td></tr>
<tr><td>stage 3, offload optimizer+parameters to nvme by 0.25, recompute every:2, activations partition, tensor-parallel 5, pipeline-parallel 6, order group:4, batch 2 x 3, bucket 16MiB</td><td>0.500 s</td><td>1600</td><td>34.6 %</td><td>90.00 MiB</td><td>20.00 MiB</td><td>the device</td></tr>
</tbody></table>
<h2>Just do not fit</h2>
<ul>
<li>stage 0, batch 2 x 3, bucket 16MiB: 1.00 MiB too much</li>
<li>stage 0, batch 2 x 3, bucket 16MiB: 2.00 MiB too much</li>
<li>stage 2, batch 2 x 3, bucket 16MiB: 3.00 MiB too much</li>
<li>stage 0, batch 2 x 3, bucket 16MiB: 4.00 MiB too much</li>
</ul>
</body></html>
)");
}

}  // namespace
}  // namespace forebay
