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
  contains(complaint(std::string("{\"world_size\": 2}\0\0", 19)), "byte 18 of it is 0, which JSON never has");
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
  std::ifstream file(std::string(FOREBAY_TEST_DATA) + "/run_report.json");
  const nlohmann::json good = nlohmann::json::parse(file);
  const auto with = [&](const char* pointer, const nlohmann::json& value) {
    nlohmann::json json = good;
    json[nlohmann::json::json_pointer(pointer)] = value;
    return complaint(json.dump());
  };
  contains(with("/tokens_per_second", "fast"), R"(tokens_per_second is '"fast"' and not a number)");
  contains(with("/digest", 7), "digest is '7' and not a text");
  for (const nlohmann::json& value : {nlohmann::json(-1), nlohmann::json(1e18), nlohmann::json("1")}) {
    contains(with("/ranks/0/sent_bytes_per_step", value),
             "ranks[0].sent_bytes_per_step is '" + value.dump() + "' and not a number from 0 up");
  }
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
  EXPECT_NE(
      complaint(with(R"("tensor_parallel": 2, "group": 6)")).find("does not divide its data-parallel ranks"),
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

// Writes the report, reads it, and deletes it.
RunReport read_text(const std::string& text) {
  const std::string path =
      ::testing::TempDir() + "forebay-run-report-read-" + std::to_string(::getpid()) + ".json";
  std::ofstream(path) << text;
  RunReport run = read_run_report(path);
  std::remove(path.c_str());
  run.name = "run.json";
  return run;
}

// Two ranks. Each figure is the largest of one of them, and no two figures are equal.
constexpr const char* kWholeReport = R"({
  "world_size": 8, "tensor_parallel": 2, "pipeline_parallel": 1, "group": 2, "shard_within_group": true,
  "training": {"layers": "4", "batch": "2", "sequence": "10", "hidden": "50"},
  "recompute": "every:3", "activations": "partition+nvme",
  "stage": 3, "dtype": "bf16", "parameters": 1000000, "steps": 9, "first_step": 6, "micro_steps": 3,
  "accumulate": "shard", "optimizer": "lion", "moments": "bf16", "master_weights": "off", "ema": 0.5,
  "offload": "optimizer", "offload_tier": "nvme", "offloaded_parameters": 300000, "store": "posix, in /drive",
  "loss": [5.5, 5.25, 4.1234567], "grad_norm": [1.5, null, 2.5],
  "digest": "0123456789abcdef0123456789abcdef", "tokens_per_second": 12345.5,
  "ranks": [
    {"peak_bytes": {"parameters": 101, "gradients": 1102, "optimizer": 103, "gathered": 1104, "buckets": 105,
                    "activations": 1106},
     "planned_bytes": {"parameters": 1201, "gradients": 202, "optimizer": 1203, "gathered": 204,
                       "buckets": 1205, "activations": 206},
     "reserved_bytes": 301, "parameters": 600001,
     "sent_bytes_per_step": 4001.4, "received_bytes_per_step": 5002.5,
     "tensor_sent_bytes_per_step": 6003, "pipeline_sent_bytes_per_step": 70,
     "saved_device_bytes": 8001, "planned_saved_device_bytes": 80,
     "saved_host_bytes": 81, "planned_saved_host_bytes": 8102,
     "saved_file_bytes": 8203, "planned_saved_file_bytes": 8204,
     "saved_sent_bytes_per_step": 8305.5, "planned_saved_sent_bytes_per_step": 83,
     "host_bytes": 9001, "planned_host_bytes": 90, "file_bytes": 91, "planned_file_bytes": 9102,
     "file_read_bytes_per_step": 9203.4, "planned_file_read_bytes_per_step": 92,
     "file_written_bytes_per_step": 93, "planned_file_written_bytes_per_step": 9304},
    {"peak_bytes": {"parameters": 1101, "gradients": 102, "optimizer": 1103, "gathered": 104, "buckets": 1105,
                    "activations": 106},
     "planned_bytes": {"parameters": 201, "gradients": 1202, "optimizer": 203, "gathered": 1204,
                       "buckets": 205, "activations": 1206},
     "reserved_bytes": 1301, "parameters": 60,
     "sent_bytes_per_step": 40, "received_bytes_per_step": 50,
     "tensor_sent_bytes_per_step": 60, "pipeline_sent_bytes_per_step": 7004,
     "saved_device_bytes": 80, "planned_saved_device_bytes": 8006,
     "saved_host_bytes": 8107, "planned_saved_host_bytes": 81,
     "saved_file_bytes": 82, "planned_saved_file_bytes": 82,
     "saved_sent_bytes_per_step": 83, "planned_saved_sent_bytes_per_step": 8308,
     "host_bytes": 90, "planned_host_bytes": 9009, "file_bytes": 9110, "planned_file_bytes": 91,
     "file_read_bytes_per_step": 92, "planned_file_read_bytes_per_step": 9211,
     "file_written_bytes_per_step": 9312.5, "planned_file_written_bytes_per_step": 93}
  ]
})";

