// `forebay simulate` runs the engine itself, so its memory and payload are those of a run of forebay-gpt, to
// the byte.

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/end_to_end/small_run.h"
#include "tests/support/process.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;

// Sizes that divide little.
const Words kShape = {"--layers", "5", "--hidden", "36",   "--heads",       "6", "--sequence", "14",
                      "--batch",  "3", "--dtype",  "bf16", "--micro-steps", "2", "--bucket",   "40KiB"};
const Words kRun = {"--threads",      "1",     "--steps",  "2",    "--matmul", "plain",
                    "--communicator", "local", "--device", "host", "--quiet"};

Json simulation_of(const Words& words) {
  const Finished finished = run_program(Words{FOREBAY_COMMAND, "simulate", "--json", "--no-changes"} + words);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  return Json::parse(finished.output);
}

// The pools that a simulated step plans are those that a run measured.
void expect_same_pools(const Json& memory, const gpt::RankReport& run) {
  EXPECT_EQ(memory.at("parameters"), run.peak_bytes.parameters);
  EXPECT_EQ(memory.at("gradients"), run.peak_bytes.gradients);
  EXPECT_EQ(memory.at("optimizer"), run.peak_bytes.optimizer);
  EXPECT_EQ(memory.at("gathered"), run.peak_bytes.gathered);
  EXPECT_EQ(memory.at("buckets"), run.peak_bytes.buckets);
}

void expect_same(const Words& words, const Words& of_run = {}) {
  const gpt::RankReport run = train(kShape + kRun + words + of_run).ranks.at(0);
  const Json simulated =
      simulation_of(kShape + words + Words{"--activation-bytes", std::to_string(run.peak_bytes.activations)});
  const Json& memory = simulated.at("memory");
  expect_same_pools(memory, run);
  EXPECT_EQ(memory.at("activations"), run.peak_bytes.activations);
  EXPECT_EQ(memory.at("host"), run.host_bytes);
  EXPECT_EQ(memory.at("files"), run.file_bytes);
  EXPECT_EQ(simulated.at("sent_bytes_per_step").get<double>(), run.sent_bytes_per_step);
}

TEST(SimulatedTraining, HoldsAndSendsTheBytesOfARun) {
  for (const std::string ranks : {"1", "3"}) {
    for (const std::string stage : {"0", "1", "2", "3"}) {
      SCOPED_TRACE(ranks + " ranks, stage " + stage);
      expect_same({"--ranks", ranks, "--stage", stage});
    }
  }
}

TEST(SimulatedTraining, HoldsTheBytesOfAnOffloadedRun) {
  for (const std::string stage : {"0", "1", "2", "3"}) {
    for (const std::string fraction : {"0.5", "1"}) {
      SCOPED_TRACE("stage " + stage + ", fraction " + fraction);
      expect_same(
          {"--ranks", "2", "--stage", stage, "--offload", "optimizer", "--offload-fraction", fraction});
    }
  }
  SCOPED_TRACE("parameters too");
  expect_same({"--ranks", "2", "--stage", "3", "--offload", "optimizer+parameters"});
}

TEST(SimulatedTraining, HoldsTheBytesOfARunOverFiles) {
  const TemporaryDirectory directory;
  const std::string tier = "nvme:" + directory.path();
  for (const std::string offload : {"optimizer", "optimizer+parameters"}) {
    SCOPED_TRACE(offload);
    expect_same({"--ranks", "2", "--stage", "3", "--offload", offload, "--offload-tier", tier});
  }
}

TEST(SimulatedTraining, HoldsAndSendsTheBytesOfARunInGroups) {
  SCOPED_TRACE("groups");
  expect_same({"--ranks", "4", "--stage", "2", "--order", "group:2"});
  SCOPED_TRACE("sharded within a group");
  expect_same({"--ranks", "4", "--stage", "3", "--order", "group:2", "--shard-within", "group"});
}

TEST(SimulatedTraining, HoldsTheBytesOfPipelineStages) {
  for (const std::string stage : {"0", "2", "3"}) {
    for (const std::string stages : {"2", "5"}) {
      SCOPED_TRACE("ZeRO stage " + stage + ", pipeline stages " + stages);
      const Words words = {
          "--ranks", std::to_string(2 * std::stoi(stages)), "--stage", stage, "--pipeline-parallel", stages};
      const auto run = train(kShape + kRun + words);
      const Json simulated = simulation_of(kShape + words + Words{"--activation-bytes", "1MiB"});
      const gpt::RankReport& rank = run.ranks.at(2 * simulated.at("pipeline_stage").get<std::size_t>());
      const Json& memory = simulated.at("memory");
      expect_same_pools(memory, rank);
      // The decision has 8 bytes for each unit of the largest pipeline stage; a simulated one knows its own.
      EXPECT_NEAR(simulated.at("sent_bytes_per_step").get<double>(), rank.sent_bytes_per_step,
                  8 * 2 * (2 * std::stoi(stages) - 1));
    }
  }
}

TEST(SimulatedTraining, HoldsTheBytesOfSavedActivations) {
  Words shape = kShape;
  *std::find(shape.begin(), shape.end(), "bf16") = "fp32";  // forebay-gpt saves fp32 at any type.
  for (const std::string activations : {"keep", "partition", "partition+cpu"}) {
    SCOPED_TRACE(activations);
    const Words words = {"--ranks",     "4",     "--stage",       "1",        "--tensor-parallel", "2",
                         "--recompute", "block", "--activations", activations};
    const gpt::RankReport run = train(shape + kRun + words).ranks.at(0);
    const Json simulated = simulation_of(
        shape + words + Words{"--activation-bytes", std::to_string(run.peak_bytes.activations)});
    EXPECT_EQ(simulated.at("memory").at("activations"), run.peak_bytes.activations);
    EXPECT_EQ(simulated.at("memory").at("host"), run.host_bytes + run.saved_host_bytes);
  }
}

TEST(SimulatedTraining, HoldsTheBytesOfTensorParallelRanks) {
  expect_same({"--ranks", "4", "--stage", "2", "--tensor-parallel", "2"});
}

}  // namespace
}  // namespace forebay::testing
