// Options by name: one table with the command line, and the few of the C interface itself.

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

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
  options.set("agree.more", "3");
  EXPECT_STREQ(c::get<const char*>(forebay_options_get, options, "agree.more"), "3");
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
  options.set("store-directories", ",/a,,/b,");
  EXPECT_EQ(get(options, "store-directories"), "/a,/b");
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

std::map<std::string, std::string> all_values(const c::Options& options) {
  std::map<std::string, std::string> values;
  for (const auto& one : nlohmann::json::parse(c::get<const char*>(forebay_options_report, options)))
    values[one["name"]] = one["value"];
  return values;
}

TEST(CApiOptions, HaveTheirDefaultsAndPlaceholders) {
  c::Options options;
  std::string text;
  for (const auto& one : nlohmann::json::parse(c::get<const char*>(forebay_options_report, options))) {
    const std::string name = one["name"];
    if (find_option(name) != nullptr) continue;  // An option of the command line.
    text += name + " " + std::string(one["values"]) + " [" + std::string(one["value"]) + "]\n";
  }
  EXPECT_EQ(text, R"(device-memory BYTES [0]
granularity BYTES [0]
guard off|on [off]
rank N [-1]
size N [0]
local-rank N [-1]
store TEXT []
store-prefix TEXT []
interface TEXT []
configuration TEXT []
deadline MILLISECONDS [60000]
join-deadline MILLISECONDS [0]
communicator auto|shm|gloo|nccl [auto]
nccl-library TEXT []
nccl-order rank|fast [rank]
beta1 NUMBER [0.9]
beta2 NUMBER [0.95]
epsilon NUMBER [1e-08]
loss-scale NUMBER [65536.0]
loss-scale-growth-interval N [2000]
loss-scale-minimum NUMBER [1.0]
host-threads N [0]
near-device off|on [on]
counts-replicated off|on [on]
optional-gradients off|on [on]
find-non-finite off|on [off]
arena-limit BYTES [0]
arena-reserve BYTES [0]
arena-chunk BYTES [0]
arena-growth BYTES [0]
arena-largest-chunk BYTES [0]
arena-history BYTES [0]
pinned-limit BYTES [0]
pinned-slab BYTES [1073741824]
pinned-numa-node N [-1]
pinned-huge-pages off|on [on]
activation-micro-batches N [1]
activation-look-ahead N [1]
activation-fetch-bytes-per-second NUMBER [0.0]
activation-gather-bytes-per-second NUMBER [0.0]
activation-leases N [1]
activation-staging-count N [2]
activation-tier cpu|nvme:DIR[,DIR...] [cpu]
activation-device-memory BYTES [0]
activation-host-memory BYTES [0]
activation-file-staging BYTES [16777216]
activation-region off|on [off]
activation-placement keep|partition|partition+spill|auto [keep]
activation-shared off|on [on]
activation-spill-fraction NUMBER [1.0]
activation-state-bytes BYTES [0]
activation-recompute-seconds NUMBER [0.0]
store-directories DIR[,DIR...] []
store-engine auto|io_uring|threads [auto]
store-block BYTES [4194304]
store-depth N [8]
store-checksums off|on [on]
store-direct off|on [on]
)");
}

// A value of each kind that is no default; the option takes it, and no other option changes.
TEST(CApiOptions, HaveAPlaceOfTheirOwn) {
  c::Options usual;
  const auto before = all_values(usual);
  for (const auto& one : nlohmann::json::parse(c::get<const char*>(forebay_options_report, usual))) {
    const std::string name = one["name"];
    const std::string values = one["values"];
    if (find_option(name) != nullptr) continue;
    const std::size_t last = values.rfind('|');
    const std::string value = values == "BYTES"                   ? "12345"
                              : values == "N"                     ? "37"
                              : values == "NUMBER"                ? "0.375"
                              : values == "MILLISECONDS"          ? "98765"
                              : values == "TEXT"                  ? "some text"
                              : values == "DIR[,DIR...]"          ? "/a,/b"
                              : values == "cpu|nvme:DIR[,DIR...]" ? "nvme:/a,/b"
                              : before.at(name) == values.substr(last + 1)
                                  ? values.substr(0, values.find('|'))
                                  : values.substr(last + 1);
    ASSERT_NE(value, before.at(name)) << name;
    c::Options options;
    ASSERT_OK(forebay_options_set(options, name.c_str(), value.c_str())) << name;
    auto expected = before;
    expected[name] = value;
    EXPECT_EQ(all_values(options), expected) << name;
  }
}