TEST(RunReport, EachFigureStandsInItsColumn) {
  RunReport plain = example(1);
  plain.parameters = 1'000'000;
  plain.tokens_per_second = 7.5;
  std::ostringstream table;

  print_report_table(table, {read_text(kWholeReport), plain});

  EXPECT_EQ(
      table.str(),
      R"(1,000,000 parameters, bf16, 8 ranks, 9 steps. Bytes are those of the worst rank; wire is per step.

stage  states measured  planned    formula                 offload  host measured  planned  gathered
3                2,306    2,606  2,100,006  optimizer, 50% on nvme          9,001    9,009     1,104
1                    0        0  7,000,000                    none              0        0         0

stage  buckets               wire / theory  tokens/s  final loss        digest
3        1,105  5,003 / 9,000,015 = 0.0006    12,346    4.123457  0123456789ab
1            0      0 / 3,000,000 = 0.0000         8    5.250000  0123456789ab

stage  tensor-parallel         its wire / theory  recompute     activations
3                    2  6,003 / 240,000 = 0.0250    every:3  partition+nvme

stage  saved on device / planned  on host / planned  in files / planned  gathers' wire / planned
3                  8,001 / 8,006      8,107 / 8,102       8,203 / 8,204            8,306 / 8,308

stage  of tensor's  pipeline-parallel  its wire
3          138.36%                  1     7,004

stage  files measured  planned  read/step measured  planned  written/step measured  planned
3               9,110    9,102               9,203    9,211                  9,313    9,304
store of 'run.json': posix, in /drive

Not compared: not the same training (world_size 8 / 4, steps 9 / 2, micro_steps 3 / 1, optimizer lion / adamw, moments bf16 / fp32, ema 0.5 / 0, master_weights 0 / 1) in 'run.json' and 'stage-1'.
)");
}

TEST(RunReport, AFileWhoseNameIsNoUtf8IsWrittenAsJson) {
  RunReport run = read_text(kWholeReport);
  run.name = "\xFF/r.json";
  std::ostringstream text;
  print_report_json(text, {run});
  EXPECT_TRUE(nlohmann::json::parse(text.str()).is_object()) << text.str();
}

TEST(RunReport, FiguresAreThoseOfTheWorstRank) {
  nlohmann::json json = nlohmann::json::parse(kWholeReport);
  const nlohmann::json whole = json;
  nlohmann::json none = json.at("ranks").at(0).flatten();
  for (auto& figure : none) {
    if (figure.is_number()) figure = 0;
  }
  const auto table = [](const nlohmann::json& report) {
    std::ostringstream text;
    print_report_table(text, {read_text(report.dump())});
    print_report_json(text, {read_text(report.dump())});
    return text.str();
  };
  const std::string alone = table(whole);
  json.at("ranks").push_back(none.unflatten());
  EXPECT_EQ(table(json), alone);
  std::swap(json.at("ranks").at(0), json.at("ranks").at(1));
  EXPECT_EQ(table(json), alone);
}

