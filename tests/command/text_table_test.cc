// table_text(), and the width of the tables of all commands.

#include "runtime/command/text_table.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "forebay/units.h"
#include "runtime/command/machine/bench_tiers_print.h"
#include "runtime/command/replay/replay_report.h"
#include "runtime/command/report/run_report.h"

namespace forebay {
namespace {

TEST(TextTable, AlignsColumnsToTheRight) {
  EXPECT_EQ(table_text({{"name", "bytes", "x"}, {"a", "1", "22"}}),
            "name  bytes   x\n"
            "a         1  22\n");
}

TEST(TextTable, ContinuesBelowAfterTheFirstColumn) {
  const std::string wide(50, 'w');
  EXPECT_EQ(table_text({{"a", wide, wide, "b"}}), "a  " + wide + "\n\na  " + wide + "  b\n");
  const std::string wider(120, 'w');
  EXPECT_EQ(table_text({{"a", wider, "b"}}), "a  " + wider + "\n\na  b\n");
}

// Lines with two spaces inside are lines of tables; others are sentences, which a terminal breaks.
void expect_narrow_tables(const std::string& text) {
  std::istringstream lines(text);
  int count = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t begin = line.find_first_not_of(' ');
    if (begin == std::string::npos || line.find("  ", begin) == std::string::npos) continue;
    ++count;
    EXPECT_LE(line.size(), kTableWidth) << line;
  }
  EXPECT_GT(count, 0) << "there is no table in\n" << text;
}

constexpr std::uint64_t kMany = 987'654'321'987'654;  // Bytes: almost a petabyte.

TEST(TablesOfCommands, ReportFits) {
  RunReport run;
  run.name = "/a/long/path/of/a/report.json";
  run.world_size = 4096;
  run.tensor_parallel = run.pipeline_parallel = 8;
  run.stage = 3;
  run.parameters = run.part_parameters = kMany;
  run.micro_steps = 16;
  run.offload = "optimizer+parameters";
  run.tier = "nvme";
  run.offloaded_parameters = kMany / 2;
  run.recompute = "every:12";
  run.activations = "partition+nvme";
  run.training = {{"layers", "96"}, {"batch", "32"}, {"sequence", "2048"}, {"hidden", "12288"}};
  run.losses = {12345.678};
  run.digest = "0123456789abcdef0123456789abcdef";
  run.tokens_per_second = 123456789;
  run.sent_bytes_per_step = run.received_bytes_per_step = kMany;
  run.tensor_sent_bytes_per_step = run.pipeline_sent_bytes_per_step = kMany;
  run.peak = run.planned = {kMany, kMany, kMany, kMany, kMany, kMany};
  for (MeasuredBytes* const bytes :
       {&run.model_states, &run.saved_device, &run.saved_host, &run.saved_file, &run.saved_sent_per_step,
        &run.host, &run.file, &run.file_read_per_step, &run.file_written_per_step})
    *bytes = {kMany, kMany};
  std::ostringstream text;

  print_report_table(text, {run, run});

  expect_narrow_tables(text.str());
}

TEST(TablesOfCommands, ReplayFits) {
  const CallTimes times{1000, 99'999, 999'999, 9'999'999};
  ReplayFigures figures;
  figures.result.completed = true;
  figures.result.peak_requested_bytes = figures.result.peak_physical_bytes = 9'999'999'000'000;
  figures.result.first_pass_calls = {9'999'999, 9'999'999, 9'999'999, 9'999'999, 9'999'999};
  figures.result.steady_calls = figures.result.steady_chunks_moved = 99'999.9;
  figures.result.times = {times, times, times, times, times, times, times};
  figures.minimum_capacity_bytes = 9'999'999'000'000;
  ReplayReport report;
  report.trace = "/a/long/path/of/traces/of/a/large/model.trace";
  report.passes = 3;
  report.arena = figures;
  report.baseline = figures;
  report.glibc = figures.result.times;

  const std::string text = replay_text({report, report});

  expect_narrow_tables(text);
  EXPECT_NE(text.find("...aces/of/a/large/model.trace arena "), std::string::npos) << text;
}

TEST(TablesOfCommands, BenchTiersFits) {
  BenchTiersReport report;
  report.device = "host";
  report.copies = {1e12, 1e12, 2e12};
  report.host = {256, 8, 1e12, 1e12, 28};
  FileMeasurement files;
  files.directories.emplace_back();
  files.store.points = {{4 << 20, 32, 1e12, 1e12}};
  files.store.chosen = files.store.points[0];
  report.files = {files};
  BenchedModel model;
  for (const Offload offload : {Offload::kNone, Offload::kOptimizer, Offload::kOptimizerAndParameters}) {
    model.choice.estimates.push_back({.offload = offload,
                                      .tier = Tier::kFile,
                                      .device_bytes = kMany,
                                      .host_bytes = kMany,
                                      .file_bytes = kMany,
                                      .down_seconds = 12345.678,
                                      .up_seconds = 12345.678,
                                      .both_seconds = 12345.678,
                                      .adamw_seconds = 12345.678,
                                      .file_seconds = 12345.678,
                                      .added_seconds = 12345.678});
  }
  model.choice.chosen = 1;
  report.model = model;

  const std::string text = bench_tiers_text(report);

  expect_narrow_tables(text);
  EXPECT_NE(text.find("\n* optimizer on nvme "), std::string::npos) << text;
}

std::string output_of(const std::string& arguments) {
  std::FILE* const pipe = ::popen((std::string(FOREBAY_COMMAND) + " " + arguments + " 2>&1").c_str(), "r");
  std::string output;
  if (pipe == nullptr) return output;
  std::array<char, 4096> part;
  for (std::size_t count; (count = std::fread(part.data(), 1, part.size(), pipe)) > 0;)
    output.append(part.data(), count);
  EXPECT_NE(WEXITSTATUS(::pclose(pipe)), 2) << output;
  return output;
}

TEST(TablesOfCommands, PlanFits) {
  const std::string huge =
      "plan --layers 512 --hidden 131072 --heads 1024 --sequence 131072 --vocabulary 1000000 --batch 16 "
      "--host-ranks 0 ";
  for (const char* const more :
       {"--ranks 4096", "--ranks 4096 --stage 3 --micro-steps 16",
        "--ranks 4096 --shard-within group --order group:8",
        "--ranks 4096 --tensor-parallel 64 --pipeline-parallel 16 --micro-steps 64 --recompute block "
        "--activations partition+cpu",
        "--ranks 4096 --tensor-parallel 8 --recompute every:3 --activations partition --stage 3 "
        "--offload optimizer+parameters --offload-tier nvme:/tmp",
        "--ranks 64 --preset deepspeed", "--ranks 64 --preset paper"}) {
    SCOPED_TRACE(more);
    expect_narrow_tables(output_of(huge + more));
  }
}

TEST(TablesOfCommands, DevicesFits) {
  expect_narrow_tables(output_of("devices"));
}

TEST(TablesOfCommands, ExplainFits) {
  expect_narrow_tables(output_of("explain " FOREBAY_FUZZ_CORPUS "/pickle/fragmented-p4.pickle"));
}

}  // namespace
}  // namespace forebay
