// The options that must not change results: forebay-gpt gives the same digest, losses and gradient norms for
// every ZeRO stage, bucket size, overlap and communicator, sharded over all ranks or within all-reduce
// groups. This is compared for each number of ranks, type, order of sums and way of accumulating.
//
// `./dev test` runs a pairwise cover of the options: every two values of any two options meet in some run.
// The label slow runs every combination.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/support/process.h"
#include "trainer/training.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;

// The values of each option, by index.
constexpr int kRanks[] = {1, 3, 4};
constexpr const char* kTypes[] = {"fp32", "bf16", "fp16"};
constexpr int kMicroSteps[] = {1, 3};
constexpr int kStages[] = {0, 1, 2, 3};
// The smallest bucket, less than a unit; one that divides nothing; and one larger than the model.
constexpr const char* kBuckets[] = {"1", "70001", "64MiB"};
constexpr const char* kCommunicators[] = {"local", "gloo", "shm"};
// Rank order; all-reduce groups; and sharding within them.
enum Order { kInRankOrder, kInGroups, kWithinGroups };
constexpr const char* kGroups[] = {"group:1", "group:3", "group:2"};  // By index of the number of ranks.

enum Option { kRank, kType, kMicro, kStage, kBucket, kOverlap, kCommunicator, kOrder, kOptionCount };
constexpr int kValueCounts[kOptionCount] = {3, 3, 2, 4, 3, 2, 3, 3};
using Case = std::array<int, kOptionCount>;

std::vector<Case> all_cases() {
  std::vector<Case> cases{Case{}};
  for (int option = 0; option < kOptionCount; ++option) {
    std::vector<Case> longer;
    for (const Case& c : cases) {
      for (int value = 0; value < kValueCounts[option]; ++value) {
        longer.push_back(c);
        longer.back()[static_cast<std::size_t>(option)] = value;
      }
    }
    cases = longer;
  }
  return cases;
}

// Greedy: takes the case with the most new pairs until all pairs are covered.
std::vector<Case> pairwise_cases() {
  using Pair = std::array<int, 4>;  // option, value, option, value
  const auto pairs_of = [](const Case& c) {
    std::vector<Pair> pairs;
    for (int a = 0; a < kOptionCount; ++a) {
      for (int b = a + 1; b < kOptionCount; ++b)
        pairs.push_back({a, c[static_cast<std::size_t>(a)], b, c[static_cast<std::size_t>(b)]});
    }
    return pairs;
  };
  const std::vector<Case> all = all_cases();
  std::set<Pair> open;
  for (const Case& c : all) {
    for (const Pair& pair : pairs_of(c)) open.insert(pair);
  }
  std::vector<Case> chosen;
  while (!open.empty()) {
    const Case* best = nullptr;
    std::size_t best_count = 0;
    for (const Case& c : all) {
      std::size_t count = 0;
      for (const Pair& pair : pairs_of(c)) count += open.count(pair);
      if (count > best_count) {
        best = &c;
        best_count = count;
      }
    }
    chosen.push_back(*best);
    for (const Pair& pair : pairs_of(*best)) open.erase(pair);
  }
  return chosen;
}

std::vector<std::string> arguments_of(const Case& c) {
  std::vector<std::string> arguments = {"--ranks",        std::to_string(kRanks[c[kRank]]),
                                        "--dtype",        kTypes[c[kType]],
                                        "--micro-steps",  std::to_string(kMicroSteps[c[kMicro]]),
                                        "--stage",        std::to_string(kStages[c[kStage]]),
                                        "--bucket",       kBuckets[c[kBucket]],
                                        "--communicator", kCommunicators[c[kCommunicator]],
                                        "--layers",       "2",
                                        "--hidden",       "48",
                                        "--heads",        "3",
                                        "--sequence",     "24",
                                        "--batch",        "2",
                                        "--steps",        "4",
                                        "--lr",           "0.01",
                                        "--clip",         "0.5",
                                        "--threads",      "1",
                                        "--quiet"};
  if (c[kOverlap] == 1) arguments.push_back("--no-overlap");
  if (c[kOrder] != kInRankOrder) arguments.insert(arguments.end(), {"--order", kGroups[c[kRank]]});
  if (c[kOrder] == kWithinGroups) arguments.insert(arguments.end(), {"--shard-within", "group"});
  return arguments;
}