TEST(CApiOptions, ThatAreUnknownNameTheNearest) {
  c::Options options;
  EXPECT_EQ(forebay_options_set(options, "stge", "3"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "there is no option stge; did you mean stage?");
  const char* value = nullptr;
  EXPECT_EQ(forebay_options_get(options, "stge", &value), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "there is no option stge; did you mean stage?");
  EXPECT_EQ(forebay_options_set(options, "arena-limits", "3"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "there is no option arena-limits; did you mean arena-limit?");
  EXPECT_EQ(forebay_options_set(options, "wallpaper-colour", "3"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "there is no option wallpaper-colour; forebay_options_report() lists all");
  for (const char* const ranks : {"ranks", "world-size"}) {
    EXPECT_EQ(forebay_options_set(options, ranks, "3"), FOREBAY_INVALID_ARGUMENT);
    EXPECT_EQ(last_error(), std::string("there is no option ") + ranks + "; did you mean size?");
  }
  for (const char* const step : {"lr", "weight-decay", "clip", "gradient-factor", "metric", "stop"}) {
    EXPECT_EQ(forebay_options_set(options, step, "3"), FOREBAY_INVALID_ARGUMENT);
    EXPECT_EQ(last_error(), std::string("there is no option ") + step +
                                ", because it may change at each step; give it to forebay_hyperparameter() "
                                "after forebay_engine_commit()");
  }
  EXPECT_EQ(forebay_options_set(options, "agree.", "3"), FOREBAY_INVALID_ARGUMENT);
}

TEST(CApiOptions, ThatAreOutOfRangeNameTheAllowedValuesAndChangeNothing) {
  c::Options options{{"stage", "2"}, {"communicator", "shm"}};
  EXPECT_EQ(forebay_options_set(options, "stage", "4"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(get(options, "stage"), "2");
  EXPECT_EQ(forebay_options_set(options, "communicator", "pigeons"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "communicator is pigeons; use auto|shm|gloo|nccl");
  EXPECT_EQ(get(options, "communicator"), "shm");
  EXPECT_EQ(forebay_options_set(options, "guard", "yes"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "guard is yes; use off|on");
  EXPECT_EQ(forebay_options_set(options, "store-directories", ","), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "store-directories is ,; use DIR[,DIR...]");
  for (const char* const bad : {"", "-1", "1e3", "99999999999"})
    EXPECT_EQ(forebay_options_set(options, "deadline", bad), FOREBAY_INVALID_ARGUMENT) << bad;
}

TEST(CApiOptions, WithControlCharactersAreSpelledOutInMessages) {
  c::Options options;
  const char* const clears = "\x1b[2J";
  for (const char* const name : {"deadline", "stage", "offload-fraction", "activation-tier", clears}) {
    EXPECT_EQ(forebay_options_set(options, name, clears), FOREBAY_INVALID_ARGUMENT) << name;
    EXPECT_EQ(last_error().find('\x1b'), std::string::npos) << last_error();
    EXPECT_NE(last_error().find("\\x1b[2J"), std::string::npos) << last_error();
  }
}

TEST(CApiOptions, ComeFromTheLauncher) {
  setenv("FOREBAY_RANK", "2", 1);
  setenv("FOREBAY_SIZE", "5", 1);
  setenv("FOREBAY_STORE", "/tmp/somewhere", 1);
  setenv("FOREBAY_LOCAL_RANK", "1", 1);
  setenv("FOREBAY_INTERFACE", "127.0.0.2", 1);
  c::Options options;
  EXPECT_OK(forebay_options_from_environment(options));
  EXPECT_EQ(get(options, "rank"), "2");
  EXPECT_EQ(get(options, "size"), "5");
  EXPECT_EQ(get(options, "store"), "/tmp/somewhere");
  EXPECT_EQ(get(options, "local-rank"), "1");
  EXPECT_EQ(get(options, "interface"), "127.0.0.2");
  for (const char* const name :
       {"FOREBAY_RANK", "FOREBAY_SIZE", "FOREBAY_STORE", "FOREBAY_LOCAL_RANK", "FOREBAY_INTERFACE"})
    unsetenv(name);
}

}  // namespace
}  // namespace forebay::api
