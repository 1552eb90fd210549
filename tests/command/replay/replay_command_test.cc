// `forebay replay` and `forebay explain` as a person runs them.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/pickle_writer.h"
#include "tests/support/process.h"

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
  const Json& calls = one.at("driver_calls_per_pass");
  ASSERT_EQ(calls.size(), one.at("repeats").get<std::size_t>());
  EXPECT_GT(calls.at(0).get<int>(), 0);
  EXPECT_EQ(calls.back(), 0);
  EXPECT_GT(one.at("malloc_miss_count").get<int>(), 0);
  EXPECT_GE(one.at("malloc_miss_ns").at("worst").get<double>(),
            one.at("malloc_miss_ns").at("p50").get<double>());
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
  for (const char* memory : {"lots", "-1", "0", "2047KiB", "80gibi", "65TiB", "1e30", "nan"}) {
    const Finished run = forebay({"replay", path, "--memory", memory});
    EXPECT_EQ(run.exit_code, 2) << memory;
    EXPECT_EQ(run.output.find(std::string("forebay replay: --memory is '") + memory +
                              "'; use 2.00 MiB to 64.00 TiB, in bytes or with KiB, MiB, GiB, TiB"),
              0u)
        << run.output;
  }
  const Finished asked = forebay({"replay", path, "--memory", "5"});
  EXPECT_EQ(asked.exit_code, 2);
  EXPECT_EQ(asked.output, "forebay replay: --memory is 5 bytes; did you mean 5GiB?\n");
  EXPECT_EQ(forebay({"replay", path, "--device", "tpu"}).exit_code, 2);
  EXPECT_EQ(forebay({"replay", path, "--device", "cuda:x"}).exit_code, 2);
  EXPECT_EQ(forebay({"replay", path, "--repeat", "0"}).exit_code, 2);
  EXPECT_EQ(forebay({"replay", directory_ / "none"}).exit_code, 2);
}

