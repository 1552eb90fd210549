// Programs on the runtime API run on the two fakes, linked either way, and name the missing library without a
// driver.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "tests/support/process.h"

namespace forebay::testing {
namespace {

class FakeCudartTest : public ::testing::TestWithParam<const char*> {};

TEST_P(FakeCudartTest, AProgramOnTheRuntimeRunsOnTheFakeDriver) {
  const Finished finished =
      run_program({GetParam()}, {{"LD_LIBRARY_PATH", FAKE_CUDA_DIRECTORY ":" FAKE_CUDART_DIRECTORY},
                                 {"FAKE_CUDA_DEVICES", "2"},
                                 {"FAKE_CUDA_MEMORY", "67108864"},
                                 {"FAKE_CUDA_STRICT", "1"}});

  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(finished.output.find("devices 2, driver 13000, on 1, entry point yes"), std::string::npos)
      << finished.output;
  EXPECT_NE(finished.output.find("too much: CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos) << finished.output;
  EXPECT_NE(finished.output.find("free 67108864 of 67108864"), std::string::npos) << finished.output;
}

TEST_P(FakeCudartTest, WithoutADriverTheProgramIsTold) {
  const Finished finished = run_program({GetParam()}, {{"LD_LIBRARY_PATH", FAKE_CUDART_DIRECTORY}});

  if (finished.exit_code == 0) GTEST_SKIP() << "this machine has a driver of its own";
  EXPECT_EQ(finished.exit_code, 2) << finished.output;
  EXPECT_NE(finished.output.find("no driver: 35 cudaErrorInsufficientDriver"), std::string::npos)
      << finished.output;
}

INSTANTIATE_TEST_SUITE_P(Runtime, FakeCudartTest,
                         ::testing::Values(RUNTIME_PROGRAM_DYNAMIC, RUNTIME_PROGRAM_STATIC),
                         [](const auto& info) {
                           return std::string(info.param).find("dynamic") != std::string::npos ? "Dynamic"
                                                                                               : "Static";
                         });

std::string output_of(const std::string& command) {
  std::string output;
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  char line[512];
  while (std::fgets(line, sizeof(line), pipe) != nullptr) output += line;
  EXPECT_EQ(::pclose(pipe), 0);
  return output;
}

// Interposition meets versioned names in one, none in the other.
TEST(FakeCudartSymbols, AreVersionedInTheLibraryAndHiddenInTheProgram) {
  const std::string shared =
      output_of(CMAKE_NM " -D --defined-only --with-symbol-versions " FAKE_CUDART_LIBRARY);
  const std::string program = output_of(CMAKE_NM " -D --defined-only " RUNTIME_PROGRAM_STATIC);

  EXPECT_NE(shared.find(" cudaMalloc@@libcudart.so.13\n"), std::string::npos) << shared;
  EXPECT_EQ(program.find("cudaMalloc"), std::string::npos) << program;
}

}  // namespace
}  // namespace forebay::testing
