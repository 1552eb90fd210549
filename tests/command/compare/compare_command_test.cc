// `forebay compare` as a person runs it: the choices on the command line are those of the settings, and each
// bad word is named.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace forebay::testing {
namespace {

class CompareCommand : public ::testing::Test {
 protected:
  using Words = std::vector<std::string>;

  static Finished compare(const Words& more) {
    Words words = {FOREBAY_COMMAND, "compare",  "--layers",   "4",   "--hidden",      "256",
                   "--heads",       "4",        "--sequence", "128", "--vocabulary",  "512",
                   "--cluster",     "dgx-h100", "--ranks",    "4",   "--micro-batch", "1"};
    words.insert(words.end(), more.begin(), more.end());
    return run_program(words);
  }
  static nlohmann::json settings(const Words& more) {
    Words words = more;
    words.push_back("--json");
    const Finished run = compare(words);
    EXPECT_EQ(run.exit_code, 0) << run.output;
    return run.exit_code == 0 ? nlohmann::json::parse(run.output) : nlohmann::json{{"settings", {}}};
  }
  // The different values of a key over all settings.
  static std::set<std::string> values(const nlohmann::json& json, const char* key) {
    std::set<std::string> found;
    for (const nlohmann::json& setting : json.at("settings")) {
      const nlohmann::json& value = setting.at(key);
      found.insert(value.is_string() ? value.get<std::string>() : value.dump());
    }
    return found;
  }
  using Values = std::set<std::string>;

