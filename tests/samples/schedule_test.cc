// Learning rates: their values at the edges, and training with them.

#include "trainer/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "trainer/options.h"

namespace forebay::gpt {
namespace {

std::vector<double> rates(ScheduleOptions options) {
  std::vector<double> all;
  for (std::uint64_t step = 0; step < options.steps; ++step) all.push_back(learning_rate(options, step));
  return all;
}

ScheduleOptions options_of(Schedule schedule) {
  return {.schedule = schedule, .steps = 21, .warmup = 0, .peak = 1e-3, .last = 1e-4};
}

TEST(LearningRates, AreConstantByDefault) {
  for (const double rate : rates(options_of(Schedule::kConstant))) EXPECT_EQ(rate, 1e-3);
}

TEST(LearningRates, BeginAtThePeakAndEndAtTheLastRate) {
  for (const Schedule schedule : {Schedule::kCosine, Schedule::kLinear, Schedule::kWsd}) {
    const std::vector<double> all = rates(options_of(schedule));
    EXPECT_EQ(all.front(), 1e-3) << schedule_name(schedule);
    EXPECT_NEAR(all.back(), 1e-4, 1e-18) << schedule_name(schedule);
    for (std::size_t i = 1; i < all.size(); ++i)
      EXPECT_LE(all[i], all[i - 1]) << schedule_name(schedule) << i;
  }
  EXPECT_NEAR(rates(options_of(Schedule::kCosine))[10], 5.5e-4, 1e-15);
  EXPECT_NEAR(rates(options_of(Schedule::kLinear))[5], 1e-3 - 9e-4 / 4, 1e-15);
  EXPECT_EQ(rates(options_of(Schedule::kWsd))[16], 1e-3);
  EXPECT_NEAR(rates(options_of(Schedule::kWsd))[18], 5.5e-4, 1e-15);
}

TEST(LearningRates, RiseDuringTheWarmUp) {
  for (const Schedule schedule :
       {Schedule::kConstant, Schedule::kCosine, Schedule::kLinear, Schedule::kWsd}) {
    ScheduleOptions options = options_of(schedule);
    options.warmup = 4;
    const std::vector<double> all = rates(options);
    EXPECT_EQ(all[0], 2.5e-4);
    EXPECT_EQ(all[3], 1e-3);
    EXPECT_EQ(all[4], 1e-3);
    EXPECT_NEAR(all.back(), schedule == Schedule::kConstant ? 1e-3 : 1e-4, 1e-18);
  }
}

TEST(LearningRates, OfShortRunsAreFinite) {
  for (const Schedule schedule :
       {Schedule::kConstant, Schedule::kCosine, Schedule::kLinear, Schedule::kWsd}) {
    for (const std::uint64_t steps : {1, 2, 3}) {
      for (std::uint64_t warmup = 0; warmup <= steps; ++warmup) {
        ScheduleOptions options = options_of(schedule);
        options.steps = steps;
        options.warmup = warmup;
        for (const double rate : rates(options)) {
          EXPECT_GE(rate, 1e-4);
          EXPECT_LE(rate, 1e-3);
        }
      }
    }
  }
}

TEST(LearningRates, AreReadFromTheCommandLine) {
  const std::optional<TrainerOptions> options =
      parse_command({"--schedule", "cosine", "--warmup", "3", "--last-lr", "1e-5", "--steps", "50"}).options;
  ASSERT_TRUE(options);
  const ScheduleOptions schedule = schedule_of(*options);
  EXPECT_EQ(schedule.schedule, Schedule::kCosine);
  EXPECT_EQ(schedule.steps, 50u);
  EXPECT_EQ(schedule.warmup, 3u);
  EXPECT_EQ(schedule.last, 1e-5);
  const auto refused = [](const std::vector<std::string>& arguments, const std::string& part) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(parse_command(arguments).exit_code, 2);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find(part), std::string::npos) << said;
  };
  refused({"--schedule", "square"}, "--schedule");
  refused({"--last-lr", "1e-4"}, "add --schedule cosine");
  refused({"--warmup", "11", "--steps", "10"}, "warm up for fewer steps");
}

}  // namespace
}  // namespace forebay::gpt
