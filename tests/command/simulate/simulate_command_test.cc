// `forebay simulate` as a person runs it: the program, its output and its exit code.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/process.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

const Words kModel = {"--layers",   "4",   "--hidden",     "512",  "--heads", "8",
                      "--sequence", "256", "--vocabulary", "5000", "--batch", "2"};

Finished run_forebay(Words words) {
  words.insert(words.begin(), {FOREBAY_COMMAND, "simulate"});
  return run_program(words);
}

Finished with_model(Words words) {
  words.insert(words.end(), kModel.begin(), kModel.end());
  return run_forebay(words);
}

TEST(SimulateCommand, PrintsTheStepItsCausesAndItsMemory) {
  const Finished finished = with_model({"--cluster", "dgx-a100", "--ranks", "16", "--stage", "3"});
  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  for (const char* const word : {"tokens/s", "model FLOPs utilisation", "forward", "parameter gathers",
                                 "most time", "would help", "optimizer", "to spare"}) {
    EXPECT_NE(finished.output.find(word), std::string::npos) << word << "\n" << finished.output;
  }
}

TEST(SimulateCommand, PrintsTheSameJsonTwice) {
  const Words words = {"--stage", "2", "--offload", "optimizer", "--json"};
  const Finished first = with_model(words);
  ASSERT_EQ(first.exit_code, 0) << first.output;
  EXPECT_EQ(with_model(words).output, first.output);
  const Json json = Json::parse(first.output);
  EXPECT_EQ(json.at("ranks"), 8);
  EXPECT_GT(json.at("tokens_per_second").get<double>(), 0);
  EXPECT_GT(json.at("changes").size(), 3u);
}

TEST(SimulateCommand, WritesATimeline) {
  const TemporaryDirectory directory;
  const std::string file = directory / "step.json";
  ASSERT_EQ(with_model({"--stage", "3", "--timeline", file, "--no-changes"}).exit_code, 0);
  std::ifstream stream(file);
  EXPECT_GT(Json::parse(stream).at("traceEvents").size(), 100u);
}

TEST(SimulateCommand, AnswersBadInput) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "bad.json") << "{\"name\": \"bad\"}";
  struct Case {
    Words words;
    int exit_code;
    const char* answer;
  };
  const Case cases[] = {
      {{"--cluster", "dgx-9"}, 2, "use dgx-2, dgx-a100, dgx-h100"},
      {{"--cluster", directory / "bad.json"}, 2, "bad.json: device is missing"},
      {{"--ranks", "9", "--tensor-parallel", "2"},
       2,
       "which --tensor-parallel 2 times --pipeline-parallel 1 does not divide; use a multiple of 2"},
      {{"--cluster", "dgx-2", "--dtype", "bf16"}, 2, "V100-32 has no products in bf16"},
      {{"--stage", "0", "--layers", "400", "--hidden", "8192"}, 1, "the plan needs"},
      {{"--attention", "quick"}, 2, "use fused or plain"},
      {{"--ranks", "8", "--tensor-parallel", "2", "--pipeline-parallel", "3"}, 2, "use a multiple of 6"},
      {{"--ranks", "8", "--pipeline-parallel", "8"},
       2,
       "pipeline-parallel is 8 and each stage needs a layer"},
      {{"--activations", "auto"}, 2, "use keep, partition, partition+cpu or partition+nvme"},
  };
  for (const Case& one : cases) {
    const Finished finished = one.exit_code == 1 ? run_forebay(one.words) : with_model(one.words);
    EXPECT_EQ(finished.exit_code, one.exit_code) << finished.output;
    EXPECT_NE(finished.output.find(one.answer), std::string::npos) << one.answer << "\n" << finished.output;
  }
}

TEST(CompareCommand, RefusesPricesThatAreNoNumbers) {
  for (const char* const price : {"nan", "-5", "inf", "1e308"}) {
    const Finished finished = run_program({FOREBAY_COMMAND, "compare", "--price", price, "--limit", "1",
                                           "--layers", "2", "--hidden", "256", "--heads", "4"});
    EXPECT_EQ(finished.exit_code, 2) << price << finished.output;
    EXPECT_NE(finished.output.find("--price"), std::string::npos) << finished.output;
  }
}

TEST(CompareCommand, RefusesMicroBatchesThatNoStepHas) {
  for (const char* const batch : {"0", "2305843009213693952", "18446744073709551615"}) {
    const Finished finished = run_program({FOREBAY_COMMAND, "compare", "--micro-batch", batch, "--ranks", "8",
                                           "--layers", "2", "--hidden", "256", "--heads", "4"});
    EXPECT_EQ(finished.exit_code, 2) << batch << finished.output;
    EXPECT_NE(finished.output.find("; use "), std::string::npos) << finished.output;
  }
}

TEST(CompareCommand, RefusesFilesThatItWouldSpoil) {
  const TemporaryDirectory directory;
  const std::string file = directory / "table", link = directory / "link";
  std::filesystem::create_symlink(directory / "nothing", link);
  const auto compare = [](const Words& files) {
    Words words = {FOREBAY_COMMAND, "compare", "--limit",  "2",   "--ranks", "2",
                   "--layers",      "2",       "--hidden", "256", "--heads", "4"};
    words.insert(words.end(), files.begin(), files.end());
    return run_program(words);
  };
  const Finished same = compare({"--csv", file, "--html", directory / "." + "/table"});
  EXPECT_EQ(same.exit_code, 2) << same.output;
  EXPECT_NE(same.output.find("--csv and --html both name " + file), std::string::npos) << same.output;
  EXPECT_FALSE(std::filesystem::exists(file));
  const Finished linked = compare({"--csv", link});
  EXPECT_EQ(linked.exit_code, 2) << linked.output;
  EXPECT_NE(linked.output.find("link to a file that does not exist"), std::string::npos) << linked.output;
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  // Anyone who may write to the directory could have laid it there.
  std::filesystem::create_symlink(directory / "nothing", file + ".partial");
  const Finished led_astray = compare({"--csv", file});
  EXPECT_EQ(led_astray.exit_code, 2) << led_astray.output;
  EXPECT_FALSE(std::filesystem::exists(directory / "nothing"));
}

TEST(CompareCommand, APipeThatNobodyReadsIsAnError) {
  const TemporaryDirectory directory;
  const std::string pipe = directory / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const Words words = {FOREBAY_COMMAND, "compare", "--csv",    pipe,  "--limit", "1", "--ranks", "2",
                       "--layers",      "2",       "--hidden", "256", "--heads", "4"};
  const Finished finished = Process(words).finish(std::chrono::seconds(30));
  EXPECT_EQ(finished.exit_code, 1) << finished.output;
  EXPECT_NE(finished.output.find("no process reads from it; start the reader first"), std::string::npos)
      << finished.output;
}

TEST(CompareCommand, PrintsTheComparisonThoughAFileCannotBeWritten) {
  const Finished finished =
      run_program({FOREBAY_COMMAND, "compare", "--csv", "/dev/full", "--html", "/dev/full", "--limit", "2",
                   "--ranks", "2", "--layers", "2", "--hidden", "256", "--heads", "4"});
  EXPECT_EQ(finished.exit_code, 1) << finished.output;
  EXPECT_NE(finished.output.find("cannot write /dev/full"), std::string::npos) << finished.output;
  EXPECT_NE(finished.output.find("options: --stage"), std::string::npos) << finished.output;
}

}  // namespace
}  // namespace forebay::testing
