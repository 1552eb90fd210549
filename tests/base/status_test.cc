#include "forebay/status.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "forebay/check.h"
#include "forebay/log.h"

namespace forebay {
namespace {

TEST(Status, SaysCodeAndMessage) {
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status().to_string(), "kOk");
  const Status status(StatusCode::kTimeout, "late");
  EXPECT_EQ(status.to_string(), "kTimeout: late");
  EXPECT_EQ(status.with_context("step 3").to_string(), "kTimeout: step 3: late");
  EXPECT_TRUE(Status().with_context("step 3").ok());
}

TEST(Status, EachCodeHasItsName) {
  const char* const names[] = {"kOk",      "kInvalidArgument", "kOutOfMemory", "kUnsupported", "kUnavailable",
                               "kIoError", "kTimeout",         "kPeerLost",    "kCorruption",  "kInternal"};
  for (int code = 0; code <= 9; ++code)
    EXPECT_STREQ(status_code_name(static_cast<StatusCode>(code)), names[code]);
  EXPECT_STREQ(status_code_name(static_cast<StatusCode>(10)), "kUnknown");
  EXPECT_STREQ(status_code_name(static_cast<StatusCode>(-1)), "kUnknown");
}

// The level is read once in a process, so each is tried in one of its own.
TEST(LogDeathTest, TheLevelIsThatOfTheEnvironment) {
  const auto lines_at = [](const char* level) {
    if (level == nullptr) {
      ::unsetenv("FOREBAY_LOG");
    } else {
      ::setenv("FOREBAY_LOG", level, 1);
    }
    log(LogLevel::kError, "an error");
    log(LogLevel::kWarning, "a warning");
    log(LogLevel::kInfo, "a %s", "fact");
    log(LogLevel::kDebug, "%s", std::string(2000, 'd').c_str());
    std::_Exit(3);
  };
  const std::string error = "^forebay: an error\n", warning = "forebay: a warning\n",
                    fact = "forebay: a fact\n";
  EXPECT_EXIT(lines_at("off"), ::testing::ExitedWithCode(3), "^$");
  EXPECT_EXIT(lines_at("error"), ::testing::ExitedWithCode(3), error + "$");
  EXPECT_EXIT(lines_at(nullptr), ::testing::ExitedWithCode(3), error + warning + "$");
  EXPECT_EXIT(lines_at(""), ::testing::ExitedWithCode(3), error + warning + "$");
  EXPECT_EXIT(lines_at("loud"), ::testing::ExitedWithCode(3),
              "^forebay: FOREBAY_LOG is not one of off, error, warning, info and debug\nforebay: an error\n" +
                  warning + "$");
  EXPECT_EXIT(lines_at("info"), ::testing::ExitedWithCode(3), error + warning + fact + "$");
  EXPECT_EXIT(lines_at("debug"), ::testing::ExitedWithCode(3),
              error + warning + fact + "forebay: " + std::string(1013, 'd') + "\n$");
}

TEST(LogDeathTest, TextsOfOthersDoNotCommandTheTerminal) {
  const auto show = [] {
    ::unsetenv("FOREBAY_LOG");
    log(LogLevel::kError, "%s", "a\x1b[2Jb\x7f\r\t\xc3\xa4\nc");
    std::_Exit(3);
  };
  EXPECT_EXIT(show(), ::testing::ExitedWithCode(3), "^forebay: a\\?\\[2Jb\\?\\?\t\xc3\xa4\nc\n$");
}

TEST(Result, HoldsAValueOrAnError) {
  EXPECT_EQ(Result<int>(3).value(), 3);
  EXPECT_TRUE(Result<int>(3).status().ok());
  EXPECT_EQ(Result<int>(Status(StatusCode::kIoError, "gone")).status().code(), StatusCode::kIoError);
}

TEST(ResultDeathTest, TheValueOfAnErrorStopsTheProcess) {
  const Result<int> failed(Status(StatusCode::kIoError, "gone"));
  EXPECT_DEATH(static_cast<void>(failed.value()), "value\\(\\) of a failed Result");
}

TEST(CheckDeathTest, PrintsTheConditionAndTheValues) {
  const int found = 3;
  EXPECT_DEATH(FOREBAY_CHECK(found == 4, "found %d", found), "check failed: found == 4: found 3");
}

}  // namespace
}  // namespace forebay
