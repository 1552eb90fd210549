// `forebay replay` and `forebay explain` as a person runs them.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/pickle_writer.h"
#include "support/process.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;

class ReplayCommand : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(directory_ / name, std::ios::binary) << text;
    return directory_ / name;
  }
  static Finished forebay(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), FOREBAY_COMMAND);
    return run_program(arguments);
  }

  TemporaryDirectory directory_;
};

const std::string kTrace =
    "a 0 4194304 0\n# warm\na 1 33554432 0\na 2 1048576 3\nf 1\na 3 20971520 3\nf 3\nf 2\n";

TEST_F(ReplayCommand, PrintsJsonWithThePromisedKeys) {
  const std::string path = write("small.trace", kTrace);
  const Finished run = forebay({"replay", path, "--baseline", "--minimum-capacity", "--json"});

  ASSERT_EQ(run.exit_code, 0) << run.output;
  const Json list = Json::parse(run.output);
  ASSERT_EQ(list.size(), 1u);
  const Json& one = list[0];
  EXPECT_EQ(one.at("trace"), "small.trace");
  EXPECT_EQ(one.at("completed"), true);
  EXPECT_EQ(one.at("peak_requested_bytes"), 4194304 + 33554432 + 1048576);
  const double fragmentation =
      1 - one.at("peak_requested_bytes").get<double>() / one.at("peak_physical_bytes").get<double>();
  EXPECT_DOUBLE_EQ(one.at("fragmentation").get<double>(), fragmentation);
  EXPECT_TRUE(one.at("fragmentation_last_repeat").is_number());
  EXPECT_GE(one.at("minimum_capacity_bytes").get<std::uint64_t>(),
            one.at("peak_requested_bytes").get<std::uint64_t>());
  for (const char* key : {"malloc_ns", "free_ns"}) {
    for (const char* part : {"p50", "p99", "p999"})
      EXPECT_TRUE(one.at(key).at(part).is_number()) << key << part;
  }
  for (const char* key : {"create", "map", "unmap", "set_access"}) {
    EXPECT_TRUE(one.at("driver_calls").at(key).is_number_unsigned()) << key;
  }
  EXPECT_EQ(one.at("steady_driver_calls_per_repeat"), 0);
  EXPECT_EQ(one.at("steady_chunks_moved_per_repeat"), 0);
  EXPECT_EQ(one.at("baseline").at("completed"), true);
  EXPECT_EQ(one.at("baseline").at("peak_requested_bytes"), one.at("peak_requested_bytes"));
  EXPECT_TRUE(one.contains("glibc"));
}

TEST_F(ReplayCommand, PrintsATable) {
  const Finished run = forebay({"replay", write("small.trace", kTrace), "--repeat", "1"});
  ASSERT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(run.output.find("small.trace"), std::string::npos) << run.output;
  EXPECT_NE(run.output.find("off the mapping path"), std::string::npos) << run.output;
}

TEST_F(ReplayCommand, RunsOnTheHostDeviceToo) {
  const Finished run = forebay({"replay", write("small.trace", kTrace), "--device", "host", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(Json::parse(run.output)[0].at("device"), "host");
}

TEST_F(ReplayCommand, FailsWhenATraceDoesNotComplete) {
  const Finished run = forebay({"replay", write("small.trace", kTrace), "--memory", "16MiB", "--json"});
  EXPECT_EQ(run.exit_code, 1);
  const Json one = Json::parse(run.output)[0];
  EXPECT_EQ(one.at("completed"), false);
  EXPECT_TRUE(one.at("fragmentation").is_null()) << "of a trace that was cut short there is none";
  EXPECT_EQ(one.at("failure").get<std::string>().rfind("event 2 of 7, 32.00 MiB: ", 0), 0u)
      << one.at("failure");
  EXPECT_TRUE(one.at("steady_driver_calls_per_repeat").is_null());
}

TEST_F(ReplayCommand, OneBadFileDoesNotKeepTheOthersFromBeingPlayed) {
  const std::string bad = write("bad.trace", "a 0 5 0\na 1 -5 0\n");
  const Finished run = forebay({"replay", bad, write("small.trace", kTrace)});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_NE(run.output.find("line 2"), std::string::npos) << run.output;
  EXPECT_NE(run.output.find("small.trace"), std::string::npos) << run.output;
}

TEST_F(ReplayCommand, RefusesAPickleWithCodeAndRunsNoneOfIt) {
  const std::string path = directory_ / "was-run";
  const std::string evil = PickleWriter(2)
                               .raw("}")
                               .text("segments")
                               .raw("cposix\nsystem\n")
                               .text("touch " + path)
                               .raw("\x85Rs")
                               .finish();
  for (const char* command : {"replay", "explain"}) {
    const Finished run = forebay({command, write("evil.pickle", evil)});
    EXPECT_EQ(run.exit_code, 2);
    EXPECT_NE(run.output.find("it names 'posix.system'"), std::string::npos) << run.output;
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(ReplayCommand, RefusesOddOptions) {
  const std::string path = write("small.trace", kTrace);
  EXPECT_EQ(forebay({"replay"}).exit_code, 2);
  EXPECT_EQ(forebay({"replay", path, "--memory", "lots"}).exit_code, 2);
  EXPECT_EQ(forebay({"replay", path, "--device", "tpu"}).exit_code, 2);
  EXPECT_EQ(forebay({"replay", path, "--device", "cuda:x"}).exit_code, 2);
  EXPECT_EQ(forebay({"replay", path, "--repeat", "0"}).exit_code, 2);
  EXPECT_EQ(forebay({"replay", directory_ / "none"}).exit_code, 2);
}

TEST_F(ReplayCommand, ExplainSaysInAFewLinesWhatHappened) {
  const Finished run = forebay({"explain", write("small.trace", kTrace)});
  ASSERT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(run.output.find("NO FAILURE"), std::string::npos) << run.output;
  EXPECT_LE(std::count(run.output.begin(), run.output.end(), '\n'), 12);
  const std::string corpus = FOREBAY_FUZZ_CORPUS;
  const Finished snapshot = forebay({"explain", corpus + "/pickle/fragmented-p4.pickle"});
  ASSERT_EQ(snapshot.exit_code, 0) << snapshot.output;
  EXPECT_NE(snapshot.output.find("FRAGMENTATION: 15.00 MiB failed although 24.00 MiB were free"),
            std::string::npos)
      << snapshot.output;
  EXPECT_NE(snapshot.output.find("train.py:33 forward"), std::string::npos) << snapshot.output;
}

}  // namespace
}  // namespace forebay::testing
