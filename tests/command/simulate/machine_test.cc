// Descriptions of devices and clusters: those that are installed, and refusals that name file and field.

#include "runtime/command/simulate/machine.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "runtime/command/machine/machine_description.h"
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
  EXPECT_NE(huge.message().find("it has more than 1.00 MiB"), std::string::npos) << huge.message();
  EXPECT_EQ(read_cluster("/proc/self/mem").status().code(), StatusCode::kIoError);
  // A point makes it a path too.
  EXPECT_EQ(read_cluster("missing.json").status().message(),
            "cannot read the cluster missing.json: No such file or directory; give a JSON file");
}

TEST(Machine, RefusesAnUnknownFieldOfAnEfficiency) {
  Json device = file("H100");
  device["matrix_efficiency"]["sauce"] = "me";
  EXPECT_NE(parse_device("mine.json", device.dump())
                .status()
                .message()
                .find("matrix_efficiency.sauce is not a field"),
            std::string::npos);
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

TEST(Machine, EachFigureHasItsField) {
  const auto figure = [](double value) { return Json{{"value", value}, {"source", "x"}}; };
  const Json device = {{"name", "small"},
                       {"memory_bytes", figure(1)},
                       {"memory_bytes_per_second", figure(2)},
                       {"memory_efficiency", figure(1)},
                       {"kernel_seconds", figure(0)},
                       {"queue_seconds", figure(4)},
                       {"flops", {{"fp32", figure(5)}, {"bf16", figure(6)}, {"fp16", figure(7)}}},
                       {"matrix_efficiency", {{"source", "x"}, {"points", {{8, 0.25}, {9, 1}}}}}};
  Json near = {{"name", "near"},
               {"ranks", 10},
               {"bytes_per_second", figure(11)},
               {"ranks_per_link", 12},
               {"latency_seconds", figure(13)},
               {"message_seconds", figure(14)},
               {"processor_seconds_per_byte", figure(15)}};
  Json far = {{"name", "far"},
              {"bytes_per_second", figure(16)},
              {"ranks_per_link", 17},
              {"latency_seconds", figure(0)},
              {"message_seconds", figure(18)}};
  const Json whole = {{"name", "mine"},
                      {"device", device},
                      {"host_ranks", 200'000},
                      {"host_memory_bytes", figure(1e18)},
                      {"host_bytes_per_second", figure(21)},
                      {"bus_bytes_per_second", figure(22)},
                      {"ranks_per_bus", 23},
                      {"drive_read_bytes_per_second", figure(24)},
                      {"drive_write_bytes_per_second", figure(25)},
                      {"control_seconds", figure(26)},
                      {"shared_processors", true},
                      {"links", {near, far}}};
  const ClusterDescription c = value_or_throw(parse_cluster("mine.json", whole.dump()));
  EXPECT_EQ(c.name, "mine");
  EXPECT_EQ(c.device.name, "small");
  EXPECT_EQ(c.device.memory_bytes, 1u);
  EXPECT_EQ(c.device.memory_bytes_per_second, 2);
  EXPECT_EQ(c.device.memory_efficiency, 1);
  EXPECT_EQ(c.device.kernel_seconds, 0);
  EXPECT_EQ(c.device.queue_seconds, 4);
  EXPECT_EQ(c.device.flops, (std::map<DataType, double>{
                                {DataType::kFloat32, 5}, {DataType::kBfloat16, 6}, {DataType::kFloat16, 7}}));
  EXPECT_EQ(c.device.matrix_efficiency, (std::vector<std::pair<double, double>>{{8, 0.25}, {9, 1}}));
  EXPECT_EQ(c.host_ranks, 200'000);
  EXPECT_EQ(c.host_memory_bytes, 1'000'000'000'000'000'000u);
  EXPECT_EQ(c.host_bytes_per_second, 21);
  EXPECT_EQ(c.bus_bytes_per_second, 22);
  EXPECT_EQ(c.ranks_per_bus, 23);
  EXPECT_EQ(c.drive_read_bytes_per_second, 24);
  EXPECT_EQ(c.drive_write_bytes_per_second, 25);
  EXPECT_EQ(c.control_seconds, 26);
  EXPECT_TRUE(c.shared_processors);
  ASSERT_EQ(c.links.size(), 2u);
  const auto figures = [](const LinkDescription& link) {
    return std::vector<double>{static_cast<double>(link.ranks),
                               link.bytes_per_second,
                               static_cast<double>(link.ranks_per_link),
                               link.latency_seconds,
                               link.message_seconds,
                               link.processor_seconds_per_byte};
  };
  EXPECT_EQ(c.links[0].name, "near");
  EXPECT_EQ(figures(c.links[0]), (std::vector<double>{10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(c.links[1].name, "far");
  EXPECT_EQ(figures(c.links[1]), (std::vector<double>{0, 16, 17, 0, 18, 0}));

  // Each limit, and the first value behind it.
  struct Case {
    const char* pointer;
    Json value;
    const char* problem;
  };
  Json many = Json::array({near, near, near, near});
  const Json most = many;
  many.push_back(near);
  const Case cases[] = {
      {"/name", "", "name is not a text; use \"...\""},
      {"/name", 1, "name is not a text; use \"...\""},
      {"/device/memory_bytes/value", 0,
       "device.memory_bytes.value is 0; use a number above 0, at most 1e+18"},
      {"/device/memory_bytes_per_second/value", 0,
       "device.memory_bytes_per_second.value is 0; use a number above 0"},
      {"/device/memory_efficiency/value", 1.01,
       "device.memory_efficiency.value is 1.01; use a number above 0, at most 1"},
      {"/device/memory_efficiency/value", 0,
       "device.memory_efficiency.value is 0; use a number above 0, at most 1"},
      {"/device/kernel_seconds/value", -1, "device.kernel_seconds.value is -1; use a number of at least 0"},
      {"/device/queue_seconds/value", -1, "device.queue_seconds.value is -1; use a number of at least 0"},
      {"/device/flops", Json::object(), "device.flops has no type; use fp32, bf16 or fp16"},
      {"/device/flops/int8", 1,
       "device.flops.int8 is not a field of a description; remove it, or correct its name"},
      {"/device/matrix_efficiency/points", Json::array(),
       "device.matrix_efficiency.points is not a list; use [[SIZE, PART], ...]"},
      {"/device/matrix_efficiency/points/1",
       {1},
       "device.matrix_efficiency.points[1] is not a pair; use [SIZE, PART]"},
      {"/device/matrix_efficiency/points/1",
       {8, 1},
       "device.matrix_efficiency.points[1][0] is 8; use a number above 8"},
      {"/device/matrix_efficiency/points/1",
       {9, 1.5},
       "device.matrix_efficiency.points[1][1] is 1.5; use a number above 0, at most 1"},
      {"/device/matrix_efficiency/points/0",
       {0, 1},
       "device.matrix_efficiency.points[0][0] is 0; use a number above 0"},
      {"/host_ranks", 200'001, "host_ranks is 200001; use a number of at least 1, at most 200000"},
      {"/host_memory_bytes/value", 1.1e18,
       "host_memory_bytes.value is 1.1e+18; use a number above 0, at most 1e+18"},
      {"/host_bytes_per_second/value", 0, "host_bytes_per_second.value is 0; use a number above 0"},
      {"/bus_bytes_per_second/value", 0, "bus_bytes_per_second.value is 0; use a number above 0"},
      {"/bus_bytes_per_second/note", 1,
       "bus_bytes_per_second.note is not a field of a description; remove it, or correct its name"},
      {"/ranks_per_bus", 0, "ranks_per_bus is 0; use a number of at least 1, at most 1e+06"},
      {"/ranks_per_bus", 1'000'001, "ranks_per_bus is 1000001; use a number of at least 1, at most 1e+06"},
      {"/drive_read_bytes_per_second/value", -1,
       "drive_read_bytes_per_second.value is -1; use a number of at least 0"},
      {"/drive_write_bytes_per_second/value", -1,
       "drive_write_bytes_per_second.value is -1; use a number of at least 0"},
      {"/control_seconds/value", -1, "control_seconds.value is -1; use a number of at least 0"},
      {"/links", many, "links is not a list of 1 to 4 levels"},
      {"/links/0/ranks", 0, "links[0].ranks is 0; use a number of at least 1, at most 1e+06"},
      {"/links/0/ranks_per_link", 0,
       "links[0].ranks_per_link is 0; use a number of at least 1, at most 1e+06"},
      {"/links/1/message_seconds/value", -1,
       "links[1].message_seconds.value is -1; use a number of at least 0"},
      {"/links/1", 3, "links[1] is not an object; use {...}"},
      {"/device", 3, "device is not an object; use {...}"},
  };
  for (const Case& one : cases) {
    Json json = whole;
    json[Json::json_pointer(one.pointer)] = one.value;
    EXPECT_EQ(problem_of_cluster(json), std::string("mine.json: ") + one.problem);
  }
  const std::pair<const char*, Json> allowed[] = {{"/links", most},
                                                  {"/ranks_per_bus", 1'000'000},
                                                  {"/drive_read_bytes_per_second/value", 0},
                                                  {"/drive_write_bytes_per_second/value", 0},
                                                  {"/control_seconds/value", 0},
                                                  {"/shared_processors", false}};
  for (const auto& [pointer, value] : allowed) {
    Json json = whole;
    json[Json::json_pointer(pointer)] = value;
    EXPECT_EQ(problem_of_cluster(json), "") << pointer;
  }
  for (const char* const field :
       {"name", "ranks", "bytes_per_second", "ranks_per_link", "latency_seconds", "message_seconds"}) {
    Json json = whole;
    json["links"][0].erase(field);
    EXPECT_EQ(problem_of_cluster(json), std::string("mine.json: links[0].") + field + " is missing");
  }
  Json json = whole;
  json["links"][0].erase("processor_seconds_per_byte");
  json.erase("shared_processors");
  const ClusterDescription without = value_or_throw(parse_cluster("mine.json", json.dump()));
  EXPECT_EQ(without.links[0].processor_seconds_per_byte, 0);
  EXPECT_FALSE(without.shared_processors);
  EXPECT_EQ(problem_of_cluster(Json::array()), "mine.json: the file is not an object; use {...}");
}

TEST(Machine, AFileHasABoundOfDepthAndSize) {
  const std::string at_most = std::string(16, '[') + std::string(16, ']');
  EXPECT_EQ(parse_cluster("mine.json", at_most).status().message(),
            "mine.json: the file is not an object; use {...}");
  EXPECT_EQ(parse_cluster("mine.json", "[" + at_most + "]").status().message(),
            "mine.json is nested deeper than 16 levels; compare it with an installed description");
  const testing::TemporaryDirectory directory;
  std::string text = file("dgx-2").dump();
  text.resize(std::size_t{1} << 20, ' ');
  std::ofstream(directory / "mine.json") << text;
  EXPECT_EQ(value_or_throw(read_cluster(directory / "mine.json")).name, "dgx-2");
  std::ofstream(directory / "mine.json") << text << ' ';
  EXPECT_EQ(read_cluster(directory / "mine.json").status().message(),
            "cannot read the cluster " + (directory / "mine.json") +
                ": it has more than 1.00 MiB; give a JSON file");
}

TEST(Machine, ThePlaceOfThisMachineIsTheFirstVariableThatIsSet) {
  struct Case {
    const char* machine;
    const char* cache;
    const char* home;
    const char* path;
  };
  const Case cases[] = {{"/m.json", "/cache", "/home/a", "/m.json"},
                        {"", "/cache", "/home/a", "/cache/forebay/machine.json"},
                        {"", "", "/home/a", "/home/a/.cache/forebay/machine.json"}};
  const char* const names[] = {"FOREBAY_MACHINE", "XDG_CACHE_HOME", "HOME"};
  std::vector<std::optional<std::string>> before;
  for (const char* const name : names) {
    const char* const value = std::getenv(name);
    before.push_back(value == nullptr ? std::nullopt : std::optional<std::string>(value));
  }
  const auto set = [&](const Case& one) {
    ::setenv(names[0], one.machine, 1);
    ::setenv(names[1], one.cache, 1);
    ::setenv(names[2], one.home, 1);
  };
  for (const Case& one : cases) {
    set(one);
    EXPECT_EQ(value_or_throw(this_machine_path()), one.path);
  }
  ::unsetenv(names[0]);
  ::unsetenv(names[1]);
  EXPECT_EQ(value_or_throw(this_machine_path()), "/home/a/.cache/forebay/machine.json");
  ::setenv(names[2], "", 1);
  EXPECT_EQ(this_machine_path().status().code(), StatusCode::kInvalidArgument);
  ::unsetenv(names[2]);
  EXPECT_EQ(this_machine_path().status().code(), StatusCode::kInvalidArgument);
  set({"/nowhere/m.json", "", "", ""});
  EXPECT_EQ(
      read_cluster("this").status().message(),
      "cannot read the cluster /nowhere/m.json: No such file or directory; measure this machine by forebay "
      "bench-tiers --save this");
  EXPECT_EQ(read_cluster("/nowhere/m.json").status().message(),
            "cannot read the cluster /nowhere/m.json: No such file or directory; give a JSON file");
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (before[i]) {
      ::setenv(names[i], before[i]->c_str(), 1);
    } else {
      ::unsetenv(names[i]);
    }
  }
}

TEST(Machine, EfficiencyLiesBetweenItsPoints) {
  DeviceDescription device;
  device.matrix_efficiency = {{10, 0.2}, {40, 0.6}, {160, 0.5}};
  const std::pair<double, double> cases[] = {{5, 0.025}, {10, 0.2},  {20, 0.4},  {40, 0.6},
                                             {80, 0.55}, {160, 0.5}, {1000, 0.5}};
  for (const auto& [size, part] : cases) {
    EXPECT_NEAR(matrix_efficiency(device, size, size, size), part, 1e-12) << size;
    EXPECT_NEAR(matrix_efficiency(device, size * 2, size / 4, size * 2), part, 1e-12) << size;
  }
}

// A report of forebay-gpt, as far as it is read.
Json run_report() {
  return {{"training", {{"layers", "3"}, {"hidden", "64"}, {"heads", "4"}, {"sequence", "32"}, {"batch", 5}}},
          {"micro_steps", 2},
          {"bucket_bytes", 4096},
          {"dtype", "bf16"},
          {"world_size", 1},
          {"offload", "none"},
          {"recompute", "none"},
          {"ranks", {{{"step_ms", 12.5}}}}};
}

TEST(MeasuredRun, IsWhatTheReportSays) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "run.json";
  const auto read = [&](const Json& json) {
    std::ofstream(path) << json.dump();
    return read_measured_run(path);
  };
  const MeasuredRun run = value_or_throw(read(run_report()));
  EXPECT_EQ(run.name, path);
  EXPECT_EQ(run.request.shape.layers, 3u);
  EXPECT_EQ(run.request.shape.hidden, 64u);
  EXPECT_EQ(run.request.shape.heads, 4u);
  EXPECT_EQ(run.request.shape.positions, 32u);
  EXPECT_EQ(run.request.shape.vocabulary, 256u);
  EXPECT_EQ(run.request.batch, 5u);
  EXPECT_EQ(run.request.options.micro_steps, 2);
  EXPECT_EQ(run.request.options.bucket_bytes, 4096u);
  EXPECT_EQ(run.request.options.dtype, DataType::kBfloat16);
  EXPECT_EQ(run.request.options.stage, 0);
  EXPECT_DOUBLE_EQ(run.step_seconds, 0.0125);

  struct Case {
    const char* pointer;
    Json value;
    const char* problem;
  };
  const char* const number = " is not a positive number; is it a report of forebay-gpt?";
  const Case cases[] = {{"/training/layers", "0", "layers"},        {"/training/hidden", nullptr, "hidden"},
                        {"/training/heads", -1, "heads"},           {"/training/sequence", 1.5, "sequence"},
                        {"/training/batch", "x", "batch"},          {"/micro_steps", 0, "micro_steps"},
                        {"/bucket_bytes", 0, "bucket_bytes"},       {"/world_size", 0, "world_size"},
                        {"/ranks/0/step_ms", 0, "ranks[0].step_ms"}};
  for (const Case& one : cases) {
    Json json = run_report();
    json[Json::json_pointer(one.pointer)] = one.value;
    EXPECT_EQ(read(json).status().message(), path + ": " + one.problem + number);
  }
  const Case others[] = {
      {"/dtype", 1, "dtype is missing; is it a report of forebay-gpt?"},
      {"/world_size", 2, "has several ranks; use a run with --ranks 1"},
      {"/offload", "optimizer", "offloads or recomputes; use a run that does neither"},
      {"/recompute", "1", "offloads or recomputes; use a run that does neither"},
  };
  for (const Case& one : others) {
    Json json = run_report();
    json[Json::json_pointer(one.pointer)] = one.value;
    EXPECT_EQ(read(json).status().message(), path + ": " + one.problem);
  }
  std::ofstream(path) << "{";
  EXPECT_EQ(read_measured_run(path).status().message(),
            path + ": is not JSON; use a report of forebay-gpt --report");
  EXPECT_EQ(read_measured_run(directory / "none").status().message(),
            "cannot read the report " + (directory / "none") +
                ": No such file or directory; use a report of forebay-gpt --report");
  // It has no end.
  EXPECT_EQ(
      read_measured_run("/dev/zero").status().message(),
      "cannot read the report /dev/zero: it is not a regular file; use a report of forebay-gpt --report");
}

TEST(MachineDescription, EachFigureHasItsField) {
  const testing::TemporaryDirectory directory;
  std::vector<MeasuredRun> runs;
  for (const char* const hidden : {"128", "64"}) {
    Json json = run_report();
    json["training"]["hidden"] = hidden;
    const std::string path = directory / hidden;
    std::ofstream(path) << json.dump();
    runs.push_back(value_or_throw(read_measured_run(path)));
    runs.back().name = hidden;
  }
  runs[0].step_seconds = 0.04;
  MachineFigures figures;
  figures.rank = {
      .ranks = 8,
      .host_ranks = 4,
      .kernel_bytes_per_second = 2e9,
      .copy_bytes_per_second = 3e9,
      .within_host = {.bytes_per_second = 4e9, .latency_seconds = 5e-6, .processor_seconds_per_byte = 6e-10},
      .between_hosts = {.bytes_per_second = 7e8,
                        .latency_seconds = 8e-5,
                        .processor_seconds_per_byte = 9e-10},
      .control_seconds = 1e-5};
  figures.processors = 2;
  figures.host_memory_bytes = std::uint64_t{64} << 30;
  figures.drive_read_bytes_per_second = 1.5e9;
  figures.drive_write_bytes_per_second = 1.25e9;
  const std::string text = value_or_throw(describe_machine(figures, runs));
  EXPECT_EQ(text.rfind(kMachineBeginning, 0), 0u) << text;
  Json json = Json::parse(text);
  const Json curve = json["device"]["matrix_efficiency"]["points"];
  const double flops = json["device"]["flops"]["bf16"]["value"];
  json["device"]["matrix_efficiency"]["points"] = Json::array();
  json["device"]["flops"]["bf16"]["value"] = 0;
  EXPECT_EQ(json, Json::parse(R"JSON({
  "name": "this",
  "device": {
    "name": "host",
    "memory_bytes": {"value": 17179869184.0, "source": "a rank's part of the host's"},
    "memory_bytes_per_second":
      {"value": 2e9, "source": "measured by forebay bench-tiers, 8 ranks at once: AdamW, one thread"},
    "memory_efficiency": {"value": 1, "source": "counted in memory_bytes_per_second"},
    "flops": {"bf16": {"value": 0, "source": "from runs of one rank: 64, 128"}},
    "matrix_efficiency": {"source": "from runs of one rank: 64, 128", "points": []},
    "kernel_seconds": {"value": 0, "source": "counted in matrix_efficiency"},
    "queue_seconds": {"value": 0, "source": "counted in matrix_efficiency"}},
  "host_ranks": 4,
  "host_memory_bytes": {"value": 68719476736.0, "source": "/proc/meminfo"},
  "host_bytes_per_second": {"value": 8e9, "source": "measured by forebay bench-tiers, 8 ranks at once: AdamW"},
  "bus_bytes_per_second": {"value": 3e9, "source": "measured by forebay bench-tiers, 8 ranks at once: copies"},
  "ranks_per_bus": 1,
  "drive_read_bytes_per_second": {"value": 1.5e9, "source": "measured by forebay bench-tiers, 8 ranks at once"},
  "drive_write_bytes_per_second": {"value": 1.25e9, "source": "measured by forebay bench-tiers, 8 ranks at once"},
  "control_seconds": {"value": 1e-5, "source": "measured by forebay bench-tiers, 8 ranks at once: barriers"},
  "shared_processors": true,
  "links": [
    {"name": "shm", "ranks": 4,
     "bytes_per_second": {"value": 4e9, "source": "measured by forebay bench-tiers, 8 ranks at once: collectives"},
     "ranks_per_link": 1,
     "latency_seconds": {"value": 5e-6, "source": "measured by forebay bench-tiers, 8 ranks at once: collectives"},
     "message_seconds": {"value": 0, "source": "counted in latency_seconds"},
     "processor_seconds_per_byte":
       {"value": 1.2e-9, "source": "measured by forebay bench-tiers, 8 ranks at once: collectives"}},
    {"name": "network",
     "bytes_per_second": {"value": 7e8, "source": "measured by forebay bench-tiers, 8 ranks at once: collectives"},
     "ranks_per_link": 1,
     "latency_seconds": {"value": 8e-5, "source": "measured by forebay bench-tiers, 8 ranks at once: collectives"},
     "message_seconds": {"value": 0, "source": "counted in latency_seconds"},
     "processor_seconds_per_byte":
       {"value": 1.8e-9, "source": "measured by forebay bench-tiers, 8 ranks at once: collectives"}}]})JSON"));
  // The best point is 1, the first is flat, and each run takes its time.
  ASSERT_EQ(curve.size(), 3u);
  EXPECT_EQ(curve[0][0], 8.0);
  EXPECT_NEAR(curve[1][0].get<double>(), std::cbrt(5.0 * 32 * 4 * 64 * 64), 1e-9);
  EXPECT_NEAR(curve[2][0].get<double>(), std::cbrt(5.0 * 32 * 4 * 128 * 128), 1e-9);
  EXPECT_EQ(curve[0][1], curve[1][1]);
  EXPECT_EQ(std::max(curve[1][1].get<double>(), curve[2][1].get<double>()), 1.0);
  EXPECT_GT(flops, 0);
  for (const MeasuredRun& run : runs) {
    SimulationRequest request = run.request;
    request.cluster = value_or_throw(parse_cluster("this.json", text));
    EXPECT_NEAR(value_or_throw(simulate(request)).step_seconds / run.step_seconds, 1, 0.01) << run.name;
  }

  // Processors of their own, one host, one rank.
  const auto described = [&] { return Json::parse(value_or_throw(describe_machine(figures, runs))); };
  figures.processors = 8;
  figures.link = LinkKind::kGloo;
  json = described();
  EXPECT_EQ(json["shared_processors"], false);
  EXPECT_EQ(json["links"][0]["name"], "tcp");
  EXPECT_EQ(json["links"][0]["processor_seconds_per_byte"]["value"], 0.0);
  figures.processors = 7;
  json = described();
  EXPECT_EQ(json["shared_processors"], true);
  EXPECT_EQ(json["links"][0]["processor_seconds_per_byte"]["value"], 6e-10);
  figures.rank.host_ranks = 1;  // On each of eight hosts.
  json = described();
  EXPECT_EQ(json["links"].size(), 1u);
  EXPECT_EQ(json["links"][0]["name"], "network");
  EXPECT_FALSE(json["links"][0].contains("ranks"));
  figures.rank.ranks = 1;
  json = described();
  EXPECT_EQ(json["links"].size(), 1u);
  EXPECT_EQ(json["links"][0]["name"], "tcp");
  EXPECT_FALSE(json["links"][0].contains("ranks"));
  EXPECT_EQ(json["links"][0]["bytes_per_second"]["value"], 1e9);

  std::vector<MeasuredRun> same = {runs[0], runs[0]};
  same[1].name = "again";
  EXPECT_EQ(describe_machine(figures, same).status().message(),
            "again: has the same sizes as another run; leave one out");
  std::vector<MeasuredRun> types = runs;
  types[0].request.options.dtype = DataType::kFloat32;
  EXPECT_EQ(describe_machine(figures, types).status().message(),
            "128: has another type than 64; use runs of one type");
}

}  // namespace
}  // namespace forebay
