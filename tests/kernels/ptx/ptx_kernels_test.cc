// Every kernel that nvcc compiled for this build, executed from its PTX and compared with its definition bit
// for bit.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/fakes/cuda/ptx/parser.h"
#include "tests/kernels/kernel_test_support.h"
#include "tests/kernels/ptx/kernel_case.h"

namespace forebay::ptx_test {
namespace {

// Far more than the largest case needs.
constexpr std::uint64_t kMostInstructions = 100'000'000;

void expect_all_same(const std::string& text, const std::vector<KernelCase>& cases) {
  if (text.empty()) GTEST_SKIP() << "nvcc was not found when this was built, so there is no PTX to execute";
  const ptx::Module module = ptx::parse(text);
  std::set<std::string> executed;
  std::uint64_t values = 0, differences = 0, instructions = 0;
  for (const KernelCase& wanted : cases) {
    const auto kernel = module.kernels.find(wanted.kernel);
    ASSERT_NE(kernel, module.kernels.end()) << wanted.kernel << " is not in the image";
    SCOPED_TRACE(wanted.kernel + " (" + wanted.description + ")");
    try {
      const Comparison compared = compare(wanted, kernel->second, kMostInstructions);
      EXPECT_EQ(compared.differences, 0u) << compared.first_difference;
      values += compared.values;
      differences += compared.differences;
      instructions += compared.instructions;
    } catch (const ptx::Fault& fault) {
      ADD_FAILURE() << fault.what();
    }
    executed.insert(wanted.kernel);
  }
  for (const auto& [name, kernel] : module.kernels)
    EXPECT_EQ(executed.count(name), 1u) << name << " has no case";
  std::printf(
      "%zu kernels, %zu launches, %llu values compared, %llu differences, %llu instructions of warps\n",
      executed.size(), cases.size(), static_cast<unsigned long long>(values),
      static_cast<unsigned long long>(differences), static_cast<unsigned long long>(instructions));
}

TEST(PtxKernels, OfForebayGiveTheBitsOfTheirDefinitions) {
  expect_all_same(forebay_ptx(), forebay_cases(kernel_test::test_seed()));
}

TEST(PtxKernels, OfTheSampleGiveTheBitsOfTheirDefinitions) {
  expect_all_same(gpt_ptx(), gpt_cases(kernel_test::test_seed()));
}

}  // namespace
}  // namespace forebay::ptx_test
