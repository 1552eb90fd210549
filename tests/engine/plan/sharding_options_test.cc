#include "forebay/sharding_options.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "forebay/text.h"

namespace forebay {
namespace {

std::string refusal(std::string_view name, std::string_view value) {
  ShardingOptions options;
  const Status status = set_option(options, name, value);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  return status.message();
}

ShardingOptions options_of(const std::vector<std::pair<const char*, const char*>>& values) {
  ShardingOptions options;
  for (const auto& [name, value] : values) {
    const Status status = set_option(options, name, value);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  return options;
}

TEST(ShardingOptions, TextReadsBackAsTheSameText) {
  const std::vector<std::pair<const char*, std::vector<const char*>>> values = {
      {"stage", {"0", "1", "2", "3"}},
      {"dtype", {"fp32", "bf16", "fp16"}},
      {"micro-steps", {"1", "7", "1000000"}},
      {"forwards-ahead", {"0", "3"}},
      {"accumulate", {"shard", "local"}},
      {"average", {"ranks+micro-steps", "ranks"}},
      {"order-of-units", {"strict", "recorded", "recorded:0.0b.0r/0//"}},
      {"units-at-once", {"1", "1000"}},
      {"order", {"rank", "group:2", "group:64"}},
      {"shard-within", {"all", "group"}},
      {"bucket", {"1", "16MiB", "70001", "auto"}},
      {"overlap", {"on", "off"}},
      {"memory", {"0", "80GiB", "1536MiB"}},
      {"device-room", {"0", "384MiB", "1GiB"}},
      {"spillable", {"off", "on"}},
      {"optimizer", {"adamw", "adam", "sgd", "lion", "adafactor", "muon"}},
      {"muon-rate", {"original", "match-rms-adamw"}},
      {"moments", {"fp32", "bf16", "block8"}},
      {"master-weights", {"on", "off"}},
      {"ema", {"0", "0.999"}},
      {"save-async", {"off", "on"}},
      {"offload", {"none", "optimizer", "optimizer+parameters"}},
      {"offload-tier", {"cpu", "nvme", "nvme:/a", "nvme:/a,b c"}},
      {"offload-fraction", {"0", "0.75", "1", "auto"}},
      {"offload-staging", {"8MiB", "96MiB"}}};
  std::set<std::string> tried;
  for (const auto& [name, texts] : values) {
    tried.insert(name);
    for (const char* const text : texts) EXPECT_EQ(option_text(options_of({{name, text}}), name), text);
  }
  for (const OptionRow& row : sharding_option_table()) EXPECT_TRUE(tried.contains(row.name)) << row.name;
}

TEST(ShardingOptions, DefaultsAreValidAndReadBackAsThemselves) {
  const ShardingOptions defaults;
  EXPECT_TRUE(check_sharding_options(defaults).ok());
  for (const OptionRow& row : sharding_option_table()) {
    ShardingOptions options;
    EXPECT_TRUE(set_option(options, row.name, option_text(defaults, row.name)).ok()) << row.name;
    EXPECT_EQ(option_text(options, row.name), option_text(defaults, row.name));
  }
}

TEST(ShardingOptions, ValuesArriveInTheirMembers) {
  const ShardingOptions options = options_of({{"stage", "3"},
                                              {"dtype", "bf16"},
                                              {"order", "group:4"},
                                              {"shard-within", "group"},
                                              {"bucket", "64KiB"},
                                              {"overlap", "off"},
                                              {"offload", "optimizer+parameters"},
                                              {"offload-tier", "nvme:/a,/b"},
                                              {"offload-fraction", "auto"}});
  EXPECT_EQ(options.stage, 3);
  EXPECT_EQ(options.dtype, DataType::kBfloat16);
  EXPECT_EQ(options.group, 4);
  EXPECT_TRUE(options.shard_within_group);
  EXPECT_EQ(options.bucket_bytes, 65536u);
  EXPECT_FALSE(options.overlap);
  EXPECT_EQ(options.offload, Offload::kOptimizerAndParameters);
  EXPECT_EQ(options.tier, Tier::kFile);
  EXPECT_EQ(options.offload_directories, (std::vector<std::string>{"/a", "/b"}));
  EXPECT_TRUE(options.offload_auto);
  EXPECT_EQ(options.offload_fraction, 1.0);

  ShardingOptions again = options;
  ASSERT_TRUE(set_option(again, "offload-fraction", "0.5").ok());
  ASSERT_TRUE(set_option(again, "offload-tier", "cpu").ok());
  EXPECT_FALSE(again.offload_auto);
  EXPECT_TRUE(again.offload_directories.empty());
}

TEST(ShardingOptions, ARefusalNamesTheOptionItsValueAndWhatItMayBe) {
  EXPECT_EQ(refusal("stage", "4"), "stage is 4; use 0, 1, 2 or 3");
  EXPECT_EQ(refusal("dtype", "fp8"), "dtype is 'fp8'; use fp32, bf16 or fp16");
  EXPECT_EQ(refusal("micro-steps", "0"), "micro-steps is 0; use 1 to 1000000");
  EXPECT_EQ(refusal("offload-fraction", "2"), "offload-fraction is 2; use 0 to 1, or auto");
  EXPECT_EQ(refusal("offload-staging", "4KiB"), "offload-staging is 4KiB; use at least 8 MiB");
  EXPECT_EQ(refusal("memory", ""), "memory is ''; use a size, such as 80GiB or 512MiB");
  for (const char* const text : {"group", "group:", "group:0", "group:-1", "group:2x", "2", "ranks"})
    EXPECT_NE(refusal("order", text).find("use rank, or group:G"), std::string::npos) << text;
  for (const char* const text : {"disk", "nvme:", "nvme:a,,b", "nvme:a,", "cpu:a"})
    EXPECT_NE(refusal("offload-tier", text).find("use cpu or nvme:DIR"), std::string::npos) << text;
  for (const char* const text : {"nan", "inf", "-0.1", "half", "1.1"})
    EXPECT_NE(refusal("offload-fraction", text).find("use 0 to 1"), std::string::npos) << text;
}

TEST(ShardingOptions, ARefusedValueChangesNothing) {
  ShardingOptions options = options_of({{"offload-tier", "nvme:/a"}, {"bucket", "auto"}});
  EXPECT_FALSE(set_option(options, "offload-tier", "nvme:/b,").ok());
  EXPECT_FALSE(set_option(options, "bucket", "0").ok());
  EXPECT_EQ(option_text(options, "offload-tier"), "nvme:/a");
  EXPECT_EQ(option_text(options, "bucket"), "auto");
}

TEST(ShardingOptions, AMistypedNameIsAnsweredWithTheNearest) {
  EXPECT_EQ(refusal("offlaod", "none"), "there is no option offlaod; did you mean offload?");
  EXPECT_EQ(refusal("micro_steps", "2"), "there is no option micro_steps; did you mean micro-steps?");
  EXPECT_NE(refusal("temperature", "2").find("; use stage, dtype, "), std::string::npos);
}

TEST(ShardingOptions, ChecksMembersThatWereSetWithoutText) {
  const auto message = [](const ShardingOptions& options) {
    return check_sharding_options(options).message();
  };
  EXPECT_EQ(message({.stage = 7}), "stage is 7; use 0, 1, 2 or 3");
  EXPECT_EQ(message({.forwards_ahead = -1}), "forwards-ahead is -1; use 0 or more");
  EXPECT_EQ(message({.group = 0}).find("order is group:0;"), 0u);
  EXPECT_EQ(message({.bucket_bytes = 0}).find("bucket is 0;"), 0u);
  EXPECT_EQ(message({.offload_fraction = std::nan("")}).find("offload-fraction is nan;"), 0u);
  EXPECT_EQ(message({.stage = 2, .accumulate = Accumulate::kLocal}).find("accumulate local"), 0u);
  EXPECT_EQ(message({.master_weights = false}).find("master-weights is off, and dtype is fp32;"), 0u);
  EXPECT_EQ(message({.dtype = DataType::kBfloat16, .master_weights = false}), "");
  EXPECT_EQ(message({.ema = 1.0}), "ema is 1; use 0, or a decay below 1, such as 0.999");
  EXPECT_EQ(message({.stage = 2, .offload = Offload::kOptimizerAndParameters}).find("offload optimizer"), 0u);
}

TEST(ShardingOptions, LinesOfAgreementLeaveOutWhatMayDiffer) {
  ShardingOptions a = options_of({{"bucket", "1MiB"}, {"offload-tier", "nvme:/a"}, {"memory", "1GiB"}});
  ShardingOptions b = options_of({{"bucket", "2MiB"}, {"offload-tier", "nvme:/b"}, {"memory", "2GiB"}});
  EXPECT_EQ(option_lines(a, &OptionRow::agreed), option_lines(b, &OptionRow::agreed));
  EXPECT_EQ(option_lines(a, &OptionRow::agreed),
            "stage 0\ndtype fp32\nmicro-steps 1\naccumulate shard\naverage ranks+micro-steps\n"
            "order-of-units strict\nunits-at-once 1\norder rank\nshard-within all\nbucket given\n"
            "overlap on\noptimizer adamw\nmuon-rate original\nmoments fp32\nmaster-weights on\nema "
            "0\nsave-async off\noffload "
            "none\noffload-tier nvme\noffload-fraction "
            "given\n");
  EXPECT_EQ(option_lines(a, &OptionRow::in_fingerprint),
            "stage 0\ndtype fp32\nmicro-steps 1\nforwards-ahead 0\naccumulate shard\norder rank\n"
            "shard-within all\noptimizer adamw\nmoments fp32\nmaster-weights on\nema 0\noffload "
            "none\noffload-tier nvme\n");
  b.bucket_auto = true;
  EXPECT_NE(option_lines(a, &OptionRow::agreed), option_lines(b, &OptionRow::agreed));
}

TEST(ShardingOptions, ReportsKeepTheirKeysAndTypes) {
  const ShardingOptions options =
      options_of({{"order", "group:2"}, {"shard-within", "group"}, {"offload-tier", "nvme:/a"}});
  std::string json;
  for (const OptionRow& row : sharding_option_table()) {
    if (row.report_key != nullptr)
      json += std::string(row.report_key) + ": " + option_json(options, row) + "\n";
  }
  EXPECT_EQ(json,
            "stage: 0\ndtype: \"fp32\"\nmicro_steps: 1\naccumulate: \"shard\"\ngroup: 2\n"
            "shard_within_group: true\nbucket_bytes: 16777216\noffload: \"none\"\noffload_tier: \"nvme\"\n"
            "offload_fraction: 1.0\noffload_staging_bytes: 100663296\n");
}

// Programs by letter: forebay plan, forebay-gpt, bench-tiers; m: a size of memory, s: a switch.
TEST(ShardingOptions, EachProgramHasItsOptions) {
  std::string text;
  for (const OptionRow& row : sharding_option_table()) {
    text += std::string(row.name) + ' ';
    if ((row.programs & kPlanProgram) != 0) text += 'p';
    if ((row.programs & kGptProgram) != 0) text += 'g';
    if ((row.programs & kBenchTiersProgram) != 0) text += 'b';
    if (row.is_memory) text += 'm';
    if (is_switch(row)) text += 's';
    text += ' ' + option_values(row) + '\n';
  }
  EXPECT_EQ(text,
            "stage pgb 0|1|2|3\n"
            "dtype pgb fp32|bf16|fp16\n"
            "micro-steps pgb N\n"
            "forwards-ahead  N\n"
            "accumulate pg shard|local\n"
            "average  ranks+micro-steps|ranks\n"
            "order-of-units  strict|recorded[:ORDER]\n"
            "units-at-once  N\n"
            "order pg rank|group:G\n"
            "shard-within pg all|group\n"
            "bucket pg BYTES|auto\n"
            "overlap gs off|on\n"
            "memory pgbm BYTES\n"
            "device-room pgm BYTES\n"
            "spillable s off|on\n"
            "optimizer pg adamw|adam|sgd|lion|adafactor|muon\n"
            "muon-rate pg original|match-rms-adamw\n"
            "moments pg fp32|bf16|block8\n"
            "master-weights pgs off|on\n"
            "ema pg 0..1\n"
            "save-async pgs off|on\n"
            "offload pg none|optimizer|optimizer+parameters\n"
            "offload-tier pg cpu|nvme:DIR[,DIR...]\n"
            "offload-fraction pg 0..1|auto\n"
            "offload-staging pgm BYTES\n");
}

// The last value that is accepted and the first that is not.
TEST(ShardingOptions, LimitsAreExact) {
  const auto message = [](const char* name, const char* value) {
    ShardingOptions options;
    const Status set = set_option(options, name, value);
    return set.ok() ? check_sharding_options(options).message() : set.message();
  };
  EXPECT_EQ(message("micro-steps", "1000000"), "");
  EXPECT_EQ(message("micro-steps", "1000001"), "micro-steps is 1000001; use 1 to 1000000");
  EXPECT_EQ(message("micro-steps", "99999999999"), "micro-steps is 99999999999; use 1 to 1000000");
  EXPECT_EQ(message("units-at-once", "0"), "units-at-once is 0; use 1 to 1000");
  EXPECT_EQ(message("units-at-once", "1001"), "units-at-once is 1001; use 1 to 1000");
  EXPECT_EQ(message("order", "group:1000000"), "");
  EXPECT_EQ(message("order", "group:1000001"),
            "order is group:1000001; use rank, or group:G with the number of consecutive ranks that are "
            "added first, 1 "
            "or more");
  EXPECT_EQ(message("offload-staging", "8MiB"), "");
  EXPECT_EQ(message("offload-staging", "8388607"), "offload-staging is 8388607; use at least 8 MiB");
  EXPECT_EQ(message("bucket", "1"), "");
  EXPECT_EQ(message("bucket", "0"), "bucket is 0; use 1 byte or more (16MiB is usual), or auto");
  EXPECT_EQ(message("ema", "0.9999999"), "");
  // In fp32, in which it is applied, this is one.
  EXPECT_EQ(message("ema", "0.99999999"), "ema is 0.99999999; use 0, or a decay below 1, such as 0.999");
  EXPECT_EQ(message("ema", "-0.1"), "ema is -0.1; use 0, or a decay below 1, such as 0.999");
  EXPECT_EQ(message("forwards-ahead", "-1"), "forwards-ahead is -1; use 0 or more");
}

TEST(ShardingOptions, SizesHaveTheLargestUnitThatDividesThem) {
  for (const auto& [bytes, text] : {std::pair<std::uint64_t, const char*>{1023, "1023"},
                                    {1024, "1KiB"},
                                    {1025, "1025"},
                                    {std::uint64_t{3} << 40, "3TiB"},
                                    {std::uint64_t{1} << 50, "1024TiB"}}) {
    ShardingOptions options;
    options.memory_bytes = bytes;
    EXPECT_EQ(option_text(options, "memory"), text);
  }
}

TEST(ShardingOptions, CombinationsThatCannotBeAreRefusedWithBothNames) {
  const auto message = [](const ShardingOptions& options) {
    return check_sharding_options(options).message();
  };
  EXPECT_EQ(
      message({.stage = 2, .accumulate = Accumulate::kLocal}),
      "accumulate local needs the whole gradient on each rank, which stage 2 does not keep; use accumulate "
      "shard, or stage 0 or 1");
  EXPECT_EQ(message({.stage = 1, .accumulate = Accumulate::kLocal}), "");
  EXPECT_EQ(message({.stage = 2, .offload = Offload::kOptimizerAndParameters}),
            "offload optimizer+parameters moves the parameter shard off the device, and stage 2 keeps "
            "parameters whole; "
            "use stage 3, or offload optimizer");
  EXPECT_EQ(message({.stage = 3, .offload = Offload::kOptimizerAndParameters}), "");
  EXPECT_EQ(
      message({.dtype = DataType::kFloat16, .master_weights = false}),
      "master-weights is off, and dtype is fp16; only bf16 parameters can be their own masters, so use dtype "
      "bf16, or master-weights on");
  EXPECT_EQ(message({.recorded_order = "0/0//"}),
            "order-of-units is strict with a recorded order; use recorded");
  ShardingOptions recorded;
  recorded.order_of_units = OrderOfUnits::kRecorded;
  EXPECT_EQ(message(recorded), "");
  recorded.forwards_ahead = 1;
  EXPECT_EQ(
      message(recorded),
      "forwards-ahead is 1, and recorded order has no passes ahead of others; use order-of-units strict");
  ShardingOptions muon;
  muon.optimizer = Optimizer::kMuon;
  EXPECT_EQ(message(muon), "");
  ShardingOptions other = muon;
  other.moments = MomentFormat::kBfloat16;
  EXPECT_EQ(message(other),
            "moments is bf16, and optimizer muon keeps its momentum in fp32; use moments fp32");
  other = muon;
  other.group = 2;
  other.shard_within_group = true;
  EXPECT_EQ(
      message(other),
      "shard-within is group, and optimizer muon gathers its matrices from all ranks; use shard-within all");
  other = muon;
  other.offload_auto = true;
  EXPECT_EQ(
      message(other),
      "offload-fraction is auto, which measures updates of single elements, and optimizer is muon; give a "
      "fraction");
}

TEST(NearestName, FindsWhatWasMeantAndNothingElse) {
  const std::string names[] = {"plan", "replay", "report", "run"};
  EXPECT_EQ(nearest_name("plna", names), "plan");
  EXPECT_EQ(nearest_name("reprot", names), "report");
  EXPECT_EQ(nearest_name("rn", names), "run");
  EXPECT_EQ(nearest_name("nonsense", names), "");
  EXPECT_EQ(nearest_name("", names), "");
}

}  // namespace
}  // namespace forebay
