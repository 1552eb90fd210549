// File stores of whole processes: after a kill, in a container, on a full disk.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "forebay/file_store.h"
#include "tests/offload/store_support.h"
#include "tests/support/process.h"

namespace forebay::testing {
namespace {

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

class StoreProcess : public ::testing::Test {
 protected:
  // In a directory that other users may write to as well.
  Finished run(const std::string& what) {
    ::chmod(directory_.path().c_str(), 0777);
    return run_program({FOREBAY_STORE_PROBE, what, directory_.path()}, {{"FOREBAY_LOG", "info"}});
  }
  TemporaryDirectory directory_;
};

#define RUN_OR_SKIP(finished, what)                              \
  const Finished finished = run(what);                           \
  if (finished.exit_code == 77) GTEST_SKIP() << finished.output; \
  ASSERT_EQ(finished.exit_code, 0) << finished.output

TEST_F(StoreProcess, AKillLeavesNothingInTheDirectory) {
  for (const std::string engine : {"auto", "threads"}) {
    Process process({FOREBAY_STORE_PROBE, "hold", engine, directory_.path()});
    ASSERT_TRUE(process.wait_for_output("ready\n"));

    process.signal(SIGKILL);

    EXPECT_EQ(process.finish().exit_code, 128 + SIGKILL);
    EXPECT_TRUE(std::filesystem::is_empty(directory_.path())) << engine;
  }
}

TEST_F(StoreProcess, ThreadsServeWhereIoUringIsForbidden) {
  RUN_OR_SKIP(finished, "forbidden");

  EXPECT_NE(finished.output.find("threads"), std::string::npos) << finished.output;
  EXPECT_EQ(count_of(finished.output, "cannot use io_uring"), has_io_uring() ? 1u : 0u) << finished.output;
}

TEST_F(StoreProcess, RegistersWhatTheLimitOnLockedMemoryAllows) {
  RUN_OR_SKIP(finished, "little-memlock");

  const std::size_t at = finished.output.find("registered ");
  ASSERT_NE(at, std::string::npos) << finished.output;
  const std::uint64_t registered = std::stoull(finished.output.substr(at + 11));
  EXPECT_GE(registered, 1u << 20) << finished.output;
  EXPECT_LT(registered, 16u << 20) << finished.output;
  EXPECT_EQ(count_of(finished.output, "ulimit -l"), 1u) << finished.output;
}

TEST_F(StoreProcess, AFullDiskIsMetWhenARangeIsMade) {
  RUN_OR_SKIP(finished, "full-disk");

  EXPECT_NE(finished.output.find("'too large'"), std::string::npos) << finished.output;
  EXPECT_NE(finished.output.find("No space left on device"), std::string::npos) << finished.output;
}

TEST_F(StoreProcess, ARangeThatOneOfTwoDisksRefusesTakesNoSpaceOnTheOther) {
  RUN_OR_SKIP(finished, "full-second-disk");
}

TEST_F(StoreProcess, ALimitOnFilesIsAnErrorAndNoSignal) {
  RUN_OR_SKIP(finished, "small-files");

  EXPECT_NE(finished.output.find("ulimit -f"), std::string::npos) << finished.output;
}

}  // namespace
}  // namespace forebay::testing
