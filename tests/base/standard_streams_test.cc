// Each case is a process of its own, whose exit code is the answer.
#include "forebay/standard_streams.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace forebay {
namespace {

TEST(StandardStreamsDeathTest, ThoseThatAreClosedAreOpenedAndNoOther) {
  const auto keep = [](int closed) {
    ::close(closed);
    keep_standard_streams();
    keep_standard_streams();
    // The next file gets none of their numbers, and none was used up.
    const bool is_there = ::fcntl(closed, F_GETFD) == 0;
    const int next = ::dup(closed);
    ::close(next);
    const int before = ::open("/dev/null", O_RDONLY);
    std::_Exit(is_there && next > 2 && before == next ? 3 : 4);
  };
  for (const int closed : {0, 1, 2}) EXPECT_EXIT(keep(closed), ::testing::ExitedWithCode(3), "");
}

TEST(StandardStreamsDeathTest, AnEarlierWriteThatFailedIsToldAtTheEnd) {
  const auto flush_to = [](const char* path, bool buffered) {
    static_cast<void>(!std::freopen(path, "w", stdout));
    std::setvbuf(stdout, nullptr, buffered ? _IOFBF : _IONBF, BUFSIZ);
    std::fputs("text", stdout);
    const Status status = flush_standard_output();
    std::_Exit(status.ok() ? 3 : status.code() == StatusCode::kIoError ? 4 : 5);
  };
  for (const bool buffered : {true, false}) {
    EXPECT_EXIT(flush_to("/dev/full", buffered), ::testing::ExitedWithCode(4), "");
    EXPECT_EXIT(flush_to("/dev/null", buffered), ::testing::ExitedWithCode(3), "");
  }
}

}  // namespace
}  // namespace forebay