TEST(RunReport, OneRunIsNotComparedAndPartsThatThereAreNotAreNone) {
  RunReport run = example(0);
  run.world_size = 1;
  run.pipeline_parallel = 1;
  run.tier = "nvme";
  run.saved_file = {.measured = 5, .planned = 7};
  std::ostringstream table;
  print_report_table(table, {run});
  EXPECT_EQ(
      table.str(),
      R"(1,000,000 parameters, bf16, 1 rank, 2 steps. Bytes are those of the worst rank; wire is per step.

stage  states measured  planned     formula  gathered  buckets  wire / theory  tokens/s  final loss
0                    0        0  16,000,000         0        0           none         0    5.250000

stage        digest
0      0123456789ab

stage  tensor-parallel  its wire / theory  recompute  activations  saved on device / planned
0                    1               none       none         keep                      0 / 0

stage  on host / planned  in files / planned  gathers' wire / planned  of tensor's
0                  0 / 0               5 / 7                    0 / 0            -

stage  pipeline-parallel  its wire
0                      1         0
)");
}

TEST(RunReport, EachFigureHasItsKeyInJson) {
  std::ostringstream json;

  print_report_json(json, {read_text(kWholeReport)});

  EXPECT_EQ(nlohmann::json::parse(json.str()), nlohmann::json::parse(R"(
{"runs": [{"file": "run.json", "world_size": 8, "stage": 3, "dtype": "bf16", "parameters": 1000000, "steps": 9,
           "model_state_bytes": {"measured": 2306, "planned": 2606, "formula": 2100006.0},
           "offload": "optimizer", "offload_tier": "nvme", "offloaded_parameters": 300000,
           "store": "posix, in /drive", "host_bytes": {"measured": 9001, "planned": 9009},
           "file_bytes": {"measured": 9110, "planned": 9102},
           "file_bytes_read_per_step": {"measured": 9203, "planned": 9211},
           "file_bytes_written_per_step": {"measured": 9313, "planned": 9304}, "gathered_bytes": 1104,
           "bucket_bytes": 1105, "wire_bytes_per_step": {"sent": 4001, "received": 5003, "theory": 9000015.0},
           "tensor_parallel": 2, "pipeline_parallel": 1, "data_parallel": 4,
           "tensor_bytes_per_step": {"sent": 6003, "theory": 240000.0}, "pipeline_bytes_sent_per_step": 7004,
           "recompute": "every:3", "activations": "partition+nvme",
           "saved_bytes": {"device": {"measured": 8001, "planned": 8006},
                           "host": {"measured": 8107, "planned": 8102},
                           "files": {"measured": 8203, "planned": 8204},
                           "sent_per_step": {"measured": 8306, "planned": 8308}},
           "tokens_per_second": 12345.5, "final_loss": 4.1234567, "digest": "0123456789abcdef0123456789abcdef"}],
 "comparable": true, "equal": true})"));
}

TEST(RunReport, OlderReportsHaveTheirDefaults) {
  const RunReport run = read_text(R"({"world_size": 2, "stage": 1, "dtype": "fp16", "parameters": 1000,
    "steps": 1, "loss": [5.5], "grad_norm": [1], "digest": "00", "tokens_per_second": 1.0, "ranks": [],
    "offload": "optimizer"})");

  EXPECT_EQ(run.tensor_parallel, 1);
  EXPECT_EQ(run.pipeline_parallel, 1);
  EXPECT_EQ(run.group, 1);
  EXPECT_FALSE(run.shard_within_group);
  EXPECT_EQ(run.first_step, 0);
  EXPECT_EQ(run.micro_steps, 1);
  EXPECT_EQ(run.accumulate, "shard");
  EXPECT_EQ(run.optimizer, "adamw");
  EXPECT_EQ(run.moments, "fp32");
  EXPECT_TRUE(run.master_weights);
  EXPECT_EQ(run.ema, 0);
  EXPECT_EQ(run.tier, "cpu");
  EXPECT_EQ(run.offloaded_parameters, 1000u) << "all were offloaded";
  EXPECT_EQ(run.recompute, "none");
  EXPECT_EQ(run.activations, "keep");
  EXPECT_EQ(run.store, "");
}

