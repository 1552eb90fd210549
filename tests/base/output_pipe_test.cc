#include "forebay/output_pipe.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "forebay/descriptor.h"
#include "tests/support/temporary_directory.h"

namespace forebay {
namespace {

TEST(OutputPipe, WritesWaitForTheReaderAndNoOtherProgramHasIt) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const internal::Descriptor reader(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ASSERT_TRUE(reader.valid());

  const internal::Descriptor writer(open_output_pipe(path.c_str()));

  ASSERT_TRUE(writer.valid());
  EXPECT_EQ(::fcntl(writer.number(), F_GETFL) & (O_NONBLOCK | O_ACCMODE), O_WRONLY);
  EXPECT_NE(::fcntl(writer.number(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(OutputPipe, AFileIsOpenedWithTheFlagsThatAreGiven) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "file";
  EXPECT_EQ(open_output_pipe(path.c_str()), -1) << "there is none";
  std::ofstream(path) << "before";

  const internal::Descriptor file(open_output_pipe(path.c_str(), O_TRUNC));

  ASSERT_TRUE(file.valid());
  struct stat facts {};
  ASSERT_EQ(::fstat(file.number(), &facts), 0);
  EXPECT_EQ(facts.st_size, 0);
}

}  // namespace
}  // namespace forebay
