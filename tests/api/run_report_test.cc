#include "runtime/api/run_report.h"

#include <gtest/gtest.h>

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
  sharded.host_bytes = 3'501'000;
  sharded.planned_host_bytes = 3'500'000;
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
  run.file_bytes = 3'000'001;
  run.planned_file_bytes = 3'000'000;
  run.file_read_bytes_per_step = 4'000'001;
  run.planned_file_read_bytes_per_step = 4'000'000;
  run.file_written_bytes_per_step = 5'000'001;
  run.planned_file_written_bytes_per_step = 5'000'000;

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

  const Comparison comparison = compare_runs({example(0), other});

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

  const Comparison comparison = compare_runs({example(0), other});

  EXPECT_FALSE(comparison.comparable);
  EXPECT_NE(comparison.difference.find("world_size"), std::string::npos);
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
  const std::string path = testing::TempDir() + "forebay-run-report-null-test.json";
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

// What is said of a report with that text, which cannot be read.
std::string complaint(const std::string& text) {
  const std::string path = testing::TempDir() + "forebay-run-report-complaint.json";
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
           "line 2, byte 3 of it: it is no JSON from 'stage: 1}' on");
  contains(complaint("hello"), "line 1, byte 1 of it: it is no JSON from 'hello' on");
  contains(complaint("{\"world_size\": 1e999}"), "a number too large");
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

TEST(RunReport, MissingKeyIsNamed) {
  const std::string path = testing::TempDir() + "forebay-run-report-test.json";
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
