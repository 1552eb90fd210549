// `forebay devices` as a person runs it: without a driver, and on the fake driver with two devices.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/process.h"

namespace {

using Json = nlohmann::json;
using forebay::testing::Finished;
using forebay::testing::Process;
using forebay::testing::run_program;

Finished devices(const Process::Variables& variables, bool json) {
  std::vector<std::string> command{FOREBAY_COMMAND, "devices"};
  if (json) command.emplace_back("--json");
  return run_program(command, variables);
}

Process::Variables fake(const std::string& device_count) {
  return {{"FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA},
          {"FAKE_CUDA_DEVICES", device_count},
          {"FAKE_CUDA_MEMORY", "67108864"}};
}

const Process::Variables kNoDriver{{"FOREBAY_LIBCUDA", "/nowhere/libcuda.so.1"}};

TEST(DevicesCommand, ListsTheHostWhereThereIsNoDriver) {
  const Finished text = devices(kNoDriver, false);
  EXPECT_EQ(text.exit_code, 0) << text.output;
  EXPECT_EQ(text.output.find("driver   none: cannot open the CUDA driver"), 0u) << text.output;
  EXPECT_NE(text.output.find("\nhost     "), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("kernels: host "), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("\nflash    "), std::string::npos) << text.output;

  const Finished finished = devices(kNoDriver, true);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  const Json json = Json::parse(finished.output);
  EXPECT_EQ(json.at("driver").at("found"), false);
  EXPECT_NE(json.at("driver").at("reason").get<std::string>().find("/nowhere"), std::string::npos);
  EXPECT_EQ(json.at("driver").at("version"), nullptr);
  EXPECT_EQ(json.at("driver").at("path"), nullptr);
  EXPECT_TRUE(json.at("devices").empty());
  EXPECT_GT(json.at("host").at("memory_bytes").get<std::uint64_t>(), 0u);
  EXPECT_GT(json.at("host").at("processor_count").get<int>(), 0);
  EXPECT_TRUE(json.at("host").at("flash_directories").is_array());
  // Without devices there is one placement: the host's.
  const Json& topology = json.at("topology");
  EXPECT_FALSE(topology.at("nodes").empty());
  ASSERT_EQ(topology.at("placements").size(), 1u);
  EXPECT_EQ(topology.at("placements").at(0).at("device"), "host");
  EXPECT_EQ(topology.at("placements").at(0).at("processors"), topology.at("usable_processors"));
  EXPECT_NE(text.output.find("\ntopology by "), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("host ("), std::string::npos) << text.output;
}

TEST(DevicesCommand, PlacesTheDevicesOfAMachineWithTwoNodes) {
  if (!FOREBAY_HAVE_HWLOC) GTEST_SKIP() << "this build has no hwloc";
  Process::Variables variables = fake("4");
  variables["HWLOC_XMLFILE"] = FOREBAY_TWO_NODES;

  const Finished finished = devices(variables, true);
  const Finished text = devices(variables, false);

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  const Json topology = Json::parse(finished.output).at("topology");
  EXPECT_EQ(topology.at("usable_processors"), "0-7");
  ASSERT_EQ(topology.at("nodes").size(), 2u);
  EXPECT_EQ(topology.at("nodes").at(1).at("distances"), Json::array({21, 10}));
  ASSERT_EQ(topology.at("placements").size(), 4u);
  const char* const processors[] = {"0-1", "2-3", "4-5", "6-7"};
  for (int i = 0; i < 4; ++i) {
    const Json& placement = topology.at("placements").at(static_cast<std::size_t>(i));
    EXPECT_EQ(placement.at("device"), "cuda:" + std::to_string(i));
    EXPECT_EQ(placement.at("nodes"), Json::array({i / 2}));
    EXPECT_EQ(placement.at("memory_node"), i / 2);
    EXPECT_EQ(placement.at("processors"), processors[i]);
  }
  EXPECT_NE(text.output.find("cuda:3 (nearest NUMA node 1; share 2 of 2): threads on processors 6-7, kernels "
                             "on 1 core,\n         pinned memory on NUMA node 1\n"),
            std::string::npos)
      << text.output;
  EXPECT_NE(text.output.find(" nvme1n1: NUMA node 1\n"), std::string::npos) << text.output;
  EXPECT_NE(text.output.find(" eth0: NUMA node 1\n"), std::string::npos) << text.output;
}

TEST(DevicesCommand, ListsTheDevicesOfADriver) {
  const Finished finished = devices(fake("2"), true);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  const Json json = Json::parse(finished.output);
  EXPECT_EQ(json.at("driver").at("found"), true);
  EXPECT_EQ(json.at("driver").at("path"), FOREBAY_FAKE_LIBCUDA);
  EXPECT_EQ(json.at("driver").at("version"), "13.0");
  ASSERT_EQ(json.at("devices").size(), 2u);
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    const Json& device = json.at("devices").at(static_cast<std::size_t>(ordinal));
    EXPECT_EQ(device.at("ordinal"), ordinal);
    EXPECT_EQ(device.at("memory_bytes"), 67108864);
    EXPECT_EQ(device.at("free_bytes"), 67108864);
    EXPECT_EQ(device.at("granularity_bytes"), 2 << 20);
    EXPECT_EQ(device.at("posix_fd"), true);
    EXPECT_EQ(device.at("rdma"), true);
    EXPECT_EQ(device.at("peers"), Json::array({1 - ordinal}));
    EXPECT_EQ(device.at("numa_node"), nullptr);
    EXPECT_EQ(device.at("problem"), nullptr);
    EXPECT_EQ(device.at("uuid").get<std::string>().find("GPU-"), 0u);
  }

  const Finished text = devices(fake("2"), false);
  EXPECT_EQ(text.exit_code, 0) << text.output;
  EXPECT_NE(text.output.find(", CUDA 13.0\n"), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("\ncuda:1   "), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("peers cuda:0"), std::string::npos) << text.output;
}

TEST(DevicesCommand, SaysWhenADriverHasNoDevice) {
  const Finished finished = devices(fake("0"), false);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(finished.output.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << finished.output;
  EXPECT_EQ(finished.output.find("cuda:0"), std::string::npos) << finished.output;
}

TEST(DevicesCommand, FailsWhenItsOutputCannotBeWritten) {
  const Finished finished =
      run_program({"/bin/sh", "-c", std::string(FOREBAY_COMMAND) + " devices >/dev/full"}, kNoDriver);
  EXPECT_EQ(finished.exit_code, 1) << finished.output;
}

}  // namespace