std::string name_of(const Case& c) {
  std::string name;
  for (const std::string& word : arguments_of(c)) name += word + " ";
  return name;
}

Json run_case(const Case& c, const TemporaryDirectory& directory) {
  if (c[kCommunicator] == 0) {
    const gpt::ParsedCommand parsed = gpt::parse_command(arguments_of(c));
    return Json::parse(gpt::report_json(gpt::run_training(gpt::resolve_options(*parsed.options))));
  }
  const std::string report = directory / "report.json";
  std::vector<std::string> command{FOREBAY_GPT};
  for (const std::string& word : arguments_of(c)) command.push_back(word);
  command.insert(command.end(), {"--report", report});
  const Finished finished = run_program(command);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  std::ifstream file(report);
  return Json::parse(file);
}

Json bits_of(const Json& report) {
  return {
      {"digest", report.at("digest")}, {"loss", report.at("loss")}, {"grad_norm", report.at("grad_norm")}};
}

bool usable(const Case& c) {
  return kCommunicators[c[kCommunicator]] != std::string("gloo") || FOREBAY_TEST_GLOO;
}

void expect_one_bit_pattern(std::vector<Case> cases) {
  if (!FOREBAY_TEST_GLOO) std::cerr << "built without Gloo: the cases over it are left out\n";
  std::erase_if(cases, [](const Case& c) { return !usable(c); });
  const TemporaryDirectory directory;
  // Stage 0 over `local`, by ranks, type, micro-steps and use of all-reduce groups.
  std::map<std::array<int, 4>, Json> expected;
  for (const Case& c : cases) {
    const std::array<int, 4> group{c[kRank], c[kType], c[kMicro], std::min<int>(c[kOrder], kInGroups)};
    if (!expected.contains(group)) {
      Case reference{};
      std::copy_n(group.begin(), 3, reference.begin());
      reference[kOrder] = group[3];
      reference[kBucket] = 2;
      expected[group] = bits_of(run_case(reference, directory));
      const Json& norms = expected[group].at("grad_norm");
      EXPECT_TRUE(std::all_of(norms.begin(), norms.end(),
                              [](const Json& norm) { return norm.is_null() || norm > 0.5; }))
          << "clipping was not active in " << name_of(reference) << ": " << norms;
    }
    const Json report = run_case(c, directory);
    EXPECT_EQ(bits_of(report), expected[group]) << name_of(c);
    for (const Json& rank : report.at("ranks")) {
      EXPECT_EQ(rank.at("peak_bytes"), rank.at("planned_bytes")) << name_of(c);
      EXPECT_EQ(rank.at("reserved_bytes"), rank.at("planned_reserved_bytes")) << name_of(c);
      // A step that overflowed changes no parameters, so stages 1 and 2 gather none after it.
      const Json& norms = report.at("grad_norm");
      const bool skipped =
          std::any_of(norms.begin(), norms.end(), [](const Json& norm) { return norm.is_null(); });
      for (const std::string direction : {"sent", "received"}) {
        const double measured = rank.at(direction + "_bytes_per_step");
        const double planned = rank.at("planned_" + direction + "_bytes_per_step");
        EXPECT_LE(measured, planned) << name_of(c);
        if (!skipped) {
          EXPECT_EQ(measured, planned) << name_of(c);
        }
      }
    }
  }
}

TEST(OneBitPattern, HoldsOverAPairwiseCoverOfTheOptions) {
  const std::vector<Case> cases = pairwise_cases();
  ASSERT_GE(cases.size(), 12u);  // No cover is smaller: 4 stages x 3 values of another option.
  expect_one_bit_pattern(cases);
}

TEST(SlowOneBitPattern, HoldsOverTheWholeMatrix) {
  expect_one_bit_pattern(all_cases());
}

}  // namespace
}  // namespace forebay::testing
