// Descriptions of devices and clusters: those that are installed, and refusals that name file and field.

#include "runtime/command/simulate/machine.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "runtime/command/simulate/machine_files.h"
#include "tests/support/temporary_directory.h"

namespace forebay {
namespace {

using Json = nlohmann::json;

Json file(std::string_view name) {
  for (const MachineFile& one : machine_files()) {
    if (one.name == name) return Json::parse(one.text);
  }
  ADD_FAILURE() << name;
  return {};
}

std::string problem_of_cluster(const Json& json) {
  return parse_cluster("mine.json", json.dump()).status().message();
}

TEST(Machine, ReadsAllInstalledDescriptions) {
  EXPECT_EQ(device_names().size(), 7u);
  for (const std::string& name : device_names()) {
    const DeviceDescription device = value_or_throw(read_device(name));
    EXPECT_EQ(device.name, name);
  }
  EXPECT_EQ(cluster_names(), (std::vector<std::string>{"dgx-2", "dgx-a100", "dgx-h100"}));
  for (const std::string& name : cluster_names()) {
    const ClusterDescription cluster = value_or_throw(read_cluster(name));
    EXPECT_EQ(cluster.links.front().ranks, cluster.host_ranks) << name;
  }
  EXPECT_EQ(value_or_throw(read_cluster("dgx-2")).device.memory_bytes, 32ull << 30);
}

TEST(Machine, EveryFigureHasASource) {
  for (const char* const name : {"V100-32", "dgx-2"}) {
    const Json whole = file(name);
    for (const auto& [field, value] : whole.items()) {
      if (!value.is_object() || !value.contains("source")) continue;
      Json without = whole;
      without[field].erase("source");
      const Status status = name == std::string("dgx-2") ? parse_cluster("x.json", without.dump()).status()
                                                         : parse_device("x.json", without.dump()).status();
      EXPECT_NE(status.message().find("x.json: " + field + ".source is missing"), std::string::npos)
          << status.message();
    }
  }
}

TEST(Machine, NamesFileAndFieldOfABadFigure) {
  struct Case {
    const char* pointer;
    Json value;  // Null: the field is removed.
    const char* problem;
  };
  const Case cases[] = {
      {"/bus_bytes_per_second/value", -1, "bus_bytes_per_second.value is -1; use a number above 0"},
      {"/bus_bytes_per_second/value", "fast", "bus_bytes_per_second.value is \"fast\"; use a number"},
      {"/host_ranks", 0, "host_ranks is 0; use a number of at least 1"},
      {"/host_ranks", 1.5, "host_ranks is not whole"},
      {"/links/1/latency_seconds/value", -1e-6, "links[1].latency_seconds.value is -1e-06"},
      {"/links/0/bytes_per_second/value", 0, "links[0].bytes_per_second.value is 0"},
      {"/device", "V200", "device is unknown: there is no description of device 'V200'; use V100-32"},
      {"/hosts", 4, "hosts is not a field of a description"},
      {"/shared_processors", 1, "shared_processors is 1; use true or false"},
      {"/links/0/processor_seconds_per_byte",
       {{"value", -1}, {"source", "x"}},
       "links[0].processor_seconds_per_byte.value is -1"},
      {"/links", Json::array(), "links is not a list of 1 to 4 levels"},
  };
  for (const Case& one : cases) {
    Json json = file("dgx-2");
    json[Json::json_pointer(one.pointer)] = one.value;
    const std::string problem = problem_of_cluster(json);
    EXPECT_EQ(problem.rfind("mine.json: ", 0), 0u) << problem;
    EXPECT_NE(problem.find(one.problem), std::string::npos) << one.problem << "\n" << problem;
  }
  const Json whole = file("dgx-2");
  for (const auto& [field, value] : whole.items()) {
    Json json = whole;
    json.erase(field);
    EXPECT_EQ(problem_of_cluster(json), "mine.json: " + field + " is missing");
  }
  EXPECT_NE(parse_cluster("mine.json", "{").status().message().find("mine.json is not JSON"),
            std::string::npos);
}

TEST(Machine, RefusesHostileTextWithFewWords) {
  std::string deep = "{\"bus_bytes_per_second\": {\"value\": ";
  deep += std::string(500'000, '[') + std::string(500'000, ']') + "}}";
  std::vector<std::string> problems = {parse_cluster("mine.json", deep).status().message()};
  EXPECT_NE(problems[0].find("mine.json is nested deeper than 16 levels"), std::string::npos);

  const std::string odd = "\x1b[2J" + std::string(100'000, 'x');
  const std::pair<const char*, Json> cases[] = {
      {"/host_ranks", odd}, {"/device", odd}, {"/bus_bytes_per_second/value", Json::array({odd})}};
  for (const auto& [pointer, value] : cases) {
    Json json = file("dgx-2");
    json[Json::json_pointer(pointer)] = value;
    problems.push_back(problem_of_cluster(json));
  }
  Json json = file("dgx-2");
  json[odd] = 1;
  problems.push_back(problem_of_cluster(json));
  for (const std::string& problem : problems) {
    EXPECT_FALSE(problem.empty());
    EXPECT_LT(problem.size(), 400u);
    EXPECT_EQ(problem.find('\x1b'), std::string::npos) << problem;
  }
  json = file("dgx-2");
  json["name"] = odd;
  EXPECT_LT(value_or_throw(parse_cluster("mine.json", json.dump())).name.size(), 100u);
}

TEST(Machine, MemoryAndRanksHaveABound) {
  Json json = file("dgx-2");
  json["host_memory_bytes"]["value"] = 1e30;
  EXPECT_NE(problem_of_cluster(json).find("host_memory_bytes.value is 1e+30"), std::string::npos)
      << problem_of_cluster(json);
  json = file("dgx-2");
  json["host_ranks"] = 1'000'000;
  EXPECT_NE(problem_of_cluster(json).find("at most 200000"), std::string::npos) << problem_of_cluster(json);
}

TEST(Machine, ReadsNoDevicesAndNoHugeFiles) {
  const Status device = read_cluster("/dev/zero").status();
  EXPECT_EQ(device.code(), StatusCode::kIoError);
  const testing::TemporaryDirectory directory;
  std::ofstream(directory / "huge.json") << "{";
  std::filesystem::resize_file(directory / "huge.json", std::uintmax_t{1} << 40);
  const Status huge = read_cluster(directory / "huge.json").status();
  EXPECT_NE(huge.message().find("larger than 1 MiB"), std::string::npos) << huge.message();
  EXPECT_EQ(read_cluster("/proc/self/mem").status().code(), StatusCode::kIoError);
}

TEST(Machine, ADescriptionMayHaveItsDeviceWithin) {
  Json json = file("dgx-2");
  json["device"] = file("H100");
  EXPECT_EQ(value_or_throw(parse_cluster("mine.json", json.dump())).device.name, "H100");
  json["device"]["flops"]["fp16"]["value"] = -5;
  EXPECT_NE(problem_of_cluster(json).find("mine.json: device.flops.fp16.value is -5"), std::string::npos)
      << problem_of_cluster(json);
}

TEST(Machine, NamesTheClustersThatThereAre) {
  const std::string problem = read_cluster("dgx-3").status().message();
  EXPECT_NE(problem.find("'dgx-3'; use dgx-2, dgx-a100, dgx-h100, this, or the path"), std::string::npos)
      << problem;
  EXPECT_EQ(read_cluster("./none.json").status().code(), StatusCode::kIoError);
}

TEST(Machine, TheEfficiencyOfProductsGrowsWithTheirSize) {
  const DeviceDescription device = value_or_throw(read_device("V100-32"));
  EXPECT_DOUBLE_EQ(matrix_efficiency(device, 8192, 8192, 8192), 0.664);
  EXPECT_DOUBLE_EQ(matrix_efficiency(device, 1e6, 1e6, 1e6), 0.664);
  double last = 0;
  for (double size = 32; size < 20'000; size *= 1.3) {
    const double now = matrix_efficiency(device, size, size, size);
    EXPECT_GE(now, last) << size;
    last = now;
  }
  EXPECT_NEAR(matrix_efficiency(device, 128, 128, 128), device.matrix_efficiency[0].second / 8, 1e-9);
}

}  // namespace
}  // namespace forebay
