// Tests that go all the way, which take too long to be run every time.
#ifndef FOREBAY_TESTS_SUPPORT_SLOW_H_
#define FOREBAY_TESTS_SUPPORT_SLOW_H_

#include <gtest/gtest.h>

#include <string_view>

namespace forebay::testing {

// Whether the test that runs is one of those: its suite's name begins with Slow, and forebay_test gives it
// the label slow.
inline bool is_slow_test() {
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return test != nullptr && std::string_view(test->test_suite_name()).substr(0, 4) == "Slow";
}

}  // namespace forebay::testing

#endif  // FOREBAY_TESTS_SUPPORT_SLOW_H_
