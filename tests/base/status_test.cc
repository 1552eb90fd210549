#include "forebay/status.h"

#include <gtest/gtest.h>

#include "forebay/check.h"

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
