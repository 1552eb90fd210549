#include "runtime/command/report/run_report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>

#include "forebay/error.h"

namespace forebay {
namespace {

RunReport example(int stage) {
  RunReport run;
  run.name = "stage-" + std::to_string(stage);
  run.world_size = 4;
  run.stage = stage;
  run.dtype = "bf16";
  run.parameters = 1'000'000;
  run.steps = 2;
  run.losses = {5.5, 5.25};
  run.grad_norms = {1.0, std::nullopt};
  run.digest = "0123456789abcdef0123456789abcdef";
  return run;
}

TEST(RunReport, FormulasAreThePapers) {
  EXPECT_EQ(model_state_formula_bytes(example(0)), 16e6);
  EXPECT_EQ(model_state_formula_bytes(example(1)), 4e6 + 3e6);
  EXPECT_EQ(model_state_formula_bytes(example(2)), 2e6 + 3.5e6);
  EXPECT_EQ(model_state_formula_bytes(example(3)), 4e6);
  EXPECT_EQ(wire_formula_bytes(example(2)), 2 * 2e6 * 3 / 4);
  EXPECT_EQ(wire_formula_bytes(example(3)), 3 * 2e6 * 3 / 4);
}

// Two tensor-parallel ranks by three data-parallel ones, each with half of the parameters.
TEST(RunReport, FormulasAreThoseOfARanksPart) {
  RunReport run = example(1);
  run.world_size = 6;
  run.tensor_parallel = 2;

  EXPECT_EQ(run.data_parallel(), 3);
  EXPECT_EQ(model_state_formula_bytes(run), 2e6 + 2e6);
  EXPECT_EQ(wire_formula_bytes(run), 2 * 1e6 * 2 / 3);

  run.part_parameters = 600'000;  // Some of which both ranks have.
  EXPECT_EQ(model_state_formula_bytes(run), 4 * 600e3 + 12 * 200e3);

  run.pipeline_parallel = 3;
  EXPECT_EQ(run.data_parallel(), 1);
  EXPECT_EQ(wire_formula_bytes(run), 0);
}

// As plan.h has it: 8 ranks in groups of 2.
TEST(RunReport, FormulasKnowGroups) {
  for (const bool hybrid : {false, true}) {
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE(std::to_string(stage) + (hybrid ? " hybrid" : ""));
      RunReport run = example(stage);
      run.world_size = 8;
      run.group = 2;
      run.shard_within_group = hybrid;
      // Without padding: the unit divides.
      ModelShape model;
      model.units.push_back({.name = "all", .parameters = {{.name = "all", .count = 1'024'000}}});
      run.parameters = 1'024'000;
      const Plan plan =
          make_plan(
              model,
              {{.stage = stage, .dtype = DataType::kBfloat16, .group = 2, .shard_within_group = hybrid}, 8})
              .value();
      EXPECT_EQ(model_state_formula_bytes(run), static_cast<double>(plan.bytes.model_states()));
      // The ranks tell each other a little besides; one unit is gathered once and not twice at stage 3.
      const double gathered_again = stage == 3 ? 2 * 1'024'000.0 * (hybrid ? 1.0 / 2 : 7.0 / 8) : 0;
      EXPECT_NEAR(wire_formula_bytes(run) - gathered_again, static_cast<double>(plan.wire_per_step.sent),
                  400);
    }
  }
}

TEST(RunReport, ShowsWhatTensorParallelRanksSendAndWhereActivationsAre) {
  RunReport run = example(1);
  run.tensor_parallel = 2;
  run.training = {{"layers", "4"}, {"batch", "2"}, {"sequence", "10"}, {"hidden", "50"}};
  run.recompute = "every:3";
  run.activations = "partition+cpu";
  run.micro_steps = 3;
  // 4 sums a block, 1 for each of two recomputed ones, 2 at the ends; each sends all of [2, 10, 50] floats.
  EXPECT_EQ(tensor_formula_bytes(run), 3 * (4 * 4 + 2 + 2) * 4000.0);
  run.tensor_sent_bytes_per_step = 3 * 20 * 4000;
  run.saved_device = {111'000, 112'000};
  run.saved_host = {222'000, 223'000};
  run.saved_sent_per_step = {24'000, 24'000};
  std::ostringstream table;
  std::ostringstream json;

  print_report_table(table, {run, example(0)});
  print_report_json(json, {run});

  for (const char* const part : {"240,000 / 240,000 = 1.0000", "every:3", "partition+cpu",
                                 "111,000 / 112,000", "222,000 / 223,000", "24,000 / 24,000", "10.00%"})
    EXPECT_NE(table.str().find(part), std::string::npos) << part << " is not in\n" << table.str();
  const auto read = nlohmann::json::parse(json.str()).at("runs").at(0);
  EXPECT_EQ(read.at("tensor_bytes_per_step").at("theory"), 240'000);
  EXPECT_EQ(read.at("saved_bytes").at("host").at("planned"), 223'000);
  run.recompute = "none";
  EXPECT_EQ(tensor_formula_bytes(run), 3 * (4 * 4 + 2) * 4000.0);
  run.recompute = "block";
  EXPECT_EQ(tensor_formula_bytes(run), 3 * (4 * 4 + 4 + 2) * 4000.0);
  run.pipeline_parallel = 2;
  EXPECT_EQ(tensor_formula_bytes(run), std::nullopt);
}

TEST(RunReport, AccumulatorOfSeveralMicroStepsIsCounted) {
  RunReport whole = example(1);
  RunReport sharded = example(2);
  whole.micro_steps = sharded.micro_steps = 3;

  EXPECT_EQ(model_state_formula_bytes(whole), 4e6 + 3e6 + 1e6);
  EXPECT_EQ(model_state_formula_bytes(sharded), 2e6 + 1e6 + 3e6);
  EXPECT_EQ(wire_formula_bytes(whole), 4 * 2e6 * 3 / 4);
}

TEST(RunReport, OffloadedOptimizerStandsBesideTheDevice) {
  RunReport whole = example(1);
  RunReport sharded = example(2);
  whole.offload = sharded.offload = "optimizer";
  whole.offloaded_parameters = sharded.offloaded_parameters = 1'000'000;
  sharded.host = {3'501'000, 3'500'000};
  EXPECT_EQ(model_state_formula_bytes(whole), 4e6);
  EXPECT_EQ(model_state_formula_bytes(sharded), 2e6) << "gradients leave as they are reduced";
  sharded.micro_steps = 2;
  EXPECT_EQ(model_state_formula_bytes(sharded), 2e6) << "and add up there over micro-steps";

  std::ostringstream with, without;
  print_report_table(with, {example(2), sharded});
  EXPECT_NE(with.str().find("host measured"), std::string::npos) << with.str();
  EXPECT_NE(with.str().find("3,501,000"), std::string::npos) << with.str();
  print_report_table(without, {example(2)});
  EXPECT_EQ(without.str().find("host"), std::string::npos) << without.str();
}

TEST(RunReport, APartThatIsOffloadedLeavesTheRestOnTheDevice) {
  RunReport run = example(3);
  run.offload = "optimizer+parameters";
  run.offloaded_parameters = 750'000;
  EXPECT_EQ(model_state_formula_bytes(run), 16 * 250'000 / 4);
  run.micro_steps = 2;
  EXPECT_EQ(model_state_formula_bytes(run), 18 * 250'000 / 4);
  run = example(1);
  run.offload = "optimizer";
  run.offloaded_parameters = 750'000;
  EXPECT_EQ(model_state_formula_bytes(run), 4e6 + 12 * 250'000 / 4);
}

TEST(RunReport, FilesStandBesideWhatWasPlannedForThem) {
  RunReport run = example(3);
  run.offload = "optimizer+parameters";
  run.tier = "nvme";
  run.offloaded_parameters = 750'000;
  run.store = "io_uring, in /drive";
  run.file = {3'000'001, 3'000'000};
  run.file_read_per_step = {4'000'001, 4'000'000};
  run.file_written_per_step = {5'000'001, 5'000'000};

  std::ostringstream with, without, json;
  print_report_table(with, {example(2), run});
  print_report_table(without, {example(2)});
  print_report_json(json, {run});

  for (const char* words :
       {"optimizer+parameters, 75% on nvme", "files measured", "3,000,001", "4,000,001", "5,000,001",
        "5,000,000", "store of 'stage-3': io_uring, in /drive", "Digests are equal"}) {
    EXPECT_NE(with.str().find(words), std::string::npos) << words << "\n" << with.str();
  }
  EXPECT_EQ(without.str().find("files"), std::string::npos) << without.str();
  const auto read = nlohmann::json::parse(json.str()).at("runs").at(0);
  EXPECT_EQ(read.at("offload_tier"), "nvme");
  EXPECT_EQ(read.at("file_bytes_read_per_step").at("measured"), 4'000'001);
  EXPECT_EQ(read.at("file_bytes_written_per_step").at("planned"), 5'000'000);
}

TEST(RunReport, OneBitOfLossIsADifference) {
  RunReport other = example(3);
  other.losses[1] = std::nextafter(other.losses[1], 6.0);

  const RunComparison comparison = compare_runs({example(0), other});

  EXPECT_TRUE(comparison.comparable);
  EXPECT_NE(comparison.difference.find("loss differs first at step 2"), std::string::npos)
      << comparison.difference;
  EXPECT_TRUE(compare_runs({example(0), example(3)}).difference.empty());
}

TEST(RunReport, ResumedRunIsComparedWhereBothWere) {
  RunReport resumed = example(3);
  resumed.first_step = 1;
  resumed.losses = {5.25};
  resumed.grad_norms = {std::nullopt};
  EXPECT_EQ(compare_runs({example(0), resumed}).difference, "");

  resumed.losses = {5.5};
  EXPECT_NE(compare_runs({example(0), resumed}).difference.find("loss differs first at step 2"),
            std::string::npos);

  resumed.first_step = 2;  // It had nothing left to do.
  resumed.losses.clear();
  resumed.grad_norms.clear();
  EXPECT_EQ(compare_runs({resumed, example(0)}).difference, "");
}

TEST(RunReport, RunsOfDifferentSetupsAreNotCalledEqual) {
  RunReport other = example(0);
  other.world_size = 3;

  const RunComparison comparison = compare_runs({example(0), other});

  EXPECT_FALSE(comparison.comparable);
  EXPECT_NE(comparison.difference.find("world_size"), std::string::npos);
}

TEST(RunReport, OtherTrainingsAreNamedAndNotCalledDifferent) {
  RunReport one = example(0);
  RunReport other = example(0);
  one.training = {{"seed", "1"}, {"lr", "0.001"}, {"layers", "4"}};
  other.training = {{"seed", "2"}, {"lr", "0.01"}, {"layers", "4"}, {"unknown", "x"}};
  other.digest = "f" + other.digest.substr(1);
  std::ostringstream table;

  print_report_table(table, {one, other});

  EXPECT_NE(
      table.str().find("Not compared: not the same training (seed 1 / 2, lr 0.001 / 0.01) in 'stage-0'"),
      std::string::npos)
      << table.str();
  EXPECT_EQ(table.str().find("DIFFERENT"), std::string::npos);
  EXPECT_FALSE(compare_runs({one, other}).comparable);
  other.training = one.training;
  EXPECT_TRUE(compare_runs({one, other}).comparable);
  other.training.clear();  // An older report does not say.
  EXPECT_TRUE(compare_runs({one, other}).comparable);
}

TEST(RunReport, TableEndsWithTheVerdict) {
  RunReport other = example(3);
  other.digest = "f" + other.digest.substr(1);
  std::ostringstream equal;
  std::ostringstream different;

  print_report_table(equal, {example(0), example(3)});
  print_report_table(different, {example(0), other});

  EXPECT_NE(equal.str().find("\nDigests are equal"), std::string::npos);
  EXPECT_NE(different.str().find("\nDIFFERENT: digest"), std::string::npos);
}

TEST(RunReport, LossThatWasNotFiniteIsShownAndEqualToItself) {
  const std::string path = ::testing::TempDir() + "forebay-run-report-null-test.json";
  std::ofstream(path) << R"({"world_size": 2, "stage": 1, "dtype": "bf16", "parameters": 1000, "steps": 2,
    "micro_steps": 3, "accumulate": "local", "loss": [5.5, null], "grad_norm": [1.0, null], "digest": "00",
    "tokens_per_second": 1.0, "ranks": []})";
  std::ostringstream table;

  const RunReport run = read_run_report(path);
  print_report_table(table, {run, run});

  EXPECT_EQ(run.micro_steps, 3);
  EXPECT_EQ(run.accumulate, "local");
  EXPECT_TRUE(std::isnan(run.losses.at(1)));
  EXPECT_NE(table.str().find(" nan "), std::string::npos) << table.str();
  EXPECT_TRUE(compare_runs({run, run}).difference.empty()) << compare_runs({run, run}).difference;
  std::remove(path.c_str());
}

// The message about a report with that text, which cannot be read.
std::string complaint(const std::string& text) {
  const std::string path =
      ::testing::TempDir() + "forebay-run-report-complaint-" + std::to_string(::getpid()) + ".json";
  std::ofstream(path) << text;
  std::string message;
  try {
    read_run_report(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kCorruption);
    message = error.status().message();
  }
  std::remove(path.c_str());
  EXPECT_EQ(message.find("cannot read report '" + path + "': "), 0u) << message;
  EXPECT_EQ(message.find("json.exception"), std::string::npos) << message;
  return message;
}

TEST(RunReport, SaysWhereAFileIsNoJson) {
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  contains(complaint(""), "it is empty");
  contains(complaint("{\"world_size\": 2,\n \"stage\""), "it ends before its JSON does");
  contains(complaint("{\"world_size\": 2,\n  stage: 1}"),
           "line 2, byte 3 of it: it is not JSON from 'stage: 1}' on");
  contains(complaint("hello"), "line 1, byte 1 of it: it is not JSON from 'hello' on");
  contains(complaint("{\"world_size\": 1e999}"), "a number that is too large");
  contains(complaint(std::string(1'000'000, '[') + std::string(1'000'000, ']')),
           "nested deeper than 16 levels");
}

// Its first page cannot be read, although it is a regular file.
TEST(RunReport, SaysThatAFileCannotBeRead) {
  std::string message;
  try {
    static_cast<void>(read_run_report("/proc/self/mem"));
  } catch (const Error& error) {
    message = error.status().message();
  }
  EXPECT_EQ(
      message,
      "cannot read report '/proc/self/mem': Input/output error; check the name that --report was given");
}

TEST(RunReport, NamesTheEntryThatIsNotWhatItShouldBe) {
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  contains(complaint("[]"), "it is '[]' and not an object");
  contains(complaint(R"({"world_size": "two"})"), R"(world_size is '"two"' and not a whole number)");
  contains(complaint(R"({"world_size": 1e10})"),
           "world_size is '10000000000.0' and not a whole number below 2^31");
  const std::string begin = R"({"world_size": 2, "stage": 1, "dtype": "bf16", "parameters": 1000, "steps": 1,
    "loss": [5.5], "digest": "00", "tokens_per_second": 1.0, "grad_norm": )";
  contains(complaint(begin + R"([true], "ranks": []})"), "grad_norm[0] is 'true' and not a number or null");
  contains(complaint(begin + R"(7, "ranks": []})"), "grad_norm is '7' and not a list");
  contains(complaint(begin + R"([1], "ranks": [{"peak_bytes": {"parameters": -4}}]})"),
           "ranks[0].peak_bytes.parameters is '-4' and not a whole number from 0 up");
  contains(complaint(begin + R"([1], "ranks": [{}]})"), "ranks[0] has no 'peak_bytes'");
}

TEST(RunReport, AGridThatDoesNotDivideIsRefused) {
  const auto with = [](const std::string& more) {
    return R"({"world_size": 6, "stage": 1, "dtype": "bf16", "parameters": 1000, "steps": 2, "loss": [],
      "grad_norm": [], "digest": "00", "tokens_per_second": 1.0, "ranks": [], )" +
           more + "}";
  };
  EXPECT_NE(complaint(with(R"("tensor_parallel": 4)")).find("do not divide its world_size"),
            std::string::npos);
  EXPECT_NE(complaint(with(R"("tensor_parallel": 0)")).find("do not divide its world_size"),
            std::string::npos);
  EXPECT_NE(complaint(with(R"("group": 4)")).find("does not divide its data-parallel ranks"),
            std::string::npos);
  EXPECT_NE(complaint(with(R"("shard_within_group": 1)")).find("true or false"), std::string::npos);
}

TEST(RunReport, ShowsNoControlCharactersOfAFile) {
  const std::string path = ::testing::TempDir() + "forebay-run-report-shown.json";
  std::ofstream(path)
      << R"({"world_size": 1, "stage": 1, "dtype": "bf16", "parameters": 1000, "steps": 1, "loss": [],
        "grad_norm": [], "digest": "\u001b[31m00", "tokens_per_second": 1.0, "ranks": [], "recompute": "every:2\n| x"})";
  const RunReport run = read_run_report(path);
  std::remove(path.c_str());
  EXPECT_EQ(run.digest, "\\x1b[31m00");
  EXPECT_EQ(run.recompute, "every:2\\n| x");
}

TEST(RunReport, MissingKeyIsNamed) {
  const std::string path = ::testing::TempDir() + "forebay-run-report-test.json";
  std::ofstream(path) << R"({"world_size": 2})";

  try {
    read_run_report(path);
    FAIL() << "a report without a stage was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kCorruption);
    EXPECT_NE(std::string(error.what()).find("stage"), std::string::npos);
  }
  std::remove(path.c_str());
}

}  // namespace
}  // namespace forebay
