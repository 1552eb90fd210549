// Options by name: one table with the command line, and the few of the C interface itself.

#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "forebay/sharding_options.h"
#include "tests/api/fixture.h"

namespace forebay::api {
namespace {

std::string get(const c::Options& options, const char* name) {
  return c::get<const char*>(forebay_options_get, options, name);
}

TEST(CApiOptions, AnAgreementThatIsSetTwiceHasTheLaterValue) {
  c::Options options;
  options.set("agree.data", "1");
  options.set("agree.data", "2");
  EXPECT_STREQ(c::get<const char*>(forebay_options_get, options, "agree.data"), "2");
}

TEST(CApiOptions, HaveTheNamesAndValuesOfTheCommandLine) {
  c::Options options;
  for (const OptionRow& row : sharding_option_table()) {
    const std::string value = get(options, row.name);
    EXPECT_EQ(value, option_text(ShardingOptions(), row.name));
    EXPECT_OK(forebay_options_set(options, row.name, value.c_str()));
  }
  options.set("offload-tier", "nvme:/a,/b");
  EXPECT_EQ(get(options, "offload-tier"), "nvme:/a,/b");
}

TEST(CApiOptions, AreReadBackAsTheyWereSet) {
  c::Options options;
  const auto list = nlohmann::json::parse(c::get<const char*>(forebay_options_report, options));
  ASSERT_GT(list.size(), 50u);
  for (const auto& one : list) {
    const std::string name = one["name"];
    const std::string value = one["value"];
    EXPECT_GT(std::string(one["help"]).size(), 5u) << name;
    if (value.empty()) continue;  // Lists of directories, and texts.
    EXPECT_OK(forebay_options_set(options, name.c_str(), value.c_str()));
    EXPECT_EQ(get(options, name.c_str()), value) << name;
  }
}

TEST(CApiOptions, ThatAreUnknownNameTheNearest) {
  c::Options options;
  EXPECT_EQ(forebay_options_set(options, "stge", "3"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "there is no option stge; did you mean stage?");
  EXPECT_EQ(forebay_options_set(options, "arena-limits", "3"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "there is no option arena-limits; did you mean arena-limit?");
  EXPECT_EQ(forebay_options_set(options, "wallpaper-colour", "3"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "there is no option wallpaper-colour; forebay_options_report() lists all");
}

TEST(CApiOptions, ThatAreOutOfRangeNameTheAllowedValuesAndChangeNothing) {
  c::Options options{{"stage", "2"}, {"communicator", "shm"}};
  EXPECT_EQ(forebay_options_set(options, "stage", "4"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(get(options, "stage"), "2");
  EXPECT_EQ(forebay_options_set(options, "communicator", "pigeons"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "communicator is pigeons; use auto|shm|gloo|nccl");
  EXPECT_EQ(get(options, "communicator"), "shm");
  for (const char* const bad : {"", "-1", "1e3", "99999999999"})
    EXPECT_EQ(forebay_options_set(options, "deadline", bad), FOREBAY_INVALID_ARGUMENT) << bad;
}

TEST(CApiOptions, ComeFromTheLauncher) {
  setenv("FOREBAY_RANK", "2", 1);
  setenv("FOREBAY_SIZE", "5", 1);
  setenv("FOREBAY_STORE", "/tmp/somewhere", 1);
  c::Options options;
  EXPECT_OK(forebay_options_from_environment(options));
  EXPECT_EQ(get(options, "rank"), "2");
  EXPECT_EQ(get(options, "size"), "5");
  EXPECT_EQ(get(options, "store"), "/tmp/somewhere");
  for (const char* const name : {"FOREBAY_RANK", "FOREBAY_SIZE", "FOREBAY_STORE"}) unsetenv(name);
}

}  // namespace
}  // namespace forebay::api