// The bytes of a parameter of a rank's part that is not sharded, and of one that 4 ranks share.
TEST(RunReport, FormulasKnowOptimizersAndFormatsOfMoments) {
  struct Case {
    const char* optimizer;
    const char* moments;
    bool master_weights;
    double ema;
    const char* dtype;
    double optimizer_bytes;
  };
  for (const Case& one : {
           Case{"adamw", "fp32", true, 0, "bf16", 12},
           Case{"adam", "fp32", true, 0, "fp16", 12},
           Case{"muon", "fp32", true, 0, "bf16", 12},
           Case{"sgd", "fp32", true, 0, "bf16", 8},
           Case{"lion", "fp32", true, 0, "bf16", 8},
           Case{"adafactor", "fp32", true, 0, "bf16", 4},
           Case{"adamw", "bf16", true, 0, "bf16", 8},
           Case{"adamw", "block8", true, 0, "bf16", 6 + 2 / 256.0},
           Case{"adamw", "fp32", false, 0, "bf16", 8},
           Case{"adamw", "fp32", true, 0.99, "bf16", 16},
           Case{"adamw", "fp32", true, 0, "fp32", 8},
           Case{"adamw", "fp32", false, 0, "fp32", 8},
       }) {
    SCOPED_TRACE(std::string(one.optimizer) + ", " + one.moments + ", " + one.dtype);
    const double element = one.dtype == std::string("fp32") ? 4 : 2;
    RunReport run = example(0);
    run.optimizer = one.optimizer;
    run.moments = one.moments;
    run.master_weights = one.master_weights;
    run.ema = one.ema;
    run.dtype = one.dtype;
    EXPECT_EQ(model_state_formula_bytes(run), 1e6 * (2 * element + one.optimizer_bytes));
    run.stage = 3;
    EXPECT_EQ(model_state_formula_bytes(run), 1e6 / 4 * (2 * element + one.optimizer_bytes));
    EXPECT_EQ(wire_formula_bytes(run), 3 * 1e6 * element * 3 / 4);
  }
}

// An accumulator of its own stands only beside several micro-steps that add up in shards.
TEST(RunReport, MicroStepsThatAddUpLocallyNeedNoAccumulator) {
  RunReport run = example(1);
  run.micro_steps = 3;
  run.accumulate = "local";
  EXPECT_EQ(model_state_formula_bytes(run), 4e6 + 3e6);
  EXPECT_EQ(wire_formula_bytes(run), 2 * 2e6 * 3 / 4);
  run.stage = 0;
  run.accumulate = "shard";
  EXPECT_EQ(model_state_formula_bytes(run), 16e6 + 1e6) << "the accumulator is a shard at stage 0 too";
  run.stage = 3;
  EXPECT_EQ(wire_formula_bytes(run), 3 * 3 * 2e6 * 3 / 4) << "each micro-step gathers";
}

TEST(RunReport, EachSettingThatDecidesResultsIsCompared) {
  const std::vector<std::pair<std::string, void (*)(RunReport&)>> changes = {
      {"world_size 4 / 3", [](RunReport& run) { run.world_size = 3; }},
      {"dtype bf16 / fp16", [](RunReport& run) { run.dtype = "fp16"; }},
      {"parameters 1000000 / 1000001", [](RunReport& run) { ++run.parameters; }},
      {"steps 2 / 3", [](RunReport& run) { ++run.steps; }},
      {"micro_steps 1 / 2", [](RunReport& run) { ++run.micro_steps; }},
      {"accumulate shard / local", [](RunReport& run) { run.accumulate = "local"; }},
      {"optimizer adamw / lion", [](RunReport& run) { run.optimizer = "lion"; }},
      {"moments fp32 / bf16", [](RunReport& run) { run.moments = "bf16"; }},
      {"ema 0 / 0.5", [](RunReport& run) { run.ema = 0.5; }},
      {"master_weights 1 / 0", [](RunReport& run) { run.master_weights = false; }}};
  for (const auto& [difference, change] : changes) {
    RunReport other = example(0);
    other.name = "other";
    change(other);

    // The third differs: all are compared with the first.
    const RunComparison comparison = compare_runs({example(0), example(0), other});

    EXPECT_FALSE(comparison.comparable) << difference;
    EXPECT_EQ(comparison.difference, "not the same training (" + difference + ") in 'stage-0' and 'other'");
  }
}