// The fake driver is a device with the chunks of the host backend. One stream, because another one gets a
// block only after the device's work on it.
TEST_F(ReplayCommand, ADeviceOfADriverGivesTheFiguresOfTheHost) {
  const std::string path = write(
      "small.trace", "a 0 4194304 0\n# warm\na 1 33554432 0\na 2 1048576 0\nf 1\na 3 20971520 0\nf 3\nf 2\n");
  const Process::Variables driver{{"FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA}, {"FAKE_CUDA_DEVICES", "2"}};
  const auto on = [&](const std::string& device) {
    const Finished run = run_program({FOREBAY_COMMAND, "replay", path, "--device", device, "--memory",
                                      "64MiB", "--baseline", "--minimum-capacity", "--json"},
                                     driver);
    EXPECT_EQ(run.exit_code, 0) << run.output;
    return run.exit_code == 0 ? Json::parse(run.output).at(0) : Json();
  };
  const Json host = on("host");
  ASSERT_FALSE(host.is_null());
  for (const char* device : {"cuda", "cuda:0", "cuda:1"}) {
    const Json cuda = on(device);
    ASSERT_FALSE(cuda.is_null()) << device;
    for (const char* key : {"completed", "peak_requested_bytes", "peak_physical_bytes", "fragmentation",
                            "minimum_capacity_bytes", "driver_calls", "driver_calls_per_pass",
                            "steady_driver_calls_per_repeat", "malloc_miss_count"})
      EXPECT_EQ(cuda.at(key), host.at(key)) << device << ": " << key;
    EXPECT_EQ(cuda.at("baseline").at("peak_physical_bytes"), host.at("baseline").at("peak_physical_bytes"));
  }
}

TEST_F(ReplayCommand, NamesTheDeviceThatADriverDoesNotHave) {
  const std::string path = write("small.trace", kTrace);
  const Finished run = run_program({FOREBAY_COMMAND, "replay", path, "--device", "cuda:1"},
                                   {{"FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA}, {"FAKE_CUDA_DEVICES", "1"}});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.output, "forebay replay: cannot make a backend on cuda:1: there is 1 device; give 0\n");
}

TEST_F(ReplayCommand, CountsOnePassAsOne) {
  const std::string path = write("small.trace", kTrace);
  const std::string one = forebay({"replay", path, "--repeat", "1"}).output;
  EXPECT_NE(one.find("; 1 pass each."), std::string::npos) << one;
  const std::string two = forebay({"replay", path, "--repeat", "2"}).output;
  EXPECT_NE(two.find("; 2 passes each, everything freed in between."), std::string::npos) << two;
  EXPECT_NE(forebay({"explain", path}).output.find(", 6 events, 1 block live before\n"), std::string::npos);
}

TEST_F(ReplayCommand, SaysWhenTheHostHasNoMemoryForAFile) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs more addresses than a limit leaves";
#endif
  const std::string path = write("large.trace", "a 0 1 0\n");
  std::filesystem::resize_file(path, 1u << 30);
  for (const char* command : {"replay", "explain"}) {
    const Finished run = run_program(
        {"/bin/sh", "-c",
         std::string("ulimit -v 900000 && exec ") + FOREBAY_COMMAND + " " + command + " " + path});
    EXPECT_EQ(run.exit_code, 2) << run.output;
    EXPECT_NE(run.output.find("the host has no memory for its 1.00 GiB"), std::string::npos) << run.output;
  }
}

TEST_F(ReplayCommand, EndsWithTheCodeOfTheSignalThatEndsIt) {
  const std::string path = directory_ / "pipe.trace";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  for (const int signal : {SIGTERM, SIGINT}) {
    Process process({FOREBAY_COMMAND, "replay", path});
    process.signal(signal);
    EXPECT_EQ(process.finish().exit_code, 128 + signal);
  }
}

// A terminal that records the output of a program.
class Terminal {
 public:
  explicit Terminal(unsigned short width) : master_(::posix_openpt(O_RDWR | O_NOCTTY)) {
    EXPECT_EQ(::grantpt(master_), 0);
    EXPECT_EQ(::unlockpt(master_), 0);
    name_ = ::ptsname(master_);
    slave_ = ::open(name_.c_str(), O_RDWR | O_NOCTTY);
    winsize size{};
    size.ws_col = width;
    EXPECT_EQ(::ioctl(slave_, TIOCSWINSZ, &size), 0);
    reader_ = std::thread([this] {
      char part[4096];
      for (ssize_t count; (count = ::read(master_, part, sizeof(part))) > 0;) {
        text_.append(part, static_cast<std::size_t>(count));
      }
    });
  }
  ~Terminal() { ::close(master_); }
  const std::string& name() const { return name_; }
  // The recorded output. Requires: the program has ended.
  const std::string& finish() {
    ::close(slave_);
    reader_.join();
    return text_;
  }

 private:
  const int master_;
  int slave_ = -1;
  std::string name_;
  std::string text_;
  std::thread reader_;
};

TEST_F(ReplayCommand, ExplainTellsATerminalHowFarItIs) {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "a " + std::to_string(i) + " 65536 0\n";
  const std::string path = write("long.trace", text);
  Terminal terminal(60);
  const Finished run = run_program(
      {"/bin/sh", "-c", std::string(FOREBAY_COMMAND) + " explain " + path + " 2>" + terminal.name()});
  const std::string& shown = terminal.finish();

  ASSERT_EQ(run.exit_code, 0) << run.output;
  EXPECT_EQ(run.output.find('\r'), std::string::npos) << "progress is for the terminal alone";
  EXPECT_NE(shown.find("\rreading "), std::string::npos) << shown;
  EXPECT_NE(shown.find("\rlong.trace: smallest capacity of the arena, probe 1,"), std::string::npos) << shown;
  EXPECT_EQ(shown.substr(shown.size() - 4), "\r\x1b[K") << "the line is gone in the end";
  for (std::size_t at = 0, end; at < shown.size(); at = end + 1) {
    end = std::min(shown.find('\r', at), shown.size());
    EXPECT_LT(end - at, 60 + std::string("\x1b[K").size()) << "a line that wraps cannot be written over";
  }
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

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void expect_page(const std::string& page, const std::string& text) {
  EXPECT_NE(page.find(text), std::string::npos) << "missing: " << text << "\n" << page;
}

TEST_F(ReplayCommand, ExplainDrawsThePageOfADeadJob) {
  const std::string snapshot = std::string(FOREBAY_FUZZ_CORPUS) + "/pickle/fragmented-p4.pickle";
  const Finished run = forebay({"explain", snapshot, "--report", directory_ / "report"});

  ASSERT_EQ(run.exit_code, 0) << run.output;
  const std::string page = read_file(directory_ / "report/report.html");
  expect_page(page, "FRAGMENTATION: 15.00 MiB failed although 24.00 MiB were free");
  expect_page(page, "Memory over time");
  expect_page(page, "event 0");
  expect_page(page, "Blocks at the peak, event ");
  expect_page(page, "Blocks at the first out-of-memory of the recording (15.00 MiB asked for), event ");
  expect_page(page, "Holders of memory at the peak");
  expect_page(page, "train.py:33 forward");
  expect_page(page, "A caching allocator would reserve");
  expect_page(page, "fragmented-p4.pickle");
}

TEST_F(ReplayCommand, ReplayDrawsThePageOfEveryTrace) {
  const std::string small = write("small.trace", kTrace);
  const std::string other = write("other.trace", "a 0 1048576 0\na 1 3145728 9\nf 0\n");
  const Finished run =
      forebay({"replay", small, other, "--memory", "1GiB", "--report", directory_ / "report"});

  ASSERT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(run.output.find("small.trace"), std::string::npos) << "the tables are printed too";
  const std::string page = read_file(directory_ / "report/report.html");
  expect_page(page, "small.trace");
  expect_page(page, "other.trace");
  expect_page(page, "Peak requested</dt><dd>37.00 MiB");  // 4 + 32 + 1.
  expect_page(page, "There was</dt><dd>1.00 GiB");
  expect_page(page, "Driver calls of the first pass");
  expect_page(page, "stream 3");
}

// Blocks of which every other one is freed, then larger ones: the first pass wastes memory, later ones less.
std::string thinned_out_trace() {
  std::string text;
  for (int i = 0; i < 200; ++i) text += "a " + std::to_string(i) + " 11000320 0\n";
  for (int i = 0; i < 200; i += 2) text += "f " + std::to_string(i) + "\n";
  for (int i = 200; i < 245; ++i) text += "a " + std::to_string(i) + " 22000640 0\n";
  return text;
}

TEST_F(ReplayCommand, LearnsPlacementsForALaterRun) {
  const std::string trace = write("thin.trace", thinned_out_trace());
  const Finished taught = forebay({"replay", trace, "--json", "--learn", directory_ / "thin.learned"});
  ASSERT_EQ(taught.exit_code, 0) << taught.output;
  const Finished again = forebay({"replay", trace, "--json", "--learned", directory_ / "thin.learned"});
  ASSERT_EQ(again.exit_code, 0) << again.output;

  const Json before = Json::parse(taught.output)[0];
  const Json after = Json::parse(again.output)[0];
  EXPECT_LE(after["fragmentation"], before["fragmentation_last_repeat"]);
  EXPECT_EQ(after["driver_calls_per_pass"][1], 0);
  // The file may be written over, and no other.
  EXPECT_EQ(forebay({"replay", trace, "--learn", directory_ / "thin.learned"}).exit_code, 0);
  const Finished other = forebay({"replay", trace, "--learn", trace});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_NE(other.output.find("was not written by --learn"), std::string::npos) << other.output;
}

// Steps of many lengths, each placed in its own way.
std::string changing_trace() {
  std::string text;
  std::mt19937 random(1);
  int block = 0;
  for (int step = 0; step < 40; ++step) {
    const int first = block;
    for (int i = 0; i < 24; ++i)
      text += "a " + std::to_string(block++) + " " + std::to_string(700000 * (1 + random() % 40)) + " 0\n";
    for (int i = 0; i < 24; i += 2) text += "f " + std::to_string(first + i) + "\n";
    for (int i = 0; i < 6; ++i)
      text += "a " + std::to_string(block++) + " " + std::to_string(700000 * (20 + random() % 40)) + " 0\n";
    for (int i = first + 1; i < first + 24; i += 2) text += "f " + std::to_string(i) + "\n";
    for (int i = first + 24; i < block; ++i) text += "f " + std::to_string(i) + "\n";
  }
  return text;
}

TEST_F(ReplayCommand, SaysThatTheLimitOfMappingsKeepsAJobFromSettling) {
  const std::string trace = write("changing.trace", changing_trace());
  const Finished usual = forebay({"replay", trace});
  const Finished limited = forebay({"replay", trace, "--mappings-max", "32"});

  ASSERT_EQ(usual.exit_code, 0) << usual.output;
  EXPECT_EQ(usual.output.find("mappings"), std::string::npos) << usual.output;
  ASSERT_EQ(limited.exit_code, 0) << limited.output;
  EXPECT_NE(limited.output.find(" to keep about 32; "), std::string::npos) << limited.output;
  EXPECT_NE(limited.output.find(" are enough (--mappings-max)"), std::string::npos) << limited.output;
}

TEST_F(ReplayCommand, RefusesPlacementsThatItCannotUse) {
  const std::string trace = write("small.trace", kTrace);
  const auto refused = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"replay", trace});
    const Finished run = forebay(arguments);
    EXPECT_EQ(run.exit_code, 2) << run.output;
    return run.output;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };

  EXPECT_TRUE(has(refused({"--learned", trace}), "is none of `forebay replay --learn`"));
  EXPECT_TRUE(has(refused({"--learned", directory_ / "none"}), "No such file"));
  ASSERT_EQ(::mkfifo((directory_ / "pipe").c_str(), 0600), 0);
  for (const std::string& special : {directory_ / "pipe", directory_ / ".", std::string("/dev/zero")})
    EXPECT_TRUE(has(refused({"--learned", special}), "it is not a regular file"));
  EXPECT_TRUE(has(refused({"--learn", directory_ / "new", "--repeat", "2"}), "use 3 or more"));
  EXPECT_TRUE(has(refused({trace, "--learn", directory_ / "new"}), "the trace of one device"));
  EXPECT_FALSE(std::filesystem::exists(directory_ / "new"));
}

TEST_F(ReplayCommand, AReportIsNotWrittenOverAnother) {
  const std::string small = write("small.trace", kTrace);
  ASSERT_EQ(forebay({"explain", small, "--report", directory_ / "report"}).exit_code, 0);
  for (const char* command : {"explain", "replay"}) {
    const Finished again = forebay({command, small, "--report", directory_ / "report"});
    EXPECT_EQ(again.exit_code, 2);
    EXPECT_NE(again.output.find("has a report already; name an empty directory"), std::string::npos)
        << again.output;
    const Finished lost = forebay({command, small, "--report", directory_ / "no/such"});
    EXPECT_EQ(lost.exit_code, 2);
    EXPECT_NE(lost.output.find("cannot make --report"), std::string::npos) << lost.output;
  }
}

}  // namespace
}  // namespace forebay::testing
