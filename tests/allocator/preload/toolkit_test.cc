// NVIDIA's own binaries under the preload, where the toolkit is installed. Their runtime looks all functions
// up before it asks for the driver's private tables, which the fake does not have: so every look-up can be
// seen to go through the hook, and the error after it is theirs.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "tests/allocator/preload/preload_run.h"

namespace forebay::testing {
namespace {

struct Binary {
  std::string name;
  std::vector<std::string> command;
  std::string file;  // Without it there is nothing to test.
};

void PrintTo(const Binary& binary, std::ostream* stream) {
  *stream << binary.name;
}

const std::string kToolkit = PRELOAD_TOOLKIT_DIRECTORY;

std::vector<Binary> binaries() {
  const auto opened = [](const std::string& name, const std::string& what, const std::string& library) {
    return Binary{
        name, {program("toolkit_program"), what, kToolkit + "/" + library}, kToolkit + "/" + library};
  };
  return {opened("Runtime", "runtime", "libcudart.so.13"),
          {"StaticRuntime", {program("toolkit_static_program")}, program("toolkit_static_program")},
          opened("Cublas", "cublas", "libcublas.so.13"),
          opened("Nccl", "nccl", "libnccl.so.2")};
}

struct LookUp {
  std::string name;
  int version;
  int flags;
  std::string from;
  friend bool operator<(const LookUp& a, const LookUp& b) {
    return std::tie(a.name, a.version, a.flags) < std::tie(b.name, b.version, b.flags);
  }
};

class PreloadToolkit : public ::testing::TestWithParam<Binary> {
 protected:
  void SetUp() override {
    if (kSanitized)
      GTEST_SKIP() << "the fake needs a sanitizer's runtime, which NVIDIA's programs do not have";
    if (!std::filesystem::exists(GetParam().file)) {
      GTEST_SKIP() << "the CUDA toolkit 13 is not installed here with " << GetParam().file;
    }
  }
  // On the fake behind the spy.
  Finished run_spied(bool preloaded, std::vector<LookUp>* look_ups) const {
    const TemporaryDirectory directory;
    Process::Variables variables = {{"LD_LIBRARY_PATH", program("spy")},
                                    {"SPY_DRIVER", kFakeDirectory + "/libcuda.so.1"},
                                    {"SPY_LOG", directory / "log"}};
    if (preloaded) variables.emplace("LD_PRELOAD", kPreloadLibrary);
    const Finished finished = run_program(GetParam().command, variables);
    std::ifstream log(directory / "log");
    for (LookUp one; log >> one.name >> one.version >> one.flags >> one.from;) {
      // The runtime starts the driver, and then forebay looks its own functions up.
      if (one.from.rfind("libforebay-core", 0) != 0) look_ups->push_back(one);
    }
    std::sort(look_ups->begin(), look_ups->end());
    return finished;
  }
};

TEST_P(PreloadToolkit, SendsEveryLookUpThroughTheHook) {
  std::vector<LookUp> bare, hooked;
  const Finished without = run_spied(false, &bare);
  const Finished with = run_spied(true, &hooked);

  EXPECT_EQ(with.exit_code, without.exit_code) << with.output;
  EXPECT_EQ(with.output, without.output);
  ASSERT_EQ(hooked.size(), bare.size());
  EXPECT_GE(hooked.size(), 400u);
  int allocations = 0;
  for (std::size_t i = 0; i < hooked.size(); ++i) {
    EXPECT_EQ(hooked[i].name, bare[i].name);
    EXPECT_EQ(hooked[i].version, bare[i].version) << hooked[i].name;
    EXPECT_EQ(hooked[i].flags, bare[i].flags) << hooked[i].name;
    EXPECT_EQ(hooked[i].from, "libforebay-preload.so") << hooked[i].name;
    EXPECT_NE(bare[i].from, "libforebay-preload.so") << bare[i].name;
    allocations += hooked[i].name == "cuMemAlloc" && hooked[i].version >= 3020;
    allocations += hooked[i].name == "cuMemAllocAsync";  // With both meanings of a null stream.
  }
  EXPECT_GE(allocations, 3);
  std::printf("%zu look-ups, all through the hook\n", hooked.size());
}

TEST_P(PreloadToolkit, PrintsTheSameWithoutADriver) {
  const Finished bare = run_program(GetParam().command);
  const Finished run = run_program(GetParam().command, {{"LD_PRELOAD", kPreloadLibrary}});

  EXPECT_EQ(run.exit_code, bare.exit_code);
  EXPECT_EQ(run.output, bare.output);
}

INSTANTIATE_TEST_SUITE_P(Binaries, PreloadToolkit, ::testing::ValuesIn(binaries()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace forebay::testing