TEST(RunReport, TheFirstDifferenceOfResultsIsNamed) {
  const auto difference = [](auto change) {
    RunReport other = example(3);
    change(other);
    const RunComparison comparison = compare_runs({example(0), example(1), other});
    EXPECT_TRUE(comparison.comparable);
    return comparison.difference;
  };
  EXPECT_EQ(difference([](RunReport& run) { run.digest = "ff"; }),
            "digest 0123456789abcdef0123456789abcdef against ff between 'stage-0' and 'stage-3'");
  EXPECT_EQ(difference([](RunReport& run) { run.losses[0] = 5; }),
            "loss differs first at step 1 between 'stage-0' and 'stage-3'");
  EXPECT_EQ(difference([](RunReport& run) { run.losses.pop_back(); }),
            "loss ends at another step between 'stage-0' and 'stage-3'");
  EXPECT_EQ(difference([](RunReport& run) { run.losses.push_back(5); }),
            "loss ends at another step between 'stage-0' and 'stage-3'");
  EXPECT_EQ(difference([](RunReport& run) { run.grad_norms[1] = 1.0; }),
            "grad_norm differs first at step 2 between 'stage-0' and 'stage-3'");
  EXPECT_EQ(difference([](RunReport& run) { run.grad_norms[0] = 2.0; }),
            "grad_norm differs first at step 1 between 'stage-0' and 'stage-3'");
  EXPECT_EQ(difference([](RunReport& run) { run.grad_norms.pop_back(); }),
            "grad_norm ends at another step between 'stage-0' and 'stage-3'");
}

TEST(RunReport, ValuesOutOfRangeAreRefused) {
  const auto with = [](const std::string& world_size, const std::string& stage, const std::string& dtype) {
    return R"({"world_size": )" + world_size + R"(, "stage": )" + stage + R"(, "dtype": ")" + dtype +
           R"(", "parameters": 1000, "steps": 2, "loss": [], "grad_norm": [], "digest": "00",
      "tokens_per_second": 1.0, "ranks": []})";
  };
  const auto ending = [](const std::string& text) {
    const std::string message = complaint(text);
    const std::string begin = ".json': ";
    return message.substr(message.find(begin) + begin.size());
  };
  const std::string advice = "; give files that forebay-gpt wrote with --report";
  EXPECT_EQ(ending(with("0", "1", "bf16")), "world_size is 0" + advice);
  EXPECT_EQ(ending(with("2", "4", "bf16")), "stage is 4" + advice);
  EXPECT_EQ(ending(with("2", "-1", "bf16")), "stage is -1" + advice);
  EXPECT_EQ(ending(with("2", "1", "fp8")), "dtype is 'fp8'" + advice);
  for (const char* const dtype : {"fp32", "bf16", "fp16"}) {
    for (const char* const stage : {"0", "1", "2", "3"}) {
      EXPECT_EQ(read_text(with("1", stage, dtype)).dtype, dtype);
    }
  }
}

TEST(RunReport, AFileOfMoreThanAReportIsNotRead) {
  const std::string path =
      ::testing::TempDir() + "forebay-run-report-large-" + std::to_string(::getpid()) + ".json";
  std::ofstream(path) << "{}";
  const auto message = [&](std::uint64_t bytes, StatusCode code) {
    EXPECT_EQ(::truncate(path.c_str(), static_cast<off_t>(bytes)), 0);
    try {
      static_cast<void>(read_run_report(path));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      return error.status().message();
    }
    return std::string();
  };
  EXPECT_EQ(message((std::uint64_t{256} << 20) + 1, StatusCode::kInvalidArgument),
            "cannot read report '" + path +
                "': it has more than 256.00 MiB; check the name that --report was given");
  EXPECT_EQ(message(2, StatusCode::kCorruption),
            "cannot read report '" + path +
                "': it has no 'world_size'; give files that forebay-gpt wrote with --report");
  std::remove(path.c_str());
  try {
    static_cast<void>(read_run_report(path));
    FAIL() << "a file that is not there was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kIoError);
    EXPECT_EQ(error.status().message(), "cannot read report '" + path +
                                            "': No such file or directory; check the name that --report was "
                                            "given");
  }
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
