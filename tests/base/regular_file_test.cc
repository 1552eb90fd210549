#include "forebay/regular_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "tests/support/temporary_directory.h"

namespace forebay::internal {
namespace {

TEST(RegularFile, IsReadUpToTheLimit) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "file";
  const std::string text = std::string(200'000, 'a') + '\0' + "b";
  std::ofstream(path, std::ios::binary) << text;

  EXPECT_EQ(read_regular_file(path, text.size()).value(), text);
  const Status large = read_regular_file(path, text.size() - 1).status();
  EXPECT_EQ(large.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(large.message(), "it has more than 195.31 KiB");
}

TEST(RegularFile, MayBeEmptyOrHaveNoSize) {
  const testing::TemporaryDirectory directory;
  std::ofstream(directory / "empty").close();

  EXPECT_EQ(read_regular_file(directory / "empty", 0).value(), "");
  EXPECT_NE(read_regular_file("/proc/self/status", 1 << 20).value().find("Name:"), std::string::npos);
  EXPECT_EQ(read_regular_file("/proc/self/status", 10).status().message(), "it has more than 10 B");
}

TEST(RegularFile, OthersAreRefusedAtOnce) {
  const testing::TemporaryDirectory directory;
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);

  for (const std::string& path : {directory / "pipe", directory / ".", std::string("/dev/zero")}) {
    const Status status = read_regular_file(path, 1 << 20).status();
    EXPECT_EQ(status.code(), StatusCode::kIoError) << path;
    EXPECT_EQ(status.message(), "it is not a regular file") << path;
  }
  EXPECT_EQ(read_regular_file(directory / "none", 1).status().message(), "No such file or directory");
}

}  // namespace
}  // namespace forebay::internal