  TemporaryDirectory directory_;
};

TEST_F(CompareCommand, TriesTheGivenChoicesAndNoOthers) {
  const nlohmann::json json =
      settings({"--limit", "1", "--stage", "1,2", "--tensor-parallel", "2", "--pipeline-parallel", "1,2",
                "--recompute", "none,every:2", "--activations", "keep,partition,partition+cpu"});

  EXPECT_EQ(values(json, "stage"), (Values{"1", "2"}));
  EXPECT_EQ(values(json, "tensor_parallel"), Values{"2"});
  EXPECT_EQ(values(json, "pipeline_parallel"), (Values{"1", "2"}));
  EXPECT_EQ(values(json, "recompute"), (Values{"none", "every:2"}));
  EXPECT_EQ(values(json, "activations"), (Values{"keep", "partition", "partition+cpu"}));
}

TEST_F(CompareCommand, TheMemoryOfADeviceDecidesWhatFits) {
  const Words one = {"--stage", "3", "--tensor-parallel", "1", "--recompute", "block"};
  const auto with = [&](const Words& more) {
    Words words = one;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const nlohmann::json roomy = settings(with({"--memory", "8GiB"}));
  EXPECT_TRUE(roomy.at("nearest_misses").empty());
  ASSERT_FALSE(roomy.at("settings").empty());
  for (const nlohmann::json& setting : roomy.at("settings")) EXPECT_EQ(setting.at("missing_bytes"), 0);

  // The engine keeps 384 MiB of it free.
  const Finished full = compare(with({"--memory", "388MiB", "--json"}));

  EXPECT_EQ(full.exit_code, 1) << full.output;
  const nlohmann::json none = nlohmann::json::parse(full.output);
  EXPECT_TRUE(none.at("best").empty());
  EXPECT_EQ(none.at("nearest_misses").size(), none.at("settings").size());
  for (const nlohmann::json& setting : none.at("settings")) {
    const auto bytes = [&](const char* key) { return setting.at(key).get<std::uint64_t>(); };
    EXPECT_EQ(bytes("missing_bytes"), bytes("device_bytes") - (4u << 20)) << setting;
  }
}

TEST_F(CompareCommand, TheTypeIsThatOfParametersAndGradients) {
  const auto device_bytes = [](const char* type) {
    return settings({"--stage", "0", "--tensor-parallel", "1", "--recompute", "none", "--dtype", type})
        .at("settings")
        .at(0)
        .at("device_bytes")
        .get<std::uint64_t>();
  };
  EXPECT_NE(device_bytes("fp32"), device_bytes("bf16"));
}

TEST_F(CompareCommand, TheNumberOfThreadsChangesNothing) {
  const Words words = {"--stage", "0,3", "--recompute", "block"};
  Words two = words;
  two.insert(two.end(), {"--threads", "2"});
  Words one = words;
  one.insert(one.end(), {"--threads", "1"});
  EXPECT_EQ(settings(one), settings(two));
}

// The first of the best settings has the least of the objective.
TEST_F(CompareCommand, OrdersSettingsByTheObjective) {
  const auto least = [](const Words& objective, const char* key) {
    Words words = {"--stage", "0,1,2,3", "--tensor-parallel", "1,2"};
    words.insert(words.end(), objective.begin(), objective.end());
    const nlohmann::json json = settings(words);
    double first = 0, last = 0;
    const nlohmann::json& best = json.at("best");
    EXPECT_GT(best.size(), 1u);
    for (std::size_t i = 0; i < best.size(); ++i) {
      const double value = json.at("settings").at(best[i].get<std::size_t>()).at(key).get<double>();
      if (i == 0) first = value;
      EXPECT_GE(value, last) << key << " at place " << i;
      last = value;
    }
    EXPECT_LT(first, last) << "all settings are the same";
  };
  least({"--objective", "memory"}, "device_bytes");
  least({"--objective", "time"}, "step_seconds");
  least({"--objective", "cost", "--price", "2.5"}, "price_per_million_tokens");
}

TEST_F(CompareCommand, PrintsThePriceOfTokens) {
  const Finished run = compare({"--stage", "0", "--recompute", "none", "--tensor-parallel", "1",
                                "--objective", "cost", "--price", "2.5"});
  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(run.output.find("price of 1M tokens 0."), std::string::npos) << run.output;
  const nlohmann::json one =
      settings({"--stage", "0", "--recompute", "none", "--tensor-parallel", "1", "--price", "2.5"});
  for (const nlohmann::json& setting : one.at("settings")) {
    const double tokens = setting.at("tokens_per_second");
    EXPECT_DOUBLE_EQ(setting.at("price_per_million_tokens").get<double>(), 2.5 * 4 / 3600 / tokens * 1e6);
  }
}

TEST_F(CompareCommand, WritesAPageWithAPointForEachSetting) {
  const std::string page = directory_ / "page.html";
  const nlohmann::json json = settings({"--stage", "0,3", "--recompute", "none,block", "--html", page});

  std::ifstream file(page);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(text.rfind("<!doctype html>", 0), 0u);
  std::size_t points = 0;
  for (std::size_t at = 0; (at = text.find("<title>stage ", at)) != std::string::npos; ++at) ++points;
  EXPECT_EQ(points, json.at("best").size());
  EXPECT_GT(points, 0u);
}

TEST_F(CompareCommand, NamesTheWordThatItCannotUse) {
  struct Case {
    Words words;
    const char* message;
  };
  const Case cases[] = {
      {{"--activations", "keep,drop"},
       "--activations is 'drop'; use keep, partition, partition+cpu or partition+nvme"},
      {{"--activations", "auto"},
       "--activations is 'auto'; use keep, partition, partition+cpu or partition+nvme"},
      {{"--recompute", "none,every:0"}, "--recompute is 'every:0'; use none, block, or every:K"},
      {{"--pipeline-parallel", "1,5"}, "--pipeline-parallel is 5; use 1 to the model's 4 layers"},
      {{"--pipeline-parallel", "0"}, "--pipeline-parallel is 0; use 1 to the model's 4 layers"},
      {{"--tensor-parallel", "0"}, "--tensor-parallel is 0; use 1 or more"},
      {{"--stage", "1,4"}, "--stage is 4; use 0 to 3"},
      {{"--dtype", "fp12"}, "--dtype is 'fp12'"},
      {{"--memory", "much"}, "--memory is 'much'"},
      {{"--threads", "1025"}, "--threads is 1025"},
      {{"--global-batch", "-1"}, "--global-batch is -1"},
      {{"--objective", "joy"}, "--objective is 'joy'; use time, memory or cost"},
      {{"--objective", "cost"}, "--objective cost needs the price of a device for an hour; add --price"},
      {{"--objective", "cost", "--price", "-1"}, "--price is -1; use a number above 0, at most 1e+09"},
      {{"--price", "0"}, "--price is 0; use a number above 0, at most 1e+09"},
      {{"--global-batch", "0"}, "--global-batch is 0; use 1 to "},
      {{"--limit", "0"}, "--limit is 0; use 1 to "},
      {{"--threads", "0"}, "--threads is 0; use 1 to 1024"},
      {{"--stage", ""}, "--stage is empty; give a value, or leave it out"},
      {{"--csv", ""}, "--csv is empty; give a value, or leave it out"},
  };
  for (const Case& bad : cases) {
    const Finished run = compare(bad.words);
    EXPECT_EQ(run.exit_code, 2) << bad.message << "\n" << run.output;
    EXPECT_EQ(run.output.rfind(std::string("forebay compare: ") + bad.message, 0), 0u) << bad.message << "\n"
                                                                                       << run.output;
  }
}

}  // namespace
}  // namespace forebay::testing
